//! The router of a connection: delivers frames to workers' channels and communicators, and losses and worker results to
//! process 0.
//!
//! All routes are created from the program before the run; a frame without a route is refused. When the reader of a
//! connection ends, its routes are dropped, so no worker waits forever.

use crate::checkpoint::StageSnapshot;
use crate::comm::channel::{Message, TensorMessage};
use crate::device::tensor_link::{Role, TensorLink};
use crate::exec::stage_code::StageCode;
use crate::process::connection::{DeadlineReader, Outbound};
use crate::process::fields::{Fields, check};
use crate::process::frame::{FrameError, FrameReader, Kind};
use crate::process::parts;
use crate::process::parts::PartForm;
use crate::process::placement::WorkerPlacement;
use crate::process::process_group::{Progress, read_failure};
use crate::process::recv_buffers::Ring;
use crate::process::run_status::{LinkError, RunStatus, abort_reason};
use crate::process::stop::StopAgreement;
use crate::process::worker_result::Leaving;
use crate::stage::worker::{Event, WorkerResult};
use compiler::op::Value;
use compiler::schedule::{Program, ProgramStage};
use crossbeam_channel::Sender;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Lower bound of the frame limit, for spans and other short frames.
const SHORT: usize = 1 << 19;
/// Upper bound of the numbers that come with a tensor, in bytes.
const NUMBERS: usize = 256;
/// Weights, masters and drift of a parameter, and the most tensors of an optimizer's state for it.
const COPIES: usize = 3 + 8;

/// Maximum frame length of a run. No frame has more than all tensors of its stages, as often as a snapshot may have
/// them: as weights and optimizer state, and as versions, forwards and tied weights in flight.
pub fn frame_limit(program: &Program, codes: &[StageCode]) -> u64 {
    let stage = |(code, stage): (&StageCode, &ProgramStage)| {
        let parameters = code.parameters.iter().map(|named| named.gradient().1);
        let states = code.states.iter().map(|named| named.bytes);
        let transfers = code.sent.iter().chain(&code.gradients_out).map(|transfer| transfer.address.bytes);
        let steps = [&code.forward, &code.backward, &code.weight].into_iter().flat_map(|pass| &pass.steps);
        let operands = steps.filter_map(|step| step.collective.as_ref()).map(|collective| collective.operand.bytes());
        // See `stage_comms` of `train::channels`.
        let items = stage.cap.saturating_add(program.microbatches).saturating_mul(2) as usize;
        let samples = code.state_updates.iter().map(|update| update.sample.bytes.saturating_mul(items));
        let tensors = parameters.chain(states).chain(transfers).chain(operands).chain(samples);
        let bytes =
            tensors.fold(items.saturating_mul(8), |sum, bytes| sum.saturating_add(bytes).saturating_add(NUMBERS));
        bytes.saturating_mul((stage.cap as usize).saturating_add(2).saturating_mul(3).saturating_add(COPIES))
    };
    codes.iter().zip(&program.stages).map(stage).fold(SHORT, usize::saturating_add) as u64
}

/// Receiver of a channel's messages, with the value, group and bytes of each tensor.
pub struct Route {
    pub sender: Sender<Message>,
    pub tensors: Vec<(Value, usize, usize)>,
}

/// Receives the messages of a group's members in other processes.
pub trait GroupReceiver: Send + Sync {
    /// Reads a message of a member.
    fn arrive(&self, member: usize, fields: &mut Fields<'_>, ring: &mut Ring) -> Result<(), FrameError>;
    /// Fails all waits, after the process was lost.
    fn abandon(&self);
}

/// State that process 0 collects from the workers of another process.
pub struct Gathering<'a> {
    /// Global ranks whose results are not complete.
    pub ranks: BTreeMap<usize, Leaving<'a>>,
    /// Receiver of losses; `None` once the last rank has finished.
    pub events: Option<Sender<Event>>,
    pub outcomes: Sender<(usize, WorkerResult)>,
    /// Queue for [`Kind::Taken`] replies.
    pub reply: Sender<Outbound>,
    /// Receiver of snapshots, if checkpoints are made; `None` once the last rank has finished.
    pub snapshots: Option<Sender<StageSnapshot>>,
    /// Valid contents of snapshots.
    pub form: PartForm<'a>,
}

