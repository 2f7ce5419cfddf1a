//! Models in 16-bit types: planned memory is what training uses.

use crate::support::builder::{BF16, F16, graph, initializer, model, node, typed};
use assert_cmd::Command;
use compiler::tensor::{DType, Tensor};
use prost::Message;
use runtime::device::cpu::matmul::has_panels;
use serde_json::Value;
use std::fs;
use std::path::Path;

const WIDTH: usize = 192;

fn run_pipec(folder: &Path, arguments: &[&str]) {
    let output = Command::cargo_bin("pipec").unwrap().current_dir(folder).args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// Two layers; the second weight is used twice, so its gradient has two terms.
fn narrow(dtype: DType, code: i32) -> Vec<u8> {
    let values: Vec<f64> = (0..WIDTH * WIDTH).map(|at| (at as f64 * 0.618).fract() * 0.1 - 0.05).collect();
    let weight = Tensor::from_f64(&[WIDTH, WIDTH], &values).cast(dtype);
    let nodes = [
        node("MatMul", &["x", "first"], &["h"]),
        node("Relu", &["h"], &["r"]),
        node("MatMul", &["r", "second"], &["s"]),
        node("Relu", &["s"], &["t"]),
        node("MatMul", &["t", "second"], &["y"]),
    ];
    let mut main = graph(&nodes, &[typed("x", code, &[8, WIDTH as i64])], &["y"]);
    main.initializer = vec![initializer("first", &weight), initializer("second", &weight)];
    model(17, main).encode_to_vec()
}

/// Weights take two bytes each; gradient sums, master weights and optimizer state take four.
#[test]
fn sums_and_masters_of_narrow_parameters_are_planned_as_they_are_held() {
    for (dtype, code) in [(DType::Bf16, BF16), (DType::F16, F16)] {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        fs::write(folder.join("model.onnx"), narrow(dtype, code)).unwrap();
        let bytes = (WIDTH * WIDTH) as u64;
        for (words, state) in [(&["--optimizer", "sgd"][..], 0), (&["--optimizer", "adam"], 2)] {
            let plan = ["partition", "model.onnx", "--gpus", "1", "--profile", "analytic:cpu", "-o", "plan.json"];
            run_pipec(folder, &[&plan[..], &["--schedule", "1f1b", "--microbatches", "2"], words].concat());
            let memory = &json(&folder.join("plan.json"))["stages"][0]["memory"];
            assert_eq!(memory["weights"], 2 * 2 * bytes, "{dtype}");
            assert_eq!(memory["gradients"], 3 * 4 * bytes, "a sum for each use");
            assert_eq!(memory["optimizer"], 2 * 4 * bytes * (1 + state), "masters, and {state} numbers for each");
            let train = ["train", "model.onnx", "--plan", "plan.json", "--synthetic-data", "--steps", "3"];
            run_pipec(folder, &[&train[..], &["--metrics", "m.jsonl"], words].concat());
            let lines = fs::read_to_string(folder.join("m.jsonl")).unwrap();
            let last: Value = serde_json::from_str(lines.lines().last().unwrap()).unwrap();
            let peak_bytes = last["total"]["stages"][0]["peak_memory_bytes"].as_f64().unwrap();
            let ratio = peak_bytes / memory["total"].as_f64().unwrap();
            // Without panels, kernels copy transposed operands while the arena is below its peak.
            let min_ratio = if has_panels::<f32>(8, WIDTH) { 0.95 } else { 0.94 };
            assert!((min_ratio..=1.05).contains(&ratio), "{dtype}, {words:?}: held {ratio} of what was planned");
        }
    }
}
