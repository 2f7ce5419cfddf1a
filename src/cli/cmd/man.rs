//! `pipec man`: manual pages, generated from the same definitions as the help.

use crate::cli::args::Cli;
use crate::cli::screen::Screen;
use clap::{Args, Command, CommandFactory};
use clap_mangen::Man;
use compiler::export::quantity;
use compiler::text::suggest::nearest;
use pipec::error::Error;
use pipec::files::output;
use serde_json::json;
use std::fs;
use std::path::PathBuf;

/// Arguments of `pipec man`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  pipec man partition | man -l -\n  pipec man -o ~/.local/share/man/man1")]
pub struct Arguments {
    /// The command, with its subcommand if it has any: `plan diff` [default: pipec itself]
    #[arg(value_name = "COMMAND", num_args = 0..=2, conflicts_with = "output")]
    verb: Vec<String>,
    /// Write all pages into this folder, created if missing
    #[arg(short, long, value_name = "FOLDER")]
    output: Option<PathBuf>,
}

/// Prints one page, or writes all.
pub fn run(arguments: &Arguments, screen: &Screen) -> Result<(), Error> {
    let all = all_pages();
    if let Some(folder) = &arguments.output {
        fs::create_dir_all(folder).map_err(|error| Error::file("create the folder", folder, error))?;
        let mut files = Vec::new();
        for (name, page) in &all {
            let path = folder.join(format!("{name}.1"));
            output::write(&path, page.as_bytes())?;
            files.push(path.display().to_string());
        }
        let bytes = all.iter().map(|(_, page)| page.len() as u64).sum();
        let count = quantity::plural(all.len() as u64, "page", "pages");
        screen.text(&format!("wrote {count} into {} ({})", folder.display(), quantity::bytes(bytes)));
        screen.json(&json!({"files": files}));
        return Ok(());
    }
    let wanted =
        std::iter::once("pipec").chain(arguments.verb.iter().map(String::as_str)).collect::<Vec<_>>().join("-");
    match all.iter().find(|(name, _)| *name == wanted) {
        Some((_, page)) => {
            screen.document(page);
            Ok(())
        }
        None => {
            let failure = Error::input(format!("there is no page `{wanted}`"));
            Err(match nearest(&wanted, all.iter().map(|(name, _)| name.as_str())) {
                Some(near) => failure.with_help(format!("did you mean `{}`?", near.replace('-', " "))),
                None => failure.with_help("`pipec --help` lists the commands"),
            })
        }
    }
}

/// The page of every command by its name, `pipec` first.
fn all_pages() -> Vec<(String, String)> {
    let mut whole = without_help(Cli::command());
    // Building sets the full names of subcommands.
    whole.build();
    let mut pages = Vec::new();
    collect(&whole, &mut pages);
    pages
}

/// Removes the `help` commands, which have no pages.
fn without_help(command: Command) -> Command {
    command.disable_help_subcommand(true).mut_subcommands(without_help)
}

/// Collects the page of a command, then those of its subcommands, except hidden ones.
fn collect(command: &Command, pages: &mut Vec<(String, String)>) {
    let name = command.get_display_name().unwrap_or(command.get_name()).to_string();
    let mut page = Vec::new();
    let version = concat!("pipec ", env!("CARGO_PKG_VERSION"));
    let man = Man::new(command.clone()).source(version).manual("pipec manual");
    man.render(&mut page).expect("writing to memory cannot fail");
    pages.push((name, String::from_utf8_lossy(&page).into_owned()));
    command.get_subcommands().filter(|inner| !inner.is_hide_set()).for_each(|inner| collect(inner, pages));
}
