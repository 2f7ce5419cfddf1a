//! Connections over MPI between the processes started by `mpirun`: a byte stream per direction and pair, with the same
//! frames as TCP.
//!
//! One thread makes every MPI call, so thread level FUNNELED suffices, which every library supports. Writers hand it
//! chunks and readers take chunks from it. Both queues are short: a slow reader blocks the sender, as with TCP. An
//! empty message ends a stream.

use crate::process::connection::{POLL_INTERVAL, Stream};
use crate::process::run_status::LinkError;
use crossbeam_channel::{Receiver, RecvTimeoutError, SendTimeoutError, Sender, TryRecvError, bounded};
use mpi::point_to_point::MatchedReceiveVec;
use mpi::request::{Request, StaticScope};
use mpi::topology::{Communicator, SimpleCommunicator};
use mpi::traits::{Destination, Source};
use mpi::{Rank, Threading};
use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// Chunks queued per direction.
const PIECES: usize = 8;
/// Maximum message, in bytes.
const LONGEST: usize = 1 << 20;
/// Idle polls before the thread sleeps, and the sleep time.
const IDLE: u32 = 200;
const SLEEP: Duration = Duration::from_micros(100);
/// Maximum wait for the other processes to end their streams.
const END_TIME: Duration = Duration::from_secs(3);

/// Keeps MPI running. Dropping it waits up to [`END_TIME`] for the other processes to end too.
pub struct Carrier {
    ended: Receiver<()>,
}

/// An initialised MPI: this process's rank and its streams to the others.
pub struct Opened {
    pub rank: usize,
    pub processes: usize,
    pub library: String,
    pub streams: BTreeMap<usize, Stream>,
    /// Must outlive the streams.
    pub carrier: Carrier,
}

impl Drop for Carrier {
    fn drop(&mut self) {
        // Nothing is ever sent here: the wait ends with the thread. If peers are missing, `mpirun` ends the remaining
        // processes.
        let _ = self.ended.recv_timeout(END_TIME);
    }
}

/// Initialises MPI, which is possible only once per process.
pub fn open() -> Result<Opened, LinkError> {
    let failed = |what: &str| LinkError::Ended { process: None, what: format!("cannot start MPI: {what}") };
    let (init_sender, init_result) = bounded(1);
    let (alive, ended) = bounded::<()>(0);
    let serve = move || {
        let _alive = alive;
        let Some((universe, _)) = mpi::initialize_with_threading(Threading::Funneled) else { return };
        let world = universe.world();
        let (rank_here, processes) = (world.rank(), world.size());
        let (peers, streams): (Vec<Peer>, _) = (0..processes).filter(|rank| *rank != rank_here).map(Peer::new).unzip();
        if init_sender.send((rank_here as usize, processes as usize, streams)).is_ok() {
            carry(&world, peers);
        }
        // Finalises MPI, which waits for the other processes.
        drop(universe);
    };
    let thread = thread::Builder::new().name("mpi".into()).spawn(serve);
    thread.map_err(|error| failed(&error.to_string()))?;
    let (rank, processes, streams): (usize, usize, Vec<(usize, Stream)>) =
        init_result.recv().map_err(|_| failed("it is already started"))?;
    let library = mpi::environment::library_version().unwrap_or_default();
    let library = library.split(',').next().unwrap_or_default().trim().to_string();
    Ok(Opened { rank, processes, library, streams: streams.into_iter().collect(), carrier: Carrier { ended } })
}

/// The MPI thread's state for another process.
struct Peer {
    rank: Rank,
    /// Chunks to send; `None` once the writer is dropped.
    outgoing: Option<Receiver<Vec<u8>>>,
    /// Receiver of arriving chunks; `None` once the peer has ended its stream.
    incoming: Option<Sender<Vec<u8>>>,
    sending: Option<Sending>,
}

/// A pending send. Its buffer must stay valid until MPI has completed it.
struct Sending {
    request: Request<'static, [u8]>,
    bytes: *mut [u8],
}

impl Sending {
    fn begin(world: &SimpleCommunicator, rank: Rank, bytes: Vec<u8>) -> Sending {
        let bytes = Box::into_raw(bytes.into_boxed_slice());
        // SAFETY: the box is leaked here and freed in `ended` once MPI has finished reading it.
        let lent: &'static [u8] = unsafe { &*bytes };
        Sending { request: world.process_at_rank(rank).immediate_send(StaticScope, lent), bytes }
    }

