//! `If`, `Loop`, `Scan` and sequences: statically known control flow is unrolled, the rest is rejected by name.

use crate::support::builder::*;
use compiler::import::onnx::proto::{GraphProto, ModelProto, NodeProto, ValueInfoProto};
use compiler::tensor::Tensor;

fn main_graph(nodes: &[NodeProto], inputs: &[ValueInfoProto], constants: &[(&str, Tensor)]) -> ModelProto {
    let mut main = graph(nodes, inputs, &["y"]);
    main.initializer = constants.iter().map(|(name, tensor)| initializer(name, tensor)).collect();
    model(18, main)
}

/// `y = c ? x + x : -x`; both branches capture `x`.
fn choice(condition: &str) -> NodeProto {
    let yes = graph(&[node("Add", &["x", "x"], &["r"])], &[], &["r"]);
    let no = graph(&[node("Neg", &["x"], &["r"])], &[], &["r"]);
    with(with(node("If", &[condition], &["y"]), subgraph("then_branch", yes)), subgraph("else_branch", no))
}

#[test]
fn a_known_condition_takes_one_branch() {
    let x = [("x", f32s(&[1.0, 2.0]))];
    for (truth, want) in [(true, [2.0, 4.0]), (false, [-1.0, -2.0])] {
        let condition = Tensor::from_bool(&[], &[truth]);
        let model = main_graph(&[choice("c")], &[typed("x", F32, &[2])], &[("c", condition)]);
        assert_eq!(answer(&model, &x), want);
    }
}

#[test]
fn an_open_condition_selects_from_both_branches() {
    let model = main_graph(&[choice("c")], &[typed("x", F32, &[2]), typed("c", BOOL, &[1])], &[]);
    for (truth, want) in [(true, [2.0, 4.0]), (false, [-1.0, -2.0])] {
        let data = [("x", f32s(&[1.0, 2.0])), ("c", Tensor::from_bool(&[1], &[truth]))];
        let (results, needed_inputs) = answers(&model, &data).unwrap();
        assert_eq!(results[0].to_f64(), want);
        assert!(needed_inputs.is_empty(), "no value had to be known: {needed_inputs:?}");
    }
}

#[test]
fn an_open_condition_between_shapes_needs_its_value() {
    let yes = graph(&[node("Concat", &["x", "x"], &["r"])], &[], &["r"]);
    let mut yes = yes;
    yes.node[0].attribute.push(int("axis", 0));
    let no = graph(&[node("Neg", &["x"], &["r"])], &[], &["r"]);
    let branch = with(with(node("If", &["c"], &["y"]), subgraph("then_branch", yes)), subgraph("else_branch", no));
    let model = main_graph(&[branch], &[typed("x", F32, &[2]), typed("c", BOOL, &[])], &[]);
    let message = refused(&model);
    assert!(message.contains("node `If_0` (If)") && message.contains("depends on the graph inputs `c`"), "{message}");
    let data = [("x", f32s(&[1.0, 2.0])), ("c", Tensor::from_bool(&[], &[true]))];
    let (results, needed_inputs) = answers(&model, &data).unwrap();
    assert_eq!((results[0].to_f64(), needed_inputs), (vec![1.0, 2.0, 1.0, 2.0], vec!["c".to_string()]));
}

/// `for i in 0..n while go: sum += x·i; scanned[i] = sum`
fn summing(trips: &str, condition: &str, go: &str) -> NodeProto {
    let nodes = [
        with(node("Cast", &["i"], &["f"]), int("to", 1)),
        node("Mul", &["x", "f"], &["part"]),
        node("Add", &["sum", "part"], &["next"]),
        node("Less", &["i", "limit"], &["below"]),
        node("Identity", &["c"], &["same"]),
    ];
    let inputs = [typed("i", I64, &[]), typed("c", BOOL, &[]), typed("sum", F32, &[2])];
    let body = graph(&nodes, &inputs, &[go, "next", "next"]);
    with(node("Loop", &[trips, condition, "zero"], &["last", "y"]), subgraph("body", body))
}

fn summing_model(trips: &str, condition: &str, go: &str, limit: i64) -> ModelProto {
    let constants = [
        ("n", Tensor::from_i64(&[], &[3])),
        ("limit", Tensor::from_i64(&[], &[limit])),
        ("zero", f32s(&[0.0, 0.0])),
        ("yes", Tensor::from_bool(&[], &[true])),
        ("no", Tensor::from_bool(&[], &[false])),
    ];
    main_graph(&[summing(trips, condition, go)], &[typed("x", F32, &[2]), typed("m", I64, &[])], &constants)
}

