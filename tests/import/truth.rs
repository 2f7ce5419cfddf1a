//! Training suitability of imported ONNX models: warnings about inference exports, restored training mode, buffers
//! versus parameters, and the batch of a static export.
//!
//! Small models are written here; real exports are in the shared data.

use crate::support::shared::data;
use compiler::graph::Graph;
use compiler::graph::bind::bind;
use compiler::graph::evaluate::evaluate;
use compiler::import::import::{Batch, Model, Options, Weight, from_onnx, load};
use compiler::import::onnx::decode;
use compiler::import::onnx::proto::attribute_proto::AttributeType;
use compiler::import::onnx::proto::tensor_proto::DataLocation;
use compiler::import::onnx::proto::tensor_shape_proto::{Dimension, dimension};
use compiler::import::onnx::proto::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, StringStringEntryProto, TensorProto,
    TensorShapeProto, TypeProto, ValueInfoProto, type_proto,
};
use compiler::import::training_warning::Finding;
use compiler::op::Op;
use compiler::tensor::Tensor;
use compiler::tensor::dim::Bindings;
use prost::Message;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn texts(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_string()).collect()
}

fn node(op: &str, name: &str, inputs: &[&str], outputs: &[&str], attribute: Vec<AttributeProto>) -> NodeProto {
    NodeProto {
        op_type: Some(op.into()),
        name: Some(name.into()),
        input: texts(inputs),
        output: texts(outputs),
        attribute,
        ..Default::default()
    }
}

