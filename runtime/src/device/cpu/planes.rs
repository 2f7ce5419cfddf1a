//! Rearranges planes for sliding windows: padding is included, and elements are grouped by index modulo stride. For any
//! stride and dilation, all windows of a plane then read one contiguous run per tap. Windows starting in the padding
//! between two rows are computed too and discarded.
//!
//! ```text
//! 5 data, stride 2, one of padding:    0 a b c d e 0    every second one:   0 b d 0    and   a c e
//! taps at 0, 1, 2 of the windows:      0 b d            a c e               b d 0
//! ```

use super::patches::{Grid, gather_run};
use super::real::Real;

pub(super) const LANES: usize = 16;

/// Limits on the size of a rearranged plane: factor of the original size, and additional elements.
const MOST_TIMES: usize = 8;
const MOST_MORE: usize = 1 << 16;

/// Start of the run that the windows read at a tap, and the tap.
pub(super) type TapRun = (usize, usize);

/// A run of a plane: offset in the rearranged plane, offset in the plane, length.
pub(super) type Run = (usize, usize, usize);

/// The rearranged layout of a convolution's planes.
pub(super) struct Planes {
    pub channels: usize,
    /// Elements of a data plane and of an output plane.
    pub data_len: usize,
    pub out_len: usize,
    /// Stride between neighbours of a run in the plane.
    pub step: usize,
    /// Number and size of the groups by index modulo stride.
    pub group_count: usize,
    pub group_len: usize,
    pub data: Vec<Run>,
    pub results: Vec<Run>,
    /// Windows from the first to the last, including those between rows.
    pub windows: usize,
    pub tap_runs: Vec<TapRun>,
    /// For each group, the runs of windows that read its elements; windows are stored after `zeros` zeros.
    pub readers: Vec<Vec<TapRun>>,
    pub zeros: usize,
}

