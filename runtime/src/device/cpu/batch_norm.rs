//! Batch normalisation over `[N, C, D…]` and its gradient; statistics and what lies between are in `f64`.

use super::real::Real;
use super::sum::{sum_of, sum_of_pairs};
use super::wide::wide;
use super::{Fast, Layout};
use bytemuck::{cast_slice, cast_slice_mut};
use compiler::op::BatchNorm;
use compiler::tensor::DType;

/// Normalisation with the statistics of the batch.
pub fn kernel(op: &BatchNorm, x: &Layout) -> Option<Fast> {
    let planes = Planes::of(x);
    match x.dtype {
        DType::F32 => Some(forward::<f32>(op.epsilon, planes)),
        DType::F64 => Some(forward::<f64>(op.epsilon, planes)),
        _ => None,
    }
}

/// Its gradient.
pub fn grad(x: &Layout) -> Option<Fast> {
    let planes = Planes::of(x);
    match x.dtype {
        DType::F32 => Some(backward::<f32>(planes)),
        DType::F64 => Some(backward::<f64>(planes)),
        _ => None,
    }
}

/// `x` as planes of `inner` elements, one for each image and channel.
#[derive(Clone, Copy)]
struct Planes {
    channels: usize,
    inner: usize,
    /// Elements of a channel.
    count: f64,
}

impl Planes {
    fn of(x: &Layout) -> Planes {
        let inner: usize = x.shape[2..].iter().product();
        Planes { channels: x.shape[1], inner, count: (x.shape[0] * inner) as f64 }
    }

    /// Elements of one image.
    fn image(&self) -> usize {
        self.channels * self.inner
    }
}

fn forward<T: Real>(epsilon: f64, planes: Planes) -> Fast {
    let c = planes.channels;
    let fast = Fast::new(move |inputs, outputs, workspace| {
        let [y, mean_out, variance_out, rstd_out] = outputs else { unreachable!("a batch norm has four outputs") };
        let [x, scale, bias] = [0, 1, 2].map(|i| cast_slice::<u8, T>(inputs[i]));
        let (means, squares) = cast_slice_mut::<u8, f64>(workspace)[..2 * c].split_at_mut(c);
        means.fill(0.0);
        squares.fill(0.0);
        add_sums(planes, x, means);
        means.iter_mut().for_each(|m| *m /= planes.count);
        add_squares(planes, x, means, squares);
        let [mean_out, variance_out, rstd_out] = [mean_out, variance_out, rstd_out].map(|o| cast_slice_mut::<u8, T>(o));
        for i in 0..c {
            let variance = squares[i] / planes.count;
            squares[i] = 1.0 / (variance + epsilon).sqrt();
            (mean_out[i], variance_out[i], rstd_out[i]) = (T::of(means[i]), T::of(variance), T::of(squares[i]));
        }
        normalise(planes, x, scale, bias, means, squares, cast_slice_mut(y));
        Ok(())
    });
    fast.with_workspace(2 * c * size_of::<f64>())
}

fn backward<T: Real>(planes: Planes) -> Fast {
    let c = planes.channels;
    let fast = Fast::new(move |inputs, outputs, workspace| {
        let [dx, dscale, dbias] = outputs else { unreachable!("the gradient of a batch norm has three outputs") };
        let [dy, x, scale, mean, rstd] = [0, 1, 2, 3, 4].map(|i| cast_slice::<u8, T>(inputs[i]));
        let (scale_sums, bias_sums) = cast_slice_mut::<u8, f64>(workspace)[..2 * c].split_at_mut(c);
        scale_sums.fill(0.0);
        bias_sums.fill(0.0);
        add_sums(planes, dy, bias_sums);
        add_products(planes, dy, x, mean, rstd, scale_sums);
        let (dscale, dbias) = (cast_slice_mut::<u8, T>(dscale), cast_slice_mut::<u8, T>(dbias));
        for i in 0..c {
            (dscale[i], dbias[i]) = (T::of(scale_sums[i]), T::of(bias_sums[i]));
            scale_sums[i] /= planes.count;
            bias_sums[i] /= planes.count;
        }
        input_grad(planes, [dy, x, scale, mean, rstd], scale_sums, bias_sums, cast_slice_mut(dx));
        Ok(())
    });
    fast.with_workspace(2 * c * size_of::<f64>())
}

