//! Lowers a compute order to programs: adds transfers, waits, all-reduces, steps, drops and slots.
//!
//! Instructions around one compute action:
//!
//! ```text
//! recv …            posted ahead of the action that needs it, so that transfers overlap with compute
//! recompute 2F3     before 2B3 or 2I3 if stage 2 is recomputed; needs none of the waits below
//! wait …            Sends whose buffer is reused, the all-reduce (then step), Recvs of this action, gathered weights
//! load, 2F3         or 2B3, or 2I3 and later 2W3
//! send …, all-reduce
//! ```
//!
//! Freedom from deadlock: let the witness be the sequence in which `order` started all actions. Everything before an
//! action on its worker happens at that action's moment.
//! - A Wait for a Recv is before the action that needs the data; the sender's action started and ended earlier.
//! - A Wait for an activation's Send is after the item's own backward, which needed the receiver's backward.
//! - In inference it is before the forward that comes cap items later. `order` started that forward only after the
//!   receiver started on the item.
//! - A Wait for a gradient's Send is before the sender's next backward at the stage, because there is one outgoing
//!   gradient buffer. With double buffering (transfers slower than one forward) it is before the backward after that.
//!   The receiver posts its Recv at the latest at its last action before that moment. Its own forward of the item is
//!   such an action, so one exists.
//! - A Wait for an all-reduce is before the first action that needs the update, which `order` started after the round
//!   was complete, or at the end. A replica without an item in the round joins when it has applied the rounds before.
//! - Under ZeRO, each replica steps and contributes its shard before its first action after the round is complete: see
//!   `zero`.
//! - A worker with several stages finishes a minibatch before it starts the next. It posts all-reduces from the last
//!   stage to the first, in the same order on every replica, and steps all stages together. Stages with tied weights
//!   then need not wait for each other.
//!
//! So every Wait is satisfied at an earlier moment and posts never block: the witness order is one valid interleaving.
//! A Wait names its operation, so if one interleaving terminates, all do.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};

use crate::plan::StageId;
use crate::schedule::action::{Phase, Work};
use crate::schedule::list_scheduler::{Layout, WorkOrder};
use crate::schedule::semantics::Rule;
use crate::schedule::version_lifetime::with_ends;
use crate::schedule::zero::{Gathering, complete};
use crate::schedule::{
    EdgeId, Instruction, MicrobatchId, Payload, Pipeline, Program, Slot, Token, Version, WorkerId, WorkerProgram,
};

/// Recvs are posted this many actions ahead: one forward and one backward, the time per item in steady state. A
/// transfer may take as long without delaying anyone.
const RECV_LOOKAHEAD: u32 = 2;

/// `RECV_LOOKAHEAD` for inference, which has only forwards.
pub const NEXT: u32 = 1;

/// Lowers `order`, which must come from [`play`](crate::schedule::list_scheduler::play) with the same rule.
pub fn lower(pipeline: &Pipeline, rule: &Rule, order: &WorkOrder) -> Program {
    let layout = Layout::new(&rule.stages);
    let lists = Lists::new(pipeline, rule, order, &layout);
    let mut workers = Vec::with_capacity(layout.workers());
    for rank in layout.ranks() {
        for (replica, worker) in (0..).zip(layout.replicas(rank)) {
            let stages = (0..).map(StageId).zip(&rule.stages).filter(|(_, stage)| stage.rank == rank);
            let instructions = Writer::new(&lists, stages.map(|(id, _)| id).collect(), worker).write();
            workers.push(WorkerProgram { rank, replica, instructions });
        }
    }
    let edges = pipeline.edges.iter().map(|edge| (edge.from, edge.to)).collect();
    let Rule { schedule, items, microbatches, ref stages } = *rule;
    Program { schedule, items, microbatches, stages: stages.clone(), edges, workers }
}

/// One end of a transfer. `post` and `wait` are indices into the worker's actions.
#[derive(Clone, Copy)]
struct Transfer {
    edge: EdgeId,
    item: MicrobatchId,
    kind: Payload,
    peer: WorkerId,
    /// Posted before this action by the receiver, after it by the sender.
    post: u32,
    /// Waited for before this action.
    wait: u32,
    /// Start order of the sender's action; both ends of a channel post in this order.
    made: u32,
}

struct Lists<'a> {
    pipeline: &'a Pipeline,
    rule: &'a Rule,
    order: &'a WorkOrder,
    /// By worker: Recvs to post before an action, Sends to post after it, in order.
    recvs: Vec<Vec<Transfer>>,
    sends: Vec<Vec<Transfer>>,
    /// By rank and round under ZeRO: see `zero::complete`.
    complete: Vec<Vec<u32>>,
}

