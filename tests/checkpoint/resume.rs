//! `pipec train --resume` end to end: killed at any moment, stopped, with corrupt checkpoints or those of another run.

use assert_cmd::Command;
use assert_cmd::cargo::cargo_bin;
use compiler::tensor::Tensor;
use runtime::checkpoint::encode::Holds;
use runtime::checkpoint::find;
use runtime::data::mix;
use runtime::data::weights;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};

fn pipec(folder: &Path, arguments: &[&str]) -> Output {
    Command::cargo_bin("pipec").unwrap().current_dir(folder).args(arguments).output().unwrap()
}

fn expect_exit(folder: &Path, code: i32, arguments: &[&str]) -> String {
    let output = pipec(folder, arguments);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {message}");
    message
}

fn spawn(folder: &Path, arguments: &[&str]) -> Child {
    let mut command = std::process::Command::new(cargo_bin("pipec"));
    command.current_dir(folder).args(arguments).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

fn make_model(folder: &Path) {
    expect_exit(folder, 0, &["zoo", "cnn", "--hidden", "4", "-o", "m.onnx"]);
}

const TRAIN: [&str; 9] = ["train", "m.onnx", "--synthetic-data", "--batch", "4", "--optimizer", "adam", "--lr", "0.01"];
const KEPT: [&str; 4] = ["--checkpoint-dir", "ck", "--checkpoint-every", "2"];

fn flags<'a>(parts: &[&[&'a str]]) -> Vec<&'a str> {
    parts.concat()
}

