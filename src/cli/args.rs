//! The command line: global flags, the commands, and groups of flags that several commands share.

use crate::cli::cmd;
use crate::cli::color::When;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum};
use compiler::cluster::{Bytes, BytesPerSecond, unit};
use pipec::cluster::ClusterRequest;
use pipec::error::Error;
use pipec::model::ImportRequest;
use std::path::PathBuf;

pub mod checkpoints;
pub mod loss;
pub mod optimizer;
pub mod partition;
pub mod plan;
pub mod policy;
pub mod processes;
pub mod schedule;
pub mod shared_plan;

/// Partitions traced models into pipeline stages, predicts throughput and memory, and trains them.
#[derive(Debug, Parser)]
#[command(name = "pipec", version, color = clap::ColorChoice::Never,
          after_help = "Examples:\n  pipec quickstart\n  pipec partition model.onnx --gpus 8\n  pipec train model.onnx --plan model.plan.json --data train.npz")]
pub struct Cli {
    /// Flags of every command.
    #[command(flatten)]
    pub global: Global,
    /// The command.
    #[command(subcommand)]
    pub verb: Verb,
}

/// Flags of every command.
#[derive(Debug, Args)]
pub struct Global {
    /// Output format of results on standard output
    #[arg(
        long,
        global = true,
        value_enum,
        default_value = "text",
        value_name = "FORM",
        help_heading = "Global options"
    )]
    pub format: Format,
    /// When to colour output; NO_COLOR and FORCE_COLOR set this for all commands
    #[arg(
        long,
        global = true,
        value_enum,
        default_value = "auto",
        value_name = "WHEN",
        help_heading = "Global options"
    )]
    pub color: When,
    /// Print more detail on standard error
    #[arg(short, long, global = true, action = clap::ArgAction::Count, help_heading = "Global options")]
    pub verbose: u8,
    /// Print only results, warnings and errors; -qq prints only results and errors
    #[arg(short, long, global = true, action = clap::ArgAction::Count, help_heading = "Global options")]
    pub quiet: u8,
}

/// Output format of results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Human-readable text.
    Text,
    /// One JSON document.
    Json,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Summarise a model: ops, parameters, shapes, trainability
    Inspect(cmd::inspect::Arguments),
    /// Measure the cost of every op of a model, and write a profile
    Profile(cmd::profile::Arguments),
    /// Partition a model into pipeline stages over the devices of a cluster, and write the plan
    Partition(Box<partition::Arguments>),
    /// Show a plan, check it, or compare two
    Plan(cmd::plan::Arguments),
    /// Simulate a plan's programs with its costs, and predict throughput and memory
    Simulate(cmd::simulate::Arguments),
    /// Write a plan as one HTML page: stages, timeline, memory, costs, alternatives
    Report(cmd::report::Arguments),
    /// Plan for ranges of device counts, depths and batch sizes: a table and the plots of the papers
    Sweep(Box<cmd::sweep::Arguments>),
    /// Export a plan to other tools: ONNX, torch, torchtitan, Megatron, DeepSpeed, PipeDream, Graphviz
    Export(cmd::export::Arguments),
    /// Train a model with pipelined workers under a plan
    Train(Box<cmd::train::Arguments>),
    /// Write a model's outputs for given inputs
    Eval(cmd::eval::Arguments),
    /// Run an end-to-end demo on a small model with a bundled dataset: profile, plan, train, test
    Quickstart(cmd::quickstart::Arguments),
    /// Detect the devices of this machine, measure its links, or show a cluster
    Cluster(cmd::cluster::Arguments),
    /// Check this machine: CPU, memory, sockets, CUDA, GPUs
    Doctor(cmd::doctor::Arguments),
    /// Print the JSON Schema of a file format
    Schema(cmd::schema::Arguments),
    /// Write a model of the zoo as an ONNX file
    Zoo(cmd::zoo::Arguments),
    /// Print a completion script for a shell
    Completions(cmd::completions::Arguments),
}

/// Import flags.
#[derive(Clone, Debug, Default, Args)]
pub struct Import {
    /// Set a symbolic dimension of the model, for example seq=128; may be repeated
    #[arg(long = "dim", value_name = "NAME=SIZE", value_parser = dim, help_heading = "Model")]
    pub dims: Vec<(String, u64)>,
    /// Set the batch axis of an input, for example tokens=1 [default: axis 0 of the first input]; may be repeated
    #[arg(long = "batch-dim", value_name = "INPUT=AXIS", value_parser = batch_dim, help_heading = "Model")]
    pub batch_dims: Vec<(String, usize)>,
    /// Put BatchNormalization and Dropout that were exported for inference back into training mode
    #[arg(long, help_heading = "Model")]
    pub train_mode: bool,
    /// Parameters to freeze: names, or prefix* for all names that start with it
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', help_heading = "Model")]
    pub freeze: Vec<String>,
}

impl From<Import> for ImportRequest {
    fn from(Import { dims, batch_dims, train_mode, freeze }: Import) -> ImportRequest {
        ImportRequest { dims, batch_dims, train_mode, freeze }
    }
}

/// Import flags, and the size of a micro-batch.
#[derive(Clone, Debug, Default, Args)]
pub struct Dims {
    /// Import flags.
    #[command(flatten)]
    pub import: Import,
    /// Samples per micro-batch [default: the profile's, else the model's, else 32]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 32), help_heading = "Model")]
    pub micro_batch: Option<u64>,
}

