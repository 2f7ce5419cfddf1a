//! From an order of work to programs: adds transfers, waits, all-reduces, steps, drops and slots.
//!
//! Around one piece of work a worker's list reads
//!
//! ```text
//! recv …            posted ahead of the work that needs it, so that transfers run beside computation
//! recompute 2F3     before 2B3 or 2I3, where stage 2 is recomputed: it needs none of what is waited for then
//! wait …            for Sends whose buffer is needed again, for the all-reduce (then step), for Recvs of this work, for weights
//! load, 2F3         or 2B3, or 2I3 and later 2W3
//! send …, all-reduce
//! ```
//!
//! Why this cannot wait for ever. Let the witness be the sequence in which `order` started all work, and let everything
//! before a piece of work on its worker happen at that work's moment.
//! - A Wait for a Recv stands before the work that needs the data: the sender's work was started and done before.
//! - A Wait for an activation's Send stands after the item's own backward, which needed the receiver's backward.
//! - In inference it stands before the forward that is as many later as items may be in flight, which `order` let start only when the
//!   receiver had begun with the item.
//! - A Wait for a gradient's Send stands before the sender's next backward at the stage: there is one outgoing gradient buffer;
//!   two, and the backward after the next, where the transfer takes longer than the forward beside which it runs. The receiver therefore posts its Recv at the latest at its last work before that moment; its own forward of the
//!   item is one such, so there always is one.
//! - A Wait for an all-reduce stands before the first work that needs the update, which `order` let start only after the round
//!   was complete, or at the end. A replica without an item in the round joins when it has applied the rounds before.
//! - Where replicas have shares, each steps, and gives its share of the version, before its first work after the round is complete: see
//!   `shares`.
//! - A worker with several stages runs all its work of a minibatch before that of the next. Its all-reduces are posted from the last
//!   stage to the first, on every replica alike, and its Steps come together when all of them are done, so that stages that share
//!   a parameter meet with nothing left to do for each other.
//!
//! So every Wait has what it waits for at an earlier moment, posts never block, and running the work in the witness's
//! order is one way through; since a Wait names what it waits for, every way gets through if one does.

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

/// How many pieces of work ahead a Recv is posted: a forward and a backward, the time in which one item passes in a
/// steady pipeline, so that a transfer may take as long as that without holding up anyone.
const AHEAD: u32 = 2;

/// The same in inference, where there are forwards only.
pub const NEXT: u32 = 1;

/// Turns the order into a program. The order must come from [`play`](crate::schedule::list_scheduler::play) of the same rule.
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

/// One transfer as its two ends see it: places in the two workers' lists of work.
#[derive(Clone, Copy)]
struct Transfer {
    edge: EdgeId,
    item: MicrobatchId,
    kind: Payload,
    peer: WorkerId,
    /// The place at which it is posted: before the receiver's work, after the sender's.
    post: u32,
    /// The place before which it is waited for.
    wait: u32,
    /// When its Send is posted, in the witness: both ends of a channel post in this order.
    made: u32,
}

/// The order with all transfers placed.
struct Lists<'a> {
    rule: &'a Rule,
    order: &'a WorkOrder,
    /// By worker: Recvs to post before a place in its work, Sends to post after it, in order.
    recvs: Vec<Vec<Transfer>>,
    sends: Vec<Vec<Transfer>>,
    /// By rank and round, where replicas have shares: see `shares`.
    complete: Vec<Vec<u32>>,
}

