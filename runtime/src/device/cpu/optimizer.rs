//! Optimizer steps with PyTorch's rules, and weights between steps.
//!
//! A step reads weights, a gradient and optimizer state, and writes new weights in place or to another buffer. State is
//! updated in place and starts at zero. The gradient is first multiplied by `scale` (mean over replicas, clipping). Each
//! element is computed in `f64` and rounded once.

use super::ALIGNMENT;
use super::real::Real;
use super::wide::wide;
use crate::device::optimizer::{Prediction, StepArgs, UpdateRule};
use bytemuck::{cast_slice, cast_slice_mut};
use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};

/// The weights of a step, as bytes.
pub enum WeightBytes<'a> {
    InPlace(&'a mut [u8]),
    /// The old weights stay unchanged.
    OutOfPlace {
        old: &'a [u8],
        new: &'a mut [u8],
    },
}

/// Update of one element: the new weight from the old one, the gradient and two state values. The rules are those of
/// [`UpdateRule`] at one step.
trait Rule: Copy {
    fn next(self, weight: f64, gradient: f64, first: &mut f64, second: &mut f64) -> f64;
}

/// Defines rules: their fields, and the update of a weight by a gradient and two state values.
macro_rules! rules {
    ($(
        $name:ident { $($field:ident: $type:ty),* }
        |$weight:ident, $gradient:ident, $first:pat_param, $second:pat_param| $next:block
    )*) => {
        $(#[derive(Clone, Copy)]
        struct $name {
            $($field: $type),*
        }

        impl Rule for $name {
            #[inline(always)]
            fn next(self, $weight: f64, $gradient: f64, $first: &mut f64, $second: &mut f64) -> f64 {
                let $name { $($field),* } = self;
                $next
            }
        })*
    };
}

rules! {
    Sgd { lr: f64, momentum: f64, nesterov: bool, weight_decay: f64, scale: f64 } |weight, gradient, buffer, _| {
        let g = gradient * scale + weight_decay * weight;
        // With a zero buffer this equals PyTorch's first step, which sets the buffer to the gradient.
        *buffer = momentum * *buffer + g;
        let step = if nesterov { g + momentum * *buffer } else { *buffer };
        weight - lr * step
    }

    // The step size has bias corrections.
    Adam {
        betas: (f64, f64),
        epsilon: f64,
        weight_decay: f64,
        decoupled: bool,
        scale: f64,
        lr: f64,
        step_size: f64,
        root_correction: f64
    } |weight, gradient, first, second| {
        let (mut weight, mut g) = (weight, gradient * scale);
        if decoupled {
            weight *= 1.0 - lr * weight_decay;
        } else {
            g += weight_decay * weight;
        }
        *first += (g - *first) * (1.0 - betas.0);
        *second = betas.1 * *second + (1.0 - betas.1) * g * g;
        weight - step_size * *first / (second.sqrt() / root_correction + epsilon)
    }

    RmsProp { lr: f64, alpha: f64, epsilon: f64, weight_decay: f64, momentum: f64, scale: f64 }
    |weight, gradient, square, buffer| {
        let g = gradient * scale + weight_decay * weight;
        *square = alpha * *square + (1.0 - alpha) * g * g;
        *buffer = momentum * *buffer + g / (square.sqrt() + epsilon);
        weight - lr * *buffer
    }

    Adagrad { lr: f64, epsilon: f64, weight_decay: f64, scale: f64 } |weight, gradient, sum, _| {
        let g = gradient * scale + weight_decay * weight;
        *sum += g * g;
        weight - lr * g / (sum.sqrt() + epsilon)
    }
}

