//! The placement of workers on processes.

use crate::exec::stage_code::StageCode;
use compiler::schedule::{Instruction, Program, WorkerId};
use std::collections::{BTreeMap, BTreeSet};

/// The process of every worker. Process 0 coordinates and reports; it may have no worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerPlacement {
    /// Indexed by worker.
    pub of: Vec<usize>,
    pub processes: usize,
}

impl WorkerPlacement {
    /// One process per worker, plus process 0 without a worker.
    pub fn beside(workers: usize) -> WorkerPlacement {
        WorkerPlacement { of: (1..=workers).collect(), processes: workers + 1 }
    }

    /// Splits workers in order over `processes` processes, as evenly as possible. `None` if some would have none.
    pub fn dealt(workers: usize, processes: usize) -> Option<WorkerPlacement> {
        let of = (0..workers).map(|worker| worker * processes / workers.max(1)).collect();
        (1..=workers).contains(&processes).then_some(WorkerPlacement { of, processes })
    }

    /// Assigns `hosts[i]` consecutive workers to host i. `None` if the sum is not `workers`.
    pub fn by_host(workers: usize, hosts: &[u32]) -> Option<WorkerPlacement> {
        let placement: u64 = hosts.iter().map(|count| u64::from(*count)).sum();
        if placement != workers as u64 {
            return None;
        }
        let of = (0..).zip(hosts).flat_map(|(host, count)| (0..*count).map(move |_| host)).collect();
        Some(WorkerPlacement { of, processes: hosts.len() })
    }

    pub fn workers(&self, process: usize) -> impl Iterator<Item = usize> + '_ {
        self.of.iter().enumerate().filter(move |(_, of)| **of == process).map(|(worker, _)| worker)
    }

    /// Display name of a process: its workers and their stages.
    pub fn name(&self, program: &Program, process: usize) -> String {
        let workers: Vec<usize> = self.workers(process).filter(|worker| *worker < program.workers.len()).collect();
        let of = |worker: &usize| program.stages_of(program.workers[*worker].rank).map(|stage| stage.0);
        let stages: BTreeSet<u32> = workers.iter().flat_map(of).collect();
        let names: Vec<String> = workers.iter().map(|w| program.worker_name(WorkerId(*w as u32))).collect();
        let stages: Vec<String> = stages.iter().map(u32::to_string).collect();
        let plural = |count: usize| if count == 1 { "" } else { "s" };
        match workers.is_empty() {
            true => "the process that reports".to_string(),
            false => format!(
                "worker{} {} (stage{} {})",
                plural(names.len()),
                names.join(", "),
                plural(stages.len()),
                stages.join(", ")
            ),
        }
    }

    /// Pairs of processes that need a connection, the lower first: channels, communicators, and process 0 with all.
    /// `agrees` is true if all workers share a gradient norm at every step.
    pub fn lines(&self, program: &Program, codes: &[StageCode], agrees: bool) -> BTreeSet<(usize, usize)> {
        let mut lines: BTreeSet<(usize, usize)> = (1..self.processes).map(|process| (0, process)).collect();
        let mut together: Vec<Vec<usize>> = Vec::new();
        for (worker, own) in program.workers.iter().enumerate() {
            for instruction in &own.instructions {
                if let Instruction::Send { peer, .. } = instruction
                    && let (Some(from), Some(to)) = (self.of.get(worker), self.of.get(peer.index()))
                    && from != to
                {
                    lines.insert((*from.min(to), *from.max(to)));
                }
            }
        }
        let holders = |stages: &BTreeSet<usize>| -> Vec<usize> {
            let holds = |rank| program.stages_of(rank).any(|stage| stages.contains(&stage.index()));
            let workers = program.workers.iter().zip(&self.of);
            workers.filter(|(own, _)| holds(own.rank)).map(|(_, process)| *process).collect()
        };
        let mut readers: BTreeMap<&str, BTreeSet<usize>> = BTreeMap::new();
        for (stage, code) in codes.iter().enumerate() {
            together.push(holders(&BTreeSet::from([stage])));
            code.parameters.iter().for_each(|named| _ = readers.entry(&named.name).or_default().insert(stage));
        }
        together.extend(readers.values().filter(|stages| stages.len() > 1).map(holders));
        if agrees {
            together.push(self.of.clone());
        }
        for group in together {
            let group: BTreeSet<usize> = group.into_iter().collect();
            for &one in &group {
                lines.extend(group.range(one + 1..).map(|&other| (one, other)));
            }
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn even_placement_is_contiguous() {
        assert_eq!(WorkerPlacement::dealt(5, 2).map(|placement| placement.of), Some(vec![0, 0, 0, 1, 1]));
        assert_eq!(WorkerPlacement::dealt(3, 3).map(|placement| placement.of), Some(vec![0, 1, 2]));
        assert_eq!((WorkerPlacement::dealt(2, 3), WorkerPlacement::dealt(2, 0)), (None, None));
        assert_eq!(WorkerPlacement::by_host(3, &[1, 2]).map(|placement| placement.of), Some(vec![0, 1, 1]));
        assert_eq!(WorkerPlacement::by_host(3, &[u32::MAX, 2]), None);
        assert_eq!(WorkerPlacement::beside(2), WorkerPlacement { of: vec![1, 2], processes: 3 });
    }
}
