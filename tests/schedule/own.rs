//! Custom schedules in every subcommand: shipped tables and programs, written and read back, and invalid ones.

use assert_cmd::Command;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Output;

/// Output of `compiler/examples/my_schedule.rs`.
const TABLE: &str = include_str!("../../compiler/examples/my_schedule.csv");

fn pipec(folder: &Path, arguments: &[&str]) -> Output {
    Command::cargo_bin("pipec").unwrap().current_dir(folder).args(arguments).output().unwrap()
}

fn done(folder: &Path, arguments: &[&str]) -> String {
    let output = pipec(folder, arguments);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn refused(folder: &Path, arguments: &[&str], code: i32, why: &str) {
    let output = pipec(folder, arguments);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
    assert!(said.contains(why), "{arguments:?}: {said}");
}

/// A model on three workers, six micro-batches of four samples.
fn planned(folder: &Path) {
    fs::write(folder.join("mine.csv"), TABLE).unwrap();
    done(folder, &["zoo", "mlp", "-o", "m.onnx"]);
    let flags = ["--gpus", "3", "--stages", "1,1,1", "--schedule", "1f1b", "--microbatches", "6", "--micro-batch", "4"];
    done(folder, &[&["partition", "m.onnx", "-o", "plan.json"][..], &flags].concat());
}

const TRAIN: [&str; 5] = ["train", "m.onnx", "--plan", "plan.json", "--synthetic-data"];

#[test]
fn a_table_runs_through_every_verb() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    planned(folder);
    let chart = done(folder, &["simulate", "plan.json", "--schedule", "mine.csv", "--minibatches", "1", "--chart"]);
    assert!(chart.contains("1.0 |  . F0 F1 F2 F3 B0 B1 F4 F5 B2 B3  .  . B4 B5  ."), "{chart}");
    done(
        folder,
        &["partition", "m.onnx", "--gpus", "3", "--schedule", "mine.csv", "--micro-batch", "4", "-o", "own.json"],
    );
    let plan: Value = serde_json::from_str(&fs::read_to_string(folder.join("own.json")).unwrap()).unwrap();
    assert_eq!((&plan["schedule"]["kind"], &plan["schedule"]["microbatches"]), (&"csv".into(), &6.into()));
    // The plan contains no schedule, and commands that need one say so.
    refused(folder, &["plan", "check", "own.json"], 1, "`--schedule FILE`");
    refused(folder, &["simulate", "own.json"], 2, "`--schedule FILE`");
    done(folder, &["plan", "check", "own.json", "--schedule", "mine.csv"]);
    done(folder, &["report", "own.json", "--html", "bare.html"]);
    assert!(fs::read_to_string(folder.join("bare.html")).unwrap().contains("with `--schedule FILE`"));
    done(folder, &["report", "own.json", "--schedule", "mine.csv", "--html", "own.html"]);
    assert!(fs::read_to_string(folder.join("own.html")).unwrap().contains("<title>stage 1, backward of micro-batch 5"));
    // Under a flush, the schedule changes no bits.
    done(folder, &[&TRAIN[..], &["--steps", "3", "--schedule", "mine.csv", "--save", "a.npz"]].concat());
    done(folder, &[&TRAIN[..], &["--steps", "3", "--save", "b.npz"]].concat());
    assert_eq!(fs::read(folder.join("a.npz")).unwrap(), fs::read(folder.join("b.npz")).unwrap());
}

/// Figures that depend on the length of the run.
const PACE: [&str; 3] = ["minibatch_us", "step_us", "throughput_per_s"];

/// Rounds each figure to nine digits: runs of other lengths round differently.
fn rounded(value: Value) -> Value {
    match value {
        Value::Object(fields) => fields.into_iter().map(|(name, value)| (name, rounded(value))).collect(),
        Value::Array(items) => items.into_iter().map(rounded).collect(),
        Value::Number(number) => format!("{:.8e}", number.as_f64().unwrap()).into(),
        other => other,
    }
}

