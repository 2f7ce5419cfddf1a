//! ONNX operators that lower to several core ops, on small inputs with hand-computed results.

use crate::support::builder::*;
use compiler::import::onnx::proto::{AttributeProto, NodeProto};
use compiler::tensor::Tensor;

type NamedTensor<'a> = (&'a str, Tensor);

fn code(tensor: &Tensor) -> i32 {
    match tensor.dtype() {
        compiler::tensor::DType::F32 => F32,
        compiler::tensor::DType::I64 => I64,
        _ => BOOL,
    }
}

/// The outputs of one node. Float and integer tensors are inputs; those that the importer requests become constants.
fn run(node: NodeProto, attributes: &[AttributeProto], inputs: &[NamedTensor<'_>]) -> Vec<Tensor> {
    let node = attributes.iter().fold(node, |node, attribute| with(node, attribute.clone()));
    let outputs: Vec<String> = node.output.clone();
    let typed: Vec<_> = inputs
        .iter()
        .map(|(name, t)| typed(name, code(t), &t.shape().iter().map(|d| *d as i64).collect::<Vec<_>>()))
        .collect();
    let names: Vec<&str> = outputs.iter().map(String::as_str).collect();
    let model = model(22, graph(&[node], &typed, &names));
    answers(&model, inputs).unwrap().0
}

/// The values of the first output.
fn first(op: &str, attributes: &[AttributeProto], inputs: &[NamedTensor<'_>]) -> Vec<f64> {
    let names: Vec<&str> = inputs.iter().map(|(name, _)| *name).collect();
    run(node(op, &names, &["y"]), attributes, inputs)[0].to_f64()
}

fn f32s_of(shape: &[usize], values: &[f32]) -> Tensor {
    Tensor::from_f32(shape, values)
}

fn assert_near(found: &[f64], expected: &[f64]) {
    let near = found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-5);
    assert!(found.len() == expected.len() && near, "{found:?} is not {expected:?}");
}

#[test]
fn resizes_along_one_axis() {
    let x = ("x", f32s_of(&[1, 2], &[1.0, 2.0]));
    let resize = |attributes: &[AttributeProto]| {
        let inputs = [x.clone(), ("sizes", i64s(&[1, 4]))];
        run(node("Resize", &["x", "", "", "sizes"], &["y"]), attributes, &inputs)[0].to_f64()
    };
    assert_near(&resize(&[text("mode", "linear")]), &[1.0, 1.25, 1.75, 2.0]);
    let corners = text("coordinate_transformation_mode", "align_corners");
    assert_near(&resize(&[text("mode", "linear"), corners]), &[1.0, 4.0 / 3.0, 5.0 / 3.0, 2.0]);
    assert_near(&resize(&[]), &[1.0, 1.0, 2.0, 2.0]);
    let asymmetric = text("coordinate_transformation_mode", "asymmetric");
    assert_near(&resize(&[asymmetric, text("nearest_mode", "ceil")]), &[1.0, 2.0, 2.0, 2.0]);
}

#[test]
fn a_resize_takes_what_a_crop_leaves_outside_from_its_attribute() {
    let inputs =
        [("x", f32s_of(&[1, 3], &[1.0, 2.0, 3.0])), ("roi", f32s(&[0.0, 0.5, 1.0, 1.5])), ("sizes", i64s(&[1, 3]))];
    let attributes = [
        text("mode", "linear"),
        text("coordinate_transformation_mode", "tf_crop_and_resize"),
        float("extrapolation_value", 9.0),
    ];
    let y = run(node("Resize", &["x", "roi", "", "sizes"], &["y"]), &attributes, &inputs);
    assert_near(&y[0].to_f64(), &[2.0, 3.0, 9.0]);
}

#[test]
fn samples_of_an_image() {
    let image = ("x", f32s_of(&[1, 1, 2, 2], &[1.0, 2.0, 3.0, 4.0]));
    let at = |x: f32, y: f32| ("grid", f32s_of(&[1, 1, 1, 2], &[x, y]));
    let sample = |place, attributes: &[AttributeProto]| first("GridSample", attributes, &[image.clone(), place]);
    assert_near(&sample(at(0.0, 0.0), &[]), &[2.5]);
    // The corner of the first element: three quarters of the sample are outside.
    assert_near(&sample(at(-1.0, -1.0), &[]), &[0.25]);
    assert_near(&sample(at(-1.0, -1.0), &[text("padding_mode", "border")]), &[1.0]);
    assert_near(&sample(at(-1.0, -1.0), &[int("align_corners", 1)]), &[1.0]);
    // x = 2½ with elements at 0 and 1 reflects at 1½ to ½; y is in the middle.
    assert_near(&sample(at(2.0, 0.0), &[text("padding_mode", "reflection")]), &[2.5]);
    assert_near(&sample(at(0.5, -0.5), &[text("mode", "nearest")]), &[2.0]);
}

#[test]
fn a_map_without_a_turn_is_the_regular_grid() {
    let theta = ("theta", f32s_of(&[1, 2, 3], &[1.0, 0.0, 0.0, 0.0, 1.0, 0.5]));
    let size = ("size", i64s(&[1, 1, 2, 2]));
    let grid = first("AffineGrid", &[], &[theta, size]);
    assert_near(&grid, &[-0.5, 0.0, 0.5, 0.0, -0.5, 1.0, 0.5, 1.0]);
}

#[test]
fn a_transform_and_the_way_back() {
    let signal = ("x", f32s_of(&[1, 4, 1], &[1.0, 2.0, 3.0, 4.0]));
    let spectrum = run(node("DFT", &["x"], &["y"]), &[], std::slice::from_ref(&signal)).remove(0);
    assert_near(&spectrum.to_f64(), &[10.0, 0.0, -2.0, 2.0, -2.0, 0.0, -2.0, -2.0]);
    assert_near(&first("DFT", &[int("inverse", 1)], &[("x", spectrum)]), &[1.0, 0.0, 2.0, 0.0, 3.0, 0.0, 4.0, 0.0]);
    let one_sided = run(node("DFT", &["x"], &["y"]), &[int("onesided", 1)], &[signal]).remove(0);
    assert_near(&one_sided.to_f64(), &[10.0, 0.0, -2.0, 2.0, -2.0, 0.0]);
    let restored = first("DFT", &[int("onesided", 1), int("inverse", 1)], &[("x", one_sided)]);
    assert_near(&restored, &[1.0, 2.0, 3.0, 4.0]);
}

#[test]
fn frames_of_a_signal() {
    let inputs = [
        ("x", f32s_of(&[1, 4, 1], &[1.0, 1.0, 1.0, 3.0])),
        ("step", Tensor::from_i64(&[], &[2])),
        ("window", f32s(&[1.0, 0.5])),
    ];
    let frames = first("STFT", &[], &inputs);
    assert_near(&frames, &[1.5, 0.0, 0.5, 0.0, 2.5, 0.0, -0.5, 0.0]);
    let size = ("size", Tensor::from_i64(&[], &[4]));
    assert_near(&first("HannWindow", &[], std::slice::from_ref(&size)), &[0.0, 0.5, 1.0, 0.5]);
    assert_near(&first("HannWindow", &[int("periodic", 0)], &[size]), &[0.0, 0.75, 0.75, 0.0]);
}

#[test]
fn elements_and_slices_are_written() {
    let x = ("x", f32s_of(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]));
    let index = ("i", Tensor::from_i64(&[2, 2], &[0, 0, -1, 1]));
    let updates = ("u", f32s_of(&[2, 2], &[10.0, 20.0, 30.0, 40.0]));
    let inputs = [x.clone(), index, updates];
    let scatter = |reduction: &str| first("ScatterElements", &[int("axis", 1), text("reduction", reduction)], &inputs);
    assert_eq!(scatter("none"), [20.0, 2.0, 3.0, 4.0, 40.0, 30.0]);
    assert_eq!(scatter("add"), [31.0, 2.0, 3.0, 4.0, 45.0, 36.0]);
    assert_eq!(scatter("min"), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let inputs = [x, ("i", Tensor::from_i64(&[1, 1], &[1])), ("u", f32s_of(&[1, 3], &[7.0, 8.0, 9.0]))];
    assert_eq!(first("ScatterND", &[], &inputs), [1.0, 2.0, 3.0, 7.0, 8.0, 9.0]);
}

/// A broadcast index gives the same result as the expanded one.
#[test]
fn stretched_indices_are_those_of_slices() {
    let x = ("x", f32s_of(&[2, 3, 2], &(0..12).map(|v| v as f32).collect::<Vec<_>>()));
    let slots = ("i", Tensor::from_i64(&[2, 2, 1], &[2, 0, -2, 1]));
    let whole = ("j", Tensor::from_i64(&[2, 2, 2], &[2, 2, 0, 0, -2, -2, 1, 1]));
    let updates = ("u", f32s_of(&[2, 2, 2], &(0..8).map(|v| 100.0 * v as f32).collect::<Vec<_>>()));
    let shape = ("shape", Tensor::from_i64(&[3], &[2, 2, 2]));
    let expand = node("Expand", &["i", "shape"], &["j"]);
    let answer = |nodes: &[NodeProto], inputs: &[(&str, Tensor)]| {
        let sizes = |t: &Tensor| t.shape().iter().map(|d| *d as i64).collect::<Vec<_>>();
        let typed: Vec<_> = inputs.iter().map(|(name, t)| typed(name, code(t), &sizes(t))).collect();
        answers(&model(22, graph(nodes, &typed, &["y"])), inputs).unwrap().0.remove(0).to_f64()
    };
    let gather = with(node("GatherElements", &["x", "j"], &["y"]), int("axis", 1));
    let want = answer(std::slice::from_ref(&gather), &[x.clone(), whole.clone()]);
    assert_eq!(want, [4.0, 5.0, 0.0, 1.0, 8.0, 9.0, 8.0, 9.0]);
    assert_eq!(answer(&[expand.clone(), gather], &[x.clone(), slots.clone(), shape.clone()]), want);
    let by_batch = with(node("GatherND", &["x", "i"], &["y"]), int("batch_dims", 1));
    assert_eq!(answer(&[by_batch], &[x.clone(), slots.clone()]), want);
    let scatter_add = with(node("ScatterElements", &["x", "j", "u"], &["y"]), int("axis", 1));
    let scatter_add = with(scatter_add, text("reduction", "add"));
    let want = answer(std::slice::from_ref(&scatter_add), &[x.clone(), whole, updates.clone()]);
    assert_eq!(want, [200.0, 301.0, 2.0, 3.0, 4.0, 105.0, 6.0, 7.0, 1008.0, 1209.0, 10.0, 11.0]);
    assert_eq!(answer(&[expand, scatter_add], &[x, slots, shape, updates]), want);
}

#[test]
fn a_circular_cache_begins_again() {
    let inputs = [
        ("cache", f32s_of(&[1, 3, 1], &[1.0, 2.0, 3.0])),
        ("new", f32s_of(&[1, 2, 1], &[8.0, 9.0])),
        ("at", i64s(&[2])),
    ];
    assert_eq!(first("TensorScatter", &[text("mode", "circular")], &inputs), [9.0, 2.0, 8.0]);
}

#[test]
fn order_along_an_axis() {
    let x = ("x", f32s_of(&[2, 3], &[1.0, 3.0, 3.0, 5.0, 4.0, 5.0]));
    let outputs = run(node("TopK", &["x", "k"], &["v", "i"]), &[], &[x.clone(), ("k", i64s(&[2]))]);
    assert_eq!(outputs[0].to_f64(), [3.0, 3.0, 5.0, 5.0]);
    assert_eq!(outputs[1].to_i64(), [1, 2, 0, 2]);
    let last = [int("axis", 1), int("select_last_index", 1)];
    assert_eq!(first("ArgMax", &last, std::slice::from_ref(&x)), [2.0, 2.0]);
    assert_eq!(first("Hardmax", &[], std::slice::from_ref(&x)), [0.0, 1.0, 0.0, 1.0, 0.0, 0.0]);
    let sums = first("CumSum", &[int("exclusive", 1)], &[x.clone(), ("axis", Tensor::from_i64(&[], &[1]))]);
    assert_eq!(sums, [0.0, 1.0, 4.0, 0.0, 5.0, 9.0]);
    let reversed = [int("batch_axis", 0), int("time_axis", 1)];
    let reversed = first("ReverseSequence", &reversed, &[x, ("lengths", i64s(&[2, 3]))]);
    assert_eq!(reversed, [3.0, 1.0, 3.0, 5.0, 4.0, 5.0]);
}

#[test]
fn an_index_outside_is_nowhere_hot() {
    let inputs = [("i", i64s(&[1, -1, 3])), ("depth", Tensor::from_i64(&[], &[3])), ("values", f32s(&[0.5, 2.0]))];
    assert_eq!(first("OneHot", &[], &inputs), [0.5, 2.0, 0.5, 0.5, 0.5, 2.0, 0.5, 0.5, 0.5]);
    let like = ("x", f32s_of(&[2, 3], &[0.0; 6]));
    assert_eq!(first("EyeLike", &[int("k", 1)], &[like]), [0.0, 1.0, 0.0, 0.0, 0.0, 1.0]);
}

#[test]
fn padding_of_every_kind() {
    let x = ("x", f32s_of(&[1, 3], &[1.0, 2.0, 3.0]));
    let padded = |mode: &str, pads: &[i64]| first("Pad", &[text("mode", mode)], &[x.clone(), ("pads", i64s(pads))]);
    assert_eq!(padded("reflect", &[0, 2, 0, 1]), [3.0, 2.0, 1.0, 2.0, 3.0, 2.0]);
    assert_eq!(padded("edge", &[0, 1, 0, -1]), [1.0, 1.0, 2.0]);
    assert_eq!(padded("wrap", &[0, 1, 0, 2]), [3.0, 1.0, 2.0, 3.0, 1.0, 2.0]);
    let with_value = [x.clone(), ("pads", i64s(&[0, 1, 0, 1])), ("value", Tensor::from_f32(&[], &[7.0]))];
    assert_eq!(first("Pad", &[], &with_value), [7.0, 1.0, 2.0, 3.0, 7.0]);
    let middle = first("CenterCropPad", &[ints("axes", &[1])], &[x.clone(), ("size", i64s(&[6]))]);
    assert_eq!(middle, [0.0, 1.0, 2.0, 3.0, 0.0, 0.0]);
    assert_eq!(first("CenterCropPad", &[ints("axes", &[1])], &[x, ("size", i64s(&[2]))]), [1.0, 2.0]);
}

#[test]
fn sizes_that_depend_on_values_are_those_of_the_data() {
    let x = ("x", f32s_of(&[2, 2], &[0.0, 3.0, 3.0, 1.0]));
    assert_eq!(first("NonZero", &[], std::slice::from_ref(&x)), [0.0, 1.0, 1.0, 1.0, 0.0, 1.0]);
    let inputs = [x.clone(), ("c", Tensor::from_bool(&[2], &[false, true]))];
    assert_eq!(first("Compress", &[int("axis", 1)], &inputs), [3.0, 1.0]);
    let outputs = run(node("Unique", &["x"], &["y", "i", "w", "n"]), &[], std::slice::from_ref(&x));
    let values: Vec<Vec<f64>> = outputs.iter().map(Tensor::to_f64).collect();
    assert_eq!(values, [vec![0., 1., 3.], vec![0., 3., 1.], vec![0., 2., 2., 1.], vec![1., 1., 2.]]);
    let outputs = run(node("Unique", &["x"], &["y", "i"]), &[int("sorted", 0)], std::slice::from_ref(&x));
    assert_eq!(outputs[0].to_f64(), [0.0, 3.0, 1.0]);
    let model = model(22, graph(&[node("NonZero", &["x"], &["y"])], &[typed("x", F32, &[2, 2])], &["y"]));
    let message = refused(&model);
    assert!(message.contains("must be a constant, but depends on the graph inputs `x`"), "{message}");
}

#[test]
fn of_boxes_that_overlap_the_best_is_left() {
    let boxes = [0.0, 0.0, 1.0, 1.0, 0.0, 0.1, 1.0, 1.1, 0.0, 5.0, 1.0, 6.0];
    let inputs = [
        ("boxes", f32s_of(&[1, 3, 4], &boxes)),
        ("scores", f32s_of(&[1, 1, 3], &[0.5, 0.9, 0.7])),
        ("most", i64s(&[3])),
        ("overlap", f32s(&[0.5])),
    ];
    assert_eq!(first("NonMaxSuppression", &[], &inputs), [0.0, 0.0, 1.0, 0.0, 0.0, 2.0]);
}

#[test]
fn n_grams_are_counted() {
    let attributes = [
        text("mode", "TF"),
        int("min_gram_length", 1),
        int("max_gram_length", 2),
        int("max_skip_count", 1),
        ints("ngram_counts", &[0, 2]),
        ints("ngram_indexes", &[2, 1, 0]),
        ints("pool_int64s", &[5, 6, 5, 6]),
    ];
    // 5 twice, 6 three times; the pair (5, 6) adjacent twice, and once with a gap of one.
    let y = first("TfIdfVectorizer", &attributes, &[("x", i64s(&[5, 6, 1, 5, 6, 6]))]);
    assert_eq!(y, [3.0, 3.0, 2.0]);
}

#[test]
fn determinants() {
    let x = [2.0, 0.0, 1.0, 1.0, 3.0, 2.0, 1.0, 1.0, 4.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0];
    assert_eq!(first("Det", &[], &[("x", f32s_of(&[2, 3, 3], &x))]), [18.0, 0.0]);
}

#[test]
fn corners_of_arithmetic() {
    let pair = |a: Tensor, b: Tensor| [("a", a), ("b", b)];
    assert_eq!(first("Pow", &[], &pair(i64s(&[4, 9, 2]), f32s(&[0.5, 0.5, 3.0]))), [2.0, 3.0, 8.0]);
    let remainders = first("Mod", &[int("fmod", 1)], &pair(i64s(&[7, -7, 7, -7, 6]), i64s(&[3, 3, -3, -3, -3])));
    assert_eq!(remainders, [1.0, -1.0, 1.0, -1.0, 0.0]);
    let shifted = first("BitShift", &[text("direction", "RIGHT")], &pair(i64s(&[-8, 8]), i64s(&[1, 64])));
    assert_eq!(shifted, [-4.0, 0.0]);
    let x = ("x", f32s(&[f32::INFINITY, f32::NEG_INFINITY, 1.0]));
    assert_eq!(first("IsInf", &[int("detect_negative", 0)], std::slice::from_ref(&x)), [1.0, 0.0, 0.0]);
    assert_eq!(first("IsInf", &[], &[x]), [1.0, 1.0, 0.0]);
    let x = ("x", f32s(&[-2.0, -1.0, 0.5, 2.0]));
    assert_eq!(first("Shrink", &[float("lambd", 1.5), float("bias", 0.5)], &[x]), [-1.5, 0.0, 0.0, 1.5]);
}

#[test]
fn the_first_resize_rounds_up_where_an_axis_shrinks() {
    let x = ("x", f32s_of(&[1, 4], &[1.0, 2.0, 3.0, 4.0]));
    let resize = |scale: f32, size: i64| {
        let scales = initializer("scales", &f32s(&[1.0, scale]));
        let mut graph = graph(&[node("Resize", &["x", "scales"], &["y"])], &[typed("x", F32, &[1, 4])], &["y"]);
        graph.initializer.push(scales);
        let y = answer(&model(10, graph), std::slice::from_ref(&x));
        assert_eq!(y.len() as i64, size);
        y
    };
    // Positions 0, 4/3 and 8/3.
    assert_eq!(resize(0.75, 3), [1.0, 3.0, 4.0]);
    assert_eq!(resize(1.5, 6), [1.0, 1.0, 2.0, 3.0, 3.0, 4.0]);
}

#[test]
fn an_index_outside_its_axis_is_refused_though_the_tensor_is_larger() {
    let x = ("x", f32s_of(&[2, 2], &[1.0, 2.0, 3.0, 4.0]));
    let refused = |op: &str, axis: i64, index: Tensor, shape: &[i64]| {
        let inputs = [typed("x", F32, &[2, 2]), typed("i", I64, shape)];
        let attributes = if op == "GatherElements" { vec![int("axis", axis)] } else { vec![] };
        let node = attributes.into_iter().fold(node(op, &["x", "i"], &["y"]), with);
        answers(&model(22, graph(&[node], &inputs, &["y"])), &[x.clone(), ("i", index)]).unwrap_err()
    };
    for outside in [2, 3, -3] {
        let message = refused("GatherElements", 1, Tensor::from_i64(&[1, 2], &[0, outside]), &[1, 2]);
        assert!(message.contains("index"), "{message}");
        let message = refused("GatherND", 0, Tensor::from_i64(&[1, 2], &[0, outside]), &[1, 2]);
        assert!(message.contains("index"), "{message}");
    }
    // Three index columns for two tensor columns.
    let message = refused("GatherElements", 0, Tensor::from_i64(&[1, 3], &[0, 1, 1]), &[1, 3]);
    assert!(message.contains("3 rows at axis 1"), "{message}");
}

#[test]
fn zeros_quantise_to_zero() {
    let x = [("x", f32s(&[0.0, 0.0]))];
    let outputs = run(node("DynamicQuantizeLinear", &["x"], &["y", "scale", "zero"]), &[], &x);
    assert_eq!(outputs.iter().map(|t| t.to_f64()).collect::<Vec<_>>(), [vec![0.0, 0.0], vec![1.0], vec![0.0]]);
}
