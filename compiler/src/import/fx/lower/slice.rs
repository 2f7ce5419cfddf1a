//! Slices and splits of a tensor.

use super::{Outputs, Scope, many, one};
use crate::import::build::Build;
use crate::import::equal_sizes::agree;
use crate::import::lower_error::LowerReason;
use crate::import::onnx::lower::attribute;
use crate::import::onnx::lower::slice::{clamp_index, full_slice, part, parts};
use crate::import::symbol;
use crate::op::{Op, Value};
use crate::tensor::dim::Dim;

/// The operand, its shape, and argument `dim`.
fn along(scope: &mut Scope<'_>) -> Result<(Value, Vec<Dim>, usize), LowerReason> {
    let x = scope.value("self")?;
    let dims = scope.fact(x).shape;
    let at = attribute::axis(scope.int("dim", 0)?, dims.len())?;
    Ok((x, dims, at))
}

/// Elements from `start` to `end` with a step, along one axis.
pub fn slice(scope: &mut Scope<'_>) -> Outputs {
    let (x, dims, at) = along(scope)?;
    let step = usize::try_from(scope.int("step", 1)?).ok().filter(|s| *s > 0);
    let step = step.ok_or_else(|| LowerReason::Inputs("the step of a slice is below 1".to_string()))?;
    let (zero, size) = (Dim::Known(0), &dims[at]);
    let start = scope.dim("start")?.unwrap_or(Dim::Known(0));
    let end = scope.dim("end")?.unwrap_or(Dim::Known(i64::MAX));
    // A static export slices the batch to the exported size.
    let frozen = size.known().is_none() && size.substitute(scope.frozen)? == end;
    let begin = clamp_index(&start, size, &zero, size)?;
    let end = if frozen { size.clone() } else { clamp_index(&end, size, &zero, size)? };
    let error = || LowerReason::undecided(format!("a slice from {begin} to {end} is empty"), [&begin, &end]);
    let end = symbol::larger(&begin, &end).ok_or_else(error)?;
    let mut slice = full_slice(&dims);
    (slice.begin[at], slice.end[at], slice.step[at]) = (begin, end, step.min(i32::MAX as usize));
    one(if slice == full_slice(&dims) { x } else { scope.add(Op::Slice(slice), &[x])? })
}

/// `length` elements from `start` on, along one axis.
pub fn narrow(scope: &mut Scope<'_>) -> Outputs {
    let (x, dims, at) = along(scope)?;
    let start = scope.dim("start")?.unwrap_or(Dim::Known(0));
    let length = scope.dim("length")?.ok_or(LowerReason::NotConstant { what: "the length" })?;
    let begin = clamp_index(&start, &dims[at], &Dim::Known(0), &dims[at])?;
    let end = begin.add(&length)?;
    one(part(scope, x, at, begin, end)?)
}

/// One index of an axis, which is removed.
pub fn select(scope: &mut Scope<'_>) -> Outputs {
    let (x, mut dims, at) = along(scope)?;
    let index = scope.dim("index")?.ok_or(LowerReason::NotConstant { what: "the index" })?;
    let begin = if index.known().is_some_and(|v| v < 0) { dims[at].add(&index)? } else { index };
    let end = begin.add(&Dim::Known(1))?;
    if !symbol::at_most(&Dim::Known(0), &begin) || !symbol::at_most(&end, &dims[at]) {
        return Err(LowerReason::Inputs(format!("index {begin} is outside an axis of size {}", dims[at])));
    }
    let y = part(scope, x, at, begin, end)?;
    dims.remove(at);
    one(scope.reshape(y, dims)?)
}

/// The form of a split; the string is the argument's name.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Cut {
    /// Equal parts of a given size; the last may be smaller.
    Each(&'static str),
    Sizes(&'static str),
    /// A given number of parts.
    Count(&'static str),
    /// `unbind`: slices without the axis.
    Apart,
}

pub fn split(scope: &mut Scope<'_>, method: Cut) -> Outputs {
    let (x, dims, at) = along(scope)?;
    let size = dims[at].clone();
    let known = |what| size.known().filter(|n| (0..=1 << 20).contains(n)).ok_or(LowerReason::NotConstant { what });
    let sizes = match method {
        Cut::Sizes(name) => scope.shape(name)?,
        Cut::Apart => {
            let count = known("the size of the axis")?;
            let slice = |n: i64| {
                let y = if count == 1 { x } else { part(scope, x, at, Dim::Known(n), Dim::Known(n + 1))? };
                scope.squeeze(y, at)
            };
            return many((0..count).map(slice).collect::<Result<_, _>>()?);
        }
        Cut::Each(name) => {
            let part_size = scope.dim(name)?.ok_or(LowerReason::NotConstant { what: "the size of a part" })?;
            equal(&size, &part_size)?
        }
        Cut::Count(name) => {
            let count = scope.int(name, 1)?;
            // The halves of two batches, such as the images of a siamese network.
            if let ([one, _], 2) = (&size.symbols()[..], count) {
                agree(&Dim::symbol(one), &size.sub(&Dim::symbol(one))?)?;
            }
            let part_size = match size.div_exact(&Dim::Known(count)) {
                Ok(part_size) => part_size,
                Err(_) if count > 0 => Dim::Known((known("the size of the axis")? + count - 1) / count),
                Err(error) => return Err(error.into()),
            };
            equal(&size, &part_size)?
        }
    };
    many(parts(scope, &dims, at, sizes, |_| Ok(x))?)
}

/// As many parts of size `part_size` as fit, and the remainder.
fn equal(size: &Dim, part_size: &Dim) -> Result<Vec<Dim>, LowerReason> {
    let max_parts = 1 << 20;
    let error = || LowerReason::Inputs(format!("an axis of size {size} in parts of size {part_size}"));
    if let Ok(count) = size.div_exact(part_size) {
        let count = count.known().filter(|n| (0..=max_parts).contains(n)).ok_or_else(error)?;
        return Ok(vec![part_size.clone(); usize::try_from(count).unwrap_or(0)]);
    }
    let (Some(size), Some(part_size)) = (size.known(), part_size.known().filter(|e| *e > 0)) else {
        return Err(error());
    };
    if size < 0 || size / part_size > max_parts {
        return Err(error());
    }
    let mut sizes = vec![Dim::Known(part_size); usize::try_from(size / part_size).unwrap_or(0)];
    sizes.push(Dim::Known(size % part_size));
    Ok(sizes)
}
