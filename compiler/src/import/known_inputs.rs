//! What is known of a model's inputs beyond its file: shapes and values that a caller has in his hands.

use crate::import::onnx::model::{Dim, ValueInfo};
use crate::tensor::Tensor;
use std::collections::{BTreeMap, BTreeSet};

/// What is known of the inputs, by name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Known {
    /// Shapes that stand in place of those in the file.
    pub shapes: BTreeMap<String, Vec<usize>>,
    /// Inputs that are constants.
    pub values: BTreeMap<String, Tensor>,
    /// The inputs that are given, where that is known: an optional one that is not has no element.
    pub given: Option<BTreeSet<String>>,
    /// Inputs that no operator reads: none of them tells what the batch is.
    pub unread: BTreeSet<String>,
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

    /// Whether an optional input is known to be left out.
    pub fn leaves_out(&self, name: &str) -> bool {
        self.given.as_ref().is_some_and(|given| !given.contains(name))
    }

    /// Takes the shapes of the inputs from data.
    pub fn take_shapes(&mut self, data: &BTreeMap<String, Tensor>) {
        self.shapes = data.iter().map(|(name, tensor)| (name.clone(), tensor.shape().to_vec())).collect();
    }
}
