//! Sliding windows over one to three spatial dimensions, and the im2col matrix that turns a convolution into a product.
//!
//! One and two dimensions are padded to three with leading dimensions of 1, so all loops have the same form.

use super::real::Real;
use compiler::op::Window;
use std::ops::Range;

/// Geometry of the windows over the data.
#[derive(Clone, Copy, Debug)]
pub struct Grid {
    pub data: [usize; 3],
    pub kernel: [usize; 3],
    pub out: [usize; 3],
    pub(super) stride: [isize; 3],
    pub(super) dilation: [isize; 3],
    pub(super) pads_begin: [isize; 3],
}

impl Grid {
    /// Lists have one entry per spatial dimension, at most three.
    pub fn new(window: &Window, data: &[usize], kernel: &[usize], out: &[usize]) -> Option<Grid> {
        let leading = 3usize.checked_sub(data.len())?;
        let extend = |list: &[usize], fill: usize| -> [usize; 3] {
            std::array::from_fn(|axis| axis.checked_sub(leading).map_or(fill, |a| list[a]))
        };
        // Larger distances would leave any data in memory; the reference handles them.
        let limited = |list: [usize; 3]| list.iter().all(|&v| v < 1 << 30).then(|| list.map(|v| v as isize));
        Some(Grid {
            data: limited(extend(data, 1))?.map(|v| v as usize),
            kernel: limited(extend(kernel, 1))?.map(|v| v as usize),
            out: limited(extend(out, 1))?.map(|v| v as usize),
            stride: limited(extend(&window.strides, 1))?,
            dilation: limited(extend(&window.dilations, 1))?,
            pads_begin: limited(extend(&window.pads_begin, 0))?,
        })
    }

    /// The data index that window `at` reads at `tap` along one axis; `None` in the padding.
    #[inline(always)]
    pub fn element(&self, axis: usize, at: usize, tap: usize) -> Option<usize> {
        let index = at as isize * self.stride[axis] + self.offset(axis, tap);
        (0..self.data[axis] as isize).contains(&index).then_some(index as usize)
    }

    /// The data index that window 0 reads at `tap`; negative in the padding.
    #[inline(always)]
    pub fn offset(&self, axis: usize, tap: usize) -> isize {
        tap as isize * self.dilation[axis] - self.pads_begin[axis]
    }

    /// The windows that read data, not padding, at `tap` along one axis.
    #[inline(always)]
    pub fn valid_windows(&self, axis: usize, tap: usize) -> Range<usize> {
        let (offset, stride) = (self.offset(axis, tap), self.stride[axis]);
        let from = (-offset).max(0) as usize;
        let from = from.div_ceil(stride as usize);
        let room = self.data[axis] as isize - offset;
        let to = if room > 0 { ((room - 1) / stride) as usize + 1 } else { 0 };
        let to = to.min(self.out[axis]);
        from.min(to)..to
    }

    /// Distance between the elements that adjacent windows of a row read.
    pub fn row_step(&self) -> usize {
        self.stride[2] as usize
    }

    /// Elements per data plane.
    pub fn data_len(&self) -> usize {
        self.data.iter().product()
    }

    /// Taps per window.
    pub fn taps(&self) -> usize {
        self.kernel.iter().product()
    }

    /// Number of windows.
    pub fn out_len(&self) -> usize {
        self.out.iter().product()
    }

    /// Rows of windows.
    pub fn rows(&self) -> usize {
        self.out[0] * self.out[1]
    }

    /// True if each window reads exactly its own element.
    pub fn is_pointwise(&self) -> bool {
        self.taps() == 1 && self.stride == [1; 3] && self.pads_begin == [0; 3] && self.data == self.out
    }

    /// The grid of the input gradient: data and windows exchange roles and taps are reversed. `None` unless the stride
    /// is 1.
    pub fn flipped(&self) -> Option<Grid> {
        let pads_begin =
            std::array::from_fn(|axis| self.dilation[axis] * (self.kernel[axis] as isize - 1) - self.pads_begin[axis]);
        (self.stride == [1; 3]).then_some(Grid { data: self.out, out: self.data, pads_begin, ..*self })
    }

