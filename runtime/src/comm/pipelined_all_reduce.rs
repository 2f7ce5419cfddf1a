//! All-reduce and all-gather in place between replicas of several processes: a chain, pipelined in chunks.
//!
//! Member `i` receives from `i - 1` the sum of the terms before it, adds its own term in its buffer and passes the result
//! on to `i + 1`. The last member has the sum, which goes back along the chain. So terms are added in the order of
//! members, and sums are bitwise those of one adder. A member sends and receives the bytes at most twice, whatever the
//! number of members. It holds its own buffer and the chunks that are just arriving: a chunk is added, or copied, by
//! the thread that receives it. In an all-gather, a chunk goes from its owner both ways.
//!
//! A member sends to a neighbour only after that has contributed. So nothing arrives before there is a buffer for it.
//!
//! If members keep only their shards of a sum, a chunk goes back no further than its owner.

use crate::comm::all_reduce::{Addends, AllReduce, Collective, Parts, chunk_bytes, exclusive, range};
use crate::comm::communicator::{CollectiveError, PeerLost};
use crate::device::api::Device;
use crate::device::buffer::Buffer;
use crate::device::context::DeviceContext;
use crate::device::error::DeviceError;
use crate::device::memory_counter::MemoryCounter;
use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Interval at which a member looks whether its last chunks are sent.
const POLL: Duration = Duration::from_micros(100);

/// Along the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// To the next member.
    Up,
    /// To the previous member.
    Down,
}

use Direction::{Down, Up};

impl Direction {
    /// The neighbour of a member, if there is one.
    pub fn from(self, member: usize, members: usize) -> Option<usize> {
        match self {
            Up => Some(member + 1).filter(|next| *next < members),
            Down => member.checked_sub(1),
        }
    }

    fn back(self) -> Direction {
        if self == Up { Down } else { Up }
    }
}

/// A message to a neighbour.
pub enum Content {
    /// The sender has contributed.
    Ready,
    /// A chunk of a sum, `None` if no member so far has a term.
    Chunk { chunk: usize, part: Option<Arc<Buffer>> },
}

/// A message along the chain.
pub struct ChainMessage {
    pub direction: Direction,
    pub collective: Collective,
    pub content: Content,
}

/// Sends a member's message to a process.
pub type SendChainMessage = Box<dyn Fn(usize, usize, ChainMessage) + Send + Sync>;

/// A message that was refused, or whose chunk the device could not add.
#[derive(Debug, PartialEq)]
pub enum Refused {
    Unexpected,
    Device(DeviceError),
}

impl From<DeviceError> for Refused {
    fn from(fault: DeviceError) -> Refused {
        Refused::Device(fault)
    }
}

/// A member of this process: its device, with a stream for its collectives.
struct Member {
    context: DeviceContext,
    ledger: Arc<MemoryCounter>,
    chunk: usize,
    /// A chunk of another device. Allocated on first use.
    staging: Option<Buffer>,
}

/// A range of one sum.
struct Chunk {
    at: usize,
    range: Range<usize>,
    /// The only member that needs it, or that has it.
    owner: Option<usize>,
    /// True once this member's buffer holds a sum of terms.
    is_there: bool,
    /// What was received, in each direction.
    received: [bool; 2],
    /// The part that was sent up.
    sent: Option<Arc<Buffer>>,
}

/// A collective of one member.
struct Open {
    parts: Vec<Option<Addends>>,
    chunks: Vec<Chunk>,
    /// Neighbours that have contributed, by direction, and the chunks to send there.
    ready: [bool; 2],
    waiting: [VecDeque<usize>; 2],
    /// Messages still to be sent or received.
    left: usize,
    /// Parts that may not be sent yet.
    sent: Vec<Arc<Buffer>>,
}

struct State {
    members: Vec<Option<Member>>,
    open: HashMap<(usize, Collective), Open>,
    /// Neighbours that have contributed before the member.
    early: HashSet<(usize, Collective, Direction)>,
    is_abandoned: bool,
}

