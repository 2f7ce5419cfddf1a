//! Predictions against published training runs.
//!
//! ```text
//! cargo bench --bench published                    the tables on standard output
//! PIPEC_TABLES=1 cargo bench --bench published     also into benches/results/published.md
//! cargo bench --bench published -- --plans         also pipec's own plan of every row, which takes minutes
//! cargo bench --bench published -- sc21            only rows with "sc21" in their name
//! cargo bench --bench published -- --rows FILE     newer runs from another file
//! ```
//!
//! Each row pins the published configuration: stages, replicas, tensor-parallel degree, chunks, micro-batch and
//! recomputation. What a source leaves open (micro-batch, chunks, recomputation) takes the fastest prediction that fits in
//! memory. The error is that of the predicted time against the measured one.
//!
//! Recomputation is that of the frameworks, block by block, in time and memory. Experts are distributed over a
//! tensor-parallel group, which has as many micro-batches in common as the group has devices.
//!
//! | column | |
//! | --- | --- |
//! | configuration | stages × replicas × tensor-parallel degree, chunks, samples per micro-batch |
//! | own plan | predicted time of pipec's own plan for the same model, batch and devices, which fits in memory |
//! | memory | predicted peak of the fullest device, and whether it fits |
//! | regret | measured time of the configuration predicted fastest, over the best measured time |

#[path = "published/rows.rs"]
mod rows;

use compiler::cluster::{Bytes, BytesPerSecond, Cluster, Device, device};
use compiler::pass::analytic::matmul::Product;
use compiler::pass::analytic::{ATTENTION, STREAMING};
use compiler::plan::StageMemory;
use compiler::plan::device_memory;
use compiler::plan::problem::{Recomputation, Target};
use compiler::plan::schedule::Schedule;
use compiler::plan::zero::Zero;
use compiler::profile::cost_graph::CostGraph;
use compiler::profile::precision::Precision;
use compiler::profile::shared::{ActivationSharding, TensorParallelCosts};
use models::choice::Setting;
use models::zoo::{self, Options};
use pipec::cluster::{self, ClusterRequest};
use pipec::costs::{Costs, PrecisionChoice, Times, assemble};
use pipec::error::Error;
use pipec::events::Silent;
use pipec::loss::CountedLoss;
use pipec::model;
use pipec::plan::configuration_search;
use pipec::plan::from_costs::solve_with_groups;
use pipec::plan::optimizer::Optimizer;
use pipec::plan::request::{PlanOptions, PlanRequest, ScheduleChoice};
use pipec::plan::tensor_parallel::{GroupLayout, TensorParallel, group_costs};
use pipec::plan::variant::SizedCosts;
use pipec::plan::zero::ZeroStage;
use rows::{Recompute, Row, newer_runs, runs, vtrain};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

/// Bus bandwidth of NCCL's all-reduce over NVLink, as a fraction of the rated bandwidth: 235 of 300 GB/s on eight A100
/// (nccl-tests).
const NVLINK: f64 = 0.78;

/// The same over InfiniBand: 21 of 25 GB/s with HDR.
const NETWORK: f64 = 0.85;

/// Hardware of a run: the device, and the rated bandwidth per device of NVLink and of the network, in GB/s.
struct Hardware {
    device: Device,
    nvlink: f64,
    network: f64,
    /// Devices that NVLink connects.
    server: u64,
    attention: Software,
}

/// How the software of a run computes attention.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Software {
    /// In parts, as before FlashAttention (2022).
    Parts,
    /// As one kernel of FlashAttention's first version, which reaches this fraction of the peak.
    FirstFlash(f64),
    /// As one kernel of cuDNN or a later version.
    Flash,
}

/// FlashAttention's first version reaches 25 to 40 % of the A100's peak (Dao, FlashAttention-2, 2023, section 1).
const FIRST_FLASH_A100: f64 = 0.33;

/// On the H100 it gains what its second version gains there without new instructions: 335 TFLOP/s instead of 190 (the
/// same, figures 4 and 7).
const FIRST_FLASH_H100: f64 = 0.33 * 312.0 / 989.0 * 335.0 / 190.0;

