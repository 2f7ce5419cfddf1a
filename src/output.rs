//! Where results go: asked before work begins, so that nobody trains for a day and learns then that a folder is missing.

use crate::failure::Failure;
use std::fs::{self, File};
use std::io::{Error, ErrorKind};
use std::path::{Path, PathBuf};
use std::process;

/// Refuses a path that nothing can be written to. Whether the disk has room is not asked.
pub fn check(path: &Path) -> Result<(), Failure> {
    let there = fs::metadata(path).ok();
    if there.as_ref().is_some_and(|about| !about.is_file() && !about.is_dir()) {
        return Ok(());
    }
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    if there.is_some_and(|about| about.is_dir()) {
        return Err(unwritten(path, &Error::from(ErrorKind::IsADirectory)));
    }
    let part = part(&target);
    File::create(&part).map_err(|error| unwritten(path, &error))?;
    // Whoever writes makes it anew; what cannot be removed says nothing against writing.
    let _ = fs::remove_file(&part);
    Ok(())
}

/// Refuses a path that no weights can be written to: tensors have formats, which names tell.
pub fn check_tensors(path: &Path) -> Result<(), Failure> {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("safetensors" | "npz") => check(path),
        _ => Err(Failure::file("write", path, "tensors are written to files that end in .safetensors or .npz").help(
            format!(
                "{} would do; torch reads it with safetensors.torch.load_file",
                path.with_extension("safetensors").display()
            ),
        )),
    }
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
