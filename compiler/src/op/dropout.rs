//! Dropout without a state: which elements stay follows from numbers alone.
//!
//! Element `i` stays when the upper 53 bits of `mix(mix(mix(stream) ^ counter) ^ i)` are at least `ratio · 2⁵³`, and is
//! then divided by `1 - ratio`; [`mix`] is the finaliser of SplitMix64. The stream tells the dropouts of a model apart.
//! The counter tells runs apart: whoever runs the graph gives it, another one for every item (a micro-batch, or the
//! minibatch where there are none), as the input [`COUNTER`]. So the gradient, a second forward run and every cut into
//! stages see one mask, and nothing is kept for it.

use super::sample::ramp;
use super::*;

/// The name of the graph input `i64[]` that holds the counter: no data file gives it.
pub const COUNTER: &str = "pipec.counter";

/// The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): a bijection of 64-bit numbers that looks random.
#[inline(always)]
pub fn mix(counter: u64) -> u64 {
    let mut z = counter.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Which elements of one run stay.
#[derive(Clone, Copy, Debug)]
pub struct Mask {
    key: u64,
    least: u64,
}

impl Mask {
    /// Whether element `i`, in row-major order, stays.
    #[inline(always)]
    pub fn keeps(self, i: usize) -> bool {
        mix(self.key ^ i as u64) >> 11 >= self.least
    }
}

impl Dropout {
    /// The mask of the run with this counter.
    pub fn mask(&self, counter: i64) -> Mask {
        let least = (self.ratio * (1u64 << 53) as f64) as u64;
        Mask { key: mix(mix(self.stream) ^ counter as u64), least }
    }

    /// What elements that stay are multiplied by; 0 where none does.
    pub fn scale(&self) -> f64 {
        if self.ratio < 1.0 { 1.0 / (1.0 - self.ratio) } else { 0.0 }
    }
}

impl Rule for Dropout {
    fn name(&self) -> &'static str {
        "dropout"
    }

    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [x, counter] = inputs else { return Err(FactError::Arity { expected: 2, got: inputs.len() }) };
        if !(0.0..=1.0).contains(&self.ratio) {
            return Err(FactError::Attribute(format!("the ratio is {}, not a share from 0 to 1", self.ratio)));
        }
        if !x.dtype.is_float() {
            return Err(FactError::DType { what: "the input", expected: "a float".into(), got: x.dtype });
        }
        layer_norm::same("the counter", counter, "a single index", &Fact::of(DType::I64, &[]))?;
        Ok(vec![(*x).clone()])
    }

    // dx is dy under the same mask.
    fn backward(&self, at: Site<'_>, out: &mut dyn Emit) -> Vec<Option<Value>> {
        vec![at.wanted[0].then(|| out.emit(Op::Dropout(*self), &[at.dy(), at.inputs[1]])), None]
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let (mask, scale) = (self.mask(inputs[1].i64(0)), self.scale());
        for i in 0..inputs[0].len() {
            outputs[0].set_f64(i, if mask.keeps(i) { inputs[0].f64(i) * scale } else { 0.0 });
        }
        Ok(())
    }
}

/// Small cases.
pub fn samples() -> Vec<Sample> {
    let counter = |value| Tensor::from_i64(&[], &[value]);
    [
        ("half", Dropout { ratio: 0.5, stream: 0 }, vec![ramp(&[4, 6], 1), counter(7)]),
        ("a tenth, another stream", Dropout { ratio: 0.1, stream: 3 }, vec![ramp(&[2, 3, 5], 2), counter(-1)]),
        ("nothing", Dropout { ratio: 0.0, stream: 1 }, vec![ramp(&[5], 3), counter(0)]),
        ("everything", Dropout { ratio: 1.0, stream: u64::MAX }, vec![ramp(&[5], 3), counter(i64::MIN)]),
    ]
    .into_iter()
    .map(|(title, op, inputs)| Sample { title, op: Op::Dropout(op), inputs, differentiate: vec![0] })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::sample::run;
    use super::*;

    fn kept(ratio: f64, stream: u64, counter: i64) -> Vec<bool> {
        let inputs = [Tensor::from_f64(&[10_000], &[1.0; 10_000]), Tensor::from_i64(&[], &[counter])];
        let y = run(&Dropout { ratio, stream }, &inputs)[0].to_f64();
        assert!(y.iter().all(|v| *v == 0.0 || (v * (1.0 - ratio) - 1.0).abs() < 1e-12));
        y.iter().map(|v| *v != 0.0).collect()
    }

    #[test]
    fn masks_have_their_share_and_do_not_agree_by_chance() {
        let share = |mask: &[bool]| mask.iter().filter(|kept| **kept).count() as f64 / mask.len() as f64;
        let one = kept(0.3, 0, 5);
        // Five deviations of a binomial of 10 000 draws are 0.023.
        assert!((share(&one) - 0.7).abs() < 0.023);
        for (stream, counter) in [(1, 5), (0, 6), (5, 0)] {
            let other = kept(0.3, stream, counter);
            let agree: Vec<bool> = one.iter().zip(&other).map(|(a, b)| a == b).collect();
            assert!((share(&agree) - 0.58).abs() < 0.025, "stream {stream}, counter {counter}: {}", share(&agree));
        }
        assert_eq!(one, kept(0.3, 0, 5));
    }

    #[test]
    fn wrong_ratios_and_counters_are_told() {
        let (x, counter) = (Fact::of(DType::F32, &[2]), Fact::of(DType::I64, &[]));
        let infer = |ratio, counter: &Fact| Dropout { ratio, stream: 0 }.infer(&[&x, counter]);
        assert_eq!(infer(0.5, &counter), Ok(vec![x.clone()]));
        for ratio in [-0.1, 1.5, f64::NAN] {
            assert!(infer(ratio, &counter).unwrap_err().to_string().contains("share"));
        }
        assert!(infer(0.5, &x).unwrap_err().to_string().starts_with("the counter is f32[2]"));
    }
}
