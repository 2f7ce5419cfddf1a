//! Cross-entropy of logits against class indices, and its gradient for the logits.
//!
//! With `lse = m + log Σ e^(logit - m)`, `m` the largest logit of a row, and `n` the number of targets not ignored:
//!
//! ```text
//! loss    = Σ (lse - logit[target]) / n
//! dlogits = dloss (e^(logit - lse) - [class = target]) / n,  0 where the target is ignored
//! ```
//!
//! If all targets are ignored, the loss is 0: a micro-batch without labels adds neither loss nor gradient to its
//! minibatch.
//!
//! A logit of `-inf` (a masked class) has weight zero; a row of only these gives NaN, as in PyTorch. The log-sum-exp is
//! an output so that the backward need not recompute it; its gradient is ignored.

mod parts;

use super::sample::{ramp, run};
use super::softmax::{max_and_sum, rows};
use super::*;

impl CrossEntropy {
    /// Outputs have the type of the logits.
    pub fn new(axis: usize, ignore: Option<i64>) -> CrossEntropy {
        CrossEntropy { axis, ignore, wide: false }
    }
}

impl CrossEntropyGrad {
    /// The inputs have the type of the logits.
    pub fn new(axis: usize, ignore: Option<i64>) -> CrossEntropyGrad {
        CrossEntropyGrad { axis, ignore, wide: false }
    }
}

impl OpRule for CrossEntropy {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [logits, target] = arity(inputs)?;
        let lse = check(logits, target, self.axis, self.wide)?;
        Ok(vec![Fact::new(lse.dtype, vec![]), lse])
    }

    // Per logit: a comparison, a difference, an exponential (16 flops, as in `unary`) and an addition.
    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        Cost { flops: 19.0 * elements(inputs[0]), bytes: moved_bytes(inputs, outputs) }
    }

    // dlogits = CrossEntropyGrad(dloss, logits, target, lse)
    fn backward<'b>(&self, context: BackwardContext<'b>) -> Vec<Option<Expr<'b>>> {
        let (Some(dloss), true) = (context.d_outputs[0], context.wanted[0]) else { return vec![None; 2] };
        let grad = Op::CrossEntropyGrad(CrossEntropyGrad { axis: self.axis, ignore: self.ignore, wide: self.wide });
        vec![Some(emit(grad, &[dloss, context.inputs[0], context.inputs[1], context.outputs[1]])), None]
    }

    fn takes_gradient(&self, output: usize) -> bool {
        output == 0
    }

    // Split rows: every device has the mean over its rows and their count. Split classes: every device has its local
    // log-sum-exp and the target logits among its classes.
    fn strategies(&self, inputs: &[&Fact], _: &[Fact], _: &Group) -> Vec<Strategy> {
        let [logits, _] = inputs else { return Vec::new() };
        let rows = |axis: usize| {
            let row = Some(axis - (axis > self.axis) as usize);
            Strategy::along(&[Some(axis), row], &[None, row]).written()
        };
        let mut strategies: Vec<Strategy> = (0..logits.rank()).filter(|axis| *axis != self.axis).map(rows).collect();
        let outputs = vec![Sharding::Partial, Sharding::Replicated];
        strategies.push(Strategy { outputs, ..Strategy::along(&[Some(self.axis), None], &[None; 2]).written() });
        strategies
    }

    fn write_part<'b>(&self, strategy: &Strategy, context: &LocalContext<'b>) -> Vec<Expr<'b>> {
        if strategy.outputs[1] == Sharding::Replicated { self.by_classes(context) } else { self.by_rows(context) }
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let [logits, target] = inputs else { unreachable!("infer checks the arity") };
        let [loss, lse_out] = outputs else { unreachable!("infer gives two outputs") };
        let (mut sum, mut count) = (0.0, 0usize);
        for (i, row) in rows(logits.shape, self.axis).enumerate() {
            let (max, exponentials) = max_and_sum(logits, &row);
            let lse = max + exponentials.ln();
            lse_out.set_f64(i, lse);
            if let Some(class) = class(target, i, row.len(), self.ignore)? {
                sum += lse - logits.f64(row[class]);
                count += 1;
            }
        }
        loss.set_f64(0, sum / count.max(1) as f64);
        Ok(())
    }
}

