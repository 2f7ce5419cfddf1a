//! Features of `torch.export` programs beyond plain layers: random masks, experts, regions with their own settings,
//! in-place updates, inputs that share the batch. Expected values are hand-computed.

use crate::support::program::{FLOAT, LONG, Program, close, count, float, int, ints, meta, tensor, tensors};
use compiler::import::import::Batch;
use compiler::op::{Op, Unary};
use compiler::tensor::dim::Dim;
use compiler::tensor::{DType, Tensor};
use serde_json::{Value as Json, json};

/// The schema's code for bfloat16.
const BF16: i64 = 13;

fn flag(value: bool) -> Json {
    json!({"as_bool": value})
}

#[test]
fn stochastic_depth_is_a_dropout_of_rows_however_it_is_written() {
    let is_mask = |op: &Op| matches!(op, Op::Dropout(d) if d.ratio == 0.2);
    let is_random = |op: &Op| matches!(op, Op::Uniform(_));
    // torchvision, timm: x · (bernoulli(0.8) / 0.8), in place.
    let first = Program::default()
        .input("x", FLOAT, &[3, 2, 2])
        .node("new_empty", &[("self", tensor("x")), ("size", ints(&[3, 1, 1]))], &["e"])
        .node("torch.ops.aten.bernoulli_.float", &[("self", tensor("e")), ("p", float(0.8))], &["m"])
        .node("torch.ops.aten.div_.Scalar", &[("self", tensor("m")), ("other", float(0.8))], &["d"])
        .node("torch.ops.aten.mul.Tensor", &[("self", tensor("x")), ("other", tensor("d"))], &["y"])
        .model(&["y"])
        .unwrap();
    // transformers: (x / 0.8) · floor(0.8 + rand).
    let second = Program::default()
        .input("x", FLOAT, &[3, 2, 2])
        .node("rand", &[("size", ints(&[3, 1, 1]))], &["r"])
        .node("torch.ops.aten.add.Tensor", &[("self", tensor("r")), ("other", float(0.8))], &["s"])
        .node("floor_", &[("self", tensor("s"))], &["f"])
        .node("torch.ops.aten.div.Tensor", &[("self", tensor("x")), ("other", float(0.8))], &["q"])
        .node("torch.ops.aten.mul.Tensor", &[("self", tensor("q")), ("other", tensor("f"))], &["y"])
        .model(&["y"])
        .unwrap();
    for model in [first, second] {
        assert_eq!((count(&model, is_mask), count(&model, is_random)), (1, 0));
        let mask = model.graph.ids().find(|id| is_mask(&model.graph.node(*id).op)).unwrap();
        // One number per example, and the batch stays symbolic.
        assert_eq!(model.graph.node(mask).facts[0].to_string(), "f32[batch, 1, 1]");
        assert!(matches!(model.batch, Batch::Symbol { .. }), "{:?}", model.batch);
    }
}

#[test]
fn a_mask_that_is_divided_by_another_number_stays_what_it_is() {
    let model = Program::default()
        .input("x", FLOAT, &[3, 2])
        .node("rand", &[("size", ints(&[3, 1]))], &["r"])
        .node("torch.ops.aten.add.Tensor", &[("self", tensor("r")), ("other", float(0.8))], &["s"])
        .node("floor", &[("self", tensor("s"))], &["f"])
        .node("torch.ops.aten.div.Tensor", &[("self", tensor("x")), ("other", float(0.801))], &["q"])
        .node("torch.ops.aten.mul.Tensor", &[("self", tensor("q")), ("other", tensor("f"))], &["y"])
        .model(&["y"])
        .unwrap();
    assert_eq!(count(&model, |op| matches!(op, Op::Uniform(_))), 1);
    assert_eq!(count(&model, |op| matches!(op, Op::Dropout(_))), 0);
}

