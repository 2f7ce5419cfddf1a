//! Bounds and searches held against everything: a thousand small graphs, large ones with a small gap, and the same graph in other
//! orders.

mod instances;

use compiler::cluster::read::levels;
use compiler::import::pipedream;
use compiler::partition::planner::{Partitioner, Planned, PlannerOptions, plan};
use compiler::plan::problem::{CostModel, Problem};
use compiler::plan::read::to_json;
use compiler::profile::cost_graph::{CostGraph, OpId};
use instances::{Random, chain, parallel, random_graph, transformer};
use std::time::Instant;

fn with(problem: &Problem, partitioner: Partitioner) -> Planned {
    plan(problem, &PlannerOptions { partitioner, ..PlannerOptions::default() }).unwrap()
}

fn us(planned: &Planned) -> f64 {
    planned.plan.predicted.minibatch_us
}

fn same(left: f64, right: f64) -> bool {
    (left - right).abs() <= 1e-9 * left.max(right)
}

fn random_problem(seed: u64, clusters: &[&str]) -> Problem {
    let mut random = Random(seed);
    let graph = random_graph(&mut random, 10);
    let cluster = levels(clusters[random.below(clusters.len() as u64) as usize]).unwrap();
    let cost = [CostModel::Paper, CostModel::Pipedream, CostModel::Pipec][seed as usize % 3];
    let mut problem = Problem::new(graph, cluster, cost);
    if random.below(2) == 0 {
        problem.activation_compression = Some(1.0);
    }
    problem
}

#[test]
fn a_thousand_small_graphs_are_bounded_and_planned_best() {
    let mut missed = Vec::new();
    for seed in 0..1000 {
        let problem = random_problem(50_000 + seed, &["2:1GB/s", "3:1GB/s", "4:0.2GB/s", "4:10GB/s"]);
        let best = us(&with(&problem, Partitioner::Exhaustive));
        let ours = with(&problem, Partitioner::Pipec);
        let bound = ours.plan.lower_bound_us;
        assert!(bound <= best * (1.0 + 1e-9), "seed {seed}: bound {bound} above the optimum {best}");
        assert!(us(&ours) >= best * (1.0 - 1e-9), "seed {seed}: {} beats everything, {best}", us(&ours));
        // The bound that needs no search at all.
        let single = with(&problem, Partitioner::Single).plan;
        assert!(single.lower_bound_us <= best * (1.0 + 1e-9), "seed {seed}: bound {} of {best}", single.lower_bound_us);
        if !same(us(&ours), best) {
            missed.push(seed);
        }
    }
    println!("{} of 1000 missed: {missed:?}", missed.len());
    assert!(missed.len() <= 10, "{missed:?}");
}

#[test]
fn plans_on_two_and_three_levels_are_bounded() {
    for seed in 0..120 {
        let mut problem = random_problem(60_000 + seed, &["2:10GB/s,2:1GB/s", "2:10GB/s,2:1GB/s,2:0.5GB/s"]);
        if problem.cost == CostModel::Pipec {
            problem.cost = CostModel::Paper;
        }
        let ours = with(&problem, Partitioner::Pipec);
        let whole_groups = us(&with(&problem, Partitioner::Exhaustive));
        let mut flat = problem.clone();
        flat.cluster = problem.cluster.flattened();
        let free = us(&with(&flat, Partitioner::Exhaustive));
        let best = whole_groups.min(free);
        assert!(same(us(&ours), best), "seed {seed}: {} of {best}", us(&ours));
        for partitioner in Partitioner::ALL {
            let bound = with(&problem, partitioner).plan.lower_bound_us;
            assert!(bound <= best * (1.0 + 1e-9), "seed {seed}: {partitioner:?} bound {bound} above {best}");
        }
        assert!(ours.plan.proven_optimal, "seed {seed}");
    }
}

#[test]
fn a_transformer_of_five_thousand_ops_on_a_thousand_devices() {
    for cost in [CostModel::Paper, CostModel::Pipec] {
        let cluster = levels("8:300GB/s,128:25GB/s").unwrap();
        let mut problem = Problem::new(transformer(5000, 2048, 4096), cluster, cost);
        problem.activation_compression = Some(1.0);
        let clock = Instant::now();
        let found = with(&problem, Partitioner::Pipec).plan;
        let gap = found.predicted.minibatch_us / found.lower_bound_us - 1.0;
        println!("{cost:?}: gap {gap:.4}, {:?}", clock.elapsed());
        assert!(gap <= 0.03, "{cost:?}: gap {gap}");
    }
}

