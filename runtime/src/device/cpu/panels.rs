//! Products of `f32` matrices for processors with AVX-512: factors are copied into panels that lie in the caches as they are read.
//!
//! ```text
//! for 768 columns of b, for 256 of the depth:      b's block, in panels [256][48], stays in the second-level cache
//!   for 8 rows of a:                               a's panel [256][8] stays in the first-level cache
//!     for each panel of b:                         24 sums in registers, 11 loads for every 24 multiplications
//! ```
//!
//! An element of the result is one sum over the depth in order, 256 at a time, each product fused with its addition. So its bits do not
//! depend on how many rows and columns are asked for at once.

use std::arch::x86_64::{
    __m256, __m512, _mm256_loadu_ps, _mm256_permute2f128_ps, _mm256_shuffle_ps, _mm256_storeu_ps, _mm256_unpackhi_ps,
    _mm256_unpacklo_ps, _mm512_add_ps, _mm512_castpd_ps, _mm512_castps_pd, _mm512_fmadd_ps, _mm512_loadu_ps,
    _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_shuffle_f32x4,
    _mm512_storeu_ps, _mm512_unpackhi_pd, _mm512_unpackhi_ps, _mm512_unpacklo_pd, _mm512_unpacklo_ps,
};
use std::cell::RefCell;

/// Lanes of a vector.
const LANES: usize = 16;
/// Rows of a tile of the result, columns of it, and how many of the depth are summed in registers at once.
const ROWS: usize = 8;
const COLUMNS: usize = 3 * LANES;
const DEPTH: usize = 256;
/// Columns whose panels fill the second-level cache in part.
const BLOCK: usize = 16 * COLUMNS;
/// From one panel of b to the next: not a multiple of what the first-level cache takes for one place.
const PANEL: usize = COLUMNS * DEPTH + LANES;

/// Where to find an element of a factor: distance between rows and between columns.
pub type Strides = (usize, usize);

/// Whether this processor has what it takes.
pub fn is_at_hand() -> bool {
    is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx2")
}

#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Line([f32; LANES]);

struct Panels {
    a: Vec<Line>,
    b: Vec<Line>,
}

thread_local! {
    /// Allocated with the first product of a thread.
    static PANELS: RefCell<Panels> = RefCell::new(Panels {
        a: vec![Line([0.0; LANES]); ROWS * DEPTH / LANES],
        b: vec![Line([0.0; LANES]); BLOCK / COLUMNS * PANEL / LANES],
    });
}

/// `c = a b`, or `c += a b` with `add`, for sizes m, n, k.
///
/// # Safety
/// [`is_at_hand`], `a` and `b` can be read at all places that their strides lead to, and `c` be written at all columns of all its rows,
/// which are `c_row` apart.
pub unsafe fn product(
    [m, n, k]: [usize; 3],
    (a, a_strides): (*const f32, Strides),
    (b, b_strides): (*const f32, Strides),
    (c, c_row): (*mut f32, usize),
    add: bool,
) {
    PANELS.with_borrow_mut(|panels| {
        let (a_panel, b_block) = (panels.a.as_mut_ptr().cast::<f32>(), panels.b.as_mut_ptr().cast::<f32>());
        for first in (0..n).step_by(BLOCK) {
            let columns = (n - first).min(BLOCK);
            for at in (0..k).step_by(DEPTH) {
                let depth = (k - at).min(DEPTH);
                // SAFETY: these places of `b` are inside it, and a block has panels for so many columns and so much depth.
                unsafe {
                    let b = b.add(at * b_strides.0 + first * b_strides.1);
                    pack_block(b, b_strides, depth, columns, b_block);
                }
                for row in (0..m).step_by(ROWS) {
                    let rows = (m - row).min(ROWS);
                    // SAFETY: as above; a tile of `c` ends with its rows and columns.
                    unsafe {
                        pack_rows(a.add(row * a_strides.0 + at * a_strides.1), a_strides, rows, depth, a_panel);
                        let c = c.add(row * c_row + first);
                        strip([rows, columns, depth], a_panel, b_block, c, c_row, add || at > 0);
                    }
                }
            }
        }
    });
}