impl OpRule for CrossEntropyGrad {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [dloss, logits, target, lse] = arity(inputs)?;
        let expected = check(logits, target, self.axis, self.wide)?;
        check_same("the gradient of the loss", dloss, "the loss", &Fact::new(expected.dtype, vec![]))?;
        check_same("the log-sum-exp", lse, "one value a target", &expected)?;
        Ok(vec![logits.clone()])
    }

    // Per logit: a difference, an exponential (16 flops, as in `unary`), a difference and a product.
    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        Cost { flops: 19.0 * elements(&outputs[0]), bytes: moved_bytes(inputs, outputs) }
    }

    // No second-order gradient, as for the normalisations.

    fn takes_gradient(&self, _: usize) -> bool {
        false
    }

    fn strategies(&self, inputs: &[&Fact], _: &[Fact], _: &Group) -> Vec<Strategy> {
        let [_, logits, ..] = inputs else { return Vec::new() };
        let rows = |axis: usize| {
            let row = Some(axis - (axis > self.axis) as usize);
            Strategy::along(&[None, Some(axis), row, row], &[Some(axis)]).written()
        };
        let mut strategies: Vec<Strategy> = (0..logits.rank()).filter(|axis| *axis != self.axis).map(rows).collect();
        strategies.push(Strategy::along(&[None, Some(self.axis), None, None], &[Some(self.axis)]).written());
        strategies.push(Strategy::linear(&[true, false, false, false], 1));
        strategies
    }

    fn write_part<'b>(&self, strategy: &Strategy, context: &LocalContext<'b>) -> Vec<Expr<'b>> {
        let classes = matches!(strategy.inputs[1], Sharding::Split(cut) if cut.axis == self.axis);
        if classes { self.by_classes(context) } else { self.by_rows(context) }
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let [dloss, logits, target, lse] = inputs else { unreachable!("infer checks the arity") };
        let dlogits = &mut outputs[0];
        let classes = logits.shape[self.axis];
        let mut count = 0usize;
        for i in 0..target.len() {
            count += class(target, i, classes, self.ignore)?.is_some() as usize;
        }
        let row_gradient = dloss.f64(0) / count as f64;
        for (i, row) in rows(logits.shape, self.axis).enumerate() {
            let target = class(target, i, classes, self.ignore)?;
            for (k, at) in row.into_iter().enumerate() {
                let indicator = (target == Some(k)) as u8 as f64;
                let slope = (logits.f64(at) - lse.f64(i)).exp() - indicator;
                dlogits.set_f64(at, if target.is_some() { row_gradient * slope } else { 0.0 });
            }
        }
        Ok(())
    }
}

fn check(logits: &Fact, target: &Fact, axis: usize, wide: bool) -> Result<Fact, FactError> {
    check_float("logits", logits)?;
    check_dtype(target.dtype.is_integer(), "the target", "an integer", target)?;
    check_axis(axis, logits.rank())?;
    let mut shape = logits.shape.clone();
    shape.remove(axis);
    let expected = Fact::new(target.dtype, shape.clone());
    check_same("the target", target, "the logits without their classes", &expected)?;
    Ok(Fact::new(if wide && logits.dtype.size() == 2 { DType::F32 } else { logits.dtype }, shape))
}

/// The class of target `i`, or `None` if it is ignored.
fn class(target: &View<'_>, i: usize, classes: usize, ignore: Option<i64>) -> Result<Option<usize>, KernelError> {
    let label = target.i64(i);
    if ignore == Some(label) {
        return Ok(None);
    }
    match usize::try_from(label) {
        Ok(class) if class < classes => Ok(Some(class)),
        _ => Err(KernelError::Label { label, classes }),
    }
}

