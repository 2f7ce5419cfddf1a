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
const OUTPUT_ARGUMENTS: [(&str, &[&str]); 7] = [
    ("train", &["metrics", "trace", "save", "save_gradients"]),
    ("eval", &["output"]),
    ("profile", &["output"]),
    ("partition", &["output"]),
    ("simulate", &["programs", "trace"]),
    ("report", &["html"]),
    ("export", &["output"]),
];

/// The arguments that name an input file, unless the command writes it.
const INPUT_ARGUMENTS: [&str; 14] = [
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
const INPUT_FOLDERS: [&str; 2] = ["resume", "checkpoint_dir"];

/// The allowed overlap: the trained weights may overwrite the initial ones, which are in memory by then.
const ALLOWED_OVERLAP: (&str, &str) = ("weights", "save");

/// Refuses arguments that write a file which another argument reads or writes.
pub fn refuse(command: &Command, matches: &ArgMatches) -> Result<(), Error> {
    let Some((name, matches)) = matches.subcommand() else { return Ok(()) };
    let Some((_, written)) = OUTPUT_ARGUMENTS.into_iter().find(|(verb, _)| *verb == name) else { return Ok(()) };
    let values = |id| matches.try_get_raw(id).ok().flatten().into_iter().flatten().map(Path::new);
    for (index, output) in written.iter().enumerate() {
        for path in values(output) {
            for input in INPUT_ARGUMENTS
                .into_iter()
                .filter(|input| !written.contains(input) && (*input, *output) != ALLOWED_OVERLAP)
            {
                if values(input).any(|read| is_same(read, path)) {
                    return Err(would_destroy(
                        path,
                        &argument_text(command, name, input),
                        &argument_text(command, name, output),
                    ));
                }
            }
            for input in INPUT_ARGUMENTS.into_iter().chain(INPUT_FOLDERS) {
                if let Some(source) = values(input).find(|read| is_part_of_input(read, path)) {
                    let source = format!("{}, {}", source.display(), argument_text(command, name, input));
                    return Err(would_destroy(
                        path,
                        &format!("a part of {source}"),
                        &argument_text(command, name, output),
                    ));
                }
            }
            if let Some(weights) = values("checkpoint_dir")
                .map(|folder| folder.join(WEIGHTS))
                .find(|weights_path| *output != "save" && is_same_target(weights_path, path))
            {
                let why = format!("`--checkpoint-dir` also writes the trained weights to {}", weights.display());
                return Err(write_error(path, &why)
                    .with_help(format!("choose another file for {}", argument_text(command, name, output))));
            }
            if let Some(first) =
                written[..index].iter().find(|first| values(first).any(|value| is_same_target(value, path)))
            {
                let [first, second] = [first, output].map(|id| argument_text(command, name, id));
                return Err(write_error(path, &format!("{first} and {second} would both write it"))
                    .with_help("choose a different file for each"));
            }
        }
    }
    Ok(())
}

/// Refuses an output file that is also an input.
pub fn check_output(input_paths: &[&Path], path: &Path) -> Result<(), Error> {
    match input_paths.iter().any(|input| is_same(input, path) || is_part_of_input(input, path)) {
        true => Err(write_error(path, "this run reads it, and writing would destroy it")
            .with_help("choose another output file")),
        false => Ok(()),
    }
}

fn would_destroy(path: &Path, from: &str, to: &str) -> Error {
    write_error(path, &format!("this run reads it as {from}, and writing would destroy it"))
        .with_help(format!("choose another file for {to}"))
}

fn write_error(path: &Path, why: &str) -> Error {
    Error::file("write", path, why)
}

/// True if two paths refer to the same file, also through links. Pipes and devices do not count.
fn is_same(left: &Path, right: &Path) -> bool {
    left != OsStr::new("-") && file_id(left).is_some_and(|id| file_id(right) == Some(id))
}

/// True if a file is part of an input: external tensor data of a model, or a file in the folder of a checkpoint.
fn is_part_of_input(input: &Path, path: &Path) -> bool {
    if file_id(path).is_none() {
        return false;
    }
    if !input.is_dir() {
        return input.is_file() && decode::data_files(input).iter().any(|data| is_same(data, path));
    }
    let (Ok(path), Ok(folder)) = (path.canonicalize(), input.canonicalize()) else { return false };
    let Ok(inner) = path.strip_prefix(&folder) else { return false };
    let is_checkpoint = |path: &Path| path.join(FILE).is_file();
    is_checkpoint(&folder)
        || inner.parent().is_some_and(|inner| inner != Path::new("") && is_checkpoint(&folder.join(inner)))
}

/// True if writing to both paths would write the same file, existing or not.
fn is_same_target(left: &Path, right: &Path) -> bool {
    let resolve = |path: &Path| match (path.exists(), path.parent(), path.file_name()) {
        // A link to a missing file: the file will be created at its target.
        (false, Some(folder), _) if path.is_symlink() => {
            let to = folder.join(path.read_link().ok()?);
            Some(to.parent()?.canonicalize().ok()?.join(to.file_name()?))
        }
        (true, ..) => file_id(path).and_then(|_| path.canonicalize().ok()),
        (false, Some(folder), Some(name)) => {
            let folder = if folder == Path::new("") { Path::new(".") } else { folder };
            folder.canonicalize().ok().map(|folder| folder.join(name))
        }
        _ => None,
    };
    left != OsStr::new("-") && resolve(left).is_some_and(|target| resolve(right) == Some(target))
}

#[cfg(unix)]
fn file_id(path: &Path) -> Option<(u64, u64)> {
    let metadata = fs::metadata(path).ok().filter(fs::Metadata::is_file)?;
    Some((std::os::unix::fs::MetadataExt::dev(&metadata), std::os::unix::fs::MetadataExt::ino(&metadata)))
}

/// Unique identity of a file, except for hard links.
#[cfg(not(unix))]
fn file_id(path: &Path) -> Option<std::path::PathBuf> {
    fs::canonicalize(path).ok().filter(|path| path.is_file())
}

/// An argument as it appears on the command line.
fn argument_text(command: &Command, verb: &str, id: &str) -> String {
    let argument =
        command.find_subcommand(verb).and_then(|verb| verb.get_arguments().find(|argument| argument.get_id() == id));
    match argument.and_then(|argument| argument.get_long()) {
        Some(long) => format!("`--{long}`"),
        None => match argument.and_then(|argument| argument.get_value_names()?.first()) {
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
        for (name, written) in OUTPUT_ARGUMENTS {
            let verb = command.find_subcommand(name).unwrap();
            assert!(
                written.iter().all(|id| verb.get_arguments().any(|argument| argument.get_id() == id)),
                "{name}: {written:?}"
            );
            for argument in verb.get_arguments() {
                let id = argument.get_id().as_str();
                let names = argument.get_value_names().unwrap_or_default();
                let is_file =
                    argument.is_positional() || names.iter().any(|name| name.contains("FILE") || name.contains("LIST"));
                assert!(
                    !is_file || written.contains(&id) || INPUT_ARGUMENTS.contains(&id),
                    "{name} {id}: is it read or written?"
                );
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
        assert!(is_part_of_input(&path("ck/step-00000002"), &stage) && is_part_of_input(&path("ck"), &stage));
        assert!(
            !is_part_of_input(&path("ck"), &path("ck/weights.safetensors"))
                && !is_part_of_input(&path("other"), &stage)
        );
        assert!(!is_part_of_input(&path("ck"), &path("ck/step-00000002/new.safetensors")));
        let through_parent = |name: &str| path("ck/..").join(name);
        assert!(
            is_same_target(&path("new"), &through_parent("new"))
                && is_same_target(&stage, &stage)
                && !is_same_target(&path("new"), &path("newer"))
        );
        assert!(
            !is_same_target(Path::new("-"), Path::new("-"))
                && !is_same_target(Path::new("/dev/null"), Path::new("/dev/null"))
        );
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
        assert!(is_same_target(&path("dangling"), &path("new")) && !is_same_target(&path("dangling"), &path("a")));
        for name in ["a", "soft", "hard"] {
            assert!(check_output(&[&path("b"), &path("a")], &path(name)).is_err(), "{name}");
        }
        assert!(check_output(&[&path("a")], &path("b")).is_ok() && check_output(&[&path("a")], &path("none")).is_ok());
        assert!(check_output(&[Path::new("/dev/null")], Path::new("/dev/null")).is_ok());
    }
}
