//! Simulates a program without devices and proves its guarantees before it runs.
//!
//! Every worker runs as far as it can. Channels have no buffer: a Send completes when its Recv is posted, and vice
//! versa. Posts never block and a Wait names its operation, so if this interleaving terminates, all do. The checks:
//! - each Send matches the Recv of the same item: both ends of a channel agree on the order;
//! - each item runs forward and backward once per stage, on the replica of the rule, after its inputs have arrived, in
//!   item order;
//! - forward and backward use the version of the rule, which exists; all versions but the last are dropped;
//! - all replicas of a rank post their collectives in the same order. Under ZeRO each round is reduce-scattered, and no
//!   version is used, stepped from or dropped before all its buckets are gathered;
//! - no slot, gradient buffer or token is reused while in use; items in flight stay within the cap;
//! - under ZeRO 2 the items of a round accumulate gradients in item order across replicas. With a flush they do so
//!   after all replicas have gathered the round's weights;
//! - each round is reduced over all replicas and applied, once, in order, with the right count.
//!
//! It shares only the [`Rule`], the semantics of the schedules, with the generators.

use std::collections::{HashMap, HashSet, VecDeque};

use crate::plan::StageId;
use crate::plan::schedule::Schedule;
use crate::plan::zero::MOST;
use crate::schedule::channel::{Channel, Channels};
use crate::schedule::check::error::{CheckError, Fault};
use crate::schedule::check::state::CheckState;
use crate::schedule::collective::{Collective, CollectiveId};
use crate::schedule::dense_map::DenseMap;
use crate::schedule::list_scheduler::Layout;
use crate::schedule::semantics::Rule;
use crate::schedule::shape::MAX_WORKERS;
use crate::schedule::shape::check_ranks;
use crate::schedule::{
    EdgeId, Instruction, MicrobatchId, Payload, Program, ProgramStage, RankId, Token, Version, WorkerId, WorkerProgram,
};

/// Proves that a program runs to its end and keeps the guarantees above; returns the first violation.
pub fn check(program: &Program) -> Result<(), CheckError> {
    shape(program)?;
    Checker::new(program).run()
}

fn shape(program: &Program) -> Result<(), CheckError> {
    let wrong = |reason: String| Err(CheckError::Shape { reason });
    let Program { schedule, items, microbatches, .. } = *program;
    if items == 0 || microbatches == 0 || items % microbatches != 0 {
        return wrong(format!(
            "{items} micro-batches in minibatches of {microbatches}: expected at least one whole minibatch"
        ));
    }
    if schedule.is_round_robin() && microbatches != 1 {
        return wrong(format!("{schedule} has {microbatches} micro-batches: expected whole minibatches"));
    }
    let is_empty = |stage: &ProgramStage| stage.replicas == 0 || stage.cap == 0 || stage.buckets == 0;
    if program.stages.is_empty() || program.stages.iter().any(is_empty) {
        let expected = "at least one stage, each with replicas, an in-flight limit and buckets of at least 1";
        return wrong(format!("expected {expected}"));
    }
    let ranks: Vec<RankId> = program.stages.iter().map(|stage| stage.rank).collect();
    let replicas: Vec<u32> = program.stages.iter().map(|stage| stage.replicas).collect();
    if let Err(reason) = check_ranks(&ranks, &replicas) {
        return wrong(reason);
    }
    if let Some((at, what)) =
        program.stages.iter().zip(0..).find_map(|(stage, at)| Some((at, shares(stage, schedule)?)))
    {
        return wrong(format!("stage {at}: {what}"));
    }
    let layout = Layout::new(&program.stages);
    let workers = layout.workers();
    if workers != program.workers.len() || workers as u64 > MAX_WORKERS {
        return wrong(format!("{} workers listed, the stages have {workers}", program.workers.len()));
    }
    let places =
        layout.ranks().flat_map(|rank| (0..).zip(layout.replicas(rank)).map(move |(replica, _)| (rank, replica)));
    for (worker, (rank, replica)) in program.workers.iter().zip(places) {
        if (worker.rank, worker.replica) != (rank, replica) {
            let (found, rank) = (worker.rank.0, rank.0);
            return wrong(format!("worker {found}.{} is in the position of {rank}.{replica}", worker.replica));
        }
    }
    let mut seen = HashSet::new();
    for &(from, to) in &program.edges {
        if from >= to || to.index() >= program.stages.len() || !seen.insert((from, to)) {
            return wrong(format!("edge {} > {} is a duplicate or not from an earlier to a later stage", from.0, to.0));
        }
    }
    Ok(())
}

