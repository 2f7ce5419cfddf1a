//! Tensor parallelism, ZeRO, replicas and stages combined on up to eight workers: losses match PyTorch in double
//! precision, and peak memory matches the plan. Needs the shared data.

use crate::support::shared::{arrays, data};
use compiler::cluster::read::levels;
use compiler::cluster::{BytesPerSecond, Seconds, device};
use compiler::graph::Graph;
use compiler::graph::bind::bind;
use compiler::import::import::{Batch, Model, Options, Weight, load};
use compiler::partition::options::PlannerOptions;
use compiler::partition::planner::plan;
use compiler::pass::analytic::{self, Subject};
use compiler::pass::attribution::{Training as Trains, attribute};
use compiler::pass::costs::{cost_graph, fill};
use compiler::pass::loss::Loss;
use compiler::plan::Plan;
use compiler::plan::problem::{CostModel, Problem, Recomputation};
use compiler::plan::schedule::Schedule;
use compiler::plan::zero::MOST;
use compiler::profile::ProfiledModel;
use compiler::profile::cost_graph::CostGraph;
use compiler::profile::shared::ActivationSharding;
use compiler::schedule::pipeline::pipeline;
use compiler::schedule::semantics::StepCount;
use compiler::tensor::Tensor;
use compiler::tensor_parallel::cost::Machine;
use compiler::tensor_parallel::costs::shared_costs;
use profiler::scratch::scratch;
use runtime::data::{Batches, Dataset, RowOrder};
use runtime::device::cpu::device::cpu;
use runtime::device::cpu::matmul::has_panels;
use runtime::optim::optimizer::{Optimizer, Rule};
use runtime::optim::policy::Policy;
use runtime::train::job::{TrainJob, Trained};
use runtime::train::prepare::{Settings, prepare};
use runtime::train::run::{feeds, train};
use runtime::train::tensor_parallel::{prepare_shared, train_tensor_parallel};
use std::collections::BTreeMap;
use std::path::Path;

const STEPS: u32 = 10;
const MICROBATCHES: u32 = 4;
const WORKERS: u32 = 8;
const TRAINS: Trains = Trains::Loss(Loss::CrossEntropy, None);

/// `[steps, batch, …]` as `[steps·batch, …]`.
fn rows(t: &Tensor) -> Tensor {
    let mut shape = vec![t.shape()[0] * t.shape()[1]];
    shape.extend(&t.shape()[2..]);
    t.reshaped(shape).unwrap()
}

struct Set {
    model: Model,
    /// The model at micro-batch size, and its costs.
    graph: Graph,
    costs: CostGraph,
    arrays: BTreeMap<String, Tensor>,
    weights: BTreeMap<String, Tensor>,
    batch: usize,
    microbatches: u32,
    dims: BTreeMap<String, i64>,
    optimizer: Optimizer,
    order: (Schedule, Schedule),
    want: Vec<f64>,
}

fn group(devices: u32) -> Machine {
    let device = device::find("cpu").unwrap().device();
    Machine {
        device,
        devices: devices as usize,
        bandwidth: BytesPerSecond(100e9),
        latency: Seconds(1e-6),
        keeps_weights: false,
        activations: ActivationSharding::Replicated,
    }
}

/// A parity model; `microbatches` splits its minibatches.
fn set(root: &Path, name: &str, microbatches: u32) -> Set {
    let folder = root.join(name);
    let model = load(&folder.join("model.onnx"), &Options::default()).unwrap();
    let inputs = arrays(&folder.join("inputs.npz"));
    let batch = inputs["x"].shape()[1];
    let mut all: BTreeMap<String, Tensor> = inputs.iter().map(|(k, v)| (k.clone(), rows(v))).collect();
    all.insert("target".into(), rows(&arrays(&folder.join("targets.npz"))["target"]));
    let meta: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(folder.join("meta.json")).unwrap()).unwrap();
    let learning_rate = meta["lr"].as_f64().unwrap_or(0.05) / 5.0;
    let rule = Rule::Sgd { learning_rate, momentum: 0.9, nesterov: false, weight_decay: 0.0 };
    let Batch::Symbol { name: symbol, .. } = &model.batch else { panic!("the batch is fixed: {:?}", model.batch) };
    let dims = BTreeMap::from([(symbol.clone(), (batch / microbatches as usize) as i64)]);
    let graph = bind(&model.graph, &dims).unwrap();
    let attribution = attribute(&graph, TRAINS).unwrap();
    let mut costs = cost_graph(&graph, &attribution);
    let known = ProfiledModel { file: String::new(), sha256: String::new(), ops: 0 };
    let subject = Subject { model: known, micro_batch: 1, loss: None };
    fill(&mut costs, &analytic::profile(&graph, &attribution, &group(1).device, &subject), None).unwrap();
    // Kernel scratch, which the analytic profile does not contain.
    for (op, bytes) in costs.ops.iter_mut().zip(scratch(&attribution)) {
        op.workspace_bytes = bytes;
    }
    let weights = model.weights.iter().map(|(name, weight)| match weight {
        Weight::Given(tensor) => (name.clone(), tensor.clone()),
        Weight::Missing { path } => panic!("no weights at {path}"),
    });
    let weights = weights.collect();
    let want = arrays(&folder.join("expected.npz"))["loss64_sgd_m09_micro4"].to_f64();
    let (optimizer, order) = (Optimizer::from(rule), (Schedule::OneFOneB, Schedule::OneFOneB));
    Set { model, graph, costs, arrays: all, weights, batch, microbatches, dims, optimizer, order, want }
}

