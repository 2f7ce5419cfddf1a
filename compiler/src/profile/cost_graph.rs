//! The form of a model that planning works on: ops with times and sizes, the tensors between them, and their parameters.
//!
//! It knows nothing of what an op computes, so that it can be built from a graph and its profile, and as well from the
//! published profiles of other tools. Ops stand in topological order and an op's id is its index.

use crate::profile::arena::{Arena, ArenaPosition, Live, Needs, Way};
use serde::{Deserialize, Serialize};

/// The most ops, tensors and parameters a cost graph may have, each.
pub const MAX_ENTRIES: usize = 4_000_000;

/// Index of an op in the canonical topological order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct OpId(pub u32);

impl OpId {
    /// As an index into the ops.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// One op: times in microseconds and sizes in bytes, all for one micro-batch.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct OpCost {
    /// Place in the list of ops.
    pub id: u32,
    /// Name of the source node.
    pub name: String,
    /// Module path of the source node, empty where there is none.
    pub module: String,
    /// Kind of op.
    pub op: String,
    /// Forward time.
    pub fwd_us: f64,
    /// Backward time.
    pub bwd_us: f64,
    /// The part of it that makes gradients of weights, where that is known: see [`OpCost::weight_part_us`].
    pub weight_us: Option<f64>,
    /// Time of one step of SGD with momentum over the parameters this op is the first to use; 0 where it is not known.
    pub update_us: f64,
    /// Bytes of the parameters this op is the first to use: a tied parameter is counted once, [`CostGraph::params`] names all
    /// its users.
    pub param_bytes: u64,
    /// Bytes kept from forward for backward.
    pub saved_bytes: u64,
    /// Bytes of what is fed to the model that this op is the first to read; they wait for backward too.
    pub fed_bytes: u64,
    /// Scratch bytes while the op runs, forward or backward.
    pub workspace_bytes: u64,
    /// Bytes put by where gradients of several items are made at once, and the scratch that this needs: see
    /// [`joint`](crate::pass::batched_weight_grad).
    pub joint_bytes: u64,
    /// The latter.
    pub joint_workspace_bytes: u64,
    /// Bytes of all tensors that are alive while the op runs.
    pub live: Live,
    /// What its ops need one by one, where it stands for several.
    pub joined: Option<Box<Members>>,
    /// Bytes that the first half of a split backward makes of the op for its own second half.
    pub between_bytes: u64,
    /// Bytes of the gradients of its outputs that the second half of a split backward reads: they are kept between the halves, unless
    /// they come from another stage as they are.
    pub arriving_bytes: u64,
    /// Whether its backward makes gradients of parameters in the run of a kernel that reads them, as that of a recurrent layer does.
    pub reads_as_it_makes: bool,
    /// Whether its output is its first input in another shape.
    pub is_view: bool,
    /// Whether its outputs are not saved, so that one which goes to another stage is kept for that alone.
    pub unsaved: bool,
    /// Bytes of all outputs.
    pub out_bytes: u64,
    /// The op whose stage it shares, where it has no choice of its own: a transposed weight stands with the op that uses it.
    /// Absent for ops that others join.
    pub joins: Option<OpId>,
}

/// What each of several ops needs that stand in a graph as one: they run one after the other, so that the most of any counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Members {
    /// Of an arena.
    pub needs: Needs,
    /// Of parameters at once, as their sums: see [`CostGraph::largest_bytes`].
    pub largest: u64,
    /// Of parameters and gradients at once: see [`CostGraph::needed_bytes`].
    pub needed: u64,
}

/// One tensor: made by one op, read by others. A tensor without readers is an output of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorCost {
    /// Name in the source file.
    pub name: String,
    /// The op that makes it.
    pub producer: OpId,
    /// Its size for one micro-batch.
    pub bytes: u64,
    /// The ops that read it, ascending, each once.
    pub consumers: Vec<OpId>,
}

/// One parameter and the ops that use it; more than one user means that the parameter is tied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamCost {
    /// Name in the source file.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// The size of a sum of its gradients, and of each number that the optimizer keeps for each of its own: those of a parameter of
    /// two bytes a number have four.
    pub sum_bytes: u64,
    /// The ops that use it, ascending; once for each op that has been joined into one.
    pub users: Vec<OpId>,
}

