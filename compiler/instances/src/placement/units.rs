//! Merges nodes into the units that the search places.
//!
//! Nodes of one colour form a unit. Forward edges order units; backward edges do as written or reversed, because some
//! instances write the backward pass from loss to inputs and others mirror the forward pass. The reading with more
//! units is used. Units on a cycle are merged. Edges between forward and backward nodes carry tensors but impose no
//! order, because a pipeline schedules the passes separately.

use crate::placement::model::{Placement, host_rate};
use std::collections::BTreeMap;

#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    pub from: u32,
    /// The reading units, ascending, without the producer.
    pub to: Vec<u32>,
    /// Load on a device at either end of the transfer.
    pub cost: f64,
}

/// The units of a placement, in a topological order.
#[derive(Clone, Debug, Default)]
pub struct Units {
    /// Unit of each node.
    pub of_node: Vec<u32>,
    /// Time of each unit on an accelerator; infinite if it runs on hosts only.
    pub time: Vec<f64>,
    /// Time of each unit on a host.
    pub host_time: Vec<f64>,
    /// The smaller of both; the time on an accelerator if there are no hosts.
    pub work: Vec<f64>,
    /// Largest work per unit of time that a host does; 0 if there are no hosts.
    pub host_rate: f64,
    /// Per unit.
    pub bytes: Vec<f64>,
    /// Predecessors of each unit, ascending.
    pub before: Vec<Vec<u32>>,
    /// Successors of each unit, ascending.
    pub after: Vec<Vec<u32>>,
    pub tensors: Vec<Tensor>,
    /// Tensors that each unit produces or reads.
    pub touching: Vec<Vec<u32>>,
}

impl Units {
    pub fn of(placement: &Placement) -> Units {
        let (colour_of, colours) = colours(placement);
        let [mirrored, turned] = [false, true].map(|turns| {
            let edges = precedence(placement, &colour_of, turns);
            components(colours, &edges)
        });
        let (component_of, count) = if mirrored.1 >= turned.1 { mirrored.clone() } else { turned.clone() };
        let turns = mirrored.1 < turned.1;
        let of_node: Vec<u32> = colour_of.iter().map(|&colour| component_of[colour as usize]).collect();
        let mut units = Units {
            time: vec![0.0; count],
            host_time: vec![0.0; count],
            work: Vec::new(),
            host_rate: 0.0,
            bytes: vec![0.0; count],
            before: vec![Vec::new(); count],
            after: vec![Vec::new(); count],
            touching: vec![Vec::new(); count],
            of_node,
            tensors: Vec::new(),
        };
        for (node, &unit) in placement.nodes.iter().zip(&units.of_node) {
            units.time[unit as usize] += node.time;
            units.host_time[unit as usize] += node.host_time;
            units.bytes[unit as usize] += node.bytes;
        }
        units.work = units.time.clone();
        if placement.hosts > 0 {
            let times = units.work.iter_mut().zip(&units.host_time);
            times.for_each(|(work, &host_time)| *work = work.min(host_time));
            let rates = units.work.iter().zip(&units.host_time).map(|(&work, &host_time)| host_rate(work, host_time));
            units.host_rate = rates.fold(0.0, f64::max);
        }
        for (from, to) in precedence(placement, &units.of_node, turns) {
            units.before[to as usize].push(from);
            units.after[from as usize].push(to);
        }
        for list in units.before.iter_mut().chain(&mut units.after) {
            list.sort_unstable();
            list.dedup();
        }
        units.join_tensors(placement);
        units
    }

    pub fn len(&self) -> usize {
        self.time.len()
    }

    pub fn is_empty(&self) -> bool {
        self.time.is_empty()
    }

    /// Load of a set of units due to one tensor.
    pub fn charge(&self, tensor: u32, contains: impl Fn(u32) -> bool) -> f64 {
        let tensor = &self.tensors[tensor as usize];
        let is_charged = match contains(tensor.from) {
            true => tensor.to.iter().any(|&to| !contains(to)),
            false => tensor.to.iter().any(|&to| contains(to)),
        };
        if is_charged { tensor.cost } else { 0.0 }
    }

    /// Collects the outputs read by other units; outputs of a unit with the same readers are merged.
    fn join_tensors(&mut self, placement: &Placement) {
        let mut costs: BTreeMap<(u32, Vec<u32>), f64> = BTreeMap::new();
        for (node, &from) in placement.nodes.iter().zip(&self.of_node) {
            let mut to: Vec<u32> = node.readers.iter().map(|&to| self.of_node[to as usize]).collect();
            to.sort_unstable();
            to.dedup();
            to.retain(|&unit| unit != from);
            if !to.is_empty() && node.transfer > 0.0 {
                *costs.entry((from, to)).or_default() += node.transfer;
            }
        }
        for ((from, to), cost) in costs {
            let id = self.tensors.len() as u32;
            self.touching[from as usize].push(id);
            to.iter().for_each(|&unit| self.touching[unit as usize].push(id));
            self.tensors.push(Tensor { from, to, cost });
        }
    }
}

