//! Reproducible random tensors.

use compiler::tensor::Tensor;
use runtime::data::mix;

/// Uniform numbers in [-1, 1).
pub fn uniform(shape: &[usize], seed: u64) -> Tensor {
    let count: usize = shape.iter().product();
    let draw = |i: usize| (mix(seed.wrapping_mul(1000) + i as u64) >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
    Tensor::from_f32(shape, &(0..count).map(draw).collect::<Vec<_>>())
}
