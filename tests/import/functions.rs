//! Model-defined functions: a call computes its body, wherever the call occurs.

use crate::support::builder::*;
use compiler::graph::text;
use compiler::import::import::Options;
use compiler::import::onnx::proto::attribute_proto::AttributeType;
use compiler::import::onnx::proto::{FunctionProto, ModelProto};
use compiler::tensor::Tensor;

fn calling(functions: Vec<FunctionProto>, call: compiler::import::onnx::proto::NodeProto) -> ModelProto {
    let main = graph(&[call], &[typed("x", F32, &[3])], &["y"]);
    ModelProto { functions, ..model(18, main) }
}

/// `y = x·alpha`, with default alpha 2.
fn scaled() -> FunctionProto {
    let constant = with(node("Constant", &[], &["c"]), taken("value_float", "alpha", AttributeType::Float));
    FunctionProto {
        attribute_proto: vec![float("alpha", 2.0)],
        ..function("Scaled", &[constant, node("Mul", &["x", "c"], &["y"])], &["x"], &["y"])
    }
}

#[test]
fn attributes_come_from_the_call_or_the_default() {
    let x = [("x", f32s(&[1.0, 2.0, 3.0]))];
    let call = local(node("Scaled", &["x"], &["y"]));
    assert_eq!(answer(&calling(vec![scaled()], call.clone()), &x), [2.0, 4.0, 6.0]);
    assert_eq!(answer(&calling(vec![scaled()], with(call, float("alpha", 5.0))), &x), [5.0, 10.0, 15.0]);
}

#[test]
fn functions_call_functions_and_hand_attributes_on() {
    let inner = with(local(node("Scaled", &["a"], &["b"])), taken("alpha", "beta", AttributeType::Float));
    let outer = FunctionProto {
        attribute: vec!["beta".into()],
        ..function("Twice", &[inner.clone(), node("Add", &["b", "a"], &["r"])], &["a"], &["r"])
    };
    // The same names have different meanings inside and outside.
    let call = with(local(node("Twice", &["x"], &["y"])), float("beta", 3.0));
    let model = calling(vec![outer, scaled()], call);
    assert_eq!(answer(&model, &[("x", f32s(&[1.0, -1.0, 2.0]))]), [4.0, -4.0, 8.0]);
    let imported = source(&model).import(&Options::default()).unwrap();
    let sources: Vec<&str> = imported
        .graph
        .ids()
        .map(|id| imported.graph.node(id).origin.source.as_str())
        .filter(|s| !s.is_empty())
        .collect();
    assert!(sources.iter().any(|s| s.ends_with("Scaled_0/Mul_1")), "{sources:?}\n{}", text::print(&imported.graph));
}

#[test]
fn an_input_left_out_is_left_out_inside() {
    let clipped = function("Clipped", &[node("Clip", &["x", "low", "high"], &["y"])], &["x", "low", "high"], &["y"]);
    let mut model = calling(vec![clipped], local(node("Clipped", &["x", "", "top"], &["y"])));
    let main = model.graph.as_mut().unwrap();
    main.initializer = vec![initializer("top", &Tensor::from_f32(&[], &[2.0]))];
    assert_eq!(answer(&model, &[("x", f32s(&[-7.0, 1.0, 3.0]))]), [-7.0, 1.0, 2.0]);
}

#[test]
fn a_function_has_an_operator_set_of_its_own() {
    // Before opset 13, ReduceSum has its axes as an attribute; the calling model has opset 18.
    let sum = with(with(node("ReduceSum", &["x"], &["y"]), ints("axes", &[0])), int("keepdims", 0));
    let total = FunctionProto { opset_import: vec![opset("", 11)], ..function("Total", &[sum], &["x"], &["y"]) };
    let model = calling(vec![total], local(node("Total", &["x"], &["y"])));
    assert_eq!(answer(&model, &[("x", f32s(&[1.0, 2.0, 4.0]))]), [7.0]);
}

#[test]
fn overloads_are_distinguished() {
    let overloaded = |name: &str, op: &str| FunctionProto {
        overload: Some(name.into()),
        ..function("F", &[node(op, &["x"], &["y"])], &["x"], &["y"])
    };
    let mut call = local(node("F", &["x"], &["y"]));
    call.overload = Some("b".into());
    let model = calling(vec![overloaded("a", "Neg"), overloaded("b", "Abs")], call);
    assert_eq!(answer(&model, &[("x", f32s(&[-1.0, 2.0, -3.0]))]), [1.0, 2.0, 3.0]);
}

#[test]
fn missing_body_parts_are_located() {
    let strange = function("F", &[node("Nothing", &["x"], &["y"])], &["x"], &["y"]);
    let message = refused(&calling(vec![strange], local(node("F", &["x"], &["y"]))));
    assert!(message.contains("unsupported operators: Nothing"), "{message}");
    let unfit =
        function("F", &[node("MatMul", &["x", "x", "x"], &["z"]), node("Gemm", &["x"], &["y"])], &["x"], &["y"]);
    let message = refused(&calling(vec![unfit], local(node("F", &["x"], &["y"]))));
    assert!(message.contains("node `F_0/Gemm_1` (Gemm): input 1 is missing"), "{message}");
    // A call nesting too deep for the stack.
    let name = |level: usize| format!("F{level}");
    let chain = (0..5000).map(|level| {
        let next =
            if level == 4999 { node("Relu", &["x"], &["y"]) } else { local(node(&name(level + 1), &["x"], &["y"])) };
        function(&name(level), &[next], &["x"], &["y"])
    });
    let message = refused(&calling(chain.collect(), local(node("F0", &["x"], &["y"]))));
    assert!(message.contains("functions and subgraphs nested deeper than 64"), "{message}");
}
