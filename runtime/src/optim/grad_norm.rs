//! The global gradient norm, the clipping factor, and for `f16` gradients whether a step is taken at all.
//!
//! PyTorch's `clip_grad_norm_`: `factor = min(1, clip / (norm + 1e-6))`, the norm over the averaged gradients of all parameters, a
//! tied one once. Every worker contributes the sum of squares of each of its parameters; all add them in the order of the
//! parameters' names, so the result does not depend on the cuts.
//!
//! The loss is multiplied by a power of two, so that its gradients do not underflow in `f16`; the step divides by it. A step with
//! a gradient that is not finite is skipped and halves the scale; after enough good steps the scale doubles (Micikevicius et al.,
//! ICLR 2018, section 3.2).

use crate::comm::communicator::{Communicator, PeerLost};
use crate::optim::policy::LossScaling;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Sums of squares by the number of the parameter among all names, in order; of shares, of each by [`share_number`].
pub type Squares = Vec<(usize, f64)>;

/// The number of a replica's share of a parameter, where stages have so many replicas at most: they follow each other.
pub fn share_number(parameter: usize, replica: usize, most: usize) -> usize {
    parameter * most + replica
}

/// Where all workers meet before they step.
#[derive(Clone)]
pub struct Norms {
    /// Where.
    pub place: Arc<Communicator<Squares>>,
    /// Which of the members this worker is.
    pub member: usize,
}

impl Norms {
    /// The sum of squares over all parameters in a round. Waits for all workers; ends when they have come, or one is gone.
    pub fn sum(&self, round: u32, own: Squares) -> Result<f64, PeerLost> {
        self.place.bring(u64::from(round), self.member, own);
        let all = self.place.meet(u64::from(round))?;
        // Several workers hold a shared or replicated parameter, with the same bits; shares of one have numbers of their own.
        let by_name: BTreeMap<usize, f64> = all.iter().flatten().copied().collect();
        Ok(by_name.values().fold(0.0, |sum, square| sum + square))
    }
}

/// What gradients are multiplied by so that a norm becomes no larger than `clip`.
pub fn factor(clip: f64, norm: f64) -> f64 {
    let factor = clip / (norm + 1e-6);
    // What is no number stays none.
    if factor > 1.0 { 1.0 } else { factor }
}

/// The largest scale of a loss: beyond it the gradient of the loss itself would not be finite.
const LARGEST: f64 = (1u64 << 40) as f64;

/// The scale of the loss at a moment. All workers see the same gradients, so all have the same.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScale {
    rule: LossScaling,
    /// What the loss is multiplied by.
    pub value: f64,
    good: u32,
}

impl LossScale {
    /// The first.
    pub fn new(rule: LossScaling) -> LossScale {
        LossScale { rule, value: rule.first, good: 0 }
    }

    /// The scale of a run that goes on: its value, and good steps since that last changed.
    pub fn resumed(rule: LossScaling, (value, good): (f64, u32)) -> LossScale {
        LossScale { rule, value, good }
    }

    /// What [`LossScale::resumed`] takes.
    pub fn kept(&self) -> (f64, u32) {
        (self.value, self.good)
    }

    /// Hears whether all gradients of a step were finite.
    pub fn hear(&mut self, finite: bool) {
        if !finite {
            self.value = (self.value / 2.0).max(1.0);
            self.good = 0;
            return;
        }
        self.good += 1;
        if self.good == self.rule.every {
            self.value = (self.value * 2.0).min(LARGEST);
            self.good = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_gradients_are_shortened_and_short_ones_left() {
        assert_eq!(factor(1.0, 0.5), 1.0);
        assert!((factor(1.0, 4.0) - 0.25).abs() < 1e-6);
        assert!(factor(1.0, f64::NAN).is_nan());
    }

    #[test]
    fn a_scale_halves_on_overflow_and_doubles_after_good_steps() {
        let mut scale = LossScale::new(LossScaling { first: 8.0, every: 2 });
        let course = [true, true, false, true, false, false, false, false].map(|finite| {
            scale.hear(finite);
            scale.value
        });
        assert_eq!(course, [8.0, 16.0, 8.0, 8.0, 4.0, 2.0, 1.0, 1.0]);
    }
}
