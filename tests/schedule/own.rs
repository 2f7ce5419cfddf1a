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

fn run(folder: &Path, arguments: &[&str]) -> String {
    let output = pipec(folder, arguments);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn expect_error(folder: &Path, arguments: &[&str], code: i32, why: &str) {
    let output = pipec(folder, arguments);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stderr}");
    assert!(stderr.contains(why), "{arguments:?}: {stderr}");
}

/// A model on three workers, six micro-batches of four samples.
fn write_plan(folder: &Path) {
    fs::write(folder.join("mine.csv"), TABLE).unwrap();
    run(folder, &["zoo", "mlp", "-o", "m.onnx"]);
    let flags = ["--gpus", "3", "--stages", "1,1,1", "--schedule", "1f1b", "--microbatches", "6", "--micro-batch", "4"];
    run(folder, &[&["partition", "m.onnx", "-o", "plan.json"][..], &flags].concat());
}

const TRAIN: [&str; 5] = ["train", "m.onnx", "--plan", "plan.json", "--synthetic-data"];

#[test]
fn a_table_runs_through_every_verb() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    write_plan(folder);
    let chart = run(folder, &["simulate", "plan.json", "--schedule", "mine.csv", "--minibatches", "1", "--chart"]);
    assert!(chart.contains("1.0 |  . F0 F1 F2 F3 B0 B1 F4 F5 B2 B3  .  . B4 B5  ."), "{chart}");
    run(
        folder,
        &["partition", "m.onnx", "--gpus", "3", "--schedule", "mine.csv", "--micro-batch", "4", "-o", "own.json"],
    );
    let plan: Value = serde_json::from_str(&fs::read_to_string(folder.join("own.json")).unwrap()).unwrap();
    assert_eq!((&plan["schedule"]["kind"], &plan["schedule"]["microbatches"]), (&"csv".into(), &6.into()));
    // The plan contains no schedule, and commands that need one say so.
    expect_error(folder, &["plan", "check", "own.json"], 1, "`--schedule FILE`");
    expect_error(folder, &["simulate", "own.json"], 2, "`--schedule FILE`");
    run(folder, &["plan", "check", "own.json", "--schedule", "mine.csv"]);
    run(folder, &["report", "own.json", "--html", "bare.html"]);
    assert!(fs::read_to_string(folder.join("bare.html")).unwrap().contains("with `--schedule FILE`"));
    run(folder, &["report", "own.json", "--schedule", "mine.csv", "--html", "own.html"]);
    assert!(fs::read_to_string(folder.join("own.html")).unwrap().contains("<title>stage 1, backward of micro-batch 5"));
    // Under a flush, the schedule changes no bits.
    run(folder, &[&TRAIN[..], &["--steps", "3", "--schedule", "mine.csv", "--save", "a.npz"]].concat());
    run(folder, &[&TRAIN[..], &["--steps", "3", "--save", "b.npz"]].concat());
    assert_eq!(fs::read(folder.join("a.npz")).unwrap(), fs::read(folder.join("b.npz")).unwrap());
}

/// Figures that depend on the length of the run.
const LENGTH_DEPENDENT: [&str; 3] = ["minibatch_us", "step_us", "throughput_per_s"];

/// Rounds each figure to nine digits: runs of other lengths round differently.
fn round_figures(value: Value) -> Value {
    match value {
        Value::Object(fields) => fields.into_iter().map(|(name, value)| (name, round_figures(value))).collect(),
        Value::Array(items) => items.into_iter().map(round_figures).collect(),
        Value::Number(number) => format!("{:.8e}", number.as_f64().unwrap()).into(),
        other => other,
    }
}

