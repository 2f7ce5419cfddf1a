//! Shape arithmetic: evaluates operators on lists of symbolic sizes at import time.
//!
//! A dynamic-batch export computes shapes in the graph: `Shape`, `Gather`, `Mul`, `Concat`, then `Reshape`. [`lower`]
//! evaluates these on [`Dim`]s. Results that depend on the value of a symbol, such as a comparison with 512, are not
//! evaluated; those operators are lowered to core ops.

use super::attribute::axis;
use super::{Dims, Known, LowerReason, Scope, symbol};
use crate::import::onnx::lower::weight::dtype_of;
use crate::tensor::dim::{Dim, volume};
use crate::tensor::{DType, Tensor};
use std::cmp::Ordering;

/// Maximum length of a size list that is evaluated. Shapes are much shorter.
const LONGEST: usize = 1024;

/// The outputs, if at least one input is a size list and the result is fully determined; else `None`.
pub fn lower(scope: &Scope<'_>) -> Result<Option<Vec<Known>>, LowerReason> {
    if !scope.inputs.iter().flatten().any(|known| matches!(known, Known::Dims(_))) {
        return Ok(None);
    }
    let operands: Vec<Option<Dims>> = (0..scope.inputs.len()).map(|slot| operand(scope, slot)).collect();
    let get = |slot: usize| operands.get(slot).and_then(Option::as_ref);
    let result = match scope.node.op_type.as_str() {
        "Identity" => get(0).cloned(),
        "Cast" => match dtype_of(i32::try_from(scope.int("to", 0)?).unwrap_or(0)) {
            Some(to) if to.is_float() || matches!(to, DType::I64 | DType::I32) => {
                get(0).map(|x| Dims { dtype: to, ..x.clone() })
            }
            _ => None,
        },
        "Floor" | "Ceil" | "Round" => get(0).cloned(),
        "Neg" => match get(0) {
            Some(x) => map(x, |d| d.mul(&Dim::Known(-1)).ok()),
            None => None,
        },
        "Add" => pairwise(get(0), get(1), |a, b| a.add(b).ok()),
        "Sub" => pairwise(get(0), get(1), |a, b| a.sub(b).ok()),
        "Mul" => pairwise(get(0), get(1), |a, b| a.mul(b).ok()),
        "Div" => pairwise(get(0), get(1), quotient),
        "Mod" => pairwise(get(0), get(1), |a, b| a.div_exact(b).ok().map(|_| Dim::Known(0))),
        "Min" if scope.inputs.len() == 2 => pairwise(get(0), get(1), symbol::smaller),
        "Max" if scope.inputs.len() == 2 => pairwise(get(0), get(1), symbol::larger),
        "Equal" => return Ok(decide(get(0), get(1), |o| o == Ordering::Equal)),
        "Less" => return Ok(decide(get(0), get(1), |o| o == Ordering::Less)),
        "LessOrEqual" => return Ok(decide(get(0), get(1), |o| o != Ordering::Greater)),
        "Greater" => return Ok(decide(get(0), get(1), |o| o == Ordering::Greater)),
        "GreaterOrEqual" => return Ok(decide(get(0), get(1), |o| o != Ordering::Less)),
        "Where" => choose(scope, get(1), get(2)),
        "Concat" => concat(&operands),
        "Gather" => gather(scope, get(0))?,
        "Slice" => slice(scope, get(0))?,
        "Unsqueeze" => get(0).filter(|x| x.scalar).map(|x| Dims { scalar: false, ..x.clone() }),
        "Squeeze" => get(0).filter(|x| x.dims.len() == 1).map(|x| Dims { scalar: true, ..x.clone() }),
        "Reshape" => reshape(scope, get(0))?,
        "Expand" => expand(scope, get(0))?,
        "ReduceProd" => total(scope, get(0), |dims| volume(dims).ok())?,
        "ReduceSum" => total(scope, get(0), |dims| dims.iter().try_fold(Dim::Known(0), |sum, d| sum.add(d).ok()))?,
        _ => None,
    };
    Ok(result.map(|dims| vec![dims.known()]))
}

