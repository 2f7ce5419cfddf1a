//! Training over several processes: bitwise equal to threads, and every failure is reported.

#[cfg(target_os = "linux")]
use assert_cmd::cargo::cargo_bin;
use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Timeout for a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub fn command(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(cargo_bin("pipec"));
    command.current_dir(folder).args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // The tests may themselves run under a launcher.
    for name in ["RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_ID", "PIPEC_RUN_TOKEN"] {
        command.env_remove(name);
    }
    command
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn exit_of(output: &Output) -> (Option<i32>, String) {
    (output.status.code(), text(&output.stderr))
}

pub fn run_ok(folder: &Path, arguments: &[&str]) -> String {
    let output = command(folder, arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

fn make_models(folder: &Path) {
    run_ok(folder, &["zoo", "mlp", "--inputs", "6", "--classes", "3", "--hidden", "8", "-o", "m.onnx", "-q"]);
    run_ok(folder, &["zoo", "residual-cnn", "--hidden", "4", "--layers", "2", "-o", "c.onnx", "-q"]);
    let gpt = ["--hidden", "8", "--layers", "2", "--vocabulary", "16", "--context", "4", "--heads", "2"];
    run_ok(folder, &[&["zoo", "gpt", "--tied", "true", "--dropout", "0.1", "-o", "g.onnx", "-q"], &gpt[..]].concat());
}

pub fn write_plan(folder: &Path, model: &str, extra: &[&str]) {
    let rows: &[&str] = if extra.contains(&"--micro-batch") { &[] } else { &["--micro-batch", "2"] };
    let flags = ["--cost", "pipec", "-o", "plan.json", "-q"];
    run_ok(folder, &[&["partition", model][..], &flags, rows, extra].concat());
}

/// Trains in threads and in processes, and compares all output files.
pub fn compare(folder: &Path, label: &str, arguments: &[&str]) {
    let run = |name: &str, extra: &[&str]| {
        let files = ["w.safetensors", "g.safetensors", "m.jsonl", "t.json"].map(|file| format!("{name}.{file}"));
        let [weights, gradients, metrics, trace] = &files;
        let write = ["--save", weights, "--save-gradients", gradients, "--metrics", metrics, "--trace", trace, "-q"];
        let batch: &[&str] = if arguments.contains(&"--batch") { &[] } else { &["--batch", "8"] };
        let printed =
            run_ok(folder, &[&["train"][..], arguments, &["--synthetic-data"], batch, &write, extra].concat());
        let lines = fs::read_to_string(folder.join(metrics)).unwrap();
        let value = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap();
        let losses: Vec<u64> =
            lines.lines().filter_map(|line| value(line)["loss"].as_f64()).map(f64::to_bits).collect();
        let total = value(lines.lines().last().unwrap())["total"].clone();
        assert!(
            total["stages"].as_array().unwrap().iter().all(|stage| stage["peak_memory_bytes"].as_u64().unwrap() > 0)
        );
        let tracks = fs::read_to_string(folder.join(trace)).unwrap().matches("thread_name").count();
        let held_out = total["held_out"].to_string();
        let bytes = [weights, gradients].map(|file| fs::read(folder.join(file)).unwrap());
        assert!(printed.starts_with("trained "), "{printed}");
        (losses, bytes, total["workers"].as_u64(), tracks, held_out)
    };
    let (threads, processes) = (run("threads", &[]), run("processes", &["--processes"]));
    assert!(!threads.0.is_empty());
    assert_eq!(threads.0, processes.0, "{label}: losses");
    assert!(threads.1 == processes.1, "{label}: weights or gradients");
    assert_eq!((threads.2, threads.3, threads.4), (processes.2, processes.3, processes.4), "{label}");
}

#[test]
fn processes_train_as_threads_do_without_a_flush() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    make_models(root);
    let plain = ["m.onnx", "--steps", "7"];
    compare(root, "1f1b-rr, 2-1", &[&plain[..], &["--stages", "2,1"]].concat());
    compare(root, "1f1b-rr, 1-2", &[&plain[..], &["--stages", "1,2", "--eval-split", "0.2"]].concat());
    compare(root, "vertical sync", &[&plain[..], &["--stages", "1,1", "--schedule", "1f1b-rr-vsync"]].concat());
    compare(root, "2bw", &[&plain[..], &["--stages", "1,1", "--schedule", "2bw", "--microbatches", "4"]].concat());
    compare(root, "batch norm", &["c.onnx", "--steps", "5", "--stages", "2,1"]);
    let shared = ["g.onnx", "--steps", "5", "--stages", "2,2", "--optimizer", "adam", "--clip-norm", "0.1"];
    compare(root, "a shared embedding", &shared);
}

#[test]
fn processes_train_as_threads_do_under_a_flush() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    make_models(root);
    let plain = ["m.onnx", "--steps", "4", "--microbatches", "4"];
    compare(root, "1f1b, 2-1", &[&plain[..], &["--stages", "2,1", "--schedule", "1f1b"]].concat());
    compare(root, "gpipe", &[&plain[..], &["--stages", "1,1", "--schedule", "gpipe", "--clip-norm", "0.1"]].concat());
    compare(root, "zb-h1", &[&plain[..], &["--stages", "1,1", "--schedule", "zb-h1"]].concat());
    let deferred = ["c.onnx", "--steps", "4", "--stages", "2,1", "--schedule", "1f1b", "--microbatches", "4", "--bn"];
    compare(root, "batch norm", &[&deferred[..], &["deferred"]].concat());
    let shared = ["g.onnx", "--steps", "4", "--stages", "1,1", "--schedule", "1f1b", "--microbatches", "4"];
    compare(root, "a shared embedding in bf16", &[&shared[..], &["--clip-norm", "0.1", "--dtype", "bf16"]].concat());
    write_plan(root, "g.onnx", &["--gpus", "2", "--schedule", "interleaved", "--chunks", "2", "--microbatches", "4"]);
    compare(root, "interleaved", &["g.onnx", "--steps", "4", "--plan", "plan.json"]);
}

#[test]
fn four_processes_train_with_shards_as_threads_do() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    make_models(root);
    let (flush, rr) = (["--schedule", "1f1b", "--microbatches", "4"], ["--schedule", "1f1b-rr"]);
    let cases = [
        ("m.onnx", "4", &flush[..]),
        ("c.onnx", "4", &rr),
        ("g.onnx", "2,2", &flush),
        ("m.onnx", "3,1", &["--schedule", "2bw", "--microbatches", "4"]),
    ];
    for (zero, count) in [("2", 4), ("3", 4), ("1:2", 2), ("2:2", 2), ("3:2", 2)] {
        for (model, replicas, schedule) in cases.into_iter().take(count) {
            let extra = ["--gpus", "4", "--stages", replicas, "--zero", zero, "--optimizer", "adam"];
            write_plan(root, model, &[&extra[..], schedule].concat());
            let train = [model, "--steps", "4", "--plan", "plan.json", "--optimizer", "adam"];
            compare(root, &format!("{model}, {replicas}, {schedule:?}, ZeRO {zero}"), &train);
        }
    }
}

