//! Scaled dot-product attention (Vaswani et al., 2017, section 3.2.1) and its gradient, without a stored score matrix.
//!
//! For a query `i` and the keys `j` of its head:
//!
//!   s_j   = scale q_i·k_j + mask_ij, -∞ where a boolean mask is false, or causal and j > i
//!   lse_i = log Σ e^(s_j),  p_j = e^(s_j - lse_i),  o_i = Σ d_ij p_j v_j
//!   dv_j += d_ij p_j do_i
//!   ds_j  = p_j (d_ij do_i·v_j - do_i·o_i),  dq_i += scale ds_j k_j,  dk_j += scale ds_j q_i
//!
//! `d` are the factors of the dropout, 1 without it. The backward recomputes `p` from the log-sum-exp, and fast kernels
//! visit keys and queries in blocks (Dao, FlashAttention-2, 2023, algorithms 1 and 2). Element `(i, j)` of a head has
//! the dropout factor that [`Dropout`] gives the same element of the full weights `[…, H, S, T]`.
//!
//! With fewer key heads than query heads, consecutive query heads share one (Ainslie et al., GQA, 2023).

use super::broadcast::{broadcast_indices, broadcast_shapes};
use super::sample::{ramp, run};
use super::*;

/// Magnitude of a log-sum-exp from which the gradient divides weights by their sum: `e^(s - lse)` inherits the rounding of
/// the log-sum-exp, which in `f32` is 10⁻³ here and loses the sum of many keys that are masked by the lowest number.
pub const COARSE: f64 = (1u64 << 14) as f64;

/// Per score: as in [`Softmax`].
const SOFTMAX_FLOPS: f64 = 20.0;

/// The gradient computes five products where the forward computes two.
const BACKWARD: f64 = 2.5;

impl EmptyRow {
    /// The weight of each key for a query that sees none.
    pub fn weight(self, keys: usize) -> f64 {
        match self {
            EmptyRow::Zero => 0.0,
            EmptyRow::Mean => 1.0 / keys as f64,
            EmptyRow::Nan => f64::NAN,
        }
    }
}

/// The optional inputs, which follow the fixed ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extras {
    pub mask: Option<usize>,
    pub counter: Option<usize>,
    pub device: Option<usize>,
}

impl Attention {
    /// Number of inputs besides query, key, value and mask.
    fn random_inputs(&self) -> usize {
        usize::from(self.dropout.is_some()) + usize::from(self.part.is_some())
    }

    /// The places of the optional inputs among `inputs`, of which the first `fixed` are not optional.
    pub fn extras(&self, fixed: usize, inputs: usize) -> Result<Extras, FactError> {
        let masked = inputs.wrapping_sub(fixed + self.random_inputs());
        if masked > 1 {
            return Err(FactError::Arity { expected: fixed + self.random_inputs(), got: inputs });
        }
        let counter = self.dropout.map(|_| fixed + masked);
        let device = self.part.map(|_| fixed + masked + 1);
        Ok(Extras { mask: (masked == 1).then_some(fixed), counter, device })
    }

