//! Trains a model: plans if no plan is given, prepares the run, trains, and writes the results.

use crate::costs::{self, Costs, ModelFormat, Times};
use crate::error::Error;
use crate::events::{Event, EventSink, Silent};
use crate::files::overwrite::{self, Mark};
use crate::files::{input, output};
use crate::help;
use crate::launch::role::ProcessRole;
use crate::loss::CountedLoss;
use crate::model::{self, DEFAULT_MICRO_BATCH, LoadedModel};
use crate::plan::custom_schedule::{self, CustomSchedule};
use crate::plan::read::read_checked;
use crate::plan::request::{PlanOptions, ScheduleChoice};
use crate::plan::solve::solve;
use crate::train::arrays;
use crate::train::checkpoints::{self, Keeping, WEIGHTS};
use crate::train::initial_weights::initial;
use crate::train::metrics::{self, watched};
use crate::train::prepare::{self, Data, Done, HeldOut, Length, Prepared, Task};
use crate::train::request::{DataInput, HeldOutInput, PlanInput, TrainRequest};
use crate::train::run_memory::{differences, exceeds_limit, exceeds_plan};
use crate::train::tensor_parallel::degree;
use compiler::export::metrics::Total;
use compiler::export::quantity;
use compiler::export::stage_name::ranges;
use compiler::export::trace::Trace;
use compiler::export::trace::encode::encode;
use compiler::import::import::Batch;
use compiler::op::Op;
use compiler::partition::planner::Partitioner;
use compiler::pass::loss::{IGNORED, attach};
use compiler::plan::Plan;
use compiler::plan::schedule::Schedule;
use compiler::tensor::DType;
use profiler::machine;
use runtime::data::RowOrder;
use runtime::device::cpu::half::is_half;
use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};

/// The result of a training run.
pub struct TrainReport {
    /// The plan that the run used.
    pub plan: Plan,
    /// Estimated bytes of one replica of each stage, if the run differs from the one that the plan is for.
    pub memory_estimate: Option<Vec<u64>>,
    /// Samples in a minibatch.
    pub batch: u64,
    /// Minibatches in all, those before a resumed run included.
    pub steps: u32,
    /// Totals, as the metrics file states them.
    pub total: Total,
    /// Weights, losses, times.
    pub done: Done,
    /// Remarks about the result.
    pub remarks: Vec<String>,
}

/// Trains a model. In a run over several processes, the first process returns the report, the others nothing.
pub fn train(mut request: TrainRequest, events: &dyn EventSink) -> Result<Option<TrainReport>, Error> {
    let role = ProcessRole::find(&request.processes)?;
    let process_events = events;
    let events: &dyn EventSink = if role.reports() { events } else { &Silent };
    if role.reports() {
        check_outputs(&request)?;
    }
    // Only a run that may restart needs to know which checkpoints are its own.
    let max_restarts = request.processes.max_restarts;
    let before = if max_restarts > 0 { checkpoints::existing(&request.checkpoints) } else { Vec::new() };
    let mut restarts = role.restarts();
    loop {
        if restarts > 0 {
            // A process that another one started resumes where that one does.
            match request.processes.resumed_by_parent() {
                Some(from) => request.checkpoints.resume = Some(from),
                None => checkpoints::resume_after_failure(&mut request.checkpoints, &before),
            }
            request.processes.resumed.clone_from(&request.checkpoints.resume);
        }
        match once(&request, &role, restarts, (events, process_events)) {
            Err(error) if error.is_retryable() && restarts < max_restarts => {
                restarts += 1;
                events.warn(&format!("{}; restart {restarts} of {max_restarts}", error.line()));
            }
            done => return done,
        }
    }
}

/// Refuses results that cannot be written, before the run begins.
fn check_outputs(request: &TrainRequest) -> Result<(), Error> {
    [&request.save, &request.save_gradients].into_iter().flatten().try_for_each(|path| output::check_tensors(path))?;
    let weights = request.checkpoints.folder.iter().map(|folder| folder.join(WEIGHTS));
    weights.into_iter().try_for_each(|path| overwrite::check(&path, &Mark::Safetensors))?;
    request.metrics.iter().try_for_each(|path| output::check(path, &Mark::Metrics))?;
    request.trace.iter().try_for_each(|path| output::check(path, &Mark::trace(path)))
}

