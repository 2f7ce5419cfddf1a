//! Recomputation of the first ops of every stage: bitwise equal weights, and peak memory as planned.

use compiler::cluster::device;
use compiler::cluster::read::levels;
use compiler::graph::bind::{bind, symbols};
use compiler::graph::{Graph, Output, order};
use compiler::import::import::{Options, Weight, load};
use compiler::op::Value;
use compiler::partition::options::PlannerOptions;
use compiler::partition::planner::plan;
use compiler::pass::analytic::{self, Subject};
use compiler::pass::attribution::{Training, attribute};
use compiler::pass::costs::{cost_graph, fill};
use compiler::pass::loss::Loss;
use compiler::plan::check::verify::evaluate;
use compiler::plan::problem::{CostModel, Problem};
use compiler::plan::schedule::Schedule;
use compiler::plan::{Plan, RecomputedOps, Stage};
use compiler::profile::ProfiledModel;
use compiler::profile::recompute_scope::RecomputeScope;
use compiler::schedule::pipeline::pipeline;
use compiler::schedule::semantics::StepCount;
use compiler::tensor::Tensor;
use compiler::tensor::dim::Bindings;
use models::zoo::{Options as Model, build, to_bytes};
use profiler::scratch::scratch;
use runtime::data::synthetic::synthetic;
use runtime::data::{Batches, Dataset, RowOrder};
use runtime::optim::optimizer::{Optimizer, Rule};
use runtime::optim::policy::Policy;
use runtime::stage::worker::Work;
use runtime::train::job::{TrainJob, Trained};
use runtime::train::prepare::{Settings, prepare};
use runtime::train::run::{feeds, train};
use std::collections::{BTreeMap, BTreeSet};

const STEPS: u32 = 2;
const MICROBATCHES: u32 = 8;

struct TestModel {
    graph: Graph,
    weights: BTreeMap<String, Tensor>,
    dims: Bindings,
    problem: Problem,
    item: usize,
}

fn build_test_model(name: &str, model: &Model, item: usize, devices: u32) -> TestModel {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    std::fs::write(&path, to_bytes(&build(name, model).unwrap().model)).unwrap();
    let mut model = load(&path, &Options::default()).unwrap();
    // Results other than the loss are not saved.
    let output = |node| Output { name: format!("{node:?}"), value: Value { node, output: 0 } };
    let ops = order::executed(&model.graph);
    let results = ops.into_iter().filter(|op| *op != model.graph.outputs[0].value.node).map(output);
    let results: Vec<Output> = results.collect();
    model.graph.outputs.extend(results);
    let dims: Bindings = symbols(&model.graph).into_iter().map(|symbol| (symbol, item as i64)).collect();
    let graph = bind(&model.graph, &dims).unwrap();
    let attribution = attribute(&graph, Training::Loss(Loss::CrossEntropy, None)).unwrap();
    let mut costs = cost_graph(&graph, &attribution);
    let profiled = ProfiledModel { file: String::new(), sha256: String::new(), ops: 0 };
    let subject = Subject { model: profiled, micro_batch: 1, loss: None };
    let cpu = device::find("cpu").unwrap().device();
    fill(&mut costs, &analytic::profile(&graph, &attribution, &cpu, &subject), None).unwrap();
    for (op, bytes) in costs.ops.iter_mut().zip(scratch(&attribution)) {
        op.workspace_bytes = bytes;
    }
    let weights = model.weights.into_iter().map(|(name, weight)| match weight {
        Weight::Given(tensor) => (name, tensor),
        Weight::Missing { path } => panic!("no weights at {path}"),
    });
    let weights = weights.collect();
    let mut problem = Problem::new(costs, levels(&format!("{devices}:100GB/s")).unwrap(), CostModel::Pipec);
    problem.cluster.device = cpu;
    (problem.microbatches, problem.optimizer_state) = (MICROBATCHES, 1.0);
    problem.set_target(None);
    TestModel { graph: model.graph, weights, dims, problem, item }
}

