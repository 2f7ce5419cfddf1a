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

fn ends(folder: &Path, code: i32, arguments: &[&str]) -> String {
    let output = pipec(folder, arguments);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
    said
}

fn spawned(folder: &Path, arguments: &[&str]) -> Child {
    let mut command = std::process::Command::new(cargo_bin("pipec"));
    command.current_dir(folder).args(arguments).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

fn model(folder: &Path) {
    ends(folder, 0, &["zoo", "cnn", "--hidden", "4", "-o", "m.onnx"]);
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
    model(folder);
    let mut left = kills;
    for round in 0.. {
        let plan = match round % 3 {
            0 => ["--stages", "1,2", "--schedule", "1f1b-rr"],
            1 => ["--stages", "1,1,1", "--schedule", "1f1b"],
            _ => ["--stages", "1,1,1", "--staleness", "predict"],
        };
        let common = flags(&[&TRAIN, &plan, &["--steps", "60"]]);
        let began = Instant::now();
        ends(folder, 0, &flags(&[&common, &["--save", "whole.safetensors", "--metrics", "whole.jsonl"]]));
        let whole = began.elapsed();
        let _ = fs::remove_dir_all(folder.join("ck"));
        let again = flags(&[
            &common,
            &KEPT,
            &["--keep", "2", "--resume", "auto", "--save", "again.safetensors", "--metrics", "again.jsonl"],
        ]);
        loop {
            if left == 0 {
                break;
            }
            let mut child = spawned(folder, &again);
            let share = mix(seed ^ left << 8 ^ round) % 1000;
            std::thread::sleep(whole.mul_f64(share as f64 / 1000.0));
            child.kill().unwrap();
            let output = child.wait_with_output().unwrap();
            left -= 1;
            if output.status.success() {
                break;
            }
        }
        let said = ends(folder, 0, &again);
        assert!(!said.contains("skipped"), "what bears its name is whole: {said}");
        assert!(bytes(folder, "again.safetensors") == bytes(folder, "whole.safetensors"), "{plan:?}");
        let losses = |name: &str| -> Vec<Value> {
            let text = fs::read_to_string(folder.join(name)).unwrap();
            let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
            lines.filter(|line| line.get("step").is_some()).map(|line| line["loss"].clone()).collect()
        };
        // A line that was not flushed before the kill is written again, or is for a step before the checkpoint.
        let (whole, again) = (losses("whole.jsonl"), losses("again.jsonl"));
        assert!(again.len() <= whole.len() && whole.ends_with(&again[again.len().saturating_sub(2)..]), "{plan:?}");
        assert_eq!(names(folder), ["step-00000058", "step-00000060", "weights.safetensors"], "{plan:?}");
        if left == 0 {
            break;
        }
    }
}

#[test]
fn whatever_is_asked_for_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(folder);
    for asked in [
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
        let common = flags(&[&TRAIN, asked, &["--steps", "12", "--seed", "3"]]);
        ends(folder, 0, &flags(&[&common, &["--save", "whole.safetensors", "--save-gradients", "g.safetensors"]]));
        ends(folder, 0, &flags(&[&common, &KEPT]));
        let all = names(folder);
        let before = all.iter().filter(|name| name.starts_with("step-") && *name != "step-00000012");
        for name in before.step_by(2) {
            let from = format!("ck/{name}");
            let rest = ["--resume", &from, "--save", "rest.safetensors", "--save-gradients", "h.safetensors"];
            ends(folder, 0, &flags(&[&common, &rest]));
            assert!(bytes(folder, "rest.safetensors") == bytes(folder, "whole.safetensors"), "{asked:?} from {from}");
            assert!(bytes(folder, "g.safetensors") == bytes(folder, "h.safetensors"), "{asked:?} from {from}");
        }
    }
}

