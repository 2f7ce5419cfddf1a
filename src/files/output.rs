//! Output files. Paths are checked before work begins, so that a long run does not end with a missing folder.

use crate::error::Error;
use crate::files::overwrite::Mark;
use crate::files::{input, overwrite};
use compiler::tensor::Tensor;
use compiler::text::name::short_name;
use runtime::data::weights;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::process;

/// Refuses a path that cannot be written, or an existing file of another type than `mark`. Free disk space is not checked.
pub fn check(path: &Path, mark: &Mark) -> Result<(), Error> {
    let metadata = fs::metadata(path).ok();
    if metadata.as_ref().is_some_and(|metadata| !metadata.is_file() && !metadata.is_dir()) {
        return Ok(());
    }
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    if metadata.is_some_and(|metadata| metadata.is_dir()) {
        return Err(write_error(path, &io::Error::from(ErrorKind::IsADirectory)));
    }
    overwrite::check(path, mark)?;
    let temporary = temporary_path(&target);
    File::create(&temporary).map_err(|error| write_error(path, &error))?;
    // Writing creates it again, so an error here does not matter.
    let _ = fs::remove_file(&temporary);
    Ok(())
}

/// Creates a folder for pictures if missing. Refuses a folder that cannot be written, or an existing file of another type with the name
/// of a picture.
pub fn pictures<'a>(folder: &Path, names: impl IntoIterator<Item = &'a str>) -> Result<(), Error> {
    fs::create_dir_all(folder).map_err(|error| {
        Error::file("create the folder", folder, error).with_help("choose a writable location for `--svg`")
    })?;
    names.into_iter().try_for_each(|name| check(&folder.join(name), &Mark::Picture))
}

/// What writing the file does: replaces it if there is one.
pub fn verb(path: &Path) -> &'static str {
    if path.is_file() { "replaced" } else { "wrote" }
}

/// Writes tensors; an existing file must hold tensors in the same format.
pub fn write_tensors(path: &Path, tensors: &BTreeMap<String, Tensor>, subject: &str) -> Result<(), Error> {
    overwrite::check(path, &Mark::tensors(path))?;
    weights::write(path, tensors).map_err(|error| Error::input(format!("cannot write the {subject}")).because(error))
}

/// Refuses a path that tensors cannot be written to; the extension sets the format.
pub fn check_tensors(path: &Path) -> Result<(), Error> {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("safetensors" | "npz") => check(path, &Mark::tensors(path)),
        _ => Err(Error::file("write", path, "files of tensors must end in .safetensors or .npz").with_help(format!(
            "use {}; torch reads it with safetensors.torch.load_file",
            path.with_extension("safetensors").display()
        ))),
    }
}

/// Refuses to overwrite a plan or profile (`kind`) of another model. A file is of the same model if one of the `marks` matches: pairs of a
/// field of its `model` object and the expected value.
pub fn protect(path: &Path, model: &Path, marks: &[(&str, &str)], kind: &str) -> Result<(), Error> {
    if !path.is_file() {
        return Ok(());
    }
    // A file of another type is refused when it is written.
    let Ok(text) = input::text(path, input::MOST_PLAN_BYTES) else { return Ok(()) };
    let Ok(existing) = serde_json::from_str::<Value>(&text) else { return Ok(()) };
    let is_kind = existing["schema"].as_str().is_some_and(|schema| schema.starts_with(&format!("pipec.{kind}/")));
    let Some(file) = existing["model"]["file"].as_str() else { return Ok(()) };
    let is_same = |(name, mark): &(&str, &str)| !mark.is_empty() && existing["model"][*name].as_str() == Some(*mark);
    if !is_kind || marks.iter().any(is_same) {
        return Ok(());
    }
    let (path, name) = (path.display(), input::file_name(model));
    let (origin, advice) = match file == name {
        true => (
            format!("another {} or an earlier version", short_name(file)),
            "`-o FILE` with another name keeps both files".to_string(),
        ),
        false => (short_name(file), format!("`-o {name}.{kind}.json` keeps both files")),
    };
    Err(Error::input(format!("{path} is the {kind} of another model"))
        .because(format!("it was made from {origin}, and pipec does not overwrite it"))
        .with_help(format!("{advice}; `-o {path}` overwrites it")))
}

/// The temporary file that is renamed to `path` once it is complete.
pub fn temporary_path(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".{}.part", process::id()));
    path.with_file_name(name)
}

/// The error for a path that could not be written.
pub fn write_error(path: &Path, error: &io::Error) -> Error {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    match (error.kind(), folder) {
        (ErrorKind::NotFound, Some(folder)) if !folder.exists() => {
            let folder = folder.display();
            Error::file("write", path, format!("no such folder: {folder}"))
                .with_help(format!("create it with `mkdir -p {folder}`"))
        }
        (ErrorKind::IsADirectory, _) => Error::file("write", path, "it is a folder").with_help("pass a file in it"),
        _ => Error::file("write", path, error).with_help("choose a writable location"),
    }
}

/// Writes a file atomically. An existing file must be of the same type. Links are followed; pipes and devices are written to directly.
pub fn write(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let metadata = std::fs::metadata(path).ok();
    if metadata.is_some_and(|metadata| !metadata.is_file() && !metadata.is_dir()) {
        return std::fs::write(path, bytes).map_err(|error| write_error(path, &error));
    }
    overwrite::check_bytes(path, bytes)?;
    let target = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    let temporary = temporary_path(&target);
    let result = std::fs::write(&temporary, bytes).and_then(|()| std::fs::rename(&temporary, &target));
    result.map_err(|error| {
        // A partial file is of no use.
        let _ = std::fs::remove_file(&temporary);
        write_error(path, &error)
    })
}

/// `folder/model.onnx` becomes `model.KIND.json` in the current folder.
pub fn default_output(path: &Path, kind: &str) -> PathBuf {
    let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    let stem = stem.strip_suffix(".graph").unwrap_or(&stem).to_string();
    PathBuf::from(format!("{}.{kind}.json", if stem.is_empty() { "model" } else { &stem }))
}

/// True for `-`, which means standard output.
pub fn is_stdout(path: &Path) -> bool {
    path == Path::new("-")
}
