//! Products of a few rows, which are bound by reading their right operand once, in place.

// Index loops are fully unrolled; iterator closures would not be compiled for these vectors.
#![allow(clippy::needless_range_loop)]

use super::super::Rows;
use super::{COLUMNS, DEPTH, LANES, lane_mask};
use std::arch::x86_64::{
    __m256, _MM_HINT_T0, _mm_add_ps, _mm_add_ss, _mm_cvtss_f32, _mm_movehl_ps, _mm_prefetch, _mm_shuffle_ps,
    _mm256_broadcast_ss, _mm256_castps256_ps128, _mm256_extractf128_ps, _mm256_fmadd_ps, _mm256_loadu_ps,
    _mm256_maskload_ps, _mm256_setzero_ps, _mm256_storeu_ps,
};

/// Maximum rows.
pub const FEW_ROWS: usize = 8;
/// Rows of the right operand that are read side by side.
const STREAMS: usize = 4;
/// Elements of the result, or of the left rows of dot products, that stay in the first-level cache.
const AT_HAND: usize = 4 * 1024;

/// `c = a b` or `c += a b` for at most [`FEW_ROWS`] contiguous rows of `a` and contiguous columns of `b`.
///
/// # Safety
///
/// As for [`matrices`](super::matrices); `scratch` fits [`AT_HAND`] elements.
pub unsafe fn dots([m, n, k]: [usize; 3], operands: (Rows, Rows), c: (*mut f32, usize), add: bool, scratch: *mut f32) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match m {
            1 => dots_of::<1, 2>([n, k], operands, c, add, scratch),
            2 => dots_of::<2, 4>([n, k], operands, c, add, scratch),
            3 => dots_of::<3, 3>([n, k], operands, c, add, scratch),
            4 => dots_of::<4, 3>([n, k], operands, c, add, scratch),
            5 => dots_of::<5, 2>([n, k], operands, c, add, scratch),
            6 => dots_of::<6, 2>([n, k], operands, c, add, scratch),
            7 => dots_of::<7, 1>([n, k], operands, c, add, scratch),
            FEW_ROWS => dots_of::<8, 1>([n, k], operands, c, add, scratch),
            _ => unreachable!("there are at most {FEW_ROWS} rows"),
        }
    }
}

/// Multiplies `M` rows of `a` with `R` columns of `b` at a time.
#[target_feature(enable = "avx2,fma")]
unsafe fn dots_of<const M: usize, const R: usize>(
    [n, k]: [usize; 2],
    (a, b): (Rows, Rows),
    (c, c_row): (*mut f32, usize),
    add: bool,
    scratch: *mut f32,
) {
    let max_block = AT_HAND / M / LANES * LANES;
    let block = k.div_ceil(k.div_ceil(max_block)).next_multiple_of(LANES);
    for (first, column) in (0..k).step_by(block).flat_map(|first| (0..n).step_by(R).map(move |column| (first, column)))
    {
        let (end, add) = (k.min(first + block), add || first > 0);
        let whole = first + (end - first) / LANES * LANES;
        // SAFETY: guaranteed by the caller; the room fits the rows, and a prefetch may use any address.
        unsafe {
            if column == 0 {
                // Copied side by side, because rows at a distance of a power of two compete for few cache lines.
                for (at, depth) in (first..whole).step_by(LANES).enumerate() {
                    for i in 0..M {
                        let row = _mm256_loadu_ps(a.at.wrapping_add(i * a.row + depth));
                        _mm256_storeu_ps(scratch.wrapping_add((at * M + i) * LANES), row);
                    }
                }
            }
            let mut sums = [[_mm256_setzero_ps(); M]; R];
            // After the last column, it is read again.
            let (mut columns, mut later) = ([b.at; R], [b.at; R]);
            for r in 0..R {
                columns[r] = b.at.wrapping_add((column + r).min(n - 1) * b.step);
                later[r] = b.at.wrapping_add((column + 2 * R + r).min(n - 1) * b.step);
            }
            let (mut depth, mut rows) = (first, scratch);
            while depth < whole {
                let mut right = [_mm256_setzero_ps(); R];
                for r in 0..R {
                    right[r] = _mm256_loadu_ps(columns[r].wrapping_add(depth));
                    _mm_prefetch::<_MM_HINT_T0>(later[r].wrapping_add(depth).cast());
                }
                for i in 0..M {
                    let left = _mm256_loadu_ps(rows.wrapping_add(i * LANES));
                    for r in 0..R {
                        sums[r][i] = _mm256_fmadd_ps(left, right[r], sums[r][i]);
                    }
                }
                rows = rows.wrapping_add(M * LANES);
                depth += LANES;
            }
            for r in 0..R.min(n - column) {
                for i in 0..M {
                    let mut sum = sum_lanes(sums[r][i]);
                    for depth in whole..end {
                        sum = (*a.at.wrapping_add(i * a.row + depth)).mul_add(*columns[r].wrapping_add(depth), sum);
                    }
                    let to = c.wrapping_add(i * c_row + column + r);
                    *to = if add { *to + sum } else { sum };
                }
            }
        }
    }
}

