//! Cost graph used for planning: ops with times and sizes, tensors between them, and parameters.
//!
//! It is independent of the operators' semantics, so it can be built from a graph and its profile or from published
//! profiles of other tools. Ops are in topological order, and an op's id is its index.

use crate::profile::arena::{Arena, ArenaPosition, Live, Needs, Way};
use crate::profile::recompute_scope::RecomputeScope;
use crate::text::name::short_name;
use serde::{Deserialize, Serialize};

/// Largest number of ops, of tensors and of parameters.
pub const MAX_ENTRIES: usize = 4_000_000;

/// The longest time of an op, 30 years in microseconds: sums over all ops and micro-batches stay finite.
pub const MAX_US: f64 = 1e15;

/// Index of an op in the canonical topological order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct OpId(pub u32);

impl OpId {
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Costs of one op per micro-batch: times in microseconds, sizes in bytes.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct OpCost {
    /// Index in the list of ops.
    pub id: u32,
    pub name: String,
    /// Empty if there is none.
    pub module: String,
    pub op: String,
    pub fwd_us: f64,
    /// Input and weight gradients.
    pub bwd_us: f64,
    /// Part of `bwd_us` for weight gradients, if known; see [`OpCost::weight_part_us`].
    pub weight_grad_us: Option<f64>,
    /// Time of one SGD step with momentum for the parameters in `param_bytes`; 0 if unknown.
    pub update_us: f64,
    /// Parameters whose first user is this op, so that tied weights count once; [`CostGraph::params`] lists all users.
    pub param_bytes: u64,
    /// Saved from forward for backward.
    pub saved_bytes: u64,
    /// Model inputs whose first reader is this op; they are kept for backward.
    pub fed_bytes: u64,
    /// Scratch of the forward or backward kernels.
    pub workspace_bytes: u64,
    /// Buffered for batched weight gradients; see [`batched_weight_grad`](crate::pass::batched_weight_grad).
    pub batched_grad_bytes: u64,
    /// Scratch of the kernels that compute batched weight gradients.
    pub batched_grad_workspace_bytes: u64,
    /// Tensors alive while the op runs.
    pub live: Live,
    /// Needs of the individual ops, if this op is fused.
    pub joined: Option<Box<Members>>,
    /// Made by the input-gradient pass for the weight-gradient pass of the op itself.
    pub between_bytes: u64,
    /// Output gradients that the weight-gradient pass reads; kept between the passes, unless they arrive unchanged from
    /// another stage.
    pub arriving_bytes: u64,
    /// The backward kernel reads parameters while it makes their gradients, as in recurrent layers.
    pub reads_as_it_makes: bool,
    /// The output is a view of the first input.
    pub is_view: bool,
    /// Outputs are not saved, so an output sent to another stage is kept only for that.
    pub unsaved: bool,
    /// What is recomputed together with it.
    pub recompute: RecomputeScope,
    /// All outputs.
    pub out_bytes: u64,
    /// Operations of the forward; 0 if unknown.
    pub flops: f64,
    /// Of the two gradients of a product, those that do not count: of a frozen weight, and both if no operand depends on a
    /// trained parameter. That of a model input counts, as in the usual MFU.
    pub omitted_grads: u8,
    /// The op it is fused with because it has no placement of its own, such as a weight transpose; `None` for leaders.
    pub joins: Option<OpId>,
}

/// Needs of the ops in a fused op; they run one after the other, so the maximum counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Members {
    pub needs: Needs,
    /// See [`CostGraph::largest_bytes`].
    pub largest: u64,
    /// See [`CostGraph::needed_bytes`].
    pub needed: u64,
}

/// A tensor between ops; without consumers it is a model output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorCost {
    pub name: String,
    pub producer: OpId,
    /// Per micro-batch.
    pub bytes: u64,
    /// Ascending, without duplicates.
    pub consumers: Vec<OpId>,
}

impl TensorCost {
    /// A tensor without a name.
    pub fn new(producer: u32, bytes: u64, readers: &[u32]) -> TensorCost {
        let (producer, consumers) = (OpId(producer), readers.iter().copied().map(OpId).collect());
        TensorCost { name: String::new(), producer, bytes, consumers }
    }
}

/// A parameter and its users; with several users it is tied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamCost {
    pub name: String,
    pub bytes: u64,
    /// Size of its gradient sum, and of each optimizer-state tensor. Two-byte parameters have four-byte sums.
    pub sum_bytes: u64,
    /// Ascending; in a fused graph, an op occurs once per use.
    pub users: Vec<OpId>,
}

