//! Training policy beside the update rule: gradient clipping, batch-norm statistics, weight staleness, loss scaling.

/// All of it. The default is the plain run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Policy {
    /// Gradients of a larger norm are shortened to this one.
    pub clip_norm: Option<f64>,
    /// How running statistics follow those of batches.
    pub statistics: Statistics,
    /// What makes up for weights that are not stashed.
    pub staleness: Staleness,
    /// How the loss is scaled where its gradients are `f16`.
    pub loss_scaling: LossScaling,
}

/// How running statistics follow those of batches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Statistics {
    /// An update for every microbatch, as PyTorch does where gradients are accumulated.
    #[default]
    Batch,
    /// One update for every minibatch, with the statistics of all of it (torchgpipe's `DeferredBatchNorm`).
    Deferred {
        /// Whether running variances follow the unbiased variance.
        unbiased: bool,
    },
}

/// What makes up for weights that change between an item's forward and its backward, under `1f1b-rr-newest`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Staleness {
    /// Nothing: weights are stashed, or their change is borne.
    #[default]
    None,
    /// The forward uses weights predicted for the time of the update (SpecTrain; Chen et al., 2018, equation 4): `ŵ = w − s·lr·v`, with
    /// `s` the updates until then and `v` the direction of the last one.
    Predict,
    /// PipeMare (Yang et al., MLSys 2021): the learning rate is divided by `τ^p`, where `p` falls from 1 to 0 over `anneal`
    /// minibatches (T1), and the backward uses weights set back to about where the forward had them, `w − τ·δ` (T2). `τ` is the
    /// stage's delay in updates, `δ` a moving average of the steps that keeps the share [`DISCREPANCY`]`^(1/τ)`.
    PipeMare {
        /// Minibatches until the rate is the full one.
        anneal: u32,
    },
}

/// What PipeMare's moving average keeps of a step after `τ` others: `D` of the paper, which takes about e⁻².
pub const DISCREPANCY: f64 = 0.135;

/// How the loss is scaled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScaling {
    /// The first scale.
    pub first: f64,
    /// Steps without an overflow after which the scale is doubled.
    pub every: u32,
}

impl Default for LossScaling {
    /// PyTorch's.
    fn default() -> LossScaling {
        LossScaling { first: 65536.0, every: 2000 }
    }
}

impl Staleness {
    /// The share of the learning rate that a stage of this delay has at a minibatch: PipeMare's T1, `τ^-p`.
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
        let of = Staleness::PipeMare { anneal: 4 };
        assert_eq!([0, 2, 4, 9].map(|b| of.rate(4, b)), [0.25, 0.5, 1.0, 1.0]);
        assert_eq!((of.rate(1, 0), of.rate(0, 0), Staleness::Predict.rate(4, 0)), (1.0, 1.0, 1.0));
    }
}
