//! `pipec schema`: the JSON Schema of a file format.

use crate::cli::screen::Screen;
use clap::{Args, ValueEnum};
use compiler::export::{failure, metrics};
use compiler::schedule::formats::json;
use compiler::{cluster, plan, profile};
use pipec::error::Error;

/// Which schema.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  pipec schema plan\n  pipec schema metrics > metrics.schema.json")]
pub struct Arguments {
    /// The file format
    #[arg(value_enum)]
    what: What,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum What {
    /// plan.json, as `pipec partition` writes it
    Plan,
    /// profile.json, as `pipec profile` writes it
    Profile,
    /// Programs as `pipec simulate --programs FILE.json` writes them
    Program,
    /// A cluster file, which is TOML of this shape
    Cluster,
    /// A line of the file that `pipec train --metrics` writes
    Metrics,
    /// What a verb that fails writes to standard error under `--format json`
    Error,
    /// What other verbs print under `--format json`, by verb
    Answers,
}

/// The answers that are put together where they are printed.
const ANSWERS: &str = include_str!("answers.json");

/// Prints it.
pub fn run(arguments: Arguments, screen: &Screen) -> Result<(), Error> {
    let schema = match arguments.what {
        What::Answers => {
            screen.document(ANSWERS);
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
