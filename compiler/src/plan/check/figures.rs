//! Checks values of a plan that follow from other values of the same plan, without the model.
//!
//! `consistency` checks structure, `verify` recomputes everything from the model's costs. This module checks the
//! redundant values:
//!
//! | value | follows from |
//! | --- | --- |
//! | `memory.messages` of a stage | the bytes of its edges: incoming once, or twice if their gradients are slow; outgoing once |
//! | `cluster.idle` | the devices of all stages |
//! | `memory.versions` of a stage | `memory.weights`, `schedule.weight_versions` |
//! | `schedule.weight_versions` | `schedule.in_flight` |
//! | `baselines.single` | compute time of all stages |
//! | the objective under cost `pipec` | times, weights and devices of the stages, edges and levels: the checker's equations |
//! | the objective under other costs | at least the slowest stage; under `load`, at most that with each edge counted separately |
//! | `predicted.step_us`, `throughput_per_s`, `bubble` | `predicted.minibatch_us` and the schedule |
//!
//! A tensor read by several stages is in several edges but is sent once, so outgoing bytes are only bounded. Costs
//! `paper` and `pipedream` charge links by tensors and ops, which a plan does not list.

use crate::plan::Plan;
use crate::plan::check::cost;
use crate::plan::check::cost::Loads;
use crate::plan::check::error::PlanFault;
use crate::plan::check::verify;
use crate::plan::check::verify::TOLERANCE;
use crate::plan::problem::{CostModel, HOST, NOMINAL, Objective, Target};
use std::collections::BTreeMap;

/// Largest absolute difference between two equal fractions of a step.
const SHARE: f64 = 1e-9;

/// Returns all contradictions between a plan's values. The plan must pass `consistency`.
pub fn figures(plan: &Plan) -> Vec<PlanFault> {
    let mut faults = Vec::new();
    match plan.cost {
        CostModel::Hybrid => check_instance_rate(plan, f64::from(plan.schedule.microbatches), &mut faults),
        CostModel::Load => {
            load(plan, &mut faults);
            check_instance_rate(plan, 1.0, &mut faults);
        }
        CostModel::Pipec | CostModel::Paper | CostModel::Pipedream => {
            verify::schedule(plan, &mut faults);
            messages(plan, &mut faults);
            versions(plan, &mut faults);
            objective(plan, &mut faults);
            single(plan, &mut faults);
            step(plan, &mut faults);
        }
    }
    idle(plan, &mut faults);
    let (bound, time) = (plan.lower_bound_us, plan.predicted.minibatch_us);
    if bound > time * (1.0 + TOLERANCE) {
        let what = "lower_bound_us".to_string();
        faults.push(PlanFault::Figure {
            what,
            said: bound.to_string(),
            found: format!("at most the predicted {time}"),
        });
    }
    let meets = |us: f64| (us - bound).abs() <= us.abs() * TOLERANCE;
    if plan.proven_optimal && !meets(time) && !meets(plan.predicted.by_equations_us()) {
        let (what, said) = ("proven_optimal".to_string(), "true".to_string());
        faults.push(PlanFault::Figure { what, said, found: format!("false: the lower bound is {bound}") });
    }
    faults
}

/// Plans written before `idle` existed have none.
fn idle(plan: &Plan, faults: &mut Vec<PlanFault>) {
    let said = &plan.cluster.idle;
    let has_stage = |device: u32| plan.stages.iter().any(|stage| stage.devices.contains(&device));
    let is_right = said.windows(2).all(|pair| pair[0] < pair[1])
        && said.iter().all(|device| *device < plan.cluster.devices && !has_stage(*device));
    let busy = plan.workers() as usize;
    if !said.is_empty() && (!is_right || said.len() + busy != plan.cluster.devices as usize) {
        let found = format!("the devices without a stage; {busy} of {} have one", plan.cluster.devices);
        faults.push(PlanFault::Figure {
            what: "cluster.idle".to_string(),
            said: format!("{} devices", said.len()),
            found,
        });
    }
}

/// Bytes into each stage, and lower and upper bounds of the bytes out of it.
fn moved(plan: &Plan) -> Vec<(u64, u64, u64)> {
    let mut moved = vec![(0u64, 0u64, 0u64); plan.stages.len()];
    for edge in &plan.edges {
        let into = &mut moved[edge.to.index()].0;
        *into = into.saturating_add(edge.bytes);
        let (_, least, most) = &mut moved[edge.from.index()];
        (*least, *most) = ((*least).max(edge.bytes), most.saturating_add(edge.bytes));
    }
    moved
}

