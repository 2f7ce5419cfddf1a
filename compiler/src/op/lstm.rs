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

use super::layer_norm::check_same;
use super::sample::{ramp, run};
use super::unary::scalar;
use super::*;

/// The sizes of a recurrent layer, and the facts derived from them.
pub(super) struct Sizes {
    x: Fact,
    pub hidden: Dim,
    /// Rows of the weights: gates × units.
    pub gate_rows: Dim,
}

impl Sizes {
    pub fn of(x: &Fact, w_hh: &Fact, gates: usize) -> Result<Sizes, FactError> {
        if !x.dtype.is_float() {
            return Err(FactError::DType { what: "the input", expected: "a float".into(), got: x.dtype });
        }
        if x.rank() != 3 {
            return Err(FactError::Rank { what: "the input", expected: "3: time, batch, input".into(), got: x.rank() });
        }
        let [_, hidden] = w_hh.shape.as_slice() else {
            return Err(FactError::Rank { what: "the hidden weight", expected: "2".into(), got: w_hh.rank() });
        };
        Ok(Sizes { x: x.clone(), hidden: hidden.clone(), gate_rows: hidden.mul(&Dim::from(gates))? })
    }

    fn fact(&self, shape: Vec<Dim>) -> Fact {
        Fact::new(self.x.dtype, shape)
    }

    /// `[gates·H]`
    pub fn bias(&self) -> Fact {
        self.fact(vec![self.gate_rows.clone()])
    }

    /// `[N, H]`
    pub fn state(&self) -> Fact {
        self.fact(vec![self.x.shape[1].clone(), self.hidden.clone()])
    }

    /// `[T, N, width]`
    pub fn sequence(&self, width: &Dim) -> Fact {
        self.fact(vec![self.x.shape[0].clone(), self.x.shape[1].clone(), width.clone()])
    }

    /// Checks that the weights are `[gates·H, I]` and `[gates·H, H]`.
    pub fn weights(&self, w_ih: &Fact, w_hh: &Fact) -> Result<(), FactError> {
        let input = self.fact(vec![self.gate_rows.clone(), self.x.shape[2].clone()]);
        check_same("the input weight", w_ih, "every gate of the input", &input)?;
        let hidden = self.fact(vec![self.gate_rows.clone(), self.hidden.clone()]);
        check_same("the hidden weight", w_hh, "every gate of the state", &hidden)
    }
}

/// Flops of both forward products; a fused multiply-add counts as two.
pub(super) fn products(x: &Fact, w_hh: &Fact) -> f64 {
    let rows = elements(x) / x.shape[2].known().unwrap_or(1).max(1) as f64;
    let width = w_hh.shape[1].known().unwrap_or(0) as f64 + x.shape[2].known().unwrap_or(0) as f64;
    2.0 * rows * w_hh.shape[0].known().unwrap_or(0) as f64 * width
}

