//! The results of a run: those of its workers, or the error that ended it.

use crate::comm::tensor_group::Layouts;
use crate::device::error::DeviceError;
use crate::device::layout::is_half;
use crate::exec::stage_tensor::{StageTensor, StageTensors};
use crate::process::exchange::Exchange;
use crate::stage::saved_weights::tensor;
use crate::stage::worker::WorkerResult;
use crate::stage::worker_error::WorkerError;
use crate::train::error::TrainError;
use crate::train::job::{TrainJob, Trained};
use crate::train::shard_gatherer::join_tensors;
use crate::train::tensor_shards::whole_codes;
use std::collections::BTreeMap;

/// The results of all workers, by global rank; `None` if another process reports them. The error is that of the first
/// worker that failed by itself; the others only lost their peer.
pub fn finish(
    exchange: Option<Exchange<'_>>,
    results: Vec<(usize, Result<WorkerResult, TrainError>)>,
) -> Result<Option<Vec<WorkerResult>>, TrainError> {
    let (mut outcomes, mut peer_lost, mut failure) = (Vec::new(), None, None);
    for (rank, result) in results {
        match result {
            Ok(outcome) => outcomes.push((rank, outcome)),
            Err(e) if e.lost_another() => peer_lost = peer_lost.or(Some(e)),
            Err(e) => failure = failure.or(Some(e)),
        }
    }
    let is_success = peer_lost.is_none() && failure.is_none();
    let reports = exchange.as_ref().is_none_or(Exchange::is_reporter);
    let finished = match exchange {
        Some(exchange) => exchange.finish(outcomes, is_success).map_err(TrainError::Link),
        None => {
            outcomes.sort_by_key(|(rank, _)| *rank);
            Ok(outcomes)
        }
    };
    if let Some(e) = failure {
        return Err(e);
    }
    let finished = finished?;
    match peer_lost {
        Some(e) => Err(e),
        None => Ok(reports.then(|| finished.into_iter().map(|(_, outcome)| outcome).collect())),
    }
}

/// The thread of a worker, if it could start.
pub type Thread<'scope> = std::io::Result<std::thread::ScopedJoinHandle<'scope, Result<WorkerResult, WorkerError>>>;

/// Waits for a worker.
pub fn join(name: String, thread: Thread<'_>) -> Result<WorkerResult, TrainError> {
    let panic_error = |what: String| TrainError::Panic { worker: name.clone(), what };
    let thread = thread.map_err(|e| panic_error(format!("cannot start a thread: {e}")))?;
    match thread.join() {
        Ok(outcome) => Ok(outcome?),
        Err(payload) => {
            let text = payload.downcast_ref::<String>().cloned();
            let text = text.or_else(|| payload.downcast_ref::<&str>().map(|s| s.to_string()));
            Err(panic_error(text.unwrap_or_else(|| "no message".into())))
        }
    }
}

/// The result of all workers, of which these are the results by global rank. Times and memory are those of the first
/// rank of each tensor-parallel group.
pub fn collect(
    training: &TrainJob<'_>,
    (layouts, degree): (&Layouts, usize),
    outcomes: Vec<WorkerResult>,
    losses: Vec<f64>,
    seconds: f64,
) -> Result<Trained, TrainError> {
    let whole_codes = whole_codes(training.codes, layouts, degree);
    let (mut weights, mut gradients, mut spans) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
    let (mut peak_memory_bytes, mut checkpoint_bytes) = (Vec::new(), Vec::new());
    let mut outcomes = outcomes.into_iter();
    for worker in &training.program.workers {
        let ranks: Vec<WorkerResult> = outcomes.by_ref().take(degree).collect();
        let stages = training.program.stages_of(worker.rank).enumerate().filter(|_| worker.replica == 0);
        for (index, stage) in stages {
            let tensors: Vec<&StageTensors> = ranks.iter().filter_map(|rank| rank.stages.get(index)).collect();
            let joined = join_tensors(&training.codes[stage.index()], layouts, &tensors)?;
            let code = &whole_codes[stage.index()];
            for (place, buffer) in joined {
                let Some(named) = place.named(code) else { continue };
                // Return a state that nothing updates as it was given, without rounding.
                let is_constant = |index: usize| code.state_updates.iter().all(|update| update.state != index);
                let initial = match place {
                    StageTensor::State(index) if is_half(named.fact.dtype) && is_constant(index) => {
                        training.weights.get(&named.name).cloned()
                    }
                    _ => None,
                };
                let of_kind = if matches!(place, StageTensor::Gradient(_)) { &mut gradients } else { &mut weights };
                let value = initial.map_or_else(|| Ok(tensor(named, &buffer.download()?)), Ok::<_, DeviceError>)?;
                of_kind.insert(named.name.clone(), value);
            }
        }
        if let Some(first) = ranks.into_iter().next() {
            spans.push(first.spans);
            peak_memory_bytes.push(first.peak_memory_bytes);
            checkpoint_bytes.push(first.checkpoint_bytes);
        }
    }
    Ok(Trained { weights, gradients, losses, seconds, spans, peak_memory_bytes, checkpoint_bytes })
}
