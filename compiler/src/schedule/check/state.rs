//! State of one stage on one worker while a program is checked: items in flight, slots, gradients, weight versions.
//!
//! Each method executes one instruction and reports its violations. These depend only on the worker's own list;
//! `verify` checks interaction between workers.

use std::collections::{BTreeMap, BTreeSet};

use crate::plan::StageId;
use crate::schedule::check::error::Fault;
use crate::schedule::dense_map::DenseMap;
use crate::schedule::semantics::{Rule, dealt};
use crate::schedule::{EdgeId, MicrobatchId, Payload, Program, Slot, Version, WorkerProgram};

/// Gradient buffers per edge: one being sent, one being computed.
const GRADIENT_BUFFERS: u32 = 2;

struct Flight {
    /// Version of its backward.
    version: Version,
    slot: Slot,
    again: bool,
    /// True if its input gradients, or its weight gradients, are made.
    input: bool,
    weight: bool,
}

impl Flight {
    fn uses(&self, version: Version, slot: Slot) -> Result<(), Fault> {
        if self.version != version {
            return Err(Fault::OtherVersion { found: version, forward: self.version });
        }
        if self.slot != slot {
            return Err(Fault::OtherSlot { found: slot, forward: self.slot });
        }
        Ok(())
    }
}

/// A slot's item, and its Sends that have not been waited for.
#[derive(Default)]
struct Place {
    item: Option<MicrobatchId>,
    sends: u32,
}

/// An edge of the stage: its items, and the outgoing gradient buffers that a Send holds.
struct EdgeState {
    edge: EdgeId,
    items: DenseMap<EdgeTransfer>,
    sending: u32,
}

/// Posted transfers of one item over one edge; `is_here` if received data is not used yet.
#[derive(Default)]
struct EdgeTransfer {
    activation: bool,
    gradient: bool,
    is_here: bool,
}

impl EdgeTransfer {
    /// Marks the transfer as posted; false if it was posted before.
    fn post(&mut self, kind: Payload) -> bool {
        let posted = match kind {
            Payload::Activation => &mut self.activation,
            Payload::Gradient => &mut self.gradient,
        };
        !std::mem::replace(posted, true)
    }
}

/// Buckets of an all-gathered version that are posted, and that have been waited for.
#[derive(Default)]
struct Gathered {
    posted: u32,
    waited: u32,
}

pub struct CheckState {
    stage: StageId,
    replica: u32,
    replicas: u32,
    cap: u32,
    buckets: u32,
    zero: u32,
    recomputes: bool,
    /// Edges of incoming activations, and of outgoing activations.
    incoming: Vec<EdgeState>,
    outgoing: Vec<EdgeState>,
    loaded: DenseMap<()>,
    flights: DenseMap<Flight>,
    last_forward: Option<MicrobatchId>,
    last_backward: Option<MicrobatchId>,
    last_weight: Option<MicrobatchId>,
    slots: DenseMap<Place>,
    in_flight: u32,
    versions: BTreeSet<Version>,
    /// Backwards done in the current round, and its posted buckets.
    round_items: u32,
    posted: u32,
    /// Rounds closed; buckets waited for, by round.
    closed: u32,
    reduced: BTreeMap<u32, u32>,
    /// Sharded versions that are not fully gathered.
    shares: BTreeMap<Version, Gathered>,
    applied: u32,
    forwards: u32,
    backwards: u32,
}

impl CheckState {
    pub fn new(program: &Program, stage: StageId, worker: &WorkerProgram) -> Self {
        let of = program.stages[stage.index()];
        // Per-item keys are at most about as large as the number of instructions.
        let limit = worker.instructions.len();
        let edges = |mine: fn(&(StageId, StageId)) -> StageId| {
            let numbered = (0..).map(EdgeId).zip(&program.edges);
            let mine = numbered.filter(|(_, ends)| mine(ends) == stage);
            mine.map(|(edge, _)| EdgeState { edge, items: DenseMap::new(limit), sending: 0 }).collect()
        };
        Self {
            stage,
            replica: worker.replica,
            replicas: of.replicas,
            cap: of.cap,
            buckets: of.buckets,
            zero: of.zero,
            recomputes: of.recompute,
            incoming: edges(|ends| ends.1),
            outgoing: edges(|ends| ends.0),
            loaded: DenseMap::new(limit),
            flights: DenseMap::new(limit),
            last_forward: None,
            last_backward: None,
            last_weight: None,
            slots: DenseMap::new(limit),
            in_flight: 0,
            versions: BTreeSet::from([Version(0)]),
            round_items: 0,
            posted: 0,
            closed: 0,
            reduced: BTreeMap::new(),
            shares: BTreeMap::new(),
            applied: 0,
            forwards: 0,
            backwards: 0,
        }
    }

