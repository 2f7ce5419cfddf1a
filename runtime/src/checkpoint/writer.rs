//! Writes snapshots as they arrive, and renames a checkpoint to its final name when all of it is on disk.
//!
//! ```text
//! make .step-00000012.part        for the first snapshot
//! write its files                 for every snapshot: each file is on disk before the next begins
//! write manifest.json             when all snapshots are there
//! drop it                         if tensors go over NCCL and the run has failed
//! sync the folder, rename it to step-00000012, sync the folder above; an older one of that name is .step-00000012.old before
//! remove older checkpoints        all but the newest few, where --keep asks for it
//! ```
//!
//! If the process ends at any point, the last complete checkpoint still exists. A failed write only loses this
//! checkpoint: its folder is removed and the run continues.

use crate::checkpoint::encode::{files, find_non_finite};
use crate::checkpoint::error::CheckpointWriteError;
use crate::checkpoint::files::Files;
use crate::checkpoint::find::{all, leftovers, name, old_name, part_name, read};
use crate::checkpoint::manifest::{Cursor, FILE, Listed, Manifest, SCHEMA, Scale, ShardLayout};
use crate::checkpoint::merge_shards::merge_shards;
use crate::checkpoint::{MergeKey, StageSnapshot};
use crate::exec::stage_code::StageCode;
use crate::optim::optimizer::Optimizer;
use compiler::graph::hash::sha256;
use compiler::tensor::Tensor;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

/// The run as the writer sees it.
pub struct WriterConfig<'a> {
    /// The existing folder of the run's checkpoints.
    pub folder: PathBuf,
    /// Number of checkpoints to keep; `None` keeps all.
    pub keep: Option<usize>,
    /// Minibatches at which the run was resumed.
    pub resumed_at: Option<u32>,
    /// Settings that determine the results; see [`Manifest::run`].
    pub run: BTreeMap<String, String>,
    pub plan: ShardLayout,
    pub steps: u32,
    pub per_epoch: u32,
    pub codes: &'a [StageCode],
    pub optimizer: &'a Optimizer,
    /// Initial weights and states.
    pub initial: &'a BTreeMap<String, Tensor>,
}

/// The outcome of a checkpoint.
#[derive(Debug)]
pub enum Saved {
    Done {
        minibatches: u32,
        folder: PathBuf,
        /// An error after completion: an older checkpoint could not be removed, or the folder could not be synced.
        left: Option<CheckpointWriteError>,
    },
    Failed {
        minibatches: u32,
        fault: CheckpointWriteError,
    },
}

/// Why a run has failed, if it has.
pub type Failure<'a> = Box<dyn Fn() -> Option<String> + Send + 'a>;

/// Writes the checkpoints of a run.
pub struct CheckpointWriter<'a, F> {
    files: F,
    config: WriterConfig<'a>,
    open: BTreeMap<u32, Open>,
    failure: Option<Failure<'a>>,
}

/// A checkpoint whose snapshots have not all arrived.
#[derive(Default)]
struct Open {
    parts: usize,
    /// ZeRO shards waiting for those of other replicas.
    snapshots: BTreeMap<MergeKey, Vec<StageSnapshot>>,
    has_folder: bool,
    listed: Vec<Listed>,
    scale: Option<Scale>,
    fault: Option<CheckpointWriteError>,
}