#[test]
fn programs_are_read_back_and_run() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    planned(folder);
    let figures = |more: &[&str]| -> Value {
        let text = done(folder, &[&["simulate", "plan.json", "--format", "json"][..], more].concat());
        serde_json::from_str(&text).unwrap()
    };
    for schedule in ["1f1b", "zb-h1", "1f1b-rr"] {
        let own = if schedule == "1f1b-rr" { vec!["--schedule", "1f1b-rr"] } else { vec!["--schedule", schedule] };
        let plan = match schedule {
            "1f1b-rr" => {
                let flags = ["--gpus", "3", "--stages", "2,1", "--micro-batch", "24", "-o", "plan.json"];
                done(folder, &[&["partition", "m.onnx"][..], &flags].concat());
                "2-1"
            }
            _ => "1-1-1",
        };
        let written = figures(&[&own[..], &["--minibatches", "3", "--programs", "p.json"]].concat());
        let read = figures(&["--schedule", "p.json"]);
        let [mut written, mut read] = [written, read].map(rounded);
        if schedule == "1f1b-rr" {
            // Programs in a file have a fixed length, and without a flush a short run has no steady state.
            for figures in [&mut written, &mut read] {
                figures.as_object_mut().unwrap().retain(|name, _| !PACE.contains(&name.as_str()));
            }
        }
        assert_eq!(written, read, "{schedule} on {plan}");
        done(folder, &[&TRAIN[..], &["--schedule", "p.json", "--save", "a.npz"]].concat());
        done(folder, &[&TRAIN[..], &own, &["--steps", "3", "--save", "b.npz"]].concat());
        let [a, b] = ["a.npz", "b.npz"].map(|name| fs::read(folder.join(name)).unwrap());
        assert_eq!(a, b, "{schedule} on {plan}: other weights");
        // A plan made for programs has their stages, in-flight limits and schedule.
        let flags = ["--gpus", "3", "--micro-batch", "4", "--schedule", "p.json", "-o", "other.json"];
        done(folder, &[&["partition", "m.onnx"][..], &flags].concat());
        let other: Value = serde_json::from_str(&fs::read_to_string(folder.join("other.json")).unwrap()).unwrap();
        assert_eq!(other["schedule"]["kind"], schedule);
        let program: Value = serde_json::from_str(&fs::read_to_string(folder.join("p.json")).unwrap()).unwrap();
        for (at, stage) in program["stages"].as_array().unwrap().iter().enumerate() {
            assert_eq!(stage["replicas"], other["stages"][at]["replicas"]);
            assert_eq!(stage["cap"], other["schedule"]["in_flight"][at], "{schedule}");
        }
    }
}

#[test]
fn invalid_schedules_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    planned(folder);
    done(folder, &["simulate", "plan.json", "--minibatches", "2", "--programs", "p.json"]);
    let simulate = ["simulate", "plan.json", "--schedule", "bad.json"];
    let sound = fs::read_to_string(folder.join("p.json")).unwrap();
    let bad = |text: &str| fs::write(folder.join("bad.json"), text).unwrap();
    // A backward with other weights than its forward; an unsent message; more than a program may contain.
    let mut value: Value = serde_json::from_str(&sound).unwrap();
    let list = value["workers"][0]["instructions"].as_array_mut().unwrap();
    let at = list.iter().position(|one| one["op"] == "backward" && one["version"] == 1).unwrap();
    list[at]["version"] = 0.into();
    bad(&value.to_string());
    refused(folder, &simulate, 1, "gives no valid program");
    refused(folder, &[&TRAIN[..], &["--schedule", "bad.json"]].concat(), 1, "gives no valid program");
    let mut value: Value = serde_json::from_str(&sound).unwrap();
    value["workers"][0]["instructions"].as_array_mut().unwrap().retain(|one| one["op"] != "send");
    bad(&value.to_string());
    refused(folder, &simulate, 1, "gives no valid program");
    bad(&sound.replacen("\"items\": 12", "\"items\": 4294967292", 1));
    refused(folder, &simulate, 2, "is too long");
    bad(&fs::read_to_string(folder.join("plan.json")).unwrap());
    refused(folder, &simulate, 2, "it is a plan");
    bad(&sound.replacen("\"replicas\": 1", "\"replicas\": 2", 1));
    refused(folder, &simulate, 2, "its stages have replicas 2, 1, 1, those of the pipeline 1, 1, 1");
    // Programs have a fixed number of minibatches.
    let own = ["--schedule", "p.json"];
    refused(folder, &[&["simulate", "plan.json", "--minibatches", "5"][..], &own].concat(), 2, "2 minibatches");
    refused(folder, &[&TRAIN[..], &own, &["--steps", "9"]].concat(), 2, "omit `--steps`");
    refused(folder, &[&TRAIN[..], &own, &["--epochs", "1"]].concat(), 2, "`--epochs` cannot be combined with programs");
    refused(folder, &["simulate", "plan.json", "--schedule", "mine.txt"], 2, "FILE.json");
}

