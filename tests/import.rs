//! Importing: models of other people's tools become graphs that compute what those tools computed.
//!
//! Small models written here are compared with stored text (`PIPEC_BLESS=1 cargo test` rewrites it). The parity models
//! of the shared data are run with the reference kernels and give the loss that PyTorch had.

use compiler::graph::bind::{bind, symbols};
use compiler::graph::evaluate::evaluate;
use compiler::graph::verify::verify;
use compiler::graph::{Graph, text};
use compiler::import::import::{Batch, Model, Options, Weight, load};
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
use std::path::{Path, PathBuf};

/// The folder of shared data, or `None` with a line that says so.
fn data(inside: &str) -> Option<PathBuf> {
    let root =
        std::env::var("PIPEC_DATA").unwrap_or_else(|_| concat!(env!("CARGO_MANIFEST_DIR"), "/../shared/data").into());
    let path = Path::new(&root).join(inside);
    if path.exists() {
        return Some(path);
    }
    println!("skipped: no shared data");
    None
}

/// All arrays of an `.npz` file whose members are not compressed, as NumPy writes it by default.
fn npz(path: &Path) -> BTreeMap<String, Tensor> {
    let bytes = std::fs::read(path).unwrap();
    let number = |at: usize, width: usize| bytes[at..at + width].iter().rev().fold(0usize, |n, b| n << 8 | *b as usize);
    let end = (0..=bytes.len() - 22).rev().find(|&at| bytes[at..at + 4] == *b"PK\x05\x06").unwrap();
    let (count, mut at) = (number(end + 10, 2), number(end + 16, 4));
    let mut arrays = BTreeMap::new();
    for _ in 0..count {
        assert_eq!(number(at + 10, 2), 0, "a compressed member");
        let (name_length, extra, comment) = (number(at + 28, 2), number(at + 30, 2), number(at + 32, 2));
        let name = String::from_utf8(bytes[at + 46..at + 46 + name_length].to_vec()).unwrap();
        let local = number(at + 42, 4);
        let start = local + 30 + number(local + 26, 2) + number(local + 28, 2);
        arrays.insert(name.trim_end_matches(".npy").to_string(), npy(&bytes[start..]));
        at += 46 + name_length + extra + comment;
    }
    arrays
}

/// One array: the header is a Python dictionary as text.
fn npy(bytes: &[u8]) -> Tensor {
    assert_eq!(&bytes[..6], b"\x93NUMPY");
    let (start, length) = match bytes[6] {
        1 => (10, u16::from_le_bytes([bytes[8], bytes[9]]) as usize),
        _ => (12, u32::from_le_bytes(bytes[8..12].try_into().unwrap()) as usize),
    };
    let header = std::str::from_utf8(&bytes[start..start + length]).unwrap();
    assert!(header.contains("'fortran_order': False"));
    let dtype = ["f8", "f4", "i8"].into_iter().find(|d| header.contains(&format!("'<{d}'"))).unwrap();
    let dims = header.split_once("'shape': (").unwrap().1.split_once(')').unwrap().0;
    let shape: Vec<usize> = dims.split(',').filter_map(|d| d.trim().parse().ok()).collect();
    let count: usize = shape.iter().product();
    let body = &bytes[start + length..];
    let eights = body.chunks_exact(8).take(count).map(|b| <[u8; 8]>::try_from(b).unwrap());
    match dtype {
        "f8" => Tensor::from_f64(&shape, &eights.map(f64::from_le_bytes).collect::<Vec<_>>()),
        "i8" => Tensor::from_i64(&shape, &eights.map(i64::from_le_bytes).collect::<Vec<_>>()),
        _ => {
            let fours = body.chunks_exact(4).take(count).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
            Tensor::from_f32(&shape, &fours.collect::<Vec<_>>())
        }
    }
}

/// The values of the first step of an array `[steps, …]`.
fn first_step(t: &Tensor) -> Tensor {
    let shape = t.shape()[1..].to_vec();
    let bytes = shape.iter().product::<usize>() * t.dtype().size();
    Tensor::new(t.dtype(), shape, t.bytes().slice(..bytes)).unwrap()
}

/// All results of the model on the data of step 0, with the batch at `size`.
fn results(model: &Model, size: i64, given: &BTreeMap<String, Tensor>) -> Vec<Tensor> {
    let bindings: Bindings = symbols(&model.graph).into_iter().map(|s| (s, size)).collect();
    let graph = bind(&model.graph, &bindings).unwrap();
    verify(&graph).unwrap();
    let mut values = given.clone();
    for (name, weight) in &model.weights {
        match weight {
            Weight::Given(tensor) => values.insert(name.clone(), tensor.clone()),
            Weight::Missing { path } => panic!("{path}"),
        };
    }
    let values = evaluate(&graph, &values).unwrap();
    graph.outputs.iter().map(|o| values[&o.value].clone()).collect()
}

/// Mean cross-entropy over the last axis.
fn cross_entropy(logits: &Tensor, target: &Tensor) -> f64 {
    let classes = *logits.shape().last().unwrap();
    let (logits, target) = (logits.to_f64(), target.to_i64());
    let loss = |(row, label): (&[f64], &i64)| {
        let top = row.iter().copied().fold(f64::MIN, f64::max);
        row.iter().map(|v| (v - top).exp()).sum::<f64>().ln() + top - row[*label as usize]
    };
    logits.chunks_exact(classes).zip(&target).map(loss).sum::<f64>() / target.len() as f64
}

fn parity(name: &str, file: &str) -> Option<(Model, f64, f64)> {
    let folder = data("parity")?.join(name);
    let model = load(&folder.join(file), &Options::default()).unwrap();
    let mut given: BTreeMap<String, Tensor> =
        npz(&folder.join("inputs.npz")).into_iter().map(|(n, t)| (n, first_step(&t))).collect();
    let size = given["x"].shape()[0] as i64;
    let target = first_step(&npz(&folder.join("targets.npz"))["target"]);
    if file.contains("loss") {
        given.insert("target".to_string(), target.clone());
    }
    let results = results(&model, size, &given);
    let loss = match results[0].shape() {
        [] => results[0].to_f64()[0],
        _ => cross_entropy(&results[0], &target),
    };
    let want = npz(&folder.join("expected.npz"))["loss_sgd"].to_f64()[0];
    Some((model, loss, want))
}

#[test]
fn parity_models_give_the_loss_of_pytorch() {
    for name in ["mlp", "cnn_bn", "gpt"] {
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
