//! Checkpoints of a run: which one it goes on from, whether that is one of this run, and who is told of new ones.

use crate::error::Error;
use crate::events::EventSink;
use crate::files::detect;
use crate::help;
use crate::train::initial_weights::listed;
use crate::train::prepare::{Prepared, Task};
use crate::train::request::CheckpointRequest;
use crate::train::run_settings::{differences, terms};
use compiler::export::quantity;
use compiler::import::onnx::name::shown;
use compiler::plan::schedule::Schedule;
use compiler::tensor::Tensor;
use runtime::checkpoint::find::{self, FindError, Found};
use runtime::checkpoint::lock::{self, Held, LockError};
use runtime::checkpoint::manifest::{FILE, Manifest, ShardLayout, StageLayout};
use runtime::checkpoint::writer::{Saved, WriterConfig};
use runtime::optim::lr_schedule::Shape;
use runtime::train::resume::{Start, StartError, check_states};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Differences that are listed at most.
const LISTED: usize = 16;

/// Where a run writes its checkpoints.
pub struct Keeping<'a> {
    /// The folder.
    pub folder: &'a Path,
    /// After every so many minibatches, and at the end; only there, if nothing.
    pub every: Option<u32>,
    /// How many stay; all, if nothing.
    pub keep: Option<u32>,
    /// Who is told what has become of one.
    pub tell: &'a dyn Fn(&Saved),
}

/// The file of trained weights in the folder of checkpoints.
pub const WEIGHTS: &str = "weights.safetensors";

