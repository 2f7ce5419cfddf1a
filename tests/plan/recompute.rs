//! Recomputation: as few of the first ops as fit, all ops, or none.

use crate::support::problems::add;
use compiler::cluster::Bytes;
use compiler::cluster::read::levels;
use compiler::partition::options::PlannerOptions;
use compiler::partition::partitioners::Partitioner;
use compiler::partition::planner::plan;
use compiler::plan::check::consistency::sound;
use compiler::plan::check::verify::{check, evaluate};
use compiler::plan::problem::{CostModel, Objective, Problem, Recomputation, Target};
use compiler::plan::schedule::Schedule;
use compiler::plan::{Edge, Plan, RecomputedOps, Stage};
use compiler::profile::cost_graph::CostGraph;
use pipec::plan::from_costs::efficiency;
use std::collections::BTreeMap;

/// A chain of ops that save what they send to the next.
fn chain(ops: u32) -> CostGraph {
    let mut graph = CostGraph::default();
    for at in 0..ops {
        let reads: Vec<u32> = at.checked_sub(1).into_iter().collect();
        add(&mut graph, "op", &reads, 100.0 + f64::from(at % 3), 10_000 + u64::from(at % 5) * 100, 1_000);
    }
    graph
}

fn problem(schedule: Schedule, ranks: u32) -> Problem {
    let chunks = if schedule.has_chunks() { 2 } else { 1 };
    let mut problem = Problem::new(chain(48), levels(&format!("{ranks}:100GB/s")).unwrap(), CostModel::Pipec);
    (problem.schedule, problem.chunks, problem.microbatches) = (schedule, chunks, 8);
    problem.constraints.replicas = Some(vec![1; (ranks * chunks) as usize]);
    problem
}

fn plan_checked(problem: &Problem) -> Plan {
    let efficiency = |stages: &[Stage], edges: &[Edge], caps: &[u32]| efficiency(problem, stages, edges, caps);
    let options = PlannerOptions { efficiency: Some(&efficiency), ..PlannerOptions::default() };
    let plan = plan(problem, &options).unwrap().plan;
    sound(&plan).unwrap();
    check(problem, &plan).unwrap();
    plan
}

fn bytes_by_device(plan: &Plan, bytes: impl Fn(usize) -> u64) -> BTreeMap<&[u32], u64> {
    let mut sums: BTreeMap<&[u32], u64> = BTreeMap::new();
    for (at, stage) in plan.stages.iter().enumerate() {
        *sums.entry(&stage.devices).or_default() += bytes(at);
    }
    sums
}

fn peak(plan: &Plan) -> u64 {
    bytes_by_device(plan, |at| plan.stages[at].memory.total).into_values().max().unwrap()
}

/// The plan with other recomputed ops, without times.
fn with_recomputed(plan: &Plan, at: usize, ops: u32) -> Plan {
    let mut changed = plan.clone();
    let Stage { recompute, recomputed, .. } = &mut changed.stages[at];
    (*recompute, *recomputed) = (ops > 0, (ops > 0).then_some(RecomputedOps { ops, layers: None, fwd_us: 0.0 }));
    changed
}

#[test]
fn no_more_is_recomputed_than_fits() {
    let mut partial_stages = 0;
    for schedule in [Schedule::OneFOneB, Schedule::ZbH1, Schedule::Interleaved, Schedule::OneFOneBRr] {
        let mut problem = problem(schedule, 4);
        let unlimited = plan_checked(&problem);
        assert!(unlimited.stages.iter().all(|stage| !stage.recompute && stage.recomputed.is_none()));
        problem.recompute = Recomputation::Full;
        let full = plan_checked(&problem);
        problem.recompute = Recomputation::Auto;
        let (max_peak, min_peak) = (peak(&unlimited), peak(&full));
        let mut previous_us = unlimited.predicted.minibatch_us;
        for tenth in (0..10).rev() {
            let limit = min_peak + (max_peak - min_peak) * tenth / 10;
            problem.memory_limit = Some(Bytes(limit));
            let plan = plan_checked(&problem);
            assert!(peak(&plan) <= limit, "{schedule} {tenth}");
            let us = plan.predicted.minibatch_us;
            // Plans are improved by a climb, which may end in another place; of plans within 0.5 % the simpler one wins.
            assert!(
                us >= previous_us * (1.0 - 1e-2),
                "{schedule} {tenth}: {us} with less memory, {previous_us} with more"
            );
            assert!(us <= full.predicted.minibatch_us * (1.0 + 5e-3), "{schedule} {tenth}: {us}");
            previous_us = us;
            for (at, stage) in plan.stages.iter().enumerate() {
                let Some(RecomputedOps { ops, fwd_us, .. }) = stage.recomputed else { continue };
                partial_stages += 1;
                assert!(fwd_us > 0.0 && fwd_us < stage.fwd_us);
                // One op less does not fit beside what else the device holds.
                let memory = evaluate(&problem, &with_recomputed(&plan, at, ops - 1)).unwrap().memory;
                let bytes = bytes_by_device(&plan, |at| memory[at].total)[&stage.devices[..]];
                assert!(bytes > limit, "{schedule} {tenth}: {ops} ops of stage {at}, {bytes} of {limit} with one less");
            }
        }
        // A little less memory takes a little more time.
        problem.memory_limit = Some(Bytes(max_peak - 1));
        let us = plan_checked(&problem).predicted.minibatch_us;
        assert!(
            us < unlimited.predicted.minibatch_us * 1.03,
            "{schedule}: {us} of {}",
            unlimited.predicted.minibatch_us
        );
    }
    assert!(partial_stages > 30, "{partial_stages} stages are recomputed in part");
}

