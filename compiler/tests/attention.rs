//! The attention pass: every form of attention becomes one op with the same values, and what only looks
//! like attention stays.

use compiler::graph::evaluate::evaluate;
use compiler::graph::verify::verify;
use compiler::graph::{Graph, Origin, Output, Writer};
use compiler::op::sample::ramp;
use compiler::op::unary::scalar;
use compiler::op::*;
use compiler::pass::Changed;
use compiler::pass::attention::attention;
use compiler::pass::dce::dce;
use compiler::tensor::dim::Dim;
use compiler::tensor::fact::Fact;
use compiler::tensor::{DType, Tensor};
use std::collections::BTreeMap;

const B: i64 = 2;
const H: i64 = 4;
const S: i64 = 5;
const T: i64 = 5;
const D: i64 = 3;

/// A graph under construction, with the values of its inputs.
struct Net {
    graph: Graph,
    inputs: BTreeMap<String, Tensor>,
}

impl Net {
    fn new() -> Net {
        Net { graph: Graph::new("net"), inputs: BTreeMap::new() }
    }

    fn add(&mut self, op: Op, inputs: &[Value]) -> Value {
        Writer { graph: &mut self.graph, origin: Origin::default() }.emit(op, inputs)
    }

    fn input(&mut self, name: &str, tensor: Tensor) -> Value {
        let fact = Fact::of(tensor.dtype(), tensor.shape());
        self.inputs.insert(name.to_string(), tensor);
        self.add(Op::Input(Input { name: name.into(), fact }), &[])
    }

    fn operand(&mut self, name: &str, shape: &[i64], seed: u64) -> Value {
        let shape: Vec<usize> = shape.iter().map(|d| *d as usize).collect();
        self.input(name, ramp(&shape, seed))
    }

    /// Query, key and value of shape `[B, H, S or T, D]`.
    fn operands(&mut self) -> [Value; 3] {
        [("q", S, 1), ("k", T, 2), ("v", T, 3)].map(|(name, steps, seed)| self.operand(name, &[B, H, steps, D], seed))
    }

    fn matmul(&mut self, a: Value, b: Value, transpose_b: bool) -> Value {
        self.add(Op::MatMul(MatMul { transpose_a: false, transpose_b }), &[a, b])
    }

    fn binary(&mut self, op: Binary, a: Value, b: Value) -> Value {
        self.add(Op::Binary(op), &[a, b])
    }

    fn with_number(&mut self, op: Binary, a: Value, number: f64) -> Value {
        let number = self.add(scalar(DType::F32, number), &[]);
        self.binary(op, a, number)
    }

    fn softmax(&mut self, x: Value) -> Value {
        let axis = self.graph.fact(x).rank() - 1;
        self.add(Op::Softmax(Softmax { axis }), &[x])
    }

    fn select(&mut self, condition: Value, a: Value, b: Value) -> Value {
        self.add(Op::Select(Select {}), &[condition, a, b])
    }

    fn where_number(&mut self, condition: Value, x: Value, number: f64) -> Value {
        let number = self.add(scalar(DType::F32, number), &[]);
        self.select(condition, x, number)
    }

    fn reshape(&mut self, x: Value, shape: &[i64]) -> Value {
        self.add(Op::Reshape(Reshape { shape: shape.iter().map(|d| Dim::Known(*d)).collect() }), &[x])
    }

    fn broadcast(&mut self, x: Value, shape: &[i64]) -> Value {
        self.add(Op::Broadcast(Broadcast { shape: shape.iter().map(|d| Dim::Known(*d)).collect() }), &[x])
    }

    fn transpose(&mut self, x: Value, perm: &[usize]) -> Value {
        self.add(Op::Transpose(Transpose { perm: perm.to_vec() }), &[x])
    }

    /// `q·kᵀ/√D`
    fn scores(&mut self, q: Value, k: Value) -> Value {
        let scores = self.matmul(q, k, true);
        self.with_number(Binary::Mul, scores, 1.0 / (D as f64).sqrt())
    }

    /// True where `j ≤ i + offset`.
    fn lower(&mut self, offset: i64) -> Value {
        let iota = |shape: [i64; 2], axis| {
            Op::Iota(Iota { fact: Fact::new(DType::I64, shape.map(Dim::Known).to_vec()), axis })
        };
        let (i, j) = (self.add(iota([S, 1], 0), &[]), self.add(iota([1, T], 1), &[]));
        let offset = self.add(Op::Constant(Constant { tensor: Tensor::from_i64(&[], &[offset]) }), &[]);
        let i = self.binary(Binary::Add, i, offset);
        self.add(Op::Compare(Compare::LessEqual), &[j, i])
    }

