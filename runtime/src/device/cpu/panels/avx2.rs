//! `f32` matrix products with AVX2 and FMA, for processors without AVX-512.
//!
//! ```text
//! for 256 of the depth:                      panels of one operand stay in the second-level cache,
//!   for 6 rows or 16 columns of the other:   a panel of it, [256][6] or [256][16], stays in the first-level cache
//!     for each panel of the first operand:   12 sums in registers, 8 loads for every 12 multiplications
//! ```
//!
//! The operand of fewer elements is the one in the second-level cache, so that the other is packed once. A few rows times
//! a transposed matrix are dot products, and a few rows times a matrix read it in place, in memory order. A weight that
//! many products read is packed once ([`pack_all`]).
//!
//! Each result element is an ordered sum over blocks of the depth with fused multiply-adds; a dot product has one sum per
//! lane. Its bits depend only on the sizes and layouts.

// Index loops are fully unrolled; iterator closures would not be compiled for these vectors.
#![allow(clippy::needless_range_loop)]

pub mod few_rows;

use super::pack::transpose_8x8;
use super::{Ahead, Line, Rows, pieces};
use few_rows::{FEW_ROWS, dots, few_rows};
use std::arch::x86_64::{
    __m256i, _MM_HINT_T0, _mm_prefetch, _mm256_add_ps, _mm256_broadcast_ss, _mm256_cmpgt_epi32, _mm256_fmadd_ps,
    _mm256_loadu_ps, _mm256_maskload_ps, _mm256_maskstore_ps, _mm256_set1_epi32, _mm256_setr_epi32, _mm256_setzero_ps,
    _mm256_storeu_ps,
};
use std::cell::RefCell;
use std::ops::Range;

/// `f32` lanes per vector.
const LANES: usize = 8;
/// Rows of a result tile.
const ROWS: usize = 6;
/// Columns of a result tile.
const COLUMNS: usize = 2 * LANES;
/// Maximum depth summed in registers at once.
const DEPTH: usize = 256;
/// Elements of panels that stay in the second-level cache.
const CACHE: usize = 64 * 1024;
/// Minimum depth of dot products, and minimum columns of few rows: tiles are faster for smaller sizes.
const MIN_DEPTH: usize = 16;
const MIN_COLUMNS: usize = 32;
/// Depth steps between prefetches.
const PREFETCH_STEPS: usize = 4;

struct Panels {
    /// Panels of the operand in the second-level cache. A store may end a vector after its panel.
    cached: Vec<Line>,
    /// A panel of the other.
    streamed: Vec<Line>,
}

thread_local! {
    /// Allocated with the first product of a thread.
    static PANELS: RefCell<Panels> = RefCell::new(Panels {
        cached: vec![Line([0.0; COLUMNS]); CACHE / COLUMNS + 1],
        streamed: vec![Line([0.0; COLUMNS]); DEPTH + 1],
    });
}

/// True if the processor has AVX2 and FMA.
pub fn is_supported() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
}

/// True if `gemm` is faster: a narrow product of a transposed matrix, which packs few elements of each cache line at a
/// time.
pub fn is_narrow([m, n]: [usize; 2], a_row: usize) -> bool {
    a_row == 1 && m > FEW_ROWS && n < MIN_COLUMNS
}

