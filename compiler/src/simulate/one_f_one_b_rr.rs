//! Steady state of 1F1B-RR without a program, by simulating the scheduling rule itself.
//!
//! The programs of a thousand stages take gigabytes. Here only the current state is kept: running workers, pending
//! transfers and all-reduces, and dependency counts per item. The rule is that of `schedule::list_scheduler`, greedy
//! and backward first; transfers of one direction between two workers are serialized. The simulation ends when two
//! successive windows, each at least as long as the pipeline is deep, took the same time.
//!
//! An upper bound needs no simulation. The update of a round waits for its items' latency from their forward down to
//! the last stage and back, D_s, and for its all-reduce, R_s. The forwards c_s rounds later wait for that update. So
//!
//! ```text
//! T  ≥  (D_s + R_s) / (c_s r_s)        hence        c_s  ≥  (D_s + R_s) / (r_s T)
//! ```
//!
//! Straight pipelines come close to this bound. It is also the result for pipelines that take minutes to fill.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::schedule::shape::common_multiple;
use crate::schedule::{Pipeline, StageSpec};
use crate::simulate::SimulateError;

/// Limit on simulated forwards and backwards; takes about two seconds.
const MOST_PIECES: u64 = 8_000_000;

/// Most windows until two in a row must take the same time.
const WINDOWS: usize = 6;

/// Relative difference up to which two windows are equal.
const SAME: f64 = 1e-3;

#[derive(Clone, PartialEq, Debug)]
pub struct Steady {
    /// Throughput as a fraction of the bottleneck's ideal.
    pub share: f64,
    /// For each stage, true if the cap blocked a ready forward on a free replica.
    pub held: Vec<bool>,
    pub pieces: u64,
}

/// Microseconds per item of the slowest resource without waiting: a stage's replicas, the links of an edge, or a
/// stage's all-reduce.
pub fn ideal_us(pipeline: &Pipeline) -> f64 {
    let stage = pipeline.stages.iter().map(|stage| {
        let replicas = f64::from(stage.replicas);
        let reduce = if stage.replicas > 1 { stage.all_reduce } else { 0.0 };
        (stage.forward + stage.backward + stage.step).max(reduce) / replicas
    });
    let edge = pipeline.edges.iter().map(|edge| {
        // Items go round-robin on both sides, so the least common multiple of pairs is used.
        let [a, b] = [edge.from, edge.to].map(|stage| u64::from(pipeline.stages[stage.index()].replicas));
        edge.forward_us.max(edge.backward_us) / common_multiple(a, b) as f64
    });
    stage.chain(edge).fold(0.0, f64::max)
}

/// For each stage, the time from an item's forward to the end of its round's update, without waiting, in microseconds.
pub fn update_latency_us(pipeline: &Pipeline) -> Vec<f64> {
    let stages = &pipeline.stages;
    let mut down = vec![0.0f64; stages.len()];
    let mut outgoing = vec![Vec::new(); stages.len()];
    pipeline.edges.iter().for_each(|edge| outgoing[edge.from.index()].push(edge));
    // Edges go to later stages, so successors are final.
    for at in (0..stages.len()).rev() {
        let below = outgoing[at].iter().map(|edge| edge.forward_us + down[edge.to.index()] + edge.backward_us);
        down[at] = stages[at].forward + below.fold(0.0, f64::max) + stages[at].backward;
    }
    (0..stages.len()).map(|at| down[at] + stages[at].exposed_us()).collect()
}

/// Smallest caps that can reach a fraction of the ideal throughput.
pub fn needed_caps(pipeline: &Pipeline, share: f64) -> Vec<u32> {
    let ideal = ideal_us(pipeline);
    let need = |(way, stage): (f64, &StageSpec)| {
        let rounds = way * share / (ideal * f64::from(stage.replicas)) * (1.0 - 1e-9);
        // `as` maps NaN to 0 and saturates.
        (rounds.ceil() as u32).clamp(1, 1 << 20)
    };
    update_latency_us(pipeline).into_iter().zip(&pipeline.stages).map(need).collect()
}

