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
use compiler::plan::zero::{MOST, Zero};
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
use runtime::train::job::{RunOptions, TrainJob, Trained};
use runtime::train::prepare::{Settings, prepare_shared};
use runtime::train::run::{feeds, train};
use runtime::train::tensor_parallel::run_shared_in_group;
use std::collections::BTreeMap;
use std::path::Path;

const STEPS: u32 = 10;
const MICROBATCHES: u32 = 4;
const WORKERS: u32 = 8;
const TRAINING: Trains = Trains::Loss(Loss::CrossEntropy, None);

/// `[steps, batch, …]` as `[steps·batch, …]`.
fn rows(t: &Tensor) -> Tensor {
    let mut shape = vec![t.shape()[0] * t.shape()[1]];
    shape.extend(&t.shape()[2..]);
    t.reshaped(shape).unwrap()
}

struct ParityCase {
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
    expected_losses: Vec<f64>,
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
fn parity_case(root: &Path, name: &str, microbatches: u32) -> ParityCase {
    let folder = root.join(name);
    let model = load(&folder.join("model.onnx"), &Options::default()).unwrap();
    let inputs = arrays(&folder.join("inputs.npz"));
    let batch = inputs["x"].shape()[1];
    let mut arrays_by_name: BTreeMap<String, Tensor> = inputs.iter().map(|(k, v)| (k.clone(), rows(v))).collect();
    arrays_by_name.insert("target".into(), rows(&arrays(&folder.join("targets.npz"))["target"]));
    let meta: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(folder.join("meta.json")).unwrap()).unwrap();
    let learning_rate = meta["lr"].as_f64().unwrap_or(0.05) / 5.0;
    let rule = Rule::Sgd { learning_rate, momentum: 0.9, nesterov: false, weight_decay: 0.0 };
    let Batch::Symbol { name: symbol, .. } = &model.batch else { panic!("the batch is fixed: {:?}", model.batch) };
    let dims = BTreeMap::from([(symbol.clone(), (batch / microbatches as usize) as i64)]);
    let graph = bind(&model.graph, &dims).unwrap();
    let attribution = attribute(&graph, TRAINING).unwrap();
    let mut costs = cost_graph(&graph, &attribution);
    let profiled_model = ProfiledModel { file: String::new(), sha256: String::new(), ops: 0 };
    let subject = Subject { model: profiled_model, micro_batch: 1, loss: None };
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
    let expected_losses = arrays(&folder.join("expected.npz"))["loss64_sgd_m09_micro4"].to_f64();
    let (optimizer, order) = (Optimizer::from(rule), (Schedule::OneFOneB, Schedule::OneFOneB));
    ParityCase {
        model,
        graph,
        costs,
        arrays: arrays_by_name,
        weights,
        batch,
        microbatches,
        dims,
        optimizer,
        order,
        expected_losses,
    }
}

/// Tensor-parallel degree, ZeRO, replicas and stages.
#[derive(Clone, Copy, Debug)]
struct Combination {
    degree: u32,
    zero: Zero,
    replicas: u32,
    stages: u32,
}

fn combinations() -> Vec<Combination> {
    let mut combinations = Vec::new();
    for degree in [1, 2, 4] {
        for replicas in [1, 2, 4] {
            for stages in [1, 2].into_iter().filter(|stages| degree * replicas * stages <= WORKERS) {
                let max_zero = if replicas > 1 { MOST } else { 0 };
                let all = (0..=max_zero).map(Zero::over_all);
                let groups = (1..=max_zero).filter(|_| replicas > 2).map(|level| Zero { level, degree: 2 });
                combinations.extend(all.chain(groups).map(|zero| Combination { degree, zero, replicas, stages }));
            }
        }
    }
    combinations
}

impl ParityCase {
    fn plan(&self, combination: Combination) -> Option<Plan> {
        let levels =
            levels(&format!("{}:100GB/s", combination.degree * combination.replicas * combination.stages)).unwrap();
        let mut problem = Problem::new(self.costs.clone(), levels, CostModel::Pipec);
        problem.cluster.device = group(1).device;
        (problem.schedule, problem.microbatches) = (self.order.0, self.microbatches);
        (problem.zero, problem.optimizer_state) = (combination.zero, 1.0);
        problem.recompute = Recomputation::Never;
        problem.constraints.replicas = Some(vec![combination.replicas; combination.stages as usize]);
        if combination.degree > 1 {
            problem.shared =
                vec![shared_costs(&self.graph, TRAINING, &self.costs, &group(combination.degree)).unwrap()];
            problem.constraints.tensor = true;
        }
        match plan(&problem, &PlannerOptions::default()) {
            Ok(planned) => Some(planned.plan),
            // Tensors must be unsharded at every cut, which is not possible everywhere.
            Err(error) if combination.degree > 1 && error.to_string().contains("stages are requested") => None,
            Err(error) => panic!("{combination:?}: {error}"),
        }
    }

    /// Gradient bytes of parameters with several users.
    fn tied_gradient_bytes(&self) -> u64 {
        let tied = self.costs.params.iter().filter(|param| param.users.len() > 1);
        tied.map(|param| param.sum_bytes).sum()
    }

