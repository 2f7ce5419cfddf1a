//! Tensor-parallel groups over several processes: bitwise equal to threads, wherever their ranks are.

use crate::processes::{command, compare, files, port, run_ok, text, wait_for_exit, write_plan};
#[cfg(target_os = "linux")]
use crate::support::family::{all_gone, children, send};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::Child;

const FLUSH: [&str; 4] = ["--schedule", "1f1b", "--microbatches", "4"];

/// Models that are large enough to be sharded.
fn make_models(folder: &Path) {
    run_ok(folder, &["zoo", "mlp", "-o", "m.onnx", "-q"]);
    run_ok(folder, &["zoo", "residual-cnn", "--hidden", "16", "--layers", "2", "-o", "c.onnx", "-q"]);
    let gpt = ["--hidden", "32", "--layers", "2", "--vocabulary", "32", "--context", "8", "--heads", "4"];
    run_ok(folder, &[&["zoo", "gpt", "--tied", "true", "--dropout", "0.1", "-o", "g.onnx", "-q"], &gpt[..]].concat());
}

/// Checks that the group shards parameters: it would have no collectives otherwise.
fn assert_sharded(folder: &Path, arguments: &[&str]) {
    let flags = ["--synthetic-data", "--steps", "1"];
    let output = command(folder, &[&["train"][..], arguments, &flags].concat()).output().unwrap();
    let printed = text(&output.stderr);
    assert!(output.status.success() && printed.contains("parameters are sharded"), "{arguments:?}: {printed}");
}

/// Trains in threads and in processes, and compares all output files.
fn compare_sharded(folder: &Path, label: &str, arguments: &[&str]) {
    let arguments = [arguments, &["--batch", "32"]].concat();
    assert_sharded(folder, &arguments);
    compare(folder, label, &[&arguments[..], &["--steps", "4"]].concat());
}

#[test]
fn groups_in_processes_train_as_in_threads() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    make_models(root);
    let pairs = |model, extra: &[&str], label: &str| {
        compare_sharded(root, label, &[&[model, "--tensor", "2"][..], extra].concat());
    };
    pairs("m.onnx", &["--stages", "2,1"], "1f1b-rr, 2-1");
    pairs("c.onnx", &["--stages", "1,1", "--optimizer", "adam", "--clip-norm", "0.1"], "batch norm, clipped by stage");
    let clipped = [&FLUSH[..], &["--stages", "1,1", "--clip-norm", "0.1"]].concat();
    pairs("g.onnx", &[&clipped[..], &["--dtype", "bf16"]].concat(), "a shared embedding in bf16");
    pairs("c.onnx", &[&clipped[..], &["--dtype", "f16"]].concat(), "a loss scale");
    compare_sharded(root, "groups of four", &[&["c.onnx", "--tensor", "4"][..], &clipped].concat());
}

/// ZeRO stage, devices and degree, stages, model, schedule.
type ShardedCase = (&'static str, [&'static str; 2], &'static str, &'static str, &'static [&'static str]);

/// Sequence parallelism too: stages of the GPT exchange activations that are split along the sequence.
#[test]
fn groups_in_processes_train_with_shards_as_in_threads() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    make_models(root);
    let cases: [ShardedCase; 6] = [
        ("0", ["4", "2"], "1,1", "g.onnx", &FLUSH),
        ("1", ["4", "2"], "2", "m.onnx", &["--schedule", "1f1b-rr"]),
        ("2", ["4", "2"], "2", "g.onnx", &FLUSH),
        ("3", ["6", "2"], "2,1", "m.onnx", &FLUSH),
        ("3", ["4", "2"], "2", "c.onnx", &["--schedule", "1f1b-rr"]),
        ("3", ["8", "4"], "2", "c.onnx", &FLUSH),
    ];
    for (zero, [devices, degree], stages, model, schedule) in cases {
        let rows = if schedule.contains(&"1f1b") { "8" } else { "32" };
        let group = ["--gpus", devices, "--stages", stages, "--tensor", degree, "--zero", zero, "--optimizer", "adam"];
        let costs = ["--profile", "analytic:cpu", "--micro-batch", rows];
        write_plan(root, model, &[&group[..], &costs, schedule].concat());
        let label = format!("{model}, ZeRO {zero}");
        compare_sharded(root, &label, &[model, "--plan", "plan.json", "--optimizer", "adam", "--clip-norm", "0.1"]);
    }
}

