//! Reads PipeDream profiles (`graph.txt`): ops with times and sizes, without operators.
//!
//! ```text
//! node2 -- ReLU(inplace) -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=100.0, parameter_size=0.0
//! <TAB>node1 -- node2
//! ```
//!
//! Times are milliseconds per minibatch, sizes are bytes. An activation size may be a list `[a; b]`, which is summed. A
//! node may end in ` -- stage_id=K`, which is ignored. As in PipeDream's optimizer, nodes whose description starts with
//! "Input" are removed. After that, a single pass removes nodes without readers whose description starts with
//! `__getitem__`.
//!
//! The result is in topological order. Op 0 is the first node of the file without predecessors, because PipeDream's
//! search starts from it. Among the others, the ready node with the smallest number comes first.

use crate::profile::cost_graph::{CostGraph, CostGraphError, OpCost, OpId, ParamCost, TensorCost};
use crate::text::name::short_name;
use std::collections::{BTreeSet, HashMap};

/// Maximum file size in bytes. The largest published profile is smaller than 1 MB.
pub const MAX_BYTES: usize = 256 << 20;

const MAX_NODES: usize = 1_000_000;

/// Errors in a `graph.txt`. Lines are counted from 1.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PipedreamError {
    /// Larger than `MAX_BYTES`, or more than a million nodes.
    #[error("the file is too large: {found} {what}; the limit is {limit}")]
    TooLarge {
        /// "bytes" or "nodes".
        what: &'static str,
        found: usize,
        limit: usize,
    },
    #[error(
        "line {line}: expected `ID -- DESCRIPTION -- forward_compute_time=F, backward_compute_time=B, activation_size=A, \
         parameter_size=P`, or a tab and `ID -- ID`; found `{found}`"
    )]
    Syntax {
        line: usize,
        /// Start of the line.
        found: String,
    },
    #[error("line {line}: node `{node}`: {field} is `{found}`; it is in {}, from 0 to below 1e18", unit(field))]
    Number { line: usize, node: String, field: &'static str, found: String },
    #[error("line {line}: node `{node}` has no {field}")]
    Missing { line: usize, node: String, field: &'static str },
    #[error("line {line}: duplicate node `{node}`, first on line {first}")]
    Duplicate {
        line: usize,
        node: String,
        /// The first line that defines it.
        first: usize,
    },
    #[error("line {line}: edge names the unknown node `{node}`")]
    UnknownNode { line: usize, node: String },
    #[error("the graph has a cycle: `{nodes}`")]
    Cycle {
        /// Up to eight nodes of the cycle, in edge direction.
        nodes: String,
    },
    #[error(transparent)]
    Costs(#[from] CostGraphError),
}

struct Node<'a> {
    id: &'a str,
    description: &'a str,
    line: usize,
    forward_ms: f64,
    backward_ms: f64,
    activation: f64,
    parameter: f64,
}

/// Parses a `graph.txt`. Times are converted to microseconds.
pub fn read(text: &str) -> Result<CostGraph, PipedreamError> {
    if text.len() > MAX_BYTES {
        return Err(PipedreamError::TooLarge { what: "bytes", found: text.len(), limit: MAX_BYTES });
    }
    let mut nodes: Vec<Node<'_>> = Vec::new();
    let mut index: HashMap<&str, usize> = HashMap::new();
    let mut named_edges: Vec<(usize, &str, &str)> = Vec::new();
    for (at, line) in text.lines().enumerate() {
        let number = at + 1;
        if let Some(edge) = line.strip_prefix('\t') {
            let (from, to) = edge.split_once(" -- ").ok_or_else(|| syntax(number, line))?;
            named_edges.push((number, from.trim(), to.trim()));
        } else if !line.trim().is_empty() {
            let node = node(number, line)?;
            if let Some(&first) = index.get(node.id) {
                return Err(PipedreamError::Duplicate {
                    line: number,
                    node: short_name(node.id),
                    first: nodes[first].line,
                });
            }
            if nodes.len() == MAX_NODES {
                return Err(PipedreamError::TooLarge { what: "nodes", found: MAX_NODES + 1, limit: MAX_NODES });
            }
            index.insert(node.id, nodes.len());
            nodes.push(node);
        }
    }
    let mut edges = Vec::with_capacity(named_edges.len());
    for (line, from, to) in named_edges {
        let find =
            |id: &str| index.get(id).copied().ok_or_else(|| PipedreamError::UnknownNode { line, node: short_name(id) });
        edges.push((find(from)?, find(to)?));
    }
    edges.sort_unstable();
    edges.dedup();
    // Also finds cycles through inputs, which are removed next.
    order(&nodes, &edges, &vec![true; nodes.len()])?;
    let used = used_nodes(&nodes, &edges);
    edges.retain(|&(from, to)| used[from] && used[to]);
    build(&nodes, &edges, &used)
}

fn unit(field: &str) -> &'static str {
    if field.ends_with("_time") { "milliseconds" } else { "bytes" }
}

