//! `Loop` and `Scan`, unrolled within a budget.
//!
//! The number of iterations must be known at import time: from the trip count, from the length of a scanned input, or
//! from a condition that folds to a constant in each iteration.

use crate::import::build::Build;
use crate::import::onnx::lower::body::Body;
use crate::import::onnx::lower::slice::part;
use crate::import::onnx::lower::walk::Walk;
use crate::import::onnx::lower::weight::dtype_of;
use crate::import::onnx::lower::{Known, LowerReason, Scope, attribute, read_condition};
use crate::import::onnx::model::{Dim as SourceDim, Node, ValueInfo};
use crate::tensor::dim::Dim;
use crate::tensor::{DType, Tensor};

/// Maximum size in bytes of scan outputs that are stacked as a constant.
const STACKED: usize = 1 << 20;

type Results = Result<Vec<Known>, Option<LowerReason>>;

pub fn repeat(walk: &mut Walk<'_>, node: &Node) -> Results {
    let scope = walk.scope(node).ok_or(None)?;
    let trip_count = scope.integers(0, "the trip count of a loop")?.and_then(|list| list.first().copied());
    let mut continues = match scope.has(1) {
        true => read_condition(scope.known(1)?)?.ok_or_else(|| scope.not_constant(1, "the condition of a loop"))?,
        false => true,
    };
    let mut states = (2..scope.inputs.len()).map(|slot| scope.known(slot).cloned()).collect::<Result<Vec<_>, _>>()?;
    let body = Body::read(walk, node, "body")?;
    let scan_count = body.outputs.len().checked_sub(states.len() + 1);
    let scan_count = scan_count.ok_or_else(|| LowerReason::Inputs("its body gives too few results".to_string()))?;
    let mut stacks = vec![Vec::new(); scan_count];
    let mut iteration = 0u64;
    while continues && trip_count.is_none_or(|trip_count| i128::from(iteration) < i128::from(trip_count)) {
        let count = Tensor::from_i64(&[], &[iteration as i64]);
        let mut inputs = vec![Known::Tensor(count), Known::Tensor(Tensor::from_bool(&[], &[true]))];
        inputs.append(&mut states);
        let mut results = body.run(walk, node, Some(iteration), inputs)?.into_iter();
        let condition = results.next().ok_or(None)?;
        let state_count = results.len() - scan_count;
        states = results.by_ref().take(state_count).collect();
        stacks.iter_mut().zip(results).for_each(|(stack, item)| stack.push(item));
        continues = match read_condition(&condition)? {
            Some(condition_holds) => condition_holds,
            // After the last iteration the condition is irrelevant.
            None if trip_count == i64::try_from(iteration + 1).ok() => false,
            None => {
                let mut scope = walk.scope(node).ok_or(None)?;
                scope.inputs = vec![Some(condition)];
                return Err(Some(scope.not_constant(0, "the condition of a loop")));
            }
        };
        iteration += 1;
    }
    let infos = &body.outputs[body.outputs.len() - scan_count..];
    for (items, info) in stacks.into_iter().zip(infos) {
        states.push(stack(walk, node, items, 0, Some(info))?);
    }
    Ok(states)
}

