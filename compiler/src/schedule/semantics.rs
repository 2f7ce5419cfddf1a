//! Semantics of schedules: the replica, the update and the weight version of each item. Everything else only affects
//! time.
//!
//! Updates of a stage are counted in *rounds*; round k turns version k into version k + 1.
//!
//! | schedule        | round of item b | replica of item b | version of item b at stage s |
//! | ---             | ---             | ---               | ---                          |
//! | `1f1b-rr`       | ⌊b / r_s⌋       | b mod r_s         | max(0, round − (c_s − 1)), so the forward of round k waits for the update of round k − c_s |
//! | `1f1b-rr-vsync` | ⌊b / r_s⌋       | b mod r_s         | the newest that contains no minibatch beyond those in stage 0's version for b |
//! | `1f1b-rr-newest` | ⌊b / r_s⌋      | b mod r_s         | forward as `1f1b-rr`, backward the round |
//! | all with a flush | ⌊b / M⌋        | (b mod M) mod r_s | the round: the newest possible |
//! | `2bw`           | ⌊b / M⌋         | (b mod M) mod r_s | max(0, round − 1), PipeDream-2BW (Narayanan et al., ICML 2021) |
//! | `inference`     | none            | b mod r_s         | 0 |
//!
//! r_s is the number of replicas, c_s the in-flight cap, M the micro-batches per minibatch. With equal replica counts,
//! vertical sync uses stage 0's version number at every stage.

use crate::plan::StageId;
use crate::plan::schedule::{Schedule, UpdateRule, VersionRule};
use crate::schedule::{MicrobatchId, Pipeline, Program, ProgramStage, ScheduleError, StageSpec, Version};

/// Most items times stages of a program; beyond it the instruction lists take many gigabytes.
const MAX_WORK: u64 = 1 << 24;

/// The number of items that one replica gets, assigned round-robin.
pub fn dealt(items: u32, replicas: u32, replica: u32) -> u64 {
    let others = replicas.saturating_sub(1).saturating_sub(replica);
    (u64::from(items) + u64::from(others)) / u64::from(replicas.max(1))
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StepCount {
    /// At least 1.
    pub minibatches: u32,
    /// At least 1; exactly 1 under the round-robin schedules.
    pub microbatches: u32,
}

impl StepCount {
    pub fn minibatches(minibatches: u32) -> Self {
        Self { minibatches, microbatches: 1 }
    }
}

/// Replica, round and weight version of every item, for one run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rule {
    pub schedule: Schedule,
    pub items: u32,
    pub microbatches: u32,
    pub stages: Vec<ProgramStage>,
}

impl Rule {
    /// The rule for a run of this pipeline. Fails on an empty or too long run.
    pub fn new(schedule: Schedule, pipeline: &Pipeline, count: StepCount) -> Result<Self, ScheduleError> {
        pipeline.validate()?;
        let StepCount { minibatches, microbatches } = count;
        if minibatches == 0 || microbatches == 0 {
            return Err(ScheduleError::NoWork { schedule, minibatches, microbatches });
        }
        if schedule.is_round_robin() && microbatches != 1 {
            return Err(ScheduleError::WholeMinibatches { schedule, microbatches });
        }
        let items = u64::from(minibatches) * u64::from(microbatches);
        // With a flush, a replica without items still takes part in every reduction, bucket by bucket.
        let each = |stage: &StageSpec| stage.buckets.len().max(1) as u64 * if stage.zero > 0 { 2 } else { 1 };
        let posts = |stage: &StageSpec| u64::from(stage.replicas).saturating_mul(each(stage));
        let posts = pipeline.stages.iter().map(posts).fold(0, u64::saturating_add);
        let updates = if schedule.is_round_robin() { 1 } else { u64::from(minibatches) };
        let work = items.saturating_mul(pipeline.stages.len() as u64).saturating_add(updates.saturating_mul(posts));
        if work > MAX_WORK {
            return Err(ScheduleError::TooLong { items, stages: pipeline.stages.len() });
        }
        let stages = pipeline.ranks.iter().zip(&pipeline.stages);
        // By part, the backward contains the recomputation.
        let recomputes = |stage: &StageSpec| schedule.trains() && stage.recompute.is_some() && !stage.recomputes_parts;
        let reduces = |stage: &StageSpec| schedule.trains() && stage.reduces();
        let buckets = |stage: &StageSpec| if reduces(stage) { stage.buckets.len().max(1) as u32 } else { 1 };
        let stages = stages.map(|(&rank, stage)| ProgramStage {
            rank,
            replicas: stage.replicas,
            cap: stage.cap,
            recompute: recomputes(stage),
            buckets: buckets(stage),
            zero: if reduces(stage) { stage.zero } else { 0 },
            shard_degree: if reduces(stage) { stage.shard_degree } else { 0 },
        });
        Ok(Self { schedule, items: items as u32, microbatches, stages: stages.collect() })
    }

