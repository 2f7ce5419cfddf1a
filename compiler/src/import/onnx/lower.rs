//! Lowering: from the nodes of a decoded ONNX model to a graph of core ops.
//!
//! During lowering each tensor of the source model is a [`Known`]: a graph value, a constant, a short list of symbolic
//! sizes, or an initializer that has not been read yet. Shape arithmetic (`Shape`, `Gather`, `Concat`, … , `Reshape`)
//! is evaluated here on [`Dim`]s and never reaches the graph.
//!
//! Each operator is lowered by one short function that reads inputs and attributes from a [`Scope`], adds core ops to
//! it and returns the outputs. `table` lists these functions, the other files group them by family, and
//! `lower_model` calls them.

pub mod arithmetic;
pub mod attention;
pub mod attribute;
pub mod bits;
pub mod body;
pub mod boxes;
pub mod branch;
pub mod call;
pub mod cell;
pub mod constant;
pub mod data_dependent;
pub mod determinant;
pub mod elementwise;
pub mod error;
pub mod flex;
pub mod fold;
pub mod frame;
pub mod gather;
pub mod grid;
pub mod indicator;
pub mod input;
pub mod interpolate;
pub mod lengths;
pub mod linear;
pub mod loop_scan;
pub mod loss;
pub mod lower_model;
pub mod movement;
pub mod ngram;
pub mod norm;
pub mod opset_upgrade;
pub mod optimizer_ops;
pub mod order;
pub mod padding;
pub mod pool;
pub mod quantise;
pub mod random;
pub mod recurrent;
pub mod reduce;
pub mod region;
pub mod reshape;
pub mod resize;
pub mod scatter;
pub mod sequence;
pub mod signal;
pub mod slice;
pub mod state;
pub mod support;
pub mod table;
pub mod unrolled_rnn;
pub mod walk;
pub mod weight;
pub mod window;

use crate::graph::{Graph, MovingAverage, Origin};
use crate::import::build::Build;
use crate::import::lower_error::LowerReason;
use crate::import::onnx::model::Node;
use crate::import::symbolic_batch::Opened;
use crate::import::{prune, symbol};
use crate::op::{Op, Value};
use crate::tensor::dim::{Bindings, Dim};
use crate::tensor::fact::Fact;
use crate::tensor::{DType, Tensor};
use std::cell::Cell;
use std::collections::{BTreeMap, HashMap, HashSet};

/// Total number of nodes visited per model to find the graph inputs a value depends on. Limits the work for error
/// messages.
const MAX_VISITED_NODES: usize = 1 << 22;

const A_SEQUENCE: &str = "a sequence instead of a tensor";

/// Information about a tensor of the source model at import time.
#[derive(Clone, Debug)]
pub enum Known {
    Value(Value),
    Tensor(Tensor),
    /// Sizes, some of them symbolic.
    Dims(Dims),
    /// An initializer that becomes a parameter or a state when it is read; an index into [`ImportedWeights::weights`].
    Weight(usize),
    /// The elements of an ONNX sequence.
    Sequence(Vec<Known>),
    /// An output that is not supported; reading it is an error with this message.
    Absent(&'static str),
}

/// An integer tensor of rank 0 or 1 whose elements are sizes.
#[derive(Clone, Debug, PartialEq)]
pub struct Dims {
    pub dims: Vec<Dim>,
    /// True for rank 0, which implies one element.
    pub scalar: bool,
    /// The element type in the source model; a float type if the sizes were cast.
    pub dtype: DType,
}

impl Dims {
    /// Converts to a constant if no symbol is left.
    pub fn known(self) -> Known {
        let numbers: Option<Vec<i64>> = self.dims.iter().map(Dim::known).collect();
        match numbers {
            Some(numbers) => {
                let shape: &[usize] = if self.scalar { &[] } else { &[numbers.len()] };
                Known::Tensor(Tensor::from_i64(shape, &numbers).cast(self.dtype))
            }
            None => Known::Dims(self),
        }
    }
}

/// An initializer that becomes a parameter or a state.
#[derive(Clone, Debug)]
pub struct Weight {
    pub name: String,
    pub fact: Fact,
    /// The initial values, or the path of the missing external file.
    pub initial: Result<Tensor, String>,
    /// False if it can only be a state, because it cannot have a gradient.
    pub trainable: bool,
    /// The parameter node, once it has been created.
    pub parameter: Option<Value>,
    /// The state node, once it has been created.
    pub state: Option<Value>,
}

impl Weight {
    pub fn new(name: String, fact: Fact, initial: Result<Tensor, String>, trainable: bool) -> Weight {
        Weight { name, fact, initial, trainable, parameter: None, state: None }
    }
}

/// The value of a boolean condition; `None` if it is not known at import time.
pub fn read_condition(known: &Known) -> Result<Option<bool>, LowerReason> {
    match known {
        Known::Tensor(tensor) if tensor.len() == 1 => Ok(Some(tensor.view().bool(0))),
        Known::Tensor(tensor) => {
            Err(LowerReason::Inputs(format!("a condition has {} elements, not one", tensor.len())))
        }
        Known::Absent(what) => Err(LowerReason::Unsupported((*what).to_string())),
        Known::Sequence(_) => Err(LowerReason::Unsupported(A_SEQUENCE.to_string())),
        Known::Value(_) | Known::Dims(_) | Known::Weight(_) => Ok(None),
    }
}

/// Results of lowering that concern the whole model.
#[derive(Debug, Default)]
pub struct ImportedWeights {
    pub weights: Vec<Weight>,
    /// Float initializers with a name of the model that are taken as constants.
    pub constants: Vec<String>,
    /// Index into `weights` by name.
    pub named: HashMap<String, usize>,
    pub averages: Vec<MovingAverage>,
    pub warnings: Vec<String>,
    /// Values rebuilt with a symbolic batch size.
    pub opened: Opened,
    /// PyTorch wrote the file.
    pub is_from_pytorch: bool,
    /// Normalisation nodes that use running statistics.
    pub stored_statistics: Vec<String>,
    /// Number of nodes visited so far to find input dependencies, at most `MAX_VISITED_NODES`.
    pub traced: Cell<usize>,
    /// Work done by constant folding so far, in operations and bytes.
    pub folded: f64,
}

/// Numeric values that a static export has in place of symbols: a constant `4` in the file stands for the symbol bound
/// to 4.
pub type StaticSizes = Bindings;

/// The outputs of a lowering function, in the order of the operator's definition.
pub type Outputs = Result<Vec<Known>, LowerReason>;

fn one(value: Value) -> Outputs {
    Ok(vec![Known::Value(value)])
}

/// One node during lowering: its inputs, and the graph that receives its core ops.
pub struct Scope<'a> {
    pub node: &'a Node,
    /// Prefix of the node's name: the enclosing function calls and loop iterations.
    pub prefix: &'a str,
    /// The module path for nodes that have none.
    pub module: &'a str,
    pub opset: i64,
    /// `None` for an optional input that is omitted.
    pub inputs: Vec<Option<Known>>,
    /// Values that symbols have in the constants of this file.
    pub frozen: &'a StaticSizes,
    pub graph: &'a mut Graph,
    /// Constants that already have a node, by tensor name.
    pub constants: &'a mut HashMap<String, Value>,
    pub ledger: &'a mut ImportedWeights,
}

