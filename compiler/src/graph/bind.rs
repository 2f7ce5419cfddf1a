//! Binds symbolic dims to numbers.

use super::{AddError, Graph, order};
use crate::op::NodeId;
use crate::op::table::{dims_mut, rule};
use crate::tensor::dim::{Bindings, DimError};
use crate::tensor::fact::Fact;
use thiserror::Error;

#[derive(Debug, Error, PartialEq)]
pub enum BindError {
    #[error("node `{node}`: {fault}")]
    Dim { node: String, fault: DimError },
    #[error("node `{node}`: {fault}")]
    Fact { node: String, fault: Box<AddError> },
}

/// Substitutes symbols in all ops and facts. Node ids are unchanged.
pub fn bind(graph: &Graph, bindings: &Bindings) -> Result<Graph, BindError> {
    let mut bound = graph.clone();
    for id in order::canonical(graph) {
        let name = bound.node(id).label().to_string();
        let node = bound.node_mut(id);
        for dim in dims_mut(&mut node.op) {
            *dim = dim.substitute(bindings).map_err(|fault| BindError::Dim { node: name.clone(), fault })?;
        }
        let facts: Vec<Fact> = bound.inputs(id).into_iter().map(|v| bound.fact(v).clone()).collect();
        let inferred =
            rule(&bound.node(id).op).infer(&facts.iter().collect::<Vec<_>>()).map_err(|fault| BindError::Fact {
                node: name.clone(),
                fault: Box::new(AddError { op: rule(&bound.node(id).op).name().to_string(), fault }),
            })?;
        bound.node_mut(id).facts = inferred;
    }
    Ok(bound)
}

/// The symbols that remain in facts, sorted.
pub fn symbols(graph: &Graph) -> Vec<String> {
    let mut symbols: Vec<String> = graph
        .ids()
        .flat_map(|id: NodeId| graph.node(id).facts.iter().flat_map(|f| f.shape.iter().flat_map(|d| d.symbols())))
        .collect();
    symbols.sort();
    symbols.dedup();
    symbols
}
