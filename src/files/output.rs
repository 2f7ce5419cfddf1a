//! Where results go: asked before work begins, so that nobody trains for a day and learns then that a folder is missing.

use crate::error::Error;
use crate::files::input;
use crate::files::overwrite;
use crate::files::overwrite::Mark;
use compiler::import::onnx::name::shown;
use compiler::tensor::Tensor;
use runtime::data::weights;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::process;

/// Refuses a path that nothing can be written to, or where something else lies than what is marked so. Whether the disk has room is not asked.
pub fn check(path: &Path, mark: &Mark) -> Result<(), Error> {
    let there = fs::metadata(path).ok();
    if there.as_ref().is_some_and(|about| !about.is_file() && !about.is_dir()) {
        return Ok(());
    }
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    if there.is_some_and(|about| about.is_dir()) {
        return Err(unwritten(path, &io::Error::from(ErrorKind::IsADirectory)));
    }
    overwrite::check(path, mark)?;
    let part = part(&target);
    File::create(&part).map_err(|error| unwritten(path, &error))?;
    // Whoever writes makes it anew; what cannot be removed says nothing against writing.
    let _ = fs::remove_file(&part);
    Ok(())
}

/// Makes a folder for pictures where it is missing, and refuses one that nothing can be written into, or where something else has the name of
/// one of them.
pub fn pictures<'a>(folder: &Path, names: impl IntoIterator<Item = &'a str>) -> Result<(), Error> {
    fs::create_dir_all(folder).map_err(|error| {
        Error::file("make the folder", folder, error).with_help("`--svg FOLDER` in a place that can be written to")
    })?;
    names.into_iter().try_for_each(|name| check(&folder.join(name), &Mark::Picture))
}

/// Writes tensors, in place of their like alone.
pub fn write_tensors(path: &Path, tensors: &BTreeMap<String, Tensor>, what: &str) -> Result<(), Error> {
    overwrite::check(path, &Mark::tensors(path))?;
    weights::write(path, tensors).map_err(|error| Error::input(format!("cannot write the {what}")).because(error))
}

/// Refuses a path that no weights can be written to: tensors have formats, which names tell.
pub fn check_tensors(path: &Path) -> Result<(), Error> {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("safetensors" | "npz") => check(path, &Mark::tensors(path)),
        _ => Err(Error::file("write", path, "tensors are written to files that end in .safetensors or .npz")
            .with_help(format!(
                "{} would do; torch reads it with safetensors.torch.load_file",
                path.with_extension("safetensors").display()
            ))),
    }
}

/// Refuses to overwrite the plan or profile (`kind`) of another model: a file at `path` whose model is neither `model` nor known
/// by one of the `marks`, pairs of a field of its `model` object and the value expected there.
pub fn protect(path: &Path, model: &Path, marks: &[(&str, &str)], kind: &str) -> Result<(), Error> {
    if !path.is_file() {
        return Ok(());
    }
    // A file of another kind is refused when it is written.
    let Ok(text) = input::text(path, input::MOST_PLAN_BYTES) else { return Ok(()) };
    let Ok(found) = serde_json::from_str::<Value>(&text) else { return Ok(()) };
    let is_kind = found["schema"].as_str().is_some_and(|schema| schema.starts_with(&format!("pipec.{kind}/")));
    let Some(file) = found["model"]["file"].as_str() else { return Ok(()) };
    let is_same = |(name, mark): &(&str, &str)| !mark.is_empty() && found["model"][*name].as_str() == Some(*mark);
    if !is_kind || marks.iter().any(is_same) {
        return Ok(());
    }
    let (path, name) = (path.display(), input::file_name(model));
    let (what, other) = match file == name {
        true => (
            format!("another {}, or of an earlier one", shown(file)),
            "`-o FILE` with another name keeps both".to_string(),
        ),
        false => (shown(file).into_owned(), format!("`-o {name}.{kind}.json` keeps both")),
    };
    Err(Error::input(format!("{path} is the {kind} of another model"))
        .because(format!("it was made of {what}, and would be lost"))
        .with_help(format!("{other}; `-o {path}` writes over it")))
}

/// The file beside a path that becomes it when it is whole.
pub fn part(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".{}.part", process::id()));
    path.with_file_name(name)
}

/// Why a path was not written to.
pub fn unwritten(path: &Path, error: &io::Error) -> Error {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    match (error.kind(), folder) {
        (ErrorKind::NotFound, Some(folder)) if !folder.exists() => {
            let folder = folder.display();
            Error::file("write", path, format!("there is no folder {folder}"))
                .with_help(format!("`mkdir -p {folder}` makes it"))
        }
        (ErrorKind::IsADirectory, _) => Error::file("write", path, "it is a folder").with_help("name a file in it"),
        _ => Error::file("write", path, error).with_help("choose a place that can be written to"),
    }
}

/// Writes a file atomically. An existing file must be of the same type. Links are followed; pipes and devices are written to directly.
pub fn write(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let there = std::fs::metadata(path).ok();
    if there.is_some_and(|about| !about.is_file() && !about.is_dir()) {
        return std::fs::write(path, bytes).map_err(|error| unwritten(path, &error));
    }
    overwrite::check_bytes(path, bytes)?;
    let target = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    let part = part(&target);
    let written = std::fs::write(&part, bytes).and_then(|()| std::fs::rename(&part, &target));
    written.map_err(|error| {
        // A partial file is of no use.
        let _ = std::fs::remove_file(&part);
        unwritten(path, &error)
    })
}

/// `folder/model.onnx` becomes `model.KIND.json` in the current folder.
pub fn default_output(path: &Path, kind: &str) -> PathBuf {
    let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    let stem = stem.strip_suffix(".graph").unwrap_or(&stem).to_string();
    PathBuf::from(format!("{}.{kind}.json", if stem.is_empty() { "model" } else { &stem }))
}

/// Whether a path means standard output: `-`.
pub fn is_stdout(path: &Path) -> bool {
    path == Path::new("-")
}
