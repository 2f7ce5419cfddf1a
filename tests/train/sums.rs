//! Parameter gradients are accumulated directly into their sums. Also a gradient shared by several parameters, with
//! equal bits in any partition.

use crate::support::drawn::uniform;
use compiler::graph::{Graph, Origin, Output, Writer};
use compiler::op::{Binary, Emit, Input, MatMul, Op, Parameter, Reduce, ReduceKind, Unary, Value};
use compiler::pass::loss::Loss;
use compiler::plan::schedule::Schedule;
use compiler::schedule::semantics::StepCount;
use compiler::schedule::{Pipeline, StageSpec};
use compiler::tensor::dim::{Bindings, Dim};
use compiler::tensor::fact::Fact;
use compiler::tensor::{DType, Tensor};
use runtime::data::{Batches, Dataset, RowOrder};
use runtime::exec::stage_code::StageCode;
use runtime::optim::optimizer::{Optimizer, Rule};
use runtime::optim::policy::Policy;
use runtime::train::job::{TrainJob, Trained};
use runtime::train::prepare::{Settings, prepare};
use runtime::train::run::{feeds, train};
use std::collections::BTreeMap;

/// Rows per micro-batch: more than any product sums in registers.
const ROWS: usize = 1500;
const WIDTH: usize = 40;
const MICROBATCHES: u32 = 3;

/// Op 0: product of `x`; 1: tangent; 2 and 3: products; 4: their sum, with one gradient for both; 5: tangent; 6:
/// product.
fn build_network() -> (Graph, BTreeMap<String, Tensor>) {
    let mut graph = Graph::new("shared");
    let mut weights = BTreeMap::new();
    let mut writer = Writer { graph: &mut graph, origin: Origin::default() };
    let fact = Fact::new(DType::F32, vec![Dim::symbol("batch"), Dim::from(WIDTH)]);
    let x = writer.emit(Op::Input(Input { name: "x".into(), fact }), &[]);
    let mut product = |writer: &mut Writer<'_>, x: Value, name: &str| {
        weights.insert(name.to_string(), uniform(&[WIDTH, WIDTH], name.len() as u64));
        let fact = Fact::of(DType::F32, &[WIDTH, WIDTH]);
        let w = writer.emit(Op::Parameter(Parameter { name: name.into(), fact }), &[]);
        writer.emit(Op::MatMul(MatMul { transpose_a: false, transpose_b: false }), &[x, w])
    };
    let first_product = product(&mut writer, x, "w");
    let hidden = writer.emit(Op::Unary(Unary::Tanh), &[first_product]);
    let (left, right) = (product(&mut writer, hidden, "one"), product(&mut writer, hidden, "other"));
    let sum = writer.emit(Op::Binary(Binary::Add), &[left, right]);
    let sum = writer.emit(Op::Unary(Unary::Tanh), &[sum]);
    let logits = product(&mut writer, sum, "at last");
    graph.outputs.push(Output { name: "y".into(), value: logits });
    (graph, weights)
}

/// The training result, and the maximum number of sums that a step accumulates into.
fn train_stages(
    (graph, weights): &(Graph, BTreeMap<String, Tensor>),
    stages: &[usize],
    schedule: Schedule,
) -> (Trained, usize) {
    let count = StepCount { minibatches: 2, microbatches: MICROBATCHES };
    let (minibatch, steps) = (ROWS * MICROBATCHES as usize, count.minibatches as usize);
    let settings = Settings::new(
        Bindings::from([("batch".to_string(), ROWS as i64)]),
        if graph.outputs[0].name == "loss" { Loss::Output } else { Loss::Mse },
        schedule,
        count,
    );
    let shapes = (0..=stages[stages.len() - 1]).map(|_| StageSpec::new(1, 1.0, 2.0)).collect();
    let prepared = prepare(graph, stages, Pipeline::chain(shapes), &settings).unwrap();
    let data =
        [("x", 42), ("y", 43)].map(|(name, seed)| (name.to_string(), uniform(&[minibatch * steps, WIDTH], seed)));
    let data = Dataset::new(BTreeMap::from(data), &feeds(&prepared.codes), ROWS).unwrap();
    let batches = Batches::new(data, minibatch, MICROBATCHES as usize, steps, RowOrder::InOrder).unwrap();
    let rule = Rule::Sgd { learning_rate: 0.1, momentum: 0.9, nesterov: false, weight_decay: 0.0 };
    let optimizer = Optimizer::from(rule);
    let training = TrainJob {
        codes: &prepared.codes,
        program: &prepared.program,
        weights,
        batches: &batches,
        optimizer: &optimizer,
        policy: Policy::default(),
        keep_gradients: true,
    };
    let terms = |code: &StageCode| code.gradient_terms.iter().all(|term| term.is_summed);
    assert!(stages.iter().any(|stage| *stage > 0) || prepared.codes.iter().all(terms));
    let steps = prepared.codes.iter().flat_map(|code| code.backward.steps.iter().chain(&code.weight.steps));
    let max_sums = steps.map(|step| step.adds_to.len()).max().unwrap();
    (train(&training, &mut |_| {}).unwrap(), max_sums)
}

