//! The cuts of a linear order (or all down-sets, if few) with the memory terms of every range between two cuts.

use crate::partition::search::downsets::DownSets;
use crate::partition::search::numbers::running_sums;
use crate::partition::search::range_costs::RangeCosts;
use crate::plan::cut_bytes::CutBytes;
use crate::plan::gradient_buffers::GradientBuffers;
use crate::plan::memory::MemoryTerms;
use crate::plan::problem::CostModel;
use crate::profile::cost_graph::CostGraph;

/// A chain of sets, or arbitrary sets of which only nested ones form a range, with the memory terms of every range.
#[derive(Clone, Debug)]
pub struct LinearOrder {
    /// The cuts: set 0 is empty, the last set is the whole model.
    pub space: DownSets,
    holdings: Vec<MemoryTerms>,
}

impl LinearOrder {
    /// The ranges between any down-sets.
    pub fn over(graph: &CostGraph, space: DownSets, passing: GradientBuffers) -> LinearOrder {
        let sets = space.len();
        let mut holdings = vec![MemoryTerms::default(); sets * sets];
        let places = RangeCosts::new(graph, &space, passing);
        for from in 0..sets {
            for to in (from + 1..sets).filter(|&to| space.nested(from, to)) {
                holdings[from * sets + to] = places.run(from, to).holdings;
            }
        }
        LinearOrder { space, holdings }
    }

    pub fn holdings(&self, from: usize, to: usize) -> &MemoryTerms {
        &self.holdings[from * self.space.len() + to]
    }
}

/// Bisection steps for the time of the longest stage.
const HALVINGS: usize = 48;

/// Chooses the cuts of an order for at most `limit` ranges: everywhere, or where the fewest bytes cross.
pub fn ends(graph: &CostGraph, model: CostModel, order: &[u32], limit: usize) -> Vec<usize> {
    let limit = limit.max(1);
    if order.len() <= limit {
        return (0..=order.len()).collect();
    }
    let total_us = graph.total_us().max(f64::MIN_POSITIVE);
    let total_bytes: f64 = graph.ops.iter().map(|op| op.param_bytes as f64).sum::<f64>().max(1.0);
    let weight = |op: u32| {
        let op = &graph.ops[op as usize];
        (op.fwd_us + op.bwd_us) / total_us + op.param_bytes as f64 / total_bytes + 1.0 / order.len() as f64
    };
    let total: f64 = order.iter().map(|&op| weight(op)).sum();
    let cuts = CutBytes::new(model, graph).estimates(order);
    // Divides the order into `limit - 1` slices of equal weight and takes the cheapest cut in each.
    let slices = (limit - 1).max(1);
    let mut best: Vec<Option<usize>> = vec![None; slices];
    let mut sum = 0.0;
    for (at, &op) in order.iter().enumerate().take(order.len() - 1) {
        sum += weight(op);
        let slice = ((sum / total * slices as f64) as usize).min(slices - 1);
        let end = at + 1;
        if best[slice].is_none_or(|other| cuts[end] < cuts[other]) {
            best[slice] = Some(end);
        }
    }
    let mut ends = vec![0];
    ends.extend(best.into_iter().flatten());
    ends.push(order.len());
    ends
}

/// As [`ends`], plus the balanced cuts for stages with these replicas. Gives at least one range per stage if there are
/// enough ops.
pub fn ends_for(graph: &CostGraph, model: CostModel, order: &[u32], limit: usize, replicas: &[u32]) -> Vec<usize> {
    let mut ends = ends(graph, model, order, limit);
    if ends.len() <= order.len() && replicas.len() > 1 {
        ends.extend(balanced(graph, order, replicas));
        ends.sort_unstable();
        ends.dedup();
    }
    ends
}

