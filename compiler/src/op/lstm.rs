//! LSTM over a sequence, and its gradient.
//!
//! Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000 and the gates in PyTorch's order, i, f, g,
//! o. With h and c of the previous step (`h0` and `c0` at the first one) and σ the logistic function:
//!
//!   a = x_t W_ihᵀ + b_ih + h W_hhᵀ + b_hh
//!   i, f, o = σ(a_i), σ(a_f), σ(a_o);  g = tanh(a_g)
//!   c_t = f c + i g,  h_t = o tanh(c_t)
//!
//! The activated gates and the cells are outputs so that the backward need not recompute them; they take no gradient.
//! Backward in time, with dh and dc from the next step:
//!
//!   dh += dy_t;  dc += dh o (1 - tanh²(c_t));  da_i = dc g i (1 - i),  da_f = dc c f (1 - f)
//!   da_g = dc i (1 - g²),  da_o = dh tanh(c_t) o (1 - o);  dc = dc f,  dh = da W_hh
//!   dx_t = da W_ih,  dW_ih = Σ daᵀ x_t,  dW_hh = Σ daᵀ h,  db = Σ da

use super::recurrent::{Layer, Recurrent, Sums, gate_sum, logistic, read_row, samples_of, write_all, write_row};
use super::*;

const LAYER: Layer = Layer {
    gates: 4,
    bias: "one value a gate",
    states: 2,
    saved: &[("the gates", "four gates a step", 4), ("the cells", "one state a step", 1)],
    biases: 1,
    // Forward: 3 additions at four gates, 5 activations, and 4 flops for c and h.
    flops: [21.0, 30.0],
};

impl Recurrent for Lstm {
    const LAYER: Layer = LAYER;

    fn gradient(&self) -> Option<Op> {
        Some(Op::LstmGrad(LstmGrad { reverse: self.reverse }))
    }

    fn kernel(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let [x, w_ih, w_hh, b_ih, b_hh, h0, c0] = inputs else { unreachable!("infer checks the arity") };
        let [y, last_h, last_c, gates, cells] = outputs else { unreachable!("infer gives five outputs") };
        let (steps, batch, hidden) = (x.shape[0], x.shape[1], h0.shape[1]);
        for n in 0..batch {
            let (mut h, mut c) = (read_row(h0, n), read_row(c0, n));
            for t in order(steps, self.reverse) {
                let row = t * batch + n;
                let a: Vec<f64> = (0..4 * hidden).map(|k| gate_sum([x, w_ih, w_hh, b_ih, b_hh], row, &h, k)).collect();
                for j in 0..hidden {
                    let (i, f) = (logistic(a[j]), logistic(a[hidden + j]));
                    let (g, o) = (a[2 * hidden + j].tanh(), logistic(a[3 * hidden + j]));
                    c[j] = f * c[j] + i * g;
                    h[j] = o * c[j].tanh();
                    for (gate, value) in [i, f, g, o].into_iter().enumerate() {
                        gates.set_f64((row * 4 + gate) * hidden + j, value);
                    }
                }
                write_row(cells, row, &c);
                write_row(y, row, &h);
            }
            write_row(last_h, n, &h);
            write_row(last_c, n, &c);
        }
    }
}

impl Recurrent for LstmGrad {
    const LAYER: Layer = LAYER;

    fn gradient(&self) -> Option<Op> {
        None
    }

    fn kernel(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let [dy, last_dh, last_dc, x, w_ih, w_hh, h0, c0, y, gates, cells] = inputs else {
            unreachable!("infer checks the arity")
        };
        let [dx, dw_ih, dw_hh, db, dh0, dc0] = outputs else { unreachable!("infer gives six outputs") };
        let (steps, batch, hidden) = (x.shape[0], x.shape[1], h0.shape[1]);
        let mut sums = Sums::new([x, w_ih, w_hh]);
        for n in 0..batch {
            let (mut dh, mut dc) = (read_row(last_dh, n), read_row(last_dc, n));
            for t in order(steps, !self.reverse) {
                let row = t * batch + n;
                let before = before(t, steps, self.reverse).map(|t| (t * batch + n) * hidden);
                let mut da = vec![0.0; 4 * hidden];
                for j in 0..hidden {
                    let gate = |k: usize| gates.f64((row * 4 + k) * hidden + j);
                    let (i, f, g, o) = (gate(0), gate(1), gate(2), gate(3));
                    let tanh_c = cells.f64(row * hidden + j).tanh();
                    let c_before = before.map_or(c0.f64(n * hidden + j), |at| cells.f64(at + j));
                    dh[j] += dy.f64(row * hidden + j);
                    dc[j] += dh[j] * o * (1.0 - tanh_c * tanh_c);
                    da[j] = dc[j] * g * i * (1.0 - i);
                    da[hidden + j] = dc[j] * c_before * f * (1.0 - f);
                    da[2 * hidden + j] = dc[j] * i * (1.0 - g * g);
                    da[3 * hidden + j] = dh[j] * tanh_c * o * (1.0 - o);
                    dc[j] *= f;
                }
                sums.step(&da, row, |j| before.map_or(h0.f64(n * hidden + j), |at| y.f64(at + j)), dx, &mut dh);
            }
            write_row(dh0, n, &dh);
            write_row(dc0, n, &dc);
        }
        write_all([dw_ih, dw_hh, db], sums.sums);
    }
}

/// The steps in execution order.
pub fn order(steps: usize, reverse: bool) -> impl Iterator<Item = usize> {
    (0..steps).map(move |s| if reverse { steps - 1 - s } else { s })
}

/// The step executed before `t`, if any.
pub fn before(t: usize, steps: usize, reverse: bool) -> Option<usize> {
    if reverse { Some(t + 1).filter(|b| *b < steps) } else { t.checked_sub(1) }
}

pub fn samples() -> Vec<Sample> {
    let cases = [
        ("forward", [3, 2, 3, 2], Lstm { reverse: false }),
        ("reverse", [3, 2, 2, 3], Lstm { reverse: true }),
        ("one step", [1, 1, 4, 2], Lstm { reverse: false }),
        ("one unit, a long sequence", [6, 1, 1, 1], Lstm { reverse: true }),
    ];
    samples_of(&cases, |lstm| Op::Lstm(*lstm))
}
