//! Tensors: element types, possibly symbolic shapes, and values as bytes.
//!
//! A [`Tensor`] is a shape, an element type and little-endian bytes in row-major order. The bytes may be a view of a
//! memory map and unaligned. [`view`] reads single elements; [`Tensor::to_f32`] and similar methods copy all.

pub mod dim;
pub mod fact;
pub mod view;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use thiserror::Error;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum DType {
    F64,
    F32,
    F16,
    Bf16,
    I64,
    I32,
    I16,
    I8,
    U64,
    U32,
    U16,
    U8,
    Bool,
}

impl DType {
    /// Every element type, in declaration order.
    pub const ALL: [DType; 13] = [
        DType::F64,
        DType::F32,
        DType::F16,
        DType::Bf16,
        DType::I64,
        DType::I32,
        DType::I16,
        DType::I8,
        DType::U64,
        DType::U32,
        DType::U16,
        DType::U8,
        DType::Bool,
    ];

    pub fn size(self) -> usize {
        match self {
            DType::F64 | DType::I64 | DType::U64 => 8,
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::F16 | DType::Bf16 | DType::I16 | DType::U16 => 2,
            DType::I8 | DType::U8 | DType::Bool => 1,
        }
    }

    /// Floating-point types, which can have gradients.
    pub fn is_float(self) -> bool {
        matches!(self, DType::F64 | DType::F32 | DType::F16 | DType::Bf16)
    }

    /// Integer types, without `bool`.
    pub fn is_integer(self) -> bool {
        !self.is_float() && self != DType::Bool
    }

    /// Name in the text form, plans and messages: `f32`, `i64`, `bool`.
    pub fn name(self) -> &'static str {
        match self {
            DType::F64 => "f64",
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
            DType::I64 => "i64",
            DType::I32 => "i32",
            DType::I16 => "i16",
            DType::I8 => "i8",
            DType::U64 => "u64",
            DType::U32 => "u32",
            DType::U16 => "u16",
            DType::U8 => "u8",
            DType::Bool => "bool",
        }
    }

    /// Inverse of [`name`](DType::name).
    pub fn parse(name: &str) -> Option<DType> {
        DType::ALL.into_iter().find(|d| d.name() == name)
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

#[derive(Debug, Error, PartialEq, Eq)]
pub enum TensorError {
    #[error("a {dtype} tensor of shape {shape:?} needs {expected} bytes, but got {got}")]
    Length { dtype: DType, shape: Vec<usize>, expected: usize, got: usize },
    #[error("a tensor of shape {shape:?} is too large to address")]
    Overflow { shape: Vec<usize> },
}

/// A shape (row-major, outermost first), an element type and little-endian bytes.
#[derive(Clone, PartialEq, Eq)]
pub struct Tensor {
    dtype: DType,
    shape: Vec<usize>,
    bytes: Bytes,
}

pub fn element_count(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1usize, |product, &d| product.checked_mul(d))
}

impl Tensor {
    /// A tensor over bytes, after a length check.
    pub fn new(dtype: DType, shape: Vec<usize>, bytes: Bytes) -> Result<Tensor, TensorError> {
        let expected = element_count(&shape)
            .and_then(|n| n.checked_mul(dtype.size()))
            .ok_or_else(|| TensorError::Overflow { shape: shape.clone() })?;
        if expected != bytes.len() {
            return Err(TensorError::Length { dtype, shape, expected, got: bytes.len() });
        }
        Ok(Tensor { dtype, shape, bytes })
    }

