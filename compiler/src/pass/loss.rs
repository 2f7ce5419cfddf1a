//! Attaches a loss to a graph that ends in predictions.
//!
//! The loss comes from the training command, not the model. Its ops therefore follow all others, are not numbered in
//! plans, and run in the stage that computes the predictions.

use crate::graph::{Graph, Origin, Output, Writer};
use crate::op::expr::formula;
use crate::op::unary::scalar;
use crate::op::{Binary, Cast, CrossEntropy, Emit, Input, NodeId, Op, Value};
use crate::tensor::DType;
use crate::tensor::fact::Fact;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use thiserror::Error;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Loss {
    /// Mean cross-entropy of logits against class indices; [`IGNORED`] labels are ignored.
    CrossEntropy,
    Mse,
    /// Mean binary cross-entropy of logits against targets in 0…1.
    Bce,
    /// A scalar output of the graph: the one named `loss`, the first output, or the only scalar.
    Output,
}

impl Loss {
    pub fn name(self) -> &'static str {
        match self {
            Loss::CrossEntropy => "cross-entropy",
            Loss::Mse => "mse",
            Loss::Bce => "bce",
            Loss::Output => "output",
        }
    }

    pub fn from_name(name: &str) -> Option<Loss> {
        [Loss::CrossEntropy, Loss::Mse, Loss::Bce, Loss::Output].into_iter().find(|loss| loss.name() == name)
    }
}

#[derive(Debug, Error, PartialEq)]
pub enum LossError {
    #[error("the model has no output for a loss")]
    NoOutput,
    #[error("the class axis {axis} does not exist in the output {fact}")]
    ClassAxis { axis: i64, fact: String },
    #[error("the output `{name}` is {fact}; a loss needs floats")]
    NotFloat { name: String, fact: String },
    #[error("the output `{name}` is {fact}, not a scalar")]
    NotScalar { name: String, fact: String },
    #[error("the model already has an input named `{name}`")]
    Taken { name: String },
}

/// Name of the targets in data files.
pub const TARGET: &str = "target";

/// The ignored class index, PyTorch's default `ignore_index`.
pub const IGNORED: i64 = -100;

/// Reserved output name of the loss.
pub const LOSS: &str = "pipec.loss";

/// Reserved input name of the loss scale, used when gradients would underflow in `f16`.
pub const LOSS_SCALE: &str = "pipec.loss-scale";

/// Reserved output name of the scaled loss.
pub const SCALED_LOSS: &str = "pipec.scaled-loss";

/// The default class axis.
const LAST: i64 = -1;

/// The class axis of predictions, non-negative; `None` if out of range.
pub fn class_axis(predictions: &Fact, axis: Option<i64>) -> Option<usize> {
    let axis = axis.unwrap_or(LAST);
    let from_front = if axis < 0 { axis + predictions.rank() as i64 } else { axis };
    usize::try_from(from_front).ok().filter(|axis| *axis < predictions.rank())
}

/// Adds the loss times the input [`LOSS_SCALE`] as the last output [`SCALED_LOSS`].
pub fn scaled(graph: &mut Graph, loss: Value) {
    let fact = graph.fact(loss).clone();
    let mut out = Writer { graph, origin: Origin { source: LOSS.into(), module: String::new() } };
    let scale = out.emit(Op::Input(Input { name: LOSS_SCALE.into(), fact }), &[]);
    let value = out.emit(Op::Binary(Binary::Mul), &[loss, scale]);
    graph.outputs.push(Output { name: SCALED_LOSS.into(), value });
}

/// The output that can be the model's own loss: the scalar named `loss`, else the first output if it is a scalar, else the
/// only scalar.
pub fn output_of(graph: &Graph) -> Option<usize> {
    let is_scalar = |output: &Output| {
        let fact = graph.fact(output.value);
        fact.dtype.is_float() && fact.shape.iter().all(|dim| dim.is(1))
    };
    if let Some(named) = graph.outputs.iter().position(|output| output.name == "loss" && is_scalar(output)) {
        return Some(named);
    }
    let mut scalars = (0..graph.outputs.len()).filter(|at| is_scalar(&graph.outputs[*at]));
    let first = scalars.next()?;
    (first == 0 || scalars.next().is_none()).then_some(first)
}