/// The checkpoint that a run resumes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resume<'a> {
    /// The newest complete one in this folder.
    Newest(&'a Path),
    /// This one.
    From(&'a Path),
}

/// The checkpoints of a request that exist now, newest first, and when each was written.
pub fn existing(request: &CheckpointRequest) -> Vec<(PathBuf, Option<SystemTime>)> {
    let known = request.folder.as_deref().and_then(|folder| find::known(folder).ok()).unwrap_or_default();
    let dated = |(_, path): (u32, PathBuf)| {
        let written = path.join(FILE).metadata().and_then(|about| about.modified()).ok();
        (path, written)
    };
    known.into_iter().map(dated).collect()
}

/// Makes a run that restarts after a failure resume from the newest checkpoint that it has written itself. Those that existed
/// `before` may belong to another run.
pub fn resume_after_failure(request: &mut CheckpointRequest, before: &[(PathBuf, Option<SystemTime>)]) {
    let is_named = request.resume.as_ref().is_some_and(|from| from.as_os_str() != "auto");
    let mut found = existing(request).into_iter();
    request.resume = match is_named {
        true => found.find(|one| !before.contains(one)).map(|(path, _)| path).or(request.resume.take()),
        false => found.next().map(|_| PathBuf::from("auto")).or(request.resume.take()),
    };
}

/// Where a run goes on.
pub struct Begun {
    /// The weights of the run, those of the checkpoint among them.
    pub weights: BTreeMap<String, Tensor>,
    /// The rest of it.
    pub start: Start,
}

/// Refuses to write checkpoints into a folder that has some of a run that this one does not go on with. `is_held`: this run holds the folder.
pub fn refuse_other_runs(folder: &Path, resume: Option<Resume<'_>>, is_held: bool) -> Result<(), Error> {
    let is_here = |from: &Path| match (from.canonicalize(), folder.canonicalize()) {
        (Ok(from), Ok(folder)) => from.parent() == Some(&folder),
        _ => false,
    };
    match resume {
        Some(Resume::Newest(_)) => return Ok(()),
        Some(Resume::From(from)) if is_here(from) => return Ok(()),
        _ => {}
    }
    if folder.is_file() {
        let why = format!("{} is a file, and checkpoints are folders within a folder", folder.display());
        return Err(Error::input("cannot write checkpoints").because(why).with_help("`--checkpoint-dir ck` makes one"));
    }
    let found = find::known(folder).map_err(|error| Error::input("cannot write checkpoints").because(error))?;
    let Some((_, newest)) = found.first() else { return Ok(()) };
    if !is_held {
        // Those of a run that is at work are not there to be gone on with.
        hold(folder)?;
    }
    Err(Error::input(format!("{} has checkpoints of a run", folder.display()))
        .because(format!("the newest is {}", newest.display()))
        .with_help("`--resume auto` goes on with it; another `--checkpoint-dir` begins anew"))
}

/// Takes the folder for this run, as long as what comes back is there: two that write into it would remove each other's checkpoints.
pub fn hold(folder: &Path) -> Result<Held, Error> {
    lock::hold(folder).map_err(|error| {
        let failure = Error::input("cannot write checkpoints").because(&error);
        match error {
            LockError::Taken { .. } => failure.with_help("wait until it ends, or name another `--checkpoint-dir`"),
            LockError::Open { .. } => failure.with_help("choose a place that can be read and written"),
        }
    })
}

/// The checkpoint that the run goes on from; nothing where it begins at the beginning.
pub fn begin(
    resume: Resume<'_>,
    task: &Task<'_>,
    prepared: &Prepared,
    events: &dyn EventSink,
) -> Result<Option<Begun>, Error> {
    match resume {
        Resume::From(folder) => {
            let found = find::read(folder).map_err(|fault| unreadable(folder, &fault))?;
            if let Some(newer) = newer(found.manifest.minibatches, task) {
                events.note(&format!(
                    "{} is newer than the checkpoint that this run goes on from: `--resume auto` would take it until this run has come as far",
                    newer.display()
                ));
            }
            begun(folder, found, task, prepared, events)?.map(Some).map_err(|lack| refused(folder).because(lack))
        }
        Resume::Newest(folder) => {
            let all =
                find::known(folder).map_err(|error| Error::input("cannot look for checkpoints").because(error))?;
            for (_, path) in all {
                let why = match find::read(&path) {
                    Ok(found) => match begun(&path, found, task, prepared, events)? {
                        Ok(begun) => return Ok(Some(begun)),
                        Err(lack) => lack,
                    },
                    Err(fault) => fault.to_string(),
                };
                events.warn(&format!("{} is passed over: {why}", path.display()));
            }
            events.note(&format!("no complete checkpoint in {}: the run begins at the beginning", folder.display()));
            Ok(None)
        }
    }
}

fn unreadable(folder: &Path, fault: &FindError) -> Error {
    let failure = refused(folder);
    if !folder.exists() {
        return failure.because("there is no such folder").with_help(help::absent(folder)).with_more_help(NEWEST);
    }
    if folder.is_file() {
        let failure = failure.because("it is a file, and a checkpoint is a folder");
        return failure.with_help(match detect::no_model(folder) {
            Some(_) => {
                format!("`--weights {}` begins another run with the weights of a file; {NEWEST}", folder.display())
            }
            None => NEWEST.to_string(),
        });
    }
    let failure = failure.because(fault);
    match find::all(folder).ok().and_then(|all| all.into_iter().next()) {
        Some((_, newest)) if !folder.join(FILE).exists() => {
            failure.with_help(format!("checkpoints have folders of their own: `--resume {}`", newest.display()))
        }
        _ => failure.with_help(NEWEST),
    }
}

/// What asks for no name.
const NEWEST: &str = "`--resume auto` takes the newest complete checkpoint of `--checkpoint-dir`";

fn refused(folder: &Path) -> Error {
    Error::input(format!("cannot go on from {}", folder.display()))
}

/// Where the run goes on, or what the checkpoint lacks of it.
fn begun(
    folder: &Path,
    found: Found,
    task: &Task<'_>,
    prepared: &Prepared,
    events: &dyn EventSink,
) -> Result<Result<Begun, String>, Error> {
    let Found { manifest, weights, mut start } = found;
    fits(folder, &manifest, task, prepared).map_err(|failure| match older(folder, task, prepared) {
        Some(older) => {
            failure.with_more_help(format!("`--resume {}` goes on from an older one, which fits", older.display()))
        }
        None => failure,
    })?;
    if let Some(lack) = lacks(&weights, prepared) {
        return Ok(Err(lack));
    }
    let is_same_plan = manifest.plan == prepared.dealt();
    let is_short = is_same_plan && ends_before(&manifest, prepared);
    if !is_same_plan || is_short {
        start.flight = None;
    }
    if let Err(fault) = start.check_whole(&prepared.whole(task)) {
        return Ok(Err(fault.to_string()));
    }
    let falls = matches!(task.optimizer.rate.shape, Shape::Cosine { .. } | Shape::Linear { .. });
    told(folder, &manifest, (is_same_plan, is_short, falls), prepared, events);
    let mut all = task.weights.clone();
    all.extend(weights);
    Ok(Ok(Begun { weights: all, start }))
}

/// Refuses the checkpoint of another run, or one that lies where this run is not cut.
fn fits(folder: &Path, manifest: &Manifest, task: &Task<'_>, prepared: &Prepared) -> Result<(), Error> {
    let mut differences = differences(&manifest.run, &terms(task, prepared));
    differences.truncate(LISTED);
    if !differences.is_empty() {
        let failure = differences.into_iter().fold(refused(folder), Error::because);
        return Err(failure.with_help(format!(
            "give this run what that one had; `--weights {}` begins another run with its weights",
            folder.display()
        )));
    }
    let start = Start { minibatches: manifest.minibatches, ..Start::default() };
    start.check(prepared.program()).map_err(|fault| {
        let failure = refused(folder).because(&fault);
        match fault {
            StartError::Round { .. } => failure.with_help("another plan, or a checkpoint after a multiple of that"),
            _ => failure.with_help("`--steps` or `--epochs` make the run longer"),
        }
    })
}

/// What the run would miss in the weights of a checkpoint.
fn lacks(weights: &BTreeMap<String, Tensor>, prepared: &Prepared) -> Option<String> {
    let absent: BTreeSet<String> = prepared.names().into_iter().filter(|name| !weights.contains_key(name)).collect();
    (!absent.is_empty()).then(|| format!("it has no {}", listed(&absent.into_iter().collect::<Vec<_>>())))
}

/// The newest checkpoint beside this one, of fewer minibatches, from which the run could go on.
fn older(folder: &Path, task: &Task<'_>, prepared: &Prepared) -> Option<PathBuf> {
    let own = folder.file_name()?.to_str().and_then(find::minibatches)?;
    let around = folder.parent().map(|around| if around == Path::new("") { Path::new(".") } else { around })?;
    let mut beside = find::all(around).ok()?.into_iter().filter(|(minibatches, _)| *minibatches < own);
    let fits = |path: &Path| find::manifest(path).is_ok_and(|manifest| fits(path, &manifest, task, prepared).is_ok());
    let (_, path) = beside.find(|(_, path)| fits(path))?;
    // Only of one are the files read.
    find::read(&path).is_ok_and(|found| lacks(&found.weights, prepared).is_none()).then_some(path)
}

/// The newest checkpoint in the folder that this run writes to, where that is of more minibatches than the one that it goes on from.
fn newer(own: u32, task: &Task<'_>) -> Option<PathBuf> {
    let (minibatches, newest) = find::all(task.keeping.as_ref()?.folder).ok()?.into_iter().next()?;
    (minibatches > own).then_some(newest)
}

/// Whether the checkpoint is of the last steps of a shorter run, so that nothing was in flight behind its end.
fn ends_before(manifest: &Manifest, prepared: &Prepared) -> bool {
    let program = prepared.program();
    let reach = program.stages.iter().map(|stage| stage.cap.saturating_mul(stage.replicas)).max();
    // With the one whose update is in front of the cut.
    let behind = reach.unwrap_or(1).saturating_sub(1);
    let is_near = manifest.minibatches.saturating_add(behind) > manifest.steps;
    is_near && manifest.steps < prepared.steps && !program.schedule.flushes()
}

/// What one might not expect of a run that goes on.
fn told(
    folder: &Path,
    manifest: &Manifest,
    (is_same_plan, is_short, falls): (bool, bool, bool),
    prepared: &Prepared,
    events: &dyn EventSink,
) {
    let (done, here) = (manifest.minibatches, prepared.dealt());
    events.note(&format!("goes on after step {done} of {} from {}", prepared.steps, folder.display()));
    if manifest.steps != prepared.steps {
        let told = format!(
            "the run was begun for {}, and is now of {}",
            quantity::plural(u64::from(manifest.steps), "step", "steps"),
            prepared.steps
        );
        match falls {
            true => events.warn(&format!("{told}: the learning rate falls to the new end from here on")),
            false => events.note(&told),
        }
    }
    if is_short {
        events.warn(
            "the checkpoint is of the last steps of a shorter run, behind which nothing was in flight: every stage begins with one version of \
             its weights, and the numbers are not those of a run that was this long from the beginning",
        );
    }
    if is_same_plan {
        return;
    }
    let flushes = |name: &str| name.parse::<Schedule>().is_ok_and(Schedule::flushes);
    if !(flushes(&manifest.plan.schedule) && flushes(&here.schedule)) {
        let apart = apart(&manifest.plan, &here);
        events.warn(&format!(
            "the checkpoint is of another plan ({apart}), and without a flush only the same plan goes on exactly: every stage \
             begins with one version of its weights, and the numbers are not those of a run that was never interrupted"
        ));
    } else if manifest.plan.microbatches != here.microbatches {
        events.warn(&format!(
            "the checkpoint is of minibatches of {}, now of {}: their sums are rounded otherwise",
            quantity::plural(u64::from(manifest.plan.microbatches), "micro-batch", "micro-batches"),
            here.microbatches
        ));
    } else {
        events.note("under another plan than before; each parameter and its optimizer's state is found by name");
    }
}

/// What two ways to deal out work have apart, in words: the first thing that decides the rest.
fn apart(before: &ShardLayout, now: &ShardLayout) -> String {
    let list = |of: &dyn Fn(&StageLayout) -> u32, plan: &ShardLayout| {
        plan.stages.iter().map(|stage| of(stage).to_string()).collect::<Vec<_>>().join(",")
    };
    let stages = |plan: &ShardLayout| quantity::plural(plan.stages.len() as u64, "stage", "stages");
    let told =
        |what: &str, before: &str, now: &str| (before != now).then(|| format!("{what}{}, now {now}", shown(before)));
    let count = |plan: &ShardLayout| plan.microbatches.to_string();
    let replicas = |plan: &ShardLayout| list(&|stage| stage.replicas, plan);
    let caps = |plan: &ShardLayout| list(&|stage| stage.cap, plan);
    told("schedule ", &before.schedule, &now.schedule)
        .or_else(|| told("", &stages(before), &stages(now)))
        .or_else(|| told("replicas ", &replicas(before), &replicas(now)))
        .or_else(|| told("micro-batches ", &count(before), &count(now)))
        .or_else(|| told("staleness ", &before.staleness, &now.staleness))
        .or_else(|| told("in flight ", &caps(before), &caps(now)))
        .unwrap_or_else(|| "its stages end after other ops".to_string())
}

/// What the writer of checkpoints must know.
pub fn kept_of<'a>(keeping: &Keeping<'_>, task: &Task<'a>, prepared: &'a Prepared) -> WriterConfig<'a> {
    let training = prepared.whole(task);
    WriterConfig {
        folder: keeping.folder.to_path_buf(),
        keep: keeping.keep.map(|keep| keep as usize),
        begun: prepared.begun.as_ref().map(|begun| begun.start.minibatches),
        run: terms(task, prepared).into_iter().map(|(name, term)| (name, term.told)).collect(),
        plan: prepared.dealt(),
        steps: prepared.steps,
        per_epoch: u32::try_from(prepared.per_epoch).unwrap_or(u32::MAX),
        codes: training.codes,
        optimizer: training.optimizer,
        given: training.weights,
    }
}

