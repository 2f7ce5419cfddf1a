//! Matrix products.

use super::argument::{Number, Operand};
use super::{Outputs, Scope, one, promote};
use crate::import::build::Build;
use crate::import::lower_error::LowerReason;
use crate::import::onnx::lower::linear::product;
use crate::import::onnx::lower::movement::transposed;
use crate::op::{Binary, GroupedMatMul, GroupedMatMulGrad, MatMul, Op, ReduceKind, Value};
use crate::tensor::DType;
use crate::tensor::dim::{Dim, volume};

/// `x·Wᵀ + b` with `W [out, in]`.
pub fn linear(scope: &mut Scope<'_>) -> Outputs {
    let (x, weight) = (scope.value("input")?, scope.value("weight")?);
    let (fact, matrix) = (scope.fact(x), scope.fact(weight));
    if matrix.rank() != 2 || fact.rank() == 0 {
        return Err(LowerReason::Inputs(format!("its weight is {matrix}, its input {fact}")));
    }
    let row = if fact.rank() == 1 { scope.reshape(x, vec![Dim::Known(1), fact.shape[0].clone()])? } else { x };
    let mut y = scope.add(Op::MatMul(MatMul { transpose_a: false, transpose_b: true }), &[row, weight])?;
    if fact.rank() == 1 {
        y = scope.reshape(y, vec![matrix.shape[0].clone()])?;
    }
    one(match scope.optional("bias")? {
        Some(bias) => scope.binary(Binary::Add, y, bias)?,
        None => y,
    })
}

/// `self` times another argument, as in `numpy.matmul`.
pub fn matmul(scope: &mut Scope<'_>, other: &'static str) -> Outputs {
    let (a, b) = (scope.value("self")?, scope.value(other)?);
    one(product(scope, a, b)?)
}

fn scale(scope: &mut Scope<'_>, x: Value, name: &'static str) -> Result<Value, LowerReason> {
    match scope.number(name)?.map_or(1.0, Number::float) {
        1.0 => Ok(x),
        factor => scope.with_number(Binary::Mul, x, factor),
    }
}

/// `y + beta·sum`. With `beta` 0, the sum is not read: NaN and infinity in it do not count.
fn with_scaled(scope: &mut Scope<'_>, y: Value, sum: Value) -> Result<Value, LowerReason> {
    if scope.number("beta")?.is_some_and(|beta| beta.float() == 0.0) {
        return Ok(y);
    }
    let sum = scale(scope, sum, "beta")?;
    scope.binary(Binary::Add, y, sum)
}

/// `beta·self + alpha·(a·b)`
pub fn with_sum(scope: &mut Scope<'_>, a: &'static str, b: &'static str) -> Outputs {
    let (sum, a, b) = (scope.value("self")?, scope.value(a)?, scope.value(b)?);
    let y = product(scope, a, b)?;
    let y = scale(scope, y, "alpha")?;
    one(with_scaled(scope, y, sum)?)
}

/// `beta·self + alpha·Σ a·b`, summed over the batch.
pub fn with_sum_of_all(scope: &mut Scope<'_>) -> Outputs {
    let (sum, a, b) = (scope.value("self")?, scope.value("batch1")?, scope.value("batch2")?);
    let y = product(scope, a, b)?;
    let y = scope.reduce(ReduceKind::Sum, y, &[0], false)?;
    let y = scale(scope, y, "alpha")?;
    one(with_scaled(scope, y, sum)?)
}

fn outer_of(scope: &mut Scope<'_>, a: Value, b: Value) -> Result<Value, LowerReason> {
    let dtype = promote::common(scope, &[Operand::Tensor(a), Operand::Tensor(b)]);
    let (a, b) = (scope.cast(a, dtype)?, scope.cast(b, dtype)?);
    let mut column = scope.fact(a).shape;
    column.push(Dim::Known(1));
    let a = scope.reshape(a, column)?;
    scope.binary(Binary::Mul, a, b)
}

/// Outer product of two vectors, added to `self` with `sum`.
pub fn outer(scope: &mut Scope<'_>, sum: bool) -> Outputs {
    if !sum {
        let (a, b) = (scope.value("self")?, scope.value("vec2")?);
        return one(outer_of(scope, a, b)?);
    }
    let (input, a, b) = (scope.value("self")?, scope.value("vec1")?, scope.value("vec2")?);
    let y = outer_of(scope, a, b)?;
    let y = scale(scope, y, "alpha")?;
    one(with_scaled(scope, y, input)?)
}

pub fn inner(scope: &mut Scope<'_>) -> Outputs {
    let (a, b) = (scope.value("self")?, scope.value("other")?);
    let (left, right) = (scope.fact(a).shape, scope.fact(b).shape);
    let ([rows @ .., depth], [columns @ .., _]) = (&left[..], &right[..]) else {
        return one(scope.binary(Binary::Mul, a, b)?);
    };
    let a = scope.reshape(a, vec![volume(rows)?, depth.clone()])?;
    let b = scope.reshape(b, vec![volume(columns)?, depth.clone()])?;
    let y = scope.add(Op::MatMul(MatMul { transpose_a: false, transpose_b: true }), &[a, b])?;
    one(scope.reshape(y, [rows, columns].concat())?)
}

