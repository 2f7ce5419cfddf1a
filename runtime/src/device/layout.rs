//! What a device's kernel is made for: element type and shape of an operand, in plain numbers.

use compiler::tensor::DType;
use compiler::tensor::fact::Fact;

/// Element type and shape of an operand, in plain numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorLayout {
    /// Element type.
    pub dtype: DType,
    /// Shape, outermost first.
    pub shape: Vec<usize>,
}

impl TensorLayout {
    /// The layout of a fact. Panics when a symbol is left: kernels are made for bound graphs.
    pub fn of(fact: &Fact) -> TensorLayout {
        let shape = fact.concrete().expect("kernels are made when every symbol has its value");
        TensorLayout { dtype: fact.dtype, shape }
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// Bytes of all elements.
    pub fn bytes(&self) -> usize {
        self.len() * self.dtype.size()
    }
}
