//! Trains a model: plans if no plan is given, prepares the run, trains, and writes the results.

use crate::costs::{self, Costs, PrecisionChoice, Times};
use crate::error::Error;
use crate::events::{Event, EventSink, Silent};
use crate::files::overwrite::{self, Mark};
use crate::files::{input, output};
use crate::help;
use crate::launch::role::ProcessRole;
use crate::loss::CountedLoss;
use crate::model::{self, DEFAULT_MICRO_BATCH, LoadedModel};
use crate::plan::custom_schedule::{self, CustomSchedule};
use crate::plan::from_costs::solve;
use crate::plan::read::read_checked;
use crate::plan::request::{PlanOptions, ScheduleChoice};
use crate::train::checkpoints::{self, WEIGHTS};
use crate::train::device_request::for_precision;
use crate::train::initial_weights::load_weights;
use crate::train::metrics::{self, train_with_metrics};
use crate::train::prepare::{self, RunResult};
use crate::train::prepared::Prepared;
use crate::train::request::{DataInput, HeldOutInput, PlanInput, TrainRequest};
use crate::train::run_memory::{differences, exceeds_limit, exceeds_plan, unplanned_work};
use crate::train::task::{CheckpointSettings, Data, HeldOut, Length, Task};
use crate::train::tensor_parallel::degree;
use crate::train::{arrays, auto_device, run_inputs};
use compiler::export::metrics::Total;
use compiler::export::stage_name::{by_replicas, ranges};
use compiler::export::trace::Trace;
use compiler::export::trace::encode::encode;
use compiler::import::import::Batch;
use compiler::op::Op;
use compiler::partition::partitioners::Partitioner;
use compiler::pass::batch_dependence::BatchDependence;
use compiler::pass::loss::{IGNORED, attach};
use compiler::plan::Plan;
use compiler::plan::problem::Recomputation;
use compiler::plan::schedule::Schedule;
use compiler::profile::precision::Precision;
use compiler::text::name::short_name;
use compiler::text::quantity;
use profiler::machine;
use runtime::data::RowOrder;
use runtime::device::api::Device;
use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::available_parallelism;
use std::time::Instant;

/// The result of a training run.
pub struct TrainReport {
    /// The plan that the run used.
    pub plan: Plan,
    /// Estimated bytes of one replica of each stage, if the settings of the run differ from the plan's.
    pub memory_estimate: Option<Vec<u64>>,
    /// True if the plan predicts the time of this run: it has the plan's settings, neither clips gradients nor
    /// writes regular checkpoints, and runs in one process on a CPU with a core for each worker.
    pub is_predicted: bool,
    /// Samples per minibatch.
    pub batch: u64,
    /// Total number of minibatches, including those before a resumed run.
    pub steps: u32,
    /// Totals, as in the metrics file.
    pub total: Total,
    /// Weights, losses, times.
    pub result: RunResult,
    /// Remarks about the result.
    pub remarks: Vec<String>,
}

/// Trains a model. In a run over several processes, only rank 0 returns the report.
pub fn train(mut request: TrainRequest, events: &dyn EventSink) -> Result<Option<TrainReport>, Error> {
    let role = ProcessRole::find(&request.processes)?;
    let process_events = events;
    let events: &dyn EventSink = if role.is_reporter() { events } else { &Silent };
    if role.is_reporter() {
        check_outputs(&request)?;
    }
    // Only a run that may restart must distinguish its own checkpoints from earlier ones.
    let max_restarts = request.processes.max_restarts;
    let before = if max_restarts > 0 { checkpoints::existing(&request.checkpoints) } else { Vec::new() };
    let mut restarts = role.restarts();
    loop {
        request.processes.started = Instant::now();
        if restarts > 0 {
            // A child process resumes from the same checkpoint as its parent.
            match request.processes.resumed_by_parent() {
                Some(checkpoint) => request.checkpoints.resume = Some(checkpoint),
                None => checkpoints::resume_after_failure(&mut request.checkpoints, &before),
            }
            request.processes.resumed.clone_from(&request.checkpoints.resume);
        }
        match train_once(&request, &role, restarts, (events, process_events)) {
            Err(error) if error.is_retryable() && restarts < max_restarts => {
                restarts += 1;
                events.warn(&format!("restart {restarts} of {max_restarts}: {}", error.line()));
            }
            outcome => return outcome,
        }
    }
}

