//! Recurrent layers over a sequence: `lstm`, `gru`, `rnn_tanh` and `rnn_relu`.
//!
//! An ATen operator contains several layers with one or two directions. Each layer and direction becomes one core op on
//! the module's own parameters, which keep their names. PyTorch's gate order is that of the core ops. Parameters are
//! ordered by layer, then direction: w_ih, w_hh, and b_ih, b_hh unless there are no biases.

use super::{Outputs, Scope, many};
use crate::import::build::Build;
use crate::import::lower_error::LowerReason;
use crate::import::norm::filled;
use crate::import::onnx::lower::movement::transposed;
use crate::import::onnx::lower::slice::part;
use crate::op::{Activation, Dropout, Gru, Lstm, Op, Rnn, Value};
use crate::tensor::dim::Dim;

/// Limit on the layers of one operator.
const LAYERS: i64 = 1 << 12;

struct Stack {
    /// `[T, N, I]`
    x: Value,
    layers: usize,
    /// Per direction, true for the reverse one.
    directions: &'static [bool],
    /// w_ih, w_hh, b_ih and b_hh per layer and direction.
    weights: Vec<[Value; 4]>,
    batch_first: bool,
    /// Dropout rate between layers.
    ratio: f64,
}

impl Stack {
    /// Reads the common arguments; a weight has `gates` rows per unit.
    fn read(scope: &mut Scope<'_>, gates: i64) -> Result<Stack, LowerReason> {
        if scope.has("data") {
            return Err(LowerReason::Unsupported("a packed sequence".to_string()));
        }
        let input = scope.value("input")?;
        if scope.fact(input).rank() != 3 {
            return Err(LowerReason::Inputs(format!("its input is {}, expected three axes", scope.fact(input))));
        }
        let batch_first = scope.flag("batch_first", false)?;
        let x = if batch_first { transposed(scope, input, vec![1, 0, 2])? } else { input };
        let layers = scope.int("num_layers", 1)?;
        let layers = usize::try_from(layers).ok().filter(|_| (1..=LAYERS).contains(&layers)).ok_or_else(|| {
            let expected = "an integer from 1 to 4096";
            LowerReason::Attribute { name: "num_layers", found: layers.to_string(), expected }
        })?;
        let directions: &[bool] = if scope.flag("bidirectional", false)? { &[false, true] } else { &[false] };
        let (params, biased) = (scope.values("params")?, scope.flag("has_biases", true)?);
        let (cells, params_per_cell) = (layers * directions.len(), if biased { 4 } else { 2 });
        if params.len() == cells * (params_per_cell + 1) {
            return Err(LowerReason::Unsupported("a recurrent layer with projections (`proj_size`)".to_string()));
        }
        if params.len() != cells * params_per_cell {
            let count = params.len();
            return Err(LowerReason::Inputs(format!(
                "{count} parameters for {cells} layers and directions of {params_per_cell} \
                each"
            )));
        }
        let dtype = scope.fact(x).dtype;
        let mut weights = Vec::with_capacity(cells);
        for cell_params in params.chunks_exact(params_per_cell) {
            let biases = match cell_params {
                [_, _, b_ih, b_hh] => [*b_ih, *b_hh],
                _ => {
                    let gate_rows = scope.fact(cell_params[0]).shape.first().cloned().unwrap_or(Dim::Known(gates));
                    [filled(scope, dtype, &[gate_rows], 0.0)?; 2]
                }
            };
            weights.push([cell_params[0], cell_params[1], biases[0], biases[1]]);
        }
        let ratio = if scope.flag("train", false)? { scope.float("dropout", 0.0)? } else { 0.0 };
        Ok(Stack { x, layers, directions, weights, batch_first, ratio })
    }

    /// Splits `[layers·directions, N, H]` into the initial state `[N, H]` of each layer and direction. A static
    /// export's zero state has the exported batch size, which is opened.
    fn states(&self, scope: &mut Scope<'_>, initial: Value) -> Result<Vec<Value>, LowerReason> {
        let mut shape = scope.fact(initial).shape;
        let cells = self.weights.len();
        if shape.len() != 3 || !shape[0].is(cells as i64) {
            return Err(LowerReason::Inputs(format!(
                "its initial state is {}, expected {cells} states",
                scope.fact(initial)
            )));
        }
        shape[1] = scope.fact(self.x).shape[1].clone();
        let stacked = scope.open_batch(initial, &shape)?;
        let mut states = Vec::with_capacity(cells);
        for at in 0..cells {
            let state = part(scope, stacked, 0, Dim::from(at), Dim::from(at + 1))?;
            states.push(scope.reshape(state, shape[1..].to_vec())?);
        }
        Ok(states)
    }

