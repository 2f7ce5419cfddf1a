//! Cost model `pipec`: compared with exhaustive search and simulation, with memory limits and constraints.

mod random;

use compiler::cluster::Bytes;
use compiler::cluster::read::levels;
use compiler::import::pipedream;
use compiler::partition::error::PlanError;
use compiler::partition::options::PlannerOptions;
use compiler::partition::partitioners::Partitioner;
use compiler::partition::planned::Planned;
use compiler::partition::planner::plan;
use compiler::plan::Plan;
use compiler::plan::check::verify::check;
use compiler::plan::problem::{CostModel, InFlight, Objective, Problem, Recomputation, Target};
use compiler::plan::schedule::Schedule;
use compiler::plan::zero::Zero;
use compiler::profile::arena::Live;
use compiler::profile::cost_graph::{CostGraph, OpCost, OpId, ParamCost, TensorCost};
use compiler::schedule::generators::schedule;
use compiler::schedule::pipeline::{generated, pipeline};
use compiler::schedule::semantics::StepCount;
use compiler::simulate::run::{Machine, simulate};
use random::Random;

/// A graph of 2 to `max_ops` ops, with several readers per tensor, tied weights and unsaved ops.
fn random_graph(random: &mut Random, max_ops: u64) -> CostGraph {
    let ops = 2 + random.below(max_ops - 1) as u32;
    let mut graph = CostGraph::default();
    for id in 0..ops {
        let weights = if random.below(3) == 0 { random.below(400_000) } else { random.below(20_000) };
        let out_bytes = random.below(400_000);
        let (fwd_us, bwd_us) = (random.below(1000) as f64, random.below(2000) as f64);
        graph.ops.push(OpCost {
            id,
            name: format!("op{id}"),
            module: format!("layers.{}", id / 2),
            fwd_us,
            bwd_us,
            weight_grad_us: (weights % 3 > 0).then(|| bwd_us * (weights % 5) as f64 / 4.0),
            param_bytes: weights,
            saved_bytes: random.below(500_000),
            workspace_bytes: random.below(100_000),
            batched_grad_bytes: weights / 2,
            batched_grad_workspace_bytes: weights % 150_000,
            live: {
                let bytes = random.below(100_000);
                Live::of((bytes, [bytes / 3, bytes / 2]), (bytes / 2, [bytes / 5, bytes / 4]))
            },
            unsaved: random.below(2) == 0,
            out_bytes,
            ..OpCost::default()
        });
        let mut users = vec![OpId(id)];
        if random.below(6) == 0 && id + 1 < ops {
            users.push(OpId(id + 1));
        }
        graph.params.push(ParamCost::new(format!("w{id}"), weights, users));
        let (name, producer) = (format!("t{id}"), OpId(id));
        graph.tensors.push(TensorCost { name, producer, bytes: out_bytes, consumers: Vec::new() });
    }
    let is_chain = random.below(2) == 0;
    for to in 1..ops {
        let extra = if is_chain { 0 } else { random.below(2) };
        let nearest = to - 1 - (random.below(3) as u32 * u32::from(!is_chain)).min(to - 1);
        let mut producers = vec![nearest];
        producers.extend((0..extra).map(|_| random.below(u64::from(to)) as u32));
        for from in producers {
            let consumers = &mut graph.tensors[from as usize].consumers;
            if consumers.last() != Some(&OpId(to)) {
                consumers.push(OpId(to));
            }
        }
    }
    graph
}

const CLUSTERS: [&str; 4] = ["2:1GB/s", "3:1GB/s", "4:0.2GB/s", "4:10GB/s"];

fn random_problem(random: &mut Random, max_ops: u64) -> Problem {
    let graph = random_graph(random, max_ops);
    let mut cluster = levels(CLUSTERS[random.below(4) as usize]).unwrap();
    cluster.levels[0].latency.0 = random.below(30) as f64 * 1e-6;
    let mut problem = Problem::new(graph, cluster, CostModel::Pipec);
    problem.optimizer_state = random.below(3) as f64;
    problem.in_flight = InFlight::Pipedream;
    match random.below(6) {
        0 => (problem.schedule, problem.microbatches) = (Schedule::OneFOneB, 1 + random.below(8) as u32),
        1 => (problem.schedule, problem.microbatches) = (Schedule::Gpipe, 1 + random.below(8) as u32),
        2 => (problem.schedule, problem.microbatches) = (Schedule::TwoBw, 4),
        3 => (problem.schedule, problem.objective) = (Schedule::Inference, Objective::Latency),
        _ => {}
    }
    problem
}

