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
//!
//! Besides accelerators, an instance may have hosts (the CPUs of the paper). The load of a host is the sum of
//! host_time(v) over its nodes. A host pays for no transfer, because all tensors between accelerators pass through its
//! memory, and its memory is not limited. Some nodes run on hosts only.

use std::collections::BTreeMap;

/// Largest number of nodes, and of edges.
pub const MAX_NODES: usize = 100_000;

#[derive(Clone, Debug, PartialEq, Default)]
pub struct Node {
    /// Id in the file.
    pub name: String,
    /// Display name in the file.
    pub title: String,
    /// Time on an accelerator; infinite if the node runs on hosts only.
    pub time: f64,
    /// Time on a host.
    pub host_time: f64,
    /// Memory on its accelerator.
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
    /// Number of accelerators. They are the first devices; hosts follow.
    pub devices: u32,
    /// Number of hosts that may be used.
    pub hosts: u32,
    /// Memory of an accelerator.
    pub bytes_per_device: f64,
}

impl Placement {
    pub fn is_host(&self, device: u32) -> bool {
        self.hosts > 0 && device >= self.devices
    }

    /// The load of every device, as defined above.
    pub fn loads(&self, device_of: &[u32], devices: usize) -> Vec<f64> {
        let mut loads = vec![0.0; devices];
        for (node, &device) in self.nodes.iter().zip(device_of) {
            loads[device as usize] += if self.is_host(device) { node.host_time } else { node.time };
            let mut receivers: Vec<u32> = node.readers.iter().map(|&to| device_of[to as usize]).collect();
            receivers.sort_unstable();
            receivers.dedup();
            receivers.retain(|&receiver| receiver != device);
            if !receivers.is_empty() && !self.is_host(device) {
                loads[device as usize] += node.transfer;
            }
            for receiver in receivers.into_iter().filter(|&receiver| !self.is_host(receiver)) {
                loads[receiver as usize] += node.transfer;
            }
        }
        loads
    }

    /// Lower bound on every placement: work spread evenly, and the work of the slowest colour.
    pub fn lower_bound(&self) -> f64 {
        if self.hosts > 0 {
            return self.lower_bound_with_hosts();
        }
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

    /// The work of a colour is its smaller time on an accelerator or a host. A host that is busy for time t does at
    /// most t times the largest ratio of work to host time.
    fn lower_bound_with_hosts(&self) -> f64 {
        let mut colours: BTreeMap<u64, (f64, f64)> = BTreeMap::new();
        let mut parts: Vec<(f64, f64)> = Vec::new();
        for node in &self.nodes {
            match node.colour {
                Some(colour) => {
                    let (time, host_time) = colours.entry(colour).or_default();
                    (*time, *host_time) = (*time + node.time, *host_time + node.host_time);
                }
                None => parts.push((node.time, node.host_time)),
            }
        }
        parts.extend(colours.into_values());
        let work = |&(time, host_time): &(f64, f64)| time.min(host_time);
        let rate = parts.iter().map(|part| host_rate(work(part), part.1)).fold(0.0, f64::max);
        let slowest = parts.iter().map(work).fold(0.0, f64::max);
        let total: f64 = parts.iter().map(work).sum();
        slowest.max(total / (f64::from(self.devices) + rate * f64::from(self.hosts)).max(1.0))
    }
}

/// Work per unit of time that a host does, at most 1.
pub fn host_rate(work: f64, host_time: f64) -> f64 {
    if host_time > 0.0 { work / host_time } else { 0.0 }
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
        let placement = Placement { nodes, devices: 2, bytes_per_device: 1.0, ..Placement::default() };
        assert_eq!(placement.loads(&[0, 0, 1, 1], 2), [13.0, 22.0]);
        assert_eq!(placement.lower_bound(), 8.0);
    }

    #[test]
    fn a_host_computes_and_pays_for_no_transfer() {
        let host_time = |mut node: Node, host_time: f64| {
            node.host_time = host_time;
            node
        };
        let nodes = vec![
            host_time(node(1.0, 10.0, &[1, 2]), 8.0),
            host_time(node(2.0, 20.0, &[2]), 4.0),
            host_time(node(f64::INFINITY, 0.0, &[]), 3.0),
        ];
        let placement = Placement { nodes, devices: 2, hosts: 1, bytes_per_device: 1.0 };
        assert_eq!(placement.loads(&[0, 1, 2], 3), [11.0, 32.0, 3.0]);
        assert_eq!(placement.loads(&[0, 2, 2], 3), [11.0, 0.0, 7.0]);
        // Work 1, 2 and 3; a host does no more than the accelerators' work per time.
        assert_eq!(placement.lower_bound(), 3.0);
    }
}