impl ParamCost {
    /// A parameter whose gradient sum has the same size.
    pub fn new(name: impl Into<String>, bytes: u64, users: Vec<OpId>) -> ParamCost {
        ParamCost { name: name.into(), bytes, sum_bytes: bytes, users }
    }

    /// Bytes of the master weights of a parameter that is narrower than its gradient sum; otherwise 0.
    pub fn master_bytes(&self) -> u64 {
        if self.sum_bytes > self.bytes { self.sum_bytes } else { 0 }
    }
}

/// A tensor that is read and not trained: a frozen parameter, a buffer or a large constant. Every stage that reads it has a
/// copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrozenCost {
    pub name: String,
    pub bytes: u64,
    /// Ascending; in a fused graph, an op occurs once per use.
    pub users: Vec<OpId>,
}

/// Producers and readers of each op, past views.
#[derive(Clone, Debug)]
pub struct Flows {
    /// Producers of its inputs, ascending.
    pub before: Vec<Vec<u32>>,
    /// Readers of its outputs, ascending.
    pub after: Vec<Vec<u32>>,
}

impl Flows {
    /// Position that an op can have at best: first if it is the only reader of its inputs, last if its outputs have a
    /// single reader. Otherwise gradients from several ops are summed in the arena.
    pub fn ends(&self, op: usize) -> ArenaPosition {
        let is_read_here = |producer: &u32| self.after[*producer as usize].len() == 1;
        ArenaPosition {
            first: !self.before[op].is_empty() && self.before[op].iter().all(is_read_here),
            last: self.after[op].len() == 1,
        }
    }

    /// Position of an op in the set of ops for which `inside` is true.
    pub fn place(&self, op: usize, inside: impl Fn(usize) -> bool) -> ArenaPosition {
        let is_apart = |ops: &[u32]| !ops.iter().any(|&op| inside(op as usize));
        let ends = self.ends(op);
        ArenaPosition { first: ends.first && is_apart(&self.before[op]), last: ends.last && is_apart(&self.after[op]) }
    }
}

/// A model as costs; see [`CostGraph::check`] for the invariants.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct CostGraph {
    pub ops: Vec<OpCost>,
    pub tensors: Vec<TensorCost>,
    pub params: Vec<ParamCost>,
    pub frozen: Vec<FrozenCost>,
}

/// Violations of the invariants.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CostGraphError {
    #[error("the model has no ops")]
    Empty,
    #[error("{what}: {count} exceed the limit of {MAX_ENTRIES}")]
    TooMany {
        /// "ops", "tensors" or "parameters".
        what: &'static str,
        count: usize,
    },
    /// The id of an op is not its index.
    #[error("op `{name}` has index {index} and id {id}")]
    Id { name: String, index: usize, id: u32 },
    /// A time is negative, not a number, or too long.
    #[error("op `{name}`: `{field}` is {value}; it must be from 0 to {MAX_US:e}")]
    Time {
        name: String,
        /// `fwd_us`, `bwd_us`, `weight_grad_us` or `update_us`.
        field: &'static str,
        value: f64,
    },
    /// `weight_grad_us` exceeds `bwd_us`.
    #[error("op `{name}`: `weight_grad_us` is {weight_grad_us}, but must not exceed `bwd_us`, which is {bwd_us}")]
    Part { name: String, weight_grad_us: f64, bwd_us: f64 },
    /// A tensor or parameter refers to an op that does not exist.
    #[error("`{name}` refers to op {op}, the model has {ops} ops")]
    UnknownOp { name: String, op: u32, ops: usize },
    /// A tensor is read before it is made.
    #[error("ops are not in topological order: op {producer} computes tensor `{name}`, and op {consumer} reads it")]
    Order { name: String, producer: u32, consumer: u32 },
    /// An op is fused with an op that does not allow it.
    #[error("op `{name}` is fused with op {to}, which {why}")]
    Joins {
        name: String,
        to: u32,
        /// For example "joins another op itself".
        why: &'static str,
    },
    /// Consumers or users are not ascending.
    #[error("the ops of `{name}` are not in ascending order without duplicates")]
    Unsorted { name: String },
    /// A sum of sizes exceeds 2^62.
    #[error("the sizes of all {what} add up to more than 2^62 bytes")]
    Overflow { what: &'static str },
}

impl OpCost {
    /// Microseconds of the weight-gradient pass, which a split backward can delay. Half of the backward if unknown, as
    /// for matrix products.
    pub fn weight_part_us(&self) -> f64 {
        self.weight_grad_us.unwrap_or(self.bwd_us / 2.0)
    }

