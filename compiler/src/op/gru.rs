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

use super::layer_norm::check_same;
use super::lstm::{Sizes, before, inputs_of, logistic, order, products, zeros};
use super::sample::{ramp, run};
use super::*;

fn saved_fact(sizes: &Sizes) -> Result<Fact, FactError> {
    Ok(sizes.sequence(&sizes.hidden.mul(&Dim::from(4usize))?))
}

impl OpRule for Gru {
    fn name(&self) -> &'static str {
        "gru"
    }

    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [x, w_ih, w_hh, b_ih, b_hh, h0] = inputs else {
            return Err(FactError::Arity { expected: 6, got: inputs.len() });
        };
        let sizes = Sizes::of(x, w_hh, 3)?;
        sizes.weights(w_ih, w_hh)?;
        check_same("the input bias", b_ih, "one value a gate", &sizes.bias())?;
        check_same("the hidden bias", b_hh, "one value a gate", &sizes.bias())?;
        check_same("the first state", h0, "one state a row", &sizes.state())?;
        Ok(vec![sizes.sequence(&sizes.hidden), sizes.state(), saved_fact(&sizes)?])
    }

    // The matrix products; per unit 3 additions at three gates, 3 activations, and 5 flops for n and h.
    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        let flops = products(inputs[0], inputs[2]) + 17.0 * elements(&outputs[0]);
        Cost { flops, bytes: moved_bytes(inputs, outputs) }
    }

    fn backward(&self, context: BackwardContext<'_>, out: &mut dyn Emit) -> Vec<Option<Value>> {
        let [x, w_ih, w_hh, _, _, h0] = context.inputs else { unreachable!("infer checks the arity") };
        if context.d_outputs[..2].iter().all(Option::is_none) {
            return vec![None; 6];
        }
        let mut d_outputs = Vec::with_capacity(2);
        for (output, gradient) in context.outputs.iter().zip(&context.d_outputs[..2]) {
            d_outputs.push(gradient.unwrap_or_else(|| zeros(out, *output)));
        }
        let saved = [*x, *w_ih, *w_hh, *h0, context.outputs[0], context.outputs[2]];
        let inputs: Vec<Value> = d_outputs.into_iter().chain(saved).collect();
        let grad = GruGrad { reverse: self.reverse, reset_after: self.reset_after };
        let gradients = out.emit_all(Op::GruGrad(grad), &inputs);
        gradients.into_iter().zip(context.wanted).map(|(d, &wanted)| wanted.then_some(d)).collect()
    }

    fn takes_gradient(&self, output: usize) -> bool {
        output < 2
    }

    // The batch axis.
    fn strategies(&self, _: &[&Fact], _: &[Fact], _: &Group) -> Vec<Strategy> {
        let inputs = [Some(1), None, None, None, None, Some(0)];
        let outputs = [Some(1), Some(0), Some(1)];
        vec![Strategy::along(&inputs, &outputs)]
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let [x, w_ih, w_hh, b_ih, b_hh, h0] = inputs else { unreachable!("infer checks the arity") };
        let [y, last_h, gates] = outputs else { unreachable!("infer gives three outputs") };
        let (steps, batch, width, hidden) = (x.shape[0], x.shape[1], x.shape[2], h0.shape[1]);
        for n in 0..batch {
            let mut h: Vec<f64> = (0..hidden).map(|j| h0.f64(n * hidden + j)).collect();
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
                h.iter().enumerate().for_each(|(j, &h)| y.set_f64(row * hidden + j, h));
            }
            h.iter().enumerate().for_each(|(j, &h)| last_h.set_f64(n * hidden + j, h));
        }
        Ok(())
    }
}

