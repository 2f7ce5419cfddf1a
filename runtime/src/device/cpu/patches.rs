//! Windows over one to three spatial dims, and the matrix of patches (im2col) that turns a convolution into a product.
//!
//! One and two spatial dims are three with leading dims of 1, so everything here has one shape of loop.

use super::real::Real;
use compiler::op::Window;
use std::ops::Range;

/// Where windows lie over the data.
#[derive(Clone, Copy, Debug)]
pub struct Grid {
    /// Sizes of the data.
    pub data: [usize; 3],
    /// Sizes of a window.
    pub kernel: [usize; 3],
    /// How many windows there are.
    pub out: [usize; 3],
    pub(super) stride: [isize; 3],
    pub(super) dilation: [isize; 3],
    pub(super) before: [isize; 3],
}

impl Grid {
    /// The grid of a window over `data` with `out` places; the lists have one entry a spatial dim, at most three.
    pub fn new(window: &Window, data: &[usize], kernel: &[usize], out: &[usize]) -> Option<Grid> {
        let missing = 3usize.checked_sub(data.len())?;
        let three = |list: &[usize], fill: usize| -> [usize; 3] {
            std::array::from_fn(|axis| axis.checked_sub(missing).map_or(fill, |a| list[a]))
        };
        // Distances that do not fit would leave any data in memory; the reference knows what to do with them.
        let near = |list: [usize; 3]| list.iter().all(|&v| v < 1 << 30).then(|| list.map(|v| v as isize));
        Some(Grid {
            data: near(three(data, 1))?.map(|v| v as usize),
            kernel: near(three(kernel, 1))?.map(|v| v as usize),
            out: near(three(out, 1))?.map(|v| v as usize),
            stride: near(three(&window.strides, 1))?,
            dilation: near(three(&window.dilations, 1))?,
            before: near(three(&window.pads_begin, 0))?,
        })
    }

    /// The index in the data that window `at` sees at `tap`, along one axis, if it is inside.
    #[inline(always)]
    pub fn element(&self, axis: usize, at: usize, tap: usize) -> Option<usize> {
        let index = at as isize * self.stride[axis] + self.offset(axis, tap);
        (0..self.data[axis] as isize).contains(&index).then_some(index as usize)
    }

    /// The index that window 0 sees at `tap`: below zero in the padding.
    #[inline(always)]
    pub fn offset(&self, axis: usize, tap: usize) -> isize {
        tap as isize * self.dilation[axis] - self.before[axis]
    }

    /// The windows that see data at `tap`, along one axis.
    #[inline(always)]
    pub fn seeing(&self, axis: usize, tap: usize) -> Range<usize> {
        let (offset, stride) = (self.offset(axis, tap), self.stride[axis]);
        let from = (-offset).max(0) as usize;
        let from = from.div_ceil(stride as usize);
        let room = self.data[axis] as isize - offset;
        let to = if room > 0 { ((room - 1) / stride) as usize + 1 } else { 0 };
        let to = to.min(self.out[axis]);
        from.min(to)..to
    }

    /// Distance between the elements that neighbouring windows of a row see.
    pub fn row_step(&self) -> usize {
        self.stride[2] as usize
    }

    /// Elements of one plane of data.
    pub fn data_len(&self) -> usize {
        self.data.iter().product()
    }

    /// Taps of a window.
    pub fn taps(&self) -> usize {
        self.kernel.iter().product()
    }

    /// Windows.
    pub fn out_len(&self) -> usize {
        self.out.iter().product()
    }

    /// Rows of windows.
    pub fn rows(&self) -> usize {
        self.out[0] * self.out[1]
    }

    /// Whether each window sees its own element and nothing else.
    pub fn is_pointwise(&self) -> bool {
        self.taps() == 1 && self.stride == [1; 3] && self.before == [0; 3] && self.data == self.out
    }

    /// The grid whose windows see at each tap, in the opposite order, the windows of this one that see their element: data and windows
    /// change places. Only where windows stand at every element.
    pub fn flipped(&self) -> Option<Grid> {
        let before =
            std::array::from_fn(|axis| self.dilation[axis] * (self.kernel[axis] as isize - 1) - self.before[axis]);
        (self.stride == [1; 3]).then_some(Grid { data: self.out, out: self.data, before, ..*self })
    }

    /// The tiles of 4 × 4 data that make 2 × 2 neighbouring results each, of filters of 3 × 3 that stand at every element of images; the
    /// last of a row and of a column may make fewer.
    pub fn tiles(&self) -> Option<Grid> {
        let is_plain = self.kernel == [1, 3, 3] && self.stride == [1; 3] && self.dilation[1..] == [1, 1];
        let tiled = Grid { kernel: [1, 4, 4], out: self.pairs(), stride: [1, 2, 2], dilation: [1; 3], ..*self };
        (is_plain && self.before[0] == 0 && self.data[0] == self.out[0]).then_some(tiled)
    }

    /// The same tiles as windows over the results.
    pub fn pairs_of_results(&self) -> Grid {
        let (kernel, stride) = ([1, 2, 2], [1, 2, 2]);
        Grid { data: self.out, kernel, out: self.pairs(), stride, dilation: [1; 3], before: [0; 3] }
    }

