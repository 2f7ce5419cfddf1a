//! Stage snapshots in frames, for process 0, which writes checkpoints.
//!
//! A frame lists the tensors of a snapshot with their lengths, then has their bytes. Each must belong to the stage and
//! have a size that it may have, and a rank's snapshots of a stage must come in the order of the run.

use crate::checkpoint::{SnapshotKey, StageSnapshot, StageState};
use crate::comm::members::encode;
use crate::device::buffer::Buffer;
use crate::device::error::DeviceError;
use crate::exec::stage_code::StageCode;
use crate::exec::stage_tensor::StageTensor;
use crate::process::fields::{Fields, check};
use crate::process::frame::FrameError;
use crate::process::placement::WorkerPlacement;
use compiler::schedule::Program;
use std::sync::Arc;

/// The valid contents of snapshots from one process.
pub struct PartForm<'a> {
    /// The stages of its ranks, with the number of replicas that shard together, and the minibatches before the newest
    /// snapshot.
    stages: Vec<SnapshotKey>,
    codes: &'a [StageCode],
    /// Minibatches of the run.
    minibatches: u32,
}

impl<'a> PartForm<'a> {
    pub fn of(program: &Program, codes: &'a [StageCode], placement: &WorkerPlacement, process: usize) -> PartForm<'a> {
        let stages = placement.ranks(process).flat_map(|rank| {
            let (worker, tensor_rank) = (&program.workers[placement.worker(rank)], placement.tensor_rank(rank));
            program.stages_of(worker.rank).map(move |stage| {
                let (replica, replicas) = (worker.replica, program.stages[stage.index()].shards());
                SnapshotKey { stage, replica, tensor_rank, minibatches: 0, replicas }
            })
        });
        PartForm { stages: stages.collect(), codes, minibatches: program.items / program.microbatches.max(1) }
    }
}

pub fn pack(snapshot: &StageSnapshot) -> Result<Vec<u8>, DeviceError> {
    let lengths: Vec<(StageTensor, usize)> =
        snapshot.tensors.iter().map(|(place, tensor)| (*place, tensor.len())).collect();
    let mut content = encode(&(snapshot.key, &snapshot.state, lengths));
    for tensor in snapshot.tensors.values() {
        content.extend(&*tensor.download()?);
    }
    Ok(content)
}

/// Reads and checks a snapshot.
pub fn unpack(form: &mut PartForm<'_>, fields: &mut Fields<'_>) -> Result<StageSnapshot, FrameError> {
    let (key, state, lengths) =
        fields.value::<(SnapshotKey, Option<StageState>, Vec<(StageTensor, usize)>)>("a snapshot")?;
    let of = |key: &SnapshotKey| (key.stage, key.replica, key.tensor_rank);
    let newest = form.stages.iter_mut().find(|newest| of(newest) == of(&key));
    let (Some(newest), Some(code)) = (newest, form.codes.get(key.stage.index())) else {
        return Err(FrameError::Field { what: "the stage of a checkpoint" });
    };
    let is_next = key.minibatches > newest.minibatches && key.minibatches <= form.minibatches;
    check(is_next, "the step of a checkpoint")?;
    let is_shard = key.replicas == newest.replicas && key.replica < key.replicas;
    check(key.replicas == 1 || is_shard, "the replicas of a checkpoint")?;
    check(state.is_some() == (key.replica == 0), "the state of a checkpoint")?;
    let mut snapshot = StageSnapshot { key, state, tensors: Default::default(), counted_bytes: None };
    let shard = (key.replica, key.replicas);
    for (place, bytes) in lengths {
        // Checked before anything is allocated for it.
        let is_possible = !matches!(place, StageTensor::Gradient(_)) && place.has_size(bytes, code, shard);
        check(is_possible, "a tensor of a checkpoint")?;
        let tensor = Arc::new(Buffer::host_copy(fields.bytes(bytes, "a tensor of a checkpoint")?));
        check(snapshot.tensors.insert(place, tensor).is_none(), "a tensor of a checkpoint")?;
    }
    fields.end()?;
    snapshot.check(code).map_err(|what| FrameError::Field { what })?;
    newest.minibatches = key.minibatches;
    Ok(snapshot)
}

#[cfg(test)]
mod tests {
    use super::*;
    use compiler::plan::StageId;
    use compiler::plan::schedule::Schedule;
    use compiler::schedule::{ProgramStage, RankId, WorkerProgram};

    /// One stage without parameters, on two tensor-parallel ranks in two processes: six minibatches of two.
    fn program() -> Program {
        let stage = ProgramStage {
            rank: RankId(0),
            replicas: 1,
            cap: 1,
            recompute: false,
            buckets: 1,
            zero: 0,
            shard_degree: 0,
        };
        let worker = WorkerProgram { rank: RankId(0), replica: 0, instructions: Vec::new() };
        Program {
            schedule: Schedule::OneFOneB,
            items: 12,
            microbatches: 2,
            stages: vec![stage],
            edges: Vec::new(),
            workers: vec![worker],
        }
    }

    fn snapshot(tensor_rank: usize, minibatches: u32) -> StageSnapshot {
        let key = SnapshotKey { stage: StageId(0), replica: 0, tensor_rank, minibatches, replicas: 1 };
        let state = Some(StageState { updates: Vec::new(), scale: None });
        StageSnapshot { key, state, tensors: Default::default(), counted_bytes: None }
    }

    #[test]
    fn snapshots_come_in_order_from_the_ranks_of_their_process() {
        let (program, codes) = (program(), [StageCode::default()]);
        let placement = WorkerPlacement::even(1, 2, 2).unwrap();
        let mut form = PartForm::of(&program, &codes, &placement, 1);
        let mut take = |tensor_rank: usize, minibatches: u32| {
            let bytes = pack(&snapshot(tensor_rank, minibatches)).unwrap();
            unpack(&mut form, &mut Fields::of(&bytes)).map(|part| (part.key.tensor_rank, part.key.minibatches))
        };
        let refused = |what| Err(FrameError::Field { what });
        let (step, stage) = ("the step of a checkpoint", "the stage of a checkpoint");
        assert_eq!(take(1, 0), refused(step), "nothing is done");
        assert_eq!(take(1, 2), Ok((1, 2)));
        assert_eq!(take(1, 2), refused(step), "it has come already");
        assert_eq!(take(1, 1), refused(step), "it is older");
        assert_eq!(take(0, 3), refused(stage), "another process has this rank");
        assert_eq!(take(2, 3), refused(stage), "there is no such rank");
        assert_eq!(take(1, 7), refused(step), "the run is over");
        assert_eq!(take(1, 6), Ok((1, 6)));
    }

    #[test]
    fn a_snapshot_has_the_tensors_of_its_stage() {
        let (program, codes) = (program(), [StageCode::default()]);
        let placement = WorkerPlacement::even(1, 2, 2).unwrap();
        let wrong: [fn(&mut StageSnapshot); 4] = [
            |snapshot| drop(snapshot.tensors.insert(StageTensor::Weight(0), Arc::new(Buffer::empty()))),
            |snapshot| snapshot.key.replicas = 2,
            |snapshot| snapshot.state = None,
            |snapshot| snapshot.state = Some(StageState { updates: vec![1], scale: None }),
        ];
        for change in wrong {
            let mut snapshot = snapshot(1, 2);
            change(&mut snapshot);
            let form = &mut PartForm::of(&program, &codes, &placement, 1);
            assert!(unpack(form, &mut Fields::of(&pack(&snapshot).unwrap())).is_err());
        }
    }
}
