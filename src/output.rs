//! Where results go: asked before work begins, so that nobody trains for a day and learns then that a folder is missing.

use crate::failure::Failure;
use crate::replaced::{self, Mark};
use crate::source;
use compiler::import::onnx::name::shown;
use compiler::tensor::Tensor;
use runtime::data::weights;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Error, ErrorKind};
use std::path::{Path, PathBuf};
use std::process;

/// Refuses a path that nothing can be written to, or where something else lies than what is marked so. Whether the disk has room is not asked.
pub fn check(path: &Path, mark: &Mark) -> Result<(), Failure> {
    let there = fs::metadata(path).ok();
    if there.as_ref().is_some_and(|about| !about.is_file() && !about.is_dir()) {
        return Ok(());
    }
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    if there.is_some_and(|about| about.is_dir()) {
        return Err(unwritten(path, &Error::from(ErrorKind::IsADirectory)));
    }
    replaced::check(path, mark)?;
    let part = part(&target);
    File::create(&part).map_err(|error| unwritten(path, &error))?;
    // Whoever writes makes it anew; what cannot be removed says nothing against writing.
    let _ = fs::remove_file(&part);
    Ok(())
}

/// Makes a folder for pictures where it is missing, and refuses one that nothing can be written into, or where something else has the name of
/// one of them.
pub fn pictures<'a>(folder: &Path, names: impl IntoIterator<Item = &'a str>) -> Result<(), Failure> {
    fs::create_dir_all(folder).map_err(|error| {
        Failure::file("make the folder", folder, error).help("`--svg FOLDER` in a place that can be written to")
    })?;
    names.into_iter().try_for_each(|name| check(&folder.join(name), &Mark::Picture))
}

/// Writes tensors, in place of their like alone.
pub fn write_tensors(path: &Path, tensors: &BTreeMap<String, Tensor>, what: &str) -> Result<(), Failure> {
    replaced::check(path, &Mark::tensors(path))?;
    weights::write(path, tensors).map_err(|error| Failure::input(format!("cannot write the {what}")).because(error))
}

/// Refuses a path that no weights can be written to: tensors have formats, which names tell.
pub fn check_tensors(path: &Path) -> Result<(), Failure> {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("safetensors" | "npz") => check(path, &Mark::tensors(path)),
        _ => Err(Failure::file("write", path, "tensors are written to files that end in .safetensors or .npz").help(
            format!(
                "{} would do; torch reads it with safetensors.torch.load_file",
                path.with_extension("safetensors").display()
            ),
        )),
    }
}

/// Where nobody says where a plan or a profile goes, refuses to write over that of another model: `model` is the file at hand, `marks` what
/// plans and profiles say of it, of which one is enough to know it again. The same name, or one with another ending, may have been another
/// model's.
pub fn keep_others(said: Option<&Path>, model: &Path, marks: &[(&str, &str)], kind: &str) -> Result<(), Failure> {
    let path = source::default_output(model, kind);
    if said.is_some() || !path.is_file() {
        return Ok(());
    }
    // What is there and no file of ours was not made by a long search.
    let Ok(text) = source::text(&path, source::MOST_PLAN_BYTES) else { return Ok(()) };
    let Ok(there) = serde_json::from_str::<Value>(&text) else { return Ok(()) };
    let is_ours = there["schema"].as_str().is_some_and(|schema| schema.starts_with(&format!("pipec.{kind}/")));
    let Some(file) = there["model"]["file"].as_str() else { return Ok(()) };
    let is_same = |(name, mark): &(&str, &str)| !mark.is_empty() && there["model"][*name].as_str() == Some(*mark);
    if !is_ours || marks.iter().any(is_same) {
        return Ok(());
    }
    let (path, own) = (path.display(), source::file_name(model));
    let (what, other) = match file == own {
        true => (
            format!("another {}, or of an earlier one", shown(file)),
            "`-o FILE` with another name keeps both".to_string(),
        ),
        false => (shown(file).into_owned(), format!("`-o {own}.{kind}.json` keeps both")),
    };
    Err(Failure::input(format!("{path} is the {kind} of another model"))
        .because(format!("it was made of {what}, and would be lost"))
        .help(format!("{other}; `-o {path}` writes over it")))
}

/// The file beside a path that becomes it when it is whole.
pub fn part(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".{}.part", process::id()));
    path.with_file_name(name)
}

/// Why a path was not written to.
pub fn unwritten(path: &Path, error: &Error) -> Failure {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    match (error.kind(), folder) {
        (ErrorKind::NotFound, Some(folder)) if !folder.exists() => {
            let folder = folder.display();
            Failure::file("write", path, format!("there is no folder {folder}"))
                .help(format!("`mkdir -p {folder}` makes it"))
        }
        (ErrorKind::IsADirectory, _) => Failure::file("write", path, "it is a folder").help("name a file in it"),
        _ => Failure::file("write", path, error).help("choose a place that can be written to"),
    }
}
