//! NVIDIA's libraries, which are not linked. Each is loaded on first use, from the first folder of
//! [`search_path`](super::search_path) that has it, else by the system loader.

use super::search_path::{driver_folders, files, installed_folders, listed_folders};
use libloading::os::unix::{Library, RTLD_NOW};
use std::error::Error;
use std::ffi::{CStr, c_int};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// A library of NVIDIA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CudaLibrary {
    /// The driver, `libcuda`.
    Driver,
    /// The kernel compiler, `libnvrtc`.
    Nvrtc,
    CublasLt,
    Cudnn,
    Nccl,
}

/// A loaded library; it stays loaded until the process ends.
#[derive(Debug)]
pub struct LoadedLibrary {
    /// The file.
    pub path: PathBuf,
    /// The version that it reports. For the driver it is the newest CUDA version that it supports.
    pub version: Option<String>,
    library: Library,
}

/// Why a library was not found.
#[derive(Debug, Default)]
pub struct NotFound {
    /// The loader's message about the first file that could not be loaded.
    pub fault: Option<String>,
}

impl LoadedLibrary {
    /// A function of the library.
    ///
    /// # Safety
    ///
    /// `F` is its documented type.
    pub(super) unsafe fn function<F: Copy>(&self, name: &CStr) -> Option<F> {
        // SAFETY: the caller knows the type, and the library stays loaded.
        unsafe { self.library.get::<F>(name.to_bytes_with_nul()) }.ok().map(|function| *function)
    }
}

/// The functions of a library that pipec calls, with their documented types.
macro_rules! functions {
    ($library:ident: $($visibility:vis $field:ident = $name:literal: $type:ty;)*) => {
        /// The functions, with their documented types.
        pub(super) struct Functions {
            $($visibility $field: $type,)*
        }

        impl Functions {
            /// `None` if the library is not installed, or too old.
            pub fn find() -> Option<&'static Functions> {
                static FOUND: std::sync::OnceLock<Option<Functions>> = std::sync::OnceLock::new();
                let find = || {
                    let library = $crate::device::cuda::library::CudaLibrary::$library.find().ok()?;
                    // SAFETY: the fields have the documented types of these functions, and the library stays loaded.
                    unsafe { Some(Functions { $($field: library.function($name)?,)* }) }
                };
                FOUND.get_or_init(find).as_ref()
            }
        }
    };
}

pub(super) use functions;

