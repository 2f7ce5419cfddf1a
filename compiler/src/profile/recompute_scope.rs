//! What recomputation repeats at once, and what it keeps between these parts.
//!
//! The layers of a model are checkpointed (Chen et al., "Training Deep Nets with Sublinear Memory Cost", section 4.1): the
//! inputs of every layer are kept, the backward repeats one layer after the other, and the memory of a single layer is
//! needed while it runs. torchtitan, Megatron-LM and DeepSpeed do not recompute ops outside the layers, such as embedding
//! and loss; in pipec's runtime, the ops between two layers are a part like a layer. A stage is recomputed at once, before
//! its backward, in models without layers, in tensor-parallel groups, in the torch bundle, if its backward is split, and
//! where that takes less memory.

use super::arena::{ArenaPosition, Way};
use super::cost_graph::{CostGraph, OpCost, OpId};
use super::module_units::{Units, longest, numbered};
use std::collections::{BTreeMap, BTreeSet};

/// The ops that are recomputed together with an op.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RecomputeScope {
    /// All ops of the stage.
    #[default]
    Stage,
    /// The ops of one layer, in frameworks that recompute layers only.
    Layer(u32),
    /// The ops of one layer, or those between two, in pipec's runtime.
    Part(u32),
    /// The op is never recomputed.
    Never,
}

/// Recomputes each item of the longest numbered list of modules separately. Other ops are not recomputed. A model without
/// such lists is recomputed by stage.
pub fn recompute_layers(graph: &mut CostGraph) {
    let units = Units::of(graph.ops.iter().map(|op| op.module.as_str()));
    let names: Vec<String> = graph.ops.iter().map(|op| units.name(&op.module)).collect();
    let items: BTreeSet<&str> = names.iter().map(String::as_str).collect();
    let lists = items.iter().filter_map(|name| numbered(name)).map(|(list, _)| list);
    let Some((longest, _)) = longest(lists) else { return };
    let layer_of = |name: &String| numbered(name).filter(|(list, _)| *list == longest).map(|(_, number)| number);
    let layers: Vec<Option<u32>> = names.iter().map(layer_of).collect();
    for at in 0..graph.ops.len() {
        // A fused op has a single scope.
        let layer = layers[graph.leader(OpId(at as u32)).index()];
        graph.ops[at].recompute = layer.map_or(RecomputeScope::Never, RecomputeScope::Layer);
    }
}

/// Recomputes each item of a numbered list of modules separately, and the ops between two of them. A model without such
/// lists is recomputed by stage.
pub fn recompute_parts(graph: &mut CostGraph) {
    let modules: Vec<&str> = graph.ops.iter().map(|op| op.module.as_str()).collect();
    let Some(parts) = parts(&modules) else { return };
    for at in 0..graph.ops.len() {
        graph.ops[at].recompute = RecomputeScope::Part(parts[graph.leader(OpId(at as u32)).index()]);
    }
}

/// The part of each op that is recomputed at once, by the modules of all ops of a model in their order; `None` without
/// numbered lists of modules.
pub fn parts(modules: &[&str]) -> Option<Vec<u32>> {
    let units = Units::of(modules.iter().copied());
    let mut layers: BTreeMap<String, u32> = BTreeMap::new();
    let (mut next, mut between) = (0, None);
    let mut part_of = |module: &&str| {
        let name = units.name(module);
        let part = match numbered(&name) {
            Some(_) => {
                between = None;
                *layers.entry(name).or_insert(next)
            }
            None => *between.get_or_insert(next),
        };
        next = next.max(part + 1);
        part
    };
    let parts: Vec<u32> = modules.iter().map(&mut part_of).collect();
    (layers.len() > 1).then_some(parts)
}

/// The number of layers of these ops; `None` if all ops between them are recomputed, too.
pub fn layers<'a>(ops: impl Iterator<Item = &'a OpCost>) -> Option<u32> {
    let (mut layers, mut is_by_stage) = (BTreeSet::new(), false);
    for op in ops {
        match op.recompute {
            RecomputeScope::Stage | RecomputeScope::Part(_) => is_by_stage = true,
            RecomputeScope::Layer(layer) => _ = layers.insert(layer),
            RecomputeScope::Never => {}
        }
    }
    (!is_by_stage).then_some(layers.len() as u32)
}

