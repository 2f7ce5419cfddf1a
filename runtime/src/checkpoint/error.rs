//! The errors of writing a checkpoint.

use crate::data::weights::FileError;
use crate::device::error::DeviceError;
use std::io;
use std::path::PathBuf;
use thiserror::Error;

#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum CheckpointWriteError {
    #[error("cannot write {path}: {fault}")]
    Write { path: PathBuf, fault: io::Error },
    #[error(transparent)]
    Encode(#[from] FileError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error("`{name}` contains NaN or infinity, so no run can resume from it")]
    NotFinite { name: String },
    #[error("the run has failed, and tensors that were received since may be wrong: {cause}")]
    RunFailed { cause: String },
}