/// Upper bound of the throughput under the pipeline's caps, as a fraction of the ideal, with the limiting stages.
pub fn bound(pipeline: &Pipeline) -> Steady {
    let ideal = ideal_us(pipeline);
    let shares: Vec<f64> = update_latency_us(pipeline)
        .into_iter()
        .zip(&pipeline.stages)
        .map(
            |(way, stage)| if way > 0.0 { ideal * f64::from(stage.cap) * f64::from(stage.replicas) / way } else { 1.0 },
        )
        .collect();
    let share = shares.iter().copied().fold(1.0, f64::min);
    let held = shares.iter().map(|other| *other < 1.0 && *other <= share * (1.0 + SAME)).collect();
    Steady { share, held, pieces: pipeline.stages.len() as u64 }
}

/// Simulates the pipeline with its caps until it is in steady state.
pub fn steady(pipeline: &Pipeline) -> Result<Steady, SimulateError> {
    steady_under(pipeline, false)
}

/// [`steady`] with vertical sync: an item waits in every stage for the updates in the first stage's version.
pub fn steady_in_sync(pipeline: &Pipeline) -> Result<Steady, SimulateError> {
    steady_under(pipeline, true)
}

fn steady_under(pipeline: &Pipeline, in_sync: bool) -> Result<Steady, SimulateError> {
    pipeline.validate()?;
    let stages = pipeline.stages.len();
    let ideal = ideal_us(pipeline);
    if ideal == 0.0 || !ideal.is_finite() {
        return Ok(Steady { share: 1.0, held: vec![false; stages], pieces: 0 });
    }
    // A steady state repeats after a whole number of rounds of every stage.
    let repeat = pipeline.rounds().min(512) as usize;
    let depth = |stage: &StageSpec| u64::from(stage.replicas) * u64::from(stage.cap);
    let depth = pipeline.stages.iter().map(depth).max().unwrap_or(1).min(MOST_PIECES) as usize;
    let window = depth.max(120).div_ceil(repeat) * repeat;
    let most = (MOST_PIECES / 2) as usize / stages;
    let items = (2 * depth + WINDOWS * window).min(most);
    if items < 2 * depth + 2 * window {
        return Ok(bound(pipeline));
    }
    // Integer clock, so that equal sums of times compare equal.
    let mut scale = 1e6;
    while ideal * scale > 1e12 {
        scale /= 2.0;
    }
    let mut play = RuleSimulation::new(pipeline, items, scale);
    play.first = in_sync.then(|| (pipeline.stages[0].replicas as usize, pipeline.stages[0].cap as usize));
    Ok(play.run(depth, window, ideal * scale))
}

/// An event packed into 64 bits, so that the queue is small: kind, worker or stage, item.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Event(u64);

impl Event {
    const DONE: u64 = 0;
    const ACTIVATION: u64 = 1;
    const GRADIENT: u64 = 2;
    const UPDATED: u64 = 3;

    /// Workers and stages must be below 2^24, items below 2^32.
    fn new(kind: u64, of: usize, item: usize) -> Event {
        Event(kind << 56 | (of as u64) << 32 | item as u64)
    }

    fn kind(self) -> u64 {
        self.0 >> 56
    }

    fn of(self) -> usize {
        (self.0 >> 32 & 0xff_ffff) as usize
    }

    fn item(self) -> usize {
        (self.0 & 0xffff_ffff) as usize
    }
}

struct Hands {
    stage: usize,
    /// The next items to run forward and backward.
    forward: usize,
    backward: usize,
    in_flight: u32,
    /// The running item; true for its backward.
    running: Option<(usize, bool)>,
    is_touched: bool,
}

/// Times of a stage in ticks, and the progress of its rounds.
struct Row {
    replicas: usize,
    cap: u32,
    forward: u64,
    backward: u64,
    reduce: u64,
    exposed: u64,
    /// End of the newest all-reduce: rounds are all-reduced one after the other.
    reduced_at: u64,
    first_worker: usize,
    incoming: Vec<usize>,
    outgoing: Vec<usize>,
    /// Backwards done per round, rounds reduced, and updates applied.
    done: Vec<u32>,
    reduced: usize,
    newest: usize,
    /// True if the cap blocked a free replica since the window began.
    held: bool,
}

/// Times of one edge, and when each pair of workers is free again.
struct Wire {
    from: usize,
    to: usize,
    us: [u64; 2],
    free_at: [Vec<u64>; 2],
}

