//! Losses whose value depends on the division of a minibatch into micro-batches.

use crate::train::prepare::input_name;
use crate::train::task::{Data, Task};
use compiler::graph::Graph;
use compiler::import::import::{Batch, Model};
use compiler::op::{NodeId, Op};
use compiler::pass::batch_dependence::{BatchDependence, Minibatch, batch_dependence};
use compiler::pass::loss::{IGNORED, Loss, output_of};
use compiler::pass::minibatch_mean::{ignored_labels, label_inputs, minibatch_means};
use compiler::tensor::Tensor;
use std::collections::BTreeSet;

/// True if the loss may have means over different numbers of labels in different micro-batches.
pub fn has_uneven_means(graph: &Graph, loss: Loss, data: &Data) -> bool {
    let Data::Arrays(arrays) = data else { return false };
    let own_loss = output_of(graph).filter(|_| loss == Loss::Output).map(|at| graph.outputs[at].value);
    let mut ignored = ignored_labels(graph);
    ignored.extend((loss == Loss::CrossEntropy).then_some(IGNORED));
    let inputs: BTreeSet<&str> = graph.ids().filter_map(|id| input_name(graph, id)).collect();
    let Some(labels) = label_inputs(graph) else { return true };
    let has_ignored = |(name, array): (&String, &Tensor)| {
        let view = array.view();
        let is_ignored = |at| match array.dtype().is_float() {
            true => ignored.iter().any(|label| view.f64(at) == *label as f64),
            false => ignored.contains(&view.i64(at)),
        };
        // What the model does not read may be the target.
        (labels.contains(&**name) || !inputs.contains(&**name)) && (0..view.len()).any(is_ignored)
    };
    let is_quotient = |node: &NodeId| matches!(graph.node(*node).op, Op::Binary(_));
    own_loss.is_some_and(|loss| minibatch_means(graph, loss).iter().any(is_quotient))
        || !ignored.is_empty() && arrays.iter().any(has_ignored)
}

/// How the loss depends on the division into micro-batches.
pub fn dependence_of(task: &Task<'_>, loss: Loss, ignores_labels: bool) -> Option<BatchDependence> {
    let Model { graph, batch: Batch::Symbol { name, .. }, .. } = &task.loaded.model else { return None };
    let whole = &task.loaded.with_samples(task.batch).ok()?;
    let output = if loss == Loss::Output { output_of(graph)? } else { 0 };
    let minibatch = Minibatch { symbol: name, whole, samples: task.batch as usize, ignores_labels };
    batch_dependence(graph, &minibatch, graph.outputs.get(output)?.value)
}
