//! Decodes an ONNX file into a checked [`OnnxModel`]: memory map, protobuf, fingerprint, structure, tensor payloads.
//!
//! ```no_run
//! let model = compiler::import::onnx::decode::read(std::path::Path::new("model.onnx"))?;
//! println!("{} nodes", model.nodes.len());
//! # Ok::<(), compiler::import::onnx::error::DecodeError>(())
//! ```
//!
//! All faults of a model are collected and reported together.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use prost::Message;

use crate::import::onnx::check_graph;
use crate::import::onnx::check_graph::Body;
use crate::import::onnx::error::{DecodeError, Fault, Faults, FormatError};
use crate::import::onnx::external::Files;
use crate::import::onnx::model::{Function, Node, OnnxModel, Opset, Roles, Tensor};
use crate::import::onnx::name::unique_names;
use crate::import::onnx::proto::{
    AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, Version,
};
use crate::import::onnx::signature::{self, Signature};
use crate::import::onnx::warning::Warning;
use crate::import::onnx::{file, fingerprint, function, payload};

/// Reads the model at `path`. External data files are resolved relative to the model's folder.
pub fn read(path: &Path) -> Result<OnnxModel, DecodeError> {
    decode(file::map(path)?, Files::of_model(path))
}

/// The external data files referenced by the model at `path`; empty if `path` is not an ONNX model.
pub fn data_files(path: &Path) -> BTreeSet<PathBuf> {
    let bytes = file::map(path).ok().filter(|bytes| file::refuse_other_formats(bytes).is_ok());
    let Some(proto) = bytes.and_then(|bytes| ModelProto::decode(bytes).ok()) else { return BTreeSet::new() };
    let mut decoder = Decoder { faults: Vec::new(), warnings: Vec::new(), files: Files::of_model(path) };
    decoder.model(proto, [0; 32]);
    decoder.files.paths()
}

/// Decodes a model from memory. External data must be inside `folder`; without a folder, external data is an error.
/// Payloads of the result are views into `bytes`.
pub fn parse(bytes: Bytes, folder: Option<&Path>) -> Result<OnnxModel, DecodeError> {
    decode(bytes, folder.map_or_else(Files::none, Files::beneath))
}

fn decode(bytes: Bytes, files: Files) -> Result<OnnxModel, DecodeError> {
    file::refuse_other_formats(&bytes)?;
    let mut proto = match ModelProto::decode(bytes.clone()) {
        Ok(proto) => proto,
        Err(_) if file::is_text(&bytes) => return Err(FormatError::Text.into()),
        Err(error) => return Err(protobuf(&bytes, &error)),
    };
    let sha256 = fingerprint::fingerprint(&mut proto);
    let mut decoder = Decoder { faults: Vec::new(), warnings: Vec::new(), files };
    let model = decoder.model(proto, sha256);
    match model {
        Some(model) if decoder.faults.is_empty() => {
            let warnings = decoder.warnings.into_iter().chain(decoder.files.into_warnings()).collect();
            Ok(OnnxModel { warnings, ..model })
        }
        _ => Err(DecodeError::Faults(Faults(decoder.faults))),
    }
}

fn protobuf(bytes: &Bytes, error: &prost::DecodeError) -> DecodeError {
    let text = error.to_string();
    let hint = if text.contains("recursion") {
        "; messages nest deeper than protobuf allows"
    } else {
        "; the file is truncated, damaged or not ONNX"
    };
    DecodeError::Protobuf { bytes: bytes.len(), reason: text + hint }
}

/// The latest version of the standard operators that is supported.
const NEWEST_OPSET: i64 = 28;

struct Decoder {
    faults: Vec<Fault>,
    warnings: Vec<Warning>,
    files: Files,
}

