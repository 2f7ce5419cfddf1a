//! Common layers: linear, embedding, layer and RMS normalisation, dropout, transpose, reshape.
//!
//! Each puts its nodes in the module at `path` and its parameters at `path.weight` and `path.bias`, as PyTorch does.

use crate::builder::{Builder, Init, Value, attr};

/// `x·Wᵀ + b` over the last axis; `x` may have any rank.
pub fn linear(net: &mut Builder, path: &str, x: &Value, from: usize, to: usize) -> Value {
    let weight = net.parameter(&format!("{path}.weight"), &[to, from], Init::Xavier);
    let bias = net.parameter(&format!("{path}.bias"), &[to], Init::Zeros);
    let y = product(net, path, x, &weight);
    net.node(path, "Add", &[&bias, &y], vec![])
}

/// `x·Wᵀ` with an existing weight.
pub fn product(net: &mut Builder, path: &str, x: &Value, weight: &Value) -> Value {
    let weight = transpose(net, path, weight, &[1, 0]);
    net.node(path, "MatMul", &[x, &weight], vec![])
}

/// `x·Wᵀ` without a bias.
pub fn projection(net: &mut Builder, path: &str, x: &Value, from: usize, to: usize) -> Value {
    let weight = net.parameter(&format!("{path}.weight"), &[to, from], Init::Xavier);
    product(net, path, x, &weight)
}

/// `x·Wᵀ + b` of a matrix, as one `Gemm`.
pub fn dense(net: &mut Builder, path: &str, x: &Value, from: usize, to: usize, init: Init) -> Value {
    let weight = net.parameter(&format!("{path}.weight"), &[to, from], init);
    let bias = net.parameter(&format!("{path}.bias"), &[to], Init::Zeros);
    let attributes = vec![attr::float("alpha", 1.0), attr::float("beta", 1.0), attr::int("transB", 1)];
    net.node(path, "Gemm", &[x, &weight, &bias], attributes)
}

/// An embedding table with `count` rows, and its rows at `tokens`.
pub fn embedding(net: &mut Builder, path: &str, tokens: &Value, count: usize, width: usize) -> [Value; 2] {
    let table = net.parameter(&format!("{path}.weight"), &[count, width], Init::Deviation(0.02));
    let rows = net.node(path, "Gather", &[&table, tokens], vec![]);
    [table, rows]
}

pub fn normalisation(net: &mut Builder, path: &str, x: &Value, width: usize, epsilon: f32) -> Value {
    let scale = net.parameter(&format!("{path}.weight"), &[width], Init::Ones);
    let bias = net.parameter(&format!("{path}.bias"), &[width], Init::Zeros);
    let attributes = vec![attr::int("axis", -1), attr::float("epsilon", epsilon)];
    net.node(path, "LayerNormalization", &[x, &scale, &bias], attributes)
}

/// RMS normalisation over the last axis (Zhang and Sennrich, 2019), in the operators of PyTorch's exports.
pub fn rms_normalisation(net: &mut Builder, path: &str, x: &Value, width: usize, epsilon: f32) -> Value {
    let scale = net.parameter(&format!("{path}.weight"), &[width], Init::Ones);
    let [two, epsilon] = [2.0, epsilon].map(|number| net.constant_f32(path, &[], &[number]));
    let square = net.node(path, "Pow", &[x, &two], vec![]);
    let last = net.constant_i64(path, &[-1]);
    let mean = net.node(path, "ReduceMean", &[&square, &last], vec![attr::int("keepdims", 1)]);
    let sum = net.node(path, "Add", &[&mean, &epsilon], vec![]);
    let root = net.node(path, "Sqrt", &[&sum], vec![]);
    let inverse = net.node(path, "Reciprocal", &[&root], vec![]);
    let y = net.node(path, "Mul", &[x, &inverse], vec![]);
    net.node(path, "Mul", &[&y, &scale], vec![])
}

/// `silu(gate)·up` with `silu(x) = x·sigmoid(x)` (Shazeer, 2020).
pub fn swiglu(net: &mut Builder, path: &str, gate: &Value, up: &Value) -> Value {
    let share = net.node(path, "Sigmoid", &[gate], vec![]);
    let gate = net.node(path, "Mul", &[gate, &share], vec![]);
    net.node(path, "Mul", &[&gate, up], vec![])
}

/// Dropout in training mode; omitted if the ratio is 0.
pub fn dropout(net: &mut Builder, path: &str, x: &Value, ratio: f64) -> Value {
    if ratio == 0.0 {
        return x.clone();
    }
    let ratio = net.constant_f32(path, &[], &[ratio as f32]);
    let training = net.scalar_bool(path, true);
    net.node(path, "Dropout", &[x, &ratio, &training], vec![])
}

/// Dropout with a mask broadcast along the axes of size 1 in `mask`; a 0 takes the axis size of `x`.
///
/// The mask `[1, 0, 0]` drops the same features at every step of a time-major sequence (Gal and Ghahramani, 2016); `[0,
/// 0, 1, 1]` drops whole channels of images.
pub fn locked_dropout(net: &mut Builder, path: &str, x: &Value, mask: &[i64], ratio: f64) -> Value {
    if ratio == 0.0 {
        return x.clone();
    }
    let shape = net.node(path, "Shape", &[x], vec![]);
    let source_axis = |axis: usize| if mask[axis] == 0 { axis } else { mask.len() };
    let one = net.constant_i64(path, &[1]);
    let sizes = net.node(path, "Concat", &[&shape, &one], vec![attr::int("axis", 0)]);
    let source_axes = net.constant_i64(path, &(0..mask.len()).map(|axis| source_axis(axis) as i64).collect::<Vec<_>>());
    let shape = net.node(path, "Gather", &[&sizes, &source_axes], vec![]);
    let ones = net.fill(path, &shape, 1.0);
    let noise = dropout(net, path, &ones, ratio);
    net.node(path, "Mul", &[x, &noise], vec![])
}

pub fn transpose(net: &mut Builder, path: &str, x: &Value, perm: &[i64]) -> Value {
    net.node(path, "Transpose", &[x], vec![attr::ints("perm", perm)])
}

/// Reshapes `x`; a 0 copies an axis, a -1 is inferred.
pub fn reshape(net: &mut Builder, path: &str, x: &Value, shape: &[i64]) -> Value {
    let shape = net.constant_i64(path, shape);
    net.node(path, "Reshape", &[x, &shape], vec![attr::int("allowzero", 0)])
}

pub fn concatenate(net: &mut Builder, path: &str, parts: &[&Value], axis: i64) -> Value {
    net.node(path, "Concat", parts, vec![attr::int("axis", axis)])
}

pub fn part(net: &mut Builder, path: &str, x: &Value, axis: i64, begin: i64, end: i64) -> Value {
    let [begin, end, axis] = [begin, end, axis].map(|number| net.constant_i64(path, &[number]));
    net.node(path, "Slice", &[x, &begin, &end, &axis], vec![])
}
