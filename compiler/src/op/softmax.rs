//! Softmax and log-softmax along one axis, stable for large inputs.
//!
//! The maximum is subtracted first. A `-inf` (a masked element) has weight zero; a row of only these gives NaN, as in
//! PyTorch.

use super::sample::ramp;
use super::*;

/// Per element: a comparison, a subtraction, an exponential (16, as in [`super::unary`]), an addition and a product.
const FLOPS: f64 = 20.0;

impl OpRule for Softmax {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        infer_along(inputs, self.axis)
    }

    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        Cost { flops: FLOPS * elements(&outputs[0]), bytes: moved_bytes(inputs, outputs) }
    }

    // dx = y (dy - Σ y dy)
    fn backward<'b>(&self, context: BackwardContext<'b>) -> Vec<Option<Expr<'b>>> {
        let (y, dy) = (context.outputs[0], context.dy());
        let sum = (y * dy).reduce(ReduceKind::Sum, vec![self.axis], true);
        vec![Some(y * (dy - sum))]
    }

    fn strategies(&self, inputs: &[&Fact], outputs: &[Fact], _: &Group) -> Vec<Strategy> {
        sharding::all_but(inputs[0], &[self.axis], outputs.len())
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let (x, y) = (&inputs[0], &mut outputs[0]);
        for row in rows(x.shape, self.axis) {
            let (max, sum) = max_and_sum(x, &row);
            for i in row {
                y.set_f64(i, (x.f64(i) - max).exp() / sum);
            }
        }
        Ok(())
    }
}

impl OpRule for LogSoftmax {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        infer_along(inputs, self.axis)
    }

    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        Cost { flops: FLOPS * elements(&outputs[0]), bytes: moved_bytes(inputs, outputs) }
    }

    // dx = dy - e^y Σ dy
    fn backward<'b>(&self, context: BackwardContext<'b>) -> Vec<Option<Expr<'b>>> {
        let (y, dy) = (context.outputs[0], context.dy());
        vec![Some(dy - y.exp() * dy.reduce(ReduceKind::Sum, vec![self.axis], true))]
    }

    fn strategies(&self, inputs: &[&Fact], outputs: &[Fact], _: &Group) -> Vec<Strategy> {
        sharding::all_but(inputs[0], &[self.axis], outputs.len())
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let (x, y) = (&inputs[0], &mut outputs[0]);
        for row in rows(x.shape, self.axis) {
            let (max, sum) = max_and_sum(x, &row);
            for i in row {
                y.set_f64(i, x.f64(i) - max - sum.ln());
            }
        }
        Ok(())
    }
}

fn infer_along(inputs: &[&Fact], axis: usize) -> Result<Vec<Fact>, FactError> {
    let [x] = arity(inputs)?;
    check_float("the input", x)?;
    check_axis(axis, x.rank())?;
    Ok(vec![x.clone()])
}

/// The flat indices of each row along `axis`; rows in row-major order of the other axes.
pub(in crate::op) fn rows(shape: &[usize], axis: usize) -> impl Iterator<Item = Vec<usize>> + use<> {
    let (size, inner) = (shape[axis], shape[axis + 1..].iter().product::<usize>());
    let outer: usize = shape[..axis].iter().product();
    (0..outer * inner).map(move |row| {
        let from = row / inner * size * inner + row % inner;
        (0..size).map(|i| from + i * inner).collect()
    })
}

/// The maximum `m` of a row, and `Σ e^(x - m)`.
pub(in crate::op) fn max_and_sum(x: &View<'_>, row: &[usize]) -> (f64, f64) {
    let max = row.iter().map(|&i| x.f64(i)).fold(f64::NEG_INFINITY, f64::max);
    (max, row.iter().map(|&i| (x.f64(i) - max).exp()).sum())
}

pub fn samples() -> Vec<Sample> {
    let soft = |axis| Op::Softmax(Softmax { axis });
    let log = |axis| Op::LogSoftmax(LogSoftmax { axis });
    let sample = |title, op, x: Tensor| Sample::new(title, op, vec![x]);
    let large = || Tensor::from_f32(&[2, 3], &[1000.0, 1001.0, 999.0, -1000.0, -1000.5, -2000.0]);
    let masked = Tensor::from_f32(&[2, 3], &[0.5, f32::NEG_INFINITY, -0.25, 1.0, 2.0, f32::NEG_INFINITY]);
    let undefined = Tensor::from_f32(&[1, 2], &[f32::NEG_INFINITY; 2]);
    // Not differentiated: undefined at a mask, and too imprecise at large numbers.
    let forward_sample = |title, op, x| Sample::forward(title, op, vec![x]);
    vec![
        sample("last axis", soft(1), ramp(&[3, 5], 1)),
        sample("middle axis", soft(1), ramp(&[2, 4, 3], 2)),
        sample("first axis of one", soft(0), ramp(&[6], 3)),
        forward_sample("large numbers", soft(1), large()),
        forward_sample("masked", soft(1), masked.clone()),
        forward_sample("all masked", soft(1), undefined.clone()),
        sample("last axis", log(1), ramp(&[3, 5], 1)),
        sample("middle axis", log(1), ramp(&[2, 4, 3], 2)),
        sample("first axis of one", log(0), ramp(&[6], 3)),
        forward_sample("large numbers", log(1), large()),
        forward_sample("masked", log(1), masked),
        forward_sample("all masked", log(1), undefined),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::sample::run;

    #[test]
    fn rows_sum_to_one_and_masks_weigh_nothing() {
        let y = run(&Softmax { axis: 1 }, &[ramp(&[2, 4, 3], 2).cast(DType::F64)])[0].to_f64();
        for column in [0, 1, 2, 12, 13, 14] {
            let sum: f64 = (0..4).map(|i| y[column + 3 * i]).sum();
            assert!((sum - 1.0).abs() < 1e-15, "{sum}");
        }
        let masked = Tensor::from_f64(&[2, 2], &[3.0, f64::NEG_INFINITY, f64::NEG_INFINITY, f64::NEG_INFINITY]);
        let y = run(&Softmax { axis: 1 }, std::slice::from_ref(&masked))[0].to_f64();
        assert_eq!(y[..2], [1.0, 0.0]);
        assert!(y[2..].iter().all(|v| v.is_nan()));
        let y = run(&LogSoftmax { axis: 1 }, &[masked])[0].to_f64();
        assert_eq!(y[..2], [0.0, f64::NEG_INFINITY]);
        assert!(y[2..].iter().all(|v| v.is_nan()));
    }

    #[test]
    fn the_logarithm_does_not_overflow() {
        let x = Tensor::from_f64(&[1, 2], &[1000.0, 0.0]);
        assert_eq!(run(&LogSoftmax { axis: 1 }, &[x])[0].to_f64(), [0.0, -1000.0]);
    }
}
