//! One compute action of a worker: `2F3`, `2B3`, `2I3`, `2W3` (stage, phase, item).

use std::fmt;

use crate::plan::StageId;
use crate::schedule::{Instruction, MicrobatchId, Program, Slot, Version};
use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash, Serialize, Deserialize)]
pub enum Phase {
    /// `F`.
    Forward,
    /// `B`, the unsplit backward.
    Backward,
    /// `I`, the input-gradient pass.
    BackwardInput,
    /// `W`, the weight-gradient pass.
    BackwardWeight,
}

impl Phase {
    pub const ALL: [Phase; 4] = [Phase::Forward, Phase::Backward, Phase::BackwardInput, Phase::BackwardWeight];

    pub fn letter(self) -> char {
        match self {
            Phase::Forward => 'F',
            Phase::Backward => 'B',
            Phase::BackwardInput => 'I',
            Phase::BackwardWeight => 'W',
        }
    }

    /// True if it makes the gradients that go to other stages.
    pub fn makes_gradients(self) -> bool {
        matches!(self, Phase::Backward | Phase::BackwardInput)
    }

    /// True if it is the item's last action at the stage.
    pub fn ends(self) -> bool {
        matches!(self, Phase::Backward | Phase::BackwardWeight)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash, Serialize, Deserialize)]
pub struct Work {
    pub stage: StageId,
    pub item: MicrobatchId,
    pub part: Phase,
}

impl Work {
    pub fn instruction(self, version: Version, slot: Slot) -> Instruction {
        let Work { stage, item, part } = self;
        match part {
            Phase::Forward => Instruction::Forward { stage, item, version, slot },
            Phase::Backward => Instruction::Backward { stage, item, version, slot },
            Phase::BackwardInput => Instruction::BackwardInput { stage, item, version, slot },
            Phase::BackwardWeight => Instruction::BackwardWeight { stage, item, version, slot },
        }
    }
}

/// Per stage, the most items with pending weight gradients on any worker, the running one included.
pub fn pending_weight_grads(program: &Program) -> Vec<u32> {
    let mut most = vec![0u32; program.stages.len()];
    for worker in &program.workers {
        let mut now = vec![0u32; program.stages.len()];
        for (work, ..) in worker.instructions.iter().filter_map(Instruction::work) {
            let at = work.stage.index();
            if work.part.makes_gradients() {
                now[at] += 1;
                most[at] = most[at].max(now[at]);
            }
            now[at] -= u32::from(work.part.ends());
        }
    }
    most
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}{}", self.stage.0, self.part.letter(), self.item.0)
    }
}

impl Instruction {
    /// The compute action with its weight version and slot; `None` for other instructions.
    pub fn work(&self) -> Option<(Work, Version, Slot)> {
        let (part, stage, item, version, slot) = match *self {
            Instruction::Forward { stage, item, version, slot } => (Phase::Forward, stage, item, version, slot),
            Instruction::Backward { stage, item, version, slot } => (Phase::Backward, stage, item, version, slot),
            Instruction::BackwardInput { stage, item, version, slot } => {
                (Phase::BackwardInput, stage, item, version, slot)
            }
            Instruction::BackwardWeight { stage, item, version, slot } => {
                (Phase::BackwardWeight, stage, item, version, slot)
            }
            _ => return None,
        };
        Some((Work { stage, item, part }, version, slot))
    }
}
