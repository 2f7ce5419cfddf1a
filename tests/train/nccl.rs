//! Processes with one simulated GPU each: tensors go over a simulated NCCL, and weights are those of threads.

use crate::support::simulated_gpus::{driver, on_simulated_gpus};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// Trains a small model on as many GPUs as its plan has workers. Returns the weights.
fn train_weights(folder: &Path, libraries: &Path, gpus: u32, extra: &[&str], variables: &[(&str, &str)]) -> Vec<u8> {
    let output = train(folder, libraries, gpus, extra, variables);
    assert!(output.status.success(), "{extra:?}, {variables:?}: {}", String::from_utf8_lossy(&output.stderr));
    fs::read(folder.join("w.safetensors")).unwrap()
}

fn train(folder: &Path, libraries: &Path, gpus: u32, extra: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = on_simulated_gpus(env!("CARGO_BIN_EXE_pipec"), libraries);
    command.current_dir(folder).args([
        "train",
        "model.onnx",
        "--plan",
        "plan.json",
        "--synthetic-data",
        "--steps",
        "3",
    ]);
    command.args(["--optimizer", "adam", "--device", "cuda", "--save", "w.safetensors"]).args(extra);
    command.env("PIPEC_SIM_DEVICES", gpus.to_string()).env("PIPEC_SIM_CUBLASLT", "0");
    command.envs(variables.iter().copied()).output().unwrap()
}

/// Writes a model and a plan for it; returns the number of GPUs.
fn write_plan(folder: &Path, flags: &str) -> u32 {
    let run = |arguments: &str| {
        let arguments: Vec<&str> = arguments.split_whitespace().collect();
        let output = Command::new(env!("CARGO_BIN_EXE_pipec")).current_dir(folder).args(&arguments).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    };
    run("zoo gpt -o model.onnx");
    let stages = flags.split_whitespace().next().unwrap();
    let workers: u32 = stages.split(',').map(|replicas| replicas.parse::<u32>().unwrap()).sum();
    let degree = flags.split_once("--tensor ").map_or(1, |(_, tail)| tail.split(' ').next().unwrap().parse().unwrap());
    let gpus = workers * degree;
    run(&format!("partition model.onnx -o plan.json --gpus {gpus} --stages {flags}"));
    gpus
}

/// A folder with the libraries but NCCL.
fn without_nccl(driver: &Path, folder: &Path) {
    for entry in fs::read_dir(driver).unwrap().map(Result::unwrap).filter(|entry| entry.file_name() != "libnccl.so") {
        fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
    }
}

/// Bytes that all processes copied to the host, and their transfers over NCCL. Removes the files of counts.
fn read_counts(folder: &Path) -> (u64, u64) {
    let (mut bytes, mut transfers) = (0, 0);
    for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if path.file_name().unwrap().to_string_lossy().starts_with("stats-") {
            let stats: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
            bytes += stats["device_to_host_bytes"].as_u64().unwrap();
            transfers += stats["library_products"].as_u64().unwrap();
            fs::remove_file(path).unwrap();
        }
    }
    (bytes, transfers)
}

#[test]
fn processes_train_like_threads() {
    let Some(driver) = driver() else { return };
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    for flags in [
        "1,1 --schedule 1f1b --micro-batch 2 --batch 8 --precision fp32",
        "2 --schedule 1f1b --micro-batch 2 --batch 8 --precision bf16",
        "2 --schedule 1f1b --zero 1 --micro-batch 2 --batch 8 --precision fp32",
        "1,1,1,1 --schedule 1f1b --micro-batch 2 --batch 8 --precision bf16",
        "2,2 --schedule 1f1b-rr --micro-batch 2 --precision fp32",
        "4 --schedule 1f1b --micro-batch 2 --batch 8 --precision fp32",
    ] {
        let gpus = write_plan(root, flags);
        let threads = train_weights(root, driver, gpus, &[], &[]);
        let stats = [("PIPEC_SIM_STATS", "stats-%p")];
        // NCCL is there, but the run does not ask for it.
        let hosts = train_weights(root, driver, gpus, &["--processes"], &stats);
        let (through_host, transfers) = read_counts(root);
        assert!(hosts == threads && transfers == 0, "{flags}: without `--nccl`, {transfers} transfers");
        for seed in ["0", "7"] {
            let over_nccl =
                train_weights(root, driver, gpus, &["--processes", "--nccl"], &[("PIPEC_SIM_SEED", seed), stats[0]]);
            let (bytes, transfers) = read_counts(root);
            assert!(over_nccl == threads, "{flags}, seed {seed}: other weights");
            assert!(transfers > 2 && bytes < through_host, "{flags}: {transfers} transfers, {bytes} of {through_host}");
        }
    }
}

