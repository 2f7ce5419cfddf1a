//! What a run writes down while it goes on: the weights of a stage at the point that its program names.

use crate::compile::Named;
use crate::stepper::wide;
use compiler::plan::StageId;
use compiler::tensor::Tensor;
use std::collections::BTreeMap;

/// A version of a stage's weights.
#[derive(Clone, Debug, PartialEq)]
pub struct Checkpoint {
    /// The stage.
    pub stage: StageId,
    /// Updates that the weights have seen.
    pub version: u32,
    /// Parameters of that version, and the states as they are now, by the names of the source model.
    pub weights: BTreeMap<String, Tensor>,
}

impl Checkpoint {
    /// The file that it is written to, in a folder of its run. Replicas of a stage have the same weights and write the same file.
    pub fn file_name(&self) -> String {
        format!("stage-{}-version-{}.safetensors", self.stage.0, self.version)
    }
}

/// A tensor of the run: narrow parameters and their gradients come in `f32`.
pub fn tensor(named: &Named, bytes: &[u8]) -> Tensor {
    let shape = named.fact.concrete().expect("sizes were checked when the graph was compiled");
    let dtype = if bytes.len() == named.bytes { named.fact.dtype } else { wide(named.fact.dtype) };
    Tensor::new(dtype, shape, bytes.to_vec().into()).expect("the buffer has the size of the tensor")
}
