//! Every schedule, optimizer and precision gives the same weights on simulated GPUs as on the CPU, up to rounding.

use crate::support::simulated_gpus::{driver, on_simulated_gpus};
use compiler::tensor::Tensor;
use runtime::data::weights::read;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

/// Runs `pipec` in a folder.
fn run(folder: &Path, mut command: Command, arguments: &[&str]) {
    let output = command.current_dir(folder).args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn pipec() -> Command {
    Command::new(env!("CARGO_BIN_EXE_pipec"))
}

/// The weights after some steps on devices.
fn train_weights(folder: &Path, model: &str, flags: &str, devices: &str) -> BTreeMap<String, Tensor> {
    let mut command = match devices {
        "cpu" => pipec(),
        _ => on_simulated_gpus(env!("CARGO_BIN_EXE_pipec"), driver().expect("the caller has it")),
    };
    command.env("PIPEC_SIM_SEED", "7");
    let common = ["train", model, "--batch", "8", "--synthetic-data", "--steps", "3", "--save", "w.safetensors"];
    let flags: Vec<&str> = flags.split_whitespace().collect();
    run(folder, command, &[&common[..], &flags, &["--device", devices]].concat());
    read(&folder.join("w.safetensors")).unwrap()
}

/// Compares weights on the CPU and on two GPUs. Each tensor may differ by this part of its largest value.
fn check_agreement(model: &str, flags: &[&str], tolerance: f64) {
    if driver().is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let model: Vec<&str> = model.split_whitespace().collect();
    run(folder.path(), pipec(), &[&["zoo"], &model[..], &["-o", "model.onnx"]].concat());
    for flags in flags {
        let [on_cpu, on_gpus] =
            ["cpu", "cuda:0,1"].map(|devices| train_weights(folder.path(), "model.onnx", flags, devices));
        assert!(on_cpu.keys().eq(on_gpus.keys()), "{flags}");
        for (name, weight) in &on_cpu {
            let (cpu_values, gpu_values) = (weight.to_f64(), on_gpus[name].to_f64());
            let largest = cpu_values.iter().fold(1e-3f64, |largest, value| largest.max(value.abs()));
            let difference =
                cpu_values.iter().zip(&gpu_values).fold(0.0f64, |difference, (a, b)| difference.max((a - b).abs()));
            assert!(
                difference <= tolerance * largest,
                "{flags}: {name} differs by {difference}, its largest value is {largest}"
            );
        }
    }
}

#[test]
fn schedules_agree() {
    let flags = [
        "gpipe",
        "1f1b",
        "interleaved",
        "bfs",
        "zb-h1",
        "zb-h2",
        "zbv",
        "dualpipev",
        "2bw",
        "1f1b-rr",
        "1f1b-rr-vsync",
    ]
    .map(|schedule| {
        let microbatches = if schedule.starts_with("1f1b-rr") { "1" } else { "4" };
        let has_chunks = ["interleaved", "bfs", "zbv", "dualpipev"].contains(&schedule);
        let stages = if has_chunks { "1,1,1,1" } else { "1,1" };
        format!(
            "--schedule {schedule} --stages {stages} --microbatches {microbatches} --optimizer sgd-momentum --lr 0.05"
        )
    });
    check_agreement("mlp", &flags.each_ref().map(String::as_str), 1e-5);
}

#[test]
fn treatments_of_stale_weights_agree() {
    let flags = ["stash", "vertical-sync", "predict", "pipemare", "none"]
        .map(|name| format!("--schedule 1f1b-rr --staleness {name} --stages 1,1 --optimizer adam --lr 0.001"));
    check_agreement("mlp", &flags.each_ref().map(String::as_str), 1e-4);
}

#[test]
fn optimizers_agree() {
    let flags = ["sgd", "sgd-momentum", "adam", "adamw", "rmsprop", "adagrad"]
        .map(|name| format!("--stages 1,1 --schedule 1f1b --microbatches 2 --optimizer {name} --lr 0.001"));
    check_agreement("mlp", &flags.each_ref().map(String::as_str), 1e-4);
}

#[test]
fn precisions_replicas_and_processes_agree() {
    let base = "--schedule 1f1b --microbatches 4 --optimizer sgd --lr 0.05";
    let flags = ["--stages 2", "--stages 2,1", "--stages 2,1 --processes", "--stages 1,1 --clip-norm 0.1"]
        .map(|extra| format!("{base} {extra}"));
    check_agreement("residual-cnn", &flags.each_ref().map(String::as_str), 1e-4);
    let flags = ["bf16", "fp16", "tf32"].map(|name| format!("{base} --stages 1,1 --precision {name}"));
    check_agreement("gpt", &flags.each_ref().map(String::as_str), 2e-2);
}

#[test]
fn tensor_groups_agree() {
    let base = "--schedule 1f1b --microbatches 2 --optimizer sgd --lr 0.05";
    let flags = ["--stages 1,1", "--stages 1,1 --tensor 2"].map(|extra| format!("{base} {extra}"));
    check_agreement("gpt --dropout 0.2", &flags.each_ref().map(String::as_str), 1e-4);
    check_agreement("moe", &[&format!("{base} --stages 1 --tensor 2")], 1e-4);
    check_agreement("llama", &[&format!("{base} --stages 1 --tensor 2 --precision bf16")], 2e-2);
}
