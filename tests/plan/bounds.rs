//! Lower bounds and searches, against exhaustive search on a thousand small graphs; the gap on large ones; independence
//! of op numbering.

use crate::support::problems::{Random, chain, parallel, random_graph, transformer};
use compiler::cluster::read::levels;
use compiler::import::onnx::proto::{ModelProto, NodeProto};
use compiler::import::pipedream;
use compiler::partition::options::PlannerOptions;
use compiler::partition::partitioners::Partitioner;
use compiler::partition::planned::Planned;
use compiler::partition::planner::plan;
use compiler::plan::problem::{CostModel, Problem};
use compiler::plan::read::to_json;
use compiler::profile::cost_graph::{CostGraph, OpId};
use prost::Message;
use std::time::Instant;

fn plan_with(problem: &Problem, partitioner: Partitioner) -> Planned {
    plan(problem, &PlannerOptions { partitioner, ..PlannerOptions::default() }).unwrap()
}

fn us(planned: &Planned) -> f64 {
    planned.plan.predicted.minibatch_us
}

fn are_equal(left: f64, right: f64) -> bool {
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
        let best_us = us(&plan_with(&problem, Partitioner::Exhaustive));
        let planned = plan_with(&problem, Partitioner::Pipec);
        let bound = planned.plan.lower_bound_us;
        assert!(bound <= best_us * (1.0 + 1e-9), "seed {seed}: bound {bound} above the optimum {best_us}");
        assert!(us(&planned) >= best_us * (1.0 - 1e-9), "seed {seed}: {} beats everything, {best_us}", us(&planned));
        // The bound without any search.
        let single = plan_with(&problem, Partitioner::Single).plan;
        assert!(
            single.lower_bound_us <= best_us * (1.0 + 1e-9),
            "seed {seed}: bound {} of {best_us}",
            single.lower_bound_us
        );
        if !are_equal(us(&planned), best_us) {
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
        let planned = plan_with(&problem, Partitioner::Pipec);
        let group_us = us(&plan_with(&problem, Partitioner::Exhaustive));
        let mut flat = problem.clone();
        flat.cluster = problem.cluster.flattened();
        let flat_us = us(&plan_with(&flat, Partitioner::Exhaustive));
        let best_us = group_us.min(flat_us);
        assert!(are_equal(us(&planned), best_us), "seed {seed}: {} of {best_us}", us(&planned));
        for partitioner in Partitioner::all() {
            let bound = plan_with(&problem, partitioner).plan.lower_bound_us;
            assert!(bound <= best_us * (1.0 + 1e-9), "seed {seed}: {partitioner:?} bound {bound} above {best_us}");
        }
        assert!(planned.plan.proven_optimal, "seed {seed}");
    }
}

#[test]
fn a_transformer_of_five_thousand_ops_on_a_thousand_devices() {
    for cost in [CostModel::Paper, CostModel::Pipec] {
        let cluster = levels("8:300GB/s,128:25GB/s").unwrap();
        let mut problem = Problem::new(transformer(5000, 2048, 4096), cluster, cost);
        problem.activation_compression = Some(1.0);
        let clock = Instant::now();
        let plan = plan_with(&problem, Partitioner::Pipec).plan;
        let gap = plan.predicted.minibatch_us / plan.lower_bound_us - 1.0;
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
        let plan = plan_with(&problem, Partitioner::Pipec).plan;
        let gap = plan.predicted.minibatch_us / plan.lower_bound_us - 1.0;
        println!("{name} on {cluster}: gap {gap:.4}, {:?}, {:?}", plan.search, clock.elapsed());
        assert!(gap <= 0.05, "{name} on {cluster}: gap {gap}");
    }
}

#[test]
fn bombs_are_planned_within_a_warning() {
    for (name, graph) in [("chain", chain(30_000)), ("parallel chains", parallel(24, 24))] {
        let mut problem = Problem::new(graph, levels("4:10GB/s,4:1GB/s").unwrap(), CostModel::Pipedream);
        problem.activation_compression = Some(1.0);
        let clock = Instant::now();
        let plan = plan_with(&problem, Partitioner::Pipec).plan;
        println!("{name}: {:?}, {:?}", clock.elapsed(), plan.search);
        assert!(
            plan.proven_optimal || plan.warnings.iter().any(|warning| warning.contains("the search is not exhaustive"))
        );
    }
}

