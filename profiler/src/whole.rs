//! Measures the whole model as one stage, and the time of each op in it.
//!
//! Here an op finds its tensors as the ops before it left them, cached or not. Neighbouring elementwise ops are fused;
//! a chain's time is divided equally among its ops.

use crate::cache::Time;
use crate::kernel::{Runs, summarize};
use compiler::graph::{Graph, Output, order};
use compiler::op::{NodeId, Op};
use compiler::pass::attribution::{Attribution, Training, tag};
use compiler::pass::loss::{LOSS, Loss, TARGET, attach};
use compiler::tensor::Tensor;
use runtime::data::synthetic::synthetic;
use runtime::device::api::{Device, Stream};
use runtime::device::buffer::Buffer;
use runtime::device::error::DeviceError;
use runtime::device::event::Timestamp;
use runtime::exec::compile::compile;
use runtime::exec::compile_error::CompileError;
use runtime::exec::executor::{ExecuteError, Executor, Item};
use runtime::exec::phase::RunPhase;
use runtime::exec::stage_code::{NamedTensor, StageCode};
use runtime::stage::gradients::lend_sums;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Node tag of an added loss, instead of the index of its op.
const STAND_IN: &str = "loss placeholder";

#[derive(Clone, Debug, PartialEq)]
pub struct Times {
    pub whole: [Time; 2],
    /// 5th and 95th percentile of forward plus backward, in picoseconds.
    pub range: [u64; 2],
    /// Forward and backward of every op, in picoseconds.
    pub ops: Vec<[u64; 2]>,
}

impl Times {
    /// Flattens to a list for the cache: the whole, its range, then op by op.
    pub fn list(&self) -> Vec<Time> {
        let ops = self.range.iter().chain(self.ops.iter().flatten());
        self.whole.into_iter().chain(ops.map(|&median_ps| Time { median_ps, spread_ps: 0 })).collect()
    }

    /// Parses a list for the given number of ops.
    pub fn of_list(list: &[Time], ops: usize) -> Option<Times> {
        let ([forward, backward, low, high], op_list) = list.split_first_chunk()?;
        let op_times = op_list.chunks_exact(2).map(|pair| [pair[0].median_ps, pair[1].median_ps]).collect();
        let range = [low.median_ps, high.median_ps];
        (op_list.len() == 2 * ops).then_some(Times { whole: [*forward, *backward], range, ops: op_times })
    }
}

pub struct WholeStep {
    ops: usize,
    pub code: StageCode,
    /// The graph, with a loss if it is trained.
    pub graph: Graph,
}

/// Compiles a graph with static shapes as one stage of a device. If the model ends with an incoming gradient, the squared error of
/// that output is used as loss; a scalar output needs none. `None` if no loss can be attached.
pub fn compile_whole_step(
    graph: &Graph,
    attribution: &Attribution,
    training: Training,
    device: &dyn Device,
) -> Result<Option<WholeStep>, CompileError> {
    let model_nodes: HashSet<NodeId> = graph.ids().collect();
    let mut graph = graph.clone();
    let loss = match (training, attribution.seeded) {
        (Training::Loss(loss, axis), _) => Some((loss, axis)),
        (Training::Gradient, Some(value)) => {
            let name = "the output that is trained".to_string();
            graph.outputs.insert(0, Output { name, value });
            free_target(&mut graph);
            let scalar = graph.fact(value).shape.iter().all(|d| d.is(1));
            Some((if scalar { Loss::Output } else { Loss::Mse }, None))
        }
        _ => None,
    };
    if let Some((loss, axis)) = loss
        && attach(&mut graph, loss, axis).is_err()
    {
        return Ok(None);
    }
    tag(&mut graph, &attribution.ops);
    if attribution.seeded.is_some() {
        for id in graph.ids().filter(|id| !model_nodes.contains(id)).collect::<Vec<_>>() {
            graph.node_mut(id).origin.source = STAND_IN.to_string();
        }
    }
    let stage_of: HashMap<NodeId, usize> = order::executed(&graph).into_iter().map(|id| (id, 0)).collect();
    let code = compile(&graph, &stage_of, 1, loss.map(|_| LOSS), device)?.pop();
    Ok(code.map(|code| WholeStep { ops: attribution.ops.len(), code, graph }))
}

