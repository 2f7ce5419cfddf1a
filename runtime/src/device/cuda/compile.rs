//! Compiles kernel source to device code with NVRTC; no GPU is needed.

use super::nvrtc::{INVALID_OPTION, NO_BUILTINS, NvrtcError, Program};
use super::search_path::FOLDERS;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CString;
use std::num::NonZero;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use thiserror::Error;

/// Compute capability, as in `sm_90`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Architecture {
    pub major: u32,
    pub minor: u32,
}

impl std::fmt::Display for Architecture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "sm_{}{}", self.major, self.minor)
    }
}

#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum CompileFault {
    #[error(
        "libnvrtc, which compiles GPU kernels, was not found; install it (`pip install nvidia-cuda-nvrtc`), or set \
         {FOLDERS} to its folder"
    )]
    NoCompiler,
    #[error("this libnvrtc is too old for {architecture}; install a newer one (`pip install -U nvidia-cuda-nvrtc`)")]
    Old { architecture: Architecture },
    #[error(
        "libnvrtc finds no libnvrtc-builtins of its version; install it anew (`pip install --force-reinstall \
         nvidia-cuda-nvrtc`)"
    )]
    Incomplete,
    #[error("bug in pipec: the source of a kernel has a zero byte")]
    Text,
    #[error("bug in pipec: a kernel for {architecture} does not compile: {log}")]
    Refused { architecture: Architecture, log: String },
    #[error("libnvrtc failed: {0}")]
    Library(#[from] NvrtcError),
}

/// A compiled kernel.
pub struct Code {
    /// Device code.
    pub cubin: Vec<u8>,
    /// Messages of the compiler.
    pub log: String,
}

type CubinCache = BTreeMap<(Architecture, Arc<str>), Arc<[u8]>>;

/// Compiled kernels. No thread holds it while it compiles.
static CUBINS: Mutex<CubinCache> = Mutex::new(BTreeMap::new());

/// Compiles a kernel for this architecture, or finds it compiled: GPUs of one architecture share kernels.
pub fn cubin(text: &Arc<str>, architecture: Architecture) -> Result<Arc<[u8]>, CompileFault> {
    let key = (architecture, text.clone());
    if let Some(code) = CUBINS.lock().get(&key) {
        return Ok(code.clone());
    }
    let code: Arc<[u8]> = compile(text, architecture, &[])?.cubin.into();
    CUBINS.lock().insert(key, code.clone());
    Ok(code)
}

/// Compiles kernels on all cores, so that [`cubin`] finds them. For one that does not compile, `cubin` returns the error.
pub fn compile_all(texts: BTreeSet<Arc<str>>, architecture: Architecture) {
    let is_new = |text: &Arc<str>| !CUBINS.lock().contains_key(&(architecture, text.clone()));
    let texts: Vec<Arc<str>> = texts.into_iter().filter(is_new).collect();
    let threads = thread::available_parallelism().map_or(1, NonZero::get).min(texts.len());
    if threads < 2 {
        return;
    }
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(text) = texts.get(next.fetch_add(1, Ordering::Relaxed)) {
            // After a failure the other kernels are not needed.
            if cubin(text, architecture).is_err() {
                next.store(texts.len(), Ordering::Relaxed);
            }
        }
    };
    thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
}

/// Compiles a kernel for this architecture with additional options, such as `--ptxas-options=-v`.
pub fn compile(text: &str, architecture: Architecture, extra_options: &[&str]) -> Result<Code, CompileFault> {
    let source = CString::new(text).map_err(|_| CompileFault::Text)?;
    let program = Program::new(&source).ok_or(CompileFault::NoCompiler)??;
    let target = format!("--gpu-architecture={architecture}");
    // Sums and products are rounded one by one: a chain of ops gives the bits of the ops alone. Kernels that sum products
    // call `m_fma`.
    let options = [&target, "--std=c++17", "--fmad=false"].into_iter().chain(extra_options.iter().copied());
    let options = options.map(CString::new).collect::<Result<Vec<_>, _>>().map_err(|_| CompileFault::Text)?;
    match program.compile(&options) {
        Ok(()) => Ok(Code { cubin: program.cubin()?, log: program.log()? }),
        Err(INVALID_OPTION) => Err(CompileFault::Old { architecture }),
        Err(NO_BUILTINS) => Err(CompileFault::Incomplete),
        Err(_) => Err(CompileFault::Refused { architecture, log: program.log()? }),
    }
}
