//! Pipelined training against a plain loop with the same weight delays: equal losses and final weights, for unequal
//! replicas, skip edges, in-flight limits above the published ones, and non-divisible minibatch counts.

use crate::support;
use crate::support::devices::train_everywhere;
use crate::support::drawn::uniform;
use compiler::graph::{Graph, Origin, Output, Writer, order};
use compiler::op::{Binary, Emit, Input, MatMul, NodeId, Op, Parameter, Unary, Value};
use compiler::pass::backward::{ReceivedGradients, backward};
use compiler::pass::fragment::fragments;
use compiler::pass::loss::{LOSS, Loss, attach};
use compiler::plan::schedule::Schedule;
use compiler::schedule::check::verify::check;
use compiler::schedule::semantics::StepCount;
use compiler::schedule::{Bucket, Instruction, Pipeline, StageSpec, published_caps};
use compiler::tensor::dim::{Bindings, Dim};
use compiler::tensor::fact::Fact;
use compiler::tensor::{DType, Tensor};
use runtime::data::{Batches, Dataset, RowOrder, mix};
use runtime::optim::lr_schedule::{Rate, Shape};
use runtime::optim::optimizer::{Optimizer, Rule};
use runtime::optim::policy::Policy;
use runtime::stage::saved_weights::Checkpoint;
use runtime::stage::worker::Work;
use runtime::train::error::TrainError;
use runtime::train::job::{RunOptions, TrainJob, Trained};
use runtime::train::prepare::{Prepared, Settings, prepare};
use runtime::train::run::{feeds, run, train};
use std::collections::{BTreeMap, HashMap};

const BATCH: usize = 4;
const WIDTH: usize = 6;
const CLASSES: usize = 3;

/// Five layers; the fourth also reads the first one's output: a skip edge over two stages. Nine ops.
fn build_network() -> (Graph, BTreeMap<String, Tensor>) {
    let mut graph = Graph::new("skip");
    let mut weights = BTreeMap::new();
    let mut writer = Writer { graph: &mut graph, origin: Origin::default() };
    let fact = Fact::new(DType::F32, vec![Dim::symbol("batch"), Dim::from(WIDTH)]);
    let mut x = writer.emit(Op::Input(Input { name: "x".into(), fact }), &[]);
    let mut first_output = None;
    for layer in 0..4 {
        let name = format!("{layer}.weight");
        weights.insert(name.clone(), uniform(&[WIDTH, WIDTH], layer + 1));
        let fact = Fact::of(DType::F32, &[WIDTH, WIDTH]);
        let w = writer.emit(Op::Parameter(Parameter { name, fact }), &[]);
        x = writer.emit(Op::MatMul(MatMul { transpose_a: false, transpose_b: true }), &[x, w]);
        if layer == 3 {
            x = writer.emit(Op::Binary(Binary::Add), &[x, first_output.expect("the first layer came before")]);
        } else {
            x = writer.emit(Op::Unary(Unary::Tanh), &[x]);
        }
        first_output = first_output.or(Some(x));
    }
    weights.insert("4.weight".into(), uniform(&[WIDTH, CLASSES], 9));
    let fact = Fact::of(DType::F32, &[WIDTH, CLASSES]);
    let w = writer.emit(Op::Parameter(Parameter { name: "4.weight".into(), fact }), &[]);
    let logits = writer.emit(Op::MatMul(MatMul { transpose_a: false, transpose_b: false }), &[x, w]);
    graph.outputs.push(Output { name: "logits".into(), value: logits });
    (graph, weights)
}

fn rows(minibatches: usize) -> BTreeMap<String, Tensor> {
    let n = minibatches * BATCH;
    let labels: Vec<i64> = (0..n).map(|i| (mix(77 + i as u64) % CLASSES as u64) as i64).collect();
    BTreeMap::from([("x".into(), uniform(&[n, WIDTH], 42)), ("y".into(), Tensor::from_i64(&[n], &labels))])
}

fn even_stages(count: usize) -> Vec<usize> {
    (0..9).map(|op| op * count / 9).collect()
}

fn train_pipelined(
    replicas: &[u32],
    caps: &[u32],
    schedule: Schedule,
    count: StepCount,
    optimizer: &Optimizer,
) -> Trained {
    run_prepared(&prepare_run(replicas, caps, schedule, count, Recomputation::Never), count, optimizer, None).unwrap()
}

