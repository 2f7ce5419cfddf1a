//! Random planning problems with every setting: the result is a plan that the checker accepts and that respects its
//! bound, or a reason. `PIPEC_QUESTIONS` sets the number.

use crate::support::problems::{Random, random_graph};
#[allow(dead_code)] // Other tests use the rest.
use compiler::cluster::device::find;
use compiler::cluster::read::levels;
use compiler::cluster::{Bytes, DeviceClass};
use compiler::partition::error::PlanError;
use compiler::partition::options::PlannerOptions;
use compiler::partition::partitioners::Partitioner;
use compiler::partition::planner::plan;
use compiler::plan::check::figures::figures;
use compiler::plan::check::verify::check;
use compiler::plan::digest::{is_edited, to_json_with_digest};
use compiler::plan::problem::{CostModel, InFlight, Objective, Problem, Recomputation, Target};
use compiler::plan::read::from_json;
use compiler::plan::schedule::Schedule;
use compiler::plan::{Edge, Stage};
use compiler::profile::cost_graph::{OpId, ParamCost};
use compiler::schedule::pipeline::pipeline_of;
use compiler::simulate::check_plan::stated;
use compiler::simulate::one_f_one_b_rr::{Steady, steady};

const CLUSTERS: [&str; 8] = [
    "1:1GB/s",
    "2:1GB/s",
    "3:1GB/s",
    "4:0.2GB/s",
    "6:5GB/s",
    "2:10GB/s,2:1GB/s",
    "3:2GB/s,2:1GB/s",
    "2:10GB/s,2:1GB/s,2:0.5GB/s",
];

fn random_problem(seed: u64) -> (Problem, Partitioner) {
    let mut random = Random(seed);
    let one_in = |random: &mut Random, many: u64| random.below(many) == 0;
    let mut graph = random_graph(&mut random, 9);
    let last = graph.ops.len() as u32 - 1;
    for op in &mut graph.ops {
        op.workspace_bytes = random.below(100_000);
        op.unsaved = one_in(&mut random, 4);
        op.fwd_us *= random.below(8).min(1) as f64;
        op.module = format!("layers.{}", op.id / 2);
    }
    if one_in(&mut random, 4) && last > 0 {
        graph.params.push(ParamCost::new("tied", 500_000, vec![OpId(0), OpId(last)]));
    }
    let cost = [CostModel::Pipec, CostModel::Pipec, CostModel::Paper, CostModel::Pipedream][random.below(4) as usize];
    let mut cluster = levels(CLUSTERS[random.below(CLUSTERS.len() as u64) as usize]).unwrap();
    if one_in(&mut random, 3) {
        cluster.levels.iter_mut().for_each(|level| level.latency.0 = 20e-6);
    }
    let outermost = cluster.levels.len() - 1;
    cluster.levels[outermost].shared = one_in(&mut random, 4);
    if cost == CostModel::Pipec && one_in(&mut random, 4) {
        for _ in 0..cluster.devices() {
            let mut device = find("h100").unwrap().device();
            device.memory = Bytes([1 << 40, 6_000_000][random.below(2) as usize]);
            let speed = Some([1.0, 0.5, 0.3][random.below(3) as usize]);
            cluster.classes.push(DeviceClass { device, count: 1, speed });
        }
    }
    let mut problem = Problem::new(graph, cluster, cost);
    problem.activation_compression = one_in(&mut random, 2).then_some(1.0);
    problem.schedule = Schedule::ALL[random.below(Schedule::ALL.len() as u64) as usize];
    problem.chunks = if problem.schedule.has_chunks() { 2 } else { 1 };
    problem.microbatches = 1 + random.below(6) as u32;
    problem.micro_batch = 1 + random.below(3);
    problem.optimizer_state = random.below(3) as f64;
    problem.recompute = if one_in(&mut random, 2) { Recomputation::Auto } else { Recomputation::Never };
    let objectives = [Objective::Throughput, Objective::Throughput, Objective::Memory, Objective::Latency];
    problem.objective = objectives[random.below(4) as usize];
    problem.memory_limit = one_in(&mut random, 3).then(|| Bytes(300_000 + random.below(12_000_000)));
    problem.in_flight = match random.below(6) {
        0 => InFlight::Given((0..1 + random.below(3)).map(|_| 1 + random.below(4) as u32).collect()),
        1 => InFlight::Pipedream,
        _ => InFlight::Auto,
    };
    let constraints = &mut problem.constraints;
    if one_in(&mut random, 6) {
        constraints.replicas = Some((0..1 + random.below(3)).map(|_| 1 + random.below(2) as u32).collect());
    }
    if one_in(&mut random, 8) {
        constraints.cut_after = Some(vec![format!("op{}", random.below(u64::from(last) + 1))]);
    }
    if one_in(&mut random, 6) {
        constraints.pins.push((random.below(u64::from(last) + 1).to_string(), random.below(3) as u32));
    }
    constraints.most_stages = one_in(&mut random, 6).then(|| 1 + random.below(3) as u32);
    constraints.no_replication = one_in(&mut random, 6);
    if one_in(&mut random, 8) {
        constraints.target = Some(Target::ALL[random.below(4) as usize]);
    }
    let partitioner = match random.below(3) {
        0 => Partitioner::all().nth(random.below(Partitioner::all().count() as u64) as usize).unwrap(),
        _ => Partitioner::Pipec,
    };
    (problem, partitioner)
}

