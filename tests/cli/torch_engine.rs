//! `profile --engine torch`: a Python is run, and its times become those of the ops.

#![cfg(unix)]

use crate::support::shared::data;
use assert_cmd::Command;
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

fn pipec(folder: &Path, code: i32, arguments: &[&str]) -> (String, String) {
    let output = Command::cargo_bin("pipec").unwrap().current_dir(folder).args(arguments).output().unwrap();
    let [stdout, stderr] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stdout}{stderr}");
    (stdout, stderr)
}

/// A program in place of Python, which takes the request and prints these lines.
fn python(folder: &Path, lines: &[String]) {
    let text = format!("#!/bin/sh\ncat > request.json\ncat <<'END'\n{}\nEND\n", lines.join("\n"));
    fs::write(folder.join("python"), text).unwrap();
    fs::set_permissions(folder.join("python"), fs::Permissions::from_mode(0o755)).unwrap();
}

fn read(folder: &Path, name: &str) -> Value {
    serde_json::from_str(&fs::read_to_string(folder.join(name)).unwrap()).unwrap()
}

#[test]
fn measured_nodes_are_the_times_of_ops() {
    let Some(model) = data("parity/gpt/model_dynbatch.pt2") else { return };
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let model = model.to_str().unwrap();
    pipec(folder, 0, &["profile", model, "--micro-batch", "4", "--device", "analytic:cpu", "-o", "a.json", "-q"]);
    let ops = read(folder, "a.json")["ops"].as_array().unwrap().clone();
    let mut names: Vec<&str> = ops.iter().map(|op| op["name"].as_str().unwrap()).collect();
    names.dedup();
    // A view without an op counts for the node after it.
    let mut lines = vec![
        r#"{"device": {"name": "NVIDIA H100 80GB HBM3", "driver": "13.0", "memory_bytes": 80}, "torch": "2.15"}"#
            .to_string(),
        "the model may print".to_string(),
        r#"{"node": "a_view", "fwd_us": 2.5, "bwd_us": 1.5, "weight_grad_us": 0.0, "spread": 0.0}"#.to_string(),
    ];
    for name in &names {
        lines.push(format!(
            r#"{{"node": "{name}", "fwd_us": 10.0, "bwd_us": 20.0, "weight_grad_us": 5.0, "spread": 0.125}}"#
        ));
    }
    lines.push(r#"{"loss": {"fwd_us": 3.0, "bwd_us": 4.0}}"#.to_string());
    lines.push(r#"{"update": {"us": 100.0, "bytes": 1000}}"#.to_string());
    lines.push(r#"{"whole": {"fwd_us": 7.0, "bwd_us": 8.0}}"#.to_string());
    python(folder, &lines);
    let torch_flags =
        ["--engine", "torch", "--device", "cuda:1", "--python", "./python", "--precision", "bf16", "-o", "t.json"];
    pipec(folder, 0, &[&["profile", model, "--micro-batch", "4"], &torch_flags[..]].concat());
    let profile = read(folder, "t.json");
    let sum =
        |name: &str| profile["ops"].as_array().unwrap().iter().map(|op| op[name].as_f64().unwrap_or(0.0)).sum::<f64>();
    let count = names.len() as f64;
    // Shares of a node are rounded to nanoseconds.
    let assert_close =
        |actual: f64, expected: f64| assert!((actual - expected).abs() < 1e-3 * count, "{actual}, not {expected}");
    assert_close(sum("fwd_us"), 10.0 * count + 2.5 + 3.0);
    assert_close(sum("bwd_us"), 20.0 * count + 1.5 + 4.0);
    assert_close(sum("weight_grad_us"), 5.0 * count);
    assert_close(sum("update_us"), 100.0);
    assert_eq!((&profile["device"]["name"], &profile["method"]), (&"h100".into(), &"measured".into()));
    assert_eq!(profile["whole"]["bwd_us"], 8.0);
    let request = read(folder, "request.json");
    assert_eq!((&request["device"], &request["precision"]), (&"cuda:1".into(), &"bf16".into()));
    assert_eq!(request["inputs"][0]["shape"][0], 4, "{request}");
    // The profile is taken for a plan.
    let plan = ["partition", model, "--profile", "t.json", "--gpus", "2", "--micro-batch", "4", "-o", "p.json", "-q"];
    pipec(folder, 0, &plan);
}

#[test]
fn what_cannot_be_measured_is_said() {
    let Some(model) = data("parity/mlp/model_dynbatch.pt2") else { return };
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let model = model.to_str().unwrap();
    let fails = |flags: &[&str]| {
        pipec(folder, 2, &[&["profile", model, "--engine", "torch", "-o", "t.json"], flags].concat()).1
    };
    let stderr = fails(&["--python", "./no-python"]);
    assert!(stderr.contains("no-python") && stderr.contains("--python PATH"), "{stderr}");
    python(folder, &[r#"{"error": "torch finds no CUDA device", "help": "use `--device cpu`"}"#.to_string()]);
    let stderr = fails(&["--python", "./python", "--device", "cuda:0"]);
    assert!(stderr.contains("torch finds no CUDA device") && stderr.contains("use `--device cpu`"), "{stderr}");
    python(folder, &["Traceback".to_string()]);
    let stderr = fails(&["--python", "./python"]);
    assert!(stderr.contains("torch measured no node"), "{stderr}");
    assert!(!folder.join("t.json").exists());
    pipec(folder, 0, &["zoo", "mlp", "-o", "m.onnx", "-q"]);
    let stderr = pipec(folder, 2, &["profile", "m.onnx", "--engine", "torch", "--python", "./python"]).1;
    assert!(stderr.contains("torch.export"), "{stderr}");
    let stderr = pipec(folder, 2, &["profile", "m.onnx", "--compile"]).1;
    assert!(stderr.contains("`--compile` requires `--engine torch`"), "{stderr}");
}

/// With a Python that has torch: `PIPEC_TORCH_PYTHON`, else `python3`.
#[test]
fn torch_measures_every_op() {
    let Some(model) = data("parity/gpt/model_dynbatch.pt2") else { return };
    let python = std::env::var("PIPEC_TORCH_PYTHON").unwrap_or_else(|_| "python3".to_string());
    let has_torch = std::process::Command::new(&python).args(["-c", "import torch"]).output();
    if !has_torch.is_ok_and(|output| output.status.success()) {
        println!("skipped: {python} has no torch");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let arguments =
        ["profile", model.to_str().unwrap(), "--micro-batch", "4", "--engine", "torch", "--python", &python];
    pipec(folder, 0, &[&arguments[..], &["--runs", "3", "--warmup", "1", "-o", "t.json"]].concat());
    let profile = read(folder, "t.json");
    let ops = profile["ops"].as_array().unwrap();
    let measured = ops.iter().filter(|op| op["fwd_us"].as_f64().unwrap() > 0.0).count();
    assert!(measured * 10 > ops.len() * 9, "{measured} of {} ops", ops.len());
    assert!(profile["whole"]["fwd_us"].as_f64().unwrap() > 0.0);
}
