//! The transforms of Winograd's minimal filtering F(2×2, 3×3) [Lavin and Gray 2016, section 4.1]: a 2×2 output tile
//! takes 16 multiplications from a 4×4 data tile instead of 36.
//!
//! ```text
//! y  = Aᵀ [(G w Gᵀ) ⊙ (Bᵀ x B)] A         dw = Gᵀ [(A dy Aᵀ) ⊙ (Bᵀ x B)] G
//!
//! Bᵀ = 1  0 -1  0      G = 1    0    0      Aᵀ = 1  1  1  0
//!      0  1  1  0          1/2  1/2  1/2         0  1 -1 -1
//!      0 -1  1  0          1/2 -1/2  1/2
//!      0  1  0 -1          0    0    1
//! ```
//!
//! Sixteen adjacent tiles, or the filters of sixteen channels, are transformed at once. Transformed numbers are stored
//! as `[16][channel][tile]` or `[16][out][in]`, so the sums over channels are matrix products for each tile element.

// Index loops are fully unrolled; iterator closures would not be compiled for these vectors.
#![allow(clippy::needless_range_loop)]

use super::LANES;
use super::images::{every_second, lane_multiples, lanes_before};
use super::pack::transpose_16x16;
use super::windows::Windows;
use std::arch::x86_64::{
    __m512, __m512i, _mm512_add_ps, _mm512_loadu_ps, _mm512_mask_mov_ps, _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps,
    _mm512_mul_ps, _mm512_permutex2var_ps, _mm512_set1_ps, _mm512_setr_epi32, _mm512_setzero_ps, _mm512_storeu_ps,
    _mm512_sub_ps,
};
use std::ops::Range;

/// Elements of a data tile.
pub const ELEMENTS: usize = 16;
/// Taps of a filter.
const TAPS: usize = 9;

/// Transformed numbers in memory.
#[derive(Clone, Copy)]
pub struct Transformed {
    /// First channel's first number of element 0.
    pub at: *mut f32,
    /// Stride of tile elements.
    pub element: usize,
    /// Stride of channels.
    pub channel: usize,
}

impl Transformed {
    /// Address of a number.
    #[inline(always)]
    pub fn address(self, element: usize, channel: usize, at: usize) -> *mut f32 {
        self.at.wrapping_add(element * self.element + channel * self.channel + at)
    }

    /// Stores a row of four tile elements.
    ///
    /// # Safety
    ///
    /// The processor has AVX-512, and the target has room.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn store(self, row: usize, channel: usize, at: usize, lines: [__m512; 4]) {
        for j in 0..4 {
            // SAFETY: guaranteed by the caller.
            unsafe { _mm512_storeu_ps(self.address(4 * row + j, channel, at), lines[j]) };
        }
    }
}

/// Adjacent tiles whose outputs are in one row of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Span {
    lane: usize,
    /// Output columns and rows.
    columns: usize,
    rows: usize,
    /// First output, in elements from the first image of the period.
    at: usize,
}

/// Output positions of the tiles of every vector.
#[derive(Debug)]
pub struct Results {
    spans: Vec<Span>,
    /// Start in `spans` for each vector of the period.
    starts: Vec<usize>,
    width: usize,
}

impl Results {
    /// For outputs of this height and width, in images of `image_elements` elements.
    pub fn new(tiles: &Windows, [height, width]: [usize; 2], image_elements: usize) -> Results {
        let [images, vectors] = tiles.period();
        let row_tiles = width.div_ceil(2);
        let mut results = Results { spans: Vec::new(), starts: vec![0], width };
        for vector in 0..vectors {
            let begin = results.spans.len();
            let (mut next, mut row) = (usize::MAX, usize::MAX);
            for lane in 0..LANES {
                let (image, tile) = ((vector * LANES + lane) / tiles.count, (vector * LANES + lane) % tiles.count);
                if image >= images {
                    break;
                }
                let (out_row, out_column) = (2 * (tile / row_tiles), 2 * (tile % row_tiles));
                let columns = 2.min(width - out_column);
                let is_next = (next, row) == (out_column, image * height + out_row) && results.spans.len() > begin;
                match results.spans.last_mut().filter(|_| is_next) {
                    Some(span) => span.columns += columns,
                    None => {
                        let at = image * image_elements + out_row * width + out_column;
                        results.spans.push(Span { lane, columns, rows: 2.min(height - out_row), at });
                    }
                }
                (next, row) = (out_column + 2, image * height + out_row);
            }
            results.starts.push(results.spans.len());
        }
        results
    }
}