impl OpRule for Lstm {
    fn name(&self) -> &'static str {
        "lstm"
    }

    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [x, w_ih, w_hh, b_ih, b_hh, h0, c0] = inputs else {
            return Err(FactError::Arity { expected: 7, got: inputs.len() });
        };
        let sizes = Sizes::of(x, w_hh, 4)?;
        sizes.weights(w_ih, w_hh)?;
        let bias = sizes.bias();
        check_same("the input bias", b_ih, "one value a gate", &bias)?;
        check_same("the hidden bias", b_hh, "one value a gate", &bias)?;
        let state = sizes.state();
        check_same("the first state", h0, "one state a row", &state)?;
        check_same("the first cell", c0, "one state a row", &state)?;
        let y = sizes.sequence(&sizes.hidden);
        Ok(vec![y.clone(), state.clone(), state, sizes.sequence(&sizes.gate_rows), y])
    }

    // The matrix products; per unit 3 additions at four gates, 5 activations, and 4 flops for c and h.
    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        let flops = products(inputs[0], inputs[2]) + 21.0 * elements(&outputs[0]);
        Cost { flops, bytes: moved_bytes(inputs, outputs) }
    }

    fn backward(&self, context: BackwardContext<'_>, out: &mut dyn Emit) -> Vec<Option<Value>> {
        let [x, w_ih, w_hh, _, _, h0, c0] = context.inputs else { unreachable!("infer checks the arity") };
        if context.d_outputs[..3].iter().all(Option::is_none) {
            return vec![None; 7];
        }
        let mut d_outputs = Vec::with_capacity(3);
        for (output, gradient) in context.outputs.iter().zip(&context.d_outputs[..3]) {
            d_outputs.push(gradient.unwrap_or_else(|| zeros(out, *output)));
        }
        let saved = [*x, *w_ih, *w_hh, *h0, *c0, context.outputs[0], context.outputs[3], context.outputs[4]];
        let inputs: Vec<Value> = d_outputs.into_iter().chain(saved).collect();
        let gradients_all = out.emit_all(Op::LstmGrad(LstmGrad { reverse: self.reverse }), &inputs);
        let [dx, dw_ih, dw_hh, db, dh0, dc0] = gradients_all[..] else { unreachable!("the gradient has six outputs") };
        let gradients = [dx, dw_ih, dw_hh, db, db, dh0, dc0];
        gradients.into_iter().zip(context.wanted).map(|(d, &wanted)| wanted.then_some(d)).collect()
    }

    fn takes_gradient(&self, output: usize) -> bool {
        output < 3
    }

    // The batch axis.
    fn strategies(&self, _: &[&Fact], _: &[Fact], _: &Group) -> Vec<Strategy> {
        let inputs = [Some(1), None, None, None, None, Some(0), Some(0)];
        let outputs = [Some(1), Some(0), Some(0), Some(1), Some(1)];
        vec![Strategy::along(&inputs, &outputs)]
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let [x, w_ih, w_hh, b_ih, b_hh, h0, c0] = inputs else { unreachable!("infer checks the arity") };
        let [y, last_h, last_c, gates, cells] = outputs else { unreachable!("infer gives five outputs") };
        let (steps, batch, width, hidden) = (x.shape[0], x.shape[1], x.shape[2], h0.shape[1]);
        for n in 0..batch {
            let mut h: Vec<f64> = (0..hidden).map(|j| h0.f64(n * hidden + j)).collect();
            let mut c: Vec<f64> = (0..hidden).map(|j| c0.f64(n * hidden + j)).collect();
            for t in order(steps, self.reverse) {
                let row = t * batch + n;
                let a: Vec<f64> = (0..4 * hidden)
                    .map(|k| {
                        let from_x: f64 = (0..width).map(|i| x.f64(row * width + i) * w_ih.f64(k * width + i)).sum();
                        let from_h: f64 = (0..hidden).map(|j| h[j] * w_hh.f64(k * hidden + j)).sum();
                        from_x + b_ih.f64(k) + from_h + b_hh.f64(k)
                    })
                    .collect();
                for j in 0..hidden {
                    let (i, f) = (logistic(a[j]), logistic(a[hidden + j]));
                    let (g, o) = (a[2 * hidden + j].tanh(), logistic(a[3 * hidden + j]));
                    c[j] = f * c[j] + i * g;
                    h[j] = o * c[j].tanh();
                    for (gate, value) in [i, f, g, o].into_iter().enumerate() {
                        gates.set_f64((row * 4 + gate) * hidden + j, value);
                    }
                    cells.set_f64(row * hidden + j, c[j]);
                    y.set_f64(row * hidden + j, h[j]);
                }
            }
            for j in 0..hidden {
                last_h.set_f64(n * hidden + j, h[j]);
                last_c.set_f64(n * hidden + j, c[j]);
            }
        }
        Ok(())
    }
}

