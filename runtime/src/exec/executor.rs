//! Runs the kernels of a stage for one micro-batch.
//!
//! The compiler fixes offsets; the executor turns them into regions of device memory and queues the kernels on its stream. An in-flight micro-batch owns its saved
//! activations and the buffers it sends. It holds references to received buffers and to its weight version.

use crate::comm::tensor_group::TensorRank;
use crate::device::api::{Device, OutputMode, Stream};
use crate::device::buffer::Buffer;
use crate::device::context::DeviceContext;
use crate::device::download::Download;
use crate::device::error::DeviceError;
use crate::device::memory_counter::MemoryCounter;
use crate::device::region::{Region, RegionMut};
use crate::exec::phase::{RoundPosition, RunPhase};
use crate::exec::sequence::{Joint, Sequence, Slot, Step, TensorAddress};
use crate::exec::stage_code::StageCode;
use crate::exec::step_hook::StepHook;
use compiler::pass::batched_weight_grad::ITEMS;
use std::sync::Arc;
use thiserror::Error;

/// One weight version of a stage, in the order of [`StageCode::parameters`].
pub type Weights = Vec<Arc<Buffer>>;

/// A kernel failed on its operands, or the device did.
#[derive(Debug, Error, Clone, PartialEq)]
#[error("node `{node}`: {fault}")]
pub struct ExecuteError {
    pub node: String,
    pub fault: DeviceError,
}

impl ExecuteError {
    fn of_step(step: &Step, fault: DeviceError) -> ExecuteError {
        ExecuteError { node: step.label().to_string(), fault }
    }
}

impl From<DeviceError> for ExecuteError {
    fn from(fault: DeviceError) -> ExecuteError {
        ExecuteError { node: "the tensors of a micro-batch".to_string(), fault }
    }
}

/// The state of one in-flight micro-batch (or minibatch, under asynchronous schedules) on a stage.
#[derive(Default)]
pub struct Item {
    pub weights: Weights,
    pub version: u32,
    /// ZeRO 3: gathered full parameters, by parameter.
    pub gathered: Vec<Option<Arc<Buffer>>>,
    /// Activations saved for the backward pass, without recomputed ones.
    pub saved: Option<Arc<Buffer>>,
    /// Those that recomputation frees and makes again.
    pub recomputed: Option<Arc<Buffer>>,
    /// Activations sent to later stages.
    pub sent: Vec<Arc<Buffer>>,
    /// Activations received from earlier stages.
    pub received: Vec<Option<Arc<Buffer>>>,
    pub feeds: Vec<Arc<Buffer>>,
    /// Gradient terms received from later stages.
    pub gradients_in: Vec<Option<Arc<Buffer>>>,
    /// Gradient terms sent to earlier stages.
    pub gradients_out: Vec<Option<Arc<Buffer>>>,
    /// Gradient terms that the weight-gradient pass reads, possibly after they were sent.
    pub sent_gradients: Vec<Option<Arc<Buffer>>>,
    /// Values that the input-gradient pass keeps for the weight-gradient pass.
    pub between: Option<Arc<Buffer>>,
    /// Gradient sums that the backward pass accumulates into, by term.
    pub sums: Vec<Option<Sum>>,
    /// True after the backward pass.
    pub is_done: bool,
    pub position: RoundPosition,
}

/// A gradient sum over micro-batches, lent to the backward pass of the next one.
pub struct Sum {
    pub buffer: Arc<Buffer>,
    /// False if the first term must overwrite the buffer.
    pub is_begun: bool,
}

impl Sum {
    /// The buffer as memory to write.
    ///
    /// # Safety
    ///
    /// Only [`Executor::run`] may call this. The item owns the sum during its backward pass, and one stream runs one
    /// kernel at a time.
    unsafe fn write(&self) -> RegionMut<'_> {
        // SAFETY: the memory belongs to the buffer; the caller guarantees exclusive access.
        unsafe { self.buffer.region().assume_exclusive() }
    }
}

impl Item {
    fn sum(&self, term: usize) -> &Sum {
        self.sums.get(term).and_then(Option::as_ref).expect("a backward has the sums it accumulates into")
    }

    fn gradient_out(&self, index: usize) -> Option<&Arc<Buffer>> {
        self.gradients_out[index].as_ref().or_else(|| self.sent_gradients.get(index)?.as_ref())
    }
}

