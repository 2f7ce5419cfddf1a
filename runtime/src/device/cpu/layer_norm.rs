//! Layer normalisation and its gradient; statistics and intermediates are in `f64`.

use super::real::{Real, for_real};
use super::sum::{sum_of, sum_of_pairs};
use super::wide::wide;
use super::{FastKernel, TensorLayout};
use bytemuck::{cast_slice, cast_slice_mut};
use compiler::op::LayerNorm;

/// Normalises rows of the scale's length.
pub fn kernel(op: &LayerNorm, x: &TensorLayout, scale: &TensorLayout) -> Option<FastKernel> {
    for_real!(x.dtype, T => Some(forward::<T>(op.epsilon, scale.len())))
}

pub fn grad(x: &TensorLayout, scale: &TensorLayout) -> Option<FastKernel> {
    for_real!(x.dtype, T => Some(backward::<T>(scale.len())))
}

fn forward<T: Real>(epsilon: f64, n: usize) -> FastKernel {
    FastKernel::new(move |inputs, outputs, _| {
        let [y, mean, rstd] = outputs else { unreachable!("a layer norm has three outputs") };
        let [x, scale, bias] = [0, 1, 2].map(|i| cast_slice::<u8, T>(inputs[i]));
        let (mean, rstd) = (cast_slice_mut::<u8, T>(mean), cast_slice_mut::<u8, T>(rstd));
        let y = cast_slice_mut::<u8, T>(y);
        for row in 0..mean.len() {
            let range = row * n..(row + 1) * n;
            let statistics = normalise(&x[range.clone()], scale, bias, &mut y[range], epsilon);
            (mean[row], rstd[row]) = (T::of(statistics[0]), T::of(statistics[1]));
        }
    })
}

wide! {
    fn normalise[T: Real](x: &[T], scale: &[T], bias: &[T], y: &mut [T], epsilon: f64) -> [f64; 2] {
        let n = x.len() as f64;
        let mean = sum_of(x, |v| v) / n;
        let variance = sum_of(x, |v| (v - mean) * (v - mean)) / n;
        let rstd = 1.0 / (variance + epsilon).sqrt();
        for (((y, x), scale), bias) in y.iter_mut().zip(x).zip(scale).zip(bias) {
            *y = T::of((x.wide() - mean) * rstd * scale.wide() + bias.wide());
        }
        [mean, rstd]
    }
}

fn backward<T: Real>(n: usize) -> FastKernel {
    let fast = FastKernel::new(move |inputs, outputs, workspace| {
        let [dx, dscale, dbias] = outputs else { unreachable!("the gradient of a layer norm has three outputs") };
        let [dy, x, scale, mean, rstd] = [0, 1, 2, 3, 4].map(|i| cast_slice::<u8, T>(inputs[i]));
        let dx = cast_slice_mut::<u8, T>(dx);
        let sums = &mut cast_slice_mut::<u8, f64>(workspace)[..2 * n];
        sums.fill(0.0);
        for row in 0..mean.len() {
            let range = row * n..(row + 1) * n;
            let statistics = [mean[row].wide(), rstd[row].wide()];
            backward_row(&dy[range.clone()], &x[range.clone()], scale, statistics, &mut dx[range], sums);
        }
        let (scale_sums, bias_sums) = sums.split_at(n);
        cast_slice_mut::<u8, T>(dscale).iter_mut().zip(scale_sums).for_each(|(d, &sum)| *d = T::of(sum));
        cast_slice_mut::<u8, T>(dbias).iter_mut().zip(bias_sums).for_each(|(d, &sum)| *d = T::of(sum));
    });
    fast.with_workspace(2 * n * size_of::<f64>())
}

wide! {
    // With g = dy scale and x̂ = (x - mean) rstd: dx = rstd (g - mean(g) - x̂ mean(g x̂)).
    fn backward_row[T: Real](dy: &[T], x: &[T], scale: &[T], statistics: [f64; 2], dx: &mut [T], sums: &mut [f64]) {
        let [mean, rstd] = statistics;
        let n = x.len();
        let (scale_sums, bias_sums) = sums.split_at_mut(n);
        for i in 0..n {
            scale_sums[i] += dy[i].wide() * ((x[i].wide() - mean) * rstd);
            bias_sums[i] += dy[i].wide();
        }
        // dx temporarily holds g.
        for ((g, dy), scale) in dx.iter_mut().zip(dy).zip(scale) {
            *g = *dy * *scale;
        }
        let g_mean = sum_of(dx, |g| g) / n as f64;
        let g_x_mean = sum_of_pairs(dx, x, |g, x| g * ((x - mean) * rstd)) / n as f64;
        for (dx, x) in dx.iter_mut().zip(x) {
            let x_hat = (x.wide() - mean) * rstd;
            *dx = T::of(rstd * (dx.wide() - g_mean - x_hat * g_x_mean));
        }
    }
}
