//! The command line: exit codes, streams, error lines, and the path from a model to its results.

use crate::support::shared::data;
use assert_cmd::Command;
use serde_json::Value;
use std::path::Path;
use std::process::Output;

const COMMANDS: &str =
    "inspect profile partition plan simulate report sweep train eval export quickstart schema zoo completions";

fn pipec(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::cargo_bin("pipec").unwrap();
    let output = command.current_dir(folder).env("NO_COLOR", "1").args(arguments).output().unwrap();
    for stream in [&output.stdout, &output.stderr] {
        assert!(!stream.contains(&0x1b), "an escape code in the output of {arguments:?}");
        assert!(!String::from_utf8_lossy(stream).contains("panicked at"), "{arguments:?}");
    }
    output
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Runs successfully and returns standard output.
fn run(folder: &Path, arguments: &[&str]) -> String {
    let output = pipec(folder, arguments);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// Expects this exit code and exactly one error line; returns standard error.
fn fail(folder: &Path, code: i32, arguments: &[&str]) -> String {
    let output = pipec(folder, arguments);
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stderr}");
    let start = if arguments.contains(&"json") { "{\"message\":" } else { "error: " };
    let errors =
        stderr.lines().chain(stdout.lines()).filter(|line| line.starts_with("error") || line.starts_with(start));
    assert_eq!(errors.count(), 1, "{arguments:?}: {stderr}");
    assert!(stderr.lines().any(|line| line.starts_with(start)), "{stderr}");
    stderr
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// A chain of ops with the given milliseconds, 1 MB activations and `parameter` bytes each.
fn graph_txt(folder: &Path, times: &[f64], parameter: u64) {
    let mut file = String::new();
    for (at, time) in times.iter().enumerate() {
        file += &format!(
            "node{at} -- Linear -- forward_compute_time={}, backward_compute_time={}, activation_size=1000000.0, \
             parameter_size={parameter}\n",
            time / 3.0,
            time * 2.0 / 3.0
        );
    }
    for at in 1..times.len() {
        file += &format!("\tnode{} -- node{at}\n", at - 1);
    }
    std::fs::write(folder.join("chain.graph.txt"), file).unwrap();
}

#[test]
fn every_verb_has_help() {
    let folder = tempfile::tempdir().unwrap();
    let help = run(folder.path(), &["--help"]);
    for verb in COMMANDS.split(' ') {
        assert!(help.contains(verb), "{verb} is not in the help");
        assert!(run(folder.path(), &[verb, "--help"]).contains("Usage:"), "{verb}");
        assert!(run(folder.path(), &["help", verb]).contains("Usage:"), "{verb}");
    }
    assert!(run(folder.path(), &["--version"]).starts_with("pipec "));
}

#[test]
fn usage_errors_are_one_line_and_code_2() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    for arguments in [
        &[][..],
        &["frobnicate"],
        &["partition"],
        &["partition", "x.onnx", "--no-such-flag"],
        &["partition", "x.onnx", "--noncontiguous", "--gpus", "2"],
        &["partition", "x.onnx", "--gpus", "2", "--levels", "2:1GB/s"],
        &["partition", "missing.onnx", "--gpus", "4"],
        &["partition", "missing.onnx", "--gpus", "4", "--profile", "analytic:abacus"],
        &["partition", "missing.onnx", "--gpus", "4", "--bandwidth", "10"],
        &["partition", "missing.onnx"],
        &["train", "missing.onnx"],
        &["train", "missing.onnx", "--synthetic-data", "--lr", "NaN"],
        &["train", "missing.onnx", "--synthetic-data", "--lr", "-1"],
        &["train", "missing.onnx", "--synthetic-data", "--seed", "-1"],
        &["partition", "missing.onnx", "--gpus", "2", "--stages", "1x2"],
        &["partition", "missing.onnx", "--gpus", "2", "--stages", "1,1", "--partitioner", "uniform"],
        &["partition", "missing.onnx", "--gpus", "2", "--time-limit", "9s"],
        &["partition", "missing.onnx", "--gpus", "2", "--partitioner", "milp", "--time-limit", "9"],
        &["partition", "missing.onnx", "--cluster", "c.toml", "--bandwidth", "1GB/s"],
        &["partition", "missing.onnx", "--cluster", "c.toml", "--gpus", "2"],
        &["train", "missing.onnx", "--synthetic-data", "--optimizer", "adam", "--momentum", "0.9"],
        &["eval", "missing.onnx"],
        &["simulate", "missing.json"],
        &["plan", "check", "missing.json"],
        &["schema", "nothing"],
        &["zoo", "nothing"],
        &["inspect", "missing.onnx", "--dim", "batch=0"],
        &["\u{1b}[31m"],
    ] {
        fail(at, 2, arguments);
    }
    std::fs::write(at.join("empty.onnx"), b"").unwrap();
    assert!(fail(at, 2, &["inspect", "empty.onnx"]).contains("empty"));
    std::fs::write(at.join("bad.json"), b"{\"schema\": 1, \"schema\": 2}").unwrap();
    assert!(fail(at, 2, &["plan", "show", "bad.json"]).contains("duplicate key"));
    fail(at, 2, &["inspect", "."]);
}

#[test]
fn a_published_profile_is_planned() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    // Two heavy halves that replicate badly: 200 MB of parameters each, over a slow link.
    graph_txt(at, &[5.0, 5.0, 5.0, 5.0], 200_000_000);
    let flags = ["partition", "chain.graph.txt", "--from", "pipedream", "--levels", "2:1GB/s"];
    let output_text = run(at, &flags);
    assert!(output_text.contains("stage  ops") && output_text.contains("wrote chain.plan.json"), "{output_text}");
    assert!(output_text.contains("proven optimal"), "{output_text}");
    let plan = json(&std::fs::read_to_string(at.join("chain.plan.json")).unwrap());
    assert_eq!(plan["schema"], "pipec.plan/1");
    assert_eq!(plan["stages"].as_array().unwrap().len(), 2);
    assert!((plan["predicted"]["minibatch_us"].as_f64().unwrap() - 10_000.0).abs() < 1e-6);
    // The plan is reproducible, and equal to the JSON on standard output.
    let plan_bytes = std::fs::read(at.join("chain.plan.json")).unwrap();
    let json_again = run(at, &[&flags[..], &["--format", "json", "-o", "again.json"]].concat());
    assert_eq!(plan_bytes, std::fs::read(at.join("again.json")).unwrap());
    assert_eq!(json(&json_again), plan);
    assert_eq!(text(&plan_bytes), run(at, &[&flags[..], &["-o", "-"]].concat()));

    let chart = run(at, &["simulate", "chain.plan.json", "--minibatches", "40", "--chart", "--trace", "t.json"]);
    assert!(chart.contains("\n0.0 |  F0  F1"), "{chart}");
    assert!(json(&std::fs::read_to_string(at.join("t.json")).unwrap())["traceEvents"].is_array());
    let simulated = json(&run(at, &["simulate", "chain.plan.json", "--format", "json"]));
    assert_eq!(simulated["workers"].as_array().unwrap().len(), 2);
    assert!(run(at, &["plan", "show", "chain.plan.json"]).contains("stage  ops"));
    assert!(run(at, &["plan", "check", "chain.plan.json"]).contains("is valid"));
    assert_eq!(json(&run(at, &["plan", "check", "chain.plan.json", "--format", "json"]))["valid"], true);

    // A modified plan is rejected.
    let broken = text(&plan_bytes).replacen("\"replicas\": 1", "\"replicas\": 3", 1);
    std::fs::write(at.join("broken.json"), broken).unwrap();
    assert!(fail(at, 1, &["plan", "check", "broken.json"]).contains("devices for 3 replicas"));
    fail(at, 2, &["simulate", "broken.json"]);
}

