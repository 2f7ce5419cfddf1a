//! Complex tensors as pairs of real tensors, for rotary embeddings written with complex products and for Fourier
//! transforms. No core op is complex.
//!
//! Data movement and sums apply to both parts. A transform along one axis is a product with a constant matrix.

use super::resize::mixed;
use super::table::{self, Lower};
use super::{Known, NodeOutputs, Outputs, Scope, one};
use crate::import::build::Build;
use crate::import::formula::formula;
use crate::import::fx::program::names;
use crate::import::lower_error::LowerReason;
use crate::import::onnx::lower::attribute;
use crate::import::onnx::lower::slice::part;
use crate::op::{Binary, Unary, Value};
use crate::tensor::dim::Dim;
use std::f64::consts::TAU;

/// Real and imaginary part.
type Parts = (Value, Value);

/// The lowering of a node that makes or reads complex tensors; `None` for all others.
pub fn find(reads_complex: bool, target: &str) -> Option<Lower> {
    let unsupported: Lower = |_| Err(LowerReason::Unsupported("this operator on complex numbers".to_string()));
    find_row(reads_complex, table::name(target)).or(reads_complex.then_some(unsupported))
}

/// Tests whether an operator supports complex operands.
pub fn is_supported(target: &str) -> bool {
    find_row(true, table::name(target)).is_some()
}

fn find_row(reads_complex: bool, name: &str) -> Option<Lower> {
    let lower: Lower = match name {
        "view_as_complex" => from_pairs,
        "complex" => from_parts,
        "polar" => from_angle,
        "fft_fft" | "fft_fft2" | "fft_fftn" => |s| transform(s, true),
        "fft_ifft" | "fft_ifft2" | "fft_ifftn" => |s| transform(s, false),
        "fft_rfft" | "fft_rfft2" | "fft_rfftn" => |s| transform_real(s, true),
        "_fft_r2c" => |s| {
            let half = s.flag("onesided", true)?;
            transform_real(s, half)
        },
        "_fft_c2c" => |s| {
            let forward = s.flag("forward", true)?;
            transform(s, forward)
        },
        "fft_irfft" | "fft_irfft2" | "fft_irfftn" | "_fft_c2r" => to_real,
        _ if !reads_complex => return None,
        "view_as_real" => to_pairs,
        "real" => |s| one(operand(s)?.0),
        "imag" => |s| one(operand(s)?.1),
        "abs" => size,
        "conj" | "_conj" | "conj_physical" | "_conj_physical" => conjugate,
        "mul" | "mul_" | "multiply" => product,
        "to" | "_to_copy" | "resolve_conj" | "resolve_neg" => |s| pair(operand(s)?),
        "view" | "reshape" | "_unsafe_view" | "view_as" | "reshape_as" | "flatten" | "unflatten" | "unsqueeze"
        | "squeeze" | "expand" | "expand_as" | "slice" | "select" | "narrow" | "transpose" | "permute" | "t"
        | "index" | "index_select" | "cat" | "stack" | "clone" | "contiguous" | "detach" | "alias" | "neg" | "sum"
        | "mean" | "repeat" | "flip" | "roll" | "split" | "split_with_sizes" | "chunk" | "unbind" | "movedim"
        | "add" | "sub" | "div" | "lift_fresh_copy" => lower_parts,
        "matmul" | "mm" | "bmm" | "einsum" => bilinear,
        _ => return None,
    };
    Some(lower)
}

fn pair((re, im): Parts) -> Outputs {
    Ok(NodeOutputs::Tensors(vec![Known::Complex(re, im)]))
}

/// The parts of an argument; a real tensor has no imaginary part.
fn parts(scope: &mut Scope<'_>, name: &'static str) -> Result<(Value, Option<Value>), LowerReason> {
    match scope.known(name)? {
        Known::Complex(re, im) => Ok((re, Some(im))),
        known => Ok((scope.read(known)?, None)),
    }
}

