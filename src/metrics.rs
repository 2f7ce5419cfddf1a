//! What training tells: its steps while it runs, on the screen and in the file of metrics, and what was trained when it is over.

use crate::failure::Failure;
use crate::replaced::{self, Mark};
use crate::screen::Screen;
use crate::training::{self, Done, Prepared, Task};
use crate::{quantity, stages};
use compiler::export::metrics::{End, HeldOut, Line, PlanTotal, StageTotal, Step, Total, finite};
use compiler::export::report::{MeasuredOrder, MeasuredPlace};
use compiler::plan::{Plan, Stage};
use compiler::simulate::Activity;
use runtime::process::process_group::Group;
use runtime::train::run::StepDone;
use serde_json::json;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, IsTerminal, Write};
use std::path::Path;
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

/// The progress bar of a run.
pub const BAR: &str = "{bar:30} {pos}/{len} steps, {left}, {msg}";

/// How often a run says where it is, where there is no terminal to draw on.
const TOLD: Duration = Duration::from_secs(10);

/// Trains with a progress bar, or a line now and then where nobody would see it, and writes the metrics as they come. In a group of
/// processes, the first one tells what was done.
pub fn watched(
    task: &Task<'_>,
    prepared: &Prepared,
    metrics: Option<&Path>,
    group: Option<Group>,
    screen: &Screen,
) -> Result<Option<Done>, Failure> {
    let first = prepared.first();
    let mut file = metrics.map(|path| opened(path, first)).transpose()?;
    let bar = screen.progress(u64::from(prepared.steps), BAR);
    bar.set_position(first as u64);
    let mut told = Instant::now();
    let mut fault = None;
    let mut line = |line: Line| {
        if let Some(file) = &mut file
            // A run that is ended here goes on behind its last checkpoint, and no line before that may be missing.
            && let Err(error) = serde_json::to_string(&line)
                .map_err(io::Error::other)
                .and_then(|text| writeln!(file, "{text}"))
                .and_then(|()| file.flush())
        {
            fault.get_or_insert(error);
        }
    };
    let done = training::run(task, prepared, group, &mut |step: StepDone| {
        let samples = prepared.batch as f64 * (step.step + 1 - first) as f64;
        let rate = if step.seconds > 0.0 { samples / step.seconds } else { 0.0 };
        let (at, loss) = (step.step as u64, finite(step.loss));
        line(Line::Step(Step { step: at, loss, seconds: step.seconds, samples_per_s: rate }));
        bar.set_message(format!("loss {:.4}", step.loss));
        bar.inc(1);
        if !io::stderr().is_terminal() && told.elapsed() >= TOLD {
            told = Instant::now();
            let (done, rate) = (step.step + 1, quantity::samples(rate));
            screen.note(&format!("step {done} of {}: loss {:.4}, {rate} samples/s", prepared.steps, step.loss));
        }
    });
    bar.finish_and_clear();
    let Some(done) = done? else { return Ok(None) };
    if done.ended.is_none() {
        line(Line::End(End { total: totals(task.plan, prepared, &done) }));
    }
    let flushed = file.map_or(Ok(()), |mut file| file.flush());
    match (fault.or(flushed.err()), metrics) {
        (Some(error), Some(path)) => Err(Failure::file("write", path, error)),
        _ => Ok(Some(done)),
    }
}

/// The file of metrics. A run that goes on keeps the lines of the steps before it.
fn opened(path: &Path, first: usize) -> Result<BufWriter<File>, Failure> {
    let fail = |error| Failure::file("write", path, error);
    replaced::check(path, &Mark::Metrics)?;
    let before = |line: &&str| {
        let step = serde_json::from_str::<serde_json::Value>(line).ok().and_then(|line| line["step"].as_u64());
        step.is_some_and(|step| step < first as u64)
    };
    let kept = match first {
        0 => String::new(),
        // A pipe or a terminal would be waited for.
        _ if !path.is_file() => String::new(),
        _ => fs::read_to_string(path).unwrap_or_default(),
    };
    let mut file = File::create(path).map(BufWriter::new).map_err(fail)?;
    kept.lines().filter(before).try_for_each(|line| writeln!(file, "{line}")).map_err(fail)?;
    Ok(file)
}

fn totals(plan: &Plan, prepared: &Prepared, done: &Done) -> Total {
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
        stages: measured(done),
        plan: PlanTotal { graph: plan.model.graph_hash.clone(), stages: plan.stages.iter().map(place).collect() },
        order: MeasuredOrder {
            schedule: schedule.to_string(),
            micro_batch: prepared.batch / u64::from(microbatches),
            microbatches,
        },
        workers: done.trained.held_bytes.len() as u64,
        cores: available_parallelism().map_or(1, |cores| cores.get() as u64),
        held_out: done.score.map(|score| HeldOut {
            rows: score.rows as u64,
            loss: finite(score.loss),
            accuracy: score.accuracy,
        }),
    }
}

