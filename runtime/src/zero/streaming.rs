//! Streaming of gradients out of a backward pass (ZeRO 2) and of weights into a pass (ZeRO 3).
//!
//! A gradient sum is allocated from the first step that touches it to the last, then added to its owners' shards and freed. A
//! gradient that aliases another tensor is added after the pass. A gathered parameter stays allocated until the first step that
//! does not read it.

use crate::comm::communicator::CollectiveError;
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
use crate::zero::gradient_shards::{GradientShards, Term};
use crate::zero::shard::ShardRange;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Actions around a step.
#[derive(Default)]
struct Moment {
    /// Parameters gathered before the step, and those freed after it.
    gathered: Vec<usize>,
    dropped: Vec<usize>,
    /// Terms whose sums are allocated before the step, and those whose sums are reduced after it.
    begun: Vec<usize>,
    ended: Vec<usize>,
}

impl Moment {
    fn is_empty(&self) -> bool {
        [&self.gathered, &self.dropped, &self.begun, &self.ended].into_iter().all(Vec::is_empty)
    }
}

/// Exchanges shards between the steps of a stage's passes.
pub struct ShardStream {
    gradient_shards: Arc<GradientShards>,
    share: ShardRange,
    /// True if a replica releases a weight version after its last backward of the round.
    ends_with_round: bool,
    /// Indexed by pass and step.
    moments: [Vec<Moment>; 3],
}

impl ShardStream {
    pub fn new(
        code: &StageCode,
        share: ShardRange,
        gradient_shards: Arc<GradientShards>,
        ends_with_round: bool,
    ) -> ShardStream {
        let moments =
            [RunPhase::Forward, RunPhase::Backward, RunPhase::Weight].map(|run| moments(code, &share, run.of(code)));
        ShardStream { gradient_shards, share, ends_with_round, moments }
    }

    /// This replica accepts gradients of rounds up to `round`.
    pub fn open(&self, round: u32) {
        self.gradient_shards.open(self.share.replica(), round);
    }

    /// True if terms of this parameter are accumulated in shards.
    pub fn takes(&self, parameter: usize) -> bool {
        self.share.is_sharded(parameter)
    }

    fn of(&self, run: RunPhase) -> &[Moment] {
        &self.moments[run as usize]
    }

    /// Adds a term, in the element type of sums, to the owners' shards.
    pub fn add(
        &self,
        code: &StageCode,
        term: usize,
        turn: RoundPosition,
        made: &Arc<Buffer>,
        device: &DeviceContext,
    ) -> Result<(), CollectiveError> {
        let parameter = code.gradient_terms[term].parameter;
        let of = (parameter, code.parameters[parameter].fact.dtype);
        let term = Term { round: turn.round, term };
        self.gradient_shards.add(term, turn.before, made, of, &self.share, device)
    }

    /// Gathers a parameter from the shards of a version. Charges `ledger` if given.
    pub fn whole(
        &self,
        code: &StageCode,
        (version, parameter): (u32, usize),
        ledger: Option<&Arc<MemoryCounter>>,
        device: &DeviceContext,
    ) -> Result<Arc<Buffer>, CollectiveError> {
        let mut whole = device.stream.allocate(code.parameters[parameter].bytes)?;
        ledger.into_iter().for_each(|ledger| whole.count_in(ledger));
        let reader = self.share.replica();
        self.gradient_shards.weights.read(reader, (version, parameter), whole.region_mut(), device)?;
        Ok(Arc::new(whole))
    }

    /// Publishes this replica's shard of a version.
    pub fn put(&self, version: u32, weights: &Weights, device: &DeviceContext) -> Result<(), DeviceError> {
        if self.share.keeps() {
            weights.iter().try_for_each(|weight| device.release(weight))?;
            let own = weights.iter().enumerate().map(|(parameter, weight)| match self.share.is_sharded(parameter) {
                true => weight.clone(),
                false => Arc::new(Buffer::empty()),
            });
            self.gradient_shards.weights.put(version, self.share.replica(), own.collect());
        }
        Ok(())
    }

    /// Releases a version for this replica.
    pub fn release(&self, version: u32) {
        self.gradient_shards.weights.release(version, self.share.replica());
    }

    /// Marks this replica's last backward of a round.
    pub fn end_round(&self, round: u32) {
        if self.ends_with_round {
            self.release(round);
        }
    }

