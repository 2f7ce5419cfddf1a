//! Measures the connections between hosts, with the frames and sockets that training uses.
//!
//! One process of every host takes part. Process 0 names one pair after another, so that measurements do not disturb each
//! other. The sender of a pair measures round trips of small frames, then the time until the receiver has confirmed
//! more and more large ones.
//!
//! ```text
//! process 0 ──receive from 1──▶ process 2
//! process 0 ──send to 2───────▶ process 1 ──frames──▶ process 2
//!           ◀──result──────────
//! ```

use runtime::comm::members::encode;
use runtime::process::fields::decode;
use runtime::process::frame::{FrameError, Kind};
use runtime::process::handshake::HandshakeConnection;
use runtime::process::process_group::Connections;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Content of a large frame, in bytes.
const CHUNK: usize = 1 << 18;
/// Maximum number of large frames in one measurement.
const MOST_CHUNKS: u32 = 1 << 12;
/// A measurement that takes as long as this counts: it exceeds the burst that a network accepts at once.
const LONG: Duration = Duration::from_millis(500);
/// Round trips; the median counts.
const ROUNDS: usize = 101;
/// Content of a small frame, in bytes.
const SMALL: usize = 8;
/// Maximum silence of another process, which may wait for its turn.
const PATIENCE: Duration = Duration::from_secs(600);
/// With more processes, only neighbours are measured, not all pairs.
const MOST_ALL: usize = 8;

/// The commands of process 0.
const END: u32 = 0;
const SEND: u32 = 1;
const RECEIVE: u32 = 2;

/// A measured direction of a connection.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HostLink {
    pub from: usize,
    pub to: usize,
    pub bytes_per_s: f64,
    /// Half of a round trip.
    pub seconds: f64,
}

/// The connection to a process failed during a measurement.
#[derive(Clone, Debug)]
pub struct LinkFault {
    pub process: usize,
    pub fault: FrameError,
}

/// The pairs that are measured, the lower first.
pub fn pairs(processes: usize) -> BTreeSet<(usize, usize)> {
    let candidates = (0..processes).flat_map(|lower| (lower + 1..processes).map(move |higher| (lower, higher)));
    let is_measured = |(lower, higher): &(usize, usize)| {
        processes <= MOST_ALL || higher - lower == 1 || (*lower, *higher) == (0, processes - 1)
    };
    candidates.filter(is_measured).collect()
}

/// Measures the [`pairs`] in both directions. `connections` connects each pair, and process 0 with all. Only process 0 gets the
/// results.
pub fn measure(connections: &mut Connections, process: usize, processes: usize) -> Result<Vec<HostLink>, LinkFault> {
    connections.values_mut().for_each(|connection| connection.reader.source().renew(PATIENCE));
    match process {
        0 => lead(connections, processes),
        _ => follow(connections, process).map(|()| Vec::new()),
    }
}

fn lead(connections: &mut Connections, processes: usize) -> Result<Vec<HostLink>, LinkFault> {
    let directions = pairs(processes).into_iter().flat_map(|(lower, higher)| [(lower, higher), (higher, lower)]);
    let mut links = Vec::new();
    for (from, to) in directions {
        if to > 0 {
            with_connection(connections, to, |connection| send_command(connection, RECEIVE, from))?;
        }
        let (bytes_per_s, seconds) = match from {
            0 => with_connection(connections, to, send)?,
            _ => {
                with_connection(connections, from, |connection| send_command(connection, SEND, to))?;
                if to == 0 {
                    with_connection(connections, from, receive)?;
                }
                with_connection(connections, from, |connection| {
                    let content = receive_frame(connection, Kind::Loss)?;
                    decode(&content, "the bandwidth and the latency")
                })?
            }
        };
        links.push(HostLink { from, to, bytes_per_s, seconds });
    }
    (1..processes)
        .try_for_each(|process| with_connection(connections, process, |connection| send_command(connection, END, 0)))?;
    Ok(links)
}

/// Carries out the commands of process 0.
fn follow(connections: &mut Connections, process: usize) -> Result<(), LinkFault> {
    loop {
        let (code, peer) = with_connection(connections, 0, |connection| {
            let content = receive_frame(connection, Kind::Message)?;
            decode::<(u32, usize)>(&content, "the command")
        })?;
        match code {
            END => return Ok(()),
            RECEIVE if peer != process => with_connection(connections, peer, receive)?,
            SEND if peer != process => {
                let content = encode(&with_connection(connections, peer, send)?);
                with_connection(connections, 0, |connection| connection.send_frame(Kind::Loss, &content))?;
            }
            _ => return Err(LinkFault { process: 0, fault: FrameError::Field { what: "the command" } }),
        }
    }
}

fn with_connection<T>(
    connections: &mut Connections,
    process: usize,
    step: impl FnOnce(&mut HandshakeConnection) -> Result<T, FrameError>,
) -> Result<T, LinkFault> {
    let link_fault = |fault| LinkFault { process, fault };
    step(connections.get_mut(&process).ok_or(link_fault(FrameError::Field { what: "the process" }))?)
        .map_err(link_fault)
}

