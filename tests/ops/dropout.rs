//! Training with dropout: masks depend only on seed, micro-batch and position, so partitions, schedules and evaluation
//! agree.

use crate::support::devices::train_everywhere;
use compiler::graph::verify::verify;
use compiler::graph::{Graph, Origin, Output, Writer};
use compiler::op::dropout::COUNTER;
use compiler::op::{Dropout, Emit, Input, MatMul, Op, Parameter};
use compiler::pass::inference::inference;
use compiler::pass::loss::Loss;
use compiler::plan::schedule::Schedule;
use compiler::schedule::semantics::StepCount;
use compiler::schedule::{Pipeline, StageSpec};
use compiler::tensor::dim::{Bindings, Dim};
use compiler::tensor::fact::Fact;
use compiler::tensor::{DType, Tensor};
use runtime::data::synthetic::synthetic;
use runtime::data::{Batches, Dataset, RowOrder, mix};
use runtime::exec::evaluate::evaluate;
use runtime::optim::optimizer::{Optimizer, Rule};
use runtime::optim::policy::Policy;
use runtime::train::job::{TrainJob, Trained};
use runtime::train::prepare::{Settings, prepare};
use runtime::train::run::feeds;
use std::collections::BTreeMap;

const BATCH: usize = 8;
const WIDTH: usize = 16;
const STEPS: usize = 6;