struct RuleSimulation {
    items: usize,
    /// Replicas and cap of the first stage; set under vertical sync.
    first: Option<(usize, usize)>,
    rows: Vec<Row>,
    wires: Vec<Wire>,
    hands: Vec<Hands>,
    /// By stage and item: dependencies left before forward and backward.
    waits: Vec<[u32; 2]>,
    /// Per item, the stages left.
    unfinished: Vec<u32>,
    finished: Vec<u64>,
    events: BinaryHeap<Reverse<(u64, Event)>>,
    touched: Vec<u32>,
    now: u64,
    pieces: u64,
}

impl RuleSimulation {
    fn new(pipeline: &Pipeline, items: usize, scale: f64) -> RuleSimulation {
        let ticks = |us: f64| (us * scale).round() as u64;
        let mut rows: Vec<Row> = Vec::with_capacity(pipeline.stages.len());
        let mut hands: Vec<Hands> = Vec::new();
        for (at, stage) in pipeline.stages.iter().enumerate() {
            let replicas = stage.replicas as usize;
            rows.push(Row {
                replicas,
                cap: stage.cap,
                forward: ticks(stage.forward),
                // The step follows the last backward of a round and costs as much on every replica, so it is charged to
                // each backward.
                backward: ticks(stage.backward + stage.step),
                reduce: if replicas > 1 { ticks(stage.all_reduce) } else { 0 },
                exposed: ticks(stage.exposed_us()),
                reduced_at: 0,
                first_worker: hands.len(),
                incoming: Vec::new(),
                outgoing: Vec::new(),
                done: vec![0; items.div_ceil(replicas)],
                reduced: 0,
                newest: 0,
                held: false,
            });
            hands.extend((0..replicas).map(|replica| Hands {
                stage: at,
                forward: replica,
                backward: replica,
                in_flight: 0,
                running: None,
                is_touched: true,
            }));
        }
        let mut wires = Vec::with_capacity(pipeline.edges.len());
        for (at, edge) in pipeline.edges.iter().enumerate() {
            let (from, to) = (edge.from.index(), edge.to.index());
            rows[from].outgoing.push(at);
            rows[to].incoming.push(at);
            let pairs = common_multiple(rows[from].replicas as u64, rows[to].replicas as u64).min(items as u64);
            let us = [ticks(edge.forward_us), ticks(edge.backward_us)];
            let free_at = [vec![0; pairs as usize], vec![0; pairs as usize]];
            wires.push(Wire { from, to, us, free_at });
        }
        // A backward also waits for its own forward.
        let wait = |row: &Row| [row.incoming.len() as u32, row.outgoing.len() as u32 + 1];
        let waits = rows.iter().flat_map(|row| std::iter::repeat_n(wait(row), items)).collect();
        let touched = (0..hands.len() as u32).collect();
        let unfinished = vec![rows.len() as u32; items];
        let (finished, events) = (Vec::with_capacity(items), BinaryHeap::new());
        RuleSimulation {
            items,
            first: None,
            rows,
            wires,
            hands,
            waits,
            unfinished,
            finished,
            events,
            touched,
            now: 0,
            pieces: 0,
        }
    }

    fn run(mut self, depth: usize, window: usize, ideal: f64) -> Steady {
        let mut measured: Option<f64> = None;
        let mut next = depth + window;
        let last = self.items - depth;
        loop {
            // Process all events of this time before any worker chooses.
            while let Some(&Reverse((time, event))) = self.events.peek() {
                if time > self.now {
                    break;
                }
                self.events.pop();
                self.happen(event);
            }
            while let Some(worker) = self.touched.pop() {
                self.hands[worker as usize].is_touched = false;
                self.start(worker as usize);
            }
            while self.finished.len() >= next {
                let took = (self.finished[next - 1] - self.finished[next - 1 - window]) as f64;
                let share = if took > 0.0 { (ideal * window as f64 / took).min(1.0) } else { 1.0 };
                let is_even = measured.is_some_and(|before| (share - before).abs() <= SAME * share);
                measured = Some(share);
                next += window;
                if is_even || next > last {
                    return self.seen(share);
                }
                self.rows.iter_mut().for_each(|row| row.held = false);
            }
            match self.events.peek() {
                Some(&Reverse((time, _))) => self.now = time,
                None => return self.seen(measured.unwrap_or(0.0)),
            }
        }
    }