/// Refuses output files that cannot be written, before the run starts.
fn check_outputs(request: &TrainRequest) -> Result<(), Error> {
    [&request.save, &request.save_gradients].into_iter().flatten().try_for_each(|path| output::check_tensors(path))?;
    let weights = request.checkpoints.folder.iter().map(|folder| folder.join(WEIGHTS));
    weights.into_iter().try_for_each(|path| overwrite::check(&path, &Mark::Safetensors))?;
    request.metrics.iter().try_for_each(|path| output::check(path, &Mark::Metrics))?;
    request.trace.iter().try_for_each(|path| output::check(path, &Mark::trace(path)))
}

fn train_once(
    request: &TrainRequest,
    role: &ProcessRole,
    restarts: u32,
    (events, process_events): (&dyn EventSink, &dyn EventSink),
) -> Result<Option<TrainReport>, Error> {
    let optimizer = request.optimizer.update_rule();
    let folder = request.checkpoints.folder.as_deref();
    let resume = request.checkpoints.resume()?;
    let check_other_runs = |is_held| match folder {
        Some(folder) => checkpoints::refuse_other_runs(folder, resume, is_held),
        None => Ok(()),
    };
    check_other_runs(false)?;
    let Some(data) = &request.data else {
        return Err(Error::input("no data specified").with_help(
            "pass arrays named after the model's inputs with `--data train.npz`, or use `--synthetic-data`",
        ));
    };
    let given_plan = match &request.plan {
        Some(PlanInput::File(path)) => Some(read_checked(path)?),
        Some(PlanInput::Plan(plan)) => Some((**plan).clone()),
        None => None,
    };
    let devices = request.device.open()?;
    let has_processes = !matches!(role, ProcessRole::Alone);
    let degree =
        request.tensor_parallel.map_or_else(|| given_plan.as_ref().map_or(1, degree), |degree| degree as usize);
    if degree == 0 {
        return Err(Error::input("the tensor-parallel degree is 0").with_help("degree 1 is no tensor parallelism"));
    }
    let mut import = request.import.clone();
    if let Some(plan) = &given_plan {
        import.follow(&plan.model.import);
    }
    let loaded = load_trainable(request, &import, events)?;
    let graph = &loaded.model.graph;
    if !graph.ids().any(|id| matches!(graph.node(id).op, Op::Parameter(_))) {
        let why = "the model has no trainable parameter: its weights are frozen, or it contains its own gradients";
        return Err(Error::file("train", &request.model, why));
    }
    let custom = custom_schedule::open(request.schedule.as_ref().and_then(ScheduleChoice::file), events)?;
    custom.as_ref().map_or(Ok(()), |custom| custom.agrees(request.microbatches))?;
    let custom_microbatches = custom.as_ref().map(CustomSchedule::microbatches);
    let microbatches = custom_microbatches
        .or(request.microbatches)
        .or(given_plan.as_ref().map(|plan| plan.schedule.microbatches))
        .unwrap_or(1);
    let planned_batch =
        given_plan.as_ref().map(|plan| plan.schedule.micro_batch * u64::from(plan.schedule.microbatches));
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
        return Err(Error::input("`--schedule inference` does not train").with_help("omit it, or use `1f1b`"));
    }
    let (steps, has_epochs) = match request.length {
        Some(Length::Steps(steps)) => (Some(steps), false),
        length => (None, length.is_some()),
    };
    if custom.as_ref().is_some_and(|custom| custom.minibatches().is_some()) && has_epochs {
        return Err(Error::input(
            "`--epochs` cannot be combined with programs, which have a fixed number of minibatches",
        ));
    }
    let steps = custom.as_ref().map_or(Ok(steps), |custom| custom.count("--steps", steps))?;
    let may_be_asynchronous = microbatches == 1 && request.policy.allows_continuous();
    let default = if may_be_asynchronous { Schedule::OneFOneBRr } else { Schedule::OneFOneB };
    let schedule = requested.or(given_plan.as_ref().map(|plan| plan.schedule.kind)).unwrap_or(default);
    let schedule = request.policy.schedule(schedule, requested.is_some())?;
    // The planner may choose the schedule if none is requested and an asynchronous one is not required.
    let is_free =
        requested.is_none() && may_be_asynchronous && request.policy.schedule(Schedule::OneFOneB, false).is_ok();
    let fixed = Some(schedule).filter(|_| !is_free);
    let (plan, schedule) = match given_plan {
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
    let devices = devices.unwrap_or_else(|| auto_device::choose(&plan, degree, has_processes, events));
    if request.processes.nccl {
        check_nccl(&devices, has_processes)?;
    }
    let weights = load_weights(&loaded, request.weights.as_deref(), events)?;
    let data = match data {
        DataInput::File(path) => Data::Arrays(arrays::arrays(&loaded.model.graph, path, "the data", events)?),
        DataInput::Synthetic => Data::Synthetic(request.seed),
    };
    let (loss, class_dim) = match (request.loss, CountedLoss::read(plan.model.import.loss.as_deref())?) {
        (None, CountedLoss::One(loss, axis)) => (Some(loss), request.class_dim.or(axis)),
        (loss, _) => (loss, request.class_dim),
    };
    let progress = RefCell::default();
    let on_saved = |saved: &_| checkpoints::report_saved(saved, &progress, events);
    let unbiased = request.unbiased_variance.unwrap_or_else(|| loaded.model.producer.starts_with("pytorch"));
    let precision = precision(request, &plan);
    let devices = for_precision(devices, precision, events);
    let mut task = Task {
        request,
        loaded: &loaded,
        weights: &weights,
        plan: &plan,
        schedule,
        custom_schedule: custom.as_ref(),
        loss,
        class_dim,
        dtype: precision.map(Precision::dtype),
        unbiased,
        policy: request.policy.build(unbiased),
        batch,
        microbatches,
        length: steps.map(Length::Steps).or(request.length).unwrap_or(Length::Epochs(1)),
        data,
        held_out: match &request.held_out {
            Some(HeldOutInput::File(path)) => {
                HeldOut::Arrays(arrays::arrays(&loaded.model.graph, path, "the evaluation data", events)?)
            }
            Some(HeldOutInput::Fraction(fraction)) => HeldOut::Share(*fraction),
            None => HeldOut::Nothing,
        },
        order: if request.shuffle { RowOrder::Shuffled { seed: request.seed } } else { RowOrder::InOrder },
        optimizer: &optimizer,
        checkpoint_settings: folder.map(|folder| CheckpointSettings { folder, on_saved: &on_saved }),
        tensor: degree,
        devices: &devices,
        has_processes,
    };
    let mut prepared = prepare::prepare(&mut task)?;
    let differences_from_plan = differences(&task);
    prepared.differs_from_plan = [&differences_from_plan[..], &unplanned_work(&task, prepared.order().0)].concat();
    let estimate = prepared.memory_estimate(&task);
    // The estimate is coarser than a plan for this kind of device.
    let is_planned = differences_from_plan.is_empty() && plan.cluster.device.is_cpu() != task.is_on_gpus();
    let memory_bytes = if is_planned { prepared.planned_memory(&plan) } else { estimate.clone() };
    match exceeds_limit(&plan, &memory_bytes) {
        Some(why) if !differences_from_plan.is_empty() => {
            return Err(Error::input("this run does not fit in the memory limit of the plan")
                .because(why)
                .with_help("`pipec partition` with the same `--precision`, `--optimizer` and `--schedule` writes a plan that fits"));
        }
        Some(why) => events.warn(&format!(
            "{why}: kernels on this machine need more workspace than the plan assumes; run `pipec profile` here, then `pipec partition --profile`"
        )),
        None if differences_from_plan.is_empty() => exceeds_plan(&plan, &estimate).iter().for_each(|note| events.note(note)),
        None => {}
    }
    let cores = available_parallelism().map_or(1, |cores| cores.get());
    let is_predicted = prepared.differs_from_plan.is_empty()
        && !has_processes
        && !task.is_on_gpus()
        && plan.workers() as usize <= cores;
    let memory_estimate = (!differences_from_plan.is_empty()).then_some(estimate);
    report_data(&task, &prepared, events);
    report_policy(&task, &prepared, events);
    if let Some(folder) = folder {
        fs::create_dir_all(folder).map_err(|error| {
            Error::file("create the folder", folder, error)
                .with_help("choose a writable location for `--checkpoint-dir`")
        })?;
    }
    let _lock = folder.filter(|_| role.is_reporter()).map(checkpoints::lock_folder).transpose()?;
    checkpoints::drop_useless_checkpoint(&mut task, &prepared, events);
    // Another run may have written checkpoints here in the meantime.
    check_other_runs(true)?;
    prepared.resumed = match resume {
        Some(resume) => checkpoints::find_resume_state(resume, &task, &prepared, events)?,
        None => None,
    };
    if task.checkpoint_settings.is_some() {
        checkpoints::report_steps(&task, &prepared, events);
    }
    let metrics = request.metrics.as_deref().filter(|_| role.is_reporter());
    let run = |group| train_with_metrics(&task, &prepared, metrics, group, events);
    let job = prepared.job(&task);
    let inputs = |placement: &_| run_inputs::inputs(&task, &prepared, placement);
    let Some(result) =
        role.run(&request.processes, (&job, degree, &inputs), restarts, (events, process_events), run)?
    else {
        return Ok(None);
    };
    if let Some(ended) = &result.ended {
        return Err(ended.error(prepared.steps));
    }
    let progress = progress.take();
    let mut failed = write_results(request, &result, progress.newest.as_deref(), events);
    failed.extend(result.failed.iter().cloned());
    if !failed.is_empty() {
        failed.extend(progress.check_last().err());
        let error = Error::negative("the run is complete, but not all of its results were written");
        let error = failed.iter().fold(error, |error, failure| error.because(failure.line()));
        return Err(error.with_help("all other results are written"));
    }
    progress.check_last()?;
    let mut remarks = Vec::new();
    if request.plan.is_some() && !differences_from_plan.is_empty() && !result.trained.losses.is_empty() {
        remarks.push(format!(
            "the plan was made for a different {}; the memory estimate is for this run; `pipec partition` with the same flags makes a plan for it",
            differences_from_plan.join(", a different ")
        ));
    }
    let total = metrics::totals(&plan, &prepared, &result);
    let (batch, steps) = (prepared.batch, prepared.steps);
    drop(prepared);
    drop(task);
    Ok(Some(TrainReport { plan, memory_estimate, is_predicted, batch, steps, total, result, remarks }))
}

