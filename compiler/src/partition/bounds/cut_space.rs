//! Possible cuts of a model, ordered by the compute before the cut.
//!
//! A [`CutSpace`] is a list of intervals of compute; a cut may lie anywhere in an interval and nowhere else. A line has
//! one empty interval per cut of a linear order, with exact figures. The relaxed space of a graph contains every
//! down-set S, with figures that are bounds. If a plan is infeasible on it, it is infeasible for the graph:
//!
//! ```text
//! op o is in S       if  C(S) > latest(o)   = C(all) - C(o and all its successors)
//! op o is not in S   if  C(S) < earliest(o) = C(o and all its predecessors)
//! no S has           latest(o) < C(S) < earliest(o)
//! ```
//!
//! C is the compute of a set. For a chain, line and relaxed space are equal.

use crate::partition::bounds::min_cut_bytes::MinCutBytes;
use crate::partition::search::downsets::DownSets;
use crate::partition::search::numbers::running_sums;
use crate::plan::problem::CostModel;
use crate::profile::cost_graph::CostGraph;

/// Largest number of ops for which the relaxed space tracks predecessors, which takes quadratic time.
const MOST_OPS: usize = 40_000;

/// Relative rounding error of sums in different orders.
const ROUNDING: f64 = 1e-11;

/// Intervals of compute, ascending, from the empty set to the whole model.
#[derive(Clone, Debug)]
pub struct CutSpace {
    /// Start of each interval, in microseconds.
    pub from: Vec<f64>,
    /// End of each interval, in microseconds.
    pub to: Vec<f64>,
    /// Weight bounds of the sets in each interval: for all sets in the last entry, for sets with fewer cut bytes in
    /// earlier ones.
    weights: Vec<Weights>,
    /// Lower bound on the bytes that cross a cut in each interval.
    pub cut: Vec<f64>,
    /// The nearest earlier interval with fewer cut bytes; the interval itself if there is none.
    lower: Vec<u32>,
}

/// Weight bounds for sets with a limited number of cut bytes.
#[derive(Clone, Debug)]
struct Weights {
    /// Largest number of cut bytes; infinite for all sets.
    most_bytes: f64,
    /// For each interval: parameter bytes contained in every such set.
    least: Vec<f64>,
    /// Parameter bytes contained in at least one of them.
    most: Vec<f64>,
}

