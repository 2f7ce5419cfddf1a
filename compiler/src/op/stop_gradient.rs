//! Stop-gradient: PyTorch's `detach` and `no_grad`.
//!
//! It is a view, so devices copy nothing. The missing gradient is its definition, so training accepts it:
//! straight-through estimators and moving targets train as the model specifies.

use super::*;
use crate::op::sharding::elementwise;

impl OpRule for StopGradient {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [x] = arity(inputs)?;
        Ok(vec![x.clone()])
    }

    fn cost(&self, _: &[&Fact], _: &[Fact]) -> Cost {
        Cost::default()
    }

    fn strategies(&self, inputs: &[&Fact], outputs: &[Fact], _: &Group) -> Vec<Strategy> {
        elementwise(inputs, &outputs[0])
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        outputs[0].bytes_mut().copy_from_slice(inputs[0].bytes());
        Ok(())
    }

    fn is_view(&self) -> bool {
        true
    }
}

/// None is differentiated: the gradient is zero by definition.
pub fn samples() -> Vec<Sample> {
    let sample = |title, x: Tensor| Sample::forward(title, Op::StopGradient(StopGradient {}), vec![x]);
    vec![
        sample("a matrix", Tensor::from_f32(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])),
        sample("a number", Tensor::from_f32(&[], &[7.0])),
        sample("integers", Tensor::from_i64(&[2], &[1, 2])),
    ]
}
