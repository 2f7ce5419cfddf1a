//! Costs of sharded execution: kernels by the roofline of `pass/analytic.rs`, collectives by a ring model.
//!
//! A ring of t devices needs `t - 1` steps for a gather or scatter and `2 (t - 1)` for an all-reduce. Each step takes
//! the link's latency and moves 1/t of the tensor. Times are integer picoseconds, so sums do not depend on their order.

use crate::cluster::{BytesPerSecond, Device, Seconds};
use crate::graph::{Graph, Origin, Writer, order};
use crate::op::collective::is_meeting;
use crate::op::sharding::{Local, write};
use crate::op::table::rule;
use crate::op::{Input, NodeId, Op, Sharding, Strategy, Value};
use crate::pass::analytic::kernel_us;
use crate::pass::attribution::runs;
use crate::profile::shared::{ActivationSharding, Collective, Traffic};
use crate::tensor::fact::Fact;
use crate::tensor_parallel::reshard;

/// Picoseconds, or [`NEVER`].
pub type Time = u64;

/// The cost of an impossible choice.
pub const NEVER: Time = 1 << 62;

/// Saturating sum of two times.
#[inline]
pub fn sum(a: Time, b: Time) -> Time {
    a.saturating_add(b).min(NEVER)
}

/// A tensor-parallel group and its interconnect.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    pub device: Device,
    /// Size of the group.
    pub devices: usize,
    /// Per device and direction, full duplex.
    pub bandwidth: BytesPerSecond,
    /// Per message.
    pub latency: Seconds,
    /// Matrices of weights are sharded and never gathered, as in Megatron-LM. Otherwise a group may also gather them, or
    /// replicate them and divide the batch, if that is faster.
    pub keeps_weights: bool,
    pub activations: ActivationSharding,
}

impl Machine {
    /// The sharding of a value between stages; `is_learned` if it has a gradient. Axis 0 is the batch; of a matrix, it may
    /// be all tokens of a batch. Axis 1 of all else is the sequence.
    pub fn between_stages(&self, fact: &Fact, is_learned: bool) -> Sharding {
        let axes: &[usize] = match (self.activations, fact.rank()) {
            _ if !is_learned || !fact.dtype.is_float() => &[],
            (ActivationSharding::Replicated, _) | (_, 0 | 1) => &[],
            (ActivationSharding::Sequence, 3..) => &[1, 0],
            (ActivationSharding::Sequence | ActivationSharding::Batch, _) => &[0],
        };
        let splits = axes.iter().map(|axis| Sharding::split(*axis));
        let mut splits = splits.filter(|split| split.part(fact, self.devices).is_some());
        splits.next().unwrap_or(Sharding::Replicated)
    }

    /// Time of a node on each device under a strategy.
    pub fn strategy(&self, graph: &Graph, id: NodeId, strategy: &Strategy) -> Time {
        let node = graph.node(id);
        let input_facts: Vec<&Fact> = graph.inputs(id).into_iter().map(|v| graph.fact(v)).collect();
        let parts = |layouts: &[Sharding], facts: &[&Fact]| -> Option<Vec<Fact>> {
            layouts.iter().zip(facts).map(|(layout, fact)| layout.part(fact, self.devices)).collect()
        };
        let output_facts: Vec<&Fact> = node.facts.iter().collect();
        let (Some(inputs), Some(outputs)) =
            (parts(&strategy.inputs, &input_facts), parts(&strategy.outputs, &output_facts))
        else {
            return NEVER;
        };
        match &strategy.local {
            Local::Same => self.node(&node.op, &inputs.iter().collect::<Vec<_>>(), &outputs),
            Local::Sized(op) => self.node(op, &inputs.iter().collect::<Vec<_>>(), &outputs),
            Local::Written => self.written_time(&node.op, strategy, &input_facts, inputs),
        }
    }

    /// Time of the local ops that a strategy emits.
    fn written_time(&self, op: &Op, strategy: &Strategy, input_facts: &[&Fact], inputs: Vec<Fact>) -> Time {
        let mut graph = Graph::new("part");
        let values: Vec<Value> = inputs
            .into_iter()
            .map(|fact| {
                let input = Op::Input(Input { name: String::new(), fact });
                let node = graph.add(input, &[], &Origin::default()).expect("an input takes no inputs");
                Value { node, output: 0 }
            })
            .collect();
        let mut out = Writer { graph: &mut graph, origin: Origin::default() };
        write(op, strategy, &values, input_facts, self.devices, &mut out);
        let times = order::canonical(&graph).into_iter().map(|id| {
            let inputs: Vec<&Fact> = graph.inputs(id).into_iter().map(|v| graph.fact(v)).collect();
            self.node(&graph.node(id).op, &inputs, &graph.node(id).facts)
        });
        times.fold(0, sum)
    }

    /// Time to convert a value from one sharding to another.
    pub fn conversion(&self, fact: &Fact, from: Sharding, to: Sharding) -> Time {
        if from == to {
            return 0;
        }
        let op = reshard::op(from, to, self.devices);
        match (op, from.part(fact, self.devices), to.part(fact, self.devices)) {
            (Some(op), Some(from), Some(to)) => self.node(&op, &[&from], &[to]),
            _ => NEVER,
        }
    }

    /// Time of one local op at these sizes.
    pub fn node(&self, op: &Op, inputs: &[&Fact], outputs: &[Fact]) -> Time {
        if !runs(op) {
            return 0;
        }
        let us = if is_meeting(op) {
            self.collective_us(op, inputs[0], &outputs[0])
        } else {
            kernel_us(&self.device, op, inputs, outputs, rule(op).cost(inputs, outputs))
        };
        let picoseconds = (us * 1e6).ceil();
        if picoseconds.is_finite() && picoseconds < NEVER as f64 { picoseconds as Time } else { NEVER }
    }

    fn collective_us(&self, op: &Op, input: &Fact, output: &Fact) -> f64 {
        let (steps, sent_bytes) = self.ring(op, input, output);
        (steps * self.latency.0 + sent_bytes / self.bandwidth.0 + self.device.launch.0) * 1e6
    }

    /// Steps of a collective, and the bytes that each device sends.
    fn ring(&self, op: &Op, input: &Fact, output: &Fact) -> (f64, f64) {
        let bytes = |fact: &Fact| fact.bytes().unwrap_or(u64::MAX) as f64;
        let (devices, peers) = (self.devices as f64, self.devices as f64 - 1.0);
        match op {
            Op::AllReduce(_) => (2.0 * peers, 2.0 * peers / devices * bytes(input)),
            Op::ReduceScatter(_) => (peers, peers / devices * bytes(input)),
            Op::AllGather(_) => (peers, peers / devices * bytes(output)),
            _ => (peers, peers / devices * bytes(input)),
        }
    }

    /// The kind of a collective as an index, and its traffic; `None` for other ops.
    pub fn traffic(&self, op: &Op, input: &Fact, output: &Fact) -> Option<(usize, Traffic)> {
        let kind = match op {
            Op::AllReduce(_) => Collective::AllReduce,
            Op::AllGather(_) => Collective::AllGather,
            Op::ReduceScatter(_) => Collective::ReduceScatter,
            Op::AllToAll(_) => Collective::AllToAll,
            _ => return None,
        };
        let (_, sent_bytes) = self.ring(op, input, output);
        Some((kind as usize, Traffic { count: 1, bytes: sent_bytes as u64 }))
    }
}
