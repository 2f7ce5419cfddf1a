//! Elementwise select, broadcasting.

use super::broadcast::{broadcast_indices, broadcast_shapes};
use super::*;
use crate::op::sharding::elementwise;

impl OpRule for Select {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [condition, a, b] = arity(inputs)?;
        check_dtype(condition.dtype == DType::Bool, "the condition", "bool", condition)?;
        check_like("the second choice", b, a, "the first")?;
        let choices = broadcast_shapes(&a.shape, &b.shape)?;
        Ok(vec![Fact::new(a.dtype, broadcast_shapes(&condition.shape, &choices)?)])
    }

    // da = condition ? dy : 0, db = condition ? 0 : dy, summed over broadcast axes
    fn backward<'b>(&self, context: BackwardContext<'b>) -> Vec<Option<Expr<'b>>> {
        let [condition, a, b] = *context.inputs else { unreachable!("infer checks the arity") };
        if !a.is_float() {
            return vec![None; 3];
        }
        let (dy, zero) = (context.dy(), a.number(0.0));
        let da = context.wanted[1].then(|| condition.select(dy, zero).sum_to(a));
        let db = context.wanted[2].then(|| condition.select(zero, dy).sum_to(b));
        vec![None, da, db]
    }

    fn strategies(&self, inputs: &[&Fact], outputs: &[Fact], _: &Group) -> Vec<Strategy> {
        let mut strategies = elementwise(inputs, &outputs[0]);
        strategies.push(Strategy::linear(&[false, true, true], 1));
        strategies
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let (condition, a, b, y) = (&inputs[0], &inputs[1], &inputs[2], &mut outputs[0]);
        let [of_condition, of_a, of_b] = [condition, a, b].map(|x| broadcast_indices(x.shape, y.shape));
        for (i, (c, (ia, ib))) in of_condition.zip(of_a.zip(of_b)).enumerate() {
            if condition.bool(c) { y.copy_from(i, a, ia) } else { y.copy_from(i, b, ib) }
        }
        Ok(())
    }
}

pub fn samples() -> Vec<Sample> {
    let sample = |title, condition: Tensor, a: Tensor, b: Tensor| {
        Sample::new(title, Op::Select(Select {}), vec![condition, a, b])
    };
    let mask = || Tensor::from_bool(&[2, 3], &[true, false, true, false, false, true]);
    let a = || Tensor::from_f32(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let row = || Tensor::from_f32(&[3], &[-1.0, -2.0, -3.0]);
    let number = |v| Tensor::from_f32(&[], &[v]);
    let no_number = Tensor::from_f32(&[1], &[f32::NAN]);
    let left = sample("not a number is left", Tensor::from_bool(&[], &[true]), number(1.0), no_number);
    // A finite difference around NaN is undefined.
    let left = Sample { differentiate: vec![1], ..left };
    vec![
        sample("equal shapes", mask(), a(), Tensor::from_f32(&[2, 3], &[0.5; 6])),
        sample("a row and a scalar", mask(), row(), number(-9.0)),
        sample("a stretched condition", Tensor::from_bool(&[2, 1], &[true, false]), a(), row()),
        sample("the condition has the largest rank", mask(), number(1.0), number(2.0)),
        sample(
            "all stretched",
            Tensor::from_bool(&[2, 1, 1], &[true, false]),
            row(),
            Tensor::from_f32(&[2, 1], &[7.0, 8.0]),
        ),
        sample("scalars", Tensor::from_bool(&[], &[false]), number(1.0), number(2.0)),
        left,
        sample("integers", mask(), Tensor::from_i64(&[], &[i64::MAX]), Tensor::from_i64(&[3], &[1, 2, i64::MIN])),
        sample("booleans", mask(), Tensor::from_bool(&[], &[true]), Tensor::from_bool(&[3], &[true, false, false])),
    ]
}
