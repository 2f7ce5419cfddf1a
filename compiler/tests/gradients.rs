//! For every sample of every op: the gradient matches finite differences and the input's shape, and the reference
//! kernel writes every output element.

use compiler::graph::bind::bind;
use compiler::graph::evaluate::evaluate;
use compiler::graph::{Graph, Origin, Writer};
use compiler::op::expr::backward;
use compiler::op::table::{rule, samples};
use compiler::op::{
    AvgPool, BatchNorm, Binary, Broadcast, Concat, Constant, Conv, CrossEntropy, Emit, Gather, Input, LayerNorm,
    LogSoftmax, MatMul, MaxPool, Op, Pad, Reduce, ReduceKind, Sample, Select, Slice, Softmax, Value, Window,
};
use compiler::tensor::dim::{Bindings, Dim};
use compiler::tensor::fact::Fact;
use compiler::tensor::view::ViewMut;
use compiler::tensor::{DType, Tensor};
use std::collections::BTreeMap;

/// An op on inputs `0`, `1`, … with the gradient of `Σ w·y` for each; y is the first output.
struct Case {
    graph: Graph,
    y: Value,
    gradients: Vec<Option<Value>>,
}

/// Fixed irregular weights, so that errors do not cancel in the sum.
fn weights(shape: &[usize]) -> Tensor {
    let count: usize = shape.iter().product();
    Tensor::from_f64(shape, &(0..count).map(|i| ((i * i + 3 * i + 1) as f64).cos() + 0.1).collect::<Vec<_>>())
}

fn case(op: &Op, facts: &[Fact], needs_gradient: &[bool]) -> Case {
    let mut graph = Graph::new("case");
    let mut writer = Writer { graph: &mut graph, origin: Origin::default() };
    let inputs: Vec<Value> = facts
        .iter()
        .enumerate()
        .map(|(i, fact)| writer.emit(Op::Input(Input { name: i.to_string(), fact: fact.clone() }), &[]))
        .collect();
    let outputs = writer.emit_all(op.clone(), &inputs);
    // With symbolic shapes the weights are an input.
    let y = writer.fact(outputs[0]);
    let dy = match y.concrete() {
        Some(shape) => Op::Constant(Constant { tensor: weights(&shape).cast(y.dtype) }),
        None => Op::Input(Input { name: "dy".into(), fact: y }),
    };
    let mut d_outputs = vec![None; outputs.len()];
    d_outputs[0] = Some(writer.emit(dy, &[]));
    let gradients = backward(rule(op), [&inputs, &outputs], &d_outputs, needs_gradient, &mut writer);
    for (input, gradient) in inputs.iter().zip(&gradients) {
        if let Some(gradient) = gradient {
            assert_eq!(writer.fact(*gradient), writer.fact(*input), "the gradient is not like its input: {op:?}");
        }
    }
    Case { graph, y: outputs[0], gradients }
}

fn by_name(inputs: &[Tensor]) -> BTreeMap<String, Tensor> {
    inputs.iter().enumerate().map(|(i, t)| (i.to_string(), t.clone())).collect()
}

fn facts(inputs: &[Tensor]) -> Vec<Fact> {
    inputs.iter().map(|t| Fact::of(t.dtype(), t.shape())).collect()
}

fn summary(sample: &Sample) -> String {
    format!("{} ({}): {:?}", rule(&sample.op).name(), sample.title, sample.op)
}