    /// A mask of data: some keys of the first example, and none of the second if `may_be_empty`.
    fn padding(&mut self, may_be_empty: bool) -> Value {
        let visible: Vec<bool> = (0..B * T).map(|at| if at < T { at != 1 } else { !may_be_empty }).collect();
        self.input("mask", Tensor::from_bool(&[B as usize, 1, 1, T as usize], &visible))
    }

    fn attentions(graph: &Graph) -> Vec<Attention> {
        graph.ids().filter_map(|id| if let Op::Attention(op) = graph.node(id).op { Some(op) } else { None }).collect()
    }

    /// Runs the pass. If it recognises attention, values are those of the parts.
    fn pass(mut self, y: Value) -> Option<(Attention, Graph)> {
        self.graph.outputs.push(Output { name: "y".into(), value: y });
        let before = evaluate(&self.graph, &self.inputs).unwrap()[&y].clone();
        let shape = self.graph.fact(y).clone();
        let changed = attention(&mut self.graph);
        verify(&self.graph).unwrap();
        dce(&mut self.graph);
        verify(&self.graph).unwrap();
        let attentions = Net::attentions(&self.graph);
        assert_eq!(changed == Changed::Yes, !attentions.is_empty());
        let output = self.graph.outputs[0].value;
        assert_eq!(*self.graph.fact(output), shape);
        let after = evaluate(&self.graph, &self.inputs).unwrap()[&output].clone();
        for (a, b) in after.to_f64().iter().zip(before.to_f64()) {
            assert!((a - b).abs() < 1e-6 || a.is_nan() && b.is_nan(), "{a} is not {b}");
        }
        let has = |test: fn(&Op) -> bool| self.graph.ids().any(|id| test(&self.graph.node(id).op));
        let op = attentions.first().copied()?;
        assert!(!has(|op| matches!(op, Op::MatMul(_) | Op::Softmax(_) | Op::Dropout(_))), "parts are left");
        Some((op, self.graph))
    }
}

/// The attention of a net.
fn rewrite(build: impl FnOnce(&mut Net) -> Value) -> Option<Attention> {
    let mut net = Net::new();
    let y = build(&mut net);
    net.pass(y).map(|(op, _)| op)
}

const SCALE: f64 = 0.577_350_269_189_625_8;

fn is_scale(op: Attention) -> bool {
    (op.scale - SCALE).abs() < 1e-6
}

#[test]
fn scales_of_scores_and_operands_are_one() {
    for form in 0..4 {
        let op = rewrite(|net| {
            let [mut q, mut k, v] = net.operands();
            let root = (D as f64).sqrt();
            if form == 1 {
                q = net.with_number(Binary::Div, q, root);
            }
            if form == 2 {
                (q, k) = (net.with_number(Binary::Mul, q, SCALE.sqrt()), net.with_number(Binary::Mul, k, SCALE.sqrt()));
            }
            let mut scores = net.matmul(q, k, true);
            match form {
                0 => scores = net.with_number(Binary::Mul, scores, SCALE),
                3 => scores = net.with_number(Binary::Div, scores, root),
                _ => {}
            }
            let weights = net.softmax(scores);
            net.matmul(weights, v, false)
        })
        .unwrap();
        assert!(is_scale(op) && !op.causal && op.empty == EmptyRow::Nan, "{form}: {op:?}");
    }
}

