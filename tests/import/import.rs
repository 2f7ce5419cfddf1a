//! Importing: models of other tools become graphs that compute the same.
//!
//! Small models written here are compared with stored text (`PIPEC_BLESS=1 cargo test` rewrites it). The parity models
//! of the shared data run on the reference kernels and give PyTorch's loss.

use crate::support::shared::{arrays, cross_entropy, data, first_step, results};
use compiler::graph::bind::bind;
use compiler::graph::evaluate::evaluate;
use compiler::graph::{Graph, text};
use compiler::import::import::{Batch, Model, Options, Weight, from_onnx, load};
use compiler::import::onnx::decode;
use compiler::import::onnx::proto::attribute_proto::AttributeType;
use compiler::import::onnx::proto::tensor_shape_proto::{Dimension, dimension};
use compiler::import::onnx::proto::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, TensorShapeProto, TypeProto,
    ValueInfoProto, type_proto,
};
use compiler::op::Op;
use compiler::tensor::Tensor;
use compiler::tensor::dim::Bindings;
use prost::Message;
use std::collections::BTreeMap;
use std::path::Path;

fn parity(name: &str, file: &str) -> Option<(Model, f64, f64)> {
    let folder = data("parity")?.join(name);
    let model = load(&folder.join(file), &Options::default()).unwrap();
    let mut tensors: BTreeMap<String, Tensor> =
        arrays(&folder.join("inputs.npz")).into_iter().map(|(n, t)| (n, first_step(&t))).collect();
    let size = tensors["x"].shape()[0] as i64;
    let target = first_step(&arrays(&folder.join("targets.npz"))["target"]);
    if file.contains("loss") {
        tensors.insert("target".to_string(), target.clone());
    }
    let results = results(&model, size, &tensors);
    let loss = match results[0].shape() {
        [] => results[0].to_f64()[0],
        _ => cross_entropy(&results[0], &target),
    };
    let want = arrays(&folder.join("expected.npz"))["loss_sgd"].to_f64()[0];
    Some((model, loss, want))
}

#[test]
fn parity_models_give_the_loss_of_pytorch() {
    for name in ["mlp", "cnn_bn", "gpt", "lstm_lm"] {
        for file in ["model.onnx", "model_dynbatch.onnx", "model_loss.onnx"] {
            let Some((model, loss, want)) = parity(name, file) else { return };
            println!("{name}/{file}: {} nodes, loss {loss}, PyTorch {want}, {:?}", model.graph.len(), model.batch);
            assert!((loss - want).abs() < 1e-5, "{name}/{file}: {loss}, PyTorch has {want}");
            assert!(matches!(&model.batch, Batch::Symbol { name, .. } if name == "batch"), "{:?}", model.batch);
            assert_eq!(model.warnings, Vec::<String>::new());
            assert!(
                compiler::graph::order::canonical(&model.graph).iter().map(|id| id.0 as usize).eq(0..model.graph.len())
            );
            assert_eq!(model.graph.averages.len(), if name == "cnn_bn" { 6 } else { 0 });
        }
    }
}

#[test]
fn tied_weights_are_one_parameter_and_open_batches_agree() {
    let Some(folder) = data("parity/gpt") else { return };
    let load = |file: &str| load(&folder.join(file), &Options::default()).unwrap();
    let (frozen, open) = (load("model.onnx"), load("model_dynbatch.onnx"));
    let parameters = |g: &Graph| g.ids().filter(|id| matches!(g.node(*id).op, Op::Parameter(_))).count();
    assert_eq!(parameters(&frozen.graph), 28);
    assert_eq!(frozen.weights.keys().collect::<Vec<_>>(), open.weights.keys().collect::<Vec<_>>());
    for graph in [&frozen.graph, &open.graph] {
        let embedding =
            graph.ids().find(|id| matches!(&graph.node(*id).op, Op::Parameter(p) if p.name == "0.w.weight"));
        assert_eq!(graph.successors(embedding.unwrap()).len(), 2, "embedding and head");
        assert_eq!(graph.fact(graph.outputs[0].value).to_string(), "f32[batch, 16, 97]");
    }
    assert_eq!(frozen.batch, Batch::Symbol { name: "batch".into(), default: Some(4) });
    assert_eq!(open.batch, Batch::Symbol { name: "batch".into(), default: None });
}

