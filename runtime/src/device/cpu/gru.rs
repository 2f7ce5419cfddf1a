//! GRU and its gradient: one or two `gemm` products per step for the recurrence, one for the whole sequence otherwise.

use super::lstm::{Sizes, logistic, matrix, next, state_weight_grad, sum_columns, transposed};
use super::matmul::{Matrix, product};
use super::real::{Real, for_real};
use super::recurrent::Recurrent;
use super::wide::wide;
use super::{ALIGNMENT, FastKernel, TensorLayout};
use bytemuck::{cast_slice, cast_slice_mut};
use compiler::op::lstm::{before, order};
use compiler::op::{Gru, GruGrad};

pub fn kernel(op: &Gru, x: &TensorLayout, w_hh: &TensorLayout) -> Option<FastKernel> {
    let sizes = Sizes::of(x, w_hh)?;
    for_real!(x.dtype, T => Some(forward::<T>(op.reverse, op.reset_after, sizes)))
}

pub fn grad(op: &GruGrad, x: &TensorLayout, w_hh: &TensorLayout) -> Option<FastKernel> {
    let sizes = Sizes::of(x, w_hh)?;
    for_real!(x.dtype, T => Some(backward::<T>(op.reverse, op.reset_after, sizes)))
}

/// A matrix with row stride `row`, from column `first` on.
fn from_column<T>(values: &[T], first: usize, row: usize) -> Matrix<'_, T> {
    Matrix { values: values.get(first..).unwrap_or_default(), strides: (row, 1) }
}

fn forward<T: Real>(reverse: bool, reset_after: bool, sizes: Sizes) -> FastKernel {
    let Sizes { steps, batch, width, hidden } = sizes;
    let (two, three, four) = (2 * hidden, 3 * hidden, 4 * hidden);
    // If the reset gate applies before the product, the candidate's product must follow the gate.
    let gate_width = if reset_after { three } else { two };
    let recurrent = Recurrent::of::<T>(steps, [batch, gate_width, hidden], true);
    let candidate = Recurrent::of::<T>(steps, [batch, if reset_after { 0 } else { hidden }, hidden], true);
    let fast = FastKernel::new(move |inputs, outputs, workspace| {
        let [x, w_ih, w_hh, b_ih, b_hh, h0] = [0, 1, 2, 3, 4, 5].map(|i| cast_slice::<u8, T>(inputs[i]));
        let [y, last_h, gates] = outputs else { unreachable!("a GRU has three outputs") };
        let [y, last_h, gates] = [y, last_h, gates].map(|o| cast_slice_mut::<u8, T>(o));
        let (recurrent_room, scratch) = workspace.split_at_mut(recurrent.bytes::<T>());
        let (candidate_room, scratch) = scratch.split_at_mut(candidate.bytes::<T>());
        let recurrent = recurrent.arrange(w_hh, recurrent_room);
        let candidate = candidate.arrange(&w_hh[two * hidden..], candidate_room);
        let sums = &mut cast_slice_mut::<u8, T>(scratch)[..batch * three];
        product([steps * batch, three, width], matrix(x, width), transposed(w_ih, width), gates, four, false);
        let (mut unwritten, mut h): (&mut [T], &[T]) = (y, h0);
        for t in order(steps, reverse) {
            let gates = &mut gates[sizes.step(t, four)];
            recurrent.multiply(t, matrix(h, hidden), sums, three, false);
            for n in 0..batch {
                let gates = &mut gates[n * four..(n + 1) * four];
                open_gates(gates, &sums[n * three..(n + 1) * three], b_ih, b_hh, &h[n * hidden..(n + 1) * hidden]);
            }
            if !reset_after && hidden > 0 && batch > 0 {
                let reset_h = from_column(gates, three, four);
                candidate.multiply(t, reset_h, &mut sums[two..], three, false);
            }
            let step = next(&mut unwritten, batch * hidden, reverse);
            for n in 0..batch {
                let (row, sums) = (n * hidden..(n + 1) * hidden, &sums[n * three + two..(n + 1) * three]);
                let gates = &mut gates[n * four..(n + 1) * four];
                mix_state(gates, sums, &b_ih[two..], &b_hh[two..], &h[row.clone()], &mut step[row], reset_after);
            }
            h = step;
        }
        last_h.copy_from_slice(h);
    });
    fast.with_workspace(recurrent.bytes::<T>() + candidate.bytes::<T>() + batch * three * size_of::<T>())
}

