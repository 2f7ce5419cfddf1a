//! A Graphviz picture of the stages in the DOT language (<https://graphviz.org/doc/info/lang.html>): one box per stage
//! with replicas, times and memory, one arrow per edge with its bytes. Stages that share devices are framed together.
//!
//! Names appear only in double quotes, where DOT has two escapes, `\"` and `\\`. Escapes in labels (`\N`, `\l`) start
//! with a backslash, which is doubled.

use super::refusal::Refusal;
use super::{Bundle, ExportInput};
use crate::export::stage_name::{layers, ranges, recomputed, replicas};
use crate::plan::{Plan, Stage};
use crate::text::name::{display_name, short_name};
use crate::text::quantity;
use std::collections::BTreeMap;

pub fn write(input: &ExportInput<'_>) -> Result<Bundle, Refusal> {
    let plan = input.plan;
    let mut text = String::from("digraph plan {\n  rankdir=LR;\n  node [shape=box];\n");
    let model = short_name(&plan.model.file);
    let title = format!("{model}\n{}, micro-batch {}", plan.schedule.kind.name(), plan.schedule.micro_batch);
    text += &format!("  label={};\n  labelloc=t;\n", quote(&title));
    for (at, (devices, stages)) in group_by_devices(plan).into_iter().enumerate() {
        let group = format!("devices {}", ranges(devices));
        // A single stage needs no frame.
        let indent = if stages.len() > 1 { "    " } else { "  " };
        if stages.len() > 1 {
            text += &format!("  subgraph cluster_{at} {{\n    label={};\n", quote(&group));
        }
        for stage in &stages {
            text += &format!("{indent}s{} [label={}];\n", stage.id.0, quote(&label(stage, &group)));
        }
        if stages.len() > 1 {
            text += "  }\n";
        }
    }
    for edge in &plan.edges {
        let tensors = match edge.tensors.as_slice() {
            [one] => short_name(one),
            names => format!("{} tensors", names.len()),
        };
        let caption = quote(&format!("{}\n{tensors}", quantity::bytes(edge.bytes)));
        text += &format!("  s{} -> s{} [label={caption}];\n", edge.from.0, edge.to.0);
    }
    text += "}\n";
    Ok(Bundle::of("plan.dot", text))
}

fn label(stage: &Stage, devices: &str) -> String {
    let recomputed = if stage.recompute { format!(", {}", recomputed(stage)) } else { String::new() };
    format!(
        "stage {}\n{}\n{} x {devices}\nforward {}, backward {}{recomputed}\n{}",
        stage.id.0,
        layers(stage),
        replicas(stage),
        quantity::time(stage.fwd_us),
        quantity::time(stage.bwd_us),
        quantity::bytes(stage.memory.total)
    )
}

/// Stages grouped by devices, in the order of their first stage.
fn group_by_devices(plan: &Plan) -> Vec<(&[u32], Vec<&Stage>)> {
    let mut index_of: BTreeMap<&[u32], usize> = BTreeMap::new();
    let mut groups: Vec<(&[u32], Vec<&Stage>)> = Vec::new();
    for stage in &plan.stages {
        let at = *index_of.entry(&stage.devices).or_insert(groups.len());
        match groups.get_mut(at) {
            Some((_, stages)) => stages.push(stage),
            None => groups.push((&stage.devices, vec![stage])),
        }
    }
    groups
}

/// Quotes a multi-line text as a DOT string.
fn quote(text: &str) -> String {
    let line = |line: &str| display_name(line).replace('\\', "\\\\").replace('"', "\\\"");
    format!("\"{}\"", text.split('\n').map(line).collect::<Vec<_>>().join("\\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_cannot_leave_its_quotes() {
        assert_eq!(quote("a\"]; evil [x=\"\\\nb\u{1b}"), r#""a\"]; evil [x=\"\\\nb""#);
    }
}
