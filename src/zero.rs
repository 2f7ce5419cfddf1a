//! `--zero`: what replicas share of what they would hold alike.

use crate::failure::Failure;
use compiler::partition::planner::{self, PlanError, Planned, PlannerOptions};
use compiler::partition::search::zero::least;
use compiler::plan::problem::Problem;
use compiler::plan::zero::{LEVELS, MOST};

/// The level that is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zero {
    /// This one.
    Level(u32),
    /// The least with which the best plan fits.
    Auto,
}

/// Reads it.
pub fn read(text: &str) -> Result<Zero, String> {
    match (text, text.parse()) {
        ("auto", _) => Ok(Zero::Auto),
        (_, Ok(level)) if level <= MOST => Ok(Zero::Level(level)),
        _ => Err(format!("write a level {LEVELS}, or auto")),
    }
}

impl Zero {
    /// Refuses a level where nothing is trained.
    pub fn check(self, trains: bool) -> Result<(), Failure> {
        match self {
            Zero::Level(level) if level > 0 && !trains => {
                Err(Failure::input(format!("`--zero {level}` does not go with `--schedule inference`"))
                    .because("replicas share gradients and the state of the optimizer, and nothing is trained")
                    .help("leave it out"))
            }
            _ => Ok(()),
        }
    }

    /// The level of a problem; that of a search for one is the least.
    pub fn level(self) -> u32 {
        if let Zero::Level(level) = self { level } else { 0 }
    }

    /// Makes the plan.
    pub fn plan(self, problem: &Problem, options: &PlannerOptions<'_>) -> Result<Planned, PlanError> {
        let mut planned = match self {
            Zero::Auto => least(problem, options)?,
            Zero::Level(_) => planner::plan(problem, options)?,
        };
        let plan = &mut planned.plan;
        if self.level() > 0 && plan.stages.iter().all(|stage| stage.zero == 0) {
            plan.warnings.push("no stage has replicas that could share anything: ZeRO changes nothing".to_string());
        }
        Ok(planned)
    }
}
