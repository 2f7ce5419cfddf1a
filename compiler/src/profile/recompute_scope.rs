//! What recomputation repeats at once, and what it keeps between these parts.
//!
//! pipec's runtime recomputes a stage at once: before the backward of a micro-batch it repeats the forward of the
//! stage's ops. torchtitan, Megatron-LM and DeepSpeed checkpoint the layers of a model (Chen et al., "Training Deep Nets
//! with Sublinear Memory Cost", section 4.1): the inputs of every layer are kept, the backward repeats one layer after
//! the other, and the memory of a single layer is needed while it runs. Ops outside the layers, such as embedding and
//! loss, are not recomputed.

use super::cost_graph::{CostGraph, OpCost, OpId};
use super::module_units::{Units, longest, numbered};
use std::collections::{BTreeMap, BTreeSet};

/// The ops that are recomputed together with an op.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RecomputeScope {
    /// All ops of the stage.
    #[default]
    Stage,
    /// The ops of one layer.
    Layer(u32),
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

/// The number of layers of these ops; `None` if they are recomputed with their stage.
pub fn layers<'a>(ops: impl Iterator<Item = &'a OpCost>) -> Option<u32> {
    let (mut layers, mut is_by_stage) = (BTreeSet::new(), false);
    for op in ops {
        match op.recompute {
            RecomputeScope::Stage => is_by_stage = true,
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
    /// Bytes that the whole layer of the op saves and passes on. `u64::MAX` if the stage is recomputed at once.
    pub layer: Vec<u64>,
    /// For each tensor: true if it is freed with its producer unless another stage reads it.
    pub frees: Vec<bool>,
}

impl RecomputeCosts {
    pub fn of(graph: &CostGraph) -> RecomputeCosts {
        let scope = |op: usize| graph.ops[op].recompute;
        let mut costs = RecomputeCosts {
            freed: graph.ops.iter().map(|op| op.saved_bytes).collect(),
            kept: vec![0; graph.ops.len()],
            layer: vec![u64::MAX; graph.ops.len()],
            frees: vec![false; graph.tensors.len()],
        };
        let mut passed_on = vec![0u64; graph.ops.len()];
        for (at, tensor) in graph.tensors.iter().enumerate() {
            let producer = tensor.producer.index();
            let is_between = tensor.consumers.iter().any(|op| scope(op.index()) != scope(producer));
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
        let mut layers: BTreeMap<u32, u64> = BTreeMap::new();
        for (op, passed_on) in passed_on.into_iter().enumerate() {
            match scope(op) {
                RecomputeScope::Stage => {}
                RecomputeScope::Layer(layer) => {
                    let sum = layers.entry(layer).or_default();
                    *sum = sum.saturating_add(costs.freed[op]).saturating_add(passed_on);
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
    /// The largest layer.
    pub layer: u64,
}

impl RecomputeTerms {
    /// Adds an op without its outputs.
    pub fn add(&mut self, costs: &RecomputeCosts, op: usize) {
        self.freed = self.freed.saturating_add(costs.freed[op]);
        self.kept = self.kept.saturating_add(costs.kept[op]);
        self.layer = self.layer.max(costs.layer[op]);
    }

    /// Bytes that a recomputed micro-batch holds again: all if its weight gradients are pending, else those of the largest
    /// layer with its outputs.
    pub fn again(&self, pending_weight_grads: u32) -> u64 {
        if pending_weight_grads > 0 || self.layer == u64::MAX { self.saves() } else { self.layer }
    }

    /// Bytes that a micro-batch in flight does not hold.
    pub fn saves(&self) -> u64 {
        self.freed.saturating_sub(self.outputs)
    }
}
