//! Makes the batch of a static export symbolic. If an op requires two sizes to agree and one of them is the batch
//! symbol, the other is the batch too. Its producers are then rebuilt with the symbolic size.
//!
//! In a static export, a 4 may be the batch or the number of heads. Equal numbers are no evidence; use is. If
//! `[batch, 64, 768]` is added to `[4, 64, 768]`, that 4 must be the batch. [`agree`] checks the inputs of each op
//! before it is added. `carry` follows the size back through elementwise ops, data movement and lookups. It ends at a
//! broadcast or iota of constant size, or at a constant with equal values for all samples. It may also end at another
//! model input, which then has the batch axis as well. If it ends at a parameter, or at values that differ between
//! samples, the batch cannot be symbolic, and the error names that node.

use crate::graph::Graph;
use crate::import::batch_in_axis::{locate_factor, stride_within};
use crate::import::build::Build;
use crate::import::equal_sizes;
use crate::import::lower_error::LowerReason;
use crate::op::{Broadcast, Constant, Iota, Op, Reshape, Slice, Value};
use crate::tensor::Tensor;
use crate::tensor::dim::{Bindings, Dim, volume};
use std::collections::HashMap;

/// A size that contains the batch, with the stride between samples within the axis, if known.
#[derive(Clone)]
struct BatchDim {
    size: Dim,
    step: Option<i64>,
}

impl BatchDim {
    fn new(size: &Dim) -> BatchDim {
        BatchDim { size: size.clone(), step: (*size == symbol_of(size)).then_some(1) }
    }
}

/// Maximum number of ops a size is followed back through.
const DEPTH: usize = 256;

/// Rebuilt values, by original value and axis.
pub type Opened = HashMap<(Value, usize), Value>;

/// The inputs of an op after their batch sizes have been made to agree.
pub fn agree<B: Build + ?Sized>(build: &mut B, op: &Op, inputs: &[Value]) -> Result<Vec<Value>, LowerReason> {
    equal_sizes::check(build.graph(), op, inputs)?;
    let mut inputs = inputs.to_vec();
    if build.frozen().is_none_or(Bindings::is_empty) {
        return Ok(inputs);
    }
    if let Op::Reshape(reshape) = op {
        if let Some((axis, want)) = reshape_demand(build, inputs[0], &reshape.shape)? {
            inputs[0] = rebuild_with_batch(build, inputs[0], axis, &want)?;
        }
        return Ok(inputs);
    }
    match op {
        Op::Gather(gather) => refuse_static_indices(build, gather.axis, &inputs)?,
        Op::Scatter(scatter) => refuse_static_indices(build, scatter.axis, &inputs)?,
        _ => {}
    }
    for (slot, axis, want) in find_demands(build, op, &inputs)? {
        inputs[slot] = rebuild_with_batch(build, inputs[slot], axis, &want)?;
    }
    Ok(inputs)
}

/// Refuses to gather or scatter as many samples as the static batch has: the indices were computed for that batch size
/// only.
fn refuse_static_indices<B: Build + ?Sized>(build: &B, axis: usize, inputs: &[Value]) -> Result<(), LowerReason> {
    let (data, at) = (build.graph().fact(inputs[0]), build.graph().fact(inputs[1]));
    for have in &at.shape {
        if is_frozen(build, have, &data.shape[axis])? {
            return Err(fixed_error(build.graph(), inputs[1], 0, "it selects samples with indices from the file"));
        }
    }
    Ok(())
}

/// Rebuilds a value whose static batch size must become the symbolic one in `shape`.
pub fn with_batch_of<B: Build + ?Sized>(build: &mut B, mut value: Value, shape: &[Dim]) -> Result<Value, LowerReason> {
    if build.graph().fact(value).rank() == shape.len() {
        for (axis, want) in shape.iter().enumerate() {
            if is_frozen(build, &build.graph().fact(value).shape[axis], want)? {
                value = rebuild_with_batch(build, value, axis, &BatchDim::new(want))?;
            }
        }
    }
    Ok(value)
}

/// `have` with the symbolic batch wherever `want` has it and `have` the static size.
pub fn shape_with_batch<B: Build + ?Sized>(build: &B, have: &[Dim], want: &[Dim]) -> Result<Vec<Dim>, LowerReason> {
    let mut shape = have.to_vec();
    if have.len() == want.len() {
        for (have, want) in shape.iter_mut().zip(want) {
            if is_frozen(build, have, want)? {
                have.clone_from(want);
            }
        }
    }
    Ok(shape)
}

