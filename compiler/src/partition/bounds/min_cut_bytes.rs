//! The least bytes that cost `pipedream` charges at a cut, by the compute that stands before the cut.
//!
//! A closed set S is told by its frontier F, the ops of S that no op of S reads. What `cut_bytes` charges is a union over F:
//!
//! ```text
//! charged(S) = bytes of  ∪ over f in F of  open(f)        open(f): f, and all that precedes f and is read by an op that does not
//! ```
//!
//! An op that precedes f and f' is charged when one of its readers leads to f only, and that reader does not precede f'. So the
//! charge never falls while ops are added to F, and all frontiers within a charge are found by adding one op after the other.
//! A frontier is left when every place that it and its additions can reach is crossed by no more already; charges are allowed in
//! rising steps, so that cheap frontiers come first. Few hundred thousand frontiers tell the least charge everywhere, of graphs
//! whose closed sets nobody can count.
//!
//! Ops in a row of which each is the only reader of the one before, with equal outputs, differ as frontiers in nothing but the
//! compute before them. They are one `Row`, and a frontier of rows stands for a range of compute.

use crate::profile::cost_graph::CostGraph;
use std::ops::RangeInclusive;

/// The most ops of a graph that is looked at. Of larger ones `cut_bytes` charges less.
const MOST_OPS: usize = 8000;

/// Slices of compute, each with one charge.
const SLICES: usize = 4096;

/// So many slices share one set to cut at.
const SLICES_A_SET: usize = 2;

/// The charge grows by this factor from one round to the next.
const GROWTH: f64 = 1.4;

/// The most windows of weights, and steps for all of them, about a tenth of a second.
const MOST_WINDOWS: usize = 40;
const MOST_WINDOW_STEPS: usize = 60_000_000;

/// Sums of the same numbers in other orders differ by less than this fraction of the whole.
const ROUNDING: f64 = 1e-11;

/// The least charge of every slice of compute.
#[derive(Clone, Debug)]
pub struct MinCutBytes {
    /// Compute of the whole graph, in microseconds.
    total_us: f64,
    /// For each slice a charge that no cut in it undercuts.
    least: Vec<f64>,
    rows: Vec<Row>,
    /// The rows of frontiers, and for each slice the place of the one that is charged least.
    frontiers: Vec<Vec<u32>>,
    best: Vec<Option<u32>>,
}

/// Ops in a row that are equal as members of a frontier.
#[derive(Clone, Debug)]
struct Row {
    /// The ops, each the reader of the one before.
    ops: Vec<u32>,
    /// Compute of the first op, which is in every set with this row on its frontier.
    first_us: f64,
    /// Compute of all ops.
    all_us: f64,
    /// What an op of the row is charged as a frontier.
    bytes: f64,
    /// Rows that precede it, as bits.
    before: Vec<u64>,
    /// Those of them whose last op is charged when the row is on the frontier, because something else reads it too.
    open: Vec<u64>,
}

impl MinCutBytes {
    /// The charges that so many steps of some nanoseconds show. `None` for graphs that are too large.
    ///
    /// `order` is topological and does not depend on the order in which a file lists the ops; then the charges do not either. Sets
    /// stand in the `places`, ranges of compute, and nowhere else.
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
        // All that costs no more is known.
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

    /// For every second slice a closed set that is charged the least, or nearly so; sets of bits.
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
                full.iter_mut().zip(&self.rows[row as usize].before).for_each(|(full, before)| *full |= before);
            }
            let mut set = vec![0u64; graph.ops.len().div_ceil(64)];
            let mut sum = 0.0;
            let mut take = |op: u32| {
                set[op as usize / 64] |= 1 << (op % 64);
                sum += us(op);
                sum
            };
            let whole = bits(&full, &none).flat_map(|row| self.rows[row].ops.iter());
            let mut reached = 0.0;
            for &op in whole.chain(frontier.iter().map(|row| &self.rows[*row as usize].ops[0])) {
                reached = take(op);
            }
            // The rest of the rows until the slice is reached.
            let rest = frontier.iter().flat_map(|row| {
                let ops = &self.rows[*row as usize].ops;
                (1..ops.len()).map(move |at| (at == 1, ops[at]))
            });
            let mut is_open = true;
            for (is_next_row, op) in rest {
                is_open |= is_next_row;
                if is_open && reached + us(op) <= (slice as f64 + 1.0) * width {
                    reached = take(op);
                } else {
                    is_open = false;
                }
            }
            sets.push(set);
        }
        sets
    }

    /// What is known of the weights of sets that are charged no more than some bytes, for rising bytes.
    ///
    /// An op is in such a set only if some op that it leads to, or itself, may be on the frontier.
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
                    // Of a row that ends there its last op may be missing.
                    if end == row || !leads(end) {
                        without.iter_mut().zip(&self.rows[end].before).for_each(|(set, before)| *set |= before);
                        without[end / 64] |= 1 << (end % 64);
                    }
                }
                window.earliest.push((earliest, weights[row]));
                window.latest.push((compute_us(&without), weights[row]));
            }
            windows.push(window);
        }
        windows
    }

    /// The charges along a range of compute. Where two slices meet the lesser counts.
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
        // The last border is a product; the range ends where it ends.
        if let Some(last) = pieces.last_mut() {
            last.to_us = to_us;
        }
        pieces
    }
}