impl ParamCost {
    /// A parameter whose sums are as large as it is.
    pub fn new(name: impl Into<String>, bytes: u64, users: Vec<OpId>) -> ParamCost {
        ParamCost { name: name.into(), bytes, sum_bytes: bytes, users }
    }

    /// The bytes of what the optimizer moves in the place of a parameter that is narrower than its sums; 0 for all others.
    pub fn master_bytes(&self) -> u64 {
        if self.sum_bytes > self.bytes { self.sum_bytes } else { 0 }
    }
}

/// What flows between ops that do something.
#[derive(Clone, Debug)]
pub struct Flows {
    /// For each op those that make what it reads, ascending.
    pub before: Vec<Vec<u32>>,
    /// For each op those that read what it makes, ascending.
    pub after: Vec<Vec<u32>>,
}

impl Flows {
    /// Where an op can stand: first only if it alone reads what it reads, and last only if one op reads what it makes. Else gradients
    /// come from several ops and stages, and their terms and their sum lie in the arena.
    pub fn ends(&self, op: usize) -> ArenaPosition {
        let is_read_here = |made: &u32| self.after[*made as usize].len() == 1;
        ArenaPosition {
            first: !self.before[op].is_empty() && self.before[op].iter().all(is_read_here),
            last: self.after[op].len() == 1,
        }
    }

    /// Where an op stands among those of which `inside` is true.
    pub fn place(&self, op: usize, inside: impl Fn(usize) -> bool) -> ArenaPosition {
        let is_apart = |ops: &[u32]| !ops.iter().any(|&op| inside(op as usize));
        let ends = self.ends(op);
        ArenaPosition { first: ends.first && is_apart(&self.before[op]), last: ends.last && is_apart(&self.after[op]) }
    }
}

/// A model as costs. See [`CostGraph::check`] for what must hold.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct CostGraph {
    /// Ops in topological order.
    pub ops: Vec<OpCost>,
    /// Tensors between ops.
    pub tensors: Vec<TensorCost>,
    /// Parameters.
    pub params: Vec<ParamCost>,
}

/// What is wrong with a cost graph.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CostGraphError {
    /// There is nothing to plan.
    #[error("the model has no ops")]
    Empty,
    /// More entries than `MAX_ENTRIES`.
    #[error("{what}: {count} are more than the {MAX_ENTRIES} that can be planned")]
    TooMany {
        /// "ops", "tensors" or "parameters".
        what: &'static str,
        /// How many.
        count: usize,
    },
    /// An op whose id is not its place.
    #[error("op `{name}` stands at {index} and has id {id}")]
    Id {
        /// Name of the op.
        name: String,
        /// Place in the list.
        index: usize,
        /// Its id.
        id: u32,
    },
    /// A time that is negative or not finite.
    #[error("op `{name}`: `{field}` is {value}; it must be finite and not negative")]
    Time {
        /// Name of the op.
        name: String,
        /// `fwd_us`, `bwd_us`, `weight_us` or `update_us`.
        field: &'static str,
        /// The value.
        value: f64,
    },
    /// A part of a backward that is longer than the backward.
    #[error("op `{name}`: `weight_us` is {weight_us}, a part of `bwd_us`, which is {bwd_us}")]
    Part {
        /// Name of the op.
        name: String,
        /// The part.
        weight_us: f64,
        /// The whole.
        bwd_us: f64,
    },
    /// A reference to an op that does not exist.
    #[error("`{name}` refers to op {op}, the model has {ops} ops")]
    UnknownOp {
        /// Name of the tensor or parameter.
        name: String,
        /// The reference.
        op: u32,
        /// Number of ops.
        ops: usize,
    },
    /// A tensor that is read no later than it is made.
    #[error("ops are not in topological order: tensor `{name}` is made by op {producer} and read by op {consumer}")]
    Order {
        /// Name of the tensor.
        name: String,
        /// Its producer.
        producer: u32,
        /// The reader that comes too early.
        consumer: u32,
    },
    /// An op that joins another which it cannot join.
    #[error("op `{name}` joins op {to}, which {why}")]
    Joins {
        /// Name of the op.
        name: String,
        /// The op that it joins.
        to: u32,
        /// "joins another op itself" for example.
        why: &'static str,
    },
    /// Readers or users that are not ascending.
    #[error("the ops of `{name}` are not in ascending order, each once")]
    Unsorted {
        /// Name of the tensor or parameter.
        name: String,
    },
    /// Sizes that cannot be added up.
    #[error("the sizes of all {what} add up to more than 2^62 bytes")]
    Overflow {
        /// What was added.
        what: &'static str,
    },
}

