//! ZeRO from the command line: plans, checks, weights, checkpoints and processes.

use assert_cmd::Command;
use serde_json::Value;
use std::fs;
use std::path::Path;

fn ends(folder: &Path, code: i32, arguments: &[&str]) -> [String; 2] {
    let output = Command::cargo_bin("pipec").unwrap().current_dir(folder).args(arguments).output().unwrap();
    let message = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {message:?}");
    message
}

fn read(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

const PLAN: [&str; 14] = [
    "partition",
    "m.onnx",
    "--cut-after",
    "relu2",
    "--gpus",
    "3",
    "--schedule",
    "1f1b",
    "--microbatches",
    "4",
    "--micro-batch",
    "4",
    "--optimizer",
    "adam",
];
const TRAIN: [&str; 9] =
    ["train", "m.onnx", "--synthetic-data", "--batch", "16", "--optimizer", "adam", "-q", "--plan"];

/// A folder with a model and plans with two replicas and one, at every level.
fn plans() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    ends(folder.path(), 0, &["zoo", "mlp", "-o", "m.onnx", "-q"]);
    for level in ["0", "1", "2", "3"] {
        let more = ["--stages", "2,1", "--bucket", "20KB", "--zero", level, "-o", &format!("{level}.json"), "-q"];
        ends(folder.path(), 0, &[&PLAN[..], &more].concat());
        ends(folder.path(), 0, &["plan", "check", &format!("{level}.json"), "--model", "m.onnx"]);
    }
    folder
}

fn trained(folder: &Path, plan: &str, more: &[&str]) -> Vec<u8> {
    ends(folder, 0, &[&TRAIN[..], &[plan, "--save", "w.safetensors"], more].concat());
    fs::read(folder.join("w.safetensors")).unwrap()
}

/// Weights are bitwise equal with and without ZeRO: in threads, in processes, in 16-bit types, and over a resume with
/// another level.
#[test]
fn weights_are_the_same_with_shares() {
    let (plans, steps) = (plans(), ["--steps", "5"]);
    let folder = plans.path();
    for more in [&[][..], &["--processes"], &["--dtype", "bf16"]] {
        let more = [&steps[..], more].concat();
        assert!(trained(folder, "0.json", &more) == trained(folder, "1.json", &more), "{more:?}");
    }
    for (before, after) in [
        ("0.json", "1.json"),
        ("1.json", "0.json"),
        ("1.json", "1.json"),
        ("2.json", "1.json"),
        ("3.json", "0.json"),
        ("2.json", "3.json"),
        ("3.json", "3.json"),
    ] {
        let kept = ["--checkpoint-dir", "kept", "--checkpoint-every", "3", "--steps", "5"];
        let whole = trained(folder, before, &kept);
        fs::remove_dir_all(folder.join("kept/step-00000005")).ok();
        let resumed = trained(folder, after, &["--resume", "kept/step-00000003", "--steps", "5"]);
        // ZeRO 2 and 3 add in another order.
        let is_same = before < "2.json" || after > "1.json";
        assert!(!is_same || resumed == whole, "{before} and then {after}");
        fs::remove_dir_all(folder.join("kept")).unwrap();
    }
    assert!(trained(folder, "2.json", &steps) == trained(folder, "3.json", &steps));
    for plan in ["2.json", "3.json"] {
        let kept = ["--checkpoint-dir", "kept", "--checkpoint-every", "3", "--steps", "5", "--processes"];
        let whole = trained(folder, plan, &steps);
        assert!(trained(folder, plan, &kept) == whole, "{plan} in processes");
        let resumed = trained(folder, plan, &["--resume", "kept/step-00000003", "--steps", "5", "--processes"]);
        assert!(resumed == whole, "{plan} in processes, resumed");
        fs::remove_dir_all(folder.join("kept")).unwrap();
        let more = ["--dtype", "bf16", "--steps", "5"];
        let threads = trained(folder, plan, &more);
        assert!(trained(folder, plan, &[&more[..], &["--processes"]].concat()) == threads, "{plan} in bf16");
    }
}

