//! Weight gradients of several micro-batches in one kernel: bitwise independent of schedule and partition, equal to
//! separate micro-batches up to rounding, and with the planned memory.

use crate::support::devices::train_everywhere;
use crate::support::drawn::uniform;
use compiler::cluster::read::levels;
use compiler::graph::{Graph, Origin, Output, Writer};
use compiler::op::{Constant, Conv, Emit, Input, MatMul, Op, Parameter, Reshape, Unary, Value, Window};
use compiler::pass::attribution::{Training as Learns, attribute};
use compiler::pass::batched_weight_grad::ITEMS;
use compiler::pass::costs::cost_graph;
use compiler::pass::loss::Loss;
use compiler::plan::gradient_buffers::GradientBuffers;
use compiler::plan::memory::{MemoryMultipliers, MemoryTerms};
use compiler::plan::schedule::Schedule;
use compiler::plan::zero::Zero;
use compiler::profile::recompute_scope::RecomputeCosts;
use compiler::schedule::semantics::StepCount;
use compiler::schedule::{Pipeline, StageSpec};
use compiler::tensor::dim::Bindings;
use compiler::tensor::fact::Fact;
use compiler::tensor::{DType, Tensor};
use profiler::scratch::{batched_gradients, scratch};
use runtime::data::{Batches, Dataset, RowOrder};
use runtime::device::cpu::device::cpu;
use runtime::optim::optimizer::{Optimizer, Rule};
use runtime::optim::policy::Policy;
use runtime::train::job::{TrainJob, Trained};
use runtime::train::prepare::{Prepared, Settings, prepare};
use runtime::train::run::feeds;
use std::collections::BTreeMap;

type Network = (Graph, BTreeMap<String, Tensor>);

const STEPS: u32 = 2;
const SIDE: usize = 4;
const OUTPUTS: usize = 48;

/// Two convolutions and three products, with a tangent after the first four, one row at a time. The first convolution's
/// operands are too large to buffer.
fn network() -> Network {
    let mut graph = Graph::new("joint");
    let mut weights = BTreeMap::new();
    let mut writer = Writer { graph: &mut graph, origin: Origin::default() };
    let mut parameter = |writer: &mut Writer<'_>, name: &str, shape: &[usize]| -> Value {
        let scale = 1.0 / (shape[1..].iter().product::<usize>() as f32).sqrt();
        let values: Vec<f32> = uniform(shape, name.len() as u64).to_f64().iter().map(|v| *v as f32 * scale).collect();
        weights.insert(name.to_string(), Tensor::from_f32(shape, &values));
        writer.emit(Op::Parameter(Parameter { name: name.into(), fact: Fact::of(DType::F32, shape) }), &[])
    };
    let fact = Fact::of(DType::F32, &[1, 3, SIDE, SIDE]);
    let mut y = writer.emit(Op::Input(Input { name: "x".into(), fact }), &[]);
    for (name, ins) in [("c", 3), ("cc", 32)] {
        let w = parameter(&mut writer, name, &[32, ins, 3, 3]);
        let [strides, dilations] = [(); 2].map(|()| vec![1, 1]);
        let window = Window { strides, pads_begin: vec![1; 2], pads_end: vec![1; 2], dilations };
        y = writer.emit(Op::Conv(Conv { window, groups: 1 }), &[y, w]);
        y = writer.emit(Op::Unary(Unary::Tanh), &[y]);
    }
    let shape = vec![1usize.into(), (32 * SIDE * SIDE).into()];
    y = writer.emit(Op::Reshape(Reshape { shape }), &[y]);
    for (name, ins, outs) in [("www", 32 * SIDE * SIDE, 64), ("wwww", 64, 64), ("wwwww", 64, OUTPUTS)] {
        let w = parameter(&mut writer, name, &[ins, outs]);
        y = writer.emit(Op::MatMul(MatMul { transpose_a: false, transpose_b: false }), &[y, w]);
        if outs != OUTPUTS {
            y = writer.emit(Op::Unary(Unary::Tanh), &[y]);
        }
    }
    graph.outputs.push(Output { name: "y".into(), value: y });
    (graph, weights)
}

