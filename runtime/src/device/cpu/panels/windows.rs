//! Memory access pattern of 16 adjacent windows of a convolution, computed once for its shapes.
//!
//! Windows are numbered through all images, 16 to a vector. At one tap, a vector reads a few runs: lanes that one load
//! fills, since adjacent windows read adjacent elements. The pattern repeats with a period of one image, or as many as
//! fill whole vectors. With many windows per image, the last vector is padded with inactive lanes; otherwise a vector
//! may span images.

use super::LANES;
use crate::device::cpu::patches::Grid;

/// From this many windows on, every image begins with a new vector.
const MANY: usize = 512;

/// Lanes moved by one load or store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Position of lane 0, in elements from the first image of the period.
    pub at: i32,
    pub lanes: u16,
}

/// All window vectors of a convolution.
#[derive(Debug)]
pub struct Windows {
    pub taps: usize,
    /// Elements per data plane.
    pub plane: usize,
    /// Distance between the reads of adjacent windows.
    pub step: usize,
    pub count: usize,
    /// Lanes of all vectors up to the last window.
    pub columns: usize,
    /// Elements per image of the data and of the outputs, over all channels.
    sizes: [usize; 2],
    /// Images and vectors per period.
    images: usize,
    vectors: usize,
    runs: Vec<Run>,
    /// Start in `runs` for each `[vector][tap]`; tap number `taps` stands for the outputs.
    starts: Vec<u32>,
}

impl Windows {
    /// `sizes` are the elements per image of data and outputs. `None` if distances are too large.
    pub fn new(grid: &Grid, images: usize, sizes: [usize; 2]) -> Option<Windows> {
        let (count, taps) = (grid.out_len(), grid.taps());
        let [period, vectors] = match count {
            MANY.. => [1, count.div_ceil(LANES)],
            _ => {
                let period_images = LANES / (1 << count.trailing_zeros().min(4));
                [period_images, period_images * count / LANES]
            }
        };
        let columns = if count >= MANY { images * vectors * LANES } else { images * count };
        // Lane positions have 32 bits.
        let is_far = |distance: usize, times: usize| distance.checked_mul(times).is_none_or(|all| all >= 1 << 30);
        if sizes.iter().any(|size| is_far(*size, period)) || is_far(grid.row_step(), LANES) {
            return None;
        }
        let mut windows = Windows {
            taps,
            plane: grid.data_len(),
            step: grid.row_step(),
            count,
            columns,
            sizes,
            images: period,
            vectors,
            runs: Vec::new(),
            starts: vec![0],
        };
        for vector in 0..vectors {
            for tap in 0..=taps {
                let begin = windows.runs.len();
                for lane in 0..LANES {
                    let (image, window) = ((vector * LANES + lane) / count, (vector * LANES + lane) % count);
                    if image >= period {
                        continue;
                    }
                    let element = match tap < taps {
                        true => data_index(grid, window, tap)
                            .map(|at| image * sizes[0] + at)
                            .map(|at| (at, grid.row_step())),
                        false => Some((image * sizes[1] + window, 1)),
                    };
                    let Some((at, step)) = element else { continue };
                    let at = at as i32 - (lane * step) as i32;
                    match windows.runs[begin..].iter_mut().find(|run| run.at == at) {
                        Some(run) => run.lanes |= 1 << lane,
                        None => windows.runs.push(Run { at, lanes: 1 << lane }),
                    }
                }
                windows.starts.push(windows.runs.len() as u32);
            }
        }
        Some(windows)
    }

    /// Images and vectors per period.
    pub fn period(&self) -> [usize; 2] {
        [self.images, self.vectors]
    }

    /// A vector's index in the period, and the start of its period in data and outputs.
    pub fn locate(&self, vector: usize) -> (usize, [usize; 2]) {
        let image = vector / self.vectors * self.images;
        (vector % self.vectors, self.sizes.map(|size| image * size))
    }

    /// The reads of a vector of the period at a tap.
    #[inline]
    pub fn reads(&self, vector: usize, tap: usize) -> &[Run] {
        let at = vector * (self.taps + 1) + tap;
        &self.runs[self.starts[at] as usize..self.starts[at + 1] as usize]
    }

    /// The outputs of a vector of the period.
    pub fn results(&self, vector: usize) -> &[Run] {
        self.reads(vector, self.taps)
    }
}

