//! The command line: global flags, the verbs, and groups of flags that several verbs share.

use crate::cmd;
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;

/// Partitions traced models into pipeline stages, predicts what that brings, and trains them.
#[derive(Debug, Parser)]
#[command(name = "pipec", version, max_term_width = 100, color = clap::ColorChoice::Never)]
pub struct Cli {
    /// Flags of every verb.
    #[command(flatten)]
    pub global: Global,
    /// What to do.
    #[command(subcommand)]
    pub verb: Verb,
}

/// Flags of every verb.
#[derive(Debug, Args)]
pub struct Global {
    /// How results are printed on standard output
    #[arg(long, global = true, value_enum, default_value = "text", value_name = "FORM")]
    pub format: Format,
    /// Say more on standard error
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// Say nothing but results and errors
    #[arg(short, long, global = true)]
    pub quiet: bool,
}

/// How results are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people.
    Text,
    /// For programs.
    Json,
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Say what a model is: ops, parameters, shapes, whether it can be trained
    Inspect(cmd::inspect::Arguments),
    /// Measure what every op of a model costs, and write the profile
    Profile(cmd::profile::Arguments),
    /// Cut a model into pipeline stages over the devices of a cluster, and write the plan
    Partition(Box<cmd::partition::Arguments>),
    /// Show a plan, or check it by its own figures
    Plan(cmd::plan::Arguments),
    /// Run a plan's programs against its own costs and predict speed and memory
    Simulate(cmd::simulate::Arguments),
    /// Train a model with pipelined workers under a plan
    Train(Box<cmd::train::Arguments>),
    /// Write a model's outputs for given inputs
    Eval(cmd::eval::Arguments),
    /// The whole road on a small model and shipped data: profile, plan, train, test
    Quickstart(cmd::quickstart::Arguments),
    /// Print the JSON Schema of a file format
    Schema(cmd::schema::Arguments),
    /// Write a model of the zoo as an ONNX file
    Zoo(cmd::zoo::Arguments),
    /// Print a completion script for a shell
    Completions(cmd::completions::Arguments),
}

/// How symbolic dimensions of a model are set.
#[derive(Clone, Debug, Default, Args)]
pub struct Dims {
    /// Set a symbolic dimension of the model, for example seq=128; may be repeated
    #[arg(long = "dim", value_name = "NAME=SIZE", value_parser = dim)]
    pub dims: Vec<(String, u64)>,
    /// Samples in one micro-batch
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 32))]
    pub micro_batch: Option<u64>,
}

/// Which devices there are.
#[derive(Clone, Debug, Default, Args)]
pub struct Devices {
    /// N devices on one link
    #[arg(long, value_name = "N", conflicts_with_all = ["levels", "cluster"])]
    pub gpus: Option<u32>,
    /// Bandwidth of that link per device and direction, for example 1.25GB/s or 10Gbit/s
    #[arg(long, value_name = "RATE", requires = "gpus", conflicts_with_all = ["levels", "cluster"])]
    pub bandwidth: Option<String>,
    /// Levels of devices, innermost first, for example 8:450GB/s,2:50GB/s for two servers of eight
    #[arg(long, value_name = "N:RATE,…", conflicts_with = "cluster")]
    pub levels: Option<String>,
    /// A cluster file
    #[arg(long, value_name = "FILE")]
    pub cluster: Option<PathBuf>,
}

/// Reads `--dim`.
pub fn dim(text: &str) -> Result<(String, u64), String> {
    let parts = text.split_once('=').and_then(|(name, size)| Some((name.trim(), size.trim().parse::<u64>().ok()?)));
    match parts {
        Some((name, size)) if !name.is_empty() && (1..=1 << 32).contains(&size) => Ok((name.to_string(), size)),
        _ => Err("write NAME=SIZE with a size of at least 1, for example batch=32".to_string()),
    }
}
