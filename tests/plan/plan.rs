//! Planning as a whole: partitioners against exhaustive search and published figures, within memory and time limits.

use crate::support::problems::Random;
#[allow(dead_code)] // Other tests use the rest.
use compiler::cluster::Bytes;
use compiler::cluster::read::{gpus, levels};
use compiler::cluster::unit::bandwidth;
use compiler::import::pipedream;
use compiler::partition::error::PlanError;
use compiler::partition::options::PlannerOptions;
use compiler::partition::partitioners::Partitioner;
use compiler::partition::planned::Planned;
use compiler::partition::planner::plan;
use compiler::plan::Plan;
use compiler::plan::check::verify::check;
use compiler::plan::problem::{CostModel, InFlight, Objective, Problem, ProblemError};
use compiler::plan::read::{from_json, schema, to_json};
use compiler::plan::schedule::Schedule;
use compiler::profile::arena::Live;
use compiler::profile::cost_graph::{CostGraph, OpCost, OpId, ParamCost, TensorCost};
use compiler::simulate::one_f_one_b_rr::Steady;
use std::time::{Duration, Instant};

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Chain,
    OneSource,
    Any,
}

fn random_graph(random: &mut Random, kind: Kind, max_ops: u64) -> CostGraph {
    let ops = 2 + random.below(max_ops - 1) as u32;
    let mut graph = CostGraph::default();
    for id in 0..ops {
        let weights = if random.below(3) == 0 { random.below(4_000_000) } else { random.below(20_000) };
        let out_bytes = random.below(400_000);
        let (fwd_us, bwd_us) = (random.below(1000) as f64, random.below(2000) as f64);
        graph.ops.push(OpCost {
            id,
            name: format!("op{id}"),
            op: "test".into(),
            fwd_us,
            bwd_us,
            weight_grad_us: (weights % 3 > 0).then(|| bwd_us * (weights % 5) as f64 / 4.0),
            param_bytes: weights,
            saved_bytes: random.below(500_000),
            workspace_bytes: random.below(100_000),
            batched_grad_bytes: weights / 2,
            batched_grad_workspace_bytes: weights % 150_000,
            live: Live::of((out_bytes, [out_bytes / 3, weights / 2]), (out_bytes / 2, [weights, out_bytes / 3])),
            out_bytes,
            ..OpCost::default()
        });
        graph.params.push(ParamCost::new(format!("w{id}"), weights, vec![OpId(id)]));
        let (name, producer) = (format!("t{id}"), OpId(id));
        graph.tensors.push(TensorCost { name, producer, bytes: out_bytes, consumers: Vec::new() });
    }
    for to in 1..ops {
        let producers: Vec<u32> = match kind {
            Kind::Chain => vec![to - 1],
            Kind::OneSource => (0..1 + random.below(2)).map(|_| random.below(u64::from(to)) as u32).collect(),
            Kind::Any => (0..random.below(3)).map(|_| random.below(u64::from(to)) as u32).collect(),
        };
        for from in producers {
            let consumers = &mut graph.tensors[from as usize].consumers;
            if consumers.last() != Some(&OpId(to)) {
                consumers.push(OpId(to));
            }
        }
    }
    graph
}

fn random_problem(random: &mut Random, kind: Kind, max_ops: u64, clusters: &[&str]) -> Problem {
    let graph = random_graph(random, kind, max_ops);
    let cluster = levels(clusters[random.below(clusters.len() as u64) as usize]).unwrap();
    let cost = if random.below(2) == 0 { CostModel::Paper } else { CostModel::Pipedream };
    let mut problem = Problem::new(graph, cluster, cost);
    problem.optimizer_state = random.below(3) as f64;
    if random.below(2) == 0 {
        problem.activation_compression = Some(1.0);
    }
    problem
}

fn plan_with(problem: &Problem, partitioner: Partitioner) -> Result<Planned, PlanError> {
    plan(problem, &PlannerOptions { partitioner, ..PlannerOptions::default() })
}

fn us(planned: &Planned) -> f64 {
    planned.plan.predicted.minibatch_us
}

fn close(left: f64, right: f64) -> bool {
    (left - right).abs() <= 1e-9 * left.max(right)
}

const FLAT: &[&str] = &["2:1GB/s", "3:1GB/s", "4:0.2GB/s", "4:10GB/s"];
const NESTED: &[&str] = &["2:10GB/s,2:1GB/s", "3:2GB/s,2:1GB/s"];

