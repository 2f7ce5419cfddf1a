//! The errors that a device returns.

use compiler::op::KernelError;
use compiler::tensor::DType;
use thiserror::Error;

#[derive(Debug, Error, Clone, PartialEq)]
#[allow(missing_docs)]
pub enum DeviceError {
    /// A kernel rejects the values of its operands.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    #[error("there is no device `{name}`")]
    Unknown { name: String },
    #[error("device {device} has {free} bytes left, {needed} are needed")]
    Memory { device: String, needed: u64, free: u64 },
    #[error("device {device} cannot cast {from} to {to}")]
    Cast { device: String, from: DType, to: DType },
    #[error("device {device} has no kernel for `{op}`")]
    NoKernel { device: String, op: &'static str },
    #[error("bug in pipec: a {what} of another device was passed to this device")]
    Foreign { what: &'static str },
    #[error("device {device} failed: {what}")]
    Failed { device: String, what: String },
}
