//! The weights of a stage, saved at the points that its program names.

use crate::comm::communicator::PeerLost;
use crate::device::buffer::Buffer;
use crate::exec::compile::NamedTensor;
use crate::optim::update::wide;
use crate::stage::stage_worker::StageWorker;
use compiler::plan::StageId;
use compiler::tensor::Tensor;
use std::collections::BTreeMap;

/// A version of a stage's weights.
#[derive(Clone, Debug, PartialEq)]
pub struct Checkpoint {
    /// The stage.
    pub stage: StageId,
    /// Updates that the weights have seen.
    pub version: u32,
    /// Parameters of that version, and the states as they are now, by the names of the source model.
    pub weights: BTreeMap<String, Tensor>,
}

impl Checkpoint {
    /// The file that it is written to, in a folder of its run. Replicas of a stage have the same weights and write the same file.
    pub fn file_name(&self) -> String {
        format!("stage-{}-version-{}.safetensors", self.stage.0, self.version)
    }
}

impl StageWorker<'_> {
    /// This version of the parameters by name, with the states as they are now. Of narrow parameters the newest version comes in `f32`,
    /// which older ones no longer have, where one replica has all of it; of one that stages hold which step at different times, what is known here.
    /// Waits for nobody but a replica that is about to give its share.
    pub fn checkpoint(&self, version: u32) -> Result<BTreeMap<String, Tensor>, PeerLost> {
        let is_newest = self.versions.keys().next_back() == Some(&version);
        let mut written = BTreeMap::new();
        let weights = self.versions.get(&version).map(|weights| self.whole(version, weights)).transpose()?;
        let parameters = self.code.parameters.iter().zip(weights.iter().flatten());
        for (at, (named, weight)) in parameters.enumerate() {
            let weight = self.late.iter().find(|late| late.parameter == at).map_or(weight, |late| &late.weight);
            let master = self.stepper.master(at).filter(|_| is_newest);
            written.insert(named.name.clone(), tensor(named, master.map_or(weight.bytes(), Buffer::bytes)));
        }
        let states = self.code.states.iter().zip(&self.executor.states);
        written.extend(states.map(|(named, state)| (named.name.clone(), tensor(named, state.bytes()))));
        Ok(written)
    }
}

/// A tensor of the run: narrow parameters and their gradients come in `f32`.
pub fn tensor(named: &NamedTensor, bytes: &[u8]) -> Tensor {
    let shape = named.fact.concrete().expect("sizes were checked when the graph was compiled");
    let dtype = if bytes.len() == named.bytes { named.fact.dtype } else { wide(named.fact.dtype) };
    Tensor::new(dtype, shape, bytes.to_vec().into()).expect("the buffer has the size of the tensor")
}
