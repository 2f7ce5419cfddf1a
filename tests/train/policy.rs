//! Training policies against plain loops written from their definitions: clipping, stale weights, tied weights without
//! a flush, running statistics of whole minibatches, mixed precision.

use crate::support;
use crate::support::devices::train_everywhere;
use compiler::graph::bind::bind;
use compiler::graph::{Graph, MovingAverage, Origin, Output, Writer, order};
use compiler::op::{BatchNorm, Emit, Input, MatMul, NodeId, Op, Parameter, State, Unary, Value};
use compiler::pass::loss::{Loss, attach};
use compiler::pass::mixed_precision::mixed;
use compiler::plan::schedule::Schedule;
use compiler::schedule::semantics::StepCount;
use compiler::schedule::{Pipeline, StageSpec, published_caps};
use compiler::tensor::dim::{Bindings, Dim};
use compiler::tensor::fact::Fact;
use compiler::tensor::{DType, Tensor};
use runtime::data::{Batches, Dataset, RowOrder, mix};
use runtime::exec::moving_average::Statistics;
use runtime::optim::optimizer::{Optimizer, Rule};
use runtime::optim::policy::{DISCREPANCY, LossScaling, Policy, Staleness};
use runtime::train::job::{TrainJob, Trained};
use runtime::train::prepare::{Settings, prepare};
use runtime::train::run::feeds;
use std::collections::{BTreeMap, BTreeSet};

const BATCH: usize = 4;
const WIDTH: usize = 5;
const LAYERS: usize = 5;
const LR: f64 = 0.1;
const MOMENTUM: f64 = 0.9;

type Weights = BTreeMap<String, Vec<f64>>;

fn uniform(dtype: DType, shape: &[usize], seed: u64) -> Tensor {
    let draw = |i: usize| (mix(seed.wrapping_mul(1000) + i as u64) >> 11) as f64 / (1u64 << 52) as f64 - 1.0;
    Tensor::from_f64(shape, &(0..shape.iter().product()).map(draw).collect::<Vec<_>>()).cast(dtype)
}

/// Five layers of two ops. `tied`: the last reads the weight of the first. `normed`: a batch normalisation of the input
/// comes first.
struct Net {
    graph: Graph,
    weights: BTreeMap<String, Tensor>,
    dtype: DType,
}

fn build_net(dtype: DType, tied: bool, normed: bool) -> Net {
    let mut graph = Graph::new("net");
    let mut weights = BTreeMap::new();
    let mut averages = Vec::new();
    let mut writer = Writer { graph: &mut graph, origin: Origin::default() };
    let fact = Fact::new(dtype, vec![Dim::symbol("batch"), Dim::from(WIDTH)]);
    let mut x = writer.emit(Op::Input(Input { name: "x".into(), fact }), &[]);
    if normed {
        let fact = Fact::of(dtype, &[WIDTH]);
        let [scale, bias] = [("scale", 1.0), ("bias", 0.0)].map(|(name, value)| {
            weights.insert(name.to_string(), Tensor::from_f64(&[WIDTH], &[value; WIDTH]).cast(dtype));
            writer.emit(Op::Parameter(Parameter { name: name.into(), fact: fact.clone() }), &[])
        });
        let norm = writer.emit_all(Op::BatchNorm(BatchNorm { epsilon: 1e-5 }), &[x, scale, bias]);
        for (name, sample) in [("mean", norm[1]), ("variance", norm[2])] {
            weights.insert(name.to_string(), Tensor::from_f64(&[WIDTH], &[0.5; WIDTH]).cast(dtype));
            let state = writer.emit(Op::State(State { name: name.into(), fact: fact.clone() }), &[]);
            averages.push(MovingAverage { state: state.node, sample, keep: 0.9 });
        }
        x = norm[0];
    }
    let mut first_weight = None;
    for layer in 0..LAYERS {
        let w = match first_weight.filter(|_| tied && layer + 1 == LAYERS) {
            Some(first_weight) => first_weight,
            None => {
                let name = format!("{layer}.weight");
                weights.insert(name.clone(), uniform(dtype, &[WIDTH, WIDTH], layer as u64 + 1));
                writer.emit(Op::Parameter(Parameter { name, fact: Fact::of(dtype, &[WIDTH, WIDTH]) }), &[])
            }
        };
        first_weight = first_weight.or(Some(w));
        x = writer.emit(Op::MatMul(MatMul { transpose_a: false, transpose_b: true }), &[x, w]);
        x = writer.emit(Op::Unary(Unary::Tanh), &[x]);
    }
    graph.outputs.push(Output { name: "logits".into(), value: x });
    graph.averages = averages;
    Net { graph, weights, dtype }
}

