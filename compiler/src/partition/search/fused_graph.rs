//! The graph that partitioners search: ops that must share a stage are fused.
//!
//! An op that depends only on parameters (for example a weight transpose) could run in any stage before its reader.
//! Such ops multiply the number of down-sets and never improve a plan, because their result would have to be sent. So
//! they are fused with their reader (the leader) before the search, and the resulting shape is expanded to all ops
//! afterwards.

use crate::partition::dp::nested_partition::{Group, Shape, StageBody};
use crate::plan::problem::Problem;
use crate::profile::arena::{Arena, Live, Needs};
use crate::profile::cost_graph::{CostGraph, FrozenCost, Members, OpCost, OpId, ParamCost, TensorCost};
use std::borrow::Cow;

#[derive(Clone, Debug)]
pub struct FusedGraph<'a> {
    pub full: &'a CostGraph,
    /// For each op: the fused op that contains it.
    place: Vec<u32>,
    /// For each fused op: the ids of its ops, ascending.
    members: Vec<Vec<u32>>,
    pub leaders: Vec<u32>,
}

impl<'a> FusedGraph<'a> {
    pub fn of(full: &'a CostGraph) -> FusedGraph<'a> {
        let leaders: Vec<u32> =
            (0..full.ops.len() as u32).filter(|&op| full.ops[op as usize].joins.is_none()).collect();
        let mut place = vec![0u32; full.ops.len()];
        leaders.iter().enumerate().for_each(|(at, &op)| place[op as usize] = at as u32);
        let mut members = vec![Vec::new(); leaders.len()];
        for op in 0..full.ops.len() as u32 {
            place[op as usize] = place[full.leader(OpId(op)).index()];
            members[place[op as usize] as usize].push(op);
        }
        FusedGraph { full, place, members, leaders }
    }

    pub fn place(&self, op: usize) -> usize {
        self.place[op] as usize
    }

    /// The op that a fused op is named after.
    pub fn leader(&self, op: u32) -> u32 {
        self.leaders[op as usize]
    }

    pub fn problem<'p>(&self, problem: &'p Problem) -> Cow<'p, Problem> {
        if self.leaders.len() == self.place.len() {
            return Cow::Borrowed(problem);
        }
        let mut joined = problem.clone();
        joined.graph = self.graph();
        Cow::Owned(joined)
    }

    /// The fused cost graph. Times and sizes add up, scratch is the maximum; tensors internal to a fused op are
    /// removed.
    pub fn graph(&self) -> CostGraph {
        let all = |ops: &[OpId]| {
            let mut all: Vec<OpId> = ops.iter().map(|op| OpId(self.place[op.index()])).collect();
            all.sort_unstable();
            all
        };
        // Per op: whether its output is read inside its fused op, and whether it is read outside.
        let mut stays = vec![false; self.full.ops.len()];
        let mut goes = vec![false; self.full.ops.len()];
        for tensor in &self.full.tensors {
            let from = tensor.producer.index();
            for to in &tensor.consumers {
                let place = if self.place[to.index()] == self.place[from] { &mut stays } else { &mut goes };
                place[from] = true;
            }
        }
        let (largest, needed) = (self.full.largest_bytes(), self.full.needed_bytes());
        let mut ops: Vec<OpCost> = Vec::with_capacity(self.leaders.len());
        for (at, members) in self.members.iter().enumerate() {
            let mut sum = self.full.ops[self.leaders[at] as usize].clone();
            sum.id = at as u32;
            (sum.between_bytes, sum.arriving_bytes, sum.unsaved) = (0, 0, false);
            for (op, cost) in members.iter().map(|&op| (op as usize, &self.full.ops[op as usize])) {
                // A gradient can arrive unchanged from another stage only if no member of the fused op reads the
                // tensor.
                let is_kept = stays[op] || !goes[op];
                let place = if is_kept { &mut sum.between_bytes } else { &mut sum.arriving_bytes };
                *place += cost.arriving_bytes;
                sum.between_bytes += cost.between_bytes;
                sum.unsaved |= cost.unsaved && (goes[op] || members.len() == 1);
            }
            for op in members.iter().filter(|op| **op != self.leaders[at]).map(|&op| &self.full.ops[op as usize]) {
                if sum.weight_grad_us.is_some() || op.weight_grad_us.is_some() {
                    sum.weight_grad_us = Some(sum.weight_part_us() + op.weight_part_us());
                }
                sum.fwd_us += op.fwd_us;
                sum.bwd_us += op.bwd_us;
                sum.param_bytes += op.param_bytes;
                sum.saved_bytes += op.saved_bytes;
                sum.fed_bytes += op.fed_bytes;
                sum.reads_as_it_makes |= op.reads_as_it_makes;
                sum.is_view &= op.is_view;
                sum.batched_grad_bytes += op.batched_grad_bytes;
            }
            if members.len() > 1 {
                let needs = Needs::by(|place| {
                    let own = members.iter().map(|&op| self.full.ops[op as usize].arena(place));
                    own.fold(Arena::default(), Arena::max)
                });
                let most = |bytes: &[u64]| members.iter().map(|&op| bytes[op as usize]).max().unwrap_or(0);
                sum.joined = Some(Box::new(Members { needs, largest: most(&largest), needed: most(&needed) }));
                (sum.workspace_bytes, sum.batched_grad_workspace_bytes, sum.live) = (0, 0, Live::default());
            }
            ops.push(sum);
        }
        let mut tensors = Vec::with_capacity(self.full.tensors.len());
        for tensor in &self.full.tensors {
            let producer = OpId(self.place[tensor.producer.index()]);
            let mut consumers = all(&tensor.consumers);
            consumers.dedup();
            consumers.retain(|to| *to != producer);
            if consumers.is_empty() && !tensor.consumers.is_empty() {
                continue;
            }
            if self.full.ops[tensor.producer.index()].joins.is_some() {
                ops[producer.index()].out_bytes += tensor.bytes;
            }
            tensors.push(TensorCost { producer, consumers, ..tensor.clone() });
        }
        let params = self.full.params.iter().map(|param| ParamCost { users: all(&param.users), ..param.clone() });
        let frozen = self.full.frozen.iter().map(|frozen| FrozenCost { users: all(&frozen.users), ..frozen.clone() });
        CostGraph { ops, tensors, params: params.collect(), frozen: frozen.collect() }
    }

    /// Expands a shape over fused ops to all ops.
    pub fn spread(&self, shape: &Shape) -> Shape {
        Shape { groups: self.groups(&shape.groups), is_flat: shape.is_flat }
    }

    fn groups(&self, groups: &[Group]) -> Vec<Group> {
        let spread = |group: &Group| {
            let body = match &group.body {
                StageBody::Groups(inner) => StageBody::Groups(self.groups(inner)),
                StageBody::Ops(ops) => {
                    let mut all: Vec<u32> =
                        ops.iter().flat_map(|&op| self.members[op as usize].iter().copied()).collect();
                    all.sort_unstable();
                    StageBody::Ops(all)
                }
            };
            Group { replicas: group.replicas, body }
        };
        groups.iter().map(spread).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::gradient_buffers::GradientBuffers;
    use crate::plan::memory::MemoryTerms;
    use crate::profile::arena::{ArenaPosition, Way};
    use crate::profile::recompute_scope::RecomputeCosts;

    // Op 0 makes a weight read by 5, and by 3 through 1. Ops 2, 3, 5 form a chain. Op 4 makes a weight for 5.
    fn graph() -> CostGraph {
        let op = |id: u32, joins: Option<u32>| OpCost {
            id,
            name: format!("op{id}"),
            fwd_us: f64::from(1 << id),
            param_bytes: 1 << id,
            saved_bytes: 10 << id,
            workspace_bytes: u64::from(100 - id),
            out_bytes: 100,
            reads_as_it_makes: id == 3,
            joins: joins.map(OpId),
            ..OpCost::default()
        };
        let readers: [&[u32]; 6] = [&[1, 5], &[3], &[3], &[5], &[5], &[]];
        let tensor =
            |from: u32| TensorCost { name: format!("t{from}"), ..TensorCost::new(from, 100, readers[from as usize]) };
        let joins = [Some(3), Some(3), None, None, Some(5), None];
        CostGraph {
            ops: joins.iter().enumerate().map(|(id, joins)| op(id as u32, *joins)).collect(),
            tensors: (0..6).map(tensor).collect(),
            params: vec![ParamCost::new("w", 7, vec![OpId(0), OpId(3), OpId(4)])],
            ..CostGraph::default()
        }
    }

    #[test]
    fn sums_and_crossing_tensors() {
        let full = graph();
        assert_eq!(full.check(), Ok(()));
        let joined = FusedGraph::of(&full);
        let small = joined.graph();
        assert_eq!(small.check(), Ok(()));
        assert_eq!(small.ops.iter().map(|op| op.name.as_str()).collect::<Vec<_>>(), ["op2", "op3", "op5"]);
        assert_eq!(small.ops.iter().map(|op| op.fwd_us).collect::<Vec<_>>(), [4.0, 11.0, 48.0]);
        assert_eq!(small.ops.iter().map(|op| op.param_bytes).collect::<Vec<_>>(), [4, 11, 48]);
        assert_eq!(small.ops.iter().map(|op| op.saved_bytes).collect::<Vec<_>>(), [40, 110, 480]);
        let scratch = |op: &OpCost| op.arena(ArenaPosition::default()).of(Way::default());
        assert_eq!(small.ops.iter().map(scratch).collect::<Vec<_>>(), [98, 100, 96]);
        // t0 and t3 leave the fused op of op 3.
        assert_eq!(small.ops.iter().map(|op| op.out_bytes).collect::<Vec<_>>(), [100, 200, 100]);
        let wires = small.tensors.iter().map(|t| (t.name.as_str(), t.producer.0, t.consumers.clone()));
        let wanted = [("t0", 1, vec![OpId(2)]), ("t2", 0, vec![OpId(1)]), ("t3", 1, vec![OpId(2)]), ("t5", 2, vec![])];
        assert_eq!(wires.collect::<Vec<_>>(), wanted);
        assert_eq!(small.params[0].users, [OpId(1), OpId(1), OpId(2)], "its gradient has a term for each use");
        assert_eq!(small.summed_bytes(), [0, 14, 7]);
        assert_eq!((small.largest_bytes(), small.needed_bytes()), (vec![0, 7, 7], vec![0, 14, 7]), "one op at a time");
        assert_eq!((joined.place(0), joined.place(4), joined.leader(1)), (1, 2, 3));
    }

    // Four fused ops of three ops each; later members read the second op; two fused ops end in views.
    fn runs() -> CostGraph {
        let op = |id: u32| OpCost {
            id,
            name: format!("op{id}"),
            fwd_us: 1.0,
            saved_bytes: 3 << id,
            fed_bytes: u64::from(id % 2),
            workspace_bytes: u64::from(90 - 7 * id % 30),
            live: Live { whole: [40, 30, 20 + u64::from(id), 5], split: [35, 20, 10 + u64::from(id), 4] },
            between_bytes: 1 << id,
            arriving_bytes: 5 << id,
            reads_as_it_makes: id == 4,
            is_view: id % 6 == 2,
            unsaved: id % 3 == 2,
            joins: (id % 3 != 2).then(|| OpId(id / 3 * 3 + 2)),
            ..OpCost::default()
        };
        let tensor = |id: u32| {
            let is_read = |to: &u32| *to < 12 && (*to == id + 1 || id % 3 == 2);
            let readers: Vec<u32> = [id + 1, id + 4].into_iter().filter(is_read).collect();
            TensorCost { name: format!("t{id}"), ..TensorCost::new(id, 7 << id, &readers) }
        };
        let params = [vec![0, 1], vec![4], vec![1, 5, 10], vec![7, 8]];
        let param = |(at, users): (usize, &Vec<u32>)| {
            ParamCost::new(format!("w{at}"), 1 << (20 + at), users.iter().map(|&op| OpId(op)).collect())
        };
        let frozen = |(at, users): (usize, &Vec<u32>)| FrozenCost {
            name: format!("f{at}"),
            bytes: 1 << (30 + at),
            users: users.iter().map(|&op| OpId(op)).collect(),
        };
        CostGraph {
            ops: (0..12).map(op).collect(),
            tensors: (0..12).map(tensor).collect(),
            params: params.iter().enumerate().map(param).collect(),
            frozen: params.iter().enumerate().map(frozen).collect(),
        }
    }

    #[test]
    fn what_runs_hold_is_what_their_ops_hold() {
        let full = runs();
        assert_eq!(full.check(), Ok(()));
        let joined = FusedGraph::of(&full);
        let small = joined.graph();
        assert_eq!(small.ops.len(), 4);
        let (passing, flows) = (GradientBuffers { wire: None, pace: 1.0 }, [full.flows(), small.flows()]);
        let costs = [&full, &small].map(RecomputeCosts::of);
        for from in 0..4 {
            for to in from + 1..=4 {
                let inside = |ops: usize, per: usize| -> Vec<bool> {
                    (0..ops).map(|op| (from..to).contains(&(op / per))).collect()
                };
                let whole = MemoryTerms::of(&full, (&flows[0], &costs[0]), &inside(12, 3), &passing);
                let fused = MemoryTerms::of(&small, (&flows[1], &costs[1]), &inside(4, 1), &passing);
                assert_eq!(fused, whole, "{from}..{to}");
            }
        }
    }

    #[test]
    fn shapes_spread_over_all_ops() {
        let full = graph();
        let shape = Shape::flat(vec![(vec![0, 1], 2), (vec![2], 1)], true);
        let wanted = Shape::flat(vec![(vec![0, 1, 2, 3], 2), (vec![4, 5], 1)], true);
        assert_eq!(FusedGraph::of(&full).spread(&shape), wanted);
    }
}