    pub fn of(program: &Program) -> Self {
        let Program { schedule, items, microbatches, .. } = *program;
        Self { schedule, items, microbatches, stages: program.stages.clone() }
    }

    fn replicas(&self, stage: StageId) -> u32 {
        self.stages[stage.index()].replicas
    }

    pub fn replica(&self, stage: StageId, item: MicrobatchId) -> u32 {
        let place = if self.schedule.is_by_minibatch() { item.0 % self.microbatches } else { item.0 };
        place % self.replicas(stage)
    }

    /// The round that the item's gradient belongs to.
    pub fn round(&self, stage: StageId, item: MicrobatchId) -> u32 {
        if self.schedule.is_round_robin() { item.0 / self.replicas(stage) } else { item.0 / self.microbatches }
    }

    /// Earlier items of the same round.
    pub fn place(&self, stage: StageId, item: MicrobatchId) -> u32 {
        if self.schedule.is_round_robin() { item.0 % self.replicas(stage) } else { item.0 % self.microbatches }
    }

    /// Number of updates of a stage.
    pub fn rounds(&self, stage: StageId) -> u32 {
        match self.schedule.update() {
            UpdateRule::None => 0,
            UpdateRule::Round => self.items.div_ceil(self.replicas(stage)),
            UpdateRule::Flush | UpdateRule::DoubleBuffered => self.items / self.microbatches,
        }
    }

    /// Items that one round averages; fewer in a short last round.
    pub fn count(&self, stage: StageId, round: u32) -> u32 {
        if !self.schedule.is_round_robin() {
            return self.microbatches;
        }
        let replicas = self.replicas(stage);
        replicas.min(self.items.saturating_sub(round.saturating_mul(replicas)))
    }

    /// The version of the item's backward: that of its forward, or the newest without stashing.
    pub fn backward_version(&self, stage: StageId, item: MicrobatchId) -> Version {
        if self.schedule.stashes() { self.version(stage, item) } else { Version(self.round(stage, item)) }
    }

    /// The version of the item's forward.
    pub fn version(&self, stage: StageId, item: MicrobatchId) -> Version {
        let stashed =
            |stage: StageId| (item.0 / self.replicas(stage)).saturating_sub(self.stages[stage.index()].cap - 1);
        Version(match self.schedule.versions() {
            VersionRule::Single if !self.schedule.trains() => 0,
            VersionRule::Single => self.round(stage, item),
            VersionRule::Previous => self.round(stage, item).saturating_sub(1),
            VersionRule::Stashed | VersionRule::Newest => stashed(stage),
            VersionRule::Synchronised => {
                let seen = u64::from(stashed(StageId(0))) * u64::from(self.replicas(StageId(0)));
                (seen / u64::from(self.replicas(stage))) as u32
            }
        })
    }

    /// True if `item` may not follow `after` on a worker. Items keep their order, so that gradient sums are bitwise
    /// equal under all schedules. Only custom tables may reorder within a minibatch.
    pub fn is_out_of_order(&self, item: MicrobatchId, after: MicrobatchId) -> bool {
        match self.schedule.is_custom() {
            true => after.0 / self.microbatches > item.0 / self.microbatches,
            false => after > item,
        }
    }

