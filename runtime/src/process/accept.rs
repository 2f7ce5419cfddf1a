//! Accepts the processes of a run at a port.
//!
//! Anybody may connect, so a connection costs little until its process has proved that it belongs to the run: a thread
//! that reads short frames for at most ten seconds. If there are too many such connections, one of the address with the
//! most is closed. A process of the run connects again if its connection was closed. Strangers can only delay it.

use crate::process::authentication;
use crate::process::authentication::{Challenge, RunToken};
use crate::process::connection;
use crate::process::connection::Stream;
use crate::process::frame::Kind;
use crate::process::handshake::{HandshakeConnection, Hello};
use crate::process::meeting::{HANDSHAKE_TIME, Meeting, connection};
use crate::process::run_status::{LinkError, RunStatus};
use crossbeam_channel::{Sender, unbounded};
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Maximum concurrent handshakes.
const MOST_HANDSHAKES: usize = 64;
/// Maximum threads of handshakes, with those whose connection was closed.
const MOST_THREADS: usize = 2 * MOST_HANDSHAKES;
/// Maximum connections that are accepted at once: a process of the run needs time to authenticate before newer
/// connections replace its own.
const MOST_AT_ONCE: usize = MOST_HANDSHAKES / 4;
/// Polling interval for new connections.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Why a connection was closed before its process authenticated.
const TOO_MANY: &str = "it had not authenticated when too many others connected";
/// Maximum number of processes named as missing.
const LISTED: usize = 8;

/// Accepted processes with their hellos.
pub type Accepted = BTreeMap<usize, (HandshakeConnection, Hello)>;

type HandshakeResult = (SocketAddr, Result<(HandshakeConnection, Hello), String>);

/// Connections whose processes have not authenticated yet.
struct Handshakes {
    open: Vec<(SocketAddr, TcpStream)>,
    to: Sender<HandshakeResult>,
    /// Every thread has a copy.
    threads: Arc<()>,
}

impl Handshakes {
    fn accept(&mut self, meeting: &Meeting<'_>, port: &TcpListener) -> Result<(), LinkError> {
        for _ in 0..MOST_AT_ONCE {
            if Arc::strong_count(&self.threads) > MOST_THREADS {
                break;
            }
            let Ok((stream, from)) = port.accept() else { break };
            let Ok(own) = stream.try_clone() else { continue };
            self.make_room();
            self.open.push((from, own));
            let task = HandshakeTask {
                stream,
                within: meeting.left().min(HANDSHAKE_TIME),
                token: meeting.part.token.clone(),
                challenge: meeting.challenge()?,
                run_status: meeting.run_status.clone(),
            };
            let (to, thread) = (self.to.clone(), self.threads.clone());
            let thread_body = move || {
                // The receiver may be gone.
                drop(to.send((from, task.run())));
                drop(thread);
            };
            // If no thread can start, the connection is dropped.
            let _ = thread::Builder::new().name("handshake".into()).spawn(thread_body);
        }
        Ok(())
    }

    /// Closes a connection of the address with the most if there are too many: any one, so that neither old connections
    /// that say nothing nor many new ones keep out a process that needs time.
    fn make_room(&mut self) {
        if self.open.len() < MOST_HANDSHAKES {
            return;
        }
        let mut by_address: BTreeMap<IpAddr, Vec<usize>> = BTreeMap::new();
        for (at, (from, _)) in self.open.iter().enumerate() {
            by_address.entry(from.ip()).or_default().push(at);
        }
        let most = by_address.into_values().max_by_key(Vec::len).unwrap_or_default();
        let random = RandomState::new().hash_one(self.open.len()) as usize;
        if let Some(at) = most.get(random % most.len().max(1)) {
            // Its thread ends and reports.
            connection::close(&self.open.swap_remove(*at).1);
        }
    }
}

impl Drop for Handshakes {
    /// Ends the threads.
    fn drop(&mut self) {
        self.open.iter().for_each(|(_, stream)| connection::close(stream));
    }
}

