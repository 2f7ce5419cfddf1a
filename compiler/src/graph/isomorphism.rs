//! Graph isomorphism, ignoring node names.

use super::Graph;
use crate::op::{NodeId, Value};
use std::collections::HashMap;

/// The first difference of two graphs; `None` if they are isomorphic: a bijection of nodes preserves ops, facts, input
/// order, outputs and averages. Nodes that no output or average depends on are only counted.
pub fn difference(a: &Graph, b: &Graph) -> Option<String> {
    if a.outputs.len() != b.outputs.len() || a.averages.len() != b.averages.len() {
        return Some(format!(
            "{} results and {} running averages, expected {} and {}",
            a.outputs.len(),
            a.averages.len(),
            b.outputs.len(),
            b.averages.len()
        ));
    }
    if a.len() != b.len() {
        return Some(format!("{} nodes, expected {}", a.len(), b.len()));
    }
    let mut walk = Walk { a, b, forward: HashMap::new(), backward: HashMap::new(), queue: Vec::new() };
    for (x, y) in a.outputs.iter().zip(&b.outputs) {
        if x.name != y.name {
            return Some(format!("result `{}`, expected `{}`", x.name, y.name));
        }
        if let Some(difference) = walk.pair(x.value, y.value) {
            return Some(difference);
        }
    }
    for (x, y) in a.averages.iter().zip(&b.averages) {
        let (state_x, state_y) = (Value { node: x.state, output: 0 }, Value { node: y.state, output: 0 });
        if x.keep != y.keep {
            return Some(format!("a running average keeps {}, expected {}", x.keep, y.keep));
        }
        if let Some(difference) = walk.pair(state_x, state_y).or_else(|| walk.pair(x.sample, y.sample)) {
            return Some(difference);
        }
    }
    walk.run()
}

struct Walk<'a> {
    a: &'a Graph,
    b: &'a Graph,
    forward: HashMap<NodeId, NodeId>,
    backward: HashMap<NodeId, NodeId>,
    queue: Vec<(NodeId, NodeId)>,
}

impl Walk<'_> {
    fn pair(&mut self, x: Value, y: Value) -> Option<String> {
        let describe = |g: &Graph, v: Value| format!("%{}#{}", g.node(v.node).name, v.output);
        if x.output != y.output {
            return Some(format!("{}, against {}", describe(self.a, x), describe(self.b, y)));
        }
        match (self.forward.get(&x.node), self.backward.get(&y.node)) {
            (None, None) => {
                self.forward.insert(x.node, y.node);
                self.backward.insert(y.node, x.node);
                self.queue.push((x.node, y.node));
                None
            }
            (Some(to), Some(from)) if *to == y.node && *from == x.node => None,
            _ => Some(format!("{} and {} are in different positions", describe(self.a, x), describe(self.b, y))),
        }
    }

    fn run(&mut self) -> Option<String> {
        while let Some((x, y)) = self.queue.pop() {
            let (nx, ny) = (self.a.node(x), self.b.node(y));
            if nx.op != ny.op || nx.facts != ny.facts {
                return Some(format!("%{} is {:?}, %{} is {:?}", nx.name, nx.op, ny.name, ny.op));
            }
            let (ix, iy) = (self.a.inputs(x), self.b.inputs(y));
            if ix.len() != iy.len() {
                return Some(format!("%{} has {} inputs, %{} has {}", nx.name, ix.len(), ny.name, iy.len()));
            }
            for (vx, vy) in ix.into_iter().zip(iy) {
                if let Some(difference) = self.pair(vx, vy) {
                    return Some(difference);
                }
            }
        }
        None
    }
}
