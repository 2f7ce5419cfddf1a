//! Learning-rate schedules. They count minibatches under every schedule: an update that averages three minibatches
//! advances by three.

use std::f64::consts::PI;

/// A learning-rate schedule: linear warm-up, then a shape.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// Warm-up minibatches: number t, from 0, has the scale `(t + 1)/warmup`.
    pub warmup: u32,
    pub shape: Shape,
}

/// The schedule after warm-up. Floors are fractions of the base learning rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Shape {
    Constant,
    /// Multiplied by `factor` after every `every` minibatches (PyTorch's `StepLR`).
    Step {
        every: u32,
        factor: f64,
    },
    /// Half a cosine from the base rate to the floor at the end (Loshchilov and Hutter, ICLR 2017, equation 5 without
    /// restarts; PyTorch's `CosineAnnealingLR`).
    Cosine {
        floor: f64,
    },
    /// Linear from the base rate to the floor at the end.
    Linear {
        floor: f64,
    },
}

impl Rate {
    pub const CONSTANT: Rate = Rate { warmup: 0, shape: Shape::Constant };

    /// Learning-rate scale at a minibatch, counted from 0, of `total`.
    pub fn factor(&self, minibatch: u32, total: u32) -> f64 {
        if minibatch < self.warmup {
            return (f64::from(minibatch) + 1.0) / f64::from(self.warmup);
        }
        let step = minibatch - self.warmup;
        let progress = f64::from(step) / f64::from(total.saturating_sub(self.warmup).max(1));
        let progress = progress.min(1.0);
        match self.shape {
            Shape::Constant => 1.0,
            Shape::Step { every, factor } => factor.powi((step / every.max(1)) as i32),
            Shape::Cosine { floor } => floor + (1.0 - floor) * (1.0 + (PI * progress).cos()) / 2.0,
            Shape::Linear { floor } => 1.0 + (floor - 1.0) * progress,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn factors(rate: Rate, total: u32) -> Vec<f64> {
        (0..total).map(|b| rate.factor(b, total)).collect()
    }

    #[test]
    fn shapes_are_those_of_pytorch() {
        let rate = |shape| Rate { warmup: 0, shape };
        assert_eq!(factors(rate(Shape::Step { every: 2, factor: 0.1 }), 5), [1.0, 1.0, 0.1, 0.1, 0.1 * 0.1]);
        // CosineAnnealingLR with T_max = 4, rate 1 and eta_min = 0.2.
        let cosine = factors(rate(Shape::Cosine { floor: 0.2 }), 4);
        let want = [1.0, 0.8828427124746191, 0.6, 0.317_157_287_525_381];
        assert!(cosine.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-15), "{cosine:?}");
        assert_eq!(factors(rate(Shape::Linear { floor: 0.5 }), 4), [1.0, 0.875, 0.75, 0.625]);
    }

    #[test]
    fn a_warm_up_comes_first_and_takes_its_minibatches_from_the_rest() {
        let rate = Rate { warmup: 4, shape: Shape::Linear { floor: 0.0 } };
        assert_eq!(factors(rate, 8), [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25]);
        // A run shorter than its warm-up, and a minibatch after the end.
        assert_eq!(factors(rate, 2), [0.25, 0.5]);
        assert_eq!((rate.factor(8, 8), rate.factor(9, 8)), (0.0, 0.0));
    }
}
