//! Plays a program with no device and proves what it promises before anything runs.
//!
//! Every worker runs as far as it can; channels hold nothing, so a Send is complete when its Recv is posted and a Recv when
//! its Send is. Posts never block and a Wait names what it waits for, so if this one way of interleaving comes to the
//! end, every one does. On the way:
//! - each Send meets the Recv of the same item: both ends of a channel agree on the order;
//! - each item runs forward and backward once at each stage, on the replica that the rule names, after everything it
//!   depends on has arrived, in item order;
//! - forward and backward use the version that the rule gives, and the version exists; all but the last end;
//! - no slot, gradient buffer or token is used while something still needs it; in-flight items stay within the cap;
//! - each round is reduced over all replicas and applied, once, in order, with the right count.
//!
//! It shares with the generators only the [`Rule`], which is the meaning of the schedules, and nothing of how they order.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};

use crate::schedule::fault::{CheckError, Fault};
use crate::schedule::rule::Rule;
use crate::schedule::{
    EdgeId, Instruction, MAX_WORKERS, MicrobatchId, Payload, Program, Slot, StageId, Token, Version, WorkerId,
    WorkerProgram,
};

/// Gradients of one edge that a worker may be sending while it runs the next backward: one being sent, one being made.
const GRADIENT_BUFFERS: u32 = 2;

/// Says what is wrong with the program, if anything is.
pub fn check(program: &Program) -> Result<(), CheckError> {
    shape(program)?;
    Checker::new(program).run()
}

fn shape(program: &Program) -> Result<(), CheckError> {
    let wrong = |reason: String| Err(CheckError::Shape { reason });
    let Program { schedule, items, microbatches, .. } = *program;
    if items == 0 || microbatches == 0 || items % microbatches != 0 {
        return wrong(format!(
            "{items} items in minibatches of {microbatches}: expected whole minibatches, at least one"
        ));
    }
    if schedule.is_round_robin() && microbatches != 1 {
        return wrong(format!("{schedule} has {microbatches} microbatches: expected whole minibatches"));
    }
    if program.stages.is_empty() || program.stages.iter().any(|stage| stage.replicas == 0 || stage.cap == 0) {
        return wrong("expected at least one stage, each with replicas and an in-flight cap of at least 1".to_string());
    }
    let workers: u64 = program.stages.iter().map(|stage| u64::from(stage.replicas)).sum();
    if workers != program.workers.len() as u64 || workers > MAX_WORKERS {
        return wrong(format!("{} workers listed, the stages have {workers}", program.workers.len()));
    }
    let places =
        (0u32..).zip(&program.stages).flat_map(|(stage, of)| (0..of.replicas).map(move |replica| (stage, replica)));
    for (worker, (stage, replica)) in program.workers.iter().zip(places) {
        if (worker.stage.0, worker.replica) != (stage, replica) {
            return wrong(format!(
                "worker {}.{} stands where {stage}.{replica} should",
                worker.stage.0, worker.replica
            ));
        }
    }
    let mut seen = HashSet::new();
    for &(from, to) in &program.edges {
        if from >= to || to.index() >= program.stages.len() || !seen.insert((from, to)) {
            return wrong(format!("edge {} > {} is no new edge from an earlier to a later stage", from.0, to.0));
        }
    }
    Ok(())
}

/// Both ends of (edge, kind, from, to), in the order of posting.
#[derive(Default)]
struct Channel {
    sends: Vec<MicrobatchId>,
    recvs: Vec<MicrobatchId>,
}

type ChannelKey = (EdgeId, Payload, WorkerId, WorkerId);

#[derive(Clone, Copy)]
enum Posted {
    Send { channel: ChannelKey, place: usize, item: MicrobatchId },
    Recv { channel: ChannelKey, place: usize, item: MicrobatchId },
    AllReduce { round: u32 },
}

/// An item that has run forward here.
struct Flight {
    version: Version,
    slot: Slot,
    backward: bool,
}

#[derive(Default)]
struct Hands {
    at: usize,
    tokens: HashMap<Token, Posted>,
    loaded: HashSet<MicrobatchId>,
    received: HashSet<(EdgeId, Payload, MicrobatchId)>,
    posted: HashSet<(EdgeId, Payload, MicrobatchId)>,
    flights: HashMap<MicrobatchId, Flight>,
    last_forward: Option<MicrobatchId>,
    last_backward: Option<MicrobatchId>,
    /// What each slot holds, and how many Sends out of it are not waited for.
    slots: HashMap<Slot, Option<MicrobatchId>>,
    sending_slot: HashMap<Slot, u32>,
    in_flight: u32,
    /// For each edge, outgoing gradient buffers that are held by a Send.
    sending_gradient: HashMap<EdgeId, u32>,
    versions: BTreeSet<Version>,
    applied: u32,
    /// Backwards done in the round that gradients are now added to.
    round_items: u32,
    /// Rounds whose all-reduce is posted, and those that have been waited for.
    joined: u32,
    reduced: BTreeSet<u32>,
    forwards: u32,
    backwards: u32,
}

