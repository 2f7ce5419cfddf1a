//! Unrolled recurrent layers, for options that no core op supports: peepholes, coupled gates, clipping, unusual
//! activations. Gates are in ONNX order.
//!
//! Each step is about a dozen ops, so only short sequences of known length are supported.

use crate::import::build::Build;
use crate::import::formula::formula;
use crate::import::onnx::lower::recurrent::Layer;
use crate::import::onnx::lower::slice::part;
use crate::import::onnx::lower::{LowerReason, Scope};
use crate::op::{Binary, MatMul, Op, Value};
use crate::tensor::dim::Dim;

/// Maximum number of unrolled steps.
const STEPS: i64 = 256;

/// `a·bᵀ`
fn product(scope: &mut Scope<'_>, a: Value, b: Value) -> Result<Value, LowerReason> {
    scope.add(Op::MatMul(MatMul { transpose_a: false, transpose_b: true }), &[a, b])
}

/// Block `at` of size `hidden` along `axis`.
fn gate_block(scope: &mut Scope<'_>, x: Value, axis: usize, at: i64, hidden: i64) -> Result<Value, LowerReason> {
    part(scope, x, axis, Dim::Known(at * hidden), Dim::Known((at + 1) * hidden))
}

struct UnrolledDirection<'a> {
    layer: &'a Layer,
    direction: usize,
}

impl UnrolledDirection<'_> {
    /// Clips `x` and applies activation function `n`.
    fn apply(&self, scope: &mut Scope<'_>, n: usize, mut x: Value) -> Result<Value, LowerReason> {
        if let Some(clip) = self.layer.clip {
            x = formula(scope, [x], |[x]| x.min(clip).max(-clip))?;
        }
        self.layer.functions[self.direction][n].apply(scope, x)
    }

    /// Unrolls all steps from the input projection `x·wᵀ + b` and the initial states. Returns y and the final states.
    fn unroll(
        &self,
        scope: &mut Scope<'_>,
        [w, b]: [Value; 2],
        mut states: Vec<Value>,
        step: impl Fn(&mut Scope<'_>, Value, &[Value]) -> Result<Vec<Value>, LowerReason>,
    ) -> Result<Vec<Value>, LowerReason> {
        let x = self.layer.x;
        let steps = scope.fact(x).shape[0].known().filter(|steps| (1..=STEPS).contains(steps)).ok_or_else(|| {
            let steps = &scope.fact(x).shape[0];
            LowerReason::Unsupported(format!(
                "a recurrent layer with these options over {steps} steps (supported: 1 to {STEPS})"
            ))
        })?;
        let product = product(scope, x, w)?;
        let sums = scope.binary(Binary::Add, product, b)?;
        let reverse = self.layer.reversed[self.direction];
        let mut outputs = Vec::new();
        for n in 0..steps {
            let t = if reverse { steps - 1 - n } else { n };
            let row = part(scope, sums, 0, Dim::Known(t), Dim::Known(t + 1))?;
            let row = scope.squeeze(row, 0)?;
            let mut next_states = step(scope, row, &states)?;
            let mut y = next_states[0];
            if let Some(lengths) = &self.layer.lengths {
                let is_valid = lengths.at(scope, t)?;
                for (next_states, previous) in next_states.iter_mut().zip(&states) {
                    *next_states = scope.select(is_valid, *next_states, *previous)?;
                }
                let zero = scope.scalar(scope.fact(y).dtype, 0.0)?;
                y = scope.select(is_valid, y, zero)?;
            }
            outputs.push(scope.unsqueeze(y, 0)?);
            states = next_states;
        }
        if reverse {
            outputs.reverse();
        }
        let y = scope.concat(&outputs, 0)?;
        Ok([vec![y], states].concat())
    }
}

/// Elman RNN. Returns y and the final state.
pub fn rnn(
    scope: &mut Scope<'_>,
    layer: &Layer,
    direction: usize,
    [w, r, b_w, b_r]: [Value; 4],
    h0: Value,
) -> Result<Vec<Value>, LowerReason> {
    let cell = UnrolledDirection { layer, direction };
    let b = scope.binary(Binary::Add, b_w, b_r)?;
    cell.unroll(scope, [w, b], vec![h0], |scope, x, states| {
        let from_h = product(scope, states[0], r)?;
        let sum = scope.binary(Binary::Add, x, from_h)?;
        Ok(vec![cell.apply(scope, 0, sum)?])
    })
}

