//! Max and average pooling over the spatial axes, and their gradients.
//!
//! [`super::window`] defines the number of windows. A window of padding only gives `-inf` in a max pool and 0 in an
//! average pool, and passes no gradient.

use super::sample::{ramp, run};
use super::window::number;
use super::*;
use crate::tensor::view::indices;

impl OpRule for MaxPool {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [x] = arity(inputs)?;
        Ok(vec![pooled_fact(x, &self.window, &self.kernel, self.ceil)?])
    }

    // One comparison per window element.
    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        Cost { flops: elements(&outputs[0]) * volume(&self.kernel), bytes: moved_bytes(inputs, outputs) }
    }

    // dx = MaxPoolGrad(x, dy)
    fn backward<'b>(&self, context: BackwardContext<'b>) -> Vec<Option<Expr<'b>>> {
        vec![Some(emit(Op::MaxPoolGrad(MaxPoolGrad { forward: self.clone() }), &[context.inputs[0], context.dy()]))]
    }

    fn strategies(&self, _: &[&Fact], _: &[Fact], _: &Group) -> Vec<Strategy> {
        batch_and_channels(1, None)
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let (x, y) = (&inputs[0], &mut outputs[0]);
        let (x_shape, y_shape) = (x.shape, y.shape);
        each_window(&self.window, &self.kernel, x_shape, y_shape, |y_at, _, elements| {
            y.set_f64(y_at, winner(x, elements).map_or(f64::NEG_INFINITY, |i| x.f64(i)));
        });
        Ok(())
    }
}

impl OpRule for MaxPoolGrad {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [x, dy] = arity(inputs)?;
        let forward = &self.forward;
        same_output(dy, &pooled_fact(x, &forward.window, &forward.kernel, forward.ceil)?)?;
        Ok(vec![x.clone()])
    }

    // The forward comparisons again, and one addition per window.
    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        Cost { flops: elements(inputs[1]) * (volume(&self.forward.kernel) + 1.0), bytes: moved_bytes(inputs, outputs) }
    }

    // No second-order gradient: no core op selects elements by the argmax.

    fn takes_gradient(&self, _: usize) -> bool {
        false
    }

    fn strategies(&self, _: &[&Fact], _: &[Fact], _: &Group) -> Vec<Strategy> {
        batch_and_channels(2, Some(&[false, true]))
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let (x, dy, dx) = (&inputs[0], &inputs[1], &mut outputs[0]);
        let mut sums = vec![0.0; dx.len()];
        each_window(&self.forward.window, &self.forward.kernel, x.shape, dy.shape, |y_at, _, elements| {
            if let Some(i) = winner(x, elements) {
                sums[i] += dy.f64(y_at);
            }
        });
        sums.iter().enumerate().for_each(|(i, &sum)| dx.set_f64(i, sum));
        Ok(())
    }
}

impl OpRule for AvgPool {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [x] = arity(inputs)?;
        Ok(vec![pooled_fact(x, &self.window, &self.kernel, self.ceil)?])
    }

    // One addition per window element, and one division.
    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        Cost { flops: elements(&outputs[0]) * (volume(&self.kernel) + 1.0), bytes: moved_bytes(inputs, outputs) }
    }

    // dx = AvgPoolGrad(dy)
    fn backward<'b>(&self, context: BackwardContext<'b>) -> Vec<Option<Expr<'b>>> {
        let spatial = context.inputs[0].shape()[2..].to_vec();
        vec![Some(context.dy().then(Op::AvgPoolGrad(AvgPoolGrad { forward: self.clone(), spatial })))]
    }

    fn strategies(&self, _: &[&Fact], _: &[Fact], _: &Group) -> Vec<Strategy> {
        batch_and_channels(1, Some(&[true]))
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let (x, y) = (&inputs[0], &mut outputs[0]);
        let (x_shape, y_shape) = (x.shape, y.shape);
        each_window(&self.window, &self.kernel, x_shape, y_shape, |y_at, at, elements| {
            let sum: f64 = elements.iter().map(|&i| x.f64(i)).sum();
            y.set_f64(
                y_at,
                if elements.is_empty() { 0.0 } else { sum / self.divisor(at, elements.len(), &x_shape[2..]) },
            );
        });
        Ok(())
    }
}

