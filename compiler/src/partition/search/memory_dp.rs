//! The best partition of a linear order (or of few down-sets) with every stage within the memory limit.
//!
//! A stage's memory depends on its micro-batches in flight, and so on the workers after it. So the search runs
//! backwards: when the range [i, j) with m units is put before a suffix of w units, its memory is known exactly.
//!
//! ```text
//! G_k(i, w) = min over j, m' of  max( T_k(i..j, m') if it fits,  G_k(j, w - m') )
//! ```
//!
//! With bytes instead of T the same search finds the smallest peak memory. At inner levels, memory also depends on the
//! workers after the span and on its number of copies. There is one table for each combination.

use crate::partition::dp::nested_partition::{Group, Shape, StageBody};
use crate::partition::search::build_plan::{self, multiples_at, multiples_of_one};
use crate::partition::search::linear_order::LinearOrder;
use crate::plan::in_flight::{First, Position, ScheduleFlow, StageInFlight};
use crate::plan::memory::{MemoryMultipliers, MemoryTerms};
use crate::plan::problem::Problem;
use crate::plan::stage_cost::{LevelCost, StageCost};
use crate::profile::arena::{Arena, Way};
use std::collections::HashMap;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FitObjective {
    /// Time of the slowest part, with every stage within a memory limit.
    Time {
        within: u64,
    },
    Memory,
}

/// A prime number, so that all replicas shard together under any shard degree.
const MANY_REPLICAS: u32 = 4_294_967_291;

/// Finds the best partition with any number of outermost units and all units of inner levels. `None` if
/// nothing fits.
pub fn fit(problem: &Problem, line: &LinearOrder, levels: &[LevelCost], least: FitObjective) -> Option<Shape> {
    let outermost = levels.len().checked_sub(1)?;
    let whole = line.space.len() - 1;
    let mut search = FitSearch::new(problem, line, levels, least);
    let key = Key { level: outermost, to: whole, workers_after: 0, copies: 1 };
    search.prepare(key);
    let units = levels[outermost].count as usize;
    let table = &search.tables[&key];
    let value = |used: usize| table.first[used].value;
    let (best, used) = (1..=units).map(|used| (value(used), used)).min_by(|a, b| a.0.total_cmp(&b.0))?;
    best.is_finite().then(|| Shape { groups: search.groups(key, 0, used), is_flat: false })
}

/// Steps of [`fit`] for this many cuts, in units of about ten nanoseconds.
pub fn effort(levels: &[LevelCost], places: usize) -> f64 {
    let places = places as f64;
    let Some((outer, inner)) = levels.split_last() else { return 0.0 };
    let pairs = |level: &LevelCost| f64::from(level.count) * (f64::from(level.count) + 1.0) / 2.0;
    let mut spans = 1.0;
    let mut steps = places * places / 2.0 * pairs(outer);
    let mut above = outer;
    for level in inner.iter().rev() {
        spans *= pairs(above) * places;
        steps += spans * places * places / 6.0 * pairs(level);
        above = level;
    }
    steps
}

/// A span at one level: its end, the workers after it, and the number of copies it runs in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    level: usize,
    to: usize,
    workers_after: u32,
    copies: u32,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    value: f64,
    /// End and units of the first part.
    end: usize,
    replicas: usize,
}

/// Entry `from * (units + 1) + used`: the range from `from` to the end of the span on `used` units.
struct Table {
    /// The first part begins the span.
    first: Vec<Entry>,
    /// Another part precedes the first part.
    later: Vec<Entry>,
}

struct FitSearch<'a> {
    problem: &'a Problem,
    line: &'a LinearOrder,
    cost: StageCost,
    levels: &'a [LevelCost],
    /// Determines in-flight counts; `workers` is an upper bound.
    flow: ScheduleFlow,
    least: FitObjective,
    /// True if each set contains all sets before it.
    is_line: bool,
    tables: HashMap<Key, Table>,
}

