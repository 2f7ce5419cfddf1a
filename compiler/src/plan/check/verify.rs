//! The plan checker: recomputes coverage, order, devices, edges, memory and time from the definitions.
//!
//! It shares no code with the partitioners or their cost and memory functions, except `fullest_moment`, which tests
//! compare with the programs. `cost` recomputes the time under cost `pipec`, `published_costs` under the others, `traffic`
//! the link load. Every plan of the planner is checked here; plans written by hand can be checked too.

use super::{cost, ends, held_in_flight, published_costs, recompute, shares, traffic};
use crate::cluster::{Cluster, DeviceClass, class};
use crate::pass::batched_weight_grad::ITEMS;
use crate::plan::buckets::buckets;
use crate::plan::check::consistency::wrong_hierarchy;
use crate::plan::check::error::PlanFault;
use crate::plan::groups;
use crate::plan::in_flight;
use crate::plan::in_flight::StageInFlight;
use crate::plan::links::Wire;
use crate::plan::problem::{CostModel, Problem};
use crate::plan::schedule::VersionRule;
use crate::plan::{BusiestLink, GradientBucket, Plan, Stage, StageMemory};
use crate::profile::cost_graph::CostGraph;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Debug, PartialEq)]
pub struct Checked {
    pub minibatch_us: f64,
    pub bottleneck: String,
    pub busiest_link: Option<BusiestLink>,
    pub memory: Vec<StageMemory>,
}

/// Largest relative difference between a stated and a recomputed time.
pub const TOLERANCE: f64 = 1e-9;

/// Checks `plan` as a solution of `problem`. Returns all faults found.
pub fn check(problem: &Problem, plan: &Plan) -> Result<Checked, Vec<PlanFault>> {
    let mut faults = Vec::new();
    let unsharded = problem;
    let problem = &*shared(problem, plan, &mut faults);
    let stage_of = coverage(&problem.graph, plan, &mut faults);
    devices(&problem.cluster, plan, &mut faults);
    schedule(plan, &mut faults);
    faults.extend(shares::faults(&problem.graph, plan, &stage_of));
    if !faults.is_empty() {
        return Err(faults);
    }
    sharing(unsharded, plan, &stage_of, &mut faults);
    edges(&problem.graph, plan, &stage_of, &mut faults);
    let memory = memory(problem, plan, &stage_of);
    for (at, (stage, found)) in plan.stages.iter().zip(&memory).enumerate() {
        if stage.memory != *found {
            let what = format!("memory of stage {at}");
            faults.push(PlanFault::Figure { what, said: format!("{:?}", stage.memory), found: format!("{found:?}") });
        }
        // With chunks a device holds several stages; their sum counts.
        let beside =
            (0..at).filter(|&other| plan.stages[other].devices == stage.devices).map(|other| memory[other].total);
        let needed = beside.fold(found.total, u64::saturating_add);
        if let Some(limit) = problem.memory_limit.filter(|limit| needed > limit.0) {
            faults.push(PlanFault::Memory { stage: at, needed, limit: limit.0 });
        }
    }
    class_memory(&problem.cluster.classes, plan, &mut faults);
    stage_times(problem, plan, &stage_of, &mut faults);
    let (mut minibatch_us, mut bottleneck) = time(problem, plan, &stage_of, &mut faults);
    let counted = traffic::traffic(problem, plan, &stage_of);
    if let Some((link, us)) = counted.as_ref().and_then(|traffic| traffic.binding.as_ref()) {
        if *us > minibatch_us {
            minibatch_us = *us;
            bottleneck = describe_link(link);
        }
        let said_us = plan.predicted.by_equations_us();
        if *us > said_us * (1.0 + TOLERANCE) {
            let (level, direction) = (link.level.escape_debug().to_string(), link.direction.clone());
            faults.push(PlanFault::Link { level, unit: link.unit, direction, needed_us: *us, said_us });
        }
    }
    let busiest_link = counted.map(|traffic| traffic.busiest);
    if plan.predicted.busiest_link.is_some() && !matches(&plan.predicted.busiest_link, &busiest_link) {
        let [said, found] = [&plan.predicted.busiest_link, &busiest_link].map(|link| format!("{link:?}"));
        faults.push(PlanFault::Figure { what: "predicted.busiest_link".into(), said, found });
    }
    let said = plan.predicted.by_equations_us();
    if differs(said, minibatch_us) {
        let name = if plan.predicted.objective_us.is_some() { "objective_us" } else { "minibatch_us" };
        let (what, found) = (format!("predicted.{name}"), minibatch_us.to_string());
        faults.push(PlanFault::Figure { what, said: said.to_string(), found });
    }
    if faults.is_empty() { Ok(Checked { minibatch_us, bottleneck, busiest_link, memory }) } else { Err(faults) }
}

