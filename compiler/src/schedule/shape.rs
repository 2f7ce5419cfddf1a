//! Pipelines by hand and their validity: chains of stages, and which rank holds which stage.
//!
//! Under the schedules with chunks a rank holds several stages. Two placements are published: a loop, where stage s is on rank
//! s mod p, and a V, where the stages go down the ranks and come back up, so that the first and the last stage share a rank.

use crate::plan::in_flight::common_divisor;
use crate::plan::ports::Ports;
use crate::schedule::{Edge, Pipeline, RankId, Schedule, ScheduleError, StageSpec, published_caps};

/// No cluster that a program of this form can drive has more workers.
pub const MAX_WORKERS: u64 = 1 << 16;

/// The least common multiple, with 1 for 0; the largest number where it is larger.
pub fn common_multiple(a: u64, b: u64) -> u64 {
    (a.max(1) / common_divisor(a, b)).saturating_mul(b.max(1))
}

impl Pipeline {
    /// A chain of stages, each speaking to the next, with the published in-flight caps.
    pub fn chain(mut stages: Vec<StageSpec>) -> Self {
        let replicas: Vec<u32> = stages.iter().map(|stage| stage.replicas).collect();
        for (stage, cap) in stages.iter_mut().zip(published_caps(&replicas)) {
            stage.cap = cap;
        }
        let edges = (1..stages.len() as u32).map(|to| Edge::new(to - 1, to)).collect();
        Self { ranks: one_each(stages.len()), stages, edges, ports: Ports::default() }
    }

    /// Minibatches after which, in a round robin, every stage begins a round again: the least common multiple of all replicas.
    pub fn rounds(&self) -> u64 {
        self.stages.iter().fold(1, |all, stage| common_multiple(all, u64::from(stage.replicas)))
    }

    /// The same stages on `ranks` ranks: stage s on rank s mod p, as the schedules that loop have it.
    pub fn looped(mut self, ranks: u32) -> Self {
        self.ranks = (0..self.stages.len() as u32).map(|stage| RankId(stage % ranks.max(1))).collect();
        self
    }

    /// The same stages folded once in the middle: stages s and 2p - 1 - s on rank s, as the schedules on a V have it.
    pub fn folded(mut self) -> Self {
        let last = self.stages.len().saturating_sub(1) as u32;
        self.ranks = (0..=last).map(|stage| RankId(stage.min(last - stage))).collect();
        self.ranks.truncate(self.stages.len());
        self
    }

    /// Stages of each rank.
    pub fn chunks(&self) -> u32 {
        let ranks = self.ranks.iter().map(|rank| rank.0 + 1).max().unwrap_or(1);
        (self.stages.len() as u32).div_ceil(ranks)
    }

    /// A chain of perfectly balanced stages: a stage's time is its number of replicas, backward `ratio` times forward.
    pub fn balanced(replicas: &[u32], ratio: f64) -> Self {
        Self::chain(replicas.iter().map(|&r| StageSpec::new(r, f64::from(r), f64::from(r) * ratio)).collect())
    }

    /// The same pipeline with other in-flight caps, one for each stage.
    pub fn with_caps(mut self, caps: &[u32]) -> Self {
        for (stage, &cap) in self.stages.iter_mut().zip(caps) {
            stage.cap = cap;
        }
        self
    }

    /// Says what keeps this from being a pipeline, if anything does.
    pub fn validate(&self) -> Result<(), ScheduleError> {
        if self.stages.is_empty() {
            return Err(ScheduleError::NoStages);
        }
        let replicas: Vec<u32> = self.stages.iter().map(|stage| stage.replicas).collect();
        check_ranks(&self.ranks, &replicas).map_err(|what| ScheduleError::BadRanks { what })?;
        let workers = replicas.iter().map(|&r| u64::from(r)).sum::<u64>() / u64::from(self.chunks());
        for (index, stage) in self.stages.iter().enumerate() {
            if stage.replicas == 0 || stage.cap == 0 {
                return Err(ScheduleError::EmptyStage { stage: index, replicas: stage.replicas, cap: stage.cap });
            }
            for (what, time) in [
                ("forward", stage.forward),
                ("backward", stage.backward),
                ("weight part of the backward", stage.weight),
                ("recomputing", stage.recompute.unwrap_or(0.0)),
                ("step", stage.step),
                ("all-reduce", stage.all_reduce),
            ] {
                check_time(&format!("{what} of stage {index}"), time)?;
            }
        }
        if workers > MAX_WORKERS {
            return Err(ScheduleError::TooManyWorkers { workers, most: MAX_WORKERS });
        }
        let mut seen = std::collections::BTreeSet::new();
        for edge in &self.edges {
            let (from, to) = (edge.from.0, edge.to.0);
            if from >= to || edge.to.index() >= self.stages.len() || !seen.insert((from, to)) {
                return Err(ScheduleError::BadEdge { from, to });
            }
            check_time(&format!("transfer {from} > {to}"), edge.forward_us)?;
            check_time(&format!("transfer {to} > {from}"), edge.backward_us)?;
        }
        Ok(())
    }
}

