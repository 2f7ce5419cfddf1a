//! Losses.

use super::{Known, Made, Outputs, Scope, one};
use crate::import::build::Build;
use crate::import::onnx::lower::loss::{Reduction, picked};
use crate::import::reason::Reason;
use crate::op::{Binary, CrossEntropy, LogSoftmax, Op, ReduceKind, Unary, Value};
use crate::tensor::dim::Dim;

/// The target that counts for nothing unless the program says otherwise.
const IGNORED: i64 = -100;

fn reduction(scope: &Scope<'_>) -> Result<Reduction, Reason> {
    match scope.int("reduction", 1)? {
        0 => Ok(Reduction::None),
        1 => Ok(Reduction::Mean),
        2 => Ok(Reduction::Sum),
        other => {
            let expected = "0 (none), 1 (mean) or 2 (sum)";
            Err(Reason::Attribute { name: "reduction", found: other.to_string(), expected })
        }
    }
}

/// Scores `[N, C, …]` and their targets `[N, …]`. One example has no `N` in the file.
fn operands(scope: &mut Scope<'_>) -> Result<(Value, Value), Reason> {
    let (mut scores, mut target) = (scope.value("self")?, scope.value("target")?);
    if scope.fact(target).dtype.is_float() {
        return Err(Reason::Unsupported("a loss whose targets are probabilities".to_string()));
    }
    let shape = scope.fact(scores).shape;
    if let [classes] = shape.as_slice() {
        scores = scope.reshape(scores, vec![Dim::Known(1), classes.clone()])?;
        target = scope.reshape(target, vec![Dim::Known(1)])?;
        if reduction(scope)? == Reduction::None {
            return Err(Reason::Unsupported("an unreduced loss of one example".to_string()));
        }
    }
    Ok((scores, target))
}

/// Cross-entropy of logits against classes.
pub fn cross_entropy(scope: &mut Scope<'_>) -> Outputs {
    let smoothing = scope.float("label_smoothing", 0.0)?;
    if smoothing != 0.0 {
        return Err(Reason::Unsupported(format!("label smoothing of {smoothing}")));
    }
    let (logits, target) = operands(scope)?;
    let (reduction, ignore) = (reduction(scope)?, Some(scope.int("ignore_index", IGNORED)?));
    let weights = scope.optional("weight")?;
    if reduction == Reduction::Mean && weights.is_none() {
        return one(scope.add(Op::CrossEntropy(CrossEntropy { axis: 1, ignore }), &[logits, target])?);
    }
    let logarithm = scope.add(Op::LogSoftmax(LogSoftmax { axis: 1 }), &[logits])?;
    one(picked(scope, logarithm, target, weights, reduction, ignore)?)
}

/// The same from log-probabilities. Behind a log-softmax over the classes it is the cross-entropy of that one's input.
pub fn negative_log_likelihood(scope: &mut Scope<'_>) -> Outputs {
    let (logarithm, target) = operands(scope)?;
    let (reduction, ignore) = (reduction(scope)?, Some(scope.int("ignore_index", IGNORED)?));
    let weights = scope.optional("weight")?;
    let behind = scope.graph.node(logarithm.node).op == Op::LogSoftmax(LogSoftmax { axis: 1 });
    let loss = match behind && reduction == Reduction::Mean && weights.is_none() {
        true => {
            let logits = scope.graph.inputs(logarithm.node)[0];
            scope.add(Op::CrossEntropy(CrossEntropy { axis: 1, ignore }), &[logits, target])?
        }
        false => picked(scope, logarithm, target, weights, reduction, ignore)?,
    };
    Ok(Made::Tensors(vec![Known::Value(loss), Known::Absent("the total weight of a loss")]))
}

/// The difference of prediction and target under a function, joined.
pub fn distance(scope: &mut Scope<'_>, squared: bool) -> Outputs {
    let (a, b) = (scope.value("self")?, scope.value("target")?);
    let difference = scope.binary(Binary::Sub, a, b)?;
    let each = match squared {
        true => scope.binary(Binary::Mul, difference, difference)?,
        false => scope.unary(Unary::Abs, difference)?,
    };
    let axes: Vec<usize> = (0..scope.fact(each).rank()).collect();
    one(match reduction(scope)? {
        _ if axes.is_empty() => each,
        Reduction::None => each,
        Reduction::Mean => scope.reduce(ReduceKind::Mean, each, &axes, false)?,
        Reduction::Sum => scope.reduce(ReduceKind::Sum, each, &axes, false)?,
    })
}
