//! Sequences of tensors, as far as exporters use them to split a tensor: made in one node, picked from in others.

use super::attribute::axis;
use super::slice::{equal_parts, parts};
use super::{Known, Outputs, Reason, Scope};
use crate::import::build::Build;
use crate::tensor::dim::Dim;

/// A tensor in parts along an axis; without sizes, in parts of 1 whose axis may go.
pub fn split(scope: &mut Scope<'_>) -> Outputs {
    let dims = scope.fact_of(0)?.shape;
    let at = axis(scope.int("axis", 0)?, dims.len())?;
    let whole = |size: &Dim| {
        size.known().filter(|n| (0..=4096).contains(n)).ok_or(Reason::NotConstant { what: "the size of the axis" })
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
    Ok(vec![Known::Sequence(values)])
}

/// `count` parts of `each`, the last one smaller when they do not come out even.
fn in_parts_of(size: &Dim, each: &Dim, count: i64) -> Result<Vec<Dim>, Reason> {
    let before = each.mul(&Dim::Known(count - 1))?;
    let mut sizes = vec![each.clone(); usize::try_from(count).unwrap_or(0)];
    if let Some(last) = sizes.last_mut() {
        *last = size.sub(&before)?;
    }
    Ok(sizes)
}

/// One tensor of a sequence.
pub fn at(scope: &mut Scope<'_>) -> Outputs {
    let index = scope.integers(1, "the place in a sequence")?.and_then(|list| list.first().copied());
    let index = index.ok_or(Reason::Missing { slot: 1 })?;
    match scope.known(0)? {
        Known::Sequence(values) => {
            let place = axis(index, values.len())?;
            Ok(vec![Known::Value(values[place])])
        }
        _ => Err(Reason::Unsupported("a sequence that is not made by splitting".to_string())),
    }
}

/// All tensors of a sequence one behind the other, or on top of each other.
pub fn concat(scope: &mut Scope<'_>) -> Outputs {
    let Known::Sequence(mut values) = scope.known(0)?.clone() else {
        return Err(Reason::Unsupported("a sequence that is not made by splitting".to_string()));
    };
    let stacked = scope.flag("new_axis", false)?;
    let first = values.first().ok_or_else(|| Reason::Inputs("an empty sequence".to_string()))?;
    let mut shape = scope.fact(*first).shape;
    let at = axis(scope.int("axis", 0)?, shape.len() + usize::from(stacked))?;
    if stacked {
        shape.insert(at, Dim::Known(1));
        for value in &mut values {
            *value = scope.reshape(*value, shape.clone())?;
        }
    }
    Ok(vec![Known::Value(scope.add(crate::op::Op::Concat(crate::op::Concat { axis: at }), &values)?)])
}
