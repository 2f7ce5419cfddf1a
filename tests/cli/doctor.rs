//! `pipec doctor`: this machine, and simulated GPUs.

use crate::support::simulated_gpus::{driver, on_simulated_gpus};
use assert_cmd::Command;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

fn run(folder: &Path, format: &str) -> String {
    let mut command = Command::cargo_bin("pipec").unwrap();
    let output = command.current_dir(folder).args(["doctor", "--format", format]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_doctor_says_what_works_and_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let text = run(folder, "text");
    assert!(text.contains("CPU") && text.contains("profile cache") && text.contains("GPUs"), "{text}");
    let value: Value = serde_json::from_str(&run(folder, "json")).unwrap();
    assert!(value["findings"].as_array().unwrap().iter().all(|finding| finding["state"] != "broken"), "{value}");
    // The cache folder is a file.
    fs::write(folder.join("pipec"), "").unwrap();
    let output = Command::cargo_bin("pipec").unwrap().env("XDG_CACHE_HOME", folder).arg("doctor").output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(
        stderr.contains("error: checks failed: profile cache") && stderr.contains("cannot write files"),
        "{stderr}"
    );
}

/// The doctor's answer on simulated GPUs with these variables, and its text.
fn examine_gpus(variables: &[(&str, &str)]) -> Option<(Value, String)> {
    let driver = driver()?;
    let folder = tempfile::tempdir().unwrap();
    let run = |format: &str| {
        let mut command = on_simulated_gpus(env!("CARGO_BIN_EXE_pipec"), driver);
        command.args(["doctor", "--format", format]).env("XDG_CACHE_HOME", folder.path());
        let output = command.envs(variables.iter().copied()).output().unwrap();
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let (text, notes) = run("text");
    Some((serde_json::from_str(&run("json").0).unwrap(), text + &notes))
}

fn row<'a>(text: &'a str, start: &str) -> Vec<&'a str> {
    let line = text.lines().find(|line| line.trim_start().starts_with(start));
    line.unwrap_or_else(|| panic!("{start}: {text}")).split_whitespace().collect()
}

#[test]
fn the_doctor_examines_every_gpu() {
    let Some((value, text)) = examine_gpus(&[("PIPEC_SIM_DEVICES", "2")]) else { return };
    assert!(text.contains("CUDA 13.0") && text.contains("version 13.0; compiles for sm_90"), "{text}");
    let devices = value["devices"].as_array().unwrap();
    assert_eq!(devices.len(), 2, "{value}");
    for device in devices {
        assert_eq!((&device["architecture"], &device["runs_kernels"]), (&json!("sm_90"), &json!(true)));
        assert_eq!((&device["memory"], &device["free"]), (&json!(4_294_967_296_u64), &json!(4_294_967_296_u64)));
    }
    assert_eq!(value["peers"], json!([[true, true], [true, true]]));
    assert_eq!(value["libraries"][1]["version"], "13.0");
    assert!(text.contains("version 13.0.0; used for matrix products"), "{text}");
    assert!(text.contains("version 9.26.0; used for convolutions"), "{text}");
    assert_eq!(row(&text, "0  Simulated")[1..], ["Simulated", "GPU", "sm_90", "4.295", "GB", "4.295", "GB", "ok"]);
    assert_eq!(row(&text, "access"), ["access", "0", "1"]);
    assert_eq!(row(&text, "1  yes"), ["1", "yes", "-"]);

    let Some((value, text)) = examine_gpus(&[("PIPEC_SIM_PEER", "0"), ("PIPEC_SIM_ARCH", "80")]) else { return };
    assert_eq!(value["peers"], json!([[true, false], [false, true]]));
    assert!(text.contains("compiles for sm_80"), "{text}");

    let Some((value, text)) = examine_gpus(&[("PIPEC_SIM_CUBLASLT", "0"), ("PIPEC_SIM_CUDNN", "0")]) else { return };
    assert!(text.contains("does not start, so pipec's own kernels compute matrix products"), "{text}");
    assert!(text.contains("does not start, so pipec's own kernels compute convolutions"), "{text}");
    assert!(value["findings"].as_array().unwrap().iter().all(|finding| finding["state"] != "broken"), "{value}");
}

#[test]
fn the_doctor_reports_a_compiler_that_compiles_nothing() {
    let Some((value, text)) = examine_gpus(&[("PIPEC_SIM_CXX", "/none"), ("PIPEC_SIM_DEVICES", "1")]) else { return };
    assert_eq!((&value["devices"][0]["runs_kernels"], &value["peers"]), (&json!(false), &json!([[true]])));
    assert!(text.contains("cannot compile kernels") && text.contains("0 of 1 GPU can be used"), "{text}");
    assert!(text.contains("checks failed: CUDA compiler, GPUs"), "{text}");
}
