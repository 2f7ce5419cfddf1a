//! Compares a training run with the plan's prediction.
//!
//! The metrics are JSON lines: one object per minibatch with `loss` and `seconds` since the start, and a final one with
//! `total`. The latter may contain measurements per stage, the plan, and the number of workers and cores.

use crate::export::axis::Unit;
use crate::export::plot::{Curve, HorizontalAxis, Plot};
use crate::export::report::markup::{Table, figure, paragraph};
use crate::export::report::{Measured, MeasuredOrder, MeasuredPlace};
use crate::plan::Plan;
use crate::plan::device_memory::held;
use crate::text::name::short_name;
use crate::text::quantity;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// Maximum number of points of a curve; longer runs are subsampled.
const POINTS: usize = 400;
/// Maximum number of op ranges listed for a stage.
const SHOWN: usize = 8;
/// Maximum number of minibatches read.
const MOST: usize = 10_000_000;
/// Longest time read, in microseconds: about 30 years.
const LONGEST_US: f64 = 1e15;

/// Errors in a metrics file. Lines are counted from 1.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum MetricsError {
    #[error("line {line} is not a JSON object")]
    Line { line: usize },
    #[error("line {line}: `{field}` is not a number, or too large")]
    Field { line: usize, field: &'static str },
    /// Times are not monotonic.
    #[error("line {line}: time {found} s follows {before} s")]
    Order { line: usize, found: f64, before: f64 },
    #[error("line {line}: `total.{field}` is not as `pipec train --metrics` writes it")]
    Total { line: usize, field: &'static str },
    #[error("the run has no minibatch")]
    Empty,
    #[error("the run used another plan: {what}")]
    OtherPlan { what: String },
}

/// Returns an error if the metrics belong to a run of another plan.
pub fn check_plan(plan: &Plan, measured: &Measured) -> Result<(), MetricsError> {
    let mismatch = |what: String| Err(MetricsError::OtherPlan { what });
    let stage_count = plan.stages.len();
    let count = |count: usize| quantity::plural(count as u64, "stage", "stages");
    if let Some(measured_plan) = &measured.plan {
        if measured_plan.graph != plan.model.graph_hash {
            return mismatch("its model differs from the plan's".to_string());
        }
        if measured_plan.stages.len() != stage_count {
            return mismatch(format!("it has {}, the plan {}", count(measured_plan.stages.len()), count(stage_count)));
        }
        for (at, (stage, MeasuredPlace { ops, devices })) in plan.stages.iter().zip(&measured_plan.stages).enumerate() {
            if stage.ops != *ops {
                return mismatch(format!("stage {at} has ops {}, in the plan {}", ranges(ops), ranges(&stage.ops)));
            }
            if stage.devices != *devices {
                let workers = |count: usize| quantity::plural(count as u64, "worker", "workers");
                let (measured_workers, planned_workers) = (workers(devices.len()), workers(stage.devices.len()));
                return match measured_workers == planned_workers {
                    true => mismatch(format!("stage {at} is on other devices than in the plan")),
                    false => mismatch(format!("stage {at} is on {measured_workers}, in the plan on {planned_workers}")),
                };
            }
        }
    }
    match measured.stages.iter().find(|measured_workers| measured_workers.stage as usize >= stage_count) {
        Some(measured_workers) => {
            mismatch(format!("it has a stage {}, the plan has {}", measured_workers.stage, count(stage_count)))
        }
        None => Ok(()),
    }
}

/// Formats half-open ranges with inclusive ends: `0-3, 5`.
fn ranges(list: &[(u32, u32)]) -> String {
    let range = |&(from, to): &(u32, u32)| match to.saturating_sub(1) {
        last if last <= from => from.to_string(),
        last => format!("{from}-{last}"),
    };
    let mut described: Vec<String> = list.iter().take(SHOWN).map(range).collect();
    described.extend((list.len() > SHOWN).then(|| "…".to_string()));
    described.join(", ")
}

pub fn read(text: &str) -> Result<Measured, MetricsError> {
    let mut measured = Measured::default();
    let (mut lines, mut resumed_after) = (Vec::new(), None);
    for (at, line) in text.lines().enumerate().take(MOST).filter(|(_, line)| !line.trim().is_empty()) {
        let line_number = at + 1;
        let value: Value = serde_json::from_str(line).map_err(|_| MetricsError::Line { line: line_number })?;
        let Some(object) = value.as_object() else { return Err(MetricsError::Line { line: line_number }) };
        if let Some(total) = object.get("total") {
            let total = TotalFields { total, line: line_number };
            resumed_after = total.field("resumed_after")?;
            read_total(total, resumed_after, &mut measured)?;
            continue;
        }
        let number = |field: &'static str| {
            let number = object.get(field).and_then(Value::as_f64).filter(|number| number.is_finite());
            number.ok_or(MetricsError::Field { line: line_number, field })
        };
        let seconds = number("seconds")?;
        if seconds * 1e6 > LONGEST_US {
            return Err(MetricsError::Field { line: line_number, field: "seconds" });
        }
        // The loss of a diverged run is null; the run is still shown.
        let loss = object.get("loss").and_then(Value::as_f64).unwrap_or(f64::NAN);
        lines.push(StepLine { line: line_number, step: object.get("step").and_then(Value::as_u64), loss, seconds });
    }
    measured.steps = join_resumed(&lines, resumed_after)?;
    if measured.steps.is_empty() { Err(MetricsError::Empty) } else { Ok(measured) }
}

