//! `partition --batch N` searches micro-batch sizes, tensor-parallel degrees, ZeRO stages and schedules together with the
//! stages.

use assert_cmd::Command;
use serde_json::Value;
use std::path::Path;

fn pipec(folder: &Path, code: i32, arguments: &[&str]) -> (String, String) {
    let output = Command::cargo_bin("pipec").unwrap().current_dir(folder).args(arguments).output().unwrap();
    let [stdout, stderr] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stdout}{stderr}");
    (stdout, stderr)
}

fn model(folder: &Path) {
    pipec(folder, 0, &["zoo", "gpt", "--layers", "6", "--hidden", "128", "--structure", "-o", "m.onnx", "-q"]);
}

const ARGUMENTS: [&str; 10] =
    ["partition", "m.onnx", "--gpus", "4", "--no-replication", "--optimizer", "adam", "--bandwidth", "25GB/s", "-q"];

fn plan_json(folder: &Path, flags: &[&str]) -> Option<Value> {
    let arguments = [&ARGUMENTS[..], &["--format", "json", "-o", "p.json"], flags].concat();
    let output = Command::cargo_bin("pipec").unwrap().current_dir(folder).args(&arguments).output().unwrap();
    output.status.success().then(|| serde_json::from_slice(&output.stdout).unwrap())
}

fn speed(plan: &Value) -> f64 {
    plan["predicted"]["throughput_per_s"].as_f64().unwrap()
}

#[test]
fn no_combination_is_faster_than_the_one_that_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(folder);
    let searched = plan_json(folder, &["--batch", "64", "--schedule", "auto"]).unwrap();
    let [size, count] =
        [&searched["schedule"]["micro_batch"], &searched["schedule"]["microbatches"]].map(|n| n.as_u64().unwrap());
    assert_eq!(size * count, 64, "{searched}");
    let mut best = (0.0, String::new());
    for count in [1, 2, 4, 8, 16, 32, 64] {
        for schedule in ["gpipe", "1f1b", "interleaved", "bfs", "zb-h1", "zb-h2", "zbv", "dualpipev"] {
            let (size, count) = ((64 / count).to_string(), count.to_string());
            let pinned = plan_json(folder, &["--micro-batch", &size, "--microbatches", &count, "--schedule", schedule]);
            let speed = pinned.as_ref().map_or(0.0, speed);
            if speed > best.0 {
                best = (speed, format!("{schedule}, {count} micro-batches of {size}"));
            }
        }
    }
    assert!(speed(&searched) >= best.0, "{}, but {} with {}", speed(&searched), best.0, best.1);
    // Searching several sizes and schedules pays off here.
    let unsearched = plan_json(folder, &["--micro-batch", "16", "--microbatches", "4"]).unwrap();
    assert!(speed(&searched) > 1.05 * speed(&unsearched), "{} and {}", speed(&searched), speed(&unsearched));
}

#[test]
fn a_given_part_leaves_the_other_one() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(folder);
    let sizes = |more: &[&str]| {
        let plan = plan_json(folder, more).unwrap();
        (
            plan["schedule"]["micro_batch"].as_u64(),
            plan["schedule"]["microbatches"].as_u64(),
            plan["schedule"]["kind"].clone(),
        )
    };
    let (size, count, kind) = sizes(&["--batch", "24", "--micro-batch", "8"]);
    assert_eq!((size, count), (Some(8), Some(3)));
    assert_ne!(kind, "1f1b-rr", "a batch needs a flush");
    let flags = ["--batch", "24", "--microbatches", "4", "--schedule", "1f1b"];
    assert_eq!(sizes(&flags), (Some(6), Some(4), "1f1b".into()));
    let (size, count, kind) = sizes(&["--batch", "24", "--schedule", "gpipe"]);
    assert_eq!((size.unwrap() * count.unwrap(), kind), (24, "gpipe".into()));
    let more = ["--batch", "24", "--schedule", "auto", "--compare", "-o", "p.json"];
    let table = pipec(folder, 0, &[&ARGUMENTS[..9], &more].concat()).0;
    assert!(["schedule", "zb-h2", "1f1b"].iter().all(|part| table.contains(part)), "{table}");
}