/// Recomputes time and memory of any stages, such as a user's. The plan's stated values, edges and memory limits are
/// ignored.
pub fn evaluate(problem: &Problem, plan: &Plan) -> Result<Checked, Vec<PlanFault>> {
    let mut faults = Vec::new();
    let problem = &*shared(problem, plan, &mut faults);
    let stage_of = coverage(&problem.graph, plan, &mut faults);
    devices(&problem.cluster, plan, &mut faults);
    schedule(plan, &mut faults);
    if !faults.is_empty() {
        return Err(faults);
    }
    let (mut minibatch_us, mut bottleneck) = time(problem, plan, &stage_of, &mut faults);
    let counted = traffic::traffic(problem, plan, &stage_of);
    if let Some((link, us)) =
        counted.as_ref().and_then(|traffic| traffic.binding.as_ref()).filter(|(_, us)| *us > minibatch_us)
    {
        minibatch_us = *us;
        bottleneck = describe_link(link);
    }
    let busiest_link = counted.map(|traffic| traffic.busiest);
    let memory = memory(problem, plan, &stage_of);
    if faults.is_empty() { Ok(Checked { minibatch_us, bottleneck, busiest_link, memory }) } else { Err(faults) }
}

/// The objective under the problem's cost model without `traffic`, and the bottleneck.
fn time(problem: &Problem, plan: &Plan, stage_of: &[usize], faults: &mut Vec<PlanFault>) -> (f64, String) {
    match problem.cost {
        CostModel::Pipec => cost::time(problem, plan, stage_of),
        CostModel::Paper | CostModel::Pipedream | CostModel::Load | CostModel::Hybrid => {
            published_costs::time(problem, plan, stage_of, faults)
        }
    }
}

fn describe_link(link: &BusiestLink) -> String {
    format!("the link of unit {} on {}", link.unit, link.level.escape_debug())
}

/// True if two values differ by more than [`TOLERANCE`], relative.
pub fn differs(said: f64, found: f64) -> bool {
    let close = (said - found).abs() <= TOLERANCE * said.abs().max(found.abs()).max(1e-6);
    !close
}

fn matches(said: &Option<BusiestLink>, found: &Option<BusiestLink>) -> bool {
    let (Some(said), Some(found)) = (said, found) else { return said.is_none() && found.is_none() };
    let same = BusiestLink { share: found.share, ..said.clone() } == *found;
    same && !differs(said.share, found.share)
}

fn coverage(graph: &CostGraph, plan: &Plan, faults: &mut Vec<PlanFault>) -> Vec<usize> {
    let ops = graph.ops.len();
    let mut stage_of = vec![usize::MAX; ops];
    let mut count = vec![0u32; ops];
    if plan.stages.is_empty() {
        faults.push(PlanFault::NoStages);
    }
    for (index, stage) in plan.stages.iter().enumerate() {
        if stage.id.index() != index {
            faults.push(PlanFault::Id { index, id: stage.id.0 });
        }
        let mut before = 0;
        for &(from, to) in &stage.ops {
            if from >= to || to as usize > ops || from < before {
                faults.push(PlanFault::Range { stage: index, from, to, ops });
                continue;
            }
            before = to;
            for op in from..to {
                count[op as usize] += 1;
                stage_of[op as usize] = index;
            }
        }
        if stage.ops.is_empty() {
            faults.push(PlanFault::Range { stage: index, from: 0, to: 0, ops });
        }
    }
    let wrong = count.iter().enumerate().filter(|(_, count)| **count != 1);
    faults.extend(wrong.take(16).map(|(op, &count)| PlanFault::Coverage { op, count }));
    if faults.is_empty() {
        for (op, cost) in graph.ops.iter().enumerate() {
            if let Some(with) = cost.joins.filter(|with| stage_of[with.index()] != stage_of[op]) {
                let (stage, other) = (stage_of[op], stage_of[with.index()]);
                faults.push(PlanFault::Apart { op, stage, with: with.0, other });
            }
        }
        for tensor in &graph.tensors {
            let from = stage_of[tensor.producer.index()];
            for to in tensor.consumers.iter().map(|to| stage_of[to.index()]).filter(|&to| to < from) {
                faults.push(PlanFault::Backward { tensor: tensor.name.escape_debug().to_string(), from, to });
            }
        }
    }
    stage_of
}

