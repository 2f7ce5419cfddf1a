//! Convolutions by the graph API of cuDNN.
//!
//! A convolution is a graph of one operation. The library suggests engine configurations for it, best first, and one of
//! them becomes a plan.

use super::cudnn_descriptor::{
    Address, Context, ConvolutionMode, CudnnError, DataType, Descriptor, DescriptorValue, Functions, HeuristicMode,
    Note, Raw, attribute, kind,
};
use super::queue::Queue;
use compiler::tensor::DType;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::ffi::{c_char, c_int};
use std::ops::RangeInclusive;
use std::ptr;
use std::sync::Arc;

/// Heuristic modes A and fallback.
const MODES: [HeuristicMode; 2] = [HeuristicMode(3), HeuristicMode(2)];

const TENSOR_CORE: c_int = 0;

/// Less precise than sums in the compute type, or in arbitrary order: inputs in a smaller type, sums in a smaller type,
/// Fourier transforms, atomic additions, and Winograd's transforms.
const REFUSED_NOTES: RangeInclusive<c_int> = 1..=8;

/// Notes of one engine; there are ten kinds.
const MOST_NOTES: usize = 32;

/// Which of the three tensors a convolution computes from the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Computes {
    Y,
    /// The gradient of x, from those of y.
    X,
    /// The gradient of w, from those of y.
    W,
}

/// A convolution of packed tensors in the order of their dimensions: x `[N, C, D…]`, w `[O, C/groups, K…]`, y
/// `[N, O, E…]`. There are at least two spatial axes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Convolution {
    pub computes: Computes,
    pub dtype: DType,
    /// Sizes of x, w and y.
    pub sizes: [Vec<i64>; 3],
    pub strides: Vec<i64>,
    pub pads_begin: Vec<i64>,
    pub pads_end: Vec<i64>,
    pub dilations: Vec<i64>,
    /// Bytes of which the address of each tensor is a multiple.
    pub alignment: i64,
}

impl Convolution {
    /// The kind of its operation, and the first of its attributes: α, β, the convolution, w, x and y follow one another.
    fn operation(&self) -> (c_int, c_int) {
        match self.computes {
            Computes::Y => (10, 700),
            Computes::W => (11, 712),
            Computes::X => (12, 706),
        }
    }

    /// Names of the operands in a plan, in the order of the op: both inputs, then the result. x is 1, w 2, y 3.
    fn operands(&self) -> [i64; 3] {
        match self.computes {
            Computes::Y => [1, 2, 3],
            Computes::X => [3, 2, 1],
            Computes::W => [3, 1, 2],
        }
    }
}

/// What plans are made for.
enum Target {
    /// The library on a GPU. It is used by one thread at a time, since its stream is set before each call.
    Context(Mutex<OpenContext>),
    /// A GPU that need not be there. Its plans cannot run.
    Properties(Descriptor),
}

/// The library on a GPU, kept open.
struct OpenContext {
    functions: &'static Functions,
    raw: Raw,
}

// SAFETY: the library allows any thread to use a context, one at a time.
unsafe impl Send for OpenContext {}

impl Drop for OpenContext {
    fn drop(&mut self) {
        // SAFETY: created in `Cudnn::open` and destroyed only here.
        unsafe { (self.functions.destroy)(self.raw) };
    }
}

/// By convolution and limit of the workspace; `None` where there is no plan.
type Plans = HashMap<(Convolution, usize), Option<Arc<Plan>>>;

/// The library, for one GPU.
pub struct Cudnn {
    functions: &'static Functions,
    plans: Mutex<Plans>,
    target: Target,
}

/// A convolution with the engine that computes it.
pub struct Plan {
    plan: Descriptor,
    /// Names of the operands in the plan.
    operands: [i64; 3],
    pub workspace: usize,
    pub uses_tensor_cores: bool,
}

impl Cudnn {
    /// Opens the library on the GPU whose context the calling thread has bound. `None` if it is not there or does not
    /// start.
    pub fn open() -> Option<Cudnn> {
        let functions = Functions::known()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the library writes one handle.
        functions.check_status(unsafe { (functions.create)(&mut raw) }).ok()?;
        Some(Cudnn::of(functions, Target::Context(Mutex::new(OpenContext { functions, raw }))))
    }

    /// The library for a GPU that is described in JSON, as the library writes it since version 9.8.
    pub fn without_gpu(properties: &str) -> Option<Cudnn> {
        let functions = Functions::known()?;
        let text: Vec<c_char> = properties.bytes().map(|byte| byte as c_char).collect();
        let describe = || -> Result<Descriptor, CudnnError> {
            let properties = Descriptor::new(functions, kind::GPU_PROPERTIES)?;
            properties.set(attribute::GPU_PROPERTIES_JSON, &text)?;
            properties.finalise()
        };
        Some(Cudnn::of(functions, Target::Properties(describe().ok()?)))
    }

