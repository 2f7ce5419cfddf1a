//! Input files of PipeDream's tools (<https://github.com/msr-fiddle/pipedream>). The profile `graph.txt` has
//! ` -- stage_id=K` at each node, as its optimizer writes it for the model generator. The runtime's configuration is
//! `conf.json`.
//!
//! ```text
//! {"module_to_stage_map": [0, 1, 1], "stage_to_rank_map": {"0": [0, 1, 2], "1": [3]}}
//! ```
//!
//! The module map has one entry per generated stage module and one for the loss, which belongs to the last stage.
//! PipeDream stashes weights and distributes minibatches round-robin to any number of replicas. Only several stages per
//! device and other schedules are not supported.

use super::refusal::Refusal;
use super::{Bundle, ExportInput, fit};
use crate::plan::schedule::Schedule;
use crate::profile::cost_graph::CostGraph;
use crate::text::name::display_name;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};

pub fn write(input: &ExportInput<'_>) -> Result<Bundle, Refusal> {
    let plan = input.plan;
    fit::is_of_a_model(plan)?;
    fit::shares_nothing(plan, "PipeDream")?;
    fit::schedules(
        plan,
        "PipeDream",
        &[Schedule::OneFOneBRr, Schedule::Gpipe, Schedule::OneFOneB],
        "1f1b-rr, and 1f1b and gpipe, which flush minibatches",
        "1f1b",
    )?;
    let costs = input.costs.ok_or(Refusal::Model { what: "the op costs are not available".to_string() })?;
    let mut stage_of = vec![0u32; costs.ops.len()];
    for stage in &plan.stages {
        for op in stage.op_ids() {
            if let Some(entry) = stage_of.get_mut(op as usize) {
                *entry = stage.id.0;
            }
        }
    }
    let stages = 0..plan.stages.len() as u32;
    let modules: Vec<u32> = stages.chain(plan.stages.last().map(|stage| stage.id.0)).collect();
    // serde_json sorts the keys as strings, unlike the published files.
    let ranks: BTreeMap<String, &[u32]> =
        plan.stages.iter().map(|stage| (stage.id.0.to_string(), stage.devices.as_slice())).collect();
    let conf = json!({"module_to_stage_map": modules, "stage_to_rank_map": ranks});
    let conf = serde_json::to_string_pretty(&conf).unwrap_or_default() + "\n";
    Ok(Bundle::of("graph.txt", graph(costs, &stage_of)).with("conf.json", conf))
}

/// The costs as a profile, with times in milliseconds.
fn graph(costs: &CostGraph, stage_of: &[u32]) -> String {
    let mut text = String::new();
    for (op, stage) in costs.ops.iter().zip(stage_of) {
        text += &format!(
            "node{} -- {} -- forward_compute_time={:?}, backward_compute_time={:?}, activation_size={:?}, parameter_size={:?} -- \
             stage_id={stage}\n",
            op.id,
            description(&op.op, &op.name),
            op.fwd_us / 1e3,
            op.bwd_us / 1e3,
            op.out_bytes as f64,
            op.param_bytes as f64,
        );
    }
    // Several tensors between the same ops form one edge.
    let edges: BTreeSet<(u32, u32)> = costs
        .tensors
        .iter()
        .flat_map(|tensor| tensor.consumers.iter().map(|reader| (tensor.producer.0, reader.0)))
        .collect();
    edges.iter().for_each(|(from, to)| text += &format!("\tnode{from} -- node{to}\n"));
    text
}

/// Formats `Conv2d(features.0)`. PipeDream removes nodes whose description starts with "Input" or "__getitem__", and
/// splits fields at ` -- `.
fn description(op: &str, name: &str) -> String {
    let display = |text: &str| {
        let text: String = display_name(text).chars().take(120).collect();
        text.replace(" -- ", " - ")
    };
    let op = display(op);
    let op = if op.starts_with("Input") || op.starts_with("__getitem__") { format!("op {op}") } else { op };
    format!("{op}({})", display(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_no_field() {
        let name = "x -- forward_compute_time=9\n\tnode0 -- node1";
        assert_eq!(description("relu", name), "relu(x - forward_compute_time=9\tnode0 - node1)".replace('\t', ""));
        assert_eq!(description("Input0", ""), "op Input0()");
    }
}
