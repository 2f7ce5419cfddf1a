//! Checkpoints of a run: finds the one to resume from, checks that it belongs to this run, and reports new ones.

use crate::error::Error;
use crate::events::EventSink;
use crate::files::{detect, missing};
use crate::model::list_names;
use crate::train::prepared::{Prepared, ResumedState};
use crate::train::request::{CheckpointRequest, Resume};
use crate::train::run_settings::{differences, run_settings};
use crate::train::task::{CheckpointSettings, Task};
use compiler::plan::schedule::Schedule;
use compiler::tensor::Tensor;
use compiler::text::name::short_name;
use compiler::text::quantity;
use runtime::checkpoint::error::CheckpointWriteError;
use runtime::checkpoint::find::{self, FindError, Found};
use runtime::checkpoint::lock::{self, Held, LockError};
use runtime::checkpoint::manifest::{FILE, Manifest, ShardLayout, StageLayout};
use runtime::checkpoint::resume_point::ResumePoint;
use runtime::checkpoint::writer::{Saved, WriterConfig};
use runtime::optim::lr_schedule::Shape;
use runtime::train::resume::{ResumeError, check_states};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

const MAX_LISTED: usize = 16;

/// The file of trained weights in the folder of checkpoints.
pub const WEIGHTS: &str = "weights.safetensors";

/// The existing checkpoints of a request, newest first, with the time when each was written.
pub fn existing(request: &CheckpointRequest) -> Vec<(PathBuf, Option<SystemTime>)> {
    let checkpoints = request.folder.as_deref().and_then(|folder| find::candidates(folder).ok()).unwrap_or_default();
    let with_time = |(_, path): (u32, PathBuf)| {
        let modified = path.join(FILE).metadata().and_then(|metadata| metadata.modified()).ok();
        (path, modified)
    };
    checkpoints.into_iter().map(with_time).collect()
}

/// Makes a run that restarts after a failure resume from the newest checkpoint that it has written itself. Those that existed
/// `before` may belong to another run.
pub fn resume_after_failure(request: &mut CheckpointRequest, before: &[(PathBuf, Option<SystemTime>)]) {
    let is_named = request.resume.as_ref().is_some_and(|source| source.as_os_str() != "auto");
    let mut checkpoints = existing(request).into_iter();
    request.resume = match is_named {
        true => {
            checkpoints.find(|checkpoint| !before.contains(checkpoint)).map(|(path, _)| path).or(request.resume.take())
        }
        false => checkpoints.next().map(|_| PathBuf::from("auto")).or(request.resume.take()),
    };
}

/// Refuses to write checkpoints into a folder with checkpoints of another run. `is_held`: this run holds the lock of the folder.
pub fn refuse_other_runs(folder: &Path, resume: Option<Resume<'_>>, is_held: bool) -> Result<(), Error> {
    let is_here = |source: &Path| match (source.canonicalize(), folder.canonicalize()) {
        (Ok(source), Ok(folder)) => source.parent() == Some(&folder),
        _ => false,
    };
    match resume {
        Some(Resume::Newest(_)) => return Ok(()),
        Some(Resume::From(source)) if is_here(source) => return Ok(()),
        _ => {}
    }
    if folder.is_file() {
        let why = format!("{} is a file, but checkpoints need a folder", folder.display());
        return Err(Error::input("cannot write checkpoints")
            .because(why)
            .with_help("pass a folder, for example `--checkpoint-dir ck`"));
    }
    let checkpoints =
        find::candidates(folder).map_err(|error| Error::input("cannot write checkpoints").because(error))?;
    let Some((_, newest)) = checkpoints.first() else { return Ok(()) };
    if !is_held {
        // The checkpoints of a run in progress cannot be resumed.
        lock_folder(folder)?;
    }
    Err(Error::input(format!("{} has checkpoints of another run", folder.display()))
        .because(format!("the newest is {}", newest.display()))
        .with_help("resume it with `--resume auto`, or choose another `--checkpoint-dir`"))
}

/// Locks the folder for this run until the result is dropped: two runs would remove each other's checkpoints.
pub fn lock_folder(folder: &Path) -> Result<Held, Error> {
    lock::hold(folder).map_err(|error| {
        let failure = Error::input("cannot write checkpoints").because(&error);
        match error {
            LockError::Taken { .. } => failure.with_help("wait until it ends, or choose another `--checkpoint-dir`"),
            LockError::Open { .. } => failure.with_help("choose a readable and writable location"),
        }
    })
}

