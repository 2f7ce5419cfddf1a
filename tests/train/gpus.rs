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
fn train(folder: &Path, steps: &str, more: &[&str], variables: &[(&str, &str)]) -> Output {
    let driver = driver().expect("the caller has it");
    let mut command = on_simulated_gpus(env!("CARGO_BIN_EXE_pipec"), driver);
    command.current_dir(folder).args(["train", "model.onnx"]).args(PIPELINE).arg(steps).args(more);
    command.envs(variables.iter().copied()).env("PIPEC_SIM_STATS", "stats.json").output().unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

fn stats(folder: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(folder.join("stats.json")).unwrap()).unwrap()
}

/// A folder with the model; `None` if GPUs cannot be simulated.
fn folder(model: &str) -> Option<tempfile::TempDir> {
    let folder = driver().map(|_| tempfile::tempdir().unwrap())?;
    let made = std::process::Command::new(env!("CARGO_BIN_EXE_pipec"))
        .args(["zoo", model, "-o", "model.onnx"])
        .current_dir(folder.path())
        .output()
        .unwrap();
    assert!(made.status.success());
    Some(folder)
}

#[test]
fn delays_change_no_bit() {
    let Some(folder) = folder("gpt") else { return };
    let at = folder.path();
    let seeds = if std::env::var_os("PIPEC_LARGE").is_some() { 200 } else { 4 };
    for extra in [&[][..], &["--tensor", "2"], &["--clip-norm", "1", "--dtype", "bf16"]] {
        let mut first: Option<Vec<u8>> = None;
        for seed in 0..seeds {
            let more = [&["--device", "cuda:0,1", "--save", "w.safetensors"][..], extra].concat();
            let done = train(at, "3", &more, &[("PIPEC_SIM_SEED", &seed.to_string())]);
            assert!(done.status.success(), "{extra:?}, seed {seed}: {}", text(&done));
            let weights = fs::read(at.join("w.safetensors")).unwrap();
            let first = first.get_or_insert_with(|| weights.clone());
            assert!(*first == weights, "{extra:?}: seed {seed} gives other weights");
        }
    }
}

#[test]
fn steps_are_alike_and_allocate_nothing() {
    let Some(folder) = folder("mlp") else { return };
    let at = folder.path();
    let counts = ["4", "8", "12"].map(|steps| {
        let done = train(at, steps, &["--device", "cuda:0,1"], &[]);
        assert!(done.status.success(), "{}", text(&done));
        (stats(at), text(&done))
    });
    let of = |at: usize, name: &str| counts[at].0[name].as_u64().unwrap();
    for name in ["launches", "library_products", "host_to_device", "device_to_device"] {
        assert_eq!(of(1, name) - of(0, name), of(2, name) - of(1, name), "{name} of four steps");
    }
    assert!(of(0, "library_products") > 0);
    // Losses are read late: the host waits at most for that of two steps ago.
    let waits = of(2, "synchronisations").saturating_sub(of(1, "synchronisations"));
    assert!(waits <= 4 * 4, "{waits} in four steps");
    assert_eq!(of(2, "allocations"), of(0, "allocations"));
    assert_eq!(counts[2].0["peak_bytes"], counts[0].0["peak_bytes"]);
}

/// Trains replicas of one stage, on four simulated GPUs.
fn train_replicas(folder: &Path, more: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = on_simulated_gpus(env!("CARGO_BIN_EXE_pipec"), driver().expect("the caller has it"));
    let all = ["train", "model.onnx", "--optimizer", "adam"];
    command.current_dir(folder).args(all).arg("--synthetic-data").args(more);
    command.env("PIPEC_SIM_DEVICES", "4").env("PIPEC_SIM_STATS", "stats.json");
    let done = command.envs(variables.iter().copied()).output().unwrap();
    assert!(done.status.success(), "{more:?}, {variables:?}: {}", text(&done));
    done
}