#[test]
fn a_run_and_its_simulation_have_rows_of_the_same_names() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    planned(folder);
    done(folder, &["simulate", "plan.json", "--minibatches", "3", "--trace", "s.json"]);
    done(folder, &[&TRAIN[..], &["--steps", "3", "--trace", "t.json"]].concat());
    let read = |name: &str| -> Value { serde_json::from_str(&fs::read_to_string(folder.join(name)).unwrap()).unwrap() };
    let names = |trace: &Value| -> Vec<String> {
        let named = trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["name"] == "thread_name");
        named.map(|event| event["args"]["name"].as_str().unwrap().to_string()).collect()
    };
    let computed = |trace: &Value| -> Vec<(u64, String)> {
        let spans = trace["traceEvents"].as_array().unwrap().iter();
        let spans = spans.filter(|event| event["cat"] == "forward" || event["cat"] == "backward");
        let mut all: Vec<(u64, String)> =
            spans.map(|event| (event["tid"].as_u64().unwrap(), event["name"].as_str().unwrap().to_string())).collect();
        all.sort();
        all
    };
    let (simulated, trained) = (read("s.json"), read("t.json"));
    assert_eq!(names(&trained), ["0.0", "1.0", "2.0"]);
    assert_eq!(names(&simulated)[..3], names(&trained));
    assert_eq!(computed(&simulated), computed(&trained), "the same work on the same rows");
}

/// A program may write checkpoints if the run has a folder for them.
#[test]
fn a_program_writes_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    planned(folder);
    done(folder, &["simulate", "plan.json", "--minibatches", "2", "--programs", "p.json"]);
    let mut program: Value = serde_json::from_str(&fs::read_to_string(folder.join("p.json")).unwrap()).unwrap();
    let list = program["workers"][0]["instructions"].as_array_mut().unwrap();
    list.push(serde_json::json!({"op": "checkpoint", "stage": 0, "version": 2}));
    fs::write(folder.join("p.json"), program.to_string()).unwrap();
    let train = [&TRAIN[..], &["--schedule", "p.json"]].concat();
    refused(folder, &train, 2, "no checkpoint folder");
    refused(folder, &train, 2, "`--checkpoint-dir FOLDER`");
    done(folder, &[&train[..], &["--checkpoint-dir", "ck"]].concat());
    let read = |name: &str| runtime::data::weights::read(&folder.join("ck").join(name)).unwrap();
    let (all, own) = (read("weights.safetensors"), read("stage-0-version-2.safetensors"));
    assert!(!own.is_empty() && own.len() < all.len());
    for (name, tensor) in &own {
        assert_eq!(tensor.bytes(), all[name].bytes(), "{name}");
    }
}

/// Receives may be waited for in another order than posted, even on one channel.
#[test]
fn messages_are_found_by_their_item() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    planned(folder);
    done(folder, &["simulate", "plan.json", "--minibatches", "1", "--programs", "p.json"]);
    let mut programs: Value = serde_json::from_str(&fs::read_to_string(folder.join("p.json")).unwrap()).unwrap();
    let list = programs["workers"][1]["instructions"].as_array_mut().unwrap();
    let token = |value: &Value| value["token"].as_u64().unwrap();
    let recvs: Vec<usize> =
        (0..list.len()).filter(|&at| list[at]["op"] == "recv" && list[at]["kind"] == "activation").collect();
    // The second activation's receive is posted as early as the first one's and waited for first.
    let second = list.remove(recvs[1]);
    list.insert(recvs[0] + 1, second.clone());
    let first = token(&list[recvs[0]]);
    let waits_for = |list: &[Value], of: u64| list.iter().position(|i| i["op"] == "wait" && token(i) == of).unwrap();
    let at = waits_for(list, token(&second));
    let wait = list.remove(at);
    let at = waits_for(list, first);
    list.insert(at, wait);
    fs::write(folder.join("late.json"), programs.to_string()).unwrap();
    let train = |schedule: &str, weights: &str| {
        done(folder, &[&TRAIN[..], &["--batch", "24", "--schedule", schedule, "--save", weights, "-q"]].concat());
        fs::read(folder.join(weights)).unwrap()
    };
    assert_eq!(train("late.json", "a.safetensors"), train("p.json", "b.safetensors"));
}

/// Files are replaced atomically; links and devices are written through.
#[test]
#[cfg(unix)]
fn links_and_devices_are_written_through() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    planned(folder);
    fs::create_dir(folder.join("else")).unwrap();
    let before = "program 1f1b {\n}\n";
    fs::write(folder.join("else/p.txt"), before).unwrap();
    std::os::unix::fs::symlink("else/p.txt", folder.join("link")).unwrap();
    done(folder, &["simulate", "plan.json", "--programs", "link", "-q"]);
    assert!(fs::symlink_metadata(folder.join("link")).unwrap().is_symlink());
    assert_ne!(fs::read_to_string(folder.join("else/p.txt")).unwrap(), before);
    done(folder, &["simulate", "plan.json", "--programs", "/dev/null", "-q"]);
    assert!(!fs::metadata("/dev/null").unwrap().is_file());
}

