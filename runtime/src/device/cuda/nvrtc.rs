//! The functions of libnvrtc that pipec calls, from the library that was found. cudarc would open it by name, and so
//! perhaps another one.

use super::library::{CudaLibrary, LoadedLibrary};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;
use thiserror::Error;

/// An error code of libnvrtc.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("NVRTC error {0}")]
pub struct NvrtcError(pub c_int);

/// `NVRTC_ERROR_INVALID_OPTION`.
pub const INVALID_OPTION: NvrtcError = NvrtcError(5);

/// `NVRTC_ERROR_BUILTIN_OPERATION_FAILURE`: a file that the library opens is missing.
pub const NO_BUILTINS: NvrtcError = NvrtcError(7);

/// A program, `nvrtcProgram`.
type Handle = *mut c_void;

/// A kernel source in the compiler.
pub struct Program {
    handle: Handle,
    library: &'static LoadedLibrary,
}

/// Stands for a missing function, `NVRTC_ERROR_INTERNAL_ERROR`.
const MISSING: NvrtcError = NvrtcError(11);

fn check_status(code: c_int) -> Result<(), NvrtcError> {
    if code == 0 { Ok(()) } else { Err(NvrtcError(code)) }
}

impl Program {
    /// `None` if libnvrtc is not installed.
    pub fn new(source: &CStr) -> Option<Result<Program, NvrtcError>> {
        let library = CudaLibrary::Nvrtc.find().ok()?;
        let mut program = Program { handle: ptr::null_mut(), library };
        Some(program.create(source).map(|()| program))
    }

    fn create(&mut self, source: &CStr) -> Result<(), NvrtcError> {
        type Create = unsafe extern "C" fn(
            *mut Handle,
            *const c_char,
            *const c_char,
            c_int,
            *const *const c_char,
            *const *const c_char,
        ) -> c_int;
        let create: Create = self.function(c"nvrtcCreateProgram")?;
        // SAFETY: the strings end with zero, there are no headers, and the handle is written on success.
        check_status(unsafe { create(&mut self.handle, source.as_ptr(), ptr::null(), 0, ptr::null(), ptr::null()) })
    }

    /// A function of the library. `F` is its type.
    fn function<F: Copy>(&self, name: &CStr) -> Result<F, NvrtcError> {
        // SAFETY: every caller in this file names the documented type of the function.
        unsafe { self.library.function(name) }.ok_or(MISSING)
    }

    pub fn compile(&self, options: &[CString]) -> Result<(), NvrtcError> {
        let compile: unsafe extern "C" fn(Handle, c_int, *const *const c_char) -> c_int =
            self.function(c"nvrtcCompileProgram")?;
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let count = c_int::try_from(options.len()).map_err(|_| INVALID_OPTION)?;
        // SAFETY: the program is live, and there are as many options as stated.
        check_status(unsafe { compile(self.handle, count, options.as_ptr()) })
    }

    /// Messages of the compiler.
    pub fn log(&self) -> Result<String, NvrtcError> {
        let bytes = self.bytes(c"nvrtcGetProgramLogSize", c"nvrtcGetProgramLog")?;
        let text = bytes.split(|&byte| byte == 0).next().unwrap_or_default();
        Ok(String::from_utf8_lossy(text).into_owned())
    }

    /// Device code, after compilation for a real architecture.
    pub fn cubin(&self) -> Result<Vec<u8>, NvrtcError> {
        self.bytes(c"nvrtcGetCUBINSize", c"nvrtcGetCUBIN")
    }

    fn bytes(&self, size: &CStr, content: &CStr) -> Result<Vec<u8>, NvrtcError> {
        let get_size: unsafe extern "C" fn(Handle, *mut usize) -> c_int = self.function(size)?;
        let get: unsafe extern "C" fn(Handle, *mut c_char) -> c_int = self.function(content)?;
        let mut size = 0;
        // SAFETY: the program is live, and `bytes` has the reported size.
        unsafe {
            check_status(get_size(self.handle, &mut size))?;
            let mut bytes = vec![0u8; size];
            check_status(get(self.handle, bytes.as_mut_ptr().cast()))?;
            Ok(bytes)
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if self.handle.is_null() {
            return;
        }
        if let Ok(destroy) = self.function::<unsafe extern "C" fn(*mut Handle) -> c_int>(c"nvrtcDestroyProgram") {
            // SAFETY: created by `create` and destroyed only here.
            unsafe { destroy(&mut self.handle) };
        }
    }
}