/// Input `slot` as a size list, if it is short and integral.
fn operand(scope: &Scope<'_>, slot: usize) -> Option<Dims> {
    match scope.inputs.get(slot)?.as_ref()? {
        Known::Dims(dims) => Some(dims.clone()),
        Known::Tensor(t) if t.shape().len() <= 1 && t.len() <= LONGEST && t.dtype() != DType::Bool => {
            if t.dtype().is_float() && t.to_f64().iter().any(|v| v.fract() != 0.0 || v.abs() > 1e15) {
                return None;
            }
            let dims = t.to_i64().into_iter().map(Dim::Known).collect();
            Some(Dims { dims, scalar: t.shape().is_empty(), dtype: t.dtype() })
        }
        _ => None,
    }
}

fn map(x: &Dims, f: impl Fn(&Dim) -> Option<Dim>) -> Option<Dims> {
    let dims = x.dims.iter().map(f).collect::<Option<_>>()?;
    Some(Dims { dims, ..x.clone() })
}

/// `a / b` if exact. Otherwise integers would round and floats would not.
fn quotient(a: &Dim, b: &Dim) -> Option<Dim> {
    a.div_exact(b).ok()
}

/// Broadcasts both lists to one length; the flag is true if both are scalars.
fn aligned<'a>(a: Option<&'a Dims>, b: Option<&'a Dims>) -> Option<(Vec<(&'a Dim, &'a Dim)>, bool)> {
    let (a, b) = (a?, b?);
    let count = match (a.dims.len(), b.dims.len()) {
        (x, y) if x == y => x,
        (1, y) => y,
        (x, 1) => x,
        _ => return None,
    };
    let at = |list: &'a Dims, i: usize| if list.dims.len() == 1 { &list.dims[0] } else { &list.dims[i] };
    Some(((0..count).map(|i| (at(a, i), at(b, i))).collect(), a.scalar && b.scalar))
}

fn pairwise(a: Option<&Dims>, b: Option<&Dims>, f: impl Fn(&Dim, &Dim) -> Option<Dim>) -> Option<Dims> {
    let (pairs, scalar) = aligned(a, b)?;
    let dims = pairs.into_iter().map(|(a, b)| f(a, b)).collect::<Option<_>>()?;
    Some(Dims { dims, scalar, dtype: a?.dtype })
}

fn decide(a: Option<&Dims>, b: Option<&Dims>, holds: impl Fn(Ordering) -> bool) -> Option<Vec<Known>> {
    let (pairs, scalar) = aligned(a, b)?;
    let outcomes = pairs.into_iter().map(|(a, b)| symbol::compare(a, b).map(&holds)).collect::<Option<Vec<bool>>>()?;
    let shape: &[usize] = if scalar { &[] } else { &[outcomes.len()] };
    Some(vec![Known::Tensor(Tensor::from_bool(shape, &outcomes))])
}

fn choose(scope: &Scope<'_>, chosen: Option<&Dims>, rejected: Option<&Dims>) -> Option<Dims> {
    let Some(Some(Known::Tensor(condition))) = scope.inputs.first() else { return None };
    if condition.shape().len() > 1 || condition.len() > LONGEST {
        return None;
    }
    let truth = Dims {
        dims: condition.to_i64().into_iter().map(Dim::Known).collect(),
        scalar: condition.shape().is_empty(),
        dtype: DType::I64,
    };
    // Broadcast both choices and the condition to one length.
    let chosen = pairwise(chosen, Some(&truth), |value, _| Some(value.clone()))?;
    let rejected = pairwise(rejected, Some(&chosen), |value, _| Some(value.clone()))?;
    let chosen = pairwise(Some(&chosen), Some(&rejected), |value, _| Some(value.clone()))?;
    let (pairs, scalar) = aligned(Some(&chosen), Some(&rejected))?;
    let at = |i: usize| if truth.dims.len() == 1 { &truth.dims[0] } else { &truth.dims[i] };
    let dims = pairs.into_iter().enumerate().map(|(i, (a, b))| if at(i).is(0) { b.clone() } else { a.clone() });
    Some(Dims { dims: dims.collect(), scalar, dtype: chosen.dtype })
}

fn concat(operands: &[Option<Dims>]) -> Option<Dims> {
    let parts: Vec<&Dims> = operands.iter().map(Option::as_ref).collect::<Option<_>>()?;
    if parts.iter().any(|p| p.scalar) {
        return None;
    }
    let dims: Vec<Dim> = parts.iter().flat_map(|p| p.dims.iter().cloned()).collect();
    (dims.len() <= LONGEST).then_some(Dims { dims, scalar: false, dtype: parts.first()?.dtype })
}

