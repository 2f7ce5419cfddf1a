//! LSTM and its gradient: one `gemm` product per step for the recurrence, one for the whole sequence otherwise.

use super::matmul::{Matrix, product};
use super::real::{Real, for_real};
use super::recurrent::Recurrent;
use super::wide::wide;
use super::{ALIGNMENT, FastKernel, TensorLayout};
use bytemuck::{cast_slice, cast_slice_mut};
use compiler::op::lstm::{before, order};

#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub steps: usize,
    pub batch: usize,
    pub width: usize,
    pub hidden: usize,
}

impl Sizes {
    pub fn of(x: &TensorLayout, w_hh: &TensorLayout) -> Option<Sizes> {
        let (&[steps, batch, width], &[_, hidden]) = (x.shape.as_slice(), w_hh.shape.as_slice()) else { return None };
        Some(Sizes { steps, batch, width, hidden })
    }

    /// Range of step `t` in a sequence with this many columns.
    pub fn step(self, t: usize, columns: usize) -> std::ops::Range<usize> {
        t * self.batch * columns..(t + 1) * self.batch * columns
    }

    /// The gradients of the input, its weight and its bias, from those of the pre-activations: `da`, with as many columns
    /// as `sums`.
    pub fn input_grads<T: Real>(
        self,
        da: &[T],
        [x, w_ih]: [&[T]; 2],
        [dx, dw_ih, db]: [&mut [T]; 3],
        sums: &mut [f64],
    ) {
        let (rows, width, columns) = (self.steps * self.batch, self.width, sums.len());
        product([rows, width, columns], matrix(da, columns), matrix(w_ih, width), dx, width, false);
        product([columns, width, rows], transposed(da, columns), matrix(x, width), dw_ih, width, false);
        sum_columns(da, sums, db);
    }
}

pub fn kernel(reverse: bool, x: &TensorLayout, w_hh: &TensorLayout) -> Option<FastKernel> {
    let sizes = Sizes::of(x, w_hh)?;
    for_real!(x.dtype, T => Some(forward::<T>(reverse, sizes)))
}

pub fn grad(reverse: bool, x: &TensorLayout, w_hh: &TensorLayout) -> Option<FastKernel> {
    let sizes = Sizes::of(x, w_hh)?;
    for_real!(x.dtype, T => Some(backward::<T>(reverse, sizes)))
}

/// A row-major matrix.
pub(super) fn matrix<T>(values: &[T], row: usize) -> Matrix<'_, T> {
    Matrix { values, strides: (row, 1) }
}

/// A transposed matrix.
pub(super) fn transposed<T>(values: &[T], row: usize) -> Matrix<'_, T> {
    Matrix { values, strides: (1, row) }
}

fn forward<T: Real>(reverse: bool, sizes: Sizes) -> FastKernel {
    let Sizes { steps, batch, width, hidden } = sizes;
    let gate_width = 4 * hidden;
    let recurrent = Recurrent::of::<T>(steps, [batch, gate_width, hidden], true);
    let fast = FastKernel::new(move |inputs, outputs, workspace| {
        let [x, w_ih, w_hh, b_ih, b_hh, h0, c0] = [0, 1, 2, 3, 4, 5, 6].map(|i| cast_slice::<u8, T>(inputs[i]));
        let [y, last_h, last_c, gates, cells] = outputs else { unreachable!("an LSTM has five outputs") };
        let [y, last_h, last_c] = [y, last_h, last_c].map(|o| cast_slice_mut::<u8, T>(o));
        let [gates, cells] = [gates, cells].map(|o| cast_slice_mut::<u8, T>(o));
        let w_hh = recurrent.arrange(w_hh, workspace);
        product(
            [steps * batch, gate_width, width],
            matrix(x, width),
            transposed(w_ih, width),
            gates,
            gate_width,
            false,
        );
        let (mut h, mut c): (&[T], &[T]) = (h0, c0);
        let (mut unwritten_y, mut unwritten_cells): (&mut [T], &mut [T]) = (y, cells);
        for t in order(steps, reverse) {
            let gates = &mut gates[sizes.step(t, gate_width)];
            w_hh.multiply(t, matrix(h, hidden), gates, gate_width, true);
            let step_y = next(&mut unwritten_y, batch * hidden, reverse);
            let step_cells = next(&mut unwritten_cells, batch * hidden, reverse);
            for n in 0..batch {
                let row = n * hidden..(n + 1) * hidden;
                let (gates, c) = (&mut gates[n * gate_width..(n + 1) * gate_width], &c[row.clone()]);
                cell(gates, b_ih, b_hh, c, &mut step_cells[row.clone()], &mut step_y[row]);
            }
            (h, c) = (step_y, step_cells);
        }
        last_h.copy_from_slice(h);
        last_c.copy_from_slice(c);
    });
    fast.with_workspace(recurrent.bytes::<T>())
}

