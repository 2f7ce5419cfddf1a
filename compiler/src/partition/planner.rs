//! Entry point of planning: one plan, or the best over all tensor-parallel degrees.
//!
//! Every returned plan fits in memory, carries a lower bound and three baselines (data parallelism, uniform pipeline,
//! single device), and has passed `plan::check`. If nothing fits, the error names the stage that is too large, the
//! missing bytes and the smallest limit that would be enough. If a graph has too many down-sets, or a linear order too
//! many cuts, planning falls back to linear orders or groups of ops. The plan then has a warning.

use crate::partition::error::PlanError;
use crate::partition::options::PlannerOptions;
use crate::partition::planned::Planned;
use crate::partition::search::tensor_parallel;
use crate::partition::single_degree;
use crate::plan::problem::Problem;

pub fn plan(problem: &Problem, options: &PlannerOptions<'_>) -> Result<Planned, PlanError> {
    if !problem.constraints.tensor && problem.shared.is_empty() {
        return single_degree::plan(problem, options);
    }
    options.check(problem)?;
    let mut planned = tensor_parallel::best(problem, options)?;
    planned.set_idle(problem);
    Ok(planned)
}
