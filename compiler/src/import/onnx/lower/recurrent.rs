//! Recurrent layers: `LSTM`.
//!
//! ONNX holds the weights of all directions in one tensor, with the gates in the order i, o, f, c; core ops have one
//! direction and PyTorch's order i, f, c, o. Exporters of PyTorch cut parameters in pieces to make the one from the
//! other. So a weight is looked at as a list of [`Piece`]s, rows of the values that it was put together from: put in the
//! order of the core op, pieces that lie beside each other are one again, and one that is a whole parameter is that
//! parameter, without any copy.

use super::movement::opened;
use super::slice::part;
use super::{Known, Outputs, Reason, Scope};
use crate::graph::Graph;
use crate::import::build::Build;
use crate::import::onnx::proto::attribute_proto::AttributeType;
use crate::op::{Concat, Lstm, Op, Value};
use crate::tensor::dim::Dim;
use crate::tensor::fact::Fact;

/// How deep a weight is looked into.
const DEPTH: usize = 16;

/// The most pieces that a weight is followed through.
const PIECES: usize = 256;

/// Rows of a value: its first `lead` axes together are the rows.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Piece {
    value: Value,
    lead: usize,
    begin: i64,
    end: i64,
}

/// The number of rows of a value, if it is known.
fn rows(fact: &Fact, lead: usize) -> Option<i64> {
    fact.shape.get(..lead)?.iter().try_fold(1i64, |n, d| n.checked_mul(d.known()?))
}

/// What a value was put together from; the value itself where that is not seen.
fn pieces(graph: &Graph, value: Value, lead: usize, depth: usize) -> Option<Vec<Piece>> {
    let fact = graph.fact(value);
    let whole = vec![Piece { value, lead, begin: 0, end: rows(fact, lead)? }];
    let seen = match &graph.node(value.node).op {
        _ if depth == 0 => None,
        Op::Concat(Concat { axis: 0 }) => {
            let parts = graph.inputs(value.node).into_iter().map(|part| pieces(graph, part, lead, depth - 1));
            parts.collect::<Option<Vec<_>>>().map(|parts| parts.concat())
        }
        Op::Slice(slice) => {
            let from = graph.inputs(value.node)[0];
            let shape = &graph.fact(from).shape;
            let untouched = |i: usize| slice.begin[i].is(0) && slice.end[i] == shape[i];
            let plain = slice.step.iter().all(|s| *s == 1) && (1..shape.len()).all(untouched);
            let range = slice.begin[0].known().zip(slice.end[0].known());
            // With two leading axes, an entry of the first one is many rows.
            let each = shape.get(1..lead).and_then(|dims| dims.iter().try_fold(1i64, |n, d| n.checked_mul(d.known()?)));
            match (plain, range, each) {
                (true, Some((begin, end)), Some(each)) => pieces(graph, from, lead, depth - 1)
                    .and_then(|all| take(&all, begin.checked_mul(each)?, end.checked_mul(each)?)),
                _ => None,
            }
        }
        Op::Reshape(_) => {
            // `[R, …]` as `[1, R, …]` or back.
            let from = graph.inputs(value.node)[0];
            let (new, old) = (&fact.shape, &graph.fact(from).shape);
            if lead == 2 && new.first().is_some_and(|d| d.is(1)) && new[1..] == old[..] {
                pieces(graph, from, 1, depth - 1)
            } else if lead == 1 && old.first().is_some_and(|d| d.is(1)) && old[1..] == new[..] {
                pieces(graph, from, 2, depth - 1)
            } else {
                None
            }
        }
        _ => None,
    };
    Some(seen.filter(|seen| seen.len() <= PIECES).unwrap_or(whole))
}

/// Rows `begin..end` of what the pieces make up together.
fn take(pieces: &[Piece], begin: i64, end: i64) -> Option<Vec<Piece>> {
    let (mut at, mut taken) = (0i64, Vec::new());
    for piece in pieces {
        let size = piece.end - piece.begin;
        let (low, high) = ((begin - at).clamp(0, size), (end - at).clamp(0, size));
        if low < high {
            taken.push(Piece { begin: piece.begin + low, end: piece.begin + high, ..*piece });
        }
        at += size;
    }
    (0 <= begin && begin <= end && end <= at).then_some(taken)
}

/// The same rows with neighbours as one piece.
fn joined(pieces: Vec<Piece>) -> Vec<Piece> {
    let mut list: Vec<Piece> = Vec::new();
    for piece in pieces {
        match list.last_mut() {
            Some(last) if (last.value, last.lead, last.end) == (piece.value, piece.lead, piece.begin) => {
                last.end = piece.end;
            }
            _ => list.push(piece),
        }
    }
    list
}

/// A weight of all directions, as rows.
struct Stack {
    pieces: Vec<Piece>,
    /// The shape of a row.
    row: Vec<Dim>,
}

