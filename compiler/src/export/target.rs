//! Exports a plan to the formats of other tools.
//!
//! A target converts an [`ExportInput`] to a [`Bundle`] of files, or returns a `Refusal`: features that a tool does not
//! support are never dropped silently. [`TARGETS`] lists the targets, one file each. `fit` has shared checks of a plan,
//! `orders` the schedule as a table, `layers` the stages as module lists. Names come from untrusted files: they are
//! written as escaped data and never used as file names. `FOLDER` or `FILE` in a note is the output path.

pub mod deepspeed;
pub mod dot;
pub mod fit;
pub mod layers;
pub mod megatron;
pub mod nodes;
pub mod onnx;
pub mod onnx_stages;
pub mod orders;
pub mod payloads;
pub mod pipedream;
pub mod refusal;
pub mod titan_names;
pub mod torch;
pub mod torchtitan;

use crate::import::import::{Model, Options};
use crate::plan::Plan;
use crate::profile::cost_graph::CostGraph;
use crate::schedule::formats::csv::ComputeTable;
use std::path::Path;

#[derive(Clone, Copy, Debug)]
pub struct Entry {
    pub name: &'static str,
    pub about: &'static str,
    pub need: Need,
    pub write: fn(&ExportInput<'_>) -> Result<Bundle, refusal::Refusal>,
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
    Entry { name: "torchtitan", about: "a folder: the arguments with module_fqns_per_model_part, and the schedule as a table", need: Need::Plan, write: torchtitan::write },
];

pub fn find(name: &str) -> Option<&'static Entry> {
    TARGETS.iter().find(|entry| entry.name == name)
}

#[derive(Clone, Copy, Debug)]
pub struct ExportInput<'a> {
    /// A checked plan.
    pub plan: &'a Plan,
    /// The costs of its ops; present for targets that need [`Need::Costs`].
    pub costs: Option<&'a CostGraph>,
    /// The model; present for targets that need [`Need::Model`].
    pub model: Option<&'a Imported<'a>>,
    /// The compute table of a plan with a CSV schedule.
    pub table: Option<&'a ComputeTable>,
}

/// The model of a plan, with the information to import it again.
#[derive(Clone, Copy, Debug)]
pub struct Imported<'a> {
    pub path: &'a Path,
    pub options: &'a Options,
    /// The imported model, whose graph has the plan's ops.
    pub model: &'a Model,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    Plan,
    /// Costs per op, from the model or from a published profile.
    Costs,
    Model,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    /// Chosen by pipec, never taken from the model.
    pub name: String,
    pub bytes: Vec<u8>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bundle {
    pub files: Vec<File>,
    pub notes: Vec<String>,
}

impl Bundle {
    pub fn of(name: &str, text: String) -> Bundle {
        Bundle::default().with(name, text)
    }

    pub fn with(mut self, name: &str, text: String) -> Bundle {
        self.files.push(File { name: name.to_string(), bytes: text.into_bytes() });
        self
    }
}
