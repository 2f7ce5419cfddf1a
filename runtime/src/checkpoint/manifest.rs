//! The manifest of a checkpoint: the run, its position, and every file with its hash.
//!
//! It is written last and read first. It is untrusted until checked: file names must stay in the folder and numbers
//! within bounds. Its own hash is computed with zeros in place of the hash.

use crate::checkpoint::encode::Holds;
use crate::exec::stage_code::StageCode;
use crate::optim::policy::Staleness;
use compiler::graph::hash::sha256;
use compiler::schedule::Program;
use compiler::text::name::short_name;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

pub const SCHEMA: &str = "pipec.checkpoint/1";

pub const FILE: &str = "manifest.json";

/// Maximum file size, in bytes.
pub const LARGEST: u64 = 64 << 20;

/// Upper bound of stage and replica numbers.
const MOST: u32 = 1 << 16;

/// The contents of a checkpoint folder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    pub schema: String,
    /// Finished minibatches, which is also the number of the next one.
    pub minibatches: u32,
    /// Minibatches of the whole run.
    pub steps: u32,
    pub cursor: Cursor,
    pub loss_scale: Option<Scale>,
    /// Settings that determine the results; they must be equal to resume.
    pub run: BTreeMap<String, String>,
    /// The distribution of work, which may change on resume.
    pub plan: ShardLayout,
    pub files: Vec<Listed>,
    /// SHA-256 of the manifest.
    pub sha256: String,
}

/// Position in the training data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cursor {
    /// Completed epochs.
    pub epoch: u32,
    /// Finished minibatches in the current epoch.
    pub minibatch: u32,
}

/// Loss-scaling state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Scale {
    pub value: f64,
    /// Good steps since the last change.
    pub good: u32,
}

/// The distribution of work over stages and replicas.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ShardLayout {
    pub schedule: String,
    pub staleness: String,
    pub microbatches: u32,
    pub stages: Vec<StageLayout>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StageLayout {
    pub replicas: u32,
    /// In-flight limit per replica, in rounds.
    pub cap: u32,
    /// SHA-256 of the parameter names.
    pub parameters: String,
}

/// A file of the checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Listed {
    pub name: String,
    pub holds: Holds,
    pub stage: u32,
    pub replica: u32,
    pub bytes: u64,
    pub sha256: String,
}

impl ShardLayout {
    /// The distribution of a program over these stages.
    pub fn of(program: &Program, codes: &[StageCode], staleness: Staleness) -> ShardLayout {
        let stage = |(stage, code): (&compiler::schedule::ProgramStage, &StageCode)| {
            let names: Vec<&str> = code.parameters.iter().map(|named| named.name.as_str()).collect();
            StageLayout { replicas: stage.replicas, cap: stage.cap, parameters: sha256(names.join("\n").as_bytes()) }
        };
        ShardLayout {
            schedule: program.schedule.name().to_string(),
            staleness: match staleness {
                Staleness::None => "none",
                Staleness::Predict => "predict",
                Staleness::PipeMare { .. } => "pipemare",
            }
            .to_string(),
            microbatches: program.microbatches,
            stages: program.stages.iter().zip(codes).map(stage).collect(),
        }
    }
}

impl Manifest {
    /// Parses and checks a manifest. The error describes the defect.
    pub fn read(bytes: &[u8]) -> Result<Manifest, String> {
        let manifest: Manifest = serde_json::from_slice(bytes).map_err(|fault| fault.to_string())?;
        if own_hash(bytes, &manifest.sha256).as_ref() != Some(&manifest.sha256) {
            return Err("it is damaged: its sha256 does not match its content".to_string());
        }
        if manifest.schema != SCHEMA {
            return Err(format!("its schema is `{}`, expected `{SCHEMA}`", short_name(&manifest.schema)));
        }
        if manifest.minibatches == 0 || manifest.minibatches > manifest.steps {
            return Err(format!("{} minibatches of {} are done", manifest.minibatches, manifest.steps));
        }
        if let Some(Scale { value, .. }) = manifest.loss_scale
            && !(value.is_finite() && value >= 1.0)
        {
            return Err(format!("the loss scale is {value}"));
        }
        let mut names = BTreeSet::new();
        for Listed { name, holds, stage, replica, sha256, .. } in &manifest.files {
            if *stage >= MOST || *replica >= MOST {
                return Err(format!("it lists stage {stage}, replica {replica}"));
            }
            // Only exact file names are valid, so none can lead out of the folder.
            if *name != holds.file_name(*stage, *replica) {
                return Err(format!("`{}` is not a file name of stage {stage}", short_name(name)));
            }
            if !names.insert(name) {
                return Err(format!("`{name}` is listed twice"));
            }
            if sha256.len() != DIGITS || !sha256.bytes().all(|digit| digit.is_ascii_hexdigit()) {
                return Err(format!("the hash of `{name}` is not a SHA-256"));
            }
        }
        // An in-flight file exists only if something was in flight.
        let required_files = |stage: u32| [Holds::Weights, Holds::Optimizer].map(|holds| holds.file_name(stage, 0));
        let stages = u32::try_from(manifest.plan.stages.len()).unwrap_or(u32::MAX).min(MOST);
        match (0..stages).flat_map(required_files).find(|name| !names.contains(name)) {
            Some(name) => Err(format!("it does not list `{name}`")),
            None => Ok(manifest),
        }
    }

