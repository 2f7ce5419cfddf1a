//! Divides a model into segments of ops that are sharded separately, with replicated values between them.
//!
//! Costs are additive over segments, so a stage of whole segments costs their sum. Pieces end where few tensors cross,
//! and each has a product with parameters. Dynamic programming over the pieces chooses the segments, each of a few
//! pieces, with the least total cost.
//!
//! ```text
//! x ─ ln ─ qkv ─ … ─ proj ─ add ┊ ln ─ fc ─ gelu ─ proj ─ add ┊ …      ┊ narrow: one tensor crosses
//! └────────────── piece ───────┘
//! ```

use crate::pass::attribution::Attribution;
use crate::profile::cost_graph::{CostGraph, OpId};
use crate::tensor_parallel::cost::{Time, sum};
use std::collections::BTreeMap;

/// A cut is narrow if no cut within this distance crosses fewer tensors.
const NEAR: usize = 32;

/// Limits of a segment: pieces, and ops if it has several pieces.
const MOST_PIECES: usize = 4;
const MOST_OPS: usize = 72;

/// Pieces are merged only if that saves 1/50 of the time: stages consist of whole segments, and finer segments allow
/// more balanced stages. In training a stage is sharded as a whole anyway.
const MERGE_GAIN_DIVISOR: Time = 50;

/// Limit on the leaders of a piece.
const LONGEST: usize = 128;

/// Ops that, if they read parameters, justify a piece.
const PRODUCTS: [&str; 6] = ["matmul", "conv", "gather", "lstm", "gru", "rnn"];

/// The parts of a model that are sharded separately.
#[derive(Clone, Copy, Debug)]
pub enum Segments<'a> {
    /// A few layers each, whichever are cheapest. Stages end only where one of them does.
    Cheapest,
    /// Single ops, so that stages may end wherever those of one device may. Times are overestimated.
    Ops,
    /// The ops of each stage of a plan.
    Stages(&'a [Vec<u32>]),
}

impl Segments<'_> {
    /// True if each segment is a stage, as it is trained.
    pub fn is_of_stages(&self) -> bool {
        matches!(self, Segments::Stages(_))
    }
}

/// For each op of an attribution, the largest workspace of its kernels.
pub type Scratch<'a> = &'a dyn Fn(&Attribution) -> Vec<u64>;

/// How the costs of a group are computed.
#[derive(Clone, Copy)]
pub struct Sharded<'a> {
    pub segments: Segments<'a>,
    /// Workspace of the kernels of shards; without it, that of whole ops is kept.
    pub scratch: Option<Scratch<'a>>,
}

/// The ops of each piece, ascending; ops that join others are included.
pub fn pieces(graph: &CostGraph) -> Vec<Vec<u32>> {
    let leaders: Vec<usize> = (0..graph.ops.len()).filter(|&op| graph.ops[op].joins.is_none()).collect();
    let mut position = vec![0; graph.ops.len()];
    leaders.iter().enumerate().for_each(|(at, &op)| position[op] = at);
    for op in &graph.ops {
        position[op.id as usize] = op.joins.map_or(position[op.id as usize], |leader| position[leader.index()]);
    }
    let crossing = count_crossing(graph, &position, leaders.len());
    let (mut has_parameters, mut has_product) = (vec![false; leaders.len()], vec![false; leaders.len()]);
    graph.params.iter().flat_map(|param| &param.users).for_each(|op| has_parameters[position[op.index()]] = true);
    graph.ops.iter().for_each(|op| has_product[position[op.id as usize]] |= PRODUCTS.contains(&op.op.as_str()));
    let mut starts = vec![0];
    let (mut holds_product, mut end) = (false, None);
    for at in 0..leaders.len() {
        let start = starts[starts.len() - 1];
        if at - start >= LONGEST {
            // No narrow cut within the limit: cut at the narrowest position.
            let narrowest = (start + LONGEST / 2..=at).min_by_key(|&at| (crossing[at], at));
            starts.push(end.take().or(narrowest).unwrap_or(at));
        }
        end = if holds_product && is_narrow(&crossing, at) { Some(at) } else { end };
        if has_parameters[at] && has_product[at] {
            starts.extend(end.take());
            holds_product = true;
        }
    }
    let mut pieces = vec![Vec::new(); starts.len()];
    for op in 0..graph.ops.len() {
        pieces[starts.partition_point(|&start| start <= position[op]) - 1].push(op as u32);
    }
    pieces
}

/// Each op that joins no other, with those that join it.
pub fn fused_ops(graph: &CostGraph) -> Vec<Vec<u32>> {
    let mut groups: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for op in 0..graph.ops.len() as u32 {
        groups.entry(graph.leader(OpId(op)).0).or_default().push(op);
    }
    groups.into_values().collect()
}

/// The number of tensors that cross before each leader.
fn count_crossing(graph: &CostGraph, position: &[usize], count: usize) -> Vec<i64> {
    let mut change = vec![0i64; count + 1];
    for tensor in &graph.tensors {
        let from = position[tensor.producer.index()];
        let to = tensor.consumers.iter().map(|op| position[op.index()]).max().unwrap_or(from);
        change[from + 1] += i64::from(to > from);
        change[to + 1] -= i64::from(to > from);
    }
    let mut crossing = 0;
    let sum = |change: &i64| {
        crossing += change;
        crossing
    };
    change[..count].iter().map(sum).collect()
}

