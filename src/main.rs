//! `pipec`: parses arguments and runs one command.
//!
//! Exit codes: 0 success; 1 check failed or result negative; 2 invalid input or usage; 3 no feasible plan; 101 a panic, which is a bug
//! of pipec; 129, 130 and 143 ended by SIGHUP, SIGINT and SIGTERM. Results go to standard output, everything else to standard error.

// The docs of flags are their help texts, where `[default: …]` is not a link.
#![allow(rustdoc::broken_intra_doc_links)]

mod cli;

use crate::cli::args::{Cli, Verb};
use crate::cli::render_error::{BUG, INPUT, exit_code};
use crate::cli::screen::{Reader, Screen};
use clap::error::ErrorKind;
use clap::{Command, CommandFactory, FromArgMatches};
use pipec::error::Error;
use std::env;
use std::panic::{self, AssertUnwindSafe};
use std::process::ExitCode;
use std::sync::Mutex;

/// Location and message of the first panic, kept until the end to be reported in one line.
static PANIC: Mutex<Option<String>> = Mutex::new(None);

fn main() -> ExitCode {
    panic::set_hook(Box::new(|info| {
        let payload = info.payload();
        let message = payload.downcast_ref::<&str>().map(|s| s.to_string());
        let message = message.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_default();
        let location = info.location().map(|at| format!("{}:{}", at.file(), at.line())).unwrap_or_default();
        if let Ok(mut first) = PANIC.lock() {
            first.get_or_insert(format!("{location}: {message}"));
        }
    }));
    let arguments: Vec<String> =
        env::args_os().skip(1).map(|argument| argument.to_string_lossy().into_owned()).collect();
    crate::cli::color::set_choice(crate::cli::color::choice_among(arguments.iter().cloned()));
    // The parent of a child process reads its error as text.
    let is_program = crate::cli::usage::wants_json(arguments.iter().cloned())
        && env::var_os(pipec::launch::children::VARIABLE).is_none();
    let reader = if is_program { Reader::Program } else { Reader::Person };
    match panic::catch_unwind(AssertUnwindSafe(|| run(&arguments, reader))) {
        Ok(code) => ExitCode::from(code),
        Err(_) => {
            let message = PANIC.lock().ok().and_then(|mut first| first.take()).unwrap_or_default();
            Screen::failure(&Error::bug(&message), reader);
            ExitCode::from(BUG)
        }
    }
}

/// Runs the command and returns the exit code.
fn run(arguments: &[String], reader: Reader) -> u8 {
    let mut command = Cli::command().mut_subcommands(allow_negatives);
    let parsed = command
        .try_get_matches_from_mut(env::args_os())
        .and_then(|matches| Cli::from_arg_matches(&matches).map(|cli| (cli, matches)));
    let (cli, matches) = match parsed {
        Ok(parsed) => parsed,
        Err(error) => return report_usage_error(&crate::cli::usage::with_tip(error, &command, arguments), reader),
    };
    if let Err(failure) = crate::cli::path_conflicts::refuse(&command, &matches) {
        Screen::failure(&failure, reader);
        return exit_code(&failure);
    }
    let screen = Screen::new(&cli.global, reader);
    let result = match cli.verb {
        Verb::Inspect(arguments) => crate::cli::cmd::inspect::run(arguments, &screen),
        Verb::Profile(arguments) => crate::cli::cmd::profile::run(arguments, &screen),
        Verb::Partition(arguments) => crate::cli::cmd::partition::run(arguments, &screen),
        Verb::Plan(arguments) => crate::cli::cmd::plan::run(arguments, &screen),
        Verb::Simulate(arguments) => crate::cli::cmd::simulate::run(arguments, &screen),
        Verb::Report(arguments) => crate::cli::cmd::report::run(arguments, &screen),
        Verb::Sweep(arguments) => crate::cli::cmd::sweep::run(arguments, &screen),
        Verb::Export(arguments) => crate::cli::cmd::export::run(arguments, &screen),
        Verb::Train(arguments) => crate::cli::cmd::train::run(arguments, &screen),
        Verb::Eval(arguments) => crate::cli::cmd::eval::run(arguments, &screen),
        Verb::Quickstart(arguments) => crate::cli::cmd::quickstart::run(arguments, &screen),
        Verb::Cluster(arguments) => crate::cli::cmd::cluster::run(arguments, &screen),
        Verb::Doctor(arguments) => crate::cli::cmd::doctor::run(&arguments, &screen),
        Verb::Schema(arguments) => crate::cli::cmd::schema::run(arguments, &screen),
        Verb::Zoo(arguments) => crate::cli::cmd::zoo::run(arguments, &screen),
        Verb::Completions(arguments) => crate::cli::cmd::completions::run(arguments, &screen),
    };
    match result.and_then(|()| screen.finish()) {
        Ok(()) => 0,
        Err(failure) => {
            // A program reads why from the error, a person from the result.
            if !failure.is_reported() || reader == Reader::Program {
                Screen::failure(&failure, reader);
            }
            exit_code(&failure)
        }
    }
}

/// Lets flags parse `-1` as their value, so that they report the error themselves.
fn allow_negatives(verb: Command) -> Command {
    verb.mut_args(|flag| {
        let is_wanted = flag.get_long().is_some() && flag.get_action().takes_values();
        if is_wanted { flag.allow_negative_numbers(true) } else { flag }
    })
}

/// Help and version are results; every other message of clap is a failure.
fn report_usage_error(error: &clap::Error, reader: Reader) -> u8 {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            Screen::print(&error.render());
            0
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            Screen::failure(&Error::input("no command given").because(error.render()), reader);
            INPUT
        }
        _ if reader == Reader::Program => {
            Screen::failure(&crate::cli::usage::to_error(error), reader);
            INPUT
        }
        _ => {
            Screen::print_error(&error.render().to_string());
            INPUT
        }
    }
}
