//! Structural checks of a graph, independent of operator semantics: every tensor is written exactly once, every tensor
//! read is defined, there are no cycles, and the subgraph nesting depth is bounded.

use std::collections::{BTreeSet, HashMap, HashSet};

use crate::import::onnx::error::Fault;
use crate::import::onnx::order::topological;
use crate::import::onnx::proto::{AttributeProto, GraphProto, NodeProto};
use crate::import::onnx::warning::Warning;

/// Maximum nesting depth of subgraphs (an `If` inside an `If` …).
pub const NESTING: usize = 16;

/// The nodes of the main graph or of a function body, with its inputs and outputs.
pub struct Body<'a> {
    /// In file order.
    pub nodes: &'a [NodeProto],
    /// Unique node names, parallel to `nodes`.
    pub names: &'a [String],
    /// Tensors defined before the first node runs: the name and a description for messages, such as `graph input`.
    pub outer_names: &'a [(&'a str, &'static str)],
    pub outputs: &'a [&'a str],
}

/// Checks `body`, appends to `faults` and `warnings`, and returns a topological order of its nodes. After a fault that
/// prevents sorting, this is the file order.
pub fn check(body: &Body<'_>, faults: &mut Vec<Fault>, warnings: &mut Vec<Warning>) -> Vec<usize> {
    let writers = writers(body, faults);
    let mut reads: Vec<Vec<usize>> = Vec::with_capacity(body.nodes.len());
    let mut early = None;
    for (index, node) in body.nodes.iter().enumerate() {
        let name = &body.names[index];
        if node.op_type().is_empty() {
            faults.push(Fault::NoOperator { node: name.clone() });
        }
        let mut attributes = HashSet::new();
        for attribute in node.attribute.iter().filter(|attribute| !attributes.insert(attribute.name())) {
            faults.push(Fault::DuplicateAttribute { node: name.clone(), attribute: attribute.name().to_owned() });
        }
        let mut tensors: BTreeSet<&str> =
            node.input.iter().map(String::as_str).filter(|name| !name.is_empty()).collect();
        for graph in subgraphs(&node.attribute) {
            match free_names(graph, 1) {
                Some(free) => tensors.extend(free),
                None => faults.push(Fault::Nesting { node: name.clone(), limit: NESTING }),
            }
        }
        let mut from = Vec::new();
        for tensor in tensors {
            match writers.get(tensor) {
                Some(Writer::Node(writer)) => {
                    from.push(*writer);
                    early = early.or((*writer >= index).then_some(index));
                }
                Some(Writer::Given(_)) => {}
                None => {
                    let (node, op) = (name.clone(), node.op_type().to_owned());
                    faults.push(Fault::UnknownTensor { node, op, tensor: tensor.to_owned() });
                }
            }
        }
        reads.push(from);
    }
    for tensor in body.outputs.iter().filter(|tensor| !writers.contains_key(**tensor)) {
        faults.push(Fault::UnknownOutput { tensor: (*tensor).to_owned() });
    }
    match topological(&reads) {
        Ok(order) => {
            warnings.extend(early.map(|node| Warning::Sorted { node: body.names[node].clone() }));
            order
        }
        Err(cycle) => {
            faults.push(Fault::Cycle { nodes: cycle.into_iter().map(|node| body.names[node].clone()).collect() });
            (0..body.nodes.len()).collect()
        }
    }
}

pub fn subgraphs(attributes: &[AttributeProto]) -> impl Iterator<Item = &GraphProto> {
    attributes.iter().flat_map(|attribute| attribute.g.iter().chain(&attribute.graphs))
}

/// Calls `visit` on every node, including those in subgraphs. The recursion depth is bounded by protobuf's own nesting
/// limit.
pub fn each_node<'a>(nodes: &'a [NodeProto], visit: &mut impl FnMut(&'a NodeProto)) {
    for node in nodes {
        visit(node);
        for graph in subgraphs(&node.attribute) {
            each_node(&graph.node, visit);
        }
    }
}