#[test]
fn operands_may_be_transposed_and_reshaped() {
    // The key as of the zoo: its heads and its last two axes turned at once.
    let op = rewrite(|net| {
        let [q, _, v] = net.operands();
        let k = net.operand("keys", &[B, T, H, D], 4);
        let k = net.transpose(k, &[0, 2, 3, 1]);
        let scores = net.matmul(q, k, false);
        let weights = net.softmax(scores);
        net.matmul(weights, v, false)
    });
    assert_eq!(op.unwrap().scale, 1.0);
    // As of torch's decomposition: matrices in a list, and scaled before that.
    let op = rewrite(|net| {
        let [q, k, v] = net.operands();
        let q = net.with_number(Binary::Mul, q, SCALE.sqrt());
        let k = net.transpose(k, &[0, 1, 3, 2]);
        let k = net.with_number(Binary::Mul, k, SCALE.sqrt());
        let (q, k) = (net.reshape(q, &[B * H, S, D]), net.reshape(k, &[B * H, D, T]));
        let scores = net.matmul(q, k, false);
        let scores = net.reshape(scores, &[B, H, S, T]);
        let mask = net.lower(0);
        let mask = net.where_zero_or(mask, f64::NEG_INFINITY);
        let scores = net.binary(Binary::Add, scores, mask);
        let weights = net.softmax(scores);
        let (weights, v) = (net.reshape(weights, &[B * H, S, T]), net.reshape(v, &[B * H, T, D]));
        let y = net.matmul(weights, v, false);
        net.reshape(y, &[B, H, S, D])
    });
    assert!(op.is_some_and(|op| is_scale(op) && op.causal));
    // Rank 3.
    let op = rewrite(|net| {
        let [q, k, v] = net.operands().map(|x| net_flat(net, x));
        let scores = net.scores(q, k);
        let weights = net.softmax(scores);
        net.matmul(weights, v, false)
    });
    assert!(op.is_some_and(is_scale));
}

fn net_flat(net: &mut Net, x: Value) -> Value {
    net.reshape(x, &[B * H, S, D])
}

impl Net {
    /// 0 where the condition holds, else a number.
    fn where_zero_or(&mut self, condition: Value, number: f64) -> Value {
        let zero = self.add(scalar(DType::F32, 0.0), &[]);
        self.where_number(condition, zero, number)
    }
}

#[test]
fn causal_masks_are_proven_and_others_are_inputs() {
    let with = |form: u32, offset: i64| {
        let mut inputs = 0;
        let mut net = Net::new();
        let [q, k, v] = net.operands();
        let scores = net.scores(q, k);
        let lower = net.lower(offset);
        let scores = match form {
            0 => net.where_number(lower, scores, f64::from(f32::MIN)),
            1 => {
                let mask = net.where_zero_or(lower, -1e9);
                net.binary(Binary::Add, scores, mask)
            }
            _ => {
                let values: Vec<f32> =
                    (0..S * T).map(|at| if at % T <= at / T + offset { 0.0 } else { f32::NEG_INFINITY }).collect();
                let tensor = Tensor::from_f32(&[1, 1, S as usize, T as usize], &values);
                let mask = net.add(Op::Constant(Constant { tensor }), &[]);
                net.binary(Binary::Add, mask, scores)
            }
        };
        let weights = net.softmax(scores);
        let y = net.matmul(weights, v, false);
        let (op, graph) = net.pass(y).unwrap();
        for id in graph.ids().filter(|id| matches!(graph.node(*id).op, Op::Attention(_))) {
            inputs = graph.inputs(id).len();
        }
        (op.causal, inputs)
    };
    for form in 0..3 {
        assert_eq!((with(form, 0), with(form, 1)), ((true, 3), (false, 4)), "{form}");
    }
}

