//! Batched matrix product over the last two axes.

use super::broadcast::broadcast_shapes;
use super::sample::ramp;
use super::*;
use crate::tensor::dim::volume;
use crate::tensor::view::{indices, strides};

impl OpRule for MatMul {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [a, b] = arity(inputs)?;
        for (fact, what) in [(a, "the first operand"), (b, "the second operand")] {
            check_float(what, fact)?;
            if fact.rank() < 2 {
                let expected = "at least 2 (a vector is reshaped to a matrix first)".into();
                return Err(FactError::Rank { what, expected, got: fact.rank() });
            }
        }
        check_like("the second operand", b, a, "the first")?;
        let ((a_lead, m, k), (b_lead, n, k_b)) = (split(a, self.transpose_a), split(b, !self.transpose_b));
        if k != k_b {
            return Err(FactError::mismatch("the inner dim of the first operand", k, "that of the second", k_b));
        }
        let mut shape = broadcast_shapes(a_lead, b_lead)?;
        shape.extend([m.clone(), n.clone()]);
        Ok(vec![Fact::new(a.dtype, shape)])
    }

    // M N K multiply-adds per pair of matrices.
    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        let inner = inputs.first().map_or(0, |a| split(a, self.transpose_a).2.known().unwrap_or(0));
        Cost { flops: 2.0 * elements(&outputs[0]) * inner as f64, bytes: moved_bytes(inputs, outputs) }
    }

    // With C = A' B', where A' and B' are the operands after transposition:
    //   dA' = dC B'ᵀ; dA is dA', or its transpose B' dCᵀ if A is stored transposed
    //   dB' = A'ᵀ dC; dB is dB', or its transpose dCᵀ A' if B is stored transposed
    // Transposition is only a flag of the product. Broadcast leading axes are summed.
    fn backward<'b>(&self, context: BackwardContext<'b>) -> Vec<Option<Expr<'b>>> {
        let [a, b] = *context.inputs else { unreachable!("infer checks the arity") };
        let (dc, ta, tb) = (context.dy(), self.transpose_a, self.transpose_b);
        let da = context.wanted[0].then(|| {
            let da = if ta { product(b, dc, tb, true) } else { product(dc, b, false, !tb) };
            da.sum_to(a)
        });
        let db = context.wanted[1].then(|| {
            // A weight shared by a whole batch: flattening the batch into rows makes its gradient one product instead
            // of a sum over the batch. This requires an untransposed first operand and an element count that fits 64
            // bits.
            let countable = a.fact().volume().is_ok() && dc.fact().volume().is_ok();
            let flatten = b.fact().rank() == 2 && a.fact().rank() > 2 && !ta && countable;
            let (a, dc) = if flatten { (rows(a), rows(dc)) } else { (a, dc) };
            let db = if tb { product(dc, a, true, ta) } else { product(a, dc, !ta, false) };
            db.sum_to(b)
        });
        vec![da, db]
    }

    // Leading axes, rows of the first operand, and columns of the second; along the inner axis the results are partial
    // sums.
    fn strategies(&self, inputs: &[&Fact], outputs: &[Fact], _: &Group) -> Vec<Strategy> {
        let ([a, b], [c]) = (inputs, outputs) else { return Vec::new() };
        let lead = c.rank() - 2;
        let aligned = |x: &Fact, axis: usize| {
            let operand_axis = (axis + x.rank()).checked_sub(c.rank())?;
            (!x.shape[operand_axis].is(1)).then_some(operand_axis)
        };
        // The outer and the inner axis.
        let ends = |x: &Fact, outer_last: bool| {
            let [first, last] = [x.rank() - 2, x.rank() - 1];
            if outer_last { (last, first) } else { (first, last) }
        };
        let ((m, a_inner), (n, b_inner)) = (ends(a, self.transpose_a), ends(b, !self.transpose_b));
        let mut strategies: Vec<Strategy> =
            (0..lead).map(|axis| Strategy::along(&[aligned(a, axis), aligned(b, axis)], &[Some(axis)])).collect();
        strategies.push(Strategy::along(&[Some(m), None], &[Some(lead)]));
        strategies.push(Strategy::along(&[None, Some(n)], &[Some(lead + 1)]));
        strategies.push(Strategy::along(&[Some(a_inner), Some(b_inner)], &[None]));
        strategies.extend([[true, false], [false, true]].map(|terms| Strategy::linear(&terms, 1)));
        strategies
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let (a, b, c) = (&inputs[0], &inputs[1], &mut outputs[0]);
        let lead = c.shape.len() - 2;
        let (m, n) = (c.shape[lead], c.shape[lead + 1]);
        let k = a.shape[a.shape.len() - if self.transpose_a { 2 } else { 1 }];
        // Strides of an operand along (row, column) of its transposed matrix.
        let (a_row, a_col) = if self.transpose_a { (1, m) } else { (k, 1) };
        let (b_row, b_col) = if self.transpose_b { (1, k) } else { (n, 1) };
        for (batch, index) in indices(&c.shape[..lead]).enumerate() {
            let a_from = matrix_of(a.shape, &index) * m * k;
            let b_from = matrix_of(b.shape, &index) * k * n;
            for i in 0..m {
                for j in 0..n {
                    let sum: f64 = (0..k)
                        .map(|l| a.f64(a_from + i * a_row + l * a_col) * b.f64(b_from + l * b_row + j * b_col))
                        .sum();
                    c.set_f64((batch * m + i) * n + j, sum);
                }
            }
        }
        Ok(())
    }
}

