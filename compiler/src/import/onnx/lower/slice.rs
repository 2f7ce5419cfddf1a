//! `Slice` and `Split`.

use super::attribute::{axes, axis};
use super::{Known, LowerReason, Outputs, Scope, symbol};
use crate::import::build::Build;
use crate::op::{Flip, Op, Slice, Value};
use crate::tensor::dim::Dim;

/// A slice that covers all axes.
pub fn full_slice(dims: &[Dim]) -> Slice {
    Slice { begin: vec![Dim::Known(0); dims.len()], end: dims.to_vec(), step: vec![1; dims.len()] }
}

/// `x` from `begin` to `end` along one axis.
pub fn part(scope: &mut impl Build, x: Value, axis: usize, begin: Dim, end: Dim) -> Result<Value, LowerReason> {
    let mut slice = full_slice(&scope.fact(x).shape);
    (slice.begin[axis], slice.end[axis]) = (begin, end);
    scope.add(Op::Slice(slice), &[x])
}

/// Normalises a slice bound for an axis of `size` and clamps it to `low … high`.
pub fn clamp_index(index: &Dim, size: &Dim, low: &Dim, high: &Dim) -> Result<Dim, LowerReason> {
    let error = || LowerReason::undecided(format!("index {index} lies within an axis of size {size}"), [index, size]);
    if index.known().is_some_and(|v| v >= i64::from(i32::MAX)) && size.known().is_none() {
        // Very large numbers mean "to the end".
        return Ok(high.clone());
    }
    let wrapped = match symbol::least(index) {
        Some(least) if least >= 0 => index.clone(),
        _ if index.known().is_some_and(|v| v < -i64::from(i32::MAX)) => return Ok(low.clone()),
        _ if index.known().is_some() => index.add(size)?,
        _ => return Err(error()),
    };
    let below = symbol::smaller(&wrapped, high).ok_or_else(error)?;
    symbol::larger(&below, low).ok_or_else(error)
}

pub fn slice(scope: &mut Scope<'_>) -> Outputs {
    let dims = scope.fact_of(0)?.shape;
    let (starts, ends, axis_list, steps) = if scope.opset < 10 {
        let sizes = |list: Option<Vec<i64>>| list.map(|l| l.into_iter().map(Dim::Known).collect::<Vec<_>>());
        (sizes(scope.ints("starts")?), sizes(scope.ints("ends")?), scope.ints("axes")?, None)
    } else {
        let (starts, ends) = (scope.dims(1, "the start of a slice")?, scope.dims(2, "the end of a slice")?);
        (starts, ends, scope.integers(3, "the list of axes")?, scope.integers(4, "the step of a slice")?)
    };
    let starts = starts.ok_or(LowerReason::Missing { slot: 1 })?;
    let ends = ends.ok_or(LowerReason::Missing { slot: 2 })?;
    let axis_list = axis_list.unwrap_or_else(|| (0..starts.len() as i64).collect());
    let steps = steps.unwrap_or_else(|| vec![1; starts.len()]);
    if [ends.len(), axis_list.len(), steps.len()] != [starts.len(); 3] {
        return Err(LowerReason::Inputs("starts, ends, axes and steps differ in length".to_string()));
    }
    axes(&axis_list, dims.len())?;
    let mut slice = full_slice(&dims);
    let mut flipped = Vec::new();
    for (n, axis_given) in axis_list.iter().enumerate() {
        let at = axis(*axis_given, dims.len())?;
        let size = &dims[at];
        if steps[n] == 0 {
            return Err(LowerReason::Inputs("the step of the slice is 0".to_string()));
        }
        // A step beyond 31 bits selects only the first element, like the largest 31-bit step.
        let step = usize::try_from(steps[n].unsigned_abs().min(i32::MAX as u64)).unwrap_or(1);
        let (begin, end) = if steps[n] > 0 {
            let zero = Dim::Known(0);
            (clamp_index(&starts[n], size, &zero, size)?, clamp_index(&ends[n], size, &zero, size)?)
        } else {
            // A negative step is a positive step on the flipped axis, where index `p` becomes `size - 1 - p`.
            flipped.push(at);
            let (before, last) = (Dim::Known(-1), size.sub(&Dim::Known(1))?);
            let start = clamp_index(&starts[n], size, &before, &last)?;
            let end = clamp_index(&ends[n], size, &before, &last)?;
            (last.sub(&start)?, last.sub(&end)?)
        };
        let error = || LowerReason::undecided(format!("a slice from {begin} to {end} is empty"), [&begin, &end]);
        let end = symbol::larger(&begin, &end).ok_or_else(error)?;
        (slice.begin[at], slice.end[at], slice.step[at]) = (begin, end, step);
    }
    flipped.sort_unstable();
    let x = scope.value(0)?;
    let x = if flipped.is_empty() { x } else { scope.add(Op::Flip(Flip { axes: flipped }), &[x])? };
    let y = if slice == full_slice(&dims) { x } else { scope.add(Op::Slice(slice), &[x])? };
    Ok(vec![Known::Value(y)])
}

