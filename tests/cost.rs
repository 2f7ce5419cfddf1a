//! Cost model `pipec`: against the exhaustive search, within memory, against simulation, and under constraints.

use compiler::cluster::Bytes;
use compiler::cluster::read::levels;
use compiler::partition::planner::{Partitioner, PlanError, Planned, PlannerOptions, plan};
use compiler::plan::check::check;
use compiler::plan::problem::{CostModel, InFlight, Objective, Problem};
use compiler::plan::{Plan, ScheduleKind};
use compiler::profile::cost_graph::{CostGraph, OpCost, OpId, ParamCost, TensorCost};

/// A small generator of its own, so that a seed means the same graph for ever (splitmix64).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit
    }
}

/// A graph of 2 to `most` ops: tensors with several readers, tied parameters, ops that are not saved.
fn random_graph(random: &mut Random, most: u64) -> CostGraph {
    let ops = 2 + random.below(most - 1) as u32;
    let mut graph = CostGraph::default();
    for id in 0..ops {
        let weights = if random.below(3) == 0 { random.below(400_000) } else { random.below(20_000) };
        let out_bytes = random.below(400_000);
        graph.ops.push(OpCost {
            id,
            name: format!("op{id}"),
            module: format!("layers.{}", id / 2),
            fwd_us: random.below(1000) as f64,
            bwd_us: random.below(2000) as f64,
            param_bytes: weights,
            saved_bytes: random.below(500_000),
            workspace_bytes: random.below(100_000),
            live_bytes: random.below(100_000),
            unsaved: random.below(2) == 0,
            out_bytes,
            ..OpCost::default()
        });
        let mut users = vec![OpId(id)];
        if random.below(6) == 0 && id + 1 < ops {
            users.push(OpId(id + 1));
        }
        graph.params.push(ParamCost { name: format!("w{id}"), bytes: weights, users });
        let (name, producer) = (format!("t{id}"), OpId(id));
        graph.tensors.push(TensorCost { name, producer, bytes: out_bytes, consumers: Vec::new() });
    }
    let is_chain = random.below(2) == 0;
    for to in 1..ops {
        let extra = if is_chain { 0 } else { random.below(2) };
        let near = to - 1 - (random.below(3) as u32 * u32::from(!is_chain)).min(to - 1);
        let mut producers = vec![near];
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

fn random_problem(random: &mut Random, most: u64) -> Problem {
    let graph = random_graph(random, most);
    let mut cluster = levels(CLUSTERS[random.below(4) as usize]).unwrap();
    cluster.levels[0].latency.0 = random.below(30) as f64 * 1e-6;
    let mut problem = Problem::new(graph, cluster, CostModel::Pipec);
    problem.optimizer_state = random.below(3) as f64;
    problem.in_flight = InFlight::Pipedream;
    match random.below(6) {
        0 => (problem.schedule, problem.microbatches) = (ScheduleKind::OneFOneB, 1 + random.below(8) as u32),
        1 => (problem.schedule, problem.microbatches) = (ScheduleKind::Gpipe, 1 + random.below(8) as u32),
        2 => (problem.schedule, problem.microbatches) = (ScheduleKind::TwoBw, 4),
        3 => (problem.schedule, problem.objective) = (ScheduleKind::Inference, Objective::Latency),
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
