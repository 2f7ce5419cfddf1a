//! Every sharding strategy of every op gives the unsharded result: inputs are sharded as the strategy requires, all
//! devices run reference kernels, and outputs are gathered.

use compiler::graph::verify::verify;
use compiler::graph::{Graph, Origin, Writer, evaluate_spmd};
use compiler::op::collective::meet;
use compiler::op::sample::{ramp, run, try_run};
use compiler::op::sharding::{Local, part_of, strategies, whole_of, write};
use compiler::op::table::{rule, samples};
use compiler::op::*;
use compiler::tensor::fact::Fact;
use compiler::tensor::view::ViewMut;
use compiler::tensor::{DType, Tensor};
use std::collections::{BTreeMap, BTreeSet};

/// Local tensors of each device for a sharding; partial sums get random terms that add up to `tensor`.
fn parts(tensor: &Tensor, layout: Sharding, devices: usize, seed: u64) -> Vec<Tensor> {
    match layout {
        Sharding::Replicated => vec![tensor.clone(); devices],
        Sharding::Split(split) => (0..devices).map(|device| part_of(tensor, split, devices, device)).collect(),
        Sharding::Partial => {
            let mut terms: Vec<Tensor> =
                (1..devices).map(|device| ramp(tensor.shape(), seed + device as u64).cast(tensor.dtype())).collect();
            terms.push(add_terms(tensor, &terms, -1.0));
            terms
        }
    }
}

/// `start` plus all terms times `sign`.
fn add_terms(start: &Tensor, terms: &[Tensor], sign: f64) -> Tensor {
    let mut bytes = start.bytes().to_vec();
    let mut sum = ViewMut::new(start.dtype(), start.shape(), &mut bytes);
    for i in 0..sum.len() {
        if start.dtype().is_float() {
            let value = terms.iter().fold(sum.as_view().f64(i), |v, t| v + sign * t.view().f64(i));
            sum.set_f64(i, value);
        } else {
            let term = |t: &Tensor| t.view().i64(i).wrapping_mul(sign as i64);
            let value = terms.iter().fold(sum.as_view().i64(i), |v, t| v.wrapping_add(term(t)));
            sum.set_i64(i, value);
        }
    }
    Tensor::new(start.dtype(), start.shape().to_vec(), bytes.into()).unwrap()
}

fn join_shards(parts: &[Tensor], layout: Sharding) -> Tensor {
    match layout {
        Sharding::Replicated => {
            assert!(parts.iter().all(|part| part.bytes() == parts[0].bytes()), "devices have different wholes");
            parts[0].clone()
        }
        Sharding::Split(split) => whole_of(parts, split),
        Sharding::Partial => add_terms(&parts[0], &parts[1..], 1.0),
    }
}

/// Runs the strategy on all devices and returns the gathered outputs.
fn run_sharded(op: &Op, strategy: &Strategy, inputs: &[Tensor], devices: usize) -> Result<Vec<Tensor>, String> {
    let facts: Vec<Fact> = inputs.iter().map(|t| Fact::of(t.dtype(), t.shape())).collect();
    let mut graph = Graph::new("part");
    let mut feeds = vec![BTreeMap::new(); devices];
    let mut values = Vec::new();
    for (i, (input, layout)) in inputs.iter().zip(&strategy.inputs).enumerate() {
        let (name, fact) = (format!("x{i}"), layout.part(&facts[i], devices).unwrap());
        let node = graph.add(Op::Input(Input { name: name.clone(), fact }), &[], &Origin::default()).unwrap();
        values.push(Value { node, output: 0 });
        for (feeds, part) in feeds.iter_mut().zip(parts(input, *layout, devices, i as u64)) {
            feeds.insert(name.clone(), part);
        }
    }
    let facts: Vec<&Fact> = facts.iter().collect();
    let mut out = Writer { graph: &mut graph, origin: Origin::default() };
    let outputs = write(op, strategy, &values, &facts, devices, &mut out);
    verify(&graph).unwrap();
    let values = evaluate_spmd::evaluate(&graph, &feeds).map_err(|e| e.to_string())?;
    let per_device = |value: &Value| -> Vec<Tensor> { values.iter().map(|device| device[value].clone()).collect() };
    Ok(outputs.iter().zip(&strategy.outputs).map(|(value, layout)| join_shards(&per_device(value), *layout)).collect())
}