fn shuffle_ops(graph: &CostGraph, random: &mut Random) -> CostGraph {
    let ops = graph.ops.len();
    let mut missing_inputs = vec![0; ops];
    let edges = graph.edges();
    edges.iter().for_each(|(_, to)| missing_inputs[to.index()] += 1);
    let mut ready: Vec<usize> = (0..ops).filter(|&op| missing_inputs[op] == 0).collect();
    let mut new_id = vec![OpId(0); ops];
    let mut order = Vec::new();
    while !ready.is_empty() {
        let op = ready.swap_remove(random.below(ready.len() as u64) as usize);
        new_id[op] = OpId(order.len() as u32);
        order.push(op);
        for (_, to) in edges.iter().filter(|(from, _)| from.index() == op) {
            missing_inputs[to.index()] -= 1;
            if missing_inputs[to.index()] == 0 {
                ready.push(to.index());
            }
        }
    }
    let renumber = |ids: &[OpId]| {
        let mut ids: Vec<OpId> = ids.iter().map(|id| new_id[id.index()]).collect();
        ids.sort_unstable();
        ids
    };
    let mut reordered = CostGraph::default();
    for (at, &op) in order.iter().enumerate() {
        let mut costs = graph.ops[op].clone();
        costs.id = at as u32;
        reordered.ops.push(costs);
        let tensor = &graph.tensors[op];
        let mut wire = tensor.clone();
        (wire.producer, wire.consumers) = (new_id[op], renumber(&tensor.consumers));
        reordered.tensors.push(wire);
    }
    reordered.params = graph.params.clone();
    reordered.params.iter_mut().for_each(|param| param.users = renumber(&param.users));
    reordered
}

#[test]
fn the_order_of_the_ops_in_a_file_changes_no_objective() {
    let mut random = Random(7);
    for (name, graph) in [("transformer", transformer(60, 256, 512)), ("parallel", parallel(5, 5))] {
        for cost in [CostModel::Paper, CostModel::Pipedream, CostModel::Pipec] {
            let mut problem = Problem::new(graph.clone(), levels("4:2GB/s,2:1GB/s").unwrap(), cost);
            problem.activation_compression = Some(1.0);
            let planned = plan_with(&problem, Partitioner::Pipec);
            assert_eq!(
                to_json(&planned.plan).unwrap(),
                to_json(&plan_with(&problem, Partitioner::Pipec).plan).unwrap()
            );
            for _ in 0..6 {
                let mut reordered = problem.clone();
                reordered.graph = shuffle_ops(&graph, &mut random);
                assert_eq!(reordered.graph.check(), Ok(()));
                let replanned = plan_with(&reordered, Partitioner::Pipec);
                assert!(
                    are_equal(us(&replanned), us(&planned)),
                    "{name} {cost:?}: {} and {}",
                    us(&replanned),
                    us(&planned)
                );
            }
        }
    }
}

fn profile(name: &str) -> Option<String> {
    let root =
        std::env::var("PIPEC_DATA").unwrap_or_else(|_| concat!(env!("CARGO_MANIFEST_DIR"), "/../shared/data").into());
    std::fs::read_to_string(format!("{root}/partition/pipedream/profiles/{name}.graph.txt")).ok()
}

fn shuffle_lines(text: &str, random: &mut Random) -> String {
    let mut lines: Vec<&str> = text.lines().collect();
    for at in (1..lines.len()).rev() {
        lines.swap(at, random.below(at as u64 + 1) as usize);
    }
    lines.join("\n") + "\n"
}

