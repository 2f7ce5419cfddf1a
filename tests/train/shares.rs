//! ZeRO from the command line: plans, checks, weights, checkpoints and processes.

use assert_cmd::Command;
use serde_json::Value;
use std::fs;
use std::path::Path;

fn expect_exit(folder: &Path, code: i32, arguments: &[&str]) -> [String; 2] {
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
fn write_plans() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    expect_exit(folder.path(), 0, &["zoo", "mlp", "-o", "m.onnx", "-q"]);
    for level in ["0", "1", "2", "3"] {
        let extra = ["--stages", "2,1", "--bucket", "20KB", "--zero", level, "-o", &format!("{level}.json"), "-q"];
        expect_exit(folder.path(), 0, &[&PLAN[..], &extra].concat());
        expect_exit(folder.path(), 0, &["plan", "check", &format!("{level}.json"), "--model", "m.onnx"]);
    }
    folder
}

fn train(folder: &Path, plan: &str, extra: &[&str]) -> Vec<u8> {
    expect_exit(folder, 0, &[&TRAIN[..], &[plan, "--save", "w.safetensors"], extra].concat());
    fs::read(folder.join("w.safetensors")).unwrap()
}

/// Weights are bitwise equal with and without ZeRO: in threads, in processes, in 16-bit types, and over a resume with
/// another level.
#[test]
fn weights_are_the_same_with_shares() {
    let (plans, steps) = (write_plans(), ["--steps", "5"]);
    let folder = plans.path();
    for extra in [&[][..], &["--processes"], &["--dtype", "bf16"]] {
        let extra = [&steps[..], extra].concat();
        assert!(train(folder, "0.json", &extra) == train(folder, "1.json", &extra), "{extra:?}");
    }
    for (first_plan, resumed_plan) in [
        ("0.json", "1.json"),
        ("1.json", "0.json"),
        ("1.json", "1.json"),
        ("2.json", "1.json"),
        ("3.json", "0.json"),
        ("2.json", "3.json"),
        ("3.json", "3.json"),
    ] {
        let checkpoint_flags = ["--checkpoint-dir", "kept", "--checkpoint-every", "3", "--steps", "5"];
        let uninterrupted = train(folder, first_plan, &checkpoint_flags);
        fs::remove_dir_all(folder.join("kept/step-00000005")).ok();
        let resumed = train(folder, resumed_plan, &["--resume", "kept/step-00000003", "--steps", "5"]);
        // ZeRO 2 and 3 add in another order.
        let is_same = first_plan < "2.json" || resumed_plan > "1.json";
        assert!(!is_same || resumed == uninterrupted, "{first_plan} and then {resumed_plan}");
        fs::remove_dir_all(folder.join("kept")).unwrap();
    }
    assert!(train(folder, "2.json", &steps) == train(folder, "3.json", &steps));
    for plan in ["2.json", "3.json"] {
        let checkpoint_flags = ["--checkpoint-dir", "kept", "--checkpoint-every", "3", "--steps", "5", "--processes"];
        let uninterrupted = train(folder, plan, &steps);
        assert!(train(folder, plan, &checkpoint_flags) == uninterrupted, "{plan} in processes");
        let resumed = train(folder, plan, &["--resume", "kept/step-00000003", "--steps", "5", "--processes"]);
        assert!(resumed == uninterrupted, "{plan} in processes, resumed");
        fs::remove_dir_all(folder.join("kept")).unwrap();
        let extra = ["--dtype", "bf16", "--steps", "5"];
        let threads = train(folder, plan, &extra);
        assert!(train(folder, plan, &[&extra[..], &["--processes"]].concat()) == threads, "{plan} in bf16");
    }
}

/// Without a flush a checkpoint contains older versions, of which each replica has only a shard.
#[test]
fn runs_without_a_flush_go_on_under_any_level() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    expect_exit(folder, 0, &["zoo", "mlp", "-o", "m.onnx", "-q"]);
    let plan = ["partition", "m.onnx", "--cut-after", "relu2", "--gpus", "3", "--stages", "2,1", "--in-flight", "3,2"];
    let extra = ["--schedule", "1f1b-rr", "--micro-batch", "16", "--optimizer", "adam", "-q"];
    for level in ["0", "1", "3"] {
        expect_exit(folder, 0, &[&plan[..], &extra, &["--zero", level, "-o", &format!("{level}.json")]].concat());
    }
    let checkpoint_flags = ["--checkpoint-dir", "kept", "--checkpoint-every", "4", "--steps", "12"];
    let uninterrupted = train(folder, "0.json", &["--steps", "12"]);
    for (first_plan, resumed_plan) in
        [("0.json", "3.json"), ("3.json", "0.json"), ("3.json", "3.json"), ("1.json", "3.json")]
    {
        assert!(train(folder, first_plan, &checkpoint_flags) == uninterrupted, "{first_plan}");
        fs::remove_dir_all(folder.join("kept/step-00000012")).ok();
        let resumed = train(folder, resumed_plan, &["--resume", "kept/step-00000004", "--steps", "12"]);
        assert!(resumed == uninterrupted, "{first_plan} and then {resumed_plan}");
        let processes = ["--resume", "kept/step-00000004", "--steps", "12", "--processes"];
        assert!(
            train(folder, resumed_plan, &processes) == uninterrupted,
            "{first_plan} and then {resumed_plan} in processes"
        );
        fs::remove_dir_all(folder.join("kept")).unwrap();
    }
}

