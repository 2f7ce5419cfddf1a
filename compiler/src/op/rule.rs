//! The semantics of an op: shape inference, cost, gradient, reference kernel and sharding strategies, with their types.

use super::expr::Expr;
use super::{Op, Value};
use crate::op::sharding::{Group, LocalContext, Strategy};
use crate::tensor::dim::DimError;
use crate::tensor::fact::Fact;
use crate::tensor::view::{View, ViewMut};
use crate::tensor::{DType, Tensor};
use thiserror::Error;

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Floating-point operations; a fused multiply-add counts as two.
    pub flops: f64,
    /// Bytes read and written without any cache.
    pub bytes: f64,
}

/// The context of an op for its backward rule.
pub struct BackwardContext<'a> {
    pub inputs: &'a [Expr<'a>],
    pub outputs: &'a [Expr<'a>],
    /// The gradient of each output; `None` if there is none.
    pub d_outputs: &'a [Option<Expr<'a>>],
    /// Inputs that need a gradient; others are discarded.
    pub wanted: &'a [bool],
}

impl<'a> BackwardContext<'a> {
    /// The gradient of the first output. A backward rule runs only if an output has a gradient. Ops whose further
    /// outputs take none (saved statistics) may therefore call this.
    pub fn dy(&self) -> Expr<'a> {
        self.d_outputs[0].expect("a backward rule runs if the first output has a gradient")
    }

    /// The gradients that are wanted, out of one for each input.
    pub fn wanted_of(&self, gradients: impl IntoIterator<Item = Expr<'a>>) -> Vec<Option<Expr<'a>>> {
        gradients.into_iter().zip(self.wanted).map(|(d, &wanted)| wanted.then_some(d)).collect()
    }
}

/// The target of backward and sharding rules. A rule that emits an op with unsuitable inputs is a bug, so it panics.
pub trait Emit {
    fn emit(&mut self, op: Op, inputs: &[Value]) -> Value {
        self.emit_all(op, inputs)[0]
    }
    fn emit_all(&mut self, op: Op, inputs: &[Value]) -> Vec<Value>;
    fn fact(&self, value: Value) -> Fact;
}

#[derive(Clone, Debug, Error, PartialEq)]
pub enum FactError {
    #[error("takes {expected} inputs, got {got}")]
    Arity { expected: usize, got: usize },
    #[error("axis {axis} does not exist in a tensor of rank {rank}")]
    Axis { axis: usize, rank: usize },
    #[error("{what} has rank {got}, expected {expected}")]
    Rank { what: &'static str, expected: String, got: usize },
    #[error("{what} has element type {got}, expected {expected}")]
    DType { what: &'static str, expected: String, got: DType },
    #[error("{left_name} is {left}, {right_name} is {right}")]
    Mismatch { left_name: &'static str, left: String, right_name: &'static str, right: String },
    #[error("{0}")]
    Attribute(String),
    #[error(transparent)]
    Dim(#[from] DimError),
}

impl FactError {
    pub fn mismatch(
        left_name: &'static str,
        left: impl ToString,
        right_name: &'static str,
        right: impl ToString,
    ) -> FactError {
        FactError::Mismatch { left_name, left: left.to_string(), right_name, right: right.to_string() }
    }
}

/// The inputs of an op that takes `N`.
pub fn arity<'a, const N: usize>(inputs: &[&'a Fact]) -> Result<[&'a Fact; N], FactError> {
    inputs.try_into().map_err(|_| FactError::Arity { expected: N, got: inputs.len() })
}

pub fn check_dtype(is_supported: bool, what: &'static str, expected: &str, fact: &Fact) -> Result<(), FactError> {
    let error = || FactError::DType { what, expected: expected.into(), got: fact.dtype };
    is_supported.then_some(()).ok_or_else(error)
}

pub fn check_float(what: &'static str, fact: &Fact) -> Result<(), FactError> {
    check_dtype(fact.dtype.is_float(), what, "a float", fact)
}

/// Checks that a tensor has the element type of `model`, called `name`.
pub fn check_like(what: &'static str, fact: &Fact, model: &Fact, name: &str) -> Result<(), FactError> {
    let error = || FactError::DType { what, expected: format!("{}, as {name}", model.dtype), got: fact.dtype };
    (fact.dtype == model.dtype).then_some(()).ok_or_else(error)
}

pub fn check_axis(axis: usize, rank: usize) -> Result<(), FactError> {
    if axis < rank { Ok(()) } else { Err(FactError::Axis { axis, rank }) }
}

pub fn check_same(
    left_name: &'static str,
    left: &Fact,
    right_name: &'static str,
    right: &Fact,
) -> Result<(), FactError> {
    if left == right { Ok(()) } else { Err(FactError::mismatch(left_name, left, right_name, right)) }
}

#[derive(Clone, Debug, Error, PartialEq)]
pub enum KernelError {
    #[error("index {index} is outside an axis of size {size}")]
    Index { index: i64, size: usize },
    /// An attribute has an unbound symbol.
    #[error(transparent)]
    Dim(#[from] DimError),
    #[error("{devices} devices must run this op together")]
    Alone { devices: usize },
    #[error("another device of the tensor-parallel group stopped")]
    Disconnected,
    #[error("label {label} is outside the {classes} classes")]
    Label { label: i64, classes: usize },
}

/// The name of an op in the text form and in messages, lower case: `layer_norm`. The [`table`](super::table) has all.
pub trait Named {
    fn name(&self) -> &'static str;
}

pub trait OpRule: Named {
    /// Infers the element types and shapes of the outputs.
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError>;