/// The trigger of recomputation.
#[derive(Clone, Copy, PartialEq)]
enum Recomputation {
    Never,
    /// The backward itself, without an instruction.
    Backward,
    /// Recompute instructions in the program.
    Program,
}

fn prepare_run(
    replicas: &[u32],
    caps: &[u32],
    schedule: Schedule,
    count: StepCount,
    recomputation: Recomputation,
) -> Prepared {
    prepare_buckets(1, replicas, caps, schedule, count, recomputation)
}

/// The same with this number of gradient buckets.
fn prepare_buckets(
    buckets: usize,
    replicas: &[u32],
    caps: &[u32],
    schedule: Schedule,
    count: StepCount,
    recomputation: Recomputation,
) -> Prepared {
    let item = BATCH / count.microbatches as usize;
    let dims = Bindings::from([("batch".to_string(), item as i64)]);
    let bucket = Bucket { ready: 1.0, share: 1.0 / buckets as f64 };
    let shape = |r: &u32| StageSpec {
        recompute: (recomputation == Recomputation::Program).then(|| f64::from(*r)),
        buckets: vec![bucket; buckets],
        ..StageSpec::new(*r, f64::from(*r), 2.0 * f64::from(*r))
    };
    let pipeline = Pipeline::chain(replicas.iter().map(shape).collect()).with_caps(caps);
    let pipeline = if schedule == Schedule::Zbv { pipeline.folded() } else { pipeline };
    let settings = Settings::new(dims, Loss::CrossEntropy, schedule, count);
    let mut prepared = prepare(&build_network().0, &even_stages(replicas.len()), pipeline, &settings).unwrap();
    assert!(prepared.codes.iter().all(|code| code.recompute == (recomputation == Recomputation::Program)));
    prepared.codes.iter_mut().for_each(|code| code.recompute = recomputation != Recomputation::Never);
    prepared
}

fn run_prepared(
    prepared: &Prepared,
    count: StepCount,
    optimizer: &Optimizer,
    on_checkpoint: Option<&mut dyn FnMut(Checkpoint)>,
) -> Result<Trained, TrainError> {
    let (_, weights) = build_network();
    let item = BATCH / count.microbatches as usize;
    let steps = count.minibatches as usize;
    let data = Dataset::new(rows(steps), &feeds(&prepared.codes), item).unwrap();
    let batches = Batches::new(data, BATCH, count.microbatches as usize, steps, RowOrder::InOrder).unwrap();
    let training = TrainJob {
        codes: &prepared.codes,
        program: &prepared.program,
        weights: &weights,
        batches: &batches,
        optimizer,
        policy: Policy::default(),
        keep_gradients: false,
    };
    match on_checkpoint {
        Some(_) => run(&training, RunOptions { on_checkpoint, ..RunOptions::default() }, &mut |_| {}),
        None => train_everywhere(&training),
    }
}

/// The loss and all gradients, with the reference kernels.
fn gradients(weights: &BTreeMap<String, Tensor>, data: &BTreeMap<String, Tensor>) -> (f64, BTreeMap<String, Vec<f64>>) {
    let (graph, _) = build_network();
    let dims = Bindings::from([("batch".to_string(), BATCH as i64)]);
    let mut graph = compiler::graph::bind::bind(&graph, &dims).unwrap();
    attach(&mut graph, Loss::CrossEntropy, None).unwrap();
    let mut inputs = weights.clone();
    inputs.extend(data.clone());
    support::gradients::gradients(&graph, &inputs, weights)
}

