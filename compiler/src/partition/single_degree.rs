//! Planning with one tensor-parallel degree: each device holds whole ops.

use crate::partition::answer::{answer, conclude};
use crate::partition::error::PlanError;
use crate::partition::heterogeneous;
use crate::partition::options::{Effort, PlannerOptions};
use crate::partition::planned::Planned;
use crate::partition::search::context::{Depth, SearchContext, SearchLimits};
use crate::partition::search::fused_graph::FusedGraph;
use crate::plan::problem::Problem;

/// The plan of a problem without tensor parallelism.
pub fn plan(problem: &Problem, options: &PlannerOptions<'_>) -> Result<Planned, PlanError> {
    options.check(problem)?;
    let joined = FusedGraph::of(&problem.graph);
    let asked = joined.problem(problem);
    let whole = SearchContext::new(problem, &asked, &joined, options);
    let among = SearchLimits { depth: Depth::Draft, ..SearchLimits::ALONE };
    let draft = SearchContext { among, ..whole };
    let mut planned = if problem.cluster.is_mixed() {
        heterogeneous::plan::plan(&whole)?
    } else {
        let found = if options.effort == Effort::Draft { answer(&draft).ok() } else { None };
        match found {
            Some(answer) => conclude(&draft, answer)?,
            None => conclude(&whole, answer(&whole).map_err(|refused| refused.error)?)?,
        }
    };
    planned.set_idle(problem);
    Ok(planned)
}