enum Writer {
    Given(&'static str),
    Node(usize),
}

fn writers<'a>(body: &Body<'a>, faults: &mut Vec<Fault>) -> HashMap<&'a str, Writer> {
    let mut writers: HashMap<&str, Writer> = HashMap::with_capacity(body.outer_names.len() + body.nodes.len());
    writers.extend(body.outer_names.iter().map(|(name, what)| (*name, Writer::Given(what))));
    for (index, node) in body.nodes.iter().enumerate() {
        for tensor in node.output.iter().map(String::as_str).filter(|name| !name.is_empty()) {
            match writers.get(tensor) {
                None => {
                    writers.insert(tensor, Writer::Node(index));
                }
                Some(before) => {
                    let first = match before {
                        Writer::Given(what) => format!("the {what}"),
                        Writer::Node(first) => format!("node `{}`", body.names[*first]),
                    };
                    let node = body.names[index].clone();
                    faults.push(Fault::DuplicateOutput { tensor: tensor.to_owned(), first, node });
                }
            }
        }
    }
    writers
}

/// Tensor names that a subgraph captures from the enclosing scope; `None` if it nests deeper than [`NESTING`].
pub fn free(graph: &GraphProto) -> Option<BTreeSet<&str>> {
    free_names(graph, 1)
}

fn free_names(graph: &GraphProto, depth: usize) -> Option<BTreeSet<&str>> {
    if depth > NESTING {
        return None;
    }
    let mut defined_names: HashSet<&str> = graph.input.iter().map(|input| input.name()).collect();
    defined_names.extend(graph.initializer.iter().map(|tensor| tensor.name()));
    defined_names.extend(graph.node.iter().flat_map(|node| node.output.iter().map(String::as_str)));
    let mut names: BTreeSet<&str> = graph.output.iter().map(|output| output.name()).collect();
    for node in &graph.node {
        names.extend(node.input.iter().map(String::as_str));
        for inner in subgraphs(&node.attribute) {
            names.extend(free_names(inner, depth + 1)?);
        }
    }
    names.retain(|name| !name.is_empty() && !defined_names.contains(name));
    Some(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str, reads: &[&str], writes: &[&str]) -> NodeProto {
        let texts = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        NodeProto {
            name: Some(name.into()),
            op_type: Some("Op".into()),
            input: texts(reads),
            output: texts(writes),
            ..Default::default()
        }
    }

    fn faults(nodes: &[NodeProto], outputs: &[&str]) -> (Vec<String>, Vec<usize>, Vec<Warning>) {
        let names: Vec<String> = nodes.iter().map(|node| node.name().to_owned()).collect();
        let (mut faults, mut warnings) = (Vec::new(), Vec::new());
        let body = Body { nodes, names: &names, outer_names: &[("x", "graph input")], outputs };
        let order = check(&body, &mut faults, &mut warnings);
        (faults.iter().map(ToString::to_string).collect(), order, warnings)
    }

    #[test]
    fn every_fault_is_named() {
        let nodes = [
            node("a", &["x", "b"], &["a"]),
            node("b", &["a"], &["b"]),
            node("c", &["nope", ""], &["x", ""]),
            node("d", &["x"], &["b"]),
        ];
        let (faults, ..) = faults(&nodes, &["a", "gone"]);
        assert_eq!(
            faults,
            [
                "duplicate output: tensor `x` is computed by the graph input and by node `c`",
                "duplicate output: tensor `b` is computed by node `b` and by node `d`",
                "node `c` (Op) reads tensor `nope`, which no node computes",
                "no node computes graph output `gone`",
                "cycle: `a` -> `b` -> `a`",
            ]
        );
    }

    #[test]
    fn unsorted_nodes_are_sorted_with_a_warning() {
        let nodes = [node("b", &["a"], &["y"]), node("a", &["x"], &["a"])];
        let (faults, order, warnings) = faults(&nodes, &["y"]);
        assert!(faults.is_empty());
        assert_eq!(order, [1, 0]);
        assert_eq!(warnings, [Warning::Sorted { node: "b".into() }]);
    }

    #[test]
    fn subgraph_captures_are_dependencies() {
        let inner = GraphProto { node: vec![node("i", &["outer"], &["r"])], ..Default::default() };
        let attribute = AttributeProto { name: Some("body".into()), g: Some(inner), ..Default::default() };
        let mut branch = node("if", &["x"], &["y"]);
        branch.attribute = vec![attribute];
        let (unknown, ..) = faults(&[branch.clone()], &["y"]);
        assert_eq!(unknown, ["node `if` (Op) reads tensor `outer`, which no node computes"]);
        // The captured tensor also counts as a dependency when the nodes are sorted.
        let (none, order, _) = faults(&[branch, node("o", &["x"], &["outer"])], &["y"]);
        assert!(none.is_empty());
        assert_eq!(order, [1, 0]);
    }
}
