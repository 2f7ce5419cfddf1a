//! Finds checkpoints in a folder and reads them. Every file must match the length and hash in the manifest.

use crate::checkpoint::encode::{Flight, Holds, decode_flight};
use crate::checkpoint::manifest::{FILE, LARGEST, Listed, Manifest};
use crate::checkpoint::resume_point::ResumePoint;
use crate::data::weights;
use compiler::graph::hash::sha256;
use compiler::tensor::Tensor;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use thiserror::Error;

#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum FindError {
    #[error("cannot read {path}: {fault}")]
    Read { path: PathBuf, fault: io::Error },
    #[error("{path}: {fault}")]
    Manifest { path: PathBuf, fault: String },
    #[error("{path} is missing")]
    Missing { path: PathBuf },
    #[error("{path} has {got} bytes, its manifest states {expected}")]
    Length { path: PathBuf, got: u64, expected: u64 },
    #[error("{path} is damaged: its sha256 is {got}, its manifest states {expected}")]
    Hash { path: PathBuf, got: String, expected: String },
    #[error(transparent)]
    Tensors(#[from] weights::FileError),
    #[error("{path} has a tensor `{name}`, which is not an in-flight tensor name")]
    Name { path: PathBuf, name: String },
    #[error("{path}: `{name}` is also in another file of the checkpoint, with other content")]
    Twice { path: PathBuf, name: String },
}

const PREFIX: &str = "step-";

/// Suffixes of hidden names: an incomplete checkpoint, and a replaced one.
const PART: &str = ".part";
const OLD: &str = ".old";

/// Hidden name of a checkpoint while it is written.
pub fn part_name(minibatches: u32) -> String {
    format!(".{}{PART}", name(minibatches))
}

/// Hidden name of a checkpoint about to be removed.
pub fn old_name(minibatches: u32) -> String {
    format!(".{}{OLD}", name(minibatches))
}

fn hidden(name: &str) -> Option<u32> {
    let name = name.strip_prefix('.')?;
    minibatches(name.strip_suffix(PART).or_else(|| name.strip_suffix(OLD))?)
}

/// Name of the checkpoint after `minibatches`.
pub fn name(minibatches: u32) -> String {
    format!("{PREFIX}{minibatches:08}")
}

/// Minibatch count of a checkpoint name.
pub fn minibatches(name: &str) -> Option<u32> {
    let digits = name.strip_prefix(PREFIX)?;
    let is_number = digits.len() >= 8 && digits.bytes().all(|digit| digit.is_ascii_digit());
    is_number.then(|| digits.parse().ok()).flatten()
}

/// Folders with checkpoint names, newest first; empty if `folder` does not exist.
pub fn all(folder: &Path) -> Result<Vec<(u32, PathBuf)>, FindError> {
    named(folder, minibatches)
}

/// Folders with hidden names, left by an interrupted save. If it was replacing a checkpoint, both may be complete; the
/// new one comes first.
pub fn leftovers(folder: &Path) -> Result<Vec<(u32, PathBuf)>, FindError> {
    named(folder, hidden)
}

/// Candidates to resume from, newest first. Named checkpoints come before leftovers of the same step; a leftover needs
/// a valid manifest.
pub fn candidates(folder: &Path) -> Result<Vec<(u32, PathBuf)>, FindError> {
    let mut candidates = all(folder)?;
    candidates.extend(leftovers(folder)?.into_iter().filter(|(_, path)| manifest(path).is_ok()));
    // A stable sort keeps that order within a step.
    candidates.sort_by_key(|(minibatches, _)| Reverse(*minibatches));
    Ok(candidates)
}

fn named(folder: &Path, number: impl Fn(&str) -> Option<u32>) -> Result<Vec<(u32, PathBuf)>, FindError> {
    let read_error = |fault| FindError::Read { path: folder.to_path_buf(), fault };
    let entries = match fs::read_dir(folder) {
        Err(fault) if fault.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(read_error)?,
    };
    let mut checkpoints = Vec::new();
    for entry in entries {
        let entry = entry.map_err(read_error)?;
        if let Some(minibatches) = entry.file_name().to_str().and_then(&number) {
            checkpoints.push((minibatches, entry.path()));
        }
    }
    checkpoints.sort_unstable_by(|a, b| b.cmp(a));
    Ok(checkpoints)
}

pub fn manifest(folder: &Path) -> Result<Manifest, FindError> {
    let path = folder.join(FILE);
    let bytes = read_regular(&path, LARGEST)?;
    Manifest::read(&bytes).map_err(|fault| FindError::Manifest { path, fault })
}

/// A checkpoint read from disk.
#[derive(Debug)]
pub struct Found {
    pub manifest: Manifest,
    pub weights: BTreeMap<String, Tensor>,
    /// The remaining state, including in-flight state even if the plan has changed.
    pub start: ResumePoint,
}