fn bytes(folder: &Path, name: &str) -> Vec<u8> {
    fs::read(folder.join(name)).unwrap()
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder.join("ck")).into_iter().flatten();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_run_that_is_killed_again_and_again_ends_as_if_it_never_was() {
    let kills: u64 = std::env::var("PIPEC_KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(12);
    let seed = std::process::id() as u64;
    println!("seed {seed}");
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    make_model(folder);
    let mut kills_left = kills;
    for round in 0.. {
        let plan = match round % 3 {
            0 => ["--stages", "1,2", "--schedule", "1f1b-rr"],
            1 => ["--stages", "1,1,1", "--schedule", "1f1b"],
            _ => ["--stages", "1,1,1", "--staleness", "predict"],
        };
        let common = flags(&[&TRAIN, &plan, &["--steps", "60"]]);
        let start = Instant::now();
        expect_exit(folder, 0, &flags(&[&common, &["--save", "whole.safetensors", "--metrics", "whole.jsonl"]]));
        let duration = start.elapsed();
        let _ = fs::remove_dir_all(folder.join("ck"));
        let resumed = flags(&[
            &common,
            &KEPT,
            &["--keep", "2", "--resume", "auto", "--save", "again.safetensors", "--metrics", "again.jsonl"],
        ]);
        loop {
            if kills_left == 0 {
                break;
            }
            let mut child = spawn(folder, &resumed);
            let share = mix(seed ^ kills_left << 8 ^ round) % 1000;
            std::thread::sleep(duration.mul_f64(share as f64 / 1000.0));
            child.kill().unwrap();
            let output = child.wait_with_output().unwrap();
            kills_left -= 1;
            if output.status.success() {
                break;
            }
        }
        let message = expect_exit(folder, 0, &resumed);
        assert!(!message.contains("skipped"), "what bears its name is whole: {message}");
        assert!(bytes(folder, "again.safetensors") == bytes(folder, "whole.safetensors"), "{plan:?}");
        let losses = |name: &str| -> Vec<Value> {
            let text = fs::read_to_string(folder.join(name)).unwrap();
            let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
            lines.filter(|line| line.get("step").is_some()).map(|line| line["loss"].clone()).collect()
        };
        // A line that was not flushed before the kill is written again, or is for a step before the checkpoint.
        let (duration, resumed) = (losses("whole.jsonl"), losses("again.jsonl"));
        assert!(
            resumed.len() <= duration.len() && duration.ends_with(&resumed[resumed.len().saturating_sub(2)..]),
            "{plan:?}"
        );
        assert_eq!(names(folder), ["step-00000058", "step-00000060", "weights.safetensors"], "{plan:?}");
        if kills_left == 0 {
            break;
        }
    }
}

#[test]
fn whatever_is_asked_for_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    make_model(folder);
    for settings in [
        &["--dtype", "bf16", "--stages", "1,1"][..],
        &["--dtype", "bf16", "--stages", "2,1"],
        // With loss scaling.
        &["--dtype", "f16", "--stages", "1,1", "--microbatches", "2"],
        &["--dtype", "f64", "--stages", "1,2", "--clip-norm", "0.1"],
        &["--bn-variance", "torch", "--bn", "deferred", "--microbatches", "2", "--stages", "1,1,1"],
        &["--freeze", "conv1*,fc.bias", "--shuffle", "--lr-schedule", "cosine", "--stages", "1,1"],
        &["--dtype", "bf16", "--freeze", "conv1*", "--eval-split", "0.2", "--stages", "1,1"],
        &["--staleness", "pipemare", "--stages", "1,1,1", "--in-flight", "5,4,1"],
        &["--staleness", "vertical-sync", "--stages", "1,3"],
        &["--schedule", "2bw", "--microbatches", "2", "--stages", "2,1"],
        // Tensor parallelism.
        &["--tensor", "2", "--stages", "1,1", "--clip-norm", "0.1"],
        &["--tensor", "2", "--stages", "1,1,1", "--staleness", "predict"],
        &["--schedule", "zb-h2", "--microbatches", "4", "--stages", "1,1"],
    ] {
        let _ = fs::remove_dir_all(folder.join("ck"));
        let common = flags(&[&TRAIN, settings, &["--steps", "12", "--seed", "3"]]);
        expect_exit(
            folder,
            0,
            &flags(&[&common, &["--save", "whole.safetensors", "--save-gradients", "g.safetensors"]]),
        );
        expect_exit(folder, 0, &flags(&[&common, &KEPT]));
        let checkpoints = names(folder);
        let before = checkpoints.iter().filter(|name| name.starts_with("step-") && *name != "step-00000012");
        for name in before.step_by(2) {
            let from = format!("ck/{name}");
            let resumed = ["--resume", &from, "--save", "rest.safetensors", "--save-gradients", "h.safetensors"];
            expect_exit(folder, 0, &flags(&[&common, &resumed]));
            assert!(
                bytes(folder, "rest.safetensors") == bytes(folder, "whole.safetensors"),
                "{settings:?} from {from}"
            );
            assert!(bytes(folder, "g.safetensors") == bytes(folder, "h.safetensors"), "{settings:?} from {from}");
        }
    }
}

