//! Faults of a plan.

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PlanFault {
    #[error("the plan has no stages")]
    NoStages,
    /// A stage id that differs from its index.
    #[error("stages[{index}] has id {id}")]
    Id { index: usize, id: u32 },
    /// A range that is empty, reversed, not ascending, or beyond the model.
    #[error("stage {stage}: op range [{from}, {to}) is empty, out of order, or beyond the {ops} ops of the model")]
    Range {
        stage: usize,
        from: u32,
        to: u32,
        /// Number of ops of the model.
        ops: usize,
    },
    /// An op in no stage or in several.
    #[error("op {op} is in {count} stages")]
    Coverage { op: usize, count: u32 },
    /// An op in another stage than the op it is fused with.
    #[error("op {op} is in stage {stage}, op {with}, to which it belongs, in stage {other}")]
    Apart { op: usize, stage: usize, with: u32, other: usize },
    /// A tensor that is sent to an earlier stage.
    #[error("tensor `{tensor}` goes from stage {from} back to stage {to}")]
    Backward {
        tensor: String,
        /// Producer stage.
        from: usize,
        /// Consumer stage.
        to: usize,
    },
    /// Devices that do not match the replicas, do not exist, or are used twice.
    #[error("stage {stage}: {what}")]
    Devices { stage: usize, what: String },
    /// An invalid position in the levels.
    #[error("stage {stage}: hierarchy: {what}")]
    Hierarchy { stage: usize, what: String },
    /// A schedule list without one entry per stage, or with a 0.
    #[error("schedule: {what}")]
    Schedule { what: String },
    /// An edge that is missing, superfluous, or wrong.
    #[error("edge {from} -> {to}: the plan says {said}, the model makes {found}")]
    Edge { from: u32, to: u32, said: String, found: String },
    /// A stated value that differs from the computed one.
    #[error("{what}: the plan says {said}, it is {found}")]
    Figure { what: String, said: String, found: String },
    /// A link that needs more time than the plan's objective.
    #[error(
        "the link {direction} of unit {unit} on {level} takes {needed_us} us for one minibatch, the plan says {said_us} us"
    )]
    Link {
        level: String,
        unit: u32,
        direction: String,
        /// Time of its traffic.
        needed_us: f64,
        /// The plan's objective.
        said_us: f64,
    },
    /// A stage that exceeds the memory limit.
    #[error("stage {stage} needs {needed} bytes on each device, the limit is {limit}")]
    Memory { stage: usize, needed: u64, limit: u64 },
}
