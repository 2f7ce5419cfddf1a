//! What devices hold: a device that has several stages holds all of theirs.

use crate::plan::{Plan, StageMemory};

/// Stages on the same devices, and what each of these devices holds at its fullest.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceMemory {
    /// Places of the stages in the plan.
    pub stages: Vec<usize>,
    /// The sum of what they hold.
    pub memory: StageMemory,
}

/// What devices hold, in the order of the first stages on them.
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

/// Bytes on the fullest device.
pub fn fullest(plan: &Plan) -> u64 {
    held(plan).iter().map(|one| one.memory.total).max().unwrap_or(0)
}

fn sum(a: &StageMemory, b: &StageMemory) -> StageMemory {
    StageMemory {
        weights: a.weights.saturating_add(b.weights),
        versions: a.versions.saturating_add(b.versions),
        gradients: a.gradients.saturating_add(b.gradients),
        optimizer: a.optimizer.saturating_add(b.optimizer),
        activations: a.activations.saturating_add(b.activations),
        between: a.between.saturating_add(b.between),
        messages: a.messages.saturating_add(b.messages),
        workspace: a.workspace.saturating_add(b.workspace),
        total: a.total.saturating_add(b.total),
    }
}
