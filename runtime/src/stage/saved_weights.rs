//! The weights of a stage, saved at the `Checkpoint` instructions of its program.

use crate::device::error::DeviceError;
use crate::device::layout::accumulation_type;
use crate::device::region::Region;
use crate::exec::stage_code::NamedTensor;
use crate::stage::stage_worker::StageWorker;
use compiler::plan::StageId;
use compiler::tensor::Tensor;
use std::collections::BTreeMap;

/// A saved weight version of a stage.
#[derive(Clone, Debug, PartialEq)]
pub struct Checkpoint {
    pub stage: StageId,
    /// Number of updates.
    pub version: u32,
    /// Parameters of that version and the current states, by name in the source model.
    pub weights: BTreeMap<String, Tensor>,
}

impl Checkpoint {
    /// File name in the run's checkpoint folder. Replicas of a stage have equal weights and write the same file.
    pub fn file_name(&self) -> String {
        format!("stage-{}-version-{}.safetensors", self.stage.0, self.version)
    }
}

impl StageWorker<'_> {
    /// Copies a weight version and the current states, by name. The newest version has 16-bit parameters in `f32`;
    /// older versions, and sharded masters, do not. A tied weight with versions of its own has its current value. Under
    /// ZeRO 3 it blocks until replicas have published their shards, and under tensor parallelism until all ranks have
    /// contributed theirs; ranks other than the first then return `None`.
    pub fn checkpoint(&self, version: u32) -> Result<Option<BTreeMap<String, Tensor>>, DeviceError> {
        let is_needed = |name: &str| self.executor.tensor_rank.as_ref().is_none_or(|rank| rank.is_gathered(name));
        let is_newest = self.versions.keys().next_back() == Some(&version);
        let mut tensors = BTreeMap::new();
        let weights = self.versions.get(&version).map(|weights| self.gather_weights(version, weights)).transpose()?;
        let parameters = self.code.parameters.iter().zip(weights.iter().flatten());
        for (index, (named, weight)) in parameters.enumerate().filter(|(_, (named, _))| is_needed(&named.name)) {
            let weight =
                self.late_weights.iter().find(|late| late.parameter == index).map_or(weight, |late| &late.weight);
            let master = self.updater.master(index).filter(|_| is_newest);
            tensors.insert(named.name.clone(), self.download(named, master.unwrap_or(weight).region())?);
        }
        let states = self.code.states.iter().zip(&self.executor.states);
        for (named, state) in states.filter(|(named, _)| is_needed(&named.name)) {
            tensors.insert(named.name.clone(), self.download(named, state.region())?);
        }
        match &self.executor.tensor_rank {
            Some(tensor_rank) => tensor_rank.gather_shards(tensors),
            None => Ok(Some(tensors)),
        }
    }

    fn download(&self, named: &NamedTensor, region: Region<'_>) -> Result<Tensor, DeviceError> {
        let mut copy = None;
        self.executor.device.stream.download_with(region, &mut |bytes| copy = Some(tensor(named, bytes)))?;
        Ok(copy.expect("a download calls its reader"))
    }
}

/// Copies the bytes into a tensor. A 16-bit parameter or its gradient is `f32` if `bytes` has that size.
pub fn tensor(named: &NamedTensor, bytes: &[u8]) -> Tensor {
    let shape = named.fact.concrete().expect("sizes were checked when the graph was compiled");
    let dtype = if bytes.len() == named.bytes { named.fact.dtype } else { accumulation_type(named.fact.dtype) };
    Tensor::new(dtype, shape, bytes.to_vec().into()).expect("the buffer has the size of the tensor")
}
