//! Gather along one axis, and its gradient.

use super::*;

impl OpRule for Gather {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [x, indices] = arity(inputs)?;
        check_axis(self.axis, x.rank())?;
        check_indices(indices)?;
        let shape = [&x.shape[..self.axis], &indices.shape, &x.shape[self.axis + 1..]].concat();
        Ok(vec![Fact::new(x.dtype, shape)])
    }

    // Only the selected slices are read.
    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        Cost { flops: 0.0, bytes: 2.0 * moved_bytes(&[], outputs) + moved_bytes(&inputs[1..], &[]) }
    }

    // dx = Σ dy by index
    fn backward<'b>(&self, context: BackwardContext<'b>) -> Vec<Option<Expr<'b>>> {
        let [x, indices] = *context.inputs else { unreachable!("infer checks the arity") };
        let scatter = || Op::ScatterAdd(ScatterAdd { axis: self.axis, size: x.shape()[self.axis].clone() });
        vec![(x.is_float() && context.wanted[0]).then(|| emit(scatter(), &[context.dy(), indices])), None]
    }

    // Other axes of x, or axes of the indices. Along the indexed axis every device gathers from its shard, with zeros
    // for slices of other devices.
    fn strategies(&self, inputs: &[&Fact], _: &[Fact], _: &Group) -> Vec<Strategy> {
        let [x, indices] = inputs else { return Vec::new() };
        let after = |axis: usize| if axis < self.axis { axis } else { axis + indices.rank() - 1 };
        let mut strategies: Vec<Strategy> = (0..x.rank())
            .filter(|axis| *axis != self.axis)
            .map(|axis| Strategy::along(&[Some(axis), None], &[Some(after(axis))]))
            .collect();
        strategies
            .extend((0..indices.rank()).map(|axis| Strategy::along(&[None, Some(axis)], &[Some(self.axis + axis)])));
        strategies.push(Strategy::along(&[Some(self.axis), None], &[None]).written());
        strategies.push(Strategy::linear(&[true, false], 1));
        strategies
    }

    fn write_part<'b>(&self, _: &Strategy, context: &LocalContext<'b>) -> Vec<Expr<'b>> {
        let local = local_indices(context.inputs[1], context.whole[0].shape[self.axis].clone(), context.devices);
        let gathered = context.inputs[0].gather(self.axis, local.indices);
        let (indices, after) = (local.indices.fact().rank(), context.whole[0].rank() - self.axis - 1);
        vec![or_zero(local.in_shard, gathered, indices + after)]
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let (x, y) = (&inputs[0], &mut outputs[0]);
        let rows = resolve(&inputs[1], x.shape[self.axis])?;
        take(x, self.axis, |_| &rows, y);
        Ok(())
    }
}

impl OpRule for ScatterAdd {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [dy, indices] = arity(inputs)?;
        check_indices(indices)?;
        check_dtype(dy.dtype != DType::Bool, "dy", "a number", dy)?;
        if self.size.known().is_some_and(|v| v < 0) {
            return Err(FactError::Attribute(format!("an axis cannot have size {}", self.size)));
        }
        if self.axis > dy.rank() {
            return Err(FactError::Axis { axis: self.axis, rank: dy.rank() });
        }
        let (before, trailing) = dy.shape.split_at(self.axis);
        let Some(after) = trailing.strip_prefix(&indices.shape[..]) else {
            return Err(FactError::mismatch(
                "dy",
                format!("{dy} from axis {} on", self.axis),
                "the tensor of indices",
                indices,
            ));
        };
        let shape = [before, std::slice::from_ref(&self.size), after].concat();
        Ok(vec![Fact::new(dy.dtype, shape)])
    }

    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        Cost { flops: elements(inputs[0]), bytes: moved_bytes(inputs, outputs) }
    }

    // d(dy) = the slices of the output's gradient by index
    fn backward<'b>(&self, context: BackwardContext<'b>) -> Vec<Option<Expr<'b>>> {
        let [dy, indices] = *context.inputs else { unreachable!("infer checks the arity") };
        vec![(dy.is_float() && context.wanted[0]).then(|| context.dy().gather(self.axis, indices)), None]
    }

    // Mirrors the gather; along the indexed axis every device sums the gradients of its own slices.
    fn strategies(&self, inputs: &[&Fact], outputs: &[Fact], _: &Group) -> Vec<Strategy> {
        let ([_, indices], [dx]) = (inputs, outputs) else { return Vec::new() };
        let before = |axis: usize| if axis < self.axis { axis } else { axis + indices.rank() - 1 };
        let mut strategies: Vec<Strategy> = (0..dx.rank())
            .filter(|axis| *axis != self.axis)
            .map(|axis| Strategy::along(&[Some(before(axis)), None], &[Some(axis)]))
            .collect();
        let along_indices = |axis| Strategy::along(&[Some(self.axis + axis), Some(axis)], &[None]);
        strategies.extend((0..indices.rank()).map(along_indices));
        strategies.push(Strategy::along(&[None, None], &[Some(self.axis)]).written());
        strategies.push(Strategy::linear(&[true, false], 1));
        strategies
    }

    fn write_part<'b>(&self, _: &Strategy, context: &LocalContext<'b>) -> Vec<Expr<'b>> {
        let local = local_indices(context.inputs[1], self.size.clone(), context.devices);
        let dy = or_zero(local.in_shard, context.inputs[0], context.whole[0].rank() - self.axis);
        vec![emit(Op::ScatterAdd(ScatterAdd { axis: self.axis, size: local.size }), &[dy, local.indices])]
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let (dy, y) = (&inputs[0], &mut outputs[0]);
        let rows = resolve(&inputs[1], y.shape[self.axis])?;
        add_up(dy, self.axis, |_| &rows, y);
        Ok(())
    }
}

