//! Where a model is taken apart into runs of ops that are shared each by itself, with all that crosses whole on every device.
//!
//! What sharing costs is additive over runs, so that any stages that are made of whole runs cost what their runs cost. Pieces end where few
//! tensors cross, and hold a product with parameters each: fewer would only be glued together again. Which neighbours are best shared
//! together follows from their prices: the cheapest way from the first piece to the last, over runs of a few pieces.
//!
//! ```text
//! x ─ ln ─ qkv ─ … ─ proj ─ add ┊ ln ─ fc ─ gelu ─ proj ─ add ┊ …      ┊ narrow: one tensor crosses
//! └────────────── piece ───────┘
//! ```

use crate::profile::cost_graph::CostGraph;
use crate::tensor_parallel::cost::{Time, sum};

/// Cuts are narrow that no cut so near is narrower than.
const NEAR: usize = 32;

/// Pieces of a run, and ops of a run of several.
const MOST_PIECES: usize = 4;
const MOST_OPS: usize = 72;

/// Pieces are glued together only where that saves one part in so many: stages are made of whole runs, and the finer these are, the more evenly
/// stages can be cut. What stands in one stage is shared as one in training anyway.
const WORTH: Time = 50;

/// The most leaders of a piece.
const LONGEST: usize = 128;

/// Kinds of ops that are worth a piece of their own where they read parameters.
const PRODUCTS: [&str; 6] = ["matmul", "conv", "gather", "lstm", "gru", "rnn"];

/// The ops of each piece, ascending; those that join others are with them.
pub fn pieces(graph: &CostGraph) -> Vec<Vec<u32>> {
    let leaders: Vec<usize> = (0..graph.ops.len()).filter(|&op| graph.ops[op].joins.is_none()).collect();
    let mut place = vec![0; graph.ops.len()];
    leaders.iter().enumerate().for_each(|(at, &op)| place[op] = at);
    for op in &graph.ops {
        place[op.id as usize] = op.joins.map_or(place[op.id as usize], |leader| place[leader.index()]);
    }
    let crossing = crossing(graph, &place, leaders.len());
    let (mut learns, mut multiplies) = (vec![false; leaders.len()], vec![false; leaders.len()]);
    graph.params.iter().flat_map(|param| &param.users).for_each(|op| learns[place[op.index()]] = true);
    graph.ops.iter().for_each(|op| multiplies[place[op.id as usize]] |= PRODUCTS.contains(&op.op.as_str()));
    let mut starts = vec![0];
    let (mut holds_product, mut end) = (false, None);
    for at in 0..leaders.len() {
        let start = starts[starts.len() - 1];
        if at - start >= LONGEST {
            // Nothing ends here by itself.
            let narrowest = (start + LONGEST / 2..=at).min_by_key(|&at| (crossing[at], at));
            starts.push(end.take().or(narrowest).unwrap_or(at));
        }
        end = if holds_product && is_narrow(&crossing, at) { Some(at) } else { end };
        if learns[at] && multiplies[at] {
            starts.extend(end.take());
            holds_product = true;
        }
    }
    let mut pieces = vec![Vec::new(); starts.len()];
    for op in 0..graph.ops.len() {
        pieces[starts.partition_point(|&start| start <= place[op]) - 1].push(op as u32);
    }
    pieces
}

/// The tensors that cross in front of each leader.
fn crossing(graph: &CostGraph, place: &[usize], count: usize) -> Vec<i64> {
    let mut change = vec![0i64; count + 1];
    for tensor in &graph.tensors {
        let from = place[tensor.producer.index()];
        let to = tensor.consumers.iter().map(|op| place[op.index()]).max().unwrap_or(from);
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
    let near = at.saturating_sub(NEAR).max(1)..(at + NEAR).min(crossing.len());
    at > 0 && crossing[near].iter().all(|other| crossing[at] <= *other)
}

/// The cheapest runs, each from a piece to the one behind its last. `price` tells what a run costs.
pub fn cheapest<E>(
    pieces: &[Vec<u32>],
    mut price: impl FnMut(usize, usize) -> Result<Time, E>,
) -> Result<Vec<(usize, usize)>, E> {
    // By number of pieces: the least price, and where the last run begins.
    let mut best: Vec<(Time, usize)> = vec![(0, 0)];
    for end in 1..=pieces.len() {
        let mut least = (sum(best[end - 1].0, price(end - 1, end)?), end - 1);
        for start in (end.saturating_sub(MOST_PIECES)..end - 1).rev() {
            let ops: usize = pieces[start..end].iter().map(Vec::len).sum();
            if ops > MOST_OPS {
                break;
            }
            let price = price(start, end)?;
            let way = sum(best[start].0, sum(price, price / WORTH));
            if way < least.0 {
                least = (way, start);
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
    use crate::profile::cost_graph::{OpCost, OpId, ParamCost, TensorCost};

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
        let found = pieces(&blocks(4));
        assert_eq!(found, [vec![0, 1, 2], vec![3, 4, 5], vec![6, 7, 8], vec![9, 10, 11]]);
    }

    #[test]
    fn runs_are_the_cheapest() {
        let pieces = vec![vec![0]; 5];
        // So much for two together, and 200 each for any other number.
        let runs = |two: Time| {
            let price = |start: usize, end: usize| if end - start == 2 { two } else { 200 * (end - start) as Time };
            let runs = cheapest(&pieces, |start, end| Ok::<_, ()>(price(start, end))).unwrap();
            assert_eq!((runs[0].0, runs[runs.len() - 1].1), (0, 5));
            assert!(runs.windows(2).all(|pair| pair[0].1 == pair[1].0), "{runs:?}");
            (runs.iter().map(|(start, end)| price(*start, *end)).sum::<Time>(), runs.len())
        };
        assert_eq!(runs(300), (800, 3));
        assert_eq!(runs(398), (1000, 5), "what saves next to nothing is not worth a cut");
    }
}
