//! Reads plans and checks that they are valid.

use crate::error::Error;
use crate::files::input;
use compiler::plan::Plan;
use compiler::plan::check::consistency::sound;
use compiler::plan::problem::CostModel;
use std::path::Path;

/// Maximum number of faults listed in an error.
pub const LISTED: usize = 16;

/// Why a non-contiguous placement has no programs.
pub const NOT_A_PIPELINE: &str = "its devices hold non-contiguous sets of nodes, so tensors flow back and forth between them: the published cost sums what \
     each device computes, sends and receives, and no program can run its stages in order";

/// Reads a plan and checks that it is consistent.
pub fn read_checked(path: &Path) -> Result<Plan, Error> {
    let plan = input::plan(path)?;
    sound(&plan).map_err(|faults| {
        let error = Error::input(format!("{} is not a valid plan", path.display()));
        let error = faults.iter().take(LISTED).fold(error, Error::because);
        error.with_help("make a plan with `pipec partition`; change it with `--stages`, `--cut-after` and `--pin` instead of editing the file")
    })?;
    Ok(plan)
}

/// True if tensors flow from later devices to earlier ones, as in non-contiguous placements.
pub fn is_cyclic(plan: &Plan) -> bool {
    plan.cost == CostModel::Load && plan.edges.iter().any(|edge| edge.from >= edge.to)
}
