//! GRU over a sequence, and its gradient.
//!
//! Cho et al. 2014, with the gates in PyTorch's order, r, z, n. With h the previous state (`h0` at the first step), σ
//! the logistic function, and U_r, U_z, U_n the three parts of W_hh:
//!
//!   r, z = σ(x_t W_ihᵀ + b_ih + h Uᵀ + b_hh), the parts of r and z
//!   n = tanh(x_t W_inᵀ + b_in + m),  h_t = (1 - z) n + z h
//!
//! With `reset_after`, as in PyTorch, the reset gate applies to the product: m = r (h U_nᵀ + b_hn). Otherwise, as in
//! the paper, it applies to the state: m = (r h) U_nᵀ + b_hn. To avoid recomputation in the backward, the gates are an
//! output, with a fourth part s: h U_nᵀ + b_hn, or r h. They take no gradient. Backward in time, with dh from the next
//! step:
//!
//!   dh += dy_t;  da_z = dh (h - n) z (1 - z),  da_n = dh (1 - z)(1 - n²)
//!   reset after:   e = da_n r,        da_r = da_n s r (1 - r),  dh = dh z + (da_r, da_z, e) W_hh,  dU_n = Σ eᵀ h
//!   reset before:  e = da_n,  d = e U_n,  da_r = d h r (1 - r),  dh = dh z + d r + (da_r, da_z) U_rz,  dU_n = Σ eᵀ s
//!   dx_t = (da_r, da_z, da_n) W_ih,  dW_ih = Σ (da_r, da_z, da_n)ᵀ x_t,  dU_rz = Σ (da_r, da_z)ᵀ h
//!   db_ih = Σ (da_r, da_z, da_n),  db_hh = Σ (da_r, da_z, e)

use super::lstm::{before, order};
use super::recurrent::{Layer, Recurrent, logistic, read_row, samples_of, write_all, write_row};
use super::*;

const LAYER: Layer = Layer {
    gates: 3,
    bias: "one value a gate",
    states: 1,
    saved: &[("the gates", "four values a unit and step", 4)],
    biases: 2,
    // Forward: 3 additions at three gates, 3 activations, and 5 flops for n and h.
    flops: [17.0, 20.0],
};

impl Recurrent for Gru {
    const LAYER: Layer = LAYER;

    fn gradient(&self) -> Option<Op> {
        Some(Op::GruGrad(GruGrad { reverse: self.reverse, reset_after: self.reset_after }))
    }

    fn kernel(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let [x, w_ih, w_hh, b_ih, b_hh, h0] = inputs else { unreachable!("infer checks the arity") };
        let [y, last_h, gates] = outputs else { unreachable!("infer gives three outputs") };
        let (steps, batch, width, hidden) = (x.shape[0], x.shape[1], x.shape[2], h0.shape[1]);
        for n in 0..batch {
            let mut h = read_row(h0, n);
            for t in order(steps, self.reverse) {
                let row = t * batch + n;
                let from_x = |k: usize| -> f64 {
                    (0..width).map(|i| x.f64(row * width + i) * w_ih.f64(k * width + i)).sum::<f64>() + b_ih.f64(k)
                };
                let from_h = |h: &[f64], k: usize| -> f64 {
                    (0..hidden).map(|j| h[j] * w_hh.f64(k * hidden + j)).sum::<f64>() + b_hh.f64(k)
                };
                let r: Vec<f64> = (0..hidden).map(|j| logistic(from_x(j) + from_h(&h, j))).collect();
                let z: Vec<f64> = (hidden..2 * hidden).map(|k| logistic(from_x(k) + from_h(&h, k))).collect();
                let reset: Vec<f64> = r.iter().zip(&h).map(|(r, h)| r * h).collect();
                let mut next_h = Vec::with_capacity(hidden);
                for j in 0..hidden {
                    let k = 2 * hidden + j;
                    let (m, from_h_n) = if self.reset_after {
                        let product = from_h(&h, k);
                        (r[j] * product, product)
                    } else {
                        (from_h(&reset, k), reset[j])
                    };
                    let candidate = (from_x(k) + m).tanh();
                    for (gate, value) in [r[j], z[j], candidate, from_h_n].into_iter().enumerate() {
                        gates.set_f64((row * 4 + gate) * hidden + j, value);
                    }
                    next_h.push((1.0 - z[j]) * candidate + z[j] * h[j]);
                }
                h = next_h;
                write_row(y, row, &h);
            }
            write_row(last_h, n, &h);
        }
    }
}

impl Recurrent for GruGrad {
    const LAYER: Layer = LAYER;

    fn gradient(&self) -> Option<Op> {
        None
    }

