//! Operators whose output size depends on values: `NonZero`, `Compress`, `Unique`. The graph has static shapes, so they
//! are evaluated at import time and need constant inputs.

use crate::import::build::Build;
use crate::import::onnx::lower::attribute::axis;
use crate::import::onnx::lower::{Known, LowerReason, Outputs, Scope};
use crate::op::{Gather, Op};
use crate::tensor::dim::volume;
use crate::tensor::view::{View, indices};
use crate::tensor::{DType, Tensor};
use std::cmp::Ordering;

/// Maximum number of input elements.
const LARGEST: usize = 1 << 22;

/// A constant input that determines the output size.
fn read_deciding_input(scope: &Scope<'_>, slot: usize, what: &'static str) -> Result<Tensor, LowerReason> {
    match scope.tensor(slot, what)?.ok_or(LowerReason::Missing { slot })? {
        tensor if tensor.len() > LARGEST => Err(LowerReason::Inputs(format!("{what} has {} elements", tensor.len()))),
        tensor => Ok(tensor),
    }
}

/// Indices of the non-zero elements: `[axes, elements]`.
pub fn non_zero(scope: &mut Scope<'_>) -> Outputs {
    let x = read_deciding_input(scope, 0, "the input of NonZero or Compress")?;
    // A scalar is treated as a vector of one element.
    let shape = if x.shape().is_empty() { vec![1] } else { x.shape().to_vec() };
    let view = x.view();
    let nonzero: Vec<Vec<usize>> =
        indices(&shape).enumerate().filter(|(i, _)| view.bool(*i)).map(|(_, index)| index).collect();
    let indices: Vec<i64> = (0..shape.len()).flat_map(|at| nonzero.iter().map(move |index| index[at] as i64)).collect();
    Ok(vec![Known::Tensor(Tensor::from_i64(&[shape.len(), nonzero.len()], &indices))])
}

/// The slices along an axis, or the elements of the flattened tensor, where the condition is true.
pub fn compress(scope: &mut Scope<'_>) -> Outputs {
    let condition = read_deciding_input(scope, 1, "the condition of a selection")?;
    let selected: Vec<i64> = (0..condition.len()).filter(|i| condition.view().bool(*i)).map(|i| i as i64).collect();
    let mut x = scope.value(0)?;
    let dims = scope.fact(x).shape;
    let at = match scope.is_set("axis") {
        true => axis(scope.int("axis", 0)?, dims.len())?,
        false => {
            x = scope.reshape(x, vec![volume(&dims)?])?;
            0
        }
    };
    let size = scope.fact(x).shape[at].clone();
    if size.known().is_none_or(|size| selected.last().is_some_and(|last| *last >= size)) {
        return Err(LowerReason::Inputs(format!("a condition of {} elements for {size}", condition.len())));
    }
    let index = scope.constant(Tensor::from_i64(&[selected.len()], &selected))?;
    Ok(vec![Known::Value(scope.add(Op::Gather(Gather { axis: at }), &[x, index])?)])
}

/// Unique elements, or unique slices along an axis. Further outputs: first occurrence, inverse indices and counts.
pub fn unique(scope: &mut Scope<'_>) -> Outputs {
    let x = read_deciding_input(scope, 0, "the input of Unique")?;
    let sorted = scope.flag("sorted", true)?;
    // `start` gives the flat index of a slice's elements along the axis.
    let (shape, at) = match scope.is_set("axis") {
        true => (x.shape().to_vec(), axis(scope.int("axis", 0)?, x.shape().len())?),
        false => (vec![x.len()], 0),
    };
    let inner: usize = shape[at + 1..].iter().product();
    let outer: usize = shape[..at].iter().product();
    let start = |slice: usize, block: usize| (block * shape[at] + slice) * inner;
    let view = x.view();
    let ordered = |a: usize, b: usize| {
        let starts = (0..outer).flat_map(|block| (0..inner).map(move |i| (block, i)));
        let compared = |(block, i)| compared(&view, start(a, block) + i, start(b, block) + i);
        starts.map(compared).find(|order| order.is_ne()).unwrap_or(Ordering::Equal)
    };
    let mut order: Vec<usize> = (0..shape[at]).collect();
    order.sort_by(|&a, &b| ordered(a, b));
    // The sort is stable, so equal slices are adjacent and the first occurrence comes first.
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for slice in order {
        match groups.last_mut() {
            Some(group) if ordered(group[0], slice).is_eq() => group.push(slice),
            _ => groups.push(vec![slice]),
        }
    }
    if !sorted {
        groups.sort_by_key(|group| group[0]);
    }
    let mut inverse = vec![0; shape[at]];
    groups.iter().enumerate().for_each(|(n, group)| group.iter().for_each(|&slice| inverse[slice] = n as i64));
    let width = inner * x.dtype().size();
    let slice = |(block, group): (usize, &Vec<usize>)| {
        let from = start(group[0], block) * x.dtype().size();
        x.bytes().slice(from..from + width)
    };
    let bytes: Vec<u8> = (0..outer).flat_map(|block| groups.iter().map(move |g| (block, g))).flat_map(slice).collect();
    let mut kept_shape = shape.clone();
    kept_shape[at] = groups.len();
    let values = Tensor::new(x.dtype(), kept_shape, bytes.into()).map_err(|e| LowerReason::Inputs(e.to_string()))?;
    let list = |list: Vec<i64>| Known::Tensor(Tensor::from_i64(&[list.len()], &list));
    Ok(vec![
        Known::Tensor(values),
        list(groups.iter().map(|group| group[0] as i64).collect()),
        list(inverse),
        list(groups.iter().map(|group| group.len() as i64).collect()),
    ])
}

/// Total order of elements: NaN is greater than every number and equal to itself.
fn compared(x: &View<'_>, i: usize, j: usize) -> Ordering {
    match x.dtype {
        d if d.is_float() => {
            let (a, b) = (x.f64(i), x.f64(j));
            a.partial_cmp(&b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
        }
        DType::U64 => (x.i64(i) as u64).cmp(&(x.i64(j) as u64)),
        _ => x.i64(i).cmp(&x.i64(j)),
    }
}