/// A prepared run of the network in stages of equally many ops.
fn prepare_run((graph, _): &Network, pipeline: Pipeline, schedule: Schedule, microbatches: u32) -> Prepared {
    let count = StepCount { minibatches: STEPS, microbatches };
    let settings = Settings::new(Bindings::new(), Loss::Mse, schedule, count);
    let ops = compiler::graph::order::numbered(graph).len();
    let stages: Vec<usize> = (0..ops).map(|op| op * pipeline.stages.len() / ops).collect();
    prepare(graph, &stages, pipeline, &settings).unwrap()
}

fn chain(replicas: &[u32]) -> Pipeline {
    Pipeline::chain(replicas.iter().map(|r| StageSpec::new(*r, 1.0, 2.0)).collect())
}

fn count_joint_steps(prepared: &Prepared) -> usize {
    let steps = prepared.codes.iter().flat_map(|code| code.backward.steps.iter().chain(&code.weight.steps));
    steps.filter(|step| step.joint.is_some()).count()
}

fn train_run(network: &Network, prepared: &Prepared, microbatches: u32) -> Trained {
    let rows = (microbatches * STEPS) as usize;
    let data = BTreeMap::from([
        ("x".to_string(), uniform(&[rows, 3, SIDE, SIDE], 42)),
        ("y".to_string(), uniform(&[rows, OUTPUTS], 43)),
    ]);
    let data = Dataset::new(data, &feeds(&prepared.codes), 1).unwrap();
    let minibatch = microbatches as usize;
    let batches = Batches::new(data, minibatch, minibatch, STEPS as usize, RowOrder::InOrder).unwrap();
    let rule = Rule::Sgd { learning_rate: 0.1, momentum: 0.9, nesterov: false, weight_decay: 0.0 };
    let training = TrainJob {
        codes: &prepared.codes,
        program: &prepared.program,
        weights: &network.1,
        batches: &batches,
        optimizer: &Optimizer::from(rule),
        policy: Policy::default(),
        keep_gradients: true,
    };
    train_everywhere(&training).unwrap()
}

/// The maximum difference of weights and gradients, relative to the largest value.
fn max_difference(left: &Trained, right: &Trained) -> f64 {
    let mut max_difference = 0.0f64;
    for (left, right) in [(&left.weights, &right.weights), (&left.gradients, &right.gradients)] {
        for (name, tensor) in left {
            let (a, b) = (tensor.to_f64(), right[name].to_f64());
            let scale = a.iter().fold(1e-30f64, |largest, v| largest.max(v.abs()));
            max_difference = a
                .iter()
                .zip(&b)
                .fold(max_difference, |max_difference, (a, b)| max_difference.max((a - b).abs() / scale));
        }
    }
    max_difference
}