impl Decoder {
    /// Returns `None` if the message has no graph. The result is valid only if `self.faults` stays empty.
    fn model(&mut self, mut proto: ModelProto, sha256: [u8; 32]) -> Option<OnnxModel> {
        let Some(mut graph) = proto.graph.take() else {
            self.faults.push(Fault::NoGraph);
            return None;
        };
        let ir_version = proto.ir_version();
        if ir_version < 1 {
            self.faults.push(Fault::IrVersion { found: ir_version });
        }
        if ir_version > Version::IrVersion as i64 {
            self.warnings.push(Warning::IrVersion { found: ir_version, known: Version::IrVersion as i64 });
        }
        if graph.node.is_empty() {
            self.faults.push(Fault::NoNodes);
        }
        normalise_domains(&mut graph.node);
        for function in &mut proto.functions {
            function.domain = Some(standard_as_empty(function.domain()).to_owned());
            normalise_domains(&mut function.node);
        }
        let names = unique_names(&graph.node);
        let opsets = self.opsets(&proto.opset_import);
        self.standard_opset(&opsets, &graph.node, &names);
        let newest = opsets.iter().filter(|set| set.domain.is_empty()).map(|set| set.version).max();
        if let Some(opset) = newest.filter(|version| *version > NEWEST_OPSET) {
            self.warnings.push(Warning::Opset { found: opset, known: NEWEST_OPSET });
        }
        function::check(&proto.functions, &graph.node, &mut self.faults);

        let (faults, warnings) = (&mut self.faults, &mut self.warnings);
        let Signature { inputs, optional, outputs, value_infos } =
            signature::read(&graph, ir_version, faults, warnings);
        let roles = roles(&graph, proto.producer_name());
        let order = self.wiring(&graph, &names);
        let initializers = self.initializers(std::mem::take(&mut graph.initializer));
        let nodes = self.nodes(std::mem::take(&mut graph.node), names, &order);
        let functions = std::mem::take(&mut proto.functions).into_iter().map(|f| self.function(f)).collect();
        let producer = [proto.producer_name(), proto.producer_version()].join(" ").trim().to_owned();
        Some(OnnxModel {
            ir_version,
            opsets,
            producer,
            graph_name: graph.name().to_owned(),
            inputs,
            optional,
            outputs,
            initializers,
            nodes,
            value_infos,
            roles,
            functions,
            metadata: proto.metadata_props.iter().map(|p| (p.key().to_owned(), p.value().to_owned())).collect(),
            warnings: Vec::new(),
            sha256,
        })
    }

    fn opsets(&mut self, imports: &[OperatorSetIdProto]) -> Vec<Opset> {
        if imports.is_empty() {
            self.faults.push(Fault::NoOpset);
        }
        let mut opsets: Vec<Opset> = Vec::new();
        for import in imports {
            let (domain, version) = (standard_as_empty(import.domain()), import.version());
            match opsets.iter().find(|set| set.domain == domain) {
                Some(set) if set.version != version => {
                    let (first, second) = (set.version, version);
                    self.faults.push(Fault::OpsetTwice { domain: domain.to_owned(), first, second });
                }
                Some(_) => {}
                None => opsets.push(Opset { domain: domain.to_owned(), version }),
            }
        }
        opsets
    }

    /// Adds a fault if standard operators are used and the standard domain is not imported.
    fn standard_opset(&mut self, opsets: &[Opset], nodes: &[NodeProto], names: &[String]) {
        if opsets.is_empty() || opsets.iter().any(|set| set.domain.is_empty()) {
            return;
        }
        if let Some(at) = nodes.iter().position(|node| node.domain().is_empty()) {
            let (node, op) = (names[at].clone(), nodes[at].op_type().to_owned());
            self.faults.push(Fault::OpsetOfStandard { node, op });
        }
    }

