//! Checker of placement plans: computes memory and load from the definition in `model.rs`. It shares no
//! code with the searches.

use crate::placement::model::Placement;
use compiler::plan::Plan;
use compiler::plan::check::error::PlanFault;
use compiler::plan::check::verify;
use compiler::plan::problem::NOMINAL;
use std::collections::{BTreeMap, BTreeSet};

/// Checks that every node is on one device, that nodes of one colour share a device, and that memory suffices. Also
/// checks the load that the plan states. Returns the load.
pub fn check(placement: &Placement, plan: &Plan) -> Result<f64, Vec<PlanFault>> {
    let mut faults = Vec::new();
    let mut device_of: Vec<Option<usize>> = vec![None; placement.nodes.len()];
    let mut count = vec![0u32; placement.nodes.len()];
    if plan.stages.is_empty() {
        faults.push(PlanFault::NoStages);
    }
    for (stage, held) in plan.stages.iter().enumerate() {
        for &(from, to) in &held.ops {
            if from >= to || to as usize > placement.nodes.len() {
                faults.push(PlanFault::Range { stage, from, to, ops: placement.nodes.len() });
                continue;
            }
            for op in from as usize..to as usize {
                device_of[op] = Some(stage);
                count[op] += 1;
            }
        }
        if held.replicas != 1 || held.devices.len() != 1 {
            let what = format!("{} replicas; device placements do not replicate", held.replicas);
            faults.push(PlanFault::Devices { stage, what });
        }
    }
    let is_host = |stage: usize| plan.stages[stage].devices.iter().any(|&device| placement.is_host(device));
    let on_hosts = (0..plan.stages.len()).filter(|&stage| is_host(stage)).count();
    let on_devices = plan.stages.len() - on_hosts;
    for (used, there, name) in [(on_devices, placement.devices, "devices"), (on_hosts, placement.hosts, "hosts")] {
        if used > there as usize {
            let what = format!("{used} stages on {there} {name}");
            faults.push(PlanFault::Devices { stage: plan.stages.len() - 1, what });
        }
    }
    let wrong = count.iter().enumerate().filter(|(_, count)| **count != 1);
    faults.extend(wrong.take(16).map(|(op, &count)| PlanFault::Coverage { op, count }));
    if !faults.is_empty() {
        return Err(faults);
    }
    let place = |node: usize| device_of[node].unwrap_or_default();
    let mut first_of: BTreeMap<u64, usize> = BTreeMap::new();
    for (op, node) in placement.nodes.iter().enumerate() {
        let Some(colour) = node.colour else { continue };
        let with = *first_of.entry(colour).or_insert(op);
        if place(with) != place(op) {
            faults.push(PlanFault::Apart { op, stage: place(op), with: with as u32, other: place(with) });
        }
    }
    let mut worst: f64 = 0.0;
    for stage in 0..plan.stages.len() {
        if is_host(stage) {
            let held = placement.nodes.iter().enumerate().filter(|(op, _)| place(*op) == stage);
            worst = worst.max(held.map(|(_, node)| node.host_time).sum());
            continue;
        }
        let mut load = 0.0;
        let mut bytes = 0.0;
        for (op, node) in placement.nodes.iter().enumerate() {
            let reading: BTreeSet<usize> = node.readers.iter().map(|&to| place(to as usize)).collect();
            if place(op) == stage {
                if node.time.is_infinite() {
                    let what = format!("op {op} runs on hosts only");
                    faults.push(PlanFault::Devices { stage, what });
                }
                load += node.time;
                bytes += node.bytes;
                load += if reading.iter().any(|&to| to != stage) { node.transfer } else { 0.0 };
            } else if reading.contains(&stage) {
                load += node.transfer;
            }
        }
        if bytes > placement.bytes_per_device {
            let (needed, limit) = (bytes as u64, placement.bytes_per_device as u64);
            faults.push(PlanFault::Memory { stage, needed, limit });
        }
        worst = worst.max(load);
    }
    times(placement, plan, &place, &is_host, &mut faults);
    edges(placement, plan, &place, &mut faults);
    let said = plan.predicted.minibatch_us;
    if verify::differs(said, worst) {
        let (said, found) = (said.to_string(), worst.to_string());
        faults.push(PlanFault::Figure { what: "predicted.minibatch_us".into(), said, found });
    }
    if faults.is_empty() { Ok(worst) } else { Err(faults) }
}

fn times(
    placement: &Placement,
    plan: &Plan,
    place: &dyn Fn(usize) -> usize,
    is_host: &dyn Fn(usize) -> bool,
    faults: &mut Vec<PlanFault>,
) {
    let mut found = vec![[0.0f64; 2]; plan.stages.len()];
    for (op, node) in placement.nodes.iter().enumerate() {
        let time = if is_host(place(op)) { node.host_time } else { node.time };
        found[place(op)][usize::from(node.is_backward)] += time;
    }
    for (at, (stage, found)) in plan.stages.iter().zip(found).enumerate() {
        for (name, said, found) in [("fwd_us", stage.fwd_us, found[0]), ("bwd_us", stage.bwd_us, found[1])] {
            if verify::differs(said, found) {
                let what = format!("{name} of stage {at}");
                faults.push(PlanFault::Figure { what, said: said.to_string(), found: found.to_string() });
            }
        }
    }
}

/// Checks the edges: each tensor counts once for every device that reads it. Its size is the transfer time times the
/// nominal bandwidth.
fn edges(placement: &Placement, plan: &Plan, place: &dyn Fn(usize) -> usize, faults: &mut Vec<PlanFault>) {
    let mut found: BTreeMap<(u32, u32), u64> = BTreeMap::new();
    for (op, node) in placement.nodes.iter().enumerate() {
        let to: BTreeSet<usize> = node.readers.iter().map(|&to| place(to as usize)).collect();
        for to in to.into_iter().filter(|&to| to != place(op)) {
            let bytes = found.entry((place(op) as u32, to as u32)).or_default();
            *bytes = bytes.saturating_add((node.transfer * NOMINAL.0 / 1e6).round() as u64);
        }
    }
    verify::edge_bytes(plan, &found, faults);
}
