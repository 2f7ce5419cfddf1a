//! A permutation of the axes.

use super::broadcast::{copy_elements, walk};
use super::*;
use crate::tensor::view::strides;

impl OpRule for Transpose {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [x] = arity(inputs)?;
        let mut sorted = self.perm.clone();
        sorted.sort_unstable();
        if sorted.iter().copied().ne(0..x.rank()) {
            let text = format!("{:?} is not a permutation of the {} axes of the input", self.perm, x.rank());
            return Err(FactError::Attribute(text));
        }
        Ok(vec![Fact::new(x.dtype, self.perm.iter().map(|&axis| x.shape[axis].clone()).collect())])
    }

    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        Cost { flops: 0.0, bytes: moved_bytes(inputs, outputs) }
    }

    // dx = dy with the inverse permutation
    fn backward<'b>(&self, context: BackwardContext<'b>) -> Vec<Option<Expr<'b>>> {
        if !context.inputs[0].is_float() {
            return vec![None];
        }
        let mut perm = vec![0; self.perm.len()];
        for (to, &from) in self.perm.iter().enumerate() {
            perm[from] = to;
        }
        vec![Some(context.dy().then(Op::Transpose(Transpose { perm })))]
    }

    fn strategies(&self, _: &[&Fact], outputs: &[Fact], _: &Group) -> Vec<Strategy> {
        let axes = self.perm.iter().enumerate();
        let mut strategies: Vec<Strategy> =
            axes.map(|(axis, from)| Strategy::along(&[Some(*from)], &[Some(axis)])).collect();
        strategies.push(Strategy::linear(&[true], outputs.len()));
        strategies
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let (x, y) = (&inputs[0], &mut outputs[0]);
        let x_strides = strides(x.shape);
        let steps: Vec<isize> = self.perm.iter().map(|&axis| x_strides[axis] as isize).collect();
        let from = walk(0, &steps, y.shape);
        copy_elements(x, y, from);
        Ok(())
    }
}

pub fn samples() -> Vec<Sample> {
    let sample = |title, x: Tensor, perm: &[usize]| {
        Sample::new(title, Op::Transpose(Transpose { perm: perm.to_vec() }), vec![x])
    };
    let ramp = |shape: &[usize]| {
        let count: usize = shape.iter().product();
        Tensor::from_f32(shape, &(0..count).map(|i| i as f32 - 4.5).collect::<Vec<_>>())
    };
    vec![
        sample("a matrix", ramp(&[2, 3]), &[1, 0]),
        // A cycle of three is not its own inverse.
        sample("a cycle", ramp(&[2, 3, 2]), &[1, 2, 0]),
        sample("outer axes", ramp(&[2, 3, 2, 2]), &[1, 0, 3, 2]),
        sample("nothing moves", ramp(&[2, 2]), &[0, 1]),
        sample("a scalar", ramp(&[]), &[]),
        sample("nothing", ramp(&[0, 3]), &[1, 0]),
        sample("integers", Tensor::from_i64(&[2, 2], &[1, i64::MAX, 3, 4]), &[1, 0]),
        sample("bytes", ramp(&[2, 3]).cast(DType::U8), &[1, 0]),
        sample("booleans", Tensor::from_bool(&[1, 2], &[true, false]), &[1, 0]),
    ]
}