/// A rank for each stage.
pub fn one_each(stages: usize) -> Vec<RankId> {
    (0..stages as u32).map(RankId).collect()
}

/// Says what keeps these from being the ranks of stages with so many replicas: ranks are numbered from 0 in the order of their
/// first stages, each holds equally many, and those of one rank have equally many replicas.
pub fn check_ranks(ranks: &[RankId], replicas: &[u32]) -> Result<(), String> {
    if ranks.len() != replicas.len() {
        return Err(format!("{} ranks for {} stages", ranks.len(), replicas.len()));
    }
    let mut held: Vec<(u32, u32)> = Vec::new();
    for (stage, (rank, &replicas)) in ranks.iter().zip(replicas).enumerate() {
        let next = held.len();
        match held.get_mut(rank.index()) {
            Some(&mut (_, of)) if of != replicas => {
                return Err(format!(
                    "stage {stage} has {replicas} replicas, another stage of rank {} has {of}",
                    rank.0
                ));
            }
            Some((count, _)) => *count += 1,
            None if rank.index() == next => held.push((1, replicas)),
            None => return Err(format!("stage {stage} is on rank {}; the next new rank is not it", rank.0)),
        }
    }
    let most = held.iter().map(|(count, _)| *count).max();
    match held.iter().position(|(count, _)| Some(*count) != most) {
        Some(rank) => Err(format!("rank {rank} holds fewer stages than another; all hold equally many")),
        None => Ok(()),
    }
}

fn check_time(what: &str, microseconds: f64) -> Result<(), ScheduleError> {
    // A thousand seconds: beyond it the simulated clock of a long run could overflow.
    if (0.0..=1e9).contains(&microseconds) {
        return Ok(());
    }
    Err(ScheduleError::BadTime { what: what.to_string(), microseconds })
}

/// Ranks of a pipeline.
pub fn ranks(pipeline: &Pipeline) -> u32 {
    pipeline.stages.len() as u32 / pipeline.chunks().max(1)
}

/// Refuses ranks that hold more than one stage.
pub fn one_stage_each(schedule: Schedule, pipeline: &Pipeline) -> Result<(), ScheduleError> {
    placed(schedule, pipeline, "one stage on each rank", |p| p.chunks() == 1)
}

/// Refuses stages that do not go round the ranks: stage s on rank s mod p.
pub fn looped(schedule: Schedule, pipeline: &Pipeline) -> Result<(), ScheduleError> {
    let p = ranks(pipeline);
    placed(schedule, pipeline, "stage s on rank s mod p", |of| of.clone().looped(p).ranks == of.ranks)
}

/// Refuses stages that do not go down the ranks and come back.
pub fn folded(schedule: Schedule, pipeline: &Pipeline) -> Result<(), ScheduleError> {
    placed(schedule, pipeline, "stages s and 2p - 1 - s on rank s", |of| {
        of.chunks() == 2 && of.clone().folded().ranks == of.ranks
    })
}

fn placed(
    schedule: Schedule,
    pipeline: &Pipeline,
    needed: &'static str,
    holds: impl Fn(&Pipeline) -> bool,
) -> Result<(), ScheduleError> {
    pipeline.validate()?;
    if holds(pipeline) {
        return Ok(());
    }
    let found = match pipeline.chunks() {
        1 => "one stage".to_string(),
        chunks => {
            format!("{chunks} stages, on ranks {:?}", pipeline.ranks.iter().map(|rank| rank.0).collect::<Vec<_>>())
        }
    };
    Err(ScheduleError::Placement { schedule, needed, found })
}
