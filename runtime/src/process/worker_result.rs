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
pub fn leave(program: &Program, (worker, rank): (usize, usize), outcome: WorkerResult) -> Vec<Outbound> {
    let number = rank as u32;
    let mut frames = Vec::new();
    let own = &program.workers[worker];
    let stages = program.stages_of(own.rank).zip(outcome.stages);
    for (stage, left) in stages.filter(|_| own.replica == 0) {
        let mut tensor = |list: u8, place: usize, buffer: Arc<Buffer>| {
            let mut head = [number.to_le_bytes(), stage.0.to_le_bytes()].concat();
            head.push(list);
            head.extend((place as u32).to_le_bytes());
            frames.push(Outbound { kind: Kind::Tensor, head, bodies: vec![buffer] });
        };
        left.weights.into_iter().enumerate().for_each(|(at, buffer)| tensor(WEIGHTS, at, buffer));
        left.states.into_iter().enumerate().for_each(|(at, buffer)| tensor(STATES, at, Arc::new(buffer)));
        left.gradients.into_iter().for_each(|(at, buffer)| tensor(GRADIENTS, at, Arc::new(buffer)));
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

fn put_span(to: &mut Vec<u8>, span: &Span) {
    let (what, one, two) = match span.work {
        Work::Compute(action::Work { stage, item, part }) => {
            (Phase::ALL.iter().position(|of| *of == part).unwrap_or(0) as u8, stage.0, item.0)
        }
        Work::Recompute(stage, item) => (4, stage.0, item.0),
        Work::Wait => (5, 0, 0),
        Work::Step(stage, version) => (6, stage.0, version),
    };
    to.push(what);
    to.extend(one.to_le_bytes());
    to.extend(two.to_le_bytes());
    to.extend(span.start.to_le_bytes());
    to.extend(span.end.to_le_bytes());
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
        let own = &program.workers[worker];
        let stages = program.stages_of(own.rank).filter(|_| own.replica == 0).map(|stage| {
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
        let (stage, list, at) = (fields.u32(what)?, fields.u8(what)?, fields.u32(what)? as usize);
        let unfit = FrameError::Field { what };
        let place = self.stages.iter_mut().find(|of| of.stage.0 == stage).ok_or(unfit.clone())?;
        let list_of = if list == STATES { &place.code.states } else { &place.code.parameters };
        let named = list_of.get(at).ok_or(unfit.clone())?;
        let bytes = if list == STATES { named.bytes } else { widened(named) };
        let buffer = Buffer::host_copy(fields.bytes(bytes, what)?);
        let is_new = match list {
            WEIGHTS => place.weights[at].replace(Arc::new(buffer)).is_none(),
            STATES => place.states[at].replace(buffer).is_none(),
            GRADIENTS if place.gradients.iter().all(|(of, _)| *of != at) => {
                place.gradients.push((at, Arc::new(buffer)));
                true
            }
            _ => false,
        };
        if is_new { fields.end() } else { Err(unfit) }
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
    pub fn done(self, peak_memory_bytes: u64, checkpoint_bytes: u64) -> Result<WorkerResult, FrameError> {
        let unfit = || FrameError::Field { what: "the worker's result" };
        let mut stages = Vec::new();
        for stage in self.stages {
            let weights = stage.weights.into_iter().collect::<Option<Vec<_>>>().ok_or_else(unfit)?;
            let states = stage.states.into_iter().collect::<Option<Vec<_>>>().ok_or_else(unfit)?;
            let own = |(at, buffer): (usize, Arc<Buffer>)| Some((at, Arc::into_inner(buffer)?));
            let gradients = stage.gradients.into_iter().map(own).collect::<Option<Vec<_>>>().ok_or_else(unfit)?;
            stages.push(StageResult { weights, states, gradients });
        }
        Ok(WorkerResult { stages, spans: self.spans, peak_memory_bytes, checkpoint_bytes })
    }
}

/// Size of a returned parameter: 16-bit ones are returned in `f32`.
fn widened(named: &NamedTensor) -> usize {
    named.bytes / named.fact.dtype.size().max(1) * accumulation_type(named.fact.dtype).size()
}

/// Maximum frame length.
pub fn most(codes: &[StageCode]) -> usize {
    let parameters = codes.iter().flat_map(|code| &code.parameters).map(widened);
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
            let given = Span { work, start: 0.25, end: 0.5 };
            let mut bytes = Vec::new();
            put_span(&mut bytes, &given);
            assert_eq!((span(&mut Fields::of(&bytes), 2), bytes.len()), (Ok(given), SPAN));
            bytes[0] = 7;
            assert!(span(&mut Fields::of(&bytes), 2).is_err());
        }
    }
}