/// The colour of each node, numbered densely in node order, and the number of colours.
fn colours(placement: &Placement) -> (Vec<u32>, usize) {
    let mut colour_index: BTreeMap<u64, u32> = BTreeMap::new();
    let mut count = 0;
    let mut next_colour = || {
        count += 1;
        count - 1
    };
    let of_node = placement.nodes.iter().map(|node| match node.colour {
        Some(colour) => *colour_index.entry(colour).or_insert_with(&mut next_colour),
        None => next_colour(),
    });
    let of_node = of_node.collect();
    (of_node, count as usize)
}

fn precedence(placement: &Placement, of_node: &[u32], turns: bool) -> Vec<(u32, u32)> {
    let mut edges = Vec::new();
    for (from, node) in placement.nodes.iter().enumerate() {
        for &to in &node.readers {
            let reader = &placement.nodes[to as usize];
            let (from, to) = (of_node[from], of_node[to as usize]);
            if from == to || node.is_backward != reader.is_backward {
                continue;
            }
            edges.push(if node.is_backward && turns { (to, from) } else { (from, to) });
        }
    }
    edges
}

/// The strongly connected component of each of `count` vertices, in topological order, and the number of components.
///
/// Kosaraju's algorithm with explicit stacks, because a chain may be as long as the input file.
fn components(count: usize, edges: &[(u32, u32)]) -> (Vec<u32>, usize) {
    let mut forward = vec![Vec::new(); count];
    let mut backward = vec![Vec::new(); count];
    for &(from, to) in edges {
        forward[from as usize].push(to);
        backward[to as usize].push(from);
    }
    let mut finished = Vec::with_capacity(count);
    let mut visited = vec![false; count];
    for start in 0..count {
        if std::mem::replace(&mut visited[start], true) {
            continue;
        }
        let mut stack = vec![(start, 0)];
        while let Some((vertex, next)) = stack.last_mut() {
            match forward[*vertex].get(*next) {
                Some(&to) => {
                    *next += 1;
                    if !std::mem::replace(&mut visited[to as usize], true) {
                        stack.push((to as usize, 0));
                    }
                }
                None => {
                    finished.push(*vertex);
                    stack.pop();
                }
            }
        }
    }
    let mut component_of = vec![u32::MAX; count];
    let mut components = 0;
    for &start in finished.iter().rev() {
        if component_of[start] != u32::MAX {
            continue;
        }
        component_of[start] = components;
        let mut stack = vec![start];
        while let Some(vertex) = stack.pop() {
            for &to in &backward[vertex] {
                if component_of[to as usize] == u32::MAX {
                    component_of[to as usize] = components;
                    stack.push(to as usize);
                }
            }
        }
        components += 1;
    }
    (component_of, components as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::model::Node;

    fn node(is_backward: bool, colour: u64, transfer: f64, readers: &[u32]) -> Node {
        Node { time: 1.0, transfer, colour: Some(colour), is_backward, readers: readers.to_vec(), ..Node::default() }
    }

    #[test]
    fn a_mirrored_and_a_true_backward_pass_give_the_same_units() {
        let forward = |readers: &[u32], colour| node(false, colour, 2.0, readers);
        let backward = |readers: &[u32], colour| node(true, colour, 3.0, readers);
        // 0 -> 1 forward, 3 -> 2 backward; and mirrored, 2 -> 3.
        let turned = vec![forward(&[1], 0), forward(&[], 1), backward(&[], 0), backward(&[2], 1)];
        let mirrored = vec![forward(&[1], 0), forward(&[], 1), backward(&[3], 0), backward(&[], 1)];
        for nodes in [turned, mirrored] {
            let units = Units::of(&Placement { nodes, devices: 2, ..Placement::default() });
            assert_eq!(
                (units.len(), units.before[1].as_slice(), units.time.as_slice()),
                (2, [0].as_slice(), [2.0, 2.0].as_slice())
            );
            assert_eq!(units.tensors.iter().map(|tensor| tensor.cost).sum::<f64>(), 5.0);
        }
    }

    #[test]
    fn rings_come_in_topological_order() {
        // 3 -> {1, 2 on a cycle} -> 0
        let (ring_of, rings) = components(4, &[(3, 1), (1, 2), (2, 1), (2, 0)]);
        assert_eq!((ring_of, rings), (vec![2, 1, 1, 0], 3));
    }
}