fn rows(dtype: DType, minibatches: usize) -> BTreeMap<String, Tensor> {
    let n = minibatches * BATCH;
    let labels: Vec<i64> = (0..n).map(|i| (mix(77 + i as u64) % WIDTH as u64) as i64).collect();
    BTreeMap::from([("x".into(), uniform(dtype, &[n, WIDTH], 42)), ("y".into(), Tensor::from_i64(&[n], &labels))])
}

fn even_stages(ops: usize, stages: usize) -> Vec<usize> {
    (0..ops).map(|op| op * stages / ops).collect()
}

fn momentum() -> Optimizer {
    Optimizer::from(Rule::Sgd { learning_rate: LR, momentum: MOMENTUM, nesterov: false, weight_decay: 0.0 })
}

fn chain(replicas: &[u32]) -> Pipeline {
    let shapes = replicas.iter().map(|r| StageSpec::new(*r, f64::from(*r), 2.0 * f64::from(*r))).collect();
    Pipeline::chain(shapes).with_caps(&published_caps(replicas))
}

fn run(net: &Net, pipeline: Pipeline, schedule: Schedule, count: StepCount, policy: Policy) -> Trained {
    run_with(net, pipeline, schedule, count, policy, &momentum())
}

fn run_with(
    net: &Net,
    pipeline: Pipeline,
    schedule: Schedule,
    count: StepCount,
    policy: Policy,
    optimizer: &Optimizer,
) -> Trained {
    let item = BATCH / count.microbatches as usize;
    let dims = Bindings::from([("batch".to_string(), item as i64)]);
    let stages = even_stages(order::numbered(&net.graph).len(), pipeline.stages.len());
    let settings = Settings::new(dims, Loss::CrossEntropy, schedule, count);
    let prepared = prepare(&net.graph, &stages, pipeline, &settings).unwrap();
    let steps = count.minibatches as usize;
    let data = Dataset::new(rows(net.dtype, steps), &feeds(&prepared.codes), item).unwrap();
    let batches = Batches::new(data, BATCH, count.microbatches as usize, steps, RowOrder::InOrder).unwrap();
    let training = TrainJob {
        codes: &prepared.codes,
        program: &prepared.program,
        weights: &net.weights,
        batches: &batches,
        optimizer,
        policy,
        keep_gradients: false,
    };
    train_everywhere(&training).unwrap()
}

/// The loss and gradients of a micro-batch with the reference kernels; forward and backward may use different weights.
fn gradients(
    net: &Net,
    forward_weights: &Weights,
    backward_weights: &Weights,
    item: usize,
    size: usize,
) -> (f64, Weights) {
    let dims = Bindings::from([("batch".to_string(), size as i64)]);
    let mut graph = bind(&net.graph, &dims).unwrap();
    attach(&mut graph, Loss::CrossEntropy, None).unwrap();
    let dataset_rows = rows(net.dtype, (item + 1) * size / BATCH + 1);
    let rows = |name: &str, width: usize| {
        let array = &dataset_rows[name];
        let bytes = array.dtype().size() * width * size;
        let shape = if width == 1 { vec![size] } else { vec![size, width] };
        Tensor::new(array.dtype(), shape, array.bytes().slice(item * bytes..(item + 1) * bytes)).unwrap()
    };
    let tensors = |weights: &Weights| -> BTreeMap<String, Tensor> {
        let named_tensor =
            |(name, values): (&String, &Vec<f64>)| (name.clone(), Tensor::from_f64(net.weights[name].shape(), values));
        weights.iter().map(named_tensor).collect()
    };
    let mut forward_inputs = tensors(forward_weights);
    forward_inputs.extend([("x".to_string(), rows("x", WIDTH)), ("target".to_string(), rows("y", 1))]);
    support::gradients::gradients(&graph, &forward_inputs, &tensors(backward_weights))
}

