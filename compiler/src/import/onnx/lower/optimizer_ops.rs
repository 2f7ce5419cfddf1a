//! Optimizer steps as graph operators: `Momentum`, `Adagrad`, `Adam` of `ai.onnx.preview.training`.
//!
//! Inputs: learning rate, step count, then all parameters, all gradients, all states. Outputs: the new parameters, then
//! the new states.

use crate::import::build::Build;
use crate::import::onnx::lower::{Known, LowerReason, Outputs, Scope};
use crate::op::{Binary, Compare, Unary, Value};

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
        let decayed = scope.with_number(Binary::Mul, x, decay)?;
        let gradient = scope.binary(Binary::Add, decayed, gradient)?;
        let states = (2..2 + states).map(|k| scope.value(2 + k * count + n)).collect::<Result<Vec<_>, _>>()?;
        slots.push(Slot { x, gradient, states });
    }
    Ok((rate, steps, slots))
}

/// `a·x + b·y`
fn mixed(scope: &mut Scope<'_>, a: f64, x: Value, b: f64, y: Value) -> Result<Value, LowerReason> {
    let (x, y) = (scope.with_number(Binary::Mul, x, a)?, scope.with_number(Binary::Mul, y, b)?);
    scope.binary(Binary::Add, x, y)
}

/// `x - rate·direction`, where `direction` is the update direction.
fn step_along(scope: &mut Scope<'_>, x: Value, rate: Value, direction: Value) -> Result<Value, LowerReason> {
    let direction = scope.binary(Binary::Mul, rate, direction)?;
    scope.binary(Binary::Sub, x, direction)
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
            let expected = "standard or nesterov";
            return Err(LowerReason::Attribute { name: "mode", found: other.to_string(), expected });
        }
    };
    let (rate, steps, slots) = read(scope, 1)?;
    let before = increment(scope, steps)?;
    let mut updates = Vec::new();
    for slot in slots {
        let dtype = scope.fact(slot.x).dtype;
        let (beta, one) = (scope.scalar(dtype, beta)?, scope.scalar(dtype, 1.0)?);
        let share = scope.select(before, beta, one)?;
        let decayed = scope.with_number(Binary::Mul, slot.states[0], alpha)?;
        let scaled_gradient = scope.binary(Binary::Mul, slot.gradient, share)?;
        let velocity = scope.binary(Binary::Add, decayed, scaled_gradient)?;
        let direction = if nesterov { mixed(scope, 1.0, slot.gradient, alpha, velocity)? } else { velocity };
        updates.push(vec![step_along(scope, slot.x, rate, direction)?, velocity]);
    }
    Ok(order_outputs(updates))
}

fn increment(scope: &mut Scope<'_>, steps: Value) -> Result<Value, LowerReason> {
    let zero = scope.scalar(scope.fact(steps).dtype, 0.0)?;
    scope.compare(Compare::Less, zero, steps)
}

/// Adagrad: `h' = h + g²`, `x' = x - rate/(1 + steps·decay)·g/(√h' + epsilon)`.
pub fn adagrad(scope: &mut Scope<'_>) -> Outputs {
    let (epsilon, decay) = (scope.float("epsilon", 0.0)?, scope.float("decay_factor", 0.0)?);
    let (rate, steps, slots) = read(scope, 1)?;
    let steps = scope.cast(steps, scope.fact(rate).dtype)?;
    let decayed_steps = scope.with_number(Binary::Mul, steps, decay)?;
    let below = scope.with_number(Binary::Add, decayed_steps, 1.0)?;
    let rate = scope.binary(Binary::Div, rate, below)?;
    let mut updates = Vec::new();
    for slot in slots {
        let square = scope.binary(Binary::Mul, slot.gradient, slot.gradient)?;
        let sum = scope.binary(Binary::Add, slot.states[0], square)?;
        let direction = divide_by_root(scope, slot.gradient, sum, epsilon)?;
        let rate = scope.cast(rate, scope.fact(slot.x).dtype)?;
        updates.push(vec![step_along(scope, slot.x, rate, direction)?, sum]);
    }
    Ok(order_outputs(updates))
}

/// `a/(√b + epsilon)`
fn divide_by_root(scope: &mut Scope<'_>, a: Value, b: Value, epsilon: f64) -> Result<Value, LowerReason> {
    let root = scope.unary(Unary::Sqrt, b)?;
    let below = scope.with_number(Binary::Add, root, epsilon)?;
    scope.binary(Binary::Div, a, below)
}

/// Adam; bias correction starts at the second step: `rate·√(1 - beta^t)/(1 - alpha^t)`.
pub fn adam(scope: &mut Scope<'_>) -> Outputs {
    let (alpha, beta) = (scope.float("alpha", 0.9)?, scope.float("beta", 0.999)?);
    let (epsilon, after) = (scope.float("epsilon", 0.0)?, scope.float("norm_coefficient_post", 0.0)?);
    let (rate, steps, slots) = read(scope, 2)?;
    let before = increment(scope, steps)?;
    let steps = scope.cast(steps, scope.fact(rate).dtype)?;
    let mut biases = Vec::new();
    for factor in [alpha, beta] {
        let factor = scope.scalar(scope.fact(rate).dtype, factor)?;
        let power = scope.binary(Binary::Pow, factor, steps)?;
        let one = scope.scalar(scope.fact(rate).dtype, 1.0)?;
        biases.push(scope.binary(Binary::Sub, one, power)?);
    }
    let root = scope.unary(Unary::Sqrt, biases[1])?;
    let corrected_rate = scope.binary(Binary::Mul, rate, root)?;
    let corrected = scope.binary(Binary::Div, corrected_rate, biases[0])?;
    let rate = scope.select(before, corrected, rate)?;
    let mut updates = Vec::new();
    for slot in slots {
        let mean = mixed(scope, alpha, slot.states[0], 1.0 - alpha, slot.gradient)?;
        let square = scope.binary(Binary::Mul, slot.gradient, slot.gradient)?;
        let variance = mixed(scope, beta, slot.states[1], 1.0 - beta, square)?;
        let direction = divide_by_root(scope, mean, variance, epsilon)?;
        let rate = scope.cast(rate, scope.fact(slot.x).dtype)?;
        let mut x = step_along(scope, slot.x, rate, direction)?;
        if after != 0.0 {
            x = scope.with_number(Binary::Mul, x, 1.0 - after)?;
        }
        updates.push(vec![x, mean, variance]);
    }
    Ok(order_outputs(updates))
}
