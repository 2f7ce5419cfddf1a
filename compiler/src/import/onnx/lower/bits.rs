//! Bit operators on integers: `BitShift` and `BitCast`. The bitwise logical operators are rows in `table`.

use super::weight::dtype_of;
use super::{Known, LowerReason, Outputs, Scope};
use crate::import::build::Build;
use crate::op::{Binary, BitCast, Op};
use crate::tensor::DType;

pub fn shift(scope: &mut Scope<'_>) -> Outputs {
    let op = match scope.text("direction", "")?.as_str() {
        "LEFT" => Binary::ShiftLeft,
        "RIGHT" => Binary::ShiftRight,
        other => {
            return Err(LowerReason::attribute("direction", format!("`{other}`"), "LEFT or RIGHT"));
        }
    };
    let (a, b) = (scope.value(0)?, scope.value(1)?);
    Ok(vec![Known::Value(scope.binary(op, a, b)?)])
}

/// Reinterprets the bits as an element type of equal width. For a cast to bool, every non-zero byte is true.
pub fn cast(scope: &mut Scope<'_>) -> Outputs {
    let code = scope.int("to", 0)?;
    let to = i32::try_from(code).ok().and_then(dtype_of);
    let to = to.ok_or_else(|| LowerReason::Unsupported(format!("a bit cast to element type code {code}")))?;
    let x = scope.value(0)?;
    let from = scope.fact(x).dtype;
    if from == to {
        return Ok(vec![Known::Value(x)]);
    }
    if to == DType::Bool && from.size() == 1 {
        return Ok(vec![Known::Value(scope.cast(x, to)?)]);
    }
    Ok(vec![Known::Value(scope.add(Op::BitCast(BitCast { to }), &[x])?)])
}