impl Weights {
    fn of_all(least: Vec<f64>, most: Vec<f64>) -> Vec<Weights> {
        vec![Weights { most_bytes: f64::INFINITY, least, most }]
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CutPosition {
    pub stretch: usize,
    /// Compute before the cut, in microseconds.
    pub compute: f64,
}

impl CutPosition {
    pub fn is_beyond(&self, other: &CutPosition) -> bool {
        (self.stretch, self.compute) > (other.stretch, other.compute)
    }
}

impl CutSpace {
    fn new(from: Vec<f64>, to: Vec<f64>, weights: Vec<Weights>, cut: Vec<f64>) -> CutSpace {
        let lower = lower(&cut);
        CutSpace { from, to, weights, cut, lower }
    }

    /// The cuts of a linear order, with the exact compute, parameter bytes and cut bytes of each.
    pub fn line(compute: Vec<f64>, weights: Vec<f64>, cut: Vec<f64>) -> CutSpace {
        CutSpace::new(compute.clone(), compute, Weights::of_all(weights.clone(), weights), cut)
    }

    /// The space of all down-sets of a graph. It is a relaxation too, because neighbouring sets need not be nested.
    pub fn sets(space: &DownSets, model: CostModel) -> CutSpace {
        let mut most = space.weights.clone();
        for at in 1..most.len() {
            most[at] = most[at - 1].max(most[at]);
        }
        let mut least = space.weights.clone();
        for at in (1..least.len()).rev() {
            least[at - 1] = least[at - 1].min(least[at]);
        }
        let compute = space.compute.clone();
        let cut = if charges_cuts(model) { space.cut.clone() } else { vec![0.0; compute.len()] };
        CutSpace::new(compute.clone(), compute, Weights::of_all(least, most), cut)
    }

    pub fn relaxed(graph: &CostGraph, model: CostModel) -> CutSpace {
        let total = graph.total_us();
        let (earliest, latest) = windows(graph, total);
        let mut values: Vec<f64> = earliest.iter().chain(&latest).copied().chain([0.0, total]).collect();
        values.sort_by(f64::total_cmp);
        let rounding = total * ROUNDING;
        let mut marks: Vec<f64> = Vec::with_capacity(values.len());
        for value in values {
            if marks.last().is_none_or(|last| value - last > rounding) {
                marks.push(value);
            }
        }
        let mark = |value: f64| marks.partition_point(|mark| *mark <= value + rounding) - 1;
        let earliest: Vec<usize> = earliest.into_iter().map(mark).collect();
        let latest: Vec<usize> = latest.into_iter().map(mark).collect();
        // Slot 2k is mark k, slot 2k + 1 the gap up to the next mark. Figures are stored as differences.
        let slots = marks.len() * 2 - 1;
        let (mut sure, mut possible) = (vec![0.0; slots + 1], vec![0.0; slots + 1]);
        let (mut cut, mut forbidden) = (vec![0.0; slots + 1], vec![0i64; slots + 1]);
        for (op, costs) in graph.ops.iter().enumerate() {
            sure[(2 * latest[op] + 1).min(slots)] += costs.param_bytes as f64;
            possible[2 * earliest[op]] += costs.param_bytes as f64;
            if latest[op] < earliest[op] {
                forbidden[2 * latest[op] + 1] += 1;
                forbidden[2 * earliest[op]] -= 1;
            }
        }
        let mut crosses = |producer: usize, bytes: u64, last_reader: usize| {
            let (from, to) = (2 * latest[producer] + 1, 2 * last_reader);
            if from < to {
                cut[from] += bytes as f64;
                cut[to] -= bytes as f64;
            }
        };
        match model {
            // All outputs of an op with a reader beyond the cut.
            CostModel::Pipedream => {
                let mut last_reader = vec![0; graph.ops.len()];
                for (from, to) in graph.edges() {
                    let last = &mut last_reader[from.index()];
                    *last = earliest[to.index()].max(*last);
                }
                for (op, last) in last_reader.into_iter().enumerate() {
                    crosses(op, graph.ops[op].out_bytes, last);
                }
            }
            CostModel::Pipec | CostModel::Load | CostModel::Hybrid => {}
            // Every tensor read beyond the cut.
            CostModel::Paper => {
                for tensor in &graph.tensors {
                    let last = tensor.consumers.iter().map(|to| earliest[to.index()]).max().unwrap_or(0);
                    crosses(tensor.producer.index(), tensor.bytes, last);
                }
            }
        }
        let whole: f64 = graph.ops.iter().map(|op| op.param_bytes as f64).sum();
        let (mut from, mut to, mut crossed) = (Vec::new(), Vec::new(), Vec::new());
        let (mut least, mut most) = (Vec::new(), Vec::new());
        let (mut sure_sum, mut possible_sum, mut cut_sum, mut forbidden_sum) = (0.0, 0.0, 0.0, 0);
        for slot in 0..slots {
            sure_sum += sure[slot];
            possible_sum += possible[slot];
            cut_sum += cut[slot];
            forbidden_sum += forbidden[slot];
            if forbidden_sum == 0 {
                from.push(marks[slot / 2]);
                to.push(marks[slot.div_ceil(2)]);
                least.push(sure_sum);
                most.push(possible_sum);
                // Rounding of large sums leaves residues below one byte.
                crossed.push((cut_sum - 1.0).max(0.0));
            }
        }
        // The whole model; sets that only lack ops without compute have the same position.
        from.push(total);
        to.push(total);
        least.push(whole);
        most.push(whole);
        crossed.push(0.0);
        CutSpace::new(from, to, Weights::of_all(least, most), crossed)
    }

    pub fn places(&self) -> impl Iterator<Item = (f64, f64)> + '_ {
        self.from.iter().copied().zip(self.to.iter().copied())
    }

    /// The relaxed space with the minimum cut bytes by compute where they are larger, and with weight bounds for cheap
    /// cuts.
    pub fn crossed(self, graph: &CostGraph, crossing: &MinCutBytes) -> CutSpace {
        let (mut from, mut to, mut cut, mut parent) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for stretch in 0..self.from.len() {
            for piece in crossing.pieces(self.from[stretch], self.to[stretch]) {
                from.push(piece.from_us);
                to.push(piece.to_us);
                cut.push(self.cut[stretch].max(piece.bytes - 1.0));
                parent.push(stretch);
            }
        }
        let all = &self.weights[self.weights.len() - 1];
        let least: Vec<f64> = parent.iter().map(|&stretch| all.least[stretch]).collect();
        let most: Vec<f64> = parent.iter().map(|&stretch| all.most[stretch]).collect();
        let rounding = graph.total_us() * ROUNDING;
        let mut weights = Vec::new();
        for window in crossing.windows(graph) {
            let (earliest, latest) = (Rising::of(window.earliest), Rising::of(window.latest));
            let sure = from.iter().map(|from| latest.before(from - rounding));
            let possible = to.iter().map(|to| earliest.before(to + rounding));
            weights.push(Weights {
                most_bytes: window.most_bytes,
                least: sure.zip(&least).map(|(sure, least)| sure.max(*least)).collect(),
                most: possible.zip(&most).map(|(possible, most)| possible.min(*most)).collect(),
            });
        }
        weights.extend(Weights::of_all(least, most));
        CutSpace::new(from, to, weights, cut)
    }

    /// The tightest class of weight bounds for cuts whose bytes are `fine`; the predicate must be monotonic.
    pub fn class(&self, fine: impl Fn(f64) -> bool) -> usize {
        self.weights.partition_point(|weights| fine(weights.most_bytes)).min(self.weights.len() - 1)
    }

    pub fn any_class(&self) -> usize {
        self.weights.len() - 1
    }

    /// Lower bound on the parameter bytes between two cuts of a class.
    pub fn weights_between(&self, from: usize, to: usize, class: usize) -> f64 {
        (self.weights[class].least[to] - self.weights[class].most[from]).max(0.0)
    }

    /// Returns whether the space contains a set with this compute, parameter bytes and cut bytes.
    #[cfg(test)]
    pub fn has_room(&self, compute: f64, weights: f64, bytes: f64) -> bool {
        let rounding = self.to[self.to.len() - 1] * ROUNDING;
        let class = self.class(|most| bytes > most);
        let known = &self.weights[class];
        (0..self.from.len()).any(|at| {
            let stands = self.from[at] - rounding <= compute && compute <= self.to[at] + rounding;
            stands && self.cut[at] <= bytes && known.least[at] <= weights + 1.0 && weights <= known.most[at] + 1.0
        })
    }

    pub fn start(&self) -> CutPosition {
        CutPosition { stretch: 0, compute: 0.0 }
    }

    pub fn end(&self) -> CutPosition {
        let stretch = self.from.len() - 1;
        CutPosition { stretch, compute: self.to[stretch] }
    }

    /// The last interval that begins at or before `compute`.
    pub fn stretch_at(&self, compute: f64) -> usize {
        self.from.partition_point(|from| *from <= compute).saturating_sub(1)
    }

    /// The furthest position up to `spot` and beyond `floor` whose cut bytes are `fine`; the predicate must be
    /// monotonic.
    pub fn settle(&self, spot: CutPosition, floor: CutPosition, fine: impl Fn(f64) -> bool) -> Option<CutPosition> {
        let mut at = spot;
        while !fine(self.cut[at.stretch]) {
            let stretch = self.lower[at.stretch] as usize;
            if stretch == at.stretch {
                return None;
            }
            at = CutPosition { stretch, compute: self.to[stretch] };
        }
        at.is_beyond(&floor).then_some(at)
    }
}

/// Returns whether the crossing bytes of a cut count for the neighbouring stages. Under cost model `pipec` a tensor is
/// sent directly to its reader stage, which may be further away.
fn charges_cuts(model: CostModel) -> bool {
    model != CostModel::Pipec
}

fn lower(cut: &[f64]) -> Vec<u32> {
    let mut lower: Vec<u32> = Vec::with_capacity(cut.len());
    for (at, bytes) in cut.iter().enumerate() {
        let mut before = at.saturating_sub(1);
        while cut[before] >= *bytes && lower.get(before).is_some_and(|next| (*next as usize) < before) {
            before = lower[before] as usize;
        }
        lower.push(if cut[before] < *bytes { before as u32 } else { at as u32 });
    }
    lower
}

struct Rising {
    at: Vec<f64>,
    /// Sum before each position, and the total.
    sums: Vec<f64>,
}

impl Rising {
    fn of(mut entries: Vec<(f64, f64)>) -> Rising {
        entries.sort_by(|left, right| left.0.total_cmp(&right.0).then(left.1.total_cmp(&right.1)));
        let sums = running_sums(&entries, |sum, (_, bytes)| sum + bytes);
        Rising { at: entries.into_iter().map(|(at, _)| at).collect(), sums }
    }

