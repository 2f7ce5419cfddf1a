//! Losses.

use super::{Known, NodeOutputs, Outputs, Scope, one};
use crate::import::build::Build;
use crate::import::lower_error::LowerReason;
use crate::import::onnx::lower::loss::{Reduction, of_log_probabilities, select_class};
use crate::op::{Binary, CrossEntropy, LogSoftmax, Op, ReduceKind, Unary, Value};
use crate::tensor::dim::{Dim, volume};
use crate::tensor::fact::Fact;

/// Default `ignore_index`.
const IGNORED: i64 = -100;

pub fn reduction(scope: &Scope<'_>) -> Result<Reduction, LowerReason> {
    match scope.int("reduction", 1)? {
        0 => Ok(Reduction::None),
        1 => Ok(Reduction::Mean),
        2 => Ok(Reduction::Sum),
        other => Err(LowerReason::attribute("reduction", other, "0 (none), 1 (mean) or 2 (sum)")),
    }
}

/// Scores `[N, C, …]` and targets `[N, …]`. A single example has no `N` in the file.
fn operands(scope: &mut Scope<'_>) -> Result<(Value, Value), LowerReason> {
    let (mut scores, mut target) = (scope.value("self")?, scope.value("target")?);
    if scope.fact(target).dtype.is_float() {
        return Err(LowerReason::Unsupported("a loss with probabilities as targets".to_string()));
    }
    let shape = scope.fact(scores).shape;
    if let [classes] = shape.as_slice() {
        scores = scope.reshape(scores, vec![Dim::Known(1), classes.clone()])?;
        target = scope.reshape(target, vec![Dim::Known(1)])?;
        if reduction(scope)? == Reduction::None {
            return Err(LowerReason::Unsupported("an unreduced loss of one example".to_string()));
        }
    }
    Ok((scores, target))
}

/// Cross-entropy of logits and class indices or probabilities.
pub fn cross_entropy(scope: &mut Scope<'_>) -> Outputs {
    let smoothing = scope.float("label_smoothing", 0.0)?;
    if scope.fact_of("target")?.dtype.is_float() {
        return against_probabilities(scope, smoothing);
    }
    if smoothing != 0.0 {
        return label_smoothing(scope, smoothing);
    }
    let (logits, target) = operands(scope)?;
    let (reduction, ignore) = (reduction(scope)?, Some(scope.int("ignore_index", IGNORED)?));
    let weights = scope.optional("weight")?;
    if reduction == Reduction::Mean && weights.is_none() {
        return one(scope.add(Op::CrossEntropy(CrossEntropy::new(1, ignore)), &[logits, target])?);
    }
    let logarithm = scope.add(Op::LogSoftmax(LogSoftmax { axis: 1 }), &[logits])?;
    one(select_class(scope, logarithm, target, weights, reduction, ignore)?)
}

/// Negative log-likelihood of log-probabilities.
pub fn negative_log_likelihood(scope: &mut Scope<'_>) -> Outputs {
    let (logarithm, target) = operands(scope)?;
    let (reduction, ignore) = (reduction(scope)?, Some(scope.int("ignore_index", IGNORED)?));
    let weights = scope.optional("weight")?;
    let loss = of_log_probabilities(scope, logarithm, target, weights, reduction, ignore)?;
    Ok(NodeOutputs::Tensors(vec![Known::Value(loss), Known::Absent("the total weight of a loss")]))
}

pub fn reduce(scope: &mut Scope<'_>, losses: Value, reduction: Reduction) -> Result<Value, LowerReason> {
    let axes: Vec<usize> = (0..scope.fact(losses).rank()).collect();
    match reduction {
        _ if axes.is_empty() => Ok(losses),
        Reduction::None => Ok(losses),
        Reduction::Mean => scope.reduce(ReduceKind::Mean, losses, &axes, false),
        Reduction::Sum => scope.reduce(ReduceKind::Sum, losses, &axes, false),
    }
}

