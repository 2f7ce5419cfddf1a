//! Checks that no command overwrites a file it reads, before anything is read or written.

use clap::{ArgMatches, Command};
use compiler::import::onnx::decode;
use pipec::error::Error;
use pipec::train::checkpoints::WEIGHTS;
use runtime::checkpoint::manifest::FILE;
use std::ffi::OsStr;
use std::fs;
use std::path::Path;

/// The arguments that name an output file, for every command that also reads files. `cluster bench` is absent: it may overwrite
/// its input.
const WRITTEN: [(&str, &[&str]); 7] = [
    ("train", &["metrics", "trace", "save", "save_gradients"]),
    ("eval", &["output"]),
    ("profile", &["output"]),
    ("partition", &["output"]),
    ("simulate", &["programs", "trace"]),
    ("report", &["html"]),
    ("export", &["output"]),
];

/// The arguments that name an input file, unless the command writes it.
const READ: [&str; 14] = [
    "file",
    "model",
    "plan",
    "profile",
    "cluster",
    "schedule",
    "hosts",
    "token_file",
    "data",
    "eval_data",
    "weights",
    "inputs",
    "batch_file",
    "metrics",
];

/// The arguments that name a folder whose files are read; the last folder also has other files.
const FOLDERS: [&str; 2] = ["resume", "checkpoint_dir"];

/// The allowed overlap: the trained weights may overwrite the initial ones, which are in memory by then.
const MAY: (&str, &str) = ("weights", "save");

/// Refuses arguments that write a file which another argument reads or writes.
pub fn refuse(command: &Command, matches: &ArgMatches) -> Result<(), Error> {
    let Some((name, matches)) = matches.subcommand() else { return Ok(()) };
    let Some((_, written)) = WRITTEN.into_iter().find(|(verb, _)| *verb == name) else { return Ok(()) };
    let values = |id| matches.try_get_raw(id).ok().flatten().into_iter().flatten().map(Path::new);
    for (at, to) in written.iter().enumerate() {
        for path in values(to) {
            for from in READ.into_iter().filter(|from| !written.contains(from) && (*from, *to) != MAY) {
                if values(from).any(|read| is_same(read, path)) {
                    return Err(lost(path, &shown(command, name, from), &shown(command, name, to)));
                }
            }
            for from in READ.into_iter().chain(FOLDERS) {
                if let Some(of) = values(from).find(|read| is_part(read, path)) {
                    let of = format!("{}, {}", of.display(), shown(command, name, from));
                    return Err(lost(path, &format!("a part of {of}"), &shown(command, name, to)));
                }
            }
            if let Some(weights) = values("checkpoint_dir")
                .map(|folder| folder.join(WEIGHTS))
                .find(|own| *to != "save" && is_one(own, path))
            {
                let why = format!("`--checkpoint-dir` also writes the trained weights to {}", weights.display());
                return Err(kept(path, &why).with_help(format!("choose another file for {}", shown(command, name, to))));
            }
            if let Some(other) = written[..at].iter().find(|other| values(other).any(|other| is_one(other, path))) {
                let [one, other] = [other, to].map(|id| shown(command, name, id));
                return Err(kept(path, &format!("{one} and {other} would both write it"))
                    .with_help("choose a different file for each"));
            }
        }
    }
    Ok(())
}

/// Refuses an output file that is also an input.
pub fn keep(read: &[&Path], path: &Path) -> Result<(), Error> {
    match read.iter().any(|read| is_same(read, path) || is_part(read, path)) {
        true => {
            Err(kept(path, "this run reads it, and writing would destroy it").with_help("choose another output file"))
        }
        false => Ok(()),
    }
}

fn lost(path: &Path, from: &str, to: &str) -> Error {
    kept(path, &format!("this run reads it as {from}, and writing would destroy it"))
        .with_help(format!("choose another file for {to}"))
}

fn kept(path: &Path, why: &str) -> Error {
    Error::file("write", path, why)
}

/// True if two paths refer to the same file, also through links. Pipes and devices do not count.
fn is_same(one: &Path, other: &Path) -> bool {
    one != OsStr::new("-") && place(one).is_some_and(|it| place(other) == Some(it))
}