/// The first slice along an axis, with size 1, if all slices are equal.
pub fn sample(tensor: &Tensor, axis: usize) -> Option<Tensor> {
    let mut shape = tensor.shape().to_vec();
    let size = std::mem::replace(&mut shape[axis], 1);
    let entry = shape[axis..].iter().product::<usize>() * tensor.dtype().size();
    if entry == 0 || size == 0 {
        return None;
    }
    let mut bytes = Vec::with_capacity(tensor.bytes().len() / size);
    for entries in tensor.bytes().chunks_exact(entry * size) {
        if entries.chunks_exact(entry).any(|e| e != &entries[..entry]) {
            return None;
        }
        bytes.extend_from_slice(&entries[..entry]);
    }
    Tensor::new(tensor.dtype(), shape, bytes.into()).ok()
}

/// True if `have` is the static value, other than 1, of the symbolic size `want`.
fn is_frozen<B: Build + ?Sized>(build: &B, have: &Dim, want: &Dim) -> Result<bool, LowerReason> {
    let (Some(number), None, Some(frozen)) = (have.known(), want.known(), build.frozen()) else { return Ok(false) };
    Ok(number != 1 && want.symbols().iter().any(|s| frozen.contains_key(s)) && want.substitute(frozen)?.is(number))
}

/// Input slot, axis, and the size it must have.
type Demand = (usize, usize, BatchDim);

fn find_demands<B: Build + ?Sized>(build: &B, op: &Op, inputs: &[Value]) -> Result<Vec<Demand>, LowerReason> {
    let shapes: Vec<&[Dim]> = inputs.iter().map(|value| build.graph().fact(*value).shape.as_slice()).collect();
    match op {
        Op::Lstm(_) => {
            let frozen = build.frozen();
            let time = shapes.first().and_then(|x| x.first());
            if time.is_some_and(|t| t.symbols().iter().any(|s| frozen.is_some_and(|f| f.contains_key(s)))) {
                return Err(LowerReason::Time);
            }
        }
        Op::Broadcast(broadcast) => {
            let leading = broadcast.shape.len().saturating_sub(shapes[0].len());
            let mut list = Vec::new();
            for (axis, have) in shapes[0].iter().enumerate() {
                if let Some(want) = broadcast.shape.get(leading + axis).filter(|want| have != *want)
                    && is_frozen(build, have, want)?
                {
                    list.push((0, axis, BatchDim::new(want)));
                }
            }
            return Ok(list);
        }
        _ => {}
    }
    let mut list = Vec::new();
    for group in equal_sizes::groups(op, &shapes) {
        let dim = |(slot, axis): &(usize, usize)| shapes.get(*slot).and_then(|shape| shape.get(*axis));
        let is_open = |position: &&(usize, usize)| dim(position).is_some_and(|dim| dim.known().is_none());
        let Some(&(source_slot, source_axis)) = group.iter().find(is_open) else { continue };
        let size = shapes[source_slot][source_axis].clone();
        for position in &group {
            if let Some(have) = dim(position)
                && is_frozen(build, have, &size)?
            {
                let want = BatchDim {
                    size: size.clone(),
                    step: stride_within(build.graph(), inputs[source_slot], source_axis),
                };
                list.push((position.0, position.1, want));
            }
        }
    }
    Ok(list)
}

/// The input axis of a reshape that must become symbolic, because the new shape has the batch and the input does not.
fn reshape_demand<B: Build + ?Sized>(
    build: &B,
    value: Value,
    shape: &[Dim],
) -> Result<Option<(usize, BatchDim)>, LowerReason> {
    let have = &build.graph().fact(value).shape;
    let Some(frozen) = build.frozen() else { return Ok(None) };
    let carriers: Vec<usize> = (0..shape.len()).filter(|at| shape[*at].known().is_none()).collect();
    let (&[at], true) = (carriers.as_slice(), have.iter().all(|dim| dim.known().is_some())) else { return Ok(None) };
    let number = shape[at].substitute(frozen)?;
    let inner_size = volume(&shape[at + 1..])?;
    for axis in 0..have.len() {
        if have[axis] == number
            && volume(&have[axis + 1..])? == inner_size
            && is_frozen(build, &have[axis], &shape[at])?
        {
            return Ok(Some((axis, BatchDim::new(&shape[at]))));
        }
    }
    let mut target = shape.to_vec();
    target[at] = number;
    batch_axis_in(build, &target, at, have, &BatchDim::new(&shape[at]))
}