/// Renames a model input with the name of the loss's target input.
fn free_target(graph: &mut Graph) {
    let ids: Vec<NodeId> = graph.ids().collect();
    for id in ids {
        if let Op::Input(input) = &mut graph.node_mut(id).op
            && input.name == TARGET
        {
            input.name = "the model's target".to_string();
        }
    }
}

impl WholeStep {
    /// Bytes that forward and backward touch.
    pub fn footprint(&self) -> usize {
        let code = &self.code;
        let named = code.feeds.iter().chain(&code.parameters).chain(&code.states).map(|n| n.bytes);
        let sums = code.gradient_terms.iter().map(|term| term.address.bytes);
        named.chain([code.arena_bytes, code.kept_bytes]).chain(code.own_bytes.iter().copied()).chain(sums).sum()
    }

    /// Prepares runs on synthetic data. Missing weights are generated. `None` if a kernel rejects the data.
    pub fn prepare(
        &self,
        device: &Arc<dyn Device>,
        weights: &BTreeMap<String, Tensor>,
        seed: u64,
    ) -> Option<(Executor<'_>, Item)> {
        let code = &self.code;
        let initial = |named: &NamedTensor| weights.get(&named.name).filter(|t| t.bytes().len() == named.bytes);
        let upload = |tensor: &Tensor| -> Result<Buffer, DeviceError> { device.upload(tensor.bytes()) };
        let states = code.states.iter().map(|named| match initial(named) {
            Some(tensor) => upload(tensor),
            None => upload(&filled_tensor(named, |_| 1.0)),
        });
        let states = states.collect::<Result<_, _>>().ok()?;
        let mut executor = Executor::new(code, states, device, Arc::default()).ok()?;
        let mut item: Item = executor.begin().ok()?;
        let parameters = code.parameters.iter().map(|named| match initial(named) {
            Some(tensor) => upload(tensor).map(Arc::new),
            None => upload(&random_weights(named, seed)).map(Arc::new),
        });
        item.weights = parameters.collect::<Result<_, _>>().ok()?;
        for (i, feed) in code.feeds.iter().enumerate() {
            let rows = feed.fact.concrete().and_then(|shape| shape.first().copied()).unwrap_or(1);
            let mut tensors = synthetic(&self.graph, std::slice::from_ref(feed), rows, rows, seed ^ i as u64);
            let tensor = tensors.remove(&feed.name).filter(|t| t.bytes().len() == feed.bytes)?;
            item.feeds.push(Arc::new(upload(&tensor).ok()?));
        }

        // The first run allocates all buffers.
        executor.forward(&mut item).ok()?;
        item.sums = lend_sums(&mut vec![None; code.gradient_terms.len()], &executor, None).ok()?;
        executor.backward(&mut item).ok()?;
        executor.device.stream.finish().ok()?;
        Some((executor, item))
    }

