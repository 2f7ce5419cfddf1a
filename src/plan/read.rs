//! Reads plans that must be valid.

use crate::error::Error;
use crate::files::input;
use compiler::plan::Plan;
use compiler::plan::check::consistency::sound;
use compiler::plan::problem::CostModel;
use std::path::Path;

/// Faults that an error lists at most.
pub const LISTED: usize = 16;

/// Why a placement that is not contiguous has no programs.
pub const NOT_A_PIPELINE: &str = "its devices hold nodes from anywhere in the graph, so that tensors go back and forth between them: the published cost adds up what \
     each device computes, sends and receives, and there is no order of stages that a program could follow";

/// Reads a plan and checks that it is consistent.
pub fn read_checked(path: &Path) -> Result<Plan, Error> {
    let plan = input::plan(path)?;
    sound(&plan).map_err(|faults| {
        let error = Error::input(format!("{} is no sound plan", path.display()));
        let error = faults.iter().take(LISTED).fold(error, Error::because);
        error.with_help("`pipec partition` writes sound plans: `--stages`, `--cut-after` and `--pin` say what to change, not the file")
    })?;
    Ok(plan)
}

/// Whether tensors go from later devices to earlier ones, as in placements that are not contiguous.
pub fn is_cyclic(plan: &Plan) -> bool {
    plan.cost == CostModel::Load && plan.edges.iter().any(|edge| edge.from >= edge.to)
}