fn hardware(row: &Row) -> Option<Hardware> {
    let device_named = |kind: &str| device::find(kind).map(device::Kind::device);
    let h100 =
        Hardware { device: device_named("h100")?, nvlink: 450.0, network: 50.0, server: 8, attention: Software::Flash };
    match row.gpu.as_str() {
        // vTrain's cluster has 800 Gbit/s per server; that of Megatron-LM 1,600.
        "a100-80" => {
            let network = if row.id.starts_with("vtm") { 12.5 } else { 25.0 };
            Some(Hardware {
                device: device_named("a100")?,
                nvlink: 300.0,
                network,
                server: 8,
                attention: Software::Parts,
            })
        }
        // MPT's runs of 2023.
        "A100 80GB" => {
            let attention = Software::FirstFlash(FIRST_FLASH_A100);
            Some(Hardware { device: device_named("a100")?, nvlink: 300.0, network: 25.0, server: 8, attention })
        }
        "H100 80GB" => Some(Hardware { attention: Software::FirstFlash(FIRST_FLASH_H100), ..h100 }),
        gpu if gpu.starts_with("A100-80GB SXM, 8 a node, 4x100 Gbit/s") => Some(Hardware {
            device: device_named("a100")?,
            nvlink: 300.0,
            network: 6.25,
            server: 8,
            attention: Software::Flash,
        }),
        "h100-sxm" | "DGX-H100" => Some(h100),
        gpu if gpu.starts_with("H100 SXM 80GB") => Some(h100),
        // The memory is that of the source. The lower clock at 500 W is not modelled.
        gpu if gpu.starts_with("h100-96") => {
            let memory_bandwidth = BytesPerSecond(2.4e12);
            Some(Hardware { device: Device { memory: Bytes(96_000_000_000), memory_bandwidth, ..h100.device }, ..h100 })
        }
        "gb200" => Some(Hardware { device: device_named("gb200")?, nvlink: 900.0, server: 64, ..h100 }),
        _ => None,
    }
}

/// The levels of a run. A tensor-parallel group larger than a server makes a level of its own: its ring crosses the
/// network over all ports of a server at the same time.
fn levels(row: &Row, hardware: &Hardware) -> String {
    let (nvlink, network) = (hardware.nvlink * NVLINK, hardware.network * NETWORK);
    let inner = row.group().max(hardware.server).min(row.gpus);
    let is_larger = row.group() > hardware.server;
    let bandwidth = if is_larger { nvlink.min(network * hardware.server as f64) } else { nvlink };
    match row.gpus / inner {
        1 => format!("{inner}:{bandwidth}GB/s"),
        servers => format!("{inner}:{bandwidth}GB/s,{servers}:{network}GB/s"),
    }
}

/// Replaces attention in one kernel by its parts, as software before FlashAttention ran it: two batched products, a fused
/// softmax with scale and mask, and dropout. Scores have two bytes, the dropout mask one.
///
/// Unless they are recomputed, the softmax, its mask and its result after dropout are saved (Korthikanti et al., 2022,
/// section 4.1).
fn split_attention(graph: &mut CostGraph, row: &Row, device: &Device, micro_batch: u64, degree: u64) {
    let (heads, sequence) = ((micro_batch * row.heads / degree) as f64, row.sequence as f64);
    let width = row.hidden as f64 / row.heads as f64;
    let multiprocessors = device.multiprocessors.expect("the device is a GPU");
    let rate = device.matmul_efficiency.expect("the device is a GPU") * device.peak_flops.f16;
    let product = |n: f64, k: f64| {
        let bytes = 2.0 * heads * sequence * (n + k) + 2.0 * heads * n * k;
        Product { batch: heads, m: sequence, n, k }.seconds(device, multiprocessors, rate, bytes) + device.launch.0
    };
    let scores = heads * sequence * sequence;
    let stream = |bytes: f64| bytes * scores / (STREAMING * device.memory_bandwidth.0) + device.launch.0;
    let products = product(sequence, width) + product(width, sequence);
    for op in graph.ops.iter_mut().filter(|op| op.op == "attention") {
        op.fwd_us = (products + stream(4.0) + stream(5.0)) * 1e6;
        op.bwd_us = (2.0 * products + stream(5.0) + stream(6.0)) * 1e6;
        op.weight_grad_us = Some(0.0);
        let bytes = (5.0 * scores) as u64;
        let bytes_field =
            if row.recompute == Some(Recompute::Attention) { &mut op.workspace_bytes } else { &mut op.saved_bytes };
        *bytes_field += bytes;
    }
}

