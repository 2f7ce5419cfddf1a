//! Limits of any plan: device memory, and the bandwidth of shared links. Random graphs on one to three levels, under
//! every cost model, schedule and objective.

use crate::support::problems::{Random, add, chain, parallel, transformer};
use compiler::cluster::Bytes;
use compiler::cluster::read::levels;
use compiler::import::pipedream;
use compiler::partition::error::PlanError;
use compiler::partition::options::PlannerOptions;
use compiler::partition::partitioners::Partitioner;
use compiler::partition::planned::Planned;
use compiler::partition::planner::plan;
use compiler::plan::check::error::PlanFault;
use compiler::plan::check::verify::check;
use compiler::plan::problem::{CostModel, InFlight, Objective, Problem, Recomputation};
use compiler::plan::schedule::Schedule;
use compiler::plan::zero::Zero;
use compiler::plan::{Edge, Plan, Stage};
use compiler::profile::arena::Live;
use compiler::profile::cost_graph::{CostGraph, OpId};
use compiler::profile::recompute_scope::RecomputeScope;
use compiler::schedule::action::{Phase, pending_weight_grads};
use compiler::schedule::generators::schedule;
use compiler::schedule::pipeline::{generated, pipeline, pipeline_of};
use compiler::schedule::published_caps as published;
use compiler::schedule::semantics::StepCount;
use compiler::schedule::{self, Instruction};
use compiler::simulate::one_f_one_b_rr::{Steady, steady};
use std::collections::BTreeMap;
use std::time::Instant;

const CLUSTERS: [&str; 7] = [
    "2:1GB/s",
    "3:1GB/s",
    "4:0.2GB/s",
    "2:10GB/s,2:1GB/s",
    "3:2GB/s,2:1GB/s",
    "2:10GB/s,2:1GB/s,2:0.5GB/s",
    "2:10GB/s,3:1GB/s",
];

const SCHEDULES: [Schedule; 6] = [
    Schedule::OneFOneBRr,
    Schedule::OneFOneBRrVsync,
    Schedule::Gpipe,
    Schedule::OneFOneB,
    Schedule::TwoBw,
    Schedule::Inference,
];

/// Up to eight ops in a chain, or ops that each read up to two earlier ones.
fn random_graph(random: &mut Random) -> CostGraph {
    let mut graph = CostGraph::default();
    let (is_chain, by_part) = (random.below(2) == 0, random.below(2) == 0);
    for id in 0..2 + random.below(7) {
        let mut reads: Vec<u32> = match is_chain {
            true => id.checked_sub(1).map(|previous| previous as u32).into_iter().collect(),
            false => (0..random.below(3).min(id)).map(|_| random.below(id) as u32).collect(),
        };
        reads.sort_unstable();
        reads.dedup();
        let weights = if random.below(3) == 0 { random.below(4_000_000) } else { random.below(20_000) };
        let op = add(&mut graph, "op", &reads, random.below(1000) as f64, random.below(400_000), weights);
        graph.ops[op as usize].workspace_bytes = random.below(100_000);
        (graph.ops[op as usize].batched_grad_bytes, graph.ops[op as usize].batched_grad_workspace_bytes) =
            (weights / 2, weights / 3);
        graph.ops[op as usize].saved_bytes = random.below(500_000);
        let live = Live::of((weights, [weights / 3, weights / 2]), (weights / 2, [weights / 4, weights / 4]));
        graph.ops[op as usize].live = live;
        graph.ops[op as usize].recompute = if by_part { RecomputeScope::Part(op / 3) } else { RecomputeScope::Stage };
    }
    graph
}

fn random_problem(seed: u64) -> Problem {
    let mut random = Random(seed);
    let cluster = levels(CLUSTERS[random.below(CLUSTERS.len() as u64) as usize]).unwrap();
    let cost = [CostModel::Paper, CostModel::Pipedream, CostModel::Pipec][random.below(3) as usize];
    let mut problem = Problem::new(random_graph(&mut random), cluster, cost);
    problem.activation_compression = (random.below(2) == 0).then_some(1.0);
    problem.optimizer_state = random.below(3) as f64;
    problem.schedule = SCHEDULES[random.below(SCHEDULES.len() as u64) as usize];
    problem.microbatches = if problem.schedule == Schedule::OneFOneBRr { 1 } else { 1 + random.below(6) as u32 };
    problem.recompute = if random.below(2) == 0 { Recomputation::Auto } else { Recomputation::Never };
    problem.objective = if random.below(3) == 0 { Objective::Memory } else { Objective::Throughput };
    problem.in_flight = InFlight::Auto;
    if problem.schedule.trains() && random.below(3) == 0 {
        problem.zero = Zero { level: 1 + random.below(3) as u32, degree: [0, 2, 3][random.below(3) as usize] };
    }
    problem
}