/// Waits for a checkpoint.
fn begun(folder: &Path, child: &mut Child) {
    let began = Instant::now();
    while !names(folder).iter().any(|name| name.starts_with("step-")) {
        assert!(child.try_wait().unwrap().is_none(), "it ended by itself");
        if began.elapsed() > Duration::from_secs(120) {
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
    for (signal, name, code) in [("-TERM", "SIGTERM", 143), ("-INT", "SIGINT", 130)] {
        let shared = ["--stages", "1,1", "--schedule", "1f1b", "--tensor", "2"];
        for plan in [&["--stages", "1,2"][..], &["--stages", "1,1", "--schedule", "1f1b"], &shared] {
            let folder = tempfile::tempdir().unwrap();
            let folder = folder.path();
            model(folder);
            let common = flags(&[&TRAIN, plan, &["--steps", "400"]]);
            let mut child = spawned(folder, &flags(&[&common, &KEPT, &["--keep", "1", "--save", "never.safetensors"]]));
            begun(folder, &mut child);
            send(signal, &child);
            let output = child.wait_with_output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(code), "{said}");
            let ended = format!("error: stopped by {name} after step ");
            let done =
                said.split(&ended).nth(1).and_then(|rest| rest.split(' ').next()).expect("it says how far it was");
            let done: usize = done.parse().unwrap();
            let checkpoint = format!("step-{done:08}");
            assert!(said.contains(&format!("ck/{checkpoint}")) && said.contains("--resume auto"), "{said}");
            assert_eq!(names(folder), [checkpoint], "one is kept, and nothing is written at the end");
            assert!(!folder.join("never.safetensors").exists());
            // A run of other length resumes too, and says so.
            let longer = (done + 3).to_string();
            let rest = flags(&[&TRAIN, plan, &["--steps", &longer]]);
            ends(folder, 0, &flags(&[&rest, &["--save", "whole.safetensors"]]));
            let resumed = flags(&[&rest, &KEPT, &["--resume", "auto", "--save", "rest.safetensors"]]);
            let said = ends(folder, 0, &resumed);
            assert!(said.contains(&format!("resuming after step {done} of {longer}")), "{said}");
            assert!(said.contains("the run was started with 400 steps, and now has "), "{said}");
            assert!(!said.contains("learning rate"), "{said}");
            assert!(bytes(folder, "rest.safetensors") == bytes(folder, "whole.safetensors"), "{plan:?}");
        }
    }
}

#[cfg(target_os = "linux")]
#[test]
fn two_runs_do_not_write_into_one_folder() {
    // The system may not report the process, for example if it changes its list of locks meanwhile.
    let is_taken = |said: &str, holder: &Child| {
        let name = |name: &str| said.contains(&format!("{name} is writing checkpoints into ck"));
        name(&format!("process {}", holder.id())) || name("another process")
    };
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(folder);
    let flags = flags(&[&TRAIN, &KEPT, &["--steps", "100000", "--resume", "auto"]]);
    for _ in 0..2 {
        let mut first = spawned(folder, &flags);
        begun(folder, &mut first);
        let said = ends(folder, 2, &flags);
        assert!(is_taken(&said, &first), "{said}");
        assert!(said.contains("help: wait until it ends, or choose another `--checkpoint-dir`"), "{said}");
        // A run from the start does not mention existing checkpoints here.
        let said = ends(folder, 2, &flags[..flags.len() - 2]);
        assert!(is_taken(&said, &first), "{said}");
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
    ends(folder, 0, &["zoo", "mlp", "--hidden", "512", "--layers", "4", "-o", "m.onnx"]);
    let mut child = spawned(
        folder,
        &["train", "m.onnx", "--synthetic-data", "--batch", "2048", "--steps", "40", KEPT[0], KEPT[1], KEPT[2], "1"],
    );
    begun(folder, &mut child);
    send("-TERM", &child);
    // Two pending signals would merge.
    std::thread::sleep(Duration::from_millis(20));
    send("-TERM", &child);
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(143), "{said}");
    assert!(!said.contains("stopped by"), "{said}");
}

#[test]
fn another_plan_of_the_same_run_goes_on_with_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(folder);
    let flush = ["--microbatches", "2", "--steps", "8"];
    let first = flags(&[&TRAIN, &flush, &["--stages", "1,1,1", "--schedule", "1f1b"]]);
    ends(folder, 0, &flags(&[&first, &KEPT, &["--save", "whole.safetensors"]]));
    let from = ["--resume", "ck/step-00000004"];
    let other = flags(&[&TRAIN, &flush, &["--stages", "1,1", "--schedule", "gpipe", "--save", "other.safetensors"]]);
    let said = ends(folder, 0, &flags(&[&other, &from]));
    assert!(said.contains("the plan differs from the checkpoint's") && !said.contains("warning"), "{said}");
    assert!(bytes(folder, "other.safetensors") == bytes(folder, "whole.safetensors"));
    // Without a flush it resumes with a warning.
    let stale = flags(&[&TRAIN, &["--stages", "1,1,1", "--steps", "8"], &from]);
    let said = ends(folder, 0, &stale);
    assert!(said.contains("warning: the checkpoint is from another plan (schedule 1f1b, now 1f1b-rr)"), "{said}");
    let odd = flags(&[&TRAIN, &["--stages", "3,1", "--steps", "8"], &from]);
    let said = ends(folder, 2, &odd);
    assert!(said.contains("finish a round only every 3 minibatches"), "{said}");
    // A checkpoint's weights can be used as a model's.
    let said = ends(folder, 0, &flags(&[&TRAIN, &["--steps", "1", "--weights", "ck/step-00000004"]]));
    assert!(!said.contains("warning"), "{said}");
    let said =
        ends(folder, 0, &flags(&[&TRAIN, &["--steps", "1", "--weights", "ck/step-00000004/stage-1.safetensors"]]));
    assert!(said.contains("the model's values are used"), "{said}");
}

