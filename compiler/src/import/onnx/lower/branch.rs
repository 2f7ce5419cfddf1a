//! `If`: replaced by the branch that runs.
//!
//! If the condition is known at import time, it selects the branch. Otherwise both branches are lowered and every
//! result is a select between the two, which is equivalent because core ops have no side effects. The branches must
//! then have equal result shapes and must not update running statistics.

use super::body::Body;
use super::walk::Walk;
use super::{Known, LowerReason, read_condition};
use crate::import::build::Build;
use crate::import::onnx::model::Node;
use crate::text::name::short_name;

/// Returns the results of an `If`; `Err(None)` if an error inside it was already reported.
pub fn branch(walk: &mut Walk<'_>, node: &Node) -> Result<Vec<Known>, Option<LowerReason>> {
    let condition = walk.scope(node).ok_or(None)?.known(0)?.clone();
    if let Some(holds) = read_condition(&condition)? {
        let body = Body::read(walk, node, if holds { "then_branch" } else { "else_branch" })?;
        return body.run(walk, node, None, Vec::new());
    }
    let faults_before = walk.faults.len();
    let averages = walk.ledger.averages.len();
    let mut results = Vec::with_capacity(2);
    for name in ["then_branch", "else_branch"] {
        let body = Body::read(walk, node, name)?;
        results.push(body.run(walk, node, None, Vec::new()));
    }
    let branches: Option<Vec<Vec<Known>>> = results.into_iter().map(Result::ok).collect();
    let Some(branches) = branches else {
        // The failing branch may be the one that never runs, so the unknown condition is reported instead of its
        // errors.
        walk.faults.truncate(faults_before);
        return Err(Some(describe_undecided(walk, node, "the condition, with a branch that does not fit here,")?));
    };
    if walk.ledger.averages.len() > averages {
        return Err(Some(describe_undecided(walk, node, "the condition, with running statistics in a branch,")?));
    }
    let (yes, no) = (&branches[0], &branches[1]);
    if yes.len() != no.len() {
        let counts = format!("its branches give {} and {} results", yes.len(), no.len());
        return Err(Some(LowerReason::Inputs(counts)));
    }
    let mut selected = Vec::with_capacity(yes.len());
    for (yes, no) in yes.iter().zip(no) {
        let mut scope = walk.scope(node).ok_or(None)?;
        let (yes, no) = (scope.materialise(yes)?, scope.materialise(no)?);
        if scope.fact(yes) != scope.fact(no) {
            return Err(Some(describe_undecided(walk, node, "the condition, with branches of different shapes,")?));
        }
        let condition = scope.value(0)?;
        let condition = scope.reshape(condition, Vec::new())?;
        selected.push(Known::Value(scope.select(condition, yes, no)?));
    }
    walk.ledger.warnings.push(format!(
        "node `{}`: the condition of this If is unknown, so both branches run and one result is selected",
        short_name(&node.name)
    ));
    Ok(selected)
}

fn describe_undecided(
    walk: &mut Walk<'_>,
    node: &Node,
    what: &'static str,
) -> Result<LowerReason, Option<LowerReason>> {
    Ok(walk.scope(node).ok_or(None)?.not_constant(0, what))
}
