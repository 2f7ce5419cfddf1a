//! The whole model run as one stage, to hold beside the sum of its ops.

use crate::cache::Time;
use crate::kernel::{Runs, summary};
use crate::machine::available_bytes;
use compiler::graph::{Graph, Output, order};
use compiler::op::{NodeId, Op};
use compiler::pass::attribution::{Attribution, Training};
use compiler::pass::loss::{LOSS, Loss, TARGET, attach};
use compiler::tensor::Tensor;
use runtime::buffer::Buffer;
use runtime::compile::{CompileError, Named, StageCode, compile};
use runtime::data::synthetic::synthetic;
use runtime::execute::{Executor, Item};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Instant;

/// A model compiled as one stage.
pub struct Whole {
    /// What it runs.
    pub code: StageCode,
    /// The graph, with a loss where it is trained.
    pub graph: Graph,
}

/// Compiles a graph of fixed sizes as one stage. Where a gradient arrives, the squared error of that output stands for
/// what would send it; a scalar needs none. `None` when the graph cannot be given a loss.
pub fn whole(graph: &Graph, attribution: &Attribution, training: Training) -> Result<Option<Whole>, CompileError> {
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
    let place: HashMap<NodeId, usize> = order::numbered(&graph).into_iter().map(|id| (id, 0)).collect();
    let code = compile(&graph, &place, 1, loss.map(|_| LOSS))?.pop();
    Ok(code.map(|code| Whole { code, graph }))
}

/// Makes room for the loss's own input, whose name the model may have given to one of its inputs.
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

impl Whole {
    /// Bytes that a forward and a backward run touch.
    pub fn footprint(&self) -> usize {
        let code = &self.code;
        let named = code.feeds.iter().chain(&code.parameters).chain(&code.states).map(|n| n.bytes);
        named.chain([code.arena_bytes, code.kept_bytes]).chain(code.own_bytes.iter().copied()).sum()
    }

    /// Times of the forward and of the backward run. Weights that are not in `weights` are made up. `None` when the
    /// memory does not suffice, or a kernel refuses made-up data.
    pub fn time(&self, weights: &BTreeMap<String, Tensor>, runs: &Runs) -> Option<[Time; 2]> {
        if self.footprint() as u64 > available_bytes() / 2 {
            return None;
        }
        let code = &self.code;
        let given = |named: &Named| weights.get(&named.name).filter(|t| t.bytes().len() == named.bytes);
        let states = code.states.iter().map(|named| match given(named) {
            Some(tensor) => Buffer::copy_of(tensor.bytes()),
            None => made_up(named, |_| 1.0),
        });
        let mut executor = Executor::new(code, states.collect());
        let mut item: Item = executor.begin();
        let parameters = code.parameters.iter().map(|named| match given(named) {
            Some(tensor) => Arc::new(Buffer::copy_of(tensor.bytes())),
            None => Arc::new(spread(named, runs.seed)),
        });
        item.weights = parameters.collect();
        for (i, feed) in code.feeds.iter().enumerate() {
            let rows = feed.fact.concrete().and_then(|shape| shape.first().copied()).unwrap_or(1);
            let mut made = synthetic(&self.graph, std::slice::from_ref(feed), rows, rows, runs.seed ^ i as u64);
            let tensor = made.remove(&feed.name).filter(|t| t.bytes().len() == feed.bytes)?;
            item.feeds.push(Arc::new(Buffer::copy_of(tensor.bytes())));
        }

        let began = Instant::now();
        let mut samples = [Vec::new(), Vec::new()];
        let all = runs.warmup.max(1) + runs.samples.max(1);
        for run in 0..all {
            let start = Instant::now();
            executor.forward(&item).ok()?;
            let forward = start.elapsed();
            let start = Instant::now();
            executor.backward(&mut item).ok()?;
            let backward = start.elapsed();
            let late = began.elapsed() > runs.budget;
            if run >= runs.warmup.max(1) || late {
                samples[0].push(forward.as_nanos() as u64 * 1000);
                samples[1].push(backward.as_nanos() as u64 * 1000);
            }
            if late && samples[0].len() >= 3 {
                break;
            }
        }
        executor.finish(item);
        Some(samples.map(summary))
    }
}

/// Floats of the size that initial weights have, so that values neither vanish nor grow on their way.
fn spread(named: &Named, seed: u64) -> Buffer {
    let shape = named.fact.concrete().unwrap_or_default();
    let fan_in: usize = shape.iter().skip(1).product();
    let scale = 1.0 / (fan_in.max(1) as f64).sqrt();
    let draw = |i: usize| (runtime::data::mix(seed ^ i as u64) >> 11) as f64 / (1u64 << 52) as f64 - 1.0;
    made_up(named, |i| scale * draw(i))
}

/// A value for each element; integers are zero, which every table has a row for.
fn made_up(named: &Named, value: impl Fn(usize) -> f64) -> Buffer {
    if !named.fact.dtype.is_float() {
        return Buffer::new(named.bytes);
    }
    let count = named.bytes / named.fact.dtype.size();
    let values: Vec<f64> = (0..count).map(value).collect();
    Buffer::copy_of(Tensor::from_f64(&[count], &values).cast(named.fact.dtype).bytes())
}
