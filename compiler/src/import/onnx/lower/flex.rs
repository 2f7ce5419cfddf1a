//! `FlexAttention` with subgraphs that modify the scores before the softmax or the probabilities after it.

use super::attention::{flex_scores, flex_values, probabilities};
use super::body::Body;
use super::walk::Walk;
use super::{Known, LowerReason};
use crate::import::build::Build;
use crate::import::onnx::model::Node;
use crate::op::Value;

const DOMAIN: &str = "ai.onnx.preview";

/// True for a `FlexAttention` node with a subgraph.
pub fn is_changed(node: &Node) -> bool {
    let has = |name: &str| node.attributes.iter().any(|a| a.name() == name);
    node.domain == DOMAIN && node.op_type == "FlexAttention" && (has("score_mod") || has("prob_mod"))
}

/// Returns the result; `Err(None)` if an error in a subgraph was already reported.
pub fn flex(walk: &mut Walk<'_>, node: &Node) -> Result<Vec<Known>, Option<LowerReason>> {
    let scores = flex_scores(&mut walk.scope(node).ok_or(None)?)?;
    let scores = apply_graph(walk, node, "score_mod", scores)?;
    let weights = probabilities(&mut walk.scope(node).ok_or(None)?, scores)?;
    let weights = apply_graph(walk, node, "prob_mod", weights)?;
    Ok(flex_values(&mut walk.scope(node).ok_or(None)?, weights)?)
}

/// Applies the subgraph in attribute `name` to a value; returns the value unchanged if there is none.
fn apply_graph(walk: &mut Walk<'_>, node: &Node, name: &'static str, x: Value) -> Result<Value, Option<LowerReason>> {
    if !node.attributes.iter().any(|a| a.name() == name) {
        return Ok(x);
    }
    let results = Body::read(walk, node, name)?.run(walk, node, None, vec![Known::Value(x)])?;
    let [result] = results.as_slice() else {
        return Err(Some(LowerReason::Inputs(format!(
            "its subgraph `{name}` has {} results, expected one",
            results.len()
        ))));
    };
    let mut scope = walk.scope(node).ok_or(None)?;
    let y = scope.materialise(result)?;
    let (have, want) = (scope.fact(y), scope.fact(x));
    if have != want {
        return Err(Some(LowerReason::Inputs(format!("its subgraph `{name}` computes {have}, expected {want}"))));
    }
    Ok(y)
}
