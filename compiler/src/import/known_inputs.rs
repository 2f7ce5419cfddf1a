//! Information about model inputs that is not in the file: actual shapes and values.

use crate::import::onnx::model::{Dim, ValueInfo};
use crate::tensor::Tensor;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Known {
    /// Shapes that replace the declared ones.
    pub shapes: BTreeMap<String, Vec<usize>>,
    /// Inputs that are treated as constants.
    pub values: BTreeMap<String, Tensor>,
    /// The inputs that will be given, if known. Other optional inputs are empty.
    pub given: Option<BTreeSet<String>>,
    /// Inputs that no operator reads, which do not determine the batch.
    pub unread: BTreeSet<String>,
    /// Allows inputs without elements. Such a model can be evaluated but not trained.
    pub empty: bool,
}

impl Known {
    /// The inputs with known shapes in place of declared shapes of the same rank.
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

    pub fn leaves_out(&self, name: &str) -> bool {
        self.given.as_ref().is_some_and(|given| !given.contains(name))
    }

    pub fn take_shapes(&mut self, data: &BTreeMap<String, Tensor>) {
        self.shapes = data.iter().map(|(name, tensor)| (name.clone(), tensor.shape().to_vec())).collect();
    }
}
