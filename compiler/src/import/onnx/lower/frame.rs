//! Frames: where the names of a list of nodes mean something.
//!
//! The main graph has one, and so has every call of a function, every branch and every turn of a loop while its nodes
//! are lowered. A subgraph sees the names around it; a function sees its own alone.

use super::{Known, LowerReason};
use crate::import::onnx::model::Node;
use crate::import::onnx::proto::AttributeProto;
use crate::op::Value;
use prost::Message;
use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;

/// How deep calls and subgraphs may nest.
const DEPTH: usize = 64;

/// How many nodes loops may be when every turn is written out.
pub const UNROLLED: u64 = 1 << 16;

/// How many bytes of names and attributes may be copied while functions and subgraphs are written out.
const COPIED: u64 = 1 << 30;

/// What the names of one list of nodes mean.
#[derive(Default)]
pub struct Frame {
    /// The version of the standard operator set.
    pub opset: i64,
    /// What stands before the names of its nodes, such as `block.1/`.
    pub prefix: String,
    /// The module of nodes that name none.
    pub module: String,
    /// The attributes of the call, which nodes of a function may refer to.
    pub bindings: Option<Rc<[AttributeProto]>>,
    /// Whether names that it does not have are looked up in the frame around it.
    pub sees_outer: bool,
    /// Whether it is a turn of a loop, or within one.
    pub unrolled: bool,
    /// What is known of each tensor; a broken one is missing.
    pub known: HashMap<String, Known>,
    /// Parameters of a function that its call leaves out.
    pub left_out: HashSet<String>,
    /// Constants that are nodes already, by the name of the tensor.
    pub constants: HashMap<String, Value>,
}

/// The frames from the main graph to where the walk is, and what has been written out on the way.
pub struct Frames {
    stack: Vec<Frame>,
    written: u64,
    copied: u64,
}

impl Frames {
    /// The main graph's frame alone.
    pub fn new(opset: i64) -> Frames {
        Frames { stack: vec![Frame { opset, ..Frame::default() }], written: 0, copied: 0 }
    }

    /// The innermost frame.
    pub fn top(&self) -> &Frame {
        self.stack.last().expect("the main graph's frame is never left")
    }

    /// The same, to write.
    pub fn top_mut(&mut self) -> &mut Frame {
        self.stack.last_mut().expect("the main graph's frame is never left")
    }

    /// Enters a frame.
    pub fn enter(&mut self, frame: Frame) -> Result<(), LowerReason> {
        if self.stack.len() >= DEPTH {
            return Err(LowerReason::Unsupported(format!("a nest of functions and subgraphs deeper than {DEPTH}")));
        }
        self.stack.push(frame);
        Ok(())
    }

    /// Leaves the innermost frame, which is not the main graph's.
    pub fn leave(&mut self) -> Frame {
        debug_assert!(self.stack.len() > 1);
        self.stack.pop().expect("the main graph's frame is never left")
    }

    /// A frame within the innermost one, for a node of it called `name`: the same names are seen.
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

    /// What a name means here: `None` when it is broken or unknown, `Some(None)` when it is left out.
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

    /// Counts work on nodes against the budget of loops.
    pub fn spend(&mut self, nodes: u64) -> Result<(), LowerReason> {
        if !self.top().unrolled {
            return Ok(());
        }
        self.written = self.written.saturating_add(nodes);
        if self.written > UNROLLED {
            return Err(LowerReason::Unsupported(format!(
                "a loop of more than {UNROLLED} nodes when it is written out"
            )));
        }
        Ok(())
    }

    /// Counts a node that is written out once more, with its name.
    pub fn written(&mut self, node: &Node) -> Result<(), LowerReason> {
        if self.stack.len() > 1 {
            self.copy(self.top().prefix.len() + node.name.len())?;
        }
        self.spend(1)
    }

    /// Counts bytes of names and attributes that are copied.
    pub fn copy(&mut self, bytes: usize) -> Result<(), LowerReason> {
        self.copied = self.copied.saturating_add(bytes as u64);
        if self.copied > COPIED {
            return Err(LowerReason::Unsupported(format!(
                "writing out more than {COPIED} bytes of names and attributes"
            )));
        }
        Ok(())
    }

    /// The node with the attributes of the call in place of references to them. A reference to what the call does not
    /// give is an attribute left out.
    pub fn resolved<'n>(&mut self, node: &'n Node) -> Result<Cow<'n, Node>, LowerReason> {
        let Some(bindings) = self.top().bindings.clone() else { return Ok(Cow::Borrowed(node)) };
        if !node.attributes.iter().any(|a| !a.ref_attr_name().is_empty()) {
            return Ok(Cow::Borrowed(node));
        }
        let mut attributes = Vec::with_capacity(node.attributes.len());
        for attribute in &node.attributes {
            let given = match attribute.ref_attr_name() {
                "" => Some(attribute),
                outer => bindings.iter().find(|binding| binding.name() == outer),
            };
            if let Some(given) = given {
                self.copy(given.encoded_len())?;
                attributes.push(AttributeProto { name: attribute.name.clone(), ..given.clone() });
            }
        }
        Ok(Cow::Owned(Node { attributes, ..bare(node) }))
    }
}

/// The node without its attributes.
fn bare(node: &Node) -> Node {
    Node {
        name: node.name.clone(),
        op_type: node.op_type.clone(),
        domain: node.domain.clone(),
        overload: node.overload.clone(),
        inputs: node.inputs.clone(),
        outputs: node.outputs.clone(),
        attributes: Vec::new(),
        module: node.module.clone(),
        metadata: Vec::new(),
    }
}
