//! Model costs: the cost graph matches what the runtime saves and runs, analytic profiles are reproducible, and
//! measured profiles are cached.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use compiler::cluster::device::find;
use compiler::graph::bind::{bind, symbols};
use compiler::graph::{Graph, Origin, Output, order};
use compiler::import::import::{Options, from_onnx};
use compiler::import::onnx::decode::parse;
use compiler::op::{Binary, Gather, Input, MatMul, Op, Parameter, Unary, Value};
use compiler::pass::analytic::{self, Subject};
use compiler::pass::attribution::{AttributionError, Training, attribute};
use compiler::pass::costs::{FillError, cost_graph, fill};
use compiler::pass::loss::{LOSS, Loss, attach};
use compiler::pass::memory::ALIGNMENT;
use compiler::profile::cost_graph::{CostGraph, OpId};
use compiler::profile::read::{from_json, to_json};
use compiler::profile::{Method, OpProfile, Profile, ProfiledModel};
use compiler::tensor::DType;
use compiler::tensor::fact::Fact;
use models::zoo::{build, to_bytes};
use profiler::cache::Cache;
use profiler::measure::{Measured, Model, Settings, measure};
use runtime::device::cpu::device::cpu;
use runtime::exec::sequence::Sequence;

/// The measured models: a perceptron, a CNN, a transformer.
const MODELS: [&str; 3] = ["mlp", "residual-cnn", "gpt"];

fn zoo(name: &str, batch: i64) -> Graph {
    let source = parse(to_bytes(&build(name, &Default::default()).unwrap().model).into(), None).unwrap();
    let graph = from_onnx(&source, name, &Options::default()).unwrap().graph;
    let sizes = symbols(&graph).into_iter().map(|symbol| (symbol, batch)).collect();
    bind(&graph, &sizes).unwrap()
}

/// Embedding, a layer, a tied head, and a mask computed from constants.
fn tied_graph() -> Graph {
    let mut graph = Graph::new("tied");
    let add = |graph: &mut Graph, op: Op, inputs: &[Value], source: &str| -> Value {
        let origin = Origin { source: source.into(), module: String::new() };
        Value { node: graph.add(op, inputs, &origin).unwrap(), output: 0 }
    };
    let parameter =
        |name: &str, shape: &[usize]| Op::Parameter(Parameter { name: name.into(), fact: Fact::of(DType::F32, shape) });
    let tokens = Op::Input(Input { name: "tokens".into(), fact: Fact::of(DType::I64, &[2, 5]) });
    let tokens = add(&mut graph, tokens, &[], "");
    let table = add(&mut graph, parameter("table", &[11, 8]), &[], "");
    let weight = add(&mut graph, parameter("weight", &[8, 8]), &[], "");
    let by_rows = |transpose_b| Op::MatMul(MatMul { transpose_a: false, transpose_b });
    let words = add(&mut graph, Op::Gather(Gather { axis: 0 }), &[table, tokens], "words");
    let hidden = add(&mut graph, by_rows(false), &[words, weight], "hidden");
    let constant = add(&mut graph, compiler::op::unary::scalar(DType::F32, 1.0), &[], "one");
    let minus = add(&mut graph, Op::Unary(Unary::Neg), &[constant], "minus");
    let shifted = add(&mut graph, Op::Binary(Binary::Add), &[hidden, minus], "moved");
    let active = add(&mut graph, Op::Unary(Unary::Tanh), &[shifted], "active");
    let logits = add(&mut graph, by_rows(true), &[active, table], "logits");
    graph.outputs.push(Output { name: "logits".into(), value: logits });
    graph
}

fn costs(graph: &Graph, training: Training) -> CostGraph {
    let costs = cost_graph(graph, &attribute(graph, training).unwrap());
    costs.check().unwrap();
    costs
}

fn model(sha256: &str) -> ProfiledModel {
    ProfiledModel { file: "model.onnx".into(), sha256: sha256.into(), ops: 0 }
}

