//! Serialises a worker's result for process 0: tensors, recorded activity and peak memory.

use crate::device::buffer::Buffer;
use crate::device::layout::accumulation_type;
use crate::exec::stage_code::{NamedTensor, StageCode};
use crate::process::connection::Outbound;
use crate::process::fields::Fields;
use crate::process::frame::{FrameError, Kind};
use crate::stage::gradients::GradientTerms;
use crate::stage::stage_worker::StageResult;
use crate::stage::worker::{MOST_SPANS, Span, Work, WorkerResult};
use compiler::plan::StageId;
use compiler::schedule::action::Phase;
use compiler::schedule::{MicrobatchId, Program, action};
use std::sync::Arc;

/// Spans per frame.
const SPANS: usize = 1 << 14;
/// Bytes of a span: type, two numbers, start and end.
const SPAN: usize = 1 + 4 + 4 + 8 + 8;
/// Numbers before a tensor: global rank, stage, list, index.
const BEFORE: usize = 4 + 4 + 1 + 4;

/// Lists that a tensor may belong to.
const WEIGHTS: u8 = 0;
const STATES: u8 = 1;
const GRADIENTS: u8 = 2;

/// The frames of the result of a worker, or of one rank of its tensor-parallel group. Only the first replica of a stage
/// sends tensors.
pub fn result_frames(program: &Program, (worker, rank): (usize, usize), outcome: WorkerResult) -> Vec<Outbound> {
    let number = rank as u32;
    let mut frames = Vec::new();
    let worker_program = &program.workers[worker];
    let stages = program.stages_of(worker_program.rank).zip(outcome.stages);
    for (stage, stage_result) in stages.filter(|_| worker_program.replica == 0) {
        let mut tensor = |list: u8, index: usize, buffer: Arc<Buffer>| {
            let mut head = [number.to_le_bytes(), stage.0.to_le_bytes()].concat();
            head.push(list);
            head.extend((index as u32).to_le_bytes());
            frames.push(Outbound { kind: Kind::Tensor, head, bodies: vec![buffer] });
        };
        stage_result.weights.into_iter().enumerate().for_each(|(index, buffer)| tensor(WEIGHTS, index, buffer));
        stage_result.states.into_iter().enumerate().for_each(|(index, buffer)| tensor(STATES, index, Arc::new(buffer)));
        stage_result.gradients.into_iter().for_each(|(index, buffer)| tensor(GRADIENTS, index, Arc::new(buffer)));
    }
    for spans in outcome.spans.chunks(SPANS) {
        let mut head = number.to_le_bytes().to_vec();
        spans.iter().for_each(|span| put_span(&mut head, span));
        frames.push(Outbound::of(Kind::Spans, head));
    }
    let mut head = number.to_le_bytes().to_vec();
    head.extend(outcome.peak_memory_bytes.to_le_bytes());
    head.extend(outcome.checkpoint_bytes.to_le_bytes());
    frames.push(Outbound::of(Kind::Left, head));
    frames
}

fn put_span(bytes: &mut Vec<u8>, span: &Span) {
    let (kind, stage, number) = match span.work {
        Work::Compute(action::Work { stage, item, part }) => {
            (Phase::ALL.iter().position(|phase| *phase == part).unwrap_or(0) as u8, stage.0, item.0)
        }
        Work::Recompute(stage, item) => (4, stage.0, item.0),
        Work::Wait => (5, 0, 0),
        Work::Step(stage, version) => (6, stage.0, version),
    };
    bytes.push(kind);
    bytes.extend(stage.to_le_bytes());
    bytes.extend(number.to_le_bytes());
    bytes.extend(span.start.to_le_bytes());
    bytes.extend(span.end.to_le_bytes());
}

fn span(fields: &mut Fields<'_>, stages: u32) -> Result<Span, FrameError> {
    let what = "a span";
    let kind = fields.u8(what)?;
    let (stage, number) = (StageId(fields.below(stages, what)?), fields.u32(what)?);
    let work = match kind {
        4 => Work::Recompute(stage, MicrobatchId(number)),
        5 => Work::Wait,
        6 => Work::Step(stage, number),
        part => {
            let part = *Phase::ALL.get(usize::from(part)).ok_or(FrameError::Field { what })?;
            Work::Compute(action::Work { stage, item: MicrobatchId(number), part })
        }
    };
    let (start, end) = (fields.f64(what)?, fields.f64(what)?);
    if !(start.is_finite() && end.is_finite()) {
        return Err(FrameError::Field { what });
    }
    Ok(Span { work, start, end })
}

