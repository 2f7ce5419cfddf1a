//! A decoded ONNX model: everything the file says, checked, in plain types, with weights as views into the file.
//!
//! What the decoder has made sure of, so that nobody above needs to ask again:
//!
//! - `nodes` are in topological order; every tensor is written once and every tensor read is written before, or is an
//!   input or an initializer. Subgraphs nest at most 16 deep; model functions neither recurse nor explode.
//! - Node names are unique and not empty. They may hold any characters: show them with `name::display_name`.
//! - The dims of every tensor with values are not negative, and its payload has exactly the bytes its type and dims
//!   say. This holds for initializers and for the tensors in attributes, whose payload `payload::tensor` gives.
//! - The standard operator domain is written `""`, also where the file says `ai.onnx`.

use std::collections::BTreeSet;

use bytes::Bytes;

use crate::import::onnx::name::module_path;
use crate::import::onnx::proto::{AttributeProto, NodeProto, StringStringEntryProto};
use crate::import::onnx::warning::Warning;

/// A model file, decoded and checked.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct OnnxModel {
    /// The version of the file format; 0 where the file does not say.
    pub ir_version: i64,
    /// Operator set versions by domain; the standard domain is `""`.
    pub opsets: Vec<Opset>,
    /// The tool that wrote the file and its version, such as `pytorch 2.9.0`; may be empty.
    pub producer: String,
    /// The name of the graph.
    pub graph_name: String,
    /// What the caller feeds: graph inputs that no initializer fills.
    pub inputs: Vec<ValueInfo>,
    /// Inputs of an optional type, which a caller may leave out.
    pub optional: BTreeSet<String>,
    /// What the graph gives, in order.
    pub outputs: Vec<ValueInfo>,
    /// Constants and parameters, in the order of the file.
    pub initializers: Vec<Tensor>,
    /// The nodes in topological order.
    pub nodes: Vec<Node>,
    /// What the file claims about tensors inside the graph: hints, not checked against the operators.
    pub value_infos: Vec<ValueInfo>,
    /// The initializers of which the file says that they are buffers of the source model and no parameters.
    pub buffers: BTreeSet<String>,
    /// Functions that nodes may call by `(domain, op_type, overload)`.
    pub functions: Vec<Function>,
    /// Metadata of the model, as key and value.
    pub metadata: Vec<(String, String)>,
    /// What the user should hear about though it stops nothing.
    pub warnings: Vec<Warning>,
    /// SHA-256 of the model without the values of its initializers; see `fingerprint`.
    pub sha256: [u8; 32],
}

impl OnnxModel {
    /// The version of the operator set of `domain` (`""` for the standard one), if the model imports it.
    pub fn opset(&self, domain: &str) -> Option<i64> {
        self.opsets.iter().find(|set| set.domain == domain).map(|set| set.version)
    }

    /// The fingerprint in hexadecimal, 64 characters.
    pub fn sha256_hex(&self) -> String {
        self.sha256.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// One imported operator set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Opset {
    /// The domain, `""` for the standard one.
    pub domain: String,
    /// The version.
    pub version: i64,
}

/// The name and type of a tensor at the border of the graph or inside it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ValueInfo {
    /// The tensor's name.
    pub name: String,
    /// Element type code; 0 where the file does not say (never for graph inputs).
    pub elem_type: i32,
    /// The dimensions; `None` where even their number is not said.
    pub dims: Option<Vec<Dim>>,
}

/// One dimension of a shape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Dim {
    /// A number of elements, not negative.
    Known(i64),
    /// A symbol, such as `batch`: equal names are equal sizes.
    Param(String),
    /// Not said.
    Unknown,
}

/// A tensor with values.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    /// Its name; may be empty for a tensor in an attribute.
    pub name: String,
    /// Element type code, one that `element::known` knows.
    pub elem_type: i32,
    /// The dimensions, none negative, their product checked.
    pub dims: Vec<i64>,
    /// The values.
    pub payload: Payload,
}

/// The values of a tensor.
#[derive(Debug, Clone, PartialEq)]
pub enum Payload {
    /// Raw little-endian elements in row-major order, as `raw_data` holds them, exactly the bytes that type and dims
    /// say. Not aligned to anything.
    Bytes(Bytes),
    /// Strings, one for each element.
    Strings(Vec<Bytes>),
    /// The external file at `path` does not exist: the shape is known, the values are not.
    Missing {
        /// The file's location as the model writes it, relative to the model's folder.
        path: String,
    },
}

/// One node.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    /// A unique name that is not empty: the file's own where it can be.
    pub name: String,
    /// The operator.
    pub op_type: String,
    /// The operator's domain, `""` for the standard one.
    pub domain: String,
    /// Which of several functions of one name, mostly `""`.
    pub overload: String,
    /// Tensors read; `""` is an optional input left out.
    pub inputs: Vec<String>,
    /// Tensors written; `""` is an optional output left out.
    pub outputs: Vec<String>,
    /// Attributes as the file has them, except that tensors hold their values in `raw_data`; see `payload::tensor`.
    pub attributes: Vec<AttributeProto>,
    /// The path of the module that the node came from, such as `layer1.0.conv1`; empty for the root or if unknown.
    pub module: String,
    /// The metadata of the node.
    pub metadata: Vec<StringStringEntryProto>,
}

impl Node {
    /// The node of a file, under a name that is unique among its neighbours.
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

/// A function that the model defines.
#[derive(Debug, Clone, PartialEq)]
pub struct Function {
    /// Its domain.
    pub domain: String,
    /// Its name, which calling nodes have as `op_type`.
    pub name: String,
    /// Which of several functions of one name, mostly `""`.
    pub overload: String,
    /// Names of the parameters inside the body.
    pub inputs: Vec<String>,
    /// Names of the results inside the body.
    pub outputs: Vec<String>,
    /// Attributes that a call must give.
    pub attributes: Vec<String>,
    /// Attributes with default values.
    pub attribute_defaults: Vec<AttributeProto>,
    /// The body, in topological order, names unique within the body.
    pub nodes: Vec<Node>,
    /// Operator sets of the body.
    pub opsets: Vec<Opset>,
}
