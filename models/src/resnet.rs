//! Residual networks for ImageNet (He et al., CVPR 2016, table 1). The stride of a bottleneck is in its 3×3
//! convolution, as in torchvision and NVIDIA's reference.
//!
//! ```text
//! x ─ conv 7×7 /2 ─ bn ─ relu ─ max 3×3 /2 ─ four groups of blocks ─ mean ─ fc ─ logits
//!
//! basic:    ┌ conv 3×3 ─ bn ─ relu ─ conv 3×3 ─ bn ┐                     bottleneck: 1×1, 3×3, 1×1 four times as wide
//!         ──┤                                      + ─ relu ──
//!           └ identity, or conv 1×1 ─ bn ─────────┘
//! ```
//!
//! For small images such as CIFAR (section 4.2, but with the ImageNet widths), the stem is a 3×3 convolution without
//! stride and pooling.
//!
//! | depth | blocks         | parameters |
//! | ---   | ---            | ---        |
//! | 18    | 2, 2, 2, 2     | 11,689,512 |
//! | 34    | 3, 4, 6, 3     | 21,797,672 |
//! | 50    | 3, 4, 6, 3     | 25,557,032 |
//! | 101   | 3, 4, 23, 3    | 44,549,160 |
//! | 152   | 3, 8, 36, 3    | 60,192,808 |

use crate::builder::{Axis, Builder, Init, Value};
use crate::choice::{Choice, ChoiceError, Given, Setting};
use crate::image::{Kernel, batch_norm, convolution, max_pool, mean_of_image, relu};
use crate::layer::dense;
use crate::prediction::{Prediction, Target};
use crate::zoo::{Entry, Size};

pub const ENTRY: Entry = Entry {
    name: "resnet",
    about: "residual network for ImageNet, ResNet-50 [He et al. 2016]",
    choices: &[
        Choice::number("depth", 50, 18, 152, "18, 34, 50, 101 or 152 layers"),
        Choice::width("hidden", 64, "channels of the first group"),
        Choice::width("classes", 1000, "number of classes"),
        Choice::number("size", 224, 32, 4096, "height and width of the image"),
        Choice::truth("small-images", false, "use a 3x3 stem convolution that keeps the size, as for CIFAR"),
    ],
    sizes: &[
        Size { name: "resnet18", about: "11.7 M parameters", settings: &[("depth", Setting::Number(18))] },
        Size { name: "resnet34", about: "21.8 M", settings: &[("depth", Setting::Number(34))] },
        Size { name: "resnet50", about: "25.6 M", settings: &[("depth", Setting::Number(50))] },
        Size { name: "resnet101", about: "44.5 M", settings: &[("depth", Setting::Number(101))] },
        Size { name: "resnet152", about: "60.2 M", settings: &[("depth", Setting::Number(152))] },
    ],
    small: &[("hidden", Setting::Number(4)), ("classes", Setting::Number(5)), ("size", Setting::Number(32))],
    build,
};

fn build(net: &mut Builder, given: &Given, batch: Axis) -> Result<Prediction, ChoiceError> {
    let (blocks, is_bottleneck) = match given.number("depth") {
        18 => ([2, 2, 2, 2], false),
        34 => ([3, 4, 6, 3], false),
        50 => ([3, 4, 6, 3], true),
        101 => ([3, 4, 23, 3], true),
        152 => ([3, 8, 36, 3], true),
        _ => return Err(given.refuse("depth", "it must be 18, 34, 50, 101 or 152")),
    };
    let (classes, stem_width, side) =
        (given.number("classes"), given.number("hidden"), Axis::Size(given.number("size")));
    let x = net.input_f32("x", &[batch, Axis::Size(3), side, side]);
    let keeps_size = given.truth("small-images");
    let stem = if keeps_size { Kernel::square(3, stem_width, 3, 1) } else { Kernel::square(3, stem_width, 7, 2) };
    let y = convolution(net, "conv1", &x, stem);
    let y = batch_norm(net, "bn1", &y, stem_width);
    let mut y = relu(net, "relu", &y);
    if !keeps_size {
        y = max_pool(net, "maxpool", &y, 3, 2, 1);
    }
    let mut width = stem_width;
    for (group, count) in blocks.into_iter().enumerate() {
        for index in 0..count {
            let stride = if group > 0 && index == 0 { 2 } else { 1 };
            let (path, inner) = (format!("layer{}.{index}", group + 1), stem_width << group);
            let next = if is_bottleneck { 4 * inner } else { inner };
            y = match is_bottleneck {
                true => bottleneck(net, &path, &y, [width, inner, next], stride),
                false => basic(net, &path, &y, [width, next], stride),
            };
            width = next;
        }
    }
    let y = mean_of_image(net, "avgpool", &y);
    let y = dense(net, "fc", &y, width, classes, Init::Xavier);
    Ok(Prediction { logits: y, shape: vec![batch, Axis::Size(classes)], target: Target::Class })
}

/// The basic block: two 3×3 convolutions.
pub fn basic(net: &mut Builder, path: &str, x: &Value, [from, to]: [usize; 2], stride: usize) -> Value {
    let at = |name: &str| format!("{path}.{name}");
    let y = convolution(net, &at("conv1"), x, Kernel::square(from, to, 3, stride));
    let y = batch_norm(net, &at("bn1"), &y, to);
    let y = relu(net, &at("relu"), &y);
    let y = convolution(net, &at("conv2"), &y, Kernel::square(to, to, 3, 1));
    let y = batch_norm(net, &at("bn2"), &y, to);
    add_shortcut(net, path, x, &y, [from, to], stride)
}

fn bottleneck(net: &mut Builder, path: &str, x: &Value, [from, inner, to]: [usize; 3], stride: usize) -> Value {
    let at = |name: &str| format!("{path}.{name}");
    let y = convolution(net, &at("conv1"), x, Kernel::square(from, inner, 1, 1));
    let y = batch_norm(net, &at("bn1"), &y, inner);
    let y = relu(net, &at("relu"), &y);
    let y = convolution(net, &at("conv2"), &y, Kernel::square(inner, inner, 3, stride));
    let y = batch_norm(net, &at("bn2"), &y, inner);
    let y = relu(net, &at("relu"), &y);
    let y = convolution(net, &at("conv3"), &y, Kernel::square(inner, to, 1, 1));
    let y = batch_norm(net, &at("bn3"), &y, to);
    add_shortcut(net, path, x, &y, [from, to], stride)
}

/// Adds the block's input, projected if the shapes differ.
fn add_shortcut(net: &mut Builder, path: &str, x: &Value, y: &Value, [from, to]: [usize; 2], stride: usize) -> Value {
    let at = |name: &str| format!("{path}.{name}");
    let shortcut = if stride == 1 && from == to {
        x.clone()
    } else {
        let projected = convolution(net, &at("downsample.0"), x, Kernel::square(from, to, 1, stride));
        batch_norm(net, &at("downsample.1"), &projected, to)
    };
    let sum = net.node(path, "Add", &[y, &shortcut], vec![]);
    relu(net, &at("relu"), &sum)
}
