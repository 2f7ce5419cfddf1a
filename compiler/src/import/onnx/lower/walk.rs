//! The walk over the nodes of a model, in order: each is folded, done as shape arithmetic, or lowered to core ops.
//!
//! Faults are gathered: a node that cannot be lowered leaves its outputs broken, and what reads them is passed over.

use super::support::{self, Unsupported};
use super::{Frozen, Known, Ledger, Reason, Scope, Weight, arithmetic, fold, prune, table, weight};
use crate::graph::{AddError, Graph, Origin, Output};
use crate::import::onnx::model::{Node, OnnxModel};
use crate::import::onnx::name::shown;
use crate::op::{Input, NodeId, Op, Value};
use crate::tensor::fact::Fact;
use std::collections::{HashMap, HashSet};
use std::fmt;
use thiserror::Error;

/// How many faults a message lists before it only counts.
const LISTED: usize = 20;

/// The versions of the standard operator set that are read.
const OPSETS: std::ops::RangeInclusive<i64> = 7..=25;

/// What a model becomes.
#[derive(Debug)]
pub struct Lowered {
    /// The graph, pruned and numbered densely.
    pub graph: Graph,
    /// The initial values of its parameters and states.
    pub weights: Vec<Weight>,
    /// What to tell the user.
    pub warnings: Vec<String>,
}

/// Why a model cannot be lowered.
#[derive(Debug, Error)]
pub enum LowerError {
    /// Operators that no row of the table lowers.
    #[error("{0}")]
    Unsupported(Unsupported),
    /// An operator set that is too old.
    #[error("standard operator set {found} is not supported: {} to {} are", OPSETS.start(), OPSETS.end())]
    Opset {
        /// Its version.
        found: i64,
    },
    /// Nodes that do not fit their inputs.
    #[error("{0}")]
    Nodes(Faults),
    /// A result that cannot be given.
    #[error("graph output `{}`: {reason}", shown(name))]
    Output {
        /// Its name.
        name: String,
        /// Why.
        reason: Box<Reason>,
    },
    /// A graph without results.
    #[error("the graph has no outputs: there is nothing to compute")]
    NoOutputs,
    /// A node that was added once cannot be added again: our bug.
    #[error("this is a bug in pipec: {0}")]
    Prune(Box<AddError>),
}

impl From<AddError> for LowerError {
    fn from(error: AddError) -> LowerError {
        LowerError::Prune(Box::new(error))
    }
}

/// All nodes that cannot be lowered.
#[derive(Debug)]
pub struct Faults(pub Vec<Fault>);

/// One of them.
#[derive(Debug, Error)]
#[error("node `{}` ({}): {reason}", shown(node), shown(operator))]
pub struct Fault {
    /// Its name.
    pub node: String,
    /// What it is.
    pub operator: String,
    /// What is wrong.
    pub reason: Reason,
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, fault) in self.0.iter().take(LISTED).enumerate() {
            write!(f, "{}{fault}", if n > 0 { "\n" } else { "" })?;
        }
        match self.0.len().saturating_sub(LISTED) {
            0 => Ok(()),
            more => write!(f, "\nand {more} more"),
        }
    }
}

/// Checks that every operator can be lowered at all.
pub fn check(model: &OnnxModel) -> Result<(), LowerError> {
    match model.opset("") {
        Some(found) if found < *OPSETS.start() => Err(LowerError::Opset { found }),
        _ => support::check(model).map_err(LowerError::Unsupported),
    }
}

/// Lowers a model whose operators passed [`check`], with these facts of its inputs.
pub fn lower(model: &OnnxModel, inputs: &[Fact], frozen: &Frozen) -> Result<Lowered, LowerError> {
    let (known, weights) = weight::sort(model);
    let opset = model.opset("").unwrap_or(*OPSETS.end());
    let mut walk = Walk {
        opset,
        frozen,
        graph: Graph::new(&model.graph_name),
        known,
        constants: HashMap::new(),
        ledger: Ledger { weights, ..Ledger::default() },
    };
    if opset > *OPSETS.end() {
        let newest = OPSETS.end();
        walk.ledger.warnings.push(format!("standard operator set {opset} is newer than {newest}, the newest known"));
    }
    for (input, fact) in model.inputs.iter().zip(inputs) {
        let op = Op::Input(Input { name: input.name.clone(), fact: fact.clone() });
        let node = walk.graph.add(op, &[], &Origin::default())?;
        walk.known.insert(input.name.clone(), Known::Value(Value { node, output: 0 }));
    }
    let mut faults = Vec::new();
    for node in &model.nodes {
        match walk.node(node) {
            Ok(outputs) => walk.name(node, outputs),
            Err(None) => {}
            Err(Some(reason)) => {
                faults.push(Fault { node: node.name.clone(), operator: node.op_type.clone(), reason });
            }
        }
    }
    if !faults.is_empty() {
        return Err(LowerError::Nodes(Faults(faults)));
    }
    walk.finish(model)
}

