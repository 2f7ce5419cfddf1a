//! Damaged files of every kind, given to the commands that read them: a result or an error, in time and in little memory.
//!
//! `PIPEC_MUTATIONS` sets the number of damaged files of each kind, `PIPEC_SEED` the first seed. `tests/mutations.rs`
//! damages models within the process.

#[path = "../fuzz/src/damage.rs"]
mod damage;

use compiler::tensor::{DType, Tensor};
use damage::{Random, damage, edit_text, setting};
use runtime::data::weights;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Most address space of a command, in kB. A run has several threads with their stacks and arenas.
const MOST_KB: u64 = 6 << 20;

/// Most seconds of a command's CPU time, and of waiting for it on a busy machine.
const MOST_CPU_SECONDS: u32 = 20;
const MOST_SECONDS: f64 = 120.0;

/// A kind of file: an undamaged one, and the commands that read it.
struct Kind {
    file: &'static str,
    is_text: bool,
    commands: &'static [&'static str],
}

const KINDS: &[Kind] = &[
    Kind {
        file: "model.onnx",
        is_text: false,
        commands: &["train model.onnx --synthetic-data --steps 1 --batch 4 --stages 1,1", "inspect model.onnx"],
    },
    Kind {
        file: "profile.json",
        is_text: true,
        commands: &["partition model.onnx --profile profile.json --gpus 3 --batch 8 -o out.json"],
    },
    Kind {
        file: "cluster.toml",
        is_text: true,
        commands: &[
            "partition model.onnx --profile profile.json --cluster cluster.toml --batch 8 -o out.json",
            "partition graph.txt --cluster cluster.toml -o out.json",
        ],
    },
    Kind { file: "graph.txt", is_text: true, commands: &["partition graph.txt --gpus 3 -o out.json"] },
    Kind {
        file: "plan.json",
        is_text: true,
        commands: &[
            "plan check plan.json",
            "simulate plan.json --minibatches 4",
            "report plan.json --html out.html --no-what-if",
            "train model.onnx --plan plan.json --synthetic-data --steps 1",
        ],
    },
    Kind {
        file: "programs.json",
        is_text: true,
        commands: &[
            "simulate plan.json --schedule programs.json",
            "train model.onnx --plan plan.json --schedule programs.json --synthetic-data --steps 2",
        ],
    },
    Kind {
        file: "table.csv",
        is_text: true,
        commands: &[
            "partition model.onnx --profile profile.json --gpus 2 --stages 1,1 --schedule table.csv -o out.json",
            "train model.onnx --stages 1,1 --schedule table.csv --synthetic-data --steps 2",
        ],
    },
    Kind {
        file: "metrics.jsonl",
        is_text: true,
        commands: &["report plan.json --metrics metrics.jsonl --html out.html --no-what-if"],
    },
    Kind {
        file: "data.npz",
        is_text: false,
        commands: &["train model.onnx --data data.npz --batch 4", "eval model.onnx --inputs data.npz -o out.npz"],
    },
    Kind { file: "x.npy", is_text: false, commands: &["eval model.onnx --inputs x.npy -o out.npz"] },
    Kind {
        file: "weights.safetensors",
        is_text: false,
        commands: &[
            "train model.onnx --weights weights.safetensors --synthetic-data --steps 1",
            "eval model.onnx --inputs data.npz --weights weights.safetensors -o out.npz",
        ],
    },
    Kind { file: "checkpoints/step-00000002/manifest.json", is_text: true, commands: RESUME },
    Kind { file: "checkpoints/step-00000002/stage-0.safetensors", is_text: false, commands: RESUME },
    Kind { file: "checkpoints/step-00000002/stage-1.optimizer.safetensors", is_text: false, commands: RESUME },
];

const RESUME: &[&str] = &[
    "train model.onnx --plan plan.json --synthetic-data --steps 4 --optimizer adam --resume checkpoints/step-00000002",
];

