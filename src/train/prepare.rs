//! Compiles stages, makes and checks programs, and trains a model under a plan.

use crate::costs::model_match;
use crate::error::Error;
use crate::help;
use crate::launch::stop_signal::Stop;
use crate::loss::default_of;
use crate::model::LoadedModel;
use crate::plan::custom_schedule::CustomSchedule;
use crate::train::checkpoints::writer_config;
use crate::train::evaluation::{Score, Subject};
use crate::train::interrupted::Ended;
use crate::train::micro_batches::{dependence_of, has_uneven_means};
use crate::train::prepared::Prepared;
use crate::train::task::{Data, HeldOut, Length, Task};
use crate::train::tensor_parallel::Sharing;
use crate::train::{arrays, failures, memory, tensor_parallel};
use compiler::graph::{Graph, Output, order};
use compiler::import::import::{Batch, Model};
use compiler::op::{NodeId, Op};
use compiler::pass::loss::{Loss, TARGET, class_axis, output_of};
use compiler::pass::mixed_precision::mixed;
use compiler::pass::precision::precision;
use compiler::pass::unbiased_variance::{norm_of_one_value, unbiased};
use compiler::plan::Plan;
use compiler::plan::problem::InFlight;
use compiler::plan::schedule::Schedule;
use compiler::schedule::generators::schedule;
use compiler::schedule::pipeline::{generated, pipeline};
use compiler::schedule::resume::period;
use compiler::schedule::semantics::StepCount;
use compiler::schedule::{Pipeline, Program, WorkerId, published_caps};
use compiler::simulate::{self, Activity, Track};
use compiler::tensor::Tensor;
use compiler::tensor::dim::{Bindings, Dim};
use compiler::text::name::short_name;
use compiler::text::quantity;
use runtime::checkpoint::barrier::MinibatchBarrier;
use runtime::checkpoint::files::Disk;
use runtime::checkpoint::writer::{CheckpointWriter, Failure};
use runtime::checkpoint::{StageSnapshot, find};
use runtime::data::synthetic::synthetic;
use runtime::data::{Batches, DataError, Dataset, RowOrder, weights};
use runtime::device::api::Device;
use runtime::device::cpu::device::cpu;
use runtime::device::cpu::half::is_half;
use runtime::exec::moving_average::Statistics;
use runtime::exec::stage_code::{NamedTensor, StageCode};
use runtime::optim::policy::Staleness;
use runtime::process::process_group::Group;
use runtime::stage::saved_weights::Checkpoint;
use runtime::stage::worker::{Span, Work};
use runtime::train::error::TrainError;
use runtime::train::job::{RunOptions, StepDone, Trained};
use runtime::train::prepare::{PrepareError, RunTarget, Settings};
use runtime::train::{prepare, run};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, OnceLock, mpsc};

/// Minibatches of synthetic data; they are repeated.
const SYNTHETIC_MINIBATCHES: usize = 8;

/// Minimum number of minibatches before timing. Meanwhile memory is allocated and the pipeline fills.
const WARM_UP: usize = 8;

const MIN_TIMED_MINIBATCHES: usize = 8;

/// Default warm-up of PipeMare's learning rate: the run's minibatches divided by this.
const WARM_UP_DIVISOR: u32 = 4;

pub struct RunResult {
    /// Weights, losses, times.
    pub trained: Trained,
    /// The timeline of each worker.
    pub tracks: Vec<Track>,
    /// Samples per second over the run.
    pub samples_per_s: f64,
    /// Microseconds per minibatch after the pipeline has filled; `None` if this run has too few minibatches.
    pub step_us: Option<f64>,
    /// The evaluation of the trained model on held-out rows.
    pub score: Option<Score>,
    /// Set if a signal stopped the run before its end.
    pub ended: Option<Ended>,
    /// Results besides the trained model that were lost, such as its evaluation.
    pub failed: Vec<Error>,
}

