//! Reductions, and argmax and argmin.

use super::broadcast::walk;
use super::*;
use crate::tensor::view::strides;

impl OpRule for Reduce {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [x] = arity(inputs)?;
        check_axes(&self.axes, x.rank())?;
        let (is_supported, expected) = match self.kind {
            ReduceKind::Mean => (x.dtype.is_float(), "a float"),
            ReduceKind::Sum | ReduceKind::Prod => (x.dtype != DType::Bool, "a number"),
            // On bool these are `any` and `all`.
            ReduceKind::Max | ReduceKind::Min => (true, ""),
        };
        check_dtype(is_supported, "the input", expected, x)?;
        let shape = if self.keep { kept_shape(&x.shape, &self.axes) } else { dropped_shape(&x.shape, &self.axes) };
        Ok(vec![Fact::new(x.dtype, shape)])
    }

    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        Cost { flops: elements(inputs[0]), bytes: moved_bytes(inputs, outputs) }
    }

    fn backward<'b>(&self, context: BackwardContext<'b>) -> Vec<Option<Expr<'b>>> {
        let x = context.inputs[0];
        if !x.is_float() {
            return vec![None];
        }
        let shape = x.shape();
        // Gradient and result with the reduced axes at size 1, so that they broadcast over x.
        let narrow = kept_shape(&shape, &self.axes);
        let with_axes = |value: Expr<'b>| if value.shape() == narrow { value } else { value.reshape(narrow.clone()) };
        let dy = with_axes(context.dy());
        let dx = match self.kind {
            ReduceKind::Sum => dy,
            ReduceKind::Mean => dy * reciprocal_count(x, &x.fact(), &self.axes),
            // dx = (x == y) dy / Σ (x == y)
            ReduceKind::Max | ReduceKind::Min => {
                let y = with_axes(context.outputs[0]);
                let is_extremum = x.equal(y).cast(x.dtype());
                let ties = is_extremum.reduce(ReduceKind::Sum, self.axes.clone(), true);
                is_extremum * (dy / ties)
            }
            ReduceKind::Prod => dy * product_of_others(x, &self.axes),
        };
        vec![Some(if dx.shape() == shape { dx } else { dx.broadcast(shape) })]
    }

    // Along a reduced axis, every device reduces its shard; the results are partial sums or are all-reduced.
    fn strategies(&self, inputs: &[&Fact], outputs: &[Fact], _: &Group) -> Vec<Strategy> {
        let [x] = inputs else { return Vec::new() };
        let after = |axis: usize| if self.keep { axis } else { axis - self.axes.iter().filter(|a| **a < axis).count() };
        let mut strategies: Vec<Strategy> = Vec::new();
        for axis in 0..x.rank() {
            strategies.push(match (self.axes.contains(&axis), self.kind) {
                (false, _) => Strategy::along(&[Some(axis)], &[Some(after(axis))]),
                (true, ReduceKind::Sum) => Strategy::along(&[Some(axis)], &[None]),
                (true, ReduceKind::Mean) => Strategy::along(&[Some(axis)], &[None]).written(),
                (true, _) if x.dtype == DType::Bool => continue,
                (true, _) => Strategy {
                    outputs: vec![Sharding::Replicated],
                    ..Strategy::along(&[Some(axis)], &[None]).written()
                },
            });
        }
        if matches!(self.kind, ReduceKind::Sum | ReduceKind::Mean) {
            strategies.push(Strategy::linear(&[true], outputs.len()));
        }
        strategies
    }

    fn write_part<'b>(&self, _: &Strategy, context: &LocalContext<'b>) -> Vec<Expr<'b>> {
        let kind = if self.kind == ReduceKind::Mean { ReduceKind::Sum } else { self.kind };
        let local = context.inputs[0].then(Op::Reduce(Reduce { kind, ..self.clone() }));
        if self.kind != ReduceKind::Mean {
            return vec![local.all_reduce(kind, context.devices)];
        }
        vec![local * reciprocal_count(local, context.whole[0], &self.axes)]
    }

    // Floats accumulate in f64 and round once; integers wrap. Over no elements, a sum is 0, a product is 1, and a
    // maximum (minimum) is the least (greatest) value of the type.
    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let (x, y) = (&inputs[0], &mut outputs[0]);
        // Axes of size 1 do not affect the element order, so the walk always keeps them.
        let narrow: Vec<usize> =
            (0..x.shape.len()).map(|axis| if self.axes.contains(&axis) { 1 } else { x.shape[axis] }).collect();
        let mut steps: Vec<isize> = strides(&narrow).into_iter().map(|s| s as isize).collect();
        self.axes.iter().for_each(|&axis| steps[axis] = 0);
        let targets = walk(0, &steps, x.shape).enumerate();
        if x.dtype.is_float() {
            let start = match self.kind {
                ReduceKind::Sum | ReduceKind::Mean => 0.0,
                ReduceKind::Prod => 1.0,
                ReduceKind::Max => f64::NEG_INFINITY,
                ReduceKind::Min => f64::INFINITY,
            };
            let mut accumulators = vec![start; y.len()];
            targets.for_each(|(i, to)| accumulators[to] = join(self.kind, accumulators[to], x.f64(i)));
            let count: usize = self.axes.iter().map(|&axis| x.shape[axis]).product();
            let divisor = if self.kind == ReduceKind::Mean { count as f64 } else { 1.0 };
            accumulators.iter().enumerate().for_each(|(i, &v)| y.set_f64(i, v / divisor));
        } else {
            let (lowest, highest) = range(x.dtype);
            let start = match self.kind {
                ReduceKind::Sum | ReduceKind::Mean => 0,
                ReduceKind::Prod => 1,
                ReduceKind::Max => lowest,
                ReduceKind::Min => highest,
            };
            let mut accumulators = vec![start; y.len()];
            targets
                .for_each(|(i, to)| accumulators[to] = join_integers(self.kind, x.dtype, accumulators[to], x.i64(i)));
            accumulators.iter().enumerate().for_each(|(i, &v)| y.set_i64(i, v));
        }
        Ok(())
    }
}

