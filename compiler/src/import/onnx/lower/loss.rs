//! Loss operators: cross-entropy from logits, and negative log-likelihood from log-probabilities.

use super::{Known, LowerReason, Outputs, Scope, one};
use crate::import::build::Build;
use crate::import::equal_sizes::agree;
use crate::import::symbolic_batch::with_batch_of;
use crate::op::{Binary, Compare, CrossEntropy, Gather, LogSoftmax, Op, ReduceKind, Unary, Value};
use crate::tensor::{DType, Tensor};

#[derive(Clone, Copy, PartialEq)]
pub enum Reduction {
    None,
    Sum,
    /// The mean, weighted if there are class weights.
    Mean,
}

fn reduction(scope: &Scope<'_>) -> Result<Reduction, LowerReason> {
    match scope.text("reduction", "mean")?.as_str() {
        "none" => Ok(Reduction::None),
        "sum" => Ok(Reduction::Sum),
        "mean" => Ok(Reduction::Mean),
        other => Err(LowerReason::attribute("reduction", format!("`{other}`"), "`none`, `sum` or `mean`")),
    }
}

fn ignore_index(scope: &Scope<'_>) -> Result<Option<i64>, LowerReason> {
    if scope.is_set("ignore_index") { Ok(Some(scope.int("ignore_index", 0)?)) } else { Ok(None) }
}

/// Cross-entropy of logits `[N, C, …]` and classes `[N, …]`. The second output is the log-probabilities.
pub fn softmax_cross_entropy(scope: &mut Scope<'_>) -> Outputs {
    // cross_entropy_loss(self, target, weight, reduction, ignore_index, label_smoothing)
    let arguments = scope.node.torch_arguments("aten.cross_entropy_loss");
    if arguments.and_then(|list| list.get(5)?.parse().ok()).is_some_and(|smoothing: f64| smoothing != 0.0) {
        return Err(LowerReason::Unsupported("label smoothing, which PyTorch's exporter leaves out,".to_string()));
    }
    let (logits, target) = (scope.value(0)?, scope.value(1)?);
    let (reduction, ignore) = (reduction(scope)?, ignore_index(scope)?);
    let needs_log = scope.node.outputs.get(1).is_some_and(|name| !name.is_empty());
    let is_core_mean = reduction == Reduction::Mean && !scope.has(2);
    let mut outputs = Vec::new();
    let logarithm = match is_core_mean && !needs_log {
        true => None,
        false => Some(scope.add(Op::LogSoftmax(LogSoftmax { axis: 1 }), &[logits])?),
    };
    outputs.push(Known::Value(match logarithm {
        Some(logarithm) if !is_core_mean => {
            let weights = scope.optional(2)?;
            select_class(scope, logarithm, target, weights, reduction, ignore)?
        }
        _ => scope.add(Op::CrossEntropy(CrossEntropy::new(1, ignore)), &[logits, target])?,
    }));
    outputs.extend(logarithm.map(Known::Value));
    Ok(outputs)
}

/// Negative log-likelihood of log-probabilities.
pub fn negative_log_likelihood(scope: &mut Scope<'_>) -> Outputs {
    let (logarithm, target) = (scope.value(0)?, scope.value(1)?);
    let (reduction, ignore) = (reduction(scope)?, ignore_index(scope)?);
    let weights = scope.optional(2)?;
    one(of_log_probabilities(scope, logarithm, target, weights, reduction, ignore)?)
}

/// The loss of log-probabilities. The mean after a LogSoftmax over the classes is a cross-entropy of the logits.
pub fn of_log_probabilities(
    scope: &mut impl Build,
    logarithm: Value,
    target: Value,
    weights: Option<Value>,
    reduction: Reduction,
    ignore: Option<i64>,
) -> Result<Value, LowerReason> {
    let is_log_softmax = scope.graph().node(logarithm.node).op == Op::LogSoftmax(LogSoftmax { axis: 1 });
    if reduction == Reduction::Mean && weights.is_none() && is_log_softmax {
        let logits = scope.graph().inputs(logarithm.node)[0];
        return scope.add(Op::CrossEntropy(CrossEntropy::new(1, ignore)), &[logits, target]);
    }
    select_class(scope, logarithm, target, weights, reduction, ignore)
}

/// The reduced loss `-weight[target]·logarithm[target]` over targets that are not ignored. The mean divides by the sum
/// of weights.
pub fn select_class(
    scope: &mut impl Build,
    logarithm: Value,
    target: Value,
    weights: Option<Value>,
    reduction: Reduction,
    ignore: Option<i64>,
) -> Result<Value, LowerReason> {
    let fact = scope.fact(logarithm);
    let mut row_shape = fact.shape.clone();
    let target = match row_shape.len() {
        0 | 1 => target,
        _ => {
            let mut target_shape = row_shape.clone();
            target_shape.remove(1);
            with_batch_of(scope, target, &target_shape)?
        }
    };
    let classes_of = scope.fact(target);
    if fact.rank() < 2 || {
        row_shape.remove(1);
        row_shape != classes_of.shape
    } {
        row_shape.iter().zip(&classes_of.shape).try_for_each(|(row, class)| agree(row, class))?;
        return Err(LowerReason::Inputs(format!("scores {fact} do not fit targets {classes_of}")));
    }
    let target = scope.cast(target, DType::I64)?;
    // One-hot comparison: class indices along axis 1, broadcast against the targets.
    let classes = scope.count(fact.rank(), 1, &fact.shape[1])?;
    let column = scope.unsqueeze(target, 1)?;
    let is_target = scope.compare(Compare::Equal, classes, column)?;
    let zero = scope.scalar(fact.dtype, 0.0)?;
    let at_target = scope.select(is_target, logarithm, zero)?;
    let sum = scope.reduce(ReduceKind::Sum, at_target, &[1], false)?;
    let mut loss = scope.unary(Unary::Neg, sum)?;
    let mut weight = None;
    let not_ignored = match ignore {
        Some(ignore) => {
            let ignore = scope.constant(Tensor::from_i64(&[], &[ignore]))?;
            let is_ignored = scope.compare(Compare::Equal, target, ignore)?;
            Some(scope.unary(Unary::Not, is_ignored)?)
        }
        None => None,
    };
    if let Some(weights) = weights {
        let first = scope.constant(Tensor::from_i64(&[], &[0]))?;
        let index = match not_ignored {
            Some(not_ignored) => scope.select(not_ignored, target, first)?,
            None => target,
        };
        weight = Some(scope.add(Op::Gather(Gather { axis: 0 }), &[weights, index])?);
    }
    if let Some(not_ignored) = not_ignored {
        let row_weights = match weight {
            Some(weight) => weight,
            None => {
                let one = scope.scalar(fact.dtype, 1.0)?;
                scope.broadcast(one, row_shape)?
            }
        };
        weight = Some(scope.select(not_ignored, row_weights, zero)?);
    }
    if let Some(weight) = weight {
        loss = scope.binary(Binary::Mul, loss, weight)?;
    }
    if reduction == Reduction::None {
        return Ok(loss);
    }
    let axes: Vec<usize> = (0..scope.fact(loss).rank()).collect();
    match weight {
        Some(weight) if reduction == Reduction::Mean => {
            let sum = scope.reduce(ReduceKind::Sum, loss, &axes, false)?;
            let total = scope.reduce(ReduceKind::Sum, weight, &axes, false)?;
            scope.binary(Binary::Div, sum, total)
        }
        _ if reduction == Reduction::Mean => scope.reduce(ReduceKind::Mean, loss, &axes, false),
        _ => scope.reduce(ReduceKind::Sum, loss, &axes, false),
    }
}
