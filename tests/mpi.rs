//! Training over MPI, if pipec is built with it and `mpirun` is installed: `cargo test --features mpi --test mpi`.

use assert_cmd::cargo::cargo_bin;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Timeout for a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

fn is_there() -> bool {
    let said = Command::new("mpirun").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    let is_there = cfg!(feature = "mpi") && said.is_ok_and(|status| status.success());
    if !is_there {
        println!("skipped: no mpirun, or built without the feature `mpi`");
    }
    is_there
}

/// Also with fewer cores, and as root.
fn mpirun(folder: &Path, processes: usize, arguments: &[&str]) -> Command {
    let mut command = Command::new("mpirun");
    command.current_dir(folder).args(["-n", &processes.to_string()]).arg(cargo_bin("pipec")).args(arguments);
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    command.env("OMPI_MCA_rmaps_base_oversubscribe", "1");
    command.env("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn done(folder: &Path, arguments: &[&str]) {
    let output = Command::new(cargo_bin("pipec")).current_dir(folder).args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", said(&output));
}

fn losses(folder: &Path, name: &str) -> Vec<u64> {
    let text = fs::read_to_string(folder.join(name)).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    lines.filter_map(|line| line["loss"].as_f64()).map(f64::to_bits).collect()
}

#[test]
fn processes_over_mpi_train_as_threads_do() {
    if !is_there() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    done(at, &["zoo", "mlp", "--inputs", "6", "--classes", "3", "--hidden", "8", "-o", "m.onnx", "-q"]);
    let gpt = ["zoo", "gpt", "--hidden", "8", "--layers", "2", "--vocabulary", "16", "--context", "4", "--heads", "2"];
    done(at, &[&gpt[..], &["--tied", "true", "-o", "g.onnx", "-q"]].concat());
    let flags = ["--cost", "pipec", "--micro-batch", "2", "--gpus", "2", "--schedule", "interleaved", "--chunks", "2"];
    done(at, &[&["partition", "g.onnx", "--microbatches", "4", "-o", "plan.json", "-q"], &flags[..]].concat());
    let cases: [(usize, &[&str]); 6] = [
        (2, &["m.onnx", "--stages", "1,1", "--schedule", "1f1b", "--microbatches", "4"]),
        (3, &["m.onnx", "--stages", "1,1,1", "--schedule", "gpipe", "--microbatches", "4", "--clip-norm", "0.1"]),
        (3, &["m.onnx", "--stages", "2,1"]),
        (4, &["g.onnx", "--stages", "2,2", "--optimizer", "adam"]),
        (2, &["g.onnx", "--plan", "plan.json"]),
        // Two workers in one of the processes.
        (2, &["m.onnx", "--stages", "2,1", "--momentum", "0.9"]),
    ];
    for (processes, flags) in cases {
        let common = [&["train"][..], flags, &["--synthetic-data", "--batch", "8", "--steps", "5"]].concat();
        let kept = ["--checkpoint-every", "2", "--checkpoint-dir"];
        let threads = ["--save", "t.safetensors", "--metrics", "t.jsonl", "-q"];
        done(at, &[&common[..], &kept, &["t"], &threads].concat());
        // No address of process 0 is given, so only MPI can work.
        let own = ["--save", "p.safetensors", "--metrics", "p.jsonl"];
        let output = mpirun(at, processes, &[&common[..], &kept, &["p"], &own].concat()).output().unwrap();
        let message = said(&output);
        assert!(output.status.success(), "{processes} {flags:?}: {message}");
        assert!(message.contains("connected by MPI: "), "{message}");
        assert_eq!(losses(at, "t.jsonl"), losses(at, "p.jsonl"), "{processes} {flags:?}");
        let bytes = |name: &str| fs::read(at.join(name)).unwrap();
        assert!(bytes("t.safetensors") == bytes("p.safetensors"), "{processes} {flags:?}");
        for file in ["manifest.json", "stage-0.safetensors", "stage-1.optimizer.safetensors"] {
            let [one, other] = ["t", "p"].map(|name| bytes(&format!("{name}/step-00000004/{file}")));
            assert!(one == other, "{processes} {flags:?}: {file}");
        }
        ["t", "p"].iter().for_each(|name| fs::remove_dir_all(at.join(name)).unwrap());
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_rank_that_is_killed_ends_the_run_and_nobody_is_left() {
    if !is_there() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    done(at, &["zoo", "mlp", "-o", "m.onnx", "-q"]);
    let flags = ["train", "m.onnx", "--synthetic-data", "--batch", "64", "--steps", "20000", "--stages", "1,1,1", "-q"];
    let child = mpirun(at, 3, &[&flags[..], &["--metrics", "m.jsonl"]].concat()).spawn().unwrap();
    let parent = child.id();
    let began = Instant::now();
    while fs::metadata(at.join("m.jsonl")).map_or(0, |file| file.len()) == 0 {
        assert!(began.elapsed() < PATIENCE, "it does not train");
        thread::sleep(Duration::from_millis(20));
    }
    // The processes of this test are those in its folder.
    let ranks = || -> Vec<u32> {
        let entries = fs::read_dir("/proc").unwrap().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let is_ours =
            |pid: &u32| fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|cwd| cwd == at.canonicalize().unwrap());
        pids.filter(|pid| *pid != parent && is_ours(pid)).collect()
    };
    let all = ranks();
    assert_eq!(all.len(), 3);
    assert!(Command::new("kill").args(["-KILL", &all[1].to_string()]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert!(!output.status.success(), "{}", said(&output));
    let began = Instant::now();
    while !ranks().is_empty() {
        assert!(began.elapsed() < Duration::from_secs(10), "left behind: {:?}", ranks());
        thread::sleep(Duration::from_millis(50));
    }
}