/// Splits off the next step of a sequence, so that the previous step can be read while it is written.
pub(super) fn next<'a, T>(from: &mut &'a mut [T], size: usize, reverse: bool) -> &'a mut [T] {
    let sequence = std::mem::take(from);
    let at = if reverse { sequence.len() - size } else { size };
    let (head, tail) = sequence.split_at_mut(at);
    let (step, remainder) = if reverse { (tail, head) } else { (head, tail) };
    *from = remainder;
    step
}

#[inline(always)]
pub(super) fn logistic<T: Real>(x: T) -> T {
    T::ONE / (T::ONE + (-x).exp())
}

wide! {
    // One batch row: gates hold x W_ihᵀ + h W_hhᵀ and get their activations.
    fn cell[T: Real](gates: &mut [T], b_ih: &[T], b_hh: &[T], c: &[T], new_c: &mut [T], y: &mut [T]) {
        let hidden = c.len();
        for ((a, b), b_hh) in gates.iter_mut().zip(b_ih).zip(b_hh) {
            *a = *a + *b + *b_hh;
        }
        let (sigmoid, rest) = gates.split_at_mut(2 * hidden);
        let (g, o) = rest.split_at_mut(hidden);
        sigmoid.iter_mut().for_each(|a| *a = logistic(*a));
        g.iter_mut().for_each(|a| *a = a.tanh());
        o.iter_mut().for_each(|a| *a = logistic(*a));
        let (i, f) = sigmoid.split_at(hidden);
        for j in 0..hidden {
            let c = f[j] * c[j] + i[j] * g[j];
            new_c[j] = c;
            y[j] = o[j] * c.tanh();
        }
    }
}

fn backward<T: Real>(reverse: bool, sizes: Sizes) -> FastKernel {
    let Sizes { steps, batch, hidden, .. } = sizes;
    let (gate_width, rows) = (4 * hidden, steps * batch);
    let sums_bytes = (gate_width * size_of::<f64>()).next_multiple_of(ALIGNMENT);
    let recurrent = Recurrent::of::<T>(steps, [batch, hidden, gate_width], false);
    let fast = FastKernel::new(move |inputs, outputs, workspace| {
        let [dy, last_dh, last_dc, x, w_ih, w_hh] = [0, 1, 2, 3, 4, 5].map(|i| cast_slice::<u8, T>(inputs[i]));
        let [h0, c0, y, gates, cells] = [6, 7, 8, 9, 10].map(|i| cast_slice::<u8, T>(inputs[i]));
        let [dx, dw_ih, dw_hh, db, dh, dc] = outputs else { unreachable!("its gradient has six outputs") };
        let [dx, dw_ih, dw_hh] = [dx, dw_ih, dw_hh].map(|o| cast_slice_mut::<u8, T>(o));
        let [db, dh, dc] = [db, dh, dc].map(|o| cast_slice_mut::<u8, T>(o));
        let (panels, scratch) = workspace.split_at_mut(recurrent.bytes::<T>());
        let w_hh = recurrent.arrange(w_hh, panels);
        let (sums, scratch) = scratch.split_at_mut(sums_bytes);
        let sums = &mut cast_slice_mut::<u8, f64>(sums)[..gate_width];
        let da = &mut cast_slice_mut::<u8, T>(scratch)[..rows * gate_width];
        dh.copy_from_slice(last_dh);
        dc.copy_from_slice(last_dc);
        for t in order(steps, !reverse) {
            let c_before = before(t, steps, reverse).map_or(c0, |t| &cells[sizes.step(t, hidden)]);
            let da = &mut da[sizes.step(t, gate_width)];
            let (gates, cells) = (&gates[sizes.step(t, gate_width)], &cells[sizes.step(t, hidden)]);
            let dy = &dy[sizes.step(t, hidden)];
            for n in 0..batch {
                let (row, gate_row) = (n * hidden..(n + 1) * hidden, n * gate_width..(n + 1) * gate_width);
                let (dh, dc) = (&dh[row.clone()], &mut dc[row.clone()]);
                let (cells, c_before) = (&cells[row.clone()], &c_before[row.clone()]);
                cell_grad(&dy[row], dh, dc, &gates[gate_row.clone()], cells, c_before, &mut da[gate_row]);
            }
            w_hh.multiply(t, matrix(da, gate_width), dh, hidden, false);
        }
        let da = &*da;
        sizes.input_grads(da, [x, w_ih], [dx, dw_ih, db], sums);
        state_weight_grad(reverse, sizes, da, [gate_width, gate_width], h0, y, dw_hh);
    });
    fast.with_workspace(recurrent.bytes::<T>() + sums_bytes + rows * gate_width * size_of::<T>())
}