/// Waits for a checkpoint.
fn wait_for_checkpoint(folder: &Path, child: &mut Child) {
    let start = Instant::now();
    while !names(folder).iter().any(|name| name.starts_with("step-")) {
        assert!(child.try_wait().unwrap().is_none(), "it ended by itself");
        if start.elapsed() > Duration::from_secs(120) {
            child.kill().unwrap();
            panic!("no checkpoint comes");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[cfg(unix)]
fn send(signal: &str, child: &Child) {
    let sent = std::process::Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
}

#[cfg(unix)]
#[test]
fn a_signal_ends_the_step_and_leaves_a_checkpoint() {
    // Under `nohup`, this process and its children ignore SIGHUP.
    let listens = |line: &str| line.starts_with("SigIgn:") && line.ends_with(['0', '2', '4', '6', '8', 'a', 'c', 'e']);
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let hangup = status.lines().any(listens).then_some(("-HUP", "SIGHUP", 129));
    for (signal, name, code) in [("-TERM", "SIGTERM", 143), ("-INT", "SIGINT", 130)].into_iter().chain(hangup) {
        let shared = ["--stages", "1,1", "--schedule", "1f1b", "--tensor", "2"];
        for plan in [&["--stages", "1,2"][..], &["--stages", "1,1", "--schedule", "1f1b"], &shared] {
            let folder = tempfile::tempdir().unwrap();
            let folder = folder.path();
            make_model(folder);
            let common = flags(&[&TRAIN, plan, &["--steps", "400"]]);
            let mut child = spawn(folder, &flags(&[&common, &KEPT, &["--keep", "1", "--save", "never.safetensors"]]));
            wait_for_checkpoint(folder, &mut child);
            send(signal, &child);
            let output = child.wait_with_output().unwrap();
            let message = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(code), "{message}");
            let ended = format!("error: stopped by {name} after step ");
            let done =
                message.split(&ended).nth(1).and_then(|rest| rest.split(' ').next()).expect("it says how far it was");
            let done: usize = done.parse().unwrap();
            let checkpoint = format!("step-{done:08}");
            assert!(message.contains(&format!("ck/{checkpoint}")) && message.contains("--resume auto"), "{message}");
            assert_eq!(names(folder), [checkpoint], "one is kept, and nothing is written at the end");
            assert!(!folder.join("never.safetensors").exists());
            // A run of other length resumes too, and says so.
            let longer = (done + 3).to_string();
            let rest = flags(&[&TRAIN, plan, &["--steps", &longer]]);
            expect_exit(folder, 0, &flags(&[&rest, &["--save", "whole.safetensors"]]));
            let resumed = flags(&[&rest, &KEPT, &["--resume", "auto", "--save", "rest.safetensors"]]);
            let message = expect_exit(folder, 0, &resumed);
            assert!(message.contains(&format!("resuming after step {done} of {longer}")), "{message}");
            assert!(message.contains("the run was started with 400 steps, and now has "), "{message}");
            assert!(!message.contains("learning rate"), "{message}");
            assert!(bytes(folder, "rest.safetensors") == bytes(folder, "whole.safetensors"), "{plan:?}");
        }
    }
}

#[cfg(target_os = "linux")]
#[test]
fn two_runs_do_not_write_into_one_folder() {
    // The system may not report the process, for example if it changes its list of locks meanwhile.
    let is_taken = |message: &str, holder: &Child| {
        let name = |name: &str| message.contains(&format!("{name} is writing checkpoints into ck"));
        name(&format!("process {}", holder.id())) || name("another process")
    };
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    make_model(folder);
    let flags = flags(&[&TRAIN, &KEPT, &["--steps", "100000", "--resume", "auto"]]);
    for _ in 0..2 {
        let mut first = spawn(folder, &flags);
        wait_for_checkpoint(folder, &mut first);
        let message = expect_exit(folder, 2, &flags);
        assert!(is_taken(&message, &first), "{message}");
        assert!(message.contains("help: wait until it ends, or choose another `--checkpoint-dir`"), "{message}");
        // A run from the start does not mention existing checkpoints here.
        let message = expect_exit(folder, 2, &flags[..flags.len() - 2]);
        assert!(is_taken(&message, &first), "{message}");
        // The lock is always released, and leaves no file.
        first.kill().unwrap();
        first.wait().unwrap();
        assert!(names(folder).iter().all(|name| find::minibatches(name).is_some() || name.starts_with(".step-")));
        fs::remove_dir_all(folder.join("ck")).unwrap();
    }
}

#[cfg(unix)]
#[test]
fn a_second_signal_ends_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    // Slow steps.
    expect_exit(folder, 0, &["zoo", "mlp", "--hidden", "512", "--layers", "4", "-o", "m.onnx"]);
    let mut child = spawn(
        folder,
        &["train", "m.onnx", "--synthetic-data", "--batch", "2048", "--steps", "40", KEPT[0], KEPT[1], KEPT[2], "1"],
    );
    wait_for_checkpoint(folder, &mut child);
    send("-TERM", &child);
    // Two pending signals would merge.
    std::thread::sleep(Duration::from_millis(20));
    send("-TERM", &child);
    let output = child.wait_with_output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(143), "{message}");
    assert!(!message.contains("stopped by"), "{message}");
}

