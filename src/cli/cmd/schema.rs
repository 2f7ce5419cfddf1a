//! `pipec schema`: prints the JSON Schema of a file format.

use crate::cli::args::named;
use crate::cli::screen::Screen;
use clap::Args;
use compiler::export::{failure, metrics};
use compiler::schedule::formats::json;
use compiler::{cluster, plan, profile};
use pipec::error::Error;
use serde_json::Value;

/// Arguments of `pipec schema`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  pipec schema plan\n  pipec schema metrics > metrics.schema.json")]
pub struct Arguments {
    /// The file format
    #[arg(value_parser = named(FORMATS))]
    what: Schema,
}

/// A schema; `None` for [`RESULT_SCHEMAS`].
type Schema = Option<fn() -> Value>;

/// The file formats.
const FORMATS: &[(&str, &str, Schema)] = &[
    ("plan", "plan.json, written by `pipec partition`", Some(plan::read::schema)),
    ("profile", "profile.json, written by `pipec profile`", Some(profile::read::schema)),
    ("program", "Programs, written by `pipec simulate --programs FILE.json`", Some(json::json_schema)),
    ("cluster", "A cluster file (TOML of this structure)", Some(cluster::read::schema)),
    ("metrics", "A line of the file written by `pipec train --metrics`", Some(metrics::schema)),
    ("error", "The error that a failing command writes to standard error with `--format json`", Some(failure::schema)),
    ("answers", "The results of all other commands with `--format json`, by command", None),
];

/// Schemas of the results without a type of their own, by command.
const RESULT_SCHEMAS: &str = include_str!("answers.json");

pub fn run(arguments: Arguments, screen: &Screen) -> Result<(), Error> {
    match arguments.what {
        Some(schema) => screen.document(&serde_json::to_string_pretty(&schema()).unwrap_or_default()),
        None => screen.document(RESULT_SCHEMAS),
    }
    Ok(())
}
