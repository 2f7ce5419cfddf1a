//! Errors of planning.

use crate::plan::check::error::PlanFault;
use crate::plan::problem::ProblemError;
use std::error::Error;
use std::fmt;

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PlanError {
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// Infeasible: no plan fits. The figures describe the partition that needs the least memory.
    #[error(
        "no plan fits in {limit} bytes per device: stage {stage} of {stages} (`{first_op}` to `{last_op}`, {replicas} \
         replicas) exceeds it by {missing} bytes; a limit of {smallest_limit} bytes is enough"
    )]
    Infeasible {
        limit: u64,
        stage: usize,
        stages: usize,
        replicas: u32,
        first_op: String,
        last_op: String,
        /// Bytes by which that stage exceeds the limit.
        missing: u64,
        /// Smallest limit for which a partition was found.
        smallest_limit: u64,
    },
    /// Infeasible at every limit: the memory of some device class is too small.
    #[error(transparent)]
    DeviceMemory(Box<Infeasible>),
    /// The plan checker rejected the plan. This is a bug in a partitioner, never an input error.
    #[error("bug in pipec: the plan checker rejects the plan: {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Unsound(Vec<PlanFault>),
}

/// No plan fits at any limit: device memory is too small.
#[derive(Clone, Debug, PartialEq)]
pub struct Infeasible {
    /// Index in the cluster of the class that needs more memory; `None` if several do.
    pub class: Option<u32>,
    pub kind: String,
    /// Bytes per device of that class; of the smallest class if several are too small.
    pub memory: u64,
    pub missing: u64,
    /// Fewest bytes per device (of that class, or of all) for which a partition was found.
    pub smallest: u64,
    /// Smallest limit that also has to be granted, if the given one is lower.
    pub limit: Option<u64>,
    pub stage: usize,
    pub stages: usize,
    pub replicas: u32,
    pub first_op: String,
    pub last_op: String,
}

impl fmt::Display for Infeasible {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Infeasible { kind, memory, missing, smallest, stage, stages, replicas, first_op, last_op, .. } = self;
        write!(f, "no plan fits: stage {stage} of {stages} (`{first_op}` to `{last_op}`, {replicas} replicas) ")?;
        match self.class {
            Some(class) => write!(
                f,
                "exceeds the memory of device class {class} (`{kind}`, {memory} bytes) by {missing} bytes; {smallest} \
                 bytes on each of its devices are enough"
            )?,
            None => write!(
                f,
                "needs {smallest} bytes, more than several device classes have; that memory on every device is enough"
            )?,
        }
        self.limit.map_or(Ok(()), |limit| write!(f, ", with a limit of {limit} bytes or more"))
    }
}

impl Error for Infeasible {}

pub struct Refused {
    pub error: PlanError,
    /// Lower bound on the time of every plan when the search was limited to plans faster than a known one; otherwise 0.
    pub bound_us: f64,
}

impl From<ProblemError> for Refused {
    fn from(error: ProblemError) -> Refused {
        Refused { error: error.into(), bound_us: 0.0 }
    }
}