#[test]
fn data_parallelism_is_said_first_where_it_wins() {
    let folder = tempfile::tempdir().unwrap();
    graph_txt(folder.path(), &[5.0, 7.0, 3.0], 8);
    let output_text = run(folder.path(), &["partition", "chain.graph.txt", "--gpus", "4"]);
    assert!(output_text.starts_with("Recommended: data parallelism over 4 devices"), "{output_text}");
    let pinned = run(folder.path(), &["partition", "chain.graph.txt", "--gpus", "4", "--stages", "2,1,1", "--compare"]);
    assert!(pinned.starts_with("Data parallelism would be"), "{pinned}");
    let cut = run(folder.path(), &["partition", "chain.graph.txt", "--gpus", "2", "--cut-after", "node0", "-o", "-"]);
    assert_eq!(json(&cut)["stages"][0]["ops"], serde_json::json!([[0, 1]]));
}

#[test]
fn nothing_fits_is_an_explained_no() {
    let folder = tempfile::tempdir().unwrap();
    graph_txt(folder.path(), &[5.0, 5.0, 5.0, 5.0], 1_000_000_000);
    let output_text = fail(folder.path(), 3, &["partition", "chain.graph.txt", "--gpus", "2", "--memory", "1GB"]);
    let (_, suggestion) = output_text.split_once("`--memory ").unwrap();
    let limit = suggestion.split_once('`').unwrap().0;
    run(folder.path(), &["partition", "chain.graph.txt", "--gpus", "2", "--memory", limit]);
}