pub fn split(scope: &mut Scope<'_>) -> Outputs {
    let dims = scope.fact_of(0)?.shape;
    let at = axis(scope.int("axis", 0)?, dims.len())?;
    let sizes_given = if scope.opset < 13 {
        scope.ints("split")?.map(|list| list.into_iter().map(Dim::Known).collect())
    } else {
        scope.dims(1, "the sizes of the parts")?
    };
    let count = scope.node.outputs.len().max(1);
    let sizes = match sizes_given {
        Some(sizes) => sizes,
        None => equal_parts(&dims[at], scope.int("num_outputs", count as i64)?, count)?,
    };
    if sizes.len() < count {
        return Err(LowerReason::Inputs(format!("{} parts for {count} outputs", sizes.len())));
    }
    Ok(parts(scope, &dims, at, sizes, |scope| scope.value(0))?.into_iter().map(Known::Value).collect())
}

/// `x` of shape `dims`, cut along an axis into parts of these sizes.
pub fn parts<S: Build>(
    scope: &mut S,
    dims: &[Dim],
    at: usize,
    sizes: Vec<Dim>,
    x: impl FnOnce(&mut S) -> Result<Value, LowerReason>,
) -> Result<Vec<Value>, LowerReason> {
    let total = sizes.iter().try_fold(Dim::Known(0), |sum, d| sum.add(d))?;
    if total != dims[at] || sizes.iter().any(|d| d.known().is_some_and(|v| v < 0)) {
        return Err(LowerReason::Inputs(format!("sizes {sizes:?} do not add up to an axis of size {}", dims[at])));
    }
    let x = x(scope)?;
    let mut begin = Dim::Known(0);
    let mut outputs = Vec::with_capacity(sizes.len());
    for size in sizes {
        let end = begin.add(&size)?;
        outputs.push(if size == dims[at] { x } else { part(scope, x, at, begin, end.clone())? });
        begin = end;
    }
    Ok(outputs)
}

/// `parts` equal sizes; the last is smaller if the size is not divisible.
pub fn equal_parts(size: &Dim, parts: i64, outputs: usize) -> Result<Vec<Dim>, LowerReason> {
    if usize::try_from(parts) != Ok(outputs) {
        return Err(LowerReason::Inputs(format!("{parts} parts for {outputs} outputs")));
    }
    if let Ok(part_size) = size.div_exact(&Dim::Known(parts)) {
        return Ok(vec![part_size; outputs]);
    }
    let size =
        size.known().ok_or_else(|| LowerReason::Inputs(format!("an axis of size {size} in {parts} equal parts")))?;
    let part_size = size / parts + 1;
    let last = size.saturating_sub(part_size.saturating_mul(parts - 1));
    let mut sizes = vec![Dim::Known(part_size); outputs];
    sizes[outputs - 1] = Dim::Known(last);
    Ok(sizes)
}