pub fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files_by_name = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap().flatten() {
        match entry.file_type().unwrap().is_dir() {
            true => files_by_name.extend(
                files(&entry.path()).into_iter().map(|(name, bytes)| (Path::new(&entry.file_name()).join(name), bytes)),
            ),
            false => _ = files_by_name.insert(entry.file_name().into(), fs::read(entry.path()).unwrap()),
        }
    }
    files_by_name
}

#[test]
fn checkpoints_of_processes_are_those_of_threads_and_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    make_models(root);
    let cases: [&[&str]; 5] = [
        &["c.onnx", "--stages", "2,1", "--optimizer", "adam", "--steps", "8"],
        &["g.onnx", "--stages", "1,1", "--optimizer", "adam", "--steps", "6"],
        &["m.onnx", "--stages", "1,1", "--staleness", "predict", "--momentum", "0.9", "--steps", "6"],
        &["m.onnx", "--stages", "1,1", "--schedule", "1f1b", "--microbatches", "4", "--dtype", "f16", "--steps", "6"],
        &["m.onnx", "--stages", "1,1", "--schedule", "2bw", "--microbatches", "4", "--momentum", "0.9", "--steps", "6"],
    ];
    for (case, flags) in cases.iter().enumerate() {
        let run = |name: &str, extra: &[&str]| {
            let keep = ["--checkpoint-dir", name, "--checkpoint-every", "2", "--synthetic-data", "--batch", "8", "-q"];
            run_ok(root, &[&["train"][..], flags, &keep, extra].concat());
            files(&root.join(name))
        };
        let (threads, processes) = (format!("t{case}"), format!("p{case}"));
        let expected = run(&threads, &[]);
        assert!(expected.len() > 7, "{:?}", expected.keys());
        let names = |files: &BTreeMap<PathBuf, Vec<u8>>| files.keys().cloned().collect::<Vec<_>>();
        let actual = run(&processes, &["--processes"]);
        assert_eq!(names(&actual), names(&expected), "{flags:?}");
        assert!(actual == expected, "{flags:?}");
        // Resumed from the first checkpoint, the later ones are reproduced.
        for step in expected.keys().filter_map(|name| name.parent()).filter(|name| name.starts_with("step-")) {
            if !step.ends_with("step-00000002") && root.join(&processes).join(step).exists() {
                fs::remove_dir_all(root.join(&processes).join(step)).unwrap();
            }
        }
        fs::remove_file(root.join(&processes).join("weights.safetensors")).unwrap();
        assert!(run(&processes, &["--processes", "--resume", "auto"]) == expected, "{flags:?}");
    }
}

