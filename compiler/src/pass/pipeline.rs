//! The order of the passes; the verifier runs after each.

use super::fragment::Fragment;
use super::{Changed, attention, canonicalise, cse, dce, fold};
use crate::graph::verify::{VerifyError, verify};
use crate::graph::{Graph, Output};
use crate::pass::concat_of_pads;
use thiserror::Error;

/// A pass broke the graph, which is a bug of pipec.
#[derive(Debug, Error)]
#[error("bug in pipec: the graph is not valid after the pass `{pass}`: {fault}")]
pub struct PassBug {
    pub pass: &'static str,
    pub fault: VerifyError,
}

type Pass = (&'static str, fn(&mut Graph) -> Changed);

/// Passes after import, before ops are numbered. Attention is recognised after `cse`, which merges equal masks.
const CANONICAL: [Pass; 4] = [
    ("canonicalise", canonicalise::canonicalise),
    ("cse", cse::cse),
    ("attention", attention::attention),
    ("dce", dce::dce),
];

/// Passes for a backward graph at fixed sizes.
const CONCRETE: [Pass; 4] =
    [("fold", fold::fold), ("cse", cse::cse), ("join", concat_of_pads::join), ("dce", dce::dce)];

/// Passes for a forward fragment. Not `cse`: merging ops that only share a stage under some cuts would make the order
/// of gradient sums depend on the cut.
const FORWARD: [Pass; 2] = [("fold", fold::fold), ("dce", dce::dce)];

/// Canonicalises an imported graph.
pub fn canonical(graph: &mut Graph) -> Result<(), PassBug> {
    run(graph, &CANONICAL)
}

/// Simplifies a backward graph, or a graph that is only evaluated, at fixed sizes.
pub fn concrete(graph: &mut Graph) -> Result<(), PassBug> {
    run(graph, &CONCRETE)
}

/// Simplifies a forward fragment at fixed sizes. Sent values are live, like outputs.
pub fn forward(fragment: &mut Fragment) -> Result<(), PassBug> {
    let graph = &mut fragment.graph;
    let results = graph.outputs.len();
    let sent = fragment.sent.iter().map(|s| Output { name: String::new(), value: s.local });
    graph.outputs.extend(sent);
    run(graph, &FORWARD)?;
    for (sent, output) in fragment.sent.iter_mut().zip(graph.outputs.drain(results..)) {
        sent.local = output.value;
    }
    Ok(())
}

fn run(graph: &mut Graph, passes: &[Pass]) -> Result<(), PassBug> {
    for (pass, apply) in passes {
        if apply(graph) == Changed::Yes {
            verify(graph).map_err(|fault| PassBug { pass, fault })?;
        }
    }
    Ok(())
}