/// What each stage took for an item on its slowest replica, and what its fullest held, itself and for checkpoints.
fn measured(done: &Done) -> Vec<StageTotal> {
    let mut stages: BTreeMap<u32, (f64, f64, [u64; 2])> = BTreeMap::new();
    for (at, track) in done.tracks.iter().enumerate() {
        let both = [&done.trained.held_bytes, &done.trained.checkpoint_bytes];
        let [held, given] = both.map(|bytes| bytes.get(at).copied().unwrap_or(0));
        let mut sums: BTreeMap<u32, [(f64, u32); 2]> = BTreeMap::new();
        for span in &track.spans {
            // The two parts of a backward are one, with the forward that runs again for it and the optimizer's step, as plans have it.
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
    let one = |(stage, (fwd_us, bwd_us, [held_bytes, checkpoint_bytes])): (u32, (f64, f64, [u64; 2]))| StageTotal {
        stage,
        fwd_us,
        bwd_us,
        held_bytes,
        checkpoint_bytes,
    };
    stages.into_iter().map(one).collect()
}

/// What the fullest replica of each stage held at once, beside what the plan says, or what was reckoned where something else than
/// the plan is trained.
fn held(plan: &Plan, own: Option<&[u64]>, workers: &[u64]) -> String {
    let planned: Vec<u64> = plan.stages.iter().map(|stage| stage.memory.total).collect();
    let (bytes, word) = own.map_or((&planned[..], "planned"), |own| (own, "reckoned"));
    // Workers come in the order of the first stages of their devices; a device that holds several holds their sum.
    let mut workers = workers.iter();
    let mut told = Vec::new();
    for (at, stage) in plan.stages.iter().enumerate() {
        if plan.stages[..at].iter().any(|other| other.devices == stage.devices) {
            continue;
        }
        let most = workers.by_ref().take(stage.replicas as usize).max().copied().unwrap_or(0);
        told.push(format!("{} ({} {word})", quantity::bytes(most), quantity::bytes(of_device(plan, at, bytes))));
    }
    format!("most held at once, stage by stage: {}", told.join(", "))
}

/// Tells what was trained.
pub fn report(plan: &Plan, own: Option<&[u64]>, prepared: &Prepared, done: &Done, screen: &Screen) {
    let losses = &done.trained.losses;
    let (first, last) = (losses.first().copied().unwrap_or(0.0), losses.last().copied().unwrap_or(0.0));
    if losses.is_empty() {
        screen.text(&format!(
            "the run is finished: all {} were done before; a larger `--steps` or `--epochs` goes on",
            stages::plural(u64::from(prepared.steps), "step", "steps")
        ));
        screen.json(&json!(totals(plan, prepared, done)));
        return;
    }
    screen.prose(&format!(
        "trained {} of {} in {}: loss {} to {}, {} samples/s",
        stages::plural(losses.len() as u64, "step", "steps"),
        stages::plural(prepared.batch, "sample", "samples"),
        quantity::time(done.trained.seconds * 1e6),
        quantity::short(first),
        quantity::short(last),
        quantity::samples(done.samples_per_s),
    ));
    // Else the run would not have come to its end.
    let left_out = losses.iter().filter(|loss| !loss.is_finite()).count();
    if left_out > 0 {
        screen.warn(&format!(
            "{} had no finite loss; loss scaling left their updates out",
            stages::plural(left_out as u64, "step", "steps")
        ));
    }
    if let Some(score) = &done.score {
        let accuracy =
            score.accuracy.map_or(String::new(), |share| format!(", accuracy {} %", quantity::short(share * 100.0)));
        let rows = stages::plural(score.rows as u64, "row", "rows");
        screen.text(&format!("held out {rows}: loss {}{accuracy}", quantity::short(score.loss)));
    }
    screen.note(&held(plan, own, &done.trained.held_bytes));
    if let Some(most) = done.trained.checkpoint_bytes.iter().max().filter(|most| **most > 0) {
        screen.note(&format!(
            "besides, until checkpoints were written, a worker held up to {} for them",
            quantity::bytes(*most)
        ));
    }
    screen.json(&json!(totals(plan, prepared, done)));
}

/// The bytes of all stages that stand on the devices of one.
pub fn of_device(plan: &Plan, at: usize, bytes: &[u64]) -> u64 {
    let beside = plan.stages.iter().zip(bytes).filter(|(other, _)| other.devices == plan.stages[at].devices);
    beside.fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
}