/// Cuts into one stage per entry of `replicas`, each with at least one op, that minimise the longest stage time per
/// replica.
pub fn balanced(graph: &CostGraph, order: &[u32], replicas: &[u32]) -> Vec<usize> {
    let stages = replicas.len();
    if stages > order.len() {
        return Vec::new();
    }
    let op = |&op: &u32| &graph.ops[op as usize];
    let sums = running_sums(order, |sum, at| sum + op(at).fwd_us + op(at).bwd_us);
    let share = |stage: usize| f64::from(replicas[stage].max(1));
    // Fills every stage up to the given time, leaving one op for each later stage; `None` if the last stage takes
    // longer.
    let filled = |longest: f64| {
        let mut ends = vec![0];
        for stage in 0..stages {
            let (from, last) = (ends[stage], order.len() - (stages - 1 - stage));
            let most = sums[from] + longest * share(stage);
            let to = sums.partition_point(|&sum| sum <= most).saturating_sub(1).clamp(from + 1, last);
            if sums[to] > most * (1.0 + 1e-12) || (stage + 1 == stages && to < order.len()) {
                return None;
            }
            ends.push(to);
        }
        Some(ends)
    };
    let (mut least, mut most) = (0.0, sums[order.len()]);
    let mut best = filled(most);
    for _ in 0..HALVINGS {
        let middle = (least + most) / 2.0;
        match filled(middle) {
            Some(ends) => (best, most) = (Some(ends), middle),
            None => least = middle,
        }
    }
    // NaN times cannot be balanced.
    best.unwrap_or_else(|| (0..stages).chain([order.len()]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::read::levels;
    use crate::profile::arena::Live;
    use crate::profile::cost_graph::{FrozenCost, OpCost, OpId, ParamCost, TensorCost};
    use crate::profile::recompute_scope::{RecomputeCosts, RecomputeScope};

    fn chain(ops: u32) -> CostGraph {
        let bytes = |at: u32| if at % 5 == 4 { 1 } else { 8 };
        let op = |id| OpCost {
            id,
            fwd_us: 1.0,
            bwd_us: 2.0,
            out_bytes: bytes(id),
            saved_bytes: 3,
            between_bytes: 1,
            arriving_bytes: bytes(id),
            live: Live { whole: [9 + u64::from(id), 5, 6, 2], split: [7, 4 + u64::from(id % 3), 3, 1] },
            ..OpCost::default()
        };
        let tensor = |at: u32| {
            let readers: Vec<u32> = [at + 1, at + 7].into_iter().filter(|&to| to < ops).collect();
            TensorCost::new(at, bytes(at), &readers)
        };
        let tied = ParamCost::new("w", 100, vec![OpId(1), OpId(4)]);
        let frozen = |bytes, users: &[u32]| FrozenCost {
            name: String::new(),
            bytes,
            users: users.iter().map(|&op| OpId(op)).collect(),
        };
        CostGraph {
            ops: (0..ops).map(op).collect(),
            tensors: (0..ops).map(tensor).collect(),
            params: vec![tied],
            frozen: vec![frozen(1000, &[2, 3, 8]), frozen(10_000, &[5]), frozen(100_000, &[0, 1])],
        }
    }

    #[test]
    fn runs_hold_what_their_ops_hold() {
        let mut layers = chain(12);
        for (at, op) in layers.ops.iter_mut().enumerate() {
            (op.saved_bytes, op.unsaved) = (20 + at as u64, at % 4 == 1);
            op.recompute = if at < 11 { RecomputeScope::Layer(at as u32 / 3) } else { RecomputeScope::Never };
        }
        for graph in [chain(12), layers] {
            let order: Vec<u32> = (0..12).collect();
            let (flows, passing) = (graph.flows(), GradientBuffers::of(&levels("4:10MB/s").unwrap()));
            let space = DownSets::chain(&graph, CostModel::Paper, order, (0..=12).collect());
            let sets = LinearOrder::over(&graph, space, passing);
            for from in 0..12 {
                for to in from + 1..=12 {
                    let inside: Vec<bool> = (0..12).map(|op| (from..to).contains(&op)).collect();
                    let held = MemoryTerms::of(&graph, (&flows, &RecomputeCosts::of(&graph)), &inside, &passing);
                    assert_eq!(*sets.holdings(from, to), held, "{from}..{to}");
                }
            }
        }
    }

    #[test]
    fn grouping_cuts_where_little_crosses() {
        let mut graph = chain(100);
        graph.tensors.iter_mut().for_each(|tensor| tensor.consumers.truncate(1));
        let order: Vec<u32> = (0..100).collect();
        let ends = ends(&graph, CostModel::Paper, &order, 11);
        assert_eq!((ends[0], ends[ends.len() - 1]), (0, 100));
        assert!(ends.len() <= 12 && ends.windows(2).all(|pair| pair[0] < pair[1]));
        assert!(ends[1..ends.len() - 1].iter().all(|end| end % 5 == 0), "{ends:?}");
    }
}
