//! Piper instances, whose layers have several configurations, from file to plan: `pipec partition FILE --from piper`.

use crate::cli::args::partition::Arguments;
use crate::cli::instances::placement;
use crate::cli::screen::Screen;
use compiler::cluster::unit;
use compiler::graph::hash::sha256;
use compiler::plan::check::error::PlanFault;
use compiler::plan::schedule::Schedule;
use compiler::plan::{Plan, PlannedModel};
use compiler::text::quantity;
use instances::piper::check::check as judged;
use instances::piper::model::Hybrid;
use instances::piper::read as piper;
use instances::piper::solve::{Request, SolveError, solve};
use pipec::error::Error;
use pipec::files::input;
use pipec::plan::request::{PlanOptions, ScheduleChoice};
use std::path::Path;

/// Plans an instance, writes the plan and prints it.
pub fn run(arguments: &Arguments, screen: &Screen) -> Result<(), Error> {
    let path = &arguments.file;
    refuse(arguments)?;
    let text = input::text(path, piper::MAX_BYTES as u64)?;
    let mut hybrid = piper::read(&text).map_err(|error| {
        Error::file("read the instance", path, error).with_help("`--from` sets the format of the file")
    })?;
    apply_flags(&mut hybrid, arguments)?;
    let sha256 = sha256(text.as_bytes());
    placement::protect(arguments, &sha256)?;
    let request = Request {
        budget: arguments.plan_options.budget,
        seed: arguments.plan_options.seed,
        model: PlannedModel {
            file: input::file_name(path),
            sha256: sha256.clone(),
            ops: hybrid.layers.len() as u64,
            ..PlannedModel::default()
        },
        sha256,
    };
    let plan = solve(&hybrid, &request).map_err(|error| {
        let infeasible = || Error::infeasible(format!("no feasible plan for {}", path.display())).because(&error);
        match &error {
            SolveError::Unsound(_) => Error::bug(&error.to_string()),
            SolveError::Memory { smallest, .. } => {
                let smallest_limit = quantity::at_least(*smallest);
                infeasible().with_help(format!(
                    "`--memory {smallest_limit}` is the smallest memory limit for which a plan was found"
                ))
            }
            SolveError::Devices { .. } => infeasible().with_help("add devices with `--gpus`"),
            SolveError::Cluster(_) => Error::input(format!("cannot plan {}", path.display())).because(&error),
        }
    })?;
    placement::write_plan(&plan, arguments, screen)
}

/// The faults of the plan under the instance in a file.
pub fn check(plan: &Plan, path: &Path) -> Result<Vec<PlanFault>, Error> {
    let text = input::text(path, piper::MAX_BYTES as u64)?;
    let mut hybrid = piper::read(&text).map_err(|error| Error::file("read the instance", path, error))?;
    placement::check_instance(plan, path, &text)?;
    // The plan may have been made with flags that override the file.
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

/// Applies the flags that override the file.
fn apply_flags(hybrid: &mut Hybrid, arguments: &Arguments) -> Result<(), Error> {
    let plan_options = &arguments.plan_options;
    if let Some(text) = &plan_options.memory {
        let bytes = unit::bytes(text).map_err(|error| Error::input("cannot read `--memory`").because(error))?;
        hybrid.bytes_per_device = bytes.0 as f64;
    }
    if let Some(text) = &arguments.devices.bandwidth {
        let rate = unit::bandwidth(text).map_err(|error| Error::input("cannot read `--bandwidth`").because(error))?;
        hybrid.bandwidth = rate.0;
    }
    if let Some(count) = arguments.devices.gpus {
        let max_devices = piper::MAX_COUNT as u32;
        if !(1..=max_devices).contains(&count) {
            return Err(Error::input(format!("`--gpus {count}` must be from 1 to {max_devices}")));
        }
        hybrid.devices = count;
    }
    if plan_options.microbatches != PlanOptions::default().microbatches {
        hybrid.microbatches = plan_options.microbatches;
    }
    Ok(())
}

/// Refuses flags for interconnect levels and costs, which the instance defines.
fn refuse(arguments: &Arguments) -> Result<(), Error> {
    let (devices, options) = (&arguments.devices, arguments.plan_options.options()?);
    let overridden = [
        ("--levels", devices.levels.is_some()),
        ("--cluster", devices.cluster.is_some()),
        ("--profile", arguments.profile.is_some()),
        ("--noncontiguous", arguments.noncontiguous),
        ("--cpus", arguments.cpus),
        (
            "--schedule",
            options.schedule.as_ref().is_some_and(|schedule| *schedule != ScheduleChoice::Named(Schedule::OneFOneB)),
        ),
    ];
    let flags = [&overridden[..], &placement::unsupported_flags(&options)].concat();
    placement::refuse_flags(
        &flags,
        "piper",
        "the instance has its own costs, layer configurations and schedule",
        "only `--gpus`, `--bandwidth`, `--memory` and `--microbatches` override its values",
    )
}
