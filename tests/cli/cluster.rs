//! `pipec cluster`: this machine as a cluster file, and descriptions of any cluster.

use assert_cmd::Command;
use serde_json::Value;
use std::fs;
use std::path::Path;

/// Returns exit code, standard output and standard error.
fn run_with_code(folder: &Path, arguments: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::cargo_bin("pipec").unwrap().current_dir(folder).args(arguments).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

fn run(folder: &Path, arguments: &[&str]) -> String {
    let (code, stdout, stderr) = run_with_code(folder, arguments);
    assert_eq!(code, Some(0), "{arguments:?}: {stderr}");
    stdout
}

#[test]
fn this_machine_is_a_cluster_that_plans_take() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    run(folder, &["cluster", "detect", "--cpu", "--workers", "3", "-o", "here.toml"]);
    let file = fs::read_to_string(folder.join("here.toml")).unwrap();
    assert!(file.starts_with("schema = \"pipec.cluster/1\"") && file.contains("kind = \"cpu\""), "{file}");
    assert_eq!(run(folder, &["cluster", "detect", "--cpu", "--workers", "3"]), file, "the same without a file");
    run(folder, &["zoo", "mlp", "-o", "model.onnx"]);
    run(folder, &["partition", "model.onnx", "--cluster", "here.toml", "-o", "plan.json"]);
    let plan: Value = serde_json::from_str(&fs::read_to_string(folder.join("plan.json")).unwrap()).unwrap();
    assert_eq!(plan["cluster"]["devices"], 3);

    // Benchmark output is a cluster file too; levels outside this machine are left out.
    fs::write(
        folder.join("two.toml"),
        format!("{file}\n[[level]]\nname = \"net\"\ncount = 2\nbandwidth = \"1GB/s\"\n"),
    )
    .unwrap();
    let table = run(folder, &["cluster", "bench", "two.toml", "-o", "measured.toml"]);
    assert!(table.contains("not measured"), "{table}");
    let cluster = |name: &str| -> Value {
        serde_json::from_str(&run(folder, &["cluster", "show", name, "--format", "json"])).unwrap()
    };
    let (before, after) = (cluster("two.toml"), cluster("measured.toml"));
    assert_eq!(before["levels"][1], after["levels"][1]);
    assert_ne!(before["levels"][0]["bandwidth"], after["levels"][0]["bandwidth"]);
    assert!(after["levels"][0]["bandwidth"].as_f64().unwrap() > 1e8);

    let (code, _, stderr) = run_with_code(folder, &["cluster", "bench", "gpus.toml"]);
    assert!(code == Some(2) && stderr.contains("gpus.toml"), "{stderr}");
    fs::write(
        folder.join("gpus.toml"),
        "schema = \"pipec.cluster/1\"\n[device]\nkind = \"h100\"\n[[level]]\ncount = 8\nbandwidth = \"450GB/s\"\n",
    )
    .unwrap();
    let (code, _, stderr) = run_with_code(folder, &["cluster", "bench", "gpus.toml"]);
    assert!(code == Some(1) && stderr.contains("nvbandwidth"), "{stderr}");
}

#[test]
fn a_cluster_is_shown_with_what_lies_between_any_two_devices() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let text = run(folder, &["cluster", "show", "--levels", "2:450GB/s,2:50GB/s"]);
    let expected = "\
4 x h100 (2 on level0 at 450.0 GB/s, 2 on level1 at 50.00 GB/s)

devices  type  memory each  memory bandwidth       f32 peak      bf16 peak
      4  h100     80.00 GB        3.350 TB/s  66.90 Tflop/s  989.4 Tflop/s
";
    assert!(text.starts_with(expected), "{text}");
    let rows: Vec<Vec<&str>> = text
        .lines()
        .skip_while(|line| !line.starts_with("bandwidth between"))
        .skip(2)
        .map(|line| line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect())
        .collect();
    assert_eq!(rows[0], ["0", "·", "450.0", "50.00", "50.00"]);
    assert_eq!(rows[3], ["3", "50.00", "50.00", "450.0", "·"]);
    let value: Value =
        serde_json::from_str(&run(folder, &["cluster", "show", "--gpus", "3", "--format", "json"])).unwrap();
    assert_eq!(value["devices"], 3);
    assert_eq!(value["bandwidth_between"][0], serde_json::json!([null, 450e9, 450e9]));
    // Too many devices to list pairs.
    assert!(!run(folder, &["cluster", "show", "--gpus", "64"]).contains("between"));
    let (code, _, stderr) = run_with_code(folder, &["cluster", "show"]);
    assert!(code == Some(2) && stderr.contains("--gpus"), "{stderr}");
}

#[test]
fn contradictions_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    run(folder, &["zoo", "mlp", "-o", "model.onnx"]);
    let level = "[[level]]\nname = \"link\"\ncount = 2\nbandwidth = \"1GB/s\"\n";
    let cluster = format!("schema = \"pipec.cluster/1\"\n[device]\nkind = \"h100\"\n{level}{level}");
    fs::write(folder.join("twice.toml"), cluster).unwrap();
    let (code, _, stderr) = run_with_code(folder, &["partition", "model.onnx", "--cluster", "twice.toml"]);
    assert!(code == Some(2) && stderr.contains("two levels are named `link`"), "{stderr}");

    run(folder, &["partition", "model.onnx", "--gpus", "4", "-o", "plan.json"]);
    let text = fs::read_to_string(folder.join("plan.json")).unwrap();
    let mut plan: Value = serde_json::from_str(&text).unwrap();
    plan["stages"][0]["hierarchy"][0]["replicas"] = 3.into();
    fs::write(folder.join("levels.json"), plan.to_string()).unwrap();
    for command in [&["plan", "check", "levels.json"][..], &["simulate", "levels.json"]] {
        let (code, _, stderr) = run_with_code(folder, command);
        assert!(code != Some(0) && stderr.contains("its levels multiply to 3 replicas"), "{stderr}");
    }
    fs::write(folder.join("marked.json"), format!("\u{feff}{text}")).unwrap();
    run(folder, &["plan", "check", "marked.json"]);
}