fn node(line: usize, text: &str) -> Result<Node<'_>, PipedreamError> {
    // The description may contain anything, including ` -- `, so the fields are located from the end.
    let (id, fields_text) = text.split_once(" -- ").ok_or_else(|| syntax(line, text))?;
    let fields_at = fields_text.rfind(" -- forward_compute_time=").ok_or_else(|| syntax(line, text))?;
    let description = &fields_text[..fields_at];
    let fields = &fields_text[fields_at + " -- ".len()..];
    let fields = fields.split_once(" -- ").map_or(fields, |(fields, _stage)| fields);
    let id = id.trim();
    let field = |name: &'static str| {
        let found = fields.split(", ").find_map(|part| part.trim().strip_prefix(name)?.strip_prefix('='));
        found.ok_or_else(|| PipedreamError::Missing { line, node: short_name(id), field: name })
    };
    let number = |name: &'static str, text: &str| {
        let value = text.trim().parse::<f64>().ok().filter(|value| value.is_finite() && *value >= 0.0);
        let error = || PipedreamError::Number { line, node: short_name(id), field: name, found: short_name(text) };
        value.filter(|value| *value < 1e18).ok_or_else(error)
    };
    let activation = match field("activation_size")?.trim() {
        list if list.starts_with('[') && list.ends_with(']') => {
            let inner = list[1..list.len() - 1].split(';').filter(|part| !part.trim().is_empty());
            inner.map(|part| number("activation_size", part)).sum::<Result<f64, _>>()?
        }
        one => number("activation_size", one)?,
    };
    Ok(Node {
        id,
        description: description.trim(),
        line,
        forward_ms: number("forward_compute_time", field("forward_compute_time")?)?,
        backward_ms: number("backward_compute_time", field("backward_compute_time")?)?,
        activation,
        parameter: number("parameter_size", field("parameter_size")?)?,
    })
}

