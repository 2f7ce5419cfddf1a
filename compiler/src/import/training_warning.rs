//! Findings at import that make a file unsuitable for training.
//!
//! A file can be correct for inference and still train differently from its source model. Exporters fold
//! normalisations, remove dropout, or merge tensors that have equal initial values. Each warning states the finding,
//! its location and effect, and how to export the model for training.

use crate::text::name::short_name;
use std::fmt;

/// Command that exports a PyTorch model as ONNX for training.
const EXPORT: &str = "torch.onnx.export(model.train(), args, \"model.onnx\", dynamo=False, \
    training=torch.onnx.TrainingMode.TRAINING, do_constant_folding=False)";

/// Command for the dynamo exporter that keeps all parameters, but does not preserve BatchNorm training mode.
const UNTOUCHED: &str = "torch.onnx.export(model.train(), args, \"model.onnx\", dynamo=True, optimize=False)";

const SAVE: &str = "torch.export.save(torch.export.export(model.train(), args), \"model.pt2\")";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finding {
    /// BatchNorm was folded into preceding layers.
    FoldedBatchNorm,
    /// BatchNorm normalises with running statistics.
    InferenceBatchNorm,
    InferenceDropout,
    /// Biases were removed because they were initially zero.
    RemovedBias,
    /// Parameters were merged because they were initially equal.
    Merged,
    /// Tied weights became two tensors.
    Untied,
    /// Values computed from parameters, which are not trained.
    FoldedParameter,
    /// Rounding, through which no gradient reaches the weights.
    Quantised,
    /// Values that PyTorch detaches, but the file does not.
    LostDetach,
}

/// One finding and its location.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrainingWarning {
    pub finding: Finding,
    pub count: usize,
    pub first: String,
    /// Further description of the location: a second tensor, or the readers.
    pub beside: String,
}

impl TrainingWarning {
    /// False if the finding only reduces regularisation, or may be harmless.
    pub fn is_wrong(&self) -> bool {
        !matches!(self.finding, Finding::InferenceDropout | Finding::FoldedParameter | Finding::LostDetach)
    }

    /// True if only some dropouts of the file are inactive. PyTorch's older exporter does this for its fused attention,
    /// regardless of its options.
    pub fn is_partial(&self) -> bool {
        self.finding == Finding::InferenceDropout && !self.beside.is_empty()
    }

    /// Machine-readable name.
    pub fn name(&self) -> &'static str {
        match self.finding {
            Finding::FoldedBatchNorm => "folded-batch-norm",
            Finding::InferenceBatchNorm => "inference-batch-norm",
            Finding::InferenceDropout => "inference-dropout",
            Finding::RemovedBias => "removed-biases",
            Finding::Merged => "merged-parameters",
            Finding::Untied => "untied-parameters",
            Finding::FoldedParameter => "folded-parameters",
            Finding::Quantised => "quantised",
            Finding::LostDetach => "lost-detach",
        }
    }

    /// The suggested fix: a pipec flag or Python commands.
    pub fn remedy(&self) -> String {
        match self.finding {
            Finding::FoldedBatchNorm => format!("export again with `{EXPORT}`, or save with `{SAVE}`"),
            Finding::InferenceDropout if self.is_partial() => "`--train-mode` enables them".to_string(),
            Finding::InferenceBatchNorm | Finding::InferenceDropout => {
                format!("`--train-mode` restores them; or export with `{EXPORT}`, or save with `{SAVE}`")
            }
            Finding::RemovedBias | Finding::Merged | Finding::Untied => {
                format!("export with `{EXPORT}`, or, without BatchNormalization, `{UNTOUCHED}`, or save with `{SAVE}`")
            }
            Finding::FoldedParameter => {
                format!("if it is a parameter, export with `{UNTOUCHED}`, or save with `{SAVE}`")
            }
            Finding::LostDetach => format!("export with `{UNTOUCHED}`, or save with `{SAVE}`"),
            Finding::Quantised => "export the model before it is quantised".to_string(),
        }
    }
}

/// The finding and its effect, without the remedy.
impl fmt::Display for TrainingWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TrainingWarning { finding, count, first, beside } = self;
        let (first, beside) = (short_name(first), short_name(beside));
        let plural = |one: &'static str, more: &'static str| if *count == 1 { one } else { more };
        match finding {
            Finding::FoldedBatchNorm => write!(
                f,
                "{count} BatchNormalization {} folded into the weights of other nodes, first at node `{first}`: \
                 scales, biases and running statistics are gone, and training updates other weights than the \
                 framework's",
                plural("layer is", "layers are")
            ),
            Finding::InferenceBatchNorm => write!(
                f,
                "{count} BatchNormalization {} in inference mode, first node `{first}`: stored statistics replace \
                 batch statistics and are not updated, so losses and gradients differ from training",
                plural("node is", "nodes are")
            ),
            Finding::InferenceDropout => write!(
                f,
                "{count} Dropout {} in inference mode{}, first node `{first}`: the model trains without that \
                 regularisation",
                plural("node is", "nodes are"),
                if beside.is_empty() { String::new() } else { format!(", {beside}") }
            ),
            Finding::RemovedBias => write!(
                f,
                "{count} {} removed, first at node `{first}`: the exporter dropped parameters that start at zero, and \
                 they are not trained",
                plural("bias was", "biases were")
            ),
            Finding::Merged => write!(
                f,
                "{count} {} several parameters, first `{first}`, {beside}: the exporter merged parameters that start \
                 equal, so training keeps them equal",
                plural("tensor replaces", "tensors replace")
            ),
            Finding::Untied => write!(
                f,
                "{count} {} of tensors with the same values, first `{first}` and `{beside}`: the exporter split a \
                 tied parameter into two, which training will make different",
                plural("pair", "pairs")
            ),
            Finding::FoldedParameter => write!(
                f,
                "{count} {} computed by the exporter, first `{first}` from `{beside}`, and {} constant",
                plural("tensor was", "tensors were"),
                plural("stays", "stay")
            ),
            Finding::LostDetach => write!(
                f,
                "{count} {} a value that PyTorch detaches, first `{first}`: the exporter's optimiser removed `detach`, \
                 so gradients flow where they do not in PyTorch",
                plural("node reads", "nodes read")
            ),
            Finding::Quantised => write!(
                f,
                "{count} {} values, first `{first}`: no gradient passes the rounding, so the weights before it are not \
                 trained; quantised models cannot be trained",
                plural("node quantises", "nodes quantise")
            ),
        }
    }
}