fn devices(cluster: &Cluster, plan: &Plan, faults: &mut Vec<PlanFault>) {
    let mut user: Vec<Option<usize>> = vec![None; cluster.devices() as usize];
    let chunks = plan.schedule.chunks.max(1);
    for (at, stage) in plan.stages.iter().enumerate() {
        let mut fault = |what| faults.push(PlanFault::Devices { stage: at, what });
        let wanted = u64::from(stage.replicas) * u64::from(stage.degree());
        if stage.replicas == 0 || stage.devices.len() as u64 != wanted {
            let (found, replicas, degree) = (stage.devices.len(), stage.replicas, stage.degree());
            fault(format!("{found} devices for {replicas} replicas of tensor-parallel degree {degree}"));
        }
        for &device in &stage.devices {
            match user.get_mut(device as usize) {
                None => fault(format!("device {device} does not exist; the cluster has {}", cluster.devices())),
                Some(Some(other)) if chunks == 1 || plan.stages[*other].devices != stage.devices => {
                    fault(format!("device {device} is also used by stage {other}"));
                }
                Some(Some(other)) if *other == at => fault(format!("device {device} is used twice")),
                Some(Some(_)) => {}
                Some(free) => *free = Some(at),
            }
        }
        wrong_hierarchy(stage).into_iter().for_each(&mut fault);
        let sharing = plan.stages.iter().filter(|other| other.devices == stage.devices).count();
        if chunks > 1 && sharing != chunks as usize {
            fault(format!("{sharing} stages are on its devices, the schedule has {chunks} per device"));
        }
    }
}

/// The problem with the tensor-parallel costs of the plan's degree.
fn shared<'a>(problem: &'a Problem, plan: &Plan, faults: &mut Vec<PlanFault>) -> Cow<'a, Problem> {
    faults.extend(groups::wrong(plan).into_iter().map(|(stage, what)| PlanFault::Devices { stage, what }));
    let degree = plan.stages.first().map_or(1, Stage::degree);
    if degree == 1 {
        return Cow::Borrowed(problem);
    }
    let Some(costs) = groups::costs(&problem.shared, plan) else {
        let what = format!("tensor-parallel degree {degree}, for which there are no costs");
        faults.push(PlanFault::Devices { stage: 0, what });
        return Cow::Borrowed(problem);
    };
    Cow::Owned(Problem { graph: costs.graph.clone(), ..problem.clone() })
}

fn sharing(unsharded: &Problem, plan: &Plan, stage_of: &[usize], faults: &mut Vec<PlanFault>) {
    let costs = groups::costs(&unsharded.shared, plan);
    let mut found = vec![[0.0; 4]; plan.stages.len()];
    for (op, &stage) in stage_of.iter().enumerate() {
        let (cost, meetings) = (&unsharded.graph.ops[op], costs.map_or([0.0; 2], |costs| costs.meetings[op]));
        let all = [cost.fwd_us, cost.bwd_us, meetings[0], meetings[1]];
        found[stage].iter_mut().zip(all).for_each(|(sum, us)| *sum += us);
    }
    for (at, (stage, found)) in plan.stages.iter().zip(found).enumerate() {
        let said = match (&stage.tensor_parallel, stage.degree() > 1) {
            (None, false) => continue,
            (Some(said), true) => {
                [said.unsharded_fwd_us, said.unsharded_bwd_us, said.collective_fwd_us, said.collective_bwd_us]
            }
            (said, is_shared) => {
                let describe = |is: bool| if is { "tensor-parallel times" } else { "none" }.to_string();
                let what = format!("tensor_parallel of stage {at}");
                faults.push(PlanFault::Figure { what, said: describe(said.is_some()), found: describe(is_shared) });
                continue;
            }
        };
        for (name, (said, found)) in ["unsharded_fwd_us", "unsharded_bwd_us", "collective_fwd_us", "collective_bwd_us"]
            .into_iter()
            .zip(said.into_iter().zip(found))
        {
            if differs(said, found) {
                let what = format!("tensor_parallel.{name} of stage {at}");
                faults.push(PlanFault::Figure { what, said: said.to_string(), found: found.to_string() });
            }
        }
    }
}