#[test]
fn from_the_zoo_to_an_answer() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    run(at, &["zoo", "mlp", "--hidden", "8", "--layers", "2", "--inputs", "6", "--classes", "3", "-o", "m.onnx"]);
    let model = json(&run(at, &["inspect", "m.onnx", "--format", "json"]));
    assert_eq!(model["parameters"]["count"], 6 * 8 + 8 + 8 * 8 + 8 + 8 * 3 + 3);
    assert_eq!((model["trainable"].as_bool(), model["outputs"][0]["name"].as_str()), (Some(true), Some("logits")));
    assert!(run(at, &["inspect", "m.onnx"]).contains("155 in 6 tensors"));
    assert!(run(at, &["inspect", "m.onnx", "--text"]).contains("matmul"));
    run(at, &["profile", "m.onnx", "--device", "analytic:h200", "--micro-batch", "4", "-o", "h.json"]);
    run(at, &["profile", "m.onnx", "--runs", "2", "--no-cache", "--micro-batch", "4", "-q", "-o", "p.json"]);
    let profile = json(&std::fs::read_to_string(at.join("p.json")).unwrap());
    assert_eq!((profile["method"].as_str(), profile["settings"]["micro_batch"].as_u64()), (Some("measured"), Some(4)));
    run(at, &["partition", "m.onnx", "--profile", "p.json", "--gpus", "3", "--stages", "2,1", "-o", "plan.json"]);

    let train = ["train", "m.onnx", "--plan", "plan.json", "--synthetic-data", "--steps", "7", "--lr", "0.1"];
    let outputs = ["--metrics", "m.jsonl", "--save", "w.safetensors", "--trace", "t.json", "--checkpoint-dir", "ck"];
    assert!(run(at, &[&train[..], &outputs[..]].concat()).contains("trained 7 steps"));
    let metrics = std::fs::read_to_string(at.join("m.jsonl")).unwrap();
    let lines: Vec<Value> = metrics.lines().map(json).collect();
    assert_eq!(lines.len(), 8);
    for (step, line) in lines[..7].iter().enumerate() {
        assert_eq!(line["step"], step);
        assert!(line["loss"].is_f64() && line["seconds"].is_f64() && line["samples_per_s"].is_f64());
    }
    assert_eq!(lines[7]["total"]["steps"], 7);
    // The same seed gives bitwise equal weights.
    run(at, &[&train[..], &["--save", "again.safetensors"]].concat());
    let weights = std::fs::read(at.join("w.safetensors")).unwrap();
    assert_eq!(weights, std::fs::read(at.join("again.safetensors")).unwrap());
    assert_eq!(weights, std::fs::read(at.join("ck/weights.safetensors")).unwrap());

    let rows = compiler::tensor::Tensor::from_f32(&[5, 6], &[0.5; 30]);
    runtime::data::weights::write(&at.join("x.npz"), &[("x".to_string(), rows)].into()).unwrap();
    run(at, &["eval", "m.onnx", "--inputs", "x.npz", "--weights", "w.safetensors", "-o", "y.npz"]);
    assert_eq!(runtime::data::weights::read(&at.join("y.npz")).unwrap()["logits"].shape(), [5, 3]);
    std::fs::write(at.join("list.tsv"), "m.onnx\tx.npz\tz.npz\nm.onnx\tnone.npz\tn.npz\n").unwrap();
    fail(at, 1, &["eval", "--batch-file", "list.tsv"]);
    assert!(at.join("z.npz").exists());

    // A plan for another model is rejected.
    run(at, &["zoo", "mlp", "--hidden", "9", "--layers", "2", "--inputs", "6", "--classes", "3", "-o", "o.onnx"]);
    let other_plan = ["train", "o.onnx", "--plan", "plan.json", "--synthetic-data", "--steps", "1"];
    assert!(fail(at, 2, &other_plan).contains("is not the model of the plan"));
    fail(at, 2, &["partition", "o.onnx", "--profile", "p.json", "--gpus", "2"]);
}

