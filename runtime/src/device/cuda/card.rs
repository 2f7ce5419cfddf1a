//! A GPU: memory, streams and loaded kernels.

use super::compile::{Architecture, CompileFault, cubin};
use super::launch_plan::{Base, Fault, Launch, LaunchPlan};
use super::library::{self, FOLDERS};
use super::prelude::ENTRY;
use cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};
use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::{Arc, Mutex, PoisonError};
use thiserror::Error;

#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum CardFault {
    #[error("libcuda was not found; if this machine has a GPU, set {FOLDERS} to the driver's folder")]
    NoDriver,
    #[error("there is no GPU {ordinal}; the driver reports {count}")]
    NoSuchCard { ordinal: usize, count: usize },
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

/// An open GPU. Memory and kernels on it keep it open.
pub struct Gpu {
    context: Arc<CudaContext>,
    about: GpuInfo,
    kernels: Mutex<HashMap<Arc<str>, Kernel>>,
}

/// A kernel, loaded until the process ends.
#[derive(Clone, Copy)]
struct Kernel(sys::CUfunction);

// SAFETY: a function handle may be launched from any thread that has bound its context.
unsafe impl Send for Kernel {}

/// An allocation on a GPU.
pub struct Memory {
    card: Arc<Gpu>,
    address: sys::CUdeviceptr,
    bytes: usize,
}

/// An in-order queue of work on a GPU.
pub struct Stream {
    card: Arc<Gpu>,
    stream: Arc<CudaStream>,
}

/// Base addresses of a launch plan's arguments.
pub struct Operands<'a> {
    pub inputs: &'a [u64],
    pub outputs: &'a [u64],
    pub scratch: u64,
    /// Address of the [`Fault`] cell.
    pub fault: u64,
}

