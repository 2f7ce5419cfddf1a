//! Forms the process group of a run: how its processes find and connect to each other.
//!
//! Process 0 waits for all others, which send a hello with their listening address. Then each learns the addresses of
//! the others. The higher-numbered of two communicating processes connects. When all connections exist, process 0
//! starts the run.

use crate::process::connection;
use crate::process::connection::{DeadlineReader, OVER, SILENT, Stream};
use crate::process::frame::{FrameError, FrameReader, FrameWriter, Kind};
use crate::process::handshake::{
    HandshakeConnection, Hello, Identity, Known, PROTOCOL, RejectReason, decode_roster, encode_roster,
};
use crate::process::placement::WorkerPlacement;
use crate::process::run_status::{LinkError, RunStatus};
use compiler::schedule::{Program, WorkerId};
use crossbeam_channel::{Sender, unbounded};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Maximum time from connection to hello.
const GREETING: Duration = Duration::from_secs(5);
/// Maximum concurrent handshakes. When exceeded, the oldest is closed: a process of the run sends its hello at once.
const MOST_GREETINGS: usize = 64;
/// Interval between connection attempts.
const AGAIN: Duration = Duration::from_millis(50);
/// Timeout of one connection attempt.
const ATTEMPT: Duration = Duration::from_secs(1);
/// Polling interval for new connections.
const LOOK: Duration = Duration::from_millis(5);
/// Delay before missing processes are reported.
const SOON: Duration = Duration::from_secs(1);
/// Maximum number of processes named in that report.
const LISTED: usize = 8;

/// The configuration of one process.
#[derive(Clone, Debug)]
pub struct ProcessConfig {
    /// This process's number.
    pub own: usize,
    pub placement: WorkerPlacement,
    /// Inputs that must be equal in all processes.
    pub identity: Identity,
    /// Address of process 0.
    pub first: String,
    /// Listening address; `None` uses any free port.
    pub listen: Option<String>,
    /// Maximum time to wait for the other processes.
    pub patience: Duration,
    /// Maximum silence of a process during the run.
    pub deadline: Duration,
    /// True if tensors go over NCCL, which every process must then support; else through the host.
    pub nccl: bool,
    /// True if process 0 started this process. The process then ends with process 0, whose silence may only mean that
    /// it is suspended.
    pub follows: bool,
}

/// Current instruction of every worker.
pub type Progress = Arc<Vec<AtomicU32>>;

/// A connected process group, as seen by one process.
pub struct Group {
    pub part: ProcessConfig,
    pub run_status: Arc<RunStatus>,
    /// Last known progress of all workers.
    pub progress: Progress,
    /// Display names, by process.
    pub names: Vec<String>,
    pub talks: BTreeMap<usize, HandshakeConnection>,
    /// The pairs of processes that exchange tensors.
    pub lines: BTreeSet<(usize, usize)>,
    /// Keeps the transport alive.
    pub carrier: Option<Box<dyn Send>>,
}

/// The connection method of a process.
pub enum JoinMode {
    /// Process 0: listens on this port.
    Port(TcpListener),
    /// Other processes: connect to process 0.
    Outside,
    /// All processes are already connected, for as long as the carrier exists (MPI).
    Open(BTreeMap<usize, Stream>, Box<dyn Send>),
}

/// Opens a listening port.
pub fn listen(address: &str) -> Result<TcpListener, LinkError> {
    if let Err(error) = address.to_socket_addrs() {
        return Err(LinkError::Address { address: address.to_string(), why: error.to_string() });
    }
    TcpListener::bind(address).map_err(|error| {
        let why = match error.kind() {
            ErrorKind::AddrInUse => "the port is in use by another program or run".to_string(),
            ErrorKind::AddrNotAvailable => "this machine does not have this address".to_string(),
            _ => error.to_string(),
        };
        LinkError::Listen { address: address.to_string(), why }
    })
}

