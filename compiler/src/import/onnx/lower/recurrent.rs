//! Recurrent layers: `LSTM`, `GRU`, `RNN`.
//!
//! ONNX stores the weights of all directions in one tensor, with LSTM gates in the order i, o, f, c. Core ops have one
//! direction and PyTorch's order i, f, c, o. PyTorch's exporter slices and concatenates the parameters to convert them.
//! This module undoes that: it traces a weight back to a list of `Piece`s, rows of the original parameters. After
//! reordering, adjacent pieces are merged, and a piece that is a whole parameter is used without a copy.
//!
//! Variable sequence lengths are in `lengths`. Layers with options that no core op supports are in `unrolled_rnn`.

use super::cell::{self, Function};
use super::lengths::Lengths;
use super::movement::open_batch;
use super::slice::part;
use super::{Known, LowerReason, Outputs, Scope};
use crate::graph::Graph;
use crate::import::build::Build;
use crate::import::onnx::lower::unrolled_rnn;
use crate::op::{Activation, Concat, Gru, Lstm, Op, Rnn, Value};
use crate::tensor::dim::Dim;
use crate::tensor::fact::Fact;

/// Maximum depth when tracing a weight.
const DEPTH: usize = 16;

/// Maximum number of pieces of a weight.
const PIECES: usize = 256;

/// Maximum number of values visited per weight.
const VISITS: usize = 4096;

/// A range of rows of a value, where the first `lead` axes are flattened to rows.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Piece {
    value: Value,
    lead: usize,
    begin: i64,
    end: i64,
}

fn rows(fact: &Fact, lead: usize) -> Option<i64> {
    fact.shape.get(..lead)?.iter().try_fold(1i64, |n, d| n.checked_mul(d.known()?))
}

/// The pieces that a value is composed of, or the value itself if it cannot be traced further. `visits` limits the
/// work, since a value concatenated with itself repeatedly has exponentially many paths.
fn pieces(graph: &Graph, value: Value, lead: usize, depth: usize, visits: &mut usize) -> Option<Vec<Piece>> {
    let fact = graph.fact(value);
    let untraced = vec![Piece { value, lead, begin: 0, end: rows(fact, lead)? }];
    *visits = visits.saturating_sub(1);
    let traced = match &graph.node(value.node).op {
        _ if depth == 0 || *visits == 0 => None,
        Op::Concat(Concat { axis: 0 }) => {
            let parts = graph.inputs(value.node).into_iter().map(|part| pieces(graph, part, lead, depth - 1, visits));
            parts.collect::<Option<Vec<_>>>().map(|parts| parts.concat())
        }
        Op::Slice(slice) => {
            let from = graph.inputs(value.node)[0];
            let shape = &graph.fact(from).shape;
            let untouched = |i: usize| slice.begin[i].is(0) && slice.end[i] == shape[i];
            let is_row_range = slice.step.iter().all(|s| *s == 1) && (1..shape.len()).all(untouched);
            let range = slice.begin[0].known().zip(slice.end[0].known());
            // With two leading axes, one entry of the first axis is several rows.
            let rows_per_entry =
                shape.get(1..lead).and_then(|dims| dims.iter().try_fold(1i64, |n, d| n.checked_mul(d.known()?)));
            match (is_row_range, range, rows_per_entry) {
                (true, Some((begin, end)), Some(rows_per_entry)) => pieces(graph, from, lead, depth - 1, visits)
                    .and_then(|rows_before| {
                        take(&rows_before, begin.checked_mul(rows_per_entry)?, end.checked_mul(rows_per_entry)?)
                    }),
                _ => None,
            }
        }
        Op::Reshape(_) => {
            // `[R, …]` as `[1, R, …]` or back.
            let from = graph.inputs(value.node)[0];
            let (new, old) = (&fact.shape, &graph.fact(from).shape);
            if lead == 2 && new.first().is_some_and(|d| d.is(1)) && new[1..] == old[..] {
                pieces(graph, from, 1, depth - 1, visits)
            } else if lead == 1 && old.first().is_some_and(|d| d.is(1)) && old[1..] == new[..] {
                pieces(graph, from, 2, depth - 1, visits)
            } else {
                None
            }
        }
        _ => None,
    };
    Some(traced.filter(|traced| traced.len() <= PIECES).unwrap_or(untraced))
}