/// The plain loop: each stage uses the version that its schedule defines. No threads, no programs.
fn run_plain_loop(
    replicas: &[u32],
    caps: &[u32],
    minibatches: usize,
    lr: f64,
    momentum: f64,
) -> (Vec<f64>, BTreeMap<String, Vec<f64>>) {
    let (graph, initial_weights) = build_network();
    let ops = order::numbered(&graph);
    let stages_of_ops = even_stages(replicas.len());
    let stage_of = |name: &str| -> usize {
        let node = graph.ids().find(|id| matches!(&graph.node(*id).op, Op::Parameter(p) if p.name == name)).unwrap();
        let reader = graph.consumers(Value { node, output: 0 })[0].0;
        stages_of_ops[ops.iter().position(|id| *id == reader).unwrap()]
    };
    let dataset_rows = rows(minibatches);
    let mut versions: BTreeMap<String, Vec<Vec<f64>>> =
        initial_weights.iter().map(|(n, t)| (n.clone(), vec![t.to_f64()])).collect();
    let mut buffers: BTreeMap<String, Vec<f64>> =
        initial_weights.iter().map(|(n, t)| (n.clone(), vec![0.0; t.len()])).collect();
    let mut rounds: BTreeMap<String, Vec<Vec<f64>>> = BTreeMap::new();
    let mut losses = Vec::new();
    for b in 0..minibatches {
        let weights: BTreeMap<String, Tensor> = initial_weights
            .iter()
            .map(|(name, t)| {
                let s = stage_of(name);
                let round = b as u32 / replicas[s];
                let version = round.saturating_sub(caps[s] - 1) as usize;
                (name.clone(), Tensor::from_f64(t.shape(), &versions[name][version]).cast(DType::F32))
            })
            .collect();
        let slice = |name: &str, width: usize| {
            let t = &dataset_rows[name];
            let size = t.dtype().size() * width * BATCH;
            let shape = if width == 1 { vec![BATCH] } else { vec![BATCH, width] };
            Tensor::new(t.dtype(), shape, t.bytes().slice(b * size..(b + 1) * size)).unwrap()
        };
        let data = BTreeMap::from([("x".to_string(), slice("x", WIDTH)), ("target".to_string(), slice("y", 1))]);
        let (loss, gradients) = gradients(&weights, &data);
        losses.push(loss);
        for (name, gradient) in gradients {
            let r = replicas[stage_of(&name)] as usize;
            let pending = rounds.entry(name.clone()).or_default();
            pending.push(gradient);
            if pending.len() == r || b + 1 == minibatches {
                let count = pending.len() as f64;
                let buffer = buffers.get_mut(&name).unwrap();
                let mut updated = versions[&name].last().unwrap().clone();
                for i in 0..updated.len() {
                    let mean = pending.iter().map(|g| g[i]).sum::<f64>() / count;
                    buffer[i] = momentum * buffer[i] + mean;
                    updated[i] -= lr * buffer[i];
                }
                versions.get_mut(&name).unwrap().push(updated);
                pending.clear();
            }
        }
    }
    (losses, versions.into_iter().map(|(n, mut v)| (n, v.pop().unwrap())).collect())
}

/// Losses, weights and last gradients of a run with a flush, as bits.
fn run_flush(schedule: Schedule, pipeline: Pipeline, count: StepCount) -> Vec<(String, Vec<u8>)> {
    let (graph, weights) = build_network();
    let item = BATCH / count.microbatches as usize;
    let dims = Bindings::from([("batch".to_string(), item as i64)]);
    let stages_of_ops = even_stages(pipeline.stages.len());
    let settings = Settings::new(dims, Loss::CrossEntropy, schedule, count);
    let prepared = prepare(&graph, &stages_of_ops, pipeline, &settings).unwrap();
    let steps = count.minibatches as usize;
    let data = Dataset::new(rows(steps), &feeds(&prepared.codes), item).unwrap();
    let batches = Batches::new(data, BATCH, count.microbatches as usize, steps, RowOrder::InOrder).unwrap();
    let optimizer =
        Optimizer::from(Rule::Sgd { learning_rate: 0.1, momentum: 0.9, nesterov: false, weight_decay: 0.0 });
    let (codes, program) = (&prepared.codes, &prepared.program);
    let keep_gradients = true;
    let training = TrainJob {
        codes,
        program,
        weights: &weights,
        batches: &batches,
        optimizer: &optimizer,
        policy: Policy::default(),
        keep_gradients,
    };
    let trained = train(&training, &mut |_| {}).unwrap();
    let losses = trained.losses.iter().flat_map(|loss| loss.to_le_bytes()).collect();
    let tensors = |kind: &str, values: &BTreeMap<String, Tensor>| {
        values.iter().map(|(name, t)| (format!("{kind} {name}"), t.bytes().to_vec())).collect::<Vec<_>>()
    };
    let weights = tensors("weight", &trained.weights);
    [vec![("losses".to_string(), losses)], weights, tensors("gradient", &trained.gradients)].concat()
}

