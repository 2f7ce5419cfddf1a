//! All ATen operators that pipec lowers, one row each. Overloads share a row: arguments are read by name, as tensors or
//! numbers. An operator that ends in `_` and changes its operand in place is the row without it; `walk` does the rest.

use super::elementwise as each;
use super::slice::{Cut, split};
use super::{Outputs, Scope, attention, create, index, linear, loss, movement, norm, recurrent, reduce, slice, window};
use crate::op::{Binary, Compare, ReduceKind, Unary};
use crate::tensor::dim::Dim;

/// Lowers one node of an operator.
pub type Lower = fn(&mut Scope<'_>) -> Outputs;

/// The operator of a target, without library and overload: `torch.ops.aten.add_.Tensor` is `add_`.
pub fn name(target: &str) -> &str {
    let inner = target.strip_prefix("torch.ops.aten.").unwrap_or_else(|| target.rsplit('.').next().unwrap_or(target));
    inner.split('.').next().unwrap_or(inner)
}

/// Whether the operator changes its operand.
pub fn in_place(target: &str) -> bool {
    let name = name(target);
    name.ends_with('_') && !name.starts_with("__")
}

/// Whether a result may share its elements with the first operand.
pub fn is_view(target: &str) -> bool {
    matches!(
        name(target),
        "view"
            | "reshape"
            | "_unsafe_view"
            | "view_as"
            | "flatten"
            | "unflatten"
            | "permute"
            | "transpose"
            | "t"
            | "numpy_T"
            | "unsqueeze"
            | "squeeze"
            | "expand"
            | "expand_as"
            | "slice"
            | "select"
            | "narrow"
            | "split"
            | "split_with_sizes"
            | "chunk"
            | "unbind"
            | "alias"
            | "detach"
            | "contiguous"
            | "to"
            | "type_as"
            | "dropout"
            | "lift_fresh"
    )
}

/// How nodes with this target are lowered, `None` when they are not.
pub fn find(target: &str) -> Option<Lower> {
    if let Some(operator) = target.strip_prefix("_operator.") {
        return sizes(operator);
    }
    let Some(inner) = target.strip_prefix("torch.ops.aten.") else {
        return (target == "torch._check").then_some(create::nothing);
    };
    // Overloads that mean something else under the same name.
    match inner {
        "pow.Scalar" | "pow.Tensor_Tensor" | "pow.Tensor_Scalar" => return Some(each::power),
        "norm.Scalar" | "norm.ScalarOpt_dim" => return Some(|s| reduce::vector_norm(s, "p")),
        "bernoulli.p" | "bernoulli.default" | "add.t" | "add.str" | "scatter.value" => return None,
        "upsample_nearest2d.vec" | "upsample_nearest1d.vec" => return Some(|s| window::nearest(s, "input")),
        _ => {}
    }
    let operator = name(target);
    let operator = if in_place(target) { &operator[..operator.len() - 1] } else { operator };
    elementwise(operator).or_else(|| shaped(operator)).or_else(|| layers(operator))
}

/// Arithmetic on sizes, which Python does.
fn sizes(operator: &str) -> Option<Lower> {
    let lower: Lower = match operator {
        "add" => |s| create::size_arithmetic(s, Dim::add),
        "sub" => |s| create::size_arithmetic(s, Dim::sub),
        "mul" => |s| create::size_arithmetic(s, Dim::mul),
        "floordiv" => |s| create::size_arithmetic(s, Dim::div_floor),
        // Guards: their truths are read by assertions alone.
        "ge" | "le" | "gt" | "lt" | "eq" | "ne" => create::nothing,
        _ => return None,
    };
    Some(lower)
}

/// One element after the other.
fn elementwise(operator: &str) -> Option<Lower> {
    let lower: Lower = match operator {
        "abs" => |s| each::unary(s, Unary::Abs),
        "neg" => |s| each::unary(s, Unary::Neg),
        "sign" | "sgn" => |s| each::unary(s, Unary::Sign),
        "relu" => |s| each::unary(s, Unary::Relu),
        "floor" => |s| each::unary(s, Unary::Floor),
        "ceil" => |s| each::unary(s, Unary::Ceil),
        "round" => |s| each::unary(s, Unary::Round),
        "exp" => |s| each::real(s, Unary::Exp),
        "log" => |s| each::real(s, Unary::Log),
        "log2" => |s| each::logarithm(s, 2.0),
        "log10" => |s| each::logarithm(s, 10.0),
        "sqrt" => |s| each::real(s, Unary::Sqrt),
        "rsqrt" => |s| each::real(s, Unary::Rsqrt),
        "reciprocal" => |s| each::real(s, Unary::Reciprocal),
        "sin" => |s| each::real(s, Unary::Sin),
        "cos" => |s| each::real(s, Unary::Cos),
        "tanh" => |s| each::real(s, Unary::Tanh),
        "sigmoid" => |s| each::real(s, Unary::Sigmoid),
        "erf" => |s| each::real(s, Unary::Erf),
        "silu" => |s| each::real(s, Unary::Silu),
        "gelu" => each::gelu,
        "softplus" => each::softplus,
        "mish" => each::mish,
        "elu" => each::elu,
        "leaky_relu" => each::leaky_relu,
        "hardtanh" => |s| each::hardtanh(s, -1.0, 1.0),
        "relu6" => |s| each::hardtanh(s, 0.0, 6.0),
        "hardsigmoid" => |s| each::hard_sigmoid(s, false),
        "hardswish" => |s| each::hard_sigmoid(s, true),
        "square" => each::square,
        "add" => |s| each::add(s, Binary::Add, false),
        "sub" | "subtract" => |s| each::add(s, Binary::Sub, false),
        "rsub" => |s| each::add(s, Binary::Sub, true),
        "mul" | "multiply" => each::multiply,
        "div" | "divide" | "true_divide" => |s| each::divide(s, ""),
        "floor_divide" => |s| each::divide(s, "floor"),
        "remainder" => |s| each::binary(s, Binary::Mod),
        "maximum" => |s| each::binary(s, Binary::Max),
        "minimum" => |s| each::binary(s, Binary::Min),
        "eq" => |s| each::compare(s, Compare::Equal, false),
        "ne" => each::differs,
        "lt" => |s| each::compare(s, Compare::Less, false),
        "le" => |s| each::compare(s, Compare::LessEqual, false),
        "gt" => |s| each::compare(s, Compare::Less, true),
        "ge" => |s| each::compare(s, Compare::LessEqual, true),
        "logical_and" => |s| each::logical(s, Binary::And),
        "logical_or" => |s| each::logical(s, Binary::Or),
        "logical_xor" => |s| each::logical(s, Binary::Xor),
        "logical_not" => |s| each::negate(s, false),
        "bitwise_and" | "__and__" => |s| each::bitwise(s, Binary::And),
        "bitwise_or" | "__or__" => |s| each::bitwise(s, Binary::Or),
        "bitwise_xor" | "__xor__" => |s| each::bitwise(s, Binary::Xor),
        "bitwise_not" => |s| each::negate(s, true),
        "isnan" => each::is_nan,
        "where" => each::choose,
        "masked_fill" => each::masked_fill,
        "clamp" | "clip" => |s| each::clamp(s, "min", "max"),
        "clamp_min" => |s| each::clamp(s, "min", "-"),
        "clamp_max" => |s| each::clamp(s, "-", "max"),
        "to" | "_to_copy" | "type_as" => each::cast,
        "copy" => each::copy,
        "zero" => |s| each::filled(s, Some(0.0)),
        "fill" => |s| each::filled(s, None),
        "dropout" | "native_dropout" | "feature_dropout" | "alpha_dropout" => each::dropout,
        "alias" | "clone" | "contiguous" | "lift_fresh" | "lift_fresh_copy" => each::identity,
        _ => return None,
    };
    Some(lower)
}

/// Shapes, parts and sources.
fn shaped(operator: &str) -> Option<Lower> {
    let lower: Lower = match operator {
        "view" | "_unsafe_view" => |s| movement::view(s, "size"),
        "reshape" => |s| movement::view(s, "shape"),
        "flatten" => movement::flatten,
        "unflatten" => movement::unflatten,
        "permute" => movement::permute,
        "transpose" => movement::transpose,
        "t" | "numpy_T" => movement::turn,
        "unsqueeze" => movement::unsqueeze,
        "squeeze" => movement::squeeze,
        "expand" | "expand_as" => movement::expand,
        "repeat" => movement::repeat,
        "cat" | "concat" => movement::concat,
        "stack" => movement::stack,
        "flip" => movement::flip,
        "constant_pad_nd" | "pad" => movement::pad,
        "detach" => movement::detach,
        "slice" => slice::slice,
        "narrow" => slice::narrow,
        "select" => slice::select,
        "split" => |s| {
            if s.has("split_sizes") { split(s, Cut::Sizes("split_sizes")) } else { split(s, Cut::Each("split_size")) }
        },
        "split_with_sizes" => |s| split(s, Cut::Sizes("split_sizes")),
        "chunk" => |s| split(s, Cut::Count("chunks")),
        "unbind" => |s| split(s, Cut::Apart),
        "embedding" => index::embedding,
        "index_select" => index::select,
        "gather" => index::gather,
        "index" => index::index,
        "arange" => create::arange,
        "full" => |s| create::full(s, None, false),
        "zeros" | "new_zeros" => |s| create::full(s, Some(0.0), false),
        "ones" | "new_ones" => |s| create::full(s, Some(1.0), false),
        "new_full" => |s| create::full(s, None, false),
        "full_like" => |s| create::full(s, None, true),
        "zeros_like" => |s| create::full(s, Some(0.0), true),
        "ones_like" => |s| create::full(s, Some(1.0), true),
        "scalar_tensor" => create::scalar_tensor,
        "tril" => |s| create::part(s, false),
        "triu" => |s| create::part(s, true),
        "sym_size" => create::sym_size,
        "sym_numel" => create::sym_numel,
        "_assert_tensor_metadata"
        | "_assert_async"
        | "_assert_scalar"
        | "sym_constrain_range"
        | "sym_constrain_range_for_size" => create::nothing,
        "sum" => |s| reduce::reduce(s, ReduceKind::Sum),
        "mean" => |s| reduce::reduce(s, ReduceKind::Mean),
        "prod" => |s| reduce::reduce(s, ReduceKind::Prod),
        "amax" => |s| reduce::reduce(s, ReduceKind::Max),
        "amin" => |s| reduce::reduce(s, ReduceKind::Min),
        "max" => |s| reduce::extreme(s, true),
        "min" => |s| reduce::extreme(s, false),
        "argmax" => |s| reduce::place(s, true),
        "argmin" => |s| reduce::place(s, false),
        "any" => |s| reduce::truth(s, false),
        "all" => |s| reduce::truth(s, true),
        "var" => |s| reduce::variance(s, false, false),
        "std" => |s| reduce::variance(s, true, false),
        "var_mean" => |s| reduce::variance(s, false, true),
        "logsumexp" => reduce::log_sum_exp,
        "linalg_vector_norm" => |s| reduce::vector_norm(s, "ord"),
        "softmax" | "_softmax" => |s| reduce::softmax(s, false),
        "log_softmax" | "_log_softmax" => |s| reduce::softmax(s, true),
        _ => return None,
    };
    Some(lower)
}

/// What the layers of a network are.
fn layers(operator: &str) -> Option<Lower> {
    let lower: Lower = match operator {
        "linear" => linear::linear,
        "matmul" => |s| linear::matmul(s, "other"),
        "mm" | "bmm" => |s| linear::matmul(s, "mat2"),
        "mv" => |s| linear::matmul(s, "vec"),
        "dot" => |s| linear::matmul(s, "tensor"),
        "addmm" => |s| linear::with_sum(s, "mat1", "mat2"),
        "baddbmm" => |s| linear::with_sum(s, "batch1", "batch2"),
        "scaled_dot_product_attention" => attention::attention,
        "lstm" => recurrent::lstm,
        "conv1d" | "conv2d" | "conv3d" | "convolution" | "_convolution" => window::conv,
        "conv_transpose1d" | "conv_transpose2d" | "conv_transpose3d" => window::conv_transpose,
        "max_pool1d" => |s| window::max_pool(s, 1),
        "max_pool2d" | "max_pool2d_with_indices" => |s| window::max_pool(s, 2),
        "max_pool3d" | "max_pool3d_with_indices" => |s| window::max_pool(s, 3),
        "avg_pool1d" => |s| window::avg_pool(s, 1),
        "avg_pool2d" => |s| window::avg_pool(s, 2),
        "avg_pool3d" => |s| window::avg_pool(s, 3),
        "adaptive_avg_pool1d" => |s| window::adaptive_pool(s, 1, false),
        "adaptive_avg_pool2d" | "_adaptive_avg_pool2d" => |s| window::adaptive_pool(s, 2, false),
        "adaptive_avg_pool3d" | "_adaptive_avg_pool3d" => |s| window::adaptive_pool(s, 3, false),
        "adaptive_max_pool2d" => |s| window::adaptive_pool(s, 2, true),
        "upsample_nearest1d" | "upsample_nearest2d" => |s| window::nearest(s, "self"),
        "batch_norm" | "native_batch_norm" | "_native_batch_norm_legit" | "_native_batch_norm_legit_functional" => {
            |s| norm::batch_norm(s, false)
        }
        "_native_batch_norm_legit_no_training" => |s| norm::batch_norm(s, false),
        "layer_norm" | "native_layer_norm" => norm::layer_norm,
        "rms_norm" => norm::rms_norm,
        "group_norm" => |s| norm::group_norm(s, "num_groups"),
        "native_group_norm" => |s| norm::group_norm(s, "group"),
        "cross_entropy_loss" => loss::cross_entropy,
        "nll_loss" | "nll_loss_nd" | "nll_loss2d" | "nll_loss_forward" | "nll_loss2d_forward" => {
            loss::negative_log_likelihood
        }
        "mse_loss" => |s| loss::distance(s, true),
        "l1_loss" => |s| loss::distance(s, false),
        _ => return None,
    };
    Some(lower)
}