#[test]
fn another_plan_of_the_same_run_goes_on_with_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    make_model(folder);
    let flush = ["--microbatches", "2", "--steps", "8"];
    let first = flags(&[&TRAIN, &flush, &["--stages", "1,1,1", "--schedule", "1f1b"]]);
    expect_exit(folder, 0, &flags(&[&first, &KEPT, &["--save", "whole.safetensors"]]));
    let from = ["--resume", "ck/step-00000004"];
    let other = flags(&[&TRAIN, &flush, &["--stages", "1,1", "--schedule", "gpipe", "--save", "other.safetensors"]]);
    let message = expect_exit(folder, 0, &flags(&[&other, &from]));
    assert!(message.contains("the plan differs from the checkpoint's") && !message.contains("warning"), "{message}");
    assert!(bytes(folder, "other.safetensors") == bytes(folder, "whole.safetensors"));
    // Without a flush it resumes with a warning.
    let stale = flags(&[&TRAIN, &["--stages", "1,1,1", "--steps", "8"], &from]);
    let message = expect_exit(folder, 0, &stale);
    assert!(message.contains("warning: the checkpoint is from another plan (schedule 1f1b, now 1f1b-rr)"), "{message}");
    let odd = flags(&[&TRAIN, &["--stages", "3,1", "--steps", "8"], &from]);
    let message = expect_exit(folder, 2, &odd);
    assert!(message.contains("finish a round only every 3 minibatches"), "{message}");
    // A checkpoint's weights can be used as a model's.
    let message = expect_exit(folder, 0, &flags(&[&TRAIN, &["--steps", "1", "--weights", "ck/step-00000004"]]));
    assert!(!message.contains("warning"), "{message}");
    let message = expect_exit(
        folder,
        0,
        &flags(&[&TRAIN, &["--steps", "1", "--weights", "ck/step-00000004/stage-1.safetensors"]]),
    );
    assert!(message.contains("the model's values are used"), "{message}");
}

#[test]
fn a_finished_run_says_so_and_can_be_made_longer() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    make_model(folder);
    let train = |steps: &str, name: &str| {
        let flags = flags(&[&TRAIN, &KEPT, &["--steps", steps, "--resume", "auto", "--save", name]]);
        let output = pipec(folder, &flags);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let streams = [output.stdout, output.stderr].map(|stream| String::from_utf8(stream).unwrap());
        streams.concat()
    };
    train("4", "first.safetensors");
    let message = train("4", "again.safetensors");
    assert!(
        message.contains("the run is complete: all 4 steps were done before; increase `--steps` or `--epochs`"),
        "{message}"
    );
    assert!(!message.contains("no checkpoint will be written"), "{message}");
    assert!(bytes(folder, "again.safetensors") == bytes(folder, "first.safetensors"));
    // A single worker has nothing in flight after a checkpoint, so the longer run is equal.
    let message = train("6", "longer.safetensors");
    assert!(message.contains("resuming after step 4 of 6") && !message.contains("nothing was in flight"), "{message}");
    expect_exit(folder, 0, &flags(&[&TRAIN, &["--steps", "6", "--save", "whole.safetensors"]]));
    assert!(bytes(folder, "longer.safetensors") == bytes(folder, "whole.safetensors"));
}

