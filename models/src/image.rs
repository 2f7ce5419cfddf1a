//! Layers over images: convolution, batch normalisation in training mode, pooling.

use crate::builder::{Builder, Init, Value, attr};

/// The kernel of a convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kernel {
    /// Channels of the input.
    pub from: usize,
    /// Channels of the result.
    pub to: usize,
    /// Height and width.
    pub size: [usize; 2],
    /// Steps between windows.
    pub stride: [usize; 2],
    /// Zeros above and left, then below and right.
    pub pads: [usize; 4],
}

impl Kernel {
    /// A square one, padded so that with stride 1 the image keeps its size.
    pub fn square(from: usize, to: usize, size: usize, stride: usize) -> Self {
        Self { from, to, size: [size; 2], stride: [stride; 2], pads: [size / 2; 4] }
    }
}

/// A convolution without bias, as they stand before a normalisation.
pub fn convolution(net: &mut Builder, path: &str, x: &Value, kernel: Kernel) -> Value {
    let weight = weight(net, path, kernel);
    net.node(path, "Conv", &[x, &weight], attributes(kernel))
}

/// A convolution with bias.
pub fn biased_convolution(net: &mut Builder, path: &str, x: &Value, kernel: Kernel) -> Value {
    let weight = weight(net, path, kernel);
    let bias = net.parameter(&format!("{path}.bias"), &[kernel.to], Init::Zeros);
    net.node(path, "Conv", &[x, &weight, &bias], attributes(kernel))
}

fn weight(net: &mut Builder, path: &str, kernel: Kernel) -> Value {
    let [height, width] = kernel.size;
    net.parameter(&format!("{path}.weight"), &[kernel.to, kernel.from, height, width], Init::Kaiming)
}

fn attributes(kernel: Kernel) -> Vec<compiler::import::onnx::proto::AttributeProto> {
    vec![
        attr::ints("dilations", &[1, 1]),
        attr::int("group", 1),
        attr::ints("kernel_shape", &kernel.size.map(|n| n as i64)),
        attr::ints("pads", &kernel.pads.map(|n| n as i64)),
        attr::ints("strides", &kernel.stride.map(|n| n as i64)),
    ]
}

/// Batch normalisation in training mode: the second and third result are the running statistics after the batch.
pub fn batch_norm(net: &mut Builder, path: &str, x: &Value, width: usize) -> Value {
    let scale = net.parameter(&format!("{path}.weight"), &[width], Init::Ones);
    let bias = net.parameter(&format!("{path}.bias"), &[width], Init::Zeros);
    let mean = net.statistic(&format!("{path}.running_mean"), &[width], Init::Zeros);
    let variance = net.statistic(&format!("{path}.running_var"), &[width], Init::Ones);
    let attributes = vec![attr::float("epsilon", 1e-5), attr::float("momentum", 0.9), attr::int("training_mode", 1)];
    let [y, _mean, _variance] =
        net.node_of(path, "BatchNormalization", &[x, &scale, &bias, &mean, &variance], attributes);
    y
}

/// The rectifier.
pub fn relu(net: &mut Builder, path: &str, x: &Value) -> Value {
    net.node(path, "Relu", &[x], vec![])
}

/// The largest element of each square window.
pub fn max_pool(net: &mut Builder, path: &str, x: &Value, size: i64, stride: i64, pad: i64) -> Value {
    let attributes = vec![
        attr::ints("kernel_shape", &[size, size]),
        attr::ints("pads", &[pad; 4]),
        attr::ints("strides", &[stride, stride]),
    ];
    net.node(path, "MaxPool", &[x], attributes)
}

/// The mean of each square window, the padding not counted.
pub fn mean_pool(net: &mut Builder, path: &str, x: &Value, size: i64, stride: i64, pad: i64) -> Value {
    let attributes = vec![
        attr::int("count_include_pad", 0),
        attr::ints("kernel_shape", &[size, size]),
        attr::ints("pads", &[pad; 4]),
        attr::ints("strides", &[stride, stride]),
    ];
    net.node(path, "AveragePool", &[x], attributes)
}

/// The mean of each channel: `[N, C, H, W]` becomes `[N, C]`.
pub fn mean_of_image(net: &mut Builder, path: &str, x: &Value) -> Value {
    let y = net.node(path, "GlobalAveragePool", &[x], vec![]);
    flat(net, "", &y)
}

/// All that is one sample as one axis.
pub fn flat(net: &mut Builder, path: &str, x: &Value) -> Value {
    net.node(path, "Flatten", &[x], vec![attr::int("axis", 1)])
}

/// Every pixel twice in both directions. `shape` is `[C, H, W]` of the input.
///
/// As reshape, expand and reshape, which every reader of ONNX agrees on; `Resize` has a dozen modes of rounding.
pub fn doubled(net: &mut Builder, path: &str, x: &Value, [channels, height, width]: [usize; 3]) -> Value {
    let [c, h, w] = [channels, height, width].map(|n| n as i64);
    let apart = crate::layer::reshaped(net, path, x, &[0, c, h, 1, w, 1]);
    let twice = net.constant_i64(path, &[1, 1, 1, 2, 1, 2]);
    let wide = net.node(path, "Expand", &[&apart, &twice], vec![]);
    crate::layer::reshaped(net, path, &wide, &[0, c, 2 * h, 2 * w])
}