/// Messages to members of this process.
type Local = VecDeque<(usize, ChainMessage)>;

/// Collectives of replicas, some of which are in other processes.
pub struct PipelinedAllReduce {
    /// The process of each member; `None` for this one.
    processes: Vec<Option<usize>>,
    send: SendChainMessage,
    state: Mutex<State>,
    changed: Condvar,
}

impl Chunk {
    /// True if a member receives the chunk from the opposite of `direction`.
    fn arrives(&self, collective: Collective, direction: Direction, member: usize, members: usize) -> bool {
        match (collective, direction) {
            (Collective::AllReduce(_), Up) => member > 0,
            (Collective::AllReduce(_), Down) => member + 1 < members && self.owner.is_none_or(|owner| owner <= member),
            (Collective::AllGather(_), Up) => self.owner.is_some_and(|owner| owner < member),
            (Collective::AllGather(_), Down) => self.owner.is_some_and(|owner| owner > member),
        }
    }

    /// True if a member sends the chunk in `direction`: if its neighbour receives it.
    fn leaves(&self, collective: Collective, direction: Direction, member: usize, members: usize) -> bool {
        let neighbour = direction.from(member, members);
        neighbour.is_some_and(|to| self.arrives(collective, direction, to, members))
    }
}

impl Open {
    fn new(collective: Collective, parts: Parts, chunk: usize, member: usize, members: usize) -> Open {
        let mut chunks = Vec::new();
        for (at, part) in parts.iter().enumerate() {
            let Some(Addends { dtype, terms, sum, is_whole }) = part else { continue };
            let is_sum = matches!(collective, Collective::AllReduce(_));
            let shards: Vec<(Option<usize>, Range<usize>)> = match is_sum && *is_whole {
                true => vec![(None, 0..sum.len())],
                false => (0..members).map(|of| (Some(of), range(sum.len(), dtype.size(), of, members))).collect(),
            };
            for (owner, shard) in shards {
                let is_there = if is_sum { !terms.is_empty() } else { owner == Some(member) };
                chunks.extend(shard.clone().step_by(chunk).map(|start| Chunk {
                    at,
                    range: start..shard.end.min(start + chunk),
                    owner,
                    is_there,
                    received: [false; 2],
                    sent: None,
                }));
            }
        }
        let moves = |chunk: &Chunk| {
            let of = |direction| {
                usize::from(chunk.arrives(collective, direction, member, members))
                    + usize::from(chunk.leaves(collective, direction, member, members))
            };
            of(Up) + of(Down)
        };
        let neighbours = [Up, Down].iter().filter(|direction| direction.from(member, members).is_some()).count();
        let left = chunks.iter().map(moves).sum::<usize>() + neighbours;
        Open { parts, chunks, ready: [false; 2], waiting: Default::default(), left, sent: Vec::new() }
    }

    fn sum(&self, chunk: usize) -> Option<&Addends> {
        self.parts[self.chunks[chunk].at].as_ref()
    }

    /// Drops the parts that are sent. Returns true if all are.
    fn is_sent(&mut self) -> bool {
        for part in std::mem::take(&mut self.sent) {
            match Arc::try_unwrap(part) {
                Ok(part) => part.close_window(),
                Err(part) => self.sent.push(part),
            }
        }
        self.sent.is_empty()
    }
}

