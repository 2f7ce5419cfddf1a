//! Serialises stage snapshots for process 0, which writes checkpoints.
//!
//! A snapshot is written field by field, each buffer with a length prefix. A length must match the parameter or state, and
//! a rank's snapshots of a stage must come in the order of the run.

use crate::checkpoint::{StageSnapshot, StageState};
use crate::comm::all_reduce::range;
use crate::device::buffer::Buffer;
use crate::device::error::DeviceError;
use crate::device::layout::accumulation_type;
use crate::exec::executor::Weights;
use crate::exec::stage_code::{NamedTensor, StageCode};
use crate::optim::state::ParameterState;
use crate::process::fields::Fields;
use crate::process::frame::FrameError;
use crate::process::placement::WorkerPlacement;
use compiler::plan::StageId;
use compiler::schedule::Program;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Maximum number of optimizer state tensors per parameter.
const MOST_STATE: u32 = 8;
/// Upper bound of the numbers per parameter or state, in bytes.
const NUMBERS: usize = 256;

/// A stage on one rank, with its replica number, tensor-parallel rank, number of replicas that shard together,
/// in-flight limit, and the minibatches before its newest snapshot.
struct RankStage {
    stage: StageId,
    replica: u32,
    tensor_rank: usize,
    shards: u32,
    cap: u32,
    newest: u32,
}

/// The valid contents of snapshots from one process.
pub struct PartForm<'a> {
    stages: Vec<RankStage>,
    codes: &'a [StageCode],
    /// Minibatches of the run.
    minibatches: u32,
}

impl<'a> PartForm<'a> {
    pub fn of(program: &Program, codes: &'a [StageCode], placement: &WorkerPlacement, process: usize) -> PartForm<'a> {
        let stages = placement.ranks(process).flat_map(|rank| {
            let (worker, tensor_rank) = (&program.workers[placement.worker(rank)], placement.tensor_rank(rank));
            program.stages_of(worker.rank).map(move |stage| {
                let program_stage = &program.stages[stage.index()];
                RankStage {
                    stage,
                    replica: worker.replica,
                    tensor_rank,
                    shards: program_stage.shards(),
                    cap: program_stage.cap,
                    newest: 0,
                }
            })
        });
        PartForm { stages: stages.collect(), codes, minibatches: program.items / program.microbatches.max(1) }
    }

    /// Maximum size of a snapshot, in bytes.
    pub fn max_bytes(&self) -> usize {
        let size = |RankStage { stage, cap, .. }: &RankStage| {
            let code = &self.codes[stage.index()];
            let parameter = |named: &NamedTensor| wide_bytes(named).saturating_add(NUMBERS);
            let parameters = code.parameters.iter().map(parameter).fold(NUMBERS, usize::saturating_add);
            let states = code.states.iter().map(|named| named.bytes + NUMBERS).fold(0, usize::saturating_add);
            // Weights, master, optimizer state and drift; and versions, forwards and tied weights in flight.
            let copies = (MOST_STATE as usize + 3).saturating_add((*cap as usize).saturating_add(2).saturating_mul(3));
            parameters.saturating_mul(copies).saturating_add(states)
        };
        self.stages.iter().map(size).max().unwrap_or(0)
    }
}

fn wide_bytes(named: &NamedTensor) -> usize {
    named.bytes / named.fact.dtype.size().max(1) * accumulation_type(named.fact.dtype).size()
}

fn put(to: &mut Vec<u8>, buffer: &Buffer) -> Result<(), DeviceError> {
    to.extend((buffer.len() as u64).to_le_bytes());
    to.extend(&*buffer.download()?);
    Ok(())
}

fn put_count(to: &mut Vec<u8>, count: usize) {
    to.extend((count as u32).to_le_bytes());
}

fn put_optimizer_state(to: &mut Vec<u8>, optimizer_state: &ParameterState) -> Result<(), DeviceError> {
    to.extend(optimizer_state.updates.to_le_bytes());
    put_count(to, optimizer_state.state.len());
    optimizer_state.state.iter().try_for_each(|state| put(to, state))?;
    for buffer in [&optimizer_state.master, &optimizer_state.drift] {
        to.push(u8::from(buffer.is_some()));
        buffer.iter().try_for_each(|buffer| put(to, buffer))?;
    }
    Ok(())
}

fn put_weights(to: &mut Vec<u8>, versions: &BTreeMap<u32, Weights>) -> Result<(), DeviceError> {
    put_count(to, versions.len());
    for (version, weights) in versions {
        to.extend(version.to_le_bytes());
        put_count(to, weights.len());
        weights.iter().try_for_each(|weight| put(to, weight))?;
    }
    Ok(())
}

pub fn pack(snapshot: &StageSnapshot) -> Result<Vec<u8>, DeviceError> {
    let mut bytes =
        [snapshot.stage.0.to_le_bytes(), snapshot.replica.to_le_bytes(), snapshot.minibatches.to_le_bytes()].concat();
    put_count(&mut bytes, snapshot.tensor_rank);
    bytes.extend(snapshot.replicas.to_le_bytes());
    put_count(&mut bytes, snapshot.optimizer_states.len());
    snapshot
        .optimizer_states
        .iter()
        .try_for_each(|optimizer_state| put_optimizer_state(&mut bytes, optimizer_state))?;
    bytes.push(u8::from(snapshot.state.is_some()));
    if let Some(state) = &snapshot.state {
        for (weight, optimizer_state) in state.weights.iter().zip(&state.optimizer_states) {
            put(&mut bytes, weight)?;
            put_optimizer_state(&mut bytes, optimizer_state)?;
        }
        state.states.iter().try_for_each(|buffer| put(&mut bytes, buffer))?;
        bytes.push(u8::from(state.scale.is_some()));
        if let Some((scale, good)) = state.scale {
            bytes.extend(scale.to_le_bytes());
            bytes.extend(good.to_le_bytes());
        }
    }
    put_weights(&mut bytes, &snapshot.versions)?;
    put_weights(&mut bytes, &snapshot.forwards)?;
    put_count(&mut bytes, snapshot.tied_weights.len());
    for (parameter, versions) in &snapshot.tied_weights {
        put_count(&mut bytes, *parameter);
        put_count(&mut bytes, versions.len());
        for (version, weight) in versions {
            bytes.extend(version.to_le_bytes());
            put(&mut bytes, weight)?;
        }
    }
    Ok(bytes)
}

/// Reads a buffer that must have one of these lengths.
fn take(fields: &mut Fields<'_>, lengths: &[usize]) -> Result<Buffer, FrameError> {
    let what = "a tensor of a checkpoint";
    let length = fields.u64(what)?;
    let expected = lengths.iter().find(|expected| **expected as u64 == length);
    Ok(Buffer::host_copy(fields.bytes(*expected.ok_or(FrameError::Field { what })?, what)?))
}

fn take_flag(fields: &mut Fields<'_>) -> Result<bool, FrameError> {
    match fields.u8("the checkpoint flags")? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(FrameError::Field { what: "the checkpoint flags" }),
    }
}

