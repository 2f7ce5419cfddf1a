//! Tensor parallelism in plans: the degree, and the costs of a model on tensor-parallel groups.

use crate::costs::Costs;
use crate::error::Error;
use compiler::plan::groups::MOST;
use compiler::plan::problem::Target;
use compiler::plan::{Plan, Stage};
use compiler::profile::shared::{ActivationSharding, TensorParallelCosts};
use compiler::tensor_parallel::cost::Machine;
use compiler::tensor_parallel::costs::shared_costs;
use compiler::tensor_parallel::experts;
use serde_json::Value;

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
}

/// The tensor-parallel degree of each replica.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TensorParallel {
    /// Degree 1.
    #[default]
    Never,
    /// The best degree.
    Auto,
    /// This degree.
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
            TensorParallel::Degree(size) if costs.cluster.is_mixed() => Err(Error::input(format!(
                "`--tensor {size}` cannot be combined with a cluster of several device classes"
            ))
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
        let mut all: Vec<TensorParallelCosts> = Vec::new();
        let layouts = GroupLayout::of(costs, target);
        for devices in self.sizes(costs)? {
            for &layout in &layouts {
                let found = group_costs(costs, devices, layout)?;
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
    shared_costs(&known.graph, known.training, &costs.graph, &machine).map_err(|error| fail(&error))
}
