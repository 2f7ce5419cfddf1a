//! A flowchart of the stages in Mermaid's language (<https://mermaid.js.org/syntax/flowchart.html>).
//!
//! Names appear only in double quotes; `"`, `&`, `<` and `>` are written as entities.

use super::refusal::Refusal;
use super::{Bundle, ExportInput};
use crate::export::quantity;
use crate::export::stage_name::{layers, replicas};

pub fn write(asked: &ExportInput<'_>) -> Result<Bundle, Refusal> {
    let mut text = String::from("flowchart LR\n");
    for stage in &asked.plan.stages {
        let label = format!("stage {}: {} x {}", stage.id.0, layers(stage), replicas(stage));
        text += &format!("  s{}[\"{}\"]\n", stage.id.0, escaped(&label));
    }
    for edge in &asked.plan.edges {
        text += &format!("  s{} -- \"{}\" --> s{}\n", edge.from.0, quantity::bytes(edge.bytes), edge.to.0);
    }
    Ok(Bundle::of("plan.mmd", text))
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('"', "&quot;").replace('<', "&lt;").replace('>', "&gt;")
}