#[test]
fn empty_rows_are_those_of_the_source() {
    // As of scaled_dot_product_attention with a boolean mask.
    let zeroed = |matching: bool| {
        rewrite(|net| {
            let [q, k, v] = net.operands();
            let scores = net.scores(q, k);
            let mask = net.padding(true);
            let scores = net.where_number(mask, scores, f64::from(f32::MIN));
            let weights = net.softmax(scores);
            let zeros = if matching { mask } else { net.lower(0) };
            let weights = net.where_number(zeros, weights, 0.0);
            net.matmul(weights, v, false)
        })
    };
    assert_eq!(zeroed(true).unwrap().empty, EmptyRow::Zero);
    assert_eq!(zeroed(false), None);
    let filled = |number: f64, may_be_empty: bool| {
        rewrite(|net| {
            let [q, k, v] = net.operands();
            let scores = net.scores(q, k);
            let mask = net.padding(may_be_empty);
            let scores = net.where_number(mask, scores, number);
            let weights = net.softmax(scores);
            net.matmul(weights, v, false)
        })
    };
    assert_eq!(filled(f64::from(f32::MIN), true).unwrap().empty, EmptyRow::Mean);
    assert_eq!(filled(f64::NEG_INFINITY, true).unwrap().empty, EmptyRow::Nan);
    // Not low enough to have no weight.
    assert_eq!(filled(-100.0, false), None);
    // As of ONNX Attention: bias and rows that are set to 0 before and after the softmax.
    let onnx = rewrite(|net| {
        let [q, k, v] = net.operands();
        let scores = net.scores(q, k);
        let (mask, lower) = (net.padding(true), net.lower(0));
        let (mask, lower) = (net.where_zero_or(mask, f64::NEG_INFINITY), net.where_zero_or(lower, f64::NEG_INFINITY));
        let bias = net.binary(Binary::Add, mask, lower);
        let scores = net.binary(Binary::Add, scores, bias);
        let row_max = net.add(Op::Reduce(Reduce { kind: ReduceKind::Max, axes: vec![3], keep: true }), &[bias]);
        let lowest = net.add(scalar(DType::F32, f64::NEG_INFINITY), &[]);
        let is_row_empty = net.add(Op::Compare(Compare::Equal), &[row_max, lowest]);
        let zero = net.add(scalar(DType::F32, 0.0), &[]);
        let scores = net.select(is_row_empty, zero, scores);
        let weights = net.softmax(scores);
        let weights = net.select(is_row_empty, zero, weights);
        net.matmul(weights, v, false)
    })
    .unwrap();
    assert_eq!((onnx.empty, onnx.causal), (EmptyRow::Zero, true));
    // As of an export that replaces NaN.
    let nan = rewrite(|net| {
        let [q, k, v] = net.operands();
        let scores = net.scores(q, k);
        let mask = net.padding(true);
        let mask = net.where_zero_or(mask, f64::NEG_INFINITY);
        let scores = net.binary(Binary::Add, scores, mask);
        let weights = net.softmax(scores);
        let number = net.add(Op::Compare(Compare::Equal), &[weights, weights]);
        let nan = net.add(Op::Unary(Unary::Not), &[number]);
        let zero = net.add(scalar(DType::F32, 0.0), &[]);
        let weights = net.select(nan, zero, weights);
        net.matmul(weights, v, false)
    });
    assert_eq!(nan.unwrap().empty, EmptyRow::Zero);
    // As ATen's `_safe_softmax` is decomposed.
    let safe = |every: bool| {
        rewrite(|net| {
            let [q, k, v] = net.operands();
            let scores = net.scores(q, k);
            let mask = net.padding(true);
            let mask = net.where_zero_or(mask, f64::NEG_INFINITY);
            let scores = net.binary(Binary::Add, scores, mask);
            let weights = net.softmax(scores);
            let lowest = net.add(scalar(DType::F32, f64::NEG_INFINITY), &[]);
            let hidden = net.add(Op::Compare(Compare::Equal), &[scores, lowest]);
            let visible = net.add(Op::Unary(Unary::Not), &[hidden]);
            let visible = net.add(Op::Cast(Cast { to: DType::I64 }), &[visible]);
            let kind = if every { ReduceKind::Min } else { ReduceKind::Max };
            let any = net.add(Op::Reduce(Reduce { kind, axes: vec![3], keep: true }), &[visible]);
            let zero = net.add(Op::Constant(Constant { tensor: Tensor::from_i64(&[], &[0]) }), &[]);
            let is_row_empty = net.add(Op::Compare(Compare::Equal), &[any, zero]);
            let zero = net.add(scalar(DType::F32, 0.0), &[]);
            let weights = net.select(is_row_empty, zero, weights);
            net.matmul(weights, v, false)
        })
    };
    assert_eq!(safe(false).unwrap().empty, EmptyRow::Zero);
    // Rows with a hidden key.
    assert_eq!(safe(true), None);
    // A finite causal mask beside another one stays a mask: in an empty row, the sums of both count.
    let op = rewrite(|net| {
        let [q, k, v] = net.operands();
        let scores = net.scores(q, k);
        let (mask, lower) = (net.padding(false), net.lower(0));
        let (mask, lower) = (net.where_zero_or(mask, -1e9), net.where_zero_or(lower, -1e9));
        let scores = net.binary(Binary::Add, scores, mask);
        let scores = net.binary(Binary::Add, scores, lower);
        let weights = net.softmax(scores);
        net.matmul(weights, v, false)
    });
    assert!(op.is_some_and(|op| !op.causal && op.empty == EmptyRow::Nan));
}