/// A long run, killed when dropped.
pub struct Long {
    child: Option<Child>,
    metrics: PathBuf,
}

impl Long {
    pub fn start(folder: &Path, name: &str, extra: &[&str]) -> Long {
        let metrics = folder.join(name);
        let flags =
            ["train", "m.onnx", "--synthetic-data", "--batch", "256", "--steps", "20000", "-q", "--metrics", name];
        let child = command(folder, &[&flags[..], extra].concat()).spawn().unwrap();
        Long { child: Some(child), metrics }
    }

    pub fn pid(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }

    pub fn wait_until_it_trains(&mut self) {
        let until = Instant::now() + PATIENCE;
        while fs::metadata(&self.metrics).map_or(0, |file| file.len()) == 0 {
            let early = self.child.as_mut().unwrap().try_wait().unwrap();
            assert!(early.is_none() && Instant::now() < until, "it does not train: {early:?}");
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Exit code, standard error, seconds until then.
    pub fn wait_for_exit(mut self) -> (Option<i32>, String, f64) {
        let start = Instant::now();
        let output = self.child.take().unwrap().wait_with_output().unwrap();
        let (code, printed) = exit_of(&output);
        (code, printed, start.elapsed().as_secs_f64())
    }
}

impl Drop for Long {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}

#[cfg(target_os = "linux")]
mod supervised {
    use super::*;
    use crate::support::family::{all_gone, children, send};

    fn start_long(folder: &Path, extra: &[&str]) -> (Long, Vec<u32>) {
        run_ok(folder, &["zoo", "mlp", "-o", "m.onnx", "-q"]);
        let mut long = Long::start(folder, "m.jsonl", &[&["--stages", "1,1", "--processes"][..], extra].concat());
        long.wait_until_it_trains();
        let pids = children(long.pid());
        assert_eq!(pids.len(), 2);
        (long, pids)
    }

    #[test]
    fn a_worker_that_is_killed_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let (long, pids) = start_long(folder.path(), &[]);
        send("KILL", pids[1]);
        let (code, printed, seconds) = long.wait_for_exit();
        assert_eq!(code, Some(1), "{printed}");
        let named = format!(
            "worker 1.0 (stage 1), process {}, was killed by signal 9 (SIGKILL); the worker was last at the ",
            pids[1]
        );
        assert!(printed.contains(&named), "{printed}");
        assert_eq!(printed.lines().filter(|line| line.starts_with("error:")).count(), 1, "{printed}");
        assert!(seconds < 6.0, "{seconds} s");
        all_gone(&pids);
    }

    #[test]
    fn a_replica_that_is_killed_leaves_nobody_waiting_for_its_shards() {
        for zero in ["2", "3"] {
            let folder = tempfile::tempdir().unwrap();
            let root = folder.path();
            run_ok(root, &["zoo", "mlp", "-o", "m.onnx", "-q"]);
            let plan = ["--gpus", "4", "--stages", "4", "--schedule", "1f1b", "--microbatches", "4", "--zero", zero];
            write_plan(root, "m.onnx", &[&plan[..], &["--micro-batch", "64"]].concat());
            let mut long = Long::start(root, "m.jsonl", &["--plan", "plan.json", "--processes"]);
            long.wait_until_it_trains();
            let pids = children(long.pid());
            assert_eq!(pids.len(), 4);
            send("KILL", pids[2]);
            let (code, printed, seconds) = long.wait_for_exit();
            assert_eq!(code, Some(1), "{printed}");
            assert!(printed.contains(&format!("process {}, was killed by signal 9 (SIGKILL)", pids[2])), "{printed}");
            assert!(seconds < 30.0, "{seconds} s");
            all_gone(&pids);
        }
    }

    #[test]
    fn a_worker_that_is_stopped_is_named_within_the_deadline() {
        let folder = tempfile::tempdir().unwrap();
        let (long, pids) = start_long(folder.path(), &["--deadline", "2"]);
        send("STOP", pids[0]);
        let (code, printed, seconds) = long.wait_for_exit();
        assert_eq!(code, Some(1), "{printed}");
        assert!(printed.contains("worker 0.0 (stage 0), process "), "{printed}");
        assert!(printed.contains("has sent nothing for 2.") && printed.contains("is stopped (SIGSTOP)"), "{printed}");
        // The last heartbeat may have arrived a second earlier.
        assert!((0.9..6.0).contains(&seconds), "{seconds} s");
        all_gone(&pids);
    }

    #[test]
    fn signals_are_passed_on_and_nobody_outlives_the_parent() {
        let folder = tempfile::tempdir().unwrap();
        for (signal, expected) in [("INT", Some(130)), ("TERM", Some(143)), ("KILL", None)] {
            let (long, pids) = start_long(folder.path(), &[]);
            send(signal, long.pid());
            let (code, printed, seconds) = long.wait_for_exit();
            assert_eq!(code, expected, "{printed}");
            assert_eq!(printed.contains("interrupted by signal "), expected.is_some(), "{printed}");
            assert!(seconds < 6.0, "{seconds} s");
            all_gone(&pids);
            fs::remove_file(folder.path().join("m.jsonl")).unwrap();
        }
    }

    #[test]
    fn a_run_goes_on_from_its_last_checkpoint_when_a_worker_dies() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        run_ok(root, &["zoo", "mlp", "-o", "m.onnx", "-q"]);
        let flags = ["train", "m.onnx", "--synthetic-data", "--batch", "64", "--steps", "2500", "--stages", "1,2"];
        let flags = [&flags[..], &["--momentum", "0.9"]].concat();
        run_ok(root, &[&flags[..], &["--save", "t.safetensors", "--metrics", "t.jsonl", "-q"]].concat());
        let keep = ["--checkpoint-dir", "ck", "--checkpoint-every", "100", "--keep", "2", "--metrics", "p.jsonl"];
        let extra = ["--processes", "--max-restarts", "1", "--save", "p.safetensors"];
        let child = command(root, &[&flags[..], &keep, &extra].concat()).spawn().unwrap();
        let until = Instant::now() + PATIENCE;
        let is_there = |name: &str| root.join("ck").join(name).exists();
        while !(is_there("step-00000200") || is_there("step-00000300")) {
            assert!(Instant::now() < until, "no checkpoint comes");
            thread::sleep(Duration::from_millis(5));
        }
        send("KILL", children(child.id())[1]);
        let (code, printed) = wait_for_exit(child);
        assert_eq!(code, Some(0), "{printed}");
        assert!(printed.contains("restart 1 of 1") && printed.contains("resuming after step "), "{printed}");
        let read = |name: &str| fs::read(root.join(name)).unwrap();
        assert!(read("t.safetensors") == read("p.safetensors"));
        let losses = |name: &str| -> Vec<Option<u64>> {
            let text = fs::read_to_string(root.join(name)).unwrap();
            let lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
            lines.map(|line| line["loss"].as_f64().map(f64::to_bits)).collect()
        };
        assert!(losses("t.jsonl") == losses("p.jsonl"));
    }

