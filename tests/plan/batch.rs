//! Models with an ambiguous batch dimension: errors name the flags that resolve it.

use crate::support::builder::{F32, graph, initializer, int, ints, model, node, typed, with};
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

/// A model-defined loss of two inputs exported with batch 1: the second might be the same for all samples.
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

/// The first input is a table added to the product of the second with a matrix.
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

/// Attention with time first, as in `nn.MultiheadAttention`: the batch follows time in a merged axis.
#[test]
fn a_batch_behind_another_axis_is_found_again() {
    let turned = |from: &str, to: &str| with(node("Transpose", &[from], &[to]), ints("perm", &[1, 0, 2]));
    let nodes = [
        turned("x", "ahead"),
        node("Reshape", &["ahead", "flat"], &["rows"]),
        node("Relu", &["rows"], &["on"]),
        node("Reshape", &["on", "apart"], &["steps"]),
        turned("steps", "y"),
    ];
    // A batch of 8 divides 24 steps, 7 does not.
    for batch in [7, 8] {
        let mut main = graph(&nodes, &[typed("x", F32, &[batch, 24, 4])], &["y"]);
        main.initializer = vec![
            initializer("flat", &Tensor::from_i64(&[2], &[batch * 24, 4])),
            initializer("apart", &Tensor::from_i64(&[3], &[24, batch, 4])),
        ];
        let found = imported(&model(17, main), &[]);
        assert_eq!(found.graph.fact(found.graph.outputs[0].value).to_string(), "f32[batch, 24, 4]", "{batch}");
        assert!(found.warnings.is_empty(), "{:?}", found.warnings);
    }
}

/// Constants that depend on the exported batch size prevent a symbolic batch.
#[test]
fn remaining_fixed_batch_sizes_are_reported() {
    let fixed = |nodes: &[_], values: &[(&str, Tensor)]| {
        let mut main = graph(nodes, &[typed("x", F32, &[8, 3])], &["y"]);
        main.initializer = values.iter().map(|(name, tensor)| initializer(name, tensor)).collect();
        imported(&model(17, main), &[])
    };
    let rows = [("rows", Tensor::from_i64(&[8], &[0, 1, 2, 3, 4, 5, 6, 7]))];
    let picked = fixed(&[node("Gather", &["x", "rows"], &["y"])], &rows);
    assert!(matches!(picked.batch, Batch::Fixed { size: Some(8), .. }), "{:?}", picked.batch);
    assert!(
        picked.warnings.iter().any(|warning| warning.contains("selects samples with indices")),
        "{:?}",
        picked.warnings
    );
    let table = [("table", Tensor::from_f32(&[5, 8], &[0.5; 40])), ("some", Tensor::from_f32(&[], &[0.0]))];
    let nodes = [
        with(node("ReduceSum", &["x"], &["sum"]), int("keepdims", 0)),
        node("Mul", &["sum", "some"], &["none"]),
        with(node("Transpose", &["table"], &["turned"]), ints("perm", &[1, 0])),
        node("Add", &["turned", "none"], &["y"]),
    ];
    let closed = fixed(&nodes, &table);
    assert!(matches!(closed.batch, Batch::Fixed { size: Some(8), .. }), "{:?}", closed.batch);
    assert!(closed.warnings.iter().any(|warning| warning.contains("8 rows for every batch")), "{:?}", closed.warnings);
    for (divisor, is_told) in [(8.0, true), (6.0, false)] {
        let nodes = [
            with(node("ReduceSum", &["x"], &["sum"]), int("keepdims", 0)),
            node("Neg", &["sum"], &["turned"]),
            node("Div", &["turned", "count"], &["y"]),
        ];
        let counted = fixed(&nodes, &[("count", Tensor::from_f32(&[], &[divisor]))]);
        assert!(matches!(counted.batch, Batch::Symbol { .. }));
        let warning = counted.warnings.iter().any(|warning| warning.contains("divides a sum over the batch by 8"));
        assert_eq!(warning, is_told, "{:?}", counted.warnings);
    }
}
