//! The document `models/NAME.json`, as torch 2.15 writes it (schema version 8): only what pipec reads of it.
//!
//! Arguments are tagged unions with one key. Arguments that equal their default are left out. Field names are those of
//! the file.

use serde::Deserialize;
use serde::de::IgnoredAny;
use std::collections::HashMap;

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
}

/// Where a node comes from.
#[derive(Debug, Default, Deserialize)]
pub struct Metadata {
    /// `key,path,type;key,path,type;…`, outermost first.
    #[serde(default)]
    pub nn_module_stack: Option<String>,
    /// The calls that led to it, as Python tells them, innermost last; where the exporter keeps them.
    #[serde(default)]
    pub stack_trace: Option<String>,
    /// The function of Python that called it, and its kind: `detach_1;method_descriptor.detach`.
    #[serde(default)]
    pub torch_fn: Option<String>,
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
    AsSymBool(IgnoredAny),
    AsSymBools(IgnoredAny),
    AsGraph(Box<Subgraph>),
    AsOptionalTensors(Vec<OptionalTensor>),
    AsCustomObj(IgnoredAny),
    AsOperator(IgnoredAny),
    AsSymFloat(IgnoredAny),
    AsSymFloats(IgnoredAny),
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
