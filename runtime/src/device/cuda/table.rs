//! Dispatch of core ops to launch plans.

use super::launch_plan::LaunchPlan;
use super::*;
use crate::device::layout::TensorLayout;
use compiler::op::Op;

impl LaunchPlan {
    /// `None` for sources, and for empty tensors, for which the reference defines the result.
    pub fn new(op: &Op, inputs: &[TensorLayout], outputs: &[TensorLayout]) -> Option<LaunchPlan> {
        // Of the inputs of a concatenation, some may be empty.
        let non_empty = if matches!(op, Op::Concat(_)) { &[][..] } else { inputs };
        if non_empty.iter().chain(outputs).any(TensorLayout::is_empty) {
            return None;
        }
        match (op, inputs, outputs) {
            (Op::Iota(op), _, [y]) => movement::iota(op, y),
            (Op::Uniform(op), _, [y]) => movement::uniform(op, y),
            (Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select(_) | Op::Cast(_), inputs, [y]) => {
                elementwise::kernel(op, inputs, y)
            }
            (Op::BitCast(_) | Op::Reshape(_) | Op::StopGradient(_), [x], [y]) => Some(movement::copy(x, y)),
            (Op::Reduce(op), [x], [y]) => reduce::kernel(op, x, y),
            (Op::ArgReduce(op), [x], _) => ordering::arg(op, x),
            (Op::TopK(op), [x], [values, _]) => ordering::top_k(op, x, values),
            (Op::Cumulative(op), [x], _) => ordering::cumulative(op, x),
            (Op::MatMul(op), [a, b], [c]) => matmul::kernel(op, a, b, c),
            (Op::Conv(op), [x, w], [y]) => conv::forward(&op.window, x, w, y),
            (Op::ConvInputGrad(op), [dy, w], [dx]) => conv::input_grad(&op.window, dy, w, dx),
            (Op::ConvWeightGrad(op), [dy, x], [dw]) => conv::weight_grad(&op.window, dy, x, dw),
            (Op::GroupedMatMul(op), [x, w, ends], [y]) => grouped_matmul::kernel(op, x, w, ends, y),
            (Op::GroupedMatMulGrad(_), [a, b, ends], [c]) => grouped_matmul::grad(a, b, ends, c),
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
            (Op::Transpose(op), [x], [y]) => movement::transpose(op, x, y),
            (Op::Broadcast(_), [x], [y]) => movement::broadcast(x, y),
            (Op::Slice(op), [x], [y]) => movement::slice(op, x, y),
            (Op::Pad(op), [x], [y]) => movement::pad(op, x, y),
            (Op::Concat(op), inputs, [y]) => movement::concat(op, inputs, y),
            (Op::Flip(op), [x], [y]) => movement::flip(op, x, y),
            (Op::Gather(op), [x, indices], [y]) => gather::gather(op, x, indices, y),
            (Op::ScatterAdd(op), [dy, indices], [y]) => gather::scatter_add(op, dy, indices, y),
            (Op::BatchGather(op), [x, indices], [y]) => gather::batch_gather(op, x, indices, y),
            (Op::BatchScatterAdd(op), [dy, indices], [y]) => gather::batch_scatter_add(op, dy, indices, y),
            (Op::Scatter(op), [_, indices, updates], [y]) => gather::scatter(op, indices, updates, y),
            (Op::Softmax(op), [x], _) => softmax::kernel(op.axis, false, x),
            (Op::LogSoftmax(op), [x], _) => softmax::kernel(op.axis, true, x),
            (Op::LayerNorm(op), [x, scale, _], _) => layer_norm::kernel(op, x, scale),
            (Op::LayerNormGrad(_), [_, x, scale, ..], _) => Some(layer_norm::grad(x, scale)),
            (Op::BatchNorm(op), [x, scale, _], _) => Some(batch_norm::kernel(op, x, scale)),
            (Op::BatchNormGrad(_), [_, x, scale, ..], _) => batch_norm::grad(x, scale),
            (Op::Dropout(op), [x, _], _) => movement::dropout(op, x),
            (Op::DropoutPart(op), [x, _, _], _) => movement::dropout_part(op, x),
            (Op::CrossEntropy(op), [logits, target], [loss, _]) => {
                cross_entropy::kernel(op, logits, target, loss.dtype)
            }
            (Op::CrossEntropyGrad(op), [dloss, logits, target, _], _) => cross_entropy::grad(op, dloss, logits, target),
            _ => None,
        }
    }
}
