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
