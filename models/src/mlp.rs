//! Multilayer perceptrons: linear layers with ReLU. The default is for 8×8 digits: 64-128-64-10, 17,226 parameters.

use crate::builder::{Axis, Builder, Init};
use crate::choice::{Choice, ChoiceError, Given};
use crate::digits::SAMPLE;
use crate::image::{flatten, relu};
use crate::layer::dense;
use crate::prediction::{Prediction, Target};
use crate::zoo::Entry;

pub const ENTRY: Entry = Entry {
    name: "mlp",
    about: "perceptron for 8x8 digits, 64-128-64-10",
    choices: &[
        Choice::width("hidden", 128, "width of every hidden layer [default of the second: 64]"),
        Choice::number("layers", 2, 1, 10_000, "number of hidden layers"),
        Choice::width("classes", 10, "number of classes"),
        Choice::width("inputs", 64, "width of the input, which then has one dimension instead of a digit's three"),
    ],
    sizes: &[],
    small: &[],
    build,
};

/// Input `x`, layers `fc1`, `fc2`, … with Kaiming weights and zero biases.
fn build(net: &mut Builder, given: &Given, batch: Axis) -> Result<Prediction, ChoiceError> {
    let (width, layers) = (given.number("hidden"), given.number("layers"));
    let hidden = if given.is_set("hidden") || given.is_set("layers") { vec![width; layers] } else { vec![width, 64] };
    let classes = given.number("classes");
    let mut width = given.number("inputs");
    let mut y = if given.is_set("inputs") {
        net.input_f32("x", &[batch, Axis::Size(width)])
    } else {
        let sample = SAMPLE.map(Axis::Size);
        let x = net.input_f32("x", &[batch, sample[0], sample[1], sample[2]]);
        flatten(net, "flatten", &x)
    };
    for (layer, &next) in hidden.iter().chain([&classes]).enumerate() {
        y = dense(net, &format!("fc{}", layer + 1), &y, width, next, Init::Kaiming);
        if layer < hidden.len() {
            y = relu(net, &format!("relu{}", layer + 1), &y);
        }
        width = next;
    }
    Ok(Prediction { logits: y, shape: vec![batch, Axis::Size(classes)], target: Target::Class })
}
