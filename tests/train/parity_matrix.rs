//! Every schedule on two, three and four simulated GPUs, with every level of ZeRO and with tensor parallelism, against
//! PyTorch's losses of ten steps. Needs the shared data.
//!
//! PyTorch's losses of these models are those of schedules with a flush. Runs without one are compared with the plain loop
//! of [`delayed`], whose losses are PyTorch's where those exist.

use crate::delayed;
use crate::delayed::Delays;
use crate::parity::{Fixture, load_fixture};
use crate::support::devices::under_test;
use crate::support::shared::data;
use crate::support::simulated_gpus::{driver, on_simulated_gpus};
use crate::tensor_parallel::build_machine;
use compiler::graph::order;
use compiler::import::import::Batch;
use compiler::pass::loss::Loss;
use compiler::plan::schedule::Schedule;
use compiler::plan::zero::MOST;
use compiler::schedule::generators::schedule;
use compiler::schedule::semantics::StepCount;
use compiler::schedule::{Pipeline, StageSpec};
use runtime::data::{Batches, Dataset, RowOrder};
use runtime::device::api::Device;
use runtime::exec::stage_code::StageCode;
use runtime::optim::optimizer::{Optimizer, Rule};
use runtime::optim::policy::Policy;
use runtime::train::job::{RunOptions, TrainJob};
use runtime::train::prepare::{RunTarget, Settings, prepare_with};
use runtime::train::run::{feeds, run};
use runtime::train::tensor_parallel::run_shared_in_group;
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

pub const MODELS: [&str; 4] = ["mlp", "cnn_bn", "gpt", "lstm_lm"];

/// Relative difference of a loss that fails the test.
pub const MAX_DIFFERENCE: f64 = 1e-4;

/// Steps of the reference.
const STEPS: u32 = 10;

/// GPUs of the test.
const GPUS: usize = 4;

/// One run.
#[derive(Clone, Debug)]
struct Case {
    model: &'static str,
    schedule: Schedule,
    /// Replicas of each rank.
    ranks: Vec<u32>,
    zero: u32,
    tensor: usize,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Case { model, schedule, ranks, zero, tensor } = self;
        write!(f, "{model}, {schedule}, replicas {ranks:?}, ZeRO {zero}, tensor {tensor}")
    }
}

/// All runs of a model: pipelines, replicas under each level of ZeRO, and both in groups of two GPUs.
fn cases(model: &'static str) -> Vec<Case> {
    let mut cases = Vec::new();
    let is_supported = |schedule: &Schedule| schedule.trains() && schedule.stashes();
    for schedule in Schedule::GENERATED.into_iter().filter(is_supported) {
        let mut add = |ranks: &[u32], zero, tensor| {
            cases.push(Case { model, schedule, ranks: ranks.to_vec(), zero, tensor });
        };
        for gpus in 2..=GPUS {
            add(&vec![1; gpus], 0, 1);
        }
        // The stages of a loop or a V have equally many replicas, and without a flush those that share the tied
        // parameter of the GPT.
        let is_even = schedule.has_chunks() || (model == "gpt" && schedule.is_round_robin());
        let three_replicas: &[u32] = if is_even { &[3] } else { &[2, 1] };
        for zero in 0..=MOST {
            for ranks in [&[2], three_replicas, &[2, 2]] {
                add(ranks, zero, 1);
            }
            add(&[2], zero, 2);
        }
        add(&[1], 0, 2);
        add(&[1, 1], 0, 2);
    }
    cases
}

/// Stages of about equally many ops.
fn stages_of(fixture: &Fixture, stages: usize) -> Vec<usize> {
    let ops = order::numbered(&fixture.model.graph).len();
    (0..ops).map(|op| op * stages / ops).collect()
}

/// The learning rate and momentum of all runs.
pub fn momentum(fixture: &Fixture) -> (f64, f64) {
    (fixture.lr / 5.0, 0.9)
}

struct References {
    losses_by_case: Mutex<BTreeMap<String, Vec<f64>>>,
}

impl References {
    /// The losses that a run should have.
    fn losses(&self, fixture: &Fixture, case: &Case, pipeline: &Pipeline, codes: &[StageCode]) -> Vec<f64> {
        if case.schedule.flushes() {
            return fixture.expected["loss64_sgd_m09_micro4"].to_f64();
        }
        let key = format!("{} {} {:?}", case.model, case.schedule, case.ranks);
        if let Some(losses) = self.losses_by_case.lock().unwrap().get(&key) {
            return losses.clone();
        }
        let delays = Delays {
            schedule: case.schedule,
            microbatches: microbatches(case.schedule),
            stages: pipeline.stages.iter().map(|stage| (stage.replicas, stage.cap)).collect(),
            stages_of: delayed::stages_of(codes),
        };
        let losses = delayed::losses(fixture, &delays, STEPS, momentum(fixture));
        self.losses_by_case.lock().unwrap().entry(key).or_insert(losses).clone()
    }
}

fn microbatches(schedule: Schedule) -> u32 {
    if schedule.is_round_robin() { 1 } else { 4 }
}