/// Checks that schedule lists have one entry per stage, and that weight versions follow from the caps.
pub fn schedule(plan: &Plan, faults: &mut Vec<PlanFault>) {
    let schedule = &plan.schedule;
    for (name, list) in [("in_flight", &schedule.in_flight), ("weight_versions", &schedule.weight_versions)] {
        if list.len() != plan.stages.len() || list.contains(&0) {
            let what = format!(
                "{name} is {list:?} for {} stages; it needs one number of at least 1 per stage",
                plan.stages.len()
            );
            faults.push(PlanFault::Schedule { what });
        }
    }
    if let Some(what) = held_in_flight::wrong_pending(plan) {
        faults.push(PlanFault::Schedule { what });
    }
    let wanted: Vec<u32> = match schedule.kind.versions() {
        VersionRule::Stashed => schedule.in_flight.clone(),
        VersionRule::Synchronised => {
            let lanes = plan.stages.iter().zip(&schedule.in_flight);
            let lanes = lanes.map(|(stage, &in_flight)| StageInFlight { replicas: stage.replicas, in_flight });
            let first = lanes.clone().next().unwrap_or(StageInFlight { replicas: 1, in_flight: 1 });
            lanes.map(|own| in_flight::synced(own.replicas, first)).collect()
        }
        VersionRule::Previous => vec![2; plan.stages.len()],
        _ => vec![1; plan.stages.len()],
    };
    if faults.is_empty() && schedule.weight_versions != wanted {
        let said = format!("{:?}", schedule.weight_versions);
        faults.push(PlanFault::Figure { what: "schedule.weight_versions".into(), said, found: format!("{wanted:?}") });
    }
}

/// Compares the bytes of a plan's edges with those found per pair of stages; tensor names are ignored.
pub fn edge_bytes(plan: &Plan, found: &BTreeMap<(u32, u32), u64>, faults: &mut Vec<PlanFault>) {
    let said: BTreeMap<(u32, u32), u64> =
        plan.edges.iter().map(|edge| ((edge.from.0, edge.to.0), edge.bytes)).collect();
    let describe = |bytes: Option<&u64>| bytes.map_or("no edge".to_string(), |bytes| format!("{bytes} bytes"));
    for key in found.keys().chain(said.keys().filter(|key| !found.contains_key(key))) {
        let [left, right] = [&said, found].map(|edges| edges.get(key));
        if left != right {
            faults.push(PlanFault::Edge { from: key.0, to: key.1, said: describe(left), found: describe(right) });
        }
    }
}

fn edges(graph: &CostGraph, plan: &Plan, stage_of: &[usize], faults: &mut Vec<PlanFault>) {
    let mut found: BTreeMap<(u32, u32), (u64, Vec<&str>)> = BTreeMap::new();
    for tensor in &graph.tensors {
        let from = stage_of[tensor.producer.index()];
        let mut targets: Vec<usize> = tensor.consumers.iter().map(|to| stage_of[to.index()]).collect();
        targets.sort_unstable();
        targets.dedup();
        for to in targets.into_iter().filter(|&to| to != from) {
            let edge = found.entry((from as u32, to as u32)).or_default();
            edge.0 += tensor.bytes;
            edge.1.push(&tensor.name);
        }
    }
    let mut said: BTreeMap<(u32, u32), (u64, Vec<&str>)> = BTreeMap::new();
    for edge in &plan.edges {
        let names = edge.tensors.iter().map(String::as_str).collect();
        if said.insert((edge.from.0, edge.to.0), (edge.bytes, names)).is_some() {
            let (said, found) = ("the edge twice".to_string(), "the edge once".to_string());
            faults.push(PlanFault::Edge { from: edge.from.0, to: edge.to.0, said, found });
        }
    }
    let text = |edge: Option<&(u64, Vec<&str>)>| match edge {
        Some((bytes, names)) => format!("{} tensors of {bytes} bytes", names.len()),
        None => "no edge".to_string(),
    };
    for key in found.keys().chain(said.keys().filter(|key| !found.contains_key(key))) {
        let (mut left, mut right) = (said.get(key).cloned(), found.get(key).cloned());
        for side in [&mut left, &mut right].into_iter().flatten() {
            side.1.sort_unstable();
        }
        if left != right {
            faults.push(PlanFault::Edge {
                from: key.0,
                to: key.1,
                said: text(left.as_ref()),
                found: text(right.as_ref()),
            });
        }
    }
}