    fn seen(&self, share: f64) -> Steady {
        Steady { share, held: self.rows.iter().map(|row| row.held).collect(), pieces: self.pieces }
    }

    fn touch(&mut self, worker: usize) {
        if !std::mem::replace(&mut self.hands[worker].is_touched, true) {
            self.touched.push(worker as u32);
        }
    }

    fn happen(&mut self, event: Event) {
        let (of, item) = (event.of(), event.item());
        match event.kind() {
            Event::DONE => {
                self.touch(of);
                let stage = self.hands[of].stage;
                match self.hands[of].running.take() {
                    Some((item, false)) => {
                        self.waits[stage * self.items + item][1] -= 1;
                        self.send(stage, item, false);
                    }
                    Some((item, true)) => {
                        self.hands[of].in_flight -= 1;
                        self.send(stage, item, true);
                        self.count(stage, item);
                    }
                    None => {}
                }
            }
            Event::ACTIVATION => self.arrive(of, item, false),
            Event::GRADIENT => self.arrive(of, item, true),
            _ => {
                self.rows[of].newest += 1;
                self.touch_all(of);
            }
        }
    }

    fn send(&mut self, stage: usize, item: usize, is_gradient: bool) {
        let count = if is_gradient { self.rows[stage].incoming.len() } else { self.rows[stage].outgoing.len() };
        for place in 0..count {
            let row = &self.rows[stage];
            let at = if is_gradient { row.incoming[place] } else { row.outgoing[place] };
            let way = usize::from(is_gradient);
            let wire = &mut self.wires[at];
            let to = if is_gradient { wire.from } else { wire.to };
            if wire.us[way] == 0 {
                self.arrive(to, item, is_gradient);
                continue;
            }
            let pair = item % wire.free_at[way].len();
            let end = self.now.max(wire.free_at[way][pair]).saturating_add(wire.us[way]);
            wire.free_at[way][pair] = end;
            let kind = if is_gradient { Event::GRADIENT } else { Event::ACTIVATION };
            self.events.push(Reverse((end, Event::new(kind, to, item))));
        }
    }

    fn arrive(&mut self, stage: usize, item: usize, is_gradient: bool) {
        self.waits[stage * self.items + item][usize::from(is_gradient)] -= 1;
        let row = &self.rows[stage];
        self.touch(row.first_worker + item % row.replicas);
    }

    /// A backward is done; its round and its item may be complete.
    fn count(&mut self, stage: usize, item: usize) {
        self.unfinished[item] -= 1;
        if self.unfinished[item] == 0 {
            self.finished.push(self.now);
        }
        let (items, now) = (self.items, self.now);
        let row = &mut self.rows[stage];
        row.done[item / row.replicas] += 1;
        while row.done.get(row.reduced).is_some_and(|&done| {
            let round = row.reduced * row.replicas;
            done as usize == row.replicas.min(items - round)
        }) {
            row.reduced += 1;
            if row.reduce > 0 {
                // Part of the all-reduce overlaps with the backward, after the previous round's all-reduce.
                let end = now.saturating_add(row.exposed).max(row.reduced_at.saturating_add(row.reduce));
                row.reduced_at = end;
                self.events.push(Reverse((end, Event::new(Event::UPDATED, stage, 0))));
            } else {
                row.newest += 1;
            }
        }
        if self.rows[stage].reduce == 0 {
            self.touch_all(stage);
        }
    }

    fn touch_all(&mut self, stage: usize) {
        let (first, replicas) = (self.rows[stage].first_worker, self.rows[stage].replicas);
        (first..first + replicas).for_each(|worker| self.touch(worker));
    }