impl Member {
    /// Adds a part to a range of `sum`, or copies it there.
    fn take(&mut self, part: &Arc<Buffer>, of: &Addends, range: Range<usize>, adds: bool) -> Result<(), DeviceError> {
        let Member { context, ledger, chunk, staging } = self;
        // SAFETY: until the end of the collective, only messages of this chunk access the range: they are received one
        // after another under a lock, and what was sent up is no longer read when the sum comes down (see `receive`).
        // The stream acquired the buffer in `contribute`, and acquires the part below.
        let mut to = unsafe { exclusive(&of.sum, range) };
        if !adds {
            return context.copy_from(part, to);
        }
        if context.device.can_access(part) {
            context.stream.acquire(part)?;
            context.stream.accumulate(of.dtype, part.region(), to)?;
            return context.stream.release(part);
        }
        let mut copy = match staging.take() {
            Some(copy) => copy,
            None => {
                let mut copy = context.device.allocate(*chunk)?;
                copy.count_in(ledger);
                copy
            }
        };
        context.copy_from(part, copy.region_mut().slice(0..part.len()))?;
        context.stream.accumulate(of.dtype, copy.region_of(0..part.len()), to.reborrow())?;
        *staging = Some(copy);
        Ok(())
    }
}

impl PipelinedAllReduce {
    /// `processes` has the process of each member, in order of the sum; `None` for this one.
    pub fn new(processes: Vec<Option<usize>>, send: SendChainMessage) -> PipelinedAllReduce {
        let members = processes.iter().map(|_| None).collect();
        let state = State { members, open: HashMap::new(), early: HashSet::new(), is_abandoned: false };
        PipelinedAllReduce { processes, send, state: Mutex::new(state), changed: Condvar::new() }
    }

    // No code panics while it holds the lock with inconsistent state.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The bytes of a chunk that a member of this process expects, and the most of any chunk.
    pub fn expected(
        &self,
        to: usize,
        direction: Direction,
        collective: Collective,
        chunk: usize,
    ) -> Option<(usize, usize)> {
        let state = self.lock();
        let known = state.open.get(&(to, collective))?.chunks.get(chunk)?;
        let most = state.members.get(to)?.as_ref()?.chunk;
        let is_expected = known.arrives(collective, direction, to, self.processes.len());
        (is_expected && !known.received[direction as usize]).then(|| (known.range.len(), most))
    }

    /// Handles a message from another process to a member of this one.
    pub fn arrive(&self, to: usize, message: ChainMessage) -> Result<(), Refused> {
        let mut state = self.lock();
        if self.processes.get(to) != Some(&None) {
            return Err(Refused::Unexpected);
        }
        self.deliver(&mut state, Local::from([(to, message)]))
    }

    /// Handles messages to members of this process, and those that they cause.
    fn deliver(&self, state: &mut State, mut local: Local) -> Result<(), Refused> {
        while let Some((to, ChainMessage { direction, collective, content })) = local.pop_front() {
            match content {
                Content::Ready => {
                    // What comes from below goes back down.
                    let back = direction.back();
                    let is_new = match state.open.get_mut(&(to, collective)) {
                        Some(open) => {
                            open.left -= usize::from(!open.ready[back as usize]);
                            !std::mem::replace(&mut open.ready[back as usize], true)
                        }
                        None => state.early.insert((to, collective, back)),
                    };
                    if !is_new {
                        return Err(Refused::Unexpected);
                    }
                }
                Content::Chunk { chunk, part } => {
                    self.receive(state, to, (direction, collective), (chunk, part.as_ref()))?
                }
            }
            self.forward(state, to, collective, &mut local)?;
        }
        self.changed.notify_all();
        Ok(())
    }

