//! Runs the kernels of a stage for one micro-batch.
//!
//! Offsets are fixed at compile time; here they become addresses. A micro-batch in flight owns the activations kept for its backward
//! pass and the buffers it sends. It holds references to the buffers it received and to its weight version.

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

/// One version of a stage's parameters, in the order of [`StageCode::parameters`].
pub type Weights = Vec<Arc<Buffer>>;

/// A kernel refused its values.
#[derive(Debug, Error, Clone, PartialEq)]
#[error("node `{node}`: {fault}")]
pub struct ExecuteError {
    /// The node, in the words of the source model.
    pub node: String,
    /// What was refused.
    pub fault: KernelError,
}

/// What one minibatch or microbatch holds between its forward and its backward run.
#[derive(Default)]
pub struct Item {
    /// The weights that both runs use, and their version.
    pub weights: Weights,
    /// The version.
    pub version: u32,
    /// Of parameters whose weights are a share, what a step reads of all of them.
    pub gathered: Vec<Option<Arc<Buffer>>>,
    /// What the backward run reads of the forward run.
    pub kept: Option<Arc<Buffer>>,
    /// What is sent to later stages.
    pub own: Vec<Arc<Buffer>>,
    /// What came from earlier stages.
    pub received: Vec<Option<Arc<Buffer>>>,
    /// The data.
    pub feeds: Vec<Arc<Buffer>>,
    /// Gradient terms from later stages.
    pub gradients_in: Vec<Option<Arc<Buffer>>>,
    /// Gradient terms for earlier stages.
    pub gradients_out: Vec<Option<Arc<Buffer>>>,
    /// Those of them that the second part of the backward run reads, which may have been sent by then.
    pub sent_gradients: Vec<Option<Arc<Buffer>>>,
    /// What the second part of the backward run reads of the first.
    pub between: Option<Arc<Buffer>>,
    /// The sums that the backward run adds gradients of parameters to, by term.
    pub sums: Vec<Option<Sum>>,
    /// Whether its backward run is over.
    pub is_done: bool,
    /// Where it stands in its round.
    pub turn: RoundPosition,
}

/// A gradient's sum over items, in the hands of the next item's backward run.
pub struct Sum {
    /// The sum.
    pub buffer: Arc<Buffer>,
    /// Whether it holds terms already.
    pub is_begun: bool,
}

impl Sum {
    /// Its bytes.
    ///
    /// # Safety
    ///
    /// Only [`Executor::run`] may call this: the item holds the sum alone while its backward run adds to it, and one thread runs one
    /// kernel at a time.
    #[allow(clippy::mut_from_ref)]
    unsafe fn write(&self) -> &mut [u8] {
        // SAFETY: the bytes are the buffer's; exclusiveness is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.buffer.start(), self.buffer.len()) }
    }
}

impl Item {
    /// The sum of a term.
    fn sum(&self, term: usize) -> &Sum {
        self.sums.get(term).and_then(Option::as_ref).expect("a backward run has the sums that it adds to")
    }

    fn gradient_out(&self, at: usize) -> Option<&Arc<Buffer>> {
        self.gradients_out[at].as_ref().or_else(|| self.sent_gradients.get(at)?.as_ref())
    }
}

/// What was sent and is still read is the reader's: it has counted it when it came.
fn lend_to_readers(sent: &Arc<Buffer>) {
    if Arc::strong_count(sent) > 1 {
        sent.lend();
    }
}

/// A stage on one worker: its code, arena and states.
pub struct Executor<'a> {
    /// What it runs.
    pub code: &'a StageCode,
    /// Values of the states, in the order of [`StageCode::states`].
    pub states: Vec<Buffer>,
    /// Where buffers come from.
    pub pool: Pool,
    /// Where its worker meets those of the other devices, if they share the stage.
    pub tensor_rank: Option<Arc<TensorRank>>,
    /// What is done between steps, if gradients leave as they are made.
    pub pieces: Option<ShardStream>,
    arena: Buffer,
}

impl<'a> Executor<'a> {
    /// A stage ready to run.
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

    /// A place for an item: its kept block and the buffers that it will send. Weights are given before its first run.
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

    /// Runs forward. All received values and feeds are there.
    pub fn forward(&mut self, item: &mut Item) -> Result<(), ExecuteError> {
        self.run(RunPhase::Forward, item)
    }

