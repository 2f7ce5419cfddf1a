//! Memory planning: assigns every tensor of a stage a location from its lifetime. The size of the arena is known
//! exactly before a run.
//!
//! A view (a reshape) shares the location of its base. Every other tensor has one of four locations:
//!
//! | location | for | lifetime |
//! | --- | --- | --- |
//! | [`Location::Source`] | inputs, parameters, states, constants and views of them | decided by their owner |
//! | [`Location::Own`] | values sent to other stages | in a separate buffer, shared with the receiver |
//! | [`Location::Saved`] | values that the backward of the same minibatch reads | from forward to backward |
//! | [`Location::Arena`] | everything else, and kernel workspaces | within the run |
//!
//! Inner values of a fused chain ([`fuse`](super::fuse)) and gradients accumulated by their producer have no location.
//!
//! Arena offsets are assigned by decreasing size, each at the lowest offset that is free during the tensor's lifetime.
//! This is "greedy by size" (Pisarchyk and Lee, MLSys workshop 2020, section 5.2).

use super::fuse::Chains;
use crate::graph::Graph;
use crate::op::table::rule;
use crate::op::{NodeId, Op, Value};
use std::collections::{HashMap, HashSet};

/// Alignment in bytes of every offset and size: a cache line and an AVX-512 register.
pub const ALIGNMENT: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Location {
    Source(NodeId),
    /// In a separate buffer: index in [`Layout::own`].
    Own(usize),
    /// Byte offset in the block saved for the backward.
    Saved(usize),
    Arena(usize),
}

/// The locations of all values of a graph, and the sizes of its buffers.
#[derive(Clone, Debug, Default)]
pub struct Layout {
    pub locations: HashMap<Value, Location>,
    /// The values with separate buffers, and the buffer sizes in bytes.
    pub own: Vec<(Value, usize)>,
    /// Bytes of the block saved for the backward, per minibatch in flight. It holds tensors in the order of their
    /// producers.
    pub kept_bytes: usize,
    /// Bytes of the arena: the exact peak of transient memory.
    pub arena_bytes: usize,
    /// Arena offset of each node's workspace.
    pub workspace: HashMap<NodeId, usize>,
}

/// Tensors that a run within a longer one shares with the runs before and after it, in a common arena.
#[derive(Clone, Debug, Default)]
pub struct SharedArena {
    /// Sources made before the run.
    pub incoming: HashSet<Value>,
    /// Values read after the run.
    pub outgoing: HashSet<Value>,
}

/// Constraints of the layout: values that outlive the run, kernel workspaces and fused chains.
#[derive(Clone, Copy)]
pub struct Needs<'a> {
    /// Values sent to other stages or returned.
    pub separate: &'a HashSet<Value>,
    /// Values that the backward reads.
    pub saved: &'a HashSet<Value>,
    /// Values read after the run, before the next one.
    pub retained: &'a HashSet<Value>,
    /// Gradients that their producers accumulate.
    pub accumulated: &'a HashSet<Value>,
    /// Workspace bytes per node; of a chain, keyed by its last op.
    pub workspace: &'a HashMap<NodeId, usize>,
    pub chains: &'a Chains,
    /// Tensors shared with other runs, if this is part of a longer one.
    pub arena: Option<&'a SharedArena>,
}

/// Rounds up to [`ALIGNMENT`].
pub fn aligned(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGNMENT)
}

