//! Row sums and extremes: 16 lanes combined in a fixed tree, accumulated in `f64`.

use super::real::Real;

const LANES: usize = 16;

/// Lanes of an extreme, which is independent of the order: enough to hide the comparison latency.
const WIDE: usize = 4 * LANES;

// These are index loops, because zipped chunk iterators are not always inlined into the caller.

/// Σ f(x) over a row, of wide elements.
#[inline(always)]
pub fn sum_of<T: Real>(x: &[T], f: impl Fn(f64) -> f64) -> f64 {
    sum_each(x, |v| f(v.wide()))
}

/// `Σ e^(x - shift)` over a row.
#[inline(always)]
pub fn sum_exp<T: Real>(x: &[T], shift: T) -> f64 {
    sum_each(x, |v| (v - shift).exp().wide())
}

#[inline(always)]
fn sum_each<T: Real>(x: &[T], f: impl Fn(T) -> f64) -> f64 {
    let mut lanes = [0.0f64; LANES];
    let whole = x.len() / LANES * LANES;
    for (lane, &v) in lanes.iter_mut().zip(&x[whole..]) {
        *lane = f(v);
    }
    for at in (0..whole).step_by(LANES) {
        let x = &x[at..at + LANES];
        for lane in 0..LANES {
            lanes[lane] += f(x[lane]);
        }
    }
    tree(lanes, |a, b| a + b)
}

/// Σ f(a, b) over two rows of equal length.
#[inline(always)]
pub fn sum_of_pairs<T: Real>(a: &[T], b: &[T], f: impl Fn(f64, f64) -> f64) -> f64 {
    let mut lanes = [0.0f64; LANES];
    let whole = a.len().min(b.len()) / LANES * LANES;
    for (lane, (&x, &y)) in lanes.iter_mut().zip(a[whole..].iter().zip(&b[whole..])) {
        *lane = f(x.wide(), y.wide());
    }
    for at in (0..whole).step_by(LANES) {
        let (a, b) = (&a[at..at + LANES], &b[at..at + LANES]);
        for lane in 0..LANES {
            lanes[lane] += f(a[lane].wide(), b[lane].wide());
        }
    }
    tree(lanes, |a, b| a + b)
}

/// Maximum of a row; NaN wins; -∞ for an empty row.
#[inline(always)]
pub fn largest<T: Real>(x: &[T]) -> T {
    extreme(x, T::LOWEST, T::larger)
}

/// Minimum of a row; NaN wins; ∞ for an empty row.
#[inline(always)]
pub fn smallest<T: Real>(x: &[T]) -> T {
    extreme(x, -T::LOWEST, T::smaller)
}

#[inline(always)]
fn extreme<T: Real>(x: &[T], start: T, join: impl Fn(T, T) -> T) -> T {
    let mut lanes = [start; WIDE];
    let chunks = x.chunks_exact(WIDE);
    for (lane, &v) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane = v;
    }
    for chunk in chunks {
        for lane in 0..WIDE {
            lanes[lane] = join(lanes[lane], chunk[lane]);
        }
    }
    tree(lanes, join)
}

/// Joins lanes in halves.
#[inline(always)]
pub fn tree<T: Copy, const N: usize>(mut lanes: [T; N], join: impl Fn(T, T) -> T) -> T {
    let mut width = N / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] = join(lanes[lane], lanes[lane + width]);
        }
        width /= 2;
    }
    lanes[0]
}
