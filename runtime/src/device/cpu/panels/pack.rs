//! Copies into panels: rows as they lie, and rows that become columns, 16 or 8 at a time in registers.

// Loops over indices are unrolled whole; closures of iterators would not be compiled for these vectors.
#![allow(clippy::needless_range_loop)]

use super::{LANES, ROWS, Rows};
use std::arch::x86_64::{
    __m256, __m512, _MM_HINT_T0, _mm_prefetch, _mm256_loadu_ps, _mm256_permute2f128_ps, _mm256_setzero_ps,
    _mm256_shuffle_ps, _mm256_storeu_ps, _mm256_unpackhi_ps, _mm256_unpacklo_ps, _mm512_add_ps, _mm512_castpd_ps,
    _mm512_castps_pd, _mm512_loadu_ps, _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps, _mm512_setzero_ps,
    _mm512_shuffle_f32x4, _mm512_storeu_ps, _mm512_unpackhi_pd, _mm512_unpackhi_ps, _mm512_unpacklo_pd,
    _mm512_unpacklo_ps,
};

/// A panel `[depth][rows]` of a left factor, from its first element on.
///
/// # Safety
/// The processor has AVX-512; so many rows and so much depth are there, and the panel has room for them.
#[target_feature(enable = "avx512f,avx2")]
pub unsafe fn left(a: Rows, rows: usize, depth: usize, panel: *mut f32) {
    // SAFETY: the caller's word; eights are moved whole only where there are as many.
    unsafe {
        let mut done = 0;
        if rows == ROWS && a.step == 1 {
            done = depth / 8 * 8;
            for p in (0..done).step_by(8) {
                let mut lines = [_mm256_setzero_ps(); 8];
                for r in 0..8 {
                    lines[r] = _mm256_loadu_ps(a.at.add(r * a.row + p));
                }
                lines = eight_turned(lines);
                for r in 0..8 {
                    _mm256_storeu_ps(panel.add((p + r) * ROWS), lines[r]);
                }
            }
        } else if rows == ROWS && a.row == 1 {
            done = depth;
            for p in 0..depth {
                _mm256_storeu_ps(panel.add(p * ROWS), _mm256_loadu_ps(a.at.add(p * a.step)));
            }
        }
        for p in done..depth {
            for r in 0..rows {
                *panel.add(p * rows + r) = *a.at.add(r * a.row + p * a.step);
            }
        }
    }
}

/// Four panels of a left factor whose columns lie as rows: so that whole lines are read, and every page for more than one panel.
///
/// # Safety
/// As for [`left`], for four times [`ROWS`] rows.
#[target_feature(enable = "avx512f,avx2")]
pub unsafe fn four_left(a: Rows, depth: usize, panels: *mut f32) {
    for p in 0..depth {
        let from = a.at.wrapping_add(p * a.step);
        for i in 0..4 {
            let to = panels.wrapping_add((i * depth + p) * ROWS);
            // SAFETY: the caller's word.
            unsafe {
                _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(8 * a.step + i * ROWS).cast());
                _mm256_storeu_ps(to, _mm256_loadu_ps(from.add(i * ROWS)));
            }
        }
    }
}

/// A panel `[depth][whole vectors of columns]` of a right factor, from its first element on; 0 beyond the last column.
///
/// # Safety
/// The processor has AVX-512; so much depth and so many columns are there, and the panel has room for them.
#[target_feature(enable = "avx512f")]
pub unsafe fn right(b: Rows, depth: usize, columns: usize, panel: *mut f32) {
    let pitch = columns.next_multiple_of(LANES);
    // SAFETY: the caller's word; what is read beyond the last column or depth is masked.
    unsafe {
        for column in (0..columns).step_by(LANES) {
            let (from, to) = (b.at.add(column * b.step), panel.add(column));
            let width = (columns - column).min(LANES);
            if b.row == 1 {
                turned(from, b.step, width, depth, to, pitch);
                continue;
            }
            if b.step == 1 {
                let lanes = !0u16 >> (LANES - width);
                for p in 0..depth {
                    _mm512_storeu_ps(to.add(p * pitch), _mm512_maskz_loadu_ps(lanes, from.add(p * b.row)));
                }
                continue;
            }
            for p in 0..depth {
                for lane in 0..LANES {
                    *to.add(p * pitch + lane) = if lane < width { *from.add(p * b.row + lane * b.step) } else { 0.0 };
                }
            }
        }
    }
}

