//! Streams of a GPU. Methods wait for the GPU only where the trait says so.
//!
//! Kernels report invalid operands in a fault cell of the stream. It is read whenever the host waits anyway, and copied
//! beside uploads, so the error of a kernel is returned by a later call.

use super::device::CudaKernel;
use super::download::CudaDownload;
use super::event::{CudaEvent, CudaTimestamp};
use super::gpu::{Function, Gpu, GpuMemory};
use super::launch_plan::{Base, COUNTERS, Fault};
use super::many;
use super::optimizer::{self, RuleVariant};
use super::queue::{Queue, RawEvent};
use super::staging::{PinnedMemory, StagingBuffers};
use super::verbs;
use super::verbs::{MOST_BLOCKS, PARTS, THREADS, Verb};
use crate::device::api::{AverageStep, Elementwise, Kernel, OutputMode, ParameterUpdate, Rows, Stream, WeightRegions};
use crate::device::buffer::{Buffer, DeviceMemory};
use crate::device::download::Download;
use crate::device::error::DeviceError;
use crate::device::event::{Event, Timestamp};
use crate::device::optimizer::{Prediction, UpdateRule};
use crate::device::region::{Region, RegionMut};
use compiler::tensor::DType;
use cudarc::driver::{DriverError, result};
use parking_lot::Mutex;
use std::any::Any;
use std::cell::RefCell;
use std::collections::HashMap;
use std::mem::discriminant;
use std::sync::Arc;
use std::time::Duration;

const FAULT_BYTES: usize = size_of::<Fault>();

pub struct CudaStream {
    gpu: Arc<Gpu>,
    /// The first fault of a kernel.
    fault: GpuMemory,
    counters: GpuMemory,
    /// Downloads under way return their memory from other threads.
    staging: Arc<Mutex<StagingBuffers>>,
    state: RefCell<HostState>,
    queue: Arc<Queue>,
}

/// Memory of a stream for copies and norms.
struct HostState {
    /// Receives the fault cell.
    fault: PinnedMemory,
    /// The end of a copy of the fault cell that nobody waits for.
    fault_copied: Option<RawEvent>,
    /// Partial sums of norms, and host samples.
    scratch: Option<GpuMemory>,
    functions: HashMap<Verb, Function>,
}

impl CudaStream {
    pub fn new(gpu: Arc<Gpu>) -> Result<CudaStream, DeviceError> {
        let create = || -> Result<(Arc<Queue>, PinnedMemory), DriverError> {
            gpu.bind()?;
            Ok((Arc::new(Queue::new()?), PinnedMemory::new(FAULT_BYTES)?))
        };
        let (queue, pinned) = create().map_err(|error| gpu.device_error(error))?;
        let fault = gpu.allocate(FAULT_BYTES).map_err(|error| gpu.device_error(error))?;
        let counters = gpu.allocate(COUNTERS * size_of::<u32>()).map_err(|error| gpu.device_error(error))?;
        let state = HostState { fault: pinned, fault_copied: None, scratch: None, functions: HashMap::new() };
        Ok(CudaStream { gpu, fault, counters, staging: Arc::default(), state: RefCell::new(state), queue })
    }

    pub(super) fn queue(&self) -> &Queue {
        &self.queue
    }

    fn call<T>(&self, driver_call: impl FnOnce() -> Result<T, DriverError>) -> Result<T, DeviceError> {
        self.gpu.bind().and_then(|()| driver_call()).map_err(|error| self.gpu.device_error(error))
    }

    fn launch(&self, function: Function, geometry: (u32, u32), words: &mut [u64]) -> Result<(), DeviceError> {
        // SAFETY: the kernel takes as many words as it is given; addresses are of this GPU and have the sizes that the
        // kernel was made for.
        self.call(|| unsafe { self.queue.launch(function, geometry, words) })
    }

    /// The loaded kernel of a verb. Its source is made on first use.
    fn function(&self, verb: Verb, text: impl FnOnce() -> Arc<str>) -> Result<Function, DeviceError> {
        let mut state = self.state.borrow_mut();
        if let Some(function) = state.functions.get(&verb) {
            return Ok(*function);
        }
        let function = self.gpu.function(&text()).map_err(|error| self.gpu.device_error(error))?;
        state.functions.insert(verb, function);
        Ok(function)
    }

