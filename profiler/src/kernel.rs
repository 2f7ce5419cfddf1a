//! Measures the time of one kernel.
//!
//! In training, other kernels touch other tensors between two runs of a kernel, so its own may have left the caches.
//! Here a kernel cycles over copies of its tensors, which together are as large as the model's footprint, up to twice
//! the last-level cache. Tensors of a small model then stay cached, as in training, and those of a large one do not.

use crate::cache::Time;
use compiler::graph::Graph;
use compiler::op::table::{attributes, rule};
use compiler::op::{BatchScatterAdd, NodeId, Op, ScatterAdd};
use compiler::tensor::Tensor;
use compiler::tensor::fact::Fact;
use runtime::data::mix;
use runtime::device::api::{Device, Kernel, OutputMode, Stream};
use runtime::device::buffer::Buffer;
use runtime::device::error::DeviceError;
use runtime::device::region::{Region, RegionMut};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Minimum length of a sample, as a multiple of the resolution of the clock.
const SAMPLE: u32 = 600;

const MOST_RUNS_A_SAMPLE: usize = 256;

/// Length of the value pattern of input tensors; a prime, so that rows differ.
const PATTERN: usize = 65_521;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Runs {
    /// Warm-up runs; at least one is made.
    pub warmup: u32,
    /// Samples, limited by `budget`. At least three are taken, or one if a run takes longer than the budget.
    pub samples: u32,
    pub seed: u64,
    /// Maximum bytes of all tensor copies; there is at least one copy.
    pub rotation_bytes: usize,
    pub budget: Duration,
}

/// A kernel to measure: an op with static shapes.
#[derive(Clone, Debug)]
pub struct Subject {
    pub op: Op,
    pub inputs: Vec<Fact>,
    pub outputs: Vec<Fact>,
}

impl Subject {
    pub fn of(graph: &Graph, id: NodeId) -> Subject {
        let inputs = graph.inputs(id).iter().map(|v| graph.fact(*v).clone()).collect();
        Subject { op: graph.node(id).op.clone(), inputs, outputs: graph.node(id).facts.clone() }
    }

    /// Cache key: op, attributes, and tensor types and shapes. Equal keys mean equal kernels.
    pub fn key(&self) -> String {
        let facts = |facts: &[Fact]| facts.iter().map(Fact::to_string).collect::<Vec<_>>().join(" ");
        let attributes = serde_json::Value::Object(attributes(&self.op));
        format!("{} {attributes} {} -> {}", rule(&self.op).name(), facts(&self.inputs), facts(&self.outputs))
    }

    /// The device's kernel of the op.
    pub fn kernel(&self, device: &dyn Device) -> Result<Arc<dyn Kernel>, DeviceError> {
        device.kernel(&self.op, &self.inputs, &self.outputs)
    }

    pub fn bytes(&self) -> u64 {
        let sizes = self.inputs.iter().chain(&self.outputs).map(|f| f.bytes().unwrap_or(u64::MAX));
        sizes.fold(0, u64::saturating_add)
    }
}

/// Number of copies of tensors of `bytes` bytes that together have about `rotation_bytes`.
pub fn copies(device: &dyn Device, rotation_bytes: usize, bytes: usize) -> usize {
    // On a GPU, starting a kernel takes longer than reading tensors that are small enough for this limit to matter.
    let limit = if device.is_asynchronous() { 64 } else { 1 << 16 };
    (rotation_bytes / bytes.max(1)).clamp(1, limit)
}

struct Copy {
    inputs: Vec<Buffer>,
    outputs: Vec<Buffer>,
}

/// Inputs and outputs of one copy.
type Sides<'a> = (Vec<Region<'a>>, Vec<RegionMut<'a>>);

/// Measures a kernel of a device on valid random inputs. The tensors must fit in memory.
pub fn time(subject: &Subject, device: &dyn Device, kernel: &dyn Kernel, runs: &Runs) -> Result<Time, DeviceError> {
    let stream = device.stream()?;
    let size = subject.bytes() as usize;
    let count = copies(device, runs.rotation_bytes, size);
    let patterns: Vec<Tensor> = (0..subject.inputs.len()).map(|slot| pattern(subject, slot, runs.seed)).collect();
    let copy = |_| -> Result<Copy, DeviceError> {
        let inputs = subject.inputs.iter().zip(&patterns);
        let inputs = inputs.map(|(fact, pattern)| upload_pattern(device, &*stream, fact, pattern));
        let outputs = subject.outputs.iter().map(|fact| device.allocate(size_of(fact)));
        Ok(Copy { inputs: inputs.collect::<Result<_, _>>()?, outputs: outputs.collect::<Result<_, _>>()? })
    };
    let mut copies: Vec<Copy> = (0..count).map(copy).collect::<Result<_, _>>()?;
    let mut sides: Vec<Sides<'_>> = copies
        .iter_mut()
        .map(|c| {
            (c.inputs.iter().map(Buffer::region).collect(), c.outputs.iter_mut().map(Buffer::region_mut).collect())
        })
        .collect();
    let mut workspace = device.allocate(kernel.workspace())?;
    let mut next = 0;
    let run = |times: usize| -> Result<Duration, DeviceError> {
        let start = stream.timestamp()?;
        for _ in 0..times {
            let (inputs, outputs) = &mut sides[next];
            stream.run(kernel, inputs, outputs, workspace.region_mut(), OutputMode::Overwrite)?;
            next += 1;
            if next == count {
                next = 0;
            }
        }
        stream.timestamp()?.since(&start)
    };
    let time = sample(run, stream.timestamp_resolution(), runs)?;
    stream.finish()?;
    Ok(time)
}

