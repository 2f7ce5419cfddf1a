//! The loss that training attaches is no op of a plan, but its costs are included: planned memory is what training
//! uses.

use assert_cmd::Command;
use compiler::tensor::Tensor;
use runtime::data::weights;
use serde_json::Value;
use std::fs;
use std::path::Path;

/// Expects this exit code; returns standard error.
fn expect_exit(folder: &Path, code: i32, arguments: &[&str]) -> String {
    let output = Command::cargo_bin("pipec").unwrap().current_dir(folder).args(arguments).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stderr}");
    stderr
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

fn write_plan(folder: &Path, extra: &[&str]) -> Value {
    let flags = ["partition", "model.onnx", "--gpus", "2", "--stages", "1,1", "-q", "-o", "plan.json"];
    expect_exit(folder, 0, &[&flags[..], extra].concat());
    expect_exit(folder, 0, &["plan", "check", "plan.json", "--model", "model.onnx"]);
    json(&folder.join("plan.json"))
}

fn planned_bytes(plan: &Value, stage: usize) -> f64 {
    plan["stages"][stage]["memory"]["total"].as_f64().unwrap()
}

/// A small model with a large vocabulary, whose logits are the largest tensor.
fn write_gpt(folder: &Path) {
    expect_exit(folder, 0, &["zoo", "gpt", "--vocabulary", "4000", "--tied", "false", "-o", "model.onnx"]);
}

#[test]
fn the_usual_loss_is_counted_where_it_runs() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    write_gpt(folder);
    let default_plan = write_plan(folder, &[]);
    let lossless_plan = write_plan(folder, &["--loss", "none"]);
    assert_eq!(default_plan["model"]["import"]["loss"], "cross-entropy");
    assert_eq!(lossless_plan["model"]["import"]["loss"], Value::Null);
    assert!(
        planned_bytes(&default_plan, 1) > 1.3 * planned_bytes(&lossless_plan, 1),
        "{} and {}",
        planned_bytes(&default_plan, 1),
        planned_bytes(&lossless_plan, 1)
    );
    let time = |plan: &Value| plan["stages"][1]["fwd_us"].as_f64().unwrap();
    assert!(time(&default_plan) > time(&lossless_plan));
    for (extra, loss) in
        [(&["--loss", "mse"][..], "mse"), (&["--loss", "cross-entropy", "--class-dim", "1"], "cross-entropy over 1")]
    {
        assert_eq!(write_plan(folder, extra)["model"]["import"]["loss"], loss);
    }
    assert_eq!(write_plan(folder, &["--schedule", "inference"])["model"]["import"]["loss"], Value::Null);
    let message = expect_exit(folder, 2, &["partition", "model.onnx", "--gpus", "2", "--loss", "output"]);
    assert!(message.contains("not a scalar") && message.contains("--loss none"), "{message}");
    // Training requires a loss, with and without a plan.
    for plan in [&["--plan", "plan.json"][..], &[]] {
        let message = expect_exit(
            folder,
            2,
            &[&["train", "model.onnx", "--synthetic-data", "--batch", "4", "--loss", "output"], plan].concat(),
        );
        assert!(
            message.contains("not a scalar") && message.contains("`--loss cross-entropy`, `mse` or `bce`"),
            "{message}"
        );
        assert!(!message.contains("--loss none"), "{message}");
    }
}

#[test]
fn a_profile_says_which_loss_its_times_have() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    write_gpt(folder);
    expect_exit(
        folder,
        0,
        &["profile", "model.onnx", "--device", "analytic:cpu", "--loss", "mse", "-q", "-o", "profile.json"],
    );
    assert_eq!(json(&folder.join("profile.json"))["settings"]["loss"], "mse");
    expect_exit(
        folder,
        0,
        &["partition", "model.onnx", "--profile", "profile.json", "--gpus", "2", "-q", "-o", "plan.json"],
    );
    assert_eq!(json(&folder.join("plan.json"))["model"]["import"]["loss"], "mse");
    let frozen = ["partition", "model.onnx", "--profile", "profile.json", "--gpus", "2", "--freeze", "wte*"];
    assert!(expect_exit(folder, 2, &frozen).contains("profile again with the same `--freeze`"));
    let message = expect_exit(
        folder,
        2,
        &["partition", "model.onnx", "--profile", "profile.json", "--gpus", "2", "--loss", "bce", "-o", "p.json"],
    );
    assert!(message.contains("`mse`") && message.contains("pipec profile"), "{message}");
}

