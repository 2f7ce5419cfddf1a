//! Elementwise select, broadcasting.

use super::broadcast::{broadcast_indices, broadcast_shapes, sum_to};
use super::unary::scalar;
use super::*;
use crate::op::sharding::elementwise;

impl OpRule for Select {
    fn name(&self) -> &'static str {
        "select"
    }

    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [condition, a, b] = inputs else { return Err(FactError::Arity { expected: 3, got: inputs.len() }) };
        if condition.dtype != DType::Bool {
            return Err(FactError::DType { what: "the condition", expected: "bool".into(), got: condition.dtype });
        }
        if a.dtype != b.dtype {
            let expected = format!("{}, as the first", a.dtype);
            return Err(FactError::DType { what: "the second choice", expected, got: b.dtype });
        }
        let choices = broadcast_shapes(&a.shape, &b.shape)?;
        Ok(vec![Fact::new(a.dtype, broadcast_shapes(&condition.shape, &choices)?)])
    }

    // da = condition ? dy : 0, db = condition ? 0 : dy, summed over broadcast axes
    fn backward(&self, context: BackwardContext<'_>, out: &mut dyn Emit) -> Vec<Option<Value>> {
        let (condition, dy) = (context.inputs[0], context.dy());
        let dtype = out.fact(context.inputs[1]).dtype;
        if !dtype.is_float() {
            return vec![None; 3];
        }
        let zero = out.emit(scalar(dtype, 0.0), &[]);
        let mut gradient = |input: usize, choices: [Value; 2]| {
            context.wanted[input].then(|| {
                let chosen = out.emit(Op::Select(Select {}), &[condition, choices[0], choices[1]]);
                let target = out.fact(context.inputs[input]);
                sum_to(out, chosen, &target)
            })
        };
        vec![None, gradient(1, [dy, zero]), gradient(2, [zero, dy])]
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
    let sample = |title, condition: Tensor, a: Tensor, b: Tensor| Sample {
        title,
        op: Op::Select(Select {}),
        differentiate: if a.dtype().is_float() { vec![1, 2] } else { vec![] },
        inputs: vec![condition, a, b],
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