fn with(problem: &Problem, partitioner: Partitioner) -> Result<Planned, PlanError> {
    plan(problem, &PlannerOptions { partitioner, ..PlannerOptions::default() })
}

fn us(plan: &Plan) -> f64 {
    plan.predicted.minibatch_us
}

fn close(left: f64, right: f64) -> bool {
    (left - right).abs() <= 1e-9 * left.max(right)
}

#[test]
fn nothing_beats_exhaustive_and_the_planner_ties_it() {
    let (mut compared, mut tied) = (0, 0);
    for seed in 0..1000 {
        let mut random = Random(seed);
        let mut problem = random_problem(&mut random, if seed % 50 == 0 { 10 } else { 7 });
        if random.below(3) == 0 {
            problem.memory_limit = Some(Bytes(500_000 + random.below(6_000_000)));
        }
        let best = match with(&problem, Partitioner::Exhaustive) {
            Ok(best) => best.plan,
            Err(PlanError::Infeasible { smallest_limit, .. }) => {
                match with(&problem, Partitioner::Pipec) {
                    Err(PlanError::Infeasible { smallest_limit: ours, .. }) => {
                        assert_eq!(ours, smallest_limit, "seed {seed}");
                    }
                    other => panic!("seed {seed}: exhaustive finds nothing that fits, the planner {other:?}"),
                }
                continue;
            }
            Err(error) => panic!("seed {seed}: {error}"),
        };
        let ours = match with(&problem, Partitioner::Pipec) {
            Ok(ours) => ours.plan,
            Err(error) => panic!("seed {seed}: {error}"),
        };
        let limit = problem.memory_limit.map_or(u64::MAX, |limit| limit.0);
        assert!(ours.stages.iter().all(|stage| stage.memory.total <= limit), "seed {seed}");
        assert!(us(&ours) >= us(&best) * (1.0 - 1e-9), "seed {seed}: {} beats {}", us(&ours), us(&best));
        assert!(ours.lower_bound_us <= us(&best) * (1.0 + 1e-9), "seed {seed}: bound {}", ours.lower_bound_us);
        assert!(!ours.proven_optimal || close(us(&ours), us(&best)), "seed {seed}: {} {}", us(&ours), us(&best));
        compared += 1;
        tied += u32::from(close(us(&ours), us(&best)) && ours.proven_optimal);
    }
    println!("{tied} of {compared} tie the exhaustive search and prove it");
    assert!(compared > 700 && tied * 100 >= compared * 99, "{tied} of {compared}");
}

/// ZeRO 1 to 3 with tied weights, over all or two or three replicas, with and without optimizer state: the planner finds
/// a plan as good as exhaustive search within memory.
#[test]
fn shares_within_memory_tie_the_exhaustive_search() {
    let (mut compared, mut tied) = (0, 0);
    for seed in 0..400 {
        let mut random = Random(70_000 + seed);
        let mut problem = random_problem(&mut random, 6);
        if problem.schedule == Schedule::Inference {
            continue;
        }
        problem.zero = Zero { level: 1 + (seed % 3) as u32, degree: [0, 0, 2, 3][seed as usize / 3 % 4] };
        for (at, param) in problem.graph.params.iter_mut().enumerate() {
            let last = problem.graph.ops.len() as u32 - 1;
            if random.below(3) == 0 && (at as u32) < last {
                param.users = vec![OpId(at as u32), OpId(last)];
            }
        }
        problem.memory_limit = Some(Bytes(300_000 + random.below(3_000_000)));
        let best = with(&problem, Partitioner::Exhaustive);
        let ours = with(&problem, Partitioner::Pipec);
        let (best, ours) = match (best, ours) {
            (Ok(best), Ok(ours)) => (best.plan, ours.plan),
            (
                Err(PlanError::Infeasible { smallest_limit: exhaustive_limit, .. }),
                Err(PlanError::Infeasible { smallest_limit, .. }),
            ) => {
                assert_eq!(smallest_limit, exhaustive_limit, "seed {seed}");
                continue;
            }
            (best, ours) => panic!("seed {seed}: exhaustive {:?}, the planner {:?}", best.err(), ours.err()),
        };
        assert!(us(&ours) >= us(&best) * (1.0 - 1e-9), "seed {seed}: {} beats {}", us(&ours), us(&best));
        assert!(!ours.proven_optimal || close(us(&ours), us(&best)), "seed {seed}: {} {}", us(&ours), us(&best));
        compared += 1;
        if close(us(&ours), us(&best)) {
            tied += 1;
        } else {
            println!("seed {seed}: {} is slower than {}", us(&ours), us(&best));
            assert!(us(&ours) <= us(&best) * 1.01, "seed {seed}");
        }
    }
    println!("{tied} of {compared} tie the exhaustive search");
    assert!(compared > 150 && tied * 100 >= compared * 98, "{tied} of {compared}");
}

