//! Tensor-parallel training against PyTorch's losses and against training without it, combined with pipelines and
//! replicas. Needs the shared data.

use crate::support::devices::assert_equal;
use crate::support::shared::{arrays, data};
use compiler::cluster::{BytesPerSecond, Seconds, device};
use compiler::graph::order;
use compiler::import::import::{Batch, Model, Options, Weight, load};
use compiler::op::Sharding;
use compiler::pass::loss::Loss;
use compiler::pass::precision::precision;
use compiler::plan::schedule::Schedule;
use compiler::profile::shared::ActivationSharding;
use compiler::schedule::semantics::StepCount;
use compiler::schedule::{Pipeline, StageSpec};
use compiler::tensor::{DType, Tensor};
use compiler::tensor_parallel::cost::Machine;
use runtime::comm::tensor_group::Layouts;
use runtime::data::{Batches, Dataset, RowOrder};
use runtime::device::sanitizer::device::sanitizer;
use runtime::optim::optimizer::{Optimizer, Rule};
use runtime::optim::policy::Policy;
use runtime::train::error::TrainError;
use runtime::train::job::{RunOptions, TrainJob, Trained};
use runtime::train::prepare::{Settings, prepare_shared};
use runtime::train::run::{feeds, train};
use runtime::train::tensor_parallel::run_shared_in_group;
use std::collections::BTreeMap;
use std::path::Path;

struct Fixture {
    model: Model,
    arrays: BTreeMap<String, Tensor>,
    expected: BTreeMap<String, Tensor>,
    batch: usize,
}

fn load_fixture(root: &Path, name: &str) -> Fixture {
    let rows = |t: &Tensor| t.reshaped([&[t.shape()[0] * t.shape()[1]], &t.shape()[2..]].concat()).unwrap();
    let folder = root.join(name);
    let inputs = arrays(&folder.join("inputs.npz"));
    let batch = inputs["x"].shape()[1];
    let mut minibatch_rows: BTreeMap<String, Tensor> = inputs.iter().map(|(k, v)| (k.clone(), rows(v))).collect();
    minibatch_rows.insert("target".into(), rows(&arrays(&folder.join("targets.npz"))["target"]));
    let model = load(&folder.join("model_dynbatch.onnx"), &Options::default()).unwrap();
    Fixture { model, arrays: minibatch_rows, expected: arrays(&folder.join("expected.npz")), batch }
}

/// Devices with a free link, so that everything splittable is split.
pub fn build_machine(devices: usize) -> Machine {
    let mut device = device::find("cpu").unwrap().device();
    device.launch = Seconds(0.0);
    Machine {
        device,
        devices,
        bandwidth: BytesPerSecond(1e15),
        latency: Seconds(0.0),
        keeps_weights: false,
        activations: ActivationSharding::Replicated,
    }
}

fn adam() -> Optimizer {
    let rule =
        Rule::Adam { learning_rate: 1e-3, betas: (0.9, 0.999), epsilon: 1e-8, weight_decay: 0.0, decoupled: false };
    Optimizer::from(rule)
}

fn run(fixture: &Fixture, replicas: &[u32], devices: usize, policy: &Policy) -> Result<(Trained, Layouts), TrainError> {
    run_on(fixture, replicas, &build_machine(devices), policy)
}