fn is_narrow(crossing: &[i64], at: usize) -> bool {
    let window = at.saturating_sub(NEAR).max(1)..(at + NEAR).min(crossing.len());
    at > 0 && crossing[window].iter().all(|other| crossing[at] <= *other)
}

/// For each piece, whether it starts a layer: a module that is named by a number, such as `blocks.3`, or is outside such
/// modules.
pub fn layer_starts(graph: &CostGraph, pieces: &[Vec<u32>]) -> Vec<bool> {
    let layer = |op: u32| -> Vec<&str> {
        let parts: Vec<&str> = graph.ops[op as usize].module.split('.').collect();
        let number = parts.iter().position(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()));
        parts[..number.map_or(1, |at| at + 1)].to_vec()
    };
    let ends = pieces.iter().map(|ops| (layer(ops[0]), layer(ops[ops.len() - 1]))).collect::<Vec<_>>();
    (0..pieces.len()).map(|at| at == 0 || ends[at - 1].1 != ends[at].0).collect()
}

/// The cheapest segments as half-open piece ranges; `price` gives the cost of one. A segment starts at each of `starts`.
pub fn cheapest<E>(
    pieces: &[Vec<u32>],
    starts: &[bool],
    mut price: impl FnMut(usize, usize) -> Result<Time, E>,
) -> Result<Vec<(usize, usize)>, E> {
    // Per number of pieces: the least cost, and the start of the last segment.
    let mut best: Vec<(Time, usize)> = vec![(0, 0)];
    for end in 1..=pieces.len() {
        let mut least = (sum(best[end - 1].0, price(end - 1, end)?), end - 1);
        for start in (end.saturating_sub(MOST_PIECES)..end - 1).rev() {
            let ops: usize = pieces[start..end].iter().map(Vec::len).sum();
            if ops > MOST_OPS || starts[start + 1..end].contains(&true) {
                break;
            }
            let price = price(start, end)?;
            let candidate = sum(best[start].0, sum(price, price / MERGE_GAIN_DIVISOR));
            if candidate < least.0 {
                least = (candidate, start);
            }
        }
        best.push(least);
    }
    let mut runs = Vec::new();
    let mut end = pieces.len();
    while end > 0 {
        runs.push((best[end].1, end));
        end = best[end].1;
    }
    runs.reverse();
    Ok(runs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::cost_graph::{OpCost, ParamCost, TensorCost};

    /// Blocks of `x + product(light(x))`.
    fn blocks(count: u32) -> CostGraph {
        let mut graph = CostGraph::default();
        let kinds = ["layer_norm", "matmul", "add"];
        for id in 0..3 * count {
            let op = kinds[id as usize % 3].to_string();
            graph.ops.push(OpCost { id, op, ..OpCost::default() });
            let readers = match id % 3 {
                2 => vec![OpId(id + 1), OpId(id + 3)],
                _ => vec![OpId(id + 1)],
            };
            let consumers = readers.into_iter().filter(|op| op.0 < 3 * count).collect();
            graph.tensors.push(TensorCost { name: String::new(), producer: OpId(id), bytes: 4, consumers });
            if id % 3 < 2 {
                graph.params.push(ParamCost::new("", 4, vec![OpId(id)]));
            }
        }
        graph
    }

    #[test]
    fn pieces_end_where_one_tensor_crosses() {
        let result = pieces(&blocks(4));
        assert_eq!(result, [vec![0, 1, 2], vec![3, 4, 5], vec![6, 7, 8], vec![9, 10, 11]]);
    }

    #[test]
    fn layers_are_numbered_modules() {
        let mut graph = blocks(2);
        for (op, module) in graph.ops.iter_mut().zip(["wte", "h.0.ln", "h.0", "h.0.mlp.fc", "h.1", "head"]) {
            op.module = module.to_string();
        }
        let pieces = [vec![0, 1], vec![2], vec![3], vec![4], vec![5]];
        assert_eq!(layer_starts(&graph, &pieces), [true, false, false, true, true]);
    }

    #[test]
    fn runs_are_the_cheapest() {
        let pieces = vec![vec![0]; 5];
        // Cost `two` for a segment of two pieces, and 200 per piece for all others.
        let runs = |two: Time| {
            let price = |start: usize, end: usize| if end - start == 2 { two } else { 200 * (end - start) as Time };
            let runs = cheapest(&pieces, &[false; 5], |start, end| Ok::<_, ()>(price(start, end))).unwrap();
            assert_eq!((runs[0].0, runs[runs.len() - 1].1), (0, 5));
            assert!(runs.windows(2).all(|pair| pair[0].1 == pair[1].0), "{runs:?}");
            (runs.iter().map(|(start, end)| price(*start, *end)).sum::<Time>(), runs.len())
        };
        assert_eq!(runs(300), (800, 3));
        assert_eq!(runs(398), (1000, 5), "what saves next to nothing is not worth a cut");
    }
}
