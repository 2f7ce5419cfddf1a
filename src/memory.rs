//! Whether what is about to be allocated fits in the memory that is left.

use crate::failure::Failure;
use crate::quantity;
use compiler::graph::Graph;
use compiler::schedule::{Program, Schedule};
use profiler::machine::available_bytes;
use runtime::compile::{Named, StageCode};
use runtime::device::cpu::half::is_half;
use runtime::optimizer::Optimizer;

/// Refuses what cannot fit.
pub fn check(what: &str, needed: u64, help: &str) -> Result<(), Failure> {
    let available = available_bytes();
    if needed <= available {
        return Ok(());
    }
    Err(Failure::input(format!("{what} does not fit in memory"))
        .because(format!("it needs about {}, {} are available", quantity::bytes(needed), quantity::bytes(available)))
        .help(help))
}

/// Bytes of all values of a graph of fixed sizes.
pub fn of_graph(graph: &Graph) -> u64 {
    let values = graph.ids().flat_map(|id| graph.values(id));
    values.fold(0, |sum: u64, value| sum.saturating_add(graph.fact(value).bytes().unwrap_or(0)))
}

/// Bytes that all workers hold while they train: weight versions, gradients and the optimizer's state, what each item in flight
/// keeps, and an arena.
pub fn of_training(codes: &[StageCode], program: &Program, optimizer: &Optimizer) -> u64 {
    let worker = |at: usize| -> u64 {
        let (code, cap) = (&codes[at], u64::from(program.stages[at].cap.min(program.items)));
        let microbatches = u64::from(program.microbatches);
        let (versions, items) = match program.schedule {
            Schedule::Gpipe => (1, microbatches),
            Schedule::TwoBw => (2, cap),
            Schedule::OneFOneBRr | Schedule::OneFOneBRrVsync | Schedule::Inference => (cap, cap),
            // One that is predicted or set back beside the newest.
            Schedule::OneFOneBRrNewest => (2, cap),
            _ => (1, cap.min(microbatches)),
        };
        let sum = |named: &[Named]| named.iter().map(|named| named.bytes as u64).sum::<u64>();
        // Beside versions of two bytes there are masters, and all else is as large as they.
        let wide = |named: &Named| if is_half(named.fact.dtype) { (2, 1) } else { (1, 0) };
        let beside = 2 + optimizer.buffers() as u64;
        let of = |named: &Named| {
            let (times, masters) = wide(named);
            (named.bytes as u64).saturating_mul(versions + times * (beside + masters))
        };
        let weights = code.parameters.iter().map(of).fold(0, u64::saturating_add);
        let own: u64 = code.own_bytes.iter().map(|bytes| *bytes as u64).sum();
        let kept = (code.kept_bytes as u64 + own).saturating_mul(items);
        [weights, sum(&code.states), kept, code.arena_bytes as u64].into_iter().fold(0, u64::saturating_add)
    };
    let held = program.workers.iter().flat_map(|own| program.stages_of(own.rank));
    held.fold(0, |all: u64, stage| all.saturating_add(worker(stage.index())))
}