/// Plans like the command line, with simulated in-flight limits.
fn plan_with(problem: &Problem, partitioner: Partitioner) -> Result<Planned, PlanError> {
    let efficiency = |stages: &[Stage], edges: &[Edge], caps: &[u32]| {
        let pipeline = pipeline_of(&problem.cluster.levels, stages, edges, caps).unwrap();
        steady(&pipeline).unwrap_or(Steady { share: 1.0, held: Vec::new(), pieces: 0 })
    };
    plan(problem, &PlannerOptions { partitioner, efficiency: Some(&efficiency), ..PlannerOptions::default() })
}

fn peak(planned: &Planned) -> u64 {
    let mut bytes: BTreeMap<&[u32], u64> = BTreeMap::new();
    planned.plan.stages.iter().for_each(|stage| *bytes.entry(&stage.devices).or_default() += stage.memory.total);
    bytes.into_values().max().unwrap()
}

/// Plans. If infeasible, the reported memory limit must suffice, and 1 % less must not. Returns the reported limit.
fn check_limit(name: &str, problem: &Problem, partitioner: Partitioner) -> Option<u64> {
    let limit = problem.memory_limit.map_or(u64::MAX, |limit| limit.0);
    let plan_within = |limit: u64| {
        let mut problem = problem.clone();
        problem.memory_limit = Some(Bytes(limit));
        plan_with(&problem, partitioner).map(|planned| {
            assert!(peak(&planned) <= limit, "{name}: {} over {limit}", peak(&planned));
            assert!(check(&problem, &planned.plan).is_ok(), "{name}");
        })
    };
    match plan_within(limit) {
        Ok(()) => None,
        Err(PlanError::Infeasible { smallest_limit, missing, limit: reported_limit, stage, stages, .. }) => {
            assert_eq!((reported_limit, smallest_limit), (limit, limit + missing), "{name}");
            assert!(stage < stages, "{name}");
            assert_eq!(plan_within(smallest_limit), Ok(()), "{name}: {smallest_limit} is said to do");
            let smaller = smallest_limit - smallest_limit.div_ceil(100);
            assert!(
                matches!(plan_within(smaller), Err(PlanError::Infeasible { .. })),
                "{name}: {smaller} of {smallest_limit} does"
            );
            Some(smallest_limit)
        }
        Err(error) => panic!("{name}: {error}"),
    }
}

#[test]
fn no_plan_is_over_its_limit_and_the_least_limit_is_the_least() {
    let (mut planned, mut infeasible) = (0, 0);
    for seed in 0..160 {
        let mut problem = random_problem(80_000 + seed);
        let mut random = Random(seed);
        problem.memory_limit = Some(Bytes(200_000 + random.below(9_000_000)));
        let partitioner = if random.below(4) == 0 { Partitioner::Pipedream } else { Partitioner::Pipec };
        match check_limit(&format!("seed {seed}"), &problem, partitioner) {
            None => planned += 1,
            Some(_) => infeasible += 1,
        }
    }
    assert!(planned > 40 && infeasible > 40, "{planned} planned, {infeasible} refused");
}

/// The program's maximum in-flight counts match the plan.
fn check_in_flight(name: &str, plan: &Plan) {
    let kind = generated(plan.schedule.kind).unwrap();
    let minibatches = if kind.is_round_robin() { 12 } else { 2 };
    let count = StepCount { minibatches, microbatches: plan.schedule.microbatches };
    let program = schedule(kind, &pipeline(plan).unwrap(), count).unwrap();
    schedule::check::verify::check(&program).unwrap();
    for worker in &program.workers {
        let mut in_flight = vec![0u32; program.stages.len()];
        for (work, ..) in worker.instructions.iter().filter_map(Instruction::work) {
            let at = work.stage.index();
            in_flight[at] += u32::from(work.part == Phase::Forward);
            assert!(
                in_flight[at] <= plan.schedule.in_flight[at],
                "{name}: {in_flight:?} of {:?}",
                plan.schedule.in_flight
            );
            in_flight[at] -= u32::from(work.part.ends());
        }
    }
    assert_eq!(plan.schedule.pending_weight_grads.is_empty(), !plan.schedule.kind.splits_backward(), "{name}");
    for (pending, &planned) in pending_weight_grads(&program).into_iter().zip(&plan.schedule.pending_weight_grads) {
        assert!(pending <= planned, "{name}: {pending} pending, {planned} planned");
    }
}