#[test]
fn nothing_beats_exhaustive_and_pipec_ties_it() {
    for seed in 0..150 {
        let mut random = Random(seed);
        let kind = [Kind::Chain, Kind::OneSource, Kind::Any][seed as usize % 3];
        let problem = random_problem(&mut random, kind, 8, FLAT);
        let optimal = plan_with(&problem, Partitioner::Exhaustive).unwrap();
        assert!(optimal.plan.proven_optimal);
        for partitioner in Partitioner::all() {
            let planned = plan_with(&problem, partitioner).unwrap();
            assert!(us(&planned) >= us(&optimal) * (1.0 - 1e-9), "seed {seed}: {partitioner:?} beats exhaustive");
            assert!(planned.plan.lower_bound_us <= us(&optimal) * (1.0 + 1e-9), "seed {seed}: {partitioner:?} bound");
            assert!(
                !planned.plan.proven_optimal || close(us(&planned), us(&optimal)),
                "seed {seed}: {partitioner:?} proof"
            );
        }
        let pipec = plan_with(&problem, Partitioner::Pipec).unwrap();
        assert!(close(us(&pipec), us(&optimal)), "seed {seed}: pipec {} exhaustive {}", us(&pipec), us(&optimal));
        assert!(pipec.plan.proven_optimal, "seed {seed}");
    }
}

#[test]
fn nested_clusters_do_not_beat_exhaustive_within_whole_groups() {
    for seed in 0..40 {
        let mut random = Random(1000 + seed);
        let problem = random_problem(&mut random, Kind::OneSource, 6, NESTED);
        let optimal = plan_with(&problem, Partitioner::Exhaustive).unwrap();
        for partitioner in
            [Partitioner::Pipedream, Partitioner::DataParallel, Partitioner::Uniform, Partitioner::Single]
        {
            let planned = plan_with(&problem, partitioner).unwrap();
            assert!(us(&planned) >= us(&optimal) * (1.0 - 1e-9), "seed {seed}: {partitioner:?} beats exhaustive");
        }
    }
}

#[test]
fn pipedream_ties_exhaustive_on_chains_where_more_devices_never_hurt() {
    for seed in 0..60 {
        let mut random = Random(2000 + seed);
        let mut problem = random_problem(&mut random, Kind::Chain, 9, FLAT);
        // Without weights an additional replica is free, so requiring all devices is no constraint.
        problem.graph.ops.iter_mut().for_each(|op| op.param_bytes = 0);
        problem.activation_compression = None;
        problem.cost = CostModel::Pipedream;
        let optimal = plan_with(&problem, Partitioner::Exhaustive).unwrap();
        let pipedream = plan_with(&problem, Partitioner::Pipedream).unwrap();
        assert!(close(us(&pipedream), us(&optimal)), "seed {seed}");
    }
}

#[test]
fn no_plan_is_over_the_limit_and_every_no_names_a_limit_that_does() {
    let (mut planned_within, mut infeasible) = (0, 0);
    for seed in 0..200 {
        let mut random = Random(3000 + seed);
        let clusters = if seed % 4 == 0 { NESTED } else { FLAT };
        let kind = if seed % 2 == 0 { Kind::Chain } else { Kind::OneSource };
        let mut problem = random_problem(&mut random, kind, 8, clusters);
        problem.in_flight = InFlight::Pipedream;
        let limit = 200_000 + random.below(12_000_000);
        problem.memory_limit = Some(Bytes(limit));
        let partitioner = if random.below(2) == 0 { Partitioner::Pipec } else { Partitioner::Pipedream };
        match plan_with(&problem, partitioner) {
            Ok(planned) => {
                planned_within += 1;
                assert!(planned.plan.stages.iter().all(|stage| stage.memory.total <= limit), "seed {seed}");
                if problem.cluster.levels.len() == 1 {
                    let optimal = plan_with(&problem, Partitioner::Exhaustive).unwrap();
                    assert!(us(&planned) >= us(&optimal) * (1.0 - 1e-9), "seed {seed}: over exhaustive");
                    // On a chain the search with a memory limit is complete.
                    if kind == Kind::Chain && partitioner == Partitioner::Pipec {
                        assert!(close(us(&planned), us(&optimal)), "seed {seed}: {} {}", us(&planned), us(&optimal));
                    }
                }
            }
            Err(PlanError::Infeasible { smallest_limit, missing, .. }) => {
                infeasible += 1;
                assert_eq!(smallest_limit, limit + missing, "seed {seed}");
                if kind == Kind::Chain && problem.cluster.levels.len() == 1 {
                    assert!(
                        matches!(plan_with(&problem, Partitioner::Exhaustive), Err(PlanError::Infeasible { .. })),
                        "seed {seed}"
                    );
                }
                problem.memory_limit = Some(Bytes(smallest_limit));
                let planned = plan_with(&problem, partitioner).unwrap();
                assert!(planned.plan.stages.iter().all(|stage| stage.memory.total <= smallest_limit), "seed {seed}");
                if problem.cluster.levels.len() == 1 && kind == Kind::Chain {
                    problem.memory_limit = Some(Bytes(smallest_limit - 1));
                    assert!(
                        matches!(plan_with(&problem, partitioner), Err(PlanError::Infeasible { .. })),
                        "seed {seed}"
                    );
                }
            }
            Err(error) => panic!("seed {seed}: {error}"),
        }
    }
    assert!(planned_within > 30 && infeasible > 30, "{planned_within} planned, {infeasible} refused");
}