    /// The facts of output and log-sum-exp.
    fn outputs(&self, [query, key, value]: [&Fact; 3], optional_facts: &[&Fact]) -> Result<[Fact; 2], FactError> {
        if !self.scale.is_finite() {
            return Err(FactError::Attribute(format!("the scale is {}", self.scale)));
        }
        if self.causal && self.empty == EmptyRow::Mean {
            return Err(FactError::Attribute("a causal query always sees a key, so there is no mean of all".into()));
        }
        check_float("the query", query)?;
        if query.rank() < 3 {
            return Err(FactError::Rank { what: "the query", expected: "at least 3".into(), got: query.rank() });
        }
        let heads = query.rank() - 3;
        for (fact, what) in [(key, "the key"), (value, "the value")] {
            check_like(what, fact, query, "the query")?;
            if fact.rank() != query.rank() {
                let expected = format!("{}, as the query", query.rank());
                return Err(FactError::Rank { what, expected, got: fact.rank() });
            }
        }
        let check_equal = |left_name, left: &[Dim], right_name, right: &[Dim]| {
            let text = broadcast::shape_text;
            if left == right {
                Ok(())
            } else {
                Err(FactError::mismatch(left_name, text(left), right_name, text(right)))
            }
        };
        check_equal("the leading shape of the query", &query.shape[..heads], "that of the key", &key.shape[..heads])?;
        let head_axis = heads + 2;
        check_equal("the shape of the key", &key.shape[..head_axis], "that of the value", &value.shape[..head_axis])?;
        check_equal(
            "the head size of the query",
            &query.shape[head_axis..],
            "that of the key",
            &key.shape[head_axis..],
        )?;
        let (query_heads, key_heads) = (&query.shape[heads], &key.shape[heads]);
        if query_heads != key_heads && (key_heads.is(0) || query_heads.div_exact(key_heads).is_err()) {
            return Err(FactError::Attribute(format!("{query_heads} query heads do not share {key_heads} key heads")));
        }
        let mut scores = query.shape[..head_axis].to_vec();
        scores.push(key.shape[heads + 1].clone());
        let extras = self.extras(0, optional_facts.len())?;
        if let Some(mask) = extras.mask.map(|at| optional_facts[at]) {
            let is_supported = mask.dtype == DType::Bool || mask.dtype == query.dtype;
            check_dtype(is_supported, "the mask", &format!("bool or {}", query.dtype), mask)?;
            check_equal(
                "the shape of mask and scores",
                &broadcast_shapes(&mask.shape, &scores)?,
                "the scores",
                &scores,
            )?;
        }
        for at in [extras.counter, extras.device].into_iter().flatten() {
            check_same("a random input", optional_facts[at], "a single index", &Fact::of(DType::I64, &[]))?;
        }
        if let Some(Dropout { ratio, .. }) = self.dropout.filter(|op| !(0.0..=1.0).contains(&op.ratio)) {
            return Err(FactError::Attribute(format!("the ratio is {ratio}, not from 0 to 1")));
        }
        if self.part.is_some_and(|part| part.run == 0 || part.devices == 0 || self.dropout.is_none()) {
            return Err(FactError::Attribute("a part of a dropout has devices, and runs of elements".into()));
        }
        let mut shape = query.shape[..head_axis].to_vec();
        let kind = if query.dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let sums = Fact::new(kind, shape.clone());
        shape.push(value.shape[head_axis].clone());
        Ok([Fact::new(query.dtype, shape), sums])
    }

    /// FLOPs of the forward: two products and a softmax, of the scores up to the diagonal if causal.
    fn flops(&self, query: &Fact, value: &Fact) -> f64 {
        let size = |fact: &Fact, axis_from_end: usize| {
            fact.rank().checked_sub(axis_from_end).and_then(|axis| fact.shape[axis].known()).unwrap_or(0) as f64
        };
        let (queries, keys) = (size(query, 2), size(value, 2));
        let square = queries.min(keys);
        let pairs = match self.causal {
            true => square * (square + 1.0) / 2.0 + (queries - square) * keys,
            false => queries * keys,
        };
        let heads = if queries > 0.0 { elements(query) / queries / size(query, 1).max(1.0) } else { 0.0 };
        heads * pairs * (2.0 * (size(query, 1) + size(value, 1)) + SOFTMAX_FLOPS)
    }

