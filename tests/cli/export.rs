//! Plans exported to other tools: exports match the plan, stage models compose to the whole model, and unsupported
//! plans are rejected with a suggestion.

use crate::support::shared::data;
use assert_cmd::Command;
use compiler::export::target::TARGETS;
use compiler::import::onnx::proto::ModelProto;
use compiler::schedule::formats::csv::ComputeTable;
use compiler::tensor::Tensor;
use prost::Message;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

fn pipec(folder: &Path, arguments: &[&str]) -> Output {
    Command::cargo_bin("pipec").unwrap().current_dir(folder).args(arguments).output().unwrap()
}

/// Runs successfully and returns standard error.
fn run(folder: &Path, arguments: &[&str]) -> String {
    let output = pipec(folder, arguments);
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {message}");
    message
}

/// Expects this exit code; returns standard error.
fn expect_error(folder: &Path, code: i32, arguments: &[&str]) -> String {
    let output = pipec(folder, arguments);
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {message}");
    assert_eq!(message.lines().filter(|line| line.starts_with("error: ")).count(), 1, "{message}");
    message
}

fn text(folder: &Path, name: &str) -> String {
    fs::read_to_string(folder.join(name)).unwrap()
}

fn json(folder: &Path, name: &str) -> Value {
    serde_json::from_str(&text(folder, name)).unwrap()
}

/// A small GPT with tied embeddings and its plan `p.json`, of three stages unless flags differ.
fn gpt(folder: &Path, flags: &[&str]) {
    run(folder, &["zoo", "gpt", "--layers", "4", "-o", "gpt.onnx"]);
    let common = ["partition", "gpt.onnx", "--microbatches", "4", "-o", "p.json"];
    let three_stages = ["--gpus", "3", "--stages", "1,1,1", "--schedule", "1f1b"];
    run(folder, &[&common[..], if flags.is_empty() { &three_stages } else { flags }].concat());
}

/// A published profile: a chain of ops with these names.
fn chain(folder: &Path, names: &[&str]) {
    let mut text = String::new();
    for (at, name) in names.iter().enumerate() {
        text += &format!(
            "node{at} -- {name} -- forward_compute_time=1.5, backward_compute_time=2.5, activation_size=1000.0, parameter_size=400.0\n"
        );
    }
    (1..names.len()).for_each(|at| text += &format!("\tnode{} -- node{at}\n", at - 1));
    fs::write(folder.join("c.graph.txt"), text).unwrap();
}

#[test]
fn every_target_writes_the_same_bytes_again() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    gpt(folder, &["--gpus", "2", "--stages", "1,1", "--schedule", "1f1b", "--target", "torchtitan"]);
    for entry in TARGETS {
        let export = |to: &str| run(folder, &["export", "p.json", "--to", entry.name, "--model", "gpt.onnx", "-o", to]);
        export("a/");
        export("b/");
        let names = |folder_name: &str| -> Vec<PathBuf> {
            let mut names: Vec<PathBuf> =
                fs::read_dir(folder.join(folder_name)).unwrap().map(|file| file.unwrap().file_name().into()).collect();
            names.sort();
            names
        };
        assert!(!names("a").is_empty() && names("a") == names("b"), "{}", entry.name);
        for name in names("a") {
            let read = |folder_name: &str| fs::read(folder.join(folder_name).join(&name)).unwrap();
            assert!(read("a") == read("b"), "{}: {name:?}", entry.name);
        }
        fs::remove_dir_all(folder.join("a")).unwrap();
        fs::remove_dir_all(folder.join("b")).unwrap();
    }
}

