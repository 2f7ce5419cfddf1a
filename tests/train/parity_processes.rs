//! The `pipec` command on two, three and four simulated GPUs, against PyTorch's losses of ten steps: processes over a
//! simulated NCCL have the bits of threads, and random delays change none. Needs the shared data.

use crate::delayed;
use crate::delayed::{Delays, stages_of};
use crate::nccl::has_collectives;
use crate::parity::{Fixture, load_fixture};
use crate::parity_matrix::{MAX_DIFFERENCE, MODELS, max_relative_difference, momentum};
use crate::support::shared::data;
use crate::support::simulated_gpus::{driver, on_simulated_gpus};
use compiler::graph::order;
use compiler::import::import::Batch;
use compiler::pass::loss::Loss;
use compiler::plan::schedule::Schedule;
use compiler::schedule::Pipeline;
use compiler::schedule::semantics::StepCount;
use runtime::data::weights::write;
use runtime::train::prepare::{Settings, prepare};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

const STEPS: u32 = 10;

/// A plan of a model, with one or two replicas of each rank.
struct Case {
    model: &'static str,
    schedule: Schedule,
    ranks: Vec<u32>,
    zero: u32,
    tensor: u32,
}

fn cases(model: &'static str) -> Vec<Case> {
    let is_supported = |schedule: &Schedule| schedule.trains() && schedule.stashes();
    let cases_of = |schedule: Schedule| {
        let single_gpus: [(&[u32], u32); 7] =
            [(&[1, 1], 0), (&[1, 1, 1], 0), (&[1, 1, 1, 1], 0), (&[2, 2], 0), (&[2, 2], 1), (&[2, 2], 2), (&[2, 2], 3)];
        let pairs: [(&[u32], u32); 3] = [(&[1, 1], 0), (&[2], 1), (&[2], 3)];
        let case = move |tensor| {
            move |(ranks, zero): (&[u32], u32)| Case { model, schedule, ranks: ranks.to_vec(), zero, tensor }
        };
        // A schedule with several stages per rank needs several ranks.
        let pairs = pairs.into_iter().filter(move |(ranks, _)| ranks.len() > 1 || !schedule.has_chunks());
        single_gpus.into_iter().map(case(1)).chain(pairs.map(case(2)))
    };
    Schedule::GENERATED.into_iter().filter(is_supported).flat_map(cases_of).collect()
}

