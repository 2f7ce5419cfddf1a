//! Chooses in-flight limits: more micro-batches in flight reduce idle time but cost memory for saved activations and
//! weight versions, and increase staleness.
//!
//! The search starts from the published rule, or from the round-trip time of a micro-batch if transfers make that
//! longer. Lower caps cannot reach the throughput (see `simulate::one_f_one_b_rr`).
//!
//! 1. Raise the single cap that improves throughput most; ties go to the cap that costs less memory.
//! 2. If no single cap helps, or trying each is too slow, raise all caps that hold back work and still fit.
//! 3. If that does not help, raise all stages at once and lower each cap that is not needed.
//!
//! Limits that the whole schedule, with its updates, has no use for are lowered again (see [`fewer`]).
//!
//! The search ends at an efficiency of [`ENOUGH`], if nothing fits or helps, or when the simulation budget is used up.

use crate::partition::dp::nested_partition::Shape;
use crate::partition::search::build_plan::{self, StagePosition};
use crate::plan::memory::MemoryTerms;
use crate::plan::problem::{Objective, Problem};
use crate::plan::schedule::Schedule;
use crate::plan::{Edge, Stage, StageMemory};
use crate::schedule::Pipeline;
use crate::schedule::pipeline::pipeline_of;
use crate::simulate::inference;
use crate::simulate::one_f_one_b_rr::{self, Steady};

/// Efficiency (fraction of the ideal throughput) at which raising stops: 0.98 plus 0.005 for waits of the schedule
/// itself.
pub const ENOUGH: f64 = 0.985;

/// Largest increase of a cap over its start; in measurements 3 was enough for every known plan.
const MOST: u32 = 6;

/// Relative difference of equal throughputs.
const SAME: f64 = 1e-4;

/// Simulation budget in forwards and backwards: to try each cap in one step, to try each cap in all steps, and in
/// total.
const PIECES_OF_A_STEP: u64 = 400_000;
const PIECES_ALONE: u64 = 4_000_000;
const PIECES: u64 = 12_000_000;

pub type Efficiency<'a> = dyn Fn(&[Stage], &[Edge], &[u32]) -> Steady + 'a;

#[derive(Clone, Debug, PartialEq)]
pub struct Chosen {
    pub caps: Vec<u32>,
    pub share: f64,
    /// True if higher caps were rejected because of memory.
    pub lacks_memory: bool,
}

/// Stages whose caps are tried.
struct Trial<'a> {
    problem: &'a Problem,
    shape: &'a Shape,
    spots: &'a [StagePosition],
    holdings: Vec<MemoryTerms>,
    stages: Vec<Stage>,
    edges: Vec<Edge>,
    efficiency: &'a Efficiency<'a>,
    /// Bytes that no stage may exceed: if memory is the objective, the peak must not grow.
    most_bytes: u64,
}

impl<'a> Trial<'a> {
    fn new(
        problem: &'a Problem,
        shape: &'a Shape,
        spots: &'a [StagePosition],
        caps: &[u32],
        efficiency: &'a Efficiency<'a>,
    ) -> Trial<'a> {
        let (holdings, edges) = (build_plan::holdings(problem, shape), build_plan::edges(problem, shape));
        let most_bytes = u64::MAX;
        let mut trial = Trial { problem, shape, spots, holdings, stages: Vec::new(), edges, efficiency, most_bytes };
        let memory = trial.memory(caps);
        trial.stages = build_plan::stages(problem, shape, spots, &memory);
        if problem.objective == Objective::Memory {
            trial.most_bytes = memory.iter().map(|held| held.total).max().unwrap_or(0);
        }
        trial
    }

    fn run(&self, caps: &[u32]) -> Steady {
        (self.efficiency)(&self.stages, &self.edges, caps)
    }

    /// Schedules whose caps bound the throughput do not split the backward, so no weight gradients are pending.
    fn memory(&self, caps: &[u32]) -> Vec<StageMemory> {
        build_plan::memory(self.problem, self.shape, self.spots, &self.holdings, caps, &[])
    }

    fn fits(&self, caps: &[u32]) -> bool {
        let memory = self.memory(caps);
        memory.iter().all(|held| held.total <= self.most_bytes)
            && build_plan::fits(self.problem, self.shape, self.spots, &memory)
    }
}

/// Returns whether caps bound the throughput: several minibatches are in flight.
pub fn matters(problem: &Problem) -> bool {
    problem.schedule.is_continuous() && problem.objective != Objective::Latency
}

