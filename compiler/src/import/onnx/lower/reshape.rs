//! Reshape operators, and the rule that keeps the batch symbolic through a reshape of a static export.
//!
//! In `Reshape([4, 16, 64] → [4, 16, 4, 16])` only the first 4 is the batch. Equal numbers do not identify it, but
//! strides do. In row-major order the axis with the batch symbol covers strides from `s`, the product of the dims to
//! its right, to `s·size`. The symbol goes to the one target axis whose stride range contains this range: here 1024 to
//! 4096, which is axis 0. In `[4, 16, 97] → [64, 97]` the range 1552 to 6208 is inside 97 to 6208, which gives
//! `batch*16`.
//!
//! For an axis that contains more than the batch, `import/batch_in_axis.rs` finds the stride from the producer of the
//! axis. If it is unknown, exactly one target axis must fit.

use super::attribute::{axes, axis};
use super::{Known, LowerReason, Outputs, Scope, StaticSizes, symbol};
use crate::import::batch_in_axis::{locate_factor, stride_within};
use crate::import::build::Build;
use crate::import::symbolic_batch::unique_axis;
use crate::tensor::dim::{Dim, volume};

/// Reshapes to the second input, an attribute before operator set 5.
pub fn reshape(scope: &mut Scope<'_>) -> Outputs {
    let allow_zero = scope.flag("allowzero", false)?;
    let target_shape = if scope.opset < 5 {
        scope.ints("shape")?.map(|list| list.into_iter().map(Dim::Known).collect())
    } else {
        scope.dims(1, "the shape")?
    };
    let target_shape = target_shape.ok_or(LowerReason::Missing { slot: 1 })?;
    let input = scope.fact_of(0)?.shape;
    let x = scope.value(0)?;
    let shape = target(&input, &target_shape, allow_zero, scope.frozen, &|axis| stride_within(scope.graph(), x, axis))?;
    Ok(vec![Known::Value(scope.reshape(x, shape)?)])
}

/// Resolves the shape `target_shape`: copies zeros, infers -1, and replaces the static batch by its symbol.
/// `stride_within` returns the stride between samples within an axis of the input, if known.
pub fn target(
    input: &[Dim],
    target_shape: &[Dim],
    allow_zero: bool,
    frozen: &StaticSizes,
    stride_within: &dyn Fn(usize) -> Option<i64>,
) -> Result<Vec<Dim>, LowerReason> {
    let format_shape = |dims: &[Dim]| format!("[{}]", dims.iter().map(Dim::to_string).collect::<Vec<_>>().join(", "));
    let inferred: Vec<usize> = (0..target_shape.len()).filter(|&i| target_shape[i].is(-1)).collect();
    if inferred.len() > 1 {
        return Err(LowerReason::Inputs(format!("the shape {} has more than one -1", format_shape(target_shape))));
    }
    if let Some(negative) = target_shape.iter().find(|d| d.known().is_some_and(|v| v < -1)) {
        return Err(LowerReason::Inputs(format!("the shape {} has a size of {negative}", format_shape(target_shape))));
    }
    let copy_zeros = |from: &[Dim]| -> Result<Vec<Dim>, LowerReason> {
        let copy_size = |(i, dim): (usize, &Dim)| match from.get(i) {
            _ if allow_zero || !dim.is(0) => Ok(dim.clone()),
            Some(size) => Ok(size.clone()),
            None => Err(LowerReason::Inputs(format!(
                "the shape {} copies an axis that {} does not have",
                format_shape(target_shape),
                format_shape(from)
            ))),
        };
        target_shape.iter().enumerate().map(copy_size).collect()
    };
    let solve = |from: &[Dim]| -> Result<Vec<Dim>, LowerReason> {
        let mut shape = copy_zeros(from)?;
        let mismatch = || {
            LowerReason::Inputs(format!(
                "the shape {} does not fit the input's {}",
                format_shape(target_shape),
                format_shape(from)
            ))
        };
        if let Some(&at) = inferred.first() {
            shape[at] = Dim::Known(1);
            let others = volume(&shape)?;
            shape[at] =
                if others.is(0) { Dim::Known(0) } else { volume(from)?.div_exact(&others).map_err(|_| mismatch())? };
        }
        if volume(&shape)? == volume(from)? { Ok(shape) } else { Err(mismatch()) }
    };
    let constant = target_shape.iter().all(|d| d.known().is_some());
    let has_batch = |d: &Dim| d.symbols().iter().any(|s| frozen.contains_key(s));
    if !constant || !input.iter().any(has_batch) {
        return solve(input);
    }
    let statics = symbol::substitute(input, frozen)?;
    restore_batch(input, &solve(&statics)?, frozen, stride_within)
}

