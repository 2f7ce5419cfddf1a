//! `profile --workers`: several workers of a CPU are measured at the same time, and plans state a prediction interval.

use assert_cmd::Command;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::thread::available_parallelism;

fn pipec(folder: &Path, code: i32, arguments: &[&str]) -> String {
    let output = Command::cargo_bin("pipec").unwrap().current_dir(folder).args(arguments).output().unwrap();
    let [out, error] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {out}{error}");
    out + &error
}

fn read(folder: &Path, name: &str) -> Value {
    serde_json::from_str(&fs::read_to_string(folder.join(name)).unwrap()).unwrap()
}

/// Line of a plan's prediction with this heading.
fn line<'a>(text: &'a str, heading: &str) -> Option<&'a str> {
    text.lines().find(|line| line.starts_with(heading))
}

#[test]
fn a_plan_states_its_prediction_interval() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    // A step takes more than a millisecond: of shorter ones, no interval is stated.
    pipec(folder, 0, &["zoo", "mlp", "--hidden", "512", "--layers", "4", "-o", "m.onnx"]);
    let measure =
        ["profile", "m.onnx", "--micro-batch", "128", "--runs", "3", "--no-cache", "-o", "p.json", "--workers"];
    let partition =
        ["partition", "m.onnx", "--cluster", "c.toml", "--profile", "p.json", "-o", "plan.json", "--stages"];
    pipec(folder, 0, &["cluster", "detect", "--cpu", "--workers", "2", "-o", "c.toml"]);
    pipec(folder, 0, &[&measure[..], &["1"]].concat());
    assert!(read(folder, "p.json")["settings"].get("workers").is_none());
    let text = pipec(folder, 0, &[&partition[..], &["1"]].concat());
    let plan = read(folder, "plan.json");
    let [low, high] = [0, 1].map(|at| plan["profile"]["interval"][at].as_f64().unwrap());
    assert!(0.0 < low && low <= 0.8 && 1.2 <= high, "{low} to {high}");
    assert!(line(&text, "expected  ").unwrap().ends_with("per minibatch"), "{text}");
    assert!(line(&text, "contention").is_none(), "{text}");
    if available_parallelism().map_or(1, |cores| cores.get()) < 2 {
        assert!(pipec(folder, 2, &[&measure[..], &["2"]].concat()).contains("this machine has 1 core"));
        return;
    }
    let text = pipec(folder, 0, &[&partition[..], &["1,1"]].concat());
    assert!(line(&text, "contention").unwrap().contains("`pipec profile --workers 2`"), "{text}");
    assert!(line(&text, "expected  ").is_none(), "{text}");
    let text = pipec(folder, 0, &[&measure[..], &["2"]].concat());
    assert!(text.contains("2 workers at the same time"), "{text}");
    assert_eq!(read(folder, "p.json")["settings"]["workers"], 2);
    let text = pipec(folder, 0, &[&partition[..], &["1"]].concat());
    assert!(line(&text, "contention").unwrap().contains("one alone is faster"), "{text}");
    let text = pipec(folder, 0, &[&partition[..], &["1,1"]].concat());
    assert!(line(&text, "expected  ").is_some() && line(&text, "contention").is_none(), "{text}");
    assert_eq!(read(folder, "plan.json")["profile"]["workers"], 2);
    pipec(folder, 0, &["plan", "check", "plan.json", "--model", "m.onnx", "--profile", "p.json"]);
    let train = ["train", "m.onnx", "--plan", "plan.json", "--synthetic-data", "--steps"];
    let has_expected_time =
        |text: &str| text.lines().any(|line| line.contains(" per minibatch: ") && line.ends_with(" expected"));
    let text = pipec(folder, 0, &[&train[..], &["20", "--metrics", "m.jsonl"]].concat());
    assert!(has_expected_time(&text), "{text}");
    pipec(folder, 0, &["report", "plan.json", "--metrics", "m.jsonl", "--html", "r.html"]);
    assert!(fs::read_to_string(folder.join("r.html")).unwrap().contains(" expected."));
    for flags in [&["--batch", "64"][..], &["--clip-norm", "1"], &["--staleness", "none"], &["--freeze", "fc1*"]] {
        assert!(
            !has_expected_time(&pipec(folder, 0, &[&train[..], &["20", "--metrics", "m.jsonl"], flags].concat())),
            "{flags:?}"
        );
        let lines = fs::read_to_string(folder.join("m.jsonl")).unwrap();
        let total: serde_json::Value = serde_json::from_str(lines.lines().last().unwrap()).unwrap();
        assert_eq!(total["total"]["differs_from_plan"].as_array().unwrap().len(), 1, "{flags:?}");
    }
    let checkpoints = ["20", "--checkpoint-dir", "ck", "--checkpoint-every", "5"];
    assert!(!has_expected_time(&pipec(folder, 0, &[&train[..], &checkpoints].concat())));
    assert!(!has_expected_time(&pipec(folder, 0, &[&train[..], &["9"]].concat())));
    let mut plan = read(folder, "plan.json");
    plan["profile"]["interval"] = json!([2.0, 1.0]);
    fs::write(folder.join("wrong.json"), plan.to_string()).unwrap();
    assert!(
        pipec(folder, 2, &["plan", "check", "wrong.json"])
            .contains("`profile.interval` is [2.0, 1.0]; the first must be from 0 to 1")
    );
    plan["profile"]["interval"] = json!([1.0, 2.0]);
    plan["profile"]["workers"] = json!(0);
    fs::write(folder.join("wrong.json"), plan.to_string()).unwrap();
    assert!(pipec(folder, 2, &["plan", "check", "wrong.json"]).contains("`profile.workers` is 0"));
}

#[test]
fn workers_are_those_of_this_cpu() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    pipec(folder, 0, &["zoo", "mlp", "-o", "m.onnx"]);
    for device in ["analytic:cpu", "analytic:h100"] {
        let text = pipec(folder, 2, &["profile", "m.onnx", "--workers", "2", "--device", device]);
        assert!(text.contains("`--workers` requires `--device cpu` and `--engine pipec`"), "{text}");
    }
    let too_many = (available_parallelism().map_or(1, |cores| cores.get()) + 1).to_string();
    let text = pipec(folder, 2, &["profile", "m.onnx", "--workers", &too_many]);
    assert!(text.contains("every worker needs one"), "{text}");
    assert!(!folder.join("m.profile.json").exists());
}
