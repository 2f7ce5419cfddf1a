//! Runs the kernels of a stage for one micro-batch.
//!
//! The compiler fixes offsets; the executor turns them into addresses. An in-flight micro-batch owns its saved
//! activations and the buffers it sends. It holds references to received buffers and to its weight version.

use crate::comm::tensor_group::TensorRank;
use crate::device::buffer::{Buffer, Pool};
use crate::exec::compile::StageCode;
use crate::exec::sequence::{Joint, Sequence, Slot, Step, TensorAddress};
use crate::optim::optimizer::accumulate;
use crate::stage::gradients::begin;
use crate::zero::streaming::{RoundPosition, RunPhase, ShardStream};
use compiler::op::KernelError;
use compiler::pass::batched_weight_grad::ITEMS;
use std::sync::Arc;
use thiserror::Error;

/// One weight version of a stage, in the order of [`StageCode::parameters`].
pub type Weights = Vec<Arc<Buffer>>;

/// A kernel failed on its operands.
#[derive(Debug, Error, Clone, PartialEq)]
#[error("node `{node}`: {fault}")]
pub struct ExecuteError {
    pub node: String,
    pub fault: KernelError,
}

/// The state of one in-flight micro-batch (or minibatch, under asynchronous schedules) on a stage.
#[derive(Default)]
pub struct Item {
    pub weights: Weights,
    pub version: u32,
    /// ZeRO 3: gathered full parameters, by parameter.
    pub gathered: Vec<Option<Arc<Buffer>>>,
    /// Activations saved for the backward pass.
    pub kept: Option<Arc<Buffer>>,
    /// Activations sent to later stages.
    pub own: Vec<Arc<Buffer>>,
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
    pub turn: RoundPosition,
}

/// A gradient sum over micro-batches, lent to the backward pass of the next one.
pub struct Sum {
    pub buffer: Arc<Buffer>,
    /// False if the first term must overwrite the buffer.
    pub is_begun: bool,
}

impl Sum {
    /// The buffer as a mutable slice.
    ///
    /// # Safety
    ///
    /// Only [`Executor::run`] may call this. The item owns the sum during its backward pass, and one thread runs one
    /// kernel at a time.
    #[allow(clippy::mut_from_ref)]
    unsafe fn write(&self) -> &mut [u8] {
        // SAFETY: the bytes belong to the buffer; the caller guarantees exclusive access.
        unsafe { std::slice::from_raw_parts_mut(self.buffer.start(), self.buffer.len()) }
    }
}

impl Item {
    fn sum(&self, term: usize) -> &Sum {
        self.sums.get(term).and_then(Option::as_ref).expect("a backward has the sums it accumulates into")
    }

    fn gradient_out(&self, at: usize) -> Option<&Arc<Buffer>> {
        self.gradients_out[at].as_ref().or_else(|| self.sent_gradients.get(at)?.as_ref())
    }
}

/// Stops counting a sent buffer here while the receiver still reads it; the receiver has counted it on arrival.
fn lend_to_readers(sent: &Arc<Buffer>) {
    if Arc::strong_count(sent) > 1 {
        sent.release_slot();
    }
}

/// Executes the code of one stage on one worker.
pub struct Executor<'a> {
    pub code: &'a StageCode,
    pub states: Vec<Buffer>,
    pub pool: Pool,
    /// The worker's tensor-parallel rank, if the stage is tensor-parallel.
    pub tensor_rank: Option<Arc<TensorRank>>,
    /// Gradient and weight streaming between steps, under ZeRO 2 and 3.
    pub pieces: Option<ShardStream>,
    arena: Buffer,
}

