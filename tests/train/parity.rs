//! Training against PyTorch: losses of ten steps under six optimizers, first gradients, and asynchronous schedules,
//! unpipelined and pipelined. Needs the shared data.

use crate::support::devices::under_test;
use crate::support::shared::{arrays, data};
use crate::support::simulated_gpus::run_tests;
use compiler::graph::order;
use compiler::import::import::{Batch, Model, Options, Weight, load};
use compiler::pass::loss::Loss;
use compiler::pass::precision::precision;
use compiler::plan::schedule::Schedule;
use compiler::plan::zero::MOST;
use compiler::schedule::generators;
use compiler::schedule::semantics::StepCount;
use compiler::schedule::{Pipeline, StageSpec};
use compiler::tensor::{DType, Tensor};
use runtime::data::{Batches, Dataset, RowOrder};
use runtime::optim::optimizer::{Optimizer, Rule};
use runtime::optim::policy::Policy;
use runtime::train::job::{RunOptions, TrainJob, Trained};
use runtime::train::prepare::{RunTarget, Settings, prepare_with};
use runtime::train::run::feeds;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// `[steps, batch, …]` as `[steps·batch, …]`.
fn rows(t: &Tensor) -> Tensor {
    let mut shape = vec![t.shape()[0] * t.shape()[1]];
    shape.extend(&t.shape()[2..]);
    t.reshaped(shape).unwrap()
}

/// A model with the data of its steps and PyTorch's results.
pub struct Fixture {
    pub folder: PathBuf,
    pub model: Model,
    pub arrays: BTreeMap<String, Tensor>,
    pub expected: BTreeMap<String, Tensor>,
    pub batch: usize,
    pub lr: f64,
}

impl Fixture {
    pub fn weights(&self) -> BTreeMap<String, Tensor> {
        let named_tensor = |(name, weight): (&String, &Weight)| match weight {
            Weight::Given(tensor) => (name.clone(), tensor.clone()),
            Weight::Missing { path } => panic!("no weights at {path}"),
        };
        self.model.weights.iter().map(named_tensor).collect()
    }
}

pub fn load_fixture(root: &Path, name: &str, file: &str) -> Fixture {
    let folder = root.join(name);
    let model = load(&folder.join(file), &Options::default()).unwrap();
    let inputs = arrays(&folder.join("inputs.npz"));
    let batch = inputs["x"].shape()[1];
    let mut minibatch_rows: BTreeMap<String, Tensor> = inputs.iter().map(|(k, v)| (k.clone(), rows(v))).collect();
    minibatch_rows.insert("target".into(), rows(&arrays(&folder.join("targets.npz"))["target"]));
    let meta = std::fs::read_to_string(folder.join("meta.json")).unwrap();
    let meta: serde_json::Value = serde_json::from_str(&meta).unwrap();
    let lr = meta["lr"].as_f64().unwrap_or(0.05);
    Fixture { expected: arrays(&folder.join("expected.npz")), folder, model, arrays: minibatch_rows, batch, lr }
}

pub fn optimizers(lr: f64) -> Vec<(&'static str, Optimizer)> {
    let sgd = |lr, momentum, nesterov, weight_decay| {
        Optimizer::from(Rule::Sgd { learning_rate: lr, momentum, nesterov, weight_decay })
    };
    let adam = |weight_decay, decoupled| {
        Optimizer::from(Rule::Adam { learning_rate: 1e-3, betas: (0.9, 0.999), epsilon: 1e-8, weight_decay, decoupled })
    };
    vec![
        ("sgd", sgd(lr, 0.0, false, 0.0)),
        ("sgd_m09", sgd(lr / 5.0, 0.9, false, 0.0)),
        ("sgd_m09_wd", sgd(lr / 5.0, 0.9, false, 0.01)),
        ("sgd_nesterov", sgd(lr / 5.0, 0.9, true, 0.0)),
        ("adam", adam(0.0, false)),
        ("adamw", adam(0.01, true)),
    ]
}

