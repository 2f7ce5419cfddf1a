//! What `pipec doctor` finds of CUDA: the libraries, the GPUs, and whether kernels can be compiled for them.

use super::{Finding, State};
use crate::cli::stage_table;
use compiler::tensor::DType;
use compiler::text::quantity;
use runtime::device::cuda::compile::{Architecture, CompileFault, cubin};
use runtime::device::cuda::gpu::{self, Gpu, GpuError, GpuInfo};
use runtime::device::cuda::launch_plan::At;
use runtime::device::cuda::library::CudaLibrary;
use runtime::device::cuda::matmul::{Matrix, Product};
use runtime::device::cuda::search_path::FOLDERS;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::sync::Arc;

/// The architecture for which the compiler is tested if no GPU can be opened.
const DEFAULT_ARCHITECTURE: Architecture = Architecture { major: 8, minor: 0 };

/// Libraries with their names in the report and their wheels, without the suffix for CUDA 12.
const LIBRARIES: [(CudaLibrary, &str, &str); 5] = [
    (CudaLibrary::Driver, "CUDA driver", ""),
    (CudaLibrary::Nvrtc, "CUDA compiler", "nvidia-cuda-nvrtc"),
    (CudaLibrary::CublasLt, "cuBLASLt", "nvidia-cublas"),
    (CudaLibrary::Cudnn, "cuDNN", "nvidia-cudnn-cu13"),
    (CudaLibrary::Nccl, "NCCL", "nvidia-nccl-cu13"),
];

/// A GPU that could be opened.
struct OpenedGpu {
    info: GpuInfo,
    free: usize,
    /// The error of compiling or loading a kernel.
    kernels: Result<(), GpuError>,
    has_cublaslt: bool,
    has_cudnn: bool,
}

/// What was found of CUDA.
pub struct Cuda {
    devices: Vec<Result<OpenedGpu, GpuError>>,
    /// Why the driver lists no devices, if it should.
    fault: Option<GpuError>,
    /// The error of compiling for [`DEFAULT_ARCHITECTURE`] if there is no open GPU.
    compiler: Result<(), CompileFault>,
}

impl Cuda {
    pub fn examine() -> Cuda {
        let (count, fault) = match gpu::devices() {
            Ok(count) => (count, None),
            Err(GpuError::NoDriver) => (0, None),
            Err(fault) => (0, Some(fault)),
        };
        let text = matrix_product();
        let devices: Vec<_> = (0..count).map(|ordinal| open_gpu(ordinal, &text)).collect();
        let compiler = match devices.iter().any(Result::is_ok) {
            true => Ok(()),
            false => cubin(&text, DEFAULT_ARCHITECTURE).map(|_| ()),
        };
        Cuda { devices, fault, compiler }
    }

    pub fn findings(&self) -> Vec<Finding> {
        let [driver, compiler, optional_libraries @ ..] = LIBRARIES;
        let mut findings = vec![self::driver(driver.1), self.compiler(compiler)];
        findings.extend(optional_libraries.map(|(library, subject, wheel)| match library {
            CudaLibrary::CublasLt => {
                self.with_use(optional_library(library, subject, wheel), "matrix products", wheel, |opened| {
                    opened.has_cublaslt
                })
            }
            CudaLibrary::Cudnn => {
                self.with_use(optional_library(library, subject, wheel), "convolutions", wheel, |opened| {
                    opened.has_cudnn
                })
            }
            _ => optional_library(library, subject, wheel),
        }));
        findings.push(self.gpus());
        findings
    }