fn analytic(graph: &Graph, training: Training, kind: &str) -> Profile {
    let attribution = attribute(graph, training).unwrap();
    let device = find(kind).unwrap().device();
    analytic::profile(graph, &attribution, &device, &Subject { model: model("ab"), micro_batch: 4, loss: None })
}

const CLASSES: Training = Training::Loss(Loss::CrossEntropy, Some(-1));

#[test]
fn a_tied_parameter_counts_once_and_constants_do_not_cross() {
    let costs = costs(&tied_graph(), Training::Gradient);
    let names: Vec<&str> = costs.ops.iter().map(|op| op.name.as_str()).collect();
    assert_eq!(names, ["words", "hidden", "moved", "active", "logits"]);
    let table = &costs.params[0];
    assert_eq!((table.name.as_str(), table.bytes), ("table", 11 * 8 * 4));
    assert_eq!(table.users, [OpId(0), OpId(4)]);
    let param_bytes: Vec<u64> = costs.ops.iter().map(|op| op.param_bytes).collect();
    assert_eq!(param_bytes, [352, 256, 0, 0, 0]);
    let tensors: Vec<(&str, u64, &[OpId])> =
        costs.tensors.iter().map(|t| (t.name.as_str(), t.bytes, t.consumers.as_slice())).collect();
    let next: Vec<[OpId; 1]> = (1..5).map(|i| [OpId(i)]).collect();
    let expected: [(&str, u64, &[OpId]); 5] = [
        ("words", 320, &next[0]),
        ("hidden", 320, &next[1]),
        ("moved", 320, &next[2]),
        ("active", 320, &next[3]),
        ("logits", 440, &[]),
    ];
    assert_eq!(tensors, expected);
    // Matrix products save their inputs, tanh its output; tokens and weights exist anyway.
    let saved: Vec<u64> = costs.ops.iter().map(|op| op.saved_bytes).collect();
    assert_eq!(saved, [320, 0, 0, 320, 0]);
}

#[test]
fn saved_bytes_are_what_the_runtime_keeps() {
    let graphs = MODELS.into_iter().map(|name| zoo(name, 4)).chain([tied_graph()]);
    for graph in graphs {
        for training in [CLASSES, Training::Loss(Loss::Mse, None)] {
            let Training::Loss(loss, axis) = training else { unreachable!() };
            let mut with_loss = graph.clone();
            attach(&mut with_loss, loss, axis).unwrap();
            let stage_of = order::numbered(&with_loss).into_iter().map(|id| (id, 0)).collect();
            let code =
                runtime::exec::compile::compile(&with_loss, &stage_of, 1, Some(LOSS), &*cpu()).unwrap().remove(0);
            let saved: usize = costs(&graph, training).ops.iter().map(|op| op.saved_bytes as usize).sum();
            let rounding = code.forward.steps.iter().map(|step| step.kernel.ops()).sum::<usize>() * ALIGNMENT;
            assert!(saved > 0, "{}: nothing is saved", graph.name);
            assert!(
                (saved..saved + rounding).contains(&code.kept_bytes),
                "{} {loss:?}: {saved} bytes are saved, {} are kept",
                graph.name,
                code.kept_bytes
            );
        }
    }
}

#[test]
fn every_kernel_that_runs_belongs_to_one_op() {
    for graph in MODELS.into_iter().map(|name| zoo(name, 4)) {
        let mut with_loss = graph.clone();
        attach(&mut with_loss, Loss::CrossEntropy, Some(-1)).unwrap();
        let stage_of = order::numbered(&with_loss).into_iter().map(|id| (id, 0)).collect();
        let code = runtime::exec::compile::compile(&with_loss, &stage_of, 1, Some(LOSS), &*cpu()).unwrap().remove(0);
        let attribution = attribute(&graph, CLASSES).unwrap();
        let count = |nodes: &[Vec<_>]| nodes.iter().map(Vec::len).sum::<usize>();
        let kernel_ops = |sequence: &Sequence| sequence.steps.iter().map(|step| step.kernel.ops()).sum::<usize>();
        assert_eq!(count(&attribution.forward_nodes), kernel_ops(&code.forward), "{}", graph.name);
        assert_eq!(count(&attribution.backward_nodes), kernel_ops(&code.backward), "{}", graph.name);
    }
}

