//! Grouped matrix product, as in a mixture of experts: rows sorted by group times the matrix of their group, without
//! dropping or padding.
//!
//! Group `g` has rows `ends[g - 1]..ends[g]`. Each end is clamped to be at least the previous one and at most the row
//! count. Rows after the last end belong to no group and give 0.

use super::sample::ramp;
use super::*;

pub fn groups(ends: impl Iterator<Item = i64>, rows: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    ends.scan(0usize, move |begin, end| {
        let end = usize::try_from(end).unwrap_or(0).clamp(*begin, rows);
        Some(std::mem::replace(begin, end)..end)
    })
}

fn check(x: &Fact, what: &'static str, ends: &Fact) -> Result<(), FactError> {
    check_float(what, x)?;
    if x.rank() != 2 {
        return Err(FactError::Rank { what, expected: "2".into(), got: x.rank() });
    }
    if ends.rank() != 1 || ends.dtype != DType::I64 {
        return Err(FactError::Attribute(format!("the group ends are {ends}, not an i64 vector")));
    }
    Ok(())
}

fn check_equal(left_name: &'static str, left: &Dim, right_name: &'static str, right: &Dim) -> Result<(), FactError> {
    if left == right { Ok(()) } else { Err(FactError::mismatch(left_name, left, right_name, right)) }
}

impl OpRule for GroupedMatMul {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [x, w, ends] = arity(inputs)?;
        check(x, "the rows", ends)?;
        check_like("the matrices", w, x, "the first")?;
        let [g, first, second] = w.shape.as_slice() else {
            return Err(FactError::Rank { what: "the matrices", expected: "3".into(), got: w.rank() });
        };
        let (k, n) = if self.transpose { (second, first) } else { (first, second) };
        check_equal("the width of the rows", &x.shape[1], "the inner dim of the matrices", k)?;
        check_equal("the number of matrices", g, "that of the groups", &ends.shape[0])?;
        Ok(vec![Fact::new(x.dtype, vec![x.shape[0].clone(), n.clone()])])
    }

    // S N K multiply-adds, independent of the group sizes.
    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        let inner = inputs.first().map_or(0, |x| x.shape[1].known().unwrap_or(0));
        Cost { flops: 2.0 * elements(&outputs[0]) * inner as f64, bytes: moved_bytes(inputs, outputs) }
    }

    // Within a group, dx = dy wᵀ and dw = xᵀ dy.
    fn backward<'b>(&self, context: BackwardContext<'b>) -> Vec<Option<Expr<'b>>> {
        let [x, w, ends] = *context.inputs else { unreachable!("infer checks the arity") };
        let dy = context.dy();
        let transposed = Op::GroupedMatMul(GroupedMatMul { transpose: !self.transpose });
        let dx = context.wanted[0].then(|| emit(transposed, &[dy, w, ends]));
        let (a, b) = if self.transpose { (dy, x) } else { (x, dy) };
        let dw = context.wanted[1].then(|| emit(Op::GroupedMatMulGrad(GroupedMatMulGrad {}), &[a, b, ends]));
        vec![dx, dw, None]
    }

    // Columns of the matrices, or the inner axis with partial sums.
    fn strategies(&self, _: &[&Fact], _: &[Fact], _: &Group) -> Vec<Strategy> {
        let (k, n) = if self.transpose { (2, 1) } else { (1, 2) };
        let mut strategies = vec![
            Strategy::along(&[None, Some(n), None], &[Some(1)]),
            Strategy::along(&[Some(1), Some(k), None], &[None]),
        ];
        strategies.extend([[true, false, false], [false, true, false]].map(|terms| Strategy::linear(&terms, 1)));
        strategies
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let (x, w, y) = (&inputs[0], &inputs[1], &mut outputs[0]);
        let ([rows, k], n) = ([x.shape[0], x.shape[1]], y.shape[1]);
        let steps = if self.transpose { [1, k] } else { [n, 1] };
        (0..y.len()).for_each(|i| y.set_f64(i, 0.0));
        for (g, range) in groups((0..inputs[2].len()).map(|g| inputs[2].i64(g)), rows).enumerate() {
            for (i, j) in range.flat_map(|i| (0..n).map(move |j| (i, j))) {
                let term = |l| x.f64(i * k + l) * w.f64(g * k * n + l * steps[0] + j * steps[1]);
                y.set_f64(i * n + j, (0..k).map(term).sum());
            }
        }
        Ok(())
    }
}

