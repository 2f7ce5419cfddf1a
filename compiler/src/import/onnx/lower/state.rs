//! Layers that carry state between calls: `LinearAttention`, `CausalConvWithState`.

use super::movement::transposed;
use super::slice::part;
use super::window::with_bias;
use super::{Known, LowerReason, Outputs, Scope};
use crate::import::build::Build;
use crate::op::{Binary, Conv, MatMul, Op, Unary, Value, Window};
use crate::tensor::DType;
use crate::tensor::dim::Dim;

/// Maximum number of steps of a linear attention, which is unrolled.
const STEPS: i64 = 256;

struct Rule {
    /// The state decays by a given factor.
    gated: bool,
    /// The value currently stored for a key is subtracted from the new value (delta rule).
    delta: bool,
}

/// `[B, T, heads·D]` to `[B, heads, T, D]`, in at least F32.
fn unpack_heads(scope: &mut Scope<'_>, slot: usize, heads: i64) -> Result<Value, LowerReason> {
    let x = scope.value(slot)?;
    let x = if scope.fact(x).dtype == DType::F64 { x } else { scope.cast(x, DType::F32)? };
    let fact = scope.fact(x);
    let [batch, steps, width] = fact.shape.as_slice() else {
        return Err(LowerReason::Inputs(format!("input {slot} is {fact}, expected rank 3")));
    };
    let head_size = width.div_exact(&Dim::Known(heads))?;
    let split = scope.reshape(x, vec![batch.clone(), steps.clone(), Dim::Known(heads), head_size])?;
    transposed(scope, split, vec![0, 2, 1, 3])
}

fn product(scope: &mut Scope<'_>, a: Value, b: Value, transpose_a: bool) -> Result<Value, LowerReason> {
    scope.add(Op::MatMul(MatMul { transpose_a, transpose_b: false }), &[a, b])
}

/// Linear attention: each step adds `kᵀv` to a state matrix S per head and outputs `q·S`. With gating, S is first
/// multiplied by `e^decay`. The delta rule adds `beta·kᵀ(v - k·S)` instead.
pub fn linear_attention(scope: &mut Scope<'_>) -> Outputs {
    let rule = match scope.text("update_rule", "gated_delta")?.as_str() {
        "linear" => Rule { gated: false, delta: false },
        "gated" => Rule { gated: true, delta: false },
        "delta" => Rule { gated: false, delta: true },
        "gated_delta" => Rule { gated: true, delta: true },
        other => {
            return Err(LowerReason::attribute("update_rule", other, "linear, gated, delta or gated_delta"));
        }
    };
    let (query_heads, heads) = (scope.int("q_num_heads", 0)?, scope.int("kv_num_heads", 0)?);
    if heads < 1 || query_heads < 1 || query_heads % heads != 0 {
        return Err(LowerReason::attribute(
            "q_num_heads",
            query_heads,
            "a multiple of `kv_num_heads`, both at least 1",
        ));
    }
    let out = scope.fact_of(0)?.dtype;
    let (q, k, v) =
        (unpack_heads(scope, 0, query_heads)?, unpack_heads(scope, 1, heads)?, unpack_heads(scope, 2, heads)?);
    let (keys, values) = (scope.fact(k), scope.fact(v));
    let [batch, _, steps, key_size] = keys.shape.as_slice() else { unreachable!("it has four axes") };
    let value_size = values.shape[3].clone();
    let scale = match (scope.float("scale", 0.0)?, key_size.known()) {
        (scale, _) if scale != 0.0 => scale,
        (_, Some(size)) if size > 0 => 1.0 / (size as f64).sqrt(),
        _ => return Err(LowerReason::Inputs("its head size is unknown".to_string())),
    };
    let length = steps.known().filter(|steps| (1..=STEPS).contains(steps)).ok_or_else(|| {
        LowerReason::Unsupported(format!("a linear attention over {steps} steps (supported: 1 to {STEPS})"))
    })?;
    let decay = if rule.gated { Some(unpack_heads(scope, 4, heads)?) } else { None };
    let beta = match rule.delta {
        true => {
            let shared = scope.fact_of(5)?.shape.last().is_some_and(|last| last.is(1));
            Some(unpack_heads(scope, 5, if shared { 1 } else { heads })?)
        }
        false => None,
    };
    let (mut state, state_type) = match scope.optional(3)? {
        Some(past) => (scope.cast(past, keys.dtype)?, scope.fact(past).dtype),
        None => {
            let zero = scope.scalar(keys.dtype, 0.0)?;
            let shape = vec![batch.clone(), Dim::Known(heads), key_size.clone(), value_size.clone()];
            (scope.broadcast(zero, shape)?, out)
        }
    };
    // Query heads that share a state become rows of one product.
    let rows = Dim::Known(query_heads / heads);
    let grouped = vec![batch.clone(), Dim::Known(heads), rows.clone(), key_size.clone()];
    let mut outputs = Vec::new();
    for t in 0..length {
        let at = |scope: &mut Scope<'_>, x: Value| part(scope, x, 2, Dim::Known(t), Dim::Known(t + 1));
        let (key, mut value) = (at(scope, k)?, at(scope, v)?);
        if let Some(decay) = decay {
            let decay = at(scope, decay)?;
            let column = transposed(scope, decay, vec![0, 1, 3, 2])?;
            let factor = scope.unary(Unary::Exp, column)?;
            state = scope.binary(Binary::Mul, state, factor)?;
        }
        if let Some(beta) = beta {
            let recalled = product(scope, key, state, false)?;
            let delta = scope.binary(Binary::Sub, value, recalled)?;
            let beta = at(scope, beta)?;
            value = scope.binary(Binary::Mul, delta, beta)?;
        }
        let update = product(scope, key, value, true)?;
        state = scope.binary(Binary::Add, state, update)?;
        let query = at(scope, q)?;
        let query = scope.reshape(query, grouped.clone())?;
        let y_step = product(scope, query, state, false)?;
        let y = scope.with_number(Binary::Mul, y_step, scale)?;
        outputs.push(scope.reshape(y, vec![batch.clone(), Dim::Known(1), Dim::Known(query_heads).mul(&value_size)?])?);
    }
    let y = scope.concat(&outputs, 1)?;
    let (y, state) = (scope.cast(y, out)?, scope.cast(state, state_type)?);
    Ok(vec![Known::Value(y), Known::Value(state)])
}

