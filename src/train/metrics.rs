//! The metrics of a training run: one line per minibatch, and totals.

use crate::error::Error;
use crate::events::{Event, EventSink};
use crate::files::overwrite;
use crate::files::overwrite::Mark;
use crate::train::prepare;
use crate::train::prepare::Done;
use crate::train::prepared::Prepared;
use crate::train::task::Task;
use compiler::export::metrics::{End, HeldOut, Line, PlanTotal, StageTotal, Step, Total, finite};
use compiler::export::report::{MeasuredOrder, MeasuredPlace};
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
pub fn watched(
    task: &Task<'_>,
    prepared: &Prepared,
    metrics: Option<&Path>,
    group: Option<Group>,
    events: &dyn EventSink,
) -> Result<Option<Done>, Error> {
    let first = prepared.first();
    let total = u64::from(prepared.steps);
    let mut file = metrics.map(|path| opened(path, first)).transpose()?;
    events.event(Event::Progress { unit: "steps", done: first as u64, total, message: "" });
    let mut fault = None;
    let mut line = |line: Line| {
        if let Some(file) = &mut file
            // A run killed here resumes from its last checkpoint, so every earlier line must be in the file.
            && let Err(error) = serde_json::to_string(&line)
                .map_err(io::Error::other)
                .and_then(|text| writeln!(file, "{text}"))
                .and_then(|()| file.flush())
        {
            fault.get_or_insert(error);
        }
    };
    let done = prepare::run(task, prepared, group, &mut |step: StepDone| {
        let samples = prepared.batch as f64 * (step.step + 1 - first) as f64;
        let samples_per_s = if step.seconds > 0.0 { samples / step.seconds } else { 0.0 };
        let at = step.step as u64;
        line(Line::Step(Step { step: at, loss: finite(step.loss), seconds: step.seconds, samples_per_s }));
        events.event(Event::Step { step: at + 1, total, loss: step.loss, samples_per_s });
    });
    events.event(Event::ProgressEnd);
    let Some(done) = done? else { return Ok(None) };
    if done.ended.is_none() {
        line(Line::End(Box::new(End { total: totals(task.plan, prepared, &done) })));
    }
    let flushed = file.map_or(Ok(()), |mut file| file.flush());
    match (fault.or(flushed.err()), metrics) {
        (Some(error), Some(path)) => Err(Error::file("write", path, error)),
        _ => Ok(Some(done)),
    }
}

/// Opens the metrics file. A resumed run keeps the lines of earlier steps.
fn opened(path: &Path, first: usize) -> Result<BufWriter<File>, Error> {
    let fail = |error| Error::file("write", path, error);
    overwrite::check(path, &Mark::Metrics)?;
    let before = |line: &&str| {
        let step = serde_json::from_str::<serde_json::Value>(line).ok().and_then(|line| line["step"].as_u64());
        step.is_some_and(|step| step < first as u64)
    };
    let kept = match first {
        0 => String::new(),
        // Reading a pipe or a terminal would block.
        _ if !path.is_file() => String::new(),
        _ => fs::read_to_string(path).unwrap_or_default(),
    };
    let mut file = File::create(path).map(BufWriter::new).map_err(fail)?;
    kept.lines().filter(before).try_for_each(|line| writeln!(file, "{line}")).map_err(fail)?;
    Ok(file)
}

/// Totals of a run, as in the metrics file.
pub fn totals(plan: &Plan, prepared: &Prepared, done: &Done) -> Total {
    let (schedule, microbatches) = prepared.order();
    let place = |stage: &Stage| MeasuredPlace { ops: stage.ops.clone(), devices: stage.devices.clone() };
    let losses = &done.trained.losses;
    Total {
        steps: u64::from(prepared.steps),
        resumed_after: prepared.first() as u64,
        epochs: f64::from(prepared.steps) / prepared.per_epoch.max(1) as f64,
        first_loss: losses.first().copied().and_then(finite),
        last_loss: losses.last().copied().and_then(finite),
        seconds: done.trained.seconds,
        samples_per_s: done.samples_per_s,
        step_us: done.step_us,
        stages: measured(done),
        plan: PlanTotal { graph: plan.model.graph_hash.clone(), stages: plan.stages.iter().map(place).collect() },
        order: MeasuredOrder {
            schedule: schedule.to_string(),
            micro_batch: prepared.batch / u64::from(microbatches),
            microbatches,
        },
        differs_from_plan: prepared.differs_from_plan.iter().map(|what| what.to_string()).collect(),
        workers: done.trained.peak_memory_bytes.len() as u64,
        cores: available_parallelism().map_or(1, |cores| cores.get() as u64),
        held_out: done.score.map(|score| HeldOut {
            rows: score.rows as u64,
            loss: finite(score.loss),
            accuracy: score.accuracy,
        }),
    }
}

/// The times of each stage on its slowest replica, and the peak bytes over its replicas, also of checkpoints.
fn measured(done: &Done) -> Vec<StageTotal> {
    let mut stages: BTreeMap<u32, (f64, f64, [u64; 2])> = BTreeMap::new();
    for (at, track) in done.tracks.iter().enumerate() {
        let both = [&done.trained.peak_memory_bytes, &done.trained.checkpoint_bytes];
        let [held, given] = both.map(|bytes| bytes.get(at).copied().unwrap_or(0));
        let mut sums: BTreeMap<u32, [(f64, u32); 2]> = BTreeMap::new();
        for span in &track.spans {
            // As in plans, backward time includes both passes of a split backward, recomputation and the optimizer step.
            let (stage, way, ends) = match span.activity {
                Activity::Forward(stage, _) => (stage, 0, 1),
                Activity::Backward(stage, _) | Activity::BackwardWeight(stage, _) => (stage, 1, 1),
                Activity::BackwardInput(stage, _) | Activity::Recompute(stage, _) | Activity::Step(stage, _) => {
                    (stage, 1, 0)
                }
                _ => continue,
            };
            let sum = &mut sums.entry(stage.0).or_default()[way];
            *sum = (sum.0 + span.end - span.start, sum.1 + ends);
        }
        for (stage, sums) in sums {
            let [forward, backward] = sums.map(|(us, count)| us / f64::from(count.max(1)));
            let most = stages.entry(stage).or_default();
            let [most_held, most_given] = most.2;
            *most = (most.0.max(forward), most.1.max(backward), [most_held.max(held), most_given.max(given)]);
        }
    }
    let one = |(stage, (fwd_us, bwd_us, [peak_memory_bytes, checkpoint_bytes])): (u32, (f64, f64, [u64; 2]))| {
        StageTotal { stage, fwd_us, bwd_us, peak_memory_bytes, checkpoint_bytes }
    };
    stages.into_iter().map(one).collect()
}

/// The bytes of all stages on the devices of stage `at`.
pub fn of_device(plan: &Plan, at: usize, bytes: &[u64]) -> u64 {
    let beside = plan.stages.iter().zip(bytes).filter(|(other, _)| other.devices == plan.stages[at].devices);
    beside.fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
}