/// Stops counting a sent buffer here while the receiver still reads it; the receiver has counted it on arrival.
fn lend_to_readers(sent: &Arc<Buffer>) {
    if Arc::strong_count(sent) > 1 {
        sent.release_slot();
    }
}

/// Called after every step of a pass.
pub type Watcher<'a> = &'a mut dyn FnMut(&dyn Stream) -> Result<(), DeviceError>;

/// Executes the code of one stage on one worker.
pub struct Executor<'a> {
    pub code: &'a StageCode,
    pub states: Vec<Buffer>,
    pub device: DeviceContext,
    /// The worker's tensor-parallel rank, if the stage is tensor-parallel.
    pub tensor_rank: Option<Arc<TensorRank>>,
    /// Called around the steps of passes: ZeRO 2 and 3 stream gradients and weights.
    pub step_hook: Option<Arc<dyn StepHook>>,
    arena: Buffer,
    /// Constants of the forward pass, and of both phases of the backward pass.
    constants: [Vec<Buffer>; 2],
}

impl<'a> Executor<'a> {
    /// Allocates the arena and uploads the constants. `counter` counts the memory of micro-batches.
    pub fn new(
        code: &'a StageCode,
        states: Vec<Buffer>,
        device: &Arc<dyn Device>,
        counter: Arc<MemoryCounter>,
    ) -> Result<Executor<'a>, DeviceError> {
        let uploaded = |sequence: &Sequence| -> Result<Vec<Buffer>, DeviceError> {
            sequence.constants.iter().map(|constant| device.upload(constant.bytes())).collect()
        };
        let steps = [&code.forward, &code.backward, &code.weight].into_iter().flat_map(|sequence| &sequence.steps);
        let kernels = steps.flat_map(|step| step.joint.iter().map(|joint| &joint.kernel).chain([&step.kernel]));
        device.load(&kernels.map(|kernel| &**kernel).collect::<Vec<_>>())?;
        Ok(Executor {
            code,
            states,
            device: DeviceContext::new(device.clone(), counter)?,
            tensor_rank: None,
            step_hook: None,
            arena: device.allocate(code.arena_bytes)?,
            // Both phases of a split backward have the same constants.
            constants: [uploaded(&code.forward)?, uploaded(&code.backward)?],
        })
    }

    /// Allocates an item: its saved-activation blocks and its send buffers. The caller sets the weights before the first
    /// pass.
    pub fn begin(&self) -> Result<Item, DeviceError> {
        let sent = self.code.own_bytes.iter().map(|&bytes| self.device.take(bytes)).collect::<Result<_, _>>()?;
        Ok(Item {
            weights: Weights::new(),
            version: 0,
            gathered: Vec::new(),
            saved: match self.code.kept_bytes - self.code.recomputed_bytes {
                0 => None,
                bytes => Some(self.device.take(bytes)?),
            },
            recomputed: Some(self.device.take(self.code.recomputed_bytes)?),
            sent,
            received: vec![None; self.code.received.len()],
            feeds: Vec::new(),
            gradients_in: vec![None; self.code.gradients_in.len()],
            gradients_out: vec![None; self.code.gradients_out.len()],
            sent_gradients: Vec::new(),
            between: None,
            sums: Vec::new(),
            is_done: false,
            position: RoundPosition::default(),
        })
    }

    /// Runs the forward pass. The caller has set all received values and feeds.
    pub fn forward(&mut self, item: &mut Item) -> Result<(), ExecuteError> {
        self.run(RunPhase::Forward, &self.code.forward.steps, item)
    }

    /// Runs the backward pass. The caller has set all incoming gradients.
    pub fn backward(&mut self, item: &mut Item) -> Result<(), ExecuteError> {
        self.backward_input(item)?;
        self.backward_weight(item)
    }

    /// Runs the input-gradient pass, or the whole backward if the code does not split it.
    pub fn backward_input(&mut self, item: &mut Item) -> Result<(), ExecuteError> {
        let code = self.code;
        if code.between_bytes > 0 {
            item.between = Some(self.device.take(code.between_bytes)?);
        }
        for (i, transfer) in code.gradients_out.iter().enumerate() {
            // Two gradients may be the same tensor, as for the operands of an addition: the second shares the first
            // one's buffer.
            item.gradients_out[i] = match transfer.address.slot {
                Slot::GradientOut(own) if own == i => Some(self.device.take(transfer.address.bytes)?),
                _ => None,
            };
        }
        self.run(RunPhase::Backward, &code.backward.steps, item)?;
        // A gradient that is only forwarded, as for an addition, has no buffer of its own.
        for (i, transfer) in code.gradients_out.iter().enumerate() {
            if item.gradients_out[i].is_none() {
                let shared = self.shared(RunPhase::Backward, item, transfer.address)?;
                item.gradients_out[i] = Some(shared);
            }
        }
        if code.weight_reads_sent {
            item.sent_gradients.clone_from(&item.gradients_out);
        }
        Ok(())
    }

    /// Runs the weight-gradient pass, after which all parameter gradients exist.
    pub fn backward_weight(&mut self, item: &mut Item) -> Result<(), ExecuteError> {
        item.is_done = true;
        self.run(RunPhase::Weight, &self.code.weight.steps, item)
    }

    /// Frees activations until [`Executor::recompute`] recomputes them.
    pub fn free_recomputed(&mut self, item: &mut Item) {
        if let Some(recomputed) = item.recomputed.take() {
            self.device.give(recomputed);
        }
    }

    /// Recomputes the activations. Send buffers are allocated anew, because other stages may still read the first ones.
    pub fn recompute(&mut self, item: &mut Item) -> Result<(), ExecuteError> {
        let code = self.code;
        for (index, bytes) in code.own_bytes.iter().enumerate().filter(|(index, _)| code.recomputed_own[*index]) {
            let buffer = std::mem::replace(&mut item.sent[index], Arc::new(Buffer::empty()));
            lend_to_readers(&buffer);
            self.device.give(buffer);
            item.sent[index] = self.device.take(*bytes)?;
        }
        item.recomputed = Some(self.device.take(code.recomputed_bytes)?);
        self.run(RunPhase::Forward, &code.forward.steps[..code.recomputed_steps], item)?;
        // The step after these may read the same gathered parameters.
        item.gathered.clear();
        Ok(())
    }

    /// Frees a micro-batch.
    pub fn finish(&mut self, item: Item) -> Result<(), DeviceError> {
        let from_others = item.received.into_iter().chain(item.gradients_in).flatten();
        let counter = self.device.ledger();
        for buffer in from_others {
            counter.free_slot(buffer.len());
            // Its owner may write it again after the reads of this stream.
            self.device.give_foreign(buffer)?;
        }
        item.sent.iter().for_each(lend_to_readers);
        let buffers = item.saved.into_iter().chain(item.recomputed).chain(item.sent).chain(item.between);
        let gradients = item.gradients_out.into_iter().chain(item.sent_gradients).flatten();
        for buffer in buffers.chain(gradients).chain(item.feeds) {
            self.device.give(buffer);
        }
        Ok(())
    }

    /// The tensor at a location after a forward pass.
    pub fn result<'b>(&'b self, item: &'b Item, address: TensorAddress) -> Region<'b> {
        self.region(RunPhase::Forward, item, address)
    }

    /// Starts to copy the bytes at a location after a forward pass to the host.
    pub fn download_result(&self, item: &Item, address: TensorAddress) -> Result<Download, DeviceError> {
        self.device.stream.begin_download(self.result(item, address))
    }

    /// The tensor at a location after a backward pass.
    pub fn gradient<'b>(&'b self, item: &'b Item, address: TensorAddress) -> Region<'b> {
        self.region(RunPhase::Backward, item, address)
    }

    /// A buffer to send to another stage: shared if the location is a whole buffer, else a copy.
    pub fn shared(&self, phase: RunPhase, item: &Item, address: TensorAddress) -> Result<Arc<Buffer>, DeviceError> {
        let shared_buffer = match address.slot {
            Slot::Own(i) => Some(&item.sent[i]),
            Slot::Received(i) => item.received[i].as_ref(),
            Slot::GradientIn(i) => item.gradients_in[i].as_ref(),
            Slot::GradientOut(i) => item.gradient_out(i),
            _ => None,
        };
        if let Some(buffer) = shared_buffer {
            return Ok(buffer.clone());
        }
        let mut copy = self.device.take(address.bytes)?;
        self.device.stream.copy(self.region(phase, item, address), Buffer::exclusive(&mut copy))?;
        Ok(copy)
    }

    /// Runs the first steps of a pass.
    fn run(&self, phase: RunPhase, steps: &[Step], item: &mut Item) -> Result<(), ExecuteError> {
        let code = self.code;
        let Some(hook) = self.step_hook.as_ref().filter(|hook| hook.has_actions(phase)) else {
            return self.run_steps(phase, steps, item, &mut |_| Ok(()));
        };
        for (index, step) in steps.iter().enumerate() {
            let failed = |fault| ExecuteError::of_step(step, fault);
            hook.act(code, (phase, index), false, item, &self.device).map_err(failed)?;
            self.run_steps(phase, std::slice::from_ref(step), item, &mut |_| Ok(()))?;
            hook.act(code, (phase, index), true, item, &self.device).map_err(failed)?;
        }
        Ok(())
    }

    /// Runs a forward pass, or an unsplit backward of an item that has already run backward once, and calls `watcher`
    /// after every step.
    pub fn run_watched(&mut self, phase: RunPhase, item: &Item, watcher: Watcher<'_>) -> Result<(), ExecuteError> {
        self.run_steps(phase, &phase.sequence(self.code).steps, item, watcher)
    }

    fn run_steps(
        &self,
        phase: RunPhase,
        steps: &[Step],
        item: &Item,
        watcher: Watcher<'_>,
    ) -> Result<(), ExecuteError> {
        let mut inputs: Vec<Region<'_>> = Vec::with_capacity(8);
        let mut outputs: Vec<RegionMut<'_>> = Vec::with_capacity(4);
        for step in steps {
            inputs.clear();
            outputs.clear();
            for address in &step.inputs {
                inputs.push(self.region(phase, item, *address));
            }
            for address in &step.outputs {
                // SAFETY: see `write`; these are the outputs of the step.
                outputs.push(unsafe { self.write(item, *address) });
            }
            // SAFETY: see `write`; this is the workspace of the step.
            let workspace = unsafe { self.write(item, step.workspace) };
            self.run_step(phase, step, item, (&inputs, &mut outputs, workspace))
                .map_err(|fault| ExecuteError::of_step(step, fault))?;
            watcher(&*self.device.stream)?;
        }
        Ok(())
    }

    fn run_step(
        &self,
        phase: RunPhase,
        step: &Step,
        item: &Item,
        (inputs, outputs, mut workspace): (&[Region<'_>], &mut [RegionMut<'_>], RegionMut<'_>),
    ) -> Result<(), DeviceError> {
        let (stream, kernel) = (&self.device.stream, &*step.kernel);
        if let (Some(tensor_rank), Some(collective)) = (&self.tensor_rank, &step.collective) {
            let operand = (&collective.operand, inputs[0]);
            tensor_rank.run_collective(&collective.op, operand, outputs[0].reborrow(), &self.device)?;
        } else if step.adds_to.is_empty() {
            stream.run(kernel, inputs, outputs, workspace.reborrow(), OutputMode::Overwrite)?;
        }
        let joint = step.joint.as_ref().filter(|_| item.position.is_joined());
        if let Some(joint) = joint {
            self.run_joint(step, joint, item, (inputs, workspace.reborrow()))?;
        }
        for term in step.adds_to.iter().filter(|_| joint.is_none()) {
            let sum = item.sum(*term);
            // SAFETY: see `Sum::write`; the step accumulates into this sum.
            let to = &mut [unsafe { sum.write() }];
            stream.run(kernel, inputs, to, workspace.reborrow(), mode_of(sum.is_begun))?;
        }
        step.terms.iter().try_for_each(|term| self.add_to_sum(phase, item, *term))
    }

    /// Buffers the operands of one micro-batch for a batched weight gradient. The last of [`ITEMS`] runs the batched
    /// kernel.
    fn run_joint(
        &self,
        step: &Step,
        joint: &Joint,
        item: &Item,
        (inputs, mut workspace): (&[Region<'_>], RegionMut<'_>),
    ) -> Result<(), DeviceError> {
        let stream = &self.device.stream;
        let index = item.position.done as usize % ITEMS as usize;
        for (address, input) in joint.inputs.iter().zip(inputs) {
            // SAFETY: see `write`; each step has its own buffer, after all offsets of the forward and backward layouts
            // in the arena.
            let operands = unsafe { self.write(item, *address) };
            stream.copy(*input, operands.slice(index * input.len()..(index + 1) * input.len()))?;
        }
        if index + 1 < ITEMS as usize {
            return Ok(());
        }
        let batched = joint.inputs.iter().map(|address| self.region(RunPhase::Backward, item, *address));
        let batched: Vec<Region<'_>> = batched.collect();
        for term in &step.adds_to {
            // SAFETY: see `Sum::write`; the step accumulates into this sum.
            let to = &mut [unsafe { item.sum(*term).write() }];
            // The first batch of the round overwrites the sum.
            let mode = mode_of(item.position.done >= u64::from(ITEMS));
            stream.run(&*joint.kernel, &batched, to, workspace.reborrow(), mode)?;
        }
        Ok(())
    }

    /// Accumulates a term into its sum. The first term is already there, or is copied.
    fn add_to_sum(&self, phase: RunPhase, item: &Item, term: usize) -> Result<(), DeviceError> {
        let (gradient_term, sum) = (&self.code.gradient_terms[term], item.sum(term));
        let is_first = matches!(gradient_term.address.slot, Slot::Gradient { term: written, .. } if written == term);
        if is_first && !sum.is_begun {
            return Ok(());
        }
        let value = self.region(phase, item, gradient_term.address);
        // SAFETY: see `Sum::write`; a term that is accumulated does not alias its sum.
        let to = unsafe { sum.write() };
        let dtype = self.code.parameters[gradient_term.parameter].fact.dtype;
        match sum.is_begun {
            true => self.device.stream.accumulate(dtype, value, to),
            false => self.device.stream.begin_sum(dtype, value, to),
        }
    }

    /// The memory of a tensor.
    fn region<'b>(&'b self, phase: RunPhase, item: &'b Item, address: TensorAddress) -> Region<'b> {
        let inside = |buffer: &'b Buffer, offset: usize| buffer.region_of(offset..offset + address.bytes);
        let whole_region = |buffer: Option<&'b Arc<Buffer>>| {
            inside(buffer.expect("the program waits for a tensor before it is used"), 0)
        };
        match address.slot {
            Slot::Arena(offset) => inside(&self.arena, offset),
            Slot::Saved(offset) => {
                let first = self.code.recomputed_bytes;
                let (block, offset) = match &item.saved {
                    Some(kept) if offset >= first => (Some(kept), offset - first),
                    _ => (item.recomputed.as_ref(), offset),
                };
                inside(block.expect("a micro-batch in flight has its block"), offset)
            }
            Slot::Own(i) => inside(&item.sent[i], 0),
            Slot::Received(i) => whole_region(item.received[i].as_ref()),
            Slot::GradientIn(i) => whole_region(item.gradients_in[i].as_ref()),
            Slot::GradientOut(i) => whole_region(item.gradient_out(i)),
            Slot::Sum(term) => inside(&item.sum(term).buffer, 0),
            Slot::Gradient { term, offset } => match item.sum(term) {
                sum if !sum.is_begun => inside(&sum.buffer, 0),
                _ => inside(&self.arena, offset),
            },
            Slot::SplitBackward(offset) => {
                inside(item.between.as_ref().expect("the first part of a backward took it"), offset)
            }
            Slot::Feed(i) => inside(&item.feeds[i], 0),
            Slot::Parameter(i) => inside(item.gathered.get(i).and_then(Option::as_ref).unwrap_or(&item.weights[i]), 0),
            Slot::State(i) => inside(&self.states[i], 0),
            Slot::Constant(i) => inside(&self.constants[usize::from(phase != RunPhase::Forward)][i], 0),
        }
    }

    /// The memory that a kernel writes.
    ///
    /// # Safety
    ///
    /// Only [`Executor::run`] may call this, for the outputs and the workspace of one step. The memory plan gives them
    /// bytes that no live tensor has, and a kernel's outputs never overlap its inputs (`pass::memory`). One stream runs
    /// one kernel at a time. The item alone holds the buffers of `Own`, `Saved`, `GradientOut`, `Sum` and `Gradient`
    /// until they are sent or its pass ends.
    unsafe fn write<'b>(&'b self, item: &'b Item, address: TensorAddress) -> RegionMut<'b> {
        // SAFETY: the caller guarantees exclusive access. No constant is written, so the phase does not matter.
        unsafe { self.region(RunPhase::Forward, item, address).assume_exclusive() }
    }
}

fn mode_of(accumulates: bool) -> OutputMode {
    if accumulates { OutputMode::Accumulate } else { OutputMode::BeginSum }
}
