//! Optimizer steps as graph operators: `Momentum`, `Adagrad`, `Adam` of `ai.onnx.preview.training`.
//!
//! Inputs: learning rate, step count, then all parameters, all gradients, all states. Outputs: the new parameters, then
//! the new states.

use crate::import::formula::{formula, formulas};
use crate::import::onnx::lower::{Known, LowerReason, Outputs, Scope};
use crate::op::Value;

/// One parameter with its gradient, including the L2 term, and its states.
struct Slot {
    x: Value,
    gradient: Value,
    states: Vec<Value>,
}

/// Learning rate, step count, and all parameters with `states` states each.
fn read(scope: &mut Scope<'_>, states: usize) -> Result<(Value, Value, Vec<Slot>), LowerReason> {
    let (rate, steps) = (scope.value(0)?, scope.value(1)?);
    let tensors = scope.inputs.len().saturating_sub(2);
    let count = tensors / (2 + states);
    if count == 0 || count * (2 + states) != tensors {
        return Err(LowerReason::Inputs(format!("{tensors} tensors are not {} for each", 2 + states)));
    }
    let decay = scope.float("norm_coefficient", 0.0)?;
    let mut slots = Vec::with_capacity(count);
    for n in 0..count {
        let x = scope.value(2 + n)?;
        let gradient = scope.value(2 + count + n)?;
        let gradient = formula(scope, [x, gradient], |[x, gradient]| x * decay + gradient)?;
        let states = (2..2 + states).map(|k| scope.value(2 + k * count + n)).collect::<Result<Vec<_>, _>>()?;
        slots.push(Slot { x, gradient, states });
    }
    Ok((rate, steps, slots))
}

/// The output order: all new parameters, then all first states, then all second states.
fn order_outputs(updates: Vec<Vec<Value>>) -> Vec<Known> {
    let width = updates.first().map_or(0, Vec::len);
    (0..width).flat_map(|k| updates.iter().map(move |slot| Known::Value(slot[k]))).collect()
}

/// SGD with momentum, standard or Nesterov: `v' = alpha·v + beta·g`, where beta is 1 in the first step.
pub fn momentum(scope: &mut Scope<'_>) -> Outputs {
    let (alpha, beta) = (scope.float("alpha", 0.0)?, scope.float("beta", 0.0)?);
    let nesterov = match scope.text("mode", "standard")?.as_str() {
        "standard" => false,
        "nesterov" => true,
        other => {
            return Err(LowerReason::attribute("mode", other, "standard or nesterov"));
        }
    };
    let (rate, steps, slots) = read(scope, 1)?;
    let before = formula(scope, [steps], |[steps]| steps.greater(0.0))?;
    let mut updates = Vec::new();
    for slot in slots {
        let values = [slot.x, slot.gradient, slot.states[0], rate, before];
        let update = formulas(scope, values, |[x, gradient, velocity, rate, before]| {
            let (beta, one) = (x.number(beta), x.number(1.0));
            let share = before.select(beta, one);
            let velocity = velocity * alpha + gradient * share;
            let direction = if nesterov { gradient * 1.0 + velocity * alpha } else { velocity };
            [x - rate * direction, velocity]
        })?;
        updates.push(update.to_vec());
    }
    Ok(order_outputs(updates))
}

/// Adagrad: `h' = h + g²`, `x' = x - rate/(1 + steps·decay)·g/(√h' + epsilon)`.
pub fn adagrad(scope: &mut Scope<'_>) -> Outputs {
    let (epsilon, decay) = (scope.float("epsilon", 0.0)?, scope.float("decay_factor", 0.0)?);
    let (rate, steps, slots) = read(scope, 1)?;
    let rate = formula(scope, [rate, steps], |[rate, steps]| rate / (steps.cast(rate.dtype()) * decay + 1.0))?;
    let mut updates = Vec::new();
    for slot in slots {
        let values = [slot.x, slot.gradient, slot.states[0], rate];
        let update = formulas(scope, values, |[x, gradient, sum, rate]| {
            let sum = sum + gradient.squared();
            let direction = gradient / (sum.sqrt() + epsilon);
            [x - rate.cast(x.dtype()) * direction, sum]
        })?;
        updates.push(update.to_vec());
    }
    Ok(order_outputs(updates))
}

/// Adam; bias correction starts at the second step: `rate·√(1 - beta^t)/(1 - alpha^t)`.
pub fn adam(scope: &mut Scope<'_>) -> Outputs {
    let (alpha, beta) = (scope.float("alpha", 0.9)?, scope.float("beta", 0.999)?);
    let (epsilon, after) = (scope.float("epsilon", 0.0)?, scope.float("norm_coefficient_post", 0.0)?);
    let (rate, steps, slots) = read(scope, 2)?;
    let rate = formula(scope, [rate, steps], |[rate, steps]| {
        let before = steps.greater(0.0);
        let steps = steps.cast(rate.dtype());
        let bias = |factor: f64| 1.0 - steps.number(factor).pow(steps);
        let (of_mean, of_variance) = (bias(alpha), bias(beta));
        before.select(rate * of_variance.sqrt() / of_mean, rate)
    })?;
    let mut updates = Vec::new();
    for slot in slots {
        let values = [slot.x, slot.gradient, slot.states[0], slot.states[1], rate];
        let update = formulas(scope, values, |[x, gradient, mean, variance, rate]| {
            let mean = mean * alpha + gradient * (1.0 - alpha);
            let square = gradient.squared();
            let variance = variance * beta + square * (1.0 - beta);
            let direction = mean / (variance.sqrt() + epsilon);
            let x = x - rate.cast(x.dtype()) * direction;
            [if after == 0.0 { x } else { x * (1.0 - after) }, mean, variance]
        })?;
        updates.push(update.to_vec());
    }
    Ok(order_outputs(updates))
}
