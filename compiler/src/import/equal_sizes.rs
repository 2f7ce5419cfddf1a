//! Symbols of a file that must be equal. Exporters give each input symbols of its own, such as `s43` for the batch of a
//! mask, and an op that combines the inputs shows that two of them are one size. The importer then restarts with one
//! symbol for both.

use crate::graph::Graph;
use crate::import::lower_error::LowerReason;
use crate::op::{Op, Value};
use crate::tensor::dim::{Dim, volume};
use std::collections::BTreeMap;

/// By symbol, the one that replaces it.
pub type EqualSymbols = BTreeMap<String, String>;

/// Groups of input slots and axes whose sizes must be equal, or 1 where the op broadcasts.
pub fn groups(op: &Op, shapes: &[&[Dim]]) -> Vec<Vec<(usize, usize)>> {
    let aligned = |slots: &[usize], skipped: usize| -> Vec<Vec<(usize, usize)>> {
        let rank = slots.iter().map(|s| shapes[*s].len()).max().unwrap_or(0);
        let at = |from_end: usize| {
            let axis = |slot: &usize| Some((*slot, shapes[*slot].len().checked_sub(from_end + 1)?));
            slots.iter().filter_map(axis).collect()
        };
        (skipped..rank).map(at).collect()
    };
    match op {
        Op::Binary(_) | Op::Compare(_) | Op::Select(_) => aligned(&(0..shapes.len()).collect::<Vec<_>>(), 0),
        Op::MatMul(_) => aligned(&[0, 1], 2),
        Op::Concat(concat) => {
            let rank = shapes.first().map_or(0, |shape| shape.len());
            let axes = (0..rank).filter(|axis| *axis != concat.axis && shapes.iter().all(|s| s.len() == rank));
            axes.map(|axis| (0..shapes.len()).map(|slot| (slot, axis)).collect()).collect()
        }
        Op::CrossEntropy(loss) if shapes.len() == 2 && shapes[0].len() == shapes[1].len() + 1 => {
            let inner_size = |axis: usize| if axis < loss.axis { axis } else { axis + 1 };
            (0..shapes[1].len()).map(|axis| vec![(0, inner_size(axis)), (1, axis)]).collect()
        }
        Op::BatchGather(gather) => (0..gather.batch).map(|axis| vec![(0, axis), (1, axis)]).collect(),
        // x [T, N, I], then two weights, two biases, h0 [N, H] and c0 [N, H].
        Op::Lstm(_) => vec![vec![(0, 1), (5, 0), (6, 0)]],
        _ => Vec::new(),
    }
}

/// Fails with [`LowerReason::Equal`] if the op needs two symbols to be equal.
pub fn check(graph: &Graph, op: &Op, inputs: &[Value]) -> Result<(), LowerReason> {
    let shapes: Vec<&[Dim]> = inputs.iter().map(|value| graph.fact(*value).shape.as_slice()).collect();
    if shapes.iter().all(|shape| shape.iter().all(|dim| dim.known().is_some())) {
        return Ok(());
    }
    match op {
        Op::Broadcast(to) => {
            shapes[0].iter().rev().zip(to.shape.iter().rev()).try_for_each(|(have, want)| agree(have, want))
        }
        Op::Reshape(to) => agree(&volume(shapes[0])?, &volume(&to.shape)?),
        _ => {
            for group in groups(op, &shapes) {
                let dims = || group.iter().filter_map(|(slot, axis)| shapes.get(*slot)?.get(*axis));
                let Some(first) = dims().find(|dim| dim.known().is_none()) else { continue };
                dims().try_for_each(|other| agree(first, other))?;
            }
            Ok(())
        }
    }
}

/// Fails if two sizes that must be equal differ in one symbol.
pub fn agree(left: &Dim, right: &Dim) -> Result<(), LowerReason> {
    if left == right || left.known().is_some() || right.known().is_some() {
        return Ok(());
    }
    let (of_left, of_right) = (left.symbols(), right.symbols());
    let only = |all: &[String], other: &[String]| {
        let mut own = all.iter().filter(|symbol| !other.contains(symbol));
        own.next().cloned().filter(|_| own.next().is_none())
    };
    match (only(&of_left, &of_right), only(&of_right, &of_left)) {
        (Some(one), Some(other)) if left.renamed(&[(one.clone(), other.clone())].into()) == *right => {
            Err(LowerReason::Equal { one, other })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_differ_in_one_symbol_are_equal() {
        let dim = |text: &str| Dim::parse(text).unwrap();
        let found = |left: &str, right: &str| match agree(&dim(left), &dim(right)) {
            Err(LowerReason::Equal { one, other }) => format!("{one} {other}"),
            other => format!("{other:?}"),
        };
        assert_eq!(found("s43", "batch"), "s43 batch");
        assert_eq!(found("s43*10", "batch*10"), "s43 batch");
        assert_eq!(found("s43*seq", "batch*seq"), "s43 batch");
        for (left, right) in
            [("s43", "4"), ("batch", "batch"), ("s43*10", "batch*9"), ("s43*s44", "batch*seq"), ("s+1", "b")]
        {
            assert_eq!(found(left, right), "Ok(())", "{left} {right}");
        }
    }
}
