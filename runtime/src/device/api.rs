//! The interface of a device: memory, kernels, and streams of work.
//!
//! Everything above `device` names memory by [`Buffer`] and [`Region`] and computes through a [`Stream`]. It never
//! dereferences an address, so the device may be a GPU.
//!
//! A stream runs its methods in the order of the calls. A method may return before its work is done; on the CPU it
//! never does. [`Stream::finish`], [`Stream::squared_norms`] and the downloads wait, except those that
//! only begin. Others wait only if memory is short, for their first use, or for an earlier upload. A buffer may therefore be dropped
//! while work on it is queued: a device frees memory in stream order, or after the work. A later call may return the
//! error of earlier work.
//!
//! A buffer that is passed to another thread is used by another stream. [`Stream::release`] marks it with an event
//! after the work queued so far, and [`Stream::acquire`] lets the other stream wait for that. A reader releases it
//! again when its reads are queued, so that the next writer, which acquires it from the pool, waits for them. The CPU
//! needs neither.
//!
//! Decisions that differ from a plain handle-based interface:
//!
//! - [`Region`] has a lifetime, and [`RegionMut`] is exclusive. The methods are safe functions: the Rust
//!   compiler checks lifetimes and aliasing for all callers except the executor, whose memory plan it cannot
//!   know.
//! - The methods take `&self`: a stream is a handle of a queue that one thread uses, and callers hold regions
//!   of other fields of the same struct.
//! - Uploads and downloads come with a closure ([`Stream::upload_with`], [`Stream::download_with`]): the CPU
//!   passes its memory itself, without a copy; a GPU passes pinned memory.
//! - Sums of squares are taken for many tensors in one call, because each wait for a result stalls a GPU.
//! - Operands of sums are 16-bit or wide; [`accumulation_type`](crate::device::layout::accumulation_type) gives
//!   the type of the sum.

use crate::device::buffer::Buffer;
use crate::device::chain::Link;
use crate::device::download::Download;
use crate::device::error::DeviceError;
use crate::device::event::{Event, Timestamp};
use crate::device::layout::{TensorLayout, accumulation_type};
use crate::device::optimizer::{Prediction, StepArgs, UpdateRule};
use crate::device::region::{Region, RegionMut};
use crate::device::tensor_link::Transport;
use compiler::op::Op;
use compiler::tensor::DType;
use compiler::tensor::fact::Fact;
use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The name that [`open`](crate::device::open) knows, such as `cpu`.
    pub name: String,
    /// The product name.
    pub model: String,
    /// Version of the driver; empty without one.
    pub driver: String,
    /// Bytes of memory, if they are its own.
    pub memory: Option<u64>,
    /// Bytes of the last-level cache, if known.
    pub cache: Option<u64>,
    /// True if products of f32 may round their inputs to TF32.
    pub tf32: bool,
}

/// A device: the CPU or a GPU.
pub trait Device: Send + Sync {
    fn info(&self) -> &DeviceInfo;

    /// Bytes that can still be allocated; `None` if unknown.
    fn available_memory(&self) -> Option<u64>;

    /// True if methods of its streams return before their work is done.
    fn is_asynchronous(&self) -> bool {
        false
    }

    /// What decides how its kernels round: the kind of processor and the versions of its libraries. Devices for which it
    /// is equal compute equal bits.
    fn arithmetic(&self) -> String {
        self.info().model.clone()
    }

    /// The same device, whose products of f32 may round their inputs to TF32. `None` if it has no such products.
    fn with_tf32(&self) -> Option<Arc<dyn Device>> {
        None
    }

    /// What connects the device to those of other processes; `None` if all tensors go through the host.
    fn transport(&self) -> Option<Arc<dyn Transport>> {
        None
    }

    /// Allocates zeroed memory.
    fn allocate(&self, bytes: usize) -> Result<Buffer, DeviceError>;

    /// True if streams of this device can read the buffer where it is.
    fn can_access(&self, buffer: &Buffer) -> bool;

    /// True if [`Stream::copy`] can read the buffer, which may be on another device.
    fn can_copy(&self, buffer: &Buffer) -> bool {
        self.can_access(buffer)
    }

    /// The kernel of an op at concrete shapes.
    fn kernel(&self, op: &Op, inputs: &[Fact], outputs: &[Fact]) -> Result<Arc<dyn Kernel>, DeviceError>;

    /// True if a chain may begin with this op, which is not elementwise.
    fn starts_chain(&self, _op: &Op) -> bool {
        false
    }

    /// The kernel of a chain of elementwise ops, which may begin with one for which [`Device::starts_chain`] is true.
    /// `None` if its ops must run one by one.
    fn chain(&self, links: &[Link], inputs: &[TensorLayout]) -> Option<Arc<dyn Kernel>>;

