//! Lowers the nodes of a model in order: each is folded, evaluated as shape arithmetic, or lowered to core ops.
//!
//! Errors are collected: the outputs of a node that failed to lower stay undefined, and nodes that read them are
//! skipped.

use super::frame::{Frame, Frames};
use super::support::{self, Unsupported};
use super::{
    ImportedWeights, Known, LowerReason, Scope, StaticSizes, Weight, arithmetic, branch, call, flex, fold, prune,
    table, weight,
};
use crate::graph::{AddError, Graph, Origin, Output};
use crate::import::known_inputs::Known as Beyond;
use crate::import::onnx::lower::{loop_scan, opset_upgrade};
use crate::import::onnx::model::{Function, Node, OnnxModel, Tensor as Source};
use crate::import::onnx::name::shown;
use crate::op::{Input, NodeId, Op, Value};
use crate::tensor::Tensor;
use crate::tensor::dim::Dim;
use crate::tensor::fact::Fact;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt;
use thiserror::Error;

/// Maximum number of errors listed in one message; the rest is only counted.
const LISTED: usize = 20;

/// Supported versions of the standard operator set. Newer versions are read with a warning.
const OPSETS: std::ops::RangeInclusive<i64> = 1..=28;

#[derive(Debug)]
pub struct Lowered {
    /// Dead nodes are removed and the nodes renumbered.
    pub graph: Graph,
    pub weights: Vec<Weight>,
    pub warnings: Vec<String>,
}

#[derive(Debug, Error)]
pub enum LowerError {
    #[error("{0}")]
    Unsupported(Unsupported),
    #[error("standard operator set {found} is not supported; {} to {} are", OPSETS.start(), OPSETS.end())]
    Opset { found: i64 },
    #[error("{0}")]
    Nodes(Faults),
    #[error("input `{}` is {expected}, the value given is {found}", shown(name))]
    Given { name: String, expected: Fact, found: Fact },
    #[error("graph output `{}`: {reason}", shown(name))]
    Output { name: String, reason: Box<LowerReason> },
    #[error("the graph has no outputs")]
    NoOutputs,
    /// A node could not be re-added during pruning: a bug in pipec.
    #[error("bug in pipec: {0}")]
    Prune(Box<AddError>),
}

impl From<AddError> for LowerError {
    fn from(error: AddError) -> LowerError {
        LowerError::Prune(Box::new(error))
    }
}

#[derive(Debug)]
pub struct Faults(pub Vec<Fault>);

#[derive(Debug, Error)]
#[error("node `{}` ({}){}: {reason}", shown(node), shown(operator), self.place())]
pub struct Fault {
    pub node: String,
    pub operator: String,
    /// The module of the node; may be empty.
    pub module: String,
    /// Its Python source line; empty if the file does not have it.
    pub line: String,
    pub reason: LowerReason,
}

