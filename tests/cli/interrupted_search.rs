//! A signal ends a search at any point: with the best plan so far, or before there is one.

#![cfg(target_os = "linux")]

use crate::support::family::send;
use assert_cmd::cargo::cargo_bin;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// The search alone takes longer on a busy machine; a signal ends it within a second on an idle one.
const PATIENCE: Duration = Duration::from_secs(10);

fn run(folder: &Path, arguments: &[&str]) {
    let status = Command::new(cargo_bin("pipec")).current_dir(folder).args(arguments).stdout(Stdio::null()).status();
    assert!(status.unwrap().success(), "{arguments:?}");
}

fn interrupt(folder: &Path, flags: &[&str], after: Duration) -> Option<i32> {
    let mut command = Command::new(cargo_bin("pipec"));
    command.current_dir(folder).arg("partition").args(flags).args(["-o", "plan.json", "-q"]);
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    thread::sleep(after);
    let start = Instant::now();
    send("INT", child.id());
    let code = child.wait_with_output().unwrap().status.code();
    assert!(start.elapsed() < PATIENCE, "{flags:?}, after {after:?}: {:?}", start.elapsed());
    code
}

#[test]
fn a_search_ends_with_the_best_plan_so_far() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for model in ["gpt2", "unet"] {
        run(folder, &["zoo", model, "--structure", "-o", &format!("{model}.onnx"), "-q"]);
    }
    let searches: [&[&str]; 3] = [
        &["gpt2.onnx", "--gpus", "8", "--batch", "512", "--profile", "analytic:h100"],
        &["unet.onnx", "--gpus", "8", "--bandwidth", "1GB/s", "--batch", "128", "--profile", "analytic:v100"],
        &["unet.onnx", "--gpus", "8", "--bandwidth", "1GB/s", "--microbatches", "64", "--profile", "analytic:v100"],
    ];
    for flags in searches {
        for milliseconds in [20, 150, 600, 1500] {
            let _ = fs::remove_file(folder.join("plan.json"));
            let code = interrupt(folder, flags, Duration::from_millis(milliseconds));
            let is_there = folder.join("plan.json").exists();
            assert!(code == Some(0) && is_there || code == Some(130) && !is_there, "{code:?}");
            if is_there {
                let plan: Value = serde_json::from_slice(&fs::read(folder.join("plan.json")).unwrap()).unwrap();
                let figure = |name: &str| plan[name].as_f64().unwrap();
                assert!(figure("lower_bound_us") <= plan["predicted"]["minibatch_us"].as_f64().unwrap());
                run(folder, &["simulate", "plan.json", "-q"]);
            }
        }
    }
}
