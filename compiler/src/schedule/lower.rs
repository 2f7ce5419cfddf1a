//! From an order of work to programs: adds transfers, waits, all-reduces, steps, drops and slots.
//!
//! Around one piece of work a worker's list reads
//!
//! ```text
//! recv …            posted ahead of the work that needs it, so that transfers run beside computation
//! wait …            for Sends whose buffer is needed again, for the all-reduce (then step), for Recvs of this work
//! load, 2F3         or 2B3
//! send …, all-reduce
//! ```
//!
//! Why this cannot wait for ever. Let the witness be the sequence in which `order` started all work, and let everything
//! before a piece of work on its worker happen at that work's moment.
//! - A Wait for a Recv stands before the work that needs the data: the sender's work was started and done before.
//! - A Wait for an activation's Send stands after the item's own backward, which needed the receiver's backward.
//! - A Wait for a gradient's Send stands before the sender's next backward: there is one outgoing gradient buffer; two,
//!   and the backward after the next, where the transfer takes longer than the forward beside which it runs. The receiver therefore posts its Recv at the latest at its last work before that moment; its own forward of the
//!   item is one such, so there always is one.
//! - A Wait for an all-reduce stands before the first work that needs the update, which `order` let start only after the round
//!   was complete, or at the end. A replica without an item in the round joins when it has applied the rounds before.
//!
//! So every Wait has what it waits for at an earlier moment, posts never block, and running the work in the witness's
//! order is one way through; since a Wait names what it waits for, every way gets through if one does.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

use crate::plan::StageId;
use crate::schedule::order::{Layout, Order, Work};
use crate::schedule::rule::Rule;
use crate::schedule::{
    EdgeId, Instruction, MicrobatchId, Payload, Pipeline, Program, ProgramStage, Slot, Token, Version, WorkerId,
    WorkerProgram,
};

/// How many pieces of work ahead a Recv is posted: a forward and a backward, the time in which one item passes in a
/// steady pipeline, so that a transfer may take as long as that without holding up anyone.
const AHEAD: u32 = 2;

/// Turns the order into a program. The order must come from [`play`](crate::schedule::order::play) of the same rule.
pub fn lower(pipeline: &Pipeline, rule: &Rule, order: &Order) -> Program {
    let layout = Layout::new(pipeline.stages.iter().map(|stage| stage.replicas));
    let lists = Lists::new(pipeline, rule, order, &layout);
    let mut workers = Vec::with_capacity(layout.workers());
    for (index, shape) in pipeline.stages.iter().enumerate() {
        for replica in 0..shape.replicas {
            let stage = StageId(index as u32);
            let instructions = Writer::new(&lists, stage, layout.worker(stage, replica)).write();
            workers.push(WorkerProgram { stage, replica, instructions });
        }
    }
    let stages = rule.stages.iter().map(|s| ProgramStage { replicas: s.replicas, cap: s.cap }).collect();
    let edges = pipeline.edges.iter().map(|edge| (edge.from, edge.to)).collect();
    Program { schedule: rule.schedule, items: rule.items, microbatches: rule.microbatches, stages, edges, workers }
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
}

/// The order with all transfers placed.
struct Lists<'a> {
    pipeline: &'a Pipeline,
    rule: &'a Rule,
    order: &'a Order,
    /// By worker: Recvs to post before a place in its work, Sends to post after it, in order.
    recvs: Vec<Vec<Transfer>>,
    sends: Vec<Vec<Transfer>>,
}

