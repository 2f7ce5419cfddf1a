//! Matrices in memory as operands and results.

use super::product::STREAMS;
use super::{Ahead, COLUMNS, LANES, Left, ROWS, Right, Rows, Target, VECTORS, pack, pieces, whole_pieces};
use std::ops::Range;

/// Maximum column stride for reading a left operand in place: beyond it, each element is on a page of its own.
const FAR: usize = 512;

impl Left for Rows {
    fn in_place(&self) -> Option<Rows> {
        (self.step <= FAR).then_some(*self)
    }

    unsafe fn pack(&self, rows: Range<usize>, depth: Range<usize>, panels: *mut f32) {
        let from = |row: usize| {
            let at = self.at.wrapping_add(row * self.row + depth.start * self.step);
            Rows { at, ..*self }
        };
        let whole = if self.row == 1 { whole_pieces(rows.len(), ROWS) / 4 * 4 * ROWS } else { 0 };
        for (piece, panel) in pieces(rows.clone(), ROWS, depth.len(), panels) {
            let row = piece.start - rows.start;
            // SAFETY: guaranteed by the caller.
            unsafe {
                match row < whole {
                    true if row.is_multiple_of(4 * ROWS) => pack::four_left(from(piece.start), depth.len(), panel),
                    true => {}
                    false => pack::left(from(piece.start), piece.len(), depth.len(), panel),
                }
            }
        }
    }
}

impl Right for Rows {
    fn in_place(&self) -> Option<(*const f32, usize)> {
        (self.step == 1).then_some((self.at, self.row))
    }

    unsafe fn pack(&self, depth: Range<usize>, columns: Range<usize>, panel: *mut f32) {
        let at = self.at.wrapping_add(depth.start * self.row + columns.start * self.step);
        // SAFETY: guaranteed by the caller.
        unsafe { pack::right(Rows { at, ..*self }, depth.len(), columns.len(), panel) }
    }

    fn ahead(&self, depth: Range<usize>, columns: Range<usize>) -> Ahead {
        let at = self.at.wrapping_add(depth.start * self.row + columns.start * self.step);
        if self.step == 1 {
            // Contiguous rows are prefetched while they are packed. Earlier was slower, except for streamed rows.
            let is_streamed = depth.len() <= STREAMS;
            return if is_streamed { Ahead::of(at, [depth.len(), columns.len()], self.row) } else { Ahead::NOTHING };
        }
        Ahead::of(at, [columns.len(), depth.len()], self.step)
    }
}

/// A row-major result.
pub struct Plain {
    pub at: *mut f32,
    pub row: usize,
}

impl Target for Plain {
    fn in_place(&self, columns: Range<usize>) -> Option<([*mut f32; VECTORS], usize)> {
        let at = self.at.wrapping_add(columns.start);
        Some(([0, 1, 2].map(|v| at.wrapping_add(v * LANES)), self.row))
    }

    unsafe fn take(&self, _: Range<usize>, _: Range<usize>, _: *const f32, _: bool) {
        unreachable!("tiles are written in place")
    }
}

/// A column-major result.
pub struct Transposed {
    pub at: *mut f32,
    pub column: usize,
}

impl Target for Transposed {
    fn in_place(&self, _: Range<usize>) -> Option<([*mut f32; VECTORS], usize)> {
        None
    }

    unsafe fn take(&self, rows: Range<usize>, columns: Range<usize>, tile: *const f32, add: bool) {
        let to = self.at.wrapping_add(columns.start * self.column + rows.start);
        // SAFETY: guaranteed by the caller.
        unsafe {
            pack::store_transposed(tile, COLUMNS, [rows.len(), columns.len()], to, self.column, add);
        }
    }
}