fn once(
    request: &TrainRequest,
    role: &ProcessRole,
    restarts: u32,
    (events, process_events): (&dyn EventSink, &dyn EventSink),
) -> Result<Option<TrainReport>, Error> {
    let optimizer = request.optimizer.update_rule();
    let folder = request.checkpoints.folder.as_deref();
    let resume = request.checkpoints.resume()?;
    let no_others = |is_held| match folder {
        Some(folder) => checkpoints::refuse_other_runs(folder, resume, is_held),
        None => Ok(()),
    };
    no_others(false)?;
    let Some(data) = &request.data else {
        return Err(Error::input("no data is given").with_help(
            "`--data train.npz` has arrays named like the model's inputs; `--synthetic-data` trains on made-up data",
        ));
    };
    let given = match &request.plan {
        Some(PlanInput::File(path)) => Some(read_checked(path)?),
        Some(PlanInput::Plan(plan)) => Some((**plan).clone()),
        None => None,
    };
    let devices = request.tensor_parallel.map_or_else(|| given.as_ref().map_or(1, degree), |devices| devices as usize);
    if devices > 1 && !matches!(role, ProcessRole::Alone) {
        return Err(Error::input(
            "devices that share a stage are threads of one process, and several processes were started",
        )
        .with_help("start `pipec train` by itself, or plan without `--tensor` for several processes"));
    }
    let mut import = request.import.clone();
    if let Some(plan) = &given {
        import.follow(&plan.model.import);
    }
    let loaded = trainable(request, &import, events)?;
    let graph = &loaded.model.graph;
    if !graph.ids().any(|id| matches!(graph.node(id).op, Op::Parameter(_))) {
        let why = "the model has no parameter that a gradient trains: its weights are frozen, or it holds its gradients itself";
        return Err(Error::file("train", &request.model, why));
    }
    let custom = custom_schedule::open(request.schedule.as_ref().and_then(ScheduleChoice::file), events)?;
    custom.as_ref().map_or(Ok(()), |custom| custom.agrees(request.microbatches))?;
    let listed = custom.as_ref().map(CustomSchedule::microbatches);
    let microbatches =
        listed.or(request.microbatches).or(given.as_ref().map(|plan| plan.schedule.microbatches)).unwrap_or(1);
    let planned_batch = given.as_ref().map(|plan| plan.schedule.micro_batch * u64::from(plan.schedule.microbatches));
    let batch = match request.batch.or(planned_batch) {
        Some(batch) => batch,
        None => loaded.known_micro_batch(None).unwrap_or_else(|| {
            events.note(&format!("minibatches of {DEFAULT_MICRO_BATCH}; `--batch N` sets another size"));
            DEFAULT_MICRO_BATCH
        }),
    };
    let requested =
        custom.as_ref().map(CustomSchedule::kind).or(request.schedule.as_ref().and_then(ScheduleChoice::named));
    if requested == Some(Schedule::Inference) {
        return Err(Error::input("`--schedule inference` does not train").with_help("leave it out, or write `1f1b`"));
    }
    let (steps, epochs) = match request.length {
        Some(Length::Steps(steps)) => (Some(steps), None),
        Some(Length::Epochs(epochs)) => (None, Some(epochs)),
        None => (None, None),
    };
    if custom.as_ref().is_some_and(|custom| custom.minibatches().is_some()) && epochs.is_some() {
        return Err(Error::input("`--epochs` does not go with programs, which say how many minibatches they are for"));
    }
    let steps = custom.as_ref().map_or(Ok(steps), |custom| custom.count("--steps", steps))?;
    let whole = microbatches == 1 && request.policy.allows_continuous();
    let default = if whole { Schedule::OneFOneBRr } else { Schedule::OneFOneB };
    let schedule = requested.or(given.as_ref().map(|plan| plan.schedule.kind)).unwrap_or(default);
    let schedule = request.policy.schedule(schedule, requested.is_some())?;
    // Without a requested schedule, and where none is needed that does not flush, the planner may choose one that trains.
    let is_free = requested.is_none() && whole && request.policy.schedule(Schedule::OneFOneB, false).is_ok();
    let fixed = Some(schedule).filter(|_| !is_free);
    let (plan, schedule) = match given {
        Some(plan) => (plan, schedule),
        None => {
            let plan = plan_on_cpu(request, &loaded, batch, microbatches, (fixed, custom.as_ref()))?;
            let planned = plan.schedule.kind;
            (plan, fixed.unwrap_or(planned))
        }
    };
    if request.plan.is_none() && plan.cluster.devices > 1 {
        events.event(Event::Planned(&plan));
    }
    let weights = initial(&loaded, request.weights.as_deref(), events)?;
    let data = match data {
        DataInput::File(path) => Data::Arrays(arrays::arrays(&loaded.model.graph, path, "the data", events)?),
        DataInput::Synthetic => Data::Synthetic(request.seed),
    };
    let (loss, class_dim) = match (request.loss, CountedLoss::read(plan.model.import.loss.as_deref())?) {
        (None, CountedLoss::One(loss, axis)) => (Some(loss), request.class_dim.or(axis)),
        (given, _) => (given, request.class_dim),
    };
    let newest = RefCell::default();
    let tell = |saved: &_| checkpoints::report_saved(saved, &newest, events);
    let unbiased = request.unbiased_variance.unwrap_or_else(|| ModelFormat::of(&request.model) == ModelFormat::Pt2);
    let mut task = Task {
        loaded: &loaded,
        weights: &weights,
        plan: &plan,
        schedule,
        own: custom.as_ref(),
        in_flight: request.in_flight.clone(),
        loss,
        class_dim,
        dtype: floats(request, Some(&plan)),
        unbiased,
        policy: request.policy.build(unbiased),
        newest: request.policy.is_newest(),
        batch,
        microbatches,
        length: match (steps, epochs) {
            (Some(steps), _) => Length::Steps(steps),
            (None, epochs) => Length::Epochs(epochs.unwrap_or(1)),
        },
        data,
        held_out: match &request.held_out {
            Some(HeldOutInput::File(path)) => {
                HeldOut::Arrays(arrays::arrays(&loaded.model.graph, path, "what is held out", events)?)
            }
            Some(HeldOutInput::Fraction(fraction)) => HeldOut::Share(*fraction),
            None => HeldOut::Nothing,
        },
        order: if request.shuffle { RowOrder::Shuffled { seed: request.seed } } else { RowOrder::InOrder },
        seed: request.seed,
        optimizer: &optimizer,
        keep_gradients: request.save_gradients.is_some(),
        checkpoints: folder,
        keeping: folder.map(|folder| Keeping {
            folder,
            every: request.checkpoints.every,
            keep: request.checkpoints.keep,
            tell: &tell,
        }),
        frozen: &request.freeze,
        tensor: devices,
    };
    let mut prepared = prepare::prepare(&mut task)?;
    let differing = differences(&task, request);
    let estimate = prepared.memory_estimate(&optimizer);
    match exceeds_limit(&plan, &estimate) {
        Some(why) if !differing.is_empty() => {
            return Err(Error::input("what is asked for does not fit in the memory that the plan is for")
                .because(why)
                .with_help("`pipec partition` with the same `--dtype`, `--optimizer` and `--schedule` makes a plan that fits"));
        }
        Some(why) => events.warn(&format!(
            "{why}: kernels here want more scratch than the plan counts; `pipec profile` here, then `pipec partition --profile` plans with it"
        )),
        None if differing.is_empty() => exceeds_plan(&plan, &estimate).iter().for_each(|note| events.note(note)),
        None => {}
    }
    let memory_estimate = (!differing.is_empty()).then_some(estimate);
    notes(&task, &prepared, events);
    policy_notes(request, &task, &prepared, events);
    if let Some(folder) = folder {
        fs::create_dir_all(folder).map_err(|error| {
            Error::file("make the folder", folder, error)
                .with_help("`--checkpoint-dir` in a place that can be written to")
        })?;
    }
    let _held = folder.filter(|_| role.reports()).map(checkpoints::hold).transpose()?;
    checkpoints::only_weights(&mut task, &prepared, events);
    // Another run may have ended here in the meantime.
    no_others(true)?;
    prepared.begun = match resume {
        Some(resume) => checkpoints::begin(resume, &task, &prepared, events)?,
        None => None,
    };
    if let Some(keeping) = &task.keeping {
        checkpoints::remarks(keeping, &prepared, events);
    }
    let metrics = request.metrics.as_deref().filter(|_| role.reports());
    let run = |group| watched(&task, &prepared, metrics, group, events);
    let job = (&task, &prepared);
    let Some(done) = role.run(&request.processes, job, restarts, (events, process_events), run)? else {
        return Ok(None);
    };
    if let Some(ended) = &done.ended {
        return Err(ended.error(&prepared));
    }
    write_results(request, &done, newest.take(), events)?;
    let mut remarks = Vec::new();
    if request.plan.is_some() && !differing.is_empty() && !done.trained.losses.is_empty() {
        // No plan is for two float types.
        let next = match task.dtype.is_some_and(is_half) {
            true => "",
            false => ", and `pipec partition` with the same flags plans for it",
        };
        remarks.push(format!(
            "the plan is for another {}: what is reckoned is of this run{next}",
            differing.join(", another ")
        ));
    }
    let total = metrics::totals(&plan, &prepared, &done);
    let (batch, steps) = (prepared.batch, prepared.steps);
    drop(prepared);
    drop(task);
    Ok(Some(TrainReport { plan, memory_estimate, batch, steps, total, done, remarks }))
}

