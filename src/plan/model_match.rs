//! Whether a plan is of the model at hand, and what the two have apart, in the same words wherever a plan meets a model.

use crate::error::Error;
use compiler::import::onnx::name::shown;
use compiler::plan::{Plan, PlannedModel};

/// Characters of a fingerprint that are told.
const TOLD: usize = 12;

/// Refuses a model that is not the plan's. A published profile has no graph: its bytes are compared.
pub fn check(plan: &Plan, here: &PlannedModel) -> Result<(), Error> {
    let there = &plan.model;
    let is_same = match there.graph_hash.is_empty() {
        true => here.sha256 == there.sha256,
        false => here.graph_hash == there.graph_hash,
    };
    if is_same && here.ops == there.ops {
        return Ok(());
    }
    let name = |model: &PlannedModel| match model.file.is_empty() {
        true => "the model".to_string(),
        false => shown(&model.file).into_owned(),
    };
    let failure = Error::input(format!("{} is not the model of the plan", name(here)));
    let first = |mark: &str| mark.chars().take(TOLD).collect::<String>();
    let failure = match here.ops == there.ops {
        false => failure.because(format!("the plan is for {} with {} ops, this has {}", name(there), there.ops, here.ops)),
        true if here.sha256 == there.sha256 && !here.sha256.is_empty() => failure.because(format!(
            "the file is the one that was planned, read with other flags: {} there, {} here",
            flags(there),
            flags(here)
        )),
        true => failure.because(format!(
            "the plan is for {}: both have {} ops, but other sizes, attributes or names of parameters (fingerprint {} there, {} here)",
            name(there),
            here.ops,
            first(mark(there)),
            first(mark(here))
        )),
    };
    Err(failure.with_help("name the file that was planned, or plan this one with `pipec partition`"))
}

/// What a model is known by.
fn mark(model: &PlannedModel) -> &str {
    if model.graph_hash.is_empty() { &model.sha256 } else { &model.graph_hash }
}

/// How a model was read, as one would type it.
fn flags(model: &PlannedModel) -> String {
    let import = &model.import;
    let dims = import.dims.iter().map(|(name, size)| format!("`--dim {}={size}`", shown(name)));
    let axes = import.batch_dims.iter().map(|(name, axis)| format!("`--batch-dim {}={axis}`", shown(name)));
    let mode = import.train_mode.then(|| "`--train-mode`".to_string());
    let all: Vec<String> = dims.chain(axes).chain(mode).collect();
    if all.is_empty() { "none".to_string() } else { all.join(" ") }
}