fn gather(scope: &Scope<'_>, x: Option<&Dims>) -> Result<Option<Dims>, LowerReason> {
    let (Some(x), Ok(Some(indices))) = (x.filter(|x| !x.scalar), scope.tensor(1, "the index")) else { return Ok(None) };
    if indices.shape().len() > 1 || indices.len() > LONGEST {
        return Ok(None);
    }
    axis(scope.int("axis", 0)?, 1)?;
    let gathered = indices.to_i64().into_iter().map(|i| axis(i, x.dims.len()).map(|at| x.dims[at].clone()));
    let dims = gathered.collect::<Result<Vec<_>, _>>()?;
    Ok(Some(Dims { dims, scalar: indices.shape().is_empty(), dtype: x.dtype }))
}

fn slice(scope: &Scope<'_>, x: Option<&Dims>) -> Result<Option<Dims>, LowerReason> {
    let Some(x) = x.filter(|x| !x.scalar) else { return Ok(None) };
    let list = |slot: usize, name: &'static str| match scope.opset {
        ..10 => scope.ints(name),
        _ => scope.integers(slot, name),
    };
    let (Ok(Some(start)), Ok(Some(end)), Ok(step)) = (list(1, "starts"), list(2, "ends"), list(4, "steps")) else {
        return Ok(None);
    };
    let (&[start], &[end]) = (start.as_slice(), end.as_slice()) else { return Ok(None) };
    let step = step.and_then(|s| s.first().copied()).unwrap_or(1);
    let size = x.dims.len() as i64;
    let from_front = |at: i64| if at < 0 { at.saturating_add(size) } else { at };
    let mut dims = Vec::new();
    if step > 0 {
        let (mut at, end) = (from_front(start).clamp(0, size), from_front(end).clamp(0, size));
        while at < end {
            dims.push(x.dims[at as usize].clone());
            at = at.saturating_add(step);
        }
    } else if step < 0 {
        let (mut at, end) = (from_front(start).clamp(-1, size - 1), from_front(end).clamp(-1, size - 1));
        while at > end {
            dims.push(x.dims[at as usize].clone());
            at = at.saturating_add(step);
        }
    } else {
        return Err(LowerReason::Inputs("the step of the slice is 0".to_string()));
    }
    Ok(Some(Dims { dims, ..x.clone() }))
}

fn reshape(scope: &Scope<'_>, x: Option<&Dims>) -> Result<Option<Dims>, LowerReason> {
    let (Some(x), Ok(Some(shape))) = (x, scope.integers(1, "the shape")) else { return Ok(None) };
    let count = x.dims.len() as i64;
    Ok(match shape.as_slice() {
        [] if count == 1 => Some(Dims { scalar: true, ..x.clone() }),
        &[n] if n == -1 || n == count || (n == 0 && !x.scalar) => Some(Dims { scalar: false, ..x.clone() }),
        _ => None,
    })
}

fn expand(scope: &Scope<'_>, x: Option<&Dims>) -> Result<Option<Dims>, LowerReason> {
    let (Some(x), Ok(Some(shape))) = (x, scope.integers(1, "the shape")) else { return Ok(None) };
    let count = match shape.as_slice() {
        [] => return Ok(Some(x.clone())),
        &[n] => usize::try_from(n).ok().filter(|n| (1..=LONGEST).contains(n)),
        _ => None,
    };
    Ok(count.and_then(|count| match x.dims.len() {
        1 => Some(Dims { dims: vec![x.dims[0].clone(); count], scalar: false, dtype: x.dtype }),
        have if count == 1 || have == count => Some(x.clone()),
        _ => None,
    }))
}

fn total(
    scope: &Scope<'_>,
    x: Option<&Dims>,
    combine: impl Fn(&[Dim]) -> Option<Dim>,
) -> Result<Option<Dims>, LowerReason> {
    let keep = scope.flag("keepdims", true)?;
    // The list has rank at most 1, so any choice of axes reduces all elements. The exception is `noop_with_empty_axes`.
    if scope.flag("noop_with_empty_axes", false)? {
        return Ok(None);
    }
    let Some(x) = x else { return Ok(None) };
    Ok(combine(&x.dims).map(|dim| Dims { dims: vec![dim], scalar: x.scalar || !keep, dtype: x.dtype }))
}
