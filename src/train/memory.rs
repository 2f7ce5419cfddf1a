//! Checks that an allocation fits in the available memory.

use crate::error::Error;
use compiler::graph::Graph;
use compiler::plan::in_flight::{StageInFlight, synced};
use compiler::plan::schedule::{Chunks, InFlightRule, VersionRule};
use compiler::schedule::Program;
use compiler::schedule::action::pending_weight_grads;
use compiler::text::quantity;
use profiler::machine::{available_bytes, available_to_all};
use runtime::device::cpu::half::is_half;
use runtime::exec::stage_code::{NamedTensor, StageCode, Transfer};
use runtime::optim::optimizer::Optimizer;
use std::collections::HashMap;

/// Refuses an allocation of this process that does not fit.
pub fn check(subject: &str, needed_bytes: u64, help: &str) -> Result<(), Error> {
    check_within(available_bytes(), subject, needed_bytes, help)
}

/// Refuses allocations of several processes that do not fit together.
pub fn check_all_processes(subject: &str, needed_bytes: u64, help: &str) -> Result<(), Error> {
    check_within(available_to_all(), subject, needed_bytes, help)
}

fn check_within(available_bytes: u64, subject: &str, needed_bytes: u64, help: &str) -> Result<(), Error> {
    if needed_bytes <= available_bytes {
        return Ok(());
    }
    Err(Error::input(format!("{subject} does not fit in memory"))
        .because(format!(
            "it needs about {}, but only {} is available",
            quantity::bytes(needed_bytes),
            quantity::bytes(available_bytes)
        ))
        .with_help(help))
}

/// Bytes of all values of a graph with fixed sizes.
pub fn of_graph(graph: &Graph) -> u64 {
    let values = graph.ids().flat_map(|id| graph.values(id));
    values.fold(0, |sum: u64, value| sum.saturating_add(graph.fact(value).bytes().unwrap_or(0)))
}

/// Bytes of synthetic data: the micro-batches and the outputs of the teacher.
pub fn of_data(feeds: &[NamedTensor], items: u64) -> u64 {
    let item = feeds.iter().fold(0, |sum: u64, feed| sum.saturating_add(feed.bytes as u64));
    item.saturating_mul(items).saturating_mul(2)
}

/// Bytes of all workers during training.
pub fn of_training(codes: &[StageCode], program: &Program, optimizer: &Optimizer) -> u64 {
    let stages = of_stages(codes, program, optimizer);
    let replicas = program.workers.iter().flat_map(|worker| program.stages_of(worker.rank));
    replicas.fold(0, |sum: u64, stage| sum.saturating_add(stages[stage.index()]))
}

/// Bytes of one replica of each stage during training: weight versions, gradients, optimizer state, saved activations of in-flight
/// micro-batches, messages of the current and the previous micro-batch, and an arena.
pub fn of_stages(codes: &[StageCode], program: &Program, optimizer: &Optimizer) -> Vec<u64> {
    let pending_weight_grads = pending_weight_grads(program);
    let mut stage_counts: HashMap<&str, u64> = HashMap::new();
    for parameter in codes.iter().flat_map(|code| &code.parameters) {
        *stage_counts.entry(&parameter.name).or_default() += 1;
    }
    let stage = |at: usize| -> u64 {
        let (code, stage) = (&codes[at], &program.stages[at]);
        let max_items = program.items.div_ceil(stage.replicas.max(1));
        let cap = u64::from(stage.cap.min(max_items).max(1));
        let of_minibatch = u64::from(program.microbatches.div_ceil(stage.replicas.max(1)));
        let properties = program.schedule.properties();
        let holds_minibatch = properties.in_flight == InFlightRule::Minibatch && properties.chunks == Chunks::One;
        let (versions, items) = match properties.versions {
            VersionRule::Previous => (2, cap),
            VersionRule::Stashed => (cap, cap),
            VersionRule::Synchronised => {
                let first = StageInFlight { replicas: program.stages[0].replicas, in_flight: program.stages[0].cap };
                (u64::from(synced(stage.replicas, first)).min(u64::from(max_items) + 1), cap)
            }
            // The newest version and one that is predicted or approximated.
            VersionRule::Newest => (2, cap),
            VersionRule::Single if !program.schedule.trains() => (1, cap),
            VersionRule::Single if holds_minibatch && !program.schedule.is_custom() => (1, of_minibatch),
            VersionRule::Single => (1, cap.min(of_minibatch)),
        };
        let total_bytes = |list: &[NamedTensor]| list.iter().map(|tensor| tensor.bytes as u64).sum::<u64>();
        let transfer_bytes = |list: &[Transfer]| list.iter().map(|transfer| transfer.address.bytes as u64).sum::<u64>();
        // Half-precision versions have f32 master weights, and gradients and state are as large as these. With ZeRO, tied weights count as
        // sharded like the others.
        let shards = if stage.zero > 0 { u64::from(stage.replicas) } else { 1 };
        let mut terms = vec![0u64; code.parameters.len()];
        for term in &code.gradient_terms {
            terms[term.parameter] += 1;
        }
        let weights = |(parameter, terms): (&NamedTensor, &u64)| {
            let bytes = parameter.bytes as u64;
            let (master_width, masters) =
                if is_half(parameter.fact.dtype) { (bytes.saturating_mul(2), 1) } else { (bytes, 0) };
            let sharded = master_width.saturating_mul(optimizer.buffers() as u64 + masters).div_ceil(shards);
            let saved = bytes.saturating_mul(versions);
            let saved = if stage.zero >= 3 { saved.div_ceil(shards) } else { saved };
            // One sum for each op that uses the parameter, and one of all stages that share it.
            let tied = u64::from(stage_counts.get(&*parameter.name).is_some_and(|stages| *stages > 1));
            let sums = master_width.saturating_mul((*terms).max(1) + tied);
            let in_progress = if versions > 1 { 2 } else { 1 };
            let sums = if stage.zero >= 2 { sums.div_ceil(shards).saturating_mul(in_progress) } else { sums };
            saved.saturating_add(sums).saturating_add(sharded)
        };
        // From ZeRO 2 on, gradients are sharded as soon as an op has made them.
        let largest = code.parameters.iter().map(|parameter| parameter.gradient().1 as u64).max();
        let unsharded = largest.filter(|_| stage.zero >= 2).unwrap_or(0);
        let weights = code.parameters.iter().zip(&terms).map(weights).fold(unsharded, u64::saturating_add);
        let owned: u64 = code.own_bytes.iter().map(|bytes| *bytes as u64).sum();
        let recomputed = code.recomputed_bytes as u64;
        let pending = if code.in_parts { u64::from(pending_weight_grads[at]).max(1) } else { 1 };
        let (saved, recomputation) = match code.recompute {
            true => (code.kept_bytes as u64 - recomputed + owned, recomputed.saturating_mul(pending)),
            false => (code.kept_bytes as u64 + owned, 0),
        };
        let (received, sent) = (transfer_bytes(&code.received), transfer_bytes(&code.gradients_out));
        let in_flight = (saved + received + total_bytes(&code.feeds)).saturating_mul(items);
        let split = (code.between_bytes as u64 + transfer_bytes(&code.gradients_in)).saturating_mul(pending);
        let parts =
            [total_bytes(&code.states), in_flight, recomputation, split, received, sent, code.arena_bytes as u64];
        parts.into_iter().fold(weights, u64::saturating_add)
    };
    (0..codes.len()).map(stage).collect()
}
