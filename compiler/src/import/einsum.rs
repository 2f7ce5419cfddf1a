//! Sums of products, from an equation such as `bij,bjk->bik`, shared by all importers.
//!
//! Diagonals are extracted first. Then operands are contracted from the left, two at a time. A label that is no longer
//! needed is summed over, in a matrix product if both operands have it. Axes of `...` get labels counted from the
//! right; their axes of size 1 are broadcast, so they are dropped where another operand is wider.

use crate::import::build::Build;
use crate::import::lower_error::LowerReason;
use crate::import::onnx::lower::movement::transposed;
use crate::op::{Binary, Compare, MatMul, Op, ReduceKind, Value};
use crate::tensor::dim::{Dim, volume};
use crate::text::name::short_name;

/// An axis label: a letter, or the distance from the right within `...`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Label {
    Dots(usize),
    Letter(char),
}

/// A value with one label per axis, without duplicates.
#[derive(Clone, Debug)]
struct Term {
    value: Value,
    labels: Vec<Label>,
}

fn equation_error(equation: &str, reason: &str) -> LowerReason {
    LowerReason::Inputs(format!("the equation `{}` {reason}", short_name(equation)))
}

/// Parses the labels of one operand or of the result, with `dots` axes for `...`.
fn parse_labels(equation: &str, part: &str, dots: usize) -> Result<Vec<Label>, LowerReason> {
    let mut list = Vec::new();
    let (mut unread, mut seen) = (part, false);
    while let Some(first) = unread.chars().next() {
        if let Some(after) = unread.strip_prefix("...").filter(|_| !seen) {
            list.extend((0..dots).rev().map(Label::Dots));
            (unread, seen) = (after, true);
        } else if first.is_ascii_alphabetic() {
            list.push(Label::Letter(first));
            unread = &unread[1..];
        } else {
            return Err(equation_error(equation, "has a character that is not a letter"));
        }
    }
    Ok(list)
}

/// How two terms are multiplied.
#[derive(Clone, Copy, PartialEq)]
pub enum Product {
    /// `A·B`
    Plain,
    /// `A·Bᵀ`, or elementwise if nothing is summed. Axes of `...` are broadcast.
    Transposed,
}

/// The value of an equation in `count` operands, which `read` reads by number.
pub fn einsum<S: Build>(
    scope: &mut S,
    equation: &str,
    count: usize,
    read: impl Fn(&mut S, usize) -> Result<Value, LowerReason>,
    form: Product,
) -> Result<Value, LowerReason> {
    let equation: String = equation.chars().filter(|c| !c.is_whitespace()).collect();
    let (left, right) = match equation.split_once("->") {
        Some((left, right)) => (left, Some(right)),
        None => (equation.as_str(), None),
    };
    let parts: Vec<&str> = left.split(',').collect();
    if parts.len() != count {
        return Err(equation_error(&equation, &format!("has {} operands for {count} inputs", parts.len())));
    }
    let (mut terms, mut dots) = (Vec::new(), 0);
    for (slot, part) in parts.iter().enumerate() {
        let value = read(scope, slot)?;
        let letters = part.chars().filter(char::is_ascii_alphabetic).count();
        let ellipsis_rank = if part.contains("...") { scope.fact(value).rank().checked_sub(letters) } else { Some(0) };
        let ellipsis_rank =
            ellipsis_rank.ok_or_else(|| equation_error(&equation, "has more letters than an input has axes"))?;
        dots = dots.max(ellipsis_rank);
        let labels = parse_labels(&equation, part, ellipsis_rank)?;
        if labels.len() != scope.fact(value).rank() {
            return Err(equation_error(&equation, &format!("does not fit input {slot}, {}", scope.fact(value))));
        }
        terms.push(diagonal(scope, value, labels)?);
    }
    let output = match right {
        Some(right) => parse_labels(&equation, right, dots)?,
        None => free(&parts, dots),
    };
    let is_known = |label: &Label| terms.iter().any(|term| term.labels.contains(label));
    let is_repeated = output.iter().enumerate().any(|(n, label)| output[..n].contains(label));
    if is_repeated || !output.iter().all(is_known) {
        return Err(equation_error(&equation, "has a result letter that is repeated or in no operand"));
    }
    if form == Product::Transposed {
        drop_unit_axes(scope, &mut terms)?;
    }
    let mut operands = terms.into_iter();
    let Some(mut product) = operands.next() else { return Err(LowerReason::Missing { slot: 0 }) };
    while let Some(next) = operands.next() {
        let later: Vec<Label> = operands.as_slice().iter().flat_map(|term| term.labels.iter().copied()).collect();
        let needed = |label: &Label| output.contains(label) || later.contains(label);
        product = contract(scope, product, next, needed, form)?;
    }
    let product = sum_out(scope, product, |label| output.contains(label))?;
    let position = |label: &Label| product.labels.iter().position(|l| l == label);
    let perm = output.iter().map(position).collect::<Option<Vec<_>>>();
    let perm = perm.ok_or_else(|| equation_error(&equation, "has a result letter that no operand has"))?;
    transposed(scope, product.value, perm)
}

