//! Balanced cuts of a linear order: stages of about equal time that send few bytes.

use crate::partition::dp::nested_partition::Shape;
use crate::partition::search::numbers::running_sums;
use crate::plan::problem::Problem;

/// A linear order with prefix sums at each possible cut.
pub struct Line<'a> {
    pub problem: &'a Problem,
    order: Vec<u32>,
    /// Possible cuts, as positions in `order`.
    pub ends: Vec<usize>,
    /// Compute before each cut, in microseconds.
    before: Vec<f64>,
    sent: Vec<f64>,
}

impl<'a> Line<'a> {
    pub fn new(problem: &'a Problem, order: Vec<u32>, ends: Vec<usize>) -> Line<'a> {
        let graph = &problem.graph;
        let mut place = vec![0usize; graph.ops.len()];
        order.iter().enumerate().for_each(|(at, &op)| place[op as usize] = at);
        // A tensor is sent at every cut between its producer and its last reader.
        let mut change = vec![0.0; order.len() + 2];
        for tensor in &graph.tensors {
            let made = place[tensor.producer.index()];
            if let Some(last) = tensor.consumers.iter().map(|op| place[op.index()]).max() {
                change[made + 1] += tensor.bytes as f64;
                change[last.max(made) + 1] -= tensor.bytes as f64;
            }
        }
        let mut bytes = Vec::with_capacity(order.len() + 1);
        let mut open = 0.0;
        for change in &change[..=order.len()] {
            open += change;
            bytes.push(open);
        }
        let op = |&op: &u32| &graph.ops[op as usize];
        let done = running_sums(&order, |sum, at| sum + op(at).fwd_us + op(at).bwd_us);
        let before = ends.iter().map(|&end| done[end]).collect();
        let sent = ends.iter().map(|&end| bytes[end]).collect();
        Line { problem, order, ends, before, sent }
    }

    /// The shortest possible longest stage, in microseconds.
    pub fn shortest(&self, stages: usize) -> f64 {
        let fits = |most: f64| {
            let (mut used, mut start) = (0, 0);
            while start + 1 < self.before.len() {
                let limit = self.before[start] + most;
                let end = self.before.partition_point(|before| *before <= limit) - 1;
                if end <= start {
                    return false;
                }
                used += 1;
                start = end;
            }
            used <= stages
        };
        let total = self.before[self.before.len() - 1];
        let longest = self.before.windows(2).map(|pair| pair[1] - pair[0]).fold(0.0, f64::max);
        let (mut low, mut high) = (longest.max(total / stages as f64), total);
        for _ in 0..50 {
            let middle = f64::midpoint(low, high);
            if fits(middle) { high = middle } else { low = middle }
        }
        high * (1.0 + 1e-9)
    }

    /// Cuts into `stages` chunks of at most `most` microseconds with the fewest bytes sent; `stages + 1` indices into
    /// `ends`, including both ends.
    pub fn cheapest(&self, stages: usize, most: f64) -> Option<Vec<usize>> {
        let places = self.ends.len();
        let mut least = vec![f64::INFINITY; places];
        least[0] = 0.0;
        let mut from = vec![vec![0u32; places]; stages];
        for (chunk, from) in from.iter_mut().enumerate() {
            let mut next = vec![f64::INFINITY; places];
            // Monotonic queue of start positions by cost; a later one that costs no more replaces earlier ones.
            let mut window: std::collections::VecDeque<usize> = std::collections::VecDeque::new();
            for place in chunk + 1..places {
                let start = place - 1;
                if least[start].is_finite() {
                    while window.back().is_some_and(|&other| least[other] >= least[start]) {
                        window.pop_back();
                    }
                    window.push_back(start);
                }
                while window.front().is_some_and(|&start| self.before[place] - self.before[start] > most) {
                    window.pop_front();
                }
                if let Some(&start) = window.front() {
                    let sent = if place + 1 < places { self.sent[place] } else { 0.0 };
                    next[place] = least[start] + sent;
                    from[place] = start as u32;
                }
            }
            least = next;
        }
        let mut place = places - 1;
        if !least[place].is_finite() {
            return None;
        }
        let mut cuts = vec![place];
        for from in from.iter().rev() {
            place = from[place] as usize;
            cuts.push(place);
        }
        cuts.reverse();
        Some(cuts)
    }

    /// The stages between these cuts, with equal replicas.
    pub fn shape(&self, cuts: &[usize], replicas: u32) -> Shape {
        let stage = |pair: &[usize]| {
            let mut ops = self.order[self.ends[pair[0]]..self.ends[pair[1]]].to_vec();
            ops.sort_unstable();
            (ops, replicas)
        };
        Shape::flat(cuts.windows(2).map(stage).collect(), self.problem.cluster.levels.len() > 1)
    }
}
