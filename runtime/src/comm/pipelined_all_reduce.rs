//! All-reduce and all-gather in place between replicas of several processes, or of devices whose memory is not the host's:
//! a chain, pipelined in chunks.
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

use crate::comm::all_reduce::{Addends, AllReduce, Collective, Parts, chunk_bytes};
use crate::comm::chain::Direction::{Down, Up};
use crate::comm::chain::{ChainMessage, Chunk, Content, Direction, OpenCollective};
use crate::comm::communicator::PEER_LOST;
use crate::comm::members::{Members, encode};
use crate::device::api::Device;
use crate::device::buffer::Buffer;
use crate::device::context::DeviceContext;
use crate::device::error::DeviceError;
use crate::device::memory_counter::MemoryCounter;
use parking_lot::{Condvar, Mutex};
use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Shortest and longest interval at which a member checks whether chunks are sent.
const POLL: [Duration; 2] = [Duration::from_micros(100), Duration::from_millis(5)];

/// Number of these checks after which a neighbour is refused that answers before it can have received a chunk.
const MOST_CHECKS: u32 = 10_000;

/// Maximum number of collectives to which neighbours of this process's members have contributed before these.
const MOST_EARLY: usize = 1 << 16;

/// A member of this process: its device, with a stream for its collectives.
struct Member {
    context: DeviceContext,
    counter: Arc<MemoryCounter>,
    chunk: usize,
    /// A chunk of another device. Allocated on first use.
    staging: Option<Buffer>,
    /// The last chunk from another process. While its sum is queued, the next one arrives in other memory.
    last: Option<Arc<Buffer>>,
}

struct State {
    members: Vec<Option<Member>>,
    open: HashMap<(usize, Collective), OpenCollective>,
    /// Neighbours that have contributed before the member.
    early: HashSet<(usize, Collective, Direction)>,
    is_abandoned: bool,
}

/// Messages to members of this process.
type Local = VecDeque<(usize, ChainMessage)>;

/// Collectives of replicas, some of which may be in other processes.
pub struct PipelinedAllReduce {
    members: Members,
    state: Mutex<State>,
    changed: Condvar,
}

impl Member {
    /// Adds a part to a range of `sum`, or copies it there.
    fn reduce_chunk(
        &mut self,
        part: &Arc<Buffer>,
        addends: &Addends,
        range: Range<usize>,
        adds: bool,
    ) -> Result<(), DeviceError> {
        let Member { context, counter, chunk, staging, .. } = self;
        // SAFETY: until the end of the collective, only messages of this chunk access the range: they are received one
        // after another under a lock, and a window that was sent up is dropped before the sum comes down (see `receive`).
        // The stream acquired the buffer in `contribute`, and acquires the part below.
        let mut to = unsafe { addends.sum.region_of(range).assume_exclusive() };
        if !adds {
            return context.copy_from(part, to);
        }
        if context.device.can_access(part) {
            context.stream.acquire(part)?;
            context.stream.accumulate(addends.dtype, part.region(), to)?;
            return context.stream.release(part);
        }
        let mut copy = match staging.take() {
            Some(copy) => copy,
            None => {
                let mut copy = context.device.allocate(*chunk)?;
                copy.count_in(counter);
                copy
            }
        };
        context.copy_from(part, copy.region_mut().slice(0..part.len()))?;
        context.stream.accumulate(addends.dtype, copy.region_of(0..part.len()), to.reborrow())?;
        *staging = Some(copy);
        Ok(())
    }
}

