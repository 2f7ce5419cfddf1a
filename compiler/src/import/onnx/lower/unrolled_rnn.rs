//! Unrolled recurrent layers, for options that no core op supports: peepholes, coupled gates, clipping, unusual
//! activations. Gates are in ONNX order.
//!
//! Each step is about a dozen ops, so only short sequences of known length are supported.

use crate::import::build::Build;
use crate::import::onnx::lower::recurrent::Layer;
use crate::import::onnx::lower::slice::part;
use crate::import::onnx::lower::{LowerReason, Scope};
use crate::op::{Binary, Concat, MatMul, Op, Value};
use crate::tensor::dim::Dim;

/// Maximum number of unrolled steps.
const STEPS: i64 = 256;

/// `a·bᵀ`
fn product(scope: &mut Scope<'_>, a: Value, b: Value) -> Result<Value, LowerReason> {
    scope.add(Op::MatMul(MatMul { transpose_a: false, transpose_b: true }), &[a, b])
}

/// Block `at` of size `hidden` along `axis`.
fn block(scope: &mut Scope<'_>, x: Value, axis: usize, at: i64, hidden: i64) -> Result<Value, LowerReason> {
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
            let below = scope.with_number(Binary::Min, x, clip)?;
            x = scope.with_number(Binary::Max, below, -clip)?;
        }
        self.layer.functions[self.direction][n].apply(scope, x)
    }

    /// Unrolls all steps from the input projection `x·wᵀ + b` and the initial states. Returns y and the final states.
    fn over(
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
        let mut each = Vec::new();
        for n in 0..steps {
            let t = if reverse { steps - 1 - n } else { n };
            let row = part(scope, sums, 0, Dim::Known(t), Dim::Known(t + 1))?;
            let shape = scope.fact(row).shape[1..].to_vec();
            let row = scope.reshape(row, shape)?;
            let mut new = step(scope, row, &states)?;
            let mut y = new[0];
            if let Some(lengths) = &self.layer.lengths {
                let within = lengths.at(scope, t)?;
                for (new, old) in new.iter_mut().zip(&states) {
                    *new = scope.select(within, *new, *old)?;
                }
                let zero = scope.scalar(scope.fact(y).dtype, 0.0)?;
                y = scope.select(within, y, zero)?;
            }
            let mut shape = scope.fact(y).shape;
            shape.insert(0, Dim::Known(1));
            each.push(scope.reshape(y, shape)?);
            states = new;
        }
        if reverse {
            each.reverse();
        }
        let y = if let [one] = each[..] { one } else { scope.add(Op::Concat(Concat { axis: 0 }), &each)? };
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
    let run = UnrolledDirection { layer, direction };
    let b = scope.binary(Binary::Add, b_w, b_r)?;
    run.over(scope, [w, b], vec![h0], |scope, x, states| {
        let from_h = product(scope, states[0], r)?;
        let sum = scope.binary(Binary::Add, x, from_h)?;
        Ok(vec![run.apply(scope, 0, sum)?])
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
    let (run, hidden) = (UnrolledDirection { layer, direction }, layer.hidden);
    let gates = part(scope, r, 0, Dim::Known(0), Dim::Known(2 * hidden))?;
    let b_gates = part(scope, b_r, 0, Dim::Known(0), Dim::Known(2 * hidden))?;
    let (candidate, b_candidate) = (block(scope, r, 0, 2, hidden)?, block(scope, b_r, 0, 2, hidden)?);
    run.over(scope, [w, b_w], vec![h0], |scope, x, states| {
        let h = states[0];
        let from_h = product(scope, h, gates)?;
        let from_h = scope.binary(Binary::Add, from_h, b_gates)?;
        let mut values = Vec::new();
        for gate in 0..2 {
            let (a, b) = (block(scope, x, 1, gate, hidden)?, block(scope, from_h, 1, gate, hidden)?);
            let sum = scope.binary(Binary::Add, a, b)?;
            values.push(run.apply(scope, 0, sum)?);
        }
        let (z, reset) = (values[0], values[1]);
        let read = if reset_after { h } else { scope.binary(Binary::Mul, reset, h)? };
        let met = product(scope, read, candidate)?;
        let mut met = scope.binary(Binary::Add, met, b_candidate)?;
        if reset_after {
            met = scope.binary(Binary::Mul, reset, met)?;
        }
        let from_x = block(scope, x, 1, 2, hidden)?;
        let sum = scope.binary(Binary::Add, from_x, met)?;
        let new = run.apply(scope, 1, sum)?;
        // (1 - z)·new + z·h
        let way = scope.binary(Binary::Sub, h, new)?;
        let gone = scope.binary(Binary::Mul, z, way)?;
        Ok(vec![scope.binary(Binary::Add, new, gone)?])
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
    let (run, hidden) = (UnrolledDirection { layer, direction }, layer.hidden);
    let coupled = scope.flag("input_forget", false)?;
    let b = scope.binary(Binary::Add, b_w, b_r)?;
    // Peepholes of i, o and f.
    let mut holes = Vec::new();
    if let Some(all) = scope.optional(7)? {
        let (fact, directions) = (scope.fact(all), layer.reversed.len());
        if fact.shape != [Dim::from(directions), Dim::Known(3 * hidden)] {
            let expected = format!("expected [{directions}, {}]", 3 * hidden);
            return Err(LowerReason::Inputs(format!("its peepholes are {fact}, {expected}")));
        }
        let own = part(scope, all, 0, Dim::from(direction), Dim::from(direction + 1))?;
        let own = scope.reshape(own, vec![Dim::Known(3 * hidden)])?;
        for at in 0..3 {
            holes.push(block(scope, own, 0, at, hidden)?);
        }
    }
    run.over(scope, [w, b], first.to_vec(), |scope, x, states| {
        let (h, c) = (states[0], states[1]);
        let from_h = product(scope, h, r)?;
        let sums = scope.binary(Binary::Add, x, from_h)?;
        let gate = |scope: &mut Scope<'_>, at: i64, cell: Value| -> Result<Value, LowerReason> {
            let mut sum = block(scope, sums, 1, at, hidden)?;
            if let Some(hole) = holes.get(at as usize) {
                let seen = scope.binary(Binary::Mul, *hole, cell)?;
                sum = scope.binary(Binary::Add, sum, seen)?;
            }
            run.apply(scope, 0, sum)
        };
        let i = gate(scope, 0, c)?;
        let f = if coupled {
            let one = scope.scalar(scope.fact(i).dtype, 1.0)?;
            scope.binary(Binary::Sub, one, i)?
        } else {
            gate(scope, 2, c)?
        };
        let candidate = block(scope, sums, 1, 3, hidden)?;
        let candidate = run.apply(scope, 1, candidate)?;
        let (kept, added) = (scope.binary(Binary::Mul, f, c)?, scope.binary(Binary::Mul, i, candidate)?);
        let cell = scope.binary(Binary::Add, kept, added)?;
        let o = gate(scope, 1, cell)?;
        let shown = layer.functions[direction][2].apply(scope, cell)?;
        Ok(vec![scope.binary(Binary::Mul, o, shown)?, cell])
    })
}
