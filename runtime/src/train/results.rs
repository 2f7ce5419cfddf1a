//! The results of a run: those of its workers, or the error that ended it.

use crate::device::buffer::Buffer;
use crate::device::error::DeviceError;
use crate::device::layout::is_half;
use crate::exec::stage_code::NamedTensor;
use crate::process::exchange::Exchange;
use crate::stage::saved_weights::tensor;
use crate::stage::worker::WorkerResult;
use crate::stage::worker_error::WorkerError;
use crate::train::error::TrainError;
use crate::train::job::{TrainJob, Trained};
use compiler::tensor::Tensor;
use std::collections::BTreeMap;

/// The results of all workers, by global rank; `None` if another process reports them. The error is that of the first
/// worker that failed by itself; the others only lost their peer.
pub fn finish(
    exchange: Option<Exchange<'_>>,
    results: Vec<(usize, Result<WorkerResult, TrainError>)>,
) -> Result<Option<Vec<WorkerResult>>, TrainError> {
    let (mut left, mut lost, mut failed) = (Vec::new(), None, None);
    for (rank, result) in results {
        match result {
            Ok(outcome) => left.push((rank, outcome)),
            Err(e) if e.lost_another() => lost = lost.or(Some(e)),
            Err(e) => failed = failed.or(Some(e)),
        }
    }
    let is_well = lost.is_none() && failed.is_none();
    let reports = exchange.as_ref().is_none_or(Exchange::reports);
    let finished = match exchange {
        Some(exchange) => exchange.finish(left, is_well).map_err(TrainError::Link),
        None => {
            left.sort_by_key(|(rank, _)| *rank);
            Ok(left)
        }
    };
    if let Some(e) = failed {
        return Err(e);
    }
    let all = finished?;
    match lost {
        Some(e) => Err(e),
        None => Ok(reports.then(|| all.into_iter().map(|(_, outcome)| outcome).collect())),
    }
}

/// The thread of a worker, if it could start.
pub type Thread<'scope> = std::io::Result<std::thread::ScopedJoinHandle<'scope, Result<WorkerResult, WorkerError>>>;

/// Waits for a worker.
pub fn join(name: String, thread: Thread<'_>) -> Result<WorkerResult, TrainError> {
    let panicked = |what: String| TrainError::Panic { worker: name.clone(), what };
    let thread = thread.map_err(|e| panicked(format!("cannot start a thread: {e}")))?;
    match thread.join() {
        Ok(outcome) => Ok(outcome?),
        Err(payload) => {
            let text = payload.downcast_ref::<String>().cloned();
            let text = text.or_else(|| payload.downcast_ref::<&str>().map(|s| s.to_string()));
            Err(panicked(text.unwrap_or_else(|| "no message".into())))
        }
    }
}

/// The result of one tensor-parallel rank of all workers. Only the first has losses.
pub fn collect(
    training: &TrainJob<'_>,
    outcomes: Vec<WorkerResult>,
    losses: Vec<f64>,
    seconds: f64,
) -> Result<Trained, TrainError> {
    let mut weights = BTreeMap::new();
    let mut gradients = BTreeMap::new();
    let mut spans = Vec::new();
    let (mut peak_memory_bytes, mut checkpoint_bytes) = (Vec::new(), Vec::new());
    for (own, outcome) in training.program.workers.iter().zip(outcomes) {
        let stages = training.program.stages_of(own.rank).zip(outcome.stages);
        for (stage, left) in stages.filter(|_| own.replica == 0) {
            let code = &training.codes[stage.index()];
            let put = |to: &mut BTreeMap<String, Tensor>, named: &NamedTensor, buffer: &Buffer| {
                to.insert(named.name.clone(), tensor(named, &buffer.download()?));
                Ok::<(), DeviceError>(())
            };
            code.parameters.iter().zip(&left.weights).try_for_each(|(n, b)| put(&mut weights, n, b))?;
            for (at, (named, buffer)) in code.states.iter().zip(&left.states).enumerate() {
                // Return a state that nothing updates as it was given, without rounding.
                match training.weights.get(&named.name) {
                    Some(given) if is_half(named.fact.dtype) && code.follows.iter().all(|f| f.state != at) => {
                        weights.insert(named.name.clone(), given.clone());
                    }
                    _ => put(&mut weights, named, buffer)?,
                }
            }
            left.gradients.iter().try_for_each(|(p, b)| put(&mut gradients, &code.parameters[*p], b))?;
        }
        spans.push(outcome.spans);
        peak_memory_bytes.push(outcome.peak_memory_bytes);
        checkpoint_bytes.push(outcome.checkpoint_bytes);
    }
    Ok(Trained { weights, gradients, losses, seconds, spans, peak_memory_bytes, checkpoint_bytes })
}
