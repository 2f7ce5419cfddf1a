//! What recurrent layers over a sequence have in common: their shapes, costs, shardings, gradients and samples.
//!
//! ```text
//! layer     x, w_ih, w_hh, b_ih, b_hh, states          → y, last states, saved
//! gradient  dy, d last states, x, w_ih, w_hh, states, y, saved → dx, dw_ih, dw_hh, db, d states
//! ```
//!
//! A state is `[N, H]`, a saved tensor `[T, N, width·H]`. Saved tensors take no gradient. Without separate sums for the
//! two biases, their gradients are one output.

use super::sample::{ramp, run};
use super::unary::scalar;
use super::*;

/// The initial states of a layer, and the gradients of the last ones.
const STATES: [[&str; 2]; 2] =
    [["the first state", "the gradient of the last state"], ["the first cell", "the gradient of the last cell"]];

/// One kind of layer.
pub(super) struct Layer {
    /// Rows of the weights, in units.
    pub gates: usize,
    /// What a bias is.
    pub bias: &'static str,
    /// Number of states.
    pub states: usize,
    /// Per saved tensor: what it is, the shape it must have in words, and its width in units.
    pub saved: &'static [(&'static str, &'static str, usize)],
    /// Number of bias gradients.
    pub biases: usize,
    /// Flops per unit and step besides the matrix products, forward and backward.
    pub flops: [f64; 2],
}

/// A layer, or its gradient.
pub(super) trait Recurrent: Named {
    const LAYER: Layer;

    /// The gradient of a layer; `None` for a gradient, which has no second-order gradient.
    fn gradient(&self) -> Option<Op>;

    fn kernel(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]);
}

/// The sizes of a layer, and the facts derived from them.
struct Sizes<'a> {
    x: &'a Fact,
    hidden: &'a Dim,
    gate_rows: Dim,
}