impl PipelinedAllReduce {
    /// Members are in order of the sum.
    pub fn new(members: Members) -> PipelinedAllReduce {
        let entries = (0..members.count()).map(|_| None).collect();
        let state = State { members: entries, open: HashMap::new(), early: HashSet::new(), is_abandoned: false };
        PipelinedAllReduce { members, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// The bytes of a chunk that a member of this process expects, and the most of any chunk.
    pub fn expected(
        &self,
        to: usize,
        direction: Direction,
        collective: Collective,
        chunk: usize,
    ) -> Option<(usize, usize)> {
        let state = self.state.lock();
        let entry = state.open.get(&(to, collective))?.chunks.get(chunk)?;
        let largest = state.members.get(to)?.as_ref()?.chunk;
        let is_expected = entry.is_received(collective, direction, to, self.members.count());
        (is_expected && !entry.received[direction as usize]).then(|| (entry.range.len(), largest))
    }

    /// Handles a message from another process to a member of this one.
    pub fn arrive(&self, to: usize, message: ChainMessage) -> Result<(), DeviceError> {
        if !self.members.is_here(to) {
            return Err(PEER_LOST);
        }
        let part = match &message.content {
            Content::Chunk { chunk, part } => {
                if message.direction == Down {
                    self.wait_until_sent(to, message.collective, *chunk)?;
                }
                part.clone()
            }
            Content::Ready => None,
        };
        let mut state = self.state.lock();
        self.deliver(&mut state, Local::from([(to, message)]))?;
        if let Some(Some(member)) = state.members.get_mut(to).filter(|_| part.is_some()) {
            member.last = part;
        }
        Ok(())
    }

    /// Waits until the thread that sent a chunk up has dropped it. A neighbour that answers has received it, so this takes
    /// no time, unless the answer is false.
    fn wait_until_sent(&self, to: usize, collective: Collective, chunk: usize) -> Result<(), DeviceError> {
        for _ in 0..MOST_CHECKS {
            let state = self.state.lock();
            let entry = state.open.get(&(to, collective)).and_then(|open| open.chunks.get(chunk));
            let window = entry.and_then(|entry| entry.sent_up.as_ref());
            if state.is_abandoned || window.is_none_or(|window| Arc::strong_count(window) == 1) {
                return Ok(());
            }
            drop(state);
            std::thread::sleep(POLL[0]);
        }
        Err(PEER_LOST)
    }

    /// Handles messages to members of this process, and those that they cause.
    fn deliver(&self, state: &mut State, mut local: Local) -> Result<(), DeviceError> {
        while let Some((to, ChainMessage { direction, collective, content })) = local.pop_front() {
            match content {
                Content::Ready => {
                    // What comes from below goes back down.
                    let opposite = direction.opposite();
                    let is_new = match state.open.get_mut(&(to, collective)) {
                        Some(open) => {
                            open.remaining -= usize::from(!open.ready[opposite as usize]);
                            !std::mem::replace(&mut open.ready[opposite as usize], true)
                        }
                        None => state.early.len() < MOST_EARLY && state.early.insert((to, collective, opposite)),
                    };
                    if !is_new {
                        return Err(PEER_LOST);
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
    ) -> Result<(), DeviceError> {
        let members = self.members.count();
        let member = state.members.get_mut(to).and_then(Option::as_mut).ok_or(PEER_LOST)?;
        let open = state.open.get_mut(&(to, collective)).ok_or(PEER_LOST)?;
        let addends = open.chunks.get(chunk).and_then(|entry| open.parts[entry.index].as_ref()).ok_or(PEER_LOST)?;
        let entry = &mut open.chunks[chunk];
        let is_sum = matches!(collective, Collective::AllReduce(_));
        // A sum goes back after the member's term went up, which it contains.
        let is_early = is_sum && direction == Down && entry.sent_up.is_none();
        let is_missing = part.is_none() && (entry.has_sum && direction == Down || !is_sum);
        if !entry.is_received(collective, direction, to, members)
            || part.is_some_and(|part| part.len() != entry.range.len())
            || is_early
            || is_missing
            || std::mem::replace(&mut entry.received[direction as usize], true)
        {
            return Err(PEER_LOST);
        }
        // See `wait_until_sent`: no other thread reads the range.
        if direction == Down
            && let Some(mut window) = entry.sent_up.take()
            && Arc::get_mut(&mut window).is_none()
        {
            return Err(PEER_LOST);
        }
        if let Some(part) = part {
            member.reduce_chunk(part, addends, entry.range.clone(), is_sum && direction == Up && entry.has_sum)?;
            entry.has_sum = true;
        }
        open.remaining -= 1;
        let is_turning = is_sum && direction == Up && to + 1 == members;
        let next_direction = if is_turning { Down } else { direction };
        if entry.is_sent(collective, next_direction, to, members) {
            open.waiting[next_direction as usize].push_back(chunk);
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
        let (Some(member), Some(open)) = (&members[from], open.get_mut(&(from, collective))) else { return Ok(()) };
        for direction in [Up, Down] {
            while open.ready[direction as usize]
                && let Some(chunk) = open.waiting[direction as usize].pop_front()
            {
                let mut part = None;
                if let Some(addends) =
                    open.parts[open.chunks[chunk].index].as_ref().filter(|_| open.chunks[chunk].has_sum)
                {
                    // Readers wait for this chunk alone: the transfers of others may wait for readers.
                    let window = Buffer::window(addends.sum.clone(), open.chunks[chunk].range.clone());
                    member.context.stream.release(&window)?;
                    part = Some(Arc::new(window));
                }
                // Without a term, an empty buffer remembers that the chunk went up.
                let window = part.clone().unwrap_or_else(|| Arc::new(Buffer::empty()));
                match (direction, collective) {
                    (Up, Collective::AllReduce(_)) => open.chunks[chunk].sent_up = Some(window),
                    _ => open.sent.push(window),
                }
                open.remaining -= 1;
                let content = Content::Chunk { chunk, part };
                self.post(from, ChainMessage { direction, collective, content }, local);
            }
        }
        if open.remaining == 0 {
            let sums = open.parts.iter().flatten().map(|addends| &addends.sum);
            sums.into_iter().try_for_each(|sum| member.context.stream.release(sum))?;
            // The sums of these chunks are for members above, and do not come down.
            let windows: Vec<Arc<Buffer>> = open.chunks.iter_mut().filter_map(|chunk| chunk.sent_up.take()).collect();
            open.sent.extend(windows);
        }
        Ok(())
    }

    /// Sends a message to the neighbour of a member.
    fn post(&self, from: usize, message: ChainMessage, local: &mut Local) {
        let Some(to) = message.direction.neighbour(from, self.members.count()) else { return };
        let Some(process) = self.members.process(to) else { return local.push_back((to, message)) };
        let head = encode(&message.head());
        let Content::Chunk { part: Some(part), .. } = message.content else {
            return self.members.send(process, from, &head, Vec::new());
        };
        self.members.send(process, from, &head, vec![part]);
    }
}

impl AllReduce for PipelinedAllReduce {
    fn enter(
        &self,
        member: usize,
        device: &Arc<dyn Device>,
        bytes: usize,
        counter: &Arc<MemoryCounter>,
    ) -> Result<(), DeviceError> {
        let context = DeviceContext::new(device.clone(), Arc::default())?;
        let entry = Member { context, counter: counter.clone(), chunk: chunk_bytes(bytes), staging: None, last: None };
        if let Some(slot) = self.state.lock().members.get_mut(member) {
            *slot = Some(entry);
        }
        Ok(())
    }

    fn contribute(&self, collective: Collective, member: usize, parts: Parts) -> Result<(), DeviceError> {
        let mut state = self.state.lock();
        let members = self.members.count();
        let Some(Some(entry)) = state.members.get(member) else { return Ok(()) };
        parts.iter().flatten().try_for_each(|part| entry.context.stream.acquire(&part.sum))?;
        let mut open = OpenCollective::new(collective, parts, entry.chunk, member, members);
        let mut local = Local::new();
        for direction in [Up, Down] {
            open.ready[direction as usize] = state.early.remove(&(member, collective, direction));
            open.remaining -= usize::from(open.ready[direction as usize]);
            self.post(member, ChainMessage { direction, collective, content: Content::Ready }, &mut local);
            let starts = |chunk: &Chunk| {
                let is_source = match collective {
                    Collective::AllReduce(_) => member == 0 && direction == Up,
                    Collective::AllGather(_) => chunk.owner == Some(member),
                };
                is_source && chunk.is_sent(collective, direction, member, members)
            };
            let first = open.chunks.iter().enumerate().filter(|(_, chunk)| starts(chunk)).map(|(at, _)| at);
            open.waiting[direction as usize] = first.collect();
        }
        state.open.insert((member, collective), open);
        self.forward(&mut state, member, collective, &mut local)?;
        self.deliver(&mut state, local)
    }

    fn wait(&self, collective: Collective, member: usize) -> Result<(), DeviceError> {
        let (mut state, mut poll) = (self.state.lock(), POLL[0]);
        loop {
            let State { members, open, is_abandoned, .. } = &mut *state;
            let collective_state = open.get_mut(&(member, collective)).filter(|_| !*is_abandoned).ok_or(PEER_LOST)?;
            if collective_state.remaining > 0 {
                self.changed.wait(&mut state);
            } else if collective_state.drop_sent() {
                open.remove(&(member, collective));
                members[member].iter_mut().for_each(|entry| entry.last = None);
                return Ok(());
            } else {
                _ = self.changed.wait_for(&mut state, poll);
                poll = (poll * 2).min(POLL[1]);
            }
        }
    }

    fn abandon(&self) {
        self.state.lock().is_abandoned = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::all_reduce::tests::{check, download, upload};
    use crate::comm::members::Link;
    use crate::device::cpu::device::cpu;
    use crate::device::sanitizer::device::sanitizer;
    use compiler::tensor::DType;
    use crossbeam_channel::{Receiver, Sender, unbounded};

    /// A message to a member of another process.
    type Sent = (usize, ChainMessage);

    /// The all-reduces of all processes, with the messages to each.
    fn processes(process_of: &[usize]) -> Vec<(Arc<PipelinedAllReduce>, Receiver<Sent>)> {
        let count = process_of.iter().max().unwrap() + 1;
        let (senders, receivers): (Vec<Sender<Sent>>, Vec<_>) = (0..count).map(|_| unbounded()).unzip();
        let all_reduce = |(process, receiver)| {
            let (senders, members) = (senders.clone(), process_of.len());
            let link: Link = Box::new(move |process: usize, from, content: &[u8], tensors: Vec<Arc<Buffer>>| {
                let message = ChainMessage::of(postcard::from_bytes(content).unwrap(), tensors.into_iter().next());
                let to = message.direction.neighbour(from, members).unwrap();
                let _ = senders[process].send((to, message));
            });
            let remote = |other: &usize| (*other != process).then_some(*other);
            let members = Members::new(process_of.iter().map(remote).collect(), link);
            (Arc::new(PipelinedAllReduce::new(members)), receiver)
        };
        receivers.into_iter().enumerate().map(all_reduce).collect()
    }

    /// Members in these processes sum and gather.
    fn check_processes(process_of: &[usize], device: fn() -> Arc<dyn Device>, is_whole: bool) {
        let all_reduces = processes(process_of);
        std::thread::scope(|scope| {
            for (all_reduce, receiver) in &all_reduces {
                scope.spawn(move || {
                    while !all_reduce.state.lock().is_abandoned {
                        let Ok((to, mut message)) = receiver.recv_timeout(Duration::from_millis(5)) else { continue };
                        // The sender's window is dropped before the answer, but not before the collective may be done.
                        if let Content::Chunk { part: Some(part), .. } = &mut message.content {
                            *part = Arc::new(Buffer::host_copy(&part.download().unwrap()));
                        }
                        all_reduce.arrive(to, message).unwrap();
                    }
                });
            }
            let of_member = |process: &usize| all_reduces[*process].0.clone() as Arc<dyn AllReduce>;
            check(&process_of.iter().map(of_member).collect::<Vec<_>>(), &[device()], is_whole);
            all_reduces.iter().for_each(|(all_reduce, _)| all_reduce.abandon());
            all_reduces.iter().for_each(|(all_reduce, _)| {
                assert!(all_reduce.state.lock().open.is_empty() && all_reduce.state.lock().early.is_empty())
            });
        });
    }

    #[test]
    fn sums_and_gathers_are_those_of_one_adder() {
        for device in [cpu, sanitizer] {
            for is_whole in [true, false] {
                check_processes(&[0, 1], device, is_whole);
                check_processes(&[0, 0, 1, 1], device, is_whole);
                check_processes(&[1, 0, 1, 2, 0], device, is_whole);
            }
        }
    }

    #[test]
    fn what_is_not_expected_is_refused() {
        let collective = Collective::AllReduce(3);
        let message = |direction, content| ChainMessage { direction, collective, content };
        let chunk = |chunk, values: &[f32]| Content::Chunk {
            chunk,
            part: Some(Arc::new(Buffer::host_copy(bytemuck::cast_slice(values)))),
        };
        let (all_reduce, sent) = processes(&[0, 1, 0]).remove(0);
        drop(sent);
        let context = DeviceContext::new(cpu(), Arc::default()).unwrap();
        all_reduce.enter(0, &context.device, 0, &Arc::default()).unwrap();
        all_reduce.enter(2, &context.device, 0, &Arc::default()).unwrap();
        let expected = || all_reduce.expected(2, Up, collective, 0).map(|(bytes, _)| bytes);
        let refused = |to, message| assert_eq!(all_reduce.arrive(to, message), Err(PEER_LOST));
        // It is in another process, does not exist, or has not contributed.
        refused(1, message(Up, Content::Ready));
        refused(7, message(Up, Content::Ready));
        refused(2, message(Up, chunk(0, &[0.5, 0.25])));
        let mut sum = upload(&context, &[1.0, 2.0]);
        let part = || vec![Some(Addends { dtype: DType::F32, sum: sum.clone(), has_term: true, is_whole: true })];
        all_reduce.contribute(collective, 2, part()).unwrap();
        refused(2, message(Up, chunk(1, &[0.5, 0.25])));
        refused(2, message(Up, chunk(0, &[0.5])));
        refused(2, message(Down, chunk(0, &[0.5, 0.25])));
        assert_eq!(expected(), Some(8));
        assert_eq!(all_reduce.arrive(2, message(Up, chunk(0, &[0.5, 0.25]))), Ok(()));
        // It is taken once.
        assert_eq!(expected(), None);
        refused(2, message(Up, chunk(0, &[0.5, 0.25])));
        assert_eq!(all_reduce.arrive(2, message(Up, Content::Ready)), Ok(()));
        refused(2, message(Up, Content::Ready));
        all_reduce.wait(collective, 2).unwrap();
        all_reduce.contribute(Collective::AllReduce(4), 2, part()).unwrap();
        all_reduce.abandon();
        assert_eq!(all_reduce.wait(Collective::AllReduce(4), 2), Err(PEER_LOST));
        drop(all_reduce);
        assert_eq!(download(&context, &mut sum), [1.5, 2.25]);
    }
}