/// Grouped matrix product: rows `[S, K]`, sorted by group, times the matrices `[G, K, N]`; or `[M, S]` times `[S, N]`,
/// one product per group. `offs` gives the end of each group. Without it, both operands are batches of matrices.
pub fn grouped(scope: &mut Scope<'_>) -> Outputs {
    let first = if scope.has("input") { "input" } else { "self" };
    let second = if scope.has("weight") { "weight" } else { "mat2" };
    let (a, b) = (scope.value(first)?, scope.value(second)?);
    if scope.has("bias") {
        return Err(LowerReason::Unsupported("a grouped matrix product with a bias".to_string()));
    }
    let (left, right) = (scope.fact(a), scope.fact(b));
    let y = match (scope.optional("offs")?, left.rank(), right.rank()) {
        (None, 3, 3) => product(scope, a, b)?,
        (Some(ends), 2, 3) => {
            let ends = scope.cast(ends, DType::I64)?;
            let (b, transpose) = match undo_transpose(scope, b) {
                Some(stored) => (stored, true),
                None => (b, false),
            };
            scope.add(Op::GroupedMatMul(GroupedMatMul { transpose }), &[a, b, ends])?
        }
        (Some(ends), 2, 2) => {
            let ends = scope.cast(ends, DType::I64)?;
            let rows = transposed(scope, a, vec![1, 0])?;
            scope.add(Op::GroupedMatMulGrad(GroupedMatMulGrad {}), &[rows, b, ends])?
        }
        _ => return Err(LowerReason::Unsupported(format!("a grouped matrix product of {left} and {right}"))),
    };
    match scope.dtype("out_dtype")? {
        Some(dtype) => one(scope.cast(y, dtype)?),
        None => one(y),
    }
}

/// The operand of a transpose of the last two axes.
fn undo_transpose(scope: &Scope<'_>, x: Value) -> Option<Value> {
    match &scope.graph.node(x.node).op {
        Op::Transpose(op) if op.perm == [0, 2, 1] => Some(scope.graph.inputs(x.node)[0]),
        _ => None,
    }
}

/// A tensor with an einsum letter per axis.
#[derive(Clone)]
struct Lettered {
    value: Value,
    letters: Vec<char>,
}

impl Lettered {
    /// Sums over the letters not in `kept_letters`.
    fn sum_out(mut self, scope: &mut Scope<'_>, kept_letters: &[char]) -> Result<Lettered, LowerReason> {
        let axes: Vec<usize> =
            (0..self.letters.len()).filter(|at| !kept_letters.contains(&self.letters[*at])).collect();
        if !axes.is_empty() {
            self.value = scope.reduce(ReduceKind::Sum, self.value, &axes, false)?;
            self.letters.retain(|letter| kept_letters.contains(letter));
        }
        Ok(self)
    }

    fn permute(&self, scope: &mut Scope<'_>, letters: &[char]) -> Result<Value, LowerReason> {
        let position = |letter: &char| self.letters.iter().position(|l| l == letter);
        let perm: Option<Vec<usize>> = letters.iter().map(position).collect();
        let perm = perm.filter(|p| p.len() == self.letters.len());
        let perm = perm.ok_or_else(|| LowerReason::Inputs("its result has labels that no operand has".to_string()))?;
        transposed(scope, self.value, perm)
    }

    /// Multiplies with another operand and contracts the common letters that are not in `kept_letters`.
    fn contract(self, scope: &mut Scope<'_>, factor: Lettered, kept_letters: &[char]) -> Result<Lettered, LowerReason> {
        let shared: Vec<char> = self.letters.iter().copied().filter(|l| factor.letters.contains(l)).collect();
        let batch: Vec<char> = shared.iter().copied().filter(|l| kept_letters.contains(l)).collect();
        let inner: Vec<char> = shared.iter().copied().filter(|l| !kept_letters.contains(l)).collect();
        let left: Vec<char> = self.letters.iter().copied().filter(|l| !shared.contains(l)).collect();
        let right: Vec<char> = factor.letters.iter().copied().filter(|l| !shared.contains(l)).collect();
        let a = self.permute(scope, &[&batch[..], &left, &inner].concat())?;
        let b = factor.permute(scope, &[&batch[..], &inner, &right].concat())?;
        let (a_shape, b_shape) = (scope.fact(a).shape, scope.fact(b).shape);
        let (n, m, k) = (batch.len(), left.len(), inner.len());
        let rows = volume(&a_shape[n..n + m])?;
        let (depth, columns) = (volume(&a_shape[n + m..])?, volume(&b_shape[n + k..])?);
        let a = scope.reshape(a, [&a_shape[..n], &[rows, depth.clone()]].concat())?;
        let b = scope.reshape(b, [&b_shape[..n], &[depth, columns]].concat())?;
        let y = scope.add(Op::MatMul(MatMul { transpose_a: false, transpose_b: false }), &[a, b])?;
        let value = scope.reshape(y, [&a_shape[..n + m], &b_shape[n + k..]].concat())?;
        Ok(Lettered { value, letters: [batch, left, right].concat() })
    }
}