impl<'a> Sizes<'a> {
    /// Checks x and the weights, `[gates·H, I]` and `[gates·H, H]`.
    fn of([x, w_ih, w_hh]: [&'a Fact; 3], layer: &Layer) -> Result<Sizes<'a>, FactError> {
        check_float("the input", x)?;
        if x.rank() != 3 {
            return Err(FactError::Rank { what: "the input", expected: "3: time, batch, input".into(), got: x.rank() });
        }
        let [_, hidden] = w_hh.shape.as_slice() else {
            return Err(FactError::Rank { what: "the hidden weight", expected: "2".into(), got: w_hh.rank() });
        };
        let sizes = Sizes { x, hidden, gate_rows: hidden.mul(&Dim::from(layer.gates))? };
        let input = sizes.fact(&[&sizes.gate_rows, &x.shape[2]]);
        check_same("the input weight", w_ih, "every gate of the input", &input)?;
        let of_state = sizes.fact(&[&sizes.gate_rows, hidden]);
        check_same("the hidden weight", w_hh, "every gate of the state", &of_state)?;
        Ok(sizes)
    }

    fn fact(&self, shape: &[&Dim]) -> Fact {
        Fact::new(self.x.dtype, shape.iter().map(|dim| (*dim).clone()).collect())
    }

    fn bias(&self) -> Fact {
        self.fact(&[&self.gate_rows])
    }

    fn state(&self) -> Fact {
        self.fact(&[&self.x.shape[1], self.hidden])
    }

    /// `[T, N, width·H]`
    fn sequence(&self, width: usize) -> Result<Fact, FactError> {
        Ok(self.fact(&[&self.x.shape[0], &self.x.shape[1], &self.hidden.mul(&Dim::from(width))?]))
    }
}

impl Layer {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        check_arity(inputs, 5 + self.states)?;
        let sizes = Sizes::of([inputs[0], inputs[1], inputs[2]], self)?;
        let (bias, state) = (sizes.bias(), sizes.state());
        check_same("the input bias", inputs[3], self.bias, &bias)?;
        check_same("the hidden bias", inputs[4], self.bias, &bias)?;
        for (fact, [first, _]) in inputs[5..].iter().zip(STATES) {
            check_same(first, fact, "one state a row", &state)?;
        }
        let mut outputs = vec![sizes.sequence(1)?];
        outputs.extend(vec![state; self.states]);
        for (_, _, width) in self.saved {
            outputs.push(sizes.sequence(*width)?);
        }
        Ok(outputs)
    }

    fn infer_gradient(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        check_arity(inputs, 5 + 2 * self.states + self.saved.len())?;
        let (d_outputs, rest) = inputs.split_at(1 + self.states);
        let (forward, saved) = rest.split_at(3 + self.states);
        let sizes = Sizes::of([forward[0], forward[1], forward[2]], self)?;
        let (state, sequence) = (sizes.state(), sizes.sequence(1)?);
        for (fact, [_, last]) in d_outputs[1..].iter().zip(STATES) {
            check_same(last, fact, "one state a row", &state)?;
        }
        for (fact, [first, _]) in forward[3..].iter().zip(STATES) {
            check_same(first, fact, "one state a row", &state)?;
        }
        check_same("the output gradient", d_outputs[0], "one state a step", &sequence)?;
        check_same("the output", saved[0], "one state a step", &sequence)?;
        for (fact, (what, expected, width)) in saved[1..].iter().zip(self.saved).rev() {
            check_same(what, fact, expected, &sizes.sequence(*width)?)?;
        }
        let mut outputs: Vec<Fact> = forward[..3].iter().map(|fact| (*fact).clone()).collect();
        outputs.extend(vec![sizes.bias(); self.biases]);
        outputs.extend(vec![state; self.states]);
        Ok(outputs)
    }

    /// The batch axis.
    fn strategy(&self, is_gradient: bool) -> Strategy {
        let (states, saved) = (vec![Some(0); self.states], vec![Some(1); self.saved.len()]);
        let outputs = [&[Some(1)], &states[..]].concat();
        if is_gradient {
            let inputs = [&outputs[..], &[Some(1), None, None], &states, &[Some(1)], &saved].concat();
            Strategy::along(&inputs, &[&[Some(1), None, None], &vec![None; self.biases][..], &states].concat())
        } else {
            let inputs = [&[Some(1), None, None, None, None], &states[..]].concat();
            Strategy::along(&inputs, &[outputs, saved].concat())
        }
    }
}

fn check_arity(inputs: &[&Fact], expected: usize) -> Result<(), FactError> {
    if inputs.len() == expected { Ok(()) } else { Err(FactError::Arity { expected, got: inputs.len() }) }
}

/// Flops of both forward products; a fused multiply-add counts as two.
fn products(x: &Fact, w_hh: &Fact) -> f64 {
    let rows = elements(x) / x.shape[2].known().unwrap_or(1).max(1) as f64;
    let width = w_hh.shape[1].known().unwrap_or(0) as f64 + x.shape[2].known().unwrap_or(0) as f64;
    2.0 * rows * w_hh.shape[0].known().unwrap_or(0) as f64 * width
}

impl<R: Recurrent> OpRule for R {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        if self.gradient().is_some() { R::LAYER.infer(inputs) } else { R::LAYER.infer_gradient(inputs) }
    }

