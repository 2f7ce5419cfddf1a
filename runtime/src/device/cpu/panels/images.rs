//! Convolution operands: panels are filled from images, and results are written to images.

use super::pack::transpose_16x16;
use super::windows::{Run, Windows};
use super::{COLUMNS, LANES, Left, ROWS, Right, Rows, Target, VECTORS, pieces};
use std::arch::x86_64::{
    __m512, __m512i, _mm256_i32gather_ps, _mm256_setr_epi32, _mm256_storeu_ps, _mm512_add_ps, _mm512_loadu_ps,
    _mm512_mask_i32gather_ps, _mm512_mask_loadu_ps, _mm512_mask_mov_ps, _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps,
    _mm512_mullo_epi32, _mm512_permutex2var_ps, _mm512_set1_epi32, _mm512_setr_epi32, _mm512_setzero_ps,
    _mm512_storeu_ps,
};
use std::ops::Range;

/// The im2col matrix: a row per channel and tap, a column per window.
pub struct Patches<'a> {
    pub windows: &'a Windows,
    /// First channel of the first image.
    pub x: *const f32,
}

/// The transpose of [`Patches`].
pub struct TransposedPatches<'a>(pub Patches<'a>);

/// The outputs: a row per channel, a column per window.
pub struct Results<'a> {
    pub windows: &'a Windows,
    /// First channel of the first image.
    pub y: *mut f32,
}

/// Input-gradient terms `[channel][tap][window]`, with the windows of all images side by side. Each element sums the
/// terms of the windows that read it.
pub struct Terms<'a> {
    /// The elements as windows over their terms, from the flipped grid: taps are reversed.
    pub elements: &'a Windows,
    pub at: *const f32,
    /// Stride between taps.
    pub pitch: usize,
}

/// Filters `[out][in][tap]` with reversed taps, as a matrix: a row per input channel, a column per output channel and
/// tap.
pub struct Flipped {
    pub w: *const f32,
    pub ins: usize,
    pub taps: usize,
}

/// Mask of the lanes before `end`, in vector number `vector`.
pub(super) fn lanes_before(end: usize, vector: usize) -> u16 {
    !0 >> (LANES - (end - vector * LANES).min(LANES))
}

/// Loads the elements of some lanes, 0 in the others. `STEP` is the lane stride, 0 if it is `stride`.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load<const STEP: usize>(runs: &[Run], valid: u16, from: *const f32, stride: usize) -> __m512 {
    let mut line = _mm512_setzero_ps();
    for run in runs {
        let (at, lanes) = (from.wrapping_offset(run.at as isize), run.lanes & valid);
        // SAFETY: the caller guarantees that these lanes are in range.
        unsafe {
            line = match STEP {
                1 => _mm512_mask_loadu_ps(line, lanes, at),
                2 => {
                    let low = _mm512_maskz_loadu_ps(every_second(lanes), at);
                    let high = _mm512_maskz_loadu_ps(every_second(lanes >> 8), at.wrapping_add(LANES));
                    let even = lane_multiples(2);
                    _mm512_mask_mov_ps(line, lanes, _mm512_permutex2var_ps(low, even, high))
                }
                _ => {
                    let offsets = lane_multiples(stride);
                    _mm512_mask_i32gather_ps::<4>(line, lanes, offsets, at.cast())
                }
            };
        }
    }
    line
}

/// 0, `step`, 2 `step`, …
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn lane_multiples(step: usize) -> __m512i {
    let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    _mm512_mullo_epi32(lanes, _mm512_set1_epi32(step as i32))
}

/// Moves bit i of the lower eight to bit 2i.
#[inline]
pub(super) fn every_second(lanes: u16) -> u16 {
    let fours = (lanes & 0x0f) | (lanes & 0xf0) << 4;
    let twos = (fours | fours << 2) & 0x3333;
    (twos | twos << 1) & 0x5555
}