#[test]
fn what_leaves_nothing_to_find_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(folder);
    let error_of = |more: &[&str]| pipec(folder, 2, &[&ARGUMENTS[..], more].concat()).1;
    let message = error_of(&["--batch", "10", "--microbatches", "4"]);
    assert!(message.contains("10 samples are not a multiple of 4"), "{message}");
    let message = error_of(&["--batch", "24", "--micro-batch", "4", "--microbatches", "2"]);
    assert!(message.contains("their product is 8 samples"), "{message}");
    let message = error_of(&["--batch", "24", "--schedule", "inference"]);
    assert!(message.contains("inference"), "{message}");
    let message = error_of(&["--batch", "24", "--objective", "latency"]);
    assert!(message.contains("inference"), "{message}");
    let message = error_of(&["--microbatches", "2", "--schedule", "inference"]);
    assert!(message.contains("inference"), "{message}");
    let message = error_of(&["--schedule", "auto", "--objective", "latency"]);
    assert!(message.contains("`--objective latency` cannot be combined with `--schedule auto`"), "{message}");
    let message = error_of(&["--schedule", "auto", "--cost", "paper"]);
    assert!(message.contains("--cost paper"), "{message}");
}

/// Little memory leaves small micro-batches.
#[test]
fn what_fits_is_found_where_most_does_not() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(folder);
    let arguments = [&ARGUMENTS[..9], &["--batch", "64", "--schedule", "auto", "-o", "p.json", "--memory"]].concat();
    let (message, _) = pipec(folder, 0, &[&arguments[..], &["12MB"]].concat());
    assert!(message.contains("global batch 64"), "{message}");
    let (_, message) = pipec(folder, 3, &[&arguments[..], &["1MB"]].concat());
    let smallest = message.split("`--memory ").nth(1).and_then(|rest| rest.split('`').next());
    let smallest = smallest.unwrap_or_else(|| panic!("{message}"));
    pipec(folder, 0, &[&arguments[..], &[smallest]].concat());
}

/// On eight devices in two servers, no layout that can be pinned is faster than the plan that is found.
#[test]
fn no_pinned_layout_is_faster() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let zoo = ["zoo", "gpt", "--layers", "8", "--hidden", "1024", "--heads", "16", "--context", "512", "--structure"];
    pipec(folder, 0, &[&zoo[..], &["-o", "m.onnx", "-q"]].concat());
    let cluster = ["partition", "m.onnx", "--levels", "4:100GB/s,2:10GB/s", "--memory", "3GB", "--optimizer", "adam"];
    let plan = |more: &[&str]| {
        let arguments = [&cluster[..], &["-q", "--format", "json", "-o", "p.json"], more].concat();
        let output = Command::cargo_bin("pipec").unwrap().current_dir(folder).args(&arguments).output().unwrap();
        output.status.success().then(|| serde_json::from_slice::<Value>(&output.stdout).unwrap())
    };
    let searched = plan(&["--batch", "32"]).unwrap();
    let mut pinned = 0;
    for tensor in [1, 2, 4] {
        for stages in [1, 2, 4, 8] {
            for micro_batch in [1, 2, 4] {
                let replicas = 8 / tensor / stages;
                if replicas == 0 || 32 / micro_batch < replicas {
                    continue;
                }
                let list = vec![replicas.to_string(); stages].join(",");
                let (size, count) = (micro_batch.to_string(), (32 / micro_batch).to_string());
                let degree = if tensor == 1 { "never".to_string() } else { tensor.to_string() };
                let pin = ["--stages", &list, "--tensor", &degree, "--micro-batch", &size, "--microbatches", &count];
                for zero in ["0", "1"] {
                    let Some(pinned_plan) = plan(&[&pin[..], &["--schedule", "1f1b", "--zero", zero]].concat()) else {
                        continue;
                    };
                    pinned += 1;
                    let (best_speed, speed) = (speed(&searched), speed(&pinned_plan));
                    assert!(best_speed >= speed * (1.0 - 1e-3), "{best_speed}; {speed} with {pin:?}, ZeRO {zero}");
                }
            }
        }
    }
    assert!(pinned > 20, "{pinned} fit");
    let near = plan(&["--batch", "32", "--tensor", "2", "--gap", "200%"]).unwrap();
    let ratio = near["predicted"]["minibatch_us"].as_f64().unwrap() / near["lower_bound_us"].as_f64().unwrap();
    assert!(near["options"]["gap"] == 2.0 && ratio <= 3.0, "{ratio}");
}