#[test]
fn every_schedule_and_objective_makes_a_sound_plan() {
    for seed in 0..60 {
        let mut random = Random(4000 + seed);
        let mut problem = random_problem(&mut random, Kind::OneSource, 10, if seed % 3 == 0 { NESTED } else { FLAT });
        let kinds: Vec<Schedule> = Schedule::ALL.into_iter().filter(|kind| !kind.has_chunks()).collect();
        problem.schedule = kinds[seed as usize % kinds.len()];
        problem.microbatches = 1 + random.below(8) as u32;
        problem.objective = if seed % 2 == 0 { Objective::Memory } else { Objective::Throughput };
        let best_planned = plan_with(&problem, Partitioner::Pipec).unwrap();
        let peak = |planned: &Planned| planned.plan.stages.iter().map(|stage| stage.memory.total).max();
        if problem.objective == Objective::Memory {
            for partitioner in [Partitioner::Single, Partitioner::DataParallel, Partitioner::Uniform] {
                assert!(peak(&best_planned) <= peak(&plan_with(&problem, partitioner).unwrap()), "seed {seed}");
            }
        }
    }
}

#[test]
fn the_judge_finds_every_change() {
    let mut problem = Problem::new(chain(8), levels("2:10GB/s,2:10GB/s").unwrap(), CostModel::Pipedream);
    problem.activation_compression = Some(1.0);
    problem.memory_limit = Some(Bytes(1 << 20));
    let sound_plan = plan_with(&problem, Partitioner::Uniform).unwrap().plan;
    assert_eq!(sound_plan.stages.len(), 4);
    assert!(check(&problem, &sound_plan).is_ok());
    type Change<'a> = (&'a str, &'a dyn Fn(&mut Plan));
    let changes: &[Change<'_>] = &[
        ("no stages", &|plan| plan.stages.clear()),
        ("stages[1] has id 7", &|plan| plan.stages[1].id.0 = 7),
        ("op 0 is in 0 stages", &|plan| plan.stages[0].ops[0].0 = 1),
        ("op 2 is in 2 stages", &|plan| plan.stages[0].ops[0].1 = 3),
        ("op range [9, 2)", &|plan| plan.stages[0].ops[0] = (9, 2)),
        ("op range [0, 4000000000)", &|plan| plan.stages[0].ops[0].1 = 4_000_000_000),
        ("backward from stage 1 to stage 0", &|plan| {
            let ops = plan.stages[0].ops.clone();
            plan.stages[0].ops = std::mem::replace(&mut plan.stages[1].ops, ops);
        }),
        ("is also used by stage 0", &|plan| plan.stages[1].devices = vec![0]),
        ("device 4 does not exist", &|plan| plan.stages[3].devices = vec![4]),
        ("0 devices for 1 replicas", &|plan| plan.stages[3].devices.clear()),
        ("1 devices for 2 replicas", &|plan| plan.stages[0].replicas = 2),
        ("in_flight is [0, 3, 2, 1]", &|plan| plan.schedule.in_flight[0] = 0),
        ("weight_versions is", &|plan| plan.schedule.weight_versions.push(1)),
        ("schedule.weight_versions", &|plan| plan.schedule.weight_versions[0] = 2),
        ("memory of stage 0", &|plan| {
            plan.schedule.in_flight = vec![5, 3, 2, 1];
            plan.schedule.weight_versions = vec![5, 3, 2, 1];
        }),
        ("memory of stage 2", &|plan| plan.stages[2].memory.total += 1),
        ("fwd_us of stage 1", &|plan| plan.stages[1].fwd_us += 1e-3),
        ("bwd_us of stage 1", &|plan| plan.stages[1].bwd_us -= 1e-3),
        ("weight_grad_us of stage 1", &|plan| plan.stages[1].weight_grad_us = Some(plan.stages[1].bwd_us / 2.0 + 1e-3)),
        ("edge 0 -> 1", &|plan| plan.edges[0].bytes += 1),
        ("edge 1 -> 2", &|plan| drop(plan.edges.remove(1))),
        ("edge 0 -> 2", &|plan| plan.edges[0].to.0 = 2),
        ("the edge twice", &|plan| plan.edges.push(plan.edges[0].clone())),
        ("edge 0 -> 1", &|plan| plan.edges[0].tensors[0].push('x')),
        ("predicted.minibatch_us", &|plan| plan.predicted.minibatch_us *= 1.0 + 1e-6),
        ("not as deep", &|plan| plan.stages[2].hierarchy.truncate(1)),
        ("0 entries for 2 levels", &|plan| plan.stages.iter_mut().for_each(|stage| stage.hierarchy.clear())),
        ("group 5 instead of the next group, 1", &|plan| plan.stages[1].hierarchy[0].group = 5),
        ("share a group of the innermost level", &|plan| plan.stages[1].hierarchy[0].group = 0),
        ("take 4 of the 2 members", &|plan| {
            plan.stages.iter_mut().enumerate().for_each(|(at, stage)| {
                stage.hierarchy[0].group = at as u32;
                stage.hierarchy[1].group = 0;
            })
        }),
    ];
    for (expected, change) in changes {
        let mut plan = sound_plan.clone();
        change(&mut plan);
        let faults = check(&problem, &plan).expect_err(expected);
        let text = faults.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
        assert!(text.contains(expected), "{expected}: {text}");
    }
    problem.memory_limit = Some(Bytes(100));
    assert!(check(&problem, &sound_plan).is_err());
}

