//! Element access over bytes for the reference kernels: simple rather than fast, any element type, no alignment.
//!
//! Floats are read as `f64` and rounded once on write, so reference kernels compute in `f64` and serve as the test
//! oracle.

use super::DType;
use half::{bf16, f16};

/// A read-only tensor: shape and little-endian bytes, row-major.
#[derive(Clone, Copy)]
pub struct View<'a> {
    pub dtype: DType,
    pub shape: &'a [usize],
    bytes: &'a [u8],
}

pub struct ViewMut<'a> {
    pub dtype: DType,
    pub shape: &'a [usize],
    bytes: &'a mut [u8],
}

fn array<const N: usize>(bytes: &[u8], i: usize) -> [u8; N] {
    let at = i * N;
    bytes[at..at + N].try_into().expect("the slice has N bytes")
}

fn read_f64(dtype: DType, bytes: &[u8], i: usize) -> f64 {
    match dtype {
        DType::F64 => f64::from_le_bytes(array(bytes, i)),
        DType::F32 => f32::from_le_bytes(array(bytes, i)) as f64,
        DType::F16 => f16::from_le_bytes(array(bytes, i)).to_f64(),
        DType::Bf16 => bf16::from_le_bytes(array(bytes, i)).to_f64(),
        DType::U64 => u64::from_le_bytes(array(bytes, i)) as f64,
        _ => read_i64(dtype, bytes, i) as f64,
    }
}

fn read_i64(dtype: DType, bytes: &[u8], i: usize) -> i64 {
    match dtype {
        DType::I64 => i64::from_le_bytes(array(bytes, i)),
        DType::I32 => i32::from_le_bytes(array(bytes, i)) as i64,
        DType::I16 => i16::from_le_bytes(array(bytes, i)) as i64,
        DType::I8 => bytes[i] as i8 as i64,
        DType::U64 => u64::from_le_bytes(array(bytes, i)) as i64,
        DType::U32 => u32::from_le_bytes(array(bytes, i)) as i64,
        DType::U16 => u16::from_le_bytes(array(bytes, i)) as i64,
        DType::U8 => bytes[i] as i64,
        DType::Bool => (bytes[i] != 0) as i64,
        DType::F64 | DType::F32 | DType::F16 | DType::Bf16 => read_f64(dtype, bytes, i) as i64,
    }
}

impl<'a> View<'a> {
    /// The bytes must match the shape.
    pub fn new(dtype: DType, shape: &'a [usize], bytes: &'a [u8]) -> View<'a> {
        debug_assert_eq!(shape.iter().product::<usize>() * dtype.size(), bytes.len());
        View { dtype, shape, bytes }
    }

    pub fn len(&self) -> usize {
        self.bytes.len() / self.dtype.size()
    }

    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Element `i` in row-major order, as `f64`.
    pub fn f64(&self, i: usize) -> f64 {
        read_f64(self.dtype, self.bytes, i)
    }

    /// Element `i` as `i64` (floats truncate toward zero; `u64` keeps its bits).
    pub fn i64(&self, i: usize) -> i64 {
        read_i64(self.dtype, self.bytes, i)
    }

    pub fn bool(&self, i: usize) -> bool {
        if self.dtype.is_float() { self.f64(i) != 0.0 } else { self.i64(i) != 0 }
    }
}

