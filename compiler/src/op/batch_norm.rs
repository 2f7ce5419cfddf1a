//! Batch normalisation with batch statistics, and its gradient.
//!
//! The formulas are those of [`super::layer_norm`], with means over all elements of a channel (batch and spatial axes)
//! and one scale and bias per channel. Gradients of the statistics are ignored. An empty batch has NaN statistics.

use super::layer_norm::statistic_type;
use super::sample::{ramp, run};
use super::*;

impl OpRule for BatchNorm {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [x, scale, bias] = arity(inputs)?;
        let channels = per_channel(x, scale)?;
        check_same("the scale", scale, "one value a channel", &channels)?;
        check_same("the bias", bias, "one value a channel", &channels)?;
        Ok(vec![x.clone(), channels.clone(), channels.clone(), channels])
    }

    // Per element: 1 flop for the mean, 3 for the variance, 3 for y.
    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        Cost { flops: 7.0 * elements(&outputs[0]), bytes: moved_bytes(inputs, outputs) }
    }

    // dx, dscale, dbias = BatchNormGrad(dy, x, scale, mean, rstd)
    fn backward<'b>(&self, context: BackwardContext<'b>) -> Vec<Option<Expr<'b>>> {
        let Some(dy) = context.d_outputs[0] else { return vec![None; 3] };
        let (inputs, outputs) = (context.inputs, context.outputs);
        let saved = [dy, inputs[0], inputs[1], outputs[1], outputs[3]];
        context.wanted_of(emit_all(Op::BatchNormGrad(BatchNormGrad {}), &saved))
    }

    fn takes_gradient(&self, output: usize) -> bool {
        output == 0
    }

    // Channels: their statistics are independent.
    fn strategies(&self, _: &[&Fact], _: &[Fact], _: &Group) -> Vec<Strategy> {
        let channel = Some(0);
        vec![Strategy::along(&[Some(1), channel, channel], &[Some(1), channel, channel, channel])]
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let [x, scale, bias] = inputs else { unreachable!("infer checks the arity") };
        let [y, mean_out, variance_out, rstd_out] = outputs else { unreachable!("infer gives four outputs") };
        for (c, members) in channels(x.shape).enumerate() {
            let n = members.len() as f64;
            let mean = members.iter().map(|&i| x.f64(i)).sum::<f64>() / n;
            let variance = members.iter().map(|&i| (x.f64(i) - mean).powi(2)).sum::<f64>() / n;
            let rstd = 1.0 / (variance + self.epsilon).sqrt();
            mean_out.set_f64(c, mean);
            variance_out.set_f64(c, variance);
            rstd_out.set_f64(c, rstd);
            for i in members {
                y.set_f64(i, (x.f64(i) - mean) * rstd * scale.f64(c) + bias.f64(c));
            }
        }
        Ok(())
    }
}

impl OpRule for BatchNormGrad {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [dy, x, scale, mean, rstd] = arity(inputs)?;
        let channels = per_channel(x, scale)?;
        check_same("the output gradient", dy, "the input", x)?;
        check_same("the scale", scale, "one value a channel", &channels)?;
        check_same("the mean", mean, "one value a channel", &channels)?;
        check_same("the reciprocal deviation", rstd, "one value a channel", &channels)?;
        Ok(vec![x.clone(), channels.clone(), channels])
    }

    // Per element: 2 flops for x̂, 3 for dscale and dbias, which are also the sums in dx, and 5 for dx.
    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        Cost { flops: 10.0 * elements(&outputs[0]), bytes: moved_bytes(inputs, outputs) }
    }

    // No second-order gradient, as for the layer norm.

    // The scale is constant per channel, so mean(g) = scale dbias / n and mean(g x̂) = scale dscale / n.
    fn takes_gradient(&self, _: usize) -> bool {
        false
    }

    fn strategies(&self, _: &[&Fact], _: &[Fact], _: &Group) -> Vec<Strategy> {
        let channel = Some(0);
        let inputs = [Some(1), Some(1), channel, channel, channel];
        vec![Strategy::along(&inputs, &[Some(1), channel, channel])]
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let [dy, x, scale, mean, rstd] = inputs else { unreachable!("infer checks the arity") };
        let [dx, dscale, dbias] = outputs else { unreachable!("infer gives three outputs") };
        for (c, members) in channels(x.shape).enumerate() {
            let n = members.len() as f64;
            let (mean, rstd) = (mean.f64(c), rstd.f64(c));
            let x_hat = |i: usize| (x.f64(i) - mean) * rstd;
            let scale_sum: f64 = members.iter().map(|&i| dy.f64(i) * x_hat(i)).sum();
            let bias_sum: f64 = members.iter().map(|&i| dy.f64(i)).sum();
            dscale.set_f64(c, scale_sum);
            dbias.set_f64(c, bias_sum);
            for i in members {
                dx.set_f64(i, rstd * scale.f64(c) * (dy.f64(i) - bias_sum / n - x_hat(i) * scale_sum / n));
            }
        }
        Ok(())
    }
}

