//! Stateless uniform random numbers, like the masks of [`dropout`].
//!
//! Element `i` is the upper bits of `mix(mix(mix(stream) ^ counter) ^ i)` divided by their range. It uses as many bits
//! as the element type represents exactly: 53 for `f64`, 24 for `f32`, 11 for `f16`, 8 for `bf16`. Rounding therefore
//! never gives 1. A recomputed forward and every cut into stages draw the same numbers.

use super::dropout::mix;
use super::*;

impl Uniform {
    pub fn bits(&self) -> u32 {
        match self.fact.dtype {
            DType::F64 => 53,
            DType::F16 => 11,
            DType::Bf16 => 8,
            _ => 24,
        }
    }

    /// The hash of stream and counter, common to all elements.
    pub fn key(&self, counter: i64) -> u64 {
        mix(mix(self.stream) ^ counter as u64)
    }
}

impl OpRule for Uniform {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [counter] = arity(inputs)?;
        check_float("the result", &self.fact)?;
        broadcast::check_sizes("uniform", &self.fact.shape)?;
        check_same("the counter", counter, "a single index", &Fact::of(DType::I64, &[]))?;
        Ok(vec![self.fact.clone()])
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let (key, bits) = (self.key(inputs[0].i64(0)), self.bits());
        let unit = 0.5f64.powi(bits as i32);
        for i in 0..outputs[0].len() {
            outputs[0].set_f64(i, (mix(key ^ i as u64) >> (64 - bits)) as f64 * unit);
        }
        Ok(())
    }
}

pub fn samples() -> Vec<Sample> {
    let sample = |title, dtype, shape: &[usize], stream, counter| {
        Sample::forward(
            title,
            Op::Uniform(Uniform { fact: Fact::of(dtype, shape), stream }),
            vec![Tensor::from_i64(&[], &[counter])],
        )
    };
    vec![
        sample("a row for each example", DType::F32, &[4, 1, 1], 0, 7),
        sample("another stream", DType::F64, &[3, 5], 3, -1),
        sample("half precision", DType::F16, &[33], 1, 0),
        sample("brain floats", DType::Bf16, &[2, 9], u64::MAX, i64::MIN),
        sample("nothing", DType::F32, &[2, 0], 1, 5),
    ]
}

#[cfg(test)]
mod tests {
    use super::sample::run;
    use super::*;

    fn draw(dtype: DType, stream: u64, counter: i64) -> Vec<f64> {
        let op = Uniform { fact: Fact::of(dtype, &[10_000]), stream };
        run(&op, &[Tensor::from_i64(&[], &[counter])])[0].to_f64()
    }

    #[test]
    fn samples_are_uniform_in_half_open_interval() {
        for dtype in [DType::F64, DType::F32, DType::F16, DType::Bf16] {
            let numbers = draw(dtype, 0, 5);
            assert!(numbers.iter().all(|u| (0.0..1.0).contains(u)), "{dtype:?}");
            let mean = numbers.iter().sum::<f64>() / 1e4;
            let variance = numbers.iter().map(|u| (u - mean).powi(2)).sum::<f64>() / 1e4;
            // Five standard deviations of the mean of 10 000 draws are 0.0145; the mean of `bf16` is half of 2^-8
            // lower.
            assert!((mean - 0.5).abs() < 0.0165, "{dtype:?}: mean {mean}");
            assert!((variance - 1.0 / 12.0).abs() < 0.004, "{dtype:?}: variance {variance}");
        }
    }

    #[test]
    fn streams_and_counters_give_other_numbers_and_equal_ones_the_same() {
        let numbers = draw(DType::F32, 0, 5);
        assert_eq!(numbers, draw(DType::F32, 0, 5));
        for (stream, counter) in [(1, 5), (0, 6), (5, 0)] {
            let other = draw(DType::F32, stream, counter);
            let product: f64 = numbers.iter().zip(&other).map(|(a, b)| (a - 0.5) * (b - 0.5)).sum::<f64>() / 1e4;
            assert!(product.abs() < 5.0 / 12.0 / 100.0, "stream {stream}, counter {counter}: {product}");
        }
    }
}
