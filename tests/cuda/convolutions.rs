//! Convolutions by cuDNN, and by pipec's kernels where it is missing, on a GPU if there is one. On other machines the
//! simulated library and driver run the same tests, and a real cuDNN makes plans for GPUs that are not there.

use super::{KernelTest, distance, kernel_test, on_simulated_gpu, run_test};
use crate::support::reference::in_type;
use compiler::graph::bind::bind;
use compiler::import::import::{Batch, Options, load};
use compiler::op::table::{rule, samples};
use compiler::op::*;
use compiler::tensor::dim::Bindings;
use compiler::tensor::fact::Fact;
use compiler::tensor::{DType, Tensor};
use models::zoo;
use runtime::device::api::{Device, OutputMode};
use runtime::device::buffer::Buffer;
use runtime::device::cuda::cudnn::{Convolution, Cudnn};
use runtime::device::cuda::device::CudaKernel;
use runtime::device::cuda::gpu;
use runtime::device::layout::TensorLayout;
use runtime::device::open;
use serde_json::{Value, json};
use std::any::Any;
use std::collections::HashSet;
use std::fs;
use std::sync::Arc;

const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::Bf16];

/// Samples per batch of the models that plans are made for.
const BATCH: i64 = 32;

fn device() -> Option<Arc<dyn Device>> {
    if gpu::count() == 0 {
        println!("skipped: no GPU");
        return None;
    }
    Some(open("cuda:0").unwrap())
}

fn is_convolution(op: &Op) -> bool {
    matches!(op, Op::Conv(_) | Op::ConvInputGrad(_) | Op::ConvWeightGrad(_))
}

/// The three ops of a convolution, with their input shapes.
fn with_gradients(op: &Conv, x: &[usize], w: &[usize]) -> Vec<(Op, [Vec<usize>; 2])> {
    let facts = [x, w].map(|shape| Fact::of(DType::F32, shape));
    let y = rule(&Op::Conv(op.clone())).infer(&[&facts[0], &facts[1]]).unwrap()[0].concrete().unwrap();
    let (window, groups) = (op.window.clone(), op.groups);
    let input_grad = ConvInputGrad { window: window.clone(), groups, spatial: facts[0].shape[2..].to_vec() };
    let weight_grad = ConvWeightGrad { window, groups, kernel: w[2..].to_vec() };
    vec![
        (Op::Conv(op.clone()), [x.to_vec(), w.to_vec()]),
        (Op::ConvInputGrad(input_grad), [y.clone(), w.to_vec()]),
        (Op::ConvWeightGrad(weight_grad), [y, x.to_vec()]),
    ]
}

/// Values between -1 and 1.
fn values(shape: &[usize], seed: u64) -> Tensor {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| next()).collect();
    Tensor::from_f32(shape, &values)
}

/// Convolutions with as many channels as tensor cores want.
fn wide_questions() -> Vec<KernelTest> {
    let even = |stride, pad, dilation| Window {
        strides: vec![stride; 2],
        pads_begin: vec![pad; 2],
        pads_end: vec![pad; 2],
        dilations: vec![dilation; 2],
    };
    let cases: [(Window, usize, [usize; 4], [usize; 4]); 6] = [
        (even(1, 1, 1), 1, [2, 32, 12, 12], [48, 32, 3, 3]),
        (even(1, 0, 1), 1, [3, 64, 8, 10], [32, 64, 1, 1]),
        (even(2, 0, 1), 1, [2, 64, 13, 13], [32, 64, 1, 1]),
        (even(2, 3, 1), 1, [2, 3, 30, 30], [32, 3, 7, 7]),
        (even(1, 2, 2), 4, [2, 64, 9, 9], [64, 16, 3, 3]),
        (even(1, 1, 1), 32, [2, 32, 10, 10], [32, 1, 3, 3]),
    ];
    let mut kernel_tests = Vec::new();
    for (window, groups, x, w) in cases {
        for (op, [first, second]) in with_gradients(&Conv { window, groups }, &x, &w) {
            for dtype in DTYPES {
                let inputs = in_type(&[values(&first, 1), values(&second, 2)], dtype);
                kernel_tests.extend(kernel_test(&format!("{op:?} ({dtype})"), &op, &inputs));
            }
        }
    }
    kernel_tests
}