#[test]
fn dropouts_are_written_in_place_and_by_channel() {
    let model = Program::default()
        .input("x", FLOAT, &[3, 4, 5])
        .node("torch.ops.aten.mul.Tensor", &[("self", tensor("x")), ("other", int(2))], &["y"])
        .node("dropout_", &[("p", float(0.1)), ("train", flag(true)), ("self", tensor("y"))], &["z"])
        .node("feature_dropout", &[("input", tensor("y")), ("p", float(0.3)), ("train", flag(true))], &["w"])
        .model(&["w"])
        .unwrap();
    let shape = |ratio: f64| {
        let is = |id: &compiler::op::NodeId| matches!(model.graph.node(*id).op, Op::Dropout(d) if d.ratio == ratio);
        model.graph.ids().find(is).map(|id| model.graph.node(id).facts[0].shape.clone()).unwrap()
    };
    let dims = |sizes: [i64; 2]| [vec![Dim::symbol("batch")], sizes.map(Dim::Known).to_vec()].concat();
    // The later reader sees the dropout's result: both masks exist.
    assert_eq!((shape(0.1), shape(0.3)), (dims([4, 5]), dims([4, 1])));
}

#[test]
fn random_numbers_follow_their_arguments() {
    let evaluate = |target: &str, arguments: &[(&str, Json)]| {
        let counter = ("pipec.counter", Tensor::from_i64(&[], &[3]));
        let program = Program::default().input("x", FLOAT, &[1, 1]).node(target, arguments, &["y"]);
        program.run(&[("x", Tensor::from_f32(&[1, 1], &[0.0])), counter], &["y"]).remove(0).to_f64()
    };
    let size = ("size", ints(&[400]));
    let numbers = evaluate("randint", &[("high", int(5)), size.clone()]);
    assert!(numbers.iter().all(|n| n.fract() == 0.0 && (0.0..5.0).contains(n)));
    assert!((0..5).all(|number| numbers.contains(&f64::from(number))));
    let normal = evaluate("randn", &[size]);
    let mean = normal.iter().sum::<f64>() / 400.0;
    let variance = normal.iter().map(|n| (n - mean).powi(2)).sum::<f64>() / 400.0;
    assert!(mean.abs() < 0.25 && (variance - 1.0).abs() < 0.36, "{mean} {variance}");
    let mut order = evaluate("randperm", &[("n", int(9))]);
    assert_ne!(order, [0., 1., 2., 3., 4., 5., 6., 7., 8.]);
    order.sort_by(f64::total_cmp);
    assert_eq!(order, [0., 1., 2., 3., 4., 5., 6., 7., 8.]);
}

