//! GPUs as devices.

use super::chain;
use super::compile::compile_all;
use super::gather;
use super::gpu::{Function, Gpu, GpuMemory};
use super::launch_plan::{Launch, LaunchPlan};
use super::library::CudaLibrary;
use super::library_kernel::LibraryKernel;
use super::matmul;
use super::nccl::Nccl;
use super::per_gpu::{MOST_GPUS, PerGpu};
use super::reduce;
use super::stream::CudaStream;
use crate::device::api::{Device, DeviceInfo, Kernel, OutputMode, Stream};
use crate::device::buffer::{Buffer, DeviceMemory};
use crate::device::chain::Link;
use crate::device::error::DeviceError;
use crate::device::layout::{TensorLayout, accumulation_type};
use crate::device::tensor_link::Transport;
use compiler::op::Op;
use compiler::op::collective::is_meeting;
use compiler::op::table::rule;
use compiler::tensor::fact::Fact;
use parking_lot::Mutex;
use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Name of the kind of device.
pub const NAME: &str = "cuda";

/// The first compute capability with tensor cores for TF32.
const TF32_ARCHITECTURE: u32 = 8;

pub struct CudaDevice {
    gpu: Arc<Gpu>,
    info: DeviceInfo,
}

static OPEN: Mutex<BTreeMap<usize, Arc<CudaDevice>>> = Mutex::new(BTreeMap::new());

/// Opens a GPU by its number. A process opens each once.
pub fn open(ordinal: usize) -> Result<Arc<dyn Device>, DeviceError> {
    let mut open_devices = OPEN.lock();
    if let Some(device) = open_devices.get(&ordinal) {
        return Ok(device.clone());
    }
    let name = format!("{NAME}:{ordinal}");
    if ordinal >= MOST_GPUS {
        return Err(DeviceError::Unknown { name });
    }
    let gpu =
        Gpu::open(ordinal).map_err(|error| DeviceError::Failed { device: name.clone(), what: error.to_string() })?;
    open_devices.values().for_each(|other| gpu.join(&other.gpu));
    let gpu_info = gpu.info();
    let info = DeviceInfo {
        name,
        model: gpu_info.name.clone(),
        driver: format!("CUDA {}.{}", gpu_info.driver / 1000, gpu_info.driver % 1000 / 10),
        memory: Some(gpu_info.memory as u64),
        cache: Some(gpu_info.cache as u64),
        tf32: false,
    };
    let device = Arc::new(CudaDevice { gpu, info });
    open_devices.insert(ordinal, device.clone());
    Ok(device)
}

/// An op, or a chain of ops, as launches.
pub struct CudaKernel {
    name: &'static str,
    ops: usize,
    plan: LaunchPlan,
    /// In place of the plan if the output is the first term of a sum, or is added to one.
    terms: Option<[LaunchPlan; 2]>,
    /// In place of all launches, on GPUs where it works.
    library: Option<LibraryKernel>,
    /// In place of `terms`, if sums are wider than the output.
    library_term: Option<LibraryKernel>,
    /// True if sums have another type than the output.
    sums_are_wider: bool,
    /// By launch. The last are those of `terms`.
    functions: Vec<PerGpu<Function>>,
}

impl CudaKernel {
    fn new(name: &'static str, ops: usize, plan: LaunchPlan) -> CudaKernel {
        CudaKernel {
            name,
            ops,
            plan,
            terms: None,
            library: None,
            library_term: None,
            sums_are_wider: false,
            functions: Vec::new(),
        }
        .allocate_functions()
    }

    pub fn plan(&self) -> &LaunchPlan {
        &self.plan
    }

    /// Makes room for the functions of all launches.
    fn allocate_functions(mut self) -> CudaKernel {
        let count = self.plans().map(|plan| plan.launches.len()).sum();
        self.functions.resize_with(count, PerGpu::default);
        self
    }

    fn plans(&self) -> impl Iterator<Item = &LaunchPlan> {
        std::iter::once(&self.plan).chain(self.terms.iter().flatten())
    }