impl CudaLibrary {
    /// The name of its file without a version.
    pub fn file(self) -> &'static str {
        match self {
            CudaLibrary::Driver => "libcuda.so",
            CudaLibrary::Nvrtc => "libnvrtc.so",
            CudaLibrary::CublasLt => "libcublasLt.so",
            CudaLibrary::Cudnn => "libcudnn.so",
            CudaLibrary::Nccl => "libnccl.so",
        }
    }

    /// Versions in names that the loader may know.
    fn versions(self) -> &'static [&'static str] {
        match self {
            CudaLibrary::Driver => &["1"],
            CudaLibrary::Nvrtc | CudaLibrary::CublasLt => &["13", "12", "11"],
            CudaLibrary::Cudnn => &["9", "8"],
            CudaLibrary::Nccl => &["2"],
        }
    }

    /// Finds and loads it on the first call.
    pub fn find(self) -> Result<&'static LoadedLibrary, &'static NotFound> {
        static LOADED: [OnceLock<Result<LoadedLibrary, NotFound>>; 5] = [const { OnceLock::new() }; 5];
        LOADED[self as usize].get_or_init(|| self.search()).as_ref()
    }

    fn search(self) -> Result<LoadedLibrary, NotFound> {
        let variables = |name: &str| std::env::var_os(name);
        let in_folders = |folders: Vec<PathBuf>| -> Vec<PathBuf> {
            folders.iter().flat_map(|folder| files(folder, self.file())).collect()
        };
        let plain = [self.file().to_string()].into_iter();
        let names = plain.chain(self.versions().iter().map(|version| format!("{}.{version}", self.file())));
        let names: Vec<PathBuf> = names.map(PathBuf::from).collect();
        let mut paths = in_folders(listed_folders(&variables));
        // The driver belongs to the system, the others to an environment.
        match self {
            CudaLibrary::Driver => paths.extend(names.into_iter().chain(in_folders(driver_folders()))),
            _ => paths.extend(in_folders(installed_folders(&variables)).into_iter().chain(names)),
        }
        let mut not_found = NotFound::default();
        for path in paths {
            match self.load(&path) {
                Ok(loaded) => return Ok(loaded),
                // The loader's names are guesses, files are not.
                Err(fault) if path.is_absolute() => not_found.fault = not_found.fault.or(Some(fault)),
                Err(_) => {}
            }
        }
        Err(not_found)
    }

    fn load(self, requested: &Path) -> Result<LoadedLibrary, String> {
        // SAFETY: opening NVIDIA's library runs its initialisers, as intended.
        let library = unsafe { Library::open(Some(requested), RTLD_NOW) }.map_err(|error| message(&error))?;
        // cudarc loads the driver by name, which now is the one at this place.
        // SAFETY: as above.
        if self == CudaLibrary::Driver && !unsafe { cudarc::driver::sys::is_culib_present() } {
            return Err(format!("{} has an unknown name", requested.display()));
        }
        let path = file_of(&library, self.symbol()).unwrap_or_else(|| requested.to_path_buf());
        if self == CudaLibrary::Nvrtc {
            // NVRTC opens it by name, and some wheels have no search path for it.
            for file in path.parent().map_or(Vec::new(), |folder| files(folder, "libnvrtc-builtins.so")) {
                // SAFETY: as above.
                unsafe { Library::open(Some(file), RTLD_NOW) }.map(std::mem::forget).ok();
            }
        }
        Ok(LoadedLibrary { path, version: self.version(&library), library })
    }

    /// The function that reports the version.
    fn symbol(self) -> &'static CStr {
        match self {
            CudaLibrary::Driver => c"cuDriverGetVersion",
            CudaLibrary::Nvrtc => c"nvrtcVersion",
            CudaLibrary::CublasLt => c"cublasLtGetVersion",
            CudaLibrary::Cudnn => c"cudnnGetVersion",
            CudaLibrary::Nccl => c"ncclGetVersion",
        }
    }

    fn version(self, library: &Library) -> Option<String> {
        let name = self.symbol().to_bytes_with_nul();
        let (mut major, mut minor) = (0, 0);
        // SAFETY: these are the documented signatures; none needs a device.
        unsafe {
            Some(match self {
                CudaLibrary::Driver => {
                    let call = library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(name).ok()?;
                    (call(&mut major) == 0).then(|| format!("{}.{}", major / 1000, major % 1000 / 10))?
                }
                CudaLibrary::Nvrtc => {
                    let call = library.get::<unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int>(name).ok()?;
                    (call(&mut major, &mut minor) == 0).then(|| format!("{major}.{minor}"))?
                }
                CudaLibrary::CublasLt | CudaLibrary::Cudnn => {
                    let call = library.get::<unsafe extern "C" fn() -> usize>(name).ok()?;
                    version_text(call())
                }
                CudaLibrary::Nccl => {
                    let call = library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(name).ok()?;
                    (call(&mut major) == 0).then(|| version_text(usize::try_from(major).unwrap_or(0)))?
                }
            })
        }
    }
}

/// The loader's message.
fn message(error: &dyn Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

/// A version number as text: 91300 is 9.13.0, and 8907, in the form of older libraries, 8.9.7.
fn version_text(version: usize) -> String {
    let major = if version < 10_000 { 1000 } else { 10_000 };
    format!("{}.{}.{}", version / major, version % major / 100, version % 100)
}

/// The file from which a function was loaded.
#[cfg(target_os = "linux")]
fn file_of(library: &Library, symbol: &CStr) -> Option<PathBuf> {
    use std::os::unix::ffi::OsStrExt;
    // SAFETY: the address of a function is in a loaded file; `dladdr` writes `info`, whose name lives as long as the
    // file.
    unsafe {
        let function = library.get::<unsafe extern "C" fn()>(symbol.to_bytes_with_nul()).ok()?;
        let mut info: libc::Dl_info = std::mem::zeroed();
        let has_name = libc::dladdr(*function as *const libc::c_void, &mut info) != 0 && !info.dli_fname.is_null();
        has_name.then(|| PathBuf::from(std::ffi::OsStr::from_bytes(CStr::from_ptr(info.dli_fname).to_bytes())))
    }
}

#[cfg(not(target_os = "linux"))]
fn file_of(_: &Library, _: &CStr) -> Option<PathBuf> {
    None
}

#[cfg(test)]
mod tests {
    #[test]
    fn versions_have_dots() {
        assert_eq!([91300, 8907, 22703, 120901].map(super::version_text), ["9.13.0", "8.9.7", "2.27.3", "12.9.1"]);
    }
}
