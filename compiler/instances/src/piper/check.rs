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
    let ops_of_stage = coverage(hybrid, plan, &mut faults);
    counts(hybrid, plan, &mut faults);
    if !faults.is_empty() {
        return Err(faults);
    }
    let mut choice_of: BTreeMap<u32, (usize, &Choice)> = BTreeMap::new();
    for (at, (stage, ops)) in plan.stages.iter().zip(&ops_of_stage).enumerate() {
        let degree = stage.tensor_degree.unwrap_or(1);
        for (&op, name) in ops.iter().zip(&stage.choices) {
            match hybrid.layers[op as usize].at(degree).iter().find(|choice| choice.name == *name) {
                Some(choice) => drop(choice_of.insert(op, (at, choice))),
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
        let (from, to) = (choice_of[&link.from].0, choice_of[&link.to].0);
        if from > to {
            let tensor = hybrid.layers[link.from as usize].name.clone();
            faults.push(PlanFault::Backward { tensor, from, to });
        }
    }
    edges(hybrid, plan, &|layer| choice_of[&layer].0 as u32, &mut faults);
    let mut max_time: f64 = 0.0;
    for (at, stage) in plan.stages.iter().enumerate() {
        max_time = max_time.max(time(hybrid, stage, at, &choice_of));
        let replicas_after: u64 = plan.stages[at..].iter().map(|stage| u64::from(stage.replicas)).sum();
        let in_flight = replicas_after.div_ceil(u64::from(stage.replicas));
        let bytes_of = |choice: &Choice| choice.bytes_in_flight * in_flight as f64 + choice.bytes_standing;
        let bytes: f64 = choice_of.values().filter(|(place, _)| *place == at).map(|(_, choice)| bytes_of(choice)).sum();
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
    if verify::differs(said, max_time) {
        let (said, found) = (said.to_string(), max_time.to_string());
        faults.push(PlanFault::Figure { what: "predicted.minibatch_us".into(), said, found });
    }
    if faults.is_empty() { Ok(max_time) } else { Err(faults) }
}

fn edges(hybrid: &Hybrid, plan: &Plan, stage_of: &dyn Fn(u32) -> u32, faults: &mut Vec<PlanFault>) {
    let mut bytes_between: BTreeMap<(u32, u32), u64> = BTreeMap::new();
    for link in &hybrid.links {
        let (from, to) = (stage_of(link.from), stage_of(link.to));
        if from != to {
            let bytes = bytes_between.entry((from, to)).or_default();
            *bytes = bytes.saturating_add(link.bytes as u64);
        }
    }
    verify::edge_bytes(plan, &bytes_between, faults);
}

fn coverage(hybrid: &Hybrid, plan: &Plan, faults: &mut Vec<PlanFault>) -> Vec<Vec<u32>> {
    let mut count = vec![0u32; hybrid.layers.len()];
    if plan.stages.is_empty() {
        faults.push(PlanFault::NoStages);
    }
    let mut ops_of_stage = Vec::with_capacity(plan.stages.len());
    for (stage, planned) in plan.stages.iter().enumerate() {
        let mut ops = Vec::new();
        for &(from, to) in &planned.ops {
            if from >= to || to as usize > count.len() || ops.last().is_some_and(|&last| last >= from) {
                faults.push(PlanFault::Range { stage, from, to, ops: count.len() });
                continue;
            }
            ops.extend(from..to);
            (from..to).for_each(|op| count[op as usize] += 1);
        }
        if ops.len() != planned.choices.len() || ops.is_empty() {
            let what = format!("{} choices for {} ops", planned.choices.len(), ops.len());
            faults.push(PlanFault::Devices { stage, what });
        }
        ops_of_stage.push(ops);
    }
    let miscounted = count.iter().enumerate().filter(|(_, count)| **count != 1);
    faults.extend(miscounted.take(16).map(|(op, &count)| PlanFault::Coverage { op, count }));
    ops_of_stage
}

fn counts(hybrid: &Hybrid, plan: &Plan, faults: &mut Vec<PlanFault>) {
    let (mut devices, mut replicas) = (0u64, 0u64);
    for (at, stage) in plan.stages.iter().enumerate() {
        let count = u64::from(stage.replicas) * u64::from(stage.tensor_degree.unwrap_or(1));
        if stage.replicas == 0 || !hybrid.microbatches.is_multiple_of(stage.replicas) {
            let what = format!("{} replicas do not divide {} micro-batches", stage.replicas, hybrid.microbatches);
            faults.push(PlanFault::Devices { stage: at, what });
        }
        if count != stage.devices.len() as u64 {
            let what = format!("{} devices instead of {count}", stage.devices.len());
            faults.push(PlanFault::Devices { stage: at, what });
        }
        devices += count;
        replicas += u64::from(stage.replicas);
    }
    let over = [
        ("devices", devices, hybrid.devices),
        ("replicas, at most one per micro-batch", replicas, hybrid.microbatches),
    ];
    for (what, count, limit) in over {
        if count > u64::from(limit) {
            let what = format!("all stages use {count} {what}; there are {limit}");
            faults.push(PlanFault::Devices { stage: plan.stages.len().saturating_sub(1), what });
        }
    }
}

fn time(hybrid: &Hybrid, stage: &Stage, at: usize, choice_of: &BTreeMap<u32, (usize, &Choice)>) -> f64 {
    let d = f64::from(stage.replicas);
    let mut compute = 0.0;
    let mut transfer_bytes = 0.0;
    let mut sync_bytes = 0.0;
    for (&op, &(stage_at, choice)) in choice_of {
        if stage_at != at {
            continue;
        }
        compute += choice.time / d;
        sync_bytes += 4.0 * (d - 1.0) / d * choice.weight_bytes / f64::from(hybrid.microbatches);
        let layer: &Layer = &hybrid.layers[op as usize];
        for (&link, sync) in layer.links.iter().zip(&choice.sync) {
            let link = &hybrid.links[link as usize];
            let neighbour = if link.from == op { link.to } else { link.from };
            if choice_of[&neighbour].0 != at {
                transfer_bytes += 2.0 * (link.bytes + sync) / d;
            }
        }
    }
    compute + (transfer_bytes + sync_bytes) / hybrid.bandwidth
}