fn operand(scope: &mut Scope<'_>) -> Result<Parts, LowerReason> {
    match parts(scope, "self")? {
        (re, Some(im)) => Ok((re, im)),
        (re, None) => {
            let zero = scope.with_number(Binary::Mul, re, 0.0)?;
            Ok((re, zero))
        }
    }
}

/// `view_as_complex`: the last axis has the two parts.
fn from_pairs(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let shape = scope.fact(x).shape;
    let Some((last, rest)) = shape.split_last().filter(|(last, _)| last.is(2)) else {
        return Err(LowerReason::Inputs("its last axis does not have size 2".to_string()));
    };
    let axis = rest.len();
    let re = part(scope, x, axis, Dim::Known(0), Dim::Known(1))?;
    let im = part(scope, x, axis, Dim::Known(1), last.clone())?;
    pair((scope.reshape(re, rest.to_vec())?, scope.reshape(im, rest.to_vec())?))
}

/// `view_as_real`: the parts as a new last axis.
fn to_pairs(scope: &mut Scope<'_>) -> Outputs {
    let (re, im) = operand(scope)?;
    one(scope.stack(&[re, im], scope.fact(re).rank())?)
}

fn from_parts(scope: &mut Scope<'_>) -> Outputs {
    let parts = (scope.value("real")?, scope.value("imag")?);
    pair(parts)
}

/// `polar`: `abs·(cos angle + i sin angle)`.
fn from_angle(scope: &mut Scope<'_>) -> Outputs {
    let (abs, angle) = (scope.value("abs")?, scope.value("angle")?);
    let (cos, sin) = (scope.unary(Unary::Cos, angle)?, scope.unary(Unary::Sin, angle)?);
    pair((scope.binary(Binary::Mul, abs, cos)?, scope.binary(Binary::Mul, abs, sin)?))
}

fn size(scope: &mut Scope<'_>) -> Outputs {
    let (re, im) = operand(scope)?;
    one(formula(scope, [re, im], |[re, im]| (re.squared() + im.squared()).root(2.0))?)
}

fn conjugate(scope: &mut Scope<'_>) -> Outputs {
    let (re, im) = operand(scope)?;
    pair((re, scope.unary(Unary::Neg, im)?))
}

/// `(a + bi)(c + di) = (ac - bd) + (ad + bc)i`; real operands have no imaginary part.
fn product(scope: &mut Scope<'_>) -> Outputs {
    if let Some(number) = scope.number("other").ok().flatten() {
        let (re, im) = operand(scope)?;
        let number = number.float();
        return pair((scope.with_number(Binary::Mul, re, number)?, scope.with_number(Binary::Mul, im, number)?));
    }
    let ((a, b), (c, d)) = (parts(scope, "self")?, parts(scope, "other")?);
    let multiply = |scope: &mut Scope<'_>, a: Value, b: Value| -> Result<Value, LowerReason> {
        let mut factors = [a, b];
        scope.align_batch(&mut factors, None)?;
        scope.binary(Binary::Mul, factors[0], factors[1])
    };
    let ac = multiply(scope, a, c)?;
    let re = match (b, d) {
        (Some(b), Some(d)) => {
            let bd = multiply(scope, b, d)?;
            scope.binary(Binary::Sub, ac, bd)?
        }
        _ => ac,
    };
    let ad = d.map(|d| multiply(scope, a, d)).transpose()?;
    let bc = b.map(|b| multiply(scope, b, c)).transpose()?;
    let im = match (ad, bc) {
        (Some(ad), Some(bc)) => scope.binary(Binary::Add, ad, bc)?,
        (Some(one), None) | (None, Some(one)) => one,
        (None, None) => return Err(LowerReason::Inputs("neither operand is complex".to_string())),
    };
    pair((re, im))
}

