//! Stateless dropout: the mask is a pure function of stream, counter and element index.
//!
//! Element `i` is kept if the upper 53 bits of `mix(mix(mix(stream) ^ counter) ^ i)` are at least `ratio · 2⁵³`, and is
//! then divided by `1 - ratio`. [`mix`] is the finaliser of SplitMix64. The stream distinguishes the dropouts of a
//! model. The counter distinguishes runs: the executor passes another one for every micro-batch (or minibatch without
//! micro-batches) as the input [`COUNTER`]. The backward, a recomputed forward and every cut into stages see the same
//! mask, and no mask is stored.

use super::sample::ramp;
use super::*;

/// Name of the graph input `i64[]` for the counter, which data files never provide.
pub const COUNTER: &str = "pipec.counter";

/// The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): a pseudo-random bijection of 64-bit numbers.
#[inline(always)]
pub fn mix(counter: u64) -> u64 {
    let mut z = counter.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The mask of one run.
#[derive(Clone, Copy, Debug)]
pub struct Mask {
    key: u64,
    least: u64,
}

impl Mask {
    /// Tests whether element `i`, in row-major order, is kept.
    #[inline(always)]
    pub fn keeps(self, i: usize) -> bool {
        mix(self.key ^ i as u64) >> 11 >= self.least
    }
}

impl Dropout {
    pub fn mask(&self, counter: i64) -> Mask {
        let threshold = (self.ratio * (1u64 << 53) as f64) as u64;
        Mask { key: mix(mix(self.stream) ^ counter as u64), least: threshold }
    }

    /// The scale of kept elements; 0 if none is kept.
    pub fn scale(&self) -> f64 {
        if self.ratio < 1.0 { 1.0 / (1.0 - self.ratio) } else { 0.0 }
    }
}

impl OpRule for Dropout {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [x, counter] = arity(inputs)?;
        if !(0.0..=1.0).contains(&self.ratio) {
            return Err(FactError::Attribute(format!("the ratio is {}, not from 0 to 1", self.ratio)));
        }
        check_float("the input", x)?;
        check_same("the counter", counter, "a single index", &Fact::of(DType::I64, &[]))?;
        Ok(vec![x.clone()])
    }

    // dx is dy under the same mask.
    fn backward<'b>(&self, context: BackwardContext<'b>) -> Vec<Option<Expr<'b>>> {
        vec![context.wanted[0].then(|| emit(Op::Dropout(*self), &[context.dy(), context.inputs[1]])), None]
    }

    // Any axis: each device computes the mask of its shard.
    fn strategies(&self, inputs: &[&Fact], _: &[Fact], _: &Group) -> Vec<Strategy> {
        let split = |axis| Strategy::along(&[Some(axis), None], &[Some(axis)]).written();
        (0..inputs[0].rank()).map(split).chain([Strategy::linear(&[true, false], 1)]).collect()
    }

    fn write_part<'b>(&self, strategy: &Strategy, context: &LocalContext<'b>) -> Vec<Expr<'b>> {
        let [Sharding::Split(cut), _] = strategy.inputs[..] else { unreachable!("an axis of x is sharded") };
        let [x, counter] = *context.inputs else { unreachable!("infer checks the arity") };
        let shape = x.fact().concrete().expect("sizes are known under tensor parallelism");
        let part = DropoutPart { whole: *self, run: shape[cut.axis..].iter().product(), devices: context.devices };
        vec![emit(Op::DropoutPart(part), &[x, counter, x.device(context.devices)])]
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let (mask, scale) = (self.mask(inputs[1].i64(0)), self.scale());
        for i in 0..inputs[0].len() {
            outputs[0].set_f64(i, if mask.keeps(i) { inputs[0].f64(i) * scale } else { 0.0 });
        }
        Ok(())
    }
}

impl DropoutPart {
    /// Index in the full tensor of element `i` of a device's shard.
    #[inline(always)]
    pub fn place(&self, i: usize, device: usize) -> usize {
        (i / self.run * self.devices + device) * self.run + i % self.run
    }
}