impl OpCost {
    /// The part of the backward that makes gradients of weights, which a split backward may run later. Where that is not known it is
    /// half, as matrix products have it.
    pub fn weight_part_us(&self) -> f64 {
        self.weight_us.unwrap_or(self.bwd_us / 2.0)
    }

    /// What an item in flight keeps of the op.
    pub fn kept_bytes(&self) -> u64 {
        self.saved_bytes.saturating_add(self.fed_bytes)
    }

    /// What lies between the halves of its split backward at the most.
    pub fn apart_bytes(&self) -> u64 {
        self.between_bytes.saturating_add(self.arriving_bytes)
    }

    /// What a worker's arena must hold while the op runs.
    pub fn arena(&self, place: ArenaPosition) -> Arena {
        let own = Arena::by(|way| {
            let joint = if way.is_joint { self.joint_workspace_bytes } else { 0 };
            self.workspace_bytes.max(joint).saturating_add(self.live.at(place, way.is_split))
        });
        self.joined.as_ref().map_or(own, |joined| joined.needs.at(place).max(own))
    }

    /// The same wherever it stands and however backwards run.
    pub fn most_scratch(&self) -> u64 {
        let arena = self.arena(ArenaPosition::default());
        Way::ALL.into_iter().map(|way| arena.of(way)).max().unwrap_or(0)
    }
}

/// Passes over memory of one step of SGD with momentum: weights, gradient and momentum are read, weights and momentum written.
pub const MOMENTUM_PASSES: f64 = 5.0;

impl CostGraph {
    /// Adds the optimizer's steps to the backwards, as part of what makes gradients of weights: a step for so many items, by an optimizer
    /// that keeps `state` times the weights. Steps are bound by memory, of which each pass over the weights takes as long.
    pub fn charge_updates(&mut self, state: f64, items: u32) {
        let passes = 3.0 + 2.0 * state;
        for op in self.ops.iter_mut().filter(|op| op.update_us > 0.0) {
            let us = op.update_us * passes / MOMENTUM_PASSES / f64::from(items.max(1));
            op.weight_us = Some(op.weight_part_us() + us);
            op.bwd_us += us;
            op.update_us = 0.0;
        }
    }

    /// For each op the bytes of the sums of gradients of the parameters that it uses, also where others use them.
    pub fn summed_bytes(&self) -> Vec<u64> {
        let mut used = vec![0u64; self.ops.len()];
        for param in &self.params {
            param.users.iter().for_each(|op| used[op.index()] += param.sum_bytes);
        }
        used
    }

    /// For each op the bytes of the parameters that it needs at once, each counted as its sum.
    pub fn largest_bytes(&self) -> Vec<u64> {
        let own = |(used, op): (u64, &OpCost)| op.joined.as_ref().map_or(used, |members| members.largest);
        self.summed_bytes().into_iter().zip(&self.ops).map(own).collect()
    }

    /// For each op the bytes of the parameters and of the sums of their gradients that it needs at once; a parameter counts as its sum.
    pub fn needed_bytes(&self) -> Vec<u64> {
        let both = |(used, op): (u64, &OpCost)| match &op.joined {
            Some(members) => members.needed,
            None if op.reads_as_it_makes => used.saturating_mul(2),
            None => used,
        };
        self.summed_bytes().into_iter().zip(&self.ops).map(both).collect()
    }

