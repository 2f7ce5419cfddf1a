//! Time of a matrix product on a GPU, by its shape.
//!
//! The result is divided into tiles. A multiprocessor computes one tile at a time, so the product runs in waves of one
//! tile per multiprocessor. Tiles at the edges and the last wave are rarely full: tile and wave quantisation (NVIDIA,
//! "Matrix Multiplication Background User's Guide"). With `c` tiles of `a × b`, `p` multiprocessors and peak `F`:
//!
//! ```text
//! t = ⌈c / p⌉ · 2 a b (k + PROLOGUE) / (F · efficiency · e(a, b) / p)
//! ```
//!
//! Libraries choose the tile, and divide `k` where there are few tiles (split-K), so the fastest choice counts. It is
//! never faster than the memory traffic. A product with very few rows, columns or terms runs on the vector units instead.

use super::{ELEMENTWISE, STREAMING};
use crate::cluster::Device;
use crate::op::{Op, elements};
use crate::tensor::DType;
use crate::tensor::fact::Fact;

/// Tile sizes, and their share of the rate of the largest. A tile of `a × b` loads `a + b` values for `a · b` products,
/// so small tiles are limited by shared memory.
const TILES: [(f64, f64, f64); 6] = [
    (256.0, 128.0, 1.0),
    (128.0, 256.0, 1.0),
    (128.0, 128.0, 0.9),
    (128.0, 64.0, 0.7),
    (64.0, 128.0, 0.7),
    (64.0, 64.0, 0.55),
];

/// Time to fill the pipeline of a tile and to write its result, as values of `k`.
const PROLOGUE: f64 = 192.0;

/// At most so many rows, columns or terms are few: the vector units compute such a product.
const FEW: f64 = 16.0;

/// Parts into which `k` may be divided.
const SPLITS: [f64; 5] = [1.0, 2.0, 4.0, 8.0, 16.0];

/// Sizes of `batch` products of m × k and k × n.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Product {
    pub batch: f64,
    pub m: f64,
    pub n: f64,
    pub k: f64,
}

impl Product {
    /// The product that an op with this many operations computes: a matrix product, or a convolution as an implicit
    /// product (Chetlur et al., "cuDNN: efficient primitives for deep learning", 2014, section 3).
    pub fn of(op: &Op, inputs: &[&Fact], outputs: &[Fact], flops: f64) -> Option<Product> {
        let result = outputs.first()?;
        let dims: Vec<f64> =
            result.shape.iter().map(|dim| dim.known().map(|size| size as f64)).collect::<Option<_>>()?;
        let element_count = elements(result);
        let (batch, m, n) = match op {
            Op::MatMul(_) => {
                let [.., m, n] = dims[..] else { return None };
                let rhs = inputs.get(1)?;
                // Matrices that all multiply one matrix are one tall matrix.
                if rhs.rank() == 2 { (1.0, element_count / n, n) } else { (element_count / (m * n), m, n) }
            }
            Op::Conv(o) => (o.groups as f64, element_count / dims.get(1)?, dims[1] / o.groups as f64),
            Op::ConvInputGrad(o) => (o.groups as f64, element_count / dims.get(1)?, dims[1] / o.groups as f64),
            Op::ConvWeightGrad(o) => {
                let m = dims.first()? / o.groups as f64;
                (o.groups as f64, m, element_count / dims[0])
            }
            _ => return None,
        };
        let product = Product { batch, m, n, k: flops / (2.0 * batch * m * n) };
        [product.batch, m, n, product.k].iter().all(|size| size.is_finite() && *size > 0.0).then_some(product)
    }

    /// Seconds on a GPU with this many multiprocessors. `rate` is the sustained rate of the whole device, `bytes` the
    /// size of operands and result.
    pub fn seconds(&self, device: &Device, multiprocessors: u32, rate: f64, bytes: f64) -> f64 {
        let bandwidth = STREAMING * device.memory_bandwidth.0;
        let unit_rate = rate / f64::from(multiprocessors);
        let mut best = f64::INFINITY;
        for (a, b, share) in TILES {
            for parts in SPLITS {
                let tiles = self.batch * (self.m / a).ceil() * (self.n / b).ceil() * parts;
                let waves = (tiles / f64::from(multiprocessors)).ceil();
                let compute = waves * 2.0 * a * b * (self.k / parts + PROLOGUE) / (unit_rate * share);
                // The parts are written in f32, read and added.
                let sums = if parts > 1.0 { 8.0 * parts * self.batch * self.m * self.n } else { 0.0 };
                best = best.min(compute.max(bytes / bandwidth) + sums / bandwidth);
            }
        }
        if self.m.min(self.n).min(self.k) > FEW {
            return best;
        }
        let operations = 2.0 * self.batch * self.m * self.n * self.k;
        best.min((operations / rate.min(ELEMENTWISE * device.peak_flops.f32)).max(bytes / bandwidth))
    }
}

/// Peak of a matrix product of this element type. f32 uses the f32 peak: frameworks use TF32 only on request.
pub fn peak(device: &Device, dtype: DType) -> f64 {
    match dtype {
        DType::F64 => device.peak_flops.f64,
        DType::Bf16 => device.peak_flops.bf16,
        DType::F16 => device.peak_flops.f16,
        _ => device.peak_flops.f32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::device::find;
    use crate::op::MatMul;

    fn efficiency(m: usize, n: usize, k: usize) -> f64 {
        let device = find("a100").unwrap().device();
        let facts = [[m, k], [k, n], [m, n]].map(|shape| Fact::of(DType::Bf16, &shape));
        let flops = 2.0 * (m * n * k) as f64;
        let op = Op::MatMul(MatMul { transpose_a: false, transpose_b: false });
        let product = Product::of(&op, &[&facts[0], &facts[1]], &facts[2..], flops).unwrap();
        let bytes = facts.iter().map(|fact| fact.bytes().unwrap() as f64).sum();
        let rate = 0.78 * device.peak_flops.bf16;
        flops / product.seconds(&device, 108, rate, bytes) / device.peak_flops.bf16
    }

    #[test]
    fn large_products_reach_the_sustained_rate_and_others_less() {
        assert!((0.7..0.78).contains(&efficiency(8192, 8192, 8192)));
        // 112 tiles on 108 multiprocessors take two waves, or smaller tiles.
        let full = efficiency(27 * 256, 4 * 128, 4096);
        assert!(efficiency(28 * 256, 4 * 128, 4096) < 0.7 * full);
        // A tile's edge is computed but not used.
        assert!(efficiency(27 * 256, 4 * 128 - 8, 4096) < full);
        // Short sums do not fill the pipeline.
        assert!(efficiency(8192, 8192, 128) < 0.5);
        // A matrix times few vectors reads the matrix: 2 operations for 2 bytes.
        let vector = efficiency(1, 8192, 8192) * 312e12;
        assert!(vector < 2039e9 && vector > 0.5 * 2039e9, "{vector}");
    }
}