#[test]
fn no_plan_of_any_schedule_is_over_its_limit() {
    let kinds = [
        Schedule::Gpipe,
        Schedule::OneFOneB,
        Schedule::ZbH1,
        Schedule::ZbH2,
        Schedule::Zbv,
        Schedule::Interleaved,
        Schedule::Bfs,
        Schedule::DualPipeV,
        Schedule::TwoBw,
        Schedule::OneFOneBRr,
    ];
    for kind in kinds {
        let (mut planned, mut infeasible) = (0, 0);
        for seed in 0..24 {
            let mut random = Random(7_000 + seed);
            let mut graph = random_graph(&mut random);
            for op in &mut graph.ops {
                (op.between_bytes, op.arriving_bytes) = (random.below(100_000), random.below(400_000));
            }
            let cluster = levels(CLUSTERS[random.below(5) as usize]).unwrap();
            let mut problem = Problem::new(graph, cluster, CostModel::Pipec);
            problem.schedule = kind;
            problem.chunks = if kind.has_chunks() { 2 } else { 1 };
            problem.microbatches = if kind == Schedule::OneFOneBRr { 1 } else { 1 + random.below(8) as u32 };
            problem.optimizer_state = (seed % 3) as f64;
            problem.recompute = if seed % 4 > 0 { Recomputation::Auto } else { Recomputation::Never };
            problem.constraints.no_replication = seed % 2 == 0;
            problem.in_flight = InFlight::Auto;
            let name = format!("{} of seed {seed}", kind.name());
            let unlimited = match plan_with(&problem, Partitioner::Pipec) {
                Ok(unlimited) => unlimited,
                // Too few ops for this many chunks.
                Err(PlanError::Problem(_)) if kind.has_chunks() => continue,
                Err(error) => panic!("{name}: {error}"),
            };
            check_in_flight(&name, &unlimited.plan);
            problem.memory_limit = Some(Bytes(peak(&unlimited) * (30 + random.below(80)) / 100));
            match check_limit(&name, &problem, Partitioner::Pipec) {
                None => {
                    planned += 1;
                    check_in_flight(&name, &plan_with(&problem, Partitioner::Pipec).unwrap().plan);
                }
                Some(_) => infeasible += 1,
            }
        }
        println!("{}: {planned} planned, {infeasible} refused", kind.name());
        assert!(planned > 2 && infeasible > 2, "{}: {planned} planned, {infeasible} refused", kind.name());
    }
}

#[test]
fn no_partition_of_a_small_graph_needs_less_than_the_least_limit() {
    let mut compared = 0;
    for seed in 0..90 {
        let mut problem = random_problem(90_000 + seed);
        // Exhaustive search is too slow beyond this size.
        if problem.cluster.devices() > 4 || problem.graph.ops.len() > 6 {
            continue;
        }
        problem.memory_limit = Some(Bytes(1000));
        // With vertical sync the versions of all stages follow the first; the published cost model's search only has a
        // bound for them.
        let is_known = problem.schedule != Schedule::OneFOneBRrVsync;
        if problem.cost != CostModel::Pipec && (!is_known || problem.cluster.levels.len() > 1) {
            continue;
        }
        let Some(smallest_limit) = check_limit(&format!("seed {seed}"), &problem, Partitioner::Pipec) else { continue };
        problem.memory_limit = Some(Bytes(smallest_limit - 1));
        match plan_with(&problem, Partitioner::Exhaustive) {
            Err(PlanError::Infeasible { .. }) => compared += 1,
            // More than exhaustive search supports.
            Err(PlanError::Problem(_)) => {}
            result => panic!("seed {seed}: less than {smallest_limit} does: {result:?}"),
        }
    }
    assert!(compared > 8, "{compared}");
}

