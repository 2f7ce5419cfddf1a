//! Minimum bytes that cost model `pipedream` charges at a cut, as a function of the compute before the cut.
//!
//! A down-set S is identified by its frontier F, the ops of S without a reader in S. The charge of `cut_bytes` is a
//! union over F:
//!
//! ```text
//! charged(S) = bytes of  ∪ over f in F of  open(f)
//! open(f)    = f, and its predecessors with a reader that does not precede f
//! ```
//!
//! The charge never falls when ops are added to F, so all frontiers within a charge are found by adding ops one by one.
//! A frontier is pruned if all cuts that it and its extensions can reach already have a cheaper charge. Charges are
//! explored in rising steps, cheapest first. A few hundred thousand frontiers suffice for graphs with far too many
//! down-sets to enumerate.
//!
//! Consecutive ops with a single reader each and equal outputs differ, as frontiers, only in the compute before them.
//! They form one `Row`, and a frontier of rows covers a range of compute.

use crate::partition::search::op_sets::{has, insert, neighbours, unite};
use crate::profile::cost_graph::CostGraph;
use std::ops::RangeInclusive;

/// Largest number of ops; `cut_bytes` charges less for larger graphs.
const MOST_OPS: usize = 8000;

const SLICES: usize = 4096;

/// Number of slices per returned down-set.
const SLICES_A_SET: usize = 2;

const GROWTH: f64 = 1.4;

/// Largest number of weight windows, and steps for all of them; about a tenth of a second.
const MOST_WINDOWS: usize = 40;
const MOST_WINDOW_STEPS: usize = 60_000_000;

/// Relative rounding error of sums in different orders.
const ROUNDING: f64 = 1e-11;

/// Minimum charge by compute slice.
#[derive(Clone, Debug)]
pub struct MinCutBytes {
    total_us: f64,
    /// For each slice: a lower bound on the charge of its cuts.
    least: Vec<f64>,
    rows: Vec<Row>,
    /// Frontiers as lists of rows; and for each slice the index of its cheapest frontier.
    frontiers: Vec<Vec<u32>>,
    best: Vec<Option<u32>>,
}

/// Consecutive ops that are equivalent as frontier members.
#[derive(Clone, Debug)]
struct Row {
    /// The ops, each the only reader of the previous one.
    ops: Vec<u32>,
    /// Compute of the first op; every set with this row on its frontier contains it.
    first_us: f64,
    all_us: f64,
    /// Charge of one op of the row as a frontier member.
    bytes: f64,
    /// Preceding rows, as a bit set.
    before: Vec<u64>,
    /// Preceding rows whose last op is charged with this row, because it has another reader.
    open: Vec<u64>,
}

impl MinCutBytes {
    /// Computes the charges within a step limit (a step takes a few nanoseconds). Returns `None` if the graph is too
    /// large.
    ///
    /// `order` must be topological and independent of the op order in the file, so that the result is too. `places` are
    /// the ranges of compute that contain down-sets.
    pub fn of(
        graph: &CostGraph,
        order: &[u32],
        places: impl Iterator<Item = (f64, f64)>,
        most_steps: u64,
    ) -> Option<MinCutBytes> {
        let rows = rows(graph, order)?;
        let most_bytes: f64 = graph.ops.iter().map(|op| op.out_bytes as f64).sum();
        let total_us = graph.total_us();
        let mut least = vec![0.0; SLICES];
        for (from_us, to_us) in places {
            slices(total_us, from_us, to_us).for_each(|slice| least[slice] = f64::INFINITY);
        }
        (least[0], least[SLICES - 1]) = (0.0, 0.0);
        let best = vec![None; SLICES];
        let mut search = Search { rows: &rows, total_us, least, frontiers: Vec::new(), best, steps: 0, most_steps };
        let cheapest =
            rows.iter().map(|row| search.charge(row, &vec![0; row.open.len()])).fold(f64::INFINITY, f64::min);
        // All charges up to `shown` have been explored.
        let mut shown = -1.0;
        let mut within = cheapest.max(1.0).min(most_bytes);
        while search.least.iter().any(|bytes| bytes.is_infinite()) && shown < most_bytes {
            if !search.round(within) {
                search.least.iter_mut().for_each(|bytes| *bytes = bytes.min(f64::max(shown, 0.0)));
                break;
            }
            shown = within;
            within = (within * GROWTH).min(most_bytes);
        }
        let Search { least, frontiers, best, .. } = search;
        Some(MinCutBytes { total_us, least, rows, frontiers, best })
    }