/// Every schedule with a flush gives the bits of plain 1F1B: with chunks, V-shapes, split backwards, replicas, and over
/// the skip edge.
#[test]
fn all_schedules_with_a_flush_train_the_same_bits() {
    let pipeline = |stages: usize, r: u32| Pipeline::chain(vec![StageSpec::new(r, 1.0, 2.0); stages]);
    for (replicas, microbatches) in [(1, 4), (1, 2), (2, 4), (1, 1)] {
        let count = StepCount { minibatches: 4, microbatches };
        for (stages, schedules) in [
            (3, &[Schedule::Gpipe, Schedule::ZbH1, Schedule::ZbH2][..]),
            (4, &[Schedule::Interleaved, Schedule::Bfs, Schedule::Zbv, Schedule::DualPipeV]),
            (6, &[Schedule::Interleaved, Schedule::Zbv]),
        ] {
            let expected = run_flush(Schedule::OneFOneB, pipeline(stages, replicas), count);
            assert_eq!(expected.len(), 11);
            for &name in schedules {
                let shaped = match name {
                    Schedule::Interleaved | Schedule::Bfs => pipeline(stages, replicas).looped(2),
                    Schedule::Zbv | Schedule::DualPipeV => pipeline(stages, replicas).folded(),
                    _ => pipeline(stages, replicas),
                };
                let result = run_flush(name, shaped, count);
                assert!(result == expected, "{name}, {stages} stages of {replicas}, {microbatches} microbatches");
            }
        }
    }
    // Unequal replicas: the schedule is simulated.
    let count = StepCount { minibatches: 3, microbatches: 4 };
    let unequal = || Pipeline::chain([1, 3, 2].map(|r| StageSpec::new(r, f64::from(r), 2.0 * f64::from(r))).to_vec());
    let expected = run_flush(Schedule::OneFOneB, unequal(), count);
    for name in [Schedule::ZbH1, Schedule::ZbH2] {
        assert!(run_flush(name, unequal(), count) == expected, "{name}");
    }
}

#[test]
fn one_f_one_b_rr_is_the_plain_loop_with_delayed_weights() {
    for replicas in [&[1, 1, 1][..], &[2, 1], &[3, 1], &[1, 3, 1], &[1, 2, 2, 1], &[2], &[1]] {
        for extra in [0, 1, 2] {
            for minibatches in [1, 7, 12] {
                let caps: Vec<u32> = published_caps(replicas).iter().map(|c| c + extra).collect();
                let (lr, momentum) = (0.1, 0.9);
                let sgd =
                    Optimizer::from(Rule::Sgd { learning_rate: lr, momentum, nesterov: false, weight_decay: 0.0 });
                let count = StepCount::minibatches(minibatches as u32);
                let trained = train_pipelined(replicas, &caps, Schedule::OneFOneBRr, count, &sgd);
                let (losses, weights) = run_plain_loop(replicas, &caps, minibatches, lr, momentum);
                let label = format!("{replicas:?} caps {caps:?}, {minibatches} minibatches");
                for (b, (got, want)) in trained.losses.iter().zip(&losses).enumerate() {
                    assert!((got - want).abs() <= 1e-5 * want.abs(), "{label}: minibatch {b}: {got} against {want}");
                }
                for (name, want) in &weights {
                    let got = trained.weights[name].to_f64();
                    let error = got.iter().zip(want).map(|(g, w)| (g - w).abs()).fold(0.0, f64::max);
                    assert!(error <= 2e-5, "{label}: {name} is {error:.2e} off");
                }
            }
        }
    }
}

