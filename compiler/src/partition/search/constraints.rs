//! Resolves user constraints (`--cut-after`, `--pin`): node names, module paths and op ids become sets of ops.

use crate::partition::search::fused_graph::FusedGraph;
use crate::partition::search::op_sets::neighbours;
use crate::plan::problem::{Problem, ProblemError};
use crate::profile::cost_graph::CostGraph;
use crate::text::name::short_name;
use crate::text::suggest::hint;

/// The number of stages, if replicas, cuts or in-flight limits are given. They must agree, and there must be devices
/// and ops for as many stages.
pub fn stages(problem: &Problem) -> Result<Option<usize>, ProblemError> {
    let cuts = problem.constraints.cut_after.as_ref().map(|names| names.len() + 1);
    let replicas = problem.constraints.replicas.as_ref().map(Vec::len);
    let caps = problem.in_flight.given().map(<[u32]>::len);
    let Some(stages) = cuts.or(replicas).or(caps) else { return Ok(None) };
    if let Some(replicas) = replicas.filter(|replicas| *replicas != stages) {
        return Err(ProblemError::Disagree { cuts: stages - 1, stages, replicas });
    }
    if let Some(caps) = caps.filter(|caps| *caps != stages) {
        return Err(ProblemError::Caps { caps, stages });
    }
    let (devices, ops) = (problem.cluster.devices(), problem.graph.ops.len());
    if stages as u64 > u64::from(devices) {
        return Err(ProblemError::TooManyReplicas { wanted: stages as u64, devices });
    }
    if stages > ops {
        return Err(ProblemError::TooManyStages { stages, ops });
    }
    Ok(Some(stages))
}

/// Returns an order of the fused ops and the stage ends in it, for cuts after each of `names`.
///
/// A stage contains the named ops and all their predecessors that are in no earlier stage; the last stage contains the
/// rest. Names may come in any order and refer to the unfused graph; a fused op stands for its leader.
pub fn resolve(
    graph: &CostGraph,
    joined: &FusedGraph<'_>,
    names: &[String],
) -> Result<(Vec<u32>, Vec<usize>), ProblemError> {
    let [before, _] = neighbours(graph);
    let mut sets: Vec<(usize, &String, Vec<bool>)> = Vec::new();
    for name in names {
        let mut inside = vec![false; graph.ops.len()];
        let mut todo: Vec<usize> =
            named(joined.full, "--cut-after", name)?.into_iter().map(|op| joined.place(op)).collect();
        while let Some(op) = todo.pop() {
            if !std::mem::replace(&mut inside[op], true) {
                todo.extend(before[op].iter().copied());
            }
        }
        sets.push((inside.iter().filter(|inside| **inside).count(), name, inside));
    }
    sets.sort_by_key(|(size, ..)| *size);
    let mut placed = vec![false; graph.ops.len()];
    let mut order: Vec<u32> = Vec::with_capacity(graph.ops.len());
    let mut ends = vec![0];
    for (_, name, inside) in sets {
        for op in 0..graph.ops.len() {
            if inside[op] && !std::mem::replace(&mut placed[op], true) {
                order.push(op as u32);
            }
        }
        if ends.last() == Some(&order.len()) {
            let why = "an earlier cut already covers it";
            return Err(ProblemError::EmptyCut { name: short_name(name), why });
        }
        if order.len() == graph.ops.len() {
            return Err(ProblemError::EmptyCut { name: short_name(name), why: "the stage after it would be empty" });
        }
        ends.push(order.len());
    }
    order.extend((0..graph.ops.len() as u32).filter(|&op| !placed[op as usize]));
    ends.push(order.len());
    Ok((order, ends))
}

/// Notes for names that only match ops which are fused into others, and so move the cut.
pub fn moved(joined: &FusedGraph<'_>, names: &[String]) -> Vec<String> {
    let mut notes = Vec::new();
    for name in names {
        let ops = named(joined.full, "--cut-after", name).unwrap_or_default();
        let leaders: Vec<u32> = ops.iter().map(|&op| joined.leader(joined.place(op) as u32)).collect();
        if ops.iter().zip(&leaders).any(|(&op, &leader)| op == leader as usize) {
            continue;
        }
        if let Some(&last) = leaders.iter().max() {
            let with = short_name(&joined.full.ops[last as usize].name);
            let with = if with.is_empty() { last.to_string() } else { with };
            notes.push(format!(
                "`--cut-after {}`: it depends on parameters only and is fused with `{with}`; the cut is after that",
                short_name(name)
            ));
        }
    }
    notes
}