#[test]
fn checkpoints_of_groups_are_those_of_threads_and_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    make_models(root);
    let cases: [(&str, &[&str]); 2] = [
        ("g.onnx", &["--stages", "1,1", "--optimizer", "adam"]),
        ("c.onnx", &["--stages", "1,1", "--schedule", "1f1b", "--microbatches", "4", "--dtype", "f16"]),
    ];
    for (model, flags) in cases {
        let flags = [&[model, "--tensor", "2", "--batch", "32"][..], flags].concat();
        assert_sharded(root, &flags);
        let run = |name: &str, extra: &[&str]| {
            let keep = ["--steps", "6", "--checkpoint-dir", name, "--checkpoint-every", "2", "--synthetic-data", "-q"];
            run_ok(root, &[&["train"][..], &flags, &keep, extra].concat());
            files(&root.join(name))
        };
        let expected = run("threads", &[]);
        assert!(expected.len() > 7, "{:?}", expected.keys());
        assert!(run("processes", &["--processes"]) == expected, "{model}");
        for step in ["step-00000004", "step-00000006"] {
            fs::remove_dir_all(root.join("processes").join(step)).unwrap();
        }
        fs::remove_file(root.join("processes/weights.safetensors")).unwrap();
        assert!(run("processes", &["--processes", "--resume", "auto"]) == expected, "{model}, resumed");
        ["threads", "processes"].iter().for_each(|name| fs::remove_dir_all(root.join(name)).unwrap());
    }
}

fn check_all_succeed(children: Vec<Child>) {
    for (code, printed) in children.into_iter().map(wait_for_exit) {
        assert_eq!(code, Some(0), "{printed}");
    }
}

/// The ranks of two groups of two: each group in its process, one of them over two, and each rank in its own.
#[test]
fn a_group_may_be_in_one_process_or_in_several() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    make_models(root);
    let shape = ["m.onnx", "--batch", "32", "--stages", "1,1", "--tensor", "2", "--schedule", "1f1b"];
    assert_sharded(root, &shape);
    let flags = ["--synthetic-data", "--steps", "5", "--clip-norm", "0.1", "-q", "--save"];
    let flags = [&["train"][..], &shape, &flags].concat();
    run_ok(root, &[&flags[..], &["threads.safetensors"]].concat());
    let expected = fs::read(root.join("threads.safetensors")).unwrap();
    let compare = |name: &str| {
        assert!(fs::read(root.join(name)).unwrap() == expected, "{name}");
    };
    for processes in ["2", "3", "4"] {
        let (name, port) = (format!("{processes}.safetensors"), port().to_string());
        let start_launched = |rank: u32| {
            let mut command = command(root, &[&flags[..], &[&name]].concat());
            command.env("RANK", rank.to_string()).env("WORLD_SIZE", processes);
            command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port).spawn().unwrap()
        };
        check_all_succeed((0..processes.parse().unwrap()).map(start_launched).collect());
        compare(&name);
    }
    hosts(root, [1, 3]);
    let host = |number: &str| {
        let rank_flags = ["hosts.safetensors", "--hosts", "hosts.toml", "--host", number];
        command(root, &[&flags[..], &rank_flags].concat()).spawn().unwrap()
    };
    check_all_succeed(vec![host("0"), host("1")]);
    compare("hosts.safetensors");
    // Two devices on the hosts are too few, and so are four with another degree.
    hosts(root, [1, 1]);
    let (code, printed) = wait_for_exit(host("0"));
    let why = "the plan has 2 workers of 2 tensor-parallel devices, but there are 2 devices on the hosts";
    assert!(code == Some(2) && printed.contains(why), "{code:?}: {printed}");
    let address = format!("127.0.0.1:{}", port());
    let start_ranked = |number: &str, degree: &str, stages: &str| {
        let flags = ["train", "m.onnx", "--synthetic-data", "--batch", "8", "--steps", "5", "--connect-timeout", "4"];
        let rank_flags = ["--rank", number, "--address", &address, "--tensor", degree, "--stages", stages];
        command(root, &[&flags[..], &rank_flags].concat()).spawn().unwrap()
    };
    for (code, printed) in [start_ranked("0", "2", "1,1"), start_ranked("1", "1", "1,1,1,1")].map(wait_for_exit) {
        assert_eq!(code, Some(1), "{printed}");
        assert!(
            printed.contains("the tensor-parallel degrees or shardings") && printed.contains("differ"),
            "{printed}"
        );
    }
}

