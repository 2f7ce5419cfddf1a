//! CUDA kernels on a machine without a GPU: every op sample runs on the CPU from the same source, geometry and
//! arguments, and must match the reference. A GPU is tested too if there is one.

mod attention;
mod compile;
mod convolutions;
mod gradients;
mod large;
mod many;
mod products;
mod scattered_sums;
mod tails;

#[path = "../support/mod.rs"]
mod support;

use crate::support::emulator::Case;
use crate::support::reference::{facts_of, in_type, reference, tensors};
use crate::support::simulated_gpus::{driver, on_simulated_gpus};
use compiler::op::table::{rule, samples};
use compiler::op::*;
use compiler::tensor::fact::Fact;
use compiler::tensor::{DType, Tensor};
use runtime::device::api::{Device, OutputMode};
use runtime::device::buffer::Buffer;
use runtime::device::cuda::gpu;
use runtime::device::cuda::launch_plan::LaunchPlan;
use runtime::device::error::DeviceError;
use runtime::device::layout::TensorLayout;
use runtime::device::open;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::num::NonZero;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

struct KernelTest {
    what: String,
    op: Op,
    inputs: Vec<Fact>,
    outputs: Vec<Fact>,
    want: Result<Vec<Tensor>, KernelError>,
    case: Case,
}

/// `None` if the op has no launch plan.
fn kernel_test(what: &str, op: &Op, inputs: &[Tensor]) -> Option<KernelTest> {
    let facts = facts_of(inputs);
    let outputs = rule(op).infer(&facts.iter().collect::<Vec<_>>()).ok()?;
    let layouts = |facts: &[Fact]| facts.iter().map(TensorLayout::of).collect::<Vec<_>>();
    let launch_plan = LaunchPlan::new(op, &layouts(&facts), &layouts(&outputs))?;
    let want = reference(op, inputs, &outputs);
    let sizes = outputs.iter().map(|f| f.bytes().unwrap() as usize).collect();
    let case = Case { launch_plan, inputs: inputs.iter().map(|t| t.bytes().to_vec()).collect(), outputs: sizes };
    Some(KernelTest { what: what.to_string(), op: op.clone(), inputs: facts, outputs, want, case })
}

/// Relative error norm; infinite if only one has a NaN or infinity.
fn distance(got: &Tensor, want: &Tensor) -> f64 {
    let (mut error, mut norm) = (0.0, 0.0);
    for (g, w) in got.to_f64().into_iter().zip(want.to_f64()) {
        if g == w || (g.is_nan() && w.is_nan()) {
            norm += if w.is_finite() { w * w } else { 0.0 };
            continue;
        }
        error += (g - w) * (g - w);
        norm += w * w;
    }
    if error == 0.0 { 0.0 } else { (error / norm).sqrt() }
}

fn compare(kernel_test: &KernelTest, got: Result<Vec<Vec<u8>>, KernelError>) {
    let what = &kernel_test.what;
    let (want, got) = match (&kernel_test.want, got) {
        (Ok(want), Ok(got)) => (want, got),
        (Err(want), Err(got)) => return assert_eq!(want, &got, "{what}"),
        (Ok(_), Err(error)) => panic!("{what}: {error}"),
        (Err(error), Ok(_)) => panic!("{what}: no error, but {error}"),
    };
    let outputs: Vec<&[u8]> = got.iter().map(Vec::as_slice).collect();
    for (i, (got, want)) in tensors(&kernel_test.outputs, &outputs).iter().zip(want).enumerate() {
        if !got.dtype().is_float() {
            assert!(got.bytes() == want.bytes(), "{what}, output {i}: {:?} is not {:?}", got.to_i64(), want.to_i64());
            continue;
        }
        let limit = match got.dtype() {
            DType::F64 => 1e-12,
            DType::F32 => 2e-5,
            DType::F16 => 2e-3,
            _ => 1e-2,
        };
        let relative = distance(got, want);
        assert!(relative <= limit, "{what}, output {i} is {relative:e} away:\n{:?}\n{:?}", got.to_f64(), want.to_f64());
    }
}

const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::Bf16];

fn kernel_tests() -> Vec<KernelTest> {
    let samples = samples();
    let typed_samples = samples.iter().flat_map(|sample| FLOATS.map(|dtype| (sample, dtype)));
    let has_type =
        |sample: &Sample, dtype| dtype == DType::F32 || sample.inputs.iter().any(|tensor| tensor.dtype() == DType::F32);
    let typed_samples: Vec<_> = typed_samples.filter(|(sample, dtype)| has_type(sample, *dtype)).collect();
    let sample_tests = on_all_cores(&typed_samples, |(sample, dtype)| {
        let what = format!("{}: {} ({dtype})", rule(&sample.op).name(), sample.title);
        kernel_test(&what, &sample.op, &in_type(&sample.inputs, *dtype))
    });
    let is_without = |(sample, _): &(&Sample, DType)| sample.inputs.iter().all(|tensor| !tensor.bytes().is_empty());
    let without = typed_samples
        .iter()
        .zip(&sample_tests)
        .filter(|(typed_samples, test)| test.is_none() && is_without(typed_samples));
    let without: BTreeSet<&str> = without.map(|((sample, _), _)| rule(&sample.op).name()).collect();
    println!("without a launch_plan: {}", without.into_iter().collect::<Vec<_>>().join(", "));
    let large = large::cases();
    let large: Vec<_> = large.iter().flat_map(|case| FLOATS.map(|dtype| (case, dtype))).collect();
    let large = on_all_cores(&large, |((op, inputs), dtype)| {
        let inputs = in_type(inputs, *dtype);
        let shapes: Vec<&[usize]> = inputs.iter().map(Tensor::shape).collect();
        kernel_test(&format!("{op:?} of {shapes:?} ({dtype})"), op, &inputs)
    });
    let attention = FLOATS.into_iter().flat_map(attention::kernel_tests);
    sample_tests.into_iter().flatten().chain(attention).chain(large.into_iter().flatten()).collect()
}

