//! Dispatch of core ops to fast kernels.

use super::conv_role::Role;
use super::*;

impl Kernel {
    /// The kernel of an op at concrete facts: a fast one if there is one, else the reference.
    pub fn new(op: &Op, inputs: &[Fact], outputs: &[Fact]) -> Kernel {
        let inputs: Vec<TensorLayout> = inputs.iter().map(TensorLayout::of).collect();
        let outputs: Vec<TensorLayout> = outputs.iter().map(TensorLayout::of).collect();
        // The reference defines the results for empty tensors.
        let empty = inputs.iter().chain(&outputs).any(TensorLayout::is_empty);
        let fast = if empty { None } else { fast_or_half(op, &inputs, &outputs) };
        Kernel::from_parts(op.clone(), inputs, outputs, fast)
    }
}

/// The fast kernel of an op, also for element types of two bytes.
pub(super) fn fast_or_half(op: &Op, inputs: &[TensorLayout], outputs: &[TensorLayout]) -> Option<FastKernel> {
    fast(op, inputs, outputs).or_else(|| half::kernel(op, inputs, outputs))
}

/// The fast kernel of an op for these element types, if there is one.
pub(super) fn fast(op: &Op, inputs: &[TensorLayout], outputs: &[TensorLayout]) -> Option<FastKernel> {
    match (op, inputs, outputs) {
        (Op::Unary(op), [x], _) => elementwise::unary(*op, x),
        (Op::Binary(op), [a, b], [y]) => elementwise::binary(*op, a, b, y),
        (Op::Compare(op), [a, b], [y]) => elementwise::compare(*op, a, b, y),
        (Op::Select(_), [condition, a, b], [y]) => elementwise::select(condition, a, b, y),
        (Op::Cast(_), [x], [y]) => cast::kernel(x, y),
        (Op::Reduce(op), [x], [y]) => reduce::kernel(op, x, y),
        (Op::ArgReduce(op), [x], _) => reduce::arg(op, x),
        (Op::MatMul(op), [a, b], [c]) => matmul::kernel(op, a, b, c),
        (Op::Conv(op), [x, w], [y]) => conv::kernel(Role::Forward, &op.window, op.groups, x, w, y),
        (Op::ConvInputGrad(op), [dy, w], [dx]) => conv::kernel(Role::InputGrad, &op.window, op.groups, dx, w, dy),
        (Op::ConvWeightGrad(op), [dy, x], [dw]) => conv::kernel(Role::WeightGrad, &op.window, op.groups, x, dw, dy),
        (Op::GroupedMatMul(op), [x, w, ends], _) => grouped_matmul::kernel(op, x, w, ends),
        (Op::GroupedMatMulGrad(_), [a, b, ends], _) => grouped_matmul::grad(a, b, ends),
        (Op::Attention(op), inputs, _) => attention::kernel(op, inputs),
        (Op::AttentionGrad(op), inputs, _) => attention::grad(op, inputs),
        (Op::Lstm(op), [x, _, w_hh, ..], _) => lstm::kernel(op.reverse, x, w_hh),
        (Op::LstmGrad(op), [_, _, _, x, _, w_hh, ..], _) => lstm::grad(op.reverse, x, w_hh),
        (Op::Gru(op), [x, _, w_hh, ..], _) => gru::kernel(op, x, w_hh),
        (Op::GruGrad(op), [_, _, x, _, w_hh, ..], _) => gru::grad(op, x, w_hh),
        (Op::Rnn(op), [x, _, w_hh, ..], _) => rnn::kernel(op, x, w_hh),
        (Op::RnnGrad(op), [_, _, x, _, w_hh, ..], _) => rnn::grad(op, x, w_hh),
        (Op::MaxPool(op), [x], [y]) => pool::max(op, x, y),
        (Op::MaxPoolGrad(op), [x, dy], _) => pool::max_grad(&op.forward, x, dy),
        (Op::AvgPool(op), [x], [y]) => pool::avg(op, x, y),
        (Op::AvgPoolGrad(op), [dy], [dx]) => pool::avg_grad(&op.forward, dy, dx),
        (Op::Constant(op), _, _) => Some(movement::constant(op.tensor.bytes().clone())),
        (Op::Iota(op), _, [y]) => movement::iota(op, y),
        (Op::Reshape(_), _, _) => Some(movement::copy()),
        (Op::Transpose(op), [x], [y]) => movement::transpose(op, x, y),
        (Op::Broadcast(_), [x], [y]) => movement::broadcast(x, y),
        (Op::Slice(op), [x], [y]) => movement::slice(op, x, y),
        (Op::Pad(op), [x], [y]) => movement::pad(op, x, y),
        (Op::Concat(op), inputs, [y]) => movement::concat(op, inputs, y),
        (Op::Flip(op), [x], [y]) => movement::flip(op, x, y),
        (Op::Gather(op), [x, indices], _) => gather::gather(op, x, indices),
        (Op::ScatterAdd(op), [dy, indices], [y]) => gather::scatter_add(op, dy, indices, y),
        (Op::BatchGather(op), [x, indices], _) => gather::batch_gather(op, x, indices),
        (Op::BatchScatterAdd(op), [dy, indices], [y]) => gather::batch_scatter_add(op, dy, indices, y),
        (Op::Softmax(op), [x], _) => softmax::kernel(op.axis, false, x),
        (Op::LogSoftmax(op), [x], _) => softmax::kernel(op.axis, true, x),
        (Op::LayerNorm(op), [x, scale, _], _) => layer_norm::kernel(op, x, scale),
        (Op::LayerNormGrad(_), [_, x, scale, ..], _) => layer_norm::grad(x, scale),
        (Op::BatchNorm(op), [x, ..], _) => batch_norm::kernel(op, x),
        (Op::BatchNormGrad(_), [_, x, ..], _) => batch_norm::grad(x),
        (Op::Dropout(op), [x, _], _) => dropout::kernel(op, x),
        (Op::DropoutPart(op), [x, ..], _) => dropout::part(op, x),
        (Op::CrossEntropy(op), [logits, target], _) => cross_entropy::kernel(op, logits, target),
        (Op::CrossEntropyGrad(op), [_, logits, target, _], _) => cross_entropy::grad(op, logits, target),
        _ => None,
    }
}
