//! Layer normalisation over the last axes, and its gradient.
//!
//! With `x̂ = (x - mean) rstd` and means over the `n` normalised elements of a row:
//!
//!   y      = x̂ scale + bias
//!   dx     = rstd (g - mean(g) - x̂ mean(g x̂)),  g = dy scale
//!   dscale = Σ dy x̂ over the rows,  dbias = Σ dy over the rows
//!
//! `mean` and `rstd` are outputs so that the backward need not recompute them; their gradients are ignored.

use super::sample::{ramp, run};
use super::*;

impl OpRule for LayerNorm {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [x, scale, bias] = arity(inputs)?;
        let (statistic, row) = (statistic(x, scale, self.axis)?, row(x, scale, self.axis));
        check_same("the scale", scale, "the normalised shape", &row)?;
        check_same("the bias", bias, "the normalised shape", &row)?;
        Ok(vec![x.clone(), statistic.clone(), statistic])
    }

    // Per element: 1 flop for the mean, 3 for the variance, 3 for y.
    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        Cost { flops: 7.0 * elements(&outputs[0]), bytes: moved_bytes(inputs, outputs) }
    }

    // dx, dscale, dbias = LayerNormGrad(dy, x, scale, mean, rstd)
    fn backward<'b>(&self, context: BackwardContext<'b>) -> Vec<Option<Expr<'b>>> {
        let Some(dy) = context.d_outputs[0] else { return vec![None; 3] };
        let (inputs, outputs) = (context.inputs, context.outputs);
        let saved = [dy, inputs[0], inputs[1], outputs[1], outputs[2]];
        context.wanted_of(emit_all(Op::LayerNormGrad(LayerNormGrad { axis: self.axis }), &saved))
    }

    fn takes_gradient(&self, output: usize) -> bool {
        output == 0
    }

    // Axes before the normalised ones.
    fn strategies(&self, _: &[&Fact], outputs: &[Fact], _: &Group) -> Vec<Strategy> {
        let split_along = |axis| Strategy::along(&[Some(axis), None, None], &vec![Some(axis); outputs.len()]);
        (0..self.axis).map(split_along).collect()
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let [x, scale, bias] = inputs else { unreachable!("infer checks the arity") };
        let [y, mean_out, rstd_out] = outputs else { unreachable!("infer gives three outputs") };
        let n = scale.len();
        for row in 0..mean_out.len() {
            let x_at = |i: usize| x.f64(row * n + i);
            let mean = (0..n).map(x_at).sum::<f64>() / n as f64;
            let variance = (0..n).map(|i| (x_at(i) - mean).powi(2)).sum::<f64>() / n as f64;
            let rstd = 1.0 / (variance + self.epsilon).sqrt();
            mean_out.set_f64(row, mean);
            rstd_out.set_f64(row, rstd);
            for i in 0..n {
                y.set_f64(row * n + i, (x_at(i) - mean) * rstd * scale.f64(i) + bias.f64(i));
            }
        }
        Ok(())
    }
}

impl OpRule for LayerNormGrad {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [dy, x, scale, mean, rstd] = arity(inputs)?;
        let statistic = statistic(x, scale, self.axis)?;
        check_same("the output gradient", dy, "the input", x)?;
        check_same("the scale", scale, "the normalised shape", &row(x, scale, self.axis))?;
        check_same("the mean", mean, "the shape of a statistic", &statistic)?;
        check_same("the reciprocal deviation", rstd, "the shape of a statistic", &statistic)?;
        Ok(vec![x.clone(), scale.clone(), scale.clone()])
    }

    // Per element: 2 flops for x̂, 1 for g, 3 for the two means, 4 for dx, 3 for dscale and dbias.
    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        Cost { flops: 13.0 * elements(&outputs[0]), bytes: moved_bytes(inputs, outputs) }
    }

    // No second-order gradient: no core op expresses it.

    fn takes_gradient(&self, _: usize) -> bool {
        false
    }

    fn strategies(&self, _: &[&Fact], _: &[Fact], _: &Group) -> Vec<Strategy> {
        let split_along = |axis: usize| {
            let split = Some(axis);
            Strategy::along(&[split, split, None, split, split], &[split, None, None])
        };
        (0..self.axis).map(split_along).collect()
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let [dy, x, scale, mean, rstd] = inputs else { unreachable!("infer checks the arity") };
        let [dx, dscale, dbias] = outputs else { unreachable!("infer gives three outputs") };
        let n = scale.len();
        let (mut scale_sums, mut bias_sums) = (vec![0.0; n], vec![0.0; n]);
        for row in 0..mean.len() {
            let (mean, rstd) = (mean.f64(row), rstd.f64(row));
            let x_hat = |i: usize| (x.f64(row * n + i) - mean) * rstd;
            let g = |i: usize| dy.f64(row * n + i) * scale.f64(i);
            let g_mean = (0..n).map(g).sum::<f64>() / n as f64;
            let g_x_mean = (0..n).map(|i| g(i) * x_hat(i)).sum::<f64>() / n as f64;
            for i in 0..n {
                dx.set_f64(row * n + i, rstd * (g(i) - g_mean - x_hat(i) * g_x_mean));
                scale_sums[i] += dy.f64(row * n + i) * x_hat(i);
                bias_sums[i] += dy.f64(row * n + i);
            }
        }
        for i in 0..n {
            dscale.set_f64(i, scale_sums[i]);
            dbias.set_f64(i, bias_sums[i]);
        }
        Ok(())
    }
}