/// Lowers the node on real tensors that `pick` chooses for the complex ones, by name.
fn lower_on_real(scope: &mut Scope<'_>, pick: impl Fn(&str, Parts) -> Value) -> Result<Vec<Known>, LowerReason> {
    let lower = table::find(&scope.node.target).ok_or_else(|| LowerReason::Unsupported(scope.node.target.clone()))?;
    let real = |name: &str, known| {
        Ok::<_, LowerReason>(match known {
            Known::Complex(re, im) => Known::Value(pick(name, (re, im))),
            other => other,
        })
    };
    let real_names = scope.names.mapped(scope.node, real)?;
    let mut inner = Scope {
        node: scope.node,
        origin: scope.origin.clone(),
        names: &real_names,
        metas: scope.metas,
        frozen: scope.frozen,
        graph: &mut *scope.graph,
        constants: &mut *scope.constants,
        ledger: &mut *scope.ledger,
    };
    match lower(&mut inner)? {
        NodeOutputs::Tensors(list) => Ok(list),
        NodeOutputs::Size(_) => Err(LowerReason::Inputs("a size of a complex tensor".to_string())),
    }
}

fn read<'a>(scope: &Scope<'a>) -> Vec<&'a str> {
    let read = scope.node.inputs.iter().flat_map(|input| names(&input.arg));
    read.filter(|name| matches!(scope.names.tensors.get(*name), Some(Known::Complex(..)))).collect()
}

/// Applies an operator to both parts. Addends must all be complex, divisors must be real.
fn lower_parts(scope: &mut Scope<'_>) -> Outputs {
    let tensors = |scope: &Scope<'_>| {
        let operands = scope.node.inputs.iter().flat_map(|input| names(&input.arg));
        operands.filter(|name| scope.names.tensors.contains_key(*name)).count()
    };
    let (complex_count, tensor_count) = (read(scope).len(), tensors(scope));
    let name = table::name(&scope.node.target).trim_end_matches('_');
    let mixes = match name {
        "add" | "sub" => complex_count != 2,
        "cat" | "stack" => complex_count != tensor_count,
        "div" => scope.has("other") && matches!(scope.known("other"), Ok(Known::Complex(..))),
        _ => false,
    };
    if mixes {
        return Err(LowerReason::Unsupported("real and complex numbers in one operator".to_string()));
    }
    let re = lower_on_real(scope, |_, parts| parts.0)?;
    let im = lower_on_real(scope, |_, parts| parts.1)?;
    let mut results = Vec::with_capacity(re.len());
    for (re, im) in re.into_iter().zip(im) {
        results.push(Known::Complex(scope.read(re)?, scope.read(im)?));
    }
    Ok(NodeOutputs::Tensors(results))
}

/// Applies an operator that is linear in each of two operands.
fn bilinear(scope: &mut Scope<'_>) -> Outputs {
    let complex = read(scope);
    match complex[..] {
        [_] => lower_parts(scope),
        [a, b] if a != b => {
            let mut multiply = |first: bool, second: bool| -> Result<Value, LowerReason> {
                let results = lower_on_real(scope, |name, (re, im)| {
                    let imaginary = if name == a { first } else { second };
                    if imaginary { im } else { re }
                })?;
                let known =
                    results.first().copied().unwrap_or(Known::Absent("an output that its operator does not have"));
                scope.read(known)
            };
            let (ac, bd, ad, bc) =
                (multiply(false, false)?, multiply(true, true)?, multiply(false, true)?, multiply(true, false)?);
            pair((scope.binary(Binary::Sub, ac, bd)?, scope.binary(Binary::Add, ad, bc)?))
        }
        _ => Err(LowerReason::Unsupported("this product of complex tensors".to_string())),
    }
}

