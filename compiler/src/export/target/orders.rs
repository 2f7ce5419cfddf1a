//! The order of work of one replica as the compute-only table that torch's pipeline runtime reads: see [`crate::schedule::formats::csv`].

use super::ExportInput;
use super::fit;
use super::refusal::Refusal;
use crate::plan::ScheduleKind;
use crate::schedule::formats::csv::csv;
use crate::schedule::pipeline::{pipeline, schedule_of};
use crate::schedule::scheduler::schedule;
use crate::schedule::semantics::StepCount;

/// What one of several equal replicas of the pipeline does in a minibatch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// A row for each rank.
    pub table: String,
    /// The rank that holds each stage.
    pub ranks: Vec<u32>,
    /// Micro-batches that the table is for.
    pub microbatches: u32,
    /// Replicas of the pipeline.
    pub replicas: u32,
}

/// The order of work, if the tool can run it. Replicas of a stage become replicas of the whole pipeline, each with its share of the
/// micro-batches.
pub fn order(asked: &ExportInput<'_>, tool: &'static str) -> Result<Order, Refusal> {
    let plan = asked.plan;
    fit::flushes(plan, tool)?;
    let replicas = fit::replicas(plan, tool)?;
    let microbatches = fit::share(plan, replicas)?;
    let mut one = pipeline(plan)?;
    one.stages.iter_mut().for_each(|stage| stage.replicas = 1);
    let ranks: Vec<u32> = one.ranks.iter().map(|rank| rank.0).collect();
    let table = match (plan.schedule.kind, asked.table) {
        (ScheduleKind::Csv, Some(table)) => {
            let agree = |what: &'static str, found: u32, planned: u32| match found == planned {
                true => Ok(()),
                false => Err(Refusal::Table { what, found: found.into(), planned: planned.into() }),
            };
            agree("micro-batches", table.microbatches(), microbatches)?;
            agree("stages", table.stages(), plan.stages.len() as u32)?;
            // Only to see that it can run.
            table.program(&one, 1)?;
            table.to_string()
        }
        (kind, _) => csv(&schedule(schedule_of(kind)?, &one, StepCount { minibatches: 1, microbatches })?),
    };
    Ok(Order { table, ranks, microbatches, replicas })
}