fn describe(strategy: &Strategy) -> String {
    let list = |layouts: &[Sharding]| layouts.iter().map(Sharding::to_string).collect::<Vec<_>>().join(" ");
    format!("{} -> {}", list(&strategy.inputs), list(&strategy.outputs))
}

/// Asserts equality up to rounding relative to `top`.
fn assert_close(what: &str, got: &Tensor, want: &Tensor, relative: f64, top: f64) {
    assert_eq!((got.dtype(), got.shape()), (want.dtype(), want.shape()), "{what}");
    if relative == 0.0 || !want.dtype().is_float() {
        assert!(got.bytes() == want.bytes(), "{what}: {:?}, not {:?}", got.to_f64(), want.to_f64());
        return;
    }
    let (got, want) = (got.to_f64(), want.to_f64());
    for (g, w) in got.iter().zip(&want) {
        let is_close = g == w || (g.is_nan() && w.is_nan()) || (g - w).abs() <= relative * top;
        assert!(is_close, "{what}: {g} is not {w}");
    }
}

/// Samples with divisible shapes, for ops whose own samples are not divisible.
fn divisible() -> Vec<Sample> {
    let of = |op: Op, inputs: Vec<Tensor>| Sample { title: "divisible", op, inputs, differentiate: vec![] };
    let window = |rank: usize| Window {
        strides: vec![1; rank],
        pads_begin: vec![1; rank],
        pads_end: vec![1; rank],
        dilations: vec![1; rank],
    };
    let dims = |sizes: &[usize]| sizes.iter().map(|d| (*d).into()).collect::<Vec<_>>();
    let x = |shape: &[usize]| ramp(shape, 5);
    let labels = |count: usize, classes: usize| {
        let values: Vec<i64> = (0..count).map(|i| if i % 5 == 3 { -100 } else { (i * 7 % classes) as i64 }).collect();
        Tensor::from_i64(&[count / 4, 4], &values)
    };
    let conv = |groups| Op::Conv(Conv { window: window(2), groups });
    let input_grad = |groups| Op::ConvInputGrad(ConvInputGrad { window: window(2), groups, spatial: dims(&[4, 4]) });
    let weight_grad = |groups| Op::ConvWeightGrad(ConvWeightGrad { window: window(2), groups, kernel: vec![3, 3] });
    let pool = MaxPool { kernel: vec![2, 2], window: window(2), ceil: false };
    let mean = AvgPool { kernel: vec![2, 2], window: window(2), ceil: false, count_padding: true };
    let mut list = vec![
        of(conv(1), vec![x(&[4, 4, 4, 4]), x(&[8, 4, 3, 3])]),
        of(conv(4), vec![x(&[2, 8, 4, 4]), x(&[4, 2, 3, 3])]),
        of(input_grad(1), vec![x(&[4, 8, 4, 4]), x(&[8, 4, 3, 3])]),
        of(input_grad(4), vec![x(&[2, 4, 4, 4]), x(&[4, 2, 3, 3])]),
        of(weight_grad(1), vec![x(&[4, 8, 4, 4]), x(&[4, 4, 4, 4])]),
        of(weight_grad(4), vec![x(&[2, 4, 4, 4]), x(&[2, 8, 4, 4])]),
        of(Op::MaxPool(pool.clone()), vec![x(&[4, 4, 4, 4])]),
        of(Op::MaxPoolGrad(MaxPoolGrad { forward: pool }), vec![x(&[4, 4, 4, 4]), x(&[4, 4, 5, 5])]),
        of(Op::AvgPool(mean.clone()), vec![x(&[4, 4, 4, 4])]),
        of(Op::AvgPoolGrad(AvgPoolGrad { forward: mean, spatial: dims(&[4, 4]) }), vec![x(&[4, 4, 5, 5])]),
        of(Op::BatchNorm(BatchNorm { epsilon: 1e-5 }), vec![x(&[3, 4, 5]), x(&[4]), x(&[4])]),
        of(Op::LayerNorm(LayerNorm { axis: 2, epsilon: 1e-5 }), vec![x(&[4, 8, 3]), x(&[3]), x(&[3])]),
        of(Op::Softmax(Softmax { axis: 1 }), vec![x(&[4, 5, 8])]),
        of(Op::LogSoftmax(LogSoftmax { axis: 1 }), vec![x(&[4, 5, 8])]),
        of(Op::Concat(Concat { axis: 1 }), vec![x(&[4, 8]), ramp(&[4, 8], 2), ramp(&[4, 8], 3)]),
        of(Op::Reshape(Reshape { shape: dims(&[4, 3, 4, 2]) }), vec![x(&[4, 24])]),
        of(Op::Reshape(Reshape { shape: dims(&[4, 24]) }), vec![x(&[4, 3, 4, 2])]),
        of(Op::Reshape(Reshape { shape: dims(&[2, 12, 4]) }), vec![x(&[24, 4])]),
        of(Op::Dropout(Dropout { ratio: 0.5, stream: 9 }), vec![x(&[4, 8, 12]), Tensor::from_i64(&[], &[3])]),
        of(
            Op::Gather(Gather { axis: 1 }),
            vec![x(&[4, 12, 8]), Tensor::from_i64(&[2, 4], &[0, -1, 5, 3, 11, 2, -12, 7])],
        ),
        of(
            Op::ScatterAdd(ScatterAdd { axis: 1, size: 12usize.into() }),
            vec![x(&[4, 2, 4, 8]), Tensor::from_i64(&[2, 4], &[0, -1, 5, 3, 5, 2, -12, 7])],
        ),
        of(
            Op::BatchGather(BatchGather { batch: 1 }),
            vec![x(&[4, 12, 8]), Tensor::from_i64(&[4, 4], &[0, -1, 5, 3, 11, 2, -12, 7, 0, 0, 1, 1, 4, 5, 6, 7])],
        ),
        of(
            Op::BatchScatterAdd(BatchScatterAdd { batch: 1, size: 12usize.into() }),
            vec![x(&[4, 4, 8]), Tensor::from_i64(&[4, 4], &[0, -1, 5, 3, 11, 2, -12, 7, 0, 0, 1, 1, 4, 5, 6, 7])],
        ),
        of(
            Op::Scatter(Scatter { kind: ScatterKind::Replace, axis: 1 }),
            vec![x(&[4, 12, 8]), Tensor::from_i64(&[2], &[3, 5]), ramp(&[4, 2, 8], 8)],
        ),
        of(Op::TopK(TopK { axis: 1, count: 2usize.into(), largest: true }), vec![x(&[4, 5, 8])]),
        of(Op::ArgReduce(ArgReduce { largest: true, axis: 1, keep: false }), vec![x(&[4, 5, 8])]),
        of(
            Op::Pad(Pad { low: dims(&[0, 1]), high: dims(&[0, 2]), interior: vec![0, 1], value: 0.0 }),
            vec![x(&[4, 8])],
        ),
        of(Op::Flip(Flip { axes: vec![1] }), vec![x(&[4, 8])]),
        of(
            Op::Cumulative(Cumulative { kind: CumulativeKind::Sum, axis: 1, exclusive: false, reverse: true }),
            vec![x(&[4, 8])],
        ),
        of(Op::Select(Select {}), vec![Tensor::from_bool(&[4, 1], &[true, false, true, true]), x(&[4, 8]), x(&[8])]),
    ];
    for (axis, ignore) in [(2, Some(-100)), (0, Some(-100))] {
        let shape = if axis == 2 { [3, 4, 8] } else { [8, 3, 4] };
        let loss = CrossEntropy::new(axis, ignore);
        let (logits, target) = (x(&shape), labels(12, 8));
        let lse = run(&loss, &[logits.clone(), target.clone()]).remove(1);
        list.push(of(Op::CrossEntropy(loss), vec![logits.clone(), target.clone()]));
        let (grad, dloss) = (CrossEntropyGrad::new(axis, ignore), Tensor::from_f32(&[], &[0.7]));
        list.push(of(Op::CrossEntropyGrad(grad), vec![dloss.clone(), logits.clone(), target.clone(), lse]));
        let (loss, narrow) = (CrossEntropy { wide: true, ..loss }, logits.cast(DType::Bf16));
        let lse = run(&loss, &[narrow.clone(), target.clone()]).remove(1);
        list.push(of(Op::CrossEntropy(loss), vec![narrow.clone(), target.clone()]));
        let grad = CrossEntropyGrad { wide: true, ..grad };
        list.push(of(Op::CrossEntropyGrad(grad), vec![dloss, narrow, target, lse]));
    }
    for kind in [ReduceKind::Sum, ReduceKind::Mean, ReduceKind::Max, ReduceKind::Min, ReduceKind::Prod] {
        for keep in [true, false] {
            list.push(of(Op::Reduce(Reduce { kind, axes: vec![0, 2], keep }), vec![x(&[4, 8, 12])]));
        }
    }
    for (transpose_a, transpose_b) in [(false, false), (true, false), (false, true), (true, true)] {
        let a = if transpose_a { [4, 8, 12] } else { [4, 12, 8] };
        let b = if transpose_b { [1, 4, 8] } else { [1, 8, 4] };
        let op = MatMul { transpose_a, transpose_b };
        list.push(of(Op::MatMul(op), vec![x(&a), ramp(&b, 6)]));
        list.push(of(Op::MatMul(op), vec![x(&a), ramp(&b[1..], 6)]));
    }
    for dropout in [None, Some(Dropout { ratio: 0.5, stream: 3 })] {
        let op = Attention { scale: 0.7, causal: true, empty: EmptyRow::Nan, dropout, part: None };
        let mut inputs = vec![x(&[4, 8, 3, 2]), ramp(&[4, 4, 3, 2], 6), ramp(&[4, 4, 3, 2], 7)];
        inputs.extend(dropout.map(|_| Tensor::from_i64(&[], &[9])));
        let saved = run(&op, &inputs);
        let mut grad_inputs = vec![ramp(saved[0].shape(), 8)];
        grad_inputs.extend_from_slice(&inputs[..3]);
        grad_inputs.extend(saved);
        grad_inputs.extend_from_slice(&inputs[3..]);
        list.push(of(Op::Attention(op), inputs));
        list.push(of(Op::AttentionGrad(AttentionGrad { forward: op }), grad_inputs));
    }
    for (begin, end) in [(0, 8), (8, 16), (8, 24), (0, 24)] {
        let op = Slice { begin: dims(&[0, begin]), end: dims(&[4, end]), step: vec![1, 1] };
        list.push(of(Op::Slice(op), vec![x(&[4, 24])]));
    }
    list
}