#[test]
fn flush_schedules_have_the_bits_of_one_stage() {
    let adam = Optimizer::from(Rule::Adam {
        learning_rate: 1e-2,
        betas: (0.9, 0.999),
        epsilon: 1e-8,
        weight_decay: 0.0,
        decoupled: false,
    });
    for microbatches in [1, 2, 4] {
        let count = StepCount { minibatches: 6, microbatches };
        let unsplit = train_pipelined(&[1], &[1], Schedule::OneFOneB, count, &adam);
        for stages in [2, 3, 4] {
            for schedule in [Schedule::OneFOneB, Schedule::Gpipe] {
                let replicas = vec![1; stages];
                let split = train_pipelined(&replicas, &published_caps(&replicas), schedule, count, &adam);
                assert_eq!(unsplit.losses, split.losses, "{schedule}, {stages} stages, {microbatches} microbatches");
                assert!(unsplit.weights == split.weights, "{schedule}, {stages} stages: other weights");
            }
        }
        // Replicas add in another order.
        let shared = train_pipelined(&[2, 1], &[2, 1], Schedule::OneFOneB, count, &adam);
        for (got, want) in shared.losses.iter().zip(&unsplit.losses) {
            assert!((got - want).abs() <= 1e-6 * want.abs(), "{got} against {want} with two replicas");
        }
    }
}

#[test]
fn the_same_run_has_the_same_bits() {
    let sgd = Optimizer::from(Rule::Sgd { learning_rate: 0.1, momentum: 0.9, nesterov: true, weight_decay: 1e-3 });
    let run = || {
        train_pipelined(&[2, 1, 1], &published_caps(&[2, 1, 1]), Schedule::OneFOneBRr, StepCount::minibatches(15), &sgd)
    };
    let first = run();
    for _ in 0..5 {
        let repeated = run();
        assert_eq!(first.losses, repeated.losses);
        assert!(first.weights == repeated.weights);
    }
}

/// If the learning rate is 0 after two minibatches, the weights stay as they were, also in a stage that steps once for
/// both.
#[test]
fn learning_rates_count_minibatches() {
    for rule in [
        Rule::Sgd { learning_rate: 0.1, momentum: 0.0, nesterov: false, weight_decay: 0.0 },
        Rule::RmsProp { learning_rate: 0.01, alpha: 0.9, epsilon: 1e-8, weight_decay: 0.0, momentum: 0.0 },
        Rule::Adagrad { learning_rate: 0.1, decay: 0.0, epsilon: 1e-10, weight_decay: 0.0 },
    ] {
        let constant = Optimizer::from(rule);
        let decaying =
            Optimizer { rate: Rate { warmup: 0, shape: Shape::Step { every: 2, factor: 0.0 } }, ..constant.clone() };
        for schedule in [Schedule::OneFOneB, Schedule::OneFOneBRr] {
            let run = |minibatches, optimizer: &Optimizer| {
                let caps = published_caps(&[2, 1]);
                train_pipelined(&[2, 1], &caps, schedule, StepCount { minibatches, microbatches: 1 }, optimizer).weights
            };
            assert!(run(7, &decaying) == run(2, &constant), "{:?} under {schedule}", decaying.rule);
            assert!(run(7, &constant) != run(2, &constant));
        }
    }
}

#[test]
fn a_result_of_the_model_called_loss_is_not_the_loss() {
    let (mut graph, _) = build_network();
    let logits = graph.outputs[0].value;
    graph.outputs.insert(1, Output { name: "loss".into(), value: logits });
    attach(&mut graph, Loss::CrossEntropy, None).unwrap();
    let losses: Vec<&Output> = graph.outputs.iter().filter(|o| o.name == LOSS).collect();
    assert_eq!(losses.len(), 1);
    assert!(graph.fact(losses[0].value).shape.is_empty());
}

#[test]
fn a_gradient_without_a_rule_is_refused() {
    use compiler::op::{Broadcast, Constant, LayerNorm, Reduce, ReduceKind};
    use compiler::pass::backward::BackwardError;
    let (mut graph, _) = build_network();
    let logits = graph.outputs[0].value;
    let mut writer = Writer { graph: &mut graph, origin: Origin::default() };
    // The saved mean of a layer norm has no gradient.
    let width = writer.fact(logits).shape[1].clone();
    let unit = writer.emit(Op::Constant(Constant { tensor: Tensor::from_f32(&[], &[1.0]) }), &[]);
    let scale = writer.emit(Op::Broadcast(Broadcast { shape: vec![width] }), &[unit]);
    let norm = Op::LayerNorm(LayerNorm { axis: 1, epsilon: 1e-5 });
    let mean = writer.emit_all(norm, &[logits, scale, scale])[1];
    let sum = Reduce { kind: ReduceKind::Sum, axes: vec![0, 1], keep: false };
    let sum = writer.emit(Op::Reduce(sum), &[mean]);
    graph.outputs[0].value = sum;
    let graph = compiler::graph::bind::bind(&graph, &Bindings::from([("batch".to_string(), 4)])).unwrap();
    let stage_of_node: HashMap<NodeId, usize> = order::numbered(&graph).into_iter().map(|id| (id, 0)).collect();
    let fragment = fragments(&graph, &stage_of_node, 1).unwrap().remove(0);
    let result = backward(&fragment, Some(fragment.graph.outputs[0].value), &ReceivedGradients::new());
    assert!(matches!(result, Err(BackwardError::NoRule { .. })), "the mean of a layer norm has no gradient rule");
}

