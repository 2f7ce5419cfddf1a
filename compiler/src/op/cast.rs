//! Conversion between element types.

use super::*;
use crate::op::sharding::elementwise;

impl OpRule for Cast {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [x] = arity(inputs)?;
        Ok(vec![Fact::new(self.to, x.shape.clone())])
    }

    // dx = dy cast to the element type of x; integers have no gradient
    fn backward<'b>(&self, context: BackwardContext<'b>) -> Vec<Option<Expr<'b>>> {
        let x = context.inputs[0];
        vec![(x.is_float() && self.to.is_float()).then(|| context.dy().cast(x.dtype()))]
    }

    // Partial sums may be widened; narrowing would round each term before the sum.
    fn strategies(&self, inputs: &[&Fact], outputs: &[Fact], _: &Group) -> Vec<Strategy> {
        let mut strategies = elementwise(inputs, &outputs[0]);
        let (from, to) = (inputs[0].dtype, self.to);
        if from.is_float() && to.is_float() && to.size() > from.size() {
            strategies.push(Strategy::linear(&[true], 1));
        }
        strategies
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let (x, y) = (&inputs[0], &mut outputs[0]);
        for i in 0..x.len() {
            y.copy_from(i, x, i);
        }
        Ok(())
    }
}

pub fn samples() -> Vec<Sample> {
    let floats = || Tensor::from_f32(&[2, 3], &[0.0, 1.5, -2.7, 100.25, -0.1, 3.0]);
    let integers = || Tensor::from_i64(&[4], &[0, -1, 300, 7]);
    let sample = |title, x: Tensor, to| Sample {
        title,
        op: Op::Cast(Cast { to }),
        // Narrower results round, which disturbs a finite difference.
        differentiate: if x.dtype().is_float() && to == DType::F64 { vec![0] } else { vec![] },
        inputs: vec![x],
    };
    let mut list = vec![
        sample("a scalar", Tensor::from_f32(&[], &[2.5]), DType::F64),
        sample("wider", floats(), DType::F64),
        sample("floats truncate", floats(), DType::I64),
        sample("booleans of floats", floats(), DType::Bool),
        sample("integers wrap", integers(), DType::U8),
        sample("integers are floats", integers(), DType::F32),
        sample("booleans of integers", integers(), DType::Bool),
        sample("numbers of booleans", Tensor::from_bool(&[2], &[true, false]), DType::F32),
        sample("the 64th bit", Tensor::from_i64(&[1], &[-1]).cast(DType::U64), DType::F32),
        sample("nothing", Tensor::zeros(DType::F32, &[0]), DType::I32),
    ];
    list.extend([DType::F32, DType::F16, DType::Bf16].map(|to| sample("between floats", floats(), to)));
    let bytes = integers().cast(DType::U8);
    list.extend([DType::I8, DType::I16, DType::I32, DType::U64].map(|to| sample("from bytes", bytes.clone(), to)));
    list
}
