//! Tensor-parallel stages: the joined results of the devices equal those of one device, forward and backward.
//!
//! Zoo models, and those of the shared data if present, run in double precision to exclude rounding errors, with the cheapest
//! sharding for several machines and with random shardings.

use compiler::cluster::{BytesPerSecond, Seconds, device};
use compiler::graph::bind::{bind, symbols};
use compiler::graph::evaluate::evaluate;
use compiler::graph::verify::verify;
use compiler::graph::{Graph, evaluate_spmd, order};
use compiler::import::import::{Model, Options as Import, Weight, from_onnx, load};
use compiler::import::onnx::decode::parse;
use compiler::op::collective::is_meeting;
use compiler::op::dropout::COUNTER;
use compiler::op::sample::ramp;
use compiler::op::sharding::{part_of, whole_of};
use compiler::op::table::rule;
use compiler::op::{Op, Sharding, Value};
use compiler::pass::backward::{Backward, Read, ReceivedGradients, backward};
use compiler::pass::fragment::{Fragment, fragments};
use compiler::pass::loss::{LOSS, Loss, attach};
use compiler::pass::pipeline;
use compiler::pass::precision::precision;
use compiler::profile::shared::ActivationSharding;
use compiler::tensor::dim::Bindings;
use compiler::tensor::{DType, Tensor};
use compiler::tensor_parallel::cost::{Machine, NEVER};
use compiler::tensor_parallel::partition_stage::{Memory, Stage as Sharing, memory, share};
use compiler::tensor_parallel::strategy_search::{Model as Ways, choose};
use compiler::tensor_parallel::{Choice, SpmdTask};
use models::choice::Setting;
use models::zoo::{ENTRIES, Options, build, to_bytes};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// A model as one stage.
struct Stage {
    fragment: Fragment,
    backward: Backward,
    task: SpmdTask,
    inputs: BTreeMap<String, Tensor>,
}

impl Stage {
    fn sharing(&self) -> Sharing<'_> {
        Sharing::new(&self.fragment, Some(&self.backward), &BTreeSet::new(), &free(2))
    }
}

fn machine(kind: &str, devices: usize, gigabytes: f64, latency: f64) -> Machine {
    let device = device::find(kind).unwrap().device();
    let (bandwidth, latency) = (BytesPerSecond(gigabytes * 1e9), Seconds(latency));
    Machine { device, devices, bandwidth, latency, keeps_weights: false, activations: ActivationSharding::Replicated }
}

/// An almost free link and no kernel launch time, so that everything shardable is sharded.
fn free(devices: usize) -> Machine {
    let mut machine = machine("cpu", devices, 1e6, 0.0);
    machine.device.launch = Seconds(0.0);
    machine
}

fn zoo(name: &str, options: &Options) -> Model {
    let bytes = to_bytes(&build(name, options).unwrap().model);
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    from_onnx(&parse(bytes.into(), Some(folder)).unwrap(), name, &Import::default()).unwrap()
}

fn stage(model: &Model, batch: i64, dtype: Option<DType>) -> Stage {
    let bindings: Bindings = symbols(&model.graph).into_iter().map(|s| (s, batch)).collect();
    let mut graph = bind(&model.graph, &bindings).unwrap();
    attach(&mut graph, Loss::CrossEntropy, None).unwrap();
    if let Some(dtype) = dtype {
        graph = precision(&graph, dtype).unwrap();
    }
    build_stage(&graph, |name| match &model.weights[name] {
        Weight::Given(tensor) => Some(tensor.clone()),
        Weight::Missing { .. } => None,
    })
}

