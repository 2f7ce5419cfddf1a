//! Stages as lists of modules that frameworks do not split: the top-level modules, and the items of numbered lists.

use super::refusal::Refusal;
use crate::plan::Plan;
use crate::profile::module_units::Units;
use std::collections::BTreeMap;

/// The modules of each stage, in order of first use. Refuses a module in two stages, and a stage without modules.
pub fn layers(plan: &Plan, tool: &'static str) -> Result<Vec<Vec<String>>, Refusal> {
    let units = Units::of(plan.stages.iter().flat_map(|stage| stage.modules.iter().map(String::as_str)));
    let mut stage_of_unit: BTreeMap<String, u32> = BTreeMap::new();
    let mut stages = Vec::with_capacity(plan.stages.len());
    for stage in &plan.stages {
        let mut stage_units = Vec::new();
        for module in &stage.modules {
            let unit = units.name(module);
            if unit.is_empty() {
                continue;
            }
            match stage_of_unit.get(&unit) {
                Some(first) if *first != stage.id.0 => {
                    return Err(Refusal::CutModule { tool, module: unit, first: *first, second: stage.id.0 });
                }
                Some(_) => {}
                None => {
                    stage_of_unit.insert(unit.clone(), stage.id.0);
                    stage_units.push(unit);
                }
            }
        }
        if stage_units.is_empty() {
            return Err(Refusal::NoModules { stage: stage.id.0 });
        }
        stages.push(stage_units);
    }
    Ok(stages)
}

/// Refuses modules nested deeper than a top-level list, such as `a.layers.0`.
pub fn are_shallow(stages: &[Vec<String>], tool: &'static str) -> Result<(), Refusal> {
    for (stage, modules) in (0u32..).zip(stages) {
        for module in modules {
            let mut parts = module.split('.');
            if let (Some(first), Some(_), Some(_)) = (parts.next(), parts.next(), parts.next()) {
                let why = "only looks for layers in top-level lists";
                return Err(Refusal::Nested { tool, module: module.clone(), within: first.to_string(), stage, why });
            }
        }
    }
    Ok(())
}
