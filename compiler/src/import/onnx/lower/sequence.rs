//! Sequences of tensors, as far as exporters use them to split a tensor: made in one node, picked from in others.

use super::attribute::axis;
use super::slice::{equal_parts, parts};
use super::{Known, LowerReason, Outputs, Scope};
use crate::import::build::Build;
use crate::op::{Concat, Op};
use crate::tensor::Tensor;
use crate::tensor::dim::Dim;

/// A tensor in parts along an axis; without sizes, in parts of 1 whose axis may go.
pub fn split(scope: &mut Scope<'_>) -> Outputs {
    let dims = scope.fact_of(0)?.shape;
    let at = axis(scope.int("axis", 0)?, dims.len())?;
    let whole = |size: &Dim| {
        size.known().filter(|n| (0..=4096).contains(n)).ok_or(LowerReason::NotConstant { what: "the size of the axis" })
    };
    let drop_axis = !scope.has(1) && !scope.flag("keepdims", true)?;
    let sizes = match scope.inputs.get(1) {
        Some(Some(_)) => {
            let scalar = scope.fact_of(1)?.rank() == 0;
            let given = scope.dims(1, "the sizes of the parts")?.unwrap_or_default();
            match given.as_slice() {
                [each] if scalar => {
                    let count = match dims[at].div_exact(each) {
                        Ok(count) => whole(&count)?,
                        Err(_) => {
                            let each = whole(each)?.max(1);
                            (whole(&dims[at])? + each - 1) / each
                        }
                    };
                    in_parts_of(&dims[at], each, count)?
                }
                _ => given,
            }
        }
        _ => {
            let count = whole(&dims[at])?;
            equal_parts(&dims[at], count, count as usize)?
        }
    };
    let mut values = parts(scope, at, sizes)?;
    if drop_axis {
        let mut left = dims;
        left.remove(at);
        for value in &mut values {
            *value = scope.reshape(*value, left.clone())?;
        }
    }
    Ok(vec![Known::Sequence(values.into_iter().map(Known::Value).collect())])
}

/// `count` parts of `each`, the last one smaller when they do not come out even.
fn in_parts_of(size: &Dim, each: &Dim, count: i64) -> Result<Vec<Dim>, LowerReason> {
    let before = each.mul(&Dim::Known(count - 1))?;
    let mut sizes = vec![each.clone(); usize::try_from(count).unwrap_or(0)];
    if let Some(last) = sizes.last_mut() {
        *last = size.sub(&before)?;
    }
    Ok(sizes)
}

/// The most tensors that a sequence may have: every node that reads one copies the list.
const LONGEST: usize = 4096;

fn sequence(items: Vec<Known>) -> Outputs {
    match items.len() {
        count if count > LONGEST => Err(LowerReason::Unsupported(format!("a sequence of more than {LONGEST} tensors"))),
        _ if items.iter().any(|item| matches!(item, Known::Sequence(_))) => {
            Err(LowerReason::Unsupported("a sequence of sequences".to_string()))
        }
        _ => Ok(vec![Known::Sequence(items)]),
    }
}

/// The tensors of input 0.
fn items(scope: &Scope<'_>) -> Result<Vec<Known>, LowerReason> {
    match scope.known(0)? {
        Known::Sequence(items) => Ok(items.clone()),
        _ => Err(LowerReason::Unsupported("a sequence that is not made in the graph".to_string())),
    }
}

/// The place that input `slot` names among `count`, which may count from the back.
fn place(scope: &Scope<'_>, slot: usize, count: usize) -> Result<usize, LowerReason> {
    let index = scope.integers(slot, "the place in a sequence")?.and_then(|list| list.first().copied());
    axis(index.ok_or(LowerReason::Missing { slot })?, count)
}

/// One tensor of a sequence.
pub fn at(scope: &mut Scope<'_>) -> Outputs {
    let mut items = items(scope)?;
    let place = place(scope, 1, items.len())?;
    Ok(vec![items.swap_remove(place)])
}

/// A sequence of the inputs.
pub fn construct(scope: &mut Scope<'_>) -> Outputs {
    let items = (0..scope.inputs.len()).map(|slot| scope.known(slot).cloned()).collect::<Result<Vec<_>, _>>()?;
    sequence(items)
}

/// A sequence of nothing.
pub fn empty(_: &mut Scope<'_>) -> Outputs {
    Ok(vec![Known::Sequence(Vec::new())])
}

/// A sequence with one more tensor, at the end unless a place is given.
pub fn insert(scope: &mut Scope<'_>) -> Outputs {
    let mut items = items(scope)?;
    let index = scope.integers(2, "the place in a sequence")?.and_then(|list| list.first().copied());
    let count = items.len();
    let place = match index {
        None => count,
        // Behind the last is a place too.
        Some(index) if usize::try_from(index) == Ok(count) => count,
        Some(index) => axis(index, count)?,
    };
    items.insert(place, scope.known(1)?.clone());
    sequence(items)
}

/// A sequence with one tensor less, the last unless a place is given.
pub fn erase(scope: &mut Scope<'_>) -> Outputs {
    let mut items = items(scope)?;
    let last = items.len().checked_sub(1).ok_or_else(|| LowerReason::Inputs("an empty sequence".to_string()))?;
    let place = if scope.has(1) { place(scope, 1, items.len())? } else { last };
    items.remove(place);
    Ok(vec![Known::Sequence(items)])
}

/// How many tensors a sequence has.
pub fn length(scope: &mut Scope<'_>) -> Outputs {
    let count = items(scope)?.len() as i64;
    Ok(vec![Known::Tensor(Tensor::from_i64(&[], &[count]))])
}

/// All tensors of a sequence one behind the other, or on top of each other.
pub fn concat(scope: &mut Scope<'_>) -> Outputs {
    let items = items(scope)?;
    let mut values = items.iter().map(|item| scope.made(item)).collect::<Result<Vec<_>, _>>()?;
    let stacked = scope.flag("new_axis", false)?;
    let first = values.first().ok_or_else(|| LowerReason::Inputs("an empty sequence".to_string()))?;
    let mut shape = scope.fact(*first).shape;
    let at = axis(scope.int("axis", 0)?, shape.len() + usize::from(stacked))?;
    if stacked {
        shape.insert(at, Dim::Known(1));
        for value in &mut values {
            *value = scope.reshape(*value, shape.clone())?;
        }
    }
    match values.as_slice() {
        [one] => Ok(vec![Known::Value(*one)]),
        _ => Ok(vec![Known::Value(scope.add(Op::Concat(Concat { axis: at }), &values)?)]),
    }
}

/// The tensor of an optional, which a tensor is too.
pub fn element(scope: &mut Scope<'_>) -> Outputs {
    Ok(vec![scope.known(0)?.clone()])
}

/// Whether an optional holds something: a tensor that is there does.
pub fn has_element(scope: &mut Scope<'_>) -> Outputs {
    Ok(vec![Known::Tensor(Tensor::from_bool(&[], &[scope.has(0)]))])
}