#[test]
fn repeated_key_heads_are_grouped() {
    let mut net = Net::new();
    let q = net.operand("q", &[B, H, S, D], 1);
    let repeated = |net: &mut Net, name: &str, seed: u64| {
        let x = net.operand(name, &[B, 2, T, D], seed);
        let x = net.reshape(x, &[B, 2, 1, T, D]);
        let x = net.broadcast(x, &[B, 2, 2, T, D]);
        net.reshape(x, &[B, H, T, D])
    };
    let (k, v) = (repeated(&mut net, "k", 2), repeated(&mut net, "v", 3));
    let scores = net.scores(q, k);
    let weights = net.softmax(scores);
    let y = net.matmul(weights, v, false);
    let (_, graph) = net.pass(y).unwrap();
    let id = graph.ids().find(|id| matches!(graph.node(*id).op, Op::Attention(_))).unwrap();
    assert_eq!(graph.fact(graph.inputs(id)[1]).to_string(), "f32[2, 2, 5, 3]");
    assert!(!graph.ids().any(|id| matches!(graph.node(id).op, Op::Broadcast(_))));
    // Heads repeated as a whole, 0 1 0 1, are no groups.
    let op = rewrite(|net| {
        let q = net.operand("q", &[B, H, S, D], 1);
        let repeated = |net: &mut Net, name: &str, seed: u64| {
            let x = net.operand(name, &[B, 1, 2, T, D], seed);
            let x = net.broadcast(x, &[B, 2, 2, T, D]);
            net.reshape(x, &[B, H, T, D])
        };
        let (k, v) = (repeated(net, "k", 2), repeated(net, "v", 3));
        let scores = net.scores(q, k);
        let weights = net.softmax(scores);
        net.matmul(weights, v, false)
    });
    assert!(op.is_some());
}

#[test]
fn dropout_keeps_its_stream() {
    let op = rewrite(|net| {
        let [q, k, v] = net.operands();
        let scores = net.scores(q, k);
        let weights = net.softmax(scores);
        let counter = net.input("counter", Tensor::from_i64(&[], &[3]));
        let weights = net.add(Op::Dropout(Dropout { ratio: 0.4, stream: 9 }), &[weights, counter]);
        net.matmul(weights, v, false)
    });
    assert_eq!(op.unwrap().dropout, Some(Dropout { ratio: 0.4, stream: 9 }));
}

#[test]
fn what_only_looks_like_attention_stays() {
    // Another reader of the scores, or of the weights.
    for reader in 0..2 {
        let op = rewrite(|net| {
            let [q, k, v] = net.operands();
            let scores = net.scores(q, k);
            let weights = net.softmax(scores);
            let y = net.matmul(weights, v, false);
            let read = if reader == 0 { scores } else { weights };
            let sum = net.add(Op::Reduce(Reduce { kind: ReduceKind::Sum, axes: vec![3], keep: true }), &[read]);
            net.binary(Binary::Add, y, sum)
        });
        assert_eq!(op, None, "{reader}");
    }
    // Another axis.
    let op = rewrite(|net| {
        let [q, k, v] = net.operands();
        let scores = net.scores(q, k);
        let weights = net.add(Op::Softmax(Softmax { axis: 2 }), &[scores]);
        net.matmul(weights, v, false)
    });
    assert_eq!(op, None);
    // A scale that is no number.
    let op = rewrite(|net| {
        let [q, k, v] = net.operands();
        let scores = net.matmul(q, k, true);
        let scale = net.operand("scale", &[1], 5);
        let scores = net.binary(Binary::Mul, scores, scale);
        let weights = net.softmax(scores);
        net.matmul(weights, v, false)
    });
    assert_eq!(op, None);
}

#[test]
fn a_learned_bias_stays_and_a_given_one_is_a_mask() {
    let with = |learned: bool| {
        let mut net = Net::new();
        let [q, k, v] = net.operands();
        let scores = net.scores(q, k);
        let fact = Fact::of(DType::F32, &[H as usize, S as usize, T as usize]);
        let op = match learned {
            true => Op::Parameter(Parameter { name: "bias".into(), fact }),
            false => Op::Input(Input { name: "bias".into(), fact }),
        };
        let bias = net.add(op, &[]);
        let scores = net.binary(Binary::Add, scores, bias);
        let weights = net.softmax(scores);
        let y = net.matmul(weights, v, false);
        net.graph.outputs.push(Output { name: "y".into(), value: y });
        attention(&mut net.graph);
        verify(&net.graph).unwrap();
        Net::attentions(&net.graph).len()
    };
    assert_eq!((with(true), with(false)), (0, 1));
}
