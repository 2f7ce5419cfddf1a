//! `Attention`, `FlexAttention` and the related operators `RotaryEmbedding` and `SwiGLU`.
//!
//! Computes `softmax(cap(Q·Kᵀ·scale) + bias)·V`. All masks are combined in the additive bias: 0 where a query may
//! attend, -∞ where it may not. For fully masked queries the output is zero; their scores are replaced before the
//! softmax, which would give NaN.

use super::gather::number;
use super::movement::{repeat_elements, transposed};
use super::slice::part;
use super::weight::dtype_of;
use super::{Known, LowerReason, Outputs, Scope};
use crate::import::build::Build;
use crate::import::formula::{formula, formulas};
use crate::import::lower_error::at_least_one;
use crate::op::{Binary, Compare, Gather, MatMul, Op, Pad, ReduceKind, Slice, Softmax, Value};
use crate::tensor::DType;
use crate::tensor::dim::Dim;

/// `[B, S, heads·D]` to `[B, heads, S, D]`.
fn split_heads(scope: &mut Scope<'_>, x: Value, heads: i64) -> Result<Value, LowerReason> {
    let fact = scope.fact(x);
    let [batch, steps, width] = fact.shape.as_slice() else {
        return Err(LowerReason::Inputs(format!("its input {fact} does not have rank 3")));
    };
    let head_size = width.div_exact(&Dim::Known(heads))?;
    let split = scope.reshape(x, vec![batch.clone(), steps.clone(), Dim::Known(heads), head_size])?;
    transposed(scope, split, vec![0, 2, 1, 3])
}

/// `[B, heads, S, D]` to `[B, S, heads·D]`.
fn join_heads(scope: &mut Scope<'_>, x: Value) -> Result<Value, LowerReason> {
    let merged = transposed(scope, x, vec![0, 2, 1, 3])?;
    let shape = scope.fact(merged).shape;
    let width = shape[2].mul(&shape[3])?;
    scope.reshape(merged, vec![shape[0].clone(), shape[1].clone(), width])
}

fn heads(scope: &Scope<'_>, name: &'static str) -> Result<i64, LowerReason> {
    at_least_one(name, scope.int(name, 0)?)
}

/// Repeats each key or value head for the query heads that share it (grouped-query attention).
fn repeat_kv_heads(scope: &mut Scope<'_>, x: Value, query_heads: &Dim) -> Result<Value, LowerReason> {
    let shape = scope.fact(x).shape;
    if shape[1] == *query_heads {
        return Ok(x);
    }
    let repeats = query_heads.div_exact(&shape[1])?;
    repeat_elements(scope, x, 1, &repeats)
}

/// `Q·Kᵀ·scale`, with the square root of the scale applied to both factors to reduce overflow.
fn scores(scope: &mut Scope<'_>, q: Value, k: Value) -> Result<Value, LowerReason> {
    let size = scope.fact(q).shape[3].known();
    let scale = match (scope.is_set("scale"), size) {
        (true, _) => scope.float("scale", 1.0)?,
        (false, Some(size)) if size > 0 => 1.0 / (size as f64).sqrt(),
        _ => return Err(LowerReason::Inputs("its head size is unknown".to_string())),
    };
    if scale < 0.0 {
        return Err(LowerReason::attribute("scale", scale, "an integer of at least 0"));
    }
    let q = scope.with_number(Binary::Mul, q, scale.sqrt())?;
    let k = scope.with_number(Binary::Mul, k, scale.sqrt())?;
    scope.add(Op::MatMul(MatMul { transpose_a: false, transpose_b: true }), &[q, k])
}

/// `0` where a condition holds, else `-∞`.
fn mask_bias(scope: &mut Scope<'_>, condition: Value, dtype: DType) -> Result<Value, LowerReason> {
    let (zero, infinity) = (scope.scalar(dtype, 0.0)?, scope.scalar(dtype, f64::NEG_INFINITY)?);
    scope.select(condition, zero, infinity)
}

/// Upper limit of a window size.
const MAX_WINDOW: i64 = 1 << 40;

/// The additive attention mask under construction.
struct AttentionMask {
    dtype: DType,
    /// Number of queries and of keys.
    sizes: [Dim; 2],
    /// Sum of all masks so far.
    bias: Option<Value>,
    /// True if some query may be fully masked.
    may_mask_all: bool,
}

impl AttentionMask {
    fn add(&mut self, scope: &mut Scope<'_>, bias: Value) -> Result<(), LowerReason> {
        self.bias = Some(match self.bias {
            Some(sum) => scope.binary(Binary::Add, sum, bias)?,
            None => bias,
        });
        Ok(())
    }

