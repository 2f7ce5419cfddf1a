//! A diverging run ends at once, reports where, and does not overwrite good files.

use assert_cmd::Command;
use compiler::tensor::Tensor;
use runtime::data::weights;
use serde_json::Value;
use std::fs;
use std::path::Path;

/// Returns standard output and standard error.
pub fn expect_exit(folder: &Path, code: i32, line: &str) -> (String, String) {
    let output = Command::cargo_bin("pipec").unwrap().current_dir(folder).args(line.split(' ')).output().unwrap();
    let [stdout, stderr] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    assert_eq!(output.status.code(), Some(code), "{line}: {stderr}");
    (stdout, stderr)
}

/// A model and twelve rows; the last four are scaled by `large`.
fn write_inputs(folder: &Path, large: f32) {
    expect_exit(folder, 0, "zoo mlp --inputs 6 --classes 3 --hidden 8 -o m.onnx -q");
    let x = (0..72).map(|index| (index as f32).sin() * if index < 48 { 1.0 } else { large }).collect::<Vec<_>>();
    let y = (0..12).map(|index| index % 3).collect::<Vec<_>>();
    let arrays = [("x", Tensor::from_f32(&[12, 6], &x)), ("y", Tensor::from_i64(&[12], &y))];
    weights::write(&folder.join("d.npz"), &arrays.map(|(name, tensor)| (name.to_string(), tensor)).into()).unwrap();
}

fn write_weights(folder: &Path) -> Vec<u8> {
    let (path, weights) = (folder.join("w.npz"), [("w".to_string(), Tensor::from_f32(&[2], &[1.0, 2.0]))]);
    weights::write(&path, &weights.into()).unwrap();
    fs::read(path).unwrap()
}

/// The error without preceding notes.
fn failure(stderr: &str) -> &str {
    &stderr[stderr.find("error: ").unwrap()..]
}

#[test]
fn the_first_loss_that_is_no_number_ends_a_run_in_threads_and_processes() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    write_inputs(root, 1e30);
    let original = write_weights(root);
    // The third minibatch is the first with large rows, two in each of its micro-batches.
    let train = "train m.onnx --data d.npz --batch 4 --microbatches 2 --schedule 1f1b --lr 1e9 --epochs 3 --metrics m.jsonl --save w.npz";
    let mut messages = Vec::new();
    for flags in ["--stages 1", "--stages 2,1", "--stages 1,1 --processes"] {
        let (stdout, stderr) = expect_exit(root, 1, &format!("{train} {flags}"));
        assert_eq!(stdout, "", "{flags}");
        messages.push(failure(&stderr).to_string());
        let lines: Vec<Value> = fs::read_to_string(root.join("m.jsonl"))
            .unwrap()
            .lines()
            .map(|l| serde_json::from_str(l).unwrap())
            .collect();
        let losses: Vec<bool> = lines.iter().map(|line| line["loss"].is_null()).collect();
        // Metrics end with the reported step, without totals.
        assert_eq!(losses.iter().position(|is_lost| *is_lost), Some(losses.len() - 1), "{flags}: {losses:?}");
        assert!(stderr.contains(&format!("the loss of step {} of 9 is ", losses.len())), "{stderr}");
        assert_eq!(fs::read(root.join("w.npz")).unwrap(), original);
    }
    messages.dedup();
    let [stderr] = &messages[..] else { panic!("{messages:?}") };
    assert!(stderr.contains("first in its micro-batch ") && stderr.contains("; the last finite loss was "), "{stderr}");
    assert!(stderr.contains("help: try a smaller `--lr`"), "{stderr}");
}

#[test]
fn replicas_without_a_flush_tell_of_the_same_step_each_time() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    write_inputs(root, 1.0);
    let train = "train m.onnx --data d.npz --batch 2 --lr 1e25 --steps 30 --stages 1,3 --schedule 1f1b-rr";
    let stderr: Vec<String> = (0..4).map(|_| failure(&expect_exit(root, 1, train).1).to_string()).collect();
    assert!(stderr.windows(2).all(|pair| pair[0] == pair[1]), "{stderr:?}");
}

#[test]
fn weights_that_the_last_update_lost_are_not_written() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    write_inputs(root, 1.0);
    let original = write_weights(root);
    let (stdout, stderr) = expect_exit(root, 1, "train m.onnx --data d.npz --batch 4 --steps 1 --lr 1e39 --save w.npz");
    assert_eq!(stdout, "");
    assert!(stderr.contains("` contains NaN or an infinity after step 1"), "{stderr}");
    assert_eq!(fs::read(root.join("w.npz")).unwrap(), original);
}

#[test]
fn steps_that_loss_scaling_leaves_out_are_no_divergence() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    write_inputs(root, 6e4);
    let train = "train m.onnx --data d.npz --batch 4 --schedule 1f1b --epochs 2 --save w.npz --dtype f16";
    let (_, stderr) = expect_exit(root, 0, train);
    assert!(stderr.contains("warning: 2 steps had no finite loss; loss scaling skipped their updates"), "{stderr}");
    let saved = weights::read(&root.join("w.npz")).unwrap();
    assert!(saved.values().all(|tensor| tensor.to_f64().iter().all(|value| value.is_finite())));
    // If no step has a finite loss, the run fails.
    write_inputs(root, 6e4);
    let x = Tensor::from_f32(&[12, 6], &[6e4; 72]);
    let y = Tensor::from_i64(&[12], &[1; 12]);
    let arrays = [("x", x), ("y", y)].map(|(name, tensor)| (name.to_string(), tensor));
    weights::write(&root.join("d.npz"), &arrays.into()).unwrap();
    assert!(expect_exit(root, 1, train).1.contains("no step of this run had a finite loss"));
}