#[test]
fn plans_round_trip_and_are_the_same_every_time() {
    let problem = random_problem(&mut Random(7), Kind::Any, 9, FLAT);
    let planned = plan_with(&problem, Partitioner::Pipec).unwrap();
    let text = to_json(&planned.plan).unwrap();
    assert!(text.ends_with("}\n"));
    assert_eq!(to_json(&plan_with(&problem, Partitioner::Pipec).unwrap().plan).unwrap(), text);
    assert_eq!(from_json(&text).unwrap(), planned.plan);
    let extra_fields = |from: &str, to: &str| from_json(&text.replacen(from, to, 1)).map(|plan| plan.extra.len());
    assert_eq!(extra_fields("{", "{\"x-note\": {\"any\": 1},"), Ok(1));
    assert!(extra_fields("{", "{\"y-note\": 1,").unwrap_err().to_string().contains("y-note"));
    assert!(extra_fields("\"dtype\"", "\"seed\"").is_err());
    assert!(extra_fields("{", "{\"dtype\": \"f32\",").unwrap_err().to_string().contains("dtype"));
    assert!(extra_fields("pipec.plan/1", "pipec.plan/2").unwrap_err().to_string().contains("plan/2"));
    let replicas = extra_fields("\"replicas\": ", "\"replicas\": -").unwrap_err().to_string();
    assert!(replicas.contains("stages[0].replicas"), "{replicas}");
    assert_eq!(schema()["properties"]["stages"]["type"], "array");
}

fn chain(ops: u32) -> CostGraph {
    let op = |id| OpCost {
        id,
        name: format!("op{id}"),
        fwd_us: 10.0,
        bwd_us: 20.0,
        param_bytes: 1000,
        saved_bytes: 1000,
        out_bytes: 1000,
        ..OpCost::default()
    };
    let tensor =
        |at| TensorCost { name: format!("t{at}"), producer: OpId(at), bytes: 1000, consumers: vec![OpId(at + 1)] };
    let param = |at| ParamCost::new(format!("w{at}"), 1000, vec![OpId(at)]);
    CostGraph {
        ops: (0..ops).map(op).collect(),
        tensors: (0..ops - 1).map(tensor).collect(),
        params: (0..ops).map(param).collect(),
        ..CostGraph::default()
    }
}