/// Hostile models that must still import; the others must be rejected with the manifest's words.
#[test]
fn hostile_models_are_refused_in_words() {
    let Some(folder) = data("hostile") else { return };
    let manifest = std::fs::read_to_string(folder.join("MANIFEST.tsv")).unwrap();
    for row in manifest.lines().skip(1).filter(|row| row.starts_with("onnx/")) {
        let columns: Vec<&str> = row.split('\t').collect();
        let (file, exits, words) = (columns[0], columns[2], columns[5]);
        let start = std::time::Instant::now();
        let result = load(&folder.join(file), &Options::default());
        let seconds = start.elapsed().as_secs_f64();
        // Far above any normal time, even under load: detects non-termination.
        assert!(seconds < 60.0, "{file} took {seconds} s");
        match result {
            Ok(model) => {
                println!("{file}: {} nodes, {:?}, {:?} {seconds:.3} s", model.graph.len(), model.batch, model.warnings);
                assert!(exits.split('|').any(|e| e == "0"), "{file} was imported");
                if words == "missing.bin" {
                    assert!(model.warnings.iter().any(|w| w.contains(words)), "{:?}", model.warnings);
                }
            }
            Err(error) => {
                let message = error.to_string();
                println!("{file}: {message}");
                assert!(exits.split('|').any(|e| e == "2"), "{file} was refused: {message}");
                let lower = message.to_lowercase();
                let is_expected = words.split('|').any(|word| {
                    word == "-" || lower.contains(&word.replace("no (ops|nodes)", "no nodes").to_lowercase())
                });
                assert!(is_expected || words.contains('('), "{file}: `{message}` has none of {words}");
                assert!(!message.chars().any(|c| c.is_control() && c != '\n'), "{file}: {message:?}");
            }
        }
    }
}

fn node(op: &str, name: &str, inputs: &[&str], outputs: &[&str], attributes: Vec<AttributeProto>) -> NodeProto {
    let texts = |list: &[&str]| list.iter().map(|t| (*t).to_string()).collect();
    NodeProto {
        op_type: Some(op.into()),
        name: Some(name.into()),
        input: texts(inputs),
        output: texts(outputs),
        attribute: attributes,
        ..Default::default()
    }
}

