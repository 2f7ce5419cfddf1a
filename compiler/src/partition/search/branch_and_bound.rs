//! Forward branch and bound for the search in `pipec`: extends a pipeline from the first stage and prices every prefix
//! exactly.
//!
//! Going forward, both ends of a message are known, tensors with several reader stages are charged correctly, and
//! traffic on shared ports is summed. The tables of `suffix_dp` bound the remaining stages.

use crate::partition::search::placement::{PlacementQuery, StagePlacement};
use crate::partition::search::suffix_dp::Table;
use crate::plan::cost_estimate::{PlacedStage, outlook};
use crate::plan::tied;
use crate::plan::{Edge, StageId};
use crate::profile::cost_graph::{OpId, ParamCost};
use std::collections::BTreeMap;

/// The first stages of a pipeline. The price is exact except for tensors that later stages will read.
#[derive(Clone, Default)]
pub struct Prefix {
    placements: Vec<StagePlacement>,
    stages: Vec<PlacedStage>,
    edges: Vec<Edge>,
}

impl Prefix {
    pub fn push(&mut self, placing: &PlacementQuery<'_>, placement: StagePlacement) {
        let run =
            placing.places.run(placement.from, placement.to).at(placing.pace(placement.first, placement.replicas));
        let again = if placement.recompute { run.recompute_us } else { 0.0 };
        let to = StageId(self.stages.len() as u32);
        self.stages.push(PlacedStage {
            forward_us: run.forward_us,
            backward_us: run.backward_us + again,
            gradient_bytes: run.holdings.summed as f64,
            first: placement.first,
            replicas: placement.replicas,
            in_flight: placing.in_flight(
                placement.replicas,
                placing.devices - placement.first - placement.replicas,
                Some(self.placements.len()),
            ),
            tied_us: 0.0,
        });
        let mut bytes: BTreeMap<u32, u64> = BTreeMap::new();
        for tensor in placing.places.inputs(placement.from, placement.to) {
            let tensor = &placing.places.graph.tensors[tensor as usize];
            let made = self.placements.iter().position(|before| placing.places.has(before.to, tensor.producer.index()));
            if let Some(from) = made {
                *bytes.entry(from as u32).or_default() += tensor.bytes;
            }
        }
        let edge = |(from, bytes): (u32, u64)| Edge { from: StageId(from), to, tensors: Vec::new(), bytes };
        self.edges.extend(bytes.into_iter().map(edge));
        self.placements.push(placement);
        self.exchange(placing);
    }

    /// Sets what the stages so far exchange of tied parameters; later users can only add to it.
    fn exchange(&mut self, placing: &PlacementQuery<'_>) {
        let params: Vec<ParamCost> = placing.places.tied().filter_map(|param| self.used(placing, param)).collect();
        let places: Vec<(u32, u32)> = self.stages.iter().map(|stage| (stage.first, stage.replicas)).collect();
        let stage_of = |op: usize| self.stage_of(placing, op).unwrap_or_default();
        let tied = tied::exchange_us(placing.levels, &params, &places, &stage_of);
        self.stages.iter_mut().zip(tied).for_each(|(stage, us)| stage.tied_us = us);
    }

    fn stage_of(&self, placing: &PlacementQuery<'_>, op: usize) -> Option<usize> {
        self.placements.iter().position(|placement| placing.places.has(placement.to, op))
    }

    /// A parameter with its users in the stages so far.
    fn used(&self, placing: &PlacementQuery<'_>, param: &ParamCost) -> Option<ParamCost> {
        let users: Vec<OpId> =
            param.users.iter().copied().filter(|op| self.stage_of(placing, op.index()).is_some()).collect();
        (placing.asked.trains() && users.len() > 1).then(|| ParamCost { users, ..param.clone() })
    }

    fn pop(&mut self, placing: &PlacementQuery<'_>) {
        self.placements.pop();
        self.stages.pop();
        let last = self.stages.len() as u32;
        self.edges.retain(|edge| edge.to.0 != last);
        self.exchange(placing);
    }