/// Writes weights, gradients and the trace.
fn write_results(
    request: &TrainRequest,
    done: &Done,
    newest: Option<PathBuf>,
    events: &dyn EventSink,
) -> Result<(), Error> {
    let trained = &done.trained;
    let write = |path: &Path, tensors| output::write_tensors(path, tensors, "result");
    let mut written: Vec<(PathBuf, &str)> = Vec::new();
    if let Some(path) = &request.save {
        write(path, &trained.weights)?;
        written.push((path.clone(), "weights"));
    }
    if let Some(path) = &request.save_gradients {
        write(path, &trained.gradients)?;
        written.push((path.clone(), "gradients"));
    }
    if let Some(folder) = &request.checkpoints.folder {
        let path = folder.join(WEIGHTS);
        write(&path, &trained.weights)?;
        written.push((path, "weights"));
        written.extend(newest.map(|folder| (folder, "checkpoint")));
    }
    if let Some(path) = &request.trace {
        output::write(path, &encode(&Trace::training(&done.tracks), &input::file_name(path)))?;
        written.push((path.clone(), "trace"));
    }
    written.extend(request.metrics.iter().map(|path| (path.clone(), "metrics")));
    if !written.is_empty() {
        let one = |(path, what): &(PathBuf, &str)| format!("{} ({what})", path.display());
        events.note(&format!("wrote {}", written.iter().map(one).collect::<Vec<_>>().join(", ")));
    }
    Ok(())
}