/// Up to 16 columns of a right factor whose columns lie as rows, `far` apart.
#[target_feature(enable = "avx512f")]
unsafe fn turned(from: *const f32, far: usize, columns: usize, depth: usize, to: *mut f32, pitch: usize) {
    // SAFETY: the caller's word.
    unsafe {
        for p in (0..depth).step_by(LANES) {
            let deep = (depth - p).min(LANES);
            let lanes = !0u16 >> (LANES - deep);
            let mut lines = [_mm512_setzero_ps(); LANES];
            if columns == LANES {
                for lane in 0..LANES {
                    lines[lane] = _mm512_maskz_loadu_ps(lanes, from.add(lane * far + p));
                }
            } else {
                for lane in 0..columns {
                    lines[lane] = _mm512_maskz_loadu_ps(lanes, from.add(lane * far + p));
                }
            }
            lines = sixteen_turned(lines);
            if deep == LANES {
                for i in 0..LANES {
                    _mm512_storeu_ps(to.add((p + i) * pitch), lines[i]);
                }
            } else {
                for i in 0..deep {
                    _mm512_storeu_ps(to.add((p + i) * pitch), lines[i]);
                }
            }
        }
    }
}

/// 16 rows as 16 columns: pairs, fours, and fours of fours change places.
///
/// # Safety
/// The processor has AVX-512.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn sixteen_turned(rows: [__m512; 16]) -> [__m512; 16] {
    let zero = _mm512_setzero_ps();
    let mut fours = [zero; 16];
    for i in 0..4 {
        let (a, b, c, d) = (rows[4 * i], rows[4 * i + 1], rows[4 * i + 2], rows[4 * i + 3]);
        let (ab, cd) = (_mm512_castps_pd(_mm512_unpacklo_ps(a, b)), _mm512_castps_pd(_mm512_unpacklo_ps(c, d)));
        let (upper_ab, upper_cd) =
            (_mm512_castps_pd(_mm512_unpackhi_ps(a, b)), _mm512_castps_pd(_mm512_unpackhi_ps(c, d)));
        fours[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd));
        fours[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
        fours[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(upper_ab, upper_cd));
        fours[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(upper_ab, upper_cd));
    }
    let mut columns = [zero; 16];
    for i in 0..4 {
        let (a, b, c, d) = (fours[i], fours[4 + i], fours[8 + i], fours[12 + i]);
        let (even, odd) = (_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
        let (even_rest, odd_rest) = (_mm512_shuffle_f32x4::<0x88>(c, d), _mm512_shuffle_f32x4::<0xdd>(c, d));
        columns[i] = _mm512_shuffle_f32x4::<0x88>(even, even_rest);
        columns[4 + i] = _mm512_shuffle_f32x4::<0x88>(odd, odd_rest);
        columns[8 + i] = _mm512_shuffle_f32x4::<0xdd>(even, even_rest);
        columns[12 + i] = _mm512_shuffle_f32x4::<0xdd>(odd, odd_rest);
    }
    columns
}

/// 8 rows as 8 columns.
#[inline]
#[target_feature(enable = "avx2")]
fn eight_turned(rows: [__m256; 8]) -> [__m256; 8] {
    let mut fours = [_mm256_setzero_ps(); 8];
    for i in 0..2 {
        let (a, b, c, d) = (rows[4 * i], rows[4 * i + 1], rows[4 * i + 2], rows[4 * i + 3]);
        let (ab, cd) = (_mm256_unpacklo_ps(a, b), _mm256_unpacklo_ps(c, d));
        let (upper_ab, upper_cd) = (_mm256_unpackhi_ps(a, b), _mm256_unpackhi_ps(c, d));
        fours[4 * i] = _mm256_shuffle_ps::<0x44>(ab, cd);
        fours[4 * i + 1] = _mm256_shuffle_ps::<0xee>(ab, cd);
        fours[4 * i + 2] = _mm256_shuffle_ps::<0x44>(upper_ab, upper_cd);
        fours[4 * i + 3] = _mm256_shuffle_ps::<0xee>(upper_ab, upper_cd);
    }
    let mut columns = [_mm256_setzero_ps(); 8];
    for i in 0..4 {
        columns[i] = _mm256_permute2f128_ps::<0x20>(fours[i], fours[4 + i]);
        columns[4 + i] = _mm256_permute2f128_ps::<0x31>(fours[i], fours[4 + i]);
    }
    columns
}

/// Writes or adds the columns of a tile as rows.
///
/// # Safety
/// The processor has AVX-512, the tile is in rows of `far`, and so many columns and rows are there behind `to`, the columns `pitch` apart.
#[target_feature(enable = "avx512f")]
pub unsafe fn turn_tile(
    tile: *const f32,
    far: usize,
    [rows, columns]: [usize; 2],
    to: *mut f32,
    pitch: usize,
    add: bool,
) {
    let some = !0u16 >> (LANES - rows);
    // SAFETY: the caller's word; lanes beyond the last row are not written.
    unsafe {
        for column in (0..columns).step_by(LANES) {
            let mut lines = [_mm512_setzero_ps(); LANES];
            for r in 0..ROWS {
                if r < rows {
                    lines[r] = _mm512_loadu_ps(tile.add(r * far + column));
                }
            }
            lines = sixteen_turned(lines);
            for i in 0..LANES.min(columns - column) {
                let to = to.add((column + i) * pitch);
                let mut line = lines[i];
                if add {
                    line = _mm512_add_ps(_mm512_maskz_loadu_ps(some, to), line);
                }
                _mm512_mask_storeu_ps(to, some, line);
            }
        }
    }
}
