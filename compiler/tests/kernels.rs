//! Small cases of data movement and reduction ops, with expected values from NumPy.

use compiler::graph::evaluate::evaluate;
use compiler::graph::{Graph, Origin};
use compiler::op::{
    ArgReduce, Broadcast, Concat, Constant, Flip, Gather, Op, Pad, Reduce, ReduceKind, ScatterAdd, Select, Slice,
    Transpose, Value,
};
use compiler::tensor::Tensor;
use compiler::tensor::dim::Dim;
use std::collections::BTreeMap;

fn dims(sizes: &[i64]) -> Vec<Dim> {
    sizes.iter().map(|&d| Dim::from(d)).collect()
}

/// `0, 1, 2, …` of this shape.
fn iota(shape: &[usize]) -> Tensor {
    let count: usize = shape.iter().product();
    Tensor::from_i64(shape, &(0..count as i64).collect::<Vec<_>>())
}

fn integers(shape: &[usize], values: &[i64]) -> Tensor {
    Tensor::from_i64(shape, values)
}

fn assert_makes(op: Op, inputs: &[Tensor], expected: Tensor) {
    let mut graph = Graph::new("case");
    let origin = Origin::default();
    let inputs: Vec<Value> = inputs
        .iter()
        .map(|t| {
            let node = graph.add(Op::Constant(Constant { tensor: t.clone() }), &[], &origin).unwrap();
            graph.values(node)[0]
        })
        .collect();
    let node = graph.add(op.clone(), &inputs, &origin).unwrap();
    let y = graph.values(node)[0];
    assert_eq!(evaluate(&graph, &BTreeMap::new()).unwrap()[&y], expected, "{op:?}");
}

#[test]
fn movement() {
    let deep = iota(&[2, 3, 2]);
    assert_makes(
        Op::Slice(Slice { begin: dims(&[0, 1]), end: dims(&[3, 4]), step: vec![2, 2] }),
        &[iota(&[3, 4])],
        integers(&[2, 2], &[1, 3, 9, 11]),
    );
    assert_makes(
        Op::Transpose(Transpose { perm: vec![1, 2, 0] }),
        std::slice::from_ref(&deep),
        integers(&[3, 2, 2], &[0, 6, 1, 7, 2, 8, 3, 9, 4, 10, 5, 11]),
    );
    assert_makes(
        Op::Flip(Flip { axes: vec![1] }),
        std::slice::from_ref(&deep),
        integers(&[2, 3, 2], &[4, 5, 2, 3, 0, 1, 10, 11, 8, 9, 6, 7]),
    );
    assert_makes(
        Op::Broadcast(Broadcast { shape: dims(&[2, 2, 3]) }),
        &[integers(&[2, 1], &[1, 2])],
        integers(&[2, 2, 3], &[1, 1, 1, 2, 2, 2, 1, 1, 1, 2, 2, 2]),
    );
    assert_makes(
        Op::Concat(Concat { axis: 1 }),
        &[deep, integers(&[2, 1, 2], &[0, 1, 6, 7])],
        integers(&[2, 4, 2], &[0, 1, 2, 3, 4, 5, 0, 1, 6, 7, 8, 9, 10, 11, 6, 7]),
    );
    assert_makes(
        Op::Pad(Pad { low: dims(&[1, 0]), high: dims(&[0, 1]), interior: vec![0, 1], value: 9.0 }),
        &[iota(&[2, 2])],
        integers(&[3, 4], &[9, 9, 9, 9, 0, 9, 1, 9, 2, 9, 3, 9]),
    );
}

#[test]
fn indices() {
    let deep = iota(&[2, 3, 2]);
    assert_makes(
        Op::Gather(Gather { axis: 1 }),
        &[deep.clone(), integers(&[2], &[-1, 0])],
        integers(&[2, 2, 2], &[4, 5, 0, 1, 10, 11, 6, 7]),
    );
    assert_makes(
        Op::ScatterAdd(ScatterAdd { axis: 1, size: Dim::from(3usize) }),
        &[deep, integers(&[3], &[2, 0, 2])],
        integers(&[2, 3, 2], &[2, 3, 0, 0, 4, 6, 8, 9, 0, 0, 16, 18]),
    );
    let table = integers(&[2, 3], &[3, 9, 9, 4, 1, 1]);
    for (largest, places) in [(true, [1, 0]), (false, [0, 1])] {
        let op = Op::ArgReduce(ArgReduce { largest, axis: 1, keep: true });
        assert_makes(op, std::slice::from_ref(&table), integers(&[2, 1], &places));
    }
    let condition = Tensor::from_bool(&[2, 1], &[true, false]);
    assert_makes(
        Op::Select(Select {}),
        &[condition, integers(&[3], &[1, 2, 3]), integers(&[], &[7])],
        integers(&[2, 3], &[1, 2, 3, 7, 7, 7]),
    );
}

#[test]
fn reductions() {
    let reduced = |kind, axes: &[usize], keep, expected| {
        assert_makes(Op::Reduce(Reduce { kind, axes: axes.to_vec(), keep }), &[iota(&[2, 3, 2])], expected);
    };
    reduced(ReduceKind::Sum, &[0, 2], false, integers(&[3], &[14, 22, 30]));
    reduced(ReduceKind::Max, &[1], true, integers(&[2, 1, 2], &[4, 5, 10, 11]));
    reduced(ReduceKind::Min, &[0, 1, 2], false, integers(&[], &[0]));
    reduced(ReduceKind::Prod, &[2], false, integers(&[2, 3], &[0, 6, 20, 42, 72, 110]));
    reduced(ReduceKind::Sum, &[], false, iota(&[2, 3, 2]));
}

/// A slice with a static shape but a symbolic offset cannot run without a binding.
#[test]
fn a_place_without_a_value_is_refused() {
    let mut graph = Graph::new("case");
    let origin = Origin::default();
    let table = graph.add(Op::Constant(Constant { tensor: iota(&[4]) }), &[], &origin).unwrap();
    let (seq, next) = (Dim::symbol("seq"), Dim::symbol("seq").add(&Dim::from(1usize)).unwrap());
    let slice = Op::Slice(Slice { begin: vec![seq], end: vec![next], step: vec![1] });
    graph.add(slice, &graph.values(table), &origin).unwrap();
    let error = evaluate(&graph, &BTreeMap::new()).unwrap_err().to_string();
    assert!(error.contains("the size of symbolic dimension `seq` is unknown"), "{error}");
}