impl OpRule for GroupedMatMulGrad {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [a, b, ends] = arity(inputs)?;
        check(a, "the first rows", ends)?;
        check(b, "the second rows", ends)?;
        check_like("the second rows", b, a, "the first")?;
        check_equal("the number of the first rows", &a.shape[0], "that of the second", &b.shape[0])?;
        let shape = vec![ends.shape[0].clone(), a.shape[1].clone(), b.shape[1].clone()];
        Ok(vec![Fact::new(a.dtype, shape)])
    }

    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        let columns = inputs.get(1).map_or(0, |b| b.shape[1].known().unwrap_or(0));
        let flops = 2.0 * inputs.first().map_or(0.0, |a| elements(a)) * columns as f64;
        Cost { flops, bytes: moved_bytes(inputs, outputs) }
    }

    fn backward<'b>(&self, context: BackwardContext<'b>) -> Vec<Option<Expr<'b>>> {
        // c = aᵀ b within a group: da = b dcᵀ, db = a dc.
        let [a, b, ends] = *context.inputs else { unreachable!("infer checks the arity") };
        let dc = context.dy();
        let multiply = |rows, transpose| emit(Op::GroupedMatMul(GroupedMatMul { transpose }), &[rows, dc, ends]);
        vec![context.wanted[0].then(|| multiply(b, true)), context.wanted[1].then(|| multiply(a, false)), None]
    }

    fn strategies(&self, _: &[&Fact], _: &[Fact], _: &Group) -> Vec<Strategy> {
        let mut strategies = vec![
            Strategy::along(&[Some(1), None, None], &[Some(1)]),
            Strategy::along(&[None, Some(1), None], &[Some(2)]),
        ];
        strategies.extend([[true, false, false], [false, true, false]].map(|terms| Strategy::linear(&terms, 1)));
        strategies
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let (a, b, c) = (&inputs[0], &inputs[1], &mut outputs[0]);
        let (rows, m, n) = (a.shape[0], a.shape[1], b.shape[1]);
        for (g, range) in groups((0..inputs[2].len()).map(|g| inputs[2].i64(g)), rows).enumerate() {
            for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                let sum = range.clone().map(|row| a.f64(row * m + i) * b.f64(row * n + j)).sum();
                c.set_f64((g * m + i) * n + j, sum);
            }
        }
        Ok(())
    }
}

pub fn samples() -> Vec<Sample> {
    let ends = |list: &[i64]| Tensor::from_i64(&[list.len()], list);
    let product = |title, transpose, w: &[usize], list: &[i64]| {
        Sample::new(
            title,
            Op::GroupedMatMul(GroupedMatMul { transpose }),
            vec![ramp(&[6, 4], 1), ramp(w, 2), ends(list)],
        )
    };
    let grad = |title, list: &[i64]| {
        Sample::new(
            title,
            Op::GroupedMatMulGrad(GroupedMatMulGrad {}),
            vec![ramp(&[6, 4], 1), ramp(&[6, 3], 2), ends(list)],
        )
    };
    vec![
        product("three experts, one of them without rows", false, &[3, 4, 5], &[2, 2, 6]),
        product("matrices stored transposed", true, &[2, 5, 4], &[1, 6]),
        product("rows that belong to no group", false, &[2, 4, 3], &[1, 4]),
        product("ends that make no sense", true, &[3, 2, 4], &[-1, 9, 3]),
        grad("three experts, one of them without rows", &[2, 2, 6]),
        grad("rows that belong to no group", &[3, 5]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::sample::run;

    #[test]
    fn rows_use_the_matrix_of_their_group() {
        let x = Tensor::from_f32(&[3, 1], &[1., 2., 3.]);
        let w = Tensor::from_f32(&[2, 1, 2], &[10., 20., 100., 200.]);
        let ends = Tensor::from_i64(&[2], &[1, 3]);
        let y = run(&GroupedMatMul { transpose: false }, &[x.clone(), w, ends.clone()]);
        assert_eq!(y[0].to_f64(), [10., 20., 200., 400., 300., 600.]);
        let sums = run(&GroupedMatMulGrad {}, &[x.clone(), x, ends]);
        assert_eq!(sums[0].to_f64(), [1., 13.]);
    }
}