    /// Runs backward. All arriving gradients are there.
    pub fn backward(&mut self, item: &mut Item) -> Result<(), ExecuteError> {
        self.backward_input(item)?;
        self.backward_weight(item)
    }

    /// Runs the part of the backward that makes what is sent; all of it where the code is in one part.
    pub fn backward_input(&mut self, item: &mut Item) -> Result<(), ExecuteError> {
        let code = self.code;
        if code.between_bytes > 0 {
            item.between = Some(self.pool.take(code.between_bytes));
        }
        for (i, transfer) in code.gradients_out.iter().enumerate() {
            // Two gradients may be one tensor, as those of a sum are: the second shares the first one's buffer.
            item.gradients_out[i] = match transfer.place.slot {
                Slot::GradientOut(own) if own == i => Some(self.pool.take(transfer.place.bytes)),
                _ => None,
            };
        }
        self.run(RunPhase::Backward, item)?;
        // A gradient that is only handed on, such as that of a sum, has no buffer of its own.
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

    /// Runs the rest of the backward; the gradients of parameters are there after it.
    pub fn backward_weight(&mut self, item: &mut Item) -> Result<(), ExecuteError> {
        item.is_done = true;
        self.run(RunPhase::Weight, item)
    }

    /// Gives back what the backward run would read, until [`Executor::again`].
    pub fn let_go(&mut self, item: &mut Item) {
        if let Some(kept) = item.kept.take() {
            self.pool.give(kept);
        }
    }

    /// Runs forward once more for what was let go. What goes to other stages is written into other buffers, because the first ones
    /// may still be read there.
    pub fn again(&mut self, item: &mut Item) -> Result<(), ExecuteError> {
        let own = self.code.own_bytes.iter().map(|&bytes| self.pool.take(bytes)).collect();
        for sent in std::mem::replace(&mut item.own, own) {
            lend_to_readers(&sent);
            self.pool.give(sent);
        }
        item.kept = Some(self.pool.take(self.code.kept_bytes));
        self.forward(item)
    }

    /// Gives the item's buffers back.
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

    /// The bytes of a place after a forward run.
    pub fn result<'b>(&'b self, item: &'b Item, place: TensorAddress) -> &'b [u8] {
        self.read(&self.code.forward, item, place)
    }

    /// The bytes of a place after a backward run.
    pub fn gradient<'b>(&'b self, item: &'b Item, place: TensorAddress) -> &'b [u8] {
        // Both parts have the same constants, if there are two.
        self.read(&self.code.backward, item, place)
    }

    /// A reference to hand to another stage: shared where the place is a whole buffer, else a copy.
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
            .expect("the pool hands out buffers that nobody else holds")
            .bytes_mut()
            .copy_from_slice(bytes);
        copy
    }

    /// Runs forward, backward, or a part of that.
    fn run(&self, run: RunPhase, item: &mut Item) -> Result<(), ExecuteError> {
        let (code, sequence) = (self.code, run.of(self.code));
        let Some(pieces) = self.pieces.as_ref().filter(|pieces| pieces.has(run)) else {
            return self.run_watched(sequence, item, &mut || ());
        };
        for (at, step) in sequence.steps.iter().enumerate() {
            let gone = |_| ExecuteError { node: step.told().to_string(), fault: KernelError::Gone };
            pieces.before(code, run, at, item, &self.pool.ledger).map_err(gone)?;
            self.run_steps(sequence, std::slice::from_ref(step), item, &mut || ())?;
            pieces.after(code, run, at, item).map_err(gone)?;
        }
        Ok(())
    }

    /// Runs forward and says after every step that it is done.
    pub fn forward_watched(&mut self, item: &Item, done: &mut dyn FnMut()) -> Result<(), ExecuteError> {
        self.run_watched(&self.code.forward, item, done)
    }

