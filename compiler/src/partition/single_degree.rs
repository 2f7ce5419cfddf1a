//! Planning with one tensor-parallel degree: each device holds whole ops.

use crate::partition::answer::{answer, conclude};
use crate::partition::error::PlanError;
use crate::partition::heterogeneous;
use crate::partition::options::PlannerOptions;
use crate::partition::planned::Planned;
use crate::partition::search::context::{Depth, SearchContext, SearchLimits};
use crate::partition::search::fused_graph::FusedGraph;
use crate::partition::support;
use crate::plan::problem::Problem;

/// The plan of a problem without tensor parallelism.
pub fn plan(problem: &Problem, options: &PlannerOptions<'_>) -> Result<Planned, PlanError> {
    support::check(problem, options)?;
    let joined = FusedGraph::of(&problem.graph);
    let asked = joined.problem(problem);
    let context = |depth: Depth| {
        let among = SearchLimits { depth, ..SearchLimits::ALONE };
        SearchContext { problem: &asked, joined: &joined, budget: options.budget, among }
    };
    let (draft, whole) = (context(Depth::Draft), context(Depth::Whole));
    let mut planned = if problem.cluster.is_mixed() {
        heterogeneous::plan::plan(problem, &whole, options)?
    } else {
        let found = if options.is_draft { answer(&draft, options).ok() } else { None };
        let (question, answer) = match found {
            Some(answer) => (&draft, answer),
            None => (&whole, answer(&whole, options).map_err(|refused| refused.error)?),
        };
        conclude(problem, question, options, answer)?
    };
    planned.set_idle(problem);
    Ok(planned)
}
