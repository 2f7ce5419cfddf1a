//! ATen operators as graphs of core ops, against hand-computed values.

use crate::support::gradients::gradients;
use crate::support::program::{BOOL, FLOAT, LONG, Program, close, count, float, int, ints, tensor, tensors, values};
use compiler::import::fx::lower::table;
use compiler::import::import::Model;
use compiler::op::Op;
use compiler::tensor::{DType, Tensor};
use serde_json::{Value as Json, json};

#[test]
fn gradients_stop_where_the_program_says_so_and_nowhere_else() {
    let w = Tensor::from_f32(&[2], &[1.0, 2.0]);
    let stops = |model: &Model| count(model, |op| matches!(op, Op::StopGradient(_)));
    let program = |from: &str, target: &str| {
        Program::default()
            .input("x", FLOAT, &[2])
            .parameter("w", &w, false)
            .node("mul.Tensor", &[("self", tensor("x")), ("other", tensor("p_w"))], &["y"])
            .called(from, target, &[("self", tensor("y"))], &["held"])
            .called("", "detach", &[("self", tensor("x"))], &["data"])
            .node("torch.ops.aten.add.Tensor", &[("self", tensor("y")), ("other", tensor("held"))], &["sum"])
            .node("torch.ops.aten.add.Tensor", &[("self", tensor("sum")), ("other", tensor("data"))], &["out"])
            .model(&["out"])
            .unwrap()
    };
    // Values that do not depend on a parameter need no stop-gradient op.
    assert_eq!(stops(&program("", "detach")), 1);
    // After decompositions, only the recorded Python function identifies the call.
    assert_eq!(stops(&program("detach_1;method_descriptor.detach", "alias")), 1);
    assert_eq!(stops(&program("wrap_with_set_grad_enabled;W.wrap_with_set_grad_enabled", "neg")), 1);
    assert_eq!(stops(&program("alias_1;method_descriptor.alias", "alias")), 0);
}

#[test]
fn parameters_without_gradient_are_states() {
    let w = Tensor::from_f32(&[2], &[1.0, 2.0]);
    let model = Program::default()
        .input("x", FLOAT, &[2])
        .parameter("w", &w, true)
        .parameter("v", &w, false)
        .node("torch.ops.aten.mul.Tensor", &[("self", tensor("x")), ("other", tensor("p_w"))], &["y"])
        .node("torch.ops.aten.mul.Tensor", &[("self", tensor("y")), ("other", tensor("p_v"))], &["z"])
        .model(&["z"])
        .unwrap();
    assert_eq!(count(&model, |op| matches!(op, Op::State(s) if s.name == "w")), 1);
    assert_eq!(count(&model, |op| matches!(op, Op::Parameter(p) if p.name == "v")), 1);
    assert!(model.warnings.iter().any(|w| w.contains("requires_grad=False")), "{:?}", model.warnings);
}

