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
use compiler::schedule::action::Phase;
use compiler::schedule::{MicrobatchId, Program, action};
use std::sync::Arc;

/// Spans per frame.
const SPANS: usize = 1 << 14;
/// Maximum bytes of a span: type, two numbers, start and end.
const SPAN: usize = 1 + 5 + 5 + 8 + 8;
/// Maximum bytes of the numbers before a tensor or spans.
const BEFORE: usize = 32;

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
        spans.iter().for_each(|span| head.extend(encode_span(span)));
        frames.push(Outbound { kind: Kind::Spans, head, bodies: Vec::new() });
    }
    frames.push(Outbound::of(Kind::Left, &(rank, outcome.peak_memory_bytes, outcome.checkpoint_bytes)));
    frames
}

fn encode_span(span: &Span) -> Vec<u8> {
    let (kind, stage, number) = match span.work {
        Work::Compute(action::Work { stage, item, part }) => {
            (Phase::ALL.iter().position(|phase| *phase == part).unwrap_or(0) as u8, stage.0, item.0)
        }
        Work::Recompute(stage, item) => (4, stage.0, item.0),
        Work::Wait => (5, 0, 0),
        Work::Step(stage, version) => (6, stage.0, version),
    };
    encode(&(kind, stage, number, span.start, span.end))
}

fn span(fields: &mut Fields<'_>, stages: u32) -> Result<Span, FrameError> {
    let what = "a span";
    let (kind, stage, number, start, end): (u8, u32, u32, f64, f64) = fields.value(what)?;
    check(stage < stages && start.is_finite() && end.is_finite(), what)?;
    let stage = StageId(stage);
    let work = match kind {
        4 => Work::Recompute(stage, MicrobatchId(number)),
        5 => Work::Wait,
        6 => Work::Step(stage, number),
        part => {
            let part = *Phase::ALL.get(usize::from(part)).ok_or(FrameError::Field { what })?;
            Work::Compute(action::Work { stage, item: MicrobatchId(number), part })
        }
    };
    Ok(Span { work, start, end })
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
            self.spans.push(span(fields, stages)?);
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

/// Maximum frame length.
pub fn max_bytes(codes: &[StageCode]) -> usize {
    let tensors = codes.iter().flat_map(|code| results(code).filter_map(|place| result_bytes(place, code)));
    tensors.max().unwrap_or(0).max(SPANS * SPAN).saturating_add(BEFORE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_read_back() {
        let part = |part| Work::Compute(action::Work { stage: StageId(1), item: MicrobatchId(7), part });
        let mut works = Phase::ALL.map(part).to_vec();
        works.extend([Work::Recompute(StageId(1), MicrobatchId(3)), Work::Wait, Work::Step(StageId(0), 9)]);
        for work in works {
            let expected = Span { work, start: 0.25, end: 0.5 };
            let mut bytes = encode_span(&expected);
            assert_eq!(span(&mut Fields::of(&bytes), 2), Ok(expected));
            bytes[0] = 7;
            assert!(span(&mut Fields::of(&bytes), 2).is_err() && bytes.len() <= SPAN);
        }
    }
}
