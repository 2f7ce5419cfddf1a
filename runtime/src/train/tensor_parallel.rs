//! Tensor-parallel training: the devices of a group run the whole pipeline in parallel, each on its shards.
//!
//! Each device has a worker for each worker of the program, with the same kernels. Tensors between stages are unsharded
//! on every device, or split along the sequence, and each device sends its own. So messages and replica all-reduces stay among the workers of one device. Only collective ops in
//! the graph involve other devices ([`tensor_group`](crate::comm::tensor_group)). Parameters and optimizer state are
//! sharded; the results are gathered at the end.

use crate::checkpoint::StageSnapshot;
use crate::checkpoint::resume_point::ResumePoint;
use crate::comm::tensor_group::{Layouts, TensorComm, TensorRank};
use crate::device::api::Device;
use crate::device::cpu::device::cpu;
use crate::device::error::DeviceError;
use crate::exec::compile::{PassOptions, compile_tensor_parallel};
use crate::exec::compile_error::CompileError;
use crate::stage::saved_weights::Checkpoint;
use crate::train::error::TrainError;
use crate::train::job::{RunOptions, StepDone, TrainJob, Trained};
use crate::train::prepare::{PrepareError, Prepared, RunTarget, Settings, prepare_by};
use crate::train::run::run_tensor_parallel;
use crate::train::tensor_shards::{ShardGatherer, dealt, joined, start_of};
use compiler::graph::Graph;
use compiler::schedule::Pipeline;
use compiler::schedule::generators::schedule;
use compiler::tensor::Tensor;
use compiler::tensor_parallel::cost::Machine;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::{Builder, ScopedJoinHandle};
use thiserror::Error;

#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum TensorParallelError {
    #[error(transparent)]
    Train(#[from] TrainError),
    #[error("weight `{name}` is {got:?}, which does not match the sharding of its stage over {devices} devices")]
    Weight { name: String, got: Vec<usize>, devices: usize },
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error("cannot start the thread of device {device}: {fault}")]
    Thread { device: usize, fault: std::io::Error },
    #[error("bug in pipec: the thread of device {device} panicked")]
    Panic { device: usize },
}

/// Prepares a run whose stages are tensor-parallel over a group like `machine`.
pub fn prepare_shared(
    graph: &Graph,
    stages: &[usize],
    pipeline: Pipeline,
    settings: &Settings,
    machine: &Machine,
) -> Result<(Prepared, Layouts), PrepareError> {
    let generate = |pipeline: &Pipeline| schedule(settings.schedule, pipeline, settings.count);
    let of = RunTarget { device: &*cpu(), splits: settings.schedule.splits_backward(), program: &generate };
    prepare_shared_with(graph, stages, pipeline, settings, of, machine)
}

/// Like [`prepare_shared`], for a device and a program of the caller.
pub fn prepare_shared_with(
    graph: &Graph,
    stages: &[usize],
    pipeline: Pipeline,
    settings: &Settings,
    RunTarget { device, splits, program }: RunTarget<'_>,
    machine: &Machine,
) -> Result<(Prepared, Layouts), PrepareError> {
    let mut layouts = Layouts::new();
    let prepared =
        prepare_by(graph, stages, pipeline, settings, program, &mut |graph, place, stages, loss, saving| {
            let (codes, found) = compile_tensor_parallel(
                graph,
                place,
                stages,
                loss,
                PassOptions { device, splits, joins: &|_| false, saving },
                machine,
            )?;
            layouts = found;
            Ok::<_, CompileError>(codes)
        })?;
    Ok((prepared, layouts))
}

/// The device of each worker of one rank of a group of this degree: the devices of a group are neighbours.
fn own_devices(all: &[Arc<dyn Device>], workers: usize, (degree, rank): (usize, usize)) -> Vec<Arc<dyn Device>> {
    let of = |worker: usize| all[(worker * degree + rank) % all.len()].clone();
    if all.is_empty() { Vec::new() } else { (0..workers).map(of).collect() }
}

/// Trains on every device of a group. Returns gathered weights; times are those of the first device.
pub fn train_tensor_parallel(
    training: &TrainJob<'_>,
    layouts: &Layouts,
    devices: usize,
    on_step: &mut dyn FnMut(StepDone),
) -> Result<Trained, TensorParallelError> {
    run_shared(training, RunOptions::default(), (layouts, devices), on_step)
}