/// `Bᵀ d`
#[inline]
#[target_feature(enable = "avx512f")]
fn data([a, b, c, d]: [__m512; 4]) -> [__m512; 4] {
    [_mm512_sub_ps(a, c), _mm512_add_ps(b, c), _mm512_sub_ps(c, b), _mm512_sub_ps(b, d)]
}

/// `Aᵀ m`
#[inline]
#[target_feature(enable = "avx512f")]
fn result([a, b, c, d]: [__m512; 4]) -> [__m512; 2] {
    [_mm512_add_ps(_mm512_add_ps(a, b), c), _mm512_sub_ps(_mm512_sub_ps(b, c), d)]
}

/// `A y`
#[inline]
#[target_feature(enable = "avx512f")]
fn result_transposed([a, b]: [__m512; 2]) -> [__m512; 4] {
    [a, _mm512_add_ps(a, b), _mm512_sub_ps(a, b), _mm512_sub_ps(_mm512_setzero_ps(), b)]
}

/// `G g`
#[inline]
#[target_feature(enable = "avx512f")]
fn filter([a, b, c]: [__m512; 3]) -> [__m512; 4] {
    let (half, ends) = (_mm512_set1_ps(0.5), _mm512_add_ps(a, c));
    let [sum, difference] = [_mm512_add_ps(ends, b), _mm512_sub_ps(ends, b)];
    [a, _mm512_mul_ps(half, sum), _mm512_mul_ps(half, difference), c]
}

/// `Gᵀ s`
#[inline]
#[target_feature(enable = "avx512f")]
fn filter_transposed([a, b, c, d]: [__m512; 4]) -> [__m512; 3] {
    let half = _mm512_set1_ps(0.5);
    let sum = _mm512_mul_ps(half, _mm512_add_ps(b, c));
    [_mm512_add_ps(a, sum), _mm512_mul_ps(half, _mm512_sub_ps(b, c)), _mm512_add_ps(sum, d)]
}

/// Loads that gather a vector of tiles at every tap, equal in all channels.
struct Loads {
    /// At most one per lane and tap.
    loads: [Load; ELEMENTS * LANES],
    /// Start in `loads` for each tap.
    starts: [usize; ELEMENTS + 1],
}

/// A load of every second of 32 numbers, for some lanes.
#[derive(Clone, Copy, Default)]
struct Load {
    at: isize,
    lanes: u16,
    low: u16,
    high: u16,
}

impl Loads {
    fn new() -> Loads {
        Loads { loads: [Load::default(); ELEMENTS * LANES], starts: [0; ELEMENTS + 1] }
    }

    fn set(&mut self, windows: &Windows, vector: usize) {
        let mut count = 0;
        let (valid, (at, [image, _])) = (lanes_before(windows.columns, vector), windows.locate(vector));
        for tap in 0..windows.taps {
            for run in windows.reads(at, tap).iter().filter(|run| run.lanes & valid != 0) {
                let lanes = run.lanes & valid;
                let (low, high) = (every_second(lanes), every_second(lanes >> 8));
                self.loads[count] = Load { at: image as isize + run.at as isize, lanes, low, high };
                count += 1;
            }
            self.starts[tap + 1] = count;
        }
    }

    /// Loads the elements at a tap; 0 in lanes without one.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load(&self, tap: usize, from: *const f32, even: __m512i) -> __m512 {
        let mut line = _mm512_setzero_ps();
        for load in &self.loads[self.starts[tap]..self.starts[tap + 1]] {
            let at = from.wrapping_offset(load.at);
            // SAFETY: the caller guarantees that these lanes are in range.
            let (low, high) = unsafe {
                (_mm512_maskz_loadu_ps(load.low, at), _mm512_maskz_loadu_ps(load.high, at.wrapping_add(LANES)))
            };
            line = _mm512_mask_mov_ps(line, load.lanes, _mm512_permutex2var_ps(low, even, high));
        }
        line
    }
}