    /// Shardings. The first inputs and the outputs are tensors of the query, or of the keys if `shared`; of the others,
    /// only the mask is given.
    fn list_strategies(
        &self,
        rank: usize,
        inputs: &[Option<&Fact>],
        shared: &[bool],
        outputs: &[bool],
        key_heads: &Dim,
    ) -> Vec<Strategy> {
        // The mask aligns with the scores from its last axis, as of the query up to the queries.
        let input_axis = |at: usize, axis: usize| match inputs[at] {
            None => None,
            Some(mask) if at >= shared.len() => {
                let input_axis = (axis + mask.rank()).checked_sub(rank)?;
                (!mask.shape[input_axis].is(1)).then_some(input_axis)
            }
            Some(_) => Some(axis),
        };
        let mut strategies = Vec::new();
        if self.part.is_some() {
            return strategies;
        }
        // Examples and heads.
        for axis in 0..=rank - 3 {
            let split: Vec<Option<usize>> = (0..inputs.len()).map(|at| input_axis(at, axis)).collect();
            let strategy = Strategy::along(&split, &vec![Some(axis); outputs.len()]);
            strategies.push(if self.dropout.is_some() { strategy.written() } else { strategy });
        }
        // Without dropout: heads of the query that share one of the key, and queries that all see the same keys.
        if self.dropout.is_none() {
            let mut rows = Vec::new();
            if key_heads.is(1) {
                rows.push(rank - 3);
            }
            if !self.causal {
                rows.push(rank - 2);
            }
            for axis in rows {
                let split = |at: usize| if at < shared.len() && shared[at] { None } else { input_axis(at, axis) };
                let split: Vec<Option<usize>> = (0..inputs.len()).map(split).collect();
                let output_axes: Vec<Option<usize>> = outputs.iter().map(|shared| (!shared).then_some(axis)).collect();
                strategies.push(Strategy::along(&split, &output_axes));
            }
        }
        strategies
    }

    /// The op of a device, for a strategy that splits the query, input `query`, along an example or head axis.
    fn part<'b>(&self, strategy: &Strategy, context: &LocalContext<'b>, query: usize) -> (Attention, Expr<'b>) {
        let Sharding::Split(cut) = strategy.inputs[query] else { unreachable!("an axis of the query is sharded") };
        let sizes = |value: usize| context.inputs[value].fact().concrete().expect("sizes are known under sharding");
        let (query_shape, key_shape) = (sizes(query), sizes(query + 1));
        let run =
            query_shape[cut.axis..query_shape.len() - 1].iter().product::<usize>() * key_shape[key_shape.len() - 2];
        let part = Attention { part: Some(DropoutShard { run, devices: context.devices }), ..*self };
        (part, context.inputs[query].device(context.devices))
    }
}

impl OpRule for Attention {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [query, key, value, optional_facts @ ..] = inputs else {
            return Err(FactError::Arity { expected: 3 + self.random_inputs(), got: inputs.len() });
        };
        Ok(self.outputs([query, key, value], optional_facts)?.to_vec())
    }

    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        Cost { flops: self.flops(inputs[0], inputs[2]), bytes: moved_bytes(inputs, outputs) }
    }

    // dq, dk, dv = AttentionGrad(do, q, k, v, o, lse, …)
    fn backward<'b>(&self, context: BackwardContext<'b>) -> Vec<Option<Expr<'b>>> {
        let mut gradients = vec![None; context.inputs.len()];
        let Some(dy) = context.d_outputs[0] else { return gradients };
        let mut inputs = vec![dy];
        inputs.extend(&context.inputs[..3]);
        inputs.extend(context.outputs);
        inputs.extend(&context.inputs[3..]);
        let of_tensors = emit_all(Op::AttentionGrad(AttentionGrad { forward: *self }), &inputs);
        gradients[..3].copy_from_slice(&context.wanted_of(of_tensors));
        gradients
    }

    fn takes_gradient(&self, output: usize) -> bool {
        output == 0
    }

    fn strategies(&self, inputs: &[&Fact], _: &[Fact], _: &Group) -> Vec<Strategy> {
        let Ok(extras) = self.extras(3, inputs.len()) else { return Vec::new() };
        let tensors: Vec<Option<&Fact>> =
            (0..inputs.len()).map(|at| (at < 3 || extras.mask == Some(at)).then_some(inputs[at])).collect();
        let rank = inputs[0].rank();
        self.list_strategies(rank, &tensors, &[false, true, true], &[false, false], &inputs[1].shape[rank - 3])
    }

    fn write_part<'b>(&self, strategy: &Strategy, context: &LocalContext<'b>) -> Vec<Expr<'b>> {
        let (part, device) = self.part(strategy, context, 0);
        emit_all(Op::Attention(part), &[context.inputs, &[device]].concat())
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let [y, sums] = outputs else { unreachable!("infer gives two outputs") };
        let scores = Scores::new(self, 3, [&inputs[0], &inputs[1], &inputs[2]], inputs)?;
        for row in 0..scores.rows {
            let row_scores = scores.of(row);
            let sum = scores.log_sum_exp(&row_scores);
            let weights = scores.weights(row_scores, sum);
            sums.set_f64(row, sum);
            for c in 0..scores.width {
                let term =
                    |j: usize| scores.dropout_factor(row, j) * weights[j] * inputs[2].f64(scores.value(row, j, c));
                y.set_f64(row * scores.width + c, (0..scores.keys).map(term).sum());
            }
        }
        Ok(())
    }
}

