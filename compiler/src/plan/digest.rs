//! The digest of a plan's content, which shows whether the file was edited after pipec wrote it.
//!
//! Not every figure of a plan follows from the others: without the model, nobody can recompute the times of its
//! baselines. The digest covers all fields but those of other tools (`x-`), in the canonical form of [`read::to_json`].
//! A plan without a digest was written by hand or by other code.
//!
//! [`read::to_json`]: crate::plan::read::to_json

use crate::graph::hash::sha256;
use crate::plan::Plan;
use crate::plan::read::{PlanFileError, to_json};
use std::collections::BTreeMap;

/// Prints a plan with its digest.
pub fn to_json_with_digest(plan: &Plan) -> Result<String, PlanFileError> {
    to_json(&Plan { digest: Some(of(plan)?), ..plan.clone() })
}

/// True if the plan has a digest, and it is of other content.
pub fn is_edited(plan: &Plan) -> bool {
    plan.digest.is_some() && of(plan).ok() != plan.digest
}

fn of(plan: &Plan) -> Result<String, PlanFileError> {
    let content = Plan { digest: None, extra: BTreeMap::new(), ..plan.clone() };
    Ok(sha256(to_json(&content)?.as_bytes()))
}
