//! Normalisations.

use super::{Known, NodeOutputs, Outputs, Scope, one};
use crate::graph::MovingAverage;
use crate::import::build::Build;
use crate::import::formula::formula;
use crate::import::lower_error::{LowerReason, at_least_one};
use crate::import::norm::{grouped, norm, root_mean_square};
use crate::import::onnx::lower::attribute;
use crate::import::onnx::lower::window::with_bias;
use crate::op::{BatchNorm, Binary, LayerNorm, Op, Value};
use crate::tensor::dim::Dim;

/// The first normalised axis and the sizes, from argument `normalized_shape`.
fn normalized_axes(scope: &Scope<'_>, x: Value) -> Result<(usize, Vec<Dim>), LowerReason> {
    let shape = scope.fact(x).shape;
    let normalized_shape = scope.shape("normalized_shape")?;
    match shape.len().checked_sub(normalized_shape.len()) {
        Some(axis) if !normalized_shape.is_empty() && shape[axis..] == normalized_shape => Ok((axis, normalized_shape)),
        _ => Err(LowerReason::Inputs(format!("the last dims of {} are not {normalized_shape:?}", scope.fact(x)))),
    }
}

pub fn layer_norm(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("input")?;
    let (axis, dims) = normalized_axes(scope, x)?;
    let dtype = scope.fact(x).dtype;
    let scale = scope.optional_or("weight", dtype, &dims, 1.0)?;
    let bias = scope.optional_or("bias", dtype, &dims, 0.0)?;
    let epsilon = scope.float("eps", 1e-5)?;
    super::many(scope.add_all(Op::LayerNorm(LayerNorm { axis, epsilon }), &[x, scale, bias])?)
}

/// `x/√(mean(x²) + eps)·weight` over the last axes.
pub fn rms_norm(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("input")?;
    let (axis, _) = normalized_axes(scope, x)?;
    let epsilon = scope.float("eps", f64::from(f32::EPSILON))?;
    let y = root_mean_square(scope, x, axis, epsilon)?;
    one(match scope.optional("weight")? {
        Some(weight) => scope.binary(Binary::Mul, y, weight)?,
        None => y,
    })
}

fn affine(scope: &mut Scope<'_>, mut y: Value) -> Result<Value, LowerReason> {
    if let Some(weight) = scope.optional("weight")? {
        y = with_bias(scope, Binary::Mul, y, weight)?;
    }
    if let Some(bias) = scope.optional("bias")? {
        y = with_bias(scope, Binary::Add, y, bias)?;
    }
    Ok(y)
}

/// Group normalisation; `groups` is the name of the argument for the group count.
pub fn group_norm(scope: &mut Scope<'_>, groups: &'static str) -> Outputs {
    let count = at_least_one(groups, scope.int(groups, 0)?)?;
    let x = scope.value("input")?;
    let epsilon = scope.float("eps", 1e-5)?;
    let y = grouped(scope, x, Dim::Known(count), epsilon)?;
    let y = affine(scope, y)?;
    let absent = Known::Absent("the statistics output of a group normalisation");
    Ok(NodeOutputs::Tensors(vec![Known::Value(y), absent, absent]))
}

/// Instance normalisation with batch or stored statistics.
pub fn instance_norm(scope: &mut Scope<'_>) -> Outputs {
    let (x, epsilon) = (scope.value("input")?, scope.float("eps", 1e-5)?);
    if !scope.flag("use_input_stats", true)? {
        return one(normalise_with_stored(scope, x, epsilon)?);
    }
    if scope.has("running_mean") {
        return Err(LowerReason::Unsupported("an instance normalisation with running statistics".to_string()));
    }
    let channels = scope.fact(x).shape.get(1).cloned().unwrap_or(Dim::Known(1));
    let y = grouped(scope, x, channels, epsilon)?;
    one(affine(scope, y)?)
}