fn messages(plan: &Plan, faults: &mut Vec<PlanFault>) {
    // Plans written before `messages` existed have 0.
    if !plan.edges.is_empty() && plan.stages.iter().all(|stage| stage.memory.messages == 0) {
        return;
    }
    let trains = plan.schedule.kind.trains();
    for (at, (stage, (into, least, most))) in plan.stages.iter().zip(moved(plan)).enumerate() {
        // Gradients may be single- or double-buffered, depending on op times that are not in the plan.
        let (least, most) = match trains {
            true => (into.saturating_add(least), into.saturating_mul(2).saturating_add(most)),
            false => (into, into),
        };
        let said = stage.memory.messages;
        if !(least..=most).contains(&said) {
            let found = if least == most { String::new() } else { format!("{least} to ") };
            let what = format!("memory.messages of stage {at}");
            let found = format!("{found}{most} from the plan's edges");
            faults.push(PlanFault::Figure { what, said: said.to_string(), found });
        }
    }
}

fn versions(plan: &Plan, faults: &mut Vec<PlanFault>) {
    for (at, (stage, &versions)) in plan.stages.iter().zip(&plan.schedule.weight_versions).enumerate() {
        let held = &stage.memory;
        let found = held.weights.saturating_mul(u64::from(versions.saturating_sub(1)));
        if held.versions != found {
            let (what, said) = (format!("memory.versions of stage {at}"), held.versions.to_string());
            faults.push(PlanFault::Figure { what, said, found: format!("{found} from its weights") });
        }
    }
}

fn objective(plan: &Plan, faults: &mut Vec<PlanFault>) {
    let said = plan.predicted.by_equations_us();
    let name = if plan.predicted.objective_us.is_some() { "objective_us" } else { "minibatch_us" };
    let mut wrong = |found: String| {
        faults.push(PlanFault::Figure { what: format!("predicted.{name}"), said: said.to_string(), found });
    };
    if plan.cost == CostModel::Pipec {
        let (found, bottleneck) = cost::under(&plan.cluster.levels, plan.objective, plan, &Loads::stated(plan));
        if verify::differs(said, found) {
            wrong(format!("{found} from the plan's stages and edges, limited by {bottleneck}"));
        }
        return;
    }
    let each = plan.stages.iter().map(|stage| (stage.fwd_us + stage.bwd_us) / f64::from(stage.replicas.max(1)));
    let slowest = each.fold(0.0, f64::max);
    if said < slowest * (1.0 - TOLERANCE) {
        wrong(format!("at least {slowest}, the time of its slowest stage"));
    }
}

/// On a homogeneous cluster, one device takes the compute time of all stages.
fn single(plan: &Plan, faults: &mut Vec<PlanFault>) {
    let kind = plan.schedule.kind;
    if !plan.cluster.classes.is_empty() {
        return;
    }
    let is_whole = plan.cost == CostModel::Pipec && (!kind.is_continuous() || kind.is_double_buffered());
    let items = if is_whole { f64::from(plan.schedule.microbatches.max(1)) } else { 1.0 };
    let (mut forward, mut all) = (0.0, 0.0);
    for stage in &plan.stages {
        if let Some(sharing) = &stage.tensor_parallel {
            forward += sharing.unsharded_fwd_us;
            all += sharing.unsharded_fwd_us + sharing.unsharded_bwd_us;
            continue;
        }
        forward += stage.fwd_us;
        all += stage.fwd_us + stage.bwd_us - stage.recompute_us();
    }
    if plan.cost == CostModel::Pipec && !kind.trains() {
        all = forward;
    }
    let said = plan.baselines.single;
    // One device may have to recompute. For a target that recomputes layers, the plan does not state the time of all.
    let target = plan.options.get("target").and_then(|target| target.as_str()).and_then(Target::from_name);
    let is_by_layer = target.is_some_and(Target::recomputes_layers);
    let is_within = is_by_layer && (all..=all + forward).contains(&(said / items));
    if verify::differs(said, all * items) && verify::differs(said, (all + forward) * items) && !is_within {
        let found = format!("{} from the compute times of all stages", all * items);
        faults.push(PlanFault::Figure { what: "baselines.single".into(), said: said.to_string(), found });
    }
}

