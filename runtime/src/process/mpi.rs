//! Connections over MPI between the processes that `mpirun` started: for each pair a byte stream in each direction, which carries
//! the same frames as TCP.
//!
//! One thread makes every MPI call, so the thread level FUNNELED is enough, which every library supports. Writers hand it chunks
//! and readers take chunks from it. Both queues are short: when a reader is slow, the sender waits, as with TCP. An empty message
//! ends a stream.

use crate::process::connection::{LOOK, Stream};
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

/// Pieces that wait each way.
const PIECES: usize = 8;
/// The longest message.
const LONGEST: usize = 1 << 20;
/// How often nothing happens before the thread sleeps, and how long.
const IDLE: u32 = 200;
const SLEEP: Duration = Duration::from_micros(100);
/// How long the others may take to end their streams.
const FAREWELL: Duration = Duration::from_secs(3);

/// MPI, as long as the run lasts. When this is dropped, it waits a while for the others to end, too.
pub struct Carrier {
    ended: Receiver<()>,
}

/// What MPI says of this process, and its streams to the others by rank.
pub struct Opened {
    /// Which process this is.
    pub rank: usize,
    /// How many there are.
    pub processes: usize,
    /// The library's own name.
    pub library: String,
    /// A stream to each other process.
    pub streams: BTreeMap<usize, Stream>,
    /// What carries them.
    pub carrier: Carrier,
}

impl Drop for Carrier {
    fn drop(&mut self) {
        // Nobody says anything here: it ends when the thread does. Where others do not come, `mpirun` ends what is left.
        let _ = self.ended.recv_timeout(FAREWELL);
    }
}

/// Initialises MPI, which can be done once in a process.
pub fn open() -> Result<Opened, LinkError> {
    let failed = |what: &str| LinkError::Ended { process: None, what: format!("MPI does not begin: {what}") };
    let (tell, told) = bounded(1);
    let (alive, ended) = bounded::<()>(0);
    let serve = move || {
        let _alive = alive;
        let Some((universe, _)) = mpi::initialize_with_threading(Threading::Funneled) else { return };
        let world = universe.world();
        let (own, processes) = (world.rank(), world.size());
        let (peers, streams): (Vec<Peer>, _) = (0..processes).filter(|rank| *rank != own).map(Peer::new).unzip();
        if tell.send((own as usize, processes as usize, streams)).is_ok() {
            carry(&world, peers);
        }
        // The last call: it waits for the other processes.
        drop(universe);
    };
    let thread = thread::Builder::new().name("mpi".into()).spawn(serve);
    thread.map_err(|error| failed(&error.to_string()))?;
    let (rank, processes, streams): (usize, usize, Vec<(usize, Stream)>) =
        told.recv().map_err(|_| failed("it was begun before"))?;
    let library = mpi::environment::library_version().unwrap_or_default();
    let library = library.split(',').next().unwrap_or_default().trim().to_string();
    Ok(Opened { rank, processes, library, streams: streams.into_iter().collect(), carrier: Carrier { ended } })
}

/// Another process, as the thread that calls MPI sees it.
struct Peer {
    rank: Rank,
    /// What is to be sent, until its writer is gone.
    outgoing: Option<Receiver<Vec<u8>>>,
    /// Where what comes goes, until the other end is at its end.
    incoming: Option<Sender<Vec<u8>>>,
    sending: Option<Sending>,
}

/// A message on its way: its bytes stay where they are until MPI is done with them.
struct Sending {
    request: Request<'static, [u8]>,
    bytes: *mut [u8],
}

impl Sending {
    fn begin(world: &SimpleCommunicator, rank: Rank, bytes: Vec<u8>) -> Sending {
        let bytes = Box::into_raw(bytes.into_boxed_slice());
        // SAFETY: the box is given up here, and freed in `ended` when nobody reads it any more.
        let lent: &'static [u8] = unsafe { &*bytes };
        Sending { request: world.process_at_rank(rank).immediate_send(StaticScope, lent), bytes }
    }

    /// Itself, unless MPI is done with it.
    fn ended(self) -> Option<Sending> {
        let Sending { request, bytes } = self;
        match request.test() {
            Ok(_) => {
                // SAFETY: made from a box in `begin`; the request that read it has ended.
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

    /// Sends and receives what there is; says whether there was something.
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
                // Who has stopped reading needs nothing.
                false => _ = incoming.send(piece),
            }
        }
        is_busy
    }
}

/// Until all streams are at their ends.
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

/// Reads the pieces that have come from a peer.
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
            match self.from.recv_timeout(LOOK) {
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

/// Writes in pieces for a peer.
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
            match self.to.send_timeout(piece, LOOK) {
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