/// The first group of replicas that shard saves its shards; the other group only its versions.
#[test]
fn groups_that_shard_save_and_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    expect_exit(folder, 0, &["zoo", "mlp", "-o", "m.onnx", "-q"]);
    for (schedule, extra) in [("1f1b", &["--microbatches", "4"][..]), ("1f1b-rr", &[])] {
        let plan =
            ["partition", "m.onnx", "--gpus", "4", "--stages", "4", "--schedule", schedule, "--optimizer", "adam"];
        let micro_batch = if schedule == "1f1b" { "4" } else { "16" };
        for zero in ["1:2", "3:2", "3"] {
            let file = format!("{zero}.json");
            let zero = ["--micro-batch", micro_batch, "--zero", zero, "-q", "-o", &file];
            expect_exit(folder, 0, &[&plan[..], &zero, extra].concat());
        }
        for (first_plan, resumed_plan) in [("1:2.json", "1:2.json"), ("3:2.json", "3:2.json"), ("3:2.json", "1:2.json")]
        {
            let whole = train(folder, first_plan, &["--steps", "6"]);
            for processes in [&[][..], &["--processes"]] {
                let flags = ["--checkpoint-dir", "kept", "--checkpoint-every", "4", "--steps", "6"];
                assert!(
                    train(folder, first_plan, &[&flags[..], processes].concat()) == whole,
                    "{schedule} {first_plan}"
                );
                let flags = [&["--resume", "kept/step-00000004", "--steps", "6"], processes].concat();
                let is_same = train(folder, resumed_plan, &flags) == whole;
                assert!(is_same, "{schedule}: {first_plan} and then {resumed_plan} {processes:?}");
                train(folder, "3.json", &flags);
                fs::remove_dir_all(folder.join("kept")).unwrap();
            }
        }
    }
}

#[test]
fn plans_say_what_replicas_share() {
    let plans = write_plans();
    let folder = plans.path();
    let [zero_0, zero_1, zero_2, zero_3] =
        ["0", "1", "2", "3"].map(|level| read(&folder.join(format!("{level}.json"))));
    let bytes = |plan: &Value, part: &str| plan["stages"][0]["memory"][part].as_u64().unwrap();
    assert_eq!((zero_1["stages"][0]["zero"].as_u64(), zero_0["stages"][0].get("zero")), (Some(1), None));
    assert!(zero_1["stages"][1].get("zero").is_none(), "one replica shares nothing");
    assert_eq!(bytes(&zero_1, "optimizer"), bytes(&zero_0, "optimizer") / 2);
    // GPUs all-reduce in place: each replica keeps its sums whole until the step.
    assert_eq!(bytes(&zero_1, "gradients"), bytes(&zero_0, "gradients"));
    assert!(bytes(&zero_2, "gradients") < bytes(&zero_1, "gradients"));
    assert_eq!(bytes(&zero_3, "weights"), bytes(&zero_0, "weights") / 2);
    assert_eq!(zero_3["stages"][0]["parameter_bytes"].as_u64(), Some(bytes(&zero_0, "weights")));
    assert_eq!(bytes(&zero_3, "gradients"), bytes(&zero_2, "gradients"));
    let us = |plan: &Value| plan["predicted"]["objective_us"].as_f64().or(plan["predicted"]["minibatch_us"].as_f64());
    assert_eq!(us(&zero_1), us(&zero_0));
    let message = |change: &dyn Fn(&mut Value), model: &[&str]| {
        let mut changed = zero_1.clone();
        change(&mut changed["stages"]);
        fs::write(folder.join("other.json"), changed.to_string()).unwrap();
        expect_exit(folder, 1, &[&["plan", "check", "other.json"], model].concat()).concat()
    };
    assert!(message(&|stages| stages[0]["zero"] = 9.into(), &[]).contains("stages 0 to"));
    assert!(message(&|stages| stages[1]["zero"] = 1.into(), &[]).contains("at least 2 replicas"));
    assert!(message(&|stages| stages[0]["zero"] = 2.into(), &["--model", "m.onnx"]).contains("memory of stage 0"));
    assert!(message(&|stages| stages[0]["zero"] = 3.into(), &[]).contains("not a shard of 0 B"));
    assert!(message(&|stages| stages[0]["parameter_bytes"] = 7.into(), &[]).contains("only valid with zero 3"));
    let [_, stderr] = expect_exit(folder, 2, &[&PLAN[..], &["--zero", "7"]].concat());
    assert!(stderr.contains("or auto"), "{stderr}");
    expect_exit(folder, 2, &["partition", "m.onnx", "--gpus", "2", "--schedule", "inference", "--zero", "1"]);
    expect_exit(folder, 0, &["simulate", "1.json", "--programs", "p.txt", "-q"]);
    let programs = fs::read_to_string(folder.join("p.txt")).unwrap();
    assert!(programs.contains(" zero=1") && programs.contains("all-gather 0 v1"), "{programs}");
}

#[test]
fn the_least_level_that_fits_is_found() {
    let plans = write_plans();
    let folder = plans.path();
    let total = |level: &str| {
        let plan = read(&folder.join(format!("{level}.json")));
        plan["stages"][0]["memory"]["total"].as_u64().unwrap()
    };
    for (limit, level) in [(total("0"), 0), (total("0") - 1, 1), (total("1") - 1, 2), (total("2") - 1, 3)] {
        let memory = format!("{limit}B");
        let extra = ["--stages", "2,1", "--bucket", "20KB", "--zero", "auto", "--recompute", "never"];
        let memory = ["--memory", &memory, "-o", "auto.json", "-q"];
        expect_exit(folder, 0, &[&PLAN[..], &extra, &memory].concat());
        let plan = read(&folder.join("auto.json"));
        assert_eq!(plan["stages"][0].get("zero").and_then(Value::as_u64).unwrap_or(0), level, "{limit} B");
        assert_eq!(plan["options"]["zero"], "auto");
        expect_exit(folder, 0, &["plan", "check", "auto.json", "--model", "m.onnx"]);
    }
}