#[test]
fn bits_are_those_of_every_schedule_and_cut() {
    let network = network();
    for microbatches in [8, 12, 19] {
        let single = prepare_run(&network, chain(&[1]), Schedule::Gpipe, microbatches);
        assert_eq!(count_joint_steps(&single), 4, "the second convolution and the products");
        let expected = train_run(&network, &single, microbatches);
        // Without the batched kernel, no operands are buffered.
        let mut unbatched = prepare_run(&network, chain(&[1]), Schedule::Gpipe, microbatches);
        unbatched.codes.iter_mut().flat_map(|code| &mut code.backward.steps).for_each(|step| step.joint = None);
        let unbatched = train_run(&network, &unbatched, microbatches);
        let difference = max_difference(&expected, &unbatched);
        assert!(difference > 0.0 && difference < 1e-5, "{microbatches} micro-batches: {difference:e}");
        let looped = |stages: &[u32]| chain(stages).looped(2);
        let cuts = [
            (chain(&[1]), Schedule::OneFOneB),
            (chain(&[1]), Schedule::ZbH1),
            (chain(&[1, 1]), Schedule::Gpipe),
            (chain(&[1, 1]), Schedule::OneFOneB),
            (chain(&[1, 1, 1]), Schedule::OneFOneB),
            (chain(&[1, 1, 1]), Schedule::ZbH1),
            (chain(&[1, 1, 1, 1]), Schedule::ZbH2),
            (looped(&[1; 4]), Schedule::Interleaved),
            (looped(&[1; 4]), Schedule::Bfs),
            (chain(&[1; 4]).folded(), Schedule::Zbv),
            (chain(&[1; 4]).folded(), Schedule::DualPipeV),
        ];
        for (pipeline, schedule) in cuts {
            let case = format!("{schedule}, {} stages, {microbatches} micro-batches", pipeline.stages.len());
            if schedule == Schedule::Interleaved && microbatches % 2 > 0 {
                continue;
            }
            let prepared = prepare_run(&network, pipeline, schedule, microbatches);
            assert_eq!(count_joint_steps(&prepared), 4, "{case}");
            let trained = train_run(&network, &prepared, microbatches);
            assert_eq!(trained.losses, expected.losses, "{case}");
            for (actual, expected_tensors) in
                [(&trained.weights, &expected.weights), (&trained.gradients, &expected.gradients)]
            {
                actual.iter().for_each(|(name, tensor)| {
                    assert!(tensor.bytes() == expected_tensors[name].bytes(), "{case}: {name}")
                });
            }
        }
    }
}

/// A product after a part that is not saved, so the forward uses more of the arena than the backward layout.
fn heavy_network() -> Network {
    let mut graph = Graph::new("heavy");
    let mut writer = Writer { graph: &mut graph, origin: Origin::default() };
    let fact = Fact::of(DType::F32, &[1, 3, SIDE, SIDE]);
    let x = writer.emit(Op::Input(Input { name: "x".into(), fact }), &[]);
    let row = vec![1usize.into(), (3 * SIDE * SIDE).into()];
    let x = writer.emit(Op::Reshape(Reshape { shape: row }), &[x]);
    let mut wide = |rows: usize| {
        let ones = Tensor::from_f32(&[3 * SIDE * SIDE, rows], &vec![0.01; 3 * SIDE * SIDE * rows]);
        writer.emit(Op::Constant(Constant { tensor: ones }), &[])
    };
    let (spread, narrow) = (wide(4096), wide(4096));
    let product = MatMul { transpose_a: false, transpose_b: false };
    let across = MatMul { transpose_a: false, transpose_b: true };
    let y = writer.emit(Op::MatMul(product), &[x, spread]);
    let y = writer.emit(Op::Unary(Unary::Tanh), &[y]);
    let y = writer.emit(Op::Unary(Unary::Exp), &[y]);
    let y = writer.emit(Op::MatMul(across), &[y, narrow]);
    let shape = [3 * SIDE * SIDE, OUTPUTS];
    let w = writer.emit(Op::Parameter(Parameter { name: "w".into(), fact: Fact::of(DType::F32, &shape) }), &[]);
    let value = writer.emit(Op::MatMul(product), &[y, w]);
    graph.outputs.push(Output { name: "y".into(), value });
    (graph, BTreeMap::from([("w".to_string(), uniform(&shape, 3))]))
}

/// Buffered operands survive other micro-batches' forwards in the arena.
#[test]
fn forwards_buffer_operands_for_batched_gradients() {
    let network = heavy_network();
    let run = |schedule: Schedule, joins: bool| {
        let mut prepared = prepare_run(&network, chain(&[1]), schedule, 8);
        assert_eq!(count_joint_steps(&prepared), 1);
        if !joins {
            let steps =
                prepared.codes.iter_mut().flat_map(|code| code.backward.steps.iter_mut().chain(&mut code.weight.steps));
            steps.for_each(|step| step.joint = None);
        }
        train_run(&network, &prepared, 8)
    };
    for schedule in [Schedule::Gpipe, Schedule::OneFOneB, Schedule::ZbH1, Schedule::TwoBw] {
        let difference = max_difference(&run(schedule, true), &run(schedule, false));
        assert!(difference < 1e-5, "{schedule}: {difference:e}");
    }
}

