//! Rejects graphs and stages that do not fit in the memory of a device.

use crate::device::api::Device;
use crate::exec::compile_error::CompileError;
use crate::exec::stage_code::{NamedTensor, StageCode};
use compiler::graph::Graph;

/// Rejects a stage that cannot run even one micro-batch in the device's memory; on the CPU a failed allocation would abort
/// the process.
pub fn check_memory(device: &dyn Device, code: &StageCode) -> Result<(), CompileError> {
    let total = |list: &[NamedTensor]| list.iter().map(|n| n.bytes as u64).sum::<u64>();
    let buffers: u64 = code.own_bytes.iter().map(|b| *b as u64).sum();
    let needed = total(&code.parameters) + total(&code.states) + total(&code.feeds);
    let needed = needed + buffers + code.kept_bytes as u64 + code.arena_bytes as u64;
    match device.available_memory() {
        Some(available) if needed > available => Err(CompileError::StageMemory { needed, available }),
        _ => Ok(()),
    }
}

/// Checks that every shape is concrete and that no op exceeds the device memory, so sums of sizes cannot overflow later.
pub fn check_sizes(device: &dyn Device, graph: &Graph) -> Result<(), CompileError> {
    let available = device.available_memory().unwrap_or(1 << 40);
    for id in graph.ids() {
        let node = graph.node(id);
        let label = || node.label().to_string();
        for fact in &node.facts {
            match fact.bytes() {
                None => return Err(CompileError::Symbolic { node: label(), fact: fact.to_string() }),
                Some(_) if fact.concrete().is_none() => {
                    return Err(CompileError::Symbolic { node: label(), fact: fact.to_string() });
                }
                Some(_) => {}
            }
        }
        let inputs = graph.inputs(id);
        let facts = inputs.iter().map(|v| graph.fact(*v)).chain(&node.facts);
        let needed = facts.fold(0u64, |sum, f| sum.saturating_add(f.bytes().unwrap_or(0)));
        if needed > available {
            return Err(CompileError::Memory { node: label(), needed, available });
        }
    }
    Ok(())
}