/// Rows `begin..end` of the concatenated pieces; `None` if out of range.
fn take(pieces: &[Piece], begin: i64, end: i64) -> Option<Vec<Piece>> {
    let (mut at, mut range) = (0i64, Vec::new());
    for piece in pieces {
        let size = piece.end - piece.begin;
        let (from, to) = ((begin - at).clamp(0, size), (end - at).clamp(0, size));
        if from < to {
            range.push(Piece { begin: piece.begin + from, end: piece.begin + to, ..*piece });
        }
        at += size;
    }
    (0 <= begin && begin <= end && end <= at).then_some(range)
}

fn merge_adjacent(pieces: Vec<Piece>) -> Vec<Piece> {
    let mut merged: Vec<Piece> = Vec::new();
    for piece in pieces {
        match merged.last_mut() {
            Some(last) if (last.value, last.lead, last.end) == (piece.value, piece.lead, piece.begin) => {
                last.end = piece.end;
            }
            _ => merged.push(piece),
        }
    }
    merged
}

/// A weight of all directions, as rows.
struct DirectionWeights {
    pieces: Vec<Piece>,
    row: Vec<Dim>,
}

impl DirectionWeights {
    /// Reads input `slot` of shape `[directions, gates·hidden, …]`.
    fn read(
        scope: &mut Scope<'_>,
        slot: usize,
        [directions, gate_rows]: [i64; 2],
        row: &[Dim],
    ) -> Result<DirectionWeights, LowerReason> {
        let value = scope.value(slot)?;
        let fact = scope.fact(value);
        let mut expected = vec![Dim::Known(directions), Dim::Known(gate_rows)];
        expected.extend(row.iter().cloned());
        if fact.shape != expected {
            let expected = Fact::new(fact.dtype, expected);
            return Err(LowerReason::Inputs(format!("input {slot} is {fact}, expected {expected}")));
        }
        let unknown = || LowerReason::Inputs(format!("the size of input {slot} is unknown"));
        let mut visits = VISITS;
        Ok(DirectionWeights {
            pieces: pieces(scope.graph, value, 2, DEPTH, &mut visits).ok_or_else(unknown)?,
            row: row.to_vec(),
        })
    }

    /// Concatenates the row blocks in `order`, each of `hidden` rows; block 0 starts at row `first`.
    fn blocks(&self, scope: &mut Scope<'_>, first: i64, order: &[i64], hidden: i64) -> Result<Value, LowerReason> {
        let mut list = Vec::new();
        for block in order {
            let begin = first + block * hidden;
            let rows_of_block = take(&self.pieces, begin, begin + hidden);
            list.extend(rows_of_block.ok_or_else(|| LowerReason::Inputs("its weights have too few rows".to_string()))?);
        }
        let mut parts = Vec::new();
        for piece in merge_adjacent(list) {
            let fact = scope.fact(piece.value);
            let row_count = rows(&fact, piece.lead).unwrap_or(piece.end);
            let mut shape = vec![Dim::Known(row_count)];
            shape.extend(self.row.iter().cloned());
            let flat = scope.reshape(piece.value, shape)?;
            let is_whole = piece.begin == 0 && piece.end == row_count;
            let (begin, end) = (Dim::Known(piece.begin), Dim::Known(piece.end));
            parts.push(if is_whole { flat } else { part(scope, flat, 0, begin, end)? });
        }
        scope.concat(&parts, 0)
    }
}

