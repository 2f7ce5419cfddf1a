//! The optimizer step of a stage: optimizer state, `f32` master weights of 16-bit parameters, and PipeMare's average of
//! updates.

use crate::device::api::{Elementwise, ParameterUpdate, WeightRegions};
use crate::device::buffer::Buffer;
use crate::device::context::DeviceContext;
use crate::device::error::DeviceError;
use crate::device::layout::accumulation_type;
use crate::device::optimizer::{Prediction, StepArgs};
use crate::device::region::Region;
use crate::exec::executor::Weights;
use crate::exec::stage_code::StageCode;
use crate::exec::stage_tensor::{OptimizerTensor, StageTensor};
use crate::optim::optimizer::Optimizer;
use crate::optim::policy::{DISCREPANCY, Staleness};
use crate::optim::state::ParameterState;
use crate::zero::shard::ShardRange;
use compiler::tensor::DType;
use std::ops::Range;
use std::sync::Arc;

/// The update of one parameter.
pub struct ParameterStep {
    pub parameter: usize,
    pub weight: Arc<Buffer>,
    /// Its sum over micro-batches and replicas.
    pub gradient: Arc<Buffer>,
    pub args: StepArgs,
}

/// Updates the parameters of a stage.
pub struct ParameterUpdater<'a> {
    optimizer: &'a Optimizer,
    dtypes: Vec<DType>,
    /// `f32` master weights of each 16-bit parameter; the 16-bit weights are their rounded copies.
    masters: Vec<Option<Buffer>>,
    state: Vec<Vec<Buffer>>,
    /// PipeMare's `δ`; `keep` is its decay.
    drift: Vec<Buffer>,
    keep: f64,
    /// The shard that this replica updates; master weights and state have its size.
    shard: ShardRange,
}

