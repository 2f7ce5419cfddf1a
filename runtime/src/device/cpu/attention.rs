//! Attention in blocks of queries and keys, without the score matrix (Dao, FlashAttention-2, 2023).
//!
//! ```text
//! forward:   for each head, for 256 queries, for 128 keys:    scores, running maximum and sum, y += weights · values
//! backward:  for each head, for 128 keys, for 256 queries:    weights from the log-sum-exp; dv, dq, dk
//! ```
//!
//! All products are those of [`matmul`](super::matmul). Scratch is two blocks of scores and a few numbers per query.
//! Causal attention leaves out blocks above the diagonal.

use super::matmul::{Matrix, product};
use super::real::{Real, for_real};
use super::sum::{largest, sum_of_pairs, tree};
use super::walk::{Walk, broadcast_strides};
use super::wide::wide;
use super::{ALIGNMENT, FastKernel, TensorLayout};
use bytemuck::{cast_slice, cast_slice_mut};
use compiler::op::attention::COARSE;
use compiler::op::dropout::Mask as KeptMask;
use compiler::op::{Attention, AttentionGrad, EmptyRow, KernelError};
use compiler::tensor::DType;

/// Queries of a block: each reads the packed keys once.
const QUERIES: usize = 256;
/// Keys of a block. With [`QUERIES`] queries, its scores fit the second-level cache.
const KEYS: usize = 128;

/// Lanes of a sum of weights; their number affects rounding.
const LANES: usize = 16;

pub fn kernel(op: &Attention, inputs: &[TensorLayout]) -> Option<FastKernel> {
    for_real!(inputs[0].dtype, T => forward::<T>(Shape::new(op, 3, &inputs[..3], inputs)?))
}

pub fn grad(op: &AttentionGrad, inputs: &[TensorLayout]) -> Option<FastKernel> {
    for_real!(inputs.get(1)?.dtype, T => backward::<T>(Shape::new(&op.forward, 6, &inputs[1..4], inputs)?))
}

struct Shape {
    op: Attention,
    /// Query heads of all examples.
    heads: usize,
    /// Query heads per key head.
    group_size: usize,
    queries: usize,
    keys: usize,
    depth: usize,
    width: usize,
    /// Input and layout of the mask.
    mask: Option<MaskLayout>,
    counter: Option<usize>,
    device: Option<usize>,
}

struct MaskLayout {
    input: usize,
    is_bool: bool,
    /// The first element of each head.
    walk: Walk<1>,
    /// Strides of queries and keys.
    strides: [usize; 2],
}

impl Shape {
    fn new(op: &Attention, fixed: usize, operands: &[TensorLayout], inputs: &[TensorLayout]) -> Option<Shape> {
        let [query, key, value] = operands else { return None };
        let extras = op.extras(fixed, inputs.len()).ok()?;
        let head_axis = query.shape.len() - 3;
        let (queries, keys) = (query.shape[head_axis + 1], key.shape[head_axis + 1]);
        let mut shape = query.shape[..head_axis + 2].to_vec();
        let heads = shape[..=head_axis].iter().product();
        shape.push(keys);
        let mask = match extras.mask {
            None => None,
            Some(input) => {
                let strides = broadcast_strides(&inputs[input].shape, &shape);
                let walk = Walk::new(&shape[..=head_axis], [&strides[..=head_axis]], [0])?;
                let strides = [strides[head_axis + 1] as usize, strides[head_axis + 2] as usize];
                Some(MaskLayout { input, is_bool: inputs[input].dtype == DType::Bool, walk, strides })
            }
        };
        Some(Shape {
            op: *op,
            heads,
            group_size: query.shape[head_axis] / key.shape[head_axis],
            queries,
            keys,
            depth: query.shape[head_axis + 2],
            width: value.shape[head_axis + 2],
            mask,
            counter: extras.counter,
            device: extras.device,
        })
    }

    /// Number of queries and keys of a block.
    fn block(&self) -> [usize; 2] {
        [self.queries.min(QUERIES), self.keys.min(KEYS)]
    }