/// The configuration of a recurrent layer, without weights.
pub struct Layer {
    /// Time-major input sequence.
    pub x: Value,
    /// True if the source model's layout is batch-first.
    batch_first: bool,
    /// Per direction, true if it runs backward in time.
    pub reversed: Vec<bool>,
    pub hidden: i64,
    /// Sequence lengths, if they differ from the input's number of steps.
    pub lengths: Option<Lengths>,
    pub functions: Vec<Vec<Function>>,
    /// Clipping threshold for the activation inputs.
    pub clip: Option<f64>,
}

impl Layer {
    fn read(scope: &mut Scope<'_>, gates: i64, activations: &[&str]) -> Result<Layer, LowerReason> {
        let reversed = match scope.text("direction", "forward")?.as_str() {
            "forward" => vec![false],
            "reverse" => vec![true],
            "bidirectional" => vec![false, true],
            other => {
                return Err(LowerReason::attribute("direction", other, "forward, reverse or bidirectional"));
            }
        };
        let functions = cell::functions(scope, activations, reversed.len())?;
        let clip = if scope.is_set("clip") { Some(scope.float("clip", 0.0)?) } else { None };
        let batch_first = scope.flag("layout", false)?;
        let mut x = scope.value(0)?;
        if scope.fact(x).rank() != 3 {
            return Err(LowerReason::Inputs(format!("its input {} is not a batch of sequences", scope.fact(x))));
        }
        if batch_first {
            x = transpose(scope, x, &[1, 0, 2])?;
        }
        let gate_rows =
            scope.fact_of(2)?.shape.get(1).and_then(Dim::known).filter(|rows| *rows > 0 && rows % gates == 0);
        let gate_rows = gate_rows
            .ok_or_else(|| LowerReason::Inputs(format!("its recurrent weights are {:?}", scope.fact_of(2).ok())))?;
        let lengths = Lengths::read(scope, 4, x)?;
        Ok(Layer { x, batch_first, reversed, hidden: gate_rows / gates, lengths, functions, clip })
    }

    /// True if a core op supports the layer: no clipping, and the given activations in each direction.
    fn is_plain(&self, activations: &[&str]) -> bool {
        let has_activations = |list: &Vec<Function>| list.iter().zip(activations).all(|(f, name)| f.is(name));
        self.clip.is_none() && self.functions.iter().all(has_activations)
    }

    /// The initial state of a direction: a slice of input `slot`, or zeros.
    pub fn first(&self, scope: &mut Scope<'_>, slot: usize, direction: usize) -> Result<Value, LowerReason> {
        let fact = scope.fact(self.x);
        let shape = vec![fact.shape[1].clone(), Dim::Known(self.hidden)];
        let axis = usize::from(self.batch_first);
        let mut full_shape = shape.clone();
        full_shape.insert(axis, Dim::from(self.reversed.len()));
        let initial = match open_batch(scope, slot, &full_shape)? {
            Some(sample) => Some(scope.broadcast(sample, full_shape)?),
            None => scope.optional(slot)?,
        };
        let Some(initial) = initial else {
            let zero = scope.scalar(fact.dtype, 0.0)?;
            return scope.broadcast(zero, shape);
        };
        if scope.fact(initial).rank() != 3 {
            return Err(LowerReason::Inputs(format!("its initial state is {}", scope.fact(initial))));
        }
        let state = match self.reversed.len() {
            1 => initial,
            _ => part(scope, initial, axis, Dim::from(direction), Dim::from(direction + 1))?,
        };
        scope.reshape(state, shape)
    }

    /// Stacks the outputs `[T, N, H]` of all directions to `[T, D, N, H]`, or the batch-first layout.
    fn sequence(&self, scope: &mut Scope<'_>, directions: &[Value]) -> Result<Known, LowerReason> {
        let stacked = scope.stack(directions, 1)?;
        Ok(Known::Value(if self.batch_first { transpose(scope, stacked, &[2, 0, 1, 3])? } else { stacked }))
    }

