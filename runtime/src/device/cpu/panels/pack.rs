//! Packs panels: copies rows, or transposes 16 or 8 rows at a time in registers.

// Index loops are fully unrolled; iterator closures would not be compiled for these vectors.
#![allow(clippy::needless_range_loop)]

use super::{LANES, ROWS, Rows};
use std::arch::x86_64::{
    __m256, __m512, _MM_HINT_T0, _mm_prefetch, _mm256_loadu_ps, _mm256_permute2f128_ps, _mm256_setzero_ps,
    _mm256_shuffle_ps, _mm256_storeu_ps, _mm256_unpackhi_ps, _mm256_unpacklo_ps, _mm512_add_ps, _mm512_castpd_ps,
    _mm512_castps_pd, _mm512_loadu_ps, _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps, _mm512_setzero_ps,
    _mm512_shuffle_f32x4, _mm512_storeu_ps, _mm512_unpackhi_pd, _mm512_unpackhi_ps, _mm512_unpacklo_pd,
    _mm512_unpacklo_ps,
};

/// Packs a panel `[depth][rows]` of a left operand.
///
/// # Safety
///
/// The processor has AVX-512, the operand has these rows and depth, and the panel has room for them.
#[target_feature(enable = "avx512f,avx2")]
pub unsafe fn left(a: Rows, rows: usize, depth: usize, panel: *mut f32) {
    // SAFETY: guaranteed by the caller; groups of eight are moved only if complete.
    unsafe {
        let mut packed_depth = 0;
        if rows == ROWS && a.step == 1 {
            packed_depth = depth / 8 * 8;
            for p in (0..packed_depth).step_by(8) {
                let mut lines = [_mm256_setzero_ps(); 8];
                for r in 0..8 {
                    lines[r] = _mm256_loadu_ps(a.at.add(r * a.row + p));
                }
                lines = transpose_8x8(lines);
                for r in 0..8 {
                    _mm256_storeu_ps(panel.add((p + r) * ROWS), lines[r]);
                }
            }
        } else if rows == ROWS && a.row == 1 {
            packed_depth = depth;
            for p in 0..depth {
                _mm256_storeu_ps(panel.add(p * ROWS), _mm256_loadu_ps(a.at.add(p * a.step)));
            }
        }
        for p in packed_depth..depth {
            for r in 0..rows {
                *panel.add(p * rows + r) = *a.at.add(r * a.row + p * a.step);
            }
        }
    }
}

/// Packs four panels of a column-major left operand, which reads whole cache lines and uses each page for several
/// panels.
///
/// # Safety
///
/// As for [`left`], for four times [`ROWS`] rows.
#[target_feature(enable = "avx512f,avx2")]
pub unsafe fn four_left(a: Rows, depth: usize, panels: *mut f32) {
    for p in 0..depth {
        let from = a.at.wrapping_add(p * a.step);
        for i in 0..4 {
            let to = panels.wrapping_add((i * depth + p) * ROWS);
            // SAFETY: guaranteed by the caller.
            unsafe {
                _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(8 * a.step + i * ROWS).cast());
                _mm256_storeu_ps(to, _mm256_loadu_ps(from.add(i * ROWS)));
            }
        }
    }
}

/// Packs a panel `[depth][columns rounded up to whole vectors]` of a right operand, zero-padded.
///
/// # Safety
///
/// The processor has AVX-512, the operand has this depth and these columns, and the panel has room for them.
#[target_feature(enable = "avx512f")]
pub unsafe fn right(b: Rows, depth: usize, columns: usize, panel: *mut f32) {
    let pitch = columns.next_multiple_of(LANES);
    // SAFETY: guaranteed by the caller; reads past the last column or depth are masked.
    unsafe {
        for column in (0..columns).step_by(LANES) {
            let (from, to) = (b.at.add(column * b.step), panel.add(column));
            let width = (columns - column).min(LANES);
            if b.row == 1 {
                pack_transposed(from, b.step, width, depth, to, pitch);
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

/// Transposes up to 16 columns of a column-major right operand; `column_stride` is the column stride.
#[target_feature(enable = "avx512f")]
unsafe fn pack_transposed(
    from: *const f32,
    column_stride: usize,
    columns: usize,
    depth: usize,
    to: *mut f32,
    pitch: usize,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        for p in (0..depth).step_by(LANES) {
            let height = (depth - p).min(LANES);
            let lanes = !0u16 >> (LANES - height);
            let mut lines = [_mm512_setzero_ps(); LANES];
            if columns == LANES {
                for lane in 0..LANES {
                    lines[lane] = _mm512_maskz_loadu_ps(lanes, from.add(lane * column_stride + p));
                }
            } else {
                for lane in 0..columns {
                    lines[lane] = _mm512_maskz_loadu_ps(lanes, from.add(lane * column_stride + p));
                }
            }
            lines = transpose_16x16(lines);
            if height == LANES {
                for i in 0..LANES {
                    _mm512_storeu_ps(to.add((p + i) * pitch), lines[i]);
                }
            } else {
                for i in 0..height {
                    _mm512_storeu_ps(to.add((p + i) * pitch), lines[i]);
                }
            }
        }
    }
}

/// Transposes 16×16: pairs, groups of four, then groups of 16.
///
/// # Safety
///
/// The processor has AVX-512.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn transpose_16x16(rows: [__m512; 16]) -> [__m512; 16] {
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

/// Transposes 8×8.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn transpose_8x8(rows: [__m256; 8]) -> [__m256; 8] {
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

/// Stores or adds the columns of a tile as rows. `tile_row` is the row stride of the tile, `pitch` the column stride at
/// `to`.
///
/// # Safety
///
/// The processor has AVX-512, and tile and target have these rows and columns.
#[target_feature(enable = "avx512f")]
pub unsafe fn store_transposed(
    tile: *const f32,
    tile_row: usize,
    [rows, columns]: [usize; 2],
    to: *mut f32,
    pitch: usize,
    add: bool,
) {
    let row_mask = !0u16 >> (LANES - rows);
    // SAFETY: guaranteed by the caller; lanes past the last row are masked.
    unsafe {
        for column in (0..columns).step_by(LANES) {
            let mut lines = [_mm512_setzero_ps(); LANES];
            for r in 0..ROWS {
                if r < rows {
                    lines[r] = _mm512_loadu_ps(tile.add(r * tile_row + column));
                }
            }
            lines = transpose_16x16(lines);
            for i in 0..LANES.min(columns - column) {
                let to = to.add((column + i) * pitch);
                let mut line = lines[i];
                if add {
                    line = _mm512_add_ps(_mm512_maskz_loadu_ps(row_mask, to), line);
                }
                _mm512_mask_storeu_ps(to, row_mask, line);
            }
        }
    }
}
