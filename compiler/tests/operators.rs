//! ONNX operators that are lowered to several core ops, one node at a time, against values computed here.

use compiler::graph::bind::{bind, symbols};
use compiler::graph::evaluate::evaluate;
use compiler::import::import::{Options, Weight, from_onnx};
use compiler::import::onnx::decode;
use compiler::import::onnx::proto::attribute_proto::AttributeType;
use compiler::import::onnx::proto::tensor_shape_proto::{Dimension, dimension};
use compiler::import::onnx::proto::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, TensorShapeProto, TypeProto,
    ValueInfoProto, type_proto,
};
use compiler::tensor::dim::Bindings;
use compiler::tensor::{DType, Tensor};
use prost::Message;
use std::collections::BTreeMap;

struct Case {
    node: NodeProto,
    inputs: Vec<(String, Tensor)>,
    initializers: Vec<TensorProto>,
}

fn code(dtype: DType) -> i32 {
    match dtype {
        DType::F32 => 1,
        DType::U8 => 2,
        DType::I8 => 3,
        DType::I64 => 7,
        DType::Bool => 9,
        other => panic!("no test has {other}"),
    }
}

impl Case {
    fn new(operator: &str) -> Case {
        let (domain, operator) = operator.rsplit_once('.').unwrap_or(("", operator));
        let node = NodeProto {
            op_type: Some(operator.into()),
            domain: Some(domain.into()),
            name: Some("node".into()),
            ..Default::default()
        };
        Case { node, inputs: Vec::new(), initializers: Vec::new() }
    }