fn sample_questions() -> Vec<KernelTest> {
    let mut kernel_tests = Vec::new();
    for sample in samples().into_iter().filter(|sample| is_convolution(&sample.op)) {
        for dtype in DTYPES {
            let what = format!("{}: {} ({dtype})", rule(&sample.op).name(), sample.title);
            kernel_tests.extend(kernel_test(&what, &sample.op, &in_type(&sample.inputs, dtype)));
        }
    }
    kernel_tests
}

#[test]
fn convolutions_of_all_shapes() {
    let Some(device) = device() else { return };
    let kernel_tests: Vec<KernelTest> = sample_questions().into_iter().chain(wide_questions()).collect();
    kernel_tests.iter().for_each(|kernel_test| run_test(&*device, kernel_test));
    let by_library = kernel_tests.iter().filter(|kernel_test| {
        let kernel = device.kernel(&kernel_test.op, &kernel_test.inputs, &kernel_test.outputs).unwrap();
        (&*kernel as &dyn Any).downcast_ref::<CudaKernel>().unwrap().library(OutputMode::Overwrite).is_some()
    });
    println!("{} of {} convolutions by cuDNN", by_library.count(), kernel_tests.len());
}

#[test]
fn some_convolutions() {
    let Some(device) = device() else { return };
    let pointwise = sample_questions().into_iter().filter(|kernel_test| kernel_test.what.contains("pointwise (f32)"));
    pointwise.for_each(|kernel_test| run_test(&*device, &kernel_test));
}

/// Operands that start one element behind the start of their memory.
#[test]
fn convolutions_that_are_not_aligned() {
    let Some(device) = device() else { return };
    for kernel_test in sample_questions().iter().filter(|kernel_test| kernel_test.what.contains("pointwise (f32)")) {
        let kernel = device.kernel(&kernel_test.op, &kernel_test.inputs, &kernel_test.outputs).unwrap();
        let stream = device.stream().unwrap();
        let upload = |bytes: &[u8]| device.upload(&[&[0xff; 4], bytes].concat()).unwrap();
        let inputs: Vec<Buffer> = kernel_test.case.inputs.iter().map(|bytes| upload(bytes)).collect();
        let regions: Vec<_> = inputs.iter().map(|buffer| buffer.region_of(4..buffer.len())).collect();
        let mut output = upload(&vec![0xff; kernel_test.case.outputs[0]]);
        let mut workspace = device.upload(&vec![0xff; kernel.workspace()]).unwrap();
        let end = output.len();
        let to = output.region_mut().slice(4..end);
        stream.run(&*kernel, &regions, &mut [to], workspace.region_mut(), OutputMode::Overwrite).unwrap();
        stream.finish().unwrap();
        let want = &kernel_test.want.as_ref().unwrap()[0];
        let bytes = output.download().unwrap()[4..].to_vec();
        let got = Tensor::new(want.dtype(), want.shape().to_vec(), bytes.into()).unwrap();
        assert!(distance(&got, want) <= 1e-6, "{}", kernel_test.what);
    }
}

#[test]
fn the_library_computes_convolutions() {
    for variables in [&[][..], &[("PIPEC_SIM_SEED", "3")]] {
        let Some(counts) = on_simulated_gpu("convolutions::convolutions_of_all_shapes", variables) else { return };
        let kernel_tests = sample_questions().len() + wide_questions().len();
        assert_eq!(counts, (kernel_tests as u64, 0));
    }
    assert_eq!(on_simulated_gpu("convolutions::convolutions_that_are_not_aligned", &[]), Some((0, 3)));
}

#[test]
fn without_the_library_own_kernels_compute_convolutions() {
    let Some(counts) = on_simulated_gpu("convolutions::some_convolutions", &[("PIPEC_SIM_CUDNN", "0")]) else {
        return;
    };
    assert_eq!(counts, (0, 3));
}

