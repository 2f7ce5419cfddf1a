//! Gradient operators, which occur in joint graphs of forward and backward.

use super::attention::{probabilities, scale_of};
use super::window::pool_window;
use super::{Known, NodeOutputs, Outputs, Scope, many, one};
use crate::import::build::Build;
use crate::import::embedding;
use crate::import::fx::schema::Argument;
use crate::import::lower_error::LowerReason;
use crate::import::onnx::lower::attribute;
use crate::import::onnx::lower::linear::product;
use crate::op::{
    AvgPool, AvgPoolGrad, Binary, ConvInputGrad, ConvWeightGrad, LayerNormGrad, MatMul, MaxPool, MaxPoolGrad, Op,
    ReduceKind, ScatterAdd, Value,
};
use crate::tensor::DType;

const UNASKED: Known = Known::Absent("an output gradient that the program does not compute");

/// The gradients requested by `output_mask`; all by default.
fn mask(scope: &Scope<'_>) -> [bool; 3] {
    match scope.argument("output_mask") {
        Some(Argument::AsBools(list)) => [0, 1, 2].map(|at| list.get(at).copied().unwrap_or(false)),
        _ => [true; 3],
    }
}

pub fn convolution(scope: &mut Scope<'_>) -> Outputs {
    if scope.flag("transposed", false)? {
        return Err(LowerReason::Unsupported("the gradient of a transposed convolution".to_string()));
    }
    let (dy, x, weight) = (scope.value("grad_output")?, scope.value("input")?, scope.value("weight")?);
    let (input, kernel) = (scope.fact(x), scope.fact(weight));
    let sizes = kernel.concrete().filter(|s| s.len() > 2 && s.len() == input.rank());
    let sizes = sizes.ok_or_else(|| LowerReason::Inputs(format!("its weight is {kernel}, its input {input}")))?;
    let (window, groups) = super::window::convolution_window(scope, sizes.len() - 2)?;
    let mut gradients = vec![UNASKED; 3];
    let [for_input, for_weight, for_bias] = mask(scope);
    if for_input {
        let op = ConvInputGrad { window: window.clone(), groups, spatial: input.shape[2..].to_vec() };
        gradients[0] = Known::Value(scope.add(Op::ConvInputGrad(op), &[dy, weight])?);
    }
    if for_weight {
        let op = ConvWeightGrad { window, groups, kernel: sizes[2..].to_vec() };
        gradients[1] = Known::Value(scope.add(Op::ConvWeightGrad(op), &[dy, x])?);
    }
    if for_bias {
        let axes: Vec<usize> = (0..input.rank()).filter(|at| *at != 1).collect();
        gradients[2] = Known::Value(scope.reduce(ReduceKind::Sum, dy, &axes, false)?);
    }
    Ok(NodeOutputs::Tensors(gradients))
}

/// Gradient of a max pooling, computed from the input instead of the indices.
pub fn max_pool(scope: &mut Scope<'_>) -> Outputs {
    let (dy, x) = (scope.value("grad_output")?, scope.value("self")?);
    if scope.fact(x).rank() != 4 {
        return Err(LowerReason::Unsupported("the gradient of pooling an image without a batch".to_string()));
    }
    let (kernel, window, ceil) = pool_window(scope, 2, true)?;
    one(scope.add(Op::MaxPoolGrad(MaxPoolGrad { forward: MaxPool { kernel, window, ceil } }), &[x, dy])?)
}

pub fn avg_pool(scope: &mut Scope<'_>) -> Outputs {
    let (dy, x) = (scope.value("grad_output")?, scope.fact_of("self")?);
    if x.rank() != 4 || scope.has("divisor_override") {
        return Err(LowerReason::Unsupported(
            "the gradient of pooling an image without a batch, or with a custom divisor,".to_string(),
        ));
    }
    let (kernel, window, ceil) = pool_window(scope, 2, false)?;
    let count_padding = scope.flag("count_include_pad", true)?;
    let forward = AvgPool { kernel, window, ceil, count_padding };
    one(scope.add(Op::AvgPoolGrad(AvgPoolGrad { forward, spatial: x.shape[2..].to_vec() }), &[dy])?)
}