    fn pairs(&self) -> [usize; 3] {
        [self.out[0], self.out[1].div_ceil(2), self.out[2].div_ceil(2)]
    }

    /// Whether windows are squares of two by two that share nothing and leave nothing out.
    pub fn is_of_squares(&self) -> bool {
        let squares = self.kernel == [1, 2, 2] && self.stride == [1, 2, 2] && self.dilation[1..] == [1, 1];
        squares && self.before == [0; 3] && self.data == [self.out[0], 2 * self.out[1], 2 * self.out[2]]
    }

    /// Whether one window sees all the data, each element once.
    pub fn is_global(&self) -> bool {
        self.out_len() == 1
            && self.kernel == self.data
            && self.before == [0; 3]
            && (0..3).all(|axis| self.dilation[axis] == 1 || self.kernel[axis] == 1)
    }

    /// What the windows see at `tap`, the taps counted in row-major order: runs of one length over neighbouring windows,
    /// each with the index of its first window and of the element in the plane that this one sees.
    #[inline(always)]
    pub fn runs_at(&self, tap: usize) -> (usize, impl Iterator<Item = (usize, usize)> + use<>) {
        let [_, height, width] = self.kernel;
        let taps = [tap / (height * width), tap / width % height, tap % width];
        let [depths, heights, widths] = [0, 1, 2].map(|axis| self.seeing(axis, taps[axis]));
        let [d, h, w] = [0, 1, 2].map(|axis| self.offset(axis, taps[axis]));
        let (grid, run) = (*self, widths.len());
        // Without a window that sees data in its row, there is no run at all.
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

    /// Where the row of windows `row` finds tap `(d, h, ·)` in its plane: the first index of a row of data.
    #[inline(always)]
    pub fn data_row(&self, row: usize, d: usize, h: usize) -> Option<usize> {
        let (at_d, at_h) = (row / self.out[1], row % self.out[1]);
        Some((self.element(0, at_d, d)? * self.data[1] + self.element(1, at_h, h)?) * self.data[2])
    }
}

/// Writes the patches of rows of windows `rows` of one image: row `c·taps + tap` of the matrix holds what the windows see
/// at that tap of channel `c`, or 0 in the padding. Rows of the matrix are `pitch` apart.
#[inline(always)]
pub fn gather_patches<T: Real>(grid: &Grid, x: &[T], rows: Range<usize>, patches: &mut [T], pitch: usize) {
    let (width, step) = (grid.out[2], grid.row_step());
    let [depth, height, taps_wide] = grid.kernel;
    let mut to = 0;
    for plane in x.chunks_exact(grid.data_len().max(1)) {
        for (d, h) in (0..depth).flat_map(|d| (0..height).map(move |h| (d, h))) {
            for w in 0..taps_wide {
                let inside = grid.seeing(2, w);
                for (i, row) in rows.clone().enumerate() {
                    let target = &mut patches[to + i * width..to + (i + 1) * width];
                    let Some(from) = grid.data_row(row, d, h).filter(|_| !inside.is_empty()) else {
                        target.fill(T::ZERO);
                        continue;
                    };
                    let first = (from as isize + grid.offset(2, w)) as usize;
                    target[..inside.start].fill(T::ZERO);
                    target[inside.end..].fill(T::ZERO);
                    let first = first.wrapping_add(inside.start * step);
                    gather_run(plane, first, step, &mut target[inside.clone()]);
                }
                to += pitch;
            }
        }
    }
}

/// Reads every `step`-th element of a plane from `first` on, as many as there is room for, and one at least.
#[inline(always)]
pub(super) fn gather_run<T: Real>(plane: &[T], first: usize, step: usize, target: &mut [T]) {
    match step {
        1 => target.copy_from_slice(&plane[first..first + target.len()]),
        // A distance that the compiler knows.
        2 => {
            let source = &plane[first..first + 2 * target.len() - 1];
            target.iter_mut().enumerate().for_each(|(i, v)| *v = source[2 * i]);
        }
        _ => target.iter_mut().enumerate().for_each(|(i, v)| *v = plane[first + i * step]),
    }
}

/// Adds patches back to where [`gather_patches`] took them from.
#[inline(always)]
pub fn scatter_patches<T: Real>(grid: &Grid, patches: &[T], pitch: usize, rows: Range<usize>, x: &mut [T]) {
    let (width, step) = (grid.out[2], grid.row_step());
    let [depth, height, taps_wide] = grid.kernel;
    let mut at = 0;
    for plane in x.chunks_exact_mut(grid.data_len().max(1)) {
        for (d, h) in (0..depth).flat_map(|d| (0..height).map(move |h| (d, h))) {
            for w in 0..taps_wide {
                let inside = grid.seeing(2, w);
                for (i, row) in rows.clone().enumerate().filter(|_| !inside.is_empty()) {
                    let Some(from) = grid.data_row(row, d, h) else { continue };
                    let first = (from as isize + grid.offset(2, w) + (inside.start * step) as isize) as usize;
                    let source = &patches[at + i * width..at + (i + 1) * width][inside.clone()];
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
                assert_eq!(grid.seeing(2, tap).collect::<Vec<_>>(), inside, "{n} {k} {s} {d} {b} {e}, tap {tap}");
            }
        }
    }
}