    /// Trains ten steps by a plan; also returns the arena sizes of its stages.
    fn train_plan(&self, plan: &Plan) -> (Trained, Vec<u64>) {
        let mut stages = vec![0; self.costs.ops.len()];
        for stage in &plan.stages {
            stage.op_ids().for_each(|op| stages[op as usize] = stage.id.index());
        }
        let count = StepCount { minibatches: STEPS, microbatches: self.microbatches };
        let (dims, schedule) = (self.dims.clone(), self.order.1);
        let settings = Settings::new(dims, Loss::CrossEntropy, schedule, count);
        let (degree, pipeline) = (plan.stages[0].degree(), pipeline(plan).unwrap());
        let machine = (degree > 1).then(|| group(degree));
        let prepared = prepare_shared(&self.model.graph, &stages, pipeline, &settings, machine.as_ref()).unwrap();
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
            _ => {
                let (options, sharding) = (RunOptions::default(), (&prepared.layouts, degree as usize));
                run_shared_in_group(&training, options, sharding, &mut |_| {}, None).unwrap().unwrap()
            }
        };
        (trained, prepared.codes.iter().map(|code| code.arena_bytes as u64).collect())
    }
}

#[test]
fn all_go_together() {
    let Some(root) = data("parity") else { return };
    let (mut stage_count, mut close_count) = (0, 0);
    for name in ["mlp", "cnn_bn", "gpt", "lstm_lm"] {
        let case = parity_case(&root, name, MICROBATCHES);
        for combination in combinations() {
            let Some(plan) = case.plan(combination) else {
                println!("{name} {combination:?}: no such cut");
                continue;
            };
            assert_eq!(plan.stages.len(), combination.stages as usize, "{name} {combination:?}");
            for stage in &plan.stages {
                assert_eq!(
                    (stage.replicas, stage.degree(), stage.sharding()),
                    (combination.replicas, combination.degree, combination.zero),
                    "{name}"
                );
            }
            let (trained, arenas) = case.train_plan(&plan);
            assert_eq!(trained.losses.len(), case.expected_losses.len());
            let errors = trained
                .losses
                .iter()
                .zip(&case.expected_losses)
                .map(|(actual, expected)| (actual - expected).abs() / expected.abs());
            let max_error = errors.fold(0.0, f64::max);
            println!("{name} {combination:?}: {max_error:.1e}");
            assert!(max_error <= 1e-5, "{name} {combination:?}: {max_error:.1e}");
            let peak_bytes = trained
                .peak_memory_bytes
                .chunks(combination.replicas as usize)
                .map(|of_stage| of_stage.iter().max().unwrap());
            for ((stage, peak_bytes), arena) in plan.stages.iter().zip(peak_bytes).zip(arenas) {
                let planned_bytes = stage.memory.total;
                let message = format!("stage {} holds {peak_bytes} B of {planned_bytes} planned", stage.id.0);
                let arenas = format!("an arena of {arena} B of {}", stage.memory.workspace);
                println!("  {message}, {arenas}: {:.3}", *peak_bytes as f64 / planned_bytes as f64);
                // On models this small, arena sizes are planned less accurately than replicated state. Planned memory
                // need not be used at one time: terms of one parameter are added when nothing else is allocated.
                let expected_bytes = planned_bytes - stage.memory.workspace + arena;
                let expected = (expected_bytes - case.tied_gradient_bytes()) / 100 * 95
                    ..=expected_bytes.max(planned_bytes) / 100 * 105;
                assert!(
                    expected.contains(peak_bytes),
                    "{name} {combination:?}: {message}, {expected_bytes} with its arena"
                );
                stage_count += 1;
                close_count += u32::from(peak_bytes.abs_diff(planned_bytes) <= planned_bytes / 20);
            }
        }
    }
    println!("{close_count} of {stage_count} stages hold what was planned, within 5 %");
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
    assert!(close_count * 100 >= stage_count * share, "{close_count} of {stage_count}");
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
        let case = ParityCase { order, ..parity_case(&root, "gpt", microbatches) };
        for zero in 0..=MOST {
            let combination = Combination { degree: 1, zero: Zero::over_all(zero), replicas: 2, stages: 2 };
            let plan = case.plan(combination).unwrap();
            let (trained, _) = case.train_plan(&plan);
            for (stage, peak_bytes) in plan.stages.iter().zip(trained.peak_memory_bytes.chunks(2)) {
                let (peak_bytes, planned_bytes) = (peak_bytes.iter().max().unwrap(), stage.memory.total);
                let message = format!(
                    "{:?} {combination:?}: stage {} holds {peak_bytes} B of {planned_bytes} planned",
                    order.1, stage.id.0
                );
                println!("{message}: {:.3}", *peak_bytes as f64 / planned_bytes as f64);
                // Thread scheduling determines how far replicas drift apart, and how much of two rounds is allocated at
                // once.
                assert!((planned_bytes / 100 * 75..=planned_bytes / 100 * 105).contains(peak_bytes), "{message}");
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
    let case = ParityCase { order, ..parity_case(&root, "gpt", 1) };
    for stages in 2..=4 {
        let plan = case.plan(Combination { degree: 1, zero: Zero::default(), replicas: 1, stages }).unwrap();
        let (trained, _) = case.train_plan(&plan);
        for (stage, peak_bytes) in plan.stages.iter().zip(&trained.peak_memory_bytes) {
            let planned_bytes = stage.memory.total;
            println!("stage {} of {stages} holds {peak_bytes} B of {planned_bytes} planned", stage.id.0);
            // Middle stages may have less in flight than allowed; the last one may have its own arena.
            let min_bytes = if [0, stages - 1].contains(&stage.id.0) { planned_bytes / 100 * 90 } else { 0 };
            assert!((min_bytes..=planned_bytes / 100 * 105).contains(peak_bytes), "stage {} of {stages}", stage.id.0);
        }
    }
}