#[test]
fn the_end_of_a_run_is_a_checkpoint_once() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    make_model(folder);
    for plan in [
        &["--stages", "1,1"][..],
        &["--stages", "1,1", "--processes"],
        &["--stages", "1,1", "--tensor", "2"],
        &["--stages", "1", "--dtype", "bf16"],
    ] {
        let train_flags = |steps: &'static str| flags(&[&TRAIN, plan, &["--steps", steps]]);
        let kept_flags = |steps| flags(&[&train_flags(steps), &KEPT]);
        expect_exit(folder, 0, &kept_flags("5"));
        let expected = ["step-00000002", "step-00000004", "step-00000005", "weights.safetensors"];
        assert_eq!(names(folder), expected, "{plan:?}");
        let message =
            expect_exit(folder, 0, &flags(&[&kept_flags("5"), &["--resume", "auto", "--save", "again.safetensors"]]));
        assert!(message.contains("resuming after step 5 of 5"), "{message}");
        assert!(bytes(folder, "again.safetensors") == bytes(folder, "ck/weights.safetensors"), "{plan:?}");
        expect_exit(folder, 0, &flags(&[&kept_flags("6"), &["--resume", "ck/step-00000004"]]));
        let expected = ["step-00000002", "step-00000004", "step-00000005", "step-00000006", "weights.safetensors"];
        assert_eq!(names(folder), expected, "{plan:?}");
        fs::remove_dir_all(folder.join("ck")).unwrap();
        // The final checkpoint needs no further option.
        let final_flags = |steps| flags(&[&train_flags(steps), &["--checkpoint-dir", "ck"]]);
        let message = expect_exit(folder, 0, &final_flags("5"));
        assert!(message.contains("ck/weights.safetensors (weights), ck/step-00000005 (checkpoint)"), "{message}");
        assert_eq!(names(folder), ["step-00000005", "weights.safetensors"], "{plan:?}");
        let message = expect_exit(folder, 0, &flags(&[&final_flags("7"), &["--resume", "auto", "--keep", "1"]]));
        assert!(message.contains("resuming after step 5 of 7"), "{message}");
        assert_eq!(names(folder), ["step-00000007", "weights.safetensors"], "{plan:?}");
        fs::remove_dir_all(folder.join("ck")).unwrap();
    }
    // Rounds of two: the last complete one.
    let odd = flags(&[&TRAIN, &["--stages", "2,1", "--steps", "5"], &["--checkpoint-dir", "ck"]]);
    let message = expect_exit(folder, 0, &odd);
    assert!(message.contains("end together, every 2 steps: the last after step 4 of 5"), "{message}");
    assert_eq!(names(folder), ["step-00000004", "weights.safetensors"]);
}

#[test]
fn an_older_checkpoint_that_fits_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    make_model(folder);
    expect_exit(folder, 0, &flags(&[&TRAIN, &["--stages", "1,1", "--steps", "8"], &KEPT]));
    let shorter = flags(&[&TRAIN, &["--stages", "1,1", "--steps", "5"], &KEPT, &["--resume", "auto"]]);
    let message = expect_exit(folder, 2, &shorter);
    assert!(message.contains("cannot resume from ck/step-00000008"), "{message}");
    assert!(message.contains("`--resume ck/step-00000004` is an older checkpoint that matches"), "{message}");
    // Rounds of two and three end together every six steps.
    let rounds = flags(&[&TRAIN, &["--stages", "2,3", "--steps", "12"]]);
    let message = expect_exit(folder, 2, &flags(&[&rounds, &["--resume", "ck/step-00000008"]]));
    assert!(message.contains("`--resume ck/step-00000006` is an older checkpoint that matches"), "{message}");
    expect_exit(folder, 0, &flags(&[&rounds, &["--resume", "ck/step-00000006"]]));
    let other = flags(&[&TRAIN, &["--stages", "1,1", "--steps", "8", "--momentum", "0.5"]]);
    let message = expect_exit(folder, 2, &flags(&[&other, &["--resume", "ck/step-00000008"]]));
    assert!(!message.contains("older"), "{message}");
}