    /// Takes this replica's shard of a term's sum.
    pub fn sum(&self, round: u32, term: usize) -> Option<Arc<Buffer>> {
        self.gradient_shards.take(Term { round, term }, self.share.replica()).map(Arc::new)
    }
}

impl StepHook for ShardStream {
    fn has(&self, run: RunPhase) -> bool {
        self.of(run).iter().any(|moment| !moment.is_empty())
    }

    /// Gathers the parameters that a step reads and allocates the sums that begin with it.
    fn before(
        &self,
        code: &StageCode,
        run: RunPhase,
        step: usize,
        item: &mut Item,
        device: &DeviceContext,
    ) -> Result<(), CollectiveError> {
        let (moment, ledger) = (&self.of(run)[step], device.ledger());
        for &parameter in &moment.gathered {
            // A resumed run holds full weights for versions before its start.
            if item.weights[parameter].len() < code.parameters[parameter].bytes {
                item.gathered.resize(code.parameters.len(), None);
                let whole = self.whole(code, (item.version, parameter), Some(&ledger), device)?;
                item.gathered[parameter] = Some(whole);
            }
        }
        for &term in &moment.begun {
            let at = &code.gradient_terms[term];
            let dtype = code.parameters[at.parameter].fact.dtype;
            let mut room = device.stream.allocate(accumulation_bytes(dtype, at.place.bytes))?;
            room.count_in(&ledger);
            item.sums[term] = Some(Sum { buffer: Arc::new(room), is_begun: false });
        }
        Ok(())
    }

    /// Frees what the next step does not read, and adds finished sums to the owners' shards. Blocks until earlier
    /// micro-batches have added theirs.
    fn after(
        &self,
        code: &StageCode,
        run: RunPhase,
        step: usize,
        item: &mut Item,
        device: &DeviceContext,
    ) -> Result<(), CollectiveError> {
        let moment = &self.of(run)[step];
        for &parameter in &moment.dropped {
            if let Some(gathered) = item.gathered.get_mut(parameter) {
                *gathered = None;
            }
        }
        for &term in &moment.ended {
            if let Some(made) = item.sums[term].take() {
                self.add(code, term, item.turn, &made.buffer, device)?;
            }
        }
        Ok(())
    }
}

/// Actions around each step. A sum lives from the first to the last step that touches it, a gathered parameter as long
/// as consecutive steps read it.
fn moments(code: &StageCode, share: &ShardRange, sequence: &Sequence) -> Vec<Moment> {
    let mut moments: Vec<Moment> = sequence.steps.iter().map(|_| Moment::default()).collect();
    let read = |step: &Step| -> BTreeSet<usize> {
        let of = |place: &TensorAddress| match place.slot {
            Slot::Parameter(parameter) => Some(parameter).filter(|_| share.keeps() && share.is_sharded(parameter)),
            _ => None,
        };
        step.inputs.iter().filter_map(of).collect()
    };
    let read: Vec<BTreeSet<usize>> = sequence.steps.iter().map(read).collect();
    let none = BTreeSet::new();
    for (at, moment) in moments.iter_mut().enumerate() {
        let before = at.checked_sub(1).map_or(&none, |before| &read[before]);
        moment.gathered = read[at].difference(before).copied().collect();
        moment.dropped = read[at].difference(read.get(at + 1).unwrap_or(&none)).copied().collect();
    }
    for (term, at) in code.gradient_terms.iter().enumerate() {
        if !at.is_summed || !share.is_sharded(at.parameter) {
            continue;
        }
        let looks = |step: &&Step| looks(step, term);
        let first = sequence.steps.iter().position(|step| looks(&step));
        let last = sequence.steps.iter().rposition(|step| looks(&step));
        if let (Some(first), Some(last)) = (first, last) {
            moments[first].begun.push(term);
            moments[last].ended.push(term);
        }
    }
    moments
}

fn looks(step: &Step, term: usize) -> bool {
    let is_there = |slot: Slot| match slot {
        Slot::Sum(of) | Slot::Gradient { term: of, .. } => of == term,
        _ => false,
    };
    let places = step.inputs.iter().chain(&step.outputs).any(|place| is_there(place.slot));
    places || step.adds_to.contains(&term) || step.terms.contains(&term)
}