    /// Returns itself unless the send is complete.
    fn ended(self) -> Option<Sending> {
        let Sending { request, bytes } = self;
        match request.test() {
            Ok(_) => {
                // SAFETY: made from a box in `begin`; the request that read it has completed.
                drop(unsafe { Box::from_raw(bytes) });
                None
            }
            Err(request) => Some(Sending { request, bytes }),
        }
    }
}

impl Peer {
    fn new(rank: Rank) -> (Peer, (usize, Stream)) {
        let ((to_mpi, outgoing), (incoming, from_mpi)) = (bounded(PIECES), bounded(PIECES));
        let is_closed = Arc::new(AtomicBool::new(false));
        let reader = Pieces { from: from_mpi, piece: Vec::new(), at: 0, is_closed: is_closed.clone() };
        let writer = Piecewise { to: to_mpi, is_closed: is_closed.clone() };
        let hangup = Box::new(move || is_closed.store(true, Ordering::Relaxed));
        let stream = Stream { reader: Box::new(reader), writer: Box::new(writer), hangup };
        let peer = Peer { rank, outgoing: Some(outgoing), incoming: Some(incoming), sending: None };
        (peer, (rank as usize, stream))
    }

    fn is_over(&self) -> bool {
        self.outgoing.is_none() && self.sending.is_none() && self.incoming.is_none()
    }

    /// Sends and receives available chunks. Returns true if there were any.
    fn serve(&mut self, world: &SimpleCommunicator) -> bool {
        let mut is_busy = false;
        self.sending = self.sending.take().and_then(Sending::ended);
        if let (None, Some(outgoing)) = (&self.sending, &self.outgoing) {
            let next = match outgoing.try_recv() {
                Ok(piece) => Some(piece),
                Err(TryRecvError::Empty) => None,
                Err(TryRecvError::Disconnected) => {
                    self.outgoing = None;
                    Some(Vec::new())
                }
            };
            self.sending = next.map(|piece| Sending::begin(world, self.rank, piece));
            is_busy |= self.sending.is_some();
        }
        while let Some(incoming) = self.incoming.as_ref().filter(|incoming| !incoming.is_full())
            && let Some(matched) = world.process_at_rank(self.rank).immediate_matched_probe()
        {
            is_busy = true;
            let (piece, _) = matched.matched_receive_vec::<u8>();
            match piece.is_empty() {
                true => self.incoming = None,
                // The reader may be gone.
                false => _ = incoming.send(piece),
            }
        }
        is_busy
    }
}

/// Serves all peers until all streams have ended.
fn carry(world: &SimpleCommunicator, mut peers: Vec<Peer>) {
    let mut idle = 0;
    while !peers.iter().all(Peer::is_over) {
        let is_busy = peers.iter_mut().fold(false, |is_busy, peer| peer.serve(world) | is_busy);
        idle = if is_busy { 0 } else { idle + 1 };
        match idle {
            0 => {}
            1..IDLE => thread::yield_now(),
            _ => thread::sleep(SLEEP),
        }
    }
}

/// Reads chunks from a peer.
struct Pieces {
    from: Receiver<Vec<u8>>,
    piece: Vec<u8>,
    at: usize,
    is_closed: Arc<AtomicBool>,
}

impl Read for Pieces {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        if self.at == self.piece.len() {
            if self.is_closed.load(Ordering::Relaxed) {
                return Ok(0);
            }
            match self.from.recv_timeout(POLL_INTERVAL) {
                Ok(piece) => (self.piece, self.at) = (piece, 0),
                Err(RecvTimeoutError::Timeout) => return Err(ErrorKind::WouldBlock.into()),
                Err(RecvTimeoutError::Disconnected) => return Ok(0),
            }
        }
        let count = bytes.len().min(self.piece.len() - self.at);
        bytes[..count].copy_from_slice(&self.piece[self.at..self.at + count]);
        self.at += count;
        Ok(count)
    }
}

/// Writes chunks to a peer.
struct Piecewise {
    to: Sender<Vec<u8>>,
    is_closed: Arc<AtomicBool>,
}

impl Write for Piecewise {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = bytes.len().min(LONGEST);
        if count == 0 {
            return Ok(0);
        }
        let mut piece = bytes[..count].to_vec();
        loop {
            if self.is_closed.load(Ordering::Relaxed) {
                return Err(ErrorKind::BrokenPipe.into());
            }
            match self.to.send_timeout(piece, POLL_INTERVAL) {
                Ok(()) => return Ok(count),
                Err(SendTimeoutError::Timeout(back)) => piece = back,
                Err(SendTimeoutError::Disconnected(_)) => return Err(ErrorKind::BrokenPipe.into()),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