#[test]
fn recomputation_gives_the_same_bits() {
    let optimizer =
        Optimizer::from(Rule::Sgd { learning_rate: 0.1, momentum: 0.9, nesterov: false, weight_decay: 0.0 });
    for (replicas, schedule, count) in [
        (&[1, 1, 1][..], Schedule::OneFOneBRr, StepCount::minibatches(7)),
        (&[2, 1, 1], Schedule::OneFOneBRr, StepCount::minibatches(7)),
        (&[1, 1, 1], Schedule::OneFOneB, StepCount { minibatches: 3, microbatches: 4 }),
        (&[1, 1], Schedule::Gpipe, StepCount { minibatches: 3, microbatches: 2 }),
        (&[1, 1, 1], Schedule::ZbH1, StepCount { minibatches: 3, microbatches: 4 }),
        (&[2, 1], Schedule::ZbH2, StepCount { minibatches: 3, microbatches: 4 }),
        (&[1, 1, 1, 1], Schedule::Zbv, StepCount { minibatches: 2, microbatches: 4 }),
        (&[1, 1, 1], Schedule::TwoBw, StepCount { minibatches: 4, microbatches: 4 }),
        (&[1, 1, 1], Schedule::OneFOneBRrVsync, StepCount::minibatches(7)),
        (&[2, 1, 1], Schedule::OneFOneBRrNewest, StepCount::minibatches(7)),
    ] {
        let run = |recomputation| {
            let prepared = prepare_run(replicas, &published_caps(replicas), schedule, count, recomputation);
            run_prepared(&prepared, count, &optimizer, None).unwrap()
        };
        let [without, by_backward, by_program] =
            [Recomputation::Never, Recomputation::Backward, Recomputation::Program].map(run);
        // Without stashing, recomputation uses newer weights than the forward.
        let runs = if schedule.stashes() { vec![without, by_backward] } else { vec![by_backward] };
        for trained in runs {
            assert_eq!(trained.losses, by_program.losses, "{replicas:?} {schedule}");
            for (name, weight) in &trained.weights {
                assert_eq!(weight.bytes(), by_program.weights[name].bytes(), "{name} of {replicas:?} {schedule}");
            }
            let recomputes = trained.spans.iter().flatten().any(|span| matches!(span.work, Work::Recompute(..)));
            assert!(!recomputes, "no instruction says so");
        }
        let recomputed_spans =
            by_program.spans.iter().flatten().filter(|span| matches!(span.work, Work::Recompute(..)));
        let items = count.minibatches * count.microbatches;
        assert_eq!(recomputed_spans.count(), replicas.len() * items as usize, "{replicas:?} {schedule}");
    }
}