/// The costs with the attention that the software of the run had.
fn apply_software(
    costs: &mut Costs,
    shared: &mut [TensorParallelCosts],
    row: &Row,
    hardware: &Hardware,
    micro_batch: u64,
) {
    if let Software::FirstFlash(fraction) = hardware.attention {
        let device = &hardware.device;
        let rate = device.matmul_efficiency.expect("the device is a GPU") * ATTENTION;
        let graphs = shared.iter_mut().map(|shared| &mut shared.graph).chain([&mut costs.graph]);
        for op in graphs.flat_map(|graph| &mut graph.ops).filter(|op| op.op == "attention") {
            op.fwd_us *= rate / fraction;
            op.bwd_us *= rate / fraction;
        }
    } else if hardware.attention == Software::Parts {
        split_attention(&mut costs.graph, row, &hardware.device, micro_batch, 1);
        for shared in shared {
            split_attention(&mut shared.graph, row, &hardware.device, micro_batch, u64::from(shared.devices));
        }
    }
}

/// Recomputes ops block by block: their forward is added to their backward, and they save nothing. While a block runs
/// backward, what its ops would save is in memory once.
fn recompute(graph: &mut CostGraph, recomputation: Recompute) {
    // Products of the block so far, its last op, and its recomputed bytes.
    let mut blocks: BTreeMap<String, (u32, usize, u64)> = BTreeMap::new();
    for (at, op) in graph.ops.iter().enumerate() {
        if let Some(block) = block(&op.module) {
            blocks.entry(block.to_string()).or_default().1 = at;
        }
    }
    let mut is_repeated = vec![false; graph.ops.len()];
    for (at, op) in graph.ops.iter_mut().enumerate() {
        let Some((products, last, bytes)) = block(&op.module).and_then(|block| blocks.get_mut(block)) else { continue };
        *products += u32::from(op.op == "matmul");
        is_repeated[at] = match recomputation {
            Recompute::None => false,
            Recompute::Full => true,
            Recompute::Attention => op.op == "attention",
            Recompute::Operations if op.op == "matmul" => products.is_multiple_of(2),
            Recompute::Operations => op.op != "attention",
        };
        if is_repeated[at] {
            op.weight_grad_us = Some(op.weight_part_us());
            op.bwd_us += op.fwd_us;
            // The next block keeps its input.
            if at != *last && recomputation != Recompute::Attention {
                *bytes += std::mem::take(&mut op.saved_bytes);
                op.unsaved = true;
            }
        }
    }
    for (op, is_repeated) in graph.ops.iter_mut().zip(is_repeated) {
        if let (Some(block), true) = (block(&op.module), is_repeated) {
            op.workspace_bytes += blocks[block].2;
        }
    }
}

/// The block of a module: its path up to the first number. Embedding and head are in no block.
fn block(module: &str) -> Option<&str> {
    let mut end = 0;
    for part in module.split('.') {
        end += part.len();
        if !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()) {
            return Some(&module[..end]);
        }
        end += 1;
    }
    None
}

/// The costs of a row's model on its cluster.
fn costs(row: &Row, hardware: &Hardware, micro_batch: u64, is_tied: bool) -> Costs {
    let name = row.zoo();
    let options = Options { structure: true, ..Options::default() }
        .number("layers", row.layers as usize)
        .number("hidden", row.hidden as usize)
        .number("heads", row.heads as usize)
        .number("context", row.sequence as usize)
        .number("vocabulary", row.vocabulary as usize);
    let options = match name {
        "gpt" => {
            let dropout = if hardware.attention == Software::Parts { 0.1 } else { 0.0 };
            options.with("tied", Setting::Truth(is_tied)).with("dropout", Setting::Fraction(dropout))
        }
        _ => options.number("kv-heads", row.key_heads as usize).number("ffn", row.ffn as usize),
    };
    let size = if name == "gpt-oss" { "gpt-oss-120b" } else { name };
    let built = zoo::build(size, &options).expect("the zoo has such a model");
    let loaded = model::of_zoo(name, zoo::to_bytes(&built.model)).expect("what the zoo writes can be read");
    let request = ClusterRequest { levels: Some(levels(row, hardware)), ..ClusterRequest::default() };
    let mut cluster: Cluster = cluster::cluster(&request, None).expect("the levels can be read");
    cluster.device = hardware.device.clone();
    let choice = PrecisionChoice::Given(Precision::from_name(&row.precision).expect("the precision is known"));
    let times = Times::Analytic(hardware.device.clone());
    assemble(&loaded, micro_batch, cluster, times, choice, CountedLoss::Default).expect("the model has costs")
}