/// Reads a checkpoint and verifies all its files.
pub fn read(folder: &Path) -> Result<Found, FindError> {
    let manifest = manifest(folder)?;
    let (mut weights, mut optimizer) = (BTreeMap::new(), BTreeMap::new());
    let mut in_flight: BTreeMap<(u32, u32), Flight> = BTreeMap::new();
    for listed in &manifest.files {
        let path = folder.join(&listed.name);
        let tensors = weights::decode(&path, &read_verified(&path, listed)?)?;
        match listed.holds {
            Holds::Weights => gather(&mut weights, tensors, &path)?,
            Holds::Optimizer => gather(&mut optimizer, tensors, &path)?,
            Holds::InFlight => {
                let state = decode_flight(tensors).map_err(|name| FindError::Name { path, name })?;
                in_flight.insert((listed.stage, listed.replica), state);
            }
        }
    }
    let scale = manifest.loss_scale.as_ref().map(|scale| (scale.value, scale.good));
    let start = ResumePoint { minibatches: manifest.minibatches, scale, optimizer, flight: Some(in_flight) };
    Ok(Found { manifest, weights, start })
}

/// Reads only the parameters and states.
pub fn read_weights(folder: &Path) -> Result<BTreeMap<String, Tensor>, FindError> {
    let mut weights = BTreeMap::new();
    for listed in manifest(folder)?.files.iter().filter(|listed| listed.holds == Holds::Weights) {
        let path = folder.join(&listed.name);
        gather(&mut weights, weights::decode(&path, &read_verified(&path, listed)?)?, &path)?;
    }
    Ok(weights)
}

/// Merges tensors; those in several stages must be equal.
fn gather(
    merged: &mut BTreeMap<String, Tensor>,
    tensors: BTreeMap<String, Tensor>,
    path: &Path,
) -> Result<(), FindError> {
    for (name, tensor) in tensors {
        let existing = merged.entry(name.clone()).or_insert_with(|| tensor.clone());
        if (existing.dtype(), existing.shape(), existing.bytes()) != (tensor.dtype(), tensor.shape(), tensor.bytes()) {
            return Err(FindError::Twice { path: path.to_path_buf(), name });
        }
    }
    Ok(())
}

/// Reads a file and verifies its length and hash.
fn read_verified(path: &Path, listed: &Listed) -> Result<Vec<u8>, FindError> {
    let bytes = read_regular(path, listed.bytes)?;
    let got = bytes.len() as u64;
    if got != listed.bytes {
        return Err(FindError::Length { path: path.to_path_buf(), got, expected: listed.bytes });
    }
    let hash = sha256(&bytes);
    if !hash.eq_ignore_ascii_case(&listed.sha256) {
        return Err(FindError::Hash { path: path.to_path_buf(), got: hash, expected: listed.sha256.clone() });
    }
    Ok(bytes)
}

/// Reads a regular file of at most `limit` bytes; a longer one is rejected unread.
fn read_regular(path: &Path, limit: u64) -> Result<Vec<u8>, FindError> {
    let read_error = |fault: io::Error| match fault.kind() {
        io::ErrorKind::NotFound => FindError::Missing { path: path.to_path_buf() },
        _ => FindError::Read { path: path.to_path_buf(), fault },
    };
    // Check the type before opening: opening a pipe would block, and a link may lead out of the folder.
    let metadata = fs::symlink_metadata(path).map_err(read_error)?;
    if !metadata.is_file() {
        return Err(read_error(io::Error::other("not a regular file")));
    }
    if metadata.len() > limit {
        return Err(FindError::Length { path: path.to_path_buf(), got: metadata.len(), expected: limit });
    }
    let mut bytes = Vec::new();
    // A sparse file can claim any length.
    bytes.try_reserve_exact(metadata.len() as usize).map_err(|_| read_error(io::ErrorKind::OutOfMemory.into()))?;
    File::open(path).and_then(|file| file.take(limit).read_to_end(&mut bytes)).map_err(read_error)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_how_far_a_run_was() {
        assert_eq!((name(12), minibatches("step-00000012")), ("step-00000012".to_string(), Some(12)));
        assert_eq!(minibatches(&name(u32::MAX)), Some(u32::MAX));
        for other in ["step-12", ".step-00000012.part", "step-0000001x", "step-99999999999", "weights.safetensors"] {
            assert_eq!(minibatches(other), None, "{other}");
        }
        assert_eq!([part_name(7), old_name(7)].map(|name| hidden(&name)), [Some(7); 2]);
        assert_eq!(["step-00000012", ".step-00000012", "step-00000012.part"].map(hidden), [None; 3]);
    }
}
