//! Evaluates a graph with the reference kernels: slow, exact in `f64`; the test oracle, also used for constant folding.

use super::{Graph, order};
use crate::op::table::rule;
use crate::op::{KernelError, NodeId, Op, Value};
use crate::tensor::view::ViewMut;
use crate::tensor::{Tensor, element_count};
use std::collections::{BTreeMap, HashMap};
use thiserror::Error;

#[derive(Debug, Error, PartialEq)]
pub enum EvaluateError {
    #[error("no value was given for `{name}`")]
    Missing { name: String },
    #[error("`{name}` is {expected}, the value given is {got}")]
    Given { name: String, expected: String, got: String },
    #[error("the shape of `{name}` is unknown or too large: {fact}")]
    Shape { name: String, fact: String },
    #[error("`{name}`: {fault}")]
    Kernel { name: String, fault: KernelError },
}

/// Computes every value of the graph from the inputs, parameters and states in `feeds`, by name.
pub fn evaluate(graph: &Graph, feeds: &BTreeMap<String, Tensor>) -> Result<HashMap<Value, Tensor>, EvaluateError> {
    let mut values: HashMap<Value, Tensor> = HashMap::new();
    for id in order::canonical(graph) {
        if let Some(tensor) = feed_value(graph, id, feeds)? {
            values.insert(Value { node: id, output: 0 }, tensor);
            continue;
        }
        let inputs: Vec<Tensor> = graph.inputs(id).iter().map(|v| values[v].clone()).collect();
        let outputs = run(graph, id, &inputs)?;
        for (output, tensor) in outputs.into_iter().enumerate() {
            values.insert(Value { node: id, output: output as u32 }, tensor);
        }
    }
    Ok(values)
}

/// The given value of an input, parameter or state; `None` for other nodes.
pub(super) fn feed_value(
    graph: &Graph,
    id: NodeId,
    feeds: &BTreeMap<String, Tensor>,
) -> Result<Option<Tensor>, EvaluateError> {
    let (name, fact) = match &graph.node(id).op {
        Op::Input(o) => (&o.name, &o.fact),
        Op::Parameter(o) => (&o.name, &o.fact),
        Op::State(o) => (&o.name, &o.fact),
        _ => return Ok(None),
    };
    let tensor = feeds.get(name).ok_or_else(|| EvaluateError::Missing { name: name.clone() })?;
    if fact.dtype != tensor.dtype() || fact.concrete().as_deref() != Some(tensor.shape()) {
        return Err(EvaluateError::Given {
            name: name.clone(),
            expected: fact.to_string(),
            got: format!("{}{:?}", tensor.dtype(), tensor.shape()),
        });
    }
    Ok(Some(tensor.clone()))
}

/// Runs one node on its inputs with its reference kernel.
pub fn run(graph: &Graph, id: NodeId, inputs: &[Tensor]) -> Result<Vec<Tensor>, EvaluateError> {
    let node = graph.node(id);
    let mut shapes = Vec::new();
    for fact in &node.facts {
        let addressable = |s: &Vec<usize>| element_count(s).and_then(|n| n.checked_mul(fact.dtype.size())).is_some();
        shapes.push(
            fact.concrete()
                .filter(addressable)
                .ok_or_else(|| EvaluateError::Shape { name: node.name.clone(), fact: fact.to_string() })?,
        );
    }
    let mut buffers: Vec<Vec<u8>> = node
        .facts
        .iter()
        .zip(&shapes)
        .map(|(fact, shape)| vec![0; shape.iter().product::<usize>() * fact.dtype.size()])
        .collect();
    let views: Vec<_> = inputs.iter().map(Tensor::view).collect();
    let mut outputs: Vec<ViewMut<'_>> = buffers
        .iter_mut()
        .zip(node.facts.iter().zip(&shapes))
        .map(|(bytes, (fact, shape))| ViewMut::new(fact.dtype, shape, bytes))
        .collect();
    rule(&node.op)
        .reference(&views, &mut outputs)
        .map_err(|fault| EvaluateError::Kernel { name: node.name.clone(), fault })?;
    drop(outputs);
    Ok(buffers
        .into_iter()
        .zip(node.facts.iter().zip(shapes))
        .map(|(bytes, (fact, shape))| Tensor::new(fact.dtype, shape, bytes.into()).expect("made for this shape"))
        .collect())
}
