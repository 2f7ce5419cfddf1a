//! Element type and shape of kernel operands.

use compiler::tensor::DType;
use compiler::tensor::fact::Fact;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorLayout {
    pub dtype: DType,
    /// Outermost dimension first.
    pub shape: Vec<usize>,
}

impl TensorLayout {
    /// Panics if a symbolic dimension is left: kernels require concrete shapes.
    pub fn of(fact: &Fact) -> TensorLayout {
        let shape = fact.concrete().expect("kernels are compiled after all symbols are bound");
        TensorLayout { dtype: fact.dtype, shape }
    }

    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    pub fn bytes(&self) -> usize {
        self.len() * self.dtype.size()
    }
}

/// True for `f16` and `bf16`.
pub fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::Bf16)
}

/// Element type of gradient sums, master weights and optimizer state of a parameter with this element type.
pub fn accumulation_type(dtype: DType) -> DType {
    if is_half(dtype) { DType::F32 } else { dtype }
}

/// Size of the gradient sum, master weight or state for `bytes` of a parameter.
pub fn accumulation_bytes(dtype: DType, bytes: usize) -> usize {
    bytes / dtype.size().max(1) * accumulation_type(dtype).size()
}