/// When parameters are in sets that are charged no more than some bytes.
#[derive(Clone, Debug)]
pub struct Window {
    /// The charge.
    pub most_bytes: f64,
    /// The compute that any such set with some parameters has at least, in microseconds, infinite if there is none; and their bytes.
    pub earliest: Vec<(f64, f64)>,
    /// The compute that any such set without all of some parameters has at most, and their bytes.
    pub latest: Vec<(f64, f64)>,
}

/// A range of compute with one charge.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Piece {
    /// Where it begins, in microseconds.
    pub from_us: f64,
    /// Where it ends.
    pub to_us: f64,
    /// No cut in it is charged less.
    pub bytes: f64,
}

/// The slices that a range of compute touches.
fn slices(total_us: f64, from_us: f64, to_us: f64) -> RangeInclusive<usize> {
    let rounding = total_us * ROUNDING;
    let slice = |us: f64| ((us / total_us * SLICES as f64) as usize).min(SLICES - 1);
    slice(from_us - rounding)..=slice(to_us + rounding)
}

/// One frontier, and the rows that may be added to it.
struct Frontier {
    /// Its rows.
    rows: Vec<u32>,
    /// Rows of which every op is in the set.
    full: Vec<u64>,
    /// Rows that are charged beside the frontier.
    open: Vec<u64>,
    /// Compute of the full rows.
    full_us: f64,
    /// Compute of the first ops, and of all ops, of the rows of the frontier.
    own_us: (f64, f64),
    /// Its charge.
    bytes: f64,
    /// What may be added, and how many of them have been.
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
    /// Looks at all frontiers that are charged no more than `within`. Says whether the steps were enough.
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

    /// The frontier with one more row, if something can still be added to it that tells more.
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
        let mut reach = full.clone();
        let mut more = Vec::new();
        for &other in &frontier.more[frontier.next..] {
            let (place, added) = (other as usize, &self.rows[other as usize]);
            self.steps += words as u64;
            if has(&added.before, at) || has(&row.before, place) || bytes + self.charge(added, &open) > within {
                continue;
            }
            more.push(other);
            reach.iter_mut().zip(&added.before).for_each(|(reach, before)| *reach |= before);
            reach[place / 64] |= 1 << (place % 64);
        }
        let furthest_us = full_us + own_us.1 + self.compute_us(&reach, &full);
        let mut reached = slices(self.total_us, from_us, furthest_us);
        self.steps += reached.clone().count() as u64 / 8;
        let tells_more = reached.any(|slice| self.least[slice] > bytes);
        (tells_more && !more.is_empty()).then_some(Frontier { rows, full, open, full_us, own_us, bytes, more, next: 0 })
    }

    /// What a row adds to the charge of a frontier.
    fn charge(&self, row: &Row, open: &[u64]) -> f64 {
        row.bytes + bits(&row.open, open).map(|other| self.rows[other].bytes).sum::<f64>()
    }

    /// Compute of the rows that are in one set and not in the other.
    fn compute_us(&self, set: &[u64], without: &[u64]) -> f64 {
        bits(set, without).map(|row| self.rows[row].all_us).sum()
    }
}

