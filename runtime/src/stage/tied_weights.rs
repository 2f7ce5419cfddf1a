//! Tied weights whose stages step at different times.
//!
//! The step of a round needs the gradients of all stages that hold the weight. It runs when a forward pass first needs the new
//! version; by then all of them have contributed.

use crate::device::buffer::Buffer;
use crate::device::error::DeviceError;
use crate::device::layout::accumulation_type;
use crate::optim::grad_norm::clip_factor;
use crate::stage::gradients::sum_terms;
use crate::stage::optimizer_step::OptimizerStep;
use crate::stage::stage_worker::StageWorker;
use compiler::plan::StageId;
use std::sync::Arc;

impl StageWorker<'_> {
    /// Runs the remaining steps of tied weights. Blocks.
    pub fn finish(&mut self) -> Result<(), DeviceError> {
        let newest = u32::MAX;
        (0..self.late_weights.len()).try_for_each(|index| self.step_late(index, newest))
    }

    /// Runs the steps of tied weights up to the versions that a micro-batch sees. `version` gives that of a stage.
    pub fn catch_up(&mut self, version: &dyn Fn(StageId) -> u32) -> Result<(), DeviceError> {
        for index in 0..self.late_weights.len() {
            let holders = &self.tied[self.late_weights[index].tied].holders;
            let oldest = holders.iter().map(|&stage| version(stage)).min().unwrap_or(0);
            self.step_late(index, oldest)?;
        }
        Ok(())
    }

    /// Steps a tied weight up to `version`, as far as its stage has stepped. Its gradient is clipped by its own norm,
    /// because the norms of the other parameters become known at other times.
    fn step_late(&mut self, index: usize, version: u32) -> Result<(), DeviceError> {
        while self.late_weights[index].version < version {
            let next = self.late_weights[index].version + 1;
            if let Some(weight) = self.late_weights[index].restored.remove(&next) {
                self.late_weights[index].weight = weight;
                self.late_weights[index].version = next;
                self.complete_snapshots(index)?;
                continue;
            }
            let Some(step) = self.late_weights[index].steps.pop_front() else { break };
            let (p, tied) = (self.late_weights[index].parameter, &self.tied[self.late_weights[index].tied]);
            let (terms, own) = tied.wait(u64::from(step.round) + 1)?;
            let is_sent = tied.communicator.has_remote_members();
            let (dtype, is_pooled) = (self.code.parameters[p].fact.dtype, self.shard_stream.is_none());
            let total = sum_terms(&self.executor.device, dtype, terms, is_pooled)?;
            // On separate devices each rank would have a copy of the others' terms; here the others may still read this
            // one's. A term that waits to be sent to another process is held here until then.
            for (_, term) in own {
                if !is_sent {
                    term.release_slot();
                }
                self.executor.device.give(term);
            }
            if let Some(total) = total {
                let factor = match self.config.policy.clip_norm {
                    None => 1.0,
                    Some(clip) => {
                        let tensors = [(accumulation_type(dtype), total.region())];
                        let square = self.executor.device.stream.squared_norms(&tensors)?[0];
                        clip_factor(clip, square.sqrt() / f64::from(step.count.max(1)))
                    }
                };
                let weight = std::mem::replace(&mut self.late_weights[index].weight, Arc::new(Buffer::empty()));
                if self.config.keeps_gradients {
                    self.gradients.retain(|(parameter, _)| *parameter != p);
                }
                // In-flight micro-batches may still use it.
                let old = (Arc::strong_count(&weight) > 1).then(|| weight.clone());
                let new = self.apply(vec![(p, weight, total)], OptimizerStep { factor: Some(factor), ..step })?;
                self.late_weights[index].weight = new.into_iter().next().expect("one weight for each that was given");
                old.into_iter().for_each(|old| self.executor.device.give(old));
            }
            self.late_weights[index].version = step.round + 1;
            self.complete_snapshots(index)?;
        }
        Ok(())
    }
}
