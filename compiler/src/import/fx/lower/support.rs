//! Lists all operators of a program that pipec cannot lower.

use super::live::live;
use super::{complex, table};
use crate::import::fx::program::label;
use crate::import::fx::schema::Graph;
use crate::import::onnx::lower::support::{Missing, Unsupported};
use std::collections::BTreeMap;

/// Checks that every node can be lowered; the error lists all operators that cannot.
pub fn check(graph: &Graph) -> Result<(), Unsupported> {
    let mut missing = BTreeMap::new();
    gather(graph, &mut missing);
    if missing.is_empty() { Ok(()) } else { Err(Unsupported(missing.into_values().collect())) }
}

fn gather(graph: &Graph, missing: &mut BTreeMap<String, Missing>) {
    for node in live(graph) {
        let reason = match table::find(&node.target) {
            Some(_) => continue,
            None if complex::is_supported(&node.target) => continue,
            None => why(&node.target),
        };
        let operator = node.target.strip_prefix("torch.ops.").unwrap_or(&node.target).to_string();
        let entry = missing.entry(operator.clone());
        let first = || Missing {
            operator,
            count: 0,
            node: label(node),
            module: node.metadata.module.to_string(),
            line: node.metadata.line.to_string(),
            why: reason,
        };
        entry.or_insert_with(first).count += 1;
    }
}

fn why(target: &str) -> Option<&'static str> {
    Some(match table::name(target) {
        "cond" | "while_loop" | "scan" | "map_impl" => "control flow that depends on values",
        name if ["multinomial", "rrelu", "poisson", "binomial", "cauchy", "geometric", "log_normal", "random"]
            .iter()
            .any(|r| name.starts_with(r)) =>
        {
            "random numbers of this distribution are not implemented"
        }
        name if name.contains("quantize") => "quantised models cannot be trained",
        _ if target.starts_with("_operator.") || target.starts_with("torch.sym_") => {
            "size arithmetic that may not give an integer"
        }
        "linalg_cross" | "linalg_norm" | "linalg_matrix_power" => return None,
        name if name.starts_with("linalg_") => "matrix decompositions and inverses are not implemented",
        name if name.contains("fft_") || name.contains("complex") || name.contains("_as_real") || name == "imag" => {
            "complex numbers"
        }
        "nonzero" | "_unique2" | "unique_dim" | "masked_select" => "the size of its result depends on values",
        "item" | "_local_scalar_dense" => "a number that is read from a tensor at run time",
        _ if !target.starts_with("torch.ops.aten.") => "not an ATen operator",
        _ => return None,
    })
}
