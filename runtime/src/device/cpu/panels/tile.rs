//! The innermost loops of a product: a tile of sums that never leave the registers.

use super::{LANES, ROWS, Rows, VECTORS};
use std::arch::x86_64::{
    __m512, _MM_HINT_T0, _mm_prefetch, _mm512_add_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_mask_storeu_ps,
    _mm512_maskz_loadu_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_storeu_ps,
};

/// How many rows of b are asked for before they are read where it lies: its rows may be far apart, and no prefetcher sees them coming.
const ROWS_AHEAD: usize = 8;

/// One tile's work.
#[derive(Clone, Copy)]
pub struct Tile {
    /// How many products a sum has.
    pub depth: usize,
    /// The left factor, from this tile's first row.
    pub a: Rows,
    /// The right factor, from this tile's first column.
    pub b: *const f32,
    /// Distance between rows of `b`.
    pub b_row: usize,
    /// Lanes of the last vector.
    pub last: u16,
    /// Where the vectors of the first row of sums go.
    pub c: [*mut f32; VECTORS],
    /// Distance between rows of `c`.
    pub c_row: usize,
    /// Whether they are added to what is there.
    pub add: bool,
}

/// Works out a tile of `rows` and `vectors`, and with `copy` writes the panel of b that it reads.
///
/// # Safety
/// The processor has AVX-512. All of `a`, of `b` (in the last vector its lanes only) and of `c` is there, and a panel behind `copy`.
#[target_feature(enable = "avx512f")]
pub unsafe fn tile(rows: usize, vectors: usize, it: &Tile, copy: Option<*mut f32>) {
    macro_rules! tiles {
        ($($rows:literal)*) => {
            // SAFETY: the caller's word.
            unsafe {
                match (rows, vectors, copy) {
                    (ROWS, 1, Some(panel)) => sums::<ROWS, 1, true>(it, panel),
                    (ROWS, 2, Some(panel)) => sums::<ROWS, 2, true>(it, panel),
                    (ROWS, _, Some(panel)) => sums::<ROWS, 3, true>(it, panel),
                    $(
                        ($rows, 1, _) => sums::<$rows, 1, false>(it, std::ptr::null_mut()),
                        ($rows, 2, _) => sums::<$rows, 2, false>(it, std::ptr::null_mut()),
                        ($rows, _, _) => sums::<$rows, 3, false>(it, std::ptr::null_mut()),
                    )*
                    _ => unreachable!("a tile has at most so many rows"),
                }
            }
        };
    }
    tiles!(1 2 3 4 5 6 7 8);
}

/// Plain loops over indices: they are unrolled whole, and every sum has a register of its own.
#[target_feature(enable = "avx512f")]
unsafe fn sums<const R: usize, const V: usize, const COPY: bool>(it: &Tile, mut panel: *mut f32) {
    // SAFETY: the caller's word; an address that is only asked for may be anywhere.
    unsafe {
        let Tile { depth, a, mut b, b_row, last, c, c_row, add } = *it;
        for r in 0..R {
            for v in 0..V {
                _mm_prefetch::<_MM_HINT_T0>(c[v].wrapping_add(r * c_row).cast());
            }
        }
        let mut sums: [[__m512; V]; R] = [[_mm512_setzero_ps(); V]; R];
        let mut from = [a.at; R];
        for r in 0..R {
            from[r] = a.at.add(r * a.row);
        }
        for _ in 0..depth {
            let mut row = [_mm512_setzero_ps(); V];
            for v in 0..V {
                let at = b.add(LANES * v);
                row[v] = if v + 1 == V { _mm512_maskz_loadu_ps(last, at) } else { _mm512_loadu_ps(at) };
                if COPY {
                    _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(ROWS_AHEAD * b_row).cast());
                    _mm512_storeu_ps(panel.add(LANES * v), row[v]);
                }
            }
            for r in 0..R {
                let factor = _mm512_set1_ps(*from[r]);
                from[r] = from[r].wrapping_add(a.step);
                for v in 0..V {
                    sums[r][v] = _mm512_fmadd_ps(factor, row[v], sums[r][v]);
                }
            }
            b = b.wrapping_add(b_row);
            if COPY {
                panel = panel.add(LANES * V);
            }
        }
        for r in 0..R {
            for v in 0..V {
                let to = c[v].add(r * c_row);
                let lanes = if v + 1 == V { last } else { !0 };
                let mut sum = sums[r][v];
                if add {
                    sum = _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, to), sum);
                }
                _mm512_mask_storeu_ps(to, lanes, sum);
            }
        }
    }
}
