//! Tensor-parallel training end to end: checkpoints, clipping, 16-bit types and custom schedules, compared with runs
//! without tensor parallelism.

use assert_cmd::Command;
use compiler::tensor::Tensor;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

fn expect_exit(folder: &Path, code: i32, arguments: &[&str]) -> String {
    let output = Command::cargo_bin("pipec").unwrap().current_dir(folder).args(arguments).output().unwrap();
    let message = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {message:?}");
    message.concat()
}

/// A small GPT and its plan for three groups of two: two replicas and one, or one stage each without a flush, where
/// tied copies must be kept equal.
fn write_plan(folder: &Path, extra: &[&str]) {
    let model =
        ["zoo", "gpt", "--hidden", "128", "--vocabulary", "256", "--context", "16", "--layers", "2", "-o", "m.onnx"];
    expect_exit(folder, 0, &model);
    let flags = ["partition", "m.onnx", "--profile", "analytic:cpu", "--levels", "2:100GB/s,3:10GB/s", "--tensor", "2"];
    let replicas = if extra.contains(&"1f1b-rr") { "1,1,1" } else { "2,1" };
    let stages = ["--stages", replicas, "--micro-batch", "4", "--optimizer", "adam", "-o", "p.json"];
    expect_exit(folder, 0, &[&flags[..], &stages, extra].concat());
}

const TRAIN: [&str; 11] =
    ["train", "m.onnx", "--plan", "p.json", "--synthetic-data", "--optimizer", "adam", "--lr", "0.01", "--seed", "3"];
const CHECKPOINT_FLAGS: [&str; 4] = ["--checkpoint-dir", "ck", "--checkpoint-every", "2"];

fn read(folder: &Path, name: &str) -> BTreeMap<String, Tensor> {
    runtime::data::weights::read(&folder.join(name)).unwrap()
}

fn losses(folder: &Path, name: &str) -> Vec<f64> {
    let lines = fs::read_to_string(folder.join(name)).unwrap();
    let parsed = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    parsed.filter(|line| line.get("step").is_some()).map(|line| line["loss"].as_f64().unwrap()).collect()
}

fn assert_near(label: &str, got: &[f64], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{label}");
    let errors = got.iter().zip(want).map(|(got, want)| (got - want).abs() / want.abs().max(1e-3));
    let max_error = errors.fold(0.0, f64::max);
    println!("{label}: {max_error:.1e}");
    assert!(max_error <= tolerance, "{label}: {max_error:.1e}\n{got:?}\n{want:?}");
}

#[test]
fn a_run_goes_on_exactly_and_with_any_number_of_devices() {
    let flush = ["--schedule", "1f1b", "--microbatches", "2"];
    for (plan, extra) in [
        (&[&flush[..], &["--zero", "0"]].concat(), &["--clip-norm", "0.5"][..]),
        (&[&flush[..], &["--zero", "1"]].concat(), &["--dtype", "f64"]),
        (&[&flush[..], &["--zero", "3"]].concat(), &["--clip-norm", "0.5"]),
        (&["--schedule", "1f1b-rr", "--zero", "0"].to_vec(), &[]),
        (&["--schedule", "2bw", "--microbatches", "2", "--zero", "2"].to_vec(), &["--dtype", "bf16"]),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        write_plan(folder, plan);
        let common = [&TRAIN[..], &["--steps", "8"], extra].concat();
        let tolerance = if extra.contains(&"bf16") { 2e-2 } else { 1e-5 };
        let resume = |extra: &[&str]| {
            let _ = fs::remove_file(folder.join("rest.jsonl"));
            expect_exit(folder, 0, &[&common[..], &["--metrics", "rest.jsonl"], extra].concat());
            losses(folder, "rest.jsonl")
        };
        let uninterrupted = ["--save", "whole.safetensors", "--metrics", "whole.jsonl"];
        let message = expect_exit(folder, 0, &[&common[..], &uninterrupted].concat());
        assert!(!message.contains("tensor parallelism of degree 2; 0 of"), "{message}");
        expect_exit(folder, 0, &[&common[..], &CHECKPOINT_FLAGS].concat());
        let uninterrupted = losses(folder, "whole.jsonl");
        for step in [2, 6] {
            let from = format!("ck/step-0000000{step}");
            resume(&["--resume", &from, "--save", "rest.safetensors"]);
            assert!(read(folder, "rest.safetensors") == read(folder, "whole.safetensors"), "{plan:?} from {from}");
            let single_device = resume(&["--resume", &from, "--tensor", "1"]);
            assert_near(&format!("{plan:?} from {from} alone"), &single_device, &uninterrupted[step..], tolerance);
        }
        // A checkpoint of one device resumes on groups.
        fs::remove_dir_all(folder.join("ck")).unwrap();
        expect_exit(folder, 0, &[&common[..], &CHECKPOINT_FLAGS, &["--tensor", "1"]].concat());
        assert_near(
            &format!("{plan:?} after one"),
            &resume(&["--resume", "ck/step-00000004"]),
            &uninterrupted[4..],
            tolerance,
        );
    }
}