#[test]
fn the_order_of_the_lines_of_a_published_profile_changes_no_objective() {
    let mut random = Random(11);
    for name in ["vgg16", "gnmt", "resnet50"] {
        let Some(text) = profile(name) else { return println!("skipped: no shared data") };
        for cost in [CostModel::Paper, CostModel::Pipedream, CostModel::Pipec] {
            let minibatch_us = |text: &str| {
                let cluster = levels("4:1.25GB/s").unwrap();
                let mut problem = Problem::new(pipedream::read(text).unwrap(), cluster, cost);
                problem.activation_compression = Some(1.0);
                us(&plan_with(&problem, Partitioner::Pipec))
            };
            let (original, shuffled) = (minibatch_us(&text), minibatch_us(&shuffle_lines(&text, &mut random)));
            assert!(are_equal(original, shuffled), "{name} {cost:?}: {original} and {shuffled}");
        }
    }
}

#[test]
fn the_order_of_the_nodes_of_an_onnx_file_changes_neither_the_graph_nor_the_objective() {
    let folder = tempfile::tempdir().unwrap();
    let entry = models::zoo::ENTRIES.iter().find(|entry| entry.name == "unet").unwrap();
    let model = models::zoo::build(entry.name, &entry.small()).unwrap().model;
    let bytes = models::zoo::to_bytes(&model);
    let mut file = ModelProto::decode(bytes.as_slice()).unwrap();
    let mut random = Random(3);
    let mut results = Vec::new();
    for at in 0..4 {
        if at > 0 {
            let graph = file.graph.as_mut().unwrap();
            graph.node = reorder_nodes(std::mem::take(&mut graph.node), &mut random);
        }
        std::fs::write(folder.path().join("m.onnx"), file.encode_to_vec()).unwrap();
        let output = assert_cmd::Command::cargo_bin("pipec")
            .unwrap()
            .current_dir(folder.path())
            .args(["partition", "m.onnx", "--gpus", "4", "--profile", "analytic:h100", "--format", "json"])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let plan: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let us = plan["predicted"]["minibatch_us"].as_f64().unwrap();
        results.push((plan["model"]["graph_hash"].clone(), us));
    }
    assert!(results.iter().all(|(hash, us)| *hash == results[0].0 && are_equal(*us, results[0].1)), "{results:?}");
}

/// The nodes in another topological order.
fn reorder_nodes(nodes: Vec<NodeProto>, random: &mut Random) -> Vec<NodeProto> {
    let mut waiting = nodes;
    let mut available: Vec<String> = Vec::new();
    let node_outputs: Vec<String> = waiting.iter().flat_map(|node| node.output.clone()).collect();
    let mut order = Vec::new();
    while !waiting.is_empty() {
        let is_ready =
            |node: &NodeProto| node.input.iter().all(|name| !node_outputs.contains(name) || available.contains(name));
        let ready: Vec<usize> = (0..waiting.len()).filter(|&at| is_ready(&waiting[at])).collect();
        let node = waiting.remove(ready[random.below(ready.len() as u64) as usize]);
        available.extend(node.output.iter().cloned());
        order.push(node);
    }
    order
}

#[test]
fn plans_are_the_same_bytes_on_any_number_of_threads() {
    let mut problems: Vec<Problem> =
        (0..24).map(|seed| random_problem(130_000 + seed, &["3:1GB/s", "4:10GB/s", "2:10GB/s,2:1GB/s"])).collect();
    for name in ["vgg16", "gnmt"] {
        let Some(text) = profile(name) else { break };
        problems.push(Problem::new(pipedream::read(&text).unwrap(), levels("4:1.25GB/s").unwrap(), CostModel::Pipec));
    }
    let bytes = |problem: &Problem| to_json(&plan_with(problem, Partitioner::Pipec).plan).unwrap();
    let single_threaded: Vec<String> = problems.iter().map(bytes).collect();
    for threads in [2, 8] {
        let share = problems.len().div_ceil(threads);
        let multi_threaded: Vec<String> = std::thread::scope(|scope| {
            let workers: Vec<_> = problems
                .chunks(share)
                .map(|chunk| scope.spawn(move || chunk.iter().map(bytes).collect::<Vec<_>>()))
                .collect();
            workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
        });
        assert!(single_threaded == multi_threaded, "{threads} threads");
    }
}