impl<'a, F: Files> CheckpointWriter<'a, F> {
    /// Cleans up after an earlier run. Incomplete checkpoints are removed. A complete one that was left under a hidden
    /// name during a replacement gets its name back, unless the checkpoint with that name is complete.
    pub fn new(files: F, config: WriterConfig<'a>) -> CheckpointWriter<'a, F> {
        for (minibatches, path) in leftovers(&config.folder).unwrap_or_default() {
            let named_folder = config.folder.join(name(minibatches));
            let (has_named, is_lost) =
                (named_folder.symlink_metadata().is_ok(), read(&path).is_ok() && read(&named_folder).is_err());
            // A leftover that cannot be removed does no harm.
            let _ = match is_lost {
                true if has_named => {
                    files.remove_folder(&named_folder).and_then(|()| files.rename(&path, &named_folder))
                }
                true => files.rename(&path, &named_folder),
                false => files.remove_folder(&path),
            };
        }
        let writer = CheckpointWriter { files, config, open: BTreeMap::new(), failure: None };
        // The earlier run may have ended before it removed old checkpoints.
        if let Some(resumed_at) = writer.config.resumed_at {
            let _ = writer.remove_older(resumed_at);
        }
        writer
    }

    /// Completes no checkpoint after the run has failed. Links between devices end without their tensors then, but the
    /// cause is known before.
    pub fn ending_with(self, failure: Option<Failure<'a>>) -> CheckpointWriter<'a, F> {
        CheckpointWriter { failure, ..self }
    }

    /// Writes a snapshot. The last one of a checkpoint returns the outcome.
    pub fn take(&mut self, snapshot: StageSnapshot) -> Option<Saved> {
        let minibatches = snapshot.key.minibatches;
        let mut open = self.open.remove(&minibatches).unwrap_or_default();
        open.parts += 1;
        let (key, replicas) = (snapshot.key.merge_key(), snapshot.key.replicas as usize);
        let waiting = open.snapshots.entry(key).or_default();
        waiting.push(snapshot);
        if waiting.len() >= replicas {
            let snapshots = open.snapshots.remove(&key).unwrap_or_default();
            let write_all = |open: &mut Open| {
                merge_shards(snapshots)?.iter().try_for_each(|snapshot| self.write_part(snapshot, open))
            };
            if open.fault.is_none()
                && let Err(fault) = write_all(&mut open)
            {
                // Free disk space for the next checkpoint.
                let _ = self.files.remove_folder(&self.part_folder(minibatches));
                open.fault = Some(fault);
            }
        }
        let expected: usize = self.config.plan.stages.iter().map(|stage| stage.replicas as usize).sum();
        if open.parts < expected {
            self.open.insert(minibatches, open);
            return None;
        }
        let outcome = match open.fault.take() {
            Some(fault) => Err(fault),
            None => self.complete(minibatches, open),
        };
        Some(match outcome {
            Ok((folder, left)) => {
                let removal_error = self.remove_older(minibatches).err();
                Saved::Done { minibatches, folder, left: left.or(removal_error) }
            }
            Err(fault) => {
                let _ = self.files.remove_folder(&self.part_folder(minibatches));
                Saved::Failed { minibatches, fault }
            }
        })
    }

    fn part_folder(&self, minibatches: u32) -> PathBuf {
        self.config.folder.join(part_name(minibatches))
    }

    fn write_part(&self, snapshot: &StageSnapshot, open: &mut Open) -> Result<(), CheckpointWriteError> {
        let folder = self.part_folder(snapshot.key.minibatches);
        if !open.has_folder {
            open.has_folder = true;
            write_result(&folder, self.files.make_folder(&folder))?;
        }
        let (stage, replica) = (snapshot.key.stage.0, snapshot.key.replica);
        let code = &self.config.codes[snapshot.key.stage.index()];
        if let Some(name) = find_non_finite(snapshot, code)? {
            return Err(CheckpointWriteError::NotFinite { name: name.to_string() });
        }
        for (holds, bytes) in files(snapshot, code, self.config.optimizer, self.config.initial)? {
            let name = holds.file_name(stage, replica);
            let path = folder.join(&name);
            write_result(&path, self.files.write(&path, &bytes))?;
            let (length, sha256) = (bytes.len() as u64, sha256(&bytes));
            open.listed.push(Listed { name, holds, stage, replica, bytes: length, sha256 });
        }
        let scale = snapshot.state.as_ref().and_then(|state| state.scale);
        open.scale = scale.map(|(value, good)| Scale { value, good }).or(open.scale.take());
        Ok(())
    }

    /// Renames a checkpoint to its final name. Also returns an error that occurred after completion.
    fn complete(
        &self,
        minibatches: u32,
        open: Open,
    ) -> Result<(PathBuf, Option<CheckpointWriteError>), CheckpointWriteError> {
        let Open { mut listed, scale, .. } = open;
        listed.sort_by(|a, b| (a.stage, a.replica, &a.name).cmp(&(b.stage, b.replica, &b.name)));
        let per_epoch = self.config.per_epoch.max(1);
        let manifest = Manifest {
            schema: SCHEMA.to_string(),
            minibatches,
            steps: self.config.steps,
            cursor: Cursor { epoch: minibatches / per_epoch, minibatch: minibatches % per_epoch },
            loss_scale: scale,
            run: self.config.run.clone(),
            plan: self.config.plan.clone(),
            files: listed,
            sha256: String::new(),
        };
        let (part_folder, named_folder) = (self.part_folder(minibatches), self.config.folder.join(name(minibatches)));
        let path = part_folder.join(FILE);
        write_result(&path, self.files.write(&path, &manifest.write()))?;
        write_result(&part_folder, self.files.sync_folder(&part_folder))?;
        // All snapshots were downloaded before.
        if let Some(cause) = self.failure.as_ref().and_then(|failure| failure()) {
            return Err(CheckpointWriteError::RunFailed { cause });
        }
        // A run resumed from an older checkpoint reaches an existing, possibly broken, checkpoint again.
        let old = self.config.folder.join(old_name(minibatches));
        let is_replaced = named_folder.symlink_metadata().is_ok();
        if is_replaced {
            write_result(&old, self.files.remove_folder(&old))?;
            write_result(&named_folder, self.files.rename(&named_folder, &old))?;
        }
        if let Err(fault) = write_result(&named_folder, self.files.rename(&part_folder, &named_folder)) {
            if is_replaced {
                // If this fails too, the next run restores the name.
                let _ = self.files.rename(&old, &named_folder);
            }
            return Err(fault);
        }
        let synced = write_result(&self.config.folder, self.files.sync_folder(&self.config.folder));
        let removed = if is_replaced { write_result(&old, self.files.remove_folder(&old)) } else { Ok(()) };
        Ok((named_folder, synced.and(removed).err()))
    }

    /// Removes all but the newest checkpoints up to `newest`. Renaming first hides partly removed ones from readers.
    fn remove_older(&self, newest: u32) -> Result<(), CheckpointWriteError> {
        let Some(keep) = self.config.keep else { return Ok(()) };
        let checkpoints = all(&self.config.folder).unwrap_or_default();
        let older = checkpoints.into_iter().filter(|(minibatches, _)| *minibatches <= newest);
        for (minibatches, folder) in older.skip(keep.max(1)) {
            let old = self.config.folder.join(old_name(minibatches));
            write_result(&old, self.files.remove_folder(&old))?;
            write_result(&folder, self.files.rename(&folder, &old))?;
            write_result(&old, self.files.remove_folder(&old))?;
        }
        Ok(())
    }
}

fn write_result(path: &Path, result: io::Result<()>) -> Result<(), CheckpointWriteError> {
    result.map_err(|fault| CheckpointWriteError::Write { path: path.to_path_buf(), fault })
}