#[test]
fn users_can_fix_replicas_cuts_and_caps() {
    let mut problem = Problem::new(chain(8), levels("4:10GB/s").unwrap(), CostModel::Pipedream);
    problem.constraints.replicas = Some(vec![2, 1, 1]);
    let plan = plan_with(&problem, Partitioner::Pipec).unwrap().plan;
    assert_eq!(plan.stages.iter().map(|stage| stage.replicas).collect::<Vec<_>>(), [2, 1, 1]);
    assert_eq!(plan.stages.iter().map(|stage| stage.ops.clone()).collect::<Vec<_>>(), [[(0, 4)], [(4, 6)], [(6, 8)]]);
    assert_eq!(plan.stages[1].devices, [2]);
    assert_eq!(plan.schedule.in_flight, [2, 2, 1]);
    problem.constraints.cut_after = Some(vec!["op0".into(), "5".into()]);
    let plan = plan_with(&problem, Partitioner::Pipec).unwrap().plan;
    assert_eq!(plan.stages.iter().map(|stage| stage.ops.clone()).collect::<Vec<_>>(), [[(0, 1)], [(1, 6)], [(6, 8)]]);
    problem.constraints.cut_after = Some(vec!["op0".into()]);
    assert!(matches!(plan_with(&problem, Partitioner::Pipec), Err(PlanError::Problem(ProblemError::Disagree { .. }))));
    problem.constraints.replicas = Some(vec![4, 1]);
    assert!(matches!(
        plan_with(&problem, Partitioner::Pipec),
        Err(PlanError::Problem(ProblemError::TooManyReplicas { .. }))
    ));
    problem.constraints.replicas = None;
    problem.constraints.cut_after = None;
    problem.in_flight = InFlight::Given(vec![7, 3]);
    let plan = plan_with(&problem, Partitioner::Pipec).unwrap().plan;
    assert_eq!(
        (plan.stages.len(), plan.schedule.in_flight, plan.schedule.weight_versions),
        (2, vec![7, 3], vec![7, 3])
    );
    problem.cluster = levels("2:10GB/s,2:1GB/s").unwrap();
    problem.in_flight = InFlight::Pipedream;
    problem.constraints.replicas = Some(vec![3, 1]);
    let plan = plan_with(&problem, Partitioner::Pipec).unwrap().plan;
    assert_eq!(plan.stages[0].hierarchy.len(), 1);
    assert!(plan.warnings.iter().any(|warning| warning.contains("whole groups")));
}

#[test]
fn caps_are_raised_until_the_workers_are_busy_or_memory_ends() {
    let mut problem = Problem::new(chain(5), levels("5:10GB/s").unwrap(), CostModel::Pipedream);
    problem.constraints.replicas = Some(vec![1, 3, 1]);
    problem.in_flight = InFlight::Auto;
    // 1-3-1 under the published limits 5, 2, 1 reaches 0.75; full throughput needs two more in the middle and one last.
    let efficiency = |_: &[compiler::plan::Stage], _: &[compiler::plan::Edge], caps: &[u32]| {
        let share = 0.75 + 0.1 * f64::from(caps[1] - 2).min(2.0) + 0.05 * f64::from(caps[2] - 1).min(1.0);
        Steady { share, held: vec![true; caps.len()], pieces: 1 }
    };
    let options = PlannerOptions { efficiency: Some(&efficiency), ..PlannerOptions::default() };
    let planned = plan(&problem, &options).unwrap().plan;
    assert_eq!(planned.schedule.in_flight, [5, 4, 2]);
    assert_eq!(planned.schedule.weight_versions, [5, 4, 2]);
    let full = planned.stages[1].memory.total;
    let largest = planned.stages.iter().map(|stage| stage.memory.total).max().unwrap();
    problem.memory_limit = Some(Bytes(if full == largest { full - 1 } else { full.max(largest) }));
    let limited = plan(&problem, &options).unwrap().plan;
    assert!(limited.stages.iter().all(|stage| stage.memory.total <= problem.memory_limit.unwrap().0));
}