/// Progress messages while the group forms.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The processes still missing, after [`SOON`].
    Waits(String),
    /// A connection that is not part of the run was refused.
    SentAway(String),
}

/// Joins the process group of a run. `lines` lists the pairs that need a connection. `notice` receives messages that do
/// not end the run.
pub fn join(
    program: &Program,
    lines: &BTreeSet<(usize, usize)>,
    part: ProcessConfig,
    door: JoinMode,
    run_status: Arc<RunStatus>,
    notice: &dyn Fn(Notice),
) -> Result<Group, LinkError> {
    let until = Instant::now() + part.patience;
    let all = (0..part.placement.processes).map(|process| part.placement.name(program, process)).collect();
    let mut entrance = Joiner { part: &part, run_status: &run_status, notice, until, names: all };
    let ((talks, roster), carrier) = match door {
        JoinMode::Port(port) => (entrance.open(&port)?, None),
        JoinMode::Outside => (entrance.enter(lines)?, None),
        JoinMode::Open(streams, carrier) => (entrance.stand(streams, lines)?, Some(carrier)),
    };
    let named = |(name, known): (&String, &Known)| format!("{name}, process {} at {}", known.pid, known.address);
    let names = entrance.names.iter().zip(&roster).map(named).collect();
    let progress = Arc::new(program.workers.iter().map(|_| AtomicU32::new(0)).collect());
    Ok(Group { part, run_status, progress, names, talks, lines: lines.clone(), carrier })
}

impl Group {
    /// True if the worker runs in this process.
    pub fn is_here(&self, worker: usize) -> bool {
        self.part.placement.of.get(worker) == Some(&self.part.own)
    }
}

/// Last known instruction of the first worker of a process.
pub fn doing(program: &Program, placement: &WorkerPlacement, progress: &[AtomicU32], process: usize) -> Option<String> {
    let worker = placement.workers(process).next()?;
    let at = progress.get(worker)?.load(Ordering::Relaxed) as usize;
    let instruction = program.workers.get(WorkerId(worker as u32).index())?.instructions.get(at)?;
    Some(program.show(instruction))
}

type Talks = BTreeMap<usize, HandshakeConnection>;
type Come = BTreeMap<usize, (HandshakeConnection, Hello)>;

/// The result of a handshake step: done, refused with a reason, or a connection error.
type Said = Result<Result<(), String>, FrameError>;

/// A process joining the run.
struct Joiner<'a> {
    part: &'a ProcessConfig,
    run_status: &'a Arc<RunStatus>,
    notice: &'a dyn Fn(Notice),
    until: Instant,
    names: Vec<String>,
}