impl Build for Scope<'_> {
    fn graph(&self) -> &Graph {
        self.graph
    }

    fn graph_mut(&mut self) -> &mut Graph {
        self.graph
    }

    fn origin(&self) -> Origin {
        let module = if self.node.module.is_empty() { self.module } else { &self.node.module };
        Origin { source: format!("{}{}", self.prefix, self.node.name), module: module.to_string() }
    }

    fn frozen(&self) -> Option<&StaticSizes> {
        Some(self.frozen)
    }

    fn opened(&mut self) -> Option<&mut Opened> {
        Some(&mut self.ledger.opened)
    }
}

impl Scope<'_> {
    /// Materialises sizes as a graph value of their element type.
    pub fn sizes(&mut self, dims: &Dims) -> Result<Value, LowerReason> {
        let mut parts = Vec::with_capacity(dims.dims.len());
        for dim in &dims.dims {
            let size = match dim.known() {
                Some(value) => self.constant(Tensor::from_i64(&[], &[value]))?,
                None => self.size(dim)?,
            };
            parts.push(if dims.scalar { size } else { self.reshape(size, vec![Dim::Known(1)])? });
        }
        let vector = self.concat(&parts, 0)?;
        self.cast(vector, dims.dtype)
    }

    pub fn has(&self, slot: usize) -> bool {
        self.inputs.get(slot).is_some_and(Option::is_some)
    }

    pub fn known(&self, slot: usize) -> Result<&Known, LowerReason> {
        match self.inputs.get(slot) {
            Some(Some(Known::Absent(what))) => Err(LowerReason::Unsupported((*what).to_string())),
            Some(Some(known)) => Ok(known),
            _ => Err(LowerReason::Missing { slot }),
        }
    }

    pub fn fact_of(&self, slot: usize) -> Result<Fact, LowerReason> {
        Ok(match self.known(slot)? {
            Known::Value(value) => self.graph.fact(*value).clone(),
            Known::Tensor(tensor) => Fact::of(tensor.dtype(), tensor.shape()),
            Known::Dims(d) if d.scalar => Fact::of(d.dtype, &[]),
            Known::Dims(d) => Fact::of(d.dtype, &[d.dims.len()]),
            Known::Weight(at) => self.ledger.weights[*at].fact.clone(),
            Known::Absent(what) => return Err(LowerReason::Unsupported((*what).to_string())),
            Known::Sequence(_) => return Err(LowerReason::Unsupported(A_SEQUENCE.to_string())),
        })
    }

    /// Input `slot` as a graph value. A constant, parameter or size gets a node on first use.
    pub fn value(&mut self, slot: usize) -> Result<Value, LowerReason> {
        match self.known(slot)?.clone() {
            Known::Tensor(tensor) => {
                let name = &self.node.inputs[slot];
                if let Some(value) = self.constants.get(name) {
                    return Ok(*value);
                }
                let value = self.constant(tensor)?;
                self.constants.insert(self.node.inputs[slot].clone(), value);
                Ok(value)
            }
            known => self.materialise(&known),
        }
    }

    /// Converts any known tensor to a graph value.
    pub fn materialise(&mut self, known: &Known) -> Result<Value, LowerReason> {
        match known {
            Known::Value(value) => Ok(*value),
            Known::Weight(at) => self.weight(*at, false),
            Known::Absent(what) => Err(LowerReason::Unsupported((*what).to_string())),
            Known::Sequence(_) => Err(LowerReason::Unsupported(A_SEQUENCE.to_string())),
            Known::Tensor(tensor) => self.constant(tensor.clone()),
            Known::Dims(dims) => self.sizes(dims),
        }
    }

    /// Input `slot` as a graph value, or `None` if it is omitted.
    pub fn optional(&mut self, slot: usize) -> Result<Option<Value>, LowerReason> {
        if self.has(slot) { self.value(slot).map(Some) } else { Ok(None) }
    }

    /// The node of initializer `at`, a parameter or a state. A weight that is not trainable is always a state.
    pub fn weight(&mut self, at: usize, state: bool) -> Result<Value, LowerReason> {
        let weight = &self.ledger.weights[at];
        let state = state || !weight.trainable;
        if let Some(value) = if state { weight.state } else { weight.parameter } {
            return Ok(value);
        }
        let fact = weight.fact.clone();
        let op = match state {
            true => Op::State(crate::op::State { name: weight.name.clone(), fact }),
            false => Op::Parameter(crate::op::Parameter { name: weight.name.clone(), fact }),
        };
        // Parameters and states have no node in the source model, so their origin is empty.
        let node = self.graph.add(op, &[], &Origin::default())?;
        let value = Value { node, output: 0 };
        let weight = &mut self.ledger.weights[at];
        *(if state { &mut weight.state } else { &mut weight.parameter }) = Some(value);
        Ok(value)
    }

    /// The elements of constant input `slot`; `None` if it is omitted.
    pub fn tensor(&self, slot: usize, what: &'static str) -> Result<Option<Tensor>, LowerReason> {
        if !self.has(slot) {
            return Ok(None);
        }
        match self.known(slot)? {
            Known::Tensor(tensor) => {
                let fact = Fact::of(tensor.dtype(), tensor.shape());
                if fact.is_hollow() { Err(LowerReason::Large(fact)) } else { Ok(Some(tensor.clone())) }
            }
            // An initializer may be a trained parameter in one file and a setting in another, so its values are read if
            // present.
            Known::Weight(at) => {
                self.ledger.weights[*at].initial.clone().map(Some).map_err(|_| LowerReason::NotConstant { what })
            }
            _ => Err(self.not_constant(slot, what)),
        }
    }

    /// The error for an input `slot` that is not constant; names the graph inputs it depends on, if any.
    pub fn not_constant(&self, slot: usize, what: &'static str) -> LowerReason {
        let inputs = match self.inputs.get(slot) {
            Some(Some(Known::Value(value))) => self.input_dependencies(*value),
            _ => Vec::new(),
        };
        if inputs.is_empty() { LowerReason::NotConstant { what } } else { LowerReason::Follows { what, inputs } }
    }

    /// The graph inputs that a value depends on, in graph order.
    fn input_dependencies(&self, value: Value) -> Vec<String> {
        let mut seen = HashSet::from([value.node]);
        let mut pending = vec![value.node];
        let mut names = BTreeMap::new();
        while let Some(id) = pending.pop() {
            if let Op::Input(input) = &self.graph.node(id).op {
                names.insert(id, input.name.clone());
            }
            pending.extend(self.graph.inputs(id).into_iter().map(|v| v.node).filter(|id| seen.insert(*id)));
            let traced = self.ledger.traced.get() + 1;
            self.ledger.traced.set(traced);
            if traced > MAX_VISITED_NODES {
                return Vec::new();
            }
        }
        names.into_values().collect()
    }

    /// The elements of input `slot` as integers; `None` if it is omitted.
    pub fn integers(&self, slot: usize, what: &'static str) -> Result<Option<Vec<i64>>, LowerReason> {
        match self.tensor(slot, what)? {
            Some(tensor) if tensor.len() > 4096 => {
                Err(LowerReason::Inputs(format!("{what} has {} elements, more than any shape can have", tensor.len())))
            }
            Some(tensor) => Ok(Some(tensor.to_i64())),
            None => Ok(None),
        }
    }

    /// The elements of input `slot` as sizes; `None` if it is omitted.
    pub fn dims(&self, slot: usize, what: &'static str) -> Result<Option<Vec<Dim>>, LowerReason> {
        match self.inputs.get(slot) {
            Some(Some(Known::Dims(dims))) => Ok(Some(dims.dims.clone())),
            _ => Ok(self.integers(slot, what)?.map(|list| list.into_iter().map(Dim::Known).collect())),
        }
    }
}