    /// Encodes the manifest with its hash.
    pub fn write(&self) -> Vec<u8> {
        let encode = |sha256: &str| {
            let manifest = Manifest { sha256: sha256.to_string(), ..self.clone() };
            let mut bytes = serde_json::to_vec_pretty(&manifest).expect("names are strings and numbers are finite");
            bytes.push(b'\n');
            bytes
        };
        encode(&sha256(&encode(NO_HASH)))
    }
}

/// Placeholder while a manifest's own hash is computed.
const NO_HASH: &str = "0000000000000000000000000000000000000000000000000000000000000000";

const DIGITS: usize = NO_HASH.len();

/// The hash of a manifest; `written` is searched from the end.
fn own_hash(bytes: &[u8], written: &str) -> Option<String> {
    let offset = bytes.windows(DIGITS).rposition(|digits| digits == written.as_bytes())?;
    let mut bytes = bytes.to_vec();
    bytes[offset..offset + DIGITS].fill(b'0');
    Some(sha256(&bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        let holds = Holds::Weights;
        Manifest {
            schema: SCHEMA.into(),
            minibatches: 4,
            steps: 12,
            cursor: Cursor { epoch: 0, minibatch: 4 },
            loss_scale: Some(Scale { value: 1024.0, good: 3 }),
            run: BTreeMap::from([("seed".into(), "7".into())]),
            plan: ShardLayout {
                schedule: "1f1b".into(),
                staleness: "none".into(),
                microbatches: 2,
                stages: Vec::new(),
            },
            files: vec![Listed {
                name: holds.file_name(0, 0),
                holds,
                stage: 0,
                replica: 0,
                bytes: 3,
                sha256: sha256(b"abc"),
            }],
            sha256: String::new(),
        }
    }

    #[test]
    fn a_manifest_reads_back() {
        assert_eq!(sha256(b"abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        let read = Manifest::read(&manifest().write()).unwrap();
        assert_eq!(Manifest { sha256: String::new(), ..read.clone() }, manifest());
        assert_eq!(read.write(), manifest().write());
    }

    #[test]
    fn every_changed_bit_of_a_manifest_is_noticed() {
        let valid = manifest().write();
        for offset in 0..valid.len() {
            for bit in 0..8 {
                let mut corrupted = valid.clone();
                corrupted[offset] ^= 1 << bit;
                assert!(Manifest::read(&corrupted).is_err(), "bit {bit} of byte {offset}");
            }
            assert!(Manifest::read(&valid[..offset]).is_err(), "cut at {offset}");
        }
    }

    #[test]
    fn what_no_run_writes_is_refused() {
        let read_error = |change: &dyn Fn(&mut Manifest)| {
            let mut invalid = manifest();
            change(&mut invalid);
            Manifest::read(&invalid.write()).unwrap_err()
        };
        assert!(read_error(&|m| m.schema = "pipec.checkpoint/9".into()).contains("checkpoint/9"));
        assert!(read_error(&|m| m.minibatches = 13).contains("13 minibatches of 12"));
        assert!(read_error(&|m| m.minibatches = 0).contains("0 minibatches"));
        assert!(read_error(&|m| m.loss_scale = Some(Scale { value: 0.0, good: 0 })).contains("loss scale is 0"));
        for name in ["../stage-0.safetensors", "/etc/passwd", "stage-1.safetensors", "", "stage-0.safetensors/.."] {
            assert!(read_error(&|m| m.files[0].name = name.into()).contains("not a file name"), "{name}");
        }
        assert!(read_error(&|m| m.files.push(m.files[0].clone())).contains("twice"));
        assert!(read_error(&|m| m.files[0].sha256 = "xyz".into()).contains("not a SHA-256"));
        let stage = || StageLayout { replicas: 1, cap: 1, parameters: sha256(b"") };
        assert!(read_error(&|m| m.plan.stages.push(stage())).contains("does not list `stage-0.optimizer.safetensors`"));
        assert!(read_error(&|m| m.files[0].stage = u32::MAX).contains("stage 4294967295"));
        assert!(Manifest::read(b"{\"schema\": 1}").is_err());
        let deep = "[".repeat(100_000);
        assert!(Manifest::read(deep.as_bytes()).is_err());
    }
}
