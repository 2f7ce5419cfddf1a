//! `pipec schema`: the JSON Schema of a file format.

use crate::failure::Failure;
use crate::screen::Screen;
use clap::{Args, ValueEnum};
use compiler::export::metrics;
use compiler::schedule::json;
use compiler::{cluster, plan, profile};

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
}

/// Prints it.
pub fn run(arguments: Arguments, screen: &Screen) -> Result<(), Failure> {
    let schema = match arguments.what {
        What::Plan => plan::read::schema(),
        What::Profile => profile::read::schema(),
        What::Program => json::json_schema(),
        What::Cluster => cluster::read::schema(),
        What::Metrics => metrics::schema(),
    };
    screen.document(&serde_json::to_string_pretty(&schema).unwrap_or_default());
    Ok(())
}
