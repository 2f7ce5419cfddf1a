//! Global gradient norm, clipping factor, and dynamic loss scaling for `f16` gradients.
//!
//! Clipping follows PyTorch's `clip_grad_norm_`: `factor = min(1, clip / (norm + 1e-6))`. The norm is over the averaged
//! gradients of all parameters; a tied parameter counts once. Every worker contributes its parameters' sums of squares.
//! All workers add them in parameter-name order, so the result does not depend on the partition.
//!
//! The loss is multiplied by a power of two so that `f16` gradients do not underflow; the step divides by it. A step
//! with a non-finite gradient is skipped and halves the scale; after enough good steps the scale doubles (Micikevicius
//! et al., ICLR 2018, section 3.2).

use crate::comm::communicator::Communicator;
use crate::device::error::DeviceError;
use crate::optim::policy::LossScaling;
use std::collections::BTreeMap;

/// Sums of squares by parameter number in name order; those of shards by [`shard_number`].
pub type Squares = Vec<(usize, f64)>;

/// Number of a replica's shard of a parameter; `max_replicas` is the largest replica count of any stage.
pub fn shard_number(parameter: usize, replica: usize, max_replicas: usize) -> usize {
    parameter * max_replicas + replica
}

/// Sum of squares over all parameters in a round. Blocks until all members have contributed; fails if one is lost.
pub fn sum_of_squares(
    norms: &Communicator<Squares>,
    member: usize,
    round: u32,
    squares: Squares,
) -> Result<f64, DeviceError> {
    norms.contribute(u64::from(round), member, squares);
    let contributions = norms.wait(u64::from(round))?;
    // Replicas contribute bitwise equal sums for one parameter, to be counted once; shards have distinct numbers.
    let by_name: BTreeMap<usize, f64> = contributions.iter().flatten().copied().collect();
    Ok(by_name.values().fold(0.0, |sum, square| sum + square))
}

/// The factor that scales gradients to a norm of at most `clip`.
pub fn clip_factor(clip: f64, norm: f64) -> f64 {
    let factor = clip / (norm + 1e-6);
    // `min` would turn NaN into 1; a NaN norm must stay NaN.
    if factor > 1.0 { 1.0 } else { factor }
}

/// Largest loss scale: beyond it the gradient of the loss itself would not be finite.
const LARGEST: f64 = (1u64 << 40) as f64;

/// Dynamic loss scale. All workers see the same gradients, so all compute the same scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScale {
    rule: LossScaling,
    pub value: f64,
    good: u32,
}

impl LossScale {
    pub fn new(rule: LossScaling) -> LossScale {
        LossScale { rule, value: rule.first, good: 0 }
    }

    /// Resumes with a saved scale and the number of good steps since its last change.
    pub fn resumed(rule: LossScaling, (value, good): (f64, u32)) -> LossScale {
        LossScale { rule, value, good }
    }

    /// The state that [`LossScale::resumed`] takes.
    pub fn saved_state(&self) -> (f64, u32) {
        (self.value, self.good)
    }

    /// Updates the scale after a step; `finite` is true if all gradients were finite.
    pub fn update(&mut self, finite: bool) {
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
        assert_eq!(clip_factor(1.0, 0.5), 1.0);
        assert!((clip_factor(1.0, 4.0) - 0.25).abs() < 1e-6);
        assert!(clip_factor(1.0, f64::NAN).is_nan());
    }

    #[test]
    fn a_scale_halves_on_overflow_and_doubles_after_good_steps() {
        let mut scale = LossScale::new(LossScaling { first: 8.0, every: 2 });
        let scales = [true, true, false, true, false, false, false, false].map(|finite| {
            scale.update(finite);
            scale.value
        });
        assert_eq!(scales, [8.0, 16.0, 8.0, 8.0, 4.0, 2.0, 1.0, 1.0]);
    }
}