    /// A free worker takes a ready backward, else a forward within its cap.
    fn start(&mut self, worker: usize) {
        let hands = &mut self.hands[worker];
        let row = &mut self.rows[hands.stage];
        if hands.running.is_some() {
            return;
        }
        let base = hands.stage * self.items;
        let may = |item: usize, way: usize| item < self.items && self.waits[base + item][way] == 0;
        let time = if may(hands.backward, 1) {
            hands.running = Some((hands.backward, true));
            hands.backward += row.replicas;
            row.backward
        } else if may(hands.forward, 0) {
            let is_new = match self.first {
                None => hands.forward / row.replicas < row.newest + row.cap as usize,
                Some((replicas, cap)) => {
                    let seen = (hands.forward / replicas + 1).saturating_sub(cap) * replicas;
                    seen / row.replicas <= row.newest
                }
            };
            if hands.in_flight >= row.cap || !is_new {
                row.held = true;
                return;
            }
            hands.running = Some((hands.forward, false));
            hands.forward += row.replicas;
            hands.in_flight += 1;
            row.forward
        } else {
            return;
        };
        self.pieces += 1;
        self.events.push(Reverse((self.now.saturating_add(time), Event::new(Event::DONE, worker, 0))));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::schedule::Schedule;
    use crate::schedule::generators::schedule;
    use crate::schedule::semantics::StepCount;
    use crate::schedule::{Edge, published_caps};
    use crate::simulate::run::{Machine, simulate};

    fn with_transfers(replicas: &[u32], extra: u32, us: f64) -> Pipeline {
        let caps: Vec<u32> = published_caps(replicas).iter().map(|cap| cap + extra).collect();
        let mut pipeline = Pipeline::balanced(replicas, 2.0).with_caps(&caps);
        pipeline.edges.iter_mut().for_each(|edge| (edge.forward_us, edge.backward_us) = (us, us));
        pipeline
    }

    /// The same efficiency from simulating the program, over a long run.
    fn programmed(pipeline: &Pipeline) -> f64 {
        let program = schedule(Schedule::OneFOneBRr, pipeline, StepCount::minibatches(600)).unwrap();
        let timeline = simulate(&program, pipeline, &Machine::of(pipeline)).unwrap();
        let (items, time) = timeline.middle(240, 480).unwrap();
        ideal_us(pipeline) * items / time
    }

    #[test]
    fn it_is_as_fast_as_the_program() {
        for replicas in [&[1, 1, 1, 1][..], &[3, 1], &[1, 3, 1], &[8, 5, 3], &[1, 4, 2, 1]] {
            for extra in 0..4 {
                for us in [0.0, 0.5, 1.0] {
                    let pipeline = with_transfers(replicas, extra, us);
                    let (played, programmed) = (steady(&pipeline).unwrap(), programmed(&pipeline));
                    let difference = played.share - programmed;
                    assert!(
                        (-0.03..=0.05).contains(&difference),
                        "{replicas:?} + {extra}, {us}: {} and {programmed}",
                        played.share
                    );
                    assert!(played.share <= bound(&pipeline).share * (1.0 + 1e-3), "{replicas:?} + {extra}, {us}");
                }
            }
        }
    }

    #[test]
    fn straight_pipelines_come_near_the_bound() {
        for (stages, us) in [(4, 0.7), (40, 1.0), (300, 0.3)] {
            let replicas = vec![1; stages];
            let short = with_transfers(&replicas, 0, us);
            let (played, most) = (steady(&short).unwrap(), bound(&short));
            assert!(most.share < 1.0 && (played.share - most.share).abs() < 0.01, "{stages}: {played:?} {most:?}");
            let enough = short.with_caps(&needed_caps(&with_transfers(&replicas, 0, us), 1.0));
            let share = steady(&enough).unwrap().share;
            // A short pipeline simulates few items, so the fill phase weighs more.
            assert!(share > 0.88, "{stages}: {share}");
            assert!((bound(&enough).share - 1.0).abs() < 1e-9);
        }
    }

    #[test]
    fn a_thousand_stages_take_no_more_than_is_played() {
        let found = steady(&with_transfers(&[1; 1000], 0, 0.1)).unwrap();
        assert!(found.share > 0.9 && found.pieces <= MOST_PIECES, "{} after {}", found.share, found.pieces);
        assert!(found.held.iter().any(|held| *held));
        let deep = with_transfers(&[1; 4000], 0, 0.1);
        assert_eq!(steady(&deep).unwrap(), bound(&deep));
    }

    #[test]
    fn branches_wait_for_the_longer_way() {
        let mut pipeline = Pipeline::balanced(&[1, 1, 1], 2.0);
        pipeline.edges.push(Edge::new(0, 2));
        pipeline.stages[1].forward = 4.0;
        assert_eq!(update_latency_us(&pipeline), [1.0 + 4.0 + 1.0 + 2.0 + 2.0 + 2.0, 4.0 + 1.0 + 2.0 + 2.0, 3.0]);
    }
}
