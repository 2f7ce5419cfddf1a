//! The loops around the tiles: what is copied when, and how a product is cut.

use super::matrix::{Plain, Turned};
use super::tile::{Tile, tile};
use super::{COLUMNS, DEPTH, LANES, Left, ROWS, Right, Rows, Target, VECTORS, piece};
use std::cell::RefCell;

/// Rows whose panels stay in the second-level cache.
const BLOCK: usize = 96 * ROWS;
/// Up to so many columns a left factor that lies well is not copied: a copy would be read as rarely as it is written.
const FEW_COLUMNS: usize = 2 * COLUMNS;

#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Line([f32; LANES]);

struct Panels {
    a: Vec<Line>,
    b: Vec<Line>,
    tile: Vec<Line>,
}

thread_local! {
    /// Allocated with the first product of a thread.
    static PANELS: RefCell<Panels> = RefCell::new(Panels {
        a: vec![Line([0.0; LANES]); BLOCK * DEPTH / LANES],
        b: vec![Line([0.0; LANES]); COLUMNS * DEPTH / LANES],
        tile: vec![Line([0.0; LANES]); ROWS * VECTORS],
    });
}

/// `c = a b`, or `c += a b` with `add`, for sizes m, n, k, none of them 0.
///
/// # Safety
/// [`is_at_hand`](super::is_at_hand), and the factors and the result have these sizes.
pub unsafe fn product<A: Left, B: Right, C: Target>([m, n, k]: [usize; 3], a: &A, b: &B, c: &C, add: bool) {
    PANELS.with_borrow_mut(|panels| {
        let a_panels = panels.a.as_mut_ptr().cast::<f32>();
        let (b_panel, beside) = (panels.b.as_mut_ptr().cast::<f32>(), panels.tile.as_mut_ptr().cast::<f32>());
        let (row_blocks, block_depth) = (m.div_ceil(BLOCK), k.div_ceil(k.div_ceil(DEPTH)).next_multiple_of(LANES));
        // Blocks of about one size, of whole tiles.
        let block_rows = m.div_ceil(row_blocks).next_multiple_of(ROWS);
        for first in (0..m).step_by(block_rows) {
            let rows = first..m.min(first + block_rows);
            for at in (0..k).step_by(block_depth) {
                let depth = at..k.min(at + block_depth);
                // SAFETY: the caller's word; the panels have room for a block of rows, a tile of columns and so much depth.
                unsafe {
                    let a_rows = a.in_place().filter(|_| n <= FEW_COLUMNS);
                    if a_rows.is_none() {
                        let mut row = rows.start;
                        while row < rows.end {
                            let height = piece(rows.end - row, ROWS);
                            let panel = a_panels.add((row - first) * depth.len());
                            a.pack(row..row + height, depth.clone(), panel);
                            row += height;
                        }
                    }
                    let mut column = 0;
                    while column < n {
                        let vectors = piece((n - column).div_ceil(LANES), VECTORS);
                        let columns = column..n.min(column + vectors * LANES);
                        let last = !0u16 >> (vectors * LANES - columns.len());
                        let (mut b_at, mut b_row, mut copy) = (b_panel.cast_const(), vectors * LANES, None);
                        match b.in_place() {
                            Some((at, row)) => {
                                (b_at, b_row) = (at.add(depth.start * row + column), row);
                                copy = (rows.len() >= 2 * ROWS).then_some(b_panel);
                            }
                            None => b.pack(depth.clone(), columns.clone(), b_panel),
                        }
                        let mut row = rows.start;
                        while row < rows.end {
                            let height = piece(rows.end - row, ROWS);
                            let a = match a_rows {
                                Some(Rows { at, row: far, step }) => {
                                    Rows { at: at.add(row * far + depth.start * step), row: far, step }
                                }
                                None => Rows { at: a_panels.add((row - first) * depth.len()), row: 1, step: height },
                            };
                            let add = add || at > 0;
                            let it = Tile {
                                depth: depth.len(),
                                a,
                                b: b_at,
                                b_row,
                                last,
                                c: [beside; VECTORS],
                                c_row: COLUMNS,
                                add,
                            };
                            match c.in_place(row, columns.clone()) {
                                Some((c, c_row)) => tile(height, vectors, &Tile { c, c_row, ..it }, copy),
                                None => {
                                    let c_beside = [0, 1, 2].map(|v| beside.add(LANES * v));
                                    tile(height, vectors, &Tile { c: c_beside, add: false, ..it }, copy);
                                    c.take(row..row + height, columns.clone(), beside, add);
                                }
                            }
                            // Later rows read the copy.
                            if copy.is_some() {
                                (b_at, b_row, copy) = (b_panel, vectors * LANES, None);
                            }
                            row += height;
                        }
                        column = columns.end;
                    }
                }
            }
        }
    });
}

