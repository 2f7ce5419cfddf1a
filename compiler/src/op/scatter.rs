//! Scatter along one axis, replacing or combining slices.

use super::broadcast::shape_text;
use super::gather::{check_indices, resolve};
use super::sample::ramp;
use super::*;
use crate::tensor::dim::volume;

impl OpRule for Scatter {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [x, indices, updates] = arity(inputs)?;
        check_indices(indices)?;
        check_axis(self.axis, x.rank())?;
        check_like("the tensor of updates", updates, x, "the first input")?;
        let is_supported = x.dtype != DType::Bool || !matches!(self.kind, ScatterKind::Add | ScatterKind::Mul);
        check_dtype(is_supported, "the input", "a number", x)?;
        let expected = [&x.shape[..self.axis], &indices.shape, &x.shape[self.axis + 1..]].concat();
        if updates.shape != expected {
            return Err(FactError::mismatch(
                "the tensor of updates",
                updates,
                "the shape it must have",
                shape_text(&expected),
            ));
        }
        // The backward counts the indices.
        volume(&indices.shape)?;
        Ok(vec![x.clone()])
    }

    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        Cost { flops: elements(inputs[2]), bytes: moved_bytes(inputs, outputs) }
    }

    fn backward<'b>(&self, context: BackwardContext<'b>) -> Vec<Option<Expr<'b>>> {
        let [x, indices, updates] = *context.inputs else { unreachable!("infer checks the arity") };
        if !x.is_float() {
            return vec![None; 3];
        }
        let [dx, du] = match self.kind {
            ScatterKind::Replace => self.backward_replace(&context),
            // dx = dy, du = dy gathered at the indices
            ScatterKind::Add => [Some(context.dy()), Some(context.dy().gather(self.axis, indices))],
            ScatterKind::Mul => [None, None],
            ScatterKind::Max | ScatterKind::Min => {
                self.backward_extreme([x, indices, updates], context.outputs[0], context.dy()).map(Some)
            }
        };
        vec![dx, None, du]
    }

    fn takes_gradient(&self, _: usize) -> bool {
        self.kind != ScatterKind::Mul
    }

    // Axes that are not indexed.
    fn strategies(&self, inputs: &[&Fact], _: &[Fact], _: &Group) -> Vec<Strategy> {
        let [x, indices, _] = inputs else { return Vec::new() };
        let after = |axis: usize| if axis < self.axis { axis } else { axis + indices.rank() - 1 };
        let axes = (0..x.rank()).filter(|axis| *axis != self.axis);
        axes.map(|axis| Strategy::along(&[Some(axis), None, Some(after(axis))], &[Some(axis)])).collect()
    }

    // Floats are combined in f64 and rounded once; integers wrap.
    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let (x, updates, y) = (&inputs[0], &inputs[2], &mut outputs[0]);
        let size = x.shape[self.axis];
        let indices = resolve(&inputs[1], size)?;
        let outer: usize = x.shape[..self.axis].iter().product();
        let run: usize = x.shape[self.axis + 1..].iter().product();
        // Destination of element i of the updates.
        let targets = (0..outer)
            .flat_map(|block| indices.iter().map(move |index| (block * size + index) * run))
            .flat_map(|start| start..start + run)
            .enumerate();
        y.bytes_mut().copy_from_slice(x.bytes());
        let op = match self.kind {
            ScatterKind::Replace => {
                targets.for_each(|(i, to)| y.copy_from(to, updates, i));
                return Ok(());
            }
            ScatterKind::Add => Binary::Add,
            ScatterKind::Mul => Binary::Mul,
            ScatterKind::Max => Binary::Max,
            ScatterKind::Min => Binary::Min,
        };
        if x.dtype.is_float() {
            let mut accumulators: Vec<f64> = (0..x.len()).map(|i| x.f64(i)).collect();
            targets.for_each(|(i, to)| accumulators[to] = binary::apply(op, accumulators[to], updates.f64(i)));
            accumulators.iter().enumerate().for_each(|(i, &v)| y.set_f64(i, v));
        } else {
            let apply = |a: i64, b: i64| match x.dtype {
                DType::U64 => binary::apply_u64(op, a as u64, b as u64) as i64,
                _ => binary::apply_i64(op, a, b),
            };
            let mut accumulators: Vec<i64> = (0..x.len()).map(|i| x.i64(i)).collect();
            targets.for_each(|(i, to)| accumulators[to] = apply(accumulators[to], updates.i64(i)));
            accumulators.iter().enumerate().for_each(|(i, &v)| y.set_i64(i, v));
        }
        Ok(())
    }
}