#[test]
fn a_finished_run_says_so_and_can_be_made_longer() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(folder);
    let of = |steps: &str, name: &str| {
        let flags = flags(&[&TRAIN, &KEPT, &["--steps", steps, "--resume", "auto", "--save", name]]);
        let output = pipec(folder, &flags);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let both = [output.stdout, output.stderr].map(|stream| String::from_utf8(stream).unwrap());
        both.concat()
    };
    of("4", "first.safetensors");
    let said = of("4", "again.safetensors");
    assert!(
        said.contains("the run is complete: all 4 steps were done before; increase `--steps` or `--epochs`"),
        "{said}"
    );
    assert!(!said.contains("no checkpoint will be written"), "{said}");
    assert!(bytes(folder, "again.safetensors") == bytes(folder, "first.safetensors"));
    // A single worker has nothing in flight after a checkpoint, so the longer run is equal.
    let said = of("6", "longer.safetensors");
    assert!(said.contains("resuming after step 4 of 6") && !said.contains("nothing was in flight"), "{said}");
    ends(folder, 0, &flags(&[&TRAIN, &["--steps", "6", "--save", "whole.safetensors"]]));
    assert!(bytes(folder, "longer.safetensors") == bytes(folder, "whole.safetensors"));
}

#[test]
fn the_end_of_a_run_is_a_checkpoint_once() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(folder);
    for plan in [
        &["--stages", "1,1"][..],
        &["--stages", "1,1", "--processes"],
        &["--stages", "1,1", "--tensor", "2"],
        &["--stages", "1", "--dtype", "bf16"],
    ] {
        let of = |steps: &'static str| flags(&[&TRAIN, plan, &["--steps", steps]]);
        let kept = |steps| flags(&[&of(steps), &KEPT]);
        ends(folder, 0, &kept("5"));
        let all = ["step-00000002", "step-00000004", "step-00000005", "weights.safetensors"];
        assert_eq!(names(folder), all, "{plan:?}");
        let said = ends(folder, 0, &flags(&[&kept("5"), &["--resume", "auto", "--save", "again.safetensors"]]));
        assert!(said.contains("resuming after step 5 of 5"), "{said}");
        assert!(bytes(folder, "again.safetensors") == bytes(folder, "ck/weights.safetensors"), "{plan:?}");
        ends(folder, 0, &flags(&[&kept("6"), &["--resume", "ck/step-00000004"]]));
        let all = ["step-00000002", "step-00000004", "step-00000005", "step-00000006", "weights.safetensors"];
        assert_eq!(names(folder), all, "{plan:?}");
        fs::remove_dir_all(folder.join("ck")).unwrap();
        // The final checkpoint needs no further option.
        let only = |steps| flags(&[&of(steps), &["--checkpoint-dir", "ck"]]);
        let said = ends(folder, 0, &only("5"));
        assert!(said.contains("ck/weights.safetensors (weights), ck/step-00000005 (checkpoint)"), "{said}");
        assert_eq!(names(folder), ["step-00000005", "weights.safetensors"], "{plan:?}");
        let said = ends(folder, 0, &flags(&[&only("7"), &["--resume", "auto", "--keep", "1"]]));
        assert!(said.contains("resuming after step 5 of 7"), "{said}");
        assert_eq!(names(folder), ["step-00000007", "weights.safetensors"], "{plan:?}");
        fs::remove_dir_all(folder.join("ck")).unwrap();
    }
    // Rounds of two: the last complete one.
    let odd = flags(&[&TRAIN, &["--stages", "2,1", "--steps", "5"], &["--checkpoint-dir", "ck"]]);
    let said = ends(folder, 0, &odd);
    assert!(said.contains("end together, every 2 steps: the last after step 4 of 5"), "{said}");
    assert_eq!(names(folder), ["step-00000004", "weights.safetensors"]);
}