#[test]
fn objective_memory_is_the_least_limit() {
    for seed in 0..60 {
        let mut problem = random_problem(95_000 + seed);
        problem.objective = Objective::Memory;
        let min_peak = peak(&plan_with(&problem, Partitioner::Pipec).unwrap());
        problem.memory_limit = Some(Bytes(min_peak));
        assert_eq!(plan_with(&problem, Partitioner::Pipec).map(|planned| peak(&planned)), Ok(min_peak), "seed {seed}");
        problem.memory_limit = Some(Bytes(min_peak - min_peak.div_ceil(100)));
        let result = plan_with(&problem, Partitioner::Pipec);
        assert!(matches!(result, Err(PlanError::Infeasible { .. })), "seed {seed}: less than {min_peak} does");
    }
}

#[test]
fn larger_graphs_with_replicas_and_recomputation_keep_their_word() {
    for (name, graph) in [("chain", chain(16)), ("branches", parallel(2, 5))] {
        for cluster in ["6:5GB/s", "4:10GB/s,4:1GB/s", "2:10GB/s,2:5GB/s,3:1GB/s"] {
            for cost in [CostModel::Paper, CostModel::Pipedream, CostModel::Pipec] {
                for (recompute, objective) in
                    [(Recomputation::Auto, Objective::Throughput), (Recomputation::Never, Objective::Memory)]
                {
                    let mut problem = Problem::new(graph.clone(), levels(cluster).unwrap(), cost);
                    problem.activation_compression = Some(1.0);
                    problem.optimizer_state = 2.0;
                    problem.in_flight = InFlight::Auto;
                    (problem.recompute, problem.objective) = (recompute, objective);
                    problem.memory_limit = Some(Bytes(3_000_000));
                    let name = format!("{name} on {cluster}, {cost:?}, {objective:?}");
                    assert!(check_limit(&name, &problem, Partitioner::Pipec).is_some(), "{name}");
                }
            }
        }
    }
}

/// Six stages; all others read a tensor of the first. The paper and PipeDream cost models count it once per cut.
fn fan_out_problem(cluster: &str, cost: CostModel) -> Problem {
    let mut graph = CostGraph::default();
    for id in 0..6u32 {
        let reads: Vec<u32> = if id > 1 { vec![0, id - 1] } else { (0..id).collect() };
        add(&mut graph, "op", &reads, 10.0, if id == 0 { 1_000_000 } else { 1000 }, 1000);
    }
    let mut problem = Problem::new(graph, levels(cluster).unwrap(), cost);
    problem.activation_compression = Some(1.0);
    problem.constraints.replicas = Some(vec![1; 6]);
    problem
}

#[test]
fn a_plan_that_overloads_the_link_of_a_server_is_refused() {
    for cost in [CostModel::Paper, CostModel::Pipedream] {
        let problem = fan_out_problem("2:40GB/s,3:1GB/s", cost);
        let plan = plan_with(&problem, Partitioner::Pipec).unwrap().plan;
        // The first server sends the large tensor four times and one small one, and receives the same.
        assert!((plan.predicted.minibatch_us - 4001.0).abs() < 1e-6, "{cost:?}: {:?}", plan.predicted);
        let link = plan.predicted.busiest_link.clone().unwrap();
        assert_eq!((link.level.as_str(), link.unit, link.bytes), ("level1", 0, 4_001_000));
        assert!((link.share - 1.0).abs() < 1e-9);
        assert_eq!(plan.predicted.bottleneck, "the link of unit 0 on level1");
        // The formula alone: twice the tensor over its own link.
        let mut optimistic = plan.clone();
        (optimistic.predicted.minibatch_us, optimistic.predicted.busiest_link) = (2001.0, None);
        let faults = check(&problem, &optimistic).unwrap_err();
        let is_link =
            |fault: &PlanFault| matches!(fault, PlanFault::Link { unit: 0, needed_us, .. } if *needed_us > 4000.0);
        assert!(faults.iter().any(is_link), "{faults:?}");
        let mut changed = plan.clone();
        changed.predicted.busiest_link.as_mut().unwrap().share = 0.5;
        assert!(check(&problem, &changed).unwrap_err()[0].to_string().contains("busiest_link"));
    }
}

#[test]
fn shared_levels_bind_plans_of_whole_servers_too() {
    let mut problem = fan_out_problem("2:40GB/s,3:1GB/s", CostModel::Paper);
    problem.constraints.replicas = None;
    let unshared_us = plan_with(&problem, Partitioner::Uniform).unwrap().plan.predicted.minibatch_us;
    problem.cluster.levels[1].shared = true;
    let plan = plan_with(&problem, Partitioner::Uniform).unwrap().plan;
    assert!(plan.predicted.minibatch_us > unshared_us * 1.5, "{} and {unshared_us}", plan.predicted.minibatch_us);
    assert!(plan.predicted.busiest_link.unwrap().share <= 1.0 + 1e-9);
}

