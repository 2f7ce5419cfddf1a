//! Fill-drain: all forwards of a minibatch, then all its backwards, then the update (GPipe, Huang et al., NeurIPS 2019).
//!
//! A replica keeps the activations of all its microbatches, whatever the pipeline's in-flight caps say, and the
//! program's caps say so. Backwards go in item order, as forwards do, so that gradients are summed in the same order as
//! under every other schedule.

use crate::plan::StageId;
use crate::schedule::lower::lower;
use crate::schedule::order::{Choice, Layout, Work, play};
use crate::schedule::rule::{Rule, StepCount};
use crate::schedule::{MicrobatchId, Pipeline, Program, Schedule, ScheduleError, WorkerId};

/// All forwards, all backwards, step.
pub fn gpipe(pipeline: &Pipeline, count: StepCount) -> Result<Program, ScheduleError> {
    let mut rule = Rule::new(Schedule::Gpipe, pipeline, count)?;
    for stage in &mut rule.stages {
        stage.cap = rule.microbatches.div_ceil(stage.replicas);
    }
    let layout = Layout::new(pipeline.stages.iter().map(|stage| stage.replicas));
    let of_worker = |worker: WorkerId| {
        let stage = layout.stage(worker);
        fill_drain(&rule, stage, worker.0 - layout.worker(stage, 0).0)
    };
    let lists: Vec<Vec<Work>> = (0..layout.workers() as u32).map(|worker| of_worker(WorkerId(worker))).collect();
    let order = play(pipeline, &rule, Choice::Fixed(&lists))?;
    Ok(lower(pipeline, &rule, &order))
}

fn fill_drain(rule: &Rule, stage: StageId, replica: u32) -> Vec<Work> {
    let share: Vec<MicrobatchId> = rule.share(stage, replica).collect();
    let minibatches = share.chunk_by(|a, b| a.0 / rule.microbatches == b.0 / rule.microbatches);
    let both = |items: &[MicrobatchId]| {
        let forwards = items.iter().map(|&item| Work::forward(item));
        forwards.chain(items.iter().map(|&item| Work::backward(item))).collect::<Vec<_>>()
    };
    minibatches.flat_map(both).collect()
}