/// So many rows of the result, from one panel of `a` and all panels of `b`.
#[target_feature(enable = "avx512f")]
unsafe fn strip(
    [rows, columns, depth]: [usize; 3],
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    c_row: usize,
    add: bool,
) {
    for (panel, column) in (0..columns).step_by(COLUMNS).enumerate() {
        let width = (columns - column).min(COLUMNS);
        let vectors = width.div_ceil(LANES);
        let last = !0u16 >> (vectors * LANES - width);
        macro_rules! tiles {
            ($($rows:literal)*) => {
                // SAFETY: the caller's word.
                unsafe {
                    let (b, c) = (b.add(panel * PANEL), c.add(column));
                    match (rows, vectors) {
                        $(
                            ($rows, 1) => tile::<$rows, 1>(depth, a, b, c, c_row, last, add),
                            ($rows, 2) => tile::<$rows, 2>(depth, a, b, c, c_row, last, add),
                            ($rows, _) => tile::<$rows, 3>(depth, a, b, c, c_row, last, add),
                        )*
                        _ => {}
                    }
                }
            };
        }
        tiles!(1 2 3 4 5 6 7 8);
    }
}

/// A tile of R rows and V vectors; `last` are the lanes of the last vector.
#[target_feature(enable = "avx512f")]
unsafe fn tile<const R: usize, const V: usize>(
    depth: usize,
    mut a: *const f32,
    mut b: *const f32,
    c: *mut f32,
    c_row: usize,
    last: u16,
    add: bool,
) {
    // SAFETY: the panels are as deep as that, and the caller's word for `c`.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); V]; R];
        for _ in 0..depth {
            let row: [__m512; V] = std::array::from_fn(|v| _mm512_loadu_ps(b.add(LANES * v)));
            for (r, sums) in sums.iter_mut().enumerate() {
                let factor = _mm512_set1_ps(*a.add(r));
                for (sum, row) in sums.iter_mut().zip(row) {
                    *sum = _mm512_fmadd_ps(factor, row, *sum);
                }
            }
            a = a.add(R);
            b = b.add(LANES * V);
        }
        for (r, sums) in sums.iter().enumerate() {
            for (v, &sum) in sums.iter().enumerate() {
                let to = c.add(r * c_row + LANES * v);
                let lanes = if v + 1 == V { last } else { !0 };
                let sum = if add { _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, to), sum) } else { sum };
                _mm512_mask_storeu_ps(to, lanes, sum);
            }
        }
    }
}

/// Panels of `b`: [depth][columns of a panel, whole vectors], 0 beyond the last column.
#[target_feature(enable = "avx512f")]
unsafe fn pack_block(b: *const f32, strides: Strides, depth: usize, columns: usize, block: *mut f32) {
    // SAFETY: the caller's word; what is read beyond the last column or depth is masked.
    unsafe {
        if strides.1 == 1 {
            // Along the rows as they lie, into all panels.
            for p in 0..depth {
                let b = b.add(p * strides.0);
                for (panel, column) in (0..columns).step_by(COLUMNS).enumerate() {
                    let width = (columns - column).min(COLUMNS);
                    let vectors = width.div_ceil(LANES);
                    let to = block.add(panel * PANEL + p * vectors * LANES);
                    for v in 0..vectors {
                        let lanes = !0u16 >> (LANES * (v + 1)).saturating_sub(width);
                        let from = b.add(column + LANES * v);
                        _mm512_storeu_ps(to.add(LANES * v), _mm512_maskz_loadu_ps(lanes, from));
                    }
                }
            }
            return;
        }
        for (panel, column) in (0..columns).step_by(COLUMNS).enumerate() {
            let width = (columns - column).min(COLUMNS);
            let vectors = width.div_ceil(LANES);
            let to = block.add(panel * PANEL);
            for v in 0..vectors {
                let some = (width - LANES * v).min(LANES);
                let b = b.add((column + LANES * v) * strides.1);
                if strides.0 != 1 {
                    for p in 0..depth {
                        for lane in 0..LANES {
                            let value = if lane < some { *b.add(p * strides.0 + lane * strides.1) } else { 0.0 };
                            *to.add(p * vectors * LANES + LANES * v + lane) = value;
                        }
                    }
                    continue;
                }
                for p in (0..depth).step_by(LANES) {
                    let deep = (depth - p).min(LANES);
                    let lanes = !0u16 >> (LANES - deep);
                    let lines = std::array::from_fn(|lane| match lane < some {
                        true => _mm512_maskz_loadu_ps(lanes, b.add(lane * strides.1 + p)),
                        false => _mm512_setzero_ps(),
                    });
                    for (i, line) in turned(lines).into_iter().take(deep).enumerate() {
                        _mm512_storeu_ps(to.add((p + i) * vectors * LANES + LANES * v), line);
                    }
                }
            }
        }
    }
}

