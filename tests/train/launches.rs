//! Launches of a training step on a simulated GPU that computes nothing, so that models of their full size are counted.
//! PyTorch's launches are those that `benches/torch/launches.py` counts for the same model, batch and optimizer.

use crate::support::simulated_gpus::{driver, on_simulated_gpus};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Launches of kernels and of libraries in one step in bf16.
fn count_launches(folder: &Path, [model, batch, optimizer]: [&str; 3]) -> u64 {
    let pipec = env!("CARGO_BIN_EXE_pipec");
    let output = Command::new(pipec).args(["zoo", model, "-o", "model.onnx"]).current_dir(folder).output().unwrap();
    assert!(output.status.success(), "{model}");
    let count = |steps: &str| {
        let mut command = on_simulated_gpus(pipec, driver().expect("the caller has it"));
        command.args(["train", "model.onnx", "--device", "cuda:0", "--stages", "1", "--microbatches", "1"]);
        command.args(["--precision", "bf16", "--synthetic-data", "--steps", steps]);
        command.args(["--batch", batch, "--optimizer", optimizer]).current_dir(folder);
        command.env("PIPEC_SIM_COMPUTE", "0").env("PIPEC_SIM_MEMORY", "80000000000");
        let output = command.env("PIPEC_SIM_STATS", "stats.json").output().unwrap();
        assert!(output.status.success(), "{model}: {}", String::from_utf8_lossy(&output.stderr));
        let stats: Value = serde_json::from_str(&fs::read_to_string(folder.join("stats.json")).unwrap()).unwrap();
        ["launches", "library_products"].map(|kind| stats[kind].as_u64().unwrap()).iter().sum::<u64>()
    };
    // The first steps allocate and choose.
    let [before, after] = ["3", "4"].map(count);
    after - before
}

#[test]
fn a_step_has_few_launches() {
    if driver().is_none() {
        return;
    }
    let mut models = vec![(["gpt", "2", "adamw"], 131)];
    if std::env::var_os("PIPEC_LARGE").is_some() {
        models.extend([
            (["gpt2", "2", "adamw"], 631),
            (["bert-base", "4", "adamw"], 827),
            (["resnet50", "16", "sgd-momentum"], 736),
            (["vgg16", "16", "sgd-momentum"], 178),
        ]);
    }
    for (model, torch_launches) in models {
        let folder = tempfile::tempdir().unwrap();
        let launches = count_launches(folder.path(), model);
        println!("{}: {launches} launches in a step, torch.compile {torch_launches}", model[0]);
        assert!((1..=torch_launches).contains(&launches), "{}: {launches} launches", model[0]);
    }
}
