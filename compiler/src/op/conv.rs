//! Convolution over one to three spatial axes, and code common with its gradients.
//!
//! With operands `x`, `w`, `y` and window taps `t`, the three ops are derivatives of one trilinear form: `Σ y[n, o, e]
//! · x[n, c, e s + t d - b] · w[o, c mod (C/groups), t]`. Each op is therefore a gradient of the others, and the
//! kernels share one loop.

pub mod grad;

use super::sample::ramp;
use super::window::number;
use super::*;
use crate::tensor::view::indices;

impl OpRule for Conv {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [x, w] = check_operands(inputs, ["the input", "the weight"])?;
        let kernel = known_kernel(w)?;
        check_groups(self.groups, "output", &w.shape[0])?;
        let channels = w.shape[1].mul(&number("group count", self.groups)?)?;
        if channels != x.shape[1] {
            let in_groups = if self.groups == 1 { String::new() } else { format!(" in {} groups", self.groups) };
            return Err(FactError::mismatch(
                "weight input channels",
                &w.shape[1],
                "input channels",
                format!("{}{in_groups}", x.shape[1]),
            ));
        }
        let mut shape = vec![x.shape[0].clone(), w.shape[0].clone()];
        shape.extend(self.window.output(&x.shape[2..], kernel, false)?);
        Ok(vec![Fact::new(x.dtype, shape)])
    }

    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        Cost { flops: flops(&outputs[0], inputs[1]), bytes: moved_bytes(inputs, outputs) }
    }

    // dx = ConvInputGrad(dy, w), dw = ConvWeightGrad(dy, x)
    fn backward<'b>(&self, context: BackwardContext<'b>) -> Vec<Option<Expr<'b>>> {
        let (x, w, dy) = (context.inputs[0], context.inputs[1], context.dy());
        let (window, groups) = (&self.window, self.groups);
        let dx = context.wanted[0].then(|| input_grad(window, groups, [dy, w], x));
        let dw = context.wanted[1].then(|| weight_grad(window, groups, [dy, x], w));
        vec![dx, dw]
    }

    fn strategies(&self, _: &[&Fact], _: &[Fact], group: &Group) -> Vec<Strategy> {
        let divided = |groups| Op::Conv(Conv { groups, ..self.clone() });
        list_strategies([DATA, FILTERS], RESULT, (self.groups, group), divided)
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let (x, w, y) = (&inputs[0], &inputs[1], &mut outputs[0]);
        let mut sums = vec![0.0; y.len()];
        each_product(&self.window, x.shape, w.shape, y.shape, |x_at, w_at, y_at| {
            sums[y_at] += x.f64(x_at) * w.f64(w_at);
        });
        write_values(y, &sums);
        Ok(())
    }
}

/// Emits the gradient for an input with the shape of `target`, from dy and w.
pub(in crate::op) fn input_grad<'b>(
    window: &Window,
    groups: usize,
    inputs: [Expr<'b>; 2],
    target: Expr<'b>,
) -> Expr<'b> {
    let spatial = target.shape()[2..].to_vec();
    emit(Op::ConvInputGrad(ConvInputGrad { window: window.clone(), groups, spatial }), &inputs)
}

/// Emits the gradient for a weight with the shape of `target`, from dy and x.
pub(in crate::op) fn weight_grad<'b>(
    window: &Window,
    groups: usize,
    inputs: [Expr<'b>; 2],
    target: Expr<'b>,
) -> Expr<'b> {
    let size = |k: &Dim| k.known().and_then(|k| usize::try_from(k).ok());
    let kernel: Option<Vec<usize>> = target.shape()[2..].iter().map(size).collect();
    let kernel = kernel.expect("infer only accepts kernels of known size");
    emit(Op::ConvWeightGrad(ConvWeightGrad { window: window.clone(), groups, kernel }), &inputs)
}

