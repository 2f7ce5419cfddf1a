//! What the compiler knows of a tensor before it exists: element type and shape.

use super::DType;
use super::dim::{Bindings, Dim, DimError, volume};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Element type and shape of one tensor.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Fact {
    /// Element type.
    pub dtype: DType,
    /// Shape, outermost first; dims may carry symbols.
    pub shape: Vec<Dim>,
}

impl Fact {
    /// A fact of these parts.
    pub fn new(dtype: DType, shape: Vec<Dim>) -> Fact {
        Fact { dtype, shape }
    }

    /// A fact with a shape of plain numbers.
    pub fn of(dtype: DType, shape: &[usize]) -> Fact {
        Fact { dtype, shape: shape.iter().map(|&d| Dim::from(d)).collect() }
    }

    /// The number of dims.
    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// The number of elements.
    pub fn volume(&self) -> Result<Dim, DimError> {
        volume(&self.shape)
    }

    /// The shape as plain numbers, when no symbol is left and every dim is a size.
    pub fn concrete(&self) -> Option<Vec<usize>> {
        self.shape.iter().map(|d| d.known().and_then(|v| usize::try_from(v).ok())).collect()
    }

    /// Bytes of the tensor, when the shape is concrete and addressable.
    pub fn bytes(&self) -> Option<u64> {
        let elements = self.shape.iter().try_fold(1u64, |n, d| n.checked_mul(u64::try_from(d.known()?).ok()?))?;
        elements.checked_mul(self.dtype.size() as u64)
    }

    /// Whether the tensor has no elements though its other sizes multiply beyond any use: a loop over those would not end.
    pub fn is_hollow(&self) -> bool {
        const MOST: i64 = 1 << 24;
        let mut sizes = self.shape.iter().filter_map(Dim::known);
        let product = sizes.clone().filter(|size| *size > 0).try_fold(1i64, |n, size| n.checked_mul(size));
        sizes.any(|size| size == 0) && product.is_none_or(|n| n > MOST)
    }

    /// The fact with symbols replaced by their values.
    pub fn substitute(&self, bindings: &Bindings) -> Result<Fact, DimError> {
        let shape = self.shape.iter().map(|d| d.substitute(bindings)).collect::<Result<_, _>>()?;
        Ok(Fact { dtype: self.dtype, shape })
    }
}

/// `f32[batch, 784]`
impl fmt::Display for Fact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[", self.dtype)?;
        for (i, d) in self.shape.iter().enumerate() {
            write!(f, "{}{d}", if i > 0 { ", " } else { "" })?;
        }
        f.write_str("]")
    }
}
