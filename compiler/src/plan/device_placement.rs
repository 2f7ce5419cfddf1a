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
//!
//! [`Placement::check`] judges a plan from these sentences alone and shares no code with the searches.

use crate::cluster::BytesPerSecond;
use crate::plan::Plan;
use crate::plan::check::{Fault, TOLERANCE};
use std::collections::{BTreeMap, BTreeSet};

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

    /// Judges a plan: every node on one device, colours together, memory, and the load that the plan states.
    pub fn check(&self, plan: &Plan) -> Result<f64, Vec<Fault>> {
        let mut faults = Vec::new();
        let mut device_of: Vec<Option<usize>> = vec![None; self.nodes.len()];
        let mut count = vec![0u32; self.nodes.len()];
        if plan.stages.is_empty() {
            faults.push(Fault::NoStages);
        }
        for (stage, held) in plan.stages.iter().enumerate() {
            for &(from, to) in &held.ops {
                if from >= to || to as usize > self.nodes.len() {
                    faults.push(Fault::Range { stage, from, to, ops: self.nodes.len() });
                    continue;
                }
                for op in from as usize..to as usize {
                    device_of[op] = Some(stage);
                    count[op] += 1;
                }
            }
            if held.replicas != 1 || held.devices.len() != 1 {
                let what = format!("{} replicas; such devices do not replicate", held.replicas);
                faults.push(Fault::Devices { stage, what });
            }
        }
        if plan.stages.len() > self.devices as usize {
            let what = format!("there are {} stages and {} devices", plan.stages.len(), self.devices);
            faults.push(Fault::Devices { stage: plan.stages.len() - 1, what });
        }
        let wrong = count.iter().enumerate().filter(|(_, count)| **count != 1);
        faults.extend(wrong.take(16).map(|(op, &count)| Fault::Coverage { op, count }));
        if !faults.is_empty() {
            return Err(faults);
        }
        let place = |node: usize| device_of[node].unwrap_or_default();
        let mut first_of: BTreeMap<u64, usize> = BTreeMap::new();
        for (op, node) in self.nodes.iter().enumerate() {
            let Some(colour) = node.colour else { continue };
            let with = *first_of.entry(colour).or_insert(op);
            if place(with) != place(op) {
                faults.push(Fault::Apart { op, stage: place(op), with: with as u32, other: place(with) });
            }
        }
        let mut worst: f64 = 0.0;
        for stage in 0..plan.stages.len() {
            let mut load = 0.0;
            let mut bytes = 0.0;
            for (op, node) in self.nodes.iter().enumerate() {
                let reading: BTreeSet<usize> = node.readers.iter().map(|&to| place(to as usize)).collect();
                if place(op) == stage {
                    load += node.time;
                    bytes += node.bytes;
                    load += if reading.iter().any(|&to| to != stage) { node.transfer } else { 0.0 };
                } else if reading.contains(&stage) {
                    load += node.transfer;
                }
            }
            if bytes > self.bytes_per_device {
                let (needed, limit) = (bytes as u64, self.bytes_per_device as u64);
                faults.push(Fault::Memory { stage, needed, limit });
            }
            worst = worst.max(load);
        }
        let said = plan.predicted.minibatch_us;
        if (said - worst).abs() > TOLERANCE * said.abs().max(worst).max(1e-6) {
            let (said, found) = (said.to_string(), worst.to_string());
            faults.push(Fault::Figure { what: "predicted.minibatch_us".into(), said, found });
        }
        if faults.is_empty() { Ok(worst) } else { Err(faults) }
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