impl<'a> Lists<'a> {
    fn new(pipeline: &'a Pipeline, rule: &'a Rule, order: &'a WorkOrder, layout: &Layout) -> Self {
        let items = rule.items as usize;
        // Where each item's forward stands at each stage, and what makes its gradients.
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
        let mut lists = Self { rule, order, recvs: nothing.clone(), sends: nothing, complete };
        let next_backward = next_backwards(order);
        for (index, edge) in pipeline.edges.iter().enumerate() {
            for item in (0..rule.items).map(MicrobatchId) {
                let [from, to] = [edge.from, edge.to].map(|stage| layout.worker(stage, rule.replica(stage, item)));
                let [from_places, to_places] = [edge.from, edge.to].map(|s| place_of[s.index() * items + item.index()]);
                let [from_started, to_started] = [from, to].map(|worker| &order.started[worker.index()]);
                let id = EdgeId(index as u32);
                let (place, wait) = (from_places[0], to_places[0]);
                let made = from_started[place as usize];
                let post = wait.saturating_sub(if rule.schedule.trains() { AHEAD } else { NEXT });
                let freed = if rule.schedule.trains() {
                    from_places[1] + 1
                } else {
                    let posted = to_started[post as usize];
                    let after = from_started.partition_point(|&started| started <= posted) as u32;
                    // By then `order` saw all who listen begin with the item.
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
                let mut post = wait.saturating_sub(AHEAD);
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

/// Channels are first in, first out: Recvs of one channel are posted in the order of its Sends, earlier than the work would ask
/// where it takes items in another order.
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

/// For each piece of work, the place of the worker's next backward at the same stage, or the end of its list.
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

/// Where the rounds of one stage stand on a worker.
struct Rounds {
    stage: StageId,
    /// For each round, the item of this worker whose backward is its last, if it has one.
    last: Vec<Option<MicrobatchId>>,
    slots: Slots,
}

/// Writes the list of one worker.
struct Writer<'a> {
    lists: &'a Lists<'a>,
    worker: WorkerId,
    /// Its stages, in order.
    stages: Vec<Rounds>,
    out: Vec<Instruction>,
    tokens: u32,
    /// Tokens to wait for, and in inference slots that fall free, by the place before which they are.
    waits: Waits,
    frees: BTreeMap<u32, Vec<(StageId, Slot)>>,
    /// Rounds of stages whose all-reduce is posted and not yet applied, with the token of their first bucket: the tokens of the
    /// others follow.
    reducing: VecDeque<(u32, StageId, Token)>,
    /// Versions that are being gathered.
    gathering: Vec<Gathering>,
    /// Rounds of stages that are done here, by round and then from the last stage to the first, and not yet handed on.
    done: BTreeSet<(u32, Reverse<StageId>)>,
    /// Rounds of stages whose all-reduce is posted.
    joined: u32,
    /// Rounds applied.
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
            // What the backward makes first is on its way while it makes the rest.
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
            // In inference nothing is kept but what is being sent.
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

    /// Whether the item's backward is the last of its round here.
    fn is_last(&mut self, stage: StageId, item: MicrobatchId) -> bool {
        let round = self.lists.rule.round(stage, item);
        self.stage(stage).last[round as usize] == Some(item)
    }

    /// Notes that the item's round is done here.
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
        self.lists.rule.stages[self.stages[0].stage.index()].replicas == 1
    }

    /// Hands on the rounds that are done. Alone, the steps of a round can be made when its last stage is done. With others, the Wait
    /// stands before the first work that needs the update, so that nobody waits for slower replicas before the rule asks;
    /// gradients that wait for their step take the place of the version that they will make.
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

    /// The round and stage whose all-reduce comes next, on every replica alike.
    fn next_join(&self) -> (u32, Reverse<StageId>) {
        let stages = self.stages.len() as u32;
        let place = stages - 1 - self.joined % stages;
        (self.joined / stages, Reverse(self.stages[place as usize].stage))
    }

    fn buckets(&self, stage: StageId) -> u32 {
        self.lists.rule.stages[stage.index()].buckets
    }

    /// Posts the next all-reduce.
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

    /// A round in which this worker has no item: it joins the all-reduces as soon as all rounds before are applied.
    fn join_idle_rounds(&mut self) {
        let (round, _) = self.next_join();
        let idle = |of: &Rounds| of.last.get(round as usize).is_some_and(Option::is_none);
        if self.stages.iter().all(idle) && self.reducing.is_empty() && !self.alone() {
            for _ in 0..self.stages.len() {
                self.reduce();
            }
        }
    }

    /// Waits for the all-reduces of the oldest round and makes its steps.
    fn apply(&mut self) {
        let Some(&(round, ..)) = self.reducing.front() else { return };
        let rest = self.reducing.iter().position(|(other, ..)| *other != round).unwrap_or(self.reducing.len());
        let later = self.reducing.split_off(rest);
        let reduced = std::mem::replace(&mut self.reducing, later);
        // Others may wait until this is done before they give what this worker waits for next.
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

    /// Whether replicas have shares of what the stage holds.
    fn shares(&self, stage: StageId) -> bool {
        self.lists.rule.stages[stage.index()].zero > 0
    }

    /// Whether others may wait for this worker's shares of the round's version, now that this work begins.
    fn is_complete(&self, round: u32, place: u32) -> bool {
        let rank = self.lists.rule.stages[self.stages[0].stage.index()].rank;
        let moment = self.lists.complete[rank.index()].get(round as usize);
        moment.is_some_and(|moment| *moment < self.lists.order.started[self.worker.index()][place as usize])
    }

    /// Posts the gathering of a version, if it is in shares.
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

    /// Waits for what is being gathered of a stage, up to this version; of other stages for that without which nobody adds to their sums.
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

/// Tokens by the place in a worker's work before which they are waited for, in the order of posting: a chain for each place.
struct Waits {
    /// The first and the last token of each place.
    ends: Vec<[Option<Token>; 2]>,
    /// For each token the next of its place.
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

/// Places for saved activations: the lowest free one is taken.
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
        // An order that `play` accepted has the forward first.
        let slot = self.held.remove(&item).unwrap_or_default();
        self.free.push(Reverse(slot.0));
        slot
    }
}