#[test]
fn the_least_limit_does_and_one_percent_less_does_not() {
    let mut infeasible = 0;
    for seed in 0..300 {
        let mut random = Random(5000 + seed);
        let mut problem = random_problem(&mut random, 7);
        problem.recompute = if seed % 2 == 0 { Recomputation::Auto } else { Recomputation::Never };
        problem.memory_limit = Some(Bytes(1 + random.below(3_000_000)));
        let Err(PlanError::Infeasible { limit, missing, smallest_limit, .. }) = with(&problem, Partitioner::Pipec)
        else {
            continue;
        };
        infeasible += 1;
        assert_eq!(smallest_limit, limit + missing, "seed {seed}");
        problem.memory_limit = Some(Bytes(smallest_limit));
        let outcome = with(&problem, Partitioner::Pipec).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        assert!(outcome.plan.stages.iter().all(|stage| stage.memory.total <= smallest_limit), "seed {seed}");
        problem.memory_limit = Some(Bytes((smallest_limit - 1).min(smallest_limit / 100 * 99)));
        for partitioner in [Partitioner::Pipec, Partitioner::Exhaustive] {
            let result = with(&problem, partitioner);
            assert!(matches!(result, Err(PlanError::Infeasible { .. })), "seed {seed}: {partitioner:?}");
        }
    }
    assert!(infeasible > 100, "{infeasible}");
}

#[test]
fn several_levels_are_searched_in_their_places() {
    let (mut compared, mut tied) = (0, 0);
    for seed in 0..120 {
        let mut random = Random(9000 + seed);
        let mut problem = random_problem(&mut random, 5);
        let spec = ["2:10GB/s,2:1GB/s", "3:2GB/s,2:0.5GB/s"][random.below(2) as usize];
        problem.cluster = levels(spec).unwrap();
        problem.cluster.levels[1].shared = random.below(2) == 0;
        let best = with(&problem, Partitioner::Exhaustive).unwrap().plan;
        let ours = with(&problem, Partitioner::Pipec).unwrap().plan;
        assert!(us(&ours) >= us(&best) * (1.0 - 1e-9), "seed {seed}: {} beats {}", us(&ours), us(&best));
        assert!(ours.lower_bound_us <= us(&best) * (1.0 + 1e-9), "seed {seed}");
        compared += 1;
        if close(us(&ours), us(&best)) {
            tied += 1;
        } else {
            println!("seed {seed}: {} is slower than {}", us(&ours), us(&best));
            assert!(us(&ours) <= us(&best) * 1.01, "seed {seed}");
        }
    }
    println!("{tied} of {compared} tie the exhaustive search");
    assert!(tied * 100 >= compared * 98, "{tied} of {compared}");
}

fn chain(ops: u32, fwd_us: f64, bytes: u64) -> CostGraph {
    let op = |id| OpCost {
        id,
        name: format!("op{id}"),
        module: format!("layers.{}.linear", id / 2),
        fwd_us,
        bwd_us: 2.0 * fwd_us,
        param_bytes: 1000,
        saved_bytes: 4 * bytes,
        out_bytes: bytes,
        ..OpCost::default()
    };
    let tensor = |at| TensorCost { name: format!("t{at}"), producer: OpId(at), bytes, consumers: vec![OpId(at + 1)] };
    let param = |at| ParamCost::new(format!("w{at}"), 1000, vec![OpId(at)]);
    CostGraph {
        ops: (0..ops).map(op).collect(),
        tensors: (0..ops - 1).map(tensor).collect(),
        params: (0..ops).map(param).collect(),
        ..CostGraph::default()
    }
}

