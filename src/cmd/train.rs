//! `pipec train`: trains a model under a plan.

use crate::arguments::Import;
use crate::checkpoints::{self, Keeping};
use crate::cmd::checkpoints::{CheckpointArguments, WEIGHTS};
use crate::cmd::optimizer::OptimizerArguments;
use crate::cmd::partition::{self, Question};
use crate::cmd::policy::PolicyArguments;
use crate::cmd::processes::ProcessArguments;
use crate::failure::Failure;
use crate::initial::initial;
use crate::loss::{Counted, Loss};
use crate::metrics::{of_device, report, watched};
use crate::model::{self, DEFAULT_MICRO_BATCH, Loaded};
use crate::own::{self, Own};
use crate::replaced::Mark;
use crate::screen::Screen;
use crate::seat::Seat;
use crate::source::{self, Costs, Times};
use crate::tensor::degree;
use crate::training::{self, Data, HeldOut, Length, Prepared, Task};
use crate::{advice, children, cmd, given, output, prediction, quantity, replaced, stages};
use clap::Args;
use compiler::export::stage_name::ranges;
use compiler::export::trace::Trace;
use compiler::export::trace::encode::encode;
use compiler::import::import::Batch;
use compiler::import::onnx::name::shown;
use compiler::op::Op;
use compiler::pass::loss::{IGNORED, attach};
use compiler::plan::groups::MOST;
use compiler::plan::problem::InFlight;
use compiler::plan::{Plan, ScheduleKind};
use compiler::tensor::DType;
use profiler::machine;
use runtime::data::RowOrder;
use runtime::device::cpu::half::is_half;
use std::cell::RefCell;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};

