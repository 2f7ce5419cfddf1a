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

fn scaled(scope: &mut Scope<'_>, x: Value, name: &'static str) -> Result<Value, LowerReason> {
    match scope.number(name)?.map_or(1.0, Number::float) {
        1.0 => Ok(x),
        factor => scope.with_number(Binary::Mul, x, factor),
    }
}

/// `beta·self + alpha·(a·b)`
pub fn with_sum(scope: &mut Scope<'_>, a: &'static str, b: &'static str) -> Outputs {
    let (sum, a, b) = (scope.value("self")?, scope.value(a)?, scope.value(b)?);
    let y = product(scope, a, b)?;
    let y = scaled(scope, y, "alpha")?;
    let sum = scaled(scope, sum, "beta")?;
    one(scope.binary(Binary::Add, y, sum)?)
}

/// `beta·self + alpha·Σ a·b`, summed over the batch.
pub fn with_sum_of_all(scope: &mut Scope<'_>) -> Outputs {
    let (sum, a, b) = (scope.value("self")?, scope.value("batch1")?, scope.value("batch2")?);
    let y = product(scope, a, b)?;
    let y = scope.reduce(ReduceKind::Sum, y, &[0], false)?;
    let y = scaled(scope, y, "alpha")?;
    let sum = scaled(scope, sum, "beta")?;
    one(scope.binary(Binary::Add, y, sum)?)
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
    let (own, a, b) = (scope.value("self")?, scope.value("vec1")?, scope.value("vec2")?);
    let y = outer_of(scope, a, b)?;
    let y = scaled(scope, y, "alpha")?;
    let own = scaled(scope, own, "beta")?;
    one(scope.binary(Binary::Add, y, own)?)
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
            let (b, transpose) = match untransposed(scope, b) {
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
fn untransposed(scope: &Scope<'_>, x: Value) -> Option<Value> {
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
    /// Sums over the letters not in `kept`.
    fn summed(mut self, scope: &mut Scope<'_>, kept: &[char]) -> Result<Lettered, LowerReason> {
        let axes: Vec<usize> = (0..self.letters.len()).filter(|at| !kept.contains(&self.letters[*at])).collect();
        if !axes.is_empty() {
            self.value = scope.reduce(ReduceKind::Sum, self.value, &axes, false)?;
            self.letters.retain(|letter| kept.contains(letter));
        }
        Ok(self)
    }

    fn ordered(&self, scope: &mut Scope<'_>, letters: &[char]) -> Result<Value, LowerReason> {
        let place = |letter: &char| self.letters.iter().position(|l| l == letter);
        let perm: Option<Vec<usize>> = letters.iter().map(place).collect();
        let perm = perm.filter(|p| p.len() == self.letters.len());
        let perm = perm.ok_or_else(|| LowerReason::Inputs("its result has labels that no operand has".to_string()))?;
        transposed(scope, self.value, perm)
    }

    /// Multiplies with another operand and contracts the common letters that are not in `kept`.
    fn times(self, scope: &mut Scope<'_>, other: Lettered, kept: &[char]) -> Result<Lettered, LowerReason> {
        let both: Vec<char> = self.letters.iter().copied().filter(|l| other.letters.contains(l)).collect();
        let batch: Vec<char> = both.iter().copied().filter(|l| kept.contains(l)).collect();
        let inner: Vec<char> = both.iter().copied().filter(|l| !kept.contains(l)).collect();
        let left: Vec<char> = self.letters.iter().copied().filter(|l| !both.contains(l)).collect();
        let right: Vec<char> = other.letters.iter().copied().filter(|l| !both.contains(l)).collect();
        let a = self.ordered(scope, &[&batch[..], &left, &inner].concat())?;
        let b = other.ordered(scope, &[&batch[..], &inner, &right].concat())?;
        let (own, its) = (scope.fact(a).shape, scope.fact(b).shape);
        let (n, m, k) = (batch.len(), left.len(), inner.len());
        let rows = volume(&own[n..n + m])?;
        let (depth, columns) = (volume(&own[n + m..])?, volume(&its[n + k..])?);
        let a = scope.reshape(a, [&own[..n], &[rows, depth.clone()]].concat())?;
        let b = scope.reshape(b, [&its[..n], &[depth, columns]].concat())?;
        let y = scope.add(Op::MatMul(MatMul { transpose_a: false, transpose_b: false }), &[a, b])?;
        let value = scope.reshape(y, [&own[..n + m], &its[n + k..]].concat())?;
        Ok(Lettered { value, letters: [batch, left, right].concat() })
    }
}

/// Replaces `...` by unused letters; the last of them are common to all operands.
fn without_dots(equation: &str, ranks: &[usize]) -> Option<String> {
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
    let most = widths.iter().copied().max()?;
    let free: Vec<char> =
        ('a'..='z').chain('A'..='Z').filter(|letter| !equation.contains(*letter)).take(most).collect();
    let last = |width: usize| free[most - width..].iter().collect::<String>();
    if free.len() < most {
        return None;
    }
    let written: Vec<String> =
        terms.iter().zip(&widths).map(|(term, width)| term.replace("...", &last(*width))).collect();
    let result = match result {
        Some(result) => result.replace("...", &last(most)),
        // Without an explicit output: the broadcast axes, then the letters that occur once, sorted.
        None => {
            let all = || inputs.chars().filter(char::is_ascii_alphabetic);
            let mut once: Vec<char> = all().filter(|c| all().filter(|d| d == c).count() == 1).collect();
            once.sort_unstable();
            last(most) + &once.into_iter().collect::<String>()
        }
    };
    Some(format!("{}->{result}", written.join(",")))
}

pub fn einsum(scope: &mut Scope<'_>) -> Outputs {
    let given: String = scope.text("equation", "")?.chars().filter(|c| !c.is_whitespace()).collect();
    let tensors = scope.values("tensors")?;
    let ranks: Vec<usize> = tensors.iter().map(|value| scope.fact(*value).rank()).collect();
    let equation = without_dots(&given, &ranks)
        .ok_or_else(|| LowerReason::Unsupported(format!("the equation `{}`", crate::text::name::short_name(&given))))?;
    let (inputs, result) = match equation.split_once("->") {
        Some((inputs, result)) => (inputs.to_string(), Some(result.to_string())),
        None => (equation.clone(), None),
    };
    let terms: Vec<Vec<char>> = inputs.split(',').map(|term| term.chars().collect()).collect();
    // Without an explicit output: the letters that occur once, sorted.
    let result: Vec<char> = match result {
        Some(result) => result.chars().collect(),
        None => {
            let all = || inputs.chars().filter(|c| *c != ',');
            let mut once: Vec<char> = all().filter(|c| all().filter(|d| d == c).count() == 1).collect();
            once.sort_unstable();
            once
        }
    };
    let plain = terms.iter().chain([&result]).all(|term| {
        term.iter().enumerate().all(|(at, letter)| letter.is_ascii_alphabetic() && !term[..at].contains(letter))
    });
    if !plain || terms.len() != tensors.len() || terms.len() > 64 {
        return Err(LowerReason::Unsupported(format!("the equation `{}`", crate::text::name::short_name(&equation))));
    }
    let mut list = Vec::with_capacity(terms.len());
    for (letters, value) in terms.into_iter().zip(tensors) {
        if scope.fact(value).rank() != letters.len() {
            return Err(LowerReason::Inputs(format!("{} labels for {}", letters.len(), scope.fact(value))));
        }
        list.push(Lettered { value, letters });
    }
    let mut rest = list.into_iter();
    let mut product = rest.next().ok_or_else(|| LowerReason::Inputs("it has no operands".to_string()))?;
    let mut later: Vec<Lettered> = rest.collect();
    while !later.is_empty() {
        let next = later.remove(0);
        let needed = |own: &Lettered| {
            let mut kept = result.clone();
            kept.extend(later.iter().flat_map(|l| l.letters.iter().copied()));
            kept.extend(own.letters.iter().copied());
            kept
        };
        let (of_next, of_product) = (needed(&next), needed(&product));
        product = product.summed(scope, &of_next)?;
        let next = next.summed(scope, &of_product)?;
        let mut kept = result.clone();
        kept.extend(later.iter().flat_map(|l| l.letters.iter().copied()));
        product = product.times(scope, next, &kept)?;
    }
    let product = product.summed(scope, &result)?;
    one(product.ordered(scope, &result)?)
}