fn build_stage(graph: &Graph, weight: impl Fn(&str) -> Option<Tensor>) -> Stage {
    let stage_of: HashMap<_, _> = order::numbered(graph).into_iter().map(|id| (id, 0)).collect();
    let mut fragment = fragments(graph, &stage_of, 1).unwrap().remove(0);
    pipeline::forward(&mut fragment).unwrap();
    let loss = fragment.graph.outputs.iter().find(|o| o.name == LOSS).map(|o| o.value);
    let backward = backward(&fragment, loss, &ReceivedGradients::new()).unwrap();
    let mut inputs = BTreeMap::new();
    for id in fragment.graph.ids() {
        match &fragment.graph.node(id).op {
            Op::Input(input) => {
                let shape = input.fact.concrete().unwrap();
                let count: usize = shape.iter().product();
                let tensor = match input.fact.dtype {
                    DType::I64 if input.name == COUNTER => Tensor::from_i64(&[], &[3]),
                    DType::I64 => {
                        Tensor::from_i64(&shape, &(0..count as i64).map(|i| i * 7 % 5 % 2).collect::<Vec<_>>())
                    }
                    dtype => ramp(&shape, 3).cast(dtype),
                };
                inputs.insert(input.name.clone(), tensor);
            }
            Op::Parameter(o) => drop(weight(&o.name).map(|t| inputs.insert(o.name.clone(), t.cast(o.fact.dtype)))),
            Op::State(o) => drop(weight(&o.name).map(|t| inputs.insert(o.name.clone(), t.cast(o.fact.dtype)))),
            _ => {}
        }
    }
    let task = Sharing::new(&fragment, Some(&backward), &BTreeSet::new(), &free(2)).task().clone();
    verify(&task.graph).unwrap();
    Stage { fragment, backward, task, inputs }
}

/// All results of a stage on one device: outputs, tracked values, gradients.
fn evaluate_unsharded(stage: &Stage) -> Vec<Tensor> {
    let values = evaluate(&stage.task.graph, &stage.inputs).unwrap();
    let results = stage.task.graph.outputs.iter().map(|output| output.value);
    let averages = stage.task.graph.averages.iter().map(|average| average.sample);
    results.chain(averages).map(|value| values[&value].clone()).collect()
}

fn join_shards(parts: Vec<Tensor>, layout: Sharding) -> Tensor {
    match layout {
        Sharding::Replicated => {
            assert!(parts.iter().all(|part| part.bytes() == parts[0].bytes()), "devices have different wholes");
            parts[0].clone()
        }
        Sharding::Split(split) => whole_of(&parts, split),
        Sharding::Partial => panic!("a result ends as a sum of terms"),
    }
}

/// The same on a tensor-parallel group: the forward, then the backward with its saved tensors.
fn evaluate_sharded(stage: &Stage, choice: &Choice, machine: &Machine) -> (Vec<Tensor>, Memory) {
    let shared = share(&stage.sharing(), choice, machine, &HashSet::new()).unwrap();
    verify(&shared.fragment.graph).unwrap();
    let backward_graph = shared.backward.as_ref().unwrap();
    verify(&backward_graph.graph).unwrap();
    let mut inputs: Vec<BTreeMap<String, Tensor>> = (0..machine.devices)
        .map(|device| {
            let part = |(name, tensor): (&String, &Tensor)| {
                let part = match shared.parameters.get(name) {
                    Some(Sharding::Split(split)) => part_of(tensor, *split, machine.devices, device),
                    _ => tensor.clone(),
                };
                (name.clone(), part)
            };
            stage.inputs.iter().map(part).collect()
        })
        .collect();
    let forward = evaluate_spmd::evaluate(&shared.fragment.graph, &inputs).unwrap();
    for (id, read) in &backward_graph.reads {
        let (Op::Input(input), Read::Saved(value)) = (&backward_graph.graph.node(*id).op, read) else {
            panic!("{read:?}")
        };
        inputs
            .iter_mut()
            .zip(&forward)
            .for_each(|(inputs, values)| drop(inputs.insert(input.name.clone(), values[value].clone())));
    }
    let backward = evaluate_spmd::evaluate(&backward_graph.graph, &inputs).unwrap();
    let gather = |values: &[HashMap<Value, Tensor>], value: Value| values.iter().map(|v| v[&value].clone()).collect();
    let graph = &shared.fragment.graph;
    let mut results: Vec<Tensor> =
        graph.outputs.iter().map(|o| join_shards(gather(&forward, o.value), Sharding::Replicated)).collect();
    for (output, end) in backward_graph.graph.outputs.iter().zip(&stage.task.ends[graph.outputs.len()..]) {
        results.push(join_shards(gather(&backward, output.value), choice.end(*end)));
    }
    results.extend(graph.averages.iter().map(|a| join_shards(gather(&forward, a.sample), Sharding::Replicated)));
    (results, memory(&shared.fragment, shared.backward.as_ref()))
}