#[test]
fn training_plans_by_itself_and_schedules_agree() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    run(at, &["zoo", "mlp", "--hidden", "8", "--layers", "3", "--inputs", "6", "--classes", "3", "-o", "m.onnx"]);
    let train = ["train", "m.onnx", "--synthetic-data", "--steps", "5", "--batch", "8", "--microbatches", "4"];
    let mut saved = Vec::new();
    for (at_run, flags) in [
        &["--schedule", "1f1b"][..],
        &["--stages", "1,1,1", "--schedule", "1f1b"],
        &["--stages", "1,1", "--schedule", "gpipe"],
    ]
    .iter()
    .enumerate()
    {
        let file = format!("w{at_run}.safetensors");
        run(at, &[&train[..], flags, &["--save", &file]].concat());
        saved.push(std::fs::read(at.join(file)).unwrap());
    }
    assert!(saved.windows(2).all(|pair| pair[0] == pair[1]), "synchronous schedules give the same bits");
    fail(at, 2, &[&train[..], &["--schedule", "1f1b-rr"]].concat());
    fail(at, 2, &["train", "m.onnx", "--synthetic-data", "--batch", "7", "--microbatches", "2", "--steps", "1"]);
    let diverging = ["train", "m.onnx", "--synthetic-data", "--steps", "40", "--batch", "8", "--lr", "1e30"];
    assert!(fail(at, 1, &diverging).contains("diverged"));
}

#[test]
fn every_time_is_that_of_a_minibatch() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    graph_txt(at, &[5.0, 5.0, 5.0, 5.0], 8);
    let flags = ["partition", "chain.graph.txt", "--gpus", "2", "--stages", "1,1", "--microbatches", "4"];
    // 4 micro-batches of 10 ms plus one to drain, against 4 of 20 ms on one device, or 4 of 10 ms data-parallel.
    for cost in ["paper", "pipec"] {
        let output_text = run(at, &[&flags[..], &["--schedule", "1f1b", "--compare", "--cost", cost]].concat());
        assert!(output_text.starts_with("Data parallelism would be 1.25"), "{output_text}");
        assert!(
            output_text.contains("predicted      50.0")
                && output_text.contains("one device     80.00 ms per minibatch"),
            "{output_text}"
        );
        assert!(
            output_text.contains("this plan is 1.60 times") || output_text.contains("this plan is 1.6"),
            "{output_text}"
        );
        assert!(
            output_text.contains("in steady state") == (cost == "paper") && !output_text.contains("\nuniform         "),
            "{output_text}"
        );
    }
    let simulated = json(&run(at, &["simulate", "chain.plan.json", "--format", "json"]));
    assert!((simulated["step_us"].as_f64().unwrap() / 50_000.0 - 1.0).abs() < 0.05, "{simulated}");
    // The recommendation is printed only if the planner was free to choose.
    let single = run(at, &["partition", "chain.graph.txt", "--gpus", "2", "--partitioner", "single"]);
    assert!(single.starts_with("Data parallelism would be 2.0"), "{single}");
    let data_parallel = run(at, &["partition", "chain.graph.txt", "--gpus", "2", "--partitioner", "data-parallel"]);
    assert!(!data_parallel.contains("Recommended") && !data_parallel.contains("would be"), "{data_parallel}");
    let milp = ["partition", "chain.graph.txt", "--gpus", "2", "--partitioner", "milp", "--time-limit", "60s"];
    let plan = json(&run(at, &[&milp[..], &["--stages", "1,1", "--format", "json"]].concat()));
    assert_eq!((&plan["search"]["method"], &plan["options"]["time_limit"]), (&"milp".into(), &60.0.into()), "{plan}");
    assert_eq!(plan["proven_optimal"], true, "{plan}");
}