const CLUSTER: &str = r#"schema = "pipec.cluster/1"
[device]
kind = "custom"
memory = "4GB"
memory_bandwidth = "1TB/s"
peak_flops = { f32 = 1e13 }
launch = "5us"
[[level]]
name = "link"
count = 2
bandwidth = "10GB/s"
[[level]]
name = "network"
count = 2
bandwidth = "1GB/s"
"#;

const GRAPH: &str = "node1 -- Input -- forward_compute_time=0.000, backward_compute_time=0.000, \
    activation_size=4816896.0, parameter_size=0.000
node2 -- Conv2d(3, 8) -- forward_compute_time=3.1, backward_compute_time=6.2, activation_size=102760448.0, parameter_size=37632.000
node3 -- ReLU -- forward_compute_time=1.1, backward_compute_time=1.4, activation_size=102760448.0, parameter_size=0.000
node4 -- Linear -- forward_compute_time=2.0, backward_compute_time=3.0, activation_size=[4096.0; 8192.0], parameter_size=16000.000
\tnode1 -- node2
\tnode2 -- node3
\tnode2 -- node4
\tnode3 -- node4
";

fn pipec(folder: &Path, arguments: &str) -> Command {
    let script = format!("ulimit -v {MOST_KB}; ulimit -t {MOST_CPU_SECONDS}; exec \"$0\" -q {arguments}");
    let mut command = Command::new("sh");
    command.args(["-c", &script, env!("CARGO_BIN_EXE_pipec")]).current_dir(folder);
    command.env("MALLOC_ARENA_MAX", "2").stdin(Stdio::null()).stdout(Stdio::null());
    command
}

fn run(folder: &Path, arguments: &str) {
    let output = pipec(folder, arguments).output().unwrap();
    assert!(output.status.success(), "{arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Makes an undamaged file of each kind.
fn make(folder: &Path) {
    fs::write(folder.join("cluster.toml"), CLUSTER).unwrap();
    fs::write(folder.join("graph.txt"), GRAPH).unwrap();
    for arguments in [
        "zoo mlp --hidden 8 -o model.onnx",
        "profile model.onnx --micro-batch 4 --runs 1 --warmup 0 -o profile.json",
        "partition model.onnx --profile profile.json --gpus 2 --stages 1,1 --schedule gpipe --microbatches 2 -o plan.json",
        "simulate plan.json --programs table.csv --minibatches 1",
        "partition model.onnx --profile profile.json --gpus 3 --stages 2,1 --schedule 1f1b --microbatches 2 \
         --optimizer adam -o plan.json",
        "simulate plan.json --programs programs.json --minibatches 2",
        "train model.onnx --plan plan.json --synthetic-data --steps 2 --optimizer adam --checkpoint-dir checkpoints \
         --metrics metrics.jsonl --save weights.safetensors",
    ] {
        run(folder, arguments);
    }
    // With its digest, every damage of a plan would be the same error.
    let plan = fs::read_to_string(folder.join("plan.json")).unwrap();
    let mut plan: serde_json::Value = serde_json::from_str(&plan).unwrap();
    plan.as_object_mut().unwrap().remove("digest");
    fs::write(folder.join("plan.json"), format!("{plan:#}\n")).unwrap();
    let image = Tensor::new(DType::F32, vec![8, 1, 8, 8], vec![0; 8 * 64 * 4].into()).unwrap();
    let labels = Tensor::new(DType::I64, vec![8], vec![0; 8 * 8].into()).unwrap();
    let arrays = [("x".to_string(), image), ("target".to_string(), labels)].into();
    weights::write(&folder.join("data.npz"), &arrays).unwrap();
    let header = format!("{:<117}\n", "{'descr': '<f4', 'fortran_order': False, 'shape': (8, 1, 8, 8), }");
    let npy = [&b"\x93NUMPY\x01\x00\x76\x00"[..], header.as_bytes(), &[0; 8 * 64 * 4]].concat();
    fs::write(folder.join("x.npy"), npy).unwrap();
}

/// Whether a command has a result, or how it failed to give a result or an error.
fn outcome(folder: &Path, arguments: &str) -> Result<bool, String> {
    let errors = folder.join("errors.txt");
    let mut child = pipec(folder, arguments).stderr(fs::File::create(&errors).unwrap()).spawn().unwrap();
    let (start, mut status) = (Instant::now(), None);
    while status.is_none() && start.elapsed().as_secs_f64() < MOST_SECONDS {
        status = child.try_wait().unwrap();
        if status.is_none() {
            thread::sleep(Duration::from_millis(1));
        }
    }
    if status.is_none() {
        child.kill().unwrap();
    }
    let exit = child.wait().unwrap();
    let stderr = String::from_utf8_lossy(&fs::read(errors).unwrap()).into_owned();
    let is_expected = status.is_some() && matches!(exit.code(), Some(0..=3));
    match is_expected && !stderr.contains("panicked") && !stderr.contains("bug in pipec") {
        true => Ok(exit.success()),
        false => Err(format!("`pipec {arguments}` after {:?}, {:?}: {stderr}", start.elapsed(), exit)),
    }
}

/// Damages a file for one seed, and runs a command on it.
fn case(folder: &Path, kind: &Kind, original: &[u8], seed: u64) -> Result<bool, String> {
    let mut random = Random::new(seed);
    let mut bytes = original.to_vec();
    match kind.is_text && random.below(4) > 0 {
        true => edit_text(&mut bytes, &mut random),
        false => damage(&mut bytes, &mut random),
    }
    fs::write(folder.join(kind.file), &bytes).unwrap();
    let outcome = outcome(folder, kind.commands[random.below(kind.commands.len())]);
    fs::write(folder.join(kind.file), original).unwrap();
    outcome.map_err(|fault| format!("{}: {fault}\nagain: PIPEC_SEED={seed} PIPEC_MUTATIONS=1", kind.file))
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(|entry| entry.unwrap()) {
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &to);
        } else {
            fs::copy(entry.path(), to).unwrap();
        }
    }
}

