//! Tensor-parallel plans: against exhaustive search on small models, through the checker, and in training.

use crate::support::problems::{Random, random_graph};
#[allow(dead_code)] // Other tests use the rest.
use assert_cmd::Command;
use compiler::cluster::read::levels;
use compiler::cluster::{BytesPerSecond, Seconds, device};
use compiler::graph::bind::{bind, symbols};
use compiler::graph::{Graph, order};
use compiler::import::import::{Options as Import, from_onnx};
use compiler::import::onnx::decode::parse;
use compiler::partition::options::PlannerOptions;
use compiler::partition::partitioners::Partitioner;
use compiler::partition::planner::plan;
use compiler::pass::analytic::{self, Subject};
use compiler::pass::attribution::{Training, attribute};
use compiler::pass::costs::{cost_graph, fill};
use compiler::pass::loss::Loss;
use compiler::plan::check::verify::{check, evaluate};
use compiler::plan::in_flight::{ScheduleFlow, published};
use compiler::plan::problem::{CostModel, Problem};
use compiler::plan::schedule::Schedule;
use compiler::plan::{LevelPlacement, Plan, Stage, StageId};
use compiler::profile::ProfiledModel;
use compiler::profile::cost_graph::CostGraph;
use compiler::profile::shared::ActivationSharding;
use compiler::profile::shared::TensorParallelCosts;
use compiler::schedule::semantics::StepCount;
use compiler::schedule::{Pipeline, StageSpec};
use compiler::tensor::dim::Bindings;
use compiler::tensor_parallel::cost::Machine;
use compiler::tensor_parallel::costs::shared_costs;
use models::zoo::{Options, build, to_bytes};
use runtime::train::prepare::{Settings, prepare_shared};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Tensor-parallel costs: each op gets faster, or not.
fn group_costs(graph: &CostGraph, devices: u32, random: &mut Random) -> TensorParallelCosts {
    let mut graph_costs = graph.clone();
    let mut collectives = Vec::new();
    for op in &mut graph_costs.ops {
        let speedup = 1.0 + (f64::from(devices) - 1.0) * random.below(5) as f64 / 4.0;
        let collective = random.below(30) as f64;
        (op.fwd_us, op.bwd_us) = (op.fwd_us / speedup + collective, op.bwd_us / speedup + collective);
        op.weight_grad_us = op.weight_grad_us.map(|us| us / speedup);
        op.saved_bytes /= 1 + random.below(u64::from(devices));
        collectives.push([collective; 2]);
    }
    for param in &mut graph_costs.params {
        param.bytes /= if random.below(3) > 0 { u64::from(devices) } else { 1 };
    }
    TensorParallelCosts { devices, graph: graph_costs, meetings: collectives, ..TensorParallelCosts::default() }
}

/// The minimum time over linear stage cuts, replica counts and degrees.
fn min_minibatch_us(problem: &Problem, template: &Plan) -> f64 {
    let ops = problem.graph.ops.len() as u32;
    let (devices, unit_size) = (problem.cluster.devices(), problem.cluster.levels[0].count);
    let mut best = f64::INFINITY;
    for degree in std::iter::once(1).chain(problem.shared.iter().map(|costs| costs.devices)) {
        if !unit_size.is_multiple_of(degree) {
            continue;
        }
        let (groups, offsets) =
            (devices / degree, if problem.cluster.levels.len() > 1 { unit_size / degree } else { 1 });
        for offset in 0..offsets {
            let mut stages = Vec::new();
            extend_stages(problem, template, [degree, groups, ops], [0, offset], &mut stages, &mut best);
        }
    }
    best
}

