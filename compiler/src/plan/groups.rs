//! Stages whose replicas are groups of devices that share every op: tensor parallelism in a plan.
//!
//! The devices of a group stand side by side within one unit of the fastest level. All do the same at the same time, each with its part, and
//! what goes to another stage goes from each device of a group to the one in its place of the other. So one device of each group stands for
//! all: it takes the times and bytes of a stage, its gradients meet those of its likes, and of a link that a unit's devices share it
//! has what is left to each of a group.

use crate::cluster::{BytesPerSecond, Level};
use crate::plan::{Plan, Stage};

/// The most devices of a group.
pub const MOST: u32 = 64;

/// The first device of each group of a stage; all devices where nothing is shared.
pub fn leads(stage: &Stage) -> Vec<u32> {
    stage.devices.iter().copied().step_by(stage.degree() as usize).collect()
}

/// Stages of which one device stands for each group, and levels as that one sees them; nothing where no stage is shared.
pub fn led(levels: &[Level], stages: &[Stage]) -> Option<(Vec<Level>, Vec<Stage>)> {
    let most = stages.iter().map(Stage::degree).max().filter(|degree| *degree > 1)?;
    let one = |stage: &Stage| Stage { devices: leads(stage), tensor_degree: None, ..stage.clone() };
    Some((seen(levels, most), stages.iter().map(one).collect()))
}

/// Levels as one device of a group of so many sees them.
pub fn seen(levels: &[Level], degree: u32) -> Vec<Level> {
    let mut levels = levels.to_vec();
    for level in levels.iter_mut().skip(1).filter(|level| level.shared) {
        level.bandwidth = BytesPerSecond(level.bandwidth.0 / f64::from(degree));
    }
    levels
}

/// What is wrong with the groups of a plan, by stage: all stages have groups of one size, each side by side in one unit of the fastest level.
pub fn wrong(plan: &Plan) -> Vec<(usize, String)> {
    let first = plan.stages.first().map_or(1, Stage::degree);
    let unit = plan.cluster.levels.first().map_or(1, |level| level.count.max(1));
    let mut wrong = Vec::new();
    for (at, stage) in plan.stages.iter().enumerate() {
        let degree = stage.degree();
        if degree != first {
            let what = format!("{degree} devices share each replica, those of stage 0 are shared by {first}");
            wrong.push((at, format!("{what}; stages of one plan are shared by equally many")));
        }
        if stage.tensor_degree == Some(0) || degree > MOST {
            wrong.push((at, format!("{degree} devices share each replica; a group has 1 to {MOST}")));
            continue;
        }
        for group in stage.devices.chunks(degree as usize).filter(|_| degree > 1) {
            let begin = group[0];
            let is_row = group.iter().zip(begin..).all(|(device, expected)| *device == expected);
            if !is_row || !begin.is_multiple_of(degree) || begin / unit != (begin + degree - 1) / unit {
                let level = plan.cluster.levels.first().map_or("", |level| &level.name).escape_debug();
                let what = format!("devices {group:?} share a replica and are not {degree} in a row");
                wrong.push((at, format!("{what}, from a multiple of {degree} on, within one unit of {level}")));
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
