//! Errors of schedule generation.

use crate::plan::schedule::Schedule;

fn instead(schedule: Schedule) -> &'static str {
    match schedule {
        Schedule::Interleaved | Schedule::Bfs => ". zbv and dualpipev run two stages per rank in a V",
        Schedule::Zbv | Schedule::DualPipeV => ". zb-h1 runs one stage per rank, interleaved and bfs several in a loop",
        _ => ". interleaved and bfs run several in a loop, zbv and dualpipev two in a V",
    }
}

fn known() -> String {
    Schedule::GENERATED.map(Schedule::name).join(", ")
}

#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[allow(missing_docs)]
pub enum ScheduleError {
    #[error("the plan needs a custom schedule; give it with `--schedule FILE`")]
    NoTable,
    #[error("schedule {schedule} needs {needed}; the pipeline has {found} on each rank{}", instead(*.schedule))]
    Placement { schedule: Schedule, needed: &'static str, found: String },
    #[error(
        "schedule {schedule} needs equally many replicas on every rank; these have {replicas}. 1f1b, gpipe, 1f1b-rr, \
         zb-h1 and zb-h2 run such plans"
    )]
    UnequalReplicas { schedule: Schedule, replicas: String },
    #[error("table: {what}")]
    Table { what: String },
    #[error("program: {what}")]
    Foreign { what: String },
    #[error("the plan has {stages} stages but {caps} in-flight limits")]
    CapsForOtherStages { stages: usize, caps: usize },
    #[error("unknown schedule `{name}`; known: {}", known())]
    UnknownName { name: String },
    #[error("a pipeline needs at least one stage")]
    NoStages,
    #[error("stage {stage} has {replicas} replicas and an in-flight limit of {cap}; both must be at least 1")]
    EmptyStage { stage: usize, replicas: u32, cap: u32 },
    #[error("{workers} workers; a program can have at most {most}")]
    TooManyWorkers { workers: u64, most: u64 },
    #[error("the {what} takes {microseconds:.0} us; expected 0 to 1e9")]
    BadTime { what: String, microseconds: f64 },
    #[error("{what}")]
    BadRanks { what: String },
    #[error("edge {from} > {to}: expected one edge, from an earlier to a later stage of the pipeline")]
    BadEdge { from: u32, to: u32 },
    #[error(
        "schedule {schedule} needs at least one minibatch of at least one micro-batch, got {minibatches} of \
        {microbatches}"
    )]
    NoWork { schedule: Schedule, minibatches: u32, microbatches: u32 },
    #[error("schedule {schedule} does not split minibatches, and {microbatches} micro-batches are requested")]
    WholeMinibatches { schedule: Schedule, microbatches: u32 },
    #[error("the program of {items} micro-batches over {stages} stages is too long; run fewer minibatches at a time")]
    TooLong { items: u64, stages: usize },
    #[error("the custom schedule deadlocks: worker {worker} waits forever before {at}")]
    Stuck { worker: String, at: String },
}