    /// Adds a chunk that comes from below to the member's term, or takes the sum that comes from above.
    fn receive(
        &self,
        state: &mut State,
        to: usize,
        (direction, collective): (Direction, Collective),
        (chunk, part): (usize, Option<&Arc<Buffer>>),
    ) -> Result<(), Refused> {
        let members = self.processes.len();
        let own = state.members.get_mut(to).and_then(Option::as_mut).ok_or(Refused::Unexpected)?;
        let open = state.open.get_mut(&(to, collective)).ok_or(Refused::Unexpected)?;
        let of = open.chunks.get(chunk).and_then(|known| open.parts[known.at].as_ref()).ok_or(Refused::Unexpected)?;
        let known = &mut open.chunks[chunk];
        let is_sum = matches!(collective, Collective::AllReduce(_));
        // A sum goes back after the member's term went up, which it contains.
        let is_early = is_sum && direction == Down && known.sent.is_none();
        let is_missing = part.is_none() && (known.is_there && direction == Down || !is_sum);
        if !known.arrives(collective, direction, to, members)
            || part.is_some_and(|part| part.len() != known.range.len())
            || is_early
            || is_missing
            || std::mem::replace(&mut known.received[direction as usize], true)
        {
            return Err(Refused::Unexpected);
        }
        if direction == Down
            && let Some(mut sent) = known.sent.take()
        {
            // The neighbour has received and added it. So its transfer is done, and its sender is about to drop it.
            let sent = loop {
                match Arc::try_unwrap(sent) {
                    Ok(sent) => break sent,
                    Err(held) => sent = held,
                }
                std::thread::yield_now();
            };
            sent.close_window();
        }
        if let Some(part) = part {
            own.take(part, of, known.range.clone(), is_sum && direction == Up && known.is_there)?;
            known.is_there = true;
        }
        open.left -= 1;
        let turns = is_sum && direction == Up && to + 1 == members;
        let onward = if turns { Down } else { direction };
        if known.leaves(collective, onward, to, members) {
            open.waiting[onward as usize].push_back(chunk);
        }
        Ok(())
    }

    /// Sends the chunks of a member for which its neighbours are ready.
    fn forward(
        &self,
        state: &mut State,
        from: usize,
        collective: Collective,
        local: &mut Local,
    ) -> Result<(), DeviceError> {
        let State { members, open, .. } = state;
        let (Some(own), Some(open)) = (&members[from], open.get_mut(&(from, collective))) else { return Ok(()) };
        for direction in [Up, Down] {
            while open.ready[direction as usize]
                && let Some(chunk) = open.waiting[direction as usize].pop_front()
            {
                let mut part = None;
                if let Some(of) = open.sum(chunk).filter(|_| open.chunks[chunk].is_there) {
                    // Readers wait for this chunk alone: the transfers of others may wait for readers.
                    let window = Buffer::window(of.sum.clone(), open.chunks[chunk].range.clone());
                    own.context.stream.release(&window)?;
                    part = Some(Arc::new(window));
                }
                // Without a term, an empty buffer remembers that the chunk went up.
                let sent = part.clone().unwrap_or_else(|| Arc::new(Buffer::empty()));
                match (direction, collective) {
                    (Up, Collective::AllReduce(_)) => open.chunks[chunk].sent = Some(sent),
                    _ => open.sent.push(sent),
                }
                open.left -= 1;
                let content = Content::Chunk { chunk, part };
                self.post(from, ChainMessage { direction, collective, content }, local);
            }
        }
        if open.left == 0 {
            let sums = open.parts.iter().flatten().map(|of| &of.sum);
            sums.into_iter().try_for_each(|sum| own.context.stream.release(sum))?;
            // Those whose sum stays above.
            let sent: Vec<Arc<Buffer>> = open.chunks.iter_mut().filter_map(|chunk| chunk.sent.take()).collect();
            open.sent.extend(sent);
        }
        Ok(())
    }

    /// Sends a message to the neighbour of a member.
    fn post(&self, from: usize, message: ChainMessage, local: &mut Local) {
        let Some(to) = message.direction.from(from, self.processes.len()) else { return };
        match self.processes[to] {
            Some(process) => (self.send)(process, from, message),
            None => local.push_back((to, message)),
        }
    }
}

impl AllReduce for PipelinedAllReduce {
    fn enter(
        &self,
        member: usize,
        device: &Arc<dyn Device>,
        bytes: usize,
        ledger: &Arc<MemoryCounter>,
    ) -> Result<(), DeviceError> {
        let context = DeviceContext::new(device.clone(), Arc::default())?;
        let own = Member { context, ledger: ledger.clone(), chunk: chunk_bytes(bytes), staging: None };
        if let Some(place) = self.lock().members.get_mut(member) {
            *place = Some(own);
        }
        Ok(())
    }

