//! The result of a training run as text and JSON.

use crate::cli::screen::Screen;
use compiler::plan::Plan;
use compiler::plan::problem::CostModel;
use compiler::profile::Method;
use compiler::text::quantity;
use pipec::train::metrics::device_bytes;
use pipec::train::run::TrainReport;
use serde_json::json;

/// Measured peak memory of each stage (its largest replica), with the value of the plan or of the run's estimate.
fn peak_memory_text(plan: &Plan, estimate: Option<&[u64]>, workers: &[u64]) -> String {
    let planned: Vec<u64> = plan.stages.iter().map(|stage| stage.memory.total).collect();
    let (bytes, word) = estimate.map_or((&planned[..], "planned"), |estimate| (estimate, "estimated"));
    // Workers are ordered by the first stage of their device; a device with several stages has one peak for all.
    let mut workers = workers.iter();
    let mut parts = Vec::new();
    for (at, stage) in plan.stages.iter().enumerate() {
        if plan.stages[..at].iter().any(|earlier| earlier.devices == stage.devices) {
            continue;
        }
        let peak = workers.by_ref().take(stage.replicas as usize).max().copied().unwrap_or(0);
        parts.push(format!("{} ({} {word})", quantity::bytes(peak), quantity::bytes(device_bytes(plan, at, bytes))));
    }
    format!("peak memory per stage: {}", parts.join(", "))
}

/// Measured and predicted time of a minibatch, if the plan's profile was measured on this kind of device.
fn time_text(report: &TrainReport, us: f64) -> Option<String> {
    let plan = &report.plan;
    let is_measured = plan.profile.method == Method::Measured && plan.cost == CostModel::Pipec;
    let predicted = Some(plan.predicted.step_us).filter(|_| report.is_predicted && is_measured)?;
    let expected = plan.compared(us).map_or(String::new(), |(position, [low, high])| {
        format!(", {position} the {} to {} expected", quantity::time(low), quantity::time(high))
    });
    Some(format!("{} per minibatch: {} predicted{expected}", quantity::time(us), quantity::time(predicted)))
}

pub fn report(report: &TrainReport, screen: &Screen) {
    let TrainReport { plan, result, total, .. } = report;
    let losses = &result.trained.losses;
    let (first, last) = (losses.first().copied().unwrap_or(0.0), losses.last().copied().unwrap_or(0.0));
    if losses.is_empty() {
        screen.text(&format!(
            "the run is complete: all {} were done before; increase `--steps` or `--epochs` to continue",
            quantity::plural(u64::from(report.steps), "step", "steps")
        ));
        screen.json(&json!(total));
        return;
    }
    screen.prose(&format!(
        "trained {} of {} in {}: loss {} to {}, {} samples/s",
        quantity::plural(losses.len() as u64, "step", "steps"),
        quantity::plural(report.batch, "sample", "samples"),
        quantity::time(result.trained.seconds * 1e6),
        quantity::short(first),
        quantity::short(last),
        quantity::samples(result.samples_per_s),
    ));
    if let Some(line) = total.step_us.and_then(|us| time_text(report, us)) {
        screen.note(&line);
    }
    // Without loss scaling, a loss that is not finite stops the run.
    let skipped = losses.iter().filter(|loss| !loss.is_finite()).count();
    if skipped > 0 {
        screen.warn(&format!(
            "{} had no finite loss; loss scaling skipped their updates",
            quantity::plural(skipped as u64, "step", "steps")
        ));
    }
    if let Some(score) = &result.score {
        let accuracy =
            score.accuracy.map_or(String::new(), |share| format!(", accuracy {} %", quantity::short(share * 100.0)));
        let rows = quantity::plural(score.rows as u64, "row", "rows");
        screen.text(&format!("evaluation on {rows}: loss {}{accuracy}", quantity::short(score.loss)));
    }
    screen.note(&peak_memory_text(plan, report.memory_estimate.as_deref(), &result.trained.peak_memory_bytes));
    if let Some(peak) = result.trained.checkpoint_bytes.iter().max().filter(|peak| **peak > 0) {
        screen.note(&format!(
            "in addition, a worker used up to {} for checkpoints until they were written",
            quantity::bytes(*peak)
        ));
    }
    screen.json(&json!(total));
    report.remarks.iter().for_each(|remark| screen.note(remark));
}