/// Number of GPUs; 0 without a driver.
pub fn count() -> usize {
    if library::driver().is_none() {
        return 0;
    }
    CudaContext::device_count().map_or(0, |count| usize::try_from(count).unwrap_or(0))
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

impl Gpu {
    pub fn open(ordinal: usize) -> Result<Arc<Gpu>, CardFault> {
        // Without the library the calls below would panic.
        library::driver().ok_or(CardFault::NoDriver)?;
        let count = count();
        if ordinal >= count {
            return Err(CardFault::NoSuchCard { ordinal, count });
        }
        let context = CudaContext::new(ordinal)?;
        let (major, minor) = context.compute_capability()?;
        let mut driver = 0;
        // SAFETY: the driver is loaded and writes one number.
        unsafe { sys::cuDriverGetVersion(&mut driver) }.result()?;
        let about = GpuInfo {
            ordinal,
            name: context.name()?,
            architecture: Architecture { major: major.unsigned_abs(), minor: minor.unsigned_abs() },
            memory: context.total_mem()?,
            driver,
        };
        Ok(Arc::new(Gpu { context, about, kernels: Mutex::default() }))
    }

    pub fn about(&self) -> &GpuInfo {
        &self.about
    }

    /// Free bytes, also considering other processes.
    pub fn free(&self) -> Result<usize, CardFault> {
        Ok(self.context.mem_get_info()?.0)
    }

    /// Allocates uninitialised memory.
    pub fn allocate(self: &Arc<Gpu>, bytes: usize) -> Result<Memory, CardFault> {
        self.context.bind_to_thread()?;
        // SAFETY: the address is used within `bytes`, and freed once, when the memory is dropped.
        match unsafe { result::malloc_sync(bytes.max(1)) } {
            Ok(address) => Ok(Memory { card: self.clone(), address, bytes }),
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => {
                let free = self.free()?;
                Err(CardFault::Memory { ordinal: self.about.ordinal, needed: bytes, free })
            }
            Err(error) => Err(error.into()),
        }
    }

    pub fn stream(self: &Arc<Gpu>) -> Result<Stream, CardFault> {
        Ok(Stream { card: self.clone(), stream: self.context.new_stream()? })
    }

    fn kernel(&self, text: &Arc<str>) -> Result<Kernel, CardFault> {
        let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = kernels.get(text) {
            return Ok(*kernel);
        }
        let code = cubin(text, self.about.architecture)?;
        let name = CString::new(ENTRY).expect("the entry's name has no zero byte");
        self.context.bind_to_thread()?;
        // SAFETY: the code is a cubin compiled for this architecture; the module is never unloaded.
        let function = unsafe {
            let module = result::module::load_data(code.as_ptr().cast())?;
            result::module::get_function(module, name)?
        };
        kernels.insert(text.clone(), Kernel(function));
        Ok(Kernel(function))
    }
}

impl Memory {
    pub fn address(&self) -> u64 {
        self.address
    }

    pub fn len(&self) -> usize {
        self.bytes
    }

    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // After a device failure nothing can be freed; the driver reclaims the memory with the process.
        if self.card.context.bind_to_thread().is_ok() {
            // SAFETY: allocated in `Gpu::allocate` and freed only here.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

impl Stream {
    /// Copies bytes to the GPU and waits.
    pub fn upload(&self, bytes: &[u8], to: &Memory) -> Result<(), CardFault> {
        assert!(bytes.len() <= to.bytes, "the copy must fit");
        self.card.context.bind_to_thread()?;
        // SAFETY: both sides have the bytes, and the host side is not touched before the queue is empty.
        unsafe { result::memcpy_htod_async(to.address, bytes, self.stream.cu_stream())? };
        self.finish()
    }

    /// Copies bytes from the GPU after all queued work, and waits.
    pub fn download(&self, from: &Memory, bytes: &mut [u8]) -> Result<(), CardFault> {
        assert!(bytes.len() <= from.bytes, "the copied bytes must exist");
        self.card.context.bind_to_thread()?;
        // SAFETY: as in `upload`.
        unsafe { result::memcpy_dtoh_async(bytes, from.address, self.stream.cu_stream())? };
        self.finish()
    }

    /// Waits for all queued work.
    pub fn finish(&self) -> Result<(), CardFault> {
        Ok(self.stream.synchronize()?)
    }

    /// Queues the launches of a plan. Operands must have at least the sizes that the plan was made for.
    pub fn run(&self, launch_plan: &LaunchPlan, operands: &Operands<'_>) -> Result<(), CardFault> {
        self.card.context.bind_to_thread()?;
        launch_plan.launches.iter().try_for_each(|launch| self.launch(launch, operands))
    }

    fn launch(&self, launch: &Launch, operands: &Operands<'_>) -> Result<(), CardFault> {
        let kernel = self.card.kernel(&launch.text)?;
        let mut addresses: Vec<u64> = launch
            .arguments
            .iter()
            .map(|at| {
                let base = match at.base {
                    Base::Input(i) => operands.inputs[i],
                    Base::Output(i) => operands.outputs[i],
                    Base::Scratch => operands.scratch,
                    Base::Fault => operands.fault,
                };
                base + at.offset as u64
            })
            .collect();
        let mut parameters: Vec<*mut c_void> = addresses.iter_mut().map(|a| (a as *mut u64).cast()).collect();
        // SAFETY: the kernel takes as many addresses as the launch has, all on this GPU.
        unsafe {
            result::launch_kernel(
                kernel.0,
                (launch.blocks, 1, 1),
                (launch.threads, 1, 1),
                0,
                self.stream.cu_stream(),
                &mut parameters,
            )?;
        }
        Ok(())
    }
}

/// Decodes a fault cell copied from the GPU.
pub fn fault(bytes: &[u8; size_of::<Fault>()]) -> Fault {
    let word = |i: usize| u64::from_le_bytes(bytes[8 * i..8 * (i + 1)].try_into().expect("eight bytes"));
    Fault { kind: word(0), value: word(1) as i64, size: word(2) }
}