/// The partial result of a worker in another process.
pub struct Leaving<'a> {
    stages: Vec<PartialStageResult<'a>>,
    spans: Vec<Span>,
}

struct PartialStageResult<'a> {
    stage: StageId,
    code: &'a StageCode,
    weights: Vec<Option<Arc<Buffer>>>,
    states: Vec<Option<Buffer>>,
    gradients: GradientTerms,
}

impl<'a> Leaving<'a> {
    pub fn of(program: &Program, codes: &'a [StageCode], worker: usize) -> Leaving<'a> {
        let worker_program = &program.workers[worker];
        let stages = program.stages_of(worker_program.rank).filter(|_| worker_program.replica == 0).map(|stage| {
            let code = &codes[stage.index()];
            PartialStageResult {
                stage,
                code,
                weights: code.parameters.iter().map(|_| None).collect(),
                states: code.states.iter().map(|_| None).collect(),
                gradients: Vec::new(),
            }
        });
        Leaving { stages: stages.collect(), spans: Vec::new() }
    }

    /// Reads a tensor; the rank has already been read.
    pub fn tensor(&mut self, fields: &mut Fields<'_>) -> Result<(), FrameError> {
        let what = "a result tensor";
        let (stage, list, index) = (fields.u32(what)?, fields.u8(what)?, fields.u32(what)? as usize);
        let invalid = FrameError::Field { what };
        let result = self.stages.iter_mut().find(|result| result.stage.0 == stage).ok_or(invalid.clone())?;
        let named_tensors = if list == STATES { &result.code.states } else { &result.code.parameters };
        let named = named_tensors.get(index).ok_or(invalid.clone())?;
        let bytes = if list == STATES { named.bytes } else { wide_bytes(named) };
        let buffer = Buffer::host_copy(fields.bytes(bytes, what)?);
        let is_new = match list {
            WEIGHTS => result.weights[index].replace(Arc::new(buffer)).is_none(),
            STATES => result.states[index].replace(buffer).is_none(),
            GRADIENTS if result.gradients.iter().all(|(parameter, _)| *parameter != index) => {
                result.gradients.push((index, Arc::new(buffer)));
                true
            }
            _ => false,
        };
        if is_new { fields.end() } else { Err(invalid) }
    }

    /// Reads spans; the rank has already been read.
    pub fn spans(&mut self, fields: &mut Fields<'_>, stages: u32) -> Result<(), FrameError> {
        while fields.end().is_err() {
            if self.spans.len() >= MOST_SPANS {
                return Err(FrameError::Field { what: "the number of spans" });
            }
            self.spans.push(span(fields, stages)?);
        }
        Ok(())
    }

    /// The complete result. Fails if anything is missing.
    pub fn into_result(self, peak_memory_bytes: u64, checkpoint_bytes: u64) -> Result<WorkerResult, FrameError> {
        let invalid = || FrameError::Field { what: "the worker's result" };
        let mut stages = Vec::new();
        for stage in self.stages {
            let weights = stage.weights.into_iter().collect::<Option<Vec<_>>>().ok_or_else(invalid)?;
            let states = stage.states.into_iter().collect::<Option<Vec<_>>>().ok_or_else(invalid)?;
            let into_owned = |(at, buffer): (usize, Arc<Buffer>)| Some((at, Arc::into_inner(buffer)?));
            let gradients =
                stage.gradients.into_iter().map(into_owned).collect::<Option<Vec<_>>>().ok_or_else(invalid)?;
            stages.push(StageResult { weights, states, gradients });
        }
        Ok(WorkerResult { stages, spans: self.spans, peak_memory_bytes, checkpoint_bytes })
    }
}

/// Size of a returned parameter: 16-bit ones are returned in `f32`.
fn wide_bytes(named: &NamedTensor) -> usize {
    named.bytes / named.fact.dtype.size().max(1) * accumulation_type(named.fact.dtype).size()
}

/// Maximum frame length.
pub fn max_bytes(codes: &[StageCode]) -> usize {
    let parameters = codes.iter().flat_map(|code| &code.parameters).map(wide_bytes);
    let states = codes.iter().flat_map(|code| &code.states).map(|named| named.bytes);
    let tensor = parameters.chain(states).max().unwrap_or(0).saturating_add(BEFORE);
    tensor.max(4 + SPANS * SPAN)
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
            let mut bytes = Vec::new();
            put_span(&mut bytes, &expected);
            assert_eq!((span(&mut Fields::of(&bytes), 2), bytes.len()), (Ok(expected), SPAN));
            bytes[0] = 7;
            assert!(span(&mut Fields::of(&bytes), 2).is_err());
        }
    }
}