impl Patches<'_> {
    /// Iterates tap by tap: runs of a tap are the same in every channel.
    #[target_feature(enable = "avx512f")]
    unsafe fn copy<const STEP: usize>(&self, depth: Range<usize>, columns: Range<usize>, panel: *mut f32) {
        let Windows { taps, plane, step, .. } = *self.windows;
        let pitch = columns.len().next_multiple_of(LANES);
        for column in (0..columns.len()).step_by(LANES) {
            let vector = (columns.start + column) / LANES;
            let (valid, (at, [image, _])) = (lanes_before(columns.end, vector), self.windows.locate(vector));
            for first in depth.clone().take(taps) {
                let runs = self.windows.reads(at, first % taps);
                let mut from = self.x.wrapping_add(image + first / taps * plane);
                let mut to = panel.wrapping_add((first - depth.start) * pitch + column);
                for _ in (first..depth.end).step_by(taps) {
                    // SAFETY: guaranteed by the caller; windows read inside their image.
                    unsafe {
                        // The common case of one run avoids the loop.
                        let line = match runs {
                            [run] => load::<STEP>(std::slice::from_ref(run), valid, from, step),
                            _ => load::<STEP>(runs, valid, from, step),
                        };
                        _mm512_storeu_ps(to, line);
                    }
                    (from, to) = (from.wrapping_add(plane), to.wrapping_add(taps * pitch));
                }
            }
        }
    }

    #[target_feature(enable = "avx512f")]
    unsafe fn copy_transposed<const STEP: usize>(&self, depth: Range<usize>, columns: Range<usize>, panel: *mut f32) {
        let Windows { taps, plane, step, .. } = *self.windows;
        let pitch = columns.len().next_multiple_of(LANES);
        for column in (0..columns.len()).step_by(LANES) {
            let line_count = (columns.len() - column).min(LANES);
            for window in (0..depth.len()).step_by(LANES) {
                let vector = (depth.start + window) / LANES;
                let (valid, (at, [image, _])) = (lanes_before(depth.end, vector), self.windows.locate(vector));
                let mut tap = (columns.start + column) % taps;
                let mut from = self.x.wrapping_add(image + (columns.start + column) / taps * plane);
                let mut lines = [_mm512_setzero_ps(); LANES];
                for line in lines.iter_mut().take(line_count) {
                    // SAFETY: guaranteed by the caller; windows read inside their image.
                    *line = unsafe { load::<STEP>(self.windows.reads(at, tap), valid, from, step) };
                    tap += 1;
                    if tap == taps {
                        (tap, from) = (0, from.wrapping_add(plane));
                    }
                }
                lines = transpose_16x16(lines);
                let to = panel.wrapping_add(window * pitch + column);
                for (i, line) in lines.into_iter().enumerate().take(depth.len() - window) {
                    // SAFETY: the caller guarantees the panel size.
                    unsafe { _mm512_storeu_ps(to.wrapping_add(i * pitch), line) };
                }
            }
        }
    }
}

impl Right for Patches<'_> {
    fn in_place(&self) -> Option<(*const f32, usize)> {
        None
    }

    unsafe fn pack(&self, depth: Range<usize>, columns: Range<usize>, panel: *mut f32) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match self.windows.step {
                1 => self.copy::<1>(depth, columns, panel),
                2 => self.copy::<2>(depth, columns, panel),
                _ => self.copy::<0>(depth, columns, panel),
            }
        }
    }
}

impl Right for TransposedPatches<'_> {
    fn in_place(&self) -> Option<(*const f32, usize)> {
        None
    }

    unsafe fn pack(&self, depth: Range<usize>, columns: Range<usize>, panel: *mut f32) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match self.0.windows.step {
                1 => self.0.copy_transposed::<1>(depth, columns, panel),
                2 => self.0.copy_transposed::<2>(depth, columns, panel),
                _ => self.0.copy_transposed::<0>(depth, columns, panel),
            }
        }
    }
}

impl Left for Results<'_> {
    fn in_place(&self) -> Option<Rows> {
        None
    }

    unsafe fn pack(&self, rows: Range<usize>, depth: Range<usize>, panels: *mut f32) {
        for (rows, panel) in pieces(rows, ROWS, depth.len(), panels) {
            // SAFETY: guaranteed by the caller.
            unsafe { self.copy(rows, depth.clone(), panel) }
        }
    }
}

impl Results<'_> {
    #[target_feature(enable = "avx512f")]
    unsafe fn copy(&self, rows: Range<usize>, depth: Range<usize>, panel: *mut f32) {
        let (height, row_mask) = (rows.len(), !0u16 >> (LANES - rows.len()));
        for window in (0..depth.len()).step_by(LANES) {
            let vector = (depth.start + window) / LANES;
            let (valid, (at, [_, image])) = (lanes_before(depth.end, vector), self.windows.locate(vector));
            let from = self.y.wrapping_add(image + rows.start * self.windows.count);
            let mut lines = [_mm512_setzero_ps(); LANES];
            for (r, line) in lines.iter_mut().enumerate().take(height.min(ROWS)) {
                let from = from.wrapping_add(r * self.windows.count);
                // SAFETY: guaranteed by the caller; results are inside their image.
                *line = unsafe { load::<1>(self.windows.results(at), valid, from, 1) };
            }
            lines = transpose_16x16(lines);
            let to = panel.wrapping_add(window * height);
            for (i, line) in lines.into_iter().enumerate().take(depth.len() - window) {
                // SAFETY: the caller guarantees the panel size.
                unsafe { _mm512_mask_storeu_ps(to.wrapping_add(i * height), row_mask, line) };
            }
        }
    }

    #[target_feature(enable = "avx512f")]
    unsafe fn store(&self, rows: Range<usize>, columns: Range<usize>, tile: *const f32, add: bool) {
        for column in (0..columns.len()).step_by(LANES) {
            let vector = (columns.start + column) / LANES;
            let (valid, (at, [_, image])) = (lanes_before(columns.end, vector), self.windows.locate(vector));
            for run in self.windows.results(at) {
                let lanes = run.lanes & valid;
                for (r, row) in rows.clone().enumerate() {
                    let to = self.y.wrapping_add(image + row * self.windows.count).wrapping_offset(run.at as isize);
                    // SAFETY: guaranteed by the caller; results are inside their image.
                    unsafe {
                        let mut line = _mm512_loadu_ps(tile.add(r * COLUMNS + column));
                        if add {
                            line = _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, to), line);
                        }
                        _mm512_mask_storeu_ps(to, lanes, line);
                    }
                }
            }
        }
    }
}

