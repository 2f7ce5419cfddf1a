//! Products of `f32` matrices for processors with AVX-512: factors are read in panels that lie in the first two caches.
//!
//! ```text
//! for 256 of the depth:                  panels of a, [256][8] for every 8 rows, stay in the second-level cache
//!   for 48 columns:                      a panel of b, [256][48], stays in the first-level cache
//!     for each panel of a:               24 sums in registers, 11 loads for every 24 multiplications
//! ```
//!
//! A factor that can be read where it lies is not copied: rows of `a` that meet few columns, rows of `b` that meet few rows. What is copied
//! may come from anywhere: a [`Left`] or [`Right`] factor says how its panels are filled, and a [`Target`] where sums go.
//!
//! An element of the result is one sum over the depth in order, each product fused with its addition; after so many of the depth, as the
//! sizes say, it is added to what there was. So its bits depend on the sizes alone.

pub mod dots;
pub mod images;
pub mod laid;
pub mod matrix;
pub mod pack;
pub mod product;
pub mod tile;
pub mod windows;
pub mod winograd;

use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
use std::ops::Range;

/// Lanes of a vector.
pub const LANES: usize = 16;
/// Rows of a tile of the result.
pub const ROWS: usize = 8;
/// Vectors of a row of a tile.
pub const VECTORS: usize = 3;
/// Columns of a tile.
pub const COLUMNS: usize = VECTORS * LANES;
/// How many of the depth are summed in registers at once, at most.
pub const DEPTH: usize = 256;

/// Rows of a factor or a result at an address: where they begin, how far apart they are, and how far apart neighbours in a row are.
#[derive(Clone, Copy)]
pub struct Rows {
    /// The first element.
    pub at: *const f32,
    /// Distance between rows.
    pub row: usize,
    /// Distance between elements of a row.
    pub step: usize,
}

impl Rows {
    /// The same elements with rows and columns changed.
    pub fn turned(self) -> Rows {
        Rows { row: self.step, step: self.row, ..self }
    }
}

/// The left factor of a product. Depths begin at multiples of [`LANES`], and columns of the right factor.
pub trait Left {
    /// Where it lies, if tiles can read it there.
    fn in_place(&self) -> Option<Rows>;
    /// Copies rows into panels, `[depth][rows]`, each as high as [`piece`] says, one behind the other.
    ///
    /// # Safety
    /// The processor has AVX-512, rows and depth are inside the factor, and the panels have room for them.
    unsafe fn pack(&self, rows: Range<usize>, depth: Range<usize>, panels: *mut f32);
}

/// The right factor of a product.
pub trait Right {
    /// Its first element and the distance between its rows, if tiles can read it where it lies.
    fn in_place(&self) -> Option<(*const f32, usize)>;
    /// Copies a panel, `[depth][whole vectors of columns]`, 0 beyond the last column.
    ///
    /// # Safety
    /// The processor has AVX-512, depth and columns are inside the factor, and the panel has room for them.
    unsafe fn pack(&self, depth: Range<usize>, columns: Range<usize>, panel: *mut f32);
    /// Where it is worth while to ask for this depth and these columns before they are read.
    fn ahead(&self, _depth: Range<usize>, _columns: Range<usize>) -> Ahead {
        Ahead::NOTHING
    }
}

/// The result of a product.
pub trait Target {
    /// Where the vectors of these columns begin in the first row and the distance between rows, if tiles can write there.
    fn in_place(&self, columns: Range<usize>) -> Option<([*mut f32; VECTORS], usize)>;
    /// Takes a tile that was written beside it, in rows of [`COLUMNS`].
    ///
    /// # Safety
    /// The processor has AVX-512, and rows and columns are inside the result.
    unsafe fn take(&self, rows: Range<usize>, columns: Range<usize>, tile: *const f32, add: bool);
}

/// What will be read next, and is asked for meanwhile: elements of rows that lie some distance apart.
#[derive(Clone, Copy)]
pub struct Ahead {
    at: *const f32,
    rows: usize,
    width: usize,
    row: usize,
    /// How much of this row has been asked for.
    done: usize,
}

impl Ahead {
    /// Nothing to ask for.
    pub const NOTHING: Ahead = Ahead { at: std::ptr::null(), rows: 0, width: 0, row: 0, done: 0 };

    /// So many rows of so many elements.
    pub fn of(at: *const f32, [rows, width]: [usize; 2], row: usize) -> Ahead {
        Ahead { at, rows, width, row, done: 0 }
    }

    /// Asks for so many lines, if there are any left.
    #[inline(always)]
    pub fn ask(&mut self, lines: usize) {
        if self.rows == 0 {
            return;
        }
        for line in 0..lines {
            let at = self.at.wrapping_add(self.done + line * LANES);
            // SAFETY: an address that is only asked for may be anywhere.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
        }
        self.done += lines * LANES;
        if self.done >= self.width {
            (self.at, self.done, self.rows) = (self.at.wrapping_add(self.row), 0, self.rows - 1);
        }
    }
}

/// Whether this processor has what it takes.
pub fn is_at_hand() -> bool {
    is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx2")
}

/// How many of the next pieces hold as much as they can, by [`piece`].
pub fn whole_pieces(left: usize, most: usize) -> usize {
    if left.is_multiple_of(most) { left / most } else { (left / most).saturating_sub(1) }
}

/// The rows of each panel, and where it begins.
pub fn pieces(rows: Range<usize>, depth: usize, panels: *mut f32) -> impl Iterator<Item = (Range<usize>, *mut f32)> {
    let mut row = rows.start;
    std::iter::from_fn(move || {
        let (first, panel) = (row, panels.wrapping_add((row - rows.start) * depth));
        row += piece(rows.end - row, ROWS);
        (first < row).then_some((first..row, panel))
    })
}

/// How much of what is left goes into the next piece: as much as it can hold, but the last two are about equal.
pub fn piece(left: usize, most: usize) -> usize {
    if left <= most || left >= 2 * most { left.min(most) } else { left.div_ceil(2) }
}