impl Fault {
    fn place(&self) -> String {
        let module = if self.module.is_empty() { String::new() } else { format!(" in `{}`", shown(&self.module)) };
        let line = if self.line.is_empty() { String::new() } else { format!(", {}", shown(&self.line)) };
        module + &line
    }
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

pub fn check(model: &OnnxModel) -> Result<(), LowerError> {
    match model.opset("") {
        Some(found) if found < *OPSETS.start() => Err(LowerError::Opset { found }),
        _ => support::check(model).map_err(LowerError::Unsupported),
    }
}

/// Lowers a model that passed [`check`]. `inputs` are its input facts, `beyond` is further information about them.
pub fn lower(model: &OnnxModel, inputs: &[Fact], frozen: &StaticSizes, beyond: &Beyond) -> Result<Lowered, LowerError> {
    let opset = model.opset("").unwrap_or(*OPSETS.end());
    let key = |f: &'_ Function| (f.domain.clone(), f.name.clone(), f.overload.clone());
    let mut walk = Walk {
        functions: model.functions.iter().map(|function| (key(function), function)).collect(),
        frozen,
        graph: Graph::new(&model.graph_name),
        frames: Frames::new(opset),
        ledger: ImportedWeights::default(),
        faults: Vec::new(),
    };
    if opset > *OPSETS.end() {
        let newest = OPSETS.end();
        walk.ledger
            .warnings
            .push(format!("standard operator set {opset} is newer than {newest}, the latest supported"));
    }
    let initializers = walk.initializers(&model.initializers, &model.nodes, &model.buffers);
    walk.frames.top_mut().known.extend(initializers);
    for (input, fact) in model.inputs.iter().zip(inputs) {
        let op = Op::Input(Input { name: input.name.clone(), fact: fact.clone() });
        let node = walk.graph.add(op, &[], &Origin::default())?;
        let known = match beyond.values.get(&input.name) {
            Some(tensor) if fits(fact, tensor) => Known::Tensor(tensor.cast(fact.dtype)),
            Some(tensor) => {
                let (name, expected) = (input.name.clone(), fact.clone());
                return Err(LowerError::Given { name, expected, found: Fact::of(tensor.dtype(), tensor.shape()) });
            }
            None => Known::Value(Value { node, output: 0 }),
        };
        if model.optional.contains(&input.name) && beyond.leaves_out(&input.name) {
            walk.frames.top_mut().left_out.insert(input.name.clone());
        } else {
            walk.frames.top_mut().known.insert(input.name.clone(), known);
        }
    }
    // Errors are in `walk.faults`.
    let _whole = walk.nodes(&model.nodes);
    if !walk.faults.is_empty() {
        return Err(LowerError::Nodes(Faults(walk.faults)));
    }
    walk.finish(model)
}

/// True if a value matches an input for some values of its symbols.
fn fits(fact: &Fact, tensor: &Tensor) -> bool {
    let same = |(dim, size): (&Dim, &usize)| dim.known().is_none_or(|known| i64::try_from(*size) == Ok(known));
    fact.rank() == tensor.shape().len() && fact.shape.iter().zip(tensor.shape()).all(same)
}

/// Domain, name and overload of a function.
type Callee = (String, String, String);

pub struct Walk<'a> {
    functions: HashMap<Callee, &'a Function>,
    frozen: &'a StaticSizes,
    graph: Graph,
    pub frames: Frames,
    pub ledger: ImportedWeights,
    pub faults: Vec<Fault>,
}

