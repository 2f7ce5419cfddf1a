//! `pipec completions`: prints a completion script for a shell.

use crate::cli::args::Cli;
use crate::cli::screen::Screen;
use clap::{Args, CommandFactory};
use clap_complete::Shell;
use pipec::error::Error;
use serde_json::json;

/// Arguments of `pipec completions`.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  pipec completions bash > ~/.local/share/bash-completion/completions/pipec\n  pipec completions zsh > ~/.zfunc/_pipec"
)]
pub struct Arguments {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

pub fn run(arguments: Arguments, screen: &Screen) -> Result<(), Error> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut Cli::command(), "pipec", &mut script);
    let script = String::from_utf8_lossy(&script);
    screen.verbatim(&script);
    screen.json(&json!({"shell": arguments.shell.to_string(), "script": script}));
    Ok(())
}