impl Stack {
    /// Input `slot`, `[directions, gates·hidden, …]`.
    fn read(
        scope: &mut Scope<'_>,
        slot: usize,
        [directions, gate_rows]: [i64; 2],
        row: &[Dim],
    ) -> Result<Stack, Reason> {
        let value = scope.value(slot)?;
        let fact = scope.fact(value);
        let mut expected = vec![Dim::Known(directions), Dim::Known(gate_rows)];
        expected.extend(row.iter().cloned());
        if fact.shape != expected {
            let expected = Fact::new(fact.dtype, expected);
            return Err(Reason::Inputs(format!("input {slot} is {fact}, expected {expected}")));
        }
        let unknown = || Reason::Inputs(format!("the size of input {slot} is not known"));
        Ok(Stack { pieces: pieces(scope.graph, value, 2, DEPTH).ok_or_else(unknown)?, row: row.to_vec() })
    }

    /// These blocks of `hidden` rows, counted from `first`, one behind the other.
    fn blocks(&self, scope: &mut Scope<'_>, first: i64, order: &[i64], hidden: i64) -> Result<Value, Reason> {
        let mut list = Vec::new();
        for block in order {
            let begin = first + block * hidden;
            let taken = take(&self.pieces, begin, begin + hidden);
            list.extend(taken.ok_or_else(|| Reason::Inputs("its weights have too few rows".to_string()))?);
        }
        let mut parts = Vec::new();
        for piece in joined(list) {
            let fact = scope.fact(piece.value);
            let all = rows(&fact, piece.lead).unwrap_or(piece.end);
            let mut shape = vec![Dim::Known(all)];
            shape.extend(self.row.iter().cloned());
            let flat = scope.reshape(piece.value, shape)?;
            let whole = piece.begin == 0 && piece.end == all;
            let (begin, end) = (Dim::Known(piece.begin), Dim::Known(piece.end));
            parts.push(if whole { flat } else { part(scope, flat, 0, begin, end)? });
        }
        match parts.as_slice() {
            [one] => Ok(*one),
            _ => scope.add(Op::Concat(Concat { axis: 0 }), &parts),
        }
    }
}

/// What a recurrent layer has besides its weights.
struct Layer {
    /// The sequence, time first.
    x: Value,
    /// Whether the batch comes first in the source model.
    batch_first: bool,
    /// Which directions run backward.
    reversed: Vec<bool>,
    hidden: i64,
}

impl Layer {
    fn read(scope: &mut Scope<'_>, gates: i64, activations: &[&str]) -> Result<Layer, Reason> {
        let reversed = match scope.text("direction", "forward")?.as_str() {
            "forward" => vec![false],
            "reverse" => vec![true],
            "bidirectional" => vec![false, true],
            other => {
                let expected = "forward, reverse or bidirectional";
                return Err(Reason::Attribute { name: "direction", found: other.to_string(), expected });
            }
        };
        if let Some(given) = scope.texts("activations")? {
            let usual = given.chunks(activations.len()).all(|part| {
                part.len() == activations.len() && part.iter().zip(activations).all(|(a, b)| a.eq_ignore_ascii_case(b))
            });
            if !usual {
                return Err(Reason::Unsupported(format!("a recurrent layer with the activations {given:?}")));
            }
        }
        if scope.is_set("clip") {
            return Err(Reason::Unsupported("a recurrent layer that clips".to_string()));
        }
        let batch_first = scope.flag("layout", false)?;
        let mut x = scope.value(0)?;
        if scope.fact(x).rank() != 3 {
            return Err(Reason::Inputs(format!("its input {} is no batch of sequences", scope.fact(x))));
        }
        if batch_first {
            x = turned(scope, x, &[1, 0, 2])?;
        }
        let wide = scope.fact_of(2)?.shape.get(1).and_then(Dim::known).filter(|rows| *rows > 0 && rows % gates == 0);
        let wide =
            wide.ok_or_else(|| Reason::Inputs(format!("its recurrent weights are {:?}", scope.fact_of(2).ok())))?;
        Ok(Layer { x, batch_first, reversed, hidden: wide / gates })
    }

    /// Sequences of one length only: the given lengths are that of the input.
    fn full_length(&self, scope: &Scope<'_>, slot: usize) -> Result<(), Reason> {
        let Some(lengths) = scope.integers(slot, "the lengths of the sequences")? else { return Ok(()) };
        let steps = scope.graph.fact(self.x).shape[0].known();
        match lengths.iter().all(|length| Some(*length) == steps) {
            true => Ok(()),
            false => Err(Reason::Unsupported("a batch of sequences of different lengths".to_string())),
        }
    }

    /// The state before the first step of a direction: part of input `slot`, or zeros.
    fn first(&self, scope: &mut Scope<'_>, slot: usize, direction: usize) -> Result<Value, Reason> {
        let fact = scope.fact(self.x);
        let shape = vec![fact.shape[1].clone(), Dim::Known(self.hidden)];
        let axis = usize::from(self.batch_first);
        let mut all = shape.clone();
        all.insert(axis, Dim::from(self.reversed.len()));
        let given = match opened(scope, slot, &all)? {
            Some(sample) => Some(scope.broadcast(sample, all)?),
            None => scope.optional(slot)?,
        };
        let Some(given) = given else {
            let zero = scope.scalar(fact.dtype, 0.0)?;
            return scope.broadcast(zero, shape);
        };
        if scope.fact(given).rank() != 3 {
            return Err(Reason::Inputs(format!("its first state is {}", scope.fact(given))));
        }
        let own = match self.reversed.len() {
            1 => given,
            _ => part(scope, given, axis, Dim::from(direction), Dim::from(direction + 1))?,
        };
        scope.reshape(own, shape)
    }