#[test]
fn modules_go_to_the_frameworks_that_keep_them_whole() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    gpt(folder, &["--gpus", "4", "--stages", "2,2", "--target", "torchtitan"]);
    let plan = json(folder, "p.json");
    let blocks = |stage: usize| -> usize {
        let mut names: Vec<String> = plan["stages"][stage]["modules"]
            .as_array()
            .unwrap()
            .iter()
            .filter_map(|module| {
                let module = module.as_str().unwrap();
                module.starts_with("blocks.").then(|| module.split('.').take(2).collect::<Vec<_>>().join("."))
            })
            .collect();
        names.sort();
        names.dedup();
        names.len()
    };
    let (first, second) = (blocks(0), blocks(1));
    assert_eq!(first + second, 4);

    run(folder, &["export", "p.json", "--to", "torchtitan", "-o", "t"]);
    let titan = json(folder, "t/torchtitan.json");
    let parts = &titan["parallelism"]["module_fqns_per_model_part"];
    assert_eq!(parts[0][0], "wte");
    assert_eq!(parts[0].as_array().unwrap().len(), 2 + first, "{parts}");
    assert_eq!(parts[1].as_array().unwrap().last().unwrap(), "head");
    assert_eq!(titan["parallelism"]["data_parallel_replicate_degree"], 2);
    // Two replicas share four micro-batches, in the order of torch's 1F1B.
    assert_eq!(titan["parallelism"]["pipeline_parallel_schedule"], "1F1B");
    assert!(!folder.join("t/schedule.csv").exists());
    let joined_names = |at: usize| {
        parts[at].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect::<Vec<_>>().join(",")
    };
    let line = format!("--parallelism.module_fqns_per_model_part {} {}", joined_names(0), joined_names(1));
    assert!(text(folder, "t/torchtitan.args").lines().any(|argument| argument == line), "{line}");
    let toml = text(folder, "t/torchtitan.toml");
    for part in parts.as_array().unwrap() {
        assert!(toml.lines().any(|line| line == format!("    {part},")), "{toml}");
    }
    assert!(toml.contains("[parallelism]\n") && toml.contains("\npipeline_parallel_schedule = \"1F1B\"\n"));

    run(folder, &["export", "p.json", "--to", "megatron", "-o", "m.args"]);
    let arguments = text(folder, "m.args");
    let words: Vec<&str> = arguments.split_whitespace().collect();
    let at = words.iter().position(|word| *word == "--pipeline-model-parallel-layout").unwrap();
    assert_eq!(words[at + 1], format!("E{}|{}L", "t".repeat(first), "t".repeat(second)), "{arguments}");
    assert_eq!((words.len(), words[0]), (12, "--bf16"), "{arguments}");

    run(folder, &["export", "p.json", "--to", "deepspeed", "-o", "d.json"]);
    let deepspeed = json(folder, "d.json");
    assert_eq!(deepspeed["parts"], serde_json::json!([0, 2 + first, 8]));
    assert_eq!(deepspeed["gradient_accumulation_steps"], 2);
    assert!(text(folder, "d.json").starts_with("{\n  \"_use\": ["));
    assert_eq!(deepspeed["zero_optimization"], serde_json::json!({"stage": 0}));
    assert_eq!(deepspeed["gradient_clipping"], 0.0);
    for (to, destination) in [("megatron", "pretrain_gpt.py"), ("deepspeed", "_partition_layers")] {
        let output = pipec(folder, &["export", "p.json", "--to", to, "-o", "x"]);
        assert!(String::from_utf8_lossy(&output.stderr).contains(destination), "{to} names its destination");
    }
}

#[test]
fn plans_for_a_target_are_plans_that_it_takes() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    // The head takes as long as several layers: the best cuts would leave it alone, without the norm before it.
    run(folder, &["zoo", "llama", "--layers", "6", "--vocabulary", "32768", "--structure", "-o", "llama.onnx"]);
    let levels =
        ["partition", "llama.onnx", "--levels", "2:10GB/s,2:1GB/s", "--profile", "analytic:v100", "-o", "p.json"];
    for target in ["torchtitan", "megatron", "deepspeed"] {
        let schedules: &[&str] = if target == "deepspeed" { &["1f1b"] } else { &["1f1b", "interleaved"] };
        for schedule in schedules {
            let flags = ["--target", target, "--schedule", schedule, "--no-replication", "--microbatches", "8"];
            run(folder, &[&levels[..], &flags[..]].concat());
            assert!(json(folder, "p.json")["stages"].as_array().unwrap().len() > 1);
            let out = format!("{target}-{schedule}/");
            let notes = run(folder, &["export", "p.json", "--to", target, "-o", &out]);
            let is_on_two_nodes = notes.contains("torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d");
            assert!(target == "deepspeed" || is_on_two_nodes, "{notes}");
        }
    }
}

