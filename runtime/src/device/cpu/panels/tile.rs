//! The innermost loops of a product: tiles of sums held in registers.

// Index loops are fully unrolled; iterator closures would not be compiled for these vectors.
#![allow(clippy::needless_range_loop)]

use super::{Ahead, LANES, ROWS, Rows, VECTORS};
use std::arch::x86_64::{
    __m512, _MM_HINT_T0, _mm_prefetch, _mm512_add_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_mask_storeu_ps,
    _mm512_maskz_loadu_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_storeu_ps,
};

/// Prefetch distance for rows of b read in place: they may be far apart, which defeats hardware prefetchers.
const ROWS_AHEAD: usize = 8;
/// Prefetch distance in a panel of a, in elements.
const A_AHEAD: usize = 16 * ROWS;
/// Depth steps between prefetches.
const TURN: usize = 4;

/// Minimum lines prefetched each time: as many as tiles read of a left operand meanwhile.
const LINES_AHEAD: usize = 2;

/// Operand locations: both in panels; one or both in place; or b in place and being packed, with a in a panel.
const PACKED: u8 = 0;
const IN_PLACE: u8 = 1;
const COPIED: u8 = 2;

/// A column of tiles over the same result columns.
#[derive(Clone, Copy)]
pub struct Tiles {
    pub count: usize,
    /// Products per sum.
    pub depth: usize,
    /// The left operand from the first tile's first row.
    pub a: Rows,
    /// Stride from one tile's rows to the next.
    pub a_tile: usize,
    /// The right operand from its first column.
    pub b: *const f32,
    pub b_row: usize,
    /// Lane mask of the last vector.
    pub last: u16,
    /// Target of the first row's vectors.
    pub c: [*mut f32; VECTORS],
    pub c_row: usize,
    /// True to accumulate into `c`.
    pub add: bool,
}

/// Computes tiles of `rows` and `vectors`. With `copy`, computes one tile from a panel of a and packs the b that it
/// reads.
///
/// # Safety
///
/// The processor has AVX-512. `a`, `b` (with the lane mask in the last vector) and `c` are in range, and `copy` has
/// room for a panel.
#[target_feature(enable = "avx512f")]
pub unsafe fn multiply_tiles(rows: usize, vectors: usize, tiles: &Tiles, ahead: &mut Ahead, copy: Option<*mut f32>) {
    let is_packed = tiles.a.row == 1 && tiles.a.step == rows && tiles.b_row == vectors * LANES;
    macro_rules! tiles {
        ($($rows:literal)*) => {
            // SAFETY: guaranteed by the caller.
            unsafe {
                match (rows, vectors, copy) {
                    (ROWS, 1, Some(panel)) => sum_tiles::<ROWS, 1, COPIED>(tiles, ahead, panel),
                    (ROWS, 2, Some(panel)) => sum_tiles::<ROWS, 2, COPIED>(tiles, ahead, panel),
                    (ROWS, _, Some(panel)) => sum_tiles::<ROWS, 3, COPIED>(tiles, ahead, panel),
                    $(
                        ($rows, 1, _) if is_packed => sum_tiles::<$rows, 1, PACKED>(tiles, ahead, std::ptr::null_mut()),
                        ($rows, 2, _) if is_packed => sum_tiles::<$rows, 2, PACKED>(tiles, ahead, std::ptr::null_mut()),
                        ($rows, _, _) if is_packed => sum_tiles::<$rows, 3, PACKED>(tiles, ahead, std::ptr::null_mut()),
                        ($rows, 1, _) => sum_tiles::<$rows, 1, IN_PLACE>(tiles, ahead, std::ptr::null_mut()),
                        ($rows, 2, _) => sum_tiles::<$rows, 2, IN_PLACE>(tiles, ahead, std::ptr::null_mut()),
                        ($rows, _, _) => sum_tiles::<$rows, 3, IN_PLACE>(tiles, ahead, std::ptr::null_mut()),
                    )*
                    _ => unreachable!("too many rows for a tile"),
                }
            }
        };
    }
    tiles!(1 2 3 4 5 6 7 8);
}

/// Index loops are fully unrolled, so every sum has a register of its own.
#[target_feature(enable = "avx512f")]
unsafe fn sum_tiles<const R: usize, const V: usize, const FACTORS: u8>(
    tiles: &Tiles,
    later: &mut Ahead,
    panel: *mut f32,
) {
    let Tiles { count, depth, a, a_tile, b, b_row, last, mut c, c_row, add } = *tiles;
    // Constant strides become immediate offsets.
    let (a_row, a_step) = if FACTORS == IN_PLACE { (a.row, a.step) } else { (1, R) };
    let b_row = if FACTORS == PACKED { V * LANES } else { b_row };
    let mut ahead = *later;
    for tile in 0..count {
        let mut sums: [[__m512; V]; R] = [[_mm512_setzero_ps(); V]; R];
        let (mut a_at, mut b_at, mut copy_at) = (a.at.wrapping_add(tile * a_tile), b, panel);
        macro_rules! step {
            () => {
                let mut row = [_mm512_setzero_ps(); V];
                for v in 0..V {
                    let at = b_at.wrapping_add(LANES * v);
                    row[v] = if v + 1 == V && FACTORS != PACKED {
                        _mm512_maskz_loadu_ps(last, at)
                    } else {
                        _mm512_loadu_ps(at)
                    };
                    if FACTORS == COPIED {
                        _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(ROWS_AHEAD * b_row).cast());
                        _mm512_storeu_ps(copy_at.wrapping_add(LANES * v), row[v]);
                    }
                }
                for r in 0..R {
                    let factor = _mm512_set1_ps(*a_at.wrapping_add(r * a_row));
                    for v in 0..V {
                        sums[r][v] = _mm512_fmadd_ps(factor, row[v], sums[r][v]);
                    }
                }
                a_at = a_at.wrapping_add(a_step);
                b_at = b_at.wrapping_add(b_row);
                if FACTORS == COPIED {
                    copy_at = copy_at.wrapping_add(LANES * V);
                }
            };
        }
        // SAFETY: guaranteed by the caller; a prefetch may use any address.
        unsafe {
            for turn in 0..depth / TURN {
                if turn < R {
                    let row = if tile + 1 < count { R + turn } else { turn };
                    for v in 0..V {
                        _mm_prefetch::<_MM_HINT_T0>(c[v].wrapping_add(row * c_row).cast());
                    }
                }
                if FACTORS == PACKED {
                    _mm_prefetch::<_MM_HINT_T0>(a_at.wrapping_add(A_AHEAD).cast());
                    _mm_prefetch::<_MM_HINT_T0>(a_at.wrapping_add(A_AHEAD + LANES).cast());
                }
                if FACTORS != COPIED {
                    ahead.prefetch(V.max(LINES_AHEAD));
                }
                step!();
                step!();
                step!();
                step!();
            }
            for _ in 0..depth % TURN {
                step!();
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
        for v in 0..V {
            c[v] = c[v].wrapping_add(R * c_row);
        }
    }
    *later = ahead;
}