    /// Compiles kernels, on all cores, and loads them; otherwise the first run of each does. Another device of this kind
    /// may have made them. Returns the error of the first that fails.
    fn load(&self, _kernels: &[&dyn Kernel]) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Like [`Device::load`], for kernels that write terms of sums.
    fn load_terms(&self, _kernels: &[&dyn Kernel]) -> Result<(), DeviceError> {
        Ok(())
    }

    /// A new, empty stream.
    fn stream(&self) -> Result<Box<dyn Stream>, DeviceError>;

    /// Copies host bytes into new memory, and waits.
    fn upload(&self, bytes: &[u8]) -> Result<Buffer, DeviceError> {
        let (mut buffer, stream) = (self.allocate(bytes.len())?, self.stream()?);
        stream.upload(bytes, buffer.region_mut())?;
        stream.finish()?;
        Ok(buffer)
    }
}

/// A compiled op, or chain of elementwise ops, at concrete shapes. It belongs to a kind of device: replicas share it.
pub trait Kernel: Any + Send + Sync {
    /// The op, or the last op of a chain.
    fn name(&self) -> &'static str;

    /// Scratch bytes.
    fn workspace(&self) -> usize;

    /// True if it can write its output as a term of a sum, in the
    /// [accumulation type](crate::device::layout::accumulation_type) of the output.
    fn can_accumulate(&self) -> bool;

    /// Number of ops that it computes.
    fn ops(&self) -> usize;

    /// True if it runs the op's reference implementation because the device has no fast one.
    fn is_reference(&self) -> bool;
}

/// How a kernel writes its output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputMode {
    Overwrite,
    /// Writes the first term of a sum. Requires [`Kernel::can_accumulate`], as does the next.
    BeginSum,
    /// Adds to a sum.
    Accumulate,
}

/// The weights of an optimizer step.
pub enum WeightRegions<'a> {
    InPlace(RegionMut<'a>),
    /// Writes the new version and leaves the old one unchanged.
    OutOfPlace {
        old: Region<'a>,
        new: RegionMut<'a>,
    },
}

/// The update of one parameter in an optimizer step.
pub struct ParameterUpdate<'a> {
    pub args: StepArgs,
    pub weights: WeightRegions<'a>,
    pub gradient: Region<'a>,
    /// The tensors of [`UpdateRule::states`].
    pub state: Vec<RegionMut<'a>>,
    /// 16-bit weights that receive the new weights, rounded to nearest.
    pub rounded: Option<(DType, RegionMut<'a>)>,
}

/// Rows of memory at equal distances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    pub count: usize,
    /// Bytes of a row.
    pub width: usize,
    /// Bytes from one row to the next where they are read, and where they are written.
    pub from_pitch: usize,
    pub to_pitch: usize,
}

/// What [`Stream::elementwise`] computes from each element of the operands, in order, and of the result. Computed in
/// `f64` where there is a factor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Elementwise {
    /// `sum += term`. A 16-bit term has an `f32` sum.
    Accumulate,
    /// `sum = first + second`
    Add,
    /// `values *= factor`
    Scale(f64),
    /// `average = keep · average + (1 − keep) · (new − old)`, of the old and the new version.
    AverageUpdate { keep: f64 },
    /// `to = weights − steps · average`: approximate weights of some updates ago.
    SetBack { steps: u32 },
}

/// `state = keep · state + (1 − keep) · sample`. The sample comes from the host, where it was combined over micro-batches
/// and replicas.
pub struct AverageStep<'a> {
    pub dtype: DType,
    pub sample: &'a [f64],
    pub keep: f64,
    pub state: RegionMut<'a>,
}

