//! Inputs known before the model runs, empty inputs, and models of the first opsets.

use crate::support::builder::*;
use compiler::tensor::Tensor;

#[test]
fn only_the_inputs_that_must_be_constants_become_some() {
    let nodes = [
        node("Add", &["m", "one"], &["shape"]),
        node("Reshape", &["x", "shape"], &["r"]),
        node("Mul", &["r", "k"], &["y"]),
    ];
    let inputs = [typed("x", F32, &[6]), typed("m", I64, &[2]), typed("k", F32, &[1])];
    let mut main = graph(&nodes, &inputs, &["y"]);
    main.initializer = vec![initializer("one", &Tensor::from_i64(&[], &[1]))];
    let model = model(18, main);
    let message = refused(&model);
    assert!(
        message
            .contains("node `Reshape_1` (Reshape): the shape must be a constant, but depends on the graph inputs `m`"),
        "{message}"
    );
    let x: Vec<f32> = (0..6).map(|v| v as f32).collect();
    let data = [("x", f32s(&x)), ("m", i64s(&[1, 2])), ("k", f32s(&[2.0]))];
    let (results, needed_inputs) = answers(&model, &data).unwrap();
    assert_eq!((results[0].shape(), needed_inputs), (&[2, 3][..], vec!["m".to_string()]));
    assert_eq!(results[0].to_f64(), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
    let (results, _) = answers(&model, &[("x", f32s(&x)), ("m", i64s(&[2, 1])), ("k", f32s(&[1.0]))]).unwrap();
    assert_eq!(results[0].shape(), [3, 2]);
}

#[test]
fn a_value_of_another_shape_is_refused() {
    let model = model(
        18,
        graph(&[node("Reshape", &["x", "m"], &["y"])], &[typed("x", F32, &[6]), typed("m", I64, &[2])], &["y"]),
    );
    let message = answers(&model, &[("x", f32s(&[0.0; 6])), ("m", Tensor::from_i64(&[1, 2], &[2, 3]))]).unwrap_err();
    assert!(message.contains("input `m` is i64[2], the value given is i64[1, 2]"), "{message}");
}

#[test]
fn reductions_of_nothing_are_what_the_standard_says() {
    let lowest = f64::from(f32::NEG_INFINITY);
    for (op, want) in [("ReduceSum", 0.0), ("ReduceProd", 1.0), ("ReduceMax", lowest), ("ReduceMin", -lowest)] {
        let reduce = with(node(op, &["x", "axes"], &["y"]), int("keepdims", 0));
        let mut main = graph(&[reduce], &[typed("x", F32, &[2, 0])], &["y"]);
        main.initializer = vec![initializer("axes", &i64s(&[1]))];
        let model = model(20, main);
        assert_eq!(answer(&model, &[("x", Tensor::zeros(compiler::tensor::DType::F32, &[2, 0]))]), [want; 2], "{op}");
        assert!(refused(&model).contains("input `x` is empty"), "nothing can be trained on it");
    }
}

#[test]
fn nothing_goes_through_products_and_joins() {
    let empty = Tensor::zeros(compiler::tensor::DType::F32, &[2, 0]);
    let nodes = [
        with(node("Transpose", &["x"], &["t"]), ints("perm", &[1, 0])),
        node("MatMul", &["x", "t"], &["p"]),
        with(node("Concat", &["x", "p"], &["j"]), int("axis", 1)),
        with(node("Softmax", &["j"], &["y"]), int("axis", 1)),
    ];
    let model = model(18, graph(&nodes, &[typed("x", F32, &[2, 0])], &["y"]));
    assert_eq!(answer(&model, &[("x", empty)]), [0.5; 4]);
}

#[test]
fn the_first_operator_sets_are_read() {
    let x = [("x", Tensor::from_f32(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])), ("b", f32s(&[10.0, 20.0]))];
    let inputs = [typed("x", F32, &[2, 3]), typed("b", F32, &[2])];
    let add = with(with(node("Add", &["x", "b"], &["y"]), int("broadcast", 1)), int("axis", 0));
    assert_eq!(answer(&model(6, graph(&[add], &inputs, &["y"])), &x), [11.0, 12.0, 13.0, 24.0, 25.0, 26.0]);
    let reshape = with(with(node("Reshape", &["x"], &["y"]), ints("shape", &[3, -1])), ints("consumed_inputs", &[0]));
    let (results, _) = answers(&model(1, graph(&[reshape], &inputs[..1], &["y"])), &x[..1]).unwrap();
    assert_eq!(results[0].shape(), [3, 2]);
    let cast = with(node("Cast", &["b"], &["y"]), text("to", "INT64"));
    let (results, _) = answers(&model(5, graph(&[cast], &inputs[1..], &["y"])), &x[1..]).unwrap();
    assert_eq!((results[0].dtype(), results[0].to_f64()), (compiler::tensor::DType::I64, vec![10.0, 20.0]));
    let pad = with(node("Pad", &["b"], &["y"]), ints("paddings", &[1, 0]));
    assert_eq!(answer(&model(1, graph(&[pad], &inputs[1..], &["y"])), &x[1..]), [0.0, 10.0, 20.0]);
    let concat = node("Concat", &["x", "x"], &["y"]);
    let (results, _) = answers(&model(3, graph(&[concat], &inputs[..1], &["y"])), &x[..1]).unwrap();
    assert_eq!(results[0].shape(), [2, 6]);
    let dropout = with(node("Dropout", &["b"], &["y"]), int("is_test", 1));
    assert_eq!(answer(&model(6, graph(&[dropout], &inputs[1..], &["y"])), &x[1..]), [10.0, 20.0]);
}
