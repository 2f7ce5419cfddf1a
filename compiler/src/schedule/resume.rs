//! The rest of a program after a snapshot: the first minibatches are done on all stages.
//!
//! A snapshot after minibatch N is at a round boundary of every stage, so no update mixes gradients from before and
//! after. The rest is the program without the instructions of earlier items and rounds, in the same order. Items,
//! rounds and versions keep their numbers, because data, learning rate and weight versions depend on them.
//!
//! Without a flush, some later items use versions from before the snapshot. A worker starts with those versions
//! ([`versions_before`]) beside the snapshot's and with nothing in flight. Forwards that ran before the snapshot run
//! again, with the same weights.
//!
//! The rest does not deadlock if the complete program does not: both ends of a transfer and all members of a collective
//! are kept or dropped together, so the interleaving of the complete program remains valid.

use crate::plan::StageId;
use crate::schedule::semantics::Rule;
use crate::schedule::shape::common_multiple;
use crate::schedule::version_lifetime::with_ends;
use crate::schedule::{Instruction, MicrobatchId, Program, Token, Version, WorkerProgram};
use std::collections::BTreeSet;

/// Minibatches between two common round boundaries of all stages.
pub fn period(program: &Program) -> u32 {
    if !program.schedule.is_round_robin() {
        return 1;
    }
    let all = program.stages.iter().fold(1, |all, stage| common_multiple(all, u64::from(stage.replicas)));
    u32::try_from(all).unwrap_or(u32::MAX)
}

/// The newest version of a stage after `minibatches`, which must end a round.
pub fn version_at(rule: &Rule, stage: StageId, minibatches: u32) -> Version {
    Version(rule.round(stage, MicrobatchId(minibatches.saturating_mul(rule.microbatches))))
}

/// The minibatch of an instruction (for a round its first); `None` for waits, drops and checkpoints.
pub fn minibatch(rule: &Rule, instruction: &Instruction) -> Option<u32> {
    let of_round = |stage: StageId, round: u32| match rule.schedule.is_round_robin() {
        true => round.saturating_mul(rule.stages[stage.index()].replicas),
        false => round,
    };
    match *instruction {
        Instruction::Load { item, .. }
        | Instruction::Forward { item, .. }
        | Instruction::Recompute { item, .. }
        | Instruction::Backward { item, .. }
        | Instruction::BackwardInput { item, .. }
        | Instruction::BackwardWeight { item, .. }
        | Instruction::Send { item, .. }
        | Instruction::Recv { item, .. } => Some(item.0 / rule.microbatches.max(1)),
        Instruction::AllReduce { stage, round, .. }
        | Instruction::ReduceScatter { stage, round, .. }
        | Instruction::Step { stage, round, .. } => Some(of_round(stage, round)),
        Instruction::AllGather { stage, version, .. } => Some(of_round(stage, version.0.saturating_sub(1))),
        Instruction::Wait { .. } | Instruction::Drop { .. } | Instruction::Checkpoint { .. } => None,
    }
}

/// The rest of a program after `minibatches`, a multiple of [`period`].
pub fn rest(program: &Program, minibatches: u32) -> Program {
    let rule = Rule::of(program);
    let of_worker = |worker: &WorkerProgram| {
        let mut open: BTreeSet<Token> = BTreeSet::new();
        let mut list = Vec::new();
        for instruction in &worker.instructions {
            let is_kept = match *instruction {
                Instruction::Wait { token } => open.remove(&token),
                Instruction::Drop { .. } => false,
                Instruction::Checkpoint { stage, version } => version >= version_at(&rule, stage, minibatches),
                _ => minibatch(&rule, instruction).is_some_and(|of| of >= minibatches),
            };
            if !is_kept {
                continue;
            }
            let mut instruction = *instruction;
            match &mut instruction {
                Instruction::Step { in_place, .. } => *in_place = false,
                Instruction::Send { token, .. }
                | Instruction::Recv { token, .. }
                | Instruction::AllReduce { token, .. }
                | Instruction::ReduceScatter { token, .. }
                | Instruction::AllGather { token, .. } => _ = open.insert(*token),
                _ => {}
            }
            list.push(instruction);
        }
        let instructions = with_ends(list, |stage| Version(rule.rounds(stage)));
        WorkerProgram { rank: worker.rank, replica: worker.replica, instructions }
    };
    Program { workers: program.workers.iter().map(of_worker).collect(), ..program.clone() }
}

