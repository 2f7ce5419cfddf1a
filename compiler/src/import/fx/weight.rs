//! Weights: strided tensors over raw little-endian bytes, converted to row-major tensors.
//!
//! Row-major weights stay views of the file; others (transposed, channels-last) are copied. Every size is checked
//! against the bytes that exist before anything is allocated.

use crate::import::fx::error::WeightError;
use crate::import::fx::schema::{SymInt, TensorMeta};
use crate::import::onnx::proto::tensor_proto::DataType;
use crate::tensor::{DType, Tensor, element_count};
use bytes::Bytes;

/// Size limit in bytes of a tensor that repeats its storage (stride 0).
const REPEATED: u64 = 1 << 24;

const STRIDED: i64 = 7;

/// The element type with this schema code; `None` for types that pipec does not support.
pub fn dtype_of(code: i64) -> Option<DType> {
    Some(match code {
        1 => DType::U8,
        2 => DType::I8,
        3 => DType::I16,
        4 => DType::I32,
        5 => DType::I64,
        6 => DType::F16,
        7 => DType::F32,
        8 => DType::F64,
        12 => DType::Bool,
        13 => DType::Bf16,
        28 => DType::U16,
        _ => return None,
    })
}

pub fn onnx_code(dtype: DType) -> i32 {
    let code = match dtype {
        DType::F64 => DataType::Double,
        DType::F32 => DataType::Float,
        DType::F16 => DataType::Float16,
        DType::Bf16 => DataType::Bfloat16,
        DType::I64 => DataType::Int64,
        DType::I32 => DataType::Int32,
        DType::I16 => DataType::Int16,
        DType::I8 => DataType::Int8,
        DType::U64 => DataType::Uint64,
        DType::U32 => DataType::Uint32,
        DType::U16 => DataType::Uint16,
        DType::U8 => DataType::Uint8,
        DType::Bool => DataType::Bool,
    };
    code as i32
}

/// A strided view of a storage, in elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightLocation {
    pub dtype: DType,
    pub sizes: Vec<usize>,
    /// Per axis, the distance between neighbours in elements.
    pub strides: Vec<usize>,
    /// Index of the first element.
    pub offset: usize,
}

impl WeightLocation {
    /// Reads a tensor's metadata; symbolic or negative numbers are an error.
    pub fn read(meta: &TensorMeta) -> Result<WeightLocation, WeightError> {
        let dtype = dtype_of(meta.dtype).ok_or(WeightError::ElementType(meta.dtype))?;
        if let Some(layout) = meta.layout.filter(|l| *l != STRIDED) {
            return Err(WeightError::Layout(layout));
        }
        let number = |size: &SymInt| size.known().and_then(|value| usize::try_from(value).ok());
        let list = |sizes: &[SymInt]| sizes.iter().map(number).collect::<Option<Vec<usize>>>();
        let offset = meta.storage_offset.as_ref().map_or(Some(0), number);
        match (list(&meta.sizes), list(&meta.strides), offset) {
            (Some(sizes), Some(strides), Some(offset)) if sizes.len() == strides.len() => {
                Ok(WeightLocation { dtype, sizes, strides, offset })
            }
            _ => Err(WeightError::Geometry),
        }
    }

    /// One past the highest storage index used; `None` on overflow.
    fn reach(&self) -> Option<usize> {
        if self.sizes.contains(&0) {
            return Some(0);
        }
        let last = self
            .sizes
            .iter()
            .zip(&self.strides)
            .try_fold(self.offset, |sum, (size, stride)| sum.checked_add((size - 1).checked_mul(*stride)?))?;
        last.checked_add(1)
    }

    /// Tests whether the two index ranges overlap. Strided tensors within overlapping ranges may still be disjoint.
    pub fn meets(&self, other: &WeightLocation) -> bool {
        match (self.reach(), other.reach()) {
            (Some(a), Some(b)) => self.offset < b && other.offset < a,
            _ => true,
        }
    }