/// Bytes per micro-batch that recomputation frees and keeps, for each op.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecomputeCosts {
    /// Saved, and freed if the op is recomputed.
    pub freed: Vec<u64>,
    /// Not saved, but kept if the stage is recomputed, because another layer reads it.
    pub kept: Vec<u64>,
    /// Bytes that the whole layer of the op saves and passes on. In a part, those that the part has saved up to the op,
    /// the arena while it runs, and the gradients of what the part passes on: its backward frees them in
    /// reverse. `u64::MAX` if the stage is recomputed at once.
    pub layer: Vec<u64>,
    /// True if ops are recomputed by part, or at once where that takes less memory.
    pub is_by_part: bool,
    /// For each tensor: true if it is freed with its producer unless another stage reads it.
    pub frees: Vec<bool>,
    /// What is freed if all ops are recomputed at once.
    saved: Vec<u64>,
    is_saved: Vec<bool>,
}

impl RecomputeCosts {
    pub fn of(graph: &CostGraph) -> RecomputeCosts {
        let scope = |op: usize| graph.ops[op].recompute;
        let mut costs = RecomputeCosts {
            freed: graph.ops.iter().map(|op| op.saved_bytes).collect(),
            kept: vec![0; graph.ops.len()],
            layer: vec![u64::MAX; graph.ops.len()],
            is_by_part: graph.ops.iter().any(|op| matches!(op.recompute, RecomputeScope::Part(_))),
            frees: vec![false; graph.tensors.len()],
            saved: graph.ops.iter().map(|op| op.saved_bytes).collect(),
            is_saved: (0..graph.tensors.len()).map(|tensor| !graph.is_only_sent(tensor)).collect(),
        };
        let mut passed_on = vec![0u64; graph.ops.len()];
        for (at, tensor) in graph.tensors.iter().enumerate() {
            let producer = tensor.producer.index();
            // The loss reads results, and is no part.
            let is_result = costs.is_by_part && tensor.consumers.is_empty() && !graph.is_only_sent(at);
            let is_between = is_result || tensor.consumers.iter().any(|op| scope(op.index()) != scope(producer));
            if is_between {
                passed_on[producer] = passed_on[producer].saturating_add(tensor.bytes);
            }
            match (graph.is_only_sent(at), is_between) {
                (true, true) => costs.kept[producer] = costs.kept[producer].saturating_add(tensor.bytes),
                (false, true) => costs.freed[producer] = costs.freed[producer].saturating_sub(tensor.bytes),
                (false, false) => costs.frees[at] = scope(producer) != RecomputeScope::Never,
                (true, false) => {}
            }
        }
        // While a part is recomputed, the gradients of what it passes on wait.
        let mut gradients: BTreeMap<u32, u64> = BTreeMap::new();
        for (op, passed_on) in passed_on.iter().enumerate() {
            if let RecomputeScope::Part(part) = scope(op) {
                let sum = gradients.entry(part).or_default();
                *sum = sum.saturating_add(*passed_on);
            }
        }
        let mut layers: BTreeMap<u32, u64> = BTreeMap::new();
        for (op, passed_on) in passed_on.into_iter().enumerate() {
            match scope(op) {
                RecomputeScope::Stage => {}
                RecomputeScope::Layer(layer) => {
                    let sum = layers.entry(layer).or_default();
                    *sum = sum.saturating_add(costs.freed[op]).saturating_add(passed_on);
                }
                RecomputeScope::Part(part) => {
                    let sum = layers.entry(part).or_default();
                    *sum = sum.saturating_add(costs.freed[op]);
                    let arena = graph.ops[op].arena(ArenaPosition::default()).of(Way::default());
                    costs.layer[op] = sum.saturating_add(arena).saturating_add(gradients[&part]);
                }
                RecomputeScope::Never => (costs.freed[op], costs.layer[op]) = (0, 0),
            }
        }
        for (op, bytes) in costs.layer.iter_mut().enumerate() {
            if let RecomputeScope::Layer(layer) = scope(op) {
                *bytes = layers[&layer];
            }
        }
        costs
    }
}

