//! Device-placement instances, from file to plan: `pipec partition FILE --from dnn-partitioning`.

use crate::cli::args::partition::Arguments;
use crate::cli::prediction;
use crate::cli::screen::Screen;
use compiler::graph::hash::sha256;
use compiler::plan::check::error::PlanFault;
use compiler::plan::digest::to_json_with_digest;
use compiler::plan::{Plan, PlannedModel};
use compiler::text::name::short_name;
use compiler::text::quantity;
use instances::placement::check::check as judged;
use instances::placement::read as dnn_partitioning;
use instances::placement::solve::{Request, SolveError, solve};
use pipec::costs::without_graph;
use pipec::error::Error;
use pipec::files::{input, output};
use pipec::plan::request::PlanOptions;
use std::path::Path;

/// Plans an instance, writes the plan and prints it.
pub fn run(arguments: &Arguments, screen: &Screen) -> Result<(), Error> {
    let path = &arguments.file;
    let options = refuse(arguments)?;
    let text = input::text(path, dnn_partitioning::MAX_BYTES as u64)?;
    let read = if arguments.cpus { dnn_partitioning::read_with_hosts } else { dnn_partitioning::read };
    let placement = read(&text).map_err(|error| {
        Error::file("read the instance", path, error).with_help("`--from` sets the format of the file")
    })?;
    let model = without_graph(path, &text, placement.nodes.len());
    protect(arguments, &model)?;
    let request = Request {
        anywhere: arguments.noncontiguous,
        budget: options.budget,
        seed: options.seed,
        memory: options.memory_limit,
        sha256: model.sha256.clone(),
        model,
    };
    let plan = solve(&placement, &request).map_err(|error| match &error {
        SolveError::Unsound(_) => Error::bug(&error.to_string()),
        SolveError::Infeasible { smallest, .. } => infeasible(path, &error).with_help(memory_help(*smallest)),
        SolveError::TooLarge { .. } | SolveError::Cluster(_) => {
            Error::input(format!("cannot plan {}", path.display())).because(&error)
        }
    })?;
    write_plan(&plan, arguments, screen)
}

/// The error for an instance without a feasible plan.
pub fn infeasible(path: &Path, error: &dyn std::fmt::Display) -> Error {
    Error::infeasible(format!("no feasible plan for {}", path.display())).because(error)
}

/// Help with the smallest memory limit that is enough.
pub fn memory_help(smallest: u64) -> String {
    let limit = quantity::at_least(smallest);
    format!("`--memory {limit}` is the smallest memory limit for which a plan was found")
}

/// Refuses to overwrite the plan of another instance at the default path.
pub fn protect(arguments: &Arguments, model: &PlannedModel) -> Result<(), Error> {
    match arguments.output {
        Some(_) => Ok(()),
        None => {
            let path = output::default_output(&arguments.file, "plan");
            output::protect(&path, &arguments.file, &[("sha256", &model.sha256)], "plan")
        }
    }
}

/// The faults of the plan under the instance in a file.
pub fn check(plan: &Plan, path: &Path) -> Result<Vec<PlanFault>, Error> {
    let text = input::text(path, dnn_partitioning::MAX_BYTES as u64)?;
    // A plan with hosts has two classes of devices: accelerators and hosts.
    let accelerators = plan.cluster.classes.first();
    let read = if accelerators.is_some() { dnn_partitioning::read_with_hosts } else { dnn_partitioning::read };
    let mut placement = read(&text).map_err(|error| Error::file("read the instance", path, error))?;
    check_instance(plan, path, &text)?;
    // `--memory` may have changed the limit of the file.
    let limit = accelerators.map(|class| class.device.memory).or(plan.cluster.memory_per_device);
    if let Some(limit) = limit.filter(|limit| limit.0 != placement.bytes_per_device as u64) {
        placement.bytes_per_device = limit.0 as f64;
    }
    Ok(judged(&placement, plan).err().unwrap_or_default())
}

/// Refuses an instance that is not the plan's.
pub fn check_instance(plan: &Plan, path: &Path, text: &str) -> Result<(), Error> {
    if sha256(text.as_bytes()) == plan.model.sha256 {
        return Ok(());
    }
    let message = format!("{} is not the instance of the plan", path.display());
    Err(Error::input(message)
        .because(format!("the plan is for {}, whose contents differ", short_name(&plan.model.file))))
}

/// Writes the plan of an instance, and prints it.
pub fn write_plan(plan: &Plan, arguments: &Arguments, screen: &Screen) -> Result<(), Error> {
    let json = to_json_with_digest(plan).map_err(|error| Error::bug(&error.to_string()))?;
    let path = arguments.output.clone().unwrap_or_else(|| output::default_output(&arguments.file, "plan"));
    if output::is_stdout(&path) {
        screen.document(&json);
        return Ok(());
    }
    output::write(&path, json.as_bytes())?;
    screen.text(&prediction::describe(plan, screen));
    plan.warnings.iter().for_each(|warning| screen.warn(warning));
    screen.json(&serde_json::to_value(plan).unwrap_or_default());
    screen.text(&format!("\nwrote {}", path.display()));
    Ok(())
}

/// The options, without flags for devices and costs, which the instance defines.
fn refuse(arguments: &Arguments) -> Result<PlanOptions, Error> {
    let (devices, options) = (&arguments.devices, arguments.plan_options.options()?);
    let default = PlanOptions::default();
    let overridden = [
        ("--gpus", devices.gpus.is_some()),
        ("--levels", devices.levels.is_some()),
        ("--cluster", devices.cluster.is_some()),
        ("--profile", arguments.profile.is_some()),
        ("--schedule", options.schedule.is_some()),
        ("--microbatches", options.microbatches != default.microbatches),
        ("--optimizer", options.optimizer != default.optimizer),
        ("--momentum", options.momentum.is_some()),
    ];
    let flags = [&overridden[..], &unsupported_flags(&options)].concat();
    refuse_flags(
        &flags,
        "dnn-partitioning",
        "the instance has its own devices and costs",
        "only `--memory` overrides its values",
    )?;
    Ok(options)
}

/// Flags that no instance supports; the boolean is true if the flag is given.
pub fn unsupported_flags(options: &PlanOptions) -> Vec<(&'static str, bool)> {
    let default = PlanOptions::default();
    vec![
        ("--stages", options.replicas.is_some()),
        ("--cut-after", options.cut_after.is_some()),
        ("--pin", !options.pins.is_empty()),
        ("--max-stages", options.max_stages.is_some()),
        ("--no-replication", options.no_replication),
        ("--partitioner", options.partitioner != default.partitioner),
        ("--cost", options.cost != default.cost),
        ("--target", options.target.is_some()),
        ("--objective", options.objective != default.objective),
        ("--in-flight", options.in_flight != default.in_flight),
        ("--recompute", options.recompute != default.recompute),
        ("--tensor", options.tensor_parallel != default.tensor_parallel),
        ("--chunks", options.chunks.is_some()),
        ("--gap", options.gap != default.gap),
        ("--time-limit", options.time_limit.is_some()),
    ]
}

/// Refuses the first given flag that an instance of this format does not support.
pub fn refuse_flags(flags: &[(&str, bool)], format: &str, why: &str, help: &str) -> Result<(), Error> {
    match flags.iter().find(|(_, is_given)| *is_given) {
        Some((flag, _)) => Err(Error::input(format!("`{flag}` cannot be combined with `--from {format}`"))
            .because(why)
            .with_help(help)),
        None => Ok(()),
    }
}