#[test]
fn other_views_show_what_was_changed() {
    let x = Tensor::from_f32(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let program = Program::default()
        .input("x", FLOAT, &[2, 3])
        .node("clone", &[("self", tensor("x"))], &["y"])
        .node("t", &[("self", tensor("y"))], &["turned"])
        .node(
            "torch.ops.aten.select.int",
            &[("self", tensor("turned")), ("dim", int(0)), ("index", int(1))],
            &["middle"],
        )
        .node("torch.ops.aten.slice.Tensor", &[("self", tensor("y")), ("dim", int(1)), ("start", int(1))], &["part"])
        .node("zero_", &[("self", tensor("part"))], &["zero"])
        .node("neg", &[("self", tensor("middle"))], &["seen"]);
    let outputs = program.run(&[("x", x)], &["seen", "y"]);
    close(&outputs[0], &[0.0, 0.0]);
    close(&outputs[1], &[1.0, 0.0, 0.0, 4.0, 0.0, 0.0]);
}

#[test]
fn a_copy_of_a_parameter_may_be_changed_and_the_parameter_may_not() {
    let w = Tensor::from_f32(&[3], &[1.0, 2.0, 3.0]);
    let program = |source: &str| {
        Program::default()
            .input("x", FLOAT, &[1, 3])
            .parameter("w", &w, false)
            .node("clone", &[("self", tensor("p_w"))], &["copy"])
            .node(
                "torch.ops.aten.slice.Tensor",
                &[("self", tensor(source)), ("dim", int(0)), ("end", int(1))],
                &["part"],
            )
            .node("zero_", &[("self", tensor("part"))], &["zero"])
            .node("torch.ops.aten.mul.Tensor", &[("self", tensor("x")), ("other", tensor(source))], &["y"])
            .node("torch.ops.aten.add.Tensor", &[("self", tensor("y")), ("other", tensor("p_w"))], &["z"])
    };
    let x = Tensor::from_f32(&[1, 3], &[10.0, 10.0, 10.0]);
    close(&program("copy").run(&[("x", x)], &["z"])[0], &[1.0, 22.0, 33.0]);
    assert!(program("p_w").model(&["z"]).unwrap_err().contains("modified in place"));
}

#[test]
fn experts_take_the_rows_that_are_sorted_for_them() {
    let w = Tensor::from_f32(&[2, 1, 2], &[1.0, 2.0, 10.0, 20.0]);
    let program = Program::default()
        .input("x", FLOAT, &[3, 1])
        .input("e", LONG, &[3])
        .parameter("w", &w, false)
        .node("sort", &[("self", tensor("e"))], &["sorted", "order"])
        .node("torch.ops.aten.index.Tensor", &[("self", tensor("x")), ("indices", tensors(&["order"]))], &["rows"])
        .node("histc", &[("self", tensor("sorted")), ("bins", int(2)), ("min", int(0)), ("max", int(1))], &["counts"])
        .node("cumsum", &[("self", tensor("counts")), ("dim", int(0))], &["ends"])
        .node(
            "torch.ops.transformers.grouped_mm_fallback.default",
            &[("input", tensor("rows")), ("weight", tensor("p_w")), ("offs", tensor("ends"))],
            &["y"],
        );
    let inputs = [("x", Tensor::from_f32(&[3, 1], &[1., 2., 3.])), ("e", Tensor::from_i64(&[3], &[1, 0, 1]))];
    close(&program.run(&inputs, &["y"])[0], &[2.0, 4.0, 10.0, 20.0, 30.0, 60.0]);
}

#[test]
fn differences_have_what_comes_before_and_behind() {
    let x = Tensor::from_f32(&[1, 3], &[1.0, 4.0, 9.0]);
    let arguments = [("self", tensor("x")), ("dim", int(1)), ("prepend", tensor("p")), ("append", tensor("a"))];
    let program = Program::default()
        .input("x", FLOAT, &[1, 3])
        .input("p", FLOAT, &[1, 1])
        .input("a", FLOAT, &[1, 2])
        .node("diff", &arguments, &["y"]);
    let ends = [("p", Tensor::from_f32(&[1, 1], &[-1.0])), ("a", Tensor::from_f32(&[1, 2], &[10.0, 10.5]))];
    let outputs = program.run(&[("x", x), ends[0].clone(), ends[1].clone()], &["y"]);
    close(&outputs[0], &[2.0, 3.0, 5.0, 1.0, 0.5]);
}

#[test]
fn small_images_are_smoothed() {
    let x = Tensor::from_f32(&[1, 1, 1, 4], &[0.0, 1.0, 2.0, 7.0]);
    let resize = |target: &str| {
        let arguments = [("input", tensor("x")), ("output_size", ints(&[1, 2])), ("align_corners", flag(false))];
        let program = Program::default().input("x", FLOAT, &[1, 1, 1, 4]).node(target, &arguments, &["y"]);
        program.run(&[("x", x.clone())], &["y"]).remove(0)
    };
    // Triangle filter of width 4: weights 3/7, 3/7, 1/7, and mirrored.
    close(&resize("_upsample_bilinear2d_aa"), &[5.0 / 7.0, (1.0 + 6.0 + 21.0) / 7.0]);
    // Values from PyTorch 2.15.
    close(&resize("_upsample_bicubic2d_aa"), &[0.438_016_5, 4.247_933_9]);
}

#[test]
fn images_are_sampled_at_places() {
    let x = Tensor::from_f32(&[1, 1, 2, 2], &[0.0, 1.0, 2.0, 3.0]);
    let grid = Tensor::from_f32(&[1, 1, 2, 2], &[0.0, 0.0, 1.0, -1.0]);
    let arguments = [
        ("input", tensor("x")),
        ("grid", tensor("g")),
        ("interpolation_mode", int(0)),
        ("padding_mode", int(0)),
        ("align_corners", flag(true)),
    ];
    let program = Program::default().input("x", FLOAT, &[1, 1, 2, 2]).input("g", FLOAT, &[1, 1, 2, 2]).node(
        "grid_sampler",
        &arguments,
        &["y"],
    );
    close(&program.run(&[("x", x), ("g", grid)], &["y"])[0], &[1.5, 1.0]);
}

#[test]
fn regions_with_autocast_compute_in_the_types_that_the_file_says() {
    let inner = json!({"graph": {
        "inputs": [tensor("a"), tensor("b")],
        "outputs": [tensor("c")],
        "nodes": [{"target": "torch.ops.aten.mm.default", "metadata": {}, "outputs": [tensor("c")],
                   "inputs": [{"name": "self", "arg": tensor("a"), "kind": 1}, {"name": "mat2", "arg": tensor("b"), "kind": 1}]}],
        "tensor_values": {"c": meta(BF16, &[3, 2], false)},
    }});
    let arguments = [
        ("", json!({"as_string": "cpu"})),
        ("", json!({"as_scalar_type": BF16})),
        ("", flag(true)),
        ("", json!({"as_none": []})),
        ("", json!({"as_graph": {"name": "wrapped", "graph": inner["graph"]}})),
        ("", tensor("x")),
        ("", tensor("w")),
    ];
    let model = Program::default()
        .input("x", FLOAT, &[3, 4])
        .input("w", FLOAT, &[4, 2])
        .node("torch.ops.higher_order.wrap_with_autocast", &arguments, &["y"])
        .model(&["y"])
        .unwrap();
    let product = model.graph.outputs[0].value;
    assert_eq!(model.graph.fact(product).to_string(), "bf16[batch, 2]");
    assert_eq!(count(&model, |op| matches!(op, Op::Cast(_))), 2);
    assert_eq!(count(&model, |op| matches!(op, Op::Unary(Unary::Floor))), 0);
}

#[test]
fn masks_that_are_looked_up_by_row_share_the_batch() {
    // As in transformers' attention masks: mask[rows[:, None], columns[None, :]].
    let program = Program::default()
        .input("ids", FLOAT, &[3, 4])
        .input("mask", FLOAT, &[3, 4])
        .node("arange", &[("end", int(3))], &["i"])
        .node("unsqueeze", &[("self", tensor("i")), ("dim", int(1))], &["rows"])
        .node("arange", &[("end", int(4))], &["j"])
        .node("unsqueeze", &[("self", tensor("j")), ("dim", int(0))], &["columns"])
        .node(
            "torch.ops.aten.index.Tensor",
            &[("self", tensor("mask")), ("indices", tensors(&["rows", "columns"]))],
            &["seen"],
        )
        .node("torch.ops.aten.mul.Tensor", &[("self", tensor("ids")), ("other", tensor("seen"))], &["y"]);
    let model = program.model(&["y"]).unwrap();
    assert!(matches!(model.batch, Batch::Symbol { .. }), "{:?}", model.batch);
    let open = |op: &Op| matches!(op, Op::Input(input) if input.fact.shape[0] == Dim::symbol("batch"));
    assert_eq!(count(&model, open), 2);
    assert!(model.warnings.is_empty(), "{:?}", model.warnings);
}

#[test]
fn an_input_that_nothing_reads_does_not_tell_the_batch() {
    let model = Program::default()
        .input("input_ids", FLOAT, &[7, 4])
        .input("labels", FLOAT, &[7, 4])
        .node("neg", &[("self", tensor("labels"))], &["y"])
        .model(&["y"])
        .unwrap();
    assert!(matches!(&model.batch, Batch::Symbol { .. }), "{:?}", model.batch);
    assert!(model.warnings.iter().any(|warning| warning.contains("labels=ids.clone()")), "{:?}", model.warnings);
}

#[test]
fn places_in_memory_are_a_shape_where_all_elements_follow_in_order() {
    let program = |strides: &[i64]| {
        let mut program = Program::default().input("x", FLOAT, &[3, 4, 1]);
        program.facts.insert("x".into(), meta(FLOAT, &[3, 4, 1], false));
        let arguments = [("self", tensor("x")), ("size", ints(&[3, 4, 1, 1])), ("stride", ints(strides))];
        program.node("as_strided", &arguments, &["y"]).model(&["y"])
    };
    let model = program(&[4, 1, 4, 4]).unwrap();
    assert_eq!(model.graph.fact(model.graph.outputs[0].value).to_string(), "f32[batch, 4, 1, 1]");
    assert!(program(&[1, 3, 4, 4]).unwrap_err().contains("as_strided"));
}

#[test]
fn what_only_assertions_read_is_passed_over() {
    let named = |kind: &str, name: &str| json!({ kind: {"as_name": name} });
    let mut program = Program::default().input("x", FLOAT, &[3, 2]).node("sum", &[("self", tensor("x"))], &["s"]).node(
        "neg",
        &[("self", tensor("x"))],
        &["y"],
    );
    let node = |target: &str, inputs: Json, outputs: Json| json!({"target": target, "inputs": inputs, "outputs": outputs, "metadata": {}});
    let input = |name: &str, arg: Json| json!({"name": name, "arg": arg, "kind": 1});
    program.nodes.push(node(
        "torch.ops.aten.item.default",
        json!([input("self", tensor("s"))]),
        json!([named("as_sym_float", "n")]),
    ));
    program.nodes.push(node(
        "_operator.ge",
        json!([input("a", named("as_sym_float", "n")), input("b", int(0))]),
        json!([named("as_sym_bool", "truth")]),
    ));
    program.nodes.push(node(
        "torch.ops.aten._assert_scalar.default",
        json!([input("self", named("as_sym_bool", "truth")), input("assert_msg", json!({"as_string": "positive"}))]),
        json!([]),
    ));
    let model = program.model(&["y"]).unwrap();
    assert_eq!(model.graph.ids().filter(|id| !matches!(model.graph.node(*id).op, Op::Input(_))).count(), 1);
}

#[test]
fn products_of_complex_numbers_turn_pairs() {
    // Rotary embeddings: pairs of x as complex numbers, times e^(i angle).
    let program = Program::default()
        .input("x", FLOAT, &[3, 2, 2])
        .input("angle", FLOAT, &[2])
        .node("ones_like", &[("self", tensor("angle"))], &["one"])
        .node("polar", &[("abs", tensor("one")), ("angle", tensor("angle"))], &["turn"])
        .node("view_as_complex", &[("self", tensor("x"))], &["c"])
        .node("unsqueeze", &[("self", tensor("turn")), ("dim", int(0))], &["turns"])
        .node("torch.ops.aten.mul.Tensor", &[("self", tensor("c")), ("other", tensor("turns"))], &["p"])
        .node("view_as_real", &[("self", tensor("p"))], &["r"])
        .node("torch.ops.aten.flatten.using_ints", &[("self", tensor("r")), ("start_dim", int(1))], &["y"]);
    let x = Tensor::from_f32(&[1, 2, 2], &[1.0, 0.0, 0.0, 2.0]);
    let angle = Tensor::from_f32(&[2], &[std::f32::consts::FRAC_PI_2, std::f32::consts::PI]);
    close(&program.run(&[("x", x), ("angle", angle)], &["y"])[0], &[0.0, 1.0, 0.0, -2.0]);
}

#[test]
fn fourier_transforms_are_products_and_come_back() {
    let x = Tensor::from_f32(&[1, 4], &[1.0, 2.0, 3.0, 5.0]);
    let forward = Program::default()
        .input("x", FLOAT, &[1, 4])
        .node("fft_fftn", &[("self", tensor("x")), ("dim", ints(&[1]))], &["f"])
        .node("real", &[("self", tensor("f"))], &["re"])
        .node("imag", &[("self", tensor("f"))], &["im"]);
    let outputs = forward.run(&[("x", x.clone())], &["re", "im"]);
    close(&outputs[0], &[11.0, -2.0, -3.0, -2.0]);
    close(&outputs[1], &[0.0, 3.0, 0.0, -3.0]);
    let inverse = Program::default()
        .input("x", FLOAT, &[1, 4])
        .node("fft_rfft", &[("self", tensor("x"))], &["half"])
        .node("fft_irfft", &[("self", tensor("half")), ("n", int(4))], &["y"]);
    close(&inverse.run(&[("x", x.clone())], &["y"])[0], &[1.0, 2.0, 3.0, 5.0]);
    let program = Program::default()
        .input("x", FLOAT, &[1, 4])
        .node("fft_rfft", &[("self", tensor("x"))], &["half"])
        .node("exp", &[("self", tensor("half"))], &["e"])
        .node("real", &[("self", tensor("e"))], &["y"]);
    assert!(program.model(&["y"]).unwrap_err().contains("complex numbers"));
}

/// Metadata of a tensor with these strides.
fn strided_meta(sizes: &[usize], strides: &[usize]) -> Json {
    let mut fact = meta(FLOAT, sizes, false);
    fact["strides"] = strides.iter().map(|n| json!({"as_int": n})).collect();
    fact
}

#[test]
fn copies_keep_what_they_are_when_their_source_changes() {
    let x = Tensor::from_f64(&[2, 2], &[1.0, 2.0, 3.0, 4.0]).cast(DType::F32);
    let start = || {
        let mut program = Program::default()
            .input("x", FLOAT, &[2, 2])
            .node("clone", &[("self", tensor("x"))], &["c"])
            .node("transpose.int", &[("self", tensor("c")), ("dim0", int(0)), ("dim1", int(1))], &["t"]);
        program.facts.insert("c".into(), strided_meta(&[2, 2], &[2, 1]));
        program.facts.insert("t".into(), strided_meta(&[2, 2], &[1, 2]));
        program.facts.insert("y".into(), strided_meta(&[2, 2], &[2, 1]));
        program.facts.insert("z".into(), strided_meta(&[4], &[1]));
        program
    };
    let with_update = |program: Program| {
        program.node("mul_.Tensor", &[("self", tensor("c")), ("other", float(10.0))], &["m"]).node(
            "add.Tensor",
            &[("self", tensor("y")), ("other", int(0))],
            &["a"],
        )
    };
    // Another element order is a copy; the same order is an alias.
    let copied =
        with_update(start().node("contiguous", &[("self", tensor("t"))], &["y"])).run(&[("x", x.clone())], &["a"]);
    close(&copied[0], &[1.0, 3.0, 2.0, 4.0]);
    let aliased =
        with_update(start().node("contiguous", &[("self", tensor("c"))], &["y"])).run(&[("x", x.clone())], &["a"]);
    close(&aliased[0], &[10.0, 20.0, 30.0, 40.0]);
    let flat = |of: &str| {
        start()
            .node("reshape", &[("self", tensor(of)), ("shape", ints(&[4]))], &["z"])
            .node("mul_.Tensor", &[("self", tensor("c")), ("other", float(10.0))], &["m"])
            .node("add.Tensor", &[("self", tensor("z")), ("other", int(0))], &["a"])
            .run(&[("x", x.clone())], &["a"])
    };
    close(&flat("t")[0], &[1.0, 3.0, 2.0, 4.0]);
    close(&flat("c")[0], &[10.0, 20.0, 30.0, 40.0]);
}

#[test]
fn regions_change_the_tensors_outside_them() {
    let inner = |switch: Json| {
        let graph = json!({
            "inputs": [tensor("v")], "outputs": [tensor("z")],
            "nodes": [{
                "target": "torch.ops.aten.zero_.default", "outputs": [tensor("z")], "metadata": {},
                "inputs": [{"name": "self", "arg": tensor("v"), "kind": 1}],
            }],
            "tensor_values": {"v": meta(FLOAT, &[2], false), "z": meta(FLOAT, &[2], false)},
        });
        [("", switch), ("", json!({"as_graph": {"name": "wrapped", "graph": graph}})), ("", tensor("v"))]
    };
    let program = |name: &str| {
        Program::default()
            .input("x", FLOAT, &[2, 2])
            .parameter("w", &Tensor::from_f64(&[2, 2], &[1.0; 4]).cast(DType::F32), false)
            .node("mul.Tensor", &[("self", tensor(name)), ("other", float(1.0))], &["y"])
            .node("select.int", &[("self", tensor("y")), ("dim", int(1)), ("index", int(0))], &["v"])
            .node("torch.ops.higher_order.wrap_with_set_grad_enabled", &inner(flag(false)), &["n"])
            .node("add.Tensor", &[("self", tensor("y")), ("other", tensor("x"))], &["a"])
    };
    let x = Tensor::from_f64(&[2, 2], &[1.0, 2.0, 3.0, 4.0]).cast(DType::F32);
    close(&program("x").run(&[("x", x)], &["a"])[0], &[1.0, 4.0, 3.0, 8.0]);
    // PyTorch's gradient would ignore the in-place update.
    let error = program("p_w").model(&["a"]).unwrap_err();
    assert!(error.contains("in-place change under no_grad"), "{error}");
}

#[test]
fn rows_that_are_counted_are_the_batch_when_they_are_written() {
    let model = Program::default()
        .input("x", FLOAT, &[3, 2])
        .node("arange", &[("end", int(3))], &["i"])
        .node("full", &[("size", ints(&[])), ("fill_value", float(7.0))], &["v"])
        .node(
            "index_fill.int_Tensor",
            &[("self", tensor("x")), ("dim", int(0)), ("index", tensor("i")), ("value", tensor("v"))],
            &["y"],
        )
        .model(&["y"])
        .unwrap();
    let x = Tensor::from_f64(&[5, 2], &[1.0; 10]).cast(DType::F32);
    close(&crate::support::program::values(&model, &[("x", x)])[0], &[7.0; 10]);
}

#[test]
fn a_sum_that_is_divided_by_the_exported_batch_is_warned_of() {
    let program = |by: f64| {
        Program::default()
            .input("x", FLOAT, &[3, 2])
            .node("sum.dim_IntList", &[("self", tensor("x")), ("dim", ints(&[0]))], &["s"])
            .node("div.Tensor", &[("self", tensor("s")), ("other", float(by))], &["y"])
            .node("add.Tensor", &[("self", tensor("x")), ("other", tensor("y"))], &["z"])
            .model(&["z"])
            .unwrap()
    };
    let warned = |by: f64| program(by).warnings.iter().any(|warning| warning.contains("exported batch of 3"));
    assert_eq!([3.0, 6.0, 4.0, 2.0].map(warned), [true, true, false, false]);
}

#[test]
fn a_number_has_no_rows_to_look_up() {
    let indices = json!({"as_optional_tensors": [{"as_tensor": {"name": "i"}}, {"as_tensor": {"name": "i"}}]});
    let error = Program::default()
        .input("x", FLOAT, &[])
        .node("arange", &[("end", int(3))], &["i"])
        .node("index.Tensor", &[("self", tensor("x")), ("indices", indices)], &["y"])
        .model(&["y"])
        .unwrap_err();
    assert!(error.contains("an index of axis 1 for an input of rank 0"), "{error}");
}

#[test]
fn operators_on_numbers_are_lowered_or_refused() {
    let argument = |shape: &str, index: &str| -> Vec<(&'static str, Json)> {
        let optional = json!({"as_optional_tensors": [{"as_tensor": {"name": index}}, {"as_tensor": {"name": "i"}}]});
        let named = |name: &'static str| (name, tensor(shape));
        let mut list: Vec<(&'static str, Json)> = [
            "self", "input", "other", "src", "source", "weight", "value", "mat2", "vec2", "target", "grid", "tensor1",
            "tensor2",
        ]
        .map(named)
        .to_vec();
        list.extend(["index", "mask", "elements"].map(|name| (name, tensor(index))));
        list.extend([("indices", optional), ("tensors", tensors(&[shape, shape])), ("values", tensor(shape))]);
        list.extend(["dim", "dim0", "dim1", "start_dim", "axis0", "axis1", "source_dim"].map(|name| (name, int(0))));
        list.extend([("dims", ints(&[0])), ("size", ints(&[1])), ("sizes", ints(&[1])), ("kernel_size", ints(&[1]))]);
        list.extend([("step", int(1)), ("k", int(1)), ("n", int(1)), ("bins", int(2)), ("chunks", int(1))]);
        list
    };
    for operator in compiler::import::fx::lower::table::operators() {
        for (shape, index) in [("x", "i"), ("x", "w"), ("v", "i"), ("v", "w")] {
            let program = Program::default()
                .input("x", FLOAT, &[])
                .input("v", FLOAT, &[1])
                .input("i", LONG, &[])
                .input("w", LONG, &[1])
                .node(operator, &argument(shape, index), &["y"]);
            // Any result but a panic is fine.
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| program.model(&["y"]).map(|_| ())))
                .unwrap_or_else(|_| panic!("{operator} of `{shape}` by `{index}` panics"));
        }
    }
    let error = Program::default()
        .input("x", FLOAT, &[])
        .node("sym_size.int", &[("self", tensor("x")), ("dim", int(0))], &["n"])
        .node("expand", &[("self", tensor("x")), ("size", json!({"as_sym_ints": [{"as_name": "n"}]}))], &["y"]);
    let error = error.model(&["y"]).unwrap_err();
    assert!(error.contains("a scalar has no axes"), "{error}");
}