/// What to train, on what, how.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  pipec train model.onnx --plan model.plan.json --data train.npz --loss cross-entropy --lr 0.1 --epochs 5 --save weights.safetensors\n  pipec train model.onnx --stages 2,1 --synthetic-data --steps 100"
)]
pub struct Arguments {
    /// The model
    #[arg(value_name = "MODEL")]
    file: PathBuf,
    /// The plan; without one, training plans on analytic costs of this CPU
    #[arg(long, value_name = "FILE", conflicts_with_all = ["workers", "stages", "cut_after"], help_heading = "Plan and schedule")]
    plan: Option<PathBuf>,
    /// Workers to plan for [default: one, or as the stages need]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024), help_heading = "Plan and schedule")]
    workers: Option<u32>,
    /// Replicas of each stage, for example 2,1,1
    #[arg(long, value_name = "R,R,…", value_delimiter = ',', value_parser = partition::replicas, help_heading = "Plan and schedule")]
    stages: Option<Vec<u32>>,
    /// End a stage after each of these nodes, modules or op ids
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', help_heading = "Plan and schedule")]
    cut_after: Option<Vec<String>>,
    /// Arrays named by the model's inputs, the labels `target` or `y`: .npz, .npy or .safetensors
    #[arg(long, value_name = "FILE", help_heading = "Data")]
    data: Option<PathBuf>,
    /// Train on made-up data, whose targets are what another network of the same form answers
    #[arg(long, conflicts_with = "data", help_heading = "Data")]
    synthetic_data: bool,
    /// Keep this share of the rows, the last ones, from training, and tell at the end how good the model is on them
    #[arg(long, value_name = "SHARE", value_parser = share, conflicts_with = "eval_data", help_heading = "Data")]
    eval_split: Option<f64>,
    /// Tell at the end how good the model is on these rows: arrays as in --data
    #[arg(long, value_name = "FILE", help_heading = "Data")]
    eval_data: Option<PathBuf>,
    /// Samples in a minibatch [default: the plan's, else the file's, else 32]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 32), help_heading = "Data")]
    batch: Option<u64>,
    /// Micro-batches in a minibatch [default: the plan's, else 1]
    #[arg(long, value_name = "M", value_parser = clap::value_parser!(u32).range(1..=1 << 20), help_heading = "Data")]
    microbatches: Option<u32>,
    /// Devices that share every stage: its ops are split among so many threads [default: as the plan says, else 1]
    #[arg(long, value_name = "N", value_parser = devices, conflicts_with_all = ["processes", "hosts", "rank"], help_heading = "Plan and schedule")]
    tensor: Option<u32>,
    /// Order of work: a schedule, a table FILE.csv, or programs FILE.json [default: the plan's, else 1f1b-rr, or 1f1b with micro-batches]
    #[arg(long, value_name = "NAME|FILE", value_parser = own::said, help_heading = "Plan and schedule")]
    schedule: Option<String>,
    /// Minibatches in flight on each replica of a stage: auto (the plan's), pipedream, or one number a stage
    #[arg(long, value_name = "auto|pipedream|N,N,…", default_value = "auto", value_parser = partition::in_flight, help_heading = "Plan and schedule")]
    in_flight: InFlight,
    /// Minibatches to train
    #[arg(long, value_name = "N", conflicts_with = "epochs", value_parser = clap::value_parser!(u32).range(1..=10_000_000), help_heading = "Data")]
    steps: Option<u32>,
    /// Times through the data [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000), help_heading = "Data")]
    epochs: Option<u32>,
    /// See the rows in a new order every epoch
    #[arg(long, conflicts_with = "no_shuffle", help_heading = "Data")]
    shuffle: bool,
    /// See the rows as they stand in the file; this is the default
    #[arg(long, help_heading = "Data")]
    no_shuffle: bool,
    /// What is made small, the mean of it over the micro-batches of a minibatch [default: the plan's; output for a model that returns its loss, else cross-entropy]
    #[arg(long, value_enum, value_name = "NAME", help_heading = "Updates")]
    loss: Option<Loss>,
    /// The axis of classes; negative counts from the end [default: -1]
    #[arg(long, value_name = "AXIS", allow_hyphen_values = true, help_heading = "Updates")]
    class_dim: Option<i64>,
    #[command(flatten)]
    optimizer: OptimizerArguments,
    #[command(flatten)]
    policy: PolicyArguments,
    #[command(flatten)]
    processes: ProcessArguments,
    /// Whether running variances follow the biased batch variance (onnx) or the unbiased one (torch) [default: torch for a .pt2]
    #[arg(long, value_name = "RULE", value_parser = ["onnx", "torch"], help_heading = "Updates")]
    bn_variance: Option<String>,
    /// Initial weights by name: .npz, .safetensors or the folder of a checkpoint [default: those of the model]
    #[arg(long, value_name = "FILE", help_heading = "Weights and results")]
    weights: Option<PathBuf>,
    /// Parameters that are not trained: names, or prefix* for all that start so
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', help_heading = "Weights and results")]
    freeze: Vec<String>,
    /// Write the trained weights: .safetensors or .npz
    #[arg(long, value_name = "FILE", help_heading = "Weights and results")]
    save: Option<PathBuf>,
    /// Write the gradients of the last minibatch by parameter name
    #[arg(long, value_name = "FILE", help_heading = "Weights and results")]
    save_gradients: Option<PathBuf>,
    #[command(flatten)]
    checkpoints: CheckpointArguments,
    /// Write a JSON object for every minibatch, and one with totals at the end
    #[arg(long, value_name = "FILE", help_heading = "Weights and results")]
    metrics: Option<PathBuf>,
    /// Write a trace that Perfetto opens: in its own form as .pftrace or .perfetto-trace, else as JSON, which chrome://tracing opens too
    #[arg(long, value_name = "FILE", help_heading = "Weights and results")]
    trace: Option<PathBuf>,
    /// Where to run
    #[arg(long, value_name = "auto|cpu", default_value = "auto", value_parser = device, help_heading = "Run")]
    device: String,
    /// Seed of everything random
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Run")]
    seed: u64,
    #[command(flatten)]
    import: Import,
    /// Train a file though it is not the model that its framework trains: folded or stored statistics, merged parameters
    #[arg(long, help_heading = "Model")]
    accept_inference_model: bool,
}

/// Reads `--device`.
fn device(text: &str) -> Result<String, String> {
    match text {
        "auto" | "cpu" => Ok(text.to_string()),
        _ if text.starts_with("cuda") => {
            Err("training runs on the CPU so far; `pipec export --to torch` writes a bundle that trains the \
            same plan on GPUs, `pipec doctor` says which are here"
                .to_string())
        }
        _ => Err("write auto or cpu".to_string()),
    }
}

