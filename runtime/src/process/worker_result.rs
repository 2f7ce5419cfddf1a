//! A worker's result in frames for process 0: tensors, recorded activity and peak memory.

use crate::comm::members::encode;
use crate::device::buffer::Buffer;
use crate::exec::stage_code::StageCode;
use crate::exec::stage_tensor::{StageTensor, StageTensors};
use crate::process::connection::Outbound;
use crate::process::fields::{Fields, check};
use crate::process::frame::{FrameError, Kind};
use crate::stage::worker::{MOST_SPANS, Span, Work, WorkerResult};
use compiler::plan::StageId;
use compiler::schedule::{Program, action};
use std::sync::Arc;

/// Spans per frame. Each has at most 28 bytes.
const SPANS: usize = 1 << 14;

/// The frames of the result of a worker, or of one rank of its tensor-parallel group. Only the first replica of a stage
/// sends tensors.
pub fn result_frames(program: &Program, (worker, rank): (usize, usize), outcome: WorkerResult) -> Vec<Outbound> {
    let mut frames = Vec::new();
    let worker_program = &program.workers[worker];
    let stages = program.stages_of(worker_program.rank).zip(outcome.stages);
    for (stage, tensors) in stages.filter(|_| worker_program.replica == 0) {
        frames.extend(tensors.into_iter().map(|(place, tensor)| Outbound {
            kind: Kind::Tensor,
            head: encode(&(rank, stage, place)),
            bodies: vec![tensor],
        }));
    }
    for spans in outcome.spans.chunks(SPANS) {
        let mut head = encode(&rank);
        spans.iter().for_each(|span| head.extend(encode(span)));
        frames.push(Outbound { kind: Kind::Spans, head, bodies: Vec::new() });
    }
    frames.push(Outbound::of(Kind::Left, &(rank, outcome.peak_memory_bytes, outcome.checkpoint_bytes)));
    frames
}

/// Checks a span of a worker.
fn check_span(span: &Span, stages: u32) -> Result<(), FrameError> {
    let is_stage = match span.work {
        Work::Compute(action::Work { stage, .. }) | Work::Recompute(stage, _) | Work::Step(stage, _) => {
            stage.0 < stages
        }
        Work::Wait => true,
    };
    check(is_stage && span.start.is_finite() && span.end.is_finite(), "a span")
}

/// The partial result of a worker in another process.
pub struct Leaving<'a> {
    stages: Vec<(StageId, &'a StageCode, StageTensors)>,
    spans: Vec<Span>,
}

impl<'a> Leaving<'a> {
    pub fn of(program: &Program, codes: &'a [StageCode], worker: usize) -> Leaving<'a> {
        let worker_program = &program.workers[worker];
        let stages = program.stages_of(worker_program.rank).filter(|_| worker_program.replica == 0);
        let stages = stages.map(|stage| (stage, &codes[stage.index()], StageTensors::new()));
        Leaving { stages: stages.collect(), spans: Vec::new() }
    }

    /// Reads a tensor; the rank has already been read.
    pub fn tensor(&mut self, fields: &mut Fields<'_>) -> Result<(), FrameError> {
        let what = "a result tensor";
        let (stage, place): (StageId, StageTensor) = fields.value(what)?;
        let result = self.stages.iter_mut().find(|(of, ..)| *of == stage);
        let (_, code, tensors) = result.ok_or(FrameError::Field { what })?;
        let bytes = result_bytes(place, code).ok_or(FrameError::Field { what })?;
        let buffer = Buffer::host_copy(fields.bytes(bytes, what)?);
        check(tensors.insert(place, Arc::new(buffer)).is_none(), what)?;
        fields.end()
    }

    /// Reads spans; the rank has already been read.
    pub fn spans(&mut self, fields: &mut Fields<'_>, stages: u32) -> Result<(), FrameError> {
        while fields.end().is_err() {
            check(self.spans.len() < MOST_SPANS, "the number of spans")?;
            let span = fields.value("a span")?;
            check_span(&span, stages)?;
            self.spans.push(span);
        }
        Ok(())
    }

    /// The complete result. Fails if anything is missing.
    pub fn into_result(self, peak_memory_bytes: u64, checkpoint_bytes: u64) -> Result<WorkerResult, FrameError> {
        let is_whole = |(_, code, tensors): &(StageId, &StageCode, StageTensors)| {
            let mut places = results(code).filter(|place| !matches!(place, StageTensor::Gradient(_)));
            places.all(|place| tensors.contains_key(&place))
        };
        check(self.stages.iter().all(is_whole), "the worker's result")?;
        let stages = self.stages.into_iter().map(|(_, _, tensors)| tensors).collect();
        Ok(WorkerResult { stages, spans: self.spans, peak_memory_bytes, checkpoint_bytes })
    }
}

/// The tensors that a result may have.
fn results(code: &StageCode) -> impl Iterator<Item = StageTensor> {
    let parameters = (0..code.parameters.len()).flat_map(|p| [StageTensor::Weight(p), StageTensor::Gradient(p)]);
    parameters.chain((0..code.states.len()).map(StageTensor::State))
}

/// Size of such a tensor: 16-bit parameters are returned in `f32`.
fn result_bytes(place: StageTensor, code: &StageCode) -> Option<usize> {
    match place {
        StageTensor::State(_) => Some(place.named(code)?.bytes),
        StageTensor::Weight(_) | StageTensor::Gradient(_) => Some(place.named(code)?.gradient().1),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use compiler::schedule::MicrobatchId;
    use compiler::schedule::action::Phase;

    #[test]
    fn spans_are_of_a_stage() {
        let part = Phase::BackwardWeight;
        let work = Work::Compute(action::Work { stage: StageId(u32::MAX), item: MicrobatchId(u32::MAX), part });
        let span = Span { work, start: 0.25, end: f64::MAX };
        assert_eq!(check_span(&span, u32::MAX), Err(FrameError::Field { what: "a span" }));
        let span = Span { work: Work::Wait, ..span };
        assert_eq!(check_span(&span, 0), Ok(()));
        assert!(check_span(&Span { start: f64::NAN, ..span }, 0).is_err());
    }
}