/// Three layers with dropout after each of the first two. Five ops.
fn network(ratio: f64) -> (Graph, BTreeMap<String, Tensor>) {
    let mut graph = Graph::new("dropped");
    let mut weights = BTreeMap::new();
    let mut out = Writer { graph: &mut graph, origin: Origin::default() };
    let fact = Fact::new(DType::F32, vec![Dim::symbol("batch"), Dim::from(WIDTH)]);
    let mut x = out.emit(Op::Input(Input { name: "x".into(), fact }), &[]);
    let counter = out.emit(Op::Input(Input { name: COUNTER.into(), fact: Fact::of(DType::I64, &[]) }), &[]);
    for layer in 0..3u64 {
        let name = format!("{layer}.weight");
        let draw = |i: u64| ((mix(layer << 32 | i) >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * 0.4;
        let values: Vec<f32> = (0..(WIDTH * WIDTH) as u64).map(draw).collect();
        weights.insert(name.clone(), Tensor::from_f32(&[WIDTH, WIDTH], &values));
        let fact = Fact::of(DType::F32, &[WIDTH, WIDTH]);
        let w = out.emit(Op::Parameter(Parameter { name, fact }), &[]);
        x = out.emit(Op::MatMul(MatMul { transpose_a: false, transpose_b: true }), &[x, w]);
        if layer < 2 {
            x = out.emit(Op::Dropout(Dropout { ratio, stream: layer }), &[x, counter]);
        }
    }
    graph.outputs.push(Output { name: "y".into(), value: x });
    (graph, weights)
}

fn train_network(ratio: f64, stages: usize, schedule: Schedule, microbatches: u32, seed: u64) -> Trained {
    let (graph, weights) = network(ratio);
    let count = StepCount { minibatches: STEPS as u32, microbatches };
    let item = BATCH / microbatches as usize;
    let dims = Bindings::from([("batch".to_string(), item as i64)]);
    let settings = Settings::new(dims, Loss::CrossEntropy, schedule, count);
    let pipeline = Pipeline::chain(vec![StageSpec::new(1, 1.0, 2.0); stages]);
    let op_stages: Vec<usize> = (0..5).map(|op| op * stages / 5).collect();
    let prepared = prepare(&graph, &op_stages, pipeline, &settings).unwrap();
    let feeds = feeds(&prepared.codes);
    assert!(feeds.iter().any(|f| f.name == COUNTER));
    let mut arrays = synthetic(&prepared.graph, &feeds, item, STEPS * BATCH, 3);
    assert_eq!(arrays.remove(COUNTER).map(|t| t.to_i64()), Some(vec![0]), "no data file has the counter");
    let data = Dataset::new(arrays, &feeds, item).unwrap();
    let batches = Batches::new(data, BATCH, microbatches as usize, STEPS, RowOrder::InOrder).unwrap().with_seed(seed);
    let optimizer =
        Optimizer::from(Rule::Sgd { learning_rate: 0.05, momentum: 0.9, nesterov: false, weight_decay: 0.0 });
    let training = TrainJob {
        codes: &prepared.codes,
        program: &prepared.program,
        weights: &weights,
        batches: &batches,
        optimizer: &optimizer,
        policy: Policy::default(),
        keep_gradients: false,
    };
    train_everywhere(&training).unwrap()
}

#[test]
fn masks_are_the_same_in_every_cut_and_schedule() {
    for microbatches in [1, 4] {
        let single = train_network(0.4, 1, Schedule::OneFOneB, microbatches, 7);
        for stages in [2, 3, 5] {
            for schedule in [Schedule::OneFOneB, Schedule::Gpipe] {
                let pipelined = train_network(0.4, stages, schedule, microbatches, 7);
                assert_eq!(single.losses, pipelined.losses, "{stages} stages, {schedule}");
                assert!(single.weights == pipelined.weights, "{stages} stages, {schedule}");
            }
        }
    }
}

#[test]
fn seeds_give_other_masks_and_ratio_zero_gives_none() {
    let losses = |ratio, seed| train_network(ratio, 2, Schedule::OneFOneB, 1, seed).losses;
    assert_ne!(losses(0.4, 7), losses(0.4, 8));
    assert_eq!(losses(0.0, 7), losses(0.0, 8));
    assert_ne!(losses(0.0, 7), losses(0.4, 7));
}

#[test]
fn items_have_counters_of_their_own() {
    let x = BTreeMap::from([("x".to_string(), Tensor::from_f32(&[4, 1], &[0.0; 4]))]);
    let batches = || Batches::new(Dataset::new(x.clone(), &[], 1).unwrap(), 0, 1, 0, RowOrder::InOrder);
    // Without a feed there are no rows; only data determines the number of minibatches.
    assert!(batches().is_err());
    let fact = Fact::of(DType::F32, &[1, 1]);
    let feed = runtime::exec::stage_code::NamedTensor { name: "x".into(), fact, bytes: 4 };
    let data = || Dataset::new(x.clone(), std::slice::from_ref(&feed), 1).unwrap();
    let counter = |seed: u64, item: u32| {
        let batches = Batches::new(data(), 2, 2, 2, RowOrder::InOrder).unwrap().with_seed(seed);
        let mut bytes = [0; 8];
        batches.fill(COUNTER, item, &mut bytes);
        i64::from_le_bytes(bytes)
    };
    let mut counters: Vec<i64> =
        (0..3).flat_map(|seed| (0..50).map(move |item| (seed, item))).map(|(s, i)| counter(s, i)).collect();
    counters.sort_unstable();
    counters.dedup();
    assert_eq!(counters.len(), 150);
}

#[test]
fn answers_drop_nothing() {
    let (graph, weights) = network(0.4);
    let dims = Bindings::from([("batch".to_string(), 2)]);
    let graph = compiler::graph::bind::bind(&graph, &dims).unwrap();
    let values: Vec<f32> = (0..2 * WIDTH).map(|i| i as f32 / 8.0).collect();
    let inputs = BTreeMap::from([("x".to_string(), Tensor::from_f32(&[2, WIDTH], &values))]);
    let (plain, _) = network(0.0);
    let plain = compiler::graph::bind::bind(&plain, &dims).unwrap();
    let want = evaluate(&plain, false, &inputs, &weights).unwrap();
    assert_eq!(evaluate(&graph, true, &inputs, &weights).unwrap(), want);
    assert_ne!(evaluate(&graph, false, &inputs, &weights).unwrap(), want);
    let mut inference_graph = graph.clone();
    inference(&mut inference_graph);
    verify(&inference_graph).unwrap();
    let has_dropout = inference_graph.ids().any(|id| match &inference_graph.node(id).op {
        Op::Dropout(_) => true,
        Op::Input(input) => input.name == COUNTER,
        _ => false,
    });
    assert!(!has_dropout);
}
