//! Locates NVIDIA's libraries, which are not linked. Each is searched on first use: in the folders that the user lists, by
//! the system loader, then in the folders of CUDA toolkits and Python wheels.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Environment variable with folders to search first, separated as in `PATH`.
pub const FOLDERS: &str = "PIPEC_CUDA_LIBS";

/// A loaded library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Path, or the name known to the system loader.
    pub place: String,
}

/// The kernel compiler, `libnvrtc`.
pub fn nvrtc() -> Option<&'static Found> {
    static FOUND: OnceLock<Option<Found>> = OnceLock::new();
    // SAFETY: opening NVIDIA's library runs its initialisers, as intended.
    FOUND.get_or_init(|| find("libnvrtc.so", || unsafe { cudarc::nvrtc::sys::is_culib_present() })).as_ref()
}

/// The driver, `libcuda`.
pub fn driver() -> Option<&'static Found> {
    static FOUND: OnceLock<Option<Found>> = OnceLock::new();
    // SAFETY: as for `nvrtc`.
    FOUND.get_or_init(|| find("libcuda.so", || unsafe { cudarc::driver::sys::is_culib_present() })).as_ref()
}

fn find(name: &str, is_present: impl Fn() -> bool) -> Option<Found> {
    let listed = std::env::var_os(FOLDERS).map(|list| std::env::split_paths(&list).collect()).unwrap_or_default();
    if let Some(found) = find_in(listed, name, &is_present) {
        return Some(found);
    }
    if is_present() {
        return Some(Found { place: name.to_string() });
    }
    find_in(folders(), name, &is_present)
}

fn find_in(folders: Vec<PathBuf>, name: &str, is_present: &dyn Fn() -> bool) -> Option<Found> {
    for file in folders.iter().flat_map(|folder| files(folder, name)) {
        // A library opened by path is then found by name as well.
        // SAFETY: as in `nvrtc`.
        let opened = unsafe { libloading::os::unix::Library::open(Some(&file), RTLD_NOW | RTLD_GLOBAL) };
        if let Ok(library) = opened {
            std::mem::forget(library);
            if is_present() {
                return Some(Found { place: file.display().to_string() });
            }
        }
    }
    None
}

const RTLD_NOW: i32 = 2;
const RTLD_GLOBAL: i32 = 0x100;

fn folders() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = Vec::new();
    for variable in ["CUDA_HOME", "CUDA_PATH"] {
        folders.extend(std::env::var_os(variable).map(|home| Path::new(&home).join("lib64")));
    }
    folders.push(PathBuf::from("/usr/local/cuda/lib64"));
    // Wheels install each library into a separate folder.
    if let Some(home) = std::env::var_os("VIRTUAL_ENV") {
        for python in inside(&Path::new(&home).join("lib")) {
            folders.extend(inside(&python.join("site-packages/nvidia")).into_iter().map(|f| f.join("lib")));
        }
    }
    folders
}

/// Sorted folder entries; empty if the folder does not exist.
fn inside(folder: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> =
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    found.sort();
    found
}

/// The library's files in a folder: `libnvrtc.so`, `libnvrtc.so.13`.
fn files(folder: &Path, name: &str) -> Vec<PathBuf> {
    let is_it = |path: &PathBuf| {
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        file.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    inside(folder).into_iter().filter(is_it).collect()
}
