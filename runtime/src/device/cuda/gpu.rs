//! A GPU: its context, memory and loaded kernels.

use super::compile::{Architecture, CompileFault, cubin};
use super::library::CudaLibrary;
use super::prelude::ENTRY;
use super::search_path::FOLDERS;
use crate::device::buffer::DeviceMemory;
use crate::device::error::DeviceError;
use cudarc::driver::{CudaContext, DriverError, result, sys};
use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex, PoisonError};
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
}

/// An open GPU. Memory and streams on it keep it open.
pub struct Gpu {
    context: Arc<CudaContext>,
    info: GpuInfo,
    functions: Mutex<HashMap<Arc<str>, Function>>,
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
pub fn is_joined(one: usize, other: usize) -> bool {
    let (Ok(from), Ok(to)) = (i32::try_from(one), i32::try_from(other)) else { return false };
    if one == other || count() <= one.max(other) {
        return one == other;
    }
    let (mut joined, native) = (0, sys::CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED);
    // SAFETY: the driver knows both devices, whose handles are their ordinals, and writes one number.
    unsafe { sys::cuDeviceGetP2PAttribute(&mut joined, native, from, to) }.result().is_ok() && joined != 0
}

/// True if kernels on one GPU can read and write the memory of another.
pub fn can_access(one: usize, other: usize) -> bool {
    let (Ok(from), Ok(to)) = (i32::try_from(one), i32::try_from(other)) else { return false };
    if one == other || count() <= one.max(other) {
        return one == other;
    }
    let mut can = 0;
    // SAFETY: as in `is_joined`.
    unsafe { sys::cuDeviceCanAccessPeer(&mut can, from, to) }.result().is_ok() && can != 0
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
        };
        Ok(Arc::new(Gpu { context, info, functions: Mutex::default() }))
    }

    pub fn info(&self) -> &GpuInfo {
        &self.info
    }

    /// The name of its device: `cuda:0`.
    pub fn name(&self) -> String {
        format!("cuda:{}", self.info.ordinal)
    }

    /// Lets copies between two GPUs use their link, if they have one.
    pub fn join(&self, other: &Gpu) {
        for (from, to) in [(self, other), (other, self)] {
            let mut can = 0;
            // SAFETY: both devices are open, and the driver writes one number.
            let asked =
                unsafe { sys::cuDeviceCanAccessPeer(&mut can, from.context.cu_device(), to.context.cu_device()) };
            if asked.result().is_ok() && can != 0 && from.bind().is_ok() {
                // SAFETY: both contexts are live. Copies go through the host if this fails.
                let _ = unsafe { sys::cuCtxEnablePeerAccess(to.context.cu_ctx(), 0) };
            }
        }
    }

    /// Lets the calling thread use the GPU. Every other call of the driver requires it.
    pub fn bind(&self) -> Result<(), DriverError> {
        self.context.bind_to_thread()
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
        let address = match unsafe { result::malloc_sync(size) } {
            Ok(address) => address,
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => {
                let free = self.free()?;
                return Err(GpuError::Memory { ordinal: self.info.ordinal, needed: bytes, free });
            }
            Err(error) => return Err(error.into()),
        };
        let memory = GpuMemory { gpu: self.clone(), address, bytes };
        // SAFETY: the memory has this size. Streams of pipec do not wait for the default stream, so the host does.
        unsafe {
            result::memset_d8_sync(address, 0, size)?;
            result::stream::synchronize(result::stream::null())?;
        }
        Ok(memory)
    }

    /// The kernel with this source, compiled and loaded on first use.
    pub fn function(&self, text: &Arc<str>) -> Result<Function, GpuError> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = functions.get(text) {
            return Ok(*function);
        }
        let code = cubin(text, self.info.architecture)?;
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
    pub fn failed(&self, error: impl Into<GpuError>) -> DeviceError {
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

    fn download(&self, to: &mut [u8]) -> Result<(), DeviceError> {
        // SAFETY: `Buffer::download` passes as many bytes as the memory has.
        let copied =
            self.gpu.bind().and_then(|()| unsafe { result::memcpy_dtoh_sync(&mut to[..self.bytes], self.address) });
        copied.map_err(|error| self.gpu.failed(error))
    }
}

impl Drop for GpuMemory {
    fn drop(&mut self) {
        // After a device failure nothing can be freed; the driver reclaims the memory with the process.
        if self.gpu.bind().is_ok() {
            // SAFETY: allocated in `Gpu::allocate` and freed only here. The driver waits for queued work on it.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}