impl<'a> Executor<'a> {
    pub fn new(code: &'a StageCode, states: Vec<Buffer>) -> Executor<'a> {
        Executor {
            code,
            states,
            pool: Pool::default(),
            tensor_rank: None,
            pieces: None,
            arena: Buffer::new(code.arena_bytes),
        }
    }

    /// Allocates an item: its saved-activation block and its send buffers. The caller sets the weights before the first
    /// pass.
    pub fn begin(&mut self) -> Item {
        let own = self.code.own_bytes.iter().map(|&bytes| self.pool.take(bytes)).collect();
        Item {
            weights: Weights::new(),
            version: 0,
            gathered: Vec::new(),
            kept: Some(self.pool.take(self.code.kept_bytes)),
            own,
            received: vec![None; self.code.received.len()],
            feeds: Vec::new(),
            gradients_in: vec![None; self.code.gradients_in.len()],
            gradients_out: vec![None; self.code.gradients_out.len()],
            sent_gradients: Vec::new(),
            between: None,
            sums: Vec::new(),
            is_done: false,
            turn: RoundPosition::default(),
        }
    }

    /// Runs the forward pass. The caller has set all received values and feeds.
    pub fn forward(&mut self, item: &mut Item) -> Result<(), ExecuteError> {
        self.run(RunPhase::Forward, item)
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
            item.between = Some(self.pool.take(code.between_bytes));
        }
        for (i, transfer) in code.gradients_out.iter().enumerate() {
            // Two gradients may be the same tensor, as for the operands of an addition: the second shares the first
            // one's buffer.
            item.gradients_out[i] = match transfer.place.slot {
                Slot::GradientOut(own) if own == i => Some(self.pool.take(transfer.place.bytes)),
                _ => None,
            };
        }
        self.run(RunPhase::Backward, item)?;
        // A gradient that is only forwarded, as for an addition, has no buffer of its own.
        for (i, transfer) in code.gradients_out.iter().enumerate() {
            if item.gradients_out[i].is_none() {
                let shared = self.shared(&code.backward, item, transfer.place);
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
        self.run(RunPhase::Weight, item)
    }

    /// Frees the saved activations until [`Executor::again`] recomputes them.
    pub fn let_go(&mut self, item: &mut Item) {
        if let Some(kept) = item.kept.take() {
            self.pool.give(kept);
        }
    }

    /// Recomputes the activations. Send buffers are allocated anew, because other stages may still read the first ones.
    pub fn again(&mut self, item: &mut Item) -> Result<(), ExecuteError> {
        let own = self.code.own_bytes.iter().map(|&bytes| self.pool.take(bytes)).collect();
        for sent in std::mem::replace(&mut item.own, own) {
            lend_to_readers(&sent);
            self.pool.give(sent);
        }
        item.kept = Some(self.pool.take(self.code.kept_bytes));
        self.forward(item)
    }

    pub fn finish(&mut self, item: Item) {
        let from_others = item.received.iter().chain(&item.gradients_in).flatten();
        from_others.for_each(|buffer| self.pool.ledger.leave_place(buffer.len()));
        item.own.iter().for_each(lend_to_readers);
        let buffers = item.kept.into_iter().chain(item.own).chain(item.between);
        let gradients = item.gradients_out.into_iter().chain(item.sent_gradients).flatten();
        for buffer in buffers.chain(gradients).chain(item.feeds) {
            self.pool.give(buffer);
        }
    }

    /// Bytes at a location after a forward pass.
    pub fn result<'b>(&'b self, item: &'b Item, place: TensorAddress) -> &'b [u8] {
        self.read(&self.code.forward, item, place)
    }

    /// Bytes at a location after a backward pass.
    pub fn gradient<'b>(&'b self, item: &'b Item, place: TensorAddress) -> &'b [u8] {
        // Both passes of a split backward have the same constants.
        self.read(&self.code.backward, item, place)
    }

    /// A buffer to send to another stage: shared if the location is a whole buffer, else a copy.
    pub fn shared(&mut self, sequence: &Sequence, item: &Item, place: TensorAddress) -> Arc<Buffer> {
        let whole = match place.slot {
            Slot::Own(i) => Some(&item.own[i]),
            Slot::Received(i) => item.received[i].as_ref(),
            Slot::GradientIn(i) => item.gradients_in[i].as_ref(),
            Slot::GradientOut(i) => item.gradient_out(i),
            _ => None,
        };
        if let Some(buffer) = whole {
            return buffer.clone();
        }
        let mut copy = self.pool.take(place.bytes);
        let bytes = self.read(sequence, item, place);
        Arc::get_mut(&mut copy)
            .expect("the pool hands out buffers with a single owner")
            .bytes_mut()
            .copy_from_slice(bytes);
        copy
    }

    fn run(&self, run: RunPhase, item: &mut Item) -> Result<(), ExecuteError> {
        let (code, sequence) = (self.code, run.of(self.code));
        let Some(pieces) = self.pieces.as_ref().filter(|pieces| pieces.has(run)) else {
            return self.run_watched(sequence, item, &mut || ());
        };
        for (at, step) in sequence.steps.iter().enumerate() {
            let gone = |_| ExecuteError { node: step.label().to_string(), fault: KernelError::Gone };
            pieces.before(code, run, at, item, &self.pool.ledger).map_err(gone)?;
            self.run_steps(sequence, std::slice::from_ref(step), item, &mut || ())?;
            pieces.after(code, run, at, item).map_err(gone)?;
        }
        Ok(())
    }

    /// Runs the forward pass and calls `done` after every step.
    pub fn forward_watched(&mut self, item: &Item, done: &mut dyn FnMut()) -> Result<(), ExecuteError> {
        self.run_watched(&self.code.forward, item, done)
    }

    /// Like [`Executor::forward_watched`] for an unsplit backward of an item that has already run backward once.
    pub fn backward_watched(&mut self, item: &Item, done: &mut dyn FnMut()) -> Result<(), ExecuteError> {
        self.run_watched(&self.code.backward, item, done)
    }

    fn run_watched(&self, sequence: &Sequence, item: &Item, done: &mut dyn FnMut()) -> Result<(), ExecuteError> {
        self.run_steps(sequence, &sequence.steps, item, done)
    }

    fn run_steps(
        &self,
        sequence: &Sequence,
        steps: &[Step],
        item: &Item,
        done: &mut dyn FnMut(),
    ) -> Result<(), ExecuteError> {
        let mut inputs: Vec<&[u8]> = Vec::with_capacity(8);
        let mut outputs: Vec<&mut [u8]> = Vec::with_capacity(4);
        for step in steps {
            inputs.clear();
            outputs.clear();
            for place in &step.inputs {
                inputs.push(self.read(sequence, item, *place));
            }
            for place in &step.outputs {
                outputs.push(unsafe { self.write(item, *place) });
            }
            let workspace = unsafe { self.write(item, step.workspace) };
            let refused = |fault| ExecuteError { node: step.label().to_string(), fault };
            if let Some((tensor_rank, (op, own))) =
                self.tensor_rank.as_ref().and_then(|s| Some((s, step.task.together(&inputs)?)))
            {
                tensor_rank.meet(op, own, outputs[0]).map_err(refused)?;
            } else if step.adds_to.is_empty() {
                step.task.run(&inputs, &mut outputs, workspace).map_err(refused)?;
            }
            let joint = step.joint.as_ref().filter(|_| item.turn.is_joined());
            if let Some(joint) = joint {
                self.put_by(step, joint, item, (&inputs, &mut *workspace))?;
            }
            for term in step.adds_to.iter().filter(|_| joint.is_none()) {
                let sum = item.sum(*term);
                let to = &mut [unsafe { sum.write() }];
                let run = match sum.is_begun {
                    true => step.task.run_adding(&inputs, to, workspace),
                    false => step.task.run(&inputs, to, workspace),
                };
                run.map_err(refused)?;
            }
            for term in &step.terms {
                self.add_to_sum(sequence, item, *term);
            }
            done();
        }
        Ok(())
    }

    /// Buffers the operands of one micro-batch for a batched weight gradient. The last of [`ITEMS`] runs the batched
    /// kernel.
    fn put_by(
        &self,
        step: &Step,
        joint: &Joint,
        item: &Item,
        (inputs, workspace): (&[&[u8]], &mut [u8]),
    ) -> Result<(), ExecuteError> {
        let at = item.turn.own as usize % ITEMS as usize;
        for (place, bytes) in joint.inputs.iter().zip(inputs) {
            // SAFETY: see `write`; each step has its own buffer, after all offsets of the forward and backward layouts
            // in the arena.
            let room = unsafe { self.write(item, *place) };
            room[at * bytes.len()..][..bytes.len()].copy_from_slice(bytes);
        }
        if at + 1 < ITEMS as usize {
            return Ok(());
        }
        let all: Vec<&[u8]> = joint.inputs.iter().map(|place| self.read(&self.code.backward, item, *place)).collect();
        for term in &step.adds_to {
            let to = &mut [unsafe { item.sum(*term).write() }];
            // The first batch of the round overwrites the sum.
            let run = match item.turn.own < u64::from(ITEMS) {
                true => joint.kernel.run(&all, to, &mut *workspace),
                false => joint.kernel.run_adding(&all, to, &mut *workspace),
            };
            run.map_err(|fault| ExecuteError { node: step.label().to_string(), fault })?;
        }
        Ok(())
    }

    /// Accumulates a term into its sum. The first term is already there, or is copied.
    fn add_to_sum(&self, sequence: &Sequence, item: &Item, term: usize) {
        let (at, sum) = (&self.code.gradient_terms[term], item.sum(term));
        let is_there = matches!(at.place.slot, Slot::Gradient { term: first, .. } if first == term);
        if is_there && !sum.is_begun {
            return;
        }
        let made = self.read(sequence, item, at.place);
        // SAFETY: see `write`; a term that is accumulated does not alias its sum.
        let to = unsafe { sum.write() };
        let dtype = self.code.parameters[at.parameter].fact.dtype;
        match sum.is_begun {
            true => accumulate(dtype, to, made),
            false => begin(dtype, to, made),
        }
    }

    fn address(&self, item: &Item, place: TensorAddress) -> *mut u8 {
        let inside = |buffer: &Buffer, offset: usize| {
            assert!(offset + place.bytes <= buffer.len(), "a range is within its buffer");
            buffer.start().wrapping_add(offset)
        };
        let whole =
            |buffer: Option<&Arc<Buffer>>| inside(buffer.expect("the program waits for a tensor before it is used"), 0);
        match place.slot {
            Slot::Arena(offset) => inside(&self.arena, offset),
            Slot::WriterConfig(offset) => {
                inside(item.kept.as_ref().expect("a micro-batch in flight has its block"), offset)
            }
            Slot::Own(i) => inside(&item.own[i], 0),
            Slot::Received(i) => whole(item.received[i].as_ref()),
            Slot::GradientIn(i) => whole(item.gradients_in[i].as_ref()),
            Slot::GradientOut(i) => whole(item.gradient_out(i)),
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
            Slot::Constant(_) => unreachable!("constants belong to their sequence"),
        }
    }

    fn read<'b>(&'b self, sequence: &'b Sequence, item: &'b Item, place: TensorAddress) -> &'b [u8] {
        if let Slot::Constant(i) = place.slot {
            return &sequence.constants[i].bytes()[..place.bytes];
        }
        // SAFETY: `address` checked the bounds. Nothing writes these bytes during the borrow: a kernel's outputs never
        // overlap its inputs (`pass::memory`), and one thread runs one kernel at a time.
        unsafe { std::slice::from_raw_parts(self.address(item, place), place.bytes) }
    }

    /// The bytes that a kernel writes.
    ///
    /// # Safety
    ///
    /// Only [`Executor::run`] may call this, for the outputs and the workspace of one step. The memory plan gives them
    /// bytes that no live tensor has. The item alone holds the buffers of `Own`, `WriterConfig`, `GradientOut`, `Sum` and
    /// `Gradient` until they are sent or its pass ends.
    #[allow(clippy::mut_from_ref)]
    unsafe fn write<'b>(&'b self, item: &'b Item, place: TensorAddress) -> &'b mut [u8] {
        // SAFETY: `address` checks the bounds; the caller guarantees exclusive access.
        unsafe { std::slice::from_raw_parts_mut(self.address(item, place), place.bytes) }
    }
}