#[test]
fn a_view_that_changes_changes_what_it_shows() {
    let x = Tensor::from_f32(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let program = Program::default()
        .input("x", FLOAT, &[2, 3])
        .node("torch.ops.aten.mul.Tensor", &[("self", tensor("x")), ("other", int(1))], &["y"])
        .node("torch.ops.aten.slice.Tensor", &[("self", tensor("y")), ("dim", int(1)), ("start", int(1))], &["part"])
        .node("torch.ops.aten.mul_.Tensor", &[("self", tensor("part")), ("other", int(10))], &["changed"])
        .node("torch.ops.aten.t.default", &[("self", tensor("y"))], &["turned"])
        .node("torch.ops.aten.select.int", &[("self", tensor("turned")), ("dim", int(0)), ("index", int(0))], &["row"])
        .node("torch.ops.aten.fill_.Scalar", &[("self", tensor("row")), ("value", int(7))], &["filled"]);
    let outputs = program.run(&[("x", x)], &["y", "turned"]);
    close(&outputs[0], &[7.0, 20.0, 30.0, 7.0, 50.0, 60.0]);
    close(&outputs[1], &[7.0, 7.0, 20.0, 50.0, 30.0, 60.0]);
}

#[test]
fn recurrent_layers_keep_the_parameters_of_the_module() {
    let parameters = ["w_ih_l0", "w_hh_l0", "b_ih_l0", "b_hh_l0", "w_ih_l1", "w_hh_l1", "b_ih_l1", "b_hh_l1"];
    for (target, gates, states) in [("lstm.input", 4, 2), ("gru.input", 3, 1), ("rnn_relu.input", 1, 1)] {
        let mut program = Program::default().input("x", FLOAT, &[2, 5, 3]).input("h", FLOAT, &[2, 2, 4]);
        for name in parameters {
            let width = if name.starts_with("w_ih_l0") { 3 } else { 4 };
            let shape = if name.starts_with('w') { vec![4 * gates, width] } else { vec![4 * gates] };
            program = program.parameter(name, &Tensor::zeros(DType::F32, &shape), false);
        }
        let names: Vec<String> = parameters.iter().map(|name| format!("p_{name}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let flag = |value: bool| json!({"as_bool": value});
        let first = if states == 2 { tensors(&["h", "h"]) } else { tensor("h") };
        let arguments = [
            ("input", tensor("x")),
            ("hx", first),
            ("params", tensors(&names)),
            ("has_biases", flag(true)),
            ("num_layers", int(2)),
            ("dropout", float(0.25)),
            ("train", flag(true)),
            ("bidirectional", flag(false)),
            ("batch_first", flag(true)),
        ];
        let results = &["y", "last", "cell"][..=states];
        let model = program.node(&format!("torch.ops.aten.{target}"), &arguments, results).model(results).unwrap();
        let layers = count(&model, |op| matches!(op, Op::Lstm(_) | Op::Gru(_) | Op::Rnn(_)));
        assert_eq!((layers, count(&model, |op| matches!(op, Op::Dropout(_)))), (2, 1), "{target}");
        assert_eq!(count(&model, |op| matches!(op, Op::Parameter(_))), 8, "{target}");
    }
}

#[test]
fn places_are_written_and_read() {
    let x = Tensor::from_f32(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let index = |values: &[i64]| Tensor::from_i64(&[2, 2], values);
    let index_op = |target: &str, last: (&str, Json), indices: &[i64]| {
        let program = Program::default()
            .input("x", FLOAT, &[2, 3])
            .input("i", LONG, &[2, 2])
            .input("v", FLOAT, &[2, 2])
            .node(target, &[("self", tensor("x")), ("dim", int(1)), ("index", tensor("i")), last], &["y"]);
        let v = Tensor::from_f32(&[2, 2], &[10.0, 20.0, 30.0, 40.0]);
        program.run(&[("x", x.clone()), ("i", index(indices)), ("v", v)], &["y"]).remove(0)
    };
    close(&index_op("torch.ops.aten.scatter.src", ("src", tensor("v")), &[2, 0, 1, 2]), &[20., 2., 10., 4., 30., 40.]);
    close(&index_op("torch.ops.aten.scatter.value", ("value", float(9.0)), &[2, 0, 1, 2]), &[9., 2., 9., 4., 9., 9.]);
    close(&index_op("scatter_add", ("src", tensor("v")), &[0, 0, 1, 2]), &[31., 2., 3., 4., 35., 46.]);
    close(&index_op("gather", ("sparse_grad", json!({"as_bool": false})), &[2, 0, 1, 1]), &[3., 1., 5., 5.]);
}

#[test]
fn axes_are_summed_sorted_and_rolled() {
    let x = Tensor::from_f32(&[1, 4], &[3.0, 1.0, 4.0, 1.5]);
    let evaluate = |target: &str, extra: &[(&str, Json)], results: &[&str]| {
        let mut arguments = vec![("self", tensor("x"))];
        arguments.extend(extra.iter().cloned());
        Program::default()
            .input("x", FLOAT, &[1, 4])
            .node(target, &arguments, results)
            .run(&[("x", x.clone())], results)
    };
    close(&evaluate("cumsum", &[("dim", int(1))], &["y"])[0], &[3.0, 4.0, 8.0, 9.5]);
    let sorted = evaluate("sort", &[("dim", int(1)), ("descending", json!({"as_bool": true}))], &["y", "at"]);
    close(&sorted[0], &[4.0, 3.0, 1.5, 1.0]);
    assert_eq!(sorted[1].to_i64(), [2, 0, 3, 1]);
    close(&evaluate("median.dim", &[("dim", int(1))], &["y", "at"])[0], &[1.5]);
    close(&evaluate("roll", &[("shifts", ints(&[1])), ("dims", ints(&[1]))], &["y"])[0], &[1.5, 3.0, 1.0, 4.0]);
    let windows = [("dimension", int(1)), ("size", int(2)), ("step", int(2))];
    close(&evaluate("unfold", &windows, &["y"])[0], &[3.0, 1.0, 4.0, 1.5]);
}

/// The values and the gradient of the sum of an operator's first result, for this operand.
fn differentiated(target: &str, extra: &[(&str, Json)], sizes: &[usize], x: &[f32]) -> [Vec<f64>; 2] {
    let x = Tensor::from_f32(sizes, x);
    let mut arguments = vec![("self", tensor("p_x"))];
    arguments.extend(extra.iter().cloned());
    let program = |results: &[&str]| {
        let program = Program::default().parameter("x", &x, false);
        let program = program.node(target, &arguments, if target.ends_with(".dim") { &["y", "at"] } else { &["y"] });
        program.node("sum", &[("self", tensor("y"))], &["loss"]).model(results).unwrap()
    };
    let weights = [("x".to_string(), x.clone())].into();
    let (_, gradients) = gradients(&program(&["loss"]).graph, &weights, &weights);
    [values(&program(&["y"]), &[])[0].to_f64(), gradients["x"].clone()]
}

#[test]
fn of_equal_elements_the_first_gets_the_gradient_or_all_share_it() {
    let sizes = ("output_size", ints(&[1, 2]));
    // The first in row-major order is not the first of the last column.
    let image = [1.0, 5.0, 2.0, 5.0, 1.0, 2.0, 0.0, 0.0, 0.0];
    let pooled = differentiated("adaptive_max_pool2d", &[sizes], &[1, 1, 3, 3], &image);
    assert_eq!(pooled, [vec![5.0, 5.0], vec![0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]);
    let rows = [3.0, 3.0, 1.0, 2.0, 2.0, 1.0];
    let largest = differentiated("max.dim", &[("dim", int(1))], &[2, 3], &rows);
    assert_eq!(largest, [vec![3.0, 2.0], vec![1.0, 0.0, 0.0, 1.0, 0.0, 0.0]]);
    let smallest = differentiated("min.dim", &[("dim", int(0))], &[3, 2], &[1.0, 2.0, 1.0, 2.0, 5.0, 2.0]);
    assert_eq!(smallest, [vec![1.0, 2.0], vec![1.0, 1.0, 0.0, 0.0, 0.0, 0.0]]);
    let all = differentiated("amax", &[("dim", ints(&[1]))], &[2, 3], &rows);
    assert_eq!(all[1], [0.5, 0.5, 0.0, 0.5, 0.5, 0.0]);
    let median = differentiated("median", &[], &[6], &rows);
    assert_eq!(median, [vec![2.0], vec![0.0, 0.0, 0.0, 0.5, 0.5, 0.0]]);
    let endless = differentiated("median", &[], &[3], &[f32::NEG_INFINITY, f32::NEG_INFINITY, 1.0]);
    assert_eq!(endless[0], [f64::NEG_INFINITY]);
    assert!(differentiated("max.dim", &[("dim", int(0))], &[3], &[1.0, f32::NAN, 2.0])[0][0].is_nan());
}

#[test]
fn images_unfold_to_columns_and_back() {
    let run = |target: &str, extra: &[(&str, Json)], sizes: &[usize], x: &[f32]| {
        let window = [("kernel_size", ints(&[2, 1])), ("padding", ints(&[1, 0])), ("dilation", ints(&[2, 1]))];
        differentiated(target, &[&window, extra].concat(), sizes, x)[0].clone()
    };
    // Padded rows 0, a, b, c, 0: the windows have rows 0 and 2, 1 and 3, and 2 and 4.
    let columns = run("im2col", &[], &[1, 3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    assert_eq!(columns, [0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 3.0, 4.0, 5.0, 6.0, 0.0, 0.0]);
    let columns: Vec<f32> = columns.iter().map(|x| *x as f32).collect();
    let image = run("col2im", &[("output_size", ints(&[3, 2]))], &[2, 6], &columns);
    assert_eq!(image, [1.0, 2.0, 6.0, 8.0, 5.0, 6.0], "the middle row is in two windows");
}

#[test]
fn images_are_stretched_and_continued() {
    let x = Tensor::from_f32(&[1, 1, 1, 2], &[0.0, 1.0]);
    let evaluate = |target: &str, extra: &[(&str, Json)]| {
        let mut arguments = vec![("self", tensor("x"))];
        arguments.extend(extra.iter().cloned());
        let program = Program::default().input("x", FLOAT, &[1, 1, 1, 2]).node(target, &arguments, &["y"]);
        program.run(&[("x", x.clone())], &["y"]).remove(0)
    };
    let corners = |on: bool| ("align_corners", json!({"as_bool": on}));
    let size = ("output_size", ints(&[1, 4]));
    close(&evaluate("upsample_bilinear2d", &[size.clone(), corners(false)]), &[0.0, 0.25, 0.75, 1.0]);
    close(&evaluate("upsample_bilinear2d", &[size, corners(true)]), &[0.0, 1.0 / 3.0, 2.0 / 3.0, 1.0]);
    close(&evaluate("upsample_nearest2d", &[("output_size", ints(&[1, 3]))]), &[0.0, 0.0, 1.0]);
    close(&evaluate("adaptive_avg_pool2d", &[("output_size", ints(&[1, 3]))]), &[0.0, 0.5, 1.0]);
    close(&evaluate("reflection_pad2d", &[("padding", ints(&[1, 1, 0, 0]))]), &[1.0, 0.0, 1.0, 0.0]);
    close(&evaluate("replication_pad2d", &[("padding", ints(&[1, 1, 0, 0]))]), &[0.0, 0.0, 1.0, 1.0]);
}

#[test]
fn losses_are_those_of_the_formula() {
    let (x, t) = (Tensor::from_f32(&[1, 2], &[0.0, 3f32.ln()]), Tensor::from_i64(&[1], &[0]));
    let smoothed = Program::default().input("x", FLOAT, &[1, 2]).input("t", LONG, &[1]).node(
        "cross_entropy_loss",
        &[("self", tensor("x")), ("target", tensor("t")), ("label_smoothing", float(0.2))],
        &["y"],
    );
    close(&smoothed.run(&[("x", x), ("t", t)], &["y"])[0], &[1.276_433]);
    let loss = |target: &str, extra: (&str, Json)| {
        let arguments = [("self", tensor("a")), ("target", tensor("b")), extra];
        let program =
            Program::default().input("a", FLOAT, &[2]).input("b", FLOAT, &[2]).node(target, &arguments, &["y"]);
        let (a, b) = (Tensor::from_f32(&[2], &[0.5, 3.0]), Tensor::from_f32(&[2], &[0.0, 1.0]));
        program.run(&[("a", a), ("b", b)], &["y"]).remove(0)
    };
    close(&loss("smooth_l1_loss", ("beta", float(1.0))), &[(0.125 + 1.5) / 2.0]);
    close(&loss("huber_loss", ("delta", float(0.5))), &[(0.125 + 0.5 * 1.75) / 2.0]);
    let softplus = |x: f64| (1.0 + x.exp()).ln();
    let want = (0.5 + softplus(-0.5) + softplus(-3.0)) / 2.0;
    close(&loss("binary_cross_entropy_with_logits", ("reduction", int(1))), &[want]);
}

#[test]
fn sums_over_letters_are_products_of_matrices() {
    let a = Tensor::from_f32(&[1, 2, 2], &[1.0, 2.0, 3.0, 4.0]);
    let b = Tensor::from_f32(&[2, 2], &[1.0, 0.0, 1.0, 1.0]);
    let sum = |equation: &str| {
        let arguments = [("equation", json!({"as_string": equation})), ("tensors", tensors(&["a", "b"]))];
        let program = Program::default().input("a", FLOAT, &[1, 2, 2]).input("b", FLOAT, &[2, 2]).node(
            "einsum",
            &arguments,
            &["y"],
        );
        program.run(&[("a", a.clone()), ("b", b.clone())], &["y"]).remove(0)
    };
    close(&sum("nij,jk->nik"), &[3.0, 2.0, 7.0, 4.0]);
    close(&sum("nij,kj->nki"), &[1.0, 3.0, 3.0, 7.0]);
    close(&sum("nij,ij->n"), &[1.0 + 3.0 + 4.0]);
    close(&sum("...ij,jk->...ik"), &[3.0, 2.0, 7.0, 4.0]);
    close(&sum("...j,kj"), &[1.0, 3.0, 3.0, 7.0]);
}

#[test]
fn masked_attention_gives_zeros_where_nothing_is_seen() {
    let ones = Tensor::from_f32(&[1, 2, 2], &[1.0, 2.0, 3.0, 4.0]);
    let mask = Tensor::from_bool(&[1, 2, 2], &[false, true, false, false]);
    let program = Program::default().input("q", FLOAT, &[1, 2, 2]).input("m", BOOL, &[1, 2, 2]).node(
        "scaled_dot_product_attention",
        &[("query", tensor("q")), ("key", tensor("q")), ("value", tensor("q")), ("attn_mask", tensor("m"))],
        &["y"],
    );
    close(&program.run(&[("q", ones), ("m", mask)], &["y"])[0], &[3.0, 4.0, 0.0, 0.0]);
}

#[test]
fn joint_graphs_give_loss_and_gradients_and_are_not_trained() {
    let w = Tensor::from_f32(&[2], &[3.0, 5.0]);
    let model = Program::default()
        .input("x", FLOAT, &[2])
        .parameter("w", &w, false)
        .node("torch.ops.aten.mul.Tensor", &[("self", tensor("x")), ("other", tensor("p_w"))], &["y"])
        .node("sum", &[("self", tensor("y"))], &["loss"])
        .node("torch.ops.aten.mul.Tensor", &[("self", tensor("x")), ("other", int(1))], &["dw"])
        .load(&[
            ("loss", json!({"loss_output": {"arg": {"name": "loss"}}})),
            ("dw", json!({"gradient_to_parameter": {"arg": {"name": "dw"}, "parameter_name": "w"}})),
        ])
        .unwrap();
    let names: Vec<&str> = model.graph.outputs.iter().map(|o| o.name.as_str()).collect();
    assert_eq!(names, ["loss", "gradient of w"]);
    assert_eq!(count(&model, |op| matches!(op, Op::Parameter(_))), 0);
    assert!(model.warnings.iter().any(|w| w.contains("joint graph")), "{:?}", model.warnings);
    let outputs = values(&model, &[("x", Tensor::from_f32(&[2], &[1.0, 2.0]))]);
    close(&outputs[0], &[13.0]);
    close(&outputs[1], &[1.0, 2.0]);
}

/// The documented operator list matches the table. `PIPEC_BLESS=1` rewrites it.
#[test]
fn the_list_of_operators_is_that_of_the_table() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/import/aten.txt");
    let names = table::operators();
    assert!(names.windows(2).all(|pair| pair[0] < pair[1]), "an operator has two rows");
    let text: String = names.iter().map(|name| format!("{name}\n")).collect();
    if std::env::var_os("PIPEC_BLESS").is_some() {
        std::fs::write(path, &text).unwrap();
    }
    assert_eq!(std::fs::read_to_string(path).unwrap_or_default(), text);
}
