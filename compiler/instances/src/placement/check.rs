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
    for (stage, planned) in plan.stages.iter().enumerate() {
        for &(from, to) in &planned.ops {
            if from >= to || to as usize > placement.nodes.len() {
                faults.push(PlanFault::Range { stage, from, to, ops: placement.nodes.len() });
                continue;
            }
            for op in from as usize..to as usize {
                device_of[op] = Some(stage);
                count[op] += 1;
            }
        }
        if planned.replicas != 1 || planned.devices.len() != 1 {
            let what = format!("{} replicas; device placements do not replicate", planned.replicas);
            faults.push(PlanFault::Devices { stage, what });
        }
    }
    let is_host = |stage: usize| plan.stages[stage].devices.iter().any(|&device| placement.is_host(device));
    let on_hosts = (0..plan.stages.len()).filter(|&stage| is_host(stage)).count();
    let on_devices = plan.stages.len() - on_hosts;
    for (used, limit, name) in [(on_devices, placement.devices, "devices"), (on_hosts, placement.hosts, "hosts")] {
        if used > limit as usize {
            let what = format!("{used} stages on {limit} {name}");
            faults.push(PlanFault::Devices { stage: plan.stages.len() - 1, what });
        }
    }
    let miscounted = count.iter().enumerate().filter(|(_, count)| **count != 1);
    faults.extend(miscounted.take(16).map(|(op, &count)| PlanFault::Coverage { op, count }));
    if !faults.is_empty() {
        return Err(faults);
    }
    let stage_of = |node: usize| device_of[node].unwrap_or_default();
    let mut first_of: BTreeMap<u64, usize> = BTreeMap::new();
    for (op, node) in placement.nodes.iter().enumerate() {
        let Some(colour) = node.colour else { continue };
        let first = *first_of.entry(colour).or_insert(op);
        if stage_of(first) != stage_of(op) {
            faults.push(PlanFault::Apart { op, stage: stage_of(op), with: first as u32, other: stage_of(first) });
        }
    }
    let mut max_load: f64 = 0.0;
    for stage in 0..plan.stages.len() {
        if is_host(stage) {
            let nodes = placement.nodes.iter().enumerate().filter(|(op, _)| stage_of(*op) == stage);
            max_load = max_load.max(nodes.map(|(_, node)| node.host_time).sum());
            continue;
        }
        let mut load = 0.0;
        let mut bytes = 0.0;
        for (op, node) in placement.nodes.iter().enumerate() {
            let reader_stages: BTreeSet<usize> = node.readers.iter().map(|&to| stage_of(to as usize)).collect();
            if stage_of(op) == stage {
                if node.time.is_infinite() {
                    let what = format!("op {op} runs on hosts only");
                    faults.push(PlanFault::Devices { stage, what });
                }
                load += node.time;
                bytes += node.bytes;
                load += if reader_stages.iter().any(|&to| to != stage) { node.transfer } else { 0.0 };
            } else if reader_stages.contains(&stage) {
                load += node.transfer;
            }
        }
        if bytes > placement.bytes_per_device {
            let (needed, limit) = (bytes as u64, placement.bytes_per_device as u64);
            faults.push(PlanFault::Memory { stage, needed, limit });
        }
        max_load = max_load.max(load);
    }
    times(placement, plan, &stage_of, &is_host, &mut faults);
    edges(placement, plan, &stage_of, &mut faults);
    let said = plan.predicted.minibatch_us;
    if verify::differs(said, max_load) {
        let (said, found) = (said.to_string(), max_load.to_string());
        faults.push(PlanFault::Figure { what: "predicted.minibatch_us".into(), said, found });
    }
    if faults.is_empty() { Ok(max_load) } else { Err(faults) }
}

fn times(
    placement: &Placement,
    plan: &Plan,
    stage_of: &dyn Fn(usize) -> usize,
    is_host: &dyn Fn(usize) -> bool,
    faults: &mut Vec<PlanFault>,
) {
    let mut found = vec![[0.0f64; 2]; plan.stages.len()];
    for (op, node) in placement.nodes.iter().enumerate() {
        let time = if is_host(stage_of(op)) { node.host_time } else { node.time };
        found[stage_of(op)][usize::from(node.is_backward)] += time;
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
fn edges(placement: &Placement, plan: &Plan, stage_of: &dyn Fn(usize) -> usize, faults: &mut Vec<PlanFault>) {
    let mut bytes_between: BTreeMap<(u32, u32), u64> = BTreeMap::new();
    for (op, node) in placement.nodes.iter().enumerate() {
        let to: BTreeSet<usize> = node.readers.iter().map(|&to| stage_of(to as usize)).collect();
        for to in to.into_iter().filter(|&to| to != stage_of(op)) {
            let bytes = bytes_between.entry((stage_of(op) as u32, to as u32)).or_default();
            *bytes = bytes.saturating_add((node.transfer * NOMINAL.0 / 1e6).round() as u64);
        }
    }
    verify::edge_bytes(plan, &bytes_between, faults);
}
