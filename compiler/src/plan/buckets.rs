//! Gradient buckets of a replicated stage.
//!
//! The backward runs from the stage's last op to its first. A parameter's gradient is complete after the backward of
//! its first reader, which gives the bucket order. A bucket is closed at the requested size. Its all-reduce then
//! overlaps with the rest of the backward (Li et al., PyTorch Distributed, VLDB 2020, section 3.2.3).

use crate::plan::{GradientBucket, Stage};
use crate::profile::cost_graph::CostGraph;

/// Default bucket size, that of torch's DistributedDataParallel.
pub const USUAL_BYTES: u64 = 25 << 20;

/// Buckets of a stage with the given ops (ascending). Empty if one bucket would hold everything. Size 0 closes a bucket
/// after every parameter.
pub fn buckets(graph: &CostGraph, ops: &[u32], size: u64) -> Vec<GradientBucket> {
    let mut by_first_reader: Vec<(u32, usize)> = Vec::new();
    for (number, parameter) in graph.params.iter().enumerate() {
        let first = parameter.users.iter().find(|user| ops.binary_search(&user.0).is_ok());
        by_first_reader.extend(first.map(|first| (first.0, number)));
    }
    // Parameters with the same first reader keep their order in the file.
    by_first_reader.sort_by_key(|&(first, number)| (std::cmp::Reverse(first), number));
    // Summed in the same order as `spent` below, so that the last bucket's fraction is exactly 1.
    let whole: f64 = ops.iter().rev().map(|&op| graph.ops[op as usize].bwd_us).sum();
    let mut spent = 0.0;
    let mut rest = ops.iter().rev().peekable();
    let mut buckets: Vec<GradientBucket> = Vec::new();
    let mut is_closed = true;
    for (first, number) in by_first_reader {
        while let Some(&op) = rest.next_if(|&&op| op >= first) {
            spent += graph.ops[op as usize].bwd_us;
        }
        if is_closed {
            buckets.push(GradientBucket { parameters: Vec::new(), bytes: 0, ready: 0.0 });
        }
        let Some(bucket) = buckets.last_mut() else { continue };
        bucket.parameters.push(graph.params[number].name.clone());
        bucket.bytes = bucket.bytes.saturating_add(graph.params[number].sum_bytes);
        bucket.ready = if whole > 0.0 { (spent / whole).min(1.0) } else { 1.0 };
        is_closed = bucket.bytes >= size;
    }
    if buckets.len() > 1 { buckets } else { Vec::new() }
}

/// Checks that the stated buckets partition the stage's gradients; returns the contradiction if they do not.
pub fn contradiction(stage: &Stage) -> Option<String> {
    let buckets = &stage.buckets;
    if buckets.is_empty() {
        return None;
    }
    if stage.replicas < 2 || buckets.len() < 2 {
        return Some(format!(
            "{} buckets for {} replicas: buckets need at least 2 of both",
            buckets.len(),
            stage.replicas
        ));
    }
    let mut names: Vec<&str> = buckets.iter().flat_map(|bucket| &bucket.parameters).map(String::as_str).collect();
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    if names.len() < count || buckets.iter().any(|bucket| bucket.parameters.is_empty()) {
        return Some("a bucket has no parameter, or two buckets share one".to_string());
    }
    let sum = buckets.iter().fold(0u64, |sum, bucket| sum.saturating_add(bucket.bytes));
    if sum != stage.reduced_bytes() {
        return Some(format!("the buckets have {sum} B, the stage's gradients {} B", stage.reduced_bytes()));
    }
    let mut before = 0.0;
    for bucket in buckets {
        if !(before..=1.0).contains(&bucket.ready) {
            return Some(format!("a bucket is ready at {}: expected ascending numbers from 0 to 1", bucket.ready));
        }
        before = bucket.ready;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::cost_graph::{OpCost, OpId, ParamCost};

    fn graph() -> CostGraph {
        let op = |id| OpCost { id, bwd_us: f64::from(id + 1), ..OpCost::default() };
        let param =
            |name: &str, bytes, users: &[u32]| ParamCost::new(name, bytes, users.iter().copied().map(OpId).collect());
        // Readers: op 0; ops 1 and 3; ops 2 and 3; op 3.
        let params = vec![param("a", 10, &[0]), param("b", 20, &[1, 3]), param("c", 30, &[2, 3]), param("d", 5, &[3])];
        CostGraph { ops: (0..4).map(op).collect(), params, ..CostGraph::default() }
    }

    fn summarize(buckets: &[GradientBucket]) -> Vec<(String, u64, f64)> {
        buckets.iter().map(|bucket| (bucket.parameters.join(" "), bucket.bytes, bucket.ready)).collect()
    }

    #[test]
    fn gradients_are_whole_after_the_first_reader() {
        let all = buckets(&graph(), &[0, 1, 2, 3], 0);
        let expected = [("d", 5, 0.4), ("c", 30, 0.7), ("b", 20, 0.9), ("a", 10, 1.0)];
        assert_eq!(summarize(&all), expected.map(|(name, bytes, ready)| (name.to_string(), bytes, ready)));
        // Only readers inside the stage count.
        let late = buckets(&graph(), &[2, 3], 0);
        assert_eq!(summarize(&late)[0], ("b".to_string(), 20, 4.0 / 7.0));
    }

    #[test]
    fn a_bucket_is_closed_at_its_size() {
        let two = buckets(&graph(), &[0, 1, 2, 3], 35);
        assert_eq!(summarize(&two), [("d c".to_string(), 35, 0.7), ("b a".to_string(), 30, 1.0)]);
        assert_eq!(buckets(&graph(), &[0, 1, 2, 3], 65), []);
        assert_eq!(buckets(&graph(), &[0, 1, 2, 3], u64::MAX), []);
    }
}
