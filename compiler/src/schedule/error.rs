//! Errors of schedule generation.

use crate::plan::schedule::Schedule;

fn instead(schedule: Schedule) -> &'static str {
    match schedule {
        Schedule::Interleaved | Schedule::Bfs => ". zbv and dualpipev run a V of two stages on each rank",
        Schedule::Zbv | Schedule::DualPipeV => {
            ". zb-h1 runs one stage on each rank, interleaved and bfs any number in a loop"
        }
        _ => ". interleaved and bfs run several in a loop, zbv and dualpipev two in a V",
    }
}

fn known() -> String {
    Schedule::GENERATED.map(Schedule::name).join(", ")
}

#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[allow(missing_docs)]
pub enum ScheduleError {
    #[error("the plan is for an order of work of the user's own; `--schedule FILE` gives it")]
    NoTable,
    #[error("schedule {schedule} needs {needed}; the pipeline has {found} on each rank{}", instead(*.schedule))]
    Placement { schedule: Schedule, needed: &'static str, found: String },
    #[error(
        "schedule {schedule} deals items to equally many replicas on every rank; these have {replicas}. 1f1b, gpipe, 1f1b-rr, zb-h1 and \
         zb-h2 run such plans"
    )]
    UnequalReplicas { schedule: Schedule, replicas: String },
    #[error("table: {what}")]
    Table { what: String },
    #[error("program: {what}")]
    Foreign { what: String },
    #[error("the plan has {stages} stages and in-flight caps for {caps}")]
    CapsForOtherStages { stages: usize, caps: usize },
    #[error("unknown schedule `{name}`; known are {}", known())]
    UnknownName { name: String },
    #[error("a pipeline needs at least one stage")]
    NoStages,
    #[error("stage {stage} has {replicas} replicas and an in-flight cap of {cap}; both must be at least 1")]
    EmptyStage { stage: usize, replicas: u32, cap: u32 },
    #[error("{workers} workers; the most a program can have is {most}")]
    TooManyWorkers { workers: u64, most: u64 },
    #[error("the {what} takes {microseconds:.0} us; expected 0 to 1e9, a thousand seconds")]
    BadTime { what: String, microseconds: f64 },
    #[error("{what}")]
    BadRanks { what: String },
    #[error("edge {from} > {to}: expected one edge, from an earlier to a later stage of the pipeline")]
    BadEdge { from: u32, to: u32 },
    #[error(
        "schedule {schedule} needs at least one minibatch of at least one microbatch, got {minibatches} of {microbatches}"
    )]
    NoWork { schedule: Schedule, minibatches: u32, microbatches: u32 },
    #[error("schedule {schedule} runs whole minibatches; {microbatches} microbatches asked for")]
    WholeMinibatches { schedule: Schedule, microbatches: u32 },
    #[error("{items} items over {stages} stages make too long a program; run fewer minibatches at a time")]
    TooLong { items: u64, stages: usize },
    #[error("the order of work cannot run: worker {worker} waits for ever before {at}")]
    Stuck { worker: String, at: String },
}
