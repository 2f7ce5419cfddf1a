//! Initializers: which are parameters, which are constants, and how their bytes become tensors.
//!
//! - A float of rank 1 or more is a parameter under its own name, wherever it is read; read as a running statistic, it
//!   is a state.
//! - A float of rank 0, and every integer or truth, is a constant.
//! - A name that an exporter made up (`onnx::MatMul_12`, `val_7`) says that the values are derived. A small one is a
//!   constant, and so is one that is only added, multiplied or chosen from element by element, or that a recurrent layer
//!   starts from: a mask, a table of angles. A large one of rank 2 or more that is read in another way can only be weights
//!   that were transposed or merged: it is trained under the name it has, and the user is told.
//!   So are the weights and biases of a recurrent layer, of any size.
//! - Where the file says that it is a buffer of the source model, it is a state.
//! - A constant whose external file does not exist cannot be computed with, but has a shape: it is a state.

use super::{Known, Weight};
use crate::import::onnx::check_graph::each_node;
use crate::import::onnx::element::element_name;
use crate::import::onnx::model::{Node, Payload, Tensor as Source};
use crate::import::onnx::name::shown;
use crate::import::onnx::proto::tensor_proto::DataType;
use crate::tensor::fact::Fact;
use crate::tensor::{DType, Tensor};
use std::collections::{BTreeSet, HashMap, HashSet};

/// Elements from which an initializer with a made-up name counts as weights.
const MERGED: usize = 1024;

/// How names begin that PyTorch's newer exporter gives to what it computed, before a number.
const MADE: [&str; 7] = ["val", "unsqueeze", "cos", "sin", "mul", "cat", "expand"];

/// The element type with this ONNX code, if pipec computes with it.
pub fn dtype_of(code: i32) -> Option<DType> {
    Some(match DataType::try_from(code).ok()? {
        DataType::Double => DType::F64,
        DataType::Float => DType::F32,
        DataType::Float16 => DType::F16,
        DataType::Bfloat16 => DType::Bf16,
        DataType::Int64 => DType::I64,
        DataType::Int32 => DType::I32,
        DataType::Int16 => DType::I16,
        DataType::Int8 => DType::I8,
        DataType::Uint64 => DType::U64,
        DataType::Uint32 => DType::U32,
        DataType::Uint16 => DType::U16,
        DataType::Uint8 => DType::U8,
        DataType::Bool => DType::Bool,
        _ => return None,
    })
}

/// Element type and shape; or what kind of tensor pipec cannot hold.
pub fn fact_of(source: &Source) -> Result<Fact, String> {
    let unknown = || format!("a tensor of element type {}", element_name(source.elem_type));
    let dtype = dtype_of(source.elem_type).ok_or_else(unknown)?;
    Ok(Fact::new(dtype, source.dims.iter().map(|&d| d.into()).collect()))
}

/// The tensor, as a view of the file's bytes; or what kind of tensor pipec cannot hold.
pub fn tensor_of(source: &Source) -> Result<Tensor, String> {
    let fact = fact_of(source)?;
    let shape = fact.concrete().ok_or_else(|| format!("a tensor of shape {fact}"))?;
    match &source.payload {
        Payload::Bytes(bytes) => Tensor::new(fact.dtype, shape, bytes.clone()).map_err(|e| e.to_string()),
        Payload::Strings(_) => Err("a tensor of strings".to_string()),
        Payload::Missing { path } => Err(format!("a constant in the file `{}`, which does not exist,", shown(path))),
    }
}

/// Every initializer that these nodes read by name, and the list of those that are parameters or states; `buffers` are states.
pub fn sort(
    initializers: &[Source],
    nodes: &[Node],
    buffers: &BTreeSet<String>,
) -> (HashMap<String, Known>, Vec<Weight>) {
    let mut known = HashMap::with_capacity(initializers.len());
    let (mut weights, applied, layers) = (Vec::new(), applied(nodes), of_layers(nodes));
    for source in initializers {
        let Ok(fact) = fact_of(source) else {
            known.insert(source.name.clone(), Known::Absent("a tensor of this element type"));
            continue;
        };
        let initial = tensor_of(source);
        let is_weight = || {
            !made_up(&source.name)
                || layers.contains(source.name.as_str())
                || (merged(source) && applied.contains(source.name.as_str()))
        };
        let vector = fact.dtype.is_float() && fact.rank() > 0;
        let buffer = vector && buffers.contains(&source.name);
        let trainable = vector && !buffer && is_weight();
        let entry = match (initial, &source.payload) {
            (Ok(tensor), _) if !trainable && !buffer => Known::Tensor(tensor),
            (initial, payload) => {
                let initial = initial.map_err(|why| match payload {
                    Payload::Missing { path } => path.clone(),
                    _ => why,
                });
                weights.push(Weight::new(source.name.clone(), fact, initial, trainable));
                Known::Weight(weights.len() - 1)
            }
        };
        known.insert(source.name.clone(), entry);
    }
    (known, weights)
}