    // The gradient has two products per forward product.
    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        let ([forward, backward], states) = (R::LAYER.flops, R::LAYER.states);
        let flops = match self.gradient() {
            Some(_) => products(inputs[0], inputs[2]) + forward * elements(&outputs[0]),
            None => 2.0 * products(inputs[1 + states], inputs[3 + states]) + backward * elements(inputs[0]),
        };
        Cost { flops, bytes: moved_bytes(inputs, outputs) }
    }

    fn backward<'b>(&self, context: BackwardContext<'b>) -> Vec<Option<Expr<'b>>> {
        let results = 1 + R::LAYER.states;
        let (inputs, outputs, given) = (context.inputs, context.outputs, &context.d_outputs[..results]);
        let Some(gradient) = self.gradient().filter(|_| given.iter().any(Option::is_some)) else {
            return vec![None; inputs.len()];
        };
        let zeros = |y: Expr<'b>| y.source(scalar(y.dtype(), 0.0)).broadcast(y.shape());
        let mut operands: Vec<Expr<'b>> =
            given.iter().zip(outputs).map(|(d, y)| d.unwrap_or_else(|| zeros(*y))).collect();
        for part in [&inputs[..3], &inputs[5..], &outputs[..1], &outputs[results..]] {
            operands.extend(part);
        }
        let mut gradients = emit_all(gradient, &operands);
        if R::LAYER.biases == 1 {
            gradients.insert(3, gradients[3]);
        }
        context.wanted_of(gradients)
    }

    fn takes_gradient(&self, output: usize) -> bool {
        self.gradient().is_some() && output <= R::LAYER.states
    }

    fn strategies(&self, _: &[&Fact], _: &[Fact], _: &Group) -> Vec<Strategy> {
        vec![R::LAYER.strategy(self.gradient().is_none())]
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        self.kernel(inputs, outputs);
        Ok(())
    }
}

