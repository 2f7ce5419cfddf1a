//! The table of export targets. A new target is a file in this folder and a row here.

use super::refusal::Refusal;
use super::{Bundle, ExportInput, Need, deepspeed, dot, megatron, onnx, onnx_stages, pipedream, torch, torchtitan};

#[derive(Clone, Copy, Debug)]
pub struct Entry {
    pub name: &'static str,
    pub about: &'static str,
    pub need: Need,
    pub write: fn(&ExportInput<'_>) -> Result<Bundle, Refusal>,
}

#[rustfmt::skip]
pub const TARGETS: [Entry; 8] = [
    Entry { name: "deepspeed", about: "a file: the parts list of a PipelineModule", need: Need::Plan, write: deepspeed::write },
    Entry { name: "dot", about: "a file: the stages as a Graphviz graph", need: Need::Plan, write: dot::write },
    Entry { name: "megatron", about: "a file: the arguments with the pipeline layout string", need: Need::Plan, write: megatron::write },
    Entry { name: "onnx", about: "a file, or a folder where weights are large: the model with the stage of every node", need: Need::Model, write: onnx::write },
    Entry { name: "onnx-stages", about: "a folder: one ONNX model for each stage", need: Need::Model, write: onnx_stages::write },
    Entry { name: "pipedream", about: "a folder: graph.txt with stages, and the runtime's configuration", need: Need::Costs, write: pipedream::write },
    Entry { name: "torch", about: "a folder: a training script for torchrun and torch.distributed.pipelining", need: Need::Plan, write: torch::write },
    Entry { name: "torchtitan", about: "a folder: module_fqns_per_model_part and the schedule as a table", need: Need::Plan, write: torchtitan::write },
];

pub fn find(name: &str) -> Option<&'static Entry> {
    TARGETS.iter().find(|entry| entry.name == name)
}
