//! Roll: shifts elements along an axis, with wrap-around.

use super::broadcast::copy_elements;
use super::reduce::check_axes;
use super::*;

impl OpRule for Roll {
    fn name(&self) -> &'static str {
        "roll"
    }

    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [x] = inputs else { return Err(FactError::Arity { expected: 1, got: inputs.len() }) };
        check_axes(&[self.axis], x.rank())?;
        Ok(vec![(*x).clone()])
    }

    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        Cost { flops: 0.0, bytes: moved(inputs, outputs) }
    }

    // dx = dy shifted back
    fn backward(&self, at: BackwardContext<'_>, out: &mut dyn Emit) -> Vec<Option<Value>> {
        if !out.fact(at.inputs[0]).dtype.is_float() {
            return vec![None];
        }
        let back = Roll { axis: self.axis, shift: self.shift.saturating_neg() };
        vec![Some(out.emit(Op::Roll(back), &[at.dy()]))]
    }

    fn strategies(&self, inputs: &[&Fact], outputs: &[Fact], _: &Group) -> Vec<Strategy> {
        let mut ways = sharding::all_but(inputs[0], &[self.axis], outputs.len());
        ways.push(Strategy::linear(&[true], outputs.len()));
        ways
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let (x, y) = (&inputs[0], &mut outputs[0]);
        let inner: usize = x.shape[self.axis + 1..].iter().product();
        let size = x.shape[self.axis];
        let from = (0..x.len()).map(|i| {
            let at = i / inner % size;
            let source = (at as i64 - self.shift).rem_euclid(size as i64) as usize;
            i + source * inner - at * inner
        });
        copy_elements(x, y, from);
        Ok(())
    }
}

pub fn samples() -> Vec<Sample> {
    let sample = |title, x: Tensor, axis, shift| Sample {
        title,
        op: Op::Roll(Roll { axis, shift }),
        differentiate: if x.dtype().is_float() { vec![0] } else { vec![] },
        inputs: vec![x],
    };
    let six = || Tensor::from_f32(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    vec![
        sample("forward along the last axis", six(), 1, 1),
        sample("backward along the first axis", six(), 0, -3),
        sample("nothing", Tensor::zeros(DType::F32, &[0, 2]), 0, 1),
        sample("integers", Tensor::from_i64(&[3], &[1, 2, i64::MAX]), 0, 5),
    ]
}
