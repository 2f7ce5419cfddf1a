//! The process group of a run: how its processes find and connect to each other.
//!
//! Process 0 waits for all others; each says hello and where it listens. When all are there, each learns the addresses of the
//! others; of two processes that exchange messages, the one with the higher number connects. When all connections stand, process 0
//! starts the run.

use crate::process::connection;
use crate::process::connection::{OVER, Patient, SILENT, Stream};
use crate::process::frame::{FrameError, FrameReader, FrameWriter, Kind};
use crate::process::handshake::{Hello, Identity, Known, PROTOCOL, Stranger, Talk, decode_roster, encode_roster};
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

/// How long who connects may take to say who it is.
const GREETING: Duration = Duration::from_secs(5);
/// Connections that may be saying so at once. With one more the one is closed that has been silent longest: a process of the run says
/// who it is at once.
const MOST_GREETINGS: usize = 64;
/// How often a process tries to reach another one.
const AGAIN: Duration = Duration::from_millis(50);
/// How long one attempt may take.
const ATTEMPT: Duration = Duration::from_secs(1);
/// How often who waits looks whether somebody came.
const LOOK: Duration = Duration::from_millis(5);
/// After how long it is told who is waited for.
const SOON: Duration = Duration::from_secs(1);
/// Processes that are named then at most.
const LISTED: usize = 8;

/// How a process takes part in a run.
#[derive(Clone, Debug)]
pub struct ProcessConfig {
    /// Which process it is.
    pub own: usize,
    /// Who runs what.
    pub placement: WorkerPlacement,
    /// What must be equal at all ends.
    pub identity: Identity,
    /// Where process 0 is.
    pub first: String,
    /// Where this process listens; nothing where any port will do.
    pub listen: Option<String>,
    /// How long to wait for the others.
    pub patience: Duration,
    /// How long a process may be silent once the run goes on.
    pub deadline: Duration,
    /// Whether process 0 started this one, which then ends with it: silence says nothing of who may just be stopped.
    pub follows: bool,
}

/// How far each worker is: the instruction that it is at.
pub type Progress = Arc<Vec<AtomicU32>>;

/// Processes that have come together, as one of them sees it.
pub struct Group {
    /// How this process takes part.
    pub part: ProcessConfig,
    /// What ends the run.
    pub run_status: Arc<RunStatus>,
    /// How far all workers are, as far as is known here.
    pub progress: Progress,
    /// All processes in words.
    pub names: Vec<String>,
    /// The connections, by process.
    pub talks: BTreeMap<usize, Talk>,
    /// What must be there as long as they are.
    pub carrier: Option<Box<dyn Send>>,
}

/// How a process comes to the others.
pub enum Door {
    /// Process 0 has a port, where it waits for them.
    Port(TcpListener),
    /// The others know where that is.
    Outside,
    /// All stand connected, by process, as long as the carrier is there.
    Open(BTreeMap<usize, Stream>, Box<dyn Send>),
}

/// Opens the port that process 0 is reached at, or another one of this process.
pub fn listen(address: &str) -> Result<TcpListener, LinkError> {
    if let Err(error) = address.to_socket_addrs() {
        return Err(LinkError::Address { address: address.to_string(), why: error.to_string() });
    }
    TcpListener::bind(address).map_err(|error| {
        let why = match error.kind() {
            ErrorKind::AddrInUse => "the port is in use by another program, or by a run that has not ended".to_string(),
            ErrorKind::AddrNotAvailable => "this machine does not have this address".to_string(),
            _ => error.to_string(),
        };
        LinkError::Listen { address: address.to_string(), why }
    })
}

/// What may be told while processes come together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// Who is waited for, once that takes a while.
    Waits(String),
    /// Who came to the port and is no part of the run.
    SentAway(String),
}

/// Meets the other processes of the run; `lines` says which pairs have something to say to each other. What does not end the run is told
/// by `notice`.
pub fn join(
    program: &Program,
    lines: &BTreeSet<(usize, usize)>,
    part: ProcessConfig,
    door: Door,
    run_status: Arc<RunStatus>,
    notice: &dyn Fn(Notice),
) -> Result<Group, LinkError> {
    let until = Instant::now() + part.patience;
    let all = (0..part.placement.processes).map(|process| part.placement.name(program, process)).collect();
    let mut entrance = Entrance { part: &part, run_status: &run_status, notice, until, names: all };
    let ((talks, roster), carrier) = match door {
        Door::Port(port) => (entrance.open(&port)?, None),
        Door::Outside => (entrance.enter(lines)?, None),
        Door::Open(streams, carrier) => (entrance.stand(streams, lines)?, Some(carrier)),
    };
    let named = |(name, known): (&String, &Known)| format!("{name}, process {} at {}", known.pid, known.address);
    let names = entrance.names.iter().zip(&roster).map(named).collect();
    let progress = Arc::new(program.workers.iter().map(|_| AtomicU32::new(0)).collect());
    Ok(Group { part, run_status, progress, names, talks, carrier })
}

