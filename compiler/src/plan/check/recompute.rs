//! Recomputes what activation recomputation frees and keeps, from the definitions.

use crate::plan::{Plan, Stage};
use crate::profile::cost_graph::CostGraph;
use crate::profile::recompute_scope::RecomputeScope;
use std::collections::{BTreeMap, BTreeSet};

/// Bytes of one stage per micro-batch.
#[derive(Clone, Debug, Default)]
pub struct RecomputedBytes {
    /// Saved only while the backward runs.
    pub freed: u64,
    /// Not saved otherwise, and kept as inputs of layers.
    pub kept: u64,
    /// Saved and passed on by the largest layer with an op in the stage; `None` if the stage is recomputed at once.
    pub layer: Option<u64>,
}

impl RecomputedBytes {
    /// Bytes that are saved again while the backward runs.
    pub fn once(&self, pending: u64) -> u64 {
        self.layer.filter(|_| pending == 0).unwrap_or(self.freed).saturating_mul(pending.max(1))
    }
}

/// Forward time of the recomputed ops at the pace of the cost graph, in microseconds, and the number of their layers;
/// `None` if the stage is recomputed at once.
pub fn time(graph: &CostGraph, stage: &Stage) -> (f64, Option<u32>) {
    let (mut us, mut layers) = (0.0, BTreeSet::new());
    let is_by_layer = graph.ops.iter().any(|op| matches!(op.recompute, RecomputeScope::Layer(_)));
    for op in stage.recomputed_op_ids().map(|op| &graph.ops[op as usize]) {
        if let RecomputeScope::Layer(layer) = op.recompute {
            layers.insert(layer);
        }
        us += if op.recompute == RecomputeScope::Never { 0.0 } else { op.fwd_us };
    }
    (us, is_by_layer.then_some(layers.len() as u32))
}

pub fn bytes(graph: &CostGraph, plan: &Plan, stage_of: &[usize]) -> Vec<RecomputedBytes> {
    let scope = |op: usize| graph.ops[op].recompute;
    // For each op: bytes read by other layers, and bytes read only by its own layer that are sent.
    let mut crossing = vec![0u64; graph.ops.len()];
    let mut sent = vec![0u64; graph.ops.len()];
    for tensor in &graph.tensors {
        let made = tensor.producer.index();
        if tensor.consumers.iter().any(|op| scope(op.index()) != scope(made)) {
            crossing[made] += tensor.bytes;
        } else if tensor.consumers.iter().any(|op| stage_of[op.index()] != stage_of[made]) {
            sent[made] += tensor.bytes;
        }
    }
    let freed = |op: usize| match (scope(op), graph.ops[op].unsaved) {
        (RecomputeScope::Never, _) => 0,
        (_, true) => graph.ops[op].saved_bytes,
        (_, false) => graph.ops[op].saved_bytes.saturating_sub(crossing[op]),
    };
    // While a layer is recomputed, its outputs are held as well.
    let mut layers: BTreeMap<RecomputeScope, u64> = BTreeMap::new();
    (0..graph.ops.len()).for_each(|op| *layers.entry(scope(op)).or_default() += freed(op) + crossing[op]);
    let of_stage = |stage: &Stage| {
        let (mut bytes, mut stays) = (RecomputedBytes::default(), 0);
        for op in stage.recomputed_op_ids().map(|op| op as usize) {
            bytes.freed += freed(op);
            match (graph.ops[op].unsaved, scope(op)) {
                (true, _) => bytes.kept += crossing[op],
                (false, RecomputeScope::Never) => {}
                (false, _) => stays += sent[op],
            }
            match scope(op) {
                RecomputeScope::Stage => {}
                RecomputeScope::Layer(_) => bytes.layer = bytes.layer.max(Some(layers[&scope(op)])),
                RecomputeScope::Never => bytes.layer = bytes.layer.max(Some(0)),
            }
        }
        RecomputedBytes { freed: bytes.freed.saturating_sub(stays), ..bytes }
    };
    plan.stages.iter().map(of_stage).collect()
}