impl OpRule for GruGrad {
    fn name(&self) -> &'static str {
        "gru_grad"
    }

    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [dy, dh, x, w_ih, w_hh, h0, y, gates] = inputs else {
            return Err(FactError::Arity { expected: 8, got: inputs.len() });
        };
        let sizes = Sizes::of(x, w_hh, 3)?;
        sizes.weights(w_ih, w_hh)?;
        let (state, sequence) = (sizes.state(), sizes.sequence(&sizes.hidden));
        check_same("the gradient of the last state", dh, "one state a row", &state)?;
        check_same("the first state", h0, "one state a row", &state)?;
        check_same("the output gradient", dy, "one state a step", &sequence)?;
        check_same("the output", y, "one state a step", &sequence)?;
        check_same("the gates", gates, "four values a unit and step", &saved_fact(&sizes)?)?;
        Ok(vec![(*x).clone(), (*w_ih).clone(), (*w_hh).clone(), sizes.bias(), sizes.bias(), state])
    }

    // Two products per forward product; about 20 further flops per unit.
    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        let flops = 2.0 * products(inputs[2], inputs[4]) + 20.0 * elements(inputs[0]);
        Cost { flops, bytes: moved_bytes(inputs, outputs) }
    }

    // No second-order gradient, as for the LSTM.

    fn takes_gradient(&self, _: usize) -> bool {
        false
    }

    // The batch axis.
    fn strategies(&self, _: &[&Fact], _: &[Fact], _: &Group) -> Vec<Strategy> {
        let inputs = [Some(1), Some(0), Some(1), None, None, Some(0), Some(1), Some(1)];
        let outputs = [Some(1), None, None, None, None, Some(0)];
        vec![Strategy::along(&inputs, &outputs)]
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let [dy, last_dh, x, w_ih, w_hh, h0, y, gates] = inputs else { unreachable!("infer checks the arity") };
        let [dx, dw_ih, dw_hh, db_ih, db_hh, dh0] = outputs else { unreachable!("infer gives six outputs") };
        let (steps, batch, width, hidden) = (x.shape[0], x.shape[1], x.shape[2], h0.shape[1]);
        let (two, three) = (2 * hidden, 3 * hidden);
        let (mut dw_x, mut dw_h) = (vec![0.0; w_ih.len()], vec![0.0; w_hh.len()]);
        let (mut db_x, mut db_h) = (vec![0.0; three], vec![0.0; three]);
        for n in 0..batch {
            let mut dh: Vec<f64> = (0..hidden).map(|j| last_dh.f64(n * hidden + j)).collect();
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
            dh.iter().enumerate().for_each(|(j, &d)| dh0.set_f64(n * hidden + j, d));
        }
        for (d, sums) in [dw_ih, dw_hh, db_ih, db_hh].into_iter().zip([dw_x, dw_h, db_x, db_h]) {
            sums.into_iter().enumerate().for_each(|(i, sum)| d.set_f64(i, sum));
        }
        Ok(())
    }
}

/// The gradient's inputs: output gradients, forward inputs and saved outputs.
fn grad_inputs(forward: &Gru, inputs: &[Tensor], d_outputs: [Tensor; 2]) -> Vec<Tensor> {
    let outputs = run(forward, inputs);
    let forward_inputs = [0, 1, 2, 5].map(|i: usize| inputs[i].clone());
    d_outputs.into_iter().chain(forward_inputs).chain([outputs[0].clone(), outputs[2].clone()]).collect()
}

pub fn samples() -> Vec<Sample> {
    let cases = [
        ("reset after, forward", [3, 2, 3, 2], false, true),
        ("reset after, reverse", [3, 2, 2, 3], true, true),
        ("reset before, forward", [3, 2, 3, 2], false, false),
        ("reset before, reverse", [4, 1, 2, 3], true, false),
        ("one step", [1, 1, 4, 2], false, true),
    ];
    let with_gradient = |(title, sizes, reverse, reset_after): (&'static str, [usize; 4], bool, bool)| {
        let [steps, batch, _, hidden] = sizes;
        let inputs = inputs_of(3, sizes, 1);
        let forward = Gru { reverse, reset_after };
        let d_outputs = [ramp(&[steps, batch, hidden], 8), ramp(&[batch, hidden], 9)];
        let gradient_inputs = grad_inputs(&forward, &inputs, d_outputs);
        let grad = Op::GruGrad(GruGrad { reverse, reset_after });
        [
            Sample { title, op: Op::Gru(forward), inputs, differentiate: (0..6).collect() },
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
        for (reverse, reset_after) in [(false, false), (false, true), (true, false), (true, true)] {
            let forward = Gru { reverse, reset_after };
            let inputs: Vec<Tensor> = inputs_of(3, [3, 2, 2, 2], 1).iter().map(|t| t.cast(DType::F64)).collect();
            let weights = [ramp(&[3, 2, 2], 20), ramp(&[2, 2], 21)].map(|t| t.cast(DType::F64));
            let gradients = run(&GruGrad { reverse, reset_after }, &grad_inputs(&forward, &inputs, weights.clone()));
            assert_slopes(&forward, &inputs, &weights, &gradients, &[0, 1, 2, 3, 4, 5]);
        }
    }

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

    #[test]
    fn shapes_and_errors() {
        let dims = |text: &str| text.split_whitespace().map(|d| Dim::parse(d).unwrap()).collect::<Vec<_>>();
        let fact = |text: &str| Fact::new(DType::F32, dims(text));
        let inputs = ["t b 3", "6 3", "6 2", "6", "6", "b 2"].map(fact);
        let inferred =
            |facts: &[Fact]| Gru { reverse: false, reset_after: true }.infer(&facts.iter().collect::<Vec<_>>());
        let shapes: Vec<String> = inferred(&inputs).unwrap().iter().map(Fact::to_string).collect();
        assert_eq!(shapes, ["f32[t, b, 2]", "f32[b, 2]", "f32[t, b, 8]"]);
        let mut wrong = inputs.clone();
        wrong[1] = fact("8 3");
        assert!(inferred(&wrong).unwrap_err().to_string().contains("the input weight is f32[8, 3]"));
    }
}
