//! The schedule of one pipeline replica as the compute-only table of torch's pipeline runtime; see
//! [`crate::schedule::formats::csv`].

use super::refusal::Refusal;
use super::{ExportInput, fit};
use crate::plan::schedule::Schedule;
use crate::schedule::formats::csv::csv;
use crate::schedule::generators::schedule;
use crate::schedule::pipeline::{generated, pipeline};
use crate::schedule::semantics::StepCount;

/// The schedule of one pipeline replica for one minibatch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// One row per rank.
    pub table: String,
    pub ranks: Vec<u32>,
    /// Micro-batches per replica.
    pub microbatches: u32,
    pub replicas: u32,
}

/// The schedule, if the tool supports it. Stage replicas become replicas of the whole pipeline, which share the
/// micro-batches equally.
pub fn order(input: &ExportInput<'_>, tool: &'static str) -> Result<Order, Refusal> {
    let plan = input.plan;
    fit::flushes(plan, tool)?;
    let replicas = fit::replicas(plan, tool)?;
    let microbatches = fit::share(plan, replicas)?;
    let mut pipeline = pipeline(plan)?;
    pipeline.stages.iter_mut().for_each(|stage| stage.replicas = 1);
    let ranks: Vec<u32> = pipeline.ranks.iter().map(|rank| rank.0).collect();
    let table = match (plan.schedule.kind, input.table) {
        (Schedule::Csv, Some(table)) => {
            let agree = |what: &'static str, found: u32, planned: u32| match found == planned {
                true => Ok(()),
                false => Err(Refusal::Table { what, found: found.into(), planned: planned.into() }),
            };
            agree("micro-batches", table.microbatches(), microbatches)?;
            agree("stages", table.stages(), plan.stages.len() as u32)?;
            // Only checks that the table is executable.
            table.program(&pipeline, 1)?;
            table.to_string()
        }
        (kind, _) => csv(&schedule(generated(kind)?, &pipeline, StepCount { minibatches: 1, microbatches })?),
    };
    Ok(Order { table, ranks, microbatches, replicas })
}
