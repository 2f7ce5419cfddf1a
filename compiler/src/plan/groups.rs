//! Tensor-parallel groups in a plan: replicas that consist of several devices.
//!
//! The devices of a group are consecutive and within one unit of the innermost level. Each sends to the device of the
//! same tensor rank in another stage's group. All do the same work, so one device per group represents it. Times and
//! bytes are per device, gradients are all-reduced per tensor rank, and bandwidth of shared links is divided by the
//! degree.

use crate::cluster::{BytesPerSecond, Level};
use crate::plan::{Plan, Stage};
use crate::profile::shared::TensorParallelCosts;

pub const MOST: u32 = 64;

/// The costs at the degree and with the weight layout of a plan.
pub fn costs<'a>(all: &'a [TensorParallelCosts], plan: &Plan) -> Option<&'a TensorParallelCosts> {
    let first = plan.stages.first()?;
    let layout = first.tensor_parallel.as_ref().map_or_else(Default::default, |of| (of.keeps_weights, of.activations));
    let is_same = |costs: &&TensorParallelCosts| {
        costs.devices == first.degree() && (costs.keeps_weights, costs.activations) == layout
    };
    all.iter().find(is_same)
}

/// The first device of each group of a stage; all devices at degree 1.
pub fn leads(stage: &Stage) -> Vec<u32> {
    stage.devices.iter().copied().step_by(stage.degree() as usize).collect()
}

/// Reduces a tensor-parallel plan to one device per group, with the levels that it sees. `None` at degree 1.
pub fn led(levels: &[Level], stages: &[Stage]) -> Option<(Vec<Level>, Vec<Stage>)> {
    let most = stages.iter().map(Stage::degree).max().filter(|degree| *degree > 1)?;
    let one = |stage: &Stage| Stage { devices: leads(stage), tensor_degree: None, ..stage.clone() };
    Some((seen(levels, most), stages.iter().map(one).collect()))
}

/// Levels as seen by one device of a tensor-parallel group: shared levels have 1 / `degree` of the bandwidth.
pub fn seen(levels: &[Level], degree: u32) -> Vec<Level> {
    let mut levels = levels.to_vec();
    for level in levels.iter_mut().skip(1).filter(|level| level.shared) {
        level.bandwidth = BytesPerSecond(level.bandwidth.0 / f64::from(degree));
    }
    levels
}

/// Errors of a plan's tensor-parallel groups, with the stage. All stages need the same degree, and each group
/// consecutive devices in one unit of the innermost level.
pub fn wrong(plan: &Plan) -> Vec<(usize, String)> {
    let first = plan.stages.first().map_or(1, Stage::degree);
    let unit = plan.cluster.levels.first().map_or(1, |level| level.count.max(1));
    let mut wrong = Vec::new();
    for (at, stage) in plan.stages.iter().enumerate() {
        let degree = stage.degree();
        if degree != first {
            let what = format!("tensor-parallel degree {degree}, that of stage 0 is {first}");
            wrong.push((at, format!("{what}; all stages of a plan need the same degree")));
        }
        if stage.tensor_degree == Some(0) || degree > MOST {
            wrong.push((at, format!("tensor-parallel degree {degree}; it must be from 1 to {MOST}")));
            continue;
        }
        for group in stage.devices.chunks(degree as usize).filter(|_| degree > 1) {
            let begin = group[0];
            let is_row = group.iter().zip(begin..).all(|(device, expected)| *device == expected);
            if !is_row || !begin.is_multiple_of(degree) || begin / unit != (begin + degree - 1) / unit {
                let level = plan.cluster.levels.first().map_or("", |level| &level.name).escape_debug();
                let what = format!("the tensor-parallel group {group:?} is not {degree} consecutive devices");
                wrong.push((at, format!("{what}, starting at a multiple of {degree}, within one unit of {level}")));
            }
        }
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::read::levels;

    #[test]
    fn a_shared_link_is_divided() {
        let mut levels = levels("8:400GB/s,4:50GB/s").unwrap().levels;
        assert_eq!(seen(&levels, 4), levels);
        levels[1].shared = true;
        assert_eq!(seen(&levels, 4)[1].bandwidth.0, 12.5e9);
        assert_eq!(seen(&levels, 4)[0].bandwidth.0, 400e9);
    }
}
