//! Restores training mode in a file exported for inference, where the BatchNorm and Dropout nodes still exist.

use crate::import::onnx::model::{Node, OnnxModel, Payload, Tensor};
use crate::import::onnx::proto::AttributeProto;
use crate::import::onnx::proto::attribute_proto::AttributeType;
use crate::import::onnx::proto::tensor_proto::DataType;
use crate::import::onnx::training_warnings::Modes;
use crate::import::training_warning::TrainingWarning;
use std::collections::HashSet;

/// First operator set in which BatchNormalization has `training_mode`.
const NORM_MODE_OPSET: i64 = 14;

/// First operator set in which Dropout has `training_mode`.
const DROPOUT_MODE_OPSET: i64 = 12;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TrainModeError {
    /// BatchNorm was folded into other layers.
    #[error("training mode cannot be restored: {0}; {remedy}", remedy = .0.remedy())]
    Folded(TrainingWarning),
    /// A `torch.export` program, whose operators state their mode themselves.
    #[error(
        "training mode cannot be restored in a .pt2 file, which has the mode of its export; save it with \
         `torch.export.save(torch.export.export(model.train(), args), \"model.pt2\")`"
    )]
    Program,
    #[error(
        "training mode cannot be restored: operator set {opset} has no Dropout training mode; convert the file to \
        {NORM_MODE_OPSET} or newer"
    )]
    Opset { opset: i64 },
}

/// Copies the model with its BatchNorm and Dropout nodes in training mode.
pub fn train_mode(model: &OnnxModel) -> Result<OnnxModel, TrainModeError> {
    let opset = model.opset("").unwrap_or(NORM_MODE_OPSET);
    let (mut training_model, modes) = (model.clone(), Modes::of(model));
    let mut names = Names::of(model);
    let mut truth = None;
    for node in &mut training_model.nodes {
        if modes.is_inference_norm(node) {
            normalise(node, opset, &mut names);
        } else if modes.is_inference_dropout(node) {
            if opset < DROPOUT_MODE_OPSET {
                return Err(TrainModeError::Opset { opset });
            }
            let name = truth.get_or_insert_with(|| names.new_name("training_mode"));
            node.inputs.resize(3, String::new());
            node.inputs[2].clone_from(name);
        }
    }
    if let Some(name) = truth {
        let payload = Payload::Bytes(vec![1].into());
        training_model.initializers.push(Tensor { name, elem_type: DataType::Bool as i32, dims: Vec::new(), payload });
    }
    Ok(training_model)
}

/// Sets a BatchNorm node to training mode: by its attribute or, before operator set 14, by its outputs.
fn normalise(node: &mut Node, opset: i64, names: &mut Names) {
    if opset < NORM_MODE_OPSET {
        let outputs = ["mean", "variance", "saved_mean", "saved_variance"];
        node.outputs.truncate(1);
        node.outputs.extend(outputs.map(|what| names.new_name(&format!("{}.{what}", node.name))));
        return;
    }
    node.attributes.retain(|attribute| attribute.name() != "training_mode");
    node.attributes.push(AttributeProto {
        name: Some("training_mode".to_string()),
        r#type: Some(AttributeType::Int as i32),
        i: Some(1),
        ..AttributeProto::default()
    });
}

struct Names(HashSet<String>);

impl Names {
    fn of(model: &OnnxModel) -> Names {
        let written = model.nodes.iter().flat_map(|node| node.outputs.iter());
        let initializer_names = model.initializers.iter().map(|tensor| &tensor.name);
        Names(written.chain(initializer_names).chain(model.inputs.iter().map(|input| &input.name)).cloned().collect())
    }

    /// A new unique name that starts with `stem`.
    fn new_name(&mut self, stem: &str) -> String {
        let mut name = stem.to_string();
        while !self.0.insert(name.clone()) {
            name.push('_');
        }
        name
    }
}