impl Planes {
    /// `None` if padding or distances are too large, or there are too few windows: im2col is faster then.
    pub fn new(grid: &Grid, channels: usize) -> Option<Planes> {
        let at = |axis: usize, tap: usize| tap * grid.dilation[axis] as usize;
        let stride = grid.stride.map(|stride| stride as usize);
        let remainders: [Vec<usize>; 3] = [0, 1, 2].map(|axis| {
            let mut distinct: Vec<usize> = (0..grid.kernel[axis]).map(|tap| at(axis, tap) % stride[axis]).collect();
            distinct.sort_unstable();
            distinct.dedup();
            distinct
        });
        let size = [0, 1, 2].map(|axis| grid.out[axis] + at(axis, grid.kernel[axis] - 1) / stride[axis]);
        let group_count: usize = remainders.iter().map(Vec::len).product();
        let group_len = size
            .iter()
            .try_fold(1usize, |distinct, &size| distinct.checked_mul(size))?
            .checked_next_multiple_of(LANES)?;
        let max_elements = (grid.data_len() + grid.out_len()).checked_mul(MOST_TIMES)? + MOST_MORE;
        if group_len.checked_mul(group_count)? > max_elements || group_len > MOST_TIMES * grid.out_len().max(LANES) {
            return None;
        }
        let group_offset = |position: [usize; 3]| (position[0] * size[1] + position[1]) * size[2] + position[2];
        let group_of = |index: [usize; 3]| (index[0] * remainders[1].len() + index[1]) * remainders[2].len() + index[2];
        let (mut tap_runs, mut offsets) = (Vec::new(), vec![Vec::new(); group_count]);
        for tap in 0..grid.taps() {
            let taps =
                [tap / (grid.kernel[1] * grid.kernel[2]), tap / grid.kernel[2] % grid.kernel[1], tap % grid.kernel[2]];
            let index = [0, 1, 2].map(|axis| {
                let remainder = at(axis, taps[axis]) % stride[axis];
                remainders[axis].iter().position(|&distinct| distinct == remainder).unwrap_or(0)
            });
            let offset = group_offset([0, 1, 2].map(|axis| at(axis, taps[axis]) / stride[axis]));
            tap_runs.push((group_of(index) * group_len + offset, tap));
            offsets[group_of(index)].push((offset, tap));
        }
        let zeros = offsets.iter().flatten().map(|&(offset, _)| offset).max().unwrap_or(0);
        let readers =
            offsets.into_iter().map(|offsets| offsets.into_iter().map(|(offset, tap)| (zeros - offset, tap)).collect());
        // Along an axis, the elements of a group that are data, and the data index of the first one.
        let data_range = |axis: usize, remainder: usize| {
            let (before, stride) = (grid.pads_begin[axis] as usize, stride[axis]);
            let first = before.saturating_sub(remainder).div_ceil(stride);
            let end = (grid.data[axis] + before).saturating_sub(remainder).div_ceil(stride).min(size[axis]);
            (first..end.max(first), (first * stride + remainder).wrapping_sub(before))
        };
        let mut data = Vec::new();
        for (i, &d) in remainders[0].iter().enumerate() {
            for (j, &h) in remainders[1].iter().enumerate() {
                for (l, &w) in remainders[2].iter().enumerate() {
                    let [(depths, from_d), (heights, from_h), (widths, from_w)] =
                        [data_range(0, d), data_range(1, h), data_range(2, w)];
                    if widths.is_empty() {
                        continue;
                    }
                    for (a, p) in depths.enumerate() {
                        for (b, q) in heights.clone().enumerate() {
                            let row = (from_d + a * stride[0]) * grid.data[1] + from_h + b * stride[1];
                            let to = group_of([i, j, l]) * group_len + group_offset([p, q, widths.start]);
                            data.push((to, row * grid.data[2] + from_w, widths.len()));
                        }
                    }
                }
            }
        }
        let rows = (0..grid.out[0]).flat_map(|d| (0..grid.out[1]).map(move |h| (d, h)));
        let result = |(d, h)| (group_offset([d, h, 0]), (d * grid.out[1] + h) * grid.out[2], grid.out[2]);
        Some(Planes {
            channels,
            data_len: grid.data_len(),
            out_len: grid.out_len(),
            step: stride[2],
            group_count,
            group_len,
            data,
            results: rows.map(result).collect(),
            windows: group_offset([0, 1, 2].map(|axis| grid.out[axis] - 1)) + 1,
            tap_runs,
            readers: readers.collect(),
            zeros,
        })
    }

    /// Elements of rearranged data, with padding for a vector read past the end.
    pub fn data_room(&self) -> usize {
        self.group_count * self.group_len + LANES
    }

    /// Number of windows rounded up to whole vectors.
    pub fn whole_windows(&self) -> usize {
        self.windows.next_multiple_of(LANES)
    }

    /// Elements of windows after their leading zeros, as far as the reads of a group reach.
    pub fn window_room(&self) -> usize {
        self.zeros + self.group_len
    }

    pub fn workspace<T>(&self) -> usize {
        (self.data_room() + self.window_room()) * size_of::<T>() + self.tap_runs.len() * LANES * size_of::<f64>()
    }
}

/// Copies runs of a plane to their rearranged positions.
#[inline(always)]
pub(super) fn rearrange<T: Real>(runs: &[Run], step: usize, plane: &[T], rearranged: &mut [T]) {
    for &(to, from, count) in runs {
        gather_run(plane, from, step, &mut rearranged[to..to + count]);
    }
}

/// Copies runs of a plane back.
#[inline(always)]
pub(super) fn restore<T: Real>(runs: &[Run], step: usize, rearranged: &[T], plane: &mut [T]) {
    for &(from, to, count) in runs {
        let from = &rearranged[from..from + count];
        match step {
            1 => plane[to..to + count].copy_from_slice(from),
            2 => {
                let to = &mut plane[to..to + 2 * count - 1];
                from.iter().enumerate().for_each(|(i, &from)| to[2 * i] = from);
            }
            _ => from.iter().enumerate().for_each(|(i, &from)| plane[to + i * step] = from),
        }
    }
}