#[test]
fn programs_are_read_back_and_run() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    write_plan(folder);
    let figures = |more: &[&str]| -> Value {
        let text = run(folder, &[&["simulate", "plan.json", "--format", "json"][..], more].concat());
        serde_json::from_str(&text).unwrap()
    };
    for schedule in ["1f1b", "zb-h1", "1f1b-rr"] {
        let flags_of_schedule =
            if schedule == "1f1b-rr" { vec!["--schedule", "1f1b-rr"] } else { vec!["--schedule", schedule] };
        let plan = match schedule {
            "1f1b-rr" => {
                let flags = ["--gpus", "3", "--stages", "2,1", "--micro-batch", "24", "-o", "plan.json"];
                run(folder, &[&["partition", "m.onnx"][..], &flags].concat());
                "2-1"
            }
            _ => "1-1-1",
        };
        let generated = figures(&[&flags_of_schedule[..], &["--minibatches", "3", "--programs", "p.json"]].concat());
        let from_file = figures(&["--schedule", "p.json"]);
        let [mut generated, mut from_file] = [generated, from_file].map(round_figures);
        if schedule == "1f1b-rr" {
            // Programs in a file have a fixed length, and without a flush a short run has no steady state.
            for figures in [&mut generated, &mut from_file] {
                figures.as_object_mut().unwrap().retain(|name, _| !LENGTH_DEPENDENT.contains(&name.as_str()));
            }
        }
        assert_eq!(generated, from_file, "{schedule} on {plan}");
        run(folder, &[&TRAIN[..], &["--schedule", "p.json", "--save", "a.npz"]].concat());
        run(folder, &[&TRAIN[..], &flags_of_schedule, &["--steps", "3", "--save", "b.npz"]].concat());
        let [a, b] = ["a.npz", "b.npz"].map(|name| fs::read(folder.join(name)).unwrap());
        assert_eq!(a, b, "{schedule} on {plan}: other weights");
        // A plan made for programs has their stages, in-flight limits and schedule.
        let flags = ["--gpus", "3", "--micro-batch", "4", "--schedule", "p.json", "-o", "other.json"];
        run(folder, &[&["partition", "m.onnx"][..], &flags].concat());
        let replanned: Value = serde_json::from_str(&fs::read_to_string(folder.join("other.json")).unwrap()).unwrap();
        assert_eq!(replanned["schedule"]["kind"], schedule);
        let program: Value = serde_json::from_str(&fs::read_to_string(folder.join("p.json")).unwrap()).unwrap();
        for (at, stage) in program["stages"].as_array().unwrap().iter().enumerate() {
            assert_eq!(stage["replicas"], replanned["stages"][at]["replicas"]);
            assert_eq!(stage["cap"], replanned["schedule"]["in_flight"][at], "{schedule}");
        }
    }
}

#[test]
fn invalid_schedules_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    write_plan(folder);
    run(folder, &["simulate", "plan.json", "--minibatches", "2", "--programs", "p.json"]);
    let simulate = ["simulate", "plan.json", "--schedule", "bad.json"];
    let valid = fs::read_to_string(folder.join("p.json")).unwrap();
    let write_bad = |text: &str| fs::write(folder.join("bad.json"), text).unwrap();
    // A backward with other weights than its forward; an unsent message; more than a program may contain.
    let mut value: Value = serde_json::from_str(&valid).unwrap();
    let list = value["workers"][0]["instructions"].as_array_mut().unwrap();
    let at =
        list.iter().position(|instruction| instruction["op"] == "backward" && instruction["version"] == 1).unwrap();
    list[at]["version"] = 0.into();
    write_bad(&value.to_string());
    expect_error(folder, &simulate, 1, "gives no valid program");
    expect_error(folder, &[&TRAIN[..], &["--schedule", "bad.json"]].concat(), 1, "gives no valid program");
    let mut value: Value = serde_json::from_str(&valid).unwrap();
    value["workers"][0]["instructions"].as_array_mut().unwrap().retain(|instruction| instruction["op"] != "send");
    write_bad(&value.to_string());
    expect_error(folder, &simulate, 1, "gives no valid program");
    write_bad(&valid.replacen("\"items\": 12", "\"items\": 4294967292", 1));
    expect_error(folder, &simulate, 2, "is too long");
    write_bad(&fs::read_to_string(folder.join("plan.json")).unwrap());
    expect_error(folder, &simulate, 2, "it is a plan");
    write_bad(&valid.replacen("\"replicas\": 1", "\"replicas\": 2", 1));
    expect_error(folder, &simulate, 2, "its stages have replicas 2, 1, 1, those of the pipeline 1, 1, 1");
    // Programs have a fixed number of minibatches.
    let schedule_flags = ["--schedule", "p.json"];
    expect_error(
        folder,
        &[&["simulate", "plan.json", "--minibatches", "5"][..], &schedule_flags].concat(),
        2,
        "2 minibatches",
    );
    expect_error(folder, &[&TRAIN[..], &schedule_flags, &["--steps", "9"]].concat(), 2, "omit `--steps`");
    expect_error(
        folder,
        &[&TRAIN[..], &schedule_flags, &["--epochs", "1"]].concat(),
        2,
        "`--epochs` cannot be combined with programs",
    );
    expect_error(folder, &["simulate", "plan.json", "--schedule", "mine.txt"], 2, "FILE.json");
}