fn extend_stages(
    problem: &Problem,
    template: &Plan,
    [degree, groups, ops]: [u32; 3],
    [op, group]: [u32; 2],
    stages: &mut Vec<Stage>,
    best: &mut f64,
) {
    if op == ops {
        let mut plan = Plan { stages: stages.clone(), ..template.clone() };
        let (schedule, microbatches) = (problem.schedule, problem.microbatches);
        let flow = ScheduleFlow { schedule, microbatches, chunks: 1, workers: 0, room: 0 };
        let replicas: Vec<u32> = stages.iter().map(|stage| stage.replicas).collect();
        plan.schedule.in_flight = published(&flow, &replicas);
        plan.schedule.weight_versions = match problem.schedule {
            Schedule::OneFOneBRr => plan.schedule.in_flight.clone(),
            Schedule::TwoBw => vec![2; stages.len()],
            _ => vec![1; stages.len()],
        };
        *best = best.min(evaluate(problem, &plan).unwrap().minibatch_us);
        return;
    }
    for end in op + 1..=ops {
        for replicas in 1..=groups.saturating_sub(group) {
            let level_placement = template.stages[0].hierarchy[0];
            stages.push(Stage {
                id: StageId(stages.len() as u32),
                ops: vec![(op, end)],
                replicas,
                tensor_degree: Some(degree).filter(|degree| *degree > 1),
                devices: (group * degree..(group + replicas) * degree).collect(),
                recompute: false,
                hierarchy: vec![LevelPlacement { replicas, ..level_placement }],
                ..template.stages[0].clone()
            });
            extend_stages(problem, template, [degree, groups, ops], [end, group + replicas], stages, best);
            stages.pop();
        }
    }
}

#[test]
fn no_cuts_replicas_and_groups_are_better_than_the_plan() {
    let (mut group_count, mut single_count) = (0, 0);
    for seed in 0..60 {
        let mut random = Random(seed);
        // A chain, whose closed sets are its prefixes.
        let mut graph = CostGraph::default();
        for at in 0..2 + random.below(3) as u32 {
            let reads: Vec<u32> = at.checked_sub(1).into_iter().collect();
            let (us, bytes, weights) = (1.0 + random.below(90) as f64, random.below(40_000), random.below(200_000));
            crate::support::problems::add(&mut graph, "op", &reads, us, bytes, 1 + weights);
        }
        let spec = ["4:1GB/s", "2:10GB/s,2:1GB/s", "6:2GB/s", "4:20GB/s,2:2GB/s"][random.below(4) as usize];
        let mut problem = Problem::new(graph, levels(spec).unwrap(), CostModel::Pipec);
        let outermost = problem.cluster.levels.len() - 1;
        problem.cluster.levels[outermost].shared = random.below(3) == 0;
        problem.cluster.levels.iter_mut().for_each(|level| level.latency.0 = random.below(3) as f64 * 1e-6);
        (problem.schedule, problem.microbatches) =
            [(Schedule::OneFOneBRr, 1), (Schedule::OneFOneB, 4), (Schedule::TwoBw, 6)][random.below(3) as usize];
        problem.shared = [2, 4].map(|devices| group_costs(&problem.graph, devices, &mut random)).into();
        let options = PlannerOptions { partitioner: Partitioner::Exhaustive, ..PlannerOptions::default() };
        let exhaustive_plan = plan(&problem, &options).unwrap().plan;
        let best = min_minibatch_us(&problem, &exhaustive_plan);
        let message = format!("seed {seed}, {spec}, {:?}", problem.schedule);
        assert!(
            (exhaustive_plan.predicted.minibatch_us - best).abs() <= 1e-9 * best,
            "{message}: {:?}, least {best}",
            exhaustive_plan.predicted
        );
        assert!(exhaustive_plan.lower_bound_us <= best * (1.0 + 1e-9), "{message}");
        check(&problem, &exhaustive_plan).unwrap();
        match exhaustive_plan.stages[0].degree() {
            1 => single_count += 1,
            _ => group_count += 1,
        }
        let pipec_plan = plan(&problem, &PlannerOptions::default()).unwrap().plan;
        assert!(
            pipec_plan.predicted.minibatch_us <= best * (1.0 + 1e-9),
            "{message}: {:?}, least {best}",
            pipec_plan.predicted
        );
    }
    assert!(group_count > 5 && single_count > 5, "{group_count} plans of groups, {single_count} of single devices");
}