/// `c = a b`, or `c += a b` with `add`, of matrices in memory, for non-zero sizes m, n, k. `c_row` is the row stride of
/// `c`.
///
/// # Safety
///
/// [`is_supported`] holds, and the operands have these sizes.
pub unsafe fn matrices([m, n, k]: [usize; 3], a: Rows, b: Rows, (c, c_row): (*mut f32, usize), add: bool) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        PANELS.with_borrow_mut(|panels| {
            let (cached, streamed) =
                (panels.cached.as_mut_ptr().cast::<f32>(), panels.streamed.as_mut_ptr().cast::<f32>());
            if m <= FEW_ROWS && b.row == 1 && a.step == 1 && k >= MIN_DEPTH {
                return dots([m, n, k], (a, b), (c, c_row), add, streamed);
            }
            if m <= FEW_ROWS && b.step == 1 && n >= MIN_COLUMNS {
                return few_rows([m, n, k], (a, b), (c, c_row), add, [streamed, cached]);
            }
            let block_depth = k.div_ceil(k.div_ceil(DEPTH)).next_multiple_of(LANES);
            for first in (0..k).step_by(block_depth) {
                let depth = block_depth.min(k - first);
                let block = Block {
                    depth,
                    a: Rows { at: a.at.wrapping_add(first * a.step), ..a },
                    b: Rows { at: b.at.wrapping_add(first * b.row), ..b },
                    c,
                    c_row,
                    add: add || first > 0,
                    cached,
                    streamed,
                };
                // Panels that fit into the cache, and how often the other operand is packed.
                let (rows, columns) = (CACHE / depth / ROWS * ROWS, CACHE / depth / COLUMNS * COLUMNS);
                let by_columns = m + n * m.div_ceil(rows);
                let by_rows = n + m * n.div_ceil(columns);
                if by_columns < by_rows {
                    for first in (0..m).step_by(rows) {
                        block.by_columns(first..m.min(first + rows), n);
                    }
                } else {
                    for first in (0..n).step_by(columns) {
                        block.by_rows(m, first..n.min(first + columns));
                    }
                }
            }
        });
    }
}

/// True if a left operand of this depth fits into the cache for [`packed_product`].
pub fn fits_cache(depth: usize) -> bool {
    depth * ROWS <= CACHE
}

/// Elements of an operand of this size after [`pack_all`].
pub fn packed_len(columns: usize, depth: usize) -> usize {
    columns.next_multiple_of(COLUMNS) * depth
}

/// Packs a right operand of `columns` × `depth` into consecutive panels.
///
/// # Safety
///
/// [`is_supported`] holds, the operand has this size, and `to` has room for its [`packed_len`].
pub unsafe fn pack_all(b: Rows, [columns, depth]: [usize; 2], to: *mut f32) {
    for first in (0..columns).step_by(COLUMNS) {
        let from = Rows { at: b.at.wrapping_add(first * b.step), ..b };
        // SAFETY: guaranteed by the caller.
        unsafe { pack_right(from, depth, COLUMNS.min(columns - first), to.wrapping_add(first * depth)) };
    }
}

/// As [`matrices`], with a right operand packed by [`pack_all`]. `backwards` reads its panels from the last to the
/// first, to reuse what the previous product left in the cache.
///
/// # Safety
///
/// As for [`matrices`]; [`fits_cache`] holds for the depth.
pub unsafe fn packed_product(
    [m, n, k]: [usize; 3],
    a: Rows,
    packed: *const f32,
    (c, c_row): (*mut f32, usize),
    add: bool,
    backwards: bool,
) {
    let block_depth = k.div_ceil(k.div_ceil(DEPTH)).next_multiple_of(LANES);
    let (block_rows, count) = (CACHE / k / ROWS * ROWS, n.div_ceil(COLUMNS));
    PANELS.with_borrow_mut(|panels| {
        let cached = panels.cached.as_mut_ptr().cast::<f32>();
        for rows in (0..m).step_by(block_rows).map(|first| first..m.min(first + block_rows)) {
            for (panel_rows, panel) in pieces(rows.clone(), ROWS, k, cached) {
                // SAFETY: guaranteed by the caller; the panels have room for these rows.
                unsafe {
                    pack_left(Rows { at: a.at.wrapping_add(panel_rows.start * a.row), ..a }, panel_rows.len(), k, panel)
                };
            }
            for at in 0..count {
                let at = if backwards { count - 1 - at } else { at };
                let (column, panel) = (at * COLUMNS, packed.wrapping_add(at * COLUMNS * k));
                let next = if backwards { panel.wrapping_sub(COLUMNS * k) } else { panel.wrapping_add(COLUMNS * k) };
                let mut ahead = Ahead::of(next, [k, COLUMNS], COLUMNS);
                for depth in (0..k).step_by(block_depth).map(|first| first..k.min(first + block_depth)) {
                    let b = Rows { at: packed, row: COLUMNS, step: 1 };
                    let add = add || depth.start > 0;
                    let block =
                        Block { depth: depth.len(), a, b, c, c_row, add, cached, streamed: std::ptr::null_mut() };
                    let b = panel.wrapping_add(depth.start * COLUMNS);
                    for (panel_rows, panel) in pieces(rows.clone(), ROWS, k, cached) {
                        let panel = panel.wrapping_add(depth.start * panel_rows.len());
                        let columns = (column, COLUMNS.min(n - column));
                        // SAFETY: guaranteed by the caller.
                        unsafe { block.tile((panel_rows, panel), columns, b, &mut ahead) };
                    }
                }
            }
        }
    });
}