    fn before(&self, at: f64) -> f64 {
        self.sums[self.at.partition_point(|entry| *entry < at)]
    }
}

/// `earliest` and `latest` of every op, as defined in the file head.
fn windows(graph: &CostGraph, total: f64) -> (Vec<f64>, Vec<f64>) {
    let own: Vec<f64> = graph.ops.iter().map(|op| op.fwd_us + op.bwd_us).collect();
    if own.len() > MOST_OPS {
        return (own.clone(), own.iter().map(|own| (total - own).max(0.0)).collect());
    }
    let edges = graph.edges();
    let forward: Vec<(usize, usize)> = edges.iter().map(|(from, to)| (from.index(), to.index())).collect();
    let mut backward: Vec<(usize, usize)> = forward.iter().map(|&(from, to)| (to, from)).collect();
    backward.sort_unstable_by(|left, right| right.cmp(left));
    let latest = gathered(&own, &backward).into_iter().map(|after| (total - after).max(0.0)).collect();
    (gathered(&own, &forward), latest)
}

/// For each op: the compute of all ops that lead to it along `edges`, including its own. Edges must be sorted so that
/// all edges into an op come before those out of it.
///
/// Processes 64 ops at a time as bit masks; a table per byte gives the sums.
fn gathered(own: &[f64], edges: &[(usize, usize)]) -> Vec<f64> {
    let ops = own.len();
    let mut sums = vec![0.0; ops];
    let mut marks = vec![0u64; ops];
    for first in (0..ops).step_by(64) {
        let block = &own[first..ops.min(first + 64)];
        marks.fill(0);
        (0..block.len()).for_each(|bit| marks[first + bit] = 1 << bit);
        for &(from, to) in edges {
            marks[to] |= marks[from];
        }
        let mut table = [[0.0f64; 256]; 8];
        for (byte, row) in table.iter_mut().enumerate() {
            for set in 1..256usize {
                let bit = set.trailing_zeros() as usize;
                row[set] = row[set & (set - 1)] + block.get(byte * 8 + bit).copied().unwrap_or(0.0);
            }
        }
        for (sum, mark) in sums.iter_mut().zip(&marks).filter(|(_, mark)| **mark != 0) {
            *sum += mark.to_le_bytes().iter().zip(&table).map(|(byte, row)| row[*byte as usize]).sum::<f64>();
        }
    }
    sums
}