fn int(name: &str, value: i64) -> AttributeProto {
    let kind = Some(AttributeType::Int as i32);
    AttributeProto { name: Some(name.into()), r#type: kind, i: Some(value), ..Default::default() }
}

fn floats(name: &str, dims: &[i64], value: impl Fn(i64) -> f32) -> TensorProto {
    let float_data = (0..dims.iter().product()).map(value).collect();
    TensorProto { name: Some(name.into()), dims: dims.to_vec(), data_type: Some(1), float_data, ..Default::default() }
}

/// A matrix of distinct values.
fn pattern(name: &str, dims: &[i64]) -> TensorProto {
    floats(name, dims, |i| (i as f32 * 0.618).fract() - 0.5)
}

fn integers(name: &str, dims: &[i64], values: &[i64]) -> TensorProto {
    let int64_data = values.to_vec();
    TensorProto { name: Some(name.into()), dims: dims.to_vec(), data_type: Some(7), int64_data, ..Default::default() }
}

fn truth(name: &str, value: bool) -> TensorProto {
    let int32_data = vec![i32::from(value)];
    TensorProto { name: Some(name.into()), data_type: Some(9), int32_data, ..Default::default() }
}

/// A graph input or output; non-numeric dimensions are symbolic.
fn info(name: &str, elem_type: i32, dims: &[&str]) -> ValueInfoProto {
    let dim = |text: &&str| Dimension {
        value: Some(match text.parse() {
            Ok(size) => dimension::Value::DimValue(size),
            Err(_) => dimension::Value::DimParam((*text).to_string()),
        }),
        ..Default::default()
    };
    let shape = TensorShapeProto { dim: dims.iter().map(dim).collect() };
    let tensor = type_proto::Tensor { elem_type: Some(elem_type), shape: Some(shape) };
    let kind = TypeProto { value: Some(type_proto::Value::TensorType(tensor)), ..Default::default() };
    ValueInfoProto { name: Some(name.into()), r#type: Some(kind), ..Default::default() }
}

#[derive(Default)]
struct Parts {
    inputs: Vec<ValueInfoProto>,
    weights: Vec<TensorProto>,
    nodes: Vec<NodeProto>,
    hints: Vec<ValueInfoProto>,
    opset: i64,
}

fn property(key: &str, value: &str) -> StringStringEntryProto {
    StringStringEntryProto { key: Some(key.into()), value: Some(value.into()) }
}

fn hint(name: &str, dims: &[&str], key: &str, value: &str) -> ValueInfoProto {
    ValueInfoProto { metadata_props: vec![property(key, value)], ..info(name, 1, dims) }
}

fn imported(parts: Parts, options: &Options) -> Result<Model, String> {
    let graph = GraphProto {
        name: Some("model".into()),
        input: parts.inputs,
        output: vec![ValueInfoProto { name: Some("y".into()), ..Default::default() }],
        initializer: parts.weights,
        node: parts.nodes,
        value_info: parts.hints,
        ..Default::default()
    };
    let opset = OperatorSetIdProto { domain: None, version: Some(if parts.opset == 0 { 20 } else { parts.opset }) };
    let model = ModelProto { ir_version: Some(9), opset_import: vec![opset], graph: Some(graph), ..Default::default() };
    let source = decode::parse(model.encode_to_vec().into(), None).map_err(|e| e.to_string())?;
    from_onnx(&source, "model", options).map_err(|e| e.to_string())
}

fn train_mode() -> Options {
    Options { train_mode: true, ..Options::default() }
}

fn whereabouts(model: &Model) -> Vec<(Finding, String, String)> {
    model.doubts.iter().map(|doubt| (doubt.finding, doubt.first.clone(), doubt.beside.clone())).collect()
}

fn findings(model: &Model) -> Vec<(Finding, usize, &str)> {
    model.doubts.iter().map(|doubt| (doubt.finding, doubt.count, doubt.first.as_str())).collect()
}

fn count(graph: &Graph, is: fn(&Op) -> bool) -> usize {
    graph.ids().filter(|id| is(&graph.node(*id).op)).count()
}

/// A convolution, a batch normalisation with these attributes, and a dropout with these inputs.
fn normalised(attributes: Vec<AttributeProto>, dropout: &[&str], opset: i64) -> Parts {
    let statistics = ["scale", "bias", "mean", "variance"];
    let mut weights = vec![pattern("k", &[2, 3, 3, 3]), floats("ratio", &[], |_| 0.25), truth("on", true)];
    weights.extend(statistics.map(|name| floats(name, &[2], |i| i as f32 + 1.0)));
    Parts {
        inputs: vec![info("x", 1, &["N", "3", "8", "8"])],
        weights,
        nodes: vec![
            node("Conv", "conv", &["x", "k"], &["c"], vec![]),
            node("BatchNormalization", "norm", &["c", "scale", "bias", "mean", "variance"], &["n"], attributes),
            node("Dropout", "drop", dropout, &["y"], vec![]),
        ],
        opset,
        ..Parts::default()
    }
}

#[test]
fn inference_nodes_are_reported_and_restored() {
    let model = imported(normalised(vec![], &["n", "ratio"], 20), &Options::default()).unwrap();
    assert_eq!(findings(&model), [(Finding::InferenceBatchNorm, 1, "norm"), (Finding::InferenceDropout, 1, "drop")]);
    assert!(model.doubts[0].is_wrong() && !model.doubts[1].is_wrong());
    let parts = ["dynamo=False", "TrainingMode.TRAINING", "do_constant_folding=False", "export.save", "--train-mode"];
    assert_eq!(parts.map(|part| model.doubts[0].remedy().contains(part)), [true; 5], "{:?}", model.doubts[0]);
    assert_eq!(count(&model.graph, |op| matches!(op, Op::BatchNorm(_) | Op::Dropout(_))), 0);

    let model = imported(normalised(vec![], &["n", "ratio"], 20), &train_mode()).unwrap();
    assert_eq!(findings(&model), []);
    assert_eq!(count(&model.graph, |op| matches!(op, Op::BatchNorm(_))), 1);
    assert_eq!(count(&model.graph, |op| matches!(op, Op::Dropout(_))), 1);
    assert_eq!(model.graph.averages.len(), 2, "the running statistics follow the batch");
}

#[test]
fn what_trains_raises_no_doubt() {
    let parts = || normalised(vec![int("training_mode", 1)], &["n", "ratio", "on"], 20);
    let model = imported(parts(), &Options::default()).unwrap();
    assert_eq!(findings(&model), []);
    assert_eq!(count(&model.graph, |op| matches!(op, Op::BatchNorm(_) | Op::Dropout(_))), 2);
    // Restoring training mode changes nothing in a training export.
    let restored = imported(parts(), &train_mode()).unwrap();
    assert_eq!(compiler::graph::text::print(&model.graph), compiler::graph::text::print(&restored.graph));
}

#[test]
fn before_there_was_a_training_mode_outputs_tell() {
    let parts = || {
        let mut parts = normalised(vec![], &["n", "ratio"], 9);
        parts.nodes.pop();
        parts.nodes[1].output = texts(&["y"]);
        parts
    };
    assert_eq!(findings(&imported(parts(), &Options::default()).unwrap()), [(Finding::InferenceBatchNorm, 1, "norm")]);
    let restored = imported(parts(), &train_mode()).unwrap();
    assert_eq!(findings(&restored), []);
    assert_eq!(count(&restored.graph, |op| matches!(op, Op::BatchNorm(_))), 1);
    let error = imported(normalised(vec![], &["n"], 9), &train_mode()).unwrap_err();
    assert!(error.contains("operator set 9"), "{error}");
}

#[test]
fn a_folded_batch_norm_is_reported_and_not_restored() {
    let parts = || {
        let mut conv = node("Conv", "fused", &["x", "k", "b"], &["y"], vec![]);
        let rules = "RemoveOptionalBiasFromConv, FuseBatchNormIntoConv";
        conv.metadata_props.push(property("pkg.onnxscript.rewriter.rule_name", rules));
        Parts {
            inputs: vec![info("x", 1, &["N", "3", "8", "8"])],
            weights: vec![pattern("k", &[2, 3, 3, 3]), pattern("b", &[2])],
            nodes: vec![conv],
            ..Parts::default()
        }
    };
    let model = imported(parts(), &Options::default()).unwrap();
    assert_eq!(findings(&model), [(Finding::FoldedBatchNorm, 1, "fused")]);
    let error = imported(parts(), &train_mode()).unwrap_err();
    assert!(error.contains("`fused`") && error.contains("folded") && error.contains("dynamo=False"), "{error}");
    // Other rewrites lose nothing.
    let mut parts = parts();
    parts.nodes[0].metadata_props[0].value = Some("RemoveOptionalBiasFromConv".into());
    assert_eq!(findings(&imported(parts, &Options::default()).unwrap()), []);
}

/// Two layer normalisations in modules of these names that share a scale. The file may name the parameters they read.
fn shared_scale(modules: [&str; 2], scale: TensorProto, read: Option<[&str; 2]>) -> Vec<(Finding, usize, String)> {
    let name = |module: &str| format!("/{module}/LayerNormalization");
    let normalise = |at: usize, name: String, inputs: &[&str], output: &str| {
        let mut norm = node("LayerNormalization", &name, inputs, &[output], vec![]);
        if let Some(read) = read {
            let source = format!("%n = call_function[target=layer_norm](args = (%x, %{}))", read[at]);
            norm.metadata_props.push(property("pkg.torch.onnx.fx_node", &source));
        }
        norm
    };
    let parts = Parts {
        inputs: vec![info("x", 1, &["N", "8"])],
        weights: vec![scale],
        nodes: vec![
            node("Identity", "alias", &["scale"], &["other"], vec![]),
            normalise(0, name(modules[0]), &["x", "scale"], "h"),
            normalise(1, name(modules[1]) + "_1", &["h", "other"], "y"),
        ],
        ..Parts::default()
    };
    let model = imported(parts, &Options::default()).unwrap();
    model.doubts.into_iter().map(|doubt| (doubt.finding, doubt.count, doubt.first)).collect()
}

#[test]
fn equal_initial_values_are_not_tied() {
    let ones = || floats("scale", &[8], |_| 1.0);
    let merged = [(Finding::Merged, 1, "scale".to_string())];
    assert_eq!(shared_scale(["a", "b"], ones(), None), merged);
    assert_eq!(shared_scale(["a", "a"], ones(), Some(["p_a", "p_b"])), merged);
    // One module that runs twice, or trained values: shared on purpose.
    assert_eq!(shared_scale(["a", "a"], ones(), None), []);
    assert_eq!(shared_scale(["a", "b"], ones(), Some(["p_a", "p_a"])), []);
    assert_eq!(shared_scale(["a", "b"], pattern("scale", &[8]), None), []);
}

#[test]
fn two_candidates_for_a_tied_weight_are_reported() {
    let table = pattern("table", &[32, 8]);
    let transposed = |name: &str| {
        let mut transposed = floats(name, &[8, 32], |_| 0.0);
        transposed.float_data = (0..8 * 32).map(|i| table.float_data[(i % 32) * 8 + i / 32]).collect();
        transposed
    };
    let doubts = |head: TensorProto| {
        let parts = Parts {
            inputs: vec![info("x", 7, &["N", "4"])],
            weights: vec![table.clone(), head],
            nodes: vec![
                node("Gather", "embed", &["table", "x"], &["h"], vec![]),
                node("MatMul", "head", &["h", "head"], &["y"], vec![]),
            ],
            ..Parts::default()
        };
        whereabouts(&imported(parts, &Options::default()).unwrap())
    };
    assert_eq!(doubts(transposed("head")), [(Finding::Untied, "table".into(), "head".into())]);
    assert_eq!(doubts(pattern("head", &[8, 32])), []);
    // Zero matrices are equal but were never tied.
    assert_eq!(doubts(floats("head", &[8, 32], |_| 0.0)), []);
}

#[test]
fn a_weight_computed_from_another_one_is_reported() {
    let doubts = |read: &str| {
        let nodes = [("x", read, "h"), ("h", "t", "y")].map(|(x, w, y)| node("MatMul", y, &[x, w], &[y], vec![]));
        let parts = Parts {
            inputs: vec![info("x", 1, &["N", "8"])],
            weights: vec![pattern("w", &[8, 6]), pattern("other", &[8, 6]), pattern("t", &[6, 8])],
            nodes: nodes.to_vec(),
            hints: vec![hint("t", &["6", "8"], "pkg.onnxscript.optimizer.folded_from", "['w']")],
            ..Parts::default()
        };
        whereabouts(&imported(parts, &Options::default()).unwrap())
    };
    assert_eq!(doubts("w"), [(Finding::Untied, "w".into(), "t".into())]);
    // Without the source, it is the weight itself.
    assert_eq!(doubts("other"), []);
}

#[test]
fn what_the_file_calls_a_buffer_is_no_parameter() {
    let hint = hint("frequency", &["8"], "pkg.torch.export.graph_signature.InputSpec.kind", "BUFFER");
    let parts = Parts {
        inputs: vec![info("x", 1, &["N", "8"])],
        weights: vec![pattern("frequency", &[8]), pattern("weight", &[8])],
        nodes: vec![
            node("Mul", "a", &["x", "frequency"], &["h"], vec![]),
            node("Add", "b", &["h", "weight"], &["y"], vec![]),
        ],
        hints: vec![hint],
        ..Parts::default()
    };
    let model = imported(parts, &Options::default()).unwrap();
    let describe = |op: &Op| match op {
        Op::Parameter(p) => Some(format!("parameter {}", p.name)),
        Op::State(s) => Some(format!("state {}", s.name)),
        _ => None,
    };
    let mut names: Vec<String> = model.graph.ids().filter_map(|id| describe(&model.graph.node(id).op)).collect();
    names.sort();
    assert_eq!(names, ["parameter weight", "state frequency"]);
}

/// `x + expand(w)`, with the batch of 4 in the expand constant and another 4 beside it.
fn with_token(token: Vec<TensorProto>, nodes: Vec<NodeProto>) -> Result<Model, String> {
    let mut weights = vec![pattern("w", &[1, 4, 6]), integers("shape", &[3], &[4, 4, 6])];
    weights.extend(token);
    let parts = Parts { inputs: vec![info("x", 1, &["4", "4", "6"])], weights, nodes, ..Parts::default() };
    imported(parts, &Options::default())
}

fn first_output(model: &Model, batch: i64) -> Vec<f64> {
    let Batch::Symbol { name, .. } = &model.batch else { panic!("fixed: {:?}", model.batch) };
    let graph = bind(&model.graph, &Bindings::from([(name.clone(), batch)])).unwrap();
    let mut tensors: BTreeMap<String, Tensor> = BTreeMap::new();
    for id in graph.ids() {
        if let Op::Input(input) = &graph.node(id).op {
            let shape = input.fact.concrete().unwrap();
            let values: Vec<f32> = (0..shape.iter().product::<usize>()).map(|i| i as f32).collect();
            tensors.insert(input.name.clone(), Tensor::from_f32(&shape, &values));
        }
    }
    for (name, weight) in &model.weights {
        let Weight::Given(tensor) = weight else { panic!("`{name}` has no values") };
        tensors.insert(name.clone(), tensor.clone());
    }
    evaluate(&graph, &tensors).unwrap()[&graph.outputs[0].value].to_f64()
}

#[test]
fn a_batch_in_a_constant_is_opened_where_the_values_meet() {
    let nodes = vec![
        node("Expand", "expand", &["w", "shape"], &["e"], vec![]),
        node("Relu", "relu", &["e"], &["r"], vec![]),
        node("Concat", "join", &["r", "x"], &["y"], vec![int("axis", 1)]),
    ];
    let model = with_token(vec![], nodes).unwrap();
    assert_eq!(model.batch, Batch::Symbol { name: "batch".into(), default: Some(4) });
    // A smaller batch gives the first rows of a larger one.
    let (two, four) = (first_output(&model, 2), first_output(&model, 4));
    assert_eq!(two.len(), 2 * 8 * 6);
    assert_eq!(two[..], four[..two.len()]);
}

#[test]
fn a_constant_that_differs_from_sample_to_sample_keeps_the_batch() {
    let nodes = vec![node("Add", "add", &["x", "table"], &["y"], vec![])];
    let values: Vec<i64> = (0..4).collect();
    let table = integers("indices", &[4, 1, 1], &values);
    let cast = node("Cast", "cast", &["indices"], &["table"], vec![int("to", 1)]);
    let model = with_token(vec![table], [vec![cast], nodes].concat()).unwrap();
    let Batch::Fixed { size: Some(4), why } = &model.batch else { panic!("{:?}", model.batch) };
    assert!(why.contains("`add`") && why.contains("differ between samples"), "{why}");
    assert!(
        model.warnings.iter().any(|w| w.contains("dynamic_axes") && w.contains("keeps the exported size 4")),
        "{:?}",
        model.warnings
    );
}

#[test]
fn other_inputs_have_the_batch_where_their_values_meet_it() {
    let parts = |table: bool| Parts {
        inputs: vec![info("x", 1, &["8", "8"]), info("mask", 1, &["8", "1"]), info("table", 1, &["8", "8"])],
        nodes: vec![
            node("MatMul", "product", &["x", if table { "table" } else { "x" }], &["h"], vec![]),
            node("Mul", "masked", &["h", "mask"], &["y"], vec![]),
        ],
        ..Parts::default()
    };
    // Equal numbers alone are no batch: the table's first axis is contracted.
    let model = imported(parts(true), &Options::default()).unwrap();
    let fact = |name: &str| {
        let is = |id: &compiler::op::NodeId| matches!(&model.graph.node(*id).op, Op::Input(i) if i.name == name);
        model.graph.ids().find(is).map(|id| model.graph.node(id).facts[0].to_string()).unwrap()
    };
    assert_eq!(
        (fact("x"), fact("mask"), fact("table")),
        ("f32[batch, 8]".into(), "f32[batch, 1]".into(), "f32[8, 8]".into())
    );
    assert!(
        model
            .warnings
            .iter()
            .any(|w| w.contains("`table`") && w.contains("--batch-dim mask=0 --batch-dim x=0 --batch-dim table=0")),
        "{:?}",
        model.warnings
    );
    // Set manually, along another axis.
    let options = Options { batch_axes: BTreeMap::from([("table".to_string(), 1)]), ..Options::default() };
    let model = imported(parts(true), &options).unwrap();
    assert!(matches!(model.batch, Batch::Symbol { .. }), "{:?}", model.batch);
}

#[test]
fn the_time_of_a_recurrent_layer_is_not_the_batch() {
    let parts = Parts {
        inputs: vec![info("x", 1, &["5", "3", "4"])],
        weights: vec![pattern("w", &[1, 8, 4]), pattern("r", &[1, 8, 2]), floats("val_3", &[1, 3, 2], |_| 0.0)],
        nodes: vec![node(
            "LSTM",
            "lstm",
            &["x", "w", "r", "", "", "val_3", "val_3"],
            &["y"],
            vec![int("hidden_size", 2)],
        )],
        ..Parts::default()
    };
    let model = imported(parts, &Options::default()).unwrap();
    assert_eq!(model.batch, Batch::Symbol { name: "batch".into(), default: Some(3) });
    assert!(model.warnings.iter().any(|w| w.contains("`lstm`") && w.contains("axis 1")), "{:?}", model.warnings);
}

/// Writes a model with this output to a temporary folder.
fn write_model(parts: Parts) -> (tempfile::TempDir, PathBuf) {
    let graph = GraphProto {
        name: Some("model".into()),
        input: parts.inputs,
        output: vec![info("y", 1, &["N", "3"])],
        initializer: parts.weights,
        node: parts.nodes,
        ..Default::default()
    };
    let opset = OperatorSetIdProto { domain: None, version: Some(20) };
    let model = ModelProto { ir_version: Some(9), opset_import: vec![opset], graph: Some(graph), ..Default::default() };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.onnx");
    std::fs::write(&path, model.encode_to_vec()).unwrap();
    (folder, path)
}

fn pipec(folder: &Path, code: i32, arguments: &[&str]) -> (String, String) {
    let mut command = assert_cmd::Command::cargo_bin("pipec").unwrap();
    let output = command.current_dir(folder).args(arguments).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let (stdout, stderr) = (text(output.stdout), text(output.stderr));
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stderr}");
    (stdout, stderr)
}

#[test]
fn training_asks_before_it_trains_another_model() {
    let statistics = ["scale", "bias", "mean", "variance"];
    let mut weights = vec![pattern("w", &[4, 3])];
    weights.extend(statistics.map(|name| floats(name, &[3], |i| i as f32 + 1.0)));
    let (folder, _) = write_model(Parts {
        inputs: vec![info("x", 1, &["N", "4"])],
        weights,
        nodes: vec![
            node("MatMul", "product", &["x", "w"], &["h"], vec![]),
            node("BatchNormalization", "norm", &["h", "scale", "bias", "mean", "variance"], &["y"], vec![]),
        ],
        ..Parts::default()
    });
    let path = folder.path();
    let summary = pipec(path, 0, &["inspect", "m.onnx", "--format", "json"]).0;
    let summary: serde_json::Value = serde_json::from_str(&summary).unwrap();
    assert_eq!(summary["trainable"], false);
    assert_eq!(summary["doubts"][0]["finding"], "inference-batch-norm");
    assert_eq!((&summary["parameters"]["count"], &summary["states"]["count"]), (&18.into(), &6.into()));
    assert!(
        pipec(path, 0, &["inspect", "m.onnx"]).1.contains("warning: 1 BatchNormalization node is in inference mode")
    );
    assert!(pipec(path, 0, &["inspect", "m.onnx", "--train-mode"]).0.contains("trainable   yes"));

    let train = ["train", "m.onnx", "--synthetic-data", "--steps", "2", "--batch", "8"];
    let error = pipec(path, 2, &train).1;
    assert!(
        error.contains("error: m.onnx differs from the framework's training model")
            && error.contains("--accept-inference-model"),
        "{error}"
    );
    pipec(path, 0, &[&train[..], &["--accept-inference-model"]].concat());
    pipec(path, 0, &[&train[..], &["--train-mode"]].concat());

    let partition = ["partition", "m.onnx", "--gpus", "2", "--micro-batch", "8", "-o", "p.json"];
    let recorded = || {
        let plan = std::fs::read_to_string(path.join("p.json")).unwrap();
        serde_json::from_str::<serde_json::Value>(&plan).unwrap()["model"]["import"]["train_mode"].clone()
    };
    pipec(path, 0, &partition);
    assert_eq!(recorded(), false);
    pipec(path, 0, &[&partition[..], &["--train-mode"]].concat());
    assert_eq!(recorded(), true);
    // The plan records the import options.
    pipec(path, 0, &[&train[..], &["--plan", "p.json"]].concat());
}

#[test]
fn missing_values_are_enough_to_plan_and_not_to_train() {
    let mut weight = pattern("w", &[4, 3]);
    weight.float_data.clear();
    weight.data_location = Some(DataLocation::External as i32);
    weight.external_data =
        vec![StringStringEntryProto { key: Some("location".into()), value: Some("gone.bin".into()) }];
    let (folder, path) = write_model(Parts {
        inputs: vec![info("x", 1, &["N", "4"])],
        weights: vec![weight],
        nodes: vec![node("MatMul", "product", &["x", "w"], &["y"], vec![])],
        ..Parts::default()
    });
    let model = load(&path, &Options::default()).unwrap();
    assert_eq!(model.weights["w"], Weight::Missing { path: "gone.bin".into() });
    let at = folder.path();
    for verb in [
        &["inspect", "m.onnx"][..],
        &["profile", "m.onnx", "--micro-batch", "4", "--runs", "1", "--warmup", "0", "--no-cache"],
        &["partition", "m.onnx", "--gpus", "2", "--micro-batch", "4"],
    ] {
        assert!(pipec(at, 0, verb).1.contains("warning: external data file `gone.bin` does not exist"), "{verb:?}");
    }
    pipec(at, 0, &["simulate", "m.plan.json"]);
    let error = pipec(at, 2, &["train", "m.onnx", "--synthetic-data", "--steps", "1", "--batch", "4"]).1;
    assert!(error.contains("error: m.onnx has no weights") && error.contains("`gone.bin`"), "{error}");
}

/// Parameter counts as in PyTorch, tied ones once.
const COUNTS: [(&str, u64); 12] = [
    ("alexnet", 61_100_840),
    ("awdlm6", 65_323_678),
    ("bert_base", 109_514_298),
    ("densenet121", 7_978_856),
    ("gnmt8", 276_735_233),
    ("gpt2_mask", 124_439_808),
    ("inception_v3", 27_161_264),
    ("llama_s_mask", 55_976_448),
    ("resnet50", 25_557_032),
    ("t5_small_mask", 60_506_624),
    ("vgg16", 138_357_544),
    ("vit_b_16", 86_567_656),
];

fn parameters(model: &Model) -> u64 {
    let is_parameter = |id: &compiler::op::NodeId| matches!(model.graph.node(*id).op, Op::Parameter(_));
    let facts = model.graph.ids().filter(is_parameter).map(|id| model.graph.node(id).facts[0].clone());
    facts.map(|fact| fact.bytes().unwrap() / fact.dtype.size() as u64).sum()
}

#[test]
fn real_exports_for_training_raise_no_warning_and_have_all_parameters() {
    let Some(root) = data("models") else { return };
    for (name, count) in COUNTS {
        for kind in ["legacy_train", "dynamo_train_noopt"] {
            let model = load(&root.join(format!("{name}.{kind}.onnx")), &Options::default()).unwrap();
            assert_eq!(parameters(&model), count, "{name} {kind}");
            let warnings: Vec<_> = model.doubts.iter().filter(|doubt| !doubt.is_partial()).collect();
            let norms = warnings.iter().all(|doubt| doubt.finding == Finding::InferenceBatchNorm);
            assert!(warnings.is_empty() || (kind != "legacy_train" && norms), "{name} {kind}: {warnings:?}");
        }
    }
}

#[test]
fn real_inference_exports_are_reported() {
    let Some(root) = data("models") else { return };
    for (name, kind, finding, count) in [
        ("resnet50", "dynamo_eval", Finding::FoldedBatchNorm, 53),
        ("resnet50", "dynamo_train_noopt", Finding::InferenceBatchNorm, 53),
        ("densenet121", "dynamo_eval", Finding::FoldedBatchNorm, 59),
        ("densenet121", "dynamo_eval", Finding::InferenceBatchNorm, 62),
        ("densenet121", "dynamo_eval", Finding::Merged, 62),
        ("bert_base", "dynamo_eval", Finding::Merged, 2),
        ("vit_b_16", "dynamo_eval", Finding::Merged, 2),
        ("vit_b_16", "dynamo_eval", Finding::RemovedBias, 14),
        ("gpt2_mask", "dynamo_eval", Finding::RemovedBias, 48),
        ("vgg16", "dynamo_eval", Finding::RemovedBias, 16),
        ("densenet121", "dynamo_eval", Finding::RemovedBias, 1),
    ] {
        let model = load(&root.join(format!("{name}.{kind}.onnx")), &Options::default()).unwrap();
        let doubt = model.doubts.iter().find(|doubt| doubt.finding == finding);
        assert_eq!(doubt.map(|doubt| doubt.count), Some(count), "{name} {kind}: {:?}", model.doubts);
    }
    let file = root.join("resnet50.dynamo_train_noopt.onnx");
    let restored = load(&file, &train_mode()).unwrap();
    assert_eq!(count(&restored.graph, |op| matches!(op, Op::BatchNorm(_))), 53);
    assert!(load(&root.join("resnet50.dynamo_eval.onnx"), &train_mode()).unwrap_err().to_string().contains("folded"));
}

#[test]
fn parity_models_that_train_raise_no_doubt_and_damaged_ones_do() {
    let Some(root) = data("parity") else { return };
    for name in ["async_mlp3", "cnn_bn", "gpt", "lstm_lm", "mlp"] {
        for file in ["model", "model_dynbatch", "model_loss"] {
            let path = root.join(name).join(format!("{file}.onnx"));
            if path.exists() {
                let model = load(&path, &Options::default()).unwrap();
                assert_eq!((findings(&model), &model.warnings), (vec![], &vec![]), "{name} {file}");
                assert!(matches!(model.batch, Batch::Symbol { .. }), "{name} {file}: {:?}", model.batch);
            }
        }
    }
    let doubts = |file: &str| {
        let model = load(&root.join(file), &Options::default()).unwrap();
        model.doubts.into_iter().map(|doubt| (doubt.finding, doubt.count)).collect::<Vec<_>>()
    };
    assert_eq!(doubts("cnn_bn/model_dynamo.onnx"), [(Finding::FoldedBatchNorm, 3)]);
    assert_eq!(doubts("cnn_bn/model_dynamo_noopt.onnx"), [(Finding::InferenceBatchNorm, 3)]);
    let folded = [(Finding::Merged, 2), (Finding::Untied, 1), (Finding::FoldedParameter, 3)];
    assert_eq!(doubts("gpt/model_dynamo.onnx"), folded);
    assert_eq!(doubts("gpt/model_dynamo_noopt.onnx"), []);
    // Merged biases of recurrent layers under generated names are still trained.
    let model = load(&root.join("lstm_lm/model_dynamo.onnx"), &Options::default()).unwrap();
    assert_eq!(parameters(&model), 23_461);
}
