//! Faults of a plan.

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PlanFault {
    #[error("the plan has no stages")]
    NoStages,
    #[error("stages[{index}] has id {id}")]
    Id { index: usize, id: u32 },
    #[error("stage {stage}: op range [{from}, {to}) is empty, out of order, or exceeds the {ops} ops of the model")]
    Range { stage: usize, from: u32, to: u32, ops: usize },
    #[error("op {op} is in {count} stages")]
    Coverage { op: usize, count: u32 },
    #[error("op {op} is in stage {stage}, but op {with}, which must be in the same stage, is in stage {other}")]
    Apart { op: usize, stage: usize, with: u32, other: usize },
    #[error("tensor `{tensor}` flows backward from stage {from} to stage {to}")]
    Backward { tensor: String, from: usize, to: usize },
    #[error("stage {stage}: {what}")]
    Devices { stage: usize, what: String },
    #[error("stage {stage}: hierarchy: {what}")]
    Hierarchy { stage: usize, what: String },
    #[error("schedule: {what}")]
    Schedule { what: String },
    #[error("edge {from} -> {to}: the plan states {said}, expected {found}")]
    Edge { from: u32, to: u32, said: String, found: String },
    #[error("{what}: the plan states {said}, expected {found}")]
    Figure { what: String, said: String, found: String },
    #[error(
        "the link {direction} of unit {unit} on {level} needs {needed_us} us per minibatch, the plan states {said_us} \
        us"
    )]
    Link { level: String, unit: u32, direction: String, needed_us: f64, said_us: f64 },
    #[error("stage {stage} needs {needed} bytes per device, the limit is {limit}")]
    Memory { stage: usize, needed: u64, limit: u64 },
}
