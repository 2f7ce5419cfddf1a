//! Checks that a plan belongs to a model, and reports the differences.

use crate::error::Error;
use crate::model::LoadedModel;
use compiler::plan::{Plan, PlannedModel};
use compiler::text::name::short_name;

/// Characters of a fingerprint that are shown.
const FINGERPRINT_LENGTH: usize = 12;

/// Refuses an imported model that is not the plan's.
pub fn check_loaded(plan: &Plan, loaded: &LoadedModel) -> Result<(), Error> {
    let ops = loaded.profiled().ops as usize;
    check(plan, &loaded.planned(ops, plan.model.import.loss.clone()))
}

/// Refuses a model that is not the plan's. A published profile has no graph: its bytes are compared.
pub fn check(plan: &Plan, model: &PlannedModel) -> Result<(), Error> {
    let planned = &plan.model;
    let is_same = match planned.graph_hash.is_empty() {
        true => model.sha256 == planned.sha256,
        false => model.graph_hash == planned.graph_hash,
    };
    if is_same && model.ops == planned.ops {
        return Ok(());
    }
    let name = |model: &PlannedModel| match model.file.is_empty() {
        true => "the model".to_string(),
        false => short_name(&model.file),
    };
    let failure = Error::input(format!("{} is not the model of the plan", name(model)));
    let shortened = |fingerprint: &str| fingerprint.chars().take(FINGERPRINT_LENGTH).collect::<String>();
    let failure = match model.ops == planned.ops {
        false => failure.because(format!("the plan is for {} with {} ops, this model has {}", name(planned), planned.ops, model.ops)),
        true if model.sha256 == planned.sha256 && !model.sha256.is_empty() => failure.because(format!(
            "the file is the planned one, but was imported with other flags: {} for the plan, {} here",
            import_flags(planned),
            import_flags(model)
        )),
        true => failure.because(format!(
            "the plan is for {}: both have {} ops, but different sizes, attributes or parameter names (fingerprint {} in the plan, {} here)",
            name(planned),
            model.ops,
            shortened(fingerprint(planned)),
            shortened(fingerprint(model))
        )),
    };
    Err(failure.with_help("pass the planned file, or plan this one with `pipec partition`"))
}

fn fingerprint(model: &PlannedModel) -> &str {
    if model.graph_hash.is_empty() { &model.sha256 } else { &model.graph_hash }
}

/// The import flags of a model, as on the command line.
fn import_flags(model: &PlannedModel) -> String {
    let import = &model.import;
    let dims = import.dims.iter().map(|(name, size)| format!("`--dim {}={size}`", short_name(name)));
    let axes = import.batch_dims.iter().map(|(name, axis)| format!("`--batch-dim {}={axis}`", short_name(name)));
    let mode = import.train_mode.then(|| "`--train-mode`".to_string());
    let flags: Vec<String> = dims.chain(axes).chain(mode).collect();
    if flags.is_empty() { "none".to_string() } else { flags.join(" ") }
}