/// The type of all floats, if it is not the model's own: the requested one, or the plan's.
fn floats(request: &TrainRequest, plan: Option<&Plan>) -> Option<DType> {
    request.policy.dtype.or(plan.filter(|plan| plan.dtype == DType::F64.name()).map(|_| DType::F64))
}

/// The model, unless it differs from the one that its framework trains and the request does not accept that.
fn trainable(
    request: &TrainRequest,
    import: &model::ImportRequest,
    events: &dyn EventSink,
) -> Result<LoadedModel, Error> {
    if request.accept_inference_model {
        return model::load(&request.model, import, events);
    }
    let loaded = model::read(&request.model, import, events)?;
    let (wrong, other): (Vec<_>, Vec<_>) = loaded.model.doubts.iter().partition(|doubt| doubt.is_wrong());
    other.iter().for_each(|doubt| model::warn_training(doubt, events));
    let Some(first) = wrong.first() else { return Ok(loaded) };
    let what = format!("{} is not the model that its framework trains", request.model.display());
    let error = wrong.iter().fold(Error::input(what), |error, doubt| error.because(doubt));
    Err(error.with_help(format!("{}; `--accept-inference-model` trains the file as it is", first.remedy())))
}

/// Notes about policy and tensor parallelism.
fn policy_notes(request: &TrainRequest, task: &Task<'_>, prepared: &Prepared, events: &dyn EventSink) {
    if request.optimizer.learning_rate() == 0.0 {
        events.warn("`--lr 0` moves no parameter: losses are those of the weights that the run begins with");
    }
    prepared.sharing.iter().for_each(|sharing| events.note(&sharing.summary()));
    if request.policy.clip_norm.is_some() && task.schedule.is_continuous() {
        events.note(&format!(
            "{} does not flush: gradients are clipped stage by stage, a parameter that stages share by itself",
            task.schedule.name()
        ));
    }
}