/// Weight normalisation `v·g/|v|`, with one length `g` per index of axis `dim`.
pub fn weight_norm(scope: &mut Scope<'_>) -> Outputs {
    let (v, g) = (scope.value("v")?, scope.value("g")?);
    let rank = scope.fact(v).rank();
    // Here -1 is not the last axis: there is one length for all elements.
    let kept = match scope.int("dim", 0)? {
        -1 => None,
        axis => Some(attribute::axis(axis, rank)?),
    };
    let axes: Vec<usize> = (0..rank).filter(|axis| Some(*axis) != kept).collect();
    one(formula(scope, [v, g], |[v, g]| {
        let length = norm(v, 2.0, &axes, true);
        v * (g / length)
    })?)
}

/// Batch normalisation. In training it uses batch statistics and updates the running ones; otherwise it uses the
/// running ones.
pub fn batch_norm(scope: &mut Scope<'_>, training: bool) -> Outputs {
    let training = scope.flag("training", training)?;
    let x = scope.value("input")?;
    let fact = scope.fact(x);
    let Some(channels) = fact.shape.get(1).cloned() else {
        return Err(LowerReason::Inputs(format!("its input {fact} has no channels")));
    };
    let epsilon = scope.float("eps", 1e-5)?;
    let absent = Known::Absent("the statistics output of a batch normalisation");
    if !training && scope.has("running_mean") {
        let y = normalise_with_stored(scope, x, epsilon)?;
        return Ok(NodeOutputs::Tensors(vec![Known::Value(y), absent, absent, absent, absent]));
    }
    let scale = scope.optional_or("weight", fact.dtype, std::slice::from_ref(&channels), 1.0)?;
    let bias = scope.optional_or("bias", fact.dtype, &[channels], 0.0)?;
    let outputs = scope.add_all(Op::BatchNorm(BatchNorm { epsilon }), &[x, scale, bias])?;
    if training {
        for (name, sample) in [("running_mean", outputs[1]), ("running_var", outputs[2])] {
            record_average(scope, name, sample)?;
        }
    }
    // The core op also returns the batch mean and reciprocal deviation.
    Ok(NodeOutputs::Tensors(vec![
        Known::Value(outputs[0]),
        Known::Value(outputs[1]),
        Known::Value(outputs[3]),
        absent,
        absent,
    ]))
}

/// Updates a running statistic from that of the batch.
fn record_average(scope: &mut Scope<'_>, name: &'static str, sample: Value) -> Result<(), LowerReason> {
    if !scope.has(name) {
        return Ok(());
    }
    let Known::Weight(at) = scope.known(name)? else {
        return Err(LowerReason::Unsupported("a running statistic that is not a buffer".to_string()));
    };
    let momentum = scope.number("momentum")?.ok_or(LowerReason::NotConstant { what: "the momentum" })?;
    let state = scope.weight(at, true)?;
    let (have, want) = (scope.fact(state), scope.fact(sample));
    if have != want {
        return Err(LowerReason::Inputs(format!("a running statistic is {have}, the batch statistic is {want}")));
    }
    scope.ledger.averages.push(MovingAverage { state: state.node, sample, keep: 1.0 - momentum.float() });
    Ok(())
}

fn normalise_with_stored(scope: &mut Scope<'_>, x: Value, epsilon: f64) -> Result<Value, LowerReason> {
    let mut stored = |name: &'static str| match scope.known(name)? {
        Known::Weight(at) => scope.weight(at, true),
        _ => scope.value(name),
    };
    let (mean, variance) = (stored("running_mean")?, stored("running_var")?);
    let centred = with_bias(scope, Binary::Sub, x, mean)?;
    let rstd = formula(scope, [variance], |[variance]| (variance + epsilon).rsqrt())?;
    let y = with_bias(scope, Binary::Mul, centred, rstd)?;
    scope.ledger.stored_statistics.push(scope.origin.source.clone());
    affine(scope, y)
}
