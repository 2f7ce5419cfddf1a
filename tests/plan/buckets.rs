//! Gradient buckets, from the command line to the weights.

use assert_cmd::Command;
use serde_json::Value;
use std::fs;
use std::path::Path;

fn run(folder: &Path, code: i32, arguments: &[&str]) -> [String; 2] {
    let output = Command::cargo_bin("pipec").unwrap().current_dir(folder).args(arguments).output().unwrap();
    let message = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {message:?}");
    message
}

fn read(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// A bucket per parameter and a single bucket give bitwise equal weights; the former is faster.
#[test]
fn buckets_hide_the_all_reduce_and_change_no_bits() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    run(folder, 0, &["zoo", "mlp", "-o", "m.onnx", "-q"]);
    let arguments = ["partition", "m.onnx", "--gpus", "3", "--bandwidth", "0.1GB/s", "--cut-after", "relu2"];
    let stages = ["--stages", "2,1", "--schedule", "1f1b"];
    let batch_flags = ["--microbatches", "4", "--micro-batch", "4", "-q"];
    let mut results = Vec::new();
    for (size, name) in [("1B", "parts"), ("1GB", "whole")] {
        let (plan, out) = (format!("{name}.json"), format!("{name}.safetensors"));
        run(folder, 0, &[&arguments[..], &stages, &batch_flags, &["--bucket", size, "-o", &plan]].concat());
        run(folder, 0, &["plan", "check", &plan, "--model", "m.onnx"]);
        let train = ["train", "m.onnx", "--plan", &plan, "--synthetic-data", "--batch", "16", "--steps", "5"];
        run(folder, 0, &[&train[..], &["--save", &out, "-q"]].concat());
        results.push((read(&folder.join(&plan)), fs::read(folder.join(out)).unwrap()));
    }
    let [(bucketed, bucketed_weights), (unbucketed, unbucketed_weights)] = &results[..] else {
        panic!("two plans were made")
    };
    let first_stage = &bucketed["stages"][0];
    let buckets = first_stage["buckets"].as_array().unwrap();
    assert!(
        buckets.len() > 1
            && unbucketed["stages"][0].get("buckets").is_none()
            && bucketed["stages"][1].get("buckets").is_none()
    );
    let bytes: u64 = buckets.iter().map(|bucket| bucket["bytes"].as_u64().unwrap()).sum();
    // Gradients are added and sent in f32, weights have two bytes.
    assert_eq!(bytes, 2 * first_stage["memory"]["weights"].as_u64().unwrap());
    assert_eq!(bytes, first_stage["gradient_bytes"].as_u64().unwrap());
    let us = |plan: &Value| plan["predicted"]["minibatch_us"].as_f64().unwrap();
    assert!(us(bucketed) < us(unbucketed), "{} and {}", us(bucketed), us(unbucketed));
    assert!(bucketed_weights == unbucketed_weights);
    run(folder, 0, &["simulate", "parts.json", "--programs", "p.txt", "-q"]);
    let programs = fs::read_to_string(folder.join("p.txt")).unwrap();
    assert!(programs.contains(&format!(" buckets={}", buckets.len())), "{programs}");
    assert!(programs.contains("all-reduce 0 round 0 bucket 1 "), "{programs}");
}

/// No other power of two gives a faster program. The plan states the bucket size and the hidden time.
#[test]
fn the_fastest_size_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    run(folder, 0, &["zoo", "mlp", "-o", "m.onnx", "-q"]);
    let cluster = "schema = \"pipec.cluster/1\"\n[device]\nkind = \"cpu\"\n[[level]]\nname = \"far\"\ncount = 3\nbandwidth = \"1GB/s\"\nlatency = \"200us\"\n";
    fs::write(folder.join("far.toml"), cluster).unwrap();
    let near_flags = ["--gpus", "3", "--bandwidth", "0.1GB/s"];
    for (links, schedule) in [(&near_flags[..], "1f1b"), (&["--cluster", "far.toml"], "1f1b"), (&near_flags, "1f1b-rr")]
    {
        let arguments = ["partition", "m.onnx", "--cut-after", "relu2", "--schedule", schedule, "--stages", "2,1"];
        let items = if schedule == "1f1b" { "4" } else { "1" };
        let flags = ["--microbatches", items, "--micro-batch", "4", "--profile", "analytic:cpu", "--bucket"];
        let planned = |size: &str| {
            let [message, _] = run(folder, 0, &[&arguments[..], links, &flags, &[size, "-o", "p.json"]].concat());
            run(folder, 0, &["plan", "check", "p.json", "--model", "m.onnx", "--profile", "analytic:cpu"]);
            (read(&folder.join("p.json")), message)
        };
        let us = |plan: &Value| plan["predicted"]["minibatch_us"].as_f64().unwrap();
        let (plan_auto, message) = planned("auto");
        let size = plan_auto["options"]["bucket_bytes"].as_u64().unwrap();
        assert!(size.is_power_of_two());
        assert!(message.contains("% of that time overlaps with computation"), "{message}");
        let other_us: Vec<f64> = (12..=19).map(|power| us(&planned(&format!("{}B", 1u64 << power)).0)).collect();
        let min_us = other_us.iter().copied().fold(f64::INFINITY, f64::min);
        assert!(
            (us(&plan_auto) - min_us).abs() <= 1e-6 * min_us,
            "{links:?} {schedule}: {size} B takes {}, {other_us:?}",
            us(&plan_auto)
        );
        println!("{links:?} {schedule}: {size} B, {other_us:?}");
    }
}

#[test]
fn buckets_of_another_stage_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    run(folder, 0, &["zoo", "mlp", "-o", "m.onnx", "-q"]);
    run(folder, 0, &["partition", "m.onnx", "--gpus", "2", "--stages", "2", "--bucket", "1B", "-o", "p.json", "-q"]);
    let plan = read(&folder.join("p.json"));
    let check_message = |change: &dyn Fn(&mut Value), with_model: bool| {
        let mut changed = plan.clone();
        change(&mut changed["stages"][0]["buckets"]);
        fs::write(folder.join("other.json"), changed.to_string()).unwrap();
        let model: &[&str] = if with_model { &["--model", "m.onnx"] } else { &[] };
        let [_, stderr] = run(folder, 1, &[&["plan", "check", "other.json"], model].concat());
        stderr
    };
    assert!(check_message(&|buckets| buckets[0]["bytes"] = 7.into(), false).contains("the stage's gradients"));
    assert!(check_message(&|buckets| buckets[0]["ready"] = 1.5.into(), false).contains("ascending numbers"));
    assert!(check_message(&|buckets| _ = buckets.as_array_mut().unwrap().drain(1..), false).contains("at least 2"));
    let swapped = |buckets: &mut Value| {
        let (a, b) = (buckets[0]["parameters"].take(), buckets[1]["parameters"].take());
        (buckets[0]["parameters"], buckets[1]["parameters"]) = (b, a);
    };
    assert!(check_message(&swapped, true).contains("buckets of stage 0"));
    let [_, stderr] = run(folder, 2, &["partition", "m.onnx", "--gpus", "2", "--bucket", "none"]);
    assert!(stderr.contains("--bucket"), "{stderr}");
}