fn simulated(plan: &Plan) -> f64 {
    let pipeline = pipeline(plan).unwrap();
    let count = StepCount { minibatches: 1, microbatches: plan.schedule.microbatches };
    let program = schedule(generated(plan.schedule.kind).unwrap(), &pipeline, count).unwrap();
    simulate(&program, &pipeline, &Machine::of(&pipeline)).unwrap().makespan
}

#[test]
fn flushes_take_what_simulation_says() {
    for (devices, m) in [(1, 1), (2, 4), (4, 8), (4, 32), (8, 16)] {
        for kind in [Schedule::Gpipe, Schedule::OneFOneB] {
            let cluster = levels(&format!("{devices}:1GB/s")).unwrap();
            // Messages of 10 us next to 3000 us of compute.
            let mut problem = Problem::new(chain(8, 1000.0, 10_000), cluster, CostModel::Pipec);
            (problem.schedule, problem.microbatches) = (kind, m);
            problem.constraints.no_replication = true;
            problem.constraints.most_stages = Some(devices);
            let plan = with(&problem, Partitioner::Pipec).unwrap().plan;
            let simulated_us = simulated(&plan);
            let error = (plan.predicted.step_us / simulated_us - 1.0).abs();
            let case = format!("{} on {devices}, {m} micro-batches", kind.name());
            assert!(error < 0.02, "{case}: planned {}, simulated {simulated_us}", plan.predicted.step_us);
            if m > 1 {
                assert_eq!(plan.stages.len(), devices as usize, "{case}");
            }
        }
    }
    // Data parallelism with a flush: micro-batches are divided equally.
    let mut problem = Problem::new(chain(8, 1000.0, 10_000), levels("4:1GB/s").unwrap(), CostModel::Pipec);
    (problem.schedule, problem.microbatches) = (Schedule::OneFOneB, 8);
    let plan = with(&problem, Partitioner::DataParallel).unwrap().plan;
    assert!((plan.predicted.step_us / simulated(&plan) - 1.0).abs() < 0.02);
}

#[test]
fn groups_that_shard_transfer_as_much_as_an_all_reduce() {
    // One op, so nothing overlaps: reduce-scatter and all-reduce of shards, then the all-gather within a node.
    let mut graph = chain(1, 1000.0, 1000);
    graph.ops[0].param_bytes = 100_000_000;
    graph.params.push(ParamCost::new("w".to_string(), 100_000_000, vec![OpId(0)]));
    let step_us = |zero: Zero| {
        let mut problem = Problem::new(graph.clone(), levels("2:10GB/s,2:1GB/s").unwrap(), CostModel::Pipec);
        (problem.schedule, problem.microbatches, problem.zero) = (Schedule::OneFOneB, 4, zero);
        problem.constraints.target = Some(Target::Torchtitan);
        problem.constraints.replicas = Some(vec![4]);
        let plan = with(&problem, Partitioner::Pipec).unwrap().plan;
        assert_eq!(plan.zero(), zero);
        simulated(&plan)
    };
    let all_reduced_us = step_us(Zero::default());
    assert!(all_reduced_us > 10.0 * 3000.0, "links bound the step");
    for degree in [0, 2] {
        let us = step_us(Zero { level: 1, degree });
        assert!((us / all_reduced_us - 1.0).abs() < 1e-6, "degree {degree}: {us} instead of {all_reduced_us}");
    }
}

