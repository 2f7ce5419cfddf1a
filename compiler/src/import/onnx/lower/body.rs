//! Subgraphs in attributes: the branches of an `If`, the bodies of `Loop` and `Scan`.

use super::walk::Walk;
use super::{Known, LowerReason};
use crate::import::onnx::check_graph;
use crate::import::onnx::check_graph::Body as Wiring;
use crate::import::onnx::model::{Node, Roles};
use crate::import::onnx::name::unique_names;
use crate::import::onnx::payload;
use crate::import::onnx::proto::GraphProto;
use crate::import::onnx::proto::attribute_proto::AttributeType;
use crate::import::onnx::signature;
use crate::text::name::short_name;
use prost::Message;
use std::collections::HashSet;

/// Subgraph bytes that count as one node against the unrolling budget each time the subgraph is read.
const BYTES_A_NODE: u64 = 64;

/// A checked subgraph in topological order.
pub struct Body {
    pub inputs: Vec<String>,
    /// Names and declared types.
    pub outputs: Vec<crate::import::onnx::model::ValueInfo>,
    constants: Vec<(String, Known)>,
    nodes: Vec<Node>,
}

impl Body {
    pub fn read(walk: &mut Walk<'_>, node: &Node, name: &'static str) -> Result<Body, LowerReason> {
        let attribute = node.attributes.iter().find(|a| a.name() == name);
        let graph = attribute.filter(|a| matches!(a.r#type(), AttributeType::Graph | AttributeType::Undefined));
        let expected = "a graph";
        let graph = graph.and_then(|a| a.g.as_ref());
        let graph = graph.ok_or(LowerReason::Attribute { name, found: "no graph".to_string(), expected })?;
        let size = graph.encoded_len();
        walk.frames.copy(size)?;
        walk.frames.spend(size as u64 / BYTES_A_NODE)?;
        let order = order(graph)?;
        let (mut faults, mut warnings) = (Vec::new(), Vec::new());
        let outputs = signature::read(graph, 0, &mut faults, &mut warnings).outputs;
        let names = unique_names(&graph.node);
        let nodes: Vec<Node> =
            order.into_iter().map(|at| Node::new(graph.node[at].clone(), names[at].clone())).collect();
        let initializers: Vec<_> = graph.initializer.iter().map(payload::tensor).collect();
        let constants = walk.initializers(&initializers, &nodes, &Roles::default());
        let inputs = graph.input.iter().map(|input| input.name().to_owned()).collect();
        Ok(Body { inputs, outputs, constants, nodes })
    }

    /// Lowers the subgraph once with these inputs, in a nested frame, and returns its results.
    pub fn run(
        &self,
        walk: &mut Walk<'_>,
        node: &Node,
        iteration: Option<u64>,
        arguments: Vec<Known>,
    ) -> Result<Vec<Known>, Option<LowerReason>> {
        if arguments.len() != self.inputs.len() {
            let (expected_count, argument_count) = (self.inputs.len(), arguments.len());
            return Err(Some(LowerReason::Inputs(format!(
                "its subgraph takes {expected_count} inputs and is given {argument_count}"
            ))));
        }
        let name = iteration.map_or_else(|| node.name.clone(), |iteration| format!("{}/{iteration}", node.name));
        let mut frame = walk.frames.within(&name, &node.module, iteration.is_some());
        frame.known.extend(self.constants.iter().cloned());
        frame.known.extend(self.inputs.iter().cloned().zip(arguments));
        walk.within(frame, |walk| {
            // An empty iteration also costs one node.
            walk.frames.spend(1)?;
            let complete = walk.nodes(&self.nodes)?;
            let result = |info: &crate::import::onnx::model::ValueInfo| match walk.frames.find(&info.name) {
                Some(known) => Ok(known.cloned().unwrap_or(Known::Absent("a missing result"))),
                None if complete => Err(Some(LowerReason::Inputs(format!(
                    "no node computes the result `{}` of its subgraph",
                    short_name(&info.name)
                )))),
                None => Err(None),
            };
            self.outputs.iter().map(result).collect()
        })
    }
}

/// The topological order of a subgraph, or an error if its structure is invalid. Captured names were checked with the
/// enclosing graph.
fn order(graph: &GraphProto) -> Result<Vec<usize>, LowerReason> {
    let node_outputs: HashSet<&str> =
        graph.node.iter().flat_map(|node| node.output.iter().map(String::as_str)).collect();
    let inputs = graph.input.iter().map(|input| (input.name(), "input of its subgraph"));
    let initializers = graph.initializer.iter().map(|tensor| (tensor.name(), "initializer of its subgraph"));
    let mut outer_names: Vec<(&str, &'static str)> = inputs.chain(initializers).collect();
    let defined: HashSet<&str> = outer_names.iter().map(|(name, _)| *name).collect();
    let captured = check_graph::free(graph)
        .ok_or_else(|| LowerReason::Unsupported("a subgraph that is nested deeper".to_string()))?;
    outer_names.extend(
        captured
            .into_iter()
            .filter(|name| !defined.contains(name) && !node_outputs.contains(name))
            .map(|n| (n, "outside")),
    );
    let outputs: Vec<&str> = graph.output.iter().map(|output| output.name()).collect();
    let names = unique_names(&graph.node);
    let (mut faults, mut warnings) = (Vec::new(), Vec::new());
    let wiring = Wiring { nodes: &graph.node, names: &names, outer_names: &outer_names, outputs: &outputs };
    let order = check_graph::check(&wiring, &mut faults, &mut warnings);
    match faults.first() {
        None => Ok(order),
        Some(fault) => Err(LowerReason::Inputs(format!("in its subgraph, {fault}"))),
    }
}
