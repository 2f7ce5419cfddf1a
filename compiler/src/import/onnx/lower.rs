//! Lowering: from the nodes of a decoded ONNX model to a graph of core ops.
//!
//! While nodes are lowered in order, every tensor of the model is one of four things, a [`Known`]: a value of the graph,
//! a constant, a short list of symbolic sizes, or an initializer that nobody has read yet. So shape arithmetic (`Shape`,
//! `Gather`, `Concat`, … , `Reshape`) never reaches the graph: it is done here, on [`Dim`]s.
//!
//! An operator is one short function from a [`Scope`], which gives it its inputs and attributes and takes its core ops,
//! to its outputs. `table` lists them; files group them by family; `walk` calls them.

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
pub mod einsum;
pub mod elementwise;
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
use crate::op::{Concat, Op, Value};
use crate::tensor::dim::{Bindings, Dim};
use crate::tensor::fact::Fact;
use crate::tensor::{DType, Tensor};
use std::cell::Cell;
use std::collections::{BTreeMap, HashMap, HashSet};

/// How many nodes are looked at in all to find what values follow from: a file may have very many that ask.
const TRACED: usize = 1 << 22;

/// What a sequence is called where a tensor was expected.
const A_SEQUENCE: &str = "a sequence in place of a tensor";

/// What is known of a tensor of the source model.
#[derive(Clone, Debug)]
pub enum Known {
    /// A value of the graph.
    Value(Value),
    /// Its elements.
    Tensor(Tensor),
    /// Sizes, some of them symbolic.
    Dims(Dims),
    /// An initializer that becomes a parameter or a state when it is read; its place in the list of all [`Weight`]s.
    Weight(usize),
    /// Several tensors: what a sequence holds.
    Sequence(Vec<Known>),
    /// An output that no core op gives; reading it is an error that says this.
    Absent(&'static str),
}

/// An integer tensor of rank 0 or 1 whose elements are sizes.
#[derive(Clone, Debug, PartialEq)]
pub struct Dims {
    /// The elements.
    pub dims: Vec<Dim>,
    /// Whether it has rank 0, and so one element.
    pub scalar: bool,
    /// The element type the source model gives it; a float when sizes were cast on their way.
    pub dtype: DType,
}

impl Dims {
    /// As a constant when no symbol is left, else as it is.
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

/// An initializer with values of its own: a parameter or a state.
#[derive(Clone, Debug)]
pub struct Weight {
    /// The initializer's name.
    pub name: String,
    /// Element type and shape.
    pub fact: Fact,
    /// The initial values, or the path of the external file that does not exist.
    pub initial: Result<Tensor, String>,
    /// Whether a gradient may train it; else it can only be a state.
    pub trainable: bool,
    /// Its parameter, once it was read as one.
    pub parameter: Option<Value>,
    /// Its state, once it was read as one.
    pub state: Option<Value>,
}

impl Weight {
    /// One that nobody has read yet.
    pub fn new(name: String, fact: Fact, initial: Result<Tensor, String>, trainable: bool) -> Weight {
        Weight { name, fact, initial, trainable, parameter: None, state: None }
    }
}

/// The one truth of a condition; `None` when it is not known while importing.
pub fn truth(known: &Known) -> Result<Option<bool>, LowerReason> {
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

/// What nodes leave behind for the whole model.
#[derive(Debug, Default)]
pub struct ImportedWeights {
    /// All initializers that may become nodes.
    pub weights: Vec<Weight>,
    /// Where they stand, by name.
    pub named: HashMap<String, usize>,
    /// How running statistics follow those of the batch.
    pub averages: Vec<MovingAverage>,
    /// What to tell the user.
    pub warnings: Vec<String>,
    /// Values that were made again with an open batch.
    pub opened: Opened,
    /// Nodes that normalise batches with stored statistics.
    pub stored_statistics: Vec<String>,
    /// How many nodes were looked at to find what values follow from.
    pub traced: Cell<usize>,
    /// How much work folding has done, in operations and bytes.
    pub folded: f64,
}

/// Sizes that a static export has in place of a symbol: where constants of the file say `4`, the symbol stands for 4.
pub type Frozen = Bindings;

/// What an operator's function gives: its outputs, in the order of the operator's definition.
pub type Outputs = Result<Vec<Known>, LowerReason>;

/// One node while it is lowered: what it reads, and where its core ops go.
pub struct Scope<'a> {
    /// The node.
    pub node: &'a Node,
    /// What stands before the node's name: the calls and turns of loops that it is in.
    pub prefix: &'a str,
    /// The module of a node that names none.
    pub module: &'a str,
    /// The version of the standard operator set.
    pub opset: i64,
    /// What is known of each input; `None` where an optional one is left out.
    pub inputs: Vec<Option<Known>>,
    /// Sizes that symbols have in the constants of this file.
    pub frozen: &'a Frozen,
    /// The graph written to.
    pub graph: &'a mut Graph,
    /// Constants that are nodes already, by the name of the tensor.
    pub constants: &'a mut HashMap<String, Value>,
    /// What concerns the whole model.
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

    fn frozen(&self) -> Option<&Frozen> {
        Some(self.frozen)
    }

    fn opened(&mut self) -> Option<&mut Opened> {
        Some(&mut self.ledger.opened)
    }
}

impl Scope<'_> {
    /// Sizes as a value of their element type.
    pub fn sizes(&mut self, dims: &Dims) -> Result<Value, LowerReason> {
        let mut parts = Vec::with_capacity(dims.dims.len());
        for dim in &dims.dims {
            let size = match dim.known() {
                Some(value) => self.constant(Tensor::from_i64(&[], &[value]))?,
                None => self.size(dim)?,
            };
            parts.push(if dims.scalar { size } else { self.reshape(size, vec![Dim::Known(1)])? });
        }
        let joined = match parts.as_slice() {
            [one] => *one,
            _ => self.add(Op::Concat(Concat { axis: 0 }), &parts)?,
        };
        self.cast(joined, dims.dtype)
    }