    fn row_major(&self) -> bool {
        let mut expected = 1;
        self.sizes.iter().zip(&self.strides).rev().all(|(&size, &stride)| {
            let fits = size == 1 || stride == expected;
            expected *= size;
            fits
        })
    }

    pub fn tensor(&self, storage: &Bytes) -> Result<Tensor, WeightError> {
        let width = self.dtype.size();
        let short =
            |need: Option<usize>| WeightError::Bytes { need: need.map_or(u64::MAX, |n| n as u64), have: storage.len() };
        let need = self.reach().and_then(|n| n.checked_mul(width));
        if need.is_none_or(|n| n > storage.len()) {
            return Err(short(need));
        }
        let size = element_count(&self.sizes).and_then(|n| n.checked_mul(width)).ok_or_else(|| short(None))?;
        let bytes = if size == 0 {
            Bytes::new()
        } else if self.row_major() {
            storage.slice(self.offset * width..self.offset * width + size)
        } else {
            if size > storage.len() && size as u64 > REPEATED {
                return Err(WeightError::Repeats(size as u64));
            }
            self.gather(storage, size)
        };
        Tensor::new(self.dtype, self.sizes.clone(), bytes).map_err(|_| short(None))
    }

    /// Copies all elements in row-major order. The caller has checked that the indices lie within the storage.
    fn gather(&self, storage: &[u8], size: usize) -> Bytes {
        let width = self.dtype.size();
        let mut bytes = Vec::with_capacity(size);
        let mut index = vec![0usize; self.sizes.len()];
        let mut at = self.offset;
        while bytes.len() < size {
            bytes.extend_from_slice(&storage[at * width..(at + 1) * width]);
            for axis in (0..index.len()).rev() {
                index[axis] += 1;
                at += self.strides[axis];
                if index[axis] < self.sizes[axis] {
                    break;
                }
                at -= self.strides[axis] * self.sizes[axis];
                index[axis] = 0;
            }
        }
        bytes.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(sizes: &[usize], strides: &[usize], offset: usize) -> WeightLocation {
        WeightLocation { dtype: DType::U8, sizes: sizes.to_vec(), strides: strides.to_vec(), offset }
    }

    #[test]
    fn strides_and_offsets_are_honoured() {
        let storage = Bytes::from_static(&[0, 1, 2, 3, 4, 5, 6, 7]);
        let values = |p: WeightLocation| p.tensor(&storage).map(|t| t.to_i64()).map_err(|e| e.to_string());
        assert_eq!(values(place(&[2, 3], &[3, 1], 1)), Ok(vec![1, 2, 3, 4, 5, 6]));
        assert_eq!(values(place(&[3, 2], &[1, 3], 0)), Ok(vec![0, 3, 1, 4, 2, 5]));
        assert_eq!(values(place(&[2, 2], &[0, 4], 3)), Ok(vec![3, 7, 3, 7]));
        assert_eq!(values(place(&[1, 4], &[99, 1], 4)), Ok(vec![4, 5, 6, 7]));
        assert_eq!(values(place(&[0, 4], &[4, 1], 99)), Ok(vec![]));
        assert_eq!(values(place(&[], &[], 7)), Ok(vec![7]));
        assert!(values(place(&[2, 3], &[3, 1], 3)).unwrap_err().contains("need 9 bytes, the file has 8"));
        assert!(values(place(&[usize::MAX, 2], &[usize::MAX, 1], 0)).unwrap_err().contains("bytes"));
        assert!(values(place(&[1 << 40], &[0], 0)).unwrap_err().contains("too large"));
    }

    #[test]
    fn row_major_weights_are_views() {
        let storage = Bytes::from(vec![1u8; 64]);
        let tensor = place(&[4, 8], &[8, 1], 32).tensor(&storage).unwrap();
        assert_eq!(tensor.bytes().as_ptr(), storage[32..].as_ptr());
    }

    #[test]
    fn overlaps_are_seen() {
        assert!(place(&[4], &[1], 0).meets(&place(&[4], &[1], 3)));
        assert!(!place(&[4], &[1], 0).meets(&place(&[4], &[1], 4)));
    }
}
