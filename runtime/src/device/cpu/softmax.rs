//! Softmax and log-softmax along one axis.

use super::real::{Real, for_real};
use super::sum::{largest, sum_exp, sum_of};
use super::wide::wide;
use super::{FastKernel, TensorLayout};
use bytemuck::{cast_slice, cast_slice_mut};

pub fn kernel(axis: usize, logarithm: bool, x: &TensorLayout) -> Option<FastKernel> {
    for_real!(x.dtype, T => Some(axis_kernel::<T>(axis, logarithm, x)))
}

fn axis_kernel<T: Real>(axis: usize, logarithm: bool, x: &TensorLayout) -> FastKernel {
    let (size, inner) = (x.shape[axis], x.shape[axis + 1..].iter().product::<usize>());
    if x.is_empty() {
        return FastKernel::new(|_, _, _| {});
    }
    if inner == 1 {
        return FastKernel::new(move |inputs, outputs, _| {
            softmax_rows(cast_slice::<u8, T>(inputs[0]), cast_slice_mut(outputs[0]), size, logarithm)
        });
    }
    let fast = FastKernel::new(move |inputs, outputs, workspace| {
        let (max, sum) = cast_slice_mut::<u8, f64>(workspace)[..2 * inner].split_at_mut(inner);
        softmax_columns(cast_slice::<u8, T>(inputs[0]), cast_slice_mut(outputs[0]), [size, inner], logarithm, max, sum);
    });
    fast.with_workspace(2 * inner * size_of::<f64>())
}

wide! {
    fn softmax_rows[T: Real](x: &[T], y: &mut [T], size: usize, logarithm: bool) {
        for (x, y) in x.chunks_exact(size).zip(y.chunks_exact_mut(size)) {
            let max = largest(x);
            if logarithm {
                let shift = max.wide() + sum_exp(x, max).ln();
                for (y, x) in y.iter_mut().zip(x) {
                    *y = T::of(x.wide() - shift);
                }
            } else {
                for (y, &x) in y.iter_mut().zip(x) {
                    *y = (x - max).exp();
                }
                let reciprocal = T::of(1.0 / sum_of(y, |v| v));
                for y in y.iter_mut() {
                    *y = *y * reciprocal;
                }
            }
        }
    }
}

wide! {
    // `inner` adjacent columns are vectorised together.
    fn softmax_columns[T: Real](x: &[T], y: &mut [T], sizes: [usize; 2], logarithm: bool, max: &mut [f64], sum: &mut [f64]) {
        let [size, inner] = sizes;
        for (x, y) in x.chunks_exact(size * inner).zip(y.chunks_exact_mut(size * inner)) {
            max.fill(f64::NEG_INFINITY);
            sum.fill(0.0);
            for x in x.chunks_exact(inner) {
                for (max, x) in max.iter_mut().zip(x) {
                    *max = max.larger(x.wide());
                }
            }
            for (x, y) in x.chunks_exact(inner).zip(y.chunks_exact_mut(inner)) {
                for i in 0..inner {
                    let e = T::of(x[i].wide() - max[i]).exp();
                    sum[i] += e.wide();
                    y[i] = e;
                }
            }
            if logarithm {
                for (max, sum) in max.iter_mut().zip(&*sum) {
                    *max += sum.ln();
                }
                for (x, y) in x.chunks_exact(inner).zip(y.chunks_exact_mut(inner)) {
                    for i in 0..inner {
                        y[i] = T::of(x[i].wide() - max[i]);
                    }
                }
            } else {
                for sum in sum.iter_mut() {
                    *sum = 1.0 / *sum;
                }
                for y in y.chunks_exact_mut(inner) {
                    for i in 0..inner {
                        y[i] = T::of(y[i].wide() * sum[i]);
                    }
                }
            }
        }
    }
}
