//! Evaluation on held-out rows, and learnable synthetic data.

use assert_cmd::Command;
use compiler::tensor::Tensor;
use runtime::data::weights;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

fn expect_exit(folder: &Path, code: i32, arguments: &[&str]) -> [String; 2] {
    let output = Command::cargo_bin("pipec").unwrap().current_dir(folder).args(arguments).output().unwrap();
    let message = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {message:?}");
    message
}

/// Trains and returns the last line of the metrics.
fn train(folder: &Path, extra: &[&str]) -> Value {
    expect_exit(folder, 0, &[&["train", "m.onnx", "--metrics", "m.jsonl", "-q"][..], extra].concat());
    let lines = fs::read_to_string(folder.join("m.jsonl")).unwrap();
    serde_json::from_str::<Value>(lines.lines().last().unwrap()).unwrap()["total"].clone()
}

/// Two separable classes of eight numbers.
fn rows(count: usize) -> BTreeMap<String, Tensor> {
    let value = |i: usize| ((i * 37 % 101) as f64 / 101.0 - 0.5) + if (i / 8).is_multiple_of(2) { 1.0 } else { -1.0 };
    let x: Vec<f64> = (0..count * 8).map(value).collect();
    let y: Vec<i64> = (0..count).map(|row| (row % 2) as i64).collect();
    BTreeMap::from([
        ("x".to_string(), Tensor::from_f64(&[count, 8], &x).cast(compiler::tensor::DType::F32)),
        ("target".to_string(), Tensor::from_i64(&[count], &y)),
    ])
}

fn write_model(folder: &Path) {
    expect_exit(folder, 0, &["zoo", "mlp", "--inputs", "8", "--classes", "2", "--hidden", "16", "-o", "m.onnx", "-q"]);
}

#[test]
fn held_out_rows_are_scored_and_not_trained_on() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    write_model(folder);
    weights::write(&folder.join("d.npz"), &rows(50)).unwrap();
    let common = ["--data", "d.npz", "--batch", "8", "--steps", "40", "--lr", "0.1"];
    let split = train(folder, &[&common[..], &["--eval-split", "0.2"]].concat());
    let score = &split["held_out"];
    assert_eq!(score["rows"], 10, "the last rows do not fill an item, and are looked at all the same");
    assert_eq!(score["accuracy"], 1.0, "{score}");
    assert!(score["loss"].as_f64().unwrap() < 0.2, "{score}");
    // The same rows in separate files give the same weights and score.
    let full_rows = rows(50);
    let part = |from: usize, to: usize| -> BTreeMap<String, Tensor> {
        let cut = |tensor: &Tensor| {
            let row = tensor.bytes().len() / 50;
            let shape = [&[to - from], &tensor.shape()[1..]].concat();
            Tensor::new(tensor.dtype(), shape, tensor.bytes().slice(from * row..to * row)).unwrap()
        };
        full_rows.iter().map(|(name, tensor)| (name.clone(), cut(tensor))).collect()
    };
    weights::write(&folder.join("d.npz"), &part(0, 40)).unwrap();
    weights::write(&folder.join("e.npz"), &part(40, 50)).unwrap();
    let separate = train(folder, &[&common[..], &["--eval-data", "e.npz"]].concat());
    assert_eq!((&separate["held_out"], &separate["last_loss"]), (score, &split["last_loss"]));
    assert_eq!(train(folder, &common)["held_out"], Value::Null);
    // Ignored labels do not count in either metric.
    let mut ignored_rows = part(40, 50);
    let labels: Vec<i64> = ignored_rows["target"]
        .to_i64()
        .into_iter()
        .enumerate()
        .map(|(i, y)| if i < 9 { -100 } else { 1 - y })
        .collect();
    ignored_rows.insert("target".to_string(), Tensor::from_i64(&[10], &labels));
    weights::write(&folder.join("e.npz"), &ignored_rows).unwrap();
    let result = train(folder, &[&common[..], &["--eval-data", "e.npz"]].concat());
    assert_eq!(result["held_out"]["accuracy"], 0.0);
    assert!(result["held_out"]["loss"].as_f64().unwrap() > 1.0, "{}", result["held_out"]);
}

#[test]
fn invalid_held_out_data_is_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    write_model(folder);
    weights::write(&folder.join("d.npz"), &rows(20)).unwrap();
    let mut bad = rows(4);
    bad.insert("target".to_string(), Tensor::from_i64(&[4], &[0, 1, 2, 0]));
    weights::write(&folder.join("e.npz"), &bad).unwrap();
    let common = ["train", "m.onnx", "--data", "d.npz", "--batch", "4", "--steps", "2"];
    for (extra, message) in [
        (&["--eval-split", "1"][..], "between 0 and 1"),
        (&["--eval-split", "0.1", "--eval-data", "e.npz"], "cannot be used with"),
        (&["--eval-data", "e.npz"], "label 2 is outside the 2 classes"),
        (&["--eval-data", "missing.npz"], "the evaluation data"),
        (&["--eval-split", "0.9"], "fewer than one minibatch"),
    ] {
        let [_, stderr] = expect_exit(folder, 2, &[&common[..], extra].concat());
        assert!(stderr.contains(message), "{extra:?}: {stderr}");
    }
}

/// A network learns the teacher's targets and generalises to held-out rows; random labels it could only memorise.
#[test]
fn made_up_data_can_be_learned() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    expect_exit(folder, 0, &["zoo", "mlp", "--inputs", "8", "--classes", "3", "--hidden", "32", "-o", "m.onnx", "-q"]);
    let common = [
        "--synthetic-data",
        "--batch",
        "64",
        "--epochs",
        "60",
        "--lr",
        "0.1",
        "--momentum",
        "0.9",
        "--eval-split",
        "0.25",
    ];
    for loss in ["cross-entropy", "mse", "bce"] {
        let total = train(folder, &[&common[..], &["--loss", loss]].concat());
        let (first_loss, last_loss) = (total["first_loss"].as_f64().unwrap(), total["last_loss"].as_f64().unwrap());
        let score = &total["held_out"];
        assert!(last_loss < first_loss, "{loss}: {total}");
        assert_eq!(score["rows"], 128);
        match loss {
            "cross-entropy" => assert!(score["accuracy"].as_f64().unwrap() > 0.7, "{score}"),
            _ => {
                assert!(score["accuracy"].is_null() && score["loss"].as_f64().unwrap() < first_loss, "{loss}: {total}")
            }
        }
    }
}