/// The state that the run resumes from; `None` if it starts afresh.
pub fn find_resume_state(
    resume: Resume<'_>,
    task: &Task<'_>,
    prepared: &Prepared,
    events: &dyn EventSink,
) -> Result<Option<ResumedState>, Error> {
    match resume {
        Resume::From(folder) => {
            let checkpoint = find::read(folder).map_err(|fault| read_error(folder, &fault))?;
            if let Some(newer) = find_newer(checkpoint.manifest.minibatches, task) {
                events.note(&format!(
                    "{} is newer than the checkpoint that this run resumes from: `--resume auto` would use it until this run has passed it",
                    newer.display()
                ));
            }
            resume_state(folder, checkpoint, task, prepared, events)?
                .map(Some)
                .map_err(|missing| resume_error(folder).because(missing))
        }
        Resume::Newest(folder) => {
            let checkpoints = find::candidates(folder)
                .map_err(|error| Error::input("cannot search for checkpoints").because(error))?;
            let mut is_broken = false;
            for (_, path) in checkpoints {
                let why = match find::read(&path) {
                    Ok(checkpoint) => match resume_state(&path, checkpoint, task, prepared, events)? {
                        Ok(state) => return Ok(Some(state)),
                        Err(missing) => missing,
                    },
                    Err(fault) => fault.to_string(),
                };
                events.warn(&format!("{} is skipped: {why}", path.display()));
                is_broken = true;
            }
            let start = format!("no complete checkpoint in {}: the run starts from the beginning", folder.display());
            if is_broken {
                events.warn(&start)
            } else {
                events.note(&start)
            };
            Ok(None)
        }
    }
}

fn read_error(folder: &Path, fault: &FindError) -> Error {
    let failure = resume_error(folder);
    if !folder.exists() {
        return failure.because("no such folder").with_help(missing::help(folder)).with_more_help(RESUME_HELP);
    }
    if folder.is_file() {
        let failure = failure.because("it is a file, but a checkpoint is a folder");
        return failure.with_help(match detect::describe_non_model(folder) {
            Some(_) => {
                format!("`--weights {}` starts a new run with the weights of a file; {RESUME_HELP}", folder.display())
            }
            None => RESUME_HELP.to_string(),
        });
    }
    let failure = failure.because(fault);
    match find::all(folder).ok().and_then(|all| all.into_iter().next()) {
        Some((_, newest)) if !folder.join(FILE).exists() => {
            failure.with_help(format!("pass the folder of one checkpoint: `--resume {}`", newest.display()))
        }
        _ => failure.with_help(RESUME_HELP),
    }
}

/// Help that needs no checkpoint name.
const RESUME_HELP: &str = "`--resume auto` uses the newest complete checkpoint of `--checkpoint-dir`";

fn resume_error(folder: &Path) -> Error {
    Error::input(format!("cannot resume from {}", folder.display()))
}

/// The state to resume from, or what is missing in the checkpoint.
fn resume_state(
    folder: &Path,
    checkpoint: Found,
    task: &Task<'_>,
    prepared: &Prepared,
    events: &dyn EventSink,
) -> Result<Result<ResumedState, String>, Error> {
    let Found { manifest, weights, mut start } = checkpoint;
    check_match(folder, &manifest, task, prepared).map_err(|failure| match find_older(folder, task, prepared) {
        Some(path) => {
            failure.with_more_help(format!("`--resume {}` is an older checkpoint that matches", path.display()))
        }
        None => failure,
    })?;
    if let Some(missing) = missing_weights(&weights, prepared) {
        return Ok(Err(missing));
    }
    let is_same_plan = manifest.plan == prepared.layout();
    let is_short = is_same_plan && ends_before(&manifest, prepared);
    if !is_same_plan || is_short {
        start.flight = None;
    }
    if let Err(fault) = start.check_whole(&prepared.unsharded_job(task)) {
        return Ok(Err(fault.to_string()));
    }
    let has_decay = matches!(task.optimizer.rate.shape, Shape::Cosine { .. } | Shape::Linear { .. });
    report_resume(folder, &manifest, (is_same_plan, is_short, has_decay), prepared, events);
    let mut merged = task.weights.clone();
    merged.extend(weights);
    Ok(Ok(ResumedState { weights: merged, start }))
}

