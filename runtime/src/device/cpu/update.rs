//! Optimizer steps by element type and rule.

use super::optimizer::{self as kernel, Adagrad, Adam, RmsProp, Sgd, Weights};
use super::real::Real;
use crate::device::optimizer::{Prediction, StepArgs, UpdateRule};
use bytemuck::{cast_slice, cast_slice_mut};

/// The weights of a step, as bytes.
pub enum WeightBytes<'a> {
    InPlace(&'a mut [u8]),
    OutOfPlace { old: &'a [u8], new: &'a mut [u8] },
}

/// One step on tensors of `T`. A missing state is empty.
pub fn step<T: Real>(
    rule: &UpdateRule,
    args: &StepArgs,
    weights: WeightBytes<'_>,
    gradient: &[u8],
    [first, second]: [&mut [u8]; 2],
) {
    let gradient: &[T] = cast_slice(gradient);
    let weights = match weights {
        WeightBytes::InPlace(weight) => Weights::InPlace(cast_slice_mut(weight)),
        WeightBytes::OutOfPlace { old, new } => Weights::Beside { old: cast_slice(old), new: cast_slice_mut(new) },
    };
    let (scale, step) = (args.scale, u64::from(args.step));
    let [first, second] = [first, second].map(values_mut::<T>);
    match *rule {
        UpdateRule::Sgd { learning_rate, momentum, nesterov, weight_decay } => {
            let lr = learning_rate * args.rate;
            kernel::sgd(weights, gradient, first, Sgd { lr, momentum, nesterov, weight_decay, scale });
        }
        UpdateRule::Adam { learning_rate, betas, epsilon, weight_decay, decoupled } => {
            let (lr, betas) = (learning_rate * args.rate, betas.into());
            let rule = Adam { lr, betas, epsilon, weight_decay, decoupled, step, scale };
            kernel::adam(weights, gradient, first, second, rule);
        }
        UpdateRule::RmsProp { learning_rate, alpha, epsilon, weight_decay, momentum } => {
            let lr = learning_rate * args.rate;
            let rule = RmsProp { lr, alpha, epsilon, weight_decay, momentum, scale };
            kernel::rmsprop(weights, gradient, first, second, rule);
        }
        UpdateRule::Adagrad { learning_rate, decay, epsilon, weight_decay } => {
            let lr = learning_rate * args.rate;
            let rule = Adagrad { lr, lr_decay: decay, epsilon, weight_decay, step, scale };
            kernel::adagrad(weights, gradient, first, rule);
        }
    }
}

/// The values of a state. A missing state need not be aligned.
fn values<T: Real>(bytes: &[u8]) -> &[T] {
    if bytes.is_empty() { &[] } else { cast_slice(bytes) }
}

fn values_mut<T: Real>(bytes: &mut [u8]) -> &mut [T] {
    if bytes.is_empty() { &mut [] } else { cast_slice_mut(bytes) }
}

/// Weights predicted in the direction of the last update.
pub fn predict<T: Real>(rule: &UpdateRule, prediction: &Prediction, weight: &[u8], state: [&[u8]; 2], to: &mut [u8]) {
    let (weight, to): (&[T], &mut [T]) = (cast_slice(weight), cast_slice_mut(to));
    let [first, second] = state.map(values::<T>);
    let distance = f64::from(prediction.steps) * prediction.rate;
    let move_weights = |distance: f64, at: &dyn Fn(usize) -> f64, to: &mut [T]| {
        to.iter_mut().zip(weight).enumerate().for_each(|(i, (to, w))| *to = T::of(w.wide() - distance * at(i)));
    };
    match rule {
        _ if prediction.made == 0 => to.copy_from_slice(weight),
        UpdateRule::Sgd { learning_rate, momentum, .. } if *momentum != 0.0 => {
            move_weights(distance * learning_rate, &|i| first[i].wide(), to);
        }
        UpdateRule::RmsProp { learning_rate, momentum, .. } if *momentum != 0.0 => {
            move_weights(distance * learning_rate, &|i| second[i].wide(), to);
        }
        UpdateRule::Adam { learning_rate, betas, epsilon, .. } => {
            let correction = |beta: f64| 1.0 - beta.powf(f64::from(prediction.made));
            let (first_correction, second_correction) = (correction(betas.0), correction(betas.1));
            let direction = |i: usize| {
                first[i].wide() / first_correction / ((second[i].wide() / second_correction).sqrt() + epsilon)
            };
            move_weights(distance * learning_rate, &direction, to);
        }
        _ => to.copy_from_slice(weight),
    }
}

/// `average = keep · average + (1 − keep) · (new − old)`
pub fn average_update<T: Real>(old: &[u8], new: &[u8], keep: f64, average: &mut [u8]) {
    let steps = cast_slice::<u8, T>(old).iter().zip(cast_slice::<u8, T>(new));
    for (average, (old, new)) in cast_slice_mut::<u8, T>(average).iter_mut().zip(steps) {
        *average = T::of(keep * average.wide() + (1.0 - keep) * (new.wide() - old.wide()));
    }
}

/// `to = weight − steps · average`
pub fn set_back<T: Real>(weight: &[u8], steps: u32, average: &[u8], to: &mut [u8]) {
    let from = cast_slice::<u8, T>(weight).iter().zip(cast_slice::<u8, T>(average));
    for (to, (weight, average)) in cast_slice_mut::<u8, T>(to).iter_mut().zip(from) {
        *to = T::of(weight.wide() - f64::from(steps) * average.wide());
    }
}