/// The sample in f64, if the op accepts it.
fn doubled(sample: &Sample) -> Option<Vec<Tensor>> {
    let wider = |t: &Tensor| if t.dtype() == DType::F32 { t.cast(DType::F64) } else { t.clone() };
    let inputs: Vec<Tensor> = sample.inputs.iter().map(wider).collect();
    let facts: Vec<Fact> = inputs.iter().map(|t| Fact::of(t.dtype(), t.shape())).collect();
    rule(&sample.op).infer(&facts.iter().collect::<Vec<_>>()).ok()?;
    Some(inputs)
}

#[test]
fn every_way_of_sharing_an_op_gives_what_the_op_gives() {
    let mut covered: BTreeMap<&'static str, BTreeSet<String>> = BTreeMap::new();
    for sample in samples().into_iter().chain(divisible()) {
        let collective = meet(&sample.op, &sample.inputs).is_some();
        if collective || sample.inputs.is_empty() || try_run(rule(&sample.op), &sample.inputs).is_err() {
            continue;
        }
        for devices in [2, 3, 4, 5] {
            let blocks = BTreeMap::from([(8, vec![2]), (12, vec![2, 3]), (24, vec![2, 3])]);
            let group = Group { devices, blocks };
            for inputs in [Some(sample.inputs.clone()), doubled(&sample)].into_iter().flatten() {
                let want = run(rule(&sample.op), &inputs);
                let facts: Vec<Fact> = inputs.iter().map(|t| Fact::of(t.dtype(), t.shape())).collect();
                let facts: Vec<&Fact> = facts.iter().collect();
                let outputs = rule(&sample.op).infer(&facts).unwrap();
                for strategy in strategies(&sample.op, &facts, &outputs, &group) {
                    let name = rule(&sample.op).name();
                    let strategy_name = describe(&strategy);
                    let what = format!("{name}, {}, {devices} devices, {strategy_name}", sample.title);
                    let got =
                        run_sharded(&sample.op, &strategy, &inputs, devices).unwrap_or_else(|e| panic!("{what}: {e}"));
                    let sums =
                        strategy.inputs.iter().chain(&strategy.outputs).any(|layout| *layout == Sharding::Partial);
                    let is_exact = !sums && strategy.local != Local::Written;
                    // Random terms cannot add up to non-finite values.
                    if strategy.inputs.contains(&Sharding::Partial) && !finite(&inputs) {
                        continue;
                    }
                    let narrowest = inputs.iter().chain(&want).map(Tensor::dtype).filter(|d| d.is_float());
                    let relative = match (is_exact, narrowest.map(DType::size).min()) {
                        (true, _) => 0.0,
                        (_, Some(2)) => 2e-2,
                        (_, Some(4)) => 2e-6,
                        _ => 1e-12,
                    };
                    let top = largest(inputs.iter().chain(&want));
                    for (got, want) in got.iter().zip(&want) {
                        assert_close(&what, got, want, relative, top);
                    }
                    covered.entry(name).or_default().insert(strategy_name);
                }
            }
        }
    }
    for (name, ways) in &covered {
        println!("{name}: {}", ways.iter().cloned().collect::<Vec<_>>().join(", "));
    }
    let ways: usize = covered.values().map(BTreeSet::len).sum();
    println!("{ways} ways of {} ops", covered.len());
    // The ops without a strategy: parts that are already sharded, and values that depend on their global position.
    let unsharded: Vec<&str> = covered.iter().filter(|(_, ways)| ways.len() < 2).map(|(name, _)| *name).collect();
    assert_eq!(unsharded, ["dropout_part", "uniform"]);
}