impl<'a> Lists<'a> {
    fn new(pipeline: &'a Pipeline, rule: &'a Rule, order: &'a WorkOrder, layout: &Layout) -> Self {
        let items = rule.items as usize;
        // Index of each item's forward and of its gradient-producing action, by stage.
        let mut place_of = vec![[0u32; 2]; pipeline.stages.len() * items];
        for work in &order.work {
            for (place, &Work { stage, item, part }) in (0u32..).zip(work) {
                if part != Phase::BackwardWeight {
                    place_of[stage.index() * items + item.index()][usize::from(part.makes_gradients())] = place;
                }
            }
        }
        let nothing = vec![Vec::new(); layout.workers()];
        let complete = complete(rule, order, layout);
        let mut lists = Self { pipeline, rule, order, recvs: nothing.clone(), sends: nothing, complete };
        let next_backward = next_backwards(order);
        for (index, edge) in pipeline.edges.iter().enumerate() {
            for item in (0..rule.items).map(MicrobatchId) {
                let [from, to] = [edge.from, edge.to].map(|stage| layout.worker(stage, rule.replica(stage, item)));
                let [from_places, to_places] = [edge.from, edge.to].map(|s| place_of[s.index() * items + item.index()]);
                let [from_started, to_started] = [from, to].map(|worker| &order.started[worker.index()]);
                let id = EdgeId(index as u32);
                let (place, wait) = (from_places[0], to_places[0]);
                let made = from_started[place as usize];
                let post = wait.saturating_sub(if rule.schedule.trains() { RECV_LOOKAHEAD } else { NEXT });
                let freed = if rule.schedule.trains() {
                    from_places[1] + 1
                } else {
                    let posted = to_started[post as usize];
                    let after = from_started.partition_point(|&started| started <= posted) as u32;
                    // By then all receivers have started on the item.
                    let next = place.saturating_add(rule.stages[edge.from.index()].cap.max(1));
                    after.max(next.min(from_started.len() as u32))
                };
                let transfer = Transfer { edge: id, item, kind: Payload::Activation, peer: from, post, wait, made };
                lists.recvs[to.index()].push(transfer);
                lists.sends[from.index()].push(Transfer { peer: to, post: place, wait: freed, ..transfer });
                if !rule.schedule.trains() {
                    continue;
                }
                let (place, wait) = (to_places[1], from_places[1]);
                let made = to_started[place as usize];
                let next = &next_backward[to.index()];
                let mut freed = next[place as usize];
                if edge.backward_us > pipeline.stages[edge.to.index()].forward {
                    freed = next.get(freed as usize).copied().unwrap_or(freed);
                }
                let mut post = wait.saturating_sub(RECV_LOOKAHEAD);
                if let Some(&moment) = to_started.get(freed as usize) {
                    let latest = from_started.partition_point(|&started| started < moment);
                    post = post.min(latest.saturating_sub(1) as u32);
                }
                let transfer = Transfer { edge: id, item, kind: Payload::Gradient, peer: to, post, wait, made };
                lists.recvs[from.index()].push(transfer);
                lists.sends[to.index()].push(Transfer { peer: from, post: place, wait: freed, ..transfer });
            }
        }
        lists.recvs.iter_mut().for_each(|recvs| in_order_of_sends(recvs));
        for transfers in &mut lists.sends {
            transfers.sort_by_key(|transfer| (transfer.post, transfer.wait, transfer.edge));
        }
        lists
    }
}

/// Channels are FIFO, so Recvs of a channel are posted in the order of its Sends, if necessary earlier than needed.
fn in_order_of_sends(recvs: &mut [Transfer]) {
    recvs.sort_by_key(|recv| (recv.made, recv.edge));
    let mut earliest: BTreeMap<(EdgeId, Payload, WorkerId), u32> = BTreeMap::new();
    for recv in recvs.iter_mut().rev() {
        let post = earliest.entry((recv.edge, recv.kind, recv.peer)).or_insert(recv.post);
        *post = recv.post.min(*post);
        recv.post = *post;
    }
    recvs.sort_by_key(|recv| recv.post);
}