fn hosts(folder: &Path, devices: [u32; 2]) {
    let host = |devices| format!("[[host]]\naddress = \"127.0.0.1:{}\"\ndevices = {devices}\n", port());
    let count: u32 = devices.iter().sum();
    let level = format!("[[level]]\nname = \"lan\"\ncount = {count}\nbandwidth = \"1GB/s\"\nlatency = \"10us\"\n");
    let hosts = devices.map(host).concat();
    fs::write(
        folder.join("hosts.toml"),
        format!("schema = \"pipec.cluster/1\"\n[device]\nkind = \"cpu\"\n{level}{hosts}"),
    )
    .unwrap();
}

#[cfg(target_os = "linux")]
#[test]
fn a_rank_that_is_killed_is_named_and_nobody_waits_for_it() {
    use crate::processes::Long;

    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    run_ok(root, &["zoo", "mlp", "-o", "m.onnx", "-q"]);
    let group = ["--stages", "1,1", "--tensor", "2"];
    assert_sharded(root, &[&["m.onnx", "--batch", "256"][..], &group].concat());
    let mut long = Long::start(root, "m.jsonl", &[&group[..], &["--processes"]].concat());
    long.wait_until_it_trains();
    let pids = children(long.pid());
    assert_eq!(pids.len(), 4);
    send("KILL", pids[3]);
    let (code, printed, seconds) = long.wait_for_exit();
    assert_eq!(code, Some(1), "{printed}");
    let named = format!("worker 1.0 tensor rank 1 (stage 1), process {}, was killed by signal 9 (SIGKILL)", pids[3]);
    assert!(printed.contains(&named), "{printed}");
    assert!(seconds < 20.0, "{seconds} s");
    all_gone(&pids);
}