    pub fn stage(&self) -> StageId {
        self.stage
    }

    /// Checks that the rule assigns the item to this worker.
    pub fn mine(&self, rule: &Rule, item: MicrobatchId) -> Result<(), Fault> {
        if item.0 >= rule.items || rule.replica(self.stage, item) != self.replica {
            return Err(Fault::NotMyItem(item));
        }
        Ok(())
    }

    pub fn load(&mut self, rule: &Rule, item: MicrobatchId) -> Result<(), Fault> {
        self.mine(rule, item)?;
        if self.loaded.insert(item.0, ()).is_none() { Ok(()) } else { Err(Fault::Again(item)) }
    }

    pub fn forward(&mut self, rule: &Rule, item: MicrobatchId, version: Version, slot: Slot) -> Result<(), Fault> {
        self.mine(rule, item)?;
        let expected = rule.version(self.stage, item);
        if self.flights.get(item.0).is_some() {
            return Err(Fault::Again(item));
        }
        if let Some(after) = self.last_forward.filter(|&after| rule.is_out_of_order(item, after)) {
            return Err(Fault::OutOfOrder { item, after });
        }
        if self.loaded.get(item.0).is_none() {
            return Err(Fault::NotLoaded(item));
        }
        use_all(&mut self.incoming, item, Payload::Activation)?;
        if version != expected {
            return Err(Fault::WrongVersion { found: version, rule: expected });
        }
        self.check_gathered(version)?;
        if self.slots.get(slot.0).is_some_and(|place| place.item.is_some() || place.sends > 0) {
            return Err(Fault::SlotTaken(slot));
        }
        // In inference, an item without readers is not in flight.
        if rule.schedule.trains() || !self.outgoing.is_empty() {
            self.in_flight += 1;
            self.slots.entry(slot.0).item = Some(item);
        }
        if self.in_flight > self.cap {
            return Err(Fault::OverCap { in_flight: self.in_flight, cap: self.cap });
        }
        let version = rule.backward_version(self.stage, item);
        self.flights.insert(item.0, Flight { version, slot, again: false, input: false, weight: false });
        self.last_forward = Some(item);
        self.forwards += 1;
        Ok(())
    }

    /// Recompute: once, between forward and backward.
    pub fn recompute(&mut self, rule: &Rule, item: MicrobatchId, version: Version, slot: Slot) -> Result<(), Fault> {
        self.mine(rule, item)?;
        let flight = self.flights.get_mut(item.0).filter(|flight| rule.schedule.trains() && !flight.input);
        let flight = flight.ok_or(Fault::NotMade { item, kind: Payload::Activation })?;
        if std::mem::replace(&mut flight.again, true) {
            return Err(Fault::Again(item));
        }
        flight.uses(version, slot)?;
        still_held(&self.versions, &self.slots, item, version, slot)
    }

    /// BackwardInput, and the input-gradient pass of Backward.
    pub fn backward_input(
        &mut self,
        rule: &Rule,
        item: MicrobatchId,
        version: Version,
        slot: Slot,
    ) -> Result<(), Fault> {
        self.mine(rule, item)?;
        let Some(flight) = self.flights.get_mut(item.0).filter(|_| rule.schedule.trains()) else {
            return Err(Fault::NotMade { item, kind: Payload::Activation });
        };
        if flight.input {
            return Err(Fault::Again(item));
        }
        if let Some(after) = self.last_backward.filter(|&after| rule.is_out_of_order(item, after)) {
            return Err(Fault::OutOfOrder { item, after });
        }
        flight.uses(version, slot)?;
        if self.recomputes && !flight.again {
            return Err(Fault::NotRecomputed(item));
        }
        still_held(&self.versions, &self.slots, item, version, slot)?;
        use_all(&mut self.outgoing, item, Payload::Gradient)?;
        if self.incoming.iter().any(|side| side.sending >= GRADIENT_BUFFERS) {
            return Err(Fault::GradientBuffer { reason: "there is no Wait yet for Sends of earlier micro-batches" });
        }
        flight.input = true;
        self.last_backward = Some(item);
        Ok(())
    }

