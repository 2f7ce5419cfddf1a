//! A straight pipeline: one stage per device, with about as many ops in each.

use super::Request;
use super::uniform::uniform;
use crate::partition::search::candidates::SearchResult;
use crate::plan::problem::ProblemError;

pub fn equal_ops(request: &Request<'_>) -> Result<SearchResult, ProblemError> {
    let problem = request.question.problem;
    let mut graph = problem.graph.clone();
    for op in &mut graph.ops {
        (op.fwd_us, op.bwd_us) = (1.0, 0.0);
    }
    let order: Vec<u32> = (0..graph.ops.len() as u32).collect();
    let shape = uniform(&graph, &problem.cluster, &order);
    Ok(SearchResult::of(request.question.candidate("equal-ops", shape)))
}
