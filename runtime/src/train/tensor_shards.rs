//! Checkpoints of tensor-parallel stages: gathers the shards of all devices, and shards a checkpoint for a group.
//!
//! Checkpoint files do not depend on tensor parallelism or ZeRO: a run resumes on any number of devices. ZeRO shards
//! are merged first, because they divide a device's tensor-parallel shard.

use crate::checkpoint::encode::{Flight, STEP};
use crate::checkpoint::merge_shards::join;
use crate::checkpoint::resume_point::ResumePoint;
use crate::checkpoint::{StageSnapshot, StageState};
use crate::comm::tensor_group::Layouts;
use crate::device::buffer::Buffer;
use crate::device::error::DeviceError;
use crate::exec::executor::Weights;
use crate::exec::stage_code::{NamedTensor, StageCode};
use crate::optim::state::ParameterState;
use crate::stage::saved_weights::{Checkpoint, tensor};
use crate::train::tensor_parallel::TensorParallelError;
use compiler::op::sharding::{part_of, whole_of};
use compiler::op::{Sharding, SplitDim};
use compiler::tensor::Tensor;
use compiler::tensor::dim::Dim;
use compiler::tensor::fact::Fact;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

fn cut_of(layouts: &Layouts, name: &str) -> Option<SplitDim> {
    match layouts.get(name) {
        Some(Sharding::Split(cut)) => Some(*cut),
        _ => None,
    }
}

/// A device's shards of the tensors. `parameter` maps a tensor name to its parameter, whose sharding it follows.
pub fn dealt(
    tensors: &BTreeMap<String, Tensor>,
    parameter: impl Fn(&str) -> &str,
    (layouts, devices): (&Layouts, usize),
    device: usize,
) -> Result<BTreeMap<String, Tensor>, TensorParallelError> {
    let part = |(name, whole): (&String, &Tensor)| {
        let Some(cut) = cut_of(layouts, parameter(name)) else { return Ok((name.clone(), whole.clone())) };
        let refused = || TensorParallelError::Weight { name: name.clone(), got: whole.shape().to_vec(), devices };
        Sharding::Split(cut).part(&Fact::of(whole.dtype(), whole.shape()), devices).ok_or_else(refused)?;
        Ok((name.clone(), part_of(whole, cut, devices, device)))
    };
    tensors.iter().map(part).collect()
}

/// A device's shard of the checkpoint state.
pub fn start_of(
    start: &ResumePoint,
    group: (&Layouts, usize),
    device: usize,
) -> Result<ResumePoint, TensorParallelError> {
    let own = |tensors: &BTreeMap<String, Tensor>| dealt(tensors, |name| name, group, device);
    let each = |of: &BTreeMap<u32, BTreeMap<String, Tensor>>| -> Result<_, TensorParallelError> {
        of.iter().map(|(number, tensors)| Ok((*number, own(tensors)?))).collect()
    };
    let of_flight = |flight: &Flight| -> Result<Flight, TensorParallelError> {
        // Tied weights with versions of their own are not sharded.
        let shared = flight.shared.clone();
        Ok(Flight { versions: each(&flight.versions)?, forwards: each(&flight.forwards)?, shared })
    };
    let flight = start.flight.as_ref().map(|flight| {
        flight.iter().map(|(of, flight)| Ok((*of, of_flight(flight)?))).collect::<Result<_, TensorParallelError>>()
    });
    // Update counts (`NAME/step`) are scalars, so they are not sharded.
    let parameter =
        |name: &str| name.rsplit_once('/').filter(|(_, kind)| *kind != STEP).map_or(0, |(own, _)| own.len());
    let optimizer = dealt(&start.optimizer, |name| &name[..parameter(name)], group, device)?;
    Ok(ResumePoint { minibatches: start.minibatches, scale: start.scale, optimizer, flight: flight.transpose()? })
}

