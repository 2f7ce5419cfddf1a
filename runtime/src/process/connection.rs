//! A connection to another process: a thread that writes a queue, and a reader with a deadline.
//!
//! A worker queues and does not wait for the connection, except for the last chunks of an all-reduce. The program bounds the
//! queue. The writer sends a heartbeat every second. The reader gives up when nothing has arrived within the deadline,
//! or when the run is over.

use crate::comm::members::encode;
use crate::device::buffer::Buffer;
use crate::device::error::DeviceError;
use crate::device::tensor_link::TensorLink;
use crate::process::encryption::{Cipher, DecryptingReader};
use crate::process::frame::{FrameWriter, Kind};
use crossbeam_channel::{Receiver, RecvTimeoutError};
use serde::Serialize;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub const BEAT: Duration = Duration::from_secs(1);

/// Interval at which a blocked reader checks its deadline.
pub const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// A gap between two checks longer than this means that this process itself was suspended.
const SUSPENSION: Duration = Duration::from_secs(1);

/// A transport-independent connection. Reads fail with `WouldBlock` or `TimedOut` when nothing has arrived for
/// [`POLL_INTERVAL`].
pub struct Stream {
    pub reader: Box<dyn Read + Send>,
    pub writer: Box<dyn Write + Send>,
    /// Closes both directions, which ends blocked reads and writes.
    pub hangup: Hangup,
}

pub type Hangup = Box<dyn Fn() + Send>;

impl Stream {
    /// Wraps a TCP connection.
    pub fn tcp(stream: TcpStream) -> io::Result<Stream> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(POLL_INTERVAL))?;
        let (reader, writer) = (stream.try_clone()?, stream.try_clone()?);
        Ok(Stream { reader: Box::new(reader), writer: Box::new(writer), hangup: Box::new(move || close(&stream)) })
    }
}

/// A frame to send.
#[derive(Clone)]
pub struct Outbound {
    pub kind: Kind,
    /// Start of the content.
    pub head: Vec<u8>,
    /// Rest of the content.
    pub bodies: Vec<Arc<Buffer>>,
}

impl Outbound {
    /// A frame without tensors.
    pub fn of(kind: Kind, value: &impl Serialize) -> Outbound {
        Outbound { kind, head: encode(value), bodies: Vec::new() }
    }
}

/// Writes queued frames, and a heartbeat from `beat` every second. With a link, tensors of a device go over it, and
/// frames that may hold tensors begin with a byte that says so. Returns when the senders are dropped, after the last
/// frame, or if the peer is gone, which the reader of the connection will notice. Fails if a device does.
pub fn write(
    mut to: FrameWriter<Box<dyn Write + Send>>,
    queue: &Receiver<Outbound>,
    beat: &dyn Fn() -> Vec<u8>,
    link: Option<&dyn TensorLink>,
) -> Result<(), DeviceError> {
    let mut next = Instant::now();
    loop {
        let timeout = next.saturating_duration_since(Instant::now());
        let frame = match queue.recv_timeout(timeout) {
            Ok(frame) => Some(frame),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        };
        if let Some(frame) = &frame {
            let link = link.filter(|_| matches!(frame.kind, Kind::Message | Kind::Part));
            let frame_link = link.filter(|_| frame.bodies.iter().all(|buffer| !buffer.is_host()));
            let buffers = if frame_link.is_some() { &[] } else { &frame.bodies[..] };
            let bodies = buffers.iter().map(|buffer| buffer.download()).collect::<Result<Vec<_>, _>>()?;
            let link_flag: &[u8] = match (link, frame_link) {
                (None, _) => &[],
                (_, None) => &[0],
                (_, Some(_)) => &[1],
            };
            let parts = [link_flag, &frame.head[..]].into_iter().chain(bodies.iter().map(|body| &**body));
            let parts: Vec<&[u8]> = parts.collect();
            let is_last = matches!(frame.kind, Kind::Abort | Kind::Bye);
            // Before the frame: its reader may answer, and a transfer queued after what a worker does with the answer
            // would wait for that, and so for itself.
            if let Some(link) = frame_link {
                frame.bodies.iter().try_for_each(|buffer| link.send(buffer))?;
            }
            if to.write(frame.kind, &parts).is_err() || is_last {
                return Ok(());
            }
        }
        // Its tensors are free now. Their memory may be overwritten by the answer of the reader, which waits for this.
        drop(frame);
        if Instant::now() >= next {
            if to.write(Kind::Heartbeat, &[&beat()]).is_err() {
                return Ok(());
            }
            // A failure of this device may hold up the other process, and this one in turn, before a worker sees it.
            link.map_or(Ok(()), TensorLink::check)?;
            next = Instant::now() + BEAT;
        }
    }
}