    /// The library's kernel that replaces all launches, on GPUs where it works.
    pub fn library(&self, mode: OutputMode) -> Option<&LibraryKernel> {
        match mode {
            OutputMode::Overwrite => self.library.as_ref(),
            _ if self.sums_are_wider => self.library_term.as_ref(),
            OutputMode::BeginSum | OutputMode::Accumulate => self.library.as_ref(),
        }
    }

    /// The launches with their loaded kernels. `None` if it cannot write its output like this.
    pub fn launches(
        &self,
        gpu: &Gpu,
        mode: OutputMode,
    ) -> Option<impl Iterator<Item = Result<(&Launch, Function), DeviceError>>> {
        let number = match mode {
            OutputMode::Overwrite => 0,
            OutputMode::BeginSum => 1,
            OutputMode::Accumulate => 2,
        };
        let first = self.plans().take(number).map(|plan| plan.launches.len()).sum::<usize>();
        let launches = &self.plans().nth(number)?.launches;
        let loaded = move |(at, launch)| Ok((launch, self.function(gpu, first + at, launch)?));
        Some(launches.iter().enumerate().map(loaded))
    }

    fn function(&self, gpu: &Gpu, at: usize, launch: &Launch) -> Result<Function, DeviceError> {
        self.functions[at].load(gpu, &launch.text).map_err(|error| gpu.device_error(error))
    }

    /// The launches that are loaded before a run, so that none compiles during training, and their numbers.
    fn launches_to_load(&self, gpu: &Gpu, are_terms: bool) -> Vec<(usize, &Launch)> {
        let mode = if are_terms { OutputMode::Accumulate } else { OutputMode::Overwrite };
        if self.library(mode).is_some_and(|library| library.works_on(gpu)) {
            return Vec::new();
        }
        let launches = self.plans().flat_map(|plan| &plan.launches).enumerate();
        launches.filter(|(at, _)| (*at >= self.plan.launches.len()) == are_terms).collect()
    }
}

/// Compiles and loads the kernels of ops, or of terms of sums.
fn load(gpu: &Gpu, kernels: &[&dyn Kernel], are_terms: bool) -> Result<(), DeviceError> {
    let cuda_kernels: Option<Vec<&CudaKernel>> =
        kernels.iter().map(|kernel| (*kernel as &dyn Any).downcast_ref()).collect();
    let cuda_kernels = cuda_kernels.ok_or(DeviceError::Foreign { what: "kernel" })?;
    let mut launches: Vec<(&CudaKernel, usize, &Launch)> = Vec::new();
    for kernel in cuda_kernels {
        launches.extend(kernel.launches_to_load(gpu, are_terms).into_iter().map(|(at, launch)| (kernel, at, launch)));
    }
    let is_new = |(kernel, at, _): &&(&CudaKernel, usize, &Launch)| kernel.functions[*at].of(gpu).get().is_none();
    let texts = launches.iter().filter(is_new).map(|(.., launch)| launch.text.clone()).collect();
    compile_all(texts, gpu.info().architecture);
    launches.into_iter().try_for_each(|(kernel, at, launch)| kernel.function(gpu, at, launch).map(drop))
}

impl Kernel for CudaKernel {
    fn name(&self) -> &'static str {
        self.name
    }

    fn workspace(&self) -> usize {
        let libraries = self.library.iter().chain(&self.library_term).map(LibraryKernel::workspace);
        self.plans().map(|plan| plan.scratch).chain(libraries).max().unwrap_or(0)
    }

    fn can_accumulate(&self) -> bool {
        self.terms.is_some()
    }

    fn ops(&self) -> usize {
        self.ops
    }

    fn is_reference(&self) -> bool {
        false
    }
}

/// The memory of a buffer, if it is on a GPU.
fn memory_of(buffer: &Buffer) -> Option<&GpuMemory> {
    buffer.device_memory().and_then(|memory| (&**memory as &dyn Any).downcast_ref())
}

