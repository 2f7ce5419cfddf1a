//! Tensor parallelism in plans: the degree, and the costs of a model on tensor-parallel groups.

use crate::costs::Costs;
use crate::error::Error;
use crate::plan::replan;
use crate::plan::request::PlanOptions;
use compiler::cluster::device::CPU;
use compiler::plan::groups::MOST;
use compiler::plan::problem::{CostModel, Problem, Recomputation, Target};
use compiler::plan::{Plan, Stage};
use compiler::profile::cost_graph::OpCost;
use compiler::profile::shared::{ActivationSharding, TensorParallelCosts};
use compiler::tensor_parallel::cost::Machine;
use compiler::tensor_parallel::costs::shared_costs_by;
use compiler::tensor_parallel::experts;
use compiler::tensor_parallel::segments::{Scratch, Segments, Sharded};
use profiler::scratch::scratch;
use serde_json::Value;
use std::collections::HashMap;

/// The layout of weights and activations in a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupLayout {
    /// What is fastest: weights may be gathered, or replicated.
    Any,
    /// Matrices of weights stay sharded.
    KeepsWeights,
    /// The same, and activations between layers are split along the sequence.
    SequenceParallel,
    /// Experts are sharded, and each device computes all else for its own samples.
    ExpertParallel,
}

impl GroupLayout {
    /// The layouts of a model on a target. Megatron-LM and torchtitan shard matrices of weights and never gather them.
    pub fn of(costs: &Costs, target: Option<Target>) -> Vec<GroupLayout> {
        let mut all = match target {
            Some(Target::Megatron | Target::Torchtitan) => vec![],
            _ => vec![GroupLayout::Any],
        };
        all.extend([GroupLayout::KeepsWeights, GroupLayout::SequenceParallel]);
        if target.is_none() && costs.shareable.as_ref().is_some_and(|known| experts::are_in(&known.graph)) {
            all.push(GroupLayout::ExpertParallel);
        }
        all
    }

    /// The layout of a plan.
    fn of_plan(plan: &Plan) -> GroupLayout {
        let keeps_weights = plan.stages.iter().any(|stage| stage.tensor_parallel.is_some_and(|of| of.keeps_weights));
        match plan.activations() {
            ActivationSharding::Replicated if keeps_weights => GroupLayout::KeepsWeights,
            ActivationSharding::Replicated => GroupLayout::Any,
            ActivationSharding::Sequence => GroupLayout::SequenceParallel,
            ActivationSharding::Batch => GroupLayout::ExpertParallel,
        }
    }
}

/// The tensor-parallel degree of each replica.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TensorParallel {
    /// Degree 1.
    #[default]
    Never,
    /// The best degree.
    Auto,
    Degree(u32),
}

impl TensorParallel {
    /// The requested degree of a plan.
    pub fn of_plan(plan: &Plan) -> TensorParallel {
        match plan.options.get("tensor") {
            Some(Value::Array(sizes)) => {
                let size = sizes.first().and_then(Value::as_u64).and_then(|size| u32::try_from(size).ok());
                size.map_or(TensorParallel::Auto, TensorParallel::Degree)
            }
            Some(_) => TensorParallel::Auto,
            None => TensorParallel::Never,
        }
    }

    /// The degree of a plan's stages.
    pub fn in_plan(plan: &Plan) -> TensorParallel {
        match plan.stages.iter().map(Stage::degree).max() {
            Some(degree) if degree > 1 => TensorParallel::Degree(degree),
            _ => TensorParallel::Never,
        }
    }

    /// Degrees that divide the innermost level.
    pub fn sizes(self, costs: &Costs) -> Result<Vec<u32>, Error> {
        let (name, count) = costs.cluster.levels.first().map_or(("", 1), |level| (level.name.as_str(), level.count));
        match self {
            TensorParallel::Never => Ok(Vec::new()),
            TensorParallel::Degree(size) if costs.cluster.is_mixed() => Err(Error::conflict(
                format!("--tensor {size}"),
                "a cluster of several device classes",
            )
            .because("the costs of tensor-parallel groups are those of one device type")
            .with_help(
                "omit `--tensor` to plan for all devices, or describe only the devices of one type in the cluster file",
            )),
            // Only degree 1 is known to work.
            TensorParallel::Auto if costs.cluster.is_mixed() => Ok(Vec::new()),
            TensorParallel::Degree(size) if !count.is_multiple_of(size) => {
                Err(Error::input(format!("`--tensor {size}` does not divide the {count} devices of {name}"))
                    .because("tensor parallelism runs only within the innermost level")
                    .with_help("use a divisor of that number, or `--tensor auto`"))
            }
            TensorParallel::Degree(size) => Ok(vec![size]),
            TensorParallel::Auto => {
                let mut sizes: Vec<u32> = (1..=MOST.ilog2()).map(|power| 1 << power).chain([count]).collect();
                sizes.retain(|size| (2..=MOST).contains(size) && count.is_multiple_of(*size));
                sizes.sort_unstable();
                sizes.dedup();
                Ok(sizes)
            }
        }
    }

    /// The costs of the model on such groups, for a target framework if there is one.
    pub fn costs(self, costs: &Costs, target: Option<Target>) -> Result<Vec<TensorParallelCosts>, Error> {
        self.costs_by(costs, target, &|_| false)
    }

