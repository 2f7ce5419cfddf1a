//! A custom partitioner in Rust: stages with equal bytes of weights, for devices with little memory.
//!
//! ```text
//! cargo run -p compiler --example my_partitioner
//! ```
//!
//! A partitioner assigns ops to stages. The planner adds in-flight limits, memory, predicted times and the lower bound, and the
//! independent plan checker verifies the result. A bad rule gives a slow plan, never a wrong one.

use compiler::cluster::read::levels;
use compiler::import::pipedream;
use compiler::partition::options::PlannerOptions;
use compiler::partition::partitioners::Partitioner;
use compiler::partition::planner::plan;
use compiler::plan::Plan;
use compiler::plan::problem::{CostModel, Problem};
use compiler::profile::cost_graph::CostGraph;
use std::error::Error;
use std::fmt::Write;

/// Assigns ops in order so that all stages have equal weights.
fn by_weights(graph: &CostGraph, stages: u32) -> Vec<(String, u32)> {
    let total: u64 = graph.ops.iter().map(|op| op.param_bytes).sum();
    let mut assigned = 0;
    let stage_of = |op: &compiler::profile::cost_graph::OpCost| {
        let middle = assigned + op.param_bytes / 2;
        assigned += op.param_bytes;
        (op.id.to_string(), (middle * u64::from(stages) / total.max(1)).min(u64::from(stages) - 1) as u32)
    };
    graph.ops.iter().map(stage_of).collect()
}

/// A chain of layers in the format of PipeDream's published profiles: the first are slow, the last are large.
fn layers() -> Result<CostGraph, Box<dyn Error>> {
    let mut text = String::new();
    for (at, (ms, megabytes)) in [(8, 1), (8, 1), (6, 2), (4, 4), (2, 8), (1, 16)].into_iter().enumerate() {
        writeln!(
            text,
            "node{at} -- Layer -- forward_compute_time={ms}, backward_compute_time={}, activation_size=1000000.0, parameter_size={}.0",
            2 * ms,
            megabytes * 1_000_000
        )?;
    }
    (1..6).try_for_each(|at| writeln!(text, "\tnode{} -- node{at}", at - 1))?;
    Ok(pipedream::read(&text)?)
}

/// The plan for four devices on one link: with pinned stages, or the planner's best.
fn plan_with(pins: Vec<(String, u32)>) -> Result<Plan, Box<dyn Error>> {
    let mut problem = Problem::new(layers()?, levels("2:10GB/s")?, CostModel::Pipec);
    problem.constraints.no_replication = true;
    problem.constraints.pins = pins;
    Ok(plan(&problem, &PlannerOptions { partitioner: Partitioner::Pipec, ..PlannerOptions::default() })?.plan)
}

fn main() -> Result<(), Box<dyn Error>> {
    for (name, plan) in
        [("equal weights", plan_with(by_weights(&layers()?, 2))?), ("the planner", plan_with(Vec::new())?)]
    {
        let of = |stage: &compiler::plan::Stage| {
            format!("{:?}: {} MB of weights", stage.ops, stage.memory.weights / 1_000_000)
        };
        let stages: Vec<String> = plan.stages.iter().map(of).collect();
        println!("{name}: {:.1} ms per minibatch; {}", plan.predicted.minibatch_us / 1e3, stages.join("; "));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn its_stages_weigh_the_same() {
        let plan = plan_with(by_weights(&layers().unwrap(), 2)).unwrap();
        let weights: Vec<u64> = plan.stages.iter().map(|stage| stage.memory.weights).collect();
        assert_eq!(weights, [16_000_000, 16_000_000]);
        assert_eq!(plan.stages[1].ops, [(5, 6)]);
    }

    #[test]
    fn the_planner_is_faster_and_heavier() {
        let (custom, best) = (plan_with(by_weights(&layers().unwrap(), 2)).unwrap(), plan_with(Vec::new()).unwrap());
        assert!(best.predicted.minibatch_us < custom.predicted.minibatch_us);
        let max_weights = |plan: &Plan| plan.stages.iter().map(|stage| stage.memory.weights).max();
        assert!(max_weights(&best) > max_weights(&custom));
        assert!(best.lower_bound_us <= best.predicted.minibatch_us);
    }
}
