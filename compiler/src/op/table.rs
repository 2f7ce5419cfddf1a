//! All core ops in one list: from an op to its rule, and from a name in the text form to the op.

use super::*;
use serde_json::{Map, Value as Json, json};

macro_rules! ops {
    ($($op:ident $name:literal,)*) => {
        pub fn rule(op: &Op) -> &dyn OpRule {
            match op {
                $(Op::$op(o) => o,)*
                // These are named by their functions.
                Op::Unary(o) => o,
                Op::Binary(o) => o,
                Op::Compare(o) => o,
            }
        }

        $(impl Named for $op {
            fn name(&self) -> &'static str {
                $name
            }
        })*
    };
}

ops! {
    Input "input",
    Parameter "parameter",
    State "state",
    Constant "constant",
    Iota "iota",
    Uniform "uniform",
    Select "select",
    Cast "cast",
    BitCast "bit_cast",
    Reduce "reduce",
    ArgReduce "arg_reduce",
    TopK "top_k",
    Cumulative "cumulative",
    MatMul "matmul",
    GroupedMatMul "grouped_matmul",
    GroupedMatMulGrad "grouped_matmul_grad",
    Conv "conv",
    ConvInputGrad "conv_input_grad",
    ConvWeightGrad "conv_weight_grad",
    Attention "attention",
    AttentionGrad "attention_grad",
    Lstm "lstm",
    LstmGrad "lstm_grad",
    Gru "gru",
    GruGrad "gru_grad",
    Rnn "rnn",
    RnnGrad "rnn_grad",
    MaxPool "max_pool",
    MaxPoolGrad "max_pool_grad",
    AvgPool "avg_pool",
    AvgPoolGrad "avg_pool_grad",
    Reshape "reshape",
    Transpose "transpose",
    Broadcast "broadcast",
    Slice "slice",
    Pad "pad",
    Concat "concat",
    Flip "flip",
    Gather "gather",
    ScatterAdd "scatter_add",
    BatchGather "batch_gather",
    BatchScatterAdd "batch_scatter_add",
    Scatter "scatter",
    StopGradient "stop_gradient",
    Softmax "softmax",
    LogSoftmax "log_softmax",
    LayerNorm "layer_norm",
    LayerNormGrad "layer_norm_grad",
    BatchNorm "batch_norm",
    BatchNormGrad "batch_norm_grad",
    Dropout "dropout",
    CrossEntropy "cross_entropy",
    CrossEntropyGrad "cross_entropy_grad",
    AllReduce "all_reduce",
    ReduceScatter "reduce_scatter",
    AllGather "all_gather",
    AllToAll "all_to_all",
    Shard "shard",
    DropoutPart "dropout_part",
}

/// The test cases of all ops, which every device must pass.
pub fn samples() -> Vec<Sample> {
    [
        attention::samples(),
        batch_gather::samples(),
        batch_norm::samples(),
        binary::samples(),
        bit_cast::samples(),
        broadcast::samples(),
        cast::samples(),
        collective::samples(),
        compare::samples(),
        concat::samples(),
        conv::samples(),
        conv::grad::samples(),
        cross_entropy::samples(),
        cumulative::samples(),
        dropout::samples(),
        flip::samples(),
        gather::samples(),
        grouped_matmul::samples(),
        gru::samples(),
        iota::samples(),
        layer_norm::samples(),
        lstm::samples(),
        matmul::samples(),
        pad::samples(),
        pool::samples(),
        reduce::samples(),
        reshape::samples(),
        rnn::samples(),
        scatter::samples(),
        select::samples(),
        slice::samples(),
        softmax::samples(),
        source::samples(),
        stop_gradient::samples(),
        top_k::samples(),
        transpose::samples(),
        unary::samples(),
        uniform::samples(),
    ]
    .concat()
}

/// The attributes of an op as JSON, by field name. Ops without fields (`relu`, `add`) have none.
pub fn attributes(op: &Op) -> Map<String, Json> {
    match serde_json::to_value(op) {
        Ok(Json::Object(outer)) => match outer.into_iter().next() {
            Some((_, Json::Object(fields))) => fields,
            _ => Map::new(),
        },
        _ => Map::new(),
    }
}

/// Parses an op from its [`OpRule::name`] and [`attributes`].
pub fn parse(name: &str, attributes: Map<String, Json>) -> Result<Op, String> {
    if attributes.is_empty() {
        for family in ["unary", "binary", "compare"] {
            if let Ok(op) = serde_json::from_value::<Op>(json!({ family: name })) {
                return Ok(op);
            }
        }
    }
    serde_json::from_value(json!({ name: attributes })).map_err(|e| e.to_string())
}

/// The dims among an op's attributes, for binding symbols.
pub fn dims_mut(op: &mut Op) -> Vec<&mut Dim> {
    match op {
        Op::Input(o) => o.fact.shape.iter_mut().collect(),
        Op::Parameter(o) => o.fact.shape.iter_mut().collect(),
        Op::State(o) => o.fact.shape.iter_mut().collect(),
        Op::Iota(o) => o.fact.shape.iter_mut().collect(),
        Op::Uniform(o) => o.fact.shape.iter_mut().collect(),
        Op::ConvInputGrad(o) => o.spatial.iter_mut().collect(),
        Op::AvgPoolGrad(o) => o.spatial.iter_mut().collect(),
        Op::Reshape(o) => o.shape.iter_mut().collect(),
        Op::Broadcast(o) => o.shape.iter_mut().collect(),
        Op::Slice(o) => o.begin.iter_mut().chain(&mut o.end).collect(),
        Op::Pad(o) => o.low.iter_mut().chain(&mut o.high).collect(),
        Op::ScatterAdd(o) => vec![&mut o.size],
        Op::BatchScatterAdd(o) => vec![&mut o.size],
        Op::TopK(o) => vec![&mut o.count],
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_op_reads_back_from_its_name_and_attributes() {
        for sample in samples() {
            let name = rule(&sample.op).name();
            assert_eq!(parse(name, attributes(&sample.op)), Ok(sample.op.clone()), "{name}: {}", sample.title);
        }
    }
}