    fn compiler(&self, (library, subject, wheel): (CudaLibrary, &'static str, &str)) -> Finding {
        let has_driver = CudaLibrary::Driver.find().is_ok();
        let Ok(library_file) = library.find() else {
            let state = if has_driver { State::Broken } else { State::Absent };
            return missing_library(library, subject, state, has_driver.then(|| install_advice(wheel)));
        };
        let file = file_text(&library_file.path.display().to_string(), library_file.version.as_deref());
        let fault = self.devices.iter().flatten().find_map(|opened| match &opened.kernels {
            Err(GpuError::Compile(fault)) => Some(fault),
            _ => None,
        });
        match fault.or(self.compiler.as_ref().err()) {
            None => {
                let detail = format!("{file}; compiles for {}", self.architectures().join(", "));
                Finding { subject, state: State::Fine, detail, advice: None }
            }
            Some(fault) => {
                let advice = Some(first_line(&fault.to_string()));
                Finding { subject, state: State::Broken, detail: format!("{file}; cannot compile kernels"), advice }
            }
        }
    }

    /// Adds whether GPUs use a library for these ops: whether it starts.
    fn with_use(&self, finding: Finding, ops: &str, of_wheel: &str, starts: fn(&OpenedGpu) -> bool) -> Finding {
        let mut opened = self.devices.iter().flatten().peekable();
        if finding.state != State::Fine || opened.peek().is_none() {
            return finding;
        }
        if opened.all(starts) {
            return Finding { detail: format!("{}; used for {ops}", finding.detail), ..finding };
        }
        let detail = format!("{}; does not start, so pipec's own kernels compute {ops}", finding.detail);
        let advice = Some(format!("install the version for the driver: `pip install {}`", wheel(of_wheel)));
        Finding { state: State::Absent, detail, advice, ..finding }
    }

    /// The architectures for which a kernel was compiled.
    fn architectures(&self) -> Vec<String> {
        let architectures: BTreeSet<String> =
            self.devices.iter().flatten().map(|o| o.info.architecture.to_string()).collect();
        if architectures.is_empty() {
            vec![DEFAULT_ARCHITECTURE.to_string()]
        } else {
            architectures.into_iter().collect()
        }
    }

    fn gpus(&self) -> Finding {
        let subject = "GPUs";
        if let Some(fault) = &self.fault {
            let advice = Some("`nvidia-smi` shows whether the driver works".to_string());
            return Finding { subject, state: State::Broken, detail: fault.to_string(), advice };
        }
        let count_devices =
            |predicate: fn(&Result<OpenedGpu, GpuError>) -> bool| self.devices.iter().filter(|d| predicate(d)).count();
        let (total, unopened) = (self.devices.len(), count_devices(|device| device.is_err()));
        let usable = count_devices(|device| device.as_ref().is_ok_and(|opened| opened.kernels.is_ok()));
        let detail = match total {
            0 => "none".to_string(),
            _ if usable == total => quantity::plural(total as u64, "GPU", "GPUs"),
            _ => format!("{usable} of {} can be used", quantity::plural(total as u64, "GPU", "GPUs")),
        };
        let state = match total {
            0 => State::Absent,
            _ if usable == total => State::Fine,
            _ => State::Broken,
        };
        let advice = (unopened > 0).then(|| "`nvidia-smi` shows its processes and its health".to_string());
        Finding { subject, state, detail, advice: advice.or_else(|| self.advise_unloaded()) }
    }

    /// What to do if a kernel is compiled but cannot be loaded.
    fn advise_unloaded(&self) -> Option<String> {
        let is_unloaded =
            |opened: &OpenedGpu| matches!(&opened.kernels, Err(fault) if !matches!(fault, GpuError::Compile(_)));
        let version = CudaLibrary::Driver.find().ok()?.version.as_deref()?;
        let advice = || {
            let wheel = wheel("nvidia-cuda-nvrtc");
            format!("the compiler may be newer than the driver: `pip install '{wheel}=={version}.*'`")
        };
        self.devices.iter().flatten().any(is_unloaded).then(advice)
    }

    pub fn has_devices(&self) -> bool {
        !self.devices.is_empty()
    }

    /// The devices, and which can access which, as tables.
    pub fn tables(&self) -> String {
        let row = |(ordinal, device): (usize, &Result<OpenedGpu, GpuError>)| match device {
            Ok(OpenedGpu { info, free, kernels, .. }) => vec![
                ordinal.to_string(),
                info.name.clone(),
                info.architecture.to_string(),
                quantity::bytes(info.memory as u64),
                quantity::bytes(*free as u64),
                kernels.as_ref().map_or_else(|fault| first_line(&fault.to_string()), |()| "ok".to_string()),
            ],
            Err(fault) => {
                let mut row = vec![String::new(); 6];
                (row[0], row[1]) = (ordinal.to_string(), format!("cannot be opened: {fault}"));
                row
            }
        };
        let header = ["GPU", "name", "architecture", "memory", "free", "kernels"];
        let rows = self.devices.iter().enumerate().map(row).collect();
        let mut text = format!("\n{}", stage_table::table(&header, &[0, 3, 4], rows));
        let peers = self.peers();
        if peers.len() > 1 {
            let names: Vec<String> = (0..peers.len()).map(|ordinal| ordinal.to_string()).collect();
            let header: Vec<&str> = ["access"].into_iter().chain(names.iter().map(String::as_str)).collect();
            let cell = |from: usize, to: usize| match peers[from][to] {
                _ if from == to => "-",
                true => "yes",
                false => "no",
            };
            let row = |from: usize| {
                let cells = (0..peers.len()).map(|to| cell(from, to).to_string());
                [from.to_string()].into_iter().chain(cells).collect()
            };
            let rows = (0..peers.len()).map(row).collect();
            text += &format!("\n{}", stage_table::table(&header, &(0..=peers.len()).collect::<Vec<_>>(), rows));
        }
        text
    }

    /// Whether the GPU of the row can access the memory of the GPU of the column.
    fn peers(&self) -> Vec<Vec<bool>> {
        let ordinals = 0..self.devices.len();
        ordinals.clone().map(|from| ordinals.clone().map(|to| gpu::can_access(from, to)).collect()).collect()
    }

    pub fn libraries_json(&self) -> Value {
        let library = |(library, name, _): (CudaLibrary, &str, &str)| {
            let file = library.find().ok();
            let path = file.map(|file| file.path.display().to_string());
            json!({"name": name, "path": path, "version": file.and_then(|file| file.version.as_deref())})
        };
        LIBRARIES.into_iter().map(library).collect()
    }

    pub fn devices_json(&self) -> Value {
        let device = |(ordinal, device): (usize, &Result<OpenedGpu, GpuError>)| match device {
            Ok(OpenedGpu { info, free, kernels, has_cublaslt, has_cudnn }) => json!({
                "ordinal": ordinal,
                "name": info.name,
                "architecture": info.architecture.to_string(),
                "memory": info.memory,
                "free": free,
                "runs_kernels": kernels.is_ok(),
                "uses_cublaslt": has_cublaslt,
                "uses_cudnn": has_cudnn,
                "fault": kernels.as_ref().err().map(ToString::to_string),
            }),
            Err(fault) => json!({"ordinal": ordinal, "runs_kernels": false, "fault": fault.to_string()}),
        };
        self.devices.iter().enumerate().map(device).collect()
    }

    pub fn peers_json(&self) -> Value {
        json!(self.peers())
    }
}

fn matrix_product() -> Arc<str> {
    let matrix = |at: At| Matrix::rows(at, DType::F32, 64);
    let matrices = [matrix(At::input(0)), matrix(At::input(1)), matrix(At::output(0))];
    Product::single([64; 3], matrices, false).launch().text
}

fn open_gpu(ordinal: usize, text: &Arc<str>) -> Result<OpenedGpu, GpuError> {
    let gpu = Gpu::open(ordinal)?;
    let (free, kernels) = (gpu.free()?, gpu.function(text).map(|_| ()));
    Ok(OpenedGpu {
        info: gpu.info().clone(),
        free,
        kernels,
        has_cublaslt: gpu.cublaslt().is_some(),
        has_cudnn: gpu.cudnn().is_some(),
    })
}

fn driver(subject: &'static str) -> Finding {
    let library = CudaLibrary::Driver;
    match library.find() {
        Ok(file) => {
            let version = file.version.as_deref().map(|version| format!("CUDA {version}"));
            let module = fs::read_to_string("/proc/driver/nvidia/version").ok().and_then(|text| module_version(&text));
            let words = [Some(file.path.display().to_string()), version, module.map(|m| format!("module {m}"))];
            let detail = words.into_iter().flatten().collect::<Vec<_>>().join(", ");
            Finding { subject, state: State::Fine, detail, advice: None }
        }
        Err(_) => {
            let advice = format!("only GPUs need it; if there is one, add the driver's folder to {FOLDERS}");
            missing_library(library, subject, State::Absent, Some(advice))
        }
    }
}

/// The version of the kernel module in the text of the driver's file in `/proc`.
fn module_version(text: &str) -> Option<String> {
    let is_version = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    text.lines().next()?.split_whitespace().find(is_version).map(str::to_string)
}

fn optional_library(library: CudaLibrary, subject: &'static str, wheel: &str) -> Finding {
    match library.find() {
        Ok(file) => {
            let detail = file_text(&file.path.display().to_string(), file.version.as_deref());
            Finding { subject, state: State::Fine, detail, advice: None }
        }
        Err(_) => {
            let advice = CudaLibrary::Driver.find().is_ok().then(|| format!("optional; {}", install_advice(wheel)));
            missing_library(library, subject, State::Absent, advice)
        }
    }
}

fn missing_library(library: CudaLibrary, subject: &'static str, state: State, advice: Option<String>) -> Finding {
    let fault = library.find().err().and_then(|missing| missing.fault.as_deref());
    let detail = match fault {
        Some(fault) => format!("{} cannot be loaded: {fault}", library.file()),
        None => format!("{} was not found", library.file()),
    };
    Finding { subject, state, detail, advice }
}

fn file_text(path: &str, version: Option<&str>) -> String {
    version.map_or_else(|| path.to_string(), |version| format!("{path}, version {version}"))
}

/// The wheel for the driver's CUDA version.
fn wheel(name: &str) -> String {
    let version = CudaLibrary::Driver.find().ok().and_then(|file| file.version.as_deref());
    match version.is_some_and(|version| version.starts_with("12.")) {
        true => format!("{}-cu12", name.trim_end_matches("-cu13")),
        false => name.to_string(),
    }
}

fn install_advice(name: &str) -> String {
    format!("`pip install {}` installs it, or add its folder to {FOLDERS}", wheel(name))
}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().to_string()
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_kernel_module_names_its_version() {
        let open =
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (root@h)\nGCC 12.3";
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n";
        assert_eq!(super::module_version(open).as_deref(), Some("580.65.06"));
        assert_eq!(super::module_version(closed).as_deref(), Some("535.104.05"));
        assert_eq!(super::module_version(""), None);
    }
}