#[test]
fn a_graph_that_cannot_be_trained_has_forward_costs_alone() {
    let mut graph = Graph::new("integers");
    let input = Op::Input(Input { name: "x".into(), fact: Fact::of(DType::I64, &[3]) });
    let x = Value { node: graph.add(input, &[], &Origin::default()).unwrap(), output: 0 };
    let y = graph.add(Op::Unary(Unary::Abs), &[x], &Origin::default()).unwrap();
    graph.outputs.push(Output { name: "y".into(), value: Value { node: y, output: 0 } });
    let profile = analytic(&graph, Training::Gradient, "cpu");
    assert_eq!((profile.ops[0].saved_bytes, profile.ops[0].bwd_us), (0, 0.0));
    assert!(profile.ops[0].fwd_us > 0.0);
    let none = attribute(&Graph::new("empty"), Training::Gradient);
    assert!(matches!(none, Err(AttributionError::Empty)));
    let source = parse(to_bytes(&build("mlp", &Default::default()).unwrap().model).into(), None).unwrap();
    let open = from_onnx(&source, "mlp", &Options::default()).unwrap().graph;
    assert!(matches!(attribute(&open, Training::Gradient), Err(AttributionError::Size { .. })));
}

#[test]
fn analytic_profiles_are_equal_readable_and_ordered_by_device() {
    for name in MODELS {
        let graph = zoo(name, 4);
        let profile = analytic(&graph, Training::Gradient, "h100");
        assert_eq!(profile, analytic(&graph, Training::Gradient, "h100"));
        assert_eq!(from_json(&to_json(&profile).unwrap()).unwrap(), profile);
        assert_eq!((profile.method, profile.device.name.as_str()), (Method::Analytic, "h100"));
        let (fast, slow) = (profile.sum(), analytic(&graph, Training::Gradient, "cpu").sum());
        assert!(fast.fwd_us > 0.0 && fast.bwd_us > fast.fwd_us, "{name}: {fast:?}");
        assert!(slow.fwd_us > 0.0);
        let inference = analytic(&graph, Training::No, "cpu");
        assert_eq!((inference.sum().fwd_us, inference.sum().bwd_us), (slow.fwd_us, 0.0));
        let inference = analytic(&graph, Training::No, "h100");
        // Without a backward, values that only fused ops read are not written.
        assert!(inference.sum().fwd_us <= fast.fwd_us && inference.sum().bwd_us == 0.0);
    }
}

#[test]
fn the_part_of_weights_is_what_no_earlier_op_waits_for() {
    for name in MODELS {
        let graph = zoo(name, 4);
        // Without tiles, equal work takes equal time.
        let profile = analytic(&graph, Training::Gradient, "cpu");
        let weight_part = |op: &OpProfile| op.weight_grad_us.unwrap();
        // The first op with parameters has no input gradient.
        let first = profile.ops.iter().find(|op| op.param_bytes > 0).unwrap();
        assert!(first.bwd_us > 0.0 && weight_part(first) == first.bwd_us, "{name}: {first:?}");
        // The other products with weights compute two gradients of equal work. Ops without weights compute only the
        // input gradient.
        let others = || profile.ops.iter().filter(|op| op.id > first.id);
        let products = |op: &&OpProfile| matches!(op.op.as_str(), "matmul" | "conv") && op.param_bytes > 0;
        assert!(others().filter(products).count() > 1, "{name}");
        for op in others().filter(products) {
            assert!((weight_part(op) / op.bwd_us - 0.5).abs() < 0.05, "{name}: {op:?}");
        }
        let plain = ["relu", "gelu", "softmax", "transpose", "slice", "reduce", "max_pool"];
        for op in others().filter(|op| plain.contains(&op.op.as_str())) {
            assert_eq!(weight_part(op), 0.0, "{name}: {op:?}");
        }
        let total = profile.weight_grad_us().unwrap();
        assert!(total > 0.0 && total < 0.6 * profile.sum().bwd_us, "{name}: {total} of {:?}", profile.sum());
        let mut filled = costs(&graph, Training::Gradient);
        fill(&mut filled, &profile, Some("ab")).unwrap();
        assert_eq!(filled.check(), Ok(()));
        assert!(
            filled.ops.iter().zip(&profile.ops).all(|(op, profile_op)| op.weight_grad_us == profile_op.weight_grad_us)
        );
    }
}