fn run(folder: &Path, mut command: Command, arguments: &str) {
    let arguments: Vec<&str> = arguments.split_whitespace().collect();
    let output = command.current_dir(folder).args(&arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A folder with the model, its data, and a plan.
fn write_plan(root: &Path, fixture: &Fixture, case: &Case) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    fs::copy(root.join(case.model).join("model_dynbatch.onnx"), path.join("model.onnx")).unwrap();
    write(&path.join("data.safetensors"), &fixture.arrays).unwrap();
    let chunks = if case.schedule.has_chunks() { 2 } else { 1 };
    let stages: Vec<String> = (0..chunks).flat_map(|_| case.ranks.iter().map(u32::to_string)).collect();
    let (rows, batch) = match case.schedule.is_round_robin() {
        true => (fixture.batch, String::new()),
        false => (fixture.batch / 4, format!("--batch {}", fixture.batch)),
    };
    let plan = format!(
        "partition model.onnx -o plan.json --gpus {} --stages {} --schedule {} --micro-batch {rows} {batch} --zero {} \
         --precision fp32 --momentum 0.9 --tensor {}{}",
        case.ranks.iter().sum::<u32>() * case.tensor,
        stages.join(","),
        case.schedule,
        case.zero,
        case.tensor,
        // The launches of a GPU take longer than the kernels of these models, so a plan for GPUs would shard nothing.
        if case.tensor > 1 { " --profile analytic:cpu" } else { "" },
    );
    run(path, Command::new(env!("CARGO_BIN_EXE_pipec")), &plan);
    folder
}

/// Losses and the bytes of the weights after ten steps.
fn train(fixture: &Fixture, folder: &Path, libraries: &Path, extra_flags: &str, seed: u32) -> (Vec<f64>, Vec<u8>) {
    let mut command = on_simulated_gpus(env!("CARGO_BIN_EXE_pipec"), libraries);
    command.env("PIPEC_SIM_DEVICES", "4").env("PIPEC_SIM_SEED", seed.to_string());
    let (lr, momentum) = momentum(fixture);
    let train = format!(
        "train model.onnx --plan plan.json --data data.safetensors --batch {} --steps {STEPS} --optimizer sgd --lr {lr} \
         --momentum {momentum} --device cuda --metrics metrics.jsonl --save weights.safetensors -q {extra_flags}",
        fixture.batch
    );
    let _ = fs::remove_file(folder.join("metrics.jsonl"));
    run(folder, command, &train);
    let metrics = fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
    let lines = metrics.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let losses = lines.filter(|line| line.get("step").is_some()).map(|line| line["loss"].as_f64().unwrap());
    (losses.collect(), fs::read(folder.join("weights.safetensors")).unwrap())
}

/// The losses that the plan should have.
fn reference_losses(fixture: &Fixture, folder: &Path, case: &Case) -> Vec<f64> {
    if case.schedule.flushes() {
        return fixture.expected["loss64_sgd_m09_micro4"].to_f64();
    }
    let plan: Value = serde_json::from_str(&fs::read_to_string(folder.join("plan.json")).unwrap()).unwrap();
    let number = |value: &Value| value.as_u64().unwrap() as u32;
    let mut stages = vec![0; order::numbered(&fixture.model.graph).len()];
    for (index, stage) in plan["stages"].as_array().unwrap().iter().enumerate() {
        for range in stage["ops"].as_array().unwrap() {
            stages[number(&range[0]) as usize..number(&range[1]) as usize].fill(index);
        }
    }
    let in_flight: Vec<u32> = plan["schedule"]["in_flight"].as_array().unwrap().iter().map(number).collect();
    let microbatches = if case.schedule.is_round_robin() { 1 } else { 4 };
    let Batch::Symbol { name, .. } = &fixture.model.batch else { panic!("the batch is fixed") };
    let dims = BTreeMap::from([(name.clone(), (fixture.batch / microbatches as usize) as i64)]);
    let count = StepCount { minibatches: STEPS, microbatches };
    let settings = Settings::new(dims, Loss::CrossEntropy, case.schedule, count);
    let pipeline = Pipeline::balanced(&case.ranks, 2.0).with_caps(&in_flight);
    let codes = prepare(&fixture.model.graph, &stages, pipeline, &settings).unwrap().codes;
    let delays = Delays {
        schedule: case.schedule,
        microbatches,
        stages: case.ranks.iter().copied().zip(in_flight).collect(),
        stages_of: stages_of(&codes),
    };
    delayed::losses(fixture, &delays, STEPS, momentum(fixture))
}

/// A sample of the plans, or all with `PIPEC_LARGE`.
#[test]
fn processes_over_nccl_train_like_pytorch() {
    let Some((root, driver)) = data("parity").zip(driver()) else { return };
    let stride = if std::env::var_os("PIPEC_LARGE").is_some() { 1 } else { 43 };
    let selected_cases = MODELS.into_iter().flat_map(cases).step_by(stride);
    let mut worst_by_model: BTreeMap<&str, (usize, f64)> = BTreeMap::new();
    for case in selected_cases {
        let Case { model, schedule, ranks, zero, tensor } = &case;
        let label = format!("{model}, {schedule}, replicas {ranks:?}, ZeRO {zero}, tensor {tensor}");
        let fixture = load_fixture(&root, model, "model_dynbatch.onnx");
        let folder = write_plan(&root, &fixture, &case);
        assert_eq!(has_collectives(folder.path()), *tensor > 1, "{label}");
        let threads = train(&fixture, folder.path(), driver, "", 1);
        let processes = train(&fixture, folder.path(), driver, "--processes --nccl", 2);
        assert!(threads == processes, "{label}: other bits in processes");
        let difference = max_relative_difference(&processes.0, &reference_losses(&fixture, folder.path(), &case));
        println!("{difference:.1e}: {label}");
        assert!(difference <= MAX_DIFFERENCE, "{label}: {difference:.1e}");
        let (runs, max_difference) = worst_by_model.entry(model).or_default();
        (*runs, *max_difference) = (*runs + 1, max_difference.max(difference));
    }
    println!("| model | plans | worst relative difference of a loss |\n| --- | --- | --- |");
    worst_by_model
        .iter()
        .for_each(|(model, (runs, max_difference))| println!("| {model} | {runs} | {max_difference:.1e} |"));
}

/// The GPT under 1F1B on four GPUs, with 200 seeds if `PIPEC_LARGE` is set.
#[test]
fn delays_of_four_gpus_change_no_bit() {
    let Some((root, driver)) = data("parity").zip(driver()) else { return };
    let seeds = if std::env::var_os("PIPEC_LARGE").is_some() { 200 } else { 2 };
    let fixture = load_fixture(&root, "gpt", "model_dynbatch.onnx");
    let case = Case { model: "gpt", schedule: Schedule::OneFOneB, ranks: vec![1; 4], zero: 0, tensor: 1 };
    let folder = write_plan(&root, &fixture, &case);
    let expected = train(&fixture, folder.path(), driver, "", 0);
    let difference = max_relative_difference(&expected.0, &reference_losses(&fixture, folder.path(), &case));
    assert!(difference <= MAX_DIFFERENCE, "{difference:.1e}");
    for extra_flags in ["", "--processes --nccl"] {
        for seed in 1..=seeds {
            let result = train(&fixture, folder.path(), driver, extra_flags, seed);
            assert!(result == expected, "seed {seed} {extra_flags}: other bits");
        }
        println!("{seeds} seeds {extra_flags}: no difference, {difference:.1e} from PyTorch");
    }
}