/// The line of a minibatch.
struct StepLine {
    line: usize,
    /// Index of the minibatch over the whole training; `None` in files of other tools.
    step: Option<u64>,
    loss: f64,
    /// Seconds since its run began.
    seconds: f64,
}

/// Loss and seconds of every minibatch. The seconds of a resumed run begin at 0; here they continue those of the run before.
/// An earlier resumption is found only if they fall.
fn join_resumed(lines: &[StepLine], resumed_after: Option<u64>) -> Result<Vec<(f64, f64)>, MetricsError> {
    let (mut steps, mut earlier, mut previous) = (Vec::new(), 0.0, 0.0);
    let mut last = None;
    for &StepLine { line, step, loss, seconds } in lines {
        let is_next = step.is_some() && step > last;
        if last.is_some() && is_next && (step == resumed_after || seconds < previous) {
            (earlier, previous) = (earlier + previous, 0.0);
        }
        if seconds < previous {
            return Err(MetricsError::Order { line, found: seconds, before: previous });
        }
        (last, previous) = (step, seconds);
        steps.push((loss, earlier + seconds));
    }
    Ok(steps)
}

/// The totals of a run. Every field may be missing or null.
#[derive(Clone, Copy)]
struct TotalFields<'a> {
    total: &'a Value,
    line: usize,
}

impl TotalFields<'_> {
    fn field<T: DeserializeOwned>(self, field: &'static str) -> Result<Option<T>, MetricsError> {
        let error = MetricsError::Total { line: self.line, field };
        let fields = self.total.as_object().ok_or(MetricsError::Line { line: self.line })?;
        fields.get(field).map_or(Ok(None), |value| Option::<T>::deserialize(value).map_err(|_| error))
    }

    fn time_us(self, field: &'static str, us: f64) -> Result<f64, MetricsError> {
        let error = MetricsError::Total { line: self.line, field };
        if (0.0..=LONGEST_US).contains(&us) { Ok(us) } else { Err(error) }
    }
}

