//! The metrics of a training run: one line per minibatch, and totals.

use crate::error::Error;
use crate::events::{Event, EventSink};
use crate::files::overwrite::{self, Mark};
use crate::train::prepare::{self, RunResult};
use crate::train::prepared::Prepared;
use crate::train::task::Task;
use compiler::export::metrics::{End, HeldOut, Line, StageTotal, Step, Total, finite};
use compiler::export::report::{MeasuredOrder, MeasuredPlace, MeasuredPlan};
use compiler::plan::{Plan, Stage};
use compiler::simulate::Activity;
use runtime::process::process_group::Group;
use runtime::train::job::StepDone;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::thread::available_parallelism;

/// Trains, reports every step, and writes the metrics file. In a group of processes, the first one has a result.
pub fn train_with_metrics(
    task: &Task<'_>,
    prepared: &Prepared,
    metrics: Option<&Path>,
    group: Option<Group>,
    events: &dyn EventSink,
) -> Result<Option<RunResult>, Error> {
    let first_step = prepared.first_step();
    let total = u64::from(prepared.steps);
    let mut file = metrics.map(|path| open_file(path, first_step)).transpose()?;
    events.event(Event::Progress { unit: "steps", done: first_step as u64, total, message: "" });
    let mut write_error = None;
    let mut write_line = |line: Line| {
        if let Some(file) = &mut file
            // A run killed here resumes from its last checkpoint, so every earlier line must be in the file.
            && let Err(error) = serde_json::to_string(&line)
                .map_err(io::Error::other)
                .and_then(|text| writeln!(file, "{text}"))
                .and_then(|()| file.flush())
        {
            write_error.get_or_insert(error);
        }
    };
    let result = prepare::run(task, prepared, group, &mut |step: StepDone| {
        let samples = prepared.batch as f64 * (step.step + 1 - first_step) as f64;
        let samples_per_s = if step.seconds > 0.0 { samples / step.seconds } else { 0.0 };
        let index = step.step as u64;
        write_line(Line::Step(Step { step: index, loss: finite(step.loss), seconds: step.seconds, samples_per_s }));
        events.event(Event::Step { step: index + 1, total, loss: step.loss, samples_per_s });
    });
    events.event(Event::ProgressEnd);
    let Some(mut result) = result? else { return Ok(None) };
    if result.ended.is_none() {
        write_line(Line::End(Box::new(End { total: totals(task.plan, prepared, &result) })));
    }
    let flushed = file.map_or(Ok(()), |mut file| file.flush());
    if let (Some(error), Some(path)) = (write_error.or(flushed.err()), metrics) {
        result.failed.push(Error::file("write", path, error));
    }
    Ok(Some(result))
}

/// Opens the metrics file. A resumed run keeps the lines of earlier steps.
fn open_file(path: &Path, first_step: usize) -> Result<BufWriter<File>, Error> {
    let fail = |error| Error::file("write", path, error);
    overwrite::check(path, &Mark::Metrics)?;
    let is_earlier = |line: &&str| {
        let step = serde_json::from_str::<serde_json::Value>(line).ok().and_then(|line| line["step"].as_u64());
        step.is_some_and(|step| step < first_step as u64)
    };
    let earlier_lines = match first_step {
        0 => String::new(),
        // Reading a pipe or a terminal would block.
        _ if !path.is_file() => String::new(),
        _ => fs::read_to_string(path).unwrap_or_default(),
    };
    let mut file = File::create(path).map(BufWriter::new).map_err(fail)?;
    earlier_lines.lines().filter(is_earlier).try_for_each(|line| writeln!(file, "{line}")).map_err(fail)?;
    Ok(file)
}

/// Totals of a run, as in the metrics file.
pub fn totals(plan: &Plan, prepared: &Prepared, result: &RunResult) -> Total {
    let (schedule, microbatches) = prepared.order();
    let stage_place = |stage: &Stage| MeasuredPlace { ops: stage.ops.clone(), devices: stage.devices.clone() };
    let losses = &result.trained.losses;
    Total {
        steps: u64::from(prepared.steps),
        resumed_after: prepared.first_step() as u64,
        epochs: f64::from(prepared.steps) / prepared.per_epoch.max(1) as f64,
        first_loss: losses.first().copied().and_then(finite),
        last_loss: losses.last().copied().and_then(finite),
        seconds: result.trained.seconds,
        samples_per_s: result.samples_per_s,
        step_us: result.step_us,
        stages: stage_totals(result),
        plan: MeasuredPlan {
            graph: plan.model.graph_hash.clone(),
            stages: plan.stages.iter().map(stage_place).collect(),
        },
        order: MeasuredOrder {
            schedule: schedule.to_string(),
            micro_batch: prepared.batch / u64::from(microbatches),
            microbatches,
        },
        differs_from_plan: prepared.differs_from_plan.iter().map(|what| what.to_string()).collect(),
        workers: result.trained.peak_memory_bytes.len() as u64,
        cores: available_parallelism().map_or(1, |cores| cores.get() as u64),
        held_out: result.score.map(|score| HeldOut {
            rows: score.rows as u64,
            loss: finite(score.loss),
            accuracy: score.accuracy,
        }),
    }
}

/// The times of each stage on its slowest replica, and the peak bytes over its replicas, also of checkpoints.
fn stage_totals(result: &RunResult) -> Vec<StageTotal> {
    let mut stages: BTreeMap<u32, StageTotal> = BTreeMap::new();
    for (at, track) in result.tracks.iter().enumerate() {
        let peaks = [&result.trained.peak_memory_bytes, &result.trained.checkpoint_bytes];
        let [peak_bytes, checkpoint_bytes] = peaks.map(|bytes| bytes.get(at).copied().unwrap_or(0));
        let mut sums: BTreeMap<u32, [(f64, u32); 2]> = BTreeMap::new();
        for span in &track.spans {
            // As in plans, backward time includes both passes of a split backward, recomputation and the optimizer step.
            let (stage, direction, ends) = match span.activity {
                Activity::Forward(stage, _) => (stage, 0, 1),
                Activity::Backward(stage, _) | Activity::BackwardWeight(stage, _) => (stage, 1, 1),
                Activity::BackwardInput(stage, _) | Activity::Recompute(stage, _) | Activity::Step(stage, _) => {
                    (stage, 1, 0)
                }
                _ => continue,
            };
            let sum = &mut sums.entry(stage.0).or_default()[direction];
            *sum = (sum.0 + span.end - span.start, sum.1 + ends);
        }
        for (stage, sums) in sums {
            let [forward, backward] = sums.map(|(us, count)| us / f64::from(count.max(1)));
            let none = StageTotal { stage, fwd_us: 0.0, bwd_us: 0.0, peak_memory_bytes: 0, checkpoint_bytes: 0 };
            let total = stages.entry(stage).or_insert(none);
            (total.fwd_us, total.bwd_us) = (total.fwd_us.max(forward), total.bwd_us.max(backward));
            total.peak_memory_bytes = total.peak_memory_bytes.max(peak_bytes);
            total.checkpoint_bytes = total.checkpoint_bytes.max(checkpoint_bytes);
        }
    }
    stages.into_values().collect()
}

/// The bytes of all stages on the devices of stage `at`.
pub fn device_bytes(plan: &Plan, at: usize, bytes: &[u64]) -> u64 {
    let colocated = plan.stages.iter().zip(bytes).filter(|(stage, _)| stage.devices == plan.stages[at].devices);
    colocated.fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
}