/// The rows of a graph, along a topological order.
fn rows(graph: &CostGraph, order: &[u32]) -> Option<Vec<Row>> {
    let count = graph.ops.len();
    if count > MOST_OPS {
        return None;
    }
    let (mut reads, mut readers) = (vec![Vec::new(); count], vec![Vec::new(); count]);
    for (from, to) in graph.edges() {
        reads[to.index()].push(from.index());
        readers[from.index()].push(to.index());
    }
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
            before[from / 64] |= 1 << (from % 64);
            before.iter_mut().zip(&rows[from].before).for_each(|(all, more)| *all |= more);
        }
        let mut open = vec![0u64; words];
        for row in bits(&before, &vec![0; words]) {
            let last = members[row][members[row].len() - 1];
            if readers[last].iter().any(|&to| row_of[to] != at && !has(&before, row_of[to])) {
                open[row / 64] |= 1 << (row % 64);
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

/// The places of the bits that are set in one set and not in the other.
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

fn has(set: &[u64], at: usize) -> bool {
    set[at / 64] >> (at % 64) & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::partition::search::downsets::{DownSets, Growth};
    use crate::partition::search::linear_search;
    use crate::plan::problem::CostModel;
    use crate::profile::cost_graph::{OpCost, OpId, TensorCost};

    fn graph(edges: &[(u32, u32)], bytes: &[u64]) -> CostGraph {
        let mut graph = CostGraph::default();
        for (id, &bytes) in bytes.iter().enumerate() {
            let name = format!("op{id}");
            let readers = edges.iter().filter(|(from, _)| *from == id as u32).map(|(_, to)| OpId(*to));
            let (producer, consumers) = (OpId(id as u32), readers.collect());
            graph.ops.push(OpCost {
                id: id as u32,
                name: name.clone(),
                fwd_us: 100.0,
                out_bytes: bytes,
                ..OpCost::default()
            });
            graph.tensors.push(TensorCost { name, producer, bytes, consumers });
        }
        graph
    }

    fn crossing(graph: &CostGraph, most_steps: u64) -> Option<MinCutBytes> {
        let everywhere = std::iter::once((0.0, graph.total_us()));
        MinCutBytes::of(graph, &linear_search::orders(graph)[0], everywhere, most_steps)
    }

    #[test]
    fn the_least_charge_of_every_place_is_found() {
        // Two branches of two ops leave op 0 and meet in op 5; op 6 follows.
        let edges = [(0, 1), (1, 2), (0, 3), (3, 4), (2, 5), (4, 5), (5, 6)];
        let graph = graph(&edges, &[7, 20, 3, 30, 5, 40, 1]);
        let crossing = crossing(&graph, 1_000_000).unwrap();
        let space = DownSets::grow(&graph, CostModel::Pipedream, Growth::All, 1000).unwrap();
        for ops in 1..7 {
            let compute = f64::from(ops) * 100.0;
            let sets = (0..space.len()).filter(|&set| space.compute[set] == compute);
            let least = sets.map(|set| space.cut[set]).fold(f64::INFINITY, f64::min);
            let pieces = crossing.pieces(compute, compute);
            assert_eq!(pieces, [Piece { from_us: compute, to_us: compute, bytes: least }], "{ops} ops");
        }
        // Nothing ends between two ops.
        assert!(crossing.pieces(120.0, 130.0).iter().all(|piece| piece.bytes.is_infinite()));
        for set in crossing.sets(&graph) {
            assert!(edges.iter().all(|&(from, to)| has(&set, from as usize) || !has(&set, to as usize)), "{set:?}");
        }
    }

    #[test]
    fn what_leads_to_an_open_branch_is_charged_though_it_is_read_inside() {
        // Op 4 is never read: with it on the frontier, op 0 is charged as long as anything else goes on.
        let graph = graph(&[(0, 1), (1, 2), (2, 3), (0, 4)], &[100, 1, 1, 1, 1]);
        let crossing = crossing(&graph, 1_000_000).unwrap();
        // Ops 0, 1, 2, 3 without op 4, or with it and without op 3.
        assert_eq!(crossing.pieces(400.0, 400.0)[0].bytes, 101.0);
        let windows = crossing.windows(&graph);
        assert!(windows.iter().all(|window| window.earliest.is_empty()), "no op has parameters");
    }

    #[test]
    fn few_steps_show_less_and_nothing_wrong() {
        let edges: Vec<(u32, u32)> = (1..20).map(|to| (0, to)).collect();
        let graph = graph(&edges, &[10; 20]);
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