impl OpRule for ArgReduce {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [x] = arity(inputs)?;
        check_axes(&[self.axis], x.rank())?;
        if x.shape[self.axis].is(0) {
            return Err(FactError::Attribute(format!("axis {} of {x} has no elements to select", self.axis)));
        }
        let shape = if self.keep { kept_shape(&x.shape, &[self.axis]) } else { dropped_shape(&x.shape, &[self.axis]) };
        Ok(vec![Fact::new(DType::I64, shape)])
    }

    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        Cost { flops: elements(inputs[0]), bytes: moved_bytes(inputs, outputs) }
    }

    fn strategies(&self, inputs: &[&Fact], _: &[Fact], _: &Group) -> Vec<Strategy> {
        let after = |axis: usize| if self.keep || axis < self.axis { axis } else { axis - 1 };
        let axes = (0..inputs[0].rank()).filter(|axis| *axis != self.axis);
        axes.map(|axis| Strategy::along(&[Some(axis)], &[Some(after(axis))])).collect()
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let (x, y) = (&inputs[0], &mut outputs[0]);
        let (size, inner) = (x.shape[self.axis], x.shape[self.axis + 1..].iter().product::<usize>());
        for i in 0..y.len() {
            let (block, offset) = (i / inner, i % inner);
            let element = |k: usize| (block * size + k) * inner + offset;
            let best = (1..size).fold(0, |best, k| if self.beats(x, element(k), element(best)) { k } else { best });
            y.set_i64(i, best as i64);
        }
        Ok(())
    }
}

impl ArgReduce {
    /// Tests whether element `i` replaces the earlier element `j`. NaN beats every number, as in `max`.
    fn beats(&self, x: &View<'_>, i: usize, j: usize) -> bool {
        if x.dtype.is_float() {
            let (a, b) = (x.f64(i), x.f64(j));
            return !b.is_nan() && (a.is_nan() || if self.largest { a > b } else { a < b });
        }
        let (a, b) = (order_key(x.dtype, x.i64(i)), order_key(x.dtype, x.i64(j)));
        if self.largest { a > b } else { a < b }
    }
}

/// Refuses axes that are unsorted, repeated or out of range.
pub fn check_axes(axes: &[usize], rank: usize) -> Result<(), FactError> {
    if let Some(&axis) = axes.iter().find(|axis| **axis >= rank) {
        return Err(FactError::Axis { axis, rank });
    }
    if !axes.is_sorted_by(|a, b| a < b) {
        return Err(FactError::Attribute(format!("the axes {axes:?} are not ascending")));
    }
    Ok(())
}

fn kept_shape(shape: &[Dim], axes: &[usize]) -> Vec<Dim> {
    shape.iter().enumerate().map(|(i, d)| if axes.contains(&i) { Dim::Known(1) } else { d.clone() }).collect()
}

fn dropped_shape(shape: &[Dim], axes: &[usize]) -> Vec<Dim> {
    shape.iter().enumerate().filter(|(i, _)| !axes.contains(i)).map(|(_, d)| d.clone()).collect()
}

