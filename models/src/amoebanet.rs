//! AmoebaNet-D (Real et al., AAAI 2019), the image network that GPipe scales (Huang et al., NeurIPS 2019, table 1) and
//! torchgpipe reproduces (Kim et al., 2020).
//!
//! Each cell reads the outputs of the two previous cells and makes five sums of two operations on earlier states.
//! States 0 and 1 are the reduced inputs, state 2 is the first sum. Normal cells concatenate states 0, 3, 4 and 6, as
//! the TensorFlow reference does. The paper's figure has 4, 5 and 6, which does not give the published counts.
//!
//! ```text
//! x ─ conv 3×3 /2 ─ reduction ×2 ─ L/3 normal ─ reduction ─ L/3 normal ─ reduction ─ L/3 normal ─ mean ─ fc ─ logits
//! ```
//!
//! D is the number of channels of the first normal cells; every later reduction doubles it.
//!
//! | L, D    | parameters    | torchgpipe | GPipe  |
//! | ---     | ---           | ---        | ---    |
//! | 18, 208 | 81,505,540    | 81.5 M     | 82 M   |
//! | 18, 416 | 319,024,120   | 319.0 M    | 318 M  |
//! | 18, 544 | 542,734,840   | 542.7 M    | 542 M  |
//! | 36, 544 | 1,055,832,376 | 1.06 B     | 1.05 B |
//! | 72, 512 | 1,844,858,344 | 1.84 B     | 1.8 B  |

use crate::builder::{Axis, Builder, Init, Value};
use crate::choice::{Choice, ChoiceError, Given, Setting};
use crate::image::{Kernel, batch_norm, convolution, max_pool, mean_of_image, mean_pool, relu};
use crate::layer::{concatenate, dense, part};
use crate::prediction::{Prediction, Target};
use crate::zoo::{Entry, Size};

pub const ENTRY: Entry = Entry {
    name: "amoebanet",
    about: "AmoebaNet-D (18, 208), 81.5 M parameters [Real et al. 2019, Huang et al. 2019]",
    choices: &[
        Choice::number("layers", 18, 3, 9_999, "L: normal cells, a multiple of 3"),
        Choice::number("filters", 208, 16, 100_000, "D: channels of the first normal cells, a multiple of 8"),
        Choice::width("classes", 1000, "number of classes"),
        Choice::number("size", 224, 32, 4096, "height and width of the image, a multiple of 32"),
    ],
    sizes: &[
        Size { name: "amoebanet-18-208", about: "81.5 M parameters", settings: &settings(18, 208) },
        Size { name: "amoebanet-18-416", about: "319 M", settings: &settings(18, 416) },
        Size { name: "amoebanet-18-544", about: "543 M", settings: &settings(18, 544) },
        Size { name: "amoebanet-36-544", about: "1.06 B", settings: &settings(36, 544) },
        Size { name: "amoebanet-72-512", about: "1.84 B", settings: &settings(72, 512) },
    ],
    small: &[
        ("layers", Setting::Number(3)),
        ("filters", Setting::Number(16)),
        ("classes", Setting::Number(5)),
        ("size", Setting::Number(32)),
    ],
    build,
};