#[test]
fn bombs_end_in_time_with_a_warning() {
    // 24 chains of 24 ops between a first and a last op: 25^24 closed sets.
    let mut parallel = chain(578);
    for tensor in &mut parallel.tensors {
        let from = tensor.producer.0;
        match from {
            0 => tensor.consumers = (0..24).map(|chain| OpId(chain * 24 + 1)).collect(),
            _ if from % 24 == 0 => tensor.consumers = vec![OpId(577)],
            _ => {}
        }
    }
    for (name, graph) in [("24 chains of 24", parallel), ("a chain of 30,000", chain(30_000))] {
        for cluster in ["4:10GB/s", "16:1GB/s", "4:10GB/s,4:1GB/s", "8:10GB/s,8:5GB/s,4:1GB/s"] {
            for partitioner in [Partitioner::Pipec, Partitioner::Pipedream] {
                let mut problem = Problem::new(graph.clone(), levels(cluster).unwrap(), CostModel::Pipedream);
                problem.activation_compression = Some(1.0);
                let clock = Instant::now();
                let planned = plan_with(&problem, partitioner).unwrap();
                let time = clock.elapsed();
                println!("{name} on {cluster} with {partitioner:?}: {time:?}, {} us", us(&planned));
                // Tests termination, not speed.
                assert!(time < Duration::from_secs(120), "{name} on {cluster}: {time:?}");
                let balanced_us = problem.graph.total_us() / f64::from(problem.cluster.devices());
                assert!(planned.plan.search.fallback.is_some());
                // Without a search, only perfect balance is known to be optimal.
                assert_eq!(planned.plan.proven_optimal, close(us(&planned), balanced_us));
                assert_eq!(planned.plan.warnings.is_empty(), planned.plan.proven_optimal);
                assert!(us(&planned) < 1.2 * balanced_us, "{name} on {cluster}: {} of {balanced_us}", us(&planned));
            }
        }
    }
}

#[test]
fn memory_bombs_end_in_time() {
    for cluster in ["16:1GB/s", "4:10GB/s,4:1GB/s", "8:10GB/s,8:5GB/s,4:1GB/s"] {
        let mut problem = Problem::new(chain(30_000), levels(cluster).unwrap(), CostModel::Pipedream);
        problem.memory_limit = Some(Bytes(1000));
        let clock = Instant::now();
        let smallest = match plan_with(&problem, Partitioner::Pipec) {
            Err(PlanError::Infeasible { smallest_limit, .. }) => smallest_limit,
            result => panic!("{result:?}"),
        };
        println!("{cluster}: needs {smallest}, {:?}", clock.elapsed());
        assert!(clock.elapsed() < Duration::from_secs(20));
    }
}

#[test]
fn wide_graphs_within_the_budget_are_searched_in_time() {
    // 240 ops in a chain, then two branches of 80: 240 + 81^2 closed sets, fewer than the budget.
    let mut graph = chain(401);
    graph.tensors[239].consumers = vec![OpId(240), OpId(320)];
    graph.tensors[319].consumers = vec![OpId(400)];
    let mut random = Random(5);
    graph.ops.iter_mut().for_each(|op| op.bwd_us += random.below(100) as f64);
    for partitioner in [Partitioner::Pipec, Partitioner::Pipedream] {
        let mut problem = Problem::new(graph.clone(), levels("16:1GB/s").unwrap(), CostModel::Pipedream);
        problem.activation_compression = Some(1.0);
        let clock = Instant::now();
        let planned = plan_with(&problem, partitioner).unwrap();
        println!("{partitioner:?}: {:?}, {:?}", clock.elapsed(), planned.plan.search);
        assert!(planned.plan.proven_optimal && planned.plan.search.fallback.is_none());
        assert!(clock.elapsed() < Duration::from_secs(5));
    }
}

