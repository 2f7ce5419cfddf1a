//! Image layers: convolution, batch normalisation in training mode, pooling.

use crate::builder::{Builder, Init, Value, attr};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kernel {
    pub from: usize,
    pub to: usize,
    pub size: [usize; 2],
    pub stride: [usize; 2],
    /// Padding at the top, left, bottom, right.
    pub pads: [usize; 4],
}

impl Kernel {
    /// A square kernel, padded to keep the image size at stride 1.
    pub fn square(from: usize, to: usize, size: usize, stride: usize) -> Self {
        Self { from, to, size: [size; 2], stride: [stride; 2], pads: [size / 2; 4] }
    }
}

/// A convolution without bias, for use before a normalisation.
pub fn convolution(net: &mut Builder, path: &str, x: &Value, kernel: Kernel) -> Value {
    let weight = weight(net, path, kernel);
    net.node(path, "Conv", &[x, &weight], attributes(kernel))
}

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

/// Batch normalisation in training mode; outputs 2 and 3 are the updated running statistics.
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

pub fn relu(net: &mut Builder, path: &str, x: &Value) -> Value {
    net.node(path, "Relu", &[x], vec![])
}

/// Max pooling over square windows.
pub fn max_pool(net: &mut Builder, path: &str, x: &Value, size: i64, stride: i64, pad: i64) -> Value {
    let attributes = vec![
        attr::ints("kernel_shape", &[size, size]),
        attr::ints("pads", &[pad; 4]),
        attr::ints("strides", &[stride, stride]),
    ];
    net.node(path, "MaxPool", &[x], attributes)
}

/// Average pooling over square windows, padding excluded.
pub fn mean_pool(net: &mut Builder, path: &str, x: &Value, size: i64, stride: i64, pad: i64) -> Value {
    let attributes = vec![
        attr::int("count_include_pad", 0),
        attr::ints("kernel_shape", &[size, size]),
        attr::ints("pads", &[pad; 4]),
        attr::ints("strides", &[stride, stride]),
    ];
    net.node(path, "AveragePool", &[x], attributes)
}

/// Global average pooling: `[N, C, H, W]` becomes `[N, C]`.
pub fn mean_of_image(net: &mut Builder, path: &str, x: &Value) -> Value {
    let y = net.node(path, "GlobalAveragePool", &[x], vec![]);
    flatten(net, "", &y)
}

/// Flattens all dimensions but the first.
pub fn flatten(net: &mut Builder, path: &str, x: &Value) -> Value {
    net.node(path, "Flatten", &[x], vec![attr::int("axis", 1)])
}

/// Nearest-neighbour upsampling by 2. `shape` is `[C, H, W]` of the input.
///
/// It is written as reshape, expand and reshape, because the rounding modes of `Resize` differ between importers.
pub fn upsample(net: &mut Builder, path: &str, x: &Value, [channels, height, width]: [usize; 3]) -> Value {
    let [c, h, w] = [channels, height, width].map(|n| n as i64);
    let split_axes = crate::layer::reshape(net, path, x, &[0, c, h, 1, w, 1]);
    let factors = net.constant_i64(path, &[1, 1, 1, 2, 1, 2]);
    let expanded = net.node(path, "Expand", &[&split_axes, &factors], vec![]);
    crate::layer::reshape(net, path, &expanded, &[0, c, 2 * h, 2 * w])
}