fn read_total(total: TotalFields<'_>, resumed: Option<u64>, measured: &mut Measured) -> Result<(), MetricsError> {
    measured.stages = total.field("stages")?.unwrap_or_default();
    for stage in &measured.stages {
        total.time_us("stages", stage.fwd_us.max(stage.bwd_us))?;
        total.time_us("stages", stage.fwd_us.min(stage.bwd_us))?;
    }
    measured.plan = total.field("plan")?;
    measured.order = total.field("order")?;
    measured.differs_from_plan = total.field("differs_from_plan")?.unwrap_or_default();
    measured.step_us = total.field("step_us")?.map(|us| total.time_us("step_us", us)).transpose()?;
    let seconds: Option<f64> = total.field("seconds")?;
    let us = seconds.map(|seconds| total.time_us("seconds", seconds * 1e6)).transpose()?;
    measured.seconds = us.map(|us| us / 1e6).filter(|_| resumed.unwrap_or(0) == 0);
    measured.shared = total.field("workers")?.zip(total.field("cores")?);
    measured.has_totals = true;
    Ok(())
}

/// Microseconds between the ends of consecutive minibatches. The first ones include the pipeline fill.
fn steps(measured: &Measured) -> Vec<f64> {
    let mut previous = 0.0;
    let step = |(_, seconds): &(f64, f64)| {
        let us = (seconds - previous) * 1e6;
        previous = *seconds;
        us
    };
    measured.steps.iter().map(step).collect()
}

/// A notice if the run is not one that the plan describes.
fn other_run(plan: &Plan, measured: &Measured) -> Option<String> {
    let order = || measured.order.as_ref().and_then(|order| other_order(plan, order));
    match &measured.differs_from_plan[..] {
        [] => order(),
        all => Some(format!(
            "The run differs from the plan ({}): the predicted times and memory may not apply.",
            all.iter().map(|what| short_name(what)).collect::<Vec<_>>().join(", ")
        )),
    }
}

/// The prediction interval, if the run had the conditions of the profile.
fn describe_interval(plan: &Plan, measured: &Measured) -> Option<String> {
    let (workers, cores) = measured.shared.filter(|(workers, _)| *workers == u64::from(plan.workers()))?;
    let (comparison, interval) = plan.compared(measured.step_us?).filter(|_| workers <= cores)?;
    let [low, high] = interval.map(quantity::duration);
    Some(format!(" It is {comparison} the {low} to {high} expected."))
}

/// A notice if the run used another schedule or other batch sizes than the plan.
fn other_order(plan: &Plan, order: &MeasuredOrder) -> Option<String> {
    let planned = &plan.schedule;
    let describe = |schedule: &str, microbatches: u32, samples: u64| {
        let items = quantity::plural(u64::from(microbatches), "micro-batch", "micro-batches");
        format!("{items} of {} under {schedule}", quantity::plural(samples, "sample", "samples"))
    };
    let measured_order = describe(&order.schedule, order.microbatches, order.micro_batch);
    let planned_order = describe(planned.kind.name(), planned.microbatches, planned.micro_batch);
    let differ = "the predicted times and memory do not apply";
    (measured_order != planned_order)
        .then(|| format!("The run's minibatches were {measured_order}, the plan assumes {planned_order}: {differ}."))
}