impl OpRule for LstmGrad {
    fn name(&self) -> &'static str {
        "lstm_grad"
    }

    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [dy, dh, dc, x, w_ih, w_hh, h0, c0, y, gates, cells] = inputs else {
            return Err(FactError::Arity { expected: 11, got: inputs.len() });
        };
        let sizes = Sizes::of(x, w_hh, 4)?;
        sizes.weights(w_ih, w_hh)?;
        let (state, sequence) = (sizes.state(), sizes.sequence(&sizes.hidden));
        for (what, fact) in [
            ("the gradient of the last state", dh),
            ("the gradient of the last cell", dc),
            ("the first state", h0),
            ("the first cell", c0),
        ] {
            check_same(what, fact, "one state a row", &state)?;
        }
        for (what, fact) in [("the output gradient", dy), ("the output", y), ("the cells", cells)] {
            check_same(what, fact, "one state a step", &sequence)?;
        }
        check_same("the gates", gates, "four gates a step", &sizes.sequence(&sizes.gate_rows))?;
        let bias = sizes.bias();
        Ok(vec![(*x).clone(), (*w_ih).clone(), (*w_hh).clone(), bias, state.clone(), state])
    }

    // Two products per forward product; about 30 further flops per unit.
    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        let flops = 2.0 * products(inputs[3], inputs[5]) + 30.0 * elements(inputs[0]);
        Cost { flops, bytes: moved_bytes(inputs, outputs) }
    }

    // No second-order gradient, as for the normalisations.

    // The batch axis.
    fn strategies(&self, _: &[&Fact], _: &[Fact], _: &Group) -> Vec<Strategy> {
        let inputs = [Some(1), Some(0), Some(0), Some(1), None, None, Some(0), Some(0), Some(1), Some(1), Some(1)];
        let outputs = [Some(1), None, None, None, Some(0), Some(0)];
        vec![Strategy::along(&inputs, &outputs)]
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let [dy, last_dh, last_dc, x, w_ih, w_hh, h0, c0, y, gates, cells] = inputs else {
            unreachable!("infer checks the arity")
        };
        let [dx, dw_ih, dw_hh, db, dh0, dc0] = outputs else { unreachable!("infer gives six outputs") };
        let (steps, batch, width, hidden) = (x.shape[0], x.shape[1], x.shape[2], h0.shape[1]);
        let mut sums = [vec![0.0; w_ih.len()], vec![0.0; w_hh.len()], vec![0.0; 4 * hidden]];
        for n in 0..batch {
            let mut dh: Vec<f64> = (0..hidden).map(|j| last_dh.f64(n * hidden + j)).collect();
            let mut dc: Vec<f64> = (0..hidden).map(|j| last_dc.f64(n * hidden + j)).collect();
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
                for i in 0..width {
                    dx.set_f64(row * width + i, (0..4 * hidden).map(|k| da[k] * w_ih.f64(k * width + i)).sum());
                }
                for (j, dh) in dh.iter_mut().enumerate() {
                    *dh = (0..4 * hidden).map(|k| da[k] * w_hh.f64(k * hidden + j)).sum();
                }
                for (k, da) in da.into_iter().enumerate() {
                    (0..width).for_each(|i| sums[0][k * width + i] += da * x.f64(row * width + i));
                    for j in 0..hidden {
                        let h = before.map_or(h0.f64(n * hidden + j), |at| y.f64(at + j));
                        sums[1][k * hidden + j] += da * h;
                    }
                    sums[2][k] += da;
                }
            }
            for j in 0..hidden {
                dh0.set_f64(n * hidden + j, dh[j]);
                dc0.set_f64(n * hidden + j, dc[j]);
            }
        }
        for (d, sums) in [dw_ih, dw_hh, db].into_iter().zip(sums) {
            sums.into_iter().enumerate().for_each(|(i, sum)| d.set_f64(i, sum));
        }
        Ok(())
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

