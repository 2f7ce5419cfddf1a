//! No verb writes over what it reads: asked of the command line, before anything is read or written.

use crate::failure::Failure;
use clap::{ArgMatches, Command};
use std::ffi::OsStr;
use std::fs;
use std::path::Path;

/// The arguments that name a file to write, of every verb that reads files beside. `cluster bench` is told to put its figures in place of
/// those that it reads.
const WRITTEN: [(&str, &[&str]); 7] = [
    ("train", &["metrics", "trace", "save", "save_gradients"]),
    ("eval", &["output"]),
    ("profile", &["output"]),
    ("partition", &["output"]),
    ("simulate", &["programs", "trace"]),
    ("report", &["html"]),
    ("export", &["output"]),
];

/// The arguments that name a file to read, where the verb does not write it.
const READ: [&str; 13] = [
    "file",
    "model",
    "plan",
    "profile",
    "cluster",
    "schedule",
    "hosts",
    "data",
    "eval_data",
    "weights",
    "inputs",
    "batch_file",
    "metrics",
];

/// Weights may take the place of those that training began with: they are whole in memory when the new ones are written.
const MAY: (&str, &str) = ("weights", "save");

/// Refuses arguments of which one names a file to write that another one names to be read.
pub fn refuse(command: &Command, matches: &ArgMatches) -> Result<(), Failure> {
    let Some((name, matches)) = matches.subcommand() else { return Ok(()) };
    let Some((_, written)) = WRITTEN.into_iter().find(|(verb, _)| *verb == name) else { return Ok(()) };
    let values = |id| matches.try_get_raw(id).ok().flatten().into_iter().flatten();
    for to in written {
        for from in READ.into_iter().filter(|from| !written.contains(from) && (*from, *to) != MAY) {
            for path in values(to) {
                if values(from).any(|read| is_same(Path::new(read), Path::new(path))) {
                    return Err(lost(Path::new(path), &shown(command, name, from), &shown(command, name, to)));
                }
            }
        }
    }
    Ok(())
}

/// Refuses a file to write that is among those that are read.
pub fn keep(read: &[&Path], path: &Path) -> Result<(), Failure> {
    match read.iter().any(|read| is_same(read, path)) {
        true => Err(kept(path, "it is read by this run, and would be lost").help("name another file to write")),
        false => Ok(()),
    }
}

fn lost(path: &Path, from: &str, to: &str) -> Failure {
    kept(path, &format!("it is read by this run, as {from}, and would be lost"))
        .help(format!("name another file to write with {to}"))
}

fn kept(path: &Path, why: &str) -> Failure {
    Failure::file("write", path, why)
}

/// Whether two paths lead to one file, through links as well. Pipes and devices lose nothing.
fn is_same(one: &Path, other: &Path) -> bool {
    one != OsStr::new("-") && place(one).is_some_and(|it| place(other) == Some(it))
}

/// What tells a file from all others.
#[cfg(unix)]
fn place(path: &Path) -> Option<(u64, u64)> {
    let about = fs::metadata(path).ok().filter(fs::Metadata::is_file)?;
    Some((std::os::unix::fs::MetadataExt::dev(&about), std::os::unix::fs::MetadataExt::ino(&about)))
}

/// What tells a file from all others, but for hard links.
#[cfg(not(unix))]
fn place(path: &Path) -> Option<std::path::PathBuf> {
    fs::canonicalize(path).ok().filter(|path| path.is_file())
}

/// An argument as users write it.
fn shown(command: &Command, verb: &str, id: &str) -> String {
    let own = command.find_subcommand(verb).and_then(|verb| verb.get_arguments().find(|own| own.get_id() == id));
    match own.and_then(|own| own.get_long()) {
        Some(long) => format!("`--{long}`"),
        None => match own.and_then(|own| own.get_value_names()?.first()) {
            Some(name) => name.to_string(),
            None => id.to_string(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arguments::Cli;
    use clap::CommandFactory;

    #[test]
    fn every_argument_that_names_a_file_is_known() {
        let command = Cli::command();
        for (name, written) in WRITTEN {
            let verb = command.find_subcommand(name).unwrap();
            assert!(written.iter().all(|id| verb.get_arguments().any(|own| own.get_id() == id)), "{name}: {written:?}");
            for own in verb.get_arguments() {
                let id = own.get_id().as_str();
                let names = own.get_value_names().unwrap_or_default();
                let is_file =
                    own.is_positional() || names.iter().any(|name| name.contains("FILE") || name.contains("LIST"));
                assert!(!is_file || written.contains(&id) || READ.contains(&id), "{name} {id}: is it read or written?");
            }
        }
    }

    #[cfg(unix)]
    #[test]
    fn links_lead_to_the_same_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("a"), "").unwrap();
        fs::write(path("b"), "").unwrap();
        std::os::unix::fs::symlink(path("a"), path("soft")).unwrap();
        fs::hard_link(path("a"), path("hard")).unwrap();
        for same in ["a", "soft", "hard"] {
            assert!(keep(&[&path("b"), &path("a")], &path(same)).is_err(), "{same}");
        }
        assert!(keep(&[&path("a")], &path("b")).is_ok() && keep(&[&path("a")], &path("none")).is_ok());
        assert!(keep(&[Path::new("/dev/null")], Path::new("/dev/null")).is_ok());
    }
}