wide! {
    // One batch row: activates r and z, and stores `r * h` after the candidate.
    fn open_gates[T: Real](gates: &mut [T], sums: &[T], b_ih: &[T], b_hh: &[T], h: &[T]) {
        let hidden = h.len();
        let (reset_update, rest) = gates.split_at_mut(2 * hidden);
        for (((a, sum), b_ih), b_hh) in reset_update.iter_mut().zip(sums).zip(b_ih).zip(b_hh) {
            *a = logistic(*a + *b_ih + *sum + *b_hh);
        }
        let reset_h = &mut rest[hidden..];
        for j in 0..hidden {
            reset_h[j] = reset_update[j] * h[j];
        }
    }
}

wide! {
    // One batch row: the candidate and the new state.
    fn mix_state[T: Real](gates: &mut [T], sums: &[T], b_ih: &[T], b_hh: &[T], h: &[T], y: &mut [T], reset_after: bool) {
        let hidden = h.len();
        let (r, rest) = gates.split_at_mut(hidden);
        let (z, rest) = rest.split_at_mut(hidden);
        let (n, recurrent_term) = rest.split_at_mut(hidden);
        if reset_after {
            for j in 0..hidden {
                recurrent_term[j] = sums[j] + b_hh[j];
                n[j] = n[j] + b_ih[j] + r[j] * recurrent_term[j];
            }
        } else {
            for j in 0..hidden {
                n[j] = n[j] + b_ih[j] + sums[j] + b_hh[j];
            }
        }
        n.iter_mut().for_each(|n| *n = n.tanh());
        for j in 0..hidden {
            y[j] = (T::ONE - z[j]) * n[j] + z[j] * h[j];
        }
    }
}

