//! A small residual network with batch normalisation for small images (He et al., 2016).
//!
//! ```text
//! x ─ conv 3×3 ─ bn ─ relu ─ block 1 (same width) ─ block 2 (twice as wide, half as high) ─ mean ─ fc ─ logits
//! ```
//!
//! The blocks are the basic ones of `resnet`. On the bundled digits it reaches 99 % test accuracy after twenty epochs.

use crate::builder::{Axis, Builder, Init};
use crate::choice::{Choice, ChoiceError, Given};
use crate::digits::SAMPLE;
use crate::image::{Kernel, batch_norm, convolution, mean_of_image, relu};
use crate::layer::dense;
use crate::prediction::{Prediction, Target};
use crate::resnet::basic;
use crate::zoo::{Entry, Size};

pub const ENTRY: Entry = Entry {
    name: "residual-cnn",
    about: "residual network with batch normalisation for 8x8 digits",
    choices: &[
        Choice::width("hidden", 16, "channels of the first of two groups; the second has twice as many"),
        Choice::number("layers", 1, 1, 10_000, "blocks in each group"),
        Choice::width("classes", 10, "number of classes"),
    ],
    sizes: &[Size { name: "cnn", about: "the same", settings: &[] }],
    small: &[],
    build,
};

/// Input `x`; modules named as in torchvision (`conv1`, `bn1`, `layer1.0.conv1`, `fc`).
fn build(net: &mut Builder, given: &Given, batch: Axis) -> Result<Prediction, ChoiceError> {
    let classes = given.number("classes");
    let mut width = given.number("hidden");
    let [channels, height, image_width] = SAMPLE;
    let x = net.input_f32("x", &[batch, Axis::Size(channels), Axis::Size(height), Axis::Size(image_width)]);
    let y = convolution(net, "conv1", &x, Kernel::square(channels, width, 3, 1));
    let y = batch_norm(net, "bn1", &y, width);
    let mut y = relu(net, "relu", &y);
    for (group, next) in [width, 2 * width].into_iter().enumerate() {
        for index in 0..given.number("layers") {
            let stride = if group > 0 && index == 0 { 2 } else { 1 };
            y = basic(net, &format!("layer{}.{index}", group + 1), &y, [width, next], stride);
            width = next;
        }
    }
    let y = mean_of_image(net, "avgpool", &y);
    let y = dense(net, "fc", &y, width, classes, Init::Xavier);
    Ok(Prediction { logits: y, shape: vec![batch, Axis::Size(classes)], target: Target::Class })
}
