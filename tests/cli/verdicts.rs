//! Messages about plans and files: the chosen plan, check results, differences of two plans, suggested next commands,
//! and errors in files.

use assert_cmd::Command;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::Output;

fn pipec(folder: &Path, arguments: &[&str]) -> Output {
    Command::cargo_bin("pipec").unwrap().current_dir(folder).args(arguments).output().unwrap()
}

/// Expects this exit code; returns standard output and standard error.
fn run_with_code(folder: &Path, code: i32, arguments: &[&str]) -> (String, String) {
    let output = pipec(folder, arguments);
    let [stdout, stderr] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stdout}{stderr}");
    (stdout, stderr)
}

fn run(folder: &Path, arguments: &[&str]) -> String {
    run_with_code(folder, 0, arguments).0
}

/// Four ops of 3, 6, 3 and 3 ms, 1 MB activations.
fn chain(folder: &Path) {
    let mut text = String::new();
    for (at, time) in [1.0, 2.0, 1.0, 1.0].iter().enumerate() {
        let backward = 2.0 * time;
        text += &format!(
            "node{at} -- Linear -- forward_compute_time={time}, backward_compute_time={backward}, activation_size=1000000.0, parameter_size=8\n"
        );
    }
    (1..4).for_each(|at| text += &format!("\tnode{} -- node{at}\n", at - 1));
    fs::write(folder.join("chain.graph.txt"), text).unwrap();
}

fn write_plan(folder: &Path, name: &str, flags: &[&str]) -> Value {
    let base_flags = ["partition", "chain.graph.txt", "-q", "-o", name];
    run(folder, &[&base_flags[..], flags].concat());
    serde_json::from_str(&fs::read_to_string(folder.join(name)).unwrap()).unwrap()
}

#[test]
fn the_chosen_one_is_a_row_and_marked() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    chain(folder);
    for (flags, names) in [
        (&["--gpus", "4"][..], "pipec, data-parallel"),
        (&["--gpus", "2", "--stages", "1,1"], "pipec"),
        (&["--gpus", "2", "--partitioner", "exhaustive"], "exhaustive, data-parallel"),
        (&["--gpus", "2", "--partitioner", "single"], "single"),
        (&["--gpus", "2", "--partitioner", "milp", "--stages", "1,1"], "milp, pipec"),
    ] {
        let message =
            run(folder, &[&["partition", "chain.graph.txt", "--compare", "-o", "p.json"][..], flags].concat());
        let table = message.split_once("candidate ").unwrap().1;
        let chosen_row = table.lines().nth(1).unwrap();
        assert!(chosen_row.starts_with(names) && chosen_row.ends_with("chosen"), "{flags:?}: {message}");
        assert_eq!(message.matches("chosen\n").count(), 1, "{flags:?}: {message}");
    }
}

