//! GNMT, translation by an LSTM encoder and decoder with attention (Wu et al., 2016), in the reference form of NVIDIA
//! and MLPerf. PipeDream's evaluation trains it as GNMT-8 and GNMT-16.
//!
//! ```text
//! encoder: embedding ─ bidirectional LSTM ─ LSTM ─ LSTM + ─ LSTM + ─ …  ─┐
//! decoder: embedding ─ LSTM ─ attention over the encoder output ─────────┤ concatenated to the input of every later layer
//!                      └───────────────────── LSTM ─ LSTM + ─ …  ─ linear ─ logits
//! ```
//!
//! Half of the layers belong to the encoder. `+` is a residual connection. The attention is Bahdanau's in normalised
//! form: g·v/|v| · tanh(q + k + b) for every pair of steps.
//!
//! | size        | layers | parameters  | published                                                          |
//! | ---         | ---    | ---         | ---                                                                |
//! | gnmt-mlperf | 4 + 4  | 160,671,297 | 160 M, one embedding for both languages (`shared`)                 |
//! | gnmt8       | 4 + 4  | 193,766,977 | 193,765,952 in PipeDream's profile, whose attention has no g and b |
//! | gnmt16      | 8 + 8  | 277,718,593 | not published                                                      |
//!
//! Sentences have full length, without a padding mask. Inputs are batch first, recurrence is time-major.

use crate::builder::{Axis, Builder, Init, Value, attr};
use crate::choice::{Choice, ChoiceError, Given, Setting};
use crate::layer::{concatenate, dropout, linear, projection, transpose};
use crate::prediction::{Prediction, Target};
use crate::recurrent::Lstm;
use crate::zoo::{Entry, Size};

pub const ENTRY: Entry = Entry {
    name: "gnmt",
    about: "GNMT-8: 4 + 4 LSTM layers with attention, 194 M parameters [Wu et al. 2016]",
    choices: &[
        Choice::number("layers", 8, 4, 1_000, "LSTM layers, an even number; half of them are the encoder's"),
        Choice::width("hidden", 1024, "width of embeddings and states"),
        Choice::width("vocabulary", 32_320, "number of different tokens in each language"),
        Choice::number("source", 50, 1, 65_536, "tokens in a source sentence"),
        Choice::number("target", 50, 1, 65_536, "tokens in a target sentence"),
        Choice::truth("shared", false, "true if both languages share one embedding"),
        Choice::fraction("dropout", 0.2, "dropout rate of every layer's input"),
    ],
    sizes: &[
        Size { name: "gnmt8", about: "194 M parameters", settings: &[("layers", Setting::Number(8))] },
        Size { name: "gnmt16", about: "278 M", settings: &[("layers", Setting::Number(16))] },
        Size { name: "gnmt-mlperf", about: "161 M", settings: &[("shared", Setting::Truth(true))] },
    ],
    small: &[
        ("hidden", Setting::Number(6)),
        ("vocabulary", Setting::Number(11)),
        ("source", Setting::Number(4)),
        ("target", Setting::Number(3)),
    ],
    build,
};