    #[test]
    fn a_run_begins_again_when_a_worker_dies() {
        let folder = tempfile::tempdir().unwrap();
        let (mut long, pids) = start_long(folder.path(), &["--max-restarts", "1"]);
        send("KILL", pids[0]);
        all_gone(&pids);
        let until = Instant::now() + PATIENCE;
        while children(long.pid()).len() < 2 {
            assert!(Instant::now() < until, "nobody was started again");
            thread::sleep(Duration::from_millis(20));
        }
        long.wait_until_it_trains();
        let restarted = children(long.pid());
        send("KILL", restarted[1]);
        let (code, printed, _) = long.wait_for_exit();
        assert_eq!(code, Some(1), "one restart was allowed: {printed}");
        all_gone(&restarted);
    }
}

/// A free port below those that systems hand out for port 0, which other tests use at the same time.
pub fn port() -> u16 {
    static TAKEN: AtomicU16 = AtomicU16::new(0);
    let first = (std::process::id() % 10_000) as u16;
    let next = || 10_000 + (first + TAKEN.fetch_add(1, Ordering::Relaxed)) % 20_000;
    std::iter::repeat_with(next).find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok()).unwrap()
}

/// One of two manually started processes.
pub fn start_rank(folder: &Path, rank: &str, address: &str, extra: &[&str]) -> Child {
    let flags = ["train", "m.onnx", "--synthetic-data", "--batch", "8", "--stages", "1,1", "--rank", rank];
    let flags = [&flags[..], &["--address", address], extra].concat();
    command(folder, &flags).spawn().unwrap()
}