    /// A member has at most one term of each sum, in the buffer of the sum. Its rank is the number of the member.
    fn contribute(&self, collective: Collective, member: usize, parts: Parts) -> Result<(), DeviceError> {
        let mut state = self.lock();
        let members = self.processes.len();
        let Some(Some(own)) = state.members.get(member) else { return Ok(()) };
        parts.iter().flatten().try_for_each(|of| own.context.stream.acquire(&of.sum))?;
        let mut open = Open::new(collective, parts, own.chunk, member, members);
        let mut local = Local::new();
        for direction in [Up, Down] {
            open.ready[direction as usize] = state.early.remove(&(member, collective, direction));
            open.left -= usize::from(open.ready[direction as usize]);
            self.post(member, ChainMessage { direction, collective, content: Content::Ready }, &mut local);
            let starts = |chunk: &Chunk| {
                let is_source = match collective {
                    Collective::AllReduce(_) => member == 0 && direction == Up,
                    Collective::AllGather(_) => chunk.owner == Some(member),
                };
                is_source && chunk.leaves(collective, direction, member, members)
            };
            let first = open.chunks.iter().enumerate().filter(|(_, chunk)| starts(chunk)).map(|(at, _)| at);
            open.waiting[direction as usize] = first.collect();
        }
        state.open.insert((member, collective), open);
        let sent = self.forward(&mut state, member, collective, &mut local);
        match sent.map_err(Refused::from).and_then(|()| self.deliver(&mut state, local)) {
            Ok(()) => Ok(()),
            Err(Refused::Device(fault)) => Err(fault),
            // Members of this process agree.
            Err(Refused::Unexpected) => Err(DeviceError::Foreign { what: "chunk of a sum" }),
        }
    }