/// The implicit result labels: the ellipsis axes, then the letters that occur once, in alphabetical order.
fn free(parts: &[&str], dots: usize) -> Vec<Label> {
    let mut letters: Vec<char> = parts.iter().flat_map(|part| part.chars()).filter(char::is_ascii_alphabetic).collect();
    letters.sort_unstable();
    let is_unique = |n: &usize| letters.iter().filter(|l| **l == letters[*n]).count() == 1;
    let letters = (0..letters.len()).filter(is_unique).map(|n| Label::Letter(letters[n]));
    (0..dots).rev().map(Label::Dots).chain(letters).collect()
}

/// Extracts the diagonal of axes with the same label: off-diagonal elements are masked and one axis is summed.
fn diagonal(scope: &mut impl Build, mut value: Value, mut labels: Vec<Label>) -> Result<Term, LowerReason> {
    while let Some((first, second)) =
        (0..labels.len()).find_map(|i| (i + 1..labels.len()).find(|j| labels[*j] == labels[i]).map(|j| (i, j)))
    {
        let fact = scope.fact(value);
        if fact.shape[first] != fact.shape[second] {
            return Err(LowerReason::Inputs(format!("axes {first} and {second} of {fact} have no common diagonal")));
        }
        let i = scope.count(fact.rank(), first, &fact.shape[first])?;
        let j = scope.count(fact.rank(), second, &fact.shape[second])?;
        let is_diagonal = scope.compare(Compare::Equal, i, j)?;
        let zero = scope.scalar(fact.dtype, 0.0)?;
        let diagonal = scope.select(is_diagonal, value, zero)?;
        value = scope.reduce(ReduceKind::Sum, diagonal, &[second], false)?;
        labels.remove(second);
    }
    Ok(Term { value, labels })
}

/// Drops ellipsis axes of size 1 from each term if another term is wider there.
fn drop_unit_axes(scope: &mut impl Build, terms: &mut [Term]) -> Result<(), LowerReason> {
    let mut wide_labels = Vec::new();
    for term in terms.iter() {
        let shape = scope.fact(term.value).shape;
        let dots = term.labels.iter().zip(&shape).filter(|(label, dim)| matches!(label, Label::Dots(_)) && !dim.is(1));
        wide_labels.extend(dots.map(|(label, _)| *label));
    }
    for term in terms {
        let shape = scope.fact(term.value).shape;
        let is_kept = |n: &usize| !(shape[*n].is(1) && wide_labels.contains(&term.labels[*n]));
        let kept: Vec<usize> = (0..shape.len()).filter(is_kept).collect();
        term.value = scope.reshape(term.value, kept.iter().map(|n| shape[*n].clone()).collect())?;
        term.labels = kept.iter().map(|n| term.labels[*n]).collect();
    }
    Ok(())
}

/// Sums a term over the labels that are not read later.
fn sum_out(scope: &mut impl Build, term: Term, read: impl Fn(&Label) -> bool) -> Result<Term, LowerReason> {
    let summed_axes: Vec<usize> = (0..term.labels.len()).filter(|n| !read(&term.labels[*n])).collect();
    if summed_axes.is_empty() {
        return Ok(term);
    }
    let value = scope.reduce(ReduceKind::Sum, term.value, &summed_axes, false)?;
    Ok(Term { value, labels: term.labels.into_iter().filter(|label| read(label)).collect() })
}