#[test]
fn what_a_tool_cannot_carry_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let assert_refused = |flags: &[&str], to: &str, why: &str, help: &str| {
        gpt(folder, flags);
        let message = expect_error(folder, 1, &["export", "p.json", "--to", to, "--model", "gpt.onnx", "-o", "x/"]);
        assert!(message.contains(why) && message.contains(help), "{to}: {message}");
        assert!(!folder.join("x").exists(), "nothing is written");
    };
    let unequal = ["--gpus", "3", "--stages", "2,1", "--schedule", "1f1b"];
    for to in ["torch", "torchtitan", "megatron", "deepspeed"] {
        let help = format!("--target {to}");
        assert_refused(&unequal, to, "stages have 2, 1 replicas", &help);
        assert_refused(&["--gpus", "2", "--stages", "1,1", "--schedule", "2bw"], to, "weight versions", &help);
    }
    let cut = ["--gpus", "2", "--stages", "1,1", "--schedule", "1f1b", "--cut-after", "blocks.1.mlp.act"];
    for to in ["torchtitan", "megatron", "deepspeed"] {
        assert_refused(&cut, to, "module `blocks.1` is in stages 0 and 1", &format!("--target {to}"));
    }
    // DeepSpeed supports only ZeRO 1 with pipelines.
    let zero_flags = |level: &'static str| ["--gpus", "4", "--stages", "2,2", "--target", "deepspeed", "--zero", level];
    for (level, why) in [("2", "ZeRO stage 2"), ("3", "ZeRO stage 3")] {
        assert_refused(&zero_flags(level), "deepspeed", why, "--target deepspeed --zero 1");
    }
    // Groups of replicas that shard: torchtitan, Megatron and pipec have them, DeepSpeed does not.
    let groups = |target, zero| ["--gpus", "4", "--stages", "4", "--target", target, "--zero", zero];
    gpt(folder, &groups("torchtitan", "3:2"));
    run(folder, &["export", "p.json", "--to", "torchtitan", "-o", "t"]);
    let section = &json(folder, "t/torchtitan.json")["parallelism"];
    assert_eq!(
        (&section["data_parallel_replicate_degree"], &section["data_parallel_shard_degree"]),
        (&2.into(), &2.into())
    );
    let train = ["train", "gpt.onnx", "--plan", "p.json", "--synthetic-data", "--steps", "1"];
    run(folder, &train);
    assert_refused(&groups("megatron", "1:2"), "deepspeed", "groups of 2", "--target deepspeed --zero 1");
    run(folder, &["export", "p.json", "--to", "megatron", "-o", "m.args"]);
    let instances = "--overlap-grad-reduce\n--overlap-param-gather\n--use-distributed-optimizer\n--num-distributed-optimizer-instances 2\n";
    assert!(text(folder, "m.args").contains(instances));
    let torch_flags = ["--gpus", "4", "--stages", "2,2", "--target", "torch", "--zero", "1"];
    assert_refused(&torch_flags, "torch", "ZeRO stage 1", "--target torch --zero 0");
    gpt(folder, &zero_flags("1"));
    run(folder, &["export", "p.json", "--to", "deepspeed", "-o", "d.json"]);
    assert_eq!(json(folder, "d.json")["zero_optimization"], serde_json::json!({"stage": 1}));
    assert_refused(
        &["--gpus", "2", "--stages", "1,1", "--schedule", "zb-h1"],
        "megatron",
        "no schedule zb-h1",
        "--schedule 1f1b",
    );
    run(folder, &["zoo", "resnet50", "--structure", "-o", "resnet.onnx"]);
    let resnet = ["partition", "resnet.onnx", "--gpus", "2", "--stages", "1,1", "--target", "megatron", "-o", "r.json"];
    run(folder, &resnet);
    let message = expect_error(folder, 1, &["export", "r.json", "--to", "megatron", "-o", "x"]);
    assert!(message.contains("and Megatron has one list of transformer layers"), "{message}");
    assert_refused(
        &["--gpus", "2", "--stages", "1,1", "--schedule", "2bw"],
        "pipedream",
        "no schedule 2bw",
        "--schedule 1f1b",
    );
}