fn send_command(connection: &mut HandshakeConnection, code: u32, process: usize) -> Result<(), FrameError> {
    connection.send_frame(Kind::Message, &encode(&(code, process)))
}

fn receive_frame(connection: &mut HandshakeConnection, kind: Kind) -> Result<Vec<u8>, FrameError> {
    connection.expect(kind)?.map_err(|_| FrameError::Unexpected { kind: Kind::Refusal })
}

/// Bandwidth in bytes per second and latency in seconds of the way to a process that [`receive`]s.
fn send(connection: &mut HandshakeConnection) -> Result<(f64, f64), FrameError> {
    let mut rounds = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let start = Instant::now();
        connection.send_frame(Kind::Part, &[0; SMALL])?;
        receive_frame(connection, Kind::Posted)?;
        rounds.push(start.elapsed().as_secs_f64());
    }
    rounds.sort_by(f64::total_cmp);
    let chunk = vec![0x5a; CHUNK];
    let mut chunks = 1;
    let seconds = loop {
        let start = Instant::now();
        (0..chunks).try_for_each(|_| connection.send_frame(Kind::Tensor, &chunk))?;
        connection.send_frame(Kind::Part, &[0; SMALL])?;
        receive_frame(connection, Kind::Posted)?;
        let elapsed = start.elapsed();
        if elapsed >= LONG || chunks >= MOST_CHUNKS {
            break elapsed.as_secs_f64();
        }
        chunks *= 2;
    };
    connection.send_frame(Kind::Bye, &[])?;
    Ok(((CHUNK as f64 * f64::from(chunks)) / seconds.max(1e-9), rounds[ROUNDS / 2] / 2.0))
}

/// Confirms small frames until the sender has finished.
fn receive(connection: &mut HandshakeConnection) -> Result<(), FrameError> {
    loop {
        match connection.reader.read(CHUNK as u64)? {
            (Kind::Tensor, _) => {}
            (Kind::Part, _) => connection.send_frame(Kind::Posted, &[])?,
            (Kind::Bye, _) => return Ok(()),
            (kind, _) => return Err(FrameError::Unexpected { kind }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use runtime::process::connection::{DeadlineReader, Stream};
    use runtime::process::frame::{FrameReader, FrameWriter};
    use std::collections::BTreeMap;
    use std::io::{self, Read, Write};
    use std::net::{TcpListener, TcpStream};

    /// The rate of the slow connection, in bytes per second.
    const SLOW: f64 = 20e6;

    fn connection(stream: TcpStream) -> HandshakeConnection {
        let Stream { reader, writer, hangup } = Stream::tcp(stream).unwrap();
        let reader = DeadlineReader::new(reader, PATIENCE, Box::new(|| false));
        HandshakeConnection { reader: FrameReader::new(reader), writer: FrameWriter::new(writer), hangup }
    }

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (stream, listener.accept().unwrap().0)
    }

    /// Passes bytes on at [`SLOW`].
    fn throttle(mut from: TcpStream, mut to: TcpStream) {
        let mut bytes = [0; 1 << 14];
        let (start, mut sent) = (Instant::now(), 0);
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            sent += count;
            let target = Duration::from_secs_f64(sent as f64 / SLOW);
            std::thread::sleep(target.saturating_sub(start.elapsed()));
            if to.write_all(&bytes[..count]).is_err() {
                break;
            }
        }
        let _: io::Result<()> = to.shutdown(std::net::Shutdown::Write);
    }

    #[test]
    fn few_processes_are_all_measured() {
        assert_eq!(pairs(3), BTreeSet::from([(0, 1), (0, 2), (1, 2)]));
        assert_eq!(pairs(8).len(), 28);
        assert_eq!(pairs(9).len(), 9);
    }

    #[test]
    fn a_slow_connection_is_measured_as_slow() {
        let ((first, near), (far, second)) = (pair(), pair());
        let reverse = (far.try_clone().unwrap(), near.try_clone().unwrap());
        std::thread::spawn(move || throttle(near, far));
        std::thread::spawn(move || throttle(reverse.0, reverse.1));
        let follower =
            std::thread::spawn(move || measure(&mut BTreeMap::from([(0, connection(second))]), 1, 2).unwrap());
        let links = measure(&mut BTreeMap::from([(1, connection(first))]), 0, 2).unwrap();
        assert_eq!(follower.join().unwrap(), []);
        assert_eq!(links.iter().map(|link| (link.from, link.to)).collect::<Vec<_>>(), [(0, 1), (1, 0)]);
        for link in links {
            // A busy machine is slower still.
            assert!((0.15 * SLOW..1.3 * SLOW).contains(&link.bytes_per_s) && link.seconds > 0.0, "{link:?}");
        }
    }
}