impl OpRule for AttentionGrad {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [dy, query, key, value, y, sums, optional_facts @ ..] = inputs else {
            return Err(FactError::Arity { expected: 6 + self.forward.random_inputs(), got: inputs.len() });
        };
        let [output, sums_fact] = self.forward.outputs([query, key, value], optional_facts)?;
        check_same("the output gradient", dy, "the output", &output)?;
        check_same("the saved output", y, "the output", &output)?;
        check_same("the log-sum-exp", sums, "the shape of the queries", &sums_fact)?;
        Ok([query, key, value].into_iter().map(|fact| (*fact).clone()).collect())
    }

    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        Cost { flops: BACKWARD * self.forward.flops(inputs[1], inputs[3]), bytes: moved_bytes(inputs, outputs) }
    }

    // No second-order gradient: no core op expresses it.

    fn takes_gradient(&self, _: usize) -> bool {
        false
    }

    fn strategies(&self, inputs: &[&Fact], _: &[Fact], _: &Group) -> Vec<Strategy> {
        let Ok(extras) = self.forward.extras(6, inputs.len()) else { return Vec::new() };
        let tensors: Vec<Option<&Fact>> =
            (0..inputs.len()).map(|at| (at < 6 || extras.mask == Some(at)).then_some(inputs[at])).collect();
        let rank = inputs[1].rank();
        let shared = [false, false, true, true, false, false];
        self.forward.list_strategies(rank, &tensors, &shared, &[false, true, true], &inputs[2].shape[rank - 3])
    }

    fn write_part<'b>(&self, strategy: &Strategy, context: &LocalContext<'b>) -> Vec<Expr<'b>> {
        let (forward, device) = self.forward.part(strategy, context, 1);
        emit_all(Op::AttentionGrad(AttentionGrad { forward }), &[context.inputs, &[device]].concat())
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let [dy, query, key, value, y, sums, ..] = inputs else { unreachable!("infer checks the arity") };
        let scores = Scores::new(&self.forward, 6, [query, key, value], inputs)?;
        let scale = self.forward.scale;
        let mut gradients = [query, key, value].map(|x| vec![0.0; x.len()]);
        for row in 0..scores.rows {
            let sum = sums.f64(row);
            let weights = scores.weights(scores.of(row), sum);
            let is_empty = sum == f64::NEG_INFINITY;
            let out = |c: usize| dy.f64(row * scores.width + c);
            let row_dot: f64 = (0..scores.width).map(|c| out(c) * y.f64(row * scores.width + c)).sum();
            for (j, p) in weights.into_iter().enumerate() {
                let factor = scores.dropout_factor(row, j);
                let dp: f64 = (0..scores.width).map(|c| out(c) * value.f64(scores.value(row, j, c))).sum();
                // A mean of all values does not depend on the scores.
                let flat = is_empty && self.forward.empty != EmptyRow::Nan;
                let ds = if flat { 0.0 } else { scale * p * (factor * dp - row_dot) };
                (0..scores.width).for_each(|c| gradients[2][scores.value(row, j, c)] += factor * p * out(c));
                for c in 0..scores.depth {
                    let (q_at, k_at) = (row * scores.depth + c, scores.key(row, j, c));
                    gradients[0][q_at] += ds * key.f64(k_at);
                    gradients[1][k_at] += ds * query.f64(q_at);
                }
            }
        }
        for (output, gradients) in outputs.iter_mut().zip(gradients) {
            gradients.into_iter().enumerate().for_each(|(i, v)| output.set_f64(i, v));
        }
        Ok(())
    }
}

