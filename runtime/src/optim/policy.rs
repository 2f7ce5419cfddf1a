//! Training policy besides the update rule: gradient clipping, batch-norm statistics, weight staleness, loss scaling.

use crate::exec::moving_average::Statistics;

/// The policy of a run. The default enables nothing beyond the update rule.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Policy {
    pub clip_norm: Option<f64>,
    pub statistics: Statistics,
    pub staleness: Staleness,
    /// Loss scaling, used if gradients are `f16`.
    pub loss_scaling: LossScaling,
}

/// Compensation for weights that change between a forward and its backward, under `1f1b-rr-newest`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Staleness {
    #[default]
    None,
    /// The forward uses weights predicted for the time of the update (SpecTrain; Chen et al., 2018, equation 4): `ŵ = w
    /// − s·lr·v`, with `s` the number of updates until then and `v` the last update direction.
    Predict,
    /// PipeMare (Yang et al., MLSys 2021). T1: the learning rate is divided by `τ^p`; `p` falls from 1 to 0 over
    /// `anneal` minibatches. T2: the backward approximates the forward's weights by `w − τ·δ`. `τ` is the stage's delay
    /// in updates, `δ` a moving average of updates with decay [`DISCREPANCY`]`^(1/τ)`.
    PipeMare {
        /// Minibatches until the full learning rate.
        anneal: u32,
    },
}

/// Decay of PipeMare's moving average over `τ` updates: `D` of the paper, about e⁻².
pub const DISCREPANCY: f64 = 0.135;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScaling {
    /// Initial scale.
    pub first: f64,
    /// Steps without overflow after which the scale doubles.
    pub every: u32,
}

impl Default for LossScaling {
    /// PyTorch's `GradScaler` defaults.
    fn default() -> LossScaling {
        LossScaling { first: 65536.0, every: 2000 }
    }
}

impl Staleness {
    /// Learning-rate scale at a minibatch of a stage with this delay: PipeMare's T1, `τ^-p`.
    pub fn rate(self, delay: u32, minibatch: u32) -> f64 {
        match self {
            Staleness::PipeMare { anneal } if delay > 1 => {
                let p = 1.0 - (f64::from(minibatch) / f64::from(anneal.max(1))).min(1.0);
                f64::from(delay).powf(-p)
            }
            _ => 1.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_of_a_late_stage_grows_to_the_full_one() {
        let staleness = Staleness::PipeMare { anneal: 4 };
        assert_eq!([0, 2, 4, 9].map(|b| staleness.rate(4, b)), [0.25, 0.5, 1.0, 1.0]);
        assert_eq!((staleness.rate(1, 0), staleness.rate(0, 0), Staleness::Predict.rate(4, 0)), (1.0, 1.0, 1.0));
    }
}
