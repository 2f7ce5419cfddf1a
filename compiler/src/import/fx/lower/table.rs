//! All ATen operators that pipec lowers, one row each, by family. Overloads share a row: arguments are read by name, as
//! tensors or numbers. An operator that ends in `_` and changes its operand in place is the row without it; `walk` does
//! the rest. [`operators`] gives the list for people.

pub mod elementwise;
pub mod layer;
pub mod reduction;
pub mod shape;

use super::{Outputs, Scope, create, linear, reduce};
use crate::tensor::dim::Dim;

/// Lowers one node of an operator.
pub type Lower = fn(&mut Scope<'_>) -> Outputs;

/// An operator's name, and how it is lowered.
pub type Row = (&'static str, Lower);

/// All families.
const FAMILIES: [&[Row]; 4] = [elementwise::ELEMENTWISE, shape::SHAPE, reduction::REDUCTION, layer::LAYER];

/// The names of all operators of ATen that are lowered, in alphabetical order.
pub fn operators() -> Vec<&'static str> {
    let mut names: Vec<&str> = FAMILIES.iter().flat_map(|rows| rows.iter().map(|row| row.0)).collect();
    names.sort_unstable();
    names
}

/// The operator of a target, without library and overload: `torch.ops.aten.add_.Tensor` is `add_`.
pub fn name(target: &str) -> &str {
    let inner = target.strip_prefix("torch.ops.aten.").unwrap_or_else(|| target.rsplit('.').next().unwrap_or(target));
    inner.split('.').next().unwrap_or(inner)
}

/// Whether the operator changes its operand.
pub fn in_place(target: &str) -> bool {
    let name = name(target);
    name.ends_with('_') && !name.starts_with("__")
}

/// Whether the result's element type is what the node is about.
pub fn is_cast(target: &str) -> bool {
    matches!(name(target), "to" | "_to_copy" | "type_as" | "copy_" | "copy")
}

/// How nodes with this target are lowered, `None` when they are not.
pub fn find(target: &str) -> Option<Lower> {
    if let Some(operator) = target.strip_prefix("_operator.") {
        return sizes(operator);
    }
    let Some(inner) = target.strip_prefix("torch.ops.aten.") else {
        return (target == "torch.ops.transformers.grouped_mm_fallback.default").then_some(linear::grouped);
    };
    // Overloads that mean something else under the same name.
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
    FAMILIES.iter().flat_map(|rows| rows.iter()).find(|row| row.0 == operator).map(|row| row.1)
}

/// Arithmetic on sizes, which Python does.
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