/// The routes of all frames from one process.
pub struct Routes<'a> {
    pub process: usize,
    pub name: String,
    pub program: &'a Program,
    pub placement: WorkerPlacement,
    /// Channels on which it sends.
    pub channels: HashMap<u32, Route>,
    /// Channels on which it receives.
    pub posted: HashMap<u32, Sender<()>>,
    /// Groups, with their members in the process.
    pub groups: HashMap<u32, (Arc<dyn GroupReceiver>, BTreeSet<usize>)>,
    /// Brings the tensors that are not in frames.
    pub link: Option<Arc<dyn TensorLink>>,
    /// On process 0.
    pub gathering: Option<Gathering<'a>>,
    /// Stop coordination, if the run can be stopped early.
    pub stop_agreement: Option<Arc<StopAgreement<'a>>>,
    /// On other processes, for process 0: notified when the run ended successfully.
    pub released: Option<Sender<()>>,
    /// On other processes, for process 0: notified when it has taken a snapshot.
    pub taken: Option<Sender<()>>,
    pub progress: Progress,
    /// Maximum frame length.
    pub limit: u64,
}

impl Routes<'_> {
    /// Reads frames until the run is over. An error ends the run, unless it has already ended.
    pub fn read(mut self, mut reader: FrameReader<DeadlineReader>, run_status: &RunStatus) {
        let mut ring = Ring::default();
        loop {
            let handled = match reader.read(self.limit) {
                Ok((kind, content)) => self.handle(kind, content, &mut ring, run_status),
                Err(fault) => Err(fault),
            };
            match handled {
                Ok(true) => {}
                Ok(false) => break,
                Err(fault) => {
                    let silence = reader.source().silence();
                    let doing = self.current_instruction(self.process);
                    let cause = read_failure(fault, self.process, &self.name, doing, silence);
                    cause.into_iter().for_each(|cause| run_status.end(cause));
                    break;
                }
            }
        }
        if run_status.cause().is_some() {
            self.groups.values().for_each(|(receiver, _)| receiver.abandon());
        }
    }

    /// Last known instruction of the first rank of a process.
    fn current_instruction(&self, process: usize) -> Option<String> {
        let rank = self.placement.ranks(process).next()?;
        let index = self.progress.get(rank)?.load(Ordering::Relaxed) as usize;
        self.program.describe(self.program.workers.get(self.placement.worker(rank))?, index)
    }

    /// Handles one frame. Returns false after the last one.
    fn handle(
        &mut self,
        kind: Kind,
        content: &[u8],
        ring: &mut Ring,
        run_status: &RunStatus,
    ) -> Result<bool, FrameError> {
        let mut fields = Fields::of(content);
        let unknown = |what| move || FrameError::Field { what };
        if let (Kind::Message | Kind::Part, Some(link)) = (kind, &self.link) {
            let is_linked: bool = fields.value("the way of the tensors")?;
            ring.link = is_linked.then(|| link.clone());
            ring.role = if kind == Kind::Part { Role::Operand } else { Role::Message };
        }
        match kind {
            Kind::Message => {
                let (channel, item): (u32, u32) = fields.value("the channel")?;
                let route = self.channels.get(&channel).ok_or_else(unknown("the channel"))?;
                check(item < self.program.items, "the micro-batch")?;
                let mut read_tensor = |(value, group, bytes): &(Value, usize, usize)| {
                    let buffer = ring.tensor(&mut fields, *bytes, "a tensor")?;
                    Ok(TensorMessage { value: *value, group: *group, buffer })
                };
                let tensors = route.tensors.iter().map(&mut read_tensor).collect::<Result<_, FrameError>>()?;
                fields.end()?;
                // The worker may have stopped; its error is reported elsewhere.
                let _ = route.sender.send(Message { item, tensors });
            }
            Kind::Posted => {
                let posted = self.posted.get(&fields.value("the channel")?).ok_or_else(unknown("the channel"))?;
                fields.end()?;
                let _ = posted.send(());
            }
            Kind::Part => {
                let (number, member): (u32, usize) = fields.value("the collective")?;
                let (receiver, members) = self.groups.get(&number).ok_or_else(unknown("the collective"))?;
                check(members.contains(&member), "the member of a collective")?;
                receiver.arrive(member, &mut fields, ring)?;
            }
            Kind::Heartbeat => {
                for rank in self.placement.ranks(self.process) {
                    let instruction = fields.value("the worker's progress")?;
                    self.progress.get(rank).into_iter().for_each(|last| last.store(instruction, Ordering::Relaxed));
                }
                fields.end()?;
            }
            Kind::Loss | Kind::Tensor | Kind::Spans | Kind::Left | Kind::Checkpoint => {
                self.gather(kind, &mut fields)?
            }
            Kind::Taken => {
                fields.end()?;
                let taken = self.taken.as_ref().ok_or(FrameError::Unexpected { kind })?;
                let _ = taken.send(());
            }
            Kind::Stop | Kind::Hold | Kind::ResumedState | Kind::End => {
                let stop_agreement = self.stop_agreement.as_ref().ok_or(FrameError::Unexpected { kind })?;
                stop_agreement.handle(self.process, kind, &mut fields)?;
            }
            Kind::Abort => {
                let (process, what) = abort_reason(content)?;
                let doing = process.and_then(|process| self.current_instruction(process));
                run_status.end(LinkError::Reported { process, peer: self.name.clone(), doing, what });
                return Ok(false);
            }
            Kind::Bye => {
                // Process 0 sends it once all results have arrived; then the others send it to each other.
                if let Some(released) = self.released.take() {
                    run_status.release();
                    let _ = released.send(());
                }
                return Ok(false);
            }
            _ => return Err(FrameError::Unexpected { kind }),
        }
        Ok(true)
    }

    fn gather(&mut self, kind: Kind, fields: &mut Fields<'_>) -> Result<(), FrameError> {
        let gathering = self.gathering.as_mut().ok_or(FrameError::Unexpected { kind })?;
        if kind == Kind::Loss {
            let (item, value): (u32, f64) = fields.value("a loss")?;
            check(item < self.program.items, "the micro-batch")?;
            fields.end()?;
            if let Some(events) = &gathering.events {
                let _ = events.send(Event::Loss { item, value });
            }
            return Ok(());
        }
        if kind == Kind::Checkpoint {
            let sender = gathering.snapshots.as_ref().ok_or(FrameError::Unexpected { kind })?;
            let snapshot = parts::unpack(&mut gathering.form, fields)?;
            // Blocks while the previous checkpoint is written. If the receiver is gone, the run is over.
            let _ = sender.send(snapshot);
            let _ = gathering.reply.send(Outbound::of(Kind::Taken, &()));
            return Ok(());
        }
        let rank: usize = fields.value("the rank")?;
        let unknown = || FrameError::Field { what: "the rank" };
        let result = gathering.ranks.get_mut(&rank).ok_or_else(unknown)?;
        match kind {
            Kind::Tensor => result.tensor(fields),
            Kind::Spans => result.spans(fields, self.program.stages.len() as u32),
            _ => {
                let (peak_bytes, checkpoint_bytes): (u64, u64) = fields.value("the worker's memory")?;
                fields.end()?;
                let result = gathering.ranks.remove(&rank).ok_or_else(unknown)?;
                let _ = gathering.outcomes.send((rank, result.into_result(peak_bytes, checkpoint_bytes)?));
                if gathering.ranks.is_empty() {
                    (gathering.events, gathering.snapshots) = (None, None);
                }
                Ok(())
            }
        }
    }
}