#[test]
fn edges_of_the_question_are_answered() {
    let two_ops = |cluster: &str| Problem::new(chain(1 + 1), levels(cluster).unwrap(), CostModel::Pipedream);
    let mut idle = two_ops("4:1GB/s");
    idle.graph.ops.iter_mut().for_each(|op| (op.fwd_us, op.bwd_us) = (0.0, 0.0));
    for partitioner in Partitioner::all() {
        let plan = plan_with(&idle, partitioner).unwrap().plan;
        assert!(plan.predicted.throughput_per_s.is_finite());
        assert_eq!(plan_with(&two_ops("1:1GB/s"), partitioner).unwrap().plan.stages.len(), 1);
    }
    assert!(plan_with(&two_ops("4096:1GB/s"), Partitioner::Pipec).is_ok());
    assert!(matches!(
        plan_with(&two_ops("4097:1GB/s"), Partitioner::Pipec),
        Err(PlanError::Problem(ProblemError::TooLarge { .. }))
    ));
    let mut empty = two_ops("4:1GB/s");
    empty.graph = CostGraph::default();
    assert!(matches!(plan_with(&empty, Partitioner::Pipec), Err(PlanError::Problem(ProblemError::Graph(_)))));
    let mut broken = two_ops("4:1GB/s");
    broken.activation_compression = Some(f64::NAN);
    assert!(matches!(plan_with(&broken, Partitioner::Pipec), Err(PlanError::Problem(ProblemError::Setting { .. }))));
    let mut large = two_ops("4:1GB/s");
    large.graph = chain(40);
    assert!(matches!(
        plan_with(&large, Partitioner::Exhaustive),
        Err(PlanError::Problem(ProblemError::TooLarge { .. }))
    ));
}

fn read_shared(path: &str) -> Option<String> {
    let root =
        std::env::var("PIPEC_DATA").unwrap_or_else(|_| concat!(env!("CARGO_MANIFEST_DIR"), "/../shared/data").into());
    std::fs::read_to_string(format!("{root}/{path}")).ok()
}

fn published(name: &str) -> Option<CostGraph> {
    let text = read_shared(&format!("partition/pipedream/profiles/{name}.graph.txt"))?;
    Some(pipedream::read(&text).unwrap())
}

#[test]
fn objectives_of_the_released_optimizer() {
    let Some(rows) = read_shared("../check/golden.tsv") else { return println!("skipped: no shared data") };
    let mut compared = 0;
    for row in rows.lines().skip(1) {
        let cells: Vec<&str> = row.split('\t').collect();
        let Some(graph) = published(cells[0]) else { continue };
        let level = |(count, rate): (&str, &str)| format!("{count}:{rate}B/s");
        let cluster = cells[1].split('x').zip(cells[2].split(',')).map(level).collect::<Vec<_>>().join(",");
        let mut problem = Problem::new(graph, levels(&cluster).unwrap(), CostModel::Pipedream);
        problem.activation_compression = cells[3].parse().ok();
        let clock = Instant::now();
        let planned = plan_with(&problem, Partitioner::Pipedream).unwrap();
        assert!(clock.elapsed() < Duration::from_secs(2), "{row}: {:?}", clock.elapsed());
        for (quantity, planned, expected) in [
            ("objective", us(&planned), cells[4].parse::<f64>().unwrap() * 1e3),
            ("data parallel", planned.plan.baselines.data_parallel, cells[5].parse::<f64>().unwrap() * 1e3),
        ] {
            assert!((planned - expected).abs() <= 1e-6 * expected, "{quantity} of {row}: {planned}");
        }
        let pipec = plan_with(&problem, Partitioner::Pipec).unwrap();
        assert!(us(&pipec) <= us(&planned) * (1.0 + 1e-9), "{row}: pipec {} pipedream {}", us(&pipec), us(&planned));
        compared += 1;
    }
    assert!(compared > 0);
}

#[test]
fn published_replications() {
    let rows: &[(&str, u32, &str, f64, &[u32])] = &[
        ("vgg16", 4, "1.25GB/s", 176.349, &[3, 1]),
        ("vgg16", 8, "3.125GB/s", 93.661, &[7, 1]),
        ("vgg16", 16, "1.25GB/s", 54.795, &[13, 2, 1]),
        ("vgg16", 16, "3.125GB/s", 45.525, &[15, 1]),
        ("alexnet", 4, "1.25GB/s", 32.461, &[3, 1]),
        ("alexnet", 16, "1.25GB/s", 15.099, &[15, 1]),
        ("gnmt", 4, "1.25GB/s", 25.868, &[1, 1, 1, 1]),
        ("resnet50", 4, "1.25GB/s", 151.993, &[2, 2]),
        ("resnet50", 16, "1.25GB/s", 43.848, &[8, 5, 3]),
    ];
    for (name, devices, rate, milliseconds, replicas) in rows {
        let Some(graph) = published(name) else { return println!("skipped: no shared data") };
        let cluster = gpus(*devices, Some(bandwidth(rate).unwrap())).unwrap();
        let mut problem = Problem::new(graph, cluster, CostModel::Pipedream);
        problem.activation_compression = Some(1.0);
        let planned = plan_with(&problem, Partitioner::Pipedream).unwrap();
        assert_eq!(format!("{:.3}", us(&planned) / 1e3), format!("{milliseconds:.3}"), "{name} on {devices}");
        let found_replicas: Vec<u32> = planned.plan.stages.iter().map(|stage| stage.replicas).collect();
        assert_eq!(found_replicas, *replicas, "{name} on {devices} at {rate}");
    }
}