    fn kernel(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let [dy, last_dh, x, w_ih, w_hh, h0, y, gates] = inputs else { unreachable!("infer checks the arity") };
        let [dx, dw_ih, dw_hh, db_ih, db_hh, dh0] = outputs else { unreachable!("infer gives six outputs") };
        let (steps, batch, width, hidden) = (x.shape[0], x.shape[1], x.shape[2], h0.shape[1]);
        let (two, three) = (2 * hidden, 3 * hidden);
        let (mut dw_x, mut dw_h) = (vec![0.0; w_ih.len()], vec![0.0; w_hh.len()]);
        let (mut db_x, mut db_h) = (vec![0.0; three], vec![0.0; three]);
        for n in 0..batch {
            let mut dh = read_row(last_dh, n);
            for t in order(steps, !self.reverse) {
                let row = t * batch + n;
                let before = before(t, steps, self.reverse).map(|t| (t * batch + n) * hidden);
                let h = |j: usize| before.map_or(h0.f64(n * hidden + j), |at| y.f64(at + j));
                let gate = |k: usize, j: usize| gates.f64((row * 4 + k) * hidden + j);
                // Gradients of the gate sums from x and, for n, from h.
                let (mut da, mut e) = (vec![0.0; three], vec![0.0; hidden]);
                for j in 0..hidden {
                    let (r, z, candidate) = (gate(0, j), gate(1, j), gate(2, j));
                    dh[j] += dy.f64(row * hidden + j);
                    da[hidden + j] = dh[j] * (h(j) - candidate) * z * (1.0 - z);
                    da[two + j] = dh[j] * (1.0 - z) * (1.0 - candidate * candidate);
                    e[j] = if self.reset_after { da[two + j] * r } else { da[two + j] };
                }
                let from_candidate =
                    |j: usize| -> f64 { (0..hidden).map(|k| e[k] * w_hh.f64((two + k) * hidden + j)).sum() };
                let d: Vec<f64> = (0..hidden).map(from_candidate).collect();
                for j in 0..hidden {
                    let (r, from_h_n) = (gate(0, j), gate(3, j));
                    let dr = if self.reset_after { da[two + j] * from_h_n } else { d[j] * h(j) };
                    da[j] = dr * r * (1.0 - r);
                }
                for j in 0..hidden {
                    let from_gates: f64 = (0..two).map(|k| da[k] * w_hh.f64(k * hidden + j)).sum();
                    let from_n = if self.reset_after { d[j] } else { d[j] * gate(0, j) };
                    dh[j] = dh[j] * gate(1, j) + from_n + from_gates;
                }
                for i in 0..width {
                    dx.set_f64(row * width + i, (0..three).map(|k| da[k] * w_ih.f64(k * width + i)).sum());
                }
                for k in 0..three {
                    (0..width).for_each(|i| dw_x[k * width + i] += da[k] * x.f64(row * width + i));
                    db_x[k] += da[k];
                    let at_h = if k < two { da[k] } else { e[k - two] };
                    db_h[k] += at_h;
                    for j in 0..hidden {
                        let h_in = if k < two || self.reset_after { h(j) } else { gate(3, j) };
                        dw_h[k * hidden + j] += at_h * h_in;
                    }
                }
            }
            write_row(dh0, n, &dh);
        }
        write_all([dw_ih, dw_hh, db_ih, db_hh], [dw_x, dw_h, db_x, db_h]);
    }
}

pub fn samples() -> Vec<Sample> {
    let cases = [
        ("reset after, forward", [3, 2, 3, 2], Gru { reverse: false, reset_after: true }),
        ("reset after, reverse", [3, 2, 2, 3], Gru { reverse: true, reset_after: true }),
        ("reset before, forward", [3, 2, 3, 2], Gru { reverse: false, reset_after: false }),
        ("reset before, reverse", [4, 1, 2, 3], Gru { reverse: true, reset_after: false }),
        ("one step", [1, 1, 4, 2], Gru { reverse: false, reset_after: true }),
    ];
    samples_of(&cases, |gru| Op::Gru(*gru))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::sample::run;

    #[test]
    fn the_reset_gate_works_where_it_is_said() {
        // One unit, one step, x = 0: r = σ(h), z = σ(0) = 1/2, and n = tanh(r (h + b)) or tanh(r h + b).
        let column = |values: &[f64]| Tensor::from_f64(&[3, 1], values);
        let (h, b) = (0.5f64, 0.25f64);
        let inputs = [
            Tensor::from_f64(&[1, 1, 1], &[0.0]),
            column(&[1.0, 1.0, 1.0]),
            column(&[1.0, 0.0, 1.0]),
            Tensor::from_f64(&[3], &[0.0; 3]),
            Tensor::from_f64(&[3], &[0.0, 0.0, b]),
            Tensor::from_f64(&[1, 1], &[h]),
        ];
        let r = 1.0 / (1.0 + (-h).exp());
        for (reset_after, n) in [(true, (r * (h + b)).tanh()), (false, (r * h + b).tanh())] {
            let y = run(&Gru { reverse: false, reset_after }, &inputs)[1].to_f64()[0];
            assert!((y - (n / 2.0 + h / 2.0)).abs() < 1e-15, "{reset_after}: {y}");
        }
    }
}
