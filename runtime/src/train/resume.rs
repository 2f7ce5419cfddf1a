//! Resumes a run: assigns the optimizer state and in-flight versions of a checkpoint to the stages of a plan.
//!
//! Under the checkpoint's own plan, every stage starts with its in-flight versions. Under another plan, parameters and
//! optimizer state are found by name. The older versions of a differently partitioned stage are unknown; the
//! checkpoint's version replaces them, as the initial weights do at the start of a run.

use crate::checkpoint::ResumeState;
use crate::checkpoint::encode::{DRIFT, STEP};
use crate::checkpoint::resume_point::ResumePoint;
use crate::device::api::Device;
use crate::device::buffer::Buffer;
use crate::device::cpu::device::cpu;
use crate::device::error::DeviceError;
use crate::device::layout::accumulation_type;
use crate::exec::executor::Weights;
use crate::exec::sequence::Slot;
use crate::exec::stage_code::{NamedTensor, StageCode};
use crate::optim::policy::Staleness;
use crate::optim::state::ParameterState;
use crate::train::job::TrainJob;
use compiler::plan::StageId;
use compiler::plan::schedule::Schedule;
use compiler::schedule::Program;
use compiler::schedule::resume::{period, version_at, versions_before};
use compiler::schedule::semantics::Rule;
use compiler::tensor::{DType, Tensor};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;
use thiserror::Error;

#[derive(Debug, Error, PartialEq)]
#[allow(missing_docs)]
pub enum ResumeError {
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error("the checkpoint has no `{name}`")]
    Missing { name: String },
    #[error("`{name}` of the checkpoint is {got}, the run needs {expected}")]
    Fact { name: String, expected: String, got: String },
    #[error("the checkpoint is from minibatch {minibatches}, the run has {whole}")]
    Beyond { minibatches: u32, whole: u32 },
    #[error(
        "the checkpoint is from minibatch {minibatches}; under this plan and {schedule} all stages finish a round \
         only every {period} minibatches"
    )]
    Round { minibatches: u32, period: u32, schedule: Schedule },
    #[error("the forward reads `{name}`, which it also updates: under {schedule} a resumed run would not be exact")]
    Reads { name: String, schedule: Schedule },
}

/// Rejects checkpointing without a flush for a stage whose forward reads a moving average of its own values. A repeated
/// forward after a checkpoint would see a later state than the original forward did.
pub fn check_states(program: &Program, codes: &[StageCode]) -> Result<(), ResumeError> {
    if program.schedule.flushes() {
        return Ok(());
    }
    for code in codes {
        for step in &code.forward.steps {
            let updated = step.inputs.iter().find_map(|address| match address.slot {
                Slot::State(index) => code.state_updates.iter().any(|update| update.state == index).then_some(index),
                _ => None,
            });
            if let Some(index) = updated {
                return Err(ResumeError::Reads { name: code.states[index].name.clone(), schedule: program.schedule });
            }
        }
    }
    Ok(())
}

impl ResumePoint {
    /// Rejects a program that has no checkpoint position after this minibatch.
    pub fn check(&self, program: &Program) -> Result<(), ResumeError> {
        let minibatches = self.minibatches;
        let total = program.items / program.microbatches.max(1);
        if minibatches > total {
            return Err(ResumeError::Beyond { minibatches, whole: total });
        }
        match period(program) {
            period if minibatches.is_multiple_of(period) => Ok(()),
            period => Err(ResumeError::Round { minibatches, period, schedule: program.schedule }),
        }
    }

    /// Rejects a checkpoint that lacks state for any replica of a stage.
    pub fn check_whole(&self, training: &TrainJob<'_>) -> Result<(), ResumeError> {
        for (stage, code) in (0..).map(StageId).zip(training.codes) {
            for replica in 0..training.program.stages[stage.index()].replicas {
                self.resume_state(stage, replica, code, training, &*cpu())?;
            }
        }
        Ok(())
    }