/// Trains, prints, writes; again where processes of the run died and may be started again.
pub fn run(mut arguments: Box<Arguments>, screen: &Screen) -> Result<(), Failure> {
    let seat = Seat::find(&arguments.processes)?;
    let (silent, own) = (Screen::silent(), screen);
    let screen = if seat.reports() { screen } else { &silent };
    if seat.reports() {
        [&arguments.save, &arguments.save_gradients]
            .into_iter()
            .flatten()
            .try_for_each(|path| output::check_tensors(path))?;
        let weights = arguments.checkpoints.checkpoint_dir.iter().map(|folder| folder.join(WEIGHTS));
        weights.into_iter().try_for_each(|path| replaced::check(&path, &Mark::Safetensors))?;
        arguments.metrics.iter().try_for_each(|path| output::check(path, &Mark::Metrics))?;
        arguments.trace.iter().try_for_each(|path| output::check(path, &Mark::trace(path)))?;
    }
    // Asked only where the run may be begun again.
    let before = if arguments.processes.max_restarts > 0 { arguments.checkpoints.there() } else { Vec::new() };
    let mut restarts = seat.restarts();
    loop {
        if restarts > 0 {
            // Those that were started by another go on where it does.
            match env::var_os(children::VARIABLE).and(env::var_os(children::RESUMED)) {
                Some(from) => arguments.checkpoints.resume = Some(PathBuf::from(from)),
                None => arguments.checkpoints.go_on(&before),
            }
            arguments.processes.resumed.clone_from(&arguments.checkpoints.resume);
        }
        match once(&arguments, &seat, restarts, (screen, own)) {
            Err(failure) if failure.may_pass && restarts < arguments.processes.max_restarts => {
                restarts += 1;
                screen.warn(&format!("{}; restart {restarts} of {}", failure.line(), arguments.processes.max_restarts));
            }
            done => return done,
        }
    }
}