impl<'a> ParameterUpdater<'a> {
    /// Creates zero optimizer state. `delay` is the number of updates between a stage's forward and its own update.
    pub fn new(
        code: &StageCode,
        optimizer: &'a Optimizer,
        masters: Vec<Option<Buffer>>,
        (staleness, delay): (Staleness, u32),
        shard: ShardRange,
        device: &DeviceContext,
    ) -> Result<ParameterUpdater<'a>, DeviceError> {
        let masters = masters.into_iter().enumerate();
        let masters: Vec<Option<Buffer>> = masters
            .map(|(parameter, master)| {
                master.map(|unsharded| shard_of(&shard, parameter, DType::F32, unsharded, device)).transpose()
            })
            .collect::<Result<_, _>>()?;
        let shard_bytes = |parameter: usize| {
            let named = &code.parameters[parameter];
            shard.own(parameter, named.bytes, named.fact.dtype.size()).len()
        };
        let bytes = |parameter: usize| masters[parameter].as_ref().map_or(shard_bytes(parameter), Buffer::len);
        let has_drift = matches!(staleness, Staleness::PipeMare { .. }) && delay > 0;
        let parameters = 0..code.parameters.len();
        let state = |parameter: usize| {
            (0..optimizer.buffers()).map(|_| device.device.allocate(bytes(parameter))).collect::<Result<_, _>>()
        };
        Ok(ParameterUpdater {
            optimizer,
            dtypes: code.parameters.iter().map(|named| named.fact.dtype).collect(),
            state: parameters.clone().map(state).collect::<Result<_, _>>()?,
            drift: match has_drift {
                true => {
                    parameters.map(|parameter| device.device.allocate(bytes(parameter))).collect::<Result<_, _>>()?
                }
                false => Vec::new(),
            },
            keep: DISCREPANCY.powf(1.0 / f64::from(delay.max(1))),
            masters,
            shard,
        })
    }

    /// Bytes of optimizer state, master weights and PipeMare's averages.
    pub fn bytes(&self) -> usize {
        let buffers = self.state.iter().flatten().chain(self.masters.iter().flatten()).chain(&self.drift);
        buffers.map(Buffer::len).sum()
    }

    /// Updates this replica's shards of different parameters, and returns the new versions. Overwrites an old version if
    /// it is unshared, else allocates.
    pub fn step(&mut self, mut steps: Vec<ParameterStep>, device: &DeviceContext) -> Result<Weights, DeviceError> {
        let mut in_place = vec![true; steps.len()];
        for (step, is_in_place) in steps.iter_mut().zip(&mut in_place) {
            let has_master = self.masters[step.parameter].is_some();
            // PipeMare's `δ` needs the difference of two versions.
            let may_overwrite = has_master || self.drift.is_empty();
            if may_overwrite && device.try_exclusive(&mut step.weight)?.is_some() {
                continue;
            }
            if has_master {
                step.weight = device.take(step.weight.len())?;
                continue;
            }
            self.step_out_of_place(step, device)?;
            // The next one may reuse its memory.
            device.give_shared(std::mem::replace(&mut step.gradient, Arc::new(Buffer::empty())))?;
            *is_in_place = false;
        }
        let mut states: Vec<_> = self.masters.iter_mut().zip(&mut self.state).map(Some).collect();
        let mut updates = Vec::new();
        for step in steps.iter_mut().zip(&in_place).filter_map(|(step, is_in_place)| is_in_place.then_some(step)) {
            let p = step.parameter;
            let (master, state) = states[p].take().expect("a parameter steps once");
            let range = updated_range(&self.shard, p, &step.weight, self.dtypes[p]);
            let weight = Buffer::exclusive(&mut step.weight).slice(range);
            let (weights, rounded) = match master {
                Some(master) => (master.region_mut(), Some((self.dtypes[p], weight))),
                None => (weight, None),
            };
            let state = state.iter_mut().map(Buffer::region_mut).collect();
            let (args, weights, gradient) = (step.args, WeightRegions::InPlace(weights), step.gradient.region());
            updates.push(ParameterUpdate { args, weights, gradient, state, rounded });
        }
        device.stream.optimizer_step(&self.optimizer.rule, updates)?;
        let finish = |(ParameterStep { weight, gradient, .. }, is_in_place): (ParameterStep, bool)| {
            if is_in_place {
                device.give_shared(gradient)?;
            }
            Ok(weight)
        };
        steps.into_iter().zip(in_place).map(finish).collect()
    }

    fn step_out_of_place(&mut self, step: &mut ParameterStep, device: &DeviceContext) -> Result<(), DeviceError> {
        let (p, stream) = (step.parameter, &device.stream);
        let range = updated_range(&self.shard, p, &step.weight, self.dtypes[p]);
        let mut next = device.take(step.weight.len())?;
        let (old, new) = (step.weight.region_of(range.clone()), Buffer::exclusive(&mut next).slice(range));
        let (args, weights, gradient) = (step.args, WeightRegions::OutOfPlace { old, new }, step.gradient.region());
        let state = self.state[p].iter_mut().map(Buffer::region_mut).collect();
        let update = ParameterUpdate { args, weights, gradient, state, rounded: None };
        stream.optimizer_step(&self.optimizer.rule, vec![update])?;
        let old = std::mem::replace(&mut step.weight, next);
        if let Some(drift) = self.drift.get_mut(p) {
            let (verb, versions) =
                (Elementwise::AverageUpdate { keep: self.keep }, [old.region(), step.weight.region()]);
            stream.elementwise(verb, self.dtypes[p], &versions, drift.region_mut())?;
            device.give(old);
        }
        Ok(())
    }

    /// Restores saved state.
    pub fn restore(
        &mut self,
        parameter_states: Vec<ParameterState>,
        device: &DeviceContext,
    ) -> Result<(), DeviceError> {
        let (mut state, mut drift) = (Vec::new(), Vec::new());
        for (p, parameter_state) in parameter_states.into_iter().enumerate() {
            let dtype = accumulation_type(self.dtypes[p]);
            let shards =
                parameter_state.state.into_iter().map(|unsharded| shard_of(&self.shard, p, dtype, unsharded, device));
            state.push(shards.collect::<Result<_, _>>()?);
            drift.extend(parameter_state.drift);
        }
        (self.state, self.drift) = (state, drift);
        Ok(())
    }

    /// A copy of a parameter's optimizer state, as far as this replica holds it.
    pub fn copy_state(&self, p: usize, device: &DeviceContext) -> Result<Vec<(StageTensor, Buffer)>, DeviceError> {
        let master = self.masters[p].iter().map(|master| (OptimizerTensor::Master, master));
        let named = self.state[p].iter().enumerate().map(|(index, state)| (OptimizerTensor::Named(index), state));
        let drift = self.drift.get(p).map(|drift| (OptimizerTensor::Drift, drift));
        let copy = |(tensor, buffer): (OptimizerTensor, &Buffer)| {
            let copy = device.copy_of(buffer.region())?;
            device.release(&copy)?;
            Ok((StageTensor::Optimizer(p, tensor), copy))
        };
        master.chain(named).chain(drift).map(copy).collect()
    }

    /// Weights predicted some updates ahead in the last update direction (SpecTrain).
    pub fn predict(
        &self,
        weights: &Weights,
        prediction: impl Fn(usize) -> Prediction,
        device: &DeviceContext,
    ) -> Result<Weights, DeviceError> {
        let predict_weight = |(p, weight): (usize, &Arc<Buffer>)| {
            let mut to = device.take(weight.len())?;
            let state: Vec<Region<'_>> = self.state[p].iter().map(Buffer::region).collect();
            let (rule, to_region) = (&self.optimizer.rule, Buffer::exclusive(&mut to));
            device.stream.predict_weights(rule, &prediction(p), weight.region(), &state, to_region)?;
            Ok(to)
        };
        weights.iter().enumerate().map(predict_weight).collect()
    }

    /// Approximate weights of `steps` updates ago (PipeMare).
    pub fn correct(&self, weights: &Weights, steps: u32, device: &DeviceContext) -> Result<Weights, DeviceError> {
        let correct_weight = |(p, weight): (usize, &Arc<Buffer>)| {
            let mut to = device.take(weight.len())?;
            let (operands, back) = ([weight.region(), self.drift[p].region()], Buffer::exclusive(&mut to));
            device.stream.elementwise(Elementwise::SetBack { steps }, self.dtypes[p], &operands, back)?;
            Ok(to)
        };
        weights.iter().enumerate().map(correct_weight).collect()
    }

    /// True if PipeMare's averages are kept.
    pub fn has_drift(&self) -> bool {
        !self.drift.is_empty()
    }

    /// The `f32` master of a 16-bit parameter, if this replica holds all of it.
    pub fn master(&self, p: usize) -> Option<&Buffer> {
        self.masters.get(p).and_then(Option::as_ref).filter(|_| !self.shard.is_sharded(p))
    }

    /// The weights to return after training: masters where there are any.
    pub fn final_weights(&mut self, weights: Weights) -> Weights {
        let final_weight = |(weight, master): (Arc<Buffer>, Option<Buffer>)| master.map_or(weight, Arc::new);
        weights.into_iter().zip(std::mem::take(&mut self.masters)).map(final_weight).collect()
    }
}

/// The bytes of a weight that this replica updates.
fn updated_range(shard: &ShardRange, p: usize, weight: &Buffer, dtype: DType) -> Range<usize> {
    match shard.shards_weights {
        true => 0..weight.len(),
        false => shard.own(p, weight.len(), dtype.size()),
    }
}

/// This replica's shard of a parameter-sized tensor.
fn shard_of(
    shard: &ShardRange,
    p: usize,
    dtype: DType,
    whole: Buffer,
    device: &DeviceContext,
) -> Result<Buffer, DeviceError> {
    match shard.is_sharded(p) {
        true => device.copy_of(whole.region_of(shard.own(p, whole.len(), dtype.size()))),
        false => Ok(whole),
    }
}