/// Compiles the stages, makes the programs and checks them.
pub fn prepare(task: &mut Task<'_>) -> Result<Prepared, Error> {
    let fail = |why: &dyn std::fmt::Display| Error::input("cannot train").because(why);
    if !task.batch.is_multiple_of(u64::from(task.microbatches)) {
        let message = format!("a batch of {} is not a multiple of {} micro-batches", task.batch, task.microbatches);
        let multiple = task.batch.div_ceil(u64::from(task.microbatches)) * u64::from(task.microbatches);
        return Err(Error::input(message).with_help(format!("use `--batch {multiple}`, or another `--microbatches`")));
    }
    if let Data::Arrays(_) = task.data {
        check_batch_axes(&task.loaded.model)?;
    }
    let mut graph = task.loaded.with_samples(task.batch / u64::from(task.microbatches))?;
    if let Some(norm) = norm_of_one_value(&graph) {
        let label = short_name(graph.node(norm).label());
        return Err(fail(&format!(
            "the batch normalisation `{label}` would have one value per channel in a micro-batch"
        ))
        .with_help("use fewer `--microbatches` or a larger `--batch`"));
    }
    let half_dtype = task.dtype.filter(|dtype| is_half(*dtype));
    if let Some(dtype) = task.dtype.filter(|_| half_dtype.is_none()) {
        graph = precision(&graph, dtype).map_err(|error| fail(&error))?;
    }
    let stages = stages(task.loaded, &graph, task.plan)?;
    if let Some(dtype) = half_dtype {
        graph = mixed(&graph, dtype).map_err(|error| fail(&error))?;
    }
    if task.unbiased && task.policy.statistics == Statistics::Batch {
        unbiased(&mut graph);
    }
    let all_rows = match &task.data {
        Data::Arrays(arrays) => rows(&graph, arrays),
        Data::Synthetic(_) => (task.batch as usize).saturating_mul(SYNTHETIC_MINIBATCHES),
    };
    let rows = match task.held_out {
        // At least one row is held out, and one remains.
        HeldOut::Share(share) => all_rows - ((all_rows as f64 * share).ceil() as usize).min(all_rows.saturating_sub(1)),
        _ => all_rows,
    };
    let per_epoch = rows / (task.batch as usize).max(1);
    let steps = match task.length {
        Length::Steps(steps) => steps,
        Length::Epochs(epochs) => u32::try_from(per_epoch.max(1) as u64 * u64::from(epochs))
            .map_err(|_| Error::input(format!("{epochs} epochs are too many steps")))?,
    };
    let loss = task.loss.unwrap_or_else(|| default_of(&graph));
    let settings = Settings {
        dims: Bindings::new(),
        loss,
        class_axis: task.class_dim,
        minibatch_means: has_uneven_means(&graph, loss, &task.data),
        schedule: match task.custom_schedule {
            Some(custom_schedule) => custom_schedule.schedule(),
            None if task.request.policy.is_newest() => Schedule::OneFOneBRrNewest,
            None => generated(task.schedule).map_err(|error| fail(&error))?,
        },
        count: StepCount { minibatches: steps, microbatches: task.microbatches },
    };
    let pipeline = apply_in_flight(
        pipeline(task.plan).map_err(|error| fail(&error).with_help(help::schedule(&error)))?,
        &task.request.in_flight,
    )?;
    let program = |pipeline: &Pipeline| match task.custom_schedule {
        None => schedule(settings.schedule, pipeline, settings.count),
        Some(custom_schedule) => custom_schedule.unchecked(pipeline, steps),
    };
    let splits = task.custom_schedule.map_or(settings.schedule.splits_backward(), CustomSchedule::splits_backward);
    let machine = (task.tensor != 1).then(|| tensor_parallel::machine(task.plan, task.tensor));
    let target = RunTarget { device: &*task.devices[0], splits, program: &program, machine: machine.as_ref() };
    let compiled = prepare::prepare_with(&graph, &stages, pipeline, &settings, target);
    let mut compiled = compiled.map_err(|error| match (&error, task.custom_schedule) {
        (PrepareError::Program(fault), Some(custom_schedule)) => custom_schedule.unsound(fault),
        (PrepareError::Schedule(_), Some(_)) => fail(&error),
        (PrepareError::Program(_), None) => Error::bug(&error.to_string()),
        (PrepareError::Loss(loss), _) => fail(&error).with_help(help::loss(loss)),
        _ => match help::prepare(&error) {
            Some(help) => fail(&error).with_help(help),
            None => fail(&error),
        },
    })?;
    for (code, stage) in compiled.codes.iter_mut().zip(&task.plan.stages) {
        // A program from a file may omit recomputation; each backward then does it implicitly.
        code.recompute |= stage.recompute && !code.recomputes_parts;
        code.buckets = stage.buckets.iter().map(|bucket| bucket.parameters.clone()).collect();
    }
    let feeds = run::feeds(&compiled.codes);
    // Data from a file is already in memory.
    let data_bytes = match task.data {
        Data::Synthetic(_) => memory::of_data(&feeds, u64::from(task.microbatches) * SYNTHETIC_MINIBATCHES as u64),
        Data::Arrays(_) => 0,
    };
    let training_bytes = match task.is_on_gpus() {
        true => 0,
        false => memory::of_training(&compiled.codes, &compiled.program, task.optimizer)
            .saturating_mul(task.tensor.max(1) as u64),
    };
    let help = "use a smaller `--batch`, fewer in-flight minibatches (`--in-flight`) or more `--microbatches`";
    let total_bytes = training_bytes.saturating_add(data_bytes);
    if task.has_processes {
        // Each process makes the data, and has only some of the workers.
        memory::check("the synthetic data", data_bytes, help)?;
        memory::check_all_processes("training", total_bytes, help)?;
    } else {
        memory::check("training", total_bytes, help)?;
    }
    let item_rows = task.batch as usize / task.microbatches as usize;
    let subject = subject(task, loss, &task.devices[0]);
    let arrays = match std::mem::replace(&mut task.data, Data::Synthetic(0)) {
        Data::Arrays(arrays) => arrays,
        Data::Synthetic(seed) => {
            let mut arrays = synthetic(&compiled.graph, &feeds, item_rows, all_rows, seed);
            let data =
                Dataset::new(arrays.clone(), &feeds, item_rows).map_err(|error| Error::bug(&error.to_string()))?;
            subject.set_teacher_targets(&mut arrays, &data, task.weights, seed)?;
            arrays
        }
    };
    let labels = arrays::labels(&arrays);
    let held_out_labels = match &task.held_out {
        HeldOut::Arrays(arrays) => arrays::labels(arrays),
        _ => labels,
    };
    let data_error = |subject: &str, error: DataError, labels: &str| {
        let help = help::targets(&error, loss).unwrap_or_else(|| help::data(&error));
        Error::input(format!("{subject} does not match the model"))
            .because(arrays::rename_labels(error, labels))
            .with_help(help)
    };
    let unfit = |error| data_error("the data", error, labels);
    let unfit_held_out = |error| data_error("the evaluation data", error, held_out_labels);
    let checked_dataset = |arrays| {
        check_rows(&task.loaded.model.graph, &feeds, &arrays)?;
        let data = Dataset::new(arrays, &feeds, item_rows)?;
        if let (Loss::CrossEntropy, Some(classes)) = (loss, classes(&graph, task.class_dim)) {
            data.check_labels(TARGET, classes)?;
        }
        data.check_indices(&compiled.graph)?;
        Ok(data)
    };
    let data = checked_dataset(arrays).map_err(unfit)?;
    let (data, held_out) = match std::mem::replace(&mut task.held_out, HeldOut::Nothing) {
        HeldOut::Nothing => (data, None),
        HeldOut::Share(_) => {
            let (first, last) = data.split(rows);
            (first, Some(last))
        }
        HeldOut::Arrays(arrays) => (data, Some(checked_dataset(arrays).map_err(unfit_held_out)?)),
    };
    let count_labels = |data: &Dataset, rows| match loss {
        Loss::CrossEntropy => data.check_counted(TARGET, rows),
        _ => Ok(0),
    };
    let rows = data.rows();
    let (items, microbatches) = (task.batch as usize, task.microbatches as usize);
    // Without shuffling, no epoch has the rows after its last full minibatch.
    let trained_rows = if task.order == RowOrder::InOrder && rows > items { rows / items * items } else { rows };
    let ignored = count_labels(&data, trained_rows).map_err(unfit)?;
    held_out.as_ref().map_or(Ok(0), |data| count_labels(data, data.rows())).map_err(unfit_held_out)?;
    let batches = Batches::new(data, items, microbatches, steps as usize, task.order)
        .map_err(unfit)?
        .with_seed(task.request.seed);
    let batches = batches.with_means(compiled.means.take(), task.weights);
    let per_epoch = batches.per_epoch();
    let mut policy = task.policy;
    if let Staleness::PipeMare { anneal: anneal @ 0 } = &mut policy.staleness {
        *anneal = steps.div_ceil(WARM_UP_DIVISOR);
    }
    let is_evaluated_in_parts = loss == Loss::Output && held_out.as_ref().is_some_and(|data| data.rows() > items);
    let is_divided = microbatches > 1 || is_evaluated_in_parts;
    let batch_dependence = if is_divided { dependence_of(task, loss, settings.minibatch_means) } else { None };
    let own_loss = output_of(&graph).filter(|_| loss == Loss::Output).map(|at| &graph.outputs[at]);
    let is_scalar = |output: &&Output| graph.fact(output.value).shape.iter().all(|dim| dim.is(1));
    let scalars = graph.outputs.iter().filter(is_scalar).count();
    let sharing = (task.tensor != 1).then(|| Sharing::of(&compiled, task.tensor));
    Ok(Prepared {
        loss_output: own_loss.filter(|_| scalars > 1).map(|output| output.name.clone()),
        has_averaged_evaluation: is_evaluated_in_parts && (batch_dependence.is_some() || settings.minibatch_means),
        batch_dependence: batch_dependence.filter(|_| microbatches > 1),
        without_gradient: without_gradient(&graph, &compiled.codes),
        compiled,
        batches,
        policy,
        steps,
        batch: task.batch,
        per_epoch,
        rows,
        ignored,
        loss,
        held_out,
        data: OnceLock::new(),
        resumed: None,
        sharing,
        differs_from_plan: Vec::new(),
    })
}

