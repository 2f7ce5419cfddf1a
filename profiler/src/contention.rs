//! Background workers: threads that run the whole model while kernels are measured.
//!
//! Workers on one machine share its memory bandwidth, last-level cache and clock, so each is slower than one alone.

use crate::whole::WholeStep;
use compiler::tensor::Tensor;
use runtime::device::api::Device;
use runtime::exec::phase::RunPhase;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};

/// The model that background workers run, and its initial weights.
pub struct BackgroundWorkers<'a> {
    pub whole_step: &'a WholeStep,
    pub device: &'a Arc<dyn Device>,
    pub weights: &'a BTreeMap<String, Tensor>,
    pub seed: u64,
}

/// Reasons why background workers do not run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BackgroundFault {
    /// The model of all workers needs more than half of the free memory.
    Memory { bytes: u64, available: u64 },
    /// A kernel rejects the synthetic data, or failed.
    Run,
}

/// Ends the background workers, also if the measurement panics.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl BackgroundWorkers<'_> {
    /// Calls `measure` while `count` threads run the model.
    pub fn during<T>(&self, count: u32, measure: impl FnOnce() -> T) -> Result<T, BackgroundFault> {
        let bytes = (self.whole_step.footprint() as u64).saturating_mul(u64::from(count) + 1);
        let available = self.device.available_memory().unwrap_or(u64::MAX);
        if bytes > available / 2 {
            return Err(BackgroundFault::Memory { bytes, available });
        }
        let (is_ended, is_failed) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let end = End(&is_ended);
            let (sender, started) = channel();
            for _ in 0..count {
                let (sender, is_ended, is_failed) = (sender.clone(), &is_ended, &is_failed);
                scope.spawn(move || self.run(sender, is_ended, is_failed));
            }
            drop(sender);
            // The channel closes once all have sent, or one panicked.
            let is_running = started.iter().filter(|runs| *runs).count() == count as usize;
            let result = is_running.then(measure);
            drop(end);
            result.filter(|_| !is_failed.load(Ordering::Relaxed)).ok_or(BackgroundFault::Run)
        })
    }

    /// Runs the model again and again. First sends if it can.
    fn run(&self, sender: Sender<bool>, is_ended: &AtomicBool, is_failed: &AtomicBool) {
        let prepared = self.whole_step.prepare(self.device, self.weights, self.seed);
        let _ = sender.send(prepared.is_some());
        drop(sender);
        let Some((mut executor, item)) = prepared else { return };
        while !is_ended.load(Ordering::Relaxed) {
            let forward = executor.run_watched(RunPhase::Forward, &item, &mut |_| Ok(()));
            if forward.and_then(|()| executor.run_watched(RunPhase::Backward, &item, &mut |_| Ok(()))).is_err() {
                is_failed.store(true, Ordering::Relaxed);
                break;
            }
        }
        let _ = executor.finish(item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::whole::compile_whole_step;
    use compiler::graph::text::parse;
    use compiler::pass::attribution::{Training, attribute};
    use runtime::device::cpu::device::cpu;

    fn model() -> WholeStep {
        let graph = parse(
            r#"graph "square" {
              %x = input fact={"dtype":"f32","shape":[4,6]} name="x" : f32[4, 6]
              %w = parameter fact={"dtype":"f32","shape":[8,6]} name="w" : f32[8, 6]
              %y = matmul %x %w transpose_a=false transpose_b=true : f32[4, 8]
              output "y" %y
            }"#,
        )
        .unwrap();
        let attribution = attribute(&graph, Training::Gradient).unwrap();
        compile_whole_step(&graph, &attribution, Training::Gradient, &*cpu()).unwrap().unwrap()
    }

    #[test]
    fn workers_run_until_the_measurement_ends() {
        let (whole_step, device, weights) = (model(), cpu(), BTreeMap::new());
        let workers = BackgroundWorkers { whole_step: &whole_step, device: &device, weights: &weights, seed: 1 };
        assert_eq!(workers.during(3, || 7), Ok(7));
        let failed: Result<Result<u32, &str>, _> = workers.during(2, || Err("no"));
        assert_eq!(failed, Ok(Err("no")));
        if device.available_memory().is_some() {
            assert!(matches!(workers.during(u32::MAX, || 7), Err(BackgroundFault::Memory { .. })));
        }
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| workers.during(1, || panic!("it"))));
        assert!(panicked.is_err());
    }

    #[test]
    fn one_that_cannot_run_is_a_fault() {
        let (mut whole_step, device, weights) = (model(), cpu(), BTreeMap::new());
        // The synthetic data is made from the graph, and does not fit another input size.
        whole_step.code.feeds[0].bytes += 4;
        let workers = BackgroundWorkers { whole_step: &whole_step, device: &device, weights: &weights, seed: 1 };
        assert_eq!(workers.during(3, || 7), Err(BackgroundFault::Run));
    }
}
