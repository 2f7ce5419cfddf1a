//! Ends the lifetime of weight versions: a Drop after the last use, or an in-place Step.

use crate::plan::StageId;
use crate::schedule::{Instruction, Version};
use std::collections::BTreeMap;

/// Ends every version except the newest of each stage. The list must have no Drops or in-place Steps.
pub fn with_ends(list: Vec<Instruction>, newest: impl Fn(StageId) -> Version) -> Vec<Instruction> {
    let mut last_use: BTreeMap<(StageId, Version), usize> = BTreeMap::new();
    for (at, instruction) in list.iter().enumerate() {
        match *instruction {
            Instruction::Step { stage, from: version, .. } | Instruction::Checkpoint { stage, version } => {
                last_use.insert((stage, version), at);
            }
            _ => {
                if let Some((work, version, _)) = instruction.work() {
                    last_use.insert((work.stage, version), at);
                }
            }
        }
    }
    let ends = last_use.into_iter().filter(|((stage, version), _)| *version != newest(*stage));
    let mut ends: Vec<(usize, (StageId, Version))> = ends.map(|(used, at)| (at, used)).collect();
    ends.sort_unstable();
    let mut ends = ends.into_iter().peekable();
    let mut out = Vec::with_capacity(list.len() + ends.len());
    for (at, mut instruction) in list.into_iter().enumerate() {
        let ending = ends.next_if(|&(end, _)| end == at);
        if let (Instruction::Step { in_place, .. }, Some(_)) = (&mut instruction, ending) {
            *in_place = true;
            out.push(instruction);
            continue;
        }
        out.push(instruction);
        if let Some((_, (stage, version))) = ending {
            out.push(Instruction::Drop { stage, version });
        }
    }
    out
}