fn memory(problem: &Problem, plan: &Plan, stage_of: &[usize]) -> Vec<StageMemory> {
    let graph = &problem.graph;
    let mut weights = vec![0u64; plan.stages.len()];
    let mut terms = vec![0u64; plan.stages.len()];
    let mut shared = vec![0u64; plan.stages.len()];
    let mut largest = vec![0u64; plan.stages.len()];
    let mut needed = vec![0u64; plan.stages.len()];
    let mut used = vec![0u64; graph.ops.len()];
    let mut alive = vec![0u64; plan.stages.len()];
    let mut workspace = vec![0u64; plan.stages.len()];
    let mut batched_grad_bytes = vec![0u64; plan.stages.len()];
    let mut received = vec![0u64; plan.stages.len()];
    let mut summed = vec![0u64; plan.stages.len()];
    let mut masters = vec![0u64; plan.stages.len()];
    let mut sent = vec![0u64; plan.stages.len()];
    let mut only_sent = vec![0u64; plan.stages.len()];
    let mut pending_grad_bytes = vec![0u64; plan.stages.len()];
    let mut forward_us = vec![0.0; plan.stages.len()];
    // For each op: read within its stage, and read at all.
    let mut stays = vec![false; graph.ops.len()];
    let mut is_read = vec![false; graph.ops.len()];
    for param in &graph.params {
        let mut stages: Vec<usize> = param.users.iter().map(|op| stage_of[op.index()]).collect();
        stages.iter().for_each(|&stage| terms[stage] = terms[stage].saturating_add(param.sum_bytes));
        stages.sort_unstable();
        stages.dedup();
        if stages.len() > 1 {
            stages.iter().for_each(|&stage| shared[stage] = shared[stage].saturating_add(param.sum_bytes));
        }
        for stage in stages {
            weights[stage] = weights[stage].saturating_add(param.bytes);
            summed[stage] = summed[stage].saturating_add(param.sum_bytes);
            // Optimizers update master copies of narrow parameters.
            let is_narrow = param.sum_bytes > param.bytes;
            masters[stage] = masters[stage].saturating_add(if is_narrow { param.sum_bytes } else { 0 });
        }
        param.users.iter().for_each(|op| used[op.index()] = used[op.index()].saturating_add(param.sum_bytes));
    }
    let mut frozen = vec![0u64; plan.stages.len()];
    for held in &graph.frozen {
        let stages: BTreeSet<usize> = held.users.iter().map(|op| stage_of[op.index()]).collect();
        stages.into_iter().for_each(|stage| frozen[stage] = frozen[stage].saturating_add(held.bytes));
    }
    let ends = ends::ends(graph, stage_of);
    for tensor in &graph.tensors {
        let mut stages: Vec<usize> = tensor.consumers.iter().map(|op| stage_of[op.index()]).collect();
        stages.sort_unstable();
        stages.dedup();
        let from = stage_of[tensor.producer.index()];
        is_read[tensor.producer.index()] |= !stages.is_empty();
        stays[tensor.producer.index()] |= stages.contains(&from);
        stages.retain(|&to| to != from);
        stages.iter().for_each(|&to| received[to] = received[to].saturating_add(tensor.bytes));
        if !stages.is_empty() {
            sent[from] = sent[from].saturating_add(tensor.bytes);
            if graph.ops[tensor.producer.index()].unsaved {
                only_sent[from] = only_sent[from].saturating_add(tensor.bytes);
            }
        }
    }
    let is_by_minibatch = plan.schedule.kind.is_double_buffered() || !plan.schedule.kind.is_continuous();
    for (op, &stage) in graph.ops.iter().zip(stage_of) {
        alive[stage] += op.saved_bytes + op.fed_bytes;
        largest[stage] = largest[stage].max(used[op.id as usize]);
        let gathered = if op.reads_as_it_makes { used[op.id as usize] } else { 0 };
        needed[stage] = needed[stage].max(used[op.id as usize].saturating_add(gathered));
        // With enough micro-batches per minibatch, a worker batches their weight gradients.
        let replicas = plan.stages[stage].replicas.max(1);
        let has_many = plan.schedule.microbatches.div_ceil(replicas) >= ITEMS && is_by_minibatch;
        let is_joint = has_many && (replicas == 1 || plan.stages[stage].zero < 2);
        let scratch =
            if is_joint { op.workspace_bytes.max(op.batched_grad_workspace_bytes) } else { op.workspace_bytes };
        batched_grad_bytes[stage] += if is_joint { op.batched_grad_bytes } else { 0 };
        let is_split =
            plan.schedule.pending_weight_grads.get(stage).is_some_and(|&pending| pending > 0) && received[stage] > 0;
        let live = if is_split { op.live.split } else { op.live.whole };
        workspace[stage] = workspace[stage].max(scratch + live[ends[op.id as usize]]);
        forward_us[stage] += op.fwd_us;
    }
    for (at, (op, &stage)) in graph.ops.iter().zip(stage_of).enumerate() {
        let comes_as_it_is = is_read[at] && !stays[at];
        pending_grad_bytes[stage] += op.between_bytes + if comes_as_it_is { 0 } else { op.arriving_bytes };
    }
    let recomputed = recompute::bytes(graph, plan, stage_of);
    let trains = plan.schedule.kind.trains();
    let levels = groups::seen(&problem.cluster.levels, plan.stages.first().map_or(1, Stage::degree));
    let wire = levels.len().checked_sub(1).map(|outermost| Wire::of(&levels, outermost));
    let pace = class::fastest(&problem.cluster.classes);
    // Bytes that a micro-batch in flight holds.
    let per_microbatch: Vec<u64> = (0..plan.stages.len())
        .map(|stage| {
            let all = alive[stage].saturating_add(received[stage]).saturating_add(only_sent[stage]);
            let again = &recomputed[stage];
            let is_recomputed = plan.stages[stage].recompute && trains;
            if is_recomputed { all.saturating_sub(again.freed).saturating_add(again.kept) } else { all }
        })
        .collect();
    let in_flight = held_in_flight::counts(problem, plan, &per_microbatch);
    let one = |stage: usize| {
        let pending = plan.schedule.pending_weight_grads.get(stage).map_or(0, |&pending| u64::from(pending));
        let weights = weights[stage];
        let (terms, shared) = (terms[stage], shared[stage]);
        let (summed, masters) = (summed[stage], masters[stage]);
        let largest = if plan.stages[stage].zero < 3 { largest[stage] } else { needed[stage] };
        let of =
            shares::UnshardedBytes { weights, summed, masters, terms, shared, largest, state: problem.optimizer_state };
        let versions = (plan.schedule.weight_versions[stage], plan.schedule.kind);
        let held = || shares::held(&plan.stages[stage], versions, problem.reduces_in_place(), &of);
        let (gradients, optimizer) = if trains { held() } else { (0, 0) };
        let gradients = gradients.saturating_add(shared.saturating_mul(shares::late(plan, stage)));
        let weights = if trains { shares::kept(&plan.stages[stage], &of) } else { weights };
        let versions = weights.saturating_mul(u64::from(plan.schedule.weight_versions[stage]) - 1);
        let in_flight = u64::from(in_flight[stage]);
        let activations = match plan.stages[stage].recompute {
            _ if !trains => {
                per_microbatch[stage].saturating_add(sent[stage].saturating_mul(in_flight.saturating_sub(1)))
            }
            true => {
                let beside = if plan.stages[stage].memory.by_part { workspace[stage] } else { 0 };
                let again = recomputed[stage].once(pending, beside);
                per_microbatch[stage].saturating_mul(in_flight).saturating_add(again)
            }
            false => per_microbatch[stage].saturating_mul(in_flight),
        };
        let split_backward = match pending {
            0 => 0,
            _ => {
                // Without inputs there is no input-gradient pass: the whole backward is the weight-gradient pass.
                let own = if received[stage] > 0 { pending_grad_bytes[stage].saturating_mul(pending) } else { 0 };
                own.saturating_add(sent[stage].saturating_mul(pending - 1))
            }
        };
        let messages = match trains {
            true => {
                // Double-buffer gradients that may still be on the slowest link after the forward on the fastest
                // device.
                let us = wire.map_or(0.0, |wire| wire.time(received[stage] as f64));
                let places = if us > forward_us[stage] / pace * (1.0 + TOLERANCE) { 2 } else { 1 };
                received[stage].saturating_mul(places).saturating_add(sent[stage])
            }
            false => received[stage],
        };
        let workspace = workspace[stage].saturating_add(batched_grad_bytes[stage]);
        let frozen = frozen[stage];
        let fixed = StageMemory { weights, frozen, versions, gradients, optimizer, ..StageMemory::default() };
        StageMemory {
            activations,
            split_backward,
            messages,
            workspace,
            by_part: plan.stages[stage].memory.by_part
                && recompute::has_parts(graph, &plan.stages[stage])
                && pending == 0,
            ..fixed
        }
        .with_total()
    };
    (0..plan.stages.len()).map(one).collect()
}