/// The product of two terms, summed over shared labels that are not read later.
fn contract(
    scope: &mut impl Build,
    a: Term,
    b: Term,
    read: impl Fn(&Label) -> bool,
    form: Product,
) -> Result<Term, LowerReason> {
    let a = sum_out(scope, a, |label| read(label) || b.labels.contains(label))?;
    let b = sum_out(scope, b, |label| read(label) || a.labels.contains(label))?;
    let select_labels =
        |list: &[Label], keep: &dyn Fn(&Label) -> bool| list.iter().copied().filter(keep).collect::<Vec<_>>();
    let batch = select_labels(&a.labels, &|l| b.labels.contains(l) && read(l));
    let inner = select_labels(&a.labels, &|l| b.labels.contains(l) && !read(l));
    let left_labels = select_labels(&a.labels, &|l| !b.labels.contains(l));
    let right = select_labels(&b.labels, &|l| !a.labels.contains(l));
    if form == Product::Plain {
        let labels = [&batch[..], &left_labels, &right].concat();
        let a_value = permute(scope, &a, &[&batch[..], &left_labels, &inner].concat())?;
        let b_value = permute(scope, &b, &[&batch[..], &inner, &right].concat())?;
        let (a_shape, b_shape) = (scope.fact(a_value).shape, scope.fact(b_value).shape);
        let (n, m, k) = (batch.len(), left_labels.len(), inner.len());
        let rows = volume(&a_shape[n..n + m])?;
        let (depth, columns) = (volume(&a_shape[n + m..])?, volume(&b_shape[n + k..])?);
        let a_value = scope.reshape(a_value, [&a_shape[..n], &[rows, depth.clone()]].concat())?;
        let b_value = scope.reshape(b_value, [&b_shape[..n], &[depth, columns]].concat())?;
        let y = scope.add(Op::MatMul(MatMul { transpose_a: false, transpose_b: false }), &[a_value, b_value])?;
        let value = scope.reshape(y, [&a_shape[..n + m], &b_shape[n + k..]].concat())?;
        return Ok(Term { value, labels });
    }
    // [batch, left, right, inner]; size 1 for labels that a term does not have.
    let order: Vec<Label> = [batch.clone(), left_labels.clone(), right.clone(), inner.clone()].concat();
    let (a_dims, a_value) = align(scope, &a, &order)?;
    let (b_dims, b_value) = align(scope, &b, &order)?;
    let dims: Vec<Dim> = order
        .iter()
        .zip(a_dims.iter().zip(&b_dims))
        .map(|(l, (a_dim, b_dim))| if a.labels.contains(l) { a_dim } else { b_dim }.clone())
        .collect();
    for (n, label) in order.iter().enumerate() {
        if a.labels.contains(label) && b.labels.contains(label) && a_dims[n] != b_dims[n] {
            return Err(LowerReason::Inputs(format!(
                "an axis of size {} does not match one of size {}",
                a_dims[n], b_dims[n]
            )));
        }
    }
    let (l, r, i) = (batch.len(), batch.len() + left_labels.len(), batch.len() + left_labels.len() + right.len());
    let labels = order[..i].to_vec();
    let value = if inner.is_empty() || !scope.fact(a_value).dtype.is_float() {
        let product = scope.binary(Binary::Mul, a_value, b_value)?;
        let summed_axes: Vec<usize> = (i..order.len()).collect();
        if summed_axes.is_empty() { product } else { scope.reduce(ReduceKind::Sum, product, &summed_axes, false)? }
    } else {
        let sizes = [volume(&dims[l..r])?, volume(&dims[r..i])?, volume(&dims[i..])?];
        let rows = |size: &Dim| [dims[..l].to_vec(), vec![size.clone(), sizes[2].clone()]].concat();
        let a_value = scope.reshape(a_value, rows(&sizes[0]))?;
        let b_value = scope.reshape(b_value, rows(&sizes[1]))?;
        let product = scope.add(Op::MatMul(MatMul { transpose_a: false, transpose_b: true }), &[a_value, b_value])?;
        scope.reshape(product, dims[..i].to_vec())?
    };
    Ok(Term { value, labels })
}

/// Permutes a term's axes to `order`, without labels that it does not have.
fn permute(scope: &mut impl Build, term: &Term, order: &[Label]) -> Result<Value, LowerReason> {
    let position = |label: &Label| term.labels.iter().position(|l| l == label);
    transposed(scope, term.value, order.iter().filter_map(position).collect())
}

/// Permutes a term's axes to `order`, with size 1 for labels it does not have.
fn align(scope: &mut impl Build, term: &Term, order: &[Label]) -> Result<(Vec<Dim>, Value), LowerReason> {
    let position = |label: &Label| term.labels.iter().position(|l| l == label);
    let value = permute(scope, term, order)?;
    let mut sizes = scope.fact(value).shape.into_iter();
    let size = |label: &Label| position(label).and_then(|_| sizes.next()).unwrap_or(Dim::Known(1));
    let dims: Vec<Dim> = order.iter().map(size).collect();
    let value = scope.reshape(value, dims.clone())?;
    Ok((dims, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_letters_and_dots() {
        let parse_labels = |part: &str, dots| parse_labels("e", part, dots).map_err(|e| e.to_string());
        let letter = Label::Letter;
        assert_eq!(parse_labels("a...b", 2), Ok(vec![letter('a'), Label::Dots(1), Label::Dots(0), letter('b')]));
        assert_eq!(parse_labels("", 0), Ok(vec![]));
        assert!(parse_labels("a.b", 1).unwrap_err().contains("not a letter"));
        assert!(parse_labels("......", 1).unwrap_err().contains("not a letter"));
    }

    #[test]
    fn implicit_result_has_letters_that_occur_once() {
        assert_eq!(free(&["...ij", "jk"], 1), [Label::Dots(0), Label::Letter('i'), Label::Letter('k')]);
        assert_eq!(free(&["i", "i"], 0), []);
    }
}