/// A panel of `a`: [depth][rows].
#[target_feature(enable = "avx512f,avx2")]
unsafe fn pack_rows(a: *const f32, strides: Strides, rows: usize, depth: usize, panel: *mut f32) {
    // SAFETY: the caller's word; eights are read whole only where there are as many.
    unsafe {
        let eights = if rows == ROWS && strides.1 == 1 { depth / 8 * 8 } else { 0 };
        for p in (0..eights).step_by(8) {
            let lines = std::array::from_fn(|row| _mm256_loadu_ps(a.add(row * strides.0 + p)));
            for (i, line) in eight_turned(lines).into_iter().enumerate() {
                _mm256_storeu_ps(panel.add((p + i) * ROWS), line);
            }
        }
        for p in eights..depth {
            for row in 0..rows {
                *panel.add(p * rows + row) = *a.add(row * strides.0 + p * strides.1);
            }
        }
    }
}

/// 16 rows as 16 columns: pairs, fours, and fours of fours change places.
#[target_feature(enable = "avx512f")]
fn turned(rows: [__m512; 16]) -> [__m512; 16] {
    let low = |a, b| _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
    let high = |a, b| _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
    let mut fours = [_mm512_setzero_ps(); 16];
    for i in (0..16).step_by(4) {
        let [a, b, c, d] = [rows[i], rows[i + 1], rows[i + 2], rows[i + 3]];
        let (ab, cd) = (_mm512_unpacklo_ps(a, b), _mm512_unpacklo_ps(c, d));
        let (ab_high, cd_high) = (_mm512_unpackhi_ps(a, b), _mm512_unpackhi_ps(c, d));
        fours[i] = low(ab, cd);
        fours[i + 1] = high(ab, cd);
        fours[i + 2] = low(ab_high, cd_high);
        fours[i + 3] = high(ab_high, cd_high);
    }
    let mut columns = [_mm512_setzero_ps(); 16];
    for i in 0..4 {
        let [a, b, c, d] = [fours[i], fours[4 + i], fours[8 + i], fours[12 + i]];
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
#[target_feature(enable = "avx2")]
fn eight_turned(rows: [__m256; 8]) -> [__m256; 8] {
    let pair = |i: usize| {
        let (a, b, c, d) = (rows[i], rows[i + 1], rows[i + 2], rows[i + 3]);
        let (ab, cd) = (_mm256_unpacklo_ps(a, b), _mm256_unpacklo_ps(c, d));
        let (ab_high, cd_high) = (_mm256_unpackhi_ps(a, b), _mm256_unpackhi_ps(c, d));
        [
            _mm256_shuffle_ps::<0x44>(ab, cd),
            _mm256_shuffle_ps::<0xee>(ab, cd),
            _mm256_shuffle_ps::<0x44>(ab_high, cd_high),
            _mm256_shuffle_ps::<0xee>(ab_high, cd_high),
        ]
    };
    let (upper, lower) = (pair(0), pair(4));
    std::array::from_fn(|i| match i < 4 {
        true => _mm256_permute2f128_ps::<0x20>(upper[i], lower[i]),
        false => _mm256_permute2f128_ps::<0x31>(upper[i - 4], lower[i - 4]),
    })
}
