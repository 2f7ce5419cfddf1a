//! What can be wrong with a plan.

/// One fault of a plan.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PlanFault {
    /// No stages.
    #[error("the plan has no stages")]
    NoStages,
    /// A stage whose id is not its place.
    #[error("stages[{index}] has id {id}")]
    Id {
        /// Place in the list.
        index: usize,
        /// Its id.
        id: u32,
    },
    /// A range that is empty, reversed, out of the model, or not ascending.
    #[error("stage {stage}: op range [{from}, {to}) is empty, out of order, or beyond the {ops} ops of the model")]
    Range {
        /// The stage.
        stage: usize,
        /// Start.
        from: u32,
        /// End.
        to: u32,
        /// Ops of the model.
        ops: usize,
    },
    /// An op in no stage or in two.
    #[error("op {op} is in {count} stages")]
    Coverage {
        /// The op.
        op: usize,
        /// How many stages hold it.
        count: u32,
    },
    /// An op apart from the op whose stage it shares.
    #[error("op {op} is in stage {stage}, op {with}, to which it belongs, in stage {other}")]
    Apart {
        /// The op.
        op: usize,
        /// Its stage.
        stage: usize,
        /// The op it joins.
        with: u32,
        /// The stage of that.
        other: usize,
    },
    /// A tensor that goes backward.
    #[error("tensor `{tensor}` goes from stage {from} back to stage {to}")]
    Backward {
        /// Its name.
        tensor: String,
        /// Stage that makes it.
        from: usize,
        /// Stage that reads it.
        to: usize,
    },
    /// Devices that are not one for each replica, or do not exist, or are used twice.
    #[error("stage {stage}: {what}")]
    Devices {
        /// The stage.
        stage: usize,
        /// What is wrong.
        what: String,
    },
    /// A place in the levels that makes no sense.
    #[error("stage {stage}: hierarchy: {what}")]
    Hierarchy {
        /// The stage.
        stage: usize,
        /// What is wrong.
        what: String,
    },
    /// Lists of the schedule that do not have one entry for each stage, or caps of 0.
    #[error("schedule: {what}")]
    Schedule {
        /// What is wrong.
        what: String,
    },
    /// An edge that is missing, too much, or wrong.
    #[error("edge {from} -> {to}: the plan says {said}, the model makes {found}")]
    Edge {
        /// From stage.
        from: u32,
        /// To stage.
        to: u32,
        /// What the plan says.
        said: String,
        /// What the model makes.
        found: String,
    },
    /// A figure that does not come out.
    #[error("{what}: the plan says {said}, it is {found}")]
    Figure {
        /// Which figure.
        what: String,
        /// What the plan says.
        said: String,
        /// What was worked out.
        found: String,
    },
    /// A link over which more goes than fits into the time that the plan states.
    #[error(
        "the link {direction} of unit {unit} on {level} takes {needed_us} us for one minibatch, the plan says {said_us} us"
    )]
    Link {
        /// The level.
        level: String,
        /// The unit.
        unit: u32,
        /// Which way.
        direction: String,
        /// Microseconds that it takes.
        needed_us: f64,
        /// The plan's objective.
        said_us: f64,
    },
    /// A stage that does not fit.
    #[error("stage {stage} needs {needed} bytes on each device, the limit is {limit}")]
    Memory {
        /// The stage.
        stage: usize,
        /// Bytes it needs.
        needed: u64,
        /// Bytes allowed.
        limit: u64,
    },
}