fn used_nodes(nodes: &[Node<'_>], edges: &[(usize, usize)]) -> Vec<bool> {
    let mut used: Vec<bool> = nodes.iter().map(|node| !node.description.starts_with("Input")).collect();
    let mut is_read = vec![false; nodes.len()];
    for &(from, to) in edges {
        is_read[from] |= used[to];
    }
    for (at, node) in nodes.iter().enumerate() {
        used[at] &= is_read[at] || !node.description.starts_with("__getitem__");
    }
    used
}

fn build(nodes: &[Node<'_>], edges: &[(usize, usize)], used: &[bool]) -> Result<CostGraph, PipedreamError> {
    let order = order(nodes, edges, used)?;
    let mut id_of = vec![OpId(0); nodes.len()];
    for (at, &node) in order.iter().enumerate() {
        id_of[node] = OpId(at as u32);
    }
    let mut graph = CostGraph::default();
    for (at, &node) in order.iter().enumerate() {
        let node = &nodes[node];
        let activation = node.activation.round() as u64;
        let parameter = node.parameter.round() as u64;
        let op = node.description.split('(').next().unwrap_or_default().trim();
        graph.ops.push(OpCost {
            id: at as u32,
            name: node.id.to_string(),
            module: String::new(),
            op: op.to_string(),
            fwd_us: node.forward_ms * 1e3,
            bwd_us: node.backward_ms * 1e3,
            param_bytes: parameter,
            saved_bytes: activation,
            out_bytes: activation,
            ..OpCost::default()
        });
        graph.tensors.push(TensorCost {
            name: node.id.to_string(),
            producer: OpId(at as u32),
            bytes: activation,
            consumers: Vec::new(),
        });
        if parameter > 0 {
            let name = format!("{}.parameters", node.id);
            graph.params.push(ParamCost::new(name, parameter, vec![OpId(at as u32)]));
        }
    }
    for &(from, to) in edges {
        graph.tensors[id_of[from].index()].consumers.push(id_of[to]);
    }
    for tensor in &mut graph.tensors {
        tensor.consumers.sort_unstable();
    }
    graph.check()?;
    Ok(graph)
}

fn order(nodes: &[Node<'_>], edges: &[(usize, usize)], used: &[bool]) -> Result<Vec<usize>, PipedreamError> {
    let mut pending_inputs = vec![0usize; nodes.len()];
    let mut first_out = vec![edges.len(); nodes.len() + 1];
    for (at, &(from, to)) in edges.iter().enumerate().rev() {
        pending_inputs[to] += 1;
        first_out[from] = at;
    }
    let first = (0..nodes.len()).find(|&at| used[at] && pending_inputs[at] == 0);
    let key = |at: usize| (Some(at) != first, natural(nodes[at].id), at);
    let mut ready: BTreeSet<_> = (0..nodes.len()).filter(|&at| used[at] && pending_inputs[at] == 0).map(key).collect();
    let mut order = Vec::with_capacity(nodes.len());
    while let Some((_, _, at)) = ready.pop_first() {
        order.push(at);
        for &(_, to) in edges[first_out[at].min(edges.len())..].iter().take_while(|(from, _)| *from == at) {
            pending_inputs[to] -= 1;
            if pending_inputs[to] == 0 {
                ready.insert(key(to));
            }
        }
    }
    if order.len() == used.iter().filter(|used| **used).count() {
        Ok(order)
    } else {
        Err(cycle(nodes, edges, &pending_inputs))
    }
}

// Each unsorted node has an unsorted predecessor, so walking back must revisit a node.
fn cycle(nodes: &[Node<'_>], edges: &[(usize, usize)], pending_inputs: &[usize]) -> PipedreamError {
    let mut before = vec![None; nodes.len()];
    for &(from, to) in edges {
        if pending_inputs[from] > 0 && pending_inputs[to] > 0 {
            before[to] = Some(from);
        }
    }
    let mut at = (0..nodes.len()).find(|&node| pending_inputs[node] > 0);
    let mut seen = vec![false; nodes.len()];
    while let Some(node) = at.filter(|&node| !seen[node]) {
        seen[node] = true;
        at = before[node];
    }
    let start = at;
    let mut ring = Vec::new();
    while let Some(node) = at {
        ring.push(short_name(nodes[node].id));
        at = before[node].filter(|&next| Some(next) != start && ring.len() < 8);
    }
    ring.reverse();
    PipedreamError::Cycle { nodes: ring.join("` -> `") }
}

// Numeric order of trailing digits: `node9` before `node10`.
fn natural(id: &str) -> (String, u64) {
    let stem = id.trim_end_matches(|c: char| c.is_ascii_digit());
    (stem.to_string(), id[stem.len()..].parse().unwrap_or(u64::MAX))
}

fn syntax(line: usize, text: &str) -> PipedreamError {
    PipedreamError::Syntax { line, found: short_name(text) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COSTS: &str = "forward_compute_time=1.0, backward_compute_time=2.0, activation_size=100.0, parameter_size=8";

    fn file(nodes: &[(&str, &str)], edges: &[(&str, &str)]) -> String {
        let nodes = nodes.iter().map(|(id, text)| format!("{id} -- {text} -- {COSTS}\n"));
        let edges = edges.iter().map(|(from, to)| format!("\t{from} -- {to}\n"));
        nodes.chain(edges).collect()
    }

    #[test]
    fn reads_nodes_in_any_order() {
        let text = file(
            &[("node10", "Conv2d(3, 4, kernel_size=(1, 1))"), ("node9", "ReLU -- odd"), ("node1", "Input0")],
            &[("node1", "node9"), ("node9", "node10")],
        );
        let graph = read(&text).unwrap();
        assert_eq!(graph.ops.iter().map(|op| op.name.as_str()).collect::<Vec<_>>(), ["node9", "node10"]);
        assert_eq!((graph.ops[1].op.as_str(), graph.ops[1].fwd_us, graph.ops[1].bwd_us), ("Conv2d", 1000.0, 2000.0));
        assert_eq!(graph.edges(), [(OpId(0), OpId(1))]);
        assert_eq!(graph.params[1].bytes, 8);
    }

    #[test]
    fn lists_and_stage_ids_and_unread_getitems() {
        let text = "a1 -- Split -- forward_compute_time=0.5, backward_compute_time=0, activation_size=[1.0; 2.0; 3.0], \
                    parameter_size=0 -- stage_id=3\na2 -- __getitem__(0) -- forward_compute_time=0, \
                    backward_compute_time=0, activation_size=7, parameter_size=0\n\ta1 -- a2\n";
        let graph = read(text).unwrap();
        assert_eq!((graph.ops.len(), graph.ops[0].out_bytes), (1, 6));
        assert!(graph.tensors[0].consumers.is_empty());
    }

    #[test]
    fn names_what_is_wrong() {
        let fails = |text: &str| read(text).unwrap_err().to_string();
        assert!(fails(&file(&[("a", "x"), ("a", "x")], &[])).contains("line 2: duplicate node `a`, first on line 1"));
        assert!(fails(&file(&[("a", "x")], &[("a", "b9")])).contains("line 2: edge names the unknown node `b9`"));
        assert!(fails(&file(&[("a", "x")], &[]).replace("=1.0", "=nan")).contains("forward_compute_time is `nan`"));
        assert!(fails(&file(&[("a", "x")], &[]).replace("=2.0", "=-2")).contains("backward_compute_time is `-2`"));
        assert!(fails(&file(&[("a", "x")], &[]).replace("=8", "=1e300")).contains("parameter_size"));
        assert!(fails(&file(&[("a", "x")], &[]).replace(", parameter_size=8", "")).contains("no parameter_size"));
        assert!(fails("hello\n").contains("line 1"));
        assert!(fails("\thello\n").contains("line 1"));
        assert!(fails("").contains("no ops"));
        let round = file(&[("a", "x"), ("b", "x"), ("c", "x")], &[("a", "b"), ("b", "c"), ("c", "b")]);
        assert!(fails(&round).contains("cycle: `c` -> `b`") || fails(&round).contains("cycle: `b` -> `c`"));
        assert!(fails(&file(&[("a", "x")], &[("a", "a")])).contains("cycle"));
    }
}
