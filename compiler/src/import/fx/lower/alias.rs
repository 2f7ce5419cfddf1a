//! Finds the results that alias an operand, so that an in-place change of one changes the other.
//!
//! Most operators always return a view or never do. For `reshape`, `contiguous`, `to` and similar ones it depends on
//! the operand's strides and element type, both of which the file records.

use super::table;
use crate::import::fx::expression;
use crate::import::fx::program::names;
use crate::import::fx::schema::{Argument, Node, SymInt, TensorMeta};
use crate::tensor::dim::{Dim, DimError};
use std::collections::HashMap;

/// The outputs of a node that are views, each with its base.
pub fn views<'n>(node: &'n Node, metas: &HashMap<String, TensorMeta>) -> Vec<(&'n str, &'n str)> {
    let results = node.outputs.iter().flat_map(names);
    match table::name(&node.target) {
        // One view per operand.
        "meshgrid" | "broadcast_tensors" => {
            let operands = node.inputs.first().into_iter().flat_map(|input| names(&input.arg));
            results.zip(operands).collect()
        }
        name => {
            let Some(base) = operand(node) else { return Vec::new() };
            results.filter(|result| is_view(node, name, base, result, metas)).map(|result| (result, base)).collect()
        }
    }
}

/// The tensor that an operator changes or views: `self` or `input`, in any position.
pub fn operand(node: &Node) -> Option<&str> {
    let named = |name: &str| node.inputs.iter().find(|input| input.name == name);
    let input = named("self").or_else(|| named("input")).or_else(|| node.inputs.first())?;
    names(&input.arg).next()
}

/// The tensor that a node writes: the operand of an in-place operator, or the `out` argument.
pub fn written(node: &Node) -> Option<&str> {
    if table::in_place(&node.target) {
        return operand(node);
    }
    let out = node.inputs.iter().find(|input| input.name == "out")?;
    names(&out.arg).next()
}

/// Tests for an overload that writes its results to several arguments.
pub fn writes_several(node: &Node) -> bool {
    let overload = node.target.rsplit('.').next().unwrap_or_default();
    let is_out = overload == "out"
        || overload.ends_with("_out")
        || matches!(
            overload,
            "values" | "dim_values" | "values_stable" | "dim_max" | "dim_min" | "unary_min" | "unary_max"
        );
    is_out && node.inputs.iter().all(|input| input.name != "out")
}

/// Tests for an operator that changes only its operand's shape in place.
pub fn reshapes_in_place(target: &str) -> bool {
    matches!(
        table::name(target),
        "t_" | "transpose_" | "swapaxes_" | "swapdims_" | "squeeze_" | "unsqueeze_" | "as_strided_"
    )
}

fn is_view(node: &Node, name: &str, base: &str, result: &str, metas: &HashMap<String, TensorMeta>) -> bool {
    let flag = |name: &str| {
        let input = node.inputs.iter().find(|input| input.name == name);
        input.and_then(|input| if let Argument::AsBool(flag) = input.arg { Some(flag) } else { None })
    };
    match name {
        "view" | "_unsafe_view" | "view_as" | "unflatten" | "permute" | "transpose" | "t" | "numpy_T" | "mT" | "mH"
        | "matrix_H" | "adjoint" | "swapaxes" | "swapdims" | "movedim" | "moveaxis" | "unsqueeze" | "squeeze"
        | "atleast_1d" | "atleast_2d" | "atleast_3d" | "expand" | "expand_as" | "broadcast_to" | "slice" | "select"
        | "narrow" | "split" | "split_with_sizes" | "chunk" | "tensor_split" | "hsplit" | "vsplit" | "dsplit"
        | "unbind" | "unsafe_chunk" | "unsafe_split" | "diagonal" | "unfold" | "as_strided" | "alias" | "detach"
        | "lift_fresh" | "positive" | "resolve_conj" | "resolve_neg" | "conj" | "real" | "imag" | "view_as_real"
        | "view_as_complex" => true,
        // In evaluation, or with rate 0, the result is the operand itself.
        "dropout" | "feature_dropout" | "alpha_dropout" | "feature_alpha_dropout" => {
            let rate = node.inputs.iter().find(|input| input.name == "p").map(|input| &input.arg);
            let is_identity = matches!(rate, Some(Argument::AsInt(0)))
                || matches!(rate, Some(Argument::AsFloat(rate)) if rate.value() == Some(0.0));
            is_identity || flag("train") == Some(false)
        }
        "to" | "type_as" if flag("copy") == Some(true) => false,
        "to" | "type_as" => match (metas.get(base), metas.get(result)) {
            (Some(from), Some(to)) => from.dtype == to.dtype && is_laid_alike(from, to),
            _ => true,
        },
        "contiguous" => match (metas.get(base), metas.get(result)) {
            (Some(from), Some(to)) => is_laid_alike(from, to),
            _ => true,
        },
        // `ravel` copies whatever is not contiguous, even if its axes could be merged.
        "ravel" => metas.get(base).is_none_or(is_contiguous),
        "reshape" | "reshape_as" | "flatten" => match (metas.get(base), metas.get(result)) {
            (Some(from), Some(to)) => can_view(from, to),
            _ => true,
        },
        _ => false,
    }
}

/// A size or stride; `None` if it is no polynomial.
fn dim(size: &SymInt) -> Option<Dim> {
    match size {
        SymInt::AsInt(size) => Some(Dim::Known(*size)),
        SymInt::AsExpr(size) => expression::parse(&size.expr_str, &Dim::symbol).ok(),
    }
}

