//! Tensor-parallel training: the devices of a group run the whole pipeline in parallel, each on its shards.
//!
//! Each device has a worker for each worker of the program, with the same kernels. Tensors between stages are unsharded
//! on every device, or split along the sequence, and each device sends its own. So messages and replica all-reduces stay
//! among the workers of one device. Only collective ops in the graph involve other devices
//! ([`tensor_group`](crate::comm::tensor_group)), in threads of this process or in other processes. Parameters and
//! optimizer state are sharded; the results are gathered at the end.

use crate::checkpoint::StageSnapshot;
use crate::checkpoint::resume_point::ResumePoint;
use crate::comm::tensor_group::{GroupRank, Layouts};
use crate::process::placement::WorkerPlacement;
use crate::process::process_group::Group;
use crate::process::run_status::LinkError;
use crate::stage::saved_weights::Checkpoint;
use crate::train::error::TrainError;
use crate::train::job::{RunOptions, StepDone, TrainJob, Trained};
use crate::train::run::{RankInputs, TensorRanks, run_ranks};
use crate::train::shard_gatherer::{GatherError, ShardGatherer};
use crate::train::tensor_shards::{shard_resume_point, shard_tensors};
use compiler::schedule::{Program, WorkerProgram};
use compiler::tensor::Tensor;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A rank's shards of the weights and of the checkpoint.
type RankShards = (BTreeMap<String, Tensor>, Option<ResumePoint>);

/// Trains on every device of a tensor-parallel group, or on those of this process in a process group. Checkpoints contain
/// unsharded tensors. Process 0 gathers the shards of all devices; times are those of the first one.
pub fn run_shared_in_group(
    training: &TrainJob<'_>,
    options: RunOptions<'_>,
    (layouts, devices): (&Layouts, usize),
    on_step: &mut dyn FnMut(StepDone),
    group: Option<Group>,
) -> Result<Option<Trained>, TrainError> {
    let RunOptions { start: resume_point, cuts, barrier, devices: all_devices, mut on_snapshot, on_checkpoint } =
        options;
    let local_ranks = match &group {
        Some(group) => group.config.placement.tensor_ranks(group.config.process),
        None => (0..devices).collect(),
    };
    let shards = |rank: usize| {
        let weights = shard_tensors(training.weights, |name| name, (layouts, devices), rank)?;
        let start = resume_point.map(|start| shard_resume_point(start, (layouts, devices), rank)).transpose()?;
        Ok::<_, TrainError>((weights, start))
    };
    let shards = (0..devices).map(|rank| local_ranks.contains(&rank).then(|| shards(rank)).transpose());
    let shards: Vec<Option<RankShards>> = shards.collect::<Result<_, _>>()?;
    let inputs = shards
        .iter()
        .map(|shards| shards.as_ref().map(|(weights, start)| RankInputs { weights, start: start.as_ref() }));
    let ranks = TensorRanks { inputs: inputs.collect(), layouts: Arc::new(layouts.clone()) };
    let mut gatherer = ShardGatherer::new(training.codes, layouts, devices);
    let (has_receiver, mut gather_error) = (on_snapshot.is_some(), None);
    let status =
        group.as_ref().map(|group| (group.config.placement.clone(), group.names.clone(), group.run_status.clone()));
    let mut gather = |snapshot: StageSnapshot| {
        let Some(on_snapshot) = on_snapshot.as_mut().filter(|_| gather_error.is_none()) else { return };
        match gatherer.add(snapshot) {
            Ok(gathered) => gathered.into_iter().for_each(on_snapshot),
            Err(error) => {
                if let Some((placement, names, run_status)) = &status {
                    run_status.end(gather_failure(&error, training.program, placement, names));
                }
                gather_error = Some(error);
            }
        }
    };
    let on_snapshot = has_receiver.then_some(&mut gather as &mut (dyn FnMut(StageSnapshot) + Send));
    let on_checkpoint = on_checkpoint.map(|write| write as &mut dyn FnMut(Checkpoint));
    let options = RunOptions { start: resume_point, cuts, barrier, devices: all_devices, on_snapshot, on_checkpoint };
    let trained = run_ranks(training, options, on_step, group, ranks)?;
    gather_error.map_or(Ok(trained), |error| Err(error.into()))
}

/// Why a run over processes ends when a snapshot does not fit those of the other ranks. Names the process of its rank.
fn gather_failure(error: &GatherError, program: &Program, placement: &WorkerPlacement, names: &[String]) -> LinkError {
    let process_of = |error: &GatherError| {
        let GatherError::Snapshot { stage, replica, tensor_rank, .. } = *error else { return None };
        let rank = program.stages.get(stage as usize)?.rank;
        let is_worker = |worker: &WorkerProgram| worker.rank == rank && worker.replica == replica;
        let worker = program.workers.iter().position(is_worker)?;
        let group_rank = GroupRank { degree: placement.degree, rank: tensor_rank };
        placement.processes_of_ranks.get(group_rank.global(worker)).copied()
    };
    let process = process_of(error);
    let name = process.and_then(|process| names.get(process));
    LinkError::Ended { process, what: name.map_or_else(|| error.to_string(), |name| format!("{name}: {error}")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use compiler::plan::schedule::Schedule;
    use compiler::schedule::{ProgramStage, RankId};

    #[test]
    fn a_snapshot_that_does_not_fit_ends_the_run_and_names_its_process() {
        let stage =
            |rank| ProgramStage { rank, replicas: 1, cap: 1, recompute: false, buckets: 1, zero: 0, shard_degree: 0 };
        let worker = |rank| WorkerProgram { rank, replica: 0, instructions: Vec::new() };
        let ranks = [RankId(0), RankId(1)];
        let program = Program {
            schedule: Schedule::OneFOneB,
            items: 4,
            microbatches: 1,
            stages: ranks.map(stage).to_vec(),
            edges: Vec::new(),
            workers: ranks.map(worker).to_vec(),
        };
        let names: Vec<String> = (0..5).map(|process| format!("process {process}")).collect();
        let failure = |error| gather_failure(&error, &program, &WorkerPlacement::beside(2, 2), &names);
        let error =
            |stage, tensor_rank| GatherError::Snapshot { stage, replica: 0, tensor_rank, what: "it has come already" };
        let unknown = error(2, 1);
        assert_eq!(failure(unknown.clone()), LinkError::Ended { process: None, what: unknown.to_string() });
        let what = "process 4: the snapshot of stage 1, replica 0, from tensor rank 1: it has come already";
        assert_eq!(failure(error(1, 1)), LinkError::Ended { process: Some(4), what: what.to_string() });
    }
}