    /// Stacks the final states `[N, H]` of all directions to `[D, N, H]`, or the batch-first layout.
    fn last(&self, scope: &mut Scope<'_>, directions: &[Value]) -> Result<Known, LowerReason> {
        scope.stack(directions, usize::from(self.batch_first)).map(Known::Value)
    }

    /// Runs a core op whose first outputs are y and the final state. With sequence lengths, a backward direction is
    /// reversed per sequence before and after, and padding is set to zero.
    fn run(
        &self,
        scope: &mut Scope<'_>,
        reverse: bool,
        h0: Value,
        op: impl FnOnce(bool) -> Op,
        weights: &[Value],
    ) -> Result<Vec<Value>, LowerReason> {
        let Some(lengths) = &self.lengths else { return scope.add_all(op(reverse), &[&[self.x], weights].concat()) };
        let x = if reverse { lengths.reverse(scope, self.x)? } else { self.x };
        let mut outputs = scope.add_all(op(false), &[&[x], weights].concat())?;
        outputs[1] = lengths.final_state(scope, outputs[0], h0)?;
        let y = if reverse { lengths.reverse(scope, outputs[0])? } else { outputs[0] };
        outputs[0] = lengths.mask(scope, y)?;
        Ok(outputs)
    }
}

fn transpose(scope: &mut Scope<'_>, x: Value, perm: &[usize]) -> Result<Value, LowerReason> {
    scope.add(Op::Transpose(crate::op::Transpose { perm: perm.to_vec() }), &[x])
}

struct Weights {
    w: DirectionWeights,
    r: DirectionWeights,
    b: Option<DirectionWeights>,
    gates: i64,
    hidden: i64,
}

impl Weights {
    fn read(scope: &mut Scope<'_>, layer: &Layer, gates: i64) -> Result<Weights, LowerReason> {
        let (directions, hidden) = (layer.reversed.len() as i64, layer.hidden);
        let gate_rows = gates * hidden;
        let fact = scope.fact(layer.x);
        let w = DirectionWeights::read(scope, 1, [directions, gate_rows], &fact.shape[2..])?;
        let r = DirectionWeights::read(scope, 2, [directions, gate_rows], &[Dim::Known(hidden)])?;
        let b =
            if scope.has(3) { Some(DirectionWeights::read(scope, 3, [directions, 2 * gate_rows], &[])?) } else { None };
        Ok(Weights { w, r, b, gates, hidden })
    }

    /// w_ih, w_hh, b_ih and b_hh of one direction, with the gates in `order`.
    fn of(&self, scope: &mut Scope<'_>, layer: &Layer, at: i64, order: &[i64]) -> Result<[Value; 4], LowerReason> {
        let (gate_rows, hidden) = (self.gates * self.hidden, self.hidden);
        let w = self.w.blocks(scope, at * gate_rows, order, hidden)?;
        let r = self.r.blocks(scope, at * gate_rows, order, hidden)?;
        let [b_w, b_r] = match &self.b {
            Some(b) => {
                let first = at * 2 * gate_rows;
                [b.blocks(scope, first, order, hidden)?, b.blocks(scope, first + gate_rows, order, hidden)?]
            }
            None => {
                let zero = scope.scalar(scope.fact(layer.x).dtype, 0.0)?;
                [scope.broadcast(zero, vec![Dim::Known(gate_rows)])?; 2]
            }
        };
        Ok([w, r, b_w, b_r])
    }
}

