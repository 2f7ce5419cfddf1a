//! Sample values for the test cases of ops, and the reference kernel as a plain function.

use super::*;
use crate::tensor::element_count;

/// A tensor of distinct, evenly spaced `f32` values in [-1, 1), shuffled by `seed`.
///
/// Values are `2 / elements` apart, so that a finite difference does not change the argmax.
pub fn ramp(shape: &[usize], seed: u64) -> Tensor {
    let count = element_count(shape).expect("a sample is small");
    let mut values: Vec<f32> = (0..count).map(|i| (2.0 * i as f64 / count as f64 - 1.0) as f32).collect();
    // Fisher-Yates, driven by the generator of Knuth's MMIX.
    let mut state = seed.wrapping_add(1);
    for last in (1..count).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        values.swap(last, ((state >> 33) % (last as u64 + 1)) as usize);
    }
    Tensor::from_f32(shape, &values)
}

/// Runs an op's reference kernel. Panics on unsuitable inputs or a kernel error: for samples and tests.
pub fn run(rule: &dyn OpRule, inputs: &[Tensor]) -> Vec<Tensor> {
    try_run(rule, inputs).expect("the kernel of a sample succeeds")
}

/// Runs an op's reference kernel. Panics if the inputs do not fit the op.
pub fn try_run(rule: &dyn OpRule, inputs: &[Tensor]) -> Result<Vec<Tensor>, KernelError> {
    let facts: Vec<Fact> = inputs.iter().map(|t| Fact::of(t.dtype(), t.shape())).collect();
    let outputs = rule.infer(&facts.iter().collect::<Vec<_>>()).expect("the inputs of a sample fit its op");
    let shapes: Vec<Vec<usize>> =
        outputs.iter().map(|f| f.concrete().expect("the shapes of a sample are numbers")).collect();
    // Bytes that a kernel does not write stay NaN in every float type.
    let mut bytes: Vec<Vec<u8>> = outputs
        .iter()
        .zip(&shapes)
        .map(|(f, shape)| vec![0xff; element_count(shape).expect("a sample is small") * f.dtype.size()])
        .collect();
    let views: Vec<View<'_>> = inputs.iter().map(Tensor::view).collect();
    let mut written: Vec<ViewMut<'_>> = outputs
        .iter()
        .zip(&shapes)
        .zip(&mut bytes)
        .map(|((f, shape), bytes)| ViewMut::new(f.dtype, shape, bytes))
        .collect();
    rule.reference(&views, &mut written)?;
    let tensors = outputs.iter().zip(shapes).zip(bytes).map(|((f, shape), bytes)| {
        Tensor::new(f.dtype, shape, bytes.into()).expect("the bytes were counted from the shape")
    });
    Ok(tensors.collect())
}

#[cfg(test)]
pub fn assert_close(got: &Tensor, expected: &[f64]) {
    assert_eq!(got.len(), expected.len());
    for (g, e) in got.to_f64().iter().zip(expected) {
        assert!((g - e).abs() < 1e-12, "{got:?} is not {expected:?}");
    }
}

/// Asserts that a gradient op gives the derivatives of the `weights`-weighted sum of all outputs. The gradient of input
/// `slot` is `gradients[gradient_slots[slot]]`. All tensors are `f64`.
#[cfg(test)]
pub fn assert_slopes(
    rule: &dyn OpRule,
    inputs: &[Tensor],
    weights: &[Tensor],
    gradients: &[Tensor],
    gradient_slots: &[usize],
) {
    let loss = |inputs: &[Tensor]| -> f64 {
        let dot = |(w, y): (&Tensor, &Tensor)| w.to_f64().iter().zip(y.to_f64()).map(|(w, y)| w * y).sum::<f64>();
        weights.iter().zip(&run(rule, inputs)).map(dot).sum()
    };
    for (slot, &gradient_slot) in gradient_slots.iter().enumerate() {
        let x = inputs[slot].to_f64();
        for (at, slope) in gradients[gradient_slot].to_f64().into_iter().enumerate() {
            let loss_at = |step: f64| {
                let (mut x, mut inputs) = (x.clone(), inputs.to_vec());
                x[at] += step;
                inputs[slot] = Tensor::from_f64(inputs[slot].shape(), &x);
                loss(&inputs)
            };
            let difference = (loss_at(1e-5) - loss_at(-1e-5)) / 2e-5;
            assert!((slope - difference).abs() < 1e-8, "input {slot}, {at}: {slope} is not {difference}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ramp_has_every_value_once_in_an_order_of_its_seed() {
        let (a, b) = (ramp(&[4, 5], 1).to_f32(), ramp(&[4, 5], 2).to_f32());
        assert_ne!(a, b);
        let mut sorted = a.clone();
        sorted.sort_by(f32::total_cmp);
        assert!(sorted.windows(2).all(|w| w[1] - w[0] > 0.09));
        assert_eq!((sorted[0], sorted[10]), (-1.0, 0.0));
    }
}
