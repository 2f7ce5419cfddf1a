//! The `pipec` command on simulated GPUs: no seed of delays changes a bit, steps allocate nothing, and injected failures
//! end runs without harm.

use crate::support::simulated_gpus::{driver, on_simulated_gpus};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Output;

const PIPELINE: [&str; 12] = [
    "--stages",
    "1,1",
    "--schedule",
    "1f1b",
    "--microbatches",
    "4",
    "--batch",
    "8",
    "--optimizer",
    "adam",
    "--synthetic-data",
    "--steps",
];

/// Trains a small model in `folder` for some steps, with variables of the simulated driver.
fn train(folder: &Path, steps: &str, flags: &[&str], variables: &[(&str, &str)]) -> Output {
    let driver = driver().expect("the caller has it");
    let mut command = on_simulated_gpus(env!("CARGO_BIN_EXE_pipec"), driver);
    command.current_dir(folder).args(["train", "model.onnx"]).args(PIPELINE).arg(steps).args(flags);
    command.envs(variables.iter().copied()).env("PIPEC_SIM_STATS", "stats.json").output().unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

fn stats(folder: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(folder.join("stats.json")).unwrap()).unwrap()
}

/// A folder with the model; `None` if GPUs cannot be simulated.
fn model_folder(model: &str) -> Option<tempfile::TempDir> {
    let folder = driver().map(|_| tempfile::tempdir().unwrap())?;
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_pipec"))
        .args(["zoo", model, "-o", "model.onnx"])
        .current_dir(folder.path())
        .output()
        .unwrap();
    assert!(output.status.success());
    Some(folder)
}

#[test]
fn delays_change_no_bit() {
    let Some(folder) = model_folder("gpt") else { return };
    let root = folder.path();
    let seeds = if std::env::var_os("PIPEC_LARGE").is_some() { 200 } else { 4 };
    for extra in [&[][..], &["--tensor", "2"], &["--clip-norm", "1", "--dtype", "bf16"]] {
        let mut expected: Option<Vec<u8>> = None;
        for seed in 0..seeds {
            let flags = [&["--device", "cuda:0,1", "--save", "w.safetensors"][..], extra].concat();
            let output = train(root, "3", &flags, &[("PIPEC_SIM_SEED", &seed.to_string())]);
            assert!(output.status.success(), "{extra:?}, seed {seed}: {}", text(&output));
            let weights = fs::read(root.join("w.safetensors")).unwrap();
            let expected = expected.get_or_insert_with(|| weights.clone());
            assert!(*expected == weights, "{extra:?}: seed {seed} gives other weights");
        }
    }
}

#[test]
fn steps_are_alike_and_allocate_nothing() {
    let Some(folder) = model_folder("mlp") else { return };
    let root = folder.path();
    let counts = ["4", "8", "12"].map(|steps| {
        let output = train(root, steps, &["--device", "cuda:0,1"], &[]);
        assert!(output.status.success(), "{}", text(&output));
        (stats(root), text(&output))
    });
    let counter = |index: usize, name: &str| counts[index].0[name].as_u64().unwrap();
    for name in ["launches", "library_products", "host_to_device", "device_to_device"] {
        assert_eq!(counter(1, name) - counter(0, name), counter(2, name) - counter(1, name), "{name} of four steps");
    }
    assert!(counter(0, "library_products") > 0);
    // Losses are read late: the host waits at most for that of two steps ago.
    let waits = counter(2, "synchronisations").saturating_sub(counter(1, "synchronisations"));
    assert!(waits <= 4 * 4, "{waits} in four steps");
    assert_eq!(counter(2, "allocations"), counter(0, "allocations"));
    assert_eq!(counts[2].0["peak_bytes"], counts[0].0["peak_bytes"]);
}

/// Trains replicas of one stage, on four simulated GPUs.
fn train_replicas(folder: &Path, flags: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = on_simulated_gpus(env!("CARGO_BIN_EXE_pipec"), driver().expect("the caller has it"));
    let command_flags = ["train", "model.onnx", "--optimizer", "adam"];
    command.current_dir(folder).args(command_flags).arg("--synthetic-data").args(flags);
    command.env("PIPEC_SIM_DEVICES", "4").env("PIPEC_SIM_STATS", "stats.json");
    let output = command.envs(variables.iter().copied()).output().unwrap();
    assert!(output.status.success(), "{flags:?}, {variables:?}: {}", text(&output));
    output
}

