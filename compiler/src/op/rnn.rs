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

use super::layer_norm::check_same;
use super::lstm::{Sizes, before, inputs_of, logistic, order, products, zeros};
use super::sample::{ramp, run};
use super::*;

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

impl OpRule for Rnn {
    fn name(&self) -> &'static str {
        "rnn"
    }

    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [x, w_ih, w_hh, b_ih, b_hh, h0] = inputs else {
            return Err(FactError::Arity { expected: 6, got: inputs.len() });
        };
        let sizes = Sizes::of(x, w_hh, 1)?;
        sizes.weights(w_ih, w_hh)?;
        check_same("the input bias", b_ih, "one value a unit", &sizes.bias())?;
        check_same("the hidden bias", b_hh, "one value a unit", &sizes.bias())?;
        check_same("the first state", h0, "one state a row", &sizes.state())?;
        Ok(vec![sizes.sequence(&sizes.hidden), sizes.state()])
    }

    // The matrix products; 3 additions and an activation per unit.
    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        let flops = products(inputs[0], inputs[2]) + 4.0 * elements(&outputs[0]);
        Cost { flops, bytes: moved_bytes(inputs, outputs) }
    }

    fn backward(&self, context: BackwardContext<'_>, out: &mut dyn Emit) -> Vec<Option<Value>> {
        let [x, w_ih, w_hh, _, _, h0] = context.inputs else { unreachable!("infer checks the arity") };
        let mut d_outputs = Vec::with_capacity(2);
        for (output, gradient) in context.outputs.iter().zip(context.d_outputs) {
            d_outputs.push(gradient.unwrap_or_else(|| zeros(out, *output)));
        }
        let saved = [*x, *w_ih, *w_hh, *h0, context.outputs[0]];
        let inputs: Vec<Value> = d_outputs.into_iter().chain(saved).collect();
        let grad = RnnGrad { reverse: self.reverse, activation: self.activation };
        let gradients_all = out.emit_all(Op::RnnGrad(grad), &inputs);
        let [dx, dw_ih, dw_hh, db, dh0] = gradients_all[..] else { unreachable!("the gradient has five outputs") };
        let gradients = [dx, dw_ih, dw_hh, db, db, dh0];
        gradients.into_iter().zip(context.wanted).map(|(d, &wanted)| wanted.then_some(d)).collect()
    }

    // The batch axis.
    fn strategies(&self, _: &[&Fact], _: &[Fact], _: &Group) -> Vec<Strategy> {
        let inputs = [Some(1), None, None, None, None, Some(0)];
        let outputs = [Some(1), Some(0)];
        vec![Strategy::along(&inputs, &outputs)]
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let [x, w_ih, w_hh, b_ih, b_hh, h0] = inputs else { unreachable!("infer checks the arity") };
        let [y, last_h] = outputs else { unreachable!("infer gives two outputs") };
        let (steps, batch, width, hidden) = (x.shape[0], x.shape[1], x.shape[2], h0.shape[1]);
        for n in 0..batch {
            let mut h: Vec<f64> = (0..hidden).map(|j| h0.f64(n * hidden + j)).collect();
            for t in order(steps, self.reverse) {
                let row = t * batch + n;
                let unit = |k: usize| {
                    let from_x: f64 = (0..width).map(|i| x.f64(row * width + i) * w_ih.f64(k * width + i)).sum();
                    let from_h: f64 = (0..hidden).map(|j| h[j] * w_hh.f64(k * hidden + j)).sum();
                    self.activation.value(from_x + b_ih.f64(k) + from_h + b_hh.f64(k))
                };
                h = (0..hidden).map(unit).collect();
                h.iter().enumerate().for_each(|(j, &h)| y.set_f64(row * hidden + j, h));
            }
            h.iter().enumerate().for_each(|(j, &h)| last_h.set_f64(n * hidden + j, h));
        }
        Ok(())
    }
}

