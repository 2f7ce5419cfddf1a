//! Inputs that are known before the model runs: shapes and values that a caller has in his hands.
//!
//! Axes, shapes, counts and conditions that a model takes as graph inputs decide what its graph is, so a graph for any
//! value of them cannot be written. Who has the data at hand can have the graph for this data: [`load`] imports as for
//! any other verb, and where that is refused because something follows from graph inputs, it gives the importer the
//! values of just these inputs and tries again. Then they are constants, and folding does the rest. A refusal that
//! follows from no input's value is tried once more with all shapes fixed to those of the data.

use crate::import::import::{ImportError, Model, Options, Source};
use crate::import::onnx::lower::input::InputError;
use crate::import::onnx::lower::walk::LowerError;
use crate::import::onnx::model::{Dim, ValueInfo};
use crate::import::reason::Reason;
use crate::tensor::Tensor;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// What is known of the inputs, by name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Known {
    /// Shapes that stand in place of those in the file.
    pub shapes: BTreeMap<String, Vec<usize>>,
    /// Inputs that are constants.
    pub values: BTreeMap<String, Tensor>,
    /// Whether inputs may have no elements. Answers can be worked out for them, but nothing can be trained.
    pub empty: bool,
}

impl Known {
    /// The inputs with their known shapes in place of the declared ones, where both have the same rank.
    pub fn declared(&self, infos: &[ValueInfo]) -> Vec<ValueInfo> {
        let mut infos = infos.to_vec();
        for info in &mut infos {
            let Some(shape) = self.shapes.get(&info.name) else { continue };
            if info.dims.as_ref().is_none_or(|dims| dims.len() == shape.len()) {
                let size = |size: &usize| i64::try_from(*size).map_or(Dim::Unknown, Dim::Known);
                info.dims = Some(shape.iter().map(size).collect());
            }
        }
        infos
    }

    /// Takes from the data what `error` asks for. False when there is nothing that could help.
    fn learn(&mut self, error: &ImportError, data: &BTreeMap<String, Tensor>) -> bool {
        let before = self.values.len();
        for name in followed(error) {
            if let Some(tensor) = data.get(&name) {
                self.values.insert(name, tensor.clone());
            }
        }
        let worth_shapes = matches!(error, ImportError::Lower(_) | ImportError::Input(InputError::NoShape { .. }));
        if self.values.len() > before {
            return true;
        }
        if !worth_shapes || !self.shapes.is_empty() {
            return false;
        }
        self.take_shapes(data);
        !self.shapes.is_empty()
    }

    fn take_shapes(&mut self, data: &BTreeMap<String, Tensor>) {
        self.shapes = data.iter().map(|(name, tensor)| (name.clone(), tensor.shape().to_vec())).collect();
    }
}

/// The graph inputs whose values would have to be known for the import to go on.
pub fn followed(error: &ImportError) -> BTreeSet<String> {
    let of = |reason: &Reason| match reason {
        Reason::Follows { inputs, .. } => inputs.clone(),
        _ => Vec::new(),
    };
    match error {
        ImportError::Lower(LowerError::Nodes(faults)) => faults.0.iter().flat_map(|fault| of(&fault.reason)).collect(),
        ImportError::Lower(LowerError::Output { reason, .. }) => of(reason).into_iter().collect(),
        _ => BTreeSet::new(),
    }
}

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
    if data.values().any(Tensor::is_empty) {
        // What holds for every size that a symbol may have does not hold for none.
        options.known.take_shapes(data);
    }
    // Every round learns the value of an input or the shapes of all, so the rounds end.
    loop {
        match source.import(&options) {
            Ok(model) => return Ok((model, options)),
            Err(error) if options.known.learn(&error, data) => {}
            Err(error) => return Err(error),
        }
    }
}
