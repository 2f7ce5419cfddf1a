//! Plans with several stages per rank: the checker accepts them, and programs and simulation match the predictions.

use compiler::cluster::Bytes;
use compiler::cluster::read::levels;
use compiler::partition::error::PlanError;
use compiler::partition::options::PlannerOptions;
use compiler::partition::planned::Planned;
use compiler::partition::planner::plan;
use compiler::plan::check::consistency::sound;
use compiler::plan::problem::{CostModel, Problem};
use compiler::plan::schedule::Schedule;
use compiler::profile::cost_graph::{CostGraph, OpCost, OpId, ParamCost, TensorCost};
use compiler::schedule::check::verify::check;
use compiler::schedule::generators::schedule;
use compiler::schedule::pipeline::{generated, pipeline};
use compiler::schedule::semantics::StepCount;
use compiler::simulate::run::{Machine, simulate};
use std::collections::BTreeMap;

const KINDS: [Schedule; 4] = [Schedule::Interleaved, Schedule::Bfs, Schedule::Zbv, Schedule::DualPipeV];

/// A chain in which every third op is also read three ops later.
fn chain(times: &[f64], bytes: u64) -> CostGraph {
    let count = times.len() as u32;
    let op = |(id, us): (usize, &f64)| OpCost {
        id: id as u32,
        name: format!("op{id}"),
        fwd_us: us / 3.0,
        bwd_us: us * 2.0 / 3.0,
        param_bytes: 1000,
        saved_bytes: 500,
        out_bytes: bytes,
        ..OpCost::default()
    };
    let consumers = |id: u32| {
        let skip = id.is_multiple_of(3).then_some(id + 3);
        [Some(id + 1), skip].into_iter().flatten().filter(|to| *to < count).map(OpId).collect()
    };
    CostGraph {
        ops: times.iter().enumerate().map(op).collect(),
        tensors: (0..count)
            .map(|id| TensorCost { name: format!("t{id}"), producer: OpId(id), bytes, consumers: consumers(id) })
            .collect(),
        params: (0..count).map(|id| ParamCost::new(format!("p{id}"), 1000, vec![OpId(id)])).collect(),
        ..CostGraph::default()
    }
}

fn problem(graph: CostGraph, spec: &str, kind: Schedule, chunks: u32, microbatches: u32) -> Problem {
    let mut problem = Problem::new(graph, levels(spec).unwrap(), CostModel::Pipec);
    problem.schedule = kind;
    problem.chunks = chunks;
    problem.microbatches = microbatches;
    problem
}

fn make_plan(problem: &Problem) -> Planned {
    plan(problem, &PlannerOptions::default()).unwrap()
}

#[test]
fn programs_hold_what_plans_say() {
    for kind in KINDS {
        for chunks in if kind.is_on_a_v() { vec![2] } else { vec![2, 3] } {
            for (spec, microbatches) in [("4:1GB/s", 8), ("4:1GB/s", 1), ("2:10GB/s,3:1GB/s", 7)] {
                let times: Vec<f64> = (0..40).map(|at| 50.0 + f64::from(at * 7 % 11)).collect();
                let problem = problem(chain(&times, 1000), spec, kind, chunks, microbatches);
                let plan = make_plan(&problem).plan;
                sound(&plan).unwrap();
                let plan_error = format!("{} {chunks} {spec} {microbatches}", kind.name());
                assert_eq!(plan.schedule.chunks, chunks, "{plan_error}");
                let mut stage_counts: BTreeMap<&[u32], usize> = BTreeMap::new();
                plan.stages.iter().for_each(|stage| *stage_counts.entry(&stage.devices).or_default() += 1);
                assert!(
                    stage_counts.values().all(|stages| *stages == chunks as usize),
                    "{plan_error}: {stage_counts:?}"
                );
                let pipeline = pipeline(&plan).unwrap();
                let count = StepCount { minibatches: 2, microbatches };
                let program = schedule(generated(kind).unwrap(), &pipeline, count).unwrap();
                check(&program).unwrap();
                let caps: Vec<u32> = program.stages.iter().map(|stage| stage.cap).collect();
                assert_eq!(caps, plan.schedule.in_flight, "{plan_error}");
            }
        }
    }
}

/// With equal ops and free links, programs take exactly the predicted time.
#[test]
fn predictions_are_what_simulation_finds() {
    for kind in KINDS {
        let problem = problem(chain(&[60.0; 32], 0), "4:1000GB/s", kind, 2, 16);
        let plan = plan(&problem, &PlannerOptions::default()).unwrap().plan;
        let mut unreplicated = problem.clone();
        unreplicated.constraints.no_replication = true;
        let plan = if plan.stages.len() == 8 { plan } else { make_plan(&unreplicated).plan };
        let pipeline = pipeline(&plan).unwrap();
        let count = StepCount { minibatches: 1, microbatches: 16 };
        let program = schedule(generated(kind).unwrap(), &pipeline, count).unwrap();
        let simulated_us = simulate(&program, &pipeline, &Machine::of(&pipeline)).unwrap().makespan;
        let error = (plan.predicted.step_us - simulated_us).abs() / simulated_us;
        assert!(error < 0.08, "{}: {} predicted, {simulated_us} simulated", kind.name(), plan.predicted.step_us);
    }
}

#[test]
fn chunks_of_one_rank_share_its_memory() {
    for kind in KINDS {
        let mut problem = problem(chain(&[60.0; 24], 10), "3:1GB/s", kind, 2, 6);
        problem.constraints.no_replication = true;
        let unlimited = make_plan(&problem).plan;
        let mut bytes: BTreeMap<&[u32], u64> = BTreeMap::new();
        unlimited.stages.iter().for_each(|stage| *bytes.entry(&stage.devices).or_default() += stage.memory.total);
        let peak = bytes.into_values().max().unwrap();
        problem.memory_limit = Some(Bytes(peak));
        assert_eq!(make_plan(&problem).plan.stages.len(), unlimited.stages.len());
        // Slightly less memory requires recomputation; very little is infeasible.
        problem.memory_limit = Some(Bytes(peak - 1));
        assert!(make_plan(&problem).plan.stages.iter().any(|stage| stage.recompute));
        problem.memory_limit = Some(Bytes(5000));
        let error = plan(&problem, &PlannerOptions::default()).unwrap_err();
        let PlanError::Infeasible { smallest_limit, .. } = error else { panic!("{error}") };
        problem.memory_limit = Some(Bytes(smallest_limit));
        make_plan(&problem);
    }
}

#[test]
fn incompatible_settings_are_reported() {
    let error_of = |problem: &Problem| plan(problem, &PlannerOptions::default()).unwrap_err().to_string();
    let graph = || chain(&[1.0; 12], 1);
    assert!(error_of(&problem(graph(), "4:1GB/s", Schedule::OneFOneB, 2, 4)).contains("interleaved"));
    assert!(error_of(&problem(graph(), "4:1GB/s", Schedule::Zbv, 3, 4)).contains('2'));
    assert!(error_of(&problem(graph(), "4:1GB/s", Schedule::Interleaved, 9, 4)).contains("9 stages"));
    let mut unequal = problem(graph(), "4:1GB/s", Schedule::Interleaved, 2, 4);
    unequal.constraints.replicas = Some(vec![1, 1, 2, 1]);
    assert!(error_of(&unequal).contains("equal numbers"));
    unequal.constraints.replicas = Some(vec![2, 2, 2, 2]);
    assert_eq!(make_plan(&unequal).plan.stages.len(), 4);
}