#[test]
fn a_profile_fills_its_own_model_only() {
    let graph = zoo("mlp", 4);
    let profile = analytic(&graph, Training::Gradient, "h100");
    let mut filled_costs = costs(&graph, Training::Gradient);
    fill(&mut filled_costs, &profile, Some("ab")).unwrap();
    assert_eq!(
        (filled_costs.ops[0].fwd_us, filled_costs.ops[0].bwd_us),
        (profile.ops[0].fwd_us, profile.ops[0].bwd_us)
    );
    let before = filled_costs.clone();
    assert!(matches!(fill(&mut filled_costs, &profile, Some("cd")), Err(FillError::Sha { .. })));
    let mut larger = costs(&zoo("mlp", 8), Training::Gradient);
    let error = fill(&mut larger, &profile, Some("ab")).unwrap_err();
    assert!(error.to_string().contains("micro-batch 4"), "{error}");
    let mut gpt_costs = costs(&zoo("gpt", 4), Training::Gradient);
    assert!(matches!(fill(&mut gpt_costs, &profile, None), Err(FillError::Count { .. })));
    let mut renamed = profile.clone();
    renamed.ops[1].name = "another\nname".into();
    let error = fill(&mut filled_costs, &renamed, None).unwrap_err();
    assert!(matches!(error, FillError::Op { id: 1, .. }) && !error.to_string().contains('\n'), "{error}");
    assert_eq!(filled_costs, before, "a refused profile changes nothing");
}

#[test]
fn thirty_thousand_ops_take_seconds() {
    let mut graph = Graph::new("deep");
    let origin = Origin::default();
    let value_of = |node| Value { node, output: 0 };
    let fact = Fact::of(DType::F32, &[4, 4]);
    let input = Op::Input(Input { name: "x".into(), fact: fact.clone() });
    let mut x = value_of(graph.add(input, &[], &origin).unwrap());
    for layer in 0..10_000 {
        let weight = Op::Parameter(Parameter { name: format!("w{layer}"), fact: fact.clone() });
        let weight = value_of(graph.add(weight, &[], &origin).unwrap());
        let product = Op::MatMul(MatMul { transpose_a: false, transpose_b: true });
        let y = value_of(graph.add(product, &[x, weight], &origin).unwrap());
        let y = value_of(graph.add(Op::Unary(Unary::Relu), &[y], &origin).unwrap());
        x = value_of(graph.add(Op::Binary(Binary::Add), &[x, y], &origin).unwrap());
    }
    graph.outputs.push(Output { name: "y".into(), value: x });
    let start = Instant::now();
    let profile = analytic(&graph, Training::Gradient, "a100");
    assert_eq!(profile.ops.len(), 30_000);
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
}

fn measure_graph(graph: &Graph, cache: Option<&Cache>, names: &mut Vec<String>) -> Measured {
    let settings = Settings { runs: 5, budget: Duration::from_millis(20), ..Settings::default() };
    let weights = BTreeMap::new();
    let model = Model { graph, training: CLASSES, model: model("ab"), loss: None, micro_batch: 4, weights: &weights };
    let mut count = 0;
    measure(&model, &cpu(), &settings, cache, &mut |progress| {
        assert_eq!(progress.done, count);
        count += 1;
        assert!(progress.done < progress.total);
        names.push(progress.name.to_string());
    })
    .unwrap()
}