#[test]
fn full_recomputation_is_of_all_ops() {
    for schedule in Schedule::GENERATED.into_iter().filter(|schedule| schedule.trains()) {
        let mut problem = problem(schedule, 4);
        problem.chunks = if schedule.is_on_a_v() || schedule.has_chunks() { 2 } else { 1 };
        problem.recompute = Recomputation::Full;
        let pinned = problem.constraints.replicas.take();
        for (limit, replicas) in [(None, None), (Some(Bytes(u64::MAX / 2)), None), (None, pinned)] {
            (problem.memory_limit, problem.constraints.replicas) = (limit, replicas);
            for objective in [Objective::Throughput, Objective::Memory] {
                problem.objective = objective;
                let plan = plan_checked(&problem);
                for stage in &plan.stages {
                    assert!(stage.recompute && stage.recomputed.is_none(), "{schedule} {objective:?}");
                    assert!((stage.bwd_us - 3.0 * stage.fwd_us).abs() < 1e-6 * stage.fwd_us, "{schedule}");
                }
                assert_eq!(plan.options["recompute"], "full");
            }
        }
    }
    let mut problem = problem(Schedule::OneFOneB, 2);
    problem.constraints.replicas = None;
    problem.recompute = Recomputation::Full;
    problem.graph = chain(8);
    for partitioner in [Partitioner::Exhaustive, Partitioner::Milp, Partitioner::DataParallel, Partitioner::Uniform] {
        let options = PlannerOptions { partitioner, ..PlannerOptions::default() };
        let plan = plan(&problem, &options).unwrap().plan;
        check(&problem, &plan).unwrap();
        let is_full = |stage: &Stage| stage.recompute && stage.recomputed.is_none();
        assert!(plan.stages.iter().all(is_full), "{}", partitioner.name());
    }
}

#[test]
fn contradictory_numbers_of_ops_are_found() {
    let mut problem = problem(Schedule::OneFOneB, 4);
    problem.constraints.cut_after = Some(["op11", "op23", "op35"].map(String::from).to_vec());
    let peak_bytes = peak(&plan_checked(&problem));
    problem.memory_limit = Some(Bytes(peak_bytes * 9 / 10));
    let plan = plan_checked(&problem);
    let at = plan.stages.iter().position(|stage| stage.recomputed.is_some()).unwrap();
    let op_count = plan.stages[at].op_ids().count() as u32;
    for (fault, change) in [
        ("no op", &(|stage: &mut Stage| stage.recomputed.as_mut().unwrap().ops = 0) as &dyn Fn(&mut Stage)),
        ("all ops", &|stage| stage.recomputed.as_mut().unwrap().ops = op_count),
        ("nothing is recomputed", &|stage| stage.recompute = false),
        ("a time above the forward", &|stage| stage.recomputed.as_mut().unwrap().fwd_us = 2.0 * stage.fwd_us),
    ] {
        let mut changed = plan.clone();
        change(&mut changed.stages[at]);
        assert!(sound(&changed).is_err(), "{fault}");
    }
    let mut changed = plan.clone();
    changed.stages[at].recomputed.as_mut().unwrap().fwd_us *= 0.9;
    assert!(check(&problem, &changed).is_err(), "another time of the ops");
    assert!(check(&problem, &with_recomputed(&plan, at, 1)).is_err(), "another number of ops");
}

