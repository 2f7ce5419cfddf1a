//! A GPU: its context, memory and loaded kernels.

use super::compile::{Architecture, CompileFault, cubin};
use super::cublaslt::{CublasError, CublasLt};
use super::cudnn::Cudnn;
use super::cudnn_descriptor::CudnnError;
use super::event::CudaEvent;
use super::library::CudaLibrary;
use super::prelude::ENTRY;
use super::queue::Queue;
use super::search_path::FOLDERS;
use crate::device::buffer::DeviceMemory;
use crate::device::error::DeviceError;
use crate::device::event::Event;
use cudarc::driver::{CudaContext, DriverError, result, sys};
use parking_lot::Mutex;
use std::any::Any;
use std::collections::HashMap;
use std::ffi::CString;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use thiserror::Error;

#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum GpuError {
    #[error("libcuda was not found; if this machine has a GPU, set {FOLDERS} to the driver's folder")]
    NoDriver,
    #[error("there is no GPU {ordinal}; the driver reports {count}")]
    NoSuchGpu { ordinal: usize, count: usize },
    #[error("GPU {ordinal} has {free} bytes free, {needed} are needed; use a smaller micro-batch or more stages")]
    Memory { ordinal: usize, needed: usize, free: usize },
    #[error(transparent)]
    Compile(#[from] CompileFault),
    #[error("the driver failed: {0}")]
    Driver(#[from] DriverError),
    #[error("a matrix product failed: {0}")]
    Product(#[from] CublasError),
    #[error("a convolution failed: {0}")]
    Convolution(#[from] CudnnError),
}

/// Properties of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuInfo {
    pub ordinal: usize,
    pub name: String,
    pub architecture: Architecture,
    /// Memory in bytes.
    pub memory: usize,
    /// CUDA driver API version, e.g. 13000 for 13.0.
    pub driver: i32,
    /// Bytes of the L2 cache.
    pub cache: usize,
}

/// An open GPU. Memory and streams on it keep it open.
pub struct Gpu {
    // Libraries close before the context does.
    cublaslt: OnceLock<Option<CublasLt>>,
    cudnn: OnceLock<Option<Cudnn>>,
    context: Arc<CudaContext>,
    info: GpuInfo,
    functions: Mutex<HashMap<Arc<str>, Function>>,
    /// True if the driver has a pool of memory, which all open GPUs can access.
    has_pool: AtomicBool,
}

/// A kernel on a GPU, loaded until the process ends.
#[derive(Clone, Copy)]
pub struct Function(pub(super) sys::CUfunction);

// SAFETY: a function handle may be launched from any thread that has bound its context.
unsafe impl Send for Function {}
// SAFETY: as above; launches do not change it.
unsafe impl Sync for Function {}

/// An allocation on a GPU.
pub struct GpuMemory {
    gpu: Arc<Gpu>,
    address: sys::CUdeviceptr,
    bytes: usize,
    /// The stream in whose order it is freed, if it is of the driver's pool.
    queue: Option<Arc<Queue>>,
}

/// Number of GPUs; 0 without a driver.
pub fn count() -> usize {
    devices().unwrap_or(0)
}

/// Number of GPUs that the driver lists.
pub fn devices() -> Result<usize, GpuError> {
    // Without the library the call below would panic.
    CudaLibrary::Driver.find().map_err(|_| GpuError::NoDriver)?;
    match CudaContext::device_count() {
        Ok(count) => Ok(usize::try_from(count).unwrap_or(0)),
        Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => Ok(0),
        Err(error) => Err(error.into()),
    }
}

/// True if two GPUs have a direct link beyond the host bus (native peer atomics), or are the same GPU.
pub fn is_joined(first: usize, second: usize) -> bool {
    let (Ok(from), Ok(to)) = (i32::try_from(first), i32::try_from(second)) else { return false };
    if first == second || count() <= first.max(second) {
        return first == second;
    }
    let (mut is_linked, native) = (0, sys::CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED);
    // SAFETY: the driver knows both devices, whose handles are their ordinals, and writes one number.
    unsafe { sys::cuDeviceGetP2PAttribute(&mut is_linked, native, from, to) }.result().is_ok() && is_linked != 0
}

/// True if kernels on one GPU can read and write the memory of another.
pub fn can_access(first: usize, second: usize) -> bool {
    let (Ok(from), Ok(to)) = (i32::try_from(first), i32::try_from(second)) else { return false };
    if first == second || count() <= first.max(second) {
        return first == second;
    }
    let mut has_access = 0;
    // SAFETY: as in `is_joined`.
    unsafe { sys::cuDeviceCanAccessPeer(&mut has_access, from, to) }.result().is_ok() && has_access != 0
}

impl Gpu {
    pub fn open(ordinal: usize) -> Result<Arc<Gpu>, GpuError> {
        let count = devices()?;
        if ordinal >= count {
            return Err(GpuError::NoSuchGpu { ordinal, count });
        }
        let context = CudaContext::new(ordinal)?;
        let (major, minor) = context.compute_capability()?;
        let mut driver = 0;
        // SAFETY: the driver is loaded and writes one number.
        unsafe { sys::cuDriverGetVersion(&mut driver) }.result()?;
        let info = GpuInfo {
            ordinal,
            name: context.name()?,
            architecture: Architecture { major: major.unsigned_abs(), minor: minor.unsigned_abs() },
            memory: context.total_mem()?,
            driver,
            cache: usize::try_from(context.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?)
                .unwrap_or(0),
        };
        let pools = context.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)?;
        let gpu = Gpu {
            context,
            info,
            functions: Mutex::default(),
            has_pool: AtomicBool::new(pools != 0),
            cublaslt: OnceLock::new(),
            cudnn: OnceLock::new(),
        };
        if gpu.has_pool() {
            gpu.keep_freed_memory()?;
        }
        Ok(Arc::new(gpu))
    }

    pub fn info(&self) -> &GpuInfo {
        &self.info
    }

    /// The name of its device: `cuda:0`.
    pub fn name(&self) -> String {
        format!("cuda:{}", self.info.ordinal)
    }

    /// Lets copies between two GPUs use their link, if they have one. Else copies go through the host, which the driver
    /// does for plain memory only: neither GPU uses the pool then.
    pub fn join(&self, other: &Gpu) {
        for (from, to) in [(self, other), (other, self)] {
            if !from.can_access(to) || to.share_pool(from).is_err() {
                self.has_pool.store(false, Ordering::Relaxed);
                other.has_pool.store(false, Ordering::Relaxed);
            }
        }
    }

    /// Enables access to another GPU's memory, if the driver can.
    fn can_access(&self, other: &Gpu) -> bool {
        let mut has_access = 0;
        // SAFETY: both devices are open, and the driver writes one number.
        let status =
            unsafe { sys::cuDeviceCanAccessPeer(&mut has_access, self.context.cu_device(), other.context.cu_device()) };
        if status.result().is_err() || has_access == 0 || self.bind().is_err() {
            return false;
        }
        // SAFETY: both contexts are live.
        let enabled = unsafe { sys::cuCtxEnablePeerAccess(other.context.cu_ctx(), 0) }.result();
        matches!(enabled, Ok(()) | Err(DriverError(sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)))
    }

    /// The identity of the GPU, which all processes see.
    pub fn uuid(&self) -> Option<[u8; 16]> {
        self.context.uuid().ok().map(|uuid| uuid.bytes.map(|byte| byte as u8))
    }

    fn has_pool(&self) -> bool {
        self.has_pool.load(Ordering::Relaxed)
    }

    /// Lets another GPU access memory of the pool.
    fn share_pool(&self, other: &Gpu) -> Result<(), DriverError> {
        if !self.has_pool() {
            return Ok(());
        }
        let access = sys::CUmemAccessDesc {
            location: sys::CUmemLocation {
                type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
                id: other.context.cu_device(),
            },
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the pool is that of this device, and the driver reads one description.
        unsafe { sys::cuMemPoolSetAccess(self.pool()?, &access, 1) }.result()
    }

    /// Lets the calling thread use the GPU. Every other call of the driver requires it.
    pub fn bind(&self) -> Result<(), DriverError> {
        self.context.bind_to_thread()
    }

    /// cuBLASLt on this GPU, opened on first use. `None` if it is not installed or does not start.
    pub fn cublaslt(&self) -> Option<&CublasLt> {
        self.cublaslt.get_or_init(|| self.bind().ok().and_then(|()| CublasLt::open())).as_ref()
    }

    /// cuDNN on this GPU, opened on first use. `None` if it is not installed or does not start.
    pub fn cudnn(&self) -> Option<&Cudnn> {
        self.cudnn.get_or_init(|| self.bind().ok().and_then(|()| Cudnn::open())).as_ref()
    }

    /// Free bytes, also considering other processes.
    pub fn free(&self) -> Result<usize, GpuError> {
        Ok(self.context.mem_get_info()?.0)
    }

    /// Allocates zeroed memory. Work of any stream may use it at once.
    pub fn allocate(self: &Arc<Gpu>, bytes: usize) -> Result<GpuMemory, GpuError> {
        self.bind()?;
        let size = bytes.max(1);
        // SAFETY: the address is used within `bytes`, and freed once, when the memory is dropped.
        let address = self.allocate_with(bytes, || unsafe { result::malloc_sync(size) })?;
        let memory = GpuMemory { gpu: self.clone(), address, bytes, queue: None };
        // SAFETY: the memory has this size. Streams of pipec do not wait for the default stream, so the host does.
        unsafe {
            result::memset_d8_sync(address, 0, size)?;
            result::stream::synchronize(result::stream::null())?;
        }
        Ok(memory)
    }

    /// Allocates memory of the driver's pool, with arbitrary content, for work that is queued in a stream from now on. It
    /// is freed in the order of that stream. Waits only if memory is short or the GPU uses no pool.
    pub fn allocate_in_order(self: &Arc<Gpu>, bytes: usize, queue: &Arc<Queue>) -> Result<GpuMemory, GpuError> {
        if !self.has_pool() {
            return self.allocate(bytes);
        }
        self.bind()?;
        // SAFETY: as in `allocate`; the stream belongs to this GPU.
        let address = self.allocate_with(bytes, || unsafe { result::malloc_async(queue.raw(), bytes.max(1)) })?;
        Ok(GpuMemory { gpu: self.clone(), address, bytes, queue: Some(queue.clone()) })
    }

    /// An allocation; if memory is short, once more after the pool has given back what it keeps.
    fn allocate_with(
        &self,
        bytes: usize,
        allocate: impl Fn() -> Result<sys::CUdeviceptr, DriverError>,
    ) -> Result<sys::CUdeviceptr, GpuError> {
        let is_short = |address: &Result<_, DriverError>| {
            matches!(address, Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)))
        };
        let mut address = allocate();
        if is_short(&address) && self.has_pool() {
            self.context.synchronize()?;
            // SAFETY: the pool is that of this device.
            unsafe { sys::cuMemPoolTrimTo(self.pool()?, 0) }.result()?;
            address = allocate();
        }
        match is_short(&address) {
            true => Err(GpuError::Memory { ordinal: self.info.ordinal, needed: bytes, free: self.free()? }),
            false => Ok(address?),
        }
    }

    /// The driver's pool of memory.
    fn pool(&self) -> Result<sys::CUmemoryPool, DriverError> {
        let mut pool = std::ptr::null_mut();
        // SAFETY: the device is open, and the driver writes one handle.
        unsafe { sys::cuDeviceGetDefaultMemPool(&mut pool, self.context.cu_device()) }.result()?;
        Ok(pool)
    }

    /// Lets the pool keep freed memory for later allocations.
    fn keep_freed_memory(&self) -> Result<(), DriverError> {
        let (mut threshold, attribute) = (u64::MAX, sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD);
        // SAFETY: this attribute is a number of 64 bits.
        unsafe { sys::cuMemPoolSetAttribute(self.pool()?, attribute, (&raw mut threshold).cast()) }.result()
    }

    /// The kernel with this source, compiled and loaded on first use.
    pub fn function(&self, text: &Arc<str>) -> Result<Function, GpuError> {
        let functions = || self.functions.lock();
        if let Some(function) = functions().get(text) {
            return Ok(*function);
        }
        let code = cubin(text, self.info.architecture)?;
        let mut functions = functions();
        if let Some(function) = functions.get(text) {
            return Ok(*function);
        }
        let name = CString::new(ENTRY).expect("the entry's name has no zero byte");
        self.bind()?;
        // SAFETY: the code is a cubin compiled for this architecture; the module is never unloaded.
        let function = Function(unsafe {
            let module = result::module::load_data(code.as_ptr().cast())?;
            result::module::get_function(module, name)?
        });
        functions.insert(text.clone(), function);
        Ok(function)
    }

    /// The error of a call on this GPU.
    pub fn device_error(&self, error: impl Into<GpuError>) -> DeviceError {
        let device = self.name();
        match error.into() {
            GpuError::Memory { needed, free, .. } => {
                DeviceError::Memory { device, needed: needed as u64, free: free as u64 }
            }
            GpuError::Driver(error) => {
                let what = error.error_string().map_or(String::new(), |text| text.to_string_lossy().into_owned());
                DeviceError::Failed { device, what: format!("{what} ({:?})", error.0) }
            }
            error => DeviceError::Failed { device, what: error.to_string() },
        }
    }
}

