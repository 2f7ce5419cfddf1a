//! VGG (Simonyan and Zisserman, ICLR 2015, table 1: A, B, D and E), optionally with batch normalisation after every
//! convolution, as in torchvision. PipeDream's evaluation trains VGG-16.
//!
//! Five groups of 3×3 convolutions, each followed by pooling to half the height and width, then three linear layers.
//!
//! | depth | convolutions     | parameters  | paper | normalised  |
//! | ---   | ---              | ---         | ---   | ---         |
//! | 11    | 1, 1, 2, 2, 2    | 132,863,336 | 133 M | 132,868,840 |
//! | 13    | 2, 2, 2, 2, 2    | 133,047,848 | 133 M | 133,053,736 |
//! | 16    | 2, 2, 3, 3, 3    | 138,357,544 | 138 M | 138,365,992 |
//! | 19    | 2, 2, 4, 4, 4    | 143,667,240 | 144 M | 143,678,248 |

use crate::builder::{Axis, Builder, Init};
use crate::choice::{Choice, ChoiceError, Given, Setting};
use crate::image::{Kernel, batch_norm, biased_convolution, flatten, max_pool, relu};
use crate::layer::{dense, dropout};
use crate::prediction::{Prediction, Target};
use crate::zoo::{Entry, Size};

pub const ENTRY: Entry = Entry {
    name: "vgg",
    about: "VGG-16 for ImageNet [Simonyan and Zisserman 2015]",
    choices: &[
        Choice::number("depth", 16, 11, 19, "11, 13, 16 or 19 layers"),
        Choice::width("width", 64, "channels of the first group"),
        Choice::width("hidden", 4096, "width of the hidden linear layers"),
        Choice::width("classes", 1000, "number of classes"),
        Choice::number("size", 224, 32, 4096, "height and width of the image, a multiple of 32"),
        Choice::truth("normalised", false, "add batch normalisation after every convolution"),
        Choice::fraction("dropout", 0.5, "dropout rate of the hidden linear layers"),
    ],
    sizes: &[
        Size { name: "vgg11", about: "132.9 M parameters", settings: &[("depth", Setting::Number(11))] },
        Size { name: "vgg13", about: "133.0 M", settings: &[("depth", Setting::Number(13))] },
        Size { name: "vgg16", about: "138.4 M", settings: &[("depth", Setting::Number(16))] },
        Size { name: "vgg19", about: "143.7 M", settings: &[("depth", Setting::Number(19))] },
    ],
    small: &[
        ("width", Setting::Number(4)),
        ("hidden", Setting::Number(32)),
        ("classes", Setting::Number(5)),
        ("size", Setting::Number(32)),
    ],
    build,
};

/// Input `x`; modules numbered as in torchvision (`features.28`, `classifier.6`).
fn build(net: &mut Builder, given: &Given, batch: Axis) -> Result<Prediction, ChoiceError> {
    let convolutions = match given.number("depth") {
        11 => [1, 1, 2, 2, 2],
        13 => [2, 2, 2, 2, 2],
        16 => [2, 2, 3, 3, 3],
        19 => [2, 2, 4, 4, 4],
        _ => return Err(given.refuse("depth", "it must be 11, 13, 16 or 19")),
    };
    let (hidden, classes, ratio) = (given.number("hidden"), given.number("classes"), given.fraction("dropout"));
    let (first_width, size) = (given.number("width"), given.number("size"));
    if !size.is_multiple_of(32) {
        return Err(given.refuse("size", "five poolings halve it"));
    }
    let mut y = net.input_f32("x", &[batch, Axis::Size(3), Axis::Size(size), Axis::Size(size)]);
    let (mut width, mut index) = (3, 0);
    let mut next = |name: &str| {
        index += 1;
        format!("{name}.{}", index - 1)
    };
    for (group, count) in convolutions.into_iter().enumerate() {
        for _ in 0..count {
            let next_width = first_width << group.min(3);
            y = biased_convolution(net, &next("features"), &y, Kernel::square(width, next_width, 3, 1));
            if given.truth("normalised") {
                y = batch_norm(net, &next("features"), &y, next_width);
            }
            y = relu(net, &next("features"), &y);
            width = next_width;
        }
        y = max_pool(net, &next("features"), &y, 2, 2, 0);
    }
    let y = flatten(net, "", &y);
    let y = dense(net, "classifier.0", &y, width * (size / 32) * (size / 32), hidden, Init::Kaiming);
    let y = relu(net, "classifier.1", &y);
    let y = dropout(net, "classifier.2", &y, ratio);
    let y = dense(net, "classifier.3", &y, hidden, hidden, Init::Kaiming);
    let y = relu(net, "classifier.4", &y);
    let y = dropout(net, "classifier.5", &y, ratio);
    let y = dense(net, "classifier.6", &y, hidden, classes, Init::Xavier);
    Ok(Prediction { logits: y, shape: vec![batch, Axis::Size(classes)], target: Target::Class })
}