    fn of(functions: &'static Functions, target: Target) -> Cudnn {
        Cudnn { functions, plans: Mutex::default(), target }
    }

    /// The plan of a convolution, which is made on the first call, with at most `workspace` bytes. `None` if there is
    /// none. The calling thread has bound the context of the GPU.
    pub fn known_plan(&self, convolution: &Convolution, workspace: usize) -> Option<Arc<Plan>> {
        let mut plans = self.plans.lock();
        let entry = plans.entry((convolution.clone(), workspace));
        entry.or_insert_with(|| self.plan(convolution, workspace).ok().map(Arc::new)).clone()
    }

    /// The first plan that the library suggests that keeps the precision of its type, adds in a fixed order, and needs at
    /// most `workspace` bytes. The calling thread has bound the context of the GPU.
    pub fn plan(&self, convolution: &Convolution, workspace: usize) -> Result<Plan, CudnnError> {
        let graph = self.graph(convolution)?;
        for mode in MODES {
            // A mode may know no engine for the graph.
            for configuration in self.suggest(&graph, mode).unwrap_or_default() {
                let notes = self.notes(&configuration)?;
                let uses_tensor_cores = notes.contains(&TENSOR_CORE);
                // Tensor cores round f32 to TF32.
                let is_rounded = uses_tensor_cores && convolution.dtype == DType::F32;
                if is_rounded || notes.iter().any(|note| REFUSED_NOTES.contains(note)) {
                    continue;
                }
                // The library may suggest what it then cannot do.
                if let Ok((plan, needed)) = self.build_plan(&configuration)
                    && needed <= workspace
                {
                    return Ok(Plan { plan, operands: convolution.operands(), workspace: needed, uses_tensor_cores });
                }
            }
        }
        Err(CudnnError::NoEngine)
    }

    /// The graph with the one operation.
    fn graph(&self, convolution: &Convolution) -> Result<Descriptor, CudnnError> {
        let f = self.functions;
        let window = Descriptor::new(f, kind::CONVOLUTION)?;
        // f32 has the number 0, f64 1.
        window.set(attribute::CONVOLUTION_COMPUTE_TYPE, &[DataType(c_int::from(convolution.dtype == DType::F64))])?;
        // The taps are not mirrored.
        window.set(attribute::CONVOLUTION_MODE, &[ConvolutionMode(1)])?;
        window.set(attribute::CONVOLUTION_SPATIAL_DIMS, &[convolution.strides.len() as i64])?;
        window.set(attribute::CONVOLUTION_DILATIONS, &convolution.dilations)?;
        window.set(attribute::CONVOLUTION_STRIDES, &convolution.strides)?;
        window.set(attribute::CONVOLUTION_PADS_BEGIN, &convolution.pads_begin)?;
        window.set(attribute::CONVOLUTION_PADS_END, &convolution.pads_end)?;
        let window = window.finalise()?;
        let [x, w, y] = [self.tensor(convolution, 0)?, self.tensor(convolution, 1)?, self.tensor(convolution, 2)?];
        let (kind_of_operation, first) = convolution.operation();
        let operation = Descriptor::new(f, kind_of_operation)?;
        if convolution.dtype == DType::F64 {
            operation.set(first, &[1f64])?;
            operation.set(first + 1, &[0f64])?;
        } else {
            operation.set(first, &[1f32])?;
            operation.set(first + 1, &[0f32])?;
        }
        for (at, descriptor) in [window, w, x, y].iter().enumerate() {
            operation.set_descriptor(first + 2 + at as c_int, descriptor)?;
        }
        let operation = operation.finalise()?;
        let graph = Descriptor::new(f, kind::GRAPH)?;
        if let Target::Context(context) = &self.target {
            let context = context.lock();
            graph.set(attribute::GRAPH_CONTEXT, &[Context(context.raw)])?;
        }
        graph.set_descriptor(attribute::GRAPH_OPERATIONS, &operation)?;
        graph.finalise()
    }