    /// BackwardWeight, and the weight-gradient pass of Backward.
    pub fn backward_weight(
        &mut self,
        rule: &Rule,
        item: MicrobatchId,
        version: Version,
        slot: Slot,
    ) -> Result<(), Fault> {
        self.mine(rule, item)?;
        let Some(flight) = self.flights.get_mut(item.0).filter(|flight| flight.input) else {
            return Err(Fault::NotMade { item, kind: Payload::Gradient });
        };
        if flight.weight {
            return Err(Fault::Again(item));
        }
        // Gradients are accumulated in item order, so that sums are bitwise equal under every schedule.
        if let Some(after) = self.last_weight.filter(|&after| rule.is_out_of_order(item, after)) {
            return Err(Fault::OutOfOrder { item, after });
        }
        flight.uses(version, slot)?;
        still_held(&self.versions, &self.slots, item, version, slot)?;
        if rule.round(self.stage, item) != self.closed {
            return Err(Fault::GradientBuffer { reason: "it has another round's gradients" });
        }
        flight.weight = true;
        self.slots.entry(slot.0).item = None;
        self.in_flight -= 1;
        self.last_weight = Some(item);
        self.round_items += 1;
        self.backwards += 1;
        self.close_posted(rule);
        Ok(())
    }

    /// Send: the data exists, is sent once, and is held until its Wait.
    pub fn send(&mut self, edge: EdgeId, kind: Payload, item: MicrobatchId) -> Result<(), Fault> {
        match (kind, self.flights.get(item.0)) {
            (Payload::Activation, Some(flight)) if holds(&self.slots, flight.slot, item) => {
                self.slots.entry(flight.slot.0).sends += 1;
            }
            (Payload::Gradient, Some(flight)) if flight.input && self.last_backward == Some(item) => {
                self.side(edge)?.sending += 1;
            }
            _ => return Err(Fault::NotMade { item, kind }),
        }
        self.post(edge, kind, item)
    }

    /// The Wait for a Send.
    pub fn sent(&mut self, rule: &Rule, edge: EdgeId, kind: Payload, item: MicrobatchId) -> Result<(), Fault> {
        if kind == Payload::Gradient {
            let side = self.side(edge)?;
            side.sending = side.sending.saturating_sub(1);
        } else if let Some(slot) = self.flights.get(item.0).map(|flight| flight.slot) {
            let place = self.slots.entry(slot.0);
            place.sends = place.sends.saturating_sub(1);
            // In inference an output is kept until it is sent.
            if place.sends == 0 && !rule.schedule.trains() && place.item == Some(item) {
                place.item = None;
                self.in_flight -= 1;
            }
        }
        Ok(())
    }

    pub fn recv(&mut self, rule: &Rule, edge: EdgeId, kind: Payload, item: MicrobatchId) -> Result<(), Fault> {
        self.mine(rule, item)?;
        self.post(edge, kind, item)
    }

    /// The Wait for a Recv.
    pub fn received(&mut self, edge: EdgeId, item: MicrobatchId) -> Result<(), Fault> {
        self.side(edge)?.items.entry(item.0).is_here = true;
        Ok(())
    }

    fn post(&mut self, edge: EdgeId, kind: Payload, item: MicrobatchId) -> Result<(), Fault> {
        if self.side(edge)?.items.entry(item.0).post(kind) { Ok(()) } else { Err(Fault::Again(item)) }
    }

    fn side(&mut self, edge: EdgeId) -> Result<&mut EdgeState, Fault> {
        let mut sides = self.incoming.iter_mut().chain(&mut self.outgoing);
        sides.find(|side| side.edge == edge).ok_or(Fault::NotMine)
    }

    /// AllReduce of the round's next bucket. Several buckets may be posted before the round's last backward, a single
    /// one only after it. Returns true if its gradients are complete.
    pub fn all_reduce(&mut self, rule: &Rule, round: u32, bucket: u32) -> Result<bool, Fault> {
        if self.zero > 0 {
            return Err(Fault::Zero { level: self.zero, needs: "reduce-scatters" });
        }
        self.reduce(rule, round, bucket)
    }

