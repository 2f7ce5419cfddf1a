//! Importing for the evaluation of given data.
//!
//! Axes, shapes, counts and conditions that a model takes as graph inputs decide what its graph is, so a graph for any
//! value of them cannot be written. Who has the data at hand can have the graph for this data: [`load`] imports as for
//! any other verb, and where that is refused because something follows from graph inputs, it gives the importer the
//! values of just these inputs and tries again. Then they are constants, and folding does the rest. A refusal that
//! follows from no input's value is tried once more with all shapes fixed to those of the data.

use crate::import::import::{ImportError, Model, Options, Source};
use crate::import::known_inputs::Known;
use crate::import::lower_error::LowerReason;
use crate::import::onnx::lower::input::InputError;
use crate::import::onnx::lower::walk::LowerError;
use crate::tensor::Tensor;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Imports a file for the evaluation of `data`, arrays by the names of inputs. The inputs that had to become constants
/// stand in the options that are given back.
pub fn load(path: &Path, options: &Options, data: &BTreeMap<String, Tensor>) -> Result<(Model, Options), ImportError> {
    import(&Source::read(path)?, options, data)
}

/// The same for a file that was read.
pub fn import(
    source: &Source,
    options: &Options,
    data: &BTreeMap<String, Tensor>,
) -> Result<(Model, Options), ImportError> {
    let mut options = options.clone();
    options.known.empty = true;
    options.known.given = Some(data.keys().cloned().collect());
    if data.values().any(Tensor::is_empty) {
        // What holds for every size that a symbol may have does not hold for none.
        options.known.take_shapes(data);
    }
    // Every round learns the value of an input or the shapes of all, so the rounds end.
    loop {
        match source.import(&options) {
            Ok(model) => return Ok((model, options)),
            Err(error) if learn(&mut options.known, &error, data) => {}
            Err(error) => return Err(error),
        }
    }
}

/// Takes from the data what `error` asks for. False when there is nothing that could help.
fn learn(known: &mut Known, error: &ImportError, data: &BTreeMap<String, Tensor>) -> bool {
    let before = known.values.len();
    for name in followed(error) {
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

/// The graph inputs whose values would have to be known for the import to go on.
pub fn followed(error: &ImportError) -> BTreeSet<String> {
    let of = |reason: &LowerReason| match reason {
        LowerReason::Follows { inputs, .. } => inputs.clone(),
        _ => Vec::new(),
    };
    match error {
        ImportError::Lower(LowerError::Nodes(faults)) => faults.0.iter().flat_map(|fault| of(&fault.reason)).collect(),
        ImportError::Lower(LowerError::Output { reason, .. }) => of(reason).into_iter().collect(),
        _ => BTreeSet::new(),
    }
}
