//! Reductions over any axes: one `f64` accumulator per output, the input read once in order.

use super::real::{Real, for_real};
use super::sum::{largest, smallest, sum_of};
use super::walk::{Walk, row_major};
use super::wide::wide;
use super::{FastKernel, TensorLayout, movement};
use bytemuck::{Pod, cast_slice, cast_slice_mut};
use compiler::op::{ArgReduce, Reduce, ReduceKind};

pub fn kernel(op: &Reduce, x: &TensorLayout, y: &TensorLayout) -> Option<FastKernel> {
    for_real!(x.dtype, T => reduce::<T>(op, x, y))
}

fn reduce<T: Real>(op: &Reduce, x: &TensorLayout, y: &TensorLayout) -> Option<FastKernel> {
    let count: usize = op.axes.iter().map(|&axis| x.shape[axis]).product();
    if count == 1 {
        return Some(movement::copy());
    }
    // Keeping reduced dimensions as 1 does not change the order.
    let reduced_shape: Vec<usize> =
        x.shape.iter().enumerate().map(|(i, &d)| if op.axes.contains(&i) { 1 } else { d }).collect();
    let mut strides = row_major(&reduced_shape);
    op.axes.iter().for_each(|&axis| strides[axis] = 0);
    let walk = Walk::new(&x.shape, [&row_major(&x.shape), &strides], [0; 2])?;
    let kind = op.kind;
    let start = match kind {
        ReduceKind::Sum | ReduceKind::Mean => 0.0,
        ReduceKind::Prod => 1.0,
        ReduceKind::Max => f64::NEG_INFINITY,
        ReduceKind::Min => f64::INFINITY,
    };
    let divisor = if kind == ReduceKind::Mean { count as f64 } else { 1.0 };
    let fast = FastKernel::new(move |inputs, outputs, workspace| {
        let x = cast_slice::<u8, T>(inputs[0]);
        let accumulators = &mut cast_slice_mut::<u8, f64>(workspace)[..outputs[0].len() / size_of::<T>()];
        accumulators.fill(start);
        match kind {
            ReduceKind::Sum | ReduceKind::Mean => accumulate_sums(&walk, x, accumulators),
            ReduceKind::Max => accumulate_largest(&walk, x, accumulators),
            ReduceKind::Min => accumulate_smallest(&walk, x, accumulators),
            ReduceKind::Prod => accumulate_products(&walk, x, accumulators),
        }
        for (y, &v) in cast_slice_mut::<u8, T>(outputs[0]).iter_mut().zip(&*accumulators) {
            *y = T::of(v / divisor);
        }
    });
    Some(fast.with_workspace(y.len() * size_of::<f64>()))
}

macro_rules! accumulate_fns {
    ($($name:ident: |$row:ident| $whole:expr, |$a:ident, $b:ident| $pair:expr;)*) => {
        $(wide! {
            fn $name[T: Real](walk: &Walk<2>, x: &[T], accumulators: &mut [f64]) {
                let n = walk.inner;
                for [x_at, to] in walk.runs() {
                    let $row = &x[x_at..x_at + n];
                    if walk.steps[1] == 0 {
                        let ($a, $b) = (accumulators[to], $whole);
                        accumulators[to] = $pair;
                    } else {
                        for (accumulator, x) in accumulators[to..to + n].iter_mut().zip($row) {
                            let ($a, $b) = (*accumulator, x.wide());
                            *accumulator = $pair;
                        }
                    }
                }
            }
        })*
    };
}

accumulate_fns! {
    accumulate_sums: |row| sum_of(row, |v| v), |a, b| a + b;
    accumulate_largest: |row| largest(row).wide(), |a, b| a.larger(b);
    accumulate_smallest: |row| smallest(row).wide(), |a, b| a.smaller(b);
    accumulate_products: |row| row.iter().fold(1.0, |p, v| p * v.wide()), |a, b| a * b;
}

/// Argmax or argmin.
pub fn arg(op: &ArgReduce, x: &TensorLayout) -> Option<FastKernel> {
    for_real!(x.dtype, T => Some(arg_kernel::<T>(op, x)))
}

#[allow(clippy::eq_op)]
fn arg_kernel<T: Real + Pod>(op: &ArgReduce, x: &TensorLayout) -> FastKernel {
    let outer: usize = x.shape[..op.axis].iter().product();
    let (size, inner) = (x.shape[op.axis], x.shape[op.axis + 1..].iter().product::<usize>());
    let sign = if op.largest { T::ONE } else { -T::ONE };
    FastKernel::new(move |inputs, outputs, _| {
        let (x, y) = (cast_slice::<u8, T>(inputs[0]), cast_slice_mut::<u8, i64>(outputs[0]));
        for block in 0..outer {
            for within in 0..inner {
                let element = |k: usize| x[(block * size + k) * inner + within] * sign;
                let mut best = (0, element(0));
                for k in 1..size {
                    let v = element(k);
                    // NaN wins, and the first of equal elements stays.
                    if best.1 == best.1 && (v > best.1 || v != v) {
                        best = (k, v);
                    }
                }
                y[block * inner + within] = best.0 as i64;
            }
        }
    })
}