/// Depthwise causal convolution; the last inputs are carried over as state.
pub fn causal_conv(scope: &mut Scope<'_>) -> Outputs {
    let (x, w) = (scope.value(0)?, scope.value(1)?);
    let (fact, weight) = (scope.fact(x), scope.fact(w));
    let ([batch, channels, steps], [_, _, kernel]) = (fact.shape.as_slice(), weight.shape.as_slice()) else {
        return Err(LowerReason::Inputs(format!("its input {fact} and weight {weight} do not have rank 3")));
    };
    let unknown = || LowerReason::Inputs(format!("the sizes of its weight {weight} are unknown"));
    let groups = channels.known().and_then(|c| usize::try_from(c).ok()).ok_or_else(unknown)?;
    let before = kernel.known().filter(|k| *k > 0).ok_or_else(unknown)? - 1;
    let shape = vec![batch.clone(), channels.clone(), Dim::Known(before)];
    let past = match scope.optional(3)? {
        Some(past) => past,
        None => {
            let zero = scope.scalar(fact.dtype, 0.0)?;
            scope.broadcast(zero, shape)?
        }
    };
    let padded = if before == 0 { x } else { scope.concat(&[past, x], 2)? };
    let window = Window { strides: vec![1], pads_begin: vec![0], pads_end: vec![0], dilations: vec![1] };
    let mut y = scope.add(Op::Conv(Conv { window, groups }), &[padded, w])?;
    if let Some(bias) = scope.optional(2)? {
        y = with_bias(scope, Binary::Add, y, bias)?;
    }
    y = match scope.text("activation", "none")?.as_str() {
        "none" => y,
        "silu" | "swish" => scope.unary(Unary::Silu, y)?,
        other => {
            return Err(LowerReason::attribute("activation", other, "none, silu or swish"));
        }
    };
    let next_state = part(scope, padded, 2, steps.clone(), steps.add(&Dim::Known(before))?)?;
    Ok(vec![Known::Value(y), Known::Value(next_state)])
}
