//! Sequence operators, as used by exporters to split a tensor. Sequences exist only at import time.

use super::attribute::axis;
use super::slice::{equal_parts, parts};
use super::{Known, LowerReason, Outputs, Scope, one};
use crate::import::build::Build;
use crate::tensor::Tensor;
use crate::tensor::dim::Dim;

/// `SplitToSequence`. Without sizes, the parts have size 1 along the axis, which `keepdims` may remove.
pub fn split(scope: &mut Scope<'_>) -> Outputs {
    let dims = scope.fact_of(0)?.shape;
    let at = axis(scope.int("axis", 0)?, dims.len())?;
    let known_size = |size: &Dim| {
        size.known().filter(|n| (0..=4096).contains(n)).ok_or(LowerReason::NotConstant { what: "the size of the axis" })
    };
    let drop_axis = !scope.has(1) && !scope.flag("keepdims", true)?;
    let sizes = match scope.inputs.get(1) {
        Some(Some(_)) => {
            let scalar = scope.fact_of(1)?.rank() == 0;
            let size_list = scope.dims(1, "the sizes of the parts")?.unwrap_or_default();
            match size_list.as_slice() {
                [each] if scalar => {
                    let count = match dims[at].div_exact(each) {
                        Ok(count) => known_size(&count)?,
                        Err(_) => {
                            let each = known_size(each)?.max(1);
                            (known_size(&dims[at])? + each - 1) / each
                        }
                    };
                    in_parts_of(&dims[at], each, count)?
                }
                _ => size_list,
            }
        }
        _ => {
            let count = known_size(&dims[at])?;
            equal_parts(&dims[at], count, count as usize)?
        }
    };
    let mut values = parts(scope, &dims, at, sizes, |scope| scope.value(0))?;
    if drop_axis {
        let mut slice_shape = dims;
        slice_shape.remove(at);
        for value in &mut values {
            *value = scope.reshape(*value, slice_shape.clone())?;
        }
    }
    Ok(vec![Known::Sequence(values.into_iter().map(Known::Value).collect())])
}

/// The sizes of `count` parts of `part_size`; the last part may be smaller.
fn in_parts_of(size: &Dim, part_size: &Dim, count: i64) -> Result<Vec<Dim>, LowerReason> {
    let before = part_size.mul(&Dim::Known(count - 1))?;
    let mut sizes = vec![part_size.clone(); usize::try_from(count).unwrap_or(0)];
    if let Some(last) = sizes.last_mut() {
        *last = size.sub(&before)?;
    }
    Ok(sizes)
}

/// Maximum length of a sequence, because every node that reads one copies the list.
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

fn items(scope: &Scope<'_>) -> Result<Vec<Known>, LowerReason> {
    match scope.known(0)? {
        Known::Sequence(items) => Ok(items.clone()),
        _ => Err(LowerReason::Unsupported("a sequence that is not built in the graph".to_string())),
    }
}

/// The normalised index in input `slot` for a sequence of `count` elements.
fn read_position(scope: &Scope<'_>, slot: usize, count: usize) -> Result<usize, LowerReason> {
    let index = scope.integers(slot, "the position in a sequence")?.and_then(|list| list.first().copied());
    axis(index.ok_or(LowerReason::Missing { slot })?, count)
}

pub fn at(scope: &mut Scope<'_>) -> Outputs {
    let mut items = items(scope)?;
    let position = read_position(scope, 1, items.len())?;
    Ok(vec![items.swap_remove(position)])
}

pub fn construct(scope: &mut Scope<'_>) -> Outputs {
    let items = (0..scope.inputs.len()).map(|slot| scope.known(slot).cloned()).collect::<Result<Vec<_>, _>>()?;
    sequence(items)
}

pub fn empty(_: &mut Scope<'_>) -> Outputs {
    Ok(vec![Known::Sequence(Vec::new())])
}

/// Inserts a tensor, at the end by default.
pub fn insert(scope: &mut Scope<'_>) -> Outputs {
    let mut items = items(scope)?;
    let index = scope.integers(2, "the position in a sequence")?.and_then(|list| list.first().copied());
    let count = items.len();
    let position = match index {
        None => count,
        // The index `count` appends.
        Some(index) if usize::try_from(index) == Ok(count) => count,
        Some(index) => axis(index, count)?,
    };
    items.insert(position, scope.known(1)?.clone());
    sequence(items)
}

/// Removes a tensor, the last by default.
pub fn erase(scope: &mut Scope<'_>) -> Outputs {
    let mut items = items(scope)?;
    let last = items.len().checked_sub(1).ok_or_else(|| LowerReason::Inputs("an empty sequence".to_string()))?;
    let position = if scope.has(1) { read_position(scope, 1, items.len())? } else { last };
    items.remove(position);
    Ok(vec![Known::Sequence(items)])
}

pub fn length(scope: &mut Scope<'_>) -> Outputs {
    let count = items(scope)?.len() as i64;
    Ok(vec![Known::Tensor(Tensor::from_i64(&[], &[count]))])
}

pub fn concat(scope: &mut Scope<'_>) -> Outputs {
    let items = items(scope)?;
    let values = items.iter().map(|item| scope.materialise(item)).collect::<Result<Vec<_>, _>>()?;
    let stacked = scope.flag("new_axis", false)?;
    let first = values.first().ok_or_else(|| LowerReason::Inputs("an empty sequence".to_string()))?;
    let at = axis(scope.int("axis", 0)?, scope.fact(*first).rank() + usize::from(stacked))?;
    one(if stacked { scope.stack(&values, at)? } else { scope.concat(&values, at)? })
}

/// The value of an optional. A plain tensor is accepted too.
pub fn element(scope: &mut Scope<'_>) -> Outputs {
    Ok(vec![scope.known(0)?.clone()])
}

pub fn has_element(scope: &mut Scope<'_>) -> Outputs {
    Ok(vec![Known::Tensor(Tensor::from_bool(&[], &[scope.has(0)]))])
}