/// Refuses the checkpoint of another run, or one at a step where this run has no checkpoint.
fn check_match(folder: &Path, manifest: &Manifest, task: &Task<'_>, prepared: &Prepared) -> Result<(), Error> {
    let mut differences = differences(&manifest.run, &run_settings(task, prepared));
    differences.truncate(MAX_LISTED);
    if !differences.is_empty() {
        let failure = differences.into_iter().fold(resume_error(folder), Error::because);
        return Err(failure.with_help(format!(
            "use the same settings as that run, or start a new run with its weights: `--weights {}`",
            folder.display()
        )));
    }
    let start = ResumePoint { minibatches: manifest.minibatches, ..ResumePoint::default() };
    start.check(&prepared.compiled.program).map_err(|error| {
        let failure = resume_error(folder).because(&error);
        match error {
            ResumeError::Round { .. } => {
                failure.with_help("use another plan, or a checkpoint after a multiple of that")
            }
            _ => failure.with_help("make the run longer with `--steps` or `--epochs`"),
        }
    })
}

/// The weights of the run that a checkpoint does not have.
fn missing_weights(weights: &BTreeMap<String, Tensor>, prepared: &Prepared) -> Option<String> {
    let missing: BTreeSet<String> = prepared.names().into_iter().filter(|name| !weights.contains_key(name)).collect();
    (!missing.is_empty()).then(|| format!("it has no {}", list_names(&missing.into_iter().collect::<Vec<_>>())))
}

/// The newest earlier checkpoint in the same folder from which the run can resume.
fn find_older(folder: &Path, task: &Task<'_>, prepared: &Prepared) -> Option<PathBuf> {
    let step = folder.file_name()?.to_str().and_then(find::minibatches)?;
    let parent = folder.parent().map(|parent| if parent == Path::new("") { Path::new(".") } else { parent })?;
    let mut earlier = find::all(parent).ok()?.into_iter().filter(|(minibatches, _)| *minibatches < step);
    let matches =
        |path: &Path| find::manifest(path).is_ok_and(|manifest| check_match(path, &manifest, task, prepared).is_ok());
    let (_, path) = earlier.find(|(_, path)| matches(path))?;
    // The files of only one checkpoint are read.
    find::read(&path).is_ok_and(|checkpoint| missing_weights(&checkpoint.weights, prepared).is_none()).then_some(path)
}

/// The newest checkpoint in the output folder of this run, if it is of a later step than the one it resumes from.
fn find_newer(step: u32, task: &Task<'_>) -> Option<PathBuf> {
    let (minibatches, newest) = find::all(task.checkpoint_settings.as_ref()?.folder).ok()?.into_iter().next()?;
    (minibatches > step).then_some(newest)
}

/// True if the checkpoint is from the last steps of a shorter run, where nothing was in flight after its end.
fn ends_before(manifest: &Manifest, prepared: &Prepared) -> bool {
    let program = &prepared.compiled.program;
    let in_flight = program.stages.iter().map(|stage| stage.cap.saturating_mul(stage.replicas)).max();
    // Includes the minibatch whose update comes before the checkpoint.
    let last_steps = in_flight.unwrap_or(1).saturating_sub(1);
    let is_near = manifest.minibatches.saturating_add(last_steps) > manifest.steps;
    is_near && manifest.steps < prepared.steps && !program.schedule.flushes()
}

