//! Static knowledge about a tensor: element type and shape.

use super::DType;
use super::dim::{Bindings, Dim, DimError, volume};
use serde::{Deserialize, Serialize};
use std::fmt;

#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Fact {
    pub dtype: DType,
    /// Outermost first; dims may be symbolic.
    pub shape: Vec<Dim>,
}

impl Fact {
    pub fn new(dtype: DType, shape: Vec<Dim>) -> Fact {
        Fact { dtype, shape }
    }

    pub fn of(dtype: DType, shape: &[usize]) -> Fact {
        Fact { dtype, shape: shape.iter().map(|&d| Dim::from(d)).collect() }
    }

    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    pub fn volume(&self) -> Result<Dim, DimError> {
        volume(&self.shape)
    }

    /// The shape as numbers; `None` if a dim is symbolic or negative.
    pub fn concrete(&self) -> Option<Vec<usize>> {
        self.shape.iter().map(|d| d.known().and_then(|v| usize::try_from(v).ok())).collect()
    }

    /// Bytes of the tensor; `None` if symbolic or too large.
    pub fn bytes(&self) -> Option<u64> {
        let elements = self.shape.iter().try_fold(1u64, |n, d| n.checked_mul(u64::try_from(d.known()?).ok()?))?;
        elements.checked_mul(self.dtype.size() as u64)
    }

    /// Tests for an empty tensor whose other sizes have a huge product: a loop over those would not terminate in
    /// practice.
    pub fn is_hollow(&self) -> bool {
        const MOST: i64 = 1 << 24;
        let mut sizes = self.shape.iter().filter_map(Dim::known);
        let product = sizes.clone().filter(|size| *size > 0).try_fold(1i64, |n, size| n.checked_mul(size));
        sizes.any(|size| size == 0) && product.is_none_or(|n| n > MOST)
    }

    /// Replaces symbols by their values.
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