/// A block of the depth.
struct Block {
    depth: usize,
    a: Rows,
    b: Rows,
    c: *mut f32,
    c_row: usize,
    add: bool,
    cached: *mut f32,
    streamed: *mut f32,
}

impl Block {
    fn left(&self, row: usize) -> Rows {
        Rows { at: self.a.at.wrapping_add(row * self.a.row), ..self.a }
    }

    fn right(&self, column: usize) -> Rows {
        Rows { at: self.b.at.wrapping_add(column * self.b.step), ..self.b }
    }

    /// Packs these rows, and each panel of columns once.
    unsafe fn by_columns(&self, rows: Range<usize>, n: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            for (panel_rows, panel) in pieces(rows.clone(), ROWS, self.depth, self.cached) {
                pack_left(self.left(panel_rows.start), panel_rows.len(), self.depth, panel);
            }
            for column in (0..n).step_by(COLUMNS) {
                let width = COLUMNS.min(n - column);
                pack_right(self.right(column), self.depth, width, self.streamed);
                let mut ahead = self.ahead(column + COLUMNS, n);
                for (panel_rows, panel) in pieces(rows.clone(), ROWS, self.depth, self.cached) {
                    self.tile((panel_rows, panel), (column, width), self.streamed, &mut ahead);
                }
            }
        }
    }

    /// Packs these columns, and each panel of rows once.
    unsafe fn by_rows(&self, m: usize, columns: Range<usize>) {
        let panel = |column: usize| self.cached.wrapping_add((column - columns.start) * self.depth);
        let width = |column: usize| COLUMNS.min(columns.end - column);
        // SAFETY: guaranteed by the caller.
        unsafe {
            for column in columns.clone().step_by(COLUMNS) {
                pack_right(self.right(column), self.depth, width(column), panel(column));
            }
            for (panel_rows, _) in pieces(0..m, ROWS, self.depth, self.cached) {
                pack_left(self.left(panel_rows.start), panel_rows.len(), self.depth, self.streamed);
                for column in columns.clone().step_by(COLUMNS) {
                    let b = panel(column).cast_const();
                    self.tile(
                        (panel_rows.clone(), self.streamed),
                        (column, width(column)),
                        b,
                        &mut Ahead::NOTHING.clone(),
                    );
                }
            }
        }
    }

    /// The right operand's panel that begins at this column, to prefetch.
    fn ahead(&self, column: usize, n: usize) -> Ahead {
        let width = COLUMNS.min(n.saturating_sub(column));
        let from = self.right(column);
        match width {
            0 => Ahead::NOTHING,
            _ if self.b.row == 1 => Ahead::of(from.at, [width, self.depth], from.step),
            _ if self.b.step == 1 => Ahead::of(from.at, [self.depth, width], from.row),
            _ => Ahead::NOTHING,
        }
    }

    #[inline]
    unsafe fn tile(
        &self,
        (rows, a): (Range<usize>, *mut f32),
        (column, columns): (usize, usize),
        b: *const f32,
        ahead: &mut Ahead,
    ) {
        let to = self.c.wrapping_add(rows.start * self.c_row + column);
        let tile = Tile { depth: self.depth, a: a.cast_const(), b, c: to, c_row: self.c_row, columns, add: self.add };
        macro_rules! heights {
            ($($rows:literal)*) => {
                match (rows.len(), columns > LANES) {
                    $(
                        // SAFETY: guaranteed by the caller.
                        ($rows, true) => unsafe { tile.multiply::<$rows, 2>(ahead) },
                        // SAFETY: guaranteed by the caller.
                        ($rows, false) => unsafe { tile.multiply::<$rows, 1>(ahead) },
                    )*
                    _ => unreachable!("too many rows for a tile"),
                }
            };
        }
        heights!(1 2 3 4 5 6);
    }
}

