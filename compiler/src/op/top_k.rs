//! The k largest or smallest elements along one axis, sorted, with their indices.

use super::reduce::order_key;
use super::sample::ramp;
use super::softmax::rows;
use super::*;
use crate::tensor::dim::volume;
use std::cmp::Ordering;

impl OpRule for TopK {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [x] = arity(inputs)?;
        check_axis(self.axis, x.rank())?;
        let size = &x.shape[self.axis];
        if let Some(count) = self.count.known()
            && (count < 0 || size.known().is_some_and(|size| count > size))
        {
            return Err(FactError::Attribute(format!("an axis of size {size} has fewer than {count} elements")));
        }
        // The backward needs the element count.
        volume(&x.shape)?;
        let mut shape = x.shape.clone();
        shape[self.axis] = self.count.clone();
        Ok(vec![Fact::new(x.dtype, shape.clone()), Fact::new(DType::I64, shape)])
    }

    // Comparisons of a full sort.
    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        let size = inputs[0].shape[self.axis].known().unwrap_or(1) as f64;
        Cost { flops: elements(inputs[0]) * size.log2().max(1.0), bytes: moved_bytes(inputs, outputs) }
    }

    // dx = dy at the indices, 0 elsewhere. With the axis moved last, dx[row·n + index] = dy.
    fn backward<'b>(&self, context: BackwardContext<'b>) -> Vec<Option<Expr<'b>>> {
        let x = context.inputs[0].fact();
        let Some(dy) = context.d_outputs[0].filter(|_| x.dtype.is_float()) else { return vec![None] };
        let last = x.rank() - 1;
        let mut perm: Vec<usize> = (0..=last).collect();
        perm.swap(self.axis, last);
        let swap_axes = |value: Expr<'b>| match self.axis == last {
            true => value,
            // Swapping two axes is its own inverse.
            false => value.then(Op::Transpose(Transpose { perm: perm.clone() })),
        };
        let shape: Vec<Dim> = perm.iter().map(|&axis| x.shape[axis].clone()).collect();
        let size = |dims: &[Dim]| volume(dims).expect("the elements were counted when the fact was inferred");
        let (rows, count) = (size(&shape[..last]), size(&shape));
        let [dy, indices] = [dy, context.outputs[1]].map(swap_axes);
        let [dy, indices] = [dy, indices].map(|value| value.reshape(vec![rows.clone(), self.count.clone()]));
        let flat_index = indices + starts(dy, &rows, &shape[last], &count);
        let dx = emit(Op::ScatterAdd(ScatterAdd { axis: 0, size: count }), &[dy, flat_index]);
        vec![Some(swap_axes(dx.reshape(shape)))]
    }

    fn takes_gradient(&self, output: usize) -> bool {
        output == 0
    }

    fn strategies(&self, inputs: &[&Fact], outputs: &[Fact], _: &Group) -> Vec<Strategy> {
        sharding::all_but(inputs[0], &[self.axis], outputs.len())
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let x = &inputs[0];
        let [values, indices] = outputs else { unreachable!("infer gives two outputs") };
        for (from, to) in rows(x.shape, self.axis).zip(rows(values.shape, self.axis)) {
            let mut order: Vec<usize> = (0..from.len()).collect();
            // The sort is stable, so ties keep their order.
            order.sort_by(|&i, &j| match self.largest {
                true => compared(x, from[j], from[i]),
                false => compared(x, from[i], from[j]),
            });
            for (to, at) in to.into_iter().zip(order) {
                values.copy_from(to, x, from[at]);
                indices.set_i64(to, at as i64);
            }
        }
        Ok(())
    }
}

/// Compares two elements; NaN is larger than every number.
fn compared(x: &View<'_>, i: usize, j: usize) -> Ordering {
    if !x.dtype.is_float() {
        return order_key(x.dtype, x.i64(i)).cmp(&order_key(x.dtype, x.i64(j)));
    }
    let (a, b) = (x.f64(i), x.f64(j));
    a.partial_cmp(&b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
}

/// The flat index of each row's first element, `[rows, 1]`.
fn starts<'b>(site: Expr<'b>, rows: &Dim, size: &Dim, all: &Dim) -> Expr<'b> {
    let fact = Fact::new(DType::I64, vec![all.clone()]);
    let table = site.source(Op::Iota(Iota { fact, axis: 0 })).reshape(vec![rows.clone(), size.clone()]);
    let zero = Dim::Known(0);
    let first = Slice { begin: vec![zero.clone(), zero], end: vec![rows.clone(), Dim::Known(1)], step: vec![1, 1] };
    table.then(Op::Slice(first))
}

pub fn samples() -> Vec<Sample> {
    let sample = |title, axis, count: usize, largest, x: Tensor| {
        Sample::new(title, Op::TopK(TopK { axis, count: Dim::from(count), largest }), vec![x])
    };
    let large = Tensor::from_i64(&[3], &[3, -1, 7]).cast(DType::U64);
    let odd = Tensor::from_f32(&[4], &[1.0, f32::NAN, 3.0, f32::INFINITY]);
    let mut list = Vec::new();
    for largest in [true, false] {
        list.push(sample("the last axis", 1, 2, largest, ramp(&[3, 4], 1)));
        list.push(sample("the middle axis", 1, 2, largest, ramp(&[2, 3, 2], 2)));
        list.push(sample("the first axis, all of it", 0, 4, largest, ramp(&[4, 2], 3)));
        list.push(sample("ties", 0, 3, largest, Tensor::from_i64(&[5], &[2, 3, 2, 3, 3])));
        list.push(sample("unsigned", 0, 2, largest, large.clone()));
        // A finite difference around NaN is undefined.
        list.push(Sample { differentiate: vec![], ..sample("not a number", 0, 3, largest, odd.clone()) });
        list.push(sample("none", 1, 0, largest, Tensor::from_i64(&[2, 3], &[1, 2, 3, 4, 5, 6])));
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::sample::run;

    #[test]
    fn the_earlier_of_equal_elements_is_first() {
        let x = Tensor::from_i64(&[2, 4], &[2, 3, 2, 3, 9, 8, 7, 7]);
        let run = |largest| run(&TopK { axis: 1, count: Dim::Known(3), largest }, std::slice::from_ref(&x));
        let outputs = run(true);
        assert_eq!((outputs[0].to_i64(), outputs[1].to_i64()), (vec![3, 3, 2, 9, 8, 7], vec![1, 3, 0, 0, 1, 2]));
        let outputs = run(false);
        assert_eq!((outputs[0].to_i64(), outputs[1].to_i64()), (vec![2, 2, 3, 7, 7, 8], vec![0, 2, 1, 2, 3, 1]));
    }

    #[test]
    fn nan_is_the_largest() {
        let x = Tensor::from_f32(&[3], &[1.0, f32::NAN, f32::INFINITY]);
        let run = |largest| run(&TopK { axis: 0, count: Dim::Known(2), largest }, std::slice::from_ref(&x));
        assert_eq!((run(true)[1].to_i64(), run(false)[1].to_i64()), (vec![1, 2], vec![0, 2]));
    }
}