#[test]
fn a_plan_that_contradicts_itself_or_its_model_is_not_sound() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    chain(folder);
    let straight = write_plan(folder, "straight.json", &["--gpus", "3", "--no-replication"]);
    let flushed = write_plan(folder, "flushed.json", &["--gpus", "2", "--stages", "1,1", "--microbatches", "4"]);
    let paper = write_plan(folder, "paper.json", &["--gpus", "3", "--stages", "1,1,1", "--cost", "paper"]);
    let chunked = ["--gpus", "2", "--schedule", "interleaved", "--microbatches", "4", "--no-replication"];
    let chunked = write_plan(folder, "chunked.json", &chunked);
    type Change<'a> = (&'a str, &'a dyn Fn(&mut Value), bool);
    let changes: &[Change<'_>] = &[
        ("messages of stage", &|plan| plan["edges"] = json!([]), true),
        ("messages of stage", &|plan| plan["edges"][0]["bytes"] = json!(7), true),
        ("edges from an earlier", &|plan| plan["edges"][0]["to"] = json!(9), true),
        ("baselines.single", &|plan| plan["stages"][0]["fwd_us"] = json!(1.0), true),
        ("baselines.single", &|plan| plan["stages"][1]["bwd_us"] = json!(9e9), true),
        ("predicted.", &|plan| plan["predicted"]["minibatch_us"] = json!(3.0), true),
        ("predicted.step_us", &|plan| plan["predicted"]["step_us"] = json!(1.0), true),
        ("predicted.throughput_per_s", &|plan| plan["predicted"]["throughput_per_s"] = json!(1e9), true),
        ("predicted.bubble", &|plan| plan["predicted"]["bubble"] = json!(0.75), true),
        ("lower_bound_us", &|plan| plan["lower_bound_us"] = json!(1e12), true),
        // Only the model defines the readers of an op.
        ("was edited", &|plan| plan["edges"][0]["tensors"] = json!(["another"]), false),
    ];
    for (name, plan) in [("straight", &straight), ("flushed", &flushed), ("paper", &paper), ("chunked", &chunked)] {
        let file = format!("{name}.json");
        assert!(run(folder, &["plan", "check", &file]).contains("its figures are consistent"), "{name}");
        let with_model = ["plan", "check", &file, "--model", "chain.graph.txt"];
        assert!(run(folder, &with_model).contains("stages, edges, times and memory follow from the model"), "{name}");
        for (expected, change, shows_by_itself) in changes {
            let mut changed = plan.clone();
            change(&mut changed);
            fs::write(folder.join("other.json"), changed.to_string()).unwrap();
            let stderr = run_with_code(folder, 1, &["plan", "check", "other.json"]).1;
            assert!(stderr.contains(expected), "{name}, {expected}: {stderr}");
            changed["x-note"] = json!("by hand");
            changed.as_object_mut().unwrap().remove("digest");
            fs::write(folder.join("own.json"), changed.to_string()).unwrap();
            run_with_code(folder, if *shows_by_itself { 1 } else { 0 }, &["plan", "check", "own.json"]);
            // The model shows it without the digest.
            let stderr = run_with_code(folder, 1, &["plan", "check", "own.json", "--model", "chain.graph.txt"]).1;
            assert!(stderr.contains("is not valid"), "{name}, {expected}: {stderr}");
        }
        // Nothing else in the plan shows that a baseline is wrong.
        let mut changed = plan.clone();
        changed["baselines"]["data_parallel"] = json!(1e9);
        fs::write(folder.join("other.json"), changed.to_string()).unwrap();
        let stderr = run_with_code(folder, 1, &["plan", "check", "other.json", "--model", "chain.graph.txt"]).1;
        assert!(stderr.contains("was edited"), "{name}: {stderr}");
    }
    fs::write(
        folder.join("o.graph.txt"),
        "node0 -- A -- forward_compute_time=1, backward_compute_time=1, activation_size=1, parameter_size=1\n",
    )
    .unwrap();
    assert!(
        run_with_code(folder, 2, &["plan", "check", "straight.json", "--model", "o.graph.txt"])
            .1
            .contains("is not the model")
    );
}

/// Three nodes in a row; the outer two together are as heavy as the middle one.
const INSTANCE: &str = r#"{"maxFPGAs": 2, "maxSizePerFPGA": 100, "nodes": [
    {"id": 0, "fpgaLatency": 5.0, "size": 1, "isBackwardNode": 0}, {"id": 1, "fpgaLatency": 10.0, "size": 1, "isBackwardNode": 0},
    {"id": 2, "fpgaLatency": 5.0, "size": 1, "isBackwardNode": 0}],
    "edges": [{"sourceId": 0, "destId": 1, "cost": 0.1}, {"sourceId": 1, "destId": 2, "cost": 0.1}]}"#;

