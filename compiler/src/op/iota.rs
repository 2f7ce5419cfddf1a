//! Iota: counts along an axis.

use super::broadcast::check_sizes;
use super::*;
use crate::tensor::view::strides;

impl OpRule for Iota {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        if !inputs.is_empty() {
            return Err(FactError::Arity { expected: 0, got: inputs.len() });
        }
        if self.axis >= self.fact.rank() {
            return Err(FactError::Axis { axis: self.axis, rank: self.fact.rank() });
        }
        if self.fact.dtype == DType::Bool {
            return Err(FactError::DType { what: "the result", expected: "a number".into(), got: self.fact.dtype });
        }
        check_sizes("iota", &self.fact.shape)?;
        Ok(vec![self.fact.clone()])
    }

    fn reference(&self, _: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let y = &mut outputs[0];
        let (step, size) = (strides(y.shape)[self.axis], y.shape[self.axis]);
        for i in 0..y.len() {
            y.set_i64(i, (i / step % size) as i64);
        }
        Ok(())
    }
}

pub fn samples() -> Vec<Sample> {
    let sample = |title, dtype, shape: &[usize], axis| {
        Sample::forward(title, Op::Iota(Iota { fact: Fact::of(dtype, shape), axis }), vec![])
    };
    vec![
        sample("a range", DType::I64, &[5], 0),
        sample("rows", DType::F32, &[3, 2], 0),
        sample("columns", DType::I32, &[2, 3], 1),
        sample("in the middle", DType::Bf16, &[2, 3, 2], 1),
        sample("bytes", DType::U8, &[4], 0),
        sample("nothing", DType::I64, &[2, 0], 1),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_along_its_axis() {
        let mut bytes = vec![0; 6];
        let fact = Fact::of(DType::U8, &[3, 2]);
        Iota { fact, axis: 0 }.reference(&[], &mut [ViewMut::new(DType::U8, &[3, 2], &mut bytes)]).unwrap();
        assert_eq!(bytes, [0, 0, 1, 1, 2, 2]);
    }
}