    /// Forward time if its stage is recomputed, in microseconds.
    pub fn recompute_us(&self) -> f64 {
        if self.recompute == RecomputeScope::Never { 0.0 } else { self.fwd_us }
    }

    /// Operations if its stage is recomputed.
    pub fn recompute_flops(&self) -> f64 {
        if self.recompute == RecomputeScope::Never { 0.0 } else { self.flops }
    }

    /// Bytes kept per micro-batch in flight.
    pub fn kept_bytes(&self) -> u64 {
        self.saved_bytes.saturating_add(self.fed_bytes)
    }

    /// Upper bound on the bytes kept between the two passes of a split backward.
    pub fn pending_weight_grad_bytes(&self) -> u64 {
        self.between_bytes.saturating_add(self.arriving_bytes)
    }

    /// Arena bytes while the op runs.
    pub fn arena(&self, position: ArenaPosition) -> Arena {
        let arena = Arena::by(|way| {
            let joint = if way.is_joint { self.batched_grad_workspace_bytes } else { 0 };
            self.workspace_bytes.max(joint).saturating_add(self.live.at(position, way.is_split))
        });
        self.joined.as_ref().map_or(arena, |joined| joined.needs.at(position).max(arena))
    }

    /// Largest arena bytes over all backward variants, without boundary savings.
    pub fn most_scratch(&self) -> u64 {
        let arena = self.arena(ArenaPosition::default());
        Way::ALL.into_iter().map(|way| arena.of(way)).max().unwrap_or(0)
    }
}

/// Memory passes of one SGD step with momentum: reads weights, gradient and momentum; writes weights and momentum.
pub const MOMENTUM_PASSES: f64 = 5.0;

impl CostGraph {
    /// Adds the optimizer step to the weight-gradient time, once per `items` micro-batches, for an optimizer with
    /// `state` times the weight bytes. Steps are memory-bound, and every pass over the weights takes the same time.
    pub fn charge_updates(&mut self, state: f64, items: u32) {
        let passes = 3.0 + 2.0 * state;
        for op in self.ops.iter_mut().filter(|op| op.update_us > 0.0) {
            let us = op.update_us * passes / MOMENTUM_PASSES / f64::from(items.max(1));
            op.weight_grad_us = Some(op.weight_part_us() + us);
            op.bwd_us += us;
            op.update_us = 0.0;
        }
    }

    /// For each op: bytes of the gradient sums of all parameters it uses.
    pub fn summed_bytes(&self) -> Vec<u64> {
        let mut used = vec![0u64; self.ops.len()];
        for param in &self.params {
            param.users.iter().for_each(|op| used[op.index()] += param.sum_bytes);
        }
        used
    }

    /// For each op: parameter bytes needed at the same time, counted at the size of their sums.
    pub fn largest_bytes(&self) -> Vec<u64> {
        let largest = |(used, op): (u64, &OpCost)| op.joined.as_ref().map_or(used, |members| members.largest);
        self.summed_bytes().into_iter().zip(&self.ops).map(largest).collect()
    }

    /// For each op: bytes of parameters and gradient sums needed at the same time; parameters are counted at the size
    /// of their sums.
    pub fn needed_bytes(&self) -> Vec<u64> {
        let needed = |(used, op): (u64, &OpCost)| match &op.joined {
            Some(members) => members.needed,
            None if op.reads_as_it_makes => used.saturating_mul(2),
            None => used,
        };
        self.summed_bytes().into_iter().zip(&self.ops).map(needed).collect()
    }

    /// Producers and readers of each op, past views. For fused ops the entry of the leader is filled.
    pub fn flows(&self) -> Flows {
        let mut before: Vec<Vec<u32>> = vec![Vec::new(); self.ops.len()];
        let mut pairs: Vec<(OpId, OpId)> = Vec::new();
        for tensor in &self.tensors {
            let producer = self.leader(tensor.producer);
            pairs.extend(
                tensor.consumers.iter().map(|op| (self.leader(*op), producer)).filter(|(op, producer)| op != producer),
            );
        }
        let mut is_view = vec![true; self.ops.len()];
        for op in &self.ops {
            is_view[self.leader(OpId(op.id)).index()] &= op.is_view;
        }
        // Sorted by reader, so that the producers behind a view are complete before they are used.
        pairs.sort_unstable();
        pairs.dedup();
        for reader in pairs.chunk_by(|(op, _), (other, _)| op == other) {
            let mut producers = Vec::with_capacity(reader.len());
            for (_, producer) in reader {
                match is_view[producer.index()] {
                    true => producers.extend_from_slice(&before[producer.index()]),
                    false => producers.push(producer.0),
                }
            }
            producers.sort_unstable();
            producers.dedup();
            before[reader[0].0.index()] = producers;
        }
        let mut after = vec![Vec::new(); self.ops.len()];
        for (op, before) in before.iter().enumerate().filter(|(op, _)| !is_view[*op]) {
            before.iter().for_each(|producer| after[*producer as usize].push(op as u32));
        }
        Flows { before, after }
    }

