//! Refuses indices that are constants of the model and lie outside the axis that they index: every run would fail.

use crate::graph::Graph;
use crate::op::gather::resolve;
use crate::op::{BatchGather, Constant, Gather, KernelError, Op, Scatter};
use crate::text::name::short_name;
use thiserror::Error;

/// A constant index outside of its axis.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("node `{}` reads index {index} of an axis of size {size}", short_name(.node))]
pub struct WrongIndex {
    node: String,
    index: i64,
    size: usize,
}

/// Checks the constant indices of all gathers and scatters whose axis has a known size.
pub fn check(graph: &Graph) -> Result<(), WrongIndex> {
    for id in graph.ids() {
        let (axis, inputs) = match &graph.node(id).op {
            Op::Gather(Gather { axis }) | Op::Scatter(Scatter { axis, .. }) => (*axis, graph.inputs(id)),
            Op::BatchGather(BatchGather { batch }) => (*batch, graph.inputs(id)),
            _ => continue,
        };
        let [x, indices, ..] = inputs[..] else { continue };
        let Op::Constant(Constant { tensor }) = &graph.node(indices.node).op else { continue };
        let Some(size) = graph.fact(x).shape[axis].known() else { continue };
        if let Err(KernelError::Index { index, size }) = resolve(&tensor.view(), size as usize) {
            let source = &graph.node(id).origin.source;
            return Err(WrongIndex { node: source.clone(), index, size });
        }
    }
    Ok(())
}