impl Group {
    /// Whether a worker runs in this process.
    pub fn is_here(&self, worker: usize) -> bool {
        self.part.placement.of.get(worker) == Some(&self.part.own)
    }
}

/// What the first worker of a process was last known to do.
pub fn doing(program: &Program, placement: &WorkerPlacement, progress: &[AtomicU32], process: usize) -> Option<String> {
    let worker = placement.workers(process).next()?;
    let at = progress.get(worker)?.load(Ordering::Relaxed) as usize;
    let instruction = program.workers.get(WorkerId(worker as u32).index())?.instructions.get(at)?;
    Some(program.show(instruction))
}

type Talks = BTreeMap<usize, Talk>;
type Come = BTreeMap<usize, (Talk, Hello)>;

/// What comes of a word with another process: done, refused with a reason, or the connection's fault.
type Said = Result<Result<(), String>, FrameError>;

/// A process on its way into the run.
struct Entrance<'a> {
    part: &'a ProcessConfig,
    run_status: &'a Arc<RunStatus>,
    notice: &'a dyn Fn(Notice),
    until: Instant,
    names: Vec<String>,
}

impl Entrance<'_> {
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

    /// Process 0: waits for all others, and lets them start when their connections stand.
    fn open(&mut self, port: &TcpListener) -> Result<(Talks, Vec<Known>), LinkError> {
        let address = port.local_addr().map_or_else(|_| self.part.first.clone(), |address| address.to_string());
        let own = self.hello(address);
        let awaited = (1..self.part.placement.processes).collect();
        let come = self.gather(port, awaited, &own)?;
        self.begin(come, own)
    }

    /// Process 0: all are there. Tells them of each other, and lets them start when their connections stand.
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

    fn each(&self, talks: &mut Talks, step: &dyn Fn(&mut Talk) -> Said) -> Result<(), LinkError> {
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

    /// Every other process: presents itself to process 0, and connects to those that it speaks to.
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

    /// Where all stand connected: every process presents itself to those before it, and hears those behind it.
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

    /// Hears who is at the other end of a stream, and welcomes it.
    fn hear(&self, process: usize, stream: Stream, own: &Hello) -> Result<(Talk, Hello), LinkError> {
        let lost = |fault| {
            let peer = self.names[process].clone();
            self.ended(LinkError::Lost { process, peer, doing: None, fault })
        };
        let mut talk = talk(stream, self.left(), self.run_status.clone());
        let content = talk.expect(Kind::Hello).map_err(lost)?;
        let content = content.map_err(|what| LinkError::Failed { process, peer: self.names[process].clone(), what })?;
        let hello = Hello::decode(&content).map_err(lost)?;
        let met = match hello.meets(own) {
            Ok(()) if hello.process as usize != process => Err(format!("it says that it is process {}", hello.process)),
            Ok(()) => Ok(()),
            Err(Stranger::Passing(why) | Stranger::Fatal(why)) => Err(why),
        };
        if let Err(what) = met {
            talk.refuse(&what);
            return Err(LinkError::Another { peer: format!("process {} at {}", hello.pid, hello.address), what });
        }
        talk.say(Kind::Welcome, &[]).map_err(lost)?;
        Ok((talk, hello))
    }

    /// Where everyone is, from process 0.
    fn roster(&self, talk: &mut Talk, first: &str) -> Result<Vec<Known>, LinkError> {
        let foreign = |fault| LinkError::Foreign { address: first.to_string(), fault };
        let refused = |why| LinkError::Refused { address: first.to_string(), why };
        let content = talk.expect(Kind::Roster).map_err(|fault| self.ended(foreign(fault)))?.map_err(refused)?;
        decode_roster(&content, self.part.placement.processes).map_err(foreign)
    }

    /// Tells process 0 that all connections of this one stand, and waits until it lets everyone start.
    fn start(&self, talk: &mut Talk, first: &str) -> Result<(), LinkError> {
        let foreign = |fault| LinkError::Foreign { address: first.to_string(), fault };
        let refused = |why| LinkError::Refused { address: first.to_string(), why };
        talk.say(Kind::Ready, &[]).map_err(foreign)?;
        talk.expect(Kind::Start).map_err(|fault| self.ended(foreign(fault)))?.map_err(refused).map(drop)
    }

    fn tcp(&self, stream: TcpStream, address: &str) -> Result<Stream, LinkError> {
        Stream::tcp(stream).map_err(|error| self.unreachable(address, &error.to_string()))
    }

    /// The cause of the end, where it is known.
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

    /// Tells once, when it has taken a while, who is waited for and for how long.
    fn wait(&self, began: Instant, is_told: &mut bool, whom: impl FnOnce() -> String) {
        let (waited, left) = (began.elapsed(), self.left());
        if *is_told || waited < SOON || left.is_zero() {
            return;
        }
        *is_told = true;
        (self.notice)(Notice::Waits(format!("waits for {}, up to {:.0} s more", whom(), left.as_secs_f64().ceil())));
    }

    /// A connection to a process, which may not be there yet.
    fn reach(&self, address: &str) -> Result<TcpStream, LinkError> {
        let mut why = "no time is left".to_string();
        let (began, mut is_told) = (Instant::now(), false);
        let whom = || if address == self.part.first { format!("process 0 at {address}") } else { address.to_string() };
        loop {
            self.wait(began, &mut is_told, whom);
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

    /// Says hello and is welcomed.
    fn introduce(&self, stream: Stream, address: &str, hello: &Hello) -> Result<Talk, LinkError> {
        let foreign = |fault| self.ended(LinkError::Foreign { address: address.to_string(), fault });
        let mut talk = talk(stream, self.left(), self.run_status.clone());
        talk.say(Kind::Hello, &hello.encode()).map_err(foreign)?;
        match talk.expect(Kind::Welcome).map_err(foreign)? {
            Ok(_) => Ok(talk),
            Err(why) => Err(LinkError::Refused { address: address.to_string(), why }),
        }
    }

    /// Waits for these processes at a port. Strangers are sent away, each by itself, so that none keeps the others waiting.
    fn gather(&self, port: &TcpListener, mut awaited: BTreeSet<usize>, own: &Hello) -> Result<Come, LinkError> {
        let (to, come) = unbounded();
        let mut greeted: VecDeque<(SocketAddr, TcpStream)> = VecDeque::new();
        let mut present = Come::new();
        let listen = |error: io::Error| LinkError::Listen { address: own.address.clone(), why: error.to_string() };
        port.set_nonblocking(true).map_err(listen)?;
        let mut refused = Vec::new();
        let (began, mut is_told) = (Instant::now(), false);
        let result = loop {
            if awaited.is_empty() {
                break Ok(());
            }
            self.wait(began, &mut is_told, || {
                let named: Vec<&str> = awaited.iter().map(|process| &*self.names[*process]).take(LISTED).collect();
                let more = awaited.len() - named.len();
                let more = if more > 0 { format!(" and {more} more") } else { String::new() };
                format!("{}{more} to come to {}", named.join(", "), own.address)
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
                    // Who reads it ends, and is heard of below.
                    greeted.pop_front().iter().for_each(|(_, oldest)| connection::close(oldest));
                }
            }
            let mut fatal = None;
            for (from, greeting) in come.try_iter() {
                greeted.retain(|(of, _)| *of != from);
                let (mut talk, hello) = match greeting {
                    Ok(greeting) => greeting,
                    Err(fault) => {
                        (self.notice)(Notice::SentAway(format!("sent a connection from {from} away: {fault}")));
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
                        let why = format!("{} is here already or was not expected", self.names[process]);
                        talk.refuse(&why);
                        (self.notice)(Notice::SentAway(format!("sent process {} at {from} away: {why}", hello.pid)));
                        refused.push(format!("{} came twice, again from {from}", self.names[process]));
                    }
                    Err(Stranger::Passing(why)) => {
                        talk.refuse(&why);
                        (self.notice)(Notice::SentAway(format!("sent process {} at {from} away: {why}", hello.pid)));
                    }
                    Err(Stranger::Fatal(why)) => {
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
            // A port that nobody listens at may be given to who connects to it.
            Ok(stream) if stream.local_addr()? == stream.peer_addr()? => {
                last = io::Error::new(ErrorKind::ConnectionRefused, "nobody listens there");
            }
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn talk(stream: Stream, within: Duration, run_status: Arc<RunStatus>) -> Talk {
    let Stream { reader, writer, hangup } = stream;
    let reader = Patient::new(reader, within, Box::new(move || run_status.is_over()));
    Talk { reader: FrameReader::new(reader), writer: FrameWriter::new(writer), hangup }
}

type Greeting = (SocketAddr, Result<(Talk, Hello), FrameError>);

/// Hears who connects, in a thread of its own.
fn greet(stream: TcpStream, from: SocketAddr, within: Duration, run_status: Arc<RunStatus>, to: Sender<Greeting>) {
    let system = |error: io::Error| FrameError::System { kind: error.kind(), why: error.to_string() };
    let hear = move || -> Result<(Talk, Hello), FrameError> {
        let mut talk = talk(Stream::tcp(stream).map_err(system)?, within, run_status);
        talk.reader.source().end_at(Instant::now() + within);
        match talk.expect(Kind::Hello)? {
            Ok(content) => Ok((talk, Hello::decode(&content)?)),
            Err(_) => Err(FrameError::Unexpected { kind: Kind::Refusal }),
        }
    };
    // Nobody may listen any more, and a machine without threads has other worries.
    let _ = thread::Builder::new().name("greeting".into()).spawn(move || drop(to.send((from, hear()))));
}

/// What a reader's error means for the run; nothing where the run is over anyway.
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