#[test]
fn no_link_of_a_spanning_plan_carries_more_than_fits() {
    let mut link_bound = 0;
    for seed in 0..200 {
        let mut problem = random_problem(100_000 + seed);
        if problem.cluster.levels.len() == 1 || problem.cost == CostModel::Pipec {
            continue;
        }
        // Many readers of one tensor: it crosses a cut once but uses the link once per reader.
        let ops = problem.graph.ops.len() as u32;
        problem.graph.tensors[0].consumers = (1..ops).map(OpId).collect();
        (problem.graph.tensors[0].bytes, problem.graph.ops[0].out_bytes) = (2_000_000, 2_000_000);
        problem.objective = Objective::Throughput;
        problem.cluster.levels[1].shared = seed % 3 == 0;
        for partitioner in [Partitioner::Pipec, Partitioner::Uniform, Partitioner::Pipedream] {
            // The planner's own check fails if its byte count differs from the checker's.
            let plan = plan_with(&problem, partitioner).unwrap_or_else(|error| panic!("seed {seed}: {error}")).plan;
            let spans = plan.stages[0].hierarchy.len() < problem.cluster.levels.len();
            let is_bound = spans || problem.cluster.levels.iter().skip(1).all(|level| level.shared);
            let Some(link) = &plan.predicted.busiest_link else { continue };
            assert!(!is_bound || link.share <= 1.0 + 1e-9, "seed {seed}: {link:?}");
            link_bound += usize::from(plan.predicted.bottleneck.starts_with("the link"));
        }
    }
    println!("{link_bound} plans are as slow as a link of a server");
    assert!(link_bound > 0);
}

#[test]
fn stages_that_span_servers_share_their_links() {
    let root =
        std::env::var("PIPEC_DATA").unwrap_or_else(|_| concat!(env!("CARGO_MANIFEST_DIR"), "/../shared/data").into());
    for (name, milliseconds) in [("vgg16", 45.525), ("alexnet", 6.29)] {
        let path = format!("{root}/partition/pipedream/profiles/{name}.graph.txt");
        let Ok(text) = std::fs::read_to_string(path) else { return println!("skipped: no shared data") };
        let graph = pipedream::read(&text).unwrap();
        for cost in [CostModel::Pipedream, CostModel::Paper] {
            let mut problem = Problem::new(graph.clone(), levels("8:40GB/s,2:3.125GB/s").unwrap(), cost);
            problem.activation_compression = Some(1.0);
            let plan = plan_with(&problem, Partitioner::Pipec).unwrap().plan;
            let link = plan.predicted.busiest_link.clone().unwrap();
            println!("{name} {cost:?}: {} us, {link:?}", plan.predicted.minibatch_us);
            assert!(link.share < 0.5, "{name} {cost:?}: {link:?}");
            if cost == CostModel::Pipedream {
                assert!(plan.predicted.minibatch_us / 1e3 <= milliseconds + 0.01, "{name}");
            }
        }
    }
}

/// In-flight limits of many replicated stages, starting from the published ones.
#[test]
fn caps_of_a_hundred_devices_are_chosen_by_play() {
    for (cost, ratio) in [(CostModel::Paper, None), (CostModel::Pipedream, Some(1.0))] {
        let cluster = levels("8:450GB/s,16:50GB/s").unwrap();
        let mut problem = Problem::new(transformer(600, 2048, 4096), cluster, cost);
        problem.activation_compression = ratio;
        problem.in_flight = InFlight::Auto;
        let clock = Instant::now();
        let plan = plan_with(&problem, Partitioner::Pipec).unwrap().plan;
        println!(
            "{cost:?}: {:?}, {} stages, caps {:?}, {:?}",
            clock.elapsed(),
            plan.stages.len(),
            plan.schedule.in_flight,
            plan.warnings
        );
        assert!(plan.predicted.minibatch_us <= 1.03 * plan.lower_bound_us);
        let pipeline = |caps: &[u32]| pipeline_of(&problem.cluster.levels, &plan.stages, &plan.edges, caps).unwrap();
        let start = published(&plan.stages.iter().map(|stage| stage.replicas).collect::<Vec<_>>());
        let [before, after] = [&start, &plan.schedule.in_flight].map(|caps| steady(&pipeline(caps)).unwrap().share);
        assert!(after > before, "{cost:?}: {before} and {after}");
    }
}