/// Computes `Bᵀ x B` for some tile vectors and `channels` channels.
///
/// # Safety
///
/// The processor has AVX-512, `x` has the images of the tiles, the vectors are in range, and the target has room.
#[target_feature(enable = "avx512f")]
pub unsafe fn data_in(tiles: &Windows, x: *const f32, channels: usize, vectors: Range<usize>, to: Transformed) {
    let (mut loads, even) = (Loads::new(), lane_multiples(2));
    for (position, vector) in vectors.enumerate() {
        loads.set(tiles, vector);
        for channel in 0..channels {
            let from = x.wrapping_add(channel * tiles.plane);
            let mut half = [[_mm512_setzero_ps(); 4]; 4];
            for j in 0..4 {
                let mut column = [_mm512_setzero_ps(); 4];
                for i in 0..4 {
                    // SAFETY: guaranteed by the caller; tiles read inside their image.
                    column[i] = unsafe { loads.load(4 * i + j, from, even) };
                }
                let column = data(column);
                for i in 0..4 {
                    half[i][j] = column[i];
                }
            }
            for i in 0..4 {
                // SAFETY: guaranteed by the caller.
                unsafe { to.store(i, channel, position * LANES, data(half[i])) };
            }
        }
    }
}

/// Computes `A dy Aᵀ`; `pairs` are the tiles as windows over their outputs.
///
/// # Safety
///
/// As for [`data_in`].
#[target_feature(enable = "avx512f")]
pub unsafe fn results_in(pairs: &Windows, dy: *const f32, channels: usize, vectors: Range<usize>, to: Transformed) {
    let (mut loads, even) = (Loads::new(), lane_multiples(2));
    for (position, vector) in vectors.enumerate() {
        loads.set(pairs, vector);
        for channel in 0..channels {
            let from = dy.wrapping_add(channel * pairs.plane);
            let mut half = [[_mm512_setzero_ps(); 2]; 4];
            for j in 0..2 {
                let mut column = [_mm512_setzero_ps(); 2];
                for i in 0..2 {
                    // SAFETY: guaranteed by the caller; outputs are inside their image.
                    column[i] = unsafe { loads.load(2 * i + j, from, even) };
                }
                let column = result_transposed(column);
                for i in 0..4 {
                    half[i][j] = column[i];
                }
            }
            for i in 0..4 {
                // SAFETY: guaranteed by the caller.
                unsafe { to.store(i, channel, position * LANES, result_transposed(half[i])) };
            }
        }
    }
}

/// Computes `Aᵀ m A` and writes it to the images of `y`, with plane stride `plane`.
///
/// # Safety
///
/// As for [`data_in`].
#[target_feature(enable = "avx512f")]
pub unsafe fn results_out(
    (tiles, results): (&Windows, &Results),
    m: Transformed,
    channels: usize,
    vectors: Range<usize>,
    (y, plane): (*mut f32, usize),
) {
    let low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    let high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    for (position, vector) in vectors.enumerate() {
        let (at, [_, image]) = tiles.locate(vector);
        let lanes = (tiles.columns - vector * LANES).min(LANES);
        let spans = &results.spans[results.starts[at]..results.starts[at + 1]];
        for channel in 0..channels {
            let mut half = [[_mm512_setzero_ps(); 4]; 2];
            for j in 0..4 {
                let mut column = [_mm512_setzero_ps(); 4];
                for i in 0..4 {
                    // SAFETY: guaranteed by the caller.
                    column[i] = unsafe { _mm512_loadu_ps(m.address(4 * i + j, channel, position * LANES)) };
                }
                let column = result(column);
                (half[0][j], half[1][j]) = (column[0], column[1]);
            }
            let to = y.wrapping_add(image + channel * plane);
            for i in 0..2 {
                let [even, odd] = result(half[i]);
                let row = [_mm512_permutex2var_ps(even, low, odd), _mm512_permutex2var_ps(even, high, odd)];
                if let ([span], LANES) = (spans, lanes) {
                    // The common case: a vector is in one row.
                    if i < span.rows {
                        let to = to.wrapping_add(span.at + i * results.width);
                        // SAFETY: the span ends with the row of the image.
                        unsafe {
                            _mm512_mask_storeu_ps(to, lanes_before(span.columns, 0), row[0]);
                            if span.columns > LANES {
                                _mm512_mask_storeu_ps(to.wrapping_add(LANES), lanes_before(span.columns, 1), row[1]);
                            }
                        }
                    }
                    continue;
                }
                let [first, second] = row;
                let mut row = [0.0f32; 2 * LANES];
                // SAFETY: the array holds two vectors.
                unsafe {
                    _mm512_storeu_ps(row.as_mut_ptr(), first);
                    _mm512_storeu_ps(row.as_mut_ptr().add(LANES), second);
                }
                for span in spans.iter().filter(|span| i < span.rows && span.lane < lanes) {
                    let to = to.wrapping_add(span.at + i * results.width);
                    // SAFETY: spans end with the row of the image, and so do their lanes.
                    unsafe { copy(row.as_ptr().add(2 * span.lane), to, span.columns) };
                }
            }
        }
    }
}

