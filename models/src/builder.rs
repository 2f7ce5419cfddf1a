//! Builds ONNX models: inputs, parameters, constants and nodes, with the names of PyTorch's exporter.
//!
//! ```
//! use models::builder::{Axis, Builder, Init, attr};
//! let mut net = Builder::new("tiny", 0);
//! let x = net.input_f32("x", &[Axis::Named("batch"), Axis::Size(4)]);
//! let w = net.parameter("fc.weight", &[2, 4], Init::Kaiming);
//! let b = net.parameter("fc.bias", &[2], Init::Zeros);
//! let y = net.node("fc", "Gemm", &[&x, &w, &b], vec![attr::int("transB", 1)]);
//! net.output_f32("logits", &y, &[Axis::Named("batch"), Axis::Size(2)]);
//! let model = net.finish();
//! assert_eq!(model.graph.as_ref().unwrap().node[0].name(), "/fc/Gemm");
//! ```
//!
//! A module path `blocks.0.fc` gives nodes `/blocks.0/fc/Gemm`: a number joins its list's name, as exporters write a
//! `ModuleList`. The path is also stored as metadata, as newer exporters do. Outputs are named `NODE_output_0`. Initial
//! weights are uniform and depend only on the seed and the parameter's name; see `random`.
//!
//! [`Builder::structure`] builds the same graph without weights: every parameter is external data, at its offset in a
//! file that does not exist. The size of the model then depends only on the number of nodes.

use std::collections::HashMap;

use compiler::import::onnx::proto::tensor_proto::{DataLocation, DataType};
use compiler::import::onnx::proto::tensor_shape_proto::{Dimension, dimension};
use compiler::import::onnx::proto::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, StringStringEntryProto, TensorProto,
    TensorShapeProto, TypeProto, ValueInfoProto, type_proto,
};

use crate::random::Stream;

pub const IR_VERSION: i64 = 10;
pub const OPSET: i64 = 20;
/// File name of the external data of models without weights.
pub const LEFT_OUT: &str = "weights-left-out.bin";

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Value(String);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Axis {
    Size(usize),
    /// A symbolic dimension, such as `batch`.
    Named(&'static str),
}

/// Initialisation of a parameter. Fan-in is the product of all dimensions but the first, fan-out of all but the second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    Zeros,
    Ones,
    /// Uniform in ±√(6 / fan-in) (He et al., 2015), for layers with ReLU.
    Kaiming,
    /// Uniform in ±√(6 / (fan-in + fan-out)) (Glorot and Bengio, 2010).
    Xavier,
    /// Uniform with this standard deviation: ±√3 · deviation.
    Deviation(f64),
    Within(f64),
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    pub parameters: u128,
    /// Elements of running statistics.
    pub statistics: u128,
}

#[derive(Debug)]
pub struct Builder {
    graph: GraphProto,
    /// Seed of the initial weights; `None` omits them.
    seed: Option<u64>,
    counts: Counts,
    /// Number of nodes per name stem; the second gets the suffix `_1`.
    names: HashMap<String, usize>,
}

impl Builder {
    /// An empty graph whose parameters are drawn from `seed`.
    pub fn new(name: &str, seed: u64) -> Self {
        Self { seed: Some(seed), ..Self::structure(name) }
    }

    /// An empty graph without parameter values.
    pub fn structure(name: &str) -> Self {
        let graph = GraphProto { name: Some(name.to_owned()), ..Default::default() };
        Self { graph, seed: None, counts: Counts::default(), names: HashMap::new() }
    }

    pub fn counts(&self) -> Counts {
        self.counts
    }

    pub fn input_f32(&mut self, name: &str, shape: &[Axis]) -> Value {
        self.graph.input.push(value_info(name, DataType::Float, shape));
        Value(name.to_owned())
    }

    pub fn input_i64(&mut self, name: &str, shape: &[Axis]) -> Value {
        self.graph.input.push(value_info(name, DataType::Int64, shape));
        Value(name.to_owned())
    }

    pub fn parameter(&mut self, name: &str, dims: &[usize], init: Init) -> Value {
        self.counts.parameters += elements(dims);
        self.initializer(name, dims, init)
    }

    /// A running statistic: an f32 initializer that the forward pass updates.
    pub fn statistic(&mut self, name: &str, dims: &[usize], init: Init) -> Value {
        self.counts.statistics += elements(dims);
        self.initializer(name, dims, init)
    }