#[test]
fn an_older_checkpoint_that_fits_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(folder);
    ends(folder, 0, &flags(&[&TRAIN, &["--stages", "1,1", "--steps", "8"], &KEPT]));
    let shorter = flags(&[&TRAIN, &["--stages", "1,1", "--steps", "5"], &KEPT, &["--resume", "auto"]]);
    let said = ends(folder, 2, &shorter);
    assert!(said.contains("cannot resume from ck/step-00000008"), "{said}");
    assert!(said.contains("`--resume ck/step-00000004` is an older checkpoint that matches"), "{said}");
    // Rounds of two and three end together every six steps.
    let rounds = flags(&[&TRAIN, &["--stages", "2,3", "--steps", "12"]]);
    let said = ends(folder, 2, &flags(&[&rounds, &["--resume", "ck/step-00000008"]]));
    assert!(said.contains("`--resume ck/step-00000006` is an older checkpoint that matches"), "{said}");
    ends(folder, 0, &flags(&[&rounds, &["--resume", "ck/step-00000006"]]));
    let other = flags(&[&TRAIN, &["--stages", "1,1", "--steps", "8", "--momentum", "0.5"]]);
    let said = ends(folder, 2, &flags(&[&other, &["--resume", "ck/step-00000008"]]));
    assert!(!said.contains("older"), "{said}");
}

#[test]
fn foreign_or_incomplete_checkpoints_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(folder);
    let common = flags(&[&TRAIN, &["--stages", "1,2", "--steps", "8"]]);
    let kept = flags(&[&common, &KEPT]);
    ends(folder, 0, &flags(&[&kept, &["--save", "whole.safetensors"]]));
    assert_eq!(names(folder).len(), 5, "{:?}", names(folder));
    let said = ends(folder, 2, &kept);
    assert!(said.contains("ck has checkpoints of another run") && said.contains("`--resume auto`"), "{said}");
    let said = ends(folder, 2, &flags(&[&common, &["--resume", "auto"]]));
    assert!(said.contains("`--checkpoint-dir FOLDER`"), "{said}");
    let said = ends(folder, 2, &flags(&[&common, &["--resume", "ck"]]));
    assert!(said.contains("ck/manifest.json is missing") && said.contains("--resume ck/step-00000008"), "{said}");
    // Rounds of two and three end together every six steps.
    let rare = ["--checkpoint-dir", "rare", "--checkpoint-every", "4"];
    let said = ends(folder, 0, &flags(&[&TRAIN, &["--stages", "2,3", "--steps", "12"], &rare]));
    assert!(said.contains("every 6 steps: those of every 4 steps at the next such step"), "{said}");
    assert!(folder.join("rare/step-00000006").is_dir() && folder.join("rare/step-00000012").is_dir());
    let never = ["--checkpoint-dir", "never", "--checkpoint-every", "4"];
    let said = ends(folder, 0, &flags(&[&TRAIN, &["--stages", "2,3", "--steps", "5"], &never]));
    assert!(said.contains("warning: no checkpoint will be written: the run ends after 5 steps"), "{said}");
    // The run is complete: nothing is trained, and the weights are written.
    let last = flags(&[&kept, &["--resume", "auto", "--save", "last.safetensors"]]);
    ends(folder, 0, &last);
    assert!(bytes(folder, "last.safetensors") == bytes(folder, "whole.safetensors"));
    // Another run.
    let other = ["--resume", "ck/step-00000004", "--seed", "7", "--momentum", "0.5"];
    let other = ["train", "m.onnx", "--synthetic-data", "--batch", "8", "--stages", "1,2", "--steps", "8"]
        .into_iter()
        .chain(other)
        .collect::<Vec<_>>();
    let said = ends(folder, 2, &other);
    for what in [
        "batch: the checkpoint has `4`, this run `8`",
        "optimizer: the checkpoint has `adam, betas 0.9,0.999, lr 0.01, eps 1e-8, weight decay 0`, this run `sgd, lr 0.01, momentum 0.5, weight decay 0`",
        "seed: the checkpoint has `0`",
    ] {
        assert!(said.contains(what), "{said}");
    }
    assert!(said.contains("--weights ck/step-00000004"), "{said}");
    let said = ends(folder, 2, &flags(&[&TRAIN, &["--stages", "1,2", "--steps", "6", "--resume", "ck/step-00000008"]]));
    assert!(said.contains("from minibatch 8, the run has 6"), "{said}");
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
    let said = ends(folder, 2, &flags(&[&common, &["--resume", "ck/step-00000008"]]));
    assert!(said.contains("stage-1.optimizer.safetensors is damaged"), "{said}");
    let said = ends(folder, 0, &flags(&[&kept, &["--resume", "auto", "--save", "again.safetensors"]]));
    assert!(said.contains("warning: ck/step-00000008 is skipped"), "{said}");
    assert!(said.contains("stage-0.safetensors is missing") && said.contains("resuming after step 4 of 8"), "{said}");
    assert!(bytes(folder, "again.safetensors") == bytes(folder, "whole.safetensors"));
    // The corrupt ones have been rewritten.
    let said = ends(folder, 0, &last);
    assert!(!said.contains("skipped"), "{said}");
    // Without a valid checkpoint, auto starts from the beginning.
    for name in names(folder).iter().filter(|name| name.starts_with("step-")) {
        fs::write(folder.join("ck").join(name).join("manifest.json"), "{\"schema\": \"pipec.checkpoint/1\"").unwrap();
    }
    let said = ends(folder, 0, &last);
    assert!(said.contains("the run starts from the beginning"), "{said}");
    assert!(bytes(folder, "last.safetensors") == bytes(folder, "whole.safetensors"));
}

