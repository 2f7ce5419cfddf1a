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
//! - A Wait for a gradient's Send stands before the sender's next backward (there is one outgoing gradient buffer). The
//!   receiver therefore posts its Recv at the latest at its last work before that moment; its own forward of the
//!   item is one such, so there always is one.
//! - A Wait for an all-reduce stands before the first work that `order` let start only after the round was complete.
//!
//! So every Wait has what it waits for at an earlier moment, posts never block, and running the work in the witness's
//! order is one way through; since a Wait names what it waits for, every way gets through if one does.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::schedule::order::{Layout, Order, Work};
use crate::schedule::rule::Rule;
use crate::schedule::{
    EdgeId, Instruction, MicrobatchId, Payload, Pipeline, Program, ProgramStage, Slot, StageId, Token, Version,
    WorkerId, WorkerProgram,
};

/// How many pieces of work ahead a Recv is posted: a forward and a backward, the time in which one item passes in a
/// steady pipeline, so that a transfer may take as long as that without holding up anyone.
const AHEAD: usize = 2;

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
    /// The receiver's work that needs it, or the sender's place to wait for it.
    place: u32,
}

/// The order with all transfers placed.
struct Lists<'a> {
    pipeline: &'a Pipeline,
    rule: &'a Rule,
    order: &'a Order,
    /// By worker, by place in its work: Recvs to post before that work, Sends to post after it.
    recvs: Vec<Vec<Vec<Transfer>>>,
    sends: Vec<Vec<Vec<Transfer>>>,
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
        let empty = |_| order.work.iter().map(|work| vec![Vec::new(); work.len()]).collect::<Vec<_>>();
        let [recvs, sends] = [0, 1].map(empty);
        let mut lists = Self { pipeline, rule, order, recvs, sends };
        let next_backward = next_backwards(order);
        for item in (0..rule.items).map(MicrobatchId) {
            for (index, edge) in pipeline.edges.iter().enumerate() {
                let [from, to] = [edge.from, edge.to].map(|stage| layout.worker(stage, rule.replica(stage, item)));
                let [from_places, to_places] = [edge.from, edge.to].map(|s| place_of[s.index() * items + item.index()]);
                let edge = EdgeId(index as u32);
                let needed = to_places[0];
                let post = needed.saturating_sub(AHEAD as u32);
                let freed = if rule.schedule.trains() {
                    from_places[1] + 1
                } else {
                    let posted = order.started[to.index()][post as usize];
                    let after = order.started[from.index()].partition_point(|&started| started <= posted) as u32;
                    after.max(from_places[0] + 1)
                };
                let kind = Payload::Activation;
                lists.recvs[to.index()][post as usize].push(Transfer { edge, item, kind, peer: from, place: needed });
                lists.sends[from.index()][from_places[0] as usize].push(Transfer {
                    edge,
                    item,
                    kind,
                    peer: to,
                    place: freed,
                });
                if rule.schedule.trains() {
                    let freed = next_backward[to.index()][to_places[1] as usize];
                    let needed = from_places[1];
                    let mut post = needed.saturating_sub(AHEAD as u32);
                    if let Some(&moment) = order.started[to.index()].get(freed as usize) {
                        let latest = order.started[from.index()].partition_point(|&started| started < moment);
                        post = post.min(latest.saturating_sub(1) as u32);
                    }
                    let kind = Payload::Gradient;
                    lists.recvs[from.index()][post as usize].push(Transfer {
                        edge,
                        item,
                        kind,
                        peer: to,
                        place: needed,
                    });
                    lists.sends[to.index()][to_places[1] as usize].push(Transfer {
                        edge,
                        item,
                        kind,
                        peer: from,
                        place: freed,
                    });
                }
            }
        }
        // Channels are first in, first out: Recvs posted at one place go in the order in which they are needed.
        for recvs in lists.recvs.iter_mut().flatten() {
            recvs.sort_by_key(|recv| (recv.place, recv.edge));
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
    /// Tokens to wait for before each piece of work; one more for the end.
    waits: Vec<Vec<Token>>,
    /// In inference, slots that fall free before each piece of work.
    frees: Vec<Vec<Slot>>,
    /// The round whose all-reduce is posted and not yet applied.
    reducing: Option<(u32, Token)>,
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
            waits: vec![Vec::new(); work.len() + 1],
            frees: vec![Vec::new(); work.len() + 1],
            reducing: None,
            applied: 0,
            last_of_round,
            slots: Slots::default(),
        }
    }

    fn write(mut self) -> Vec<Instruction> {
        let lists = self.lists;
        self.join_idle_round();
        for (place, &work) in lists.order.work[self.worker.index()].iter().enumerate() {
            let Work { item, kind } = work;
            for &recv in &lists.recvs[self.worker.index()][place] {
                let token = self.token();
                let Transfer { edge, item, kind, peer, .. } = recv;
                self.out.push(Instruction::Recv { edge, item, kind, peer, token });
                self.waits[recv.place as usize].push(token);
            }
            let version = lists.rule.version(self.stage, item);
            while self.reducing.is_some_and(|(round, _)| kind == Payload::Gradient || version.0 > round) {
                self.apply();
            }
            self.wait(place);
            let stage = self.stage;
            match kind {
                Payload::Activation => {
                    let slot = self.slots.take(item);
                    self.out.push(Instruction::Load { item });
                    self.out.push(Instruction::Forward { stage, item, version, slot });
                    if !lists.rule.schedule.trains() {
                        let sends = lists.sends[self.worker.index()][place].iter();
                        let free = sends.map(|send| send.place as usize).max().unwrap_or(place + 1);
                        self.frees[free].push(slot);
                    }
                }
                Payload::Gradient => {
                    let slot = self.slots.give(item);
                    self.out.push(Instruction::Backward { stage, item, version, slot });
                }
            }
            for &send in &lists.sends[self.worker.index()][place] {
                let token = self.token();
                let Transfer { edge, item, kind, peer, .. } = send;
                self.out.push(Instruction::Send { edge, item, kind, peer, token });
                self.waits[send.place as usize].push(token);
            }
            if kind == Payload::Gradient {
                let round = lists.rule.round(stage, item);
                if self.last_of_round[round as usize] == Some(item) {
                    self.finish_round(round);
                }
            }
        }
        self.wait(self.waits.len() - 1);
        while self.reducing.is_some() {
            self.apply();
        }
        self.drop_versions()
    }

    fn token(&mut self) -> Token {
        let token = Token(self.tokens);
        self.tokens += 1;
        token
    }

    fn wait(&mut self, place: usize) {
        for token in std::mem::take(&mut self.waits[place]) {
            self.out.push(Instruction::Wait { token });
        }
        for slot in std::mem::take(&mut self.frees[place]) {
            self.slots.free.push(Reverse(slot.0));
        }
    }

    fn alone(&self) -> bool {
        self.lists.pipeline.stages[self.stage.index()].replicas == 1
    }

    /// After the last local backward of a round. Alone, the step can be done at once; with others, the Wait stands where
    /// the update or the gradient buffer is needed, so that nobody waits for slower replicas more than the rule asks.
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
        self.reducing = Some((round, token));
    }

    /// A round in which this worker has no item: it joins the all-reduce as soon as the round before is applied.
    fn join_idle_round(&mut self) {
        let next = self.applied as usize;
        if !self.alone() && self.last_of_round.get(next).is_some_and(Option::is_none) {
            self.reduce(self.applied);
        }
    }

    fn apply(&mut self) {
        if let Some((round, token)) = self.reducing.take() {
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
    held: std::collections::BTreeMap<MicrobatchId, Slot>,
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
