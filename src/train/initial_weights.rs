//! Initial weights: the model's, replaced by those of a file.

use crate::error::Error;
use crate::events::EventSink;
use crate::help;
use crate::model::{LoadedModel, list_names};
use compiler::tensor::Tensor;
use runtime::checkpoint::find;
use runtime::data::weights;
use std::collections::BTreeMap;
use std::path::Path;

/// The model's weights, replaced by those of the file. A file may have more names than the model: counters, or second names of tied
/// parameters. A folder is a checkpoint.
pub fn load_weights(
    loaded: &LoadedModel,
    file: Option<&Path>,
    events: &dyn EventSink,
) -> Result<BTreeMap<String, Tensor>, Error> {
    let Some(path) = file else { return loaded.weights() };
    let fail = |error: &dyn std::fmt::Display| Error::input("cannot read the weights").because(error);
    let mut file_weights = match path.is_dir() {
        true => find::read_weights(path).map_err(|error| {
            let help = match find::all(path).ok().and_then(|checkpoints| checkpoints.into_iter().next()) {
                Some((_, newest)) => {
                    format!("pass the folder of one checkpoint: `--weights {}`", newest.display())
                }
                None => "pass a file of tensors, or the folder of one checkpoint".to_string(),
            };
            fail(&error).with_help(help)
        })?,
        false => weights::read(path).map_err(|error| fail(&error).with_help(help::weights(path, &error)))?,
    };
    let mut merged = loaded.known_weights();
    let model_weights = &loaded.model.weights;
    let unknown: Vec<String> = file_weights.keys().filter(|name| !model_weights.contains_key(*name)).cloned().collect();
    file_weights.retain(|name, _| model_weights.contains_key(name));
    if file_weights.is_empty() && !model_weights.is_empty() {
        let why = match unknown.is_empty() {
            true => "it has no arrays".to_string(),
            false => format!("none of its names is in the model: it has {}", list_names(&unknown)),
        };
        let names: Vec<String> = model_weights.keys().cloned().collect();
        return Err(Error::file("use", path, why).with_help(format!("the model has {}", list_names(&names))));
    }
    let missing: Vec<String> = model_weights.keys().filter(|name| !file_weights.contains_key(*name)).cloned().collect();
    if let Some(name) = missing.iter().find(|name| !merged.contains_key(*name)) {
        return Err(Error::file("use", path, format!("it has no `{name}`, nor has the model file")));
    }
    if !unknown.is_empty() {
        events.warn(&format!("{}: ignored {}, which the model does not have", path.display(), list_names(&unknown)));
    }
    if !missing.is_empty() {
        events.warn(&format!("{} does not have {}: the model's values are used", path.display(), list_names(&missing)));
    }
    merged.extend(file_weights);
    Ok(merged)
}
