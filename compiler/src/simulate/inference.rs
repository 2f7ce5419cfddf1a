//! Steady state of inference: required caps, and throughput under given caps.
//!
//! A stage s holds an item from its forward until it is sent to the last receiver. A receiver accepts it once it is
//! done with the second item before it. A_s is the earliest time at which s can start an item:
//!
//! ```text
//! A_v  =  max over edges e from s to v:  A_s + F_s + t(e)
//! T   ≥  (F_s + t(e)) / (c_s r_s)
//! T   ≥  (A_v - A_s + F_v + t(e)) / (c_s r_s + 2 r_v)
//! ```

use crate::plan::schedule::Schedule;
use crate::schedule::Pipeline;
use crate::schedule::lower::NEXT;
use crate::simulate::SimulateError;
use crate::simulate::one_f_one_b_rr::{Steady, ideal_us};
use crate::simulate::step_time;

/// The pipeline without backward, step and all-reduce times.
fn forwards(pipeline: &Pipeline) -> Pipeline {
    let mut pipeline = pipeline.clone();
    for stage in &mut pipeline.stages {
        (stage.backward, stage.weight, stage.step, stage.all_reduce) = (0.0, 0.0, 0.0, 0.0);
    }
    pipeline.edges.iter_mut().for_each(|edge| edge.backward_us = 0.0);
    pipeline
}

/// Earliest start of an item at each stage, relative to the first stages.
fn begins_us(pipeline: &Pipeline) -> Vec<f64> {
    let mut begins = vec![0.0f64; pipeline.stages.len()];
    let mut incoming = vec![Vec::new(); begins.len()];
    pipeline.edges.iter().for_each(|edge| incoming[edge.to.index()].push(edge));
    // Edges go to later stages, so predecessors are final.
    for at in 0..begins.len() {
        for edge in &incoming[at] {
            let from = edge.from.index();
            begins[at] = begins[at].max(begins[from] + pipeline.stages[from].forward + edge.forward_us);
        }
    }
    begins
}

/// Smallest caps that can reach a fraction of the ideal throughput.
pub fn needed_caps(pipeline: &Pipeline, share: f64) -> Vec<u32> {
    let us = ideal_us(&forwards(pipeline)) / share;
    let begins = begins_us(pipeline);
    let mut needed = vec![1u32; begins.len()];
    for held in held(pipeline, &begins) {
        let items = (held.sent_us / us).max(held.taken_us / us - held.room);
        let rounds = items / f64::from(pipeline.stages[held.from].replicas) * (1.0 - 1e-9);
        // `as` maps NaN to 0 and saturates.
        needed[held.from] = needed[held.from].max((rounds.ceil() as u32).min(1 << 20));
    }
    needed
}

/// Upper bound of the throughput under the pipeline's caps, as a fraction of the ideal, with the limiting stages.
pub fn bound(pipeline: &Pipeline) -> Steady {
    let ideal = ideal_us(&forwards(pipeline));
    let begins = begins_us(pipeline);
    let mut least = vec![ideal; begins.len()];
    for held in held(pipeline, &begins) {
        let sender = &pipeline.stages[held.from];
        let items = f64::from(sender.cap) * f64::from(sender.replicas);
        let us = (held.sent_us / items).max(held.taken_us / (items + held.room));
        least[held.from] = least[held.from].max(us);
    }
    let most = least.iter().copied().fold(ideal, f64::max);
    let held = least.iter().map(|&us| us > ideal && us >= most * (1.0 - 1e-3)).collect();
    let share = if most > 0.0 { ideal / most } else { 1.0 };
    Steady { share, held, pieces: begins.len() as u64 }
}

struct Held {
    from: usize,
    /// From the start of its forward until it is sent.
    sent_us: f64,
    /// From the start of its forward until its reader is done with it.
    taken_us: f64,
    /// Items that the reader's replicas accept: running ones, and those with a posted Recv.
    room: f64,
}

fn held(pipeline: &Pipeline, begins: &[f64]) -> impl Iterator<Item = Held> {
    pipeline.edges.iter().map(move |edge| {
        let (from, to) = (edge.from.index(), edge.to.index());
        let [sender, reader] = [from, to].map(|at| &pipeline.stages[at]);
        Held {
            from,
            sent_us: sender.forward + edge.forward_us,
            taken_us: begins[to] - begins[from] + reader.forward + edge.forward_us,
            room: f64::from(1 + NEXT) * f64::from(reader.replicas),
        }
    })
}

/// Simulates the pipeline under its caps; too large pipelines use [`bound`]. The limiting stages are unknown, so all
/// are marked.
pub fn steady(pipeline: &Pipeline) -> Result<Steady, SimulateError> {
    let Some(us) = step_time::step_us(Schedule::Inference, pipeline, 1)? else { return Ok(bound(pipeline)) };
    let share = if us > 0.0 { (ideal_us(&forwards(pipeline)) / us).min(1.0) } else { 1.0 };
    let stages = pipeline.stages.len();
    Ok(Steady { share, held: vec![true; stages], pieces: step_time::pieces(pipeline, 1) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::{Edge, StageSpec};

    fn chain(transfer_us: f64, skip: bool) -> Pipeline {
        let mut pipeline = Pipeline::chain((0..4).map(|_| StageSpec::new(1, 10.0, 20.0)).collect());
        if skip {
            pipeline.edges.push(Edge::new(0, 3));
        }
        pipeline.edges.iter_mut().for_each(|edge| edge.forward_us = transfer_us);
        pipeline
    }

    #[test]
    fn two_in_flight_hide_transfers() {
        let share = |caps: [u32; 4], us: f64| steady(&chain(us, false).with_caps(&caps)).unwrap().share;
        assert_eq!(share([1; 4], 0.0), 1.0);
        assert_eq!(share([1; 4], 10.0), 0.5);
        assert_eq!(share([2, 2, 2, 1], 10.0), 1.0);
        assert_eq!(share([2, 2, 2, 1], 25.0), 1.0, "of what the links let it");
        assert_eq!(needed_caps(&chain(10.0, false), 1.0), [2, 2, 2, 1]);
        assert_eq!(bound(&chain(10.0, false).with_caps(&[1; 4])).share, 0.5);
    }

    #[test]
    fn who_skips_stages_is_waited_for() {
        // The last stage starts 45 us after the first, which produces an item every 10 us.
        let pipeline = chain(5.0, true);
        assert_eq!(needed_caps(&pipeline, 1.0), [4, 2, 2, 1]);
        for (first, share) in [(1, 0.5), (2, 2.0 / 3.0), (3, 5.0 / 6.0), (4, 1.0)] {
            let pipeline = pipeline.clone().with_caps(&[first, 2, 2, 1]);
            let found = steady(&pipeline).unwrap().share;
            assert!((found - share).abs() < 0.01, "{found} with {first}");
            assert!((bound(&pipeline).share - share).abs() < 1e-9, "{:?}", bound(&pipeline));
        }
    }
}