/// `Scan`: loop-carried values, and inputs of which each iteration reads one slice.
pub fn scan(walk: &mut Walk<'_>, node: &Node) -> Results {
    let scope = walk.scope(node).ok_or(None)?;
    let batched = scope.opset < 9;
    let count = usize::try_from(scope.int("num_scan_inputs", 0)?).ok().filter(|count| *count > 0);
    let first = usize::from(batched);
    let sliced = count.and_then(|count| Some((count, scope.inputs.len().checked_sub(count + first)?)));
    let (count, states) = sliced.ok_or_else(|| LowerReason::Inputs("it has fewer inputs than it scans".to_string()))?;
    if batched && scope.has(0) {
        return Err(Some(LowerReason::Unsupported("a Scan with per-sample lengths".to_string())));
    }
    let inputs = (first..scope.inputs.len()).map(|slot| scope.known(slot).cloned()).collect::<Result<Vec<_>, _>>()?;
    let body = Body::read(walk, node, "body")?;
    let outs = body.outputs.len().checked_sub(states);
    let outs = outs.ok_or_else(|| LowerReason::Inputs("its body gives too few results".to_string()))?;
    let scope = walk.scope(node).ok_or(None)?;
    let reversed = if batched { "directions" } else { "scan_input_directions" };
    let axes = ScanAxes {
        states,
        axes_in: list(&scope, "scan_input_axes", count)?,
        reversed_in: list(&scope, reversed, count)?,
        axes_out: list(&scope, "scan_output_axes", outs)?,
        reversed_out: list(&scope, "scan_output_directions", outs)?,
    };
    if !batched {
        return scan_one(walk, node, &body, &axes, inputs, 0);
    }
    // Before operator set 9, axis 0 of all tensors is a batch, and each sample is scanned separately.
    let samples = length(&mut scope_of(walk, node, inputs.clone())?, 0, 0)?;
    let mut stacks = vec![Vec::new(); body.outputs.len()];
    for sample in 0..samples {
        let mut sample_inputs = Vec::with_capacity(inputs.len());
        for at in 0..inputs.len() {
            sample_inputs.push(slice_input(&mut scope_of(walk, node, inputs.clone())?, at, 0, sample)?);
        }
        let results = scan_one(walk, node, &body, &axes, sample_inputs, sample)?;
        stacks.iter_mut().zip(results).for_each(|(stack, item)| stack.push(item));
    }
    stacks.into_iter().map(|items| stack(walk, node, items, 0, None)).collect()
}

/// Scan axes and directions of the inputs and outputs of a `Scan`.
struct ScanAxes {
    states: usize,
    axes_in: Vec<i64>,
    reversed_in: Vec<i64>,
    axes_out: Vec<i64>,
    reversed_out: Vec<i64>,
}

fn scan_one(
    walk: &mut Walk<'_>,
    node: &Node,
    body: &Body,
    axes: &ScanAxes,
    inputs: Vec<Known>,
    sample: usize,
) -> Results {
    let mut scope = scope_of(walk, node, inputs.clone())?;
    let mut scan_inputs = Vec::new();
    let mut steps = None;
    for (at, given_axis) in axes.axes_in.iter().enumerate() {
        let slot = axes.states + at;
        let axis = attribute::axis(*given_axis, scope.fact_of(slot)?.rank())?;
        let size = length(&mut scope, slot, axis)?;
        if *steps.get_or_insert(size) != size {
            return Err(Some(LowerReason::Inputs("its scan inputs have different lengths".to_string())));
        }
        scan_inputs.push((slot, axis, axes.reversed_in[at] != 0));
    }
    let length = steps.unwrap_or(0);
    let mut states = inputs[..axes.states].to_vec();
    let mut stacks = vec![Vec::new(); body.outputs.len() - axes.states];
    for iteration in 0..length {
        let mut scope = scope_of(walk, node, inputs.clone())?;
        for &(slot, axis, reversed) in &scan_inputs {
            let at = if reversed { length - 1 - iteration } else { iteration };
            states.push(slice_input(&mut scope, slot, axis, at)?);
        }
        let name = (sample * length + iteration) as u64;
        let mut results = body.run(walk, node, Some(name), std::mem::take(&mut states))?.into_iter();
        states = results.by_ref().take(axes.states).collect();
        stacks.iter_mut().zip(results).for_each(|(stack, item)| stack.push(item));
    }
    for (at, mut items) in stacks.into_iter().enumerate() {
        if axes.reversed_out[at] != 0 {
            items.reverse();
        }
        states.push(stack(walk, node, items, axes.axes_out[at], body.outputs.get(axes.states + at))?);
    }
    Ok(states)
}

/// An integer list attribute of length `count`; zeros if it is absent.
fn list(scope: &Scope<'_>, name: &'static str, count: usize) -> Result<Vec<i64>, LowerReason> {
    match scope.ints(name)? {
        None => Ok(vec![0; count]),
        Some(list) if list.len() == count => Ok(list),
        Some(list) => {
            Err(LowerReason::Attribute { name, found: format!("{list:?}"), expected: "one number for each tensor" })
        }
    }
}

fn scope_of<'s>(walk: &'s mut Walk<'_>, node: &'s Node, inputs: Vec<Known>) -> Result<Scope<'s>, Option<LowerReason>> {
    let mut scope = walk.scope(node).ok_or(None)?;
    scope.inputs = inputs.into_iter().map(Some).collect();
    Ok(scope)
}