/// When checkpoints come, where that is not as one might expect.
pub fn remarks(keeping: &Keeping<'_>, prepared: &Prepared, events: &dyn EventSink) {
    let cuts = prepared.cuts(keeping);
    if prepared.first() as u32 >= prepared.steps {
        return;
    }
    let (steps, period, last) = (prepared.steps, cuts.period, cuts.last());
    if cuts.after(prepared.first() as u32).is_none() {
        let why = format!(
            "the run ends after {}, and checkpoints come where the rounds of all stages end together, which they do every {period}",
            quantity::plural(u64::from(steps), "step", "steps")
        );
        match prepared.first() {
            0 => events.warn(&format!("no checkpoint will be written: {why}")),
            // The run can go on from where it went on itself.
            _ => events.note(&format!("no newer checkpoint will be written: {why}")),
        }
        return;
    }
    let together = format!(
        "checkpoints come where the rounds of all stages end together, every {}",
        quantity::plural(u64::from(period), "step", "steps")
    );
    let behind = keeping.every.filter(|every| !every.is_multiple_of(period));
    let behind = behind.map(|every| format!("those of every {every} steps as soon behind"));
    let end = (last < steps).then(|| format!("the last after step {last} of {steps}"));
    let told: Vec<String> = behind.into_iter().chain(end).collect();
    if !told.is_empty() {
        events.note(&format!("{together}: {}", told.join(", ")));
    }
}

