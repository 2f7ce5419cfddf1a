//! Normalisation operators.

use super::attribute::{axes, axis};
use super::slice::part;
use super::window::with_bias;
use super::{Known, LowerReason, Outputs, Scope, one};
use crate::graph::MovingAverage;
use crate::import::build::Build;
use crate::import::formula::formula;
use crate::import::lower_error::at_least_one;
use crate::import::norm::{filled, grouped, root_mean_square};
use crate::op::{BatchNorm, Binary, LayerNorm, Op, Pad, Value};
use crate::tensor::dim::Dim;
use crate::text::name::short_name;

pub fn layer_norm(scope: &mut Scope<'_>) -> Outputs {
    let (x, scale) = (scope.value(0)?, scope.value(1)?);
    let fact = scope.fact(x);
    let axis = axis(scope.int("axis", -1)?, fact.rank())?;
    let epsilon = scope.float("epsilon", 1e-5)?;
    let dims = fact.shape[axis..].to_vec();
    let scale = scope.broadcast(scale, dims.clone())?;
    let bias = match scope.optional(2)? {
        Some(bias) => scope.broadcast(bias, dims)?,
        None => filled(scope, fact.dtype, &dims, 0.0)?,
    };
    let outputs = scope.add_all(Op::LayerNorm(LayerNorm { axis, epsilon }), &[x, scale, bias])?;
    Ok(outputs.into_iter().map(Known::Value).collect())
}

/// `x/√(mean(x²) + epsilon)·scale` over all axes from `axis` on.
pub fn rms_norm(scope: &mut Scope<'_>) -> Outputs {
    let (x, scale) = (scope.value(0)?, scope.value(1)?);
    let first = axis(scope.int("axis", -1)?, scope.fact(x).rank())?;
    let epsilon = scope.float("epsilon", 1e-5)?;
    let normal = root_mean_square(scope, x, first, epsilon)?;
    one(scope.binary(Binary::Mul, normal, scale)?)
}

/// `(x - mean)/(deviation + 1e-9)`; the default axes are 0, 2 and 3.
pub fn mean_variance(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value(0)?;
    let axes_given = scope.ints("axes")?.unwrap_or_else(|| vec![0, 2, 3]);
    let axes = axes(&axes_given, scope.fact(x).rank())?;
    one(formula(scope, [x], |[x]| {
        let centred = x - x.mean(&axes, true);
        centred / (centred.squared().mean(&axes, true).root(2.0) + 1e-9)
    })?)
}

pub fn instance_norm(scope: &mut Scope<'_>) -> Outputs {
    let (x, scale, bias) = (scope.value(0)?, scope.value(1)?, scope.value(2)?);
    let channels = scope.fact(x).shape.get(1).cloned().unwrap_or(Dim::Known(1));
    let epsilon = scope.float("epsilon", 1e-5)?;
    let y = grouped(scope, x, channels, epsilon)?;
    let y = with_bias(scope, Binary::Mul, y, scale)?;
    Ok(vec![Known::Value(with_bias(scope, Binary::Add, y, bias)?)])
}

pub fn group_norm(scope: &mut Scope<'_>) -> Outputs {
    let groups = at_least_one("num_groups", scope.int("num_groups", 0)?)?;
    let (x, mut scale, mut bias) = (scope.value(0)?, scope.value(1)?, scope.value(2)?);
    let fact = scope.fact(x);
    if scope.opset < 21 && fact.rank() > 1 {
        // Before operator set 21 scale and bias have one value per group; repeat it for each channel.
        let group_channels = fact.shape[1].div_exact(&Dim::Known(groups))?;
        for value in [&mut scale, &mut bias] {
            let column = scope.reshape(*value, vec![Dim::Known(groups), Dim::Known(1)])?;
            let wide = scope.broadcast(column, vec![Dim::Known(groups), group_channels.clone()])?;
            *value = scope.reshape(wide, vec![fact.shape[1].clone()])?;
        }
    }
    let epsilon = scope.float("epsilon", 1e-5)?;
    let y = grouped(scope, x, Dim::Known(groups), epsilon)?;
    let y = with_bias(scope, Binary::Mul, y, scale)?;
    Ok(vec![Known::Value(with_bias(scope, Binary::Add, y, bias)?)])
}

/// Maximum LRN window; each channel in the window is a separate op.
const NEIGHBOURS: i64 = 256;