/// Gradient norms (per stage without a flush) and the loss scale depend on all devices.
#[test]
fn devices_agree_on_what_follows_from_all_gradients() {
    let flush = ["--schedule", "1f1b", "--microbatches", "2"];
    for (plan, extra, tolerance) in [
        (&[&flush[..], &["--zero", "0"]].concat(), &["--dtype", "f64", "--clip-norm", "0.05"][..], 1e-9),
        (&[&flush[..], &["--zero", "3"]].concat(), &["--dtype", "f64", "--clip-norm", "0.05"], 1e-9),
        (&["--schedule", "1f1b-rr", "--zero", "0"].to_vec(), &["--dtype", "f64", "--clip-norm", "0.05"], 1e-9),
        (&["--schedule", "2bw", "--microbatches", "2", "--zero", "1"].to_vec(), &["--clip-norm", "0.05"], 1e-5),
        (&[&flush[..], &["--zero", "0"]].concat(), &["--dtype", "f16", "--clip-norm", "0.05"], 1e-2),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        write_plan(folder, plan);
        // Plain SGD: Adam would cancel the clipping.
        let train = ["train", "m.onnx", "--plan", "p.json", "--synthetic-data", "--lr", "0.5", "--steps", "6"];
        let run = |name: &str, flags: &[&str]| {
            expect_exit(folder, 0, &[&train[..], flags, &["--metrics", name]].concat());
            losses(folder, name)
        };
        let single_device = run("alone.jsonl", &[extra, &["--tensor", "1"]].concat());
        assert_near(&format!("{plan:?} {extra:?}"), &run("shared.jsonl", extra), &single_device, tolerance);
        let clip = extra.iter().position(|flag| *flag == "--clip-norm").unwrap();
        let unclipped = run("free.jsonl", &extra[..clip]);
        assert!(
            (unclipped[5] - single_device[5]).abs() > 1e-3 * single_device[5].abs(),
            "nothing was shortened: {unclipped:?}, {single_device:?}"
        );
    }
}

/// A program file, which also writes checkpoints.
#[test]
fn programs_of_ones_own_run_on_groups() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    write_plan(folder, &["--schedule", "1f1b", "--microbatches", "2"]);
    expect_exit(folder, 0, &["simulate", "p.json", "--minibatches", "3", "--programs", "own.json"]);
    let mut program: Value = serde_json::from_str(&fs::read_to_string(folder.join("own.json")).unwrap()).unwrap();
    let workers = program["workers"].as_array_mut().unwrap();
    for (worker, stage) in [(0, 0), (2, 1)] {
        let list = workers[worker]["instructions"].as_array_mut().unwrap();
        list.push(json!({"op": "checkpoint", "stage": stage, "version": 3}));
    }
    fs::write(folder.join("own.json"), program.to_string()).unwrap();
    expect_exit(folder, 0, &[&TRAIN[..], &["--schedule", "own.json", "--checkpoint-dir", "ck"]].concat());
    expect_exit(folder, 0, &[&TRAIN[..], &["--steps", "3", "--save", "whole.safetensors"]].concat());
    let expected = read(folder, "whole.safetensors");
    assert!(read(&folder.join("ck"), "weights.safetensors") == expected);
    let stages = ["stage-0-version-3.safetensors", "stage-1-version-3.safetensors"];
    let mut saved: BTreeMap<String, Tensor> = BTreeMap::new();
    stages.iter().for_each(|name| saved.extend(read(&folder.join("ck"), name)));
    assert!(saved == expected);
}