/// Checks both inputs: floats of one type, one rank, one to three spatial axes.
pub(in crate::op) fn check_operands<'a>(
    inputs: &[&'a Fact],
    names: [&'static str; 2],
) -> Result<[&'a Fact; 2], FactError> {
    let [a, b] = arity(inputs)?;
    for (fact, what) in [a, b].into_iter().zip(names) {
        check_float(what, fact)?;
    }
    if !(3..=5).contains(&a.rank()) {
        let expected = "3 to 5: two dims, then one to three spatial ones".into();
        return Err(FactError::Rank { what: names[0], expected, got: a.rank() });
    }
    if b.rank() != a.rank() {
        return Err(FactError::Rank {
            what: names[1],
            expected: format!("{}, as {}", a.rank(), names[0]),
            got: b.rank(),
        });
    }
    check_like(names[1], b, a, names[0])?;
    Ok([a, b])
}

/// The spatial sizes of a weight, which must be numbers.
pub(in crate::op) fn known_kernel(w: &Fact) -> Result<&[Dim], FactError> {
    match w.shape[2..].iter().find(|k| k.known().is_none()) {
        Some(open) => Err(FactError::Attribute(format!("the kernel size must be a number, it is `{open}`"))),
        None => Ok(&w.shape[2..]),
    }
}

/// Checks that the groups divide the channels.
pub(in crate::op) fn check_groups(groups: usize, which: &str, channels: &Dim) -> Result<(), FactError> {
    let count = number("group count", groups)?;
    if groups == 0 || channels.div_exact(&count).is_err() {
        return Err(FactError::Attribute(format!(
            "group count {groups} does not divide the {channels} {which} channels"
        )));
    }
    Ok(())
}

/// One multiply-add per element of `y` and weight of its output channel, including those on padding.
pub(in crate::op) fn flops(y: &Fact, w: &Fact) -> f64 {
    let taps: f64 = w.shape[1..].iter().map(|d| d.known().unwrap_or(0) as f64).product();
    2.0 * elements(y) * taps
}

/// Calls `visit` with the flat indices into x, w and y of every product of the convolution.
pub(in crate::op) fn each_product(
    window: &Window,
    x: &[usize],
    w: &[usize],
    y: &[usize],
    mut visit: impl FnMut(usize, usize, usize),
) {
    let (batch, outs, ins, group_ins) = (y[0], y[1], x[1], w[1]);
    let (data, kernel) = (&x[2..], &w[2..]);
    let [x_size, w_size, y_size] = [data, kernel, &y[2..]].map(|dims| dims.iter().product::<usize>());
    if batch * outs * group_ins == 0 {
        return;
    }
    let group_outs = outs / (ins / group_ins);
    for (e, at) in indices(&y[2..]).enumerate() {
        let taps = window.taps(&at, kernel, data);
        for n in 0..batch {
            for o in 0..outs {
                let y_at = (n * outs + o) * y_size + e;
                for i in 0..group_ins {
                    let c = o / group_outs * group_ins + i;
                    let (x_from, w_from) = ((n * ins + c) * x_size, (o * group_ins + i) * w_size);
                    for &(tap, element) in &taps {
                        visit(x_from + element, w_from + tap, y_at);
                    }
                }
            }
        }
    }
}

pub(in crate::op) fn write_values(to: &mut ViewMut<'_>, values: &[f64]) {
    for (i, &v) in values.iter().enumerate() {
        to.set_f64(i, v);
    }
}

/// A window that is the same along each of `rank` axes.
pub(in crate::op) fn even(rank: usize, stride: usize, pad: usize, dilation: usize) -> Window {
    Window {
        strides: vec![stride; rank],
        pads_begin: vec![pad; rank],
        pads_end: vec![pad; rank],
        dilations: vec![dilation; rank],
    }
}

/// Title, window, groups, and the shapes of x and w.
pub(in crate::op) type Case = (&'static str, Window, usize, &'static [usize], &'static [usize]);

pub(in crate::op) fn cases() -> Vec<Case> {
    let lopsided = Window { strides: vec![2, 1], pads_begin: vec![0, 2], pads_end: vec![1, 0], dilations: vec![1, 2] };
    vec![
        ("one spatial dim", Window::plain(1), 1, &[2, 3, 7], &[4, 3, 3]),
        ("one spatial dim, strided, dilated, padded", even(1, 2, 2, 2), 1, &[2, 2, 9], &[3, 2, 3]),
        ("square, padded", even(2, 1, 1, 1), 1, &[2, 3, 5, 5], &[4, 3, 3, 3]),
        ("stride 2 that leaves the last column out", even(2, 2, 0, 1), 1, &[1, 2, 6, 6], &[3, 2, 3, 3]),
        ("pointwise", Window::plain(2), 1, &[2, 4, 3, 3], &[5, 4, 1, 1]),
        ("pointwise, stride 2", even(2, 2, 0, 1), 1, &[1, 4, 4, 5], &[3, 4, 1, 1]),
        ("two groups", even(2, 1, 1, 1), 2, &[2, 4, 4, 4], &[6, 2, 3, 3]),
        ("depthwise, twice the channels", even(2, 2, 1, 1), 3, &[2, 3, 5, 5], &[6, 1, 3, 3]),
        ("asymmetric in every way", lopsided, 1, &[2, 2, 6, 5], &[3, 2, 2, 3]),
        ("kernel as large as the padded input", even(2, 1, 1, 1), 1, &[2, 2, 2, 2], &[3, 2, 4, 4]),
        ("three spatial dims", even(3, 2, 1, 1), 1, &[1, 2, 4, 4, 4], &[3, 2, 3, 3, 3]),
        ("three spatial dims, groups, dilated", even(3, 1, 1, 2), 2, &[1, 2, 4, 3, 3], &[2, 1, 2, 2, 2]),
    ]
}

/// The three tensors of a convolution; each of the three ops computes one from the other two.
pub(super) const DATA: usize = 0;
pub(super) const FILTERS: usize = 1;
pub(super) const RESULT: usize = 2;

/// Sharding strategies of a convolution or one of its gradients: batch, output channels, input channels, or whole
/// groups. For the latter each device runs the op `divided`.
pub(super) fn list_strategies(
    [left, right]: [usize; 2],
    result: usize,
    (groups, group): (usize, &Group),
    divided: impl FnOnce(usize) -> Op,
) -> Vec<Strategy> {
    // The axes of data, filters and result.
    let batch = [Some(0), None, Some(0)];
    let (outs, ins) = ([None, Some(0), Some(1)], [Some(1), Some(1), None]);
    let whole_groups = [Some(1), Some(0), Some(1)];
    let split = |axes: [Option<usize>; 3]| Strategy::along(&[axes[left], axes[right]], &[axes[result]]);
    let mut strategies = vec![split(batch)];
    match (groups, groups % group.devices) {
        (1, _) => {
            // Strategies with partial sums come last.
            let mut channels = [outs, ins];
            channels.sort_by_key(|axes| axes[result].is_none());
            strategies.extend(channels.map(split));
        }
        (_, 0) => {
            let by_groups = split(whole_groups).sized(divided(groups / group.devices));
            strategies.push(Strategy { any_order: false, ..by_groups });
        }
        _ => {}
    }
    strategies.extend([[true, false], [false, true]].map(|terms| Strategy::linear(&terms, 1)));
    strategies
}

pub fn samples() -> Vec<Sample> {
    let sample = |(title, window, groups, x, w): Case| {
        Sample::new(title, Op::Conv(Conv { window, groups }), vec![ramp(x, 1), ramp(w, 2)])
    };
    cases().into_iter().map(sample).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::sample::run;

    #[test]
    fn numbers_agree_with_pytorch() {
        // x = arange, w = arange - 3 in torch.nn.functional.conv1d(x, w, stride=2, padding=1, dilation=2, groups=2)
        let count = |shape: &[usize], from: i64| {
            let n = shape.iter().product::<usize>() as i64;
            Tensor::from_i64(shape, &(from..from + n).collect::<Vec<_>>()).cast(DType::F32)
        };
        let op = Conv { window: even(1, 2, 1, 2), groups: 2 };
        let y = run(&op, &[count(&[1, 4, 5], 0), count(&[2, 2, 2], -3)]);
        assert_eq!(y[0].shape(), [1, 2, 3]);
        assert_eq!(y[0].to_f64(), [-2.0, -15.0, -17.0, 86.0, 157.0, 67.0]);

        // torch.nn.functional.conv2d(torch.nn.functional.pad(x, (2, 0, 0, 1)), w, stride=(2, 1), dilation=(1, 2))
        let window =
            Window { strides: vec![2, 1], pads_begin: vec![0, 2], pads_end: vec![1, 0], dilations: vec![1, 2] };
        let y = run(&Conv { window, groups: 1 }, &[count(&[1, 1, 3, 3], 1), count(&[1, 1, 2, 2], 1)]);
        assert_eq!(y[0].shape(), [1, 1, 2, 3]);
        assert_eq!(y[0].to_f64(), [18.0, 24.0, 43.0, 14.0, 16.0, 25.0]);
    }

    #[test]
    fn cost_counts_two_flops_a_multiply_add() {
        let (x, w) = (Fact::of(DType::F32, &[2, 4, 8, 8]), Fact::of(DType::F32, &[6, 2, 3, 3]));
        let op = Conv { window: even(2, 1, 1, 1), groups: 2 };
        let y = op.infer(&[&x, &w]).unwrap();
        assert_eq!(op.cost(&[&x, &w], &y).flops, 2.0 * (2 * 6 * 8 * 8) as f64 * (2 * 3 * 3) as f64);
    }
}