impl<'a> ViewMut<'a> {
    /// The bytes must match the shape.
    pub fn new(dtype: DType, shape: &'a [usize], bytes: &'a mut [u8]) -> ViewMut<'a> {
        debug_assert_eq!(shape.iter().product::<usize>() * dtype.size(), bytes.len());
        ViewMut { dtype, shape, bytes }
    }

    pub fn len(&self) -> usize {
        self.bytes.len() / self.dtype.size()
    }

    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.bytes
    }

    pub fn as_view(&self) -> View<'_> {
        View { dtype: self.dtype, shape: self.shape, bytes: self.bytes }
    }

    fn put<const N: usize>(&mut self, i: usize, value: [u8; N]) {
        self.bytes[i * N..(i + 1) * N].copy_from_slice(&value);
    }

    /// Writes element `i`, rounded to the element type (integers truncate, `bool` is `value != 0`).
    pub fn set_f64(&mut self, i: usize, value: f64) {
        match self.dtype {
            DType::F64 => self.put(i, value.to_le_bytes()),
            DType::F32 => self.put(i, (value as f32).to_le_bytes()),
            // Converts through f32. The direct conversion from f64 ignores the lower half of the bits, so a value just
            // above a tie would be rounded down.
            DType::F16 => self.put(i, f16::from_f32(value as f32).to_le_bytes()),
            DType::Bf16 => self.put(i, bf16::from_f32(value as f32).to_le_bytes()),
            DType::U64 => self.put(i, (value as u64).to_le_bytes()),
            DType::Bool => self.bytes[i] = (value != 0.0) as u8,
            _ => self.set_i64(i, value as i64),
        }
    }

    /// Writes element `i`; narrower integers wrap, as in all casts.
    pub fn set_i64(&mut self, i: usize, value: i64) {
        match self.dtype {
            DType::I64 => self.put(i, value.to_le_bytes()),
            DType::I32 => self.put(i, (value as i32).to_le_bytes()),
            DType::I16 => self.put(i, (value as i16).to_le_bytes()),
            DType::I8 => self.bytes[i] = value as i8 as u8,
            DType::U64 => self.put(i, (value as u64).to_le_bytes()),
            DType::U32 => self.put(i, (value as u32).to_le_bytes()),
            DType::U16 => self.put(i, (value as u16).to_le_bytes()),
            DType::U8 => self.bytes[i] = value as u8,
            DType::Bool => self.bytes[i] = (value != 0) as u8,
            DType::F64 | DType::F32 | DType::F16 | DType::Bf16 => self.set_f64(i, value as f64),
        }
    }

    pub fn set_bool(&mut self, i: usize, value: bool) {
        self.set_i64(i, value as i64);
    }

    /// Copies element `j` of another tensor to element `i`, through `f64` if either side requires it, otherwise through
    /// `i64`.
    pub fn copy_from(&mut self, i: usize, from: &View<'_>, j: usize) {
        match (from.dtype.is_float(), from.dtype, self.dtype) {
            (true, ..) => self.set_f64(i, from.f64(j)),
            (false, DType::U64, to) if to.is_float() => self.set_f64(i, from.f64(j)),
            _ => self.set_i64(i, from.i64(j)),
        }
    }
}

/// Row-major strides of a shape, in elements.
pub fn strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis] * shape[axis];
    }
    strides
}

/// Every index of a shape in row-major order.
pub fn indices(shape: &[usize]) -> impl Iterator<Item = Vec<usize>> + use<> {
    let shape = shape.to_vec();
    let count: usize = shape.iter().product();
    let strides = strides(&shape);
    (0..count).map(move |flat| strides.iter().zip(&shape).map(|(s, d)| flat / s % d).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lies_just_above_the_middle_of_two_narrow_values_is_rounded_up() {
        let narrow = |dtype, value: f32| {
            let mut bytes = [0; 2];
            ViewMut::new(dtype, &[1], &mut bytes).set_f64(0, f64::from(value));
            u16::from_le_bytes(bytes)
        };
        // Ties round to even.
        for (bits, expected) in
            [(0x3f80_8000, 0x3f80), (0x3f80_8001, 0x3f81), (0x3f81_8000, 0x3f82), (0x3f80_7fff, 0x3f80)]
        {
            assert_eq!(narrow(DType::Bf16, f32::from_bits(bits)), expected, "{bits:x}");
        }
        assert_eq!(narrow(DType::F16, f32::from_bits(0x3f80_1001)), 0x3c01);
    }
}