    /// Returns whether a tensor is kept only because it is sent to another stage.
    pub fn is_only_sent(&self, tensor: usize) -> bool {
        self.ops[self.tensors[tensor].producer.index()].unsaved
    }

    /// Checks the invariants: ids are indices, times are from 0 to [`MAX_US`], references exist, and sums of sizes
    /// do not overflow. Tensors are made before they are read, also after fusion.
    pub fn check(&self) -> Result<(), CostGraphError> {
        if self.ops.is_empty() {
            return Err(CostGraphError::Empty);
        }
        for (what, count) in
            [("ops", self.ops.len()), ("tensors", self.tensors.len()), ("parameters", self.params.len())]
        {
            if count > MAX_ENTRIES {
                return Err(CostGraphError::TooMany { what, count });
            }
        }
        for (index, op) in self.ops.iter().enumerate() {
            if op.id as usize != index {
                return Err(CostGraphError::Id { name: short_name(&op.name), index, id: op.id });
            }
            let weight_grad_us = op.weight_grad_us.unwrap_or(0.0);
            for (field, value) in [
                ("fwd_us", op.fwd_us),
                ("bwd_us", op.bwd_us),
                ("weight_grad_us", weight_grad_us),
                ("update_us", op.update_us),
            ] {
                if !(0.0..=MAX_US).contains(&value) {
                    return Err(CostGraphError::Time { name: short_name(&op.name), field, value });
                }
            }
            if weight_grad_us > op.bwd_us {
                return Err(CostGraphError::Part { name: short_name(&op.name), weight_grad_us, bwd_us: op.bwd_us });
            }
        }
        for op in &self.ops {
            let Some(to) = op.joins else { continue };
            self.check_references(&op.name, &[to])?;
            if self.ops[to.index()].joins.is_some() {
                let why = "is itself fused with another op";
                return Err(CostGraphError::Joins { name: short_name(&op.name), to: to.0, why });
            }
        }
        for tensor in &self.tensors {
            self.check_references(&tensor.name, std::slice::from_ref(&tensor.producer))?;
            self.check_references(&tensor.name, &tensor.consumers)?;
            if let Some(first) = tensor.consumers.first()
                && *first <= tensor.producer
            {
                return Err(CostGraphError::Order {
                    name: short_name(&tensor.name),
                    producer: tensor.producer.0,
                    consumer: first.0,
                });
            }
            let producer = self.leader(tensor.producer);
            if let Some(&reader) = tensor.consumers.iter().find(|reader| self.leader(**reader) < producer) {
                let op = if producer == tensor.producer { reader } else { tensor.producer };
                let (name, to) = (short_name(&self.ops[op.index()].name), self.leader(op).0);
                return Err(CostGraphError::Joins { name, to, why: "would make a tensor go backward" });
            }
        }
        for param in &self.params {
            self.check_ops_exist(&param.name, &param.users)?;
            if !param.users.is_sorted() {
                return Err(CostGraphError::Unsorted { name: short_name(&param.name) });
            }
        }
        total("outputs", self.ops.iter().map(|op| op.out_bytes))?;
        for frozen in &self.frozen {
            self.check_ops_exist(&frozen.name, &frozen.users)?;
        }
        total("frozen weights", self.frozen.iter().map(|frozen| frozen.bytes))?;
        total("op parameters", self.ops.iter().map(|op| op.param_bytes))?;
        total("saved tensors", self.ops.iter().map(OpCost::kept_bytes))?;
        total("pending weight-gradient tensors", self.ops.iter().map(OpCost::pending_weight_grad_bytes))?;
        total("workspaces", self.ops.iter().map(OpCost::most_scratch))?;
        total("batched weight-gradient buffers", self.ops.iter().map(|op| op.batched_grad_bytes))?;
        total("tensors", self.tensors.iter().map(|tensor| tensor.bytes))?;
        total("parameters", self.params.iter().map(|param| param.bytes))?;
        let uses = |param: &ParamCost| u64::try_from(param.users.len()).unwrap_or(u64::MAX);
        total("gradients", self.params.iter().map(|param| param.sum_bytes.saturating_mul(uses(param))))
    }

