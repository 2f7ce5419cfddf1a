//! The document `models/NAME.json` as torch 2.15 writes it (schema version 8), limited to the fields that pipec reads.
//!
//! Arguments are tagged unions with one key; arguments equal to their default are omitted. Field names are those of the
//! file.

use serde::de::{IgnoredAny, Visitor};
use serde::{Deserialize, Deserializer};
use std::collections::HashMap;
use std::fmt;

#[derive(Debug, Deserialize)]
pub struct ExportedProgram {
    pub graph_module: GraphModule,
    pub schema_version: SchemaVersion,
    #[serde(default)]
    pub torch_version: String,
    /// Python conditions on input sizes.
    #[serde(default)]
    pub guards_code: Vec<String>,
}

#[derive(Debug, Deserialize)]
pub struct SchemaVersion {
    /// Incremented by incompatible changes.
    pub major: i64,
}

#[derive(Debug, Deserialize)]
pub struct GraphModule {
    pub graph: Graph,
    /// The roles of its inputs and outputs.
    pub signature: Signature,
    /// The called modules; the first is the model.
    #[serde(default)]
    pub module_call_graph: Vec<serde_json::Value>,
}

impl GraphModule {
    /// The place of the output `loss`, if the model returns a dictionary or a dataclass of tensors and it is not the first.
    pub fn loss_output(&self) -> Option<usize> {
        let spec = self.module_call_graph.first()?.get("signature")?.get("out_spec")?.as_str()?;
        let tree: serde_json::Value = serde_json::from_str(spec).ok()?;
        let outputs = tree.get(1)?;
        let keys: Vec<String> = serde_json::from_str(outputs.get("context")?.as_str()?).ok()?;
        let is_tensor = |child: &serde_json::Value| child.get("type").is_some_and(serde_json::Value::is_null);
        let all_tensors = outputs.get("children_spec")?.as_array()?.iter().all(is_tensor);
        keys.iter().position(|key| key == "loss").filter(|at| *at > 0 && all_tensors)
    }
}

/// A graph in single-assignment form, with nodes in topological order.
#[derive(Debug, Deserialize)]
pub struct Graph {
    pub inputs: Vec<Argument>,
    pub outputs: Vec<Argument>,
    pub nodes: Vec<Node>,
    /// Tensor metadata by value name.
    #[serde(default)]
    pub tensor_values: HashMap<String, TensorMeta>,
}

#[derive(Debug, Deserialize)]
pub struct Node {
    /// For example `torch.ops.aten.conv2d.default`.
    pub target: String,
    pub inputs: Vec<NamedArgument>,
    pub outputs: Vec<Argument>,
    #[serde(default)]
    pub metadata: Metadata,
    /// Missing in files of earlier versions.
    #[serde(default)]
    pub name: Option<String>,
    /// The region the node was inlined from.
    #[serde(skip)]
    pub region: Region,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Region {
    /// Under `no_grad`.
    pub no_gradients: bool,
    /// Under autocast: the file's element types apply, whatever the operands have.
    pub autocast: bool,
}

/// A node's origin, reduced from the long texts of the file while it is read.
#[derive(Debug, Default, Deserialize)]
pub struct Metadata {
    /// Path of the innermost module; the file has `key,path,type;key,path,type;…`, outermost first.
    #[serde(default, rename = "nn_module_stack", deserialize_with = "innermost")]
    pub module: Box<str>,
    /// The innermost Python line, `modeling_llama.py:459`; empty if the exporter kept none.
    #[serde(default, rename = "stack_trace", deserialize_with = "line")]
    pub line: Box<str>,
    /// The calling Python function and its type: `detach_1;method_descriptor.detach`.
    #[serde(default)]
    pub torch_fn: Option<Box<str>>,
}

/// Deserializes a string or null, and keeps the result of the function.
struct MapString(fn(&str) -> Box<str>);

impl<'de> Visitor<'de> for MapString {
    type Value = Box<str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text")
    }

    fn visit_str<E>(self, text: &str) -> Result<Box<str>, E> {
        Ok((self.0)(text))
    }

    fn visit_unit<E>(self) -> Result<Box<str>, E> {
        Ok(Box::default())
    }
}

fn innermost<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Box<str>, D::Error> {
    deserializer.deserialize_any(MapString(|stack| {
        let last = stack.rsplit(';').next().unwrap_or_default();
        let path = last.split(',').nth(1).unwrap_or_default();
        // A strict export names the root module as its function does: `L['self'].layer`.
        let inner = path.strip_prefix("L['").and_then(|rest| rest.split_once("']"));
        inner.map_or(path, |(_, rest)| rest.strip_prefix('.').unwrap_or(rest)).into()
    }))
}

fn line<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Box<str>, D::Error> {
    deserializer.deserialize_any(MapString(|trace| {
        let innermost = trace.lines().rev().find_map(|line| line.trim().strip_prefix("File \""));
        let Some((file, rest)) = innermost.and_then(|line| line.split_once("\", line ")) else { return Box::default() };
        let number: String = rest.chars().take_while(char::is_ascii_digit).collect();
        let name = file.rsplit(['/', '\\']).next().unwrap_or(file);
        if number.is_empty() { Box::default() } else { format!("{name}:{number}").into() }
    }))
}