#[test]
fn other_data_is_another_run() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    ends(folder, 0, &["zoo", "mlp", "--inputs", "2", "--classes", "2", "-o", "m.onnx"]);
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
    ends(folder, 0, &flags(&[&common, &["--data", "one.npz"], &KEPT]));
    let from = ["--resume", "ck/step-00000004"];
    for other in ["features.npz", "labels.npz"] {
        let said = ends(folder, 2, &flags(&[&common, &["--data", other], &from]));
        let both = said.split('`').filter(|digest| digest.len() == 64).collect::<Vec<_>>();
        assert!(said.contains("sha256 of the data: the checkpoint has `"), "{said}");
        assert!(both.len() == 2 && both[0] != both[1], "{said}");
    }
    // Equal data under another name is accepted, and a checkpoint without data information resumes.
    data("again.npz", 0.5, 1);
    ends(folder, 0, &flags(&[&common, &["--data", "again.npz"], &from]));
    let step = folder.join("ck/step-00000004");
    let mut manifest = find::manifest(&step).unwrap();
    manifest.run.remove("sha256 of the data").unwrap();
    fs::write(step.join("manifest.json"), manifest.write()).unwrap();
    ends(folder, 0, &flags(&[&common, &["--data", "features.npz"], &from]));
}

#[test]
fn a_manifest_that_lists_too_little_is_passed_over() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(folder);
    let common = flags(&[&TRAIN, &["--stages", "1,2", "--steps", "8"], &KEPT]);
    ends(folder, 0, &flags(&[&common, &["--save", "whole.safetensors"]]));
    let whole: Vec<_> = [4, 6].map(|step| find::manifest(&folder.join("ck").join(find::name(step))).unwrap()).into();
    for holds in [Holds::Weights, Holds::Optimizer, Holds::InFlight] {
        fs::remove_dir_all(folder.join("ck/step-00000008")).unwrap();
        for (step, manifest) in [4, 6].into_iter().zip(&whole) {
            let mut less = manifest.clone();
            if step == 6 {
                let stage = less.files.iter().find(|file| file.holds == holds).unwrap().stage;
                less.files.retain(|file| (file.holds, file.stage) != (holds, stage));
            }
            fs::write(folder.join("ck").join(find::name(step)).join("manifest.json"), less.write()).unwrap();
        }
        let said =
            ends(folder, 2, &flags(&[&TRAIN, &["--stages", "1,2", "--steps", "8"], &["--resume", "ck/step-00000006"]]));
        assert!(said.contains("cannot resume from ck/step-00000006"), "{holds:?}: {said}");
        let said = ends(folder, 0, &flags(&[&common, &["--resume", "auto", "--save", "rest.safetensors"]]));
        assert!(said.contains("warning: ck/step-00000006 is skipped"), "{holds:?}: {said}");
        assert!(said.contains("resuming after step 4 of 8"), "{holds:?}: {said}");
        assert!(bytes(folder, "rest.safetensors") == bytes(folder, "whole.safetensors"));
    }
}