/// Stage descriptions with unsharded names and shapes, for checkpoint files. They contain no code.
pub fn whole_codes(codes: &[StageCode], layouts: &Layouts, devices: usize) -> Vec<StageCode> {
    let whole = |named: &NamedTensor| {
        let Some(cut) = cut_of(layouts, &named.name) else { return named.clone() };
        let (mut fact, shape) = (named.fact.clone(), named.fact.concrete().unwrap_or_default());
        fact.shape[cut.axis] = Dim::from(shape[cut.axis] * devices);
        NamedTensor { name: named.name.clone(), fact, bytes: named.bytes * devices }
    };
    let code = |code: &StageCode| StageCode {
        parameters: code.parameters.iter().map(whole).collect(),
        states: code.states.iter().map(whole).collect(),
        follows: code.follows.clone(),
        ..StageCode::default()
    };
    codes.iter().map(code).collect()
}

/// Collects snapshots until those of all devices have arrived.
pub struct ShardGatherer<'a> {
    codes: &'a [StageCode],
    layouts: &'a Layouts,
    devices: usize,
    /// Snapshots by device. The key is minibatches, stage, and replica (0 if ZeRO shards must be merged).
    parts: BTreeMap<(u32, u32, u32), Vec<Vec<StageSnapshot>>>,
    /// Program checkpoints by device. The key is stage and version.
    written: BTreeMap<(u32, u32), Vec<VecDeque<Checkpoint>>>,
}

