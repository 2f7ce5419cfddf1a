//! All core ops in one list: from an op to its rule, and from a name in the text form to the op.

use super::*;
use serde_json::{Map, Value as Json, json};

pub fn rule(op: &Op) -> &dyn OpRule {
    match op {
        Op::Input(o) => o,
        Op::Parameter(o) => o,
        Op::State(o) => o,
        Op::Constant(o) => o,
        Op::Iota(o) => o,
        Op::Uniform(o) => o,
        Op::Unary(o) => o,
        Op::Binary(o) => o,
        Op::Compare(o) => o,
        Op::Select(o) => o,
        Op::Cast(o) => o,
        Op::BitCast(o) => o,
        Op::Reduce(o) => o,
        Op::ArgReduce(o) => o,
        Op::TopK(o) => o,
        Op::Cumulative(o) => o,
        Op::MatMul(o) => o,
        Op::GroupedMatMul(o) => o,
        Op::GroupedMatMulGrad(o) => o,
        Op::Conv(o) => o,
        Op::ConvInputGrad(o) => o,
        Op::ConvWeightGrad(o) => o,
        Op::Attention(o) => o,
        Op::AttentionGrad(o) => o,
        Op::Lstm(o) => o,
        Op::LstmGrad(o) => o,
        Op::Gru(o) => o,
        Op::GruGrad(o) => o,
        Op::Rnn(o) => o,
        Op::RnnGrad(o) => o,
        Op::MaxPool(o) => o,
        Op::MaxPoolGrad(o) => o,
        Op::AvgPool(o) => o,
        Op::AvgPoolGrad(o) => o,
        Op::Reshape(o) => o,
        Op::Transpose(o) => o,
        Op::Broadcast(o) => o,
        Op::Slice(o) => o,
        Op::Pad(o) => o,
        Op::Concat(o) => o,
        Op::Flip(o) => o,
        Op::Gather(o) => o,
        Op::ScatterAdd(o) => o,
        Op::BatchGather(o) => o,
        Op::BatchScatterAdd(o) => o,
        Op::Scatter(o) => o,
        Op::StopGradient(o) => o,
        Op::Softmax(o) => o,
        Op::LogSoftmax(o) => o,
        Op::LayerNorm(o) => o,
        Op::LayerNormGrad(o) => o,
        Op::BatchNorm(o) => o,
        Op::BatchNormGrad(o) => o,
        Op::Dropout(o) => o,
        Op::CrossEntropy(o) => o,
        Op::CrossEntropyGrad(o) => o,
        Op::AllReduce(o) => o,
        Op::ReduceScatter(o) => o,
        Op::AllGather(o) => o,
        Op::AllToAll(o) => o,
        Op::Shard(o) => o,
        Op::DropoutPart(o) => o,
    }
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