    /// Whether input `slot` is given.
    pub fn has(&self, slot: usize) -> bool {
        self.inputs.get(slot).is_some_and(Option::is_some)
    }

    /// What is known of input `slot`.
    pub fn known(&self, slot: usize) -> Result<&Known, LowerReason> {
        match self.inputs.get(slot) {
            Some(Some(Known::Absent(what))) => Err(LowerReason::Unsupported((*what).to_string())),
            Some(Some(known)) => Ok(known),
            _ => Err(LowerReason::Missing { slot }),
        }
    }

    /// Element type and shape of input `slot`.
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

    /// Input `slot` as a value of the graph. A constant, a parameter or a size becomes a node the first time.
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
            other => self.made(&other),
        }
    }

    /// Whatever is known of a tensor as a value of the graph.
    pub fn made(&mut self, known: &Known) -> Result<Value, LowerReason> {
        match known {
            Known::Value(value) => Ok(*value),
            Known::Weight(at) => self.weight(*at, false),
            Known::Absent(what) => Err(LowerReason::Unsupported((*what).to_string())),
            Known::Sequence(_) => Err(LowerReason::Unsupported(A_SEQUENCE.to_string())),
            Known::Tensor(tensor) => self.constant(tensor.clone()),
            Known::Dims(dims) => self.sizes(dims),
        }
    }

    /// Input `slot` as a value, or `None` where it is left out.
    pub fn optional(&mut self, slot: usize) -> Result<Option<Value>, LowerReason> {
        if self.has(slot) { self.value(slot).map(Some) } else { Ok(None) }
    }

    /// Initializer `at` as a node: a parameter, or a state. What cannot be trained is always a state.
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
        // A source has no node of its own in the model; its name says where it comes from.
        let node = self.graph.add(op, &[], &Origin::default())?;
        let value = Value { node, output: 0 };
        let weight = &mut self.ledger.weights[at];
        *(if state { &mut weight.state } else { &mut weight.parameter }) = Some(value);
        Ok(value)
    }

    /// The elements of input `slot` when they are known, `None` when it is left out.
    pub fn tensor(&self, slot: usize, what: &'static str) -> Result<Option<Tensor>, LowerReason> {
        if !self.has(slot) {
            return Ok(None);
        }
        match self.known(slot)? {
            Known::Tensor(tensor) => {
                let fact = Fact::of(tensor.dtype(), tensor.shape());
                if fact.is_hollow() { Err(LowerReason::Large(fact)) } else { Ok(Some(tensor.clone())) }
            }
            // A parameter of one file may be a setting in another: read it where its values are there.
            Known::Weight(at) => {
                self.ledger.weights[*at].initial.clone().map(Some).map_err(|_| LowerReason::NotConstant { what })
            }
            _ => Err(self.not_constant(slot, what)),
        }
    }

    /// Why input `slot` cannot be computed with while importing: the graph inputs it follows from, where it does.
    pub fn not_constant(&self, slot: usize, what: &'static str) -> LowerReason {
        let inputs = match self.inputs.get(slot) {
            Some(Some(Known::Value(value))) => self.followed(*value),
            _ => Vec::new(),
        };
        if inputs.is_empty() { LowerReason::NotConstant { what } } else { LowerReason::Follows { what, inputs } }
    }

    /// The graph inputs that a value follows from, in their order.
    fn followed(&self, value: Value) -> Vec<String> {
        let mut seen = HashSet::from([value.node]);
        let mut waiting = vec![value.node];
        let mut found = BTreeMap::new();
        while let Some(id) = waiting.pop() {
            if let Op::Input(input) = &self.graph.node(id).op {
                found.insert(id, input.name.clone());
            }
            waiting.extend(self.graph.inputs(id).into_iter().map(|v| v.node).filter(|id| seen.insert(*id)));
            let traced = self.ledger.traced.get() + 1;
            self.ledger.traced.set(traced);
            if traced > TRACED {
                return Vec::new();
            }
        }
        found.into_values().collect()
    }

    /// The elements of input `slot` as whole numbers, `None` when it is left out.
    pub fn integers(&self, slot: usize, what: &'static str) -> Result<Option<Vec<i64>>, LowerReason> {
        match self.tensor(slot, what)? {
            Some(tensor) if tensor.len() > 4096 => {
                Err(LowerReason::Inputs(format!("{what} has {} elements, more than any shape", tensor.len())))
            }
            Some(tensor) => Ok(Some(tensor.to_i64())),
            None => Ok(None),
        }
    }

    /// The elements of input `slot` as sizes, `None` when it is left out.
    pub fn dims(&self, slot: usize, what: &'static str) -> Result<Option<Vec<Dim>>, LowerReason> {
        match self.inputs.get(slot) {
            Some(Some(Known::Dims(dims))) => Ok(Some(dims.dims.clone())),
            _ => Ok(self.integers(slot, what)?.map(|list| list.into_iter().map(Dim::Known).collect())),
        }
    }
}