/// Up to so many rows a right factor that lies transposed is read in place, as the left one of the transposed product.
const FEW_ROWS: usize = 64;

/// `c = a b`, or `c += a b` with `add`, of matrices in memory, the rows of `c` so far apart.
///
/// # Safety
/// As for [`product`].
pub unsafe fn matrices([m, n, k]: [usize; 3], a: Rows, b: Rows, (c, far): (*mut f32, usize), add: bool) {
    // SAFETY: the caller's word.
    unsafe {
        if m <= FEW_ROWS && n > m && b.row == 1 && a.step == 1 {
            let transposed = |rows: Rows| Rows { row: rows.step, step: rows.row, ..rows };
            return product([n, m, k], &transposed(b), &transposed(a), &Turned { at: c, column: far }, add);
        }
        product([m, n, k], &a, &b, &Plain { at: c, row: far }, add);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::panels::is_at_hand;

    fn numbers(count: usize, seed: u64) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        };
        (0..count).map(|_| next()).collect()
    }

    /// The product by [`matrices`], of factors that lie one way or the other, rows of the result 3 further apart than need be.
    fn by_panels(
        [m, n, k]: [usize; 3],
        a: &[f32],
        b: &[f32],
        [a_turned, b_turned]: [bool; 2],
        c: &mut [f32],
        add: bool,
    ) {
        let rows = |at: &[f32], [rows, columns]: [usize; 2], turned: bool| match turned {
            true => Rows { at: at.as_ptr(), row: 1, step: rows },
            false => Rows { at: at.as_ptr(), row: columns, step: 1 },
        };
        assert!(a.len() == m * k && b.len() == k * n && c.len() == m * (n + 3));
        // SAFETY: the lengths have been checked.
        unsafe {
            matrices([m, n, k], rows(a, [m, k], a_turned), rows(b, [k, n], b_turned), (c.as_mut_ptr(), n + 3), add)
        }
    }

    const SHAPES: [[usize; 3]; 14] = [
        [1, 1, 1],
        [3, 5, 7],
        [2, 100, 300],
        [9, 50, 257],
        [17, 96, 33],
        [33, 130, 513],
        [8, 800, 40],
        [64, 65, 70],
        [65, 64, 70],
        [16, 200, 520],
        [100, 17, 64],
        [130, 7, 600],
        [775, 20, 30],
        [800, 49, 270],
    ];

    #[test]
    fn products_of_all_cuts_are_those_of_the_definition() {
        if !is_at_hand() {
            return println!("skipped: no AVX-512");
        }
        for [m, n, k] in SHAPES {
            for turned in [[false, false], [true, false], [false, true], [true, true]] {
                let (a, b) = (numbers(m * k, 1), numbers(k * n, 2));
                let before = numbers(m * (n + 3), 3);
                let at = |values: &[f32], row, column, rows, columns, turned| {
                    f64::from(if turned { values[column * rows + row] } else { values[row * columns + column] })
                };
                for add in [false, true] {
                    let mut c = before.clone();
                    by_panels([m, n, k], &a, &b, turned, &mut c, add);
                    for (i, row) in c.chunks(n + 3).enumerate() {
                        for (j, &got) in row.iter().enumerate() {
                            let old = before[i * (n + 3) + j];
                            let sum: f64 = (0..k)
                                .map(|p| at(&a, i, p, m, k, turned[0]) * at(&b, p, j.min(n - 1), k, n, turned[1]))
                                .sum();
                            let want = if add { f64::from(old) + sum } else { sum };
                            let close = (f64::from(got) - want).abs() < 1e-5 * (1.0 + k as f64);
                            let met = if j < n { close } else { got.to_bits() == old.to_bits() };
                            assert!(met, "{m}x{n}x{k} {turned:?} {add}, {i} {j}: {got}, not {want}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn bits_do_not_depend_on_how_many_rows_and_columns_there_are() {
        if !is_at_hand() {
            return println!("skipped: no AVX-512");
        }
        let (most, k) = (100, 600);
        let (a, b) = (numbers(most * k, 1), numbers(k * most, 2));
        // The transposed b, so that both ways to read it are asked.
        let mut all = vec![0.0; most * (most + 3)];
        by_panels([most, most, k], &a, &b, [false, true], &mut all, false);
        for [m, n] in [[1, 100], [8, 9], [16, 64], [64, 65], [65, 30], [99, 3]] {
            let mut some = vec![0.0; m * (n + 3)];
            by_panels([m, n, k], &a[..m * k], &b[..n * k], [false, true], &mut some, false);
            for (i, row) in some.chunks(n + 3).enumerate() {
                for (j, sum) in row[..n].iter().enumerate() {
                    assert_eq!(sum.to_bits(), all[i * (most + 3) + j].to_bits(), "{m}x{n}, {i} {j}");
                }
            }
        }
    }
}
