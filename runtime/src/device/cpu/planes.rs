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
pub(super) type Seen = (usize, usize);

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
    pub parts: usize,
    pub part: usize,
    pub data: Vec<Run>,
    pub results: Vec<Run>,
    /// Windows from the first to the last, including those between rows.
    pub windows: usize,
    pub seen: Vec<Seen>,
    /// For each group, the runs of windows that read its elements; windows are stored after `zeros` zeros.
    pub seeing: Vec<Vec<Seen>>,
    pub zeros: usize,
}

impl Planes {
    /// `None` if padding or distances are too large, or there are too few windows: im2col is faster then.
    pub fn new(grid: &Grid, channels: usize) -> Option<Planes> {
        let at = |axis: usize, tap: usize| tap * grid.dilation[axis] as usize;
        let stride = grid.stride.map(|stride| stride as usize);
        let remainders: [Vec<usize>; 3] = [0, 1, 2].map(|axis| {
            let mut all: Vec<usize> = (0..grid.kernel[axis]).map(|tap| at(axis, tap) % stride[axis]).collect();
            all.sort_unstable();
            all.dedup();
            all
        });
        let size = [0, 1, 2].map(|axis| grid.out[axis] + at(axis, grid.kernel[axis] - 1) / stride[axis]);
        let parts: usize = remainders.iter().map(Vec::len).product();
        let part = size.iter().try_fold(1usize, |all, &size| all.checked_mul(size))?.checked_next_multiple_of(LANES)?;
        let most = (grid.data_len() + grid.out_len()).checked_mul(MOST_TIMES)? + MOST_MORE;
        if part.checked_mul(parts)? > most || part > MOST_TIMES * grid.out_len().max(LANES) {
            return None;
        }
        let inside = |place: [usize; 3]| (place[0] * size[1] + place[1]) * size[2] + place[2];
        let of_part = |index: [usize; 3]| (index[0] * remainders[1].len() + index[1]) * remainders[2].len() + index[2];
        let (mut seen, mut ways) = (Vec::new(), vec![Vec::new(); parts]);
        for tap in 0..grid.taps() {
            let taps =
                [tap / (grid.kernel[1] * grid.kernel[2]), tap / grid.kernel[2] % grid.kernel[1], tap % grid.kernel[2]];
            let index = [0, 1, 2].map(|axis| {
                let remainder = at(axis, taps[axis]) % stride[axis];
                remainders[axis].iter().position(|&known| known == remainder).unwrap_or(0)
            });
            let way = inside([0, 1, 2].map(|axis| at(axis, taps[axis]) / stride[axis]));
            seen.push((of_part(index) * part + way, tap));
            ways[of_part(index)].push((way, tap));
        }
        let zeros = ways.iter().flatten().map(|&(way, _)| way).max().unwrap_or(0);
        let seeing = ways.into_iter().map(|ways| ways.into_iter().map(|(way, tap)| (zeros - way, tap)).collect());
        // Along an axis, the elements of a group that are data, and the data index of the first one.
        let known = |axis: usize, remainder: usize| {
            let (before, stride) = (grid.before[axis] as usize, stride[axis]);
            let first = before.saturating_sub(remainder).div_ceil(stride);
            let end = (grid.data[axis] + before).saturating_sub(remainder).div_ceil(stride).min(size[axis]);
            (first..end.max(first), (first * stride + remainder).wrapping_sub(before))
        };
        let mut data = Vec::new();
        for (i, &d) in remainders[0].iter().enumerate() {
            for (j, &h) in remainders[1].iter().enumerate() {
                for (l, &w) in remainders[2].iter().enumerate() {
                    let [(deep, from_d), (high, from_h), (wide, from_w)] = [known(0, d), known(1, h), known(2, w)];
                    if wide.is_empty() {
                        continue;
                    }
                    for (a, p) in deep.enumerate() {
                        for (b, q) in high.clone().enumerate() {
                            let row = (from_d + a * stride[0]) * grid.data[1] + from_h + b * stride[1];
                            let to = of_part([i, j, l]) * part + inside([p, q, wide.start]);
                            data.push((to, row * grid.data[2] + from_w, wide.len()));
                        }
                    }
                }
            }
        }
        let rows = (0..grid.out[0]).flat_map(|d| (0..grid.out[1]).map(move |h| (d, h)));
        let result = |(d, h)| (inside([d, h, 0]), (d * grid.out[1] + h) * grid.out[2], grid.out[2]);
        Some(Planes {
            channels,
            data_len: grid.data_len(),
            out_len: grid.out_len(),
            step: stride[2],
            parts,
            part,
            data,
            results: rows.map(result).collect(),
            windows: inside([0, 1, 2].map(|axis| grid.out[axis] - 1)) + 1,
            seen,
            seeing: seeing.collect(),
            zeros,
        })
    }

    /// Elements of rearranged data, with padding for a vector read past the end.
    pub fn data_room(&self) -> usize {
        self.parts * self.part + LANES
    }

    /// Number of windows rounded up to whole vectors.
    pub fn whole_windows(&self) -> usize {
        self.windows.next_multiple_of(LANES)
    }

    /// Elements of windows after their leading zeros, as far as the reads of a group reach.
    pub fn window_room(&self) -> usize {
        self.zeros + self.part
    }

    pub fn workspace<T>(&self) -> usize {
        (self.data_room() + self.window_room()) * size_of::<T>() + self.seen.len() * LANES * size_of::<f64>()
    }
}

/// Copies runs of a plane to their rearranged positions.
#[inline(always)]
pub(super) fn lay<T: Real>(runs: &[Run], step: usize, plane: &[T], laid: &mut [T]) {
    for &(to, from, count) in runs {
        gather_run(plane, from, step, &mut laid[to..to + count]);
    }
}

/// Copies runs of a plane back.
#[inline(always)]
pub(super) fn take<T: Real>(runs: &[Run], step: usize, laid: &[T], plane: &mut [T]) {
    for &(from, to, count) in runs {
        let from = &laid[from..from + count];
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