fn step(plan: &Plan, faults: &mut Vec<PlanFault>) {
    let (predicted, kind) = (&plan.predicted, plan.schedule.kind);
    let m = f64::from(plan.schedule.microbatches.max(1));
    let fill = if kind.is_continuous() { 0.0 } else { plan.stages.len() as f64 - 1.0 };
    let is_whole = plan.cost == CostModel::Pipec;
    let step = predicted.minibatch_us * if is_whole { 1.0 } else { m + fill };
    // In a pipeline, throughput depends on the slowest stage and not on the latency.
    let following = match is_whole && plan.objective == Objective::Latency && predicted.objective_us.is_none() {
        true => cost::under(&plan.cluster.levels, Objective::Throughput, plan, &Loads::stated(plan)).0,
        false => step,
    };
    let samples = plan.schedule.micro_batch as f64 * m;
    let rate = if following > 0.0 { samples * 1e6 / following } else { 0.0 };
    check_equal("step_us", predicted.step_us, step, faults);
    check_equal("throughput_per_s", predicted.throughput_per_s, rate, faults);
    let bubble = match (is_whole, kind.is_continuous()) {
        (true, false) => bubble_fraction(plan),
        (true, true) => 0.0,
        (false, _) => fill / (m + fill),
    };
    if (predicted.bubble - bubble).abs() > SHARE {
        let (said, found) = (predicted.bubble.to_string(), format!("{bubble} from its own times"));
        faults.push(PlanFault::Figure { what: "predicted.bubble".into(), said, found });
    }
}

/// Fraction of a flushed step in which the busiest devices do not compute.
fn bubble_fraction(plan: &Plan) -> f64 {
    let mut work: BTreeMap<&[u32], f64> = BTreeMap::new();
    for stage in &plan.stages {
        let items_per_replica = plan.schedule.microbatches.div_ceil(stage.replicas.max(1)).max(1);
        *work.entry(&stage.devices).or_default() += (stage.fwd_us + stage.bwd_us) * f64::from(items_per_replica);
    }
    let most = work.into_values().fold(0.0, f64::max).min(plan.predicted.by_equations_us());
    match plan.predicted.minibatch_us {
        us if us > 0.0 => (1.0 - most / us).max(0.0),
        _ => 0.0,
    }
}

/// Checks the load of a placement: compute, receive and send of each device, in sequence. Hosts only compute.
fn load(plan: &Plan, faults: &mut Vec<PlanFault>) {
    let us = |bytes: u64| bytes as f64 * 1e6 / NOMINAL.0;
    let (mut least, mut most) = (0.0f64, 0.0f64);
    for (stage, (into, few, all)) in plan.stages.iter().zip(moved(plan)) {
        let own = stage.fwd_us + stage.bwd_us;
        let class = |&device: &u32| cost::class_of(&plan.cluster.classes, device);
        if stage.devices.iter().filter_map(class).any(|class| class.device.kind == HOST) {
            (least, most) = (least.max(own), most.max(own));
            continue;
        }
        let own = own + us(into);
        (least, most) = (least.max(own + us(few)), most.max(own + us(all)));
    }
    // Each tensor's cost was rounded to whole bytes.
    let tensors: usize = plan.edges.iter().map(|edge| edge.tensors.len()).sum();
    let rounded = us(1) * (tensors as f64 + 1.0);
    let said = plan.predicted.minibatch_us;
    if said < least * (1.0 - TOLERANCE) - rounded || said > most * (1.0 + TOLERANCE) + rounded {
        let found = format!("{least} to {most} from the plan's devices and edges");
        faults.push(PlanFault::Figure { what: "predicted.minibatch_us".into(), said: said.to_string(), found });
    }
}

/// Checks step and throughput of an instance whose objective is the time per sample.
fn check_instance_rate(plan: &Plan, samples: f64, faults: &mut Vec<PlanFault>) {
    let predicted = &plan.predicted;
    let us = predicted.minibatch_us;
    let rate = if us > 0.0 { 1e6 / us } else { 0.0 };
    check_equal("step_us", predicted.step_us, us * samples, faults);
    check_equal("throughput_per_s", predicted.throughput_per_s, rate, faults);
}

fn check_equal(name: &str, said: f64, found: f64, faults: &mut Vec<PlanFault>) {
    if verify::differs(said, found) {
        let (what, found) = (format!("predicted.{name}"), format!("{found} from its own minibatch time"));
        faults.push(PlanFault::Figure { what, said: said.to_string(), found });
    }
}
