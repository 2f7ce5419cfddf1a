//! Parameters that are not trained: they become states, which are kept as they are.

use crate::failure::Failure;
use crate::initial::listed;
use compiler::graph::Graph;
use compiler::import::onnx::name::shown;
use compiler::op::{NodeId, Op, Parameter, State};

/// Turns the parameters that the patterns name into states: exact names, or `prefix*`.
pub fn freeze(graph: &mut Graph, patterns: &[String]) -> Result<(), Failure> {
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
            return Err(unknown(pattern, &parameters));
        }
    }
    let mut left = parameters.len();
    for (id, parameter) in parameters {
        if patterns.iter().any(|pattern| matches(pattern, &parameter.name)) {
            graph.node_mut(id).op = Op::State(State { name: parameter.name, fact: parameter.fact });
            left -= 1;
        }
    }
    match left {
        0 if !patterns.is_empty() => Err(Failure::input("`--freeze` leaves no parameter to train")),
        _ => Ok(()),
    }
}

fn unknown(pattern: &str, parameters: &[(NodeId, Parameter)]) -> Failure {
    let mut names: Vec<String> = parameters.iter().map(|(_, parameter)| parameter.name.clone()).collect();
    names.sort_by_key(|name| (distance(pattern, name), name.clone()));
    let failure = Failure::input(format!("`--freeze`: the model has no parameter `{}`", shown(pattern)));
    match names.first() {
        Some(near) if distance(pattern, near) <= near.chars().count() / 2 => {
            failure.help(format!("did you mean `{}`?", shown(near)))
        }
        _ => failure.help(format!("it has {}; `prefix*` names all that start so", listed(&names))),
    }
}

/// Characters that must be put in, taken out or changed to make one name the other.
fn distance(from: &str, to: &str) -> usize {
    let to: Vec<char> = to.chars().collect();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (at, left) in from.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = at + 1;
        for (column, right) in to.iter().enumerate() {
            let change = diagonal + usize::from(left != *right);
            diagonal = row[column + 1];
            row[column + 1] = change.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[to.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_as_far_apart_as_their_edits() {
        assert_eq!(distance("fc.weight", "fc.weight"), 0);
        assert_eq!(distance("fc.wieght", "fc.weight"), 2);
        assert_eq!(distance("", "abc"), 3);
    }
}