fn per_channel(x: &Fact, scale: &Fact) -> Result<Fact, FactError> {
    check_float("the input", x)?;
    match x.shape.get(1) {
        Some(channels) => Ok(Fact::new(statistic_type(x, scale), vec![channels.clone()])),
        None => {
            Err(FactError::Rank { what: "the input", expected: "at least 2: batch, channels".into(), got: x.rank() })
        }
    }
}

/// The flat indices of the elements of each channel, in row-major order.
fn channels(shape: &[usize]) -> impl Iterator<Item = Vec<usize>> + use<> {
    let (batch, count, inner) = (shape[0], shape[1], shape[2..].iter().product::<usize>());
    (0..count).map(move |c| (0..batch * inner).map(|i| (i / inner * count + c) * inner + i % inner).collect())
}

pub fn samples() -> Vec<Sample> {
    let cases: [(&'static str, &[usize], f64); 4] = [
        ("no spatial dims", &[5, 3], 1e-5),
        ("one spatial dim", &[3, 2, 4], 1e-5),
        ("two spatial dims", &[2, 3, 3, 2], 1e-3),
        ("a batch of one", &[1, 2, 2, 3], 1e-5),
    ];
    let with_gradient = |(title, shape, epsilon): (&'static str, &[usize], f64)| {
        let forward = BatchNorm { epsilon };
        let inputs = vec![ramp(shape, 1), ramp(&shape[1..2], 2), ramp(&shape[1..2], 3)];
        let saved = run(&forward, &inputs);
        let (x, scale, dy) = (inputs[0].clone(), inputs[1].clone(), ramp(shape, 4));
        let grad_inputs = vec![dy, x, scale, saved[1].clone(), saved[3].clone()];
        [
            Sample::new(title, Op::BatchNorm(forward), inputs),
            Sample::forward(title, Op::BatchNormGrad(BatchNormGrad {}), grad_inputs),
        ]
    };
    cases.into_iter().flat_map(with_gradient).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::sample::assert_close;

    // torch.nn.functional.batch_norm(x, None, None, scale, bias, True, 0.1, 1e-3) in f64, and its backward
    #[test]
    fn numbers_agree_with_pytorch() {
        let x = Tensor::from_f64(&[2, 2, 2], &[1., 2., 4., 8., 3., -1., 0.5, 2.]);
        let (scale, bias) = (Tensor::from_f64(&[2], &[2., -1.]), Tensor::from_f64(&[2], &[1., 0.5]));
        let dy = Tensor::from_f64(&[2, 2, 2], &[1., -1., 2., 0.5, 0., 3., 1., -2.]);
        let saved = run(&BatchNorm { epsilon: 1e-3 }, &[x.clone(), scale.clone(), bias]);
        let y = [
            0.6620155428718297,
            2.0139533713845106,
            0.36677373098794974,
            -1.0543064718072528, //
            3.3658911998971917,
            -2.0418601141535317,
            1.610218908433752,
            1.077313832385551,
        ];
        assert_close(&saved[0], &y);
        assert_close(&saved[1], &[1.25, 3.625]);
        assert_close(&saved[2], &[2.1875, 7.921875]);
        let grads = run(&BatchNormGrad {}, &[dy, x, scale, saved[1].clone(), saved[3].clone()]);
        let dx = [
            0.03876358178623285,
            -1.4682285738713794,
            -0.5644395459412551,
            0.10579125217943554, //
            1.080592756009051,
            0.3488722360760957,
            -0.329329502055883,
            0.7879777958177026,
        ];
        assert_close(&grads[0], &dx);
        assert_close(&grads[1], &[-5.238759085486638, 1.088014530265077]);
        assert_close(&grads[2], &[3.0, 1.5]);
    }

    #[test]
    fn an_empty_batch_has_no_statistics() {
        let inputs = [(&[0, 2][..]), &[2], &[2]].map(|shape| Tensor::zeros(DType::F32, shape));
        let saved = run(&BatchNorm { epsilon: 1e-5 }, &inputs);
        assert!(saved[1..].iter().all(|t| t.len() == 2 && t.to_f64().iter().all(|v| v.is_nan())));
    }
}
