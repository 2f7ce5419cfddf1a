//! What PipeDream's own tools read (<https://github.com/msr-fiddle/pipedream>): the profile `graph.txt` with ` -- stage_id=K` at the end
//! of every node, as its optimizer writes it for the generator of models, and the runtime's `conf.json`.
//!
//! ```text
//! {"module_to_stage_map": [0, 1, 1], "stage_to_rank_map": {"0": [0, 1, 2], "1": [3]}}
//! ```
//!
//! The map of modules has one entry for each generated stage module and one more for the loss, which stands with the last. PipeDream
//! stashes weights and deals minibatches round-robin to any number of replicas, so that all of a plan is carried but several stages on
//! a device, and schedules other than its own.

use super::refusal::Refusal;
use super::{Bundle, ExportInput, fit};
use crate::import::onnx::name::display_name;
use crate::plan::ScheduleKind;
use crate::profile::cost_graph::CostGraph;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};

/// Writes `graph.txt` and `conf.json`.
pub fn write(asked: &ExportInput<'_>) -> Result<Bundle, Refusal> {
    let plan = asked.plan;
    fit::is_of_a_model(plan)?;
    fit::shares_nothing(plan, "PipeDream")?;
    fit::schedules(
        plan,
        "PipeDream",
        &[ScheduleKind::RoundRobin, ScheduleKind::Gpipe, ScheduleKind::OneFOneB],
        "1f1b-rr, and 1f1b and gpipe where minibatches are flushed",
        "1f1b",
    )?;
    let costs = asked.costs.ok_or(Refusal::Model { what: "the costs of ops are not at hand".to_string() })?;
    let mut stage_of = vec![0u32; costs.ops.len()];
    for stage in &plan.stages {
        for op in stage.op_ids() {
            if let Some(place) = stage_of.get_mut(op as usize) {
                *place = stage.id.0;
            }
        }
    }
    let stages = 0..plan.stages.len() as u32;
    let modules: Vec<u32> = stages.chain(plan.stages.last().map(|stage| stage.id.0)).collect();
    // serde_json keeps keys in the order of their text, as the published files need not.
    let ranks: BTreeMap<String, &[u32]> =
        plan.stages.iter().map(|stage| (stage.id.0.to_string(), stage.devices.as_slice())).collect();
    let conf = json!({"module_to_stage_map": modules, "stage_to_rank_map": ranks});
    let conf = serde_json::to_string_pretty(&conf).unwrap_or_default() + "\n";
    Ok(Bundle::of("graph.txt", graph(costs, &stage_of)).with("conf.json", conf))
}

/// The costs as a profile, times in milliseconds.
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
    // Two tensors between the same ops are one edge.
    let edges: BTreeSet<(u32, u32)> = costs
        .tensors
        .iter()
        .flat_map(|tensor| tensor.consumers.iter().map(|reader| (tensor.producer.0, reader.0)))
        .collect();
    edges.iter().for_each(|(from, to)| text += &format!("\tnode{from} -- node{to}\n"));
    text
}

/// `Conv2d(features.0)`. What opens with "Input" or "__getitem__" is no op to PipeDream, and two hyphens part fields.
fn description(op: &str, name: &str) -> String {
    let plain = |text: &str| {
        let text: String = display_name(text).chars().take(120).collect();
        text.replace(" -- ", " - ")
    };
    let op = plain(op);
    let op = if op.starts_with("Input") || op.starts_with("__getitem__") { format!("op {op}") } else { op };
    format!("{op}({})", plain(name))
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
