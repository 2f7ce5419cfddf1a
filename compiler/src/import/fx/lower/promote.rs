//! PyTorch's type promotion.
//!
//! Tensors with axes have priority over rank-0 tensors, and those over Python numbers. A lower priority counts only if
//! its category is higher (`bool` < integer < float). So `int32 + 1` stays `int32`, and `int32 + 1.5` is a float.

use super::Scope;
use super::argument::{Number, Operand};
use crate::import::build::Build;
use crate::import::lower_error::LowerReason;
use crate::op::Value;
use crate::tensor::DType;

fn kind(dtype: DType) -> u8 {
    match dtype {
        DType::Bool => 0,
        d if d.is_integer() => 1,
        _ => 2,
    }
}

/// The smallest type that holds both.
pub fn promote(a: DType, b: DType) -> DType {
    if a == b {
        return a;
    }
    match (kind(a), kind(b)) {
        (x, y) if x < y => b,
        (x, y) if x > y => a,
        (2, _) if a.size() == b.size() => DType::F32,
        (2, _) => wider(a, b),
        _ => match (signed(a), signed(b)) {
            (x, y) if x == y => wider(a, b),
            // With an unsigned type, the result is a wider signed one.
            (true, _) => mixed(a, b),
            _ => mixed(b, a),
        },
    }
}

fn wider(a: DType, b: DType) -> DType {
    if a.size() >= b.size() { a } else { b }
}

fn signed(dtype: DType) -> bool {
    matches!(dtype, DType::I8 | DType::I16 | DType::I32 | DType::I64)
}

fn mixed(signed: DType, unsigned: DType) -> DType {
    if signed.size() > unsigned.size() {
        return signed;
    }
    match unsigned.size() {
        1 => DType::I16,
        2 => DType::I32,
        _ => DType::I64,
    }
}

pub fn common(scope: &Scope<'_>, operands: &[Operand]) -> DType {
    let (mut axes, mut points, mut numbers) = (None, None, None);
    for operand in operands {
        let (slot, dtype) = match operand {
            Operand::Tensor(value) => {
                let fact = scope.fact(*value);
                (if fact.rank() > 0 { &mut axes } else { &mut points }, fact.dtype)
            }
            Operand::Number(number) => (&mut numbers, number.dtype()),
            Operand::Size(_) => (&mut numbers, Number::Int(0).dtype()),
        };
        *slot = Some(slot.map_or(dtype, |have| promote(have, dtype)));
    }
    let later = [axes, points, numbers].into_iter().flatten();
    let promoted = later.reduce(|first, later| if kind(later) > kind(first) { promote(first, later) } else { first });
    promoted.unwrap_or(DType::F32)
}

pub fn value(scope: &mut Scope<'_>, operand: &Operand, dtype: DType) -> Result<Value, LowerReason> {
    match operand {
        Operand::Tensor(value) => scope.cast(*value, dtype),
        Operand::Number(number) => scope.constant(number.tensor(dtype)),
        Operand::Size(dim) => {
            let size = Build::size(scope, dim)?;
            scope.cast(size, dtype)
        }
    }
}

/// Converts integers to the default float type, as functions such as `exp` require.
pub fn real(scope: &mut Scope<'_>, x: Value) -> Result<Value, LowerReason> {
    if scope.fact(x).dtype.is_float() { Ok(x) } else { scope.cast(x, DType::F32) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_join_as_in_pytorch() {
        for (a, b, expected) in [
            (DType::F16, DType::Bf16, DType::F32),
            (DType::F16, DType::F64, DType::F64),
            (DType::I64, DType::F16, DType::F16),
            (DType::U8, DType::I8, DType::I16),
            (DType::U8, DType::I32, DType::I32),
            (DType::Bool, DType::U8, DType::U8),
            (DType::I16, DType::I64, DType::I64),
        ] {
            assert_eq!((promote(a, b), promote(b, a)), (expected, expected), "{a} {b}");
        }
    }
}