/// Writes weights, gradients and the trace, weights first. Returns the failures.
fn write_results(
    request: &TrainRequest,
    result: &RunResult,
    newest: Option<&Path>,
    events: &dyn EventSink,
) -> Vec<Error> {
    let trained = &result.trained;
    let weights = request.checkpoints.folder.as_ref().map(|folder| folder.join(WEIGHTS));
    let mut written: Vec<(PathBuf, &str)> = Vec::new();
    let mut failed = Vec::new();
    let tensors = [
        (request.save.as_ref(), &trained.weights, "weights"),
        (weights.as_ref(), &trained.weights, "weights"),
        (request.save_gradients.as_ref(), &trained.gradients, "gradients"),
    ];
    for (path, tensors, what) in tensors {
        let Some(path) = path else { continue };
        // The folder may have been removed during the run.
        let _ = path.parent().map(fs::create_dir_all);
        match output::write_tensors(path, tensors, "result") {
            Ok(()) => written.push((path.clone(), what)),
            Err(error) => failed.push(error),
        }
    }
    written.extend(newest.map(|folder| (folder.to_path_buf(), "checkpoint")));
    if let Some(path) = &request.trace {
        match output::write(path, &encode(&Trace::training(&result.tracks), &input::file_name(path))) {
            Ok(()) => written.push((path.clone(), "trace")),
            Err(error) => failed.push(error),
        }
    }
    let metrics = request.metrics.iter().filter(|_| result.failed.is_empty());
    written.extend(metrics.map(|path| (path.clone(), "metrics")));
    if !written.is_empty() {
        let describe = |(path, what): &(PathBuf, &str)| format!("{} ({what})", path.display());
        events.note(&format!("wrote {}", written.iter().map(describe).collect::<Vec<_>>().join(", ")));
    }
    failed
}

