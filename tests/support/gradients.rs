//! Gradients of a graph with the reference kernels.

use compiler::graph::evaluate::evaluate;
use compiler::graph::{Graph, order};
use compiler::op::Op;
use compiler::pass::backward::{Made, Read, ReceivedGradients, backward};
use compiler::pass::fragment::fragments;
use compiler::pass::loss::LOSS;
use compiler::pass::pipeline;
use compiler::tensor::Tensor;
use std::collections::BTreeMap;

/// The loss, which is the output of that name or the only one, and the gradients by parameter. The forward and the
/// backward pass may have different weights; `inputs` has the forward weights.
pub fn gradients(
    graph: &Graph,
    inputs: &BTreeMap<String, Tensor>,
    backward_weights: &BTreeMap<String, Tensor>,
) -> (f64, BTreeMap<String, Vec<f64>>) {
    let stages = order::numbered(graph).into_iter().map(|id| (id, 0)).collect();
    let mut fragment = fragments(graph, &stages, 1).unwrap().remove(0);
    pipeline::forward(&mut fragment).unwrap();
    let outputs = &fragment.graph.outputs;
    let loss = outputs.iter().find(|output| output.name == LOSS).unwrap_or(&outputs[0]).value;
    let backward_pass = backward(&fragment, Some(loss), &ReceivedGradients::new()).unwrap();
    let values = evaluate(&fragment.graph, inputs).unwrap();
    let mut backward_inputs = backward_weights.clone();
    for (node, read) in &backward_pass.reads {
        let Read::Saved(value) = read else { panic!("one stage receives nothing") };
        let Op::Input(input) = &backward_pass.graph.node(*node).op else { panic!("reads are inputs") };
        backward_inputs.insert(input.name.clone(), values[value].clone());
    }
    let results = evaluate(&backward_pass.graph, &backward_inputs).unwrap();
    let mut sums: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for (role, output) in backward_pass.output_roles.iter().zip(&backward_pass.graph.outputs) {
        let Made::Parameter(term) = role else { continue };
        let Op::Parameter(p) = &fragment.graph.node(fragment.parameter_terms[*term].parameter).op else { continue };
        let term = results[&output.value].to_f64();
        match sums.get_mut(&p.name) {
            Some(sum) => sum.iter_mut().zip(term).for_each(|(sum, term)| *sum += term),
            None => drop(sums.insert(p.name.clone(), term)),
        }
    }
    (values[&loss].to_f64()[0], sums)
}