#[test]
fn a_run_and_its_simulation_have_rows_of_the_same_names() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    write_plan(folder);
    run(folder, &["simulate", "plan.json", "--minibatches", "3", "--trace", "s.json"]);
    run(folder, &[&TRAIN[..], &["--steps", "3", "--trace", "t.json"]].concat());
    let read = |name: &str| -> Value { serde_json::from_str(&fs::read_to_string(folder.join(name)).unwrap()).unwrap() };
    let names = |trace: &Value| -> Vec<String> {
        let events = trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["name"] == "thread_name");
        events.map(|event| event["args"]["name"].as_str().unwrap().to_string()).collect()
    };
    let computations = |trace: &Value| -> Vec<(u64, String)> {
        let spans = trace["traceEvents"].as_array().unwrap().iter();
        let spans = spans.filter(|event| event["cat"] == "forward" || event["cat"] == "backward");
        let mut rows: Vec<(u64, String)> =
            spans.map(|event| (event["tid"].as_u64().unwrap(), event["name"].as_str().unwrap().to_string())).collect();
        rows.sort();
        rows
    };
    let (simulated, trained) = (read("s.json"), read("t.json"));
    assert_eq!(names(&trained), ["0.0", "1.0", "2.0"]);
    assert_eq!(names(&simulated)[..3], names(&trained));
    assert_eq!(computations(&simulated), computations(&trained), "the same work on the same rows");
}

/// A program may write checkpoints if the run has a folder for them.
#[test]
fn a_program_writes_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    write_plan(folder);
    run(folder, &["simulate", "plan.json", "--minibatches", "2", "--programs", "p.json"]);
    let mut program: Value = serde_json::from_str(&fs::read_to_string(folder.join("p.json")).unwrap()).unwrap();
    let list = program["workers"][0]["instructions"].as_array_mut().unwrap();
    list.push(serde_json::json!({"op": "checkpoint", "stage": 0, "version": 2}));
    fs::write(folder.join("p.json"), program.to_string()).unwrap();
    let train = [&TRAIN[..], &["--schedule", "p.json"]].concat();
    expect_error(folder, &train, 2, "no checkpoint folder");
    expect_error(folder, &train, 2, "`--checkpoint-dir FOLDER`");
    run(folder, &[&train[..], &["--checkpoint-dir", "ck"]].concat());
    let read = |name: &str| runtime::data::weights::read(&folder.join("ck").join(name)).unwrap();
    let (weights, stage_weights) = (read("weights.safetensors"), read("stage-0-version-2.safetensors"));
    assert!(!stage_weights.is_empty() && stage_weights.len() < weights.len());
    for (name, tensor) in &stage_weights {
        assert_eq!(tensor.bytes(), weights[name].bytes(), "{name}");
    }
}

/// Receives may be waited for in another order than posted, even on one channel.
#[test]
fn messages_are_found_by_their_item() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    write_plan(folder);
    run(folder, &["simulate", "plan.json", "--minibatches", "1", "--programs", "p.json"]);
    let mut programs: Value = serde_json::from_str(&fs::read_to_string(folder.join("p.json")).unwrap()).unwrap();
    let list = programs["workers"][1]["instructions"].as_array_mut().unwrap();
    let token = |value: &Value| value["token"].as_u64().unwrap();
    let recvs: Vec<usize> =
        (0..list.len()).filter(|&at| list[at]["op"] == "recv" && list[at]["kind"] == "activation").collect();
    // The second activation's receive is posted as early as the first one's and waited for first.
    let second = list.remove(recvs[1]);
    list.insert(recvs[0] + 1, second.clone());
    let first = token(&list[recvs[0]]);
    let waits_for = |list: &[Value], wanted_token: u64| {
        list.iter().position(|i| i["op"] == "wait" && token(i) == wanted_token).unwrap()
    };
    let at = waits_for(list, token(&second));
    let wait = list.remove(at);
    let at = waits_for(list, first);
    list.insert(at, wait);
    fs::write(folder.join("late.json"), programs.to_string()).unwrap();
    let train = |schedule: &str, weights: &str| {
        run(folder, &[&TRAIN[..], &["--batch", "24", "--schedule", schedule, "--save", weights, "-q"]].concat());
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
    write_plan(folder);
    fs::create_dir(folder.join("else")).unwrap();
    let before = "program 1f1b {\n}\n";
    fs::write(folder.join("else/p.txt"), before).unwrap();
    std::os::unix::fs::symlink("else/p.txt", folder.join("link")).unwrap();
    run(folder, &["simulate", "plan.json", "--programs", "link", "-q"]);
    assert!(fs::symlink_metadata(folder.join("link")).unwrap().is_symlink());
    assert_ne!(fs::read_to_string(folder.join("else/p.txt")).unwrap(), before);
    run(folder, &["simulate", "plan.json", "--programs", "/dev/null", "-q"]);
    assert!(!fs::metadata("/dev/null").unwrap().is_file());
}