#[test]
fn placements_from_anywhere_are_judged_by_their_own_rules() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    fs::write(folder.join("i.json"), INSTANCE).unwrap();
    let partition = ["partition", "i.json", "--from", "dnn-partitioning", "-o", "p.json"];
    run(folder, &[&partition[..], &["--noncontiguous"]].concat());
    let plan: Value = serde_json::from_str(&fs::read_to_string(folder.join("p.json")).unwrap()).unwrap();
    assert_eq!(plan["predicted"]["minibatch_us"], 10.2, "{plan}");
    assert!(run(folder, &["plan", "check", "p.json"]).contains("its stages are not contiguous"));
    assert!(run(folder, &["plan", "check", "p.json", "--model", "i.json"]).contains("is valid"));
    assert!(run_with_code(folder, 2, &["simulate", "p.json"]).1.contains("non-contiguous sets of nodes"));
    run(folder, &["report", "p.json", "--html", "p.html"]);
    assert!(fs::read_to_string(folder.join("p.html")).unwrap().contains("non-contiguous sets of nodes"));
    let mut changed = plan.clone();
    changed["predicted"]["minibatch_us"] = json!(3.0);
    fs::write(folder.join("o.json"), changed.to_string()).unwrap();
    assert!(run_with_code(folder, 1, &["plan", "check", "o.json"]).1.contains("predicted.minibatch_us"));
    let mut changed = plan;
    changed["edges"] = json!([]);
    fs::write(folder.join("o.json"), changed.to_string()).unwrap();
    assert!(run_with_code(folder, 1, &["plan", "check", "o.json", "--model", "i.json"]).1.contains("edge 0 -> 1"));
    // A pipeline is simulated as before.
    run(folder, &partition);
    assert!(run(folder, &["simulate", "p.json"]).contains("steady state"));
}

#[test]
fn two_plans_are_distinguished() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    chain(folder);
    write_plan(folder, "a.json", &["--gpus", "2", "--cut-after", "node0"]);
    write_plan(folder, "b.json", &["--gpus", "2", "--cut-after", "node1"]);
    assert!(run(folder, &["plan", "diff", "a.json", "a.json"]).contains("the same plan"));
    let (message, stderr) = run_with_code(folder, 1, &["plan", "diff", "a.json", "b.json"]);
    assert!(message.contains("op 1 (node1): stage 1 to stage 0"), "{message}");
    // 3 | 12 ms become 9 | 6.
    assert!(message.contains("3.000 ms to 9.000 ms") && message.contains("12.00 ms to 6.000 ms"), "{message}");
    assert!(message.contains("a.json and b.json differ in `--cut-after`"), "{message}");
    assert!(!stderr.contains("error"), "{stderr}");
    let value = run_with_code(folder, 1, &["plan", "diff", "a.json", "b.json", "--format", "json"]).0;
    let value: Value = serde_json::from_str(&value).unwrap();
    assert_eq!((&value["equal"], &value["moved"]), (&json!(false), &json!([{"ops": [1, 2], "from": 1, "to": 0}])));
    assert_eq!(value["predicted"]["step_us"], json!([12000.0, 9000.0]));
    assert_eq!((&value["stages"][0]["ops_in"], &value["stages"][1]["ops_out"]), (&json!(1), &json!(1)));
    let equal_json = run(folder, &["plan", "diff", "a.json", "a.json", "--format", "json"]);
    assert_eq!(serde_json::from_str::<Value>(&equal_json).unwrap()["equal"], true);
    run_with_code(folder, 2, &["plan", "diff", "a.json", "missing.json"]);
}

#[test]
fn what_to_type_next_works() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    chain(folder);
    fs::write(folder.join("mine.csv"), "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n").unwrap();
    let message =
        run(folder, &["partition", "chain.graph.txt", "--gpus", "2", "--schedule", "mine.csv", "-o", "own.json"]);
    let next_command = message.split_once("next: pipec ").unwrap().1.lines().next().unwrap();
    assert_eq!(next_command, "simulate own.json --schedule mine.csv");
    let (_, stderr) = run_with_code(folder, 0, &next_command.split(' ').collect::<Vec<_>>());
    assert!(stderr.contains("mine.csv: a table of one minibatch of 2 micro-batches, 2 stages on 2 ranks"), "{stderr}");
    // Several minibatches in one table cannot be distinguished when read back, and writing it says so.
    let write_programs =
        ["simulate", "own.json", "--schedule", "mine.csv", "--minibatches", "3", "--programs", "all.csv"];
    assert!(run_with_code(folder, 0, &write_programs).1.contains("the table has 3 minibatches"));
    let (_, stderr) =
        run_with_code(folder, 0, &["simulate", "own.json", "--schedule", "all.csv", "--minibatches", "1"]);
    assert!(stderr.contains("one minibatch of 6 micro-batches"), "{stderr}");
    let write_programs =
        ["simulate", "own.json", "--schedule", "mine.csv", "--minibatches", "1", "--programs", "one.csv"];
    assert!(!run_with_code(folder, 0, &write_programs).1.contains("the table has"));
    assert_eq!(fs::read(folder.join("one.csv")).unwrap(), fs::read(folder.join("mine.csv")).unwrap());
}