impl Device for CudaDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn available_memory(&self) -> Option<u64> {
        self.gpu.free().ok().map(|bytes| bytes as u64)
    }

    fn is_asynchronous(&self) -> bool {
        true
    }

    fn arithmetic(&self) -> String {
        let version = |library: CudaLibrary| library.find().ok().and_then(|loaded| loaded.version.clone());
        let libraries = [CudaLibrary::Nvrtc, CudaLibrary::CublasLt, CudaLibrary::Cudnn].map(version);
        let tf32 = if self.info.tf32 { " tf32" } else { "" };
        format!("{} {libraries:?}{tf32}", self.info.model)
    }

    fn transport(&self) -> Option<Arc<dyn Transport>> {
        Some(Arc::new(Nccl::new(&self.gpu)?))
    }

    fn with_tf32(&self) -> Option<Arc<dyn Device>> {
        let has_cores = self.gpu.info().architecture.major >= TF32_ARCHITECTURE;
        let has_tf32 = has_cores && self.gpu.cublaslt().is_some();
        has_tf32.then(|| {
            let info = DeviceInfo { tf32: true, ..self.info.clone() };
            Arc::new(CudaDevice { gpu: self.gpu.clone(), info }) as Arc<dyn Device>
        })
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer, DeviceError> {
        let memory = self.gpu.allocate(bytes).map_err(|error| self.gpu.device_error(error))?;
        Ok(Buffer::device(Arc::new(memory) as Arc<dyn DeviceMemory>))
    }

    fn can_access(&self, buffer: &Buffer) -> bool {
        memory_of(buffer).is_some_and(|memory| memory.gpu().info().ordinal == self.gpu.info().ordinal)
    }

    fn can_copy(&self, buffer: &Buffer) -> bool {
        memory_of(buffer).is_some()
    }

    fn kernel(&self, op: &Op, inputs: &[Fact], outputs: &[Fact]) -> Result<Arc<dyn Kernel>, DeviceError> {
        let name = rule(op).name();
        let layouts = |facts: &[Fact]| facts.iter().map(TensorLayout::of).collect::<Vec<_>>();
        let (inputs, outputs) = (layouts(inputs), layouts(outputs));
        let plan = match LaunchPlan::new(op, &inputs, &outputs) {
            Some(plan) => plan,
            // Nothing to compute, or computed by the tensor-parallel group.
            None if outputs.iter().all(TensorLayout::is_empty) || is_meeting(op) || matches!(op, Op::Shard(_)) => {
                LaunchPlan::default()
            }
            None => return Err(DeviceError::NoKernel { device: self.info.name.clone(), op: name }),
        };
        let mut kernel = CudaKernel::new(name, 1, plan);
        kernel.library = LibraryKernel::new(&self.gpu, op, &inputs, &outputs, self.info.tf32);
        match (op, &inputs[..], &outputs[..]) {
            (Op::MatMul(product), [a, b], [c]) => {
                let sum = TensorLayout { dtype: accumulation_type(c.dtype), shape: c.shape.clone() };
                kernel.terms = matmul::terms(product, [a, b, &sum]);
                kernel.sums_are_wider = sum.dtype != c.dtype;
                if kernel.sums_are_wider {
                    kernel.library_term = LibraryKernel::new(&self.gpu, op, &inputs, &[sum], self.info.tf32);
                }
            }
            (Op::ScatterAdd(scatter), [dy, indices], [y]) => {
                let sum = TensorLayout { dtype: accumulation_type(y.dtype), shape: y.shape.clone() };
                kernel.terms = gather::terms(scatter, dy, indices, &sum);
            }
            (Op::Reduce(reduce), [x], [y]) => kernel.terms = reduce::terms(reduce, x, accumulation_type(y.dtype)),
            _ => {}
        }
        Ok(Arc::new(kernel.allocate_functions()))
    }

    fn starts_chain(&self, op: &Op) -> bool {
        matches!(op, Op::BatchNorm(_) | Op::LayerNormGrad(_))
    }

    fn chain(&self, links: &[Link], inputs: &[TensorLayout]) -> Option<Arc<dyn Kernel>> {
        Some(Arc::new(CudaKernel::new("chain", links.len(), chain::kernel(links, inputs)?)))
    }

    fn load(&self, kernels: &[&dyn Kernel]) -> Result<(), DeviceError> {
        load(&self.gpu, kernels, false)
    }

    fn load_terms(&self, kernels: &[&dyn Kernel]) -> Result<(), DeviceError> {
        load(&self.gpu, kernels, true)
    }

    fn stream(&self) -> Result<Box<dyn Stream>, DeviceError> {
        Ok(Box::new(CudaStream::new(self.gpu.clone())?))
    }
}
