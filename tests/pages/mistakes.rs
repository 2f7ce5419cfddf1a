//! Typical mistakes and their error messages: pages in `tests/mistakes/`, rewritten by `PIPEC_BLESS=1`.
//!
//! Each mistake has a heading, the command, and the message. A message states what failed, where and why, and suggests
//! the next step on its own line, so that it suffices to fix the mistake.
#![cfg(target_os = "linux")]

use crate::support::builder::{F32, graph, initializer, model, node, typed};
use crate::support::console::{pages, play};
use compiler::import::onnx::proto::tensor_proto::DataLocation;
use compiler::import::onnx::proto::tensor_shape_proto::dimension;
use compiler::import::onnx::proto::{ModelProto, StringStringEntryProto, ValueInfoProto, type_proto};
use compiler::tensor::Tensor;
use prost::Message;
use std::fs;
use std::net::TcpListener;
use std::path::Path;

/// A convolution with a folded batch normalisation.
fn folded_model() -> ModelProto {
    let mut conv = node("Conv", &["x", "conv1.weight", "conv1.bias"], &["y"]);
    conv.name = Some("conv1".into());
    let rule = StringStringEntryProto {
        key: Some("pkg.onnxscript.rewriter.rule_name".into()),
        value: Some("FuseBatchNormIntoConv".into()),
    };
    conv.metadata_props.push(rule);
    let mut graph = graph(&[conv], &[typed("x", F32, &[8, 3, 8, 8])], &["y"]);
    graph.initializer = vec![
        initializer("conv1.weight", &Tensor::from_f32(&[2, 3, 3, 3], &[0.1; 54])),
        initializer("conv1.bias", &Tensor::from_f32(&[2], &[0.0; 2])),
    ];
    model(18, graph)
}

/// An input whose second dimension is symbolic.
fn symbolic_input(name: &str, symbol: &str) -> ValueInfoProto {
    let mut input = typed(name, F32, &[8, 1, 4]);
    if let Some(type_proto::Value::TensorType(tensor)) = input.r#type.as_mut().and_then(|kind| kind.value.as_mut()) {
        let dims = &mut tensor.shape.as_mut().unwrap().dim;
        dims[1].value = Some(dimension::Value::DimParam(symbol.into()));
    }
    input
}

/// A linear layer with external weights.
fn external_weights_model() -> ModelProto {
    let mut weight = initializer("w", &Tensor::from_f32(&[4, 2], &[0.0; 8]));
    weight.raw_data = None;
    weight.data_location = Some(DataLocation::External as i32);
    weight.external_data =
        vec![StringStringEntryProto { key: Some("location".into()), value: Some("apart.onnx.data".into()) }];
    let mut graph = graph(&[node("MatMul", &["x", "w"], &["y"])], &[typed("x", F32, &[8, 4])], &["y"]);
    graph.initializer = vec![weight];
    model(18, graph)
}

fn write_files(folder: &Path) {
    let onnx = |name: &str, model: &ModelProto| fs::write(folder.join(name), model.encode_to_vec()).unwrap();
    onnx("folded.onnx", &folded_model());
    onnx("apart.onnx", &external_weights_model());
    fs::write(folder.join("apart.onnx.data"), [0; 32]).unwrap();
    onnx(
        "strange.onnx",
        &model(18, graph(&[node("FancyAttention", &["x"], &["y"])], &[typed("x", F32, &[8, 4])], &["y"])),
    );
    onnx("open.onnx", &model(18, graph(&[node("Relu", &["x"], &["y"])], &[symbolic_input("x", "seq")], &["y"])));
    let x = || Tensor::from_f32(&[8, 6], &(0..48).map(|at| at as f32 / 48.0).collect::<Vec<_>>());
    let y = |labels: [i64; 8]| Tensor::from_i64(&[8], &labels);
    let good = [0, 1, 2, 0, 1, 2, 0, 1];
    let write = |name: &str, arrays: &[(&str, Tensor)]| {
        let arrays = arrays.iter().map(|(name, tensor)| (name.to_string(), tensor.clone())).collect();
        runtime::data::weights::write(&folder.join(name), &arrays).unwrap();
    };
    write("train.npz", &[("x", x()), ("y", y(good))]);
    write("no-labels.npz", &[("x", x())]);
    write("seven-classes.npz", &[("x", x()), ("y", y([0, 1, 2, 3, 4, 5, 6, 0]))]);
    write("from-minus-one.npz", &[("x", x()), ("y", y([-1, 0, 1, -1, 0, 1, -1, 0]))]);
    write("seven-columns.npz", &[("x", Tensor::from_f32(&[8, 7], &[0.5; 56])), ("y", y(good))]);
    write("rows-missing.npz", &[("x", x()), ("y", Tensor::from_i64(&[7], &[0; 7]))]);
    write("other-names.npz", &[("image", x()), ("mask", x()), ("y", y(good))]);
    write("float-labels.npz", &[("x", x()), ("y", Tensor::from_f32(&[8], &[0.0; 8]))]);
    write("no-class.npz", &[("x", x()), ("y", y([-100; 8]))]);
    write("not-numbers.npz", &[("x", Tensor::from_f32(&[8, 6], &[f32::NAN; 48])), ("y", y(good))]);
}

#[test]
fn every_message_says_what_to_do() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let (mut mistakes, mut faulty) = (0, Vec::new());
    for path in pages("tests/mistakes") {
        let folder = tempfile::tempdir().unwrap();
        write_files(folder.path());
        let page = play(&path, folder.path(), &[("PORT", port.clone())]);
        for mistake in page.split("\n## ").skip(1) {
            mistakes += 1;
            let console_text = mistake.split("```").filter(|block| block.starts_with("console")).collect::<String>();
            let count = |start: &str| console_text.lines().filter(|line| line.starts_with(start)).count();
            let is_warned = count("warning: ") > 0;
            let is_usage = console_text.contains("For more information, try '--help'.");
            let says_what_to_do = is_usage || is_warned || count("help: ") == 1;
            let code = console_text.trim_end().lines().last().unwrap_or_default();
            let codes = if count("error: ") == 1 { &["1", "2", "3"][..] } else { &["0"] };
            let has_code = console_text.contains("$ echo $?") && codes.contains(&code);
            if count("error: ") > 1 || count("error: ") == 0 && !is_warned || !says_what_to_do || !has_code {
                faulty.push(mistake.to_string());
            }
        }
    }
    assert!(faulty.is_empty(), "one message, what to do and the right code are wanted of\n{}", faulty.join("\n"));
    assert!(mistakes >= 50, "{mistakes} mistakes");
}