pub fn reached(
    problem: &Problem,
    shape: &Shape,
    spots: &[StagePosition],
    caps: &[u32],
    efficiency: &Efficiency<'_>,
) -> f64 {
    Trial::new(problem, shape, spots, caps, efficiency).run(caps).share
}

pub fn choose(problem: &Problem, shape: &Shape, spots: &[StagePosition], efficiency: &Efficiency<'_>) -> Chosen {
    let published = build_plan::published_caps(problem, &shape.replicas());
    if !matters(problem) {
        return Chosen { caps: published, share: 1.0, lacks_memory: false };
    }
    let trial = Trial::new(problem, shape, spots, &published, efficiency);
    let run = |caps: &[u32]| trial.run(caps);
    let fits = |caps: &[u32]| trial.fits(caps);
    let sum = |caps: &[u32]| trial.memory(caps).iter().map(|held| u128::from(held.total)).sum::<u128>();
    let mut lacks_memory = false;
    let mut caps = match pipeline_of(&problem.cluster.levels, &trial.stages, &trial.edges, &published) {
        Ok(mut pipeline) => {
            if problem.schedule.is_double_buffered() {
                // Under 2BW each round is a whole minibatch, so micro-batches do not wait for the previous all-reduce.
                pipeline.stages.iter_mut().for_each(|stage| stage.all_reduce = 0.0);
            }
            start(pipeline, &published, problem.schedule, &fits, &mut lacks_memory)
        }
        Err(_) => published,
    };
    let most: Vec<u32> = caps.iter().map(|cap| cap + MOST).collect();
    let mut steady = run(&caps);
    let mut spent = steady.pieces;
    let mut step = 1;
    while steady.share < ENOUGH && spent < PIECES {
        let helps = |other: &Steady| other.share > steady.share + 1e-6;
        let open = |at: usize| steady.held.get(at) == Some(&true) && caps[at] < most[at];
        let open: Vec<usize> = (0..caps.len()).filter(|&at| open(at)).collect();
        let is_quick = open.len() as u64 * steady.pieces <= PIECES_OF_A_STEP && spent <= PIECES_ALONE;
        let mut best: Option<(Steady, u128, Vec<u32>)> = None;
        let mut together = caps.clone();
        for at in open {
            let mut alone = caps.clone();
            alone[at] += 1;
            let before = together[at];
            together[at] = (caps[at] + step).min(most[at]);
            if !fits(&alone) {
                lacks_memory = true;
                together[at] = before;
                continue;
            }
            if is_quick {
                let other = run(&alone);
                spent += other.pieces;
                let cost = sum(&alone);
                let better = |(known, bytes, _): &(Steady, u128, _)| (other.share, *bytes) > (known.share, cost);
                if helps(&other) && best.as_ref().is_none_or(better) {
                    best = Some((other, cost, alone));
                }
            }
        }
        if best.is_none() && together != caps {
            let other = run(&together);
            spent += other.pieces;
            if helps(&other) && fits(&together) {
                best = Some((other, 0, together));
            }
            step += 1;
        }
        let Some((other, _, raised)) = best else { break };
        (caps, steady) = (raised, other);
    }
    if steady.share < ENOUGH && spent < PIECES {
        let left = PIECES - spent;
        (caps, steady) = at_once(&caps, steady, left, &run, &fits, &mut lacks_memory);
    }
    Chosen { caps, share: steady.share, lacks_memory }
}

/// Raises the given caps further, as measured by another efficiency function.
pub fn more(
    problem: &Problem,
    shape: &Shape,
    spots: &[StagePosition],
    caps: &[u32],
    efficiency: &Efficiency<'_>,
) -> Chosen {
    let trial = Trial::new(problem, shape, spots, caps, efficiency);
    let (run, fits) = (|caps: &[u32]| trial.run(caps), |caps: &[u32]| trial.fits(caps));
    let mut lacks_memory = false;
    let (caps, steady) = at_once(caps, run(caps), PIECES, &run, &fits, &mut lacks_memory);
    Chosen { caps, share: steady.share, lacks_memory }
}

