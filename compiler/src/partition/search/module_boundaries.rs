//! Module boundaries for frameworks that keep modules whole: top-level modules, or the items of a numbered list.
//!
//! `layers.3.attention.wq` belongs to unit `layers.3`, and `norm.weight` to `norm`. Wrapper modules are no units: with
//! `transformer.h.0`, the units are `transformer.h.0`, `transformer.wte` and `transformer.ln_f`.

use crate::partition::search::fused_graph::FusedGraph;
use crate::profile::cost_graph::{CostGraph, OpCost, OpId};
use crate::profile::recompute_scope::RecomputeScope;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Units {
    /// Modules that enclose a numbered list below the first level.
    wrappers: BTreeSet<String>,
}

impl Units {
    pub fn of<'a>(modules: impl IntoIterator<Item = &'a str>) -> Units {
        let mut wrappers = BTreeSet::new();
        for module in modules {
            let parts = parts(module);
            let Some(number) = parts.iter().position(|part| is_number(part)) else { continue };
            // The list itself is the path component before its number.
            wrappers.extend((1..number).map(|count| parts[..count].join(".")));
        }
        Units { wrappers }
    }

    /// The unit of a module; empty for the model itself and for its wrappers.
    pub fn name(&self, module: &str) -> String {
        let parts = parts(module);
        let mut name = String::new();
        for part in &parts {
            if !name.is_empty() {
                name.push('.');
            }
            name.push_str(part);
            if is_number(part) {
                return name;
            }
        }
        let whole = (1..=parts.len()).map(|count| parts[..count].join("."));
        whole.into_iter().find(|name| !self.wrappers.contains(name)).unwrap_or_default()
    }
}

/// Lets every item of a numbered list be recomputed by itself, and nothing else. A model without such lists is
/// recomputed by stage.
pub fn recompute_layers(graph: &mut CostGraph) {
    let units = Units::of(graph.ops.iter().map(|op| op.module.as_str()));
    let mut numbers: BTreeMap<String, u32> = BTreeMap::new();
    let layer_of = |op: &OpCost| {
        let name = units.name(&op.module);
        let is_layer = name.rsplit('.').next().is_some_and(|last| !last.is_empty() && is_number(last));
        let next = numbers.len() as u32;
        is_layer.then(|| *numbers.entry(name).or_insert(next))
    };
    let layers: Vec<Option<u32>> = graph.ops.iter().map(layer_of).collect();
    if layers.iter().all(Option::is_none) {
        return;
    }
    for at in 0..graph.ops.len() {
        // A fused op has a single scope.
        let layer = layers[graph.leader(OpId(at as u32)).index()];
        graph.ops[at].recompute = layer.map_or(RecomputeScope::Never, RecomputeScope::Layer);
    }
}

pub struct Borders {
    /// Units of each fused op; a fused op may span several.
    units: Vec<BTreeSet<usize>>,
}

impl Borders {
    pub fn of(joined: &FusedGraph<'_>) -> Borders {
        let ops = &joined.full.ops;
        let names = Units::of(ops.iter().map(|op| op.module.as_str()));
        let mut numbers: BTreeMap<String, usize> = BTreeMap::new();
        let mut units = vec![BTreeSet::new(); joined.len()];
        for (at, op) in ops.iter().enumerate() {
            let name = names.name(&op.module);
            if !name.is_empty() {
                let next = numbers.len();
                units[joined.place(at)].insert(*numbers.entry(name).or_insert(next));
            }
        }
        Borders { units }
    }

    /// The positions in an order of fused ops where no unit is cut.
    pub fn ends(&self, order: &[u32]) -> Vec<usize> {
        let mut last: BTreeMap<usize, usize> = BTreeMap::new();
        for (at, &op) in order.iter().enumerate() {
            self.units[op as usize].iter().for_each(|&unit| _ = last.insert(unit, at));
        }
        let mut ends = vec![0];
        let mut open = 0;
        for (at, &op) in order.iter().enumerate() {
            open = self.units[op as usize].iter().map(|unit| last[unit]).fold(open, usize::max);
            if open <= at && at + 1 < order.len() {
                ends.push(at + 1);
            }
        }
        ends.push(order.len());
        ends
    }
}

fn parts(module: &str) -> Vec<&str> {
    module.split(['.', '/']).filter(|part| !part.is_empty()).collect()
}

fn is_number(part: &str) -> bool {
    part.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_kept_whole_at_the_depth_that_frameworks_know() {
        let units = Units::of(["layers.3.attention.wq", "tok_embeddings"]);
        assert_eq!(units.name("layers.3.attention.wq"), "layers.3");
        assert_eq!(units.name("tok_embeddings"), "tok_embeddings");
        assert_eq!(units.name("layers"), "layers");
        assert_eq!(units.name(""), "");
    }

    #[test]
    fn what_wraps_a_model_is_looked_through() {
        let units = Units::of(["m.transformer.h.11.mlp", "m.transformer.wte", "m.lm_head"]);
        assert_eq!(units.name("m.transformer.h.11.mlp"), "m.transformer.h.11");
        assert_eq!(units.name("m.transformer.wte"), "m.transformer.wte");
        assert_eq!(units.name("m.lm_head.x"), "m.lm_head");
        assert_eq!(units.name("m.transformer"), "");
    }
}
