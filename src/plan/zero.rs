//! The ZeRO stage of a plan.

use crate::error::Error;
use compiler::partition::error::PlanError;
use compiler::partition::options::PlannerOptions;
use compiler::partition::planned::Planned;
use compiler::partition::planner;
use compiler::partition::search::zero::least;
use compiler::plan::problem::Problem;

/// The ZeRO stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZeroStage {
    /// This stage, 0 to 3.
    Level(u32),
    /// The lowest stage with which the best plan fits.
    Auto,
}

impl ZeroStage {
    /// Refuses a stage above 0 for inference.
    pub fn validate(self, trains: bool) -> Result<(), Error> {
        match self {
            ZeroStage::Level(level) if level > 0 && !trains => {
                Err(Error::input(format!("`--zero {level}` cannot be combined with `--schedule inference`"))
                    .because("ZeRO shards gradients and optimizer state, which inference does not have")
                    .with_help("omit it"))
            }
            _ => Ok(()),
        }
    }

    /// The stage of the planning problem; 0 if it is searched.
    pub fn level(self) -> u32 {
        if let ZeroStage::Level(level) = self { level } else { 0 }
    }

    /// Makes the plan.
    pub fn plan(self, problem: &Problem, options: &PlannerOptions<'_>) -> Result<Planned, PlanError> {
        let mut planned = match self {
            ZeroStage::Auto => least(problem, options)?,
            ZeroStage::Level(_) => planner::plan(problem, options)?,
        };
        let plan = &mut planned.plan;
        if self.level() > 0 && plan.stages.iter().all(|stage| stage.zero == 0) {
            plan.warnings.push("no stage has several replicas, so ZeRO has no effect".to_string());
        }
        Ok(planned)
    }
}