impl<'a> FitSearch<'a> {
    fn new(problem: &'a Problem, line: &'a LinearOrder, levels: &'a [LevelCost], least: FitObjective) -> FitSearch<'a> {
        let is_line = (1..line.space.len()).all(|at| line.space.nested(at - 1, at));
        let (cost, flow) = (StageCost::of(problem), build_plan::flow(problem, problem.cluster.devices()));
        FitSearch { problem, line, cost, levels, flow, least, is_line, tables: HashMap::new() }
    }

    fn prepare(&mut self, key: Key) {
        if self.tables.contains_key(&key) {
            return;
        }
        let units = self.levels[key.level].count as usize;
        let width = units + 1;
        let none = Entry { value: f64::INFINITY, end: 0, replicas: 0 };
        let mut table = Table { first: vec![none; (key.to + 1) * width], later: vec![none; (key.to + 1) * width] };
        table.later[key.to * width].value = 0.0;
        let space = &self.line.space;
        for from in (0..key.to).rev() {
            for end in from + 1..=key.to {
                if !space.nested(from, end) {
                    continue;
                }
                // If weights and saved tensors alone exceed the limit, longer ranges do not fit either.
                if self.never_fits(from, end) {
                    if self.is_line {
                        break;
                    }
                    continue;
                }
                for rest in 0..units {
                    let tail = table.later[end * width + rest].value;
                    if tail.is_infinite() {
                        continue;
                    }
                    for replicas in 1..=units - rest {
                        let used = rest + replicas;
                        let at = from * width + used;
                        if tail >= table.first[at].value && tail >= table.later[at].value {
                            continue;
                        }
                        let inner = self.inner(key, from, end, rest, replicas);
                        for (entries, is_first) in [(&mut table.first, true), (&mut table.later, false)] {
                            let value = self.value(key.level, from, end, replicas, is_first, inner).max(tail);
                            if value < entries[at].value {
                                entries[at] = Entry { value, end, replicas };
                            }
                        }
                    }
                }
            }
        }
        self.tables.insert(key, table);
    }

    /// Returns whether neither this range nor any superset fits on any number of replicas. Adding ops can only reduce
    /// inputs, outputs, and parameters shared with other stages.
    fn never_fits(&self, from: usize, end: usize) -> bool {
        let FitObjective::Time { within } = self.least else { return false };
        let own = self.line.holdings(from, end);
        let arena = Arena::always(Way::ALL.map(|way| own.arena.of(way)).into_iter().min().unwrap_or(0));
        let inside = MemoryTerms { inputs: 0, passed: 0, outputs: 0, sent: 0, arena, ..*own };
        let least = |replicas: u32, holdings: MemoryTerms| {
            // With more replicas, weight gradients may not be batched.
            let alone = MemoryMultipliers { microbatches: 1, ..multiples_of_one(self.problem, replicas) };
            holdings.held(&alone).total
        };
        // At inner levels a range is cut further, and the check happens there.
        self.levels.len() == 1
            && least(1, inside) > within
            // With ZeRO, many replicas need the least memory.
            && (self.problem.zero.level == 0 || least(MANY_REPLICAS, MemoryTerms { shared: 0, ..inside }) > within)
    }

    /// Microseconds (or bytes) of one unit for the range [from, end); infinity if it does not fit.
    fn inner(&mut self, key: Key, from: usize, end: usize, rest: usize, replicas: usize) -> f64 {
        if let Some(inner) = self.inner_key(key, end, rest, replicas) {
            self.prepare(inner);
            let units = self.levels[inner.level].count as usize;
            return self.tables[&inner].first[from * (units + 1) + units].value;
        }
        let copies = key.copies.saturating_mul(replicas as u32);
        let workers_after = key.workers_after.saturating_add(key.copies.saturating_mul(rest as u32));
        let position = Position { replicas: copies, workers_after };
        let in_flight = self.flow.in_flight(position);
        let own = StageInFlight { replicas: copies, in_flight };
        let first = if from == 0 { First::Known(own) } else { First::Unknown };
        let multiples = multiples_at(self.problem, &self.flow, position, in_flight, first);
        let total = self.line.holdings(from, end).held(&multiples).total;
        match self.least {
            FitObjective::Memory => total as f64,
            FitObjective::Time { within } if total > within => f64::INFINITY,
            FitObjective::Time { .. } => self.line.space.compute[end] - self.line.space.compute[from],
        }
    }

    fn inner_key(&self, key: Key, end: usize, rest: usize, replicas: usize) -> Option<Key> {
        let level = key.level.checked_sub(1)?;
        let unit: u32 = self.levels[..key.level].iter().map(|level| level.count).product();
        let after = key.copies.saturating_mul(unit).saturating_mul(rest as u32);
        Some(Key {
            level,
            to: end,
            workers_after: key.workers_after.saturating_add(after),
            copies: key.copies.saturating_mul(replicas as u32),
        })
    }

    fn value(&self, level: usize, from: usize, end: usize, replicas: usize, is_first: bool, inner: f64) -> f64 {
        if self.least == FitObjective::Memory || inner.is_infinite() {
            return inner;
        }
        let part = self.line.space.range(from, end, replicas as u32, is_first, inner);
        self.cost.part_us(&self.levels[level], &part)
    }

    fn groups(&self, key: Key, from: usize, units: usize) -> Vec<Group> {
        let width = self.levels[key.level].count as usize + 1;
        let table = &self.tables[&key];
        let mut groups = Vec::new();
        let (mut at, mut left, mut entries) = (from, units, &table.first);
        while at < key.to {
            let Entry { end, replicas, .. } = entries[at * width + left];
            left -= replicas;
            let body = match self.inner_key(key, end, left, replicas) {
                None => StageBody::Ops(self.line.space.between(at, end)),
                Some(inner) => {
                    let count = self.levels[inner.level].count as usize;
                    StageBody::Groups(self.groups(inner, at, count))
                }
            };
            groups.push(Group { replicas: replicas as u32, body });
            at = end;
            entries = &table.later;
        }
        groups
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::read::levels;
    use crate::partition::search::downsets::DownSets;
    use crate::plan::gradient_buffers::GradientBuffers;
    use crate::plan::problem::{CostModel, Target};
    use crate::plan::schedule::Schedule;
    use crate::plan::stage_cost;
    use crate::plan::zero::Zero;
    use crate::profile::cost_graph::{CostGraph, OpCost, OpId, ParamCost, TensorCost};

    /// A chain of six ops, with parameters of these bytes, each used by a pair of ops.
    fn graph(params: &[(u32, u32, u64)]) -> CostGraph {
        let op = |id| OpCost { id, fwd_us: 1.0, bwd_us: 2.0, saved_bytes: 3, out_bytes: 8, ..OpCost::default() };
        let tensor = |at: u32| TensorCost::new(at, 8, &[at + 1][..usize::from(at < 5)]);
        let param = |&(one, other, bytes): &(u32, u32, u64)| {
            let mut users = vec![OpId(one), OpId(other)];
            users.dedup();
            ParamCost::new("w", bytes, users)
        };
        CostGraph {
            ops: (0..6).map(op).collect(),
            tensors: (0..6).map(tensor).collect(),
            params: params.iter().map(param).collect(),
            ..CostGraph::default()
        }
    }

    /// All tied pairs, ZeRO stages, and optimizer states: a range that `never_fits` rejects must not fit with any
    /// replicas or as part of a longer range. The limits are the exact memory of some range.
    #[test]
    fn what_is_ruled_out_never_fits() {
        let passing = GradientBuffers::of(&levels("4:1GB/s").unwrap());
        let kinds = [(0, 0), (1, 0), (2, 0), (3, 0), (1, 2), (3, 2)].map(|(level, degree)| Zero { level, degree });
        let (mut ruled, mut fitting) = (0, 0);
        let pairs = (0..6).flat_map(|one| (one..6).map(move |other| (one, other)));
        for ((one, other), zero, state) in
            pairs.flat_map(|pair| kinds.into_iter().flat_map(move |zero| [0.0, 2.0].map(|state| (pair, zero, state))))
        {
            let graph = graph(&[(one, other, 1000), (1, 1, 7), (4, 4, 300)]);
            let space = DownSets::chain(&graph, CostModel::Pipec, (0..6).collect(), (0..=6).collect());
            let line = LinearOrder::over(&graph, space, passing);
            let mut problem = Problem::new(graph, levels("4:1GB/s").unwrap(), CostModel::Pipec);
            (problem.schedule, problem.microbatches) = (Schedule::OneFOneB, 4);
            (problem.optimizer_state, problem.zero) = (state, zero);
            problem.constraints.target = Some(Target::Torchtitan);
            let levels = stage_cost::levels(&problem.cluster);
            let held = |from: usize, end: usize, replicas: u32| {
                line.holdings(from, end).held(&multiples_of_one(&problem, replicas)).total
            };
            let runs: Vec<(usize, usize)> =
                (0..6).flat_map(|from| (from + 1..=6).map(move |end| (from, end))).collect();
            for &(from, end) in &runs {
                let more = runs.iter().filter(|(start, stop)| *start <= from && end <= *stop);
                let all = more.flat_map(|&(from, end)| (1..=4).map(move |replicas| held(from, end, replicas)));
                let least = all.min().unwrap();
                let search = |within: u64| {
                    FitSearch::new(&problem, &line, &levels, FitObjective::Time { within }).never_fits(from, end)
                };
                assert!(!search(least), "{from}..{end} of {one} and {other} fits in {least} B at level {zero}");
                fitting += 1;
                ruled += u32::from(search(least / 4));
            }
        }
        assert!(ruled * 2 > fitting, "{ruled} of {fitting}");
    }
}