#[test]
fn foreign_or_incomplete_checkpoints_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    make_model(folder);
    let common = flags(&[&TRAIN, &["--stages", "1,2", "--steps", "8"]]);
    let kept = flags(&[&common, &KEPT]);
    expect_exit(folder, 0, &flags(&[&kept, &["--save", "whole.safetensors"]]));
    assert_eq!(names(folder).len(), 5, "{:?}", names(folder));
    let message = expect_exit(folder, 2, &kept);
    assert!(message.contains("ck has checkpoints of another run") && message.contains("`--resume auto`"), "{message}");
    let message = expect_exit(folder, 2, &flags(&[&common, &["--resume", "auto"]]));
    assert!(message.contains("`--checkpoint-dir FOLDER`"), "{message}");
    let message = expect_exit(folder, 2, &flags(&[&common, &["--resume", "ck"]]));
    assert!(
        message.contains("ck/manifest.json is missing") && message.contains("--resume ck/step-00000008"),
        "{message}"
    );
    // Rounds of two and three end together every six steps.
    let rare = ["--checkpoint-dir", "rare", "--checkpoint-every", "4"];
    let message = expect_exit(folder, 0, &flags(&[&TRAIN, &["--stages", "2,3", "--steps", "12"], &rare]));
    assert!(message.contains("every 6 steps: those of every 4 steps at the next such step"), "{message}");
    assert!(folder.join("rare/step-00000006").is_dir() && folder.join("rare/step-00000012").is_dir());
    let never = ["--checkpoint-dir", "never", "--checkpoint-every", "4"];
    let message = expect_exit(folder, 0, &flags(&[&TRAIN, &["--stages", "2,3", "--steps", "5"], &never]));
    assert!(message.contains("warning: no checkpoint will be written: the run ends after 5 steps"), "{message}");
    // The run is complete: nothing is trained, and the weights are written.
    let last = flags(&[&kept, &["--resume", "auto", "--save", "last.safetensors"]]);
    expect_exit(folder, 0, &last);
    assert!(bytes(folder, "last.safetensors") == bytes(folder, "whole.safetensors"));
    // Another run.
    let other = ["--resume", "ck/step-00000004", "--seed", "7", "--momentum", "0.5"];
    let other = ["train", "m.onnx", "--synthetic-data", "--batch", "8", "--stages", "1,2", "--steps", "8"]
        .into_iter()
        .chain(other)
        .collect::<Vec<_>>();
    let message = expect_exit(folder, 2, &other);
    for expected in [
        "batch: the checkpoint has `4`, this run `8`",
        "optimizer: the checkpoint has `adam, betas 0.9,0.999, lr 0.01, eps 1e-8, weight decay 0`, this run `sgd, lr 0.01, momentum 0.5, weight decay 0`",
        "seed: the checkpoint has `0`",
    ] {
        assert!(message.contains(expected), "{message}");
    }
    assert!(message.contains("--weights ck/step-00000004"), "{message}");
    let message =
        expect_exit(folder, 2, &flags(&[&TRAIN, &["--stages", "1,2", "--steps", "6", "--resume", "ck/step-00000008"]]));
    assert!(message.contains("from minibatch 8, the run has 6"), "{message}");
    // Checkpoints are corrupted one after the other; the previous one is used.
    let flip = |name: &str| {
        let path = folder.join("ck").join(name);
        let mut bytes = fs::read(&path).unwrap();
        let last = bytes.len() - 5;
        bytes[last] ^= 0x20;
        fs::write(&path, bytes).unwrap();
    };
    flip("step-00000008/stage-1.optimizer.safetensors");
    fs::remove_file(folder.join("ck/step-00000006/stage-0.safetensors")).unwrap();
    let message = expect_exit(folder, 2, &flags(&[&common, &["--resume", "ck/step-00000008"]]));
    assert!(message.contains("stage-1.optimizer.safetensors is damaged"), "{message}");
    let message = expect_exit(folder, 0, &flags(&[&kept, &["--resume", "auto", "--save", "again.safetensors"]]));
    assert!(message.contains("warning: ck/step-00000008 is skipped"), "{message}");
    assert!(
        message.contains("stage-0.safetensors is missing") && message.contains("resuming after step 4 of 8"),
        "{message}"
    );
    assert!(bytes(folder, "again.safetensors") == bytes(folder, "whole.safetensors"));
    // The corrupt ones have been rewritten.
    let message = expect_exit(folder, 0, &last);
    assert!(!message.contains("skipped"), "{message}");
    // Without a valid checkpoint, auto starts from the beginning.
    for name in names(folder).iter().filter(|name| name.starts_with("step-")) {
        fs::write(folder.join("ck").join(name).join("manifest.json"), "{\"schema\": \"pipec.checkpoint/1\"").unwrap();
    }
    let message = expect_exit(folder, 0, &last);
    assert!(message.contains("the run starts from the beginning"), "{message}");
    assert!(bytes(folder, "last.safetensors") == bytes(folder, "whole.safetensors"));
}

