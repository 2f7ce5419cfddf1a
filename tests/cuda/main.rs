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

struct Question {
    what: String,
    op: Op,
    inputs: Vec<Fact>,
    outputs: Vec<Fact>,
    want: Result<Vec<Tensor>, KernelError>,
    case: Case,
}

/// `None` if the op has no launch plan.
fn question(what: &str, op: &Op, inputs: &[Tensor]) -> Option<Question> {
    let facts = facts_of(inputs);
    let outputs = rule(op).infer(&facts.iter().collect::<Vec<_>>()).ok()?;
    let layouts = |facts: &[Fact]| facts.iter().map(TensorLayout::of).collect::<Vec<_>>();
    let launch_plan = LaunchPlan::new(op, &layouts(&facts), &layouts(&outputs))?;
    let want = reference(op, inputs, &outputs);
    let sizes = outputs.iter().map(|f| f.bytes().unwrap() as usize).collect();
    let case = Case { launch_plan, inputs: inputs.iter().map(|t| t.bytes().to_vec()).collect(), outputs: sizes };
    Some(Question { what: what.to_string(), op: op.clone(), inputs: facts, outputs, want, case })
}

/// Relative error norm; infinite if only one has a NaN or infinity.
fn distance(got: &Tensor, want: &Tensor) -> f64 {
    let (mut apart, mut all) = (0.0, 0.0);
    for (g, w) in got.to_f64().into_iter().zip(want.to_f64()) {
        if g == w || (g.is_nan() && w.is_nan()) {
            all += if w.is_finite() { w * w } else { 0.0 };
            continue;
        }
        apart += (g - w) * (g - w);
        all += w * w;
    }
    if apart == 0.0 { 0.0 } else { (apart / all).sqrt() }
}

fn judge(question: &Question, got: Result<Vec<Vec<u8>>, KernelError>) {
    let what = &question.what;
    let (want, got) = match (&question.want, got) {
        (Ok(want), Ok(got)) => (want, got),
        (Err(want), Err(got)) => return assert_eq!(want, &got, "{what}"),
        (Ok(_), Err(error)) => panic!("{what}: {error}"),
        (Err(error), Ok(_)) => panic!("{what}: no error, but {error}"),
    };
    let outputs: Vec<&[u8]> = got.iter().map(Vec::as_slice).collect();
    for (i, (got, want)) in tensors(&question.outputs, &outputs).iter().zip(want).enumerate() {
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
        let far = distance(got, want);
        assert!(far <= limit, "{what}, output {i} is {far:e} away:\n{:?}\n{:?}", got.to_f64(), want.to_f64());
    }
}

const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::Bf16];

fn questions() -> Vec<Question> {
    let samples = samples();
    let asked = samples.iter().flat_map(|sample| FLOATS.map(|dtype| (sample, dtype)));
    let has_type =
        |sample: &Sample, dtype| dtype == DType::F32 || sample.inputs.iter().any(|tensor| tensor.dtype() == DType::F32);
    let asked: Vec<_> = asked.filter(|(sample, dtype)| has_type(sample, *dtype)).collect();
    let of_samples = on_all_cores(&asked, |(sample, dtype)| {
        let what = format!("{}: {} ({dtype})", rule(&sample.op).name(), sample.title);
        question(&what, &sample.op, &in_type(&sample.inputs, *dtype))
    });
    let is_without = |(sample, _): &(&Sample, DType)| sample.inputs.iter().all(|tensor| !tensor.bytes().is_empty());
    let without = asked.iter().zip(&of_samples).filter(|(asked, made)| made.is_none() && is_without(asked));
    let without: BTreeSet<&str> = without.map(|((sample, _), _)| rule(&sample.op).name()).collect();
    println!("without a launch_plan: {}", without.into_iter().collect::<Vec<_>>().join(", "));
    let large = large::cases();
    let large: Vec<_> = large.iter().flat_map(|case| FLOATS.map(|dtype| (case, dtype))).collect();
    let large = on_all_cores(&large, |((op, inputs), dtype)| {
        let inputs = in_type(inputs, *dtype);
        let shapes: Vec<&[usize]> = inputs.iter().map(Tensor::shape).collect();
        question(&format!("{op:?} of {shapes:?} ({dtype})"), op, &inputs)
    });
    let attention = FLOATS.into_iter().flat_map(attention::questions);
    of_samples.into_iter().flatten().chain(attention).chain(large.into_iter().flatten()).collect()
}