impl OpRule for RnnGrad {
    fn name(&self) -> &'static str {
        "rnn_grad"
    }

    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [dy, dh, x, w_ih, w_hh, h0, y] = inputs else {
            return Err(FactError::Arity { expected: 7, got: inputs.len() });
        };
        let sizes = Sizes::of(x, w_hh, 1)?;
        sizes.weights(w_ih, w_hh)?;
        let (state, sequence) = (sizes.state(), sizes.sequence(&sizes.hidden));
        check_same("the gradient of the last state", dh, "one state a row", &state)?;
        check_same("the first state", h0, "one state a row", &state)?;
        check_same("the output gradient", dy, "one state a step", &sequence)?;
        check_same("the output", y, "one state a step", &sequence)?;
        Ok(vec![(*x).clone(), (*w_ih).clone(), (*w_hh).clone(), sizes.bias(), state])
    }

    // Two products per forward product; 4 further flops per unit.
    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        let flops = 2.0 * products(inputs[2], inputs[4]) + 4.0 * elements(inputs[0]);
        Cost { flops, bytes: moved_bytes(inputs, outputs) }
    }

    // No second-order gradient, as for the LSTM.

    fn takes_gradient(&self, _: usize) -> bool {
        false
    }

    // The batch axis.
    fn strategies(&self, _: &[&Fact], _: &[Fact], _: &Group) -> Vec<Strategy> {
        let inputs = [Some(1), Some(0), Some(1), None, None, Some(0), Some(1)];
        let outputs = [Some(1), None, None, None, Some(0)];
        vec![Strategy::along(&inputs, &outputs)]
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let [dy, last_dh, x, w_ih, w_hh, h0, y] = inputs else { unreachable!("infer checks the arity") };
        let [dx, dw_ih, dw_hh, db, dh0] = outputs else { unreachable!("infer gives five outputs") };
        let (steps, batch, width, hidden) = (x.shape[0], x.shape[1], x.shape[2], h0.shape[1]);
        let mut sums = [vec![0.0; w_ih.len()], vec![0.0; w_hh.len()], vec![0.0; hidden]];
        for n in 0..batch {
            let mut dh: Vec<f64> = (0..hidden).map(|j| last_dh.f64(n * hidden + j)).collect();
            for t in order(steps, !self.reverse) {
                let row = t * batch + n;
                let before = before(t, steps, self.reverse).map(|t| (t * batch + n) * hidden);
                let arrives = |j: usize| {
                    let at = row * hidden + j;
                    (dh[j] + dy.f64(at)) * self.activation.slope(y.f64(at))
                };
                let da: Vec<f64> = (0..hidden).map(arrives).collect();
                for i in 0..width {
                    dx.set_f64(row * width + i, (0..hidden).map(|k| da[k] * w_ih.f64(k * width + i)).sum());
                }
                for (j, dh) in dh.iter_mut().enumerate() {
                    *dh = (0..hidden).map(|k| da[k] * w_hh.f64(k * hidden + j)).sum();
                }
                for (k, da) in da.into_iter().enumerate() {
                    (0..width).for_each(|i| sums[0][k * width + i] += da * x.f64(row * width + i));
                    for j in 0..hidden {
                        sums[1][k * hidden + j] += da * before.map_or(h0.f64(n * hidden + j), |at| y.f64(at + j));
                    }
                    sums[2][k] += da;
                }
            }
            dh.iter().enumerate().for_each(|(j, &d)| dh0.set_f64(n * hidden + j, d));
        }
        for (d, sums) in [dw_ih, dw_hh, db].into_iter().zip(sums) {
            sums.into_iter().enumerate().for_each(|(i, sum)| d.set_f64(i, sum));
        }
        Ok(())
    }
}

/// The gradient's inputs: output gradients, forward inputs and saved outputs.
fn grad_inputs(forward: &Rnn, inputs: &[Tensor], d_outputs: [Tensor; 2]) -> Vec<Tensor> {
    let forward_inputs = [0, 1, 2, 5].map(|i: usize| inputs[i].clone());
    d_outputs.into_iter().chain(forward_inputs).chain([run(forward, inputs)[0].clone()]).collect()
}

pub fn samples() -> Vec<Sample> {
    let cases = [
        ("tanh, forward", [3, 2, 3, 2], false, Activation::Tanh),
        ("tanh, reverse", [3, 2, 2, 3], true, Activation::Tanh),
        ("relu", [3, 2, 3, 3], false, Activation::Relu),
        ("sigmoid", [2, 2, 3, 2], true, Activation::Sigmoid),
        ("one step", [1, 1, 4, 2], false, Activation::Tanh),
    ];
    let with_gradient = |(title, sizes, reverse, activation): (&'static str, [usize; 4], bool, _)| {
        let [steps, batch, _, hidden] = sizes;
        let inputs = inputs_of(1, sizes, 1);
        let forward = Rnn { reverse, activation };
        let d_outputs = [ramp(&[steps, batch, hidden], 8), ramp(&[batch, hidden], 9)];
        let gradient_inputs = grad_inputs(&forward, &inputs, d_outputs);
        let grad = Op::RnnGrad(RnnGrad { reverse, activation });
        [
            Sample { title, op: Op::Rnn(forward), inputs, differentiate: (0..6).collect() },
            Sample { title, op: grad, inputs: gradient_inputs, differentiate: vec![] },
        ]
    };
    cases.into_iter().flat_map(with_gradient).collect()
}

#[cfg(test)]
mod tests {
    use super::super::sample::assert_slopes;
    use super::*;

    // The samples only check the gradient of y; this test covers both outputs.
    #[test]
    fn gradients_of_the_last_state_are_slopes() {
        for (reverse, activation) in [(false, Activation::Tanh), (true, Activation::Tanh), (true, Activation::Sigmoid)]
        {
            let forward = Rnn { reverse, activation };
            let inputs: Vec<Tensor> = inputs_of(1, [3, 2, 2, 2], 1).iter().map(|t| t.cast(DType::F64)).collect();
            let weights = [ramp(&[3, 2, 2], 20), ramp(&[2, 2], 21)].map(|t| t.cast(DType::F64));
            let gradients = run(&RnnGrad { reverse, activation }, &grad_inputs(&forward, &inputs, weights.clone()));
            assert_slopes(&forward, &inputs, &weights, &gradients, &[0, 1, 2, 3, 3, 4]);
        }
    }

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