    /// Runs `cell` for every layer and direction; it returns the sequence, then the final states. Returns the last
    /// layer's sequence and all final states.
    fn run(
        &self,
        scope: &mut Scope<'_>,
        mut cell: impl FnMut(&mut Scope<'_>, usize, bool, Value) -> Result<Vec<Value>, LowerReason>,
    ) -> Outputs {
        let (mut x, mut last) = (self.x, Vec::new());
        for layer in 0..self.layers {
            if layer > 0 && self.ratio != 0.0 {
                let counter = scope.counter()?;
                x = scope.add(Op::Dropout(Dropout { ratio: self.ratio, stream: 0 }), &[x, counter])?;
            }
            let mut sequences = Vec::with_capacity(self.directions.len());
            for (direction, reverse) in self.directions.iter().enumerate() {
                let outputs = cell(scope, layer * self.directions.len() + direction, *reverse, x)?;
                sequences.push(outputs[0]);
                last.push(outputs[1..].to_vec());
            }
            x = scope.concat(&sequences, 2)?;
        }
        let y = if self.batch_first { transposed(scope, x, vec![1, 0, 2])? } else { x };
        let mut results = vec![y];
        for state in 0..last.first().map_or(0, Vec::len) {
            let parts: Vec<Value> = last.iter().map(|states| states[state]).collect();
            results.push(scope.stack(&parts, 0)?);
        }
        many(results)
    }
}

pub fn gru(scope: &mut Scope<'_>) -> Outputs {
    let stack = Stack::read(scope, 3)?;
    let h0 = scope.value("hx")?;
    let h0 = stack.states(scope, h0)?;
    stack.run(scope, |scope, at, reverse, x| {
        let [w_ih, w_hh, b_ih, b_hh] = stack.weights[at];
        let op = Op::Gru(Gru { reverse, reset_after: true });
        Ok(scope.add_all(op, &[x, w_ih, w_hh, b_ih, b_hh, h0[at]])?[..2].to_vec())
    })
}

pub fn rnn(scope: &mut Scope<'_>, activation: Activation) -> Outputs {
    let stack = Stack::read(scope, 1)?;
    let h0 = scope.value("hx")?;
    let h0 = stack.states(scope, h0)?;
    stack.run(scope, |scope, at, reverse, x| {
        let [w_ih, w_hh, b_ih, b_hh] = stack.weights[at];
        let op = Op::Rnn(Rnn { reverse, activation });
        Ok(scope.add_all(op, &[x, w_ih, w_hh, b_ih, b_hh, h0[at]])?[..2].to_vec())
    })
}

/// A recurrent cell, as a sequence of length 1.
pub fn cell(scope: &mut Scope<'_>, states: usize, op: Op) -> Outputs {
    let x = scope.value("input")?;
    let dtype = scope.fact(x).dtype;
    let mut sequence = scope.fact(x).shape;
    if sequence.len() != 2 {
        return Err(LowerReason::Inputs(format!("its input is {}, expected two axes", scope.fact(x))));
    }
    sequence.insert(0, Dim::Known(1));
    let (w_ih, w_hh) = (scope.value("w_ih")?, scope.value("w_hh")?);
    let wide = scope.fact(w_ih).shape.first().cloned().unwrap_or(Dim::Known(1));
    let mut inputs = vec![scope.reshape(x, sequence)?, w_ih, w_hh];
    for name in ["b_ih", "b_hh"] {
        inputs.push(scope.optional_or(name, dtype, std::slice::from_ref(&wide), 0.0)?);
    }
    match states {
        1 => inputs.push(scope.value("hx")?),
        _ => inputs.extend(scope.values("hx")?),
    }
    many(scope.add_all(op, &inputs)?[1..=states].to_vec())
}

pub fn lstm(scope: &mut Scope<'_>) -> Outputs {
    let stack = Stack::read(scope, 4)?;
    let [h0, c0] = scope.values("hx")?[..] else {
        return Err(LowerReason::Inputs("its initial state is not two tensors".to_string()));
    };
    let (h0, c0) = (stack.states(scope, h0)?, stack.states(scope, c0)?);
    stack.run(scope, |scope, at, reverse, x| {
        let [w_ih, w_hh, b_ih, b_hh] = stack.weights[at];
        let inputs = [x, w_ih, w_hh, b_ih, b_hh, h0[at], c0[at]];
        Ok(scope.add_all(Op::Lstm(Lstm { reverse }), &inputs)?[..3].to_vec())
    })
}