/// A prediction of one configuration.
struct Prediction {
    seconds: f64,
    /// Memory of a device of the first stage, and of the fullest device.
    first: StageMemory,
    peak: u64,
}

/// The prediction of one configuration, in the layout of the framework: weights are never gathered in a
/// group, and stages are whole blocks.
fn predict(
    row: &Row,
    hardware: &Hardware,
    micro_batch: u64,
    chunks: u64,
    recomputation: Recompute,
) -> Option<Prediction> {
    // Weights that several stages share are replicated in a group, where Megatron-LM shards them.
    let group = row.group();
    // Devices of a group that has experts in common have micro-batches of their own.
    let micro_batch = micro_batch * group / row.tensor;
    let mut costs = costs(row, hardware, micro_batch, group == 1);
    let target = match row.zero {
        // A group that shares experts keeps its other weights whole, where a target would shard them.
        _ if row.expert > 1 => None,
        3 => Some(Target::Torchtitan),
        _ => Some(Target::Megatron),
    };
    let degree = u32::try_from(group).expect("a degree is small");
    let tensor_parallel = if degree > 1 { TensorParallel::Degree(degree) } else { TensorParallel::Never };
    let mut shared = tensor_parallel.costs(&costs, target).expect("the model can be sharded");
    let activations = if row.sequence_parallel { ActivationSharding::Sequence } else { ActivationSharding::Replicated };
    shared.retain(|shared| row.expert > 1 || shared.activations == activations);
    // The planner must not compute the costs of groups again: they are changed here.
    costs.shareable = None;
    apply_software(&mut costs, &mut shared, row, hardware, micro_batch);
    recompute(&mut costs.graph, recomputation);
    shared.iter_mut().for_each(|shared| recompute(&mut shared.graph, recomputation));
    let replicas = row.gpus / (row.pipeline * group);
    let options = PlanOptions {
        schedule: Some(ScheduleChoice::Named(if chunks > 1 { Schedule::Interleaved } else { Schedule::OneFOneB })),
        chunks: (chunks > 1).then_some(chunks as u32),
        replicas: Some(vec![replicas as u32; (row.pipeline * chunks) as usize]),
        tensor_parallel: Some(tensor_parallel),
        target,
        recompute: Recomputation::Never,
        zero: Some(ZeroStage::Given(Zero::over_all(row.zero))),
        // The runs fitted; the table compares memory.
        memory_limit: Some(Bytes(1 << 50)),
        ..options(row, micro_batch)
    };
    let planned = solve_with_groups(Path::new(row.zoo()), costs, shared, &options, true);
    planned.ok().map(|planned| Prediction {
        seconds: planned.plan.predicted.minibatch_us / 1e6,
        first: device_memory::held(&planned.plan)[0].memory,
        peak: device_memory::fullest(&planned.plan),
    })
}

fn options(row: &Row, micro_batch: u64) -> PlanOptions {
    PlanOptions {
        schedule: Some(ScheduleChoice::Named(Schedule::OneFOneB)),
        microbatches: u32::try_from(row.batch / micro_batch).expect("a batch has few micro-batches"),
        optimizer: Optimizer::Adam,
        ..PlanOptions::default()
    }
}

/// The costs of a row's model at any micro-batch size.
struct RowCosts<'a> {
    row: &'a Row,
    hardware: &'a Hardware,
}

impl SizedCosts for RowCosts<'_> {
    fn only_size(&self) -> Option<u64> {
        None
    }

    fn at(&self, micro_batch: u64) -> Result<Costs, Error> {
        // Under the same costs as the published configuration.
        let is_tied = self.row.group() == 1;
        let mut costs = costs(self.row, self.hardware, micro_batch, is_tied);
        apply_software(&mut costs, &mut [], self.row, self.hardware, micro_batch);
        Ok(costs)
    }

    fn on_groups(&self, costs: &Costs, devices: u32, layout: GroupLayout) -> Result<TensorParallelCosts, Error> {
        let mut shared = [group_costs(costs, devices, layout)?];
        apply_software(&mut costs.clone(), &mut shared, self.row, self.hardware, costs.micro_batch);
        let [shared] = shared;
        Ok(shared)
    }
}

