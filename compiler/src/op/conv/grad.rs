//! The gradients of convolution for its input and its weight.

use super::{
    Case, DATA, FILTERS, RESULT, cases, check_groups, check_operands, each_product, flops, input_grad, known_kernel,
    list_strategies, weight_grad, write_values,
};
use crate::op::sample::ramp;
use crate::op::window::number;
use crate::op::*;

impl OpRule for ConvInputGrad {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [dy, w] = check_operands(inputs, ["the output gradient", "the weight"])?;
        check_groups(self.groups, "output", &w.shape[0])?;
        if dy.shape[1] != w.shape[0] {
            return Err(FactError::mismatch("weight output channels", &w.shape[0], "gradient channels", &dy.shape[1]));
        }
        let kernel = known_kernel(w)?;
        if self.spatial.len() != kernel.len() {
            return Err(FactError::Rank {
                what: "the list of spatial dims",
                expected: format!("{}, as the kernel", kernel.len()),
                got: self.spatial.len(),
            });
        }
        same_windows(dy, &self.window.output(&self.spatial, kernel, false)?)?;
        let channels = w.shape[1].mul(&number("group count", self.groups)?)?;
        let mut shape = vec![dy.shape[0].clone(), channels];
        shape.extend_from_slice(&self.spatial);
        Ok(vec![Fact::new(dy.dtype, shape)])
    }

    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        Cost { flops: flops(inputs[0], inputs[1]), bytes: moved_bytes(inputs, outputs) }
    }

    // With g the gradient of dx: d(dy) = Conv(g, w), dw = ConvWeightGrad(dy, g)
    fn backward<'b>(&self, context: BackwardContext<'b>) -> Vec<Option<Expr<'b>>> {
        let (dy, w, g) = (context.inputs[0], context.inputs[1], context.dy());
        let (window, groups) = (&self.window, self.groups);
        let forward = Op::Conv(Conv { window: window.clone(), groups });
        let d_dy = context.wanted[0].then(|| emit(forward, &[g, w]));
        let dw = context.wanted[1].then(|| weight_grad(window, groups, [dy, g], w));
        vec![d_dy, dw]
    }

    fn strategies(&self, _: &[&Fact], _: &[Fact], group: &Group) -> Vec<Strategy> {
        let divided = |groups| Op::ConvInputGrad(ConvInputGrad { groups, ..self.clone() });
        list_strategies([RESULT, FILTERS], DATA, (self.groups, group), divided)
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let (dy, w, dx) = (&inputs[0], &inputs[1], &mut outputs[0]);
        let mut sums = vec![0.0; dx.len()];
        each_product(&self.window, dx.shape, w.shape, dy.shape, |x_at, w_at, y_at| {
            sums[x_at] += dy.f64(y_at) * w.f64(w_at);
        });
        write_values(dx, &sums);
        Ok(())
    }
}

impl OpRule for ConvWeightGrad {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [dy, x] = check_operands(inputs, ["the output gradient", "the input"])?;
        if dy.shape[0] != x.shape[0] {
            return Err(FactError::mismatch("gradient batch", &dy.shape[0], "input batch", &x.shape[0]));
        }
        check_groups(self.groups, "output", &dy.shape[1])?;
        check_groups(self.groups, "input", &x.shape[1])?;
        let kernel = self.kernel.iter().map(|&k| number("kernel size", k)).collect::<Result<Vec<_>, _>>()?;
        same_windows(dy, &self.window.output(&x.shape[2..], &kernel, false)?)?;
        let channels = x.shape[1].div_exact(&number("group count", self.groups)?)?;
        let mut shape = vec![dy.shape[1].clone(), channels];
        shape.extend(kernel);
        Ok(vec![Fact::new(dy.dtype, shape)])
    }

    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        Cost { flops: flops(inputs[0], &outputs[0]), bytes: moved_bytes(inputs, outputs) }
    }

    // With g the gradient of dw: d(dy) = Conv(x, g), dx = ConvInputGrad(dy, g)
    fn backward<'b>(&self, context: BackwardContext<'b>) -> Vec<Option<Expr<'b>>> {
        let (dy, x, g) = (context.inputs[0], context.inputs[1], context.dy());
        let (window, groups) = (&self.window, self.groups);
        let forward = Op::Conv(Conv { window: window.clone(), groups });
        let d_dy = context.wanted[0].then(|| emit(forward, &[x, g]));
        let dx = context.wanted[1].then(|| input_grad(window, groups, [dy, g], x));
        vec![d_dy, dx]
    }

    fn strategies(&self, _: &[&Fact], _: &[Fact], group: &Group) -> Vec<Strategy> {
        let divided = |groups| Op::ConvWeightGrad(ConvWeightGrad { groups, ..self.clone() });
        list_strategies([RESULT, DATA], FILTERS, (self.groups, group), divided)
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let (dy, x, dw) = (&inputs[0], &inputs[1], &mut outputs[0]);
        let mut sums = vec![0.0; dw.len()];
        each_product(&self.window, x.shape, dw.shape, dy.shape, |x_at, w_at, y_at| {
            sums[w_at] += dy.f64(y_at) * x.f64(x_at);
        });
        write_values(dw, &sums);
        Ok(())
    }
}

/// Checks that a gradient has the spatial sizes of the forward output.
fn same_windows(dy: &Fact, expected: &[Dim]) -> Result<(), FactError> {
    if &dy.shape[2..] == expected {
        return Ok(());
    }
    Err(FactError::mismatch(
        "the spatial shape of the gradient",
        format!("{:?}", &dy.shape[2..]),
        "that of the convolution",
        format!("{expected:?}"),
    ))
}

pub fn samples() -> Vec<Sample> {
    let with_gradients = |(title, window, groups, x, w): Case| {
        let spatial: Vec<Dim> = x[2..].iter().map(|&d| Dim::from(d)).collect();
        let kernel: Vec<Dim> = w[2..].iter().map(|&k| Dim::from(k)).collect();
        let sizes = window.output(&spatial, &kernel, false).expect("the window of a sample fits");
        let sizes = sizes.iter().map(|d| d.known().expect("the sizes of a sample are numbers") as usize);
        let dy = ramp(&[x[0], w[0]].into_iter().chain(sizes).collect::<Vec<_>>(), 3);
        let input = Op::ConvInputGrad(ConvInputGrad { window: window.clone(), groups, spatial });
        let weight = Op::ConvWeightGrad(ConvWeightGrad { window, groups, kernel: w[2..].to_vec() });
        [Sample::new(title, input, vec![dy.clone(), ramp(w, 2)]), Sample::new(title, weight, vec![dy, ramp(x, 1)])]
    };
    cases().into_iter().flat_map(with_gradients).collect()
}