    /// Adds the mask input. If it covers fewer keys than there are, the remaining keys are masked.
    fn mask(&mut self, scope: &mut Scope<'_>, mask: Value) -> Result<(), LowerReason> {
        let mut bias = match scope.fact(mask).dtype {
            DType::Bool => mask_bias(scope, mask, self.dtype)?,
            _ => scope.cast(mask, self.dtype)?,
        };
        let shape = scope.fact(bias).shape;
        if let Some(mask_keys) = shape.last()
            && !mask_keys.is(1)
            && *mask_keys != self.sizes[1]
        {
            let missing = self.sizes[1].sub(mask_keys)?;
            if missing.known().is_some_and(|missing| missing < 0) {
                return Err(LowerReason::Inputs(format!("a mask over {mask_keys} keys for {}", self.sizes[1])));
            }
            let zeros = vec![Dim::Known(0); shape.len()];
            let mut high = zeros.clone();
            high[shape.len() - 1] = missing;
            let pad = Pad { low: zeros, high, interior: vec![0; shape.len()], value: f64::NEG_INFINITY };
            bias = scope.add(Op::Pad(pad), &[bias])?;
        }
        self.may_mask_all = true;
        self.add(scope, bias)
    }

    /// Adds a sliding window: keys from `left` before to `right` after the position of a query, which is its index plus
    /// `offset`.
    fn window(&mut self, scope: &mut Scope<'_>, offset: Value, sides: [Option<i64>; 2]) -> Result<(), LowerReason> {
        let (i, j) = (scope.count(2, 0, &self.sizes[0])?, scope.count(2, 1, &self.sizes[1])?);
        let position = scope.binary(Binary::Add, i, offset)?;
        for (side, window_size) in sides.into_iter().enumerate() {
            // Limits the window size so that adding a position cannot overflow.
            let Some(window_size) = window_size.map(|window_size| window_size.min(MAX_WINDOW)) else { continue };
            let window_size = number(scope, &Dim::Known(window_size))?;
            let visible = if side == 0 {
                let first = scope.binary(Binary::Sub, position, window_size)?;
                scope.compare(Compare::LessEqual, first, j)?
            } else {
                let last = scope.binary(Binary::Add, position, window_size)?;
                scope.compare(Compare::LessEqual, j, last)?
            };
            let bias = mask_bias(scope, visible, self.dtype)?;
            self.add(scope, bias)?;
        }
        Ok(())
    }

    /// The scores plus the bias, and a condition that is true for fully masked queries.
    fn applied(&self, scope: &mut Scope<'_>, scores: Value) -> Result<(Value, Option<Value>), LowerReason> {
        let Some(bias) = self.bias else { return Ok((scores, None)) };
        let sum = scope.binary(Binary::Add, scores, bias)?;
        if !self.may_mask_all {
            return Ok((sum, None));
        }
        let last = scope.fact(bias).rank() - 1;
        let row_max = scope.reduce(ReduceKind::Max, bias, &[last], true)?;
        let infinity = scope.scalar(self.dtype, f64::NEG_INFINITY)?;
        Ok((sum, Some(scope.compare(Compare::Equal, row_max, infinity)?)))
    }
}

/// The element type of the softmax, if the node specifies one.
fn precision(scope: &Scope<'_>) -> Result<Option<DType>, LowerReason> {
    if !scope.is_set("softmax_precision") {
        return Ok(None);
    }
    let code = scope.int("softmax_precision", 0)?;
    match i32::try_from(code).ok().and_then(dtype_of).filter(|d| d.is_float()) {
        Some(dtype) => Ok(Some(dtype)),
        None => Err(LowerReason::Unsupported(format!("a softmax in element type {code}"))),
    }
}