pub fn section(plan: &Plan, measured: &Measured) -> String {
    let steps = steps(measured);
    let predicted = plan.predicted.step_us;
    let count = quantity::plural(steps.len() as u64, "minibatch", "minibatches");
    let last = measured.steps.last().map_or(0.0, |(_, seconds)| *seconds);
    let total_seconds = measured.seconds.unwrap_or(last).max(last);
    let mean = total_seconds * 1e6 / steps.len().max(1) as f64;
    let steady = measured.step_us.unwrap_or(mean);
    let difference = other_run(plan, measured);
    let ratio = if predicted > 0.0 && difference.is_none() {
        format!(", {} times the prediction of {}", quantity::short(steady / predicted), quantity::duration(predicted))
    } else {
        String::new()
    };
    let steady_note = match measured.step_us {
        Some(us) => format!(", {} in the steady state", quantity::duration(us)),
        None => " with the time in which the pipeline fills".to_string(),
    };
    let mut text = paragraph(
        "",
        &format!(
            "{count} in {}: {} each on average{steady_note}{ratio}.{}",
            quantity::duration(total_seconds * 1e6),
            quantity::duration(mean),
            if difference.is_none() { describe_interval(plan, measured).unwrap_or_default() } else { String::new() },
        ),
    );
    let is_other = difference.is_some();
    let unfinished = "The file has no totals, for example because the run was stopped.".to_string();
    for notice in difference.into_iter().chain((!measured.has_totals).then_some(unfinished)) {
        text += &paragraph("", &notice);
    }
    let stride = steps.len().div_ceil(POINTS).max(1);
    let line = |values: Vec<f64>| -> Vec<(f64, f64)> {
        let sampled = values.into_iter().enumerate().step_by(stride);
        sampled.map(|(at, value)| (at as f64, value)).filter(|(_, value)| value.is_finite()).collect()
    };
    let last_step = steps.len().saturating_sub(1).max(1) as f64;
    let curve = |name: &str, points, is_reference| Curve { name: name.to_string(), points, is_reference };
    let plot = |title: &str, up_name: &str, up, curves| Plot {
        title: title.to_string(),
        across_name: "minibatch".to_string(),
        across: HorizontalAxis::Upto(last_step),
        up_name: up_name.to_string(),
        up,
        curves,
        limit: None,
        rings: Vec::new(),
        ring_name: String::new(),
    };
    let times = vec![
        curve("measured", line(steps.clone()), false),
        curve("predicted", vec![(0.0, predicted), (last_step, predicted)], true),
    ];
    let losses = vec![curve("loss", line(measured.steps.iter().map(|(loss, _)| *loss).collect()), false)];
    let time = plot("Minibatch time", "", Unit::Time, times).draw();
    let loss = plot("Loss", "", Unit::Plain, losses).draw();
    text += &figure(&format!("{}{}", time.inline(), loss.inline()));
    if let Some((workers, cores)) = measured.shared.filter(|(workers, cores)| workers > cores) {
        let cores = quantity::plural(cores, "core", "cores");
        text += &paragraph(
            "",
            &format!(
                "The {workers} workers of the run shared {cores} and competed for them. The plan assumes one core per \
                 worker; `pipec simulate` models shared cores."
            ),
        );
    }
    text + &table(plan, measured, steady, is_other)
}

