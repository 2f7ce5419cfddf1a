//! A right operand packed once for many products of few rows. Each product streams it from one end to the other, at
//! full memory bandwidth if it exceeds the second-level cache.
//!
//! ```text
//! for every 48 columns:  a panel [depth][48], the last ones [depth][32] or [depth][16]
//! ```

use super::product::{MOST_LEFT, with_left};
use super::tile::{Tiles, multiply_tiles};
use super::{Ahead, LANES, Left, ROWS, Right, Rows, VECTORS, piece, whole_pieces};

/// Maximum depth summed in registers: products of few rows gain from fewer additions to the result.
const DEPTH: usize = 512;

/// Size of an operand's panels, in elements.
pub fn packed_len(columns: usize, depth: usize) -> usize {
    columns.div_ceil(LANES) * LANES * depth
}

/// True if a left operand of this depth fits.
pub fn fits_cache(depth: usize) -> bool {
    depth * ROWS <= MOST_LEFT
}

/// Packs an operand of `columns` × `depth`.
///
/// # Safety
///
/// The processor has AVX-512, the operand has this size, and `to` has room for its [`packed_len`].
pub unsafe fn pack_all<B: Right>(b: &B, [columns, depth]: [usize; 2], to: *mut f32) {
    for vectors in (0..columns.div_ceil(LANES)).step_by(VECTORS) {
        let first = vectors * LANES;
        let range = first..columns.min(first + VECTORS * LANES);
        // SAFETY: guaranteed by the caller.
        unsafe { b.pack(0..depth, range, to.wrapping_add(first * depth)) };
    }
}

/// `c = a b`, or `c += a b` with `add`, for non-zero sizes m, n, k and the panels of b. `backwards` reads them from the
/// last to the first, to reuse what the previous product left in the cache. `c_row` is the row stride of `c`.
///
/// # Safety
///
/// The processor has AVX-512, [`fits_cache`] holds for the depth, and the operands have these sizes.
pub unsafe fn product(
    [m, n, k]: [usize; 3],
    a: Rows,
    packed: *const f32,
    (c, c_row): (*mut f32, usize),
    add: bool,
    backwards: bool,
) {
    let block = (MOST_LEFT / k / ROWS * ROWS).min(m.next_multiple_of(ROWS));
    let depth = k.div_ceil(k.div_ceil(DEPTH)).next_multiple_of(LANES);
    let panel_count = n.div_ceil(LANES).div_ceil(VECTORS);
    with_left(|left| {
        for first in (0..m).step_by(block) {
            let rows = first..m.min(first + block);
            // SAFETY: guaranteed by the caller; the buffer has room for a block of rows.
            unsafe { Left::pack(&a, rows.clone(), 0..k, left) };
            for at in 0..panel_count {
                let at = if backwards { panel_count - 1 - at } else { at };
                let first_column = at * VECTORS * LANES;
                let columns = (n - first_column).min(VECTORS * LANES);
                let vectors = columns.div_ceil(LANES);
                let panel = packed.wrapping_add(first_column * k);
                let next =
                    if backwards { panel.wrapping_sub(VECTORS * LANES * k) } else { panel.wrapping_add(columns * k) };
                let mut ahead = Ahead::of(next, [k, VECTORS * LANES], VECTORS * LANES);
                for from in (0..k).step_by(depth) {
                    let depth = depth.min(k - from);
                    let mut row = 0;
                    while row < rows.len() {
                        let height = piece(rows.len() - row, ROWS);
                        let count = whole_pieces(rows.len() - row, ROWS).max(1);
                        let to = c.wrapping_add((rows.start + row) * c_row + first_column);
                        let tiles = Tiles {
                            count,
                            depth,
                            a: Rows {
                                at: left.wrapping_add(row * k + from * height).cast_const(),
                                row: 1,
                                step: height,
                            },
                            a_tile: ROWS * k,
                            b: panel.wrapping_add(from * vectors * LANES),
                            b_row: vectors * LANES,
                            last: !0 >> (vectors * LANES - columns),
                            c: [0, 1, 2].map(|v| to.wrapping_add(v * LANES)),
                            c_row,
                            add: add || from > 0,
                        };
                        // SAFETY: guaranteed by the caller; a tile ends with its rows and columns.
                        unsafe { multiply_tiles(height, vectors, &tiles, &mut ahead, None) };
                        row += count * height;
                    }
                }
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::super::product::matrices;
    use super::super::product::tests::compare_packed;
    use super::super::{Line, is_supported};
    use super::*;

    /// Sizes with full and partial tiles, panels and depth blocks.
    const SHAPES: [[usize; 3]; 9] = [
        [1, 8, 3],
        [2, 48, 512],
        [5, 50, 100],
        [8, 97, 513],
        [9, 16, 1025],
        [16, 200, 64],
        [23, 300, 33],
        [40, 31, 5000],
        [70, 1, 24576],
    ];

    #[test]
    fn products_are_those_of_the_factor_as_it_lies() {
        if !is_supported() {
            return println!("skipped: no AVX-512");
        }
        compare_packed(&SHAPES, matrices, |[m, n, k], [a, b], c, [add, backwards]| {
            assert!(fits_cache(k));
            let mut buffer = vec![Line([0.0; LANES]); packed_len(n, k) / LANES];
            let buffer: *mut f32 = buffer.as_mut_ptr().cast();
            // SAFETY: the operands have these sizes, and the buffer fits the panels.
            unsafe {
                pack_all(&b, [n, k], buffer);
                product([m, n, k], a, buffer, c, add, backwards);
            }
        });
    }
}