    /// Cost of one run at concrete shapes. Default: one flop per output element, every tensor moved once.
    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        Cost { flops: outputs.first().map_or(0.0, elements), bytes: moved_bytes(inputs, outputs) }
    }

    /// The gradient of each input as core ops; `None` if it has none. `context.d_outputs` contains at least one
    /// gradient.
    fn backward<'b>(&self, context: BackwardContext<'b>) -> Vec<Option<Expr<'b>>> {
        vec![None; context.inputs.len()]
    }

    /// Tests whether [`OpRule::backward`] uses the gradient of this output. If it does not, training is refused:
    /// dropping a gradient would train the wrong model.
    fn takes_gradient(&self, output: usize) -> bool {
        let _ = output;
        true
    }

    /// The reference kernel: it folds constants and is the oracle for faster kernels. The facts have passed
    /// [`OpRule::infer`]; every output element must be written.
    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError>;

    /// Sharding strategies over a tensor-parallel group, besides full replication. Sizes need not be divisible; the
    /// caller drops strategies that do not fit. Default: none.
    fn strategies(&self, inputs: &[&Fact], outputs: &[Fact], group: &Group) -> Vec<Strategy> {
        let _ = (inputs, outputs, group);
        Vec::new()
    }

    /// Emits the per-device ops of a strategy with [`Local::Written`](crate::op::sharding::Local::Written); returns the
    /// local outputs.
    fn write_part<'b>(&self, strategy: &Strategy, context: &LocalContext<'b>) -> Vec<Expr<'b>> {
        let _ = context;
        unreachable!("{} has no sharding rule for {strategy:?}", self.name())
    }

    /// Tests whether the output aliases the first input's bytes under another shape, so that no copy is needed.
    fn is_view(&self) -> bool {
        false
    }
}

pub fn elements(fact: &Fact) -> f64 {
    fact.shape.iter().map(|d| d.known().unwrap_or(0) as f64).product()
}

pub fn moved_bytes(inputs: &[&Fact], outputs: &[Fact]) -> f64 {
    inputs.iter().copied().chain(outputs).map(|f| elements(f) * f.dtype.size() as f64).sum()
}

/// A small test case of an op, run on every device.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Distinguishing feature: `strided, two groups`.
    pub title: &'static str,
    pub op: Op,
    pub inputs: Vec<Tensor>,
    /// Inputs whose gradient is checked by finite differences in `f64`.
    pub differentiate: Vec<usize>,
}

impl Sample {
    /// A case with the gradients of all inputs that are floats.
    pub fn new(title: &'static str, op: Op, inputs: Vec<Tensor>) -> Sample {
        let differentiate = (0..inputs.len()).filter(|&i| inputs[i].dtype().is_float()).collect();
        Sample { title, op, inputs, differentiate }
    }

    /// A case without gradients.
    pub fn forward(title: &'static str, op: Op, inputs: Vec<Tensor>) -> Sample {
        Sample { title, op, inputs, differentiate: vec![] }
    }
}