impl Joiner<'_> {
    fn hello(&self, address: String) -> Hello {
        Hello {
            protocol: PROTOCOL,
            process: self.part.own as u32,
            processes: self.part.placement.processes as u32,
            pid: std::process::id(),
            address,
            identity: self.part.identity.clone(),
        }
    }

    /// Process 0: accepts all others and starts the run once they are connected.
    fn open(&mut self, port: &TcpListener) -> Result<(Talks, Vec<Known>), LinkError> {
        let address = port.local_addr().map_or_else(|_| self.part.first.clone(), |address| address.to_string());
        let own = self.hello(address);
        let awaited = (1..self.part.placement.processes).collect();
        let come = self.gather(port, awaited, &own)?;
        self.begin(come, own)
    }

    /// Process 0: sends the roster to all processes and starts them once they are connected.
    fn begin(&self, come: Come, own: Hello) -> Result<(Talks, Vec<Known>), LinkError> {
        let address = own.address;
        let mut roster = vec![Known { pid: own.pid, address }];
        roster.extend(come.values().map(|(_, hello)| Known { pid: hello.pid, address: hello.address.clone() }));
        let mut talks: Talks = come.into_iter().map(|(process, (talk, _))| (process, talk)).collect();
        let content = encode_roster(&roster);
        let started = self.each(&mut talks, &|talk| talk.say(Kind::Roster, &content).map(Ok));
        let started = started.and_then(|()| self.each(&mut talks, &|talk| Ok(talk.expect(Kind::Ready)?.map(drop))));
        let started = started.and_then(|()| self.each(&mut talks, &|talk| talk.say(Kind::Start, &[]).map(Ok)));
        if let Err(error) = started {
            let why = error.to_string();
            talks.values_mut().for_each(|talk| talk.refuse(&why));
            return Err(error);
        }
        Ok((talks, roster))
    }

    fn each(&self, talks: &mut Talks, step: &dyn Fn(&mut HandshakeConnection) -> Said) -> Result<(), LinkError> {
        for (&process, talk) in talks {
            let peer = self.names[process].clone();
            match step(talk) {
                Ok(Ok(())) => {}
                Ok(Err(what)) => return Err(LinkError::Failed { process, peer, what }),
                Err(fault) => {
                    let lost = LinkError::Lost { process, peer, doing: None, fault };
                    return Err(self.run_status.cause().unwrap_or(lost));
                }
            }
        }
        Ok(())
    }

    /// Other processes: connect to process 0 and to their lower-numbered peers, and accept the higher-numbered ones.
    fn enter(&mut self, lines: &BTreeSet<(usize, usize)>) -> Result<(Talks, Vec<Known>), LinkError> {
        let own = self.part.own;
        let first = self.part.first.clone();
        let stream = self.reach(&first)?;
        let here = stream.local_addr().map_err(|error| self.unreachable(&first, &error.to_string()))?;
        let port = match &self.part.listen {
            Some(address) => listen(address)?,
            None => listen(&SocketAddr::new(here.ip(), 0).to_string())?,
        };
        let address = match (&self.part.listen, port.local_addr()) {
            (Some(address), _) => address.clone(),
            (None, Ok(address)) => address.to_string(),
            (None, Err(error)) => return Err(LinkError::Listen { address: here.to_string(), why: error.to_string() }),
        };
        let hello = self.hello(address);
        let mut talk = self.introduce(self.tcp(stream, &first)?, &first, &hello)?;
        let roster = self.roster(&mut talk, &first)?;
        let mut talks = Talks::new();
        for &(lower, _) in lines.iter().filter(|(lower, higher)| *lower > 0 && *higher == own) {
            let address = roster[lower].address.clone();
            let stream = self.tcp(self.reach(&address)?, &address)?;
            talks.insert(lower, self.introduce(stream, &address, &hello)?);
        }
        let awaited = lines.iter().filter(|(lower, _)| *lower == own).map(|(_, higher)| *higher).collect();
        let come = self.gather(&port, awaited, &hello)?;
        talks.extend(come.into_iter().map(|(process, (talk, _))| (process, talk)));
        self.start(&mut talk, &first)?;
        talks.insert(0, talk);
        Ok((talks, roster))
    }

    /// All connected (MPI): every process greets the lower-numbered ones and accepts the higher-numbered ones.
    fn stand(
        &mut self,
        mut streams: BTreeMap<usize, Stream>,
        lines: &BTreeSet<(usize, usize)>,
    ) -> Result<(Talks, Vec<Known>), LinkError> {
        let own = self.part.own;
        let hello = self.hello(format!("rank {own}"));
        let mut take = |process: usize| {
            let what = || LinkError::Bug { what: format!("no stream to process {process} of the run") };
            streams.remove(&process).ok_or_else(what)
        };
        let behind: Vec<usize> = match own {
            0 => (1..self.part.placement.processes).collect(),
            _ => lines.iter().filter(|(lower, _)| *lower == own).map(|(_, higher)| *higher).collect(),
        };
        if own == 0 {
            let come = behind.into_iter().map(|process| Ok((process, self.hear(process, take(process)?, &hello)?)));
            return self.begin(come.collect::<Result<_, LinkError>>()?, hello);
        }
        let rank = |process: usize| format!("rank {process}");
        let mut talk = self.introduce(take(0)?, &rank(0), &hello)?;
        let roster = self.roster(&mut talk, &rank(0))?;
        let mut talks = Talks::new();
        for &(lower, _) in lines.iter().filter(|(lower, higher)| *lower > 0 && *higher == own) {
            talks.insert(lower, self.introduce(take(lower)?, &rank(lower), &hello)?);
        }
        for process in behind {
            talks.insert(process, self.hear(process, take(process)?, &hello)?.0);
        }
        self.start(&mut talk, &rank(0))?;
        talks.insert(0, talk);
        Ok((talks, roster))
    }

    /// Reads the hello of a peer and welcomes it.
    fn hear(&self, process: usize, stream: Stream, own: &Hello) -> Result<(HandshakeConnection, Hello), LinkError> {
        let lost = |fault| {
            let peer = self.names[process].clone();
            self.ended(LinkError::Lost { process, peer, doing: None, fault })
        };
        let mut talk = talk(stream, self.left(), self.run_status.clone());
        let content = talk.expect(Kind::Hello).map_err(lost)?;
        let content = content.map_err(|what| LinkError::Failed { process, peer: self.names[process].clone(), what })?;
        let hello = Hello::decode(&content).map_err(lost)?;
        let met = match hello.meets(own) {
            Ok(()) if hello.process as usize != process => Err(format!("it claims to be process {}", hello.process)),
            Ok(()) => Ok(()),
            Err(RejectReason::Passing(why) | RejectReason::Fatal(why)) => Err(why),
        };
        if let Err(what) = met {
            talk.refuse(&what);
            return Err(LinkError::Another { peer: format!("process {} at {}", hello.pid, hello.address), what });
        }
        talk.say(Kind::Welcome, &[]).map_err(lost)?;
        Ok((talk, hello))
    }

    fn roster(&self, talk: &mut HandshakeConnection, first: &str) -> Result<Vec<Known>, LinkError> {
        let foreign = |fault| LinkError::Foreign { address: first.to_string(), fault };
        let refused = |why| LinkError::Refused { address: first.to_string(), why };
        let content = talk.expect(Kind::Roster).map_err(|fault| self.ended(foreign(fault)))?.map_err(refused)?;
        decode_roster(&content, self.part.placement.processes).map_err(foreign)
    }

    /// Reports ready to process 0 and waits for the start.
    fn start(&self, talk: &mut HandshakeConnection, first: &str) -> Result<(), LinkError> {
        let foreign = |fault| LinkError::Foreign { address: first.to_string(), fault };
        let refused = |why| LinkError::Refused { address: first.to_string(), why };
        talk.say(Kind::Ready, &[]).map_err(foreign)?;
        talk.expect(Kind::Start).map_err(|fault| self.ended(foreign(fault)))?.map_err(refused).map(drop)
    }

    fn tcp(&self, stream: TcpStream, address: &str) -> Result<Stream, LinkError> {
        Stream::tcp(stream).map_err(|error| self.unreachable(address, &error.to_string()))
    }

    /// The cause of the run's end if known, else `error`.
    fn ended(&self, error: LinkError) -> LinkError {
        self.run_status.cause().unwrap_or(error)
    }

    fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }

    fn unreachable(&self, address: &str, why: &str) -> LinkError {
        let (address, seconds) = (address.to_string(), self.part.patience.as_secs_f64());
        LinkError::Unreachable { address, seconds, why: why.to_string() }
    }

    /// After [`SOON`], reports once which processes are missing.
    fn wait(&self, began: Instant, is_reported: &mut bool, whom: impl FnOnce() -> String) {
        let (waited, left) = (began.elapsed(), self.left());
        if *is_reported || waited < SOON || left.is_zero() {
            return;
        }
        *is_reported = true;
        (self.notice)(Notice::Waits(format!("waits for {}, up to {:.0} s more", whom(), left.as_secs_f64().ceil())));
    }

    /// Connects to a process, retrying while it does not listen yet.
    fn reach(&self, address: &str) -> Result<TcpStream, LinkError> {
        let mut why = "no time is left".to_string();
        let (began, mut is_reported) = (Instant::now(), false);
        let whom = || if address == self.part.first { format!("process 0 at {address}") } else { address.to_string() };
        loop {
            self.wait(began, &mut is_reported, whom);
            if let Some(cause) = self.run_status.cause() {
                return Err(cause);
            }
            let left = self.left();
            if left.is_zero() {
                return Err(self.unreachable(address, &why));
            }
            match connect(address, left.min(ATTEMPT)) {
                Ok(stream) => return Ok(stream),
                Err(error) if error.kind() == ErrorKind::InvalidInput => {
                    return Err(LinkError::Address { address: address.to_string(), why: error.to_string() });
                }
                Err(error) => why = error.to_string(),
            }
            thread::sleep(AGAIN);
        }
    }

    /// Sends a hello and waits for the welcome.
    fn introduce(&self, stream: Stream, address: &str, hello: &Hello) -> Result<HandshakeConnection, LinkError> {
        let foreign = |fault| self.ended(LinkError::Foreign { address: address.to_string(), fault });
        let mut talk = talk(stream, self.left(), self.run_status.clone());
        talk.say(Kind::Hello, &hello.encode()).map_err(foreign)?;
        match talk.expect(Kind::Welcome).map_err(foreign)? {
            Ok(_) => Ok(talk),
            Err(why) => Err(LinkError::Refused { address: address.to_string(), why }),
        }
    }

    /// Accepts these processes at a port. Each connection has its own thread, so a stranger does not delay others.
    fn gather(&self, port: &TcpListener, mut awaited: BTreeSet<usize>, own: &Hello) -> Result<Come, LinkError> {
        let (to, come) = unbounded();
        let mut greeted: VecDeque<(SocketAddr, TcpStream)> = VecDeque::new();
        let mut present = Come::new();
        let listen = |error: io::Error| LinkError::Listen { address: own.address.clone(), why: error.to_string() };
        port.set_nonblocking(true).map_err(listen)?;
        let mut refused = Vec::new();
        let (began, mut is_reported) = (Instant::now(), false);
        let result = loop {
            if awaited.is_empty() {
                break Ok(());
            }
            self.wait(began, &mut is_reported, || {
                let named: Vec<&str> = awaited.iter().map(|process| &*self.names[*process]).take(LISTED).collect();
                let more = awaited.len() - named.len();
                let more = if more > 0 { format!(" and {more} more") } else { String::new() };
                format!("{}{more} to connect to {}", named.join(", "), own.address)
            });
            if let Some(cause) = self.run_status.cause() {
                break Err(cause);
            }
            if self.left().is_zero() {
                let mut missing: Vec<String> = awaited.iter().map(|process| self.names[*process].clone()).collect();
                missing.append(&mut refused);
                let (address, seconds) = (own.address.clone(), self.part.patience.as_secs_f64());
                break Err(LinkError::Missing { missing, address, seconds });
            }
            while let Ok((stream, from)) = port.accept() {
                if let Ok(own) = stream.try_clone() {
                    greeted.push_back((from, own));
                    greet(stream, from, self.left().min(GREETING), self.run_status.clone(), to.clone());
                }
                if greeted.len() > MOST_GREETINGS {
                    // Its reader thread ends and reports below.
                    greeted.pop_front().iter().for_each(|(_, oldest)| connection::close(oldest));
                }
            }
            let mut fatal = None;
            for (from, greeting) in come.try_iter() {
                greeted.retain(|(of, _)| *of != from);
                let (mut talk, hello) = match greeting {
                    Ok(greeting) => greeting,
                    Err(fault) => {
                        (self.notice)(Notice::SentAway(format!("rejected a connection from {from}: {fault}")));
                        continue;
                    }
                };
                let process = hello.process as usize;
                match hello.meets(own) {
                    Ok(()) if awaited.remove(&process) => match talk.say(Kind::Welcome, &[]) {
                        Ok(()) => _ = present.insert(process, (talk, hello)),
                        Err(_) => _ = awaited.insert(process),
                    },
                    Ok(()) => {
                        let why = format!("{} is already connected or was not expected", self.names[process]);
                        talk.refuse(&why);
                        (self.notice)(Notice::SentAway(format!("rejected process {} at {from}: {why}", hello.pid)));
                        refused.push(format!("{} connected twice, again from {from}", self.names[process]));
                    }
                    Err(RejectReason::Passing(why)) => {
                        talk.refuse(&why);
                        (self.notice)(Notice::SentAway(format!("rejected process {} at {from}: {why}", hello.pid)));
                    }
                    Err(RejectReason::Fatal(why)) => {
                        talk.refuse(&why);
                        let peer = format!("process {} at {from}", hello.pid);
                        fatal.get_or_insert(LinkError::Another { peer, what: why });
                    }
                }
            }
            if let Some(fatal) = fatal {
                break Err(fatal);
            }
            thread::sleep(LOOK);
        };
        match result {
            Ok(()) => Ok(present),
            Err(error) => {
                let why = error.to_string();
                present.values_mut().for_each(|(talk, _)| talk.refuse(&why));
                Err(error)
            }
        }
    }
}

