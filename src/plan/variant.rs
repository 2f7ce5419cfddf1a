//! Variants of a model: one micro-batch size, on single devices or on tensor-parallel groups.

use crate::costs::Costs;
use crate::error::Error;
use crate::plan::from_costs::{efficiency, planner_options, problem};
use crate::plan::request::{PlanOptions, PlanRequest, ScheduleChoice};
use crate::plan::tensor_parallel::{GroupLayout, group_costs};
use crate::plan::zero::ZeroStage;
use compiler::partition::bounds::flush_bound::FlushBound;
use compiler::partition::error::PlanError;
use compiler::partition::options::{Effort, PlannerOptions};
use compiler::partition::planned::Planned;
use compiler::partition::search::layouts::{LayoutEstimate, Layouts};
use compiler::partition::search::tensor_parallel;
use compiler::plan::coarsen;
use compiler::plan::problem::Problem;
use compiler::plan::schedule::Schedule;
use compiler::plan::{Edge, Stage};
use compiler::profile::shared::{ExpertWeights, TensorParallelCosts};
use compiler::tensor_parallel::experts;
use std::collections::HashMap;

/// Models with more ops are searched in pieces that end where few tensors cross, and with one layout of weights in
/// groups.
pub const MOST_OPS: usize = 400;

/// The smallest ratio between micro-batch sizes.
const STEP: f64 = 1.5;

/// The costs of a model at any micro-batch size.
pub trait SizedCosts: Sync {
    /// The micro-batch size, if only one is possible or was requested.
    fn only_size(&self) -> Option<u64>;

    /// The costs at this micro-batch size.
    fn at(&self, micro_batch: u64) -> Result<Costs, Error>;

    /// The costs on tensor-parallel groups of this many devices.
    fn on_groups(&self, costs: &Costs, devices: u32, layout: GroupLayout) -> Result<TensorParallelCosts, Error> {
        group_costs(costs, devices, layout)
    }
}

/// A size of micro-batches on devices or groups.
pub struct Variant {
    /// Samples per micro-batch.
    pub micro_batch: u64,
    /// The problem with all devices, and the costs on groups.
    pub whole: Problem,
    /// The problem over groups.
    pub groups: Option<Problem>,
    /// The weights of experts on one device.
    pub experts: Vec<ExpertWeights>,
    /// The device whose costs these are, if known.
    pub source: Option<String>,
    /// A lower bound of its time.
    pub bound: FlushBound,
    /// Its layouts that fit.
    pub estimates: Vec<LayoutEstimate>,
}

impl Variant {
    /// The variant with these costs, without estimates.
    pub fn new(
        request: &PlanRequest,
        costs: Costs,
        groups: Option<TensorParallelCosts>,
        batch: u64,
    ) -> Result<Variant, Error> {
        let micro_batch = costs.micro_batch;
        let options = PlanOptions {
            microbatches: count(batch, micro_batch)?,
            schedule: Some(ScheduleChoice::Named(Schedule::OneFOneB)),
            ..request.options.clone()
        };
        let source = costs.source.clone();
        let model = costs.shareable.as_ref().filter(|_| groups.is_none());
        let experts = model.map_or(Vec::new(), |model| experts::of_graph(&model.graph, &HashMap::new()));
        let mut whole = problem(costs, groups.into_iter().collect(), &options, None)?;
        if whole.shared.is_empty() && whole.graph.ops.len() > MOST_OPS {
            whole.graph = coarsen::pieces(&whole.graph);
        }
        let groups = whole.shared.first().and_then(|costs| tensor_parallel::group_problem(&whole, costs));
        if whole.shared.is_empty() != groups.is_none() {
            return Err(Error::bug("a tensor-parallel degree does not divide the innermost level"));
        }
        let problem = groups.as_ref().unwrap_or(&whole);
        let bound = FlushBound::of(&problem.graph, &problem.cluster, problem.microbatches);
        Ok(Variant { micro_batch, whole, groups, experts, source, bound, estimates: Vec::new() })
    }

    /// The variant with its layouts under these schedules and ZeRO stages.
    pub fn estimated(mut self, schedules: &[Schedule], zero: ZeroStage, chunks: Option<u32>) -> Variant {
        self.estimates = Layouts::of(self.problem()).estimates(schedules, &zero.kinds(self.problem()), chunks);
        self
    }

    /// The problem that is planned: of devices, or of groups.
    pub fn problem(&self) -> &Problem {
        self.groups.as_ref().unwrap_or(&self.whole)
    }

    /// The time of the fastest layout by estimate.
    pub fn least_us(&self) -> f64 {
        self.estimates.iter().map(|estimate| estimate.minibatch_us).fold(f64::INFINITY, f64::min)
    }

    /// A plan as all devices see it, without simulated baselines; improved with this effort.
    pub fn planned(
        &self,
        options: &PlanOptions,
        effort: Effort,
        plan: &dyn Fn(&Problem, &PlannerOptions<'_>) -> Result<Planned, PlanError>,
    ) -> Result<Planned, PlanError> {
        self.with_planner(options, |planner| {
            let planner = PlannerOptions { effort, without_baselines: true, gap: options.gap, ..*planner };
            let (Some(groups), Some(costs)) = (&self.groups, self.whole.shared.first()) else {
                return plan(&self.whole, &planner);
            };
            let mut planned = tensor_parallel::of_groups(&self.whole, costs, groups, &planner, plan)?;
            planned.set_idle(&self.whole);
            Ok(planned)
        })
    }

    /// Calls a function with the options of the planner.
    pub fn with_planner<T>(&self, options: &PlanOptions, run: impl FnOnce(&PlannerOptions<'_>) -> T) -> T {
        let simulate = |stages: &[Stage], edges: &[Edge], caps: &[u32]| efficiency(&self.whole, stages, edges, caps);
        run(&planner_options(options, &simulate))
    }
}

/// The number of micro-batches.
pub fn count(batch: u64, micro_batch: u64) -> Result<u32, Error> {
    u32::try_from(batch / micro_batch).ok().filter(|_| batch.is_multiple_of(micro_batch)).ok_or_else(|| {
        Error::input(format!("`--batch {batch}` is not a multiple of the micro-batch size {micro_batch}"))
            .because("the costs are for that size")
            .with_help(format!("use a multiple of {micro_batch}, or costs for another `--micro-batch`"))
    })
}

/// Micro-batch sizes, ascending, each at least [`STEP`] times the one before.
pub fn sizes(batch: u64) -> Vec<u64> {
    let mut sizes: Vec<u64> = Vec::new();
    for size in (1..=batch.min(1 << 20)).filter(|size| batch.is_multiple_of(*size) && batch / size <= 1 << 20) {
        if sizes.last().is_none_or(|last| size as f64 >= STEP * *last as f64) {
            sizes.push(size);
        }
    }
    if sizes.is_empty() {
        sizes.push(batch);
    }
    sizes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_divide_and_are_apart() {
        assert_eq!(sizes(1), [1]);
        assert_eq!(sizes(24), [1, 2, 3, 6, 12, 24]);
        assert_eq!(sizes(7), [1, 7]);
        assert!(sizes(1536).iter().all(|size| 1536 % size == 0));
    }
}