pub fn wait_for_exit(child: Child) -> (Option<i32>, String) {
    exit_of(&child.wait_with_output().unwrap())
}

pub fn make_small_model(folder: &Path) {
    run_ok(folder, &["zoo", "mlp", "--inputs", "6", "--classes", "3", "--hidden", "8", "-o", "m.onnx", "-q"]);
}

#[test]
fn processes_that_are_started_by_hand_or_by_a_launcher_meet() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    make_small_model(root);
    let flags = ["--synthetic-data", "--batch", "8", "--stages", "1,1", "--steps", "5", "-q"];
    run_ok(root, &[&["train", "m.onnx", "--save", "threads.safetensors"][..], &flags].concat());
    let expected = fs::read(root.join("threads.safetensors")).unwrap();
    let compare = |name: &str, children: [Child; 2]| {
        let [first, second] = children.map(|child| child.wait_with_output().unwrap());
        assert_eq!((exit_of(&first).0, exit_of(&second)), (Some(0), (Some(0), String::new())), "{}", exit_of(&first).1);
        assert!(text(&first.stdout).starts_with("trained 5 steps") && second.stdout.is_empty());
        assert!(fs::read(root.join(format!("{name}.safetensors"))).unwrap() == expected, "{name}");
        fs::remove_file(root.join(format!("{name}.safetensors"))).unwrap();
    };
    // By rank, while a peer with another protocol and a silent one connect to the port.
    let address = format!("127.0.0.1:{}", port());
    let extra = ["--steps", "5", "--save", "hand.safetensors"];
    let first = start_rank(root, "0", &address, &extra);
    let until = Instant::now() + PATIENCE;
    let mut silent = None;
    while silent.is_none() && Instant::now() < until {
        silent = TcpStream::connect(&address).ok();
        thread::sleep(Duration::from_millis(10));
    }
    let mut stranger = TcpStream::connect(&address).unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    // The connection is closed without an answer.
    assert_eq!(stranger.read_to_end(&mut answer).unwrap_or(0), 0);
    let second = start_rank(root, "1", &address, &extra).wait_with_output().unwrap();
    assert_eq!(exit_of(&second), (Some(0), String::new()));
    let (code, printed) = wait_for_exit(first);
    assert_eq!(code, Some(0), "{printed}");
    assert!(printed.contains("the bytes are not a pipec frame"), "{printed}");
    assert!(fs::read(root.join("hand.safetensors")).unwrap() == expected);
    // By host list; both hosts are this machine.
    let hosts = format!(
        "schema = \"pipec.cluster/1\"\n[device]\nkind = \"cpu\"\n[[level]]\nname = \"lan\"\ncount = 2\nbandwidth = \
         \"1GB/s\"\nlatency = \"10us\"\n[[host]]\naddress = \"127.0.0.1:{}\"\ndevices = 1\n[[host]]\naddress = \
         \"127.0.0.1:{}\"\ndevices = 1\n",
        port(),
        port()
    );
    fs::write(root.join("hosts.toml"), hosts).unwrap();
    let host = |number: &str| {
        let arguments = ["train", "m.onnx", "--hosts", "hosts.toml", "--host", number, "--save", "hosts.safetensors"];
        command(root, &[&arguments[..], &flags].concat()).spawn().unwrap()
    };
    compare("hosts", [host("0"), host("1")]);
    // By the environment variables of torchrun.
    let port = port().to_string();
    let start_launched = |number: &str| {
        let mut command = command(root, &[&["train", "m.onnx", "--save", "launched.safetensors"][..], &flags].concat());
        command.env("RANK", number).env("WORLD_SIZE", "2").env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
        command.spawn().unwrap()
    };
    compare("launched", [start_launched("0"), start_launched("1")]);
}