/// Trains a plan and checks that every stage uses the planned memory within 5 %.
fn check_memory(folder: &Path, plan: &Value) {
    let training =
        ["train", "model.onnx", "--plan", "plan.json", "--synthetic-data", "--steps", "6", "--momentum", "0.9"];
    expect_exit(folder, 0, &[&training[..], &["--batch", "4", "-q", "--metrics", "m.jsonl"]].concat());
    let lines = fs::read_to_string(folder.join("m.jsonl")).unwrap();
    let totals: Value = serde_json::from_str(lines.lines().last().unwrap()).unwrap();
    let stages = totals["total"]["stages"].as_array().unwrap();
    assert_eq!(stages.len(), 2);
    for (index, stage) in stages.iter().enumerate() {
        let ratio = stage["peak_memory_bytes"].as_f64().unwrap() / planned_bytes(plan, index);
        assert!((0.95..=1.05).contains(&ratio), "stage {index} held {ratio} of what was planned");
    }
}

/// Every stage uses the planned memory within 5 %, and the planned settings apply to training by default.
#[test]
fn training_holds_what_was_planned() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    write_gpt(folder);
    let flags = ["--profile", "analytic:cpu", "--optimizer", "sgd-momentum", "--micro-batch", "4", "--loss", "mse"];
    let plan = write_plan(folder, &[&flags[..], &["--freeze", "wte*,blocks.0*"]].concat());
    let operations = |plan: &Value| plan["predicted"]["flops"].as_f64().unwrap();
    let frozen: u64 =
        plan["stages"].as_array().unwrap().iter().filter_map(|stage| stage["memory"]["frozen"].as_u64()).sum();
    assert!(frozen > 1_200_000, "{frozen} frozen bytes");
    check_memory(folder, &plan);
    expect_exit(folder, 0, &["plan", "check", "plan.json", "--model", "model.onnx"]);
    let frozen_operations = operations(&plan);
    let plan = write_plan(folder, &flags);
    // The first block computes input gradients for the positions, and no weight gradients: one product in three less.
    assert!((0.95..0.96).contains(&(frozen_operations / operations(&plan))), "{frozen_operations}");
    check_memory(folder, &plan);
    let lines = fs::read_to_string(folder.join("m.jsonl")).unwrap();
    let first_loss =
        |lines: &str| serde_json::from_str::<Value>(lines.lines().next().unwrap()).unwrap()["loss"].clone();
    let planned_loss = first_loss(&lines);
    expect_exit(
        folder,
        0,
        &[
            "train",
            "model.onnx",
            "--loss",
            "mse",
            "--synthetic-data",
            "--steps",
            "1",
            "--batch",
            "4",
            "-q",
            "--metrics",
            "n.jsonl",
        ],
    );
    assert_eq!(first_loss(&fs::read_to_string(folder.join("n.jsonl")).unwrap()), planned_loss);
}

/// A step reads and writes 5 times the weights for SGD with momentum, 7 times for Adam, 3 times for plain SGD; once per
/// minibatch.
#[test]
fn steps_of_the_optimizer_are_part_of_the_time() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    expect_exit(folder, 0, &["zoo", "mlp", "-o", "model.onnx"]);
    let time = |extra: &[&str]| {
        let plan = write_plan(folder, extra);
        (0..2).map(|index| plan["stages"][index]["bwd_us"].as_f64().unwrap()).sum::<f64>()
    };
    let step_time = |optimizer: &str| time(&["--optimizer", optimizer]);
    let [sgd, momentum, adam] = ["sgd", "sgd-momentum", "adam"].map(step_time);
    let weight_pass = (momentum - sgd) / 2.0;
    assert!(
        weight_pass > 0.0 && ((adam - momentum) / 2.0 / weight_pass - 1.0).abs() < 1e-6,
        "{sgd}, {momentum}, {adam}"
    );
    let step_time = |microbatches: &str, optimizer: &str| {
        time(&["--schedule", "1f1b", "--microbatches", microbatches, "--optimizer", optimizer])
    };
    let fourth = (step_time("4", "adam") - step_time("4", "sgd-momentum")) / 2.0;
    assert!((fourth * 4.0 / weight_pass - 1.0).abs() < 1e-6, "{fourth} and {weight_pass}");
    // The published cost models have no optimizer time.
    let paper = |optimizer: &str| time(&["--cost", "paper", "--optimizer", optimizer]);
    assert_eq!(paper("sgd"), paper("adam"));
}

