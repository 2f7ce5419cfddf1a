//! The tensors of a stage by place: what snapshots and results consist of.

use crate::comm::all_reduce::range;
use crate::device::buffer::Buffer;
use crate::exec::stage_code::{NamedTensor, StageCode};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A tensor of a stage. Parameters and states are numbered as in its code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum StageTensor {
    Weight(usize),
    State(usize),
    Gradient(usize),
    /// Optimizer state of a parameter, or a shard of it.
    Optimizer(usize, OptimizerTensor),
    /// A parameter in a version.
    Version(u32, usize),
    /// A parameter in the forward pass of a micro-batch.
    Forward(u32, usize),
    /// A tied parameter, in a version of its own.
    Tied(usize, u32),
}

/// A tensor of an optimizer's state for one parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum OptimizerTensor {
    /// `f32` master weights of a 16-bit parameter.
    Master,
    /// One of the tensors that the optimizer names.
    Named(usize),
    /// PipeMare's moving average of updates.
    Drift,
}

pub type StageTensors = BTreeMap<StageTensor, Arc<Buffer>>;

impl StageTensor {
    /// The parameter; `None` for a state.
    pub fn parameter(self) -> Option<usize> {
        match self {
            StageTensor::State(_) => None,
            StageTensor::Weight(p)
            | StageTensor::Gradient(p)
            | StageTensor::Optimizer(p, _)
            | StageTensor::Version(_, p)
            | StageTensor::Forward(_, p)
            | StageTensor::Tied(p, _) => Some(p),
        }
    }

    /// The parameter or state in the code of the stage, if it has it.
    pub fn named(self, code: &StageCode) -> Option<&NamedTensor> {
        match self {
            StageTensor::State(index) => code.states.get(index),
            of_parameter => code.parameters.get(of_parameter.parameter()?),
        }
    }

    /// True if a tensor of a stage may have so many bytes. 16-bit parameters may be in `f32`, and optimizer state may
    /// be that of one of several shards.
    pub fn has_size(self, bytes: usize, code: &StageCode, (shard, shards): (u32, u32)) -> bool {
        let Some(named) = self.named(code) else { return false };
        let is_size = |(element, whole): (usize, usize)| {
            let is_shard = || bytes == range(whole, element, shard as usize, shards as usize).len();
            bytes == whole || matches!(self, StageTensor::Optimizer(..)) && is_shard()
        };
        let (wide, wide_bytes) = named.gradient();
        is_size((named.fact.dtype.size(), named.bytes))
            || !matches!(self, StageTensor::State(_)) && is_size((wide.size(), wide_bytes))
    }
}