/// The axes of a transform in the order given; a real transform halves the last.
fn axes(scope: &Scope<'_>, rank: usize) -> Result<Vec<usize>, LowerReason> {
    let name = table::name(&scope.node.target);
    let dims = match scope.ints("dim")? {
        Some(list) => list,
        None if name.ends_with('2') => vec![-2, -1],
        None if name.ends_with('n') => (0..rank as i64).collect(),
        None => vec![-1],
    };
    dims.into_iter().map(|axis| attribute::axis(axis, rank)).collect()
}

fn length(scope: &Scope<'_>, x: Value, axis: usize) -> Result<i64, LowerReason> {
    scope.fact(x).shape[axis].known().ok_or(LowerReason::NotConstant { what: "the length of the transform" })
}

fn scale(scope: &Scope<'_>, elements: f64, forward: bool) -> Result<f64, LowerReason> {
    if scope.has("normalization") {
        return match scope.int("normalization", 0)? {
            0 => Ok(1.0),
            1 => Ok(elements.sqrt().recip()),
            2 => Ok(elements.recip()),
            other => Err(LowerReason::Unsupported(format!("normalisation {other}"))),
        };
    }
    if table::name(&scope.node.target).starts_with("_fft") {
        return Ok(1.0);
    }
    match (scope.text("norm", "backward")?.as_str(), forward) {
        ("ortho", _) => Ok(elements.sqrt().recip()),
        ("backward", true) | ("forward", false) => Ok(1.0),
        ("backward", false) | ("forward", true) => Ok(elements.recip()),
        (other, _) => Err(LowerReason::Unsupported(format!("the normalisation `{other}`"))),
    }
}

fn check_sizes(scope: &Scope<'_>, x: Value, axes: &[usize]) -> Result<(), LowerReason> {
    for name in ["s", "n"] {
        let Some(requested) = scope.ints(name)? else { continue };
        for (requested, axis) in requested.iter().zip(axes) {
            if *requested != -1 && *requested != length(scope, x, *axis)? {
                return Err(LowerReason::Unsupported("an FFT that pads or cuts its input".to_string()));
            }
        }
    }
    Ok(())
}

/// The products of `x [cos, sin]` along an axis with `cos` and `sin` of `2πkm/n`, for `k < rows`, times the weight of
/// `m`.
fn project_on_waves(
    scope: &mut Scope<'_>,
    [x_cos, x_sin]: [Value; 2],
    axis: usize,
    [rows, n]: [i64; 2],
    weight: impl Fn(i64) -> f64,
) -> Result<Parts, LowerReason> {
    let size = length(scope, x_cos, axis)?;
    let angle = |k: i64, m: i64| TAU * (k as f64 * m as f64 % n as f64) / n as f64;
    let matrix = |wave: fn(f64) -> f64| -> Vec<Vec<(i64, f64)>> {
        (0..rows).map(|k| (0..size).map(|m| (m, weight(m) * wave(angle(k, m)))).collect()).collect()
    };
    if rows.saturating_mul(size) > 1 << 22 {
        return Err(LowerReason::Unsupported(format!("a transform of length {n}")));
    }
    Ok((mixed(scope, x_cos, axis, size, &matrix(f64::cos))?, mixed(scope, x_sin, axis, size, &matrix(f64::sin))?))
}

/// The first `rows` elements of the DFT along one axis: `Σ x e^(∓2πikm/n)`.
fn transform_axis(
    scope: &mut Scope<'_>,
    (re, im): (Value, Option<Value>),
    axis: usize,
    rows: i64,
    forward: bool,
) -> Result<Parts, LowerReason> {
    let sizes = [rows, length(scope, re, axis)?];
    let (re_cos, re_sin) = project_on_waves(scope, [re; 2], axis, sizes, |_| 1.0)?;
    let sin_part = if forward { scope.unary(Unary::Neg, re_sin)? } else { re_sin };
    let Some(im) = im else { return Ok((re_cos, sin_part)) };
    let (im_cos, im_sin) = project_on_waves(scope, [im; 2], axis, sizes, |_| 1.0)?;
    let re = scope.binary(if forward { Binary::Add } else { Binary::Sub }, re_cos, im_sin)?;
    Ok((re, scope.binary(Binary::Add, im_cos, sin_part)?))
}

