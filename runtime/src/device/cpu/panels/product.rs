//! The loops around the tiles: blocking and packing.

use super::dots::{MOST_ROWS, dots};
use super::matrix::{Plain, Transposed};
use super::tile::{Tiles, multiply_tiles};
use super::{Ahead, COLUMNS, DEPTH, LANES, Left, Line, ROWS, Right, Rows, Target, VECTORS, piece, whole_pieces};
use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
use std::cell::RefCell;
use std::ops::{Range, RangeInclusive};

/// Rows whose panels stay in the second-level cache.
const BLOCK: usize = 96 * ROWS;
/// Capacity of the left operand's panels, in elements.
pub const MOST_LEFT: usize = BLOCK * DEPTH;
/// Maximum columns for reading a suitable left operand in place: a packed copy would be read too few times.
const FEW_COLUMNS: usize = 2 * COLUMNS;

/// Maximum rows of a product that is bound by reading its right operand once. Long rows are then read side by side.
/// Their number is limited by the streams that the hardware prefetcher tracks. The sums are written more often.
const FEW_ROWS_OF_STREAMS: usize = 64;
const LONG_ROW: usize = 256;
/// Maximum rows of a right operand that are read side by side.
pub const STREAMS: usize = 32;

struct Panels {
    a: Vec<Line>,
    b: Vec<Line>,
    tile: Vec<Line>,
}

thread_local! {
    /// Allocated with the first product of a thread.
    static PANELS: RefCell<Panels> = RefCell::new(Panels {
        a: vec![Line([0.0; LANES]); MOST_LEFT / LANES],
        b: vec![Line([0.0; LANES]); COLUMNS * DEPTH / LANES],
        tile: vec![Line([0.0; LANES]); ROWS * VECTORS],
    });
}

/// Lends the thread's buffer for left panels, [`MOST_LEFT`] elements.
pub fn with_left<R>(work: impl FnOnce(*mut f32) -> R) -> R {
    PANELS.with_borrow_mut(|panels| work(panels.a.as_mut_ptr().cast()))
}

/// `c = a b`, or `c += a b` with `add`, for non-zero sizes m, n, k.
///
/// # Safety
///
/// [`is_supported`](super::is_supported) holds, and the operands have these sizes.
pub unsafe fn product<A: Left, B: Right, C: Target>([m, n, k]: [usize; 3], a: &A, b: &B, c: &C, add: bool) {
    let max_depth = most_depth(m, n, b.in_place().is_some());
    let (row_blocks, block_depth) = (m.div_ceil(BLOCK), k.div_ceil(k.div_ceil(max_depth)).next_multiple_of(LANES));
    // Blocks of about equal size, in whole tiles.
    let block_rows = m.div_ceil(row_blocks).next_multiple_of(ROWS);
    let in_place = a.in_place().filter(|_| n <= FEW_COLUMNS);
    let by_rows = b.in_place().filter(|_| is_by_rows(m, n, k));
    PANELS.with_borrow_mut(|panels| {
        for first in (0..m).step_by(block_rows) {
            for at in (0..k).step_by(block_depth) {
                let (rows, depth) = (first..m.min(first + block_rows), at..k.min(at + block_depth));
                let mut block = Block { rows, depth, in_place, panels, add: add || at > 0 };
                // SAFETY: guaranteed by the caller; the panels have room for a block of rows, a tile of columns and
                // this depth.
                unsafe {
                    if in_place.is_none() {
                        a.pack(block.rows.clone(), block.depth.clone(), block.panels.a.as_mut_ptr().cast());
                    }
                    // This depth is one block, and with so many columns the left operand is packed.
                    if let Some((at, row)) = by_rows {
                        block.multiply_by_rows(n, |columns| (at.wrapping_add(columns.start), row), c);
                        continue;
                    }
                    let mut columns = tile_columns(0, n);
                    while !columns.is_empty() {
                        let next = tile_columns(columns.end, n);
                        block.multiply_columns(columns, next.clone(), b, c);
                        columns = next;
                    }
                }
            }
        }
    });
}

/// Size of a right operand's panels, in elements.
pub fn panels_len(depth: usize, columns: usize) -> usize {
    depth * columns.next_multiple_of(LANES)
}

