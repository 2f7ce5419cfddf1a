//! Compares a run with its plan: settings and memory.

use crate::loss::CountedLoss;
use crate::train::metrics::device_bytes;
use crate::train::task::Task;
use crate::train::tensor_parallel::degree;
use compiler::cluster::device::CPU;
use compiler::plan::Plan;
use compiler::plan::problem::InFlight;
use compiler::text::name::short_name;
use compiler::text::quantity;
use std::collections::BTreeSet;

/// Estimates may exceed the plan by this fraction (1 / `EXCESS_DIVISOR`) without a note.
const EXCESS_DIVISOR: u64 = 100;

/// Settings that differ from the plan, so that the memory differs too.
pub fn differences(task: &Task<'_>) -> Vec<&'static str> {
    let (request, plan) = (task.request, task.plan);
    let counted = task.loss.map_or(CountedLoss::None, |loss| CountedLoss::One(loss, task.class_dim));
    let (batch, microbatches) =
        (plan.schedule.micro_batch.saturating_mul(u64::from(task.microbatches)), task.microbatches);
    let is_other_optimizer = request.plan.is_some() && request.optimizer.optimizer.name() != plan.optimizer;
    let settings = [
        ("precision", task.dtype.is_some_and(|dtype| dtype.name() != plan.dtype)),
        ("schedule", task.schedule != plan.schedule.kind || task.custom_schedule.is_some()),
        ("tensor-parallel degree", task.tensor != degree(plan)),
        ("in-flight limit", request.in_flight != InFlight::Auto),
        ("batch", (task.batch, microbatches) != (batch, plan.schedule.microbatches)),
        ("optimizer", is_other_optimizer),
        ("frozen parameters", {
            let [ours, planned] = [task.loaded.frozen(), &plan.model.import.freeze[..]].map(BTreeSet::from_iter);
            ours != planned
        }),
        ("loss", plan.model.import.loss.is_some() && plan.model.import.loss != counted.to_text()),
    ];
    settings.into_iter().filter(|(_, differs)| *differs).map(|(what, _)| what).collect()
}

/// What the run does and the plan's times leave out.
pub fn unplanned_work(task: &Task<'_>, schedule: &str) -> Vec<&'static str> {
    let is_planned = task.schedule == task.plan.schedule.kind && task.custom_schedule.is_none();
    let kinds_of_work = [
        ("gradient clipping", task.policy.clip_norm.is_some()),
        ("regular checkpoints", task.checkpoint_interval().is_some()),
        ("device type", task.plan.cluster.device.is_cpu() == task.is_on_gpus()),
        // Threads share memory, processes send messages.
        ("several processes", task.has_processes && task.plan.workers_of_one_host().is_some()),
        // Methods against stale weights run the schedule with other in-flight limits.
        ("staleness", is_planned && schedule != task.plan.schedule.kind.name()),
    ];
    kinds_of_work.into_iter().filter(|(_, differs)| *differs).map(|(what, _)| what).collect()
}

/// A note if the peak memory of the run exceeds that of a plan for another device type.
pub fn exceeds_plan(plan: &Plan, estimate: &[u64]) -> Option<String> {
    let kind = &plan.cluster.device.kind;
    let planned_bytes: Vec<u64> = plan.stages.iter().map(|stage| stage.memory.total).collect();
    let at = (0..plan.stages.len()).max_by_key(|at| device_bytes(plan, *at, estimate))?;
    let [planned_bytes, needed_bytes] = [&planned_bytes[..], estimate].map(|bytes| device_bytes(plan, at, bytes));
    (kind != CPU && needed_bytes > planned_bytes.saturating_add(planned_bytes / EXCESS_DIVISOR)).then(|| {
        let [planned_bytes, needed_bytes] = [planned_bytes, needed_bytes].map(quantity::bytes);
        format!(
            "memory was planned for {}: {planned_bytes} on the device of stage {at}; this run needs about {needed_bytes} there, on this processor",
            short_name(kind)
        )
    })
}

/// Describes how the run exceeds the memory limit of the plan, if it does.
pub fn exceeds_limit(plan: &Plan, estimate: &[u64]) -> Option<String> {
    let limit = plan.cluster.memory_per_device?.0;
    let (stage, needed_bytes) = (0..plan.stages.len())
        .map(|at| (at, device_bytes(plan, at, estimate)))
        .find(|(_, needed_bytes)| *needed_bytes > limit)?;
    let (needed_bytes, limit) = (quantity::bytes(needed_bytes), quantity::bytes(limit));
    Some(format!("the device of stage {stage} would need about {needed_bytes}, above the plan's limit of {limit}"))
}