impl OpRule for DropoutPart {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [x, counter, device] = arity(inputs)?;
        if self.run == 0 || self.devices == 0 {
            return Err(FactError::Attribute("a part has devices, and runs of elements".into()));
        }
        check_same("the device", device, "a single index", &Fact::of(DType::I64, &[]))?;
        self.whole.infer(&[x, counter])
    }

    // As for the full tensor.
    fn backward<'b>(&self, context: BackwardContext<'b>) -> Vec<Option<Expr<'b>>> {
        let dx = || emit(Op::DropoutPart(*self), &[context.dy(), context.inputs[1], context.inputs[2]]);
        vec![context.wanted[0].then(dx), None, None]
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let (mask, scale) = (self.whole.mask(inputs[1].i64(0)), self.whole.scale());
        let index = inputs[2].i64(0);
        let device = usize::try_from(index).ok().filter(|device| *device < self.devices);
        let device = device.ok_or(KernelError::Index { index, size: self.devices })?;
        for i in 0..inputs[0].len() {
            let is_kept = mask.keeps(self.place(i, device));
            outputs[0].set_f64(i, if is_kept { inputs[0].f64(i) * scale } else { 0.0 });
        }
        Ok(())
    }
}

pub fn samples() -> Vec<Sample> {
    let counter = |value| Tensor::from_i64(&[], &[value]);
    let sample = |title, op, inputs| Sample::new(title, op, inputs);
    let dropout = |ratio, stream| Dropout { ratio, stream };
    let dropout_sample =
        |title, ratio, stream, x, at| sample(title, Op::Dropout(dropout(ratio, stream)), vec![x, counter(at)]);
    let part = DropoutPart { whole: dropout(0.4, 2), run: 6, devices: 3 };
    vec![
        dropout_sample("half", 0.5, 0, ramp(&[4, 6], 1), 7),
        dropout_sample("a tenth, another stream", 0.1, 3, ramp(&[2, 3, 5], 2), -1),
        dropout_sample("nothing", 0.0, 1, ramp(&[5], 3), 0),
        dropout_sample("everything", 1.0, u64::MAX, ramp(&[5], 3), i64::MIN),
        sample("the second of three", Op::DropoutPart(part), vec![ramp(&[4, 2, 3], 4), counter(5), counter(1)]),
    ]
}

#[cfg(test)]
mod tests {
    use super::sample::run;
    use super::*;

    fn keep_mask(ratio: f64, stream: u64, counter: i64) -> Vec<bool> {
        let inputs = [Tensor::from_f64(&[10_000], &[1.0; 10_000]), Tensor::from_i64(&[], &[counter])];
        let y = run(&Dropout { ratio, stream }, &inputs)[0].to_f64();
        assert!(y.iter().all(|v| *v == 0.0 || (v * (1.0 - ratio) - 1.0).abs() < 1e-12));
        y.iter().map(|v| *v != 0.0).collect()
    }

    #[test]
    fn masks_have_their_share_and_do_not_agree_by_chance() {
        let share = |mask: &[bool]| mask.iter().filter(|kept| **kept).count() as f64 / mask.len() as f64;
        let first = keep_mask(0.3, 0, 5);
        // Five standard deviations of a binomial of 10 000 draws are 0.023.
        assert!((share(&first) - 0.7).abs() < 0.023);
        for (stream, counter) in [(1, 5), (0, 6), (5, 0)] {
            let second = keep_mask(0.3, stream, counter);
            let equal: Vec<bool> = first.iter().zip(&second).map(|(a, b)| a == b).collect();
            assert!((share(&equal) - 0.58).abs() < 0.025, "stream {stream}, counter {counter}: {}", share(&equal));
        }
        assert_eq!(first, keep_mask(0.3, 0, 5));
    }

    #[test]
    fn invalid_ratio_or_counter_is_an_error() {
        let (x, counter) = (Fact::of(DType::F32, &[2]), Fact::of(DType::I64, &[]));
        let infer = |ratio, counter: &Fact| Dropout { ratio, stream: 0 }.infer(&[&x, counter]);
        assert_eq!(infer(0.5, &counter), Ok(vec![x.clone()]));
        for ratio in [-0.1, 1.5, f64::NAN] {
            assert!(infer(ratio, &counter).unwrap_err().to_string().contains("from 0 to 1"));
        }
        assert!(infer(0.5, &x).unwrap_err().to_string().starts_with("the counter is f32[2]"));
    }
}