/// Copies a few numbers, usually one or two vectors.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn copy(from: *const f32, to: *mut f32, count: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        for at in (0..count).step_by(LANES) {
            let lanes = lanes_before(count, at / LANES);
            _mm512_mask_storeu_ps(to.add(at), lanes, _mm512_maskz_loadu_ps(lanes, from.add(at)));
        }
    }
}

/// Lane mask of a filter's taps.
const OF_FILTER: u16 = (1 << TAPS) - 1;

/// Computes `G w Gᵀ` of filters `w [out][in][3][3]`, as a row of `ins` per output channel, zero-padded to whole
/// vectors. `flipped` reverses the taps.
///
/// # Safety
///
/// The processor has AVX-512, the filters exist, and the target has room.
#[target_feature(enable = "avx512f,avx2")]
pub unsafe fn filters_in(w: *const f32, [outs, ins]: [usize; 2], flipped: bool, to: Transformed) {
    for (out, first) in (0..outs).flat_map(|out| (0..ins).step_by(LANES).map(move |first| (out, first))) {
        let from = w.wrapping_add((out * ins + first) * TAPS);
        let mut filters = [_mm512_setzero_ps(); LANES];
        for (i, line) in filters.iter_mut().enumerate().take(ins - first) {
            // SAFETY: the caller guarantees that the filter exists.
            *line = unsafe { _mm512_maskz_loadu_ps(OF_FILTER, from.wrapping_add(i * TAPS)) };
        }
        let taps = transpose_16x16(filters);
        let mut half = [[_mm512_setzero_ps(); 3]; 4];
        for j in 0..3 {
            let at = |i: usize| if flipped { taps[TAPS - 1 - (3 * i + j)] } else { taps[3 * i + j] };
            let column = filter([at(0), at(1), at(2)]);
            for i in 0..4 {
                half[i][j] = column[i];
            }
        }
        for i in 0..4 {
            // SAFETY: guaranteed by the caller.
            unsafe { to.store(i, out, first, filter(half[i])) };
        }
    }
}

/// Computes `Gᵀ s G` of sums and stores or adds it to filters `dw [out][in][3][3]`.
///
/// # Safety
///
/// As for [`filters_in`].
#[target_feature(enable = "avx512f,avx2")]
pub unsafe fn filters_out(sums: Transformed, dw: *mut f32, [outs, ins]: [usize; 2], add: bool) {
    for (out, first) in (0..outs).flat_map(|out| (0..ins).step_by(LANES).map(move |first| (out, first))) {
        let mut half = [[_mm512_setzero_ps(); 4]; 3];
        for j in 0..4 {
            let mut column = [_mm512_setzero_ps(); 4];
            for i in 0..4 {
                // SAFETY: guaranteed by the caller.
                column[i] = unsafe { _mm512_loadu_ps(sums.address(4 * i + j, out, first)) };
            }
            let column = filter_transposed(column);
            for i in 0..3 {
                half[i][j] = column[i];
            }
        }
        let mut taps = [_mm512_setzero_ps(); LANES];
        for i in 0..3 {
            let row = filter_transposed(half[i]);
            for j in 0..3 {
                taps[3 * i + j] = row[j];
            }
        }
        let (to, count) = (dw.wrapping_add((out * ins + first) * TAPS), (ins - first).min(LANES));
        let mut filters = transpose_16x16(taps);
        // All reads come before all writes: reading right after the adjacent filter was written would stall.
        for (i, line) in filters.iter_mut().enumerate().take(if add { count } else { 0 }) {
            // SAFETY: the caller guarantees that the filter exists.
            *line = _mm512_add_ps(unsafe { _mm512_maskz_loadu_ps(OF_FILTER, to.wrapping_add(i * TAPS)) }, *line);
        }
        for (i, line) in filters.into_iter().enumerate().take(count) {
            // SAFETY: guaranteed by the caller.
            unsafe { _mm512_mask_storeu_ps(to.wrapping_add(i * TAPS), OF_FILTER, line) };
        }
    }
}