fn shares(stage: &ProgramStage, schedule: Schedule) -> Option<String> {
    let (zero, replicas) = (stage.zero, stage.replicas);
    match zero {
        0 if stage.shard_degree > 0 => Some("groups of replicas shard only under ZeRO".to_string()),
        0 => None,
        _ if zero > MOST => Some(format!("ZeRO has stages 0 to {MOST}, not {zero}")),
        _ if replicas < 2 || !schedule.trains() => {
            Some(format!("ZeRO {zero} needs training and at least two replicas; found {replicas} under {schedule}"))
        }
        _ if stage.shards() < 2 || !replicas.is_multiple_of(stage.shards()) => {
            Some(format!("groups of {} replicas shard; expected a divisor of {replicas} from 2", stage.shards()))
        }
        _ => None,
    }
}

/// Posts at both ends of a channel, and the items posted at one end only.
#[derive(Default)]
struct ChannelEnds {
    sends: u32,
    recvs: u32,
    unmet: VecDeque<MicrobatchId>,
}

impl ChannelEnds {
    /// Posts the next Send or Recv, which must match the item of the other end.
    fn post(&mut self, item: MicrobatchId, sends: bool) -> Result<u32, Fault> {
        let (mine, others, other) =
            if sends { (&mut self.sends, self.recvs, "Recv") } else { (&mut self.recvs, self.sends, "Send") };
        let place = *mine;
        if others > place {
            match self.unmet.front() {
                Some(&expected) if expected != item => {
                    return Err(Fault::ChannelOrder { other, expected, found: item });
                }
                _ => self.unmet.pop_front(),
            };
        } else {
            self.unmet.push_back(item);
        }
        *mine += 1;
        Ok(place)
    }
}

/// Operation of a token: a Send or Recv (index in its channel), or a collective.
#[derive(Clone, Copy)]
enum Posted {
    Send { channel: u32, place: u32, item: MicrobatchId },
    Recv { channel: u32, place: u32, item: MicrobatchId },
    CollectiveId(CollectiveId),
}

struct WorkerProgress {
    at: usize,
    tokens: DenseMap<Posted>,
    ledgers: Vec<CheckState>,
    /// Posted reductions and all-gathers, and those whose gradients are not complete.
    joined: [usize; 2],
    due: Vec<CollectiveId>,
    is_awake: bool,
}

impl WorkerProgress {
    fn of(&mut self, stage: StageId) -> Result<&mut CheckState, Fault> {
        self.ledgers.iter_mut().find(|ledger| ledger.stage() == stage).ok_or(Fault::NotMine)
    }
}

struct Checker<'a> {
    program: &'a Program,
    rule: Rule,
    layout: Layout,
    hands: Vec<WorkerProgress>,
    channels: Channels,
    ends: Vec<ChannelEnds>,
    joined: HashMap<CollectiveId, u32>,
    /// For ZeRO 2 and 3: items whose gradients are accumulated, by stage and round.
    added: HashMap<(StageId, u32), u32>,
    /// For each rank, the order of its reductions and of its all-gathers, as first posted by any replica.
    collectives: Vec<[Vec<CollectiveId>; 2]>,
    awake: VecDeque<WorkerId>,
}