/// A schedule that needs more memory than the plan, or other minibatches, is rejected for it.
#[test]
fn what_a_table_keeps_is_held_to_the_plan() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    write_plan(folder);
    let row = |stage: u32, items: u32, part: char| (0..items).map(move |item| format!("{stage}{part}{item}"));
    let fill_table = |items: u32| -> String {
        let rows =
            (0..3).map(|stage| row(stage, items, 'F').chain(row(stage, items, 'B')).collect::<Vec<_>>().join(","));
        rows.map(|row| row + "\n").collect()
    };
    fs::write(folder.join("fill.csv"), fill_table(6)).unwrap();
    fs::write(folder.join("four.csv"), fill_table(4)).unwrap();
    let check = |table: &str| pipec(folder, &["plan", "check", "plan.json", "--schedule", table]);
    let stderr_of = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();
    let plan: Value = serde_json::from_str(&fs::read_to_string(folder.join("plan.json")).unwrap()).unwrap();
    let caps = &plan["schedule"]["in_flight"];
    assert_eq!(caps, &serde_json::json!([3, 2, 1]));
    let output = check("fill.csv");
    let stderr = stderr_of(&output);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    for (stage, cap) in [(0, 3), (1, 2), (2, 1)] {
        let expected = format!(
            "stage {stage} has 6 micro-batches in flight at {stage}F5 on worker {stage}.0, but the plan assumes {cap}"
        );
        assert!(stderr.contains(&expected), "{stderr}");
    }
    assert!(stderr.contains("`pipec partition MODEL --schedule FILE`"), "{stderr}");
    let stderr = stderr_of(&check("four.csv"));
    assert!(stderr.contains("minibatches have 4 micro-batches, but the plan's times and memory assume 6"), "{stderr}");
    let output = pipec(folder, &["report", "plan.json", "--schedule", "fill.csv", "--html", "r.html"]);
    assert_eq!(output.status.code(), Some(0));
    assert!(stderr_of(&output).contains("stage 1 has 6 micro-batches in flight"), "{}", stderr_of(&output));
    // The plan's own schedule is accepted, and a plan made for the table includes its memory.
    run(folder, &["simulate", "plan.json", "--minibatches", "1", "--programs", "own.csv"]);
    run(folder, &["plan", "check", "plan.json", "--schedule", "own.csv"]);
    let flags = ["--gpus", "3", "--schedule", "fill.csv", "--micro-batch", "4", "-o", "plan.json"];
    run(folder, &[&["partition", "m.onnx"][..], &flags].concat());
    run(folder, &["plan", "check", "plan.json", "--schedule", "fill.csv"]);
}

/// Tables of replicated stages are read back if a table can express them; otherwise writing fails with the reason.
#[test]
fn tables_of_replicas_are_read_back_or_refused_when_they_are_written() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    run(folder, &["zoo", "mlp", "-o", "m.onnx"]);
    let plan = |stages: &str| {
        let flags =
            ["--gpus", "4", "--stages", stages, "--schedule", "1f1b", "--microbatches", "6", "--micro-batch", "4"];
        run(folder, &[&["partition", "m.onnx", "-o", "plan.json"][..], &flags].concat());
    };
    plan("2,2");
    let write = ["simulate", "plan.json", "--minibatches", "1", "--programs", "own.csv"];
    let output = pipec(folder, &write);
    assert!(!String::from_utf8_lossy(&output.stderr).contains("read this table back"));
    assert_eq!(fs::read_to_string(folder.join("own.csv")).unwrap().lines().count(), 4);
    run(folder, &["plan", "check", "plan.json", "--schedule", "own.csv"]);
    let write_again = [&write[..5], &["again.csv", "--schedule", "own.csv"]].concat();
    run(folder, &write_again);
    let read = |name: &str| fs::read_to_string(folder.join(name)).unwrap();
    assert_eq!(read("own.csv"), read("again.csv"));
    // As a spreadsheet would write it.
    let cells = |line: &str| line.split(',').map(|cell| format!("\"{cell}\"")).collect::<Vec<_>>().join(", ");
    let quoted: Vec<String> = read("own.csv").lines().map(cells).collect();
    fs::write(folder.join("sheet.csv"), format!("\u{feff}{}\r\n", quoted.join("\r\n"))).unwrap();
    run(folder, &["plan", "check", "plan.json", "--schedule", "sheet.csv"]);
    plan("3,1");
    let output = pipec(folder, &write);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    assert!(stderr.contains("`--schedule` cannot read this table back") && stderr.contains("3-1"), "{stderr}");
}

#[test]
fn an_unknown_loss_is_not_sound() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    write_plan(folder);
    let text = fs::read_to_string(folder.join("plan.json")).unwrap();
    let mut plan: Value = serde_json::from_str(&text).unwrap();
    assert!(plan["model"]["import"]["loss"].is_string(), "{}", plan["model"]);
    plan["model"]["import"]["loss"] = "hinge".into();
    fs::write(folder.join("plan.json"), plan.to_string()).unwrap();
    expect_error(folder, &["plan", "check", "plan.json"], 1, "unknown loss `hinge`");
}