/// `1/count` of the elements of `x` along `axes`, as a scalar beside `site`. A symbolic count is emitted as a sum of ones,
/// which folds to the same constant once the symbols are bound.
fn reciprocal_count<'b>(site: Expr<'b>, x: &Fact, axes: &[usize]) -> Expr<'b> {
    let sizes: Vec<Dim> = axes.iter().map(|&axis| x.shape[axis].clone()).collect();
    if let Some(static_sizes) = sizes.iter().map(Dim::known).collect::<Option<Vec<i64>>>() {
        let count: f64 = static_sizes.iter().map(|&size| size as f64).product();
        return site.source(unary::scalar(x.dtype, 1.0 / count));
    }
    let ones = site.source(unary::scalar(DType::F64, 1.0)).broadcast(sizes);
    ones.sum().reciprocal().cast(x.dtype)
}

/// For each element the product of the others along `axes`. Let p be the product of all non-zero elements. Without
/// zeros it is p/x; with one zero, p at that element and 0 elsewhere; with more, 0.
fn product_of_others<'b>(x: Expr<'b>, axes: &[usize]) -> Expr<'b> {
    let (zero, one) = (x.number(0.0), x.number(1.0));
    let is_zero = x.equal(zero);
    let nonzero = is_zero.select(one, x);
    let product = nonzero.reduce(ReduceKind::Prod, axes.to_vec(), true);
    let zeros = is_zero.cast(x.dtype()).reduce(ReduceKind::Sum, axes.to_vec(), true);
    let (no_zeros, single) = (zeros.equal(zero), zeros.equal(one));
    let product_or_zero = no_zeros.select(product, zero);
    let product_of_rest = single.select(product, zero);
    is_zero.select(product_of_rest, product_or_zero / nonzero)
}

pub(in crate::op) fn join(kind: ReduceKind, so_far: f64, x: f64) -> f64 {
    match kind {
        ReduceKind::Sum | ReduceKind::Mean => so_far + x,
        ReduceKind::Prod => so_far * x,
        ReduceKind::Max => binary::apply(Binary::Max, so_far, x),
        ReduceKind::Min => binary::apply(Binary::Min, so_far, x),
    }
}

pub(in crate::op) fn join_integers(kind: ReduceKind, dtype: DType, so_far: i64, x: i64) -> i64 {
    match kind {
        ReduceKind::Sum | ReduceKind::Mean => so_far.wrapping_add(x),
        ReduceKind::Prod => so_far.wrapping_mul(x),
        ReduceKind::Max => std::cmp::max_by_key(so_far, x, |v| order_key(dtype, *v)),
        ReduceKind::Min => std::cmp::min_by_key(so_far, x, |v| order_key(dtype, *v)),
    }
}

/// Converts to an integer that preserves the order; `u64` arrives as bits.
pub(in crate::op) fn order_key(dtype: DType, bits: i64) -> i128 {
    if dtype == DType::U64 { bits as u64 as i128 } else { bits as i128 }
}

/// The least and greatest value of a non-float type; `u64` as bits.
fn range(dtype: DType) -> (i64, i64) {
    match dtype {
        DType::I64 => (i64::MIN, i64::MAX),
        DType::I32 => (i32::MIN.into(), i32::MAX.into()),
        DType::I16 => (i16::MIN.into(), i16::MAX.into()),
        DType::I8 => (i8::MIN.into(), i8::MAX.into()),
        DType::U32 => (0, u32::MAX.into()),
        DType::U16 => (0, u16::MAX.into()),
        DType::U8 => (0, u8::MAX.into()),
        DType::Bool => (0, 1),
        _ => (0, u64::MAX as i64),
    }
}