    /// Launches a verb over `count` elements.
    fn launch_elements(
        &self,
        verb: Verb,
        text: impl FnOnce() -> Arc<str>,
        count: usize,
        words: &[u64],
    ) -> Result<(), DeviceError> {
        if count == 0 {
            return Ok(());
        }
        let function = self.function(verb, text)?;
        let blocks = count.div_ceil(THREADS as usize).min(MOST_BLOCKS) as u32;
        let mut arguments: Vec<u64> = std::iter::once(count as u64).chain(words.iter().copied()).collect();
        self.launch(function, (blocks, THREADS), &mut arguments)
    }

    /// The address of scratch memory of this stream.
    fn scratch(&self, bytes: usize) -> Result<u64, DeviceError> {
        let mut state = self.state.borrow_mut();
        if let Some(scratch) = state.scratch.as_ref().filter(|scratch| scratch.bytes() >= bytes) {
            return Ok(scratch.address());
        }
        let memory =
            self.gpu.allocate(bytes.max(1).next_power_of_two()).map_err(|error| self.gpu.device_error(error))?;
        Ok(state.scratch.insert(memory).address())
    }

    fn upload_to(&self, address: u64, bytes: usize, fill: &mut dyn FnMut(&mut [u8])) -> Result<(), DeviceError> {
        if bytes == 0 {
            fill(&mut []);
            return Ok(());
        }
        let mut state = self.state.borrow_mut();
        self.look_for_fault(&mut state)?;
        let mut pinned = self.call(|| self.staging.lock().take(bytes))?;
        fill(&mut pinned[..bytes]);
        // SAFETY: both sides have the bytes; the staging buffer is not touched before the copy is done.
        self.call(|| unsafe { result::memcpy_htod_async(address, &pinned[..bytes], self.queue.raw()) })?;
        self.call(|| self.staging.lock().give(pinned, &self.queue))
    }

    /// Starts to copy from an address to the host.
    fn begin_read(&self, address: u64, bytes: usize) -> Result<Download, DeviceError> {
        if bytes == 0 {
            return Ok(Download::Done(Vec::new()));
        }
        let mut memory = self.call(|| self.staging.lock().take(bytes))?;
        // SAFETY: both sides have the bytes; the host reads them after the event.
        self.call(|| unsafe { result::memcpy_dtoh_async(&mut memory[..bytes], address, self.queue.raw()) })?;
        let event = self.call(|| RawEvent::record(&self.queue))?;
        let (gpu, staging) = (self.gpu.clone(), self.staging.clone());
        Ok(Download::Pending(Box::new(CudaDownload { gpu, memory, bytes, event, staging })))
    }

    /// Waits, and passes on what was read from an address.
    fn read_from(&self, address: u64, bytes: usize, read: &mut dyn FnMut(&[u8])) -> Result<(), DeviceError> {
        let mut state = self.state.borrow_mut();
        let mut pinned = self.call(|| self.staging.lock().take(bytes.max(1)))?;
        if bytes > 0 {
            // SAFETY: both sides have the bytes; the host reads them after it has waited.
            self.call(|| unsafe { result::memcpy_dtoh_async(&mut pinned[..bytes], address, self.queue.raw()) })?;
        }
        self.wait_for_all(&mut state.fault)?;
        read(&pinned[..bytes]);
        self.call(|| self.staging.lock().give(pinned, &self.queue))
    }

    /// Returns the fault of a kernel, if one is known, and copies the cell again. Does not wait.
    fn look_for_fault(&self, state: &mut HostState) -> Result<(), DeviceError> {
        match &state.fault_copied {
            Some(event) if !self.call(|| Ok(event.has_occurred()))? => return Ok(()),
            Some(_) => fault_in(&state.fault)?,
            None => {}
        }
        let (address, pinned) = (self.fault.address(), &mut state.fault);
        // SAFETY: both sides have the bytes of a fault cell, which are read after the event.
        self.call(|| unsafe { result::memcpy_dtoh_async(&mut pinned[..FAULT_BYTES], address, self.queue.raw()) })?;
        state.fault_copied = Some(self.call(|| RawEvent::record(&self.queue))?);
        Ok(())
    }

