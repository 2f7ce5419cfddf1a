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
    left: Cell<usize>,
    is_killed: bool,
}

impl Ending {
    fn ends(&self) -> Option<io::Error> {
        let left = self.left.get();
        self.left.set(left.saturating_sub(1));
        (left == 0).then(|| io::Error::from(io::ErrorKind::StorageFull))
    }
}

impl Files for Ending {
    fn make_folder(&self, path: &Path) -> io::Result<()> {
        self.ends().map_or_else(|| Disk.make_folder(path), Err)
    }

    fn write(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let Some(fault) = self.ends() else { return Disk.write(path, bytes) };
        // The first failing write is partial, if its folder exists.
        let _ = fs::write(path, &bytes[..bytes.len() / 2]);
        Err(fault)
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        self.ends().map_or_else(|| Disk.sync_folder(path), Err)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.ends().map_or_else(|| Disk.rename(from, to), Err)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        // A full disk can still delete files; a killed process does nothing more.
        match self.is_killed {
            true => self.ends().map_or_else(|| Disk.remove_folder(path), Err),
            false => Disk.remove_folder(path),
        }
    }
}

#[test]
fn whatever_ends_a_save_leaves_a_complete_checkpoint() {
    let ready = ready(&cnn(), plan(Schedule::OneFOneBRr, &[1, 2], 1), momentum(), Policy::default());
    let undisturbed = tempfile::tempdir().unwrap();
    let whole = ready.run(None, undisturbed.path(), None);
    for is_killed in [true, false] {
        for left in 0.. {
            let folder = tempfile::tempdir().unwrap();
            let files = Ending { left: Cell::new(left), is_killed };
            let mut keeper = CheckpointWriter::new(
                files,
                WriterConfig { keep: Some(1), ..ready.kept(folder.path(), &ready.weights) },
            );
            let mut seen: Vec<Saved> = Vec::new();
            // After a kill the state is inspected immediately; with a full disk, after the run.
            let mut best: Option<u32> = None;
            let mut parts = Vec::new();
            let course = RunOptions {
                cuts: Some(ready.cuts()),
                on_part: Some(&mut |part| parts.push(part)),
                ..RunOptions::default()
            };
            let done = run(&ready.training(&ready.weights), course, &mut |_| {}).unwrap();
            assert_eq!(bits(&done.losses), bits(&whole.losses));
            for part in parts {
                seen.extend(keeper.take(part));
                let complete = find::all(folder.path()).unwrap();
                let complete = complete.iter().filter_map(|(of, path)| find::read(path).ok().map(|_| *of)).max();
                assert!(complete >= best, "killed {is_killed}, after {left}: {best:?} was complete, {complete:?} is");
                best = complete;
            }
            let failed = seen.iter().filter(|saved| matches!(saved, Saved::Failed { .. })).count();
            let write_error = seen.iter().find_map(|saved| match saved {
                Saved::Failed { fault, .. } => Some(fault.to_string()),
                Saved::Done { left, .. } => left.as_ref().map(ToString::to_string),
            });
            if let Some(write_error) = &write_error {
                assert!(write_error.starts_with("cannot write"), "{write_error}");
            }
            // Incomplete checkpoints are removed, except after a kill.
            let names: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
            assert!(is_killed || names.iter().all(|name| !name.to_str().unwrap().starts_with('.')), "{names:?}");
            let Some(best) = best else { continue };
            let found = find::read(&folder.path().join(find::name(best))).unwrap();
            let again = tempfile::tempdir().unwrap();
            let rest = ready.run(Some(&found), again.path(), None);
            assert_eq!(bits(&rest.losses), bits(&whole.losses[best as usize..]));
            assert!(rest.weights == whole.weights);
            // The next run cleans up.
            drop(CheckpointWriter::new(Disk, ready.kept(folder.path(), &ready.weights)));
            let names: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
            assert!(names.iter().all(|name| !name.to_str().unwrap().starts_with('.')), "{names:?}");
            if failed == 0 && write_error.is_none() {
                assert!(left > 20, "a save has more operations than {left}");
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
    for left in 0.. {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path();
        let save = |files: &dyn Fn() -> Ending| {
            let mut keeper = CheckpointWriter::new(files(), ready.kept(at, &ready.weights));
            let mut parts = Vec::new();
            let course = RunOptions {
                cuts: Some(ready.cuts()),
                on_part: Some(&mut |part| parts.push(part)),
                ..RunOptions::default()
            };
            run(&ready.training(&ready.weights), course, &mut |_| {}).unwrap();
            let first = parts.iter().map(|part| part.minibatches).min();
            parts.retain(|part| Some(part.minibatches) == first);
            parts.into_iter().filter_map(|part| keeper.take(part)).last()
        };
        save(&|| Ending { left: Cell::new(usize::MAX), is_killed: true });
        let expected = contents(&at.join(find::name(ready.every)));
        let saved = save(&|| Ending { left: Cell::new(left), is_killed: true });
        let known = find::known(at).unwrap();
        let whole = known.iter().find(|(_, path)| find::read(path).is_ok());
        let (minibatches, path) = whole.unwrap_or_else(|| panic!("killed after {left}: nothing is left of {known:?}"));
        assert_eq!(*minibatches, ready.every);
        assert!(contents(path) == expected, "killed after {left}");
        // The next run restores its name and cleans up.
        drop(CheckpointWriter::new(Disk, ready.kept(at, &ready.weights)));
        let names: Vec<_> = fs::read_dir(at).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, [find::name(ready.every).as_str()], "killed after {left}");
        assert!(contents(&at.join(find::name(ready.every))) == expected, "killed after {left}");
        if matches!(saved, Some(Saved::Done { left: None, .. })) {
            assert!(left > 10, "a save has more operations than {left}");
            break;
        }
    }
}

#[test]
fn broken_checkpoints_are_named_and_not_read() {
    let ready = ready(&mlp(), plan(Schedule::OneFOneBRr, &[1, 1], 1), momentum(), Policy::default());
    let whole = tempfile::tempdir().unwrap();
    ready.run(None, whole.path(), None);
    let good = &checkpoints(whole.path())[0].1;
    let broken = |change: &dyn Fn(&Path)| {
        let folder = tempfile::tempdir().unwrap();
        for (name, bytes) in contents(good) {
            fs::write(folder.path().join(name), bytes).unwrap();
        }
        change(folder.path());
        find::read(folder.path()).unwrap_err().to_string()
    };
    for name in contents(good).into_keys() {
        let missing = broken(&|folder| fs::remove_file(folder.join(&name)).unwrap());
        assert!(missing.contains(&name) && missing.contains("missing"), "{missing}");
        let flipped = broken(&|folder| {
            let mut bytes = fs::read(folder.join(&name)).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            fs::write(folder.join(&name), bytes).unwrap();
        });
        assert!(flipped.contains(&name), "{flipped}");
        let short = broken(&|folder| {
            let bytes = fs::read(folder.join(&name)).unwrap();
            fs::write(folder.join(&name), &bytes[..bytes.len() / 3]).unwrap();
        });
        assert!(short.contains(&name), "{short}");
        let long = broken(&|folder| {
            let bytes = fs::read(folder.join(&name)).unwrap();
            fs::write(folder.join(&name), [bytes, vec![b'}'; 9]].concat()).unwrap();
        });
        assert!(long.contains(&name), "{long}");
    }
    #[cfg(unix)]
    {
        let link = broken(&|folder| {
            fs::remove_file(folder.join("stage-0.safetensors")).unwrap();
            std::os::unix::fs::symlink(good.join("stage-0.safetensors"), folder.join("stage-0.safetensors")).unwrap();
        });
        assert!(link.contains("not a regular file"), "{link}");
    }
    // A checkpoint with valid files but wrong tensors is rejected on resume.
    let mut found = find::read(good).unwrap();
    let name = found.start.optimizer.keys().find(|name| name.ends_with("momentum_buffer")).unwrap().clone();
    found.start.optimizer.insert(name.clone(), Tensor::zeros(DType::F32, &[1]));
    let mut weights = ready.weights.clone();
    weights.extend(found.weights.clone());
    let course = RunOptions { start: Some(&found.start), ..RunOptions::default() };
    let fault = run(&ready.training(&weights), course, &mut |_| {}).err().unwrap().to_string();
    assert!(fault.contains("the run needs f32["), "{fault}");
    for count in [i64::MIN, -1, i64::MAX, 1 << 33] {
        let mut found = find::read(good).unwrap();
        let steps = found.start.optimizer.iter_mut().filter(|(name, _)| name.ends_with("/step"));
        steps.for_each(|(_, tensor)| *tensor = Tensor::from_i64(&[], &[count]));
        let course = RunOptions { start: Some(&found.start), ..RunOptions::default() };
        let fault = run(&ready.training(&weights), course, &mut |_| {}).err().unwrap().to_string();
        assert!(fault.contains("/step` of the checkpoint is something else, the run needs an update count"), "{fault}");
    }
    found.start.optimizer.remove(&name);
    let course = RunOptions { start: Some(&found.start), ..RunOptions::default() };
    let fault = run(&ready.training(&weights), course, &mut |_| {}).err().unwrap().to_string();
    assert!(fault.contains("the checkpoint has no") && fault.contains(&name), "{fault}");
}

#[test]
fn a_run_that_failed_completes_no_checkpoint() {
    let ready = ready(&mlp(), plan(Schedule::OneFOneBRr, &[1, 1], 1), momentum(), Policy::default());
    let folder = tempfile::tempdir().unwrap();
    let run_status = Arc::new(RunStatus::default());
    let keeper = CheckpointWriter::new(Disk, ready.kept(folder.path(), &ready.weights));
    let mut keeper = keeper.ending_with(Some(Box::new(|| run_status.cause().map(|cause| cause.to_string()))));
    let (mut done, mut failed) = (0, 0);
    let mut on_part = |part| match keeper.take(part) {
        None => {}
        Some(Saved::Done { .. }) => {
            done += 1;
            run_status.end(LinkError::Ended { process: None, what: "a process was lost".to_string() });
        }
        Some(Saved::Failed { fault, .. }) => {
            assert!(matches!(fault, CheckpointWriteError::RunFailed { .. }), "{fault}");
            failed += 1;
        }
    };
    let course = RunOptions { cuts: Some(ready.cuts()), on_part: Some(&mut on_part), ..RunOptions::default() };
    run(&ready.training(&ready.weights), course, &mut |_| {}).unwrap();
    assert!(failed > 0, "one checkpoint only");
    assert_eq!((done, fs::read_dir(folder.path()).unwrap().count()), (1, 1), "the folder has only the first");
}
