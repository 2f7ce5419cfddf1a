//! One piece of computation of a worker, apart from how it is lowered: `2F3`, `2B3`, `2I3`, `2W3`.

use std::fmt;

use crate::plan::StageId;
use crate::schedule::{Instruction, MicrobatchId, Program, Slot, Version};

/// What is computed of an item at a stage.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub enum Phase {
    /// The forward, `F`.
    Forward,
    /// The whole backward, `B`.
    Backward,
    /// The part of the backward that other stages wait for, `I`.
    BackwardInput,
    /// The part of the backward that makes gradients of weights, `W`.
    BackwardWeight,
}

impl Phase {
    /// Every part.
    pub const ALL: [Phase; 4] = [Phase::Forward, Phase::Backward, Phase::BackwardInput, Phase::BackwardWeight];

    /// The letter in programs, charts and tables.
    pub fn letter(self) -> char {
        match self {
            Phase::Forward => 'F',
            Phase::Backward => 'B',
            Phase::BackwardInput => 'I',
            Phase::BackwardWeight => 'W',
        }
    }

    /// Whether it makes the gradients that go to other stages.
    pub fn makes_gradients(self) -> bool {
        matches!(self, Phase::Backward | Phase::BackwardInput)
    }

    /// Whether the item has left the stage after it, and its gradients of weights are made.
    pub fn ends(self) -> bool {
        matches!(self, Phase::Backward | Phase::BackwardWeight)
    }
}

/// One piece of computation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct Work {
    /// The stage.
    pub stage: StageId,
    /// The item.
    pub item: MicrobatchId,
    /// What is computed.
    pub part: Phase,
}

impl Work {
    /// The instruction that does it.
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

/// For each stage of a program the most items that a worker has between the halves of their backward, the one under way among them.
pub fn apart(program: &Program) -> Vec<u32> {
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
    /// The computation that it does, with its weights and its slot, if it computes an item.
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
