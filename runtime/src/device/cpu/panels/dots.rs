//! Products of a few rows with a transposed matrix: every element is a dot product of two contiguous rows. Vectors run
//! along the depth, and the large operand is read once, in whole cache lines.

// Index loops are fully unrolled; iterator closures would not be compiled for these vectors.
#![allow(clippy::needless_range_loop)]

use super::images::lanes_before;
use super::pack::transpose_16x16;
use super::{LANES, Rows};
use std::arch::x86_64::{
    __m512, _MM_HINT_T0, _mm_prefetch, _mm512_add_ps, _mm512_fmadd_ps, _mm512_maskz_loadu_ps, _mm512_setzero_ps,
    _mm512_storeu_ps,
};

pub const MOST_ROWS: usize = 8;

/// Elements of the rows that stay in the first-level cache while the large operand is streamed.
const AT_HAND: usize = 4 * 1024;

/// `c = a bᵀ`, or `c += a bᵀ` with `add`, for sizes m, n, k with m at most [`MOST_ROWS`]. Rows of `a` and `b` are
/// contiguous; `c_row` is the row stride of `c`. An element is written after its whole sum, or after blocks of depth
/// that depend on the sizes.
///
/// # Safety
///
/// The processor has AVX-512, and the operands have these sizes, none of them 0.
pub unsafe fn dots([m, n, k]: [usize; 3], a: Rows, b: Rows, (c, c_row): (*mut f32, usize), add: bool) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match m {
            1 => dots_of::<1, 16>(n, k, a, b, (c, c_row), add),
            2 => dots_of::<2, 8>(n, k, a, b, (c, c_row), add),
            3 => dots_of::<3, 5>(n, k, a, b, (c, c_row), add),
            4 => dots_of::<4, 4>(n, k, a, b, (c, c_row), add),
            5 => dots_of::<5, 3>(n, k, a, b, (c, c_row), add),
            6 => dots_of::<6, 2>(n, k, a, b, (c, c_row), add),
            7 => dots_of::<7, 2>(n, k, a, b, (c, c_row), add),
            MOST_ROWS => dots_of::<8, 2>(n, k, a, b, (c, c_row), add),
            _ => unreachable!("there are at most {MOST_ROWS} rows"),
        }
    }
}

/// Multiplies `M` rows of `a` with `R` rows of `b` at a time.
#[target_feature(enable = "avx512f")]
unsafe fn dots_of<const M: usize, const R: usize>(
    n: usize,
    k: usize,
    a: Rows,
    b: Rows,
    (c, c_row): (*mut f32, usize),
    add: bool,
) {
    let max_block = (AT_HAND / M).next_multiple_of(LANES);
    let block = k.div_ceil(k.div_ceil(max_block)).next_multiple_of(LANES);
    for (first, column) in (0..k).step_by(block).flat_map(|first| (0..n).step_by(R).map(move |column| (first, column)))
    {
        let (end, add) = (k.min(first + block), add || first > 0);
        let mut sums = [[_mm512_setzero_ps(); M]; R];
        // After the last row of b, the last one is read again.
        let (mut rows, mut later) = ([b.at; R], [b.at; R]);
        for r in 0..R {
            rows[r] = b.at.wrapping_add((column + r).min(n - 1) * b.row);
            later[r] = b.at.wrapping_add((column + 2 * R + r).min(n - 1) * b.row);
        }
        macro_rules! step {
            ($depth:expr, $lanes:expr) => {
                let mut right = [_mm512_setzero_ps(); R];
                for r in 0..R {
                    right[r] = _mm512_maskz_loadu_ps($lanes, rows[r].wrapping_add($depth));
                    _mm_prefetch::<_MM_HINT_T0>(later[r].wrapping_add($depth).cast());
                }
                for i in 0..M {
                    let left = _mm512_maskz_loadu_ps($lanes, a.at.wrapping_add(i * a.row + $depth));
                    for r in 0..R {
                        sums[r][i] = _mm512_fmadd_ps(left, right[r], sums[r][i]);
                    }
                }
            };
        }
        let whole = first + (end - first) / LANES * LANES;
        let mut depth = first;
        // SAFETY: guaranteed by the caller; lanes past the end of a row are masked, and a prefetch may use any address.
        unsafe {
            while depth < whole {
                step!(depth, !0);
                depth += LANES;
            }
            if depth < end {
                step!(depth, lanes_before(end - depth, 0));
            }
        }
        let mut lines = [_mm512_setzero_ps(); LANES];
        for r in 0..R {
            for i in 0..M {
                lines[r * M + i] = sums[r][i];
            }
        }
        let mut elements = [0.0f32; LANES];
        // SAFETY: the array holds a vector.
        unsafe { _mm512_storeu_ps(elements.as_mut_ptr(), sum_lanes(lines)) };
        for r in 0..R.min(n - column) {
            for i in 0..M {
                let to = c.wrapping_add(i * c_row + column + r);
                // SAFETY: guaranteed by the caller.
                unsafe { *to = if add { *to + elements[r * M + i] } else { elements[r * M + i] } };
            }
        }
    }
}

/// The lane sum of each vector.
#[inline]
#[target_feature(enable = "avx512f")]
fn sum_lanes(sums: [__m512; LANES]) -> __m512 {
    let mut lanes = transpose_16x16(sums);
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] = _mm512_add_ps(lanes[i], lanes[i + half]);
        }
        half /= 2;
    }
    lanes[0]
}
