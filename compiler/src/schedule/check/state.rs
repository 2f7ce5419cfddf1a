//! What one worker holds of one of its stages while a program is checked: items in flight, slots, gradients, weight versions.
//!
//! Every method plays one instruction and says what forbids it there. A fault depends on the worker's own list alone; what
//! lies between workers is the checker's.

use std::collections::{BTreeMap, BTreeSet};

use crate::plan::StageId;
use crate::schedule::check::error::Fault;
use crate::schedule::dense_map::DenseMap;
use crate::schedule::semantics::{Rule, dealt};
use crate::schedule::{EdgeId, MicrobatchId, Payload, Program, Slot, Version, WorkerProgram};

/// Gradients of one edge that a worker may be sending when it runs the next backward: one being sent, one being made.
const GRADIENT_BUFFERS: u32 = 2;

/// An item that has run forward here.
struct Flight {
    /// The weights of its backward.
    version: Version,
    slot: Slot,
    /// Whether its forward has run again.
    again: bool,
    /// Whether its gradients for other stages are made, and those of weights.
    input: bool,
    weight: bool,
}

impl Flight {
    /// Whether these are the weights that its backward uses, and the slot of its forward.
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

/// What a slot holds, and how many Sends out of it have not been waited for.
#[derive(Default)]
struct Place {
    item: Option<MicrobatchId>,
    sends: u32,
}

/// An edge of the stage: its items on their way, and outgoing gradient buffers that are held by a Send.
struct Side {
    edge: EdgeId,
    items: DenseMap<Passage>,
    sending: u32,
}

/// What has been posted for one item over one edge, and whether what came over it has been waited for and not yet used.
#[derive(Default)]
struct Passage {
    activation: bool,
    gradient: bool,
    is_here: bool,
}

impl Passage {
    /// Notes that its Send or Recv is posted; false if it was before.
    fn post(&mut self, kind: Payload) -> bool {
        let posted = match kind {
            Payload::Activation => &mut self.activation,
            Payload::Gradient => &mut self.gradient,
        };
        !std::mem::replace(posted, true)
    }
}

/// Buckets of a version whose gathering is posted, and those that have been waited for.
#[derive(Default)]
struct Gathered {
    posted: u32,
    waited: u32,
}

/// What a worker holds of a stage and has done for it.
pub struct CheckState {
    stage: StageId,
    replica: u32,
    replicas: u32,
    cap: u32,
    /// Parts of an all-reduce.
    buckets: u32,
    /// The level of ZeRO.
    zero: u32,
    /// Whether a forward runs again before its backward.
    recomputes: bool,
    /// Edges that bring activations, and edges that bring gradients.
    incoming: Vec<Side>,
    outgoing: Vec<Side>,
    loaded: DenseMap<()>,
    flights: DenseMap<Flight>,
    last_forward: Option<MicrobatchId>,
    last_backward: Option<MicrobatchId>,
    last_weight: Option<MicrobatchId>,
    slots: DenseMap<Place>,
    in_flight: u32,
    versions: BTreeSet<Version>,
    /// Backwards done in the round that gradients are now added to, and buckets of it that are posted.
    round_items: u32,
    posted: u32,
    /// Rounds that are closed, the buckets of them that have been waited for, and rounds applied.
    closed: u32,
    reduced: BTreeMap<u32, u32>,
    /// Versions that are in shares, with what of them is gathered.
    shares: BTreeMap<Version, Gathered>,
    applied: u32,
    forwards: u32,
    backwards: u32,
}

impl CheckState {
    /// Of a worker that has done nothing: it holds version 0.
    pub fn new(program: &Program, stage: StageId, worker: &WorkerProgram) -> Self {
        let of = program.stages[stage.index()];
        // No number that a worker needs for every item is far beyond its instructions.
        let limit = worker.instructions.len();
        let edges = |mine: fn(&(StageId, StageId)) -> StageId| {
            let numbered = (0..).map(EdgeId).zip(&program.edges);
            let mine = numbered.filter(|(_, ends)| mine(ends) == stage);
            mine.map(|(edge, _)| Side { edge, items: DenseMap::new(limit), sending: 0 }).collect()
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

    /// Whose it is.
    pub fn stage(&self) -> StageId {
        self.stage
    }

    /// Whether the rule gives this worker the item.
    pub fn mine(&self, rule: &Rule, item: MicrobatchId) -> Result<(), Fault> {
        if item.0 >= rule.items || rule.replica(self.stage, item) != self.replica {
            return Err(Fault::NotMyItem(item));
        }
        Ok(())
    }

    /// Load.
    pub fn load(&mut self, rule: &Rule, item: MicrobatchId) -> Result<(), Fault> {
        self.mine(rule, item)?;
        if self.loaded.insert(item.0, ()).is_none() { Ok(()) } else { Err(Fault::Again(item)) }
    }

    /// Forward.
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
        self.has_whole(version)?;
        if self.slots.get(slot.0).is_some_and(|place| place.item.is_some() || place.sends > 0) {
            return Err(Fault::SlotTaken(slot));
        }
        // In inference, what nobody listens to is not in flight.
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

    /// Recompute: between the forward and the backward, once.
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

    /// BackwardInput, and the first half of Backward.
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
            return Err(Fault::GradientBuffer { reason: "Sends of items before have not been waited for" });
        }
        flight.input = true;
        self.last_backward = Some(item);
        Ok(())
    }

    /// BackwardWeight, and the second half of Backward.
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
        // Gradients are summed in the order of items, so that the sum has the same bits under every schedule.
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

