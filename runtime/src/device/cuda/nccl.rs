//! Links between GPUs of different processes, by the point-to-point functions of libnccl, where it is installed.
//!
//! A link is a communicator of two ranks: rank 0 sends and rank 1 receives. NCCL runs the operations of a communicator in
//! order, so each direction has its own.
//!
//! Numbers are those of `nccl.h` of NCCL 2.

use super::device::open;
use super::gpu::Gpu;
use super::library::functions;
use super::stream::CudaStream;
use crate::device::api::Stream;
use crate::device::buffer::Buffer;
use crate::device::error::DeviceError;
use crate::device::memory_counter::MemoryCounter;
use crate::device::pool::Pool;
use crate::device::tensor_link::{LinkEnd, Role, TensorLink, Transport};
use cudarc::driver::{DriverError, sys};
use parking_lot::Mutex;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::Arc;

/// Bytes of an id, `NCCL_UNIQUE_ID_BYTES`.
const ID_BYTES: usize = 128;

/// `ncclUint8`.
const BYTE: c_int = 1;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; ID_BYTES]);

type Comm = *mut c_void;
type Transfer<P> = unsafe extern "C" fn(P, usize, c_int, c_int, Comm, *mut c_void) -> c_int;

functions! {
    Nccl:
    new_id = c"ncclGetUniqueId": unsafe extern "C" fn(*mut UniqueId) -> c_int;
    init = c"ncclCommInitRank": unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int) -> c_int;
    send = c"ncclSend": Transfer<*const c_void>;
    receive = c"ncclRecv": Transfer<*mut c_void>;
    destroy = c"ncclCommDestroy": unsafe extern "C" fn(Comm) -> c_int;
    abort = c"ncclCommAbort": unsafe extern "C" fn(Comm) -> c_int;
    async_error = c"ncclCommGetAsyncError": unsafe extern "C" fn(Comm, *mut c_int) -> c_int;
    error = c"ncclGetErrorString": unsafe extern "C" fn(c_int) -> *const c_char;
}

impl Functions {
    fn check_status(&self, gpu: &Gpu, status: c_int) -> Result<(), DeviceError> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the library returns a constant text for every number.
        let text = unsafe { CStr::from_ptr((self.error)(status)) }.to_string_lossy();
        Err(DeviceError::Failed { device: gpu.name(), what: format!("NCCL: {text} (error {status})") })
    }
}

/// NCCL on a GPU.
pub struct Nccl {
    functions: &'static Functions,
    gpu: Arc<Gpu>,
}

impl Nccl {
    /// `None` if the library is not installed.
    pub fn new(gpu: &Arc<Gpu>) -> Option<Nccl> {
        Some(Nccl { functions: Functions::find()?, gpu: gpu.clone() })
    }
}

impl Transport for Nccl {
    fn identity(&self) -> Vec<u8> {
        self.gpu.uuid().map_or(Vec::new(), |uuid| uuid.to_vec())
    }

    fn new_id(&self) -> Result<Vec<u8>, DeviceError> {
        let mut id = UniqueId([0; ID_BYTES]);
        self.gpu.bind().map_err(|error| self.gpu.device_error(error))?;
        // SAFETY: the library writes one id.
        self.functions.check_status(&self.gpu, unsafe { (self.functions.new_id)(&mut id) })?;
        Ok(id.0.to_vec())
    }

    fn open(&self, id: &[u8], end: LinkEnd, operands: &Arc<MemoryCounter>) -> Result<Arc<dyn TensorLink>, DeviceError> {
        let gpu = self.gpu.clone();
        let bytes: [u8; ID_BYTES] = id.try_into().map_err(|_| DeviceError::Foreign { what: "NCCL id" })?;
        let device = open(gpu.info().ordinal)?;
        let stream = CudaStream::new(gpu.clone())?;
        let (mut comm, rank) = (ptr::null_mut(), c_int::from(end == LinkEnd::Receiving));
        gpu.bind().map_err(|error| gpu.device_error(error))?;
        // SAFETY: the library writes one handle; the other process passes the same id and the other rank.
        self.functions.check_status(&gpu, unsafe { (self.functions.init)(&mut comm, 2, UniqueId(bytes), rank) })?;
        let pools = [Pool::new(device.clone(), Arc::default()), Pool::new(device, operands.clone())];
        let state = Mutex::new(State { comm, stream, pools });
        let link = NcclLink { functions: self.functions, gpu, peer: 1 - rank, state };
        // The first transfer connects both ends, and waits for it on the host.
        match end {
            LinkEnd::Sending => link.send(&*link.one_byte()?)?,
            LinkEnd::Receiving => _ = link.receive(1, 1, Role::Message)?,
        }
        link.state.lock().stream.finish()?;
        Ok(Arc::new(link))
    }
}

