//! S2VT, sequence to sequence: video to text (Venugopalan et al., ICCV 2015, section 3), which PipeDream's evaluation
//! trains on MSVD. Frame features come from a separate image network.
//!
//! ```text
//! time      1 … frames          frames + 1 … frames + words
//! LSTM 1    embedded frames     zeros
//! LSTM 2    its state, zeros    its state, the words so far    ─ linear ─ logits
//! ```
//!
//! With the paper's sizes (features 4,096, embeddings 500, states 1,000, the 12,594 words of MSVD, 80 steps) it has
//! 36,968,094 parameters; neither paper publishes a count.

use crate::builder::{Axis, Builder, Init, Value};
use crate::choice::{Choice, ChoiceError, Given, Setting};
use crate::layer::{concatenate, linear, part, transpose};
use crate::prediction::{Prediction, Target};
use crate::recurrent::Lstm;
use crate::zoo::Entry;

pub const ENTRY: Entry = Entry {
    name: "s2vt",
    about: "S2VT: two LSTM layers that caption a video, 37 M parameters [Venugopalan et al. 2015]",
    choices: &[
        Choice::width("features", 4096, "features of a frame"),
        Choice::width("embedding", 500, "width of embedded frames and words"),
        Choice::width("hidden", 1000, "width of the states"),
        Choice::width("vocabulary", 12_594, "number of different words"),
        Choice::number("frames", 60, 1, 65_536, "frames of a video"),
        Choice::number("words", 20, 1, 65_536, "words of a caption"),
    ],
    sizes: &[],
    small: &[
        ("features", Setting::Number(8)),
        ("embedding", Setting::Number(4)),
        ("hidden", Setting::Number(6)),
        ("vocabulary", Setting::Number(11)),
        ("frames", Setting::Number(4)),
        ("words", Setting::Number(3)),
    ],
    build,
};

/// Inputs `frames` (f32, batch × frames × features) and `words` (i64, batch × words; shifted by one), logits batch ×
/// words × vocabulary.
fn build(net: &mut Builder, given: &Given, batch: Axis) -> Result<Prediction, ChoiceError> {
    let (features, width, hidden) = (given.number("features"), given.number("embedding"), given.number("hidden"));
    let (frame_count, word_count, vocabulary) =
        (given.number("frames"), given.number("words"), given.number("vocabulary"));
    let frames = net.input_f32("frames", &[batch, Axis::Size(frame_count), Axis::Size(features)]);
    let words = net.input_i64("words", &[batch, Axis::Size(word_count)]);
    let table = net.parameter("words.weight", &[vocabulary, width], Init::Within(0.1));
    let words = net.node("words", "Gather", &[&table, &words], vec![]);
    let words = transpose(net, "words", &words, &[1, 0, 2]);
    let frames = linear(net, "frames", &frames, features, width);
    let frames = transpose(net, "frames", &frames, &[1, 0, 2]);

    let x = pad(net, "frames", &frames, [0, word_count]);
    let x = Lstm::plain(width, hidden).build(net, "lstm1", &x);
    let words = pad(net, "words", &words, [frame_count, 0]);
    let x = concatenate(net, "lstm2", &[&x, &words], 2);
    let x = Lstm::plain(hidden + width, hidden).build(net, "lstm2", &x);
    let x = part(net, "out", &x, 0, frame_count as i64, (frame_count + word_count) as i64);
    let x = transpose(net, "out", &x, &[1, 0, 2]);
    let logits = linear(net, "out", &x, hidden, vocabulary);
    Ok(Prediction { logits, shape: vec![batch, Axis::Size(word_count), Axis::Size(vocabulary)], target: Target::Token })
}

/// Pads a time-major sequence with zero steps.
fn pad(net: &mut Builder, path: &str, x: &Value, [before, after]: [usize; 2]) -> Value {
    let pads = net.constant_i64(path, &[before as i64, 0, 0, after as i64, 0, 0]);
    net.node(path, "Pad", &[x, &pads], vec![])
}