/// Like [`train_tensor_parallel`], with resume and checkpoint options. Checkpoints contain unsharded tensors.
pub fn run_shared(
    training: &TrainJob<'_>,
    course: RunOptions<'_>,
    (layouts, devices): (&Layouts, usize),
    on_step: &mut dyn FnMut(StepDone),
) -> Result<Trained, TensorParallelError> {
    let RunOptions { start, cuts, gate, devices: all_devices, on_part, mut on_checkpoint } = course;
    let parts = (0..devices).map(|device| dealt(training.weights, |name| name, (layouts, devices), device));
    let weights: Vec<BTreeMap<String, Tensor>> = parts.collect::<Result<_, _>>()?;
    let starts = (0..devices).map(|device| start.map(|start| start_of(start, (layouts, devices), device)).transpose());
    let starts: Vec<Option<ResumePoint>> = starts.collect::<Result<_, _>>()?;
    let tables: Vec<Arc<TensorComm>> =
        training.program.workers.iter().map(|_| Arc::new(TensorComm::new(devices))).collect();
    let known = Arc::new(layouts.clone());
    let tensor_ranks_of = |device: usize| -> Vec<Arc<TensorRank>> {
        tables.iter().map(|table| Arc::new(TensorRank::new(table.clone(), device, devices, known.clone()))).collect()
    };
    let (keeps, writes) = (on_part.is_some(), on_checkpoint.is_some());
    // The device that contributes the last shard of a checkpoint passes it on; others wait while it does.
    let keeper = Mutex::new((ShardGatherer::new(training.codes, layouts, devices), on_part));
    let gather_fault = Mutex::new(None);
    let mut joining = ShardGatherer::new(training.codes, layouts, devices);
    let (reports, written) = mpsc::channel::<(usize, Checkpoint)>();
    type Reported = mpsc::Sender<(usize, Checkpoint)>;
    let run =
        |device: usize, tensor_ranks: Vec<Arc<TensorRank>>, reports: Reported, on_step: &mut dyn FnMut(StepDone)| {
            let mut leaving = AbandonGuard { tensor_ranks: &tensor_ranks, is_done: false };
            let own = TrainJob { weights: &weights[device], ..*training };
            let mut take = |part: StageSnapshot| {
                let mut keeper = keeper.lock().unwrap_or_else(PoisonError::into_inner);
                let (joining, on_part) = &mut *keeper;
                match (joining.take(device, part), on_part) {
                    (Ok(whole), Some(on_part)) => whole.into_iter().for_each(on_part),
                    (Ok(_), None) => {}
                    (Err(fault), _) => {
                        *gather_fault.lock().unwrap_or_else(PoisonError::into_inner) = Some(fault);
                    }
                }
            };
            // The receiver lives until all devices have finished.
            let mut tell = |checkpoint: Checkpoint| drop(reports.send((device, checkpoint)));
            let course = RunOptions {
                start: starts[device].as_ref(),
                cuts,
                gate,
                devices: own_devices(&all_devices, training.program.workers.len(), (devices, device)),
                on_part: keeps.then_some(&mut take as &mut (dyn FnMut(StageSnapshot) + Send)),
                on_checkpoint: writes.then_some(&mut tell as &mut dyn FnMut(Checkpoint)),
            };
            let done = run_tensor_parallel(&own, course, on_step, None, &tensor_ranks);
            leaving.is_done = done.is_ok();
            done
        };
    let mut hear = || {
        for (device, checkpoint) in written.try_iter() {
            if let (Some(on_checkpoint), Some(whole)) = (&mut on_checkpoint, joining.written(device, checkpoint)) {
                on_checkpoint(whole);
            }
        }
    };
    let outcomes: Vec<Result<Trained, TensorParallelError>> = std::thread::scope(|scope| {
        let start = |device: usize| {
            let (run, tensor_ranks, reports) = (&run, tensor_ranks_of(device), reports.clone());
            let started = Builder::new().spawn_scoped(scope, move || run(device, tensor_ranks, reports, &mut |_| ()));
            // The devices that have started would wait for this one.
            started.inspect_err(|_| tables.iter().for_each(|table| table.abandon()))
        };
        let others: Vec<_> = (1..devices).map(start).collect();
        let first = run(0, tensor_ranks_of(0), reports.clone(), &mut |step| {
            hear();
            on_step(step);
        });
        let outcome = |device: usize, done: std::thread::Result<Result<Option<Trained>, TrainError>>| match done {
            Ok(Ok(Some(trained))) => Ok(trained),
            Ok(Err(error)) => Err(TensorParallelError::Train(error)),
            Ok(Ok(None)) | Err(_) => Err(TensorParallelError::Panic { device }),
        };
        let other = |(at, started): (usize, std::io::Result<ScopedJoinHandle<'_, _>>)| match started {
            Ok(started) => outcome(at + 1, started.join()),
            Err(fault) => Err(TensorParallelError::Thread { device: at + 1, fault }),
        };
        std::iter::once(outcome(0, Ok(first))).chain(others.into_iter().enumerate().map(other)).collect()
    });
    hear();
    let mut left = first_cause(outcomes)?;
    if let Some(fault) = gather_fault.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(fault.into());
    }
    let mut whole = |of: fn(&mut Trained) -> &mut BTreeMap<String, Tensor>| {
        let each: Vec<_> = left.iter_mut().map(|own| std::mem::take(of(own))).collect();
        joined(&each, layouts)
    };
    let (weights, gradients) = (whole(|own| &mut own.weights), whole(|own| &mut own.gradients));
    Ok(Trained { weights, gradients, ..left.swap_remove(0) })
}

/// Fails the waits of other devices if this device ends early, also by a panic. An error before its workers start has
/// no worker to report it.
struct AbandonGuard<'a> {
    tensor_ranks: &'a [Arc<TensorRank>],
    is_done: bool,
}

impl Drop for AbandonGuard<'_> {
    fn drop(&mut self) {
        if !self.is_done {
            self.tensor_ranks.iter().for_each(|tensor_rank| tensor_rank.abandon());
        }
    }
}

/// The results of all devices, or the first error that is not a lost peer.
fn first_cause(outcomes: Vec<Result<Trained, TensorParallelError>>) -> Result<Vec<Trained>, TensorParallelError> {
    let (mut left, mut failed) = (Vec::new(), Vec::new());
    for outcome in outcomes {
        match outcome {
            Ok(trained) => left.push(trained),
            Err(error) => failed.push(error),
        }
    }
    let cause =
        failed.iter().position(|error| !matches!(error, TensorParallelError::Train(error) if error.lost_another()));
    match failed.is_empty() {
        true => Ok(left),
        false => Err(failed.swap_remove(cause.unwrap_or(0))),
    }
}
