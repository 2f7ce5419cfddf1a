//! The order of forwards and backwards on each worker, found by playing the pipeline on a simulated clock.
//!
//! A worker that is free takes work at once if there is any that may start: [`Choice::Greedy`] prefers a backward, then a
//! forward under the in-flight cap; [`Choice::Fixed`] takes the next of a given list and waits for it. Forwards and
//! backwards of one worker each go in item order. A forward may start when
//! - every incoming edge has brought its activations,
//! - the version that the [`Rule`] gives it exists: the round before has been reduced over all replicas and applied,
//! - fewer than cap items are in flight on the worker.
//!
//! A backward may start when its forward is done and every outgoing edge has brought its gradients; where a round is a whole
//! minibatch, also only when the round before has been applied, since two minibatches' gradients beside two versions would be
//! more than a plan allows for. The clock chooses order only; versions come from the rule, so times
//! that are wrong make a program slow, never another program's weights.
//!
//! The result carries, for each piece of work, its place in the order in which all work was started. That sequence is the
//! witness with which `lower` places Recvs and Waits so that no program of ours can wait for ever.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

use crate::plan::StageId;
use crate::schedule::rule::Rule;
use crate::schedule::{MicrobatchId, Payload, Pipeline, ScheduleError, WorkerId};

/// One piece of computation of one worker: [`Payload::Activation`] stands for the forward that makes it,
/// [`Payload::Gradient`] for the backward.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Work {
    /// The item.
    pub item: MicrobatchId,
    /// What is computed.
    pub kind: Payload,
}

impl Work {
    /// The item's forward.
    pub fn forward(item: MicrobatchId) -> Self {
        Self { item, kind: Payload::Activation }
    }

    /// The item's backward.
    pub fn backward(item: MicrobatchId) -> Self {
        Self { item, kind: Payload::Gradient }
    }
}

/// How a free worker chooses.
#[derive(Clone, Copy, Debug)]
pub enum Choice<'a> {
    /// Work-conserving: a backward if one may start, else a forward.
    Greedy,
    /// The next of its list, by [`WorkerId`]; caps are not looked at.
    Fixed(&'a [Vec<Work>]),
}

/// What every worker computes, in order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Order {
    /// The work of each worker.
    pub work: Vec<Vec<Work>>,
    /// For each piece of work, how many others were started before it, over all workers.
    pub started: Vec<Vec<u32>>,
}

/// The ids of workers, from stage and replica.
#[derive(Clone, Debug)]
pub struct Layout {
    first: Vec<u32>,
}

impl Layout {
    /// Stages in order, replica minor.
    pub fn new(replicas: impl IntoIterator<Item = u32>) -> Self {
        let mut first = vec![0];
        let mut next = 0;
        for r in replicas {
            next += r;
            first.push(next);
        }
        Self { first }
    }

    /// Workers in all.
    pub fn workers(&self) -> usize {
        self.first[self.first.len() - 1] as usize
    }

    /// The worker with this place.
    pub fn worker(&self, stage: StageId, replica: u32) -> WorkerId {
        WorkerId(self.first[stage.index()] + replica)
    }

    /// The workers of a stage.
    pub fn replicas(&self, stage: StageId) -> impl Iterator<Item = WorkerId> + use<> {
        (self.first[stage.index()]..self.first[stage.index() + 1]).map(WorkerId)
    }

    /// The stage of a worker.
    pub fn stage(&self, worker: WorkerId) -> StageId {
        StageId(self.first.partition_point(|&first| first <= worker.0) as u32 - 1)
    }
}

/// Plays the pipeline and says who computed what when. Fails if some work never may start, which no rule does to a
/// greedy choice: the first unfinished item always finds all earlier ones done.
pub fn play(pipeline: &Pipeline, rule: &Rule, choice: Choice<'_>) -> Result<Order, ScheduleError> {
    Player::new(pipeline, rule, choice).run()
}

/// A clock in millionths of a microsecond: equal sums of times compare equal.
fn ticks(microseconds: f64) -> u64 {
    (microseconds * 1e6).round() as u64
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Done(WorkerId),
    Arrived(StageId, MicrobatchId, Payload),
    Updated(StageId, u32),
}

struct Hands {
    stage: StageId,
    forwards: Vec<MicrobatchId>,
    next_forward: usize,
    next_backward: usize,
    next_fixed: usize,
    in_flight: u32,
    running: Option<Work>,
    work: Vec<Work>,
    started: Vec<u32>,
}

struct Player<'a> {
    pipeline: &'a Pipeline,
    rule: &'a Rule,
    choice: Choice<'a>,
    layout: Layout,
    incoming: Vec<Vec<usize>>,
    outgoing: Vec<Vec<usize>>,
    hands: Vec<Hands>,
    /// For each stage and item, what its forward and its backward still wait for.
    forward_needs: Vec<u32>,
    backward_needs: Vec<u32>,
    /// For each stage, items whose backward is missing in each round, rounds being reduced or done, and the newest version.
    missing: Vec<Vec<u32>>,
    reduced: Vec<u32>,
    newest: Vec<u32>,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    now: u64,
    posted: u64,
    count: u32,
    touched: BTreeSet<WorkerId>,
}