    /// Measures forward and backward. `None` if memory does not suffice or the model cannot run.
    pub fn time(&self, device: &Arc<dyn Device>, weights: &BTreeMap<String, Tensor>, runs: &Runs) -> Option<Times> {
        if self.footprint() as u64 > device.available_memory().unwrap_or(u64::MAX) / 2 {
            return None;
        }
        let code = &self.code;
        let (mut executor, item) = self.prepare(device, weights, runs.seed)?;
        let start = Instant::now();
        let mut samples = [&code.forward, &code.backward].map(|sequence| Samples::of(sequence.steps.len()));
        let run_count = runs.warmup + runs.samples.max(1);
        for run in 0..run_count {
            let first = executor.device.stream.timestamp().ok()?;
            let mut clocks = [Clock(vec![first]), Clock::default()];
            executor.run_watched(RunPhase::Forward, &item, &mut |stream| clocks[0].tick(stream)).ok()?;
            clocks[1].tick(&*executor.device.stream).ok()?;
            executor.run_watched(RunPhase::Backward, &item, &mut |stream| clocks[1].tick(stream)).ok()?;
            let mut times = [clocks[0].times().ok()?, clocks[1].times().ok()?];
            if device.is_asynchronous() {
                // Timestamps between kernels delay them.
                let totals = time_passes(&mut executor, &item).ok()?;
                times.iter_mut().zip(totals).for_each(|(times, whole)| times.whole = whole);
            }
            let is_late = start.elapsed() > runs.budget;
            if run >= runs.warmup || is_late {
                samples.iter_mut().zip(times).for_each(|(samples, times)| samples.add(times));
            }
            if is_late && samples[0].whole.len() >= 3 {
                break;
            }
        }
        executor.finish(item).ok()?;
        let mut ops = vec![[0; 2]; self.ops];
        for (direction, (samples, sequence)) in samples.iter().zip([&code.forward, &code.backward]).enumerate() {
            let nodes: Vec<&[String]> = sequence.steps.iter().map(|step| &step.nodes[..]).collect();
            samples.distribute(&nodes, |op, picoseconds| {
                if let Some(op) = ops.get_mut(op) {
                    op[direction] += picoseconds;
                }
            });
        }
        let [forward, backward] = &samples;
        let range = percentiles(forward.whole.iter().zip(&backward.whole).map(|(a, b)| a + b).collect());
        Some(Times { whole: samples.map(|samples| summarize(samples.whole)), range, ops })
    }
}

/// The 5th and 95th percentile; of fewer than 20 values the least and the most, and zeros without values.
fn percentiles(mut values: Vec<u64>) -> [u64; 2] {
    values.sort_unstable();
    let outer = values.len() / 20;
    let inner = values.get(outer..values.len() - outer).unwrap_or_default();
    [inner.first(), inner.last()].map(|value| value.copied().unwrap_or_default())
}

/// Times of forward and backward, without timestamps between their steps.
fn time_passes(executor: &mut Executor<'_>, item: &Item) -> Result<[u64; 2], ExecuteError> {
    let before = executor.device.stream.timestamp()?;
    executor.run_watched(RunPhase::Forward, item, &mut |_| Ok(()))?;
    let between = executor.device.stream.timestamp()?;
    executor.run_watched(RunPhase::Backward, item, &mut |_| Ok(()))?;
    let after = executor.device.stream.timestamp()?;
    Ok([picoseconds(between.since(&before)?), picoseconds(after.since(&between)?)])
}

fn picoseconds(time: Duration) -> u64 {
    time.as_nanos() as u64 * 1000
}

/// Timestamps before and after every step of one run.
#[derive(Default)]
struct Clock(Vec<Timestamp>);

/// Times of one run in picoseconds.
struct RunTimes {
    whole: u64,
    steps: Vec<u64>,
}

impl Clock {
    fn tick(&mut self, stream: &dyn Stream) -> Result<(), DeviceError> {
        self.0.push(stream.timestamp()?);
        Ok(())
    }

    /// Waits for the run.
    fn times(&self) -> Result<RunTimes, DeviceError> {
        let steps = self.0.windows(2).map(|pair| Ok(picoseconds(pair[1].since(&pair[0])?)));
        let steps = steps.collect::<Result<Vec<u64>, DeviceError>>()?;
        Ok(RunTimes { whole: steps.iter().sum(), steps })
    }
}

/// Times of many runs of one sequence, in picoseconds.
struct Samples {
    whole: Vec<u64>,
    by_step: Vec<Vec<u64>>,
}

impl Samples {
    fn of(steps: usize) -> Samples {
        Samples { whole: Vec::new(), by_step: vec![Vec::new(); steps] }
    }