#[test]
fn constraints_and_objectives_of_plans() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    graph_txt(at, &[5.0, 5.0, 5.0, 5.0], 8);
    let flags = ["partition", "chain.graph.txt", "--gpus", "4", "--format", "json", "-o", "p.json"];
    let plan = |extra: &[&str]| json(&run(at, &[&flags[..], extra].concat()));
    let replicas = |plan: &serde_json::Value| {
        let stages = plan["stages"].as_array().unwrap().iter();
        stages.map(|stage| stage["replicas"].as_u64().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(replicas(&plan(&["--no-replication"])), [1, 1, 1, 1]);
    assert_eq!(replicas(&plan(&["--no-replication", "--max-stages", "2"])), [1, 1]);
    let latency = plan(&["--objective", "latency"]);
    assert_eq!((latency["schedule"]["kind"].as_str(), replicas(&latency)), (Some("inference"), vec![1]));
    let target = plan(&["--target", "torch", "--microbatches", "8"]);
    assert_eq!(
        (target["schedule"]["kind"].as_str(), target["options"]["target"].as_str()),
        (Some("1f1b"), Some("torch"))
    );
    let pinned = plan(&["--pin", "0=0,3=1", "--no-replication"]);
    assert_eq!(pinned["options"]["pin"], serde_json::json!(["0=0", "3=1"]));
    assert_eq!(run(at, &["plan", "check", "p.json"]).matches("is valid").count(), 1);
    for invalid in [
        &["--target", "torch", "--schedule", "1f1b-rr"][..],
        &["--objective", "latency", "--schedule", "1f1b"],
        &["--no-replication", "--cost", "paper"],
        &["--pin", "nothing=0"],
        &["--pin", "0"],
    ] {
        fail(at, 2, &[&flags[..], invalid].concat());
    }
    let error = fail(at, 3, &[&flags[..], &["--memory", "10B"]].concat());
    assert!(
        error.contains("more") && error.contains("is the smallest memory limit for which a plan was found"),
        "{error}"
    );
}

#[test]
fn costs_of_another_device_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    run(at, &["zoo", "mlp", "-o", "m.onnx"]);
    let cluster = "schema = \"pipec.cluster/1\"\n[device]\nkind = \"h200\"\n[[level]]\nname = \"nvlink\"\ncount = 2\n\
                   bandwidth = \"450GB/s\"\n";
    std::fs::write(at.join("c.toml"), cluster).unwrap();
    let flags = ["partition", "m.onnx", "--cluster", "c.toml", "--profile"];
    let v100 = pipec(at, &[&flags[..], &["analytic:v100"]].concat());
    assert!(text(&v100.stderr).contains("costs are for v100, but the cluster's devices are of type h200"));
    assert!(text(&v100.stdout).contains("analytic costs of v100"), "{}", text(&v100.stdout));
    assert!(run(at, &["plan", "show", "m.plan.json"]).contains("analytic costs of v100"));
    let h200 = pipec(at, &[&flags[..], &["analytic:h200"]].concat());
    assert!(!text(&h200.stderr).contains("warning"), "{}", text(&h200.stderr));
    run(at, &["profile", "m.onnx", "--device", "analytic:a100", "-o", "a.json"]);
    let a100 = pipec(at, &[&flags[..], &["a.json"]].concat());
    assert!(text(&a100.stderr).contains("costs are for a100"), "{}", text(&a100.stderr));
    // A file of another type is named as what it is.
    assert!(fail(at, 2, &["plan", "show", "a.json"]).contains("it is a profile"));
    assert!(fail(at, 2, &[&flags[..], &["m.plan.json"]].concat()).contains("it is a plan"));
}

#[test]
fn tied_parameters_are_reported_before_training() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    run(at, &["zoo", "gpt", "--layers", "2", "-o", "g.onnx"]);
    assert!(run(at, &["inspect", "g.onnx"]).contains("wte.weight, used by 2 ops"));
    let equal = ["partition", "g.onnx", "--gpus", "2", "--stages", "1,1", "--micro-batch", "4", "-o", "e.json"];
    // Both stages use the first stage's version, which no program states.
    let output_text = text(&pipec(at, &equal).stderr);
    assert!(
        output_text.contains("stages 0 and 1 share the parameter `wte.weight`: all use the weight version of stage 0"),
        "{output_text}"
    );
    assert!(!output_text.contains("warning"), "{output_text}");
    run(at, &["train", "g.onnx", "--plan", "e.json", "--synthetic-data", "--steps", "3"]);
    // Copies on unequal replica counts cannot be kept equal.
    let flags = ["partition", "g.onnx", "--gpus", "3", "--stages", "2,1", "--micro-batch", "4", "-o", "p.json"];
    let output = pipec(at, &[&flags[..], &["--schedule", "1f1b-rr"]].concat());
    assert!(text(&output.stderr).contains("share the parameter `wte.weight`"), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("--plan p.json --schedule 1f1b"));
    let train = ["train", "g.onnx", "--plan", "p.json", "--synthetic-data", "--steps", "1"];
    assert!(fail(at, 2, &train).contains("--schedule 1f1b"));
    run(at, &[&train[..], &["--schedule", "1f1b"]].concat());
    // A frozen table has one version everywhere.
    run(at, &[&train[..], &["--freeze", "wte.weight"]].concat());
    let flushed = pipec(at, &[&flags[..], &["--schedule", "1f1b"]].concat());
    assert!(!text(&flushed.stderr).contains("warning"), "{}", text(&flushed.stderr));
}