    /// All pairs of an op and a reader of one of its tensors, sorted, without duplicates.
    pub fn edges(&self) -> Vec<(OpId, OpId)> {
        let pairs = self.tensors.iter().flat_map(|tensor| tensor.consumers.iter().map(|to| (tensor.producer, *to)));
        let mut edges: Vec<_> = pairs.collect();
        edges.sort_unstable();
        edges.dedup();
        edges
    }

    /// The op that `op` is fused with, or itself.
    pub fn leader(&self, op: OpId) -> OpId {
        self.ops[op.index()].joins.unwrap_or(op)
    }

    /// Forward plus backward microseconds of all ops.
    pub fn total_us(&self) -> f64 {
        self.ops.iter().map(|op| op.fwd_us + op.bwd_us).sum()
    }

    fn check_references(&self, name: &str, ops: &[OpId]) -> Result<(), CostGraphError> {
        self.check_ops_exist(name, ops)?;
        if ops.windows(2).any(|pair| pair[0] >= pair[1]) {
            return Err(CostGraphError::Unsorted { name: short_name(name) });
        }
        Ok(())
    }

    fn check_ops_exist(&self, name: &str, ops: &[OpId]) -> Result<(), CostGraphError> {
        if let Some(op) = ops.iter().find(|op| op.index() >= self.ops.len()) {
            return Err(CostGraphError::UnknownOp { name: short_name(name), op: op.0, ops: self.ops.len() });
        }
        Ok(())
    }
}

fn total(what: &'static str, mut sizes: impl Iterator<Item = u64>) -> Result<(), CostGraphError> {
    let sum = sizes.try_fold(0u64, |sum, size| sum.checked_add(size));
    match sum {
        Some(sum) if sum <= 1 << 62 => Ok(()),
        _ => Err(CostGraphError::Overflow { what }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two() -> CostGraph {
        let op = |id| OpCost { id, fwd_us: 1.0, bwd_us: 2.0, ..OpCost::default() };
        CostGraph { ops: vec![op(0), op(1)], tensors: vec![TensorCost::new(0, 8, &[1])], ..CostGraph::default() }
    }

    #[test]
    fn a_sound_graph_passes() {
        assert_eq!(two().check(), Ok(()));
        assert_eq!(two().edges(), vec![(OpId(0), OpId(1))]);
        assert_eq!(two().total_us(), 6.0);
    }

    #[test]
    fn each_fault_has_its_error() {
        let broken = |change: fn(&mut CostGraph)| {
            let mut graph = two();
            change(&mut graph);
            graph.check().unwrap_err()
        };
        assert_eq!(broken(|g| g.ops.clear()), CostGraphError::Empty);
        assert!(matches!(broken(|g| g.ops[1].id = 5), CostGraphError::Id { .. }));
        assert!(matches!(broken(|g| g.ops[1].fwd_us = f64::NAN), CostGraphError::Time { .. }));
        assert!(matches!(broken(|g| g.ops[1].bwd_us = -1.0), CostGraphError::Time { .. }));
        assert!(matches!(broken(|g| g.ops[1].weight_grad_us = Some(f64::NAN)), CostGraphError::Time { .. }));
        assert!(matches!(broken(|g| g.ops[1].weight_grad_us = Some(2.5)), CostGraphError::Part { .. }));
        assert!(matches!(broken(|g| g.tensors[0].consumers = vec![OpId(0)]), CostGraphError::Order { .. }));
        assert!(matches!(broken(|g| g.tensors[0].producer = OpId(9)), CostGraphError::UnknownOp { .. }));
        assert!(matches!(broken(|g| g.tensors[0].consumers = vec![OpId(1), OpId(1)]), CostGraphError::Unsorted { .. }));
        assert!(matches!(broken(|g| g.ops[0].out_bytes = u64::MAX), CostGraphError::Overflow { .. }));
        assert!(matches!(broken(|g| g.ops[0].joins = Some(OpId(9))), CostGraphError::UnknownOp { .. }));
        assert!(matches!(broken(|g| g.ops[0].joins = Some(OpId(0))), CostGraphError::Joins { .. }));
        let before_what_it_reads = broken(|g| {
            g.ops.push(OpCost { id: 2, joins: Some(OpId(0)), ..OpCost::default() });
            g.tensors[0] = TensorCost { producer: OpId(1), consumers: vec![OpId(2)], ..g.tensors[0].clone() };
        });
        assert!(matches!(before_what_it_reads, CostGraphError::Joins { .. }));
    }
}
