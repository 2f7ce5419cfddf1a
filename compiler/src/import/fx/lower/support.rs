//! Which operators of a program pipec cannot lower, all of them at once.

use super::table;
use crate::import::fx::program::label;
use crate::import::fx::schema::{Argument, Graph, Node};
use crate::import::onnx::lower::support::{Missing, Unsupported};
use std::collections::BTreeMap;

/// The higher-order operator that runs a graph with or without gradients.
pub const SET_GRAD: &str = "torch.ops.higher_order.wrap_with_set_grad_enabled";

/// Whether every node can be lowered.
pub fn check(graph: &Graph) -> Result<(), Unsupported> {
    let mut missing = BTreeMap::new();
    gather(graph, &mut missing);
    if missing.is_empty() { Ok(()) } else { Err(Unsupported(missing.into_values().collect())) }
}

fn gather(graph: &Graph, missing: &mut BTreeMap<String, Missing>) {
    for node in &graph.nodes {
        for input in &node.inputs {
            if let Argument::AsGraph(inner) = &input.arg {
                gather(&inner.graph, missing);
            }
        }
        let why = match table::find(&node.target) {
            Some(_) if draws(node) => Some("it draws random numbers; export with a probability of 0"),
            Some(_) => continue,
            None if node.target == SET_GRAD => continue,
            None => why(&node.target),
        };
        let operator = node.target.strip_prefix("torch.ops.").unwrap_or(&node.target).to_string();
        let entry = missing.entry(operator.clone());
        entry.or_insert_with(|| Missing { operator, count: 0, node: label(node), why }).count += 1;
    }
}

/// Whether the node drops elements in a way that no core op does.
fn draws(node: &Node) -> bool {
    let argument = |name: &str| node.inputs.iter().find(|input| input.name == name).map(|input| &input.arg);
    let positive = |name: &str, default: f64| match argument(name) {
        Some(Argument::AsFloat(p)) => p.value() != Some(0.0),
        Some(Argument::AsInt(p)) => *p != 0,
        _ => default != 0.0,
    };
    let trains = || !matches!(argument("train"), Some(Argument::AsBool(false)));
    let operator = table::name(&node.target);
    match operator.trim_end_matches('_') {
        "alpha_dropout" | "feature_dropout" | "feature_alpha_dropout" => trains() && positive("p", 0.5),
        _ => false,
    }
}

fn why(target: &str) -> Option<&'static str> {
    Some(match table::name(target) {
        "cond" | "while_loop" | "scan" | "map_impl" => "control flow: what runs would depend on values",
        name if ["rand", "rrelu", "bernoulli", "normal", "uniform", "multinomial"]
            .iter()
            .any(|r| name.starts_with(r)) =>
        {
            "random numbers"
        }
        name if name.contains("quantize") => "quantised models cannot be trained",
        _ if target.starts_with("_operator.") || target.starts_with("torch.sym_") => {
            "arithmetic on sizes that may give no whole number"
        }
        name if name.starts_with("linalg_") => "a decomposition or an inverse of matrices has no core op",
        name if name.starts_with("_fft_") || name.contains("complex") => "complex numbers",
        "nonzero" | "_unique2" | "unique_dim" | "masked_select" => "the size of its result would depend on values",
        "item" | "_local_scalar_dense" => "a number that is read from a tensor while the model runs",
        "as_strided" => "elements picked by their place in memory; use view, slice or unfold",
        _ if !target.starts_with("torch.ops.aten.") => "not an operator of ATen",
        _ => return None,
    })
}
