//! The load of other workers: threads that run the whole model while kernels are measured.
//!
//! Workers on one machine share its memory bandwidth, last-level cache and clock, so each is slower than one alone.

use crate::whole::Whole;
use compiler::tensor::Tensor;
use runtime::device::api::Device;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};

/// A model that other workers run, and its initial weights.
pub struct Load<'a> {
    pub whole: &'a Whole,
    pub device: &'a Arc<dyn Device>,
    pub weights: &'a BTreeMap<String, Tensor>,
    pub seed: u64,
}

/// Ends the load, also if the measurement panics.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Load<'_> {
    /// Calls `measured` while `others` threads run the model. `None` if they cannot.
    pub fn during<T>(&self, others: u32, measured: impl FnOnce() -> T) -> Option<T> {
        let bytes = (self.whole.footprint() as u64).saturating_mul(u64::from(others) + 1);
        if bytes > self.device.available_memory().unwrap_or(u64::MAX) / 2 {
            return None;
        }
        let ends = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let end = End(&ends);
            let (to, started) = channel();
            for _ in 0..others {
                let (to, ends) = (to.clone(), &ends);
                scope.spawn(move || self.run(to, ends));
            }
            drop(to);
            let is_loaded = started.iter().take(others as usize).filter(|runs| *runs).count() == others as usize;
            let done = is_loaded.then(measured);
            drop(end);
            done
        })
    }

    /// Runs the model again and again. Tells first if it can.
    fn run(&self, started: Sender<bool>, ends: &AtomicBool) {
        let ready = self.whole.ready(self.device, self.weights, self.seed);
        let _ = started.send(ready.is_some());
        let Some((mut executor, item)) = ready else { return };
        while !ends.load(Ordering::Relaxed) {
            let forward = executor.forward_watched(&item, &mut |_| Ok(()));
            if forward.and_then(|()| executor.backward_watched(&item, &mut |_| Ok(()))).is_err() {
                break;
            }
        }
        let _ = executor.finish(item);
    }
}