pub(super) fn logistic(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Row `n` of a state.
pub(super) fn read_row(state: &View<'_>, n: usize) -> Vec<f64> {
    let hidden = state.shape[1];
    (0..hidden).map(|j| state.f64(n * hidden + j)).collect()
}

pub(super) fn write_row(to: &mut ViewMut<'_>, n: usize, row: &[f64]) {
    row.iter().enumerate().for_each(|(j, &value)| to.set_f64(n * row.len() + j, value));
}

pub(super) fn write_all<const N: usize>(outputs: [&mut ViewMut<'_>; N], values: [Vec<f64>; N]) {
    outputs.into_iter().zip(values).for_each(|(to, values)| write_row(to, 0, &values));
}

/// `x W_ihᵀ + b_ih + h W_hhᵀ + b_hh` of one gate and unit, for a row of x.
pub(super) fn gate_sum([x, w_ih, w_hh, b_ih, b_hh]: [&View<'_>; 5], row: usize, h: &[f64], k: usize) -> f64 {
    let (width, hidden) = (x.shape[2], h.len());
    let from_x: f64 = (0..width).map(|i| x.f64(row * width + i) * w_ih.f64(k * width + i)).sum();
    let from_h: f64 = (0..hidden).map(|j| h[j] * w_hh.f64(k * hidden + j)).sum();
    from_x + b_ih.f64(k) + from_h + b_hh.f64(k)
}

/// The sums over all steps of the gradients of w_ih, w_hh and one bias.
pub(super) struct Sums<'a> {
    /// x, w_ih, w_hh
    inputs: [&'a View<'a>; 3],
    pub sums: [Vec<f64>; 3],
}

impl<'a> Sums<'a> {
    pub fn new(inputs: [&'a View<'a>; 3]) -> Sums<'a> {
        let [_, w_ih, w_hh] = inputs;
        Sums { inputs, sums: [vec![0.0; w_ih.len()], vec![0.0; w_hh.len()], vec![0.0; w_ih.shape[0]]] }
    }

    /// Takes the gradients `da` of the gate sums of one step: `dx = da W_ih`, `dh = da W_hh`, and `daᵀ x`, `daᵀ h`, `da`
    /// for the sums. `h` is the state before the step.
    pub fn step(&mut self, da: &[f64], row: usize, h: impl Fn(usize) -> f64, dx: &mut ViewMut<'_>, dh: &mut [f64]) {
        let [x, w_ih, w_hh] = self.inputs;
        let (width, hidden) = (x.shape[2], dh.len());
        for i in 0..width {
            dx.set_f64(row * width + i, (0..da.len()).map(|k| da[k] * w_ih.f64(k * width + i)).sum());
        }
        for (j, dh) in dh.iter_mut().enumerate() {
            *dh = (0..da.len()).map(|k| da[k] * w_hh.f64(k * hidden + j)).sum();
        }
        for (k, da) in da.iter().enumerate() {
            (0..width).for_each(|i| self.sums[0][k * width + i] += da * x.f64(row * width + i));
            (0..hidden).for_each(|j| self.sums[1][k * hidden + j] += da * h(j));
            self.sums[2][k] += da;
        }
    }
}

/// Sample inputs of a layer: x, both weights, both biases, and the initial states.
fn inputs_of(layer: &Layer, [steps, batch, width, hidden]: [usize; 4]) -> Vec<Tensor> {
    let gate_rows = layer.gates * hidden;
    let shapes: [&[usize]; 5] =
        [&[steps, batch, width], &[gate_rows, width], &[gate_rows, hidden], &[gate_rows], &[gate_rows]];
    let state: &[usize] = &[batch, hidden];
    shapes.into_iter().chain(vec![state; layer.states]).zip(1..).map(|(shape, seed)| ramp(shape, seed)).collect()
}

/// The gradients of y and of the last states.
fn d_outputs(layer: &Layer, [steps, batch, _, hidden]: [usize; 4], seed: u64) -> Vec<Tensor> {
    let states = (1..=layer.states as u64).map(|n| ramp(&[batch, hidden], seed + n));
    [ramp(&[steps, batch, hidden], seed)].into_iter().chain(states).collect()
}

/// The gradient's inputs: output gradients, forward inputs and saved outputs.
fn gradient_inputs<R: Recurrent>(forward: &R, inputs: &[Tensor], d_outputs: Vec<Tensor>) -> Vec<Tensor> {
    let outputs = run(forward, inputs);
    [&d_outputs, &inputs[..3], &inputs[5..], &outputs[..1], &outputs[1 + R::LAYER.states..]].concat()
}

/// A layer and its gradient, for each title, `[T, N, I, H]` and layer.
pub(super) fn samples_of<R: Recurrent>(cases: &[(&'static str, [usize; 4], R)], op: impl Fn(&R) -> Op) -> Vec<Sample> {
    let with_gradient = |(title, sizes, forward): &(&'static str, [usize; 4], R)| {
        let inputs = inputs_of(&R::LAYER, *sizes);
        let gradient_inputs = gradient_inputs(forward, &inputs, d_outputs(&R::LAYER, *sizes, 8));
        let gradient = forward.gradient().expect("a layer has a gradient");
        [Sample::new(title, op(forward), inputs), Sample::forward(title, gradient, gradient_inputs)]
    };
    cases.iter().flat_map(with_gradient).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::sample::assert_slopes;
    use crate::op::table::rule;

    // The samples only check the gradient of y; this test covers the last states, too.
    fn assert_gradients_of_all_outputs<R: Recurrent>(forward: R) {
        let sizes = [3, 2, 2, 2];
        let wide = |list: Vec<Tensor>| list.iter().map(|t| t.cast(DType::F64)).collect::<Vec<Tensor>>();
        let inputs = wide(inputs_of(&R::LAYER, sizes));
        let weights = wide(d_outputs(&R::LAYER, sizes, 20));
        let gradient = forward.gradient().unwrap();
        let gradients = run(rule(&gradient), &gradient_inputs(&forward, &inputs, weights.clone()));
        let mut slots: Vec<usize> = (0..gradients.len()).collect();
        if R::LAYER.biases == 1 {
            slots.insert(3, 3);
        }
        assert_slopes(&forward, &inputs, &weights, &gradients, &slots);
    }

    #[test]
    fn gradients_of_the_last_states_are_slopes() {
        for reverse in [false, true] {
            assert_gradients_of_all_outputs(Lstm { reverse });
            for activation in [Activation::Tanh, Activation::Sigmoid] {
                assert_gradients_of_all_outputs(Rnn { reverse, activation });
            }
            for reset_after in [false, true] {
                assert_gradients_of_all_outputs(Gru { reverse, reset_after });
            }
        }
    }

    #[test]
    fn no_step_gives_the_first_state_back() {
        let inputs = inputs_of(&Lstm::LAYER, [0, 2, 3, 2]);
        let outputs = run(&Lstm { reverse: false }, &inputs);
        assert_eq!((&outputs[1], &outputs[2]), (&inputs[5], &inputs[6]));
    }
}