/// `share` is the throughput under `caps`, relative to the ideal. Tries the published caps, then lowers one cap at a time,
/// as long as the throughput stays the same. Returns the new caps and their share; `None` if no cap was lowered.
pub fn fewer(
    published: &[u32],
    caps: &[u32],
    share: f64,
    efficiency: &dyn Fn(&[u32]) -> Steady,
) -> Option<(Vec<u32>, f64)> {
    if caps == published {
        return None;
    }
    let enough = share * (1.0 - SAME);
    let steady = efficiency(published);
    if steady.share >= enough {
        return Some((published.to_vec(), steady.share));
    }
    // The caller has simulated `caps` for about as many pieces.
    let left = PIECES_ALONE.saturating_sub(2 * steady.pieces);
    let mut caps = caps.to_vec();
    let steady = lowered(&mut caps, published, (enough, left), efficiency)?;
    Some((caps, steady.share))
}

/// True if caps that memory forbids would raise the share of the ideal throughput.
pub fn would_help(caps: &[u32], share: f64, efficiency: &dyn Fn(&[u32]) -> Steady) -> bool {
    let more: Vec<u32> = caps.iter().map(|cap| cap + MOST).collect();
    efficiency(&more).share > share * (1.0 + SAME)
}

/// Raises all caps by the same number while they fit, until the efficiency suffices. Then lowers each cap again as far
/// as the efficiency allows.
fn at_once(
    start: &[u32],
    steady: Steady,
    left: u64,
    run: &dyn Fn(&[u32]) -> Steady,
    fits: &dyn Fn(&[u32]) -> bool,
    lacks_memory: &mut bool,
) -> (Vec<u32>, Steady) {
    let (mut caps, mut best, mut spent) = (start.to_vec(), steady, 0);
    let mut tried = start.to_vec();
    for extra in 1..=MOST {
        let mut raised = tried.clone();
        for at in 0..raised.len() {
            raised[at] = start[at] + extra;
            if !fits(&raised) {
                *lacks_memory = true;
                raised[at] = tried[at];
            }
        }
        if raised == tried || spent > left {
            break;
        }
        let other = run(&raised);
        spent += other.pieces;
        if other.share > best.share + 1e-6 {
            (caps, best) = (raised.clone(), other);
        }
        if best.share >= ENOUGH {
            break;
        }
        tried = raised;
    }
    let wanted = (best.share.min(ENOUGH), left.saturating_sub(spent));
    let best = lowered(&mut caps, start, wanted, run).unwrap_or(best);
    (caps, best)
}

/// Lowers caps one by one, never below `least`, as long as the share is `enough` and budget is `left`. Returns the last
/// simulation that had enough.
fn lowered(
    caps: &mut [u32],
    least: &[u32],
    (enough, left): (f64, u64),
    run: &dyn Fn(&[u32]) -> Steady,
) -> Option<Steady> {
    let (mut best, mut spent) = (None, 0);
    for at in 0..caps.len() {
        while caps[at] > least[at] && spent < left {
            caps[at] -= 1;
            let other = run(caps);
            spent += other.pieces;
            if other.share < enough {
                caps[at] += 1;
                break;
            }
            best = Some(other);
        }
    }
    best
}

/// The published caps, raised to cover the round-trip time of a micro-batch. If those do not fit, each cap is limited to
/// what the caps of the other stages can make use of.
fn start(
    pipeline: Pipeline,
    published: &[u32],
    schedule: Schedule,
    fits: &dyn Fn(&[u32]) -> bool,
    lacks_memory: &mut bool,
) -> Vec<u32> {
    let trains = schedule.trains();
    let with = |share: f64| -> Vec<u32> {
        let needed = if trains { one_f_one_b_rr::needed_caps } else { inference::needed_caps }(&pipeline, share);
        published.iter().zip(needed).map(|(&published, needed)| published.max(needed)).collect()
    };
    let wanted = with(ENOUGH);
    if fits(&wanted) || !fits(published) {
        return if fits(&wanted) { wanted } else { published.to_vec() };
    }
    *lacks_memory = true;
    let mut within = published.to_vec();
    for at in 0..within.len() {
        let (mut low, mut high) = (published[at], wanted[at]);
        while low < high {
            within[at] = low + (high - low).div_ceil(2);
            if fits(&within) { low = within[at] } else { high = within[at] - 1 }
        }
        within[at] = low;
    }
    let share =
        if trains { one_f_one_b_rr::bound } else { inference::bound }(&pipeline.clone().with_caps(&within)).share;
    within.into_iter().zip(with(share)).map(|(most, needed)| most.min(needed)).collect()
}