/// Predicted seconds per iteration of pipec's own plan that fits in memory: everything but the batch is searched.
fn own_plan_seconds(row: &Row, hardware: &Hardware) -> Option<f64> {
    let request = PlanRequest {
        batch: Some(row.batch),
        options: PlanOptions { optimizer: Optimizer::Adam, ..PlanOptions::default() },
        ..PlanRequest::new(row.zoo(), u32::try_from(row.gpus).expect("a cluster has few devices"))
    };
    let configuration = configuration_search::plan(&request, &RowCosts { row, hardware }, row.batch, &Silent);
    configuration.ok().map(|configuration| configuration.planned.plan.predicted.minibatch_us / 1e6)
}

/// The fastest prediction over what the source leaves open, of those that fit in memory if any does.
fn best(row: &Row, hardware: &Hardware) -> Option<(Prediction, u64, u64)> {
    let micro_batches = row.micro_batch.map_or(vec![1, 2, 4], |value| vec![value]);
    let chunks = match row.chunks {
        Some(value) => vec![value],
        None if row.pipeline == 1 => vec![1],
        None => vec![1, 2, 4],
    };
    let rank = |prediction: &Prediction| (prediction.peak > hardware.device.memory.0, prediction.seconds);
    let mut fastest: Option<(Prediction, u64, u64)> = None;
    for micro_batch in micro_batches.into_iter().filter(|size| row.batch.is_multiple_of(row.data * size)) {
        for &chunks in &chunks {
            for &recomputation in
                row.recompute.as_ref().map_or(&[Recompute::None, Recompute::Full][..], std::slice::from_ref)
            {
                if let Some(prediction) = predict(row, hardware, micro_batch, chunks, recomputation)
                    && fastest.as_ref().is_none_or(|(fastest, ..)| rank(&prediction) < rank(fastest))
                {
                    fastest = Some((prediction, micro_batch, chunks));
                }
            }
        }
    }
    fastest
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Ranks from 0; equal values keep their order.
fn ranks(values: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[a].total_cmp(&values[b]));
    let mut ranks = vec![0.0; values.len()];
    order.into_iter().enumerate().for_each(|(rank, at)| ranks[at] = rank as f64);
    ranks
}

/// Spearman's rank correlation.
fn correlation(left: &[f64], right: &[f64]) -> f64 {
    let n = left.len() as f64;
    let squares: f64 = ranks(left).iter().zip(ranks(right)).map(|(a, b)| (a - b) * (a - b)).sum();
    1.0 - 6.0 * squares / (n * (n * n - 1.0))
}

/// Pairs of predicted and measured seconds, with lines of the table. With `plans`, also pipec's own plan of each row.
fn compare(rows: &[Row], filter: &str, plans: bool, text: &mut String) -> Vec<(f64, f64)> {
    let plan_columns = if plans { [" own plan |", " --- |"] } else { ["", ""] };
    let _ = writeln!(
        text,
        "| run | configuration | predicted | measured | error | memory |{}\n| --- | --- | --- | --- | --- | --- |{}",
        plan_columns[0], plan_columns[1]
    );
    let (mut slower, mut too_large) = (0, 0);
    let mut pairs = Vec::new();
    for row in rows.iter().filter(|row| row.id.contains(filter)) {
        let Some(measured) = row.seconds else { continue };
        let Some(hardware) = hardware(row) else {
            let _ = writeln!(text, "| {} | not modelled: {} | | {measured:.3} s | | |", row.id, row.gpu);
            continue;
        };
        let Some((Prediction { seconds: predicted, peak, .. }, micro_batch, chunks)) = best(row, &hardware) else {
            let _ = writeln!(
                text,
                "| {} | {} × {} × {} | no plan | {measured:.3} s | | |",
                row.id, row.pipeline, row.data, row.tensor
            );
            continue;
        };
        let own_seconds = plans.then(|| own_plan_seconds(row, &hardware)).flatten();
        slower += usize::from(own_seconds.is_some_and(|own_seconds| own_seconds > predicted));
        let fits = if peak <= hardware.device.memory.0 { "fits" } else { "too large" };
        too_large += usize::from(peak > hardware.device.memory.0);
        let own_seconds = match (plans, own_seconds) {
            (false, _) => String::new(),
            (true, None) => " none fits |".to_string(),
            (true, Some(own_seconds)) => format!(" {own_seconds:.3} s |"),
        };
        let _ = writeln!(
            text,
            "| {} | {} × {} × {}, {chunks}, {micro_batch} | {predicted:.3} s | {measured:.3} s | {:+.1} % | {:.1} GB, {fits} |{own_seconds}",
            row.id,
            row.pipeline,
            row.data,
            row.tensor,
            100.0 * (predicted / measured - 1.0),
            peak as f64 / 1e9
        );
        pairs.push((predicted, measured));
    }
    let errors: Vec<f64> = pairs.iter().map(|(predicted, measured)| (predicted / measured - 1.0).abs()).collect();
    let within = errors.iter().filter(|error| **error <= 0.2).count();
    let _ =
        writeln!(text, "\n{} rows: median error {:.1} %, {within} within 20 %", pairs.len(), 100.0 * median(errors));
    let _ = writeln!(text, "\n{too_large} of them do not fit in the memory of the device");
    if plans {
        let _ =
            writeln!(text, "pipec's own plan is predicted slower than the published configuration in {slower} rows");
    }
    pairs
}