impl AvgPool {
    /// The divisor of the window at `at`, which overlaps `overlap` data elements.
    fn divisor(&self, at: &[usize], overlap: usize, spatial: &[usize]) -> f64 {
        if !self.count_padding {
            return overlap as f64;
        }
        let padded_taps = |axis: usize| {
            let padded = self.window.pads_begin[axis] + spatial[axis] + self.window.pads_end[axis];
            (0..self.kernel[axis]).filter(|&tap| self.window.padded_position(axis, at[axis], tap) < padded).count()
        };
        (0..at.len()).map(|axis| padded_taps(axis) as f64).product()
    }
}

impl OpRule for AvgPoolGrad {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [dy] = arity(inputs)?;
        check(dy, "the output gradient")?;
        let mut shape = dy.shape[..2].to_vec();
        shape.extend_from_slice(&self.spatial);
        let x = Fact::new(dy.dtype, shape);
        same_output(dy, &pooled_fact(&x, &self.forward.window, &self.forward.kernel, self.forward.ceil)?)?;
        Ok(vec![x])
    }

    // One addition per window element, and one division.
    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        Cost { flops: elements(inputs[0]) * (volume(&self.forward.kernel) + 1.0), bytes: moved_bytes(inputs, outputs) }
    }

    // The op is the adjoint of the linear pool: d(dy) = AvgPool(g)
    fn backward<'b>(&self, context: BackwardContext<'b>) -> Vec<Option<Expr<'b>>> {
        vec![Some(context.dy().then(Op::AvgPool(self.forward.clone())))]
    }

    fn strategies(&self, _: &[&Fact], _: &[Fact], _: &Group) -> Vec<Strategy> {
        batch_and_channels(1, Some(&[true]))
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let (dy, dx) = (&inputs[0], &mut outputs[0]);
        let mut sums = vec![0.0; dx.len()];
        let x_shape = dx.shape;
        each_window(&self.forward.window, &self.forward.kernel, x_shape, dy.shape, |y_at, at, elements| {
            let divisor = self.forward.divisor(at, elements.len(), &x_shape[2..]);
            elements.iter().for_each(|&i| sums[i] += dy.f64(y_at) / divisor);
        });
        sums.iter().enumerate().for_each(|(i, &sum)| dx.set_f64(i, sum));
        Ok(())
    }
}

fn check(x: &Fact, what: &'static str) -> Result<(), FactError> {
    check_float(what, x)?;
    if !(3..=5).contains(&x.rank()) {
        let expected = "3 to 5: batch, channels, then one to three spatial dims".into();
        return Err(FactError::Rank { what, expected, got: x.rank() });
    }
    Ok(())
}

fn pooled_fact(x: &Fact, window: &Window, kernel: &[usize], ceil: bool) -> Result<Fact, FactError> {
    check(x, "the input")?;
    let kernel = kernel.iter().map(|&k| number("kernel size", k)).collect::<Result<Vec<_>, _>>()?;
    let mut shape = x.shape[..2].to_vec();
    shape.extend(window.output(&x.shape[2..], &kernel, ceil)?);
    Ok(Fact::new(x.dtype, shape))
}

/// Strategies of an op on `inputs` tensors, linear in the marked ones.
fn batch_and_channels(inputs: usize, linear: Option<&[bool]>) -> Vec<Strategy> {
    let along = |axis| Strategy::along(&vec![Some(axis); inputs], &[Some(axis)]);
    (0..2).map(along).chain(linear.map(|terms| Strategy::linear(terms, 1))).collect()
}

fn same_output(dy: &Fact, expected: &Fact) -> Result<(), FactError> {
    check_same("the output gradient", dy, "the output of the pool", expected)
}

fn volume(kernel: &[usize]) -> f64 {
    kernel.iter().map(|&k| k as f64).product()
}

