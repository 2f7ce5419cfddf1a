//! Plain recurrent layer over a sequence, and its gradient.
//!
//! Elman 1990. With h the previous state (`h0` at the first step) and φ the activation:
//!
//!   h_t = φ(x_t W_ihᵀ + b_ih + h W_hhᵀ + b_hh)
//!
//! The derivative of each φ is a function of its value, so only y is saved. Backward in time, with dh from the next
//! step:
//!
//!   da = (dh + dy_t) φ'(h_t);  dh = da W_hh
//!   dx_t = da W_ih,  dW_ih = Σ daᵀ x_t,  dW_hh = Σ daᵀ h,  db = Σ da

use super::lstm::{before, order};
use super::recurrent::{Layer, Recurrent, Sums, gate_sum, logistic, read_row, samples_of, write_all, write_row};
use super::*;

const LAYER: Layer = Layer {
    gates: 1,
    bias: "one value a unit",
    states: 1,
    saved: &[],
    biases: 1,
    // Forward: 3 additions and an activation.
    flops: [4.0, 4.0],
};

impl Activation {
    /// `φ(x)`
    pub fn value(self, x: f64) -> f64 {
        match self {
            Activation::Tanh => x.tanh(),
            Activation::Relu => x.max(0.0),
            Activation::Sigmoid => logistic(x),
        }
    }

    /// `φ'(x)`, from `y = φ(x)`.
    pub fn slope(self, y: f64) -> f64 {
        match self {
            Activation::Tanh => 1.0 - y * y,
            Activation::Relu => f64::from(y > 0.0),
            Activation::Sigmoid => y * (1.0 - y),
        }
    }
}

impl Recurrent for Rnn {
    const LAYER: Layer = LAYER;

    fn gradient(&self) -> Option<Op> {
        Some(Op::RnnGrad(RnnGrad { reverse: self.reverse, activation: self.activation }))
    }

    fn kernel(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let [x, w_ih, w_hh, b_ih, b_hh, h0] = inputs else { unreachable!("infer checks the arity") };
        let [y, last_h] = outputs else { unreachable!("infer gives two outputs") };
        let (steps, batch, hidden) = (x.shape[0], x.shape[1], h0.shape[1]);
        for n in 0..batch {
            let mut h = read_row(h0, n);
            for t in order(steps, self.reverse) {
                let row = t * batch + n;
                let unit = |k| self.activation.value(gate_sum([x, w_ih, w_hh, b_ih, b_hh], row, &h, k));
                h = (0..hidden).map(unit).collect();
                write_row(y, row, &h);
            }
            write_row(last_h, n, &h);
        }
    }
}

impl Recurrent for RnnGrad {
    const LAYER: Layer = LAYER;

    fn gradient(&self) -> Option<Op> {
        None
    }

    fn kernel(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let [dy, last_dh, x, w_ih, w_hh, h0, y] = inputs else { unreachable!("infer checks the arity") };
        let [dx, dw_ih, dw_hh, db, dh0] = outputs else { unreachable!("infer gives five outputs") };
        let (steps, batch, hidden) = (x.shape[0], x.shape[1], h0.shape[1]);
        let mut sums = Sums::new([x, w_ih, w_hh]);
        for n in 0..batch {
            let mut dh = read_row(last_dh, n);
            for t in order(steps, !self.reverse) {
                let row = t * batch + n;
                let before = before(t, steps, self.reverse).map(|t| (t * batch + n) * hidden);
                let arrives = |j: usize| {
                    let at = row * hidden + j;
                    (dh[j] + dy.f64(at)) * self.activation.slope(y.f64(at))
                };
                let da: Vec<f64> = (0..hidden).map(arrives).collect();
                sums.step(&da, row, |j| before.map_or(h0.f64(n * hidden + j), |at| y.f64(at + j)), dx, &mut dh);
            }
            write_row(dh0, n, &dh);
        }
        write_all([dw_ih, dw_hh, db], sums.sums);
    }
}

pub fn samples() -> Vec<Sample> {
    let cases = [
        ("tanh, forward", [3, 2, 3, 2], Rnn { reverse: false, activation: Activation::Tanh }),
        ("tanh, reverse", [3, 2, 2, 3], Rnn { reverse: true, activation: Activation::Tanh }),
        ("relu", [3, 2, 3, 3], Rnn { reverse: false, activation: Activation::Relu }),
        ("sigmoid", [2, 2, 3, 2], Rnn { reverse: true, activation: Activation::Sigmoid }),
        ("one step", [1, 1, 4, 2], Rnn { reverse: false, activation: Activation::Tanh }),
    ];
    samples_of(&cases, |rnn| Op::Rnn(*rnn))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::sample::run;

    #[test]
    fn one_unit_by_hand() {
        // h = tanh(x + h/2), from 0, over 1 and 2; backward in time over 2 and 1.
        let inputs = [
            Tensor::from_f64(&[2, 1, 1], &[1.0, 2.0]),
            Tensor::from_f64(&[1, 1], &[1.0]),
            Tensor::from_f64(&[1, 1], &[0.5]),
            Tensor::from_f64(&[1], &[0.0]),
            Tensor::from_f64(&[1], &[0.0]),
            Tensor::from_f64(&[1, 1], &[0.0]),
        ];
        let first = 1f64.tanh();
        let second = (2.0 + first / 2.0).tanh();
        let outputs = run(&Rnn { reverse: false, activation: Activation::Tanh }, &inputs);
        assert_eq!((outputs[0].to_f64(), outputs[1].to_f64()), (vec![first, second], vec![second]));
        let first = 2f64.tanh();
        let second = (1.0 + first / 2.0).tanh();
        let outputs = run(&Rnn { reverse: true, activation: Activation::Tanh }, &inputs);
        assert_eq!((outputs[0].to_f64(), outputs[1].to_f64()), (vec![second, first], vec![second]));
    }
}