/// Plane index that a window reads at a tap; `None` in the padding.
fn data_index(grid: &Grid, window: usize, tap: usize) -> Option<usize> {
    let unravel = |at: usize, [_, height, width]: [usize; 3]| [at / (height * width), at / width % height, at % width];
    let (at, taps) = (unravel(window, grid.out), unravel(tap, grid.kernel));
    let [d, h, w] = [0, 1, 2].map(|axis| grid.element(axis, at[axis], taps[axis]));
    Some((d? * grid.data[1] + h?) * grid.data[2] + w?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use compiler::op::Window;

    fn grid(n: usize, kernel: usize, stride: usize, pad: usize) -> Grid {
        let window = Window {
            strides: vec![stride; 2],
            pads_begin: vec![pad; 2],
            pads_end: vec![pad; 2],
            dilations: vec![1; 2],
        };
        Grid::new(&window, &[n; 2], &[kernel; 2], &[(n + 2 * pad - kernel) / stride + 1; 2]).unwrap()
    }

    #[test]
    fn a_row_of_windows_sees_one_run_less_what_is_outside() {
        let windows = Windows::new(&grid(16, 3, 1, 1), 2, [256, 256]).unwrap();
        assert_eq!((windows.images, windows.vectors, windows.columns), (1, 16, 512));
        // The first row has only padding above it, and its first window has padding to its left.
        assert_eq!(windows.reads(0, 1), []);
        assert_eq!(windows.reads(0, 3), [Run { at: -1, lanes: 0xfffe }]);
        assert_eq!(windows.reads(1, 0), [Run { at: -1, lanes: 0xfffe }]);
        assert_eq!(windows.reads(1, 8), [Run { at: 33, lanes: 0x7fff }]);
        assert_eq!(windows.results(3), [Run { at: 48, lanes: 0xffff }]);
        assert_eq!(windows.locate(17), (1, [256, 256]));
    }

    #[test]
    fn windows_that_are_very_far_apart_are_left_to_others() {
        let is_rejected = |stride: usize| {
            let window = Window {
                strides: vec![1, stride],
                pads_begin: vec![1; 2],
                pads_end: vec![1; 2],
                dilations: vec![1; 2],
            };
            Windows::new(&Grid::new(&window, &[3, 4], &[3, 3], &[3, 1]).unwrap(), 8, [12, 3]).is_none()
        };
        assert_eq!([1 << 25, 1 << 26, (1 << 30) - 1].map(is_rejected), [false, true, true]);
    }

    #[test]
    fn small_images_share_vectors() {
        let windows = Windows::new(&grid(2, 1, 1, 0), 6, [12, 8]).unwrap();
        assert_eq!((windows.images, windows.vectors, windows.columns), (4, 1, 24));
        let runs = |size: i32| [0, 1, 2, 3].map(|image| Run { at: image * (size - 4), lanes: 0xf << (4 * image) });
        assert_eq!(windows.reads(0, 0), runs(12));
        assert_eq!(windows.results(0), runs(8));
        assert_eq!(windows.locate(1), (0, [48, 32]));
    }

    #[test]
    fn every_lane_of_every_vector_is_where_its_window_sees_data() {
        for (n, kernel, stride, pad) in
            [(7, 3, 1, 1), (23, 5, 1, 2), (25, 3, 1, 0), (9, 3, 2, 1), (50, 4, 2, 1), (30, 2, 3, 0)]
        {
            let (grid, images) = (grid(n, kernel, stride, pad), 5);
            let windows = Windows::new(&grid, images, [n * n, grid.out_len()]).unwrap();
            let mut window_count = 0;
            for column in 0..windows.columns {
                let (vector, begins) = windows.locate(column / LANES);
                let lane = column % LANES;
                let at = |runs: &[Run], step: usize| {
                    let mut lane_runs = runs.iter().filter(|run| run.lanes >> lane & 1 == 1);
                    let element = lane_runs.next().map(|run| (run.at + (lane * step) as i32) as usize);
                    assert_eq!(lane_runs.next(), None);
                    element
                };
                let Some(result) = at(windows.results(vector), 1) else { continue };
                window_count += 1;
                let (image, window) = ((begins[1] + result) / grid.out_len(), (begins[1] + result) % grid.out_len());
                for tap in 0..windows.taps {
                    let index = at(windows.reads(vector, tap), stride).map(|at| begins[0] + at);
                    assert_eq!(index, data_index(&grid, window, tap).map(|at| image * n * n + at), "{column} {tap}");
                }
            }
            assert_eq!(window_count, images * grid.out_len());
        }
    }
}