fn run_on(
    fixture: &Fixture,
    replicas: &[u32],
    machine: &Machine,
    policy: &Policy,
) -> Result<(Trained, Layouts), TrainError> {
    let devices = machine.devices;
    let Batch::Symbol { name, .. } = &fixture.model.batch else {
        panic!("the batch is fixed: {:?}", fixture.model.batch)
    };
    let microbatches = if replicas.len() > 1 { 4 } else { 1 };
    let count = StepCount { minibatches: 10, microbatches };
    let ops = order::numbered(&fixture.model.graph).len();
    let stages: Vec<usize> = (0..ops).map(|i| i * replicas.len() / ops).collect();
    let item = fixture.batch / microbatches as usize;
    let dims = BTreeMap::from([(name.clone(), item as i64)]);
    let pipeline = Pipeline::chain(replicas.iter().map(|r| StageSpec::new(*r, 1.0, 2.0)).collect());
    let settings = Settings::new(dims, Loss::CrossEntropy, Schedule::OneFOneB, count);
    let machine = Some(machine).filter(|_| devices > 1);
    let prepared = prepare_shared(&fixture.model.graph, &stages, pipeline, &settings, machine).unwrap();
    let named_tensor = |(name, weight): (&String, &Weight)| match weight {
        Weight::Given(tensor) => (name.clone(), tensor.clone()),
        Weight::Missing { path } => panic!("no weights at {path}"),
    };
    let weights: BTreeMap<String, Tensor> = fixture.model.weights.iter().map(named_tensor).collect();
    let dataset = Dataset::new(fixture.arrays.clone(), &feeds(&prepared.codes), item).unwrap();
    let batches = Batches::new(dataset, fixture.batch, microbatches as usize, 10, RowOrder::InOrder).unwrap();
    let training = TrainJob {
        codes: &prepared.codes,
        program: &prepared.program,
        weights: &weights,
        batches: &batches,
        optimizer: &adam(),
        policy: *policy,
        keep_gradients: true,
    };
    let trained = match devices {
        1 => train(&training, &mut |_| {})?,
        _ => {
            let train = |options: RunOptions<'_>| {
                let trained = run_shared_in_group(&training, options, (&prepared.layouts, devices), &mut |_| {}, None)?;
                Ok::<_, TrainError>(trained.unwrap())
            };
            let trained = train(RunOptions::default())?;
            let options = RunOptions { devices: vec![sanitizer()], ..RunOptions::default() };
            assert_equal(&trained, &train(options)?);
            trained
        }
    };
    Ok((trained, prepared.layouts))
}

fn max_error(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    got.iter().zip(want).map(|(g, w)| (g - w).abs() / w.abs().max(1e-3)).fold(0.0, f64::max)
}

/// Sequence parallelism and data parallelism in a group: stages exchange split activations and gradients.
#[test]
fn split_activations_between_stages_change_no_losses() {
    let Some(root) = data("parity") else { return };
    for name in ["mlp", "cnn_bn", "gpt", "lstm_lm"] {
        let fixture = load_fixture(&root, name);
        for (devices, replicas) in [(2, &[1, 1][..]), (4, &[1, 1]), (2, &[2, 1]), (2, &[1, 1, 1])] {
            let (single_device, _) = run(&fixture, replicas, 1, &Policy::default()).unwrap();
            for (keeps_weights, activations) in
                [(true, ActivationSharding::Sequence), (false, ActivationSharding::Batch)]
            {
                let split = Machine { keeps_weights, activations, ..build_machine(devices) };
                let (trained, _) = run_on(&fixture, replicas, &split, &Policy::default()).unwrap();
                let error = max_error(&trained.losses, &single_device.losses);
                assert!(error <= 1e-5, "{name}, {replicas:?}, {devices} devices, {activations:?}: {error:.2e}");
            }
        }
    }
}

#[test]
fn losses_are_those_of_pytorch_on_groups_of_two_and_four() {
    let Some(root) = data("parity") else { return };
    for name in ["mlp", "cnn_bn", "gpt", "lstm_lm"] {
        let fixture = load_fixture(&root, name);
        for devices in [2, 4] {
            let (trained, layouts) = run(&fixture, &[1], devices, &Policy::default()).unwrap();
            let error = max_error(&trained.losses, &fixture.expected["loss64_adam"].to_f64());
            let split = layouts.values().filter(|layout| matches!(layout, Sharding::Split(_))).count();
            println!("{name}, {devices} devices: {error:.1e}, {split} of {} parameters split", layouts.len());
            assert!(error <= 1e-5, "{name}, {devices} devices: {error:.2e}");
            // A recurrent layer is split along the batch, with replicated weights.
            assert!(split > 0 || name == "lstm_lm", "{name}: nothing is split");
            // The run is reproducible.
            let (repeated, _) = run(&fixture, &[1], devices, &Policy::default()).unwrap();
            assert!(repeated.losses == trained.losses && repeated.weights == trained.weights, "{name}: other bits");
        }
    }
}

