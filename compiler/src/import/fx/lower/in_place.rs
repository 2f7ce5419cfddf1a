//! Inverts views: writes a view that was changed in place back into its base.

use crate::import::build::Build;
use crate::import::fx::lower::{Scope, scatter, table};
use crate::import::lower_error::LowerReason;
use crate::import::onnx::lower::attribute::axis;
use crate::import::onnx::lower::movement::{swapped, transposed};
use crate::import::onnx::lower::slice::clamp_index;
use crate::op::Value;
use crate::tensor::dim::Dim;

/// `base` with the elements of the view made by `scope`'s node replaced by `value`; `None` if the view has no inverse.
pub fn write_view(scope: &mut Scope<'_>, base: Value, value: Value) -> Result<Option<Value>, LowerReason> {
    let shape = scope.fact(base).shape;
    let rank = shape.len();
    let updated_base = match table::name(&scope.node.target) {
        "slice" => {
            let at = axis(scope.int("dim", 0)?, rank)?;
            let start = scope.dim("start")?.unwrap_or(Dim::Known(0));
            let begin = clamp_index(&start, &shape[at], &Dim::Known(0), &shape[at])?;
            let step = scope.int("step", 1)?;
            scatter::write_slice(scope, base, at, &begin, step, value)?
        }
        "select" => {
            let at = axis(scope.int("dim", 0)?, rank)?;
            let Some(index) = scope.dim("index")? else { return Ok(None) };
            let begin = if index.known().is_some_and(|v| v < 0) { shape[at].add(&index)? } else { index };
            let mut row = shape.clone();
            row[at] = Dim::Known(1);
            let value = scope.reshape(value, row)?;
            scatter::write_slice(scope, base, at, &begin, 1, value)?
        }
        "view" | "reshape" | "_unsafe_view" | "view_as" | "reshape_as" | "flatten" | "unflatten" | "unsqueeze"
        | "squeeze" | "ravel" => scope.reshape(value, shape)?,
        "alias" | "contiguous" | "to" | "positive" if scope.fact(value) == scope.fact(base) => value,
        "t" | "numpy_T" | "mT" if rank == 2 => transposed(scope, value, vec![1, 0])?,
        "transpose" => {
            let (a, b) = (axis(scope.int("dim0", 0)?, rank)?, axis(scope.int("dim1", 1)?, rank)?);
            swapped(scope, value, a, b)?
        }
        "permute" => {
            let list = scope.ints("dims")?.unwrap_or_default();
            let mut perm = vec![0; rank];
            for (at, from) in list.into_iter().enumerate() {
                perm[axis(from, rank)?] = at;
            }
            transposed(scope, value, perm)?
        }
        _ => return Ok(None),
    };
    Ok(Some(updated_base))
}
