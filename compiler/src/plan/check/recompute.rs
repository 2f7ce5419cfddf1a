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
    /// Saved and passed on by the largest layer with an op in the stage; `None` if the stage is recomputed at once. Of
    /// parts, the most that any op's part has saved up to it, the op's arena, and the gradients of the part's outputs.
    pub layer: Option<u64>,
}

impl RecomputedBytes {
    /// Bytes that are saved again while the backward runs, beyond the arena of the stage if it is recomputed by part.
    pub fn once(&self, pending: u64, beside: u64) -> u64 {
        let layer = self.layer.filter(|_| pending == 0).map(|layer| layer.saturating_sub(beside));
        layer.unwrap_or(self.freed).saturating_mul(pending.max(1))
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
    let is_part = |op: usize| matches!(scope(op), RecomputeScope::Part(_));
    // For each op: bytes read by other layers, bytes read only by its own layer that are sent, and all bytes sent.
    let (mut crossing, mut sent, mut all_sent) = (zeros(graph), zeros(graph), zeros(graph));
    for tensor in &graph.tensors {
        let made = tensor.producer.index();
        // The loss, which is no part, reads results.
        let is_result = tensor.consumers.is_empty() && !graph.ops[made].unsaved;
        let is_read_by_loss = is_result && is_part(made);
        let is_sent = tensor.consumers.iter().any(|op| stage_of[op.index()] != stage_of[made]);
        if is_read_by_loss || tensor.consumers.iter().any(|op| scope(op.index()) != scope(made)) {
            crossing[made] += tensor.bytes;
        } else if is_sent {
            sent[made] += tensor.bytes;
        }
        all_sent[made] += if is_sent { tensor.bytes } else { 0 };
    }
    let freed = |op: usize| match (scope(op), graph.ops[op].unsaved) {
        (RecomputeScope::Never, _) => 0,
        (_, true) => graph.ops[op].saved_bytes,
        (_, false) => graph.ops[op].saved_bytes.saturating_sub(crossing[op]),
    };
    // While a layer is recomputed, its outputs are held as well. The backward of a part frees its activations in reverse.
    let mut layers: BTreeMap<RecomputeScope, u64> = BTreeMap::new();
    let mut gradients: BTreeMap<RecomputeScope, u64> = BTreeMap::new();
    for op in (0..graph.ops.len()).filter(|op| is_part(*op)) {
        *gradients.entry(scope(op)).or_default() += crossing[op];
    }
    let mut peak = zeros(graph);
    for (at, op) in graph.ops.iter().enumerate() {
        let sum = layers.entry(op.recompute).or_default();
        *sum += freed(at);
        let gradients = gradients.get(&op.recompute).copied().unwrap_or(0);
        peak[at] = *sum + op.workspace_bytes + op.live.whole[0] + gradients;
        *sum += if is_part(at) { 0 } else { crossing[at] };
    }
    let of_stage = |stage: &Stage| {
        let (mut bytes, mut stays) = (RecomputedBytes::default(), 0);
        for op in stage.recomputed_op_ids().map(|op| op as usize) {
            let is_unsaved = graph.ops[op].unsaved;
            if is_part(op) && !stage.memory.by_part {
                bytes.freed += graph.ops[op].saved_bytes;
                stays += if is_unsaved { 0 } else { all_sent[op] };
                continue;
            }
            bytes.freed += freed(op);
            match (is_unsaved, scope(op)) {
                (true, _) => bytes.kept += crossing[op],
                (false, RecomputeScope::Never) => {}
                (false, _) => stays += sent[op],
            }
            match scope(op) {
                RecomputeScope::Stage => {}
                RecomputeScope::Part(_) => bytes.layer = bytes.layer.max(Some(peak[op])),
                RecomputeScope::Layer(_) => bytes.layer = bytes.layer.max(Some(layers[&scope(op)])),
                RecomputeScope::Never => bytes.layer = bytes.layer.max(Some(0)),
            }
        }
        RecomputedBytes { freed: bytes.freed.saturating_sub(stays), ..bytes }
    };
    plan.stages.iter().map(of_stage).collect()
}

/// True if the ops of a stage can be recomputed by part.
pub fn has_parts(graph: &CostGraph, stage: &Stage) -> bool {
    stage.recomputed_op_ids().any(|op| matches!(graph.ops[op as usize].recompute, RecomputeScope::Part(_)))
}

/// True if the recomputed ops end within a layer that is recomputed by itself.
pub fn splits_layer(graph: &CostGraph, stage: &Stage) -> bool {
    let is_alone = |scope: &RecomputeScope| match scope {
        RecomputeScope::Layer(_) => true,
        RecomputeScope::Part(_) => stage.memory.by_part,
        RecomputeScope::Stage | RecomputeScope::Never => false,
    };
    let scopes: Vec<RecomputeScope> = stage.op_ids().map(|op| graph.ops[op as usize].recompute).collect();
    let (recomputed, saved) = scopes.split_at(stage.recomputed_op_ids().count().min(scopes.len()));
    let recomputed: BTreeSet<&RecomputeScope> = recomputed.iter().filter(|scope| is_alone(scope)).collect();
    stage.recompute && saved.iter().any(|scope| recomputed.contains(scope))
}

fn zeros(graph: &CostGraph) -> Vec<u64> {
    vec![0; graph.ops.len()]
}