/// Lines of the table of memory: of a device of the first stage, predicted and as the authors computed it.
fn compare_memory(rows: &[Row], filter: &str, text: &mut String) {
    let _ = writeln!(text, "| run | part | predicted | published | error |\n| --- | --- | --- | --- | --- |");
    for row in rows.iter().filter(|row| row.id.contains(filter)) {
        let (Some(published), Some(hardware)) = (row.bytes, hardware(row)) else { continue };
        let Some((Prediction { first, .. }, ..)) = best(row, &hardware) else {
            let _ = writeln!(text, "| {} | | no plan | | |", row.id);
            continue;
        };
        let predicted = [first.weights + first.gradients + first.optimizer, first.activations];
        let parts = ["weights, gradients, optimizer state", "activations"];
        for ((part, predicted), published) in parts.into_iter().zip(predicted).zip(published) {
            let (id, predicted) = (&row.id, predicted as f64);
            let error = 100.0 * (predicted / published - 1.0);
            let _ = writeln!(
                text,
                "| {id} | {part} | {:.1} GB | {:.1} GB | {error:+.1} % |",
                predicted / 1e9,
                published / 1e9
            );
        }
    }
}

fn main() {
    let given = std::env::args().skip_while(|argument| argument != "--rows").nth(1);
    let filter = std::env::args()
        .skip(1)
        .find(|argument| !argument.starts_with('-') && Some(argument) != given.as_ref())
        .unwrap_or_default();
    let plans = std::env::args().any(|argument| argument == "--plans");
    let mut text = String::from("# Predictions against published runs\n\n## Papers and repositories\n\n");
    let published = runs(include_str!("published/runs.tsv"));
    compare(&published, &filter, plans, &mut text);
    text += "\n## Memory of a device of the first stage\n\n";
    compare_memory(&published, &filter, &mut text);
    text += "\n## Newer runs: bf16, dense, without context parallelism\n\n";
    let newer = match given {
        Some(path) => std::fs::read_to_string(path).expect("the file of --rows can be read"),
        None => include_str!("published/runs-2.tsv").to_string(),
    };
    let newer = newer_runs(&newer);
    compare(&newer, &filter, false, &mut text);
    let rows = vtrain(include_str!("published/vtrain.tsv"));
    let mut models: Vec<String> = rows.iter().map(|row| row.model.clone()).collect();
    models.dedup();
    for model in models {
        let _ = writeln!(text, "\n## vTrain: {model}\n");
        let rows: Vec<Row> = rows.iter().filter(|row| row.model == model).cloned().collect();
        let pairs = compare(&rows, &filter, false, &mut text);
        let (predicted, measured): (Vec<f64>, Vec<f64>) = pairs.iter().copied().unzip();
        let chosen = pairs.iter().min_by(|a, b| a.0.total_cmp(&b.0)).map_or(f64::NAN, |(_, measured)| *measured);
        let fastest = measured.iter().copied().fold(f64::INFINITY, f64::min);
        let _ = writeln!(
            text,
            "Spearman's rank correlation {:.2}, regret {:.1} %",
            correlation(&predicted, &measured),
            100.0 * (chosen / fastest - 1.0)
        );
    }
    print!("{text}");
    if std::env::var_os("PIPEC_TABLES").is_some() {
        let path = Path::new("benches/results/published.md");
        std::fs::create_dir_all("benches/results")
            .and_then(|()| std::fs::write(path, text))
            .expect("the table can be written");
    }
}