pub fn samples() -> Vec<Sample> {
    let labels = |shape: &[usize], values: &[i64]| Tensor::from_i64(shape, values);
    let large = Tensor::from_f32(&[2, 3], &[1000.0, 1001.0, 999.0, -1000.0, -1000.5, -2000.0]);
    let cases: Vec<(&'static str, usize, Option<i64>, Tensor, Tensor)> = vec![
        ("classes last", 1, None, ramp(&[4, 5], 1), labels(&[4], &[0, 4, 2, 2])),
        ("classes in the middle", 1, None, ramp(&[2, 4, 3], 2), labels(&[2, 3], &[3, 0, 1, 2, 2, 0])),
        ("some ignored", 1, Some(-100), ramp(&[4, 3], 3), labels(&[4], &[1, -100, 0, -100])),
        ("all ignored", 1, Some(-100), ramp(&[2, 3], 7), labels(&[2], &[-100, -100])),
        ("a class ignored", 2, Some(0), ramp(&[2, 2, 3], 4), labels(&[2, 2], &[1, 0, 2, 0])),
        ("narrow labels", 1, None, ramp(&[3, 4], 5), labels(&[3], &[3, 1, 0]).cast(DType::U8)),
        ("large logits", 1, None, large, labels(&[2], &[2, 0])),
        ("one row without a batch", 0, None, ramp(&[6], 6), labels(&[], &[3])),
    ];
    let with_gradient = |(title, axis, ignore, logits, target): (_, usize, Option<i64>, Tensor, Tensor)| {
        let forward = CrossEntropy::new(axis, ignore);
        let inputs = vec![logits.clone(), target.clone()];
        let lse = run(&forward, &inputs).remove(1);
        let dloss = Tensor::from_f32(&[], &[0.75]);
        // At a large logit, the step of a finite difference is too coarse.
        let differentiate = if title == "large logits" { vec![] } else { vec![0] };
        let grad = Op::CrossEntropyGrad(CrossEntropyGrad::new(axis, ignore));
        [
            Sample { title, op: Op::CrossEntropy(forward), inputs, differentiate },
            Sample::forward(title, grad, vec![dloss, logits, target, lse]),
        ]
    };
    cases.into_iter().flat_map(with_gradient).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::sample::{assert_close, try_run};

    // torch.nn.functional.cross_entropy(logits, target, ignore_index=-100) in f64, and its backward
    #[test]
    fn numbers_agree_with_pytorch() {
        let logits = Tensor::from_f64(&[2, 3, 2], &[1., 2., 0.5, -1., 0., 3., 2., 2., -2., 0.25, 1., 1.]);
        let target = Tensor::from_i64(&[2, 2], &[2, 0, -100, 1]);
        let op = CrossEntropy::new(1, Some(-100));
        let saved = run(&op, &[logits.clone(), target.clone()]);
        assert_eq!((saved[0].shape(), saved[1].shape()), (&[][..], &[2, 2][..]));
        assert_close(&saved[0], &[1.7298959262626579]);
        assert_close(&saved[1], &[1.6802696706417346, 3.3265626412674703, 2.3265626412674703, 2.432855466878769]);
        let grad = CrossEntropyGrad::new(1, Some(-100));
        let dloss = Tensor::from_f64(&[], &[1.0]);
        let dlogits = run(&grad, &[dloss, logits, target, saved[1].clone()]);
        let expected = [
            0.16882679701855133,
            -0.2448706904092527,
            0.10239862857283279,
            0.004404295651263139, //
            -0.27122542559138413,
            0.24046639475798953,
            0.0,
            0.21621807901721574, //
            0.0,
            -0.2957602650972318,
            0.0,
            0.07954218608001606,
        ];
        assert_close(&dlogits[0], &expected);
    }

    #[test]
    fn labels_outside_the_classes_are_errors() {
        let logits = ramp(&[2, 3], 1);
        for label in [3, -1, -100, i64::MIN, i64::MAX] {
            let target = Tensor::from_i64(&[2], &[0, label]);
            let expected = Err(KernelError::Label { label, classes: 3 });
            let op = CrossEntropy::new(1, Some(-2));
            assert_eq!(try_run(&op, &[logits.clone(), target.clone()]), expected);
            let grad = CrossEntropyGrad::new(1, Some(-2));
            let (dloss, lse) = (Tensor::from_f32(&[], &[1.0]), Tensor::from_f32(&[2], &[0.0; 2]));
            assert_eq!(try_run(&grad, &[dloss, logits.clone(), target, lse]), expected);
        }
    }

    #[test]
    fn nothing_left_to_average_is_zero_without_a_gradient() {
        let (logits, target) = (ramp(&[2, 3], 1), Tensor::from_i64(&[2], &[7, 7]));
        let saved = run(&CrossEntropy::new(1, Some(7)), &[logits.clone(), target.clone()]);
        assert_eq!(saved[0].to_f64(), [0.0]);
        let grad = CrossEntropyGrad::new(1, Some(7));
        let dlogits = run(&grad, &[Tensor::from_f32(&[], &[1.0]), logits, target, saved[1].clone()]);
        assert_eq!(dlogits[0].to_f64(), [0.0; 6]);
    }

    #[test]
    fn a_masked_class_weighs_nothing() {
        let logits = Tensor::from_f64(&[1, 3], &[1.0, f64::NEG_INFINITY, 1.0]);
        let target = Tensor::from_i64(&[1], &[0]);
        let saved = run(&CrossEntropy::new(1, None), &[logits.clone(), target.clone()]);
        assert_close(&saved[0], &[std::f64::consts::LN_2]);
        let grad = CrossEntropyGrad::new(1, None);
        let dlogits = run(&grad, &[Tensor::from_f64(&[], &[1.0]), logits, target, saved[1].clone()]);
        assert_close(&dlogits[0], &[-0.5, 0.0, 0.5]);
    }

    // Plans know a model by the hash of its graph, which has the attributes of its ops.
    #[test]
    fn attributes_of_imported_losses_are_those_of_earlier_plans() {
        let text = |wide| serde_json::to_string(&CrossEntropy { wide, ..CrossEntropy::new(1, None) }).unwrap();
        assert_eq!(text(false), r#"{"axis":1,"ignore":null}"#);
        assert_eq!(serde_json::from_str::<CrossEntropy>(&text(false)).unwrap(), CrossEntropy::new(1, None));
        assert!(serde_json::from_str::<CrossEntropy>(&text(true)).unwrap().wide);
    }
}
