//! Depthwise convolution, one plane at a time, without patches.
//!
//! For each tap, the windows of a plane read one contiguous run of the rearranged data; see [`planes`](super::planes).

use super::FastKernel;
use super::conv_role::Role;
use super::patches::Grid;
use super::planes::{LANES, Planes, TapRun, rearrange, restore};
use super::real::Real;
use super::wide::wide;
use bytemuck::{cast_slice, cast_slice_mut};

/// Vectors computed together, to hide the addition latency.
const TOGETHER: usize = 4;
/// Products per lane that are summed in the data type before accumulating in `f64`.
const SUMMED: usize = 64;

/// A depthwise convolution over `channels` channels.
pub fn kernel<T: Real>(role: Role, grid: &Grid, channels: usize) -> Option<FastKernel> {
    let planes = Planes::new(grid, channels)?;
    let bytes = planes.workspace::<T>();
    let fast = FastKernel::adding(role == Role::WeightGrad, move |inputs, outputs, workspace, add| {
        let (sums, buffers) = workspace.split_at_mut(planes.tap_runs.len() * LANES * size_of::<f64>());
        let buffers = &mut cast_slice_mut::<u8, T>(buffers)[..planes.data_room() + planes.window_room()];
        buffers.fill(T::ZERO);
        let (data, windows) = buffers.split_at_mut(planes.data_room());
        let (a, b) = (cast_slice::<u8, T>(inputs[0]), cast_slice::<u8, T>(inputs[1]));
        let result = cast_slice_mut::<u8, T>(outputs[0]);
        match role {
            Role::Forward => forward(&planes, a, b, result, data, windows),
            Role::InputGrad => input_grad(&planes, a, b, result, data, windows),
            Role::WeightGrad => weight_grad(&planes, a, b, result, [data, windows], cast_slice_mut(sums), add),
        }
    });
    Some(fast.with_workspace(bytes))
}

wide! {
    // The loop over channels is outermost to keep the filter in registers.
    fn forward[T: Real](planes: &Planes, x: &[T], w: &[T], y: &mut [T], data: &mut [T], windows: &mut [T]) {
        let (taps, images) = (planes.tap_runs.len(), y.len() / (planes.channels * planes.out_len));
        let windows = &mut windows[..planes.whole_windows()];
        for channel in 0..planes.channels {
            let w = &w[channel * taps..(channel + 1) * taps];
            for plane in (0..images).map(|image| image * planes.channels + channel) {
                rearrange(&planes.data, planes.step, &x[plane * planes.data_len..(plane + 1) * planes.data_len], data);
                correlate(&planes.tap_runs, w, data, windows);
                let y = &mut y[plane * planes.out_len..(plane + 1) * planes.out_len];
                restore(&planes.results, 1, windows, y);
            }
        }
    }
}

wide! {
    fn input_grad[T: Real](planes: &Planes, dy: &[T], w: &[T], dx: &mut [T], data: &mut [T], windows: &mut [T]) {
        let (taps, images) = (planes.tap_runs.len(), dy.len() / (planes.channels * planes.out_len));
        // For elements that no window reads.
        dx.fill(T::ZERO);
        for channel in 0..planes.channels {
            let w = &w[channel * taps..(channel + 1) * taps];
            for plane in (0..images).map(|image| image * planes.channels + channel) {
                let dy = &dy[plane * planes.out_len..(plane + 1) * planes.out_len];
                rearrange(&planes.results, 1, dy, &mut windows[planes.zeros..]);
                for (group, tap_runs) in data.chunks_exact_mut(planes.group_len).zip(&planes.readers) {
                    correlate(tap_runs, w, windows, group);
                }
                let dx = &mut dx[plane * planes.data_len..(plane + 1) * planes.data_len];
                restore(&planes.data, planes.step, data, dx);
            }
        }
    }
}