impl<'a> Lists<'a> {
    fn new(pipeline: &'a Pipeline, rule: &'a Rule, order: &'a Order, layout: &Layout) -> Self {
        let items = rule.items as usize;
        let mut place_of = vec![[0u32; 2]; pipeline.stages.len() * items];
        for (worker, work) in order.work.iter().enumerate() {
            let stage = layout.stage(WorkerId(worker as u32)).index();
            for (place, work) in work.iter().enumerate() {
                place_of[stage * items + work.item.index()][usize::from(work.kind == Payload::Gradient)] = place as u32;
            }
        }
        let nothing = vec![Vec::new(); layout.workers()];
        let mut lists = Self { pipeline, rule, order, recvs: nothing.clone(), sends: nothing };
        let next_backward = next_backwards(order);
        for item in (0..rule.items).map(MicrobatchId) {
            for (index, edge) in pipeline.edges.iter().enumerate() {
                let [from, to] = [edge.from, edge.to].map(|stage| layout.worker(stage, rule.replica(stage, item)));
                let [from_places, to_places] = [edge.from, edge.to].map(|s| place_of[s.index() * items + item.index()]);
                let id = EdgeId(index as u32);
                let (made, wait) = (from_places[0], to_places[0]);
                let post = wait.saturating_sub(AHEAD);
                let freed = if rule.schedule.trains() {
                    from_places[1] + 1
                } else {
                    let posted = order.started[to.index()][post as usize];
                    let after = order.started[from.index()].partition_point(|&started| started <= posted) as u32;
                    after.max(made + 1)
                };
                let transfer = Transfer { edge: id, item, kind: Payload::Activation, peer: from, post, wait };
                lists.recvs[to.index()].push(transfer);
                lists.sends[from.index()].push(Transfer { peer: to, post: made, wait: freed, ..transfer });
                if !rule.schedule.trains() {
                    continue;
                }
                let (made, wait) = (to_places[1], from_places[1]);
                let next = &next_backward[to.index()];
                let mut freed = next[made as usize];
                if edge.backward_us > pipeline.stages[edge.to.index()].forward {
                    freed = next.get(freed as usize).copied().unwrap_or(freed);
                }
                let mut post = wait.saturating_sub(AHEAD);
                if let Some(&moment) = order.started[to.index()].get(freed as usize) {
                    let latest = order.started[from.index()].partition_point(|&started| started < moment);
                    post = post.min(latest.saturating_sub(1) as u32);
                }
                let transfer = Transfer { edge: id, item, kind: Payload::Gradient, peer: to, post, wait };
                lists.recvs[from.index()].push(transfer);
                lists.sends[to.index()].push(Transfer { peer: from, post: made, wait: freed, ..transfer });
            }
        }
        // Channels are first in, first out: Recvs posted at one place go in the order in which they are needed.
        for transfers in lists.recvs.iter_mut().chain(&mut lists.sends) {
            transfers.sort_by_key(|transfer| (transfer.post, transfer.wait, transfer.edge));
        }
        lists
    }
}

/// For each piece of work, the place of the worker's next backward after it, or the end of its list.
fn next_backwards(order: &Order) -> Vec<Vec<u32>> {
    let of_worker = |work: &Vec<Work>| {
        let mut next = work.len() as u32;
        let mut places: Vec<u32> = Vec::with_capacity(work.len());
        for (place, work) in work.iter().enumerate().rev() {
            places.push(next);
            if work.kind == Payload::Gradient {
                next = place as u32;
            }
        }
        places.reverse();
        places
    };
    order.work.iter().map(of_worker).collect()
}

/// Writes the list of one worker.
struct Writer<'a> {
    lists: &'a Lists<'a>,
    stage: StageId,
    worker: WorkerId,
    out: Vec<Instruction>,
    tokens: u32,
    /// Tokens to wait for, and in inference slots that fall free, by the place before which they are.
    waits: BTreeMap<u32, Vec<Token>>,
    frees: BTreeMap<u32, Vec<Slot>>,
    /// Rounds whose all-reduce is posted and not yet applied.
    reducing: VecDeque<(u32, Token)>,
    /// Rounds whose all-reduce is posted.
    joined: u32,
    /// Rounds applied.
    applied: u32,
    /// For each round, the item of this worker whose backward is its last, if it has one.
    last_of_round: Vec<Option<MicrobatchId>>,
    slots: Slots,
}

impl<'a> Writer<'a> {
    fn new(lists: &'a Lists<'a>, stage: StageId, worker: WorkerId) -> Self {
        let work = &lists.order.work[worker.index()];
        let mut last_of_round = vec![None; lists.rule.rounds(stage) as usize];
        for work in work.iter().filter(|work| work.kind == Payload::Gradient) {
            last_of_round[lists.rule.round(stage, work.item) as usize] = Some(work.item);
        }
        Self {
            lists,
            stage,
            worker,
            out: Vec::with_capacity(work.len() * 6),
            tokens: 0,
            waits: BTreeMap::new(),
            frees: BTreeMap::new(),
            reducing: VecDeque::new(),
            joined: 0,
            applied: 0,
            last_of_round,
            slots: Slots::default(),
        }
    }

