//! The errors of the stage compiler.

use crate::device::error::DeviceError;
use compiler::pass::backward::BackwardError;
use compiler::pass::fragment::FragmentError;
use compiler::pass::pipeline::PassBug;
use compiler::tensor_parallel::strategy_search::ChooseError;
use compiler::text::quantity;
use thiserror::Error;

#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum CompileError {
    #[error(transparent)]
    Fragment(#[from] FragmentError),
    #[error(transparent)]
    Bug(#[from] PassBug),
    #[error(transparent)]
    Backward(Box<BackwardError>),
    #[error("`{node}` needs {} for its inputs and outputs, the machine has {} free", quantity::bytes(*needed), quantity::bytes(*available))]
    Memory { node: String, needed: u64, available: u64 },
    #[error("a stage needs {}, the machine has {} free", quantity::bytes(*needed), quantity::bytes(*available))]
    StageMemory { needed: u64, available: u64 },
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Share(#[from] ChooseError),
    #[error("the size of `{node}` is unknown: {fact}; give its symbols a size")]
    Symbolic { node: String, fact: String },
}