/// Refuses `--nccl` where it cannot work.
fn check_nccl(devices: &[Arc<dyn Device>], has_processes: bool) -> Result<(), Error> {
    if !has_processes {
        return Err(Error::input("`--nccl` requires several processes")
            .with_help("add `--processes`, or omit `--nccl`: the threads of one process need no NCCL"));
    }
    match devices.iter().find(|device| device.transport().is_none()) {
        None => Ok(()),
        Some(device) if device.is_asynchronous() => {
            Err(Error::input("`--nccl` requires NCCL 2.7 or later, which is not installed")
                .with_help("install it, for example with `pip install nvidia-nccl-cu13`, or omit `--nccl`"))
        }
        Some(_) => Err(Error::input("`--nccl` requires GPUs, but this run is on the CPU")
            .with_help("omit `--nccl`, or add `--device cuda`")),
    }
}

/// The precision, if it is not that of the model: the requested one, or the plan's.
fn precision(request: &TrainRequest, plan: &Plan) -> Option<Precision> {
    request.policy.precision.or(plan.precision())
}

/// Loads the model; fails if it differs from the framework's training model and the request does not accept that.
fn load_trainable(
    request: &TrainRequest,
    import: &model::ImportRequest,
    events: &dyn EventSink,
) -> Result<LoadedModel, Error> {
    if request.accept_inference_model {
        return model::load(&request.model, import, events);
    }
    let loaded = model::read(&request.model, import, events)?;
    let (errors, warnings): (Vec<_>, Vec<_>) = loaded.model.doubts.iter().partition(|doubt| doubt.is_wrong());
    warnings.iter().for_each(|doubt| model::warn_training(doubt, events));
    let Some(first) = errors.first() else { return Ok(loaded) };
    let message = format!("{} differs from the framework's training model", request.model.display());
    let error = errors.iter().fold(Error::input(message), |error, doubt| error.because(doubt));
    Err(error.with_help(format!("{}; `--accept-inference-model` trains the file as it is", first.remedy())))
}