/// The tensors that some node reads in another way than element by element, or as the state a recurrent layer starts from.
/// What the body of a node reads is among them.
fn applied(nodes: &[Node]) -> HashSet<&str> {
    let mut applied = HashSet::new();
    for node in nodes {
        for body in node.attributes.iter().filter_map(|attribute| attribute.g.as_ref()) {
            each_node(&body.node, &mut |inner| applied.extend(inner.input.iter().map(String::as_str)));
        }
        for (slot, name) in node.inputs.iter().enumerate() {
            let elementwise = match node.op_type.as_str() {
                "Add" | "Sub" | "Mul" | "Div" | "Pow" | "Where" | "And" | "Or" | "Equal" | "Less" | "Greater" => true,
                "LSTM" | "GRU" | "RNN" => slot >= 4,
                _ => false,
            };
            if !elementwise {
                applied.insert(name.as_str());
            }
        }
    }
    applied
}

/// The tensors that layers read as weights, perhaps under another shape: whoever made up their names, they are parameters
/// whatever their size. An exporter for inference transposes the weights of linear layers and names them anew.
fn of_layers(nodes: &[Node]) -> HashSet<&str> {
    let mut read = HashSet::new();
    for node in nodes.iter().rev() {
        match node.op_type.as_str() {
            "LSTM" | "GRU" | "RNN" => read.extend(node.inputs.iter().skip(1).take(3).map(String::as_str)),
            "MatMul" | "Gemm" => read.extend(node.inputs.iter().take(2).map(String::as_str)),
            "Conv" | "ConvTranspose" => read.extend(node.inputs.get(1).map(String::as_str)),
            "Unsqueeze" | "Reshape" | "Identity" if node.outputs.iter().any(|name| read.contains(name.as_str())) => {
                read.extend(node.inputs.first().map(String::as_str));
            }
            _ => {}
        }
    }
    read
}

/// Whether an exporter made the name up: `onnx::MatMul_12`, `val_7`, or that of an operator with a number, `unsqueeze_14`.
fn made_up(name: &str) -> bool {
    let numbered = |stem: &str| {
        name.strip_prefix(stem)
            .and_then(|rest| rest.strip_prefix('_'))
            .is_some_and(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
    };
    name.is_empty() || name.starts_with("onnx::") || MADE.iter().any(|stem| numbered(stem))
}

fn merged(source: &Source) -> bool {
    let elements = source.dims.iter().try_fold(1i64, |n, d| n.checked_mul(*d));
    source.dims.len() >= 2 && elements.is_none_or(|n| n >= MERGED as i64)
}

/// What to tell of parameters with made-up names that the graph reads.
pub fn warning<'a>(names: impl Iterator<Item = &'a str>) -> Option<String> {
    let names: Vec<&str> = names.filter(|name| made_up(name)).collect();
    let first = names.first()?;
    Some(format!(
        "{} parameters have names that the exporter made up, `{}` among them: it merged, transposed or folded the \
         model's own, which may have untied or joined them; export with `dynamo=False, \
         training=torch.onnx.TrainingMode.TRAINING, do_constant_folding=False` to keep them",
        names.len(),
        shown(first)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::import::onnx::model::OnnxModel;

    fn source(name: &str, elem_type: DataType, dims: &[i64]) -> Source {
        let bytes = dims.iter().product::<i64>() as usize * if elem_type == DataType::Int64 { 8 } else { 4 };
        let payload = Payload::Bytes(vec![0; bytes].into());
        Source { name: name.into(), elem_type: elem_type as i32, dims: dims.to_vec(), payload }
    }

    #[test]
    fn initializers_are_sorted_by_type_rank_and_name() {
        let mut lost = source("mask", DataType::Int64, &[4]);
        lost.payload = Payload::Missing { path: "gone.bin".into() };
        let node = Node {
            name: "product".into(),
            op_type: "MatMul".into(),
            domain: String::new(),
            overload: String::new(),
            inputs: vec!["x".into(), "onnx::MatMul_7".into()],
            outputs: vec!["y".into()],
            attributes: Vec::new(),
            module: String::new(),
            metadata: Vec::new(),
        };
        let model = OnnxModel {
            initializers: vec![
                source("w", DataType::Float, &[4]),
                source("scale", DataType::Float, &[]),
                source("index", DataType::Int64, &[4]),
                source("val_3", DataType::Float, &[4]),
                source("onnx::MatMul_7", DataType::Float, &[64, 64]),
                source("val_4", DataType::Float, &[64, 64]),
                source("frequency", DataType::Float, &[4]),
                lost,
                source("words", DataType::String, &[0]),
            ],
            nodes: vec![node],
            buffers: BTreeSet::from(["frequency".to_string()]),
            ..OnnxModel::default()
        };
        let (known, weights) = sort(&model.initializers, &model.nodes, &model.buffers);
        let names: Vec<(&str, bool)> = weights.iter().map(|w| (w.name.as_str(), w.trainable)).collect();
        assert_eq!(names, [("w", true), ("onnx::MatMul_7", true), ("frequency", false), ("mask", false)]);
        assert_eq!(weights[3].initial, Err("gone.bin".to_string()));
        for constant in ["scale", "index", "val_3", "val_4"] {
            assert!(matches!(known[constant], Known::Tensor(_)), "{constant}");
        }
        assert!(matches!(known["words"], Known::Absent(_)));
        assert!(warning(names.iter().map(|n| n.0)).unwrap().contains("`onnx::MatMul_7`"));
    }
}