    /// The overlapping 4×4 data tiles that produce 2×2 outputs (Winograd), for 3×3 filters with stride 1. The last tile
    /// of a row or column may produce fewer.
    pub fn tiles(&self) -> Option<Grid> {
        let is_plain = self.kernel == [1, 3, 3] && self.stride == [1; 3] && self.dilation[1..] == [1, 1];
        let tiled = Grid { kernel: [1, 4, 4], out: self.pairs(), stride: [1, 2, 2], dilation: [1; 3], ..*self };
        (is_plain && self.pads_begin[0] == 0 && self.data[0] == self.out[0]).then_some(tiled)
    }

    /// The same tiles as windows over the outputs.
    pub fn pairs_of_results(&self) -> Grid {
        let (kernel, stride) = ([1, 2, 2], [1, 2, 2]);
        Grid { data: self.out, kernel, out: self.pairs(), stride, dilation: [1; 3], pads_begin: [0; 3] }
    }

    fn pairs(&self) -> [usize; 3] {
        [self.out[0], self.out[1].div_ceil(2), self.out[2].div_ceil(2)]
    }

    /// True for 2×2 windows that tile the data exactly.
    pub fn is_of_squares(&self) -> bool {
        let squares = self.kernel == [1, 2, 2] && self.stride == [1, 2, 2] && self.dilation[1..] == [1, 1];
        squares && self.pads_begin == [0; 3] && self.data == [self.out[0], 2 * self.out[1], 2 * self.out[2]]
    }

    /// True if one window reads every element once.
    pub fn is_global(&self) -> bool {
        self.out_len() == 1
            && self.kernel == self.data
            && self.pads_begin == [0; 3]
            && (0..3).all(|axis| self.dilation[axis] == 1 || self.kernel[axis] == 1)
    }

    /// The reads of all windows at `tap` (row-major tap index): the common run length, and for each run the first
    /// window and the data index that it reads.
    #[inline(always)]
    pub fn runs_at(&self, tap: usize) -> (usize, impl Iterator<Item = (usize, usize)> + use<>) {
        let [_, height, width] = self.kernel;
        let taps = [tap / (height * width), tap / width % height, tap % width];
        let [depths, heights, widths] = [0, 1, 2].map(|axis| self.valid_windows(axis, taps[axis]));
        let [d, h, w] = [0, 1, 2].map(|axis| self.offset(axis, taps[axis]));
        let (grid, run) = (*self, widths.len());
        // Without windows that read data along a row there are no runs.
        let depths = if run == 0 { 0..0 } else { depths };
        let starts = depths.flat_map(move |at_d| {
            let (widths, out) = (widths.start, (at_d * grid.out[1]) * grid.out[2]);
            let plane = (at_d as isize * grid.stride[0] + d) * grid.data[1] as isize;
            heights.clone().map(move |at_h| {
                let row = (plane + at_h as isize * grid.stride[1] + h) * grid.data[2] as isize;
                let first = row + widths as isize * grid.stride[2] + w;
                (out + at_h * grid.out[2] + widths, first as usize)
            })
        });
        (run, starts)
    }

    /// The data row that window row `row` reads at tap `(d, h, ·)`: its first index.
    #[inline(always)]
    pub fn data_row(&self, row: usize, d: usize, h: usize) -> Option<usize> {
        let (at_d, at_h) = (row / self.out[1], row % self.out[1]);
        Some((self.element(0, at_d, d)? * self.data[1] + self.element(1, at_h, h)?) * self.data[2])
    }
}