/// Notes about policy and tensor parallelism.
fn report_policy(task: &Task<'_>, prepared: &Prepared, events: &dyn EventSink) {
    if task.request.optimizer.learning_rate() == 0.0 {
        events.warn("`--lr 0` updates no parameter: all losses are those of the initial weights");
    }
    prepared.sharing.iter().for_each(|sharing| events.note(&sharing.summary()));
    if task.policy.clip_norm.is_some() && task.schedule.is_continuous() {
        events.note(&format!(
            "{} has no flush: gradients are clipped per stage, and tied weights separately",
            task.schedule.name()
        ));
    }
}

/// Notes about omitted rows, ignored labels, and the effective batch size of replicas.
fn report_data(task: &Task<'_>, prepared: &Prepared, events: &dyn EventSink) {
    let omitted = prepared.rows as u64 % prepared.batch.max(1);
    if omitted > 0 {
        events.note(&format!(
            "{omitted} of {} do not fill a minibatch of {} and are omitted from every epoch",
            quantity::plural(prepared.rows as u64, "row", "rows"),
            quantity::count(prepared.batch)
        ));
    }
    if prepared.ignored > 0 {
        events.note(&format!(
            "{} of {} have only the ignored label {IGNORED}",
            quantity::count(prepared.ignored as u64),
            quantity::plural(prepared.rows as u64, "row", "rows")
        ));
    }
    if !task.loaded.model.constants.is_empty() {
        events.note(&format!("constant, not trained: {}", task.loaded.model.constants_text()));
    }
    if let Some(name) = &prepared.loss_output {
        events.note(&format!("the loss is the output `{}`", short_name(name)));
    }
    let microbatches = task.microbatches;
    match prepared.batch_dependence {
        None => {}
        Some(BatchDependence::Sum) => events.warn(&format!(
            "the loss adds up samples, and the losses of the {microbatches} micro-batches are averaged: loss and \
             gradients are 1/{microbatches} of those of a whole minibatch; a mean over samples does not depend on \
             `--microbatches`"
        )),
        Some(BatchDependence::Other(node)) => events.warn(&format!(
            "`{}` combines samples in another way than by a mean, so the result depends on the number of micro-batches; \
             `--microbatches 1` computes it for the whole minibatch",
            short_name(task.loaded.model.graph.node(node).label())
        )),
    }
    if prepared.has_averaged_evaluation {
        events.warn(&format!(
            "the evaluation loss is the average over batches of {} rows, not the model's loss on all rows at once",
            quantity::count(prepared.batch)
        ));
    }
    if let Some(first) = prepared.without_gradient.first() {
        events.warn(&format!(
            "the loss gives no gradient to {}, such as `{}`: no path leads to the loss, or each rounds or compares",
            quantity::plural(prepared.without_gradient.len() as u64, "parameter", "parameters"),
            short_name(first)
        ));
    }
    if task.schedule.is_round_robin() {
        let batch = quantity::count(prepared.batch);
        for (r, ids) in by_replicas(task.plan).into_iter().filter(|(r, _)| *r > 1) {
            let subject = if ids.len() > 1 { "stages" } else { "stage" };
            let (verb, each) = if ids.len() > 1 { ("have", " each") } else { ("has", "") };
            let samples = quantity::count(prepared.batch.saturating_mul(r.into()));
            let advice = match task.loaded.model.batch {
                Batch::Symbol { .. } => "`--batch` sets a minibatch",
                Batch::Fixed { .. } => {
                    "the file has a fixed batch; use fewer replicas, or export it with a dynamic batch dimension"
                }
            };
            events.note(&format!(
                "{subject} {} {verb} {r} replicas{each}: one update averages {r} minibatches, {samples} samples instead of {batch}; {advice}",
                ranges(&ids)
            ));
        }
    }
}