/// A tile of the result.
struct Tile {
    depth: usize,
    /// A panel `[depth][rows]`.
    a: *const f32,
    /// A panel `[depth][16]`.
    b: *const f32,
    c: *mut f32,
    c_row: usize,
    columns: usize,
    add: bool,
}

impl Tile {
    #[target_feature(enable = "avx2,fma")]
    unsafe fn multiply<const R: usize, const V: usize>(&self, later: &mut Ahead) {
        let mut ahead = *later;
        let Tile { depth, a, b, c, c_row, columns, add } = *self;
        let mut sums = [[_mm256_setzero_ps(); V]; R];
        let (mut a_at, mut b_at) = (a, b);
        // SAFETY: guaranteed by the caller; a prefetch may use any address.
        unsafe {
            for r in 0..R {
                _mm_prefetch::<_MM_HINT_T0>(c.wrapping_add(r * c_row).cast());
            }
            macro_rules! step {
                () => {
                    let mut row = [_mm256_setzero_ps(); V];
                    for v in 0..V {
                        row[v] = _mm256_loadu_ps(b_at.wrapping_add(v * LANES));
                    }
                    for r in 0..R {
                        let factor = _mm256_broadcast_ss(&*a_at.wrapping_add(r));
                        for v in 0..V {
                            sums[r][v] = _mm256_fmadd_ps(factor, row[v], sums[r][v]);
                        }
                    }
                    a_at = a_at.wrapping_add(R);
                    b_at = b_at.wrapping_add(COLUMNS);
                };
            }
            for _ in 0..depth / PREFETCH_STEPS {
                ahead.prefetch(1);
                step!();
                step!();
                step!();
                step!();
            }
            for _ in 0..depth % PREFETCH_STEPS {
                step!();
            }
            *later = ahead;
            let last = columns - (V - 1) * LANES;
            for r in 0..R {
                for v in 0..V {
                    let to = c.wrapping_add(r * c_row + v * LANES);
                    let mut sum = sums[r][v];
                    if v + 1 == V && last < LANES {
                        let lanes = lane_mask(last);
                        if add {
                            sum = _mm256_add_ps(_mm256_maskload_ps(to, lanes), sum);
                        }
                        _mm256_maskstore_ps(to, lanes, sum);
                    } else {
                        if add {
                            sum = _mm256_add_ps(_mm256_loadu_ps(to), sum);
                        }
                        _mm256_storeu_ps(to, sum);
                    }
                }
            }
        }
    }
}

/// Mask of the first `count` lanes.
#[inline]
#[target_feature(enable = "avx2")]
fn lane_mask(count: usize) -> __m256i {
    _mm256_cmpgt_epi32(_mm256_set1_epi32(count as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))
}