/// One step on tensors of `T`. A missing state is empty.
pub fn step<T: Real>(
    rule: &UpdateRule,
    args: &StepArgs,
    weights: WeightBytes<'_>,
    gradient: &[u8],
    states: [&mut [u8]; 2],
) {
    let (scale, step) = (args.scale, f64::from(args.step));
    match *rule {
        UpdateRule::Sgd { learning_rate, momentum, nesterov, weight_decay } => {
            let lr = learning_rate * args.rate;
            step_by::<T, _>(weights, gradient, states, Sgd { lr, momentum, nesterov, weight_decay, scale });
        }
        UpdateRule::Adam { learning_rate, betas, epsilon, weight_decay, decoupled } => {
            let correction = |beta: f64| 1.0 - beta.powf(step);
            let lr = learning_rate * args.rate;
            let (step_size, root_correction) = (lr / correction(betas.0), correction(betas.1).sqrt());
            let rule = Adam { betas, epsilon, weight_decay, decoupled, scale, lr, step_size, root_correction };
            step_by::<T, _>(weights, gradient, states, rule);
        }
        UpdateRule::RmsProp { learning_rate, alpha, epsilon, weight_decay, momentum } => {
            let lr = learning_rate * args.rate;
            let rule = RmsProp { lr, alpha, epsilon, weight_decay, momentum, scale };
            step_by::<T, _>(weights, gradient, states, rule);
        }
        UpdateRule::Adagrad { learning_rate, decay, epsilon, weight_decay } => {
            let lr = learning_rate * args.rate / (1.0 + (step - 1.0) * decay);
            step_by::<T, _>(weights, gradient, states, Adagrad { lr, epsilon, weight_decay, scale });
        }
    }
}

fn step_by<T: Real, R: Rule>(weights: WeightBytes<'_>, gradient: &[u8], states: [&mut [u8]; 2], rule: R) {
    let (gradient, [first, second]) = (cast_slice::<u8, T>(gradient), states.map(values_mut::<T>));
    match weights {
        WeightBytes::InPlace(weights) => step_in_place(cast_slice_mut(weights), gradient, first, second, rule),
        WeightBytes::OutOfPlace { old, new } => {
            step_beside(cast_slice(old), cast_slice_mut(new), gradient, first, second, rule);
        }
    }
}

wide! {
    fn step_in_place[T: Real, R: Rule](weights: &mut [T], gradient: &[T], first: &mut [T], second: &mut [T], rule: R) {
        for run in runs(weights.len()) {
            for array in [&*weights, gradient, first, second] {
                prefetch(array, run.end);
            }
            let state = [&mut *first, second].map(|array| state_run(array, &run));
            let weights = weights[run.clone()].iter_mut().map(|weight| {
                let old = *weight;
                (weight, old)
            });
            step_each(weights, &gradient[run], state, rule);
        }
    }
}

wide! {
    // One pass over all arrays, since the step is memory-bound.
    fn step_beside[T: Real, R: Rule](old: &[T], new: &mut [T], gradient: &[T], first: &mut [T], second: &mut [T], rule: R) {
        for run in runs(new.len()) {
            for array in [old, new, gradient, first, second] {
                prefetch(array, run.end);
            }
            let state = [&mut *first, second].map(|array| state_run(array, &run));
            let weights = new[run.clone()].iter_mut().zip(&old[run.clone()]).map(|(new, old)| (new, *old));
            step_each(weights, &gradient[run], state, rule);
        }
    }
}

/// Elements per prefetch, and prefetch distance. Measured: without it a step is 10 % slower, since it reads more
/// streams than the hardware prefetcher follows.
const RUN: usize = 128;
const AHEAD: usize = 256;

#[inline(always)]
fn runs(count: usize) -> impl Iterator<Item = Range<usize>> {
    (0..count).step_by(RUN).map(move |at| at..count.min(at + RUN))
}

/// A run of a state, which may be empty.
#[inline(always)]
fn state_run<'a, T>(state: &'a mut [T], run: &Range<usize>) -> &'a mut [T] {
    if state.is_empty() { state } else { &mut state[run.clone()] }
}