#[test]
fn training_takes_what_users_have() {
    use compiler::tensor::Tensor;
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let read = |name: &str| runtime::data::weights::read(&at.join(name)).unwrap();
    let write = |name: &str, arrays| runtime::data::weights::write(&at.join(name), &arrays).unwrap();
    run(at, &["zoo", "mlp", "--hidden", "8", "--layers", "2", "--inputs", "6", "--classes", "3", "-o", "m.onnx"]);
    run(at, &["zoo", "mlp"]);
    // A boolean option without a value is true.
    run(at, &["zoo", "resnet18", "--small-images", "--structure", "-o", "r.onnx"]);
    assert!(fail(at, 2, &["zoo", "mlp"]).contains("already exists"));

    // A single array besides the labels is the model's input; dropped rows are reported.
    let x = Tensor::from_f32(&[10, 6], &(0..60).map(|at| (at as f32).sin()).collect::<Vec<_>>());
    let labels = |label: i64| Tensor::from_i64(&[10], &[label; 10]);
    write("d.npz", [("data".to_string(), x.clone()), ("y".to_string(), labels(2))].into());
    let train = ["train", "m.onnx", "--data", "d.npz", "--batch", "4", "--lr", "0.1", "--stages", "2,1"];
    let trained = pipec(at, &[&train[..], &["--freeze", "fc1*", "--save", "w.npz", "--metrics", "m.jsonl"]].concat());
    let output_text = text(&trained.stderr);
    assert_eq!(trained.status.code(), Some(0), "{output_text}");
    for part in [
        "array `data` is used",
        "2 of 10 rows do not fill a minibatch of 4",
        "stage 0 has 2 replicas: one update averages 2 minibatches",
        "wrote w.npz (weights), m.jsonl (metrics)",
    ] {
        assert!(output_text.contains(part), "{part}: {output_text}");
    }
    // Frozen parameters keep their bits, the others change.
    run(at, &[&train[..], &["--freeze", "fc2*,fc3*", "--save", "v.npz"]].concat());
    let (w, v) = (read("w.npz"), read("v.npz"));
    assert_ne!(w["fc1.weight"], v["fc1.weight"]);
    assert_ne!(w["fc3.weight"], v["fc3.weight"]);
    let zero_rate = ["train", "m.onnx", "--data", "d.npz", "--batch", "4", "--lr", "0", "--save", "o.npz"];
    run(at, &zero_rate);
    let o = read("o.npz");
    assert_eq!((&w["fc1.weight"], &v["fc3.weight"]), (&o["fc1.weight"], &o["fc3.weight"]));
    assert!(fail(at, 2, &[&train[..], &["--freeze", "fc1.wieght"]].concat()).contains("did you mean `fc1.weight`"));
    assert!(fail(at, 2, &[&train[..], &["--freeze", "*"]].concat()).contains("no parameter to train"));

    write("bad.npz", [("x".to_string(), x.clone()), ("y".to_string(), labels(7))].into());
    let bad_labels = ["train", "m.onnx", "--data", "bad.npz", "--batch", "4"];
    assert!(fail(at, 2, &bad_labels).contains("array `y`, row 0: label 7"));
    write("x.npz", [("x".to_string(), x.clone())].into());
    assert!(fail(at, 2, &["train", "m.onnx", "--data", "x.npz", "--batch", "4"]).contains("`target` or `y`"));
    assert!(fail(at, 2, &["train", "m.onnx"]).contains("--synthetic-data"));

    // Weight files may contain more or fewer tensors than the model, but not different ones.
    let eval = |weights: &str| {
        let output = pipec(at, &["eval", "m.onnx", "--inputs", "d.npz", "--weights", weights, "-o", "out.npz"]);
        (output.status.code(), text(&output.stderr))
    };
    let mut other_weights = w.clone();
    other_weights.insert("bn.num_batches_tracked".to_string(), Tensor::from_i64(&[1], &[3]));
    other_weights.remove("fc1.bias");
    write("more.npz", other_weights);
    let (code, output_text) = eval("more.npz");
    assert_eq!(code, Some(0), "{output_text}");
    assert!(
        output_text.contains("ignored `bn.num_batches_tracked`") && output_text.contains("not have `fc1.bias`"),
        "{output_text}"
    );
    assert_eq!(eval("x.npz").0, Some(2));
    write("two.npz", [("a".to_string(), x.clone()), ("b".to_string(), x)].into());
    let missing = fail(at, 2, &["eval", "m.onnx", "--inputs", "two.npz", "-o", "out.npz"]);
    assert!(missing.contains("the model needs `x`"), "{missing}");
}