/// Sums over the ops of a stage that are recomputed, in bytes per micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecomputeTerms {
    /// Freed, if no other stage reads it.
    pub freed: u64,
    /// The part of `freed` that other stages read, which stays.
    pub outputs: u64,
    /// Kept only because the stage is recomputed by layer.
    pub kept: u64,
    /// The largest layer, or the peak of any part.
    pub layer: u64,
    /// True if the terms are those of parts.
    pub is_by_part: bool,
    /// With parts: what recomputation at once would free, and the part of it that other stages read, which stays.
    pub at_once: u64,
    pub sent_at_once: u64,
}

/// How the activations of a recomputed stage are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recomputed {
    /// Bytes that a micro-batch in flight does not hold, and those that it holds instead.
    pub saves: u64,
    pub kept: u64,
    /// Bytes that recomputed micro-batches hold again.
    pub again: u64,
    pub by_part: bool,
}

impl RecomputeTerms {
    /// Adds an op without its outputs.
    pub fn add(&mut self, costs: &RecomputeCosts, op: usize) {
        self.freed = self.freed.saturating_add(costs.freed[op]);
        self.kept = self.kept.saturating_add(costs.kept[op]);
        self.layer = self.layer.max(costs.layer[op]);
        self.is_by_part = costs.is_by_part;
        self.at_once = self.at_once.saturating_add(if costs.is_by_part { costs.saved[op] } else { 0 });
    }

    /// Adds a tensor of a recomputed op that another stage reads.
    pub fn add_sent(&mut self, costs: &RecomputeCosts, tensor: usize, bytes: u64) {
        self.outputs = self.outputs.saturating_add(if costs.frees[tensor] { bytes } else { 0 });
        let is_kept = costs.is_by_part && costs.is_saved[tensor];
        self.sent_at_once = self.sent_at_once.saturating_add(if is_kept { bytes } else { 0 });
    }

    /// Removes it again.
    pub fn remove_sent(&mut self, costs: &RecomputeCosts, tensor: usize, bytes: u64) {
        self.outputs -= if costs.frees[tensor] { bytes } else { 0 };
        self.sent_at_once -= if costs.is_by_part && costs.is_saved[tensor] { bytes } else { 0 };
    }

    /// How a stage with this arena is recomputed: by part if that takes less memory. With pending weight gradients, every
    /// one of them holds what was recomputed.
    pub fn held(&self, in_flight: u64, pending: u64, arena: u64) -> Recomputed {
        let saves = self.saves();
        let again =
            if pending > 0 || self.layer == u64::MAX { saves.saturating_mul(pending.max(1)) } else { self.layer };
        let layers = Recomputed { saves, kept: self.kept, again, by_part: false };
        if !self.is_by_part {
            return layers;
        }
        let saves = self.at_once.saturating_sub(self.sent_at_once);
        let at_once = Recomputed { saves, kept: 0, again: saves.saturating_mul(pending.max(1)), by_part: false };
        let parts = Recomputed { again: self.layer.saturating_sub(arena), by_part: true, ..layers };
        let net = |one: &Recomputed| {
            i128::from(in_flight) * (i128::from(one.kept) - i128::from(one.saves)) + i128::from(one.again)
        };
        if pending == 0 && net(&parts) < net(&at_once) { parts } else { at_once }
    }

    /// Bytes that a micro-batch in flight does not hold.
    pub fn saves(&self) -> u64 {
        self.freed.saturating_sub(self.outputs)
    }
}

#[cfg(test)]
mod tests {
    use super::parts;

    #[test]
    fn parts_are_layers_and_what_is_between_them() {
        let modules = ["embed", "h.0.attn", "h.0.mlp", "h.1.attn", "h.0.late", "norm", "head", "h.2.mlp", "loss"];
        assert_eq!(parts(&modules), Some(vec![0, 1, 1, 2, 1, 3, 3, 4, 5]));
        assert_eq!(parts(&["embed", "h.0.attn", "head"]), None, "a single layer is no list");
    }
}
