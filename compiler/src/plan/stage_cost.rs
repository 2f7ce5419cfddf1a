//! Cost of one stage under each cost model. The level-by-level searches know no other cost.
//!
//! At level k a [`StageRange`] is a range of ops on `replicas` units, a unit being all devices of the level below. One
//! unit takes `inner_us`. Times are microseconds per minibatch.
//!
//! ```text
//! paper       T_k(i..j, m) = max( A_{k-1}(i..j), 2 (m-1) |w| / B_k ) / m             and 2 a_s / B_k at the cut before
//! pipedream   T_k(i..j, m) = ( A_{k-1}(i..j) + 4 (m-1) |w| / (B_k m) / d ) / m       d = n_{k-1} for the first part, else 1
//!             with a compression ratio r, later parts also 2 out(s) / (B_k m r) and, unless last, 2 out(j) / (B_k m r)
//! ```
//!
//! Under cost `pipec` a stage's cost depends on its devices, and `cost_estimate` has the equations. For code that
//! treats all models alike, this module has the one-level 1F1B-RR form: max( A, 2 (m-1)/m |w| / B + (a_in + a_out) / B
//! ) / m.
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
//! `cut_bytes` computes the bytes that cross a cut.
//!
//! `pipedream` reproduces Narayanan et al.'s released optimizer: the weights of a first range travel n_{k-1} times
//! faster than those of later ones. The paper (SOSP 2019, section 3.1) has no such factor.

use crate::cluster::Cluster;
use crate::plan::problem::{CostModel, Problem};

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LevelCost {
    pub count: u32,
    pub bytes_per_us: f64,
    /// Units of the level below; 1 at the innermost.
    pub previous_count: u32,
}

/// A range of ops on some units of one level.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StageRange {
    /// True if it starts where the level's whole span starts.
    pub is_first: bool,
    /// True if it ends with the model.
    pub is_last: bool,
    pub replicas: u32,
    /// Time on one unit, in microseconds.
    pub inner_us: f64,
    pub weight_bytes: f64,
    pub in_bytes: f64,
    pub out_bytes: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StageCost {
    pub model: CostModel,
    pub activation_compression: Option<f64>,
}

impl StageCost {
    pub fn of(problem: &Problem) -> StageCost {
        StageCost { model: problem.cost, activation_compression: problem.activation_compression }
    }

    /// Time of `part` per minibatch at `level`, links included, in microseconds.
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
            // The device waits for its transfers; these models do not replicate.
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
    /// Lower bound in microseconds for a range that receives `in_bytes`, is not the first of its span and has up to
    /// `most` replicas.
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