/// Maps a list on all cores, in order.
fn on_all_cores<T: Sync, R: Send>(list: &[T], map: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let work = || {
        let numbers = std::iter::repeat_with(|| next.fetch_add(1, Ordering::Relaxed));
        numbers.map_while(|at| Some((at, map(list.get(at)?)))).collect::<Vec<_>>()
    };
    let mut made: Vec<(usize, R)> = thread::scope(|scope| {
        let threads = thread::available_parallelism().map_or(1, NonZero::get);
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    made.sort_by_key(|(at, _)| *at);
    made.into_iter().map(|(_, made)| made).collect()
}

#[test]
fn every_sample_gives_what_the_reference_gives() {
    let Some(compiler) = crate::support::emulator::compiler() else {
        println!("skipped: no C++ compiler");
        return;
    };
    let questions = questions();
    let cases: Vec<Case> = questions
        .iter()
        .map(|q| Case {
            launch_plan: q.case.launch_plan.clone(),
            inputs: q.case.inputs.clone(),
            outputs: q.case.outputs.clone(),
        })
        .collect();
    let played = crate::support::emulator::play(compiler, &cases);
    println!("{} cases", cases.len());
    for (question, played) in questions.iter().zip(played) {
        judge(question, played.fault.error().map_or(Ok(played.outputs), Err));
    }
}

#[test]
fn a_gpu_gives_what_the_reference_gives() {
    if gpu::count() == 0 {
        println!("skipped: no GPU");
        return;
    }
    let device = open("cuda:0").unwrap();
    let questions = questions();
    let kernel = |q: &Question| device.kernel(&q.op, &q.inputs, &q.outputs).ok();
    let kernels: Vec<_> = questions.iter().filter_map(kernel).collect();
    // A kernel that does not compile fails its own question.
    let _ = device.load(&kernels.iter().map(|kernel| &**kernel).collect::<Vec<_>>());
    // Every sample that differs is printed, not only the first one.
    let differs = |question: &&Question| {
        let differs = catch_unwind(AssertUnwindSafe(|| ask(&*device, question))).is_err();
        if differs {
            println!("differs: {}", question.what);
        }
        differs
    };
    let differing = questions.iter().filter(differs).count();
    println!("{} samples on {}, {differing} differ", questions.len(), device.info().model);
    assert_eq!(differing, 0);
}

/// Runs a sample on a device, and compares it with the reference.
fn ask(device: &dyn Device, question: &Question) {
    let (what, case) = (&question.what, &question.case);
    let stream = device.stream().unwrap();
    let kernel = device.kernel(&question.op, &question.inputs, &question.outputs).unwrap();
    let filled = |bytes: usize| device.upload(&vec![0xff; bytes]).unwrap();
    let inputs: Vec<Buffer> = case.inputs.iter().map(|bytes| device.upload(bytes).unwrap()).collect();
    let mut outputs: Vec<Buffer> = case.outputs.iter().map(|bytes| filled(*bytes)).collect();
    let mut workspace = filled(kernel.workspace());
    let regions: Vec<_> = inputs.iter().map(Buffer::region).collect();
    let mut written: Vec<_> = outputs.iter_mut().map(Buffer::region_mut).collect();
    stream.run(&*kernel, &regions, &mut written, workspace.region_mut(), OutputMode::Overwrite).unwrap();
    let got = match stream.finish() {
        Ok(()) => Ok(outputs.iter().map(|output| output.download().unwrap().into_owned()).collect()),
        Err(DeviceError::Kernel(error)) => Err(error),
        Err(error) => panic!("{what}: {error}"),
    };
    judge(question, got);
}

/// Runs a test on a simulated GPU, and returns how often a library computed and how many launches ran.
fn on_simulated_gpu(test: &str, variables: &[(&str, &str)]) -> Option<(u64, u64)> {
    let folder = tempfile::tempdir().unwrap();
    let stats = folder.path().join("stats.json");
    let mut command = on_simulated_gpus(std::env::current_exe().unwrap(), driver()?);
    command.args(["--exact", test]).env("PIPEC_SIM_STATS", &stats);
    let done = command.envs(variables.iter().copied()).output().unwrap();
    let text = String::from_utf8_lossy(&done.stdout).into_owned() + &String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success() && text.contains("1 passed"), "{test}, {variables:?}: {text}");
    let stats: Value = serde_json::from_str(&fs::read_to_string(stats).unwrap()).unwrap();
    let count = |name: &str| stats[name].as_u64().unwrap();
    Some((count("library_products"), count("launches")))
}