/// Packs a right operand into consecutive panels of [`panels_len`] elements.
///
/// # Safety
///
/// The processor has AVX-512, and the operand and its panels have these sizes.
pub unsafe fn pack_all<B: Right>(b: &B, depth: usize, n: usize, panels: *mut f32) {
    let mut columns = tile_columns(0, n);
    while !columns.is_empty() {
        // SAFETY: guaranteed by the caller.
        unsafe { b.pack(0..depth, columns.clone(), panels.wrapping_add(columns.start * depth)) };
        columns = tile_columns(columns.end, n);
    }
}

/// Like [`product`], with a right operand packed by [`pack_all`] and a depth small enough for sums to stay in
/// registers. The result is written row by row.
///
/// # Safety
///
/// As for [`product`]; `k` is at most [`DEPTH`].
pub unsafe fn product_by_rows<A: Left>([m, n, k]: [usize; 3], a: &A, b: *const f32, c: &Plain, add: bool) {
    debug_assert!(k <= DEPTH, "panels of the left factor are too small for this depth");
    PANELS.with_borrow_mut(|panels| {
        for first in (0..m).step_by(BLOCK) {
            let mut block = Block { rows: first..m.min(first + BLOCK), depth: 0..k, in_place: None, panels, add };
            let panel =
                |columns: &Range<usize>| (b.wrapping_add(columns.start * k), columns.len().next_multiple_of(LANES));
            // SAFETY: guaranteed by the caller; the panels have room for a block of rows.
            unsafe {
                a.pack(block.rows.clone(), 0..k, block.panels.a.as_mut_ptr().cast());
                block.multiply_by_rows(n, panel, c);
            }
        }
    });
}

/// Depth summed in registers at once.
fn most_depth(m: usize, n: usize, b_is_in_place: bool) -> usize {
    let is_streamed = m <= FEW_ROWS_OF_STREAMS && n >= LONG_ROW && b_is_in_place;
    if is_streamed { STREAMS } else { DEPTH }
}

/// Maximum depth at which a large result is bound by its memory traffic, and is processed in memory order.
const FEW_DEPTH: usize = 8;

/// True if tiles follow each other along the rows of the result.
fn is_by_rows(m: usize, n: usize, k: usize) -> bool {
    k <= FEW_DEPTH && m >= 2 * ROWS && n >= LONG_ROW
}

/// Prefetch distance in the result, in elements.
const RESULT_AHEAD: usize = 4 * COLUMNS;

/// The columns of the tile that begins at `first`.
fn tile_columns(first: usize, end: usize) -> Range<usize> {
    first..end.min(first + piece((end - first).div_ceil(LANES), VECTORS) * LANES)
}

/// Rows and depth whose panels of a stay in the second-level cache.
struct Block<'a> {
    rows: Range<usize>,
    depth: Range<usize>,
    /// The left operand, if it is read in place.
    in_place: Option<Rows>,
    panels: &'a mut Panels,
    add: bool,
}