    /// The initial state of a replica.
    pub fn resume_state(
        &self,
        stage: StageId,
        replica: u32,
        code: &StageCode,
        training: &TrainJob<'_>,
        device: &dyn Device,
    ) -> Result<ResumeState, ResumeError> {
        let rule = Rule::of(training.program);
        let version = version_at(&rule, stage, self.minibatches).0;
        let drifts =
            matches!(training.policy.staleness, Staleness::PipeMare { .. }) && rule.stages[stage.index()].cap > 1;
        let optimizer_states =
            code.parameters.iter().map(|named| self.optimizer_state(named, training.optimizer.names(), drifts, device));
        let mut state = ResumeState {
            version,
            optimizer_states: optimizer_states.collect::<Result<_, _>>()?,
            ..ResumeState::default()
        };
        let older = versions_before(&rule, stage, replica, self.minibatches);
        let Some(flight) = &self.flight else {
            state.unknown_versions = older.map(|(_, version)| version.0).collect();
            return Ok(state);
        };
        // The first replica saves what all replicas have in common.
        let flight_of = |replica| flight.get(&(stage.0, replica));
        let (own_flight, first) = (flight_of(replica), flight_of(0));
        let flights = || own_flight.into_iter().chain(first);
        let is_late = |named: &NamedTensor| flights().any(|flight| flight.shared.contains_key(&named.name));
        for (item, version) in older {
            let (item, version) = (item.0, version.0);
            if let Some(tensors) = own_flight.and_then(|flight| flight.forwards.get(&item)) {
                state.forwards.insert(item, weights(code, tensors, &|_| false, device)?);
                continue;
            }
            let Entry::Vacant(vacant) = state.versions.entry(version) else { continue };
            let tensors = flights().find_map(|flight| flight.versions.get(&version));
            // A stage with tied parameters only has no other weights in its versions.
            let no_tensors = BTreeMap::new();
            let weights_at_version = weights(code, tensors.unwrap_or(&no_tensors), &is_late, device);
            vacant.insert(weights_at_version.map_err(|fault| match fault {
                ResumeError::Missing { name } => ResumeError::Missing { name: format!("v{version}/{name}") },
                other => other,
            })?);
        }
        for (p, named) in code.parameters.iter().enumerate() {
            let Some(tied_versions) = first.and_then(|first| first.shared.get(&named.name)) else { continue };
            let older = tied_versions.iter().filter(|(older, _)| **older < version);
            let mut versions = BTreeMap::new();
            for (older, tensor) in older {
                versions.insert(*older, Arc::new(buffer(named, named.fact.dtype, tensor, device)?));
            }
            state.tied_weights.insert(p, versions);
        }
        Ok(state)
    }

    fn optimizer_state(
        &self,
        named: &NamedTensor,
        kinds: &[&str],
        drifts: bool,
        device: &dyn Device,
    ) -> Result<ParameterState, ResumeError> {
        let tensor = |kind: &str| {
            let name = format!("{}/{kind}", named.name);
            self.optimizer.get(&name).ok_or(ResumeError::Missing { name })
        };
        let wide_buffer = |kind: &str| buffer(named, accumulation_type(named.fact.dtype), tensor(kind)?, device);
        let state = kinds.iter().map(|kind| wide_buffer(kind)).collect::<Result<_, _>>()?;
        let updates = tensor(STEP)?;
        let is_count = updates.dtype() == DType::I64 && updates.len() == 1;
        let updates = is_count.then(|| u32::try_from(updates.to_i64()[0]).ok()).flatten();
        let updates = updates.ok_or_else(|| ResumeError::Fact {
            name: format!("{}/{STEP}", named.name),
            expected: "an update count".into(),
            got: "something else".into(),
        })?;
        // PipeMare's average starts at zero if the checkpoint does not have it for this parameter.
        let bytes = named.bytes;
        let drift = drifts.then(|| match tensor(DRIFT) {
            Ok(_) => wide_buffer(DRIFT),
            Err(_) => Ok(device.allocate(bytes)?),
        });
        Ok(ParameterState { state, drift: drift.transpose()?, updates })
    }
}

/// All parameters of a stage in order; those for which `is_elsewhere` is true are empty.
fn weights(
    code: &StageCode,
    tensors: &BTreeMap<String, Tensor>,
    is_elsewhere: &dyn Fn(&NamedTensor) -> bool,
    device: &dyn Device,
) -> Result<Weights, ResumeError> {
    let upload = |named: &NamedTensor| {
        if is_elsewhere(named) {
            return Ok(Arc::new(Buffer::empty()));
        }
        let missing = || ResumeError::Missing { name: named.name.clone() };
        let tensor = tensors.get(&named.name).ok_or_else(missing)?;
        Ok(Arc::new(buffer(named, named.fact.dtype, tensor, device)?))
    };
    code.parameters.iter().map(upload).collect()
}

fn buffer(named: &NamedTensor, dtype: DType, tensor: &Tensor, device: &dyn Device) -> Result<Buffer, ResumeError> {
    if tensor.dtype() != dtype || named.fact.concrete().as_deref() != Some(tensor.shape()) {
        let shape = named.fact.concrete().unwrap_or_default();
        let expected = format!("{dtype}{shape:?}");
        let got = format!("{}{:?}", tensor.dtype(), tensor.shape());
        return Err(ResumeError::Fact { name: named.name.clone(), expected, got });
    }
    Ok(device.upload(tensor.bytes())?)
}