#[test]
fn a_checkpoint_that_cannot_be_written_costs_the_run_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(folder);
    let common = flags(&[&TRAIN, &["--stages", "1,1", "--steps", "6"]]);
    ends(folder, 0, &flags(&[&common, &["--save", "whole.safetensors"]]));
    // A file blocks the second checkpoint's folder.
    fs::create_dir(folder.join("ck")).unwrap();
    fs::write(folder.join("ck/.step-00000004.part"), "").unwrap();
    let said = ends(folder, 0, &flags(&[&common, &KEPT, &["--save", "kept.safetensors"]]));
    assert!(said.contains("warning: no checkpoint after step 4: cannot write ck/.step-00000004.part"), "{said}");
    assert!(said.contains("the last complete checkpoint stays"), "{said}");
    assert!(bytes(folder, "kept.safetensors") == bytes(folder, "whole.safetensors"));
    assert_eq!(names(folder), [".step-00000004.part", "step-00000002", "step-00000006", "weights.safetensors"]);
}

/// A later run would silently lose the steps after the checkpoint before.
#[test]
fn a_run_without_its_last_checkpoint_does_not_end_well() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(folder);
    let common = flags(&[&TRAIN, &["--stages", "1,1", "--steps", "6"]]);
    ends(folder, 0, &flags(&[&common, &["--save", "whole.safetensors"]]));
    fs::create_dir(folder.join("ck")).unwrap();
    fs::write(folder.join("ck/.step-00000006.part"), "").unwrap();
    for more in [&[][..], &["--processes", "--resume", "auto"]] {
        let said = ends(folder, 1, &flags(&[&common, &KEPT, &["--save", "kept.safetensors"], more]));
        assert!(said.contains("its last checkpoint, after step 6, was not written"), "{said}");
        assert!(said.contains("cannot write ck/.step-00000006.part"), "{said}");
        assert!(said.contains("the newest checkpoint is ck/step-00000004") || !more.is_empty(), "{said}");
        // The results are not lost.
        assert!(bytes(folder, "kept.safetensors") == bytes(folder, "whole.safetensors"));
        assert!(bytes(folder, "ck/weights.safetensors") == bytes(folder, "whole.safetensors"));
    }
    fs::remove_file(folder.join("ck/.step-00000006.part")).unwrap();
    ends(folder, 0, &flags(&[&common, &KEPT, &["--resume", "auto"]]));
    assert!(names(folder).contains(&"step-00000006".to_string()));
}

/// Diverging keeps earlier checkpoints, from which a run with a smaller learning rate resumes.
#[test]
fn a_run_that_diverges_keeps_what_was_good() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    ends(folder, 0, &["zoo", "mlp", "-o", "m.onnx"]);
    let train = ["train", "m.onnx", "--synthetic-data", "--batch", "4", "--workers", "1", "--schedule", "1f1b"];
    let kept = ["--checkpoint-dir", "ck", "--checkpoint-every", "1", "--keep", "1"];
    let message = ends(folder, 1, &flags(&[&train, &kept, &["--steps", "30", "--lr", "1e18"]]));
    // The weights are examined beside the run, so the loss may be found first.
    let [weights, loss] =
        ["contains NaN or infinity", "the loss of step 2 of 30 is NaN"].map(|what| message.contains(what));
    assert!((weights || loss) && message.contains("diverged"), "{message}");
    let steps: Vec<String> = names(folder).into_iter().filter(|name| name.starts_with("step-")).collect();
    let [good] = steps.try_into().unwrap();
    assert_ne!(good, "step-00000030");
    let path = folder.join("ck").join(&good).join("stage-0.safetensors");
    assert!(weights::read(&path).unwrap().values().all(|tensor| tensor.to_f64().iter().all(|v| v.is_finite())));
}

/// With a schedule that decays until the end, a longer run is a different one.
#[test]
fn a_decay_to_another_end_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    model(folder);
    let falls = flags(&[&TRAIN, &KEPT, &["--lr-schedule", "cosine", "--steps"]]);
    ends(folder, 0, &flags(&[&falls, &["4"]]));
    let said = ends(folder, 0, &flags(&[&falls, &["6", "--resume", "auto"]]));
    let message =
        "warning: the run was started with 4 steps, and now has 6: the learning rate now decays towards the new end";
    assert!(said.contains(message), "{said}");
}