fn once(
    arguments: &Arguments,
    seat: &Seat,
    restarts: u32,
    (screen, own_screen): (&Screen, &Screen),
) -> Result<(), Failure> {
    let optimizer = arguments.optimizer.build()?;
    let resume = arguments.checkpoints.resumes()?;
    let no_others = |is_held| match &arguments.checkpoints.checkpoint_dir {
        Some(folder) => checkpoints::refuse_other_runs(folder, resume, is_held),
        None => Ok(()),
    };
    no_others(false)?;
    if arguments.data.is_none() && !arguments.synthetic_data {
        return Err(Failure::input("no data is given").help(
            "`--data train.npz` has arrays named like the model's inputs; `--synthetic-data` trains on made-up data",
        ));
    }
    let given = arguments.plan.as_deref().map(cmd::plan::sound_plan).transpose()?;
    let devices = arguments.tensor.map_or_else(|| given.as_ref().map_or(1, degree), |devices| devices as usize);
    if devices > 1 && !matches!(seat, Seat::Alone) {
        return Err(Failure::input(
            "devices that share a stage are threads of one process, and several processes were started",
        )
        .help("start `pipec train` by itself, or plan without `--tensor` for several processes"));
    }
    let CheckpointArguments { checkpoint_dir, checkpoint_every, keep, .. } = &arguments.checkpoints;
    let mut import = arguments.import.clone();
    if let Some(plan) = &given {
        import.follow(&plan.model.import);
    }
    let loaded = trainable(arguments, &import, screen)?;
    let graph = &loaded.model.graph;
    if !graph.ids().any(|id| matches!(graph.node(id).op, Op::Parameter(_))) {
        let why = "the model has no parameter that a gradient trains: its weights are frozen, or it holds its gradients itself";
        return Err(Failure::file("train", &arguments.file, why));
    }
    let own = own::open(arguments.schedule.as_deref(), screen)?;
    own.as_ref().map_or(Ok(()), |own| own.agrees(arguments.microbatches))?;
    let listed = own.as_ref().map(Own::microbatches);
    let microbatches =
        listed.or(arguments.microbatches).or(given.as_ref().map(|plan| plan.schedule.microbatches)).unwrap_or(1);
    let planned_batch = given.as_ref().map(|plan| plan.schedule.micro_batch * u64::from(plan.schedule.microbatches));
    let batch = match arguments.batch.or(planned_batch) {
        Some(batch) => batch,
        None => loaded.known_micro_batch(None).unwrap_or_else(|| {
            screen.note(&format!("minibatches of {DEFAULT_MICRO_BATCH}; `--batch N` sets another size"));
            DEFAULT_MICRO_BATCH
        }),
    };
    let asked = own::kind(arguments.schedule.as_deref(), own.as_ref());
    if asked == Some(ScheduleKind::Inference) {
        return Err(Failure::input("`--schedule inference` does not train").help("leave it out, or write `1f1b`"));
    }
    if own.as_ref().is_some_and(|own| own.minibatches().is_some()) && arguments.epochs.is_some() {
        return Err(Failure::input(
            "`--epochs` does not go with programs, which say how many minibatches they are for",
        ));
    }
    let steps = own.as_ref().map_or(Ok(arguments.steps), |own| own.count("--steps", arguments.steps))?;
    let whole = microbatches == 1 && arguments.policy.stays_without_flush();
    let usual = if whole { ScheduleKind::RoundRobin } else { ScheduleKind::OneFOneB };
    let schedule = asked.or(given.as_ref().map(|plan| plan.schedule.kind)).unwrap_or(usual);
    let schedule = arguments.policy.schedule(schedule, asked.is_some())?;
    // Where nobody says the order of work, and none is needed that does not flush, the planner may choose one that trains.
    let is_free = asked.is_none() && whole && arguments.policy.schedule(ScheduleKind::OneFOneB, false).is_ok();
    let said = Some(schedule).filter(|_| !is_free);
    let (plan, schedule) = match given {
        Some(plan) => (plan, schedule),
        None => {
            let plan = own_plan(arguments, &loaded, batch, microbatches, (said, own.as_ref()))?;
            let planned = plan.schedule.kind;
            (plan, said.unwrap_or(planned))
        }
    };
    if arguments.plan.is_none() && plan.cluster.devices > 1 {
        screen.note(&format!("planned on analytic costs of a CPU\n{}", stages::stages(&plan, screen.width())));
        plan.warnings.iter().for_each(|warning| screen.warn(warning));
        if let Some(shared) = prediction::shared(&plan) {
            screen.note(&shared);
        }
    }
    let weights = initial(&loaded, arguments.weights.as_deref(), screen)?;
    let data = match &arguments.data {
        Some(path) => Data::Arrays(given::arrays(&loaded.model.graph, path, "the data", screen)?),
        None => Data::Synthetic(arguments.seed),
    };
    let (loss, class_dim) = match (arguments.loss, Counted::read(plan.model.import.loss.as_deref())?) {
        (None, Counted::One(loss, axis)) => (Some(loss), arguments.class_dim.or(axis)),
        (said, _) => (said, arguments.class_dim),
    };
    let newest = RefCell::default();
    let tell = |saved: &_| checkpoints::say(saved, &newest, screen);
    let unbiased = match arguments.bn_variance.as_deref() {
        Some(rule) => rule == "torch",
        None => source::format_of(&arguments.file) == source::Format::Pt2,
    };
    let mut task = Task {
        loaded: &loaded,
        weights: &weights,
        plan: &plan,
        schedule,
        own: own.as_ref(),
        in_flight: arguments.in_flight.clone(),
        loss,
        class_dim,
        dtype: floats(arguments, Some(&plan)),
        unbiased,
        policy: arguments.policy.build(unbiased),
        newest: arguments.policy.is_newest(),
        batch,
        microbatches,
        length: match (steps, arguments.epochs) {
            (Some(steps), _) => Length::Steps(steps),
            (None, epochs) => Length::Epochs(epochs.unwrap_or(1)),
        },
        data,
        held_out: match (&arguments.eval_data, arguments.eval_split) {
            (Some(path), _) => HeldOut::Arrays(given::arrays(&loaded.model.graph, path, "what is held out", screen)?),
            (None, Some(share)) => HeldOut::Share(share),
            (None, None) => HeldOut::Nothing,
        },
        order: if arguments.shuffle { RowOrder::Shuffled { seed: arguments.seed } } else { RowOrder::InOrder },
        seed: arguments.seed,
        optimizer: &optimizer,
        keep_gradients: arguments.save_gradients.is_some(),
        checkpoints: checkpoint_dir.as_deref(),
        keeping: checkpoint_dir.as_deref().map(|folder| Keeping {
            folder,
            every: *checkpoint_every,
            keep: *keep,
            tell: &tell,
        }),
        frozen: &arguments.freeze,
        tensor: devices,
    };
    let mut prepared = training::prepare(&mut task)?;
    let others = differences(&task, arguments);
    let reckoned = prepared.reckoned(&optimizer);
    match beyond(&plan, &reckoned) {
        Some(why) if !others.is_empty() => {
            return Err(Failure::input("what is asked for does not fit in the memory that the plan is for")
                .because(why)
                .help("`pipec partition` with the same `--dtype`, `--optimizer` and `--schedule` makes a plan that fits"));
        }
        Some(why) => screen.warn(&format!(
            "{why}: kernels here want more scratch than the plan counts; `pipec profile` here, then `pipec partition --profile` plans with it"
        )),
        None if others.is_empty() => elsewhere(&plan, &reckoned).iter().for_each(|told| screen.note(told)),
        None => {}
    }
    let own = (!others.is_empty()).then_some(reckoned);
    remarks(&task, &prepared, screen);
    arguments.optimizer.remarks(screen);
    prepared.sharing.iter().for_each(|sharing| screen.note(&sharing.told()));
    arguments.policy.remarks(schedule, screen);
    if let Some(folder) = checkpoint_dir {
        fs::create_dir_all(folder).map_err(|error| {
            Failure::file("make the folder", folder, error).help("`--checkpoint-dir` in a place that can be written to")
        })?;
    }
    let _held = checkpoint_dir.as_deref().filter(|_| seat.reports()).map(checkpoints::hold).transpose()?;
    checkpoints::only_weights(&mut task, &prepared, screen);
    // Another run may have ended here since it was asked first.
    no_others(true)?;
    prepared.begun = match resume {
        Some(resume) => checkpoints::begin(resume, &task, &prepared, screen)?,
        None => None,
    };
    if let Some(keeping) = &task.keeping {
        checkpoints::remarks(keeping, &prepared, screen);
    }
    let metrics = arguments.metrics.as_deref().filter(|_| seat.reports());
    let run = |group| watched(&task, &prepared, metrics, group, screen);
    let Some(done) = seat.run(&arguments.processes, (&task, &prepared), restarts, (screen, own_screen), run)? else {
        return Ok(());
    };
    if let Some(ended) = &done.ended {
        return Err(ended.told(&prepared));
    }
    let trained = &done.trained;
    let write = |path: &Path, tensors| output::write_tensors(path, tensors, "result");
    let mut written: Vec<(PathBuf, &str)> = Vec::new();
    if let Some(path) = &arguments.save {
        write(path, &trained.weights)?;
        written.push((path.clone(), "weights"));
    }
    if let Some(path) = &arguments.save_gradients {
        write(path, &trained.gradients)?;
        written.push((path.clone(), "gradients"));
    }
    if let Some(folder) = checkpoint_dir {
        let path = folder.join(WEIGHTS);
        write(&path, &trained.weights)?;
        written.push((path, "weights"));
        written.extend(newest.take().map(|folder| (folder, "checkpoint")));
    }
    if let Some(path) = &arguments.trace {
        source::write(path, &encode(&Trace::training(&done.tracks), &source::file_name(path)))?;
        written.push((path.clone(), "trace"));
    }
    written.extend(arguments.metrics.iter().map(|path| (path.clone(), "metrics")));
    if !written.is_empty() {
        let told = |(path, what): &(PathBuf, &str)| format!("{} ({what})", path.display());
        screen.note(&format!("wrote {}", written.iter().map(told).collect::<Vec<_>>().join(", ")));
    }
    report(&plan, own.as_deref(), &prepared, &done, screen);
    if arguments.plan.is_some() && !others.is_empty() && !trained.losses.is_empty() {
        // No plan is of two types of floats.
        let next = match task.dtype.is_some_and(is_half) {
            true => "",
            false => ", and `pipec partition` with the same flags plans for it",
        };
        screen.note(&format!(
            "the plan is for another {}: what is reckoned is of this run{next}",
            others.join(", another ")
        ));
    }
    Ok(())
}