/// Measures one run; `run(n)` makes n runs and returns their time, up to `resolution`.
pub fn sample<E>(
    mut run: impl FnMut(usize) -> Result<Duration, E>,
    resolution: Duration,
    runs: &Runs,
) -> Result<Time, E> {
    let start = Instant::now();
    let mut single = run(1)?;
    for _ in 1..runs.warmup {
        if start.elapsed() > runs.budget {
            break;
        }
        single = single.min(run(1)?);
    }
    let sample_length = (SAMPLE * resolution).as_nanos();
    let batch = sample_length.div_ceil(single.as_nanos().max(1)).clamp(1, MOST_RUNS_A_SAMPLE as u128) as usize;
    let fewest = if single > runs.budget { 1 } else { runs.samples.min(3) };
    let mut samples = Vec::new();
    while samples.len() < runs.samples.max(1) as usize {
        if samples.len() >= fewest as usize && start.elapsed() > runs.budget {
            break;
        }
        samples.push(run(batch)?.as_nanos() as u64 * 1000 / batch as u64);
    }
    Ok(summarize(samples))
}

pub fn summarize(mut picoseconds: Vec<u64>) -> Time {
    picoseconds.sort_unstable();
    let count = picoseconds.len();
    if count == 0 {
        return Time::default();
    }
    let median = (picoseconds[(count - 1) / 2] + picoseconds[count / 2]) / 2;
    let (low, high) = (picoseconds[(count - 1) / 4], picoseconds[(count - 1) - (count - 1) / 4]);
    Time { median_ps: median, spread_ps: high - low }
}

fn size_of(fact: &Fact) -> usize {
    fact.bytes().unwrap_or(0) as usize
}

fn upload_pattern(
    device: &dyn Device,
    stream: &dyn Stream,
    fact: &Fact,
    pattern: &Tensor,
) -> Result<Buffer, DeviceError> {
    let mut buffer = device.allocate(size_of(fact))?;
    let source = pattern.bytes();
    stream.upload_with(buffer.region_mut(), &mut |bytes| {
        for part in bytes.chunks_mut(source.len().max(1)) {
            part.copy_from_slice(&source[..part.len()]);
        }
    })?;
    Ok(buffer)
}

/// Input values: floats in 0.25 to 1.25, where every op is defined; integers are valid indices.
fn pattern(subject: &Subject, slot: usize, seed: u64) -> Tensor {
    let fact = &subject.inputs[slot];
    let count = (size_of(fact) / fact.dtype.size()).min(PATTERN);
    let draw = |i: usize| mix(mix(seed ^ mix(slot as u64)) ^ i as u64);
    if fact.dtype.is_float() {
        let uniform = |i| 0.25 + (draw(i) >> 11) as f64 / (1u64 << 53) as f64;
        return Tensor::from_f64(&[count], &(0..count).map(uniform).collect::<Vec<_>>()).cast(fact.dtype);
    }
    // Narrow integer types hold no larger index.
    let largest = match fact.dtype.size() {
        1 => i64::from(i8::MAX),
        2 => i64::from(i16::MAX),
        4 => i64::from(i32::MAX),
        _ => i64::MAX,
    };
    let limit = limit(subject, slot).clamp(1, largest) as u64;
    Tensor::from_i64(&[count], &(0..count).map(|i| (draw(i) % limit) as i64).collect::<Vec<_>>()).cast(fact.dtype)
}

/// Exclusive upper limit of an integer input.
fn limit(subject: &Subject, slot: usize) -> i64 {
    let size = |input: usize, axis: usize| subject.inputs[input].shape[axis].known().unwrap_or(1);
    match (&subject.op, slot) {
        (Op::Gather(op), 1) => size(0, op.axis),
        (Op::Scatter(op), 1) => size(0, op.axis),
        (Op::BatchGather(op), 1) => size(0, op.batch),
        (Op::ScatterAdd(ScatterAdd { size, .. }) | Op::BatchScatterAdd(BatchScatterAdd { size, .. }), 1) => {
            size.known().unwrap_or(1)
        }
        (Op::CrossEntropy(op), 1) => size(0, op.axis),
        (Op::CrossEntropyGrad(op), 2) => size(1, op.axis),
        _ => 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use compiler::op::table::samples;
    use runtime::device::cpu::device::cpu;

    #[test]
    fn every_op_has_values_that_it_admits() {
        let runs = Runs { warmup: 1, samples: 3, seed: 1, rotation_bytes: 1 << 12, budget: Duration::from_millis(20) };
        for sample in samples() {
            let inputs: Vec<Fact> = sample.inputs.iter().map(|t| Fact::of(t.dtype(), t.shape())).collect();
            let outputs = rule(&sample.op).infer(&inputs.iter().collect::<Vec<_>>()).unwrap();
            let subject = Subject { op: sample.op, inputs, outputs };
            let empty = subject.inputs.iter().chain(&subject.outputs).any(|f| f.bytes() == Some(0));
            let device = cpu();
            let kernel = subject.kernel(&*device).unwrap();
            let time = time(&subject, &*device, &*kernel, &runs);
            let time = time.unwrap_or_else(|e| panic!("{} {}: {e}", subject.key(), sample.title));
            assert!(time.median_ps > 0 || empty, "{}", subject.key());
        }
    }

    #[test]
    fn the_summary_is_the_median_and_the_middle_half() {
        assert_eq!(summarize(vec![5, 1, 4, 2, 3]), Time { median_ps: 3, spread_ps: 2 });
        assert_eq!(summarize(vec![7]), Time { median_ps: 7, spread_ps: 0 });
        assert_eq!(summarize(Vec::new()), Time::default());
    }
}