/// Notes about rows that are left out, ignored labels, and the effective batch size of replicas.
fn notes(task: &Task<'_>, prepared: &Prepared, events: &dyn EventSink) {
    let left_out = prepared.rows as u64 % prepared.batch.max(1);
    if left_out > 0 {
        events.note(&format!(
            "{left_out} of {} do not fill a minibatch of {} and are left out of every epoch",
            quantity::plural(prepared.rows as u64, "row", "rows"),
            quantity::count(prepared.batch)
        ));
    }
    if prepared.ignored > 0 {
        events.note(&format!(
            "{} of {} have no label but {IGNORED}, which counts for nothing; the loss of a micro-batch of such rows alone is 0",
            quantity::count(prepared.ignored as u64),
            quantity::plural(prepared.rows as u64, "row", "rows")
        ));
    }
    if task.schedule.is_round_robin() {
        let mut counts: Vec<u32> = task.plan.stages.iter().map(|stage| stage.replicas).filter(|r| *r > 1).collect();
        counts.sort_unstable();
        counts.dedup();
        let batch = quantity::count(prepared.batch);
        for r in counts {
            let ids: Vec<u32> =
                task.plan.stages.iter().filter(|stage| stage.replicas == r).map(|stage| stage.id.0).collect();
            let which = if ids.len() > 1 { "stages" } else { "stage" };
            let (has, each) = if ids.len() > 1 { ("have", " each") } else { ("has", "") };
            let samples = quantity::count(prepared.batch.saturating_mul(r.into()));
            let ways = match task.loaded.model.batch {
                Batch::Symbol { .. } => "`--batch` sets a minibatch",
                Batch::Fixed { .. } => {
                    "the file fixes a minibatch, so that fewer replicas or an export with an open batch change that"
                }
            };
            events.note(&format!(
                "{which} {} {has} {r} replicas{each}: one update averages {r} minibatches, {samples} samples in place of {batch}; {ways}",
                ranges(&ids)
            ));
        }
    }
}

/// A plan on analytic costs of this CPU.
fn plan_on_cpu(
    request: &TrainRequest,
    loaded: &LoadedModel,
    batch: u64,
    microbatches: u32,
    (schedule, custom): (Option<Schedule>, Option<&CustomSchedule>),
) -> Result<Plan, Error> {
    let stages = match (&request.replicas, custom) {
        (None, Some(custom)) if request.cut_after.is_none() => Some(custom.replicas()?),
        (stages, _) => stages.clone(),
    };
    let needed = stages.as_ref().map(|stages| stages.iter().fold(0u32, |sum, r| sum.saturating_add(*r)));
    let cuts = request.cut_after.as_ref().map(|cuts| cuts.len() as u32 + 1);
    let workers = request.workers.or(needed).or(cuts).unwrap_or(1).max(1);
    if let Some(schedule) = schedule.filter(|schedule| workers == 1 && schedule.has_chunks()) {
        let what = format!("`--schedule {}` gives several stages to each of several workers", schedule.name());
        return Err(Error::input(what)
            .because("neither `--workers` nor a plan says that there is more than one")
            .with_help("`--workers 2` plans for two; `--plan` takes a plan of `pipec partition`"));
    }
    let cluster = machine::cluster_of_this_cpu(workers)
        .map_err(|error| Error::input(format!("cannot plan for {workers} workers")).because(error))?;
    let micro_batch = (batch / u64::from(microbatches)).max(1);
    let device = cluster.device.clone();
    // Plans use f32 or f64.
    let floats = floats(request, None).filter(|dtype| *dtype == DType::F64);
    let times = Times::Analytic(device);
    let counted = request.loss.map_or(CountedLoss::Default, |loss| CountedLoss::One(loss, request.class_dim));
    if let Some(loss) = request.loss {
        // A plan needs no loss, training does.
        attach(&mut loaded.at(micro_batch)?, loss.of(), request.class_dim)
            .map_err(|error| Error::input("cannot train").because(&error).with_help(help::loss(&error)))?;
    }
    let costs = Costs { has_memory: false, ..costs::assemble(loaded, micro_batch, cluster, times, floats, counted)? };
    let options = PlanOptions {
        schedule: request.schedule.clone().or(schedule.map(ScheduleChoice::Named)),
        microbatches,
        recompute: false,
        replicas: stages,
        cut_after: request.cut_after.clone(),
        partitioner: if workers == 1 && request.cut_after.is_none() { Partitioner::Single } else { Partitioner::Pipec },
        optimizer: request.optimizer.optimizer,
        seed: request.seed,
        ..PlanOptions::default()
    };
    Ok(solve(&request.model, costs, &options)?.plan)
}