    fn info(name: &str, elem_type: i32, shape: &[usize]) -> ValueInfoProto {
        let dim =
            |size: &usize| Dimension { value: Some(dimension::Value::DimValue(*size as i64)), ..Default::default() };
        let shape = TensorShapeProto { dim: shape.iter().map(dim).collect() };
        let tensor = type_proto::Tensor { elem_type: Some(elem_type), shape: Some(shape) };
        let kind = TypeProto { value: Some(type_proto::Value::TensorType(tensor)), ..Default::default() };
        ValueInfoProto { name: Some(name.into()), r#type: Some(kind), ..Default::default() }
    }

    fn input(mut self, tensor: Tensor) -> Case {
        let name = format!("i{}", self.node.input.len());
        self.node.input.push(name.clone());
        self.inputs.push((name, tensor));
        self
    }

    /// An i64 initializer, known at import.
    fn constant(mut self, values: &[i64]) -> Case {
        let name = format!("i{}", self.node.input.len());
        self.node.input.push(name.clone());
        self.initializers.push(TensorProto {
            name: Some(name),
            dims: vec![values.len() as i64],
            data_type: Some(7),
            int64_data: values.to_vec(),
            ..Default::default()
        });
        self
    }

    fn no_input(mut self) -> Case {
        self.node.input.push(String::new());
        self
    }

    fn attribute(mut self, name: &str, kind: AttributeType, set: impl FnOnce(&mut AttributeProto)) -> Case {
        let mut attribute = AttributeProto { name: Some(name.into()), r#type: Some(kind as i32), ..Default::default() };
        set(&mut attribute);
        self.node.attribute.push(attribute);
        self
    }

    fn int(self, name: &str, value: i64) -> Case {
        self.attribute(name, AttributeType::Int, |a| a.i = Some(value))
    }

    fn ints(self, name: &str, values: &[i64]) -> Case {
        self.attribute(name, AttributeType::Ints, |a| a.ints = values.to_vec())
    }

    fn float(self, name: &str, value: f32) -> Case {
        self.attribute(name, AttributeType::Float, |a| a.f = Some(value))
    }

    fn text(self, name: &str, value: &str) -> Case {
        self.attribute(name, AttributeType::String, |a| a.s = Some(value.as_bytes().to_vec().into()))
    }

    /// The first `count` outputs, or the import error.
    fn outputs(mut self, count: usize) -> Result<Vec<Tensor>, String> {
        self.node.output = (0..count).map(|n| format!("o{n}")).collect();
        let info = |(name, t): &(String, Tensor)| Case::info(name, code(t.dtype()), t.shape());
        let output_info = |name: &String| ValueInfoProto { name: Some(name.clone()), ..Default::default() };
        let graph = GraphProto {
            name: Some("case".into()),
            input: self.inputs.iter().map(info).collect(),
            output: self.node.output.iter().map(output_info).collect(),
            initializer: self.initializers,
            node: vec![self.node],
            ..Default::default()
        };
        let opset = |domain: &str, version| OperatorSetIdProto { domain: Some(domain.into()), version: Some(version) };
        let model = ModelProto {
            ir_version: Some(10),
            opset_import: vec![opset("", 24), opset("ai.onnx.preview", 1), opset("ai.onnx.preview.training", 1)],
            graph: Some(graph),
            ..Default::default()
        };
        let source = decode::parse(model.encode_to_vec().into(), None).map_err(|e| e.to_string())?;
        let model = from_onnx(&source, "case", &Options::default()).map_err(|e| e.to_string())?;
        let batch = self.inputs[0].1.shape().first().copied().unwrap_or(1) as i64;
        let bindings: Bindings = symbols(&model.graph).into_iter().map(|symbol| (symbol, batch)).collect();
        let graph = bind(&model.graph, &bindings).map_err(|e| e.to_string())?;
        let mut inputs: BTreeMap<String, Tensor> = self.inputs.into_iter().collect();
        for (name, weight) in &model.weights {
            let Weight::Given(tensor) = weight else { panic!("{name} has no value") };
            inputs.insert(name.clone(), tensor.clone());
        }
        let values = evaluate(&graph, &inputs).map_err(|e| e.to_string())?;
        Ok(graph.outputs.iter().map(|o| values[&o.value].clone()).collect())
    }

    fn output(self) -> Tensor {
        self.outputs(1).unwrap().remove(0)
    }
}

/// `sin(seed), sin(seed + 1), …`
fn waves(shape: &[usize], seed: usize) -> Tensor {
    let count: usize = shape.iter().product();
    Tensor::from_f32(shape, &(0..count).map(|i| ((i + seed) as f64).sin() as f32).collect::<Vec<_>>())
}

fn assert_close(got: &Tensor, want: &[f64]) {
    assert_eq!(got.len(), want.len(), "{got:?}");
    for (g, w) in got.to_f64().iter().zip(want) {
        assert!((g - w).abs() < 2e-5, "{:?} is not {want:?}", got.to_f64());
    }
}

/// Attention of one head by definition; `seen(query, key)` is the mask.
fn reference_attention(
    q: &[f64],
    k: &[f64],
    v: &[f64],
    size: usize,
    is_visible: impl Fn(usize, usize) -> bool,
) -> Vec<f64> {
    let (queries, keys) = (q.len() / size, k.len() / size);
    let mut y = Vec::new();
    for i in 0..queries {
        let score = |j: usize| -> f64 {
            let dot: f64 = (0..size).map(|d| q[i * size + d] * k[j * size + d]).sum();
            if is_visible(i, j) { (dot / (size as f64).sqrt()).exp() } else { 0.0 }
        };
        let total: f64 = (0..keys).map(score).sum();
        let weighted_sum = |d: usize| -> f64 { (0..keys).map(|j| score(j) * v[j * size + d]).sum() };
        y.extend((0..size).map(|d| if total == 0.0 { 0.0 } else { weighted_sum(d) / total }));
    }
    y
}

#[test]
fn attention_sees_what_it_may() {
    let (q, k, v) = (waves(&[1, 2, 3, 2], 0), waves(&[1, 1, 4, 2], 30), waves(&[1, 1, 4, 2], 60));
    let expected = |is_visible: &dyn Fn(usize, usize) -> bool| -> Vec<f64> {
        let (k, v) = (k.to_f64(), v.to_f64());
        q.to_f64().chunks(6).flat_map(|head| reference_attention(head, &k, &v, 2, is_visible)).collect()
    };
    let case = || Case::new("Attention").input(q.clone()).input(k.clone()).input(v.clone());
    assert_close(&case().output(), &expected(&|_, _| true));
    assert_close(&case().int("is_causal", 1).output(), &expected(&|i, j| j <= i));
    assert_close(&case().int("left_window_size", 1).output(), &expected(&|i, j| j + 1 >= i));
    // The mask has no column for the last key, and the second query attends to nothing.
    let mask = Tensor::from_bool(&[3, 3], &[true, false, true, false, false, false, true, true, true]);
    assert_close(&case().input(mask).output(), &expected(&|i, j| j < 3 && [j != 1, false, true][i]));
    // Cached keys come first, and the causal mask accounts for them.
    let (past_k, new_k) = (waves(&[1, 1, 1, 2], 30), waves(&[1, 1, 3, 2], 32));
    let (past_v, new_v) = (waves(&[1, 1, 1, 2], 60), waves(&[1, 1, 3, 2], 62));
    let cached =
        Case::new("Attention").input(q.clone()).input(new_k).input(new_v).no_input().input(past_k).input(past_v);
    let outputs = cached.int("is_causal", 1).outputs(3).unwrap();
    assert_close(&outputs[0], &expected(&|i, j| j <= i + 1));
    assert_eq!((outputs[1].to_f64(), outputs[2].to_f64()), (k.to_f64(), v.to_f64()));
    let lengths = case().no_input().no_input().no_input().input(Tensor::from_i64(&[1], &[3]));
    assert_close(&lengths.output(), &expected(&|_, j| j < 3));
    assert!(case().int("qk_matmul_output_mode", 4).outputs(1).unwrap_err().contains("0 to 3"));
    let flat =
        Case::new("Attention").input(waves(&[1, 3, 4], 0)).input(waves(&[1, 3, 4], 9)).input(waves(&[1, 3, 4], 5));
    assert!(flat.outputs(1).unwrap_err().contains("q_num_heads"));
}

#[test]
fn subgraphs_change_what_attention_sees() {
    let (q, k, v) = (waves(&[1, 2, 3, 2], 0), waves(&[1, 1, 4, 2], 30), waves(&[1, 1, 4, 2], 60));
    let case = || Case::new("ai.onnx.preview.FlexAttention").input(q.clone()).input(k.clone()).input(v.clone());
    let (keys, values) = (k.to_f64(), v.to_f64());
    let heads = |q: &[f64]| {
        q.chunks(6).flat_map(|q| reference_attention(q, &keys, &values, 2, |_, _| true)).collect::<Vec<_>>()
    };
    assert_close(&case().output(), &heads(&q.to_f64()));
    // A subgraph with one node `x + x`.
    let twice = |a: &mut AttributeProto| {
        let end = |name: &str| ValueInfoProto { name: Some(name.into()), ..Case::info("x", 1, &[1, 2, 3, 4]) };
        let node = NodeProto {
            op_type: Some("Add".into()),
            input: vec!["x".into(), "x".into()],
            output: vec!["y".into()],
            ..Default::default()
        };
        a.g = Some(GraphProto {
            name: Some("twice".into()),
            input: vec![end("x")],
            output: vec![end("y")],
            node: vec![node],
            ..Default::default()
        });
    };
    // Doubled scores equal doubled queries; doubled probabilities double the result.
    let double = |list: Vec<f64>| list.into_iter().map(|v| v * 2.0).collect::<Vec<_>>();
    let scored = case().attribute("score_mod", AttributeType::Graph, twice);
    assert_close(&scored.output(), &heads(&double(q.to_f64())));
    let weighted = case().attribute("prob_mod", AttributeType::Graph, twice);
    assert_close(&weighted.output(), &double(heads(&q.to_f64())));
}

#[test]
fn rotary_embeddings_turn_pairs() {
    let x = waves(&[1, 1, 2, 4], 0);
    let angles = [0.3f64, 1.1, -0.4, 2.0];
    let cache = |f: fn(f64) -> f64| Tensor::from_f32(&[1, 2, 2], &angles.map(|a| f(a) as f32));
    for (interleaved, first, second) in [(0, [0, 1], [2, 3]), (1, [0, 2], [1, 3])] {
        let case = Case::new("RotaryEmbedding").input(x.clone()).input(cache(f64::cos)).input(cache(f64::sin));
        let mut want = vec![0.0; 8];
        for step in 0..2 {
            for pair in 0..2 {
                let (angle, at) = (angles[step * 2 + pair], |list: [usize; 2]| step * 4 + list[pair]);
                let (a, b) = (x.to_f64()[at(first)], x.to_f64()[at(second)]);
                want[at(first)] = a * angle.cos() - b * angle.sin();
                want[at(second)] = a * angle.sin() + b * angle.cos();
            }
        }
        assert_close(&case.int("interleaved", interleaved).output(), &want);
    }
}

#[test]
fn linear_attention_adds_up_what_was_said() {
    // One head of width 1: S' = e^g S + beta k (v - e^g S k), y = q S'.
    let column = |values: &[f32]| Tensor::from_f32(&[1, values.len(), 1], values);
    let (q, k, v) = ([1.0f32, 2.0, -1.0], [0.5f32, -1.0, 2.0], [3.0f32, 1.0, 0.5]);
    let (g, beta) = ([-0.5f32, 0.0, -1.0], [1.0f32, 0.5, 0.25]);
    let case = Case::new("LinearAttention").input(column(&q)).input(column(&k)).input(column(&v)).no_input();
    let case = case.input(column(&g)).input(column(&beta)).int("q_num_heads", 1).int("kv_num_heads", 1);
    let (mut state, mut want) = (0.0f64, Vec::new());
    for t in 0..3 {
        let of = |list: [f32; 3]| f64::from(list[t]);
        state *= of(g).exp();
        state += of(beta) * of(k) * (of(v) - state * of(k));
        want.push(of(q) * state);
    }
    let outputs = case.outputs(2).unwrap();
    assert_close(&outputs[0], &want);
    assert_close(&outputs[1], &[state]);
}

#[test]
fn einsum_is_sums_of_products() {
    let einsum = |equation: &str, inputs: &[&Tensor]| {
        inputs.iter().fold(Case::new("Einsum").text("equation", equation), |case, t| case.input((*t).clone()))
    };
    let (a, b, c) = (waves(&[2, 3], 0), waves(&[3, 4], 7), waves(&[2, 3, 3], 20));
    let (x, y, z) = (a.to_f64(), b.to_f64(), c.to_f64());
    let mut product = Vec::new();
    for (i, k) in (0..8).map(|n| (n / 4, n % 4)) {
        product.push((0..3).map(|j| x[i * 3 + j] * y[j * 4 + k]).sum::<f64>());
    }
    assert_close(&einsum("ij, jk", &[&a, &b]).output(), &product);
    let transposed: Vec<f64> = (0..8).map(|n| product[(n % 2) * 4 + n / 2]).collect();
    assert_close(&einsum("ij,jk->ki", &[&a, &b]).output(), &transposed);
    let sum: f64 = product.iter().sum();
    assert_close(&einsum("ij,jk->", &[&a, &b]).output(), &[sum]);
    let trace: Vec<f64> = (0..2).map(|n| (0..3).map(|i| z[n * 9 + i * 4]).sum()).collect();
    assert_close(&einsum("...ii->...", &[&c]).output(), &trace);
    let outer: Vec<f64> = (0..6).flat_map(|n| (0..12).map(move |m| (n, m))).map(|(n, m)| x[n] * y[m]).collect();
    assert_close(&einsum("ab,cd->abcd", &[&a, &b]).output(), &outer);
    let three: Vec<f64> =
        (0..2).map(|n| (0..3).map(|i| x[n * 3 + i] * x[n * 3 + i] * z[n * 9 + i * 4]).sum()).collect();
    assert_close(&einsum("ni,ni,nii->n", &[&a, &a, &c]).output(), &three);
    assert!(einsum("ij->ik", &[&a]).outputs(1).unwrap_err().contains("in no operand"));
    assert!(einsum("ij,jk", &[&a]).outputs(1).unwrap_err().contains("2 operands for 1 inputs"));
    assert!(einsum("ij,jk", &[&a, &a]).outputs(1).unwrap_err().contains("does not match one of size"));
}

#[test]
fn pooling_tells_places_and_goes_back() {
    let x = Tensor::from_f32(&[1, 1, 3, 4], &[1.0, 5.0, 2.0, 2.0, 0.0, 3.0, 9.0, 1.0, 7.0, 4.0, 6.0, 8.0]);
    let pool = || Case::new("MaxPool").input(x.clone()).ints("kernel_shape", &[2, 2]).ints("strides", &[1, 2]);
    let outputs = pool().outputs(2).unwrap();
    assert_close(&outputs[0], &[5.0, 9.0, 7.0, 9.0]);
    assert_eq!(outputs[1].to_i64(), [1, 6, 8, 6]);
    // Column-major indices: row + 3·column.
    assert_eq!(pool().int("storage_order", 1).outputs(2).unwrap()[1].to_i64(), [3, 7, 2, 7]);
    let padded = Case::new("MaxPool").input(x.clone()).ints("kernel_shape", &[3, 3]).ints("pads", &[1; 4]);
    let outputs = padded.ints("strides", &[2, 3]).outputs(2).unwrap();
    assert_eq!((outputs[0].to_f64(), outputs[1].to_i64()), (vec![5.0, 9.0, 7.0, 9.0], vec![1, 6, 8, 6]));
    let unpooled = Case::new("MaxUnpool").input(outputs[0].clone()).input(outputs[1].clone());
    // The 9 was the maximum of two windows and appears once.
    let unpooled = unpooled.ints("kernel_shape", &[2, 3]).ints("strides", &[1, 1]).output();
    assert_eq!(unpooled.to_f64(), [0.0, 5.0, 0.0, 0.0, 0.0, 0.0, 9.0, 0.0, 7.0, 0.0, 0.0, 0.0]);
    let norm = Case::new("LpPool").input(x).ints("kernel_shape", &[1, 2]).ints("strides", &[3, 2]).int("p", 3);
    assert_close(&norm.output(), &[126f64.cbrt(), 16f64.cbrt()]);
}

#[test]
fn columns_add_up_to_an_image() {
    // Windows of two over four positions, one channel of ones and one of twos: overlaps add up.
    let columns = Tensor::from_f32(&[1, 4, 3], &[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]);
    let image = Case::new("Col2Im").input(columns).constant(&[1, 4]).constant(&[1, 2]).output();
    assert_eq!(image.shape(), [1, 2, 1, 4]);
    assert_close(&image, &[1.0, 2.0, 2.0, 1.0, 2.0, 4.0, 4.0, 2.0]);
}

#[test]
fn transposed_convolutions_work_out_their_padding() {
    let (x, w) = (Tensor::from_f32(&[1, 1, 2], &[1.0, 10.0]), Tensor::from_f32(&[1, 1, 3], &[1.0, 2.0, 3.0]));
    let case = || Case::new("ConvTranspose").input(x.clone()).input(w.clone()).ints("strides", &[2]);
    assert_close(&case().output(), &[1.0, 2.0, 13.0, 20.0, 30.0]);
    assert_close(&case().text("auto_pad", "SAME_UPPER").output(), &[1.0, 2.0, 13.0, 20.0]);
    assert_close(&case().text("auto_pad", "SAME_LOWER").output(), &[2.0, 13.0, 20.0, 30.0]);
    assert_close(&case().ints("output_shape", &[6]).output(), &[1.0, 2.0, 13.0, 20.0, 30.0, 0.0]);
}

#[test]
fn a_deformed_convolution_without_offsets_is_a_convolution() {
    let (x, w) = (waves(&[1, 2, 4, 3], 0), waves(&[2, 1, 2, 2], 50));
    let convolution =
        Case::new("Conv").input(x.clone()).input(w.clone()).int("group", 2).ints("pads", &[1, 0, 0, 1]).output();
    let case = |offset: f32| {
        let offset = Tensor::from_f32(&[1, 8, 4, 3], &[offset; 96]);
        let case = Case::new("DeformConv").input(x.clone()).input(w.clone()).input(offset).int("group", 2);
        case.ints("pads", &[1, 0, 0, 1]).output()
    };
    assert_close(&case(0.0), &convolution.to_f64());
    // An offset of one pixel down and right equals the convolution of the shifted image.
    let shifted =
        Case::new("Conv").input(x.clone()).input(w.clone()).int("group", 2).ints("pads", &[0, 0, 1, 2]).output();
    let (got, want) = (case(1.0).to_f64(), shifted.to_f64());
    for (channel, row, column) in (0..24).map(|n| (n / 12, n / 3 % 4, n % 3)) {
        let at = channel * 16 + row * 4 + column + 1;
        assert!((got[channel * 12 + row * 3 + column] - want[at]).abs() < 1e-5, "{channel}, {row}, {column}");
    }
}

#[test]
fn a_region_of_a_slope_has_the_slope_at_its_middles() {
    // Bilinear interpolation of x + 10 y is exact.
    let image: Vec<f32> = (0..48).map(|n| (n % 8) as f32 + 10.0 * (n / 8) as f32).collect();
    let rois = Tensor::from_f32(&[1, 4], &[1.0, 0.5, 5.0, 4.5]);
    let case = Case::new("RoiAlign").input(Tensor::from_f32(&[1, 1, 6, 8], &image)).input(rois);
    let case = case.input(Tensor::from_i64(&[1], &[0])).int("output_height", 2).int("output_width", 2);
    let outputs = case.int("sampling_ratio", 2).text("coordinate_transformation_mode", "output_half_pixel").output();
    assert_close(&outputs, &[2.0 + 15.0, 4.0 + 15.0, 2.0 + 35.0, 4.0 + 35.0]);
}

#[test]
fn quantised_numbers_saturate() {
    let x = Tensor::from_f32(&[2, 3], &[-1000.0, -1.0, 0.25, 0.75, 3.0, 1000.0]);
    let (scale, zero) = (Tensor::from_f32(&[], &[0.5]), Tensor::from_i64(&[], &[10]).cast(DType::U8));
    let q = Case::new("QuantizeLinear").input(x.clone()).input(scale.clone()).input(zero.clone()).output();
    // Halves round to even: 0.5 to 0, 1.5 to 2.
    assert_eq!((q.dtype(), q.to_i64()), (DType::U8, vec![0, 8, 10, 12, 16, 255]));
    let dequantized = Case::new("DequantizeLinear").input(q.clone()).input(scale).input(zero).output();
    assert_close(&dequantized, &[-5.0, -1.0, 0.0, 1.0, 3.0, 122.5]);
    let per_column = Case::new("DequantizeLinear").input(q.clone()).input(Tensor::from_f32(&[3], &[1.0, 2.0, 4.0]));
    assert_close(&per_column.output(), &[0.0, 16.0, 40.0, 12.0, 32.0, 1020.0]);
    let blocks = Tensor::from_f32(&[2, 2], &[1.0, 2.0, 3.0, 4.0]);
    let blocked = Case::new("DequantizeLinear").input(q.clone()).input(blocks).int("block_size", 2);
    assert_close(&blocked.output(), &[0.0, 8.0, 20.0, 36.0, 48.0, 1020.0]);
    let bytes = |shape: &[usize], values: &[i64]| Tensor::from_i64(shape, values).cast(DType::U8);
    let product = Case::new("MatMulInteger").input(q).input(bytes(&[3, 1], &[1, 2, 3])).input(bytes(&[], &[10]));
    assert_eq!(product.output().to_i64(), [-10 + 2 * -2, 2 + 2 * 6 + 3 * 245]);
    let outputs =
        Case::new("DynamicQuantizeLinear").input(Tensor::from_f32(&[3], &[-51.0, 0.0, 204.0])).outputs(3).unwrap();
    assert_eq!(
        (outputs[0].to_i64(), outputs[1].to_f64(), outputs[2].to_i64()),
        (vec![0, 51, 255], vec![1.0], vec![51])
    );
}

/// A layer of two units over three steps, batch 2.
fn recurrent(operator: &str, gates: usize) -> Case {
    let case = Case::new(operator).input(waves(&[3, 2, 2], 1)).input(waves(&[1, 2 * gates, 2], 11));
    case.input(waves(&[1, 2 * gates, 2], 31)).input(waves(&[1, 4 * gates], 51))
}

#[test]
fn layers_written_out_step_by_step_are_the_core_ops() {
    // A clip of 1e6 has no effect but selects the unrolled lowering.
    for (operator, gates, outputs) in [("LSTM", 4, 3), ("GRU", 3, 2), ("RNN", 1, 2)] {
        for direction in ["forward", "reverse"] {
            for lengths in [[3, 3], [1, 3]] {
                let case = || {
                    let case = recurrent(operator, gates).input(Tensor::from_i64(&[2], &lengths));
                    case.text("direction", direction).int("linear_before_reset", i64::from(lengths[0] == 3))
                };
                let (fused, steps) = (case().outputs(2).unwrap(), case().float("clip", 1e6).outputs(outputs).unwrap());
                assert_close(&steps[0], &fused[0].to_f64());
                assert_close(&steps[1], &fused[1].to_f64());
            }
        }
    }
}

#[test]
fn a_gated_recurrent_unit_by_hand() {
    // With a zero initial state the recurrent part is only a bias: h = (1 - z) tanh(W x + b + r·c), or tanh(W x + b +
    // c).
    let (x, w, b) = (waves(&[3, 2, 2], 1).to_f64(), waves(&[1, 6, 2], 11).to_f64(), waves(&[1, 12], 51).to_f64());
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    for (flag, after) in [(0, false), (1, true)] {
        let y = recurrent("GRU", 3).int("linear_before_reset", flag).output().to_f64();
        for (row, unit) in (0..4).map(|n| (n / 2, n % 2)) {
            // Gate order z, r, h.
            let from_x = |gate: usize| {
                let k = gate * 2 + unit;
                x[row * 2] * w[k * 2] + x[row * 2 + 1] * w[k * 2 + 1] + b[k]
            };
            let from_h = |gate: usize| b[6 + gate * 2 + unit];
            let (z, r) = (sigmoid(from_x(0) + from_h(0)), sigmoid(from_x(1) + from_h(1)));
            let from_state = if after { r * from_h(2) } else { from_h(2) };
            let want = (1.0 - z) * (from_x(2) + from_state).tanh();
            assert!((y[row * 2 + unit] - want).abs() < 1e-6, "{} is not {want}", y[row * 2 + unit]);
        }
    }
}

#[test]
fn optimizers_take_one_step() {
    let (x, g, v) = ([1.0f32, -2.0], [0.5f32, 0.25], [0.1f32, 0.2]);
    let vector = |values: &[f32; 2]| Tensor::from_f32(&[2], values);
    let case = |name: &str, steps: i64| {
        let case = Case::new(&format!("ai.onnx.preview.training.{name}")).input(Tensor::from_f32(&[], &[0.1]));
        case.input(Tensor::from_i64(&[], &[steps])).input(vector(&x)).input(vector(&g)).input(vector(&v))
    };
    let elementwise = |f: &dyn Fn(f64, f64, f64) -> f64| -> Vec<f64> {
        (0..2).map(|n| f(f64::from(x[n]), f64::from(g[n]), f64::from(v[n]))).collect()
    };
    for (steps, beta) in [(0, 1.0), (3, 0.5)] {
        let momentum = case("Momentum", steps).float("alpha", 0.9).float("beta", 0.5).text("mode", "standard");
        let outputs = momentum.float("norm_coefficient", 0.01).outputs(2).unwrap();
        let velocity = |x: f64, g: f64, v: f64| 0.9 * v + beta * (g + 0.01 * x);
        assert_close(&outputs[1], &elementwise(&velocity));
        assert_close(&outputs[0], &elementwise(&|x, g, v| x - 0.1 * velocity(x, g, v)));
    }
    let outputs = case("Adagrad", 2).float("decay_factor", 0.5).float("epsilon", 0.25).outputs(2).unwrap();
    assert_close(&outputs[0], &elementwise(&|x, g, h| x - 0.05 * g / ((h + g * g).sqrt() + 0.25)));
    assert!(case("Adam", 0).outputs(3).unwrap_err().contains("are not 4 for each"));
}

#[test]
fn small_operators_by_their_formulas() {
    let x = Tensor::from_f32(&[2, 3], &[3.0, 4.0, 4.0, 0.0, 0.0, 0.0]);
    let hard = Case::new("Hardmax").input(x.clone()).output();
    assert_close(&hard, &[0.0, 1.0, 0.0, 1.0, 0.0, 0.0]);
    let last = Case::new("ArgMax").input(x.clone()).int("axis", 1).int("select_last_index", 1).output();
    assert_eq!(last.to_i64(), [2, 2]);
    // A zero norm gives zeros.
    let unit = Case::new("LpNormalization").input(x.clone()).int("p", 1).output();
    assert_close(&unit, &[3.0 / 11.0, 4.0 / 11.0, 4.0 / 11.0, 0.0, 0.0, 0.0]);
    let lower = Case::new("Trilu").input(x.clone()).input(Tensor::from_i64(&[], &[1])).int("upper", 0).output();
    assert_close(&lower, &[3.0, 4.0, 0.0, 0.0, 0.0, 0.0]);
    let gated = Case::new("SwiGLU").input(Tensor::from_f32(&[1], &[2.0])).input(Tensor::from_f32(&[1], &[3.0]));
    assert_close(&gated.float("alpha", 0.5).output(), &[6.0 / (1.0 + (-1f64).exp())]);
    let causal = Case::new("CausalConvWithState").input(Tensor::from_f32(&[1, 1, 3], &[1.0, 2.0, 3.0]));
    let causal = causal.input(Tensor::from_f32(&[1, 1, 3], &[100.0, 10.0, 1.0])).no_input();
    let outputs = causal.input(Tensor::from_f32(&[1, 1, 2], &[8.0, 9.0])).outputs(2).unwrap();
    assert_close(&outputs[0], &[891.0, 912.0, 123.0]);
    assert_close(&outputs[1], &[2.0, 3.0]);
    let channel = Case::new("MeanVarianceNormalization").input(x).ints("axes", &[1]).output();
    let deviation = (2f64 / 9.0).sqrt();
    let want = [-2.0 / 3.0, 1.0 / 3.0, 1.0 / 3.0, 0.0, 0.0, 0.0].map(|c| c / deviation);
    assert_close(&channel, &want);
}