    pub fn us(&self, placing: &PlacementQuery<'_>) -> f64 {
        outlook(&placing.asked, placing.levels, &self.stages, &self.edges).minibatch_us
    }

    /// Splits the objective into the busiest stage or link and the terms that are added to it: latency and all-reduce.
    fn parts(&self, placing: &PlacementQuery<'_>) -> (f64, f64) {
        let looked = outlook(&placing.asked, placing.levels, &self.stages, &self.edges);
        (looked.busiest_us, looked.minibatch_us - looked.busiest_us)
    }
}

pub struct BranchAndBound<'a, 'b> {
    pub placing: &'a PlacementQuery<'b>,
    /// Bounds on the busiest stage of the remaining ops.
    pub busiest: &'a Table,
    /// Bounds on the latency of the remaining ops, if latency is part of the objective.
    pub way: Option<&'a Table>,
    pub best: Option<(f64, Vec<StagePlacement>)>,
    /// Only pipelines faster than this are of interest.
    pub best_us: f64,
    pub steps: u64,
}

impl BranchAndBound<'_, '_> {
    /// Runs the search; returns false if it ran out of steps.
    pub fn run(&mut self) -> bool {
        for layer in self.placing.finals() {
            for w in self.placing.widths() {
                if !self.extend(&mut Prefix::default(), layer, 0, w) {
                    return false;
                }
            }
        }
        true
    }

    fn extend(&mut self, prefix: &mut Prefix, layer: usize, from: usize, w: u32) -> bool {
        let placing = self.placing;
        let whole = placing.places.space.len() - 1;
        if from == whole {
            let us = prefix.us(placing);
            if us < self.best_us * (1.0 - 1e-12) {
                self.best_us = us;
                self.best = Some((us, prefix.placements.clone()));
            }
            return true;
        }
        let stage = placing.stage(layer);
        let below = layer - usize::from(self.busiest.layered);
        let mut next: Vec<(f64, StagePlacement, u32)> = Vec::new();
        for to in from + 1..=whole {
            self.steps += 1;
            if !placing.places.nested(from, to) || !placing.is_allowed(from, to, stage) {
                continue;
            }
            for replicas in placing.replicas(stage).take_while(|&replicas| replicas <= w) {
                self.steps += 1;
                let rest = w - replicas;
                let tail = self.busiest.value(below, to, rest as usize);
                let compute = placing.least_us(from, to);
                let weight = placing.asked.weight(replicas);
                if tail.is_infinite() || (weight * compute).max(tail) >= self.best_us {
                    continue;
                }
                let Some(recompute) = placing.chosen(from, to, replicas, rest, prefix.placements.len()) else {
                    continue;
                };
                let first = placing.devices - rest - replicas;
                let placement = StagePlacement { from, to, first, replicas, recompute };
                prefix.push(placing, placement);
                let (busiest, sum) = prefix.parts(placing);
                prefix.pop(placing);
                let least = busiest.max(tail) + sum + self.way.map_or(0.0, |way| way.value(below, to, rest as usize));
                if least < self.best_us * (1.0 - 1e-9) {
                    next.push((least, placement, rest));
                }
            }
            if self.steps > placing.steps {
                return false;
            }
        }
        next.sort_by(|left, right| left.0.total_cmp(&right.0));
        for (least, placement, rest) in next {
            if least >= self.best_us * (1.0 - 1e-9) {
                break;
            }
            prefix.push(placing, placement);
            let mut starts = vec![rest];
            // The next stage may also begin at the next unit boundary.
            if let [inner, _, ..] = placing.levels {
                let border = rest - rest % inner.count.max(1);
                starts.extend((border != rest && (border > 0) && placement.to != whole).then_some(border));
            }
            for start in starts {
                if placement.to == whole && start > placing.unused_after() {
                    continue;
                }
                if !self.extend(prefix, below, placement.to, start) {
                    return false;
                }
            }
            prefix.pop(placing);
        }
        true
    }
}