#[test]
fn what_does_not_fit_in_memory_is_refused_first() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    run(at, &["zoo", "mlp", "-o", "m.onnx"]);
    let output_text = fail(at, 2, &["profile", "m.onnx", "--micro-batch", "4000000000"]);
    assert!(output_text.contains("does not fit in memory") && output_text.contains("is available"), "{output_text}");
}

#[test]
fn schemas_and_scripts_are_printed() {
    let folder = tempfile::tempdir().unwrap();
    for what in ["plan", "profile", "cluster"] {
        assert!(json(&run(folder.path(), &["schema", what]))["properties"]["schema"].is_object(), "{what}");
    }
    for shell in ["bash", "zsh", "fish"] {
        assert!(run(folder.path(), &["completions", shell]).contains("partition"), "{shell}");
    }
}

#[test]
fn quiet_keeps_results_and_drops_the_rest() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    run(at, &["zoo", "mlp", "-o", "m.onnx"]);
    let loud = pipec(at, &["partition", "m.onnx", "--gpus", "2"]);
    // Replacing an existing plan is reported.
    std::fs::remove_file(at.join("m.plan.json")).unwrap();
    let quiet = pipec(at, &["partition", "m.onnx", "--gpus", "2", "-q"]);
    assert_eq!(loud.stdout, quiet.stdout);
    assert!(text(&loud.stderr).contains("analytic") && quiet.stderr.is_empty());
}

#[cfg(unix)]
#[test]
fn a_reader_that_goes_away_is_no_failure() {
    use std::process::Stdio;
    let mut child = std::process::Command::new(assert_cmd::cargo::cargo_bin("pipec"))
        .args(["schema", "plan"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), String::new()));
}

#[test]
fn control_characters_in_names_are_escaped() {
    let Some(hostile) = data("hostile/onnx") else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| hostile.join(name).display().to_string();
    // `run` and `expect_error` reject escape codes in the output.
    for format in ["text", "json"] {
        run(folder.path(), &["inspect", &file("name_ansi.onnx"), "--format", format]);
        run(folder.path(), &["partition", &file("name_ansi.onnx"), "--gpus", "2", "--format", format]);
    }
    run(folder.path(), &["inspect", &file("name_ansi.onnx"), "--text"]);
    assert!(fail(folder.path(), 2, &["inspect", &file("cycle.onnx")]).contains("cycle"));
    run(
        folder.path(),
        &["train", &file("name_path.onnx"), "--checkpoint-dir", "ck", "--steps", "1", "--synthetic-data"],
    );
    let mut files: Vec<_> =
        std::fs::read_dir(folder.path().join("ck")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    files.sort();
    assert_eq!(files, ["step-00000001", "weights.safetensors"]);
}

/// An inference plan does not suggest training; a comparison states on how many devices chunks run.
#[test]
fn a_plan_summary_states_its_estimates() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    run(at, &["zoo", "mlp", "-o", "m.onnx"]);
    let inference_text = run(at, &["partition", "m.onnx", "--gpus", "2", "--schedule", "inference"]);
    assert!(
        inference_text.contains("next: pipec simulate") && !inference_text.contains("pipec train"),
        "{inference_text}"
    );
    let flags = ["--gpus", "2", "--schedule", "zbv", "--microbatches", "8", "--compare"];
    let output_text = run(at, &[&["partition", "m.onnx"][..], &flags].concat());
    assert!(output_text.contains("pipec train"), "{output_text}");
    let row = |name: &str| output_text.lines().find(|line| line.starts_with(name)).unwrap().to_string();
    assert!(row("pipec  ").contains("1-1-1-1 on 2 devices"), "{output_text}");
    assert!(!row("uniform  ").contains(" on "), "{output_text}");
    assert!(output_text.contains("candidates with one stage per device do not use zbv"), "{output_text}");
}