/// Tensor-parallel degree, ZeRO level, replicas and stages.
#[derive(Clone, Copy, Debug)]
struct Combination {
    degree: u32,
    zero: u32,
    replicas: u32,
    stages: u32,
}

fn combinations() -> Vec<Combination> {
    let mut all = Vec::new();
    for degree in [1, 2, 4] {
        for replicas in [1, 2, 4] {
            for stages in [1, 2].into_iter().filter(|stages| degree * replicas * stages <= WORKERS) {
                let most = if replicas > 1 { MOST } else { 0 };
                all.extend((0..=most).map(|zero| Combination { degree, zero, replicas, stages }));
            }
        }
    }
    all
}

impl Set {
    fn plan(&self, of: Combination) -> Option<Plan> {
        let levels = levels(&format!("{}:100GB/s", of.degree * of.replicas * of.stages)).unwrap();
        let mut problem = Problem::new(self.costs.clone(), levels, CostModel::Pipec);
        problem.cluster.device = group(1).device;
        (problem.schedule, problem.microbatches) = (self.order.0, self.microbatches);
        (problem.zero, problem.optimizer_state) = (of.zero, 1.0);
        problem.recompute = Recomputation::Never;
        problem.constraints.replicas = Some(vec![of.replicas; of.stages as usize]);
        if of.degree > 1 {
            problem.shared = vec![shared_costs(&self.graph, TRAINS, &self.costs, &group(of.degree)).unwrap()];
            problem.constraints.tensor = true;
        }
        match plan(&problem, &PlannerOptions::default()) {
            Ok(planned) => Some(planned.plan),
            // Tensors must be unsharded at every cut, which is not possible everywhere.
            Err(error) if of.degree > 1 && error.to_string().contains("stages are requested") => None,
            Err(error) => panic!("{of:?}: {error}"),
        }
    }

    /// Gradient bytes of parameters with several users.
    fn tied(&self) -> u64 {
        let tied = self.costs.params.iter().filter(|param| param.users.len() > 1);
        tied.map(|param| param.sum_bytes).sum()
    }

    /// Trains ten steps by a plan; also returns the arena sizes of its stages.
    fn trained(&self, plan: &Plan) -> (Trained, Vec<u64>) {
        let mut stages = vec![0; self.costs.ops.len()];
        for stage in &plan.stages {
            stage.op_ids().for_each(|op| stages[op as usize] = stage.id.index());
        }
        let count = StepCount { minibatches: STEPS, microbatches: self.microbatches };
        let (dims, schedule) = (self.dims.clone(), self.order.1);
        let settings = Settings { dims, loss: Loss::CrossEntropy, class_axis: None, schedule, count };
        let (degree, pipeline) = (plan.stages[0].degree(), pipeline(plan).unwrap());
        let (prepared, layouts) = match degree {
            1 => (prepare(&self.model.graph, &stages, pipeline, &settings).unwrap(), BTreeMap::new()),
            _ => prepare_shared(&self.model.graph, &stages, pipeline, &settings, &group(degree)).unwrap(),
        };
        let item = self.batch / self.microbatches as usize;
        let dataset = Dataset::new(self.arrays.clone(), &feeds(&prepared.codes), item).unwrap();
        let batches =
            Batches::new(dataset, self.batch, self.microbatches as usize, STEPS as usize, RowOrder::InOrder).unwrap();
        let training = TrainJob {
            codes: &prepared.codes,
            program: &prepared.program,
            weights: &self.weights,
            batches: &batches,
            optimizer: &self.optimizer,
            policy: Policy::default(),
            keep_gradients: false,
        };
        let trained = match degree {
            1 => train(&training, &mut |_| {}).unwrap(),
            _ => train_tensor_parallel(&training, &layouts, degree as usize, &mut |_| {}).unwrap(),
        };
        (trained, prepared.codes.iter().map(|code| code.arena_bytes as u64).collect())
    }
}