/// Reports the differences between a resumed run and its checkpoint.
fn report_resume(
    folder: &Path,
    manifest: &Manifest,
    (is_same_plan, is_short, has_decay): (bool, bool, bool),
    prepared: &Prepared,
    events: &dyn EventSink,
) {
    let (completed, layout) = (manifest.minibatches, prepared.layout());
    events.note(&format!("resuming after step {completed} of {} from {}", prepared.steps, folder.display()));
    if manifest.steps != prepared.steps {
        let length = format!(
            "the run was started with {}, and now has {}",
            quantity::plural(u64::from(manifest.steps), "step", "steps"),
            prepared.steps
        );
        match has_decay {
            true => events.warn(&format!("{length}: the learning rate now decays towards the new end")),
            false => events.note(&length),
        }
    }
    if is_short {
        events.warn(
            "the checkpoint is from the last steps of a shorter run, after which nothing was in flight: every stage starts with one weight version, \
             and the result differs from that of a run with this length from the start",
        );
    }
    if is_same_plan {
        return;
    }
    let flushes = |name: &str| name.parse::<Schedule>().is_ok_and(Schedule::flushes);
    if !(flushes(&manifest.plan.schedule) && flushes(&layout.schedule)) {
        let difference = first_difference(&manifest.plan, &layout);
        events.warn(&format!(
            "the checkpoint is from another plan ({difference}), and without a flush only the same plan resumes exactly: every stage \
             starts with one weight version, and the result differs from that of an uninterrupted run"
        ));
    } else if manifest.plan.microbatches != layout.microbatches {
        events.warn(&format!(
            "the checkpoint has minibatches of {}, now {}: their sums are rounded differently",
            quantity::plural(u64::from(manifest.plan.microbatches), "micro-batch", "micro-batches"),
            layout.microbatches
        ));
    } else {
        events.note("the plan differs from the checkpoint's; parameters and optimizer state are matched by name");
    }
}

/// Describes the first difference between two shard layouts.
fn first_difference(before: &ShardLayout, now: &ShardLayout) -> String {
    let list = |property: &dyn Fn(&StageLayout) -> u32, plan: &ShardLayout| {
        plan.stages.iter().map(|stage| property(stage).to_string()).collect::<Vec<_>>().join(",")
    };
    let stages = |plan: &ShardLayout| quantity::plural(plan.stages.len() as u64, "stage", "stages");
    let change = |label: &str, before: &str, now: &str| {
        (before != now).then(|| format!("{label}{}, now {now}", short_name(before)))
    };
    let count = |plan: &ShardLayout| plan.microbatches.to_string();
    let replicas = |plan: &ShardLayout| list(&|stage| stage.replicas, plan);
    let caps = |plan: &ShardLayout| list(&|stage| stage.cap, plan);
    change("schedule ", &before.schedule, &now.schedule)
        .or_else(|| change("", &stages(before), &stages(now)))
        .or_else(|| change("replicas ", &replicas(before), &replicas(now)))
        .or_else(|| change("micro-batches ", &count(before), &count(now)))
        .or_else(|| change("staleness ", &before.staleness, &now.staleness))
        .or_else(|| change("in flight ", &caps(before), &caps(now)))
        .unwrap_or_else(|| "its stages end after other ops".to_string())
}

/// The configuration of the checkpoint writer.
pub fn writer_config<'a>(
    settings: &CheckpointSettings<'_>,
    task: &Task<'a>,
    prepared: &'a Prepared,
) -> WriterConfig<'a> {
    let job = prepared.unsharded_job(task);
    WriterConfig {
        folder: settings.folder.to_path_buf(),
        keep: task.request.checkpoints.keep.map(|keep| keep as usize),
        resumed_at: prepared.resumed.as_ref().map(|resumed| resumed.start.minibatches),
        run: run_settings(task, prepared).into_iter().map(|(name, setting)| (name, setting.text)).collect(),
        plan: prepared.layout(),
        steps: prepared.steps,
        per_epoch: u32::try_from(prepared.per_epoch).unwrap_or(u32::MAX),
        codes: job.codes,
        optimizer: job.optimizer,
        initial: job.weights,
    }
}

/// Reports when checkpoints are written, if that differs from the request.
pub fn report_steps(task: &Task<'_>, prepared: &Prepared, events: &dyn EventSink) {
    let steps_written = prepared.cuts(task);
    if prepared.first_step() as u32 >= prepared.steps {
        return;
    }
    let (steps, period, last) = (prepared.steps, steps_written.period, steps_written.last());
    if steps_written.after(prepared.first_step() as u32).is_none() {
        let why = format!(
            "the run ends after {}, but checkpoints are written where the rounds of all stages end together, every {period}",
            quantity::plural(u64::from(steps), "step", "steps")
        );
        match prepared.first_step() {
            0 => events.warn(&format!("no checkpoint will be written: {why}")),
            // The run can resume from the same checkpoint again.
            _ => events.note(&format!("no newer checkpoint will be written: {why}")),
        }
        return;
    }
    let rule = format!(
        "checkpoints are written where the rounds of all stages end together, every {}",
        quantity::plural(u64::from(period), "step", "steps")
    );
    let late = task.checkpoint_interval().filter(|every| !every.is_multiple_of(period));
    let late = late.map(|every| format!("those of every {every} steps at the next such step"));
    let last_step = (last < steps).then(|| format!("the last after step {last} of {steps}"));
    let changes: Vec<String> = late.into_iter().chain(last_step).collect();
    if !changes.is_empty() {
        events.note(&format!("{rule}: {}", changes.join(", ")));
    }
}