/// Local response normalisation, `x/(bias + alpha/size·Σ x²)^beta`; the sum is over the `size` neighbouring channels
/// that exist.
pub fn local_response(scope: &mut Scope<'_>) -> Outputs {
    let size = scope.int("size", 0)?;
    if !(1..=NEIGHBOURS).contains(&size) {
        return Err(LowerReason::attribute("size", size, "an integer from 1 to 256"));
    }
    let (alpha, beta) = (scope.float("alpha", 1e-4)?, scope.float("beta", 0.75)?);
    let bias = scope.float("bias", 1.0)?;
    let x = scope.value(0)?;
    let fact = scope.fact(x);
    let Some(channels) = fact.shape.get(1) else {
        return Err(LowerReason::Inputs(format!("its input {fact} has no channels")));
    };
    let square = scope.binary(Binary::Mul, x, x)?;
    let window = |at: i64| {
        let mut sizes = vec![Dim::Known(0); fact.rank()];
        sizes[1] = Dim::Known(at);
        sizes
    };
    // For an even size the extra channel is on the high side.
    let (low, high) = ((size - 1) / 2, size / 2);
    let pad = Pad { low: window(low), high: window(high), interior: vec![0; fact.rank()], value: 0.0 };
    let padded = scope.add(Op::Pad(pad), &[square])?;
    let mut sum = part(scope, padded, 1, Dim::Known(0), channels.clone())?;
    for shift in 1..size {
        let begin = Dim::Known(shift);
        let next = part(scope, padded, 1, begin.clone(), begin.add(channels)?)?;
        sum = scope.binary(Binary::Add, sum, next)?;
    }
    one(formula(scope, [x, sum], |[x, sum]| x / (sum * (alpha / size as f64) + bias).pow(beta))?)
}

/// BatchNorm with batch statistics in training mode, else with running statistics.
pub fn batch_norm(scope: &mut Scope<'_>) -> Outputs {
    let epsilon = scope.float("epsilon", 1e-5)?;
    let keep = scope.float("momentum", 0.9)?;
    // Before operator set 14, a node with statistics outputs is in training mode.
    let training = match scope.opset {
        ..14 => scope.node.outputs.iter().skip(1).any(|name| !name.is_empty()),
        _ => scope.flag("training_mode", false)?,
    };
    let (x, scale, bias) = (scope.value(0)?, scope.value(1)?, scope.value(2)?);
    if training {
        with_batch(scope, [x, scale, bias], epsilon, keep)
    } else {
        normalise_with_stored(scope, x, scale, bias, epsilon)
    }
}

/// Running statistics stored in initializers become states updated by moving averages. Otherwise they are computed as
/// outputs: `previous·keep + sample·(1 - keep)`.
fn with_batch(scope: &mut Scope<'_>, inputs: [Value; 3], epsilon: f64, keep: f64) -> Outputs {
    let outputs = scope.add_all(Op::BatchNorm(BatchNorm { epsilon }), &inputs)?;
    let absent = Known::Absent("the running statistics as an output of BatchNormalization");
    let mut results = vec![Known::Value(outputs[0]), absent.clone(), absent.clone(), absent.clone(), absent];
    for (slot, sample) in [(3, outputs[1]), (4, outputs[2])] {
        match scope.known(slot)? {
            Known::Weight(at) => {
                let state = scope.weight(*at, true)?;
                let (have, want) = (scope.fact(state), scope.fact(sample));
                if have != want {
                    return Err(LowerReason::Inputs(format!(
                        "a running statistic is {have}, the batch statistic is {want}"
                    )));
                }
                scope.ledger.averages.push(MovingAverage { state: state.node, sample, keep });
            }
            _ => {
                let previous = scope.value(slot)?;
                let updated = formula(scope, [previous, sample], |[previous, sample]| {
                    previous * keep + sample.cast(previous.dtype()) * (1.0 - keep)
                })?;
                results[slot - 2] = Known::Value(updated);
                scope.ledger.warnings.push(format!(
                    "node `{}`: a running statistic of BatchNormalization is not an initializer; its updates are not \
                    stored",
                    short_name(&scope.node.name)
                ));
            }
        }
    }
    Ok(results)
}

/// `(x - mean)·rsqrt(variance + epsilon)·scale + bias`
fn normalise_with_stored(scope: &mut Scope<'_>, x: Value, scale: Value, bias: Value, epsilon: f64) -> Outputs {
    let mut stored = |slot: usize| match scope.known(slot)? {
        Known::Weight(at) => {
            let at = *at;
            scope.weight(at, true)
        }
        _ => scope.value(slot),
    };
    let (mean, variance) = (stored(3)?, stored(4)?);
    let centred = with_bias(scope, Binary::Sub, x, mean)?;
    let factor = formula(scope, [variance, scale], |[variance, scale]| (variance + epsilon).rsqrt() * scale)?;
    let y = with_bias(scope, Binary::Mul, centred, factor)?;
    let y = with_bias(scope, Binary::Add, y, bias)?;
    Ok(vec![Known::Value(y)])
}