/// An in-order queue of work on a device. [The module](self) describes the guarantees of the methods.
pub trait Stream: Send {
    /// Runs a kernel. `workspace` has at least [`Kernel::workspace`] bytes.
    fn run(
        &self,
        kernel: &dyn Kernel,
        inputs: &[Region<'_>],
        outputs: &mut [RegionMut<'_>],
        workspace: RegionMut<'_>,
        mode: OutputMode,
    ) -> Result<(), DeviceError>;

    /// Allocates memory with arbitrary content for this stream; other streams acquire it as usual. It is freed when it is
    /// dropped, after the work of this stream and of those that have released it.
    fn allocate(&self, bytes: usize) -> Result<Buffer, DeviceError>;

    /// Writes memory from the host. `fill` writes all bytes of its argument, which has the length of `to`. The method
    /// calls it before it returns.
    fn upload_with(&self, to: RegionMut<'_>, fill: &mut dyn FnMut(&mut [u8])) -> Result<(), DeviceError>;

    /// Waits for the queued work and reads memory on the host.
    fn download_with(&self, from: Region<'_>, read: &mut dyn FnMut(&[u8])) -> Result<(), DeviceError>;

    /// Starts to copy memory to the host. Later work may overwrite it.
    fn begin_download(&self, from: Region<'_>) -> Result<Download, DeviceError> {
        let mut bytes = Vec::new();
        self.download_with(from, &mut |from| bytes = from.to_vec())?;
        Ok(Download::Done(bytes))
    }

    /// Like [`Stream::begin_download`] for several regions, one after another.
    fn begin_download_all(&self, from: &[Region<'_>]) -> Result<Download, DeviceError> {
        let mut bytes = Vec::with_capacity(from.iter().map(Region::len).sum());
        from.iter().try_for_each(|from| self.download_with(*from, &mut |from| bytes.extend_from_slice(from)))?;
        Ok(Download::Done(bytes))
    }

    /// `to = from`, of equal length.
    fn copy(&self, from: Region<'_>, to: RegionMut<'_>) -> Result<(), DeviceError>;

    /// Copies rows. Each region begins with the first row.
    fn copy_rows(&self, rows: Rows, from: Region<'_>, mut to: RegionMut<'_>) -> Result<(), DeviceError> {
        let Rows { count, width, from_pitch, to_pitch } = rows;
        (0..count).try_for_each(|row| {
            let (source, target) = (row * from_pitch, row * to_pitch);
            self.copy(from.slice(source..source + width), to.reborrow().slice(target..target + width))
        })
    }

    /// `to = from`, rounded to nearest.
    fn cast(&self, from: (DType, Region<'_>), to: (DType, RegionMut<'_>)) -> Result<(), DeviceError>;

    /// Computes elements of operands of this type, and of a result of its
    /// [accumulation type](crate::device::layout::accumulation_type). Only terms of sums may have 16 bits.
    fn elementwise(
        &self,
        verb: Elementwise,
        dtype: DType,
        operands: &[Region<'_>],
        result: RegionMut<'_>,
    ) -> Result<(), DeviceError>;

    /// [`Elementwise::Accumulate`].
    fn accumulate(&self, dtype: DType, term: Region<'_>, sum: RegionMut<'_>) -> Result<(), DeviceError> {
        self.elementwise(Elementwise::Accumulate, dtype, &[term], sum)
    }

    /// The sum of squares of each tensor of `f32` or `f64`. Waits.
    fn squared_norms(&self, tensors: &[(DType, Region<'_>)]) -> Result<Vec<f64>, DeviceError>;

    /// One optimizer step of some parameters.
    fn optimizer_step(&self, rule: &UpdateRule, updates: Vec<ParameterUpdate<'_>>) -> Result<(), DeviceError>;

    /// `to` = weights after further updates in the direction of the last one: `w − steps·lr·v`. `v` is the momentum, or
    /// Adam's bias-corrected first moment over the root of its second.
    fn predict_weights(
        &self,
        rule: &UpdateRule,
        prediction: &Prediction,
        weights: Region<'_>,
        state: &[Region<'_>],
        to: RegionMut<'_>,
    ) -> Result<(), DeviceError>;

    /// Updates moving averages.
    fn moving_averages(&self, steps: Vec<AverageStep<'_>>) -> Result<(), DeviceError>;

    /// An event that occurs when the work queued so far is done.
    fn record(&self) -> Result<Event, DeviceError>;

    /// Delays later work of this stream until the event has occurred.
    fn wait(&self, event: &Event) -> Result<(), DeviceError>;

    /// The time at which the work queued so far is done.
    fn timestamp(&self) -> Result<Timestamp, DeviceError> {
        self.finish()?;
        Ok(Timestamp::Host(Instant::now()))
    }

    /// The error of a timestamp.
    fn timestamp_resolution(&self) -> Duration {
        Duration::from_nanos(30)
    }

    /// Waits on the host until all queued work is done.
    fn finish(&self) -> Result<(), DeviceError>;

    /// Copies host bytes into memory of the same length.
    fn upload(&self, from: &[u8], to: RegionMut<'_>) -> Result<(), DeviceError> {
        self.upload_with(to, &mut |to| to.copy_from_slice(from))
    }

    /// Waits for the queued work and copies memory to the host.
    fn download(&self, from: Region<'_>, to: &mut [u8]) -> Result<(), DeviceError> {
        self.download_with(from, &mut |from| to.copy_from_slice(from))
    }

    /// Writes the first term of a sum.
    fn begin_sum(&self, dtype: DType, term: Region<'_>, sum: RegionMut<'_>) -> Result<(), DeviceError> {
        self.cast((dtype, term), (accumulation_type(dtype), sum))
    }

    /// Marks a buffer with the work queued so far: other streams that acquire it wait for that work.
    fn release(&self, buffer: &Buffer) -> Result<(), DeviceError> {
        if !buffer.is_host() {
            buffer.add_event(self.record()?);
        }
        Ok(())
    }

    /// Lets later work of this stream wait for the work with which other streams have released the buffer.
    fn acquire(&self, buffer: &Buffer) -> Result<(), DeviceError> {
        match buffer.is_host() {
            true => Ok(()),
            false => buffer.events().iter().try_for_each(|event| self.wait(event)),
        }
    }
}