/// Copies slices of `x` along an axis; `rows` gives the indices for each block of the leading axes.
pub(in crate::op) fn take<'r>(x: &View<'_>, axis: usize, rows: impl Fn(usize) -> &'r [usize], y: &mut ViewMut<'_>) {
    let (outer, size): (usize, usize) = (x.shape[..axis].iter().product(), x.shape[axis]);
    // Bytes of one slice.
    let run = x.shape[axis + 1..].iter().product::<usize>() * x.dtype.size();
    let y = y.bytes_mut();
    let mut at = 0;
    for block in 0..outer {
        for row in rows(block) {
            let from = (block * size + row) * run;
            y[at..at + run].copy_from_slice(&x.bytes()[from..from + run]);
            at += run;
        }
    }
}

/// Adds slices of `dy` to the slices of `y` that `rows` gives for each block. Floats accumulate in f64 and round once;
/// integers wrap.
pub(in crate::op) fn add_up<'r>(dy: &View<'_>, axis: usize, rows: impl Fn(usize) -> &'r [usize], y: &mut ViewMut<'_>) {
    let (outer, size): (usize, usize) = (y.shape[..axis].iter().product(), y.shape[axis]);
    let run: usize = y.shape[axis + 1..].iter().product();
    // Destination of element i of dy.
    let targets = (0..outer)
        .flat_map(|block| rows(block).iter().map(move |row| (block * size + row) * run))
        .flat_map(|start| start..start + run)
        .enumerate();
    if dy.dtype.is_float() {
        let mut sums = vec![0.0; y.len()];
        targets.for_each(|(i, to)| sums[to] += dy.f64(i));
        sums.iter().enumerate().for_each(|(i, &sum)| y.set_f64(i, sum));
    } else {
        let mut sums = vec![0i64; y.len()];
        targets.for_each(|(i, to)| sums[to] = sums[to].wrapping_add(dy.i64(i)));
        sums.iter().enumerate().for_each(|(i, &sum)| y.set_i64(i, sum));
    }
}

pub(in crate::op) fn check_indices(indices: &Fact) -> Result<(), FactError> {
    check_dtype(indices.dtype.is_integer(), "the tensor of indices", "an integer", indices)
}

/// Resolves negative indices and checks the range.
pub(crate) fn resolve(indices: &View<'_>, size: usize) -> Result<Vec<usize>, KernelError> {
    let signed = indices.dtype != DType::U64;
    (0..indices.len())
        .map(|i| {
            let index = indices.i64(i);
            let row = match usize::try_from(index) {
                Ok(row) => Some(row),
                Err(_) if signed => size.checked_sub(index.unsigned_abs() as usize),
                Err(_) => None,
            };
            row.filter(|row| *row < size).ok_or(KernelError::Index { index, size })
        })
        .collect()
}

/// Indices into a sharded axis, localised to one device.
pub(in crate::op) struct LocalIndices<'b> {
    /// Mask of indices in this device's shard.
    pub in_shard: Expr<'b>,
    /// Local indices; 0 outside the shard.
    pub indices: Expr<'b>,
    pub size: Dim,
}