    /// ReduceScatter of the round's next bucket: the ZeRO form of AllReduce.
    pub fn reduce_scatter(&mut self, rule: &Rule, round: u32, bucket: u32) -> Result<bool, Fault> {
        if self.zero == 0 {
            return Err(Fault::Zero { level: 0, needs: "all-reduces" });
        }
        self.reduce(rule, round, bucket)
    }

    fn reduce(&mut self, rule: &Rule, round: u32, bucket: u32) -> Result<bool, Fault> {
        self.reduces(rule, round)?;
        let Self { buckets, posted, .. } = *self;
        if bucket != posted || bucket >= buckets {
            return Err(Fault::WrongBucket { found: bucket, expected: posted, buckets });
        }
        let missing = self.missing(rule);
        if missing > u64::from(buckets > 1) {
            return Err(Fault::RoundIncomplete { round, reason: "not all backwards are done" });
        }
        self.posted += 1;
        self.close_posted(rule);
        Ok(missing == 0)
    }

    /// Checks that a collective of this round is allowed.
    fn reduces(&self, rule: &Rule, round: u32) -> Result<(), Fault> {
        if self.replicas == 1 {
            return Err(Fault::RoundIncomplete { round, reason: "one replica has nothing to reduce" });
        }
        self.is_next(rule, round)
    }

    /// AllGather of the next bucket of a sharded version, from the last to the first.
    pub fn all_gather(&mut self, version: Version, bucket: u32) -> Result<(), Fault> {
        let buckets = self.buckets;
        let of = self.shares.get_mut(&version).ok_or(Fault::NoVersion(version))?;
        match buckets.checked_sub(of.posted + 1) {
            Some(expected) if expected == bucket => {}
            Some(expected) => return Err(Fault::WrongBucket { found: bucket, expected, buckets }),
            None => return Err(Fault::NoVersion(version)),
        }
        of.posted += 1;
        Ok(())
    }

    /// The Wait for an AllGather.
    pub fn gathered(&mut self, version: Version) {
        let Some(of) = self.shares.get_mut(&version) else { return };
        of.waited += 1;
        if of.waited == self.buckets {
            self.shares.remove(&version);
        }
    }

    /// Checkpoint of a fully gathered version. Under ZeRO 3 with a flush, replicas release their shard after their last
    /// backward of a round.
    pub fn checkpoint(&self, rule: &Rule, version: Version) -> Result<(), Fault> {
        if self.zero >= 3 && rule.schedule.flushes() && version.0 < self.closed {
            return Err(Fault::NoVersion(version));
        }
        self.check_gathered(version)
    }

    /// Checks that a version exists and is fully gathered.
    pub fn check_gathered(&self, version: Version) -> Result<(), Fault> {
        if !self.versions.contains(&version) {
            return Err(Fault::NoVersion(version));
        }
        if self.shares.contains_key(&version) { Err(Fault::NotGathered(version)) } else { Ok(()) }
    }

    /// The Wait for an AllReduce or a ReduceScatter.
    pub fn reduced(&mut self, round: u32) {
        *self.reduced.entry(round).or_default() += 1;
    }

    fn close(&mut self, rule: &Rule, round: u32) -> Result<(), Fault> {
        self.is_next(rule, round)?;
        if self.missing(rule) > 0 {
            return Err(Fault::RoundIncomplete { round, reason: "not all backwards are done" });
        }
        self.begin_next_round();
        Ok(())
    }

    fn is_next(&self, rule: &Rule, round: u32) -> Result<(), Fault> {
        if round == self.closed && round < rule.rounds(self.stage) {
            return Ok(());
        }
        Err(Fault::WrongRound { found: round, expected: self.closed })
    }

    fn missing(&self, rule: &Rule) -> u64 {
        self.dealt(rule.count(self.stage, self.closed)).saturating_sub(u64::from(self.round_items))
    }

    /// Closes the current round if all buckets are posted and all backwards done.
    fn close_posted(&mut self, rule: &Rule) {
        if self.posted == self.buckets && self.missing(rule) == 0 {
            self.begin_next_round();
        }
    }

    fn begin_next_round(&mut self) {
        self.closed += 1;
        (self.round_items, self.posted) = (0, 0);
    }