    /// Send: what it sends is there, for the first time, and held until its Wait.
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
            // In inference nothing is kept but what is being sent.
            if place.sends == 0 && !rule.schedule.trains() && place.item == Some(item) {
                place.item = None;
                self.in_flight -= 1;
            }
        }
        Ok(())
    }

    /// Recv.
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

    fn side(&mut self, edge: EdgeId) -> Result<&mut Side, Fault> {
        let mut sides = self.incoming.iter_mut().chain(&mut self.outgoing);
        sides.find(|side| side.edge == edge).ok_or(Fault::NotMine)
    }

    /// AllReduce, of the round's next bucket. Several may be posted before the round's last backward, one only after it. True if
    /// its gradients are made.
    pub fn all_reduce(&mut self, rule: &Rule, round: u32, bucket: u32) -> Result<bool, Fault> {
        if self.zero > 0 {
            return Err(Fault::Zero { level: self.zero, needs: "reduce-scatters" });
        }
        self.reduce(rule, round, bucket)
    }

    /// ReduceScatter, of the round's next bucket: as AllReduce, where replicas have shares.
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

    /// Whether the stage's next collective may be one of this round.
    fn reduces(&self, rule: &Rule, round: u32) -> Result<(), Fault> {
        if self.replicas == 1 {
            return Err(Fault::RoundIncomplete { round, reason: "one replica has nothing to reduce" });
        }
        self.is_next(rule, round)
    }

    /// AllGather: of the next bucket of a version that is in shares, from the last to the first.
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

    /// Checkpoint: of a version that is whole, and under ZeRO 3 of which no replica has let its share go, as under a flush each does
    /// after its last backward of a round.
    pub fn checkpoint(&self, rule: &Rule, version: Version) -> Result<(), Fault> {
        if self.zero >= 3 && rule.schedule.flushes() && version.0 < self.closed {
            return Err(Fault::NoVersion(version));
        }
        self.has_whole(version)
    }

    /// What is used: a version that is there, and all of it.
    pub fn has_whole(&self, version: Version) -> Result<(), Fault> {
        if !self.versions.contains(&version) {
            return Err(Fault::NoVersion(version));
        }
        if self.shares.contains_key(&version) { Err(Fault::NotGathered(version)) } else { Ok(()) }
    }

    /// The Wait for an AllReduce or a ReduceScatter.
    pub fn reduced(&mut self, round: u32) {
        *self.reduced.entry(round).or_default() += 1;
    }

    /// Ends the round that gradients are added to: it must be `round`, with all of this worker's items.
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

    /// Backwards that are missing in the round that gradients are added to.
    fn missing(&self, rule: &Rule) -> u64 {
        self.dealt(rule.count(self.stage, self.closed)).saturating_sub(u64::from(self.round_items))
    }

    /// Ends the round that gradients are added to if all its buckets are posted and all its backwards done.
    fn close_posted(&mut self, rule: &Rule) {
        if self.posted == self.buckets && self.missing(rule) == 0 {
            self.begin_next_round();
        }
    }

    fn begin_next_round(&mut self) {
        self.closed += 1;
        (self.round_items, self.posted) = (0, 0);
    }

    /// This worker's part of so many items that are dealt to the replicas in turn.
    fn dealt(&self, items: u32) -> u64 {
        dealt(items, self.replicas, self.replica)
    }

    /// Whether nothing is missing for the step of a round, or it has been made.
    pub fn is_done(&self, rule: &Rule, round: u32) -> bool {
        let is_whole = || if self.replicas == 1 { self.missing(rule) == 0 } else { self.is_reduced(round) };
        self.applied > round || is_whole()
    }

    /// Whether every bucket of the round has been waited for.
    fn is_reduced(&self, round: u32) -> bool {
        self.reduced.get(&round) == Some(&self.buckets)
    }

    /// Step.
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
            return Err(Fault::RoundIncomplete { round, reason: "the all-reduce has not been waited for" });
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
        // What a replica does not step of it goes on as it is.
        self.has_whole(from)?;
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

    /// Drop: of any version but the newest.
    pub fn drop_version(&mut self, version: Version) -> Result<(), Fault> {
        if self.shares.contains_key(&version) {
            return Err(Fault::NotGathered(version));
        }
        if version.0 < self.applied && self.versions.remove(&version) { Ok(()) } else { Err(Fault::NoVersion(version)) }
    }

    /// The end of the list: everything must be done, and one version left.
    pub fn end(&self, rule: &Rule) -> Result<(), Fault> {
        // Under flush, items are dealt anew for each minibatch.
        let whole = rule.schedule.is_round_robin() || !rule.schedule.trains();
        let deal = if whole { rule.items } else { rule.microbatches };
        let items = self.dealt(deal) * u64::from(rule.items / deal);
        let left = |what: &'static str, left: u64| if left == 0 { Ok(()) } else { Err(Fault::Left { what, left }) };
        left("the forwards", items - u64::from(self.forwards))?;
        if rule.schedule.trains() {
            left("the backwards", items - u64::from(self.backwards))?;
        }
        left("the rounds", u64::from(rule.rounds(self.stage) - self.applied))?;
        left("the versions that are in shares", self.shares.len() as u64)?;
        left("the old versions", self.versions.len() as u64 - 1)
    }
}

/// Takes what every one of these edges has brought for the item.
fn use_all(sides: &mut [Side], item: MicrobatchId, kind: Payload) -> Result<(), Fault> {
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

/// Refuses a backward whose weights have been dropped, or whose slot holds another item.
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
