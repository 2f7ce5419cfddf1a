//! Streaming of gradients out of a backward pass (ZeRO 2) and of weights into a pass (ZeRO 3).
//!
//! A gradient sum is allocated from the first step that touches it to the last, then added to its owners' shards and freed. A
//! gradient that aliases another tensor is added after the pass. A gathered parameter stays allocated until the first step that
//! does not read it.

use crate::device::buffer::Buffer;
use crate::device::context::DeviceContext;
use crate::device::error::DeviceError;
use crate::device::layout::accumulation_bytes;
use crate::device::memory_counter::MemoryCounter;
use crate::exec::executor::{Item, Sum, Weights};
use crate::exec::phase::{RoundPosition, RunPhase};
use crate::exec::sequence::{Sequence, Slot, Step, TensorAddress};
use crate::exec::stage_code::StageCode;
use crate::exec::step_hook::StepHook;
use crate::zero::gradient_shards::GradientShards;
use crate::zero::shard::ShardRange;
use crate::zero::shard_message::Term;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Actions around a step.
#[derive(Default)]
struct Moment {
    /// Parameters gathered before the step, and those freed after it.
    gathers: Vec<usize>,
    drops: Vec<usize>,
    /// Terms whose sums are allocated before the step, and those whose sums are reduced after it.
    begins: Vec<usize>,
    ends: Vec<usize>,
}

impl Moment {
    fn is_empty(&self) -> bool {
        [&self.gathers, &self.drops, &self.begins, &self.ends].into_iter().all(Vec::is_empty)
    }
}

/// Exchanges shards between the steps of a stage's passes.
pub struct ShardStream {
    gradient_shards: Arc<GradientShards>,
    shard: ShardRange,
    /// True if a replica releases a weight version after its last backward of the round.
    ends_with_round: bool,
    /// Indexed by pass and step.
    moments: [Vec<Moment>; 3],
}

impl ShardStream {
    pub fn new(
        code: &StageCode,
        shard: ShardRange,
        gradient_shards: Arc<GradientShards>,
        ends_with_round: bool,
    ) -> ShardStream {
        let moments = [RunPhase::Forward, RunPhase::Backward, RunPhase::Weight]
            .map(|phase| moments(code, &shard, phase.sequence(code)));
        ShardStream { gradient_shards, shard, ends_with_round, moments }
    }

    /// This replica accepts gradients of rounds up to `round`.
    pub fn open(&self, round: u32) {
        self.gradient_shards.open(self.shard.rank(), round);
    }

    /// True if terms of this parameter are accumulated in shards.
    pub fn is_streamed(&self, parameter: usize) -> bool {
        self.shard.is_sharded(parameter)
    }

    fn moments_of(&self, phase: RunPhase) -> &[Moment] {
        &self.moments[phase as usize]
    }

    /// Adds a term, in the element type of sums, to the owners' shards.
    pub fn add(
        &self,
        code: &StageCode,
        term: usize,
        position: RoundPosition,
        gradient: &Arc<Buffer>,
        device: &DeviceContext,
    ) -> Result<(), DeviceError> {
        let parameter = code.gradient_terms[term].parameter;
        let parameter_type = (parameter, code.parameters[parameter].fact.dtype);
        let term = Term { round: position.round, term };
        let before = self.shard.of_group(position.before);
        self.gradient_shards.add(term, before, gradient, parameter_type, &self.shard, device)
    }

    /// Gathers a parameter from the shards of a version. Charges `counter` if given.
    pub fn gather_parameter(
        &self,
        code: &StageCode,
        (version, parameter): (u32, usize),
        counter: Option<&Arc<MemoryCounter>>,
        device: &DeviceContext,
    ) -> Result<Arc<Buffer>, DeviceError> {
        let mut buffer = device.stream.allocate(code.parameters[parameter].bytes)?;
        counter.into_iter().for_each(|counter| buffer.count_in(counter));
        let reader = self.shard.rank();
        self.gradient_shards.weights.read(reader, (version, parameter), buffer.region_mut(), device)?;
        Ok(Arc::new(buffer))
    }

    /// Publishes this replica's shard of a version.
    pub fn publish(&self, version: u32, weights: &Weights, device: &DeviceContext) -> Result<(), DeviceError> {
        if self.shard.shards_weights {
            weights.iter().try_for_each(|weight| device.release(weight))?;
            let shards = weights.iter().enumerate().map(|(parameter, weight)| match self.shard.is_sharded(parameter) {
                true => weight.clone(),
                false => Arc::new(Buffer::empty()),
            });
            self.gradient_shards.weights.publish(version, self.shard.rank(), shards.collect());
        }
        Ok(())
    }