    /// The results of all directions: `[T, N, H]` each as `[T, D, N, H]`, as the layout says.
    fn sequence(&self, scope: &mut Scope<'_>, each: &[Value]) -> Result<Value, Reason> {
        let mut parts = Vec::new();
        for y in each {
            let mut shape = scope.fact(*y).shape;
            shape.insert(1, Dim::Known(1));
            parts.push(scope.reshape(*y, shape)?);
        }
        let all = if let [one] = parts[..] { one } else { scope.add(Op::Concat(Concat { axis: 1 }), &parts)? };
        if self.batch_first { turned(scope, all, &[2, 0, 1, 3]) } else { Ok(all) }
    }

    /// The last states of all directions: `[N, H]` each as `[D, N, H]`, as the layout says.
    fn last(&self, scope: &mut Scope<'_>, each: &[Value]) -> Result<Value, Reason> {
        let axis = usize::from(self.batch_first);
        let mut parts = Vec::new();
        for h in each {
            let mut shape = scope.fact(*h).shape;
            shape.insert(axis, Dim::Known(1));
            parts.push(scope.reshape(*h, shape)?);
        }
        if let [one] = parts[..] { Ok(one) } else { scope.add(Op::Concat(Concat { axis }), &parts) }
    }
}

fn turned(scope: &mut Scope<'_>, x: Value, perm: &[usize]) -> Result<Value, Reason> {
    scope.add(Op::Transpose(crate::op::Transpose { perm: perm.to_vec() }), &[x])
}

/// A long short-term memory.
pub fn lstm(scope: &mut Scope<'_>) -> Outputs {
    let layer = Layer::read(scope, 4, &["Sigmoid", "Tanh", "Tanh"])?;
    if scope.flag("input_forget", false)? {
        return Err(Reason::Unsupported("an LSTM with coupled gates".to_string()));
    }
    if scope.has(7) {
        return Err(Reason::Unsupported("an LSTM with peepholes".to_string()));
    }
    layer.full_length(scope, 4)?;
    let (directions, hidden) = (layer.reversed.len() as i64, layer.hidden);
    let wide = 4 * hidden;
    let fact = scope.fact(layer.x);
    let w = Stack::read(scope, 1, [directions, wide], &fact.shape[2..])?;
    let r = Stack::read(scope, 2, [directions, wide], &[Dim::Known(hidden)])?;
    let b = if scope.has(3) { Some(Stack::read(scope, 3, [directions, 2 * wide], &[])?) } else { None };
    // i, f, c, o among i, o, f, c.
    let order = [0, 2, 3, 1];
    let (mut y, mut h, mut c) = (Vec::new(), Vec::new(), Vec::new());
    for (direction, &reverse) in layer.reversed.iter().enumerate() {
        let at = direction as i64;
        let w = w.blocks(scope, at * wide, &order, hidden)?;
        let r = r.blocks(scope, at * wide, &order, hidden)?;
        let [b_w, b_r] = match &b {
            Some(b) => {
                let first = at * 2 * wide;
                [b.blocks(scope, first, &order, hidden)?, b.blocks(scope, first + wide, &order, hidden)?]
            }
            None => {
                let zero = scope.scalar(fact.dtype, 0.0)?;
                [scope.broadcast(zero, vec![Dim::Known(wide)])?; 2]
            }
        };
        let (h0, c0) = (layer.first(scope, 5, direction)?, layer.first(scope, 6, direction)?);
        let made = scope.add_all(Op::Lstm(Lstm { reverse }), &[layer.x, w, r, b_w, b_r, h0, c0])?;
        y.push(made[0]);
        h.push(made[1]);
        c.push(made[2]);
    }
    let (y, h, c) = (layer.sequence(scope, &y)?, layer.last(scope, &h)?, layer.last(scope, &c)?);
    Ok(vec![Known::Value(y), Known::Value(h), Known::Value(c)])
}

impl Scope<'_> {
    /// A list of words, `None` when it is not there.
    fn texts(&self, name: &'static str) -> Result<Option<Vec<String>>, Reason> {
        let Some(found) = self.node.attributes.iter().find(|a| a.name() == name) else { return Ok(None) };
        if !matches!(found.r#type(), AttributeType::Strings | AttributeType::Undefined) {
            let found = format!("of type {}", found.r#type().as_str_name());
            return Err(Reason::Attribute { name, found, expected: "a list of words" });
        }
        Ok(Some(found.strings.iter().map(|s| String::from_utf8_lossy(s).into_owned()).collect()))
    }
}