fn backward<T: Real>(reverse: bool, reset_after: bool, sizes: Sizes) -> FastKernel {
    let Sizes { steps, batch, hidden, .. } = sizes;
    let (two, three, four, rows) = (2 * hidden, 3 * hidden, 4 * hidden, steps * batch);
    let sums_bytes = (three * size_of::<f64>()).next_multiple_of(ALIGNMENT);
    let of_gates = Recurrent::of::<T>(steps, [batch, hidden, two], false);
    let of_candidate = Recurrent::of::<T>(steps, [batch, hidden, hidden], false);
    let fast = FastKernel::new(move |inputs, outputs, workspace| {
        let [dy, last_dh, x, w_ih, w_hh] = [0, 1, 2, 3, 4].map(|i| cast_slice::<u8, T>(inputs[i]));
        let [h0, y, gates] = [5, 6, 7].map(|i| cast_slice::<u8, T>(inputs[i]));
        let [dx, dw_ih, dw_hh, db_ih, db_hh, dh] = outputs else { unreachable!("its gradient has six outputs") };
        let [dx, dw_ih, dw_hh] = [dx, dw_ih, dw_hh].map(|o| cast_slice_mut::<u8, T>(o));
        let [db_ih, db_hh, dh] = [db_ih, db_hh, dh].map(|o| cast_slice_mut::<u8, T>(o));
        let (gate_room, scratch) = workspace.split_at_mut(of_gates.bytes::<T>());
        let (candidate_room, scratch) = scratch.split_at_mut(of_candidate.bytes::<T>());
        let (w_gates, w_candidate) = w_hh.split_at(two * hidden);
        let (w_gates, w_candidate) =
            (of_gates.arrange(w_gates, gate_room), of_candidate.arrange(w_candidate, candidate_room));
        let (sums, scratch) = scratch.split_at_mut(sums_bytes);
        let sums = &mut cast_slice_mut::<u8, f64>(sums)[..three];
        // Gradients at the pre-activations (`da`), at the candidate's recurrent term (`e`), and through the candidate's
        // weight.
        let (da, scratch) = cast_slice_mut::<u8, T>(scratch).split_at_mut(rows * three);
        let (e, scratch) = scratch.split_at_mut(rows * hidden);
        let dh_candidate = &mut scratch[..batch * hidden];
        dh.copy_from_slice(last_dh);
        for t in order(steps, !reverse) {
            let h = before(t, steps, reverse).map_or(h0, |t| &y[sizes.step(t, hidden)]);
            let (da, e) = (&mut da[sizes.step(t, three)], &mut e[sizes.step(t, hidden)]);
            let (dy, gates) = (&dy[sizes.step(t, hidden)], &gates[sizes.step(t, four)]);
            for n in 0..batch {
                let (row, gates) = (n * hidden..(n + 1) * hidden, &gates[n * four..(n + 1) * four]);
                let da = &mut da[n * three..(n + 1) * three];
                mix_state_grad(
                    &dy[row.clone()],
                    &mut dh[row.clone()],
                    gates,
                    &h[row.clone()],
                    da,
                    &mut e[row],
                    reset_after,
                );
            }
            w_candidate.multiply(t, matrix(e, hidden), dh_candidate, hidden, false);
            for n in 0..batch {
                let (row, gates) = (n * hidden..(n + 1) * hidden, &gates[n * four..(n + 1) * four]);
                let da = &mut da[n * three..(n + 1) * three];
                open_gates_grad(&mut dh[row.clone()], gates, &h[row.clone()], &dh_candidate[row], da, reset_after);
            }
            w_gates.multiply(t, matrix(da, three), dh, hidden, true);
        }
        let (da, e) = (&*da, &*e);
        sizes.input_grads(da, [x, w_ih], [dx, dw_ih, db_ih], sums);
        let (dw_gates, dw_candidate) = dw_hh.split_at_mut(two * hidden);
        state_weight_grad(reverse, sizes, da, [two, three], h0, y, dw_gates);
        if reset_after {
            state_weight_grad(reverse, sizes, e, [hidden, hidden], h0, y, dw_candidate);
        } else {
            let reset_h = from_column(gates, three, four);
            product([hidden, hidden, rows], transposed(e, hidden), reset_h, dw_candidate, hidden, false);
        }
        // The recurrent bias has the same sums, except for the candidate.
        db_hh[..two].copy_from_slice(&db_ih[..two]);
        sum_columns(e, &mut sums[two..], &mut db_hh[two..]);
    });
    let panel_bytes = of_gates.bytes::<T>() + of_candidate.bytes::<T>();
    fast.with_workspace(panel_bytes + sums_bytes + (rows * four + batch * hidden) * size_of::<T>())
}

wide! {
    // One batch row: gradients of z and the candidate from the new state. Adds dy to dh.
    fn mix_state_grad[T: Real](dy: &[T], dh: &mut [T], gates: &[T], h: &[T], da: &mut [T], e: &mut [T], reset_after: bool) {
        let hidden = h.len();
        let (r, rest) = gates.split_at(hidden);
        let (z, rest) = rest.split_at(hidden);
        let n = &rest[..hidden];
        let (da_z, da_n) = da[hidden..].split_at_mut(hidden);
        for j in 0..hidden {
            let d = dh[j] + dy[j];
            dh[j] = d;
            da_z[j] = d * (h[j] - n[j]) * z[j] * (T::ONE - z[j]);
            da_n[j] = d * (T::ONE - z[j]) * (T::ONE - n[j] * n[j]);
            e[j] = if reset_after { da_n[j] * r[j] } else { da_n[j] };
        }
    }
}

wide! {
    // One batch row: gradient of r, and of the previous state.
    fn open_gates_grad[T: Real](dh: &mut [T], gates: &[T], h: &[T], dh_candidate: &[T], da: &mut [T], reset_after: bool) {
        let hidden = h.len();
        let (r, rest) = gates.split_at(hidden);
        let (z, recurrent_term) = (&rest[..hidden], &rest[2 * hidden..]);
        let (da_r, rest) = da.split_at_mut(hidden);
        let da_n = &rest[hidden..];
        for j in 0..hidden {
            let (dr, dh_recurrent) = if reset_after {
                (da_n[j] * recurrent_term[j], dh_candidate[j])
            } else {
                (dh_candidate[j] * h[j], dh_candidate[j] * r[j])
            };
            da_r[j] = dr * r[j] * (T::ONE - r[j]);
            dh[j] = dh[j] * z[j] + dh_recurrent;
        }
    }
}
