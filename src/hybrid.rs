//! Layers with choices, from file to plan: `pipec partition FILE --from piper`.

use crate::cmd::partition::{Arguments, Question};
use crate::failure::Failure;
use crate::screen::Screen;
use crate::{device_placement, output, quantity, source};
use compiler::cluster::unit;
use compiler::graph::hash::sha256;
use compiler::import::piper;
use compiler::partition::hybrid::solve::{Request, SolveError, solve};
use compiler::plan::check::error::PlanFault;
use compiler::plan::hybrid::check as judged;
use compiler::plan::{Plan, PlannedModel};
use compiler::profile::hybrid::Hybrid;
use std::path::Path;

/// Plans, prints, writes.
pub fn run(arguments: &Arguments, screen: &Screen) -> Result<(), Failure> {
    let path = &arguments.file;
    refuse(arguments)?;
    let text = source::text(path, piper::MAX_BYTES as u64)?;
    let mut hybrid = piper::read(&text).map_err(|error| {
        Failure::file("read the instance", path, error).help("`--from` names the format of the file")
    })?;
    settle(&mut hybrid, arguments)?;
    let sha256 = sha256(text.as_bytes());
    output::keep_others(arguments.output.as_deref(), path, &[("sha256", &sha256)], "plan")?;
    let request = Request {
        budget: arguments.question.budget,
        seed: arguments.question.seed,
        model: PlannedModel {
            file: source::file_name(path),
            sha256: sha256.clone(),
            ops: hybrid.layers.len() as u64,
            ..PlannedModel::default()
        },
        sha256,
    };
    let plan = solve(&hybrid, &request).map_err(|error| {
        let infeasible = || Failure::infeasible(format!("no feasible plan for {}", path.display())).because(&error);
        match &error {
            SolveError::Unsound(_) => Failure::bug(&error.to_string()),
            SolveError::Memory { smallest, .. } => {
                let least = quantity::at_least(*smallest);
                infeasible().help(format!("`--memory {least}` is the least that was found to do"))
            }
            SolveError::Devices { .. } => infeasible().help("`--gpus` gives more devices"),
            SolveError::Cluster(_) => Failure::input(format!("cannot plan {}", path.display())).because(&error),
        }
    })?;
    device_placement::tell(&plan, arguments, screen)
}

/// What the instance in a file says against the plan.
pub fn check(plan: &Plan, path: &Path) -> Result<Vec<PlanFault>, Failure> {
    let text = source::text(path, piper::MAX_BYTES as u64)?;
    let mut hybrid = piper::read(&text).map_err(|error| Failure::file("read the instance", path, error))?;
    device_placement::is_of(plan, path, &text)?;
    // Flags may have said something else than the file.
    hybrid.devices = plan.cluster.devices;
    hybrid.microbatches = plan.schedule.microbatches;
    if let Some(level) = plan.cluster.levels.first() {
        hybrid.bandwidth = level.bandwidth.0;
    }
    if let Some(limit) = plan.cluster.memory_per_device.filter(|limit| limit.0 != hybrid.bytes_per_device as u64) {
        hybrid.bytes_per_device = limit.0 as f64;
    }
    Ok(judged(&hybrid, plan).err().unwrap_or_default())
}

/// What flags say instead of the file.
fn settle(hybrid: &mut Hybrid, arguments: &Arguments) -> Result<(), Failure> {
    let question = &arguments.question;
    if let Some(text) = &question.memory {
        let bytes = unit::bytes(text).map_err(|error| Failure::input("cannot read `--memory`").because(error))?;
        hybrid.bytes_per_device = bytes.0 as f64;
    }
    if let Some(text) = &arguments.devices.bandwidth {
        let rate = unit::bandwidth(text).map_err(|error| Failure::input("cannot read `--bandwidth`").because(error))?;
        hybrid.bandwidth = rate.0;
    }
    let most = piper::MAX_COUNT as u32;
    if let Some(count) = arguments.devices.gpus {
        if !(1..=most).contains(&count) {
            return Err(Failure::input(format!("`--gpus {count}` is not from 1 to {most}")));
        }
        hybrid.devices = count;
    }
    if question.microbatches > most {
        return Err(Failure::input(format!("`--microbatches {}` is more than {most}", question.microbatches)));
    }
    if question.microbatches != Question::default().microbatches {
        hybrid.microbatches = question.microbatches;
    }
    Ok(())
}

/// The instance names its levels and its costs; flags that would change them have no meaning.
fn refuse(arguments: &Arguments) -> Result<(), Failure> {
    let (devices, question) = (&arguments.devices, &arguments.question);
    let own = [
        ("--levels", devices.levels.is_some()),
        ("--cluster", devices.cluster.is_some()),
        ("--profile", arguments.profile.is_some()),
        ("--noncontiguous", arguments.noncontiguous),
        ("--schedule", question.schedule.as_deref().is_some_and(|schedule| schedule != "1f1b")),
    ];
    let given = [&own[..], &device_placement::of_question(question)].concat();
    device_placement::refuse_given(
        &given,
        "piper",
        "the instance has its own costs, choices and schedule",
        "`--gpus`, `--bandwidth`, `--memory` and `--microbatches` change what it says",
    )
}