    /// For every second slice a down-set with (nearly) the minimum charge, as bit sets.
    pub fn sets(&self, graph: &CostGraph) -> Vec<Vec<u64>> {
        let us = |op: u32| graph.ops[op as usize].fwd_us + graph.ops[op as usize].bwd_us;
        let width = self.total_us / SLICES as f64;
        let mut sets = Vec::with_capacity(SLICES / SLICES_A_SET);
        for (slice, best) in self.best.iter().enumerate().step_by(SLICES_A_SET) {
            let Some(best) = best else { continue };
            let frontier = &self.frontiers[*best as usize];
            let none = vec![0u64; self.rows.len().div_ceil(64)];
            let mut full = none.clone();
            for &row in frontier {
                unite(&mut full, &self.rows[row as usize].before);
            }
            let mut set = vec![0u64; graph.ops.len().div_ceil(64)];
            let mut sum = 0.0;
            let mut take = |op: u32| {
                insert(&mut set, op as usize);
                sum += us(op);
                sum
            };
            let whole = bits(&full, &none).flat_map(|row| self.rows[row].ops.iter());
            let mut filled_us = 0.0;
            for &op in whole.chain(frontier.iter().map(|row| &self.rows[*row as usize].ops[0])) {
                filled_us = take(op);
            }
            // Extends the rows until the slice is reached.
            let rest = frontier.iter().flat_map(|row| {
                let ops = &self.rows[*row as usize].ops;
                (1..ops.len()).map(move |at| (at == 1, ops[at]))
            });
            let mut is_open = true;
            for (is_next_row, op) in rest {
                is_open |= is_next_row;
                if is_open && filled_us + us(op) <= (slice as f64 + 1.0) * width {
                    filled_us = take(op);
                } else {
                    is_open = false;
                }
            }
            sets.push(set);
        }
        sets
    }

    /// Weight bounds of sets with a limited charge, for rising limits.
    ///
    /// Such a set contains an op only if the op, or one of its successors, may be on the frontier.
    pub fn windows(&self, graph: &CostGraph) -> Vec<Window> {
        let words = self.rows.len().div_ceil(64);
        let none = vec![0u64; words];
        let compute_us = |set: &[u64]| bits(set, &none).map(|row| self.rows[row].all_us).sum::<f64>();
        let alone = |row: &Row| row.bytes + bits(&row.open, &none).map(|other| self.rows[other].bytes).sum::<f64>();
        let charges: Vec<f64> = self.rows.iter().map(alone).collect();
        let ends: Vec<f64> = self.rows.iter().map(|row| compute_us(&row.before) + row.first_us).collect();
        let weights: Vec<f64> = self
            .rows
            .iter()
            .map(|row| row.ops.iter().map(|&op| graph.ops[op as usize].param_bytes as f64).sum())
            .collect();
        let heavy: Vec<usize> = (0..self.rows.len()).filter(|&row| weights[row] > 0.0).collect();
        let effort = heavy.len().saturating_mul(self.rows.len()).saturating_mul(words).max(1);
        let count = (MOST_WINDOW_STEPS / effort).min(MOST_WINDOWS);
        let least = charges.iter().copied().fold(f64::INFINITY, f64::min).max(1.0);
        let most = charges.iter().copied().fold(least, f64::max);
        let mut windows = Vec::with_capacity(count);
        for at in 0..count {
            let most_bytes = least * (most / least).powf((at + 1) as f64 / (count + 1) as f64);
            let may_end: Vec<usize> = (0..self.rows.len()).filter(|&row| charges[row] <= most_bytes).collect();
            let mut window = Window { most_bytes, earliest: Vec::new(), latest: Vec::new() };
            for &row in &heavy {
                let leads = |end: usize| end == row || has(&self.rows[end].before, row);
                let (mut earliest, mut without) = (f64::INFINITY, none.clone());
                for &end in &may_end {
                    if leads(end) {
                        earliest = earliest.min(ends[end]);
                    }
                    // The last op of a row that ends the set may be missing.
                    if end == row || !leads(end) {
                        unite(&mut without, &self.rows[end].before);
                        insert(&mut without, end);
                    }
                }
                window.earliest.push((earliest, weights[row]));
                window.latest.push((compute_us(&without), weights[row]));
            }
            windows.push(window);
        }
        windows
    }