/// The plan does not depend on the number of threads.
#[cfg(target_os = "linux")]
#[test]
fn one_core_finds_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(folder);
    let arguments =
        ["partition", "m.onnx", "--levels", "4:100GB/s,2:10GB/s", "--batch", "48", "--optimizer", "adam", "-q"];
    pipec(folder, 0, &[&arguments[..], &["-o", "all.json"]].concat());
    let program = assert_cmd::cargo::cargo_bin("pipec");
    let mut single_core = Command::new("taskset");
    single_core
        .current_dir(folder)
        .args(["-c", "0"])
        .arg(program)
        .args(arguments)
        .args(["-o", "one.json"])
        .assert()
        .success();
    let read = |name: &str| std::fs::read(folder.join(name)).unwrap();
    assert_eq!(read("all.json"), read("one.json"));
}

/// Tensor parallelism is compared with single devices, also under schedules that do not support it.
#[test]
fn groups_take_no_order_of_work_away() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(folder);
    let flags = ["--micro-batch", "32", "--microbatches", "2", "--schedule", "zbv"];
    let single = plan_json(folder, &flags).unwrap();
    let with_groups = plan_json(folder, &[&flags[..], &["--tensor", "auto"]].concat()).unwrap();
    assert!(speed(&with_groups) >= speed(&single));
}

/// With a target, the plan that is found can be exported, and the independent check counts its memory likewise.
#[test]
fn targets_get_plans_that_they_run() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let zoo = ["zoo", "gpt", "--layers", "8", "--hidden", "1024", "--heads", "16", "--context", "512", "--structure"];
    pipec(folder, 0, &[&zoo[..], &["-o", "m.onnx", "-q"]].concat());
    for target in ["megatron", "deepspeed", "torchtitan", "torch"] {
        let arguments =
            ["partition", "m.onnx", "--levels", "4:100GB/s,2:10GB/s", "--memory", "3GB", "--optimizer", "adam"];
        let flags = ["--batch", "48", "--target", target, "-o", "p.json", "-q"];
        pipec(folder, 0, &[&arguments[..], &flags].concat());
        let (_, stderr) = pipec(folder, 0, &["export", "p.json", "--to", target, "--model", "m.onnx", "-o", "out"]);
        assert!(!stderr.contains("error"), "{target}: {stderr}");
        pipec(folder, 0, &["plan", "check", "p.json", "--model", "m.onnx"]);
        let out = folder.join("out");
        if out.is_dir() { std::fs::remove_dir_all(out).unwrap() } else { std::fs::remove_file(out).unwrap() }
    }
    // Replicas all-reduce in place, also without a target.
    let arguments =
        ["partition", "m.onnx", "--levels", "4:100GB/s,2:10GB/s", "--optimizer", "adam", "--microbatches", "16"];
    let flags =
        ["--schedule", "interleaved", "--chunks", "2", "--stages", "4,4,4,4", "--micro-batch", "2", "-o", "i.json"];
    let memory = |target: &[&str]| {
        pipec(folder, 0, &[&arguments[..], &flags, target, &["-q"]].concat());
        pipec(folder, 0, &["plan", "check", "i.json", "--model", "m.onnx"]);
        let plan: Value = serde_json::from_slice(&std::fs::read(folder.join("i.json")).unwrap()).unwrap();
        std::fs::remove_file(folder.join("i.json")).unwrap();
        let total_of =
            |name: &str| plan["stages"].as_array().unwrap().iter().map(|s| s["memory"][name].as_u64().unwrap()).sum();
        total_of("gradients")
    };
    let [untargeted, megatron]: [u64; 2] = [memory(&[]), memory(&["--target", "megatron"])];
    assert_eq!(megatron, untargeted);
}