/// A plan with analytic costs of this CPU.
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
    let replica_count = stages.as_ref().map(|stages| stages.iter().fold(0u32, |sum, r| sum.saturating_add(*r)));
    let cuts = request.cut_after.as_ref().map(|cuts| cuts.len() as u32 + 1);
    let workers = request.workers.or(replica_count).or(cuts).unwrap_or(1).max(1);
    if let Some(replica_count) = replica_count.filter(|replica_count| *replica_count < workers) {
        return Err(Error::input(format!("`--workers {workers}` cannot be combined with these `--stages`"))
            .because(format!("the stages have {replica_count} replicas in total, one per worker"))
            .with_help(format!("use `--workers {replica_count}`, or omit `--workers`")));
    }
    if let Some(schedule) = schedule.filter(|schedule| workers == 1 && schedule.has_chunks()) {
        let message = format!("`--schedule {}` requires several workers, each with several stages", schedule.name());
        return Err(Error::input(message)
            .because("neither `--workers` nor a plan sets more than one")
            .with_help("use `--workers 2`, or pass a plan of `pipec partition` with `--plan`"));
    }
    let cluster = machine::cluster_of_this_cpu(workers)
        .map_err(|error| Error::input(format!("cannot plan for {workers} workers")).because(error))?;
    let micro_batch = (batch / u64::from(microbatches)).max(1);
    let device = cluster.device.clone();
    let precision = request.policy.precision.map_or(PrecisionChoice::Model, PrecisionChoice::Given);
    let times = Times::Analytic(device);
    let counted = request.loss.map_or(CountedLoss::Default, |loss| CountedLoss::One(loss, request.class_dim));
    if let Some(loss) = request.loss {
        // Planning works without a loss, training does not.
        attach(&mut loaded.with_samples(micro_batch)?, loss, request.class_dim)
            .map_err(|error| Error::input("cannot train").because(&error).with_help(help::loss(&error)))?;
    }
    let costs =
        Costs { has_memory: false, ..costs::assemble(loaded, micro_batch, cluster, times, precision, counted)? };
    let options = PlanOptions {
        schedule: request.schedule.clone().or(schedule.map(ScheduleChoice::Named)),
        microbatches,
        recompute: Recomputation::Never,
        replicas: stages,
        cut_after: request.cut_after.clone(),
        partitioner: if workers == 1 && request.cut_after.is_none() { Partitioner::Single } else { Partitioner::Pipec },
        optimizer: request.optimizer.optimizer,
        seed: request.seed,
        ..PlanOptions::default()
    };
    Ok(solve(&request.model, costs, &options)?.plan)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn degree_zero_is_refused() {
        let request =
            TrainRequest { tensor_parallel: Some(0), ..TrainRequest::new("no-model.onnx", DataInput::Synthetic) };
        let Err(refused) = train(request, &Silent) else { panic!("it was accepted") };
        assert!(refused.line().contains("the tensor-parallel degree is 0"), "{}", refused.line());
    }
}