/// Lays out a graph of fixed sizes that is executed in `order`.
pub fn plan(graph: &Graph, order: &[NodeId], needs: &Needs<'_>) -> Layout {
    let mut classes = classes(graph, order, needs);
    let mut layout = Layout::default();
    let mut transient: Vec<Block> = Vec::new();
    let mut class_home: Vec<Option<Location>> = vec![None; classes.list.len()];
    for (i, class) in classes.list.iter().enumerate().filter(|(_, class)| !class.inner) {
        class_home[i] = if is_source(graph, class.root.node) {
            Some(Location::Source(class.root.node))
        } else if class.separate {
            layout.own.push((class.root, class.bytes));
            Some(Location::Own(layout.own.len() - 1))
        } else if class.saved {
            layout.kept_bytes += aligned(class.bytes);
            Some(Location::Saved(layout.kept_bytes - aligned(class.bytes)))
        } else {
            let last = if class.retained { order.len() } else { class.last };
            transient.push(Block {
                of: BlockOwner::AliasClass(i),
                size: aligned(class.bytes),
                first: class.first,
                last,
            });
            None
        };
    }
    for (at, id) in order.iter().enumerate() {
        if let Some(&size) = needs.workspace.get(id).filter(|s| **s > 0) {
            transient.push(Block { of: BlockOwner::Workspace(*id), size: aligned(size), first: at, last: at });
        }
    }
    let (offsets, arena_bytes) = pack(&transient);
    layout.arena_bytes = arena_bytes;
    for (block, offset) in transient.iter().zip(offsets) {
        match block.of {
            BlockOwner::AliasClass(i) => class_home[i] = Some(Location::Arena(offset)),
            BlockOwner::Workspace(id) => {
                layout.workspace.insert(id, offset);
            }
        }
    }
    for (value, class) in classes.of.drain().filter(|(_, class)| !classes.list[*class].inner) {
        layout.locations.insert(value, class_home[class].expect("every class has an address"));
    }
    layout
}

/// For every node of `order`, the arena bytes alive while it or its chain runs, except tensors held to the end of the
/// run.
pub fn live(graph: &Graph, order: &[NodeId], needs: &Needs<'_>) -> Vec<usize> {
    let mut change = vec![0isize; order.len() + 1];
    for tensor in tensors(graph, order, needs) {
        change[tensor.first] += tensor.bytes as isize;
        change[tensor.last + 1] -= tensor.bytes as isize;
    }
    let mut alive = 0;
    let mut running = |change: &isize| {
        alive += change;
        alive as usize
    };
    let alive: Vec<usize> = change[..order.len()].iter().map(&mut running).collect();
    needs.chains.run_positions(order).into_iter().map(|at| alive[at]).collect()
}

#[derive(Clone, Debug)]
pub struct Transient {
    /// The base value, not a view.
    pub root: Value,
    /// With alignment.
    pub bytes: usize,
    /// First position in the order at which it is alive.
    pub first: usize,
    /// Last position at which it is alive.
    pub last: usize,
    pub readers: Vec<NodeId>,
}

/// All tensors with an arena location, except those held to the end of the run.
pub fn tensors(graph: &Graph, order: &[NodeId], needs: &Needs<'_>) -> Vec<Transient> {
    let mut classes = classes(graph, order, needs);
    let outgoing = needs.arena.into_iter().flat_map(|arena| &arena.outgoing);
    let outgoing: HashSet<usize> = outgoing.filter_map(|value| classes.of.get(value).copied()).collect();
    let mut tensors = Vec::new();
    for (at, class) in classes.list.iter_mut().enumerate() {
        let is_incoming = needs.arena.is_some_and(|arena| arena.incoming.contains(&class.root));
        let is_permanent = is_source(graph, class.root.node) && !is_incoming;
        if !(is_permanent || class.separate || class.saved || class.retained || class.inner) {
            tensors.push(Transient {
                root: class.root,
                bytes: aligned(class.bytes),
                first: if is_incoming { 0 } else { class.first },
                last: if outgoing.contains(&at) { order.len() - 1 } else { class.last },
                readers: std::mem::take(&mut class.readers),
            });
        }
    }
    tensors
}

fn is_source(graph: &Graph, id: NodeId) -> bool {
    matches!(graph.node(id).op, Op::Input(_) | Op::Parameter(_) | Op::State(_) | Op::Constant(_))
}

/// Values that share bytes.
struct AliasClass {
    root: Value,
    bytes: usize,
    first: usize,
    last: usize,
    readers: Vec<NodeId>,
    separate: bool,
    saved: bool,
    retained: bool,
    /// Exists only within a chain or a gradient sum.
    inner: bool,
}

struct Classes {
    list: Vec<AliasClass>,
    of: HashMap<Value, usize>,
}

