//! Lowering of an operator: ONNX's `Mish` as a model, imported into core ops, with its values and gradient.
//!
//! ```text
//! cargo run -p compiler --example my_operator
//! ```
//!
//! The lowering is the row of `Mish` in `compiler/src/import/onnx/lower/table.rs`. Shapes, costs, kernels, gradients, cuts
//! and exports follow from the core ops.

use compiler::graph::Graph;
use compiler::graph::bind::{bind, symbols};
use compiler::graph::evaluate::evaluate;
use compiler::graph::text::print;
use compiler::import::import::{Options, from_onnx};
use compiler::import::onnx::decode;
use compiler::import::onnx::proto::tensor_shape_proto::{Dimension, dimension};
use compiler::import::onnx::proto::{
    GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorShapeProto, TypeProto, ValueInfoProto, type_proto,
};
use compiler::tensor::Tensor;
use compiler::tensor::dim::Bindings;
use prost::Message;
use std::collections::BTreeMap;
use std::error::Error;

/// A model of one node: `y = Mish(x)`, four numbers.
fn model() -> ModelProto {
    let shape =
        TensorShapeProto { dim: vec![Dimension { value: Some(dimension::Value::DimValue(4)), denotation: None }] };
    let tensor = type_proto::Tensor { elem_type: Some(1), shape: Some(shape) };
    let kind = TypeProto { value: Some(type_proto::Value::TensorType(tensor)), denotation: None };
    let value_info = |name: &str| ValueInfoProto { name: Some(name.into()), ..Default::default() };
    let node = NodeProto {
        op_type: Some("Mish".into()),
        input: vec!["x".into()],
        output: vec!["y".into()],
        ..Default::default()
    };
    let graph = GraphProto {
        name: Some("mish".into()),
        node: vec![node],
        input: vec![ValueInfoProto { r#type: Some(kind), ..value_info("x") }],
        output: vec![value_info("y")],
        ..Default::default()
    };
    let opset = OperatorSetIdProto { domain: Some(String::new()), version: Some(18) };
    ModelProto { ir_version: Some(8), opset_import: vec![opset], graph: Some(graph), ..Default::default() }
}

/// The model as core ops.
fn imported() -> Result<Graph, Box<dyn Error>> {
    let source = decode::parse(model().encode_to_vec().into(), None)?;
    let graph = from_onnx(&source, "mish.onnx", &Options::default())?.graph;
    // The batch is symbolic; bind it to four.
    let sizes: Bindings = symbols(&graph).into_iter().map(|symbol| (symbol, 4)).collect();
    Ok(bind(&graph, &sizes)?)
}

/// The model's result for these numbers, by the reference kernels.
fn values(graph: &Graph, x: &[f32; 4]) -> Result<Vec<f64>, Box<dyn Error>> {
    let feeds = BTreeMap::from([("x".to_string(), Tensor::from_f32(&[4], x))]);
    Ok(evaluate(graph, &feeds)?[&graph.outputs[0].value].to_f64())
}

fn main() -> Result<(), Box<dyn Error>> {
    let graph = imported()?;
    println!("{}", print(&graph));
    println!("{:.4?}", values(&graph, &[-2.0, 0.0, 1.0, 3.0])?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_function_of_its_paper() {
        let x = [-2.0f32, 0.0, 1.0, 3.0];
        let expected = x.map(|x| f64::from(x) * f64::from(x).exp().ln_1p().tanh());
        for (actual, expected) in values(&imported().unwrap(), &x).unwrap().iter().zip(expected) {
            assert!((actual - expected).abs() < 1e-6, "{actual} and {expected}");
        }
    }

    #[test]
    fn it_is_three_core_ops() {
        let text = print(&imported().unwrap());
        for op in ["softplus", "tanh", "mul"] {
            assert!(text.contains(op), "{text}");
        }
    }
}