/// Prefetches what is read `AHEAD` elements after `at`.
#[inline(always)]
fn prefetch<T>(numbers: &[T], at: usize) {
    #[cfg(target_arch = "x86_64")]
    for line in numbers.get(at + AHEAD..at + AHEAD + RUN).unwrap_or_default().chunks(ALIGNMENT / size_of::<T>()) {
        // SAFETY: a prefetch may use any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (numbers, at);
}

/// Steps weights, given with their old values. An empty state stands for zeros.
#[inline(always)]
fn step_each<'a, T: Real, R: Rule>(
    weights: impl ExactSizeIterator<Item = (&'a mut T, T)>,
    gradient: &[T],
    [first, second]: [&mut [T]; 2],
    rule: R,
) {
    let n = weights.len();
    let weights = weights.zip(&gradient[..n]);
    if first.is_empty() {
        for ((weight, old), gradient) in weights {
            *weight = T::of(rule.next(old.wide(), gradient.wide(), &mut 0.0, &mut 0.0));
        }
    } else if second.is_empty() {
        for (((weight, old), gradient), first) in weights.zip(&mut first[..n]) {
            let mut state = first.wide();
            *weight = T::of(rule.next(old.wide(), gradient.wide(), &mut state, &mut 0.0));
            *first = T::of(state);
        }
    } else {
        let state = first[..n].iter_mut().zip(&mut second[..n]);
        for (((weight, old), gradient), (first, second)) in weights.zip(state) {
            let (mut a, mut b) = (first.wide(), second.wide());
            *weight = T::of(rule.next(old.wide(), gradient.wide(), &mut a, &mut b));
            (*first, *second) = (T::of(a), T::of(b));
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

#[cfg(test)]
mod tests {
    use super::*;
    use compiler::tensor::DType;

    /// Runs three steps from fixed weights, in place and to another buffer.
    fn three_steps(rule: UpdateRule) -> [f64; 3] {
        let mut weights = [1.0, -2.0, 0.5];
        let mut states = [[0.0; 3]; 2];
        for number in 1..=3 {
            // Half the gradient with scale 2.
            let gradient = [0.15, -0.05 * f64::from(number), 0.0];
            let args = StepArgs { dtype: DType::F64, scale: 2.0, step: number, rate: 0.5 };
            let run = |weights: WeightBytes<'_>, states: &mut [[f64; 3]; 2]| {
                let [first, second] = states.each_mut().map(|state| cast_slice_mut::<f64, u8>(&mut state[..]));
                let bytes = |index: usize| if index < rule.states() { 24 } else { 0 };
                let states = [&mut first[..bytes(0)], &mut second[..bytes(1)]];
                step::<f64>(&rule, &args, weights, cast_slice(&gradient), states);
            };
            let (mut new, mut new_states) = ([f64::NAN; 3], states);
            let beside = WeightBytes::OutOfPlace { old: cast_slice(&weights), new: cast_slice_mut(&mut new) };
            run(beside, &mut new_states);
            run(WeightBytes::InPlace(cast_slice_mut(&mut weights)), &mut states);
            assert_eq!((weights, states), (new, new_states));
        }
        weights
    }

    fn assert_close(rule: UpdateRule, want: [f64; 3]) {
        let got = three_steps(rule);
        assert!(got.iter().zip(want).all(|(g, w)| (g - w).abs() < 1e-14), "{got:?} is not {want:?}");
    }

    /// Expected weights from torch.optim 2.15 in float64: lr 0.1, weight decay 0.01, gradients (0.3, -0.1 t, 0).
    #[test]
    fn steps_are_those_of_pytorch() {
        let learning_rate = 0.2;
        let sgd =
            |momentum, nesterov, weight_decay| UpdateRule::Sgd { learning_rate, momentum, nesterov, weight_decay };
        assert_close(sgd(0.9, false, 0.01), [0.826238769, -1.8937475879999999, 0.4971973995]);
        assert_close(sgd(0.9, true, 0.0), [0.7585299999999999, -1.8544100000000001, 0.5]);
        assert_close(sgd(0.0, false, 0.01), [0.9070929689999999, -1.934045988, 0.4985014995]);
        let (betas, epsilon, weight_decay) = ((0.9, 0.999), 1e-8, 0.01);
        let adam = |decoupled| UpdateRule::Adam { learning_rate, betas, epsilon, weight_decay, decoupled };
        assert_close(adam(false), [0.7000313838014607, -1.7057867866319831, 0.20487188520996757]);
        assert_close(adam(true), [0.6973029089900038, -1.7019841117213312, 0.4985014995]);
        let rmsprop = UpdateRule::RmsProp { learning_rate, alpha: 0.99, epsilon, weight_decay, momentum: 0.5 };
        assert_close(rmsprop, [-2.354037162664403, 1.830582872644813, 0.19647434570439573]);
        let adagrad = UpdateRule::Adagrad { learning_rate, decay: 0.1, epsilon: 1e-10, weight_decay };
        assert_close(adagrad, [0.7878275646880389, -1.7547189302108845, 0.3038412696930018]);
    }
}