    /// For each op those that make what it, or any op that is joined with it, reads of others, and those that read what they make: past
    /// views, which are what they are views of. Of ops that join another it is told with that.
    pub fn flows(&self) -> Flows {
        let mut before: Vec<Vec<u32>> = vec![Vec::new(); self.ops.len()];
        let mut pairs: Vec<(OpId, OpId)> = Vec::new();
        for tensor in &self.tensors {
            let made = self.leader(tensor.producer);
            pairs.extend(tensor.consumers.iter().map(|op| (self.leader(*op), made)).filter(|(op, made)| op != made));
        }
        let mut is_view = vec![true; self.ops.len()];
        for op in &self.ops {
            is_view[self.leader(OpId(op.id)).index()] &= op.is_view;
        }
        // By readers, so that of what is a view everything is known before it is read.
        pairs.sort_unstable();
        pairs.dedup();
        for reader in pairs.chunk_by(|(op, _), (other, _)| op == other) {
            let mut makers = Vec::with_capacity(reader.len());
            for (_, made) in reader {
                match is_view[made.index()] {
                    true => makers.extend_from_slice(&before[made.index()]),
                    false => makers.push(made.0),
                }
            }
            makers.sort_unstable();
            makers.dedup();
            before[reader[0].0.index()] = makers;
        }
        let mut after = vec![Vec::new(); self.ops.len()];
        for (op, before) in before.iter().enumerate().filter(|(op, _)| !is_view[*op]) {
            before.iter().for_each(|made| after[*made as usize].push(op as u32));
        }
        Flows { before, after }
    }

    /// Whether a tensor would not be kept if it were not sent.
    pub fn is_only_sent(&self, tensor: usize) -> bool {
        self.ops[self.tensors[tensor].producer.index()].unsaved
    }

