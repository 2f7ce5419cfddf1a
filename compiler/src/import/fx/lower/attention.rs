//! Attention, as a small graph: `softmax(q·kᵀ·scale + mask)·v`.

use super::function::largest;
use super::{Outputs, Scope, one};
use crate::import::build::Build;
use crate::import::lower_error::LowerReason;
use crate::import::onnx::lower::linear::product;
use crate::import::onnx::lower::movement::repeat_elements;
use crate::op::{Binary, Compare, Dropout, MatMul, Op, Softmax, Value};
use crate::tensor::DType;
use crate::tensor::dim::Dim;
use crate::tensor::fact::Fact;

/// Scaled dot-product attention of `query [… L, E]`, `key [… S, E]` and `value [… S, V]`.
pub fn attention(scope: &mut Scope<'_>) -> Outputs {
    let (query, mut key, mut value) = (scope.value("query")?, scope.value("key")?, scope.value("value")?);
    let fact = scope.fact(query);
    if fact.rank() < 2 || scope.fact(key).rank() != fact.rank() {
        return Err(LowerReason::Inputs(format!("queries {fact} and keys {}", scope.fact(key))));
    }
    if scope.flag("enable_gqa", false)? {
        (key, value) = (repeat_kv_heads(scope, key, &fact)?, repeat_kv_heads(scope, value, &fact)?);
    }
    let mut weights = probabilities(scope, query, key)?;
    let ratio = scope.float("dropout_p", 0.0)?;
    if ratio != 0.0 {
        let counter = scope.counter()?;
        weights = scope.add(Op::Dropout(Dropout { ratio, stream: 0 }), &[weights, counter])?;
    }
    one(product(scope, weights, value)?)
}

/// The scale of the scores, `1/√E` by default.
pub fn scale_of(scope: &Scope<'_>, query: Value) -> Result<f64, LowerReason> {
    let width = scope.fact(query).shape.last().and_then(Dim::known);
    let width = width.ok_or(LowerReason::NotConstant { what: "the head dimension" })?;
    scope.float("scale", 1.0 / (width as f64).sqrt())
}

pub fn probabilities(scope: &mut Scope<'_>, query: Value, key: Value) -> Result<Value, LowerReason> {
    let scale = scale_of(scope, query)?;
    let scores = scope.add(Op::MatMul(MatMul { transpose_a: false, transpose_b: true }), &[query, key])?;
    let mut scores = scope.with_number(Binary::Mul, scores, scale)?;
    if scope.flag("is_causal", false)? {
        let causal_mask = causal(scope, scores)?;
        scores = mask_scores(scope, scores, causal_mask)?;
    }
    let mut truths = None;
    if let Some(mask) = scope.optional("attn_mask")? {
        let mut operands = [scores, mask];
        scope.align_batch(&mut operands, None)?;
        let mask = operands[1];
        scores = match scope.fact(mask).dtype {
            DType::Bool => {
                truths = Some(mask);
                mask_scores(scope, scores, mask)?
            }
            _ => scope.binary(Binary::Add, scores, mask)?,
        };
    }
    let axis = scope.fact(scores).rank() - 1;
    let weights = scope.add(Op::Softmax(Softmax { axis }), &[scores])?;
    let Some(mask) = truths else { return Ok(weights) };
    // A query whose keys are all masked yields zeros.
    let zero = scope.scalar(scope.fact(weights).dtype, 0.0)?;
    scope.select(mask, weights, zero)
}

/// The causal mask: a query attends to keys up to its own position.
fn causal(scope: &mut Scope<'_>, scores: Value) -> Result<Value, LowerReason> {
    let shape = scope.fact(scores).shape;
    let [.., queries, keys] = shape.as_slice() else {
        return Err(LowerReason::Inputs("its scores are not matrices".to_string()));
    };
    let (i, j) = (scope.count(2, 0, queries)?, scope.count(2, 1, keys)?);
    scope.compare(Compare::LessEqual, j, i)
}

/// Sets masked scores to the lowest finite number: a row of minus infinities would give NaN.
fn mask_scores(scope: &mut Scope<'_>, scores: Value, mask: Value) -> Result<Value, LowerReason> {
    let dtype = scope.fact(scores).dtype;
    let lowest = -largest(dtype);
    let fill = scope.scalar(dtype, lowest)?;
    scope.select(mask, scores, fill)
}

/// Repeats the heads of `x [… G, S, E]` to the number of query heads (grouped-query attention).
fn repeat_kv_heads(scope: &mut Scope<'_>, x: Value, query: &Fact) -> Result<Value, LowerReason> {
    let shape = scope.fact(x).shape;
    let Some(heads) = shape.len().checked_sub(3) else { return Ok(x) };
    let repeats = query.shape[heads].div_exact(&shape[heads])?;
    repeat_elements(scope, x, heads, &repeats)
}
