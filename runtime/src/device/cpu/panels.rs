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
//! An element of the result is one sum over the depth in order, up to 256 at a time, each product fused with its addition. So its bits do
//! not depend on how many rows and columns are asked for at once, nor on which factor is copied.

pub mod images;
pub mod matrix;
pub mod pack;
pub mod product;
pub mod tile;
pub mod windows;

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

/// The left factor of a product. Depths begin at multiples of [`LANES`], and columns of the right factor.
pub trait Left {
    /// Where it lies, if tiles can read it there.
    fn in_place(&self) -> Option<Rows>;
    /// Copies a panel, `[depth][rows]`.
    ///
    /// # Safety
    /// The processor has AVX-512, rows and depth are inside the factor, and the panel has room for them.
    unsafe fn pack(&self, rows: Range<usize>, depth: Range<usize>, panel: *mut f32);
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
}

/// The result of a product.
pub trait Target {
    /// Where the vectors from a column on begin in a row and the distance between rows, if tiles can write there.
    fn in_place(&self, row: usize, columns: Range<usize>) -> Option<([*mut f32; VECTORS], usize)>;
    /// Takes a tile that was written beside it, in rows of [`COLUMNS`].
    ///
    /// # Safety
    /// The processor has AVX-512, and rows and columns are inside the result.
    unsafe fn take(&self, rows: Range<usize>, columns: Range<usize>, tile: *const f32, add: bool);
}

/// Whether this processor has what it takes.
pub fn is_at_hand() -> bool {
    is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx2")
}

/// How much of what is left goes into the next piece: as much as it can hold, but the last two are about equal.
pub fn piece(left: usize, most: usize) -> usize {
    if left <= most || left >= 2 * most { left.min(most) } else { left.div_ceil(2) }
}
