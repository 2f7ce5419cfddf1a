//! The router of a connection: delivers frames to workers' channels and communicators, and losses and worker results to the reporter.
//!
//! All routes are made before the run, from the program; a frame without a route is refused. When the reader of a connection ends,
//! its routes end with it, so no worker waits forever.

use crate::checkpoint::StageSnapshot;
use crate::comm::channel::{Message, Parcel};
use crate::comm::communicator::Communicator;
use crate::process::connection::{Outbound, Patient};
use crate::process::fields::Fields;
use crate::process::frame::{FrameError, FrameReader, Kind};
use crate::process::parts;
use crate::process::parts::PartForm;
use crate::process::process_group::{Progress, verdict};
use crate::process::recv_buffers::Ring;
use crate::process::run_status::{LinkError, NOBODY, RunStatus};
use crate::process::stop::Stopping;
use crate::process::wire::Carried;
use crate::process::worker_result::Leaving;
use crate::stage::worker::{Event, WorkerResult};
use compiler::op::Value;
use crossbeam_channel::Sender;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// What short frames may need.
const SHORT: usize = 1 << 16;

/// Where the messages of a channel go, and what they hold: values, groups and bytes, in order.
pub struct Route {
    /// Where.
    pub to: Sender<Message>,
    /// What.
    pub tensors: Vec<(Value, usize, usize)>,
}

/// A meeting with members in other processes.
pub trait Arrivals: Send + Sync {
    /// A part of a member comes.
    fn arrive(&self, number: u64, member: usize, fields: &mut Fields<'_>, ring: &mut Ring) -> Result<(), FrameError>;
    /// The most bytes of a part.
    fn most(&self) -> usize;
    /// Nobody comes any more.
    fn abandon(&self);
}

/// A place to meet, and what is known of what members bring.
pub struct Hall<T: Carried> {
    /// Where they meet.
    pub place: Arc<Communicator<T>>,
    /// What they bring.
    pub form: T::Form,
    /// Meetings have smaller numbers.
    pub meetings: u64,
}

impl<T: Carried + Send + Sync> Arrivals for Hall<T> {
    fn arrive(&self, number: u64, member: usize, fields: &mut Fields<'_>, ring: &mut Ring) -> Result<(), FrameError> {
        if number >= self.meetings {
            return Err(FrameError::Field { what: "the number of a meeting" });
        }
        let part = T::unpack(&self.form, fields, ring)?;
        fields.end()?;
        match self.place.arrive(number, member, part) {
            true => Ok(()),
            false => Err(FrameError::Field { what: "the member of a meeting" }),
        }
    }

    fn most(&self) -> usize {
        T::most(&self.form)
    }

    fn abandon(&self) {
        self.place.abandon();
    }
}

/// What process 0 gathers of the workers of another one.
pub struct Gathering<'a> {
    /// Those that have not left yet.
    pub workers: BTreeMap<usize, Leaving<'a>>,
    /// Who is told of losses; gone when the last worker has left.
    pub events: Option<Sender<Event>>,
    /// Who is told of what workers leave.
    pub outcomes: Sender<(usize, WorkerResult)>,
    /// Where the process is told that a part is taken.
    pub reply: Sender<Outbound>,
    /// Who takes the parts of checkpoints, where they are made; gone when the last worker has left.
    pub parts: Option<Sender<StageSnapshot>>,
    /// What parts may hold.
    pub form: PartForm<'a>,
}

/// Everything that may come from one process.
pub struct Routes<'a> {
    /// Which process.
    pub process: usize,
    /// Its name.
    pub name: String,
    /// Its workers.
    pub workers: Vec<usize>,
    /// What the first worker of a process was last known to do.
    pub doing: Box<dyn Fn(usize) -> Option<String> + Send + 'a>,
    /// Channels in which it sends.
    pub channels: HashMap<u32, Route>,
    /// Channels in which it receives.
    pub posted: HashMap<u32, Sender<()>>,
    /// Meetings with the members that are its workers.
    pub meetings: HashMap<u32, (Arc<dyn Arrivals>, BTreeSet<usize>)>,
    /// At process 0.
    pub gathering: Option<Gathering<'a>>,
    /// Where a run may be told to stop before its end.
    pub stopping: Option<Arc<Stopping<'a>>>,
    /// At the others, of process 0: told when the run is over and well.
    pub released: Option<Sender<()>>,
    /// At the others, of process 0: told when it has taken a part of a checkpoint.
    pub taken: Option<Sender<()>>,
    /// How far workers are.
    pub progress: Progress,
    /// The longest frame of what workers leave.
    pub most_left: usize,
    /// Items of the run.
    pub items: u32,
    /// Stages of the run.
    pub stages: u32,
}