impl Walk<'_> {
    /// Lowers nodes in order. Returns false if any failed; its error is in `faults`.
    pub fn nodes(&mut self, nodes: &[Node]) -> Result<bool, LowerReason> {
        let mut whole = true;
        for node in nodes {
            let node = &*self.frames.resolved(node)?;
            self.frames.written(node)?;
            match self.node(node) {
                Ok(outputs) => self.name(node, outputs),
                Err(failure) => {
                    whole = false;
                    let name = format!("{}{}", self.frames.top().prefix, node.name);
                    let operator = node.op_type.clone();
                    let module = node.module.clone();
                    let fault = |reason| Fault { node: name, operator, module, line: String::new(), reason };
                    self.faults.extend(failure.map(fault));
                }
            }
        }
        Ok(whole)
    }

    pub fn within<T>(
        &mut self,
        frame: Frame,
        work: impl FnOnce(&mut Self) -> Result<T, Option<LowerReason>>,
    ) -> Result<T, Option<LowerReason>> {
        self.frames.enter(frame)?;
        let result = work(self);
        self.frames.leave();
        result
    }

    /// Lowers one node; `Err(None)` if an input is undefined because its producer failed.
    fn node(&mut self, node: &Node) -> Result<Vec<Known>, Option<LowerReason>> {
        if !self.functions.is_empty() {
            let key = (node.domain.clone(), node.op_type.clone(), node.overload.clone());
            if let Some(function) = self.functions.get(&key) {
                return call::call(self, node, function);
            }
        }
        let standard = node.domain.is_empty();
        match node.op_type.as_str() {
            "If" if standard => return branch::branch(self, node),
            "Loop" if standard => return loop_scan::repeat(self, node),
            "Scan" if standard => return loop_scan::scan(self, node),
            _ if flex::is_changed(node) => return flex::flex(self, node),
            _ => {}
        }
        let lower = table::find_in(&node.domain, &node.op_type);
        let lower =
            lower.ok_or_else(|| Some(LowerReason::Unsupported(format!("the operator {}", shown(&node.op_type)))))?;
        let old = standard && self.frames.top().opset < opset_upgrade::MODERN;
        let translated = if old { opset_upgrade::node(node)? } else { None };
        let node = translated.as_ref().unwrap_or(node);
        let mut scope = self.scope(node).ok_or(None)?;
        if old {
            opset_upgrade::inputs(&mut scope)?;
        }
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

    /// The scope for lowering a node; `None` if an input is undefined because its producer failed.
    pub fn scope<'s>(&'s mut self, node: &'s Node) -> Option<Scope<'s>> {
        let known = |name: &String| self.frames.find(name).map(|known| known.cloned());
        let inputs = node.inputs.iter().map(known).collect::<Option<Vec<_>>>()?;
        let Frame { opset, prefix, module, constants, .. } = self.frames.top_mut();
        Some(Scope {
            node,
            prefix,
            module,
            opset: *opset,
            inputs,
            frozen: self.frozen,
            graph: &mut self.graph,
            constants,
            ledger: &mut self.ledger,
        })
    }

    /// Classifies initializers as constants and weights. An initializer read again, in another loop iteration, is the
    /// same weight.
    pub fn initializers(
        &mut self,
        sources: &[Source],
        nodes: &[Node],
        buffers: &BTreeSet<String>,
    ) -> Vec<(String, Known)> {
        let (known, found) = weight::sort(sources, nodes, buffers);
        let mut places = Vec::with_capacity(found.len());
        let ImportedWeights { weights, named, .. } = &mut self.ledger;
        for (at, weight) in weights.iter().enumerate().skip(named.len()) {
            named.entry(weight.name.clone()).or_insert(at);
        }
        for mut weight in found {
            let Some(&at) = self.ledger.named.get(&weight.name) else {
                places.push(self.ledger.weights.len());
                self.ledger.named.insert(weight.name.clone(), self.ledger.weights.len());
                self.ledger.weights.push(weight);
                continue;
            };
            if same(&self.ledger.weights[at], &weight) {
                places.push(at);
                continue;
            }
            while self.ledger.named.contains_key(&weight.name) {
                weight.name = format!("{}{}", self.frames.top().prefix, weight.name) + "_";
            }
            places.push(self.ledger.weights.len());
            self.ledger.named.insert(weight.name.clone(), self.ledger.weights.len());
            self.ledger.weights.push(weight);
        }
        let placed = |known| match known {
            Known::Weight(at) => Known::Weight(places[at]),
            other => other,
        };
        let mut known: Vec<_> = known.into_iter().map(|(name, known)| (name, placed(known))).collect();
        known.sort_by(|a, b| a.0.cmp(&b.0));
        known
    }

    fn name(&mut self, node: &Node, outputs: Vec<Known>) {
        let mut outputs = outputs.into_iter();
        for name in &node.outputs {
            let known = outputs.next().unwrap_or(Known::Absent("an output that its operator does not have"));
            if !name.is_empty() {
                self.frames.top_mut().known.insert(name.clone(), known);
            }
        }
    }

    /// Exporters that deduplicate equal initial values may use one initializer both as a bias and as a running mean.
    /// These diverge in training, so they are separated and the state gets a new name.
    fn part(&mut self) {
        let mut parted = Vec::new();
        for weight in self.ledger.weights.iter_mut().filter(|w| w.parameter.is_some()) {
            let Some(state) = weight.state.take() else { continue };
            let mut name = format!("{}.running", weight.name);
            while self.frames.find(&name).is_some() {
                name.push('_');
            }
            if let Op::State(op) = &mut self.graph.node_mut(state.node).op {
                op.name.clone_from(&name);
            }
            parted.push(Weight { name, trainable: false, parameter: None, state: Some(state), ..weight.clone() });
        }
        if let Some(first) = parted.first() {
            self.ledger.warnings.push(format!(
                "the exporter merged {} tensors as parameter and running statistic, because they start equal; the \
                 statistics are now separate, starting with `{}`",
                parted.len(),
                shown(&first.name)
            ));
        }
        self.ledger.weights.extend(parted);
    }

    fn finish(mut self, model: &OnnxModel) -> Result<Lowered, LowerError> {
        for output in &model.outputs {
            if let Some(Some(Known::Absent(what))) = self.frames.find(&output.name) {
                // Exporters list the running statistics of normalisations among the graph outputs.
                self.ledger.warnings.push(format!("graph output `{}` is dropped: it is {what}", shown(&output.name)));
                continue;
            }
            // Graph outputs are read like the inputs of a node.
            let reader = Node { inputs: vec![output.name.clone()], ..nameless() };
            let value = match self.scope(&reader) {
                Some(mut scope) => scope.value(0),
                None => Err(LowerReason::Missing { slot: 0 }),
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

/// True if both are the same bytes of the file.
fn same(a: &Weight, b: &Weight) -> bool {
    a.fact == b.fact
        && match (&a.initial, &b.initial) {
            (Ok(a), Ok(b)) => a.bytes().as_ptr() == b.bytes().as_ptr() && a.bytes().len() == b.bytes().len(),
            (Err(a), Err(b)) => a == b,
            _ => false,
        }
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