#[test]
fn continuous_plans_reach_what_was_planned() {
    for (devices, bytes) in [(4, 10_000), (4, 2_000_000), (7, 500_000)] {
        let cluster = levels(&format!("{devices}:1GB/s")).unwrap();
        let problem = Problem::new(chain(8, 1000.0, bytes), cluster, CostModel::Pipec);
        let plan = with(&problem, Partitioner::Pipec).unwrap().plan;
        let caps: Vec<u32> = plan.schedule.in_flight.iter().map(|cap| cap + 4).collect();
        let pipeline = pipeline(&plan).unwrap().with_caps(&caps);
        let program = schedule(Schedule::OneFOneBRr, &pipeline, StepCount::minibatches(400)).unwrap();
        let rate = simulate(&program, &pipeline, &Machine::of(&pipeline)).unwrap().throughput();
        let (planned, simulated_us) = (us(&plan), 1e6 / rate);
        assert!(
            (planned / simulated_us - 1.0).abs() < 0.02,
            "{devices} devices, {bytes} bytes: {planned} and {simulated_us}"
        );
    }
}

#[test]
fn recompute_is_chosen_where_memory_binds() {
    let mut problem = Problem::new(chain(2, 1000.0, 100_000), levels("2:10GB/s").unwrap(), CostModel::Pipec);
    problem.constraints.replicas = Some(vec![1, 1]);
    let unlimited = with(&problem, Partitioner::Pipec).unwrap().plan;
    assert!(unlimited.stages.iter().all(|stage| !stage.recompute));
    let peak = unlimited.stages.iter().map(|stage| stage.memory.total).max().unwrap();
    problem.memory_limit = Some(Bytes(peak - 1));
    let limited = with(&problem, Partitioner::Pipec).unwrap().plan;
    let recomputed: Vec<&_> = limited.stages.iter().filter(|stage| stage.recompute).collect();
    assert!(!recomputed.is_empty() && us(&limited) > us(&unlimited), "{} {}", us(&limited), us(&unlimited));
    assert!(recomputed.iter().all(|stage| close(stage.bwd_us, 3.0 * stage.fwd_us)));
    problem.recompute = Recomputation::Never;
    assert!(matches!(with(&problem, Partitioner::Pipec), Err(PlanError::Infeasible { .. })));
}

#[test]
fn constraints_are_obeyed_or_refused() {
    let problem = || Problem::new(chain(8, 100.0, 10_000), levels("4:1GB/s").unwrap(), CostModel::Pipec);
    let replicas = |plan: &Plan| plan.stages.iter().map(|stage| stage.replicas).collect::<Vec<_>>();
    let stage_of = |plan: &Plan, op: u32| plan.stages.iter().position(|stage| stage.op_ids().any(|id| id == op));

    let mut unreplicated = problem();
    unreplicated.constraints.no_replication = true;
    assert_eq!(replicas(&with(&unreplicated, Partitioner::Pipec).unwrap().plan), [1, 1, 1, 1]);
    unreplicated.constraints.most_stages = Some(2);
    assert_eq!(replicas(&with(&unreplicated, Partitioner::Pipec).unwrap().plan), [1, 1]);

    let mut pinned = problem();
    pinned.constraints.pins = vec![("op0".into(), 0), ("op1".into(), 1), ("layers.3".into(), 2)];
    let plan = with(&pinned, Partitioner::Pipec).unwrap().plan;
    assert_eq!([0, 1, 6, 7].map(|op| stage_of(&plan, op)), [Some(0), Some(1), Some(2), Some(2)]);
    pinned.constraints.pins.push(("op0".into(), 1));
    assert!(with(&pinned, Partitioner::Pipec).unwrap_err().to_string().contains("in stage 0 and in stage 1"));
    pinned.constraints.pins = vec![("op7".into(), 0), ("op0".into(), 1)];
    assert!(with(&pinned, Partitioner::Pipec).unwrap_err().to_string().contains("all constraints"));
    pinned.constraints.pins = vec![("op0".into(), 9)];
    assert!(with(&pinned, Partitioner::Pipec).unwrap_err().to_string().contains("at most"));

    for target in Target::ALL {
        let mut targeted = problem();
        targeted.constraints.target = Some(target);
        (targeted.schedule, targeted.microbatches) = (Schedule::OneFOneB, 8);
        // Without constraints stages would be unequal: the last op takes as long as three.
        targeted.graph.ops[7].bwd_us = 700.0;
        let plan = with(&targeted, Partitioner::Pipec).unwrap().plan;
        assert!(plan.stages.windows(2).all(|pair| pair[0].replicas == pair[1].replicas), "{target:?}");
        if target.keeps_modules() {
            let ends = plan.stages.iter().map(|stage| stage.ops.last().unwrap().1);
            assert!(ends.into_iter().all(|end| end % 2 == 0), "{target:?}: {:?}", plan.stages);
        }
    }

    let mut serving = problem();
    (serving.schedule, serving.objective) = (Schedule::Inference, Objective::Latency);
    let plan = with(&serving, Partitioner::Pipec).unwrap().plan;
    assert_eq!((plan.stages.len(), us(&plan), plan.proven_optimal), (1, 800.0, true));
    serving.memory_limit = Some(Bytes(plan.stages[0].memory.total - 1));
    let plan = with(&serving, Partitioner::Pipec).unwrap().plan;
    assert_eq!((plan.stages.len(), us(&plan)), (2, 810.0));

    let mut paper = problem();
    paper.cost = CostModel::Paper;
    paper.constraints.no_replication = true;
    assert!(with(&paper, Partitioner::Pipec).unwrap_err().to_string().contains("requires cost `pipec`"));
}

