//! The rest of a program behind a cut: what is left to do of a run of which the first minibatches are done everywhere.
//!
//! A cut after minibatch N lies where rounds end at every stage, so that no update has gradients from both sides of it. What is left
//! is the program without the instructions of items before N and of their rounds, in the same order. Items, rounds and versions keep
//! their numbers: the data, the learning rate and the weights that an item sees follow from those.
//!
//! Without a flush, items behind the cut begin before the updates in front of it are made, and see older weights. The rest of a worker
//! begins with those versions ([`versions_before`]) beside the one that the cut leaves, and with nothing in flight: forwards that the
//! whole program had run before the cut are run again, with the weights that they had.
//!
//! Why the rest cannot wait for ever where the whole does not: both ends of a transfer, and all members of a collective, keep it or
//! leave it out together, and the order in which the whole gets through is one for the rest.

use crate::plan::StageId;
use crate::schedule::semantics::Rule;
use crate::schedule::shape::common_multiple;
use crate::schedule::version_lifetime::with_ends;
use crate::schedule::{Instruction, MicrobatchId, Program, Token, Version, WorkerProgram};
use std::collections::BTreeSet;

/// Minibatches between two places where rounds end at every stage.
pub fn period(program: &Program) -> u32 {
    if !program.schedule.is_round_robin() {
        return 1;
    }
    let all = program.stages.iter().fold(1, |all, stage| common_multiple(all, u64::from(stage.replicas)));
    u32::try_from(all).unwrap_or(u32::MAX)
}

/// The newest version of a stage after so many minibatches, of which the last ends a round.
pub fn version_at(rule: &Rule, stage: StageId, minibatches: u32) -> Version {
    Version(rule.round(stage, MicrobatchId(minibatches.saturating_mul(rule.microbatches))))
}

/// The minibatch that an instruction works for: of a round the first; nothing for those that belong to no minibatch.
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

/// What is left of a program after so many minibatches, a multiple of its [`period`].
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

/// The items of a replica that come after so many minibatches and see weights from before, each with its version.
pub fn versions_before(
    rule: &Rule,
    stage: StageId,
    replica: u32,
    minibatches: u32,
) -> impl Iterator<Item = (MicrobatchId, Version)> + '_ {
    let newest = version_at(rule, stage, minibatches);
    // Versions never fall from an item to the next.
    let items = (minibatches.saturating_mul(rule.microbatches)..rule.items).map(MicrobatchId);
    let old = items.map(move |item| (item, rule.version(stage, item))).take_while(move |(_, of)| *of < newest);
    old.filter(move |(item, _)| rule.replica(stage, *item) == replica)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::scheduler::schedule;
    use crate::schedule::semantics::StepCount;
    use crate::schedule::{Pipeline, Schedule};

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
                // Every post has its wait, as in the whole.
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
        // Stage 0 has a cap of two rounds: its round 3 sees version 2, stage 2 always the newest.
        assert_eq!((seen(0, 0), seen(0, 1)), (vec![(6, 2)], vec![(7, 2)]));
        assert_eq!((seen(1, 0), seen(2, 0)), (vec![(6, 5)], Vec::new()));
    }
}