/// The loss is the mean over all labels of a minibatch, however they are spread.
#[test]
fn ignored_labels_count_in_no_micro_batch() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    expect_exit(folder, 0, &["zoo", "mlp", "--inputs", "6", "--classes", "3", "--hidden", "8", "-o", "model.onnx"]);
    let x = |rows: usize| {
        Tensor::from_f32(&[rows, 6], &(0..rows * 6).map(|index| (index % 24) as f32 / 24.0).collect::<Vec<_>>())
    };
    let write = |name: &str, labels: &[i64]| {
        let arrays = [("x", x(labels.len())), ("y", Tensor::from_i64(&[labels.len()], labels))];
        let arrays = arrays.into_iter().map(|(name, tensor)| (name.to_string(), tensor)).collect();
        weights::write(&folder.join(name), &arrays).unwrap();
    };
    write("half.npz", &[0, 2, 1, 1, -100, -100, -100, -100]);
    write("whole.npz", &[0, 2, 1, 1]);
    write("spread.npz", &[0, -100, -100, 2, -100, 1, 1, -100]);
    // The first step has no labels.
    write("none.npz", &[-100, -100, -100, -100, 0, 2, 1, 1]);
    let train = |data: &str, batch: &str, microbatches: &str, extra: &[&str]| {
        let flags = ["train", "model.onnx", "--data", data, "--batch", batch, "--microbatches", microbatches, "-q"];
        let results = ["--metrics", "m.jsonl", "--save", "w.npz", "--save-gradients", "g.npz"];
        expect_exit(folder, 0, &[&flags[..], &results, extra].concat());
        let lines = fs::read_to_string(folder.join("m.jsonl")).unwrap();
        let loss = serde_json::from_str::<Value>(lines.lines().next().unwrap()).unwrap()["loss"].as_f64().unwrap();
        (loss, weights::read(&folder.join("g.npz")).unwrap(), weights::read(&folder.join("w.npz")).unwrap())
    };
    let expected =
        [("half.npz", train("whole.npz", "4", "1", &[])), ("spread.npz", train("spread.npz", "8", "1", &[]))];
    let pipelines =
        [&["--stages", "1,1"][..], &["--stages", "1,1", "--schedule", "zb-h1"], &["--stages", "2"], &["--tensor", "2"]];
    for (data, (expected_loss, expected, _)) in &expected {
        for (extra, microbatches) in pipelines.iter().flat_map(|extra| [(extra, "2"), (extra, "4")]) {
            let (loss, gradients, _) = train(data, "8", microbatches, extra);
            assert!((loss - expected_loss).abs() < 1e-6, "{data} {microbatches} {extra:?}: {loss}, {expected_loss}");
            for (name, gradient) in &gradients {
                let close = |(got, want): (f64, f64)| (got - want).abs() < 1e-6;
                let is_same = gradient.to_f64().into_iter().zip(expected[name].to_f64()).all(close);
                assert!(is_same, "{data} {microbatches} {extra:?}: {name}");
            }
        }
    }
    let none = ["train", "model.onnx", "--data", "none.npz", "--batch", "4", "--steps", "1"];
    let stderr = expect_exit(folder, 1, &none);
    assert!(stderr.contains("NaN"), "{stderr}");
}

/// On models of a few kilobytes, scratch of fused ops and alignment to cache lines are a large part.
#[test]
fn little_models_hold_what_was_planned() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    expect_exit(folder, 0, &["zoo", "mlp", "--inputs", "6", "--classes", "3", "--hidden", "8", "-o", "model.onnx"]);
    for batch in ["1", "8", "32", "128", "512"] {
        let plan = ["partition", "model.onnx", "--gpus", "1", "--profile", "analytic:cpu", "--micro-batch", batch];
        expect_exit(folder, 0, &[&plan[..], &["-q", "-o", "plan.json"]].concat());
        let training = ["train", "model.onnx", "--plan", "plan.json", "--synthetic-data", "--steps", "2", "-q"];
        expect_exit(folder, 0, &[&training[..], &["--metrics", "m.jsonl"]].concat());
        let lines = fs::read_to_string(folder.join("m.jsonl")).unwrap();
        let totals: Value = serde_json::from_str(lines.lines().last().unwrap()).unwrap();
        let peak_bytes = totals["total"]["stages"][0]["peak_memory_bytes"].as_f64().unwrap();
        let ratio = peak_bytes / planned_bytes(&json(&folder.join("plan.json")), 0);
        assert!((0.97..=1.03).contains(&ratio), "batch {batch}: held {ratio} of what was planned");
    }
}