/// The largest difference, relative to the largest number of each tensor.
fn worst_error(got: &[Tensor], want: &[Tensor]) -> f64 {
    assert_eq!(got.len(), want.len());
    let error = |(got, want): (&Tensor, &Tensor)| {
        assert_eq!((got.dtype(), got.shape()), (want.dtype(), want.shape()));
        let (got, want) = (got.to_f64(), want.to_f64());
        let top = want.iter().fold(1e-3f64, |m, v| m.max(v.abs()));
        got.iter().zip(&want).map(|(g, w)| if g == w { 0.0 } else { (g - w).abs() / top }).fold(0.0, f64::max)
    };
    got.iter().zip(want).map(error).fold(0.0, f64::max)
}

/// Small zoo models with divisible sizes.
fn small() -> Vec<(&'static str, Stage)> {
    let entries =
        ENTRIES.iter().filter(|entry| ["mlp", "residual-cnn", "gpt", "moe", "awd-lm", "bert"].contains(&entry.name));
    entries
        .map(|entry| {
            let options = match entry.name {
                "gpt" => {
                    entry.small().number("layers", 1).with("dropout", Setting::Fraction(0.3)).number("vocabulary", 96)
                }
                "moe" => entry.small().number("layers", 1).number("vocabulary", 96),
                _ => entry.small(),
            };
            println!("{}", entry.name);
            (entry.name, stage(&zoo(entry.name, &options), 4, Some(DType::F64)))
        })
        .collect()
}

/// A random sharding: the cheapest after random extra costs.
fn random_choice(stage: &Stage, machine: &Machine, seed: u64) -> Choice {
    let ways = Ways::of(&stage.task, machine).unwrap();
    let mut factors = ways.factors.clone();
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for cost in factors.unary.iter_mut().flatten().filter(|cost| **cost < NEVER) {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        *cost = (state >> 40) << 24;
    }
    let solution = factors.minimize(1 << 12);
    assert!(solution.cost < NEVER);
    ways.choice(&solution.states)
}

#[test]
fn any_way_of_sharing_gives_what_one_device_gives() {
    for (name, stage) in small() {
        let want = evaluate_unsharded(&stage);
        for seed in 0..2 {
            let machine = free(2 + 2 * (seed as usize % 2));
            let (got, _) = evaluate_sharded(&stage, &random_choice(&stage, &machine, seed), &machine);
            let error = worst_error(&got, &want);
            println!("{name}, seed {seed}: {error:.1e}");
            assert!(error <= 1e-9, "{name}, seed {seed}: {error:.1e}");
        }
    }
}

/// The models used to compare training with PyTorch.
#[test]
fn models_of_other_frameworks_give_what_one_device_gives() {
    let default_root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data");
    let root = std::env::var_os("PIPEC_DATA").map_or(default_root, PathBuf::from).join("parity");
    if !root.exists() {
        println!("skipped: no shared data");
        return;
    }
    for name in ["mlp", "gpt", "cnn_bn", "lstm_lm"] {
        let model = load(&root.join(name).join("model_dynbatch.onnx"), &Import::default()).unwrap();
        let stage = stage(&model, 4, Some(DType::F64));
        let want = evaluate_unsharded(&stage);
        for devices in [2, 4] {
            let machine = free(devices);
            let chosen = choose(&stage.task, &machine).unwrap();
            for (at, choice) in [chosen.choice, random_choice(&stage, &machine, devices as u64)].into_iter().enumerate()
            {
                let (got, memory) = evaluate_sharded(&stage, &choice, &machine);
                let error = worst_error(&got, &want);
                println!(
                    "{name}, {devices} devices, way {at}: {} of {} ps, {memory:?}, {error:.1e}",
                    chosen.cost, chosen.alone
                );
                assert!(error <= 1e-9, "{name} on {devices} devices, way {at}: {error:.1e}");
            }
        }
    }
}