/// Class weights in a shape that broadcasts against scores `[N, C, …]`.
fn weight_row(scope: &mut Scope<'_>, weights: Value, rank: usize) -> Result<Value, LowerReason> {
    let mut shape = vec![Dim::Known(1); rank];
    shape[1] = volume(&scope.fact(weights).shape)?;
    scope.reshape(weights, shape)
}

fn classes(logits: &Fact) -> Result<i64, LowerReason> {
    let classes = logits.shape.get(1).and_then(Dim::known).filter(|classes| *classes > 0);
    classes.ok_or(LowerReason::NotConstant { what: "the number of classes" })
}

/// Cross-entropy against probabilities; the mean is over examples.
fn against_probabilities(scope: &mut Scope<'_>, smoothing: f64) -> Outputs {
    let (mut logits, mut target) = (scope.value("self")?, scope.value("target")?);
    let shape = scope.fact(logits).shape;
    if let [classes] = shape.as_slice() {
        let row = vec![Dim::Known(1), classes.clone()];
        logits = scope.reshape(logits, row.clone())?;
        target = scope.reshape(target, row)?;
    }
    let fact = scope.fact(logits);
    let classes = classes(&fact)?;
    if smoothing != 0.0 {
        target = scope.with_number(Binary::Mul, target, 1.0 - smoothing)?;
        target = scope.with_number(Binary::Add, target, smoothing / classes as f64)?;
    }
    let logarithm = scope.add(Op::LogSoftmax(LogSoftmax { axis: 1 }), &[logits])?;
    let mut product = scope.binary(Binary::Mul, logarithm, target)?;
    if let Some(weights) = scope.optional("weight")? {
        let weights = weight_row(scope, weights, fact.rank())?;
        product = scope.binary(Binary::Mul, product, weights)?;
    }
    let sum = scope.reduce(ReduceKind::Sum, product, &[1], false)?;
    let mut losses = scope.unary(Unary::Neg, sum)?;
    let reduction = reduction(scope)?;
    if shape.len() == 1 {
        losses = scope.reshape(losses, Vec::new())?;
    }
    one(reduce(scope, losses, reduction)?)
}

/// Cross-entropy with label smoothing: `(1 - s) nll + s/C Σ_c -w_c log p_c`.
fn label_smoothing(scope: &mut Scope<'_>, smoothing: f64) -> Outputs {
    let (logits, target) = operands(scope)?;
    let fact = scope.fact(logits);
    let classes = classes(&fact)?;
    let (reduction, ignore) = (reduction(scope)?, Some(scope.int("ignore_index", IGNORED)?));
    let weights = scope.optional("weight")?;
    let logarithm = scope.add(Op::LogSoftmax(LogSoftmax { axis: 1 }), &[logits])?;
    let nll = select_class(scope, logarithm, target, weights, Reduction::None, ignore)?;
    let mut weighted = logarithm;
    if let Some(weights) = weights {
        let row = weight_row(scope, weights, fact.rank())?;
        weighted = scope.binary(Binary::Mul, weighted, row)?;
    }
    let sum = scope.reduce(ReduceKind::Sum, weighted, &[1], false)?;
    let uniform = scope.unary(Unary::Neg, sum)?;
    // With all log-probabilities -1, the loss counts the targets or sums their weights.
    let minus_one = scope.scalar(fact.dtype, -1.0)?;
    let minus_one = scope.broadcast(minus_one, fact.shape.clone())?;
    let not_ignored = select_class(scope, minus_one, target, None, Reduction::None, ignore)?;
    let uniform = scope.binary(Binary::Mul, uniform, not_ignored)?;
    let nll = scope.with_number(Binary::Mul, nll, 1.0 - smoothing)?;
    let uniform = scope.with_number(Binary::Mul, uniform, smoothing / classes as f64)?;
    let losses = scope.binary(Binary::Add, nll, uniform)?;
    if reduction != Reduction::Mean {
        return one(reduce(scope, losses, reduction)?);
    }
    let sum = reduce(scope, losses, Reduction::Sum)?;
    let total = select_class(scope, minus_one, target, weights, Reduction::Sum, ignore)?;
    one(scope.binary(Binary::Div, sum, total)?)
}