#[test]
fn those_who_say_nothing_keep_nobody_out() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    make_small_model(root);
    let address = format!("127.0.0.1:{}", port());
    let mut first = start_rank(root, "0", &address, &["--steps", "5", "-q"]);
    let until = Instant::now() + PATIENCE;
    let mut idle = Vec::new();
    while idle.len() < 100 {
        let early = first.try_wait().unwrap();
        assert!(early.is_none() && Instant::now() < until, "{early:?}");
        match TcpStream::connect(&address) {
            Ok(stream) => idle.push(stream),
            Err(_) => thread::sleep(Duration::from_millis(10)),
        }
    }
    let start = Instant::now();
    let second = wait_for_exit(start_rank(root, "1", &address, &["--steps", "5", "-q"]));
    assert_eq!(second, (Some(0), String::new()));
    let (code, printed) = wait_for_exit(first);
    assert_eq!(code, Some(0), "{printed}");
    assert!(start.elapsed() < PATIENCE);
}

#[test]
fn processes_that_cannot_meet_say_why() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    make_small_model(root);
    // The other process does not start.
    let address = format!("127.0.0.1:{}", port());
    let (code, printed) = wait_for_exit(start_rank(root, "0", &address, &["--steps", "5", "--connect-timeout", "5"]));
    assert_eq!(code, Some(1));
    assert!(
        printed.contains(&format!("waits for rank 1 (worker 1.0 of stage 1) to connect to {address}, up to ")),
        "{printed}"
    );
    assert!(
        printed.contains(&format!("rank 1 (worker 1.0 of stage 1) did not connect to {address} within 5 s")),
        "{printed}"
    );
    let (code, printed) = wait_for_exit(start_rank(root, "1", &address, &["--steps", "5", "--connect-timeout", "5"]));
    assert_eq!(code, Some(1));
    assert!(printed.contains(&format!("waits for process 0 at {address}, up to ")), "{printed}");
    assert!(printed.contains(&format!("no answer from {address} within 5 s")), "{printed}");
    // Another program listens on the port and does not answer.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (code, printed) = wait_for_exit(start_rank(root, "0", &address, &["--steps", "5"]));
    assert_eq!(code, Some(1));
    assert!(printed.contains(&format!("cannot listen at {address}: the port is in use")), "{printed}");
    thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            stream.write_all(b"220 mail.example ESMTP\r\n").unwrap();
            let _ = stream.read(&mut [0; 64]);
        }
    });
    let (code, printed) = wait_for_exit(start_rank(root, "1", &address, &["--steps", "5", "--connect-timeout", "2"]));
    assert_eq!(code, Some(1));
    let why = format!("no process of this run answered at {address} within 2 s: the bytes are not a pipec frame");
    assert!(printed.contains(&why), "{printed}");
    // The processes have different inputs.
    let check_refusal = |extra: [&[&str]; 2], expected: &str| {
        let address = format!("127.0.0.1:{}", port());
        let common = ["train", "m.onnx", "--synthetic-data", "--batch", "8", "--address", &address];
        let both = [["--rank", "0"], ["--rank", "1"]].into_iter().zip(extra);
        let start = |(rank, extra): ([&str; 2], &[&str])| {
            command(root, &[&common[..], &["--connect-timeout", "4"], &rank, extra].concat()).spawn().unwrap()
        };
        for (code, printed) in both.map(start).collect::<Vec<_>>().into_iter().map(wait_for_exit) {
            assert_eq!(code, Some(1), "{printed}");
            assert!(printed.contains(expected), "{printed}");
        }
    };
    let stages = ["--stages", "1,1", "--steps", "5"];
    let with_flag = |flag: &'static str, value: &'static str| [&stages[..], &[flag, value]].concat();
    check_refusal(
        [&stages, &with_flag("--lr", "0.5")],
        "optimizer: rank 1 has `sgd, lr 0.5, momentum 0, weight decay 0`, rank 0 `sgd, ",
    );
    check_refusal([&stages, &["--stages", "1,1", "--steps", "6"]], "steps: rank 1 has `6`, rank 0 `5`\n");
    check_refusal([&stages, &with_flag("--precision", "bf16")], "precision: rank 1 has `bf16`, rank 0 `the model's`\n");
    check_refusal([&stages, &with_flag("--freeze", "fc1*")], "frozen parameters: rank 1 has `fc1*`, rank 0 none\n");
    check_refusal([&stages, &with_flag("--seed", "7")], "seed: rank 1 has `7`, rank 0 `0`");
    // Only the cuts differ: the messages between the stages have the same shape.
    for cut in ["relu1", "relu2"] {
        let plan = ["partition", "m.onnx", "--gpus", "2", "--stages", "1,1", "--micro-batch", "8", "--cut-after"];
        run_ok(root, &[&plan[..], &[&format!("/{cut}/Relu"), "-o", &format!("{cut}.json"), "-q"]].concat());
    }
    check_refusal(
        [&["--steps", "5", "--plan", "relu1.json"], &["--steps", "5", "--plan", "relu2.json"]],
        "the plans or schedules differ",
    );
    // Two processes claim the same rank.
    let address = format!("127.0.0.1:{}", port());
    let extra = ["--steps", "5", "--stages", "1,1,1", "--connect-timeout", "6"];
    let flags = ["train", "m.onnx", "--synthetic-data", "--batch", "8", "--address", &address];
    let start_one = |number: &str| command(root, &[&flags[..], &extra, &["--rank", number]].concat()).spawn().unwrap();
    let printed = [start_one("0"), start_one("1"), start_one("1")].map(wait_for_exit);
    assert!(printed.iter().all(|(code, _)| *code == Some(1)), "{printed:?}");
    assert!(printed[0].1.contains("rank 2 (worker 2.0 of stage 2) did not connect"), "{printed:?}");
    assert!(printed[0].1.contains("rejected last: process "), "{printed:?}");
    assert!(printed[1..].iter().any(|(_, printed)| printed.contains("is already connected")), "{printed:?}");
    assert!(
        printed[1..].iter().any(|(_, printed)| printed.contains("did not start the run: rank 2 (worker 2.0")),
        "{printed:?}"
    );
}

