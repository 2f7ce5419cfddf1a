//! Compiles kernel source to device code with NVRTC; no GPU is needed.

use super::library::{self, FOLDERS};
use cudarc::nvrtc::{result, sys};
use std::ffi::CString;
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
        "libnvrtc, which compiles GPU kernels, was not found; install it (`pip install nvidia-cuda-nvrtc`) and set \
         {FOLDERS} to its folder"
    )]
    NoCompiler,
    #[error("this libnvrtc is too old for {architecture}; install a newer one (`pip install -U nvidia-cuda-nvrtc`)")]
    Old { architecture: Architecture },
    #[error("bug in pipec: the source of a kernel has a zero byte")]
    Text,
    #[error("bug in pipec: a kernel for {architecture} does not compile: {log}")]
    Refused { architecture: Architecture, log: String },
    #[error("libnvrtc failed: {0}")]
    Library(result::NvrtcError),
}

struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: created by `result::create_program` and destroyed only here.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

/// Compiles a kernel for this architecture.
pub fn cubin(text: &str, architecture: Architecture) -> Result<Vec<u8>, CompileFault> {
    library::nvrtc().ok_or(CompileFault::NoCompiler)?;
    let source = CString::new(text).map_err(|_| CompileFault::Text)?;
    let program = Program(result::create_program(&source, None).map_err(CompileFault::Library)?);
    // Sums and products are rounded one by one: a chain of ops gives the bits of the ops alone.
    let options = [format!("--gpu-architecture={architecture}"), "--std=c++17".to_string(), "--fmad=false".to_string()];
    // SAFETY: the program is live.
    if let Err(error) = unsafe { result::compile_program(program.0, &options) } {
        if error.0 == sys::nvrtcResult::NVRTC_ERROR_INVALID_OPTION {
            return Err(CompileFault::Old { architecture });
        }
        // SAFETY: as above.
        let log = unsafe { result::get_program_log(program.0) }.map_err(CompileFault::Library)?;
        let log: Vec<u8> = log.into_iter().map(|c| c as u8).take_while(|&c| c != 0).collect();
        return Err(CompileFault::Refused { architecture, log: String::from_utf8_lossy(&log).into_owned() });
    }
    let mut size = 0;
    // SAFETY: the program is live and compiled for a real architecture; `code` has the reported size.
    unsafe {
        sys::nvrtcGetCUBINSize(program.0, &mut size).result().map_err(CompileFault::Library)?;
        let mut code = vec![0u8; size];
        sys::nvrtcGetCUBIN(program.0, code.as_mut_ptr().cast()).result().map_err(CompileFault::Library)?;
        Ok(code)
    }
}
