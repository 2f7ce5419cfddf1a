//! Checks graph invariants: no cycle, every input exists, facts match the ops, names are unique, and outputs and
//! averages refer to existing values.
//!
//! It runs after import and between passes. A failure after a pass is a bug of pipec.

use super::{Graph, order};
use crate::op::table::rule;
use crate::op::{FactError, Op, Value};
use crate::tensor::fact::Fact;
use std::collections::HashSet;
use thiserror::Error;

#[derive(Debug, Error, PartialEq)]
#[allow(missing_docs)]
pub enum VerifyError {
    #[error("the graph has a cycle through `{node}`")]
    Cycle { node: String },
    #[error("`{node}` reads output {output} of `{producer}`, which has {outputs}")]
    Output { node: String, producer: String, output: u32, outputs: usize },
    #[error("the inputs of `{node}` are not numbered 0, 1, 2, …")]
    Slots { node: String },
    #[error("`{node}` does not fit its inputs: {fault}")]
    Fact { node: String, fault: FactError },
    #[error("`{node}` stores {stored}, but its op computes {inferred}")]
    Stored { node: String, stored: String, inferred: String },
    #[error("two nodes are named `{name}`")]
    Name { name: String },
    #[error("result `{name}` refers to no node")]
    Result { name: String },
    #[error("a running average of `{node}` does not fit its state")]
    Average { node: String },
}

/// Checks all invariants.
pub fn verify(graph: &Graph) -> Result<(), VerifyError> {
    let order = order::canonical(graph);
    if order.len() != graph.len() {
        let ordered: HashSet<_> = order.into_iter().collect();
        let in_cycle = graph.ids().find(|id| !ordered.contains(id)).expect("some node is not placed");
        return Err(VerifyError::Cycle { node: graph.node(in_cycle).name.clone() });
    }
    let mut names = HashSet::new();
    for id in order {
        let node = graph.node(id);
        if !names.insert(&node.name) {
            return Err(VerifyError::Name { name: node.name.clone() });
        }
        let inputs = graph.inputs(id);
        for value in &inputs {
            let producer = graph.node(value.node);
            if value.output as usize >= producer.facts.len() {
                return Err(VerifyError::Output {
                    node: node.name.clone(),
                    producer: producer.name.clone(),
                    output: value.output,
                    outputs: producer.facts.len(),
                });
            }
        }
        if !graph.slots_are_dense(id) {
            return Err(VerifyError::Slots { node: node.name.clone() });
        }
        let facts: Vec<&Fact> = inputs.iter().map(|v| graph.fact(*v)).collect();
        let inferred =
            rule(&node.op).infer(&facts).map_err(|fault| VerifyError::Fact { node: node.name.clone(), fault })?;
        if inferred != node.facts {
            return Err(VerifyError::Stored {
                node: node.name.clone(),
                stored: list(&node.facts),
                inferred: list(&inferred),
            });
        }
    }
    let exists = |v: Value| graph.contains(v.node) && (v.output as usize) < graph.node(v.node).facts.len();
    for output in &graph.outputs {
        if !exists(output.value) {
            return Err(VerifyError::Result { name: output.name.clone() });
        }
    }
    for average in &graph.averages {
        let is_consistent = graph.contains(average.state)
            && exists(average.sample)
            && matches!(&graph.node(average.state).op, Op::State(s) if s.fact == *graph.fact(average.sample));
        if !is_consistent {
            return Err(VerifyError::Average { node: format!("node {}", average.state.0) });
        }
    }
    Ok(())
}

fn list(facts: &[Fact]) -> String {
    facts.iter().map(Fact::to_string).collect::<Vec<_>>().join(", ")
}

impl Graph {
    fn slots_are_dense(&self, node: crate::op::NodeId) -> bool {
        let mut slots: Vec<u32> = self
            .dag
            .edges_directed(super::index(node), petgraph::Direction::Incoming)
            .map(|e| e.weight().input)
            .collect();
        slots.sort_unstable();
        slots.iter().enumerate().all(|(i, s)| i as u32 == *s)
    }
}