/// The only axis of `target`, a reshape of `shape`, that can contain the batch of axis `at`, and its symbolic size.
fn batch_axis_in<B: Build + ?Sized>(
    build: &B,
    shape: &[Dim],
    at: usize,
    target: &[Dim],
    want: &BatchDim,
) -> Result<Option<(usize, BatchDim)>, LowerReason> {
    let symbols = want.size.symbols();
    let ([name], Some(frozen)) = (symbols.as_slice(), build.frozen()) else { return Ok(None) };
    let numbers = |dims: &[Dim]| dims.iter().map(Dim::known).collect::<Option<Vec<i64>>>();
    let (Some(from), Some(to), Some(&size)) = (numbers(shape), numbers(target), frozen.get(name)) else {
        return Ok(None);
    };
    let inner_size = from[at + 1..].iter().try_fold(1i64, |n, size| n.checked_mul(*size));
    let first = want.step.zip(inner_size).and_then(|(step, inner_size)| inner_size.checked_mul(step));
    let batch_axis = match first {
        Some(first) => locate_factor(first, size, &to).map(|(axis, step)| (axis, Some(step))),
        None => unique_axis(&from, at, &to, size)
            .or_else(|| outer_factor_axis(&from, at, &to, size))
            .map(|axis| (axis, None)),
    };
    let Some((axis, step)) = batch_axis else { return Ok(None) };
    let size = Dim::symbol(name).mul(&Dim::Known(to[axis] / size))?;
    Ok(Some((axis, BatchDim { step: step.or(BatchDim::new(&size).step), size })))
}

/// The axis of `to` that contains a factor which is the outermost part of axis `at`; `None` if there is none.
fn outer_factor_axis(from: &[i64], at: usize, to: &[i64], factor: i64) -> Option<usize> {
    let inner_size = from[at + 1..].iter().try_fold(1i64, |n, size| n.checked_mul(*size))?;
    let first = inner_size.checked_mul(from[at])?.checked_div(factor)?;
    locate_factor(first, factor, to).map(|(axis, _)| axis)
}

/// The axis of `to` that contains a factor of axis `at` after a reshape. It must be the only corresponding axis whose
/// size is a multiple of the factor, else `None`.
pub fn unique_axis(from: &[i64], at: usize, to: &[i64], factor: i64) -> Option<usize> {
    let (mut read, mut written) = (0, 0);
    if factor < 2 {
        return None;
    }
    while read < from.len() {
        // The smallest groups of axes on both sides with equal products.
        let (first, start) = (read, written);
        let (mut left, mut right) = (1i64, 1i64);
        while left != right || (read, written) == (first, start) {
            if read < from.len() && (left <= right || written == to.len()) {
                left = left.checked_mul(from[read])?;
                read += 1;
            } else {
                right = right.checked_mul(*to.get(written)?)?;
                written += 1;
            }
        }
        if (first..read).contains(&at) {
            let mut candidates = (start..written).filter(|axis| to[*axis] > 1 && to[*axis] % factor == 0);
            return candidates.next().filter(|_| candidates.next().is_none());
        }
    }
    None
}

fn rebuild_with_batch<B: Build + ?Sized>(
    build: &mut B,
    value: Value,
    axis: usize,
    want: &BatchDim,
) -> Result<Value, LowerReason> {
    rebuild_with_size(build, value, axis, want, DEPTH)
}