#[test]
fn usage_errors_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    gpt(folder, &[]);
    assert!(expect_error(folder, 2, &["export", "p.json", "--to", "nothing"]).contains("deepspeed, dot"));
    assert!(expect_error(folder, 2, &["export", "p.json", "--to", "onnx"]).contains("--model FILE"));
    run(folder, &["zoo", "mlp", "-o", "mlp.onnx"]);
    let message = expect_error(folder, 2, &["export", "p.json", "--to", "onnx", "--model", "mlp.onnx"]);
    assert!(message.contains("mlp.onnx is not the model of the plan"), "{message}");
    let message = expect_error(folder, 2, &["export", "p.json", "--to", "torch", "-o", "-"]);
    assert!(message.contains("several files"), "{message}");
    let dot = pipec(folder, &["export", "p.json", "--to", "dot", "-o", "-"]);
    assert!(String::from_utf8(dot.stdout).unwrap().starts_with("digraph plan {"));
}

#[test]
fn names_can_do_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    chain(folder, &["x\"]; y [label=\"z", "../../etc/passwd", "Linear"]);
    run(
        folder,
        &["partition", "c.graph.txt", "--gpus", "3", "--stages", "1,1,1", "--schedule", "1f1b", "-o", "p.json"],
    );
    let mut plan = json(folder, "p.json");
    let bad = "../../x\"'];\\\u{1b}[31m\n{}</script>\u{7f}";
    for (at, stage) in plan["stages"].as_array_mut().unwrap().iter_mut().enumerate() {
        stage["modules"] = serde_json::json!([format!("{bad}{at}")]);
        stage["op_names"] = serde_json::json!([format!("{bad}{at}")]);
    }
    plan["model"]["file"] = serde_json::json!(bad);
    plan["edges"][0]["tensors"] = serde_json::json!([bad]);
    plan.as_object_mut().unwrap().remove("digest");
    fs::write(folder.join("p.json"), plan.to_string()).unwrap();
    fs::create_dir(folder.join("in")).unwrap();
    for to in ["dot", "torch", "pipedream"] {
        run(folder, &["export", "p.json", "--to", to, "--model", "c.graph.txt", "-o", &format!("in/{to}/")]);
    }
    let dot = text(folder, "in/dot/plan.dot");
    assert!(!dot.contains('\u{1b}') && !dot.contains('\u{7f}'));
    for line in dot.lines() {
        // Unescaped quotes come in pairs, and only a statement's end follows a label.
        let quotes = line.replace("\\\\", "").replace("\\\"", "").matches('"').count();
        assert!(quotes == 0 || quotes == 2, "{line}");
    }
    let stages = json(folder, "in/torch/stages.json");
    assert_eq!(stages["stages"][1]["nodes"][0], format!("{bad}1"));
    // Generated programs contain no text from the model.
    for name in ["split.py", "runtime.py", "train.py"] {
        assert!(!text(folder, &format!("in/torch/{name}")).contains("</script>"), "{name}");
    }
    let entries: Vec<_> = fs::read_dir(folder.join("in")).unwrap().collect();
    assert_eq!(entries.len(), 3, "nothing stands beside the folders that were asked for");
}

#[test]
fn profiles_keep_their_costs_and_gain_stages() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    chain(folder, &["Conv2d(3, 64)", "ReLU(inplace)", "Linear(9, 9)", "Softmax"]);
    let plan = ["partition", "c.graph.txt", "--gpus", "3", "--stages", "2,1"];
    run(folder, &[&plan[..], &["-o", "p.json"]].concat());
    run(folder, &["export", "p.json", "--to", "pipedream", "--model", "c.graph.txt", "-o", "out"]);
    let conf = json(folder, "out/conf.json");
    assert_eq!(
        conf,
        serde_json::json!({"module_to_stage_map": [0, 1, 1], "stage_to_rank_map": {"0": [0, 1], "1": [2]}})
    );
    let graph = text(folder, "out/graph.txt");
    assert!(graph.lines().filter(|line| line.starts_with("node")).all(|line| line.contains(" -- stage_id=")));
    // Read back, it is the same problem: the same plan costs the same.
    run(folder, &["partition", "out/graph.txt", "--gpus", "3", "--stages", "2,1", "-o", "q.json"]);
    let (before, after) = (json(folder, "p.json"), json(folder, "q.json"));
    assert_eq!(before["predicted"], after["predicted"]);
    assert_eq!(before["stages"][0]["ops"], after["stages"][0]["ops"]);
}