fn length(scope: &mut Scope<'_>, slot: usize, axis: usize) -> Result<usize, LowerReason> {
    let fact = scope.fact_of(slot)?;
    let size = fact.shape.get(axis).ok_or_else(|| LowerReason::Inputs(format!("{fact} has no axis {axis}")))?;
    let length = size.known().and_then(|size| usize::try_from(size).ok());
    length.ok_or(LowerReason::NotConstant { what: "the length of a scan" })
}

/// One slice of input `slot` along `axis`, with the axis removed.
fn slice_input(scope: &mut Scope<'_>, slot: usize, axis: usize, at: usize) -> Result<Known, LowerReason> {
    if at >= length(scope, slot, axis)? {
        return Err(LowerReason::Inputs("its scan inputs have different lengths".to_string()));
    }
    if let Known::Tensor(tensor) = scope.known(slot)? {
        let size = tensor.shape()[axis];
        let inner = tensor.shape()[axis + 1..].iter().product::<usize>() * tensor.dtype().size();
        let rows = tensor.bytes().chunks_exact((inner * size).max(1));
        let bytes: Vec<u8> = rows.flat_map(|row| &row[at * inner..(at + 1) * inner]).copied().collect();
        let mut shape = tensor.shape().to_vec();
        shape.remove(axis);
        let slice = Tensor::new(tensor.dtype(), shape, bytes.into());
        return slice.map(Known::Tensor).map_err(|error| LowerReason::Inputs(error.to_string()));
    }
    let x = scope.known(slot)?.clone();
    let x = scope.materialise(&x)?;
    let (begin, end) = (Dim::Known(at as i64), Dim::Known(at as i64 + 1));
    let slice = part(scope, x, axis, begin, end)?;
    Ok(Known::Value(scope.squeeze(slice, axis)?))
}

/// Stacks the results of all iterations along a new axis. Without iterations, the file must declare the shape.
fn stack(
    walk: &mut Walk<'_>,
    node: &Node,
    items: Vec<Known>,
    axis: i64,
    info: Option<&ValueInfo>,
) -> Result<Known, Option<LowerReason>> {
    if items.is_empty() {
        let shape = info.and_then(empty);
        let what = "a loop with no iterations and results of unknown shape";
        return shape.map(Known::Tensor).ok_or_else(|| Some(LowerReason::Unsupported(what.to_string())));
    }
    let mut scope = walk.scope(node).ok_or(None)?;
    if let Some(tensor) = constants(&items).filter(|_| axis == 0) {
        return Ok(Known::Tensor(tensor));
    }
    let mut parts = Vec::with_capacity(items.len());
    let mut at = 0;
    for item in &items {
        let value = scope.materialise(item)?;
        at = attribute::axis(axis, scope.fact(value).rank() + 1)?;
        parts.push(scope.unsqueeze(value, at)?);
    }
    Ok(Known::Value(scope.concat(&parts, at)?))
}

/// Stacks constants of equal shape along a new axis 0; `None` if they differ or are too large.
fn constants(items: &[Known]) -> Option<Tensor> {
    let tensors: Vec<&Tensor> =
        items.iter().map(|i| if let Known::Tensor(t) = i { Some(t) } else { None }).collect::<Option<_>>()?;
    let first = tensors.first()?;
    let same_shape = tensors.iter().all(|t| (t.dtype(), t.shape()) == (first.dtype(), first.shape()));
    if !same_shape || first.bytes().len().saturating_mul(tensors.len()) > STACKED {
        return None;
    }
    let bytes: Vec<u8> = tensors.iter().flat_map(|t| t.bytes().iter().copied()).collect();
    let shape = [&[tensors.len()], first.shape()].concat();
    Tensor::new(first.dtype(), shape, bytes.into()).ok()
}

/// An empty tensor of the declared shape with a leading axis of size 0.
fn empty(info: &ValueInfo) -> Option<Tensor> {
    let dtype: DType = dtype_of(info.elem_type)?;
    let mut shape = vec![0usize];
    for dim in info.dims.as_ref()? {
        let SourceDim::Known(size) = dim else { return None };
        shape.push(usize::try_from(*size).ok()?);
    }
    Tensor::new(dtype, shape, bytes::Bytes::new()).ok()
}