/// A reader that retries timeouts until its deadline or the end of the run.
pub struct DeadlineReader {
    stream: Box<dyn Read + Send>,
    last_received: Instant,
    last_checked: Instant,
    deadline: Duration,
    end: Option<Instant>,
    is_over: Box<dyn Fn() -> bool + Send>,
}

/// Error kind of a read that ended because the run is over.
pub const RUN_OVER: ErrorKind = ErrorKind::ConnectionAborted;
/// Error kind of a read that ended because nothing arrived in time.
pub const NO_DATA: ErrorKind = ErrorKind::TimedOut;

impl DeadlineReader {
    /// `deadline` counts from the last received bytes. `is_over` ends blocked reads.
    pub fn new(
        stream: Box<dyn Read + Send>,
        deadline: Duration,
        is_over: Box<dyn Fn() -> bool + Send>,
    ) -> DeadlineReader {
        let now = Instant::now();
        DeadlineReader { stream, last_received: now, last_checked: now, deadline, end: None, is_over }
    }

    /// Decrypts what arrives from now on.
    pub fn decrypt(&mut self, cipher: &Cipher) {
        let stream = std::mem::replace(&mut self.stream, Box::new(io::empty()));
        self.stream = Box::new(DecryptingReader::new(stream, cipher.clone()));
    }

    /// Restarts the wait with a new deadline.
    pub fn renew(&mut self, deadline: Duration) {
        let now = Instant::now();
        (self.last_received, self.last_checked, self.deadline, self.end) = (now, now, deadline, None);
    }

    /// Sets an absolute time limit, which received bytes do not extend.
    pub fn end_at(&mut self, end: Instant) {
        self.end = Some(end);
    }

    /// Updates the clock. Time in which this process was suspended does not count as silence of the peer.
    fn update_clock(&mut self) {
        let now = Instant::now();
        let gap = now.duration_since(self.last_checked);
        if gap > SUSPENSION {
            self.last_received = (self.last_received + gap).min(now);
        }
        self.last_checked = now;
    }

    /// Time since the last received bytes.
    pub fn silence(&self) -> Duration {
        self.last_received.elapsed()
    }
}

impl Read for DeadlineReader {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.stream.read(bytes) {
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    if (self.is_over)() {
                        return Err(io::Error::new(RUN_OVER, "the run is over"));
                    }
                    self.update_clock();
                    if self.last_received.elapsed() > self.deadline
                        || self.end.is_some_and(|end| self.last_checked > end)
                    {
                        return Err(io::Error::new(NO_DATA, "no data arrives"));
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
                Ok(count) => {
                    self.last_received = Instant::now();
                    self.last_checked = self.last_received;
                    if self.end.is_some_and(|end| self.last_received > end) {
                        return Err(io::Error::new(NO_DATA, "it takes too long"));
                    }
                    return Ok(count);
                }
            }
        }
    }
}