    /// The items of one replica, ascending.
    pub fn share(&self, stage: StageId, replica: u32) -> impl Iterator<Item = MicrobatchId> + '_ {
        let period = if self.schedule.is_by_minibatch() { self.microbatches } else { self.items };
        let starts = (0..self.items).step_by(period as usize);
        starts.flat_map(move |start| {
            (replica..period).step_by(self.replicas(stage) as usize).map(move |offset| MicrobatchId(start + offset))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(schedule: Schedule, replicas: &[u32], count: StepCount) -> Rule {
        Rule::new(schedule, &Pipeline::balanced(replicas, 2.0), count).unwrap()
    }

    fn versions(rule: &Rule, stage: u32) -> Vec<u32> {
        (0..rule.items).map(|item| rule.version(StageId(stage), MicrobatchId(item)).0).collect()
    }

    #[test]
    fn straight_pipelines_use_the_published_versions() {
        let stash = rule(Schedule::OneFOneBRr, &[1, 1, 1], StepCount::minibatches(6));
        assert_eq!(versions(&stash, 0), [0, 0, 0, 1, 2, 3]);
        assert_eq!(versions(&stash, 1), [0, 0, 1, 2, 3, 4]);
        assert_eq!(versions(&stash, 2), [0, 1, 2, 3, 4, 5]);
        let vsync = rule(Schedule::OneFOneBRrVsync, &[1, 1, 1], StepCount::minibatches(6));
        assert_eq!(versions(&vsync, 2), [0, 0, 0, 1, 2, 3]);
    }

    #[test]
    fn replicas_share_a_round() {
        let rule = rule(Schedule::OneFOneBRr, &[2, 1], StepCount::minibatches(7));
        assert_eq!(versions(&rule, 0), [0, 0, 0, 0, 1, 1, 2]);
        assert_eq!(versions(&rule, 1), [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!((rule.rounds(StageId(0)), rule.count(StageId(0), 2), rule.count(StageId(0), 3)), (4, 2, 1));
        assert_eq!(rule.share(StageId(0), 1).map(|item| item.0).collect::<Vec<_>>(), [1, 3, 5]);
    }

    #[test]
    fn vertical_sync_counts_minibatches_where_replicas_differ() {
        // For minibatch 6 stage 0 uses version 2, which contains minibatches 0 to 3; stage 1 makes one update for each.
        let rule = rule(Schedule::OneFOneBRrVsync, &[2, 1], StepCount::minibatches(7));
        assert_eq!(versions(&rule, 0), [0, 0, 0, 0, 1, 1, 2]);
        assert_eq!(versions(&rule, 1), [0, 0, 0, 0, 2, 2, 4]);
    }

    #[test]
    fn flush_and_double_buffers() {
        let count = StepCount { minibatches: 3, microbatches: 3 };
        assert_eq!(versions(&rule(Schedule::OneFOneB, &[2, 1], count), 0), [0, 0, 0, 1, 1, 1, 2, 2, 2]);
        let two_bw = rule(Schedule::TwoBw, &[2, 1], count);
        assert_eq!(versions(&two_bw, 0), [0, 0, 0, 0, 0, 0, 1, 1, 1]);
        assert_eq!(two_bw.share(StageId(0), 0).map(|item| item.0).collect::<Vec<_>>(), [0, 2, 3, 5, 6, 8]);
    }

    #[test]
    fn refuses_what_it_cannot_run() {
        let pipeline = Pipeline::balanced(&[1, 1], 2.0);
        let none = Rule::new(Schedule::Gpipe, &pipeline, StepCount::minibatches(0));
        assert!(matches!(none, Err(ScheduleError::NoWork { .. })));
        let split = Rule::new(Schedule::OneFOneBRr, &pipeline, StepCount { minibatches: 1, microbatches: 2 });
        assert!(matches!(split, Err(ScheduleError::WholeMinibatches { .. })));
        let long = Rule::new(Schedule::OneFOneBRr, &pipeline, StepCount::minibatches(u32::MAX));
        assert!(matches!(long, Err(ScheduleError::TooLong { .. })));
    }
}