#[test]
fn other_data_is_another_run() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    expect_exit(folder, 0, &["zoo", "mlp", "--inputs", "2", "--classes", "2", "-o", "m.onnx"]);
    let data = |name: &str, last: f32, label: i64| {
        let mut x: Vec<f32> = (0..16).map(|i| i as f32 / 16.0).collect();
        x[15] = last;
        let mut labels: Vec<i64> = (0..8).map(|row| row % 2).collect();
        labels[7] = label;
        let arrays = [("x", Tensor::from_f32(&[8, 2], &x)), ("y", Tensor::from_i64(&[8], &labels))];
        let arrays = arrays.map(|(name, tensor)| (name.to_string(), tensor));
        weights::write(&folder.join(name), &arrays.into()).unwrap();
    };
    data("one.npz", 0.5, 1);
    data("features.npz", 0.25, 1);
    data("labels.npz", 0.5, 0);
    let common = ["train", "m.onnx", "--batch", "4", "--steps", "6"];
    expect_exit(folder, 0, &flags(&[&common, &["--data", "one.npz"], &KEPT]));
    let from = ["--resume", "ck/step-00000004"];
    for other in ["features.npz", "labels.npz"] {
        let message = expect_exit(folder, 2, &flags(&[&common, &["--data", other], &from]));
        let digests = message.split('`').filter(|digest| digest.len() == 64).collect::<Vec<_>>();
        assert!(message.contains("sha256 of the data: the checkpoint has `"), "{message}");
        assert!(digests.len() == 2 && digests[0] != digests[1], "{message}");
    }
    // Equal data under another name is accepted, and a checkpoint without data information resumes.
    data("again.npz", 0.5, 1);
    expect_exit(folder, 0, &flags(&[&common, &["--data", "again.npz"], &from]));
    let step = folder.join("ck/step-00000004");
    let mut manifest = find::manifest(&step).unwrap();
    manifest.run.remove("sha256 of the data").unwrap();
    fs::write(step.join("manifest.json"), manifest.write()).unwrap();
    expect_exit(folder, 0, &flags(&[&common, &["--data", "features.npz"], &from]));
}

#[test]
fn a_manifest_that_lists_too_little_is_passed_over() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    make_model(folder);
    let common = flags(&[&TRAIN, &["--stages", "1,2", "--steps", "8"], &KEPT]);
    expect_exit(folder, 0, &flags(&[&common, &["--save", "whole.safetensors"]]));
    let manifests: Vec<_> =
        [4, 6].map(|step| find::manifest(&folder.join("ck").join(find::name(step))).unwrap()).into();
    for holds in [Holds::Weights, Holds::Optimizer, Holds::InFlight] {
        fs::remove_dir_all(folder.join("ck/step-00000008")).unwrap();
        for (step, manifest) in [4, 6].into_iter().zip(&manifests) {
            let mut reduced = manifest.clone();
            if step == 6 {
                let stage = reduced.files.iter().find(|file| file.holds == holds).unwrap().stage;
                reduced.files.retain(|file| (file.holds, file.stage) != (holds, stage));
            }
            fs::write(folder.join("ck").join(find::name(step)).join("manifest.json"), reduced.write()).unwrap();
        }
        let message = expect_exit(
            folder,
            2,
            &flags(&[&TRAIN, &["--stages", "1,2", "--steps", "8"], &["--resume", "ck/step-00000006"]]),
        );
        assert!(message.contains("cannot resume from ck/step-00000006"), "{holds:?}: {message}");
        let message = expect_exit(folder, 0, &flags(&[&common, &["--resume", "auto", "--save", "rest.safetensors"]]));
        assert!(message.contains("warning: ck/step-00000006 is skipped"), "{holds:?}: {message}");
        assert!(message.contains("resuming after step 4 of 8"), "{holds:?}: {message}");
        assert!(bytes(folder, "rest.safetensors") == bytes(folder, "whole.safetensors"));
    }
}

