//! Construction and validation of pipelines.
//!
//! With chunks a rank holds several stages. In a loop, stage s is on rank s mod p. In a V, stages go down the ranks and
//! back up, so that the first and the last stage share a rank.

use crate::plan::in_flight::common_divisor;
use crate::plan::ports::Ports;
use crate::plan::schedule::Schedule;
use crate::schedule::{Edge, Pipeline, RankId, ScheduleError, StageSpec, published_caps};

pub const MAX_WORKERS: u64 = 1 << 16;

/// Least common multiple, saturating; 0 counts as 1.
pub fn common_multiple(a: u64, b: u64) -> u64 {
    (a.max(1) / common_divisor(a, b)).saturating_mul(b.max(1))
}

impl Pipeline {
    pub fn chain(mut stages: Vec<StageSpec>) -> Self {
        let replicas: Vec<u32> = stages.iter().map(|stage| stage.replicas).collect();
        for (stage, cap) in stages.iter_mut().zip(published_caps(&replicas)) {
            stage.cap = cap;
        }
        let edges = (1..stages.len() as u32).map(|to| Edge::new(to - 1, to)).collect();
        Self { ranks: one_each(stages.len()), stages, edges, ports: Ports::default() }
    }

    /// The least common multiple of all replica counts: minibatches between common round boundaries.
    pub fn rounds(&self) -> u64 {
        self.stages.iter().fold(1, |all, stage| common_multiple(all, u64::from(stage.replicas)))
    }

    /// Places stage s on rank s mod p.
    pub fn looped(mut self, ranks: u32) -> Self {
        self.ranks = (0..self.stages.len() as u32).map(|stage| RankId(stage % ranks.max(1))).collect();
        self
    }

    /// Places stages s and 2p - 1 - s on rank s.
    pub fn folded(mut self) -> Self {
        let last = self.stages.len().saturating_sub(1) as u32;
        self.ranks = (0..=last).map(|stage| RankId(stage.min(last - stage))).collect();
        self.ranks.truncate(self.stages.len());
        self
    }

    pub fn chunks(&self) -> u32 {
        let ranks = self.ranks.iter().map(|rank| rank.0 + 1).max().unwrap_or(1);
        (self.stages.len() as u32).div_ceil(ranks)
    }

    /// A balanced chain: a stage's forward time is its replica count, its backward `ratio` times that.
    pub fn balanced(replicas: &[u32], ratio: f64) -> Self {
        Self::chain(replicas.iter().map(|&r| StageSpec::new(r, f64::from(r), f64::from(r) * ratio)).collect())
    }

    pub fn with_caps(mut self, caps: &[u32]) -> Self {
        for (stage, &cap) in self.stages.iter_mut().zip(caps) {
            stage.cap = cap;
        }
        self
    }

    /// Checks ranks, times and edges. Generators and the simulator require a valid pipeline.
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
                ("weight-gradient pass", stage.weight),
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

pub fn one_each(stages: usize) -> Vec<RankId> {
    (0..stages as u32).map(RankId).collect()
}

/// Checks ranks: numbered in the order of their first stages, with equally many stages each, and equal replica counts
/// within a rank.
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
            None => return Err(format!("stage {stage} is on rank {}, which is not the next rank", rank.0)),
        }
    }
    let most = held.iter().map(|(count, _)| *count).max();
    match held.iter().position(|(count, _)| Some(*count) != most) {
        Some(rank) => Err(format!("rank {rank} has fewer stages than another; all need equally many")),
        None => Ok(()),
    }
}

fn check_time(what: &str, microseconds: f64) -> Result<(), ScheduleError> {
    // 1e9 us are a thousand seconds; more could overflow the simulated clock of a long run.
    if (0.0..=1e9).contains(&microseconds) {
        return Ok(());
    }
    Err(ScheduleError::BadTime { what: what.to_string(), microseconds })
}

pub fn ranks(pipeline: &Pipeline) -> u32 {
    pipeline.stages.len() as u32 / pipeline.chunks().max(1)
}

pub fn one_stage_each(schedule: Schedule, pipeline: &Pipeline) -> Result<(), ScheduleError> {
    placed(schedule, pipeline, "one stage on each rank", |p| p.chunks() == 1)
}

/// An error unless stage s is on rank s mod p.
pub fn looped(schedule: Schedule, pipeline: &Pipeline) -> Result<(), ScheduleError> {
    let p = ranks(pipeline);
    placed(schedule, pipeline, "stage s on rank s mod p", |of| of.clone().looped(p).ranks == of.ranks)
}

/// An error unless the stages form a V.
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
