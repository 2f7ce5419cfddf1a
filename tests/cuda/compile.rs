//! Compiles every kernel source with NVRTC for several architectures; no GPU is needed. No kernel may spill registers.

use super::kernel_tests;
use compiler::op::table::rule;
use compiler::op::*;
use compiler::tensor::DType;
use compiler::tensor::dim::Dim;
use compiler::tensor::fact::Fact;
use runtime::device::api::Elementwise;
use runtime::device::chain::{Link, Operand};
use runtime::device::cuda::chain;
use runtime::device::cuda::compile::{Architecture, CompileFault, compile, cubin};
use runtime::device::cuda::launch_plan::LaunchPlan;
use runtime::device::cuda::library::CudaLibrary;
use runtime::device::cuda::many;
use runtime::device::cuda::prelude::PRELUDE;
use runtime::device::cuda::{optimizer, verbs};
use runtime::device::layout::TensorLayout;
use runtime::device::optimizer::UpdateRule;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

/// Kernels per compilation, which share the prelude.
const TOGETHER: usize = 64;

/// Of the samples of architectures besides the first, one in so many is compiled. Instructions differ, not sources.
const SAMPLED: usize = 8;

/// Shapes at which kernels may need more registers than at those of the samples: wide heads, and long rows.
fn large_launch_plans() -> Vec<LaunchPlan> {
    let window = Window { strides: vec![2, 2], pads_begin: vec![1, 1], pads_end: vec![1, 1], dilations: vec![1, 1] };
    let plain = Attention { scale: 0.125, causal: true, empty: EmptyRow::Nan, dropout: None, part: None };
    let dropout = Some(Dropout { ratio: 0.1, stream: 3 });
    let conv = Op::Conv(Conv { window: window.clone(), groups: 1 });
    let spatial = vec![Dim::from(224_usize); 2];
    type Inputs = Vec<(DType, Vec<usize>)>;
    let mut cases: Vec<(Op, Inputs)> = Vec::new();
    for dtype in [DType::F32, DType::F64, DType::Bf16] {
        let inputs_of = |shapes: &[&[usize]]| shapes.iter().map(|shape| (dtype, shape.to_vec())).collect::<Vec<_>>();
        let sums = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let product = MatMul { transpose_a: false, transpose_b: true };
        cases.push((Op::MatMul(product), inputs_of(&[&[8, 12, 1024, 64], &[8, 12, 1024, 64]])));
        cases.push((conv.clone(), inputs_of(&[&[32, 3, 224, 224], &[64, 3, 7, 7]])));
        let grad = ConvInputGrad { window: window.clone(), groups: 1, spatial: spatial.clone() };
        cases.push((Op::ConvInputGrad(grad), inputs_of(&[&[32, 64, 110, 110], &[64, 3, 7, 7]])));
        let grad = ConvWeightGrad { window: window.clone(), groups: 1, kernel: vec![7, 7] };
        cases.push((Op::ConvWeightGrad(grad), inputs_of(&[&[32, 64, 110, 110], &[32, 3, 224, 224]])));
        for (keys, width) in [(1024, 64), (1024, 128), (16, 128), (16, 256)] {
            for op in [plain, Attention { causal: false, dropout, ..plain }] {
                let (q, kv): ([usize; 4], [usize; 4]) = ([4, 16, keys, width], [4, 4, keys, width]);
                let counter = op.dropout.map(|_| (DType::I64, vec![])).into_iter();
                let forward = inputs_of(&[&q, &kv, &kv]).into_iter().chain(counter.clone()).collect();
                cases.push((Op::Attention(op), forward));
                let mut inputs = inputs_of(&[&q, &q, &kv, &kv, &q]);
                inputs.push((sums, q[..3].to_vec()));
                cases.push((
                    Op::AttentionGrad(AttentionGrad { forward: op }),
                    inputs.into_iter().chain(counter).collect(),
                ));
            }
        }
    }
    let plan = |(op, inputs): (Op, Inputs)| {
        let facts: Vec<Fact> = inputs.iter().map(|(dtype, shape)| Fact::of(*dtype, shape)).collect();
        let outputs = rule(&op).infer(&facts.iter().collect::<Vec<_>>()).unwrap();
        let layouts = |facts: &[Fact]| facts.iter().map(TensorLayout::of).collect::<Vec<_>>();
        LaunchPlan::new(&op, &layouts(&facts), &layouts(&outputs)).unwrap()
    };
    cases.into_iter().map(plan).collect()
}

