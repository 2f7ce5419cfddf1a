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
            let read = step.inputs.iter().find_map(|place| match place.slot {
                Slot::State(at) => code.follows.iter().any(|follow| follow.state == at).then_some(at),
                _ => None,
            });
            if let Some(at) = read {
                return Err(ResumeError::Reads { name: code.states[at].name.clone(), schedule: program.schedule });
            }
        }
    }
    Ok(())
}

impl ResumePoint {
    /// Rejects a program that has no checkpoint position after this minibatch.
    pub fn check(&self, program: &Program) -> Result<(), ResumeError> {
        let minibatches = self.minibatches;
        let whole = program.items / program.microbatches.max(1);
        if minibatches > whole {
            return Err(ResumeError::Beyond { minibatches, whole });
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
                self.begin(stage, replica, code, training, &*cpu())?;
            }
        }
        Ok(())
    }

    /// The initial state of a replica.
    pub fn begin(
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
        let moves = code.parameters.iter().map(|named| self.moves(named, training.optimizer.names(), drifts, device));
        let mut begin = ResumeState { version, moves: moves.collect::<Result<_, _>>()?, ..ResumeState::default() };
        let older = versions_before(&rule, stage, replica, self.minibatches);
        let Some(flight) = &self.flight else {
            begin.alike = older.map(|(_, version)| version.0).collect();
            return Ok(begin);
        };
        // The first replica saves what all replicas have in common.
        let of = |replica| flight.get(&(stage.0, replica));
        let (own, first) = (of(replica), of(0));
        let both = || own.into_iter().chain(first);
        let is_late = |named: &NamedTensor| both().any(|flight| flight.shared.contains_key(&named.name));
        for (item, version) in older {
            let (item, version) = (item.0, version.0);
            if let Some(tensors) = own.and_then(|own| own.forwards.get(&item)) {
                begin.forwards.insert(item, weights(code, tensors, &|_| false, device)?);
                continue;
            }
            let Entry::Vacant(free) = begin.versions.entry(version) else { continue };
            let known = both().find_map(|flight| flight.versions.get(&version));
            // A stage with tied parameters only has no other weights in its versions.
            let none = BTreeMap::new();
            let made = weights(code, known.unwrap_or(&none), &is_late, device);
            free.insert(made.map_err(|fault| match fault {
                ResumeError::Missing { name } => ResumeError::Missing { name: format!("v{version}/{name}") },
                other => other,
            })?);
        }
        for (p, named) in code.parameters.iter().enumerate() {
            let Some(known) = first.and_then(|first| first.shared.get(&named.name)) else { continue };
            let older = known.iter().filter(|(of, _)| **of < version);
            let mut versions = BTreeMap::new();
            for (of, tensor) in older {
                versions.insert(*of, Arc::new(buffer(named, named.fact.dtype, tensor, device)?));
            }
            begin.shared.insert(p, versions);
        }
        Ok(begin)
    }

    fn moves(
        &self,
        named: &NamedTensor,
        kinds: &[&str],
        drifts: bool,
        device: &dyn Device,
    ) -> Result<ParameterState, ResumeError> {
        let of = |kind: &str| {
            let name = format!("{}/{kind}", named.name);
            self.optimizer.get(&name).ok_or(ResumeError::Missing { name })
        };
        let as_wide = |kind: &str| buffer(named, accumulation_type(named.fact.dtype), of(kind)?, device);
        let state = kinds.iter().map(|kind| as_wide(kind)).collect::<Result<_, _>>()?;
        let updates = of(STEP)?;
        let is_count = updates.dtype() == DType::I64 && updates.len() == 1;
        let updates = is_count.then(|| u32::try_from(updates.to_i64()[0]).ok()).flatten();
        let updates = updates.ok_or_else(|| ResumeError::Fact {
            name: format!("{}/{STEP}", named.name),
            expected: "an update count".into(),
            got: "something else".into(),
        })?;
        // PipeMare's average starts at zero if the checkpoint does not have it for this parameter.
        let bytes = named.bytes;
        let drift = drifts.then(|| match of(DRIFT) {
            Ok(_) => as_wide(DRIFT),
            Err(_) => Ok(device.allocate(bytes)?),
        });
        Ok(ParameterState { master: None, state, drift: drift.transpose()?, updates })
    }
}

/// All parameters of a stage in order; those for which `is_elsewhere` is true are empty.
fn weights(
    code: &StageCode,
    tensors: &BTreeMap<String, Tensor>,
    is_elsewhere: &dyn Fn(&NamedTensor) -> bool,
    device: &dyn Device,
) -> Result<Weights, ResumeError> {
    let one = |named: &NamedTensor| {
        if is_elsewhere(named) {
            return Ok(Arc::new(Buffer::empty()));
        }
        let missing = || ResumeError::Missing { name: named.name.clone() };
        let tensor = tensors.get(&named.name).ok_or_else(missing)?;
        Ok(Arc::new(buffer(named, named.fact.dtype, tensor, device)?))
    };
    code.parameters.iter().map(one).collect()
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