/// The type of all floats, if not the model's own: what is asked for, or what the plan is for.
fn floats(arguments: &Arguments, plan: Option<&Plan>) -> Option<DType> {
    arguments.policy.dtype().or(plan.filter(|plan| plan.dtype == DType::F64.name()).map(|_| DType::F64))
}

/// Of what was planned a part this small may be held beyond it before that is told.
const MORE: u64 = 100;

/// In what the run is another than the one that was planned, so that its memory is another, too.
fn differences(task: &Task<'_>, arguments: &Arguments) -> Vec<&'static str> {
    let plan = task.plan;
    let counted = task.loss.map_or(Counted::None, |loss| Counted::One(loss, task.class_dim));
    let (batch, microbatches) =
        (plan.schedule.micro_batch.saturating_mul(u64::from(task.microbatches)), task.microbatches);
    let is_other_optimizer = arguments.plan.is_some()
        && arguments.optimizer.planned().is_ok_and(|optimizer| optimizer.name() != plan.optimizer);
    let all = [
        ("type of floats", task.dtype.is_some_and(|dtype| dtype.name() != plan.dtype)),
        ("order of work", task.schedule != plan.schedule.kind || task.own.is_some()),
        ("number of devices for each stage", task.tensor != degree(plan)),
        ("number of minibatches in flight", task.in_flight != InFlight::Auto),
        ("batch", (task.batch, microbatches) != (batch, plan.schedule.microbatches)),
        ("optimizer", is_other_optimizer),
        ("loss", plan.model.import.loss.is_some() && plan.model.import.loss != counted.written()),
    ];
    all.into_iter().filter(|(_, differs)| *differs).map(|(what, _)| what).collect()
}

/// What the fullest device of a run holds, where that is more than a plan for devices of another kind says.
fn elsewhere(plan: &Plan, own: &[u64]) -> Option<String> {
    let kind = &plan.cluster.device.kind;
    let planned: Vec<u64> = plan.stages.iter().map(|stage| stage.memory.total).collect();
    let at = (0..plan.stages.len()).max_by_key(|at| of_device(plan, *at, own))?;
    let [planned, held] = [&planned[..], own].map(|bytes| of_device(plan, at, bytes));
    (kind != source::CPU && held > planned.saturating_add(planned / MORE)).then(|| {
        let [planned, held] = [planned, held].map(quantity::bytes);
        format!(
            "memory was planned for {}: {planned} on the device of stage {at}, where this run, on this processor, holds about {held}",
            shown(kind)
        )
    })
}

/// What a run holds beyond the limit that was planned for.
fn beyond(plan: &Plan, own: &[u64]) -> Option<String> {
    let limit = plan.cluster.memory_per_device?.0;
    let (stage, needed) =
        (0..plan.stages.len()).map(|at| (at, of_device(plan, at, own))).find(|(_, needed)| *needed > limit)?;
    let (needed, limit) = (quantity::bytes(needed), quantity::bytes(limit));
    Some(format!("the device of stage {stage} would hold about {needed}, the plan's limit is {limit}"))
}

/// The model, unless what would be trained is another one than the framework's and nobody said that it may be.
fn trainable(arguments: &Arguments, import: &Import, screen: &Screen) -> Result<Loaded, Failure> {
    if arguments.accept_inference_model {
        return model::load(&arguments.file, import, screen);
    }
    let loaded = model::read(&arguments.file, import, screen)?;
    let (wrong, other): (Vec<_>, Vec<_>) = loaded.model.doubts.iter().partition(|doubt| doubt.is_wrong());
    other.iter().for_each(|doubt| model::tell(doubt, screen));
    let Some(first) = wrong.first() else { return Ok(loaded) };
    let what = format!("{} is not the model that its framework trains", arguments.file.display());
    let failure = wrong.iter().fold(Failure::input(what), |failure, doubt| failure.because(doubt));
    Err(failure.help(format!("{}; `--accept-inference-model` trains the file as it is", first.remedy())))
}

/// What a run does that one might not expect.
fn remarks(task: &Task<'_>, prepared: &Prepared, screen: &Screen) {
    let left_out = prepared.rows as u64 % prepared.batch.max(1);
    if left_out > 0 {
        screen.note(&format!(
            "{left_out} of {} do not fill a minibatch of {} and are left out of every epoch",
            stages::plural(prepared.rows as u64, "row", "rows"),
            quantity::count(prepared.batch)
        ));
    }
    if prepared.ignored > 0 {
        screen.note(&format!(
            "{} of {} have no label but {IGNORED}, which counts for nothing; the loss of a micro-batch of such rows alone is 0",
            quantity::count(prepared.ignored as u64),
            stages::plural(prepared.rows as u64, "row", "rows")
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
            screen.note(&format!(
                "{which} {} {has} {r} replicas{each}: one update averages {r} minibatches, {samples} samples in place of {batch}; {ways}",
                ranges(&ids)
            ));
        }
    }
}

/// A share of the rows: some, and not all.
fn share(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(share) if share > 0.0 && share < 1.0 => Ok(share),
        _ => Err("a share is a number between 0 and 1, as 0.1".to_string()),
    }
}

/// A plan on analytic costs of this CPU.
fn own_plan(
    arguments: &Arguments,
    loaded: &Loaded,
    batch: u64,
    microbatches: u32,
    (schedule, own): (Option<ScheduleKind>, Option<&Own>),
) -> Result<Plan, Failure> {
    let stages = match (&arguments.stages, own) {
        (None, Some(own)) if arguments.cut_after.is_none() => Some(own.replicas()?),
        (stages, _) => stages.clone(),
    };
    let needed = stages.as_ref().map(|stages| stages.iter().fold(0u32, |sum, r| sum.saturating_add(*r)));
    let cuts = arguments.cut_after.as_ref().map(|cuts| cuts.len() as u32 + 1);
    let workers = arguments.workers.or(needed).or(cuts).unwrap_or(1).max(1);
    if let Some(schedule) = schedule.filter(|schedule| workers == 1 && schedule.has_chunks()) {
        let what = format!("`--schedule {}` gives several stages to each of several workers", schedule.name());
        return Err(Failure::input(what)
            .because("neither `--workers` nor a plan says that there is more than one")
            .help("`--workers 2` plans for two; `--plan` takes a plan of `pipec partition`"));
    }
    let cluster = machine::cluster_of_this_cpu(workers)
        .map_err(|error| Failure::input(format!("cannot plan for {workers} workers")).because(error))?;
    let micro_batch = (batch / u64::from(microbatches)).max(1);
    let device = cluster.device.clone();
    // What is planned with is as wide as f32 at least.
    let floats = floats(arguments, None).filter(|dtype| *dtype == DType::F64);
    let times = Times::Analytic(device);
    let counted = arguments.loss.map_or(Counted::Usual, |loss| Counted::One(loss, arguments.class_dim));
    if let Some(loss) = arguments.loss {
        // A plan can do without a loss, training cannot.
        attach(&mut loaded.at(micro_batch)?, loss.of(), arguments.class_dim)
            .map_err(|error| Failure::input("cannot train").because(&error).help(advice::loss(&error)))?;
    }
    let costs = Costs { has_memory: false, ..source::assemble(loaded, micro_batch, cluster, times, floats, counted)? };
    let question = Question {
        schedule: arguments.schedule.clone().or(schedule.map(|schedule| schedule.name().to_string())),
        microbatches,
        recompute: "never".to_string(),
        stages,
        cut_after: arguments.cut_after.clone(),
        partitioner: if workers == 1 && arguments.cut_after.is_none() { "single" } else { "pipec" }.to_string(),
        optimizer: arguments.optimizer.planned()?,
        seed: arguments.seed,
        ..Question::default()
    };
    Ok(partition::ask(&arguments.file, costs, &question)?.plan)
}

/// Reads `--tensor`.
fn devices(text: &str) -> Result<u32, String> {
    let known = text.parse().ok().filter(|devices| (1..=MOST).contains(devices));
    known.ok_or_else(|| {
        format!("write how many devices share every stage, 1 to {MOST}; `pipec partition --tensor auto` finds the best number")
    })
}