/// Kernels that are no ops: sums, norms and optimizer steps.
fn verb_texts() -> Vec<Arc<str>> {
    let floats = [DType::F32, DType::F64, DType::F16, DType::Bf16];
    let mut texts: Vec<Arc<str>> = floats.iter().flat_map(|&a| floats.map(|b| verbs::cast(a, b))).collect();
    for dtype in [DType::F32, DType::F64] {
        let (average, back) = (Elementwise::AverageUpdate { keep: 0.5 }, Elementwise::SetBack { steps: 1 });
        let verbs = [Elementwise::Accumulate, Elementwise::Add, Elementwise::Scale(2.0), average, back];
        texts.extend(verbs.map(|verb| verbs::elementwise(verb, dtype)));
        texts.extend([verbs::squares(dtype), many::moving_averages(dtype)]);
    }
    texts.extend([1, 2, 4, 8].map(many::pack));
    let (learning_rate, epsilon, weight_decay) = (0.1, 1e-8, 0.01);
    let sgd = |momentum, nesterov| UpdateRule::Sgd { learning_rate, momentum, nesterov, weight_decay };
    let adam = |decoupled| UpdateRule::Adam { learning_rate, betas: (0.9, 0.999), epsilon, weight_decay, decoupled };
    let rmsprop = |momentum| UpdateRule::RmsProp { learning_rate, alpha: 0.9, epsilon, weight_decay, momentum };
    let adagrad = UpdateRule::Adagrad { learning_rate, decay: 0.1, epsilon, weight_decay };
    let sgds = [sgd(0.0, false), sgd(0.9, false), sgd(0.9, true)];
    for rule in sgds.into_iter().chain([adam(false), adam(true), rmsprop(0.0), rmsprop(0.9), adagrad]) {
        for dtype in [DType::F32, DType::F64] {
            let factors = optimizer::step_factors(&rule, (1.0, 1, 1.0));
            for rounded in [None, Some(DType::Bf16), Some(DType::F16)] {
                texts.push(optimizer::step(&rule, dtype, rounded, &factors));
            }
            let factors = optimizer::predict_factors(&rule, (1, 1, 1.0));
            texts.extend(factors.map(|factors| optimizer::predict(&rule, dtype, &factors)));
        }
    }
    texts
}

/// A chain of ops on two tensors and a row.
fn chain_texts() -> Vec<Arc<str>> {
    let layout = |dtype: DType, shape: &[usize]| TensorLayout::of(&Fact::of(dtype, shape));
    let texts = [DType::F32, DType::F64, DType::F16, DType::Bf16].into_iter().flat_map(|dtype| {
        let result = layout(dtype, &[64, 512, 1024]);
        let inputs = [result.clone(), layout(dtype, &[1024]), result.clone()];
        let ops = [Op::Binary(Binary::Add), Op::Unary(Unary::Gelu), Op::Binary(Binary::Mul), Op::Unary(Unary::Tanh)];
        let links = (0..24).map(|n| {
            let op = ops[n % 4].clone();
            let first = if n == 0 { Operand::Input(0) } else { Operand::Result(n - 1) };
            let second = [Operand::Input(1), Operand::Input(2), Operand::Result(n / 2)][n % 3];
            let operands = if matches!(op, Op::Unary(_)) || n == 0 { 1 } else { 2 };
            let operands = if n == 0 { vec![first, Operand::Input(1)] } else { [first, second][..operands].to_vec() };
            Link { op, operands, result: result.clone(), is_written: n % 6 == 5, further_results: Vec::new() }
        });
        chain::kernel(&links.collect::<Vec<_>>(), &inputs).unwrap().launches
    });
    texts.map(|launch| launch.text).collect()
}

/// What the compiler reports about kernels.
#[derive(Default)]
struct Usage {
    kernels: usize,
    most_registers: u32,
    /// Kernels with spills, and the report.
    spills: Vec<(String, String)>,
}

impl Usage {
    /// Reads the messages of `--ptxas-options=-v`.
    fn add(&mut self, log: &str) {
        let mut kernel = "";
        for line in log.lines() {
            let number = |after: &str| line.split_once(after)?.0.split_whitespace().next_back()?.parse::<u32>().ok();
            if let Some((_, rest)) = line.split_once("Compiling entry function '") {
                kernel = rest.split('\'').next().unwrap_or_default();
                self.kernels += 1;
            }
            if [" bytes spill stores", " bytes spill loads"].into_iter().any(|what| number(what).is_some_and(|n| n > 0))
            {
                self.spills.push((kernel.to_string(), line.trim().to_string()));
            }
            self.most_registers = self.most_registers.max(number(" registers").unwrap_or(0));
        }
    }
}

