//! Builds ONNX models in Rust, and runs them with the reference kernels.
#![allow(dead_code)] // Each test file uses a part.

use compiler::graph::bind::{bind, symbols};
use compiler::graph::evaluate::evaluate;
use compiler::import::import::{Options, Source, Weight};
use compiler::import::onnx::decode;
use compiler::import::onnx::proto::attribute_proto::AttributeType;
use compiler::import::onnx::proto::tensor_shape_proto::{Dimension, dimension};
use compiler::import::onnx::proto::{
    AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto,
    TensorShapeProto, TypeProto, ValueInfoProto, type_proto,
};
use compiler::import::with_inputs;
use compiler::op::Op;
use compiler::tensor::dim::Bindings;
use compiler::tensor::{DType, Tensor};
use prost::Message;
use std::collections::BTreeMap;

pub const F32: i32 = 1;
pub const I64: i32 = 7;
pub const BOOL: i32 = 9;
pub const F16: i32 = 10;
pub const BF16: i32 = 16;

fn texts(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

pub fn node(op: &str, inputs: &[&str], outputs: &[&str]) -> NodeProto {
    NodeProto { op_type: Some(op.into()), input: texts(inputs), output: texts(outputs), ..Default::default() }
}

pub fn with(mut node: NodeProto, attribute: AttributeProto) -> NodeProto {
    node.attribute.push(attribute);
    node
}

/// Turns the node into a call of a function in domain `local`.
pub fn local(mut node: NodeProto) -> NodeProto {
    node.domain = Some("local".into());
    node
}

fn attribute(name: &str, kind: AttributeType) -> AttributeProto {
    AttributeProto { name: Some(name.into()), r#type: Some(kind as i32), ..Default::default() }
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

pub fn text(name: &str, value: &str) -> AttributeProto {
    AttributeProto { s: Some(value.as_bytes().to_vec().into()), ..attribute(name, AttributeType::String) }
}

pub fn subgraph(name: &str, graph: GraphProto) -> AttributeProto {
    AttributeProto { g: Some(graph), ..attribute(name, AttributeType::Graph) }
}

/// An attribute of a function node that refers to the call's attribute.
pub fn taken(name: &str, outer: &str, kind: AttributeType) -> AttributeProto {
    AttributeProto { ref_attr_name: Some(outer.into()), ..attribute(name, kind) }
}

pub fn typed(name: &str, elem_type: i32, dims: &[i64]) -> ValueInfoProto {
    let dim = |dim: &i64| Dimension { value: Some(dimension::Value::DimValue(*dim)), denotation: None };
    let shape = Some(TensorShapeProto { dim: dims.iter().map(dim).collect() });
    let tensor = type_proto::Tensor { elem_type: Some(elem_type), shape };
    let kind = TypeProto { value: Some(type_proto::Value::TensorType(tensor)), denotation: None };
    ValueInfoProto { name: Some(name.into()), r#type: Some(kind), ..Default::default() }
}

/// A value declared by name only.
pub fn named(name: &str) -> ValueInfoProto {
    ValueInfoProto { name: Some(name.into()), ..Default::default() }
}

pub fn initializer(name: &str, tensor: &Tensor) -> TensorProto {
    let code = match tensor.dtype() {
        DType::F32 => F32,
        DType::I64 => I64,
        DType::Bool => BOOL,
        DType::F16 => F16,
        DType::Bf16 => BF16,
        dtype => panic!("{dtype}"),
    };
    TensorProto {
        name: Some(name.into()),
        data_type: Some(code),
        dims: tensor.shape().iter().map(|d| *d as i64).collect(),
        raw_data: Some(tensor.bytes().clone()),
        ..Default::default()
    }
}

pub fn graph(nodes: &[NodeProto], inputs: &[ValueInfoProto], outputs: &[&str]) -> GraphProto {
    GraphProto {
        name: Some("g".into()),
        node: nodes.to_vec(),
        input: inputs.to_vec(),
        output: outputs.iter().map(|name| named(name)).collect(),
        ..Default::default()
    }
}

pub fn opset(domain: &str, version: i64) -> OperatorSetIdProto {
    OperatorSetIdProto { domain: Some(domain.into()), version: Some(version) }
}

pub fn function(name: &str, nodes: &[NodeProto], inputs: &[&str], outputs: &[&str]) -> FunctionProto {
    FunctionProto {
        domain: Some("local".into()),
        name: Some(name.into()),
        node: nodes.to_vec(),
        input: texts(inputs),
        output: texts(outputs),
        opset_import: vec![opset("", 18), opset("local", 1)],
        ..Default::default()
    }
}

pub fn model(version: i64, graph: GraphProto) -> ModelProto {
    ModelProto {
        ir_version: Some(8),
        opset_import: vec![opset("", version), opset("local", 1)],
        graph: Some(graph),
        ..Default::default()
    }
}

pub fn source(model: &ModelProto) -> Source {
    let model = decode::parse(model.encode_to_vec().into(), None).unwrap();
    Source::Onnx { model: Box::new(model), file: "model.onnx".into() }
}

/// The error of importing the model without data.
pub fn refused(model: &ModelProto) -> String {
    source(model).import(&Options::default()).map(|_| ()).unwrap_err().to_string()
}

/// The model's results for this data, and the inputs that were treated as constants.
pub fn answers(model: &ModelProto, data: &[(&str, Tensor)]) -> Result<(Vec<Tensor>, Vec<String>), String> {
    let data: BTreeMap<String, Tensor> = data.iter().map(|(name, t)| ((*name).to_owned(), t.clone())).collect();
    let imported = with_inputs::import(&source(model), &Options::default(), &data);
    let (model, options) = imported.map_err(|error| error.to_string())?;
    let mut sizes = Bindings::new();
    for id in model.graph.ids() {
        let Op::Input(input) = &model.graph.node(id).op else { continue };
        for (dim, size) in input.fact.shape.iter().zip(data[&input.name].shape()) {
            dim.symbols().into_iter().for_each(|symbol| {
                sizes.entry(symbol).or_insert(*size as i64);
            });
        }
    }
    let graph = bind(&model.graph, &sizes).map_err(|error| error.to_string())?;
    assert!(symbols(&graph).is_empty());
    let mut values_by_name = data.clone();
    for (name, weight) in &model.weights {
        let Weight::Given(tensor) = weight else { panic!("{name}") };
        values_by_name.insert(name.clone(), tensor.clone());
    }
    let values = evaluate(&graph, &values_by_name).map_err(|error| error.to_string())?;
    let results = graph.outputs.iter().map(|output| values[&output.value].clone()).collect();
    Ok((results, options.known.values.into_keys().collect()))
}

/// The values of the single result.
pub fn answer(model: &ModelProto, data: &[(&str, Tensor)]) -> Vec<f64> {
    let (results, _) = answers(model, data).unwrap();
    assert_eq!(results.len(), 1);
    results[0].to_f64()
}

pub fn f32s(values: &[f32]) -> Tensor {
    Tensor::from_f32(&[values.len()], values)
}

pub fn i64s(values: &[i64]) -> Tensor {
    Tensor::from_i64(&[values.len()], values)
}