/// Tests whether an output depends on an input that the first output does not depend on, as a loss depends on labels.
pub fn reads_extra_inputs(graph: &Graph, output: usize) -> bool {
    let inputs = |value: Value| -> BTreeSet<NodeId> {
        graph.ancestors(value).into_iter().filter(|node| matches!(graph.node(*node).op, Op::Input(_))).collect()
    };
    !inputs(graph.outputs[output].value).is_subset(&inputs(graph.outputs[0].value))
}

/// Adds the loss of the first output (or the output that is the loss) as the graph's last output [`LOSS`], and returns
/// it. `class_axis` may be negative and defaults to the last axis. The loss of an output of a two-byte type is computed
/// in `f32`.
pub fn attach(graph: &mut Graph, loss: Loss, class_axis: Option<i64>) -> Result<Value, LossError> {
    let at = if loss == Loss::Output { output_of(graph).unwrap_or(0) } else { 0 };
    let Some(Output { name, value: mut y }) = graph.outputs.get(at).cloned() else { return Err(LossError::NoOutput) };
    let mut fact = graph.fact(y).clone();
    if !fact.dtype.is_float() {
        return Err(LossError::NotFloat { name, fact: fact.to_string() });
    }
    let is_narrow = matches!(fact.dtype, DType::F16 | DType::Bf16);
    if is_narrow && loss != Loss::CrossEntropy {
        let mut out = Writer { graph, origin: Origin { source: LOSS.into(), module: String::new() } };
        y = out.emit(Op::Cast(Cast { to: DType::F32 }), &[y]);
        fact.dtype = DType::F32;
    }
    if loss == Loss::Output {
        if fact.shape.iter().any(|d| !d.is(1)) {
            return Err(LossError::NotScalar { name, fact: fact.to_string() });
        }
        graph.outputs.push(Output { name: LOSS.into(), value: y });
        return Ok(y);
    }
    let is_taken = graph.ids().any(|id| matches!(&graph.node(id).op, Op::Input(i) if i.name == TARGET));
    if is_taken {
        return Err(LossError::Taken { name: TARGET.into() });
    }
    let mut out = Writer { graph, origin: Origin { source: LOSS.into(), module: String::new() } };
    let target = |out: &mut Writer<'_>, fact| out.emit(Op::Input(Input { name: TARGET.into(), fact }), &[]);
    let value = match loss {
        Loss::CrossEntropy => {
            let axis = self::class_axis(&fact, class_axis)
                .ok_or_else(|| LossError::ClassAxis { axis: class_axis.unwrap_or(LAST), fact: fact.to_string() })?;
            let mut shape = fact.shape.clone();
            shape.remove(axis);
            let labels = target(&mut out, Fact::new(DType::I64, shape));
            // The logits are often the largest tensor of a model, so they are not copied into `f32`.
            out.emit(Op::CrossEntropy(CrossEntropy { axis, ignore: Some(IGNORED), wide: is_narrow }), &[y, labels])
        }
        Loss::Mse => {
            let expected = target(&mut out, fact.clone());
            formula(&mut out, [y, expected], |[y, expected]| {
                let error = y - expected;
                (error * error).mean()
            })
        }
        // max(y, 0) - y·t + log(1 + e^-|y|), computed without overflow as softplus(y) - y·t
        Loss::Bce => {
            let expected = target(&mut out, fact.clone());
            formula(&mut out, [y, expected], |[y, expected]| (y.softplus() - y * expected).mean())
        }
        Loss::Output => unreachable!("handled above"),
    };
    graph.outputs.push(Output { name: LOSS.into(), value });
    Ok(value)
}

/// The constant 1 in the loss's element type: the gradient of the loss by itself.
pub fn seed(dtype: DType) -> Op {
    scalar(dtype, 1.0)
}
