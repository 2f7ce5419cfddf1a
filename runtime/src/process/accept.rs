//! Accepts the processes of a run at a port.
//!
//! Anybody may connect, so a connection costs little until its process has proved that it belongs to the run: a thread
//! that reads short frames for at most ten seconds. If there are too many such connections, one of the address with the
//! most is closed. A process of the run connects again if its connection was closed. Strangers can only delay it.

use crate::process::authentication;
use crate::process::authentication::{Challenge, RunToken, is_exposed};
use crate::process::connection;
use crate::process::connection::Stream;
use crate::process::fields::{check, decode};
use crate::process::frame::Kind;
use crate::process::handshake::{HandshakeConnection, Hello};
use crate::process::meeting::{HANDSHAKE_TIME, Meeting, connection};
use crate::process::run_status::LinkError;
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
    results: Sender<HandshakeResult>,
    /// Every thread has a copy.
    threads: Arc<()>,
}

impl Handshakes {
    fn accept(&mut self, meeting: &Meeting<'_>, port: &TcpListener) -> Result<(), LinkError> {
        for _ in 0..MOST_AT_ONCE {
            if Arc::strong_count(&self.threads) > MOST_THREADS {
                break;
            }
            let Ok((stream, address)) = port.accept() else { break };
            let Ok(socket) = stream.try_clone() else { continue };
            self.make_room();
            self.open.push((address, socket));
            let within = meeting.remaining().min(HANDSHAKE_TIME);
            let (token, run_status) = (meeting.config.token.clone(), meeting.run_status.clone());
            let challenge = meeting.challenge(is_exposed(address.ip()))?;
            let (sender, thread) = (self.results.clone(), self.threads.clone());
            let handshake = move || {
                let stream = Stream::tcp(stream).map_err(|error| error.to_string())?;
                let mut connection = connection(stream, within, run_status);
                connection.reader.source().end_at(Instant::now() + within);
                let hello = receive_hello(&mut connection, &token, &challenge)?;
                Ok((connection, hello))
            };
            let thread_body = move || {
                // The receiver may be gone.
                drop(sender.send((address, handshake())));
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
        for (index, (address, _)) in self.open.iter().enumerate() {
            by_address.entry(address.ip()).or_default().push(index);
        }
        let crowded = by_address.into_values().max_by_key(Vec::len).unwrap_or_default();
        let random = RandomState::new().hash_one(self.open.len()) as usize;
        if let Some(index) = crowded.get(random % crowded.len().max(1)) {
            // Its thread ends and reports.
            connection::close(&self.open.swap_remove(*index).1);
        }
    }
}

impl Drop for Handshakes {
    /// Ends the threads.
    fn drop(&mut self) {
        self.open.iter().for_each(|(_, stream)| connection::close(stream));
    }
}

/// Authenticates a process that connects to this one, and reads its hello.
pub fn receive_hello(
    connection: &mut HandshakeConnection,
    token: &RunToken,
    challenge: &Challenge,
) -> Result<Hello, String> {
    let process = authentication::accept(connection, token, challenge)?;
    let hello = connection.expect(Kind::Hello).map_err(|fault| fault.to_string())??;
    let hello: Hello = decode(&hello, "the hello").map_err(|fault| fault.to_string())?;
    check(hello.is_short(), "the hello").map_err(|fault| fault.to_string())?;
    match hello.process as usize == process {
        true => Ok(hello),
        false => Err(format!("it claims to be rank {} after it proved to be rank {process}", hello.process)),
    }
}

/// Accepts these processes. Each connection has its own thread, so a stranger does not delay others.
pub fn gather(
    meeting: &Meeting<'_>,
    port: &TcpListener,
    mut missing: BTreeSet<usize>,
    own_hello: &Hello,
) -> Result<Accepted, LinkError> {
    let listen = |error: io::Error| LinkError::Listen { address: own_hello.address.clone(), why: error.to_string() };
    port.set_nonblocking(true).map_err(listen)?;
    let (sender, handshake_results) = unbounded();
    let mut handshakes = Handshakes { open: Vec::new(), results: sender, threads: Arc::new(()) };
    let mut accepted = Accepted::new();
    let (start, mut is_reported) = (Instant::now(), false);
    let error = loop {
        if missing.is_empty() {
            return Ok(accepted);
        }
        meeting.report_missing(start, &mut is_reported, || {
            let names: Vec<&str> = missing.iter().map(|process| &*meeting.names[*process]).take(LISTED).collect();
            let others = missing.len() - names.len();
            let others = if others > 0 { format!(" and {others} more") } else { String::new() };
            format!("{}{others} to connect to {}", names.join(", "), own_hello.address)
        });
        if let Some(cause) = meeting.run_status.cause() {
            break cause;
        }
        if meeting.remaining().is_zero() {
            let missing = missing.iter().map(|process| meeting.names[*process].clone()).collect();
            let (address, seconds) = (own_hello.address.clone(), meeting.config.connect_timeout.as_secs_f64());
            break LinkError::Missing { missing, address, seconds, refused: meeting.last_refused() };
        }
        if let Err(error) = handshakes.accept(meeting, port) {
            break error;
        }
        for (address, result) in handshake_results.try_iter() {
            let is_open = handshakes.open.iter().any(|(other, _)| *other == address);
            handshakes.open.retain(|(other, _)| *other != address);
            let (mut connection, hello) = match result {
                Ok(accepted) => accepted,
                Err(why) => {
                    let why = if is_open { &why } else { TOO_MANY };
                    meeting.report_refusal(&format!("a connection from {address}"), address.ip(), why);
                    continue;
                }
            };
            let process = hello.process as usize;
            let why = match hello.check_matches(own_hello) {
                Ok(()) if missing.remove(&process) => {
                    // The others may take longer than the handshake.
                    connection.reader.source().renew(meeting.remaining());
                    match connection.send_frame(Kind::Welcome, &[]) {
                        Ok(()) => _ = accepted.insert(process, (connection, hello)),
                        Err(_) => _ = missing.insert(process),
                    }
                    continue;
                }
                Ok(()) => {
                    format!("{} is already connected or was not expected", meeting.names[process])
                }
                Err(why) => why,
            };
            connection.refuse(&why);
            meeting.report_refusal(&format!("process {} at {address}", hello.pid), address.ip(), &why);
        }
        thread::sleep(POLL_INTERVAL);
    };
    let why = error.to_string();
    accepted.values_mut().for_each(|(connection, _)| connection.refuse(&why));
    Err(error)
}
