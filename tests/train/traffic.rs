//! Memory traffic of a training step in bf16, as compiled for a GPU, against the least that the cost model allows: fused
//! kernels that read and write each tensor once ([`compiler::pass::analytic::fusion`]).
//!
//! Each kernel is counted as if it read its operands once and wrote its results once. Not counted are scratch memory,
//! copies of padded products, caches, and second passes: of every batch norm, and of rows that do not fit in registers.
//! The optimizer step is part of both sides.

use crate::support::simulated_gpus::{driver, on_simulated_gpus};
use compiler::graph::Graph;
use compiler::graph::bind::{bind, symbols};
use compiler::graph::order;
use compiler::import::import::{Options as Import, load};
use compiler::op::{Op, Value};
use compiler::pass::analytic::fusion::traffic;
use compiler::pass::attribution::{Training, attribute};
use compiler::pass::loss::{LOSS, Loss, attach};
use compiler::pass::mixed_precision::mixed;
use compiler::tensor::DType;
use compiler::tensor::dim::Bindings;
use models::zoo::{Options, build, to_bytes};
use runtime::device::open;
use runtime::exec::compile::compile;
use runtime::exec::sequence::{Sequence, Slot, Step, TensorAddress};
use runtime::exec::stage_code::StageCode;
use runtime::train::run::placement;
use std::collections::{BTreeMap, HashSet};

/// Most traffic of a step, of the least.
const LIMIT: f64 = 1.15;

struct Model {
    name: &'static str,
    batch: i64,
    /// Tensors of optimizer state of each parameter.
    states: usize,
}

fn build_graph(model: &Model) -> Graph {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    let options = Options { structure: true, ..Options::default() };
    std::fs::write(&path, to_bytes(&build(model.name, &options).unwrap().model)).unwrap();
    let graph = load(&path, &Import::default()).unwrap().graph;
    let dims: Bindings = symbols(&graph).into_iter().map(|symbol| (symbol, model.batch)).collect();
    mixed(&bind(&graph, &dims).unwrap(), DType::Bf16).unwrap()
}

/// Bytes that one optimizer step reads and writes: the gradient, master weights, states, and the rounded weights.
fn optimizer_bytes(code: &StageCode, states: usize) -> f64 {
    let parameter_bytes = |bytes: usize, dtype: DType| {
        let elements = (bytes / dtype.size()) as f64;
        elements * (4.0 + 8.0 + 8.0 * states as f64 + if dtype == DType::F32 { 0.0 } else { 2.0 })
    };
    code.parameters.iter().map(|named| parameter_bytes(named.bytes, named.fact.dtype)).sum()
}

/// Bytes of the gradient sum of a term.
fn sum_bytes(code: &StageCode, term: usize) -> usize {
    let parameter = &code.parameters[code.gradient_terms[term].parameter];
    parameter.bytes / parameter.fact.dtype.size() * size_of::<f32>()
}

/// Ops that read only as much of their first operand as they write.
fn is_partial_read(name: &str) -> bool {
    ["gather", "slice"].contains(&name)
}

fn step_bytes(code: &StageCode, step: &Step) -> usize {
    let mut read: Vec<TensorAddress> = Vec::new();
    for input in &step.inputs {
        if !read.contains(input) {
            read.push(*input);
        }
    }
    let written: usize = step.outputs.iter().map(|output| output.bytes).sum();
    let summed: usize = step.adds_to.iter().map(|term| sum_bytes(code, *term)).sum();
    let read: usize = match is_partial_read(step.kernel.name()) {
        true => written + step.inputs[1..].iter().map(|input| input.bytes).sum::<usize>(),
        false => read.iter().map(|input| input.bytes).sum(),
    };
    // The first term of a sum in `f32` is written there. One in 16 bits is read again, to write its sum.
    let is_separate = |term: &&usize| !matches!(code.gradient_terms[**term].address.slot, Slot::Gradient { .. });
    let separate_terms = step.terms.iter().filter(is_separate);
    let added: usize =
        separate_terms.map(|term| sum_bytes(code, *term) + code.gradient_terms[*term].address.bytes).sum();
    read + written + summed + added
}

