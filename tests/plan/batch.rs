//! Models with an ambiguous batch dimension: errors name the flags that resolve it.

use crate::support::builder::{F32, graph, initializer, int, ints, model, node, typed, with};
use compiler::import::import::{Batch, Model, Options, from_onnx};
use compiler::import::onnx::decode;
use compiler::import::onnx::proto::ModelProto;
use compiler::op::Op;
use compiler::tensor::Tensor;
use prost::Message;
use std::path::Path;

fn import(model: &ModelProto, batch_axes: &[(&str, usize)]) -> Model {
    let source = decode::parse(model.encode_to_vec().into(), Some(Path::new("."))).unwrap();
    let batch_axes = batch_axes.iter().map(|(name, axis)| (name.to_string(), *axis)).collect();
    from_onnx(&source, "m.onnx", &Options { batch_axes, ..Options::default() }).unwrap()
}

fn fact(model: &Model, name: &str) -> String {
    let is_named =
        |id: &compiler::op::NodeId| matches!(&model.graph.node(*id).op, Op::Input(input) if input.name == name);
    model.graph.ids().find(is_named).map(|id| model.graph.node(id).facts[0].to_string()).unwrap()
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
    let without_flags = import(&own_loss, &[]);
    let flags = "`--batch-dim x=0 --batch-dim labels=0`";
    assert!(
        without_flags.warnings.iter().any(|w| w.contains("`labels`") && w.contains(flags)),
        "{:?}",
        without_flags.warnings
    );
    assert_eq!(fact(&without_flags, "labels"), "f32[1, 3]");
    let with_flags = import(&own_loss, &[("x", 0), ("labels", 0)]);
    assert_eq!((fact(&with_flags, "x"), fact(&with_flags, "labels")), ("f32[batch, 3]".into(), "f32[batch, 3]".into()));
    assert!(with_flags.warnings.is_empty(), "{:?}", with_flags.warnings);
}

/// The first input is a table added to the product of the second with a matrix.
#[test]
fn an_input_that_may_have_the_batch_instead() {
    let nodes = [node("MatMul", &["x", "w"], &["h"]), node("MatMul", &["h", "table"], &["y"])];
    let mut main = graph(&nodes, &[typed("table", F32, &[2, 3]), typed("x", F32, &[4, 3])], &["y"]);
    main.initializer = vec![initializer("w", &Tensor::from_f32(&[3, 2], &[0.5; 6]))];
    let model_proto = model(17, main);
    let without_flags = import(&model_proto, &[]);
    assert!(matches!(without_flags.batch, Batch::Fixed { size: Some(2), .. }), "{:?}", without_flags.batch);
    let remark = "if the batch is an axis of input `x`, `--batch-dim x=0`";
    assert!(without_flags.warnings.iter().any(|w| w.contains(remark)), "{:?}", without_flags.warnings);
    let with_flags = import(&model_proto, &[("x", 0)]);
    assert_eq!((fact(&with_flags, "x"), fact(&with_flags, "table")), ("f32[batch, 3]".into(), "f32[2, 3]".into()));
}

/// Attention with time first, as in `nn.MultiheadAttention`: the batch follows time in a merged axis.
#[test]
fn a_batch_behind_another_axis_is_found_again() {
    let transpose = |from: &str, to: &str| with(node("Transpose", &[from], &[to]), ints("perm", &[1, 0, 2]));
    let nodes = [
        transpose("x", "ahead"),
        node("Reshape", &["ahead", "flat"], &["rows"]),
        node("Relu", &["rows"], &["on"]),
        node("Reshape", &["on", "apart"], &["steps"]),
        transpose("steps", "y"),
    ];
    // A batch of 8 divides 24 steps, 7 does not.
    for batch in [7, 8] {
        let mut main = graph(&nodes, &[typed("x", F32, &[batch, 24, 4])], &["y"]);
        main.initializer = vec![
            initializer("flat", &Tensor::from_i64(&[2], &[batch * 24, 4])),
            initializer("apart", &Tensor::from_i64(&[3], &[24, batch, 4])),
        ];
        let imported = import(&model(17, main), &[]);
        assert_eq!(imported.graph.fact(imported.graph.outputs[0].value).to_string(), "f32[batch, 24, 4]", "{batch}");
        assert!(imported.warnings.is_empty(), "{:?}", imported.warnings);
    }
}

/// Constants that depend on the exported batch size prevent a symbolic batch.
#[test]
fn remaining_fixed_batch_sizes_are_reported() {
    let import_fixed = |nodes: &[_], values: &[(&str, Tensor)]| {
        let mut main = graph(nodes, &[typed("x", F32, &[8, 3])], &["y"]);
        main.initializer = values.iter().map(|(name, tensor)| initializer(name, tensor)).collect();
        import(&model(17, main), &[])
    };
    let rows = [("rows", Tensor::from_i64(&[8], &[0, 1, 2, 3, 4, 5, 6, 7]))];
    let gathered = import_fixed(&[node("Gather", &["x", "rows"], &["y"])], &rows);
    assert!(matches!(gathered.batch, Batch::Fixed { size: Some(8), .. }), "{:?}", gathered.batch);
    assert!(
        gathered.warnings.iter().any(|warning| warning.contains("selects samples with indices")),
        "{:?}",
        gathered.warnings
    );
    let table = [("table", Tensor::from_f32(&[5, 8], &[0.5; 40])), ("some", Tensor::from_f32(&[], &[0.0]))];
    let nodes = [
        with(node("ReduceSum", &["x"], &["sum"]), int("keepdims", 0)),
        node("Mul", &["sum", "some"], &["none"]),
        with(node("Transpose", &["table"], &["turned"]), ints("perm", &[1, 0])),
        node("Add", &["turned", "none"], &["y"]),
    ];
    let added = import_fixed(&nodes, &table);
    assert!(matches!(added.batch, Batch::Fixed { size: Some(8), .. }), "{:?}", added.batch);
    assert!(added.warnings.iter().any(|warning| warning.contains("8 rows for every batch")), "{:?}", added.warnings);
    for (divisor, is_warned) in [(8.0, true), (6.0, false)] {
        let nodes = [
            with(node("ReduceSum", &["x"], &["sum"]), int("keepdims", 0)),
            node("Neg", &["sum"], &["turned"]),
            node("Div", &["turned", "count"], &["y"]),
        ];
        let divided = import_fixed(&nodes, &[("count", Tensor::from_f32(&[], &[divisor]))]);
        assert!(matches!(divided.batch, Batch::Symbol { .. }));
        let warning = divided.warnings.iter().any(|warning| warning.contains("divides a sum over the batch by 8"));
        assert_eq!(warning, is_warned, "{:?}", divided.warnings);
    }
}
