//! Checker of hybrid plans (layers with parallelization choices): computes time and memory of every stage from the
//! definition in `model.rs`. It shares no code with the search.

use crate::piper::model::{Choice, Hybrid, Layer};
use compiler::plan::check::error::PlanFault;
use compiler::plan::check::verify;
use compiler::plan::check::verify::TOLERANCE;
use compiler::plan::{Plan, Stage};
use std::collections::BTreeMap;

/// Checks layers, links, replicas, devices, memory and the stated time per sample. Returns the time.
pub fn check(hybrid: &Hybrid, plan: &Plan) -> Result<f64, Vec<PlanFault>> {
    let mut faults = Vec::new();
    let held = coverage(hybrid, plan, &mut faults);
    counts(hybrid, plan, &mut faults);
    if !faults.is_empty() {
        return Err(faults);
    }
    let mut taken: BTreeMap<u32, (usize, &Choice)> = BTreeMap::new();
    for (at, (stage, ops)) in plan.stages.iter().zip(&held).enumerate() {
        let degree = stage.tensor_degree.unwrap_or(1);
        for (&op, name) in ops.iter().zip(&stage.choices) {
            match hybrid.layers[op as usize].at(degree).iter().find(|choice| choice.name == *name) {
                Some(choice) => drop(taken.insert(op, (at, choice))),
                None => {
                    let what =
                        format!("op {op} has no choice `{}` at tensor-parallel degree {degree}", name.escape_debug());
                    faults.push(PlanFault::Devices { stage: at, what });
                }
            }
        }
    }
    if !faults.is_empty() {
        return Err(faults);
    }
    for link in &hybrid.links {
        let (from, to) = (taken[&link.from].0, taken[&link.to].0);
        if from > to {
            let tensor = hybrid.layers[link.from as usize].name.clone();
            faults.push(PlanFault::Backward { tensor, from, to });
        }
    }
    edges(hybrid, plan, &|layer| taken[&layer].0 as u32, &mut faults);
    let mut worst: f64 = 0.0;
    for (at, stage) in plan.stages.iter().enumerate() {
        worst = worst.max(time(hybrid, stage, at, &taken));
        let after: u64 = plan.stages[at..].iter().map(|stage| u64::from(stage.replicas)).sum();
        let in_flight = after.div_ceil(u64::from(stage.replicas));
        let holds = |choice: &Choice| choice.bytes_in_flight * in_flight as f64 + choice.bytes_standing;
        let bytes: f64 = taken.values().filter(|(place, _)| *place == at).map(|(_, choice)| holds(choice)).sum();
        if bytes > hybrid.bytes_per_device * (1.0 + TOLERANCE) {
            let (needed, limit) = (bytes.ceil() as u64, hybrid.bytes_per_device as u64);
            faults.push(PlanFault::Memory { stage: at, needed, limit });
        }
        if plan.schedule.in_flight.get(at).copied().map(u64::from) != Some(in_flight) {
            let said = format!("{:?}", plan.schedule.in_flight.get(at));
            faults.push(PlanFault::Figure {
                what: format!("in_flight of stage {at}"),
                said,
                found: in_flight.to_string(),
            });
        }
    }
    let said = plan.predicted.minibatch_us;
    if verify::differs(said, worst) {
        let (said, found) = (said.to_string(), worst.to_string());
        faults.push(PlanFault::Figure { what: "predicted.minibatch_us".into(), said, found });
    }
    if faults.is_empty() { Ok(worst) } else { Err(faults) }
}

fn edges(hybrid: &Hybrid, plan: &Plan, place: &dyn Fn(u32) -> u32, faults: &mut Vec<PlanFault>) {
    let mut found: BTreeMap<(u32, u32), u64> = BTreeMap::new();
    for link in &hybrid.links {
        let (from, to) = (place(link.from), place(link.to));
        if from != to {
            let bytes = found.entry((from, to)).or_default();
            *bytes = bytes.saturating_add(link.bytes as u64);
        }
    }
    verify::edge_bytes(plan, &found, faults);
}

fn coverage(hybrid: &Hybrid, plan: &Plan, faults: &mut Vec<PlanFault>) -> Vec<Vec<u32>> {
    let mut count = vec![0u32; hybrid.layers.len()];
    if plan.stages.is_empty() {
        faults.push(PlanFault::NoStages);
    }
    let mut held = Vec::with_capacity(plan.stages.len());
    for (stage, given) in plan.stages.iter().enumerate() {
        let mut ops = Vec::new();
        for &(from, to) in &given.ops {
            if from >= to || to as usize > count.len() || ops.last().is_some_and(|&last| last >= from) {
                faults.push(PlanFault::Range { stage, from, to, ops: count.len() });
                continue;
            }
            ops.extend(from..to);
            (from..to).for_each(|op| count[op as usize] += 1);
        }
        if ops.len() != given.choices.len() || ops.is_empty() {
            let what = format!("{} choices for {} ops", given.choices.len(), ops.len());
            faults.push(PlanFault::Devices { stage, what });
        }
        held.push(ops);
    }
    let wrong = count.iter().enumerate().filter(|(_, count)| **count != 1);
    faults.extend(wrong.take(16).map(|(op, &count)| PlanFault::Coverage { op, count }));
    held
}

fn counts(hybrid: &Hybrid, plan: &Plan, faults: &mut Vec<PlanFault>) {
    let (mut devices, mut replicas) = (0u64, 0u64);
    for (at, stage) in plan.stages.iter().enumerate() {
        let used = u64::from(stage.replicas) * u64::from(stage.tensor_degree.unwrap_or(1));
        if stage.replicas == 0 || !hybrid.microbatches.is_multiple_of(stage.replicas) {
            let what = format!("{} replicas do not divide {} micro-batches", stage.replicas, hybrid.microbatches);
            faults.push(PlanFault::Devices { stage: at, what });
        }
        if used != stage.devices.len() as u64 {
            let what = format!("{} devices instead of {used}", stage.devices.len());
            faults.push(PlanFault::Devices { stage: at, what });
        }
        devices += used;
        replicas += u64::from(stage.replicas);
    }
    let over = [
        ("devices", devices, hybrid.devices),
        ("replicas, at most one per micro-batch", replicas, hybrid.microbatches),
    ];
    for (what, used, there) in over {
        if used > u64::from(there) {
            let what = format!("all stages use {used} {what}; there are {there}");
            faults.push(PlanFault::Devices { stage: plan.stages.len().saturating_sub(1), what });
        }
    }
}

fn time(hybrid: &Hybrid, stage: &Stage, at: usize, taken: &BTreeMap<u32, (usize, &Choice)>) -> f64 {
    let d = f64::from(stage.replicas);
    let mut compute = 0.0;
    let mut moved = 0.0;
    let mut shared = 0.0;
    for (&op, &(place, choice)) in taken {
        if place != at {
            continue;
        }
        compute += choice.time / d;
        shared += 4.0 * (d - 1.0) / d * choice.weight_bytes / f64::from(hybrid.microbatches);
        let layer: &Layer = &hybrid.layers[op as usize];
        for (&link, sync) in layer.links.iter().zip(&choice.sync) {
            let link = &hybrid.links[link as usize];
            let other = if link.from == op { link.to } else { link.from };
            if taken[&other].0 != at {
                moved += 2.0 * (link.bytes + sync) / d;
            }
        }
    }
    compute + (moved + shared) / hybrid.bandwidth
}