/// The largest finite magnitude, at least one.
fn largest<'a>(tensors: impl Iterator<Item = &'a Tensor>) -> f64 {
    let floats = tensors.filter(|t| t.dtype().is_float()).flat_map(Tensor::to_f64);
    floats.filter(|v| v.is_finite()).fold(1.0, |most, v| most.max(v.abs()))
}

fn finite(inputs: &[Tensor]) -> bool {
    inputs.iter().all(|t| t.to_f64().iter().all(|v| v.is_finite()))
}

/// An invalid index or label is an error on every device, as without sharding.
#[test]
fn what_does_not_exist_is_refused_by_all_devices() {
    let classes = ramp(&[4, 8], 1);
    let ops: [(Op, Vec<Tensor>); 4] = [
        (
            Op::BatchGather(BatchGather { batch: 1 }),
            vec![ramp(&[2, 4, 2], 1), Tensor::from_i64(&[2, 2], &[1, 0, 3, 4])],
        ),
        (Op::Gather(Gather { axis: 0 }), vec![ramp(&[8, 4], 1), Tensor::from_i64(&[2], &[1, 8])]),
        (
            Op::CrossEntropy(CrossEntropy::new(1, Some(-100))),
            vec![classes.clone(), Tensor::from_i64(&[4], &[0, 8, -100, 2])],
        ),
        (Op::CrossEntropy(CrossEntropy::new(1, None)), vec![classes, Tensor::from_i64(&[4], &[0, 1, -1, 2])]),
    ];
    for (op, inputs) in ops {
        assert!(try_run(rule(&op), &inputs).is_err());
        let facts: Vec<Fact> = inputs.iter().map(|t| Fact::of(t.dtype(), t.shape())).collect();
        let facts: Vec<&Fact> = facts.iter().collect();
        let outputs = rule(&op).infer(&facts).unwrap();
        for strategy in strategies(&op, &facts, &outputs, &Group::of(2)) {
            let result = run_sharded(&op, &strategy, &inputs, 2);
            assert!(result.is_err(), "{}: {}", rule(&op).name(), describe(&strategy));
        }
    }
}
