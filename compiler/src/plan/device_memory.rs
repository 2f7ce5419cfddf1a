//! Memory per device: a device with several stages holds the memory of all of them.

use crate::plan::{Plan, StageMemory};

/// Stages that are on the same devices, and the peak memory of each of these devices.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceMemory {
    pub stages: Vec<usize>,
    pub memory: StageMemory,
}

/// Memory of all devices, in the order of their first stages.
pub fn held(plan: &Plan) -> Vec<DeviceMemory> {
    let mut all: Vec<DeviceMemory> = Vec::new();
    for (at, stage) in plan.stages.iter().enumerate() {
        let same = |one: &&mut DeviceMemory| {
            let other = &plan.stages[one.stages[0]].devices;
            !other.is_empty() && *other == stage.devices
        };
        match all.iter_mut().find(same) {
            Some(one) => {
                one.stages.push(at);
                one.memory = sum(&one.memory, &stage.memory);
            }
            None => all.push(DeviceMemory { stages: vec![at], memory: stage.memory }),
        }
    }
    all
}

/// Peak memory over all devices, in bytes.
pub fn fullest(plan: &Plan) -> u64 {
    held(plan).iter().map(|one| one.memory.total).max().unwrap_or(0)
}

fn sum(a: &StageMemory, b: &StageMemory) -> StageMemory {
    StageMemory {
        weights: a.weights.saturating_add(b.weights),
        frozen: a.frozen.saturating_add(b.frozen),
        versions: a.versions.saturating_add(b.versions),
        gradients: a.gradients.saturating_add(b.gradients),
        optimizer: a.optimizer.saturating_add(b.optimizer),
        activations: a.activations.saturating_add(b.activations),
        split_backward: a.split_backward.saturating_add(b.split_backward),
        messages: a.messages.saturating_add(b.messages),
        workspace: a.workspace.saturating_add(b.workspace),
        by_part: false,
        total: a.total.saturating_add(b.total),
    }
}
