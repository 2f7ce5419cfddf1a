//! A decoded and checked ONNX model in plain types; weights are views into the file.
//!
//! The decoder guarantees:
//!
//! - `nodes` are in topological order. Every tensor is written once, and every tensor read is an input, an initializer
//!   or written by an earlier node. Subgraphs nest at most 16 deep. Model-local functions are not recursive and have a
//!   bounded inlined size.
//! - Node names are unique and not empty. They may contain any characters: print them with `name::display_name`.
//! - Dims of tensors with values are not negative, and the payload has exactly the size that type and dims require.
//!   This holds for initializers and for tensors in attributes, which `payload::tensor` reads.
//! - The standard operator domain is `""`, also where the file has `ai.onnx`.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;

use crate::import::onnx::name::module_path;
use crate::import::onnx::proto::{AttributeProto, NodeProto, StringStringEntryProto};
use crate::import::onnx::warning::Warning;

#[derive(Debug, Clone, Default, PartialEq)]
pub struct OnnxModel {
    /// The version of the file format; 0 if the file has none.
    pub ir_version: i64,
    /// The standard domain is `""`.
    pub opsets: Vec<Opset>,
    /// The exporting tool and its version, such as `pytorch 2.9.0`; may be empty.
    pub producer: String,
    pub graph_name: String,
    /// Graph inputs without an initializer, which the caller must feed.
    pub inputs: Vec<ValueInfo>,
    /// Inputs of an optional type, which the caller may omit.
    pub optional: BTreeSet<String>,
    pub outputs: Vec<ValueInfo>,
    /// Constants and parameters, in file order.
    pub initializers: Vec<Tensor>,
    /// In topological order.
    pub nodes: Vec<Node>,
    /// Declared types of tensors inside the graph: hints that are not checked against the operators.
    pub value_infos: Vec<ValueInfo>,
    /// What the file says about its initializers.
    pub roles: Roles,
    /// Functions that nodes may call by `(domain, op_type, overload)`.
    pub functions: Vec<Function>,
    pub metadata: Vec<(String, String)>,
    pub warnings: Vec<Warning>,
    /// SHA-256 of the model without the values of its initializers; see `fingerprint`.
    pub sha256: [u8; 32],
}

impl Node {
    /// The FX node that PyTorch's exporter made this node from, by the node's metadata.
    pub fn torch_source(&self) -> Option<&str> {
        let source = self.metadata.iter().find(|property| property.key() == "pkg.torch.onnx.fx_node")?;
        Some(source.value())
    }

    /// The arguments of the ATen operator that PyTorch's exporter made this node from, if it is `operator`, by the node's
    /// metadata.
    pub fn torch_arguments(&self, operator: &str) -> Option<Vec<&str>> {
        let (_, call) = self.torch_source()?.split_once("call_function[target=torch.ops.")?;
        let call = call.strip_prefix(operator).filter(|rest| rest.starts_with('.'))?;
        let (_, arguments) = call.split_once("](args = (")?;
        Some(arguments.split_once(')').map_or(arguments, |(list, _)| list).split(", ").collect())
    }
}

/// What a file says about its initializers: the metadata of PyTorch's dynamo exporter, if it has any.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Roles {
    /// Parameters of the source model.
    pub parameters: BTreeSet<String>,
    /// Buffers and constants of the source model.
    pub buffers: BTreeSet<String>,
    /// By initializer that the exporter computed, the tensors that it was computed from.
    pub folded: BTreeMap<String, Vec<String>>,
    /// Scalar constants are nodes, as PyTorch's older exporter writes them, so scalar initializers are parameters.
    pub has_scalar_parameters: bool,
}

impl OnnxModel {
    /// The operator set version imported for `domain` (`""` for the standard domain).
    pub fn opset(&self, domain: &str) -> Option<i64> {
        self.opsets.iter().find(|set| set.domain == domain).map(|set| set.version)
    }

    pub fn sha256_hex(&self) -> String {
        self.sha256.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Opset {
    /// `""` for the standard domain.
    pub domain: String,
    pub version: i64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ValueInfo {
    pub name: String,
    /// Element type code; 0 if the file has none (never for graph inputs).
    pub elem_type: i32,
    /// `None` if even the rank is unknown.
    pub dims: Option<Vec<Dim>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Dim {
    /// Not negative.
    Known(i64),
    /// A symbol, such as `batch`: equal names are equal sizes.
    Param(String),
    Unknown,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    /// May be empty for a tensor in an attribute.
    pub name: String,
    /// Element type code for which `element::known` is true.
    pub elem_type: i32,
    /// Not negative; their product does not overflow.
    pub dims: Vec<i64>,
    pub payload: Payload,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Payload {
    /// Raw little-endian elements in row-major order, as in `raw_data`, with exactly the size that type and dims
    /// require. Not aligned.
    Bytes(Bytes),
    Strings(Vec<Bytes>),
    /// The external file does not exist: the shape is known, the values are not.
    Missing {
        /// The location as written in the model, relative to the model's folder.
        path: String,
    },
}

#[derive(Debug, Clone, Default, PartialEq)]
pub struct Node {
    /// Unique and not empty; the file's name where possible.
    pub name: String,
    pub op_type: String,
    /// `""` for the standard domain.
    pub domain: String,
    /// Selects among functions of the same name; usually `""`.
    pub overload: String,
    /// Names of tensors read; `""` for an omitted optional input.
    pub inputs: Vec<String>,
    /// Names of tensors written; `""` for an omitted optional output.
    pub outputs: Vec<String>,
    /// As in the file, except that tensors have their values in `raw_data`; see `payload::tensor`.
    pub attributes: Vec<AttributeProto>,
    /// The path of the source module, such as `layer1.0.conv1`; empty for the root or if unknown.
    pub module: String,
    pub metadata: Vec<StringStringEntryProto>,
}

impl Node {
    /// Converts a node of the file; `name` is unique within its graph.
    pub fn new(proto: NodeProto, name: String) -> Node {
        let module = module_path(&proto);
        Node {
            name,
            op_type: proto.op_type.unwrap_or_default(),
            domain: proto.domain.unwrap_or_default(),
            overload: proto.overload.unwrap_or_default(),
            inputs: proto.input,
            outputs: proto.output,
            attributes: proto.attribute,
            module,
            metadata: proto.metadata_props,
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct Function {
    pub domain: String,
    /// Calling nodes have it as their `op_type`.
    pub name: String,
    pub overload: String,
    /// Names of the parameters inside the body.
    pub inputs: Vec<String>,
    /// Names of the results inside the body.
    pub outputs: Vec<String>,
    /// Attributes that a call must give.
    pub attributes: Vec<String>,
    pub attribute_defaults: Vec<AttributeProto>,
    /// In topological order; node names are unique within the body.
    pub nodes: Vec<Node>,
    pub opsets: Vec<Opset>,
}