impl Target for Results<'_> {
    fn in_place(&self, columns: Range<usize>) -> Option<([*mut f32; VECTORS], usize)> {
        let mut addresses = [self.y; VECTORS];
        for (v, column) in columns.clone().step_by(LANES).enumerate() {
            let (valid, (at, [_, image])) =
                (lanes_before(columns.end, column / LANES), self.windows.locate(column / LANES));
            let [run] = self.windows.results(at) else { return None };
            if run.lanes & valid != valid {
                return None;
            }
            addresses[v] = self.y.wrapping_add(image).wrapping_offset(run.at as isize);
        }
        Some((addresses, self.windows.count))
    }

    unsafe fn take(&self, rows: Range<usize>, columns: Range<usize>, tile: *const f32, add: bool) {
        // SAFETY: guaranteed by the caller.
        unsafe { self.store(rows, columns, tile, add) }
    }
}

impl Terms<'_> {
    /// Sums the terms of each element of `channels` channels; `plane` is their stride at `to`.
    ///
    /// # Safety
    ///
    /// The processor has AVX-512, and terms and elements are in range.
    #[target_feature(enable = "avx512f")]
    pub unsafe fn sum(&self, channels: usize, (to, plane): (*mut f32, usize)) {
        let taps = self.elements.taps;
        for vector in 0..self.elements.columns.div_ceil(LANES) {
            let (valid, (at, [terms, image])) =
                (lanes_before(self.elements.columns, vector), self.elements.locate(vector));
            for channel in 0..channels {
                let mut sum = _mm512_setzero_ps();
                for tap in 0..taps {
                    let from = self.at.wrapping_add((channel * taps + taps - 1 - tap) * self.pitch + terms);
                    // SAFETY: guaranteed by the caller; elements read terms of their image.
                    sum = _mm512_add_ps(sum, unsafe { load::<1>(self.elements.reads(at, tap), valid, from, 1) });
                }
                for run in self.elements.results(at) {
                    let to = to.wrapping_add(image + channel * plane).wrapping_offset(run.at as isize);
                    // SAFETY: guaranteed by the caller; elements are inside their image.
                    unsafe { _mm512_mask_storeu_ps(to, run.lanes & valid, sum) };
                }
            }
        }
    }
}

impl Left for Flipped {
    fn in_place(&self) -> Option<Rows> {
        None
    }

    unsafe fn pack(&self, rows: Range<usize>, depth: Range<usize>, panels: *mut f32) {
        for (rows, panel) in pieces(rows, ROWS, depth.len(), panels) {
            // SAFETY: guaranteed by the caller.
            unsafe { self.copy(rows, depth.clone(), panel) }
        }
    }
}

impl Flipped {
    #[target_feature(enable = "avx512f,avx2")]
    unsafe fn copy(&self, rows: Range<usize>, depth: Range<usize>, panel: *mut f32) {
        let (height, stride) = (rows.len(), self.taps as i32);
        let offsets =
            _mm256_setr_epi32(0, stride, 2 * stride, 3 * stride, 4 * stride, 5 * stride, 6 * stride, 7 * stride);
        let mut tap = depth.start % self.taps;
        let mut filter = self.w.wrapping_add((depth.start / self.taps * self.ins + rows.start) * self.taps);
        for p in 0..depth.len() {
            let (from, to) = (filter.wrapping_add(self.taps - 1 - tap), panel.wrapping_add(p * height));
            // SAFETY: guaranteed by the caller; eight are read only if they exist.
            unsafe {
                if height == ROWS {
                    _mm256_storeu_ps(to, _mm256_i32gather_ps::<4>(from, offsets));
                } else {
                    for r in 0..height {
                        *to.add(r) = *from.add(r * self.taps);
                    }
                }
            }
            tap += 1;
            if tap == self.taps {
                (tap, filter) = (0, filter.wrapping_add(self.ins * self.taps));
            }
        }
    }
}
