//! The errors that end a worker.

use crate::comm::communicator::PEER_LOST;
use crate::device::error::DeviceError;
use crate::exec::executor::ExecuteError;
use thiserror::Error;

#[derive(Debug, Error, Clone, PartialEq)]
#[allow(missing_docs)]
pub enum WorkerError {
    #[error("worker {worker}: {fault}")]
    Execute { worker: String, fault: ExecuteError },
    #[error("worker {worker}: {fault}")]
    Device { worker: String, fault: DeviceError },
    #[error("worker {worker}: another worker stopped")]
    PeerGone { worker: String },
    #[error("bug in pipec: worker {worker}, instruction {at}: {what}")]
    Program { worker: String, at: usize, what: String },
}

impl WorkerError {
    /// True if the error only reports that another worker stopped.
    pub fn lost_another(&self) -> bool {
        let fault = match self {
            WorkerError::PeerGone { .. } => return true,
            WorkerError::Execute { fault, .. } => &fault.fault,
            WorkerError::Device { fault, .. } => fault,
            WorkerError::Program { .. } => return false,
        };
        *fault == PEER_LOST
    }
}
