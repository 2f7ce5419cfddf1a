//! Reinterprets the bits as another element type.

use super::*;
use crate::op::sharding::elementwise;

impl OpRule for BitCast {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [x] = arity(inputs)?;
        let size = self.to.size();
        check_dtype(x.dtype.size() == size, "the input", &format!("a type of {size} bytes, as {}", self.to), x)?;
        // A `bool` must be 0 or 1, so other bytes would be invalid.
        check_dtype(self.to != DType::Bool || x.dtype == DType::Bool, "the input", "bool, as the result", x)?;
        Ok(vec![Fact::new(self.to, x.shape.clone())])
    }

    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        Cost { flops: 0.0, bytes: moved_bytes(inputs, outputs) }
    }

    fn strategies(&self, inputs: &[&Fact], outputs: &[Fact], _: &Group) -> Vec<Strategy> {
        elementwise(inputs, &outputs[0])
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        outputs[0].bytes_mut().copy_from_slice(inputs[0].bytes());
        Ok(())
    }
}

pub fn samples() -> Vec<Sample> {
    let sample = |title, x: Tensor, to| Sample::forward(title, Op::BitCast(BitCast { to }), vec![x]);
    vec![
        sample("integers of floats", Tensor::from_f32(&[2], &[1.0, -0.0]), DType::I32),
        sample("floats of integers", Tensor::from_i64(&[2], &[i64::MIN, 1]), DType::F64),
        sample("without a sign", Tensor::from_i64(&[2], &[-1, 5]).cast(DType::I8), DType::U8),
        sample("bytes of booleans", Tensor::from_bool(&[2], &[true, false]), DType::U8),
        sample("a scalar", Tensor::from_f32(&[], &[2.0]), DType::U32),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::sample::run;

    #[test]
    fn bits_stay() {
        let one = Tensor::from_f32(&[1], &[1.0]);
        let bits = &run(&BitCast { to: DType::I32 }, std::slice::from_ref(&one))[0];
        assert_eq!(bits.to_i64(), [0x3f80_0000]);
        assert_eq!(run(&BitCast { to: DType::F32 }, std::slice::from_ref(bits))[0], one);
    }
}
