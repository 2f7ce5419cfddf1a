//! Lowers the nodes of an exported program to a graph of core ops.
//!
//! Each ATen operator is one row of `table`, a function from a [`Scope`] to outputs. It reads arguments by their ATen
//! names and adds core ops. There is one file per operator family. `walk` calls them in order and functionalises
//! in-place operators.
//!
//! Computed sizes (`sym_size`, products of sizes) are [`Dim`]s and add no nodes to the graph.

pub mod alias;
pub mod argument;
pub mod arrange;
pub mod attention;
pub mod complex;
pub mod create;
pub mod detach;
pub mod distance;
pub mod elementwise;
pub mod function;
pub mod gradient;
pub mod in_place;
pub mod index;
pub mod linear;
pub mod live;
pub mod loss;
pub mod movement;
pub mod norm;
pub mod open;
pub mod promote;
pub mod random;
pub mod recurrent;
pub mod reduce;
pub mod resize;
pub mod scan;
pub mod scatter;
pub mod slice;
pub mod support;
pub mod table;
pub mod walk;
pub mod window;

use crate::graph::{Graph, Origin};
use crate::import::build::Build;
use crate::import::fx::program::names;
use crate::import::fx::schema::{Node, TensorMeta};
use crate::import::lower_error::LowerReason;
use crate::import::onnx::lower::{ImportedWeights, StaticSizes};
use crate::import::symbolic_batch::Opened;
use crate::op::{Op, Parameter, State, Value};
use crate::tensor::dim::Dim;
use std::collections::HashMap;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Known {
    Value(Value),
    /// Real and imaginary part.
    Complex(Value, Value),
    /// A weight that becomes a node on first use; index into [`ImportedWeights`].
    Weight(usize),
    /// An output that no core op computes; reading it is this error.
    Absent(&'static str),
}

#[derive(Debug)]
pub enum NodeOutputs {
    /// In the order of the operator's definition.
    Tensors(Vec<Known>),
    Size(Dim),
}

pub type Outputs = Result<NodeOutputs, LowerReason>;

pub fn one(value: Value) -> Outputs {
    Ok(NodeOutputs::Tensors(vec![Known::Value(value)]))
}

pub fn many(values: Vec<Value>) -> Outputs {
    Ok(NodeOutputs::Tensors(values.into_iter().map(Known::Value).collect()))
}

#[derive(Debug, Default)]
pub struct Names {
    /// Tensors that failed to lower are missing.
    pub tensors: HashMap<String, Known>,
    pub sizes: HashMap<String, Dim>,
}

impl Names {
    /// The names that a node reads, with `map` applied to each tensor.
    pub fn mapped<E>(&self, node: &Node, mut map: impl FnMut(&str, Known) -> Result<Known, E>) -> Result<Names, E> {
        let mut mapped = Names::default();
        for name in node.inputs.iter().flat_map(|input| names(&input.arg)) {
            if let Some(size) = self.sizes.get(name) {
                mapped.sizes.insert(name.to_string(), size.clone());
            }
            if let Some(known) = self.tensors.get(name) {
                mapped.tensors.insert(name.to_string(), map(name, *known)?);
            }
        }
        Ok(mapped)
    }
}

/// The state for lowering one node: its arguments and the graph it adds core ops to.
pub struct Scope<'a> {
    pub node: &'a Node,
    /// Origin recorded on the core ops.
    pub origin: Origin,
    pub names: &'a Names,
    /// Tensor metadata of the file, by name.
    pub metas: &'a HashMap<String, TensorMeta>,
    /// Values of symbols that the file's constants fix.
    pub frozen: &'a StaticSizes,
    pub graph: &'a mut Graph,
    /// Weights that have become constant nodes, by weight index.
    pub constants: &'a mut HashMap<usize, Value>,
    /// State of the whole program.
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
        self.origin.clone()
    }

    fn frozen(&self) -> Option<&StaticSizes> {
        Some(self.frozen)
    }

    fn opened(&mut self) -> Option<&mut Opened> {
        Some(&mut self.ledger.opened)
    }
}

impl Scope<'_> {
    /// Returns a tensor as a value of the graph; a weight is added on first use.
    pub fn read(&mut self, known: Known) -> Result<Value, LowerReason> {
        match known {
            Known::Value(value) => Ok(value),
            Known::Weight(at) => self.weight(at, false),
            Known::Complex(..) => Err(LowerReason::Unsupported("this operator on complex numbers".to_string())),
            Known::Absent(what) => Err(LowerReason::Unsupported(what.to_string())),
        }
    }

    /// Returns weight `at` as a node: a parameter if trained, a state if `kept`, otherwise a constant. A constant
    /// without values becomes a state of its shape.
    pub fn weight(&mut self, at: usize, kept: bool) -> Result<Value, LowerReason> {
        let weight = &self.ledger.weights[at];
        let known = weight.parameter.or(weight.state).or_else(|| self.constants.get(&at).copied().filter(|_| !kept));
        if let Some(value) = known {
            return Ok(value);
        }
        let (name, fact) = (weight.name.clone(), weight.fact.clone());
        let constant = weight.initial.as_ref().ok().filter(|_| !weight.trainable && !kept).cloned();
        let op = match constant {
            Some(tensor) => {
                let value = self.constant(tensor)?;
                self.constants.insert(at, value);
                return Ok(value);
            }
            None if weight.trainable => Op::Parameter(Parameter { name, fact }),
            None => Op::State(State { name, fact }),
        };
        // A weight has no node in the program; its name is its origin.
        let node = self.graph.add(op, &[], &Origin::default())?;
        let value = Value { node, output: 0 };
        let weight = &mut self.ledger.weights[at];
        *(if weight.trainable { &mut weight.parameter } else { &mut weight.state }) = Some(value);
        Ok(value)
    }
}