#[test]
fn every_answer_is_sound_or_a_reason() {
    let count = std::env::var("PIPEC_QUESTIONS").ok().and_then(|count| count.parse().ok()).unwrap_or(300);
    let (mut planned, mut infeasible, mut refused) = (0, 0, 0);
    for seed in 0..count {
        let (problem, partitioner) = random_problem(200_000 + seed);
        let efficiency = |stages: &[Stage], edges: &[Edge], caps: &[u32]| {
            let pipeline = pipeline_of(&problem.cluster.levels, stages, edges, caps).unwrap();
            steady(&pipeline).unwrap_or(Steady { share: 1.0, held: Vec::new(), pieces: 0 })
        };
        let budget = (seed % 5 == 0).then_some(6);
        let options =
            PlannerOptions { partitioner, budget, efficiency: Some(&efficiency), ..PlannerOptions::default() };
        let name = format!("seed {seed}, {partitioner:?}, {:?}, {:?}", problem.cost, problem.schedule);
        match plan(&problem, &options) {
            Ok(result) => {
                planned += 1;
                let plan = result.plan;
                let us = plan.predicted.minibatch_us;
                assert!(us.is_finite(), "{name}");
                assert!(plan.lower_bound_us <= us, "{name}: bound {} above {us}", plan.lower_bound_us);
                // A simulated time may be below the formula, to which the proof applies.
                let is_played = plan.predicted.objective_us.is_some();
                assert!(!plan.proven_optimal || is_played || plan.lower_bound_us == us, "{name}");
                check(&problem, &plan).unwrap_or_else(|faults| panic!("{name}: {faults:?}"));
                assert_eq!((figures(&plan), stated(&plan)), (Vec::new(), None), "{name}");
                let read =
                    from_json(&to_json_with_digest(&plan).unwrap()).unwrap_or_else(|error| panic!("{name}: {error}"));
                assert!(read.digest.is_some() && !is_edited(&read), "{name}");
                assert_eq!((read.schedule, read.edges), (plan.schedule, plan.edges), "{name}");
            }
            Err(PlanError::Infeasible { limit, missing, smallest_limit, .. }) => {
                infeasible += 1;
                assert!(missing > 0 && smallest_limit == limit.saturating_add(missing), "{name}");
            }
            Err(PlanError::DeviceMemory(shortage)) => {
                infeasible += 1;
                assert!(
                    shortage.missing > 0 && shortage.smallest == shortage.memory.saturating_add(shortage.missing),
                    "{name}"
                );
            }
            Err(PlanError::Problem(error)) => {
                refused += 1;
                assert!(!error.to_string().is_empty(), "{name}");
            }
            Err(error @ PlanError::Unsound(_)) => panic!("{name}: {error}"),
        }
    }
    println!("{planned} planned, {infeasible} infeasible, {refused} refused");
    assert!(planned * 4 > count && infeasible > 0 && refused > 0, "{planned}, {infeasible}, {refused} of {count}");
}