impl<'a> Player<'a> {
    fn new(pipeline: &'a Pipeline, rule: &'a Rule, choice: Choice<'a>) -> Self {
        let stages = pipeline.stages.len();
        let items = rule.items as usize;
        let layout = Layout::new(pipeline.stages.iter().map(|stage| stage.replicas));
        let mut incoming = vec![Vec::new(); stages];
        let mut outgoing = vec![Vec::new(); stages];
        for (index, edge) in pipeline.edges.iter().enumerate() {
            incoming[edge.to.index()].push(index);
            outgoing[edge.from.index()].push(index);
        }
        let mut hands = Vec::with_capacity(layout.workers());
        let mut forward_needs = Vec::with_capacity(stages * items);
        let mut backward_needs = Vec::with_capacity(stages * items);
        let mut missing = Vec::with_capacity(stages);
        for (index, shape) in pipeline.stages.iter().enumerate() {
            let stage = StageId(index as u32);
            for replica in 0..shape.replicas {
                hands.push(Hands {
                    stage,
                    forwards: rule.share(stage, replica).collect(),
                    next_forward: 0,
                    next_backward: 0,
                    next_fixed: 0,
                    in_flight: 0,
                    running: None,
                    work: Vec::new(),
                    started: Vec::new(),
                });
            }
            forward_needs.extend(std::iter::repeat_n(incoming[index].len() as u32, items));
            // One more for its own forward.
            backward_needs.extend(std::iter::repeat_n(outgoing[index].len() as u32 + 1, items));
            missing.push((0..rule.rounds(stage)).map(|round| rule.count(stage, round)).collect());
        }
        Self {
            pipeline,
            rule,
            choice,
            incoming,
            outgoing,
            touched: (0..layout.workers() as u32).map(WorkerId).collect(),
            layout,
            hands,
            forward_needs,
            backward_needs,
            missing,
            reduced: vec![0; stages],
            newest: vec![0; stages],
            events: BinaryHeap::new(),
            now: 0,
            posted: 0,
            count: 0,
        }
    }

    fn run(mut self) -> Result<Order, ScheduleError> {
        loop {
            // Everything that happens at this moment is known before anyone chooses.
            while let Some(&Reverse((time, _, event))) = self.events.peek() {
                if time > self.now {
                    break;
                }
                self.events.pop();
                self.happen(event);
            }
            for worker in std::mem::take(&mut self.touched) {
                self.start(worker);
            }
            match self.events.peek() {
                Some(&Reverse((time, ..))) => self.now = time,
                None => break,
            }
        }
        self.finished()?;
        let (work, started) = self.hands.into_iter().map(|hands| (hands.work, hands.started)).unzip();
        Ok(Order { work, started })
    }

    fn finished(&self) -> Result<(), ScheduleError> {
        for (index, hands) in self.hands.iter().enumerate() {
            let (stage, replica) = (hands.stage, index as u32 - self.layout.worker(hands.stage, 0).0);
            let next = match self.choice {
                Choice::Fixed(lists) => lists[index].get(hands.next_fixed).copied(),
                Choice::Greedy if self.rule.schedule.trains() => {
                    hands.forwards.get(hands.next_backward).map(|&item| Work::backward(item))
                }
                Choice::Greedy => hands.forwards.get(hands.next_forward).map(|&item| Work::forward(item)),
            };
            if let Some(Work { item, kind }) = next {
                let letter = if kind == Payload::Activation { 'F' } else { 'B' };
                let worker = format!("{}.{replica}", stage.0);
                return Err(ScheduleError::Stuck { worker, at: format!("{}{letter}{}", stage.0, item.0) });
            }
        }
        Ok(())
    }

    fn post(&mut self, after: u64, event: Event) {
        self.events.push(Reverse((self.now.saturating_add(after), self.posted, event)));
        self.posted += 1;
    }

    fn at(&self, stage: StageId, item: MicrobatchId) -> usize {
        stage.index() * self.rule.items as usize + item.index()
    }