/// Bytes that a step of training moves, and the least.
fn measure_traffic(model: &Model, bytes_by_kernel: &mut BTreeMap<&'static str, usize>) -> [f64; 2] {
    let graph = build_graph(model);
    let mut with_loss = graph.clone();
    attach(&mut with_loss, Loss::CrossEntropy, None).unwrap();
    let stage_of_node = placement(&graph, &with_loss, &vec![0; order::numbered(&graph).len()]);
    let device = open("cuda:0").unwrap();
    let code = compile(&with_loss, &stage_of_node, 1, Some(LOSS), &*device).unwrap().remove(0);
    let mut moved_bytes = optimizer_bytes(&code, model.states);
    for Sequence { steps, .. } in [&code.forward, &code.backward, &code.weight] {
        for step in steps {
            let bytes = step_bytes(&code, step);
            *bytes_by_kernel.entry(step.kernel.name()).or_default() += bytes;
            moved_bytes += bytes as f64;
        }
    }
    let attribution = attribute(&graph, Training::Loss(Loss::CrossEntropy, None)).unwrap();
    let fusion_bytes = |graph: &Graph, saved: &HashSet<Value>| -> f64 {
        let size = |value: Value| graph.fact(value).bytes().unwrap() as f64;
        let unread = graph.ids().filter(|id| matches!(graph.node(*id).op, Op::Gather(_))).map(|id| {
            let [table, part] = [graph.inputs(id)[0], graph.values(id)[0]];
            size(table) - size(part)
        });
        traffic(graph, saved).values().map(|entry| entry.bytes).sum::<f64>() - unread.sum::<f64>()
    };
    let backward = attribution.backward.as_ref().unwrap();
    // Gradients are written as sums in `f32`.
    let narrow = code.parameters.iter().filter(|named| named.fact.dtype != DType::F32);
    let widened: usize = narrow.map(|named| named.bytes).sum();
    let forward = fusion_bytes(&attribution.forward, &attribution.saved);
    let minimum_bytes =
        forward + fusion_bytes(backward, &HashSet::new()) + widened as f64 + optimizer_bytes(&code, model.states);
    [moved_bytes, minimum_bytes]
}

/// Counts in a process whose GPU is simulated: `a_step_moves_few_bytes` starts it.
#[test]
fn bytes_of_a_step() {
    if std::env::var("PIPEC_TEST_DEVICES").as_deref() != Ok("cuda:0") {
        return;
    }
    let mut models = vec![Model { name: "gpt", batch: 2, states: 2 }, Model { name: "resnet18", batch: 2, states: 1 }];
    if std::env::var_os("PIPEC_LARGE").is_some() {
        models = vec![
            Model { name: "gpt2", batch: 2, states: 2 },
            Model { name: "bert-base", batch: 4, states: 2 },
            Model { name: "resnet50", batch: 16, states: 1 },
            Model { name: "vgg16", batch: 16, states: 1 },
        ];
    }
    let mut ratios = Vec::new();
    for model in &models {
        let mut bytes_by_kernel = BTreeMap::new();
        let [moved_bytes, minimum_bytes] = measure_traffic(model, &mut bytes_by_kernel);
        println!(
            "{}: {:.3} GB moved, {:.3} of the least {:.3} GB",
            model.name,
            moved_bytes / 1e9,
            moved_bytes / minimum_bytes,
            minimum_bytes / 1e9
        );
        let mut bytes_by_kernel: Vec<_> = bytes_by_kernel.into_iter().collect();
        bytes_by_kernel.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        bytes_by_kernel.iter().take(10).for_each(|(op, bytes)| println!("  {op}: {:.3} GB", *bytes as f64 / 1e9));
        ratios.push((model.name, moved_bytes / minimum_bytes));
    }
    // Less than the least would be an error of the count.
    assert!(ratios.iter().all(|(_, ratio)| (0.98..=LIMIT).contains(ratio)), "{ratios:?}");
}

#[test]
fn a_step_moves_few_bytes() {
    let Some(driver) = driver() else { return };
    let mut command = on_simulated_gpus(std::env::current_exe().unwrap(), driver);
    command.args(["traffic::bytes_of_a_step", "--exact", "--nocapture"]);
    command.env("PIPEC_TEST_DEVICES", "cuda:0").env("PIPEC_SIM_COMPUTE", "0").env("PIPEC_SIM_MEMORY", "80000000000");
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    println!("{text}");
    assert!(output.status.success(), "{text}");
    assert!(text.contains("of the least"), "{text}");
}
