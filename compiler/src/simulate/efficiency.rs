//! Steady-state efficiency of a pipeline, and the smallest in-flight limits that reach it.

use crate::schedule::{Pipeline, published_caps};
use crate::simulate::SimulateError;
use crate::simulate::one_f_one_b_rr::steady;

pub const TARGET: f64 = 0.98;

/// Most in-flight items that [`auto_caps`] adds to the published caps.
const MOST_EXTRA: u32 = 8;

/// Steady-state throughput of 1F1B-RR with the pipeline's caps, as a fraction of the bottleneck's ideal.
pub fn steady_efficiency(pipeline: &Pipeline) -> Result<f64, SimulateError> {
    Ok(steady(pipeline)?.share)
}

/// In-flight limits per stage: at least the published ones, and as few more as reach [`TARGET`] or the best achievable
/// efficiency.
///
/// It first raises all stages together until the target is met. Then it lowers each as far as the target stays met, in
/// descending order of stash bytes (a weight version and an item's activations on every replica). No single cap of the
/// result can be lowered.
pub fn auto_caps(pipeline: &Pipeline) -> Result<Vec<u32>, SimulateError> {
    pipeline.validate()?;
    let replicas: Vec<u32> = pipeline.stages.iter().map(|stage| stage.replicas).collect();
    let published = published_caps(&replicas);
    let raised = |extra: u32| published.iter().map(|cap| cap + extra).collect::<Vec<u32>>();
    let reached = |caps: &[u32]| steady_efficiency(&pipeline.clone().with_caps(caps));

    let (mut caps, mut best) = (published.clone(), 0.0);
    for extra in 0..=MOST_EXTRA {
        let efficiency = reached(&raised(extra))?;
        // Raise caps only for a measurable gain; a link-bound pipeline gains nothing.
        if efficiency > best + 0.002 {
            (caps, best) = (raised(extra), efficiency);
        }
        if best >= TARGET {
            break;
        }
    }
    let target = best.min(TARGET);

    let cost = |stage: usize| {
        let shape = &pipeline.stages[stage];
        u128::from(shape.replicas) * (u128::from(shape.param_bytes) + u128::from(shape.saved_bytes))
    };
    let mut dearest: Vec<usize> = (0..caps.len()).collect();
    dearest.sort_by_key(|&stage| (std::cmp::Reverse(cost(stage)), std::cmp::Reverse(replicas[stage]), stage));
    loop {
        let before = caps.clone();
        for &stage in &dearest {
            while caps[stage] > published[stage] {
                caps[stage] -= 1;
                if reached(&caps)? < target {
                    caps[stage] += 1;
                    break;
                }
            }
        }
        if caps == before {
            return Ok(caps);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Balanced stages, B = 2 F, no communication, published caps plus `extra`.
    fn efficiency(replicas: &[u32], extra: u32) -> f64 {
        let caps: Vec<u32> = published_caps(replicas).iter().map(|cap| cap + extra).collect();
        steady_efficiency(&Pipeline::balanced(replicas, 2.0).with_caps(&caps)).unwrap()
    }

    #[test]
    fn caps_buy_throughput() {
        let table: [(&[u32], [f64; 4]); 9] = [
            (&[1, 1, 1, 1], [1.0, 1.0, 1.0, 1.0]),
            (&[3, 1], [0.75, 1.0, 1.0, 1.0]),
            (&[15, 1], [0.94, 1.0, 1.0, 1.0]),
            (&[2, 1], [0.80, 1.0, 1.0, 1.0]),
            (&[1, 3, 1], [0.75, 0.86, 1.0, 1.0]),
            (&[1, 4, 2, 1], [0.66, 1.0, 1.0, 1.0]),
            (&[9, 5, 1, 1], [0.60, 0.95, 1.0, 1.0]),
            (&[8, 5, 3], [0.56, 0.88, 0.96, 1.0]),
            (&[7, 4, 3, 1, 1], [0.75, 1.0, 1.0, 1.0]),
        ];
        let mut wrong = String::new();
        for (replicas, expected) in table {
            for (extra, expected) in (0..).zip(expected) {
                let found = efficiency(replicas, extra);
                if (found - expected).abs() > 0.015 {
                    wrong += &format!("{replicas:?} + {extra}: {found:.3}, expected {expected}\n");
                }
            }
        }
        assert!(wrong.is_empty(), "\n{wrong}");
    }

    #[test]
    fn automatic_caps_reach_the_bottleneck() {
        for replicas in [&[1, 3, 1][..], &[9, 5, 1, 1], &[8, 5, 3], &[1, 1, 1, 1], &[2, 1]] {
            let pipeline = Pipeline::balanced(replicas, 2.0);
            let caps = auto_caps(&pipeline).unwrap();
            let efficiency = steady_efficiency(&pipeline.with_caps(&caps)).unwrap();
            assert!(efficiency >= TARGET, "{replicas:?} with {caps:?}: {efficiency}");
        }
    }
}
