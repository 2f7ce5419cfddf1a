//! How every model of the zoo ends: with its logits, or with a loss that is worked out in the graph.

use crate::builder::{Axis, Builder, Value, attr};
use crate::layer::reshaped;

/// What a model predicts.
#[derive(Debug, Clone)]
pub struct Prediction {
    /// The scores.
    pub logits: Value,
    /// Their shape.
    pub shape: Vec<Axis>,
    /// How they are compared with labels.
    pub target: Target,
}

/// How predictions are compared with labels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// Cross-entropy; the classes are along axis 1.
    Class,
    /// Cross-entropy for every token; the classes are along the last axis. A label of -100 counts for nothing.
    Token,
    /// Cross-entropy of yes and no for every score; labels are f32.
    Truth,
}

/// Ends the graph with output `logits`; or, `with_loss`, with input `labels` and output `loss`.
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
            let of: Vec<Axis> = shape[..1].iter().chain(&shape[2..]).copied().collect();
            let labels = net.input_i64("labels", &of);
            mean(net, logits, &labels)
        }
        Target::Token => {
            let (classes, of) = shape.split_last().expect("logits of tokens have the classes as their last axis");
            let Axis::Size(classes) = classes else { unreachable!("the number of classes is known") };
            let labels = net.input_i64("labels", of);
            let logits = reshaped(net, path, logits, &[-1, *classes as i64]);
            let labels = reshaped(net, path, &labels, &[-1]);
            mean(net, &logits, &labels)
        }
        Target::Truth => {
            // log(1 + eˣ) - x·y
            let labels = net.input_f32("labels", shape);
            let all = net.node(path, "Softplus", &[logits], vec![]);
            let hit = net.node(path, "Mul", &[logits, &labels], vec![]);
            let each = net.node(path, "Sub", &[&all, &hit], vec![]);
            net.node(path, "ReduceMean", &[&each], vec![attr::int("keepdims", 0)])
        }
    };
    net.output_scalar("loss", &loss);
}
