//! Training with stages that are shared among devices: a group of devices runs the whole pipeline side by side, each with its parts.
//!
//! Every device of the group has a worker for each worker of the program, with the same kernels: what is on its way between stages is whole
//! on every device, so that messages and sums over replicas stay among the workers of one device. Only what stands in the graphs as an op
//! of the group meets the others ([`seat`](crate::seat)). Parameters and what the optimizer keeps for them are parts where they are split; when
//! all is done the parts are joined, so that nobody outside sees that there were any.

use crate::compile::{CompileError, compile_shared};
use crate::prepare::{PrepareError, Prepared, Settings, prepare_by};
use crate::seat::{Seat, Table};
use crate::train::{Course, StepDone, TrainError, Trained, Training, agrees, run_seated};
use compiler::graph::Graph;
use compiler::op::Layout;
use compiler::op::layout::{part_of, whole_of};
use compiler::schedule::scheduler::schedule;
use compiler::schedule::{Pipeline, Schedule};
use compiler::tensor::Tensor;
use compiler::tensor_parallel::price::Machine;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::{Builder, ScopedJoinHandle};
use thiserror::Error;

/// Why training with shared stages ended early.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum SharedError {
    #[error(transparent)]
    Train(#[from] TrainError),
    #[error(
        "devices that share a stage have parts of its gradients and do not agree on what follows from all of them: train without \
         `--clip-norm`, and in another type than f16"
    )]
    Norm,
    #[error("weight `{name}` is {got:?}, which is not divided among {devices} devices as its stage was")]
    Weight { name: String, got: Vec<usize>, devices: usize },
    #[error("the system gives no thread for device {device}: {fault}")]
    Thread { device: usize, fault: std::io::Error },
    #[error("bug in pipec: the thread of device {device} panicked")]
    Panic { device: usize },
}

/// How parameters lie, by name.
pub type Layouts = BTreeMap<String, Layout>;

/// Prepares a run whose stages are shared by a group like this machine.
pub fn prepare_shared(
    graph: &Graph,
    stages: &[usize],
    pipeline: Pipeline,
    settings: &Settings,
    machine: &Machine,
) -> Result<(Prepared, Layouts), PrepareError> {
    let mut layouts = Layouts::new();
    let generated = |pipeline: &Pipeline| schedule(settings.schedule, pipeline, settings.count);
    let splits = Schedule::splits_backward(settings.schedule);
    let prepared = prepare_by(graph, stages, pipeline, settings, &generated, &mut |graph, place, stages, loss| {
        let (codes, found) = compile_shared(graph, place, stages, loss, splits, machine)?;
        layouts = found;
        Ok::<_, CompileError>(codes)
    })?;
    Ok((prepared, layouts))
}

