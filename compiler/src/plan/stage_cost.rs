//! What a stage costs, by the name of a cost model. This file is all that the searches over levels know of cost.
//!
//! A cluster is searched level by level. At level k a [`StageRange`] is a run of ops on `replicas` units, a unit being all devices of
//! the level below; what one unit needs for it is `inner_us`. Times are microseconds for one minibatch.
//!
//! ```text
//! paper       T_k(i..j, m) = max( A_{k-1}(i..j), 2 (m-1) |w| / B_k ) / m             and 2 a_s / B_k at the cut before
//! pipedream   T_k(i..j, m) = ( A_{k-1}(i..j) + 4 (m-1) |w| / (B_k m) / d ) / m       d = n_{k-1} for the first part, else 1
//!             with a compression ratio r, later parts also 2 out(s) / (B_k m r) and, unless last, 2 out(j) / (B_k m r)
//! ```
//!
//! Cost `pipec` is not made of parts: what a stage costs depends on its place, and `outlook` gives the equations. Here it stands as it is
//! on one level under 1F1B-RR, for code that asks every model for a part: max( A, 2 (m-1)/m |w| / B + (a_in + a_out) / B ) / m.
//!
//! | equation | here                    | unit         |
//! | ---      | ---                     | ---          |
//! | A_{k-1}  | `StageRange::inner_us`        | microseconds |
//! | m        | `StageRange::replicas`        |              |
//! | w        | `StageRange::weight_bytes`    | bytes        |
//! | a_s, out | `StageRange::in_bytes`, `out_bytes` | bytes  |
//! | B_k      | `LevelCost::bytes_per_us` | bytes/µs   |
//! | n_{k-1}  | `LevelCost::previous_count` |          |
//!
//! What crosses a cut is told by `cut_bytes`.
//!
//! `pipedream` is Narayanan et al.'s released optimizer, to the letter: the weights of a first part travel n_{k-1} times faster
//! than those of a later one, because that is what it computes. The paper (SOSP 2019, section 3.1) has no such factor.

use crate::cluster::Cluster;
use crate::plan::problem::{CostModel, Problem};

/// What a cost model needs of one level.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LevelCost {
    /// Units at this level.
    pub count: u32,
    /// Bandwidth in bytes per microsecond.
    pub bytes_per_us: f64,
    /// Units of the level below, 1 at the innermost.
    pub previous_count: u32,
}

/// A run of ops on some units of one level.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StageRange {
    /// Whether it starts where the level's whole span starts.
    pub is_first: bool,
    /// Whether it ends with the model.
    pub is_last: bool,
    /// Units that share the minibatches.
    pub replicas: u32,
    /// Time on one unit, in microseconds.
    pub inner_us: f64,
    /// Bytes of its parameters.
    pub weight_bytes: f64,
    /// Bytes that cross the cut before it.
    pub in_bytes: f64,
    /// Bytes that cross the cut after it.
    pub out_bytes: f64,
}

/// A cost model with its settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StageCost {
    /// Which equations.
    pub model: CostModel,
    /// PipeDream's activation compression ratio.
    pub activation_compression: Option<f64>,
}

impl StageCost {
    /// The cost model of a problem.
    pub fn of(problem: &Problem) -> StageCost {
        StageCost { model: problem.cost, activation_compression: problem.activation_compression }
    }

    /// Time that `part` needs for one minibatch at `level`, links included, in microseconds.
    pub fn part_us(&self, level: &LevelCost, part: &StageRange) -> f64 {
        let m = f64::from(part.replicas);
        let bandwidth = level.bytes_per_us;
        match self.model {
            CostModel::Paper => {
                let all_reduce = 2.0 * (m - 1.0) * part.weight_bytes / bandwidth;
                let stage = part.inner_us.max(all_reduce) / m;
                let boundary = if part.is_first { 0.0 } else { 2.0 * part.in_bytes / bandwidth };
                stage.max(boundary)
            }
            // One device that waits for its transfers; such devices do not replicate.
            CostModel::Load | CostModel::Hybrid if part.replicas > 1 => f64::INFINITY,
            CostModel::Load | CostModel::Hybrid => part.inner_us + (part.in_bytes + part.out_bytes) / bandwidth,
            CostModel::Pipedream => {
                let all_reduce = 4.0 * (m - 1.0) * part.weight_bytes / (bandwidth * m);
                if part.is_first {
                    return (part.inner_us + all_reduce / f64::from(level.previous_count)) / m;
                }
                let stage = (part.inner_us + all_reduce) / m;
                let Some(ratio) = self.activation_compression else { return stage };
                let input = 2.0 * part.in_bytes / (bandwidth * m * ratio);
                let output = if part.is_last { 0.0 } else { 2.0 * part.out_bytes / (bandwidth * m * ratio) };
                stage.max(input).max(output)
            }
            CostModel::Pipec => {
                let all_reduce = 2.0 * (m - 1.0) / m * part.weight_bytes / bandwidth;
                let input = if part.is_first { 0.0 } else { part.in_bytes / bandwidth };
                let output = if part.is_last { 0.0 } else { part.out_bytes / bandwidth };
                part.inner_us.max(all_reduce + input + output) / m
            }
        }
    }
}

