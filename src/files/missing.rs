//! Help for a file that does not exist.

use compiler::text::name::short_name;
use compiler::text::suggest::nearest;
use std::fs;
use std::path::Path;

const MAX_LISTED: usize = 4;

/// Help for a missing file: the similar name, or the files in the folder.
pub fn help(path: &Path) -> String {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let Ok(entries) = fs::read_dir(folder) else {
        return format!("no such folder: {}", folder.display());
    };
    let mut names: Vec<String> =
        entries.take(10_000).filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    names.sort();
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    if let Some(nearest_name) = nearest(&name, names.iter().map(String::as_str)) {
        return format!(
            "did you mean {}?",
            short_name(&folder.join(nearest_name).display().to_string()).trim_start_matches("./")
        );
    }
    if path.extension().is_some_and(|extension| extension == "toml") {
        return "`pipec cluster detect -o cluster.toml` writes a cluster file of this machine".to_string();
    }
    names.retain(|name| Path::new(name).extension() == path.extension());
    let listing = match names.is_empty() {
        true => "has no such file".to_string(),
        false => {
            format!("has {}", names.iter().take(MAX_LISTED).map(|name| short_name(name)).collect::<Vec<_>>().join(", "))
        }
    };
    let folder = if folder == Path::new(".") { "this folder".to_string() } else { folder.display().to_string() };
    format!("check the path: {folder} {listing}")
}