/// Localises indices into a sharded axis of `size` elements. An index out of range is an error on every device, as
/// without sharding.
pub(in crate::op) fn local_indices(indices: Expr<'_>, size: Dim, devices: usize) -> LocalIndices<'_> {
    let identity = indices.source(Op::Iota(Iota { fact: Fact::new(DType::I64, vec![size.clone()]), axis: 0 }));
    let checked = identity.gather(0, indices);
    let part = size.div_exact(&Dim::from(devices)).expect("the axis is divided into equal shards");
    let (zero, end) =
        (indices.integer(0), indices.integer(part.known().expect("sizes are known under tensor parallelism")));
    let first = indices.device(devices) * end;
    let indices = checked - first;
    let not_before = zero.compare(Compare::LessEqual, indices);
    let in_shard = not_before.binary(Binary::And, indices.less(end));
    LocalIndices { in_shard, indices: in_shard.select(indices, zero), size: part }
}

/// Zeroes the slices outside this device's shard. The index axes begin `from_end` axes before the end.
pub(in crate::op) fn or_zero<'b>(in_shard: Expr<'b>, slices: Expr<'b>, from_end: usize) -> Expr<'b> {
    let mut shape = in_shard.shape();
    shape.resize(from_end, Dim::Known(1));
    in_shard.reshape(shape).select(slices, slices.number(0.0))
}

pub fn samples() -> Vec<Sample> {
    let sample = |title, op, x: Tensor, indices: Tensor| Sample::new(title, op, vec![x, indices]);
    let gather = |axis| Op::Gather(Gather { axis });
    let scatter = |axis, size: usize| Op::ScatterAdd(ScatterAdd { axis, size: Dim::from(size) });
    let index = |shape: &[usize], v: &[i64]| Tensor::from_i64(shape, v);
    let ramp = |shape: &[usize]| {
        let count: usize = shape.iter().product();
        Tensor::from_f32(shape, &(0..count).map(|i| i as f32 * 0.5 - 2.0).collect::<Vec<_>>())
    };
    vec![
        sample("an embedding", gather(0), ramp(&[4, 3]), index(&[2, 3], &[0, 3, 1, 1, 2, 0])),
        sample("columns", gather(1), ramp(&[2, 4]), index(&[3], &[3, 0, 3])),
        sample("in the middle", gather(1), ramp(&[2, 3, 2]), index(&[2, 2], &[2, 0, 1, 2])),
        sample("one index drops the axis", gather(1), ramp(&[2, 3]), index(&[], &[1])),
        sample("from the end", gather(0), ramp(&[4, 2]), index(&[3], &[-1, -4, 2])),
        sample("no indices", gather(0), ramp(&[4, 2]), index(&[0], &[])),
        sample("narrow indices", gather(0), ramp(&[4]), index(&[2], &[3, -2]).cast(DType::I8)),
        sample("integers", gather(0), index(&[3], &[i64::MAX, 5, 6]), index(&[2], &[0, 2])),
        sample("booleans", gather(0), Tensor::from_bool(&[2], &[true, false]), index(&[3], &[1, 1, 0])),
        sample("rows that repeat", scatter(0, 4), ramp(&[3, 2]), index(&[3], &[1, 3, 1])),
        sample("columns", scatter(1, 3), ramp(&[2, 4]), index(&[4], &[2, 0, 2, -1])),
        sample("a table of indices", scatter(1, 3), ramp(&[2, 2, 2, 2]), index(&[2, 2], &[2, 0, 1, 2])),
        sample("one index makes the axis", scatter(1, 3), ramp(&[2]), index(&[], &[1])),
        sample("no indices", scatter(0, 2), ramp(&[0, 3]), index(&[0], &[])),
        sample("integers", scatter(0, 2), index(&[3], &[i64::MAX, 1, 6]), index(&[3], &[0, 0, 1])),
        sample("half precision", scatter(0, 2), ramp(&[3]).cast(DType::F16), index(&[3], &[0, 0, 1])),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn out_of_range_index_is_an_error() {
        let at = |v: i64, dtype| resolve(&Tensor::from_i64(&[1], &[v]).cast(dtype).view(), 4);
        assert_eq!(at(-4, DType::I64), Ok(vec![0]));
        assert_eq!(at(3, DType::U64), Ok(vec![3]));
        for (v, dtype) in [(4, DType::I64), (-5, DType::I32), (i64::MIN, DType::I64), (-1, DType::U64)] {
            assert_eq!(at(v, dtype), Err(KernelError::Index { index: v, size: 4 }));
        }
    }
}