/// A schedule that needs more memory than the plan, or other minibatches, is rejected for it.
#[test]
fn what_a_table_keeps_is_held_to_the_plan() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    planned(folder);
    let row = |stage: u32, items: u32, part: char| (0..items).map(move |item| format!("{stage}{part}{item}"));
    let filled = |items: u32| -> String {
        let rows =
            (0..3).map(|stage| row(stage, items, 'F').chain(row(stage, items, 'B')).collect::<Vec<_>>().join(","));
        rows.map(|row| row + "\n").collect()
    };
    fs::write(folder.join("fill.csv"), filled(6)).unwrap();
    fs::write(folder.join("four.csv"), filled(4)).unwrap();
    let check = |table: &str| pipec(folder, &["plan", "check", "plan.json", "--schedule", table]);
    let said = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();
    let plan: Value = serde_json::from_str(&fs::read_to_string(folder.join("plan.json")).unwrap()).unwrap();
    let caps = &plan["schedule"]["in_flight"];
    assert_eq!(caps, &serde_json::json!([3, 2, 1]));
    let output = check("fill.csv");
    let answer = said(&output);
    assert_eq!(output.status.code(), Some(1), "{answer}");
    for (stage, cap) in [(0, 3), (1, 2), (2, 1)] {
        let each = format!(
            "stage {stage} has 6 micro-batches in flight at {stage}F5 on worker {stage}.0, but the plan assumes {cap}"
        );
        assert!(answer.contains(&each), "{answer}");
    }
    assert!(answer.contains("`pipec partition MODEL --schedule FILE`"), "{answer}");
    let answer = said(&check("four.csv"));
    assert!(answer.contains("minibatches have 4 micro-batches, but the plan's times and memory assume 6"), "{answer}");
    let output = pipec(folder, &["report", "plan.json", "--schedule", "fill.csv", "--html", "r.html"]);
    assert_eq!(output.status.code(), Some(0));
    assert!(said(&output).contains("stage 1 has 6 micro-batches in flight"), "{}", said(&output));
    // The plan's own schedule is accepted, and a plan made for the table includes its memory.
    done(folder, &["simulate", "plan.json", "--minibatches", "1", "--programs", "own.csv"]);
    done(folder, &["plan", "check", "plan.json", "--schedule", "own.csv"]);
    let flags = ["--gpus", "3", "--schedule", "fill.csv", "--micro-batch", "4", "-o", "plan.json"];
    done(folder, &[&["partition", "m.onnx"][..], &flags].concat());
    done(folder, &["plan", "check", "plan.json", "--schedule", "fill.csv"]);
}

/// Tables of replicated stages are read back if a table can express them; otherwise writing fails with the reason.
#[test]
fn tables_of_replicas_are_read_back_or_refused_when_they_are_written() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    done(folder, &["zoo", "mlp", "-o", "m.onnx"]);
    let plan = |stages: &str| {
        let flags =
            ["--gpus", "4", "--stages", stages, "--schedule", "1f1b", "--microbatches", "6", "--micro-batch", "4"];
        done(folder, &[&["partition", "m.onnx", "-o", "plan.json"][..], &flags].concat());
    };
    plan("2,2");
    let write = ["simulate", "plan.json", "--minibatches", "1", "--programs", "own.csv"];
    let output = pipec(folder, &write);
    assert!(!String::from_utf8_lossy(&output.stderr).contains("read this table back"));
    assert_eq!(fs::read_to_string(folder.join("own.csv")).unwrap().lines().count(), 4);
    done(folder, &["plan", "check", "plan.json", "--schedule", "own.csv"]);
    let again = [&write[..5], &["again.csv", "--schedule", "own.csv"]].concat();
    done(folder, &again);
    let read = |name: &str| fs::read_to_string(folder.join(name)).unwrap();
    assert_eq!(read("own.csv"), read("again.csv"));
    // As a spreadsheet would write it.
    let cells = |line: &str| line.split(',').map(|cell| format!("\"{cell}\"")).collect::<Vec<_>>().join(", ");
    let quoted: Vec<String> = read("own.csv").lines().map(cells).collect();
    fs::write(folder.join("sheet.csv"), format!("\u{feff}{}\r\n", quoted.join("\r\n"))).unwrap();
    done(folder, &["plan", "check", "plan.json", "--schedule", "sheet.csv"]);
    plan("3,1");
    let output = pipec(folder, &write);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(said.contains("`--schedule` cannot read this table back") && said.contains("3-1"), "{said}");
}

#[test]
fn an_unknown_loss_is_not_sound() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    planned(folder);
    let text = fs::read_to_string(folder.join("plan.json")).unwrap();
    let mut plan: Value = serde_json::from_str(&text).unwrap();
    assert!(plan["model"]["import"]["loss"].is_string(), "{}", plan["model"]);
    plan["model"]["import"]["loss"] = "hinge".into();
    fs::write(folder.join("plan.json"), plan.to_string()).unwrap();
    refused(folder, &["plan", "check", "plan.json"], 1, "unknown loss `hinge`");
}
