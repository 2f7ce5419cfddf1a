//! U-Net (B, C) of torchgpipe (Kim et al., 2020, section 4.2): a simplified U-Net (Ronneberger et al., 2015). Cells
//! have B convolutions; the first has C channels. Its long skip connections test pipelines.
//!
//! ```text
//! [ cell ]───────────────────[ cell ]─ conv 1×1 ─ logits      cell: B times conv 3×3 ─ channel dropout ─
//!     [ cell ]───────────[ cell ]                             instance normalisation ─ leaky ReLU
//!          …                …
//!             [ bottleneck ]                                  down: max 2×2; up: upsampling, concatenated with the skip
//! ```
//!
//! | B, C    | parameters     | published |
//! | ---     | ---            | ---       |
//! | 6, 72   | 362,157,516    | 362.2 M   |
//! | 11, 128 | 2,213,834,176  | 2.21 B    |
//! | 24, 128 | 4,993,859,008  | 4.99 B    |
//! | 24, 160 | 7,802,903,600  | 7.80 B    |
//! | 48, 160 | 15,822,206,000 | 15.82 B   |

use crate::builder::{Axis, Builder, Value, attr};
use crate::choice::{Choice, ChoiceError, Given, Setting};
use crate::image::{Kernel, convolution, max_pool, upsample};
use crate::layer::{concatenate, locked_dropout};
use crate::prediction::{Prediction, Target};
use crate::zoo::{Entry, Size};

pub const ENTRY: Entry = Entry {
    name: "unet",
    about: "U-Net (6, 72), 362.2 M parameters [Ronneberger et al. 2015, Kim et al. 2020]",
    choices: &[
        Choice::number("convolutions", 6, 1, 1_000, "B: convolutions in a cell"),
        Choice::number("channels", 72, 2, 100_000, "C: channels of the first cell, an even number"),
        Choice::number("depth", 5, 1, 8, "number of times the image is halved"),
        Choice::width("classes", 1, "number of classes; 1 for binary segmentation"),
        Choice::number("size", 192, 2, 4096, "height and width of the image, a multiple of 2^depth"),
        Choice::fraction("dropout", 0.1, "channel dropout rate after every convolution"),
    ],
    sizes: &[
        Size { name: "unet-6-72", about: "362 M parameters", settings: &settings(6, 72) },
        Size { name: "unet-11-128", about: "2.21 B", settings: &settings(11, 128) },
        Size { name: "unet-24-128", about: "4.99 B", settings: &settings(24, 128) },
        Size { name: "unet-24-160", about: "7.80 B", settings: &settings(24, 160) },
        Size { name: "unet-48-160", about: "15.8 B", settings: &settings(48, 160) },
    ],
    small: &[
        ("convolutions", Setting::Number(2)),
        ("channels", Setting::Number(4)),
        ("depth", Setting::Number(2)),
        ("size", Setting::Number(8)),
    ],
    build,
};

const fn settings(convolutions: usize, channels: usize) -> [(&'static str, Setting); 2] {
    [("convolutions", Setting::Number(convolutions)), ("channels", Setting::Number(channels))]
}

/// Input, hidden and output channels of a cell.
type Widths = [usize; 3];

/// Input `x`, logits batch × classes × height × width.
fn build(net: &mut Builder, given: &Given, batch: Axis) -> Result<Prediction, ChoiceError> {
    let (depth, channels, size) = (given.number("depth"), given.number("channels"), given.number("size"));
    let (classes, convolutions, ratio) =
        (given.number("classes"), given.number("convolutions"), given.fraction("dropout"));
    if !channels.is_multiple_of(2) {
        return Err(given.refuse("channels", "the last cell has half as many"));
    }
    if !size.is_multiple_of(1 << depth) {
        return Err(given.refuse("size", format!("it is halved {depth} times")));
    }
    let cell = |net: &mut Builder, path: &str, x: &Value, [from, between, to]: Widths| {
        let mut y = x.clone();
        for index in 0..convolutions {
            let kernel = Kernel::square(
                if index == 0 { from } else { between },
                if index + 1 == convolutions { to } else { between },
                3,
                1,
            );
            y = step(net, &format!("{path}.{index}"), &y, kernel, ratio);
        }
        y
    };
    let mut y = net.input_f32("x", &[batch, Axis::Size(3), Axis::Size(size), Axis::Size(size)]);
    let mut skips = Vec::with_capacity(depth);
    for level in 0..depth {
        let width = channels << level;
        let from = if level == 0 { 3 } else { width / 2 };
        y = cell(net, &format!("encoder.{level}.encode"), &y, [from, width, width]);
        skips.push(y.clone());
        y = max_pool(net, &format!("encoder.{level}.down"), &y, 2, 2, 0);
    }
    let width = channels << depth;
    y = cell(net, "bottleneck.0", &y, [width / 2, width, width / 2]);
    for (index, (level, skip)) in skips.iter().enumerate().rev().enumerate() {
        let (width, side) = (channels << level, size >> (level + 1));
        y = upsample(net, &format!("decoder.{index}.up"), &y, [width, side, side]);
        y = concatenate(net, &format!("decoder.{index}.skip"), &[&y, skip], 1);
        y = cell(net, &format!("decoder.{index}.decode"), &y, [2 * width, width / 2, width / 2]);
    }
    let logits = convolution(net, "segment", &y, Kernel::square(channels / 2, classes, 1, 1));
    let target = if classes == 1 { Target::Truth } else { Target::Class };
    let shape = vec![batch, Axis::Size(classes), Axis::Size(size), Axis::Size(size)];
    Ok(Prediction { logits, shape, target })
}

/// Convolution, channel dropout, instance normalisation, leaky ReLU.
fn step(net: &mut Builder, path: &str, x: &Value, kernel: Kernel, ratio: f64) -> Value {
    let at = |name: &str| format!("{path}.{name}");
    let y = convolution(net, &at("conv"), x, kernel);
    let y = locked_dropout(net, &at("dropout"), &y, &[0, 0, 1, 1], ratio);
    // The normalisation has no trainable scale and bias.
    let shape = net.constant_i64(&at("norm"), &[kernel.to as i64]);
    let [one, zero] = [1.0, 0.0].map(|value| net.fill(&at("norm"), &shape, value));
    let y = net.node(&at("norm"), "InstanceNormalization", &[&y, &one, &zero], vec![attr::float("epsilon", 1e-5)]);
    net.node(&at("relu"), "LeakyRelu", &[&y], vec![attr::float("alpha", 0.01)])
}
