//! Gather with separate indices per example, and its gradient: the token dispatch of mixture-of-experts layers.

use super::gather::{add_up, check_indices, local_indices, or_zero, resolve, take};
use super::*;

fn check_batch_axes<'a>(batch: usize, slices: &'a Fact, indices: &'a Fact) -> Result<&'a [Dim], FactError> {
    check_indices(indices)?;
    for (what, fact, minimum) in [("the tensor of slices", slices, batch), ("the tensor of indices", indices, batch)] {
        if fact.rank() < minimum {
            return Err(FactError::Rank { what, expected: format!("at least {minimum}"), got: fact.rank() });
        }
    }
    if slices.shape[..batch] != indices.shape[..batch] {
        return Err(FactError::mismatch("the batch of", slices, "that of the indices", indices));
    }
    Ok(&slices.shape[..batch])
}

impl OpRule for BatchGather {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [x, indices] = arity(inputs)?;
        check_axis(self.batch, x.rank())?;
        check_batch_axes(self.batch, x, indices)?;
        let shape = [&indices.shape, &x.shape[self.batch + 1..]].concat();
        Ok(vec![Fact::new(x.dtype, shape)])
    }

    // Only the selected slices are read.
    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        Cost { flops: 0.0, bytes: 2.0 * moved_bytes(&[], outputs) + moved_bytes(&inputs[1..], &[]) }
    }

    // dx = Σ dy per index, for each example
    fn backward<'b>(&self, context: BackwardContext<'b>) -> Vec<Option<Expr<'b>>> {
        let [x, indices] = *context.inputs else { unreachable!("infer checks the arity") };
        let scatter = || BatchScatterAdd { batch: self.batch, size: x.shape()[self.batch].clone() };
        let dx = || emit(Op::BatchScatterAdd(scatter()), &[context.dy(), indices]);
        vec![(x.is_float() && context.wanted[0]).then(dx), None]
    }

    // Batch axes, axes of the slices, or axes of the indices. Along the indexed axis every device gathers from its
    // shard, with zeros for slices of other devices.
    fn strategies(&self, inputs: &[&Fact], _: &[Fact], _: &Group) -> Vec<Strategy> {
        let [x, indices] = inputs else { return Vec::new() };
        let (batch, rank) = (self.batch, indices.rank());
        let mut strategies: Vec<Strategy> =
            (0..batch).map(|axis| Strategy::along(&[Some(axis), Some(axis)], &[Some(axis)])).collect();
        strategies.extend((batch..rank).map(|axis| Strategy::along(&[None, Some(axis)], &[Some(axis)])));
        let inner_axes = batch + 1..x.rank();
        strategies
            .extend(inner_axes.map(|axis| Strategy::along(&[Some(axis), None], &[Some(axis + rank - batch - 1)])));
        strategies.push(Strategy::along(&[Some(batch), None], &[None]).written());
        strategies.push(Strategy::linear(&[true, false], 1));
        strategies
    }

    fn write_part<'b>(&self, _: &Strategy, context: &LocalContext<'b>) -> Vec<Expr<'b>> {
        let local = local_indices(context.inputs[1], context.whole[0].shape[self.batch].clone(), context.devices);
        let gathered = emit(Op::BatchGather(*self), &[context.inputs[0], local.indices]);
        vec![or_zero(local.in_shard, gathered, gathered.fact().rank())]
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let (x, indices, y) = (&inputs[0], &inputs[1], &mut outputs[0]);
        let (rows, each) =
            (resolve(indices, x.shape[self.batch])?, indices.shape[self.batch..].iter().product::<usize>());
        take(x, self.batch, |example| &rows[example * each..(example + 1) * each], y);
        Ok(())
    }
}

