//! List scheduler: orders the forwards and backwards of each worker by simulating the pipeline.
//!
//! A free worker starts a ready action at once. [`Choice::Greedy`] prefers a backward, then a forward within the
//! in-flight cap, then (if split) a weight-gradient pass. [`Choice::Fixed`] takes the next action of a given list and
//! waits for it. Under a greedy choice a worker has one stage, and each phase goes in item order.
//!
//! A forward is ready when
//! - all incoming edges have delivered its activations,
//! - the weight version that the [`Rule`] gives it exists: the round before has been all-reduced and applied,
//! - fewer than cap items are in flight on the worker.
//!
//! A backward is ready when its forward is done and all outgoing edges have delivered its gradients; a weight-gradient
//! pass when the input-gradient pass is done. If a round is a whole minibatch or weights are not stashed, it also waits
//! until the previous round is applied. Otherwise gradients of two minibatches would exist beside two versions, more
//! than plans account for. Under ZeRO 2 the items of a round accumulate their gradients in item order. The simulated
//! clock only chooses the order; versions come from the rule. Wrong times therefore make a program slow but never
//! change its weights.
//!
//! The result has the global start order of all actions. `lower` uses this sequence to place Recvs and Waits such that
//! no program deadlocks.

use crate::plan::StageId;
use crate::schedule::action::{Phase, Work};
use crate::schedule::event_queue::EventQueue;
use crate::schedule::semantics::Rule;
use crate::schedule::{MicrobatchId, Payload, Pipeline, ProgramStage, RankId, ScheduleError, WorkerId};

