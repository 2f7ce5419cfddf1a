//! Signals to the processes of a run: it ends after a common step, writes a checkpoint, and leaves no process.

#![cfg(target_os = "linux")]

use crate::support::family::{all_gone, children, is_there, send};
use assert_cmd::cargo::cargo_bin;
use std::fs;
use std::io::Read;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Timeout for a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

pub const TRAIN: [&str; 8] = ["train", "m.onnx", "--synthetic-data", "--batch", "64", "--momentum", "0.9", "-q"];
pub const KEPT: [&str; 6] = ["--checkpoint-dir", "ck", "--checkpoint-every", "20", "--keep", "1"];

pub fn spawn(folder: &Path, parts: &[&[&str]]) -> Child {
    let mut command = Command::new(cargo_bin("pipec"));
    command.current_dir(folder).args(parts.concat()).stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

pub fn wait_for_exit(child: Child) -> (Option<i32>, String) {
    let output = child.wait_with_output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

pub fn run_ok(folder: &Path, parts: &[&[&str]]) {
    let (code, message) = wait_for_exit(spawn(folder, parts));
    assert_eq!(code, Some(0), "{message}");
}

pub fn model(folder: &Path) {
    run_ok(folder, &[&["zoo", "mlp", "-o", "m.onnx", "-q"]]);
}

fn checkpoints(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder.join("ck")).into_iter().flatten();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Waits for a condition, unless the process ends first.
pub fn wait_until(child: &mut Child, event: &str, is_reached: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_reached() {
        let early = child.try_wait().unwrap();
        if early.is_some() || start.elapsed() > PATIENCE {
            let _ = child.kill();
            let mut message = String::new();
            let _ = child.stderr.take().map(|mut stderr| stderr.read_to_string(&mut message));
            panic!("{event} does not come: {early:?}: {message}");
        }
        thread::sleep(Duration::from_millis(5));
    }
}

pub fn wait_for_checkpoint(folder: &Path, child: &mut Child) {
    wait_until(child, "a checkpoint", || checkpoints(folder).iter().any(|name| name.starts_with("step-")));
}

/// The step after which a run reports to have stopped.
pub fn stopped_step(message: &str, signal: &str) -> u32 {
    let ended = format!("error: stopped by {signal} after step ");
    let step = message.split(&ended).nth(1).and_then(|rest| rest.split(' ').next());
    step.and_then(|step| step.parse().ok()).unwrap_or_else(|| panic!("it does not say how far it was: {message}"))
}

/// Resumes after that step and compares with an uninterrupted run.
pub fn check_resume(folder: &Path, plan: &[&str], step: u32) {
    assert_eq!(checkpoints(folder), [format!("step-{step:08}")], "one is kept, and nothing is written at the end");
    let steps = (step + 3).to_string();
    run_ok(folder, &[&TRAIN, plan, &["--steps", &steps, "--save", "whole.safetensors"]]);
    let rest = ["--steps", &steps, "--resume", "auto", "--processes", "--save", "rest.safetensors"];
    run_ok(folder, &[&TRAIN, plan, &KEPT, &rest]);
    let bytes = |name: &str| fs::read(folder.join(name)).unwrap();
    assert!(bytes("whole.safetensors") == bytes("rest.safetensors"), "{plan:?}, after {step}");
}

#[test]
fn all_processes_end_after_the_same_step() {
    for (plan, signalled, (signal, name, code)) in [
        (&["--stages", "1,2"][..], 0, ("TERM", "SIGTERM", 143)),
        (&["--stages", "1,1"], 1, ("INT", "SIGINT", 130)),
        (&["--stages", "1,1", "--schedule", "1f1b", "--microbatches", "4"], 2, ("TERM", "SIGTERM", 143)),
        (&["--stages", "2,1", "--clip-norm", "0.5"], 3, ("INT", "SIGINT", 130)),
        (&["--stages", "1,1", "--schedule", "gpipe", "--microbatches", "2"], 0, ("INT", "SIGINT", 130)),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        model(folder);
        let mut child = spawn(folder, &[&TRAIN, plan, &KEPT, &["--steps", "6000", "--processes"]]);
        wait_for_checkpoint(folder, &mut child);
        let pids = children(child.id());
        send(signal, if signalled == 0 { child.id() } else { pids[signalled - 1] });
        let (ended, message) = wait_for_exit(child);
        assert_eq!(ended, Some(code), "{plan:?}: {message}");
        all_gone(&pids);
        check_resume(folder, plan, stopped_step(&message, name));
    }
}

#[test]
fn processes_that_are_started_by_hand_end_together() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(folder);
    for signalled in [0, 1] {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let address = format!("127.0.0.1:{port}");
        let plan = ["--stages", "1,1"];
        let start = |rank: &str| {
            let flags = ["--steps", "6000", "--rank", rank, "--address", &address];
            spawn(folder, &[&TRAIN, &plan, &KEPT, &flags])
        };
        let mut ranks = [start("0"), start("1")];
        wait_for_checkpoint(folder, &mut ranks[0]);
        send("TERM", ranks[signalled].id());
        let [(first, message), (second, second_message)] = ranks.map(wait_for_exit);
        assert_eq!((first, second), (Some(143), Some(143)), "{message}{second_message}");
        assert_eq!(stopped_step(&message, "SIGTERM"), stopped_step(&second_message, "SIGTERM"));
        assert!(second_message.contains("process 0 of the run writes its checkpoint"), "{second_message}");
        check_resume(folder, &plan, stopped_step(&message, "SIGTERM"));
        fs::remove_dir_all(folder.join("ck")).unwrap();
    }
}

/// Process state; `T` is stopped.
fn state(pid: u32) -> char {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()).unwrap_or('X')
}