/// `stages` under these schedules give the same bits as one stage, also for a pair of parameters with equal gradients.
fn check_cuts(network: &(Graph, BTreeMap<String, Tensor>), unsplit: &Trained, cuts: &[(&[usize], Schedule)]) {
    for (stages, schedule) in cuts {
        let (split, _) = train_stages(network, stages, *schedule);
        assert_eq!(split.losses, unsplit.losses, "{stages:?} {schedule:?}");
        for (name, gradient) in &unsplit.gradients {
            assert_eq!(split.gradients[name].bytes(), gradient.bytes(), "{name} {stages:?} {schedule:?}");
        }
        for (name, weight) in &unsplit.weights {
            assert_eq!(split.weights[name].bytes(), weight.bytes(), "{name} {stages:?} {schedule:?}");
        }
    }
}

#[test]
fn a_gradient_of_two_parameters_has_its_bits_wherever_they_are() {
    let network = build_network();
    let (unsplit, max_sums) = train_stages(&network, &[0; 7], Schedule::OneFOneB);
    assert_eq!(unsplit.gradients["one"].bytes(), unsplit.gradients["other"].bytes(), "they are one tensor");
    assert_eq!(max_sums, 2);
    let cuts: [(&[usize], Schedule); 3] = [
        (&[0, 0, 0, 1, 1, 1, 1], Schedule::OneFOneB),
        (&[0, 0, 0, 0, 1, 1, 1], Schedule::Gpipe),
        (&[0, 0, 0, 1, 1, 1, 1], Schedule::ZbH1),
    ];
    check_cuts(&network, &unsplit, &cuts);
}

/// Op 0: product of `x`; 1: tangent; 2: sum with a parameter; 3: product with many columns. The parameter's gradient
/// equals the tangent's, which a cut between the two sends.
fn build_shifted_network() -> (Graph, BTreeMap<String, Tensor>) {
    const WIDE: usize = 700;
    let mut graph = Graph::new("shifted");
    let mut weights = BTreeMap::new();
    let mut writer = Writer { graph: &mut graph, origin: Origin::default() };
    let x = writer.emit(Op::Input(Input { name: "x".into(), fact: Fact::of(DType::F32, &[ROWS, WIDTH]) }), &[]);
    let mut parameter = |writer: &mut Writer<'_>, name: &str, shape: [usize; 2]| {
        weights.insert(name.to_string(), uniform(&shape, name.len() as u64));
        writer.emit(Op::Parameter(Parameter { name: name.into(), fact: Fact::of(DType::F32, &shape) }), &[])
    };
    let (first, shift, last) = (
        parameter(&mut writer, "w", [WIDTH, WIDTH]),
        parameter(&mut writer, "shift", [ROWS, WIDTH]),
        parameter(&mut writer, "at last", [WIDTH, WIDE]),
    );
    let product = Op::MatMul(MatMul { transpose_a: false, transpose_b: false });
    let hidden = writer.emit(product.clone(), &[x, first]);
    let hidden = writer.emit(Op::Unary(Unary::Tanh), &[hidden]);
    let hidden = writer.emit(Op::Binary(Binary::Add), &[hidden, shift]);
    let y = writer.emit(product, &[hidden, last]);
    let square = writer.emit(Op::Binary(Binary::Mul), &[y, y]);
    let mean = Reduce { kind: ReduceKind::Mean, axes: vec![0, 1], keep: false };
    let loss = writer.emit(Op::Reduce(mean), &[square]);
    graph.outputs.push(Output { name: "loss".into(), value: loss });
    (graph, weights)
}

#[test]
fn a_gradient_that_is_sent_as_well_has_the_bits_of_one_that_is_not() {
    let network = build_shifted_network();
    let (unsplit, _) = train_stages(&network, &[0; 6], Schedule::OneFOneB);
    let cuts: [(&[usize], Schedule); 3] = [
        (&[0, 0, 1, 1, 1, 1], Schedule::OneFOneB),
        (&[0, 1, 1, 1, 1, 1], Schedule::ZbH1),
        (&[0, 0, 0, 1, 1, 1], Schedule::Gpipe),
    ];
    check_cuts(&network, &unsplit, &cuts);
}