    /// The charges along a range of compute. At a slice boundary the smaller charge counts.
    pub fn pieces(&self, from_us: f64, to_us: f64) -> Vec<Piece> {
        let width = self.total_us / SLICES as f64;
        let mut pieces: Vec<Piece> = Vec::new();
        for slice in slices(self.total_us, from_us, to_us) {
            let place = |at: usize| (at as f64 * width).clamp(from_us, to_us);
            let piece = Piece { from_us: place(slice), to_us: place(slice + 1), bytes: self.least[slice] };
            match pieces.last_mut() {
                Some(last) if last.from_us == last.to_us || piece.from_us == piece.to_us => {
                    last.to_us = piece.to_us;
                    last.bytes = last.bytes.min(piece.bytes);
                }
                _ => pieces.push(piece),
            }
        }
        // Avoids rounding of the last boundary.
        if let Some(last) = pieces.last_mut() {
            last.to_us = to_us;
        }
        pieces
    }
}

/// Positions of parameters in sets with a limited charge.
#[derive(Clone, Debug)]
pub struct Window {
    pub most_bytes: f64,
    /// Smallest compute (microseconds; infinite if none) of such a set with some parameters, and their bytes.
    pub earliest: Vec<(f64, f64)>,
    /// Largest compute of such a set that lacks some of these parameters, and their bytes.
    pub latest: Vec<(f64, f64)>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Piece {
    pub from_us: f64,
    pub to_us: f64,
    /// Lower bound on the charge of its cuts.
    pub bytes: f64,
}

/// The slices that overlap a range of compute.
fn slices(total_us: f64, from_us: f64, to_us: f64) -> RangeInclusive<usize> {
    let rounding = total_us * ROUNDING;
    let slice = |us: f64| ((us / total_us * SLICES as f64) as usize).min(SLICES - 1);
    slice(from_us - rounding)..=slice(to_us + rounding)
}

/// A frontier and the rows that may extend it.
struct Frontier {
    rows: Vec<u32>,
    /// Rows that are contained completely.
    full: Vec<u64>,
    /// Rows charged in addition to the frontier.
    open: Vec<u64>,
    full_us: f64,
    /// Compute of the frontier rows: first ops only, and all ops.
    own_us: (f64, f64),
    bytes: f64,
    /// Candidate rows, and the number of them already tried.
    more: Vec<u32>,
    next: usize,
}

struct Search<'a> {
    rows: &'a [Row],
    total_us: f64,
    least: Vec<f64>,
    frontiers: Vec<Vec<u32>>,
    best: Vec<Option<u32>>,
    steps: u64,
    most_steps: u64,
}