#[test]
fn all_go_together() {
    let Some(root) = data("parity") else { return };
    let (mut all, mut near) = (0, 0);
    for name in ["mlp", "cnn_bn", "gpt", "lstm_lm"] {
        let set = set(&root, name, MICROBATCHES);
        for of in combinations() {
            let Some(plan) = set.plan(of) else {
                println!("{name} {of:?}: no such cut");
                continue;
            };
            assert_eq!(plan.stages.len(), of.stages as usize, "{name} {of:?}");
            for stage in &plan.stages {
                assert_eq!((stage.replicas, stage.degree(), stage.zero), (of.replicas, of.degree, of.zero), "{name}");
            }
            let (trained, arenas) = set.trained(&plan);
            assert_eq!(trained.losses.len(), set.want.len());
            let errors = trained.losses.iter().zip(&set.want).map(|(got, want)| (got - want).abs() / want.abs());
            let worst = errors.fold(0.0, f64::max);
            println!("{name} {of:?}: {worst:.1e}");
            assert!(worst <= 1e-5, "{name} {of:?}: {worst:.1e}");
            let held =
                trained.peak_memory_bytes.chunks(of.replicas as usize).map(|of_stage| of_stage.iter().max().unwrap());
            for ((stage, held), arena) in plan.stages.iter().zip(held).zip(arenas) {
                let said = stage.memory.total;
                let message = format!("stage {} holds {held} B of {said} planned", stage.id.0);
                let arenas = format!("an arena of {arena} B of {}", stage.memory.workspace);
                println!("  {message}, {arenas}: {:.3}", *held as f64 / said as f64);
                // On models this small, arena sizes are planned less accurately than replicated state. Planned memory
                // need not be used at one time: terms of one parameter are added when nothing else is allocated.
                let known = said - stage.memory.workspace + arena;
                let expected = (known - set.tied()) / 100 * 95..=known.max(said) / 100 * 105;
                assert!(expected.contains(held), "{name} {of:?}: {message}, {known} with its arena");
                all += 1;
                near += u32::from(held.abs_diff(said) <= said / 20);
            }
        }
    }
    println!("{near} of {all} stages hold what was planned, within 5 %");
    // The others use less: a group splits tensors that the plan of a whole op does not. Also, without AVX-512,
    // convolutions have matrices of patches, and without panels, large transposed operands are copied. Shards are too
    // small for these, but plans include them.
    let has_avx512 = cpu().arithmetic().contains("AVX-512");
    let share = if has_avx512 {
        96
    } else if has_panels::<f32>(64, 64) {
        92
    } else {
        65
    };
    assert!(near * 100 >= all * share, "{near} of {all}");
}

/// Without a flush, a replica accumulates a round's gradients while others are at the previous one.
#[test]
fn two_rounds_are_open_without_a_flush() {
    let Some(root) = data("parity") else { return };
    let orders = [
        ((Schedule::TwoBw, Schedule::TwoBw), MICROBATCHES),
        // Minibatches alternate between the replicas, unsplit.
        ((Schedule::OneFOneBRr, Schedule::OneFOneBRr), 1),
    ];
    for (order, microbatches) in orders {
        let set = Set { order, ..set(&root, "gpt", microbatches) };
        for zero in 0..=MOST {
            let of = Combination { degree: 1, zero, replicas: 2, stages: 2 };
            let plan = set.plan(of).unwrap();
            let (trained, _) = set.trained(&plan);
            for (stage, held) in plan.stages.iter().zip(trained.peak_memory_bytes.chunks(2)) {
                let (held, said) = (held.iter().max().unwrap(), stage.memory.total);
                let message = format!("{:?} {of:?}: stage {} holds {held} B of {said} planned", order.1, stage.id.0);
                println!("{message}: {:.3}", *held as f64 / said as f64);
                // Thread scheduling determines how far replicas drift apart, and how much of two rounds is allocated at
                // once.
                assert!((said / 100 * 75..=said / 100 * 105).contains(held), "{message}");
            }
        }
    }
}

/// A tied embedding is stepped when the first stage's gradient has arrived, so later stages keep the sums of several
/// rounds.
#[test]
fn sums_of_shared_parameters_are_planned_while_they_wait() {
    let Some(root) = data("parity") else { return };
    let order = (Schedule::OneFOneBRr, Schedule::OneFOneBRr);
    let set = Set { order, ..set(&root, "gpt", 1) };
    for stages in 2..=4 {
        let plan = set.plan(Combination { degree: 1, zero: 0, replicas: 1, stages }).unwrap();
        let (trained, _) = set.trained(&plan);
        for (stage, held) in plan.stages.iter().zip(&trained.peak_memory_bytes) {
            let said = stage.memory.total;
            println!("stage {} of {stages} holds {held} B of {said} planned", stage.id.0);
            // Middle stages may have less in flight than allowed; the last one may have its own arena.
            let least = if [0, stages - 1].contains(&stage.id.0) { said / 100 * 90 } else { 0 };
            assert!((least..=said / 100 * 105).contains(held), "stage {} of {stages}", stage.id.0);
        }
    }
}