pub(super) fn logistic(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Zeros in place of a missing output gradient.
pub(super) fn zeros(out: &mut dyn Emit, target: Value) -> Value {
    let fact = out.fact(target);
    let zero = out.emit(scalar(fact.dtype, 0.0), &[]);
    out.emit(Op::Broadcast(Broadcast { shape: fact.shape }), &[zero])
}

/// Sample inputs of a layer with `gates` gates: x, both weights, both biases, and the initial states.
pub(super) fn inputs_of(gates: usize, [steps, batch, width, hidden]: [usize; 4], states: usize) -> Vec<Tensor> {
    let gate_rows = gates * hidden;
    let layer: [&[usize]; 5] =
        [&[steps, batch, width], &[gate_rows, width], &[gate_rows, hidden], &[gate_rows], &[gate_rows]];
    let state: &[usize] = &[batch, hidden];
    layer.into_iter().chain(vec![state; states]).zip(1..).map(|(shape, seed)| ramp(shape, seed)).collect()
}

/// The gradient's inputs: output gradients, forward inputs and saved outputs.
fn grad_inputs(forward: &Lstm, inputs: &[Tensor], d_outputs: [Tensor; 3]) -> Vec<Tensor> {
    let outputs = run(forward, inputs);
    let forward_inputs = [0, 1, 2, 5, 6].map(|i: usize| inputs[i].clone());
    d_outputs.into_iter().chain(forward_inputs).chain([0, 3, 4].map(|i: usize| outputs[i].clone())).collect()
}

pub fn samples() -> Vec<Sample> {
    let cases = [
        ("forward", [3, 2, 3, 2], false),
        ("reverse", [3, 2, 2, 3], true),
        ("one step", [1, 1, 4, 2], false),
        ("one unit, a long sequence", [6, 1, 1, 1], true),
    ];
    let with_gradient = |(title, sizes, reverse): (&'static str, [usize; 4], bool)| {
        let [steps, batch, _, hidden] = sizes;
        let inputs = inputs_of(4, sizes, 2);
        let forward = Lstm { reverse };
        let d_outputs = [ramp(&[steps, batch, hidden], 8), ramp(&[batch, hidden], 9), ramp(&[batch, hidden], 10)];
        let gradient_inputs = grad_inputs(&forward, &inputs, d_outputs);
        let grad = Op::LstmGrad(LstmGrad { reverse });
        [
            Sample { title, op: Op::Lstm(forward), inputs, differentiate: (0..7).collect() },
            Sample { title, op: grad, inputs: gradient_inputs, differentiate: vec![] },
        ]
    };
    cases.into_iter().flat_map(with_gradient).collect()
}

#[cfg(test)]
mod tests {
    use super::super::sample::assert_slopes;
    use super::*;

    // The samples only check the gradient of y; this test covers all three outputs.
    #[test]
    fn gradients_of_the_last_state_and_cell_are_slopes() {
        for reverse in [false, true] {
            let inputs: Vec<Tensor> = inputs_of(4, [3, 2, 2, 2], 2).iter().map(|t| t.cast(DType::F64)).collect();
            let weights = [ramp(&[3, 2, 2], 20), ramp(&[2, 2], 21), ramp(&[2, 2], 22)].map(|t| t.cast(DType::F64));
            let forward = Lstm { reverse };
            let gradients = run(&LstmGrad { reverse }, &grad_inputs(&forward, &inputs, weights.clone()));
            assert_slopes(&forward, &inputs, &weights, &gradients, &[0, 1, 2, 3, 3, 4, 5]);
        }
    }

    #[test]
    fn no_step_gives_the_first_state_back() {
        let inputs = inputs_of(4, [0, 2, 3, 2], 2);
        let outputs = run(&Lstm { reverse: false }, &inputs);
        assert_eq!((&outputs[1], &outputs[2]), (&inputs[5], &inputs[6]));
    }

    #[test]
    fn shapes_and_errors() {
        let dims = |text: &str| text.split_whitespace().map(|d| Dim::parse(d).unwrap()).collect::<Vec<_>>();
        let fact = |text: &str| Fact::new(DType::F32, dims(text));
        let inputs = ["t b 3", "8 3", "8 2", "8", "8", "b 2", "b 2"].map(fact);
        let inferred = |facts: &[Fact]| Lstm { reverse: false }.infer(&facts.iter().collect::<Vec<_>>());
        let shapes: Vec<String> = inferred(&inputs).unwrap().iter().map(Fact::to_string).collect();
        assert_eq!(shapes, ["f32[t, b, 2]", "f32[b, 2]", "f32[b, 2]", "f32[t, b, 8]", "f32[t, b, 2]"]);
        let mut wrong = inputs.clone();
        wrong[3] = fact("4");
        assert_eq!(inferred(&wrong).unwrap_err().to_string(), "the input bias is f32[4], one value a gate is f32[8]");
        wrong[0] = fact("b 3");
        assert!(inferred(&wrong).unwrap_err().to_string().contains("time, batch, input"));
    }
}
