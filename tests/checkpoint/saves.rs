//! Interrupted saves and corrupt checkpoints.

use crate::ready::{bits, checkpoints, cnn, contents, mlp, momentum, plan, ready};
use compiler::plan::schedule::Schedule;
use compiler::tensor::{DType, Tensor};
use runtime::checkpoint::error::CheckpointWriteError;
use runtime::checkpoint::files::{Disk, Files};
use runtime::checkpoint::find::{self};
use runtime::checkpoint::writer::{CheckpointWriter, Saved, WriterConfig};
use runtime::optim::policy::Policy;
use runtime::process::run_status::{LinkError, RunStatus};
use runtime::train::job::RunOptions;
use runtime::train::run::run;
use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;
use std::{fs, io};

/// File operations that fail from operation `left` on: either a killed process, whose last write may be partial, or a
/// full disk.
struct Ending {
    remaining: Cell<usize>,
    is_killed: bool,
}

impl Ending {
    fn next_error(&self) -> Option<io::Error> {
        let remaining = self.remaining.get();
        self.remaining.set(remaining.saturating_sub(1));
        (remaining == 0).then(|| io::Error::from(io::ErrorKind::StorageFull))
    }
}

impl Files for Ending {
    fn make_folder(&self, path: &Path) -> io::Result<()> {
        self.next_error().map_or_else(|| Disk.make_folder(path), Err)
    }

    fn write(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let Some(fault) = self.next_error() else { return Disk.write(path, bytes) };
        // The first failing write is partial, if its folder exists.
        let _ = fs::write(path, &bytes[..bytes.len() / 2]);
        Err(fault)
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        self.next_error().map_or_else(|| Disk.sync_folder(path), Err)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.next_error().map_or_else(|| Disk.rename(from, to), Err)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        // A full disk can still delete files; a killed process does nothing more.
        match self.is_killed {
            true => self.next_error().map_or_else(|| Disk.remove_folder(path), Err),
            false => Disk.remove_folder(path),
        }
    }
}

#[test]
fn whatever_ends_a_save_leaves_a_complete_checkpoint() {
    let ready = ready(&cnn(), plan(Schedule::OneFOneBRr, &[1, 2], 1), momentum(), Policy::default());
    let uninterrupted = tempfile::tempdir().unwrap();
    let expected = ready.run(None, uninterrupted.path(), None);
    for is_killed in [true, false] {
        for operations in 0.. {
            let folder = tempfile::tempdir().unwrap();
            let files = Ending { remaining: Cell::new(operations), is_killed };
            let mut writer = CheckpointWriter::new(
                files,
                WriterConfig { keep: Some(1), ..ready.writer_config(folder.path(), &ready.weights) },
            );
            let mut outcomes: Vec<Saved> = Vec::new();
            // After a kill the state is inspected immediately; with a full disk, after the run.
            let mut newest: Option<u32> = None;
            let mut snapshots = Vec::new();
            let options = RunOptions {
                cuts: Some(ready.cuts()),
                on_snapshot: Some(&mut |snapshot| snapshots.push(snapshot)),
                ..RunOptions::default()
            };
            let trained = run(&ready.training(&ready.weights), options, &mut |_| {}).unwrap();
            assert_eq!(bits(&trained.losses), bits(&expected.losses));
            for snapshot in snapshots {
                outcomes.extend(writer.take(snapshot));
                let complete = find::all(folder.path()).unwrap();
                let complete = complete.iter().filter_map(|(of, path)| find::read(path).ok().map(|_| *of)).max();
                assert!(
                    complete >= newest,
                    "killed {is_killed}, after {operations}: {newest:?} was complete, {complete:?} is"
                );
                newest = complete;
            }
            let failed = outcomes.iter().filter(|saved| matches!(saved, Saved::Failed { .. })).count();
            let write_error = outcomes.iter().find_map(|saved| match saved {
                Saved::Failed { fault, .. } => Some(fault.to_string()),
                Saved::Done { left, .. } => left.as_ref().map(ToString::to_string),
            });
            if let Some(write_error) = &write_error {
                assert!(write_error.starts_with("cannot write"), "{write_error}");
            }
            // Incomplete checkpoints are removed, except after a kill.
            let names: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
            assert!(is_killed || names.iter().all(|name| !name.to_str().unwrap().starts_with('.')), "{names:?}");
            let Some(newest) = newest else { continue };
            let checkpoint = find::read(&folder.path().join(find::name(newest))).unwrap();
            let resumed_folder = tempfile::tempdir().unwrap();
            let resumed = ready.run(Some(&checkpoint), resumed_folder.path(), None);
            assert_eq!(bits(&resumed.losses), bits(&expected.losses[newest as usize..]));
            assert!(resumed.weights == expected.weights);
            // The next run cleans up.
            drop(CheckpointWriter::new(Disk, ready.writer_config(folder.path(), &ready.weights)));
            let names: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
            assert!(names.iter().all(|name| !name.to_str().unwrap().starts_with('.')), "{names:?}");
            if failed == 0 && write_error.is_none() {
                assert!(operations > 20, "a save has more operations than {operations}");
                assert_eq!(names.len(), 1, "one is kept");
                break;
            }
        }
    }
}