#[test]
fn random_models_on_random_levels_pass_their_judge() {
    for seed in 0..80 {
        let mut random = Random(1000 + seed);
        let graph = random_graph(&mut random, 9);
        let spec = ["8:1GB/s", "4:10GB/s,3:1GB/s", "2:10GB/s,2:1GB/s,2:0.5GB/s"][random.below(3) as usize];
        let mut problem = Problem::new(graph, levels(spec).unwrap(), CostModel::Pipec);
        let outermost = problem.cluster.levels.len() - 1;
        problem.cluster.levels[outermost].shared = random.below(2) == 0;
        problem.schedule =
            [Schedule::OneFOneB, Schedule::OneFOneBRr, Schedule::Interleaved, Schedule::ZbH1][random.below(4) as usize];
        problem.chunks = if problem.schedule.has_chunks() { 2 } else { 1 };
        problem.microbatches = if problem.schedule.is_round_robin() { 1 } else { 8 };
        problem.shared = [2, 4].map(|devices| group_costs(&problem.graph, devices, &mut random)).into();
        problem.constraints.tensor = true;
        problem.shared.remove(random.below(2) as usize);
        let Ok(planned) = plan(&problem, &PlannerOptions::default()) else { continue };
        assert_eq!(planned.plan.stages[0].tensor_degree, Some(problem.shared[0].devices), "seed {seed}");
        check(&problem, &planned.plan).unwrap();
        compiler::plan::check::consistency::sound(&planned.plan).unwrap();
        assert_eq!(compiler::plan::check::figures::figures(&planned.plan), vec![], "seed {seed}");
    }
}

/// A small GPT whose blocks benefit from tensor parallelism over this link.
fn gpt(layers: usize, batch: i64) -> Graph {
    let options = Options::default().number("layers", layers).number("hidden", 256).number("vocabulary", 512);
    let bytes = to_bytes(&build("gpt", &options.number("context", 32)).unwrap().model);
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let model = from_onnx(&parse(bytes.into(), Some(folder)).unwrap(), "gpt", &Import::default()).unwrap();
    let dims: Bindings = symbols(&model.graph).into_iter().map(|symbol| (symbol, batch)).collect();
    bind(&model.graph, &dims).unwrap()
}

fn group(devices: usize) -> Machine {
    let device = device::find("cpu").unwrap().device();
    Machine {
        device,
        devices,
        bandwidth: BytesPerSecond(100e9),
        latency: Seconds(1e-6),
        keeps_weights: false,
        activations: ActivationSharding::Replicated,
    }
}

const TRAINING: Training = Training::Loss(Loss::CrossEntropy, None);

fn costs(graph: &Graph, machine: &Machine) -> CostGraph {
    let attribution = attribute(graph, TRAINING).unwrap();
    let mut costs = cost_graph(graph, &attribution);
    let model = ProfiledModel { file: String::new(), sha256: String::new(), ops: 0 };
    let subject = Subject { model, micro_batch: 1, loss: None };
    fill(&mut costs, &analytic::profile(graph, &attribution, &machine.device, &subject), None).unwrap();
    costs
}

#[test]
fn blocks_that_are_alike_cost_the_same_and_less_than_alone() {
    let (graph, machine) = (gpt(5, 8), group(4));
    let single_costs = costs(&graph, &machine);
    let shared_costs_of_group = shared_costs(&graph, TRAINING, &single_costs, &machine).unwrap();
    shared_costs_of_group.graph.check().unwrap();
    let block_costs = |block: usize| -> Vec<_> {
        let name = format!("blocks.{block}.");
        let ops = shared_costs_of_group.graph.ops.iter().filter(|op| op.module.starts_with(&name));
        ops.map(|op| (op.fwd_us, op.bwd_us, op.weight_grad_us, op.saved_bytes, op.live, op.arriving_bytes)).collect()
    };
    assert!(block_costs(1).len() > 15);
    for block in 2..4 {
        assert_eq!(block_costs(1), block_costs(block), "block {block}");
    }
    let bytes = |costs: &CostGraph| costs.params.iter().map(|param| param.bytes).sum::<u64>();
    println!(
        "{} of {} us, {} of {} bytes",
        shared_costs_of_group.graph.total_us(),
        single_costs.total_us(),
        bytes(&shared_costs_of_group.graph),
        bytes(&single_costs)
    );
    assert!(shared_costs_of_group.graph.total_us() < 0.6 * single_costs.total_us());
    assert!(bytes(&shared_costs_of_group.graph) < bytes(&single_costs) / 2);
    for (op, single_op) in shared_costs_of_group.graph.ops.iter().zip(&single_costs.ops) {
        assert!(op.weight_grad_us.unwrap_or(0.0) <= op.bwd_us, "{}", op.name);
        assert_eq!((op.id, &op.name, op.out_bytes), (single_op.id, &single_op.name, single_op.out_bytes));
    }
    assert_eq!(shared_costs_of_group, shared_costs(&graph, TRAINING, &single_costs, &machine).unwrap());
}