/// Packs a panel `[depth][rows]` of a left operand. Up to a vector after it is overwritten.
#[target_feature(enable = "avx2")]
unsafe fn pack_left(a: Rows, rows: usize, depth: usize, panel: *mut f32) {
    // SAFETY: guaranteed by the caller; groups of eight are read only if complete.
    unsafe {
        let mut packed_depth = 0;
        if a.step == 1 {
            packed_depth = depth / LANES * LANES;
            for p in (0..packed_depth).step_by(LANES) {
                let mut lines = [_mm256_setzero_ps(); LANES];
                for r in 0..ROWS {
                    if r < rows {
                        lines[r] = _mm256_loadu_ps(a.at.add(r * a.row + p));
                    }
                }
                lines = transpose_8x8(lines);
                for i in 0..LANES {
                    _mm256_storeu_ps(panel.add((p + i) * rows), lines[i]);
                }
            }
        } else if a.row == 1 {
            packed_depth = depth;
            let lanes = lane_mask(rows);
            for p in 0..depth {
                _mm256_storeu_ps(panel.add(p * rows), _mm256_maskload_ps(a.at.add(p * a.step), lanes));
            }
        }
        for p in packed_depth..depth {
            for r in 0..rows {
                *panel.add(p * rows + r) = *a.at.add(r * a.row + p * a.step);
            }
        }
    }
}

/// Packs a panel `[depth][16]` of a right operand, zero-padded.
#[target_feature(enable = "avx2")]
unsafe fn pack_right(b: Rows, depth: usize, columns: usize, panel: *mut f32) {
    // SAFETY: guaranteed by the caller; reads past the last column or depth are masked.
    unsafe {
        if b.step == 1 && columns == COLUMNS {
            for p in 0..depth {
                let (from, to) = (b.at.add(p * b.row), panel.add(p * COLUMNS));
                _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(8 * b.row).cast());
                _mm256_storeu_ps(to, _mm256_loadu_ps(from));
                _mm256_storeu_ps(to.add(LANES), _mm256_loadu_ps(from.add(LANES)));
            }
            return;
        }
        let mut packed_depth = 0;
        if b.step == 1 {
            packed_depth = depth;
            let masks = [lane_mask(columns), lane_mask(columns.saturating_sub(LANES))];
            for p in 0..depth {
                for half in 0..2 {
                    let from = b.at.wrapping_add(p * b.row + half * LANES);
                    _mm256_storeu_ps(panel.add(p * COLUMNS + half * LANES), _mm256_maskload_ps(from, masks[half]));
                }
            }
        } else if b.row == 1 {
            packed_depth = depth / LANES * LANES;
            for p in (0..packed_depth).step_by(LANES) {
                for half in [0, LANES] {
                    let mut lines = [_mm256_setzero_ps(); LANES];
                    for lane in 0..LANES {
                        if half + lane < columns {
                            lines[lane] = _mm256_loadu_ps(b.at.add((half + lane) * b.step + p));
                        }
                    }
                    lines = transpose_8x8(lines);
                    for i in 0..LANES {
                        _mm256_storeu_ps(panel.add((p + i) * COLUMNS + half), lines[i]);
                    }
                }
            }
        }
        for p in packed_depth..depth {
            for lane in 0..COLUMNS {
                let is_inside = lane < columns;
                *panel.add(p * COLUMNS + lane) = if is_inside { *b.at.add(p * b.row + lane * b.step) } else { 0.0 };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::panels::product::tests::{SHAPES, compare_packed};

    #[test]
    fn products_with_a_packed_factor_are_those_of_the_factor_as_it_lies() {
        if !is_supported() {
            return println!("skipped: no AVX2");
        }
        compare_packed(&SHAPES, matrices, |[m, n, k], [a, b], c, [add, backwards]| {
            assert!(fits_cache(k));
            let mut packed = vec![0.0; packed_len(n, k)];
            // SAFETY: the operands and the panels have these sizes.
            unsafe {
                pack_all(b, [n, k], packed.as_mut_ptr());
                packed_product([m, n, k], a, packed.as_ptr(), c, add, backwards);
            }
        });
    }
}