impl StageCost {
    /// What the link before a part takes at `level` at least, in microseconds, if so many bytes cross the cut before it: no part
    /// of up to `most` replicas that begins there, and is not the first of its span, is faster.
    pub fn entry_us(&self, level: &LevelCost, in_bytes: f64, most: u32) -> f64 {
        match (self.model, self.activation_compression) {
            (CostModel::Load | CostModel::Hybrid, _) => in_bytes / level.bytes_per_us,
            (CostModel::Paper, _) => 2.0 * in_bytes / level.bytes_per_us,
            (CostModel::Pipedream, Some(ratio)) => 2.0 * in_bytes / (level.bytes_per_us * f64::from(most) * ratio),
            (CostModel::Pipedream, None) => 0.0,
            (CostModel::Pipec, _) => in_bytes / (level.bytes_per_us * f64::from(most)),
        }
    }
}

/// The levels of a cluster as a cost model sees them, innermost first.
pub fn levels(cluster: &Cluster) -> Vec<LevelCost> {
    let mut previous_count = 1;
    let mut levels = Vec::with_capacity(cluster.levels.len());
    for level in &cluster.levels {
        levels.push(LevelCost { count: level.count, bytes_per_us: level.bandwidth.0 / 1e6, previous_count });
        previous_count = level.count;
    }
    levels
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEVEL: LevelCost = LevelCost { count: 4, bytes_per_us: 100.0, previous_count: 2 };
    const PART: StageRange = StageRange {
        is_first: false,
        is_last: false,
        replicas: 2,
        inner_us: 60.0,
        weight_bytes: 1000.0,
        in_bytes: 4000.0,
        out_bytes: 8000.0,
    };

    fn us(model: CostModel, activation_compression: Option<f64>, part: StageRange) -> f64 {
        StageCost { model, activation_compression }.part_us(&LEVEL, &part)
    }

    #[test]
    fn paper() {
        // max(60, 2 * 1 * 1000 / 100) / 2 = 30; 2 * 4000 / 100 = 80
        assert_eq!(us(CostModel::Paper, None, PART), 80.0);
        assert_eq!(us(CostModel::Paper, None, StageRange { is_first: true, ..PART }), 30.0);
        assert_eq!(us(CostModel::Paper, None, StageRange { is_first: true, weight_bytes: 9000.0, ..PART }), 90.0);
    }

    #[test]
    fn no_part_is_faster_than_its_entry() {
        let ratios = [(CostModel::Paper, None), (CostModel::Pipedream, None), (CostModel::Pipedream, Some(0.7))];
        for (model, activation_compression) in ratios {
            let cost = StageCost { model, activation_compression };
            for (replicas, in_bytes) in [(1, 0.0), (1, 9e3), (2, 4e3), (3, 7e3), (4, 1e6)] {
                let part = StageRange { replicas, in_bytes, ..PART };
                assert!(cost.part_us(&LEVEL, &part) >= cost.entry_us(&LEVEL, in_bytes, 4));
            }
        }
        assert_eq!(StageCost { model: CostModel::Paper, activation_compression: None }.entry_us(&LEVEL, 4e3, 4), 80.0);
    }

    #[test]
    fn pipedream() {
        // 4 * 1 * 1000 / (100 * 2) = 20
        assert_eq!(us(CostModel::Pipedream, None, PART), 40.0);
        assert_eq!(us(CostModel::Pipedream, None, StageRange { is_first: true, ..PART }), 35.0);
        assert_eq!(us(CostModel::Pipedream, Some(1.0), PART), 80.0);
        assert_eq!(us(CostModel::Pipedream, Some(1.0), StageRange { is_last: true, ..PART }), 40.0);
        assert_eq!(us(CostModel::Pipedream, Some(0.5), StageRange { is_last: true, ..PART }), 80.0);
    }
}