/// GRU with gates z, r, h. Returns y and the final state.
pub fn gru(
    scope: &mut Scope<'_>,
    layer: &Layer,
    direction: usize,
    [w, r, b_w, b_r]: [Value; 4],
    h0: Value,
    reset_after: bool,
) -> Result<Vec<Value>, LowerReason> {
    let (cell, hidden) = (UnrolledDirection { layer, direction }, layer.hidden);
    let gates = part(scope, r, 0, Dim::Known(0), Dim::Known(2 * hidden))?;
    let b_gates = part(scope, b_r, 0, Dim::Known(0), Dim::Known(2 * hidden))?;
    let (candidate, b_candidate) = (gate_block(scope, r, 0, 2, hidden)?, gate_block(scope, b_r, 0, 2, hidden)?);
    cell.unroll(scope, [w, b_w], vec![h0], |scope, x, states| {
        let h = states[0];
        let from_h = product(scope, h, gates)?;
        let from_h = scope.binary(Binary::Add, from_h, b_gates)?;
        let mut values = Vec::new();
        for gate in 0..2 {
            let (a, b) = (gate_block(scope, x, 1, gate, hidden)?, gate_block(scope, from_h, 1, gate, hidden)?);
            let sum = scope.binary(Binary::Add, a, b)?;
            values.push(cell.apply(scope, 0, sum)?);
        }
        let (z, reset) = (values[0], values[1]);
        let h_in = if reset_after { h } else { scope.binary(Binary::Mul, reset, h)? };
        let from_h2 = product(scope, h_in, candidate)?;
        let mut from_h2 = scope.binary(Binary::Add, from_h2, b_candidate)?;
        if reset_after {
            from_h2 = scope.binary(Binary::Mul, reset, from_h2)?;
        }
        let from_x = gate_block(scope, x, 1, 2, hidden)?;
        let sum = scope.binary(Binary::Add, from_x, from_h2)?;
        let candidate_h = cell.apply(scope, 1, sum)?;
        // (1 - z)·new + z·h
        Ok(vec![formula(scope, [z, h, candidate_h], |[z, h, new]| new + z * (h - new))?])
    })
}

/// LSTM with gates i, o, f, c. Returns y, the final state and the final cell state.
pub fn lstm(
    scope: &mut Scope<'_>,
    layer: &Layer,
    direction: usize,
    [w, r, b_w, b_r]: [Value; 4],
    first: [Value; 2],
) -> Result<Vec<Value>, LowerReason> {
    let (direction_run, hidden) = (UnrolledDirection { layer, direction }, layer.hidden);
    let coupled = scope.flag("input_forget", false)?;
    let b = scope.binary(Binary::Add, b_w, b_r)?;
    // Peepholes of i, o and f.
    let mut peephole_blocks = Vec::new();
    if let Some(peepholes) = scope.optional(7)? {
        let (fact, directions) = (scope.fact(peepholes), layer.reversed.len());
        if fact.shape != [Dim::from(directions), Dim::Known(3 * hidden)] {
            let expected = format!("expected [{directions}, {}]", 3 * hidden);
            return Err(LowerReason::Inputs(format!("its peepholes are {fact}, {expected}")));
        }
        let own_peepholes = part(scope, peepholes, 0, Dim::from(direction), Dim::from(direction + 1))?;
        let own_peepholes = scope.reshape(own_peepholes, vec![Dim::Known(3 * hidden)])?;
        for at in 0..3 {
            peephole_blocks.push(gate_block(scope, own_peepholes, 0, at, hidden)?);
        }
    }
    direction_run.unroll(scope, [w, b], first.to_vec(), |scope, x, states| {
        let (h, c) = (states[0], states[1]);
        let from_h = product(scope, h, r)?;
        let sums = scope.binary(Binary::Add, x, from_h)?;
        let gate = |scope: &mut Scope<'_>, at: i64, cell: Value| -> Result<Value, LowerReason> {
            let mut sum = gate_block(scope, sums, 1, at, hidden)?;
            if let Some(peephole) = peephole_blocks.get(at as usize) {
                sum = formula(scope, [sum, *peephole, cell], |[sum, peephole, cell]| sum + peephole * cell)?;
            }
            direction_run.apply(scope, 0, sum)
        };
        let i = gate(scope, 0, c)?;
        let f = if coupled { formula(scope, [i], |[i]| 1.0 - i)? } else { gate(scope, 2, c)? };
        let candidate = gate_block(scope, sums, 1, 3, hidden)?;
        let candidate = direction_run.apply(scope, 1, candidate)?;
        let cell = formula(scope, [f, c, i, candidate], |[f, c, i, candidate]| f * c + i * candidate)?;
        let o = gate(scope, 1, cell)?;
        let activated = layer.functions[direction][2].apply(scope, cell)?;
        Ok(vec![scope.binary(Binary::Mul, o, activated)?, cell])
    })
}