struct Checker<'a> {
    program: &'a Program,
    rule: Rule,
    first: Vec<u32>,
    incoming: Vec<Vec<EdgeId>>,
    outgoing: Vec<Vec<EdgeId>>,
    /// Items of each worker in all, and of each round.
    hands: Vec<Hands>,
    channels: HashMap<ChannelKey, Channel>,
    /// For each stage, members that have joined each all-reduce.
    joined: HashMap<(StageId, u32), u32>,
    awake: VecDeque<WorkerId>,
}

impl<'a> Checker<'a> {
    fn new(program: &'a Program) -> Self {
        let mut first = vec![0];
        for stage in &program.stages {
            first.push(first[first.len() - 1] + stage.replicas);
        }
        let mut incoming = vec![Vec::new(); program.stages.len()];
        let mut outgoing = vec![Vec::new(); program.stages.len()];
        for (edge, (from, to)) in (0..).map(EdgeId).zip(&program.edges) {
            outgoing[from.index()].push(edge);
            incoming[to.index()].push(edge);
        }
        let hands = || Hands { versions: BTreeSet::from([Version(0)]), ..Hands::default() };
        Self {
            program,
            rule: Rule::of(program),
            first,
            incoming,
            outgoing,
            hands: program.workers.iter().map(|_| hands()).collect(),
            channels: HashMap::new(),
            joined: HashMap::new(),
            awake: (0..program.workers.len() as u32).map(WorkerId).collect(),
        }
    }

    fn run(mut self) -> Result<(), CheckError> {
        while let Some(worker) = self.awake.pop_front() {
            while let Some(&instruction) = self.instruction(worker) {
                match self.advance(worker, instruction) {
                    Ok(true) => self.hands[worker.index()].at += 1,
                    Ok(false) => break,
                    Err(fault) => return Err(self.error(worker, fault)),
                }
            }
        }
        for worker in (0..self.hands.len() as u32).map(WorkerId) {
            if self.instruction(worker).is_some() {
                let fault = Fault::Deadlock(self.why(worker));
                return Err(self.error(worker, fault));
            }
            self.end(worker).map_err(|fault| CheckError::End { worker: self.program.worker_name(worker), fault })?;
        }
        Ok(())
    }