#[test]
fn gradients_are_slopes() {
    let mut checked = 0;
    for sample in samples().iter().filter(|s| !s.differentiate.is_empty()) {
        let summary = summary(sample);
        let inputs: Vec<Tensor> =
            sample.inputs.iter().map(|t| if t.dtype().is_float() { t.cast(DType::F64) } else { t.clone() }).collect();
        let full = case(&sample.op, &facts(&inputs), &vec![true; inputs.len()]);
        assert_eq!(full.gradients.len(), inputs.len(), "{summary}");
        let values = evaluate(&full.graph, &by_name(&inputs)).unwrap();
        let projection = weights(values[&full.y].shape()).to_f64();
        // Forward only, for the finite differences.
        let forward = case(&sample.op, &facts(&inputs), &vec![false; inputs.len()]);
        let loss = |inputs: &[Tensor]| -> f64 {
            let y = evaluate(&forward.graph, &by_name(inputs)).unwrap()[&forward.y].to_f64();
            y.iter().zip(&projection).map(|(y, w)| y * w).sum()
        };
        for &i in &sample.differentiate {
            let gradient = full.gradients[i].unwrap_or_else(|| panic!("{summary}: no gradient for input {i}"));
            let gradient = &values[&gradient];
            let x = inputs[i].to_f64();
            for (at, slope) in gradient.to_f64().into_iter().enumerate() {
                let h = 1e-5 * x[at].abs().clamp(0.1, 1.0);
                let loss_at = |by: f64| {
                    let mut x = x.clone();
                    x[at] += by;
                    let mut inputs = inputs.clone();
                    inputs[i] = Tensor::from_f64(inputs[i].shape(), &x);
                    loss(&inputs)
                };
                let difference = (loss_at(h) - loss_at(-h)) / (2.0 * h);
                let scale = slope.abs().max(difference.abs()).max(1.0);
                let is_close = (slope - difference).abs() <= 1e-6 * scale;
                assert!(is_close, "{summary}: input {i}, element {at}: gradient {slope}, difference {difference}");
            }
            // A gradient computed alone is the same.
            let needs_gradient: Vec<bool> = (0..inputs.len()).map(|j| j == i).collect();
            let single = case(&sample.op, &facts(&inputs), &needs_gradient);
            let values = evaluate(&single.graph, &by_name(&inputs)).unwrap();
            assert_eq!(single.gradients[i].map(|v| &values[&v]), Some(gradient), "{summary}: input {i} alone");
            checked += 1;
        }
    }
    assert!(checked > 100, "only {checked} gradients were checked");
}

#[test]
fn kernels_write_every_element() {
    for sample in samples() {
        let summary = summary(&sample);
        let inputs = facts(&sample.inputs);
        let outputs = rule(&sample.op).infer(&inputs.iter().collect::<Vec<_>>()).expect(&summary);
        let views: Vec<_> = sample.inputs.iter().map(Tensor::view).collect();
        let shapes: Vec<Vec<usize>> = outputs.iter().map(|f| f.concrete().expect(&summary)).collect();
        let run = |fill: u8| -> Vec<Vec<u8>> {
            let size = |f: &Fact| f.bytes().expect(&summary) as usize;
            let mut buffers: Vec<Vec<u8>> = outputs.iter().map(|f| vec![fill; size(f)]).collect();
            let mut output_views: Vec<ViewMut<'_>> = buffers
                .iter_mut()
                .zip(outputs.iter().zip(&shapes))
                .map(|(bytes, (fact, shape))| ViewMut::new(fact.dtype, shape, bytes))
                .collect();
            rule(&sample.op).reference(&views, &mut output_views).expect(&summary);
            buffers
        };
        assert_eq!(run(0x55), run(0xAA), "{summary}");
    }
}

#[test]
fn costs_are_finite() {
    for sample in samples() {
        let inputs = facts(&sample.inputs);
        let inputs: Vec<&Fact> = inputs.iter().collect();
        let cost = rule(&sample.op).cost(&inputs, &rule(&sample.op).infer(&inputs).unwrap());
        let is_valid = |v: f64| v.is_finite() && v >= 0.0;
        assert!(is_valid(cost.flops) && is_valid(cost.bytes), "{}: {cost:?}", summary(&sample));
    }
}

