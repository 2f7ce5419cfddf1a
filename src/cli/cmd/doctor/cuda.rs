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
const USUAL: Architecture = Architecture { major: 8, minor: 0 };

/// Libraries with their names in the report and their wheels, without the suffix for CUDA 12.
const LIBRARIES: [(CudaLibrary, &str, &str); 5] = [
    (CudaLibrary::Driver, "CUDA driver", ""),
    (CudaLibrary::Nvrtc, "CUDA compiler", "nvidia-cuda-nvrtc"),
    (CudaLibrary::CublasLt, "cuBLASLt", "nvidia-cublas"),
    (CudaLibrary::Cudnn, "cuDNN", "nvidia-cudnn-cu13"),
    (CudaLibrary::Nccl, "NCCL", "nvidia-nccl-cu13"),
];

/// A GPU that could be opened.
struct Opened {
    info: GpuInfo,
    free: usize,
    /// The error of compiling or loading a kernel.
    kernels: Result<(), GpuError>,
    /// Whether cuBLASLt starts.
    has_cublaslt: bool,
    /// Whether cuDNN starts.
    has_cudnn: bool,
}

/// What was found of CUDA.
pub struct Cuda {
    devices: Vec<Result<Opened, GpuError>>,
    /// Why the driver lists no devices, if it should.
    fault: Option<GpuError>,
    /// The error of compiling for [`USUAL`] if there is no open GPU.
    compiler: Result<(), CompileFault>,
}

impl Cuda {
    pub fn examine() -> Cuda {
        let (count, fault) = match gpu::devices() {
            Ok(count) => (count, None),
            Err(GpuError::NoDriver) => (0, None),
            Err(fault) => (0, Some(fault)),
        };
        let text = product();
        let devices: Vec<_> = (0..count).map(|ordinal| opened(ordinal, &text)).collect();
        let compiler = match devices.iter().any(Result::is_ok) {
            true => Ok(()),
            false => cubin(&text, USUAL).map(|_| ()),
        };
        Cuda { devices, fault, compiler }
    }

    pub fn findings(&self) -> Vec<Finding> {
        let [driver, compiler, rest @ ..] = LIBRARIES;
        let mut findings = vec![self::driver(driver.1), self.compiler(compiler)];
        findings.extend(rest.map(|(library, what, wheel)| match library {
            CudaLibrary::CublasLt => {
                self.used(optional(library, what, wheel), "matrix products", wheel, |opened| opened.has_cublaslt)
            }
            CudaLibrary::Cudnn => {
                self.used(optional(library, what, wheel), "convolutions", wheel, |opened| opened.has_cudnn)
            }
            _ => optional(library, what, wheel),
        }));
        findings.push(self.gpus());
        findings
    }