#[test]
fn files_are_spoken_of_in_their_own_words() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    chain(folder);
    write_plan(folder, "p.json", &["--gpus", "2", "--stages", "1,1"]);
    run(folder, &["simulate", "p.json", "--minibatches", "2", "--programs", "program.json"]);
    let plan = fs::read_to_string(folder.join("p.json")).unwrap();
    let program = fs::read_to_string(folder.join("program.json")).unwrap();
    let profile = "{\"schema\": \"pipec.profile/1\", \"model\": 3}";
    let cluster = "schema = \"pipec.cluster/1\"\n[device]\nkind = \"h100\"\npeak_flops = 3\n[[level]]\ncount = 2\nbandwidth = \"1GB/s\"\n";
    let replaced = |from: &str, to: &str| plan.replacen(from, to, 1);
    let cases: [(&str, String, &[&str], &str, &str); 8] = [
        (
            "c.toml",
            cluster.into(),
            &["partition", "chain.graph.txt", "--cluster", "c.toml"],
            "line 4",
            "expected a table",
        ),
        (
            "b.json",
            replaced("\"replicas\": 1", "\"replicas\": -1"),
            &["plan", "show", "b.json"],
            "stages[0].replicas",
            "an integer from 0",
        ),
        (
            "b.json",
            replaced("\"id\": 0", "\"id\": {}"),
            &["plan", "show", "b.json"],
            "stages[0].id",
            "an object, expected an integer",
        ),
        ("b.json", "[1, 2]".into(), &["plan", "show", "b.json"], "line 1", "expected an object"),
        ("b.json", "{\"schema\":".into(), &["plan", "show", "b.json"], "line 1", "it ends early, after 10 bytes"),
        (
            "o.json",
            program.replacen("\"item\": 0", "\"item\": \"x\"", 1),
            &["simulate", "p.json", "--schedule", "o.json"],
            "workers[0]",
            "an integer",
        ),
        (
            "q.json",
            profile.into(),
            &["partition", "m.onnx", "--gpus", "2", "--profile", "q.json"],
            "at `model`",
            "expected an object",
        ),
        (
            "i.json",
            INSTANCE.replace("10.0", "true"),
            &["partition", "i.json", "--from", "dnn-partitioning"],
            "nodes[1].fpgaLatency",
            "expected a number",
        ),
    ];
    for (file, text, arguments, location, why) in cases {
        fs::write(folder.join(file), text).unwrap();
        let stderr = run_with_code(folder, 2, arguments).1;
        assert!(stderr.contains(location) && stderr.contains(why), "{arguments:?}: {stderr}");
        for type_name in ["struct ", "enum ", "u32", "u64", "f64", "File"] {
            assert!(!stderr.contains(type_name), "`{type_name}` in {stderr}");
        }
    }
}

