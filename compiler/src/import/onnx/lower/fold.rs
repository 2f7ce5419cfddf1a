//! Folding while lowering: a node that reads only constants is lowered into a graph of its own, which is run at once.
//!
//! So there is one lowering of every operator, and the reference kernels say what it computes. Sizes are looked at
//! before anything is allocated: a node whose values are larger than `LIMIT` is not folded, and its core ops
//! (`iota`, `broadcast`) stand in the graph in place of their elements.

use super::{Known, LowerReason, Outputs, Scope};
use crate::graph::Graph;
use crate::graph::evaluate::evaluate;
use crate::op::Op;
use crate::op::table::rule;
use std::collections::{BTreeMap, HashMap};

/// The most bytes that a folded value may have.
const LIMIT: u64 = 1 << 20;

/// The most bytes that a constant may have for its readers to be folded.
const READ_LIMIT: usize = 1 << 24;

/// The most work that folding does for one model, in operations and bytes. What is beyond runs with the model.
const WORK: f64 = 4e9;

/// What an element of a table that an operator makes counts for, in operations and bytes.
const MADE: f64 = 64.0;

/// Counts a table of weights or indices that an operator makes from a few numbers, as if it had been folded: a small file
/// may ask for many large ones.
pub fn charge(scope: &mut Scope<'_>, elements: usize) -> Result<(), LowerReason> {
    scope.ledger.folded += MADE * elements as f64;
    if scope.ledger.folded <= WORK {
        return Ok(());
    }
    Err(LowerReason::Unsupported("a model whose tables of weights and indices are so large".to_string()))
}

/// Whether all inputs are constants, so that folding can be tried.
pub fn applies(scope: &Scope<'_>) -> bool {
    let small = |known: &Known| matches!(known, Known::Tensor(t) if t.bytes().len() <= READ_LIMIT);
    scope.inputs.iter().flatten().all(small)
}

/// The outputs as constants; `None` where they are too large.
pub fn fold(scope: &mut Scope<'_>, lower: fn(&mut Scope<'_>) -> Outputs) -> Result<Option<Vec<Known>>, LowerReason> {
    let mut graph = Graph::default();
    let mut constants = HashMap::new();
    let outputs = lower(&mut Scope {
        node: scope.node,
        prefix: scope.prefix,
        module: scope.module,
        opset: scope.opset,
        inputs: scope.inputs.clone(),
        frozen: scope.frozen,
        graph: &mut graph,
        constants: &mut constants,
        ledger: &mut *scope.ledger,
    })?;
    let small = |id| {
        let node = graph.node(id);
        matches!(node.op, Op::Constant(_)) || node.facts.iter().all(|f| f.bytes().is_some_and(|b| b <= LIMIT))
    };
    // What reads the counter of dropouts is not constant, whatever it drops.
    let open = graph.ids().any(|id| matches!(graph.node(id).op, Op::Input(_)));
    if open || !graph.ids().all(small) {
        return Ok(None);
    }
    let facts = |id| graph.inputs(id).into_iter().map(|v| graph.fact(v)).collect::<Vec<_>>();
    let cost = |id| rule(&graph.node(id).op).cost(&facts(id), &graph.node(id).facts);
    let work: f64 = graph.ids().map(cost).map(|cost| cost.flops + cost.bytes).sum();
    if scope.ledger.folded + work > WORK {
        return Ok(None);
    }
    scope.ledger.folded += work;
    let values = evaluate(&graph, &BTreeMap::new())?;
    if outputs.iter().any(|known| matches!(known, Known::Sequence(_))) {
        return Ok(None);
    }
    let known = outputs.into_iter().map(|known| match known {
        Known::Value(value) => Known::Tensor(values[&value].clone()),
        other => other,
    });
    Ok(Some(known.collect()))
}
