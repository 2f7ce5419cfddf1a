//! Tied weights whose stages step at different times.
//!
//! The step of a round needs the gradients of all stages that hold the weight. It runs when a forward pass first needs the new
//! version; by then all of them have contributed.

use crate::comm::communicator::CollectiveError;
use crate::device::buffer::Buffer;
use crate::device::layout::accumulation_type;
use crate::optim::grad_norm::factor;
use crate::stage::gradients::total;
use crate::stage::optimizer_step::OptimizerStep;
use crate::stage::stage_worker::StageWorker;
use compiler::plan::StageId;
use std::sync::Arc;

impl StageWorker<'_> {
    /// Runs the remaining steps of tied weights. Blocks.
    pub fn finish(&mut self) -> Result<(), CollectiveError> {
        let all = u32::MAX;
        (0..self.late.len()).try_for_each(|at| self.step_late(at, all))
    }

    /// Runs the steps of tied weights up to the versions that a micro-batch sees. `version` gives that of a stage.
    pub fn catch_up(&mut self, version: &dyn Fn(StageId) -> u32) -> Result<(), CollectiveError> {
        for at in 0..self.late.len() {
            let holders = &self.tied[self.late[at].tied].holders;
            let seen = holders.iter().map(|&stage| version(stage)).min().unwrap_or(0);
            self.step_late(at, seen)?;
        }
        Ok(())
    }

    /// Steps a tied weight up to `version`, as far as its stage has stepped. Its gradient is clipped by its own norm,
    /// because the norms of the other parameters become known at other times.
    fn step_late(&mut self, at: usize, version: u32) -> Result<(), CollectiveError> {
        while self.late[at].version < version {
            let next = self.late[at].version + 1;
            if let Some(weight) = self.late[at].given.remove(&next) {
                self.late[at].weight = weight;
                self.late[at].version = next;
                self.late_came(at)?;
                continue;
            }
            let Some(step) = self.late[at].waiting.pop_front() else { break };
            let (p, tied) = (self.late[at].parameter, &mut self.tied[self.late[at].tied]);
            let (terms, own) = tied.meet(u64::from(step.round) + 1, &self.executor.device)?;
            let is_sent = tied.place.forwards();
            let (dtype, stays) = (self.code.parameters[p].fact.dtype, self.shard_stream.is_none());
            let total = total(&self.executor.device, dtype, terms, stays)?;
            // On separate devices each rank would have a copy of the others' terms; here the others may still read this
            // one's. A term that waits to be sent to another process is held here until then.
            for (_, term) in own {
                if !is_sent {
                    term.release_slot();
                }
                self.executor.device.give(term);
            }
            if let Some(total) = total {
                let factor = match self.policy.clip_norm {
                    None => 1.0,
                    Some(clip) => {
                        let tensors = [(accumulation_type(dtype), total.region())];
                        let square = self.executor.device.stream.squared_norms(&tensors)?[0];
                        factor(clip, square.sqrt() / f64::from(step.count.max(1)))
                    }
                };
                let weight = std::mem::replace(&mut self.late[at].weight, Arc::new(Buffer::empty()));
                if self.keeps_gradients {
                    self.gradients.retain(|(of, _)| *of != p);
                }
                // In-flight micro-batches may still use it.
                let old = (Arc::strong_count(&weight) > 1).then(|| weight.clone());
                let new = self.apply(vec![(p, weight, total)], OptimizerStep { factor: Some(factor), ..step })?;
                self.late[at].weight = new.into_iter().next().expect("one weight for each that was given");
                old.into_iter().for_each(|old| self.executor.device.give(old));
            }
            self.late[at].version = step.round + 1;
            self.late_came(at)?;
        }
        Ok(())
    }
}
