//! Averages micro-batch losses per minibatch and detects divergence.
//!
//! A non-finite loss corrupts every weight that its gradients reach, so the first one ends the run. With loss scaling,
//! a step with overflowing gradients is skipped. Such a run has diverged when many consecutive minibatches, or all,
//! have no finite loss.

use crate::train::job::StepDone;
use compiler::schedule::Program;
use std::collections::BTreeMap;
use std::fmt;

/// Consecutive minibatches without a finite loss that end a run with loss scaling: twice as many as reduce the default
/// initial scale to 1.
const PATIENCE: usize = 32;

/// Location of the divergence. Steps and micro-batches count from 0.
#[derive(Clone, Copy, Debug)]
pub struct Diverged {
    /// The first of the consecutive minibatches without a finite loss.
    pub step: usize,
    pub steps: usize,
    /// The first micro-batch of that step without a finite loss.
    pub microbatch: usize,
    pub microbatches: usize,
    pub loss: f64,
    /// The last minibatch of this run with a finite loss, and that loss.
    pub finite: Option<(usize, f64)>,
}

impl fmt::Display for Diverged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the loss of step {} of {} is {}", self.step + 1, self.steps, self.loss)
    }
}

/// Collects micro-batch losses into minibatch losses.
pub struct LossTracker {
    microbatches: usize,
    open: BTreeMap<usize, Vec<Option<f64>>>,
    /// Minibatches done before this run was resumed.
    before: usize,
    /// Minibatches of the run.
    steps: usize,
    done: Vec<f64>,
    /// Consecutive minibatches without a finite loss that end the run.
    most_nonfinite: usize,
    finite: Option<(usize, f64)>,
    /// Set while the latest minibatches have no finite loss.
    lost: Option<Diverged>,
}

impl LossTracker {
    /// Starts after `before` finished minibatches. `is_scaled` is true with loss scaling.
    pub fn new(program: &Program, before: u32, is_scaled: bool) -> LossTracker {
        let microbatches = program.microbatches.max(1) as usize;
        let most_nonfinite = if is_scaled { PATIENCE } else { 1 };
        let (before, steps) = (before as usize, program.items as usize / microbatches);
        LossTracker {
            microbatches,
            open: BTreeMap::new(),
            before,
            steps,
            done: Vec::new(),
            most_nonfinite,
            finite: None,
            lost: None,
        }
    }

    /// Adds the loss of a micro-batch, `seconds` after the start of the run. Reports nothing after divergence.
    pub fn add(&mut self, item: u32, value: f64, seconds: f64, on_step: &mut dyn FnMut(StepDone)) {
        let (minibatch, at) = (item as usize / self.microbatches, item as usize % self.microbatches);
        self.open.entry(minibatch).or_insert_with(|| vec![None; self.microbatches])[at] = Some(value);
        // Replicas finish in any order; minibatches are reported in order.
        while !self.is_lost() {
            let next = self.before + self.done.len();
            let Some(entry) = self.open.first_entry() else { break };
            if *entry.key() != next || !entry.get().iter().all(Option::is_some) {
                break;
            }
            let values: Vec<f64> = entry.remove().into_iter().flatten().collect();
            let loss = values.iter().sum::<f64>() / values.len() as f64;
            on_step(StepDone { step: next, loss, seconds });
            self.done.push(loss);
            if loss.is_finite() {
                (self.finite, self.lost) = (Some((next, loss)), None);
            } else {
                let microbatch = values.iter().position(|value| !value.is_finite()).unwrap_or(0);
                let (steps, microbatches, finite) = (self.steps, self.microbatches, self.finite);
                self.lost.get_or_insert(Diverged { step: next, steps, microbatch, microbatches, loss, finite });
            }
        }
    }

    fn is_lost(&self) -> bool {
        let next = self.before + self.done.len();
        self.lost.is_some_and(|lost| {
            // A resumed run does not know earlier losses.
            let is_all = self.finite.is_none() && self.before == 0 && next == self.steps;
            next - lost.step >= self.most_nonfinite || is_all
        })
    }

    pub fn diverged(&self) -> Option<Diverged> {
        self.lost.filter(|_| self.is_lost())
    }

    /// Losses of all finished minibatches.
    pub fn done(self) -> Vec<f64> {
        self.done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn losses(most_nonfinite: usize, steps: usize) -> LossTracker {
        let open = BTreeMap::new();
        LossTracker {
            microbatches: 2,
            open,
            before: 0,
            steps,
            done: Vec::new(),
            most_nonfinite,
            finite: None,
            lost: None,
        }
    }

    /// The reported losses for micro-batches arriving in this order, and the divergence.
    fn track(mut tracker: LossTracker, items: &[(u32, f64)]) -> (Vec<f64>, Option<Diverged>) {
        let mut losses = Vec::new();
        items.iter().for_each(|(item, loss)| tracker.add(*item, *loss, 0.0, &mut |step| losses.push(step.loss)));
        (losses, tracker.diverged())
    }

    #[test]
    fn a_run_that_goes_on_may_have_had_finite_losses_before() {
        let last = [(10, f64::NAN), (11, f64::NAN)];
        assert!(track(LossTracker { before: 5, ..losses(32, 6) }, &last).1.is_none());
        assert!(track(losses(32, 1), &[(0, f64::NAN), (1, f64::NAN)]).1.is_some());
    }

    #[test]
    fn minibatches_come_in_their_order_and_none_behind_the_first_that_is_lost() {
        let (nan, inf) = (f64::NAN, f64::INFINITY);
        let items = [(3, 4.0), (5, inf), (4, 1.0), (6, 1.0), (1, 1.0), (0, 3.0), (7, 1.0), (2, 2.0), (8, nan)];
        let (reported, diverged) = track(losses(1, 9), &items);
        assert_eq!(reported, [2.0, 3.0, inf]);
        let Diverged { step, microbatch, finite, .. } = diverged.unwrap();
        assert_eq!((step, microbatch, finite), (2, 1, Some((1, 3.0))));
        assert_eq!(diverged.unwrap().to_string(), "the loss of step 3 of 9 is inf");
    }

    #[test]
    fn steps_that_are_left_out_are_no_divergence_until_no_scale_helps() {
        let nan = f64::NAN;
        let items_of = |losses: &[f64]| -> Vec<(u32, f64)> {
            losses
                .iter()
                .enumerate()
                .flat_map(|(at, loss)| [(2 * at as u32, 1.0), (2 * at as u32 + 1, *loss)])
                .collect()
        };
        assert!(track(losses(3, 9), &items_of(&[nan, nan, 1.0, nan, nan, 1.0])).1.is_none());
        let diverged = track(losses(3, 9), &items_of(&[nan, 1.0, nan, nan, nan, 1.0])).1.unwrap();
        assert_eq!((diverged.step, diverged.finite), (2, Some((1, 1.0))));
        // A run that ends like this has usable weights, unless it never had a finite loss.
        assert!(track(losses(3, 3), &items_of(&[1.0, nan, nan])).1.is_none());
        assert_eq!(track(losses(3, 2), &items_of(&[nan, nan])).1.unwrap().step, 0);
    }
}
