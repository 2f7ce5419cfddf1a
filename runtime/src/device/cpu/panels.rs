//! `f32` matrix products with AVX-512: operands are packed into panels sized for the first two cache levels. For AVX2 see
//! [`avx2`].
//!
//! ```text
//! for 256 of the depth:                  panels of a, [256][8] for every 8 rows, stay in the second-level cache
//!   for 48 columns:                      a panel of b, [256][48], stays in the first-level cache
//!     for each panel of a:               24 sums in registers, 11 loads for every 24 multiplications
//! ```
//!
//! An operand that can be read in place is not packed: rows of `a` used by few columns, rows of `b` used by few rows.
//! Operands need not be matrices in memory: a [`Left`] or [`Right`] operand fills its panels, and a [`Target`] stores
//! the sums.
//!
//! Each result element is one ordered sum over the depth with fused multiply-adds. After a number of depth steps that
//! depends on the sizes it is added to the previous partial sum. Its bits therefore depend only on the sizes.

pub mod avx2;
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

/// `f32` lanes per vector.
pub const LANES: usize = 16;
/// Rows of a result tile.
pub const ROWS: usize = 8;
/// Vectors per tile row.
pub const VECTORS: usize = 3;
/// Columns of a result tile.
pub const COLUMNS: usize = VECTORS * LANES;
/// Maximum depth summed in registers at once.
pub const DEPTH: usize = 256;

/// A cache line of buffers.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Line([f32; LANES]);

/// A strided matrix of `f32` in memory.
#[derive(Clone, Copy)]
pub struct Rows {
    pub at: *const f32,
    /// Row stride, in elements.
    pub row: usize,
    /// Column stride, in elements.
    pub step: usize,
}

impl Rows {
    pub fn transposed(self) -> Rows {
        Rows { row: self.step, step: self.row, ..self }
    }
}

/// The left operand of a product. Depth ranges begin at multiples of [`LANES`], as do columns of the right operand.
pub trait Left {
    /// Its memory, if tiles can read it in place.
    fn in_place(&self) -> Option<Rows>;
    /// Packs rows into consecutive panels `[depth][rows]` with the heights of [`piece`].
    ///
    /// # Safety
    ///
    /// The processor has AVX-512, the ranges are within the operand, and the panels are large enough.
    unsafe fn pack(&self, rows: Range<usize>, depth: Range<usize>, panels: *mut f32);
}

/// The right operand of a product.
pub trait Right {
    /// Its first element and row stride, if tiles can read it in place.
    fn in_place(&self) -> Option<(*const f32, usize)>;
    /// Packs a panel `[depth][columns rounded up to whole vectors]`, zero-padded.
    ///
    /// # Safety
    ///
    /// The processor has AVX-512, the ranges are within the operand, and the panel is large enough.
    unsafe fn pack(&self, depth: Range<usize>, columns: Range<usize>, panel: *mut f32);
    /// Memory to prefetch before this range is read, if useful.
    fn ahead(&self, _depth: Range<usize>, _columns: Range<usize>) -> Ahead {
        Ahead::NOTHING
    }
}

/// The result of a product.
pub trait Target {
    /// Addresses of these columns' vectors in the first row, and the row stride, if tiles can write in place.
    fn in_place(&self, columns: Range<usize>) -> Option<([*mut f32; VECTORS], usize)>;
    /// Stores or adds a tile with rows of [`COLUMNS`] from a temporary buffer.
    ///
    /// # Safety
    ///
    /// The processor has AVX-512, and the ranges are within the result.
    unsafe fn take(&self, rows: Range<usize>, columns: Range<usize>, tile: *const f32, add: bool);
}

/// Strided rows to prefetch.
#[derive(Clone, Copy)]
pub struct Ahead {
    at: *const f32,
    rows: usize,
    width: usize,
    row: usize,
    /// Elements of the current row already prefetched.
    column: usize,
}

impl Ahead {
    pub const NOTHING: Ahead = Ahead { at: std::ptr::null(), rows: 0, width: 0, row: 0, column: 0 };

    /// `rows` rows of `width` elements with row stride `row`.
    pub fn of(at: *const f32, [rows, width]: [usize; 2], row: usize) -> Ahead {
        Ahead { at, rows, width, row, column: 0 }
    }

    /// Prefetches the next `lines` cache lines, if any are left.
    #[inline(always)]
    pub fn prefetch(&mut self, lines: usize) {
        if self.rows == 0 {
            return;
        }
        for line in 0..lines {
            let at = self.at.wrapping_add(self.column + line * LANES);
            // SAFETY: a prefetch may use any address.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
        }
        self.column += lines * LANES;
        if self.column >= self.width {
            (self.at, self.column, self.rows) = (self.at.wrapping_add(self.row), 0, self.rows - 1);
        }
    }
}

/// True if the processor has AVX-512F and AVX2.
pub fn is_supported() -> bool {
    is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx2")
}

/// Number of full pieces among the following ones; see [`piece`].
pub fn whole_pieces(rows: usize, height: usize) -> usize {
    if rows.is_multiple_of(height) { rows / height } else { (rows / height).saturating_sub(1) }
}

/// Row range and address of each panel of at most `height` rows.
pub fn pieces(
    rows: Range<usize>,
    height: usize,
    depth: usize,
    panels: *mut f32,
) -> impl Iterator<Item = (Range<usize>, *mut f32)> {
    let mut row = rows.start;
    std::iter::from_fn(move || {
        let (first, panel) = (row, panels.wrapping_add((row - rows.start) * depth));
        row += piece(rows.end - row, height);
        (first < row).then_some((first..row, panel))
    })
}

/// Size of the next piece: `height`, except that the last two pieces are about equal.
pub fn piece(rows: usize, height: usize) -> usize {
    if rows <= height || rows >= 2 * height { rows.min(height) } else { rows.div_ceil(2) }
}