pub fn samples() -> Vec<Sample> {
    use ReduceKind::*;
    let sample = |title, kind, axes: &[usize], keep, x: Tensor| {
        Sample::new(title, Op::Reduce(Reduce { kind, axes: axes.to_vec(), keep }), vec![x])
    };
    let arg_sample = |title, largest, axis, keep, x: Tensor| {
        Sample::forward(title, Op::ArgReduce(ArgReduce { largest, axis, keep }), vec![x])
    };
    let x = || Tensor::from_f32(&[2, 3, 2], &[1.5, -2.0, 0.3, 4.1, -0.6, 2.2, 3.7, 0.9, -1.1, 2.8, 5.0, -3.3]);
    let integers = || Tensor::from_i64(&[2, 2], &[i64::MAX, -2, 3, 4]);
    let large = || Tensor::from_i64(&[3], &[3, -1, 7]).cast(DType::U64);
    let mut list = Vec::new();
    for kind in [Sum, Mean, Max, Min, Prod] {
        list.push(sample("the last axis", kind, &[2], false, x()));
        list.push(sample("the middle axis, kept", kind, &[1], true, x()));
        list.push(sample("two axes apart", kind, &[0, 2], false, x()));
        list.push(sample("all axes", kind, &[0, 1, 2], false, x()));
        list.push(sample("all axes, kept", kind, &[0, 1, 2], true, x()));
        list.push(sample("no axes", kind, &[], false, x()));
        list.push(sample("a scalar", kind, &[], false, Tensor::from_f32(&[], &[2.5])));
        list.push(sample("nothing", kind, &[1], false, Tensor::zeros(DType::F32, &[0, 3])));
        list.push(sample("brain floats", kind, &[1], false, x().cast(DType::Bf16)));
        if kind != Mean {
            list.push(sample("integers", kind, &[1], false, integers()));
            list.push(sample("unsigned", kind, &[0], false, large()));
            list.push(sample("bytes", kind, &[0], true, Tensor::from_i64(&[3], &[200, 100, 3]).cast(DType::U8)));
        }
    }
    list.push(sample("over no elements", Sum, &[0], false, Tensor::zeros(DType::F32, &[0, 3])));
    let zeros = Tensor::from_f32(&[3, 3], &[0.0, 2.0, -3.0, 0.0, 0.0, 1.5, 0.5, 4.0, 1.0]);
    list.push(sample("one zero, two zeros, none", Prod, &[1], false, zeros));
    for kind in [Max, Min] {
        let truth = Tensor::from_bool(&[2, 2], &[true, false, false, false]);
        list.push(sample("booleans", kind, &[1], false, truth));
        // Ties split the gradient; a finite difference is undefined there.
        let ties = sample("ties", kind, &[0], false, Tensor::from_f32(&[3], &[2.0, 2.0, 2.0]));
        list.push(Sample { differentiate: vec![], ..ties });
    }
    for largest in [true, false] {
        list.push(arg_sample("the last axis", largest, 2, false, x()));
        list.push(arg_sample("the first axis, kept", largest, 0, true, x()));
        list.push(arg_sample("the first of ties", largest, 0, false, Tensor::from_f32(&[4], &[1.0, 2.0, 2.0, 1.0])));
        list.push(arg_sample("not a number", largest, 0, false, Tensor::from_f32(&[3], &[1.0, f32::NAN, 2.0])));
        list.push(arg_sample("integers", largest, 1, false, integers()));
        list.push(arg_sample("unsigned", largest, 0, false, large()));
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reduced(kind: ReduceKind, x: &Tensor) -> Tensor {
        let mut bytes = vec![0; x.dtype().size()];
        let op = Reduce { kind, axes: vec![0], keep: false };
        op.reference(&[x.view()], &mut [ViewMut::new(x.dtype(), &[], &mut bytes)]).unwrap();
        Tensor::new(x.dtype(), vec![], bytes.into()).unwrap()
    }

    #[test]
    fn floats_round_once() {
        // In f16 the running sum would stick at 2048.
        let ones = Tensor::from_f32(&[4096], &[1.0; 4096]).cast(DType::F16);
        assert_eq!(reduced(ReduceKind::Sum, &ones).to_f64(), [4096.0]);
        assert_eq!(reduced(ReduceKind::Mean, &ones).to_f64(), [1.0]);
    }

    #[test]
    fn integers_are_exact_and_unsigned_ones_unsigned() {
        let near = Tensor::from_i64(&[2], &[i64::MAX - 1, i64::MAX - 2]);
        assert_eq!(reduced(ReduceKind::Max, &near).to_i64(), [i64::MAX - 1]);
        let wide = Tensor::from_i64(&[2], &[-1, 1]).cast(DType::U64);
        assert_eq!(reduced(ReduceKind::Min, &wide).to_i64(), [1]);
        assert_eq!(reduced(ReduceKind::Max, &wide).to_i64(), [-1]);
    }

    #[test]
    fn no_elements_and_no_numbers() {
        let none = Tensor::zeros(DType::F32, &[0]);
        assert_eq!(reduced(ReduceKind::Sum, &none).to_f64(), [0.0]);
        assert!(reduced(ReduceKind::Mean, &none).to_f64()[0].is_nan());
        assert_eq!(reduced(ReduceKind::Max, &none).to_f64(), [f64::NEG_INFINITY]);
        assert!(reduced(ReduceKind::Max, &Tensor::from_f32(&[2], &[f32::NAN, 1.0])).to_f64()[0].is_nan());
        assert_eq!(reduced(ReduceKind::Max, &Tensor::zeros(DType::Bool, &[0])).to_i64(), [0]);
    }
}