    /// The costs that the search of a plan had, in its layout. Groups are cut between any two ops if the plan cuts them so.
    pub fn costs_of(plan: &Plan, costs: &Costs) -> Result<Vec<TensorParallelCosts>, Error> {
        let of_stage = |(at, stage): (usize, &'_ Stage)| stage.op_ids().map(move |op| (op, at)).collect::<Vec<_>>();
        let stage_of: HashMap<u32, usize> = plan.stages.iter().enumerate().flat_map(of_stage).collect();
        let is_cut = |op: &OpCost| op.joins.is_some_and(|to| stage_of.get(&to.0) != stage_of.get(&op.id));
        let layout = GroupLayout::of_plan(plan);
        let of_size = |devices| match group_costs(costs, devices, layout)? {
            found if found.graph.ops.iter().any(is_cut) => segment_costs(costs, devices, layout, Segments::Ops),
            found => Ok(found),
        };
        TensorParallel::in_plan(plan).sizes(costs)?.into_iter().map(of_size).collect()
    }

    /// The costs for these options. Groups are cut between any two ops if the options need it.
    pub fn costs_for(self, costs: &Costs, options: &PlanOptions) -> Result<Vec<TensorParallelCosts>, Error> {
        let stages = options.replicas.as_ref().map_or(0, Vec::len);
        let ends = options.cut_after.is_some() || !options.pins.is_empty();
        // Target frameworks shard layers, so they cut where segments of layers end.
        let names_ends = ends && options.target.is_none();
        let is_coarse = |found: &TensorParallelCosts| {
            let segments = found.graph.ops.iter().filter(|op| op.joins.is_none()).count();
            matches!(self, TensorParallel::Degree(_)) && (names_ends || segments < stages)
        };
        self.costs_by(costs, options.target, &is_coarse)
    }

    fn costs_by(
        self,
        costs: &Costs,
        target: Option<Target>,
        is_coarse: &dyn Fn(&TensorParallelCosts) -> bool,
    ) -> Result<Vec<TensorParallelCosts>, Error> {
        let mut all: Vec<TensorParallelCosts> = Vec::new();
        let layouts = GroupLayout::of(costs, target);
        for devices in self.sizes(costs)? {
            for &layout in &layouts {
                let mut found = group_costs(costs, devices, layout)?;
                if is_coarse(&found) {
                    found = segment_costs(costs, devices, layout, Segments::Ops)?;
                }
                // Layouts may have the same costs.
                if all.iter().all(|known| known.devices != devices || known.graph != found.graph) {
                    all.push(found);
                }
            }
        }
        Ok(all)
    }
}

/// The costs of the model on groups of this many devices.
pub fn group_costs(costs: &Costs, devices: u32, layout: GroupLayout) -> Result<TensorParallelCosts, Error> {
    segment_costs(costs, devices, layout, Segments::Cheapest)
}

/// The same costs as training has, which shards each stage of the plan as a whole. `None` if the plan has one device per
/// replica, or if its stages are not sharded so: a target framework has its own way, and recomputation may be of a part
/// of a stage.
pub fn costs_as_trained(costs: &Costs, plan: &Plan) -> Option<TensorParallelCosts> {
    let degree = plan.stages.first().map(Stage::degree).filter(|degree| *degree > 1)?;
    let is_other = plan.options.contains_key("target") || plan.schedule.kind.is_custom() || plan.schedule.chunks > 1;
    if is_other || plan.cost != CostModel::Pipec || plan.stages.iter().any(|stage| stage.recompute) {
        return None;
    }
    let stages: Vec<Vec<u32>> = plan.stages.iter().map(|stage| stage.op_ids().collect()).collect();
    segment_costs(costs, degree, GroupLayout::of_plan(plan), Segments::Stages(&stages)).ok()
}

/// The problem of a plan with the costs of its stages as training has them; `problem` is the searched one.
pub fn problem_as_trained(problem: &Problem, costs: &Costs, plan: &Plan) -> Option<Problem> {
    let mut asked = Problem { shared: vec![costs_as_trained(costs, plan)?], ..problem.clone() };
    asked.count_updates();
    asked.schedule = plan.schedule.kind;
    asked.zero = plan.zero();
    (asked.recompute, asked.bucket) = (Recomputation::Never, replan::bucket(plan));
    Some(asked)
}

fn segment_costs(
    costs: &Costs,
    devices: u32,
    layout: GroupLayout,
    segments: Segments<'_>,
) -> Result<TensorParallelCosts, Error> {
    let fail = |why: &dyn std::fmt::Display| {
        Error::input(format!("cannot compute the tensor-parallel costs of {}", costs.model.file)).because(why)
    };
    let (Some(known), Some(level)) = (&costs.shareable, costs.cluster.levels.first()) else {
        return Err(
            fail(&"a published profile does not describe the computation of its ops").with_help("omit `--tensor`")
        );
    };
    let machine = Machine {
        device: known.device.clone(),
        devices: devices as usize,
        bandwidth: level.bandwidth,
        latency: level.latency,
        keeps_weights: matches!(layout, GroupLayout::KeepsWeights | GroupLayout::SequenceParallel),
        activations: match layout {
            GroupLayout::Any | GroupLayout::KeepsWeights => ActivationSharding::Replicated,
            GroupLayout::SequenceParallel => ActivationSharding::Sequence,
            GroupLayout::ExpertParallel => ActivationSharding::Batch,
        },
    };
    // The workspace of kernels is known only for CPUs.
    let is_known = known.device.kind == CPU && matches!(segments, Segments::Stages(_));
    let of = Sharded { segments, scratch: is_known.then_some(&scratch as Scratch<'_>) };
    shared_costs_by(&known.graph, known.training, &costs.graph, &machine, of).map_err(|error| fail(&error))
}
