//! `pipec`: reads arguments, calls one verb, prints.
//!
//! Exit codes: 0 done; 1 ran and the answer is no; 2 bad input or usage; 3 no feasible plan; 101 a panic, which is always our
//! bug; 130 and 143 ended by SIGINT and SIGTERM. Results go to standard output, everything else to standard error.

// What flags say of themselves is their help, as it stands: `[default: …]` is no link there.
#![allow(rustdoc::broken_intra_doc_links)]

mod advice;
mod arguments;
mod asked;
mod batch;
mod beyond;
mod candidates;
mod checkpoints;
mod children;
mod cmd;
mod colour;
mod device_placement;
mod ended;
mod failure;
mod family;
mod freeze;
mod given;
mod groups;
mod held_out;
mod hybrid;
mod identity;
mod initial;
mod kind;
mod launcher;
mod loss;
mod machines;
mod memory;
mod metrics;
mod model;
mod narrow;
mod output;
mod overwritten;
mod own;
mod prediction;
mod replaced;
mod screen;
mod seat;
mod signals;
mod source;
mod stages;
mod stop;
mod tensor;
mod terms;
mod ties;
mod training;
mod untrained;
mod usage;
mod whose;
mod zero;

use crate::arguments::{Cli, Verb};
use crate::failure::Failure;
use crate::screen::{Reader, Screen};
use clap::error::ErrorKind;
use clap::{Command, CommandFactory, FromArgMatches};
// Every verb tells numbers as the pictures do.
use compiler::export::quantity;
use std::env;
use std::panic::{self, AssertUnwindSafe};
use std::process::ExitCode;
use std::sync::Mutex;

/// Where the first panic happened and what it said; kept until the end, so that it is told in one line.
static PANIC: Mutex<Option<String>> = Mutex::new(None);

fn main() -> ExitCode {
    panic::set_hook(Box::new(|info| {
        let payload = info.payload();
        let said = payload.downcast_ref::<&str>().map(|s| s.to_string());
        let said = said.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_default();
        let place = info.location().map(|at| format!("{}:{}", at.file(), at.line())).unwrap_or_default();
        if let Ok(mut first) = PANIC.lock() {
            first.get_or_insert(format!("{place}: {said}"));
        }
    }));
    let arguments: Vec<String> =
        env::args_os().skip(1).map(|argument| argument.to_string_lossy().into_owned()).collect();
    colour::decide(colour::among(arguments.iter().cloned()));
    // Who started a process of a run reads its last words as text.
    let is_program = usage::wants_json(arguments.iter().cloned()) && env::var_os(children::VARIABLE).is_none();
    let reader = if is_program { Reader::Program } else { Reader::Person };
    match panic::catch_unwind(AssertUnwindSafe(|| run(&arguments, reader))) {
        Ok(code) => ExitCode::from(code),
        Err(_) => {
            let said = PANIC.lock().ok().and_then(|mut first| first.take()).unwrap_or_default();
            Screen::failure(&Failure::bug(&said), reader);
            ExitCode::from(failure::BUG)
        }
    }
}

/// Does what the arguments say.
fn run(arguments: &[String], reader: Reader) -> u8 {
    let mut command = Cli::command().mut_subcommands(taking_negatives);
    let parsed = command
        .try_get_matches_from_mut(env::args_os())
        .and_then(|matches| Cli::from_arg_matches(&matches).map(|cli| (cli, matches)));
    let (cli, matches) = match parsed {
        Ok(parsed) => parsed,
        Err(error) => return misused(&usage::advised(error, &command, arguments), reader),
    };
    if let Err(failure) = overwritten::refuse(&command, &matches) {
        Screen::failure(&failure, reader);
        return failure.code;
    }
    let screen = Screen::new(&cli.global, reader);
    let done = match cli.verb {
        Verb::Inspect(arguments) => cmd::inspect::run(arguments, &screen),
        Verb::Profile(arguments) => cmd::profile::run(arguments, &screen),
        Verb::Partition(arguments) => cmd::partition::run(arguments, &screen),
        Verb::Plan(arguments) => cmd::plan::run(arguments, &screen),
        Verb::Simulate(arguments) => cmd::simulate::run(arguments, &screen),
        Verb::Report(arguments) => cmd::report::run(arguments, &screen),
        Verb::Sweep(arguments) => cmd::sweep::run(arguments, &screen),
        Verb::Export(arguments) => cmd::export::run(arguments, &screen),
        Verb::Train(arguments) => cmd::train::run(arguments, &screen),
        Verb::Eval(arguments) => cmd::eval::run(arguments, &screen),
        Verb::Quickstart(arguments) => cmd::quickstart::run(arguments, &screen),
        Verb::Cluster(arguments) => cmd::cluster::run(arguments, &screen),
        Verb::Doctor(arguments) => cmd::doctor::run(&arguments, &screen),
        Verb::Schema(arguments) => cmd::schema::run(arguments, &screen),
        Verb::Zoo(arguments) => cmd::zoo::run(arguments, &screen),
        Verb::Completions(arguments) => cmd::completions::run(arguments, &screen),
        Verb::Man(arguments) => cmd::man::run(&arguments, &screen),
    };
    match done.and_then(|()| screen.finish()) {
        Ok(()) => 0,
        Err(failure) => {
            Screen::failure(&failure, reader);
            failure.code
        }
    }
}

/// With flags that read `-1` as their value, so that they say themselves what is wrong with it.
fn taking_negatives(verb: Command) -> Command {
    verb.mut_args(|flag| {
        let is_wanted = flag.get_long().is_some() && flag.get_action().takes_values();
        if is_wanted { flag.allow_negative_numbers(true) } else { flag }
    })
}

/// Help and version are results; everything else that clap says is a failure in its own one line.
fn misused(error: &clap::Error, reader: Reader) -> u8 {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            Screen::print(&error.render());
            0
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            Screen::failure(&Failure::input("no command is given").because(error.render()), reader);
            failure::INPUT
        }
        _ if reader == Reader::Program => {
            Screen::failure(&usage::failure(error), reader);
            failure::INPUT
        }
        _ => {
            Screen::complain(&error.render().to_string());
            failure::INPUT
        }
    }
}