/// Reads the optimizer state of a parameter or its shard.
fn take_optimizer_state(fields: &mut Fields<'_>, lengths: &[usize]) -> Result<ParameterState, FrameError> {
    let updates = fields.u32("the update count of a parameter")?;
    let count = fields.below(MOST_STATE + 1, "the state of an optimizer")?;
    let state = (0..count).map(|_| take(fields, lengths)).collect::<Result<_, _>>()?;
    let master = if take_flag(fields)? { Some(take(fields, lengths)?) } else { None };
    let drift = if take_flag(fields)? { Some(take(fields, lengths)?) } else { None };
    Ok(ParameterState { master, state, drift, updates })
}

fn take_weights(fields: &mut Fields<'_>, code: &StageCode) -> Result<BTreeMap<u32, Weights>, FrameError> {
    let what = "the versions of a checkpoint";
    let mut versions = BTreeMap::new();
    for _ in 0..fields.u32(what)? {
        let version = fields.u32(what)?;
        let count = fields.u32(what)? as usize;
        // A version saved by another replica is empty here.
        if count != 0 && count != code.parameters.len() {
            return Err(FrameError::Field { what });
        }
        let mut weights = Weights::new();
        for named in &code.parameters[..count] {
            weights.push(Arc::new(take(fields, &[named.bytes, wide_bytes(named), 0])?));
        }
        if versions.insert(version, weights).is_some() {
            return Err(FrameError::Field { what });
        }
    }
    Ok(versions)
}