    /// Waits for the queued work, and returns the fault of a kernel.
    fn wait_for_all(&self, pinned: &mut PinnedMemory) -> Result<(), DeviceError> {
        let (address, queue) = (self.fault.address(), self.queue.raw());
        // SAFETY: both sides have the bytes of a fault cell, which are read after the wait.
        self.call(|| unsafe {
            result::memcpy_dtoh_async(&mut pinned[..FAULT_BYTES], address, queue)?;
            result::stream::synchronize(queue)
        })?;
        fault_in(pinned)
    }
}

fn fault_in(pinned: &PinnedMemory) -> Result<(), DeviceError> {
    let fault = Fault::of(&std::array::from_fn(|at| pinned[at]));
    fault.error().map_or(Ok(()), |error| Err(error.into()))
}

impl Stream for CudaStream {
    fn run(
        &self,
        kernel: &dyn Kernel,
        inputs: &[Region<'_>],
        outputs: &mut [RegionMut<'_>],
        workspace: RegionMut<'_>,
        mode: OutputMode,
    ) -> Result<(), DeviceError> {
        let foreign = || DeviceError::Foreign { what: "kernel" };
        let kernel = (kernel as &dyn Any).downcast_ref::<CudaKernel>().ok_or_else(foreign)?;
        let launches = kernel.launches(&self.gpu, mode).ok_or_else(foreign)?;
        if let (Some(library), [a, b], [c]) = (kernel.library(mode), inputs, &*outputs) {
            let (addresses, adds) = ([a.address(), b.address(), c.address()], mode == OutputMode::Accumulate);
            // SAFETY: addresses are of this GPU and have the sizes that the kernel was made for.
            let handled = unsafe { library.run(&self.gpu, &self.queue, addresses, workspace.address(), adds) };
            if handled.map_err(|error| self.gpu.device_error(error))? {
                return Ok(());
            }
        }
        for loaded in launches {
            let (launch, function) = loaded?;
            let address = |at: &super::launch_plan::At| {
                let base = match at.base {
                    Base::Input(i) => inputs[i].address(),
                    Base::Output(i) => outputs[i].address(),
                    Base::Scratch => workspace.address(),
                    Base::Fault => self.fault.address(),
                    Base::Counters => self.counters.address(),
                };
                base + at.offset as u64
            };
            let mut words: Vec<u64> = launch.arguments.iter().map(address).collect();
            self.launch(function, (launch.blocks, launch.threads), &mut words)?;
        }
        Ok(())
    }

    fn upload_with(&self, to: RegionMut<'_>, fill: &mut dyn FnMut(&mut [u8])) -> Result<(), DeviceError> {
        self.upload_to(to.address(), to.len(), fill)
    }

    fn download_with(&self, from: Region<'_>, read: &mut dyn FnMut(&[u8])) -> Result<(), DeviceError> {
        self.read_from(from.address(), from.len(), read)
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer, DeviceError> {
        let memory = self.gpu.allocate_in_order(bytes, &self.queue).map_err(|error| self.gpu.device_error(error))?;
        Ok(Buffer::device(Arc::new(memory) as Arc<dyn DeviceMemory>))
    }

    fn begin_download(&self, from: Region<'_>) -> Result<Download, DeviceError> {
        self.begin_read(from.address(), from.len())
    }

    fn begin_download_all(&self, from: &[Region<'_>]) -> Result<Download, DeviceError> {
        let bytes = from.iter().map(Region::len).sum();
        let packed = self.scratch(bytes)?;
        let numbers = from.iter().flat_map(|from| [from.address(), from.len() as u64]);
        let size = verbs::common_size(&numbers.collect::<Vec<_>>());
        let mut to = packed;
        for group in from.chunks(many::MOST) {
            let mut words = many::arguments(group.iter().map(|from| (from.address(), from.len() / size, [])));
            words.push(to);
            let bytes: usize = group.iter().map(Region::len).sum();
            self.launch_elements(Verb::Pack(size), || many::pack(size), bytes / size, &words)?;
            to += bytes as u64;
        }
        self.begin_read(packed, bytes)
    }

    fn copy(&self, from: Region<'_>, to: RegionMut<'_>) -> Result<(), DeviceError> {
        if from.is_empty() {
            return Ok(());
        }
        // SAFETY: both sides have the bytes. The driver knows by address on which GPU each is.
        self.call(|| unsafe { result::memcpy_dtod_async(to.address(), from.address(), from.len(), self.queue.raw()) })
    }

    fn copy_rows(&self, rows: Rows, from: Region<'_>, to: RegionMut<'_>) -> Result<(), DeviceError> {
        let lengths = [rows.width, rows.from_pitch, rows.to_pitch].map(|bytes| bytes as u64);
        let size = verbs::common_size(&[&lengths[..], &[from.address(), to.address()]].concat());
        let [width, from_pitch, to_pitch] = lengths.map(|bytes| bytes / size as u64);
        let words = [from.address(), to.address(), width, from_pitch, to_pitch];
        let count = rows.count * rows.width / size;
        self.launch_elements(Verb::CopyRows(size), || verbs::copy_rows(size), count, &words)
    }

    fn cast(
        &self,
        (from_dtype, from): (DType, Region<'_>),
        (to_dtype, to): (DType, RegionMut<'_>),
    ) -> Result<(), DeviceError> {
        match from_dtype == to_dtype {
            true => self.copy(from, to),
            false => {
                let verb = Verb::Cast { from: from_dtype, to: to_dtype };
                let words = [from.address(), to.address()];
                self.launch_elements(verb, || verbs::cast(from_dtype, to_dtype), from.len() / from_dtype.size(), &words)
            }
        }
    }

    fn elementwise(
        &self,
        verb: Elementwise,
        dtype: DType,
        operands: &[Region<'_>],
        result: RegionMut<'_>,
    ) -> Result<(), DeviceError> {
        let factor = match verb {
            Elementwise::Accumulate | Elementwise::Add => None,
            Elementwise::Scale(factor) | Elementwise::AverageUpdate { keep: factor } => Some(factor),
            Elementwise::SetBack { steps } => Some(f64::from(steps)),
        };
        let mut words: Vec<u64> = operands.iter().map(|operand| operand.address()).collect();
        words.push(result.address());
        words.extend(factor.map(f64::to_bits));
        let count = operands.first().map_or(result.len(), Region::len) / dtype.size();
        let verb_of_type = Verb::Elementwise(discriminant(&verb), dtype);
        self.launch_elements(verb_of_type, || verbs::elementwise(verb, dtype), count, &words)
    }

    fn squared_norms(&self, tensors: &[(DType, Region<'_>)]) -> Result<Vec<f64>, DeviceError> {
        let part_bytes = PARTS as usize * size_of::<f64>();
        let bytes = tensors.len() * part_bytes;
        let parts = self.scratch(bytes)?;
        for (at, (dtype, values)) in tensors.iter().enumerate() {
            let function = self.function(Verb::Squares(*dtype), || verbs::squares(*dtype))?;
            let to = parts + (at * part_bytes) as u64;
            let mut words = [(values.len() / dtype.size()) as u64, values.address(), to];
            self.launch(function, (PARTS, THREADS), &mut words)?;
        }
        let mut norms = Vec::with_capacity(tensors.len());
        self.read_from(parts, bytes, &mut |parts| {
            let value = |bytes: &[u8]| f64::from_le_bytes(std::array::from_fn(|at| bytes[at]));
            norms.extend(parts.chunks(part_bytes).map(|parts| parts.chunks(size_of::<f64>()).map(value).sum::<f64>()));
        })?;
        Ok(norms)
    }

    fn optimizer_step(&self, rule: &UpdateRule, updates: Vec<ParameterUpdate<'_>>) -> Result<(), DeviceError> {
        let group_key = |update: &ParameterUpdate<'_>| (update.args, update.rounded.as_ref().map(|(dtype, _)| *dtype));
        let mut groups: Vec<Vec<&ParameterUpdate<'_>>> = Vec::new();
        for update in updates.iter().filter(|update| !update.gradient.is_empty()) {
            match groups.iter_mut().find(|group| group.len() < many::MOST && group_key(group[0]) == group_key(update)) {
                Some(group) => group.push(update),
                None => groups.push(vec![update]),
            }
        }
        for group in groups {
            let (args, rounded) = group_key(group[0]);
            let factors = optimizer::step_factors(rule, (args.scale, args.step, args.rate));
            let (mut words, mut chunks) = (vec![0], 0);
            for update in &group {
                let (old, new) = match &update.weights {
                    WeightRegions::InPlace(weights) => (weights.address(), weights.address()),
                    WeightRegions::OutOfPlace { old, new } => (old.address(), new.address()),
                };
                let count = update.gradient.len() / args.dtype.size();
                chunks += count.div_ceil(optimizer::CHUNK);
                words.extend([old, new, update.gradient.address()]);
                words.extend(update.state.iter().take(rule.states()).map(RegionMut::address));
                words.extend(update.rounded.as_ref().map(|(_, to)| to.address()));
                words.extend([count as u64, chunks as u64]);
            }
            let words_per_update = (words.len() - 1) / group.len();
            words.resize(1 + words_per_update * many::MOST, 0);
            words[0] = chunks as u64;
            words.extend(factors.iter().map(|(_, factor)| factor.to_bits()));
            let verb = Verb::Step(RuleVariant::of(rule), args.dtype, rounded);
            let function = self.function(verb, || optimizer::step(rule, args.dtype, rounded, &factors))?;
            self.launch(function, (chunks.min(MOST_BLOCKS) as u32, THREADS), &mut words)?;
        }
        Ok(())
    }

    fn predict_weights(
        &self,
        rule: &UpdateRule,
        prediction: &Prediction,
        weights: Region<'_>,
        state: &[Region<'_>],
        to: RegionMut<'_>,
    ) -> Result<(), DeviceError> {
        let &Prediction { dtype, steps, made: steps_done, rate } = prediction;
        let Some(factors) = optimizer::predict_factors(rule, (steps, steps_done, rate)) else {
            return self.copy(weights, to);
        };
        let mut words = vec![weights.address(), to.address()];
        words.extend(state.iter().take(rule.states()).map(|state| state.address()));
        words.extend(factors.iter().map(|(_, factor)| factor.to_bits()));
        let verb = Verb::Predict(RuleVariant::of(rule), dtype);
        self.launch_elements(verb, || optimizer::predict(rule, dtype, &factors), weights.len() / dtype.size(), &words)
    }

    fn moving_averages(&self, steps: Vec<AverageStep<'_>>) -> Result<(), DeviceError> {
        let counts = |step: &AverageStep<'_>| step.sample.len().min(step.state.len() / step.dtype.size());
        let samples: Vec<f64> = steps.iter().flat_map(|step| &step.sample[..counts(step)]).copied().collect();
        let bytes: &[u8] = bytemuck::cast_slice(&samples);
        let mut on_gpu = self.scratch(bytes.len())?;
        self.upload_to(on_gpu, bytes.len(), &mut |to| to.copy_from_slice(bytes))?;
        for group in steps.chunk_by(|a, b| a.dtype == b.dtype).flat_map(|alike| alike.chunks(many::MOST)) {
            let (dtype, count) = (group[0].dtype, group.iter().map(counts).sum());
            let states = group.iter().map(|step| (step.state.address(), counts(step), [step.keep]));
            let mut words = many::arguments(states);
            words.push(on_gpu);
            self.launch_elements(Verb::MovingAverages(dtype), || many::moving_averages(dtype), count, &words)?;
            on_gpu += (count * size_of::<f64>()) as u64;
        }
        Ok(())
    }

    fn record(&self) -> Result<Event, DeviceError> {
        let event = self.call(|| RawEvent::record(&self.queue))?;
        Ok(Event::new(Arc::new(CudaEvent { gpu: self.gpu.clone(), stream: self.queue.number(), event })))
    }

    fn wait(&self, event: &Event) -> Result<(), DeviceError> {
        let cuda_event = event.device_event().and_then(|event| (event as &dyn Any).downcast_ref::<CudaEvent>());
        match cuda_event {
            // A stream follows its own order.
            Some(event) if event.stream == self.queue.number() => Ok(()),
            Some(event) => self.call(|| event.event.delay(&self.queue)),
            None => event.synchronize(),
        }
    }

    fn timestamp(&self) -> Result<Timestamp, DeviceError> {
        let event = self.call(|| RawEvent::record_timed(&self.queue))?;
        Ok(Timestamp::Device(Box::new(CudaTimestamp { gpu: self.gpu.clone(), event })))
    }

    fn timestamp_resolution(&self) -> Duration {
        Duration::from_nanos(500)
    }

    fn finish(&self) -> Result<(), DeviceError> {
        self.wait_for_all(&mut self.state.borrow_mut().fault)
    }
}
