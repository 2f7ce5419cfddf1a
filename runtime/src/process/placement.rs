//! The placement of workers, and of the ranks of their tensor-parallel groups, on processes.

use crate::comm::tensor_group::GroupRank;
use crate::exec::stage_code::StageCode;
use compiler::schedule::{Instruction, Program, WorkerId};
use std::collections::{BTreeMap, BTreeSet};

/// The process of every rank: a worker, or with tensor parallelism a device of its group. The ranks of a group are
/// consecutive. Process 0 coordinates and reports; it may have no rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerPlacement {
    /// Indexed by global rank: see [`GroupRank::global`].
    pub processes_of_ranks: Vec<usize>,
    pub processes: usize,
    /// The tensor-parallel degree.
    pub degree: usize,
}

impl WorkerPlacement {
    /// One process per rank, plus process 0 without a rank.
    pub fn beside(workers: usize, degree: usize) -> WorkerPlacement {
        let ranks = workers * degree;
        WorkerPlacement { processes_of_ranks: (1..=ranks).collect(), processes: ranks + 1, degree }
    }

    /// Splits ranks in order over `processes` processes, as evenly as possible. `None` if some would have none.
    pub fn even(workers: usize, degree: usize, processes: usize) -> Option<WorkerPlacement> {
        let ranks = workers * degree;
        let processes_of_ranks = (0..ranks).map(|rank| rank * processes / ranks.max(1)).collect();
        (1..=ranks).contains(&processes).then_some(WorkerPlacement { processes_of_ranks, processes, degree })
    }

    /// Assigns `hosts[i]` consecutive ranks to host i. `None` if their sum differs.
    pub fn by_host(workers: usize, degree: usize, hosts: &[u32]) -> Option<WorkerPlacement> {
        let ranks: u64 = hosts.iter().map(|count| u64::from(*count)).sum();
        if ranks != (workers * degree) as u64 {
            return None;
        }
        let processes_of_ranks = (0..).zip(hosts).flat_map(|(host, count)| (0..*count).map(move |_| host)).collect();
        Some(WorkerPlacement { processes_of_ranks, processes: hosts.len(), degree })
    }

    /// The global ranks of a process.
    pub fn ranks(&self, process: usize) -> impl Iterator<Item = usize> + '_ {
        self.processes_of_ranks
            .iter()
            .enumerate()
            .filter(move |(_, process_of_rank)| **process_of_rank == process)
            .map(|(rank, _)| rank)
    }

    /// The worker of a global rank.
    pub fn worker(&self, rank: usize) -> usize {
        rank / self.degree
    }

    /// The place of a global rank in its tensor-parallel group.
    pub fn tensor_rank(&self, rank: usize) -> usize {
        rank % self.degree
    }

    /// The tensor-parallel ranks that a process has of some worker.
    pub fn tensor_ranks(&self, process: usize) -> BTreeSet<usize> {
        self.ranks(process).map(|rank| self.tensor_rank(rank)).collect()
    }

    /// True if a tensor-parallel group is in several processes.
    pub fn has_split_groups(&self) -> bool {
        self.processes_of_ranks.chunks(self.degree).any(|group| group.iter().any(|process| *process != group[0]))
    }

    /// Display name of a process: its rank if users start the ranks, its workers and their stages. A worker that it has
    /// only in part is named with its tensor-parallel rank.
    pub fn name(&self, program: &Program, process: usize) -> String {
        let mut tensor_ranks: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for rank in self.ranks(process) {
            tensor_ranks.entry(self.worker(rank)).or_default().push(self.tensor_rank(rank));
        }
        let workers: Vec<usize> =
            tensor_ranks.keys().copied().filter(|worker| *worker < program.workers.len()).collect();
        let stages_of_worker = |worker: &usize| program.stages_of(program.workers[*worker].rank).map(|stage| stage.0);
        let stages: BTreeSet<u32> = workers.iter().flat_map(stages_of_worker).collect();
        let name = |worker: &usize| {
            let (worker, ranks) = (WorkerId(*worker as u32), &tensor_ranks[worker]);
            let name = program.worker_name(worker);
            match &ranks[..] {
                whole if whole.len() == self.degree => name,
                [rank] => rank_name(program, worker, GroupRank { degree: self.degree, rank: *rank }),
                [first, .., last] => format!("{name} tensor ranks {first} to {last}"),
                [] => name,
            }
        };
        let names: Vec<String> = workers.iter().map(name).collect();
        let stages: Vec<String> = stages.iter().map(u32::to_string).collect();
        let plural = |count: usize| if count == 1 { "" } else { "s" };
        let (worker_list, stage_list) = (names.join(", "), stages.join(", "));
        let (worker, stage) = (
            format!("worker{} {worker_list}", plural(names.len())),
            format!("stage{} {stage_list}", plural(stages.len())),
        );
        match workers.is_empty() {
            true => "the process that reports".to_string(),
            // Users start ranks by number, unless the process that reports has started them.
            false if self.ranks(0).any(|rank| self.worker(rank) < program.workers.len()) => {
                format!("rank {process} ({worker} of {stage})")
            }
            false => format!("{worker} ({stage})"),
        }
    }

    /// Pairs of processes that need a connection, the lower first: channels, communicators, and process 0 with all.
    /// `shares_norm` is true if all workers share a gradient norm at every step.
    pub fn lines(&self, program: &Program, codes: &[StageCode], shares_norm: bool) -> BTreeSet<(usize, usize)> {
        let mut lines: BTreeSet<(usize, usize)> = (1..self.processes).map(|process| (0, process)).collect();
        let mut groups: Vec<Vec<usize>> = Vec::new();
        let mut readers: BTreeMap<&str, BTreeSet<usize>> = BTreeMap::new();
        for (stage, code) in codes.iter().enumerate() {
            code.parameters.iter().for_each(|named| _ = readers.entry(&named.name).or_default().insert(stage));
        }
        for rank in 0..self.degree {
            let rank = GroupRank { degree: self.degree, rank };
            let process_of = |worker: usize| self.processes_of_ranks.get(rank.global(worker)).copied();
            for (worker, worker_program) in program.workers.iter().enumerate() {
                for instruction in &worker_program.instructions {
                    if let Instruction::Send { peer, .. } = instruction
                        && let (Some(from), Some(to)) = (process_of(worker), process_of(peer.index()))
                        && from != to
                    {
                        lines.insert((from.min(to), from.max(to)));
                    }
                }
            }
            let holders = |stages: &BTreeSet<usize>| -> Vec<usize> {
                let holds = |rank| program.stages_of(rank).any(|stage| stages.contains(&stage.index()));
                let workers = program.workers.iter().enumerate();
                workers
                    .filter(|(_, worker_program)| holds(worker_program.rank))
                    .filter_map(|(worker, _)| process_of(worker))
                    .collect()
            };
            groups.extend((0..codes.len()).map(|stage| holders(&BTreeSet::from([stage]))));
            groups.extend(readers.values().filter(|stages| stages.len() > 1).map(holders));
            if shares_norm {
                groups.push((0..program.workers.len()).filter_map(process_of).collect());
            }
        }
        // The group of each worker.
        groups.extend(self.processes_of_ranks.chunks(self.degree).map(<[usize]>::to_vec));
        for group in groups {
            let group: BTreeSet<usize> = group.into_iter().collect();
            for &process in &group {
                lines.extend(group.range(process + 1..).map(|&other| (process, other)));
            }
        }
        lines
    }
}

