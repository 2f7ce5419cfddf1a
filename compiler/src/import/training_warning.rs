//! Doubts: ways in which a file is not the model that its framework trains, found when it is imported.
//!
//! A file can be a perfect model for inference and still be worth little for training: an exporter folds normalisations
//! away, leaves dropout out, or makes one tensor of two that merely start equal. Nothing in the graph is wrong then, only
//! what training makes of it. So a doubt says what was found and where, what it means, and which line exports the model so
//! that it can be trained.

use crate::import::onnx::name::shown;
use std::fmt;

/// The line that exports a model of PyTorch as ONNX so that nothing is lost.
const EXPORT: &str = "torch.onnx.export(model.train(), args, \"model.onnx\", dynamo=False, \
    training=torch.onnx.TrainingMode.TRAINING, do_constant_folding=False)";

/// The line that keeps all parameters where normalisation is no concern, which the newer exporter can do too.
const UNTOUCHED: &str = "torch.onnx.export(model.train(), args, \"model.onnx\", dynamo=True, optimize=False)";

/// The line that saves a model of PyTorch whole.
const SAVE: &str = "torch.export.save(torch.export.export(model.train(), args), \"model.pt2\")";

/// What was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finding {
    /// Batch normalisations that were folded into the weights of the nodes before them.
    FoldedBatchNorm,
    /// Batch normalisations by stored statistics.
    InferenceBatchNorm,
    /// Dropouts that drop nothing.
    InferenceDropout,
    /// Biases that were left out because they merely started at zero.
    RemovedBias,
    /// Parameters that are one tensor because they merely started equal.
    Merged,
    /// Two tensors with the same values that were one parameter.
    Untied,
}

/// One way in which the file is not the model that its framework trains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrainingWarning {
    /// What was found.
    pub finding: Finding,
    /// How often.
    pub count: usize,
    /// The first node, or the first tensor.
    pub first: String,
    /// What else names the first place: a second tensor, or who reads it.
    pub beside: String,
}

impl TrainingWarning {
    /// Whether training goes another way than the framework's would: not only less regularised.
    pub fn is_wrong(&self) -> bool {
        self.finding != Finding::InferenceDropout
    }

    /// Whether it is about some dropouts of a file that trains the others. The older exporter of PyTorch writes those of its fused
    /// attention so, whatever it is told.
    pub fn is_partial(&self) -> bool {
        self.finding == Finding::InferenceDropout && !self.beside.is_empty()
    }

    /// One word for programs.
    pub fn name(&self) -> &'static str {
        match self.finding {
            Finding::FoldedBatchNorm => "folded-batch-norm",
            Finding::InferenceBatchNorm => "inference-batch-norm",
            Finding::InferenceDropout => "inference-dropout",
            Finding::RemovedBias => "removed-biases",
            Finding::Merged => "merged-parameters",
            Finding::Untied => "untied-parameters",
        }
    }

    /// What mends it: a flag of ours, or lines of Python.
    pub fn remedy(&self) -> String {
        match self.finding {
            Finding::FoldedBatchNorm => format!("export again with `{EXPORT}`, or save with `{SAVE}`"),
            Finding::InferenceDropout if self.is_partial() => "`--train-mode` turns them on".to_string(),
            Finding::InferenceBatchNorm | Finding::InferenceDropout => {
                format!("`--train-mode` turns them back; or export with `{EXPORT}`, or save with `{SAVE}`")
            }
            Finding::RemovedBias | Finding::Merged | Finding::Untied => {
                format!("export with `{EXPORT}`, or, without BatchNormalization, `{UNTOUCHED}`, or save with `{SAVE}`")
            }
        }
    }
}

/// What was found and what it means; the remedy is told apart.
impl fmt::Display for TrainingWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TrainingWarning { finding, count, first, beside } = self;
        let (first, beside) = (shown(first), shown(beside));
        let many = |one: &'static str, more: &'static str| if *count == 1 { one } else { more };
        match finding {
            Finding::FoldedBatchNorm => write!(
                f,
                "{count} BatchNormalization {} folded into the weights of other nodes, first at node `{first}`: scales, \
                 biases and running statistics are gone, and training moves other weights than the framework's",
                many("layer is", "layers are")
            ),
            Finding::InferenceBatchNorm => write!(
                f,
                "{count} BatchNormalization {} in inference mode, first node `{first}`: stored statistics stand in for \
                 those of the batch and never move, so losses and gradients are not those of training",
                many("node is", "nodes are")
            ),
            Finding::InferenceDropout => write!(
                f,
                "{count} Dropout {} in inference mode{}, first node `{first}`: nothing is dropped there, so the model \
                 trains without that regularisation",
                many("node is", "nodes are"),
                if beside.is_empty() { String::new() } else { format!(", {beside}") }
            ),
            Finding::RemovedBias => write!(
                f,
                "{count} {} removed, first at node `{first}`: the exporter left out what merely starts at zero, and nothing \
                 trains in its place",
                many("bias was", "biases were")
            ),
            Finding::Merged => write!(
                f,
                "{count} {} of several parameters, first `{first}`, {beside}: the exporter merged what merely starts \
                 equal, and trained so these stay equal for ever",
                many("tensor stands in the place", "tensors stand in the place")
            ),
            Finding::Untied => write!(
                f,
                "{count} {} of tensors with the same values, first `{first}` and `{beside}`: the exporter made two \
                 parameters of a tied one, and trained so they part",
                many("pair", "pairs")
            ),
        }
    }
}
