//! Forms the process group of a run: how its processes find and connect to each other.
//!
//! Process 0 waits for all others, which authenticate and send a hello with their listening address. Then each learns the
//! addresses of the others. The higher-numbered of two communicating processes connects. When all connections exist,
//! process 0 starts the run.

use crate::comm::members::encode;
use crate::process::accept::{Accepted, gather, receive_hello};
use crate::process::authentication;
use crate::process::connection::{NO_DATA, RUN_OVER, Stream};
use crate::process::dial::{dial, introduce, is_lost};
use crate::process::fields::{check, decode};
use crate::process::frame::{FrameError, Kind};
use crate::process::handshake::{HandshakeConnection, Hello, RosterEntry};
use crate::process::meeting::{Meeting, Notice, ProcessConfig};
use crate::process::run_status::{LinkError, RunStatus};
use compiler::schedule::Program;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// Time to wait for the reason of process 0 after the connect timeout, which began at another moment there.
const REFUSAL_TIME: Duration = Duration::from_secs(2);

/// Current instruction of every global rank.
pub type Progress = Arc<Vec<AtomicU32>>;

/// A connected process group, as seen by one process.
pub struct Group {
    pub config: ProcessConfig,
    pub run_status: Arc<RunStatus>,
    /// Last known progress of all ranks.
    pub progress: Progress,
    /// Display names, by process.
    pub names: Vec<String>,
    pub connections: BTreeMap<usize, HandshakeConnection>,
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

/// Joins the process group of a run. `lines` lists the pairs that need a connection. `notice` receives messages that do
/// not end the run.
pub fn join(
    program: &Program,
    lines: &BTreeSet<(usize, usize)>,
    config: ProcessConfig,
    mode: JoinMode,
    run_status: Arc<RunStatus>,
    notice: &dyn Fn(Notice),
) -> Result<Group, LinkError> {
    let names = (0..config.placement.processes).map(|process| config.placement.name(program, process)).collect();
    let Connected { connections, names, carrier } = connect(names, lines, &config, mode, &run_status, notice)?;
    let progress = Arc::new(config.placement.processes_of_ranks.iter().map(|_| AtomicU32::new(0)).collect());
    Ok(Group { config, run_status, progress, names, connections, lines: lines.clone(), carrier })
}

/// Connected processes that have no program yet.
pub struct Connected {
    pub connections: Connections,
    /// Display names, by process, with the process ids and addresses.
    pub names: Vec<String>,
    /// Keeps the transport alive.
    pub carrier: Option<Box<dyn Send>>,
}

/// Connects the processes with these display names.
pub fn connect(
    names: Vec<String>,
    lines: &BTreeSet<(usize, usize)>,
    config: &ProcessConfig,
    mode: JoinMode,
    run_status: &Arc<RunStatus>,
    notice: &dyn Fn(Notice),
) -> Result<Connected, LinkError> {
    let meeting = Meeting::new(names, config, run_status, notice);
    let ((connections, roster), carrier) = match mode {
        JoinMode::Port(port) => (meeting.open(&port)?, None),
        JoinMode::Outside => (meeting.enter(lines)?, None),
        JoinMode::Open(streams, carrier) => (meeting.join_connected(streams, lines)?, Some(carrier)),
    };
    let describe =
        |(name, entry): (&String, &RosterEntry)| format!("{name}, process {} at {}", entry.pid, entry.address);
    let names = meeting.names.iter().zip(&roster).map(describe).collect();
    Ok(Connected { connections, names, carrier })
}

impl Group {
    /// True if the global rank runs in this process.
    pub fn is_here(&self, rank: usize) -> bool {
        self.config.placement.processes_of_ranks.get(rank) == Some(&self.config.process)
    }
}

/// Connections by process.
pub type Connections = BTreeMap<usize, HandshakeConnection>;

/// Done, or refused with a reason, or a connection error.
type StepResult = Result<Result<(), String>, FrameError>;

/// The steps of joining a run.
impl Meeting<'_> {
    fn hello(&self, address: String) -> Hello {
        Hello {
            process: self.config.process as u32,
            pid: std::process::id(),
            address,
            identity: self.config.identity.clone(),
        }
    }