/// Bucketed gradients are equal, whether the plan or the runtime assigns the buckets.
#[test]
fn buckets_change_no_bits() {
    let optimizer =
        Optimizer::from(Rule::Sgd { learning_rate: 0.1, momentum: 0.9, nesterov: false, weight_decay: 0.0 });
    for (replicas, schedule, count) in [
        (&[2, 1, 1][..], Schedule::OneFOneBRr, StepCount::minibatches(9)),
        (&[3, 2], Schedule::OneFOneBRr, StepCount::minibatches(7)),
        (&[2, 3], Schedule::OneFOneB, StepCount { minibatches: 3, microbatches: 4 }),
        (&[3, 1], Schedule::Gpipe, StepCount { minibatches: 3, microbatches: 2 }),
        (&[2, 1], Schedule::ZbH1, StepCount { minibatches: 3, microbatches: 4 }),
        (&[2, 2, 2, 2], Schedule::Zbv, StepCount { minibatches: 2, microbatches: 4 }),
        (&[2, 2], Schedule::TwoBw, StepCount { minibatches: 4, microbatches: 4 }),
        (&[2, 1, 1], Schedule::OneFOneBRrNewest, StepCount::minibatches(7)),
    ] {
        let run = |buckets: usize, named: bool| {
            let caps = published_caps(replicas);
            let mut prepared = prepare_buckets(buckets, replicas, &caps, schedule, count, Recomputation::Never);
            let bucket_indices =
                prepared.program.workers[0].instructions.iter().filter_map(|instruction| match instruction {
                    Instruction::AllReduce { bucket, .. } => Some(*bucket),
                    _ => None,
                });
            assert_eq!(bucket_indices.max(), Some(buckets as u32 - 1), "{replicas:?} {schedule}");
            for code in prepared.codes.iter_mut().filter(|_| named) {
                // An unknown name, and an empty bucket in the middle.
                let names: Vec<String> = code.parameters.iter().map(|named| named.name.clone()).collect();
                code.buckets = vec![Vec::new(); buckets];
                code.buckets[0] = names.into_iter().skip(1).chain(["of another model".to_string()]).collect();
            }
            run_prepared(&prepared, count, &optimizer, None).unwrap()
        };
        let single_bucket = run(1, false);
        for (buckets, named) in [(2, false), (3, true), (9, false)] {
            let bucketed = run(buckets, named);
            assert_eq!(bucketed.losses, single_bucket.losses, "{replicas:?} {schedule} in {buckets}");
            for (name, weight) in &single_bucket.weights {
                assert_eq!(weight.bytes(), bucketed.weights[name].bytes(), "{name} of {replicas:?} {schedule}");
            }
        }
    }
}

/// Every checkpoint equals the result of a run of that length.
#[test]
fn checkpoints_hold_the_weights_at_their_point() {
    let optimizer =
        Optimizer::from(Rule::Sgd { learning_rate: 0.1, momentum: 0.9, nesterov: false, weight_decay: 0.0 });
    for (replicas, schedule, microbatches) in
        [(&[1, 1, 1][..], Schedule::OneFOneB, 2), (&[2, 1], Schedule::ZbH1, 2), (&[1, 1, 1], Schedule::OneFOneBRr, 1)]
    {
        let count = |minibatches| StepCount { minibatches, microbatches };
        let caps = published_caps(replicas);
        let mut prepared = prepare_run(replicas, &caps, schedule, count(4), Recomputation::Never);
        for worker in &mut prepared.program.workers {
            let mut instructions = Vec::new();
            for instruction in std::mem::take(&mut worker.instructions) {
                instructions.push(instruction);
                if let Instruction::Step { stage, to: version, .. } = instruction {
                    instructions.push(Instruction::Checkpoint { stage, version });
                }
            }
            worker.instructions = instructions;
        }
        check(&prepared.program).unwrap();
        let error = run_prepared(&prepared, count(4), &optimizer, None).map(|_| ()).unwrap_err();
        assert!(matches!(&error, TrainError::NoPlace { .. }), "{error}");
        let mut checkpoints: Vec<Checkpoint> = Vec::new();
        run_prepared(&prepared, count(4), &optimizer, Some(&mut |checkpoint| checkpoints.push(checkpoint))).unwrap();
        assert_eq!(checkpoints.len(), 4 * replicas.iter().sum::<u32>() as usize);
        for minibatches in 1..=4 {
            let shorter = train_pipelined(replicas, &caps, schedule, count(minibatches), &optimizer);
            let matching = checkpoints.iter().filter(|checkpoint| checkpoint.version == minibatches);
            let tensors: Vec<(&String, &Tensor)> = matching.flat_map(|checkpoint| &checkpoint.weights).collect();
            assert!(tensors.len() >= shorter.weights.len());
            for (name, tensor) in tensors {
                assert_eq!(
                    tensor.bytes(),
                    shorter.weights[name].bytes(),
                    "{name} after {minibatches} under {schedule}"
                );
            }
        }
    }
}
