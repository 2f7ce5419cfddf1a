//! Planned activation memory, saved and between the phases of a split backward, against compiled stages: never less and
//! hardly more, for any cut.

use compiler::cluster::read::levels;
use compiler::graph::bind::{bind, symbols};
use compiler::graph::order;
use compiler::import::import::{Options as Import, load};
use compiler::pass::attribution::{Training, attribute};
use compiler::pass::costs::cost_graph;
use compiler::pass::loss::{LOSS, Loss, TARGET, attach};
use compiler::plan::gradient_buffers::GradientBuffers;
use compiler::plan::memory::MemoryTerms;
use compiler::profile::recompute_scope::RecomputeCosts;
use compiler::tensor::dim::Bindings;
use models::zoo::{ENTRIES, build, to_bytes};
use runtime::device::cpu::device::cpu;
use runtime::exec::compile::{PassOptions, Recomputation, compile_with};
use runtime::train::run::placement;

/// Samples per micro-batch: enough to make alignment negligible.
const BATCH: i64 = 32;

/// Number of three-stage partitions tried.
const CUTS: usize = 10;

#[test]
fn stages_keep_what_plans_say() {
    for name in ["mlp", "residual-cnn"] {
        let entry = ENTRIES.iter().find(|entry| entry.name == name).unwrap();
        // With three layers, stages would have nothing to split.
        let options = if name == "mlp" { entry.small().number("layers", 6) } else { entry.small() };
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.onnx");
        std::fs::write(&path, to_bytes(&build(name, &options).unwrap().model)).unwrap();
        let graph = load(&path, &Import::default()).unwrap().graph;
        let dims: Bindings = symbols(&graph).into_iter().map(|symbol| (symbol, BATCH)).collect();
        let graph = bind(&graph, &dims).unwrap();
        let costs = cost_graph(&graph, &attribute(&graph, Training::Gradient).unwrap());
        let mut with_loss = graph.clone();
        attach(&mut with_loss, Loss::CrossEntropy, None).unwrap();
        let buffers = GradientBuffers::of(&levels("3:1GB/s").unwrap());
        let ops = order::numbered(&graph).len();
        let (mut planned_bytes, mut kept_bytes, mut planned_between, mut actual_between) = (0u64, 0u64, 0u64, 0u64);
        for at in 0..CUTS {
            let cuts = [1 + at * (ops / 2 - 1) / CUTS, ops / 2 + at * (ops / 2 - 1) / CUTS];
            let stages: Vec<usize> = (0..ops).map(|op| cuts.iter().filter(|cut| op >= **cut).count()).collect();
            // An op that depends only on parameters is in its reader's stage.
            let stages: Vec<usize> =
                (0..ops).map(|op| costs.ops[op].joins.map_or(stages[op], |with| stages[with.index()])).collect();
            let stage_of_node = placement(&graph, &with_loss, &stages);
            let (device, recomputation) = (&*cpu(), &Recomputation::default());
            let options = PassOptions { device, splits: true, joins: &|_| false, recomputation, machine: None };
            let codes = compile_with(&with_loss, &stage_of_node, 3, Some(LOSS), options).unwrap().0;
            // The last stage also saves for the loss, which the planner does not model.
            for (stage, code) in codes.iter().enumerate().take(2) {
                let is_inside: Vec<bool> = stages.iter().map(|op_stage| *op_stage == stage).collect();
                let terms =
                    MemoryTerms::of(&costs, (&costs.flows(), &RecomputeCosts::of(&costs)), &is_inside, &buffers);
                let feeds: usize = code.feeds.iter().filter(|feed| feed.name != TARGET).map(|feed| feed.bytes).sum();
                let kept = (code.kept_bytes + code.own_bytes.iter().sum::<usize>() + feeds) as u64;
                let planned = terms.saved + terms.sent;
                // Alignment of small tensors, and a mask or statistic that the planner counts elsewhere.
                let slack = planned / 50 + 8192;
                assert!(kept <= planned + slack, "{name} {cuts:?}, stage {stage}: {kept} kept, {planned} planned");
                let planned_halves = if terms.inputs > 0 { terms.halves } else { 0 };
                // A gradient that is sent and also read by the weight-gradient pass is in the send buffer.
                let sent: usize = code.gradients_out.iter().map(|transfer| transfer.address.bytes).sum();
                let actual_halves = (code.between_bytes + if code.weight_reads_sent { sent } else { 0 }) as u64;
                assert!(
                    actual_halves <= planned_halves + planned_halves / 50 + 8192,
                    "{name} {cuts:?}, stage {stage}: {actual_halves} between, {planned_halves} planned"
                );
                (planned_bytes, kept_bytes) = (planned_bytes + planned, kept_bytes + kept);
                // Stages fed only by data have no input-gradient pass, which the planner does not model.
                if !code.gradients_out.is_empty() {
                    (planned_between, actual_between) =
                        (planned_between + planned_halves, actual_between + actual_halves);
                }
            }
        }
        println!(
            "{name}: {kept_bytes} of {planned_bytes} bytes kept, {actual_between} of {planned_between} between halves"
        );
        assert!(planned_bytes as f64 <= 1.08 * kept_bytes as f64, "{name}: {planned_bytes} planned for {kept_bytes}");
        assert!(
            planned_between as f64 <= 1.2 * actual_between as f64,
            "{name}: {planned_between} planned for {actual_between} between halves"
        );
    }
}