/// True if a file is part of an input: external tensor data of a model, or a file in the folder of a checkpoint.
fn is_part(read: &Path, path: &Path) -> bool {
    if place(path).is_none() {
        return false;
    }
    if !read.is_dir() {
        return read.is_file() && decode::data_files(read).iter().any(|data| is_same(data, path));
    }
    let (Ok(path), Ok(folder)) = (path.canonicalize(), read.canonicalize()) else { return false };
    let Ok(inner) = path.strip_prefix(&folder) else { return false };
    let is_checkpoint = |path: &Path| path.join(FILE).is_file();
    is_checkpoint(&folder)
        || inner.parent().is_some_and(|inner| inner != Path::new("") && is_checkpoint(&folder.join(inner)))
}

/// True if writing to both paths would write the same file, existing or not.
fn is_one(one: &Path, other: &Path) -> bool {
    let there = |path: &Path| match (path.exists(), path.parent(), path.file_name()) {
        // A link to a missing file: the file will be created at its target.
        (false, Some(folder), _) if path.is_symlink() => {
            let to = folder.join(path.read_link().ok()?);
            Some(to.parent()?.canonicalize().ok()?.join(to.file_name()?))
        }
        (true, ..) => place(path).and_then(|_| path.canonicalize().ok()),
        (false, Some(folder), Some(name)) => {
            let folder = if folder == Path::new("") { Path::new(".") } else { folder };
            folder.canonicalize().ok().map(|folder| folder.join(name))
        }
        _ => None,
    };
    one != OsStr::new("-") && there(one).is_some_and(|it| there(other) == Some(it))
}

/// Unique identity of a file.
#[cfg(unix)]
fn place(path: &Path) -> Option<(u64, u64)> {
    let about = fs::metadata(path).ok().filter(fs::Metadata::is_file)?;
    Some((std::os::unix::fs::MetadataExt::dev(&about), std::os::unix::fs::MetadataExt::ino(&about)))
}

/// Unique identity of a file, except for hard links.
#[cfg(not(unix))]
fn place(path: &Path) -> Option<std::path::PathBuf> {
    fs::canonicalize(path).ok().filter(|path| path.is_file())
}

/// An argument as it appears on the command line.
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
    use crate::cli::args::Cli;
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

    #[test]
    fn what_belongs_to_what_is_read_is_known() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::create_dir_all(path("ck/step-00000002")).unwrap();
        for name in ["ck/step-00000002/manifest.json", "ck/step-00000002/stage-0.safetensors", "ck/weights.safetensors"]
        {
            fs::write(path(name), "").unwrap();
        }
        let stage = path("ck/step-00000002/stage-0.safetensors");
        assert!(is_part(&path("ck/step-00000002"), &stage) && is_part(&path("ck"), &stage));
        assert!(!is_part(&path("ck"), &path("ck/weights.safetensors")) && !is_part(&path("other"), &stage));
        assert!(!is_part(&path("ck"), &path("ck/step-00000002/new.safetensors")));
        let here = |name: &str| path("ck/..").join(name);
        assert!(is_one(&path("new"), &here("new")) && is_one(&stage, &stage) && !is_one(&path("new"), &path("newer")));
        assert!(!is_one(Path::new("-"), Path::new("-")) && !is_one(Path::new("/dev/null"), Path::new("/dev/null")));
    }

    #[test]
    fn trained_weights_keep_their_place() {
        let folder = tempfile::tempdir().unwrap();
        let message = |flag: &str, name: &str| {
            let (at, file) = (folder.path().display().to_string(), folder.path().join(name).display().to_string());
            let words = ["pipec", "train", "m.onnx", "--synthetic-data", "--checkpoint-dir", &at, flag, &file];
            let command = Cli::command();
            refuse(&command, &command.clone().try_get_matches_from(words).unwrap()).err().map(|failure| failure.line())
        };
        for flag in ["--metrics", "--trace", "--save-gradients"] {
            assert!(message(flag, WEIGHTS).is_some_and(|message| message.contains(WEIGHTS)), "{flag}");
            assert_eq!(message(flag, "other.bin"), None);
        }
        // The paths are the same file.
        assert_eq!(message("--save", WEIGHTS), None);
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
        // A link to a missing file refers to its target.
        std::os::unix::fs::symlink("new", path("dangling")).unwrap();
        assert!(is_one(&path("dangling"), &path("new")) && !is_one(&path("dangling"), &path("a")));
        for same in ["a", "soft", "hard"] {
            assert!(keep(&[&path("b"), &path("a")], &path(same)).is_err(), "{same}");
        }
        assert!(keep(&[&path("a")], &path("b")).is_ok() && keep(&[&path("a")], &path("none")).is_ok());
        assert!(keep(&[Path::new("/dev/null")], Path::new("/dev/null")).is_ok());
    }
}