const fn settings(layers: usize, filters: usize) -> [(&'static str, Setting); 2] {
    [("layers", Setting::Number(layers)), ("filters", Setting::Number(filters))]
}

#[derive(Debug, Clone, Copy)]
enum Operation {
    Nothing,
    Conv1x1,
    Conv3x3,
    Conv1x7And7x1,
    Mean3x3,
    Max3x3,
    Max2x2,
}

use Operation::{Conv1x1, Conv1x7And7x1, Conv3x3, Max2x2, Max3x3, Mean3x3, Nothing};

/// Five sums of two operations, each with the index of its input state, and the states that are concatenated.
struct Genotype {
    sums: [[(usize, Operation); 2]; 5],
    concatenated: &'static [usize],
}

const NORMAL: Genotype = Genotype {
    sums: [
        [(1, Conv1x1), (1, Max3x3)],
        [(1, Nothing), (0, Conv1x7And7x1)],
        [(0, Conv1x1), (0, Conv1x7And7x1)],
        [(2, Max3x3), (2, Nothing)],
        [(1, Mean3x3), (5, Conv1x1)],
    ],
    concatenated: &[0, 3, 4, 6],
};

const REDUCTION: Genotype = Genotype {
    sums: [
        [(0, Max2x2), (0, Max3x3)],
        [(2, Nothing), (1, Conv3x3)],
        [(2, Conv1x7And7x1), (2, Max3x3)],
        [(3, Nothing), (1, Max2x2)],
        [(2, Mean3x3), (3, Conv1x1)],
    ],
    concatenated: &[4, 5, 6],
};

/// Outputs of the last two cells, newest first, with their channels.
struct Tower {
    states: [(Value, usize); 2],
    channels: usize,
    after_reduction: bool,
}

/// Input `x`; modules named as in torchgpipe (`stem2.reduce1`, `cell1_normal3.operations.4`).
fn build(net: &mut Builder, given: &Given, batch: Axis) -> Result<Prediction, ChoiceError> {
    let (layers, filters) = (given.number("layers"), given.number("filters"));
    let (classes, size) = (given.number("classes"), given.number("size"));
    if !layers.is_multiple_of(3) {
        return Err(given.refuse("layers", "there are three groups of normal cells"));
    }
    if !filters.is_multiple_of(8) {
        return Err(given.refuse("filters", "it must be a multiple of 8"));
    }
    if !size.is_multiple_of(32) {
        return Err(given.refuse("size", "it is halved five times"));
    }
    let x = net.input_f32("x", &[batch, Axis::Size(3), Axis::Size(size), Axis::Size(size)]);
    let first = filters / 4;
    let x = relu(net, "stem1.relu", &x);
    let x = convolution(net, "stem1.conv", &x, Kernel::square(3, first, 3, 2));
    let x = batch_norm(net, "stem1.bn", &x, first);
    let mut tower = Tower { states: [(x.clone(), first), (x, first)], channels: first, after_reduction: false };
    tower.cell(net, "stem2", true);
    tower.cell(net, "stem3", true);
    for group in [1, 3, 5] {
        if group > 1 {
            tower.cell(net, &format!("cell{}_reduction", group - 1), true);
        }
        for index in 1..=layers / 3 {
            tower.cell(net, &format!("cell{group}_normal{index}"), false);
        }
    }
    let [(y, width), _] = &tower.states;
    let y = mean_of_image(net, "classify.pool", y);
    let y = dense(net, "classify.fc", &y, *width, classes, Init::Xavier);
    Ok(Prediction { logits: y, shape: vec![batch, Axis::Size(classes)], target: Target::Class })
}

impl Tower {
    fn cell(&mut self, net: &mut Builder, path: &str, reduction: bool) {
        let genotype = if reduction { &REDUCTION } else { &NORMAL };
        if reduction {
            self.channels *= 2;
        }
        let channels = self.channels;
        let [(newer, newer_width), (older, older_width)] = &self.states;
        let first = reduced(net, &format!("{path}.reduce1"), newer, [*newer_width, channels]);
        let second = match (self.after_reduction, *older_width == channels) {
            (true, _) => factorized_reduce(net, &format!("{path}.reduce2"), older, [*older_width, channels]),
            (false, false) => reduced(net, &format!("{path}.reduce2"), older, [*older_width, channels]),
            (false, true) => older.clone(),
        };
        let mut states = vec![first, second];
        for (sum, pair) in genotype.sums.iter().enumerate() {
            let [left, right] = [0, 1].map(|side| {
                let (from, operation) = pair[side];
                // In a reduction cell, operations on the cell's inputs halve the image.
                let stride = if reduction && from < 2 { 2 } else { 1 };
                let path = format!("{path}.operations.{}", 2 * sum + side);
                operation.build(net, &path, &states[from], channels, stride)
            });
            states.push(net.node(path, "Add", &[&left, &right], vec![]));
        }
        let parts: Vec<&Value> = genotype.concatenated.iter().map(|state| &states[*state]).collect();
        let y = concatenate(net, path, &parts, 1);
        let newer = self.states[0].clone();
        self.states = [(y, channels * parts.len()), newer];
        self.after_reduction = reduction;
    }
}

impl Operation {
    fn build(self, net: &mut Builder, path: &str, x: &Value, channels: usize, stride: usize) -> Value {
        let step = stride as i64;
        let quarter = channels / 4;
        let square = |size, stride| Kernel::square(quarter, quarter, size, stride);
        let narrow = Kernel::square(channels, quarter, 1, 1);
        let wide = Kernel::square(quarter, channels, 1, 1);
        match self {
            Nothing => x.clone(),
            Mean3x3 => mean_pool(net, path, x, 3, step, 1),
            Max3x3 => max_pool(net, path, x, 3, step, 1),
            Max2x2 => max_pool(net, path, x, 2, step, 0),
            Conv1x1 => chain(net, path, x, &[Kernel::square(channels, channels, 1, stride)]),
            Conv3x3 => chain(net, path, x, &[narrow, square(3, stride), wide]),
            Conv1x7And7x1 => {
                let flat = Kernel { size: [1, 7], stride: [1, stride], pads: [0, 3, 0, 3], ..square(1, 1) };
                let high = Kernel { size: [7, 1], stride: [stride, 1], pads: [3, 0, 3, 0], ..square(1, 1) };
                chain(net, path, x, &[narrow, flat, high, wide])
            }
        }
    }
}

/// ReLU, convolution and batch normalisation, once per kernel.
fn chain(net: &mut Builder, path: &str, x: &Value, kernels: &[Kernel]) -> Value {
    let mut y = x.clone();
    for (index, kernel) in kernels.iter().enumerate() {
        let at = |offset| format!("{path}.{}", 3 * index + offset);
        y = relu(net, &at(0), &y);
        y = convolution(net, &at(1), &y, *kernel);
        y = batch_norm(net, &at(2), &y, kernel.to);
    }
    y
}

/// Changes the number of channels with a 1×1 convolution.
fn reduced(net: &mut Builder, path: &str, x: &Value, [from, to]: [usize; 2]) -> Value {
    chain(net, path, x, &[Kernel::square(from, to, 1, 1)])
}

/// As `reduced`, at half height and width: half of the channels from even pixels, half from odd ones.
fn factorized_reduce(net: &mut Builder, path: &str, x: &Value, [from, to]: [usize; 2]) -> Value {
    let at = |name: &str| format!("{path}.{name}");
    let x = relu(net, &at("relu"), x);
    let kernel = Kernel::square(from, to / 2, 1, 2);
    let even = convolution(net, &at("conv1"), &x, kernel);
    let odd = part(net, &at("pad"), &x, 2, 1, i64::MAX);
    let odd = part(net, &at("pad"), &odd, 3, 1, i64::MAX);
    let odd = convolution(net, &at("conv2"), &odd, Kernel { pads: [0, 0, 1, 1], ..kernel });
    let y = concatenate(net, path, &[&even, &odd], 1);
    batch_norm(net, &at("bn"), &y, to)
}