    /// What must hold before anything is planned: ids are places, times are finite and not negative, every reference exists,
    /// every tensor is made before it is read, also once the ops that join another stand with it, and sums of sizes do not
    /// overflow.
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
                return Err(CostGraphError::Id { name: shown(&op.name), index, id: op.id });
            }
            let weight_us = op.weight_us.unwrap_or(0.0);
            for (field, value) in
                [("fwd_us", op.fwd_us), ("bwd_us", op.bwd_us), ("weight_us", weight_us), ("update_us", op.update_us)]
            {
                if !(value.is_finite() && value >= 0.0) {
                    return Err(CostGraphError::Time { name: shown(&op.name), field, value });
                }
            }
            if weight_us > op.bwd_us {
                return Err(CostGraphError::Part { name: shown(&op.name), weight_us, bwd_us: op.bwd_us });
            }
        }
        for op in &self.ops {
            let Some(to) = op.joins else { continue };
            self.refers(&op.name, &[to])?;
            if self.ops[to.index()].joins.is_some() {
                let why = "joins another op itself";
                return Err(CostGraphError::Joins { name: shown(&op.name), to: to.0, why });
            }
        }
        for tensor in &self.tensors {
            self.refers(&tensor.name, std::slice::from_ref(&tensor.producer))?;
            self.refers(&tensor.name, &tensor.consumers)?;
            if let Some(first) = tensor.consumers.first()
                && *first <= tensor.producer
            {
                return Err(CostGraphError::Order {
                    name: shown(&tensor.name),
                    producer: tensor.producer.0,
                    consumer: first.0,
                });
            }
            let made = self.leader(tensor.producer);
            if let Some(&early) = tensor.consumers.iter().find(|reader| self.leader(**reader) < made) {
                let joined = if made == tensor.producer { early } else { tensor.producer };
                let (name, to) = (shown(&self.ops[joined.index()].name), self.leader(joined).0);
                return Err(CostGraphError::Joins { name, to, why: "makes a tensor go backward" });
            }
        }
        for param in &self.params {
            self.exist(&param.name, &param.users)?;
            if !param.users.is_sorted() {
                return Err(CostGraphError::Unsorted { name: shown(&param.name) });
            }
        }
        let time: f64 = self.ops.iter().map(|op| op.fwd_us + op.bwd_us).sum();
        if !time.is_finite() {
            return Err(CostGraphError::Overflow { what: "times" });
        }
        total("outputs", self.ops.iter().map(|op| op.out_bytes))?;
        total("op parameters", self.ops.iter().map(|op| op.param_bytes))?;
        total("saved tensors", self.ops.iter().map(OpCost::kept_bytes))?;
        total("tensors between halves", self.ops.iter().map(OpCost::apart_bytes))?;
        total("workspaces", self.ops.iter().map(OpCost::most_scratch))?;
        total("what is put by", self.ops.iter().map(|op| op.joint_bytes))?;
        total("tensors", self.tensors.iter().map(|tensor| tensor.bytes))?;
        total("parameters", self.params.iter().map(|param| param.bytes))?;
        let uses = |param: &ParamCost| u64::try_from(param.users.len()).unwrap_or(u64::MAX);
        total("gradients", self.params.iter().map(|param| param.sum_bytes.saturating_mul(uses(param))))
    }

    /// All pairs of an op and a later op that reads one of its tensors, sorted, each pair once.
    pub fn edges(&self) -> Vec<(OpId, OpId)> {
        let pairs = self.tensors.iter().flat_map(|tensor| tensor.consumers.iter().map(|to| (tensor.producer, *to)));
        let mut edges: Vec<_> = pairs.collect();
        edges.sort_unstable();
        edges.dedup();
        edges
    }

    /// The op that `op` joins, or itself.
    pub fn leader(&self, op: OpId) -> OpId {
        self.ops[op.index()].joins.unwrap_or(op)
    }

    /// Forward plus backward time of all ops, in microseconds.
    pub fn total_us(&self) -> f64 {
        self.ops.iter().map(|op| op.fwd_us + op.bwd_us).sum()
    }

    fn refers(&self, name: &str, ops: &[OpId]) -> Result<(), CostGraphError> {
        self.exist(name, ops)?;
        if ops.windows(2).any(|pair| pair[0] >= pair[1]) {
            return Err(CostGraphError::Unsorted { name: shown(name) });
        }
        Ok(())
    }

    fn exist(&self, name: &str, ops: &[OpId]) -> Result<(), CostGraphError> {
        if let Some(op) = ops.iter().find(|op| op.index() >= self.ops.len()) {
            return Err(CostGraphError::UnknownOp { name: shown(name), op: op.0, ops: self.ops.len() });
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

fn shown(name: &str) -> String {
    name.chars().take(120).map(|c| if c.is_control() { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two() -> CostGraph {
        let op = |id, name: &str| OpCost { id, name: name.into(), fwd_us: 1.0, bwd_us: 2.0, ..OpCost::default() };
        let tensor = TensorCost { name: "t".into(), producer: OpId(0), bytes: 8, consumers: vec![OpId(1)] };
        CostGraph { ops: vec![op(0, "a"), op(1, "b")], tensors: vec![tensor], params: vec![] }
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
        assert!(matches!(broken(|g| g.ops[1].weight_us = Some(f64::NAN)), CostGraphError::Time { .. }));
        assert!(matches!(broken(|g| g.ops[1].weight_us = Some(2.5)), CostGraphError::Part { .. }));
        assert!(matches!(broken(|g| g.tensors[0].consumers = vec![OpId(0)]), CostGraphError::Order { .. }));
        assert!(matches!(broken(|g| g.tensors[0].producer = OpId(9)), CostGraphError::UnknownOp { .. }));
        assert!(matches!(broken(|g| g.tensors[0].consumers = vec![OpId(1), OpId(1)]), CostGraphError::Unsorted { .. }));
        assert!(matches!(broken(|g| g.ops[0].out_bytes = u64::MAX), CostGraphError::Overflow { .. }));
        assert!(matches!(broken(|g| g.ops[0].joins = Some(OpId(9))), CostGraphError::UnknownOp { .. }));
        assert!(matches!(broken(|g| g.ops[0].joins = Some(OpId(0))), CostGraphError::Joins { .. }));
        let before_what_it_reads = broken(|g| {
            let reader = OpCost { id: 2, joins: Some(OpId(0)), ..OpCost::default() };
            g.ops.push(reader);
            g.tensors[0] = TensorCost { producer: OpId(1), consumers: vec![OpId(2)], ..g.tensors[0].clone() };
        });
        assert!(matches!(before_what_it_reads, CostGraphError::Joins { .. }));
    }
}