/// Rebuilds `value` with the size `want` along `axis`, where it has the static size.
fn rebuild_with_size<B: Build + ?Sized>(
    build: &mut B,
    value: Value,
    axis: usize,
    want: &BatchDim,
    depth: usize,
) -> Result<Value, LowerReason> {
    let (batch_dim, want) = (want, &want.size);
    if let Some(existing) = build.opened().and_then(|opened| opened.get(&(value, axis))) {
        return Ok(*existing);
    }
    let graph = build.graph();
    let shape = graph.fact(value).shape.clone();
    if shape[axis] == *want {
        return Ok(value);
    }
    let node = graph.node(value.node);
    let stuck = |why: &'static str| fixed_error(graph, value, axis, why);
    if depth == 0 {
        return Err(stuck("the chain of ops before it is too long"));
    }
    let op = node.op.clone();
    let inputs = graph.inputs(value.node);
    let facts: Vec<Vec<Dim>> = inputs.iter().map(|input| graph.fact(*input).shape.clone()).collect();
    // The corresponding axis of an operand of lower rank; `None` if the operand is broadcast there.
    let aligned = |slot: usize| -> Option<usize> {
        let at = (axis + facts[slot].len()).checked_sub(shape.len())?;
        (facts[slot][at] == shape[axis]).then_some(at)
    };
    let is_full = |slot: usize, at: usize| facts[slot].get(at) == Some(&shape[axis]);
    // For each input, the axis that must get the size.
    let mut input_axes: Vec<Option<usize>> = vec![None; inputs.len()];
    let (mut op, mut inner) = (op, batch_dim.clone());
    match &mut op {
        Op::Input(input) if *want == symbol_of(want) => {
            return Err(LowerReason::Batch { input: input.name.clone(), axis });
        }
        Op::Input(input) => {
            let batch = build.frozen().and_then(|frozen| frozen.get(want.symbols().first()?).copied());
            let size = shape[axis].known().unwrap_or_default();
            return Err(LowerReason::Alike { input: input.name.clone(), axis, size, batch: batch.unwrap_or(1) });
        }
        Op::Parameter(_) => return Err(stuck("it is a parameter")),
        Op::State(_) => return Err(stuck("its values are unknown or differ between samples")),
        Op::Constant(constant) => {
            let slice = sample(&constant.tensor, axis)
                .ok_or_else(|| stuck("it is a constant whose values differ between samples"))?;
            let slice = build.add(Op::Constant(Constant { tensor: slice }), &[])?;
            let mut shape = shape;
            shape[axis] = want.clone();
            return add_rebuilt(build, (value, axis), Op::Broadcast(Broadcast { shape }), &[slice]);
        }
        Op::Iota(Iota { fact, .. }) => fact.shape[axis] = want.clone(),
        Op::Uniform(uniform) => uniform.fact.shape[axis] = want.clone(),
        Op::Broadcast(broadcast) => {
            input_axes[0] = aligned(0);
            broadcast.shape[axis] = want.clone();
        }
        Op::Unary(_) | Op::Cast(_) => input_axes[0] = Some(axis),
        Op::Dropout(_) if value.output == 0 => input_axes[0] = Some(axis),
        Op::Binary(_) | Op::Compare(_) | Op::Select(_) => {
            for (slot, input_axes) in input_axes.iter_mut().enumerate() {
                *input_axes = aligned(slot);
            }
        }
        Op::Softmax(op) if op.axis != axis => input_axes[0] = Some(axis),
        Op::LogSoftmax(op) if op.axis != axis => input_axes[0] = Some(axis),
        Op::LayerNorm(op) if axis < op.axis => input_axes[0] = Some(axis),
        Op::Transpose(op) => input_axes[0] = Some(op.perm[axis]),
        Op::Reshape(Reshape { shape: new }) => {
            let inner_size = volume(&new[axis + 1..])?;
            for at in 0..facts[0].len() {
                if is_full(0, at) && volume(&facts[0][at + 1..])? == inner_size {
                    input_axes[0] = Some(at);
                }
            }
            if input_axes[0].is_none() {
                let batch_axis = batch_axis_in(build, new, axis, &facts[0], batch_dim)?;
                let (at, size) =
                    batch_axis.ok_or_else(|| stuck("it is a reshape, and the batch axis of its input is not clear"))?;
                (input_axes[0], inner) = (Some(at), size);
            }
            new[axis] = want.clone();
        }
        Op::Slice(Slice { begin, end, step }) => {
            if !is_full(0, axis) || !begin[axis].is(0) || step[axis] != 1 {
                return Err(stuck("it is a part of an axis"));
            }
            input_axes[0] = Some(axis);
            end[axis] = want.clone();
        }
        Op::Pad(pad) if pad.low[axis].is(0) && pad.high[axis].is(0) && pad.interior[axis] == 0 => {
            input_axes[0] = Some(axis)
        }
        Op::Flip(flip) if !flip.axes.contains(&axis) => input_axes[0] = Some(axis),
        Op::Concat(concat) if concat.axis != axis => input_axes = vec![Some(axis); inputs.len()],
        Op::Gather(gather) => {
            let (at, rank) = (gather.axis, facts[1].len());
            let slot = usize::from(axis >= at && axis < at + rank);
            input_axes[slot] = Some(match slot {
                1 => axis - at,
                _ if axis < at => axis,
                _ => axis + 1 - rank,
            });
        }
        Op::BatchGather(gather) => match axis.checked_sub(facts[1].len()) {
            Some(within) => input_axes[0] = Some(gather.batch + 1 + within),
            None if axis < gather.batch => input_axes = vec![Some(axis); 2],
            None => input_axes[1] = Some(axis),
        },
        Op::BatchScatterAdd(scatter) if axis < scatter.batch => input_axes = vec![Some(axis); 2],
        Op::BatchScatterAdd(scatter) if axis > scatter.batch => {
            input_axes[0] = Some(axis + facts[1].len() - scatter.batch - 1);
        }
        Op::TopK(top) if top.axis != axis => input_axes[0] = Some(axis),
        Op::Cumulative(along_axis) if along_axis.axis != axis => input_axes[0] = Some(axis),
        Op::Reduce(reduce) => {
            let is_kept = |at: &usize| !reduce.axes.contains(at);
            input_axes[0] = if reduce.keep { Some(axis) } else { (0..facts[0].len()).filter(is_kept).nth(axis) };
        }
        Op::GroupedMatMul(_) if axis == 0 => input_axes[0] = Some(0),
        Op::MatMul(_) if axis + 2 < shape.len() => input_axes = vec![aligned(0), aligned(1)],
        Op::MatMul(op) if axis + 2 == shape.len() => {
            input_axes[0] = Some(facts[0].len() - if op.transpose_a { 1 } else { 2 })
        }
        Op::Conv(_) | Op::MaxPool(_) | Op::AvgPool(_) | Op::BatchNorm(_) if axis == 0 && value.output == 0 => {
            input_axes[0] = Some(0);
        }
        // y [T, N, H], and the final h and c [N, H].
        Op::Lstm(_) if (value.output, axis) == (0, 1) || (matches!(value.output, 1 | 2) && axis == 0) => {
            (input_axes[0], input_axes[5], input_axes[6]) = (Some(1), Some(0), Some(0));
        }
        _ => return Err(stuck("pipec does not track it through this op")),
    }
    let mut new_inputs = inputs.clone();
    for (slot, at) in input_axes.into_iter().enumerate() {
        if let Some(at) = at {
            new_inputs[slot] = rebuild_with_size(build, inputs[slot], at, &inner, depth - 1)?;
        }
    }
    // Each recursion path that changes a value ends at an op with an explicit static size.
    let rebuilt = add_rebuilt(build, (value, axis), op, &new_inputs)?;
    let fact = build.graph().fact(rebuilt);
    if fact.shape.get(axis) == Some(want) { Ok(rebuilt) } else { Err(fixed_batch_error_at(build.graph(), value, axis)) }
}

