//! Checks that planning supports a problem with the given options.

use crate::partition::options::PlannerOptions;
use crate::partition::partitioners::Partitioner;
use crate::plan::problem::{Problem, ProblemError};

pub const MAX_DEVICES: u32 = 4096;

/// Rejects invalid problems, problems that no partitioner supports, and options that the chosen partitioner does not
/// support.
pub fn check(problem: &Problem, options: &PlannerOptions<'_>) -> Result<(), ProblemError> {
    problem.check()?;
    let devices = problem.cluster.devices();
    if devices > MAX_DEVICES {
        let (limit, found) = (u64::from(MAX_DEVICES), u64::from(devices));
        return Err(ProblemError::TooLarge { method: "planning", what: "devices", limit, found });
    }
    if options.time_limit.is_some() && options.partitioner != Partitioner::Milp {
        let what = "only partitioner `milp` supports a time limit; use `--budget` for the others";
        return Err(ProblemError::Unmet { what: what.to_string() });
    }
    if problem.cluster.is_mixed() && (problem.constraints.tensor || !problem.shared.is_empty()) {
        return Err(ProblemError::Mixed { what: "`--tensor`" });
    }
    if problem.chunks > 1 && options.partitioner != Partitioner::Pipec {
        let what = "only partitioner `pipec` supports several stages per rank";
        return Err(ProblemError::Unmet { what: what.to_string() });
    }
    Ok(())
}
