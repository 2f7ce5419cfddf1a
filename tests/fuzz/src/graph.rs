//! Edits of a well-formed ONNX graph: operators, edges, attributes, shapes and constants.

use super::choices::Choices;
use compiler::import::onnx::proto::tensor_shape_proto::dimension;
use compiler::import::onnx::proto::type_proto::Value as TypeValue;
use compiler::import::onnx::proto::{AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto};
use models::zoo;

/// Zoo models at their small size.
pub const SEEDS: [&str; 5] = ["mlp", "residual-cnn", "gpt", "gnmt", "unet"];

/// Replacement operators: some of each family.
const OPERATORS: &[&str] = &[
    "Add",
    "MatMul",
    "Gemm",
    "Conv",
    "ConvTranspose",
    "MaxPool",
    "AveragePool",
    "Reshape",
    "Transpose",
    "Slice",
    "Gather",
    "GatherND",
    "ScatterND",
    "ScatterElements",
    "Concat",
    "Split",
    "Squeeze",
    "Unsqueeze",
    "Expand",
    "Tile",
    "Pad",
    "Range",
    "Shape",
    "Size",
    "ConstantOfShape",
    "OneHot",
    "Where",
    "Cast",
    "TopK",
    "CumSum",
    "Resize",
    "Einsum",
    "Softmax",
    "LayerNormalization",
    "BatchNormalization",
    "InstanceNormalization",
    "Dropout",
    "LSTM",
    "GRU",
    "RNN",
    "ReduceSum",
    "ReduceMax",
    "ArgMax",
    "NonZero",
    "If",
    "Loop",
    "Scan",
    "Attention",
    "GridSample",
    "SoftmaxCrossEntropyLoss",
    "QuantizeLinear",
    "SequenceAt",
    "Trilu",
    "DFT",
    "Mod",
    "Pow",
    "BitShift",
    "Identity",
    "Flatten",
    "DepthToSpace",
];

pub fn seed(at: usize) -> ModelProto {
    let name = SEEDS[at];
    let (entry, _) = zoo::find(name).expect("the zoo has the seeds");
    zoo::build(name, &entry.small()).expect("a small model is built").model
}

/// Applies edits, one for every few remaining bytes.
pub fn edit(model: &mut ModelProto, choices: &mut Choices<'_>) {
    for _ in 0..12 {
        if !choices.any() {
            return;
        }
        let Some(graph) = &mut model.graph else { return };
        match choices.below(16) {
            0 => model.opset_import.iter_mut().for_each(|set| set.version = Some(1 + choices.below(27) as i64)),
            1 => shape(choices, &mut graph.input),
            2 => shape(choices, &mut graph.output),
            3 | 4 => constant(choices, &mut graph.initializer),
            _ => node(graph, choices),
        }
    }
}

fn shape(choices: &mut Choices<'_>, values: &mut [ValueInfoProto]) {
    let at = choices.below(values.len());
    let Some(TypeValue::TensorType(tensor)) =
        values.get_mut(at).and_then(|info| info.r#type.as_mut()).and_then(|r#type| r#type.value.as_mut())
    else {
        return;
    };
    if choices.below(4) == 0 {
        tensor.elem_type = Some(choices.below(24) as i32);
        return;
    }
    let Some(shape) = &mut tensor.shape else { return };
    let at = choices.below(shape.dim.len());
    match shape.dim.get_mut(at) {
        Some(dim) => dim.value = Some(dimension::Value::DimValue(choices.number())),
        None => tensor.shape = None,
    }
}

fn constant(choices: &mut Choices<'_>, tensors: &mut [TensorProto]) {
    let at = choices.below(tensors.len());
    let Some(tensor) = tensors.get_mut(at) else { return };
    let at = choices.below(tensor.dims.len());
    match choices.below(5) {
        0 => tensor.data_type = Some(choices.below(24) as i32),
        1 => tensor.dims.push(choices.number()),
        2 => tensor.dims.truncate(at),
        3 => {
            tensor.raw_data = None;
            tensor.int64_data = vec![choices.number(), choices.number()];
            tensor.dims = vec![2];
            tensor.data_type = Some(7);
        }
        _ => {
            if let Some(dim) = tensor.dims.get_mut(at) {
                *dim = choices.number();
            }
        }
    }
}

fn node(graph: &mut GraphProto, choices: &mut Choices<'_>) {
    let mut names: Vec<String> = graph.node.iter().flat_map(|node| node.output.iter().cloned()).collect();
    names.extend(graph.initializer.iter().map(|tensor| tensor.name().to_string()));
    let name = choices.of_list(&names).cloned().unwrap_or_default();
    let (count, at) = (graph.node.len(), choices.below(graph.node.len()));
    let body = graph.clone();
    let Some(node) = graph.node.get_mut(at) else { return };
    match choices.below(9) {
        0 => node.op_type = choices.of_list(OPERATORS).map(ToString::to_string),
        1 => {
            let at = choices.below(node.input.len());
            if let Some(input) = node.input.get_mut(at) {
                *input = name;
            }
        }
        2 => node.input.push(name),
        3 => {
            node.input.pop();
        }
        4 => {
            let copy: NodeProto = node.clone();
            graph.node.insert(choices.below(count), copy);
        }
        5 => {
            graph.node.remove(at);
        }
        6 => {
            node.output.push(format!("extra{at}"));
        }
        7 if choices.below(6) == 0 => {
            // A nested graph, for operators with bodies.
            let body = GraphProto { node: body.node.into_iter().take(4).collect(), ..body };
            let name = Some(["body", "then_branch", "else_branch"][choices.below(3)].to_string());
            node.attribute.push(AttributeProto { name, r#type: Some(5), g: Some(body), ..AttributeProto::default() });
        }
        _ => attribute(&mut node.attribute, choices),
    }
}

fn attribute(attributes: &mut Vec<AttributeProto>, choices: &mut Choices<'_>) {
    const NAMES: [&str; 12] = [
        "axis",
        "axes",
        "perm",
        "pads",
        "strides",
        "dilations",
        "kernel_shape",
        "group",
        "hidden_size",
        "num_heads",
        "blocksize",
        "keepdims",
    ];
    let at = choices.below(attributes.len());
    match (choices.below(4), attributes.get_mut(at)) {
        (0, Some(_)) => {
            attributes.remove(at);
        }
        (1 | 2, Some(attribute)) => {
            attribute.i = attribute.i.map(|_| choices.number());
            attribute.f = attribute.f.map(|_| choices.number() as f32);
            if let Some(number) = attribute.ints.first_mut() {
                *number = choices.number();
            }
        }
        _ => {
            let name = choices.of_list(&NAMES).map(ToString::to_string);
            let fresh = AttributeProto { name, ..AttributeProto::default() };
            attributes.push(match choices.below(2) {
                0 => AttributeProto { r#type: Some(2), i: Some(choices.number()), ..fresh },
                _ => AttributeProto { r#type: Some(7), ints: vec![choices.number(), choices.number()], ..fresh },
            });
        }
    }
}
