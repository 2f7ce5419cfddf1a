//! Mean cross-entropy against class indices, and its gradient.

use super::real::{Real, for_real};
use super::sum::{largest, sum_exp};
use super::wide::wide;
use super::{FastKernel, TensorLayout};
use bytemuck::{cast_slice, cast_slice_mut};
use compiler::op::{CrossEntropy, CrossEntropyGrad, KernelError};
use compiler::tensor::view::View;

pub fn kernel(op: &CrossEntropy, logits: &TensorLayout, target: &TensorLayout) -> Option<FastKernel> {
    let rows = Rows::new(logits, target, op.axis, op.ignore);
    for_real!(logits.dtype, T => Some(loss_kernel::<T>(rows)))
}

pub fn grad(op: &CrossEntropyGrad, logits: &TensorLayout, target: &TensorLayout) -> Option<FastKernel> {
    let rows = Rows::new(logits, target, op.axis, op.ignore);
    for_real!(logits.dtype, T => Some(grad_kernel::<T>(rows)))
}

/// Layout of logits and targets.
struct Rows {
    classes: usize,
    inner: usize,
    target: TensorLayout,
    ignore: Option<i64>,
}

impl Rows {
    fn new(logits: &TensorLayout, target: &TensorLayout, axis: usize, ignore: Option<i64>) -> Rows {
        let inner = logits.shape[axis + 1..].iter().product();
        Rows { classes: logits.shape[axis], inner, target: target.clone(), ignore }
    }

    /// The class of row `i`; `None` if it is ignored.
    fn class(&self, target: &View<'_>, i: usize) -> Result<Option<usize>, KernelError> {
        let label = target.i64(i);
        if self.ignore == Some(label) {
            return Ok(None);
        }
        let class = usize::try_from(label).ok().filter(|&class| class < self.classes);
        class.map(Some).ok_or(KernelError::Label { label, classes: self.classes })
    }

    /// Index of the first logit of row `i`; the others follow at stride `inner`.
    fn first(&self, i: usize) -> usize {
        i / self.inner * self.classes * self.inner + i % self.inner
    }
}

fn loss_kernel<T: Real>(rows: Rows) -> FastKernel {
    let scratch = if rows.inner == 1 { 0 } else { rows.classes * size_of::<T>() };
    let fast = FastKernel::new(move |inputs, outputs, workspace| {
        let [loss, lse] = outputs else { unreachable!("the loss has two outputs") };
        let (logits, lse) = (cast_slice::<u8, T>(inputs[0]), cast_slice_mut::<u8, T>(lse));
        let target = View::new(rows.target.dtype, &rows.target.shape, inputs[1]);
        let (mut sum, mut count) = (0.0, 0usize);
        for (i, lse) in lse.iter_mut().enumerate() {
            let first = rows.first(i);
            let log_sum = if rows.inner == 1 {
                log_sum_exp(&logits[first..first + rows.classes])
            } else {
                let row = &mut cast_slice_mut::<u8, T>(workspace)[..rows.classes];
                row.iter_mut().enumerate().for_each(|(k, v)| *v = logits[first + k * rows.inner]);
                log_sum_exp(row)
            };
            *lse = T::of(log_sum);
            if let Some(class) = rows.class(&target, i)? {
                sum += log_sum - logits[first + class * rows.inner].wide();
                count += 1;
            }
        }
        cast_slice_mut::<u8, T>(loss)[0] = T::of(sum / count.max(1) as f64);
        Ok(())
    });
    fast.with_workspace(scratch)
}

wide! {
    fn log_sum_exp[T: Real](row: &[T]) -> f64 {
        let max = largest(row);
        max.wide() + sum_exp(row, max).ln()
    }
}

fn grad_kernel<T: Real>(rows: Rows) -> FastKernel {
    FastKernel::new(move |inputs, outputs, _| {
        let (dloss, logits) = (cast_slice::<u8, T>(inputs[0])[0], cast_slice::<u8, T>(inputs[1]));
        let target = View::new(rows.target.dtype, &rows.target.shape, inputs[2]);
        let lse = cast_slice::<u8, T>(inputs[3]);
        let dlogits = cast_slice_mut::<u8, T>(outputs[0]);
        let mut count = 0usize;
        for i in 0..target.len() {
            count += rows.class(&target, i)?.is_some() as usize;
        }
        let scale = dloss.wide() / count as f64;
        for (i, lse) in lse.iter().enumerate() {
            let (first, step) = (rows.first(i), rows.inner);
            let Some(class) = rows.class(&target, i)? else {
                (0..rows.classes).for_each(|k| dlogits[first + k * step] = T::ZERO);
                continue;
            };
            if step == 1 {
                let range = first..first + rows.classes;
                grad_row(&logits[range.clone()], &mut dlogits[range], *lse, T::of(scale));
            } else {
                for k in 0..rows.classes {
                    let at = first + k * step;
                    dlogits[at] = (logits[at] - *lse).exp() * T::of(scale);
                }
            }
            let class_at = first + class * step;
            let p = T::of(logits[class_at].wide() - lse.wide()).exp().wide();
            dlogits[class_at] = T::of((p - 1.0) * scale);
        }
        Ok(())
    })
}

wide! {
    fn grad_row[T: Real](logits: &[T], dlogits: &mut [T], lse: T, scale: T) {
        for (d, &x) in dlogits.iter_mut().zip(logits) {
            *d = (x - lse).exp() * scale;
        }
    }
}