/// For each action, the index of the worker's next backward at the same stage, or the list length.
fn next_backwards(order: &WorkOrder) -> Vec<Vec<u32>> {
    let of_worker = |work: &Vec<Work>| {
        let mut next: BTreeMap<StageId, u32> = BTreeMap::new();
        let mut places: Vec<u32> = Vec::with_capacity(work.len());
        for (place, &Work { stage, part, .. }) in work.iter().enumerate().rev() {
            places.push(next.get(&stage).copied().unwrap_or(work.len() as u32));
            if part.makes_gradients() {
                next.insert(stage, place as u32);
            }
        }
        places.reverse();
        places
    };
    order.work.iter().map(of_worker).collect()
}

struct Rounds {
    stage: StageId,
    /// By round: the worker's item whose backward is the last, if any.
    last: Vec<Option<MicrobatchId>>,
    slots: Slots,
}

struct Writer<'a> {
    lists: &'a Lists<'a>,
    worker: WorkerId,
    stages: Vec<Rounds>,
    out: Vec<Instruction>,
    tokens: u32,
    /// Tokens to wait for and (inference) slots to free, by the action before which this happens.
    waits: Waits,
    frees: BTreeMap<u32, Vec<(StageId, Slot)>>,
    /// Rounds whose all-reduce is posted but not applied, with the token of the first bucket; the other buckets' tokens
    /// follow.
    reducing: VecDeque<(u32, StageId, Token)>,
    gathering: Vec<Gathering>,
    /// Rounds done on this worker but not yet reduced or stepped, by round and then from the last stage to the first.
    done: BTreeSet<(u32, Reverse<StageId>)>,
    joined: u32,
    applied: u32,
}

impl<'a> Writer<'a> {
    fn new(lists: &'a Lists<'a>, stages: Vec<StageId>, worker: WorkerId) -> Self {
        let work = &lists.order.work[worker.index()];
        let rounds = |stage: StageId| {
            let mut last = vec![None; lists.rule.rounds(stage) as usize];
            for work in work.iter().filter(|work| work.stage == stage && work.part.ends()) {
                last[lists.rule.round(stage, work.item) as usize] = Some(work.item);
            }
            Rounds { stage, last, slots: Slots::default() }
        };
        Self {
            lists,
            worker,
            stages: stages.into_iter().map(rounds).collect(),
            out: Vec::with_capacity(work.len() * 6),
            tokens: 0,
            waits: Waits::new(work.len()),
            frees: BTreeMap::new(),
            reducing: VecDeque::new(),
            gathering: Vec::new(),
            done: BTreeSet::new(),
            joined: 0,
            applied: 0,
        }
    }

    fn write(mut self) -> Vec<Instruction> {
        let lists = self.lists;
        self.join_idle_rounds();
        let work = &lists.order.work[self.worker.index()];
        let mut recvs = lists.recvs[self.worker.index()].iter().peekable();
        let mut sends = lists.sends[self.worker.index()].iter().peekable();
        for (place, &work) in (0u32..).zip(work) {
            let Work { stage, item, part } = work;
            while let Some(&Transfer { edge, item, kind, peer, wait, .. }) = recvs.next_if(|recv| recv.post == place) {
                let token = self.token();
                self.out.push(Instruction::Recv { edge, item, kind, peer, token });
                self.waits.add(wait, token);
            }
            let version = match part {
                Phase::Forward => lists.rule.version(stage, item),
                _ => lists.rule.backward_version(stage, item),
            };
            let needs_update = |&(round, ..): &(u32, StageId, Token)| match part {
                Phase::Forward => version.0 > round,
                _ if !lists.rule.schedule.stashes() => version.0 > round,
                _ => !lists.rule.schedule.is_round_robin() && lists.rule.round(stage, item) > round,
            };
            while self.reducing.front().is_some_and(|front| needs_update(front) || self.is_complete(front.0, place)) {
                self.apply();
            }
            if part.makes_gradients() && lists.rule.stages[stage.index()].recompute {
                let slot = self.stage(stage).slots.of(item);
                self.out.push(Instruction::Recompute { stage, item, version, slot });
            }
            self.gather(stage, version);
            self.wait(place);
            let mut held = None;
            let slot = match part {
                Phase::Forward => {
                    let slot = self.stage(stage).slots.take(item);
                    self.out.push(Instruction::Load { stage, item });
                    held = Some((stage, slot)).filter(|_| !lists.rule.schedule.trains());
                    slot
                }
                Phase::BackwardInput => self.stage(stage).slots.of(item),
                Phase::Backward | Phase::BackwardWeight => self.stage(stage).slots.give(item),
            };
            let is_last = part.ends() && self.is_last(stage, item);
            let has_buckets = self.buckets(stage) > 1;
            // With buckets, the reduction overlaps with the last backward.
            if is_last && has_buckets {
                self.finish(stage, item);
            }
            self.out.push(work.instruction(version, slot));
            let mut free = place + 1;
            while let Some(&Transfer { edge, item, kind, peer, wait, .. }) = sends.next_if(|send| send.post == place) {
                let token = self.token();
                self.out.push(Instruction::Send { edge, item, kind, peer, token });
                self.waits.add(wait, token);
                free = free.max(wait);
            }
            // In inference an output is kept until it is sent.
            if held.is_some() {
                self.frees.entry(free).or_default().extend(held);
            }
            if is_last && !has_buckets {
                self.finish(stage, item);
            }
        }
        self.wait(work.len() as u32);
        while !self.reducing.is_empty() {
            self.apply();
        }
        let newest = Version(self.applied);
        for stage in self.stages.iter().map(|rounds| rounds.stage).collect::<Vec<_>>() {
            self.gather(stage, newest);
        }
        with_ends(self.out, |_| newest)
    }