#[test]
fn damaged_files_end_in_a_result_or_an_error() {
    if cfg!(not(unix)) {
        return;
    }
    let (count, start) = (setting("PIPEC_MUTATIONS", 120), setting("PIPEC_SEED", 1));
    let folder = tempfile::tempdir().unwrap();
    make(folder.path());
    for arguments in KINDS.iter().flat_map(|kind| kind.commands) {
        run(folder.path(), arguments);
    }
    let undamaged: Vec<Vec<u8>> = KINDS.iter().map(|kind| fs::read(folder.path().join(kind.file)).unwrap()).collect();
    // Two commands run at a time, in folders of their own.
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let of_folder = |at: usize| -> Vec<(usize, Result<bool, String>)> {
        copy(folder.path(), folders[at].path());
        let seeds = (start..start + count).skip(at).step_by(folders.len());
        let cases = seeds.flat_map(|seed| KINDS.iter().zip(&undamaged).enumerate().map(move |of| (seed, of)));
        cases
            .map(|(seed, (at_kind, (kind, original)))| (at_kind, case(folders[at].path(), kind, original, seed)))
            .collect()
    };
    let outcomes = thread::scope(|scope| {
        let second = scope.spawn(|| of_folder(1));
        let first = of_folder(0);
        [first, second.join().unwrap()].concat()
    });
    for (at, kind) in KINDS.iter().enumerate() {
        let of = outcomes.iter().filter(|(of, _)| *of == at);
        let (results, errors): (Vec<_>, Vec<_>) = of.partition(|(_, outcome)| *outcome == Ok(true));
        println!("{}: {} results, {} errors", kind.file, results.len(), errors.len());
        // Damage that never or always has a result would test nothing. But every instruction of a program is checked, and
        // checkpoints and archives have checksums.
        let is_checked = ["programs.json", "data.npz"].contains(&kind.file) || kind.commands == RESUME;
        let is_mixed = !errors.is_empty() && (is_checked || !results.is_empty());
        assert!(count < 40 || is_mixed, "{}: {} results, {} errors", kind.file, results.len(), errors.len());
    }
    let faults: Vec<String> = outcomes.into_iter().filter_map(|(_, outcome)| outcome.err()).collect();
    assert!(faults.is_empty(), "{} faults\n{}", faults.len(), faults.join("\n\n"));
}