/// Display name of a worker's rank: the worker's own without tensor parallelism.
pub fn rank_name(program: &Program, worker: WorkerId, rank: GroupRank) -> String {
    let name = program.worker_name(worker);
    match rank.degree {
        1 => name,
        _ => format!("{name} tensor rank {}", rank.rank),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn even_placement_is_contiguous() {
        assert_eq!(
            WorkerPlacement::even(5, 1, 2).map(|placement| placement.processes_of_ranks),
            Some(vec![0, 0, 0, 1, 1])
        );
        assert_eq!(WorkerPlacement::even(3, 1, 3).map(|placement| placement.processes_of_ranks), Some(vec![0, 1, 2]));
        assert_eq!((WorkerPlacement::even(2, 1, 3), WorkerPlacement::even(2, 1, 0)), (None, None));
        assert_eq!(
            WorkerPlacement::by_host(3, 1, &[1, 2]).map(|placement| placement.processes_of_ranks),
            Some(vec![0, 1, 1])
        );
        assert_eq!(WorkerPlacement::by_host(3, 1, &[u32::MAX, 2]), None);
        assert_eq!(
            WorkerPlacement::beside(2, 1),
            WorkerPlacement { processes_of_ranks: vec![1, 2], processes: 3, degree: 1 }
        );
    }

    #[test]
    fn ranks_of_groups_are_consecutive() {
        let unsplit = WorkerPlacement::even(2, 2, 2).unwrap();
        assert_eq!(
            (&unsplit.processes_of_ranks[..], unsplit.tensor_ranks(1)),
            (&[0, 0, 1, 1][..], BTreeSet::from([0, 1]))
        );
        assert_eq!(unsplit.ranks(1).map(|rank| unsplit.worker(rank)).collect::<Vec<_>>(), [1, 1]);
        let split = WorkerPlacement::even(2, 2, 4).unwrap();
        assert_eq!((split.tensor_ranks(1), split.worker(1)), (BTreeSet::from([1]), 0));
        assert_eq!(
            WorkerPlacement::by_host(2, 2, &[1, 3]).map(|placement| placement.processes_of_ranks),
            Some(vec![0, 1, 1, 1])
        );
        assert_eq!((WorkerPlacement::even(2, 2, 5), WorkerPlacement::by_host(2, 2, &[2])), (None, None));
        assert_eq!(WorkerPlacement::beside(1, 2).processes_of_ranks, [1, 2]);
        let single = WorkerPlacement::beside(2, 1);
        assert_eq!([unsplit, split, single].map(|placement| placement.has_split_groups()), [false, true, false]);
    }
}