fn holders(net: &Net, stages: usize) -> BTreeMap<String, BTreeSet<usize>> {
    let ops = order::numbered(&net.graph);
    let stages_of_ops = even_stages(ops.len(), stages);
    let mut holders = BTreeMap::new();
    for id in net.graph.ids() {
        if let Op::Parameter(p) = &net.graph.node(id).op {
            let readers = net.graph.consumers(Value { node: id, output: 0 });
            let stage_of = |(reader, _): &(NodeId, u32)| stages_of_ops[ops.iter().position(|op| op == reader).unwrap()];
            holders.insert(p.name.clone(), readers.iter().map(stage_of).collect());
        }
    }
    holders
}

fn norm<'a>(gradients: impl Iterator<Item = &'a Vec<f64>>) -> f64 {
    gradients.flatten().map(|g| g * g).sum::<f64>().sqrt()
}

fn clip_factor(clip: f64, norm: f64) -> f64 {
    (clip / (norm + 1e-6)).min(1.0)
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Mode {
    Stash,
    VerticalSync,
    None,
    Predict,
    PipeMare { anneal: u32 },
}

/// A plain loop of 1F1B-RR: every parameter in the version that its stage uses.
fn run_plain_loop(
    net: &Net,
    replicas: &[u32],
    minibatches: usize,
    mode: Mode,
    clip: Option<f64>,
) -> (Vec<f64>, Weights) {
    let caps = published_caps(replicas);
    let holders = holders(net, replicas.len());
    let initial: Weights = holders.keys().map(|name| (name.clone(), net.weights[name].to_f64())).collect();
    let zeros: Weights = initial.iter().map(|(name, w)| (name.clone(), vec![0.0; w.len()])).collect();
    // By version: weights, momentum, PipeMare's drift.
    let (mut versions, mut buffers, mut drifts) = (vec![initial.clone()], vec![zeros.clone()], vec![zeros.clone()]);
    let version_lists = |values: &Weights| -> BTreeMap<String, Vec<Vec<f64>>> {
        values.iter().map(|(name, w)| (name.clone(), vec![w.clone()])).collect()
    };
    let (mut weights, mut velocities, mut drift) =
        (version_lists(&versions.remove(0)), version_lists(&buffers.remove(0)), version_lists(&drifts.remove(0)));
    let mut pending: BTreeMap<String, Vec<Vec<f64>>> = BTreeMap::new();
    let mut losses = Vec::new();
    let rounds = |name: &str, b: usize| b / replicas[*holders[name].first().unwrap()] as usize;
    let version_read = |name: &str, b: usize| -> usize {
        let stage_version = |s: &usize| match mode {
            Mode::VerticalSync => {
                let first = (b / replicas[0] as usize).saturating_sub(caps[0] as usize - 1) * replicas[0] as usize;
                first / replicas[*s] as usize
            }
            _ => (b / replicas[*s] as usize).saturating_sub(caps[*s] as usize - 1),
        };
        holders[name].iter().map(stage_version).min().unwrap()
    };
    let shift = |w: &[f64], scale: f64, v: &[f64]| w.iter().zip(v).map(|(w, v)| w - scale * v).collect::<Vec<f64>>();
    for b in 0..minibatches {
        let mut forward_weights = Weights::new();
        let mut backward_weights = Weights::new();
        for name in holders.keys() {
            let (round, version) = (rounds(name, b), version_read(name, b));
            let (old, new) = (&weights[name][version], weights[name].last().unwrap());
            let lag = (round - version) as f64;
            let (f, g) = match mode {
                Mode::Stash | Mode::VerticalSync => (old.clone(), old.clone()),
                Mode::None => (old.clone(), new.clone()),
                Mode::Predict => (shift(old, lag * LR, &velocities[name][version]), new.clone()),
                Mode::PipeMare { .. } => (old.clone(), shift(new, lag, drift[name].last().unwrap())),
            };
            forward_weights.insert(name.clone(), f);
            backward_weights.insert(name.clone(), g);
        }
        let (loss, minibatch_gradients) = gradients(net, &forward_weights, &backward_weights, b, BATCH);
        losses.push(loss);
        for (name, gradient) in minibatch_gradients {
            pending.entry(name).or_default().push(gradient);
        }
        for stage in 0..replicas.len() {
            let r = replicas[stage] as usize;
            if !((b + 1) % r == 0 || b + 1 == minibatches) {
                continue;
            }
            let stage_parameters: Vec<&String> =
                holders.keys().filter(|name| holders[*name].first() == Some(&stage)).collect();
            let mean = |name: &String| -> Vec<f64> {
                let gradients_of_round = &pending[name];
                (0..gradients_of_round[0].len())
                    .map(|i| gradients_of_round.iter().map(|g| g[i]).sum::<f64>() / gradients_of_round.len() as f64)
                    .collect()
            };
            let means: BTreeMap<&String, Vec<f64>> = stage_parameters.iter().map(|name| (*name, mean(name))).collect();
            let is_single = |name: &String| holders[name].len() == 1;
            let stage_norm = norm(means.iter().filter(|(name, _)| is_single(name)).map(|(_, g)| g));
            for (name, gradient) in &means {
                let gradient_norm = if is_single(name) { stage_norm } else { norm([gradient].into_iter()) };
                let factor = clip.map_or(1.0, |clip| clip_factor(clip, gradient_norm));
                let delay = f64::from(caps[stage] - 1);
                let lr = match mode {
                    Mode::PipeMare { anneal } if delay > 1.0 => {
                        let first = rounds(name, b) * r;
                        LR / delay.powf(1.0 - (first as f64 / f64::from(anneal)).min(1.0))
                    }
                    _ => LR,
                };
                let (old, buffer) = (weights[*name].last().unwrap(), velocities[*name].last().unwrap());
                let buffer: Vec<f64> = buffer.iter().zip(gradient).map(|(b, g)| MOMENTUM * b + factor * g).collect();
                let new = shift(old, lr, &buffer);
                let keep = DISCREPANCY.powf(1.0 / delay.max(1.0));
                let last_drift = drift[*name].last().unwrap();
                let new_drift =
                    (0..new.len()).map(|i| keep * last_drift[i] + (1.0 - keep) * (new[i] - old[i])).collect();
                drift.get_mut(*name).unwrap().push(new_drift);
                weights.get_mut(*name).unwrap().push(new);
                velocities.get_mut(*name).unwrap().push(buffer);
            }
            stage_parameters.iter().for_each(|name| pending.get_mut(*name).unwrap().clear());
        }
    }
    (losses, weights.into_iter().map(|(name, mut versions)| (name, versions.pop().unwrap())).collect())
}

fn assert_same(label: &str, trained: &Trained, losses: &[f64], weights: &Weights) {
    for (b, (got, want)) in trained.losses.iter().zip(losses).enumerate() {
        assert!((got - want).abs() <= 1e-10, "{label}: minibatch {b}: {got} against {want}");
    }
    for (name, want) in weights {
        let got = trained.weights[name].to_f64();
        let error = got.iter().zip(want).map(|(g, w)| (g - w).abs()).fold(0.0, f64::max);
        assert!(error <= 1e-10, "{label}: {name} is {error:.2e} off");
    }
}

#[test]
fn every_way_with_stale_weights_is_its_plain_loop() {
    let net = build_net(DType::F64, false, false);
    let cases = [
        (Mode::Stash, Schedule::OneFOneBRr, Staleness::None),
        (Mode::VerticalSync, Schedule::OneFOneBRrVsync, Staleness::None),
        (Mode::None, Schedule::OneFOneBRrNewest, Staleness::None),
        (Mode::Predict, Schedule::OneFOneBRrNewest, Staleness::Predict),
        (Mode::PipeMare { anneal: 8 }, Schedule::OneFOneBRrNewest, Staleness::PipeMare { anneal: 8 }),
    ];
    let mut final_losses = Vec::new();
    for (mode, schedule, staleness) in cases {
        for replicas in [&[1, 1, 1][..], &[1, 1, 1, 1, 1], &[2, 1], &[3, 1], &[1]] {
            let policy = Policy { staleness, ..Policy::default() };
            let trained = run(&net, chain(replicas), schedule, StepCount::minibatches(13), policy);
            let (losses, weights) = run_plain_loop(&net, replicas, 13, mode, None);
            assert_same(&format!("{mode:?} {replicas:?}"), &trained, &losses, &weights);
            if replicas.len() == 5 {
                final_losses.push(trained.losses[12]);
            }
        }
    }
    final_losses.sort_by(f64::total_cmp);
    final_losses.dedup();
    assert_eq!(final_losses.len(), 5, "all differ");
}

/// Without stashing, a worker keeps one version of its weights.
#[test]
fn weights_that_are_not_stashed_take_one_version() {
    let net = build_net(DType::F64, false, false);
    // The lifetime of a message depends on its receiver's timing; the minimum of several runs has the fewest.
    let min_peak_bytes = |schedule| {
        let peak_bytes =
            || run(&net, chain(&[1; 5]), schedule, StepCount::minibatches(12), Policy::default()).peak_memory_bytes[0];
        (0..8).map(|_| peak_bytes()).min().unwrap()
    };
    let (stashed, newest) = (min_peak_bytes(Schedule::OneFOneBRr), min_peak_bytes(Schedule::OneFOneBRrNewest));
    let version = (WIDTH * WIDTH * 8) as u64;
    assert!(newest + 3 * version <= stashed, "five versions of one weight against one: {stashed} and {newest}");
}

#[test]
fn a_shared_parameter_is_the_plain_loop_s_where_nothing_flushes() {
    let net = build_net(DType::F64, true, false);
    for replicas in [&[1, 1][..], &[1, 1, 1], &[1, 1, 1, 1], &[2, 2], &[2, 1, 2], &[3, 3]] {
        for minibatches in [1, 7, 12] {
            let count = StepCount::minibatches(minibatches as u32);
            for (mode, schedule) in
                [(Mode::Stash, Schedule::OneFOneBRr), (Mode::VerticalSync, Schedule::OneFOneBRrVsync)]
            {
                for clip in [None, Some(0.05)] {
                    let policy = Policy { clip_norm: clip, ..Policy::default() };
                    let trained = run(&net, chain(replicas), schedule, count, policy);
                    let (losses, weights) = run_plain_loop(&net, replicas, minibatches, mode, clip);
                    assert_same(&format!("{mode:?} {replicas:?} {clip:?}"), &trained, &losses, &weights);
                }
            }
        }
    }
}

/// A plain loop with a flush: the mean over micro-batches, clipped by the norm over all parameters.
fn run_flush_loop(net: &Net, count: StepCount, clip: f64) -> (Vec<f64>, Weights) {
    let mut weights: Weights = holders(net, 1).into_keys().map(|n| (n.clone(), net.weights[&n].to_f64())).collect();
    let mut buffers: Weights = weights.iter().map(|(n, w)| (n.clone(), vec![0.0; w.len()])).collect();
    let m = count.microbatches as usize;
    let mut losses = Vec::new();
    for b in 0..count.minibatches as usize {
        let items: Vec<(f64, Weights)> =
            (0..m).map(|i| gradients(net, &weights, &weights, b * m + i, BATCH / m)).collect();
        losses.push(items.iter().map(|(loss, _)| loss).sum::<f64>() / m as f64);
        let mean = |name: &String| -> Vec<f64> {
            (0..weights[name].len()).map(|i| items.iter().map(|(_, g)| g[name][i]).sum::<f64>() / m as f64).collect()
        };
        let means: Weights = weights.keys().map(|name| (name.clone(), mean(name))).collect();
        let factor = clip_factor(clip, norm(means.values()));
        for (name, gradient) in means {
            let buffer = buffers.get_mut(&name).unwrap();
            let weight = weights.get_mut(&name).unwrap();
            for i in 0..weight.len() {
                buffer[i] = MOMENTUM * buffer[i] + factor * gradient[i];
                weight[i] -= LR * buffer[i];
            }
        }
    }
    (losses, weights)
}

#[test]
fn under_a_flush_the_norm_is_over_all_stages_to_the_bit() {
    for tied in [false, true] {
        let net = build_net(DType::F64, tied, false);
        let policy = Policy { clip_norm: Some(0.1), ..Policy::default() };
        for microbatches in [1, 2, 4] {
            let count = StepCount { minibatches: 6, microbatches };
            let unsplit = run(&net, chain(&[1]), Schedule::OneFOneB, count, policy);
            let (losses, weights) = run_flush_loop(&net, count, 0.1);
            assert_same(&format!("tied {tied}, {microbatches} microbatches"), &unsplit, &losses, &weights);
            let even = |stages: usize| Pipeline::chain(vec![StageSpec::new(1, 1.0, 2.0); stages]);
            for (schedule, pipeline) in [
                (Schedule::OneFOneB, even(2)),
                (Schedule::Gpipe, even(3)),
                (Schedule::ZbH1, even(5)),
                (Schedule::Interleaved, even(4).looped(2)),
                (Schedule::Zbv, even(4).folded()),
            ] {
                let split = run(&net, pipeline, schedule, count, policy);
                assert_eq!(unsplit.losses, split.losses, "{schedule}");
                assert!(unsplit.weights == split.weights, "{schedule}: other weights");
            }
            let shared = run(&net, chain(&[2, 1]), Schedule::OneFOneB, count, policy);
            assert_same(&format!("replicas, tied {tied}"), &shared, &losses, &weights);
        }
    }
}

#[test]
fn without_a_flush_each_stage_has_its_own_norm() {
    let net = build_net(DType::F64, false, false);
    for replicas in [&[1, 1, 1][..], &[2, 1]] {
        let policy = Policy { clip_norm: Some(0.05), ..Policy::default() };
        let trained = run(&net, chain(replicas), Schedule::OneFOneBRr, StepCount::minibatches(9), policy);
        let (losses, weights) = run_plain_loop(&net, replicas, 9, Mode::Stash, Some(0.05));
        assert_same(&format!("{replicas:?}"), &trained, &losses, &weights);
    }
}

#[test]
fn deferred_statistics_are_those_of_the_whole_minibatch() {
    let net = build_net(DType::F64, false, true);
    for unbiased in [false, true] {
        let (mut mean, mut variance) = ([0.5; WIDTH], [0.5; WIDTH]);
        let x = rows(DType::F64, 5)["x"].to_f64();
        for minibatch in x.chunks(BATCH * WIDTH) {
            for c in 0..WIDTH {
                let column: Vec<f64> = minibatch.chunks(WIDTH).map(|row| row[c]).collect();
                let m = column.iter().sum::<f64>() / BATCH as f64;
                let squares: f64 = column.iter().map(|v| (v - m).powi(2)).sum();
                mean[c] = 0.9 * mean[c] + 0.1 * m;
                variance[c] = 0.9 * variance[c] + 0.1 * squares / (BATCH - usize::from(unbiased)) as f64;
            }
        }
        let policy = Policy { statistics: Statistics::Deferred { unbiased }, ..Policy::default() };
        for microbatches in [1, 2, 4] {
            let count = StepCount { minibatches: 5, microbatches };
            for (replicas, schedule) in
                [(&[1][..], Schedule::OneFOneB), (&[1, 1], Schedule::Gpipe), (&[2, 1], Schedule::OneFOneB)]
            {
                let trained = run(&net, chain(replicas), schedule, count, policy);
                for (name, want) in [("mean", mean), ("variance", variance)] {
                    let got = trained.weights[name].to_f64();
                    let error = got.iter().zip(want).map(|(g, w)| (g - w).abs()).fold(0.0, f64::max);
                    assert!(error <= 1e-12, "{name}, {microbatches} microbatches on {replicas:?}: {error:.2e}");
                }
            }
            let immediate = run(&net, chain(&[1]), Schedule::OneFOneB, count, Policy::default());
            let is_same =
                immediate.weights["variance"].to_f64().iter().zip(variance).all(|(g, w)| (g - w).abs() <= 1e-12);
            assert_eq!(is_same, microbatches == 1 && !unbiased, "microbatches have statistics of their own");
        }
    }
}

/// The network in a 16-bit type.
fn build_narrow_net(dtype: DType, tied: bool, normed: bool) -> Net {
    let wide = build_net(DType::F32, tied, normed);
    let mut graph = bind(&wide.graph, &Bindings::from([("batch".to_string(), BATCH as i64)])).unwrap();
    graph = mixed(&graph, dtype).unwrap();
    Net { graph, weights: wide.weights, dtype: DType::F32 }
}

#[test]
fn mixed_precision_stays_near_f32_and_keeps_its_bits_over_cuts() {
    for (tied, normed) in [(false, false), (true, false), (false, true)] {
        let wide = build_net(DType::F32, tied, normed);
        let count = StepCount::minibatches(20);
        let expected = run(&wide, chain(&[1]), Schedule::OneFOneB, count, Policy::default());
        for (dtype, tolerance) in [(DType::Bf16, 3e-2), (DType::F16, 4e-3)] {
            let net = build_narrow_net(dtype, tied, normed);
            let policy = Policy { clip_norm: Some(10.0), ..Policy::default() };
            let unsplit = run(&net, chain(&[1]), Schedule::OneFOneB, count, policy);
            assert_eq!(unsplit.losses.len(), 20, "{dtype}: every minibatch has a loss");
            for (got, want) in unsplit.losses.iter().zip(&expected.losses) {
                assert!((got - want).abs() <= tolerance * want.abs(), "{dtype}: {got} against {want}");
            }
            assert!(unsplit.losses != expected.losses);
            assert!(unsplit.weights.values().all(|t| t.dtype() == DType::F32), "masters are what is left");
            for stages in [2, 3] {
                let split = run(&net, chain(&vec![1; stages]), Schedule::Gpipe, count, policy);
                assert_eq!(unsplit.losses, split.losses, "{dtype}, {stages} stages");
                assert!(unsplit.weights == split.weights, "{dtype}, {stages} stages: other weights");
            }
        }
    }
}

#[test]
fn links_of_two_bytes_carry_half() {
    let link_bytes = |net: &Net| -> usize {
        let dims = Bindings::from([("batch".to_string(), BATCH as i64)]);
        let count = StepCount::minibatches(1);
        let settings = Settings::new(dims, Loss::CrossEntropy, Schedule::OneFOneB, count);
        let stages = even_stages(order::numbered(&net.graph).len(), 3);
        let prepared = prepare(&net.graph, &stages, chain(&[1, 1, 1]), &settings).unwrap();
        prepared
            .codes
            .iter()
            .flat_map(|code| code.sent.iter().chain(&code.gradients_out))
            .map(|t| t.address.bytes)
            .sum()
    };
    let full_bytes = link_bytes(&build_net(DType::F32, false, false));
    assert!(full_bytes > 0);
    assert_eq!(2 * link_bytes(&build_narrow_net(DType::Bf16, false, false)), full_bytes);
}

/// With a too large scale, all workers skip the step until the scale has been halved often enough.
#[test]
fn an_overflow_leaves_the_step_out() {
    let net = build_narrow_net(DType::F16, false, true);
    let policy = Policy { loss_scaling: LossScaling { first: (1u64 << 40) as f64, every: 2000 }, ..Policy::default() };
    for replicas in [&[1][..], &[1, 1, 1], &[2, 1]] {
        let run_for =
            |minibatches| run(&net, chain(replicas), Schedule::OneFOneB, StepCount::minibatches(minibatches), policy);
        let early = run_for(5);
        for (name, weight) in &net.weights {
            assert_eq!(early.weights[name].bytes(), weight.bytes(), "{name} moved on {replicas:?}");
        }
        let late = run_for(60);
        assert!(late.losses.len() == 60 && late.losses.iter().all(|loss| loss.is_finite()));
        assert!(late.weights != early.weights, "the scale came down on {replicas:?}");
    }
}
