//! The document `models/NAME.json`, as torch 2.15 writes it (schema version 8): only what pipec reads of it.
//!
//! Arguments are tagged unions with one key. Arguments that equal their default are left out. Field names are those of
//! the file.

use serde::de::{IgnoredAny, Visitor};
use serde::{Deserialize, Deserializer};
use std::collections::HashMap;
use std::fmt;

/// The whole document.
#[derive(Debug, Deserialize)]
pub struct ExportedProgram {
    /// The graph and its signature.
    pub graph_module: GraphModule,
    /// The version of this format.
    pub schema_version: SchemaVersion,
    /// The version of PyTorch.
    #[serde(default)]
    pub torch_version: String,
    /// What must hold of the sizes of inputs, as Python.
    #[serde(default)]
    pub guards_code: Vec<String>,
}

/// The version of the format.
#[derive(Debug, Deserialize)]
pub struct SchemaVersion {
    /// Changes when old readers would misunderstand.
    pub major: i64,
}

/// A graph with its signature.
#[derive(Debug, Deserialize)]
pub struct GraphModule {
    /// The graph.
    pub graph: Graph,
    /// What its inputs and outputs mean.
    pub signature: Signature,
}

/// A graph in single assignment; nodes are in order.
#[derive(Debug, Deserialize)]
pub struct Graph {
    /// Placeholders.
    pub inputs: Vec<Argument>,
    /// Results.
    pub outputs: Vec<Argument>,
    /// Nodes.
    pub nodes: Vec<Node>,
    /// Facts of tensors by name.
    #[serde(default)]
    pub tensor_values: HashMap<String, TensorMeta>,
}

/// One call of an operator.
#[derive(Debug, Deserialize)]
pub struct Node {
    /// `torch.ops.aten.conv2d.default`
    pub target: String,
    /// What it is given.
    pub inputs: Vec<NamedArgument>,
    /// What it makes.
    pub outputs: Vec<Argument>,
    /// Where it comes from.
    #[serde(default)]
    pub metadata: Metadata,
    /// Its name; files of earlier versions have none.
    #[serde(default)]
    pub name: Option<String>,
    /// The region that it stands in.
    #[serde(skip)]
    pub region: Region,
}

/// What holds for all nodes of a part of the program.
#[derive(Clone, Copy, Debug, Default)]
pub struct Region {
    /// No gradient passes.
    pub no_gradients: bool,
    /// Operators compute in the element types that the file says, whatever their operands have.
    pub autocast: bool,
}

/// Where a node comes from: of the long texts of the file what is told of them.
#[derive(Debug, Default, Deserialize)]
pub struct Metadata {
    /// The path of the innermost module; the file has `key,path,type;key,path,type;…`, outermost first.
    #[serde(default, rename = "nn_module_stack", deserialize_with = "innermost")]
    pub module: Box<str>,
    /// The innermost line of Python, `modeling_llama.py:459`; empty where the exporter kept none.
    #[serde(default, rename = "stack_trace", deserialize_with = "line")]
    pub line: Box<str>,
    /// The function of Python that called it, and its kind: `detach_1;method_descriptor.detach`.
    #[serde(default)]
    pub torch_fn: Option<Box<str>>,
}

/// Reads a text, or null, and keeps what `told` makes of it.
struct Told(fn(&str) -> Box<str>);

impl<'de> Visitor<'de> for Told {
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
    deserializer.deserialize_any(Told(|stack| {
        let last = stack.rsplit(';').next().unwrap_or_default();
        let path = last.split(',').nth(1).unwrap_or_default();
        // A strict export names the module itself as its function does: `L['self'].layer`.
        let inner = path.strip_prefix("L['").and_then(|rest| rest.split_once("']"));
        inner.map_or(path, |(_, rest)| rest.strip_prefix('.').unwrap_or(rest)).into()
    }))
}

fn line<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Box<str>, D::Error> {
    deserializer.deserialize_any(Told(|trace| {
        let innermost = trace.lines().rev().find_map(|line| line.trim().strip_prefix("File \""));
        let Some((file, rest)) = innermost.and_then(|line| line.split_once("\", line ")) else { return Box::default() };
        let number: String = rest.chars().take_while(char::is_ascii_digit).collect();
        let name = file.rsplit(['/', '\\']).next().unwrap_or(file);
        if number.is_empty() { Box::default() } else { format!("{name}:{number}").into() }
    }))
}