impl Search<'_> {
    /// Explores all frontiers with a charge of at most `within`; returns whether the steps were enough.
    fn round(&mut self, within: f64) -> bool {
        let words = self.rows.len().div_ceil(64);
        let none = vec![0; words];
        let start = Frontier {
            rows: Vec::new(),
            full: none.clone(),
            open: none,
            full_us: 0.0,
            own_us: (0.0, 0.0),
            bytes: 0.0,
            more: (0..self.rows.len() as u32).collect(),
            next: 0,
        };
        let mut path = vec![start];
        while let Some(top) = path.last_mut() {
            let Some(&row) = top.more.get(top.next) else {
                path.pop();
                continue;
            };
            top.next += 1;
            if self.steps > self.most_steps {
                return false;
            }
            let grown = self.grown(&path[path.len() - 1], row as usize, within);
            path.extend(grown);
        }
        true
    }

    /// Extends a frontier by one row; `None` if no further extension can improve a slice.
    fn grown(&mut self, frontier: &Frontier, at: usize, within: f64) -> Option<Frontier> {
        let row = &self.rows[at];
        let words = row.open.len();
        let bytes = frontier.bytes + self.charge(row, &frontier.open);
        self.steps += words as u64;
        if bytes > within {
            return None;
        }
        let full: Vec<u64> = (0..words).map(|word| frontier.full[word] | row.before[word]).collect();
        let open: Vec<u64> = (0..words).map(|word| frontier.open[word] | row.open[word]).collect();
        let full_us = frontier.full_us + self.compute_us(&row.before, &frontier.full);
        let own_us = (frontier.own_us.0 + row.first_us, frontier.own_us.1 + row.all_us);
        let from_us = full_us + own_us.0;
        let rows: Vec<u32> = frontier.rows.iter().copied().chain([at as u32]).collect();
        let mut is_known = false;
        for slice in slices(self.total_us, from_us, full_us + own_us.1) {
            if bytes < self.least[slice] {
                if !is_known {
                    self.frontiers.push(rows.clone());
                    is_known = true;
                }
                self.least[slice] = bytes;
                self.best[slice] = Some(self.frontiers.len() as u32 - 1);
            }
        }
        let mut extension = full.clone();
        let mut more = Vec::new();
        for &other in &frontier.more[frontier.next..] {
            let (place, added) = (other as usize, &self.rows[other as usize]);
            self.steps += words as u64;
            if has(&added.before, at) || has(&row.before, place) || bytes + self.charge(added, &open) > within {
                continue;
            }
            more.push(other);
            unite(&mut extension, &added.before);
            insert(&mut extension, place);
        }
        let furthest_us = full_us + own_us.1 + self.compute_us(&extension, &full);
        let mut filled_us = slices(self.total_us, from_us, furthest_us);
        self.steps += filled_us.clone().count() as u64 / 8;
        let tells_more = filled_us.any(|slice| self.least[slice] > bytes);
        (tells_more && !more.is_empty()).then_some(Frontier { rows, full, open, full_us, own_us, bytes, more, next: 0 })
    }

    fn charge(&self, row: &Row, open: &[u64]) -> f64 {
        row.bytes + bits(&row.open, open).map(|other| self.rows[other].bytes).sum::<f64>()
    }

    /// Compute of the rows in `set` that are not in `without`.
    fn compute_us(&self, set: &[u64], without: &[u64]) -> f64 {
        bits(set, without).map(|row| self.rows[row].all_us).sum()
    }
}

/// Groups the ops of a graph into rows, along a topological order.
fn rows(graph: &CostGraph, order: &[u32]) -> Option<Vec<Row>> {
    let count = graph.ops.len();
    if count > MOST_OPS {
        return None;
    }
    let [reads, readers] = neighbours(graph);
    let mut row_of = vec![0usize; count];
    let mut members: Vec<Vec<usize>> = Vec::new();
    for &op in order {
        let op = op as usize;
        let follows = match reads[op][..] {
            [from] if readers[from].len() == 1 && graph.ops[from].out_bytes == graph.ops[op].out_bytes => Some(from),
            _ => None,
        };
        let row = follows.map_or(members.len(), |from| row_of[from]);
        row_of[op] = row;
        if follows.is_none() {
            members.push(Vec::new());
        }
        members[row].push(op);
    }
    let words = members.len().div_ceil(64);
    let us = |op: usize| graph.ops[op].fwd_us + graph.ops[op].bwd_us;
    let mut rows: Vec<Row> = Vec::with_capacity(members.len());
    for ops in &members {
        let (at, first) = (rows.len(), ops[0]);
        let mut before = vec![0u64; words];
        for &from in &reads[first] {
            let from = row_of[from];
            insert(&mut before, from);
            unite(&mut before, &rows[from].before);
        }
        let mut open = vec![0u64; words];
        for row in bits(&before, &vec![0; words]) {
            let last = members[row][members[row].len() - 1];
            if readers[last].iter().any(|&to| row_of[to] != at && !has(&before, row_of[to])) {
                insert(&mut open, row);
            }
        }
        rows.push(Row {
            ops: ops.iter().map(|&op| op as u32).collect(),
            first_us: us(first),
            all_us: ops.iter().map(|&op| us(op)).sum(),
            bytes: graph.ops[first].out_bytes as f64,
            before,
            open,
        });
    }
    Some(rows)
}