/// Compiles kernels together; a spilling one is named by its index.
fn usage(texts: &[Arc<str>], architecture: Architecture, options: &[&str]) -> Result<Usage, CompileFault> {
    let mut usage = Usage::default();
    for (n, group) in texts.chunks(TOGETHER).enumerate() {
        let mut text = format!("{PRELUDE}\n");
        for (i, kernel) in group.iter().enumerate() {
            let body = kernel.replace(PRELUDE, "").replace("extern \"C\" ", "");
            text.push_str(&format!("namespace k{} {{\n{body}\n}}\n", n * TOGETHER + i));
        }
        usage.add(&compile(&text, architecture, &[&["--ptxas-options=-v"], options].concat())?.log);
    }
    Ok(usage)
}

/// The index in a name such as `_ZN3k126kernelEPKf`: after the length of `k12`.
fn index(name: &str) -> usize {
    let (length, rest) = name.trim_start_matches("_ZN").split_once('k').unwrap();
    rest[..length.parse::<usize>().unwrap() - 1].parse().unwrap()
}

#[test]
fn every_text_compiles_without_spills_for_devices_that_are_not_here() {
    let Ok(nvrtc) = CudaLibrary::Nvrtc.find() else {
        println!("skipped: no libnvrtc");
        return;
    };
    let large = large_launch_plans().into_iter().flat_map(|plan| plan.launches).map(|launch| launch.text);
    let always: BTreeSet<Arc<str>> =
        large.chain(verb_texts()).chain(chain_texts()).chain(super::tails::texts()).collect();
    let always: Vec<Arc<str>> = always.into_iter().collect();
    // Products on tensor cores do not compile with so few.
    let control_texts: Vec<Arc<str>> =
        always.iter().filter(|text| !text.contains("mma.sync")).take(TOGETHER).cloned().collect();
    let control = usage(&control_texts, Architecture { major: 8, minor: 0 }, &["--maxrregcount=16"]).unwrap();
    if control.kernels == 0 {
        println!("skipped: {} reports no registers", nvrtc.path.display());
        return;
    }
    assert!(!control.spills.is_empty(), "no kernel spills with 16 registers");
    let kernel_tests = kernel_tests();
    let samples: BTreeSet<Arc<str>> =
        kernel_tests.iter().flat_map(|q| &q.case.launch_plan.launches).map(|launch| launch.text.clone()).collect();
    // Kernels that differ only in numbers compile alike. `PIPEC_LARGE` tests all, for every architecture.
    let is_large = std::env::var_os("PIPEC_LARGE").is_some();
    let shape = |text: &str| text.chars().filter(|c| !c.is_ascii_digit()).collect::<String>();
    let mut shapes = BTreeSet::new();
    let samples: Vec<Arc<str>> = samples.into_iter().filter(|text| is_large || shapes.insert(shape(text))).collect();
    println!("through {}", nvrtc.path.display());
    for (major, step) in [(8, 1), (9, SAMPLED), (10, SAMPLED)] {
        let architecture = Architecture { major, minor: 0 };
        let selected = samples.iter().step_by(if is_large { 1 } else { step }).cloned();
        let texts: Vec<Arc<str>> = always.iter().cloned().chain(selected).collect();
        let start = Instant::now();
        let usage = match usage(&texts, architecture, &[]) {
            Ok(usage) => usage,
            Err(CompileFault::Old { .. }) => {
                println!("skipped: this libnvrtc is too old for {architecture}");
                continue;
            }
            Err(fault) => panic!("{fault}"),
        };
        let (max_registers, spills, seconds) =
            (usage.most_registers, usage.spills.len(), start.elapsed().as_secs_f64());
        println!(
            "{architecture}: {} kernels in {seconds:.1} s, at most {max_registers} registers, {spills} spill",
            texts.len()
        );
        assert_eq!(usage.kernels, texts.len(), "{architecture}");
        if let Some((kernel, line)) = usage.spills.first() {
            panic!("{architecture}: {line}\n{}", texts[index(kernel)]);
        }
    }
    // One kernel as a device gets it.
    cubin(&always[0], Architecture { major: 9, minor: 0 }).unwrap();
}
