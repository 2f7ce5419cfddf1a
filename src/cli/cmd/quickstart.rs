//! `pipec quickstart`: an end-to-end demo on a small model and the bundled digits, on this machine's CPU.
//!
//! ```text
//! model.onnx --profile--> profile.json --partition--> the planner's choice, then --stages 2,1,1 --> plan.json
//!            --train over 4 workers--> weights.safetensors, metrics.jsonl, trace.json --eval--> test accuracy
//! ```

use crate::cli::args::named;
use crate::cli::cmd::{eval, profile};
use crate::cli::screen::Screen;
use crate::cli::shell::word;
use crate::cli::{prediction, stage_table};
use clap::Args;
use compiler::export::trace::Trace;
use compiler::export::trace::encode::encode;
use compiler::graph::hash::sha256;
use compiler::pass::loss::Loss;
use compiler::plan::Plan;
use compiler::plan::digest::to_json_with_digest;
use compiler::plan::problem::Recomputation;
use compiler::plan::schedule::Schedule;
use compiler::profile::Profile;
use compiler::profile::read::to_json;
use compiler::tensor::Tensor;
use compiler::text::quantity;
use models::digits::{self, SAMPLE, Split};
use models::zoo;
use pipec::costs::{self, Costs, PrecisionChoice, Times};
use pipec::error::Error;
use pipec::files::output;
use pipec::loss::CountedLoss;
use pipec::model::{self, ImportRequest, LoadedModel};
use pipec::plan::from_costs::solve;
use pipec::plan::optimizer;
use pipec::plan::request::PlanOptions;
use pipec::profile::{MeasuredGraph, measure_graph};
use pipec::train::metrics::train_with_metrics;
use pipec::train::prepare;
use pipec::train::request::{DataInput, TrainRequest};
use pipec::train::task::{Data, HeldOut, Length, Task};
use profiler::machine;
use profiler::measure::Settings;
use runtime::data::RowOrder;
use runtime::device::cpu::device::cpu;
use runtime::exec::evaluate;
use runtime::optim::optimizer::{Optimizer, Rule};
use runtime::optim::policy::Policy;
use serde_json::json;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread::available_parallelism;
use std::time::Instant;

const WORKERS: u32 = 4;
const BATCH: u64 = 32;

/// The layout that is trained: three stages, the first with two replicas.
const STAGES: [u32; 3] = [2, 1, 1];

