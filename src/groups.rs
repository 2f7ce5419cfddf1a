//! Groups of devices that share the ops of a replica, as planning asks about them: `--tensor never|auto|N`.

use crate::failure::Failure;
use crate::source::Costs;
use compiler::cluster::Device;
use compiler::graph::Graph;
use compiler::pass::attribution::Training;
use compiler::plan::groups::MOST;
use compiler::plan::{Plan, Stage};
use compiler::profile::shared::SharedCosts;
use compiler::tensor_parallel::cost::Machine;
use compiler::tensor_parallel::costs::shared_costs;
use serde_json::Value;

/// How many devices may share each replica.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Groups {
    /// One.
    #[default]
    Never,
    /// As many as the planner finds best.
    Auto,
    /// So many.
    Of(u32),
}

/// What groups can be asked about: a model whose ops are known.
#[derive(Clone)]
pub struct Shareable {
    /// The model at fixed sizes.
    pub graph: Graph,
    /// What training adds to it.
    pub training: Training,
    /// The device of the roofline.
    pub device: Device,
}

/// Reads `--tensor`.
pub fn said(text: &str) -> Result<Groups, String> {
    match text {
        "never" => Ok(Groups::Never),
        "auto" => Ok(Groups::Auto),
        _ => match text.parse() {
            Ok(1) => Ok(Groups::Never),
            Ok(devices) if (2..=MOST).contains(&devices) => Ok(Groups::Of(devices)),
            _ => Err(format!("write never, auto, or the number of devices that share each replica, up to {MOST}")),
        },
    }
}

impl Groups {
    /// What the plan was asked for with.
    pub fn of_plan(plan: &Plan) -> Groups {
        match plan.options.get("tensor") {
            Some(Value::Array(sizes)) => {
                let size = sizes.first().and_then(Value::as_u64).and_then(|size| u32::try_from(size).ok());
                size.map_or(Groups::Auto, Groups::Of)
            }
            Some(_) => Groups::Auto,
            None => Groups::Never,
        }
    }

    /// The groups of a plan's own stages.
    pub fn in_plan(plan: &Plan) -> Groups {
        match plan.stages.iter().map(Stage::degree).max() {
            Some(degree) if degree > 1 => Groups::Of(degree),
            _ => Groups::Never,
        }
    }

    /// Sizes of groups that fill the units of the fastest level.
    fn sizes(self, costs: &Costs) -> Result<Vec<u32>, Failure> {
        let (name, count) = costs.cluster.levels.first().map_or(("", 1), |level| (level.name.as_str(), level.count));
        match self {
            Groups::Never => Ok(Vec::new()),
            Groups::Of(size) if !count.is_multiple_of(size) => {
                Err(Failure::input(format!("`--tensor {size}` does not divide the {count} devices of {name}"))
                    .because("devices share ops over the fastest level only")
                    .help("a divisor of that number, or `--tensor auto`"))
            }
            Groups::Of(size) => Ok(vec![size]),
            Groups::Auto => {
                let mut sizes: Vec<u32> = (1..=MOST.ilog2()).map(|power| 1 << power).chain([count]).collect();
                sizes.retain(|size| (2..=MOST).contains(size) && count.is_multiple_of(*size));
                sizes.sort_unstable();
                sizes.dedup();
                Ok(sizes)
            }
        }
    }

    /// What the model costs on such groups.
    pub fn costs(self, costs: &Costs) -> Result<Vec<SharedCosts>, Failure> {
        let sizes = self.sizes(costs)?;
        let Some(level) = costs.cluster.levels.first().filter(|_| !sizes.is_empty()) else { return Ok(Vec::new()) };
        let fail = |why: &dyn std::fmt::Display| {
            Failure::input(format!("cannot tell what {} costs on groups of devices", costs.model.file)).because(why)
        };
        let Some(known) = &costs.shareable else {
            return Err(fail(&"a published profile does not say what its ops compute").help("leave out `--tensor`"));
        };
        let of = |devices: u32| {
            let machine = Machine {
                device: known.device.clone(),
                devices: devices as usize,
                bandwidth: level.bandwidth,
                latency: level.latency,
            };
            shared_costs(&known.graph, known.training, &costs.graph, &machine).map_err(|error| fail(&error))
        };
        sizes.into_iter().map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        assert_eq!(said("auto"), Ok(Groups::Auto));
        assert_eq!((said("1"), said("8")), (Ok(Groups::Never), Ok(Groups::Of(8))));
        assert!(["0", "65", "all", "-2", ""].into_iter().all(|text| said(text).is_err()));
    }
}