    fn wait(&self, collective: Collective, member: usize) -> Result<(), CollectiveError> {
        let mut state = self.lock();
        loop {
            if state.is_abandoned {
                return Err(PeerLost.into());
            }
            let key = (member, collective);
            let Some(open) = state.open.get_mut(&key) else { return Err(PeerLost.into()) };
            if open.left > 0 {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            } else if open.is_sent() {
                state.open.remove(&key);
                return Ok(());
            } else {
                state = self.changed.wait_timeout(state, POLL).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }

    fn abandon(&self) {
        self.lock().is_abandoned = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::device::cpu;
    use crate::device::sanitizer::device::sanitizer;
    use compiler::tensor::DType;
    use crossbeam_channel::{Receiver, Sender, unbounded};

    /// Sizes of the sums: less than a chunk, several chunks, and less than one element for each member.
    const COUNTS: [usize; 3] = [1000, 70_001, 2];

    fn values(member: usize, count: usize, number: u64) -> Vec<f32> {
        let seed = member * 101 + number as usize * 13;
        (0..count).map(|at| ((at * 37 + seed) % 997) as f32 * 1e-3 + 1e4 * (seed % 3) as f32).collect()
    }

    fn upload(context: &DeviceContext, values: &[f32]) -> Arc<Buffer> {
        let mut buffer = context.take(size_of_val(values)).unwrap();
        context.stream.upload(bytemuck::cast_slice(values), Buffer::exclusive(&mut buffer)).unwrap();
        context.release(&buffer).unwrap();
        buffer
    }

    fn download(context: &DeviceContext, buffer: &mut Arc<Buffer>) -> Vec<f32> {
        assert!(context.try_exclusive(buffer).unwrap().is_some(), "it is held by others");
        let mut got = vec![0f32; buffer.len() / 4];
        context.stream.download(buffer.region(), bytemuck::cast_slice_mut(&mut got)).unwrap();
        got
    }

    /// A message to a member of another process.
    type Sent = (usize, ChainMessage);

    /// The all-reduces of all processes, whose threads carry the messages as copies in host memory.
    fn processes(places: &[usize]) -> Vec<(Arc<PipelinedAllReduce>, Receiver<Sent>)> {
        let count = places.iter().max().unwrap() + 1;
        let (senders, receivers): (Vec<Sender<Sent>>, Vec<_>) = (0..count).map(|_| unbounded()).unzip();
        let of = |(own, receiver)| {
            let (senders, members) = (senders.clone(), places.len());
            let send: SendChainMessage = Box::new(move |process: usize, from, mut message: ChainMessage| {
                if let Content::Chunk { part: Some(part), .. } = &mut message.content {
                    *part = Arc::new(Buffer::host_copy(&part.download().unwrap()));
                }
                let to = message.direction.from(from, members).unwrap();
                let _ = senders[process].send((to, message));
            });
            let there = |place: &usize| (*place != own).then_some(*place);
            (Arc::new(PipelinedAllReduce::new(places.iter().map(there).collect(), send)), receiver)
        };
        receivers.into_iter().enumerate().map(of).collect()
    }

    /// Members in these processes sum and gather. Some have no term.
    fn check(places: &[usize], device: fn() -> Arc<dyn Device>, is_whole: bool) {
        let members = places.len();
        let all = processes(places);
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..members)
                .map(|member| {
                    let own = all[places[member]].0.clone();
                    scope.spawn(move || {
                        let context = DeviceContext::new(device(), Arc::default()).unwrap();
                        own.enter(member, &context.device, 0, &Arc::default()).unwrap();
                        for number in 0..4 {
                            let has = |member: usize| number != 1 || member % 2 == 1;
                            let sum = |count: usize| {
                                let buffer = upload(&context, &values(member, count, number));
                                let terms = has(member).then(|| (member, buffer.clone())).into_iter().collect();
                                Some(Addends { dtype: DType::F32, terms, sum: buffer, is_whole })
                            };
                            let mut parts: Parts = COUNTS.iter().map(|count| sum(*count)).collect();
                            parts.insert(1, None);
                            let sums: Vec<_> = parts.iter().flatten().map(|part| part.sum.clone()).collect();
                            own.contribute(Collective::AllReduce(number), member, parts).unwrap();
                            own.wait(Collective::AllReduce(number), member).unwrap();
                            for (mut sum, count) in sums.into_iter().zip(COUNTS) {
                                let terms = (0..members).filter(|member| has(*member));
                                let mut terms = terms.map(|member| values(member, count, number));
                                let mut want = terms.next().unwrap();
                                terms.for_each(|term| want.iter_mut().zip(term).for_each(|(sum, term)| *sum += term));
                                let shard = range(count, 1, member, members);
                                let of = if is_whole { 0..count } else { shard.clone() };
                                let got = download(&context, &mut sum);
                                assert!(got[of.clone()] == want[of], "{places:?}: member {member}, {count}");
                                // Only the own shard is left; the others come back.
                                let mut shards = vec![0f32; count];
                                shards[shard.clone()].copy_from_slice(&want[shard]);
                                let mut sum = upload(&context, &shards);
                                let part = Addends { dtype: DType::F32, terms: vec![], sum: sum.clone(), is_whole };
                                let gather = Collective::AllGather(number * 10 + count as u64 % 10);
                                own.contribute(gather, member, vec![Some(part)]).unwrap();
                                own.wait(gather, member).unwrap();
                                assert!(download(&context, &mut sum) == want, "{places:?}: member {member} gathers");
                            }
                        }
                    })
                })
                .collect();
            for (own, receiver) in &all {
                scope.spawn(move || {
                    while !own.lock().is_abandoned {
                        if let Ok((to, message)) = receiver.recv_timeout(Duration::from_millis(5)) {
                            own.arrive(to, message).unwrap();
                        }
                    }
                });
            }
            workers.into_iter().for_each(|worker| worker.join().unwrap());
            all.iter().for_each(|(own, _)| own.abandon());
            all.iter().for_each(|(own, _)| assert!(own.lock().open.is_empty() && own.lock().early.is_empty()));
        });
    }

