//! Lowering: from the nodes of an exported program to a graph of core ops.
//!
//! An operator of ATen is one row of `table`: a short function from a [`Scope`], which gives it its arguments by the
//! names that ATen has for them and takes its core ops, to its outputs. Files group them by family. `walk` calls them in
//! order, and makes functional what changes its operand in place.
//!
//! Sizes that a program computes (`sym_size`, products of sizes) are [`Dim`]s and never reach the graph.

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
use crate::import::onnx::lower::{Frozen, ImportedWeights};
use crate::import::symbolic_batch::Opened;
use crate::op::{Op, Parameter, State, Value};
use crate::tensor::dim::Dim;
use std::collections::HashMap;

/// What is known of a tensor of the program.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Known {
    /// A value of the graph.
    Value(Value),
    /// A complex tensor: its real and its imaginary part.
    Complex(Value, Value),
    /// A weight that becomes a node when it is read; its place in the list of all weights.
    Weight(usize),
    /// A result that no core op gives; reading it is an error that says this.
    Absent(&'static str),
}

/// What a node makes.
#[derive(Debug)]
pub enum Made {
    /// Tensors, in the order of the operator's definition.
    Tensors(Vec<Known>),
    /// A size.
    Size(Dim),
}

/// What an operator's function gives.
pub type Outputs = Result<Made, LowerReason>;

/// One tensor.
pub fn one(value: Value) -> Outputs {
    Ok(Made::Tensors(vec![Known::Value(value)]))
}

/// Several tensors.
pub fn many(values: Vec<Value>) -> Outputs {
    Ok(Made::Tensors(values.into_iter().map(Known::Value).collect()))
}

/// What values and sizes are called, in one graph of the program.
#[derive(Debug, Default)]
pub struct Names {
    /// Tensors; a broken one is missing.
    pub tensors: HashMap<String, Known>,
    /// Sizes.
    pub sizes: HashMap<String, Dim>,
}

impl Names {
    /// The names that a node reads, with what `map` makes of each tensor.
    pub fn mapped<E>(&self, node: &Node, mut map: impl FnMut(&str, Known) -> Result<Known, E>) -> Result<Names, E> {
        let mut within = Names::default();
        for name in node.inputs.iter().flat_map(|input| names(&input.arg)) {
            if let Some(size) = self.sizes.get(name) {
                within.sizes.insert(name.to_string(), size.clone());
            }
            if let Some(known) = self.tensors.get(name) {
                within.tensors.insert(name.to_string(), map(name, *known)?);
            }
        }
        Ok(within)
    }
}

/// One node while it is lowered: what it reads, and where its core ops go.
pub struct Scope<'a> {
    /// The node.
    pub node: &'a Node,
    /// What its core ops come from.
    pub origin: Origin,
    /// What the values it reads are.
    pub names: &'a Names,
    /// What the file says of tensors, by name.
    pub said: &'a HashMap<String, TensorMeta>,
    /// Sizes that symbols have in the constants of this file.
    pub frozen: &'a Frozen,
    /// The graph written to.
    pub graph: &'a mut Graph,
    /// Weights that are constants and nodes already.
    pub constants: &'a mut HashMap<usize, Value>,
    /// What concerns the whole program.
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

    fn frozen(&self) -> Option<&Frozen> {
        Some(self.frozen)
    }

    fn opened(&mut self) -> Option<&mut Opened> {
        Some(&mut self.ledger.opened)
    }
}

impl Scope<'_> {
    /// A tensor of the program as a value of the graph.
    pub fn read(&mut self, known: Known) -> Result<Value, LowerReason> {
        match known {
            Known::Value(value) => Ok(value),
            Known::Weight(at) => self.weight(at, false),
            Known::Complex(..) => Err(LowerReason::Unsupported("this operator on complex numbers".to_string())),
            Known::Absent(what) => Err(LowerReason::Unsupported(what.to_string())),
        }
    }

    /// Weight `at` as a node: a parameter when it is trained, a state when it is kept, else a constant. A constant
    /// whose values are missing has a shape still, and is a state.
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
        // A source has no node of its own in the program; its name says where it comes from.
        let node = self.graph.add(op, &[], &Origin::default())?;
        let value = Value { node, output: 0 };
        let weight = &mut self.ledger.weights[at];
        *(if weight.trainable { &mut weight.parameter } else { &mut weight.state }) = Some(value);
        Ok(value)
    }
}