    fn rule<'a, T: Real>(&self, inputs: &[&'a [u8]]) -> Result<Rule<'a, T>, KernelError> {
        let index = |at: usize| cast_slice::<u8, i64>(inputs[at])[0];
        let dropout = match (self.op.dropout, self.counter) {
            (Some(dropout), Some(counter)) => {
                let device = self.device.map_or(Ok(0), |at| self.op.device(index(at)))?;
                Some(DropoutFactors { mask: dropout.mask(index(counter)), scale: dropout.scale(), op: self.op, device })
            }
            _ => None,
        };
        let mask = match &self.mask {
            None => Sight::All,
            Some(mask) if mask.is_bool => Sight::Where(inputs[mask.input]),
            Some(mask) => Sight::Plus(cast_slice(inputs[mask.input])),
        };
        let strides = self.mask.as_ref().map_or([0, 0], |mask| mask.strides);
        Ok(Rule { scale: T::of(self.op.scale), causal: self.op.causal, keys: self.keys, mask, strides, dropout })
    }

    /// Every query head with the first element of its mask.
    fn each_head(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let masks = self.mask.iter().flat_map(|mask| mask.walk.elements().map(|[at]| at));
        (0..self.heads).zip(masks.chain(std::iter::repeat(0)))
    }
}

/// The elements of a mask.
#[derive(Clone, Copy)]
enum Sight<'a, T> {
    All,
    Where(&'a [u8]),
    Plus(&'a [T]),
}

#[derive(Clone, Copy)]
struct DropoutFactors {
    mask: KeptMask,
    scale: f64,
    op: Attention,
    device: usize,
}

/// What becomes of the products of queries and keys.
#[derive(Clone, Copy)]
struct Rule<'a, T> {
    scale: T,
    causal: bool,
    keys: usize,
    mask: Sight<'a, T>,
    strides: [usize; 2],
    dropout: Option<DropoutFactors>,
}

/// A block of scores.
#[derive(Clone, Copy)]
struct Block {
    head: usize,
    /// The first element of the head's mask.
    mask: usize,
    /// The first query in its head, and their number.
    queries: [usize; 2],
    keys: [usize; 2],
    /// Row stride.
    row: usize,
    head_queries: usize,
}

impl<T: Real> Rule<'_, T> {
    /// Scales the products of a query, adds the mask, and returns the number of keys up to the diagonal, rounded up to
    /// whole lanes where there are more. Scores above the diagonal are -∞.
    #[inline(always)]
    fn score(&self, row: &mut [T], block: &Block, query: usize) -> usize {
        let visible = if self.causal { (query + 1).saturating_sub(block.keys[0]).min(row.len()) } else { row.len() };
        let padded = visible.next_multiple_of(LANES).min(row.len());
        let (row, above) = row[..padded].split_at_mut(visible);
        above.fill(T::LOWEST);
        let from = block.mask + query * self.strides[0] + block.keys[0] * self.strides[1];
        match (self.mask, self.strides[1]) {
            (Sight::All, _) => {
                for s in row.iter_mut() {
                    *s = *s * self.scale;
                }
            }
            (Sight::Where(mask), step) => {
                for (j, s) in row.iter_mut().enumerate() {
                    *s = if mask[from + j * step] != 0 { *s * self.scale } else { T::LOWEST };
                }
            }
            (Sight::Plus(mask), 1) => {
                for (s, &m) in row.iter_mut().zip(&mask[from..from + visible]) {
                    *s = *s * self.scale + m;
                }
            }
            (Sight::Plus(mask), step) => {
                for (j, s) in row.iter_mut().enumerate() {
                    *s = *s * self.scale + mask[from + j * step];
                }
            }
        }
        padded
    }
}

impl DropoutFactors {
    /// The factor of an element of the weights.
    #[inline(always)]
    fn factor(&self, i: usize) -> f64 {
        if self.mask.keeps(self.op.place(i, self.device)) { self.scale } else { 0.0 }
    }
}

/// Splits `count` elements off the scratch, in whole cache lines.
fn take<'a, T: Real>(scratch: &mut &'a mut [u8], count: usize) -> &'a mut [T] {
    let (piece, remainder) = std::mem::take(scratch).split_at_mut(room::<T>(count));
    *scratch = remainder;
    &mut cast_slice_mut::<u8, T>(piece)[..count]
}

fn room<T>(count: usize) -> usize {
    (count * size_of::<T>()).next_multiple_of(ALIGNMENT)
}

/// `(first, size)` of the blocks of elements from `first` up to `end`.
fn blocks(first: usize, end: usize, size: usize) -> impl Iterator<Item = [usize; 2]> {
    (first..end).step_by(size).map(move |at| [at, size.min(end - at)])
}

fn rows<T>(values: &[T], first: usize, count: usize, size: usize) -> &[T] {
    &values[first * size..(first + count) * size]
}

fn matrix<T>(values: &[T], row: usize) -> Matrix<'_, T> {
    Matrix { values, strides: (row, 1) }
}