wide! {
    // Each tap's products are summed in lanes over all images, and the lanes at the end.
    fn weight_grad[T: Real](planes: &Planes, dy: &[T], x: &[T], dw: &mut [T], buffers: [&mut [T]; 2], sums: &mut [f64], add: bool) {
        let (taps, images) = (planes.tap_runs.len(), dy.len() / (planes.channels * planes.out_len));
        let [data, windows] = buffers;
        let windows = &mut windows[..planes.whole_windows()];
        for channel in 0..planes.channels {
            sums.fill(0.0);
            for plane in (0..images).map(|image| image * planes.channels + channel) {
                rearrange(&planes.data, planes.step, &x[plane * planes.data_len..(plane + 1) * planes.data_len], data);
                rearrange(&planes.results, 1, &dy[plane * planes.out_len..(plane + 1) * planes.out_len], windows);
                for (&(start, _), sums) in planes.tap_runs.iter().zip(sums.chunks_exact_mut(LANES)) {
                    add_products(windows, &data[start..start + windows.len()], sums);
                }
            }
            let gradients = dw[channel * taps..(channel + 1) * taps].iter_mut();
            for (dw, sums) in gradients.zip(sums.chunks_exact(LANES)) {
                let sum: f64 = sums.iter().sum();
                *dw = T::of(if add { dw.wide() + sum } else { sum });
            }
        }
    }
}

/// `to[i] = Σ w[tap] · from[start + i]`, in tap order.
#[inline(always)]
fn correlate<T: Real>(tap_runs: &[TapRun], w: &[T], from: &[T], to: &mut [T]) {
    let mut at = 0;
    let mut groups = to.chunks_exact_mut(TOGETHER * LANES);
    for to in &mut groups {
        let mut sums = [[T::ZERO; LANES]; TOGETHER];
        for &(start, tap) in tap_runs {
            let (factor, from) = (w[tap], &from[start + at..start + at + TOGETHER * LANES]);
            for (v, sums) in sums.iter_mut().enumerate() {
                for lane in 0..LANES {
                    sums[lane] = sums[lane] + from[v * LANES + lane] * factor;
                }
            }
        }
        for (to, sums) in to.chunks_exact_mut(LANES).zip(sums) {
            to.copy_from_slice(&sums);
        }
        at += TOGETHER * LANES;
    }
    for to in groups.into_remainder().chunks_exact_mut(LANES) {
        let mut sums = [T::ZERO; LANES];
        for &(start, tap) in tap_runs {
            let (factor, from) = (w[tap], &from[start + at..start + at + LANES]);
            for lane in 0..LANES {
                sums[lane] = sums[lane] + from[lane] * factor;
            }
        }
        to.copy_from_slice(&sums);
        at += LANES;
    }
}

/// Adds products of whole vectors to lane sums.
#[inline(always)]
fn add_products<T: Real>(a: &[T], b: &[T], sums: &mut [f64]) {
    let mut at = 0;
    while at < a.len() {
        let end = a.len().min(at + SUMMED * LANES);
        let mut lanes = [[T::ZERO; LANES]; TOGETHER];
        while at + TOGETHER * LANES <= end {
            let (a, b) = (&a[at..at + TOGETHER * LANES], &b[at..at + TOGETHER * LANES]);
            for (v, lanes) in lanes.iter_mut().enumerate() {
                for lane in 0..LANES {
                    lanes[lane] = lanes[lane] + a[v * LANES + lane] * b[v * LANES + lane];
                }
            }
            at += TOGETHER * LANES;
        }
        while at < end {
            let (a, b) = (&a[at..at + LANES], &b[at..at + LANES]);
            for lane in 0..LANES {
                lanes[0][lane] = lanes[0][lane] + a[lane] * b[lane];
            }
            at += LANES;
        }
        let sums = &mut sums[..LANES];
        for lane in 0..LANES {
            sums[lane] += ((lanes[0][lane] + lanes[1][lane]) + (lanes[2][lane] + lanes[3][lane])).wide();
        }
    }
}
