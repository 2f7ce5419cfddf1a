//! Where the batch is ambiguous, the flags that say it are named.

mod builder;

use builder::{F32, graph, initializer, int, model, node, typed, with};
use compiler::import::import::{Batch, Model, Options, from_onnx};
use compiler::import::onnx::decode;
use compiler::import::onnx::proto::ModelProto;
use compiler::op::Op;
use compiler::tensor::Tensor;
use prost::Message;
use std::path::Path;

fn imported(model: &ModelProto, batch_axes: &[(&str, usize)]) -> Model {
    let source = decode::parse(model.encode_to_vec().into(), Some(Path::new("."))).unwrap();
    let batch_axes = batch_axes.iter().map(|(name, axis)| (name.to_string(), *axis)).collect();
    from_onnx(&source, "m.onnx", &Options { batch_axes, ..Options::default() }).unwrap()
}

fn fact(model: &Model, name: &str) -> String {
    let is = |id: &compiler::op::NodeId| matches!(&model.graph.node(*id).op, Op::Input(input) if input.name == name);
    model.graph.ids().find(is).map(|id| model.graph.node(id).facts[0].to_string()).unwrap()
}

/// A loss of the model's own, of two inputs that were exported with one sample: the second could be the same for all samples.
#[test]
fn an_input_that_may_have_the_batch_too() {
    let nodes = [
        node("Sub", &["x", "labels"], &["e"]),
        node("Mul", &["e", "e"], &["s"]),
        with(node("ReduceMean", &["s"], &["loss"]), int("keepdims", 0)),
    ];
    let own_loss = model(17, graph(&nodes, &[typed("x", F32, &[1, 3]), typed("labels", F32, &[1, 3])], &["loss"]));
    let unsaid = imported(&own_loss, &[]);
    let flags = "`--batch-dim x=0 --batch-dim labels=0`";
    assert!(unsaid.warnings.iter().any(|w| w.contains("`labels`") && w.contains(flags)), "{:?}", unsaid.warnings);
    assert_eq!(fact(&unsaid, "labels"), "f32[1, 3]");
    let said = imported(&own_loss, &[("x", 0), ("labels", 0)]);
    assert_eq!((fact(&said, "x"), fact(&said, "labels")), ("f32[batch, 3]".into(), "f32[batch, 3]".into()));
    assert!(said.warnings.is_empty(), "{:?}", said.warnings);
}

/// The first input is a table that is added to what a matrix makes of the second.
#[test]
fn an_input_that_may_have_the_batch_instead() {
    let nodes = [node("MatMul", &["x", "w"], &["h"]), node("MatMul", &["h", "table"], &["y"])];
    let mut main = graph(&nodes, &[typed("table", F32, &[2, 3]), typed("x", F32, &[4, 3])], &["y"]);
    main.initializer = vec![initializer("w", &Tensor::from_f32(&[3, 2], &[0.5; 6]))];
    let fixed = model(17, main);
    let unsaid = imported(&fixed, &[]);
    assert!(matches!(unsaid.batch, Batch::Fixed { size: Some(2), .. }), "{:?}", unsaid.batch);
    let remark = "if the batch is an axis of input `x`, `--batch-dim x=0`";
    assert!(unsaid.warnings.iter().any(|w| w.contains(remark)), "{:?}", unsaid.warnings);
    let said = imported(&fixed, &[("x", 0)]);
    assert_eq!((fact(&said, "x"), fact(&said, "table")), ("f32[batch, 3]".into(), "f32[2, 3]".into()));
}