struct Walk<'a> {
    opset: i64,
    frozen: &'a Frozen,
    graph: Graph,
    /// What is known of each tensor; a broken one is missing.
    known: HashMap<String, Known>,
    constants: HashMap<String, Value>,
    ledger: Ledger,
}

impl Walk<'_> {
    /// The outputs of a node; `Err(None)` when an input is broken already.
    fn node(&mut self, node: &Node) -> Result<Vec<Known>, Option<Reason>> {
        let lower = table::find(&node.op_type).ok_or_else(|| Some(Reason::Unsupported(node.op_type.clone())))?;
        let mut scope = self.scope(node).ok_or(None)?;
        if fold::applies(&scope)
            && let Some(outputs) = fold::fold(&mut scope, lower)?
        {
            return Ok(outputs);
        }
        if let Some(outputs) = arithmetic::lower(&scope)? {
            return Ok(outputs);
        }
        Ok(lower(&mut scope)?)
    }

    fn scope<'s>(&'s mut self, node: &'s Node) -> Option<Scope<'s>> {
        let known = |name: &String| match name.is_empty() {
            true => Some(None),
            false => self.known.get(name).cloned().map(Some),
        };
        let inputs = node.inputs.iter().map(known).collect::<Option<Vec<_>>>()?;
        Some(Scope {
            node,
            opset: self.opset,
            inputs,
            frozen: self.frozen,
            graph: &mut self.graph,
            constants: &mut self.constants,
            ledger: &mut self.ledger,
        })
    }

    /// Files the outputs of a node under their names.
    fn name(&mut self, node: &Node, outputs: Vec<Known>) {
        let mut outputs = outputs.into_iter();
        for name in &node.outputs {
            let known = outputs.next().unwrap_or(Known::Absent("an output that its operator does not have"));
            if !name.is_empty() {
                self.known.insert(name.clone(), known);
            }
        }
    }

    /// An exporter that merges what merely starts equal lets one initializer be a bias here and a running mean there.
    /// These part as soon as they are trained, so they are two tensors: the state gets a name of its own.
    fn part(&mut self) {
        let mut parted = Vec::new();
        for weight in self.ledger.weights.iter_mut().filter(|w| w.parameter.is_some()) {
            let Some(state) = weight.state.take() else { continue };
            let mut name = format!("{}.running", weight.name);
            while self.known.contains_key(&name) {
                name.push('_');
            }
            if let Op::State(op) = &mut self.graph.node_mut(state.node).op {
                op.name.clone_from(&name);
            }
            parted.push(Weight { name, trainable: false, parameter: None, state: Some(state), ..weight.clone() });
        }
        if let Some(first) = parted.first() {
            self.ledger.warnings.push(format!(
                "{} tensors are a parameter and a running statistic at once, since the exporter merged what starts \
                 equal; the statistics are now on their own, `{}` first",
                parted.len(),
                shown(&first.name)
            ));
        }
        self.ledger.weights.extend(parted);
    }

    fn finish(mut self, model: &OnnxModel) -> Result<Lowered, LowerError> {
        for output in &model.outputs {
            if let Some(Known::Absent(what)) = self.known.get(&output.name) {
                // Exporters list the running statistics of normalisations among the results.
                self.ledger.warnings.push(format!("graph output `{}` is left out: it is {what}", shown(&output.name)));
                continue;
            }
            // To read a result is to read an input: an identity of it, without the node.
            let reader = Node { inputs: vec![output.name.clone()], ..nameless() };
            let value = match self.scope(&reader) {
                Some(mut scope) => scope.value(0),
                None => Err(Reason::Missing { slot: 0 }),
            };
            let value =
                value.map_err(|reason| LowerError::Output { name: output.name.clone(), reason: Box::new(reason) })?;
            self.graph.outputs.push(Output { name: output.name.clone(), value });
        }
        if self.graph.outputs.is_empty() {
            return Err(LowerError::NoOutputs);
        }
        self.graph.averages = std::mem::take(&mut self.ledger.averages);
        self.part();
        let graph = prune::prune(&self.graph)?;
        let weights = kept(&graph, self.ledger.weights);
        let mut warnings = self.ledger.warnings;
        warnings.extend(weight::warning(weights.iter().filter(|w| w.trainable).map(|w| w.name.as_str())));
        Ok(Lowered { graph, weights, warnings })
    }
}

/// The initial values that a graph reads.
pub fn kept(graph: &Graph, mut weights: Vec<Weight>) -> Vec<Weight> {
    let name = |id: NodeId| match &graph.node(id).op {
        Op::Parameter(o) => Some(o.name.as_str()),
        Op::State(o) => Some(o.name.as_str()),
        _ => None,
    };
    let names: HashSet<&str> = graph.ids().filter_map(name).collect();
    weights.retain(|w| names.contains(w.name.as_str()));
    weights
}

fn nameless() -> Node {
    Node {
        name: String::new(),
        op_type: String::new(),
        domain: String::new(),
        overload: String::new(),
        inputs: Vec::new(),
        outputs: Vec::new(),
        attributes: Vec::new(),
        module: String::new(),
        metadata: Vec::new(),
    }
}