/// Indices of the bits in `set` that are not in `without`.
fn bits<'a>(set: &'a [u64], without: &'a [u64]) -> impl Iterator<Item = usize> + 'a {
    set.iter().zip(without).enumerate().flat_map(|(at, (set, without))| {
        let mut word = set & !without;
        std::iter::from_fn(move || {
            let bit = word.trailing_zeros();
            (word != 0).then(|| {
                word &= word - 1;
                at * 64 + bit as usize
            })
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::partition::bounds::test_graphs::of_edges;
    use crate::partition::search::downsets::{DownSets, Growth};
    use crate::partition::search::linear_search;
    use crate::plan::problem::CostModel;
    use crate::profile::cost_graph::OpCost;

    fn crossing(graph: &CostGraph, most_steps: u64) -> Option<MinCutBytes> {
        let everywhere = std::iter::once((0.0, graph.total_us()));
        MinCutBytes::of(graph, &linear_search::orders(graph)[0], everywhere, most_steps)
    }

    #[test]
    fn the_least_charge_of_every_place_is_found() {
        // Two branches of two ops leave op 0 and join in op 5; op 6 follows.
        let edges = [(0, 1), (1, 2), (0, 3), (3, 4), (2, 5), (4, 5), (5, 6)];
        let graph = of_edges(&edges, &[7, 20, 3, 30, 5, 40, 1]);
        let crossing = crossing(&graph, 1_000_000).unwrap();
        let space = DownSets::grow(&graph, CostModel::Pipedream, Growth::All, 1000).unwrap();
        for ops in 1..7 {
            let compute = f64::from(ops) * 100.0;
            let sets = (0..space.len()).filter(|&set| space.compute[set] == compute);
            let least = sets.map(|set| space.cut[set]).fold(f64::INFINITY, f64::min);
            let pieces = crossing.pieces(compute, compute);
            assert_eq!(pieces, [Piece { from_us: compute, to_us: compute, bytes: least }], "{ops} ops");
        }
        // No down-set has a compute between two multiples of 100.
        assert!(crossing.pieces(120.0, 130.0).iter().all(|piece| piece.bytes.is_infinite()));
        for set in crossing.sets(&graph) {
            assert!(edges.iter().all(|&(from, to)| has(&set, from as usize) || !has(&set, to as usize)), "{set:?}");
        }
    }

    #[test]
    fn what_leads_to_an_open_branch_is_charged_though_it_is_read_inside() {
        // Op 4 is unread: with it on the frontier, op 0 is charged while any other branch continues.
        let graph = of_edges(&[(0, 1), (1, 2), (2, 3), (0, 4)], &[100, 1, 1, 1, 1]);
        let crossing = crossing(&graph, 1_000_000).unwrap();
        // Ops 0 to 3 without op 4, or all ops without op 3.
        assert_eq!(crossing.pieces(400.0, 400.0)[0].bytes, 101.0);
        let windows = crossing.windows(&graph);
        assert!(windows.iter().all(|window| window.earliest.is_empty()), "no op has parameters");
    }

    #[test]
    fn few_steps_show_less_and_nothing_wrong() {
        let edges: Vec<(u32, u32)> = (1..20).map(|to| (0, to)).collect();
        let graph = of_edges(&edges, &[10; 20]);
        let (few, many) = (crossing(&graph, 2000).unwrap(), crossing(&graph, 2_000_000).unwrap());
        let all = |crossing: &MinCutBytes| -> Vec<f64> {
            crossing.pieces(100.0, 1900.0).into_iter().map(|piece| piece.bytes).collect()
        };
        assert!(all(&few).iter().zip(all(&many)).all(|(few, many)| *few <= many));
        assert_eq!(many.pieces(300.0, 300.0)[0].bytes, 30.0);
        let large = CostGraph { ops: vec![OpCost::default(); MOST_OPS + 1], ..CostGraph::default() };
        assert!(MinCutBytes::of(&large, &[], std::iter::empty(), 1).is_none());
    }
}