    /// Process 0: accepts all others and starts the run once they are connected.
    fn open(&self, port: &TcpListener) -> Result<(Connections, Vec<RosterEntry>), LinkError> {
        let hello = self.hello(self.listening_address(port)?);
        let expected = (1..self.config.placement.processes).collect();
        let accepted = gather(self, port, expected, &hello)?;
        self.begin(accepted, hello)
    }

    /// Process 0: sends the roster to all processes and starts them once they are connected.
    fn begin(&self, accepted: Accepted, hello: Hello) -> Result<(Connections, Vec<RosterEntry>), LinkError> {
        let address = hello.address;
        let mut roster = vec![RosterEntry { pid: hello.pid, address }];
        roster.extend(accepted.values().map(|(_, peer)| RosterEntry { pid: peer.pid, address: peer.address.clone() }));
        let mut connections: Connections =
            accepted.into_iter().map(|(process, (connection, _))| (process, connection)).collect();
        let content = encode(&roster);
        let started = self
            .for_each_connection(&mut connections, &|connection| connection.send_frame(Kind::Roster, &content).map(Ok));
        let started = started.and_then(|()| {
            self.for_each_connection(&mut connections, &|connection| Ok(connection.expect(Kind::Ready)?.map(drop)))
        });
        let started = started.and_then(|()| {
            self.for_each_connection(&mut connections, &|connection| connection.send_frame(Kind::Start, &[]).map(Ok))
        });
        if let Err(error) = started {
            let why = error.to_string();
            connections.values_mut().for_each(|connection| connection.refuse(&why));
            return Err(error);
        }
        Ok((connections, roster))
    }