/// Puts the symbol back into the static result `shape` of a reshape, based on strides.
fn restore_batch(
    input: &[Dim],
    shape: &[Dim],
    frozen: &StaticSizes,
    stride_within: &dyn Fn(usize) -> Option<i64>,
) -> Result<Vec<Dim>, LowerReason> {
    let error = |why: &str| {
        LowerReason::Inputs(format!(
            "the position of the symbolic batch after a reshape is not clear: \
            {why}"
        ))
    };
    let carriers: Vec<usize> = (0..input.len()).filter(|&i| input[i].known().is_none()).collect();
    let &[carrier] = carriers.as_slice() else { return Err(error("several axes depend on it")) };
    let symbols = input[carrier].symbols();
    let [name] = symbols.as_slice() else { return Err(error("several symbols combine in one axis")) };
    let Some(&size) = frozen.get(name) else { return Err(error("its size in the file is unknown")) };
    let factor = input[carrier].div_exact(&Dim::symbol(name)).ok().and_then(|d| d.known());
    let Some(factor) = factor else { return Err(error("its axis is not a multiple of it")) };
    if size < 2 {
        return Err(error("it is exported with size 1, which matches any axis; export with 2 or more"));
    }
    let numbers: Option<Vec<i64>> = shape.iter().map(Dim::known).collect();
    let numbers = numbers.ok_or_else(|| error("other dimensions are symbolic as well"))?;
    let inner = volume(&input[carrier + 1..])?.known().ok_or_else(|| error("other dimensions are symbolic as well"))?;
    let step = if factor == 1 { Some(1) } else { stride_within(carrier) };
    let at = match step {
        Some(step) => {
            let first = inner.checked_mul(step).ok_or_else(|| error("the sizes overflow"))?;
            let (at, _) = locate_factor(first, size, &numbers)
                .ok_or_else(|| error("no axis of the result holds it alone or a multiple of it"))?;
            at
        }
        None => {
            let statics = symbol::substitute(input, frozen)?.iter().map(Dim::known).collect::<Option<Vec<i64>>>();
            let axis = statics.and_then(|from| unique_axis(&from, carrier, &numbers, size));
            axis.ok_or_else(|| error("several axes of the result match it"))?
        }
    };
    let mut shape = shape.to_vec();
    shape[at] = Dim::symbol(name).mul(&Dim::Known(numbers[at] / size))?;
    Ok(shape)
}

/// Flattens to a matrix: the axes before `axis`, and the axes from it on.
pub fn flatten(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value(0)?;
    let dims = scope.fact(x).shape;
    let axis_attribute = scope.int("axis", 1)?;
    let at =
        if usize::try_from(axis_attribute) == Ok(dims.len()) { dims.len() } else { axis(axis_attribute, dims.len())? };
    let shape = vec![volume(&dims[..at])?, volume(&dims[at..])?];
    Ok(vec![Known::Value(scope.reshape(x, shape)?)])
}

/// Axes from an attribute, or from input `slot` since operator set `since`; `None` if omitted.
pub fn axes_of(scope: &Scope<'_>, slot: usize, since: i64) -> Result<Option<Vec<i64>>, LowerReason> {
    if scope.opset < since { scope.ints("axes") } else { scope.integers(slot, "the list of axes") }
}

/// Removes axes of size 1: those listed, or all.
pub fn squeeze(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value(0)?;
    let dims = scope.fact(x).shape;
    let squeezed = match axes_of(scope, 1, 13)? {
        Some(list) => axes(&list, dims.len())?,
        None => (0..dims.len()).filter(|&i| dims[i].is(1)).collect(),
    };
    if let Some(&long_axis) = squeezed.iter().find(|&&i| !dims[i].is(1)) {
        return Err(LowerReason::Inputs(format!(
            "axis {long_axis} has size {}; only an axis of size 1 can be squeezed",
            dims[long_axis]
        )));
    }
    let shape = dims.iter().enumerate().filter(|(i, _)| squeezed.binary_search(i).is_err()).map(|(_, d)| d.clone());
    let shape = shape.collect();
    Ok(vec![Known::Value(scope.reshape(x, shape)?)])
}

