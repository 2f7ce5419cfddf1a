//! Differences between two plans: ops that change stage, and changes of stages and settings.
//!
//! Op ranges are compared as ranges, so the work depends on the size of the files and not on the number of ops.

use crate::plan::{Plan, Stage};
use serde_json::Value;
use std::collections::BTreeSet;

#[derive(Clone, Debug, PartialEq)]
pub struct StageChange {
    pub stage: usize,
    pub came: u64,
    pub ops_lost: u64,
}

/// A half-open range of ops that change stage, or that only one plan has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moved {
    pub ops: (u32, u32),
    pub from: Option<usize>,
    pub to: Option<usize>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Diff {
    pub stages: Vec<StageChange>,
    pub moved: Vec<Moved>,
    /// Names of the fields that differ: `schedule.kind`, `stages`.
    pub fields: Vec<String>,
}

/// Compares two plans. Both must pass the consistency check.
pub fn diff(before: &Plan, after: &Plan) -> Diff {
    let moved = moved(&ranges(before), &ranges(after));
    let count = before.stages.len().max(after.stages.len());
    let stages = (0..count).map(|stage| {
        let ops = |wanted: &dyn Fn(&Moved) -> bool| {
            moved.iter().filter(|moved| wanted(moved)).map(|moved| u64::from(moved.ops.1 - moved.ops.0)).sum()
        };
        let (came, ops_lost) = (ops(&|moved| moved.to == Some(stage)), ops(&|moved| moved.from == Some(stage)));
        StageChange { stage, came, ops_lost }
    });
    Diff { stages: stages.collect(), moved, fields: fields(before, after) }
}

impl Diff {
    pub fn is_empty(&self) -> bool {
        self.fields.is_empty()
    }
}

/// True if a stage differs in anything except times and ops.
pub fn is_rearranged(before: &Stage, after: &Stage) -> bool {
    (before.replicas, &before.devices, recomputed(before), before.sharding(), before.degree(), &before.choices)
        != (after.replicas, &after.devices, recomputed(after), after.sharding(), after.degree(), &after.choices)
}

/// Number of recomputed ops.
fn recomputed(stage: &Stage) -> usize {
    stage.recomputed_op_ids().count()
}

fn ranges(plan: &Plan) -> Vec<((u32, u32), usize)> {
    let of = |(at, stage): (usize, &Stage)| stage.ops.iter().map(move |&range| (range, at)).collect::<Vec<_>>();
    let mut ranges: Vec<((u32, u32), usize)> = plan.stages.iter().enumerate().flat_map(of).collect();
    ranges.sort_unstable();
    ranges
}

fn moved(before: &[((u32, u32), usize)], after: &[((u32, u32), usize)]) -> Vec<Moved> {
    let ends = before.iter().chain(after).flat_map(|((from, to), _)| [*from, *to]).collect::<BTreeSet<u32>>();
    let ends: Vec<u32> = ends.into_iter().collect();
    let (mut left, mut right) = (before.iter().peekable(), after.iter().peekable());
    let mut moved: Vec<Moved> = Vec::new();
    for pair in ends.windows(2) {
        let (start, end) = (pair[0], pair[1]);
        let (from, to) = (stage_at(&mut left, start), stage_at(&mut right, start));
        if from == to {
            continue;
        }
        match moved.last_mut() {
            Some(last) if last.ops.1 == start && (last.from, last.to) == (from, to) => last.ops.1 = end,
            _ => moved.push(Moved { ops: (start, end), from, to }),
        }
    }
    moved
}

/// The stage of an op. Queries must be in ascending order.
fn stage_at<'a>(
    ranges: &mut std::iter::Peekable<impl Iterator<Item = &'a ((u32, u32), usize)>>,
    op: u32,
) -> Option<usize> {
    while ranges.next_if(|((_, end), _)| *end <= op).is_some() {}
    ranges.peek().filter(|((start, _), _)| *start <= op).map(|(_, stage)| *stage)
}

/// Names of the fields that differ; objects are compared one level down.
fn fields(before: &Plan, after: &Plan) -> Vec<String> {
    let read = |plan: &Plan| match serde_json::to_value(plan) {
        Ok(Value::Object(mut object)) => {
            // It only says that something differs.
            object.remove("digest");
            object
        }
        _ => serde_json::Map::new(),
    };
    let (before, after) = (read(before), read(after));
    let mut found = Vec::new();
    for name in before.keys().chain(after.keys()).collect::<BTreeSet<_>>() {
        match (before.get(name), after.get(name)) {
            (left, right) if left == right => {}
            (Some(Value::Object(left)), Some(Value::Object(right))) => {
                let names = left.keys().chain(right.keys()).collect::<BTreeSet<_>>();
                let differ = names.into_iter().filter(|inner| left.get(*inner) != right.get(*inner));
                found.extend(differ.map(|inner| format!("{name}.{inner}")));
            }
            _ => found.push(name.clone()),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_walked_side_by_side() {
        let before = [((0, 4), 0), ((4, 6), 1), ((6, 9), 0)];
        let after = [((0, 3), 0), ((3, 8), 1), ((8, 9), 0), ((9, 10), 2)];
        let found = moved(&before, &after);
        let one = |ops, from, to| Moved { ops, from, to };
        assert_eq!(found, [one((3, 4), Some(0), Some(1)), one((6, 8), Some(0), Some(1)), one((9, 10), None, Some(2))]);
        assert!(moved(&after, &after).is_empty());
    }
}