    /// Does a step of the handshake with each process, which may refuse it with a reason.
    fn for_each_connection(
        &self,
        connections: &mut Connections,
        step: &dyn Fn(&mut HandshakeConnection) -> StepResult,
    ) -> Result<(), LinkError> {
        for (&process, connection) in connections {
            let peer = self.names[process].clone();
            match step(connection) {
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
    fn enter(&self, lines: &BTreeSet<(usize, usize)>) -> Result<(Connections, Vec<RosterEntry>), LinkError> {
        let first = self.config.first_address.clone();
        let mut port = self.config.listen.as_deref().map(listen).transpose()?;
        let connection = dial(self, &first, 0, &mut |local| {
            let port = match &mut port {
                Some(port) => &*port,
                empty => empty.insert(listen(&SocketAddr::new(local.ip(), 0).to_string())?),
            };
            let address = self.listening_address(port)?;
            Ok(self.hello(self.config.listen.clone().unwrap_or(address)))
        })?;
        let bug = || LinkError::Bug { what: "this process does not listen".to_string() };
        let port = port.ok_or_else(bug)?;
        let hello = self.hello(self.config.listen.clone().map_or_else(|| self.listening_address(&port), Ok)?);
        let connect = |lower: usize, address: &str| dial(self, address, lower, &mut |_| Ok(hello.clone()));
        self.meet(connection, (&first, lines), connect, |higher| gather(self, &port, higher, &hello))
    }

    /// Connects to the lower-numbered processes and accepts the higher-numbered ones, until process 0, which is
    /// connected, starts the run.
    fn meet(
        &self,
        mut first: HandshakeConnection,
        (address, lines): (&str, &BTreeSet<(usize, usize)>),
        connect: impl Fn(usize, &str) -> Result<HandshakeConnection, LinkError>,
        accept: impl FnOnce(BTreeSet<usize>) -> Result<Accepted, LinkError>,
    ) -> Result<(Connections, Vec<RosterEntry>), LinkError> {
        let process = self.config.process;
        let roster = self.roster(&mut first, address)?;
        let mut connections = Connections::new();
        for &(lower, _) in lines.iter().filter(|(lower, higher)| *lower > 0 && *higher == process) {
            connections.insert(lower, connect(lower, &roster[lower].address)?);
        }
        let higher = lines.iter().filter(|(lower, _)| *lower == process).map(|(_, higher)| *higher).collect();
        connections.extend(accept(higher)?.into_iter().map(|(process, (connection, _))| (process, connection)));
        self.start(&mut first, address)?;
        connections.insert(0, first);
        Ok((connections, roster))
    }

    /// All connected (MPI): every process connects to the lower-numbered ones and accepts the higher-numbered ones.
    fn join_connected(
        &self,
        streams: BTreeMap<usize, Stream>,
        lines: &BTreeSet<(usize, usize)>,
    ) -> Result<(Connections, Vec<RosterEntry>), LinkError> {
        let (process, streams) = (self.config.process, RefCell::new(streams));
        let hello = self.hello(format!("rank {process}"));
        let take_stream = |process: usize| {
            let what = || LinkError::Bug { what: format!("no stream to process {process} of the run") };
            streams.borrow_mut().remove(&process).ok_or_else(what)
        };
        let accept = |processes: BTreeSet<usize>| -> Result<Accepted, LinkError> {
            let receive = |process| Ok((process, self.receive_hello(process, take_stream(process)?, &hello)?));
            processes.into_iter().map(receive).collect()
        };
        if process == 0 {
            return self.begin(accept((1..self.config.placement.processes).collect())?, hello.clone());
        }
        let first = self.handshake(take_stream(0)?, 0, &hello)?;
        let connect = |lower: usize, _: &str| self.handshake(take_stream(lower)?, lower, &hello);
        self.meet(first, ("rank 0", lines), connect, accept)
    }

    /// Authenticates with a lower-numbered process that is already connected.
    fn handshake(&self, stream: Stream, process: usize, hello: &Hello) -> Result<HandshakeConnection, LinkError> {
        let (mut connection, address) = (self.connection(stream, self.remaining()), format!("rank {process}"));
        authentication::connect(&mut connection, &self.config.token, &self.challenge(false)?, process)
            .map_err(|what| self.run_failure_or(LinkError::Another { peer: address.clone(), what }))?;
        introduce(self, connection, &address, hello)
    }

    /// Authenticates with a higher-numbered process that is already connected, reads its hello and welcomes it.
    fn receive_hello(
        &self,
        process: usize,
        stream: Stream,
        own: &Hello,
    ) -> Result<(HandshakeConnection, Hello), LinkError> {
        let peer = self.names[process].clone();
        let mut connection = self.connection(stream, self.remaining());
        let hello = receive_hello(&mut connection, &self.config.token, &self.challenge(false)?)
            .map_err(|what| self.run_failure_or(LinkError::Failed { process, peer: peer.clone(), what }))?;
        let check = match hello.process as usize == process {
            true => hello.check_matches(own),
            false => Err(format!("it claims to be rank {}, not {process}", hello.process)),
        };
        if let Err(what) = check {
            connection.refuse(&what);
            return Err(LinkError::Another { peer: format!("process {} at {}", hello.pid, hello.address), what });
        }
        let welcomed = connection.send_frame(Kind::Welcome, &[]);
        let lost = |fault| self.run_failure_or(LinkError::Lost { process, peer, doing: None, fault });
        welcomed.map_err(lost)?;
        Ok((connection, hello))
    }

    /// The address of a port, which the token must permit.
    fn listening_address(&self, port: &TcpListener) -> Result<String, LinkError> {
        let listen = |error: io::Error| {
            let address = self.config.listen.clone().unwrap_or_else(|| self.config.first_address.clone());
            LinkError::Listen { address, why: error.to_string() }
        };
        let address = port.local_addr().map_err(listen)?;
        match self.config.token.permits(address.ip()) {
            true => Ok(address.to_string()),
            false => Err(LinkError::Exposed { address: address.to_string() }),
        }
    }

    fn roster(&self, connection: &mut HandshakeConnection, first: &str) -> Result<Vec<RosterEntry>, LinkError> {
        let content = self.expect_from_first(connection, Kind::Roster, first)?;
        let foreign = |fault| LinkError::Foreign { address: first.to_string(), fault };
        let roster: Vec<RosterEntry> = decode(&content, "the roster").map_err(foreign)?;
        check(roster.len() == self.config.placement.processes, "the number of processes").map_err(foreign)?;
        Ok(roster)
    }

    /// Reports ready to process 0 and waits for the start.
    fn start(&self, connection: &mut HandshakeConnection, first: &str) -> Result<(), LinkError> {
        connection.send_frame(Kind::Ready, &[]).map_err(|fault| self.first_lost(first, fault))?;
        self.expect_from_first(connection, Kind::Start, first).map(drop)
    }

    /// Reads a frame of process 0, which has welcomed this one.
    fn expect_from_first(
        &self,
        connection: &mut HandshakeConnection,
        kind: Kind,
        first: &str,
    ) -> Result<Vec<u8>, LinkError> {
        // Process 0 says which processes are missing when its own time is over.
        connection.reader.source().renew(self.remaining() + REFUSAL_TIME);
        let content = connection.expect(kind).map_err(|fault| self.first_lost(first, fault))?;
        content.map_err(|why| LinkError::NotStarted { address: first.to_string(), why })
    }

    fn first_lost(&self, first: &str, fault: FrameError) -> LinkError {
        let address = first.to_string();
        self.run_failure_or(match fault {
            FrameError::System { kind: NO_DATA, .. } => {
                let seconds = self.config.connect_timeout.as_secs_f64();
                let why = format!("it waited over {seconds} s, probably for other processes");
                LinkError::NotStarted { address, why }
            }
            fault if is_lost(&fault) => {
                LinkError::Lost { process: 0, peer: format!("process 0 at {first}"), doing: None, fault }
            }
            fault => LinkError::Foreign { address, fault },
        })
    }
}

/// Translates a read error into the failure of the run; `None` if the run is already over.
pub fn read_failure(
    fault: FrameError,
    process: usize,
    peer: &str,
    doing: Option<String>,
    silence: Duration,
) -> Option<LinkError> {
    let peer = peer.to_string();
    match fault {
        FrameError::System { kind: RUN_OVER, .. } => None,
        FrameError::System { kind: NO_DATA, .. } => {
            Some(LinkError::Silent { process, peer, doing, seconds: silence.as_secs_f64() })
        }
        FrameError::Closed | FrameError::Cut | FrameError::System { .. } => {
            Some(LinkError::Lost { process, peer, doing, fault })
        }
        // Not the peer's fault.
        FrameError::Device { what } => Some(LinkError::Ended { process: None, what }),
        fault => Some(LinkError::Broken { process, peer, fault }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::authentication::RunToken;
    use crate::process::handshake::Identity;
    use crate::process::placement::WorkerPlacement;
    use std::net::TcpStream;
    use std::thread;

    /// Joins over streams that are already connected, as over MPI.
    fn join_streams(process: usize, token: &str, streams: BTreeMap<usize, Stream>) -> Result<Vec<usize>, LinkError> {
        let config = ProcessConfig {
            process,
            placement: WorkerPlacement { processes_of_ranks: Vec::new(), processes: 3, degree: 1 },
            identity: Identity { run: 1, inputs: Vec::new() },
            token: RunToken::of(token).unwrap(),
            first_address: String::new(),
            listen: None,
            connect_timeout: Duration::from_secs(30),
            deadline: Duration::from_secs(30),
            nccl: false,
            follows: false,
        };
        let names = (0..3).map(|process| format!("process {process}")).collect();
        let lines = BTreeSet::from([(0, 1), (0, 2), (1, 2)]);
        let mode = JoinMode::Open(streams, Box::new(()));
        let connected = connect(names, &lines, &config, mode, &Arc::default(), &|_| {})?;
        Ok(connected.connections.into_keys().collect())
    }

    fn join_all(tokens: [&'static str; 3]) -> [Result<Vec<usize>, LinkError>; 3] {
        let mut streams = [(); 3].map(|()| BTreeMap::new());
        for (lower, higher) in [(0, 1), (0, 2), (1, 2)] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            streams[lower].insert(higher, Stream::tcp(stream).unwrap());
            streams[higher].insert(lower, Stream::tcp(listener.accept().unwrap().0).unwrap());
        }
        let mut processes = 0..;
        let threads = streams.map(|streams| {
            let process = processes.next().unwrap();
            thread::spawn(move || join_streams(process, tokens[process], streams))
        });
        threads.map(|thread| thread.join().unwrap())
    }

    #[test]
    fn connected_processes_authenticate_too() {
        const TOKEN: &str = "0123456789abcdef";
        assert_eq!(join_all([TOKEN; 3]), [Ok(vec![1, 2]), Ok(vec![0, 2]), Ok(vec![0, 1])]);
        let [first, _, last] = join_all([TOKEN, TOKEN, "another token of the run"]);
        assert!(matches!(first, Err(LinkError::Failed { process: 2, .. })), "{first:?}");
        assert!(matches!(last, Err(LinkError::Another { .. })), "{last:?}");
    }
}
