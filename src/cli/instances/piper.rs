//! Piper instances, whose layers have several configurations, from file to plan: `pipec partition FILE --from piper`.

use crate::cli::args::partition::Arguments;
use crate::cli::instances::placement;
use crate::cli::screen::Screen;
use compiler::cluster::unit;
use compiler::plan::Plan;
use compiler::plan::check::error::PlanFault;
use compiler::plan::schedule::Schedule;
use instances::piper::check::check as judged;
use instances::piper::model::Hybrid;
use instances::piper::read as piper;
use instances::piper::solve::{Request, SolveError, solve};
use pipec::costs::without_graph;
use pipec::error::Error;
use pipec::files::input;
use pipec::plan::request::{PlanOptions, ScheduleChoice};
use std::path::Path;

/// Plans an instance, writes the plan and prints it.
pub fn run(arguments: &Arguments, screen: &Screen) -> Result<(), Error> {
    let path = &arguments.file;
    let options = refuse(arguments)?;
    let text = input::text(path, piper::MAX_BYTES as u64)?;
    let mut hybrid = piper::read(&text).map_err(|error| {
        Error::file("read the instance", path, error).with_help("`--from` sets the format of the file")
    })?;
    apply_flags(&mut hybrid, arguments, &options)?;
    let model = without_graph(path, &text, hybrid.layers.len());
    placement::protect(arguments, &model)?;
    let request = Request { budget: options.budget, seed: options.seed, sha256: model.sha256.clone(), model };
    let plan = solve(&hybrid, &request).map_err(|error| match &error {
        SolveError::Unsound(_) => Error::bug(&error.to_string()),
        SolveError::Memory { smallest, .. } => {
            placement::infeasible(path, &error).with_help(placement::memory_help(*smallest))
        }
        SolveError::Devices { .. } => placement::infeasible(path, &error).with_help("add devices with `--gpus`"),
        SolveError::Cluster(_) => Error::input(format!("cannot plan {}", path.display())).because(&error),
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
fn apply_flags(hybrid: &mut Hybrid, arguments: &Arguments, options: &PlanOptions) -> Result<(), Error> {
    if let Some(bytes) = options.memory_limit {
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
    if options.microbatches != PlanOptions::default().microbatches {
        hybrid.microbatches = options.microbatches;
    }
    Ok(())
}

/// The options, without flags for interconnect levels and costs, which the instance defines.
fn refuse(arguments: &Arguments) -> Result<PlanOptions, Error> {
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
    )?;
    Ok(options)
}