#[derive(Debug, Deserialize)]
pub struct NamedArgument {
    /// Empty for higher-order operators.
    pub name: String,
    pub arg: Argument,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Argument {
    AsNone(IgnoredAny),
    AsTensor(Name),
    AsTensors(Vec<Name>),
    AsInt(i64),
    AsInts(Vec<i64>),
    AsFloat(Float),
    AsFloats(Vec<Float>),
    AsString(String),
    AsStrings(Vec<String>),
    AsSymInt(SymArgument),
    AsSymInts(Vec<SymArgument>),
    AsScalarType(i64),
    AsMemoryFormat(IgnoredAny),
    AsLayout(IgnoredAny),
    AsDevice(IgnoredAny),
    AsBool(bool),
    AsBools(Vec<bool>),
    AsSymBool(Numbered),
    AsSymBools(Vec<Numbered>),
    AsGraph(Box<Subgraph>),
    AsOptionalTensors(Vec<OptionalTensor>),
    AsCustomObj(IgnoredAny),
    AsOperator(IgnoredAny),
    AsSymFloat(Numbered),
    AsSymFloats(Vec<Numbered>),
    AsOptionalTensor(OptionalTensor),
    AsComplex(IgnoredAny),
    AsIntLists(IgnoredAny),
    AsNestedTensors(IgnoredAny),
    AsStringToArgument(IgnoredAny),
    AsIntsLists(IgnoredAny),
}

#[derive(Clone, Debug, Deserialize)]
pub struct Name {
    pub name: String,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum OptionalTensor {
    AsTensor(Name),
    AsNone(IgnoredAny),
}

/// A float; JSON has no infinities or NaN, so the file writes them as words.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
#[allow(missing_docs)]
pub enum Float {
    Number(f64),
    Word(String),
}

impl Float {
    /// The value; `None` for an unknown word.
    pub fn value(&self) -> Option<f64> {
        match self {
            Float::Number(value) => Some(*value),
            Float::Word(word) => match word.as_str() {
                "Infinity" | "inf" => Some(f64::INFINITY),
                "-Infinity" | "-inf" => Some(f64::NEG_INFINITY),
                "NaN" | "nan" => Some(f64::NAN),
                _ => None,
            },
        }
    }
}

/// A size argument: a number or a value name.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum SymArgument {
    AsName(String),
    AsInt(i64),
}

/// A symbolic number or boolean: a value name, or a literal, which is ignored.
#[derive(Clone, Debug, Deserialize)]
pub struct Numbered {
    #[serde(default)]
    pub as_name: Option<String>,
}

#[derive(Debug, Deserialize)]
pub struct Subgraph {
    pub graph: Graph,
}

/// A dimension of a tensor.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum SymInt {
    AsExpr(Expression),
    AsInt(i64),
}

impl SymInt {
    /// The value, unless symbolic.
    pub fn known(&self) -> Option<i64> {
        match self {
            SymInt::AsInt(value) => Some(*value),
            SymInt::AsExpr(_) => None,
        }
    }
}

#[derive(Clone, Debug, Deserialize)]
pub struct Expression {
    pub expr_str: String,
}

#[derive(Clone, Debug, Deserialize)]
pub struct TensorMeta {
    pub dtype: i64,
    pub sizes: Vec<SymInt>,
    /// In elements.
    #[serde(default)]
    pub strides: Vec<SymInt>,
    /// Index of the first element.
    #[serde(default)]
    pub storage_offset: Option<SymInt>,
    /// 7 is strided.
    #[serde(default)]
    pub layout: Option<i64>,
    #[serde(default)]
    pub requires_grad: Option<bool>,
}

/// The roles of the graph's inputs and outputs.
#[derive(Debug, Deserialize)]
pub struct Signature {
    pub input_specs: Vec<InputSpec>,
    pub output_specs: Vec<OutputSpec>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum InputSpec {
    UserInput { arg: Argument },
    Parameter { arg: Name, parameter_name: String },
    Buffer { arg: Name, buffer_name: String },
    TensorConstant { arg: Name, tensor_constant_name: String },
    CustomObj { arg: Name },
    Token { arg: Name },
    ConstantInput { name: String },
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum OutputSpec {
    UserOutput { arg: Argument },
    LossOutput { arg: Name },
    BufferMutation { arg: Name, buffer_name: String },
    ParameterMutation { arg: Name, parameter_name: String },
    GradientToParameter { arg: Name, parameter_name: String },
    GradientToUserInput { arg: Name, user_input_name: String },
    UserInputMutation { arg: Name, user_input_name: String },
    Token(IgnoredAny),
}

/// The document `data/weights/NAME_weights_config.json`.
#[derive(Debug, Default, Deserialize)]
pub struct Weights {
    /// Weights by module name.
    pub config: HashMap<String, Payload>,
}

#[derive(Debug, Deserialize)]
pub struct Payload {
    /// The entry, relative to the document's folder.
    pub path_name: String,
    #[serde(default)]
    pub use_pickle: bool,
    #[serde(default)]
    pub tensor_meta: Option<TensorMeta>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_metadata_has_innermost_module_and_line() {
        let of = |stack: &str, trace: &str| -> (String, String) {
            let text = serde_json::json!({"nn_module_stack": stack, "stack_trace": trace}).to_string();
            let metadata: Metadata = serde_json::from_str(&text).unwrap();
            (metadata.module.into(), metadata.line.into())
        };
        let trace =
            "File \"/a/outer.py\", line 4, in forward\n    x()\n  File \"/a/b/inner.py\", line 382, in run\n    y";
        let module_and_line = of("L__self__,,a.Model;L__self__model,model.layers.0,a.Layer", trace);
        assert_eq!(module_and_line, ("model.layers.0".to_string(), "inner.py:382".to_string()));
        assert_eq!(of("L__self__,L['self'].a.b,c", "nonsense"), ("a.b".to_string(), String::new()));
        let none: Metadata = serde_json::from_str("{\"stack_trace\": null}").unwrap();
        assert!(none.line.is_empty() && none.module.is_empty() && none.torch_fn.is_none());
    }
}
