//! Folders that may contain NVIDIA's libraries: those that the user lists, Python wheels, conda environments, and CUDA
//! toolkits. Python is not run: its packages are found from the path of its executable.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Environment variable with folders to search first, separated as in `PATH`.
pub const FOLDERS: &str = "PIPEC_CUDA_LIBS";

/// Where containers, WSL and NixOS put the driver, besides the loader's path.
const DRIVER: [&str; 3] = ["/usr/local/nvidia/lib64", "/usr/lib/wsl/lib", "/run/opengl-driver/lib"];

/// Values of environment variables.
pub type Variables<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// The folders that the user lists.
pub fn listed_folders(variables: Variables<'_>) -> Vec<PathBuf> {
    variables(FOLDERS).map(|list| std::env::split_paths(&list).collect()).unwrap_or_default()
}

/// Folders of the driver that the loader may not know.
pub fn driver_folders() -> Vec<PathBuf> {
    DRIVER.into_iter().map(PathBuf::from).collect()
}

/// Folders of installed wheels, environments and toolkits, the preferred ones first.
pub fn installed_folders(variables: Variables<'_>) -> Vec<PathBuf> {
    let variable = |name: &str| variables(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let mut prefixes: Vec<PathBuf> = Vec::new();
    for environment in ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(variable) {
        let base = base(&environment);
        prefixes.push(environment);
        prefixes.extend(base);
    }
    for folder in variables("PATH").iter().flat_map(std::env::split_paths) {
        ["python3", "python"].into_iter().for_each(|name| prefixes.extend(prefixes_of(&folder.join(name))));
    }
    prefixes.extend(variable("HOME").map(|home| home.join(".local")));
    let mut folders: Vec<PathBuf> = prefixes.iter().flat_map(|prefix| wheels(prefix)).collect();
    folders.extend(variable("CONDA_PREFIX").map(|prefix| prefix.join("lib")));
    folders.extend(["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(variable).map(|home| home.join("lib64")));
    // `cuda` is the toolkit that the system prefers; of the others, newer ones come first.
    let is_toolkit = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("cuda"));
    let mut toolkits: Vec<PathBuf> = entries(Path::new("/usr/local")).into_iter().filter(is_toolkit).collect();
    toolkits.sort_by_key(|path| std::cmp::Reverse(path.file_name().map(|name| version(&name.to_string_lossy()))));
    folders.extend(toolkits.into_iter().map(|toolkit| toolkit.join("lib64")));
    let mut unique = std::collections::BTreeSet::new();
    folders.retain(|folder| unique.insert(folder.clone()));
    folders
}

/// A key that orders `cuda-12.9` before `cuda-12.10`, and `cuda` behind all.
fn version(name: &str) -> (bool, Vec<u32>) {
    let numbers: Vec<u32> = name.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect();
    (numbers.is_empty(), numbers)
}

/// Prefixes of the installations that an executable `python3` may use.
fn prefixes_of(executable: &Path) -> Vec<PathBuf> {
    if !executable.is_file() {
        return Vec::new();
    }
    let prefix = |path: &Path| path.parent().and_then(Path::parent).map(Path::to_path_buf);
    let mut prefixes: Vec<PathBuf> = prefix(executable).into_iter().collect();
    prefixes.extend(executable.canonicalize().ok().and_then(|path| prefix(&path)));
    prefixes.extend(prefix(executable).and_then(|prefix| base(&prefix)));
    // The shims of pyenv start the version that a file names.
    if executable.parent().is_some_and(|folder| folder.ends_with("shims")) {
        let root = prefix(executable).unwrap_or_default();
        let name = std::fs::read_to_string(root.join("version")).unwrap_or_default();
        prefixes.extend(name.split_whitespace().map(|name| root.join("versions").join(name)));
    }
    prefixes
}

/// The installation on which a virtual environment is based.
fn base(environment: &Path) -> Option<PathBuf> {
    let text = std::fs::read_to_string(environment.join("pyvenv.cfg")).ok()?;
    let (_, home) = text.lines().filter_map(|line| line.split_once('=')).find(|(key, _)| key.trim() == "home")?;
    Path::new(home.trim()).parent().map(Path::to_path_buf)
}

/// The library folders of the wheels in a Python installation. A wheel has a folder per library, or one per CUDA version.
fn wheels(prefix: &Path) -> Vec<PathBuf> {
    let is_python = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python3"));
    let pythons = ["lib", "lib64", "local/lib"].into_iter().flat_map(|lib| entries(&prefix.join(lib)));
    let packages = pythons
        .filter(is_python)
        .flat_map(|python| ["site-packages", "dist-packages"].map(|packages| python.join(packages).join("nvidia")));
    let folders = packages.flat_map(|nvidia| entries(&nvidia)).map(|package| package.join("lib"));
    folders.filter(|folder| folder.is_dir()).collect()
}

/// Sorted folder entries; empty if the folder does not exist.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

/// The library's files in a folder: `libnvrtc.so`, `libnvrtc.so.13`.
pub fn files(folder: &Path, name: &str) -> Vec<PathBuf> {
    let has_name = |path: &PathBuf| {
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        file.strip_prefix(name).is_some_and(|suffix| suffix.is_empty() || suffix.starts_with('.'))
    };
    entries(folder).into_iter().filter(has_name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Wheels of CUDA 12 and 13 in a Python installation.
    fn wheel(prefix: &Path, packages: &str, package: &str) -> PathBuf {
        let lib = prefix.join(packages).join("nvidia").join(package).join("lib");
        fs::create_dir_all(&lib).unwrap();
        fs::create_dir_all(prefix.join("bin")).unwrap();
        lib
    }

    #[test]
    fn wheels_of_environments_come_first() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let venv_libs = [wheel(&root.join("venv"), "lib/python3.12/site-packages", "cu13")];
        let conda_libs = [wheel(&root.join("conda"), "lib/python3.11/site-packages", "cuda_nvrtc")];
        let system_libs = [wheel(&root.join("usr"), "lib/python3/dist-packages", "cudnn")];
        let user_libs = [wheel(&root.join("home/.local"), "lib/python3.10/site-packages", "nccl")];
        fs::write(root.join("usr/bin/python3"), "").unwrap();
        let variables = |name: &str| {
            let value = match name {
                FOLDERS => root.join("a").into_os_string(),
                "VIRTUAL_ENV" => root.join("venv").into(),
                "CONDA_PREFIX" => root.join("conda").into(),
                "PATH" => std::env::join_paths([root.join("none"), root.join("usr/bin")]).unwrap(),
                "HOME" => root.join("home").into(),
                _ => return None,
            };
            Some(value)
        };
        assert_eq!(listed_folders(&variables), [root.join("a")]);
        let want = [&venv_libs[..], &conda_libs, &system_libs, &user_libs, &[root.join("conda/lib")]].concat();
        assert_eq!(installed_folders(&variables)[..want.len()], want);
    }

    #[test]
    fn a_python_on_the_path_is_followed_to_its_packages() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        let [real, venv, linked, shims] =
            ["real", "venv", "linked", "pyenv/versions/3.12.1"].map(|name| root.join(name));
        let lib = |prefix: &Path| wheel(prefix, "lib/python3.12/site-packages", "cu13");
        let libs = [&real, &venv, &shims].map(|prefix| lib(prefix));
        fs::write(real.join("bin/python3"), "").unwrap();
        fs::write(venv.join("bin/python3"), "").unwrap();
        fs::write(venv.join("pyvenv.cfg"), format!("home = {}\nversion = 3.12.1\n", real.join("bin").display()))
            .unwrap();
        fs::create_dir_all(&linked).unwrap();
        std::os::unix::fs::symlink(real.join("bin/python3"), linked.join("python3")).unwrap();
        fs::create_dir_all(root.join("pyenv/shims")).unwrap();
        fs::write(root.join("pyenv/shims/python"), "").unwrap();
        fs::write(root.join("pyenv/version"), "3.12.1\n").unwrap();
        let search = |folder: PathBuf| {
            let variables = |name: &str| (name == "PATH").then(|| folder.clone().into_os_string());
            installed_folders(&variables).into_iter().filter(|folder| folder.starts_with(&root)).collect::<Vec<_>>()
        };
        assert_eq!(search(linked), [libs[0].clone()]);
        assert_eq!(search(venv.join("bin")), [libs[1].clone(), libs[0].clone()]);
        assert_eq!(search(root.join("pyenv/shims")), [libs[2].clone()]);
        assert!(search(root.join("none")).is_empty());
    }

    #[test]
    fn toolkits_are_ordered_by_version() {
        let mut names = ["cuda-12.9", "cuda", "cuda-13", "cuda-12.10"];
        names.sort_by_key(|name| std::cmp::Reverse(version(name)));
        assert_eq!(names, ["cuda", "cuda-13", "cuda-12.10", "cuda-12.9"]);
    }

    #[test]
    fn files_of_a_library_are_those_with_its_name_and_a_version() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.alt.so.13", "libnvrtc-builtins.so.13.0", "libnvrtc.sox"]
        {
            fs::write(folder.path().join(name), "").unwrap();
        }
        assert_eq!(files(folder.path(), "libnvrtc.so").len(), 2);
        assert_eq!(files(folder.path(), "libnvrtc-builtins.so").len(), 1);
    }
}