fn connect(address: &str, within: Duration) -> io::Result<TcpStream> {
    let mut last = io::Error::new(ErrorKind::NotFound, "the name has no address");
    for address in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, within) {
            // The system may assign the target port to the connecting socket itself, if no process listens there.
            Ok(stream) if stream.local_addr()? == stream.peer_addr()? => {
                last = io::Error::new(ErrorKind::ConnectionRefused, "no process listens there");
            }
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn talk(stream: Stream, within: Duration, run_status: Arc<RunStatus>) -> HandshakeConnection {
    let Stream { reader, writer, hangup } = stream;
    let reader = DeadlineReader::new(reader, within, Box::new(move || run_status.is_over()));
    HandshakeConnection { reader: FrameReader::new(reader), writer: FrameWriter::new(writer), hangup }
}

type Greeting = (SocketAddr, Result<(HandshakeConnection, Hello), FrameError>);

/// Reads the hello of a new connection on its own thread.
fn greet(stream: TcpStream, from: SocketAddr, within: Duration, run_status: Arc<RunStatus>, to: Sender<Greeting>) {
    let system = |error: io::Error| FrameError::System { kind: error.kind(), why: error.to_string() };
    let hear = move || -> Result<(HandshakeConnection, Hello), FrameError> {
        let mut talk = talk(Stream::tcp(stream).map_err(system)?, within, run_status);
        talk.reader.source().end_at(Instant::now() + within);
        match talk.expect(Kind::Hello)? {
            Ok(content) => Ok((talk, Hello::decode(&content)?)),
            Err(_) => Err(FrameError::Unexpected { kind: Kind::Refusal }),
        }
    };
    // The receiver may be gone. If no thread can start, the connection is dropped.
    let _ = thread::Builder::new().name("greeting".into()).spawn(move || drop(to.send((from, hear()))));
}

/// Translates a read error into the failure of the run; `None` if the run is already over.
pub fn verdict(
    fault: FrameError,
    process: usize,
    peer: &str,
    doing: Option<String>,
    silence: Duration,
) -> Option<LinkError> {
    let peer = peer.to_string();
    match fault {
        FrameError::System { kind: OVER, .. } => None,
        FrameError::System { kind: SILENT, .. } => {
            Some(LinkError::Silent { process, peer, doing, seconds: silence.as_secs_f64() })
        }
        FrameError::Closed | FrameError::Cut | FrameError::System { .. } => {
            Some(LinkError::Lost { process, peer, doing, fault })
        }
        fault => Some(LinkError::Broken { process, peer, fault }),
    }
}