/// Lets a run that nobody asked for checkpoints in the middle go without the one at its end, where no run could go on from it.
pub fn only_weights(task: &mut Task<'_>, prepared: &Prepared, events: &dyn EventSink) {
    let Some(keeping) = task.keeping.as_ref().filter(|keeping| keeping.every.is_none()) else { return };
    if let Err(why) = check_states(prepared.program(), prepared.whole(task).codes) {
        events.note(&format!("{} gets the trained weights and no checkpoint: {why}", keeping.folder.display()));
        task.keeping = None;
    }
}

/// Says what has become of a checkpoint, and keeps where the newest is.
pub fn report_saved(saved: &Saved, newest: &RefCell<Option<PathBuf>>, events: &dyn EventSink) {
    match saved {
        Saved::Done { folder, left, .. } => {
            newest.replace(Some(folder.clone()));
            events.detail(&format!("wrote {}", folder.display()));
            if let Some(fault) = left {
                events.warn(&format!("{} is complete, but {fault}", folder.display()));
            }
        }
        Saved::Failed { minibatches, fault } => events.warn(&format!(
            "no checkpoint after step {minibatches}: {fault}; the run goes on, and the last complete checkpoint stays"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A run that began from an older checkpoint goes on from its own ones, not from those of another branch.
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
