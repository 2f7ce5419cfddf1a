//! Measures one optimizer step over a parameter. SGD with momentum reads weight, gradient and momentum, and writes
//! weight and momentum. Times of other optimizers are derived from the bytes that they read and write.

use crate::cache::Time;
use crate::kernel::{Runs, copies, sample};
use compiler::graph::{Graph, order};
use compiler::op::{Op, Value};
use compiler::pass::attribution::Attribution;
use compiler::tensor::DType;
use runtime::device::api::{Device, ParameterUpdate, WeightRegions};
use runtime::device::buffer::Buffer;
use runtime::device::error::DeviceError;
use runtime::device::optimizer::{StepArgs, UpdateRule};
use std::collections::HashMap;
use std::time::Duration;

/// The factors do not affect the time, but values must stay in the normal range.
const RULE: UpdateRule = UpdateRule::Sgd { learning_rate: 1e-6, momentum: 0.5, nesterov: false, weight_decay: 0.0 };

pub type Size = (DType, u64);

/// For each op, the parameters that it is the first to read.
pub fn parameters(graph: &Graph, attribution: &Attribution) -> Vec<Vec<Size>> {
    let op_index: HashMap<_, _> = attribution.ops.iter().enumerate().map(|(index, id)| (*id, index)).collect();
    let mut sizes = vec![Vec::new(); attribution.ops.len()];
    for id in order::canonical(graph) {
        let Op::Parameter(_) = graph.node(id).op else { continue };
        let value = Value { node: id, output: 0 };
        let first = graph.consumers(value).iter().filter_map(|(node, _)| op_index.get(node)).min().copied();
        let fact = graph.fact(value);
        if let (Some(first), Some(bytes)) = (first, fact.bytes().filter(|_| fact.dtype.is_float())) {
            // Two-byte weights are stepped through their f32 master copies.
            let is_narrow = fact.dtype.size() == 2;
            sizes[first].push(if is_narrow { (DType::F32, bytes * 2) } else { (fact.dtype, bytes) });
        }
    }
    sizes
}

pub fn time((dtype, bytes): Size, device: &dyn Device, runs: &Runs) -> Result<Time, DeviceError> {
    let stream = device.stream()?;
    let copies = copies(device, runs.rotation_bytes, 3 * bytes as usize);
    let copy = |_| {
        let tensor = || device.allocate(bytes as usize);
        Ok([tensor()?, tensor()?, tensor()?])
    };
    let mut buffers: Vec<[Buffer; 3]> = (0..copies).map(copy).collect::<Result<_, DeviceError>>()?;
    let mut next = 0;
    let mut step = || -> Result<(), DeviceError> {
        let [weight, gradient, momentum] = &mut buffers[next];
        let args = StepArgs { dtype, scale: 1.0, step: 1, rate: 1.0 };
        let weights = WeightRegions::InPlace(weight.region_mut());
        let (gradient, state) = (gradient.region(), vec![momentum.region_mut()]);
        stream.optimizer_step(&RULE, vec![ParameterUpdate { args, weights, gradient, state, rounded: None }])?;
        next = (next + 1) % copies;
        Ok(())
    };
    let run = |times: usize| -> Result<Duration, DeviceError> {
        let start = stream.timestamp()?;
        (0..times).try_for_each(|_| step())?;
        stream.timestamp()?.since(&start)
    };
    let time = sample(run, stream.timestamp_resolution(), runs)?;
    stream.finish()?;
    Ok(time)
}

#[cfg(test)]
mod tests {
    use super::*;
    use runtime::device::cpu::device::cpu;

    #[test]
    fn more_bytes_take_longer() {
        let runs = Runs { warmup: 1, samples: 9, seed: 0, rotation_bytes: 1 << 22, budget: Duration::from_millis(50) };
        let [few, many] = [1 << 12, 1 << 22].map(|bytes| time((DType::F32, bytes), &*cpu(), &runs).unwrap().median_ps);
        assert!(0 < few && 20 * few < many, "{few} and {many} ps");
    }
}