fn transposed<T>(values: &[T], row: usize) -> Matrix<'_, T> {
    Matrix { values, strides: (1, row) }
}

fn forward<T: Real>(shape: Shape) -> Option<FastKernel> {
    let [block_queries, block_keys] = shape.block();
    let scratch = room::<T>(block_queries * block_keys) + room::<T>(block_queries) + room::<f64>(block_queries);
    let kernel = FastKernel::new(move |inputs, outputs, mut workspace| {
        let rule = shape.rule::<T>(inputs)?;
        let [q, k, v] = [0, 1, 2].map(|at: usize| cast_slice::<u8, T>(inputs[at]));
        let [y, log_sums] = outputs else { unreachable!("attention has two outputs") };
        let (y, log_sums) = (cast_slice_mut::<u8, T>(y), cast_slice_mut::<u8, T>(log_sums));
        let Shape { queries, keys, depth, width, group_size, .. } = shape;
        let scores = take::<T>(&mut workspace, block_queries * block_keys);
        let maxima = take::<T>(&mut workspace, block_queries);
        let sums = take::<f64>(&mut workspace, block_queries);
        for (head, mask) in shape.each_head() {
            let (k, v) =
                (rows(k, head / group_size * keys, keys, depth), rows(v, head / group_size * keys, keys, width));
            for [first, count] in blocks(0, queries, block_queries) {
                let at = head * queries + first;
                let y = &mut y[at * width..(at + count) * width];
                maxima[..count].fill(T::LOWEST);
                sums[..count].fill(0.0);
                let last = if rule.causal { keys.min(first + count) } else { keys };
                for [key, size] in blocks(0, last, block_keys) {
                    // Queries before the first key see none of the block.
                    let skipped = if rule.causal { key.saturating_sub(first).min(count) } else { 0 };
                    let remaining = count - skipped;
                    let q = rows(q, at + skipped, remaining, depth);
                    let keys = transposed(rows(k, key, size, depth), depth);
                    product([remaining, size, depth], matrix(q, depth), keys, scores, size, false);
                    let block = Block {
                        head,
                        mask,
                        queries: [first + skipped, remaining],
                        keys: [key, size],
                        row: size,
                        head_queries: queries,
                    };
                    let y = &mut y[skipped * width..];
                    weigh(scores, &block, &rule, &mut maxima[skipped..count], &mut sums[skipped..count], y);
                    let values = matrix(rows(v, key, size, width), width);
                    product([remaining, width, size], matrix(scores, size), values, y, width, key > 0);
                }
                finish(y, &mut log_sums[at..at + count], &maxima[..count], &sums[..count], width);
                for r in (0..count).filter(|r| log_sums[at + r] == T::LOWEST) {
                    let weight = shape.op.empty.weight(keys);
                    fill_empty(&mut y[r * width..(r + 1) * width], v, weight, rule.dropout, (at + r) * keys);
                }
            }
        }
        Ok(())
    });
    Some(kernel.with_workspace(scratch))
}

/// The result of a query that sees no key, with this weight for every value.
fn fill_empty<T: Real>(y: &mut [T], v: &[T], weight: f64, dropout: Option<DropoutFactors>, from: usize) {
    y.fill(T::ZERO);
    if weight == 0.0 {
        return;
    }
    for (j, v) in v.chunks_exact(y.len()).enumerate() {
        let weight = T::of(weight * dropout.map_or(1.0, |factors| factors.factor(from + j)));
        for (y, v) in y.iter_mut().zip(v) {
            *y = *y + weight * *v;
        }
    }
}

wide! {
    // Turns the products of a block into weights relative to the running maximum, and scales the earlier results to it.
    fn weigh[T: Real](
        scores: &mut [T],
        block: &Block,
        rule: &Rule<'_, T>,
        maxima: &mut [T],
        sums: &mut [f64],
        y: &mut [T],
    ) {
        let width = y.len() / maxima.len();
        for (r, (row_max, sum)) in maxima.iter_mut().zip(sums).enumerate() {
            let query = block.queries[0] + r;
            let row = &mut scores[r * block.row..r * block.row + block.keys[1]];
            let visible = rule.score(row, block, query);
            row[visible..].fill(T::ZERO);
            let row = &mut row[..visible];
            let max = row_max.larger(largest(row));
            // While no key is seen, all weights are e^-∞.
            let shift = if max == T::LOWEST { T::ZERO } else { max };
            let mut lanes = [T::ZERO; LANES];
            let whole = row.len() / LANES * LANES;
            for at in (0..whole).step_by(LANES) {
                let row = &mut row[at..at + LANES];
                for lane in 0..LANES {
                    row[lane] = (row[lane] - shift).exp();
                    lanes[lane] = lanes[lane] + row[lane];
                }
            }
            for (lane, s) in lanes.iter_mut().zip(&mut row[whole..]) {
                *s = (*s - shift).exp();
                *lane = *lane + *s;
            }
            let row_sum = tree(lanes, |a, b| a + b).wide();
            if block.keys[0] > 0 {
                let correction = (*row_max - shift).exp();
                *sum = *sum * correction.wide() + row_sum;
                for y in &mut y[r * width..(r + 1) * width] {
                    *y = *y * correction;
                }
            } else {
                *sum = row_sum;
            }
            *row_max = max;
            if let Some(factors) = rule.dropout {
                let from = (block.head * block.head_queries + query) * rule.keys + block.keys[0];
                for (j, p) in row.iter_mut().enumerate() {
                    *p = T::of(p.wide() * factors.factor(from + j));
                }
            }
        }
    }
}