/// An argument under the name that the operator has for it.
#[derive(Debug, Deserialize)]
pub struct NamedArgument {
    /// The name; empty for higher-order operators.
    pub name: String,
    /// The argument.
    pub arg: Argument,
}

/// An argument or a result.
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

/// A reference by name.
#[derive(Clone, Debug, Deserialize)]
pub struct Name {
    /// The name.
    pub name: String,
}

/// A tensor or nothing.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum OptionalTensor {
    AsTensor(Name),
    AsNone(IgnoredAny),
}

/// A number of a file whose JSON has no infinities: those are words.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
#[allow(missing_docs)]
pub enum Float {
    Number(f64),
    Word(String),
}

impl Float {
    /// The number.
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

/// A size as an argument: a number or the name of a value.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum SymArgument {
    AsName(String),
    AsInt(i64),
}

/// A number or a truth as an argument: a value by its name, or itself.
#[derive(Clone, Debug, Deserialize)]
pub struct Numbered {
    /// The name of a value.
    #[serde(default)]
    pub as_name: Option<String>,
}

/// A graph as an argument of a higher-order operator.
#[derive(Debug, Deserialize)]
pub struct Subgraph {
    /// The graph.
    pub graph: Graph,
}

/// A size of a tensor.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum SymInt {
    AsExpr(Expression),
    AsInt(i64),
}

impl SymInt {
    /// The number, when there is no symbol.
    pub fn known(&self) -> Option<i64> {
        match self {
            SymInt::AsInt(value) => Some(*value),
            SymInt::AsExpr(_) => None,
        }
    }
}

/// A symbolic size.
#[derive(Clone, Debug, Deserialize)]
pub struct Expression {
    /// Its text.
    pub expr_str: String,
}

/// Type, shape and place of a tensor.
#[derive(Clone, Debug, Deserialize)]
pub struct TensorMeta {
    /// Element type code.
    pub dtype: i64,
    /// Shape.
    pub sizes: Vec<SymInt>,
    /// Elements between neighbours along each axis.
    #[serde(default)]
    pub strides: Vec<SymInt>,
    /// Elements before the first.
    #[serde(default)]
    pub storage_offset: Option<SymInt>,
    /// 7 is strided.
    #[serde(default)]
    pub layout: Option<i64>,
    /// Whether a gradient is wanted.
    #[serde(default)]
    pub requires_grad: Option<bool>,
}

/// What the inputs and outputs of the graph mean.
#[derive(Debug, Deserialize)]
pub struct Signature {
    /// Inputs in order.
    pub input_specs: Vec<InputSpec>,
    /// Outputs in order.
    pub output_specs: Vec<OutputSpec>,
}

/// What an input means.
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

/// What an output means.
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
    /// Weights by their names in the module.
    pub config: HashMap<String, Payload>,
}

/// Where a weight is.
#[derive(Debug, Deserialize)]
pub struct Payload {
    /// The entry, within the folder of the document.
    pub path_name: String,
    /// Whether it was pickled.
    #[serde(default)]
    pub use_pickle: bool,
    /// Type, shape and place.
    #[serde(default)]
    pub tensor_meta: Option<TensorMeta>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_tells_its_module_and_its_line() {
        let of = |stack: &str, trace: &str| -> (String, String) {
            let text = serde_json::json!({"nn_module_stack": stack, "stack_trace": trace}).to_string();
            let metadata: Metadata = serde_json::from_str(&text).unwrap();
            (metadata.module.into(), metadata.line.into())
        };
        let trace =
            "File \"/a/outer.py\", line 4, in forward\n    x()\n  File \"/a/b/inner.py\", line 382, in run\n    y";
        let told = of("L__self__,,a.Model;L__self__model,model.layers.0,a.Layer", trace);
        assert_eq!(told, ("model.layers.0".to_string(), "inner.py:382".to_string()));
        assert_eq!(of("L__self__,L['self'].a.b,c", "nonsense"), ("a.b".to_string(), String::new()));
        let none: Metadata = serde_json::from_str("{\"stack_trace\": null}").unwrap();
        assert!(none.line.is_empty() && none.module.is_empty() && none.torch_fn.is_none());
    }
}