/// Arguments of `pipec quickstart`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  pipec quickstart\n  pipec quickstart --model mlp --dir tour")]
pub struct Arguments {
    /// The model
    #[arg(long, value_parser = named(MODELS), value_name = "MODEL", default_value = "cnn")]
    model: (&'static str, u32),
    /// Output folder, created if missing
    #[arg(long, value_name = "FOLDER", default_value = "pipec-quickstart")]
    dir: PathBuf,
    /// Seed of the weights, the data split and the data order
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Number of epochs [default: 20 for cnn, 120 for mlp]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    epochs: Option<u32>,
    /// Learning rate [default: 0.03]
    #[arg(long, value_name = "X")]
    lr: Option<f64>,
}

/// The models, by name, with the epochs in which this asynchronous pipeline reaches the accuracy of PyTorch.
const MODELS: &[(&str, &str, (&str, u32))] = &[
    ("cnn", "A residual network with batch normalisation", ("cnn", 20)),
    ("mlp", "A multilayer perceptron with three layers", ("mlp", 120)),
];

/// The learning rate with which it does.
const LEARNING_RATE: f64 = 0.03;

pub fn run(arguments: Arguments, screen: &Screen) -> Result<(), Error> {
    let started = Instant::now();
    let folder = &arguments.dir;
    fs::create_dir_all(folder).map_err(|error| Error::file("create the folder", folder, error))?;
    let path = |name: &str| folder.join(name);
    let options = zoo::Options { seed: arguments.seed, ..zoo::Options::default() };
    let (model_name, epochs) = arguments.model;
    let built = zoo::build(model_name, &options).map_err(|error| Error::bug(&error.to_string()))?;
    output::write(&path("model.onnx"), &zoo::to_bytes(&built.model))?;
    let loaded = model::load(&path("model.onnx"), &ImportRequest::default(), screen)?;
    let digits = digits::load(arguments.seed);

    screen.text("1. Profile: measure every op of the model on this CPU\n");
    let (measured, sha256) = measure_model(&loaded, &path("profile.json"), screen)?;
    screen.text(&profile::show(&measured, screen.width()));

    screen.text(&format!("\n2. Partition over {WORKERS} workers: the planner's choice\n"));
    let profile_file = path("profile.json");
    let costs = || -> Result<Costs, Error> {
        let cluster = machine::cluster_of_this_cpu(WORKERS)
            .map_err(|error| Error::input("cannot use this CPU").because(error))?;
        let times = Times::Profile(profile_file.clone(), sha256.clone(), Box::new(measured.clone()));
        costs::assemble(&loaded, BATCH, cluster, times, PrecisionChoice::Usual, CountedLoss::Default)
    };
    let model_file = path("model.onnx");
    let plan_with = |options: &PlanOptions| solve(&model_file, costs()?, options).map(|planned| planned.plan);
    let options = PlanOptions {
        optimizer: optimizer::Optimizer::SgdMomentum,
        recompute: Recomputation::Never,
        seed: arguments.seed,
        ..PlanOptions::default()
    };
    let free_plan = plan_with(&options)?;
    show(&free_plan, screen);

    let pinned = STAGES.map(|replicas| replicas.to_string()).join(",");
    screen.text(&format!(
        "\n3. To demonstrate a pipeline, training uses a fixed layout: --stages {pinned}, {} programs\n",
        Schedule::OneFOneBRr.name()
    ));
    let plan = plan_with(&PlanOptions { replicas: Some(STAGES.to_vec()), ..options })?;
    show(&plan, screen);
    let json = to_json_with_digest(&plan).map_err(|error| Error::bug(&error.to_string()))?;
    output::write(&path("plan.json"), json.as_bytes())?;

    let (epochs, lr) = (arguments.epochs.unwrap_or(epochs), arguments.lr.unwrap_or(LEARNING_RATE));
    screen.text(&format!(
        "\n4. Train: {WORKERS} workers, weight stashing, {} of {} digits\n",
        quantity::plural(u64::from(epochs), "epoch", "epochs"),
        digits.train.rows
    ));
    let initial = loaded.weights()?;
    let optimizer = Optimizer::from(Rule::Sgd { learning_rate: lr, momentum: 0.9, nesterov: false, weight_decay: 0.0 });
    let request = TrainRequest { seed: arguments.seed, ..TrainRequest::new(&model_file, DataInput::Synthetic) };
    let mut task = Task {
        request: &request,
        loaded: &loaded,
        weights: &initial,
        plan: &plan,
        schedule: Schedule::OneFOneBRr,
        custom_schedule: None,
        loss: Some(Loss::CrossEntropy),
        class_dim: None,
        dtype: None,
        unbiased: false,
        policy: Policy::default(),
        batch: BATCH,
        microbatches: 1,
        length: Length::Epochs(epochs),
        data: Data::Arrays(arrays(&digits.train)),
        held_out: HeldOut::Nothing,
        order: RowOrder::Shuffled { seed: arguments.seed },
        optimizer: &optimizer,
        checkpoint_settings: None,
        tensor: 1,
        devices: &[runtime::device::cpu::device::cpu()],
        has_processes: false,
    };
    let prepared = prepare::prepare(&mut task)?;
    let predicted = prepared.predict_throughput(plan.cluster.device.cores);
    let result = train_with_metrics(&task, &prepared, Some(&path("metrics.jsonl")), None, screen)?
        .expect("a process that runs all workers returns all results");
    output::write_tensors(&path("weights.safetensors"), &result.trained.weights, "weights")?;
    output::write(&path("trace.json"), &encode(&Trace::training(&result.tracks), "trace.json"))?;
    let (first, last) = (result.trained.losses.first(), result.trained.losses.last());
    screen.text(&format!(
        "{} in {}: loss {} to {}\n",
        quantity::plural(u64::from(prepared.steps), "step", "steps"),
        quantity::time(result.trained.seconds * 1e6),
        quantity::short(first.copied().unwrap_or(0.0)),
        quantity::short(last.copied().unwrap_or(0.0)),
    ));

    screen.text("\n5. Test\n");
    let accuracy = test_accuracy(&loaded, &result.trained.weights, &digits.test)?;
    let cores = plan.cluster.device.cores.unwrap_or(1);
    let expected = predicted.map_or("no".to_string(), quantity::samples);
    screen.text(&format!(
        "accuracy on {} held-out digits: {:.2} %\n\
         throughput: predicted {expected} samples/s for {WORKERS} workers on {}, measured {} samples/s\n\
         files in {}: model.onnx profile.json plan.json metrics.jsonl trace.json weights.safetensors\n",
        digits.test.rows,
        accuracy * 100.0,
        quantity::plural(u64::from(cores), "core", "cores"),
        quantity::samples(result.samples_per_s),
        folder.display(),
    ));
    screen.next(&format!(
        "next: pipec simulate {} --chart\n      open {} in https://ui.perfetto.dev\n",
        word(&path("plan.json")),
        path("trace.json").display()
    ));
    screen.json(&json!({
        "folder": folder.display().to_string(),
        "model": model_name,
        "free_choice": {"replicas": free_plan.stages.iter().map(|s| s.replicas).collect::<Vec<_>>(), "predicted": free_plan.predicted},
        "trained": {"replicas": STAGES, "predicted": plan.predicted},
        "baselines": plan.baselines,
        "steps": prepared.steps,
        "last_loss": result.trained.losses.last(),
        "accuracy": accuracy,
        "predicted_samples_per_s": predicted,
        "measured_samples_per_s": result.samples_per_s,
        "seconds": started.elapsed().as_secs_f64(),
    }));
    result.failed.into_iter().next().map_or(Ok(()), Err)
}

fn measure_model(loaded: &LoadedModel, path: &Path, screen: &Screen) -> Result<(Profile, String), Error> {
    let subject =
        MeasuredGraph { loaded, graph: &loaded.with_samples(BATCH)?, micro_batch: BATCH, loss: CountedLoss::Default };
    let cores = available_parallelism().map_or(1, |cores| cores.get() as u32);
    let settings = Settings { workers: WORKERS.min(cores), ..Settings::default() };
    let measured = measure_graph(&subject, &cpu(), &settings, true, screen)?;
    let json = to_json(&measured).map_err(|error| Error::bug(&error.to_string()))?;
    output::write(path, json.as_bytes())?;
    Ok((measured, sha256(json.as_bytes())))
}

fn show(plan: &Plan, screen: &Screen) {
    if let Some(verdict) = prediction::verdict(plan) {
        screen.text(&verdict);
    }
    let prediction = screen.wrap(&prediction::prediction(plan));
    screen.text(&format!("{}\n{prediction}", stage_table::stages(plan, screen.width())));
    plan.warnings.iter().for_each(|warning| screen.warn(warning));
}

fn arrays(split: &Split) -> BTreeMap<String, Tensor> {
    let shape: Vec<usize> = [split.rows].into_iter().chain(SAMPLE).collect();
    let x = Tensor::from_f32(&shape, &split.x);
    BTreeMap::from([("x".to_string(), x), ("target".to_string(), Tensor::from_i64(&[split.rows], &split.y))])
}

fn test_accuracy(loaded: &LoadedModel, trained: &BTreeMap<String, Tensor>, test: &Split) -> Result<f64, Error> {
    let test_arrays = arrays(test);
    let graph = loaded.with_dims(&eval::sizes(&loaded.model.graph, &test_arrays))?;
    let outputs = evaluate::evaluate(&graph, true, &test_arrays, trained)
        .map_err(|error| Error::input("cannot test the trained model").because(error))?;
    let labels = test_arrays["target"].to_f64();
    let accuracy = outputs.values().next().and_then(|logits| eval::accuracy(logits, &labels));
    accuracy.ok_or_else(|| Error::bug("the model of the quickstart has no logits"))
}