impl TestModel {
    /// The plan of a schedule in which every stage recomputes this fraction of its ops, with its peak memory by rank.
    fn plan(&self, schedule: Schedule, fraction: f64) -> (Plan, Vec<u64>) {
        let chunks = if schedule.has_chunks() { 2 } else { 1 };
        let mut problem = Problem { schedule, chunks, ..self.problem.clone() };
        let stages = problem.cluster.devices() * chunks;
        problem.constraints.replicas = Some(vec![1; stages as usize]);
        let mut recomputing_plan = plan(&problem, &PlannerOptions::default()).unwrap().plan;
        for stage in &mut recomputing_plan.stages {
            let op_count = stage.op_ids().count();
            let ids: Vec<u32> = stage.op_ids().collect();
            let scope = |at: usize| problem.graph.ops[ids[at] as usize].recompute;
            // Parts are recomputed whole.
            let ends_part = |end: &usize| *end == 0 || *end == op_count || scope(end - 1) != scope(*end);
            let ops = (op_count as f64 * fraction).round() as usize;
            let ops =
                (ops..=op_count).find(|end| scope(0) == RecomputeScope::Stage || ends_part(end)).unwrap_or(op_count);
            let us = |op: u32| problem.graph.ops[op as usize].fwd_us;
            let fwd_us = stage.op_ids().take(ops).map(us).sum();
            stage.recompute = ops > 0;
            stage.recomputed =
                (ops > 0 && ops < op_count).then_some(RecomputedOps { ops: ops as u32, layers: None, fwd_us });
            stage.bwd_us += stage.recompute_us();
        }
        // Each stage is recomputed by part if that takes less memory and its backward is not split.
        let at_once = evaluate(&problem, &recomputing_plan).unwrap().memory;
        let may = |stage: &Stage| stage.recompute && !schedule.splits_backward();
        recomputing_plan.stages.iter_mut().for_each(|stage| stage.memory.by_part = may(stage));
        let by_part = evaluate(&problem, &recomputing_plan).unwrap().memory;
        for (stage, (at_once, by_part)) in recomputing_plan.stages.iter_mut().zip(at_once.iter().zip(&by_part)) {
            stage.memory.by_part &= by_part.activations < at_once.activations;
        }
        let memory = evaluate(&problem, &recomputing_plan).unwrap().memory;
        recomputing_plan.stages.iter_mut().zip(&memory).for_each(|(stage, memory)| stage.memory = *memory);
        let ranks = problem.cluster.devices();
        let rank_bytes = |rank: u32| {
            recomputing_plan.stages.iter().filter(|stage| stage.devices == [rank]).map(|stage| stage.memory.total).sum()
        };
        let bytes_by_rank = (0..ranks).map(rank_bytes).collect();
        (recomputing_plan, bytes_by_rank)
    }

    /// Trains by a plan. Also returns the planned memory of each rank with the arenas of the compiled stages.
    fn train(&self, plan: &Plan) -> (Trained, Vec<u64>) {
        let mut stages = vec![0; self.problem.graph.ops.len()];
        for stage in &plan.stages {
            stage.op_ids().for_each(|op| stages[op as usize] = stage.id.index());
        }
        let count = StepCount { minibatches: STEPS, microbatches: MICROBATCHES };
        let (dims, schedule) = (self.dims.clone(), plan.schedule.kind);
        let settings = Settings::new(dims, Loss::CrossEntropy, schedule, count);
        let prepared = prepare(&self.graph, &stages, pipeline(plan).unwrap(), &settings).unwrap();
        let batch = self.item * MICROBATCHES as usize;
        let feeds = feeds(&prepared.codes);
        let arrays = synthetic(&prepared.graph, &feeds, self.item, batch * STEPS as usize, 3);
        let data = Dataset::new(arrays, &feeds, self.item).unwrap();
        let batches = Batches::new(data, batch, MICROBATCHES as usize, STEPS as usize, RowOrder::InOrder).unwrap();
        let training = TrainJob {
            codes: &prepared.codes,
            program: &prepared.program,
            weights: &self.weights,
            batches: &batches,
            optimizer: &Optimizer::from(Rule::Sgd {
                learning_rate: 0.05,
                momentum: 0.9,
                nesterov: false,
                weight_decay: 0.0,
            }),
            policy: Policy::default(),
            keep_gradients: false,
        };
        let trained = train(&training, &mut |_| {}).unwrap();
        let mut bytes_with_arena = vec![0; trained.peak_memory_bytes.len()];
        for (stage, code) in plan.stages.iter().zip(&prepared.codes) {
            bytes_with_arena[stage.devices[0] as usize] +=
                stage.memory.total - stage.memory.workspace + code.arena_bytes as u64;
        }
        (trained, bytes_with_arena)
    }
}

