//! Shards of tensor-parallel stages: a rank's shards of weights and of a checkpoint.
//!
//! Checkpoint files do not depend on tensor parallelism or ZeRO: a run resumes on any number of devices. ZeRO shards
//! are merged first, because they divide a device's tensor-parallel shard.

use crate::checkpoint::encode::{Flight, STEP};
use crate::checkpoint::resume_point::ResumePoint;
use crate::comm::tensor_group::Layouts;
use crate::exec::stage_code::{NamedTensor, StageCode};
use crate::train::error::TrainError;
use compiler::op::sharding::part_of;
use compiler::op::{Sharding, SplitDim};
use compiler::tensor::Tensor;
use compiler::tensor::dim::Dim;
use compiler::tensor::fact::Fact;
use std::collections::BTreeMap;

/// How a parameter is split; `None` if every rank has all of it.
pub fn split_of(layouts: &Layouts, name: &str) -> Option<SplitDim> {
    match layouts.get(name) {
        Some(Sharding::Split(cut)) => Some(*cut),
        _ => None,
    }
}

/// A device's shards of the tensors. `parameter` maps a tensor name to its parameter, whose sharding it follows.
pub fn shard_tensors(
    tensors: &BTreeMap<String, Tensor>,
    parameter: impl Fn(&str) -> &str,
    (layouts, devices): (&Layouts, usize),
    device: usize,
) -> Result<BTreeMap<String, Tensor>, TrainError> {
    let shard = |(name, whole): (&String, &Tensor)| {
        let Some(cut) = split_of(layouts, parameter(name)) else { return Ok((name.clone(), whole.clone())) };
        let error = || TrainError::Weight { name: name.clone(), got: whole.shape().to_vec(), devices };
        Sharding::Split(cut).part(&Fact::of(whole.dtype(), whole.shape()), devices).ok_or_else(error)?;
        Ok((name.clone(), part_of(whole, cut, devices, device)))
    };
    tensors.iter().map(shard).collect()
}

/// A device's shard of the checkpoint state.
pub fn shard_resume_point(
    start: &ResumePoint,
    group: (&Layouts, usize),
    device: usize,
) -> Result<ResumePoint, TrainError> {
    let shard = |tensors: &BTreeMap<String, Tensor>| shard_tensors(tensors, |name| name, group, device);
    let shard_each = |versions: &BTreeMap<u32, BTreeMap<String, Tensor>>| -> Result<_, TrainError> {
        versions.iter().map(|(number, tensors)| Ok((*number, shard(tensors)?))).collect()
    };
    let shard_flight = |flight: &Flight| -> Result<Flight, TrainError> {
        // Tied weights with versions of their own are not sharded.
        let shared = flight.shared.clone();
        Ok(Flight { versions: shard_each(&flight.versions)?, forwards: shard_each(&flight.forwards)?, shared })
    };
    let flight = start.flight.as_ref().map(|flight| {
        flight.iter().map(|(replica, flight)| Ok((*replica, shard_flight(flight)?))).collect::<Result<_, TrainError>>()
    });
    // Update counts (`NAME/step`) are scalars, so they are not sharded.
    let parameter = |name: &str| {
        name.rsplit_once('/').filter(|(_, kind)| *kind != STEP).map_or(0, |(parameter, _)| parameter.len())
    };
    let optimizer = shard_tensors(&start.optimizer, |name| &name[..parameter(name)], group, device)?;
    Ok(ResumePoint { minibatches: start.minibatches, scale: start.scale, optimizer, flight: flight.transpose()? })
}

/// Stage descriptions with unsharded names and shapes, for checkpoint files and results. They contain no code.
pub fn whole_codes(codes: &[StageCode], layouts: &Layouts, devices: usize) -> Vec<StageCode> {
    let unsharded = |named: &NamedTensor| {
        let Some(cut) = split_of(layouts, &named.name) else { return named.clone() };
        let (mut fact, shape) = (named.fact.clone(), named.fact.concrete().unwrap_or_default());
        fact.shape[cut.axis] = Dim::from(shape[cut.axis] * devices);
        NamedTensor { name: named.name.clone(), fact, bytes: named.bytes * devices }
    };
    let code = |code: &StageCode| StageCode {
        parameters: code.parameters.iter().map(unsharded).collect(),
        states: code.states.iter().map(unsharded).collect(),
        state_updates: code.state_updates.clone(),
        ..StageCode::default()
    };
    codes.iter().map(code).collect()
}