#[test]
fn stages_that_span_servers_beat_whole_servers() {
    for (name, milliseconds) in [("vgg16", 45.525), ("alexnet", 6.29)] {
        let Some(graph) = published(name) else { return println!("skipped: no shared data") };
        let mut problem = Problem::new(graph, levels("8:40GB/s,2:3.125GB/s").unwrap(), CostModel::Pipedream);
        problem.activation_compression = Some(1.0);
        let planned = plan_with(&problem, Partitioner::Pipec).unwrap();
        assert!(us(&planned) / 1e3 <= milliseconds + 0.01, "{name}: {}", us(&planned));
    }
}

#[test]
fn large_published_profiles_are_planned_near_their_bounds() {
    for name in ["inception_v3", "nasnetamobile"] {
        let Some(graph) = published(name) else { return println!("skipped: no shared data") };
        for cluster in ["16:1.25GB/s", "8:40GB/s,2:3.125GB/s"] {
            for partitioner in [Partitioner::Pipedream, Partitioner::Pipec] {
                let mut problem = Problem::new(graph.clone(), levels(cluster).unwrap(), CostModel::Pipedream);
                problem.activation_compression = Some(1.0);
                let planned = plan_with(&problem, partitioner).unwrap();
                let bound = planned.plan.lower_bound_us;
                println!("{name} on {cluster} {partitioner:?}: {} us, bound {bound} us", us(&planned));
                let is_near = us(&planned) <= bound * 1.05;
                assert!(is_near || partitioner == Partitioner::Pipedream, "{name} on {cluster}");
            }
        }
    }
}

/// A hundred fixed stages are balanced, although grouping by weight concentrates cut positions on few heavy ops.
#[test]
fn many_fixed_stages_are_balanced() {
    let (ops, stages) = (400, 100usize);
    let mut graph = chain(ops);
    for (at, op) in graph.ops.iter_mut().enumerate() {
        let us = if at % 13 == 5 { 40.0 } else { 1.0 + (at % 3) as f64 };
        (op.fwd_us, op.bwd_us) = (us, 2.0 * us);
    }
    let times: Vec<f64> = graph.ops.iter().map(|op| op.fwd_us + op.bwd_us).collect();
    // The optimal maximum of a linear partition, by dynamic programming.
    let mut longest = vec![f64::INFINITY; ops as usize + 1];
    longest[0] = 0.0;
    for _ in 0..stages {
        let mut next = vec![f64::INFINITY; longest.len()];
        for (end, min_longest) in next.iter_mut().enumerate().skip(1) {
            let mut last_stage = 0.0;
            for from in (0..end).rev() {
                last_stage += times[from];
                *min_longest = f64::min(*min_longest, f64::max(longest[from], last_stage));
            }
        }
        longest = next;
    }
    for (cost, schedule) in [
        (CostModel::Pipec, Schedule::OneFOneBRr),
        (CostModel::Pipec, Schedule::OneFOneB),
        (CostModel::Pipedream, Schedule::OneFOneBRr),
    ] {
        let mut problem = Problem::new(graph.clone(), levels("100:1000GB/s").unwrap(), cost);
        problem.schedule = schedule;
        problem.microbatches = if schedule == Schedule::OneFOneB { 4 } else { 1 };
        problem.constraints.replicas = Some(vec![1; stages]);
        let plan = plan_with(&problem, Partitioner::Pipec).unwrap().plan;
        assert_eq!(plan.stages.len(), stages);
        let slowest = plan.stages.iter().map(|stage| stage.fwd_us + stage.bwd_us).fold(0.0, f64::max);
        println!("{cost:?} {schedule:?}: {slowest}, the least is {}", longest[ops as usize]);
        assert!(slowest <= 1.05 * longest[ops as usize], "{cost:?} {schedule:?}: {slowest}");
    }
}