impl GpuMemory {
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }
}

impl DeviceMemory for GpuMemory {
    fn address(&self) -> u64 {
        self.address
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn download(&self, start: usize, to: &mut [u8]) -> Result<(), DeviceError> {
        assert!(start <= self.bytes && to.len() <= self.bytes - start, "a range lies within its memory");
        let from = self.address + start as u64;
        // SAFETY: the memory has these bytes.
        let status = self.gpu.bind().and_then(|()| unsafe { result::memcpy_dtoh_sync(to, from) });
        status.map_err(|error| self.gpu.device_error(error))
    }

    fn free_after(&self, events: &[Event]) {
        for event in events {
            let cuda_event = event.device_event().and_then(|event| (event as &dyn Any).downcast_ref::<CudaEvent>());
            match (&self.queue, cuda_event) {
                (Some(queue), Some(cuda_event)) if self.gpu.bind().is_ok() => drop(cuda_event.event.delay(queue)),
                _ => drop(event.synchronize()),
            }
        }
    }
}

impl Drop for GpuMemory {
    fn drop(&mut self) {
        // After a device failure nothing can be freed; the driver reclaims the memory with the process.
        if self.gpu.bind().is_ok() {
            let _ = match &self.queue {
                // SAFETY: allocated in `Gpu::allocate` and freed only here. The driver waits for queued work on it.
                None => unsafe { result::free_sync(self.address) },
                // SAFETY: allocated in `Gpu::allocate_in_order` and freed only here, after the work of its stream and
                // that of `free_after`.
                Some(queue) => unsafe { result::free_async(self.address, queue.raw()) },
            };
        }
    }
}