    fn initializer(&mut self, name: &str, dims: &[usize], init: Init) -> Value {
        let Some(seed) = self.seed else {
            let offset = 4 * (self.counts.parameters + self.counts.statistics - elements(dims));
            self.graph.initializer.push(left_out(name, dims, offset));
            return Value(name.to_owned());
        };
        let count: usize = dims.iter().product();
        let fan_in = dims.iter().skip(1).product::<usize>() as f64;
        let fan_out =
            dims.iter().enumerate().filter(|(axis, _)| *axis != 1).map(|(_, dim)| dim).product::<usize>() as f64;
        let stream = Stream::new(seed, name);
        let uniform = |bound: f64| (0..count as u64).map(|i| stream.uniform(i, bound)).collect();
        let values: Vec<f32> = match init {
            Init::Zeros => vec![0.0; count],
            Init::Ones => vec![1.0; count],
            Init::Kaiming => uniform((6.0 / fan_in).sqrt()),
            Init::Xavier => uniform((6.0 / (fan_in + fan_out)).sqrt()),
            Init::Deviation(deviation) => uniform(3.0_f64.sqrt() * deviation),
            Init::Within(bound) => uniform(bound),
        };
        self.graph.initializer.push(tensor_f32(name, dims, &values));
        Value(name.to_owned())
    }

    /// An f32 `Constant` node in the module at `path`.
    pub fn constant_f32(&mut self, path: &str, dims: &[usize], values: &[f32]) -> Value {
        self.node(path, "Constant", &[], vec![attr::tensor("value", tensor_f32("", dims, values))])
    }

    pub fn constant_i64(&mut self, path: &str, values: &[i64]) -> Value {
        self.node(path, "Constant", &[], vec![attr::tensor("value", tensor_i64("", &[values.len()], values))])
    }

    pub fn scalar_i64(&mut self, path: &str, value: i64) -> Value {
        self.node(path, "Constant", &[], vec![attr::tensor("value", tensor_i64("", &[], &[value]))])
    }

    pub fn scalar_bool(&mut self, path: &str, value: bool) -> Value {
        let value = tensor("", DataType::Bool, &[], vec![u8::from(value)]);
        self.node(path, "Constant", &[], vec![attr::tensor("value", value)])
    }

    /// A `ConstantOfShape` node filled with `value`.
    pub fn fill(&mut self, path: &str, shape: &Value, value: f32) -> Value {
        let value = attr::tensor("value", tensor_f32("", &[1], &[value]));
        self.node(path, "ConstantOfShape", &[shape], vec![value])
    }

    /// A node with one output in the module at `path` (`""` for the root).
    pub fn node(&mut self, path: &str, op: &str, inputs: &[&Value], attributes: Vec<AttributeProto>) -> Value {
        let name = self.push(path, op, inputs, 1, attributes);
        Value(format!("{name}_output_0"))
    }

    pub fn node_of<const N: usize>(
        &mut self,
        path: &str,
        op: &str,
        inputs: &[&Value],
        attributes: Vec<AttributeProto>,
    ) -> [Value; N] {
        let name = self.push(path, op, inputs, N, attributes);
        std::array::from_fn(|index| Value(format!("{name}_output_{index}")))
    }

    /// Makes `value` the graph output `name`.
    ///
    /// The tensor is renamed, as in exported models, instead of passing through an `Identity`.
    pub fn output_f32(&mut self, name: &str, value: &Value, shape: &[Axis]) {
        for node in &mut self.graph.node {
            for tensor in node.input.iter_mut().chain(&mut node.output).filter(|tensor| **tensor == value.0) {
                name.clone_into(tensor);
            }
        }
        self.graph.output.push(value_info(name, DataType::Float, shape));
    }

    pub fn output_scalar(&mut self, name: &str, value: &Value) {
        self.output_f32(name, value, &[]);
    }

    pub fn finish(self) -> ModelProto {
        ModelProto {
            ir_version: Some(IR_VERSION),
            opset_import: vec![OperatorSetIdProto { domain: Some(String::new()), version: Some(OPSET) }],
            producer_name: Some("pipec".to_owned()),
            producer_version: Some(env!("CARGO_PKG_VERSION").to_owned()),
            graph: Some(self.graph),
            ..Default::default()
        }
    }

    fn push(
        &mut self,
        path: &str,
        op: &str,
        inputs: &[&Value],
        outputs: usize,
        attribute: Vec<AttributeProto>,
    ) -> String {
        let stem = format!("{}/{op}", scope(path));
        let count = self.names.entry(stem.clone()).or_insert(0);
        let name = if *count == 0 { stem } else { format!("{stem}_{count}") };
        *count += 1;
        self.graph.node.push(NodeProto {
            input: inputs.iter().map(|value| value.0.clone()).collect(),
            output: (0..outputs).map(|index| format!("{name}_output_{index}")).collect(),
            name: Some(name.clone()),
            op_type: Some(op.to_owned()),
            attribute,
            metadata_props: vec![scopes(path, op)],
            ..Default::default()
        });
        name
    }
}

/// Converts `blocks.0.attn` to the exporter's `/blocks.0/attn`.
fn scope(path: &str) -> String {
    let mut text = String::new();
    for part in path.split('.').filter(|part| !part.is_empty()) {
        let is_index = part.bytes().all(|byte| byte.is_ascii_digit()) && !text.is_empty();
        text.push(if is_index { '.' } else { '/' });
        text += part;
    }
    text
}

