//! Cumulative sums and products along one axis.

use super::sample::ramp;
use super::softmax::rows;
use super::*;

impl OpRule for Cumulative {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [x] = arity(inputs)?;
        check_axis(self.axis, x.rank())?;
        check_dtype(x.dtype != DType::Bool, "the input", "a number", x)?;
        Ok(vec![x.clone()])
    }

    // dx is the cumulative sum of dy in the other direction.
    fn backward<'b>(&self, context: BackwardContext<'b>) -> Vec<Option<Expr<'b>>> {
        if !context.inputs[0].is_float() || self.kind == CumulativeKind::Prod {
            return vec![None];
        }
        let opposite = Cumulative { reverse: !self.reverse, ..*self };
        vec![Some(context.dy().then(Op::Cumulative(opposite)))]
    }

    fn takes_gradient(&self, _: usize) -> bool {
        self.kind != CumulativeKind::Prod
    }

    fn strategies(&self, inputs: &[&Fact], outputs: &[Fact], _: &Group) -> Vec<Strategy> {
        let mut strategies = sharding::all_but(inputs[0], &[self.axis], outputs.len());
        if self.kind == CumulativeKind::Sum {
            strategies.push(Strategy::linear(&[true], 1));
        }
        strategies
    }

    // Floats accumulate in f64 and round on each write; integers wrap.
    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let (x, y) = (&inputs[0], &mut outputs[0]);
        let op = match self.kind {
            CumulativeKind::Sum => Binary::Add,
            CumulativeKind::Prod => Binary::Mul,
        };
        for mut row in rows(x.shape, self.axis) {
            if self.reverse {
                row.reverse();
            }
            if x.dtype.is_float() {
                let start = if self.kind == CumulativeKind::Sum { 0.0 } else { 1.0 };
                row.iter().fold(start, |before, &i| {
                    let accumulated = binary::apply(op, before, x.f64(i));
                    y.set_f64(i, if self.exclusive { before } else { accumulated });
                    accumulated
                });
            } else {
                let start = if self.kind == CumulativeKind::Sum { 0 } else { 1 };
                row.iter().fold(start, |before, &i| {
                    let accumulated = binary::apply_i64(op, before, x.i64(i));
                    y.set_i64(i, if self.exclusive { before } else { accumulated });
                    accumulated
                });
            }
        }
        Ok(())
    }
}

pub fn samples() -> Vec<Sample> {
    let sample = |title, kind, axis, exclusive, reverse, x: Tensor| Sample {
        title,
        op: Op::Cumulative(Cumulative { kind, axis, exclusive, reverse }),
        differentiate: if x.dtype().is_float() && kind == CumulativeKind::Sum { vec![0] } else { vec![] },
        inputs: vec![x],
    };
    let mut list = Vec::new();
    for kind in [CumulativeKind::Sum, CumulativeKind::Prod] {
        for (exclusive, reverse) in [(false, false), (true, false), (false, true), (true, true)] {
            list.push(sample("the last axis", kind, 1, exclusive, reverse, ramp(&[3, 4], 1)));
            list.push(sample("the middle axis", kind, 1, exclusive, reverse, ramp(&[2, 3, 2], 2)));
            list.push(sample(
                "bytes",
                kind,
                0,
                exclusive,
                reverse,
                Tensor::from_i64(&[3], &[200, 3, 9]).cast(DType::U8),
            ));
        }
        list.push(sample("integers", kind, 0, false, false, Tensor::from_i64(&[3], &[i64::MAX, 2, -3])));
        list.push(sample("nothing", kind, 1, true, false, Tensor::zeros(DType::F32, &[2, 0])));
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::sample::run;

    fn accumulate(kind: CumulativeKind, exclusive: bool, reverse: bool) -> Vec<i64> {
        let op = Cumulative { kind, axis: 0, exclusive, reverse };
        run(&op, &[Tensor::from_i64(&[4], &[1, 2, 3, 4])])[0].to_i64()
    }

    #[test]
    fn all_that_came_before() {
        use CumulativeKind::{Prod, Sum};
        assert_eq!(accumulate(Sum, false, false), [1, 3, 6, 10]);
        assert_eq!(accumulate(Sum, true, false), [0, 1, 3, 6]);
        assert_eq!(accumulate(Sum, false, true), [10, 9, 7, 4]);
        assert_eq!(accumulate(Sum, true, true), [9, 7, 4, 0]);
        assert_eq!(accumulate(Prod, false, false), [1, 2, 6, 24]);
        assert_eq!(accumulate(Prod, true, true), [24, 12, 4, 1]);
    }
}
