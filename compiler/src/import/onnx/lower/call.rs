//! Inlines calls of model-local functions.
//!
//! `import/onnx/function.rs` has already checked recursion and the total inlined size.

use super::frame::Frame;
use super::walk::Walk;
use super::{Known, LowerReason};
use crate::import::onnx::model::{Function, Node};
use crate::text::name::short_name;
use prost::Message;
use std::rc::Rc;

/// Returns the results of a call; `Err(None)` if an error inside it was already reported.
pub fn call(walk: &mut Walk<'_>, node: &Node, function: &Function) -> Result<Vec<Known>, Option<LowerReason>> {
    let arguments = walk.scope(node).ok_or(None)?.inputs;
    if arguments.len() > function.inputs.len() {
        return Err(Some(LowerReason::Inputs(format!(
            "the function `{}` has {} parameters, the call gives {}",
            short_name(&function.name),
            function.inputs.len(),
            arguments.len()
        ))));
    }
    let size = node.attributes.iter().chain(&function.attribute_defaults).map(Message::encoded_len).sum();
    walk.frames.copy(size)?;
    let mut bindings = node.attributes.clone();
    let defaults = function.attribute_defaults.iter();
    bindings.extend(defaults.filter(|d| !node.attributes.iter().any(|a| a.name() == d.name())).cloned());
    let opset = function.opsets.iter().find(|set| set.domain.is_empty()).map(|set| set.version);
    let outer = walk.frames.within(&node.name, &node.module, false);
    let mut frame =
        Frame { opset: opset.unwrap_or(outer.opset), bindings: Some(Rc::from(bindings)), sees_outer: false, ..outer };
    for (at, name) in function.inputs.iter().enumerate() {
        match arguments.get(at).cloned().flatten() {
            Some(known) => {
                frame.known.insert(name.clone(), known);
            }
            None => {
                frame.left_out.insert(name.clone());
            }
        }
    }
    walk.within(frame, |walk| {
        let complete = walk.nodes(&function.nodes)?;
        let result = |name: &String| match walk.frames.find(name) {
            Some(known) => Ok(known.cloned().unwrap_or(Known::Absent("an input that the call omits"))),
            None if complete => {
                Err(Some(LowerReason::Inputs(format!("no node in the function computes `{}`", short_name(name)))))
            }
            None => Err(None),
        };
        function.outputs.iter().map(result).collect()
    })
}
