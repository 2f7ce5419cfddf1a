//! Device placement without replication: the throughput problem of Tarnawski, Phanishayee, Devanur, Mahajan and
//! Paravecino, "Efficient Algorithms for Device Placement of DNN Graph Operators" (NeurIPS 2020).
//!
//! The load of a device with nodes S is its compute, send and receive time in sequence:
//!
//! ```text
//! load(S) = sum of time(v) over v in S
//!         + sum of cost(u) over u in S that some node outside S reads
//!         + sum of cost(u) over u outside S that some node in S reads
//! ```
//!
//! A tensor is charged once to its producer's device and once to every other device that reads it, however many nodes
//! do. The pipeline completes one minibatch every max(load), which is minimised. Nodes of one colour (forward and
//! backward work on the same weights) must share a device. Times and costs have the unit of the file.

use std::collections::BTreeMap;

/// Largest number of nodes, and of edges.
pub const MAX_NODES: usize = 100_000;

#[derive(Clone, Debug, PartialEq, Default)]
pub struct Node {
    /// Id in the file.
    pub name: String,
    /// Display name in the file.
    pub title: String,
    pub time: f64,
    /// Memory on its device.
    pub bytes: f64,
    /// Cost of sending or receiving its output.
    pub transfer: f64,
    /// Nodes of one colour share a device.
    pub colour: Option<u64>,
    pub is_backward: bool,
    /// Readers of its output, ascending, without duplicates.
    pub readers: Vec<u32>,
}

#[derive(Clone, Debug, PartialEq, Default)]
pub struct Placement {
    /// In file order.
    pub nodes: Vec<Node>,
    pub devices: u32,
    pub bytes_per_device: f64,
}

impl Placement {
    /// The load of every device, as defined above.
    pub fn loads(&self, device_of: &[u32], devices: usize) -> Vec<f64> {
        let mut loads = vec![0.0; devices];
        for (node, &device) in self.nodes.iter().zip(device_of) {
            loads[device as usize] += node.time;
            let mut others: Vec<u32> = node.readers.iter().map(|&to| device_of[to as usize]).collect();
            others.sort_unstable();
            others.dedup();
            others.retain(|&other| other != device);
            if !others.is_empty() {
                loads[device as usize] += node.transfer;
            }
            for other in others {
                loads[other as usize] += node.transfer;
            }
        }
        loads
    }

    /// Lower bound on every placement: work spread evenly, and the work of the slowest colour.
    pub fn lower_bound(&self) -> f64 {
        let mut colours: BTreeMap<u64, f64> = BTreeMap::new();
        let mut worst: f64 = 0.0;
        for node in &self.nodes {
            match node.colour {
                Some(colour) => *colours.entry(colour).or_default() += node.time,
                None => worst = worst.max(node.time),
            }
        }
        let total: f64 = self.nodes.iter().map(|node| node.time).sum();
        colours.into_values().fold(worst, f64::max).max(total / f64::from(self.devices.max(1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(time: f64, transfer: f64, readers: &[u32]) -> Node {
        Node { time, transfer, readers: readers.to_vec(), ..Node::default() }
    }

    #[test]
    fn a_tensor_is_charged_once_to_each_device() {
        // Node 0 has two readers on device 1 and one on its own device.
        let nodes = vec![node(1.0, 10.0, &[1, 2, 3]), node(2.0, 0.0, &[]), node(4.0, 0.0, &[]), node(8.0, 0.0, &[])];
        let placement = Placement { nodes, devices: 2, bytes_per_device: 1.0 };
        assert_eq!(placement.loads(&[0, 0, 1, 1], 2), [13.0, 22.0]);
        assert_eq!(placement.lower_bound(), 8.0);
    }
}
