//! What one worker holds of one of its stages while a program is checked: items in flight, slots, gradients, weight versions.
//!
//! Every method plays one instruction and says what forbids it there. A fault depends on the worker's own list alone; what
//! lies between workers is the checker's.

use std::collections::{BTreeSet, HashMap, HashSet};

use crate::plan::StageId;
use crate::schedule::fault::Fault;
use crate::schedule::rule::Rule;
use crate::schedule::{EdgeId, MicrobatchId, Payload, Program, Slot, Version};

/// Gradients of one edge that a worker may be sending when it runs the next backward: one being sent, one being made.
const GRADIENT_BUFFERS: u32 = 2;

/// An item that has run forward here.
struct Flight {
    /// The weights of its backward.
    version: Version,
    slot: Slot,
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

/// What a worker holds of a stage and has done for it.
pub struct Ledger {
    stage: StageId,
    replica: u32,
    replicas: u32,
    cap: u32,
    /// Edges that bring activations, and edges that bring gradients.
    incoming: Vec<EdgeId>,
    outgoing: Vec<EdgeId>,
    loaded: HashSet<MicrobatchId>,
    received: HashSet<(EdgeId, Payload, MicrobatchId)>,
    posted: HashSet<(EdgeId, Payload, MicrobatchId)>,
    flights: HashMap<MicrobatchId, Flight>,
    last_forward: Option<MicrobatchId>,
    last_backward: Option<MicrobatchId>,
    last_weight: Option<MicrobatchId>,
    /// What each slot holds, and how many Sends out of it have not been waited for.
    slots: HashMap<Slot, Option<MicrobatchId>>,
    sending_slot: HashMap<Slot, u32>,
    in_flight: u32,
    /// For each edge, outgoing gradient buffers that are held by a Send.
    sending_gradient: HashMap<EdgeId, u32>,
    versions: BTreeSet<Version>,
    /// Backwards done in the round that gradients are now added to.
    round_items: u32,
    /// Rounds that are closed, those of them whose all-reduce has been waited for, and those applied.
    closed: u32,
    reduced: BTreeSet<u32>,
    applied: u32,
    forwards: u32,
    backwards: u32,
}

impl Ledger {
    /// Of a worker that has done nothing: it holds version 0.
    pub fn new(program: &Program, stage: StageId, replica: u32) -> Self {
        let of = program.stages[stage.index()];
        let edges = |mine: fn(&(StageId, StageId)) -> StageId| {
            let numbered = (0..).map(EdgeId).zip(&program.edges);
            numbered.filter(|(_, ends)| mine(ends) == stage).map(|(edge, _)| edge).collect()
        };
        Self {
            stage,
            replica,
            replicas: of.replicas,
            cap: of.cap,
            incoming: edges(|ends| ends.1),
            outgoing: edges(|ends| ends.0),
            loaded: HashSet::new(),
            received: HashSet::new(),
            posted: HashSet::new(),
            flights: HashMap::new(),
            last_forward: None,
            last_backward: None,
            last_weight: None,
            slots: HashMap::new(),
            sending_slot: HashMap::new(),
            in_flight: 0,
            sending_gradient: HashMap::new(),
            versions: BTreeSet::from([Version(0)]),
            round_items: 0,
            closed: 0,
            reduced: BTreeSet::new(),
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
        if self.loaded.insert(item) { Ok(()) } else { Err(Fault::Again(item)) }
    }

    /// Forward.
    pub fn forward(&mut self, rule: &Rule, item: MicrobatchId, version: Version, slot: Slot) -> Result<(), Fault> {
        self.mine(rule, item)?;
        let expected = rule.version(self.stage, item);
        if self.flights.contains_key(&item) {
            return Err(Fault::Again(item));
        }
        if let Some(after) = self.last_forward.filter(|&after| rule.is_out_of_order(item, after)) {
            return Err(Fault::OutOfOrder { item, after });
        }
        if !self.loaded.contains(&item) {
            return Err(Fault::NotLoaded(item));
        }
        for &edge in &self.incoming {
            let kind = Payload::Activation;
            if !self.received.remove(&(edge, kind, item)) {
                return Err(Fault::NotReceived { edge: edge.0, item, kind });
            }
        }
        if version != expected {
            return Err(Fault::WrongVersion { found: version, rule: expected });
        }
        if !self.versions.contains(&version) {
            return Err(Fault::NoVersion(version));
        }
        let busy = self.slots.get(&slot).is_some_and(Option::is_some);
        if busy || self.sending_slot.get(&slot).is_some_and(|&sends| sends > 0) {
            return Err(Fault::SlotTaken(slot));
        }
        // In inference, what nobody listens to is not in flight.
        if rule.schedule.trains() || !self.outgoing.is_empty() {
            self.in_flight += 1;
            self.slots.insert(slot, Some(item));
        }
        if self.in_flight > self.cap {
            return Err(Fault::OverCap { in_flight: self.in_flight, cap: self.cap });
        }
        let version = rule.backward_version(self.stage, item);
        self.flights.insert(item, Flight { version, slot, input: false, weight: false });
        self.last_forward = Some(item);
        self.forwards += 1;
        Ok(())
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
        let Some(flight) = self.flights.get_mut(&item).filter(|_| rule.schedule.trains()) else {
            return Err(Fault::NotMade { item, kind: Payload::Activation });
        };
        if flight.input {
            return Err(Fault::Again(item));
        }
        if let Some(after) = self.last_backward.filter(|&after| rule.is_out_of_order(item, after)) {
            return Err(Fault::OutOfOrder { item, after });
        }
        flight.uses(version, slot)?;
        still_held(&self.versions, &self.slots, item, version, slot)?;
        for &edge in &self.outgoing {
            let kind = Payload::Gradient;
            if !self.received.remove(&(edge, kind, item)) {
                return Err(Fault::NotReceived { edge: edge.0, item, kind });
            }
        }
        if self.sending_gradient.values().any(|&sends| sends >= GRADIENT_BUFFERS) {
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
        let Some(flight) = self.flights.get_mut(&item).filter(|flight| flight.input) else {
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
        self.slots.insert(slot, None);
        self.in_flight -= 1;
        self.last_weight = Some(item);
        self.round_items += 1;
        self.backwards += 1;
        Ok(())
    }

    /// Send: what it sends is there, for the first time, and held until its Wait.
    pub fn send(&mut self, edge: EdgeId, kind: Payload, item: MicrobatchId) -> Result<(), Fault> {
        match (kind, self.flights.get(&item)) {
            (Payload::Activation, Some(flight)) if self.slots.get(&flight.slot) == Some(&Some(item)) => {
                *self.sending_slot.entry(flight.slot).or_default() += 1;
            }
            (Payload::Gradient, Some(flight)) if flight.input && self.last_backward == Some(item) => {
                *self.sending_gradient.entry(edge).or_default() += 1;
            }
            _ => return Err(Fault::NotMade { item, kind }),
        }
        if self.posted.insert((edge, kind, item)) { Ok(()) } else { Err(Fault::Again(item)) }
    }

    /// The Wait for a Send.
    pub fn sent(&mut self, rule: &Rule, edge: EdgeId, kind: Payload, item: MicrobatchId) {
        if kind == Payload::Gradient {
            let sends = self.sending_gradient.entry(edge).or_default();
            *sends = sends.saturating_sub(1);
        } else if let Some(slot) = self.flights.get(&item).map(|flight| flight.slot) {
            let sends = self.sending_slot.entry(slot).or_default();
            *sends = sends.saturating_sub(1);
            // In inference nothing is kept but what is being sent.
            if *sends == 0 && !rule.schedule.trains() && self.slots.get(&slot) == Some(&Some(item)) {
                self.slots.insert(slot, None);
                self.in_flight -= 1;
            }
        }
    }

    /// Recv.
    pub fn recv(&mut self, rule: &Rule, edge: EdgeId, kind: Payload, item: MicrobatchId) -> Result<(), Fault> {
        self.mine(rule, item)?;
        if self.posted.insert((edge, kind, item)) { Ok(()) } else { Err(Fault::Again(item)) }
    }

    /// The Wait for a Recv.
    pub fn received(&mut self, edge: EdgeId, kind: Payload, item: MicrobatchId) {
        self.received.insert((edge, kind, item));
    }

    /// AllReduce.
    pub fn all_reduce(&mut self, rule: &Rule, round: u32) -> Result<(), Fault> {
        if self.replicas == 1 {
            return Err(Fault::RoundIncomplete { round, reason: "one replica has nothing to reduce" });
        }
        self.close(rule, round)
    }

    /// The Wait for an AllReduce.
    pub fn reduced(&mut self, round: u32) {
        self.reduced.insert(round);
    }

    /// Ends the round that gradients are added to: it must be `round`, with all of this worker's items.
    fn close(&mut self, rule: &Rule, round: u32) -> Result<(), Fault> {
        if round != self.closed || round >= rule.rounds(self.stage) {
            return Err(Fault::WrongRound { found: round, expected: self.closed });
        }
        if u64::from(self.round_items) != self.dealt(rule.count(self.stage, round)) {
            return Err(Fault::RoundIncomplete { round, reason: "not all backwards are done" });
        }
        self.closed += 1;
        self.round_items = 0;
        Ok(())
    }

    /// This worker's part of so many items that are dealt to the replicas in turn.
    fn dealt(&self, items: u32) -> u64 {
        (u64::from(items) + u64::from(self.replicas - 1 - self.replica)) / u64::from(self.replicas)
    }

    /// Whether nothing is missing for the step of a round, or it has been made.
    pub fn is_done(&self, rule: &Rule, round: u32) -> bool {
        let gathered = || u64::from(self.round_items) == self.dealt(rule.count(self.stage, round));
        self.applied > round || if self.replicas == 1 { gathered() } else { self.reduced.contains(&round) }
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
        } else if !self.reduced.remove(&round) {
            return Err(Fault::RoundIncomplete { round, reason: "the all-reduce has not been waited for" });
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
        if !self.versions.contains(&from) {
            return Err(Fault::NoVersion(from));
        }
        if in_place {
            self.versions.remove(&from);
        }
        self.versions.insert(to);
        self.applied += 1;
        Ok(())
    }

    /// Drop: of any version but the newest.
    pub fn drop_version(&mut self, version: Version) -> Result<(), Fault> {
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
        left("the old versions", self.versions.len() as u64 - 1)
    }
}

/// Refuses a backward whose weights have been dropped, or whose slot holds another item.
fn still_held(
    versions: &BTreeSet<Version>,
    slots: &HashMap<Slot, Option<MicrobatchId>>,
    item: MicrobatchId,
    version: Version,
    slot: Slot,
) -> Result<(), Fault> {
    if !versions.contains(&version) {
        return Err(Fault::NoVersion(version));
    }
    if slots.get(&slot) != Some(&Some(item)) {
        return Err(Fault::SlotEmpty { slot, item });
    }
    Ok(())
}