#[test]
fn what_was_measured_once_is_not_measured_again() {
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::new(&folder.path().join("made on demand"));
    for name in MODELS {
        let graph = zoo(name, 4);
        let (mut first_messages, mut second_messages) = (Vec::new(), Vec::new());
        let first = measure_graph(&graph, Some(&cache), &mut first_messages);
        assert_eq!(first.cache_fault, None);
        assert!(first.measured > 0 && first_messages.len() == first.measured + 1, "{name}: {first_messages:?}");
        assert!(first.kernels >= first.measured, "kernels that models share are measured once");
        let second = measure_graph(&graph, Some(&cache), &mut second_messages);
        assert_eq!((second.measured, second_messages), (0, Vec::new()));
        assert_eq!(second.profile, first.profile);
        assert_eq!(from_json(&to_json(&first.profile).unwrap()).unwrap(), first.profile);
        let (sum, whole) = (first.profile.sum(), first.profile.whole.unwrap());
        assert!(whole.fwd_us > 0.0 && whole.bwd_us > 0.0 && sum.fwd_us > 0.0 && sum.bwd_us > 0.0);
        // Measured and analytic profiles agree on which ops have a weight gradient.
        let analytic_profile = analytic(&graph, CLASSES, "cpu");
        for (op, analytic_op) in first.profile.ops.iter().zip(&analytic_profile.ops) {
            let [part, messages] = [op, analytic_op].map(|op| op.weight_grad_us.unwrap());
            assert!(part <= op.bwd_us && (part > 0.0) == (messages > 0.0), "{name}: {op:?}, {analytic_op:?}");
        }
        fill(&mut costs(&graph, CLASSES), &first.profile, Some("ab")).unwrap();
    }
    // Corrupt cache entries are measured again.
    for file in std::fs::read_dir(cache.folder()).unwrap() {
        std::fs::write(file.unwrap().path(), "{\"schema\":").unwrap();
    }
    let mut messages = Vec::new();
    assert!(measure_graph(&zoo("mlp", 4), Some(&cache), &mut messages).measured > 0);
    assert!(!messages.is_empty());
}

#[test]
fn equal_ops_are_measured_once_and_say_so() {
    let measured = measure_graph(&zoo("gpt", 4), None, &mut Vec::new());
    let equal: Vec<_> = measured.profile.ops.iter().filter(|op| op.source.starts_with("equal to op ")).collect();
    assert!(equal.len() > 10, "{} ops of the second block equal those of the first", equal.len());
    for op in equal {
        let first: usize = op.source.rsplit(' ').next().unwrap().parse().unwrap();
        assert_eq!(measured.profile.ops[first].op, op.op);
    }
    let views = measured.profile.ops.iter().filter(|op| op.op == "reshape");
    assert!(views.clone().count() > 0 && views.clone().all(|op| op.source == "view" && op.fwd_us == 0.0));
}

#[test]
fn a_model_that_computes_its_own_loss_is_measured_whole() {
    let mut graph = zoo("mlp", 4);
    let loss = attach(&mut graph, Loss::Mse, None).unwrap();
    graph.outputs = vec![Output { name: "loss".into(), value: loss }];
    let weights = BTreeMap::new();
    let settings = Settings { runs: 3, budget: Duration::from_millis(20), ..Settings::default() };
    for training in [Training::Gradient, Training::Loss(Loss::Output, None), Training::No] {
        let model =
            Model { graph: &graph, training, model: model("ab"), loss: None, micro_batch: 4, weights: &weights };
        let profile = measure(&model, &cpu(), &settings, None, &mut |_| {}).unwrap().profile;
        let (sum, whole) = (profile.sum(), profile.whole.unwrap());
        assert!(whole.fwd_us > 0.0 && sum.fwd_us > 0.0);
        assert_eq!(sum.bwd_us > 0.0, training != Training::No, "{training:?}");
    }
}

#[test]
fn a_cache_that_cannot_be_written_stops_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a file, no folder");
    std::fs::write(&file, "").unwrap();
    let measured = measure_graph(&zoo("mlp", 4), Some(&Cache::new(&file)), &mut Vec::new());
    assert!(measured.cache_fault.unwrap().contains("a file, no folder"));
    assert!(measured.profile.sum().fwd_us > 0.0);
}