pub fn lstm(scope: &mut Scope<'_>) -> Outputs {
    let defaults = ["Sigmoid", "Tanh", "Tanh"];
    let layer = Layer::read(scope, 4, &defaults)?;
    let is_plain = layer.is_plain(&defaults) && !scope.has(7) && !scope.flag("input_forget", false)?;
    let weights = Weights::read(scope, &layer, 4)?;
    let (mut y, mut h, mut c) = (Vec::new(), Vec::new(), Vec::new());
    for (direction, &reverse) in layer.reversed.iter().enumerate() {
        let (h0, c0) = (layer.first(scope, 5, direction)?, layer.first(scope, 6, direction)?);
        let outputs = if is_plain {
            // i, f, c, o from i, o, f, c.
            let [w, r, b_w, b_r] = weights.of(scope, &layer, direction as i64, &[0, 2, 3, 1])?;
            layer.run(scope, reverse, h0, |reverse| Op::Lstm(Lstm { reverse }), &[w, r, b_w, b_r, h0, c0])?
        } else {
            let parts = weights.of(scope, &layer, direction as i64, &[0, 1, 2, 3])?;
            unrolled_rnn::lstm(scope, &layer, direction, parts, [h0, c0])?
        };
        y.push(outputs[0]);
        h.push(outputs[1]);
        c.push(outputs[2]);
    }
    let (y, h) = (layer.sequence(scope, &y)?, layer.last(scope, &h)?);
    let c = match is_plain && layer.lengths.is_some() {
        true => Known::Absent("the last cell state of an LSTM over sequences of different lengths"),
        false => layer.last(scope, &c)?,
    };
    Ok(vec![y, h, c])
}

pub fn gru(scope: &mut Scope<'_>) -> Outputs {
    let defaults = ["Sigmoid", "Tanh"];
    let layer = Layer::read(scope, 3, &defaults)?;
    let reset_after = scope.flag("linear_before_reset", false)?;
    let weights = Weights::read(scope, &layer, 3)?;
    let (mut y, mut h) = (Vec::new(), Vec::new());
    for (direction, &reverse) in layer.reversed.iter().enumerate() {
        let h0 = layer.first(scope, 5, direction)?;
        let outputs = if layer.is_plain(&defaults) {
            // r, z, n from z, r, h.
            let [w, r, b_w, b_r] = weights.of(scope, &layer, direction as i64, &[1, 0, 2])?;
            layer.run(scope, reverse, h0, |reverse| Op::Gru(Gru { reverse, reset_after }), &[w, r, b_w, b_r, h0])?
        } else {
            let parts = weights.of(scope, &layer, direction as i64, &[0, 1, 2])?;
            unrolled_rnn::gru(scope, &layer, direction, parts, h0, reset_after)?
        };
        y.push(outputs[0]);
        h.push(outputs[1]);
    }
    Ok(vec![layer.sequence(scope, &y)?, layer.last(scope, &h)?])
}

/// Elman RNN.
pub fn rnn(scope: &mut Scope<'_>) -> Outputs {
    let layer = Layer::read(scope, 1, &["Tanh"])?;
    let weights = Weights::read(scope, &layer, 1)?;
    let (mut y, mut h) = (Vec::new(), Vec::new());
    for (direction, &reverse) in layer.reversed.iter().enumerate() {
        let h0 = layer.first(scope, 5, direction)?;
        let parts = weights.of(scope, &layer, direction as i64, &[0])?;
        let activations = [("Tanh", Activation::Tanh), ("Relu", Activation::Relu), ("Sigmoid", Activation::Sigmoid)];
        let function = &layer.functions[direction][0];
        let activation = activations.into_iter().find(|(name, _)| function.is(name)).filter(|_| layer.clip.is_none());
        let outputs = match activation {
            Some((_, activation)) => {
                let [w, r, b_w, b_r] = parts;
                let op = |reverse| Op::Rnn(Rnn { reverse, activation });
                layer.run(scope, reverse, h0, op, &[w, r, b_w, b_r, h0])?
            }
            None => unrolled_rnn::rnn(scope, &layer, direction, parts, h0)?,
        };
        y.push(outputs[0]);
        h.push(outputs[1]);
    }
    Ok(vec![layer.sequence(scope, &y)?, layer.last(scope, &h)?])
}