/// Closes both directions, which ends blocked reads and writes.
pub fn close(stream: &TcpStream) {
    let _ = stream.shutdown(Shutdown::Both);
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::device::sanitizer::device::sanitizer;
    use crate::device::tensor_link::Role;
    use crate::process::frame::{FrameError, FrameReader};
    use std::net::TcpListener;
    use std::sync::Mutex;

    pub fn pair() -> (Stream, Stream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (Stream::tcp(stream).unwrap(), Stream::tcp(listener.accept().unwrap().0).unwrap())
    }

    #[test]
    fn heartbeats_go_out_while_nothing_is_queued() {
        let (local, remote) = pair();
        // The connection closes when the last handle is dropped.
        let Stream { reader, writer, hangup } = local;
        drop((reader, hangup));
        let (sender, queue) = crossbeam_channel::unbounded();
        let writer = std::thread::spawn(move || write(FrameWriter::new(writer), &queue, &|| vec![9], None));
        let mut reader =
            FrameReader::new(DeadlineReader::new(remote.reader, Duration::from_secs(5), Box::new(|| false)));
        assert_eq!(reader.read(9), Ok((Kind::Heartbeat, &[9][..])));
        assert_eq!(reader.read(9), Ok((Kind::Heartbeat, &[9][..])));
        sender
            .send(Outbound { kind: Kind::Bye, head: vec![1], bodies: vec![Arc::new(Buffer::host_copy(&[2, 3]))] })
            .unwrap();
        assert_eq!(reader.read(9), Ok((Kind::Bye, &[1, 2, 3][..])));
        writer.join().unwrap().unwrap();
        assert_eq!(reader.read(9), Err(FrameError::Closed));
    }

    /// A log of what happens, as a link and as a connection.
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<&'static str>>>);

    impl Log {
        fn add(&self, entry: &'static str) {
            self.0.lock().unwrap().push(entry);
        }
    }

    impl Write for Log {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.add("frame");
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl TensorLink for Log {
        fn send(&self, _: &Buffer) -> Result<(), DeviceError> {
            self.add("tensor");
            Ok(())
        }

        fn receive(&self, bytes: usize, _: usize, _: Role) -> Result<Arc<Buffer>, DeviceError> {
            Ok(Arc::new(Buffer::host(bytes)))
        }

        fn check(&self) -> Result<(), DeviceError> {
            Ok(())
        }

        fn abort(&self) {}
    }

    /// A transfer waits for what its buffer was last used for, so it is queued before the peer can answer.
    #[test]
    fn tensors_are_queued_before_their_frame() {
        let log = Log::default();
        let (to, queue) = crossbeam_channel::unbounded();
        let bodies = vec![Arc::new(sanitizer().allocate(8).unwrap())];
        to.send(Outbound { kind: Kind::Message, head: vec![1], bodies }).unwrap();
        to.send(Outbound::of(Kind::Bye, &())).unwrap();
        write(FrameWriter::new(Box::new(log.clone())), &queue, &Vec::new, Some(&log)).unwrap();
        assert_eq!(log.0.lock().unwrap()[..2], ["tensor", "frame"]);
    }

    #[test]
    fn waits_end() {
        let kind = |is_over: bool| {
            let (_one, remote) = pair();
            let mut reader = DeadlineReader::new(remote.reader, Duration::from_millis(150), Box::new(move || is_over));
            reader.read(&mut [0; 4]).unwrap_err().kind()
        };
        assert_eq!((kind(false), kind(true)), (NO_DATA, RUN_OVER));
    }

    #[test]
    fn who_was_stopped_itself_does_not_blame_others() {
        let (_one, remote) = pair();
        let mut reader = DeadlineReader::new(remote.reader, Duration::from_secs(2), Box::new(|| false));
        let Some(past) = Instant::now().checked_sub(Duration::from_secs(9)) else { return };
        (reader.last_received, reader.last_checked) = (past, past);
        reader.update_clock();
        assert!(reader.silence() < Duration::from_secs(1));
        // With regular checks, silence of the peer is detected.
        reader.last_received = past;
        reader.update_clock();
        assert!(reader.silence() > Duration::from_secs(8));
    }

    #[test]
    fn a_byte_now_and_then_buys_no_time() {
        let (mut local, remote) = pair();
        let drip = std::thread::spawn(move || {
            while local.writer.write_all(&[1]).is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let mut reader = DeadlineReader::new(remote.reader, Duration::from_secs(5), Box::new(|| false));
        let began = Instant::now();
        reader.end_at(began + Duration::from_millis(300));
        let kind = loop {
            if let Err(error) = reader.read(&mut [0; 1]) {
                break error.kind();
            }
        };
        assert_eq!(kind, NO_DATA);
        assert!(began.elapsed() < Duration::from_secs(3));
        (remote.hangup)();
        drop(reader);
        drip.join().unwrap();
    }
}
