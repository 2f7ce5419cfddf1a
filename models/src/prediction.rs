//! Model heads: logits as output, or a loss computed in the graph.

use crate::builder::{Axis, Builder, Value, attr};
use crate::layer::reshape;

#[derive(Debug, Clone)]
pub struct Prediction {
    pub logits: Value,
    pub shape: Vec<Axis>,
    pub target: Target,
}

/// The loss and label format of a prediction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// Cross-entropy with the classes along axis 1.
    Class,
    /// Per-token cross-entropy with the classes along the last axis. Labels of -100 are ignored.
    Token,
    /// Binary cross-entropy per score; labels are f32.
    Truth,
}

/// Adds the output `logits` or, `with_loss`, the input `labels` and the output `loss`.
pub fn finish(net: &mut Builder, prediction: &Prediction, with_loss: bool) {
    let Prediction { logits, shape, target } = prediction;
    if !with_loss {
        return net.output_f32("logits", logits, shape);
    }
    let path = "loss";
    let mean = |net: &mut Builder, logits: &Value, labels: &Value| {
        let reduction = vec![attr::string("reduction", "mean"), attr::int("ignore_index", -100)];
        net.node(path, "SoftmaxCrossEntropyLoss", &[logits, labels], reduction)
    };
    let loss = match target {
        Target::Class => {
            let label_shape: Vec<Axis> = shape[..1].iter().chain(&shape[2..]).copied().collect();
            let labels = net.input_i64("labels", &label_shape);
            mean(net, logits, &labels)
        }
        Target::Token => {
            let (classes, label_shape) =
                shape.split_last().expect("logits of tokens have the classes as their last axis");
            let Axis::Size(classes) = classes else { unreachable!("the number of classes is known") };
            let labels = net.input_i64("labels", label_shape);
            let logits = reshape(net, path, logits, &[-1, *classes as i64]);
            let labels = reshape(net, path, &labels, &[-1]);
            mean(net, &logits, &labels)
        }
        Target::Truth => {
            // log(1 + eˣ) - x·y
            let labels = net.input_f32("labels", shape);
            let softplus = net.node(path, "Softplus", &[logits], vec![]);
            let product = net.node(path, "Mul", &[logits, &labels], vec![]);
            let losses = net.node(path, "Sub", &[&softplus, &product], vec![]);
            net.node(path, "ReduceMean", &[&losses], vec![attr::int("keepdims", 0)])
        }
    };
    net.output_scalar("loss", &loss);
}
