//! GPipe with backwards in reverse order, as in figure 2c of Huang et al., NeurIPS 2019.

use crate::plan::StageId;
use crate::plan::schedule::Schedule;
use crate::schedule::action::{Phase, Work};
use crate::schedule::list_scheduler::{Choice, play};
use crate::schedule::lower::lower;
use crate::schedule::semantics::{Rule, StepCount};
use crate::schedule::shape::one_stage_each;
use crate::schedule::{MicrobatchId, Pipeline, Program, ScheduleError};

pub fn gpipe_reversed(pipeline: &Pipeline, count: StepCount) -> Result<Program, ScheduleError> {
    one_stage_each(Schedule::GpipeReversed, pipeline)?;
    let mut rule = Rule::new(Schedule::GpipeReversed, pipeline, count)?;
    for stage in &mut rule.stages {
        stage.cap = rule.microbatches.div_ceil(stage.replicas);
    }
    let stages = (0..).map(StageId).zip(&pipeline.stages);
    let lists = stages.flat_map(|(stage, of)| (0..of.replicas).map(move |replica| (stage, replica)));
    let lists: Vec<Vec<Work>> = lists.map(|(stage, replica)| fill_drain(&rule, stage, replica)).collect();
    let order = play(pipeline, &rule, Choice::Fixed(&lists))?;
    Ok(lower(pipeline, &rule, &order))
}

fn fill_drain(rule: &Rule, stage: StageId, replica: u32) -> Vec<Work> {
    let share: Vec<MicrobatchId> = rule.share(stage, replica).collect();
    let minibatches = share.chunk_by(|a, b| a.0 / rule.microbatches == b.0 / rule.microbatches);
    let both = |items: &[MicrobatchId]| {
        let all = |part| items.iter().map(move |&item| Work { stage, item, part });
        all(Phase::Forward).chain(all(Phase::Backward).rev()).collect::<Vec<_>>()
    };
    minibatches.flat_map(both).collect()
}
