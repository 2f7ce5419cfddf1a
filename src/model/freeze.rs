//! Freezes parameters: they become states, which are not trained.

use crate::error::Error;
use crate::model::list_names;
use compiler::graph::Graph;
use compiler::op::{NodeId, Op, Parameter, State};
use compiler::text::name::short_name;
use compiler::text::suggest::nearest;

/// Turns the parameters that match the patterns into states: exact names, or `prefix*`.
pub fn freeze(graph: &mut Graph, patterns: &[String]) -> Result<(), Error> {
    if patterns.is_empty() {
        return Ok(());
    }
    let parameters: Vec<(NodeId, Parameter)> = graph
        .ids()
        .filter_map(|id| match &graph.node(id).op {
            Op::Parameter(parameter) => Some((id, parameter.clone())),
            _ => None,
        })
        .collect();
    let matches = |pattern: &str, name: &str| match pattern.strip_suffix('*') {
        Some(prefix) => name.starts_with(prefix),
        None => name == pattern,
    };
    for pattern in patterns {
        if !parameters.iter().any(|(_, parameter)| matches(pattern, &parameter.name)) {
            return Err(unknown_parameter(pattern, &parameters));
        }
    }
    let mut remaining = parameters.len();
    for (id, parameter) in parameters {
        if patterns.iter().any(|pattern| matches(pattern, &parameter.name)) {
            graph.node_mut(id).op = Op::State(State { name: parameter.name, fact: parameter.fact });
            remaining -= 1;
        }
    }
    match remaining {
        0 => Err(Error::input("`--freeze` leaves no parameter to train")
            .with_help("freeze fewer, for example `--freeze 'encoder.*'`; `pipec eval` runs a model without training")),
        _ => Ok(()),
    }
}

fn unknown_parameter(pattern: &str, parameters: &[(NodeId, Parameter)]) -> Error {
    let mut names: Vec<String> = parameters.iter().map(|(_, parameter)| parameter.name.clone()).collect();
    names.sort();
    let failure = Error::input(format!("`--freeze`: the model has no parameter `{}`", short_name(pattern)));
    match nearest(pattern, names.iter().map(String::as_str)) {
        Some(near) => failure.with_help(format!("did you mean `{}`?", short_name(near))),
        None => {
            failure.with_help(format!("it has {}; `prefix*` matches all names that start with it", list_names(&names)))
        }
    }
}