/// Column sums of a matrix with a column for each of `sums`.
pub(super) fn sum_columns<T: Real>(matrix: &[T], sums: &mut [f64], to: &mut [T]) {
    sums.fill(0.0);
    for row in matrix.chunks_exact(sums.len().max(1)) {
        sums.iter_mut().zip(row).for_each(|(sum, d)| *sum += d.wide());
    }
    to.iter_mut().zip(sums).for_each(|(to, sum)| *to = T::of(*sum));
}

/// The gradient of the first `n` rows of a recurrent weight; `row` is the row length of `da`. Every step except the
/// first multiplies the previous step's y, which is adjacent in memory.
pub(super) fn state_weight_grad<T: Real>(
    reverse: bool,
    sizes: Sizes,
    da: &[T],
    [n, row]: [usize; 2],
    h0: &[T],
    y: &[T],
    dw: &mut [T],
) {
    let Sizes { steps, batch, hidden, .. } = sizes;
    let first = if reverse { steps.saturating_sub(1) } else { 0 };
    let (later, earlier) = if reverse { (0, batch) } else { (batch, 0) };
    let rows = (steps * batch).saturating_sub(batch);
    let (da_later, y_earlier) = (&da[(later * row).min(da.len())..], &y[(earlier * hidden).min(y.len())..]);
    product([n, hidden, rows], transposed(da_later, row), matrix(y_earlier, hidden), dw, hidden, false);
    if steps > 0 {
        let da = &da[sizes.step(first, row)];
        product([n, hidden, batch], transposed(da, row), matrix(h0, hidden), dw, hidden, true);
    }
}

wide! {
    // One batch row; dc becomes that of the previous step.
    fn cell_grad[T: Real](dy: &[T], dh: &[T], dc: &mut [T], gates: &[T], c: &[T], c_before: &[T], da: &mut [T]) {
        let hidden = c.len();
        let (i, rest) = gates.split_at(hidden);
        let (f, rest) = rest.split_at(hidden);
        let (g, o) = rest.split_at(hidden);
        let (da_i, rest) = da.split_at_mut(hidden);
        let (da_f, rest) = rest.split_at_mut(hidden);
        let (da_g, da_o) = rest.split_at_mut(hidden);
        for j in 0..hidden {
            let tanh_c = c[j].tanh();
            let d = dh[j] + dy[j];
            let d_cell = dc[j] + d * o[j] * (T::ONE - tanh_c * tanh_c);
            da_i[j] = d_cell * g[j] * i[j] * (T::ONE - i[j]);
            da_f[j] = d_cell * c_before[j] * f[j] * (T::ONE - f[j]);
            da_g[j] = d_cell * i[j] * (T::ONE - g[j] * g[j]);
            da_o[j] = d * tanh_c * o[j] * (T::ONE - o[j]);
            dc[j] = d_cell * f[j];
        }
    }
}