/// A gradient built for symbolic shapes is, once bound, bitwise that of static shapes.
#[test]
fn symbolic_gradients_bind_to_the_plain_ones() {
    let dims = |text: &str| text.split_whitespace().map(|d| Dim::parse(d).unwrap()).collect::<Vec<_>>();
    let float = |text: &str| Fact::new(DType::F64, dims(text));
    let slice =
        |begin, end, step: &[usize]| Op::Slice(Slice { begin: dims(begin), end: dims(end), step: step.to_vec() });
    let pad = |low, high, interior: &[usize]| {
        Op::Pad(Pad { low: dims(low), high: dims(high), interior: interior.to_vec(), value: 0.0 })
    };
    let reduce = |kind, axes: &[usize], keep| Op::Reduce(Reduce { kind, axes: axes.to_vec(), keep });
    let matmul = |transpose_a, transpose_b| Op::MatMul(MatMul { transpose_a, transpose_b });
    let strided = || Window { strides: vec![2], pads_begin: vec![1], pads_end: vec![1], dilations: vec![1] };
    let average = AvgPool { kernel: vec![3], window: strided(), ceil: false, count_padding: true };
    let largest = MaxPool { kernel: vec![3], window: strided(), ceil: true };
    let cases = [
        (slice("1 0", "b+1 n*2", &[1, 2]), vec![float("b+2 n*2")]),
        (slice("n 1", "n+1 n*2", &[1, 2]), vec![float("7 n*2")]),
        (pad("n 0", "1 b", &[0, 2]), vec![float("b n")]),
        (Op::Concat(Concat { axis: 1 }), vec![float("b n"), float("b 2"), float("b b*3")]),
        (reduce(ReduceKind::Sum, &[0], false), vec![float("b n")]),
        (reduce(ReduceKind::Mean, &[0, 1], false), vec![float("b n 2")]),
        (reduce(ReduceKind::Mean, &[1], true), vec![float("b n 2")]),
        (reduce(ReduceKind::Max, &[1], false), vec![float("b n")]),
        (Op::Binary(Binary::Mul), vec![float("b 1 n"), float("2 n")]),
        (Op::Binary(Binary::Pow), vec![float("n"), float("b n")]),
        (Op::Select(Select {}), vec![Fact::new(DType::Bool, dims("b 1")), float("n"), float("")]),
        (Op::Broadcast(Broadcast { shape: dims("b n 4") }), vec![float("n 1")]),
        (matmul(false, false), vec![float("b n 4"), float("4 2")]),
        (matmul(false, true), vec![float("b n 2 4"), float("3 4")]),
        (matmul(true, false), vec![float("b 4 n"), float("4 2")]),
        (matmul(true, true), vec![float("b 1 4 n"), float("2 b 4")]),
        (matmul(false, false), vec![float("3 n"), float("b n 2")]),
        (Op::Conv(Conv { window: strided(), groups: 2 }), vec![float("b 4 n*2"), float("6 2 3")]),
        (Op::AvgPool(average), vec![float("b 2 n*2")]),
        (Op::MaxPool(largest), vec![float("b 2 n*2")]),
        (Op::Softmax(Softmax { axis: 1 }), vec![float("b n")]),
        (Op::LogSoftmax(LogSoftmax { axis: 1 }), vec![float("b n")]),
        (Op::LayerNorm(LayerNorm { axis: 1, epsilon: 1e-5 }), vec![float("b n"), float("n"), float("n")]),
        (Op::BatchNorm(BatchNorm { epsilon: 1e-5 }), vec![float("b 3 n"), float("3"), float("3")]),
        (Op::CrossEntropy(CrossEntropy::new(1, Some(2))), vec![float("b 7 n"), Fact::new(DType::I64, dims("b n"))]),
        (Op::Gather(Gather { axis: 0 }), vec![float("n+2 3"), Fact::new(DType::I64, dims("b"))]),
    ];
    let bindings = Bindings::from([("b".to_string(), 3), ("n".to_string(), 5)]);
    for (op, symbolic_facts) in cases {
        let needs_gradient = vec![true; symbolic_facts.len()];
        let symbolic = case(&op, &symbolic_facts, &needs_gradient);
        let concrete_facts: Vec<Fact> = symbolic_facts.iter().map(|f| f.substitute(&bindings).unwrap()).collect();
        let values: Vec<Tensor> = concrete_facts
            .iter()
            .map(|f| {
                let shape = f.concrete().unwrap();
                let count: usize = shape.iter().product();
                let numbers: Vec<f64> = (0..count).map(|i| 1.5 + (i % 5) as f64).collect();
                Tensor::from_f64(&shape, &numbers).cast(f.dtype)
            })
            .collect();
        let bound = bind(&symbolic.graph, &bindings).unwrap();
        let concrete = case(&bound.node(symbolic.y.node).op, &concrete_facts, &needs_gradient);
        let mut feeds = by_name(&values);
        feeds.insert("dy".into(), weights(&bound.fact(symbolic.y).concrete().unwrap()));
        let run = |graph: &Graph, gradients: &[Option<Value>]| -> Vec<Option<Tensor>> {
            let results = evaluate(graph, &feeds).unwrap();
            gradients.iter().map(|v| v.map(|v| results[&v].clone())).collect()
        };
        let bound_gradients = run(&bound, &symbolic.gradients);
        assert!(bound_gradients.iter().any(Option::is_some), "{op:?} has no gradient");
        assert_eq!(bound_gradients, run(&concrete.graph, &concrete.gradients), "{op:?}");
    }
}