/// Inputs `source` and `target` (i64, batch × time; the target shifted by one), logits batch × time × vocabulary.
fn build(net: &mut Builder, given: &Given, batch: Axis) -> Result<Prediction, ChoiceError> {
    let layers = given.number("layers");
    if !layers.is_multiple_of(2) {
        return Err(given.refuse("layers", "half of them are the encoder's"));
    }
    let (width, vocabulary) = (given.number("hidden"), given.number("vocabulary"));
    let (source_length, target_length) = (given.number("source"), given.number("target"));
    let ratio = given.fraction("dropout");
    let source = net.input_i64("source", &[batch, Axis::Size(source_length)]);
    let target = net.input_i64("target", &[batch, Axis::Size(target_length)]);
    let table = |net: &mut Builder, name: &str| {
        net.parameter(&format!("{name}.weight"), &[vocabulary, width], Init::Within(0.1))
    };
    let [source_table, target_table] = if given.truth("shared") {
        let shared_table = table(net, "embedding");
        [shared_table.clone(), shared_table]
    } else {
        ["encoder.embedder", "decoder.embedder"].map(|name| table(net, name))
    };
    let words = |net: &mut Builder, path: &str, table: &Value, tokens: &Value| {
        let rows = net.node(path, "Gather", &[table, tokens], vec![]);
        transpose(net, path, &rows, &[1, 0, 2])
    };

    let x = words(net, "encoder.embedder", &source_table, &source);
    let x = dropout(net, "encoder.dropout", &x, ratio);
    let bidirectional = Lstm { bidirectional: true, ..Lstm::plain(width, width) };
    let x = bidirectional.build(net, "encoder.rnn_layers.0", &x);
    let x = dropout(net, "encoder.dropout", &x, ratio);
    let mut x = Lstm::plain(2 * width, width).build(net, "encoder.rnn_layers.1", &x);
    for layer in 2..layers / 2 {
        x = residual(net, "encoder", layer, &x, None, [width, width], ratio);
    }

    let y = words(net, "decoder.embedder", &target_table, &target);
    let y = dropout(net, "decoder.dropout", &y, ratio);
    let mut y = Lstm::plain(width, width).build(net, "decoder.att_rnn.rnn", &y);
    let context = attention(net, "decoder.att_rnn.attn", &y, &x, width);
    for layer in 0..layers / 2 - 1 {
        y = residual(net, "decoder", layer, &y, Some(&context), [2 * width, width], ratio);
    }
    let y = transpose(net, "decoder", &y, &[1, 0, 2]);
    let logits = linear(net, "decoder.classifier.classifier", &y, width, vocabulary);
    Ok(Prediction {
        logits,
        shape: vec![batch, Axis::Size(target_length), Axis::Size(vocabulary)],
        target: Target::Token,
    })
}

/// An LSTM layer with a residual connection (except the decoder's first), whose input is `x` and, in the decoder, the
/// attention context.
fn residual(
    net: &mut Builder,
    side: &str,
    layer: usize,
    x: &Value,
    context: Option<&Value>,
    [from, to]: [usize; 2],
    ratio: f64,
) -> Value {
    let input = match context {
        Some(context) => concatenate(net, side, &[x, context], 2),
        None => x.clone(),
    };
    let input = dropout(net, &format!("{side}.dropout"), &input, ratio);
    let y = Lstm::plain(from, to).build(net, &format!("{side}.rnn_layers.{layer}"), &input);
    if layer == 0 { y } else { net.node(side, "Add", &[&y, x], vec![]) }
}

/// For every decoder step, the mean of the encoder states weighted by attention.
fn attention(net: &mut Builder, path: &str, query: &Value, memory: &Value, width: usize) -> Value {
    let at = |name: &str| format!("{path}.{name}");
    let bound = Init::Within(1.0 / (width as f64).sqrt());
    let direction = net.parameter(&at("linear_att"), &[width], bound);
    let scale = net.parameter(&at("normalize_scalar"), &[1], bound);
    let bias = net.parameter(&at("normalize_bias"), &[width], Init::Zeros);
    let axis = |net: &mut Builder, axis: i64| net.constant_i64(path, &[axis]);
    let [query, memory] = [query, memory].map(|x| transpose(net, path, x, &[1, 0, 2]));
    let q = projection(net, &at("linear_q"), &query, width, width);
    let k = projection(net, &at("linear_k"), &memory, width, width);
    let [axis_1, axis_2] = [axis(net, 1), axis(net, 2)];
    let q = net.node(path, "Unsqueeze", &[&q, &axis_2], vec![]);
    let k = net.node(path, "Unsqueeze", &[&k, &axis_1], vec![]);
    let sum = net.node(path, "Add", &[&q, &k], vec![]);
    let sum = net.node(path, "Add", &[&sum, &bias], vec![]);
    let hidden = net.node(path, "Tanh", &[&sum], vec![]);
    let length = net.node(path, "ReduceL2", &[&direction], vec![attr::int("keepdims", 1)]);
    let unit = net.node(path, "Div", &[&direction, &length], vec![]);
    let unit = net.node(path, "Mul", &[&unit, &scale], vec![]);
    let unit = net.node(path, "Unsqueeze", &[&unit, &axis_1], vec![]);
    let scores = net.node(path, "MatMul", &[&hidden, &unit], vec![]);
    let last = axis(net, 3);
    let scores = net.node(path, "Squeeze", &[&scores, &last], vec![]);
    let weights = net.node(path, "Softmax", &[&scores], vec![attr::int("axis", -1)]);
    let context = net.node(path, "MatMul", &[&weights, &memory], vec![]);
    transpose(net, path, &context, &[1, 0, 2])
}