/// A new connection.
struct HandshakeTask {
    stream: TcpStream,
    within: Duration,
    token: RunToken,
    challenge: Challenge,
    run_status: Arc<RunStatus>,
}

impl HandshakeTask {
    /// Authenticates the process and reads its hello.
    fn run(self) -> Result<(HandshakeConnection, Hello), String> {
        let stream = Stream::tcp(self.stream).map_err(|error| error.to_string())?;
        let mut connection = connection(stream, self.within, self.run_status);
        connection.reader.source().end_at(Instant::now() + self.within);
        let process = authentication::accept(&mut connection, &self.token, &self.challenge)?;
        let hello = connection.expect(Kind::Hello).map_err(|fault| fault.to_string())??;
        let hello = Hello::decode(&hello).map_err(|fault| fault.to_string())?;
        if hello.process as usize != process {
            return Err(format!("it claims to be rank {} after it proved to be rank {process}", hello.process));
        }
        Ok((connection, hello))
    }
}

/// Accepts these processes. Each connection has its own thread, so a stranger does not delay others.
pub fn gather(
    meeting: &Meeting<'_>,
    port: &TcpListener,
    mut awaited: BTreeSet<usize>,
    own: &Hello,
) -> Result<Accepted, LinkError> {
    let listen = |error: io::Error| LinkError::Listen { address: own.address.clone(), why: error.to_string() };
    port.set_nonblocking(true).map_err(listen)?;
    let (to, accepted) = unbounded();
    let mut handshakes = Handshakes { open: Vec::new(), to, threads: Arc::new(()) };
    let mut present = Accepted::new();
    let (began, mut is_reported) = (Instant::now(), false);
    let error = loop {
        if awaited.is_empty() {
            return Ok(present);
        }
        meeting.wait(began, &mut is_reported, || {
            let named: Vec<&str> = awaited.iter().map(|process| &*meeting.names[*process]).take(LISTED).collect();
            let more = awaited.len() - named.len();
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            format!("{}{more} to connect to {}", named.join(", "), own.address)
        });
        if let Some(cause) = meeting.run_status.cause() {
            break cause;
        }
        if meeting.left().is_zero() {
            let missing = awaited.iter().map(|process| meeting.names[*process].clone()).collect();
            let (address, seconds) = (own.address.clone(), meeting.part.connect_timeout.as_secs_f64());
            break LinkError::Missing { missing, address, seconds, refused: meeting.last_refused() };
        }
        if let Err(error) = handshakes.accept(meeting, port) {
            break error;
        }
        for (from, result) in accepted.try_iter() {
            let is_open = handshakes.open.iter().any(|(of, _)| *of == from);
            handshakes.open.retain(|(of, _)| *of != from);
            let (mut connection, hello) = match result {
                Ok(accepted) => accepted,
                Err(why) => {
                    let why = if is_open { &why } else { TOO_MANY };
                    meeting.refused(&format!("a connection from {from}"), from.ip(), why);
                    continue;
                }
            };
            let process = hello.process as usize;
            let why = match hello.meets(own) {
                Ok(()) if awaited.remove(&process) => {
                    // The others may take longer than the handshake.
                    connection.reader.source().renew(meeting.left());
                    match connection.send_frame(Kind::Welcome, &[]) {
                        Ok(()) => _ = present.insert(process, (connection, hello)),
                        Err(_) => _ = awaited.insert(process),
                    }
                    continue;
                }
                Ok(()) => {
                    format!("{} is already connected or was not expected", meeting.names[process])
                }
                Err(why) => why,
            };
            connection.refuse(&why);
            meeting.refused(&format!("process {} at {from}", hello.pid), from.ip(), &why);
        }
        thread::sleep(POLL_INTERVAL);
    };
    let why = error.to_string();
    present.values_mut().for_each(|(connection, _)| connection.refuse(&why));
    Err(error)
}