#[test]
fn measured_times_are_scaled() {
    let (graph, machine) = (gpt(1, 8), group(2));
    let single_costs = costs(&graph, &machine);
    let mut slow = single_costs.clone();
    for op in &mut slow.ops {
        (op.fwd_us, op.bwd_us) = (2.0 * op.fwd_us, 2.0 * op.bwd_us);
        op.weight_grad_us = op.weight_grad_us.map(|us| 2.0 * us);
    }
    let group_costs_of = |single_costs: &CostGraph| shared_costs(&graph, TRAINING, single_costs, &machine).unwrap();
    let (fast, slow) = (group_costs_of(&single_costs), group_costs_of(&slow));
    for ((fast_op, slow_op), meetings) in fast.graph.ops.iter().zip(&slow.graph.ops).zip(&fast.meetings) {
        let [forward, backward] = *meetings;
        let is_doubled = |fast_op: f64, slow_op: f64, collective: f64| {
            (2.0 * (fast_op - collective) - (slow_op - collective)).abs() < 1e-5
        };
        assert!(
            is_doubled(fast_op.fwd_us, slow_op.fwd_us, forward) || fast_op.fwd_us == slow_op.fwd_us,
            "{}: {fast_op:?} {slow_op:?}",
            fast_op.name
        );
        assert!(
            is_doubled(fast_op.bwd_us, slow_op.bwd_us, backward) || fast_op.bwd_us == slow_op.bwd_us,
            "{}: {fast_op:?} {slow_op:?}",
            fast_op.name
        );
    }
}

/// Planned memory per device against that of the compiled stages.
#[test]
fn devices_hold_what_plans_say() {
    let (graph, machine) = (gpt(4, 8), group(2));
    let single_costs = costs(&graph, &machine);
    let mut problem = Problem::new(single_costs.clone(), levels("2:100GB/s,2:10GB/s").unwrap(), CostModel::Pipec);
    problem.shared = vec![shared_costs(&graph, TRAINING, &single_costs, &machine).unwrap()];
    problem.constraints.tensor = true;
    problem.constraints.replicas = Some(vec![1, 1]);
    (problem.schedule, problem.microbatches) = (Schedule::OneFOneB, 2);
    let plan = plan(&problem, &PlannerOptions::default()).unwrap().plan;
    let mut stages = vec![0; order::numbered(&graph).len()];
    for stage in &plan.stages {
        stage.op_ids().for_each(|op| stages[op as usize] = stage.id.index());
    }
    let count = StepCount { minibatches: 1, microbatches: 2 };
    let pipeline = Pipeline::chain(vec![StageSpec::new(1, 1.0, 2.0); 2]);
    let dims = BTreeMap::new();
    let settings = Settings::new(dims, Loss::CrossEntropy, Schedule::OneFOneB, count);
    let prepared = prepare_shared(&graph, &stages, pipeline, &settings, Some(&machine)).unwrap();
    for (at, (stage, code)) in plan.stages.iter().zip(&prepared.codes).enumerate() {
        let weights: usize = code.parameters.iter().map(|tensor| tensor.bytes).sum();
        let owned: usize = code.own_bytes.iter().sum();
        let feeds: usize = code.feeds.iter().map(|tensor| tensor.bytes).sum();
        let received: usize = code.received.iter().map(|transfer| transfer.address.bytes).sum();
        let kept = (code.kept_bytes + owned + feeds + received) as u64;
        let planned = stage.memory.activations / u64::from(plan.schedule.in_flight[at]);
        println!(
            "stage {at}: weights {weights} of {}, kept {kept} of {planned}, arena {} of {}",
            stage.memory.weights, code.arena_bytes, stage.memory.workspace
        );
        assert_eq!(weights as u64, stage.memory.weights, "stage {at}");
        // The compiler shards a stage as a whole, the planner shards its runs separately.
        let is_close = (kept as f64 - planned as f64).abs() <= 0.1 * planned as f64 + 8192.0;
        assert!(is_close, "stage {at}: {kept} kept, {planned} planned");
        let arena = code.arena_bytes as f64 / stage.memory.workspace as f64;
        assert!((0.5..1.1).contains(&arena), "stage {at}: an arena of {}", code.arena_bytes);
    }
}