/// Compares weights that agree up to rounding.
#[cfg(target_os = "linux")]
fn assert_near(folder: &Path, got: &str, expected: &str) {
    let read = |name: &str| runtime::data::weights::read(&folder.join(name)).unwrap();
    let (got, expected) = (read(got), read(expected));
    assert_eq!(got.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    for (name, tensor) in &got {
        let pairs = tensor.to_f64().into_iter().zip(expected[name].to_f64());
        let largest = pairs.map(|(got, expected)| (got - expected).abs()).fold(0.0, f64::max);
        assert!(largest < 1e-4, "{name}: {largest}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn ranks_stop_together_and_go_on_with_any_degree() {
    use crate::signals::{self, KEPT, TRAIN, check_resume, spawn, stopped_step, wait_for_checkpoint};

    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    run_ok(root, &["zoo", "mlp", "-o", "m.onnx", "-q"]);
    let plan = ["--stages", "1", "--tensor", "2"];
    assert_sharded(root, &[&["m.onnx", "--batch", "64"][..], &plan].concat());
    let mut child = spawn(root, &[&TRAIN, &plan, &KEPT, &["--steps", "6000", "--processes"]]);
    wait_for_checkpoint(root, &mut child);
    let pids = children(child.id());
    send("TERM", pids[1]);
    let (code, message) = signals::wait_for_exit(child);
    assert_eq!(code, Some(143), "{message}");
    all_gone(&pids);
    let step = stopped_step(&message, "SIGTERM");
    let (from, steps) = (format!("ck/step-{step:08}"), (step + 3).to_string());
    let alone = ["--stages", "1", "--resume", &from, "--steps", &steps, "--save", "alone.safetensors"];
    run_ok(root, &[&TRAIN[..], &alone].concat());
    check_resume(root, &plan, step);
    assert_near(root, "rest.safetensors", "alone.safetensors");
}

#[cfg(target_os = "linux")]
#[test]
fn a_run_of_groups_goes_on_from_its_last_checkpoint_when_a_rank_dies() {
    use crate::signals::{self, spawn, wait_for_checkpoint};

    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    run_ok(root, &["zoo", "mlp", "-o", "m.onnx", "-q"]);
    let plan = ["--stages", "1", "--tensor", "2"];
    assert_sharded(root, &[&["m.onnx", "--batch", "64"][..], &plan].concat());
    let flags = ["train", "m.onnx", "--synthetic-data", "--batch", "64", "--momentum", "0.9", "--steps", "600"];
    let flags = [&flags[..], &plan].concat();
    run_ok(root, &[&flags[..], &["--save", "threads.safetensors", "-q"]].concat());
    let keep = ["--checkpoint-dir", "ck", "--checkpoint-every", "20", "--keep", "2"];
    let extra = ["--processes", "--max-restarts", "1", "--save", "processes.safetensors"];
    let mut child = spawn(root, &[&flags, &keep, &extra]);
    wait_for_checkpoint(root, &mut child);
    send("KILL", children(child.id())[1]);
    let (code, message) = signals::wait_for_exit(child);
    assert_eq!(code, Some(0), "{message}");
    assert!(message.contains("restart 1 of 1") && message.contains("resuming after step "), "{message}");
    let read = |name: &str| fs::read(root.join(name)).unwrap();
    assert!(read("threads.safetensors") == read("processes.safetensors"));
}

/// `Checkpoint` instructions gather the shards of all processes.
#[test]
fn programs_save_weights_of_groups_in_processes() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    run_ok(root, &["zoo", "mlp", "-o", "m.onnx", "-q"]);
    let group = ["--gpus", "4", "--stages", "1,1", "--tensor", "2", "--profile", "analytic:cpu", "--micro-batch", "32"];
    write_plan(root, "m.onnx", &[&group[..], &["--schedule", "1f1b"]].concat());
    run_ok(root, &["simulate", "plan.json", "--minibatches", "3", "--programs", "own.json"]);
    let mut program: Value = serde_json::from_str(&fs::read_to_string(root.join("own.json")).unwrap()).unwrap();
    for stage in [0, 1] {
        let list = program["workers"][stage]["instructions"].as_array_mut().unwrap();
        list.push(json!({"op": "checkpoint", "stage": stage, "version": 3}));
    }
    fs::write(root.join("own.json"), program.to_string()).unwrap();
    let plan = ["m.onnx", "--plan", "plan.json"];
    assert_sharded(root, &plan);
    let run = |name: &str, extra: &[&str]| {
        let flags = ["--schedule", "own.json", "--synthetic-data", "--checkpoint-dir", name, "-q"];
        run_ok(root, &[&["train"][..], &plan, &flags, extra].concat());
        files(&root.join(name))
    };
    let threads = run("threads", &[]);
    assert!(
        ["stage-0-version-3.safetensors", "stage-1-version-3.safetensors"]
            .iter()
            .all(|name| threads.contains_key(Path::new(name)))
    );
    assert!(run("processes", &["--processes"]) == threads);
}

/// Plans that differ in how activations are sharded have other collectives.
#[test]
fn processes_with_other_collectives_refuse_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    make_models(root);
    let group = ["--gpus", "2", "--stages", "1", "--tensor", "2", "--profile", "analytic:cpu", "--micro-batch", "32"];
    write_plan(root, "g.onnx", &[&group[..], &["--schedule", "1f1b"]].concat());
    let mut plan: Value = serde_json::from_str(&fs::read_to_string(root.join("plan.json")).unwrap()).unwrap();
    plan["stages"][0]["tensor_parallel"]["activations"] = json!("sequence");
    plan.as_object_mut().unwrap().remove("digest");
    fs::write(root.join("sequence.json"), plan.to_string()).unwrap();
    let address = format!("127.0.0.1:{}", port());
    let rank = |number: &str, plan: &str| {
        let flags = ["train", "g.onnx", "--plan", plan, "--synthetic-data", "--steps", "2", "--connect-timeout", "2"];
        command(root, &[&flags[..], &["--rank", number, "--address", &address]].concat()).spawn().unwrap()
    };
    for (code, printed) in [rank("0", "plan.json"), rank("1", "sequence.json")].map(wait_for_exit) {
        assert_eq!(code, Some(1), "{printed}");
        assert!(printed.contains("the tensor-parallel degrees or shardings differ"), "{printed}");
    }
}