/// The largest relative difference of a loss.
fn train_case(fixture: &Fixture, case: &Case, devices: &[Arc<dyn Device>], references: &References) -> f64 {
    let kind = case.schedule;
    let chunks = if kind.has_chunks() { 2 } else { 1 };
    let replicas: Vec<u32> = (0..chunks).flat_map(|_| case.ranks.iter().copied()).collect();
    let level = |r: u32| if r > 1 { case.zero } else { 0 };
    let shape = |r: &u32| StageSpec { zero: level(*r), ..StageSpec::new(*r, f64::from(*r), 2.0 * f64::from(*r)) };
    let pipeline = Pipeline::chain(replicas.iter().map(shape).collect());
    let pipeline = match kind {
        _ if kind.is_on_a_v() => pipeline.folded(),
        _ if kind.has_chunks() => pipeline.looped(case.ranks.len() as u32),
        _ => pipeline,
    };
    let count = StepCount { minibatches: STEPS, microbatches: microbatches(kind) };
    let Batch::Symbol { name, .. } = &fixture.model.batch else {
        panic!("the batch is fixed: {:?}", fixture.model.batch)
    };
    let rows = fixture.batch / count.microbatches as usize;
    let dims = BTreeMap::from([(name.clone(), rows as i64)]);
    let settings = Settings::new(dims, Loss::CrossEntropy, kind, count);
    let stages = stages_of(fixture, replicas.len());
    let generate = |pipeline: &Pipeline| schedule(kind, pipeline, count);
    let machine = (case.tensor > 1).then(|| build_machine(case.tensor));
    let (splits, machine) = (kind.splits_backward(), machine.as_ref());
    let target = RunTarget { device: &*devices[0], splits, program: &generate, machine };
    let prepared = prepare_with(&fixture.model.graph, &stages, pipeline, &settings, target).unwrap();
    let dataset = Dataset::new(fixture.arrays.clone(), &feeds(&prepared.codes), rows).unwrap();
    let batches =
        Batches::new(dataset, fixture.batch, count.microbatches as usize, STEPS as usize, RowOrder::InOrder).unwrap();
    let (learning_rate, momentum) = momentum(fixture);
    let sgd = Optimizer::from(Rule::Sgd { learning_rate, momentum, nesterov: false, weight_decay: 0.0 });
    let training = TrainJob {
        codes: &prepared.codes,
        program: &prepared.program,
        weights: &fixture.weights(),
        batches: &batches,
        optimizer: &sgd,
        policy: Policy::default(),
        keep_gradients: false,
    };
    let gpus = case.ranks.iter().sum::<u32>() as usize * case.tensor;
    let options = RunOptions { devices: devices[..gpus].to_vec(), ..RunOptions::default() };
    let trained = match case.tensor {
        1 => run(&training, options, &mut |_| {}).unwrap(),
        degree => {
            let sharding = (&prepared.layouts, degree);
            run_shared_in_group(&training, options, sharding, &mut |_| {}, None).unwrap().unwrap()
        }
    };
    let expected_losses = references.losses(fixture, case, &prepared.pipeline, &prepared.codes);
    max_relative_difference(&trained.losses, &expected_losses)
}

/// The largest relative difference of a loss.
pub fn max_relative_difference(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let difference =
        |(got, want): (&f64, &f64)| Some((got - want).abs() / want.abs()).filter(|difference| !difference.is_nan());
    got.iter().zip(want).map(|pair| difference(pair).unwrap_or(f64::INFINITY)).fold(0.0, f64::max)
}

/// Runs cases on the devices under test, two at a time, and prints a row for each model.
fn run_all(root: &Path, cases: &[Case], devices: &[Arc<dyn Device>]) {
    let fixtures: BTreeMap<&str, Fixture> =
        MODELS.iter().map(|model| (*model, load_fixture(root, model, "model_dynbatch.onnx"))).collect();
    let references = References { losses_by_case: Mutex::default() };
    let (next_case, results) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(case) = cases.get(next_case.fetch_add(1, Ordering::Relaxed)) {
                    let difference = train_case(&fixtures[case.model], case, devices, &references);
                    println!("{difference:.1e}: {case}");
                    results.lock().unwrap().push((difference, case));
                }
            });
        }
    });
    let results = results.into_inner().unwrap();
    println!("| model | runs | worst relative difference of a loss | in |\n| --- | --- | --- | --- |");
    for model in MODELS {
        let model_results: Vec<_> = results.iter().filter(|(_, case)| case.model == model).collect();
        if let Some((difference, case)) = model_results.iter().max_by(|left, right| left.0.total_cmp(&right.0)) {
            println!("| {model} | {} | {difference:.1e} | {case} |", model_results.len());
        }
    }
    assert_eq!(results.len(), cases.len());
    let failures: Vec<String> = results
        .iter()
        .filter(|(difference, _)| *difference > MAX_DIFFERENCE)
        .map(|(difference, case)| format!("{case}: {difference:.1e}"))
        .collect();
    assert!(failures.is_empty(), "{failures:#?}");
}

/// A sample of the runs, or all with `PIPEC_LARGE`.
#[test]
fn cases_on_four_devices() {
    let devices = under_test();
    let Some(root) = data("parity").filter(|_| devices.len() == GPUS) else { return };
    let all_cases: Vec<Case> = MODELS.into_iter().flat_map(cases).collect();
    // The stride and the number of runs of a schedule have no common divisor.
    let stride = if std::env::var_os("PIPEC_LARGE").is_some() { 1 } else { 47 };
    run_all(&root, &all_cases.into_iter().step_by(stride).collect::<Vec<_>>(), &devices);
}

#[test]
fn schedules_zero_and_tensor_parallelism_train_like_pytorch_on_simulated_gpus() {
    let Some(driver) = driver().filter(|_| data("parity").is_some()) else { return };
    if std::env::var_os("PIPEC_TEST_DEVICES").is_some() {
        return;
    }
    let mut command = on_simulated_gpus(std::env::current_exe().unwrap(), driver);
    command.args(["parity_matrix::cases_on_four_devices", "--exact", "--nocapture"]);
    command.env("PIPEC_TEST_DEVICES", "cuda:0,cuda:1,cuda:2,cuda:3").env("PIPEC_SIM_DEVICES", GPUS.to_string());
    let output = command.env("PIPEC_SIM_SEED", "1").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    print!("{text}");
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}
