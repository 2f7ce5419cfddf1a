//! Validation before a run: rejects unsupported combinations of program, policy and states.

use crate::device::cpu::half::is_half;
use crate::exec::stage_code::StageCode;
use crate::optim::policy::Staleness;
use crate::train::error::TrainError;
use crate::train::job::TrainJob;
use compiler::plan::StageId;
use compiler::schedule::{Instruction, Program, WorkerId};
use std::collections::BTreeSet;

/// Rejects a program with `Checkpoint` instructions if nothing receives them.
pub fn check_instructions(program: &Program, keeps_checkpoints: bool) -> Result<(), TrainError> {
    for (worker, worker_program) in (0..).map(WorkerId).zip(&program.workers) {
        for (at, instruction) in worker_program.instructions.iter().enumerate() {
            if let (Instruction::Checkpoint { .. }, false) = (instruction, keeps_checkpoints) {
                let (worker, instruction) = (program.worker_name(worker), program.show(instruction));
                return Err(TrainError::NoPlace { worker, at, instruction });
            }
        }
    }
    Ok(())
}

/// Rejects a program with a split backward for code compiled without one: parameter gradients would be complete too
/// early.
pub fn check_parts(program: &Program, codes: &[StageCode]) -> Result<(), TrainError> {
    let instructions = program.workers.iter().flat_map(|worker| &worker.instructions);
    let split = instructions.filter_map(|instruction| match *instruction {
        Instruction::BackwardWeight { stage, .. } => Some(stage),
        _ => None,
    });
    let stages: BTreeSet<StageId> = split.collect();
    match stages.into_iter().find(|stage| !codes.get(stage.index()).is_some_and(|code| code.in_parts)) {
        Some(stage) => Err(TrainError::Parts { stage: stage.0 }),
        None => Ok(()),
    }
}

/// Rejects policies that the schedule, optimizer or element types do not support.
pub fn check_policy(training: &TrainJob<'_>, scales_loss: bool) -> Result<(), TrainError> {
    let schedule = training.program.schedule;
    if scales_loss && !schedule.flushes() {
        return Err(TrainError::LossScale { schedule });
    }
    let staleness = training.policy.staleness;
    if staleness == Staleness::None || schedule.stashes() {
        return Ok(());
    }
    if staleness == Staleness::Predict && !training.optimizer.has_velocity() {
        return Err(TrainError::NoVelocity);
    }
    if let Some(stage) = training.program.stages.iter().position(|stage| stage.zero > 0) {
        return Err(TrainError::Shares { stage, schedule });
    }
    match training.codes.iter().flat_map(|code| &code.parameters).find(|named| is_half(named.fact.dtype)) {
        Some(named) => Err(TrainError::Narrow { name: named.name.clone(), dtype: named.fact.dtype }),
        None => Ok(()),
    }
}

/// Rejects a moving-average state in several stages, whose copies would diverge.
pub fn check_states(codes: &[StageCode]) -> Result<(), TrainError> {
    for (first, code) in codes.iter().enumerate() {
        for update in &code.state_updates {
            let name = &code.states[update.state].name;
            let sharing_stage =
                |(s, c): (usize, &StageCode)| (s != first && c.states.iter().any(|n| n.name == *name)).then_some(s);
            if let Some(second) = codes.iter().enumerate().find_map(sharing_stage) {
                return Err(TrainError::SharedState {
                    name: name.clone(),
                    first: first.min(second),
                    second: first.max(second),
                });
            }
        }
    }
    Ok(())
}