fn add_rebuilt<B: Build + ?Sized>(
    build: &mut B,
    at: (Value, usize),
    op: Op,
    inputs: &[Value],
) -> Result<Value, LowerReason> {
    let origin = build.graph().node(at.0.node).origin.clone();
    let node = build.graph_mut().add(op, inputs, &origin)?;
    let rebuilt = Value { node, output: at.0.output };
    if let Some(opened) = build.opened() {
        opened.insert(at, rebuilt);
    }
    Ok(rebuilt)
}

fn symbol_of(dim: &Dim) -> Dim {
    dim.symbols().first().map_or(Dim::Known(0), |name| Dim::symbol(name))
}

fn fixed_error(graph: &Graph, value: Value, axis: usize, why: &'static str) -> LowerReason {
    let node = graph.node(value.node);
    let at = match &node.op {
        Op::Parameter(o) => &o.name,
        Op::State(o) => &o.name,
        Op::Input(o) => &o.name,
        _ => node.label(),
    };
    LowerReason::Fixed { at: at.to_string(), axis, why }
}

fn fixed_batch_error_at(graph: &Graph, value: Value, axis: usize) -> LowerReason {
    fixed_error(graph, value, axis, "its inputs do not have the batch axis")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factor_goes_to_the_only_matching_axis() {
        // 394 becomes 197 and 2; only one of them is even.
        assert_eq!(unique_axis(&[394, 768], 0, &[197, 2, 768], 2), Some(1));
        assert_eq!(unique_axis(&[64], 0, &[4, 15], 4), None, "no reshape");
        assert_eq!(unique_axis(&[60], 0, &[4, 15], 4), Some(0));
        assert_eq!(unique_axis(&[64], 0, &[4, 16], 4), None, "either could");
        assert_eq!(unique_axis(&[3, 1, 8, 5], 2, &[3, 8, 1, 5], 4), Some(1));
        assert_eq!(unique_axis(&[8, 4], 1, &[8, 2, 2], 4), None);
        assert_eq!(outer_factor_axis(&[64], 0, &[4, 16], 4), Some(0), "outermost");
        assert_eq!(outer_factor_axis(&[394, 768], 0, &[197, 2, 768], 2), None);
        assert_eq!(outer_factor_axis(&[0], 0, &[4, 0], 4), None);
    }
}