/// True if the groups of the plan have collectives.
pub fn has_collectives(folder: &Path) -> bool {
    let plan: Value = serde_json::from_str(&fs::read_to_string(folder.join("plan.json")).unwrap()).unwrap();
    let mut stages = plan["stages"].as_array().unwrap().iter();
    stages.any(|stage| stage["tensor_parallel"]["collective_bwd_us"].as_f64().unwrap_or(0.0) > 0.0)
}

/// The launches of a GPU take longer than the kernels of a small model, so only costs of a CPU shard it.
#[test]
fn groups_in_processes_train_like_threads() {
    let Some(driver) = driver() else { return };
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let group = "1 --tensor 2 --profile analytic:cpu --schedule 1f1b --micro-batch 2 --batch 4 --precision fp32";
    let gpus = write_plan(root, group);
    assert!(gpus == 2 && has_collectives(root), "nothing is sharded");
    let threads = train_weights(root, driver, gpus, &[], &[]);
    let stats = [("PIPEC_SIM_STATS", "stats-%p"), ("PIPEC_SIM_SEED", "7")];
    let over_nccl = train_weights(root, driver, gpus, &["--processes", "--nccl"], &stats);
    let (_, transfers) = read_counts(root);
    assert!(over_nccl == threads && transfers > 2, "{transfers} transfers");
}

#[test]
fn nccl_is_refused_where_it_cannot_work() {
    let Some(driver) = driver() else { return };
    let (folder, incomplete_libraries) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (root, incomplete_libraries) = (folder.path(), incomplete_libraries.path());
    without_nccl(driver, incomplete_libraries);
    let gpus = write_plan(root, "1,1 --schedule 1f1b --micro-batch 2 --batch 8 --precision fp32");
    let processes = ["--processes", "--nccl"];
    for (libraries, gpus, extra, expected) in [
        (driver, gpus, &["--nccl"][..], "`--nccl` requires several processes"),
        (incomplete_libraries, gpus, &processes, "`--nccl` requires NCCL 2.7 or later, which is not installed"),
        (driver, 1, &processes, "`--nccl` requires a GPU for each process, but "),
    ] {
        let output = train(root, libraries, gpus, extra, &[]);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && stderr.contains(expected), "{extra:?}: {stderr}");
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_pipec"));
    command.current_dir(root).args(["train", "model.onnx", "--plan", "plan.json", "--synthetic-data", "--steps", "3"]);
    let output = command.args(["--device", "cpu"]).args(processes).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && stderr.contains("`--nccl` requires GPUs"), "{stderr}");
}

#[test]
fn a_lost_process_ends_the_run() {
    let Some(driver) = driver() else { return };
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    for flags in ["1,1 --schedule 1f1b --micro-batch 2 --batch 8", "2 --schedule 1f1b --micro-batch 2 --batch 8"] {
        let gpus = write_plan(root, flags);
        for fault in ["launch:40:1", "lost:700:1", "launch:90:0"] {
            let start = Instant::now();
            let output = train(root, driver, gpus, &["--processes", "--nccl"], &[("PIPEC_SIM_FAULT", fault)]);
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert!(!output.status.success() && stderr.contains("error: "), "{fault}: {stderr}");
            assert!(!stderr.contains("panicked") && !stderr.contains("bug in pipec"), "{fault}: {stderr}");
            assert!(start.elapsed() < Duration::from_secs(60), "{fault}: {:?}", start.elapsed());
        }
    }
}

const LATE: &[&str] = &["has not opened its NCCL link", "after 2 s"];
const KILLED: &str = "was killed by signal 9";

/// Processes begin together, when all links are open. A process that does not come is reported within the limit, and one
/// that dies at once.
#[test]
fn a_process_that_opens_no_links_ends_the_run() {
    let Some(driver) = driver() else { return };
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let gpus = write_plan(root, "1,1,1 --schedule 1f1b --micro-batch 2 --batch 8");
    // On a busy machine, the first report may be of a process that itself waits for another.
    for (fault, connect_timeout, expected) in [
        ("meet:1:0", "2", LATE),
        ("meet:1:1", "2", LATE),
        ("meet:3:1", "2", LATE),
        ("kill:1:1", "600", &["worker 1.0", KILLED]),
        ("kill:1:2", "600", &["worker 2.0", KILLED]),
    ] {
        let start = Instant::now();
        let extra = ["--processes", "--nccl", "--connect-timeout", connect_timeout];
        let output = train(root, driver, gpus, &extra, &[("PIPEC_SIM_FAULT", fault)]);
        let stderr = String::from_utf8_lossy(&output.stderr);
        println!("{fault}, {:?}: {stderr}", start.elapsed());
        assert!(
            !output.status.success() && expected.iter().all(|expected| stderr.contains(expected)),
            "{fault}: {stderr}"
        );
        assert!(!stderr.contains("panicked") && !stderr.contains("bug in pipec"), "{fault}: {stderr}");
        assert!(start.elapsed() < Duration::from_secs(60), "{fault}: {:?}", start.elapsed());
    }
}
