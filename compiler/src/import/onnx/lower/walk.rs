//! Lowers nodes in order, in the frames of functions and subgraphs.
//!
//! Errors are collected: the outputs of a node that failed to lower stay undefined, and nodes that read them are
//! skipped.

use super::error::Fault;
use super::frame::{Frame, Frames};
use super::{ImportedWeights, Known, LowerReason, Scope, StaticSizes, Weight, weight};
use crate::graph::Graph;
use crate::import::onnx::model::{Function, Node, Roles, Tensor as Source};
use std::collections::HashMap;

/// Domain, name and overload of a function.
pub type Callee = (String, String, String);

/// Returns the outputs of a node; `Err(None)` if an input is undefined because its producer failed.
pub type LowerNode = fn(&mut Walk<'_>, &Node) -> Result<Vec<Known>, Option<LowerReason>>;

/// The state of lowering: the graph so far, and the tensors in scope.
pub struct Walk<'a> {
    pub functions: HashMap<Callee, &'a Function>,
    pub frozen: &'a StaticSizes,
    pub graph: Graph,
    /// Lowers one node, at every depth of functions and subgraphs.
    pub lower_node: LowerNode,
    pub frames: Frames,
    pub ledger: ImportedWeights,
    pub faults: Vec<Fault>,
}

impl Walk<'_> {
    /// Lowers nodes in order. Returns false if any failed; its error is in `faults`.
    pub fn nodes(&mut self, nodes: &[Node]) -> Result<bool, LowerReason> {
        let mut complete = true;
        for node in nodes {
            let node = &*self.frames.resolved(node)?;
            self.frames.written(node)?;
            match (self.lower_node)(self, node) {
                Ok(outputs) => self.name(node, outputs),
                Err(failure) => {
                    complete = false;
                    let name = format!("{}{}", self.frames.top().prefix, node.name);
                    let operator = node.op_type.clone();
                    let module = node.module.clone();
                    let make_fault = |reason| Fault { node: name, operator, module, line: String::new(), reason };
                    self.faults.extend(failure.map(make_fault));
                }
            }
        }
        Ok(complete)
    }

    pub fn within<T>(
        &mut self,
        frame: Frame,
        action: impl FnOnce(&mut Self) -> Result<T, Option<LowerReason>>,
    ) -> Result<T, Option<LowerReason>> {
        self.frames.enter(frame)?;
        let result = action(self);
        self.frames.leave();
        result
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
    pub fn initializers(&mut self, sources: &[Source], nodes: &[Node], roles: &Roles) -> Vec<(String, Known)> {
        let (known, unnumbered) = weight::sort(sources, nodes, roles);
        let mut indices = Vec::with_capacity(unnumbered.len());
        let ImportedWeights { weights, named, .. } = &mut self.ledger;
        for (at, weight) in weights.iter().enumerate().skip(named.len()) {
            named.entry(weight.name.clone()).or_insert(at);
        }
        for mut weight in unnumbered {
            let Some(&at) = self.ledger.named.get(&weight.name) else {
                indices.push(self.ledger.weights.len());
                self.ledger.named.insert(weight.name.clone(), self.ledger.weights.len());
                self.ledger.weights.push(weight);
                continue;
            };
            if is_same_weight(&self.ledger.weights[at], &weight) {
                indices.push(at);
                continue;
            }
            while self.ledger.named.contains_key(&weight.name) {
                weight.name = format!("{}{}", self.frames.top().prefix, weight.name) + "_";
            }
            indices.push(self.ledger.weights.len());
            self.ledger.named.insert(weight.name.clone(), self.ledger.weights.len());
            self.ledger.weights.push(weight);
        }
        let numbered = |known| match known {
            Known::Weight(at) => Known::Weight(indices[at]),
            other => other,
        };
        let mut known: Vec<_> = known.into_iter().map(|(name, known)| (name, numbered(known))).collect();
        known.sort_by(|a, b| a.0.cmp(&b.0));
        let is_float = |known: &Known| matches!(known, Known::Tensor(tensor) if tensor.dtype().is_float());
        let constants = known.iter().filter(|(name, known)| is_float(known) && !weight::made_up(name));
        self.ledger.constants.extend(constants.map(|(name, _)| name.clone()));
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
}

/// True if both are the same bytes of the file.
fn is_same_weight(a: &Weight, b: &Weight) -> bool {
    a.fact == b.fact
        && match (&a.initial, &b.initial) {
            (Ok(a), Ok(b)) => a.bytes().as_ptr() == b.bytes().as_ptr() && a.bytes().len() == b.bytes().len(),
            (Err(a), Err(b)) => a == b,
            _ => false,
        }
}