    fn add(&mut self, RunTimes { whole, steps }: RunTimes) {
        self.whole.push(whole);
        self.by_step.iter_mut().zip(steps).for_each(|(samples, step)| samples.push(step));
    }

    /// Reports each op's part of every step's time; `nodes` are those of the steps. The steps add up to the whole: the
    /// median of the sums of steps is above the sum of their medians if other work interrupts a few steps of every run,
    /// and on a GPU timestamps delay the steps.
    fn distribute(&self, nodes: &[&[String]], mut add: impl FnMut(usize, u64)) {
        let medians: Vec<u64> = self.by_step.iter().map(|samples| summarize(samples.clone()).median_ps).collect();
        let (sum, whole) = (medians.iter().sum::<u64>(), summarize(self.whole.clone()).median_ps);
        let scale = if sum > 0 { whole as f64 / sum as f64 } else { 1.0 };
        let mut last_op = 0;
        for (nodes, median) in nodes.iter().zip(medians) {
            if nodes.iter().all(|node| node == STAND_IN) {
                continue;
            }
            let mut owners: Vec<usize> = nodes.iter().filter_map(|node| node.parse().ok()).collect();
            if owners.is_empty() {
                // A gradient sum belongs to no op: it is charged to the last one before it.
                owners.push(last_op);
            }
            let time = (median as f64 * scale) as u64;
            owners.iter().for_each(|owner| add(*owner, time / owners.len() as u64));
            last_op = owners[owners.len() - 1];
        }
    }
}

/// Floats with the scale of initial weights, so that activations neither vanish nor explode.
fn random_weights(named: &NamedTensor, seed: u64) -> Tensor {
    let shape = named.fact.concrete().unwrap_or_default();
    let fan_in: usize = shape.iter().skip(1).product();
    let scale = 1.0 / (fan_in.max(1) as f64).sqrt();
    let draw = |i: usize| (runtime::data::mix(seed ^ i as u64) >> 11) as f64 / (1u64 << 52) as f64 - 1.0;
    filled_tensor(named, |i| scale * draw(i))
}

/// One value per element; integers are zero, which is a valid index.
fn filled_tensor(named: &NamedTensor, value: impl Fn(usize) -> f64) -> Tensor {
    let count = named.bytes / named.fact.dtype.size();
    let values: Vec<f64> = match named.fact.dtype.is_float() {
        true => (0..count).map(value).collect(),
        false => vec![0.0; count],
    };
    Tensor::from_f64(&[count], &values).cast(named.fact.dtype)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_add_up_to_the_whole() {
        // Another step is interrupted in each run.
        let mut samples = Samples::of(3);
        for interrupted in 0..3 {
            let steps: Vec<u64> = (0..3).map(|step| if step == interrupted { 40 } else { 10 }).collect();
            samples.add(RunTimes { whole: steps.iter().sum(), steps });
        }
        let nodes = ["0", "1", "1"].map(|node| [node.to_string()]);
        let mut sums = [0; 2];
        samples.distribute(&nodes.each_ref().map(|node| &node[..]), |op, picoseconds| sums[op] += picoseconds);
        assert_eq!(sums, [20, 40]);
    }

    #[test]
    fn a_range_leaves_out_a_twentieth_at_each_end() {
        assert_eq!(percentiles(vec![]), [0, 0]);
        assert_eq!(percentiles(vec![3, 1, 2]), [1, 3]);
        assert_eq!(percentiles((1..=40).rev().collect()), [3, 38]);
    }

    #[test]
    fn a_list_holds_all_times() {
        let time = |median_ps| Time { median_ps, spread_ps: 1 };
        let times = Times { whole: [time(5), time(7)], range: [11, 14], ops: vec![[1, 2], [4, 5]] };
        assert_eq!(Times::of_list(&times.list(), 2), Some(times.clone()));
        assert_eq!(Times::of_list(&times.list(), 3), None);
    }
}