// Without spatial dims the channels are neighbours, and are done side by side; else each plane is a row.

wide! {
    fn add_sums[T: Real](planes: Planes, x: &[T], sums: &mut [f64]) {
        for image in x.chunks_exact(planes.image().max(1)) {
            if planes.inner == 1 {
                for (sum, x) in sums.iter_mut().zip(image) {
                    *sum += x.wide();
                }
            } else {
                for (sum, plane) in sums.iter_mut().zip(image.chunks_exact(planes.inner.max(1))) {
                    *sum += sum_of(plane, |v| v);
                }
            }
        }
    }
}

wide! {
    fn add_squares[T: Real](planes: Planes, x: &[T], means: &[f64], sums: &mut [f64]) {
        for image in x.chunks_exact(planes.image().max(1)) {
            if planes.inner == 1 {
                for ((sum, mean), x) in sums.iter_mut().zip(means).zip(image) {
                    *sum += (x.wide() - mean) * (x.wide() - mean);
                }
            } else {
                for ((sum, mean), plane) in sums.iter_mut().zip(means).zip(image.chunks_exact(planes.inner.max(1))) {
                    *sum += sum_of(plane, |v| (v - mean) * (v - mean));
                }
            }
        }
    }
}

wide! {
    fn add_products[T: Real](planes: Planes, dy: &[T], x: &[T], mean: &[T], rstd: &[T], sums: &mut [f64]) {
        let size = planes.image().max(1);
        for (dy, x) in dy.chunks_exact(size).zip(x.chunks_exact(size)) {
            if planes.inner == 1 {
                for i in 0..planes.channels {
                    sums[i] += dy[i].wide() * ((x[i].wide() - mean[i].wide()) * rstd[i].wide());
                }
            } else {
                let inner = planes.inner.max(1);
                for (c, (dy, x)) in dy.chunks_exact(inner).zip(x.chunks_exact(inner)).enumerate() {
                    let (mean, rstd) = (mean[c].wide(), rstd[c].wide());
                    sums[c] += sum_of_pairs(dy, x, |dy, x| dy * (x - mean)) * rstd;
                }
            }
        }
    }
}

wide! {
    fn normalise[T: Real](planes: Planes, x: &[T], scale: &[T], bias: &[T], means: &[f64], rstds: &[f64], y: &mut [T]) {
        let size = planes.image().max(1);
        for (x, y) in x.chunks_exact(size).zip(y.chunks_exact_mut(size)) {
            if planes.inner == 1 {
                for i in 0..planes.channels {
                    y[i] = T::of((x[i].wide() - means[i]) * rstds[i] * scale[i].wide() + bias[i].wide());
                }
            } else {
                let inner = planes.inner.max(1);
                for (c, (x, y)) in x.chunks_exact(inner).zip(y.chunks_exact_mut(inner)).enumerate() {
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
    // dx = rstd scale (dy - mean(dy) - x̂ mean(dy x̂)); both means are given for each channel.
    fn input_grad[T: Real](planes: Planes, given: [&[T]; 5], product_means: &[f64], means: &[f64], dx: &mut [T]) {
        let [dy, x, scale, mean, rstd] = given;
        let size = planes.image().max(1);
        for ((dy, x), dx) in dy.chunks_exact(size).zip(x.chunks_exact(size)).zip(dx.chunks_exact_mut(size)) {
            if planes.inner == 1 {
                for i in 0..planes.channels {
                    let x_hat = (x[i].wide() - mean[i].wide()) * rstd[i].wide();
                    let factor = rstd[i].wide() * scale[i].wide();
                    dx[i] = T::of(factor * (dy[i].wide() - means[i] - x_hat * product_means[i]));
                }
            } else {
                let inner = planes.inner.max(1);
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