wide! {
    fn finish[T: Real](y: &mut [T], log_sums: &mut [T], maxima: &[T], sums: &[f64], width: usize) {
        for ((log_sum, &max), &sum) in log_sums.iter_mut().zip(maxima).zip(sums) {
            *log_sum = if max == T::LOWEST { T::LOWEST } else { max + T::of(sum).ln() };
        }
        for (r, sum) in sums.iter().enumerate() {
            let reciprocal = T::of(1.0 / sum);
            for y in &mut y[r * width..(r + 1) * width] {
                *y = *y * reciprocal;
            }
        }
    }
}

fn backward<T: Real>(shape: Shape) -> Option<FastKernel> {
    let [block_queries, block_keys] = shape.block();
    let scratch = 2 * room::<T>(block_queries * block_keys) + 2 * room::<T>(shape.queries);
    let kernel = FastKernel::new(move |inputs, outputs, mut workspace| {
        let rule = shape.rule::<T>(inputs)?;
        let [dy, q, k, v, y, log_sums] = [0, 1, 2, 3, 4, 5].map(|at: usize| cast_slice::<u8, T>(inputs[at]));
        let [dq, dk, dv] = outputs else { unreachable!("the gradient of attention has three outputs") };
        let [dq, dk, dv] = [dq, dk, dv].map(|output| cast_slice_mut::<u8, T>(output));
        let Shape { queries, keys, depth, width, group_size, .. } = shape;
        let scores = take::<T>(&mut workspace, block_queries * block_keys);
        let dscores = take::<T>(&mut workspace, block_queries * block_keys);
        let (deltas, norms) = (take::<T>(&mut workspace, queries), take::<T>(&mut workspace, queries));
        dq.fill(T::ZERO);
        dk.fill(T::ZERO);
        dv.fill(T::ZERO);
        for (head, mask) in shape.each_head() {
            let (from, first_key) = (head * queries, head / group_size * keys);
            products_of_rows(rows(dy, from, queries, width), rows(y, from, queries, width), deltas);
            norms.fill(T::ONE);
            for query in (0..queries).filter(|query| is_coarse(log_sums[from + query])) {
                let q = rows(q, from + query, 1, depth);
                let mut sum = 0.0;
                for [key, size] in blocks(0, keys, block_keys) {
                    let k = rows(k, first_key + key, size, depth);
                    product([1, size, depth], matrix(q, depth), transposed(k, depth), scores, size, false);
                    let block =
                        Block { head, mask, queries: [query, 1], keys: [key, size], row: size, head_queries: queries };
                    let visible = rule.score(&mut scores[..size], &block, query);
                    sum += scores[..visible].iter().map(|s| (*s - log_sums[from + query]).exp().wide()).sum::<f64>();
                }
                norms[query] = T::of(1.0 / sum);
            }
            for [key, size] in blocks(0, keys, block_keys) {
                let k = rows(k, first_key + key, size, depth);
                let v = rows(v, first_key + key, size, width);
                let dk = &mut dk[(first_key + key) * depth..(first_key + key + size) * depth];
                let dv = &mut dv[(first_key + key) * width..(first_key + key + size) * width];
                let first = if rule.causal { key.min(queries) } else { 0 };
                for [first, count] in blocks(first, queries, block_queries) {
                    let at = from + first;
                    let (q, dy) = (rows(q, at, count, depth), rows(dy, at, count, width));
                    product([count, size, depth], matrix(q, depth), transposed(k, depth), scores, size, false);
                    product([count, size, width], matrix(dy, width), transposed(v, width), dscores, size, false);
                    let block = Block {
                        head,
                        mask,
                        queries: [first, count],
                        keys: [key, size],
                        row: size,
                        head_queries: queries,
                    };
                    let log_sums = &log_sums[at..at + count];
                    let statistics = [log_sums, &deltas[first..first + count], &norms[first..first + count]];
                    differentiate(scores, dscores, &block, &rule, statistics);
                    if shape.op.empty != EmptyRow::Zero {
                        for r in (0..count).filter(|r| log_sums[*r] == T::LOWEST) {
                            let from = (at + r) * keys + key;
                            empty_row(&mut scores[r * size..], &mut dscores[r * size..], size, &shape, &rule, from);
                        }
                    }
                    product([size, width, count], transposed(scores, size), matrix(dy, width), dv, width, true);
                    product([size, depth, count], transposed(dscores, size), matrix(q, depth), dk, depth, true);
                    let dq = &mut dq[at * depth..(at + count) * depth];
                    product([count, depth, size], matrix(dscores, size), matrix(k, depth), dq, depth, true);
                }
            }
        }
        Ok(())
    });
    Some(kernel.with_workspace(scratch))
}

