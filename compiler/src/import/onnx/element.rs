//! ONNX element types by their numeric code, and tensor sizes in bytes.

use crate::import::onnx::proto::tensor_proto::DataType;

/// Strings are the only element type without a fixed width.
pub const STRING: i32 = DataType::String as i32;

/// Bits per element; `None` for unknown codes, `UNDEFINED` and strings.
pub fn bits(elem_type: i32) -> Option<u64> {
    use DataType::*;
    Some(match DataType::try_from(elem_type).ok()? {
        Undefined | String => return None,
        Uint2 | Int2 => 2,
        Uint4 | Int4 | Float4e2m1 => 4,
        Float6e2m3 | Float6e3m2 => 6,
        Uint8 | Int8 | Bool | Float8e4m3fn | Float8e4m3fnuz | Float8e5m2 | Float8e5m2fnuz | Float8e8m0 => 8,
        Uint16 | Int16 | Float16 | Bfloat16 => 16,
        Float | Int32 | Uint32 => 32,
        Int64 | Uint64 | Double | Complex64 => 64,
        Complex128 => 128,
    })
}

/// The ONNX name of an element type, such as `FLOAT`; `UNDEFINED` for an unknown code.
pub fn element_name(elem_type: i32) -> &'static str {
    DataType::try_from(elem_type).unwrap_or(DataType::Undefined).as_str_name()
}

/// True for every code of the standard except `UNDEFINED`.
pub fn known(elem_type: i32) -> bool {
    elem_type == STRING || bits(elem_type).is_some()
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    #[error("dimension {axis} is negative: {dim}")]
    Negative { axis: usize, dim: i64 },
    /// The number of elements or bytes does not fit an `i64`.
    #[error("its size overflows: dims {dims:?}")]
    Overflow {
        /// At most the first eight dimensions.
        dims: Vec<i64>,
    },
}

/// Number of elements of a tensor of shape `dims`.
///
/// With a zero dimension the result is zero. The product of the other dimensions must not overflow, because strides are
/// computed from it later.
pub fn elements(dims: &[i64]) -> Result<u64, SizeError> {
    let overflow = || SizeError::Overflow { dims: dims.iter().take(8).copied().collect() };
    let mut product: i64 = 1;
    for (axis, &dim) in dims.iter().enumerate() {
        if dim < 0 {
            return Err(SizeError::Negative { axis, dim });
        }
        product = product.checked_mul(dim.max(1)).ok_or_else(overflow)?;
    }
    if dims.contains(&0) { Ok(0) } else { Ok(product.unsigned_abs()) }
}

/// Bytes of a tensor of shape `dims` with `bits` bits per element. Sub-byte elements are packed, as in ONNX.
pub fn bytes(dims: &[i64], bits: u64) -> Result<u64, SizeError> {
    let overflow = || SizeError::Overflow { dims: dims.iter().take(8).copied().collect() };
    let total = elements(dims)?.checked_mul(bits).ok_or_else(overflow)?.div_ceil(8);
    if i64::try_from(total).is_err() || usize::try_from(total).is_err() { Err(overflow()) } else { Ok(total) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(bytes(&[], 32), Ok(4));
        assert_eq!(bytes(&[3, 5], 4), Ok(8));
        assert_eq!(bytes(&[5], 6), Ok(4));
        assert_eq!(bytes(&[0, 1 << 40], 32), Ok(0));
        assert_eq!(elements(&[2, -4]), Err(SizeError::Negative { axis: 1, dim: -4 }));
        assert!(matches!(elements(&[1 << 62, 4]), Err(SizeError::Overflow { .. })));
        assert!(matches!(elements(&[0, 1 << 62, 4]), Err(SizeError::Overflow { .. })));
        assert!(matches!(bytes(&[1 << 60], 32), Err(SizeError::Overflow { .. })));
        assert!(matches!(bytes(&[1 << 61], 32), Err(SizeError::Overflow { .. })));
    }

    #[test]
    fn codes() {
        assert_eq!((bits(1), bits(7), bits(9), bits(21)), (Some(32), Some(64), Some(8), Some(4)));
        assert!(!known(0) && !known(999) && !known(-1) && known(8));
        assert_eq!(element_name(16), "BFLOAT16");
    }
}
