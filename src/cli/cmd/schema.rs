//! `pipec schema`: prints the JSON Schema of a file format.

use crate::cli::screen::Screen;
use clap::{Args, ValueEnum};
use compiler::export::{failure, metrics};
use compiler::schedule::formats::json;
use compiler::{cluster, plan, profile};
use pipec::error::Error;

/// Arguments of `pipec schema`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  pipec schema plan\n  pipec schema metrics > metrics.schema.json")]
pub struct Arguments {
    /// The file format
    #[arg(value_enum)]
    what: What,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum What {
    /// plan.json, written by `pipec partition`
    Plan,
    /// profile.json, written by `pipec profile`
    Profile,
    /// Programs, written by `pipec simulate --programs FILE.json`
    Program,
    /// A cluster file (TOML of this structure)
    Cluster,
    /// A line of the file written by `pipec train --metrics`
    Metrics,
    /// The error that a failing command writes to standard error with `--format json`
    Error,
    /// The results of all other commands with `--format json`, by command
    Answers,
}

/// Schemas of the results without a type of their own, by command.
const RESULT_SCHEMAS: &str = include_str!("answers.json");

pub fn run(arguments: Arguments, screen: &Screen) -> Result<(), Error> {
    let schema = match arguments.what {
        What::Answers => {
            screen.document(RESULT_SCHEMAS);
            return Ok(());
        }
        What::Plan => plan::read::schema(),
        What::Profile => profile::read::schema(),
        What::Program => json::json_schema(),
        What::Cluster => cluster::read::schema(),
        What::Metrics => metrics::schema(),
        What::Error => failure::schema(),
    };
    screen.document(&serde_json::to_string_pretty(&schema).unwrap_or_default());
    Ok(())
}