fn run(folder: &Path, code: i32, arguments: &[&str]) -> String {
    let output = Command::cargo_bin("pipec").unwrap().current_dir(folder).args(arguments).output().unwrap();
    let message = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {message:?}");
    message.concat()
}

/// A model and its plan for two stages with tensor-parallel degree 2.
fn write_plan(folder: &Path) -> Value {
    write_plan_for("gpt", folder)
}

fn write_plan_for(name: &str, folder: &Path) -> Value {
    let model =
        ["zoo", name, "--hidden", "256", "--vocabulary", "512", "--context", "32", "--layers", "3", "-o", "m.onnx"];
    run(folder, 0, &model);
    let arguments =
        ["partition", "m.onnx", "--profile", "analytic:cpu", "--levels", "2:100GB/s,3:10GB/s", "--tensor", "2"];
    let flags = ["--stages", "2,1", "--micro-batch", "8", "--microbatches", "2", "--dtype", "f64", "-o", "p.json"];
    run(folder, 0, &[&arguments[..], &flags].concat());
    serde_json::from_str(&fs::read_to_string(folder.join("p.json")).unwrap()).unwrap()
}

#[test]
fn a_plan_of_groups_is_as_it_was() {
    let folder = tempfile::tempdir().unwrap();
    write_plan(folder.path());
    let message = run(folder.path(), 0, &["plan", "show", "p.json"]);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/groups/gpt.txt");
    if std::env::var_os("PIPEC_BLESS").is_some() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, &message).unwrap();
    }
    let expected = fs::read_to_string(&path).unwrap();
    assert_eq!(message, expected, "{} differs; PIPEC_BLESS=1 rewrites it", path.display());
}

#[test]
fn training_by_a_plan_of_groups_is_training_without() {
    compare_training("gpt");
}

#[test]
fn experts_on_groups_train_as_on_one_device() {
    compare_training("moe");
}

fn compare_training(name: &str) {
    let folder = tempfile::tempdir().unwrap();
    write_plan_for(name, folder.path());
    let losses = |flags: &[&str]| -> Vec<f64> {
        let train = ["train", "m.onnx", "--plan", "p.json", "--synthetic-data", "--steps", "4", "--metrics", "m.jsonl"];
        run(folder.path(), 0, &[&train[..], flags].concat());
        let lines = fs::read_to_string(folder.path().join("m.jsonl")).unwrap();
        lines.lines().filter_map(|line| serde_json::from_str::<Value>(line).unwrap()["loss"].as_f64()).collect()
    };
    let grouped = losses(&["--save", "shared.npz"]);
    let single = losses(&["--tensor", "1", "--save", "alone.npz"]);
    assert_eq!(grouped.len(), 4);
    for (grouped, single) in grouped.iter().zip(&single) {
        assert!((grouped - single).abs() <= 1e-6 * single.abs(), "{grouped}, alone {single}");
    }
    let read = |name: &str| runtime::data::weights::read(&folder.path().join(name)).unwrap();
    for (name, single) in read("alone.npz") {
        let grouped = read("shared.npz")[&name].to_f64();
        let max_error = grouped.iter().zip(single.to_f64()).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(max_error <= 1e-6, "{name}: {max_error:.1e}");
    }
}

