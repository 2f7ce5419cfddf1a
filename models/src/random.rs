//! Counter-based random numbers: each value is a function of seed, name and index.
//!
//!   key       = mix(seed + fnv1a(name))
//!   bits(i)   = mix(key + (i + 1) · 0x9E3779B97F4A7C15)
//!
//! Here `mix` is the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) and sums are modulo 2^64. Adding a
//! parameter does not change the initial values of others. Only integer operations are used, so all machines draw the
//! same bits.

const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    key: u64,
}

impl Stream {
    pub fn new(seed: u64, name: &str) -> Self {
        let hash = name
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
        Self { key: mix(seed.wrapping_add(hash)) }
    }

    pub fn bits(self, index: u64) -> u64 {
        mix(self.key.wrapping_add(index.wrapping_add(1).wrapping_mul(GOLDEN)))
    }

    /// A uniform number in [-bound, bound).
    pub fn uniform(self, index: u64, bound: f64) -> f32 {
        // 53 bits fit an f64 exactly, so only the final conversion rounds.
        let unit = (self.bits(index) >> 11) as f64 / (1_u64 << 53) as f64;
        ((2.0 * unit - 1.0) * bound) as f32
    }

    /// A random permutation of 0..count (Fisher and Yates). The modulo bias is below count / 2^64.
    pub fn permutation(self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        for last in (1..count).rev() {
            let other = self.bits(last as u64) % (last as u64 + 1);
            order.swap(last, other as usize);
        }
        order
    }
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mix_is_splitmix64() {
        // The first three outputs of SplitMix64 seeded with 0.
        let state = |n: u64| mix(GOLDEN.wrapping_mul(n));
        assert_eq!([state(1), state(2), state(3)], [0xe220a8397b1dcdaf, 0x6e789e6aa1b965f4, 0x06c45d188009454f]);
    }

    #[test]
    fn uniform_numbers_have_the_right_mean_and_variance() {
        let stream = Stream::new(1, "w");
        let values: Vec<f64> = (0..100_000).map(|i| f64::from(stream.uniform(i, 3.0))).collect();
        let mean = values.iter().sum::<f64>() / 1e5;
        let variance = values.iter().map(|v| v * v).sum::<f64>() / 1e5;
        assert!(mean.abs() < 0.03, "{mean}");
        assert!((variance - 3.0).abs() < 0.05, "{variance}");
        assert!(values.iter().all(|v| (-3.0..=3.0).contains(v)));
    }

    #[test]
    fn streams_differ_by_seed_and_name() {
        let first = |seed, name| Stream::new(seed, name).bits(0);
        assert_ne!(first(0, "a"), first(1, "a"));
        assert_ne!(first(0, "a"), first(0, "b"));
        let mut order = Stream::new(0, "shuffle").permutation(100);
        assert_ne!(order, (0..100).collect::<Vec<_>>());
        order.sort_unstable();
        assert_eq!(order, (0..100).collect::<Vec<_>>());
    }
}
