//! The ZeRO stage of a plan.

use crate::error::Error;
use compiler::partition::error::PlanError;
use compiler::partition::options::PlannerOptions;
use compiler::partition::planned::Planned;
use compiler::partition::planner;
use compiler::partition::search::zero::least;
use compiler::plan::problem::{Problem, Target};
use compiler::plan::zero::{MOST, Zero};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZeroStage {
    Given(Zero),
    /// The lowest stage with which the best plan fits.
    Auto,
}

impl ZeroStage {
    /// Refuses ZeRO for inference, and groups that shard where the target has none.
    pub fn validate(self, trains: bool, target: Option<Target>) -> Result<(), Error> {
        let zero = self.zero();
        if zero.level > 0 && !trains {
            return Err(Error::conflict(format!("--zero {zero}"), "`--schedule inference`")
                .because("ZeRO shards gradients and optimizer state, which inference does not have")
                .with_help("omit it"));
        }
        if let Some(target) = target.filter(|target| zero.degree > 0 && !target.has_shard_degree(zero.level)) {
            let most = zero.level.min(target.most_zero());
            return Err(Error::conflict(format!("--zero {zero}"), format!("`--target {}`", target.name()))
                .because("groups of replicas shard in torchtitan, in Megatron-LM at ZeRO 1, and in pipec's own runtime")
                .with_help(format!("use `--zero {most}` or `--target torchtitan`, or omit `--target`")));
        }
        Ok(())
    }

    /// That of the planning problem; none if it is searched.
    pub fn zero(self) -> Zero {
        if let ZeroStage::Given(zero) = self { zero } else { Zero::default() }
    }

    /// All kinds for this problem, those that need less memory later. Devices on the innermost level may shard alone.
    pub fn kinds(self, problem: &Problem) -> Vec<Zero> {
        let target = problem.constraints.target;
        let ZeroStage::Auto = self else { return vec![self.zero()] };
        let most = self.least(target).level;
        let degree = problem.cluster.levels.first().map_or(0, |level| level.count);
        let is_split = (2..problem.cluster.devices()).contains(&degree);
        let has_groups = |level| level > 0 && is_split && target.is_none_or(|target| target.has_shard_degree(level));
        let groups = |level| has_groups(level).then_some(Zero { level, degree });
        (0..=most).flat_map(|level| groups(level).into_iter().chain([Zero::over_all(level)])).collect()
    }

    /// The kind that needs the least memory.
    pub fn least(self, target: Option<Target>) -> Zero {
        if let ZeroStage::Given(zero) = self { zero } else { Zero::over_all(target.map_or(MOST, Target::most_zero)) }
    }

    /// The kind for lower bounds of the time.
    pub fn fastest(self, target: Option<Target>) -> Zero {
        let least = self.least(target);
        let may_group = self == ZeroStage::Auto && target.is_none_or(|target| target.has_shard_degree(least.level));
        if may_group { Zero { degree: 2, ..least } } else { least }
    }

    pub fn plan(self, problem: &Problem, options: &PlannerOptions<'_>) -> Result<Planned, PlanError> {
        let mut planned = match self {
            ZeroStage::Auto => least(problem, &self.kinds(problem), options)?,
            ZeroStage::Given(_) => planner::plan(problem, options)?,
        };
        let plan = &mut planned.plan;
        if self.zero().level > 0 && plan.stages.iter().all(|stage| stage.zero == 0) {
            plan.warnings.push("no stage has several replicas, so ZeRO has no effect".to_string());
        }
        Ok(planned)
    }
}