struct State {
    /// Null after its end.
    comm: Comm,
    stream: CudaStream,
    /// Buffers of received tensors, by [`Role`].
    pools: [Pool; 2],
}

// SAFETY: a communicator may be used by one thread at a time: the one that holds the lock.
unsafe impl Send for State {}

/// One end of a link.
struct NcclLink {
    functions: &'static Functions,
    gpu: Arc<Gpu>,
    peer: c_int,
    state: Mutex<State>,
}

impl NcclLink {
    /// A buffer of one byte.
    fn one_byte(&self) -> Result<Arc<Buffer>, DeviceError> {
        let mut state = self.state.lock();
        let buffer = state.pools[Role::Message as usize].take(1)?;
        state.stream.release(&buffer)?;
        Ok(buffer)
    }

    fn link_error(&self) -> DeviceError {
        DeviceError::Failed { device: self.gpu.name(), what: "the NCCL link has ended".to_string() }
    }

    fn bind(&self) -> Result<(), DeviceError> {
        self.gpu.bind().map_err(|error| self.gpu.device_error(error))
    }
}

fn raw(stream: sys::CUstream) -> *mut c_void {
    stream.cast()
}

impl TensorLink for NcclLink {
    fn send(&self, buffer: &Buffer) -> Result<(), DeviceError> {
        let state = self.state.lock();
        if state.comm.is_null() {
            return Err(self.link_error());
        }
        if buffer.is_empty() {
            return Ok(());
        }
        state.stream.acquire(buffer)?;
        self.bind()?;
        let (region, stream) = (buffer.region(), raw(state.stream.queue().raw()));
        let from = region.address() as usize as *const c_void;
        // SAFETY: the memory is of this GPU, and the event below keeps it until the transfer has read it.
        let status = unsafe { (self.functions.send)(from, region.len(), BYTE, self.peer, state.comm, stream) };
        self.functions.check_status(&self.gpu, status)?;
        state.stream.release(buffer)
    }

    fn receive(&self, bytes: usize, room: usize, role: Role) -> Result<Arc<Buffer>, DeviceError> {
        let mut state = self.state.lock();
        if state.comm.is_null() {
            return Err(self.link_error());
        }
        let mut buffer = state.pools[role as usize].take(room.max(bytes))?;
        if bytes == 0 {
            return Ok(buffer);
        }
        state.stream.acquire(&buffer)?;
        self.bind()?;
        let to = Buffer::exclusive(&mut buffer).address() as usize as *mut c_void;
        let stream = raw(state.stream.queue().raw());
        // SAFETY: the buffer has this size, and the event below lets its readers wait for the transfer.
        let status = unsafe { (self.functions.receive)(to, bytes, BYTE, self.peer, state.comm, stream) };
        self.functions.check_status(&self.gpu, status)?;
        state.stream.release(&buffer)?;
        // It is taken again when its readers have dropped it.
        state.pools[role as usize].give(buffer.clone());
        Ok(buffer)
    }

    fn check(&self) -> Result<(), DeviceError> {
        let state = self.state.lock();
        if state.comm.is_null() {
            return Ok(());
        }
        self.bind()?;
        // SAFETY: the stream is live.
        match unsafe { sys::cuStreamQuery(state.stream.queue().raw()) }.result() {
            Ok(()) | Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => {}
            Err(error) => return Err(self.gpu.device_error(error)),
        }
        let mut status = 0;
        // SAFETY: the communicator is live, and the library writes one number.
        self.functions.check_status(&self.gpu, unsafe { (self.functions.async_error)(state.comm, &mut status) })?;
        self.functions.check_status(&self.gpu, status)
    }

    fn abort(&self) {
        let comm = std::mem::replace(&mut self.state.lock().comm, ptr::null_mut());
        if !comm.is_null() && self.bind().is_ok() {
            // SAFETY: the handle is used nowhere after this.
            unsafe { (self.functions.abort)(comm) };
        }
    }
}

impl Drop for NcclLink {
    fn drop(&mut self) {
        let comm = self.state.lock().comm;
        if !comm.is_null() && self.bind().is_ok() {
            // SAFETY: as in `abort`. Queued transfers are done first.
            unsafe { (self.functions.destroy)(comm) };
        }
    }
}