/// A resumed run reaches an existing checkpoint again.
#[test]
fn whatever_ends_a_save_that_takes_the_place_of_another_one_of_them_is_left() {
    let ready = ready(&mlp(), plan(Schedule::OneFOneBRr, &[1, 1], 1), momentum(), Policy::default());
    for operations in 0.. {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let save = |files: &dyn Fn() -> Ending| {
            let mut writer = CheckpointWriter::new(files(), ready.writer_config(root, &ready.weights));
            let mut snapshots = Vec::new();
            let options = RunOptions {
                cuts: Some(ready.cuts()),
                on_snapshot: Some(&mut |snapshot| snapshots.push(snapshot)),
                ..RunOptions::default()
            };
            run(&ready.training(&ready.weights), options, &mut |_| {}).unwrap();
            let first = snapshots.iter().map(|snapshot| snapshot.key.minibatches).min();
            snapshots.retain(|snapshot| Some(snapshot.key.minibatches) == first);
            snapshots.into_iter().filter_map(|snapshot| writer.take(snapshot)).last()
        };
        save(&|| Ending { remaining: Cell::new(usize::MAX), is_killed: true });
        let expected = contents(&root.join(find::name(ready.every)));
        let saved = save(&|| Ending { remaining: Cell::new(operations), is_killed: true });
        let candidates = find::candidates(root).unwrap();
        let complete = candidates.iter().find(|(_, path)| find::read(path).is_ok());
        let (minibatches, path) =
            complete.unwrap_or_else(|| panic!("killed after {operations}: nothing is left of {candidates:?}"));
        assert_eq!(*minibatches, ready.every);
        assert!(contents(path) == expected, "killed after {operations}");
        // The next run restores its name and cleans up.
        drop(CheckpointWriter::new(Disk, ready.writer_config(root, &ready.weights)));
        let names: Vec<_> = fs::read_dir(root).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, [find::name(ready.every).as_str()], "killed after {operations}");
        assert!(contents(&root.join(find::name(ready.every))) == expected, "killed after {operations}");
        if matches!(saved, Some(Saved::Done { left: None, .. })) {
            assert!(operations > 10, "a save has more operations than {operations}");
            break;
        }
    }
}