    fn compiler(&self, (library, what, wheel): (CudaLibrary, &'static str, &str)) -> Finding {
        let has_driver = CudaLibrary::Driver.find().is_ok();
        let Ok(found) = library.find() else {
            let state = if has_driver { State::Broken } else { State::Absent };
            return missing(library, what, state, has_driver.then(|| install(wheel)));
        };
        let place = place(&found.path.display().to_string(), found.version.as_deref());
        let fault = self.devices.iter().flatten().find_map(|opened| match &opened.kernels {
            Err(GpuError::Compile(fault)) => Some(fault),
            _ => None,
        });
        match fault.or(self.compiler.as_ref().err()) {
            None => {
                let found = format!("{place}; compiles for {}", self.architectures().join(", "));
                Finding { what, state: State::Fine, found, next: None }
            }
            Some(fault) => {
                let next = Some(first_line(&fault.to_string()));
                Finding { what, state: State::Broken, found: format!("{place}; cannot compile kernels"), next }
            }
        }
    }

    /// Adds whether GPUs use a library for these ops: whether it starts.
    fn used(&self, finding: Finding, ops: &str, of_wheel: &str, starts: fn(&Opened) -> bool) -> Finding {
        let mut opened = self.devices.iter().flatten().peekable();
        if finding.state != State::Fine || opened.peek().is_none() {
            return finding;
        }
        if opened.all(starts) {
            return Finding { found: format!("{}; used for {ops}", finding.found), ..finding };
        }
        let found = format!("{}; does not start, so pipec's own kernels compute {ops}", finding.found);
        let next = Some(format!("install the version for the driver: `pip install {}`", wheel(of_wheel)));
        Finding { state: State::Absent, found, next, ..finding }
    }

    /// The architectures for which a kernel was compiled.
    fn architectures(&self) -> Vec<String> {
        let all: BTreeSet<String> = self.devices.iter().flatten().map(|o| o.info.architecture.to_string()).collect();
        if all.is_empty() { vec![USUAL.to_string()] } else { all.into_iter().collect() }
    }

    fn gpus(&self) -> Finding {
        let what = "GPUs";
        if let Some(fault) = &self.fault {
            let next = Some("`nvidia-smi` shows whether the driver works".to_string());
            return Finding { what, state: State::Broken, found: fault.to_string(), next };
        }
        let of = |wanted: fn(&Result<Opened, GpuError>) -> bool| self.devices.iter().filter(|d| wanted(d)).count();
        let (all, closed) = (self.devices.len(), of(|device| device.is_err()));
        let works = of(|device| device.as_ref().is_ok_and(|opened| opened.kernels.is_ok()));
        let found = match all {
            0 => "none".to_string(),
            _ if works == all => quantity::plural(all as u64, "GPU", "GPUs"),
            _ => format!("{works} of {} can be used", quantity::plural(all as u64, "GPU", "GPUs")),
        };
        let state = match all {
            0 => State::Absent,
            _ if works == all => State::Fine,
            _ => State::Broken,
        };
        let next = (closed > 0).then(|| "`nvidia-smi` shows its processes and its health".to_string());
        Finding { what, state, found, next: next.or_else(|| self.unloaded()) }
    }

    /// What to do if a kernel is compiled but cannot be loaded.
    fn unloaded(&self) -> Option<String> {
        let is_unloaded =
            |opened: &Opened| matches!(&opened.kernels, Err(fault) if !matches!(fault, GpuError::Compile(_)));
        let version = CudaLibrary::Driver.find().ok()?.version.as_deref()?;
        let next = || {
            let wheel = wheel("nvidia-cuda-nvrtc");
            format!("the compiler may be newer than the driver: `pip install '{wheel}=={version}.*'`")
        };
        self.devices.iter().flatten().any(is_unloaded).then(next)
    }

    pub fn has_devices(&self) -> bool {
        !self.devices.is_empty()
    }

    /// The devices, and which can access which, as tables.
    pub fn tables(&self) -> String {
        let row = |(ordinal, device): (usize, &Result<Opened, GpuError>)| match device {
            Ok(Opened { info, free, kernels, .. }) => vec![
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
        let all = 0..self.devices.len();
        all.clone().map(|from| all.clone().map(|to| gpu::can_access(from, to)).collect()).collect()
    }

    pub fn libraries_json(&self) -> Value {
        let library = |(library, name, _): (CudaLibrary, &str, &str)| {
            let found = library.find().ok();
            let path = found.map(|found| found.path.display().to_string());
            json!({"name": name, "path": path, "version": found.and_then(|found| found.version.as_deref())})
        };
        LIBRARIES.into_iter().map(library).collect()
    }

    pub fn devices_json(&self) -> Value {
        let device = |(ordinal, device): (usize, &Result<Opened, GpuError>)| match device {
            Ok(Opened { info, free, kernels, has_cublaslt, has_cudnn }) => json!({
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

/// The source of a matrix product.
fn product() -> Arc<str> {
    let matrix = |at: At| Matrix::rows(at, DType::F32, 64);
    let matrices = [matrix(At::input(0)), matrix(At::input(1)), matrix(At::output(0))];
    Product::one([64; 3], matrices, false).launch().text
}

fn opened(ordinal: usize, text: &Arc<str>) -> Result<Opened, GpuError> {
    let gpu = Gpu::open(ordinal)?;
    let (free, kernels) = (gpu.free()?, gpu.function(text).map(|_| ()));
    Ok(Opened {
        info: gpu.info().clone(),
        free,
        kernels,
        has_cublaslt: gpu.cublaslt().is_some(),
        has_cudnn: gpu.cudnn().is_some(),
    })
}

fn driver(what: &'static str) -> Finding {
    let library = CudaLibrary::Driver;
    match library.find() {
        Ok(found) => {
            let version = found.version.as_deref().map(|version| format!("CUDA {version}"));
            let module = fs::read_to_string("/proc/driver/nvidia/version").ok().and_then(|text| module(&text));
            let words = [Some(found.path.display().to_string()), version, module.map(|m| format!("module {m}"))];
            let found = words.into_iter().flatten().collect::<Vec<_>>().join(", ");
            Finding { what, state: State::Fine, found, next: None }
        }
        Err(_) => {
            let next = format!("only GPUs need it; if there is one, add the driver's folder to {FOLDERS}");
            missing(library, what, State::Absent, Some(next))
        }
    }
}

/// The version of the kernel module in the text of the driver's file in `/proc`.
fn module(text: &str) -> Option<String> {
    let is_version = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    text.lines().next()?.split_whitespace().find(is_version).map(str::to_string)
}

fn optional(library: CudaLibrary, what: &'static str, wheel: &str) -> Finding {
    match library.find() {
        Ok(found) => {
            let found = place(&found.path.display().to_string(), found.version.as_deref());
            Finding { what, state: State::Fine, found, next: None }
        }
        Err(_) => {
            let next = CudaLibrary::Driver.find().is_ok().then(|| format!("optional; {}", install(wheel)));
            missing(library, what, State::Absent, next)
        }
    }
}

fn missing(library: CudaLibrary, what: &'static str, state: State, next: Option<String>) -> Finding {
    let fault = library.find().err().and_then(|missing| missing.fault.as_deref());
    let found = match fault {
        Some(fault) => format!("{} cannot be loaded: {fault}", library.file()),
        None => format!("{} was not found", library.file()),
    };
    Finding { what, state, found, next }
}

fn place(path: &str, version: Option<&str>) -> String {
    version.map_or_else(|| path.to_string(), |version| format!("{path}, version {version}"))
}

/// The wheel for the driver's CUDA version.
fn wheel(name: &str) -> String {
    let version = CudaLibrary::Driver.find().ok().and_then(|found| found.version.as_deref());
    match version.is_some_and(|version| version.starts_with("12.")) {
        true => format!("{}-cu12", name.trim_end_matches("-cu13")),
        false => name.to_string(),
    }
}

fn install(name: &str) -> String {
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
        assert_eq!(super::module(open).as_deref(), Some("580.65.06"));
        assert_eq!(super::module(closed).as_deref(), Some("535.104.05"));
        assert_eq!(super::module(""), None);
    }
}