    fn stage(&mut self, stage: StageId) -> &mut Rounds {
        self.stages.iter_mut().find(|rounds| rounds.stage == stage).expect("a worker computes stages of its rank")
    }

    fn is_last(&mut self, stage: StageId, item: MicrobatchId) -> bool {
        let round = self.lists.rule.round(stage, item);
        self.stage(stage).last[round as usize] == Some(item)
    }

    fn finish(&mut self, stage: StageId, item: MicrobatchId) {
        self.done.insert((self.lists.rule.round(stage, item), Reverse(stage)));
        self.finish_rounds();
    }

    fn token(&mut self) -> Token {
        let token = Token(self.tokens);
        self.tokens += 1;
        token
    }

    fn wait(&mut self, place: u32) {
        self.out.extend(self.waits.at(place).map(|token| Instruction::Wait { token }));
        for (stage, slot) in self.frees.remove(&place).unwrap_or_default() {
            self.stage(stage).slots.free.push(Reverse(slot.0));
        }
    }

    fn alone(&self) -> bool {
        !self.lists.pipeline.stages[self.stages[0].stage.index()].reduces()
    }

    /// Reduces or steps the rounds that are done. A single replica steps when the round's last stage is done. With
    /// replicas, the Wait comes before the first action that needs the update, so that no worker waits for slower
    /// replicas earlier than necessary. Until then the gradients take the memory of the future version.
    fn finish_rounds(&mut self) {
        if !self.alone() {
            while self.done.first() == Some(&self.next_join()) {
                self.reduce();
            }
        } else if self.done.len() == self.stages.len() {
            for (round, Reverse(stage)) in std::mem::take(&mut self.done) {
                self.step(round, stage);
            }
            self.applied += 1;
        }
    }

    /// Round and stage of the next all-reduce, in the same order on every replica.
    fn next_join(&self) -> (u32, Reverse<StageId>) {
        let stages = self.stages.len() as u32;
        let place = stages - 1 - self.joined % stages;
        (self.joined / stages, Reverse(self.stages[place as usize].stage))
    }

    fn buckets(&self, stage: StageId) -> u32 {
        self.lists.rule.stages[stage.index()].buckets
    }

    fn reduce(&mut self) {
        let (round, Reverse(stage)) = self.next_join();
        self.done.remove(&(round, Reverse(stage)));
        self.reducing.push_back((round, stage, Token(self.tokens)));
        for bucket in 0..self.buckets(stage) {
            let token = self.token();
            self.out.push(match self.shares(stage) {
                true => Instruction::ReduceScatter { stage, round, bucket, token },
                false => Instruction::AllReduce { stage, round, bucket, token },
            });
        }
        self.joined += 1;
    }

    /// Joins the all-reduces of a round without items on this worker, once all earlier rounds are applied.
    fn join_idle_rounds(&mut self) {
        let (round, _) = self.next_join();
        let idle = |of: &Rounds| of.last.get(round as usize).is_some_and(Option::is_none);
        if self.stages.iter().all(idle) && self.reducing.is_empty() && !self.alone() {
            for _ in 0..self.stages.len() {
                self.reduce();
            }
        }
    }

