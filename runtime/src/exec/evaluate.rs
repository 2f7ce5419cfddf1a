//! Inference: runs a graph forward on given inputs.

use crate::device::api::Device;
use crate::device::buffer::Buffer;
use crate::device::cpu::device::cpu;
use crate::device::error::DeviceError;
use crate::exec::compile::compile;
use crate::exec::compile_error::CompileError;
use crate::exec::executor::{ExecuteError, Executor};
use crate::exec::stage_code::NamedTensor;
use compiler::graph::{Graph, order};
use compiler::op::dropout::COUNTER;
use compiler::op::{NodeId, Op};
use compiler::pass::inference::inference;
use compiler::pass::pipeline;
use compiler::tensor::Tensor;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use thiserror::Error;

#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum EvaluateError {
    #[error(transparent)]
    Compile(#[from] CompileError),
    #[error(transparent)]
    Execute(#[from] ExecuteError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error("{kind} `{name}` has no value")]
    Missing { kind: &'static str, name: String },
    #[error("{kind} `{name}` is {got}, the model has {expected}")]
    Fact { kind: &'static str, name: String, expected: String, got: String },
}

/// Returns the graph's results by name, computed on the CPU, for a graph with concrete shapes. `trained` selects inference mode: running
/// statistics and no dropout. Otherwise the dropout counter is 0 unless `inputs` contains it.
pub fn evaluate(
    graph: &Graph,
    trained: bool,
    inputs: &BTreeMap<String, Tensor>,
    weights: &BTreeMap<String, Tensor>,
) -> Result<BTreeMap<String, Tensor>, EvaluateError> {
    let mut results = BTreeMap::new();
    evaluate_each(&cpu(), graph, trained, [inputs.clone()], weights, &mut |outputs| results = outputs)?;
    Ok(results)
}

/// Like [`evaluate`], on any device and once per set of inputs. `on_results` receives the results of each set.
pub fn evaluate_each(
    device: &Arc<dyn Device>,
    graph: &Graph,
    trained: bool,
    input_sets: impl IntoIterator<Item = BTreeMap<String, Tensor>>,
    weights: &BTreeMap<String, Tensor>,
    on_results: &mut dyn FnMut(BTreeMap<String, Tensor>),
) -> Result<(), EvaluateError> {
    let mut graph = graph.clone();
    if trained {
        inference(&mut graph);
    }
    pipeline::concrete(&mut graph).map_err(CompileError::from)?;
    let stage_of: HashMap<NodeId, usize> = order::executed(&graph).into_iter().map(|id| (id, 0)).collect();
    if stage_of.is_empty() {
        return input_sets.into_iter().try_for_each(|inputs| sources(&graph, &inputs, weights).map(&mut *on_results));
    }
    let codes = compile(&graph, &stage_of, 1, None, &**device)?;
    let code = &codes[0];
    let states = buffers("state", &code.states, weights, &**device)?;
    let mut executor = Executor::new(code, states, device, Arc::default())?;
    let parameters: Vec<_> =
        buffers("parameter", &code.parameters, weights, &**device)?.into_iter().map(Arc::new).collect();
    for mut inputs in input_sets {
        let mut item = executor.begin()?;
        item.weights = parameters.clone();
        inputs.entry(COUNTER.to_string()).or_insert_with(|| Tensor::from_i64(&[], &[0]));
        item.feeds = buffers("input", &code.feeds, &inputs, &**device)?.into_iter().map(Arc::new).collect();
        executor.forward(&mut item)?;
        let mut results = BTreeMap::new();
        for (named, address) in &code.results {
            let shape = named.fact.concrete().expect("sizes were checked when the graph was compiled");
            let bytes = executor.download_result(&item, *address)?.bytes()?;
            let tensor = Tensor::new(named.fact.dtype, shape, bytes.into());
            results.insert(named.name.clone(), tensor.expect("the buffer has the size of the result"));
        }
        executor.finish(item)?;
        on_results(results);
    }
    // A kernel may have failed on its operands.
    executor.device.stream.finish()?;
    Ok(())
}

/// Results of a graph without ops: its inputs, parameters and constants.
fn sources(
    graph: &Graph,
    inputs: &BTreeMap<String, Tensor>,
    weights: &BTreeMap<String, Tensor>,
) -> Result<BTreeMap<String, Tensor>, EvaluateError> {
    let mut results = BTreeMap::new();
    for output in &graph.outputs {
        let (kind, name, tensors) = match &graph.node(output.value.node).op {
            Op::Constant(c) => {
                results.insert(output.name.clone(), c.tensor.clone());
                continue;
            }
            Op::Parameter(p) => ("parameter", &p.name, weights),
            Op::State(s) => ("state", &s.name, weights),
            Op::Input(i) => ("input", &i.name, inputs),
            _ => ("value", &output.name, inputs),
        };
        let tensor = tensors.get(name).ok_or_else(|| EvaluateError::Missing { kind, name: name.clone() })?;
        results.insert(output.name.clone(), tensor.clone());
    }
    Ok(results)
}

/// Uploads the tensors to a device, in the order of `wanted`. Checks shapes, and casts between float types.
pub fn buffers(
    kind: &'static str,
    wanted: &[NamedTensor],
    tensors: &BTreeMap<String, Tensor>,
    device: &dyn Device,
) -> Result<Vec<Buffer>, EvaluateError> {
    let upload = |named: &NamedTensor| {
        let name = named.name.clone();
        let tensor = tensors.get(&name).ok_or_else(|| EvaluateError::Missing { kind, name: name.clone() })?;
        if named.fact.concrete().as_deref() != Some(tensor.shape()) {
            let got = format!("{}{:?}", tensor.dtype(), tensor.shape());
            return Err(EvaluateError::Fact { kind, name, expected: named.fact.to_string(), got });
        }
        Ok(device.upload(tensor.cast(named.fact.dtype).bytes())?)
    };
    wanted.iter().map(upload).collect()
}