/// Writes the patches of window rows `rows` of one image. Matrix row `c·taps + tap` holds what the windows read at that
/// tap of channel `c`, 0 in the padding. `pitch` is the row stride.
#[inline(always)]
pub fn gather_patches<T: Real>(grid: &Grid, x: &[T], rows: Range<usize>, patches: &mut [T], pitch: usize) {
    let (width, step) = (grid.out[2], grid.row_step());
    let [depth, height, taps_wide] = grid.kernel;
    let mut to = 0;
    for plane in x.chunks_exact(grid.data_len().max(1)) {
        for (d, h) in (0..depth).flat_map(|d| (0..height).map(move |h| (d, h))) {
            for w in 0..taps_wide {
                let valid = grid.valid_windows(2, w);
                for (i, row) in rows.clone().enumerate() {
                    let target = &mut patches[to + i * width..to + (i + 1) * width];
                    let Some(from) = grid.data_row(row, d, h).filter(|_| !valid.is_empty()) else {
                        target.fill(T::ZERO);
                        continue;
                    };
                    let first = (from as isize + grid.offset(2, w)) as usize;
                    target[..valid.start].fill(T::ZERO);
                    target[valid.end..].fill(T::ZERO);
                    let first = first.wrapping_add(valid.start * step);
                    gather_run(plane, first, step, &mut target[valid.clone()]);
                }
                to += pitch;
            }
        }
    }
}

/// Reads every `step`-th element from `first` on, filling `target`, which is not empty.
#[inline(always)]
pub(super) fn gather_run<T: Real>(plane: &[T], first: usize, step: usize, target: &mut [T]) {
    match step {
        1 => target.copy_from_slice(&plane[first..first + target.len()]),
        // A constant stride vectorises.
        2 => {
            let source = &plane[first..first + 2 * target.len() - 1];
            target.iter_mut().enumerate().for_each(|(i, v)| *v = source[2 * i]);
        }
        _ => target.iter_mut().enumerate().for_each(|(i, v)| *v = plane[first + i * step]),
    }
}

/// Adds patches to the elements that [`gather_patches`] reads.
#[inline(always)]
pub fn scatter_patches<T: Real>(grid: &Grid, patches: &[T], pitch: usize, rows: Range<usize>, x: &mut [T]) {
    let (width, step) = (grid.out[2], grid.row_step());
    let [depth, height, taps_wide] = grid.kernel;
    let mut at = 0;
    for plane in x.chunks_exact_mut(grid.data_len().max(1)) {
        for (d, h) in (0..depth).flat_map(|d| (0..height).map(move |h| (d, h))) {
            for w in 0..taps_wide {
                let valid = grid.valid_windows(2, w);
                for (i, row) in rows.clone().enumerate().filter(|_| !valid.is_empty()) {
                    let Some(from) = grid.data_row(row, d, h) else { continue };
                    let first = (from as isize + grid.offset(2, w) + (valid.start * step) as isize) as usize;
                    let source = &patches[at + i * width..at + (i + 1) * width][valid.clone()];
                    match step {
                        1 => {
                            for (x, &v) in plane[first..first + source.len()].iter_mut().zip(source) {
                                *x = *x + v;
                            }
                        }
                        _ => {
                            for (i, &v) in source.iter().enumerate() {
                                plane[first + i * step] = plane[first + i * step] + v;
                            }
                        }
                    }
                }
                at += pitch;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_windows_that_see_data_are_those_whose_element_is_inside() {
        for (n, k, s, d, b, e) in [(7, 3, 2, 1, 1, 1), (5, 2, 3, 2, 4, 0), (4, 3, 1, 1, 0, 0), (3, 3, 2, 2, 3, 3)] {
            let window = Window { strides: vec![s], pads_begin: vec![b], pads_end: vec![e], dilations: vec![d] };
            let out = (n + b + e - d * (k - 1) - 1) / s + 1;
            let grid = Grid::new(&window, &[n], &[k], &[out]).unwrap();
            for tap in 0..k {
                let inside: Vec<usize> = (0..out).filter(|&o| grid.element(2, o, tap).is_some()).collect();
                assert_eq!(
                    grid.valid_windows(2, tap).collect::<Vec<_>>(),
                    inside,
                    "{n} {k} {s} {d} {b} {e}, tap {tap}"
                );
            }
        }
    }
}
