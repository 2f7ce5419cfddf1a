//! Chains of elementwise ops, which a device computes as one kernel. A normalisation may be the first op.

use crate::device::layout::TensorLayout;
use compiler::op::Op;

/// An operand of an op in a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operand {
    /// Index into the chain's inputs.
    Input(usize),
    /// The result of an earlier op of the chain.
    Result(usize),
}

/// An op of a chain.
pub struct Link {
    pub op: Op,
    pub operands: Vec<Operand>,
    /// All results have the same shape.
    pub result: TensorLayout,
    /// True if the result is an output of the chain; outputs are in op order.
    pub is_written: bool,
    /// The further results of the first op, which are outputs after the first result.
    pub further_results: Vec<TensorLayout>,
}
