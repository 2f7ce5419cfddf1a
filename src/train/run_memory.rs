//! The memory of a run against the memory of its plan.

use crate::costs::CPU;
use crate::loss::CountedLoss;
use crate::train::metrics::of_device;
use crate::train::prepare::Task;
use crate::train::request::TrainRequest;
use crate::train::tensor_parallel::degree;
use compiler::export::quantity;
use compiler::import::onnx::name::shown;
use compiler::plan::Plan;
use compiler::plan::problem::InFlight;

/// Estimates may exceed the plan by one part in this many without a note.
const MORE: u64 = 100;

/// Settings in which the run differs from the plan, so that its memory differs too.
pub fn differences(task: &Task<'_>, request: &TrainRequest) -> Vec<&'static str> {
    let plan = task.plan;
    let counted = task.loss.map_or(CountedLoss::None, |loss| CountedLoss::One(loss, task.class_dim));
    let (batch, microbatches) =
        (plan.schedule.micro_batch.saturating_mul(u64::from(task.microbatches)), task.microbatches);
    let is_other_optimizer = request.plan.is_some() && request.optimizer.optimizer.name() != plan.optimizer;
    let all = [
        ("type of floats", task.dtype.is_some_and(|dtype| dtype.name() != plan.dtype)),
        ("order of work", task.schedule != plan.schedule.kind || task.own.is_some()),
        ("number of devices for each stage", task.tensor != degree(plan)),
        ("number of minibatches in flight", task.in_flight != InFlight::Auto),
        ("batch", (task.batch, microbatches) != (batch, plan.schedule.microbatches)),
        ("optimizer", is_other_optimizer),
        ("loss", plan.model.import.loss.is_some() && plan.model.import.loss != counted.written()),
    ];
    all.into_iter().filter(|(_, differs)| *differs).map(|(what, _)| what).collect()
}

/// A note if the fullest device of the run needs more memory than a plan for another device kind says.
pub fn exceeds_plan(plan: &Plan, estimate: &[u64]) -> Option<String> {
    let kind = &plan.cluster.device.kind;
    let planned: Vec<u64> = plan.stages.iter().map(|stage| stage.memory.total).collect();
    let at = (0..plan.stages.len()).max_by_key(|at| of_device(plan, *at, estimate))?;
    let [planned, held] = [&planned[..], estimate].map(|bytes| of_device(plan, at, bytes));
    (kind != CPU && held > planned.saturating_add(planned / MORE)).then(|| {
        let [planned, held] = [planned, held].map(quantity::bytes);
        format!(
            "memory was planned for {}: {planned} on the device of stage {at}, where this run, on this processor, holds about {held}",
            shown(kind)
        )
    })
}

/// Why the run exceeds the memory limit of the plan, if it does.
pub fn exceeds_limit(plan: &Plan, estimate: &[u64]) -> Option<String> {
    let limit = plan.cluster.memory_per_device?.0;
    let (stage, needed) =
        (0..plan.stages.len()).map(|at| (at, of_device(plan, at, estimate))).find(|(_, needed)| *needed > limit)?;
    let (needed, limit) = (quantity::bytes(needed), quantity::bytes(limit));
    Some(format!("the device of stage {stage} would hold about {needed}, the plan's limit is {limit}"))
}