fn check_recomputation(name: &str, test_model: &TestModel) {
    for schedule in [Schedule::OneFOneB, Schedule::ZbH1, Schedule::Interleaved] {
        let (plain, planned_bytes) = test_model.plan(schedule, 0.0);
        let (baseline, _) = test_model.train(&plain);
        let mut totals = vec![planned_bytes.iter().sum::<u64>()];
        for fraction in [0.3, 0.7, 1.0] {
            let (plan, planned_bytes) = test_model.plan(schedule, fraction);
            let (mut trained, bytes_with_arena) = test_model.train(&plan);
            if schedule.has_chunks() {
                // Whether the chunks of a rank are fullest at the same time depends on the progress of the threads.
                for _ in 0..3 {
                    let peaks = test_model.train(&plan).0.peak_memory_bytes;
                    trained
                        .peak_memory_bytes
                        .iter_mut()
                        .zip(peaks)
                        .for_each(|(max_bytes, peak_bytes)| *max_bytes = peak_bytes.max(*max_bytes));
                }
            }
            assert_eq!(trained.losses, baseline.losses, "{name} {schedule} {fraction}");
            assert_eq!(trained.weights.len(), baseline.weights.len());
            for (key, weight) in &baseline.weights {
                assert_eq!(trained.weights[key].bytes(), weight.bytes(), "{key} of {name} {schedule} {fraction}");
            }
            let spans = trained.spans.iter().flatten();
            let recomputed: BTreeSet<_> = spans
                .filter(|span| matches!(span.work, Work::Recompute(..)))
                .map(|span| {
                    let Work::Recompute(stage, item) = span.work else { unreachable!() };
                    (stage, item)
                })
                .collect();
            // By part, the backward recomputes.
            let at_once = plan.stages.iter().filter(|stage| !stage.memory.by_part).count();
            assert_eq!(recomputed.len(), at_once * (STEPS * MICROBATCHES) as usize, "{name} {schedule} {fraction}");
            for (rank, ((peak_bytes, bytes_with_arena), planned_bytes)) in
                trained.peak_memory_bytes.iter().zip(&bytes_with_arena).zip(&planned_bytes).enumerate()
            {
                let message = format!(
                    "{name} {schedule} {fraction}: rank {rank} holds {peak_bytes} B of {planned_bytes} planned"
                );
                println!(
                    "{message}, {bytes_with_arena} with its arena: {:.3}",
                    *peak_bytes as f64 / *bytes_with_arena as f64
                );
                // The chunks of a rank need not be fullest at the same time.
                let least = bytes_with_arena / 100 * if schedule.has_chunks() { 85 } else { 97 };
                let most = if schedule.has_chunks() { *planned_bytes } else { bytes_with_arena / 100 * 101 };
                // While a part is recomputed, its ops need less than the largest arena.
                let by_part = plan.stages.iter().any(|stage| stage.memory.by_part);
                let expected =
                    if by_part { planned_bytes / 100 * 80..=planned_bytes / 100 * 101 } else { least..=most };
                assert!(expected.contains(peak_bytes), "{message}, {bytes_with_arena} with its arena");
            }
            totals.push(planned_bytes.iter().sum());
        }
        println!("{name} {schedule}: {totals:?}");
        // Two fractions may end with the same part.
        let is_falling = totals.windows(2).all(|pair| pair[1] <= pair[0]);
        assert!(is_falling && totals[1] < totals[0], "{name} {schedule}: {totals:?}");
    }
}

#[test]
fn first_layers_of_an_mlp_are_recomputed() {
    let model = Model::default().number("hidden", 64).number("layers", 16);
    check_recomputation("mlp", &build_test_model("mlp", &model, 256, 2));
}

#[test]
fn dropout_has_the_same_masks_when_recomputed() {
    // Six layers per stage: memory that grows with their number would show.
    let model = Model::default().number("layers", 12);
    check_recomputation("gpt", &build_test_model("gpt", &model, 8, 2));
}

#[test]
fn experts_are_recomputed() {
    check_recomputation("moe", &build_test_model("moe", &Model::default().number("layers", 6), 8, 2));
}

#[test]
fn running_statistics_are_updated_once() {
    check_recomputation("residual-cnn", &build_test_model("residual-cnn", &Model::default(), 32, 2));
}