/// Without a flush a checkpoint contains older versions, of which each replica has only a shard.
#[test]
fn runs_without_a_flush_go_on_under_any_level() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    ends(folder, 0, &["zoo", "mlp", "-o", "m.onnx", "-q"]);
    let plan = ["partition", "m.onnx", "--cut-after", "relu2", "--gpus", "3", "--stages", "2,1", "--in-flight", "3,2"];
    let more = ["--schedule", "1f1b-rr", "--micro-batch", "16", "--optimizer", "adam", "-q"];
    for level in ["0", "1", "3"] {
        ends(folder, 0, &[&plan[..], &more, &["--zero", level, "-o", &format!("{level}.json")]].concat());
    }
    let kept = ["--checkpoint-dir", "kept", "--checkpoint-every", "4", "--steps", "12"];
    let whole = trained(folder, "0.json", &["--steps", "12"]);
    for (before, after) in [("0.json", "3.json"), ("3.json", "0.json"), ("3.json", "3.json"), ("1.json", "3.json")] {
        assert!(trained(folder, before, &kept) == whole, "{before}");
        fs::remove_dir_all(folder.join("kept/step-00000012")).ok();
        let resumed = trained(folder, after, &["--resume", "kept/step-00000004", "--steps", "12"]);
        assert!(resumed == whole, "{before} and then {after}");
        let processes = ["--resume", "kept/step-00000004", "--steps", "12", "--processes"];
        assert!(trained(folder, after, &processes) == whole, "{before} and then {after} in processes");
        fs::remove_dir_all(folder.join("kept")).unwrap();
    }
}

#[test]
fn plans_say_what_replicas_share() {
    let plans = plans();
    let folder = plans.path();
    let [zero, one, two, three] = ["0", "1", "2", "3"].map(|level| read(&folder.join(format!("{level}.json"))));
    let held = |plan: &Value, part: &str| plan["stages"][0]["memory"][part].as_u64().unwrap();
    assert_eq!((one["stages"][0]["zero"].as_u64(), zero["stages"][0].get("zero")), (Some(1), None));
    assert!(one["stages"][1].get("zero").is_none(), "one replica shares nothing");
    assert_eq!(held(&one, "optimizer"), held(&zero, "optimizer") / 2);
    // GPUs all-reduce in place: each replica keeps its sums whole until the step.
    assert_eq!(held(&one, "gradients"), held(&zero, "gradients"));
    assert!(held(&two, "gradients") < held(&one, "gradients"));
    assert_eq!(held(&three, "weights"), held(&zero, "weights") / 2);
    assert_eq!(three["stages"][0]["parameter_bytes"].as_u64(), Some(held(&zero, "weights")));
    assert_eq!(held(&three, "gradients"), held(&two, "gradients"));
    let us = |plan: &Value| plan["predicted"]["objective_us"].as_f64().or(plan["predicted"]["minibatch_us"].as_f64());
    assert_eq!(us(&one), us(&zero));
    let message = |change: &dyn Fn(&mut Value), model: &[&str]| {
        let mut other = one.clone();
        change(&mut other["stages"]);
        fs::write(folder.join("other.json"), other.to_string()).unwrap();
        ends(folder, 1, &[&["plan", "check", "other.json"], model].concat()).concat()
    };
    assert!(message(&|stages| stages[0]["zero"] = 9.into(), &[]).contains("stages 0 to"));
    assert!(message(&|stages| stages[1]["zero"] = 1.into(), &[]).contains("at least 2 replicas"));
    assert!(message(&|stages| stages[0]["zero"] = 2.into(), &["--model", "m.onnx"]).contains("memory of stage 0"));
    assert!(message(&|stages| stages[0]["zero"] = 3.into(), &[]).contains("not a shard of 0 B"));
    assert!(message(&|stages| stages[0]["parameter_bytes"] = 7.into(), &[]).contains("only valid with zero 3"));
    let [_, refused] = ends(folder, 2, &[&PLAN[..], &["--zero", "7"]].concat());
    assert!(refused.contains("or auto"), "{refused}");
    ends(folder, 2, &["partition", "m.onnx", "--gpus", "2", "--schedule", "inference", "--zero", "1"]);
    ends(folder, 0, &["simulate", "1.json", "--programs", "p.txt", "-q"]);
    let programs = fs::read_to_string(folder.join("p.txt")).unwrap();
    assert!(programs.contains(" zero=1") && programs.contains("all-gather 0 v1"), "{programs}");
}

#[test]
fn the_least_level_that_fits_is_found() {
    let plans = plans();
    let folder = plans.path();
    let total = |level: &str| {
        let plan = read(&folder.join(format!("{level}.json")));
        plan["stages"][0]["memory"]["total"].as_u64().unwrap()
    };
    for (limit, level) in [(total("0"), 0), (total("0") - 1, 1), (total("1") - 1, 2), (total("2") - 1, 3)] {
        let memory = format!("{limit}B");
        let more = ["--stages", "2,1", "--bucket", "20KB", "--zero", "auto", "--recompute", "never"];
        let memory = ["--memory", &memory, "-o", "auto.json", "-q"];
        ends(folder, 0, &[&PLAN[..], &more, &memory].concat());
        let plan = read(&folder.join("auto.json"));
        assert_eq!(plan["stages"][0].get("zero").and_then(Value::as_u64).unwrap_or(0), level, "{limit} B");
        assert_eq!(plan["options"]["zero"], "auto");
        ends(folder, 0, &["plan", "check", "auto.json", "--model", "m.onnx"]);
    }
}