fn data(trips: i64) -> [(&'static str, Tensor); 2] {
    [("x", f32s(&[1.0, 10.0])), ("m", Tensor::from_i64(&[], &[trips]))]
}

#[test]
fn loops_turn_as_often_as_they_say() {
    let turns = [0.0, 0.0, 1.0, 10.0, 3.0, 30.0];
    assert_eq!(answer(&summing_model("n", "", "same", 0), &data(0)), turns);
    // A trip count that is an input must have a known value.
    let open = summing_model("m", "yes", "same", 0);
    assert!(
        refused(&open).contains("the trip count of a loop must be a constant, but depends on the graph inputs `m`")
    );
    let (results, needed_inputs) = answers(&open, &data(2)).unwrap();
    assert_eq!((results[0].to_f64(), needed_inputs), (turns[..4].to_vec(), vec!["m".to_string()]));
    // A condition that folds ends the loop after the iteration in which `i < 1` fails.
    assert_eq!(answer(&summing_model("", "yes", "below", 1), &data(0)), turns[..4]);
    // Zero iterations.
    let result = answers(&summing_model("n", "no", "same", 0), &data(0));
    assert!(result.unwrap_err().contains("results of unknown shape"));
}

#[test]
fn a_loop_without_end_is_refused() {
    let message = refused(&summing_model("", "yes", "same", 0));
    assert!(message.contains("a loop with more than 65536 nodes when unrolled is not supported"), "{message}");
}

#[test]
fn weights_of_a_body_are_the_same_in_every_turn() {
    let inputs = [typed("i", I64, &[]), typed("c", BOOL, &[]), typed("s", F32, &[2])];
    let mut body =
        graph(&[node("Mul", &["s", "w"], &["t"]), node("Identity", &["c"], &["same"])], &inputs, &["same", "t"]);
    body.initializer = vec![initializer("w", &f32s(&[2.0, 3.0]))];
    let nodes = [
        with(node("Loop", &["n", "", "x"], &["a"]), subgraph("body", body.clone())),
        with(node("Loop", &["n", "", "a"], &["y"]), subgraph("body", body)),
    ];
    let model = main_graph(&nodes, &[typed("x", F32, &[2])], &[("n", Tensor::from_i64(&[], &[2]))]);
    assert_eq!(answer(&model, &[("x", f32s(&[1.0, 1.0]))]), [16.0, 81.0]);
    let imported = source(&model).import(&Default::default()).unwrap();
    // Each loop has its own initialiser, and all its iterations share the weight.
    assert_eq!(imported.weights.len(), 2, "{:?}", imported.weights.keys());
}

/// Cumulative sums of the rows of `x`, and the last one.
fn scan(op: NodeProto) -> ModelProto {
    let nodes = [node("Add", &["s", "row"], &["t"]), node("Identity", &["t"], &["out"])];
    let body: GraphProto = graph(&nodes, &[typed("s", F32, &[2]), typed("row", F32, &[2])], &["t", "out"]);
    let op = with(with(op, subgraph("body", body)), int("num_scan_inputs", 1));
    main_graph(&[op], &[typed("x", F32, &[3, 2])], &[("zero", f32s(&[0.0, 0.0]))])
}

#[test]
fn scans_go_along_an_axis_in_either_direction() {
    let x = [("x", Tensor::from_f32(&[3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))];
    let plain = node("Scan", &["zero", "x"], &["last", "y"]);
    assert_eq!(answer(&scan(plain.clone()), &x), [1.0, 2.0, 4.0, 6.0, 9.0, 12.0]);
    let reversed = with(plain.clone(), ints("scan_input_directions", &[1]));
    assert_eq!(answer(&scan(reversed), &x), [5.0, 6.0, 8.0, 10.0, 9.0, 12.0]);
    let transposed = with(with(plain, ints("scan_output_directions", &[1])), ints("scan_output_axes", &[1]));
    assert_eq!(answer(&scan(transposed), &x), [9.0, 4.0, 1.0, 12.0, 6.0, 2.0]);
}

#[test]
fn sequences_live_while_importing() {
    let nodes = [
        node("Neg", &["x"], &["n"]),
        node("SequenceConstruct", &["x", "n"], &["s"]),
        node("SequenceInsert", &["s", "w", "first"], &["t"]),
        node("SequenceErase", &["t", "last"], &["u"]),
        with(node("ConcatFromSequence", &["u"], &["y"]), int("axis", 0)),
    ];
    let constants =
        [("w", f32s(&[7.0])), ("first", Tensor::from_i64(&[], &[0])), ("last", Tensor::from_i64(&[], &[-1]))];
    let model = main_graph(&nodes, &[typed("x", F32, &[2])], &constants);
    assert_eq!(answer(&model, &[("x", f32s(&[1.0, 2.0]))]), [7.0, 1.0, 2.0]);
    let message = refused(&main_graph(&[node("SequenceConstruct", &["x"], &["y"])], &[typed("x", F32, &[2])], &[]));
    assert!(message.contains("graph output `y`: a sequence instead of a tensor"), "{message}");
}

#[test]
fn a_subgraph_that_does_not_hold_together_is_refused() {
    let ring = graph(&[node("Add", &["b", "x"], &["a"]), node("Neg", &["a"], &["b"])], &[], &["b"]);
    let branch =
        with(with(node("If", &["c"], &["y"]), subgraph("then_branch", ring.clone())), subgraph("else_branch", ring));
    let truth = Tensor::from_bool(&[], &[true]);
    let message = refused(&main_graph(&[branch], &[typed("x", F32, &[2])], &[("c", truth)]));
    assert!(message.contains("node `If_0` (If): in its subgraph, cycle"), "{message}");
}
