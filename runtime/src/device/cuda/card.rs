//! A GPU: its memory, its streams, and the kernels that were loaded onto it.

use super::compile::{Architecture, CompileFault, cubin};
use super::library::{self, FOLDERS};
use super::prelude::ENTRY;
use super::recipe::{Base, Fault, Launch, LaunchPlan};
use cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};
use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::{Arc, Mutex, PoisonError};
use thiserror::Error;

/// Why a GPU did not do what it was asked.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum CardFault {
    #[error(
        "libcuda was not found, so there is no GPU here; where there is one, name the folder of its driver in {FOLDERS}"
    )]
    NoDriver,
    #[error("there is no GPU {ordinal}: the driver knows {count}")]
    NoSuchCard { ordinal: usize, count: usize },
    #[error(
        "GPU {ordinal} has {free} bytes left, {needed} are needed; fewer bytes are held with a smaller micro-batch or more stages"
    )]
    Memory { ordinal: usize, needed: usize, free: usize },
    #[error(transparent)]
    Compile(#[from] CompileFault),
    #[error("the driver failed: {0}")]
    Driver(#[from] DriverError),
}

/// What a card is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuInfo {
    /// Its place among the cards of the machine.
    pub ordinal: usize,
    /// The name that the driver gives it.
    pub name: String,
    /// Its generation.
    pub architecture: Architecture,
    /// Bytes of its memory.
    pub memory: usize,
    /// The version of the driver's interface, as in 13000 for 13.0.
    pub driver: i32,
}

/// A GPU. Whatever is allocated on it or loaded onto it keeps it open.
pub struct Gpu {
    context: Arc<CudaContext>,
    about: GpuInfo,
    kernels: Mutex<HashMap<Arc<str>, Kernel>>,
}

/// A kernel that lies on the card until the process ends.
#[derive(Clone, Copy)]
struct Kernel(sys::CUfunction);

// SAFETY: a function handle may be launched from any thread to which its context is bound.
unsafe impl Send for Kernel {}

/// Bytes on a card.
pub struct Memory {
    card: Arc<Gpu>,
    address: sys::CUdeviceptr,
    bytes: usize,
}

/// A queue of work on a card: what is put into it runs in order.
pub struct Stream {
    card: Arc<Gpu>,
    stream: Arc<CudaStream>,
}

/// The addresses that a recipe's arguments are relative to.
pub struct Operands<'a> {
    /// The inputs.
    pub inputs: &'a [u64],
    /// The outputs.
    pub outputs: &'a [u64],
    /// The scratch.
    pub scratch: u64,
    /// The [`Fault`] cell.
    pub fault: u64,
}

/// How many cards the driver knows; none where there is no driver.
pub fn count() -> usize {
    if library::driver().is_none() {
        return 0;
    }
    CudaContext::device_count().map_or(0, |count| usize::try_from(count).unwrap_or(0))
}

/// Whether two cards are joined by more than the bus of their host: they do atomic operations in each other's memory. A card is joined
/// with itself.
pub fn is_joined(one: usize, other: usize) -> bool {
    let (Ok(from), Ok(to)) = (i32::try_from(one), i32::try_from(other)) else { return false };
    if one == other || count() <= one.max(other) {
        return one == other;
    }
    let (mut joined, native) = (0, sys::CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED);
    // SAFETY: the driver knows both cards, whose handles are their ordinals, and writes one number.
    unsafe { sys::cuDeviceGetP2PAttribute(&mut joined, native, from, to) }.result().is_ok() && joined != 0
}

impl Gpu {
    /// Opens a card.
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
        // SAFETY: the driver is there and writes one number.
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

    /// What it is.
    pub fn about(&self) -> &GpuInfo {
        &self.about
    }

    /// Bytes that nobody holds, other processes included.
    pub fn free(&self) -> Result<usize, CardFault> {
        Ok(self.context.mem_get_info()?.0)
    }

    /// Takes memory; its bytes are what was left there.
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

    /// A new queue.
    pub fn stream(self: &Arc<Gpu>) -> Result<Stream, CardFault> {
        Ok(Stream { card: self.clone(), stream: self.context.new_stream()? })
    }

    /// The kernel of a text: loaded once, compiled where it was not.
    fn kernel(&self, text: &Arc<str>) -> Result<Kernel, CardFault> {
        let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = kernels.get(text) {
            return Ok(*kernel);
        }
        let code = cubin(text, self.about.architecture)?;
        let name = CString::new(ENTRY).expect("the entry's name holds no zero byte");
        self.context.bind_to_thread()?;
        // SAFETY: the code is a cubin that the compiler made for this architecture; the module is never unloaded.
        let function = unsafe {
            let module = result::module::load_data(code.as_ptr().cast())?;
            result::module::get_function(module, name)?
        };
        kernels.insert(text.clone(), Kernel(function));
        Ok(Kernel(function))
    }
}

impl Memory {
    /// The address of its first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// How long it is.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it has no byte.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // A card that failed frees nothing more; its memory goes with the process.
        if self.card.context.bind_to_thread().is_ok() {
            // SAFETY: allocated in `Gpu::allocate`, freed here alone.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

impl Stream {
    /// Copies bytes to the card. They are there for what is put into the queue after it.
    pub fn upload(&self, bytes: &[u8], to: &Memory) -> Result<(), CardFault> {
        assert!(bytes.len() <= to.bytes, "what is copied fits");
        self.card.context.bind_to_thread()?;
        // SAFETY: both places have the bytes, and the host's are not touched before the queue is empty.
        unsafe { result::memcpy_htod_async(to.address, bytes, self.stream.cu_stream())? };
        self.finish()
    }

    /// Copies bytes from the card, after all that was put into the queue before.
    pub fn download(&self, from: &Memory, bytes: &mut [u8]) -> Result<(), CardFault> {
        assert!(bytes.len() <= from.bytes, "what is copied is there");
        self.card.context.bind_to_thread()?;
        // SAFETY: as in `upload`.
        unsafe { result::memcpy_dtoh_async(bytes, from.address, self.stream.cu_stream())? };
        self.finish()
    }

    /// Waits until all that was put into the queue has run.
    pub fn finish(&self) -> Result<(), CardFault> {
        Ok(self.stream.synchronize()?)
    }

    /// Puts a recipe's launches into the queue. Kernels must have been made for operands of at least the sizes that lie at these
    /// addresses.
    pub fn run(&self, recipe: &LaunchPlan, operands: &Operands<'_>) -> Result<(), CardFault> {
        self.card.context.bind_to_thread()?;
        recipe.launches.iter().try_for_each(|launch| self.launch(launch, operands))
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
        // SAFETY: the kernel takes as many addresses as the launch has; they lie on this card.
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

/// A fault cell as it was copied from the card.
pub fn fault(bytes: &[u8; size_of::<Fault>()]) -> Fault {
    let word = |i: usize| u64::from_le_bytes(bytes[8 * i..8 * (i + 1)].try_into().expect("eight bytes"));
    Fault { kind: word(0), value: word(1) as i64, size: word(2) }
}