/// Weights and score gradients of a query that sees no key.
fn empty_row<T: Real>(
    weights: &mut [T],
    dscores: &mut [T],
    size: usize,
    shape: &Shape,
    rule: &Rule<'_, T>,
    from: usize,
) {
    let weight = shape.op.empty.weight(shape.keys);
    for (j, (p, dscore)) in weights.iter_mut().zip(dscores).take(size).enumerate() {
        *p = T::of(weight * rule.dropout.map_or(1.0, |factors| factors.factor(from + j)));
        // A mean of all values does not depend on the scores.
        *dscore = if shape.op.empty == EmptyRow::Nan { *p } else { T::ZERO };
    }
}

wide! {
    // The dot product of every row of `a` with that of `b`.
    fn products_of_rows[T: Real](a: &[T], b: &[T], sums: &mut [T]) {
        let size = a.len() / sums.len();
        for (r, sum) in sums.iter_mut().enumerate() {
            *sum = T::of(sum_of_pairs(&a[r * size..(r + 1) * size], &b[r * size..(r + 1) * size], |a, b| a * b));
        }
    }
}

/// True for a log-sum-exp that is too large to contain the logarithm of the sum, as of a query of which all keys have the
/// lowest number as mask. Its weights are divided by their sum.
fn is_coarse<T: Real>(log_sum: T) -> bool {
    let size = log_sum.wide().abs();
    size > COARSE && size.is_finite()
}

wide! {
    // Turns products of queries and keys into weights, and products of output gradients and values into the gradients of
    // those products. Each query has a log-sum-exp, the product of its output and the gradient, and a factor of its weights.
    fn differentiate[T: Real](
        scores: &mut [T],
        dscores: &mut [T],
        block: &Block,
        rule: &Rule<'_, T>,
        statistics: [&[T]; 3],
    ) {
        let [log_sums, deltas, norms] = statistics;
        for r in 0..log_sums.len() {
            let (query, at) = (block.queries[0] + r, r * block.row);
            let row = &mut scores[at..at + block.keys[1]];
            let dscores = &mut dscores[at..at + block.keys[1]];
            let visible = rule.score(row, block, query);
            row[visible..].fill(T::ZERO);
            dscores[visible..].fill(T::ZERO);
            // All scores of an empty row are -∞, and all weights 0.
            let shift = if log_sums[r] == T::LOWEST { T::ZERO } else { log_sums[r] };
            let (delta, norm) = (deltas[r], norms[r]);
            let (row, dscores) = (&mut row[..visible], &mut dscores[..visible]);
            let whole = visible / LANES * LANES;
            for at in (0..whole).step_by(LANES) {
                for p in &mut row[at..at + LANES] {
                    *p = (*p - shift).exp() * norm;
                }
            }
            for p in &mut row[whole..] {
                *p = (*p - shift).exp() * norm;
            }
            match rule.dropout {
                None => {
                    for (p, dscore) in row.iter().zip(dscores) {
                        *dscore = *p * (*dscore - delta) * rule.scale;
                    }
                }
                Some(factors) => {
                    let from = (block.head * block.head_queries + query) * rule.keys + block.keys[0];
                    for (j, (p, dscore)) in row.iter_mut().zip(dscores).enumerate() {
                        let factor = T::of(factors.factor(from + j));
                        *dscore = *p * (factor * *dscore - delta) * rule.scale;
                        *p = *p * factor;
                    }
                }
            }
        }
    }
}
