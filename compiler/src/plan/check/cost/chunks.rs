//! Recomputes the cost of a plan with several stages per device, from the definitions in `plan::chunks`.

use crate::cluster::Level;
use crate::plan::Plan;
use crate::plan::check::cost::{LevelLoad, farthest};
use std::collections::{BTreeMap, BTreeSet};

/// Sums per stage, in microseconds per micro-batch.
pub struct Sums<'a> {
    pub forward: &'a [f64],
    /// Forward and backward.
    pub compute: &'a [f64],
    /// Messages by level, without those between stages on the same devices.
    pub over: &'a [Vec<LevelLoad>],
    pub way_in: &'a [f64],
    pub reduce: &'a [f64],
}

/// Minibatch time in microseconds, and the bottleneck.
pub fn time(levels: &[Level], plan: &Plan, sums: &Sums<'_>) -> (f64, String) {
    let m = f64::from(plan.schedule.microbatches.max(1));
    let mut ranks: BTreeMap<&[u32], Vec<usize>> = BTreeMap::new();
    for (at, stage) in plan.stages.iter().enumerate() {
        ranks.entry(&stage.devices).or_default().push(at);
    }
    let r = plan.stages.first().map_or(1.0, |stage| f64::from(stage.replicas.max(1)));
    let pace: f64 =
        sums.compute.chunks(ranks.len().max(1)).map(|chunk| chunk.iter().copied().fold(0.0, f64::max)).sum();
    let computes = |held: &[usize]| held.iter().map(|&at| sums.compute[at]).sum::<f64>();
    let slowest = ranks.values().fold(
        &[][..],
        |slowest: &[usize], held| {
            if computes(held) > computes(slowest) { held } else { slowest }
        },
    );
    let stage_names = slowest.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ");
    let mut loads = vec![((m / r).ceil().max(1.0) * pace, format!("compute of stages {stage_names}"))];
    let mut ports: BTreeMap<(usize, u64), f64> = BTreeMap::new();
    for (devices, held) in &ranks {
        let r = devices.len().max(1) as f64;
        let times = (m / r).ceil().max(1.0);
        let stage_names = held.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ");
        let mut unit = 1u64;
        for (level, about) in levels.iter().enumerate() {
            let messages: f64 = held.iter().map(|&at| sums.over[at][level].comes + sums.over[at][level].goes).sum();
            loads.push((times * messages, format!("links of stages {stage_names} on {}", about.name.escape_debug())));
            if about.shared && level > 0 {
                for device in devices.iter() {
                    *ports.entry((level, u64::from(*device) / unit)).or_default() += messages / r;
                }
            }
            unit = unit.saturating_mul(u64::from(about.count.max(1)));
        }
    }
    for ((level, unit), us) in ports {
        loads.push((m * us, format!("the shared link of unit {unit} on {}", levels[level].name.escape_debug())));
    }
    let mut worst = (0.0, "compute of stage 0".to_string());
    for load in loads {
        if load.0 > worst.0 {
            worst = load;
        }
    }
    let on_a_v = plan.schedule.kind.is_on_a_v();
    let mut fill = 0.0;
    for at in 0..ranks.len().saturating_sub(1) {
        let next = sums.way_in[at + 1];
        fill += if on_a_v { sums.forward[at] + next } else { sums.compute[at] + 2.0 * next };
    }
    let way: f64 = sums.compute.iter().zip(sums.way_in).map(|(compute, comes)| compute + 2.0 * comes).sum();
    let reduce = ranks.values().map(|held| held.iter().map(|&at| sums.reduce[at]).sum::<f64>()).fold(0.0, f64::max);
    ((worst.0 + fill).max(way) + reduce, worst.1)
}

/// The outermost level that separates the devices of two stages; `None` if both use the same devices.
pub fn between(levels: &[Level], plan: &Plan, from: usize, to: usize) -> Option<usize> {
    let (from, to) = (&plan.stages[from].devices, &plan.stages[to].devices);
    if from == to {
        return None;
    }
    let both: BTreeSet<u32> = from.iter().chain(to).copied().collect();
    farthest(levels, &both.into_iter().collect::<Vec<_>>())
}
