//! Evaluates an SPMD graph on all devices of a tensor-parallel group with the reference kernels: the oracle for sharded
//! execution.

use crate::graph::evaluate::{EvaluateError, feed_value, run};
use crate::graph::{Graph, order};
use crate::op::Value;
use crate::op::collective::meet;
use crate::tensor::Tensor;
use std::collections::{BTreeMap, HashMap};

/// Computes every value on every device from each device's shards of the inputs, parameters and states, by name.
pub fn evaluate(
    graph: &Graph,
    feeds: &[BTreeMap<String, Tensor>],
) -> Result<Vec<HashMap<Value, Tensor>>, EvaluateError> {
    let mut devices: Vec<HashMap<Value, Tensor>> = vec![HashMap::new(); feeds.len()];
    for id in order::canonical(graph) {
        let mut inputs: Vec<Vec<Tensor>> =
            devices.iter().map(|values| graph.inputs(id).iter().map(|v| values[v].clone()).collect()).collect();
        let first: Option<Vec<Tensor>> = inputs.iter().map(|inputs| inputs.first().cloned()).collect();
        if let Some(collective) = first.and_then(|parts| meet(&graph.node(id).op, &parts)) {
            for (values, tensor) in devices.iter_mut().zip(collective) {
                values.insert(Value { node: id, output: 0 }, tensor);
            }
            continue;
        }
        for ((values, feeds), inputs) in devices.iter_mut().zip(feeds).zip(inputs.drain(..)) {
            let outputs = match feed_value(graph, id, feeds)? {
                Some(tensor) => vec![tensor],
                None => run(graph, id, &inputs)?,
            };
            for (output, tensor) in outputs.into_iter().enumerate() {
                values.insert(Value { node: id, output: output as u32 }, tensor);
            }
        }
    }
    Ok(devices)
}