/// Replicas batch if each has enough micro-batches per round and gradients are not streamed.
#[test]
fn replicas_and_few_micro_batches() {
    let network = network();
    let spec = |zero| StageSpec { zero, ..StageSpec::new(2, 1.0, 2.0) };
    let expected = train_run(&network, &prepare_run(&network, chain(&[1]), Schedule::OneFOneB, 17), 17);
    for (zero, steps) in [(0, 4), (1, 4), (2, 0), (3, 0)] {
        let replicated = prepare_run(&network, Pipeline::chain(vec![spec(zero)]), Schedule::OneFOneB, 17);
        assert_eq!(count_joint_steps(&replicated), steps, "ZeRO {zero}");
        let difference = max_difference(&expected, &train_run(&network, &replicated, 17));
        assert!(difference < 1e-5, "ZeRO {zero}: {difference:e}");
    }
    for (replicas, microbatches) in [(1, ITEMS - 1), (2, ITEMS)] {
        let prepared = prepare_run(&network, chain(&[replicas]), Schedule::OneFOneB, microbatches);
        assert_eq!(count_joint_steps(&prepared), 0, "{replicas} replicas, {microbatches} micro-batches");
    }
    let round_robin = prepare_run(&network, chain(&[1, 1]), Schedule::OneFOneBRr, 1);
    assert_eq!(count_joint_steps(&round_robin), 0);
    let two_bw = prepare_run(&network, chain(&[1, 1]), Schedule::TwoBw, 8);
    assert_eq!(count_joint_steps(&two_bw), 4);
    train_run(&network, &two_bw, 8).losses.iter().for_each(|loss| assert!(loss.is_finite()));
}

/// Operand buffers and larger scratch are included in the plan.
#[test]
fn batch_buffers_are_in_the_memory_plan() {
    let network = network();
    let attribution = attribute(&network.0, Learns::Loss(Loss::Mse, None)).unwrap();
    let mut costs = cost_graph(&network.0, &attribution);
    for ((op, bytes), joint) in
        costs.ops.iter_mut().zip(scratch(&attribution)).zip(batched_gradients(&attribution, &*cpu()))
    {
        op.workspace_bytes = bytes;
        [op.batched_grad_bytes, op.batched_grad_workspace_bytes] = joint;
    }
    assert_eq!(costs.ops.iter().filter(|op| op.batched_grad_bytes > 0).count(), 4);
    let buffers = GradientBuffers::of(&levels("1:1GB/s").unwrap());
    let terms =
        MemoryTerms::of(&costs, (&costs.flows(), &RecomputeCosts::of(&costs)), &vec![true; costs.ops.len()], &buffers);
    for microbatches in [4, 8, 12] {
        let multiples = MemoryMultipliers {
            in_flight: 1,
            pending_weight_grads: 0,
            versions: 1,
            late: 0,
            replicas: 1,
            recompute: false,
            zero: Zero::default(),
            in_place: false,
            optimizer_state: 1.0,
            schedule: Schedule::OneFOneB,
            microbatches,
        };
        let planned = terms.held(&multiples);
        let prepared = prepare_run(&network, chain(&[1]), Schedule::OneFOneB, microbatches);
        let peak_bytes = train_run(&network, &prepared, microbatches).peak_memory_bytes[0];
        let error = planned.total as f64 / peak_bytes as f64 - 1.0;
        assert!(error.abs() < 0.02, "{microbatches} micro-batches: {peak_bytes} held, {planned:?}");
    }
}