/// Device flags.
#[derive(Clone, Debug, Default, Args)]
pub struct Devices {
    /// Number of devices, connected by one link
    #[arg(long, value_name = "N", conflicts_with_all = ["levels", "cluster"], value_parser = devices, help_heading = "Devices")]
    pub gpus: Option<u32>,
    /// Link bandwidth per device and direction, for example 1.25GB/s or 10Gbit/s [default: that of the device type's usual link, 450GB/s for h100]
    #[arg(long, value_name = "RATE", requires = "gpus", conflicts_with_all = ["levels", "cluster"], help_heading = "Devices")]
    pub bandwidth: Option<String>,
    /// Interconnect levels, innermost first, for example 8:450GB/s,2:50GB/s for two servers of eight devices
    #[arg(long, value_name = "N:RATE,…", conflicts_with = "cluster", help_heading = "Devices")]
    pub levels: Option<String>,
    /// Cluster file: device types, memory, interconnect levels (`pipec schema cluster` prints its fields)
    #[arg(long, value_name = "FILE", help_heading = "Devices")]
    pub cluster: Option<PathBuf>,
}

impl Devices {
    /// The request for these devices.
    pub fn request(&self) -> Result<ClusterRequest, Error> {
        let Devices { gpus, bandwidth, levels, cluster } = self.clone();
        Ok(ClusterRequest { gpus, bandwidth: self::bandwidth(bandwidth.as_deref())?, levels, file: cluster })
    }
}

/// A parser of the names of a table, each with its help and what it stands for.
pub fn named<T: Copy + Send + Sync + 'static>(
    table: &'static [(&'static str, &'static str, T)],
) -> impl TypedValueParser<Value = T> {
    let names = table.iter().map(|(name, help, _)| PossibleValue::new(*name).help(*help));
    PossibleValuesParser::new(names).map(|name| {
        let row = table.iter().find(|(known, ..)| *known == name);
        row.expect("only names of the table are parsed").2
    })
}

/// Reads `--memory`.
pub fn memory(text: Option<&str>) -> Result<Option<Bytes>, Error> {
    text.map(unit::bytes)
        .transpose()
        .map_err(|error| Error::input("cannot read `--memory`").because(error).with_help("`--memory 16GB` per device"))
}

/// Reads `--bandwidth`.
pub fn bandwidth(text: Option<&str>) -> Result<Option<BytesPerSecond>, Error> {
    text.map(unit::bandwidth).transpose().map_err(|error| {
        let help = "`--bandwidth 25GB/s` or `--bandwidth 100Gbit/s`: per device and direction";
        Error::input("cannot read `--bandwidth`").because(error).with_help(help)
    })
}

/// Reads `--gpus`, or one of its numbers.
pub fn devices(text: &str) -> Result<u32, String> {
    let count = text.trim().parse().ok().filter(|devices| *devices > 0);
    count.ok_or_else(|| "write the number of devices, at least 1, for example 8".to_string())
}

/// Reads `--dim`.
pub fn dim(text: &str) -> Result<(String, u64), String> {
    let parts = text.split_once('=').and_then(|(name, size)| Some((name.trim(), size.trim().parse::<u64>().ok()?)));
    match parts {
        Some((name, size)) if !name.is_empty() && (1..=1 << 32).contains(&size) => Ok((name.to_string(), size)),
        _ => Err("write NAME=SIZE with a size of at least 1, for example batch=32".to_string()),
    }
}

/// Reads `--batch-dim`. The name may hold `=`, the axis cannot.
pub fn batch_dim(text: &str) -> Result<(String, usize), String> {
    match text.rsplit_once('=').map(|(name, axis)| (name, axis.trim().parse::<usize>())) {
        Some((name, Ok(axis))) if !name.is_empty() && axis < 64 => Ok((name.to_string(), axis)),
        _ => Err("write INPUT=AXIS with an axis counted from 0, for example tokens=1".to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{Command, CommandFactory};

    /// The commands that can be run, with their full names.
    fn leaf_commands(command: &Command, words: Vec<String>) -> Vec<(Vec<String>, Command)> {
        let inner: Vec<&Command> = command.get_subcommands().filter(|inner| !inner.is_hide_set()).collect();
        let is_verb = inner.is_empty() || command.get_name() == "zoo" || words.len() == 1;
        let command_itself = is_verb.then(|| (words.clone(), command.clone()));
        let inner = inner.into_iter().filter(|_| command.get_name() != "zoo");
        let inner_commands =
            inner.flat_map(|inner| leaf_commands(inner, [&words[..], &[inner.get_name().to_string()]].concat()));
        command_itself.into_iter().chain(inner_commands).collect()
    }

    #[test]
    fn every_verb_has_examples_that_are_commands() {
        let commands = leaf_commands(&Cli::command(), vec!["pipec".to_string()]);
        assert!(commands.len() > 20, "{}", commands.len());
        for (words, command) in commands {
            let help = command.get_after_help().map(|text| text.to_string()).unwrap_or_default();
            let start = format!("  {}", words.join(" "));
            let examples: Vec<&str> = help.lines().filter(|line| line.starts_with("  pipec ")).collect();
            assert!(examples.iter().any(|line| line.starts_with(&start)), "{words:?} has no example: {help}");
            for line in examples {
                let line = line.split(['|', '>']).next().unwrap_or_default().replace('~', "/home/me");
                let parsed = Cli::try_parse_from(line.split_whitespace());
                assert!(parsed.is_ok(), "{line}: {}", parsed.unwrap_err());
            }
        }
    }

    #[test]
    fn the_definition_holds_together() {
        Cli::command().debug_assert();
    }
}
