//! Checks of model-local functions: no recursion, and a bounded size after inlining.
//!
//! Sixty functions that each call the previous one twice take 5 KB of file and expand to 10^18 nodes. The expanded size
//! is therefore computed before anything is inlined.

use std::collections::HashMap;

use crate::import::onnx::check_graph::each_node;
use crate::import::onnx::error::Fault;
use crate::import::onnx::proto::{FunctionProto, NodeProto};

/// Maximum number of nodes after all function calls are inlined.
pub const INLINE_BUDGET: u64 = 1_000_000;

type Key<'a> = (&'a str, &'a str, &'a str);

pub fn check(functions: &[FunctionProto], main: &[NodeProto], faults: &mut Vec<Fault>) {
    if functions.is_empty() {
        return;
    }
    let mut index: HashMap<Key<'_>, usize> = HashMap::new();
    for (at, function) in functions.iter().enumerate() {
        if index.insert((function.domain(), function.name(), function.overload()), at).is_some() {
            faults.push(Fault::DuplicateFunction { name: full_name(function) });
        }
    }
    let calls = |nodes: &[NodeProto]| {
        let (mut node_count, mut callees) = (0_u64, Vec::new());
        each_node(nodes, &mut |node| match index.get(&(node.domain(), node.op_type(), node.overload())) {
            Some(&callee) => callees.push(callee),
            None => node_count += 1,
        });
        (node_count, callees)
    };
    let bodies: Vec<(u64, Vec<usize>)> = functions.iter().map(|function| calls(&function.node)).collect();
    match sizes(&bodies) {
        Ok(sizes) => {
            let (node_count, callees) = calls(main);
            if callees.iter().fold(node_count, |sum, callee| sum.saturating_add(sizes[*callee]))
                > INLINE_BUDGET.max(node_count)
            {
                faults.push(Fault::Expansion { limit: INLINE_BUDGET });
            }
        }
        Err(cycle) => {
            let functions = cycle.into_iter().map(|at| full_name(&functions[at])).collect();
            faults.push(Fault::RecursiveFunction { functions });
        }
    }
}

fn full_name(function: &FunctionProto) -> String {
    format!("{}.{}", function.domain(), function.name())
}

/// Number of nodes of each function after inlining, saturating. `Err` contains a cycle of calls.
///
/// Iterative depth-first search with an explicit stack, since call chains can be as long as the list of functions.
fn sizes(bodies: &[(u64, Vec<usize>)]) -> Result<Vec<u64>, Vec<usize>> {
    #[derive(Clone, Copy, PartialEq)]
    enum State {
        New,
        Open,
        Done,
    }
    let mut state = vec![State::New; bodies.len()];
    let mut sizes = vec![0_u64; bodies.len()];
    for start in 0..bodies.len() {
        if state[start] != State::New {
            continue;
        }
        state[start] = State::Open;
        // Functions on the stack, each with its number of visited calls.
        let mut stack = vec![(start, 0_usize)];
        while let Some((at, done)) = stack.last_mut() {
            let at = *at;
            let Some(&callee) = bodies[at].1.get(*done) else {
                let callee_nodes = bodies[at].1.iter().fold(0_u64, |sum, callee| sum.saturating_add(sizes[*callee]));
                sizes[at] = callee_nodes.saturating_add(bodies[at].0);
                state[at] = State::Done;
                stack.pop();
                continue;
            };
            *done += 1;
            match state[callee] {
                State::Done => {}
                State::New => {
                    state[callee] = State::Open;
                    stack.push((callee, 0));
                }
                State::Open => {
                    let ring = stack.iter().map(|(at, _)| *at).skip_while(|at| *at != callee);
                    return Err(ring.collect());
                }
            }
        }
    }
    Ok(sizes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(name: &str) -> NodeProto {
        NodeProto { op_type: Some(name.into()), domain: Some("local".into()), ..Default::default() }
    }

    fn function(name: &str, body: &[&str]) -> FunctionProto {
        FunctionProto {
            name: Some(name.into()),
            domain: Some("local".into()),
            node: body.iter().map(|op| call(op)).collect(),
            ..Default::default()
        }
    }

    fn faults(functions: &[FunctionProto], main: &[&str]) -> Vec<String> {
        let main: Vec<NodeProto> = main.iter().map(|op| call(op)).collect();
        let mut faults = Vec::new();
        check(functions, &main, &mut faults);
        faults.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn rings_and_twins_are_named() {
        let ring = [function("f", &["g", "Relu"]), function("g", &["h"]), function("h", &["g"])];
        assert_eq!(faults(&ring, &["f"]), ["recursive function: `local.g` -> `local.h` -> `local.g`"]);
        let twins = [function("f", &["Relu"]), function("f", &["Relu"])];
        assert_eq!(faults(&twins, &[]), ["duplicate function `local.f`"]);
    }

    #[test]
    fn sixty_doublings_are_refused_and_a_deep_chain_is_not() {
        let name = |level: usize| format!("f{level}");
        let doubling: Vec<FunctionProto> = (0..60)
            .map(|level| match level {
                0 => function(&name(0), &["Relu"]),
                _ => function(&name(level), &[&name(level - 1), &name(level - 1)]),
            })
            .collect();
        assert_eq!(faults(&doubling, &["f59"]), ["the inlined functions of the model have more than 1000000 nodes"]);
        assert!(faults(&doubling, &["f10"]).is_empty());
        let chain: Vec<FunctionProto> = (0..100_000).map(|level| function(&name(level), &[&name(level + 1)])).collect();
        assert!(faults(&chain, &["f0"]).is_empty());
    }
}