/// Trains with these replicas, in stages with about equal numbers of ops.
fn run(fixture: &Fixture, replicas: &[u32], schedule: Schedule, count: StepCount, optimizer: &Optimizer) -> Trained {
    let ops = order::numbered(&fixture.model.graph).len();
    let stages: Vec<usize> = (0..ops).map(|i| i * replicas.len() / ops).collect();
    run_stages(fixture, &stages, replicas, schedule, count, optimizer)
}

fn run_stages(
    fixture: &Fixture,
    stages: &[usize],
    replicas: &[u32],
    schedule: Schedule,
    count: StepCount,
    optimizer: &Optimizer,
) -> Trained {
    run_with_zero(fixture, stages, (replicas, 0), schedule, count, optimizer)
}

fn run_with_zero(
    fixture: &Fixture,
    stages: &[usize],
    (replicas, zero): (&[u32], u32),
    schedule: Schedule,
    count: StepCount,
    optimizer: &Optimizer,
) -> Trained {
    let Batch::Symbol { name, .. } = &fixture.model.batch else {
        panic!("the batch is fixed: {:?}", fixture.model.batch)
    };
    let batch = fixture.batch;
    let dims = BTreeMap::from([(name.clone(), (batch / count.microbatches as usize) as i64)]);
    let level = |r: &u32| if *r > 1 { zero } else { 0 };
    let shape = |r: &u32| StageSpec { zero: level(r), ..StageSpec::new(*r, 1.0, 2.0) };
    let pipeline = Pipeline::chain(replicas.iter().map(shape).collect());
    let settings = Settings::new(dims, Loss::CrossEntropy, schedule, count);
    let devices = under_test();
    let generate = |pipeline: &Pipeline| generators::schedule(schedule, pipeline, count);
    let splits = schedule.splits_backward();
    let target = RunTarget { device: &*devices[0], splits, program: &generate, machine: None };
    let prepared = prepare_with(&fixture.model.graph, stages, pipeline, &settings, target).unwrap();
    let weights = fixture.weights();
    let dataset =
        Dataset::new(fixture.arrays.clone(), &feeds(&prepared.codes), batch / count.microbatches as usize).unwrap();
    let steps = count.minibatches as usize;
    let batches = Batches::new(dataset, batch, count.microbatches as usize, steps, RowOrder::InOrder).unwrap();
    let training = TrainJob {
        codes: &prepared.codes,
        program: &prepared.program,
        weights: &weights,
        batches: &batches,
        optimizer,
        policy: Policy::default(),
        keep_gradients: true,
    };
    runtime::train::run::run(&training, RunOptions { devices, ..RunOptions::default() }, &mut |_| {}).unwrap()
}

pub fn max_relative_error(got: &[f64], want: &Tensor) -> f64 {
    let want = want.to_f64();
    assert_eq!(got.len(), want.len());
    got.iter().zip(&want).map(|(g, w)| (g - w).abs() / w.abs()).fold(0.0, f64::max)
}

#[test]
fn losses_are_those_of_pytorch_unpipelined_and_pipelined() {
    let Some(root) = data("parity") else { return };
    for name in ["mlp", "cnn_bn", "gpt", "lstm_lm"] {
        for file in ["model.onnx", "model_dynbatch.onnx"] {
            let fixture = load_fixture(&root, name, file);
            for (key, optimizer) in optimizers(fixture.lr) {
                let mut single_stage_losses: Option<Vec<f64>> = None;
                for stages in [1, 2, 4] {
                    let replicas = vec![1; stages];
                    let count = StepCount::minibatches(10);
                    let trained = run(&fixture, &replicas, Schedule::OneFOneB, count, &optimizer);
                    let error = max_relative_error(&trained.losses, &fixture.expected[&format!("loss64_{key}")]);
                    assert!(error <= 1e-5, "{name} {file} {key}, {stages} stages: {error:.2e}");
                    let single_stage_losses = single_stage_losses.get_or_insert_with(|| trained.losses.clone());
                    assert_eq!(
                        *single_stage_losses, trained.losses,
                        "{name} {key}: {stages} stages give other bits than one"
                    );
                }
            }
        }
    }
}