fn int(name: &str, value: i64) -> AttributeProto {
    let kind = Some(AttributeType::Int as i32);
    AttributeProto { name: Some(name.into()), r#type: kind, i: Some(value), ..Default::default() }
}

fn ints(name: &str, values: &[i64]) -> AttributeProto {
    let kind = Some(AttributeType::Ints as i32);
    AttributeProto { name: Some(name.into()), r#type: kind, ints: values.to_vec(), ..Default::default() }
}

fn floats(name: &str, dims: &[i64]) -> TensorProto {
    let count: i64 = dims.iter().product();
    let values = (0..count).map(|i| i as f32 / 8.0).collect();
    TensorProto {
        name: Some(name.into()),
        dims: dims.to_vec(),
        data_type: Some(1),
        float_data: values,
        ..Default::default()
    }
}

fn integers(name: &str, values: &[i64]) -> TensorProto {
    TensorProto {
        name: Some(name.into()),
        dims: vec![values.len() as i64],
        data_type: Some(7),
        int64_data: values.to_vec(),
        ..Default::default()
    }
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

fn imported(
    name: &str,
    inputs: Vec<ValueInfoProto>,
    outputs: &[&str],
    initializer: Vec<TensorProto>,
    node: Vec<NodeProto>,
) -> Result<Model, String> {
    let output = outputs.iter().map(|o| ValueInfoProto { name: Some((*o).into()), ..Default::default() }).collect();
    let graph = GraphProto { name: Some(name.into()), input: inputs, output, initializer, node, ..Default::default() };
    let opset = OperatorSetIdProto { domain: None, version: Some(20) };
    let model = ModelProto { ir_version: Some(9), opset_import: vec![opset], graph: Some(graph), ..Default::default() };
    let source = decode::parse(model.encode_to_vec().into(), None).map_err(|e| e.to_string())?;
    from_onnx(&source, name, &Options::default()).map_err(|e| e.to_string())
}

/// Compares with `tests/import/NAME.txt`, or rewrites it under `PIPEC_BLESS=1`.
fn golden(name: &str, graph: &Graph) {
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/import")).join(format!("{name}.txt"));
    let got = text::print(graph);
    if std::env::var_os("PIPEC_BLESS").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, &got).unwrap();
    }
    let want = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(got, want, "{} differs; PIPEC_BLESS=1 rewrites it", path.display());
    assert_eq!(text::print(&text::parse(&got).unwrap()), got);
}

#[test]
fn a_static_batch_is_opened_through_constant_shapes() {
    let model = imported(
        "heads",
        vec![info("x", 1, &["4", "16", "64"])],
        &["y"],
        vec![floats("w", &[16, 10]), integers("apart", &[4, 16, 4, 16]), integers("rows", &[-1, 10])],
        vec![
            node("Reshape", "/a/Reshape", &["x", "apart"], &["h"], vec![]),
            node("Transpose", "/a/Transpose", &["h"], &["t"], vec![ints("perm", &[0, 2, 1, 3])]),
            node("MatMul", "/a/MatMul", &["t", "w"], &["m"], vec![]),
            node("Reshape", "/Reshape", &["m", "rows"], &["y"], vec![]),
        ],
    )
    .unwrap();
    assert_eq!(model.batch, Batch::Symbol { name: "batch".into(), default: Some(4) });
    golden("heads", &model.graph);
}

#[test]
fn running_statistics_are_states_that_follow_the_batch() {
    let statistics = ["scale", "bias", "mean", "var"];
    let mut initializers = vec![floats("k", &[2, 3, 3, 3])];
    initializers.extend(statistics.map(|name| floats(name, &[2])));
    let model = imported(
        "norm",
        vec![info("x", 1, &["N", "3", "8", "8"])],
        &["y", "mean_out"],
        initializers,
        vec![
            node("Conv", "/0/Conv", &["x", "k"], &["c"], vec![ints("pads", &[1, 1, 1, 1])]),
            node(
                "BatchNormalization",
                "/1/BatchNormalization",
                &["c", "scale", "bias", "mean", "var"],
                &["n", "mean_out", "var_out"],
                vec![int("training_mode", 1)],
            ),
            node("LeakyRelu", "/2/LeakyRelu", &["n"], &["y"], vec![]),
        ],
    )
    .unwrap();
    assert_eq!(model.warnings.len(), 1, "the running mean is no result: {:?}", model.warnings);
    golden("norm", &model.graph);
}

#[test]
fn a_mask_of_an_open_sequence_is_built_in_the_graph() {
    let model = imported(
        "mask",
        vec![info("x", 1, &["batch", "seq", "seq"]), info("target", 7, &["batch", "seq"])],
        &["loss"],
        vec![integers("one", &[1]), integers("last", &[2]), integers("perm_axis", &[0])],
        vec![
            node("Shape", "shape", &["x"], &["s"], vec![]),
            node("Gather", "rows", &["s", "one"], &["r"], vec![]),
            node("Gather", "columns", &["s", "last"], &["c"], vec![]),
            node("Concat", "square", &["r", "c"], &["sq"], vec![int("axis", 0)]),
            node("ConstantOfShape", "ones", &["sq"], &["o"], vec![]),
            node("Trilu", "lower", &["o"], &["l"], vec![int("upper", 0)]),
            node("Add", "masked", &["x", "l"], &["a"], vec![]),
            node("Transpose", "classes", &["a"], &["t"], vec![ints("perm", &[0, 2, 1])]),
            node("SoftmaxCrossEntropyLoss", "loss", &["t", "target"], &["loss"], vec![]),
        ],
    )
    .unwrap();
    golden("mask", &model.graph);
}

#[test]
fn faults_are_gathered_and_name_their_nodes() {
    let x = || vec![info("x", 1, &["4", "6"])];
    let bad = |nodes: Vec<NodeProto>| imported("bad", x(), &["y"], vec![integers("s", &[5, 5])], nodes).unwrap_err();
    let error = bad(vec![
        node("Reshape", "first", &["x", "s"], &["a"], vec![]),
        node("Relu", "behind", &["a"], &["b"], vec![]),
        node("Softmax", "second\u{1b}[31m", &["x"], &["c"], vec![int("axis", 7)]),
        node("Add", "sum", &["b", "c"], &["y"], vec![]),
    ]);
    assert_eq!(
        error,
        "node `first` (Reshape): the shape [5, 5] does not fit the input's [4, 6]\n\
         node `second[31m` (Softmax): axis 7 does not exist in a tensor of rank 2"
    );
    let error = bad(vec![
        node("Multinomial", "l", &["x"], &["a"], vec![]),
        node("Reluu", "r", &["a"], &["b"], vec![]),
        node("Reluu", "s", &["b"], &["y"], vec![]),
    ]);
    assert_eq!(
        error,
        "unsupported operators: Multinomial ×1 (first: node `l`; random numbers of this distribution are not implemented), \
         Reluu ×2 (first: node `r`)"
    );
}

#[test]
fn a_constant_index_lies_within_its_axis() {
    let gathered = |last: i64| {
        imported(
            "gather",
            vec![info("x", 1, &["N", "4"])],
            &["y"],
            vec![integers("places", &[0, -4, last])],
            vec![node("Gather", "columns", &["x", "places"], &["y"], vec![int("axis", 1)])],
        )
    };
    gathered(3).unwrap();
    for index in [4, -5] {
        assert_eq!(gathered(index).unwrap_err(), format!("node `columns` reads index {index} of an axis of size 4"));
    }
}

#[test]
fn a_batch_that_cannot_be_opened_is_fixed_and_says_why() {
    let model = imported(
        "fixed",
        vec![info("x", 1, &["4", "6"])],
        &["y"],
        vec![floats("token", &[4, 6])],
        vec![node("Concat", "joined", &["token", "x"], &["y"], vec![int("axis", 1)])],
    )
    .unwrap();
    let Batch::Fixed { size: Some(4), why } = &model.batch else { panic!("{:?}", model.batch) };
    assert!(why.starts_with("node `joined` (Concat)"), "{why}");
}

fn number(name: &str, value: f32) -> TensorProto {
    TensorProto { dims: vec![], float_data: vec![value], ..floats(name, &[]) }
}

fn truth(name: &str, value: bool) -> TensorProto {
    let kind = Some(9);
    TensorProto { name: Some(name.into()), data_type: kind, int32_data: vec![i32::from(value)], ..Default::default() }
}

#[test]
fn dropouts_in_training_mode_have_streams_of_their_own() {
    let model = |training: bool, outputs: &[&str]| {
        let inputs = vec![info("x", 1, &["N", "6"])];
        let settings = vec![number("ratio", 0.1), truth("training", training)];
        let dropout = |name, from, to: &[&str]| node("Dropout", name, &[from, "ratio", "training"], to, vec![]);
        let nodes = vec![
            dropout("first", "x", &["a"]),
            dropout("second", "a", &["b", "mask"]),
            dropout("third", "x", &["c"]),
            node("Add", "sum", &["b", "c"], &["y"], vec![]),
        ];
        imported("dropped", inputs, outputs, settings, nodes).unwrap()
    };
    let trained = model(true, &["y"]);
    assert_eq!(trained.warnings, Vec::<String>::new());
    golden("dropout", &trained.graph);
    let inference = model(false, &["y"]);
    assert!(inference.graph.ids().all(|id| !matches!(inference.graph.node(id).op, Op::Dropout(_))));
    assert_eq!(model(true, &["y", "mask"]).warnings.len(), 1, "the mask is no result");
    let relu = node("Relu", "r", &["pipec.counter"], &["y"], vec![]);
    let reserved = imported("taken", vec![info("pipec.counter", 1, &["4"])], &["y"], vec![], vec![relu]);
    assert!(reserved.unwrap_err().contains("rename it"));
}

#[test]
fn a_mask_that_is_read_is_refused() {
    let nodes = vec![
        node("Dropout", "drop", &["x", "ratio", "training"], &["a", "mask"], vec![]),
        node("Where", "pick", &["mask", "a", "x"], &["y"], vec![]),
    ];
    let settings = vec![number("ratio", 0.1), truth("training", true)];
    let error = imported("mask", vec![info("x", 1, &["N", "6"])], &["y"], settings, nodes).unwrap_err();
    assert!(error.contains("`pick` (Where): the mask of a dropout in training mode is not supported"), "{error}");
}

#[test]
fn recurrent_weights_are_the_parameters_they_were_made_from() {
    for file in ["model.onnx", "model_dynbatch.onnx", "model_loss.onnx"] {
        let Some((model, ..)) = parity("lstm_lm", file) else { return };
        assert_eq!(model.weights.len(), 11, "{file}");
        let mut layers = 0;
        for id in model.graph.ids().filter(|id| matches!(model.graph.node(*id).op, Op::Lstm(_))) {
            let weights = &model.graph.inputs(id)[1..5];
            let is_parameter = |v: &compiler::op::Value| matches!(model.graph.node(v.node).op, Op::Parameter(_));
            assert!(weights.iter().all(is_parameter), "{file}: a weight is put together at run time");
            layers += 1;
        }
        assert_eq!(layers, 2, "{file}");
    }
}

/// `sin(0)/2, sin(1)/2, …`
fn waves(name: &str, dims: &[i64]) -> TensorProto {
    let count: i64 = dims.iter().product();
    let values = (0..count).map(|i| ((i as f64).sin() / 2.0) as f32).collect();
    TensorProto { float_data: values, ..floats(name, dims) }
}

fn text_attribute(name: &str, value: &str) -> AttributeProto {
    let kind = Some(AttributeType::String as i32);
    let s = Some(value.as_bytes().to_vec().into());
    AttributeProto { name: Some(name.into()), r#type: kind, s, ..Default::default() }
}

/// All results for an input `x` of waves, with the symbols at these sizes.
fn on_waves(model: &Model, sizes: &[(&str, i64)], shape: &[usize]) -> Vec<Tensor> {
    let bindings: Bindings = sizes.iter().map(|(name, size)| ((*name).to_string(), *size)).collect();
    let graph = bind(&model.graph, &bindings).unwrap();
    let count: usize = shape.iter().product();
    let values: Vec<f32> = (0..count).map(|i| ((i as f64).sin() / 2.0) as f32).collect();
    let mut tensors = BTreeMap::from([("x".to_string(), Tensor::from_f32(shape, &values))]);
    for (name, weight) in &model.weights {
        let Weight::Given(tensor) = weight else { panic!("{name} has no value") };
        tensors.insert(name.clone(), tensor.clone());
    }
    let values = evaluate(&graph, &tensors).unwrap();
    graph.outputs.iter().map(|o| values[&o.value].clone()).collect()
}

fn assert_close(got: &Tensor, want: &[f64]) {
    assert_eq!(got.len(), want.len());
    for (g, w) in got.to_f64().iter().zip(want) {
        assert!((g - w).abs() < 2e-6, "{got:?} is not {want:?}");
    }
}

fn lstm(direction: &str, directions: i64, attributes: Vec<AttributeProto>, inputs: &[&str]) -> Result<Model, String> {
    let all_inputs = [&["x", "w", "r", "b"][..], inputs].concat();
    let states = [waves("h0", &[directions, 2, 2]), waves("c0", &[directions, 2, 2])];
    let weights = [waves("w", &[directions, 8, 2]), waves("r", &[directions, 8, 2]), waves("b", &[directions, 16])];
    let mut attributes = attributes;
    attributes.push(text_attribute("direction", direction));
    imported(
        "recurrent",
        vec![info("x", 1, &["T", "2", "2"])],
        &["y", "h", "c"],
        weights.into_iter().chain(states).chain([integers("lengths", &[2, 3])]).collect(),
        vec![node("LSTM", "lstm", &all_inputs, &["y", "h", "c"], attributes)],
    )
}

// Values from onnxruntime for the same model.
#[test]
fn recurrent_layers_run_in_all_directions() {
    let model = lstm("bidirectional", 2, vec![int("hidden_size", 2)], &["", "h0", "c0"]).unwrap();
    let outputs = on_waves(&model, &[("T", 3)], &[3, 2, 2]);
    assert_eq!((outputs[0].shape(), outputs[1].shape()), (&[3, 2, 2, 2][..], &[2, 2, 2][..]));
    let y = [
        [0.146203, 0.256317, 0.128003, 0.209616, -0.216405, -0.199362, -0.188486, -0.201345],
        [0.182415, 0.197996, 0.185385, 0.258541, -0.143045, -0.169469, -0.178704, -0.118842],
        [0.129468, 0.263106, 0.1802, 0.210985, -0.177598, -0.270963, -0.117052, 0.002725],
    ];
    assert_close(&outputs[0], y.as_flattened());
    assert_close(&outputs[1], &[0.129468, 0.263106, 0.1802, 0.210985, -0.216405, -0.199362, -0.188486, -0.201345]);
    assert_close(&outputs[2], &[0.307994, 0.779141, 0.320099, 0.629456, -0.45154, -0.339249, -0.373532, -0.326026]);

    let model = lstm("reverse", 1, vec![], &["", "h0", "c0"]).unwrap();
    let outputs = on_waves(&model, &[("T", 3)], &[3, 2, 2]);
    let y = [0.171593, 0.266903, 0.140831, 0.257971, 0.168723, 0.206493, 0.178219, 0.228343, 0.096641, 0.260187];
    assert_close(&outputs[0], &[&y[..], &[0.157843, 0.132525]].concat());
    assert_close(&outputs[2], &[0.397054, 0.706654, 0.323723, 0.776095]);
}

#[test]
fn recurrent_layers_with_rare_options_want_few_steps() {
    let error = |attributes, inputs: &[&str]| lstm("forward", 1, attributes, inputs).unwrap_err();
    assert!(error(vec![int("input_forget", 1)], &[]).contains("these options over T steps"));
    assert!(lstm("sideways", 1, vec![], &[]).unwrap_err().contains("`direction` is sideways"));
    assert!(
        lstm("bidirectional", 1, vec![], &[]).unwrap_err().contains("input 1 is f32[1, 8, 2], expected f32[2, 8, 2]")
    );
}

#[test]
fn what_lies_behind_the_end_of_a_sequence_is_zero() {
    // Sequences of 2 and 3 steps: the first gives its own result, then zeros.
    for direction in ["forward", "reverse"] {
        let open = lstm(direction, 1, vec![], &["lengths", "h0", "c0"]).unwrap();
        assert!(open.warnings.iter().any(|w| w.contains("different lengths")), "{:?}", open.warnings);
        let (y, h) = {
            let mut outputs = on_waves(&open, &[("T", 3)], &[3, 2, 2]);
            (outputs.remove(0).to_f64(), outputs.remove(0).to_f64())
        };
        let full = lstm(direction, 1, vec![], &["", "h0", "c0"]).unwrap();
        let (long, short) = (on_waves(&full, &[("T", 3)], &[3, 2, 2]), on_waves(&full, &[("T", 2)], &[2, 2, 2]));
        let (long_y, short_y) = (long[0].to_f64(), short[0].to_f64());
        // [T, 1, N, H]: row 0 is the short sequence, row 1 the long one.
        for t in 0..3 {
            let want = if t < 2 { short_y[t * 4..t * 4 + 2].to_vec() } else { vec![0.0; 2] };
            assert_eq!(y[t * 4..t * 4 + 2], want, "{direction}, step {t}");
            assert_eq!(y[t * 4 + 2..t * 4 + 4], long_y[t * 4 + 2..t * 4 + 4], "{direction}, step {t}");
        }
        assert_eq!(h[..2], short[1].to_f64()[..2], "{direction}");
        assert_eq!(h[2..], long[1].to_f64()[2..], "{direction}");
    }
}

#[test]
fn lrn_spans_neighbouring_channels() {
    let float = |name: &str, value: f32| {
        let kind = Some(AttributeType::Float as i32);
        AttributeProto { name: Some(name.into()), r#type: kind, f: Some(value), ..Default::default() }
    };
    let attributes = vec![int("size", 3), float("alpha", 0.6), float("beta", 0.75), float("bias", 1.5)];
    let nodes = vec![node("LRN", "lrn", &["x"], &["y"], attributes)];
    let model = imported("lrn", vec![info("x", 1, &["N", "5", "W", "1"])], &["y"], vec![], nodes).unwrap();
    let output = on_waves(&model, &[("N", 1), ("W", 2)], &[1, 5, 2, 1]).remove(0);
    // Values from onnxruntime.
    let want = [0.0, 0.304881, 0.324157, 0.050012, -0.269292, -0.342082, -0.099065, 0.233533, 0.355613, 0.149781];
    assert_close(&output, &want);
    let nodes = vec![node("LRN", "lrn", &["x"], &["y"], vec![int("size", i64::MAX)])];
    assert!(imported("lrn", vec![info("x", 1, &["N", "5"])], &["y"], vec![], nodes).unwrap_err().contains("1 to 256"));
}

#[test]
fn static_batches_of_real_exports_are_opened() {
    let Some(root) = data("models") else { return };
    for (name, size) in
        [("vit_b_16.legacy_train", 2), ("vit_b_16.dynamo_train_noopt", 2), ("awdlm6.dynamo_train_noopt", 4)]
    {
        let model = load(&root.join(format!("{name}.onnx")), &Options::default()).unwrap();
        assert_eq!(model.batch, Batch::Symbol { name: "batch".into(), default: Some(size) }, "{name}");
    }
}