/// A proxy to process 0 that corrupts what the process sends after `after` bytes.
fn proxy(first: String, after: usize, spoil: fn(&mut [u8]) -> bool) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    thread::spawn(move || {
        let (from, _) = listener.accept().unwrap();
        let until = Instant::now() + PATIENCE;
        let to = loop {
            match TcpStream::connect(&first) {
                Ok(to) => break to,
                Err(_) => assert!(Instant::now() < until),
            }
            thread::sleep(Duration::from_millis(20));
        };
        let back = (to.try_clone().unwrap(), from.try_clone().unwrap());
        thread::spawn(move || std::io::copy(&mut &back.0, &mut &back.1));
        let (mut passed, mut bytes, mut is_spoilt) = (0, [0; 4096], false);
        while let Ok(count @ 1..) = (&from).read(&mut bytes) {
            passed += count;
            if passed > after && !is_spoilt {
                is_spoilt = true;
                if !spoil(&mut bytes[..count]) {
                    let _ = (to.shutdown(Shutdown::Both), from.shutdown(Shutdown::Both));
                    return;
                }
            }
            if (&to).write_all(&bytes[..count]).is_err() {
                return;
            }
        }
        let _ = to.shutdown(Shutdown::Write);
    });
    address
}

#[test]
fn what_is_flipped_or_cut_on_its_way_ends_the_run_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    make_small_model(root);
    let flip: fn(&mut [u8]) -> bool = |bytes| {
        bytes[bytes.len() / 2] ^= 16;
        true
    };
    let cut: fn(&mut [u8]) -> bool = |_| false;
    let cases = [
        (flip, "a message from rank 1 (worker 1.0 of stage 1), process"),
        (cut, "the connection to rank 1 (worker 1.0 of stage 1), process"),
    ];
    for (spoil, expected) in cases {
        let address = format!("127.0.0.1:{}", port());
        let extra = ["--steps", "5000", "-q"];
        let first = start_rank(root, "0", &address, &extra);
        let second = start_rank(root, "1", &proxy(address, 50_000, spoil), &extra);
        let (code, printed) = wait_for_exit(first);
        assert_eq!(code, Some(1), "{printed}");
        assert!(printed.contains(expected), "{printed}");
        let (code, printed) = wait_for_exit(second);
        assert_eq!(code, Some(1), "{printed}");
        assert!(printed.contains("training stopped"), "{printed}");
    }
}
