//! Topological sort of nodes given in any order.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Sorts nodes topologically; `reads[i]` lists the nodes whose results node `i` reads.
///
/// Always picks the ready node with the smallest index, so nodes that are already sorted keep their order. `Err`
/// contains the nodes of one cycle in data-flow order.
pub fn topological(reads: &[Vec<usize>]) -> Result<Vec<usize>, Vec<usize>> {
    let mut readers = vec![Vec::new(); reads.len()];
    let mut pending_inputs: Vec<usize> = reads.iter().map(Vec::len).collect();
    for (node, from) in reads.iter().enumerate() {
        for &source in from {
            readers[source].push(node);
        }
    }
    let mut ready: BinaryHeap<Reverse<usize>> =
        pending_inputs.iter().enumerate().filter(|(_, count)| **count == 0).map(|(node, _)| Reverse(node)).collect();
    let mut order = Vec::with_capacity(reads.len());
    while let Some(Reverse(node)) = ready.pop() {
        order.push(node);
        for &reader in &readers[node] {
            pending_inputs[reader] -= 1;
            if pending_inputs[reader] == 0 {
                ready.push(Reverse(reader));
            }
        }
    }
    if order.len() == reads.len() { Ok(order) } else { Err(cycle(reads, &pending_inputs)) }
}

/// Finds one cycle among the unsorted nodes. Each of them reads from another unsorted node, so walking from reader to
/// source must revisit a node.
fn cycle(reads: &[Vec<usize>], pending_inputs: &[usize]) -> Vec<usize> {
    let mut seen_at = vec![usize::MAX; reads.len()];
    let mut walk = Vec::new();
    let mut next = pending_inputs.iter().position(|count| *count > 0);
    while let Some(node) = next {
        if seen_at[node] != usize::MAX {
            let mut ring = walk.split_off(seen_at[node]);
            ring.reverse();
            let smallest = ring.iter().enumerate().min_by_key(|(_, node)| **node).map_or(0, |(at, _)| at);
            ring.rotate_left(smallest);
            return ring;
        }
        seen_at[node] = walk.len();
        walk.push(node);
        next = reads[node].iter().copied().find(|source| pending_inputs[*source] > 0);
    }
    walk
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sorted_nodes_stay_and_others_move_as_little_as_they_must() {
        assert_eq!(topological(&[vec![], vec![0], vec![0], vec![1, 2]]), Ok(vec![0, 1, 2, 3]));
        assert_eq!(topological(&[vec![1], vec![], vec![], vec![0]]), Ok(vec![1, 0, 2, 3]));
        assert_eq!(topological(&[]), Ok(vec![]));
    }

    #[test]
    fn cycles_are_named_in_the_direction_of_the_data() {
        // 0 feeds 1, 1 feeds 2, 2 feeds 0; 3 depends on the cycle.
        assert_eq!(topological(&[vec![2], vec![0], vec![1], vec![2]]), Err(vec![0, 1, 2]));
        assert_eq!(topological(&[vec![], vec![1]]), Err(vec![1]));
    }

    #[test]
    fn a_long_cycle_takes_no_stack() {
        let ring: Vec<Vec<usize>> =
            (0..300_000).map(|node: usize| vec![node.checked_sub(1).unwrap_or(299_999)]).collect();
        assert_eq!(topological(&ring).unwrap_err().len(), 300_000);
    }
}