#[test]
fn a_checkpoint_that_cannot_be_written_costs_the_run_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    make_model(folder);
    let common = flags(&[&TRAIN, &["--stages", "1,1", "--steps", "6"]]);
    expect_exit(folder, 0, &flags(&[&common, &["--save", "whole.safetensors"]]));
    // A file blocks the second checkpoint's folder.
    fs::create_dir(folder.join("ck")).unwrap();
    fs::write(folder.join("ck/.step-00000004.part"), "").unwrap();
    let message = expect_exit(folder, 0, &flags(&[&common, &KEPT, &["--save", "kept.safetensors"]]));
    assert!(message.contains("warning: no checkpoint after step 4: cannot write ck/.step-00000004.part"), "{message}");
    assert!(message.contains("the last complete checkpoint stays"), "{message}");
    assert!(bytes(folder, "kept.safetensors") == bytes(folder, "whole.safetensors"));
    assert_eq!(names(folder), [".step-00000004.part", "step-00000002", "step-00000006", "weights.safetensors"]);
}

/// A later run would silently lose the steps after the checkpoint before.
#[test]
fn a_run_without_its_last_checkpoint_does_not_end_well() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    make_model(folder);
    let common = flags(&[&TRAIN, &["--stages", "1,1", "--steps", "6"]]);
    expect_exit(folder, 0, &flags(&[&common, &["--save", "whole.safetensors"]]));
    fs::create_dir(folder.join("ck")).unwrap();
    fs::write(folder.join("ck/.step-00000006.part"), "").unwrap();
    for extra in [&[][..], &["--processes", "--resume", "auto"]] {
        let message = expect_exit(folder, 1, &flags(&[&common, &KEPT, &["--save", "kept.safetensors"], extra]));
        assert!(message.contains("its last checkpoint, after step 6, was not written"), "{message}");
        assert!(message.contains("cannot write ck/.step-00000006.part"), "{message}");
        assert!(message.contains("the newest checkpoint is ck/step-00000004") || !extra.is_empty(), "{message}");
        // The results are not lost.
        assert!(bytes(folder, "kept.safetensors") == bytes(folder, "whole.safetensors"));
        assert!(bytes(folder, "ck/weights.safetensors") == bytes(folder, "whole.safetensors"));
    }
    fs::remove_file(folder.join("ck/.step-00000006.part")).unwrap();
    expect_exit(folder, 0, &flags(&[&common, &KEPT, &["--resume", "auto"]]));
    assert!(names(folder).contains(&"step-00000006".to_string()));
}

/// Diverging keeps earlier checkpoints, from which a run with a smaller learning rate resumes.
#[test]
fn a_run_that_diverges_keeps_what_was_good() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    expect_exit(folder, 0, &["zoo", "mlp", "-o", "m.onnx"]);
    let train = ["train", "m.onnx", "--synthetic-data", "--batch", "4", "--workers", "1", "--schedule", "1f1b"];
    let kept = ["--checkpoint-dir", "ck", "--checkpoint-every", "1", "--keep", "1"];
    let message = expect_exit(folder, 1, &flags(&[&train, &kept, &["--steps", "30", "--lr", "1e18"]]));
    // The weights are examined beside the run, so the loss may be found first.
    let [weights, loss] =
        ["contains NaN or infinity", "the loss of step 2 of 30 is NaN"].map(|cause| message.contains(cause));
    assert!((weights || loss) && message.contains("diverged"), "{message}");
    let steps: Vec<String> = names(folder).into_iter().filter(|name| name.starts_with("step-")).collect();
    let [remaining] = steps.try_into().unwrap();
    assert_ne!(remaining, "step-00000030");
    let path = folder.join("ck").join(&remaining).join("stage-0.safetensors");
    assert!(weights::read(&path).unwrap().values().all(|tensor| tensor.to_f64().iter().all(|v| v.is_finite())));
}

/// With a schedule that decays until the end, a longer run is a different one.
#[test]
fn a_decay_to_another_end_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    make_model(folder);
    let falls = flags(&[&TRAIN, &KEPT, &["--lr-schedule", "cosine", "--steps"]]);
    expect_exit(folder, 0, &flags(&[&falls, &["4"]]));
    let message = expect_exit(folder, 0, &flags(&[&falls, &["6", "--resume", "auto"]]));
    let warning =
        "warning: the run was started with 4 steps, and now has 6: the learning rate now decays towards the new end";
    assert!(message.contains(warning), "{message}");
}