    fn write(mut self) -> Vec<Instruction> {
        let lists = self.lists;
        self.join_idle_round();
        let work = &lists.order.work[self.worker.index()];
        let mut recvs = lists.recvs[self.worker.index()].iter().peekable();
        let mut sends = lists.sends[self.worker.index()].iter().peekable();
        for (place, &Work { item, kind }) in (0u32..).zip(work) {
            while let Some(&Transfer { edge, item, kind, peer, wait, .. }) = recvs.next_if(|recv| recv.post == place) {
                let token = self.token();
                self.out.push(Instruction::Recv { edge, item, kind, peer, token });
                self.waits.entry(wait).or_default().push(token);
            }
            let version = lists.rule.version(self.stage, item);
            let needs_update = |&(round, _): &(u32, Token)| match kind {
                Payload::Activation => version.0 > round,
                Payload::Gradient => !lists.rule.schedule.is_round_robin(),
            };
            while self.reducing.front().is_some_and(needs_update) {
                self.apply();
            }
            self.wait(place);
            let stage = self.stage;
            let mut held = None;
            match kind {
                Payload::Activation => {
                    let slot = self.slots.take(item);
                    self.out.push(Instruction::Load { item });
                    self.out.push(Instruction::Forward { stage, item, version, slot });
                    held = Some(slot).filter(|_| !lists.rule.schedule.trains());
                }
                Payload::Gradient => {
                    let slot = self.slots.give(item);
                    self.out.push(Instruction::Backward { stage, item, version, slot });
                }
            }
            let mut free = place + 1;
            while let Some(&Transfer { edge, item, kind, peer, wait, .. }) = sends.next_if(|send| send.post == place) {
                let token = self.token();
                self.out.push(Instruction::Send { edge, item, kind, peer, token });
                self.waits.entry(wait).or_default().push(token);
                free = free.max(wait);
            }
            // In inference nothing is kept but what is being sent.
            self.frees.entry(free).or_default().extend(held);
            if kind == Payload::Gradient {
                let round = lists.rule.round(stage, item);
                if self.last_of_round[round as usize] == Some(item) {
                    self.finish_round(round);
                }
            }
        }
        self.wait(work.len() as u32);
        while !self.reducing.is_empty() {
            self.apply();
        }
        self.drop_versions()
    }

    fn token(&mut self) -> Token {
        let token = Token(self.tokens);
        self.tokens += 1;
        token
    }

    fn wait(&mut self, place: u32) {
        for token in self.waits.remove(&place).unwrap_or_default() {
            self.out.push(Instruction::Wait { token });
        }
        for slot in self.frees.remove(&place).unwrap_or_default() {
            self.slots.free.push(Reverse(slot.0));
        }
    }

    fn alone(&self) -> bool {
        self.lists.pipeline.stages[self.stage.index()].replicas == 1
    }

    /// After the last local backward of a round. Alone, the step can be done at once. With others, the Wait stands before
    /// the first work that needs the update, so that nobody waits for slower replicas before the rule asks; gradients
    /// that wait for their step take the place of the version that they will make.
    fn finish_round(&mut self, round: u32) {
        if self.alone() {
            self.step(round);
        } else {
            self.reduce(round);
        }
    }

    fn reduce(&mut self, round: u32) {
        let token = self.token();
        self.out.push(Instruction::AllReduce { stage: self.stage, round, token });
        self.reducing.push_back((round, token));
        self.joined += 1;
    }

    /// A round in which this worker has no item: it joins the all-reduce as soon as all rounds before are applied.
    fn join_idle_round(&mut self) {
        let idle = self.last_of_round.get(self.joined as usize).is_some_and(Option::is_none);
        if idle && self.reducing.is_empty() && !self.alone() {
            self.reduce(self.joined);
        }
    }

    fn apply(&mut self) {
        if let Some((round, token)) = self.reducing.pop_front() {
            self.out.push(Instruction::Wait { token });
            self.step(round);
            self.join_idle_round();
        }
    }

    fn step(&mut self, round: u32) {
        let (from, to) = (Version(round), Version(round + 1));
        let count = self.lists.rule.count(self.stage, round);
        self.out.push(Instruction::Step { stage: self.stage, round, from, to, count, in_place: false });
        self.applied = round + 1;
    }

    /// Gives every version but the last its end: after its last use, or in the Step that makes the next from it.
    fn drop_versions(self) -> Vec<Instruction> {
        let mut last_use = vec![0; self.applied as usize + 1];
        for (at, instruction) in self.out.iter().enumerate() {
            match *instruction {
                Instruction::Forward { version, .. }
                | Instruction::Backward { version, .. }
                | Instruction::Step { from: version, .. } => last_use[version.index()] = at,
                _ => {}
            }
        }
        last_use.pop();
        let mut ends: Vec<(usize, u32)> = last_use.into_iter().zip(0..).collect();
        ends.sort_unstable();
        let mut ends = ends.into_iter().peekable();
        let mut out = Vec::with_capacity(self.out.len() + self.applied as usize);
        for (at, mut instruction) in self.out.into_iter().enumerate() {
            let ending = ends.next_if(|&(end, _)| end == at);
            if let (Instruction::Step { in_place, .. }, Some(_)) = (&mut instruction, ending) {
                *in_place = true;
                out.push(instruction);
                continue;
            }
            out.push(instruction);
            if let Some((_, version)) = ending {
                out.push(Instruction::Drop { version: Version(version) });
            }
        }
        out
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

    fn give(&mut self, item: MicrobatchId) -> Slot {
        // An order that `play` accepted has the forward first.
        let slot = self.held.remove(&item).unwrap_or_default();
        self.free.push(Reverse(slot.0));
        slot
    }
}