#[test]
fn every_schedule_becomes_a_table() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for (schedule, replicas, backward) in [
        ("gpipe", "1,1", "B"),
        ("1f1b", "1,1", "B"),
        ("zb-h1", "1,1", "I"),
        ("interleaved", "1,1,1,1", "B"),
        ("bfs", "1,1,1,1", "B"),
        ("zbv", "1,1,1,1", "I"),
        ("dualpipev", "1,1,1,1", "I"),
    ] {
        gpt(folder, &["--gpus", "2", "--stages", replicas, "--schedule", schedule]);
        run(folder, &["export", "p.json", "--to", "torch", "-o", "t"]);
        let table: ComputeTable = text(folder, "t/schedule.csv").parse().unwrap();
        let stages = json(folder, "t/stages.json");
        assert_eq!((table.rows.len(), table.microbatches()), (2, 4), "{schedule}");
        assert_eq!(table.stages() as usize, stages["stages"].as_array().unwrap().len(), "{schedule}");
        let text = table.to_string();
        assert!(text.contains(backward), "{schedule}: {text}");
        // Every stage runs its forwards on the rank given in the file.
        for (stage, rank) in stages["ranks"].as_array().unwrap().iter().enumerate() {
            let row = text.lines().nth(rank.as_u64().unwrap() as usize).unwrap();
            assert!(row.split(',').any(|cell| cell == format!("{stage}F0")), "{schedule}: stage {stage}");
        }
    }
}

/// Runs the stages in sequence according to `stages.json` and compares with the whole model.
fn compare_with_whole_model(folder: &Path, model: &str, inputs: &BTreeMap<String, Tensor>) {
    runtime::data::weights::write(&folder.join("x.npz"), inputs).unwrap();
    run(folder, &["eval", model, "--inputs", "x.npz", "-o", "whole.npz"]);
    let expected = runtime::data::weights::read(&folder.join("whole.npz")).unwrap();
    let message = json(folder, "s/stages.json");
    let mut values = inputs.clone();
    for stage in message["stages"].as_array().unwrap() {
        let name_of = |input: &Value| input["name"].as_str().unwrap().to_string();
        let input_names: Vec<String> = stage["inputs"].as_array().unwrap().iter().map(name_of).collect();
        let stage_inputs: BTreeMap<String, Tensor> =
            input_names.iter().map(|name| (name.clone(), values[name].clone())).collect();
        runtime::data::weights::write(&folder.join("in.npz"), &stage_inputs).unwrap();
        let file = format!("s/{}", stage["file"].as_str().unwrap());
        run(folder, &["eval", &file, "--inputs", "in.npz", "-o", "out.npz"]);
        values.extend(runtime::data::weights::read(&folder.join("out.npz")).unwrap());
    }
    for name in message["outputs"].as_array().unwrap() {
        let name = name.as_str().unwrap();
        let (expected, actual) = (expected[name].to_f64(), values[name].to_f64());
        assert_eq!(expected.len(), actual.len(), "{name}");
        let largest = expected.iter().map(|value| value.abs()).fold(0.0, f64::max);
        let difference = expected.iter().zip(&actual).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(largest > 0.0 && difference <= 1e-5 * largest, "{model} {name}: {difference} of {largest}");
    }
}