#[test]
fn optimizers_are_called_the_same_by_all_verbs() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    run(folder, &["zoo", "mlp", "--inputs", "6", "--hidden", "8", "-o", "m.onnx"]);
    let plan_with = |words: &[&str]| {
        run(folder, &[&["partition", "m.onnx", "--gpus", "2", "--stages", "1,1", "-o", "p.json"], words].concat());
        std::fs::read(folder.join("p.json")).unwrap()
    };
    let train_with = |words: &[&str]| {
        run(folder, &[&["train", "m.onnx", "--synthetic-data", "--steps", "3", "--save", "w.npz"], words].concat());
        runtime::data::weights::read(&folder.join("w.npz")).unwrap()
    };
    let assert_same = |left: &[&str], right: &[&str]| {
        assert!(plan_with(left) == plan_with(right), "{left:?} and {right:?}");
        let (left, right) = (train_with(left), train_with(right));
        assert!(left.iter().all(|(name, weight)| weight.bytes() == right[name].bytes()));
    };
    assert_same(&["--optimizer", "sgd", "--momentum", "0.9"], &["--optimizer", "sgd-momentum"]);
    assert_same(
        &["--optimizer", "rmsprop-momentum", "--momentum", "0.9"],
        &["--optimizer", "rmsprop", "--momentum", "0.9"],
    );
    assert_same(&["--optimizer", "sgd-momentum", "--momentum", "0"], &["--optimizer", "sgd"]);
    assert!(plan_with(&["--optimizer", "sgd-momentum"]) != plan_with(&["--optimizer", "sgd"]));
    for verb in [&["train", "m.onnx", "--synthetic-data"][..], &["partition", "m.onnx", "--gpus", "2"]] {
        let output_text = fail(folder, 2, &[verb, &["--optimizer", "adam", "--momentum", "0.9"]].concat());
        assert!(output_text.contains("help: it requires `--optimizer sgd` or `rmsprop`"), "{output_text}");
    }
    let output_text = fail(folder, 2, &["partition", "m.onnx", "--gpus", "2", "--precision", "int8"]);
    assert!(output_text.contains("write one of fp64, fp32, tf32, bf16, fp16"), "{output_text}");
}

#[test]
fn devices_without_a_stage_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    graph_txt(folder, &[3.0; 4], 4000);
    let flags =
        ["partition", "chain.graph.txt", "--from", "pipedream", "--gpus", "5", "--stages", "1,2", "-o", "p.json"];
    let output_text = run(folder, &flags);
    assert!(output_text.contains("idle           2 of 5 devices, without a stage: 3-4\n"), "{output_text}");
    let text = std::fs::read_to_string(folder.join("p.json")).unwrap();
    assert_eq!(json(&text)["cluster"]["idle"], serde_json::json!([3, 4]));
    let mut changed = json(&text);
    changed["cluster"]["idle"] = serde_json::json!([2, 4]);
    std::fs::write(folder.join("wrong.json"), changed.to_string()).unwrap();
    let output_text = pipec(folder, &["plan", "check", "wrong.json"]);
    assert_eq!(output_text.status.code(), Some(1));
    assert!(all_output(&output_text).contains("cluster.idle"), "{}", all_output(&output_text));
    let full_text = run(
        folder,
        &["partition", "chain.graph.txt", "--from", "pipedream", "--gpus", "3", "--stages", "1,2", "-o", "p.json"],
    );
    assert!(!full_text.contains("idle"), "{full_text}");
}

#[test]
fn what_is_not_wanted_is_said_in_two_ways() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    run(folder, &["zoo", "mlp", "-o", "m.onnx"]);
    let plan_with = |words: &[&str]| {
        let plan = ["partition", "m.onnx", "--gpus", "2", "--stages", "1,1", "--microbatches", "4", "-o", "p.json"];
        run(folder, &[&plan[..], words].concat());
        std::fs::read(folder.join("p.json")).unwrap()
    };
    let never = plan_with(&["--recompute", "never"]);
    assert!(plan_with(&["--no-recompute"]) == never && plan_with(&[]) != never);
    assert!(plan_with(&["--no-tensor"]) == plan_with(&["--tensor", "never"]));
    for words in [["--no-recompute", "--recompute", "auto"], ["--no-tensor", "--tensor", "2"]] {
        fail(folder, 2, &[&["partition", "m.onnx", "--gpus", "2"][..], &words].concat());
    }
}

fn all_output(output: &Output) -> String {
    text(&output.stdout) + &text(&output.stderr)
}