impl Block<'_> {
    /// Computes all tiles of `columns`, and prefetches `next`.
    unsafe fn multiply_columns<B: Right, C: Target>(
        &mut self,
        columns: Range<usize>,
        next: Range<usize>,
        b: &B,
        c: &C,
    ) {
        let depth = self.depth.len();
        let vectors = columns.len().div_ceil(LANES);
        let panel = self.panels.b.as_mut_ptr().cast::<f32>();
        let (mut b_at, mut b_row, mut copy) = (panel.cast_const(), vectors * LANES, None);
        if let Some((at, row)) = b.in_place() {
            (b_at, b_row) = (at.wrapping_add(self.depth.start * row + columns.start), row);
            copy = (self.rows.len() >= 2 * ROWS && self.in_place.is_none()).then_some(panel);
        } else {
            // SAFETY: guaranteed by the caller.
            unsafe { b.pack(self.depth.clone(), columns.clone(), panel) };
        }
        let mut ahead = match self.in_place {
            Some(rows) if columns.start == 0 => {
                Ahead::of(self.left(self.rows.start + ROWS).at, [self.rows.len().saturating_sub(ROWS), depth], rows.row)
            }
            _ if next.is_empty() => Ahead::NOTHING,
            _ => b.ahead(self.depth.clone(), next),
        };
        let target = c.in_place(columns.clone());
        let mut row = self.rows.start;
        while row < self.rows.end {
            let height = piece(self.rows.end - row, ROWS);
            let whole = whole_pieces(self.rows.end - row, ROWS);
            let count = if copy.is_some() || target.is_none() { 1 } else { whole.max(1) };
            let tiles = self.tiles(row..row + height, &columns, (b_at, b_row));
            // SAFETY: guaranteed by the caller; a tile ends with its rows and columns.
            unsafe {
                self.write(row..row + height, &columns, Tiles { count, ..tiles }, (c, target), (&mut ahead, copy))
            };
            // Later rows read the packed copy.
            if copy.is_some() {
                (b_at, b_row, copy) = (panel, vectors * LANES, None);
            }
            row += count * height;
        }
    }

    /// Computes the tiles of all `n` columns, row block by row block.
    unsafe fn multiply_by_rows<C: Target>(
        &mut self,
        n: usize,
        b: impl Fn(&Range<usize>) -> (*const f32, usize),
        c: &C,
    ) {
        let mut row = self.rows.start;
        while row < self.rows.end {
            let rows = row..row + piece(self.rows.end - row, ROWS);
            let mut columns = tile_columns(0, n);
            while !columns.is_empty() {
                let (tiles, target) = (self.tiles(rows.clone(), &columns, b(&columns)), c.in_place(columns.clone()));
                if let Some((at, c_row)) = target {
                    // The next rows follow the end of these.
                    let is_inside = columns.start + RESULT_AHEAD < n;
                    let offset = if is_inside { rows.start * c_row } else { (rows.end * c_row).wrapping_sub(n) };
                    for (r, at) in (0..rows.len()).flat_map(|r| at.map(|at| (r, at))) {
                        let address = at.wrapping_add(offset).wrapping_add(r * c_row + RESULT_AHEAD);
                        // SAFETY: a prefetch may use any address.
                        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
                    }
                }
                // SAFETY: guaranteed by the caller; a tile ends with its rows and columns.
                unsafe { self.write(rows.clone(), &columns, tiles, (c, target), (&mut Ahead::NOTHING.clone(), None)) };
                columns = tile_columns(columns.end, n);
            }
            row = rows.end;
        }
    }

    /// The tile of these rows and columns, with its sums in a temporary buffer.
    fn tiles(&mut self, rows: Range<usize>, columns: &Range<usize>, (b, b_row): (*const f32, usize)) -> Tiles {
        let (a, depth, vectors) = (self.left(rows.start), self.depth.len(), columns.len().div_ceil(LANES));
        let tile = self.panels.tile.as_mut_ptr().cast::<f32>();
        Tiles {
            count: 1,
            depth,
            a: if self.in_place.is_some() { a } else { Rows { step: rows.len(), ..a } },
            a_tile: if self.in_place.is_some() { ROWS * a.row } else { ROWS * depth },
            b,
            b_row,
            last: !0 >> (vectors * LANES - columns.len()),
            c: [0, 1, 2].map(|v| tile.wrapping_add(LANES * v)),
            c_row: COLUMNS,
            add: self.add,
        }
    }

    /// Computes tiles, the first of which has these rows, and writes them in place or through [`Target::take`].
    unsafe fn write<C: Target>(
        &mut self,
        rows: Range<usize>,
        columns: &Range<usize>,
        tiles: Tiles,
        (c, target): (&C, Option<([*mut f32; VECTORS], usize)>),
        (ahead, copy): (&mut Ahead, Option<*mut f32>),
    ) {
        let (height, vectors) = (rows.len(), columns.len().div_ceil(LANES));
        // SAFETY: guaranteed by the caller.
        unsafe {
            match target {
                Some((c, c_row)) => {
                    let c = c.map(|at| at.wrapping_add(rows.start * c_row));
                    multiply_tiles(height, vectors, &Tiles { c, c_row, ..tiles }, ahead, copy);
                }
                None => {
                    multiply_tiles(height, vectors, &Tiles { add: false, ..tiles }, ahead, copy);
                    c.take(rows, columns.clone(), tiles.c[0], self.add);
                }
            }
        }
    }

    /// The left operand from a row on.
    fn left(&self, row: usize) -> Rows {
        match self.in_place {
            Some(a) => Rows { at: a.at.wrapping_add(row * a.row + self.depth.start * a.step), ..a },
            None => {
                let panels = self.panels.a.as_ptr().cast::<f32>();
                Rows { at: panels.wrapping_add((row - self.rows.start) * self.depth.len()), row: 1, step: ROWS }
            }
        }
    }
}