/// Two replicas before one do not have a repeating order: runs of any length report the same steady state, never below
/// the bound.
#[test]
fn a_steady_state_is_that_of_no_run_in_particular() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    run(folder, &["zoo", "gpt", "-o", "gpt.onnx", "-q"]);
    let flags = ["partition", "gpt.onnx", "--gpus", "3", "--profile", "analytic:v100", "-q", "-o", "p.json"];
    for stages in ["2,1", "1,2", "3"] {
        run(folder, &[&flags[..], &["--stages", stages]].concat());
        let plan: Value = serde_json::from_str(&fs::read_to_string(folder.join("p.json")).unwrap()).unwrap();
        let bound = plan["lower_bound_us"].as_f64().unwrap();
        let mut step_times = Vec::new();
        for minibatches in ["10", "50", "100", "104", "1000", "2600"] {
            let flags = ["simulate", "p.json", "--minibatches", minibatches, "--format", "json", "-q"];
            let json: Value = serde_json::from_str(&run(folder, &flags)).unwrap();
            step_times.push(json["step_us"].as_f64().unwrap());
        }
        assert!(step_times.iter().all(|us| (us / step_times[0] - 1.0).abs() < 1e-3), "{stages}: {step_times:?}");
        assert!(step_times.iter().all(|us| *us >= bound * (1.0 - 1e-9)), "{stages}: {step_times:?} under {bound}");
    }
}

/// A tied embedding with little memory: the plan can be trained, with the planned memory.
#[test]
fn shared_parameters_are_planned_as_they_can_be_trained() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    run(folder, &["zoo", "gpt", "-o", "gpt.onnx", "-q"]);
    let partition = ["partition", "gpt.onnx", "--gpus", "4", "--profile", "analytic:v100", "-o", "p.json"];
    let read = || serde_json::from_str::<Value>(&fs::read_to_string(folder.join("p.json")).unwrap()).unwrap();
    let train = ["train", "gpt.onnx", "--plan", "p.json", "--synthetic-data", "--steps", "2"];
    let slow = |memory, bandwidth| ["--memory", memory, "--bandwidth", bandwidth];
    for flags in [&slow("5.5MB", "1.5GB/s")[..], &slow("5.8MB", "2GB/s"), &["--stages", "2,1"]] {
        // An explicit schedule is used as given.
        let arguments = [&partition[..], flags, &["--schedule", "1f1b-rr"]].concat();
        let message = run_with_code(folder, 0, &arguments).1;
        assert!(message.contains("`pipec train` refuses"), "{flags:?}: {message}");
        run_with_code(folder, 2, &train);
        let before = read();
        let message = run_with_code(folder, 0, &[&partition[..], flags].concat()).1;
        run_with_code(folder, 0, &train);
        let plan = read();
        let time = |plan: &Value| plan["predicted"]["minibatch_us"].as_f64().unwrap();
        assert_eq!(message.contains("of the best plan under 1f1b-rr"), time(&plan) > time(&before), "{message}");
        assert!(plan["options"].get("target").is_none(), "{plan}");
        let is_flushed = flags[0] == "--stages";
        assert_eq!(plan["schedule"]["kind"] == "1f1b", is_flushed, "{plan}");
        let json = run(folder, &["simulate", "p.json", "--format", "json", "-q"]);
        let json: Value = serde_json::from_str(&json).unwrap();
        let max = |values: Vec<u64>| values.into_iter().max().unwrap();
        let simulated =
            max(json["workers"].as_array().unwrap().iter().map(|worker| worker["bytes"].as_u64().unwrap()).collect());
        let stages = plan["stages"].as_array().unwrap();
        let planned = max(stages.iter().map(|stage| stage["memory"]["total"].as_u64().unwrap()).collect());
        assert!(simulated.abs_diff(planned) < 8, "{simulated} held, {planned} planned");
    }
    run_with_code(folder, 0, &["train", "gpt.onnx", "--stages", "2,1", "--synthetic-data", "--steps", "2"]);
}

#[test]
fn training_says_that_cpus_have_no_tf32() {
    let folder = tempfile::tempdir().unwrap();
    run(folder.path(), &["zoo", "mlp", "-o", "m.onnx", "-q"]);
    let train = ["train", "m.onnx", "--synthetic-data", "--steps", "1", "--precision"];
    for (precision, is_warned) in [("tf32", true), ("bf16", false)] {
        let (_, stderr) = run_with_code(folder.path(), 0, &[&train[..], &[precision]].concat());
        assert_eq!(stderr.matches("warning: CPUs have no TF32").count(), usize::from(is_warned), "{stderr}");
    }
}
