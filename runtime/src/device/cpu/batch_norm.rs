//! Batch normalisation over `[N, C, D…]` and its gradient; statistics and intermediates are in `f64`.

use super::real::{Real, for_real};
use super::sum::{sum_of, sum_of_pairs};
use super::wide::wide;
use super::{FastKernel, TensorLayout};
use bytemuck::{cast_slice, cast_slice_mut};
use compiler::op::BatchNorm;
use std::ops::Range;

/// Part of the second-level cache for channels that are read several times.
const CACHED_BYTES: usize = 512 << 10;

/// Normalises with batch statistics.
pub fn kernel(op: &BatchNorm, x: &TensorLayout) -> Option<FastKernel> {
    let planes = Planes::of(x);
    for_real!(x.dtype, T => Some(forward::<T>(op.epsilon, planes)))
}

pub fn grad(x: &TensorLayout) -> Option<FastKernel> {
    let planes = Planes::of(x);
    for_real!(x.dtype, T => Some(backward::<T>(planes)))
}

/// `x` as planes of `inner` elements, one per image and channel.
#[derive(Clone, Copy)]
struct Planes {
    channels: usize,
    inner: usize,
    images: usize,
    count: f64,
}

impl Planes {
    fn of(x: &TensorLayout) -> Planes {
        let inner: usize = x.shape[2..].iter().product();
        Planes { channels: x.shape[1], inner, images: x.shape[0], count: (x.shape[0] * inner) as f64 }
    }

    /// Channel ranges for which `tensors` tensors fit into the second-level cache, so later passes find them there.
    fn runs(self, tensors: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
        let channel = (tensors * self.count as usize * size).max(1);
        let step = (CACHED_BYTES / channel).clamp(1, self.channels.max(1));
        (0..self.channels).step_by(step).map(move |first| first..self.channels.min(first + step))
    }

    /// Element ranges of some channels, by image.
    fn images(self, run: &Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let (first, last) = (run.start * self.inner, run.end * self.inner);
        let size = self.channels * self.inner;
        // Avoids iterating over images of empty planes.
        let images = if self.inner > 0 { self.images } else { 0 };
        (0..images).map(move |image| image * size + first..image * size + last)
    }
}

fn forward<T: Real>(epsilon: f64, planes: Planes) -> FastKernel {
    let c = planes.channels;
    let fast = FastKernel::new(move |inputs, outputs, workspace| {
        let [y, mean_out, variance_out, rstd_out] = outputs else { unreachable!("a batch norm has four outputs") };
        let [x, scale, bias] = [0, 1, 2].map(|i| cast_slice::<u8, T>(inputs[i]));
        let (means, squares) = cast_slice_mut::<u8, f64>(workspace)[..2 * c].split_at_mut(c);
        means.fill(0.0);
        squares.fill(0.0);
        let [mean_out, variance_out, rstd_out] = [mean_out, variance_out, rstd_out].map(|o| cast_slice_mut::<u8, T>(o));
        let y = cast_slice_mut::<u8, T>(y);
        for run in planes.runs(2, size_of::<T>()) {
            add_sums(planes, &run, x, means);
            means[run.clone()].iter_mut().for_each(|m| *m /= planes.count);
            add_squares(planes, &run, x, means, squares);
            for i in run.clone() {
                let variance = squares[i] / planes.count;
                squares[i] = 1.0 / (variance + epsilon).sqrt();
                (mean_out[i], variance_out[i], rstd_out[i]) = (T::of(means[i]), T::of(variance), T::of(squares[i]));
            }
            normalise(planes, &run, x, [scale, bias], [means, squares], y);
        }
    });
    fast.with_workspace(2 * c * size_of::<f64>())
}

fn backward<T: Real>(planes: Planes) -> FastKernel {
    let c = planes.channels;
    let fast = FastKernel::new(move |inputs, outputs, workspace| {
        let [dx, dscale, dbias] = outputs else { unreachable!("the gradient of a batch norm has three outputs") };
        let [dy, x, scale, mean, rstd] = [0, 1, 2, 3, 4].map(|i| cast_slice::<u8, T>(inputs[i]));
        let (scale_sums, bias_sums) = cast_slice_mut::<u8, f64>(workspace)[..2 * c].split_at_mut(c);
        scale_sums.fill(0.0);
        bias_sums.fill(0.0);
        let [dx, dscale, dbias] = [dx, dscale, dbias].map(|o| cast_slice_mut::<u8, T>(o));
        for run in planes.runs(3, size_of::<T>()) {
            add_sums(planes, &run, dy, bias_sums);
            add_products(planes, &run, dy, x, [mean, rstd], scale_sums);
            for i in run.clone() {
                (dscale[i], dbias[i]) = (T::of(scale_sums[i]), T::of(bias_sums[i]));
                scale_sums[i] /= planes.count;
                bias_sums[i] /= planes.count;
            }
            input_grad(planes, &run, [dy, x, scale, mean, rstd], [scale_sums, bias_sums], dx);
        }
    });
    fast.with_workspace(2 * c * size_of::<f64>())
}

// Without spatial dimensions, channels are adjacent and vectorised together; otherwise each plane is a row.

