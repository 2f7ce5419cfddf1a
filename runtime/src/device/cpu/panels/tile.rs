//! The innermost loops of a product: tiles of sums that never leave the registers, one below the other.

// Loops over indices are unrolled whole; closures of iterators would not be compiled for these vectors.
#![allow(clippy::needless_range_loop)]

use super::{Ahead, LANES, ROWS, Rows, VECTORS};
use std::arch::x86_64::{
    __m512, _MM_HINT_T0, _mm_prefetch, _mm512_add_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_mask_storeu_ps,
    _mm512_maskz_loadu_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_storeu_ps,
};

/// How many rows of b are asked for before they are read where it lies: they may be far apart, and no prefetcher sees them coming.
const ROWS_AHEAD: usize = 8;
/// How far ahead of its use a panel of a is asked for, in elements.
const A_AHEAD: usize = 16 * ROWS;
/// Steps of the depth between two looks at what is needed later.
const TURN: usize = 4;

/// Lines that are asked for at every turn, at least: as many as tiles read of a left factor in that time.
const LINES_AHEAD: usize = 2;

/// Where a tile's factors are: both in panels, one or both where they lie, or b where it lies to be copied and a in a panel.
const PACKED: u8 = 0;
const IN_PLACE: u8 = 1;
const COPIED: u8 = 2;

/// Tiles of the same columns, one below the other.
#[derive(Clone, Copy)]
pub struct Tiles {
    /// How many.
    pub count: usize,
    /// How many products a sum has.
    pub depth: usize,
    /// The left factor, from the first tile's first row.
    pub a: Rows,
    /// From a tile's first row to the next tile's.
    pub a_tile: usize,
    /// The right factor, from its first column.
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

/// Works out tiles of `rows` and `vectors`, and with `copy` one tile of a panel of a, and writes the panel of b that it reads.
///
/// # Safety
/// The processor has AVX-512. All of `a`, of `b` (in the last vector its lanes only) and of `c` is there, and a panel behind `copy`.
#[target_feature(enable = "avx512f")]
pub unsafe fn tiles(rows: usize, vectors: usize, it: &Tiles, ahead: &mut Ahead, copy: Option<*mut f32>) {
    let is_packed = it.a.row == 1 && it.a.step == rows && it.b_row == vectors * LANES;
    macro_rules! tiles {
        ($($rows:literal)*) => {
            // SAFETY: the caller's word.
            unsafe {
                match (rows, vectors, copy) {
                    (ROWS, 1, Some(panel)) => sums::<ROWS, 1, COPIED>(it, ahead, panel),
                    (ROWS, 2, Some(panel)) => sums::<ROWS, 2, COPIED>(it, ahead, panel),
                    (ROWS, _, Some(panel)) => sums::<ROWS, 3, COPIED>(it, ahead, panel),
                    $(
                        ($rows, 1, _) if is_packed => sums::<$rows, 1, PACKED>(it, ahead, std::ptr::null_mut()),
                        ($rows, 2, _) if is_packed => sums::<$rows, 2, PACKED>(it, ahead, std::ptr::null_mut()),
                        ($rows, _, _) if is_packed => sums::<$rows, 3, PACKED>(it, ahead, std::ptr::null_mut()),
                        ($rows, 1, _) => sums::<$rows, 1, IN_PLACE>(it, ahead, std::ptr::null_mut()),
                        ($rows, 2, _) => sums::<$rows, 2, IN_PLACE>(it, ahead, std::ptr::null_mut()),
                        ($rows, _, _) => sums::<$rows, 3, IN_PLACE>(it, ahead, std::ptr::null_mut()),
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
unsafe fn sums<const R: usize, const V: usize, const FACTORS: u8>(it: &Tiles, later: &mut Ahead, panel: *mut f32) {
    let Tiles { count, depth, a, a_tile, b, b_row, last, mut c, c_row, add } = *it;
    // Distances that the compiler knows become parts of instructions.
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
        // SAFETY: the caller's word; an address that is only asked for may be anywhere.
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
                    ahead.ask(V.max(LINES_AHEAD));
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
