//! Optimizer steps over plain slices, with PyTorch's rules.
//!
//! A step reads weights, a gradient and optimizer state, and writes new weights in place or to another buffer
//! ([`Weights`]). State is updated in place and starts at zero. The gradient is first multiplied by `scale` (mean over
//! replicas, clipping). Each element is computed in `f64` and rounded once.

use super::ALIGNMENT;
use super::real::Real;
use super::wide::wide;
use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};

/// Destination of the new weights.
pub enum Weights<'a, T> {
    InPlace(&'a mut [T]),
    /// A separate buffer; the old weights stay unchanged.
    Beside {
        old: &'a [T],
        new: &'a mut [T],
    },
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    pub lr: f64,
    /// 0 needs no buffer.
    pub momentum: f64,
    pub nesterov: bool,
    /// L2 penalty, added to the gradient.
    pub weight_decay: f64,
    pub scale: f64,
}

/// Adam, or AdamW with `decoupled`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam {
    pub lr: f64,
    pub betas: [f64; 2],
    /// Added to the root of the second moment.
    pub epsilon: f64,
    pub weight_decay: f64,
    /// True if the decay applies to the weights (AdamW) rather than the gradient.
    pub decoupled: bool,
    /// Number of the step, from 1.
    pub step: u64,
    pub scale: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsProp {
    pub lr: f64,
    /// Decay rate of the mean square.
    pub alpha: f64,
    /// Added to the root of the mean square.
    pub epsilon: f64,
    /// L2 penalty, added to the gradient.
    pub weight_decay: f64,
    /// 0 needs no buffer.
    pub momentum: f64,
    pub scale: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adagrad {
    pub lr: f64,
    /// Learning-rate decay: divides by `1 + (step - 1)·lr_decay`.
    pub lr_decay: f64,
    /// Added to the root of the sum of squares.
    pub epsilon: f64,
    /// L2 penalty, added to the gradient.
    pub weight_decay: f64,
    /// Number of the step, from 1.
    pub step: u64,
    pub scale: f64,
}

/// Update of one element: the new weight from the old one, the gradient and two state values.
trait Rule: Copy {
    fn next(self, weight: f64, gradient: f64, first: &mut f64, second: &mut f64) -> f64;
}

impl Rule for Sgd {
    #[inline(always)]
    fn next(self, weight: f64, gradient: f64, buffer: &mut f64, _: &mut f64) -> f64 {
        let g = gradient * self.scale + self.weight_decay * weight;
        // With a zero buffer this equals PyTorch's first step, which sets the buffer to the gradient.
        *buffer = self.momentum * *buffer + g;
        let step = if self.nesterov { g + self.momentum * *buffer } else { *buffer };
        weight - self.lr * step
    }
}

/// [`Adam`] with precomputed bias corrections.
#[derive(Clone, Copy)]
struct AdamStep {
    rule: Adam,
    step_size: f64,
    root_correction: f64,
}

impl Rule for AdamStep {
    #[inline(always)]
    fn next(self, weight: f64, gradient: f64, first: &mut f64, second: &mut f64) -> f64 {
        let rule = self.rule;
        let (mut weight, mut g) = (weight, gradient * rule.scale);
        if rule.decoupled {
            weight *= 1.0 - rule.lr * rule.weight_decay;
        } else {
            g += rule.weight_decay * weight;
        }
        *first += (g - *first) * (1.0 - rule.betas[0]);
        *second = rule.betas[1] * *second + (1.0 - rule.betas[1]) * g * g;
        weight - self.step_size * *first / (second.sqrt() / self.root_correction + rule.epsilon)
    }
}

impl Rule for RmsProp {
    #[inline(always)]
    fn next(self, weight: f64, gradient: f64, square: &mut f64, buffer: &mut f64) -> f64 {
        let g = gradient * self.scale + self.weight_decay * weight;
        *square = self.alpha * *square + (1.0 - self.alpha) * g * g;
        *buffer = self.momentum * *buffer + g / (square.sqrt() + self.epsilon);
        weight - self.lr * *buffer
    }
}

impl Rule for Adagrad {
    #[inline(always)]
    fn next(self, weight: f64, gradient: f64, sum: &mut f64, _: &mut f64) -> f64 {
        let g = gradient * self.scale + self.weight_decay * weight;
        let lr = self.lr / (1.0 + (self.step as f64 - 1.0) * self.lr_decay);
        *sum += g * g;
        weight - lr * g / (sum.sqrt() + self.epsilon)
    }
}

/// `buffer` is the momentum; it may be empty without momentum.
pub fn sgd<T: Real>(weights: Weights<'_, T>, gradient: &[T], buffer: &mut [T], rule: Sgd) {
    step(weights, gradient, buffer, &mut [], rule);
}

/// `first` and `second` are the moments.
pub fn adam<T: Real>(weights: Weights<'_, T>, gradient: &[T], first: &mut [T], second: &mut [T], rule: Adam) {
    let correction = |beta: f64| 1.0 - beta.powf(rule.step as f64);
    let [first_correction, second_correction] = rule.betas.map(correction);
    let adam_step = AdamStep { rule, step_size: rule.lr / first_correction, root_correction: second_correction.sqrt() };
    step(weights, gradient, first, second, adam_step);
}

/// `square` is the mean square; `buffer` is the momentum and may be empty without momentum.
pub fn rmsprop<T: Real>(weights: Weights<'_, T>, gradient: &[T], square: &mut [T], buffer: &mut [T], rule: RmsProp) {
    step(weights, gradient, square, buffer, rule);
}

/// `sum` is the sum of squares.
pub fn adagrad<T: Real>(weights: Weights<'_, T>, gradient: &[T], sum: &mut [T], rule: Adagrad) {
    step(weights, gradient, sum, &mut [], rule);
}

/// `sum += gradient`
pub fn accumulate<T: Real>(sum: &mut [T], gradient: &[T]) {
    super::gather::add(gradient, sum);
}

wide! {
    /// `sum = first + second`
    pub fn add[T: Real](first: &[T], second: &[T], sum: &mut [T]) {
        for (sum, (&first, &second)) in sum.iter_mut().zip(first.iter().zip(second)) {
            *sum = first + second;
        }
    }
}

pub fn copy<T: Real>(to: &mut [T], from: &[T]) {
    to.copy_from_slice(from);
}

fn step<T: Real, R: Rule>(weights: Weights<'_, T>, gradient: &[T], first: &mut [T], second: &mut [T], rule: R) {
    match weights {
        Weights::InPlace(weights) => step_in_place(weights, gradient, first, second, rule),
        Weights::Beside { old, new } => step_beside(old, new, gradient, first, second, rule),
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs three steps from fixed weights, in place and to another buffer.
    fn three_steps(mut update: impl FnMut(Weights<'_, f64>, &[f64], &mut [f64], &mut [f64], u64)) -> [f64; 3] {
        let mut weights = [1.0, -2.0, 0.5];
        let (mut first, mut second) = ([0.0; 3], [0.0; 3]);
        for step in 1..=3 {
            // Half the gradient with scale 2.
            let gradient = [0.15, -0.05 * step as f64, 0.0];
            let (mut new, mut a, mut b) = ([f64::NAN; 3], first, second);
            update(Weights::Beside { old: &weights, new: &mut new }, &gradient, &mut a, &mut b, step);
            update(Weights::InPlace(&mut weights), &gradient, &mut first, &mut second, step);
            assert_eq!((weights, first, second), (new, a, b));
        }
        weights
    }

    fn assert_close(got: [f64; 3], want: [f64; 3]) {
        assert!(got.iter().zip(want).all(|(g, w)| (g - w).abs() < 1e-14), "{got:?} is not {want:?}");
    }

    // Expected weights from torch.optim 2.15 in float64: lr 0.1, weight decay 0.01, gradients (0.3, -0.1 t, 0).

    #[test]
    fn sgd_is_that_of_pytorch() {
        let rule = Sgd { lr: 0.1, momentum: 0.9, nesterov: false, weight_decay: 0.01, scale: 2.0 };
        let run = |rule: Sgd| three_steps(move |w, g, a, _, _| sgd(w, g, a, rule));
        assert_close(run(rule), [0.826238769, -1.8937475879999999, 0.4971973995]);
        let nesterov = Sgd { nesterov: true, weight_decay: 0.0, ..rule };
        assert_close(run(nesterov), [0.7585299999999999, -1.8544100000000001, 0.5]);
        let plain = Sgd { momentum: 0.0, ..rule };
        let stateless = three_steps(move |w, g, _, _, _| sgd(w, g, &mut [], plain));
        assert_close(stateless, [0.9070929689999999, -1.934045988, 0.4985014995]);
    }

    #[test]
    fn adam_and_adamw_are_those_of_pytorch() {
        let run = |decoupled| {
            three_steps(move |w, g, a, b, step| {
                let (betas, epsilon) = ([0.9, 0.999], 1e-8);
                adam(w, g, a, b, Adam { lr: 0.1, betas, epsilon, weight_decay: 0.01, decoupled, step, scale: 2.0 });
            })
        };
        assert_close(run(false), [0.7000313838014607, -1.7057867866319831, 0.20487188520996757]);
        assert_close(run(true), [0.6973029089900038, -1.7019841117213312, 0.4985014995]);
    }

    #[test]
    fn rmsprop_and_adagrad_are_those_of_pytorch() {
        let rule = RmsProp { lr: 0.1, alpha: 0.99, epsilon: 1e-8, weight_decay: 0.01, momentum: 0.5, scale: 2.0 };
        let rms = three_steps(move |w, g, a, b, _| rmsprop(w, g, a, b, rule));
        assert_close(rms, [-2.354037162664403, 1.830582872644813, 0.19647434570439573]);
        let ada = three_steps(|w, g, a, _, step| {
            let rule = Adagrad { lr: 0.1, lr_decay: 0.1, epsilon: 1e-10, weight_decay: 0.01, step, scale: 2.0 };
            adagrad(w, g, a, rule);
        });
        assert_close(ada, [0.7878275646880389, -1.7547189302108845, 0.3038412696930018]);
    }

    #[test]
    fn gradients_accumulate() {
        let mut sum = [1.0f32, 2.0];
        accumulate(&mut sum, &[0.5, -2.0]);
        assert_eq!(sum, [1.5, 0.0]);
        add(&[0.5, 3.0], &[1.0, -2.0], &mut sum);
        assert_eq!(sum, [1.5, 1.0]);
    }
}
