//! Placement of a graph on devices that neither replicate nor overlap: the problem of Tarnawski, Phanishayee, Devanur, Mahajan
//! and Paravecino, "Efficient Algorithms for Device Placement of DNN Graph Operators" (NeurIPS 2020), in its throughput form.
//!
//! A device that holds the nodes S is loaded with what it computes, sends and receives, one after the other:
//!
//! ```text
//! load(S) = sum of time(v) over v in S
//!         + sum of cost(u) over u in S that some node outside S reads
//!         + sum of cost(u) over u outside S that some node in S reads
//! ```
//!
//! A tensor is charged once to the device that makes it and once to every other device that reads it, however many nodes do.
//! In a pipeline one minibatch leaves every max(load) units of time, and that is minimised. Nodes of one colour, the forward and
//! backward work on the same weights, stand on one device. Times and costs have the unit of the file.

use crate::cluster::BytesPerSecond;
use std::collections::BTreeMap;

/// The bandwidth at which costs are told as bytes, since a plan tells bytes: 1 GB/s, so that one microsecond is 1000 bytes.
pub const NOMINAL: BytesPerSecond = BytesPerSecond(1e9);

/// The most nodes, and the most edges, of an instance.
pub const MAX_NODES: usize = 100_000;

/// One node.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Node {
    /// Its id in the file.
    pub name: String,
    /// What the file calls it.
    pub title: String,
    /// Time on a device.
    pub time: f64,
    /// Bytes that stay on its device.
    pub bytes: f64,
    /// Cost of taking its output off a device, or onto one.
    pub transfer: f64,
    /// Nodes of one colour stand together.
    pub colour: Option<u64>,
    /// Whether it is backward work.
    pub is_backward: bool,
    /// The nodes that read its output, ascending, each once.
    pub readers: Vec<u32>,
}

/// An instance.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Placement {
    /// Nodes, in the order of the file.
    pub nodes: Vec<Node>,
    /// How many devices there are.
    pub devices: u32,
    /// Bytes that one device holds.
    pub bytes_per_device: f64,
}

impl Placement {
    /// The load of every device, by the definition.
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

    /// What no placement can beat: all work spread evenly, and the slowest colour alone.
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
        // 0 is read twice on device 1 and once on its own.
        let nodes = vec![node(1.0, 10.0, &[1, 2, 3]), node(2.0, 0.0, &[]), node(4.0, 0.0, &[]), node(8.0, 0.0, &[])];
        let placement = Placement { nodes, devices: 2, bytes_per_device: 1.0 };
        assert_eq!(placement.loads(&[0, 0, 1, 1], 2), [13.0, 22.0]);
        assert_eq!(placement.lower_bound(), 8.0);
    }
}