#[test]
fn delays_change_no_bit_of_what_replicas_reduce() {
    let Some(folder) = model_folder("gpt") else { return };
    let root = folder.path();
    let seeds = if std::env::var_os("PIPEC_LARGE").is_some() { 100 } else { 2 };
    // With two micro-batches, one of three replicas has none.
    for (stages, batch, zero) in [("2", "8", "0"), ("3", "4", "0"), ("3", "8", "1"), ("2,2", "8", "0")] {
        let mut plan = std::process::Command::new(env!("CARGO_BIN_EXE_pipec"));
        plan.current_dir(root).args([
            "partition",
            "model.onnx",
            "-o",
            "plan.json",
            "--gpus",
            "4",
            "--micro-batch",
            "2",
        ]);
        plan.args(["--stages", stages, "--batch", batch, "--zero", zero, "--schedule", "1f1b"]);
        let output = plan.output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        let mut expected: Option<Vec<u8>> = None;
        for seed in 0..=seeds {
            // The last run has all replicas on one GPU.
            let gpus = if seed == seeds { "cuda:0" } else { "cuda:0,1,2,3" };
            let flags = ["--plan", "plan.json", "--steps", "3", "--device", gpus, "--save", "w.safetensors"];
            train_replicas(root, &flags, &[("PIPEC_SIM_SEED", &seed.to_string())]);
            let weights = fs::read(root.join("w.safetensors")).unwrap();
            let expected = expected.get_or_insert_with(|| weights.clone());
            assert!(*expected == weights, "{stages} replicas, ZeRO {zero}: seed {seed} gives other weights");
        }
    }
}

#[test]
fn replicas_reduce_in_their_own_memory() {
    let driver = driver();
    let Some(folder) = driver.map(|_| tempfile::tempdir().unwrap()) else { return };
    let root = folder.path();
    let zoo = ["zoo", "mlp", "--hidden", "1024", "-o", "model.onnx"];
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_pipec")).args(zoo).current_dir(root).output().unwrap();
    assert!(output.status.success());
    let model = fs::metadata(root.join("model.onnx")).unwrap().len();
    for stages in ["2", "3"] {
        let counts = ["3", "6"].map(|steps| {
            let flags =
                ["--stages", stages, "--schedule", "1f1b", "--batch", "12", "--microbatches", "6", "--steps", steps];
            train_replicas(root, &[&flags[..], &["--device", "cuda:0,1,2,3"]].concat(), &[]);
            stats(root)
        });
        assert_eq!(counts[0]["allocations"], counts[1]["allocations"], "{stages} replicas");
        assert_eq!(counts[0]["peak_bytes"], counts[1]["peak_bytes"], "{stages} replicas");
        // Weights, their gradients, two tensors of optimizer state, and the gradients of one micro-batch.
        for peak in counts[0]["peak_bytes"].as_array().unwrap() {
            let peak = peak.as_u64().unwrap();
            assert!(peak <= 5 * model * 101 / 100, "{peak} bytes with {model} bytes of weights");
        }
    }
}

#[test]
fn failures_of_a_gpu_end_a_run_and_leave_its_checkpoint() {
    let Some(folder) = model_folder("gpt") else { return };
    let root = folder.path();
    let gpus = ["--device", "cuda:0,1"];
    let baseline = train(root, "6", &[&gpus[..], &["--save", "whole.safetensors"]].concat(), &[]);
    assert!(baseline.status.success(), "{}", text(&baseline));
    let baseline = (fs::read(root.join("whole.safetensors")).unwrap(), stats(root));
    let points = if std::env::var_os("PIPEC_LARGE").is_some() { 100 } else { 8 };
    for (kind, counter) in [("memory", "allocations"), ("launch", "launches"), ("lost", "launches")] {
        let max_count = baseline.1[counter].as_u64().unwrap();
        for point in 0..points {
            let number = 1 + max_count * (2 * point + 1) / (2 * points);
            let fault = format!("{kind}:{number}");
            let checkpoints = format!("{kind}-{point}");
            let checkpoint_flags = ["--checkpoint-dir", &checkpoints, "--checkpoint-every", "1"];
            let output = train(root, "6", &[&gpus[..], &checkpoint_flags].concat(), &[("PIPEC_SIM_FAULT", &fault)]);
            let message = text(&output);
            assert!(!output.status.success(), "{fault}: {message}");
            assert!(message.contains("error: ") && message.contains("cuda:"), "{fault}: {message}");
            assert!(!message.contains("panicked") && !message.contains("bug in pipec"), "{fault}: {message}");
            assert!(output.status.code().is_some_and(|code| (1..=3).contains(&code)), "{fault}: {:?}", output.status);
            if root.join(&checkpoints).read_dir().is_ok_and(|mut entries| entries.next().is_some()) {
                let flags = ["--resume", "auto", "--save", "rest.safetensors"];
                let output = train(root, "6", &[&gpus[..], &checkpoint_flags, &flags].concat(), &[]);
                assert!(output.status.success(), "{fault}: {}", text(&output));
                assert!(
                    fs::read(root.join("rest.safetensors")).unwrap() == baseline.0,
                    "{fault}: other weights after it"
                );
            }
        }
    }
}
