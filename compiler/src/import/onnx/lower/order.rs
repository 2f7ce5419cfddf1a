//! Sorting and cumulative operators: `TopK`, `CumSum`, `CumProd`, `Hardmax`, `ReverseSequence`.

use super::attribute::axis;
use super::gather::{number, scale_index};
use super::{Known, LowerReason, Outputs, Scope};
use crate::import::build::Build;
use crate::import::formula::formula;
use crate::op::{ArgReduce, Binary, Compare, Cumulative, CumulativeKind, Flip, Gather, Op, TopK, Value};
use crate::tensor::DType;
use crate::tensor::dim::{Dim, volume};

/// The largest or smallest elements along an axis and their indices. Since operator set 10, the count is an input.
pub fn top_k(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value(0)?;
    let axis = axis(scope.int("axis", -1)?, scope.fact(x).rank())?;
    let largest = scope.flag("largest", true)?;
    let count = match scope.opset {
        ..10 => Dim::Known(scope.int("k", 0)?),
        _ => match scope.dims(1, "the number of elements to choose")?.as_deref() {
            Some([one]) => one.clone(),
            _ => return Err(LowerReason::Inputs("the number of elements to choose is not one number".to_string())),
        },
    };
    let outputs = scope.add_all(Op::TopK(TopK { axis, count, largest }), &[x])?;
    Ok(outputs.into_iter().map(Known::Value).collect())
}

pub fn cumulative(scope: &mut Scope<'_>, kind: CumulativeKind) -> Outputs {
    let x = scope.value(0)?;
    let axis_input = match scope.integers(1, "the axis of a cumulative sum")?.as_deref() {
        Some([one]) => *one,
        _ => return Err(LowerReason::Inputs("the axis of a cumulative sum is not one number".to_string())),
    };
    let axis = axis(axis_input, scope.fact(x).rank())?;
    let (exclusive, reverse) = (scope.flag("exclusive", false)?, scope.flag("reverse", false)?);
    Ok(vec![Known::Value(scope.add(Op::Cumulative(Cumulative { kind, axis, exclusive, reverse }), &[x])?)])
}

/// ArgMax or ArgMin where ties give the last index: the first index of the flipped axis.
pub fn last_arg(scope: &mut Scope<'_>, largest: bool, x: Value, axis: usize, keep: bool) -> Result<Value, LowerReason> {
    let size = scope.fact(x).shape[axis].sub(&Dim::Known(1))?;
    let flipped = scope.add(Op::Flip(Flip { axes: vec![axis] }), &[x])?;
    let flipped_index = scope.add(Op::ArgReduce(ArgReduce { largest, axis, keep }), &[flipped])?;
    let last = number(scope, &size)?;
    scope.binary(Binary::Sub, last, flipped_index)
}

/// 1 at the first maximum along an axis, else 0. Before operator set 13 all axes from `axis` on are flattened.
pub fn hardmax(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value(0)?;
    let fact = scope.fact(x);
    let at = axis(scope.int("axis", if scope.opset < 13 { 1 } else { -1 })?, fact.rank())?;
    let mut flat = fact.shape.clone();
    if scope.opset < 13 {
        flat.truncate(at);
        flat.push(volume(&fact.shape[at..])?);
    }
    let rows = scope.reshape(x, flat.clone())?;
    let index = scope.add(Op::ArgReduce(ArgReduce { largest: true, axis: at, keep: true }), &[rows])?;
    let class_index = scope.count(flat.len(), at, &flat[at])?;
    let is_maximum = scope.compare(Compare::Equal, class_index, index)?;
    let is_maximum = scope.reshape(is_maximum, fact.shape)?;
    Ok(vec![Known::Value(scope.cast(is_maximum, fact.dtype)?)])
}

/// Reverses the first `length` elements of each sequence.
pub fn reverse_sequence(scope: &mut Scope<'_>) -> Outputs {
    let (x, lengths) = (scope.value(0)?, scope.value(1)?);
    let dims = scope.fact(x).shape;
    let (batch, time) = match (scope.int("batch_axis", 1)?, scope.int("time_axis", 0)?) {
        (1, 0) => (1, 0),
        (0, 1) => (0, 1),
        (batch, time) => {
            return Err(LowerReason::Inputs(format!(
                "the batch is axis {batch} and time axis {time}, expected 0 and 1"
            )));
        }
    };
    if dims.len() < 2 {
        return Err(LowerReason::Inputs(format!("a tensor of rank {} has no sequences", dims.len())));
    }
    let lengths = scope.cast(lengths, DType::I64)?;
    let mut shape = vec![Dim::Known(1); 2];
    shape[batch] = dims[batch].clone();
    let lengths = scope.reshape(lengths, shape)?;
    // Within a sequence of n steps, step t comes from step n - 1 - t.
    let step = scope.count(2, time, &dims[time])?;
    let is_valid = scope.compare(Compare::Less, step, lengths)?;
    let mirrored = formula(scope, [lengths, step], |[lengths, step]| lengths - 1.0 - step)?;
    let from = scope.select(is_valid, mirrored, step)?;
    let from = scale_index(scope, from, if time == 0 { &dims[1] } else { &Dim::Known(1) })?;
    let example = scope.count(2, batch, &dims[batch])?;
    let example = scale_index(scope, example, if batch == 0 { &dims[1] } else { &Dim::Known(1) })?;
    let positions = scope.binary(Binary::Add, from, example)?;
    let flat = super::gather::read_joined(scope, x, 2)?;
    Ok(vec![Known::Value(scope.add(Op::Gather(Gather { axis: 0 }), &[flat, positions])?)])
}