/// The first largest element; NaN wins, so that a diverged run is visible.
fn winner(x: &View<'_>, elements: &[usize]) -> Option<usize> {
    elements.iter().copied().reduce(|best, i| {
        let (largest, v) = (x.f64(best), x.f64(i));
        if v > largest || (v.is_nan() && !largest.is_nan()) { i } else { best }
    })
}

/// Calls `visit` for every element of `y`: with its flat index, its window's index, and the flat indices into `x` of
/// that window.
fn each_window(
    window: &Window,
    kernel: &[usize],
    x: &[usize],
    y: &[usize],
    mut visit: impl FnMut(usize, &[usize], &[usize]),
) {
    let (x_size, y_size) = (x[2..].iter().product::<usize>(), y[2..].iter().product::<usize>());
    for (e, at) in indices(&y[2..]).enumerate() {
        let taps = window.taps(&at, kernel, &x[2..]);
        for plane in 0..x[0] * x[1] {
            let elements: Vec<usize> = taps.iter().map(|&(_, element)| plane * x_size + element).collect();
            visit(plane * y_size + e, &at, &elements);
        }
    }
}

/// Title, shape of x, kernel, window, and `ceil`.
type Case = (&'static str, &'static [usize], &'static [usize], Window, bool);

pub fn samples() -> Vec<Sample> {
    let window = |strides: &[usize], begin: &[usize], end: &[usize], dilations: &[usize]| Window {
        strides: strides.to_vec(),
        pads_begin: begin.to_vec(),
        pads_end: end.to_vec(),
        dilations: dilations.to_vec(),
    };
    let cases: [Case; 8] = [
        ("two by two", &[2, 3, 4, 6], &[2, 2], window(&[2, 2], &[0, 0], &[0, 0], &[1, 1]), false),
        ("overlapping, padded", &[1, 2, 5, 5], &[3, 3], window(&[2, 2], &[1, 1], &[1, 1], &[1, 1]), false),
        ("overlapping, every step", &[1, 2, 4, 4], &[3, 2], window(&[1, 1], &[0, 0], &[0, 0], &[1, 1]), false),
        ("rounded up", &[1, 2, 5, 6], &[2, 3], window(&[2, 2], &[0, 0], &[0, 0], &[1, 1]), true),
        ("rounded up, padded", &[1, 2, 5, 4], &[3, 3], window(&[2, 2], &[1, 1], &[1, 1], &[1, 1]), true),
        ("asymmetric, dilated", &[2, 1, 5, 6], &[2, 3], window(&[2, 1], &[0, 1], &[1, 2], &[2, 2]), false),
        ("one spatial dim", &[2, 3, 7], &[3], window(&[2], &[1], &[0], &[1]), false),
        (
            "three spatial dims",
            &[1, 2, 4, 3, 4],
            &[2, 2, 2],
            window(&[2, 1, 2], &[0, 0, 0], &[0, 0, 0], &[1; 3]),
            false,
        ),
    ];
    let mut list = Vec::new();
    for (title, shape, kernel, window, ceil) in cases {
        let x = ramp(shape, 1);
        let max = MaxPool { kernel: kernel.to_vec(), window: window.clone(), ceil };
        let dy = ramp(run(&max, std::slice::from_ref(&x))[0].shape(), 2);
        let grad = Op::MaxPoolGrad(MaxPoolGrad { forward: max.clone() });
        let mut add = |op, inputs, differentiate| list.push(Sample { title, op, inputs, differentiate });
        add(Op::MaxPool(max), vec![x.clone()], vec![0]);
        add(grad, vec![x.clone(), dy.clone()], vec![]);
        for count_padding in [false, true] {
            let forward = AvgPool { kernel: kernel.to_vec(), window: window.clone(), ceil, count_padding };
            add(Op::AvgPool(forward.clone()), vec![x.clone()], vec![0]);
            let spatial = shape[2..].iter().map(|&d| Dim::from(d)).collect();
            add(Op::AvgPoolGrad(AvgPoolGrad { forward, spatial }), vec![dy.clone()], vec![0]);
        }
    }
    list
}

#[cfg(test)]
mod tests;