/// Leading, outer and inner dims of an operand; `outer_last` tells whether the outer one is stored last.
fn split(fact: &Fact, outer_last: bool) -> (&[Dim], &Dim, &Dim) {
    let (lead, matrix) = fact.shape.split_at(fact.rank() - 2);
    if outer_last { (lead, &matrix[1], &matrix[0]) } else { (lead, &matrix[0], &matrix[1]) }
}

fn product<'b>(a: Expr<'b>, b: Expr<'b>, transpose_a: bool, transpose_b: bool) -> Expr<'b> {
    emit(Op::MatMul(MatMul { transpose_a, transpose_b }), &[a, b])
}

fn rows(x: Expr<'_>) -> Expr<'_> {
    let shape = x.shape();
    let (last, rest) = shape.split_last().expect("an operand has at least two dims");
    let count = volume(rest).expect("all elements were counted before");
    x.reshape(vec![count, last.clone()])
}

/// Index of the operand's matrix that is broadcast to `index` of the leading axes.
fn matrix_of(shape: &[usize], index: &[usize]) -> usize {
    let lead = &shape[..shape.len() - 2];
    let lead_index = &index[index.len() - lead.len()..];
    lead.iter()
        .zip(strides(lead))
        .zip(lead_index)
        .map(|((&size, stride), &i)| if size == 1 { 0 } else { i * stride })
        .sum()
}

pub fn samples() -> Vec<Sample> {
    let sample = |title, transpose_a, transpose_b, a: &[usize], b: &[usize]| {
        Sample::new(title, Op::MatMul(MatMul { transpose_a, transpose_b }), vec![ramp(a, 1), ramp(b, 2)])
    };
    vec![
        sample("two matrices", false, false, &[3, 4], &[4, 5]),
        sample("first transposed", true, false, &[4, 3], &[4, 5]),
        sample("second transposed, as in a linear layer", false, true, &[3, 4], &[5, 4]),
        sample("both transposed", true, true, &[4, 3], &[5, 4]),
        sample("a batch by one matrix", false, false, &[2, 3, 4], &[4, 5]),
        sample("a batch by one matrix, first transposed", true, false, &[2, 4, 3], &[4, 5]),
        sample("a batch by one matrix, second transposed", false, true, &[2, 3, 4], &[5, 4]),
        sample("a batch by one matrix, both transposed", true, true, &[2, 4, 3], &[5, 4]),
        sample("two leading dims by one matrix", false, true, &[2, 2, 3, 4], &[5, 4]),
        sample("one matrix by a batch", false, false, &[3, 4], &[2, 4, 5]),
        sample("one matrix by a batch, both transposed", true, true, &[4, 3], &[2, 5, 4]),
        sample("leading dims stretch on both sides", false, false, &[2, 1, 3, 4], &[1, 5, 4, 2]),
        sample("leading dims stretch, first transposed", true, false, &[2, 1, 4, 3], &[5, 4, 2]),
        sample("leading dims stretch, second transposed", false, true, &[5, 3, 4], &[2, 1, 2, 4]),
        sample("leading dims stretch, both transposed", true, true, &[2, 1, 4, 3], &[1, 5, 2, 4]),
        sample("attention scores", false, true, &[2, 2, 3, 4], &[2, 2, 3, 4]),
        sample("one by one", false, false, &[1, 1], &[1, 1]),
        sample("no inner elements", false, false, &[2, 0], &[0, 3]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::sample::run;

    #[test]
    fn a_small_product_by_hand() {
        let a = Tensor::from_f32(&[2, 3], &[1., 2., 3., 4., 5., 6.]);
        let b = Tensor::from_f32(&[3, 2], &[7., 8., 9., 10., 11., 12.]);
        let plain = MatMul { transpose_a: false, transpose_b: false };
        assert_eq!(run(&plain, &[a.clone(), b.clone()])[0].to_f64(), [58., 64., 139., 154.]);
        // bᵀ aᵀ = (a b)ᵀ
        let both = MatMul { transpose_a: true, transpose_b: true };
        assert_eq!(run(&both, &[b, a])[0].to_f64(), [58., 139., 64., 154.]);
    }

    #[test]
    fn leading_dims_broadcast() {
        let a = Tensor::from_f32(&[2, 1, 1, 1], &[1., 2.]);
        let b = Tensor::from_f32(&[3, 1, 1], &[3., 4., 5.]);
        let y = run(&MatMul { transpose_a: false, transpose_b: false }, &[a, b]);
        assert_eq!(y[0].shape(), [2, 3, 1, 1]);
        assert_eq!(y[0].to_f64(), [3., 4., 5., 6., 8., 10.]);
    }

    /// Records the emitted ops; all values have one fact.
    struct Listing(Vec<Fact>, Vec<Op>);

    impl Emit for Listing {
        fn emit_all(&mut self, op: Op, inputs: &[Value]) -> Vec<Value> {
            let facts: Vec<&Fact> = inputs.iter().map(|v| &self.0[v.node.0 as usize]).collect();
            let mut facts = crate::op::table::rule(&op).infer(&facts).unwrap();
            let node = NodeId(self.0.len() as u32);
            self.0.push(facts.remove(0));
            self.1.push(op);
            vec![Value { node, output: 0 }]
        }

        fn fact(&self, value: Value) -> Fact {
            self.0[value.node.0 as usize].clone()
        }
    }

    fn backward_ops(a: &[usize], b: &[usize], wanted: [bool; 2]) -> Vec<Op> {
        let op = MatMul { transpose_a: false, transpose_b: true };
        let (a, b) = (Fact::of(DType::F32, a), Fact::of(DType::F32, b));
        let c = op.infer(&[&a, &b]).unwrap().remove(0);
        let mut out = Listing(vec![a, b, c.clone(), c], vec![]);
        let [a, b, c, dc] = [0, 1, 2, 3].map(|n| Value { node: NodeId(n), output: 0 });
        expr::backward(&op, [&[a, b], &[c]], &[Some(dc)], &wanted, &mut out);
        out.1
    }

    #[test]
    fn the_gradient_of_a_shared_weight_is_one_product_of_matrices() {
        let ops = backward_ops(&[2, 3, 4], &[5, 4], [false, true]);
        let reshape = |rows: i64, columns: i64| Op::Reshape(Reshape { shape: vec![rows.into(), columns.into()] });
        let product = Op::MatMul(MatMul { transpose_a: true, transpose_b: false });
        assert_eq!(ops, [reshape(6, 4), reshape(6, 5), product]);
        // The gradient of the batched operand is a single product.
        assert_eq!(backward_ops(&[2, 3, 4], &[5, 4], [true, false]).len(), 1);
        // If flattening would overflow, the gradient is a product, a sum and a reshape.
        assert_eq!(backward_ops(&[1 << 40, 1 << 40, 4], &[5, 4], [false, true]).len(), 3);
    }

    #[test]
    fn cost_counts_two_flops_a_multiply_add() {
        let (a, b) = (Fact::of(DType::F32, &[2, 4, 3]), Fact::of(DType::F32, &[5, 4]));
        let op = MatMul { transpose_a: true, transpose_b: true };
        let c = op.infer(&[&a, &b]).unwrap();
        assert_eq!(op.cost(&[&a, &b], &c).flops, (2 * 2 * 3 * 5 * 4) as f64);
    }
}
