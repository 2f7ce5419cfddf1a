//! Internal consistency of a plan, checked before it is run or simulated. `verify` checks the values against the
//! model's costs.

use crate::cluster::MAX_DEVICES;
use crate::cluster::read::figures;
use crate::plan::buckets;
use crate::plan::check::error::PlanFault;
use crate::plan::check::verify::class_memory;
use crate::plan::groups;
use crate::plan::problem::CostModel;
use crate::plan::{Plan, RecomputedOps, Stage, zero};
use crate::profile::cost_graph::MAX_ENTRIES;
use std::collections::{BTreeMap, BTreeSet};

/// More operations than any minibatch has.
const MAX_FLOPS: f64 = 1e36;

/// Returns all faults found.
///
/// In a plan that passes, each op is in exactly one stage and edges go forward between existing stages. Every replica
/// has a device of the cluster, and no device has more stages than the schedule has chunks. Caps and weight versions
/// are at least 1, buckets cover whole gradients, and memory sums add up and fit.
pub fn sound(plan: &Plan) -> Result<(), Vec<PlanFault>> {
    let mut faults = Vec::new();
    if plan.stages.is_empty() {
        return Err(vec![PlanFault::NoStages]);
    }
    coverage(plan, &mut faults);
    devices(plan, &mut faults);
    let schedule = &plan.schedule;
    for (name, list) in [("in_flight", &schedule.in_flight), ("weight_versions", &schedule.weight_versions)] {
        if list.len() != plan.stages.len() || list.iter().any(|number| !(1..=1 << 20).contains(number)) {
            let what =
                format!("{name} has {} numbers for {} stages; each is from 1 to 2^20", list.len(), plan.stages.len());
            faults.push(PlanFault::Schedule { what });
        }
    }
    let pending_weight_grads = &schedule.pending_weight_grads;
    if !pending_weight_grads.is_empty()
        && (pending_weight_grads.len() != plan.stages.len()
            || pending_weight_grads.iter().any(|number| !(1..=1 << 20).contains(number)))
    {
        let what = format!(
            "pending_weight_grads has {} numbers for {} stages; each is from 1 to 2^20",
            pending_weight_grads.len(),
            plan.stages.len()
        );
        faults.push(PlanFault::Schedule { what });
    }
    for (name, value) in [
        ("micro_batch", schedule.micro_batch),
        ("microbatches", u64::from(schedule.microbatches)),
        ("chunks", u64::from(schedule.chunks)),
    ] {
        if !(1..=1 << 32).contains(&value) {
            faults.push(PlanFault::Schedule { what: format!("{name} is {value}; it must be at least 1") });
        }
    }
    let operations = [("flops", plan.predicted.flops), ("recomputed_flops", plan.predicted.recomputed_flops)];
    for (name, number) in operations.into_iter().filter(|(_, number)| !(0.0..=MAX_FLOPS).contains(number)) {
        let what = format!("predicted.{name} is {number}; it must be from 0 to {MAX_FLOPS:e}");
        faults.push(PlanFault::Schedule { what });
    }
    if let Some(types) = plan.element_types.as_ref().filter(|types| **types != types.precision.types()) {
        let what = format!("element_types are not those of precision {}", types.precision.name());
        faults.push(PlanFault::Schedule { what });
    }
    if let Some(types) = plan.element_types.as_ref().filter(|types| types.precision.dtype().name() != plan.dtype) {
        let what = format!("dtype is `{}`, but the precision is {}", plan.dtype.escape_debug(), types.precision.name());
        faults.push(PlanFault::Schedule { what });
    }
    let others = plan.cluster.classes.iter().map(|class| &class.device);
    for device in std::iter::once(&plan.cluster.device).chain(others) {
        let what = figures("cluster.device", device).err().map(|error| error.to_string());
        faults.extend(what.map(|what| PlanFault::Schedule { what }));
    }
    for (at, stage) in plan.stages.iter().enumerate() {
        let what = buckets::contradiction(stage).map(|reason| format!("stage {at}: {reason}"));
        faults.extend(what.map(|what| PlanFault::Schedule { what }));
        if let Some(RecomputedOps { ops, layers, fwd_us }) = stage.recomputed {
            let all = stage.ops.iter().map(|&(from, to)| u64::from(to.saturating_sub(from))).sum::<u64>();
            // Ops outside of layers are not recomputed, even if all layers are.
            let most = if layers.is_some() { all } else { all.saturating_sub(1) };
            let is_right =
                (1..=most).contains(&u64::from(ops)) && layers.is_none_or(|layers| (1..=ops).contains(&layers));
            if !stage.recompute || !is_right || !(0.0..=stage.fwd_us * (1.0 + 1e-9)).contains(&fwd_us) {
                let what = format!(
                    "stage {at} of {all} ops and {} us recomputes {ops} ops in {fwd_us} us; expected 1 to {most} \
                     ops with `recompute`, in no more time than its forward",
                    stage.fwd_us
                );
                faults.push(PlanFault::Schedule { what });
            }
        }
        if stage.memory.by_part && (!stage.recompute || stage.degree() > 1 || !schedule.kind.trains()) {
            let what = format!("stage {at} has `by_part`, but does not recompute its ops on single devices");
            faults.push(PlanFault::Schedule { what });
        }
        let what = zero::contradiction(stage, schedule.kind.trains());
        faults.extend(what.map(|what| PlanFault::Schedule { what: format!("stage {at}: {what}") }));
    }
    edges(plan, &mut faults);
    memory(plan, &mut faults);
    classes(plan, &mut faults);
    if faults.is_empty() { Ok(()) } else { Err(faults) }
}

