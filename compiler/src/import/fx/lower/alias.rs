//! Finds the results that alias an operand, so that an in-place change of one changes the other.
//!
//! Most operators always return a view or never do. For `reshape`, `contiguous`, `to` and similar ones it depends on
//! the operand's strides and element type, both of which the file records.

use super::table;
use crate::import::fx::program::names;
use crate::import::fx::schema::{Argument, Node, SymInt, TensorMeta};
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
        | "expand" | "expand_as" | "broadcast_to" | "slice" | "select" | "narrow" | "split" | "split_with_sizes"
        | "chunk" | "tensor_split" | "hsplit" | "vsplit" | "dsplit" | "unbind" | "unsafe_chunk" | "unsafe_split"
        | "diagonal" | "unfold" | "as_strided" | "alias" | "detach" | "lift_fresh" | "positive" | "resolve_conj"
        | "resolve_neg" | "conj" | "real" | "imag" | "view_as_real" | "view_as_complex" => true,
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
        "reshape" | "reshape_as" | "flatten" | "ravel" => match (metas.get(base), metas.get(result)) {
            (Some(from), Some(to)) => can_view(from, to),
            _ => true,
        },
        _ => false,
    }
}

/// Size and stride of every axis longer than 1; `None` if a stride is symbolic or missing.
fn layout(meta: &TensorMeta) -> Option<Vec<(Option<i64>, i64)>> {
    if meta.sizes.len() != meta.strides.len() {
        return None;
    }
    let axes = meta.sizes.iter().map(SymInt::known).zip(&meta.strides);
    axes.filter(|(size, _)| *size != Some(1)).map(|(size, step)| Some((size, step.known()?))).collect()
}

/// Tests for equal strides; true if unknown.
fn is_laid_alike(from: &TensorMeta, to: &TensorMeta) -> bool {
    match (layout(from), layout(to)) {
        (Some(from), Some(to)) => from.iter().map(|axis| axis.1).eq(to.iter().map(|axis| axis.1)),
        _ => true,
    }
}

/// Tests whether a tensor can take another shape without a copy: merged or split axes must be contiguous with each
/// other. True if a size or stride is symbolic.
fn can_view(from: &TensorMeta, to: &TensorMeta) -> bool {
    let to: Option<Vec<i64>> = to.sizes.iter().map(SymInt::known).filter(|size| *size != Some(1)).collect();
    let (Some(axes), Some(to)) = (layout(from), to) else { return true };
    let Some(axes) = axes.into_iter().map(|(size, step)| Some((size?, step))).collect::<Option<Vec<_>>>() else {
        return true;
    };
    // Runs of mutually contiguous axes, from the last: their product, and the stride of the innermost.
    let mut sizes = to.iter().rev();
    let mut at = axes.len();
    while at > 0 {
        let (mut elements, step) = axes[at - 1];
        at -= 1;
        while at > 0 && Some(axes[at - 1].1) == step.checked_mul(elements) {
            elements = elements.saturating_mul(axes[at - 1].0);
            at -= 1;
        }
        let mut product = 1i64;
        while product < elements
            && let Some(size) = sizes.next()
        {
            product = product.saturating_mul(*size);
        }
        if product != elements {
            return false;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meta(sizes: &[i64], strides: &[i64]) -> TensorMeta {
        let list = |numbers: &[i64]| numbers.iter().map(|n| SymInt::AsInt(*n)).collect();
        let (sizes, strides) = (list(sizes), list(strides));
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
}