#[test]
fn who_is_paused_is_not_given_up() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(folder);
    let plan = ["--stages", "1,1"];
    let steps = ["--steps", "6000", "--processes", "--deadline", "2", "--metrics", "m.jsonl"];
    let mut child = spawn(folder, &[&TRAIN, &plan, &KEPT, &steps]);
    wait_for_checkpoint(folder, &mut child);
    let (parent, pids) = (child.id(), children(child.id()));
    // SIGSTOP cannot be handled: the other processes wait, longer than for a worker.
    send("STOP", parent);
    thread::sleep(Duration::from_secs(4));
    assert!(pids.iter().all(|pid| is_there(*pid)));
    let lines = || fs::read_to_string(folder.join("m.jsonl")).unwrap_or_default().lines().count();
    let before = lines();
    send("CONT", parent);
    wait_until(&mut child, "another step", || lines() > before);
    // SIGTSTP from a terminal also stops the children.
    send("TSTP", parent);
    wait_until(&mut child, "the pause", || state(parent) == 'T' && pids.iter().all(|pid| state(*pid) == 'T'));
    thread::sleep(Duration::from_secs(4));
    let before = lines();
    send("CONT", parent);
    wait_until(&mut child, "another step", || lines() > before);
    wait_until(&mut child, "all processes", || pids.iter().all(|pid| state(*pid) != 'T'));
    send("TERM", parent);
    let (code, message) = wait_for_exit(child);
    assert_eq!(code, Some(143), "{message}");
    all_gone(&pids);
    check_resume(folder, &plan, stopped_step(&message, "SIGTERM"));
}

#[test]
fn who_was_started_again_pauses_with_its_children() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(folder);
    let steps = ["--stages", "1,1", "--steps", "9000", "--processes", "--max-restarts", "1"];
    let mut child = spawn(folder, &[&TRAIN, &KEPT, &steps]);
    wait_for_checkpoint(folder, &mut child);
    let (parent, first) = (child.id(), children(child.id()));
    send("KILL", first[0]);
    let restarted = || children(parent).into_iter().filter(|pid| !first.contains(pid)).collect::<Vec<_>>();
    wait_until(&mut child, "a second start", || !restarted().is_empty());
    let before = checkpoints(folder);
    wait_until(&mut child, "another checkpoint", || checkpoints(folder) != before);
    let pids = restarted();
    send("TSTP", parent);
    wait_until(&mut child, "the pause", || state(parent) == 'T' && pids.iter().all(|pid| state(*pid) == 'T'));
    send("CONT", parent);
    wait_until(&mut child, "the end of the pause", || pids.iter().all(|pid| state(*pid) != 'T'));
    send("TERM", parent);
    let (code, message) = wait_for_exit(child);
    assert_eq!(code, Some(143), "{message}");
    all_gone(&pids);
}

#[test]
fn a_second_signal_ends_all_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(folder);
    let steps = ["--stages", "1,1", "--steps", "9000", "--processes"];
    let mut child = spawn(folder, &[&TRAIN, &KEPT, &steps]);
    wait_for_checkpoint(folder, &mut child);
    let pids = children(child.id());
    // No step ends while one of its workers is stopped.
    send("STOP", pids[0]);
    send("TERM", child.id());
    // Two pending signals would merge.
    thread::sleep(Duration::from_millis(50));
    send("TERM", child.id());
    let (code, message) = wait_for_exit(child);
    assert_eq!(code, Some(143), "{message}");
    assert!(!message.contains("stopped by"), "{message}");
    all_gone(&pids);
    assert!(!pids.iter().any(|pid| is_there(*pid)));
}
