//! Elman RNN and its gradient: one `gemm` product per step for the recurrence, one for the whole sequence otherwise.

use super::lstm::{Sizes, logistic, matrix, next, state_weight_grad, transposed};
use super::matmul::product;
use super::real::{Real, for_real};
use super::recurrent::Recurrent;
use super::wide::wide;
use super::{ALIGNMENT, FastKernel, TensorLayout};
use bytemuck::{cast_slice, cast_slice_mut};
use compiler::op::lstm::order;
use compiler::op::{Activation, Rnn, RnnGrad};

pub fn kernel(op: &Rnn, x: &TensorLayout, w_hh: &TensorLayout) -> Option<FastKernel> {
    let sizes = Sizes::of(x, w_hh)?;
    for_real!(x.dtype, T => Some(forward::<T>(op.reverse, op.activation, sizes)))
}

pub fn grad(op: &RnnGrad, x: &TensorLayout, w_hh: &TensorLayout) -> Option<FastKernel> {
    let sizes = Sizes::of(x, w_hh)?;
    for_real!(x.dtype, T => Some(backward::<T>(op.reverse, op.activation, sizes)))
}

fn forward<T: Real>(reverse: bool, activation: Activation, sizes: Sizes) -> FastKernel {
    let Sizes { steps, batch, width, hidden } = sizes;
    let recurrent = Recurrent::of::<T>(steps, [batch, hidden, hidden], true);
    let fast = FastKernel::new(move |inputs, outputs, workspace| {
        let [x, w_ih, w_hh, b_ih, b_hh, h0] = [0, 1, 2, 3, 4, 5].map(|i| cast_slice::<u8, T>(inputs[i]));
        let [y, last_h] = outputs else { unreachable!("a recurrent layer has two outputs") };
        let [y, last_h] = [y, last_h].map(|o| cast_slice_mut::<u8, T>(o));
        let w_hh = recurrent.arrange(w_hh, workspace);
        product([steps * batch, hidden, width], matrix(x, width), transposed(w_ih, width), y, hidden, false);
        let (mut unwritten, mut h): (&mut [T], &[T]) = (y, h0);
        for t in 0..steps {
            let step = next(&mut unwritten, batch * hidden, reverse);
            w_hh.multiply(t, matrix(h, hidden), step, hidden, true);
            step.chunks_exact_mut(hidden.max(1)).for_each(|row| cell(row, b_ih, b_hh, activation));
            h = step;
        }
        last_h.copy_from_slice(h);
    });
    fast.with_workspace(recurrent.bytes::<T>())
}

wide! {
    // One batch row: adds biases and applies the activation.
    fn cell[T: Real](sums: &mut [T], b_ih: &[T], b_hh: &[T], activation: Activation) {
        for ((a, b), b_hh) in sums.iter_mut().zip(b_ih).zip(b_hh) {
            *a = *a + *b + *b_hh;
        }
        match activation {
            Activation::Tanh => sums.iter_mut().for_each(|a| *a = a.tanh()),
            Activation::Relu => sums.iter_mut().for_each(|a| *a = a.larger(T::ZERO)),
            Activation::Sigmoid => sums.iter_mut().for_each(|a| *a = logistic(*a)),
        }
    }
}

fn backward<T: Real>(reverse: bool, activation: Activation, sizes: Sizes) -> FastKernel {
    let Sizes { steps, batch, hidden, .. } = sizes;
    let rows = steps * batch;
    let sums_bytes = (hidden * size_of::<f64>()).next_multiple_of(ALIGNMENT);
    let recurrent = Recurrent::of::<T>(steps, [batch, hidden, hidden], false);
    let fast = FastKernel::new(move |inputs, outputs, workspace| {
        let [dy, last_dh, x, w_ih, w_hh, h0, y] = [0, 1, 2, 3, 4, 5, 6].map(|i| cast_slice::<u8, T>(inputs[i]));
        let [dx, dw_ih, dw_hh, db, dh] = outputs else { unreachable!("its gradient has five outputs") };
        let [dx, dw_ih, dw_hh, db, dh] = [dx, dw_ih, dw_hh, db, dh].map(|o| cast_slice_mut::<u8, T>(o));
        let (panels, scratch) = workspace.split_at_mut(recurrent.bytes::<T>());
        let w_hh = recurrent.arrange(w_hh, panels);
        let (sums, scratch) = scratch.split_at_mut(sums_bytes);
        let sums = &mut cast_slice_mut::<u8, f64>(sums)[..hidden];
        let da = &mut cast_slice_mut::<u8, T>(scratch)[..rows * hidden];
        dh.copy_from_slice(last_dh);
        for t in order(steps, !reverse) {
            let step = sizes.step(t, hidden);
            let da = &mut da[step.clone()];
            cell_grad(&dy[step.clone()], dh, &y[step], da, activation);
            w_hh.multiply(t, matrix(da, hidden), dh, hidden, false);
        }
        let da = &*da;
        sizes.input_grads(da, [x, w_ih], [dx, dw_ih, db], sums);
        state_weight_grad(reverse, sizes, da, [hidden, hidden], h0, y, dw_hh);
    });
    fast.with_workspace(recurrent.bytes::<T>() + sums_bytes + rows * hidden * size_of::<T>())
}

wide! {
    // All rows of one step.
    fn cell_grad[T: Real](dy: &[T], dh: &[T], y: &[T], da: &mut [T], activation: Activation) {
        let elements = dy.iter().zip(dh).zip(y).zip(da);
        match activation {
            Activation::Tanh => elements.for_each(|(((dy, dh), y), da)| *da = (*dy + *dh) * (T::ONE - *y * *y)),
            Activation::Relu => elements.for_each(|(((dy, dh), y), da)| *da = if *y > T::ZERO { *dy + *dh } else { T::ZERO }),
            Activation::Sigmoid => elements.for_each(|(((dy, dh), y), da)| *da = (*dy + *dh) * *y * (T::ONE - *y)),
        }
    }
}