fn coverage(plan: &Plan, faults: &mut Vec<PlanFault>) {
    let ops = plan.model.ops.min(MAX_ENTRIES as u64) as usize;
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for (index, stage) in plan.stages.iter().enumerate() {
        if stage.id.index() != index {
            faults.push(PlanFault::Id { index, id: stage.id.0 });
        }
        let mut before = 0;
        for &(from, to) in &stage.ops {
            if from >= to || to as usize > ops || from < before {
                faults.push(PlanFault::Range { stage: index, from, to, ops });
            }
            before = to;
        }
        if stage.ops.is_empty() {
            faults.push(PlanFault::Range { stage: index, from: 0, to: 0, ops });
        }
        ranges.extend(&stage.ops);
    }
    if !faults.is_empty() {
        return;
    }
    ranges.sort_unstable();
    let mut at = 0;
    for (from, to) in ranges {
        if from > at {
            faults.push(PlanFault::Coverage { op: at as usize, count: 0 });
        } else if from < at {
            faults.push(PlanFault::Coverage { op: from as usize, count: 2 });
        }
        at = at.max(to);
    }
    if (at as usize) < ops {
        faults.push(PlanFault::Coverage { op: at as usize, count: 0 });
    }
}

fn devices(plan: &Plan, faults: &mut Vec<PlanFault>) {
    let product =
        plan.cluster.levels.iter().fold(1u64, |product, level| product.saturating_mul(u64::from(level.count)));
    let there = u64::from(plan.cluster.devices);
    if product != there || !(1..=MAX_DEVICES).contains(&there) {
        let what =
            format!("the levels multiply to {product} devices, the cluster states {there}, at most {MAX_DEVICES}");
        faults.push(PlanFault::Schedule { what });
    }
    let mut used: BTreeMap<u32, usize> = BTreeMap::new();
    for (at, stage) in plan.stages.iter().enumerate() {
        let mut fault = |what| faults.push(PlanFault::Devices { stage: at, what });
        let degree = stage.tensor_degree.unwrap_or(1);
        if stage.replicas == 0 || stage.devices.len() as u64 != u64::from(stage.replicas) * u64::from(degree) {
            let what = format!("{} devices for {} replicas", stage.devices.len(), stage.replicas);
            fault(if degree == 1 { what } else { format!("{what} of {degree}") });
        }
        wrong_hierarchy(stage).into_iter().for_each(&mut fault);
        for &device in &stage.devices {
            if u64::from(device) >= there {
                fault(format!("device {device} does not exist; the cluster has {there}"));
            } else if let Some(first) = used.insert(device, at)
                && (plan.schedule.chunks <= 1 || first == at)
            {
                fault(format!("device {device} is used twice"));
            }
        }
    }
    // Hybrid instances have no levels that could contain a group.
    if plan.cost != CostModel::Hybrid {
        faults.extend(groups::wrong(plan).into_iter().map(|(stage, what)| PlanFault::Devices { stage, what }));
    }
    if plan.schedule.chunks > 1 {
        faults.extend(chunks(plan).map(|what| PlanFault::Schedule { what }));
    }
}