/// Size and stride of every axis longer than 1; `None` if one is unknown.
fn layout(meta: &TensorMeta) -> Option<Vec<(Dim, Dim)>> {
    if meta.sizes.len() != meta.strides.len() {
        return None;
    }
    let axes = meta.sizes.iter().zip(&meta.strides).map(|(size, step)| Some((dim(size)?, dim(step)?)));
    axes.filter(|axis| axis.as_ref().is_none_or(|(size, _)| !size.is(1))).collect()
}

/// Tests for equal strides; true if unknown.
fn is_laid_alike(from: &TensorMeta, to: &TensorMeta) -> bool {
    match (layout(from), layout(to)) {
        (Some(from), Some(to)) => from.iter().map(|axis| &axis.1).eq(to.iter().map(|axis| &axis.1)),
        _ => true,
    }
}

/// Tests whether elements follow each other in memory; true if unknown.
fn is_contiguous(meta: &TensorMeta) -> bool {
    let Some(axes) = layout(meta) else { return true };
    let mut next_step = Some(Dim::Known(1));
    axes.into_iter().rev().all(|(size, step)| {
        let follows = next_step.as_ref().is_none_or(|next| *next == step);
        next_step = step.mul(&size).ok();
        follows
    })
}

/// Tests whether a tensor can take another shape without a copy: merged or split axes must be contiguous with each
/// other. True if a size or stride is unknown.
fn can_view(from: &TensorMeta, to: &TensorMeta) -> bool {
    let to: Option<Vec<Dim>> = to.sizes.iter().map(dim).collect();
    match (layout(from), to) {
        (Some(axes), Some(to)) => can_split(axes, &to).unwrap_or(true),
        _ => true,
    }
}

/// [`can_view`] for axes longer than 1. Fails if a product overflows.
fn can_split(mut axes: Vec<(Dim, Dim)>, to: &[Dim]) -> Result<bool, DimError> {
    // Runs of mutually contiguous axes, from the last: their product, and the stride of the innermost.
    let mut sizes = to.iter().rev().filter(|size| !size.is(1));
    while let Some((mut elements, step)) = axes.pop() {
        while let Some((size, outer_step)) = axes.last()
            && *outer_step == step.mul(&elements)?
        {
            elements = elements.mul(size)?;
            axes.pop();
        }
        let mut product = Dim::Known(1);
        while product != elements {
            let Some(size) = sizes.next() else { return Ok(false) };
            product = product.mul(size)?;
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::import::fx::schema::Expression;

    fn meta(sizes: &[i64], strides: &[i64]) -> TensorMeta {
        let list = |numbers: &[i64]| numbers.iter().map(|n| SymInt::AsInt(*n)).collect();
        tensor(list(sizes), list(strides))
    }

    fn symbolic(sizes: &[&str], strides: &[&str]) -> TensorMeta {
        let size = |text: &&str| SymInt::AsExpr(Expression { expr_str: text.to_string() });
        tensor(sizes.iter().map(size).collect(), strides.iter().map(size).collect())
    }

    fn tensor(sizes: Vec<SymInt>, strides: Vec<SymInt>) -> TensorMeta {
        TensorMeta { dtype: 7, sizes, strides, storage_offset: None, layout: None, requires_grad: None }
    }

    #[test]
    fn a_reshape_is_a_view_where_axes_lie_one_within_the_other() {
        let contiguous = meta(&[2, 3, 4], &[12, 4, 1]);
        let transposed = meta(&[2, 4, 3], &[12, 1, 4]);
        let sliced = meta(&[2, 2, 4], &[12, 4, 1]);
        let to = |sizes: &[i64]| meta(sizes, &vec![0; sizes.len()]);
        for (from, shape, expected) in [
            (&contiguous, &[6, 4][..], true),
            (&contiguous, &[24], true),
            (&contiguous, &[2, 2, 6], true),
            (&transposed, &[2, 12], false),
            (&transposed, &[2, 2, 2, 3], true),
            (&transposed, &[8, 3], false),
            (&sliced, &[2, 8], true),
            (&sliced, &[16], false),
            (&sliced, &[2, 1, 2, 2, 2], true),
        ] {
            assert_eq!(can_view(from, &to(shape)), expected, "{from:?} {shape:?}");
        }
        assert!(!is_laid_alike(&transposed, &meta(&[2, 4, 3], &[12, 3, 1])));
        assert!(is_laid_alike(&meta(&[2, 1, 3], &[3, 7, 1]), &meta(&[2, 1, 3], &[3, 3, 1])));
    }

    #[test]
    fn a_symbolic_reshape_is_a_view_for_all_sizes_or_none() {
        let contiguous = symbolic(&["s0", "s1", "4"], &["4*s1", "4", "1"]);
        let transposed = symbolic(&["s0", "4", "2"], &["8", "1", "4"]);
        for (from, shape, expected) in [
            (&contiguous, &["s0*s1", "4"][..], true),
            (&contiguous, &["4*s0*s1"], true),
            (&contiguous, &["s0", "1", "s1", "2", "2"], true),
            (&transposed, &["s0", "8"], false),
            (&transposed, &["s0", "2", "2", "2"], true),
            // A size that is no polynomial is unknown.
            (&transposed, &["s0//3", "24"], true),
        ] {
            assert_eq!(can_view(from, &symbolic(shape, &vec!["0"; shape.len()])), expected, "{from:?} {shape:?}");
        }
        assert!(is_contiguous(&contiguous) && !is_contiguous(&transposed));
        assert!(!is_laid_alike(&symbolic(&["8", "s0"], &["1", "8"]), &symbolic(&["8", "s0"], &["s0", "1"])));
    }
}