/// Replaces `...` by unused letters; the last of them are common to all operands.
fn expand_ellipsis(equation: &str, ranks: &[usize]) -> Option<String> {
    if !equation.contains("...") {
        return Some(equation.to_string());
    }
    let (inputs, result) = match equation.split_once("->") {
        Some((inputs, result)) => (inputs, Some(result)),
        None => (equation, None),
    };
    let terms: Vec<&str> = inputs.split(',').collect();
    let widths: Option<Vec<usize>> = terms
        .iter()
        .zip(ranks)
        .map(|(term, rank)| match term.contains("...") {
            true => rank.checked_sub(term.len() - 3),
            false => Some(0),
        })
        .collect();
    let widths = widths.filter(|widths| widths.len() == terms.len() && terms.len() == ranks.len())?;
    let max_width = widths.iter().copied().max()?;
    let unused_letters: Vec<char> =
        ('a'..='z').chain('A'..='Z').filter(|letter| !equation.contains(*letter)).take(max_width).collect();
    let last = |width: usize| unused_letters[max_width - width..].iter().collect::<String>();
    if unused_letters.len() < max_width {
        return None;
    }
    let spelled_out: Vec<String> =
        terms.iter().zip(&widths).map(|(term, width)| term.replace("...", &last(*width))).collect();
    let result = match result {
        Some(result) => result.replace("...", &last(max_width)),
        // Without an explicit output: the broadcast axes, then the letters that occur once, sorted.
        None => {
            let letters = || inputs.chars().filter(char::is_ascii_alphabetic);
            let mut unique_letters: Vec<char> =
                letters().filter(|c| letters().filter(|d| d == c).count() == 1).collect();
            unique_letters.sort_unstable();
            last(max_width) + &unique_letters.into_iter().collect::<String>()
        }
    };
    Some(format!("{}->{result}", spelled_out.join(",")))
}

pub fn einsum(scope: &mut Scope<'_>) -> Outputs {
    let spelling: String = scope.text("equation", "")?.chars().filter(|c| !c.is_whitespace()).collect();
    let tensors = scope.values("tensors")?;
    let ranks: Vec<usize> = tensors.iter().map(|value| scope.fact(*value).rank()).collect();
    let equation = expand_ellipsis(&spelling, &ranks).ok_or_else(|| {
        LowerReason::Unsupported(format!("the equation `{}`", crate::text::name::short_name(&spelling)))
    })?;
    let (inputs, result) = match equation.split_once("->") {
        Some((inputs, result)) => (inputs.to_string(), Some(result.to_string())),
        None => (equation.clone(), None),
    };
    let terms: Vec<Vec<char>> = inputs.split(',').map(|term| term.chars().collect()).collect();
    // Without an explicit output: the letters that occur once, sorted.
    let result: Vec<char> = match result {
        Some(result) => result.chars().collect(),
        None => {
            let labels = || inputs.chars().filter(|c| *c != ',');
            let mut unique_letters: Vec<char> = labels().filter(|c| labels().filter(|d| d == c).count() == 1).collect();
            unique_letters.sort_unstable();
            unique_letters
        }
    };
    let is_plain = terms.iter().chain([&result]).all(|term| {
        term.iter().enumerate().all(|(at, letter)| letter.is_ascii_alphabetic() && !term[..at].contains(letter))
    });
    if !is_plain || terms.len() != tensors.len() || terms.len() > 64 {
        return Err(LowerReason::Unsupported(format!("the equation `{}`", crate::text::name::short_name(&equation))));
    }
    let mut list = Vec::with_capacity(terms.len());
    for (letters, value) in terms.into_iter().zip(tensors) {
        if scope.fact(value).rank() != letters.len() {
            return Err(LowerReason::Inputs(format!("{} labels for {}", letters.len(), scope.fact(value))));
        }
        list.push(Lettered { value, letters });
    }
    let mut operands = list.into_iter();
    let mut product = operands.next().ok_or_else(|| LowerReason::Inputs("it has no operands".to_string()))?;
    let mut later: Vec<Lettered> = operands.collect();
    while !later.is_empty() {
        let next = later.remove(0);
        let needed_letters = |operand: &Lettered| {
            let mut kept_letters = result.clone();
            kept_letters.extend(later.iter().flat_map(|l| l.letters.iter().copied()));
            kept_letters.extend(operand.letters.iter().copied());
            kept_letters
        };
        let (of_next, of_product) = (needed_letters(&next), needed_letters(&product));
        product = product.sum_out(scope, &of_next)?;
        let next = next.sum_out(scope, &of_product)?;
        let mut kept_letters = result.clone();
        kept_letters.extend(later.iter().flat_map(|l| l.letters.iter().copied()));
        product = product.contract(scope, next, &kept_letters)?;
    }
    let product = product.sum_out(scope, &result)?;
    one(product.permute(scope, &result)?)
}