    fn worker(&self, stage: StageId, item: MicrobatchId) -> WorkerId {
        self.layout.worker(stage, self.rule.replica(stage, item))
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Done(worker) => {
                self.touched.insert(worker);
                let hands = &mut self.hands[worker.index()];
                let stage = hands.stage;
                if let Some(work) = hands.running.take() {
                    match work.kind {
                        Payload::Activation => self.forward_done(stage, work.item),
                        Payload::Gradient => {
                            hands.in_flight -= 1;
                            self.backward_done(stage, work.item);
                        }
                    }
                }
            }
            Event::Arrived(stage, item, kind) => self.arrive(stage, item, kind),
            Event::Updated(stage, round) => {
                self.newest[stage.index()] = round + 1;
                self.touched.extend(self.layout.replicas(stage));
            }
        }
    }

    fn arrive(&mut self, stage: StageId, item: MicrobatchId, kind: Payload) {
        let at = self.at(stage, item);
        match kind {
            Payload::Activation => self.forward_needs[at] -= 1,
            Payload::Gradient => self.backward_needs[at] -= 1,
        }
        self.touched.insert(self.worker(stage, item));
    }

    fn forward_done(&mut self, stage: StageId, item: MicrobatchId) {
        let at = self.at(stage, item);
        self.backward_needs[at] -= 1;
        for place in 0..self.outgoing[stage.index()].len() {
            let edge = &self.pipeline.edges[self.outgoing[stage.index()][place]];
            self.post(ticks(edge.forward_us), Event::Arrived(edge.to, item, Payload::Activation));
        }
    }

    fn backward_done(&mut self, stage: StageId, item: MicrobatchId) {
        for place in 0..self.incoming[stage.index()].len() {
            let edge = &self.pipeline.edges[self.incoming[stage.index()][place]];
            self.post(ticks(edge.backward_us), Event::Arrived(edge.from, item, Payload::Gradient));
        }
        let round = self.rule.round(stage, item);
        self.missing[stage.index()][round as usize] -= 1;
        let shape = &self.pipeline.stages[stage.index()];
        let reduce = if shape.replicas > 1 { ticks(shape.all_reduce) } else { 0 };
        // A short last round may be complete before the one before it; updates go in order.
        while let Some(0) = self.missing[stage.index()].get(self.reduced[stage.index()] as usize) {
            self.post(reduce, Event::Updated(stage, self.reduced[stage.index()]));
            self.reduced[stage.index()] += 1;
        }
    }

    fn ready(&self, stage: StageId, work: Work) -> bool {
        let at = self.at(stage, work.item);
        let newest = self.newest[stage.index()];
        match work.kind {
            Payload::Activation => self.forward_needs[at] == 0 && self.rule.version(stage, work.item).0 <= newest,
            Payload::Gradient => {
                let buffer = self.rule.schedule.is_round_robin() || self.rule.round(stage, work.item) <= newest;
                self.backward_needs[at] == 0 && buffer
            }
        }
    }

    fn choose(&self, worker: WorkerId) -> Option<Work> {
        let hands = &self.hands[worker.index()];
        if let Choice::Fixed(lists) = self.choice {
            return lists[worker.index()].get(hands.next_fixed).copied().filter(|&work| self.ready(hands.stage, work));
        }
        let backward = hands.forwards.get(hands.next_backward).map(|&item| Work::backward(item));
        let forward = hands.forwards.get(hands.next_forward).map(|&item| Work::forward(item));
        let may = |work: &Work| self.ready(hands.stage, *work);
        let trains = self.rule.schedule.trains();
        let room = hands.in_flight < self.pipeline.stages[hands.stage.index()].cap;
        backward.filter(|work| trains && may(work)).or_else(|| forward.filter(|work| room && may(work)))
    }

    fn start(&mut self, worker: WorkerId) {
        if self.hands[worker.index()].running.is_some() {
            return;
        }
        let Some(work) = self.choose(worker) else { return };
        let hands = &mut self.hands[worker.index()];
        let stage = hands.stage;
        hands.running = Some(work);
        hands.next_fixed += 1;
        hands.work.push(work);
        hands.started.push(self.count);
        self.count += 1;
        let shape = &self.pipeline.stages[stage.index()];
        match work.kind {
            Payload::Activation => {
                hands.next_forward += 1;
                // A stage that nobody listens to keeps nothing in inference.
                if self.rule.schedule.trains() || !self.outgoing[stage.index()].is_empty() {
                    hands.in_flight += 1;
                }
                if !self.rule.schedule.trains() {
                    self.take_inputs(stage, work.item);
                }
                self.post(ticks(shape.forward), Event::Done(worker));
            }
            Payload::Gradient => {
                hands.next_backward += 1;
                self.post(ticks(shape.backward), Event::Done(worker));
            }
        }
    }

    /// In inference an item is in flight on a worker until all who listen have begun with it.
    fn take_inputs(&mut self, stage: StageId, item: MicrobatchId) {
        for place in 0..self.incoming[stage.index()].len() {
            let from = self.pipeline.edges[self.incoming[stage.index()][place]].from;
            let at = self.at(from, item);
            self.backward_needs[at] -= 1;
            if self.backward_needs[at] == 0 {
                let sender = self.worker(from, item);
                self.hands[sender.index()].in_flight -= 1;
                self.touched.insert(sender);
            }
        }
    }
}