    /// One of x, w and y.
    fn tensor(&self, convolution: &Convolution, at: usize) -> Result<Descriptor, CudnnError> {
        let dtype = match convolution.dtype {
            DType::F32 => 0,
            DType::F64 => 1,
            DType::F16 => 2,
            DType::Bf16 => 9,
            _ => return Err(CudnnError::NoEngine),
        };
        let sizes = &convolution.sizes[at];
        let mut strides = vec![1; sizes.len()];
        for axis in (1..sizes.len()).rev() {
            strides[axis - 1] = strides[axis] * sizes[axis];
        }
        let tensor = Descriptor::new(self.functions, kind::TENSOR)?;
        tensor.set(attribute::TENSOR_ID, &[at as i64 + 1])?;
        tensor.set(attribute::TENSOR_DATA_TYPE, &[DataType(dtype)])?;
        tensor.set(attribute::TENSOR_ALIGNMENT, &[convolution.alignment])?;
        tensor.set(attribute::TENSOR_SIZES, sizes)?;
        tensor.set(attribute::TENSOR_STRIDES, &strides)?;
        tensor.finalise()
    }

    /// Configurations of engines for a graph, best first.
    fn suggest(&self, graph: &Descriptor, mode: HeuristicMode) -> Result<Vec<Descriptor>, CudnnError> {
        let heuristic = Descriptor::new(self.functions, kind::HEURISTIC)?;
        heuristic.set_descriptor(attribute::HEURISTIC_GRAPH, graph)?;
        heuristic.set(attribute::HEURISTIC_MODE, &[mode])?;
        if let Target::Properties(properties) = &self.target {
            heuristic.set_descriptor(attribute::HEURISTIC_GPU_PROPERTIES, properties)?;
        }
        let heuristic = heuristic.finalise()?;
        let count = heuristic.get::<DescriptorValue>(attribute::HEURISTIC_RESULTS, &mut [])?;
        let mut configurations = (0..count)
            .map(|_| Descriptor::new(self.functions, kind::CONFIGURATION))
            .collect::<Result<Vec<Descriptor>, CudnnError>>()?;
        let mut raws: Vec<DescriptorValue> =
            configurations.iter().map(|configuration| DescriptorValue(configuration.raw)).collect();
        configurations.truncate(heuristic.get(attribute::HEURISTIC_RESULTS, &mut raws)?);
        Ok(configurations)
    }

    /// The numerical notes of a configuration's engine.
    fn notes(&self, configuration: &Descriptor) -> Result<Vec<c_int>, CudnnError> {
        let engine = Descriptor::new(self.functions, kind::ENGINE)?;
        configuration.get(attribute::CONFIGURATION_ENGINE, &mut [DescriptorValue(engine.raw)])?;
        let mut notes = [Note(0); MOST_NOTES];
        let count = engine.get(attribute::ENGINE_NOTES, &mut notes)?;
        Ok(notes.iter().take(count).map(|note| note.0).collect())
    }

    /// A plan of a configuration, and the bytes of its workspace.
    fn build_plan(&self, configuration: &Descriptor) -> Result<(Descriptor, usize), CudnnError> {
        let plan = Descriptor::new(self.functions, kind::PLAN)?;
        match &self.target {
            Target::Context(context) => {
                let context = context.lock();
                plan.set(attribute::PLAN_CONTEXT, &[Context(context.raw)])?;
            }
            Target::Properties(properties) => plan.set_descriptor(attribute::PLAN_GPU_PROPERTIES, properties)?,
        }
        plan.set_descriptor(attribute::PLAN_CONFIGURATION, configuration)?;
        let plan = plan.finalise()?;
        let mut bytes = [0i64];
        plan.get(attribute::PLAN_WORKSPACE, &mut bytes)?;
        Ok((plan, usize::try_from(bytes[0]).map_err(|_| CudnnError::NoEngine)?))
    }

    /// Queues a convolution of operands at these addresses: both inputs of the op, then its result.
    ///
    /// # Safety
    ///
    /// The plan was made by this library. The calling thread has bound the context of the GPU, to which the stream
    /// belongs. The memory at the addresses is as described and aligned, and that of the workspace as large as the plan
    /// says.
    pub unsafe fn run(
        &self,
        plan: &Plan,
        addresses: [u64; 3],
        workspace: u64,
        queue: &Queue,
    ) -> Result<(), CudnnError> {
        let Target::Context(context) = &self.target else { return Err(CudnnError::NoEngine) };
        let pack = Descriptor::new(self.functions, kind::VARIANT_PACK)?;
        pack.set(attribute::VARIANT_PACK_IDS, &plan.operands)?;
        pack.set(attribute::VARIANT_PACK_ADDRESSES, &addresses.map(Address))?;
        pack.set(attribute::VARIANT_PACK_WORKSPACE, &[Address(workspace)])?;
        let pack = pack.finalise()?;
        let context = context.lock();
        // SAFETY: see above; the stream is live, and no other thread sets another one before the call.
        unsafe {
            self.functions.check_status((self.functions.set_stream)(context.raw, queue.raw().cast()))?;
            self.functions.check_status((self.functions.execute)(context.raw, plan.plan.raw, pack.raw))
        }
    }
}
