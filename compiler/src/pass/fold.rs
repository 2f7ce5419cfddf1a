//! Constant folding: evaluates ops of constants with their reference kernels.

use super::Changed;
use crate::graph::{Graph, evaluate, order};
use crate::op::{Constant, Iota, NodeId, Op, Value};
use crate::tensor::Tensor;
use std::collections::HashMap;

/// Size limit of a folded constant, so that a small file cannot exhaust memory.
pub const LIMIT_BYTES: u64 = 1 << 20;

/// Folds every op of constants whose outputs fit [`LIMIT_BYTES`]. Symbolic shapes are folded after binding. If a kernel
/// fails, the op stays and the run reports the error.
pub fn fold(graph: &mut Graph) -> Changed {
    let mut constants: HashMap<Value, Tensor> = HashMap::new();
    let mut changed = false;
    for id in order::canonical(graph) {
        match &graph.node(id).op {
            Op::Constant(Constant { tensor }) => {
                constants.insert(Value { node: id, output: 0 }, tensor.clone());
                continue;
            }
            Op::Input(_) | Op::Parameter(_) | Op::State(_) => continue,
            Op::Iota(Iota { .. }) => {}
            _ if graph.inputs(id).is_empty() => continue,
            _ => {}
        }
        let inputs: Option<Vec<Tensor>> = graph.inputs(id).iter().map(|v| constants.get(v).cloned()).collect();
        let is_small = graph.node(id).facts.iter().all(|f| f.bytes().is_some_and(|b| b <= LIMIT_BYTES));
        let (Some(inputs), true) = (inputs, is_small) else { continue };
        let Ok(outputs) = evaluate::run(graph, id, &inputs) else { continue };
        replace(graph, id, outputs, &mut constants);
        changed = true;
    }
    Changed::from(changed)
}

fn replace(graph: &mut Graph, id: NodeId, outputs: Vec<Tensor>, constants: &mut HashMap<Value, Tensor>) {
    let (origin, name) = (graph.node(id).origin.clone(), graph.node(id).name.clone());
    let has_several_outputs = outputs.len() > 1;
    for (output, tensor) in outputs.into_iter().enumerate() {
        let constant = graph
            .add(Op::Constant(Constant { tensor: tensor.clone() }), &[], &origin)
            .expect("a constant takes no inputs");
        // The generated name may be taken by a copied node; the op's own name is free now.
        graph.node_mut(constant).name = if has_several_outputs { format!("{name}#{output}") } else { name.clone() };
        let value = Value { node: constant, output: 0 };
        constants.insert(value, tensor);
        graph.replace_uses(Value { node: id, output: output as u32 }, value);
    }
    graph.remove(id);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::verify::verify;
    use crate::graph::{Origin, Output};
    use crate::op::Unary;

    #[test]
    fn names_that_were_brought_along_stay_unique() {
        let mut graph = Graph::new("named");
        let constant =
            graph.add(crate::op::unary::scalar(crate::tensor::DType::F32, 1.0), &[], &Origin::default()).unwrap();
        // The name that the graph would generate for the third node.
        graph.node_mut(constant).name = "constant2".into();
        let value = |node| Value { node, output: 0 };
        let minus = graph.add(Op::Unary(Unary::Neg), &[value(constant)], &Origin::default()).unwrap();
        graph.outputs.push(Output { name: "one".into(), value: value(constant) });
        graph.outputs.push(Output { name: "minus".into(), value: value(minus) });
        assert_eq!(fold(&mut graph), Changed::Yes);
        verify(&graph).unwrap();
        assert_eq!(graph.node(graph.outputs[1].value.node).name, "neg1");
    }
}