/// Six layers of seven ops between two other modules of three ops. A fifth of the ops save nothing.
fn layers() -> CostGraph {
    let mut graph = chain(48);
    for (at, op) in graph.ops.iter_mut().enumerate() {
        op.module = match at {
            0..3 => "embed".to_string(),
            45.. => "head".to_string(),
            _ => format!("model.layers.{}.linear", (at - 3) / 7),
        };
        if at % 5 == 4 {
            (op.saved_bytes, op.unsaved) = (0, true);
        }
    }
    graph
}

#[test]
fn frameworks_keep_the_inputs_of_layers_and_save_one_layer_again() {
    let mut problem = Problem::new(layers(), levels("1:100GB/s").unwrap(), CostModel::Pipec);
    (problem.schedule, problem.microbatches, problem.recompute) = (Schedule::Gpipe, 4, Recomputation::Full);
    let activations = |target: Option<Target>| {
        let mut problem = problem.clone();
        problem.set_target(target);
        let plan = plan_checked(&problem);
        assert_eq!((plan.stages.len(), plan.schedule.in_flight[0]), (1, 4));
        plan.stages[0].memory.activations
    };
    let bytes = |at: u64| 10_000 + at % 5 * 100;
    let saved = |at: u64| if at % 5 == 4 { 0 } else { bytes(at) };
    // Op 2 feeds the first layer, and the last op of each layer the next one or the head.
    let last_ops = || (1..=6).map(|layer| 2 + 7 * layer);
    let layer_bytes = |end: u64| (end - 6..end).map(saved).sum::<u64>() + bytes(end);
    let outside_bytes: u64 = (0..3).chain(45..48).map(saved).sum();
    let kept_bytes = outside_bytes + last_ops().map(bytes).sum::<u64>();
    assert_eq!(activations(Some(Target::Torchtitan)), 4 * kept_bytes + last_ops().map(layer_bytes).max().unwrap());
    let total: u64 = (0..48).map(saved).sum();
    assert_eq!(activations(Some(Target::Torch)), total, "one micro-batch of four, without inputs");
    // pipec's runtime also recomputes the ops before the first layer and after the last. The loss reads the result.
    let between_bytes = last_ops().chain([2, 47]).map(bytes).sum::<u64>();
    // While a layer is recomputed, the gradient of its output waits.
    assert_eq!(activations(None), 4 * between_bytes + last_ops().map(layer_bytes).max().unwrap());
}

#[test]
fn layers_of_frameworks_are_recomputed_whole() {
    let mut partial_stages = 0;
    for (schedule, target) in [
        (Schedule::OneFOneB, Target::Megatron),
        (Schedule::Interleaved, Target::Megatron),
        (Schedule::OneFOneB, Target::Deepspeed),
        (Schedule::Gpipe, Target::Torchtitan),
    ] {
        let mut problem = problem(schedule, 2);
        problem.graph = layers();
        problem.set_target(Some(target));
        let max_peak = peak(&plan_checked(&problem));
        problem.recompute = Recomputation::Full;
        let min_peak = peak(&plan_checked(&problem));
        problem.recompute = Recomputation::Auto;
        assert!(min_peak < max_peak, "{schedule}");
        for tenth in 0..10 {
            problem.memory_limit = Some(Bytes(min_peak + (max_peak - min_peak) * tenth / 10));
            let plan = plan_checked(&problem);
            assert!(peak(&plan) <= problem.memory_limit.unwrap().0);
            for stage in &plan.stages {
                let Some(RecomputedOps { ops, layers, fwd_us }) = stage.recomputed else { continue };
                let Some(next) = stage.op_ids().nth(ops as usize) else { continue };
                partial_stages += 1;
                assert!(matches!(next, 10 | 17 | 24 | 31 | 38 | 45), "{schedule} {tenth}: cut before {next}");
                let recomputed: Vec<u32> = stage.recomputed_op_ids().filter(|op| (3..45).contains(op)).collect();
                assert_eq!(layers, Some(recomputed.len() as u32 / 7), "{schedule} {tenth}");
                let us: f64 = recomputed.iter().map(|&op| problem.graph.ops[op as usize].fwd_us).sum();
                assert!((fwd_us - us).abs() < 1e-9 * us, "{schedule} {tenth}: embedding and head are not recomputed");
            }
        }
    }
    assert!(partial_stages > 10, "{partial_stages} stages are recomputed in part");
}