/// The scores of the reference kernels, row by row.
struct Scores<'a> {
    op: &'a Attention,
    query: &'a View<'a>,
    keys_of: &'a View<'a>,
    mask: Option<(&'a View<'a>, Vec<usize>)>,
    dropout: Option<(dropout::Mask, f64, usize)>,
    rows: usize,
    queries: usize,
    keys: usize,
    depth: usize,
    width: usize,
    /// Query heads per key head.
    heads_per_key: usize,
}

impl<'a> Scores<'a> {
    fn new(
        op: &'a Attention,
        fixed: usize,
        [query, key, value]: [&'a View<'a>; 3],
        inputs: &'a [View<'a>],
    ) -> Result<Scores<'a>, KernelError> {
        let extras = op.extras(fixed, inputs.len()).expect("infer checks the arity");
        let heads = query.shape.len() - 3;
        let [queries, keys] = [query.shape[heads + 1], key.shape[heads + 1]];
        let mut shape = query.shape[..heads + 2].to_vec();
        let rows = shape.iter().product();
        shape.push(keys);
        let mask = extras.mask.map(|at| (&inputs[at], broadcast_indices(inputs[at].shape, &shape).collect()));
        let dropout = match (op.dropout, extras.counter) {
            (Some(dropout), Some(at)) => {
                let device = extras.device.map_or(Ok(0), |at| op.device(inputs[at].i64(0)))?;
                Some((dropout.mask(inputs[at].i64(0)), dropout.scale(), device))
            }
            _ => None,
        };
        let (depth, width) = (query.shape[heads + 2], value.shape[heads + 2]);
        let heads_per_key = query.shape[heads].checked_div(key.shape[heads]).unwrap_or(1).max(1);
        Ok(Scores { op, query, keys_of: key, mask, dropout, rows, queries, keys, depth, width, heads_per_key })
    }

    /// The scores of a query; -∞ for a key that it does not see.
    fn of(&self, row: usize) -> Vec<f64> {
        let score = |j: usize| {
            if self.op.causal && j > row % self.queries {
                return f64::NEG_INFINITY;
            }
            let products = (0..self.depth)
                .map(|c| self.query.f64(row * self.depth + c) * self.keys_of.f64(self.key(row, j, c)))
                .sum::<f64>();
            match &self.mask {
                None => self.op.scale * products,
                Some((mask, mask_index)) => {
                    let at = mask_index[row * self.keys + j];
                    match (mask.dtype, mask.bool(at)) {
                        (DType::Bool, true) => self.op.scale * products,
                        (DType::Bool, false) => f64::NEG_INFINITY,
                        _ => self.op.scale * products + mask.f64(at),
                    }
                }
            }
        };
        (0..self.keys).map(score).collect()
    }

    fn log_sum_exp(&self, scores: &[f64]) -> f64 {
        if scores.iter().all(|s| *s == f64::NEG_INFINITY) {
            return f64::NEG_INFINITY;
        }
        let maximum = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        maximum + scores.iter().map(|s| (s - maximum).exp()).sum::<f64>().ln()
    }

    /// The weights of a row of scores, before dropout.
    fn weights(&self, scores: Vec<f64>, sum: f64) -> Vec<f64> {
        if sum == f64::NEG_INFINITY {
            return vec![self.op.empty.weight(self.keys); self.keys];
        }
        let mut weights: Vec<f64> = scores.into_iter().map(|score| (score - sum).exp()).collect();
        if sum.is_finite() && sum.abs() > COARSE {
            let total: f64 = weights.iter().sum();
            weights.iter_mut().for_each(|weight| *weight /= total);
        }
        weights
    }

    fn dropout_factor(&self, row: usize, j: usize) -> f64 {
        let Some((mask, scale, device)) = self.dropout else { return 1.0 };
        if mask.keeps(self.op.place(row * self.keys + j, device)) { scale } else { 0.0 }
    }

    fn key(&self, row: usize, j: usize, c: usize) -> usize {
        ((row / self.queries / self.heads_per_key) * self.keys + j) * self.depth + c
    }

    fn value(&self, row: usize, j: usize, c: usize) -> usize {
        ((row / self.queries / self.heads_per_key) * self.keys + j) * self.width + c
    }
}