    #[test]
    fn sums_and_gathers_are_those_of_one_adder() {
        for device in [cpu, sanitizer] {
            for is_whole in [true, false] {
                check(&[0, 1], device, is_whole);
                check(&[0, 0, 1, 1], device, is_whole);
                check(&[1, 0, 1, 2, 0], device, is_whole);
            }
        }
    }

    #[test]
    fn what_is_not_expected_is_refused() {
        let message = |direction, content| ChainMessage { direction, collective: Collective::AllReduce(3), content };
        let chunk = |chunk, bytes| Content::Chunk { chunk, part: Some(Arc::new(Buffer::host(bytes))) };
        let (own, sent) = processes(&[0, 1, 0]).remove(0);
        drop(sent);
        let context = DeviceContext::new(cpu(), Arc::default()).unwrap();
        own.enter(0, &context.device, 0, &Arc::default()).unwrap();
        own.enter(2, &context.device, 0, &Arc::default()).unwrap();
        let refused = |to, message| assert_eq!(own.arrive(to, message), Err(Refused::Unexpected));
        // It is in another process, does not exist, or has not contributed.
        refused(1, message(Up, Content::Ready));
        refused(7, message(Up, Content::Ready));
        refused(2, message(Up, chunk(0, 8)));
        let sum = upload(&context, &[1.0, 2.0]);
        let part = Addends { dtype: DType::F32, terms: vec![(2, sum.clone())], sum, is_whole: true };
        own.contribute(Collective::AllReduce(3), 2, vec![Some(part)]).unwrap();
        refused(2, message(Up, chunk(1, 8)));
        refused(2, message(Up, chunk(0, 4)));
        refused(2, message(Down, chunk(0, 8)));
        assert_eq!(own.expected(2, Up, Collective::AllReduce(3), 0).map(|of| of.0), Some(8));
        assert_eq!(own.arrive(2, message(Up, Content::Ready)), Ok(()));
        refused(2, message(Up, Content::Ready));
        own.abandon();
        assert_eq!(own.wait(Collective::AllReduce(3), 2), Err(CollectiveError::PeerLost));
    }

    #[test]
    fn a_chunk_is_taken_once() {
        let (own, sent) = processes(&[1, 0]).remove(0);
        drop(sent);
        let context = DeviceContext::new(cpu(), Arc::default()).unwrap();
        own.enter(1, &context.device, 0, &Arc::default()).unwrap();
        let mut sum = upload(&context, &[1.0, 2.0]);
        let part = Addends { dtype: DType::F32, terms: vec![(1, sum.clone())], sum: sum.clone(), is_whole: true };
        let collective = Collective::AllReduce(0);
        own.contribute(collective, 1, vec![Some(part)]).unwrap();
        let chunk = || {
            let part = Some(Arc::new(Buffer::host_copy(bytemuck::cast_slice(&[0.5f32, 0.25]))));
            ChainMessage { direction: Up, collective, content: Content::Chunk { chunk: 0, part } }
        };
        assert_eq!(own.expected(1, Up, collective, 0).map(|of| of.0), Some(8));
        assert_eq!(own.arrive(1, chunk()), Ok(()));
        assert_eq!(own.expected(1, Up, collective, 0), None);
        assert_eq!(own.arrive(1, chunk()), Err(Refused::Unexpected));
        assert_eq!(own.arrive(1, ChainMessage { direction: Up, collective, content: Content::Ready }), Ok(()));
        own.wait(collective, 1).unwrap();
        assert_eq!(download(&context, &mut sum), [1.5, 2.25]);
    }
}
