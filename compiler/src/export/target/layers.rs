//! Stages as lists of modules that frameworks do not split: the top-level modules, and the items of numbered lists.

use super::refusal::Refusal;
use crate::plan::Plan;
use crate::profile::module_units::Units;
use std::collections::BTreeMap;

/// The modules of each stage, in order of first use. Refuses a module in two stages, and a stage without modules.
pub fn layers(plan: &Plan, tool: &'static str) -> Result<Vec<Vec<String>>, Refusal> {
    let units = Units::of(plan.stages.iter().flat_map(|stage| stage.modules.iter().map(String::as_str)));
    let mut held: BTreeMap<String, u32> = BTreeMap::new();
    let mut stages = Vec::with_capacity(plan.stages.len());
    for stage in &plan.stages {
        let mut own = Vec::new();
        for module in &stage.modules {
            let unit = units.name(module);
            if unit.is_empty() {
                continue;
            }
            match held.get(&unit) {
                Some(first) if *first != stage.id.0 => {
                    return Err(Refusal::CutModule { tool, module: unit, first: *first, second: stage.id.0 });
                }
                Some(_) => {}
                None => {
                    held.insert(unit.clone(), stage.id.0);
                    own.push(unit);
                }
            }
        }
        if own.is_empty() {
            return Err(Refusal::NoModules { stage: stage.id.0 });
        }
        stages.push(own);
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

/// Splits `layers.3` into list name and index.
pub fn numbered(module: &str) -> Option<(&str, u32)> {
    let (list, number) = module.rsplit_once('.').unwrap_or(("", module));
    let plain = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    plain.then(|| number.parse().ok().map(|number| (list, number)))?
}

/// The list with the most items, and their number; ties are broken by name. `lists` has the list of each item.
pub fn longest<'a>(lists: impl Iterator<Item = &'a str>) -> Option<(&'a str, u32)> {
    let mut counts: BTreeMap<&str, u32> = BTreeMap::new();
    lists.for_each(|list| *counts.entry(list).or_default() += 1);
    let most = counts.values().copied().max()?;
    counts.into_iter().find(|(_, count)| *count == most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_numbers() {
        assert_eq!(numbered("transformer.h.11"), Some(("transformer.h", 11)));
        assert_eq!(numbered("3"), Some(("", 3)));
        assert_eq!(numbered("norm"), None);
        assert_eq!(numbered("a.99999999999"), None);
    }

    #[test]
    fn the_longest_list_is_the_first_by_name() {
        assert_eq!(longest(["b", "a", "c", "b", "a"].into_iter()), Some(("a", 2)));
        assert_eq!(longest(std::iter::empty()), None);
    }
}