    /// A tensor of `f32` values. Panics if the count does not match the shape.
    pub fn from_f32(shape: &[usize], values: &[f32]) -> Tensor {
        Tensor::from_le(DType::F32, shape, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    /// A tensor of `f64` values. Panics if the count does not match the shape.
    pub fn from_f64(shape: &[usize], values: &[f64]) -> Tensor {
        Tensor::from_le(DType::F64, shape, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    /// A tensor of `i64` values. Panics if the count does not match the shape.
    pub fn from_i64(shape: &[usize], values: &[i64]) -> Tensor {
        Tensor::from_le(DType::I64, shape, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    /// A tensor of `bool` values. Panics if the count does not match the shape.
    pub fn from_bool(shape: &[usize], values: &[bool]) -> Tensor {
        Tensor::from_le(DType::Bool, shape, values.iter().map(|&v| v as u8).collect())
    }

    /// Zeros (`false` for `bool`).
    pub fn zeros(dtype: DType, shape: &[usize]) -> Tensor {
        let count = element_count(shape).expect("a shape made by the compiler is addressable");
        Tensor::from_le(dtype, shape, vec![0; count * dtype.size()])
    }

    fn from_le(dtype: DType, shape: &[usize], bytes: Vec<u8>) -> Tensor {
        Tensor::new(dtype, shape.to_vec(), bytes.into()).expect("the caller gives as many values as the shape holds")
    }

    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Little-endian, row-major, not aligned.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    pub fn len(&self) -> usize {
        self.bytes.len() / self.dtype.size()
    }

    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub fn view(&self) -> view::View<'_> {
        view::View::new(self.dtype, &self.shape, &self.bytes)
    }

    /// The values as `f64`; 64-bit integers are rounded.
    pub fn to_f64(&self) -> Vec<f64> {
        let v = self.view();
        (0..v.len()).map(|i| v.f64(i)).collect()
    }

    /// The values as `f32`, rounded.
    pub fn to_f32(&self) -> Vec<f32> {
        if self.dtype == DType::F32 {
            return self.bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        }
        self.to_f64().into_iter().map(|v| v as f32).collect()
    }

    /// The values as `i64`; floats truncate toward zero.
    pub fn to_i64(&self) -> Vec<i64> {
        let v = self.view();
        (0..v.len()).map(|i| v.i64(i)).collect()
    }

    /// The same bytes with another shape of equal element count.
    pub fn reshaped(&self, shape: Vec<usize>) -> Result<Tensor, TensorError> {
        Tensor::new(self.dtype, shape, self.bytes.clone())
    }

    pub fn cast(&self, dtype: DType) -> Tensor {
        if dtype == self.dtype {
            return self.clone();
        }
        let mut bytes = vec![0; self.len() * dtype.size()];
        let (from, mut to) = (self.view(), view::ViewMut::new(dtype, &self.shape, &mut bytes));
        for i in 0..from.len() {
            to.copy_from(i, &from, i);
        }
        Tensor::from_le(dtype, &self.shape, bytes)
    }
}

impl std::fmt::Debug for Tensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{:?}", self.dtype, self.shape)?;
        if self.len() <= 16 {
            write!(f, " {:?}", self.to_f64())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_checked_against_the_shape() {
        let short = Tensor::new(DType::F32, vec![2, 3], Bytes::from(vec![0; 20]));
        assert!(matches!(short, Err(TensorError::Length { expected: 24, got: 20, .. })));
        let huge = Tensor::new(DType::F32, vec![usize::MAX, 2], Bytes::new());
        assert!(matches!(huge, Err(TensorError::Overflow { .. })));
    }

    #[test]
    fn casts_go_through_the_value() {
        let t = Tensor::from_f32(&[4], &[1.5, -2.7, 0.0, 300.0]);
        assert_eq!(t.cast(DType::I64).to_i64(), [1, -2, 0, 300]);
        assert_eq!(t.cast(DType::Bool).to_i64(), [1, 1, 0, 1]);
        assert_eq!(t.cast(DType::Bf16).to_f64(), [1.5, -2.703125, 0.0, 300.0]);
        assert_eq!(Tensor::from_i64(&[1], &[i64::MAX]).cast(DType::U64).to_i64(), [i64::MAX]);
    }
}
