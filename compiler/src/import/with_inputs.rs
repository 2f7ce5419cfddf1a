//! Imports a model for evaluation on given data.
//!
//! Axes, shapes, counts and conditions that are graph inputs determine the structure of the graph, so no graph covers
//! all their values. With the data at hand, a graph for this data can be built. [`load`] first imports normally. If
//! that fails because something depends on graph inputs, the values of these inputs become constants and the import is
//! repeated. If the failure does not depend on input values, the import is repeated once with the shapes of the data.

use crate::import::import::{ImportError, Model, Options, Source};
use crate::import::known_inputs::Known;
use crate::import::lower_error::LowerReason;
use crate::import::onnx::lower::error::LowerError;
use crate::import::onnx::lower::input::InputError;
use crate::tensor::Tensor;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Imports a file for evaluation of `data`, arrays by input name. The returned options contain the inputs that became
/// constants.
pub fn load(path: &Path, options: &Options, data: &BTreeMap<String, Tensor>) -> Result<(Model, Options), ImportError> {
    import(&Source::read(path)?, options, data)
}

/// Like [`load`], for a file that is already decoded.
pub fn import(
    source: &Source,
    options: &Options,
    data: &BTreeMap<String, Tensor>,
) -> Result<(Model, Options), ImportError> {
    let mut options = options.clone();
    options.known.empty = true;
    options.known.given = Some(data.keys().cloned().collect());
    if data.values().any(Tensor::is_empty) {
        // Symbols are at least 1, so empty data needs static shapes.
        options.known.take_shapes(data);
    }
    // Terminates: each iteration adds the value of an input or the shapes of all inputs.
    loop {
        match source.import(&options) {
            Ok(model) => return Ok((model, options)),
            Err(error) if add_requested_data(&mut options.known, &error, data) => {}
            Err(error) => return Err(error),
        }
    }
}

/// Adds the data that `error` asks for. Returns false if nothing helps.
fn add_requested_data(known: &mut Known, error: &ImportError, data: &BTreeMap<String, Tensor>) -> bool {
    let before = known.values.len();
    for name in required_inputs(error) {
        if let Some(tensor) = data.get(&name) {
            known.values.insert(name, tensor.clone());
        }
    }
    let worth_shapes = matches!(error, ImportError::Lower(_) | ImportError::Input(InputError::NoShape { .. }));
    if known.values.len() > before {
        return true;
    }
    if !worth_shapes || !known.shapes.is_empty() {
        return false;
    }
    known.take_shapes(data);
    !known.shapes.is_empty()
}

/// The graph inputs whose values the import needs.
pub fn required_inputs(error: &ImportError) -> BTreeSet<String> {
    let inputs_of = |reason: &LowerReason| match reason {
        LowerReason::Follows { inputs, .. } => inputs.clone(),
        _ => Vec::new(),
    };
    match error {
        ImportError::Lower(LowerError::Nodes(faults)) => {
            faults.0.iter().flat_map(|fault| inputs_of(&fault.reason)).collect()
        }
        ImportError::Lower(LowerError::Output { reason, .. }) => inputs_of(reason).into_iter().collect(),
        _ => BTreeSet::new(),
    }
}
