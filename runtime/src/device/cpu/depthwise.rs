//! Convolution with a filter of its own for every channel: a plane at a time, tap by tap, without patches.

use super::patches::Grid;
use super::real::Real;
use super::sum::sum_of_pairs;
use super::wide::wide;

wide! {
    /// `y` from `x` and `w`, for `[N, C]` planes.
    pub fn forward[T: Real](grid: &Grid, channels: usize, x: &[T], w: &[T], y: &mut [T]) {
        let step = grid.row_step();
        for (i, y) in y.chunks_exact_mut(grid.out_len().max(1)).enumerate() {
            let x = &x[i * grid.data_len()..(i + 1) * grid.data_len()];
            let w = &w[i % channels * grid.taps()..(i % channels + 1) * grid.taps()];
            y.fill(T::ZERO);
            for (tap, &factor) in w.iter().enumerate() {
                let (run, starts) = grid.runs_at(tap);
                for (to, from) in starts {
                    let (y, x) = (&mut y[to..to + run], &x[from..from + (run - 1) * step + 1]);
                    if step == 1 {
                        for (y, &x) in y.iter_mut().zip(x) {
                            *y = *y + x * factor;
                        }
                    } else {
                        for (i, y) in y.iter_mut().enumerate() {
                            *y = *y + x[i * step] * factor;
                        }
                    }
                }
            }
        }
    }
}

wide! {
    /// `dx` from `dy` and `w`.
    pub fn input_grad[T: Real](grid: &Grid, channels: usize, dy: &[T], w: &[T], dx: &mut [T]) {
        let step = grid.row_step();
        dx.fill(T::ZERO);
        for (i, dy) in dy.chunks_exact(grid.out_len().max(1)).enumerate() {
            let dx = &mut dx[i * grid.data_len()..(i + 1) * grid.data_len()];
            let w = &w[i % channels * grid.taps()..(i % channels + 1) * grid.taps()];
            for (tap, &factor) in w.iter().enumerate() {
                let (run, starts) = grid.runs_at(tap);
                for (to, from) in starts {
                    let (dy, dx) = (&dy[to..to + run], &mut dx[from..from + (run - 1) * step + 1]);
                    if step == 1 {
                        for (dx, &dy) in dx.iter_mut().zip(dy) {
                            *dx = *dx + dy * factor;
                        }
                    } else {
                        for (i, &dy) in dy.iter().enumerate() {
                            dx[i * step] = dx[i * step] + dy * factor;
                        }
                    }
                }
            }
        }
    }
}

wide! {
    /// `dw` from `dy` and `x`; `sums` holds one number for each element of `dw`.
    pub fn weight_grad[T: Real](grid: &Grid, channels: usize, dy: &[T], x: &[T], dw: &mut [T], sums: &mut [f64], add: bool) {
        let step = grid.row_step();
        sums.fill(0.0);
        for (i, dy) in dy.chunks_exact(grid.out_len().max(1)).enumerate() {
            let x = &x[i * grid.data_len()..(i + 1) * grid.data_len()];
            let sums = &mut sums[i % channels * grid.taps()..(i % channels + 1) * grid.taps()];
            for (tap, sum) in sums.iter_mut().enumerate() {
                let (run, starts) = grid.runs_at(tap);
                for (to, from) in starts {
                    let (dy, x) = (&dy[to..to + run], &x[from..from + (run - 1) * step + 1]);
                    *sum += if step == 1 {
                        sum_of_pairs(dy, x, |dy, x| dy * x)
                    } else {
                        dy.iter().enumerate().map(|(i, dy)| dy.wide() * x[i * step].wide()).sum()
                    };
                }
            }
        }
        for (dw, &sum) in dw.iter_mut().zip(&*sums) {
            *dw = T::of(if add { dw.wide() + sum } else { sum });
        }
    }
}
