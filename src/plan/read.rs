//! Reads plans and checks that they are valid.

use crate::error::Error;
use crate::files::input;
use crate::loss::CountedLoss;
use crate::plan::optimizer::Optimizer;
use crate::plan::replan::number;
use compiler::plan::Plan;
use compiler::plan::check::consistency::sound;
use compiler::plan::check::error::PlanFault;
use compiler::plan::check::figures::figures;
use compiler::plan::digest;
use compiler::plan::problem::CostModel;
use compiler::profile::precision::Precision;
use compiler::simulate::check_plan::stated;
use compiler::text::name::short_name;
use std::path::Path;

/// Maximum number of faults listed in an error.
pub const LISTED: usize = 16;

/// Why a non-contiguous placement has no programs.
pub const NOT_A_PIPELINE: &str = "its devices hold non-contiguous sets of nodes, so tensors flow back and forth between them: the published cost sums what \
     each device computes, sends and receives, and no program can run its stages in order";

/// The fault of a plan whose content is not that of its digest.
const EDITED: &str = "the plan was edited after pipec wrote it, and what it predicts may not hold; delete its `digest` to use it as your own";

/// Reads a plan and checks that it is consistent.
pub fn read_checked(path: &Path) -> Result<Plan, Error> {
    let plan = input::plan(path)?;
    let mut faults = structural_faults(&plan);
    if faults.is_empty() {
        faults = contradictions(&plan);
    }
    if faults.is_empty() {
        return Ok(plan);
    }
    let error = Error::input(format!("{} is not a valid plan", path.display()));
    let error = faults.iter().take(LISTED).fold(error, Error::because);
    Err(error.with_help("make the plan again with `pipec partition`; change it with `--stages`, `--cut-after` and `--pin` instead of editing the file"))
}

/// The faults of the plan's structure.
pub fn structural_faults(plan: &Plan) -> Vec<String> {
    sound(plan).err().unwrap_or_default().iter().map(ToString::to_string).collect()
}

/// The contradictions between values of a sound plan, and names that pipec does not know.
pub fn contradictions(plan: &Plan) -> Vec<String> {
    let mut faults: Vec<String> = figures(plan).iter().map(ToString::to_string).collect();
    faults.extend(CountedLoss::read(plan.model.import.loss.as_deref()).err().map(|failure| failure.line()));
    if plan.cost == CostModel::Pipec {
        if Precision::from_name(&plan.dtype).is_none() {
            faults.push(format!("unknown element type `{}`", short_name(&plan.dtype)));
        }
        faults.extend(optimizer_fault(plan).map(|fault| fault.to_string()));
    }
    if faults.is_empty() {
        faults.extend(stated(plan).map(|fault| fault.to_string()));
    }
    if faults.is_empty() && digest::is_edited(plan) {
        faults.push(EDITED.to_string());
    }
    faults
}

/// The fault if the optimizer has another state than the plan's memory counts.
fn optimizer_fault(plan: &Plan) -> Option<PlanFault> {
    let stated = number(plan, "optimizer_state").unwrap_or(0.0);
    let has_state = Optimizer::from_name(&plan.optimizer).is_some_and(|optimizer| optimizer.state() == stated);
    (!has_state).then(|| PlanFault::Figure {
        what: "optimizer".to_string(),
        said: plan.optimizer.clone(),
        found: format!("one with {stated} values per weight"),
    })
}

/// True if tensors flow from later devices to earlier ones, as in non-contiguous placements.
pub fn is_cyclic(plan: &Plan) -> bool {
    plan.cost == CostModel::Load && plan.edges.iter().any(|edge| edge.from >= edge.to)
}