#[test]
fn stages_run_as_the_whole_model() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for (name, options, cut) in [
        ("gpt", &["--layers", "2"][..], &["--gpus", "3", "--stages", "1,1,1"][..]),
        ("residual-cnn", &[], &["--gpus", "4", "--stages", "1,1,1,1"]),
        ("mlp", &[], &["--gpus", "2", "--stages", "1,1"]),
    ] {
        let model = format!("{name}.onnx");
        run(folder, &[&["zoo", name, "-o", &model][..], options].concat());
        let plan = ["partition", &model, "--schedule", "1f1b", "--microbatches", "2", "-o", "p.json"];
        run(folder, &[&plan[..], cut].concat());
        let _ = fs::remove_dir_all(folder.join("s"));
        run(folder, &["export", "p.json", "--to", "onnx-stages", "--model", &model, "-o", "s"]);
        compare_with_whole_model(folder, &model, &example_inputs(&folder.join(&model)));
    }
}

/// Three rows for every model input: sequential numbers, or tokens for integers.
fn example_inputs(path: &Path) -> BTreeMap<String, Tensor> {
    let model = compiler::import::onnx::decode::read(path).unwrap();
    let example = |input: &compiler::import::onnx::model::ValueInfo| {
        let size = |dim: &compiler::import::onnx::model::Dim| match dim {
            compiler::import::onnx::model::Dim::Known(size) => *size as usize,
            _ => 3,
        };
        let shape: Vec<usize> = input.dims.as_ref().unwrap().iter().map(size).collect();
        let count: usize = shape.iter().product();
        let tensor = match input.elem_type {
            1 => Tensor::from_f32(&shape, &(0..count).map(|i| (i as f32 * 0.7).sin()).collect::<Vec<_>>()),
            _ => Tensor::from_i64(&shape, &(0..count as i64).map(|i| i * 5 % 7).collect::<Vec<_>>()),
        };
        (input.name.clone(), tensor)
    };
    model.inputs.iter().map(example).collect()
}

#[test]
fn shared_models_run_in_stages() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for name in ["mlp", "cnn_bn", "gpt", "lstm_lm"] {
        let Some(model) = data(&format!("parity/{name}/model.onnx")) else { return };
        let model = model.to_str().unwrap();
        let plan =
            ["partition", model, "--gpus", "3", "--stages", "1,1,1", "--schedule", "1f1b", "--microbatches", "4"];
        run(folder, &[&plan[..], &["-o", "p.json"]].concat());
        let _ = fs::remove_dir_all(folder.join("s"));
        run(folder, &["export", "p.json", "--to", "onnx-stages", "--model", model, "-o", "s"]);
        compare_with_whole_model(folder, model, &example_inputs(Path::new(model)));
    }
}

#[test]
fn every_node_says_its_stage() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    gpt(folder, &[]);
    run(folder, &["export", "p.json", "--to", "onnx", "--model", "gpt.onnx", "-o", "staged.onnx"]);
    let proto = |name: &str| ModelProto::decode(&fs::read(folder.join(name)).unwrap()[..]).unwrap();
    let (staged, original) = (proto("staged.onnx"), proto("gpt.onnx"));
    assert!(staged.ir_version() >= 11);
    assert_eq!((staged.configuration[0].name(), staged.configuration[0].num_devices()), ("pipec", 3));
    let graph = staged.graph.unwrap();
    let mut producer_stage: BTreeMap<&str, i32> = BTreeMap::new();
    let mut node_counts = [0; 3];
    for node in &graph.node {
        let [configuration] = node.device_configurations.as_slice() else { panic!("{}", node.name()) };
        let stage = configuration.pipeline_stage.unwrap();
        node_counts[stage as usize] += 1;
        // Nothing is read before it is produced.
        let before = node.input.iter().filter_map(|name| producer_stage.get(name.as_str())).max();
        assert!(before.is_none_or(|before| *before <= stage), "{}", node.name());
        producer_stage.extend(node.output.iter().map(|name| (name.as_str(), stage)));
    }
    assert!(node_counts.iter().all(|count| *count > 0), "{node_counts:?}");
    // Otherwise it equals the model, including the plan's own copy.
    let mut unstaged = graph.clone();
    unstaged.node.iter_mut().for_each(|node| node.device_configurations.clear());
    assert_eq!(Some(unstaged), original.graph);
    run(folder, &["export", "p.json", "--to", "onnx-stages", "--model", "staged.onnx", "-o", "s"]);
}