#[test]
fn broken_checkpoints_are_named_and_not_read() {
    let ready = ready(&mlp(), plan(Schedule::OneFOneBRr, &[1, 1], 1), momentum(), Policy::default());
    let complete = tempfile::tempdir().unwrap();
    ready.run(None, complete.path(), None);
    let valid = &checkpoints(complete.path())[0].1;
    let read_error = |change: &dyn Fn(&Path)| {
        let folder = tempfile::tempdir().unwrap();
        for (name, bytes) in contents(valid) {
            fs::write(folder.path().join(name), bytes).unwrap();
        }
        change(folder.path());
        find::read(folder.path()).unwrap_err().to_string()
    };
    for name in contents(valid).into_keys() {
        let missing = read_error(&|folder| fs::remove_file(folder.join(&name)).unwrap());
        assert!(missing.contains(&name) && missing.contains("missing"), "{missing}");
        let flipped = read_error(&|folder| {
            let mut bytes = fs::read(folder.join(&name)).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            fs::write(folder.join(&name), bytes).unwrap();
        });
        assert!(flipped.contains(&name), "{flipped}");
        let short = read_error(&|folder| {
            let bytes = fs::read(folder.join(&name)).unwrap();
            fs::write(folder.join(&name), &bytes[..bytes.len() / 3]).unwrap();
        });
        assert!(short.contains(&name), "{short}");
        let long = read_error(&|folder| {
            let bytes = fs::read(folder.join(&name)).unwrap();
            fs::write(folder.join(&name), [bytes, vec![b'}'; 9]].concat()).unwrap();
        });
        assert!(long.contains(&name), "{long}");
    }
    #[cfg(unix)]
    {
        let link = read_error(&|folder| {
            fs::remove_file(folder.join("stage-0.safetensors")).unwrap();
            std::os::unix::fs::symlink(valid.join("stage-0.safetensors"), folder.join("stage-0.safetensors")).unwrap();
        });
        assert!(link.contains("not a regular file"), "{link}");
    }
    // A checkpoint with valid files but wrong tensors is rejected on resume.
    let mut checkpoint = find::read(valid).unwrap();
    let name = checkpoint.start.optimizer.keys().find(|name| name.ends_with("momentum_buffer")).unwrap().clone();
    checkpoint.start.optimizer.insert(name.clone(), Tensor::zeros(DType::F32, &[1]));
    let mut weights = ready.weights.clone();
    weights.extend(checkpoint.weights.clone());
    let options = RunOptions { start: Some(&checkpoint.start), ..RunOptions::default() };
    let fault = run(&ready.training(&weights), options, &mut |_| {}).err().unwrap().to_string();
    assert!(fault.contains("the run needs f32["), "{fault}");
    for count in [i64::MIN, -1, i64::MAX, 1 << 33] {
        let mut checkpoint = find::read(valid).unwrap();
        let steps = checkpoint.start.optimizer.iter_mut().filter(|(name, _)| name.ends_with("/step"));
        steps.for_each(|(_, tensor)| *tensor = Tensor::from_i64(&[], &[count]));
        let options = RunOptions { start: Some(&checkpoint.start), ..RunOptions::default() };
        let fault = run(&ready.training(&weights), options, &mut |_| {}).err().unwrap().to_string();
        assert!(fault.contains("/step` of the checkpoint is something else, the run needs an update count"), "{fault}");
    }
    checkpoint.start.optimizer.remove(&name);
    let options = RunOptions { start: Some(&checkpoint.start), ..RunOptions::default() };
    let fault = run(&ready.training(&weights), options, &mut |_| {}).err().unwrap().to_string();
    assert!(fault.contains("the checkpoint has no") && fault.contains(&name), "{fault}");
}

#[test]
fn a_run_that_failed_completes_no_checkpoint() {
    let ready = ready(&mlp(), plan(Schedule::OneFOneBRr, &[1, 1], 1), momentum(), Policy::default());
    let folder = tempfile::tempdir().unwrap();
    let run_status = Arc::new(RunStatus::default());
    let writer = CheckpointWriter::new(Disk, ready.writer_config(folder.path(), &ready.weights));
    let mut writer = writer.ending_with(Some(Box::new(|| run_status.cause().map(|cause| cause.to_string()))));
    let (mut completed, mut failed) = (0, 0);
    let mut on_snapshot = |snapshot| match writer.take(snapshot) {
        None => {}
        Some(Saved::Done { .. }) => {
            completed += 1;
            run_status.end(LinkError::Ended { process: None, what: "a process was lost".to_string() });
        }
        Some(Saved::Failed { fault, .. }) => {
            assert!(matches!(fault, CheckpointWriteError::RunFailed { .. }), "{fault}");
            failed += 1;
        }
    };
    let options = RunOptions { cuts: Some(ready.cuts()), on_snapshot: Some(&mut on_snapshot), ..RunOptions::default() };
    run(&ready.training(&ready.weights), options, &mut |_| {}).unwrap();
    assert!(failed > 0, "one checkpoint only");
    assert_eq!((completed, fs::read_dir(folder.path()).unwrap().count()), (1, 1), "the folder has only the first");
}
