//! The places where a model can be cut, along one axis: the compute that stands before the cut.
//!
//! A [`CutSpace`] is a list of stretches of that axis. A cut may stand anywhere in a stretch and nowhere between two. There are
//! two kinds. A line has one stretch without length for each place of a linear order, and its figures are exact. The relaxed
//! terrains of a graph have room for every closed set S of it, with figures that no set undercuts, so that what cannot be done on
//! it cannot be done at all:
//!
//! ```text
//! an op o is surely in S      if  C(S) > latest(o)   = C(all) - C(o and all that follow it)
//! an op o is surely not in S  if  C(S) < earliest(o) = C(o and all that precede it)
//! no S has                        latest(o) < C(S) < earliest(o)
//! ```
//!
//! C is the compute of a set. Of a chain both kinds say the same.

use crate::partition::bounds::min_cut_bytes::MinCutBytes;
use crate::partition::search::downsets::DownSets;
use crate::plan::problem::CostModel;
use crate::profile::cost_graph::CostGraph;

/// The most ops of which the relaxed terrain follows who precedes whom, which takes the square of their number.
const MOST_OPS: usize = 40_000;

/// Sums of the same numbers in other orders differ by less than this fraction of the whole.
const ROUNDING: f64 = 1e-11;

/// Stretches, ascending. The first is the empty set, the last the whole model.
#[derive(Clone, Debug)]
pub struct CutSpace {
    /// Compute at the start of each stretch, in microseconds.
    pub from: Vec<f64>,
    /// Compute at its end.
    pub to: Vec<f64>,
    /// Parameters of the sets of each stretch: of all sets in the last entry, of those that less crosses in earlier ones.
    weights: Vec<Weights>,
    /// Bytes that cross every cut of the stretch.
    pub cut: Vec<f64>,
    /// The nearest earlier stretch that less crosses; itself where there is none.
    lower: Vec<u32>,
}

/// Parameters of the sets that no more than some bytes cross.
#[derive(Clone, Debug)]
struct Weights {
    /// The bytes that may cross; infinite for all sets.
    most_bytes: f64,
    /// For each stretch bytes of parameters that are in every such set.
    least: Vec<f64>,
    /// Bytes of parameters that are in any of them.
    most: Vec<f64>,
}

impl Weights {
    fn of_all(least: Vec<f64>, most: Vec<f64>) -> Vec<Weights> {
        vec![Weights { most_bytes: f64::INFINITY, least, most }]
    }
}

/// A place to cut.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CutPosition {
    /// The stretch.
    pub stretch: usize,
    /// Compute before the cut.
    pub compute: f64,
}

impl CutPosition {
    /// Whether this spot is further than another.
    pub fn is_beyond(&self, other: &CutPosition) -> bool {
        (self.stretch, self.compute) > (other.stretch, other.compute)
    }
}

impl CutSpace {
    /// The places of a line, with exact figures for each: compute, bytes of parameters, and bytes that cross.
    pub fn line(compute: Vec<f64>, weights: Vec<f64>, cut: Vec<f64>) -> CutSpace {
        let lower = lower(&cut);
        CutSpace { from: compute.clone(), to: compute, weights: Weights::of_all(weights.clone(), weights), cut, lower }
    }

    /// The terrain of all closed sets of a graph. Sets that are not nested stand beside each other on it, so it is relaxed too,
    /// though every figure of a spot is that of a set.
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
        let lower = lower(&cut);
        CutSpace { from: compute.clone(), to: compute, weights: Weights::of_all(least, most), cut, lower }
    }

    /// The relaxed terrain of a graph.
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
        // Slot 2k is the mark k, slot 2k + 1 what lies between it and the next. Figures are kept as differences of neighbours.
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
            // All outputs of an op that has a reader beyond the cut.
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
            // Every tensor that is read beyond the cut.
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
                // Differences of large sums leave a rest that is no byte.
                crossed.push((cut_sum - 1.0).max(0.0));
            }
        }
        // The whole model, beside sets that lack nothing but ops that take no time.
        from.push(total);
        to.push(total);
        least.push(whole);
        most.push(whole);
        crossed.push(0.0);
        let lower = lower(&crossed);
        CutSpace { from, to, weights: Weights::of_all(least, most), cut: crossed, lower }
    }

    /// The ranges of compute of all stretches.
    pub fn places(&self) -> impl Iterator<Item = (f64, f64)> + '_ {
        self.from.iter().copied().zip(self.to.iter().copied())
    }

    /// The relaxed terrain with what at least is charged at a cut by the compute before it, where that is more, and with the
    /// parameters that sets of little charge can have.
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
        let lower = lower(&cut);
        CutSpace { from, to, weights, cut, lower }
    }

    /// Which parameters are known of the sets at cuts that are `fine`, which holds for all smaller ones.
    pub fn class(&self, fine: impl Fn(f64) -> bool) -> usize {
        self.weights.partition_point(|weights| fine(weights.most_bytes)).min(self.weights.len() - 1)
    }

    /// The same of all sets.
    pub fn any_class(&self) -> usize {
        self.weights.len() - 1
    }

    /// Bytes of parameters that are surely between two cuts of a class.
    pub fn weights_between(&self, from: usize, to: usize, class: usize) -> f64 {
        (self.weights[class].least[to] - self.weights[class].most[from]).max(0.0)
    }

    /// Whether a set with this compute, with parameters and bytes that cross, stands somewhere in a stretch.
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

    /// The empty set.
    pub fn start(&self) -> CutPosition {
        CutPosition { stretch: 0, compute: 0.0 }
    }

    /// The whole model.
    pub fn end(&self) -> CutPosition {
        let stretch = self.from.len() - 1;
        CutPosition { stretch, compute: self.to[stretch] }
    }

    /// The last stretch that begins at `compute` or before.
    pub fn stretch_at(&self, compute: f64) -> usize {
        self.from.partition_point(|from| *from <= compute).saturating_sub(1)
    }

    /// The furthest spot up to `spot`, and beyond `floor`, with a cut that is `fine`, which holds for all smaller ones.
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

/// Whether all that crosses a cut burdens the stages beside it. Under cost `pipec` a tensor goes straight to the stage that reads
/// it, which may stand further on.
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

/// Sums of bytes that come in one after the other.
struct Rising {
    /// When, ascending.
    at: Vec<f64>,
    /// What has come before each, and all at the end.
    sums: Vec<f64>,
}

impl Rising {
    fn of(mut entries: Vec<(f64, f64)>) -> Rising {
        entries.sort_by(|left, right| left.0.total_cmp(&right.0).then(left.1.total_cmp(&right.1)));
        let mut sums = vec![0.0];
        entries.iter().for_each(|(_, bytes)| sums.push(sums[sums.len() - 1] + bytes));
        Rising { at: entries.into_iter().map(|(at, _)| at).collect(), sums }
    }

    /// What has come in before `at`.
    fn before(&self, at: f64) -> f64 {
        self.sums[self.at.partition_point(|entry| *entry < at)]
    }
}

/// `earliest` and `latest` of every op.
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

/// For each op the compute of all ops that lead to it along `edges`, its own included. Edges are sorted so that all that lead to
/// an op come before those that leave it.
///
/// Sixty-four ops at a time mark all that they lead to; the sums of eight marks are looked up.
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