/// The element type of scale, bias and statistics.
pub(in crate::op) fn statistic_type(x: &Fact, scale: &Fact) -> DType {
    if x.dtype.size() == 2 && scale.dtype == DType::F32 { DType::F32 } else { x.dtype }
}

fn row(x: &Fact, scale: &Fact, axis: usize) -> Fact {
    Fact::new(statistic_type(x, scale), x.shape[axis..].to_vec())
}

fn statistic(x: &Fact, scale: &Fact, axis: usize) -> Result<Fact, FactError> {
    check_float("the input", x)?;
    check_axis(axis, x.rank())?;
    let mut shape = x.shape.clone();
    shape[axis..].fill(Dim::from(1i64));
    Ok(Fact::new(statistic_type(x, scale), shape))
}

pub fn samples() -> Vec<Sample> {
    let cases: [(&'static str, &[usize], usize, f64); 4] = [
        ("last dim", &[3, 8], 1, 1e-5),
        ("last dim of three", &[2, 3, 6], 2, 1e-5),
        ("last two dims", &[3, 2, 4], 1, 1e-3),
        ("all dims", &[2, 5], 0, 1e-5),
    ];
    let with_gradient = |(title, shape, axis, epsilon): (&'static str, &[usize], usize, f64)| {
        let forward = LayerNorm { axis, epsilon };
        let inputs = vec![ramp(shape, 1), ramp(&shape[axis..], 2), ramp(&shape[axis..], 3)];
        let saved = run(&forward, &inputs);
        let (x, scale, dy) = (inputs[0].clone(), inputs[1].clone(), ramp(shape, 4));
        let grad_inputs = vec![dy, x, scale, saved[1].clone(), saved[2].clone()];
        let grad = Op::LayerNormGrad(LayerNormGrad { axis });
        [Sample::new(title, Op::LayerNorm(forward), inputs), Sample::forward(title, grad, grad_inputs)]
    };
    cases.into_iter().flat_map(with_gradient).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::sample::assert_close;

    // torch.native_layer_norm(x, [4], scale, bias, 1e-5) in f64, and its backward
    #[test]
    fn numbers_agree_with_pytorch() {
        let x = Tensor::from_f64(&[2, 4], &[1., 2., 4., 8., 3., -1., 0.5, 2.]);
        let scale = Tensor::from_f64(&[4], &[1., 2., -1., 0.5]);
        let bias = Tensor::from_f64(&[4], &[0., 1., 2., 3.]);
        let dy = Tensor::from_f64(&[2, 4], &[1., -1., 2., 0.5, 0., 3., 1., -2.]);
        let saved = run(&LayerNorm { axis: 1, epsilon: 1e-5 }, &[x.clone(), scale.clone(), bias]);
        let y = [
            -1.0257545754961932,
            -0.3055058233587913,
            1.9067495840458006,
            3.7926285356106946, //
            1.2371764550931794,
            -1.8042666315445404,
            2.4123921516977265,
            3.2886745061884084,
        ];
        assert_close(&saved[0], &y);
        assert_eq!(saved[1].shape(), [2, 1]);
        assert_close(&saved[1], &[3.75, 1.125]);
        assert_close(&saved[2], &[0.3730016638167975, 0.6598274427163624]);
        let grads = run(&LayerNormGrad { axis: 1 }, &[dy, x, scale, saved[1].clone(), saved[2].clone()]);
        let dx = [
            0.6762681688116914,
            -0.4597651357735541,
            -0.49382176204325995,
            0.2773187290051228, //
            1.0907275389448146,
            1.315174901032478,
            -1.9031732126531171,
            -0.5027292273241755,
        ];
        assert_close(&grads[0], &dx);
        let dscale = [-1.0257545754961932, -3.5536470356374155, -0.22589131978932775, -0.36206948914293957];
        assert_close(&grads[1], &dscale);
        assert_close(&grads[2], &[1.0, 2.0, 3.0, -1.5]);
    }

    #[test]
    fn no_normalised_elements_is_nan_and_no_rows_is_zero_gradients() {
        let empty = |shape: &[usize]| Tensor::zeros(DType::F32, shape);
        let saved = run(&LayerNorm { axis: 1, epsilon: 1e-5 }, &[empty(&[2, 0]), empty(&[0]), empty(&[0])]);
        assert!(saved[1].to_f64().iter().chain(&saved[2].to_f64()).all(|v| v.is_nan()));
        let (row, norm, statistic) = (empty(&[0, 3]), Tensor::from_f32(&[3], &[1.0; 3]), empty(&[0, 1]));
        let grads = run(&LayerNormGrad { axis: 1 }, &[row.clone(), row, norm, statistic.clone(), statistic]);
        assert_eq!((grads[1].to_f64(), grads[2].to_f64()), (vec![0.0; 3], vec![0.0; 3]));
    }
}