    /// This worker's number of `items`, assigned round-robin.
    fn dealt(&self, items: u32) -> u64 {
        dealt(items, self.replicas, self.replica)
    }

    /// True if the step of a round is done or possible.
    pub fn is_done(&self, rule: &Rule, round: u32) -> bool {
        let is_whole = || if self.replicas == 1 { self.missing(rule) == 0 } else { self.is_reduced(round) };
        self.applied > round || is_whole()
    }

    fn is_reduced(&self, round: u32) -> bool {
        self.reduced.get(&round) == Some(&self.buckets)
    }

    pub fn step(
        &mut self,
        rule: &Rule,
        round: u32,
        (from, to): (Version, Version),
        count: u32,
        in_place: bool,
    ) -> Result<(), Fault> {
        if round != self.applied || round >= rule.rounds(self.stage) {
            return Err(Fault::WrongRound { found: round, expected: self.applied });
        }
        if self.replicas == 1 {
            self.close(rule, round)?;
        } else if !self.is_reduced(round) {
            return Err(Fault::RoundIncomplete { round, reason: "there is no Wait yet for the all-reduce" });
        } else {
            self.reduced.remove(&round);
        }
        if from != Version(round) {
            return Err(Fault::WrongVersion { found: from, rule: Version(round) });
        }
        if to != Version(round + 1) {
            return Err(Fault::WrongVersion { found: to, rule: Version(round + 1) });
        }
        let expected = rule.count(self.stage, round);
        if count != expected {
            return Err(Fault::WrongCount { found: count, expected });
        }
        // A version that is partly sharded cannot be stepped from: unstepped parameters carry over unchanged.
        self.check_gathered(from)?;
        if in_place {
            self.versions.remove(&from);
        }
        self.versions.insert(to);
        if self.zero > 0 {
            self.shares.insert(to, Gathered::default());
        }
        self.applied += 1;
        Ok(())
    }

    /// Drop, of any version but the newest.
    pub fn drop_version(&mut self, version: Version) -> Result<(), Fault> {
        if self.shares.contains_key(&version) {
            return Err(Fault::NotGathered(version));
        }
        if version.0 < self.applied && self.versions.remove(&version) { Ok(()) } else { Err(Fault::NoVersion(version)) }
    }

    /// End of the list: all work is done, and one version is left.
    pub fn end(&self, rule: &Rule) -> Result<(), Fault> {
        // With a flush, items are assigned anew for each minibatch.
        let whole = rule.schedule.is_round_robin() || !rule.schedule.trains();
        let deal = if whole { rule.items } else { rule.microbatches };
        let items = self.dealt(deal) * u64::from(rule.items / deal);
        let left = |what: &'static str, left: u64| if left == 0 { Ok(()) } else { Err(Fault::Left { what, left }) };
        left("the forwards", items - u64::from(self.forwards))?;
        if rule.schedule.trains() {
            left("the backwards", items - u64::from(self.backwards))?;
        }
        left("the rounds", u64::from(rule.rounds(self.stage) - self.applied))?;
        left("the sharded versions", self.shares.len() as u64)?;
        left("the old versions", self.versions.len() as u64 - 1)
    }
}

/// Consumes the data that these edges delivered for the item.
fn use_all(sides: &mut [EdgeState], item: MicrobatchId, kind: Payload) -> Result<(), Fault> {
    for side in sides {
        let passage = side.items.get_mut(item.0);
        if !passage.is_some_and(|passage| std::mem::take(&mut passage.is_here)) {
            return Err(Fault::NotReceived { edge: side.edge.0, item, kind });
        }
    }
    Ok(())
}

fn holds(slots: &DenseMap<Place>, slot: Slot, item: MicrobatchId) -> bool {
    slots.get(slot.0).is_some_and(|place| place.item == Some(item))
}

/// Checks that a backward's weights and slot still exist.
fn still_held(
    versions: &BTreeSet<Version>,
    slots: &DenseMap<Place>,
    item: MicrobatchId,
    version: Version,
    slot: Slot,
) -> Result<(), Fault> {
    if !versions.contains(&version) {
        return Err(Fault::NoVersion(version));
    }
    if !holds(slots, slot, item) {
        return Err(Fault::SlotEmpty { slot, item });
    }
    Ok(())
}