/// Scaled dot-product attention with grouped query heads, masks, a key/value cache, windows and soft capping.
pub fn attention(scope: &mut Scope<'_>) -> Outputs {
    let (mut q, mut k, mut v) = (scope.value(0)?, scope.value(1)?, scope.value(2)?);
    let dtype = scope.fact(q).dtype;
    let flat = scope.fact(q).rank() == 3;
    if flat {
        let (query, key) = (heads(scope, "q_num_heads")?, heads(scope, "kv_num_heads")?);
        q = split_heads(scope, q, query)?;
        k = split_heads(scope, k, key)?;
        v = split_heads(scope, v, key)?;
    }
    for value in [q, k, v] {
        if scope.fact(value).rank() != 4 {
            return Err(LowerReason::Inputs(format!("its input {} does not have rank 3 or 4", scope.fact(value))));
        }
    }
    let mut past = Dim::Known(0);
    if let (Some(keys), Some(values)) = (scope.optional(4)?, scope.optional(5)?) {
        past = scope.fact(keys).shape.get(2).cloned().unwrap_or(past);
        // Before the first step the cache is empty.
        if !past.is(0) {
            k = scope.concat(&[keys, k], 2)?;
            v = scope.concat(&[values, v], 2)?;
        }
    }
    let (present_k, present_v) = (k, v);
    let query_heads = scope.fact(q).shape[1].clone();
    let (k, v) = (repeat_kv_heads(scope, k, &query_heads)?, repeat_kv_heads(scope, v, &query_heads)?);
    // Half precision is computed in F32 and rounded once at the end.
    let inner = if matches!(dtype, DType::F16 | DType::Bf16) { DType::F32 } else { dtype };
    let (q, k, v) = (scope.cast(q, inner)?, scope.cast(k, inner)?, scope.cast(v, inner)?);
    let raw = scores(scope, q, k)?;
    let shape = scope.fact(raw).shape;
    let sizes = [shape[2].clone(), shape[3].clone()];
    let mut mask = AttentionMask { dtype: inner, sizes, bias: None, may_mask_all: false };
    collect_masks(scope, &mut mask, &shape[0], &past)?;
    let cap = scope.float("softcap", 0.0)?;
    let capped = if cap > 0.0 { formula(scope, [raw], |[raw]| (raw / cap).tanh() * cap)? } else { raw };
    let (biased, may_mask_all) = mask.applied(scope, capped)?;
    let mut probabilities = biased;
    if let Some(precision) = precision(scope)? {
        probabilities = scope.cast(probabilities, precision)?;
    }
    let zero = scope.scalar(scope.fact(probabilities).dtype, 0.0)?;
    if let Some(may_mask_all) = may_mask_all {
        probabilities = scope.select(may_mask_all, zero, probabilities)?;
    }
    probabilities = self::probabilities(scope, probabilities)?;
    if let Some(may_mask_all) = may_mask_all {
        probabilities = scope.select(may_mask_all, zero, probabilities)?;
    }
    let probabilities = scope.cast(probabilities, inner)?;
    let y = scope.add(Op::MatMul(MatMul { transpose_a: false, transpose_b: false }), &[probabilities, v])?;
    let y = scope.cast(y, dtype)?;
    let y = if flat { join_heads(scope, y)? } else { y };
    let qk_output = match scope.int("qk_matmul_output_mode", 0)? {
        0 => raw,
        1 => capped,
        2 => biased,
        3 => probabilities,
        other => {
            return Err(LowerReason::attribute("qk_matmul_output_mode", other, "an integer from 0 to 3"));
        }
    };
    let qk_output = scope.cast(qk_output, dtype)?;
    Ok([y, present_k, present_v, qk_output].map(Known::Value).to_vec())
}

/// Collects all masks: causal, window, mask input, sequence lengths.
fn collect_masks(
    scope: &mut Scope<'_>,
    mask_sum: &mut AttentionMask,
    batch: &Dim,
    past: &Dim,
) -> Result<(), LowerReason> {
    let side = |scope: &Scope<'_>, name: &'static str| -> Result<Option<i64>, LowerReason> {
        Ok(Some(scope.int(name, -1)?).filter(|window_size| *window_size >= 0))
    };
    let (left, right) = (side(scope, "left_window_size")?, side(scope, "right_window_size")?);
    let causal = scope.flag("is_causal", false)?;
    let right = if causal { Some(0) } else { right };
    let lengths = match scope.optional(6)? {
        Some(lengths) => {
            let lengths = scope.cast(lengths, DType::I64)?;
            Some(scope.reshape(lengths, vec![batch.clone(), Dim::Known(1), Dim::Known(1), Dim::Known(1)])?)
        }
        None => None,
    };
    if let Some(mask) = scope.optional(3)? {
        mask_sum.mask(scope, mask)?;
    }
    if left.is_some() || right.is_some() {
        let offset = match lengths {
            Some(lengths) => {
                let queries = number(scope, &mask_sum.sizes[0])?;
                scope.binary(Binary::Sub, lengths, queries)?
            }
            None => number(scope, past)?,
        };
        mask_sum.window(scope, offset, [left, right])?;
        // Without a left window, and with a non-negative offset, the first key is never masked.
        mask_sum.may_mask_all |= left.is_some() || lengths.is_some();
    }
    if let Some(lengths) = lengths {
        let j = scope.count(4, 3, &mask_sum.sizes[1])?;
        let visible = scope.compare(Compare::Less, j, lengths)?;
        let bias = mask_bias(scope, visible, mask_sum.dtype)?;
        mask_sum.may_mask_all = true;
        mask_sum.add(scope, bias)?;
    }
    Ok(())
}

/// The attention scores of a `FlexAttention`, in the element type of its softmax.
pub fn flex_scores(scope: &mut Scope<'_>) -> Result<Value, LowerReason> {
    let (q, k) = (scope.value(0)?, scope.value(1)?);
    for value in [q, k] {
        if scope.fact(value).rank() != 4 {
            return Err(LowerReason::Inputs(format!("its input {} does not have rank 4", scope.fact(value))));
        }
    }
    let dtype = scope.fact(q).dtype;
    let inner = precision(scope)?.unwrap_or(if dtype == DType::F64 { DType::F64 } else { DType::F32 });
    let query_heads = scope.fact(q).shape[1].clone();
    let k = repeat_kv_heads(scope, k, &query_heads)?;
    let scores = scores(scope, q, k)?;
    scope.cast(scores, inner)
}