/// Reads and checks a snapshot.
pub fn unpack(form: &mut PartForm<'_>, fields: &mut Fields<'_>) -> Result<StageSnapshot, FrameError> {
    let what = "the stage of a checkpoint";
    let (stage, replica) = (StageId(fields.u32(what)?), fields.u32(what)?);
    let minibatches = fields.u32("the step of a checkpoint")?;
    let tensor_rank = fields.u32("the tensor-parallel rank of a checkpoint")? as usize;
    let is_stage = |rank_stage: &RankStage| {
        (rank_stage.stage, rank_stage.replica, rank_stage.tensor_rank) == (stage, replica, tensor_rank)
    };
    let index = form.stages.iter().position(is_stage).ok_or(FrameError::Field { what })?;
    let shards = form.stages[index].shards;
    if minibatches <= form.stages[index].newest || minibatches > form.minibatches {
        return Err(FrameError::Field { what: "the step of a checkpoint" });
    }
    let code = form.codes.get(stage.index()).ok_or(FrameError::Field { what })?;
    let what = "the replicas of a checkpoint";
    let replicas = fields.u32(what)?;
    if replicas != 1 && (replicas != shards || replica >= shards) {
        return Err(FrameError::Field { what });
    }
    let lengths = |named: &NamedTensor| {
        let size = named.fact.dtype.size();
        let shard = range(named.bytes, size, replica as usize, replicas as usize).len();
        [named.bytes, wide_bytes(named), shard, shard / size.max(1) * accumulation_type(named.fact.dtype).size()]
    };
    let count = fields.u32(what)? as usize;
    if count != 0 && count != code.parameters.len() {
        return Err(FrameError::Field { what });
    }
    let shard_states = code.parameters[..count].iter().map(|named| take_optimizer_state(fields, &lengths(named)));
    let shard_states = shard_states.collect::<Result<Vec<_>, _>>()?;
    let mut state = None;
    if take_flag(fields)? {
        let (mut weights, mut optimizer_states) = (Weights::new(), Vec::new());
        for named in &code.parameters {
            weights.push(Arc::new(take(fields, &[named.bytes, wide_bytes(named)])?));
            optimizer_states.push(take_optimizer_state(fields, &lengths(named))?);
        }
        let states = code.states.iter().map(|named| take(fields, &[named.bytes])).collect::<Result<_, _>>()?;
        let scale = match take_flag(fields)? {
            true => Some((fields.f64("the loss scale")?, fields.u32("the loss scale")?)),
            false => None,
        };
        state = Some(StageState { weights, optimizer_states, states, scale });
    }
    let (versions, forwards) = (take_weights(fields, code)?, take_weights(fields, code)?);
    let mut tied_weights: BTreeMap<usize, BTreeMap<u32, Arc<Buffer>>> = BTreeMap::new();
    let what = "the tied weights of a checkpoint";
    for _ in 0..fields.u32(what)? {
        let parameter = fields.u32(what)? as usize;
        let named = code.parameters.get(parameter).ok_or(FrameError::Field { what })?;
        let mut older = BTreeMap::new();
        for _ in 0..fields.u32(what)? {
            let version = fields.u32(what)?;
            older.insert(version, Arc::new(take(fields, &[named.bytes, wide_bytes(named)])?));
        }
        tied_weights.insert(parameter, older);
    }
    fields.end()?;
    form.stages[index].newest = minibatches;
    Ok(StageSnapshot {
        stage,
        replica,
        tensor_rank,
        minibatches,
        replicas,
        optimizer_states: shard_states,
        state,
        versions,
        forwards,
        tied_weights,
        counted_bytes: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
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
        StageSnapshot {
            stage: StageId(0),
            replica: 0,
            tensor_rank,
            minibatches,
            replicas: 1,
            optimizer_states: Vec::new(),
            state: None,
            versions: BTreeMap::new(),
            forwards: BTreeMap::new(),
            tied_weights: BTreeMap::new(),
            counted_bytes: None,
        }
    }

    #[test]
    fn snapshots_come_in_order_from_the_ranks_of_their_process() {
        let (program, codes) = (program(), [StageCode::default()]);
        let placement = WorkerPlacement::even(1, 2, 2).unwrap();
        let mut form = PartForm::of(&program, &codes, &placement, 1);
        let mut take = |tensor_rank: usize, minibatches: u32| {
            let bytes = pack(&snapshot(tensor_rank, minibatches)).unwrap();
            unpack(&mut form, &mut Fields::of(&bytes)).map(|part| (part.tensor_rank, part.minibatches))
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
}
