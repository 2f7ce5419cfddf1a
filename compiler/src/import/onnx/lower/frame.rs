//! Name scopes (frames) during lowering.
//!
//! The main graph has a frame. So do each function call, branch and loop iteration while their nodes are lowered. A
//! subgraph sees the names of enclosing frames; a function body sees only its own.

use super::{Known, LowerReason};
use crate::import::onnx::model::Node;
use crate::import::onnx::proto::AttributeProto;
use crate::op::Value;
use prost::Message;
use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;

/// Maximum nesting depth of calls and subgraphs.
const DEPTH: usize = 64;

/// Maximum total number of nodes after loop unrolling.
pub const UNROLLED: u64 = 1 << 16;

/// Maximum total bytes of names and attributes copied during inlining and unrolling.
const COPIED: u64 = 1 << 30;

/// The name scope of one list of nodes.
#[derive(Default)]
pub struct Frame {
    pub opset: i64,
    /// Prefix of node names, such as `block.1/`.
    pub prefix: String,
    pub module: String,
    /// Attributes of the function call, which nodes of the body may refer to.
    pub bindings: Option<Rc<[AttributeProto]>>,
    /// If true, names are also looked up in the enclosing frame.
    pub sees_outer: bool,
    /// True inside a loop iteration.
    pub unrolled: bool,
    /// Tensors by name; tensors of nodes that failed to lower are missing.
    pub known: HashMap<String, Known>,
    /// Function parameters omitted by the call.
    pub left_out: HashSet<String>,
    pub constants: HashMap<String, Value>,
}

/// The stack of frames, and the unrolling and copying budgets used so far.
pub struct Frames {
    stack: Vec<Frame>,
    written: u64,
    copied: u64,
}

impl Frames {
    pub fn new(opset: i64) -> Frames {
        Frames { stack: vec![Frame { opset, ..Frame::default() }], written: 0, copied: 0 }
    }

    pub fn top(&self) -> &Frame {
        self.stack.last().expect("the main graph's frame is never left")
    }

    pub fn top_mut(&mut self) -> &mut Frame {
        self.stack.last_mut().expect("the main graph's frame is never left")
    }

    pub fn enter(&mut self, frame: Frame) -> Result<(), LowerReason> {
        if self.stack.len() >= DEPTH {
            return Err(LowerReason::Unsupported(format!("functions and subgraphs nested deeper than {DEPTH}")));
        }
        self.stack.push(frame);
        Ok(())
    }

    /// Leaves the innermost frame, which must not be the main graph's.
    pub fn leave(&mut self) -> Frame {
        debug_assert!(self.stack.len() > 1);
        self.stack.pop().expect("the main graph's frame is never left")
    }

    /// A new frame nested in the innermost one, for its node `name`; sees the enclosing names.
    pub fn within(&self, name: &str, module: &str, unrolled: bool) -> Frame {
        let top = self.top();
        Frame {
            opset: top.opset,
            prefix: format!("{}{name}/", top.prefix),
            module: if module.is_empty() { top.module.clone() } else { module.to_string() },
            bindings: top.bindings.clone(),
            sees_outer: true,
            unrolled: top.unrolled || unrolled,
            ..Frame::default()
        }
    }

    /// Looks up a name: `None` if it is unknown or failed to lower, `Some(None)` if it was omitted.
    pub fn find(&self, name: &str) -> Option<Option<&Known>> {
        if name.is_empty() {
            return Some(None);
        }
        for frame in self.stack.iter().rev() {
            if let Some(known) = frame.known.get(name) {
                return Some(Some(known));
            }
            if frame.left_out.contains(name) {
                return Some(None);
            }
            if !frame.sees_outer {
                break;
            }
        }
        None
    }

    /// Charges nodes to the loop unrolling budget; free outside loops.
    pub fn spend(&mut self, nodes: u64) -> Result<(), LowerReason> {
        if !self.top().unrolled {
            return Ok(());
        }
        self.written = self.written.saturating_add(nodes);
        if self.written > UNROLLED {
            return Err(LowerReason::Unsupported(format!("a loop with more than {UNROLLED} nodes when unrolled")));
        }
        Ok(())
    }

    /// Charges one inlined or unrolled node and its name.
    pub fn written(&mut self, node: &Node) -> Result<(), LowerReason> {
        if self.stack.len() > 1 {
            self.copy(self.top().prefix.len() + node.name.len())?;
        }
        self.spend(1)
    }

    pub fn copy(&mut self, bytes: usize) -> Result<(), LowerReason> {
        self.copied = self.copied.saturating_add(bytes as u64);
        if self.copied > COPIED {
            return Err(LowerReason::Unsupported(format!(
                "unrolling more than {COPIED} bytes of names and attributes"
            )));
        }
        Ok(())
    }

    /// Replaces attribute references by the attributes of the call. A reference to an attribute that the call does not
    /// give is dropped.
    pub fn resolved<'n>(&mut self, node: &'n Node) -> Result<Cow<'n, Node>, LowerReason> {
        let Some(bindings) = self.top().bindings.clone() else { return Ok(Cow::Borrowed(node)) };
        if !node.attributes.iter().any(|a| !a.ref_attr_name().is_empty()) {
            return Ok(Cow::Borrowed(node));
        }
        let mut attributes = Vec::with_capacity(node.attributes.len());
        for attribute in &node.attributes {
            let passed_attribute = match attribute.ref_attr_name() {
                "" => Some(attribute),
                outer => bindings.iter().find(|binding| binding.name() == outer),
            };
            if let Some(passed_attribute) = passed_attribute {
                self.copy(passed_attribute.encoded_len())?;
                attributes.push(AttributeProto { name: attribute.name.clone(), ..passed_attribute.clone() });
            }
        }
        let Node { name, op_type, domain, overload, inputs, outputs, module, .. } = node;
        Ok(Cow::Owned(Node {
            name: name.clone(),
            op_type: op_type.clone(),
            domain: domain.clone(),
            overload: overload.clone(),
            inputs: inputs.clone(),
            outputs: outputs.clone(),
            attributes,
            module: module.clone(),
            metadata: Vec::new(),
        }))
    }
}