pub fn probabilities(scope: &mut Scope<'_>, scores: Value) -> Result<Value, LowerReason> {
    scope.add(Op::Softmax(Softmax { axis: 3 }), &[scores])
}

pub fn flex_values(scope: &mut Scope<'_>, probabilities: Value) -> Outputs {
    let v = scope.value(2)?;
    let (fact, weights) = (scope.fact(v), scope.fact(probabilities));
    if fact.rank() != 4 {
        return Err(LowerReason::Inputs(format!("its input {fact} does not have rank 4")));
    }
    let v = repeat_kv_heads(scope, v, &weights.shape[1])?;
    let v = scope.cast(v, weights.dtype)?;
    let y = scope.add(Op::MatMul(MatMul { transpose_a: false, transpose_b: false }), &[probabilities, v])?;
    Ok(vec![Known::Value(scope.cast(y, fact.dtype)?)])
}

/// `FlexAttention` without subgraphs; `flex` handles subgraphs that modify the scores.
pub fn flex_attention(scope: &mut Scope<'_>) -> Outputs {
    let scores = flex_scores(scope)?;
    let probabilities = probabilities(scope, scores)?;
    flex_values(scope, probabilities)
}

/// Rotary position embedding: rotates pairs of elements, either from the two halves of a head or interleaved.
pub fn rotary(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value(0)?;
    let flat = scope.fact(x).rank() == 3;
    // [B, heads, S, D]
    let x = if flat {
        let heads = heads(scope, "num_heads")?;
        split_heads(scope, x, heads)?
    } else {
        x
    };
    let shape = scope.fact(x).shape;
    let size = shape.get(3).and_then(Dim::known).filter(|_| shape.len() == 4);
    let size = size.ok_or_else(|| LowerReason::Inputs("its head size is unknown".to_string()))?;
    let width = match scope.int("rotary_embedding_dim", 0)? {
        0 => size,
        width => width,
    };
    if !(2..=size).contains(&width) || width % 2 != 0 {
        return Err(LowerReason::attribute("rotary_embedding_dim", width, "an even number up to the head size"));
    }
    let (cos, sin) = (angles(scope, 1, width / 2)?, angles(scope, 2, width / 2)?);
    let interleaved = scope.flag("interleaved", false)?;
    let half = |scope: &mut Scope<'_>, second: i64| {
        let (begin, end, step) =
            if interleaved { (second, width, 2) } else { (second * width / 2, (second + 1) * width / 2, 1) };
        let mut slice = super::slice::full_slice(&shape);
        (slice.begin[3], slice.end[3], slice.step[3]) = (Dim::Known(begin), Dim::Known(end), step);
        scope.add(Op::Slice(Slice { ..slice }), &[x])
    };
    let (a, b) = (half(scope, 0)?, half(scope, 1)?);
    let [real, imaginary] = formulas(scope, [cos, sin, a, b], |[cos, sin, a, b]| {
        let [cos_a, sin_b, sin_a, cos_b] = [cos * a, sin * b, sin * a, cos * b];
        [cos_a - sin_b, sin_a + cos_b]
    })?;
    let rotated = if interleaved {
        let pairs = scope.stack(&[real, imaginary], 4)?;
        let mut merged_shape = shape.clone();
        merged_shape[3] = Dim::Known(width);
        scope.reshape(pairs, merged_shape)?
    } else {
        scope.concat(&[real, imaginary], 3)?
    };
    let y = if width < size {
        let tail = part(scope, x, 3, Dim::Known(width), Dim::Known(size))?;
        scope.concat(&[rotated, tail], 3)?
    } else {
        rotated
    };
    Ok(vec![Known::Value(if flat { join_heads(scope, y)? } else { y })])
}

/// The cosines or sines of all positions, `[B, 1, S, half]`.
fn angles(scope: &mut Scope<'_>, slot: usize, half: i64) -> Result<Value, LowerReason> {
    let mut cache = scope.value(slot)?;
    if let Some(positions) = scope.optional(3)? {
        cache = scope.add(Op::Gather(Gather { axis: 0 }), &[cache, positions])?;
    }
    let mut shape = scope.fact(cache).shape;
    if shape.len() != 3 || !shape[2].is(half) {
        return Err(LowerReason::Inputs(format!("{} are not angles for {half} pairs", scope.fact(cache))));
    }
    shape.insert(1, Dim::Known(1));
    scope.reshape(cache, shape)
}