#[derive(Clone, Copy, Debug)]
pub enum Choice<'a> {
    /// A backward if one is ready, else a forward.
    Greedy,
    /// As `Greedy` with a split backward. Weight-gradient passes fill bubbles, and come first once the given number per
    /// stage is pending.
    GreedySplit(&'a [u32]),
    /// The next action of the worker's list, by [`WorkerId`]; caps are ignored.
    Fixed(&'a [Vec<Work>]),
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WorkOrder {
    pub work: Vec<Vec<Work>>,
    /// For each action, its position in the global start order.
    pub started: Vec<Vec<u32>>,
}

/// Maps stage and replica to worker ids.
#[derive(Clone, Debug)]
pub struct Layout {
    first: Vec<u32>,
    ranks: Vec<RankId>,
}

impl Layout {
    pub fn new(stages: &[ProgramStage]) -> Self {
        let mut first = vec![0];
        for stage in stages {
            // Ranks are numbered in the order of their first stages.
            if stage.rank.index() + 1 == first.len() {
                first.push(first[first.len() - 1] + stage.replicas);
            }
        }
        Self { first, ranks: stages.iter().map(|stage| stage.rank).collect() }
    }

    pub fn workers(&self) -> usize {
        self.first[self.first.len() - 1] as usize
    }

    pub fn ranks(&self) -> impl Iterator<Item = RankId> + use<> {
        (0..self.first.len() as u32 - 1).map(RankId)
    }

    pub fn worker(&self, stage: StageId, replica: u32) -> WorkerId {
        WorkerId(self.first[self.ranks[stage.index()].index()] + replica)
    }

    pub fn replicas(&self, rank: RankId) -> impl Iterator<Item = WorkerId> + use<> {
        (self.first[rank.index()]..self.first[rank.index() + 1]).map(WorkerId)
    }

    pub fn holders(&self, stage: StageId) -> impl Iterator<Item = WorkerId> + use<> {
        self.replicas(self.ranks[stage.index()])
    }

    pub fn rank(&self, worker: WorkerId) -> RankId {
        RankId(self.first.partition_point(|&first| first <= worker.0) as u32 - 1)
    }
}

/// Simulates the pipeline and returns the order. Fails on a deadlock, which only fixed lists can cause: under a greedy
/// choice the first unfinished item is never blocked.
pub fn play(pipeline: &Pipeline, rule: &Rule, choice: Choice<'_>) -> Result<WorkOrder, ScheduleError> {
    OrderSimulation::new(pipeline, rule, choice).run()
}

/// Millionths of a microsecond, so that equal sums of times compare equal.
fn ticks(microseconds: f64) -> u64 {
    (microseconds * 1e6).round() as u64
}

#[derive(Clone, Copy)]
enum Event {
    Done(WorkerId),
    Arrived(StageId, MicrobatchId, Payload),
    Updated(StageId, u32),
}

struct WorkerState {
    /// Its first stage; used by greedy choices only.
    stage: StageId,
    /// The worker's items of that stage.
    forwards: Vec<MicrobatchId>,
    next_forward: usize,
    next_backward: usize,
    next_weight: usize,
    next_fixed: usize,
    in_flight: u32,
    running: Option<Work>,
    /// True if an event may have made one of its actions ready.
    is_touched: bool,
    work: Vec<Work>,
    started: Vec<u32>,
}

struct OrderSimulation<'a> {
    pipeline: &'a Pipeline,
    rule: &'a Rule,
    choice: Choice<'a>,
    layout: Layout,
    incoming: Vec<Vec<usize>>,
    outgoing: Vec<Vec<usize>>,
    hands: Vec<WorkerState>,
    /// By stage and item: dependencies left before the forward and the backward.
    forward_needs: Vec<u32>,
    backward_needs: Vec<u32>,
    /// True if the input-gradient pass is done.
    weight_ready: Vec<bool>,
    /// By stage: backwards left in each round. `reduced` counts all-reduced rounds, `newest` is the newest version.
    missing: Vec<Vec<u32>>,
    /// By stage and round: items that have started their weight gradients.
    begun: Vec<Vec<u32>>,
    reduced: Vec<u32>,
    newest: Vec<u32>,
    events: EventQueue<Event>,
    now: u64,
    count: u32,
    /// Touched workers, each once.
    touched: Vec<WorkerId>,
}

impl<'a> OrderSimulation<'a> {
    fn new(pipeline: &'a Pipeline, rule: &'a Rule, choice: Choice<'a>) -> Self {
        let stages = pipeline.stages.len();
        let items = rule.items as usize;
        let layout = Layout::new(&rule.stages);
        let mut incoming = vec![Vec::new(); stages];
        let mut outgoing = vec![Vec::new(); stages];
        for (index, edge) in pipeline.edges.iter().enumerate() {
            incoming[edge.to.index()].push(index);
            outgoing[edge.from.index()].push(index);
        }
        let mut hands = Vec::with_capacity(layout.workers());
        for rank in layout.ranks() {
            let held = pipeline.ranks.iter().position(|&of| of == rank).expect("every rank of a pipeline has stages");
            let stage = StageId(held as u32);
            for replica in 0..pipeline.stages[held].replicas {
                hands.push(WorkerState {
                    stage,
                    forwards: rule.share(stage, replica).collect(),
                    next_forward: 0,
                    next_backward: 0,
                    next_weight: 0,
                    next_fixed: 0,
                    in_flight: 0,
                    running: None,
                    is_touched: true,
                    work: Vec::new(),
                    started: Vec::new(),
                });
            }
        }
        let mut forward_needs = Vec::with_capacity(stages * items);
        let mut backward_needs = Vec::with_capacity(stages * items);
        let mut missing = Vec::with_capacity(stages);
        for index in 0..stages {
            let stage = StageId(index as u32);
            forward_needs.extend(std::iter::repeat_n(incoming[index].len() as u32, items));
            // One more for the item's own forward.
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
            weight_ready: vec![false; stages * items],
            begun: missing.iter().map(|rounds: &Vec<u32>| vec![0; rounds.len()]).collect(),
            missing,
            reduced: vec![0; stages],
            newest: vec![0; stages],
            events: EventQueue::new(),
            now: 0,
            count: 0,
        }
    }

    fn run(mut self) -> Result<WorkOrder, ScheduleError> {
        let mut touched = Vec::new();
        loop {
            // Process all events of this time before any worker chooses.
            while self.events.next_time() == Some(self.now)
                && let Some((_, event)) = self.events.take()
            {
                self.happen(event);
            }
            // Workers choose in id order, independent of event order.
            std::mem::swap(&mut self.touched, &mut touched);
            touched.sort_unstable();
            touched.iter().for_each(|worker| self.hands[worker.index()].is_touched = false);
            for worker in touched.drain(..) {
                self.start(worker);
            }
            match self.events.next_time() {
                Some(time) => self.now = time,
                None => break,
            }
        }
        self.finished()?;
        let (work, started) = self.hands.into_iter().map(|hands| (hands.work, hands.started)).unzip();
        Ok(WorkOrder { work, started })
    }

    fn finished(&self) -> Result<(), ScheduleError> {
        for (index, hands) in self.hands.iter().enumerate() {
            let next = match self.choice {
                Choice::Fixed(lists) => lists[index].get(hands.next_fixed).copied(),
                _ if !self.rule.schedule.trains() => self.next(hands, hands.next_forward, Phase::Forward),
                Choice::Greedy => self.next(hands, hands.next_backward, Phase::Backward),
                Choice::GreedySplit(_) => self.next(hands, hands.next_weight, Phase::BackwardWeight),
            };
            if let Some(work) = next {
                let worker = WorkerId(index as u32);
                let rank = self.layout.rank(worker);
                let first = self.layout.replicas(rank).next().unwrap_or(worker);
                let worker = format!("{}.{}", rank.0, worker.0 - first.0);
                return Err(ScheduleError::Stuck { worker, at: work.to_string() });
            }
        }
        Ok(())
    }

    /// Zero-delay events happen at once, except the end of an action: all workers start first.
    fn post(&mut self, after: u64, event: Event) {
        match event {
            Event::Arrived(..) | Event::Updated(..) if after == 0 => self.happen(event),
            _ => self.events.post(self.now.saturating_add(after), event),
        }
    }

    fn touch(&mut self, worker: WorkerId) {
        let is_touched = &mut self.hands[worker.index()].is_touched;
        if !std::mem::replace(is_touched, true) {
            self.touched.push(worker);
        }
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
                self.touch(worker);
                let hands = &mut self.hands[worker.index()];
                let Some(work) = hands.running.take() else { return };
                if work.part.ends() {
                    hands.in_flight -= 1;
                }
                match work.part {
                    Phase::Forward => self.forward_done(work.stage, work.item),
                    Phase::Backward | Phase::BackwardInput => self.gradients_done(work.stage, work.item),
                    Phase::BackwardWeight => {}
                }
                if work.part.ends() {
                    self.backward_done(work.stage, work.item);
                }
            }
            Event::Arrived(stage, item, kind) => self.arrive(stage, item, kind),
            Event::Updated(stage, round) => {
                self.newest[stage.index()] = round + 1;
                self.layout.holders(stage).for_each(|worker| self.touch(worker));
            }
        }
    }

    fn arrive(&mut self, stage: StageId, item: MicrobatchId, kind: Payload) {
        let at = self.at(stage, item);
        match kind {
            Payload::Activation => self.forward_needs[at] -= 1,
            Payload::Gradient => self.backward_needs[at] -= 1,
        }
        self.touch(self.worker(stage, item));
    }

    fn forward_done(&mut self, stage: StageId, item: MicrobatchId) {
        let at = self.at(stage, item);
        self.backward_needs[at] -= 1;
        for place in 0..self.outgoing[stage.index()].len() {
            let edge = &self.pipeline.edges[self.outgoing[stage.index()][place]];
            self.post(ticks(edge.forward_us), Event::Arrived(edge.to, item, Payload::Activation));
        }
    }

    fn gradients_done(&mut self, stage: StageId, item: MicrobatchId) {
        let at = self.at(stage, item);
        self.weight_ready[at] = true;
        for place in 0..self.incoming[stage.index()].len() {
            let edge = &self.pipeline.edges[self.incoming[stage.index()][place]];
            self.post(ticks(edge.backward_us), Event::Arrived(edge.from, item, Payload::Gradient));
        }
    }

    fn backward_done(&mut self, stage: StageId, item: MicrobatchId) {
        let round = self.rule.round(stage, item);
        self.missing[stage.index()][round as usize] -= 1;
        let shape = &self.pipeline.stages[stage.index()];
        // Buckets are ignored here: the whole all-reduce starts at the end of the round. With link contention an
        // optimistic update time would put a forward first that then blocks other work.
        let reduce = if shape.reduces() { ticks(shape.all_reduce) } else { 0 };
        // A short last round may complete before the previous one; updates go in order.
        while let Some(0) = self.missing[stage.index()].get(self.reduced[stage.index()] as usize) {
            self.post(reduce, Event::Updated(stage, self.reduced[stage.index()]));
            self.reduced[stage.index()] += 1;
        }
    }

    fn ready(&self, Work { stage, item, part }: Work) -> bool {
        let at = self.at(stage, item);
        let newest = self.newest[stage.index()];
        let waits = !(self.rule.schedule.is_round_robin() && self.rule.schedule.stashes());
        let buffer = || !waits || self.rule.round(stage, item) <= newest;
        let turn = || self.rule.stages[stage.index()].zero < 2 || self.is_turn(stage, item);
        match part {
            Phase::Forward => self.forward_needs[at] == 0 && self.rule.version(stage, item).0 <= newest,
            Phase::Backward => self.backward_needs[at] == 0 && buffer() && turn(),
            Phase::BackwardInput => self.backward_needs[at] == 0 && buffer(),
            Phase::BackwardWeight => self.weight_ready[at] && turn(),
        }
    }

    /// True if all earlier items of the round have started to accumulate their gradients.
    fn is_turn(&self, stage: StageId, item: MicrobatchId) -> bool {
        let round = self.rule.round(stage, item) as usize;
        self.begun[stage.index()].get(round) == Some(&self.rule.place(stage, item))
    }

    fn next(&self, hands: &WorkerState, place: usize, part: Phase) -> Option<Work> {
        hands.forwards.get(place).map(|&item| Work { stage: hands.stage, item, part })
    }

    fn choose(&self, worker: WorkerId) -> Option<Work> {
        let hands = &self.hands[worker.index()];
        let may = |work: &Work| self.ready(*work);
        if let Choice::Fixed(lists) = self.choice {
            return lists[worker.index()].get(hands.next_fixed).copied().filter(may);
        }
        let trains = self.rule.schedule.trains();
        let most_apart = match self.choice {
            Choice::GreedySplit(pending_weight_grads) => Some(pending_weight_grads[hands.stage.index()] as usize),
            _ => None,
        };
        let splits = most_apart.is_some();
        let is_full = most_apart.is_some_and(|most| hands.next_backward - hands.next_weight >= most);
        let room = hands.in_flight < self.rule.stages[hands.stage.index()].cap;
        let part = if splits { Phase::BackwardInput } else { Phase::Backward };
        let backward = self.next(hands, hands.next_backward, part).filter(|work| trains && !is_full && may(work));
        let forward = || self.next(hands, hands.next_forward, Phase::Forward).filter(|work| room && may(work));
        let weight = || self.next(hands, hands.next_weight, Phase::BackwardWeight).filter(|work| splits && may(work));
        if is_full { weight() } else { backward.or_else(forward).or_else(weight) }
    }

    fn start(&mut self, worker: WorkerId) {
        if self.hands[worker.index()].running.is_some() {
            return;
        }
        let Some(work) = self.choose(worker) else { return };
        let hands = &mut self.hands[worker.index()];
        let Work { stage, item, part } = work;
        hands.running = Some(work);
        hands.next_fixed += 1;
        hands.work.push(work);
        hands.started.push(self.count);
        self.count += 1;
        let shape = &self.pipeline.stages[stage.index()];
        let time = match part {
            Phase::Forward => {
                hands.next_forward += 1;
                // In inference, a stage without readers keeps nothing.
                if self.rule.schedule.trains() || !self.outgoing[stage.index()].is_empty() {
                    hands.in_flight += 1;
                }
                shape.forward
            }
            Phase::Backward => shape.backward,
            Phase::BackwardInput => (shape.backward - shape.weight).max(0.0),
            Phase::BackwardWeight => shape.weight,
        };
        if part.ends() && self.rule.stages[stage.index()].zero >= 2 {
            self.begun[stage.index()][self.rule.round(stage, item) as usize] += 1;
            self.layout.holders(stage).filter(|other| *other != worker).for_each(|other| self.touch(other));
        }
        let hands = &mut self.hands[worker.index()];
        hands.next_backward += usize::from(part.makes_gradients());
        hands.next_weight += usize::from(part.ends());
        if part == Phase::Forward && !self.rule.schedule.trains() {
            self.take_inputs(stage, item);
        }
        self.post(ticks(time), Event::Done(worker));
    }

    /// In inference an item is in flight until all receivers have started on it.
    fn take_inputs(&mut self, stage: StageId, item: MicrobatchId) {
        for place in 0..self.incoming[stage.index()].len() {
            let from = self.pipeline.edges[self.incoming[stage.index()][place]].from;
            let at = self.at(from, item);
            self.backward_needs[at] -= 1;
            if self.backward_needs[at] == 0 {
                let sender = self.worker(from, item);
                self.hands[sender.index()].in_flight -= 1;
                self.touch(sender);
            }
        }
    }
}