/// Number of collectives of a GPT with `layers` layers, forward and backward: by op, over activations and over less.
type Meetings = BTreeMap<(&'static str, bool), [i64; 2]>;

fn meetings(layers: usize, context: usize, machine: &Machine) -> Meetings {
    let sizes = [("layers", layers), ("hidden", 4096), ("heads", 32), ("vocabulary", 51_200), ("context", context)];
    meetings_of("gpt", &sizes, 1, machine)
}

fn meetings_of(name: &str, sizes: &[(&str, usize)], batch: i64, machine: &Machine) -> Meetings {
    let settings = sizes.iter().map(|(name, value)| (name.to_string(), Setting::Number(*value))).collect();
    let options = Options { structure: true, settings, ..Options::default() };
    let stage = stage(&zoo(name, &options), batch, Some(DType::Bf16));
    let start = Instant::now();
    let chosen = choose(&stage.task, machine).unwrap();
    let took = start.elapsed();
    assert_eq!(chosen.cost, chosen.bound, "the best choice for a ladder of layers is found");
    let shared = share(&stage.sharing(), &chosen.choice, machine, &HashSet::new()).unwrap();
    let mut counts = Meetings::new();
    for (at, graph) in [&shared.fragment.graph, &shared.backward.as_ref().unwrap().graph].into_iter().enumerate() {
        for node in graph.ids().map(|id| graph.node(id)).filter(|node| is_meeting(&node.op)) {
            let activations = node.facts[0].rank() > 1;
            counts.entry((rule(&node.op).name(), activations)).or_default()[at] += 1;
        }
    }
    let memory = memory(&shared.fragment, shared.backward.as_ref());
    println!("{name} {sizes:?}: {counts:?}, {} of {} ps, {memory:?}, {took:?}", chosen.cost, chosen.alone);
    counts
}

/// The collectives that one more layer adds to those of two.
fn of_a_layer(context: usize, machine: &Machine) -> Meetings {
    let (two, mut three) = (meetings(2, context, machine), meetings(3, context, machine));
    for (at, counts) in &mut three {
        let before = two.get(at).copied().unwrap_or_default();
        counts.iter_mut().zip(before).for_each(|(count, before)| *count -= before);
    }
    three.retain(|_, counts| *counts != [0, 0]);
    three
}

/// Short sequences: the first weights are split by columns and the second by rows, with two all-reduces forward and two
/// backward (Shoeybi et al., 2019).
#[test]
fn a_block_of_gpt_is_shared_as_megatron_shares_it() {
    let layer = of_a_layer(128, &machine("h100", 8, 450.0, 1e-6));
    assert_eq!(layer, Meetings::from([(("all_reduce", true), [2, 2])]));
}

/// Long sequences: norms and residual stream are sharded by tokens (sequence parallelism). Each of the four all-reduces
/// becomes a reduce-scatter and an all-gather of equal bytes (Korthikanti et al., 2022). Gradients of the four norm vectors
/// are sums over tokens.
#[test]
fn norms_are_shared_by_tokens_where_there_are_many() {
    let layer = of_a_layer(2048, &machine("h100", 8, 450.0, 1e-6));
    let expected =
        [(("all_gather", true), [2, 2]), (("all_reduce", false), [0, 4]), (("reduce_scatter", true), [2, 2])];
    assert_eq!(layer, Meetings::from(expected));
}

#[test]
fn over_a_slow_link_every_device_does_everything() {
    assert_eq!(meetings(2, 128, &machine("h100", 8, 0.05, 1e-3)), Meetings::new());
}

#[test]
fn models_of_the_zoo_give_what_one_device_gives() {
    for (name, stage) in small() {
        let want = evaluate_unsharded(&stage);
        for machine in [free(2), free(4), machine("cpu", 4, 8.0, 1e-5)] {
            let chosen = choose(&stage.task, &machine).unwrap();
            assert!(chosen.bound <= chosen.cost && chosen.cost <= chosen.alone);
            let (got, memory) = evaluate_sharded(&stage, &chosen.choice, &machine);
            let error = worst_error(&got, &want);
            let (proven, devices) = (chosen.cost == chosen.bound, machine.devices);
            println!(
                "{name}, {devices} of {}: {} of {} ps, proven {proven}, {memory:?}, error {error:.1e}",
                machine.device.kind, chosen.cost, chosen.alone
            );
            assert!(error <= 1e-9, "{name} on {devices} devices: {error:.1e}");
        }
    }
}

/// Expert parallelism: each device has its experts and tokens, exchanged by all-to-alls forward and backward (Lepikhin et al.,
/// 2021, section 3).
#[test]
fn tokens_go_to_their_experts_and_come_back() {
    let sizes =
        [("layers", 1), ("hidden", 512), ("heads", 16), ("experts", 16), ("vocabulary", 1024), ("context", 512)];
    for devices in [2, 4, 8] {
        let counts = meetings_of("moe", &sizes, 8, &machine("h100", devices, 450.0, 1e-6));
        assert_eq!(counts[&("all_to_all", true)], [2, 2], "{devices} devices: {counts:?}");
    }
}