    fn wiring(&mut self, graph: &GraphProto, names: &[String]) -> Vec<usize> {
        let mut outer_names: HashMap<&str, &'static str> =
            graph.input.iter().map(|input| (input.name(), "graph input")).collect();
        let mut seen = HashSet::new();
        for tensor in &graph.initializer {
            if !seen.insert(tensor.name()) {
                self.faults.push(Fault::DuplicateInitializer { name: tensor.name().to_owned() });
            }
            outer_names.insert(tensor.name(), "initializer");
        }
        for sparse in &graph.sparse_initializer {
            let name = sparse.values.as_ref().map(|values| values.name()).unwrap_or_default();
            self.faults.push(Fault::Sparse { name: name.to_owned() });
            outer_names.insert(name, "sparse initializer");
        }
        let outer_names: Vec<(&str, &'static str)> = outer_names.into_iter().collect();
        let outputs: Vec<&str> = graph.output.iter().map(|output| output.name()).collect();
        let body = Body { nodes: &graph.node, names, outer_names: &outer_names, outputs: &outputs };
        check_graph::check(&body, &mut self.faults, &mut self.warnings)
    }

    fn initializers(&mut self, tensors: Vec<TensorProto>) -> Vec<Tensor> {
        let mut resolved = Vec::with_capacity(tensors.len());
        for mut tensor in tensors {
            if let Err(error) = payload::resolve(&mut tensor, &mut self.files) {
                let name = tensor.name().to_owned();
                self.faults.push(Fault::Tensor { place_of: None, name, error });
                continue;
            }
            resolved.push(payload::tensor(&tensor));
        }
        resolved
    }

    fn nodes(&mut self, protos: Vec<NodeProto>, names: Vec<String>, order: &[usize]) -> Vec<Node> {
        let mut nodes: Vec<Option<Node>> = Vec::with_capacity(protos.len());
        for (mut proto, name) in protos.into_iter().zip(names) {
            self.attributes(&mut proto.attribute, &name);
            nodes.push(Some(Node::new(proto, name)));
        }
        order.iter().filter_map(|at| nodes[*at].take()).collect()
    }

    /// Resolves all tensors in `attributes`, including those in subgraphs. `node` is the name used in messages.
    fn attributes(&mut self, attributes: &mut [AttributeProto], node: &str) {
        for attribute in attributes {
            if attribute.sparse_tensor.is_some() || !attribute.sparse_tensors.is_empty() {
                self.faults.push(Fault::Sparse { name: node.to_owned() });
            }
            let name = attribute.name.clone().unwrap_or_default();
            let graphs = attribute.g.iter_mut().chain(&mut attribute.graphs);
            for graph in graphs {
                for tensor in &mut graph.initializer {
                    self.attribute_tensor(tensor, &name, node);
                }
                for inner in &mut graph.node {
                    self.attributes(&mut inner.attribute, node);
                }
            }
            for tensor in attribute.t.iter_mut().chain(&mut attribute.tensors) {
                self.attribute_tensor(tensor, &name, node);
            }
        }
    }

    fn attribute_tensor(&mut self, tensor: &mut TensorProto, attribute: &str, node: &str) {
        if let Err(error) = payload::resolve(tensor, &mut self.files) {
            let (place_of, name) = (Some(node.to_owned()), attribute.to_owned());
            self.faults.push(Fault::Tensor { place_of, name, error });
        }
    }

    fn function(&mut self, mut proto: FunctionProto) -> Function {
        let names = unique_names(&proto.node);
        let outer_names: Vec<(&str, &'static str)> =
            proto.input.iter().map(|name| (name.as_str(), "function input")).collect();
        let outputs: Vec<&str> = proto.output.iter().map(String::as_str).collect();
        let body = Body { nodes: &proto.node, names: &names, outer_names: &outer_names, outputs: &outputs };
        let order = check_graph::check(&body, &mut self.faults, &mut self.warnings);
        let nodes = self.nodes(std::mem::take(&mut proto.node), names, &order);
        let name = proto.name.unwrap_or_default();
        self.attributes(&mut proto.attribute_proto, &name);
        // A function may inherit the model's opset imports, so an empty list is not a fault.
        let opsets = if proto.opset_import.is_empty() { Vec::new() } else { self.opsets(&proto.opset_import) };
        Function {
            domain: proto.domain.unwrap_or_default(),
            name,
            overload: proto.overload.unwrap_or_default(),
            inputs: proto.input,
            outputs: proto.output,
            attributes: proto.attribute,
            attribute_defaults: proto.attribute_proto,
            nodes,
            opsets,
        }
    }
}

/// Reads the export metadata of PyTorch.
fn roles(graph: &GraphProto, producer: &str) -> Roles {
    const KIND: &str = "pkg.torch.export.graph_signature.InputSpec.kind";
    const FOLDED: &str = "pkg.onnxscript.optimizer.folded_from";
    let mut roles = Roles::default();
    let initializers: HashSet<&str> = graph.initializer.iter().map(TensorProto::name).collect();
    for info in graph.value_info.iter().filter(|info| initializers.contains(info.name())) {
        let value = |key| info.metadata_props.iter().find(|property| property.key() == key).map(|p| p.value());
        match value(KIND) {
            Some("PARAMETER") => roles.parameters.insert(info.name().to_owned()),
            Some("BUFFER" | "CONSTANT_TENSOR") => roles.buffers.insert(info.name().to_owned()),
            _ => false,
        };
        if let Some(list) = value(FOLDED) {
            // A list of Python strings.
            let sources = list.split(['\'', '"']).skip(1).step_by(2).map(str::to_owned).collect();
            roles.folded.insert(info.name().to_owned(), sources);
        }
    }
    roles.has_scalar_parameters =
        producer == "pytorch" && roles.parameters.is_empty() && roles.buffers.is_empty() && roles.folded.is_empty();
    roles
}

fn standard_as_empty(domain: &str) -> &str {
    if domain == "ai.onnx" { "" } else { domain }
}

fn normalise_domains(nodes: &mut [NodeProto]) {
    for node in nodes {
        if node.domain() == "ai.onnx" {
            node.domain = None;
        }
        for attribute in &mut node.attribute {
            for graph in attribute.g.iter_mut().chain(&mut attribute.graphs) {
                normalise_domains(&mut graph.node);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::import::onnx::model::{Dim, Payload, ValueInfo};
    use crate::import::onnx::proto::ValueInfoProto;
    use crate::import::onnx::proto::tensor_shape_proto::{Dimension, dimension::Value as DimValue};
    use crate::import::onnx::proto::type_proto::{self, Value as TypeValue};
    use crate::import::onnx::proto::{TensorShapeProto, TypeProto};

    fn typed(name: &str, dims: &[i64]) -> ValueInfoProto {
        let dim = |dim: &i64| Dimension { value: Some(DimValue::DimValue(*dim)), denotation: None };
        let shape = Some(TensorShapeProto { dim: dims.iter().map(dim).collect() });
        let tensor = type_proto::Tensor { elem_type: Some(1), shape };
        let kind = TypeProto { value: Some(TypeValue::TensorType(tensor)), denotation: None };
        ValueInfoProto { name: Some(name.into()), r#type: Some(kind), ..Default::default() }
    }

    /// `y = x + w` in IR version 3, where `w` is also listed as a graph input.
    fn model() -> ModelProto {
        let node = NodeProto {
            op_type: Some("Add".into()),
            domain: Some("ai.onnx".into()),
            input: vec!["x".into(), "w".into()],
            output: vec!["y".into()],
            ..Default::default()
        };
        let w = TensorProto {
            name: Some("w".into()),
            data_type: Some(1),
            dims: vec![1],
            float_data: vec![2.0],
            ..Default::default()
        };
        let graph = GraphProto {
            node: vec![node],
            initializer: vec![w],
            input: vec![typed("x", &[-1]), typed("w", &[1])],
            output: vec![typed("y", &[1])],
            ..Default::default()
        };
        let opset = OperatorSetIdProto { domain: Some("ai.onnx".into()), version: Some(8) };
        ModelProto { ir_version: Some(3), opset_import: vec![opset], graph: Some(graph), ..Default::default() }
    }

    fn parsed(model: &ModelProto) -> Result<OnnxModel, DecodeError> {
        parse(model.encode_to_vec().into(), None)
    }

    #[test]
    fn initializers_among_the_inputs_are_parameters() {
        let decoded = parsed(&model()).unwrap();
        let x = ValueInfo { name: "x".into(), elem_type: 1, dims: Some(vec![Dim::Unknown]) };
        assert_eq!(decoded.inputs, [x]);
        assert_eq!(decoded.warnings, [Warning::MinusOne { name: "x".into() }]);
        assert_eq!((decoded.nodes[0].name.as_str(), decoded.nodes[0].domain.as_str()), ("Add_0", ""));
        assert_eq!(decoded.opset(""), Some(8));
        let newer = parsed(&ModelProto { ir_version: Some(4), ..model() }).unwrap();
        assert_eq!(newer.warnings[1], Warning::DefaultInputs { count: 1, example: "w".into() });
        let mut future = model();
        future.opset_import[0].version = Some(NEWEST_OPSET + 1);
        let future = parsed(&future).unwrap();
        assert_eq!(future.warnings[0], Warning::Opset { found: NEWEST_OPSET + 1, known: NEWEST_OPSET });
    }

    #[test]
    fn all_faults_are_reported_without_control_characters() {
        let mut broken = model();
        broken.opset_import[0].domain = Some("other".into());
        let graph = broken.graph.as_mut().unwrap();
        graph.initializer[0].dims = vec![-3];
        graph.initializer.push(graph.initializer[0].clone());
        graph.input[0].r#type = None;
        graph.node[0].domain = None;
        graph.node[0].input.push("\u{1b}[2J".into());
        let text = parsed(&broken).unwrap_err().to_string();
        assert_eq!(
            text,
            "6 faults:\n  \
             node `Add_0`: opset_import does not name the standard domain, which its operator Add needs\n  \
             graph input `x` has no tensor type\n  \
             duplicate initializer `w`\n  \
             node `Add_0` (Add) reads tensor `[2J`, which no node computes\n  \
             initializer `w` has an invalid shape: dimension 0 is negative: -3\n  \
             initializer `w` has an invalid shape: dimension 0 is negative: -3"
        );
    }

    #[test]
    fn constants_in_attributes_are_resolved_too() {
        let mut proto = model();
        let value = TensorProto { data_type: Some(7), dims: vec![2], int64_data: vec![1, -1], ..Default::default() };
        let attribute = AttributeProto { name: Some("value".into()), t: Some(value), ..Default::default() };
        proto.graph.as_mut().unwrap().node[0].attribute = vec![attribute.clone()];
        let decoded = parsed(&proto).unwrap();
        let tensor = payload::tensor(decoded.nodes[0].attributes[0].t.as_ref().unwrap());
        let bytes = [1_i64, -1].iter().flat_map(|v| v.to_le_bytes()).collect();
        assert_eq!(tensor.payload, Payload::Bytes(bytes));
        proto.graph.as_mut().unwrap().node[0].attribute = vec![attribute.clone(), attribute];
        assert_eq!(parsed(&proto).unwrap_err().to_string(), "node `Add_0` has the attribute `value` twice");
    }
}