/// The error of a stage whose places in the levels do not multiply to its replicas.
pub(super) fn wrong_hierarchy(stage: &Stage) -> Option<String> {
    let product = stage.hierarchy.iter().fold(1u64, |p, place| p.saturating_mul(u64::from(place.replicas)));
    let replicas = stage.replicas;
    (product != u64::from(replicas))
        .then(|| format!("its levels multiply to {product} replicas, the stage has {replicas}"))
}

/// Checks chunks: each group of devices has as many stages as there are chunks, and groups do not overlap.
fn chunks(plan: &Plan) -> Option<String> {
    let mut held: BTreeMap<&[u32], u32> = BTreeMap::new();
    for stage in &plan.stages {
        *held.entry(&stage.devices).or_default() += 1;
    }
    let chunks = plan.schedule.chunks;
    if let Some((devices, stages)) = held.iter().find(|(_, stages)| **stages != chunks) {
        return Some(format!("{stages} stages are on devices {devices:?}, the schedule has {chunks} per device"));
    }
    let devices: BTreeSet<u32> = held.keys().flat_map(|devices| devices.iter().copied()).collect();
    let listed: usize = held.keys().map(|devices| devices.len()).sum();
    (devices.len() != listed)
        .then(|| "two stages share only some of their devices; they must share all or none".to_string())
}

fn edges(plan: &Plan, faults: &mut Vec<PlanFault>) {
    let mut seen = BTreeSet::new();
    for edge in &plan.edges {
        let (from, to) = (edge.from.0, edge.to.0);
        let mut fault = |said: &str, found: &str| {
            faults.push(PlanFault::Edge { from, to, said: said.to_string(), found: found.to_string() });
        };
        // A placement may put any node anywhere, so tensors may go both ways.
        let goes_back = if plan.cost == CostModel::Load { from == to } else { from >= to };
        if goes_back || edge.to.index() >= plan.stages.len() {
            fault("this edge", "only edges from an earlier to a later stage");
        } else if !seen.insert((from, to)) {
            fault("the edge twice", "the edge once");
        }
    }
}

fn classes(plan: &Plan, faults: &mut Vec<PlanFault>) {
    let classes = &plan.cluster.classes;
    let held: u64 = classes.iter().map(|class| u64::from(class.count)).sum();
    if !classes.is_empty() && held != u64::from(plan.cluster.devices) {
        let what =
            format!("the device classes have {held} devices in total, the cluster states {}", plan.cluster.devices);
        faults.push(PlanFault::Schedule { what });
    }
    class_memory(classes, plan, faults);
}

fn memory(plan: &Plan, faults: &mut Vec<PlanFault>) {
    for (at, stage) in plan.stages.iter().enumerate() {
        let held = &stage.memory;
        let found = held.parts().into_iter().try_fold(0u64, u64::checked_add);
        if found != Some(held.total) {
            let what = format!("total memory of stage {at}");
            let found = found.map_or("more than 2^64".to_string(), |sum| sum.to_string());
            faults.push(PlanFault::Figure { what, said: held.total.to_string(), found });
        }
        let beside = plan.stages[..at].iter().filter(|other| other.devices == stage.devices);
        let needed = beside.fold(held.total, |sum, other| sum.saturating_add(other.memory.total));
        if let Some(limit) = plan.cluster.memory_per_device.filter(|limit| needed > limit.0) {
            faults.push(PlanFault::Memory { stage: at, needed, limit: limit.0 });
        }
    }
}