#[test]
fn the_judge_finds_every_change() {
    let mut cluster = levels("2:10GB/s,2:1GB/s").unwrap();
    cluster.levels[1].shared = true;
    let mut problem = Problem::new(chain(8, 100.0, 900_000), cluster, CostModel::Pipec);
    problem.graph.params.iter_mut().for_each(|param| param.bytes = 100_000);
    problem.constraints.replicas = Some(vec![2, 1, 1]);
    let valid = with(&problem, Partitioner::Pipec).unwrap().plan;
    assert!(check(&problem, &valid).is_ok());
    type Change<'a> = (&'a str, &'a dyn Fn(&mut Plan));
    let changes: &[Change<'_>] = &[
        ("predicted.minibatch_us", &|plan| plan.predicted.minibatch_us *= 1.0 + 1e-6),
        ("predicted.minibatch_us", &|plan| {
            plan.stages[0].devices = vec![0, 2];
            plan.stages[1].devices = vec![1];
        }),
        ("memory of stage 0", &|plan| plan.stages[0].recompute = true),
        ("bwd_us of stage 1", &|plan| plan.stages[1].recompute = true),
        ("memory of stage 2", &|plan| plan.stages[2].memory.messages += 1),
    ];
    for (expected, change) in changes {
        let mut plan = valid.clone();
        change(&mut plan);
        let faults = check(&problem, &plan).expect_err(expected);
        let text = faults.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
        assert!(text.contains(expected), "{expected}: {text}");
    }
}

#[test]
fn the_least_memory_is_found() {
    for seed in 0..150 {
        let mut random = Random(12_000 + seed);
        let mut problem = random_problem(&mut random, 7);
        if problem.objective == Objective::Latency {
            continue;
        }
        problem.objective = Objective::Memory;
        problem.recompute = if seed % 2 == 0 { Recomputation::Auto } else { Recomputation::Never };
        let peak = |partitioner| {
            let plan = with(&problem, partitioner).unwrap().plan;
            plan.stages.iter().map(|stage| stage.memory.total).max()
        };
        assert_eq!(peak(Partitioner::Pipec), peak(Partitioner::Exhaustive), "seed {seed}");
    }
}

/// VGG-16 of the PipeDream paper on two servers of eight: fifteen replicas over both and one for the fully connected
/// layers.
#[test]
fn stages_span_servers() {
    let root = std::env::var("PIPEC_DATA")
        .unwrap_or_else(|_| concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared/data").into());
    let Ok(text) = std::fs::read_to_string(format!("{root}/partition/pipedream/profiles/vgg16.graph.txt")) else {
        return println!("skipped: no shared data");
    };
    let graph = pipedream::read(&text).unwrap();
    let mut cluster = levels("8:40GB/s,2:0.5GB/s").unwrap();
    cluster.levels[1].shared = true;
    let problem = Problem::new(graph, cluster, CostModel::Pipec);
    let plan = with(&problem, Partitioner::Pipec).unwrap().plan;
    let replicas: Vec<u32> = plan.stages.iter().map(|stage| stage.replicas).collect();
    assert_eq!(replicas, [15, 1]);
    assert!(us(&plan) < 46_000.0 && us(&plan) < plan.baselines.data_parallel / 1.5, "{}", us(&plan));
}
