//! A plan in the words of other tools.
//!
//! A target takes what is [`ExportInput`] and gives a [`Bundle`] of files, or a `Refusal`: what a tool cannot carry is never left out in
//! silence. `table` lists the targets, one file each; `fit` holds what several of them ask of a plan, `orders` its order of work as a
//! table, `layers` its stages as lists of modules. Names come from files that nobody vouches for: they are written as data, escaped as
//! the format has it, and never become the name of a file.

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
pub mod table;
pub mod torch;
pub mod torchtitan;

use crate::import::import::{Model, Options};
use crate::plan::Plan;
use crate::profile::cost_graph::CostGraph;
use crate::schedule::formats::csv::ComputeTable;
use std::path::Path;

/// What a target is made from.
#[derive(Clone, Copy, Debug)]
pub struct ExportInput<'a> {
    /// The plan, which is sound.
    pub plan: &'a Plan,
    /// The costs of its ops: there for targets that need [`Need::Costs`].
    pub costs: Option<&'a CostGraph>,
    /// The model: there for targets that need [`Need::Model`].
    pub model: Option<&'a Imported<'a>>,
    /// The order of work of a plan that has none of its own.
    pub table: Option<&'a ComputeTable>,
}

/// The model of a plan, with what is needed to read it once more.
#[derive(Clone, Copy, Debug)]
pub struct Imported<'a> {
    /// Its file.
    pub path: &'a Path,
    /// What its import was told.
    pub options: &'a Options,
    /// As it was imported: the plan's ops are those of its graph.
    pub model: &'a Model,
}

/// What a target needs beside the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Nothing.
    Plan,
    /// What each op costs, from the model or a published profile.
    Costs,
    /// The model.
    Model,
}

/// One file of a bundle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    /// Its name, which is ours and never the model's.
    pub name: String,
    /// What is in it.
    pub bytes: Vec<u8>,
}

/// What was made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bundle {
    /// The files, in the order in which they are told.
    pub files: Vec<File>,
    /// What the user should know of them.
    pub notes: Vec<String>,
}

impl Bundle {
    /// One file of text.
    pub fn of(name: &str, text: String) -> Bundle {
        Bundle::default().with(name, text)
    }

    /// With one more file of text.
    pub fn with(mut self, name: &str, text: String) -> Bundle {
        self.files.push(File { name: name.to_string(), bytes: text.into_bytes() });
        self
    }
}