/// The fused ops matched by each pin, with their stage.
pub fn pinned(joined: &FusedGraph<'_>, pins: &[(String, u32)]) -> Result<Vec<(u32, usize)>, ProblemError> {
    let mut all: Vec<(u32, usize)> = Vec::new();
    for (name, stage) in pins {
        for op in named(joined.full, "--pin", name)? {
            all.push((joined.place(op) as u32, *stage as usize));
        }
    }
    all.sort_unstable();
    all.dedup();
    if let Some(pair) = all.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        let op = &joined.full.ops[joined.leader(pair[0].0) as usize];
        let what = format!("`--pin` puts `{}` in stage {} and in stage {}", short_name(&op.name), pair[0].1, pair[1].1);
        return Err(ProblemError::Unmet { what });
    }
    Ok(all)
}

// Node names take precedence over op ids, and op ids over modules, so that a node named "12" can be addressed.
fn named(graph: &CostGraph, flag: &'static str, name: &str) -> Result<Vec<usize>, ProblemError> {
    let every = |matches: &dyn Fn(&str, &str) -> bool| -> Vec<usize> {
        let ops = graph.ops.iter().enumerate();
        ops.filter(|(_, op)| matches(&op.name, &op.module)).map(|(at, _)| at).collect()
    };
    let nodes = every(&|node, _| node == name);
    if !nodes.is_empty() {
        return Ok(nodes);
    }
    if let Some(id) = name.parse::<usize>().ok().filter(|&id| id < graph.ops.len()) {
        return Ok(vec![id]);
    }
    let beneath = |module: &str| {
        let rest = module.strip_prefix(name);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '/']))
    };
    let modules = every(&|_, module| beneath(module));
    if !modules.is_empty() && !name.is_empty() {
        return Ok(modules);
    }
    let hint = hint(name, graph.ops.iter().flat_map(|op| [op.name.as_str(), op.module.as_str()]));
    Err(ProblemError::UnknownName { flag, name: short_name(name), hint })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::partition::bounds::test_graphs::of_edges;

    fn graph() -> CostGraph {
        let mut graph = of_edges(&[(0, 1), (0, 2), (1, 3), (2, 3)], &[1; 4]);
        let names = [("conv", "stem"), ("left", "block.0"), ("right", "block.1"), ("add", "")];
        for (op, (name, module)) in graph.ops.iter_mut().zip(names) {
            (op.name, op.module) = (name.into(), module.into());
        }
        graph
    }

    fn cut(names: &[&str]) -> Result<(Vec<u32>, Vec<usize>), ProblemError> {
        let graph = graph();
        resolve(&graph, &FusedGraph::of(&graph), &names.iter().map(|name| name.to_string()).collect::<Vec<_>>())
    }

    #[test]
    fn names_ids_and_modules() {
        assert_eq!(cut(&["conv"]), Ok((vec![0, 1, 2, 3], vec![0, 1, 4])));
        assert_eq!(cut(&["2", "stem"]), Ok((vec![0, 2, 1, 3], vec![0, 1, 2, 4])));
        assert_eq!(cut(&["block"]), Ok((vec![0, 1, 2, 3], vec![0, 3, 4])));
    }

    #[test]
    fn what_cannot_be_cut_is_said() {
        assert!(cut(&["cnov"]).unwrap_err().to_string().contains("did you mean `conv`"));
        assert!(cut(&["zzzzzzzzz"]).unwrap_err().to_string().ends_with("of that name"));
        assert!(matches!(cut(&["add"]), Err(ProblemError::EmptyCut { .. })));
        assert!(matches!(cut(&["left", "block.0"]), Err(ProblemError::EmptyCut { .. })));
        assert!(matches!(cut(&[""]), Err(ProblemError::UnknownName { .. })));
    }
}