type Mutation = (&'static str, fn(&mut Value));

#[test]
fn the_judge_refuses_other_groups() {
    let folder = tempfile::tempdir().unwrap();
    let plan = write_plan(folder.path());
    run(folder.path(), 0, &["plan", "check", "p.json", "--model", "m.onnx", "--profile", "analytic:cpu"]);
    let mutations: [Mutation; 8] = [
        ("another degree", |plan| plan["stages"][0]["tensor_degree"] = json!(4)),
        ("no degree", |plan| drop(plan["stages"][0].as_object_mut().unwrap().remove("tensor_degree"))),
        ("none anywhere", |plan| {
            for stage in plan["stages"].as_array_mut().unwrap() {
                stage["replicas"] = json!(2 * stage["replicas"].as_u64().unwrap());
                stage["hierarchy"][0]["replicas"] = stage["replicas"].clone();
                stage.as_object_mut().unwrap().remove("tensor_degree");
                stage.as_object_mut().unwrap().remove("tensor_parallel");
            }
        }),
        ("apart", |plan| plan["stages"][0]["devices"] = json!([0, 2, 1, 3])),
        ("across servers", |plan| {
            plan["stages"][0]["devices"] = json!([1, 2, 3, 4]);
            plan["stages"][1]["devices"] = json!([0, 5]);
        }),
        ("gains", |plan| plan["stages"][1]["tensor_parallel"]["unsharded_bwd_us"] = json!(1.0)),
        ("pains", |plan| plan["stages"][1]["tensor_parallel"]["collective_fwd_us"] = json!(0.5)),
        ("weights that are not split", |plan| {
            let memory = &mut plan["stages"][1]["memory"];
            let weights = memory["weights"].as_u64().unwrap();
            memory["weights"] = json!(2 * weights);
            memory["total"] = json!(memory["total"].as_u64().unwrap() + weights);
        }),
    ];
    for (change, mutate) in mutations {
        let mut changed = plan.clone();
        mutate(&mut changed);
        assert_ne!(changed, plan, "{change} changes nothing");
        fs::write(folder.path().join("q.json"), changed.to_string()).unwrap();
        let check_command = ["plan", "check", "q.json", "--model", "m.onnx", "--profile", "analytic:cpu"];
        let message = run(folder.path(), 1, &check_command);
        println!("{change}: {message}");
    }
}

/// Exports to frameworks with tensor parallelism carry the degree; other bundles reject it.
#[test]
fn exports_carry_the_degree() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let model =
        ["zoo", "gpt", "--hidden", "256", "--vocabulary", "512", "--context", "32", "--layers", "4", "-o", "m.onnx"];
    run(at, 0, &model);
    let arguments =
        ["partition", "m.onnx", "--profile", "analytic:cpu", "--levels", "2:100GB/s,4:10GB/s", "--tensor", "2"];
    let flags =
        ["--target", "megatron", "--stages", "2,2", "--micro-batch", "8", "--microbatches", "4", "-o", "p.json"];
    run(at, 0, &[&arguments[..], &flags].concat());
    run(at, 0, &["export", "p.json", "--to", "megatron", "-o", "m.args"]);
    let message = fs::read_to_string(at.join("m.args")).unwrap();
    assert!(message.contains("--tensor-model-parallel-size 2\n--pipeline-model-parallel-size 2\n"), "{message}");
    let plan = fs::read_to_string(at.join("p.json")).unwrap();
    let is_split = plan.contains("\"activations\": \"sequence\"");
    assert_eq!(message.contains("--sequence-parallel\n"), is_split, "{message}");
    run(at, 0, &["export", "p.json", "--to", "torchtitan", "-o", "t"]);
    let message = fs::read_to_string(at.join("t/torchtitan.toml")).unwrap();
    assert!(
        message.contains("tensor_parallel_degree = 2") && message.contains("data_parallel_replicate_degree = 2"),
        "{message}"
    );
    let message = run(at, 1, &["export", "p.json", "--to", "deepspeed", "-o", "d.json"]);
    assert!(message.contains("tensor-parallel degree 2") && message.contains("--tensor never"), "{message}");
}