impl OpRule for BatchScatterAdd {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [dy, indices] = arity(inputs)?;
        check_dtype(dy.dtype != DType::Bool, "dy", "a number", dy)?;
        if self.size.known().is_some_and(|v| v < 0) {
            return Err(FactError::Attribute(format!("an axis cannot have size {}", self.size)));
        }
        let batch = check_batch_axes(self.batch, dy, indices)?;
        let Some(after) = dy.shape.strip_prefix(&indices.shape[..]) else {
            return Err(FactError::mismatch("dy", dy, "the tensor of indices", indices));
        };
        let shape = [batch, std::slice::from_ref(&self.size), after].concat();
        Ok(vec![Fact::new(dy.dtype, shape)])
    }

    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        Cost { flops: elements(inputs[0]), bytes: moved_bytes(inputs, outputs) }
    }

    // d(dy) = the slices of the output's gradient at the indices, for each example
    fn backward<'b>(&self, context: BackwardContext<'b>) -> Vec<Option<Expr<'b>>> {
        let [dy, indices] = *context.inputs else { unreachable!("infer checks the arity") };
        let gather = || emit(Op::BatchGather(BatchGather { batch: self.batch }), &[context.dy(), indices]);
        vec![(dy.is_float() && context.wanted[0]).then(gather), None]
    }

    // Mirrors the gather; along the indexed axis every device sums the gradients of its own slices.
    fn strategies(&self, inputs: &[&Fact], outputs: &[Fact], _: &Group) -> Vec<Strategy> {
        let ([_, indices], [dx]) = (inputs, outputs) else { return Vec::new() };
        let (batch, rank) = (self.batch, indices.rank());
        let mut strategies: Vec<Strategy> =
            (0..batch).map(|axis| Strategy::along(&[Some(axis), Some(axis)], &[Some(axis)])).collect();
        strategies.extend((batch..rank).map(|axis| Strategy::along(&[Some(axis), Some(axis)], &[None])));
        let inner_axes = batch + 1..dx.rank();
        strategies
            .extend(inner_axes.map(|axis| Strategy::along(&[Some(axis + rank - batch - 1), None], &[Some(axis)])));
        strategies.push(Strategy::along(&[None, None], &[Some(batch)]).written());
        strategies.push(Strategy::linear(&[true, false], 1));
        strategies
    }

    fn write_part<'b>(&self, _: &Strategy, context: &LocalContext<'b>) -> Vec<Expr<'b>> {
        let local = local_indices(context.inputs[1], self.size.clone(), context.devices);
        let dy = or_zero(local.in_shard, context.inputs[0], context.whole[0].rank());
        let scatter = BatchScatterAdd { batch: self.batch, size: local.size };
        vec![emit(Op::BatchScatterAdd(scatter), &[dy, local.indices])]
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let (dy, indices, y) = (&inputs[0], &inputs[1], &mut outputs[0]);
        let (rows, each) =
            (resolve(indices, y.shape[self.batch])?, indices.shape[self.batch..].iter().product::<usize>());
        add_up(dy, self.batch, |example| &rows[example * each..(example + 1) * each], y);
        Ok(())
    }
}

pub fn samples() -> Vec<Sample> {
    let sample = |title, op, x: Tensor, indices: Tensor| Sample::new(title, op, vec![x, indices]);
    let gather = |batch| Op::BatchGather(BatchGather { batch });
    let scatter = |batch, size: usize| Op::BatchScatterAdd(BatchScatterAdd { batch, size: Dim::from(size) });
    let index = |shape: &[usize], v: &[i64]| Tensor::from_i64(shape, v);
    let ramp = |shape: &[usize]| sample::ramp(shape, 3);
    vec![
        sample("tokens of two examples", gather(1), ramp(&[2, 3, 4]), index(&[2, 2], &[0, 2, 1, -3])),
        sample("two axes of examples", gather(2), ramp(&[2, 1, 3, 2]), index(&[2, 1, 2], &[2, 2, 0, 1])),
        sample("a table of indices", gather(1), ramp(&[2, 3, 2]), index(&[2, 2, 2], &[0, 1, 2, 0, 1, 1, -1, 2])),
        sample("one index each", gather(1), ramp(&[2, 3, 2]), index(&[2], &[2, 0])),
        sample("numbers", gather(1), ramp(&[2, 3]), index(&[2, 2], &[2, 0, 1, 1])),
        sample("no examples of their own", gather(0), ramp(&[3, 2]), index(&[2], &[2, 0])),
        sample("nothing", gather(1), ramp(&[0, 3, 2]), index(&[0, 2], &[])),
        sample("integers", gather(1), index(&[1, 2], &[i64::MAX, 5]), index(&[1, 2], &[1, 0])),
        sample("tokens of two examples", scatter(1, 4), ramp(&[2, 3, 2]), index(&[2, 3], &[1, 3, 1, 0, -1, 2])),
        sample("two axes of examples", scatter(2, 3), ramp(&[2, 1, 2, 2]), index(&[2, 1, 2], &[2, 2, 0, 1])),
        sample("a table of indices", scatter(1, 3), ramp(&[2, 2, 2]), index(&[2, 2, 2], &[0, 1, 2, 0, 1, 1, -1, 2])),
        sample("one index each", scatter(1, 3), ramp(&[2, 2]), index(&[2], &[2, 0])),
        sample("no examples of their own", scatter(0, 3), ramp(&[2, 2]), index(&[2], &[2, 2])),
        sample("no indices", scatter(1, 2), ramp(&[2, 0, 3]), index(&[2, 0], &[])),
        sample("integers", scatter(1, 2), index(&[1, 3], &[i64::MAX, 1, 6]), index(&[1, 3], &[0, 0, 1])),
        sample("half precision", scatter(1, 2), ramp(&[1, 3]).cast(DType::F16), index(&[1, 3], &[0, 0, 1])),
    ]
}
