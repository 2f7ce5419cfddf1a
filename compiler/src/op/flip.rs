//! Flip: reverses axes.

use super::broadcast::{copy_elements, walk};
use super::reduce::check_axes;
use super::*;
use crate::tensor::view::strides;

impl OpRule for Flip {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [x] = arity(inputs)?;
        check_axes(&self.axes, x.rank())?;
        Ok(vec![x.clone()])
    }

    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        Cost { flops: 0.0, bytes: moved_bytes(inputs, outputs) }
    }

    // dx = dy flipped back
    fn backward<'b>(&self, context: BackwardContext<'b>) -> Vec<Option<Expr<'b>>> {
        vec![context.inputs[0].is_float().then(|| context.dy().then(Op::Flip(self.clone())))]
    }

    fn strategies(&self, inputs: &[&Fact], outputs: &[Fact], _: &Group) -> Vec<Strategy> {
        let mut strategies = sharding::all_but(inputs[0], &self.axes, outputs.len());
        strategies.push(Strategy::linear(&[true], outputs.len()));
        strategies
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let (x, y) = (&inputs[0], &mut outputs[0]);
        let mut base = 0;
        let mut steps: Vec<isize> = strides(x.shape).into_iter().map(|s| s as isize).collect();
        for &axis in &self.axes {
            // From the last index down; an empty axis is never walked.
            base += x.shape[axis].saturating_sub(1) * steps[axis] as usize;
            steps[axis] = -steps[axis];
        }
        let from = walk(base, &steps, y.shape);
        copy_elements(x, y, from);
        Ok(())
    }
}

pub fn samples() -> Vec<Sample> {
    let sample = |title, x: Tensor, axes: &[usize]| Sample::new(title, Op::Flip(Flip { axes: axes.to_vec() }), vec![x]);
    let twelve = || Tensor::from_f32(&[2, 3, 2], &[0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11.]);
    vec![
        sample("the last axis", Tensor::from_f32(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), &[1]),
        sample("the first axis", twelve(), &[0]),
        sample("both outer axes", twelve(), &[0, 1]),
        sample("all axes", twelve(), &[0, 1, 2]),
        sample("no axes", twelve(), &[]),
        sample("a scalar", Tensor::from_f32(&[], &[3.0]), &[]),
        sample("nothing", Tensor::zeros(DType::F32, &[0, 2]), &[0, 1]),
        sample("integers", Tensor::from_i64(&[3], &[1, 2, i64::MAX]), &[0]),
        sample("booleans", Tensor::from_bool(&[3], &[true, false, false]), &[0]),
    ]
}