/// With this many rows, a transposed right operand is read in place as the left operand of the transposed product. With
/// fewer or more, packing is faster.
const FEW_ROWS: RangeInclusive<usize> = 17..=48;

/// True if dot products along contiguous rows are used, by column stride of a and row stride of b.
fn is_of_dots(m: usize, a_step: usize, b_row: usize) -> bool {
    m <= MOST_ROWS && b_row == 1 && a_step == 1
}

/// True if the transposed product is computed, by column stride of a and row stride of b.
fn is_transposed(m: usize, n: usize, a_step: usize, b_row: usize) -> bool {
    FEW_ROWS.contains(&m) && n > m && b_row == 1 && a_step == 1
}

/// `c = a b`, or `c += a b` with `add`, of matrices in memory. `c_row` is the row stride of `c`.
///
/// # Safety
///
/// As for [`product`].
pub unsafe fn matrices([m, n, k]: [usize; 3], a: Rows, b: Rows, (c, c_row): (*mut f32, usize), add: bool) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if is_of_dots(m, a.step, b.row) {
            return dots([m, n, k], a, Rows { row: b.step, step: 1, ..b }, (c, c_row), add);
        }
        if is_transposed(m, n, a.step, b.row) {
            return product([n, m, k], &b.transposed(), &a.transposed(), &Transposed { at: c, column: c_row }, add);
        }
        product([m, n, k], &a, &b, &Plain { at: c, row: c_row }, add);
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::device::cpu::panels::{avx2, is_supported};
    use crate::device::cpu::tests::numbers;

    /// [`matrices`] or that of [`avx2`].
    pub type Matrices = unsafe fn([usize; 3], Rows, Rows, (*mut f32, usize), bool);

    /// The products that this processor can compute.
    fn supported() -> Vec<Matrices> {
        let products: [(&str, bool, Matrices); 2] =
            [("AVX-512", is_supported(), matrices), ("AVX2", avx2::is_supported(), avx2::matrices)];
        let missing = products.iter().filter(|(_, is_supported, _)| !is_supported);
        missing.for_each(|(name, ..)| println!("skipped: no {name}"));
        products.into_iter().filter(|(_, is_supported, _)| *is_supported).map(|(.., matrices)| matrices).collect()
    }

    /// The product by `matrices`, with operands in either layout and rows of the result padded by 3.
    fn multiply(
        matrices: Matrices,
        [m, n, k]: [usize; 3],
        a: &[f32],
        b: &[f32],
        [a_transposed, b_transposed]: [bool; 2],
        c: &mut [f32],
        add: bool,
    ) {
        let rows = |at: &[f32], [rows, columns]: [usize; 2], transposed: bool| match transposed {
            true => Rows { at: at.as_ptr(), row: 1, step: rows },
            false => Rows { at: at.as_ptr(), row: columns, step: 1 },
        };
        assert!(a.len() == m * k && b.len() == k * n && c.len() == m * (n + 3));
        // SAFETY: the lengths have been checked.
        unsafe {
            matrices(
                [m, n, k],
                rows(a, [m, k], a_transposed),
                rows(b, [k, n], b_transposed),
                (c.as_mut_ptr(), n + 3),
                add,
            )
        }
    }

    pub const SHAPES: [[usize; 3]; 29] = [
        [1, 1, 1],
        [3, 5, 7],
        [2, 100, 300],
        [2, 30, 33],
        [4, 70, 100],
        [5, 9, 64],
        [6, 31, 17],
        [7, 40, 5],
        [9, 50, 257],
        [17, 96, 33],
        [33, 130, 513],
        [8, 800, 40],
        [8, 33, 1200],
        [5, 20, 2100],
        [40, 300, 8],
        [27, 513, 3],
        [64, 65, 70],
        [65, 64, 70],
        [16, 200, 520],
        [100, 17, 64],
        [130, 7, 600],
        [775, 20, 30],
        [800, 49, 270],
        [10, 300, 70],
        [1, 300, 500],
        [1, 4200, 33],
        [2, 40, 4500],
        [11, 256, 31],
        [300, 700, 130],
    ];

    #[test]
    fn products_of_all_cuts_are_those_of_the_definition() {
        for (matrices, [m, n, k]) in supported().into_iter().flat_map(|of| SHAPES.map(|shape| (of, shape))) {
            for transposed in [[false, false], [true, false], [false, true], [true, true]] {
                let (a, b) = (numbers(m * k, 1), numbers(k * n, 2));
                let before = numbers(m * (n + 3), 3);
                let at = |values: &[f32], row, column, rows, columns, transposed| {
                    f64::from(if transposed { values[column * rows + row] } else { values[row * columns + column] })
                };
                for add in [false, true] {
                    let mut c = before.clone();
                    multiply(matrices, [m, n, k], &a, &b, transposed, &mut c, add);
                    for (i, row) in c.chunks(n + 3).enumerate() {
                        for (j, &got) in row.iter().enumerate() {
                            let old = before[i * (n + 3) + j];
                            let sum: f64 = (0..k)
                                .map(|p| {
                                    at(&a, i, p, m, k, transposed[0]) * at(&b, p, j.min(n - 1), k, n, transposed[1])
                                })
                                .sum();
                            let want = if add { f64::from(old) + sum } else { sum };
                            let close = (f64::from(got) - want).abs() < 1e-5 * (1.0 + k as f64);
                            let passes = if j < n { close } else { got.to_bits() == old.to_bits() };
                            assert!(passes, "{m}x{n}x{k} {transposed:?} {add}, {i} {j}: {got}, not {want}");
                        }
                    }
                }
            }
        }
    }

    /// Compares products of `matrices` with those of a packed right factor, whose arguments end with `add` and `backwards`.
    pub fn compare_packed(
        shapes: &[[usize; 3]],
        matrices: Matrices,
        packed: impl Fn([usize; 3], [Rows; 2], (*mut f32, usize), [bool; 2]),
    ) {
        for (&[m, n, k], is_transposed) in shapes.iter().flat_map(|shape| [(shape, false), (shape, true)]) {
            let (a, b, before) = (numbers(m * k, 1), numbers(n * k, 2), numbers(m * (n + 3), 3));
            let a = Rows { at: a.as_ptr(), row: k, step: 1 };
            let (row, step) = if is_transposed { (1, k) } else { (n, 1) };
            let b = Rows { at: b.as_ptr(), row, step };
            for add in [false, true] {
                let (mut want, mut got, mut backward) = (before.clone(), before.clone(), before.clone());
                // SAFETY: the operands have these sizes.
                unsafe { matrices([m, n, k], a, b, (want.as_mut_ptr(), n + 3), add) };
                packed([m, n, k], [a, b], (got.as_mut_ptr(), n + 3), [add, false]);
                packed([m, n, k], [a, b], (backward.as_mut_ptr(), n + 3), [add, true]);
                let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 2e-6 * (k as f32).sqrt();
                assert!(want.iter().zip(&got).all(close), "{m}x{n}x{k} {is_transposed} {add}");
                assert_eq!(got, backward, "{m}x{n}x{k} {is_transposed} {add}: backwards");
                let padding = |c: &[f32]| c.chunks(n + 3).flat_map(|row| row[n..].to_vec()).collect::<Vec<_>>();
                assert_eq!(padding(&got), padding(&before), "{m}x{n}x{k}: beside the result");
            }
        }
    }

    #[test]
    fn bits_do_not_depend_on_what_was_multiplied_before() {
        let (a, b) = (numbers(800 * 600, 1), numbers(600 * 400, 2));
        let of = |matrices: Matrices, m: usize, n: usize, k: usize, transposed: bool| {
            let mut c = vec![0.0; m * (n + 3)];
            multiply(matrices, [m, n, k], &a[..m * k], &b[..n * k], [false, transposed], &mut c, false);
            c
        };
        for (matrices, transposed) in supported().into_iter().flat_map(|of| [(of, false), (of, true)]) {
            for (m, n) in [(9, 17), (40, 300), (70, 33)] {
                let first = of(matrices, m, n, 77, transposed);
                of(matrices, 800, 400, 600, !transposed);
                assert_eq!(first, of(matrices, m, n, 77, transposed), "{m}x{n}");
            }
        }
    }
}