/// Runs the program on every device of a group. What it leaves is whole; times are those of the first device.
pub fn train_shared(
    training: &Training<'_>,
    layouts: &Layouts,
    devices: usize,
    on_step: &mut dyn FnMut(StepDone),
) -> Result<Trained, SharedError> {
    if training.policy.clip_norm.is_some() || agrees(training) {
        return Err(SharedError::Norm);
    }
    let parts = (0..devices).map(|device| own_parts(training.weights, layouts, devices, device));
    let weights: Vec<BTreeMap<String, Tensor>> = parts.collect::<Result<_, _>>()?;
    let tables: Vec<Arc<Table>> = training.program.workers.iter().map(|_| Arc::new(Table::new(devices))).collect();
    let seats_of = |device: usize| -> Vec<Arc<Seat>> {
        tables.iter().map(|table| Arc::new(Seat::new(table.clone(), device, devices))).collect()
    };
    let run = |device: usize, seats: Vec<Arc<Seat>>, on_step: &mut dyn FnMut(StepDone)| {
        let mut leaving = Leaving { seats: &seats, is_done: false };
        let own = Training { weights: &weights[device], ..*training };
        let done = run_seated(&own, Course::default(), on_step, None, &seats);
        leaving.is_done = done.is_ok();
        done
    };
    let outcomes: Vec<Result<Trained, SharedError>> = std::thread::scope(|scope| {
        let start = |device: usize| {
            let (run, seats) = (&run, seats_of(device));
            let started = Builder::new().spawn_scoped(scope, move || run(device, seats, &mut |_| ()));
            // Those who have begun wait for one that will not come.
            started.inspect_err(|_| tables.iter().for_each(|table| table.abandon()))
        };
        let others: Vec<_> = (1..devices).map(start).collect();
        let first = Ok(run(0, seats_of(0), on_step));
        let told = |device: usize, done: std::thread::Result<Result<Option<Trained>, TrainError>>| match done {
            Ok(Ok(Some(trained))) => Ok(trained),
            Ok(Err(error)) => Err(SharedError::Train(error)),
            Ok(Ok(None)) | Err(_) => Err(SharedError::Panic { device }),
        };
        let other = |(at, started): (usize, std::io::Result<ScopedJoinHandle<'_, _>>)| match started {
            Ok(started) => told(at + 1, started.join()),
            Err(fault) => Err(SharedError::Thread { device: at + 1, fault }),
        };
        std::iter::once(told(0, first)).chain(others.into_iter().enumerate().map(other)).collect()
    });
    joined(first_cause(outcomes)?, layouts)
}

/// A device that leaves before all is done, also by a panic, tells those that would wait for it: what failed before its workers
/// began has no worker that would.
struct Leaving<'a> {
    seats: &'a [Arc<Seat>],
    is_done: bool,
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        if !self.is_done {
            self.seats.iter().for_each(|seat| seat.abandon());
        }
    }
}

/// What every device left, or why one failed that did not only lose another.
fn first_cause(outcomes: Vec<Result<Trained, SharedError>>) -> Result<Vec<Trained>, SharedError> {
    let (mut left, mut failed) = (Vec::new(), Vec::new());
    for outcome in outcomes {
        match outcome {
            Ok(trained) => left.push(trained),
            Err(error) => failed.push(error),
        }
    }
    let cause = failed.iter().position(|error| !matches!(error, SharedError::Train(error) if error.lost_another()));
    match failed.is_empty() {
        true => Ok(left),
        false => Err(failed.swap_remove(cause.unwrap_or(0))),
    }
}

fn own_parts(
    weights: &BTreeMap<String, Tensor>,
    layouts: &Layouts,
    devices: usize,
    device: usize,
) -> Result<BTreeMap<String, Tensor>, SharedError> {
    let part = |(name, whole): (&String, &Tensor)| {
        let Some(Layout::Split(cut)) = layouts.get(name) else { return Ok((name.clone(), whole.clone())) };
        let refused = || SharedError::Weight { name: name.clone(), got: whole.shape().to_vec(), devices };
        let fact = compiler::tensor::fact::Fact::of(whole.dtype(), whole.shape());
        Layout::Split(*cut).part(&fact, devices).ok_or_else(refused)?;
        Ok((name.clone(), part_of(whole, *cut, devices, device)))
    };
    weights.iter().map(part).collect()
}

/// What all devices left, as one.
fn joined(mut left: Vec<Trained>, layouts: &Layouts) -> Result<Trained, SharedError> {
    let whole = |of: fn(&Trained) -> &BTreeMap<String, Tensor>, left: &[Trained]| {
        let each = of(&left[0]).iter().map(|(name, first)| {
            let tensor = match layouts.get(name) {
                Some(Layout::Split(cut)) => {
                    let parts: Vec<Tensor> = left.iter().filter_map(|own| of(own).get(name).cloned()).collect();
                    whole_of(&parts, *cut)
                }
                _ => first.clone(),
            };
            (name.clone(), tensor)
        });
        each.collect::<BTreeMap<String, Tensor>>()
    };
    let (weights, gradients) = (whole(|own| &own.weights, &left), whole(|own| &own.gradients, &left));
    Ok(Trained { weights, gradients, ..left.swap_remove(0) })
}