impl Attention {
    /// Index in the weights of all devices of element `i` of a device's part.
    #[inline(always)]
    pub fn place(&self, i: usize, device: usize) -> usize {
        match self.part {
            None => i,
            Some(DropoutShard { run, devices }) => (i / run * devices + device) * run + i % run,
        }
    }

    /// The rank of a device in its group.
    pub fn device(&self, index: i64) -> Result<usize, KernelError> {
        let devices = self.part.map_or(1, |part| part.devices);
        let device = usize::try_from(index).ok().filter(|device| *device < devices);
        device.ok_or(KernelError::Index { index, size: devices })
    }
}

pub fn samples() -> Vec<Sample> {
    let plain = Attention { scale: 0.6, causal: false, empty: EmptyRow::Nan, dropout: None, part: None };
    let causal = Attention { causal: true, ..plain };
    let zero = Attention { empty: EmptyRow::Zero, ..plain };
    let dropped = |op: Attention| Attention { dropout: Some(Dropout { ratio: 0.3, stream: 4 }), ..op };
    let part = Attention { part: Some(DropoutShard { run: 12, devices: 3 }), ..dropped(plain) };
    let counter = Tensor::from_i64(&[], &[7]);
    // The second row is empty.
    let bools =
        Tensor::from_bool(&[3, 4], &[true, false, true, true, false, false, false, false, true, true, true, false]);
    let mut additive = ramp(&[2, 1, 1, 4], 9).to_f32();
    additive[5] = f32::NEG_INFINITY;
    let additive = Tensor::from_f32(&[2, 1, 1, 4], &additive);
    type Case = (&'static str, Attention, [&'static [usize]; 3], Vec<Tensor>);
    let cases: Vec<Case> = vec![
        ("two heads", plain, [&[2, 2, 3, 4], &[2, 2, 5, 4], &[2, 2, 5, 3]], vec![]),
        ("rank 3", plain, [&[2, 3, 4], &[2, 3, 4], &[2, 3, 4]], vec![]),
        ("causal", causal, [&[1, 2, 4, 3], &[1, 2, 4, 3], &[1, 2, 4, 2]], vec![]),
        ("causal, more keys", causal, [&[2, 3, 2], &[2, 5, 2], &[2, 5, 2]], vec![]),
        ("causal, fewer keys", causal, [&[2, 5, 2], &[2, 3, 2], &[2, 3, 2]], vec![]),
        ("grouped heads", causal, [&[2, 4, 4, 2], &[2, 2, 4, 2], &[2, 2, 4, 2]], vec![]),
        ("one key head", plain, [&[4, 4, 2], &[1, 4, 2], &[1, 4, 2]], vec![]),
        ("boolean mask, an empty row", zero, [&[2, 2, 3, 2], &[2, 2, 4, 2], &[2, 2, 4, 3]], vec![bools.clone()]),
        (
            "boolean mask, the mean of an empty row",
            Attention { empty: EmptyRow::Mean, ..plain },
            [&[2, 2, 3, 2], &[2, 2, 4, 2], &[2, 2, 4, 3]],
            vec![bools.clone()],
        ),
        ("additive mask", plain, [&[2, 2, 3, 2], &[2, 2, 4, 2], &[2, 2, 4, 3]], vec![additive]),
        ("dropout", dropped(causal), [&[2, 2, 4, 2], &[2, 2, 4, 2], &[2, 2, 4, 2]], vec![counter.clone()]),
        (
            "boolean mask and dropout",
            dropped(zero),
            [&[2, 2, 3, 2], &[2, 2, 4, 2], &[2, 2, 4, 2]],
            vec![bools, counter.clone()],
        ),
        (
            "dropout, the second of three",
            part,
            [&[2, 2, 3, 2], &[2, 2, 4, 2], &[2, 2, 4, 2]],
            vec![counter, Tensor::from_i64(&[], &[1])],
        ),
    ];
    let with_gradient = |(title, op, shapes, extras): Case| {
        let mut inputs: Vec<Tensor> = (1..).zip(shapes).map(|(seed, shape)| ramp(shape, seed)).collect();
        inputs.extend(extras.iter().cloned());
        let saved = run(&op, &inputs);
        let mut grad_inputs = vec![ramp(saved[0].shape(), 4)];
        grad_inputs.extend_from_slice(&inputs[..3]);
        grad_inputs.extend(saved);
        grad_inputs.extend(extras);
        let grad = Op::AttentionGrad(AttentionGrad { forward: op });
        [
            Sample { title, op: Op::Attention(op), inputs, differentiate: vec![0, 1, 2] },
            Sample::forward(title, grad, grad_inputs),
        ]
    };
    cases.into_iter().flat_map(with_gradient).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain() -> Attention {
        Attention { scale: 0.5, causal: false, empty: EmptyRow::Zero, dropout: None, part: None }
    }

    // softmax((q kᵀ) / 2) v in its parts.
    #[test]
    fn numbers_agree_with_its_parts() {
        let (q, k, v) = (ramp(&[2, 3, 4], 1), ramp(&[2, 5, 4], 2), ramp(&[2, 5, 3], 3));
        let [q, k, v] = [q, k, v].map(|t| t.cast(DType::F64));
        let scores = run(&MatMul { transpose_a: false, transpose_b: true }, &[q.clone(), k.clone()]).remove(0);
        let half = Tensor::from_f64(&[], &[0.5]);
        let weights = run(&Softmax { axis: 2 }, &run(&Binary::Mul, &[scores, half])).remove(0);
        let expected = run(&MatMul { transpose_a: false, transpose_b: false }, &[weights, v.clone()]).remove(0);
        let actual = run(&plain(), &[q, k, v]).remove(0);
        assert!(
            actual.to_f64().iter().zip(expected.to_f64()).all(|(g, w)| (g - w).abs() < 1e-15),
            "{actual:?}, not {expected:?}"
        );
    }

    #[test]
    fn an_empty_row_is_what_its_attribute_says() {
        let (q, v) = (ramp(&[1, 1, 2], 1), Tensor::from_f32(&[1, 2, 1], &[1.0, 4.0]));
        let mask = Tensor::from_bool(&[1, 1, 2], &[false, false]);
        let first_output = |empty| {
            let inputs = [q.clone(), ramp(&[1, 2, 2], 2), v.clone(), mask.clone()];
            let outputs = run(&Attention { empty, ..plain() }, &inputs);
            assert_eq!(outputs[1].to_f64(), [f64::NEG_INFINITY]);
            outputs[0].to_f64()[0]
        };
        assert_eq!((first_output(EmptyRow::Zero), first_output(EmptyRow::Mean)), (0.0, 2.5));
        assert!(first_output(EmptyRow::Nan).is_nan());
    }

    // JSON has no NaN, so this case is not among the shapes on record.
    #[test]
    fn a_scale_is_a_number() {
        let same = Fact::of(DType::F32, &[2, 3, 4]);
        let error = Attention { scale: f64::NAN, ..plain() }.infer(&[&same; 3]).unwrap_err();
        assert!(error.to_string().contains("the scale is NaN"));
    }

    #[test]
    fn a_causal_forward_costs_half_and_its_gradient_two_and_a_half_times_as_much() {
        let facts = [[2, 4, 63, 16], [2, 4, 63, 16], [2, 4, 63, 16]].map(|s: [usize; 4]| Fact::of(DType::F32, &s));
        let inputs: Vec<&Fact> = facts.iter().collect();
        let flops = |op: Attention| op.cost(&inputs, &op.infer(&inputs).unwrap()).flops;
        assert_eq!(flops(plain()), 8.0 * 63.0 * 63.0 * (64.0 + 20.0));
        assert_eq!(flops(Attention { causal: true, ..plain() }), 8.0 * 63.0 * 32.0 * (64.0 + 20.0));
    }
}