/// In double precision, ten steps agree to the last digits.
#[test]
fn double_precision_agrees_to_the_last_digits() {
    let Some(root) = data("parity") else { return };
    for name in ["mlp", "cnn_bn", "gpt", "lstm_lm"] {
        let mut fixture = load_fixture(&root, name, "model.onnx");
        fixture.model.graph = precision(&fixture.model.graph, DType::F64).unwrap();
        for (key, optimizer) in optimizers(fixture.lr) {
            for replicas in [&[1][..], &[1, 1, 1]] {
                let trained = run(&fixture, replicas, Schedule::OneFOneB, StepCount::minibatches(10), &optimizer);
                let error = max_relative_error(&trained.losses, &fixture.expected[&format!("loss64_{key}")]);
                println!("{name} {key} {replicas:?}: {error:.2e}");
                assert!(error <= 1e-13, "{name} {key} {replicas:?}: {error:.2e}");
            }
        }
    }
}

#[test]
fn losses_with_four_microbatches_are_those_of_pytorch() {
    let Some(root) = data("parity") else { return };
    for name in ["mlp", "cnn_bn", "gpt", "lstm_lm"] {
        let fixture = load_fixture(&root, name, "model.onnx");
        for (key, optimizer) in optimizers(fixture.lr).into_iter().take(2) {
            let expected = &fixture.expected[&format!("loss64_{key}_micro4")];
            let mut single_stage_result: Option<(Vec<f64>, BTreeMap<String, Tensor>)> = None;
            for schedule in [Schedule::OneFOneB, Schedule::Gpipe] {
                for stages in [1, 2, 3, 4] {
                    let count = StepCount { minibatches: 10, microbatches: 4 };
                    let trained = run(&fixture, &vec![1; stages], schedule, count, &optimizer);
                    let error = max_relative_error(&trained.losses, expected);
                    assert!(error <= 1e-5, "{name} {key} {schedule}, {stages} stages: {error:.2e}");
                    let (losses, weights) =
                        single_stage_result.get_or_insert_with(|| (trained.losses.clone(), trained.weights.clone()));
                    assert_eq!(*losses, trained.losses, "{name} {key} {schedule}: {stages} stages give other losses");
                    assert!(*weights == trained.weights, "{name} {key} {schedule}: {stages} stages give other weights");
                }
            }
            // Replicas add gradients in a different order, so results are equal only up to rounding.
            let count = StepCount { minibatches: 10, microbatches: 4 };
            let trained = run(&fixture, &[2, 1], Schedule::OneFOneB, count, &optimizer);
            assert!(max_relative_error(&trained.losses, expected) <= 1e-5, "{name} {key} with replicas");
        }
    }
}

#[test]
fn losses_of_replicas_that_share_are_those_of_pytorch() {
    let Some(root) = data("parity") else { return };
    for name in ["mlp", "cnn_bn", "gpt", "lstm_lm"] {
        let fixture = load_fixture(&root, name, "model.onnx");
        let ops = order::numbered(&fixture.model.graph).len();
        for (key, optimizer) in optimizers(fixture.lr).into_iter().take(2) {
            let expected = &fixture.expected[&format!("loss64_{key}_micro4")];
            for replicas in [&[2][..], &[4], &[2, 2], &[4, 4], &[3, 1]] {
                let stages: Vec<usize> = (0..ops).map(|i| i * replicas.len() / ops).collect();
                for zero in 0..=MOST {
                    let count = StepCount { minibatches: 10, microbatches: 4 };
                    let trained =
                        run_with_zero(&fixture, &stages, (replicas, zero), Schedule::OneFOneB, count, &optimizer);
                    let error = max_relative_error(&trained.losses, expected);
                    println!("{name} {key} {replicas:?} zero {zero}: {error:.1e}, {:?} B", trained.peak_memory_bytes);
                    assert!(error <= 1e-5, "{name} {key} {replicas:?} zero {zero}: {error:.2e}");
                }
            }
        }
    }
}

