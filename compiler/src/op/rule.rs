//! What an op means: how shapes follow, what a run costs, its gradient, its clear kernel, and the words that these speak in.

use super::{Op, Value};
use crate::op::sharding::{Group, PartSite, Strategy};
use crate::tensor::dim::DimError;
use crate::tensor::fact::Fact;
use crate::tensor::view::{View, ViewMut};
use crate::tensor::{DType, Tensor};
use thiserror::Error;

/// What one run of an op costs, on any machine.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Floating-point operations; a fused multiply-add counts two.
    pub flops: f64,
    /// Bytes read and written when nothing stays in a cache.
    pub bytes: f64,
}

/// A place where an op stands, as its backward rule sees it.
pub struct Site<'a> {
    /// The forward inputs.
    pub inputs: &'a [Value],
    /// The forward outputs.
    pub outputs: &'a [Value],
    /// The gradient of each output, where one arrives.
    pub d_outputs: &'a [Option<Value>],
    /// Which inputs want a gradient; what is computed for others is thrown away.
    pub wanted: &'a [bool],
}

impl Site<'_> {
    /// The gradient of the first output. A rule runs only where some gradient arrives; ops whose further outputs carry
    /// none (saved statistics) may rely on it.
    pub fn dy(&self) -> Value {
        self.d_outputs[0].expect("a backward rule runs where the gradient of the first output arrives")
    }
}

/// Where a backward rule writes its ops. The rules are our own, so an op that does not fit is a bug and panics.
pub trait Emit {
    /// Adds an op and returns its first output.
    fn emit(&mut self, op: Op, inputs: &[Value]) -> Value {
        self.emit_all(op, inputs)[0]
    }
    /// Adds an op and returns all outputs.
    fn emit_all(&mut self, op: Op, inputs: &[Value]) -> Vec<Value>;
    /// What is known of a value.
    fn fact(&self, value: Value) -> Fact;
}

/// Why inputs do not fit an op.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum FactError {
    /// The wrong number of inputs.
    #[error("takes {expected} inputs, got {got}")]
    Arity {
        /// How many it takes.
        expected: usize,
        /// How many there are.
        got: usize,
    },
    /// An axis beyond the rank.
    #[error("axis {axis} does not exist in a tensor of rank {rank}")]
    Axis {
        /// The axis.
        axis: usize,
        /// The rank.
        rank: usize,
    },
    /// The wrong number of dims.
    #[error("{what} has rank {got}, expected {expected}")]
    Rank {
        /// Which tensor or attribute.
        what: &'static str,
        /// What was expected.
        expected: String,
        /// The rank found.
        got: usize,
    },
    /// An element type that the op has no meaning for.
    #[error("{what} has element type {got}, expected {expected}")]
    DType {
        /// Which tensor.
        what: &'static str,
        /// What was expected.
        expected: String,
        /// What was found.
        got: DType,
    },
    /// Two things that must agree do not.
    #[error("{left_name} is {left}, {right_name} is {right}")]
    Mismatch {
        /// First thing, e.g. `weight input channels`.
        left_name: &'static str,
        /// Its value.
        left: String,
        /// Second thing.
        right_name: &'static str,
        /// Its value.
        right: String,
    },
    /// An attribute without meaning.
    #[error("{0}")]
    Attribute(String),
    /// Shape arithmetic has no exact answer.
    #[error(transparent)]
    Dim(#[from] DimError),
}

/// Why a kernel could not run on the values it got.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum KernelError {
    /// An index outside its axis.
    #[error("index {index} is outside an axis of size {size}")]
    Index {
        /// The index.
        index: i64,
        /// The size of the axis.
        size: usize,
    },
    /// An attribute with a symbol that has no value yet.
    #[error(transparent)]
    Dim(#[from] DimError),
    /// What several devices do together.
    #[error("this is done by {devices} devices together, not by one alone")]
    Alone {
        /// How many.
        devices: usize,
    },
    /// Another device of the group stopped.
    #[error("another device of the group stopped")]
    Gone,
    /// A class label outside the classes.
    #[error("label {label} is outside the {classes} classes")]
    Label {
        /// The label.
        label: i64,
        /// The number of classes.
        classes: usize,
    },
}

/// Everything an op means.
pub trait OpRule {
    /// The name in the text form and in messages, lower case: `layer_norm`.
    fn name(&self) -> &'static str;

    /// How element types and shapes of the outputs follow from those of the inputs.
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError>;

    /// What one run costs; shapes are concrete. The default: one flop an output element, everything moved once.
    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        Cost { flops: outputs.first().map_or(0.0, elements), bytes: moved(inputs, outputs) }
    }

    /// The gradient of each input as a graph of core ops; `None` where there is none. `at.d_outputs` has at least one
    /// gradient.
    fn backward(&self, at: Site<'_>, out: &mut dyn Emit) -> Vec<Option<Value>> {
        let _ = out;
        vec![None; at.inputs.len()]
    }

    /// Whether [`OpRule::backward`] takes a gradient that arrives at this output. Where it does not, training is refused:
    /// a gradient that is dropped would be a wrong model.
    fn takes_gradient(&self, output: usize) -> bool {
        let _ = output;
        true
    }

    /// The clear kernel: it folds constants, and is the oracle for every faster one. Facts have been checked by
    /// [`OpRule::infer`]; every element of every output must be written.
    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError>;

    /// The ways of sharing the op among the devices of a group, besides that in which each does everything. Sizes need not divide:
    /// whoever asks leaves out what does not fit. The default: none.
    fn strategies(&self, inputs: &[&Fact], outputs: &[Fact], group: &Group) -> Vec<Strategy> {
        let _ = (inputs, outputs, group);
        Vec::new()
    }

    /// Writes what each device runs under a strategy that says [`Written`](crate::op::sharding::Local::Written), and returns what it has of
    /// each output then.
    fn write_part(&self, strategy: &Strategy, at: &PartSite<'_>, out: &mut dyn Emit) -> Vec<Value> {
        let _ = (at, out);
        unreachable!("{} writes no part for {strategy:?}", self.name())
    }

    /// Whether the output is the first input's bytes under another shape, so that no device needs to copy.
    fn is_view(&self) -> bool {
        false
    }
}

/// The number of elements of a concrete fact, as a float.
pub fn elements(fact: &Fact) -> f64 {
    fact.shape.iter().map(|d| d.known().unwrap_or(0) as f64).product()
}

/// Bytes of all inputs and outputs, as a float.
pub fn moved(inputs: &[&Fact], outputs: &[Fact]) -> f64 {
    inputs.iter().copied().chain(outputs).map(|f| elements(f) * f.dtype.size() as f64).sum()
}

/// A small case of an op that every device is asked.
#[derive(Clone, Debug)]
pub struct Sample {
    /// What is special about it: `strided, two groups`.
    pub title: &'static str,
    /// The op.
    pub op: Op,
    /// Its inputs.
    pub inputs: Vec<Tensor>,
    /// Which inputs the gradient is checked for, by finite differences in `f64`.
    pub differentiate: Vec<usize>,
}