impl<'a> Checker<'a> {
    fn new(program: &'a Program) -> Self {
        let layout = Layout::new(&program.stages);
        let hands = |worker: &WorkerProgram| WorkerProgress {
            at: 0,
            tokens: DenseMap::new(worker.instructions.len()),
            ledgers: program.stages_of(worker.rank).map(|stage| CheckState::new(program, stage, worker)).collect(),
            joined: [0; 2],
            due: Vec::new(),
            is_awake: true,
        };
        Self {
            program,
            rule: Rule::of(program),
            hands: program.workers.iter().map(hands).collect(),
            collectives: vec![Default::default(); layout.ranks().count()],
            layout,
            channels: Channels::new(program.workers.len()),
            ends: Vec::new(),
            joined: HashMap::new(),
            added: HashMap::new(),
            awake: (0..program.workers.len() as u32).map(WorkerId).collect(),
        }
    }

    fn run(mut self) -> Result<(), CheckError> {
        while let Some(worker) = self.awake.pop_front() {
            self.hands[worker.index()].is_awake = false;
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
                let stuck = self.root(worker);
                let fault = Fault::Deadlock(self.why(stuck));
                return Err(self.error(stuck, fault));
            }
            self.end(worker).map_err(|fault| CheckError::End { worker: self.program.worker_name(worker), fault })?;
        }
        Ok(())
    }

    fn wake(&mut self, worker: WorkerId) {
        let is_awake = &mut self.hands[worker.index()].is_awake;
        if !std::mem::replace(is_awake, true) {
            self.awake.push_back(worker);
        }
    }

    fn instruction(&self, worker: WorkerId) -> Option<&'a Instruction> {
        self.program.workers[worker.index()].instructions.get(self.hands[worker.index()].at)
    }

    fn error(&self, worker: WorkerId, fault: Fault) -> CheckError {
        let at = self.hands[worker.index()].at;
        let instruction = self.instruction(worker).map(|i| self.program.show(i)).unwrap_or_default();
        CheckError::At { worker: self.program.worker_name(worker), at, instruction, fault }
    }

    /// Follows the wait-for chain of a blocked worker. It ends at a worker whose operation has no counterpart, or in a
    /// cycle, all of whose members are at fault.
    fn root(&self, stuck: WorkerId) -> WorkerId {
        let mut seen = vec![false; self.hands.len()];
        let mut worker = stuck;
        while !std::mem::replace(&mut seen[worker.index()], true) {
            match self.waits_for_worker(worker) {
                Some(next) => worker = next,
                None => break,
            }
        }
        worker
    }

    /// The worker that still has to post the counterpart of the blocking operation.
    fn waits_for_worker(&self, worker: WorkerId) -> Option<WorkerId> {
        match *self.posted(worker)? {
            Posted::Send { channel, item, .. } => {
                let Channel { to, edge, kind, .. } = self.channels.channel(channel);
                let meets = |i: &Instruction| match *i {
                    Instruction::Recv { edge: e, kind: k, item: of, peer, .. } => {
                        (e, k, of, peer) == (edge, kind, item, worker)
                    }
                    _ => false,
                };
                self.rest(to).iter().any(meets).then_some(to)
            }
            Posted::Recv { channel, item, .. } => {
                let Channel { from, edge, kind, .. } = self.channels.channel(channel);
                let meets = |i: &Instruction| match *i {
                    Instruction::Send { edge: e, kind: k, item: of, peer, .. } => {
                        (e, k, of, peer) == (edge, kind, item, worker)
                    }
                    _ => false,
                };
                self.rest(from).iter().any(meets).then_some(from)
            }
            Posted::CollectiveId(meeting) => {
                let joins = |i: &Instruction| i.meeting().is_some_and(|(of, _)| of == meeting);
                let mut holders = self.layout.holders(meeting.stage);
                let is_due = |other: WorkerId| self.hands[other.index()].due.contains(&meeting);
                holders.find(|&other| other != worker && (is_due(other) || self.rest(other).iter().any(joins)))
            }
        }
    }

    fn rest(&self, worker: WorkerId) -> &'a [Instruction] {
        let list = self.program.workers.get(worker.index()).zip(self.hands.get(worker.index()));
        list.and_then(|(program, hands)| program.instructions.get(hands.at..)).unwrap_or_default()
    }

    fn posted(&self, worker: WorkerId) -> Option<&Posted> {
        match self.instruction(worker) {
            Some(Instruction::Wait { token }) => self.hands[worker.index()].tokens.get(token.0),
            _ => None,
        }
    }

    fn why(&self, worker: WorkerId) -> String {
        match self.posted(worker) {
            Some(&Posted::Send { channel, item, .. }) => {
                let Channel { to, .. } = self.channels.channel(channel);
                format!("{} never posts the Recv of micro-batch {}", self.program.worker_name(to), item.0)
            }
            Some(&Posted::Recv { channel, item, .. }) => {
                let Channel { from, .. } = self.channels.channel(channel);
                format!("{} never sends micro-batch {}", self.program.worker_name(from), item.0)
            }
            Some(&Posted::CollectiveId(CollectiveId { kind: Collective::AllGather, number, .. })) => {
                format!("not every replica gathers version {number}")
            }
            Some(&Posted::CollectiveId(CollectiveId { number, .. })) => {
                format!("not every replica joins round {number}")
            }
            None => match self.instruction(worker) {
                Some(Instruction::Backward { .. } | Instruction::BackwardWeight { .. }) => {
                    "an earlier micro-batch of the round never adds its gradients".to_string()
                }
                _ => "nothing completes it".to_string(),
            },
        }
    }

    /// Executes one instruction; false if it must wait.
    fn advance(&mut self, worker: WorkerId, instruction: Instruction) -> Result<bool, Fault> {
        if !self.is_turn(&instruction) {
            return Ok(false);
        }
        let rule = &self.rule;
        let hands = &mut self.hands[worker.index()];
        match instruction {
            Instruction::Load { stage, item } => hands.of(stage)?.load(rule, item)?,
            Instruction::Forward { stage, item, version, slot } => {
                hands.of(stage)?.forward(rule, item, version, slot)?;
            }
            Instruction::Backward { stage, item, version, slot } => {
                let ledger = hands.of(stage)?;
                ledger.backward_input(rule, item, version, slot)?;
                ledger.backward_weight(rule, item, version, slot)?;
                self.bring(worker, stage);
                self.add(stage, item);
            }
            Instruction::Recompute { stage, item, version, slot } => {
                hands.of(stage)?.recompute(rule, item, version, slot)?;
            }
            Instruction::BackwardInput { stage, item, version, slot } => {
                hands.of(stage)?.backward_input(rule, item, version, slot)?;
            }
            Instruction::BackwardWeight { stage, item, version, slot } => {
                hands.of(stage)?.backward_weight(rule, item, version, slot)?;
                self.bring(worker, stage);
                self.add(stage, item);
            }
            Instruction::Send { edge, item, kind, peer, token } => {
                let (here, other) = self.ends(edge, kind, true)?;
                let ledger = self.hands[worker.index()].of(here)?;
                ledger.mine(&self.rule, item)?;
                ledger.send(edge, kind, item)?;
                self.peer(other, item, peer)?;
                let channel = self.channel(worker, Channel { from: worker, to: peer, edge, kind });
                let place = self.ends[channel as usize].post(item, true)?;
                self.post(worker, token, Posted::Send { channel, place, item })?;
                self.wake(peer);
            }
            Instruction::Recv { edge, item, kind, peer, token } => {
                let (here, other) = self.ends(edge, kind, false)?;
                self.hands[worker.index()].of(here)?.recv(&self.rule, edge, kind, item)?;
                self.peer(other, item, peer)?;
                let channel = self.channel(worker, Channel { from: peer, to: worker, edge, kind });
                let place = self.ends[channel as usize].post(item, false)?;
                self.post(worker, token, Posted::Recv { channel, place, item })?;
                self.wake(peer);
            }
            Instruction::Wait { token } => return self.wait(worker, token),
            Instruction::AllReduce { stage, round, bucket, .. } => {
                let is_made = hands.of(stage)?.all_reduce(rule, round, bucket)?;
                self.meet(worker, instruction, is_made)?;
            }
            Instruction::ReduceScatter { stage, round, bucket, .. } => {
                let is_made = hands.of(stage)?.reduce_scatter(rule, round, bucket)?;
                self.meet(worker, instruction, is_made)?;
            }
            Instruction::AllGather { stage, version, bucket, .. } => {
                hands.of(stage)?.all_gather(version, bucket)?;
                self.meet(worker, instruction, true)?;
            }
            Instruction::Step { stage, round, from, to, count, in_place } => {
                // Steps of a rank's stages are made together when all are done with the round, because of tied weights.
                if hands.ledgers.len() > 1 && !hands.ledgers.iter().all(|ledger| ledger.is_done(rule, round)) {
                    let reason = "another stage of the worker has not completed it";
                    return Err(Fault::RoundIncomplete { round, reason });
                }
                hands.of(stage)?.step(rule, round, (from, to), count, in_place)?;
            }
            Instruction::Drop { stage, version } => hands.of(stage)?.drop_version(version)?,
            Instruction::Checkpoint { stage, version } => hands.of(stage)?.checkpoint(rule, version)?,
        }
        Ok(true)
    }

    /// True unless the instruction accumulates gradients before its turn: earlier items of the round go first.
    fn is_turn(&self, instruction: &Instruction) -> bool {
        let (stage, item) = match *instruction {
            Instruction::Backward { stage, item, .. } | Instruction::BackwardWeight { stage, item, .. } => {
                (stage, item)
            }
            _ => return true,
        };
        let sums = self.program.stages.get(stage.index()).is_some_and(|stage| stage.zero >= 2);
        // Invalid items are reported when they run.
        if !sums || item.0 >= self.rule.items {
            return true;
        }
        let round = self.rule.round(stage, item);
        // With a flush, a replica reuses the gradient shard buffer once it has gathered the round's weights.
        let has_room = |worker: WorkerId| {
            let ledgers = &self.hands[worker.index()].ledgers;
            ledgers.iter().any(|ledger| ledger.stage() == stage && ledger.check_gathered(Version(round)).is_ok())
        };
        let added = self.added.get(&(stage, round)).copied().unwrap_or(0);
        added >= self.rule.place(stage, item)
            && (!self.rule.schedule.flushes() || self.layout.holders(stage).all(has_room))
    }

    fn add(&mut self, stage: StageId, item: MicrobatchId) {
        if self.program.stages[stage.index()].zero >= 2 {
            *self.added.entry((stage, self.rule.round(stage, item))).or_default() += 1;
            self.layout.holders(stage).for_each(|worker| self.wake(worker));
        }
    }

    /// The stage at this end of a transfer, and the one at the other end.
    fn ends(&self, edge: EdgeId, kind: Payload, sends: bool) -> Result<(StageId, StageId), Fault> {
        let &(from, to) = self.program.edges.get(edge.index()).ok_or(Fault::NotMine)?;
        if kind == Payload::Gradient && !self.rule.schedule.trains() {
            return Err(Fault::NotMine);
        }
        Ok(if sends == (kind == Payload::Activation) { (from, to) } else { (to, from) })
    }

    fn peer(&self, stage: StageId, item: MicrobatchId, peer: WorkerId) -> Result<(), Fault> {
        let expected = self.layout.worker(stage, self.rule.replica(stage, item));
        if peer == expected { Ok(()) } else { Err(Fault::NotMine) }
    }

    fn channel(&mut self, worker: WorkerId, channel: Channel) -> u32 {
        let number = self.channels.number(worker, channel);
        if number as usize == self.ends.len() {
            self.ends.push(ChannelEnds::default());
        }
        number
    }

    /// Posts a collective. All replicas of a rank must use the same order. The worker counts as joined once its data is
    /// complete.
    fn meet(&mut self, worker: WorkerId, instruction: Instruction, is_made: bool) -> Result<(), Fault> {
        let Some((meeting, token)) = instruction.meeting() else { return Ok(()) };
        let hands = &mut self.hands[worker.index()];
        let way = usize::from(meeting.kind == Collective::AllGather);
        let order = &mut self.collectives[self.program.workers[worker.index()].rank.index()][way];
        match order.get(hands.joined[way]) {
            Some(&expected @ CollectiveId { stage, number, bucket, .. }) if expected != meeting => {
                return Err(Fault::CollectiveOrder { stage: stage.0, round: number, bucket });
            }
            Some(_) => {}
            None => order.push(meeting),
        }
        hands.joined[way] += 1;
        if !is_made {
            hands.due.push(meeting);
        }
        self.post(worker, token, Posted::CollectiveId(meeting))?;
        if is_made {
            self.join(meeting);
        }
        Ok(())
    }

    /// Joins the stage's collectives that were waiting for this backward.
    fn bring(&mut self, worker: WorkerId, stage: StageId) {
        let hands = &mut self.hands[worker.index()];
        if hands.due.is_empty() {
            return;
        }
        let (made, due) = std::mem::take(&mut hands.due).into_iter().partition(|meeting| meeting.stage == stage);
        hands.due = due;
        let made: Vec<CollectiveId> = made;
        made.into_iter().for_each(|meeting| self.join(meeting));
    }

    fn join(&mut self, meeting: CollectiveId) {
        let members = self.joined.entry(meeting).or_default();
        *members += 1;
        if *members == self.program.stages[meeting.stage.index()].replicas {
            self.layout.holders(meeting.stage).for_each(|worker| self.wake(worker));
        }
    }

    fn post(&mut self, worker: WorkerId, token: Token, posted: Posted) -> Result<(), Fault> {
        match self.hands[worker.index()].tokens.insert(token.0, posted) {
            Some(_) => Err(Fault::TokenTaken(token)),
            None => Ok(()),
        }
    }

    fn wait(&mut self, worker: WorkerId, token: Token) -> Result<bool, Fault> {
        let posted = *self.hands[worker.index()].tokens.get(token.0).ok_or(Fault::NoToken(token))?;
        match posted {
            Posted::Send { channel, place, item } => {
                if self.ends[channel as usize].recvs <= place {
                    return Ok(false);
                }
                let Channel { edge, kind, .. } = self.channels.channel(channel);
                let (here, _) = self.ends(edge, kind, true)?;
                self.hands[worker.index()].of(here)?.sent(&self.rule, edge, kind, item)?;
            }
            Posted::Recv { channel, place, item } => {
                if self.ends[channel as usize].sends <= place {
                    return Ok(false);
                }
                let Channel { edge, kind, .. } = self.channels.channel(channel);
                let (here, _) = self.ends(edge, kind, false)?;
                self.hands[worker.index()].of(here)?.received(edge, item)?;
            }
            Posted::CollectiveId(meeting) => {
                let CollectiveId { kind, stage, number, .. } = meeting;
                let joined = self.joined.get(&meeting).copied().unwrap_or(0);
                if joined < self.program.stages[stage.index()].replicas {
                    return Ok(false);
                }
                let ledger = self.hands[worker.index()].of(stage)?;
                match kind {
                    Collective::AllReduce | Collective::ReduceScatter => ledger.reduced(number),
                    Collective::AllGather => ledger.gathered(Version(number)),
                }
                if kind == Collective::AllGather {
                    self.layout.holders(stage).for_each(|worker| self.wake(worker));
                }
            }
        }
        self.hands[worker.index()].tokens.remove(token.0);
        Ok(true)
    }

    fn end(&self, worker: WorkerId) -> Result<(), Fault> {
        let hands = &self.hands[worker.index()];
        match hands.tokens.len() as u64 {
            0 => hands.ledgers.iter().try_for_each(|ledger| ledger.end(&self.rule)),
            left => Err(Fault::Left { what: "the posted transfers", left }),
        }
    }
}