/// Trains; calls `on_step` for every minibatch in order. In a process group, only rank 0 returns the result.
pub fn run(
    task: &Task<'_>,
    prepared: &Prepared,
    group: Option<Group>,
    on_step: &mut dyn FnMut(StepDone),
) -> Result<Option<RunResult>, Error> {
    let job = prepared.job(task);
    let program = job.program;
    let mut fault = None;
    let mut write_weights = |folder: &Path, checkpoint: Checkpoint| {
        // Weights that are not finite are reported at the end of the run.
        if fault.is_none() && failures::not_finite(&checkpoint.weights, task.weights).is_none() {
            fault = weights::write(&folder.join(checkpoint.file_name()), &checkpoint.weights).err();
        }
    };
    let folder = task.request.checkpoints.folder.as_deref();
    let mut on_checkpoint = folder.map(|folder| move |checkpoint| write_weights(folder, checkpoint));
    // Any process of a group may receive a stop signal, but process 0 writes the checkpoints.
    let reports = group.as_ref().is_none_or(|group| group.config.process == 0);
    let stop = task.checkpoint_settings.as_ref().map(|_| Stop::listen()).transpose();
    let stop = stop.map_err(|error| Error::input("cannot listen to signals").because(error))?;
    stop.into_iter().for_each(|stop| stop.set_awaited(true));
    let gate = stop.map(|stop| MinibatchBarrier::new(stop.signal(), period(program), prepared.first_step() as u32));
    let (saved_sender, saved_receiver) = mpsc::channel();
    let mut on_snapshot = task.checkpoint_settings.as_ref().filter(|_| reports).map(|checkpoint_settings| {
        // Tensors that go through the host arrive whole or not at all.
        let run_status = group.as_ref().filter(|group| group.config.nccl).map(|group| group.run_status.clone());
        let failure =
            run_status.map(|status| -> Failure<'_> { Box::new(move || status.cause().map(|c| c.to_string())) });
        let writer = CheckpointWriter::new(Disk, writer_config(checkpoint_settings, task, prepared));
        let mut writer = writer.ending_with(failure);
        move |snapshot: StageSnapshot| {
            // The receiver lives as long as the run.
            writer.take(snapshot).into_iter().for_each(|saved| drop(saved_sender.send(saved)));
        }
    });
    let report_saves = || {
        let callbacks = task.checkpoint_settings.iter().flat_map(|checkpoint_settings| {
            saved_receiver.try_iter().map(|saved| (checkpoint_settings.on_saved)(&saved))
        });
        callbacks.count();
    };
    let options = RunOptions {
        start: prepared.resumed.as_ref().map(|resumed| &resumed.start),
        cuts: task.checkpoint_settings.as_ref().map(|_| prepared.cuts(task)),
        barrier: gate.as_ref(),
        on_snapshot: on_snapshot.as_mut().map(|on_snapshot| on_snapshot as &mut (dyn FnMut(StageSnapshot) + Send)),
        on_checkpoint: on_checkpoint.as_mut().map(|on_checkpoint| on_checkpoint as &mut dyn FnMut(Checkpoint)),
        devices: task.devices.to_vec(),
    };
    let mut ends = Vec::new();
    let report_step = &mut |step: StepDone| {
        report_saves();
        ends.push(step.seconds);
        on_step(step);
    };
    let describe = |error: TrainError| match &error {
        TrainError::Diverged(diverged) if diverged.loss.is_nan() && prepared.ignored > 0 => {
            let rows = quantity::plural(prepared.ignored as u64, "row has", "rows have");
            failures::describe(&error)
                .because(format!("{rows} only ignored labels; a minibatch of only such rows has no loss"))
        }
        _ => failures::describe(&error),
    };
    let trained = match &prepared.sharing {
        Some(sharing) => sharing.train(&job, options, report_step, group),
        None => run::run_in_group(&job, options, report_step, group).map_err(describe),
    };
    report_saves();
    let trained = trained?;
    if let Some(fault) = fault {
        return Err(Error::input("cannot write a checkpoint").because(fault));
    }
    let stop_point = gate.as_ref().and_then(|gate| Some((gate.reason(), gate.end()?)));
    let ended = stop_point.filter(|(_, minibatches)| *minibatches < prepared.steps).map(|(reason, minibatches)| {
        let folder =
            task.checkpoint_settings.as_ref().filter(|_| reports).map(|checkpoint_settings| checkpoint_settings.folder);
        let signal = i32::try_from(reason).unwrap_or(0);
        Ended { signal, minibatches, checkpoint: folder.map(|folder| folder.join(find::name(minibatches))) }
    });
    if ended.is_none() {
        stop.into_iter().for_each(Stop::exit_on_next);
    }
    let Some(trained) = trained else { return ended.map_or(Ok(None), |ended| Err(ended.error(prepared.steps))) };
    let step_us = steady_us(&ends, warm_up(program), period(program) as usize);
    Ok(Some(RunResult { step_us, ..assemble_result(task, prepared, trained, ended)? }))
}

/// Minibatches before timing: those that may be in flight without a flush, and at least [`WARM_UP`].
fn warm_up(program: &Program) -> usize {
    let in_flight = program.stages.iter().map(|stage| stage.cap.saturating_mul(stage.replicas)).max();
    let minibatches = in_flight.unwrap_or(0).div_ceil(program.microbatches.max(1));
    if program.schedule.flushes() { WARM_UP } else { WARM_UP.max(minibatches as usize) }
}

/// Microseconds per minibatch after the first `warm_up`, from the seconds at which minibatches ended. The replicas of a
/// stage end a round of `period` minibatches at about the same time, so only whole rounds count.
fn steady_us(ends: &[f64], warm_up: usize, period: usize) -> Option<f64> {
    let first = warm_up.checked_next_multiple_of(period)?;
    let timed = ends.len().checked_sub(first)? / period * period;
    let seconds = ends.get(first + timed - 1)? - ends.get(first - 1)?;
    (timed >= MIN_TIMED_MINIBATCHES).then_some(seconds * 1e6 / timed as f64)
}

/// The result of a run, with throughput and evaluation.
fn assemble_result(
    task: &Task<'_>,
    prepared: &Prepared,
    trained: Trained,
    ended: Option<Ended>,
) -> Result<RunResult, Error> {
    let tracks = tracks(&prepared.compiled.program, &trained.spans);
    let samples = prepared.batch as f64 * trained.losses.len() as f64;
    if let Some(name) = failures::not_finite(&trained.weights, task.weights).filter(|_| ended.is_none()) {
        return Err(failures::weights_diverged(name, prepared.steps));
    }
    let samples_per_s = if trained.seconds > 0.0 { samples / trained.seconds } else { 0.0 };
    let mut failed = Vec::new();
    let score = prepared.held_out.as_ref().filter(|_| ended.is_none()).and_then(|data| {
        let score = score(task, prepared.loss, data, &trained.weights);
        score.map_err(|error| failed.push(error)).ok()
    });
    Ok(RunResult { trained, tracks, samples_per_s, step_us: None, score, ended, failed })
}

/// The score on held-out rows. The CPU evaluates a model that does not fit in one GPU.
fn score(task: &Task<'_>, loss: Loss, data: &Dataset, weights: &BTreeMap<String, Tensor>) -> Result<Score, Error> {
    let score_on = |device: &Arc<dyn Device>| subject(task, loss, device).score(data, weights);
    score_on(&task.devices[0]).or_else(|_| score_on(&cpu()))
}

/// The model for evaluation, outside the pipeline.
fn subject<'a>(task: &Task<'a>, loss: Loss, device: &'a Arc<dyn Device>) -> Subject<'a> {
    // A model's own loss is that of a minibatch: micro-batches may have different numbers of counted labels.
    let is_whole = loss == Loss::Output && !matches!(task.loaded.model.batch, Batch::Fixed { .. });
    let item_rows = if is_whole { task.batch } else { task.batch / u64::from(task.microbatches.max(1)) } as usize;
    let floats = task.dtype.filter(|dtype| !is_half(*dtype));
    Subject { loaded: task.loaded, floats, loss, class_dim: task.class_dim, item_rows, device }
}

/// The stage of every op, by op id.
fn stages(loaded: &LoadedModel, graph: &Graph, plan: &Plan) -> Result<Vec<usize>, Error> {
    let ops = order::numbered(graph).len();
    model_match::check(plan, &loaded.planned(ops, plan.model.import.loss.clone()))?;
    let mut stage_of = vec![0; ops];
    for (at, stage) in plan.stages.iter().enumerate() {
        stage.op_ids().for_each(|op| stage_of[op as usize] = at);
    }
    Ok(stage_of)
}

/// The number of rows of the data: the largest first dimension of its inputs.
fn rows(graph: &Graph, arrays: &BTreeMap<String, Tensor>) -> usize {
    let inputs = graph.ids().filter_map(|id| arrays.get(input_name(graph, id)?));
    // An input without a batch axis has fewer rows than samples; otherwise the data does not match and is refused later.
    inputs.map(|array| array.shape().first().copied().unwrap_or(0)).max().unwrap_or(0)
}

pub(super) fn input_name(graph: &Graph, id: NodeId) -> Option<&str> {
    match &graph.node(id).op {
        Op::Input(input) => Some(&input.name),
        _ => None,
    }
}

/// Inputs with a batch axis and the targets have equally many rows. An array with as many rows as a micro-batch could
/// otherwise be mistaken for one that every micro-batch reads whole.
fn check_rows(graph: &Graph, feeds: &[NamedTensor], arrays: &BTreeMap<String, Tensor>) -> Result<(), DataError> {
    let has_batch_axis = |id: &NodeId| {
        let axes = graph.values(*id).into_iter().filter_map(|value| graph.fact(value).shape.first());
        axes.into_iter().any(|axis| axis.known().is_none())
    };
    let with_batch_axis: BTreeSet<&str> =
        graph.ids().filter(has_batch_axis).filter_map(|id| input_name(graph, id)).collect();
    let mut first: Option<(&str, usize)> = None;
    for feed in feeds.iter().filter(|feed| feed.name == TARGET || with_batch_axis.contains(&*feed.name)) {
        let array = arrays.get(&feed.name).or_else(|| arrays.get("y").filter(|_| feed.name == TARGET));
        let Some(&rows) = array.and_then(|array| array.shape().first()) else { continue };
        let &mut (other, other_rows) = first.get_or_insert((&feed.name, rows));
        if rows != other_rows {
            let (name, other) = (feed.name.clone(), other.to_string());
            return Err(DataError::Rows { name, rows, other, other_rows });
        }
    }
    Ok(())
}

/// Refuses inputs with the batch on another axis than 0.
fn check_batch_axes(model: &Model) -> Result<(), Error> {
    let Batch::Symbol { name: batch, .. } = &model.batch else { return Ok(()) };
    let graph = &model.graph;
    let has_batch = |dim: &Dim| dim.has_symbol(batch);
    for id in graph.ids() {
        let Op::Input(input) = &graph.node(id).op else { continue };
        let axis = input.fact.shape.iter().position(has_batch).filter(|axis| *axis > 0);
        if let Some(axis) = axis {
            let why = format!("the batch is axis {axis} of input `{}`", short_name(&input.name));
            return Err(Error::input("training needs the batch on axis 0").because(why).with_help(
                "export the model with `x.transpose(0, 1)` as its first step, so that its input has the batch first",
            ));
        }
    }
    Ok(())
}

/// The parameters to which the loss gives no gradient.
fn without_gradient(graph: &Graph, codes: &[StageCode]) -> Vec<String> {
    let trained: BTreeSet<&str> = codes
        .iter()
        .flat_map(|code| code.gradient_terms.iter().map(|term| &*code.parameters[term.parameter].name))
        .collect();
    let is_untrained = |id| match &graph.node(id).op {
        Op::Parameter(parameter) if !trained.contains(&*parameter.name) => Some(parameter.name.clone()),
        _ => None,
    };
    graph.ids().filter_map(is_untrained).collect()
}

fn classes(graph: &Graph, class_dim: Option<i64>) -> Option<i64> {
    let fact = graph.fact(graph.outputs.first()?.value);
    fact.shape[class_axis(fact, class_dim)?].known()
}

fn apply_in_flight(pipeline: Pipeline, in_flight: &InFlight) -> Result<Pipeline, Error> {
    let stages = pipeline.stages.len();
    match in_flight {
        InFlight::Auto => Ok(pipeline),
        InFlight::Pipedream => {
            let replicas: Vec<u32> = pipeline.stages.iter().map(|stage| stage.replicas).collect();
            Ok(pipeline.with_caps(&published_caps(&replicas)))
        }
        InFlight::Given(caps) if caps.len() == stages && !caps.contains(&0) => Ok(pipeline.with_caps(caps)),
        InFlight::Given(caps) => Err(Error::input(match caps.iter().position(|cap| *cap == 0) {
            Some(stage) if caps.len() == stages => {
                format!("`--in-flight` has 0 for stage {stage}; each number must be at least 1")
            }
            _ => format!("the number of limits in `--in-flight` is {}, the number of stages {stages}", caps.len()),
        })
        .with_help(format!("use at least `--in-flight {}`, or auto", vec!["1"; stages].join(",")))),
    }
}

fn tracks(program: &Program, spans: &[Vec<Span>]) -> Vec<Track> {
    let track = |(at, spans): (usize, &Vec<Span>)| {
        let name = program.worker_name(WorkerId(at as u32));
        let span = |span: &Span| simulate::Span {
            activity: match span.work {
                Work::Compute(work) => Activity::of(work),
                Work::Recompute(stage, item) => Activity::Recompute(stage, item),
                Work::Wait => Activity::Wait,
                Work::Step(stage, version) => Activity::Step(stage, version.saturating_sub(1)),
            },
            start: span.start * 1e6,
            end: span.end * 1e6,
        };
        Track { name, spans: spans.iter().map(span).collect() }
    };
    spans.iter().enumerate().map(track).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use compiler::schedule::StageSpec;

    #[test]
    fn whole_rounds_after_the_first_minibatches_are_timed() {
        // Both replicas end a round of two seconds together; the first round ends after 50 seconds.
        let ends: Vec<f64> = (0..32).map(|at| 50.0 + f64::from(at / 2) * 2.0).collect();
        assert_eq!(steady_us(&ends, 8, 2), Some(1e6));
        assert_eq!(steady_us(&ends, 23, 2), Some(1e6));
        assert_eq!(steady_us(&ends, 25, 2), None);
        assert_eq!(steady_us(&ends[..31], 8, 2), Some(1e6));
        assert_eq!(steady_us(&ends[..16], 8, 2), Some(1e6));
        assert_eq!(steady_us(&ends[..15], 8, 2), None);
        assert_eq!([0, 1, 8].map(|end| steady_us(&ends[..end], 8, 1)), [None; 3]);
        assert_eq!(steady_us(&ends, 8, usize::MAX), None);
    }

    #[test]
    fn minibatches_in_flight_are_not_timed() {
        let warm_up_of = |kind, microbatches, caps: &[u32]| {
            let stage = StageSpec::new(1, 1.0, 2.0);
            let pipeline = Pipeline::chain(vec![stage; caps.len()]).with_caps(caps);
            warm_up(&schedule(kind, &pipeline, StepCount { minibatches: 4, microbatches }).unwrap())
        };
        assert_eq!(warm_up_of(Schedule::OneFOneBRr, 1, &[3, 1]), WARM_UP);
        assert_eq!(warm_up_of(Schedule::OneFOneBRr, 1, &[20, 1]), 20);
        assert_eq!(warm_up_of(Schedule::Gpipe, 4, &[20, 20]), WARM_UP);
        assert_eq!(warm_up_of(Schedule::TwoBw, 4, &[20, 20]), WARM_UP);
    }
}