/// Maps a list on all cores, in order.
fn on_all_cores<T: Sync, R: Send>(list: &[T], map: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let work = || {
        let numbers = std::iter::repeat_with(|| next.fetch_add(1, Ordering::Relaxed));
        numbers.map_while(|at| Some((at, map(list.get(at)?)))).collect::<Vec<_>>()
    };
    let mut results: Vec<(usize, R)> = thread::scope(|scope| {
        let threads = thread::available_parallelism().map_or(1, NonZero::get);
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    results.sort_by_key(|(at, _)| *at);
    results.into_iter().map(|(_, result)| result).collect()
}

#[test]
fn every_sample_gives_what_the_reference_gives() {
    let Some(compiler) = crate::support::emulator::compiler() else {
        println!("skipped: no C++ compiler");
        return;
    };
    let kernel_tests = kernel_tests();
    let cases: Vec<Case> = kernel_tests
        .iter()
        .map(|q| Case {
            launch_plan: q.case.launch_plan.clone(),
            inputs: q.case.inputs.clone(),
            outputs: q.case.outputs.clone(),
        })
        .collect();
    let results = crate::support::emulator::play(compiler, &cases);
    println!("{} cases", cases.len());
    for (kernel_test, result) in kernel_tests.iter().zip(results) {
        compare(kernel_test, result.fault.error().map_or(Ok(result.outputs), Err));
    }
}

#[test]
fn a_gpu_gives_what_the_reference_gives() {
    if gpu::count() == 0 {
        println!("skipped: no GPU");
        return;
    }
    let device = open("cuda:0").unwrap();
    let kernel_tests = kernel_tests();
    let kernel = |q: &KernelTest| device.kernel(&q.op, &q.inputs, &q.outputs).ok();
    let kernels: Vec<_> = kernel_tests.iter().filter_map(kernel).collect();
    // A kernel that does not compile fails its own question.
    let _ = device.load(&kernels.iter().map(|kernel| &**kernel).collect::<Vec<_>>());
    // Every sample that differs is printed, not only the first one.
    let differs = |kernel_test: &&KernelTest| {
        let differs = catch_unwind(AssertUnwindSafe(|| run_test(&*device, kernel_test))).is_err();
        if differs {
            println!("differs: {}", kernel_test.what);
        }
        differs
    };
    let differing = kernel_tests.iter().filter(differs).count();
    println!("{} samples on {}, {differing} differ", kernel_tests.len(), device.info().model);
    assert_eq!(differing, 0);
}

/// Runs a sample on a device, and compares it with the reference.
fn run_test(device: &dyn Device, kernel_test: &KernelTest) {
    let (what, case) = (&kernel_test.what, &kernel_test.case);
    let stream = device.stream().unwrap();
    let kernel = device.kernel(&kernel_test.op, &kernel_test.inputs, &kernel_test.outputs).unwrap();
    let upload_filled = |bytes: usize| device.upload(&vec![0xff; bytes]).unwrap();
    let inputs: Vec<Buffer> = case.inputs.iter().map(|bytes| device.upload(bytes).unwrap()).collect();
    let mut outputs: Vec<Buffer> = case.outputs.iter().map(|bytes| upload_filled(*bytes)).collect();
    let mut workspace = upload_filled(kernel.workspace());
    let regions: Vec<_> = inputs.iter().map(Buffer::region).collect();
    let mut output_regions: Vec<_> = outputs.iter_mut().map(Buffer::region_mut).collect();
    stream.run(&*kernel, &regions, &mut output_regions, workspace.region_mut(), OutputMode::Overwrite).unwrap();
    let got = match stream.finish() {
        Ok(()) => Ok(outputs.iter().map(|output| output.download().unwrap().into_owned()).collect()),
        Err(DeviceError::Kernel(error)) => Err(error),
        Err(error) => panic!("{what}: {error}"),
    };
    compare(kernel_test, got);
}

/// Runs a test on a simulated GPU, and returns how often a library computed and how many launches ran.
fn on_simulated_gpu(test: &str, variables: &[(&str, &str)]) -> Option<(u64, u64)> {
    let folder = tempfile::tempdir().unwrap();
    let stats = folder.path().join("stats.json");
    let mut command = on_simulated_gpus(std::env::current_exe().unwrap(), driver()?);
    command.args(["--exact", test]).env("PIPEC_SIM_STATS", &stats);
    let output = command.envs(variables.iter().copied()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{test}, {variables:?}: {text}");
    let stats: Value = serde_json::from_str(&fs::read_to_string(stats).unwrap()).unwrap();
    let count = |name: &str| stats[name].as_u64().unwrap();
    Some((count("library_products"), count("launches")))
}
