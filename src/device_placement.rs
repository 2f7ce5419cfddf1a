//! Instances of device placement, from file to plan: `pipec partition FILE --from dnn-partitioning`.

use crate::cmd::partition::{Arguments, Question};
use crate::failure::Failure;
use crate::screen::Screen;
use crate::{output, prediction, quantity, source};
use compiler::cluster::unit;
use compiler::graph::hash::sha256;
use compiler::import::dnn_partitioning;
use compiler::import::onnx::name::shown;
use compiler::partition::device_placement::solve::{Request, SolveError, solve};
use compiler::plan::check::error::PlanFault;
use compiler::plan::{Plan, PlannedModel, device_placement, read};
use std::path::Path;

/// Places, prints, writes.
pub fn run(arguments: &Arguments, screen: &Screen) -> Result<(), Failure> {
    let path = &arguments.file;
    refuse(arguments)?;
    let text = source::text(path, dnn_partitioning::MAX_BYTES as u64)?;
    let placement = dnn_partitioning::read(&text).map_err(|error| {
        Failure::file("read the instance", path, error).help("`--from` names the format of the file")
    })?;
    let memory = arguments.question.memory.as_deref().map(unit::bytes).transpose();
    let sha256 = sha256(text.as_bytes());
    output::keep_others(arguments.output.as_deref(), path, &[("sha256", &sha256)], "plan")?;
    let request = Request {
        anywhere: arguments.noncontiguous,
        budget: arguments.question.budget,
        seed: arguments.question.seed,
        memory: memory.map_err(|error| Failure::input("cannot read `--memory`").because(error))?,
        model: PlannedModel {
            file: source::file_name(path),
            sha256: sha256.clone(),
            ops: placement.nodes.len() as u64,
            ..PlannedModel::default()
        },
        sha256,
    };
    let plan = solve(&placement, &request).map_err(|error| match &error {
        SolveError::Unsound(_) => Failure::bug(&error.to_string()),
        SolveError::Infeasible { smallest, .. } => {
            let least = quantity::at_least(*smallest);
            Failure::infeasible(format!("no feasible plan for {}", path.display()))
                .because(&error)
                .help(format!("`--memory {least}` is the least that was found to do"))
        }
        SolveError::TooLarge { .. } | SolveError::Cluster(_) => {
            Failure::input(format!("cannot plan {}", path.display())).because(&error)
        }
    })?;
    tell(&plan, arguments, screen)
}

/// What the instance in a file says against the plan.
pub fn check(plan: &Plan, path: &Path) -> Result<Vec<PlanFault>, Failure> {
    let text = source::text(path, dnn_partitioning::MAX_BYTES as u64)?;
    let mut placement =
        dnn_partitioning::read(&text).map_err(|error| Failure::file("read the instance", path, error))?;
    is_of(plan, path, &text)?;
    // `--memory` may have said something else than the file.
    if let Some(limit) = plan.cluster.memory_per_device.filter(|limit| limit.0 != placement.bytes_per_device as u64) {
        placement.bytes_per_device = limit.0 as f64;
    }
    Ok(device_placement::check(&placement, plan).err().unwrap_or_default())
}

/// Refuses an instance that is not the plan's.
pub fn is_of(plan: &Plan, path: &Path, text: &str) -> Result<(), Failure> {
    if sha256(text.as_bytes()) == plan.model.sha256 {
        return Ok(());
    }
    let what = format!("{} is not the instance of the plan", path.display());
    Err(Failure::input(what).because(format!("the plan is for {}, a file of other bytes", shown(&plan.model.file))))
}

/// Writes the plan of an instance, and prints it.
pub fn tell(plan: &Plan, arguments: &Arguments, screen: &Screen) -> Result<(), Failure> {
    let json = read::to_json(plan).map_err(|error| Failure::bug(&error.to_string()))?;
    let path = arguments.output.clone().unwrap_or_else(|| source::default_output(&arguments.file, "plan"));
    if source::is_stdout(&path) {
        screen.document(&json);
        return Ok(());
    }
    source::write(&path, json.as_bytes())?;
    screen.text(&prediction::told(plan, screen));
    plan.warnings.iter().for_each(|warning| screen.warn(warning));
    screen.json(&serde_json::to_value(plan).unwrap_or_default());
    screen.text(&format!("\nwrote {}", path.display()));
    Ok(())
}

/// The instance names its devices and its costs; flags that would change them have no meaning.
fn refuse(arguments: &Arguments) -> Result<(), Failure> {
    let (devices, question) = (&arguments.devices, &arguments.question);
    let usual = Question::default();
    let own = [
        ("--gpus", devices.gpus.is_some()),
        ("--levels", devices.levels.is_some()),
        ("--cluster", devices.cluster.is_some()),
        ("--profile", arguments.profile.is_some()),
        ("--schedule", question.schedule.is_some()),
        ("--microbatches", question.microbatches != usual.microbatches),
        ("--optimizer", question.optimizer != usual.optimizer),
        ("--momentum", question.momentum.is_some()),
    ];
    let given = [&own[..], &of_question(question)].concat();
    refuse_given(
        &given,
        "dnn-partitioning",
        "the instance has its own devices and costs",
        "`--memory` changes what it says",
    )
}

/// Flags that change a question in ways no instance knows, and whether they are given.
pub fn of_question(question: &Question) -> Vec<(&'static str, bool)> {
    let usual = Question::default();
    vec![
        ("--stages", question.stages.is_some()),
        ("--cut-after", question.cut_after.is_some()),
        ("--pin", !question.pin.is_empty()),
        ("--max-stages", question.max_stages.is_some()),
        ("--no-replication", question.no_replication),
        ("--partitioner", question.partitioner != usual.partitioner),
        ("--cost", question.cost != usual.cost),
        ("--target", question.target.is_some()),
        ("--objective", question.objective != usual.objective),
        ("--in-flight", question.in_flight != usual.in_flight),
        ("--recompute", question.recompute != usual.recompute),
        ("--tensor", question.tensor != usual.tensor),
        ("--chunks", question.chunks.is_some()),
        ("--time-limit", question.time_limit.is_some()),
    ]
}

/// Refuses the first of some flags that is given beside an instance of a format, whose file says what they would.
pub fn refuse_given(given: &[(&str, bool)], format: &str, why: &str, help: &str) -> Result<(), Failure> {
    match given.iter().find(|(_, is_given)| *is_given) {
        Some((flag, _)) => {
            Err(Failure::input(format!("`{flag}` does not go with `--from {format}`")).because(why).help(help))
        }
        None => Ok(()),
    }
}
