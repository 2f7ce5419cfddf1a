//! Products of a few rows with a matrix that lies transposed: every element is a sum along two rows in memory, so vectors go along the
//! depth, and the large factor is read once, in whole lines.

// Loops over indices are unrolled whole; closures of iterators would not be compiled for these vectors.
#![allow(clippy::needless_range_loop)]

use super::images::before;
use super::pack::sixteen_turned;
use super::{LANES, Rows};
use std::arch::x86_64::{
    __m512, _mm512_add_ps, _mm512_fmadd_ps, _mm512_maskz_loadu_ps, _mm512_setzero_ps, _mm512_storeu_ps,
};

/// Up to so many rows.
pub const MOST_ROWS: usize = 4;

/// `c = a bᵀ`, or `c += a bᵀ` with `add`, for sizes m, n, k of at most [`MOST_ROWS`] rows m; elements of rows of `a` and of `b` are
/// neighbours, rows of `c` lie `far` apart. Every element is summed up before it is written.
///
/// # Safety
/// The processor has AVX-512, and the factors and the result have these sizes, none of them 0.
pub unsafe fn dots([m, n, k]: [usize; 3], a: Rows, b: Rows, (c, far): (*mut f32, usize), add: bool) {
    // SAFETY: the caller's word.
    unsafe {
        match m {
            1 => tiles::<1, 16>(n, k, a, b, (c, far), add),
            2 => tiles::<2, 8>(n, k, a, b, (c, far), add),
            3 => tiles::<3, 5>(n, k, a, b, (c, far), add),
            MOST_ROWS => tiles::<4, 4>(n, k, a, b, (c, far), add),
            _ => unreachable!("there are at most {MOST_ROWS} rows"),
        }
    }
}

/// `M` rows of `a` meet `R` rows of `b` at a time.
#[target_feature(enable = "avx512f")]
unsafe fn tiles<const M: usize, const R: usize>(
    n: usize,
    k: usize,
    a: Rows,
    b: Rows,
    (c, far): (*mut f32, usize),
    add: bool,
) {
    for column in (0..n).step_by(R) {
        let mut sums = [_mm512_setzero_ps(); LANES];
        // Behind the last row of b the last one is read again.
        let mut rows = [b.at; R];
        for r in 0..R {
            rows[r] = b.at.wrapping_add((column + r).min(n - 1) * b.row);
        }
        for depth in (0..k).step_by(LANES) {
            let (lanes, mut right) = (before(k, depth / LANES), [_mm512_setzero_ps(); R]);
            // SAFETY: the caller's word; lanes behind the end of a row are not read.
            unsafe {
                for r in 0..R {
                    right[r] = _mm512_maskz_loadu_ps(lanes, rows[r].add(depth));
                }
                for i in 0..M {
                    let left = _mm512_maskz_loadu_ps(lanes, a.at.add(i * a.row + depth));
                    for r in 0..R {
                        sums[r * M + i] = _mm512_fmadd_ps(left, right[r], sums[r * M + i]);
                    }
                }
            }
        }
        let mut elements = [0.0f32; LANES];
        // SAFETY: there is a vector's room.
        unsafe { _mm512_storeu_ps(elements.as_mut_ptr(), added_up(sums)) };
        for r in 0..R.min(n - column) {
            for i in 0..M {
                let to = c.wrapping_add(i * far + column + r);
                // SAFETY: the caller's word.
                unsafe { *to = if add { *to + elements[r * M + i] } else { elements[r * M + i] } };
            }
        }
    }
}

/// The sum of the lanes of each vector.
#[inline]
#[target_feature(enable = "avx512f")]
fn added_up(sums: [__m512; LANES]) -> __m512 {
    let mut lanes = sixteen_turned(sums);
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] = _mm512_add_ps(lanes[i], lanes[i + half]);
        }
        half /= 2;
    }
    lanes[0]
}