/// In double precision, gathered results equal those of one device to the last digits.
#[test]
fn weights_and_gradients_are_those_of_one_device() {
    let Some(root) = data("parity") else { return };
    for name in ["mlp", "cnn_bn", "gpt", "lstm_lm"] {
        let mut fixture = load_fixture(&root, name);
        fixture.model.graph = precision(&fixture.model.graph, DType::F64).unwrap();
        let (single_device, _) = run(&fixture, &[1], 1, &Policy::default()).unwrap();
        for devices in [2, 4] {
            let (shared, _) = run(&fixture, &[1], devices, &Policy::default()).unwrap();
            assert!(max_error(&shared.losses, &single_device.losses) <= 1e-12, "{name}, {devices} devices");
            assert_eq!(shared.weights.keys().collect::<Vec<_>>(), single_device.weights.keys().collect::<Vec<_>>());
            for (tensors, expected) in
                [(&shared.weights, &single_device.weights), (&shared.gradients, &single_device.gradients)]
            {
                for (name, want) in expected {
                    assert_eq!(tensors[name].shape(), want.shape(), "{name}");
                    let (got, want) = (tensors[name].to_f64(), want.to_f64());
                    let largest = want.iter().fold(1e-6f64, |m, v| m.max(v.abs()));
                    let error = got.iter().zip(&want).map(|(g, w)| (g - w).abs() / largest).fold(0.0, f64::max);
                    // Adam divides by the root of possibly tiny gradients.
                    assert!(error <= 1e-6, "{name}, {devices} devices: {error:.1e}");
                }
            }
        }
    }
}

#[test]
fn pipelines_and_replicas_of_shared_stages_train_as_those_of_single_devices() {
    let Some(root) = data("parity") else { return };
    for name in ["mlp", "gpt", "lstm_lm"] {
        let fixture = load_fixture(&root, name);
        for replicas in [&[1, 1][..], &[2, 1], &[1, 1, 1]] {
            let (single_device, _) = run(&fixture, replicas, 1, &Policy::default()).unwrap();
            let (shared, _) = run(&fixture, replicas, 2, &Policy::default()).unwrap();
            let error = max_error(&shared.losses, &single_device.losses);
            println!("{name} {replicas:?}: {error:.1e}");
            assert!(error <= 1e-5, "{name} {replicas:?}: {error:.1e}");
        }
    }
}

/// In double precision, the norm of shards equals that of the whole to the last digits.
#[test]
fn gradients_are_shortened_as_those_of_one_device() {
    let Some(root) = data("parity") else { return };
    for name in ["mlp", "cnn_bn", "gpt", "lstm_lm"] {
        let mut fixture = load_fixture(&root, name);
        fixture.model.graph = precision(&fixture.model.graph, DType::F64).unwrap();
        let clipped = Policy { clip_norm: Some(0.1), ..Policy::default() };
        for replicas in [&[1][..], &[2, 1]] {
            let (single_device, _) = run(&fixture, replicas, 1, &clipped).unwrap();
            let (shared, _) = run(&fixture, replicas, 2, &clipped).unwrap();
            assert!(max_error(&shared.losses, &single_device.losses) <= 1e-12, "{name} {replicas:?}");
            let gradient_norm =
                |trained: &Trained| trained.gradients.values().flat_map(Tensor::to_f64).map(|g| g * g).sum::<f64>();
            assert!(
                (gradient_norm(&shared).sqrt() - 0.1).abs() < 1e-5,
                "{name} {replicas:?}: {}",
                gradient_norm(&shared).sqrt()
            );
        }
    }
}