/// Metadata in the form of `torch.onnx`: the paths of all enclosing modules from the root, then the operator.
fn scopes(path: &str, op: &str) -> StringStringEntryProto {
    let ends = path.match_indices('.').map(|(at, _)| at).chain((!path.is_empty()).then_some(path.len()));
    let mut list = "['', ".to_owned();
    for end in ends {
        list += &format!("'{}', ", &path[..end]);
    }
    list += &format!("'{op}']");
    StringStringEntryProto { key: Some("pkg.torch.onnx.name_scopes".to_owned()), value: Some(list) }
}

fn elements(dims: &[usize]) -> u128 {
    dims.iter().map(|dim| *dim as u128).product()
}

/// An f32 tensor at offset `offset` of a file that does not exist.
fn left_out(name: &str, dims: &[usize], offset: u128) -> TensorProto {
    let entry = |key: &str, value: String| StringStringEntryProto { key: Some(key.to_owned()), value: Some(value) };
    TensorProto {
        dims: dims.iter().map(|dim| *dim as i64).collect(),
        data_type: Some(DataType::Float as i32),
        name: Some(name.to_owned()),
        data_location: Some(DataLocation::External as i32),
        external_data: vec![
            entry("location", LEFT_OUT.to_owned()),
            entry("offset", offset.to_string()),
            entry("length", (4 * elements(dims)).to_string()),
        ],
        ..Default::default()
    }
}

fn value_info(name: &str, kind: DataType, shape: &[Axis]) -> ValueInfoProto {
    let dim = shape.iter().map(|axis| Dimension {
        value: Some(match axis {
            Axis::Size(size) => dimension::Value::DimValue(*size as i64),
            Axis::Named(name) => dimension::Value::DimParam((*name).to_owned()),
        }),
        denotation: None,
    });
    let shape = Some(TensorShapeProto { dim: dim.collect() });
    let tensor = type_proto::Tensor { elem_type: Some(kind as i32), shape };
    let kind = TypeProto { value: Some(type_proto::Value::TensorType(tensor)), denotation: None };
    ValueInfoProto { name: Some(name.to_owned()), r#type: Some(kind), ..Default::default() }
}

fn tensor_f32(name: &str, dims: &[usize], values: &[f32]) -> TensorProto {
    let raw: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    tensor(name, DataType::Float, dims, raw)
}

fn tensor_i64(name: &str, dims: &[usize], values: &[i64]) -> TensorProto {
    let raw: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    tensor(name, DataType::Int64, dims, raw)
}

fn tensor(name: &str, kind: DataType, dims: &[usize], raw: Vec<u8>) -> TensorProto {
    TensorProto {
        dims: dims.iter().map(|dim| *dim as i64).collect(),
        data_type: Some(kind as i32),
        name: (!name.is_empty()).then(|| name.to_owned()),
        raw_data: Some(raw.into()),
        ..Default::default()
    }
}

pub mod attr {
    use compiler::import::onnx::proto::attribute_proto::AttributeType;
    use compiler::import::onnx::proto::{AttributeProto, TensorProto};

    fn attribute(name: &str, kind: AttributeType) -> AttributeProto {
        AttributeProto { name: Some(name.to_owned()), r#type: Some(kind as i32), ..Default::default() }
    }

    pub fn int(name: &str, value: i64) -> AttributeProto {
        AttributeProto { i: Some(value), ..attribute(name, AttributeType::Int) }
    }

    pub fn ints(name: &str, values: &[i64]) -> AttributeProto {
        AttributeProto { ints: values.to_vec(), ..attribute(name, AttributeType::Ints) }
    }

    pub fn float(name: &str, value: f32) -> AttributeProto {
        AttributeProto { f: Some(value), ..attribute(name, AttributeType::Float) }
    }

    pub fn string(name: &str, value: &str) -> AttributeProto {
        AttributeProto { s: Some(value.to_owned().into()), ..attribute(name, AttributeType::String) }
    }

    pub fn tensor(name: &str, value: TensorProto) -> AttributeProto {
        AttributeProto { t: Some(value), ..attribute(name, AttributeType::Tensor) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_named_as_exporters_do() {
        let mut net = Builder::new("g", 0);
        let x = net.input_f32("x", &[Axis::Named("batch"), Axis::Size(2)]);
        let a = net.node("blocks.0.act", "Relu", &[&x], vec![]);
        let b = net.node("blocks.0.act", "Relu", &[&a], vec![]);
        net.output_f32("y", &b, &[Axis::Named("batch"), Axis::Size(2)]);
        let graph = net.finish().graph.unwrap();
        assert_eq!(graph.node[0].name(), "/blocks.0/act/Relu");
        assert_eq!(graph.node[1].name(), "/blocks.0/act/Relu_1");
        assert_eq!(graph.node[1].input, ["/blocks.0/act/Relu_output_0"]);
        assert_eq!(graph.node[1].output, ["y"]);
        assert_eq!((scope(""), scope("0.1.w")), (String::new(), "/0.1/w".to_owned()));
    }
}
