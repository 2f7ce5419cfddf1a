//! Runs tests of this binary, or the `pipec` command, on simulated GPUs.

use crate::support::emulator::compiler;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The libraries, and how they are linked.
const LIBRARIES: [(&str, &str, &[&str]); 5] = [
    ("driver.cpp", "libcuda.so", &["-ldl"]),
    ("nvrtc.cpp", "libnvrtc.so", &[]),
    ("cublaslt.cpp", "libcublasLt.so", &["-ldl"]),
    ("cudnn.cpp", "libcudnn.so", &["-ldl"]),
    ("nccl.cpp", "libnccl.so", &["-ldl"]),
];

/// The folder with the simulated driver, built on first use. `None`, with a note, without a C++ compiler.
pub fn driver() -> Option<&'static Path> {
    static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
    BUILT.get_or_init(build).as_deref()
}

fn build() -> Option<PathBuf> {
    let Some(compiler) = compiler().filter(|_| cfg!(target_os = "linux")) else {
        println!("skipped: no C++ compiler");
        return None;
    };
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cuda_driver");
    let mut hash = DefaultHasher::new();
    for file in ["driver.cpp", "nvrtc.cpp", "cublaslt.cpp", "cudnn.cpp", "nccl.cpp", "machine.h", "library.h"] {
        fs::read(sources.join(file)).unwrap().hash(&mut hash);
    }
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let folder = target.join(format!("cuda-driver-{:016x}", hash.finish()));
    if folder.exists() {
        return Some(folder);
    }
    // Test binaries may build at the same time; the first to finish is used.
    let temporary = tempfile::tempdir_in(target).unwrap();
    for (source, library, libraries) in LIBRARIES {
        let mut command = Command::new(compiler);
        command.args(["-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-Wl,-z,nodelete"]);
        command.arg(format!("-Wl,-soname,{library}")).arg("-o").arg(temporary.path().join(library));
        let output = command.arg(sources.join(source)).args(libraries).output().unwrap();
        assert!(output.status.success(), "{source}: {}", String::from_utf8_lossy(&output.stderr));
    }
    let temporary = temporary.keep();
    if fs::rename(&temporary, &folder).is_err() {
        fs::remove_dir_all(temporary).unwrap();
    }
    Some(folder)
}

/// A command whose GPUs are simulated. Compiled kernels are kept in the target folder.
pub fn on_simulated_gpus(program: impl AsRef<Path>, driver: &Path) -> Command {
    let mut command = Command::new(program.as_ref());
    command.env("PIPEC_CUDA_LIBS", driver);
    command.env("PIPEC_SIM_CACHE", Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda-kernels"));
    command
}

/// Runs tests of this binary on two simulated GPUs, with delays by `seed`.
pub fn run_tests(filter: &str, seed: u64) {
    let Some(driver) = driver() else { return };
    let mut command = on_simulated_gpus(std::env::current_exe().unwrap(), driver);
    command.args([filter, "--test-threads=2"]).env("PIPEC_TEST_DEVICES", "cuda:0,cuda:1");
    let output = command.env("PIPEC_SIM_SEED", seed.to_string()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "seed {seed}: {text}");
    assert!(!text.contains("running 0 tests"), "{filter}: {text}");
}
