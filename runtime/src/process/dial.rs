//! Connects to another process of the run.
//!
//! What listens at an address may be a stranger. A process believes nothing before the other one has authenticated, and
//! tries again until it is the right one or no time is left.

use crate::comm::members::encode;
use crate::process::authentication;
use crate::process::connection::{NO_DATA, Stream};
use crate::process::frame::{FrameError, Kind};
use crate::process::handshake::{HandshakeConnection, Hello};
use crate::process::meeting::{HANDSHAKE_TIME, Meeting};
use crate::process::run_status::LinkError;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

/// Interval between connection attempts.
const RETRY: Duration = Duration::from_millis(50);
/// Interval after a connection to a process that did not authenticate.
const RETRY_AFTER_REFUSAL: Duration = Duration::from_millis(500);
/// Timeout of one connection attempt.
const ATTEMPT: Duration = Duration::from_secs(1);

/// Connects to a process that has the number `expected`, and is welcomed by it. `hello` makes the hello of this process
/// with the address of its end of the connection.
pub fn dial(
    meeting: &Meeting<'_>,
    address: &str,
    expected: usize,
    hello: &mut dyn FnMut(SocketAddr) -> Result<Hello, LinkError>,
) -> Result<HandshakeConnection, LinkError> {
    let seconds = meeting.config.connect_timeout.as_secs_f64();
    let mut why = "no time is left".to_string();
    let (mut refused, mut is_reported) = (None, false);
    let start = Instant::now();
    let target = || {
        if address == meeting.config.first_address { format!("process 0 at {address}") } else { address.to_string() }
    };
    loop {
        meeting.report_missing(start, &mut is_reported, target);
        if let Some(cause) = meeting.run_status.cause() {
            return Err(cause);
        }
        let remaining = meeting.remaining();
        if remaining.is_zero() {
            let address = address.to_string();
            return Err(match refused {
                Some(why) => LinkError::Unproved { address, seconds, why },
                None => LinkError::Unreachable { address, seconds, why },
            });
        }
        let delay = match connect(address, remaining.min(ATTEMPT)) {
            Ok((_, _, peer)) if !meeting.config.token.permits(peer.ip()) => {
                return Err(LinkError::Exposed { address: address.to_string() });
            }
            Ok((stream, local_address, peer)) => {
                let refusal = match authenticate(meeting, stream, peer.ip(), expected)? {
                    Ok(connection) => match introduce(meeting, connection, address, &hello(local_address)?) {
                        // The process ended, or had too many connections.
                        Err(LinkError::Foreign { fault: refusal, .. }) if is_lost(&refusal) => refusal.to_string(),
                        result => return result,
                    },
                    Err(refusal) => refusal,
                };
                meeting.report_refusal(&format!("what listens at {address}"), peer.ip(), &refusal);
                refused = Some(refusal);
                RETRY_AFTER_REFUSAL
            }
            Err(error) if error.kind() == ErrorKind::InvalidInput => {
                return Err(LinkError::Address { address: address.to_string(), why: error.to_string() });
            }
            Err(error) => {
                why = error.to_string();
                RETRY
            }
        };
        thread::sleep(delay.min(meeting.remaining()));
    }
}

/// True if the connection has ended.
pub fn is_lost(fault: &FrameError) -> bool {
    match fault {
        FrameError::Closed | FrameError::Cut => true,
        FrameError::System { kind, .. } => *kind != NO_DATA,
        _ => false,
    }
}

/// Authenticates with the other end, or says why that failed.
fn authenticate(
    meeting: &Meeting<'_>,
    stream: TcpStream,
    peer: IpAddr,
    expected: usize,
) -> Result<Result<HandshakeConnection, String>, LinkError> {
    let stream = match Stream::tcp(stream) {
        Ok(stream) => stream,
        Err(error) => return Ok(Err(error.to_string())),
    };
    let within = meeting.remaining().min(HANDSHAKE_TIME);
    let mut connection = meeting.connection(stream, within);
    connection.reader.source().end_at(Instant::now() + within);
    let challenge = meeting.challenge(authentication::is_exposed(peer))?;
    let outcome = authentication::connect(&mut connection, &meeting.config.token, &challenge, expected);
    Ok(outcome.map(|()| {
        connection.reader.source().renew(meeting.remaining());
        connection
    }))
}

/// Sends a hello to an authenticated process and waits for the welcome.
pub fn introduce(
    meeting: &Meeting<'_>,
    mut connection: HandshakeConnection,
    address: &str,
    hello: &Hello,
) -> Result<HandshakeConnection, LinkError> {
    let foreign = |fault| meeting.run_failure_or(LinkError::Foreign { address: address.to_string(), fault });
    connection.send_frame(Kind::Hello, &encode(hello)).map_err(foreign)?;
    match connection.expect(Kind::Welcome).map_err(foreign)? {
        Ok(_) => Ok(connection),
        Err(why) => Err(LinkError::Refused { address: address.to_string(), why }),
    }
}

/// A connection, with the addresses of this and the other end.
fn connect(address: &str, within: Duration) -> io::Result<(TcpStream, SocketAddr, SocketAddr)> {
    let mut last_error = io::Error::new(ErrorKind::NotFound, "the name has no address");
    for address in address.to_socket_addrs()? {
        let connected = TcpStream::connect_timeout(&address, within)
            .and_then(|stream| Ok((stream.local_addr()?, stream.peer_addr()?, stream)));
        match connected {
            // The system may assign the target port to the connecting socket itself, if no process listens there.
            Ok((local, remote, _)) if local == remote => {
                last_error = io::Error::new(ErrorKind::ConnectionRefused, "no process listens there");
            }
            Ok((local, remote, stream)) => return Ok((stream, local, remote)),
            Err(error) => last_error = error,
        }
    }
    Err(last_error)
}