/// What cuDNN reads about an A100 and an H100, of compute capability 8.0 and 9.0.
fn gpus() -> [(&'static str, Value); 2] {
    let common = json!({
        "maxGridSize": [2_147_483_647, 65535, 65535], "maxBlockSize": [1024, 1024, 64], "regsPerBlock": 65536,
        "smCountOrigin": 0, "warpSize": 32, "maxSharedMemoryPerBlock": 49152, "reservedSharedMemoryPerBlock": 1024,
        "oversizedSharedMemoryPerBlock": 0, "maxRegistersPerSM": 65536, "maxCtasPerSM": 32, "maxThreadsPerBlock": 1024,
        "maxThreadsPerSM": 2048, "isTccDriver": 0, "supportCoopLaunch": 1, "cudaDeviceId": 0, "driverVer": 13000,
        "version": 1
    });
    let with = |properties: Value| {
        let mut merged = common.clone();
        merged.as_object_mut().unwrap().extend(properties.as_object().unwrap().clone());
        merged
    };
    let a100 = json!({
        "deviceName": "NVIDIA A100-SXM4-40GB", "deviceVer": 800, "multiProcessorCount": 108, "pciDeviceId": 0x20b0,
        "maxSharedMemoryPerBlockOptin": 166_912, "totalGlobalMem": 42_505_273_344_u64, "smClockRateKHz": 1_410_000,
        "memClockRateKHz": 1_215_000, "l2CacheSize": 41_943_040
    });
    let h100 = json!({
        "deviceName": "NVIDIA H100 80GB HBM3", "deviceVer": 900, "multiProcessorCount": 132, "pciDeviceId": 0x2330,
        "maxSharedMemoryPerBlockOptin": 232_448, "totalGlobalMem": 85_017_755_648_u64, "smClockRateKHz": 1_980_000,
        "memClockRateKHz": 2_619_000, "l2CacheSize": 52_428_800
    });
    [("sm_80", with(a100)), ("sm_90", with(h100))]
}

/// The convolution of an op, as the library computes it.
fn convolution_of(op: &Op, dtype: DType, inputs: &[Vec<usize>; 2]) -> Convolution {
    let facts = inputs.each_ref().map(|shape| Fact::of(dtype, shape));
    let outputs = rule(op).infer(&[&facts[0], &facts[1]]).unwrap();
    let layouts = |facts: &[Fact]| facts.iter().map(TensorLayout::of).collect::<Vec<_>>();
    Convolution::of(op, &layouts(&facts), &layouts(&outputs)).unwrap()
}

/// All convolutions of training a model of the zoo.
fn convolutions_of(model: &str) -> Vec<(Op, [Vec<usize>; 2])> {
    let structure = zoo::Options { structure: true, ..zoo::Options::default() };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.onnx");
    fs::write(&file, zoo::to_bytes(&zoo::build(model, &structure).unwrap().model)).unwrap();
    let imported = load(&file, &Options::default()).unwrap();
    let Batch::Symbol { name, .. } = imported.batch else { panic!("{model} has a fixed batch") };
    let graph = bind(&imported.graph, &Bindings::from([(name, BATCH)])).unwrap();
    let mut convolutions = Vec::new();
    for node in graph.ids() {
        if let Op::Conv(op) = &graph.node(node).op {
            let shapes: Vec<Vec<usize>> =
                graph.inputs(node).iter().map(|input| graph.fact(*input).concrete().unwrap()).collect();
            convolutions.extend(with_gradients(op, &shapes[0], &shapes[1]));
        }
    }
    convolutions
}

#[test]
fn cudnn_has_plans_for_every_convolution_of_known_models() {
    for (architecture, properties) in gpus() {
        let Some(library) = Cudnn::without_gpu(&properties.to_string()) else {
            println!("skipped: no cuDNN of version 9.8 or later");
            return;
        };
        for model in ["resnet50", "vgg16"] {
            let convolutions = convolutions_of(model);
            assert!(convolutions.len() >= 3 * 13, "{model} has {} convolutions", convolutions.len());
            for dtype in [DType::Bf16, DType::F16, DType::F32] {
                let unique: HashSet<Convolution> =
                    convolutions.iter().map(|(op, inputs)| convolution_of(op, dtype, inputs)).collect();
                let (mut with_tensor_cores, mut workspace) = (0, 0);
                for convolution in &unique {
                    let plan = library.plan(convolution, convolution.workspace_limit());
                    let plan = plan.unwrap_or_else(|error| panic!("{architecture}: {convolution:?}: {error}"));
                    with_tensor_cores += usize::from(plan.uses_tensor_cores);
                    workspace = workspace.max(plan.workspace);
                }
                println!(
                    "{model}, {dtype}, {architecture}: {} plans, {with_tensor_cores} with tensor cores, workspace up to {workspace} bytes",
                    unique.len()
                );
                match dtype {
                    DType::F32 => assert_eq!(with_tensor_cores, 0),
                    // Those of images with three channels may be without.
                    _ => assert!(with_tensor_cores + 3 >= unique.len()),
                }
            }
        }
    }
}