/// `c = a b` or `c += a b` for at most [`FEW_ROWS`] rows of `a` and contiguous rows of `b`.
/// `scratch` is for factors and sums.
///
/// # Safety
///
/// As for [`matrices`](super::matrices); both parts of `scratch` fit `m` rows of `AT_HAND / m` elements, rounded up to
/// [`COLUMNS`], and [`COLUMNS`] more for each row.
pub unsafe fn few_rows(
    [m, n, k]: [usize; 3],
    operands: (Rows, Rows),
    c: (*mut f32, usize),
    add: bool,
    scratch: [*mut f32; 2],
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match m {
            1 => rows_of::<1>([n, k], operands, c, add, scratch),
            2 => rows_of::<2>([n, k], operands, c, add, scratch),
            3 => rows_of::<3>([n, k], operands, c, add, scratch),
            4 => rows_of::<4>([n, k], operands, c, add, scratch),
            5 => rows_of::<5>([n, k], operands, c, add, scratch),
            6 => rows_of::<6>([n, k], operands, c, add, scratch),
            7 => rows_of::<7>([n, k], operands, c, add, scratch),
            FEW_ROWS => rows_of::<8>([n, k], operands, c, add, scratch),
            _ => unreachable!("there are at most {FEW_ROWS} rows"),
        }
    }
}

/// Adds multiples of [`STREAMS`] rows of `b` at a time, in blocks of columns whose sums stay in the first-level cache.
#[target_feature(enable = "avx2,fma")]
unsafe fn rows_of<const M: usize>(
    [n, k]: [usize; 2],
    (a, b): (Rows, Rows),
    (c, c_row): (*mut f32, usize),
    add: bool,
    [factors, sums]: [*mut f32; 2],
) {
    let max_block = (AT_HAND / M).next_multiple_of(COLUMNS);
    let block = n.div_ceil(n.div_ceil(max_block)).next_multiple_of(COLUMNS);
    // Rows at a distance of a power of two would compete for few cache lines.
    let pitch = block + COLUMNS;
    let blocks = (0..n).step_by(block).flat_map(|column| (0..k).step_by(DEPTH).map(move |first| (column, first)));
    for (columns, first) in blocks.map(|(column, first)| (column..n.min(column + block), first)) {
        let (mut depth, end, add) = (first, k.min(first + DEPTH), add || first > 0);
        while depth < end {
            let count = if end - depth >= STREAMS { STREAMS } else { 1 };
            // SAFETY: guaranteed by the caller; the room fits these factors and sums.
            unsafe {
                for p in 0..count {
                    for i in 0..M {
                        *factors.add(p * M + i) = *a.at.add(i * a.row + (depth + p) * a.step);
                    }
                }
                let b = (b.at.wrapping_add(depth * b.row + columns.start), b.row);
                match count {
                    STREAMS => add_multiples::<M, STREAMS>(columns.len(), factors, b, (sums, pitch), depth > first),
                    _ => add_multiples::<M, 1>(columns.len(), factors, b, (sums, pitch), depth > first),
                }
            }
            depth += count;
        }
        for i in 0..M {
            // SAFETY: guaranteed by the caller.
            unsafe {
                let from = std::slice::from_raw_parts(sums.add(i * pitch), columns.len());
                let to = std::slice::from_raw_parts_mut(c.add(i * c_row + columns.start), columns.len());
                match add {
                    true => to.iter_mut().zip(from).for_each(|(to, sum)| *to += sum),
                    false => to.copy_from_slice(from),
                }
            }
        }
    }
}

/// `c = f b`, or `c += f b` with `add`, for factors `[D][M]`, in whole vectors of `c`.
#[target_feature(enable = "avx2,fma")]
unsafe fn add_multiples<const M: usize, const D: usize>(
    columns: usize,
    factors: *const f32,
    (b, b_row): (*const f32, usize),
    (c, c_row): (*mut f32, usize),
    add: bool,
) {
    for column in (0..columns).step_by(COLUMNS) {
        let remaining = columns - column;
        let mut rows = [[_mm256_setzero_ps(); 2]; D];
        // SAFETY: guaranteed by the caller; lanes after the last column are masked.
        unsafe {
            for p in 0..D {
                let from = b.wrapping_add(p * b_row + column);
                rows[p] = match remaining < COLUMNS {
                    false => [_mm256_loadu_ps(from), _mm256_loadu_ps(from.wrapping_add(LANES))],
                    true => [
                        _mm256_maskload_ps(from, lane_mask(remaining)),
                        _mm256_maskload_ps(from.wrapping_add(LANES), lane_mask(remaining.saturating_sub(LANES))),
                    ],
                };
            }
            for i in 0..M {
                let to = c.wrapping_add(i * c_row + column);
                let mut sums = [_mm256_setzero_ps(); 2];
                if add {
                    sums = [_mm256_loadu_ps(to), _mm256_loadu_ps(to.wrapping_add(LANES))];
                }
                for p in 0..D {
                    let factor = _mm256_broadcast_ss(&*factors.wrapping_add(p * M + i));
                    for v in 0..2 {
                        sums[v] = _mm256_fmadd_ps(factor, rows[p][v], sums[v]);
                    }
                }
                _mm256_storeu_ps(to, sums[0]);
                _mm256_storeu_ps(to.wrapping_add(LANES), sums[1]);
            }
        }
    }
}

/// The lane sum of a vector.
#[inline]
#[target_feature(enable = "avx2")]
fn sum_lanes(sums: __m256) -> f32 {
    let four = _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps::<1>(sums));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
}