impl Routes<'_> {
    /// Reads the line until the run is over. What goes wrong ends the run, unless it has ended.
    pub fn read(mut self, mut reader: FrameReader<Patient>, run_status: &RunStatus) {
        let limit = self.limit();
        let mut ring = Ring::default();
        loop {
            let taken = match reader.read(limit) {
                Ok((kind, content)) => self.take(kind, content, &mut ring, run_status),
                Err(fault) => Err(fault),
            };
            match taken {
                Ok(true) => {}
                Ok(false) => break,
                Err(fault) => {
                    let silence = reader.source().silence();
                    if let Some(cause) = verdict(fault, self.process, &self.name, (self.doing)(self.process), silence) {
                        run_status.end(cause);
                    }
                    break;
                }
            }
        }
        if run_status.cause().is_some() {
            self.meetings.values().for_each(|(meeting, _)| meeting.abandon());
        }
    }

    /// The longest frame that may come.
    fn limit(&self) -> u64 {
        let message =
            |route: &Route| route.tensors.iter().fold(8usize, |sum, (_, _, bytes)| sum.saturating_add(*bytes));
        let messages = self.channels.values().map(message);
        let parts = self.meetings.values().map(|(meeting, _)| meeting.most().saturating_add(16));
        let left = self.gathering.as_ref().map(|_| self.most_left);
        let kept = self.gathering.as_ref().filter(|of| of.parts.is_some()).map(|of| of.form.most());
        messages.chain(parts).chain(left).chain(kept).max().unwrap_or(0).max(SHORT) as u64
    }

    /// Takes one frame; says whether more is to come.
    fn take(
        &mut self,
        kind: Kind,
        content: &[u8],
        ring: &mut Ring,
        run_status: &RunStatus,
    ) -> Result<bool, FrameError> {
        let mut fields = Fields::of(content);
        let unknown = |what| move || FrameError::Field { what };
        match kind {
            Kind::Message => {
                let route = self.channels.get(&fields.u32("the channel")?).ok_or_else(unknown("the channel"))?;
                let item = fields.below(self.items, "the item")?;
                let mut parcel = |(value, group, bytes): &(Value, usize, usize)| {
                    let buffer = ring.copy_of(fields.bytes(*bytes, "a tensor")?);
                    Ok(Parcel { value: *value, group: *group, buffer })
                };
                let parcels = route.tensors.iter().map(&mut parcel).collect::<Result<_, FrameError>>()?;
                fields.end()?;
                // A worker that has stopped needs no message; why it stopped is told elsewhere.
                let _ = route.to.send(Message { item, parcels });
            }
            Kind::Posted => {
                let posted = self.posted.get(&fields.u32("the channel")?).ok_or_else(unknown("the channel"))?;
                fields.end()?;
                let _ = posted.send(());
            }
            Kind::Part => {
                let meeting = self.meetings.get(&fields.u32("the meeting")?).ok_or_else(unknown("the meeting"))?;
                let (number, member) = (fields.u64("the number of a meeting")?, fields.u32("the member")? as usize);
                if !meeting.1.contains(&member) {
                    return Err(FrameError::Field { what: "the member of a meeting" });
                }
                meeting.0.arrive(number, member, &mut fields, ring)?;
            }
            Kind::Heartbeat => {
                for worker in &self.workers {
                    let at = fields.u32("how far a worker is")?;
                    self.progress.get(*worker).into_iter().for_each(|known| known.store(at, Ordering::Relaxed));
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
            Kind::Stop | Kind::Hold | Kind::Begun | Kind::End => {
                let stopping = self.stopping.as_ref().ok_or(FrameError::Unexpected { kind })?;
                stopping.take(self.process, kind, &mut fields)?;
            }
            Kind::Abort => {
                let process = Some(fields.u32("who is to blame")?).filter(|process| *process != NOBODY);
                let what = fields.text("why the run ended")?;
                let process = process.map(|process| process as usize);
                let doing = process.and_then(|process| (self.doing)(process));
                run_status.end(LinkError::Told { process, peer: self.name.clone(), doing, what });
                return Ok(false);
            }
            Kind::Bye => {
                // Process 0 says it when all have left what they leave, and they say it to each other after that.
                if let Some(released) = self.released.take() {
                    run_status.release();
                    let _ = released.send(());
                }
                return Ok(false);
            }
            Kind::Hello | Kind::Welcome | Kind::Refusal | Kind::Roster | Kind::Ready | Kind::Start => {
                return Err(FrameError::Unexpected { kind });
            }
        }
        Ok(true)
    }

    fn gather(&mut self, kind: Kind, fields: &mut Fields<'_>) -> Result<(), FrameError> {
        let gathering = self.gathering.as_mut().ok_or(FrameError::Unexpected { kind })?;
        if kind == Kind::Loss {
            let (item, value) = (fields.below(self.items, "the item")?, fields.f64("a loss")?);
            fields.end()?;
            if let Some(events) = &gathering.events {
                let _ = events.send(Event::Loss { item, value });
            }
            return Ok(());
        }
        if kind == Kind::Checkpoint {
            let parts = gathering.parts.as_ref().ok_or(FrameError::Unexpected { kind })?;
            let part = parts::unpack(&gathering.form, fields)?;
            // Waits while a checkpoint before it is written. Where nobody writes any more the run is over.
            let _ = parts.send(part);
            let _ = gathering.reply.send(Outbound::of(Kind::Taken, Vec::new()));
            return Ok(());
        }
        let worker = fields.u32("the worker")? as usize;
        let unknown = || FrameError::Field { what: "the worker" };
        let leaving = gathering.workers.get_mut(&worker).ok_or_else(unknown)?;
        match kind {
            Kind::Tensor => leaving.tensor(fields),
            Kind::Spans => leaving.spans(fields, self.stages),
            _ => {
                let held = fields.u64("what a worker held")?;
                let given = fields.u64("what a worker gave to checkpoints")?;
                fields.end()?;
                let leaving = gathering.workers.remove(&worker).ok_or_else(unknown)?;
                let _ = gathering.outcomes.send((worker, leaving.done(held, given)?));
                if gathering.workers.is_empty() {
                    (gathering.events, gathering.parts) = (None, None);
                }
                Ok(())
            }
        }
    }
}