#[test]
fn delays_change_no_bit_of_what_replicas_reduce() {
    let Some(folder) = folder("gpt") else { return };
    let at = folder.path();
    let seeds = if std::env::var_os("PIPEC_LARGE").is_some() { 100 } else { 2 };
    // With two micro-batches, one of three replicas has none.
    for (stages, batch, zero) in [("2", "8", "0"), ("3", "4", "0"), ("3", "8", "1"), ("2,2", "8", "0")] {
        let mut plan = std::process::Command::new(env!("CARGO_BIN_EXE_pipec"));
        plan.current_dir(at).args(["partition", "model.onnx", "-o", "plan.json", "--gpus", "4", "--micro-batch", "2"]);
        plan.args(["--stages", stages, "--batch", batch, "--zero", zero, "--schedule", "1f1b"]);
        let planned = plan.output().unwrap();
        assert!(planned.status.success(), "{}", text(&planned));
        let mut first: Option<Vec<u8>> = None;
        for seed in 0..=seeds {
            // The last run has all replicas on one GPU.
            let gpus = if seed == seeds { "cuda:0" } else { "cuda:0,1,2,3" };
            let more = ["--plan", "plan.json", "--steps", "3", "--device", gpus, "--save", "w.safetensors"];
            train_replicas(at, &more, &[("PIPEC_SIM_SEED", &seed.to_string())]);
            let weights = fs::read(at.join("w.safetensors")).unwrap();
            let first = first.get_or_insert_with(|| weights.clone());
            assert!(*first == weights, "{stages} replicas, ZeRO {zero}: seed {seed} gives other weights");
        }
    }
}

#[test]
fn replicas_reduce_in_their_own_memory() {
    let driver = driver();
    let Some(folder) = driver.map(|_| tempfile::tempdir().unwrap()) else { return };
    let at = folder.path();
    let zoo = ["zoo", "mlp", "--hidden", "1024", "-o", "model.onnx"];
    let made = std::process::Command::new(env!("CARGO_BIN_EXE_pipec")).args(zoo).current_dir(at).output().unwrap();
    assert!(made.status.success());
    let model = fs::metadata(at.join("model.onnx")).unwrap().len();
    for stages in ["2", "3"] {
        let counts = ["3", "6"].map(|steps| {
            let more =
                ["--stages", stages, "--schedule", "1f1b", "--batch", "12", "--microbatches", "6", "--steps", steps];
            train_replicas(at, &[&more[..], &["--device", "cuda:0,1,2,3"]].concat(), &[]);
            stats(at)
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
    let Some(folder) = folder("gpt") else { return };
    let at = folder.path();
    let gpus = ["--device", "cuda:0,1"];
    let whole = train(at, "6", &[&gpus[..], &["--save", "whole.safetensors"]].concat(), &[]);
    assert!(whole.status.success(), "{}", text(&whole));
    let whole = (fs::read(at.join("whole.safetensors")).unwrap(), stats(at));
    let points = if std::env::var_os("PIPEC_LARGE").is_some() { 100 } else { 8 };
    for (kind, counter) in [("memory", "allocations"), ("launch", "launches"), ("lost", "launches")] {
        let most = whole.1[counter].as_u64().unwrap();
        for point in 0..points {
            let number = 1 + most * (2 * point + 1) / (2 * points);
            let fault = format!("{kind}:{number}");
            let checkpoints = format!("{kind}-{point}");
            let keeps = ["--checkpoint-dir", &checkpoints, "--checkpoint-every", "1"];
            let done = train(at, "6", &[&gpus[..], &keeps].concat(), &[("PIPEC_SIM_FAULT", &fault)]);
            let said = text(&done);
            assert!(!done.status.success(), "{fault}: {said}");
            assert!(said.contains("error: ") && said.contains("cuda:"), "{fault}: {said}");
            assert!(!said.contains("panicked") && !said.contains("bug in pipec"), "{fault}: {said}");
            assert!(done.status.code().is_some_and(|code| (1..=3).contains(&code)), "{fault}: {:?}", done.status);
            if at.join(&checkpoints).read_dir().is_ok_and(|mut entries| entries.next().is_some()) {
                let more = ["--resume", "auto", "--save", "rest.safetensors"];
                let done = train(at, "6", &[&gpus[..], &keeps, &more].concat(), &[]);
                assert!(done.status.success(), "{fault}: {}", text(&done));
                assert!(fs::read(at.join("rest.safetensors")).unwrap() == whole.0, "{fault}: other weights after it");
            }
        }
    }
}