/// Omits the checkpoint at the end if no run could resume from it, and no others were requested.
pub fn drop_useless_checkpoint(task: &mut Task<'_>, prepared: &Prepared, events: &dyn EventSink) {
    let is_last_only = task.request.checkpoints.every.is_none();
    let Some(settings) = task.checkpoint_settings.as_ref().filter(|_| is_last_only) else { return };
    if let Err(why) = check_states(&prepared.compiled.program, prepared.unsharded_job(task).codes) {
        events.note(&format!("{} gets the trained weights but no checkpoint: {why}", settings.folder.display()));
        task.checkpoint_settings = None;
    }
}

/// The checkpoints of a run so far.
#[derive(Debug, Default)]
pub struct WrittenCheckpoints {
    pub newest: Option<PathBuf>,
    /// The step of the last one, and why it was not written, if it was not.
    failed: Option<(u32, String)>,
}

impl WrittenCheckpoints {
    /// Fails if the last checkpoint was not written: a later run would lose steps, or could not resume.
    pub fn check_last(&self) -> Result<(), Error> {
        let Some((minibatches, fault)) = &self.failed else { return Ok(()) };
        let message =
            format!("the run is complete, but its last checkpoint, after step {minibatches}, was not written");
        let help = match &self.newest {
            Some(folder) => format!("the other results are written; the newest checkpoint is {}", folder.display()),
            None => "the other results are written; this run wrote no checkpoint".to_string(),
        };
        Err(Error::negative(message).because(fault).with_help(help))
    }
}

/// Reports a checkpoint that was written or failed, and records it.
pub fn report_saved(saved: &Saved, progress: &RefCell<WrittenCheckpoints>, events: &dyn EventSink) {
    let mut progress = progress.borrow_mut();
    match saved {
        Saved::Done { folder, left: leftover, .. } => {
            *progress = WrittenCheckpoints { newest: Some(folder.clone()), failed: None };
            events.detail(&format!("wrote {}", folder.display()));
            if let Some(fault) = leftover {
                events.warn(&format!("{} is complete, but {fault}", folder.display()));
            }
        }
        Saved::Failed { minibatches, fault } => {
            progress.failed = Some((*minibatches, fault.to_string()));
            let goes_on = match fault {
                CheckpointWriteError::RunFailed { .. } => "",
                _ => "the run continues, and ",
            };
            events.warn(&format!(
                "no checkpoint after step {minibatches}: {fault}; {goes_on}the last complete checkpoint stays"
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A run that resumed from an older checkpoint restarts from its own checkpoints, not from those of another branch.
    #[test]
    fn a_run_goes_on_from_what_it_has_written() {
        let folder = tempfile::tempdir().unwrap();
        let step = |number: u32| {
            let path = folder.path().join(format!("step-{number:08}"));
            fs::create_dir_all(&path).unwrap();
            fs::write(path.join(FILE), "{}").unwrap();
            path
        };
        let run = |resume: Option<PathBuf>| CheckpointRequest {
            folder: Some(folder.path().to_path_buf()),
            every: None,
            keep: None,
            resume,
        };
        let (fourth, eighth) = (step(4), step(8));
        let mut named = run(Some(fourth.clone()));
        let before = existing(&named);
        assert_eq!(before.iter().map(|(path, _)| path).collect::<Vec<_>>(), [&eighth, &fourth]);
        resume_after_failure(&mut named, &before);
        assert_eq!(named.resume, Some(fourth));
        let fifth = step(5);
        resume_after_failure(&mut named, &before);
        assert_eq!(named.resume, Some(fifth));
        let mut newest = run(None);
        resume_after_failure(&mut newest, &before);
        assert_eq!(newest.resume, Some(PathBuf::from("auto")));
    }
}