/// Gradient of an embedding table; the row `padding_idx` gets none.
pub fn embedding(scope: &mut Scope<'_>) -> Outputs {
    let (mut dy, index) = (scope.value("grad_output")?, scope.value("indices")?);
    if scope.flag("scale_grad_by_freq", false)? {
        return Err(LowerReason::Unsupported("an embedding gradient scaled by index frequency".to_string()));
    }
    let size = scope.dim("num_weights")?.ok_or(LowerReason::NotConstant { what: "the number of embeddings" })?;
    let padding = scope.int("padding_idx", -1)?;
    if padding >= 0 {
        let index = scope.cast(index, DType::I64)?;
        let is_padding = embedding::is_padding(scope, index, padding)?;
        let zero = scope.scalar(scope.fact(dy).dtype, 0.0)?;
        dy = scope.select(is_padding, zero, dy)?;
    }
    one(scope.add(Op::ScatterAdd(ScatterAdd { axis: 0, size }), &[dy, index])?)
}

pub fn layer_norm(scope: &mut Scope<'_>) -> Outputs {
    let (dy, x) = (scope.value("grad_out")?, scope.value("input")?);
    let (mean, rstd) = (scope.value("mean")?, scope.value("rstd")?);
    let fact = scope.fact(x);
    let dims = scope.shape("normalized_shape")?;
    let axis = fact.rank().checked_sub(dims.len()).filter(|at| fact.shape[*at..] == dims[..]);
    let axis = axis.ok_or_else(|| LowerReason::Inputs(format!("the last dims of {fact} are not {dims:?}")))?;
    let scale = scope.optional_or("weight", fact.dtype, &dims, 1.0)?;
    let gradients = scope.add_all(Op::LayerNormGrad(LayerNormGrad { axis }), &[dy, x, scale, mean, rstd])?;
    let requested = mask(scope);
    let keep_requested = |(value, requested): (Value, bool)| if requested { Known::Value(value) } else { UNASKED };
    Ok(NodeOutputs::Tensors(gradients.into_iter().zip(requested).map(keep_requested).collect()))
}

/// Gradients of attention for query, key and value, with the probabilities recomputed: `dv = pᵀ·do`, `ds = p·(do·vᵀ - Σ
/// p·(do·vᵀ))`, `dq = ds·k·scale`, `dk = dsᵀ·q·scale`.
pub fn attention(scope: &mut Scope<'_>) -> Outputs {
    if scope.float("dropout_p", 0.0)? != 0.0 {
        return Err(LowerReason::Unsupported("the gradient of attention with dropout".to_string()));
    }
    let (query, key, value) = (scope.value("query")?, scope.value("key")?, scope.value("value")?);
    let d_out = scope.value("grad_out")?;
    let p = probabilities(scope, query, key)?;
    let matrix = |transpose_a, transpose_b| Op::MatMul(MatMul { transpose_a, transpose_b });
    let dv = scope.add(matrix(true, false), &[p, d_out])?;
    let dp = scope.add(matrix(false, true), &[d_out, value])?;
    let weighted = scope.binary(Binary::Mul, p, dp)?;
    let axis = attribute::axis(-1, scope.fact(p).rank())?;
    let sum = scope.reduce(ReduceKind::Sum, weighted, &[axis], true)?;
    let centred = scope.binary(Binary::Sub, dp, sum)?;
    let ds = scope.binary(Binary::Mul, p, centred)?;
    let scale = scale_of(scope, query)?;
    let ds = scope.with_number(Binary::Mul, ds, scale)?;
    let dq = product(scope, ds, key)?;
    let dk = scope.add(matrix(true, false), &[ds, query])?;
    many(vec![dq, dk, dv])
}