#[test]
fn wide_networks_are_planned_near_their_bound() {
    let root =
        std::env::var("PIPEC_DATA").unwrap_or_else(|_| concat!(env!("CARGO_MANIFEST_DIR"), "/../shared/data").into());
    for (name, cluster) in [("nasnetamobile", "16:1.25GB/s"), ("inception_v3", "16:1.25GB/s")] {
        let path = format!("{root}/partition/pipedream/profiles/{name}.graph.txt");
        let Ok(text) = std::fs::read_to_string(path) else { return println!("skipped: no shared data") };
        let graph = pipedream::read(&text).unwrap();
        let mut problem = Problem::new(graph, levels(cluster).unwrap(), CostModel::Pipedream);
        problem.activation_compression = Some(1.0);
        let clock = Instant::now();
        let found = with(&problem, Partitioner::Pipec).plan;
        let gap = found.predicted.minibatch_us / found.lower_bound_us - 1.0;
        println!("{name} on {cluster}: gap {gap:.4}, {:?}, {:?}", found.search, clock.elapsed());
        assert!(gap <= 0.05, "{name} on {cluster}: gap {gap}");
    }
}

#[test]
fn bombs_are_planned_within_a_warning() {
    for (name, graph) in [("chain", chain(30_000)), ("parallel chains", parallel(24, 24))] {
        let mut problem = Problem::new(graph, levels("4:10GB/s,4:1GB/s").unwrap(), CostModel::Pipedream);
        problem.activation_compression = Some(1.0);
        let clock = Instant::now();
        let found = with(&problem, Partitioner::Pipec).plan;
        println!("{name}: {:?}, {:?}", clock.elapsed(), found.search);
        assert!(found.proven_optimal || found.warnings.iter().any(|warning| warning.contains("not complete")));
    }
}

/// The same graph with its ops numbered in another topological order.
fn shuffled(graph: &CostGraph, random: &mut Random) -> CostGraph {
    let ops = graph.ops.len();
    let mut waits = vec![0; ops];
    let edges = graph.edges();
    edges.iter().for_each(|(_, to)| waits[to.index()] += 1);
    let mut ready: Vec<usize> = (0..ops).filter(|&op| waits[op] == 0).collect();
    let mut place = vec![OpId(0); ops];
    let mut order = Vec::new();
    while !ready.is_empty() {
        let op = ready.swap_remove(random.below(ready.len() as u64) as usize);
        place[op] = OpId(order.len() as u32);
        order.push(op);
        for (_, to) in edges.iter().filter(|(from, _)| from.index() == op) {
            waits[to.index()] -= 1;
            if waits[to.index()] == 0 {
                ready.push(to.index());
            }
        }
    }
    let moved = |ids: &[OpId]| {
        let mut moved: Vec<OpId> = ids.iter().map(|id| place[id.index()]).collect();
        moved.sort_unstable();
        moved
    };
    let mut other = CostGraph::default();
    for (at, &op) in order.iter().enumerate() {
        let mut costs = graph.ops[op].clone();
        costs.id = at as u32;
        other.ops.push(costs);
        let tensor = &graph.tensors[op];
        let mut wire = tensor.clone();
        (wire.producer, wire.consumers) = (place[op], moved(&tensor.consumers));
        other.tensors.push(wire);
    }
    other.params = graph.params.clone();
    other.params.iter_mut().for_each(|param| param.users = moved(&param.users));
    other
}

#[test]
fn the_order_of_the_ops_in_a_file_changes_no_objective() {
    let mut random = Random(7);
    for (name, graph) in [("transformer", transformer(60, 256, 512)), ("parallel", parallel(5, 5))] {
        for cost in [CostModel::Paper, CostModel::Pipedream, CostModel::Pipec] {
            let mut problem = Problem::new(graph.clone(), levels("4:2GB/s,2:1GB/s").unwrap(), cost);
            problem.activation_compression = Some(1.0);
            let found = with(&problem, Partitioner::Pipec);
            assert_eq!(to_json(&found.plan).unwrap(), to_json(&with(&problem, Partitioner::Pipec).plan).unwrap());
            for _ in 0..6 {
                let mut other = problem.clone();
                other.graph = shuffled(&graph, &mut random);
                assert_eq!(other.graph.check(), Ok(()));
                let again = with(&other, Partitioner::Pipec);
                assert!(same(us(&again), us(&found)), "{name} {cost:?}: {} and {}", us(&again), us(&found));
            }
        }
    }
}
