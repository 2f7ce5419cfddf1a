//! AWD-LSTM (Merity, Keskar and Socher, ICLR 2018): an LSTM language model with dropout on the recurrent weights. Its
//! other dropout masks are shared by all time steps, and its head is tied to the embedding. PipeDream's evaluation
//! trains it with six layers.
//!
//! | size       | layers | vocabulary | parameters | published            |
//! | ---        | ---    | ---        | ---        | ---                  |
//! | awd-lm     | 3      | 10,000     | 24,221,600 | 24 M (Penn Treebank) |
//! | awd-lm-wt2 | 3      | 33,278     | 33,556,078 | 33 M (WikiText-2)    |
//! | awdlm6     | 6      | 33,278     | 65,323,678 | not published        |
//!
//! Every sequence starts from a zero state; states are not carried from batch to batch.

use crate::builder::{Axis, Builder, Init};
use crate::choice::{Choice, ChoiceError, Given, Setting};
use crate::layer::{dropout, locked_dropout, product, transpose};
use crate::prediction::{Prediction, Target};
use crate::recurrent::Lstm;
use crate::zoo::{Entry, Size};

pub const ENTRY: Entry = Entry {
    name: "awd-lm",
    about: "AWD-LSTM for Penn Treebank: 3 layers, tied, 24 M parameters [Merity et al. 2018]",
    choices: &[
        Choice::number("layers", 3, 1, 1_000, "LSTM layers"),
        Choice::width("hidden", 1150, "width of all states but the last"),
        Choice::width("embedding", 400, "width of the embedding and the last state"),
        Choice::width("vocabulary", 10_000, "number of different tokens"),
        Choice::number("context", 70, 1, 65_536, "tokens in a sequence"),
        Choice::fraction("dropout", 0.4, "dropout rate of the embedding and of the last states"),
        Choice::fraction("hidden-dropout", 0.25, "dropout rate of the states between layers"),
        Choice::fraction("weight-drop", 0.5, "dropout rate of the recurrent weights"),
        Choice::fraction("word-dropout", 0.1, "dropout rate of words of the vocabulary"),
    ],
    sizes: &[
        Size { name: "awd-lm-wt2", about: "33.6 M parameters", settings: &[("vocabulary", Setting::Number(33_278))] },
        Size {
            name: "awdlm6",
            about: "65.3 M",
            settings: &[("layers", Setting::Number(6)), ("vocabulary", Setting::Number(33_278))],
        },
    ],
    small: &[
        ("hidden", Setting::Number(6)),
        ("embedding", Setting::Number(4)),
        ("vocabulary", Setting::Number(11)),
        ("context", Setting::Number(5)),
    ],
    build,
};

/// Input `tokens` (i64, batch × time), logits batch × time × vocabulary.
fn build(net: &mut Builder, given: &Given, batch: Axis) -> Result<Prediction, ChoiceError> {
    let (layers, hidden, width) = (given.number("layers"), given.number("hidden"), given.number("embedding"));
    let (vocabulary, context) = (given.number("vocabulary"), given.number("context"));
    let (outer, inner) = (given.fraction("dropout"), given.fraction("hidden-dropout"));
    let tokens = net.input_i64("tokens", &[batch, Axis::Size(context)]);
    let table = net.parameter("encoder.weight", &[vocabulary, width], Init::Within(0.1));
    let rows = match given.fraction("word-dropout") {
        0.0 => table.clone(),
        ratio => {
            let shape = net.constant_i64("encoder", &[vocabulary as i64, 1]);
            let ones = net.fill("encoder", &shape, 1.0);
            let noise = dropout(net, "encoder", &ones, ratio);
            net.node("encoder", "Mul", &[&table, &noise], vec![])
        }
    };
    let x = net.node("encoder", "Gather", &[&rows, &tokens], vec![]);
    let x = transpose(net, "encoder", &x, &[1, 0, 2]);
    // One dropout mask for all time steps.
    let locked = [1, 0, 0];
    let mut x = locked_dropout(net, "lockdrop", &x, &locked, outer);
    for layer in 0..layers {
        let last = layer + 1 == layers;
        let (from, to) = (if layer == 0 { width } else { hidden }, if last { width } else { hidden });
        let lstm = Lstm { weight_drop: given.fraction("weight-drop"), ..Lstm::plain(from, to) };
        x = lstm.build(net, &format!("rnns.{layer}"), &x);
        x = locked_dropout(net, "lockdrop", &x, &locked, if last { outer } else { inner });
    }
    let x = transpose(net, "decoder", &x, &[1, 0, 2]);
    let bias = net.parameter("decoder.bias", &[vocabulary], Init::Zeros);
    let logits = product(net, "decoder", &x, &table);
    let logits = net.node("decoder", "Add", &[&logits, &bias], vec![]);
    Ok(Prediction { logits, shape: vec![batch, Axis::Size(context), Axis::Size(vocabulary)], target: Target::Token })
}
