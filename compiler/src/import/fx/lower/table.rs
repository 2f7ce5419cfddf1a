//! All ATen operators that pipec lowers, by family. Aliases and overloads share a row: arguments are read by name, as
//! tensors or numbers. An in-place operator uses the row without the trailing `_`; `walk` rebinds the operand.
//! [`operators`] lists the names for documentation.

pub mod elementwise;
pub mod layer;
pub mod reduction;
pub mod shape;

use super::{Outputs, Scope, create, linear, reduce};
use crate::tensor::dim::Dim;

/// Lowers one node to core ops.
pub type Lower = fn(&mut Scope<'_>) -> Outputs;

/// The names of an operator, separated by spaces, and its lowering.
pub type Row = (&'static str, Lower);

const FAMILIES: [&[Row]; 4] = [elementwise::ELEMENTWISE, shape::SHAPE, reduction::REDUCTION, layer::LAYER];

/// The names of all lowered ATen operators, sorted.
pub fn operators() -> Vec<&'static str> {
    let mut names: Vec<&str> = FAMILIES.iter().copied().flatten().flat_map(|row| row.0.split(' ')).collect();
    names.sort_unstable();
    names
}

/// The operator of a target without library and overload: `torch.ops.aten.add_.Tensor` is `add_`.
pub fn name(target: &str) -> &str {
    let inner = target.strip_prefix("torch.ops.aten.").unwrap_or_else(|| target.rsplit('.').next().unwrap_or(target));
    inner.split('.').next().unwrap_or(inner)
}

/// Tests whether the operator changes its operand in place.
pub fn in_place(target: &str) -> bool {
    let name = name(target);
    name.ends_with('_') && !name.starts_with("__")
}

/// Tests for casts and copies, whose result type autocast does not decide.
pub fn is_cast(target: &str) -> bool {
    matches!(name(target), "to" | "_to_copy" | "type_as" | "copy_" | "copy")
}

/// The lowering of a target; `None` if it is not supported.
pub fn find(target: &str) -> Option<Lower> {
    if let Some(operator) = target.strip_prefix("_operator.") {
        return sizes(operator);
    }
    let Some(inner) = target.strip_prefix("torch.ops.aten.") else {
        return (target == "torch.ops.transformers.grouped_mm_fallback.default").then_some(linear::grouped);
    };
    // Overloads with another meaning under the same name.
    match inner {
        "norm.Scalar" | "norm.ScalarOpt_dim" | "norm.ScalarOpt_dim_dtype" | "norm.ScalarOpt_dtype" => {
            return Some(|s| reduce::vector_norm(s, "p"));
        }
        "add.t" | "add.str" | "linalg_matrix_norm.default" => return None,
        "repeat_interleave.Tensor" | "repeat_interleave.self_Tensor" | "searchsorted.Scalar" => return None,
        _ => {}
    }
    let operator = name(target);
    let operator = if in_place(target) { &operator[..operator.len() - 1] } else { operator };
    FAMILIES.iter().copied().flatten().find(|row| row.0.split(' ').any(|name| name == operator)).map(|row| row.1)
}

fn sizes(operator: &str) -> Option<Lower> {
    let lower: Lower = match operator {
        "add" => |s| create::size_arithmetic(s, Dim::add),
        "sub" => |s| create::size_arithmetic(s, Dim::sub),
        "mul" => |s| create::size_arithmetic(s, Dim::mul),
        "floordiv" => |s| create::size_arithmetic(s, Dim::div_floor),
        _ => return None,
    };
    Some(lower)
}