fn times(scope: &mut Scope<'_>, x: Value, factor: f64) -> Result<Value, LowerReason> {
    formula(scope, [x], |[x]| x.times(factor))
}

fn transform(scope: &mut Scope<'_>, forward: bool) -> Outputs {
    let x = parts(scope, "self")?;
    let axes = axes(scope, scope.fact(x.0).rank())?;
    check_sizes(scope, x.0, &axes)?;
    transform_axes(scope, x, axes, forward, false)
}

/// The DFT of a real tensor; with `half`, the non-redundant half of the last axis.
fn transform_real(scope: &mut Scope<'_>, half: bool) -> Outputs {
    let x = scope.value("self")?;
    let mut axes = axes(scope, scope.fact(x).rank())?;
    check_sizes(scope, x, &axes)?;
    axes.reverse();
    transform_axes(scope, (x, None), axes, true, half)
}

/// The DFT along axes in order; with `half`, the first axis keeps only its non-redundant half.
fn transform_axes(
    scope: &mut Scope<'_>,
    mut x: (Value, Option<Value>),
    axes: Vec<usize>,
    forward: bool,
    half: bool,
) -> Outputs {
    let mut elements = 1.0;
    for (at, axis) in axes.into_iter().enumerate() {
        let n = length(scope, x.0, axis)?;
        elements *= n as f64;
        let rows = if at == 0 && half { n / 2 + 1 } else { n };
        let (re, im) = transform_axis(scope, x, axis, rows, forward)?;
        x = (re, Some(im));
    }
    let (re, Some(im)) = x else { return Err(LowerReason::Inputs("it has no axes".to_string())) };
    let factor = scale(scope, elements, forward)?;
    pair((times(scope, re, factor)?, times(scope, im, factor)?))
}

/// Inverse real DFT: the missing half of the last axis is the conjugate mirror.
fn to_real(scope: &mut Scope<'_>) -> Outputs {
    let mut x = operand(scope)?;
    let axes = axes(scope, scope.fact(x.0).rank())?;
    let Some((last, leading)) = axes.split_last() else {
        return Err(LowerReason::Inputs("it has no axes".to_string()));
    };
    let half_length = length(scope, x.0, *last)?;
    let sizes = match scope.ints("s")? {
        Some(list) => list,
        None => scope.ints("n")?.unwrap_or_default(),
    };
    let requested =
        if scope.has("last_dim_size") { scope.int("last_dim_size", 0)? } else { *sizes.last().unwrap_or(&-1) };
    let n = if requested > 0 { requested } else { 2 * (half_length - 1) };
    if n < 1 || n / 2 + 1 != half_length {
        return Err(LowerReason::Unsupported("an FFT that pads or cuts its input".to_string()));
    }
    let mut elements = n as f64;
    for (at, axis) in leading.iter().enumerate() {
        let axis_length = length(scope, x.0, *axis)?;
        if sizes.get(at).is_some_and(|size| *size != -1 && *size != axis_length) {
            return Err(LowerReason::Unsupported("an FFT that pads or cuts its input".to_string()));
        }
        elements *= axis_length as f64;
        x = transform_axis(scope, (x.0, Some(x.1)), *axis, axis_length, false)?;
    }
    // x[m] = Σ w_k (re_k cos - im_k sin): all but the first, and the middle one of an even number, count twice.
    let weight = |k: i64| if k == 0 || 2 * k == n { 1.0 } else { 2.0 };
    let (re, im) = project_on_waves(scope, [x.0, x.1], *last, [n, n], weight)?;
    let y = scope.binary(Binary::Sub, re, im)?;
    let factor = scale(scope, elements, false)?;
    one(times(scope, y, factor)?)
}
