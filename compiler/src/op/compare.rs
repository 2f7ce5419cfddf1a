//! Elementwise comparisons, broadcasting.

use super::broadcast::{broadcast_indices, broadcast_shapes};
use super::*;
use crate::op::sharding::elementwise;

impl Named for Compare {
    fn name(&self) -> &'static str {
        match self {
            Compare::Equal => "equal",
            Compare::Less => "less",
            Compare::LessEqual => "less_equal",
        }
    }
}

impl OpRule for Compare {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [a, b] = arity(inputs)?;
        check_like("the second input", b, a, "the first")?;
        Ok(vec![Fact::new(DType::Bool, broadcast_shapes(&a.shape, &b.shape)?)])
    }

    fn strategies(&self, inputs: &[&Fact], outputs: &[Fact], _: &Group) -> Vec<Strategy> {
        elementwise(inputs, &outputs[0])
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let (a, b, y) = (&inputs[0], &inputs[1], &mut outputs[0]);
        for (i, (ia, ib)) in broadcast_indices(a.shape, y.shape).zip(broadcast_indices(b.shape, y.shape)).enumerate() {
            let result = match a.dtype {
                d if d.is_float() => holds(*self, &a.f64(ia), &b.f64(ib)),
                DType::U64 => holds(*self, &(a.i64(ia) as u64), &(b.i64(ib) as u64)),
                _ => holds(*self, &a.i64(ia), &b.i64(ib)),
            };
            y.set_bool(i, result);
        }
        Ok(())
    }
}

fn holds<T: PartialOrd>(op: Compare, a: &T, b: &T) -> bool {
    match op {
        Compare::Equal => a == b,
        Compare::Less => a < b,
        Compare::LessEqual => a <= b,
    }
}

pub fn samples() -> Vec<Sample> {
    let sample = |title, op, a: Tensor, b: Tensor| Sample::forward(title, Op::Compare(op), vec![a, b]);
    // The 64th bit is set: a signed comparison would order these wrongly.
    let large = || Tensor::from_i64(&[2], &[-1, 3]).cast(DType::U64);
    let mut list = Vec::new();
    for op in [Compare::Equal, Compare::Less, Compare::LessEqual] {
        let a = || Tensor::from_f32(&[2, 3], &[1.0, 2.0, 3.0, -1.0, f32::NAN, f32::INFINITY]);
        list.push(sample(
            "floats",
            op,
            a(),
            Tensor::from_f32(&[2, 3], &[1.0, 3.0, 2.0, -2.0, f32::NAN, f32::INFINITY]),
        ));
        list.push(sample("a row", op, a(), Tensor::from_f32(&[3], &[1.0, 1.5, 4.0])));
        list.push(sample("a scalar on the left", op, Tensor::from_f32(&[], &[1.0]), a()));
        // Neighbours that are equal as f64.
        let (below_max, max) = (i64::MAX - 1, i64::MAX);
        list.push(sample("integers", op, Tensor::from_i64(&[2], &[below_max, -3]), Tensor::from_i64(&[2], &[max, -3])));
        list.push(sample("unsigned", op, large(), Tensor::from_i64(&[2], &[1, 3]).cast(DType::U64)));
        let bytes = |v: &[i64]| Tensor::from_i64(&[v.len()], v).cast(DType::U8);
        list.push(sample("bytes", op, bytes(&[200, 7, 0]), bytes(&[100, 7, 1])));
        list.push(sample(
            "booleans",
            op,
            Tensor::from_bool(&[2, 1], &[true, false]),
            Tensor::from_bool(&[2], &[true, false]),
        ));
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_compare_exactly_in_every_type() {
        let is_less = |a: Tensor, b: Tensor| {
            let mut bytes = vec![9];
            Compare::Less.reference(&[a.view(), b.view()], &mut [ViewMut::new(DType::Bool, &[1], &mut bytes)]).unwrap();
            bytes[0] == 1
        };
        assert!(is_less(Tensor::from_i64(&[1], &[i64::MAX - 1]), Tensor::from_i64(&[1], &[i64::MAX])));
        let huge = Tensor::new(DType::U64, vec![1], u64::MAX.to_le_bytes().to_vec().into()).unwrap();
        assert!(!is_less(huge.clone(), Tensor::from_i64(&[1], &[1]).cast(DType::U64)));
        assert!(!is_less(Tensor::from_f32(&[1], &[f32::NAN]), Tensor::from_f32(&[1], &[1.0])));
    }
}