wide! {
    fn add_sums[T: Real](planes: Planes, run: &Range<usize>, x: &[T], sums: &mut [f64]) {
        let sums = &mut sums[run.clone()];
        for image in planes.images(run) {
            if planes.inner == 1 {
                for (sum, x) in sums.iter_mut().zip(&x[image]) {
                    *sum += x.wide();
                }
            } else {
                for (sum, plane) in sums.iter_mut().zip(x[image].chunks_exact(planes.inner)) {
                    *sum += sum_of(plane, |v| v);
                }
            }
        }
    }
}

wide! {
    fn add_squares[T: Real](planes: Planes, run: &Range<usize>, x: &[T], means: &[f64], sums: &mut [f64]) {
        let (sums, means) = (&mut sums[run.clone()], &means[run.clone()]);
        for image in planes.images(run) {
            if planes.inner == 1 {
                for ((sum, mean), x) in sums.iter_mut().zip(means).zip(&x[image]) {
                    *sum += (x.wide() - mean) * (x.wide() - mean);
                }
            } else {
                for ((sum, mean), plane) in sums.iter_mut().zip(means).zip(x[image].chunks_exact(planes.inner)) {
                    *sum += sum_of(plane, |v| (v - mean) * (v - mean));
                }
            }
        }
    }
}

wide! {
    fn add_products[T: Real](planes: Planes, run: &Range<usize>, dy: &[T], x: &[T], statistics: [&[T]; 2], sums: &mut [f64]) {
        let (sums, [mean, rstd]) = (&mut sums[run.clone()], statistics.map(|g| &g[run.clone()]));
        for image in planes.images(run) {
            let (dy, x) = (&dy[image.clone()], &x[image]);
            if planes.inner == 1 {
                for i in 0..sums.len() {
                    sums[i] += dy[i].wide() * ((x[i].wide() - mean[i].wide()) * rstd[i].wide());
                }
            } else {
                for (c, (dy, x)) in dy.chunks_exact(planes.inner).zip(x.chunks_exact(planes.inner)).enumerate() {
                    let (mean, rstd) = (mean[c].wide(), rstd[c].wide());
                    sums[c] += sum_of_pairs(dy, x, |dy, x| dy * (x - mean)) * rstd;
                }
            }
        }
    }
}

wide! {
    // `affine` are scale and bias, `statistics` are means and reciprocal standard deviations.
    fn normalise[T: Real](planes: Planes, run: &Range<usize>, x: &[T], affine: [&[T]; 2], statistics: [&[f64]; 2], y: &mut [T]) {
        let ([scale, bias], [means, rstds]) = (affine.map(|g| &g[run.clone()]), statistics.map(|f| &f[run.clone()]));
        for image in planes.images(run) {
            let (x, y) = (&x[image.clone()], &mut y[image]);
            if planes.inner == 1 {
                for i in 0..scale.len() {
                    y[i] = T::of((x[i].wide() - means[i]) * rstds[i] * scale[i].wide() + bias[i].wide());
                }
            } else {
                for (c, (x, y)) in x.chunks_exact(planes.inner).zip(y.chunks_exact_mut(planes.inner)).enumerate() {
                    let (mean, factor, bias) = (means[c], rstds[c] * scale[c].wide(), bias[c].wide());
                    for (y, x) in y.iter_mut().zip(x) {
                        *y = T::of((x.wide() - mean) * factor + bias);
                    }
                }
            }
        }
    }
}

wide! {
    // dx = rstd scale (dy - mean(dy) - x̂ mean(dy x̂)); `grad_means` are the means of dy x̂ and of dy.
    fn input_grad[T: Real](planes: Planes, run: &Range<usize>, operands: [&[T]; 5], grad_means: [&[f64]; 2], dx: &mut [T]) {
        let [dy, x, scale, mean, rstd] = operands;
        let [scale, mean, rstd] = [scale, mean, rstd].map(|g| &g[run.clone()]);
        let [product_means, means] = grad_means.map(|f| &f[run.clone()]);
        for image in planes.images(run) {
            let (dy, x, dx) = (&dy[image.clone()], &x[image.clone()], &mut dx[image]);
            if planes.inner == 1 {
                for i in 0..scale.len() {
                    let x_hat = (x[i].wide() - mean[i].wide()) * rstd[i].wide();
                    let factor = rstd[i].wide() * scale[i].wide();
                    dx[i] = T::of(factor * (dy[i].wide() - means[i] - x_hat * product_means[i]));
                }
            } else {
                let inner = planes.inner;
                let rows = dy.chunks_exact(inner).zip(x.chunks_exact(inner)).zip(dx.chunks_exact_mut(inner));
                for (c, ((dy, x), dx)) in rows.enumerate() {
                    let (mean, rstd) = (mean[c].wide(), rstd[c].wide());
                    let (factor, dy_mean, slope) = (rstd * scale[c].wide(), means[c], rstd * product_means[c]);
                    for ((dx, dy), x) in dx.iter_mut().zip(dy).zip(x) {
                        *dx = T::of(factor * (dy.wide() - dy_mean - (x.wide() - mean) * slope));
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planes_without_elements_are_gone_through_at_once() {
        let planes = |inner| Planes { channels: 3, inner, images: 2, count: (2 * inner) as f64 };
        let images = |inner| planes(inner).images(&(1..3)).collect::<Vec<_>>();
        assert_eq!(images(4), [4..12, 16..24]);
        assert_eq!(images(0), []);
    }
}