/// Inserts axes of size 1; the axes refer to the result.
pub fn unsqueeze(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value(0)?;
    let dims = scope.fact(x).shape;
    let list = axes_of(scope, 1, 13)?.ok_or(LowerReason::Missing { slot: 1 })?;
    let rank = dims.len() + list.len();
    let inserted = axes(&list, rank)?;
    let mut sizes = dims.into_iter();
    let shape = (0..rank).map(|i| match inserted.binary_search(&i) {
        Ok(_) => Some(Dim::Known(1)),
        Err(_) => sizes.next(),
    });
    let shape =
        shape.collect::<Option<Vec<_>>>().ok_or_else(|| LowerReason::Inputs("its axes do not add up".to_string()))?;
    Ok(vec![Known::Value(scope.reshape(x, shape)?)])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dims(text: &str) -> Vec<Dim> {
        text.split_whitespace().map(|d| Dim::parse(d).unwrap()).collect()
    }

    fn at_four(input: &str, target_shape: &str) -> Result<Vec<Dim>, String> {
        let frozen = StaticSizes::from([("batch".to_string(), 4)]);
        // The batch is the outer part of merged axes.
        let ahead = |axis: usize| dims(input)[axis].div_exact(&Dim::symbol("batch")).ok().and_then(|rest| rest.known());
        target(&dims(input), &dims(target_shape), false, &frozen, &ahead).map_err(|e| e.to_string())
    }

    #[test]
    fn batch_position_follows_strides() {
        for (input, target_shape, expected) in [
            ("batch 16 64", "4 16 4 16", "batch 16 4 16"),
            ("batch 16 97", "64 97", "batch*16 97"),
            ("batch 16 97", "-1 97", "batch*16 97"),
            ("batch*16 97", "4 16 97", "batch 16 97"),
            ("4 batch 8", "4 4 2 4", "4 batch 2 4"),
            ("batch 4 4", "4 4 4", "batch 4 4"),
            ("4 batch 4", "4 4 4", "4 batch 4"),
            ("4 4 batch", "4 4 4", "4 4 batch"),
            ("batch 3 4", "0 -1", "batch 12"),
            ("batch 16", "1 0 -1", "1 batch*4 4"),
        ] {
            assert_eq!(at_four(input, target_shape), Ok(dims(expected)), "{input} -> {target_shape}");
        }
    }

    #[test]
    fn batch_position_comes_from_the_producer_of_the_axis() {
        let frozen = StaticSizes::from([("batch".to_string(), 4)]);
        let shape = |input: &str, target_shape: &str, step: Option<i64>| {
            target(&dims(input), &dims(target_shape), false, &frozen, &|_| step).map_err(|e| e.to_string())
        };
        // Time-major, then batch-major.
        assert_eq!(shape("batch*8 6", "8 4 6", Some(1)), Ok(dims("8 batch 6")));
        assert_eq!(shape("batch*8 6", "4 8 6", Some(8)), Ok(dims("batch 8 6")));
        assert_eq!(shape("batch*8 6", "8 4 6", Some(8)), Ok(dims("batch*2 4 6")));
        assert!(shape("batch*8 6", "8 2 12", Some(1)).is_err());
        // Unknown stride: exactly one axis must fit.
        assert_eq!(shape("batch*7 6", "7 4 6", None), Ok(dims("7 batch 6")));
        assert!(shape("batch*8 6", "8 4 6", None).unwrap_err().contains("several axes"));
    }

    #[test]
    fn ambiguous_batch_is_refused() {
        assert!(at_four("batch 6", "3 8").unwrap_err().contains("not clear"));
        let batch_of_one = StaticSizes::from([("batch".to_string(), 1)]);
        assert!(
            target(&dims("batch 16"), &dims("1 16"), false, &batch_of_one, &|_| None)
                .unwrap_err()
                .to_string()
                .contains("size 1")
        );
        assert!(at_four("batch 6", "-1 -1").unwrap_err().contains("more than one -1"));
        assert!(at_four("4 6", "5 -1").unwrap_err().contains("does not fit"));
        assert!(at_four("4 6", "5 5").unwrap_err().contains("does not fit"));
        assert!(at_four("4 6", "24 0 0").unwrap_err().contains("copies"));
    }

    #[test]
    fn symbols_without_a_size_divide() {
        let none = StaticSizes::new();
        let shape =
            |input: &str, target_shape: &str| target(&dims(input), &dims(target_shape), false, &none, &|_| None);
        assert_eq!(shape("b s 64", "b s 4 16").unwrap(), dims("b s 4 16"));
        assert_eq!(shape("b s 64", "-1 64").unwrap(), dims("b*s 64"));
        assert_eq!(shape("b 8 4", "0 -1").unwrap(), dims("b 32"));
        assert!(shape("b s 64", "2 s 64").is_err());
    }
}