    /// The same backward, of code whose backward run is in one part, for an item that has been run backward before.
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
                // SAFETY: see `write`.
                outputs.push(unsafe { self.write(item, *place) });
            }
            // SAFETY: see `write`.
            let workspace = unsafe { self.write(item, step.workspace) };
            let refused = |fault| ExecuteError { node: step.told().to_string(), fault };
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
                // SAFETY: see `write`.
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

    /// Puts what a step reads of an item by, and adds for all that is put by where the item is the last of so many.
    fn put_by(
        &self,
        step: &Step,
        joint: &Joint,
        item: &Item,
        (inputs, workspace): (&[&[u8]], &mut [u8]),
    ) -> Result<(), ExecuteError> {
        let at = item.turn.own as usize % ITEMS as usize;
        for (place, bytes) in joint.inputs.iter().zip(inputs) {
            // SAFETY: see `write`; behind what forward and backward lay out in the arena lies nothing but what each step puts by, in a place
            // of its own.
            let room = unsafe { self.write(item, *place) };
            room[at * bytes.len()..][..bytes.len()].copy_from_slice(bytes);
        }
        if at + 1 < ITEMS as usize {
            return Ok(());
        }
        let all: Vec<&[u8]> = joint.inputs.iter().map(|place| self.read(&self.code.backward, item, *place)).collect();
        for term in &step.adds_to {
            // SAFETY: see `write`.
            let to = &mut [unsafe { item.sum(*term).write() }];
            // The round's first items have left it as it was.
            let run = match item.turn.own < u64::from(ITEMS) {
                true => joint.kernel.run(&all, to, &mut *workspace),
                false => joint.kernel.run_adding(&all, to, &mut *workspace),
            };
            run.map_err(|fault| ExecuteError { node: step.told().to_string(), fault })?;
        }
        Ok(())
    }

    /// Adds a term that a step has made to its sum; the first one is that already, or is copied there.
    fn add_to_sum(&self, sequence: &Sequence, item: &Item, term: usize) {
        let (at, sum) = (&self.code.gradient_terms[term], item.sum(term));
        let is_there = matches!(at.place.slot, Slot::Gradient { term: first, .. } if first == term);
        if is_there && !sum.is_begun {
            return;
        }
        let made = self.read(sequence, item, at.place);
        // SAFETY: see `write`; a term that is added does not lie in its sum.
        let to = unsafe { sum.write() };
        let dtype = self.code.parameters[at.parameter].fact.dtype;
        match sum.is_begun {
            true => accumulate(dtype, to, made),
            false => begin(dtype, to, made),
        }
    }

    fn address(&self, item: &Item, place: TensorAddress) -> *mut u8 {
        let inside = |buffer: &Buffer, offset: usize| {
            assert!(offset + place.bytes <= buffer.len(), "a place lies within its buffer");
            buffer.start().wrapping_add(offset)
        };
        let whole =
            |buffer: Option<&Arc<Buffer>>| inside(buffer.expect("the program waits for a tensor before it is used"), 0);
        match place.slot {
            Slot::Arena(offset) => inside(&self.arena, offset),
            Slot::Kept(offset) => inside(item.kept.as_ref().expect("an item in flight has its block"), offset),
            Slot::Own(i) => inside(&item.own[i], 0),
            Slot::Received(i) => whole(item.received[i].as_ref()),
            Slot::GradientIn(i) => whole(item.gradients_in[i].as_ref()),
            Slot::GradientOut(i) => whole(item.gradient_out(i)),
            Slot::Sum(term) => inside(&item.sum(term).buffer, 0),
            Slot::Gradient { term, offset } => match item.sum(term) {
                sum if !sum.is_begun => inside(&sum.buffer, 0),
                _ => inside(&self.arena, offset),
            },
            Slot::Between(offset) => {
                inside(item.between.as_ref().expect("the first part of a backward run took it"), offset)
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
        // SAFETY: `address` checked the bounds; nothing writes these bytes while the slice lives, because a kernel's
        // outputs never overlap its inputs (`pass::memory`), and one thread runs one kernel at a time.
        unsafe { std::slice::from_raw_parts(self.address(item, place), place.bytes) }
    }

    /// The bytes of a place that a kernel writes.
    ///
    /// # Safety
    ///
    /// Only [`Executor::run`] may call this, for the outputs and the workspace of one step: the memory plan gave them
    /// bytes that no tensor alive at that step has, and the buffers behind `Own`, `Kept`, `GradientOut`, `Sum` and
    /// `Gradient` are held by this item alone until they are sent or its run is over.
    #[allow(clippy::mut_from_ref)]
    unsafe fn write<'b>(&'b self, item: &'b Item, place: TensorAddress) -> &'b mut [u8] {
        // SAFETY: bounds are checked by `address`; exclusiveness is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.address(item, place), place.bytes) }
    }
}