    /// Releases a version for this replica.
    pub fn release(&self, version: u32) {
        self.gradient_shards.weights.release(version, self.shard.rank());
    }

    /// Marks this replica's last backward of a round.
    pub fn end_round(&self, round: u32) {
        if self.ends_with_round {
            self.release(round);
        }
    }

    /// Takes this replica's shard of a term's sum.
    pub fn sum(&self, round: u32, term: usize) -> Option<Arc<Buffer>> {
        self.gradient_shards.take(Term { round, term }, self.shard.rank()).map(Arc::new)
    }
}

impl StepHook for ShardStream {
    fn has_actions(&self, phase: RunPhase) -> bool {
        self.moments_of(phase).iter().any(|moment| !moment.is_empty())
    }

    /// Gathers the parameters that a step reads and allocates the sums that begin with it. Afterwards frees what the next
    /// step does not read, and adds finished sums to the owners' shards; this blocks until earlier micro-batches have
    /// added theirs.
    fn act(
        &self,
        code: &StageCode,
        (phase, step): (RunPhase, usize),
        is_done: bool,
        item: &mut Item,
        device: &DeviceContext,
    ) -> Result<(), DeviceError> {
        let (moment, counter) = (&self.moments_of(phase)[step], device.ledger());
        if is_done {
            for &parameter in &moment.drops {
                if let Some(gathered) = item.gathered.get_mut(parameter) {
                    *gathered = None;
                }
            }
            for &term in &moment.ends {
                if let Some(sum) = item.sums[term].take() {
                    self.add(code, term, item.position, &sum.buffer, device)?;
                }
            }
            return Ok(());
        }
        for &parameter in &moment.gathers {
            // A resumed run holds full weights for versions before its start.
            if item.weights[parameter].len() < code.parameters[parameter].bytes {
                item.gathered.resize(code.parameters.len(), None);
                let whole = self.gather_parameter(code, (item.version, parameter), Some(&counter), device)?;
                item.gathered[parameter] = Some(whole);
            }
        }
        for &term in &moment.begins {
            let gradient_term = &code.gradient_terms[term];
            let dtype = code.parameters[gradient_term.parameter].fact.dtype;
            let mut buffer = device.stream.allocate(accumulation_bytes(dtype, gradient_term.address.bytes))?;
            buffer.count_in(&counter);
            item.sums[term] = Some(Sum { buffer: Arc::new(buffer), is_begun: false });
        }
        Ok(())
    }
}

/// Actions around each step. A sum lives from the first to the last step that touches it, a gathered parameter as long
/// as consecutive steps read it.
fn moments(code: &StageCode, shard: &ShardRange, sequence: &Sequence) -> Vec<Moment> {
    let mut moments: Vec<Moment> = sequence.steps.iter().map(|_| Moment::default()).collect();
    let read = |step: &Step| -> BTreeSet<usize> {
        let parameter_of = |address: &TensorAddress| match address.slot {
            Slot::Parameter(parameter) => {
                Some(parameter).filter(|_| shard.shards_weights && shard.is_sharded(parameter))
            }
            _ => None,
        };
        step.inputs.iter().filter_map(parameter_of).collect()
    };
    let read: Vec<BTreeSet<usize>> = sequence.steps.iter().map(read).collect();
    let none = BTreeSet::new();
    for (index, moment) in moments.iter_mut().enumerate() {
        let before = index.checked_sub(1).map_or(&none, |before| &read[before]);
        moment.gathers = read[index].difference(before).copied().collect();
        moment.drops = read[index].difference(read.get(index + 1).unwrap_or(&none)).copied().collect();
    }
    for (term, gradient_term) in code.gradient_terms.iter().enumerate() {
        if !gradient_term.is_summed || !shard.is_sharded(gradient_term.parameter) {
            continue;
        }
        let touches = |step: &&Step| touches(step, term);
        let first = sequence.steps.iter().position(|step| touches(&step));
        let last = sequence.steps.iter().rposition(|step| touches(&step));
        if let (Some(first), Some(last)) = (first, last) {
            moments[first].begins.push(term);
            moments[last].ends.push(term);
        }
    }
    moments
}

fn touches(step: &Step, term: usize) -> bool {
    let is_of_term = |slot: Slot| match slot {
        Slot::Sum(slot_term) | Slot::Gradient { term: slot_term, .. } => slot_term == term,
        _ => false,
    };
    let has_operand = step.inputs.iter().chain(&step.outputs).any(|address| is_of_term(address.slot));
    has_operand || step.adds_to.contains(&term) || step.terms.contains(&term)
}