pub fn class_memory(classes: &[DeviceClass], plan: &Plan, faults: &mut Vec<PlanFault>) {
    for (at, stage) in plan.stages.iter().enumerate() {
        let own = stage.devices.iter().filter_map(|&device| cost::class_of(classes, device));
        let limit = own.map(|class| class.device.memory.0).min();
        if let Some(limit) = limit.filter(|&limit| stage.memory.total > limit) {
            faults.push(PlanFault::Memory { stage: at, needed: stage.memory.total, limit });
        }
    }
}

fn same(said: &[GradientBucket], found: &[GradientBucket]) -> bool {
    let same = |(said, found): (&GradientBucket, &GradientBucket)| {
        said.parameters == found.parameters && said.bytes == found.bytes && !differs(said.ready, found.ready)
    };
    said.len() == found.len() && said.iter().zip(found).all(same)
}

fn stage_times(problem: &Problem, plan: &Plan, stage_of: &[usize], faults: &mut Vec<PlanFault>) {
    let mut forward = vec![0.0; plan.stages.len()];
    let mut backward = vec![0.0; plan.stages.len()];
    let mut weights = vec![0.0; plan.stages.len()];
    for (op, &stage) in problem.graph.ops.iter().zip(stage_of) {
        forward[stage] += op.fwd_us;
        backward[stage] += op.bwd_us;
        // Ops without a measured weight-gradient time count with half of their backward.
        weights[stage] += match op.weight_grad_us {
            Some(part) => part,
            None => 0.5 * op.bwd_us,
        };
    }
    let tied = match problem.cost == CostModel::Pipec && plan.schedule.kind.trains() {
        true => cost::tied(problem, plan, stage_of),
        false => vec![0.0; plan.stages.len()],
    };
    for (at, stage) in plan.stages.iter().enumerate() {
        let (again, layers) = recompute::time(&problem.graph, stage);
        backward[at] += again;
        let pace = cost::pace(problem, stage);
        (forward[at], backward[at], weights[at]) = (forward[at] / pace, backward[at] / pace, weights[at] / pace);
        // Without buckets, all gradients are all-reduced at once.
        if !stage.buckets.is_empty() {
            let ops: Vec<u32> = stage.ops.iter().flat_map(|&(from, to)| from..to).collect();
            let size = problem.bucket.0;
            if !same(&stage.buckets, &buckets(&problem.graph, &ops, size)) {
                let what = format!("buckets of stage {at}: expected buckets of {size} B, in backward order");
                faults.push(PlanFault::Schedule { what });
            }
        }
        // `weight_grad_us` is optional: older plans do not state it.
        let said_of_weights = stage.weight_grad_us.unwrap_or(weights[at]);
        let said_layers = stage.recomputed.and_then(|recomputed| recomputed.layers);
        if said_layers != layers.filter(|_| stage.recompute) {
            let text = |layers: Option<u32>| layers.map_or("none".to_string(), |layers| layers.to_string());
            let what = format!("recomputed.layers of stage {at}");
            faults.push(PlanFault::Figure { what, said: text(said_layers), found: text(layers) });
        }
        if recompute::splits_layer(&problem.graph, stage) {
            let what =
                format!("`recomputed.ops` of stage {at} ends inside a layer; expected the number of ops up to its end");
            faults.push(PlanFault::Schedule { what });
        }
        for (name, said, found) in [
            ("fwd_us", stage.fwd_us, forward[at]),
            ("bwd_us", stage.bwd_us, backward[at]),
            ("weight_grad_us", said_of_weights, weights[at]),
            ("recomputed.fwd_us", stage.recompute_us(), again / pace),
            ("tied_us", stage.tied_us, tied[at]),
        ] {
            if differs(said, found) {
                let what = format!("{name} of stage {at}");
                faults.push(PlanFault::Figure { what, said: said.to_string(), found: found.to_string() });
            }
        }
    }
}