    /// Waits for the all-reduces of the oldest round and steps.
    fn apply(&mut self) {
        let Some(&(round, ..)) = self.reducing.front() else { return };
        let rest = self.reducing.iter().position(|(other, ..)| *other != round).unwrap_or(self.reducing.len());
        let later = self.reducing.split_off(rest);
        let reduced = std::mem::replace(&mut self.reducing, later);
        // Other replicas may need this gather before they contribute to the awaited reductions.
        for &(round, stage, _) in &reduced {
            self.gather(stage, Version(round));
        }
        for &(_, stage, Token(first)) in &reduced {
            let tokens = (first..first + self.buckets(stage)).map(Token);
            self.out.extend(tokens.map(|token| Instruction::Wait { token }));
        }
        for &(round, stage, _) in &reduced {
            self.step(round, stage);
        }
        for (round, stage, _) in reduced {
            self.post_gather(stage, Version(round + 1));
        }
        self.applied = round + 1;
        self.join_idle_rounds();
    }

    fn shares(&self, stage: StageId) -> bool {
        self.lists.rule.stages[stage.index()].zero > 0
    }

    /// True if the round completed before this action started, so other replicas may wait for this worker's shards.
    fn is_complete(&self, round: u32, place: u32) -> bool {
        let rank = self.lists.rule.stages[self.stages[0].stage.index()].rank;
        let moment = self.lists.complete[rank.index()].get(round as usize);
        moment.is_some_and(|moment| *moment < self.lists.order.started[self.worker.index()][place as usize])
    }

    fn post_gather(&mut self, stage: StageId, version: Version) {
        if !self.shares(stage) {
            return;
        }
        let mut tokens = Vec::new();
        for bucket in (0..self.buckets(stage)).rev() {
            let token = self.token();
            self.out.push(Instruction::AllGather { stage, version, bucket, token });
            tokens.push(token);
        }
        self.gathering.push(Gathering { stage, version, tokens });
    }

    /// Waits for the all-gathers of a stage up to this version, and for those of other stages that block accumulation.
    fn gather(&mut self, stage: StageId, version: Version) {
        let rule = self.lists.rule;
        let is_awaited = |of: &Gathering| rule.stages[of.stage.index()].zero >= 2 && rule.schedule.flushes();
        let is_now = |of: &Gathering| (of.stage == stage && of.version <= version) || is_awaited(of);
        let (now, later) = std::mem::take(&mut self.gathering).into_iter().partition::<Vec<_>, _>(is_now);
        self.gathering = later;
        let tokens = now.into_iter().flat_map(|of| of.tokens);
        self.out.extend(tokens.map(|token| Instruction::Wait { token }));
    }

    fn step(&mut self, round: u32, stage: StageId) {
        let (from, to) = (Version(round), Version(round + 1));
        let count = self.lists.rule.count(stage, round);
        self.out.push(Instruction::Step { stage, round, from, to, count, in_place: false });
    }
}

/// Tokens by the action before which they are waited for, in posting order; one linked list per action.
struct Waits {
    /// First and last token of each list.
    ends: Vec<[Option<Token>; 2]>,
    /// For each token, the next in its list.
    next: Vec<Option<Token>>,
}

impl Waits {
    fn new(places: usize) -> Self {
        Self { ends: vec![[None; 2]; places + 1], next: Vec::new() }
    }

    fn add(&mut self, place: u32, token: Token) {
        self.next.resize(token.index() + 1, None);
        match &mut self.ends[place as usize] {
            [Some(_), Some(last)] => {
                self.next[last.index()] = Some(token);
                *last = token;
            }
            ends => *ends = [Some(token); 2],
        }
    }

    fn at(&self, place: u32) -> impl Iterator<Item = Token> + '_ {
        let first = self.ends[place as usize][0];
        std::iter::successors(first, |token| self.next[token.index()])
    }
}

/// Allocates activation slots; the lowest free one is taken.
#[derive(Default)]
struct Slots {
    free: BinaryHeap<Reverse<u32>>,
    used: u32,
    held: BTreeMap<MicrobatchId, Slot>,
}

impl Slots {
    fn take(&mut self, item: MicrobatchId) -> Slot {
        let slot = self.free.pop().map(|Reverse(slot)| Slot(slot)).unwrap_or_else(|| {
            self.used += 1;
            Slot(self.used - 1)
        });
        self.held.insert(item, slot);
        slot
    }

    fn of(&self, item: MicrobatchId) -> Slot {
        self.held.get(&item).copied().unwrap_or_default()
    }

    fn give(&mut self, item: MicrobatchId) -> Slot {
        // `play` guarantees that the forward comes first.
        let slot = self.held.remove(&item).unwrap_or_default();
        self.free.push(Reverse(slot.0));
        slot
    }
}