fn table(plan: &Plan, measured: &Measured, step_us: f64, is_other: bool) -> String {
    let caption = "Predicted and measured. Stage times are per micro-batch on the slowest replica; memory is the peak \
                   per device, over all stages on the same devices.";
    let mut table = Table::new(caption, &["what", "predicted", "measured", "ratio"], &[1, 2, 3]);
    let mut row = |what: String, predicted: f64, actual: f64, tell: &dyn Fn(f64) -> String| {
        let is_comparable = predicted > 0.0 && !is_other;
        let ratio = if is_comparable { quantity::short(actual / predicted) } else { String::new() };
        table.row(&[what, tell(predicted), tell(actual), ratio]);
    };
    let what = if measured.step_us.is_some() { "minibatch, in the steady state" } else { "minibatch, on average" };
    row(what.to_string(), plan.predicted.step_us, step_us, &quantity::duration);
    for actual in &measured.stages {
        let Some(stage) = plan.stages.get(actual.stage as usize) else { continue };
        let id = actual.stage;
        row(format!("stage {id}, forward"), stage.fwd_us, actual.fwd_us, &quantity::duration);
        row(format!("stage {id}, backward"), stage.bwd_us, actual.bwd_us, &quantity::duration);
    }
    // A worker reports the memory of all its stages together.
    let bytes = |bytes: f64| quantity::bytes(bytes as u64);
    for device in held(plan) {
        let peak = measured.stages.iter().filter(|actual| device.stages.contains(&(actual.stage as usize)));
        let Some(peak) = peak.map(|actual| actual.peak_memory_bytes).max() else { continue };
        let names: Vec<String> = device.stages.iter().map(usize::to_string).collect();
        let what = match &names[..] {
            [one] => format!("stage {one}, peak memory"),
            names => format!("stages {} together, peak memory", names.join(", ")),
        };
        row(what, device.memory.total as f64, peak as f64, &bytes);
    }
    table.html()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::export::report::MeasuredStage;

    #[test]
    fn metrics_are_read_and_refused() {
        let line = |loss: f64, seconds: f64| {
            format!("{{\"step\":0,\"loss\":{loss},\"seconds\":{seconds},\"samples_per_s\":1.0}}\n")
        };
        let stage = "{\"stage\":0,\"fwd_us\":1.5,\"bwd_us\":3.0,\"peak_memory_bytes\":7}";
        let total = &format!("{{\"total\":{{\"step_us\":2.5e5,\"stages\":[{stage}]}}}}\n");
        let read_back = read(&(line(2.0, 0.5) + &line(1.0, 0.75) + total)).unwrap();
        assert_eq!(read_back.steps, [(2.0, 0.5), (1.0, 0.75)]);
        assert_eq!(read_back.stages, [MeasuredStage { stage: 0, fwd_us: 1.5, bwd_us: 3.0, peak_memory_bytes: 7 }]);
        assert_eq!(read_back.step_us, Some(2.5e5));
        assert_eq!(read(&line(1.0, 1e300)), Err(MetricsError::Field { line: 1, field: "seconds" }));
        assert!(read_back.has_totals && !read(&line(2.0, 0.5)).unwrap().has_totals);
        let total = |content: &str| read(&(line(2.0, 0.5) + &format!("{{\"total\":{content}}}")));
        assert_eq!(total("{\"step_us\":null}").unwrap().step_us, None);
        assert_eq!(total("\"x\""), Err(MetricsError::Line { line: 2 }));
        for (field, value) in [
            ("step_us", "-1"),
            ("step_us", "\"1\""),
            ("stages", "{}"),
            ("stages", "[{\"stage\":0,\"fwd_us\":1e308,\"bwd_us\":3.0,\"peak_memory_bytes\":7}]"),
            ("stages", "[{\"stage\":0,\"fwd_us\":\"1\",\"bwd_us\":3.0,\"peak_memory_bytes\":7}]"),
            ("seconds", "-1"),
            ("plan", "7"),
            ("differs_from_plan", "[1]"),
        ] {
            assert_eq!(
                total(&format!("{{\"{field}\":{value}}}")),
                Err(MetricsError::Total { line: 2, field }),
                "{value}"
            );
        }
        // The second run resumed after the first minibatch; its seconds begin again.
        let resumed = |step: u64, seconds: f64| format!("{{\"step\":{step},\"loss\":1,\"seconds\":{seconds}}}\n");
        let both = resumed(0, 0.5) + &resumed(1, 0.75) + &resumed(2, 0.25) + &resumed(3, 0.5);
        assert_eq!(read(&both).unwrap().steps, [(1.0, 0.5), (1.0, 0.75), (1.0, 1.0), (1.0, 1.25)]);
        let both = resumed(0, 0.25) + &resumed(1, 0.5) + "{\"total\":{\"resumed_after\":1}}";
        assert_eq!(read(&both).unwrap().steps, [(1.0, 0.25), (1.0, 0.75)]);
        assert_eq!(steps(&read_back), [0.5e6, 0.25e6]);
        assert_eq!(read(""), Err(MetricsError::Empty));
        assert_eq!(read("{\"loss\":1}"), Err(MetricsError::Field { line: 1, field: "seconds" }));
        assert_eq!(read("\n[1]"), Err(MetricsError::Line { line: 2 }));
        assert!(matches!(read(&(line(1.0, 2.0) + &line(1.0, 1.0))), Err(MetricsError::Order { line: 2, .. })));
    }
}