fn classes(graph: &Graph, order: &[NodeId], needs: &Needs<'_>) -> Classes {
    let mut classes = Classes { list: Vec::new(), of: HashMap::new() };
    for (at, &id) in needs.chains.run_positions(order).into_iter().zip(order) {
        let inputs = graph.inputs(id);
        for input in &inputs {
            let class = &mut classes.list[classes.of[input]];
            class.last = class.last.max(at);
            class.readers.push(id);
        }
        let node = graph.node(id);
        for value in graph.values(id) {
            let class = if rule(&node.op).is_view() && value.output == 0 {
                classes.of[&inputs[0]]
            } else {
                let bytes = graph.fact(value).bytes().expect("sizes are fixed and were checked") as usize;
                let [separate, saved, retained] = [false; 3];
                let inner = needs.chains.inner.contains(&value) || needs.accumulated.contains(&value);
                let readers = Vec::new();
                classes.list.push(AliasClass {
                    root: value,
                    bytes,
                    first: at,
                    last: at,
                    readers,
                    separate,
                    saved,
                    retained,
                    inner,
                });
                classes.list.len() - 1
            };
            classes.of.insert(value, class);
            classes.list[class].separate |= needs.separate.contains(&value);
            classes.list[class].saved |= needs.saved.contains(&value);
            classes.list[class].retained |= needs.retained.contains(&value);
        }
    }
    classes
}

enum BlockOwner {
    AliasClass(usize),
    Workspace(NodeId),
}

struct Block {
    of: BlockOwner,
    size: usize,
    first: usize,
    last: usize,
}

/// Assigns an offset to every block; also returns the total size.
fn pack(blocks: &[Block]) -> (Vec<usize>, usize) {
    let mut by_size: Vec<usize> = (0..blocks.len()).collect();
    by_size.sort_by_key(|&i| (std::cmp::Reverse(blocks[i].size), blocks[i].first, i));
    let mut offsets = vec![0; blocks.len()];
    // Placed blocks, by offset.
    let mut allocated: Vec<usize> = Vec::new();
    let mut total = 0;
    for i in by_size {
        let block = &blocks[i];
        let mut offset = 0;
        for &p in &allocated {
            let neighbour = &blocks[p];
            let overlaps = neighbour.first <= block.last && block.first <= neighbour.last;
            if overlaps {
                if offsets[p] >= offset + block.size {
                    break;
                }
                offset = offset.max(offsets[p] + neighbour.size);
            }
        }
        offsets[i] = offset;
        total = total.max(offset + block.size);
        let at = allocated.partition_point(|&p| offsets[p] <= offset);
        allocated.insert(at, i);
    }
    (offsets, total)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(size: usize, first: usize, last: usize) -> Block {
        Block { of: BlockOwner::AliasClass(0), size, first, last }
    }

    #[test]
    fn blocks_alive_together_never_overlap() {
        let mut seed = 7u64;
        let mut next = |n: u64| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 33) % n
        };
        for _ in 0..50 {
            let blocks: Vec<Block> = (0..40)
                .map(|_| {
                    let first = next(30) as usize;
                    block(aligned(next(1000) as usize + 1), first, first + next(8) as usize)
                })
                .collect();
            let (offsets, total) = pack(&blocks);
            for i in 0..blocks.len() {
                assert!(offsets[i] + blocks[i].size <= total);
                for j in 0..i {
                    let (a, b) = (&blocks[i], &blocks[j]);
                    let in_time = a.first <= b.last && b.first <= a.last;
                    let in_space = offsets[i] < offsets[j] + b.size && offsets[j] < offsets[i] + a.size;
                    assert!(!(in_time && in_space), "blocks {i} and {j}");
                }
            }
            let alive = |t: usize| blocks.iter().filter(|b| b.first <= t && t <= b.last).map(|b| b.size).sum();
            let floor: usize = (0..40).map(alive).max().unwrap();
            assert!(total >= floor && total <= 2 * floor, "{total} bytes for a floor of {floor}");
        }
    }
}
