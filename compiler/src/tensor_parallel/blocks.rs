//! Finds block counts worth trying for split axes. If a graph splits or joins an axis in equal blocks, a sharding of
//! every block remains a sharding on the other side.

use crate::graph::Graph;
use crate::op::{Group, Op};
use crate::tensor::fact::Fact;
use std::collections::{BTreeMap, BTreeSet};

/// Above the block count of any fused projection.
const MOST: usize = 8;

/// A group of `devices`, with the block counts suggested by the graph.
pub fn group(graph: &Graph, devices: usize) -> Group {
    let mut blocks_of_size: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
    let mut add = |size: usize, blocks: usize| {
        if (2..=MOST).contains(&blocks) && size.is_multiple_of(blocks) && size > blocks {
            blocks_of_size.entry(size).or_default().insert(blocks);
        }
    };
    for id in graph.ids() {
        let inputs = graph.inputs(id);
        let facts = &graph.node(id).facts;
        match &graph.node(id).op {
            Op::Slice(_) | Op::Pad(_) => {
                for (axis, to) in facts[0].shape.iter().enumerate() {
                    let sizes = [graph.fact(inputs[0]).shape[axis].known(), to.known()];
                    let [Some(from), Some(to)] = sizes.map(|size| size.and_then(|s| usize::try_from(s).ok())) else {
                        continue;
                    };
                    let (larger, smaller) = (from.max(to), from.min(to));
                    if smaller > 0 && larger % smaller == 0 {
                        add(larger, larger / smaller);
                    }
                }
            }
            Op::Concat(op) => {
                let size = facts[0].shape[op.axis].known().and_then(|s| usize::try_from(s).ok());
                if let Some(size) = size {
                    add(size, inputs.len());
                }
            }
            Op::Reshape(_) => {
                add_regroupings(graph.fact(inputs[0]), &facts[0], &mut add);
                add_regroupings(&facts[0], graph.fact(inputs[0]), &mut add);
            }
            _ => {}
        }
    }
    let blocks = blocks_of_size.into_iter().map(|(size, blocks)| (size, blocks.into_iter().collect())).collect();
    Group { devices, blocks }
}

/// An axis reshaped to several: the first of them counts its blocks.
fn add_regroupings(from: &Fact, to: &Fact, add: &mut impl FnMut(usize, usize)) {
    let (Some(from), Some(to)) = (from.concrete(), to.concrete()) else { return };
    // The number of iterations outside each axis.
    let starts = |shape: &[usize]| -> Option<Vec<usize>> {
        let mut before = Some(1usize);
        let mut start = |size: &usize| {
            let start = before;
            before = before.and_then(|before| before.checked_mul(*size));
            start
        };
        shape.iter().map(&mut start).collect()
    };
    let (Some(outer), Some(inner)) = (starts(&from), starts(&to)) else { return };
    for (&before, &size) in outer.iter().zip(&from) {
        for start in &inner {
            if before > 0 && start % before == 0 && *start > before {
                add(size, start / before);
            }
        }
    }
}