#[test]
fn first_gradients_are_those_of_pytorch() {
    let Some(root) = data("parity") else { return };
    for name in ["mlp", "cnn_bn", "gpt", "lstm_lm"] {
        let fixture = load_fixture(&root, name, "model.onnx");
        let sgd = &optimizers(fixture.lr)[0].1;
        let expected = arrays(&fixture.folder.join("grads1_f64.npz"));
        let largest_gradient = expected.values().flat_map(Tensor::to_f64).fold(0.0f64, |m, v| m.max(v.abs()));
        for stages in [1, 3] {
            let trained = run(&fixture, &vec![1; stages], Schedule::OneFOneB, StepCount::minibatches(1), sgd);
            for (key, expected) in &expected {
                let gradient = trained.gradients.get(key).unwrap_or_else(|| panic!("{name}: no gradient of {key}"));
                let pairs = gradient.to_f64().into_iter().zip(expected.to_f64());
                let error = pairs.map(|(g, w)| (g - w).abs()).fold(0.0, f64::max) / largest_gradient;
                assert!(error <= 2e-5, "{name} {key}, {stages} stages: {error:.2e}");
            }
        }
    }
}

/// The stages of ops in the reference of asynchronous schedules: three, and two.
pub fn async_stages(fixture: &Fixture) -> [Vec<usize>; 2] {
    let ops = order::numbered(&fixture.model.graph);
    let op_of = |name: &str| {
        ops.iter().position(|id| fixture.model.graph.node(*id).origin.source == name).expect("the node is there")
    };
    let (a, b) = (op_of("/0/0.3/Relu"), op_of("/1/1.3/Relu"));
    let three_stages = (0..ops.len()).map(|op| usize::from(op > a) + usize::from(op > b)).collect();
    [three_stages, (0..ops.len()).map(|op| usize::from(op > b)).collect()]
}

#[test]
fn asynchronous_losses_are_those_of_the_reference() {
    let Some(root) = data("parity") else { return };
    let fixture = load_fixture(&root, "async_mlp3", "model.onnx");
    let [three_stages, two_stages] = async_stages(&fixture);
    let cases: [(&str, Schedule, &[usize], &[u32]); 6] = [
        ("stash", Schedule::OneFOneBRr, &three_stages, &[1, 1, 1]),
        ("vsync", Schedule::OneFOneBRrVsync, &three_stages, &[1, 1, 1]),
        ("nostash", Schedule::OneFOneBRrNewest, &three_stages, &[1, 1, 1]),
        ("sync", Schedule::OneFOneB, &three_stages, &[1, 1, 1]),
        ("2bw", Schedule::TwoBw, &three_stages, &[1, 1, 1]),
        ("rr_2_1", Schedule::OneFOneBRr, &two_stages, &[2, 1]),
    ];
    for (mode, schedule, stages, replicas) in cases {
        for (key, lr, momentum) in [("sgd", 0.05, 0.0), ("sgd_m09", 0.01, 0.9)] {
            let sgd = Optimizer::from(Rule::Sgd { learning_rate: lr, momentum, nesterov: false, weight_decay: 0.0 });
            // The PyTorch reference for 2BW does not accumulate gradients.
            let count = StepCount::minibatches(20);
            let trained = run_stages(&fixture, stages, replicas, schedule, count, &sgd);
            let error = max_relative_error(&trained.losses, &fixture.expected[&format!("{mode}.{key}.f64")]);
            assert!(error <= 1e-5, "{mode} {key}: {error:.2e}");
        }
    }
}

/// The same marks on two GPUs, with random delays of their streams. `PIPEC_LARGE` tests all of them: four minutes.
#[test]
fn simulated_gpus_train_like_pytorch() {
    if data("parity").is_some() && std::env::var_os("PIPEC_TEST_DEVICES").is_none() {
        let is_large = std::env::var_os("PIPEC_LARGE").is_some();
        let filters = if is_large { &["parity::"][..] } else { &["first_gradients", "asynchronous"] };
        filters.iter().for_each(|filter| run_tests(filter, 1));
    }
}