/// A replica's items after `minibatches` that use older weights, with their versions.
pub fn versions_before(
    rule: &Rule,
    stage: StageId,
    replica: u32,
    minibatches: u32,
) -> impl Iterator<Item = (MicrobatchId, Version)> + '_ {
    let newest = version_at(rule, stage, minibatches);
    // Versions are nondecreasing in the item.
    let items = (minibatches.saturating_mul(rule.microbatches)..rule.items).map(MicrobatchId);
    let old = items.map(move |item| (item, rule.version(stage, item))).take_while(move |(_, of)| *of < newest);
    old.filter(move |(item, _)| rule.replica(stage, *item) == replica)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::schedule::Schedule;
    use crate::schedule::Pipeline;
    use crate::schedule::generators::schedule;
    use crate::schedule::semantics::StepCount;

    fn program(name: Schedule, replicas: &[u32], minibatches: u32, microbatches: u32) -> Program {
        let count = StepCount { minibatches, microbatches };
        schedule(name, &Pipeline::balanced(replicas, 2.0), count).unwrap()
    }

    #[test]
    fn rounds_end_together_at_common_multiples() {
        assert_eq!(period(&program(Schedule::OneFOneBRr, &[2, 3, 1], 12, 1)), 6);
        assert_eq!(period(&program(Schedule::OneFOneB, &[2, 1], 12, 2)), 1);
    }

    #[test]
    fn what_is_left_speaks_of_what_comes_after_in_the_same_order() {
        for (name, replicas, microbatches) in [
            (Schedule::OneFOneBRr, &[2, 1][..], 1),
            (Schedule::OneFOneBRrVsync, &[1, 2], 1),
            (Schedule::OneFOneBRrNewest, &[1, 1, 1], 1),
            (Schedule::TwoBw, &[2, 1], 4),
            (Schedule::ZbH1, &[1, 1, 1], 4),
        ] {
            let whole = program(name, replicas, 9, microbatches);
            let rule = Rule::of(&whole);
            let left = rest(&whole, 4);
            for (all, own) in whole.workers.iter().zip(&left.workers) {
                let is_work = |i: &&Instruction| minibatch(&rule, i).is_some_and(|of| of >= 4);
                let plain = |i: &Instruction| match *i {
                    Instruction::Step { stage, round, from, to, count, .. } => {
                        Instruction::Step { stage, round, from, to, count, in_place: false }
                    }
                    other => other,
                };
                let [all, kept] =
                    [all, own].map(|worker| worker.instructions.iter().filter(is_work).map(plain).collect::<Vec<_>>());
                assert_eq!(all, kept, "{name}");
                let posts = own.instructions.iter().filter(|i| {
                    matches!(i, Instruction::Send { .. } | Instruction::Recv { .. } | Instruction::AllReduce { .. })
                });
                let waits = own.instructions.iter().filter(|i| matches!(i, Instruction::Wait { .. }));
                assert_eq!(posts.count(), waits.count(), "{name}");
            }
            assert_eq!(rest(&whole, 0).workers.len(), whole.workers.len());
            assert!(rest(&whole, 9).workers.iter().all(|worker| worker.instructions.is_empty()), "{name}");
        }
    }

    #[test]
    fn items_behind_a_cut_see_the_versions_of_their_rule() {
        let whole = program(Schedule::OneFOneBRr, &[2, 1, 1], 12, 1);
        let rule = Rule::of(&whole);
        let seen = |stage, replica| {
            let all = versions_before(&rule, StageId(stage), replica, 6);
            all.map(|(item, version)| (item.0, version.0)).collect::<Vec<_>>()
        };
        // Stage 0 has a cap of two rounds, so its round 3 sees version 2; stage 2 always sees the newest.
        assert_eq!((seen(0, 0), seen(0, 1)), (vec![(6, 2)], vec![(7, 2)]));
        assert_eq!((seen(1, 0), seen(2, 0)), (vec![(6, 5)], Vec::new()));
    }
}