    fn instruction(&self, worker: WorkerId) -> Option<&'a Instruction> {
        self.program.workers[worker.index()].instructions.get(self.hands[worker.index()].at)
    }

    fn error(&self, worker: WorkerId, fault: Fault) -> CheckError {
        let at = self.hands[worker.index()].at;
        let instruction = self.instruction(worker).map(|i| self.program.show(i)).unwrap_or_default();
        CheckError::At { worker: self.program.worker_name(worker), at, instruction, fault }
    }

    fn why(&self, worker: WorkerId) -> String {
        let hands = &self.hands[worker.index()];
        let posted = match self.instruction(worker) {
            Some(Instruction::Wait { token }) => hands.tokens.get(token),
            _ => None,
        };
        match posted {
            Some(&Posted::Send { channel, item, .. }) => {
                format!("{} never posts the Recv of item {}", self.program.worker_name(channel.3), item.0)
            }
            Some(&Posted::Recv { channel, item, .. }) => {
                format!("{} never sends item {}", self.program.worker_name(channel.2), item.0)
            }
            Some(&Posted::AllReduce { round }) => format!("not every replica joins round {round}"),
            None => "nothing ends it".to_string(),
        }
    }

    /// Runs one instruction; false if it must wait.
    fn advance(&mut self, worker: WorkerId, instruction: Instruction) -> Result<bool, Fault> {
        let here = self.program.workers[worker.index()].stage;
        match instruction {
            Instruction::Load { item } => {
                self.mine(worker, here, item)?;
                if !self.hands[worker.index()].loaded.insert(item) {
                    return Err(Fault::Again(item));
                }
            }
            Instruction::Forward { stage, item, version, slot } => {
                self.mine(worker, stage, item)?;
                self.forward(worker, stage, item, version, slot)?;
            }
            Instruction::Backward { stage, item, version, slot } => {
                self.mine(worker, stage, item)?;
                self.backward(worker, stage, item, version, slot)?;
            }
            Instruction::Send { edge, item, kind, peer, token } => {
                self.ends(here, edge, kind, item, peer, true)?;
                self.made(worker, edge, kind, item)?;
                let channel = (edge, kind, worker, peer);
                let queue = self.channels.entry(channel).or_default();
                let place = queue.sends.len();
                if let Some(&expected) = queue.recvs.get(place).filter(|&&expected| expected != item) {
                    return Err(Fault::ChannelOrder { other: "Recv", expected, found: item });
                }
                queue.sends.push(item);
                self.post(worker, token, Posted::Send { channel, place, item })?;
                self.awake.push_back(peer);
            }
            Instruction::Recv { edge, item, kind, peer, token } => {
                self.mine(worker, here, item)?;
                self.ends(here, edge, kind, item, peer, false)?;
                if !self.hands[worker.index()].posted.insert((edge, kind, item)) {
                    return Err(Fault::Again(item));
                }
                let channel = (edge, kind, peer, worker);
                let queue = self.channels.entry(channel).or_default();
                let place = queue.recvs.len();
                if let Some(&expected) = queue.sends.get(place).filter(|&&expected| expected != item) {
                    return Err(Fault::ChannelOrder { other: "Send", expected, found: item });
                }
                queue.recvs.push(item);
                self.post(worker, token, Posted::Recv { channel, place, item })?;
                self.awake.push_back(peer);
            }
            Instruction::Wait { token } => return self.wait(worker, here, token),
            Instruction::AllReduce { stage, round, token } => {
                let replicas = self.program.stages[here.index()].replicas;
                if replicas == 1 {
                    return Err(Fault::RoundIncomplete { round, reason: "one replica has nothing to reduce" });
                }
                self.complete(worker, here, stage, round)?;
                self.hands[worker.index()].joined += 1;
                self.post(worker, token, Posted::AllReduce { round })?;
                let joined = self.joined.entry((stage, round)).or_default();
                *joined += 1;
                if *joined == replicas {
                    self.awake.extend((self.first[stage.index()]..self.first[stage.index() + 1]).map(WorkerId));
                }
            }
            Instruction::Step { stage, round, from, to, count, in_place } => {
                let alone = self.program.stages[here.index()].replicas == 1;
                if alone {
                    self.complete(worker, here, stage, round)?;
                }
                let expected = if stage == here { self.rule.count(stage, round) } else { return Err(Fault::NotMine) };
                let hands = &mut self.hands[worker.index()];
                if round != hands.applied {
                    return Err(Fault::WrongRound { found: round, expected: hands.applied });
                }
                if alone {
                    hands.joined += 1;
                } else if !hands.reduced.remove(&round) {
                    return Err(Fault::RoundIncomplete { round, reason: "the all-reduce has not been waited for" });
                }
                if (from, to) != (Version(round), Version(round + 1)) {
                    return Err(Fault::WrongVersion { found: to, rule: Version(round + 1) });
                }
                if count != expected {
                    return Err(Fault::WrongCount { found: count, expected });
                }
                if !hands.versions.contains(&from) {
                    return Err(Fault::NoVersion(from));
                }
                if in_place {
                    hands.versions.remove(&from);
                }
                hands.versions.insert(to);
                hands.applied += 1;
            }
            Instruction::Drop { version } => {
                let hands = &mut self.hands[worker.index()];
                if version.0 >= hands.applied || !hands.versions.remove(&version) {
                    return Err(Fault::NoVersion(version));
                }
            }
        }
        Ok(true)
    }

    fn mine(&self, worker: WorkerId, stage: StageId, item: MicrobatchId) -> Result<(), Fault> {
        let program = &self.program.workers[worker.index()];
        if stage != program.stage {
            return Err(Fault::NotMine);
        }
        if item.0 >= self.program.items || self.rule.replica(stage, item) != program.replica {
            return Err(Fault::NotMyItem(item));
        }
        Ok(())
    }

    /// Whether the transfer goes between this stage and the worker that has the item at the other.
    fn ends(
        &self,
        here: StageId,
        edge: EdgeId,
        kind: Payload,
        item: MicrobatchId,
        peer: WorkerId,
        sends: bool,
    ) -> Result<(), Fault> {
        let &(from, to) = self.program.edges.get(edge.index()).ok_or(Fault::NotMine)?;
        let (mine, other) = if sends == (kind == Payload::Activation) { (from, to) } else { (to, from) };
        if kind == Payload::Gradient && !self.rule.schedule.trains() {
            return Err(Fault::NotMine);
        }
        let expected = self.first[other.index()] + self.rule.replica(other, item);
        if mine == here && peer.0 == expected { Ok(()) } else { Err(Fault::NotMine) }
    }

    fn post(&mut self, worker: WorkerId, token: Token, posted: Posted) -> Result<(), Fault> {
        match self.hands[worker.index()].tokens.insert(token, posted) {
            Some(_) => Err(Fault::TokenTaken(token)),
            None => Ok(()),
        }
    }

    fn forward(
        &mut self,
        worker: WorkerId,
        stage: StageId,
        item: MicrobatchId,
        version: Version,
        slot: Slot,
    ) -> Result<(), Fault> {
        let cap = self.program.stages[stage.index()].cap;
        let rule = self.rule.version(stage, item);
        let hands = &mut self.hands[worker.index()];
        if hands.flights.contains_key(&item) {
            return Err(Fault::Again(item));
        }
        if let Some(after) = hands.last_forward.filter(|&after| after > item) {
            return Err(Fault::OutOfOrder { item, after });
        }
        if !hands.loaded.contains(&item) {
            return Err(Fault::NotLoaded(item));
        }
        for &edge in &self.incoming[stage.index()] {
            let kind = Payload::Activation;
            if !hands.received.remove(&(edge, kind, item)) {
                return Err(Fault::NotReceived { edge: edge.0, item, kind });
            }
        }
        if version != rule {
            return Err(Fault::WrongVersion { found: version, rule });
        }
        if !hands.versions.contains(&version) {
            return Err(Fault::NoVersion(version));
        }
        let busy = hands.slots.get(&slot).is_some_and(Option::is_some);
        if busy || hands.sending_slot.get(&slot).is_some_and(|&sends| sends > 0) {
            return Err(Fault::SlotTaken(slot));
        }
        // In inference, what nobody listens to is not in flight.
        if self.rule.schedule.trains() || !self.outgoing[stage.index()].is_empty() {
            hands.in_flight += 1;
            hands.slots.insert(slot, Some(item));
        }
        if hands.in_flight > cap {
            return Err(Fault::OverCap { in_flight: hands.in_flight, cap });
        }
        hands.flights.insert(item, Flight { version, slot, backward: false });
        hands.last_forward = Some(item);
        hands.forwards += 1;
        Ok(())
    }

    fn backward(
        &mut self,
        worker: WorkerId,
        stage: StageId,
        item: MicrobatchId,
        version: Version,
        slot: Slot,
    ) -> Result<(), Fault> {
        let round = self.rule.round(stage, item);
        let hands = &mut self.hands[worker.index()];
        let Some(flight) = hands.flights.get_mut(&item).filter(|_| self.rule.schedule.trains()) else {
            return Err(Fault::NotMade { item, kind: Payload::Activation });
        };
        if flight.backward {
            return Err(Fault::Again(item));
        }
        if let Some(after) = hands.last_backward.filter(|&after| after > item) {
            return Err(Fault::OutOfOrder { item, after });
        }
        if flight.version != version {
            return Err(Fault::OtherVersion { found: version, forward: flight.version });
        }
        if !hands.versions.contains(&version) {
            return Err(Fault::NoVersion(version));
        }
        if flight.slot != slot || hands.slots.get(&slot) != Some(&Some(item)) {
            return Err(Fault::SlotEmpty { slot, item });
        }
        for &edge in &self.outgoing[stage.index()] {
            let kind = Payload::Gradient;
            if !hands.received.remove(&(edge, kind, item)) {
                return Err(Fault::NotReceived { edge: edge.0, item, kind });
            }
        }
        if round != hands.joined {
            return Err(Fault::GradientBuffer { reason: "it has another round's gradients" });
        }
        if hands.sending_gradient.values().any(|&sends| sends >= GRADIENT_BUFFERS) {
            return Err(Fault::GradientBuffer { reason: "Sends of items before have not been waited for" });
        }
        flight.backward = true;
        hands.slots.insert(slot, None);
        hands.in_flight -= 1;
        hands.last_backward = Some(item);
        hands.round_items += 1;
        hands.backwards += 1;
        Ok(())
    }

    /// Notes that what the Send sends is there, for the first time, and held until its Wait.
    fn made(&mut self, worker: WorkerId, edge: EdgeId, kind: Payload, item: MicrobatchId) -> Result<(), Fault> {
        let hands = &mut self.hands[worker.index()];
        let there = match (kind, hands.flights.get(&item)) {
            (Payload::Activation, Some(flight)) if hands.slots.get(&flight.slot) == Some(&Some(item)) => {
                *hands.sending_slot.entry(flight.slot).or_default() += 1;
                true
            }
            (Payload::Gradient, Some(flight)) if flight.backward && hands.last_backward == Some(item) => {
                *hands.sending_gradient.entry(edge).or_default() += 1;
                true
            }
            _ => false,
        };
        if !there {
            return Err(Fault::NotMade { item, kind });
        }
        if !hands.posted.insert((edge, kind, item)) {
            return Err(Fault::Again(item));
        }
        Ok(())
    }

    fn wait(&mut self, worker: WorkerId, here: StageId, token: Token) -> Result<bool, Fault> {
        let hands = &mut self.hands[worker.index()];
        let &posted = hands.tokens.get(&token).ok_or(Fault::NoToken(token))?;
        let channel = |key: &ChannelKey| self.channels.get(key);
        match posted {
            Posted::Send { channel: key, place, item } => {
                if channel(&key).is_none_or(|channel| channel.recvs.len() <= place) {
                    return Ok(false);
                }
                if key.1 == Payload::Gradient {
                    let sends = hands.sending_gradient.entry(key.0).or_default();
                    *sends = sends.saturating_sub(1);
                } else if let Some(slot) = hands.flights.get(&item).map(|flight| flight.slot) {
                    let sends = hands.sending_slot.entry(slot).or_default();
                    *sends = sends.saturating_sub(1);
                    if *sends == 0 && !self.rule.schedule.trains() && hands.slots.get(&slot) == Some(&Some(item)) {
                        hands.slots.insert(slot, None);
                        hands.in_flight -= 1;
                    }
                }
            }
            Posted::Recv { channel: key, place, item } => {
                if channel(&key).is_none_or(|channel| channel.sends.len() <= place) {
                    return Ok(false);
                }
                hands.received.insert((key.0, key.1, item));
            }
            Posted::AllReduce { round } => {
                let joined = self.joined.get(&(here, round)).copied().unwrap_or(0);
                if joined < self.program.stages[here.index()].replicas {
                    return Ok(false);
                }
                hands.reduced.insert(round);
            }
        }
        hands.tokens.remove(&token);
        Ok(true)
    }

    /// Closes the round that gradients are added to: it must be `round`, with all of this worker's items.
    fn complete(&mut self, worker: WorkerId, here: StageId, stage: StageId, round: u32) -> Result<(), Fault> {
        let rounds = self.rule.rounds(here);
        let hands = &mut self.hands[worker.index()];
        if stage != here {
            return Err(Fault::NotMine);
        }
        if round != hands.joined || round >= rounds {
            return Err(Fault::WrongRound { found: round, expected: hands.joined });
        }
        let replica = self.program.workers[worker.index()].replica;
        let replicas = self.program.stages[stage.index()].replicas;
        // Items of a round are dealt to the replicas in turn.
        let share = (self.rule.count(stage, round) + replicas - 1 - replica) / replicas;
        if std::mem::take(&mut hands.round_items) != share {
            return Err(Fault::RoundIncomplete { round, reason: "not all backwards are done" });
        }
        Ok(())
    }

    fn end(&self, worker: WorkerId) -> Result<(), Fault> {
        let hands = &self.hands[worker.index()];
        let (items, rounds) = self.share(worker);
        let left = |what: &'static str, left: usize| match left as u32 {
            0 => Ok(()),
            left => Err(Fault::Left { what, left }),
        };
        left("the posted transfers", hands.tokens.len())?;
        left("the forwards", (items - hands.forwards) as usize)?;
        if self.rule.schedule.trains() {
            left("the backwards", (items - hands.backwards) as usize)?;
        }
        left("the rounds", (rounds - hands.applied) as usize)?;
        left("the old versions", hands.versions.len() - 1)
    }

    /// Items and rounds that a worker must have done at its end. Items are dealt to the replicas in turn, under flush
    /// anew for each minibatch.
    fn share(&self, worker: WorkerId) -> (u32, u32) {
        let &WorkerProgram { stage, replica, .. } = &self.program.workers[worker.index()];
        let replicas = u64::from(self.program.stages[stage.index()].replicas);
        let Rule { schedule, items, microbatches, .. } = self.rule;
        let whole = schedule.is_round_robin() || !schedule.trains();
        let deal = if whole { items } else { microbatches };
        let share = (u64::from(deal) + replicas - 1 - u64::from(replica)) / replicas * u64::from(items / deal);
        (share as u32, self.rule.rounds(stage))
    }
}
