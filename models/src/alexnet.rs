//! AlexNet as in torchvision: the single-column version of Krizhevsky ("One weird trick", 2014, section 5.1),
//! 61,100,840 parameters. PipeDream's evaluation trains it on ImageNet.

use crate::builder::{Axis, Builder, Init};
use crate::choice::{Choice, ChoiceError, Given, Setting};
use crate::image::{Kernel, biased_convolution, flatten, max_pool, relu};
use crate::layer::{dense, dropout};
use crate::prediction::{Prediction, Target};
use crate::zoo::Entry;

pub const ENTRY: Entry = Entry {
    name: "alexnet",
    about: "AlexNet for ImageNet, 61.1 M parameters [Krizhevsky 2014]",
    choices: &[
        Choice::width("width", 64, "channels of the first convolution"),
        Choice::width("hidden", 4096, "width of the hidden linear layers"),
        Choice::width("classes", 1000, "number of classes"),
        Choice::number("size", 224, 63, 4096, "height and width of the image"),
        Choice::fraction("dropout", 0.5, "dropout rate before the hidden linear layers"),
    ],
    sizes: &[],
    small: &[
        ("width", Setting::Number(4)),
        ("hidden", Setting::Number(32)),
        ("classes", Setting::Number(5)),
        ("size", Setting::Number(63)),
    ],
    build,
};

fn build(net: &mut Builder, given: &Given, batch: Axis) -> Result<Prediction, ChoiceError> {
    let (first_width, size) = (given.number("width"), given.number("size"));
    let (hidden, classes, ratio) = (given.number("hidden"), given.number("classes"), given.fraction("dropout"));
    let mut y = net.input_f32("x", &[batch, Axis::Size(3), Axis::Size(size), Axis::Size(size)]);
    let (mut width, mut index) = (3, 0);
    let mut side = (size + 4 - 11) / 4 + 1;
    let mut next = || {
        index += 1;
        format!("features.{}", index - 1)
    };
    // Channels in units of the first, kernel size, pooling after it.
    for (next_width, kernel, is_pooled) in [(1, 11, true), (3, 5, true), (6, 3, false), (4, 3, false), (4, 3, true)] {
        let next_width = next_width * first_width;
        let kernel = match kernel {
            11 => Kernel { stride: [4, 4], pads: [2; 4], ..Kernel::square(width, next_width, 11, 4) },
            _ => Kernel::square(width, next_width, kernel, 1),
        };
        y = biased_convolution(net, &next(), &y, kernel);
        y = relu(net, &next(), &y);
        if is_pooled {
            y = max_pool(net, &next(), &y, 3, 2, 0);
            side = (side - 3) / 2 + 1;
        }
        width = next_width;
    }
    let y = flatten(net, "", &y);
    let y = dropout(net, "classifier.0", &y, ratio);
    let y = dense(net, "classifier.1", &y, width * side * side, hidden, Init::Kaiming);
    let y = relu(net, "classifier.2", &y);
    let y = dropout(net, "classifier.3", &y, ratio);
    let y = dense(net, "classifier.4", &y, hidden, hidden, Init::Kaiming);
    let y = relu(net, "classifier.5", &y);
    let y = dense(net, "classifier.6", &y, hidden, classes, Init::Xavier);
    Ok(Prediction { logits: y, shape: vec![batch, Axis::Size(classes)], target: Target::Class })
}