impl Scatter {
    // dx = dy, 0 at written slices. du = dy gathered at the indices, 0 for an update that a later one overwrote. The
    // last writer is found by scattering the update numbers.
    fn backward_replace<'b>(&self, context: &BackwardContext<'b>) -> [Option<Expr<'b>>; 2] {
        let (dy, indices, updates) = (context.dy(), context.inputs[1], context.inputs[2]);
        let x = context.inputs[0].fact();
        let zero = context.inputs[0].number(0.0);
        let dx = context.wanted[0].then(|| {
            let zeros = zero.broadcast(updates.shape());
            emit(Op::Scatter(*self), &[dy, indices, zeros])
        });
        let du = context.wanted[2].then(|| {
            let gathered = dy.gather(self.axis, indices);
            let mut shape = indices.shape();
            let count = volume(&shape).expect("the indices were counted when the fact was inferred");
            let order = dy.source(Op::Iota(Iota { fact: Fact::new(DType::I64, vec![count]), axis: 0 }));
            let order = order.reshape(shape.clone());
            let no_update = dy.integer(0).broadcast(vec![x.shape[self.axis].clone()]);
            let last = Op::Scatter(Scatter { kind: ScatterKind::Replace, axis: 0 });
            let last = emit(last, &[no_update, indices, order]).gather(0, indices);
            shape.resize(shape.len() + x.rank() - self.axis - 1, Dim::Known(1));
            last.equal(order).reshape(shape).select(gathered, zero)
        });
        [dx, du]
    }

    // Let hits = (x == y) and (u == y at the indices), and ties = the number of hits per slice. Then dx = hits dy /
    // ties, and du likewise at the indices.
    fn backward_extreme<'b>(&self, [x, indices, updates]: [Expr<'b>; 3], y: Expr<'b>, dy: Expr<'b>) -> [Expr<'b>; 2] {
        let dtype = x.dtype();
        let gathered = y.gather(self.axis, indices);
        let (of_x, of_updates) = (x.equal(y).cast(dtype), updates.equal(gathered).cast(dtype));
        let sum = Scatter { kind: ScatterKind::Add, axis: self.axis };
        let ties = emit(Op::Scatter(sum), &[of_x, indices, of_updates]);
        let part = dy / ties;
        let gathered = part.gather(self.axis, indices);
        [of_x * part, of_updates * gathered]
    }
}

pub fn samples() -> Vec<Sample> {
    let sample = |title, kind, axis, x: Tensor, indices: Tensor, updates: Tensor| Sample {
        title,
        op: Op::Scatter(Scatter { kind, axis }),
        differentiate: if x.dtype().is_float() && kind != ScatterKind::Mul { vec![0, 2] } else { vec![] },
        inputs: vec![x, indices, updates],
    };
    let index = |shape: &[usize], v: &[i64]| Tensor::from_i64(shape, v);
    let bytes = |v: &[i64]| index(&[v.len()], v).cast(DType::U8);
    let mut list = Vec::new();
    use ScatterKind::*;
    for kind in [Replace, Add, Mul, Max, Min] {
        list.push(sample("rows that repeat", kind, 0, ramp(&[4, 2], 1), index(&[3], &[1, 3, 1]), ramp(&[3, 2], 2)));
        list.push(sample("columns", kind, 1, ramp(&[2, 4], 3), index(&[3], &[-1, 0, 2]), ramp(&[2, 3], 4)));
        let table = index(&[2, 2], &[2, 0, 0, 2]);
        list.push(sample("a table", kind, 1, ramp(&[2, 3, 2], 5), table, ramp(&[2, 2, 2, 2], 6)));
        list.push(sample("one index", kind, 0, ramp(&[3, 2], 7), index(&[], &[1]), ramp(&[2], 8)));
        let nothing = Tensor::zeros(DType::F32, &[0, 2]);
        list.push(sample("no indices", kind, 0, ramp(&[3, 2], 7), index(&[0], &[]), nothing));
        let integer_inputs = [index(&[3], &[i64::MAX, 2, 3]), index(&[3], &[0, 0, 2]), index(&[3], &[5, -7, 2])];
        let [x, indices, updates] = integer_inputs;
        list.push(sample("integers", kind, 0, x, indices, updates));
        list.push(sample("bytes", kind, 0, bytes(&[200, 2]), index(&[2], &[0, 0]), bytes(&[100, 3])));
    }
    let (x, updates) = (Tensor::from_bool(&[3], &[true, false, true]), Tensor::from_bool(&[2], &[false, true]));
    list.push(sample("booleans", Replace, 0, x, index(&[2], &[0, 1]), updates));
    list
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::sample::{run, try_run};

    #[test]
    fn updates_are_joined_in_their_order() {
        let integers = |v: &[i64]| Tensor::from_i64(&[v.len()], v);
        let inputs = [integers(&[1, 2, 3]), integers(&[0, -1, 0]), integers(&[5, 4, -2])];
        let run = |kind| run(&Scatter { kind, axis: 0 }, &inputs)[0].to_i64();
        assert_eq!(run(ScatterKind::Replace), [-2, 2, 4]);
        assert_eq!(run(ScatterKind::Add), [4, 2, 7]);
        assert_eq!(run(ScatterKind::Mul), [-10, 2, 12]);
        assert_eq!(run(ScatterKind::Max), [5, 2, 4]);
        assert_eq!(run(ScatterKind::Min), [-2, 2, 3]);
    }

    #[test]
    fn out_of_range_index_is_an_error() {
        let inputs = [Tensor::from_i64(&[2], &[1, 2]), Tensor::from_i64(&[1], &[2]), Tensor::from_i64(&[1], &[0])];
        let found = try_run(&Scatter { kind: ScatterKind::Add, axis: 0 }, &inputs);
        assert_eq!(found, Err(KernelError::Index { index: 2, size: 2 }));
    }
}