impl<'a> ShardGatherer<'a> {
    pub fn new(codes: &'a [StageCode], layouts: &'a Layouts, devices: usize) -> ShardGatherer<'a> {
        ShardGatherer { codes, layouts, devices, parts: BTreeMap::new(), written: BTreeMap::new() }
    }

    /// Adds a device's snapshot. Returns the gathered snapshots that it completes.
    pub fn take(&mut self, device: usize, part: StageSnapshot) -> Result<Vec<StageSnapshot>, DeviceError> {
        let replica = if part.replicas > 1 { 0 } else { part.replica };
        let (key, replicas) = ((part.minibatches, part.stage.0, replica), part.replicas.max(1) as usize);
        let of = self.parts.entry(key).or_insert_with(|| (0..self.devices).map(|_| Vec::new()).collect());
        of[device].push(part);
        if of.iter().any(|own| own.len() < replicas) {
            return Ok(Vec::new());
        }
        let parts = self.parts.remove(&key).unwrap_or_default().into_iter();
        let mut left: Vec<VecDeque<StageSnapshot>> =
            parts.map(|own| Ok(join(own)?.into())).collect::<Result<_, DeviceError>>()?;
        let mut whole = Vec::new();
        while let Some(parts) = left.iter_mut().map(VecDeque::pop_front).collect::<Option<Vec<StageSnapshot>>>() {
            whole.push(self.joined(parts)?);
        }
        Ok(whole)
    }

    /// Adds a device's part of a program checkpoint. Returns the gathered one once all devices have contributed.
    pub fn written(&mut self, device: usize, checkpoint: Checkpoint) -> Option<Checkpoint> {
        let key = (checkpoint.stage.0, checkpoint.version);
        let of = self.written.entry(key).or_insert_with(|| (0..self.devices).map(|_| VecDeque::new()).collect());
        of[device].push_back(checkpoint);
        if of.iter().any(VecDeque::is_empty) {
            return None;
        }
        let mut parts: Vec<Checkpoint> = of.iter_mut().filter_map(VecDeque::pop_front).collect();
        let all: Vec<_> = parts.iter_mut().map(|part| std::mem::take(&mut part.weights)).collect();
        Some(Checkpoint { weights: joined(&all, self.layouts), ..parts.swap_remove(0) })
    }

    fn joined(&self, parts: Vec<StageSnapshot>) -> Result<StageSnapshot, DeviceError> {
        let code = &self.codes[parts[0].stage.index()];
        let one = |p: usize, each: &[&Buffer]| -> Result<Option<Buffer>, DeviceError> {
            let named = &code.parameters[p];
            // A tied weight with versions of its own is empty in the stage's versions.
            let Some(cut) = cut_of(self.layouts, &named.name).filter(|_| !each[0].is_empty()) else { return Ok(None) };
            let tensors = each.iter().map(|own| Ok(tensor(named, &own.download()?)));
            let tensors: Vec<Tensor> = tensors.collect::<Result<_, DeviceError>>()?;
            Ok(Some(Buffer::host_copy(whole_of(&tensors, cut).bytes())))
        };
        let weights = |each: Vec<&Weights>| -> Result<Weights, DeviceError> {
            let of = |p: usize| {
                let own: Vec<&Buffer> = each.iter().map(|weights| &*weights[p]).collect();
                Ok(one(p, &own)?.map_or_else(|| each[0][p].clone(), Arc::new))
            };
            (0..each[0].len()).map(of).collect()
        };
        let buffer = |p: usize, own: Vec<&Buffer>| -> Result<Buffer, DeviceError> {
            match one(p, &own)? {
                Some(whole) => Ok(whole),
                None => Ok(Buffer::host_copy(&own[0].download()?)),
            }
        };
        let moves = |p: usize, each: Vec<&ParameterState>| -> Result<ParameterState, DeviceError> {
            let of = |kind: fn(&ParameterState) -> Option<&Buffer>| {
                each.iter().map(|own| kind(own)).collect::<Option<Vec<_>>>().map(|own| buffer(p, own)).transpose()
            };
            let state = |at: usize| buffer(p, each.iter().map(|own| &own.state[at]).collect());
            Ok(ParameterState {
                master: of(|own| own.master.as_ref())?,
                state: (0..each[0].state.len()).map(state).collect::<Result<_, _>>()?,
                drift: of(|own| own.drift.as_ref())?,
                updates: each[0].updates,
            })
        };
        let numbered = |of: fn(&StageSnapshot) -> &BTreeMap<u32, Weights>| {
            let each = |number: &u32| parts.iter().filter_map(|part| of(part).get(number)).collect();
            of(&parts[0]).keys().map(|number| Ok((*number, weights(each(number))?))).collect::<Result<_, DeviceError>>()
        };
        let (versions, forwards) = (numbered(|part| &part.versions)?, numbered(|part| &part.forwards)?);
        let wholes: Option<Vec<&StageState>> = parts.iter().map(|part| part.whole.as_ref()).collect();
        let mut whole = None;
        if let Some(each) = wholes {
            let of_parameter = |p: usize| moves(p, each.iter().map(|of| &of.moves[p]).collect());
            let states = each[0].states.iter().map(|state| Ok(Buffer::host_copy(&state.download()?)));
            whole = Some(StageState {
                weights: weights(each.iter().map(|whole| &whole.weights).collect())?,
                moves: (0..each[0].moves.len()).map(of_parameter).collect::<Result<_, _>>()?,
                states: states.collect::<Result<_, DeviceError>>()?,
                scale: each[0].scale,
            });
        }
        let shared = parts[0].shared.clone();
        let StageSnapshot { stage, replica, minibatches, .. } = parts[0];
        // The snapshots' memory stays counted until they are gathered.
        Ok(StageSnapshot {
            stage,
            replica,
            minibatches,
            replicas: 1,
            moves: Vec::new(),
            whole,
            versions,
            forwards,
            shared,
            counted: None,
        })
    }
}

/// Gathers named tensors from all devices.
pub fn joined(each: &[BTreeMap<String, Tensor>], layouts: &Layouts) -> BTreeMap<String, Tensor> {
    let whole = |(name, first): (&String, &Tensor)| {
        let parts: Vec<Tensor> = each.iter().filter_map(|own| own.get(name).cloned()).collect();
        (name.clone(), cut_of(layouts, name).map_or_else(|| first.clone(), |cut| whole_of(&parts, cut)))
    };
    each[0].iter().map(whole).collect()
}
